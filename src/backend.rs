//! The flags that choose a backend, and the backend and arena they make.
//!
//! Every flag has a `METRALE_*` variable of the same name; the flag wins.

mod arena;
mod fallback;

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use expert_peer::cli::{HostPort, UsageError, read_secret, store_error};
use expert_peer::values::ByteSize;
use expert_tier::arena::ExpertArena;
use expert_tier::checker::{MAX_CHECK_THREADS, default_check_threads};
use expert_tier::fingerprint::Fingerprint;
use expert_tier::posix::{PosixOptions, PosixTier};
use expert_tier::store::StoreError;
use expert_tier::tcp::{Dialler, TcpOptions, TcpTier};
use expert_tier::tier::{ExpertTier, TierKind, UnknownBackend};
use expert_tier::uma::{UmaOptions, UmaTier};
#[cfg(metrale_rdma_verbs)]
use expert_tier::verbs::{VerbsOptions, VerbsTier};
use expert_tier::wire::Secret;
use gpu_sys::env::{self, Variable};
use gpu_sys::pinned::{HugePages, NumaPlacement};
use railset::choose::Wish;
use railset::pairing::{DualRail, RailWishes};

pub(crate) use arena::DEFAULT_ARENA_BYTES;
use fallback::FallbackList;

/// Flags shared by everything that fetches.
#[derive(clap::Args, Debug)]
pub(crate) struct BackendArgs {
    /// Where experts come from: uma (a local store by direct reads), posix (a local store by
    /// ordinary reads), rdma (a peer over TCP) or rdma-verbs (a peer's memory over RDMA)
    /// [default: uma]
    /// [env: METRALE_EXPERT_BACKEND]
    #[arg(long = "expert-backend", value_name = "BACKEND")]
    backend: Option<String>,
    /// The local store [env: METRALE_EXPERT_STORE]
    #[arg(long = "expert-store", visible_alias = "store", value_name = "DIR")]
    store: Option<PathBuf>,
    /// The peer [env: METRALE_EXPERT_PEER]
    #[arg(long = "expert-peer", visible_alias = "peer", value_name = "HOST:PORT")]
    peer: Option<HostPort>,
    /// Other ways to the same experts while the backend has none left, in this order: tcp (the same
    /// peer), posix or uma (a copy of its store, in --store), as in tcp,uma
    /// [env: METRALE_EXPERT_FALLBACK]
    #[arg(long = "expert-fallback", visible_alias = "fallback", value_name = "LIST")]
    fallback: Option<FallbackList>,
    #[command(flatten)]
    secret: SecretArgs,
    /// The store that the peer must serve; any other is refused [env: METRALE_EXPERT_FINGERPRINT]
    #[arg(long = "expert-fingerprint", visible_alias = "fingerprint", value_name = "HEX")]
    fingerprint: Option<Fingerprint>,
    /// Connections to the peer, 1 to 16 [default: 2] [env: METRALE_EXPERT_STREAMS]
    #[arg(long = "expert-streams", visible_alias = "streams", value_name = "N")]
    streams: Option<u32>,
    /// Requests in flight per connection, 1 to 512 [default: 16] [env: METRALE_EXPERT_DEPTH]
    #[arg(long = "expert-depth", visible_alias = "depth", value_name = "N")]
    depth: Option<u32>,
    /// Longest time in which a disk or rail brings nothing, or a TCP connection no whole record,
    /// before what waits for it fails, 1 to 600000 ms [default: 2000]
    /// [env: METRALE_EXPERT_DEADLINE_MS]
    #[arg(long = "expert-deadline-ms", visible_alias = "deadline-ms", value_name = "MS")]
    deadline_ms: Option<u64>,
    /// Longest time from asking a disk or peer for a record's first byte to the request's end, 1 to
    /// 3600000 ms [default: 30000] [env: METRALE_EXPERT_TOTAL_MS]
    #[arg(long = "expert-total-ms", visible_alias = "total-ms", value_name = "MS")]
    total_ms: Option<u64>,
    /// Longest time to connect and shake hands, 1 to 600000 ms [default: 1000]
    /// [env: METRALE_EXPERT_CONNECT_MS]
    #[arg(long = "expert-connect-ms", visible_alias = "connect-ms", value_name = "MS")]
    connect_ms: Option<u64>,
    /// How often one request is sent before it fails, 1 to 100 [default: 3]
    /// [env: METRALE_EXPERT_ATTEMPTS]
    #[arg(long = "expert-attempts", visible_alias = "attempts", value_name = "N")]
    attempts: Option<u32>,
    /// Threads that check what has arrived while more arrives, 0 to 64; 0 checks on the receiving
    /// thread [default: a quarter of the cores, at most 4] [env: METRALE_EXPERT_CHECK_THREADS]
    #[arg(long = "expert-check-threads", visible_alias = "check-threads", value_name = "N")]
    check_threads: Option<u32>,
    #[command(flatten)]
    rails: RailArgs,
    /// Pinned memory for fetched records, room for one at least: bytes, or 512MiB, 2G [default: what
    /// the records asked for need, at most 256 MiB and what the locked-memory limit leaves]
    /// [env: METRALE_EXPERT_ARENA_BYTES]
    #[arg(long = "expert-arena-bytes", visible_alias = "arena-bytes", value_name = "BYTES")]
    arena_bytes: Option<ByteSize>,
    /// Whether the arena uses huge pages where there are some: auto or off [default: auto]
    /// [env: METRALE_EXPERT_HUGE_PAGES]
    #[arg(long = "expert-huge-pages", visible_alias = "huge-pages", value_name = "WHEN")]
    huge_pages: Option<PageWish>,
    /// Memory node of the arena [default: the kernel's choice] [env: METRALE_EXPERT_NUMA_NODE]
    #[arg(long = "expert-numa-node", visible_alias = "numa-node", value_name = "NODE")]
    numa_node: Option<u32>,
    /// Direct reads in flight at once, 1 to 4096 [default: 64] [env: METRALE_EXPERT_UMA_DEPTH]
    #[arg(long = "expert-uma-depth", visible_alias = "uma-depth", value_name = "N")]
    uma_depth: Option<u32>,
    /// Bytes of one direct read, 4096 to 16777216 in steps of 4096 [default: 524288]
    /// [env: METRALE_EXPERT_UMA_PIECE_BYTES]
    #[arg(
        long = "expert-uma-piece-bytes",
        visible_alias = "uma-piece-bytes",
        value_name = "BYTES"
    )]
    uma_piece_bytes: Option<u32>,
}

