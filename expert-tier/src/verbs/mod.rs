//! The `rdma-verbs` backend: a peer's memory, read one-sided, with no work for the peer.
//!
//! The peer publishes where each expert lies; a record is cut into parts of at most 256 KiB, which
//! are READ straight into the slot over the queue pairs of one or two rails and checked as they
//! land, in whatever order.
//!
//! Bounds, all of them settings:
//! * Setting up a rail takes at most `connect` for each of connecting, agreeing, and `deadline` for
//!   trying it out. One that failed is tried again with back-off, at first after `backoff.first_ms`,
//!   at last every `backoff.most_ms`, while the other carries on; one that there has never been
//!   beside the other, every `absent`. Each rail has a thread that tries it, so one whose way is dead
//!   does not delay the other.
//! * A rail on which something flies and nothing completes for `deadline` is ended: its queue pairs
//!   are put in error, so that everything comes back, and what came back flies again on another.
//!   What has not come back after `drain` ends with the queue pair, which is destroyed.
//! * A request ends `total` after its first byte was asked for, whatever the rails do. Its slot stays
//!   with the backend until nothing can write to it any more.
//! * A request of which nothing has been asked for does not age while something comes over a rail. It
//!   ends where nothing has come for `total`, or for `deadline` if that is longer.
//! * Requests wait for a rail at most `deadline` after the last one was lost. Once there has been
//!   none for longer, they fail at once, until one is back.
//! * A record is read at most `attempts` times, where a READ of it failed for its own sake or the
//!   bytes were not the record's.
//!
//! A slot that a NIC may still write belongs to the parts that fly ([`Part`](crate::arena)): it is
//! free again when every one of them has completed, been flushed, or gone with a queue pair that
//! was destroyed. Where a queue pair cannot even be destroyed, the slot is lost, and said to be.

mod call;
mod claims;
mod connector;
mod desk;
mod devices;
mod ends;
mod grant;
mod grants;
mod inbox;
mod keeper;
mod memory;
mod push;
mod pushes;
mod rail;
mod rate;
mod refused;
mod reports;
mod session;
mod settle;
mod state;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gpu_sys::limits::Registrations;
use gpu_sys::verbs::VerbsError;
use railset::BackoffSettings;
use railset::choose::{ChooseError, RailSpec};
use railset::handshake::HandshakeError;
use railset::pairing::RailWishes;

use crate::arena::{ArenaError, ExpertArena};
use crate::checker::{Checker, Job, MAX_CHECK_THREADS, default_check_threads};
use crate::fingerprint::Fingerprint;
use crate::store::manifest::Manifest;
use crate::tcp::{DialError, Dialler};
use crate::tier::{self, Completion, CompletionQueue, ExpertTier, FetchRequest, Ticket, TierKind};
use crate::wire::Secret;
use crate::wire::handshake::Goal;
use crate::wire::io::IoError;
use desk::{Desk, PartChecker};
use devices::Devices;

/// Between two looks at the clock by a caller that waits while nothing flies.
const TICK: Duration = Duration::from_millis(20);
/// How long a caller leaves the rails to another before it looks whether that one still does.
const TURN: Duration = Duration::from_micros(200);
/// How long a caller looks for what the peer has yet to read from its disk before it sleeps: about what
/// waking up costs.
const PUSH_SPIN: Duration = Duration::from_micros(20);
/// Longest such sleep: READs that others post meanwhile are theirs to look after.
const PUSH_NAP: Duration = Duration::from_millis(5);
/// How long a caller leaves sleeping for pushes to another before it looks whether that one still does.
const PUSH_TURN: Duration = Duration::from_millis(1);
/// Between two looks at the rails by a caller that has looked all the time for `spin`.
const NAP: Duration = Duration::from_micros(50);

