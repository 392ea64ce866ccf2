//! Every request of the backend, and the rails that can carry them.
//!
//! One lock guards all of it; it is held for bookkeeping, for posting and for looking at completion
//! queues, none of which waits. Whoever waits for a completion looks after the rails meanwhile, so
//! that a fetch costs no hand-over to another thread; where nobody waits, the keeper does. Checking
//! a part is done outside the lock.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use gpu_sys::pinned::HugePages;
use railset::choose::RailSpec;
use railset::table::CheckedTable;

use super::call::Call;
use super::claims::Blame;
use super::connector::Complaints;
use super::devices::{Device, Devices};
use super::grant::{Granted, NOT_REVOKED};
use super::grants::Grants;
use super::push::PushLane;
use super::rail::{Leftover, Rail};
use super::refused::RefusedArenas;
use super::reports::Reports;
use super::session::{Opened, PROBE_BYTES, PROBES, Session};
use super::state::{State, Todo};
use super::{OpenError, VerbsOptions};
use crate::account::Accounts;
use crate::arena::{ArenaOptions, CudaUse, ExpertArena, Gathered, SlabPlan, Slot};
use crate::checker::{Checker, Job};
use crate::error::{FetchError, FetchFailure};
use crate::key::ExpertKey;
use crate::record::RecordIdentity;
use crate::store::manifest::Manifest;
use crate::tier::{CompletionQueue, FetchRequest, Outcome, Source, Ticket, TierKind};

pub(super) struct Desk {
    pub(super) options: VerbsOptions,
    pub(super) manifest: Arc<Manifest>,
    pub(super) accounts: Accounts,
    pub(super) devices: Devices,
    pub(super) grants: Arc<Grants>,
    pub(super) refused_arenas: RefusedArenas,
    /// Slots to try new rails with.
    pub(super) probe: ExpertArena,
    next_rail: AtomicU64,
    state: Mutex<State>,
    /// Rung when the backend closes.
    bell: Condvar,
    /// READs in flight now, and most at once so far.
    in_flight: AtomicUsize,
    most_in_flight: AtomicUsize,
    /// Whether all that flies is what the peer was asked for and has not sent.
    awaits_peer: AtomicBool,
    /// Whether a request waits that nobody has tried to post.
    pub(super) wants_ring: AtomicBool,
    /// Whether a caller looks after the rails at the moment.
    driven: AtomicBool,
    /// Whether a caller sleeps until a push has come.
    sleeps: AtomicBool,
    reconnects: AtomicU64,
    pub(super) complaints: Complaints,
    pub(super) rejections: AtomicU64,
    /// What the peer is to be told.
    pub(super) reports: Reports,
    pub(super) opened: Instant,
    /// Milliseconds after `opened` at which somebody last looked for requests out of time.
    pub(super) looked_ms: AtomicU64,
}

/// A part to check, and where its call is.
pub(super) struct CheckPart {
    part: Granted,
    desk: Arc<Desk>,
}

impl Job for CheckPart {
    fn run(self) {
        let call = self.part.tag();
        // Nobody looks at bytes that a peer may still write.
        match self.part.revoke() {
            Some(part) => {
                part.landed().check();
                self.desk.part_done(call);
            }
            None => self.desk.part_lost(call, NOT_REVOKED),
        }
        // Parts may wait for the grant that was revoked here, while nothing else flies.
        if self.desk.grants.take_freed() {
            self.desk.ring();
        }
    }
}

/// The right to do what one caller does at a time. It ends when this is dropped, so it ends with a
/// caller that panics as well.
pub(super) struct Turn<'a>(&'a AtomicBool);