/// The flags of the rails.
#[derive(clap::Args, Debug)]
struct RailArgs {
    /// RDMA device of the first rail, or its network interface [default: chosen] [env: METRALE_EXPERT_RDMA_DEV]
    #[arg(long = "expert-rdma-dev", visible_alias = "rdma-dev", value_name = "DEV")]
    rdma_dev: Option<DeviceName>,
    /// GID index of the first rail, 0 to 255 [default: chosen] [env: METRALE_EXPERT_RDMA_GID]
    #[arg(long = "expert-rdma-gid", visible_alias = "rdma-gid", value_name = "INDEX")]
    rdma_gid: Option<u8>,
    /// 1 for two rails, 0 for one [default: as many as both sides have]
    /// [env: METRALE_EXPERT_DUAL_RAIL]
    #[arg(long = "expert-dual-rail", visible_alias = "dual-rail", value_name = "0|1")]
    dual_rail: Option<DualRail>,
    /// RDMA device of the second rail, or its network interface [default: chosen] [env: METRALE_EXPERT_RAIL2_DEV]
    #[arg(long = "expert-rail2-dev", visible_alias = "rail2-dev", value_name = "DEV")]
    rail2_dev: Option<DeviceName>,
    /// GID index of the second rail, 0 to 255 [default: chosen] [env: METRALE_EXPERT_RAIL2_GID]
    #[arg(long = "expert-rail2-gid", visible_alias = "rail2-gid", value_name = "INDEX")]
    rail2_gid: Option<u8>,
    /// Queue pairs per rail, 1 to 16 [default: 2] [env: METRALE_EXPERT_QUEUE_PAIRS]
    #[arg(long = "expert-queue-pairs", visible_alias = "queue-pairs", value_name = "N")]
    queue_pairs: Option<u8>,
    /// READs queued per queue pair, 1 to 4096 [default: 64]
    /// [env: METRALE_EXPERT_QUEUE_PAIR_DEPTH]
    #[arg(long = "expert-queue-pair-depth", visible_alias = "queue-pair-depth", value_name = "N")]
    queue_pair_depth: Option<u32>,
    /// Longest wait for what flies on a rail that broke, 1 to 60000 ms [default: 1000]
    /// [env: METRALE_EXPERT_DRAIN_MS]
    #[arg(long = "expert-drain-ms", visible_alias = "drain-ms", value_name = "MS")]
    drain_ms: Option<u64>,
}

