//! Listening, accepting, and shutting down.

mod options;
mod report;

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use expert_tier::store::{ExpertStore, StoreError};
use expert_tier::wire::Status;
use expert_tier::wire::handshake::encode_refusal;
use expert_tier::wire::io::{Clock, IoError, write_all};
use metrics::counter;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::connection::Connection;
#[cfg(metrale_rdma_verbs)]
use crate::direct_send::{self, NoReader, Shortages};
#[cfg(metrale_rdma_verbs)]
use crate::disk::Disk;
#[cfg(metrale_rdma_verbs)]
use crate::push::SpillWish;
#[cfg(metrale_rdma_verbs)]
use crate::rails::{self, Published, RailsError, SurveyThread};
use crate::registry::Registry;
#[cfg(metrale_rdma_verbs)]
use crate::residency::keeper::{Keeper, KeeperThread};
use crate::sendfile::Sendfile;
use crate::status::{StatusReport, Tally};
pub use options::{Exposure, PeerOptions};

/// How often the accepting thread looks whether it should stop.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// Why a peer does not start, or stops.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// The store cannot be opened.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The store cannot be published over RDMA.
    #[cfg(metrale_rdma_verbs)]
    #[error("cannot publish over RDMA: {0}")]
    Rails(#[from] RailsError),
    /// The store cannot be read past the page cache, as it should.
    #[cfg(metrale_rdma_verbs)]
    #[error("--spill-source direct: {0}")]
    Direct(#[from] NoReader),
    /// Others could connect without proof.
    #[error(
        "{listen} can be reached from other machines and there is no secret: give --secret-file, \
         or --insecure to serve anybody"
    )]
    Exposed {
        /// The address.
        listen: SocketAddr,
    },
    /// The address is not free or not ours.
    #[error("cannot listen on {listen}: {source}")]
    Listen {
        /// The address.
        listen: SocketAddr,
        /// The system's answer.
        source: io::Error,
    },
    /// The listening socket failed.
    #[error("cannot accept connections on {listen}: {source}")]
    Accept {
        /// The address.
        listen: SocketAddr,
        /// The system's answer.
        source: io::Error,
    },
}

/// Tells a running server to stop. Cheap to clone.
#[derive(Clone, Default, Debug)]
pub struct Shutdown(Arc<AtomicBool>);

impl Shutdown {
    /// A switch that has not been thrown.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A switch over a flag that a signal handler sets.
    #[must_use]
    pub fn from_flag(flag: Arc<AtomicBool>) -> Self {
        Self(flag)
    }

    /// Begins the drain.
    pub fn begin(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether the drain has begun.
    #[must_use]
    pub fn begun(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A peer that listens.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    shared: Arc<Shared>,
    /// Moves records between disk and memory, if any are published.
    #[cfg(metrale_rdma_verbs)]
    keeper: Option<Keeper>,
}

/// What every connection needs.
pub(crate) struct Shared {
    pub(crate) options: PeerOptions,
    pub(crate) store: Arc<ExpertStore>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) tally: Tally,
    pub(crate) shutdown: Shutdown,
    pub(crate) sendfile: Sendfile,
    #[cfg(metrale_rdma_verbs)]
    pub(crate) shortages: Shortages,
    /// What direct reads for TCP and for pushes are read from.
    #[cfg(metrale_rdma_verbs)]
    pub(crate) disk: Disk,
    /// What is published over RDMA, if anything is.
    #[cfg(metrale_rdma_verbs)]
    pub(crate) published: Option<Arc<Published>>,
}

impl Server {
    /// Opens the store and listens.
    ///
    /// # Errors
    /// The store cannot be opened, the address cannot be had, or listening on it would serve
    /// anybody.
    pub fn bind(options: PeerOptions, shutdown: Shutdown) -> Result<Self, PeerError> {
        let listen = options.listen;
        let exposed = !listen.ip().to_canonical().is_loopback() && options.secret.is_none();
        if exposed && options.exposure != Exposure::Insecure {
            return Err(PeerError::Exposed { listen });
        }
        let store = Arc::new(ExpertStore::open(&options.store)?);
        // Also for a peer that spills nothing, or has no rails: TCP reads so, too.
        #[cfg(metrale_rdma_verbs)]
        if options.push.source == SpillWish::Direct {
            direct_send::probe(&store)?;
        }
        let bound = TcpListener::bind(listen).and_then(|listener| {
            listener.set_nonblocking(true)?;
            Ok((listener.local_addr()?, listener))
        });
        let (address, listener) = bound.map_err(|source| PeerError::Listen { listen, source })?;
        #[cfg(metrale_rdma_verbs)]
        let disk = Disk::default();
        #[cfg(metrale_rdma_verbs)]
        let (published, keeper) = publish(&store, &options, &disk)?;
        let registry = Registry::new(options.max_clients.max(1) as usize);
        let (tally, sendfile) = (Tally::new(), Sendfile::new());
        let shared = Shared {
            options,
            store,
            registry,
            tally,
            shutdown,
            sendfile,
            #[cfg(metrale_rdma_verbs)]
            shortages: Shortages::new(),
            #[cfg(metrale_rdma_verbs)]
            disk,
            #[cfg(metrale_rdma_verbs)]
            published,
        };
        let manifest = shared.store.manifest();
        tracing::info!(%address, store = %shared.store.dir().display(),
            fingerprint = %manifest.fingerprint(), model = manifest.model(),
            records = manifest.layout().records(), secret = shared.options.secret.is_some(),
            "publishing");
        if exposed {
            tracing::warn!(%address, "no secret: anybody who can connect may fetch");
        }
        let shared = Arc::new(shared);
        Ok(Self {
            listener,
            address,
            shared,
            #[cfg(metrale_rdma_verbs)]
            keeper,
        })
    }