impl<'a> Turn<'a> {
    fn take(taken: &'a AtomicBool) -> Option<Self> {
        (!taken.swap(true, Ordering::Acquire)).then(|| Self(taken))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

pub(super) type PartChecker = Checker<CheckPart>;

impl Desk {
    pub(super) fn new(
        options: VerbsOptions,
        manifest: Arc<Manifest>,
        devices: Devices,
    ) -> Result<Self, OpenError> {
        let slabs = vec![SlabPlan { slot_bytes: PROBE_BYTES, slots: PROBES }];
        let mut probe = ArenaOptions::with_slabs(slabs);
        (probe.cuda, probe.huge_pages) = (CudaUse::Off, HugePages::Off);
        let probe = ExpertArena::new(&probe)?;
        // No device is open yet: each registers it when it is opened.
        devices.register(&probe);
        let grants = Arc::new(Grants::default());
        let reports = Reports::new(manifest.layout());
        Ok(Self {
            probe,
            next_rail: AtomicU64::new(0),
            options,
            manifest,
            accounts: Accounts::new(TierKind::RdmaVerbs, &[Source::Read, Source::Push]),
            reports,
            devices,
            state: Mutex::new(State::new(Arc::clone(&grants))),
            grants,
            refused_arenas: RefusedArenas::default(),
            bell: Condvar::new(),
            in_flight: AtomicUsize::new(0),
            most_in_flight: AtomicUsize::new(0),
            awaits_peer: AtomicBool::new(false),
            wants_ring: AtomicBool::new(false),
            driven: AtomicBool::new(false),
            sleeps: AtomicBool::new(false),
            reconnects: AtomicU64::new(0),
            complaints: Complaints::default(),
            rejections: AtomicU64::new(0),
            opened: Instant::now(),
            looked_ms: AtomicU64::new(0),
        })
    }

    pub(super) fn healthy(&self) -> bool {
        self.lock().healthy
    }

    pub(super) fn reconnects(&self) -> u64 {
        self.reconnects.load(Ordering::Relaxed)
    }

    pub(super) fn mismatches(&self) -> u64 {
        self.rejections.load(Ordering::Relaxed)
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    pub(super) fn most_in_flight(&self) -> usize {
        self.most_in_flight.load(Ordering::Relaxed)
    }

    /// Whether nothing flies, so that looking at the rails finds nothing.
    pub(super) fn is_idle(&self) -> bool {
        self.in_flight() == 0
    }

    /// Whether nothing flies but what the peer has yet to send.
    pub(super) fn awaits_peer(&self) -> bool {
        self.awaits_peer.load(Ordering::Relaxed)
    }

    // ---- requests ----

    /// Takes a request; [`ring`](Self::ring) posts it.
    pub(super) fn take(&self, request: FetchRequest, queue: &CompletionQueue, submitted: Instant) {
        let (ticket, key, slot) = request.into_parts();
        let (layer_index, layer) = match self.manifest.layout().locate_at(key) {
            Ok(found) => found,
            Err(error) => {
                return self.refuse(ticket, key, queue, submitted, FetchFailure::new(error, slot));
            }
        };
        let identity = RecordIdentity::new(&self.manifest.fingerprint(), layer, key.expert);
        let slot = match slot.begin_parted(identity) {
            Ok(slot) => slot,
            Err(refused) => {
                let failure = FetchFailure::too_small(key, refused);
                return self.refuse(ticket, key, queue, submitted, failure);
            }
        };
        if let Err(source) = self.find_arena(&slot.arena()) {
            let error = Box::new(FetchError::Register { key, source });
            let slot = slot.gather().ok().map(Slot::<Gathered>::abandon);
            let failure = FetchFailure { error, slot };
            return self.refuse(ticket, key, queue, submitted, failure);
        }
        self.lock().add(Call::new(ticket, identity, layer_index, queue.clone(), submitted, slot));
    }

    /// Completes a request that was never taken.
    pub(super) fn refuse(
        &self,
        ticket: Ticket,
        key: ExpertKey,
        queue: &CompletionQueue,
        submitted: Instant,
        failure: FetchFailure,
    ) {
        let outcome = Outcome::Failed(failure);
        self.accounts.count(&outcome, submitted.elapsed());
        queue.push_outcome(ticket, key, outcome);
    }

    pub(super) fn cancel(&self, ticket: Ticket) {
        let mut state = self.lock();
        let over = state.cancel(ticket);
        drop(state);
        self.finish_all(over);
    }

    // ---- rails ----

    /// Names a rail that is about to be set up.
    pub(super) fn next_rail(&self) -> u64 {
        self.next_rail.fetch_add(1, Ordering::Relaxed)
    }

    /// A new rail carries what waits; its control connection goes to the keeper.
    pub(super) fn rail_up(self: &Arc<Self>, opened: Opened) {
        let Opened { session, mut rail, .. } = opened;
        let mut state = self.lock();
        if state.closing {
            // Nobody would end it any more: it goes here, and its connection with it.
            return;
        }
        // How fast it is will show. Until then it is taken for no faster than those that work: one
        // that then brings nothing has not been given more than its share.
        if let Some(slowest) = state.rails.iter().map(Rail::bytes_per_s).min_by(f64::total_cmp) {
            rail.assume_at_most(slowest);
        }
        let lanes = state.rails.iter().filter_map(|rail| rail.push.as_ref());
        let slowest = lanes.map(PushLane::bytes_per_s).min_by(f64::total_cmp);
        if let (Some(slowest), Some(lane)) = (slowest, &mut rail.push) {
            lane.assume_at_most(slowest);
        }
        let outage_ms = state.down_since.take().map(|since| since.elapsed().as_millis());
        let (name, slot) = (rail.name(), rail.slot);
        state.claims.succeeded(slot);
        state.rails.push(rail);
        state.sessions.push(session);
        state.healthy = true;
        let rails = state.rails.len();
        drop(state);
        self.refused_arenas.forget_all();
        tracing::info!(peer = %self.options.peer, rail = name, slot, rails, outage_ms,
            "a rail is up");
        self.ring();
    }

    /// Moves the control connections of new rails to `sessions`.
    pub(super) fn take_sessions(&self, sessions: &mut Vec<Session>) {
        sessions.append(&mut self.lock().sessions);
    }

    /// Whether the client's rail `slot` is there, though it may be about to go.
    pub(super) fn has_slot(&self, slot: usize) -> bool {
        self.lock().has_slot(slot)
    }

    pub(super) fn rail_specs(&self) -> Vec<RailSpec> {
        let state = self.lock();
        let mut rails: Vec<_> = state.rails.iter().collect();
        rails.sort_by_key(|rail| rail.slot);
        rails.into_iter().map(|rail| rail.spec().clone()).collect()
    }

    pub(super) fn rails_up(&self) -> usize {
        self.lock().rails.iter().filter(|rail| rail.takes_more()).count()
    }

    pub(super) fn has_rail(&self, number: u64) -> bool {
        self.lock().rails.iter().any(|rail| rail.number == number)
    }

    pub(super) fn count_reconnect(&self) {
        self.reconnects.fetch_add(1, Ordering::Relaxed);
        self.accounts.reconnected();
    }

    pub(super) fn table_changed(&self, number: u64, table: &Arc<CheckedTable>) {
        let mut state = self.lock();
        let rail = state.rails.iter_mut().find(|rail| rail.number == number);
        if let Some(rail) = rail {
            rail.use_table(Arc::clone(table));
        }
    }

    /// Whether the peer has more records than it holds in memory.
    pub(super) fn spills(&self) -> bool {
        self.lock().can_push()
    }

    /// An attempt to set up rail `slot` failed.
    pub(super) fn dial_failed(&self, slot: usize, why: &str, blame: Blame) {
        let mut state = self.lock();
        state.claims.gave_up(slot, blame);
        if state.rails.is_empty() {
            state.healthy = false;
            state.down_since.get_or_insert_with(Instant::now);
            why.clone_into(&mut state.down_why);
        }
        drop(state);
        self.expire();
    }

    /// Ends the rails that `is_hit` names.
    pub(super) fn end_rails_where(&self, is_hit: impl Fn(&Rail) -> bool, why: &str) {
        let mut state = self.lock();
        state.rails.iter_mut().filter(|rail| is_hit(rail)).for_each(|r| r.end(why.to_owned()));
    }

    /// The peer shuts down: its rail takes no more, and goes when what flies on it has landed.
    pub(super) fn retire_rail(&self, number: u64) {
        let mut state = self.lock();
        state.rails.iter_mut().filter(|rail| rail.number == number).for_each(Rail::retire);
    }

    /// Leaves the devices of the rails, each once, in `devices`.
    pub(super) fn rail_devices(&self, devices: &mut Vec<Arc<Device>>) {
        devices.clear();
        for rail in &self.lock().rails {
            if !devices.iter().any(|known| Arc::ptr_eq(known, rail.device())) {
                devices.push(Arc::clone(rail.device()));
            }
        }
    }

    /// Destroys rails that are over; says how many are left. For the keeper: destroying may take
    /// the kernel a while.
    pub(super) fn reap(self: &Arc<Self>) -> usize {
        let mut state = self.lock();
        for rail in &mut state.rails {
            if rail.is_stalled(self.options.deadline, self.options.total) {
                let ms = self.options.deadline.as_millis();
                rail.end(format!("nothing completed for {ms} ms"));
            }
        }
        let mut todo = Todo::default();
        state.rails.iter_mut().for_each(|rail| rail.give_up_pushes(&mut todo.revoke));
        let drain = self.options.drain;
        let gone: Vec<Rail> = state.rails.extract_if(.., |rail| rail.is_over(drain)).collect();
        let left = state.rails.len();
        if !gone.is_empty() {
            state.healthy = state.healthy && left > 0;
            if left == 0 {
                state.down_since.get_or_insert_with(Instant::now);
            }
        }
        if let Some(rail) = gone.first() {
            rail.ending().unwrap_or("the peer shut down").clone_into(&mut state.down_why);
        }
        let closing = state.closing;
        drop(state);
        self.settle(todo);
        for rail in gone {
            // A rail that retired is no loss: its peer has said so.
            if !closing && rail.ending().is_some() {
                let (rail, why) = (rail.name(), rail.ending().unwrap_or_default());
                tracing::warn!(peer = %self.options.peer, rail, why, rails_left = left, "a rail is lost");
                self.accounts.link_failed();
            }
            let Leftover { back, lost, why } = rail.destroy();
            let why = why.unwrap_or_default();
            lost.into_iter().for_each(|call| self.part_lost(call, &why));
            self.put_back(back);
        }
        left
    }

    /// Posts what waits, as far as the rails have room.
    pub(super) fn ring(self: &Arc<Self>) {
        let mut todo = Todo::default();
        let mut state = self.lock();
        self.ring_locked(&mut state, &mut todo);
        drop(state);
        self.settle(todo);
    }

    pub(super) fn ring_locked(&self, state: &mut State, todo: &mut Todo) {
        state.ring(&self.options, todo);
        let flying = state.in_flight();
        self.awaits_peer.store(flying > 0 && flying == state.awaited(), Ordering::Relaxed);
        self.in_flight.store(flying, Ordering::Relaxed);
        self.most_in_flight.fetch_max(flying, Ordering::Relaxed);
    }

    /// Takes what has landed, if nobody else does at the moment, and has it checked; says whether
    /// there was anything.
    pub(super) fn drive(self: &Arc<Self>, checker: &PartChecker) -> bool {
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::WouldBlock) => return false,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        };
        let mut todo = Todo::default();
        let freed = self.grants.take_freed();
        let wanted = self.wants_ring.swap(false, Ordering::Acquire) || freed;
        let found = state.look(&self.options, &mut todo, |part| {
            checker.push(CheckPart { part, desk: Arc::clone(self) });
        });
        if found || wanted {
            self.ring_locked(&mut state, &mut todo);
        }
        drop(state);
        self.settle(todo);
        found
    }

    /// Whether a caller looks after the rails at the moment.
    pub(super) fn is_driven(&self) -> bool {
        self.driven.load(Ordering::Relaxed)
    }

    /// Makes the caller the one that looks after the rails, until the guard is dropped. `None` while
    /// another caller is.
    pub(super) fn take_wheel(&self) -> Option<Turn<'_>> {
        Turn::take(&self.driven)
    }