/// Settings of [`VerbsTier`].
#[derive(Clone, Debug)]
pub struct VerbsOptions {
    /// The peer's control address, `HOST:PORT`.
    pub peer: String,
    /// Devices and GIDs, and how many rails.
    pub wishes: RailWishes,
    /// Queue pairs per rail, 1 to 16. One has at most its device's `max_rd_atomic` READs outstanding,
    /// often 16, which is less than a fast rail holds; so two.
    pub queue_pairs: u8,
    /// READs queued per queue pair, 1 to 4096: so many are there for the device to begin as soon as
    /// one of those outstanding ends.
    pub queue_pair_depth: u32,
    /// Longest time without a completion on a rail that READs fly on. Once no rail has been up for
    /// as long, requests fail at once until one is back.
    pub deadline: Duration,
    /// Longest time from the first READ or push of a request to its end, whatever the peer does.
    pub total: Duration,
    /// Longest time to connect and shake hands, and again to agree on rails.
    pub connect: Duration,
    /// Longest time for what flies on a rail in error to come back, before its queue pairs are
    /// destroyed.
    pub drain: Duration,
    /// Longest time that a waiting caller looks at the rails all the time; then it looks every 50
    /// us. Longer than a record takes, or each costs a nap.
    pub spin: Duration,
    /// How often a record may be read, 1 or more.
    pub attempts: u32,
    /// Threads that check parts while others fly, 0 to [`MAX_CHECK_THREADS`]; callers that wait help
    /// in any case. See [`default_check_threads`].
    pub check_threads: u32,
    /// Waits between attempts to reconnect.
    pub backoff: BackoffSettings,
    /// Time between two looks for a second rail that there has never been. A look costs both ends a
    /// connection; this host asks only while it has an active port that no rail uses.
    pub absent: Duration,
    /// The secret shared with the peer.
    pub secret: Option<Secret>,
    /// The store that the peer must serve; `None` takes whichever it does.
    pub fingerprint: Option<Fingerprint>,
}

impl VerbsOptions {
    /// The defaults for `peer`, `HOST:PORT`.
    #[must_use]
    pub fn new(peer: impl Into<String>) -> Self {
        Self {
            peer: peer.into(),
            wishes: RailWishes::default(),
            queue_pairs: 2,
            queue_pair_depth: 64,
            deadline: Duration::from_secs(2),
            total: Duration::from_secs(30),
            connect: Duration::from_secs(1),
            drain: Duration::from_secs(1),
            spin: Duration::from_millis(2),
            attempts: 3,
            check_threads: default_check_threads(),
            backoff: BackoffSettings::default(),
            absent: Duration::from_secs(30),
            secret: None,
            fingerprint: None,
        }
    }
}

/// Why the backend cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No library, no device, or one that refuses.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// No device, or none that could carry a rail.
    #[error("{0}; --expert-backend rdma reaches a peer over TCP")]
    Choose(#[from] ChooseError),
    /// The peer cannot be reached, or does not agree to the connection's handshake.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// The two ends cannot agree on rails.
    #[error("{peer}: {source}")]
    Agree {
        /// The peer's address.
        peer: String,
        /// Why not.
        source: Box<HandshakeError>,
    },
    /// The peer will not set up rails.
    #[error("{peer} sets up no rails: {reason}; --expert-backend rdma needs none")]
    Refused {
        /// The peer's address.
        peer: String,
        /// What it said.
        reason: String,
    },
    /// The connection broke off, or time ran out, while a rail was agreed on.
    #[error("{peer}, waiting for {due}: {source}")]
    Io {
        /// The peer's address.
        peer: String,
        /// What was due.
        due: &'static str,
        /// What happened.
        source: IoError,
    },
    /// A rail came up, and nothing comes over it.
    #[error(
        "{rail} to {peer}: {why}; the control connection works, so look at the cable, the switch, \
         the MTU and the firewall (UDP port 4791 for RoCEv2) between the two adapters"
    )]
    TryOut {
        /// The rail.
        rail: String,
        /// The peer's address.
        peer: String,
        /// What happened.
        why: String,
    },
    /// Memory for trying rails out could not be pinned.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The rail is up already, or being set up.
    #[error("{rail} is being used already")]
    Taken {
        /// The rail.
        rail: String,
    },
    /// Every pair of ends has failed.
    #[error("every pair of ends has been tried")]
    NoOtherPair,
    /// Neither of the client's rails can be set up.
    #[error("{first}; and the other rail: {second}")]
    NeitherRail {
        /// What is wrong with the first.
        first: Box<Self>,
        /// What is wrong with what was tried instead.
        second: Box<Self>,
    },
    /// The two ends agreed on no rail at all.
    #[error("the handshake brought no rail")]
    NoRail,
    /// The device gave a queue pair a number that none can have.
    #[error("a device made a queue pair that cannot be: {source}")]
    QueuePair {
        /// What is wrong with the number.
        source: railset::wire::DecodeError,
    },
}

/// A peer over verbs.
pub struct VerbsTier {
    desk: Arc<Desk>,
    checker: Arc<PartChecker>,
    /// Keeper and connectors; joined before anything else goes.
    threads: Vec<JoinHandle<()>>,
}

