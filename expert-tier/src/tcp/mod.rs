//! The `rdma` backend over TCP: several streams to one peer, requests pipelined on each.
//!
//! One desk holds every request. A stream is a connection and the thread that reads it; it
//! takes requests from the desk up to its depth, sends them, and receives the answers, which come
//! in order, straight into their slots. A stream that breaks puts its requests back on the desk,
//! where another stream, or the same one once it is connected again, takes them.
//!
//! Bounds, all of them settings:
//! * A request fails with `Deadline` when it heads its stream for longer than `deadline`; every
//!   request sent before that span began fails with it. Where no stream has had an answer for as
//!   long, so does every request that waits behind them: a stalled peer costs one deadline
//!   however many requests it holds.
//! * However the peer answers, a request ends `total` after it was first sent, with `Deadline`.
//!   The clock of `deadline` starts anew with each answer, so it finds a stall but does not bound
//!   a request: behind fifteen others, each just in time, it is sixteen deadlines old. One that
//!   waits to be sent again ends there and then. One that is on a stream ends for its caller, and its
//!   slot stays with the stream until the answer has been drained or the stream has ended.
//! * A request that waits to be sent for the first time does not age while answers come, on whichever
//!   stream. It is first in, first out, and each one before it ends within `total`, so none waits for
//!   ever. Where no answer has come for `total`, or for `deadline` if that is
//!   longer, it ends.
//! * Requests wait for a connection at most `deadline` after the last stream was lost. Once a
//!   peer has been gone for longer, requests fail at once, until a stream is back.
//! * A request is sent at most `attempts` times. One whose answer breaks off is sent again behind
//!   those that shared its stream, so that a record which the peer cannot finish fails alone.
//! * Looking up the peer's address, connecting and shaking hands take at most `connect` together.
//!   Closing the backend ends that, as it ends every wait, within a tick of 50 ms.
//!
//! The backend is healthy if what it last did on any stream went well: a connection, or a whole
//! answer, which may be an error status. A stream that broke or could not connect makes it
//! unhealthy until the next success, on whichever stream: with several, one that works shows that
//! the peer is there. Being refused as busy counts for nothing while another stream is up: a peer
//! that allows fewer connections than are wanted works, with fewer, for as long as it likes.
//!
//! A slot being filled belongs to the thread that receives into it. The socket is the only way
//! for bytes to get there, so once that thread has stopped reading, nothing else can write.

mod addresses;
mod call;
mod desk;
mod dial;
mod links;
mod stream;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use railset::BackoffSettings;

use crate::checker::{Checker, MAX_CHECK_THREADS, default_check_threads};
use crate::error::{FetchError, FetchFailure};
use crate::fingerprint::Fingerprint;
use crate::store::manifest::Manifest;
use crate::tier::{
    self, Completion, CompletionQueue, ExpertTier, FetchRequest, Outcome, Ticket, TierKind,
};
use crate::wire::Secret;
use crate::wire::handshake::Goal;
pub use addresses::look_up;
use call::{Call, Pending};
use desk::Desk;
pub use dial::{DialError, Dialler};

/// Most streams to one peer; the peer counts them too.
pub const MAX_STREAMS: u32 = 16;
/// Most requests in flight on one stream: 512 requests of 32 bytes fit any socket's send buffer.
pub const MAX_DEPTH: u32 = 512;
/// How often a waiting thread looks at the clock.
pub(crate) const TICK: Duration = crate::wire::io::TICK;
/// Shortest time between two looks at every request's age.
const LOOK: Duration = Duration::from_millis(20);

/// Settings of [`TcpTier`].
#[derive(Clone, Debug)]
pub struct TcpOptions {
    /// The peer, `HOST:PORT`.
    pub peer: String,
    /// Connections, 1 to [`MAX_STREAMS`].
    pub streams: u32,
    /// Requests in flight per connection, 1 to [`MAX_DEPTH`].
    pub depth: u32,
    /// Longest time without the record that is due: finds a peer that has stalled. Once no
    /// connection has been up for as long, requests fail at once until one is back.
    pub deadline: Duration,
    /// Longest time from first sending a request to its end, whatever the peer does.
    pub total: Duration,
    /// Longest time to look up the peer's address, connect and shake hands.
    pub connect: Duration,
    /// Threads that check what has arrived while more arrives, 0 to [`MAX_CHECK_THREADS`]; with 0
    /// a stream's own thread does. See [`default_check_threads`].
    pub check_threads: u32,
    /// How often one request may be sent, 1 or more.
    pub attempts: u32,
    /// Waits between attempts to reconnect.
    pub backoff: BackoffSettings,
    /// The secret shared with the peer.
    pub secret: Option<Secret>,
    /// The store that the peer must serve; `None` takes whichever it does.
    pub fingerprint: Option<Fingerprint>,
}