impl RailArgs {
    fn wishes(&self) -> anyhow::Result<RailWishes> {
        let device = |flag: &Option<DeviceName>, variable| {
            let name = setting(flag.clone(), variable)?;
            anyhow::Ok(name.map(|DeviceName(name)| name))
        };
        Ok(RailWishes {
            dual: setting(self.dual_rail, &env::EXPERT_DUAL_RAIL)?.unwrap_or_default(),
            rails: [
                Wish {
                    device: device(&self.rdma_dev, &env::EXPERT_RDMA_DEV)?,
                    gid_index: setting(self.rdma_gid, &env::EXPERT_RDMA_GID)?,
                },
                Wish {
                    device: device(&self.rail2_dev, &env::EXPERT_RAIL2_DEV)?,
                    gid_index: setting(self.rail2_gid, &env::EXPERT_RAIL2_GID)?,
                },
            ],
        })
    }
}

/// The flag of the shared secret, and its variable.
#[derive(clap::Args, Debug)]
pub(crate) struct SecretArgs {
    /// File with the secret shared with the peer, 16 to 4096 bytes before its line end
    /// [env: METRALE_EXPERT_SECRET_FILE]
    #[arg(long = "expert-secret-file", visible_alias = "secret-file", value_name = "FILE")]
    secret_file: Option<PathBuf>,
}

impl SecretArgs {
    pub(crate) fn read(&self) -> anyhow::Result<Option<Secret>> {
        Ok(self.file()?.as_deref().map(read_secret).transpose()?)
    }

    fn file(&self) -> anyhow::Result<Option<PathBuf>> {
        setting(self.secret_file.clone(), &env::EXPERT_SECRET_FILE)
    }
}

/// A backend ready to fetch.
pub(crate) struct Backend {
    pub(crate) tier: Box<dyn ExpertTier>,
    pub(crate) arena: ExpertArena,
    /// Asks the peer for its status; `None` for local backends.
    pub(crate) dialler: Option<Dialler>,
}

impl BackendArgs {
    /// Opens the backend and makes an arena for its store; without a size given, one that holds
    /// `most_records` at once if the default allows it.
    pub(crate) fn open(&self, most_records: u64) -> anyhow::Result<Backend> {
        let kind = self.kind()?;
        let others = self.fallback(kind)?;
        let (tier, dialler) = match others.is_empty() {
            true => self.open_alone(kind)?,
            false => self.open_with(kind, &others)?,
        };
        let arena = self.arena(&*tier, most_records)?;
        Ok(Backend { tier, arena, dialler })
    }

    fn open_alone(&self, kind: TierKind) -> anyhow::Result<(Box<dyn ExpertTier>, Option<Dialler>)> {
        Ok(match kind {
            TierKind::Posix => {
                let options = self.posix()?;
                (self.open_store(kind, |store| PosixTier::open(store, options))?, None)
            }
            TierKind::Uma => {
                let options = self.uma()?;
                (self.open_store(kind, |store| UmaTier::open(store, &options))?, None)
            }
            TierKind::Rdma => {
                let options = self.tcp()?;
                let dialler = dialler(&options);
                (Box::new(TcpTier::connect(options)?), Some(dialler))
            }
            #[cfg(metrale_rdma_verbs)]
            TierKind::RdmaVerbs => {
                let options = self.verbs()?;
                let dialler = dialler(&self.tcp()?);
                (Box::new(VerbsTier::connect(options)?), Some(dialler))
            }
            #[cfg(not(metrale_rdma_verbs))]
            TierKind::RdmaVerbs => return Err(UnknownBackend::NoVerbs.into()),
        })
    }

    /// The backend that is asked for, if one is.
    ///
    /// # Errors
    /// Its name is none, or that of a backend which this build lacks ([`UnknownBackend::NoVerbs`]).
    pub(crate) fn asked(&self) -> anyhow::Result<Option<TierKind>> {
        let variable = &env::EXPERT_BACKEND;
        let Some(name) = setting(self.backend.clone(), variable)? else { return Ok(None) };
        name.parse().map(Some).map_err(|error| match error {
            // A backend of this project that this build lacks is not a slip of the pen.
            UnknownBackend::NoVerbs => error.into(),
            UnknownBackend::Name(_) => {
                let (flag, name) = (variable.flag(), variable.name);
                UsageError(format!("--{flag} ({name}): {error}")).into()
            }
        })
    }

    /// The peer's address, if one is given.
    pub(crate) fn peer(&self) -> anyhow::Result<Option<String>> {
        Ok(setting(self.peer.clone(), &env::EXPERT_PEER)?.map(|HostPort(peer)| peer))
    }