    /// Makes the caller the one that sleeps until a push has come, until the guard is dropped. `None`
    /// while another caller is: two sleepers would take each other's wake-ups from the channels.
    pub(super) fn take_sleep(&self) -> Option<Turn<'_>> {
        Turn::take(&self.sleeps)
    }

    // ---- the end ----

    pub(super) fn closing(&self) -> bool {
        self.lock().closing
    }

    /// Tells the keeper to end.
    pub(super) fn close(&self) {
        self.lock().closing = true;
        self.bell.notify_all();
    }

    /// Waits until the backend closes, at most `wait`; says if it does.
    pub(super) fn pause(&self, wait: Duration) -> bool {
        let state = self.lock();
        let closing = self.bell.wait_timeout_while(state, wait, |state| !state.closing);
        closing.unwrap_or_else(PoisonError::into_inner).0.closing
    }

    /// Waits a moment for what flies, or until the backend closes.
    pub(super) fn nap(&self, wait: Duration) {
        let state = self.lock();
        drop(self.bell.wait_timeout(state, wait));
    }

    /// Ends every request, once no rail is left.
    pub(super) fn fail_all(&self) {
        let over = self.lock().close();
        self.finish_all(over);
    }

    /// No state is left half-changed by the code under this lock short of a failed allocation.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
