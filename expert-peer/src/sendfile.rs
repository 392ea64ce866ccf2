//! Whether records go out by `sendfile`, and whose failure a failed one is.
//!
//! `sendfile` reports what the file and what the socket did through one number. Only an error of
//! the file is one of the store: everything that is not known as such is the network's.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use expert_tier::store::StoreError;
use metrics::{Counter, counter};
use rustix::io::Errno;

/// What a peer knows of `sendfile` on its store's file system.
pub(crate) struct Sendfile {
    refused: AtomicBool,
    fallbacks: Counter,
}

/// Whose failure it is.
#[derive(Debug)]
pub(crate) enum Whose {
    /// The file system or kernel has no `sendfile` for these files.
    Sendfile,
    /// The client has gone.
    Client,
    /// Nobody's: the socket has no room at the moment.
    NoRoom,
    /// The connection failed.
    Network(io::Error),
    /// The store cannot be read.
    Store,
}

impl Sendfile {
    pub(crate) fn new() -> Self {
        let fallbacks = counter!("metrale_peer_fallbacks_total", "from" => "sendfile");
        Self { refused: AtomicBool::new(false), fallbacks }
    }

    /// Whether records go through a buffer instead.
    pub(crate) fn is_refused(&self) -> bool {
        self.refused.load(Ordering::Relaxed)
    }

    /// Sends every record through a buffer from here on; said and counted once.
    pub(crate) fn refuse(&self, error: &StoreError) {
        if !self.refused.swap(true, Ordering::Relaxed) {
            self.fallbacks.increment(1);
            tracing::warn!(%error, "no sendfile from this store: records are copied on their way");
        }
    }
}

/// Whose failure `error`, of a `sendfile` from the store to a client, is.
pub(crate) fn whose(error: &StoreError) -> Whose {
    let StoreError::Io { source, .. } = error else { return Whose::Store };
    let Some(code) = source.raw_os_error() else { return Whose::Store };
    match Errno::from_raw_os_error(code) {
        Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP => Whose::Sendfile,
        Errno::PIPE | Errno::CONNRESET => Whose::Client,
        Errno::AGAIN => Whose::NoRoom,
        // Disks that fail, file systems that find themselves damaged (EUCLEAN, EBADMSG), network
        // file systems whose server has lost or denies the file.
        Errno::IO
        | Errno::STALE
        | Errno::UCLEAN
        | Errno::BADMSG
        | Errno::NXIO
        | Errno::NODEV
        | Errno::REMOTEIO
        | Errno::NODATA
        | Errno::NOLINK
        | Errno::NOMEDIUM
        | Errno::ACCESS
        | Errno::PERM
        | Errno::BADF
        | Errno::OVERFLOW => Whose::Store,
        _ => Whose::Network(io::Error::from_raw_os_error(code)),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn failed(errno: Errno) -> StoreError {
        let path = PathBuf::from("layer-00000.records");
        StoreError::Io { action: "read", path, source: errno.into() }
    }

    #[test]
    fn an_error_of_the_network_is_none_of_the_store() {
        for errno in [
            Errno::TIMEDOUT,
            Errno::HOSTUNREACH,
            Errno::NETUNREACH,
            Errno::NETDOWN,
            Errno::CONNABORTED,
            Errno::NOTCONN,
            Errno::NOBUFS,
        ] {
            assert!(matches!(whose(&failed(errno)), Whose::Network(_)), "{errno}");
        }
        assert!(matches!(whose(&failed(Errno::PIPE)), Whose::Client));
        assert!(matches!(whose(&failed(Errno::AGAIN)), Whose::NoRoom));
    }

    #[test]
    fn an_error_of_the_disk_is_one_of_the_store() {
        for errno in [Errno::IO, Errno::STALE, Errno::UCLEAN, Errno::BADMSG] {
            assert!(matches!(whose(&failed(errno)), Whose::Store), "{errno}");
        }
    }

    #[test]
    fn a_refusal_holds_for_every_record_after_it() {
        let sendfile = Sendfile::new();
        assert!(!sendfile.is_refused());
        for errno in [Errno::INVAL, Errno::NOSYS, Errno::OPNOTSUPP] {
            assert!(matches!(whose(&failed(errno)), Whose::Sendfile), "{errno}");
            sendfile.refuse(&failed(errno));
            assert!(sendfile.is_refused());
        }
    }
}