    /// The local store's directory, if one is given.
    pub(crate) fn store_dir(&self) -> anyhow::Result<Option<PathBuf>> {
        setting(self.store.clone(), &env::EXPERT_STORE)
    }

    /// The secret's file, if one is given.
    pub(crate) fn secret_file(&self) -> anyhow::Result<Option<PathBuf>> {
        self.secret.file()
    }

    /// What is wished of rails.
    pub(crate) fn wishes(&self) -> anyhow::Result<RailWishes> {
        self.rails.wishes()
    }

    /// The arena's size, if it is given, and its pages.
    pub(crate) fn arena_wish(&self) -> anyhow::Result<(Option<u64>, HugePages, NumaPlacement)> {
        let bytes = setting(self.arena_bytes, &env::EXPERT_ARENA_BYTES)?;
        let huge_pages = setting(self.huge_pages, &env::EXPERT_HUGE_PAGES)?;
        let node = setting(self.numa_node, &env::EXPERT_NUMA_NODE)?;
        let numa = node.map_or(NumaPlacement::Local, NumaPlacement::Node);
        let huge_pages = huge_pages.map_or_else(HugePages::default, |PageWish(wish)| wish);
        Ok((bytes.map(|ByteSize(bytes)| bytes), huge_pages, numa))
    }

    fn store(&self, kind: TierKind) -> anyhow::Result<PathBuf> {
        let store = self.store_dir()?;
        let mut missing = missing(kind.name(), "a store", &env::EXPERT_STORE);
        if self.peer.is_some() {
            missing.0.push_str("; for a peer, choose --expert-backend rdma");
        }
        Ok(store.ok_or(missing)?)
    }

    fn open_store<T: ExpertTier + 'static>(
        &self,
        kind: TierKind,
        open: impl FnOnce(&Path) -> Result<T, StoreError>,
    ) -> anyhow::Result<Box<dyn ExpertTier>> {
        let dir = self.store(kind)?;
        Ok(Box::new(open(&dir).map_err(|error| store_error(&dir, error))?))
    }

    fn kind(&self) -> anyhow::Result<TierKind> {
        Ok(self.asked()?.unwrap_or(TierKind::Uma))
    }

    fn deadline(&self) -> anyhow::Result<Duration> {
        let ms = number(self.deadline_ms, &env::EXPERT_DEADLINE_MS, 1..=600_000, 2000)?;
        Ok(Duration::from_millis(ms))
    }

    fn total(&self) -> anyhow::Result<Duration> {
        let ms = number(self.total_ms, &env::EXPERT_TOTAL_MS, 1..=3_600_000, 30_000)?;
        Ok(Duration::from_millis(ms))
    }

    fn posix(&self) -> anyhow::Result<PosixOptions> {
        let (deadline, total) = (self.deadline()?, self.total()?);
        Ok(PosixOptions { deadline, total, ..PosixOptions::default() })
    }

    fn uma(&self) -> anyhow::Result<UmaOptions> {
        const STEP_BYTES: u32 = 4096;
        let variable = &env::EXPERT_UMA_PIECE_BYTES;
        let piece_bytes = number(self.uma_piece_bytes, variable, STEP_BYTES..=16 << 20, 512 << 10)?;
        if piece_bytes % STEP_BYTES != 0 {
            return Err(out_of_range(variable, piece_bytes));
        }
        Ok(UmaOptions {
            depth: number(self.uma_depth, &env::EXPERT_UMA_DEPTH, 1..=4096, 64)?,
            piece_bytes,
            deadline: self.deadline()?,
            total: self.total()?,
            ..UmaOptions::default()
        })
    }

    pub(crate) fn tcp(&self) -> anyhow::Result<TcpOptions> {
        let peer = self.peer()?.ok_or_else(|| missing("rdma", "a peer", &env::EXPERT_PEER))?;
        Ok(TcpOptions { secret: self.secret.read()?, ..self.link(peer)? })
    }

    /// The connection to `peer`, but for the secret.
    fn link(&self, peer: String) -> anyhow::Result<TcpOptions> {
        let connect_ms = number(self.connect_ms, &env::EXPERT_CONNECT_MS, 1..=600_000, 1000)?;
        Ok(TcpOptions {
            streams: number(self.streams, &env::EXPERT_STREAMS, 1..=16, 2)?,
            depth: number(self.depth, &env::EXPERT_DEPTH, 1..=512, 16)?,
            deadline: self.deadline()?,
            total: self.total()?,
            connect: Duration::from_millis(connect_ms),
            check_threads: number(
                self.check_threads,
                &env::EXPERT_CHECK_THREADS,
                0..=MAX_CHECK_THREADS,
                default_check_threads(),
            )?,
            attempts: number(self.attempts, &env::EXPERT_ATTEMPTS, 1..=100, 3)?,
            fingerprint: setting(self.fingerprint, &env::EXPERT_FINGERPRINT)?,
            ..TcpOptions::new(peer)
        })
    }

    #[cfg(metrale_rdma_verbs)]
    pub(crate) fn verbs(&self) -> anyhow::Result<VerbsOptions> {
        self.over_rails(self.tcp()?)
    }

    #[cfg(metrale_rdma_verbs)]
    fn over_rails(&self, tcp: TcpOptions) -> anyhow::Result<VerbsOptions> {
        let rails = &self.rails;
        let drain_ms = number(rails.drain_ms, &env::EXPERT_DRAIN_MS, 1..=60_000, 1000)?;
        Ok(VerbsOptions {
            wishes: rails.wishes()?,
            queue_pairs: number(rails.queue_pairs, &env::EXPERT_QUEUE_PAIRS, 1..=16, 2)?,
            queue_pair_depth: number(
                rails.queue_pair_depth,
                &env::EXPERT_QUEUE_PAIR_DEPTH,
                1..=4096,
                64,
            )?,
            drain: Duration::from_millis(drain_ms),
            deadline: tcp.deadline,
            total: tcp.total,
            connect: tcp.connect,
            attempts: tcp.attempts,
            check_threads: tcp.check_threads,
            secret: tcp.secret,
            fingerprint: tcp.fingerprint,
            ..VerbsOptions::new(tcp.peer)
        })
    }

    /// Looks at every setting, also at those that only another backend or a peer would need.
    ///
    /// # Errors
    /// One of them has a value that it cannot have.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let link = self.link(String::new())?;
        #[cfg(metrale_rdma_verbs)]
        self.over_rails(link)?;
        #[cfg(not(metrale_rdma_verbs))]
        drop(link);
        self.uma()?;
        // What this build lacks may have other ways all the same.
        self.fallback(self.kind().unwrap_or(TierKind::RdmaVerbs))?;
        Ok(())
    }
}