impl VerbsTier {
    /// Opens the library, connects to the peer, learns its manifest, and sets up the rails.
    ///
    /// One rail is enough, whichever it is: the other one is tried again, and the log says why it is
    /// missing. Two are needed only with
    /// [`DualRail::Two`](railset::pairing::DualRail::Two); a client that has started goes on with one
    /// then, too. A device that is named and does not exist is refused in any case.
    ///
    /// # Errors
    /// There are no verbs here, or the peer cannot be reached or agreed with.
    pub fn connect(options: VerbsOptions) -> Result<Self, OpenError> {
        let devices = Devices::open()?;
        // Before the peer is bothered: without a device nothing can come of it.
        devices.fit(&options.wishes)?;
        let dialler = Dialler::new(options.peer.clone(), options.secret.clone(), options.connect);
        let (socket, manifest) = dialler.dial(Goal::Discover(options.fingerprint))?;
        let no_manifest = || DialError::NoManifest { peer: options.peer.clone() };
        let manifest = manifest.ok_or_else(no_manifest)?;
        tracing::info!(peer = %options.peer, fingerprint = %manifest.fingerprint(),
            model = manifest.model(), records = manifest.layout().records(), "attached");
        let threads = options.check_threads.min(MAX_CHECK_THREADS);
        let checker = Checker::start("verbs-check", threads)
            .map_err(|source| DialError::Thread { what: "check records", source })?;
        let checker = Arc::new(checker);
        let desk = Arc::new(Desk::new(options, manifest, devices)?);
        connector::begin(&desk, socket, &dialler)?;
        let mut tier = Self { desk, checker, threads: Vec::new() };
        tier.start("verbs-keeper", |desk, checker| keeper::keep(&desk, &checker))?;
        let rails = tier.desk.options.wishes.for_rails().len();
        for (slot, name) in
            ["verbs-connect-0", "verbs-connect-1"].into_iter().enumerate().take(rails)
        {
            let dialler = dialler.clone();
            tier.start(name, move |desk, _| connector::connect(&desk, &dialler, slot))?;
        }
        Ok(tier)
    }

    fn start(
        &mut self,
        name: &str,
        work: impl FnOnce(Arc<Desk>, Arc<PartChecker>) + Send + 'static,
    ) -> Result<(), OpenError> {
        let (desk, checker) = (Arc::clone(&self.desk), Arc::clone(&self.checker));
        let started = std::thread::Builder::new().name(name.into()).spawn(|| work(desk, checker));
        let what = "keep the rails";
        self.threads.push(started.map_err(|source| DialError::Thread { what, source })?);
        Ok(())
    }

    /// How often a rail was set up again after it was lost.
    #[must_use]
    pub fn reconnects(&self) -> u64 {
        self.desk.reconnects()
    }

    /// How often what came for a record was not the record.
    #[must_use]
    pub fn mismatches(&self) -> u64 {
        self.desk.mismatches()
    }

    /// Rails that carry traffic now.
    #[must_use]
    pub fn rails_up(&self) -> usize {
        self.desk.rails_up()
    }

    /// Looks at the rails once, as a caller does that waits in [`poll`](ExpertTier::poll), and helps
    /// with the checking; says whether there was anything. For callers with a loop of their own that
    /// have no completion to wait for.
    pub fn drive(&self) -> bool {
        let found = self.desk.drive(&self.checker);
        let mut helped = false;
        while self.checker.help() {
            helped = true;
        }
        found || helped
    }

    /// Parts that are read or were asked for, when somebody last looked at the rails.
    #[must_use]
    pub fn parts_in_flight(&self) -> usize {
        self.desk.in_flight()
    }

    /// Most parts that were in flight at once.
    #[must_use]
    pub fn most_parts_in_flight(&self) -> usize {
        self.desk.most_in_flight()
    }

    /// The local ends of the rails that are up, the first rail first.
    #[must_use]
    pub fn rails(&self) -> Vec<RailSpec> {
        self.desk.rail_specs()
    }

