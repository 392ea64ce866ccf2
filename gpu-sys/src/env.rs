//! The `METRALE_*` variables: one table, and the only place that reads the environment.
//!
//! Every variable `METRALE_X_Y` has a flag `--x-y`, which wins over it. An empty variable is an
//! unset one.

use std::ffi::OsString;
use std::fmt::Display;
use std::str::FromStr;

/// One setting that can come from the environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variable {
    /// The variable's name.
    pub name: &'static str,
    /// What holds when neither variable nor flag is given.
    pub default: &'static str,
    /// The value's unit or form.
    pub unit: &'static str,
    /// What it sets, and what it trades.
    pub help: &'static str,
}

macro_rules! variables {
    ($($(#[$doc:meta])* $id:ident: $default:literal, $unit:literal, $help:literal;)*) => {
        $(
            #[doc = $help]
            pub const $id: Variable = Variable {
                name: concat!("METRALE_", stringify!($id)),
                default: $default,
                unit: $unit,
                help: $help,
            };
        )*
        /// Every variable, in the order of the documentation.
        pub const TABLE: &[Variable] = &[$($id),*];
    };
}

variables! {
    EXPERT_BACKEND: "uma", "uma, posix, rdma, rdma-verbs",
        "Where experts come from: a local store, or a peer.";
    EXPERT_STORE: "none", "directory",
        "The store of the local backends and of the peer.";
    EXPERT_PEER: "none", "HOST:PORT",
        "The peer of the remote backends.";
    EXPERT_FALLBACK: "none", "tcp, posix, uma, with commas between them",
        "Other ways, tried in this order while the backend has none left, and told in the log; a \
         local one needs a copy of the same store.";
    EXPERT_SECRET_FILE: "none", "file",
        "Holds the secret that client and peer prove to each other; 16 to 4096 bytes before its line \
         end.";
    EXPERT_FINGERPRINT: "any store", "64 hex digits",
        "The store that the peer must serve; any other is refused before a weight moves.";
    EXPERT_STREAMS: "2", "connections, 1-16",
        "TCP connections to the peer: more use more cores at both ends.";
    EXPERT_DEPTH: "16", "requests, 1-512",
        "Requests in flight per connection: more hide latency, and hold more slots at once.";
    EXPERT_DEADLINE_MS: "2000", "ms, 1-600000",
        "Longest time in which a disk or rail brings nothing, or a TCP connection no whole record, \
         before what waits for it fails: shorter finds a dead one sooner, and gives up on one that \
         pauses.";
    EXPERT_TOTAL_MS: "30000", "ms, 1-3600000",
        "Longest time from asking a disk or peer for the first byte of a record to the end of its \
         request. Waiting behind others before that costs no request its time, while records come.";
    EXPERT_CONNECT_MS: "1000", "ms, 1-600000",
        "Longest time to look up the peer's address, connect and shake hands.";
    EXPERT_ATTEMPTS: "3", "sends, 1-100",
        "How often one request is sent before it fails.";
    EXPERT_CHECK_THREADS: "a quarter of the cores, at most 4", "threads, 0-64",
        "Threads that check what has arrived while more arrives; 0 checks on the receiving thread, \
         which is faster where both ends share two cores.";
    EXPERT_ARENA_BYTES: "what the records asked for need, at most 256 MiB and what the locked-memory \
                         limit leaves", "bytes, or 512MiB, 2G",
        "Pinned memory for fetched records: limits how many are held at once; at least one record.";
    EXPERT_HUGE_PAGES: "auto", "auto, off",
        "Whether the arena uses 2 MiB pages: fewer TLB misses and shorter registration.";
    EXPERT_NUMA_NODE: "the kernel's choice", "node number",
        "The memory node of the arena: the one nearest to the GPU or NIC.";
    EXPERT_UMA_DEPTH: "64", "reads, 1-4096",
        "Direct reads in flight at once: more keep a fast disk busy, and delay each other.";
    EXPERT_UMA_PIECE_BYTES: "524288", "bytes, 4096-16777216 in steps of 4096",
        "Bytes of one direct read: smaller ones are checked sooner, larger ones cost less each.";
    EXPERT_RDMA_DEV: "chosen", "device or network interface",
        "The device of the first rail; unset, one whose port is active and has an address that \
         reaches the peer.";
    EXPERT_RDMA_GID: "chosen", "GID index, 0-255",
        "The first rail's row of its port's GID table; unset, a routable RoCEv2 one of the \
         peer's family, preferring the route's own address.";
    EXPERT_QUEUE_PAIRS: "2", "queue pairs, 1-16",
        "Queue pairs per rail: one has at most its device's max_rd_atomic READs outstanding, often 16, \
         which a fast rail does not notice.";
    EXPERT_QUEUE_PAIR_DEPTH: "64", "READs, 1-4096",
        "READs queued per queue pair: those behind the outstanding ones begin without a look at the \
         queue by the processor.";
    EXPERT_DRAIN_MS: "1000", "ms, 1-60000",
        "Longest wait for what flies on a rail that broke, before its queue pairs are destroyed.";
    EXPERT_DUAL_RAIL: "as many as both sides have", "1 for two, 0 for one",
        "How many rails: with 1 a client that cannot have two does not start.";
    EXPERT_RAIL2_DEV: "chosen", "device or network interface",
        "The device of the second rail; naming it asks for two rails.";
    EXPERT_RAIL2_GID: "chosen", "GID index, 0-255",
        "The second rail's row of its port's GID table; naming it asks for two rails.";
    REQUIRE_RAILS: "0", "1 or 0",
        "With 1 a peer that can serve no rail does not start; with 0 it serves over TCP and offers \
         rails when there are some.";
}

/// A variable whose value cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{name}={value:?}: {reason}; it takes {unit}")]
pub struct EnvError {
    /// The variable.
    pub name: &'static str,
    /// Its value, shortened.
    pub value: String,
    /// What is wrong with it.
    pub reason: String,
    /// What it takes.
    pub unit: &'static str,
}

impl Variable {
    /// The flag that sets the same, without its dashes.
    #[must_use]
    pub fn flag(&self) -> String {
        self.name.trim_start_matches("METRALE_").to_ascii_lowercase().replace('_', "-")
    }

    /// The value in the environment, if the variable is set and not empty.
    ///
    /// # Errors
    /// The value is not UTF-8 or not of the wanted type.
    pub fn read<T>(&self) -> Result<Option<T>, EnvError>
    where
        T: FromStr,
        T::Err: Display,
    {
        self.parse(std::env::var_os(self.name))
    }

    fn parse<T>(&self, value: Option<OsString>) -> Result<Option<T>, EnvError>
    where
        T: FromStr,
        T::Err: Display,
    {
        let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(None) };
        let shown = value.to_string_lossy().chars().take(64).collect();
        let error = |reason| EnvError { name: self.name, value: shown, reason, unit: self.unit };
        match value.to_str().map(str::parse) {
            Some(Ok(parsed)) => Ok(Some(parsed)),
            Some(Err(reason)) => Err(error(reason.to_string())),
            None => Err(error("not UTF-8".into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_follow_from_names() {
        assert_eq!(EXPERT_DEADLINE_MS.name, "METRALE_EXPERT_DEADLINE_MS");
        assert_eq!(EXPERT_DEADLINE_MS.flag(), "expert-deadline-ms");
    }

    #[test]
    fn an_empty_variable_is_an_unset_one() {
        assert_eq!(EXPERT_DEPTH.parse::<u32>(Some("".into())), Ok(None));
        assert_eq!(EXPERT_DEPTH.parse::<u32>(None), Ok(None));
        assert_eq!(EXPERT_DEPTH.parse(Some("7".into())), Ok(Some(7_u32)));
    }

    #[test]
    fn a_bad_value_names_variable_value_and_unit() {
        let error = EXPERT_DEPTH.parse::<u32>(Some("many".into())).unwrap_err().to_string();
        for part in ["METRALE_EXPERT_DEPTH", "many", "requests, 1-512"] {
            assert!(error.contains(part), "{error}");
        }
    }
}