    /// The address listened on, with the real port.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The peer's description of itself.
    #[must_use]
    pub fn status(&self) -> StatusReport {
        self.shared.status()
    }

    /// Serves until the shutdown begins and the answers under way are finished or cut.
    ///
    /// # Errors
    /// The listening socket failed.
    #[cfg_attr(not(metrale_rdma_verbs), allow(unused_mut, reason = "there is no keeper to take"))]
    pub fn run(mut self) -> Result<(), PeerError> {
        let listen = self.address;
        #[cfg(metrale_rdma_verbs)]
        let _until_the_end = (self.start_keeper(), self.follow_devices());
        let mut shortages = 0_u64;
        while !self.shared.shutdown.begun() {
            let mut fds = [PollFd::new(&self.listener, PollFlags::IN)];
            match poll(&mut fds, Some(&TICK)) {
                Ok(0) | Err(Errno::INTR) => continue,
                Ok(_) => {}
                Err(errno) => return Err(PeerError::Accept { listen, source: errno.into() }),
            }
            match self.listener.accept() {
                Ok((socket, client)) => self.admit(socket, client),
                Err(error) if passing(&error) => {
                    // Out of descriptors or memory: what is open goes on, and room may come back.
                    shortages += 1;
                    if shortages.is_power_of_two() {
                        tracing::warn!(%error, so_far = shortages,
                            "a connection could not be accepted; `ulimit -n` limits descriptors");
                    }
                    let mut none = [];
                    let _woken = poll(&mut none, Some(&TICK));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(source) => return Err(PeerError::Accept { listen, source }),
            }
        }
        drop(self.listener);
        self.shared.finish();
        Ok(())
    }

    /// Starts the thread that moves records; it ends with what this gives.
    #[cfg(metrale_rdma_verbs)]
    fn start_keeper(&mut self) -> Option<KeeperThread> {
        let store = Arc::clone(&self.shared.store);
        match self.keeper.take()?.spawn(store) {
            Ok(thread) => Some(thread),
            Err(error) => {
                tracing::error!(%error, "no thread to move records; they stay where they are");
                None
            }
        }
    }

    /// Starts the thread that follows the RDMA devices; it ends with what this gives.
    #[cfg(metrale_rdma_verbs)]
    fn follow_devices(&self) -> Option<SurveyThread> {
        match self.shared.published.as_ref()?.follow_devices() {
            Ok(thread) => Some(thread),
            Err(error) => {
                tracing::error!(%error, "no thread to follow the RDMA devices; none is opened anew");
                None
            }
        }
    }

    /// Starts a thread for a new connection, or refuses it.
    fn admit(&self, socket: TcpStream, client: SocketAddr) {
        let shared = Arc::clone(&self.shared);
        let place = socket
            .set_nonblocking(false)
            .and_then(|()| socket.try_clone())
            .map_err(|error| error.to_string())
            .and_then(|clone| shared.registry.enter(clone).map_err(|full| full.to_string()));
        let place = match place {
            Ok(place) => place,
            Err(reason) => {
                self.shared.refuse(&socket, client, Status::Busy, &reason);
                return;
            }
        };
        let spawned = std::thread::Builder::new()
            .name(format!("client-{}", client.port()))
            .stack_size(256 * 1024)
            .spawn(move || Connection::new(shared, place, socket, client).run());
        if let Err(error) = spawned {
            tracing::warn!(%client, %error, "no thread for a connection; it is closed");
        }
    }
}

/// What is published over RDMA, and who looks after it.
#[cfg(metrale_rdma_verbs)]
type PublishedAndKeeper = (Option<Arc<Published>>, Option<Keeper>);

#[cfg(metrale_rdma_verbs)]
fn publish(
    store: &Arc<ExpertStore>,
    options: &PeerOptions,
    disk: &Disk,
) -> Result<PublishedAndKeeper, RailsError> {
    let wish = rails::Wish {
        rails: &options.rails,
        require: options.require_rails,
        survey: options.survey,
        dram_budget: options.dram_budget,
        profile: options.resident_profile.as_deref(),
        residency: options.residency,
        push: &options.push,
        disk,
    };
    let (published, keeper) = Published::new(store, wish)?.unzip();
    Ok((published.map(Arc::new), keeper))
}

/// Errors of accept(2) that concern one connection or a shortage, not the listening socket. Linux
/// hands on what the network has already said of the new connection; accept(2) lists those.
fn passing(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(
        errno,
        Some(
            Errno::MFILE
                | Errno::NFILE
                | Errno::NOBUFS
                | Errno::NOMEM
                | Errno::CONNABORTED
                | Errno::INTR
                | Errno::PERM
                | Errno::PROTO
                | Errno::NETDOWN
                | Errno::NETUNREACH
                | Errno::HOSTUNREACH
                | Errno::HOSTDOWN
                | Errno::NONET
                | Errno::NOPROTOOPT
                | Errno::OPNOTSUPP
        )
    )
}

impl Shared {
    /// Tells a client why it is not served; the connection is of no further use.
    pub(crate) fn refuse(
        &self,
        socket: &TcpStream,
        client: SocketAddr,
        status: Status,
        reason: &str,
    ) {
        self.tally.refused.fetch_add(1, Ordering::Relaxed);
        counter!("metrale_peer_refusals_total", "status" => status.name()).increment(1);
        tracing::warn!(%client, status = status.name(), reason, "refused a connection");
        let bytes = encode_refusal(status, reason);
        let clock = Clock::start(Duration::from_millis(200), "the protocol");
        let sent = socket
            .try_clone()
            .map_err(IoError::Socket)
            .and_then(|mut socket| write_all(&mut socket, &bytes, &clock));
        if let Err(error) = sent {
            tracing::debug!(%client, %error, "the refusal did not reach the client");
        }
    }

    /// Lets the connections finish what was asked of them, then cuts those that are left.
    fn finish(&self) {
        let (clients, connections) = self.registry.counts();
        tracing::info!(clients, connections, "draining");
        let left = self.registry.wait_empty(self.options.drain);
        if left > 0 {
            let drain_ms = self.options.drain.as_millis();
            tracing::warn!(left, drain_ms, "connections did not finish in time; cutting them");
            self.registry.cut_all();
            self.registry.wait_empty(self.options.stall);
        }
        let report = self.status();
        tracing::info!(
            served = report.served,
            errors = report.errors,
            bytes = report.bytes,
            "stopped"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_network_says_of_one_connection_does_not_end_the_peer() {
        for errno in [
            Errno::NETDOWN,
            Errno::NETUNREACH,
            Errno::HOSTUNREACH,
            Errno::HOSTDOWN,
            Errno::NONET,
            Errno::NOPROTOOPT,
            Errno::OPNOTSUPP,
            Errno::CONNABORTED,
            Errno::MFILE,
        ] {
            assert!(passing(&errno.into()), "{errno}");
        }
        for errno in [Errno::BADF, Errno::INVAL, Errno::NOTSOCK] {
            assert!(!passing(&errno.into()), "{errno}");
        }
    }
}