    /// Waits for something on `queue`, looking after the rails meanwhile.
    fn wait_on<T>(
        &self,
        wait: Duration,
        pop: impl Fn(&CompletionQueue, Duration) -> Option<T>,
        queue: &CompletionQueue,
    ) -> Option<T> {
        // What has come, or shows at the first look, costs no look at the clock.
        if let Some(popped) = pop(queue, Duration::ZERO) {
            return Some(popped);
        }
        if self.drive()
            && let Some(popped) = pop(queue, Duration::ZERO)
        {
            return Some(popped);
        }
        let until = tier::after(wait);
        let started = Instant::now();
        loop {
            if let Some(popped) = pop(queue, Duration::ZERO) {
                return Some(popped);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                // Somebody who only looks in now and then drives what he has asked for, too.
                self.drive();
                return pop(queue, Duration::ZERO);
            }
            self.desk.expire();
            if self.desk.is_idle() {
                if !self.drive()
                    && let Some(popped) = pop(queue, left.min(TICK))
                {
                    return Some(popped);
                }
            } else if let Some(wheel) = self.desk.take_wheel() {
                let popped = self.drive_until(started, until, || pop(queue, Duration::ZERO));
                drop(wheel);
                let popped = popped.or_else(|| self.nap_for_push(left, &pop, queue));
                if popped.is_some() {
                    return popped;
                }
            } else if let Some(popped) = pop(queue, left.min(TURN)) {
                return Some(popped);
            }
        }
    }

    /// Where all that flies waits for the peer's disk, waits until a push comes. Whoever sleeps wakes
    /// those that wait for their own queues, by what it puts there.
    fn nap_for_push<T>(
        &self,
        left: Duration,
        pop: impl Fn(&CompletionQueue, Duration) -> Option<T>,
        queue: &CompletionQueue,
    ) -> Option<T> {
        if !self.desk.awaits_peer() {
            return None;
        }
        let Some(_sleeper) = self.desk.take_sleep() else {
            return pop(queue, left.min(PUSH_TURN));
        };
        self.desk.sleep_until_pushed(&self.checker, left.min(PUSH_NAP));
        None
    }

    /// Looks after the rails until `pop` brings something, nothing flies but what the peer has yet to
    /// send, or it is `until`.
    fn drive_until<T>(
        &self,
        started: Instant,
        until: Instant,
        pop: impl Fn() -> Option<T>,
    ) -> Option<T> {
        let mut quiet_since = Instant::now();
        loop {
            let found = self.drive();
            if let Some(popped) = pop() {
                return Some(popped);
            }
            let now = Instant::now();
            if now >= until || self.desk.is_idle() {
                return None;
            }
            self.desk.expire();
            if found {
                quiet_since = now;
                continue;
            }
            if self.desk.awaits_peer() && now.saturating_duration_since(quiet_since) >= PUSH_SPIN {
                return None;
            }
            if now.saturating_duration_since(started) < self.desk.options.spin {
                // The NIC may be a program on this very core.
                std::thread::yield_now();
            } else {
                std::thread::sleep(NAP);
            }
        }
    }
}

/// Ends every request of a backend that has no rail and no thread but those of `checker`, which is the
/// last handle on it.
fn finish<J: Job>(desk: &Desk, checker: Arc<Checker<J>>) {
    while checker.help() {}
    // Waits for the checking threads: the parts that they have keep their requests' slots.
    drop(checker);
    desk.fail_all();
}

impl Drop for VerbsTier {
    fn drop(&mut self) {
        self.desk.close();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread that kept the rails had panicked");
            }
        }
        let idle = Arc::new(Checker::without_threads());
        finish(&self.desk, std::mem::replace(&mut self.checker, idle));
    }
}

impl ExpertTier for VerbsTier {
    fn kind(&self) -> TierKind {
        TierKind::RdmaVerbs
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

    fn registrations(&self) -> Registrations {
        self.desk.registrations()
    }

    fn use_arena(&self, arena: &ExpertArena) -> Result<(), ArenaError> {
        self.desk
            .use_arena(arena)
            .map_err(|refused| ArenaError::Register { what: refused.what, source: refused.error })
    }

    fn submit(&self, batch: &mut Vec<FetchRequest>, queue: &CompletionQueue) {
        let submitted = Instant::now();
        for request in batch.drain(..) {
            self.desk.take(request, queue, submitted);
        }
        // A device that is a program may do all of the reading while it is told of it; the keeper
        // need not look after the rails meanwhile.
        let _mine = self.desk.take_wheel();
        self.desk.ring();
    }

    fn cancel(&self, ticket: Ticket) {
        self.desk.cancel(ticket);
    }

    fn poll(&self, queue: &CompletionQueue, wait: Duration) -> Option<Completion> {
        self.wait_on(wait, CompletionQueue::pop, queue)
    }

    #[cfg(feature = "unverified")]
    fn poll_landed(&self, queue: &CompletionQueue, wait: Duration) -> Option<tier::Landed> {
        self.wait_on(wait, CompletionQueue::pop_landed, queue)
    }
}