impl TcpOptions {
    /// The defaults for `peer`, `HOST:PORT`.
    #[must_use]
    pub fn new(peer: impl Into<String>) -> Self {
        Self {
            peer: peer.into(),
            streams: 2,
            depth: 16,
            deadline: Duration::from_secs(2),
            total: Duration::from_secs(30),
            connect: Duration::from_secs(1),
            check_threads: default_check_threads(),
            attempts: 3,
            backoff: BackoffSettings::default(),
            secret: None,
            fingerprint: None,
        }
    }
}

/// A peer over TCP.
pub struct TcpTier {
    desk: Arc<Desk>,
    threads: Vec<JoinHandle<()>>,
}

impl TcpTier {
    /// Connects to the peer, learns its manifest, and starts the streams.
    ///
    /// # Errors
    /// The peer cannot be reached or does not agree to the handshake.
    pub fn connect(options: TcpOptions) -> Result<Self, DialError> {
        let dialler = Dialler::new(options.peer.clone(), options.secret.clone(), options.connect);
        let (socket, manifest) = dialler.dial(Goal::Discover(options.fingerprint))?;
        let no_manifest = || DialError::NoManifest { peer: options.peer.clone() };
        let manifest = manifest.ok_or_else(no_manifest)?;
        tracing::info!(peer = %options.peer, fingerprint = %manifest.fingerprint(),
            model = manifest.model(), records = manifest.layout().records(), "attached");
        let streams = options.streams.clamp(1, MAX_STREAMS);
        let threads = options.check_threads.min(MAX_CHECK_THREADS);
        let checker = Checker::start("tcp-check", threads)
            .map_err(|source| DialError::Thread { what: "check records", source })?;
        let desk = Arc::new(Desk::new(options, dialler, manifest, checker, streams as usize));
        let mut tier = Self { desk, threads: Vec::new() };
        let mut first = Some(socket);
        for index in 0..streams as usize {
            let (desk, socket) = (Arc::clone(&tier.desk), first.take());
            let thread = std::thread::Builder::new()
                .name(format!("tcp-{index}"))
                .spawn(move || stream::run(&desk, index, socket))
                .map_err(|source| DialError::Thread { what: "serve a stream", source })?;
            tier.threads.push(thread);
        }
        Ok(tier)
    }

    /// How often a stream was connected again after it broke.
    #[must_use]
    pub fn reconnects(&self) -> u64 {
        self.desk.reconnects()
    }
}

impl Drop for TcpTier {
    fn drop(&mut self) {
        self.desk.close();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a stream's thread had panicked");
            }
        }
        self.desk.fail_waiting();
    }
}

impl ExpertTier for TcpTier {
    fn kind(&self) -> TierKind {
        TierKind::Rdma
    }

    fn manifest(&self) -> &Arc<Manifest> {
        &self.desk.manifest
    }

    fn healthy(&self) -> bool {
        self.desk.healthy()
    }

    fn deadline(&self) -> Duration {
        self.desk.options.deadline
    }

    fn bound(&self) -> Duration {
        self.desk.options.deadline.saturating_add(self.desk.options.total)
    }

    fn ended(&self) -> u64 {
        self.desk.accounts.ended()
    }

    fn submit(&self, batch: &mut Vec<FetchRequest>, queue: &CompletionQueue) {
        let submitted = Instant::now();
        for request in batch.drain(..) {
            let (ticket, key, slot) = request.into_parts();
            let identity = self.desk.manifest.identity(key);
            let refused = match identity {
                Err(error) => FetchFailure::new(error, slot),
                Ok(identity) if identity.record_bytes() > slot.capacity() => {
                    let (needed, capacity) = (identity.record_bytes(), slot.capacity());
                    let error = FetchError::SlotTooSmall { key, needed, capacity };
                    FetchFailure::new(error, slot)
                }
                Ok(identity) => {
                    let call = Call::new(ticket, identity, queue.clone(), submitted);
                    self.desk.take(Pending { call, slot });
                    continue;
                }
            };
            let outcome = Outcome::Failed(refused);
            self.desk.accounts.count(&outcome, submitted.elapsed());
            queue.push_outcome(ticket, key, outcome);
        }
        self.desk.dispatch();
    }

    fn cancel(&self, ticket: Ticket) {
        self.desk.cancel(ticket);
    }

    fn poll(&self, queue: &CompletionQueue, wait: Duration) -> Option<Completion> {
        // Streams may all be busy connecting.
        tier::pop_and_look(wait, TICK, |wait| queue.pop(wait), || self.desk.expire())
    }

    #[cfg(feature = "unverified")]
    fn poll_landed(&self, queue: &CompletionQueue, wait: Duration) -> Option<tier::Landed> {
        tier::pop_and_look(wait, TICK, |wait| queue.pop_landed(wait), || self.desk.expire())
    }
}