/// Asks the peer of `options` for its status.
fn dialler(options: &TcpOptions) -> Dialler {
    Dialler::new(options.peer.clone(), options.secret.clone(), options.connect)
}

/// The value of `--expert-rdma-dev` and `--expert-rail2-dev`.
#[derive(Clone, Debug)]
struct DeviceName(String);

impl FromStr for DeviceName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.parse() {
            Ok(Wish { device: Some(name), gid_index: None }) => Ok(Self(name)),
            Ok(_) => Err("this is DEV:GID; the GID index has a setting of its own"),
            Err(_) => Err("not a device's name, as in mlx5_0"),
        }
    }
}

/// The value of `--expert-huge-pages`.
#[derive(Clone, Copy, Debug)]
struct PageWish(HugePages);

impl FromStr for PageWish {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self(HugePages::Prefer)),
            "off" => Ok(Self(HugePages::Off)),
            _ => Err("neither auto nor off"),
        }
    }
}

/// The flag's value, else the variable's.
pub(crate) fn setting<T>(flag: Option<T>, variable: &Variable) -> anyhow::Result<Option<T>>
where
    T: FromStr,
    T::Err: Display,
{
    match flag {
        Some(value) => Ok(Some(value)),
        None => Ok(variable.read().map_err(UsageError::new)?),
    }
}

fn number<T>(
    flag: Option<T>,
    variable: &Variable,
    range: RangeInclusive<T>,
    default: T,
) -> anyhow::Result<T>
where
    T: FromStr + PartialOrd + Display + Copy,
    T::Err: Display,
{
    let value = setting(flag, variable)?.unwrap_or(default);
    if range.contains(&value) {
        return Ok(value);
    }
    Err(out_of_range(variable, value))
}

fn out_of_range(variable: &Variable, value: impl Display) -> anyhow::Error {
    let (flag, name, unit) = (variable.flag(), variable.name, variable.unit);
    UsageError(format!("--{flag} ({name}) is {value}; it takes {unit}")).into()
}

fn missing(backend: &str, what: &str, variable: &Variable) -> UsageError {
    let (flag, name) = (variable.flag(), variable.name);
    UsageError(format!("the {backend} backend needs {what}: give --{flag} or set {name}"))
}
