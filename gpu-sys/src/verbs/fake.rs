//! A libibverbs that writes down what it is asked, fails on demand, and completes what a test says.
//!
//! Its state belongs to the thread, as a test does. For tests of this crate, and with the feature
//! `testing` of those above it: events that no device at hand brings forth.

mod functions;

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_uint};
use std::path::Path;
use std::sync::Arc;

use super::ffi::{self, Zeroed, event, ibv_send_flags, ibv_wc_status, ibv_wr_opcode};
use super::library::Library;

/// Where [`publish`] puts what can be READ.
const PUBLISHED: u64 = 1 << 20;
/// The first queue pair's number.
const FIRST_PAIR: u32 = 7;

/// What the fake has been told and asked.
#[derive(Default)]
pub(super) struct State {
    /// Calls so far, by name.
    pub(super) calls: Vec<&'static str>,
    /// How a call of this name fails.
    fail: HashMap<&'static str, Failure>,
    /// What the next call of this name does first.
    pub(super) before: HashMap<&'static str, Box<dyn FnOnce()>>,
    /// `ibv_post_send` refuses the request at this place of its list, with ENOMEM.
    pub(super) refuse_at: Option<usize>,
    /// Requests that were taken.
    pub(super) posted: Vec<Posted>,
    /// Receives that were taken: number and buffer.
    pub(super) receives: Vec<(u64, u64)>,
    /// Those of them that no message has come into yet, with their queue pair.
    waiting: VecDeque<(u32, u64, u64)>,
    /// Messages that were sent: queue pair and bytes.
    sent: VecDeque<(u32, Vec<u8>)>,
    /// Live registrations: address, length, remote key, flags.
    regions: Vec<(u64, usize, u32, c_int)>,
    /// What the next polls bring; what names no queue pair goes to whoever polls first.
    pub(super) completions: VecDeque<ffi::ibv_wc>,
    /// What the next events are: device, type and port.
    pub(super) events: VecDeque<(c_int, c_uint, c_int)>,
    /// States that queue pairs were moved to.
    pub(super) states: Vec<c_uint>,
    /// What the peer of each queue pair may do, by its number, as the last change of state said.
    pub(super) allowed: HashMap<u32, c_uint>,
    /// Flags of the registrations so far.
    pub(super) access: Vec<c_int>,
    /// `max_mr_size` of the device; 0 is 1 GiB.
    pub(super) max_mr_size: u64,
    /// Each queue pair's device, and the address of the queue it reports to, from [`FIRST_PAIR`] on.
    pairs: Vec<(c_int, usize)>,
    /// Queue pairs in error.
    failed: Vec<u32>,
    /// What READs bring.
    published: Vec<u8>,
    keys: u32,
}

/// How a call fails.
struct Failure {
    /// The error number that it returns.
    number: c_int,
    /// How often it still fails; `None` is without end.
    left: Option<usize>,
    /// How often it has failed.
    made: usize,
}

/// A request that the fake took.
#[derive(Clone, Copy)]
pub(super) struct Posted {
    queue_pair: u32,
    pub(super) work: u64,
    pub(super) flags: c_uint,
    pub(super) opcode: c_uint,
    remote: u64,
    local: u64,
    bytes: usize,
    /// Whether it has not been completed by [`bring`] or [`flush`].
    in_flight: bool,
}

impl State {
    fn add_queue_pair(&mut self, device: c_int, queue: usize) -> u32 {
        self.pairs.push((device, queue));
        FIRST_PAIR + self.pairs.len() as u32 - 1
    }

    fn pair(&self, number: u32) -> Option<&(c_int, usize)> {
        self.pairs.get(number.checked_sub(FIRST_PAIR)? as usize)
    }

    fn is_on(&self, queue_pair: u32, device: c_int) -> bool {
        self.pair(queue_pair).is_some_and(|(its, _)| *its == device)
    }

    /// Notes a call; returns the error number that it fails with, or 0.
    fn called(&mut self, name: &'static str) -> c_int {
        self.calls.push(name);
        let Some(failure) = self.fail.get_mut(name).filter(|it| it.left != Some(0)) else {
            return 0;
        };
        failure.left = failure.left.map(|left| left - 1);
        failure.made += usize::from(failure.number != 0);
        failure.number
    }

    fn completion_for(&mut self, queue: usize) -> Option<ffi::ibv_wc> {
        let is_for = |raw: &ffi::ibv_wc| {
            raw.qp_num == 0 || self.pair(raw.qp_num).is_some_and(|(_, its)| *its == queue)
        };
        let at = self.completions.iter().position(is_for)?;
        self.completions.remove(at)
    }

    /// Takes what is in flight on `device`.
    fn take_flying(&mut self, device: c_int) -> Vec<Posted> {
        let mut all = std::mem::take(&mut self.posted);
        let flying = all.iter_mut().filter(|it| it.in_flight && self.is_on(it.queue_pair, device));
        let taken = flying.map(|it| {
            it.in_flight = false;
            *it
        });
        let taken = taken.collect();
        self.posted = all;
        taken
    }

    /// What was in flight on a queue pair that is destroyed touches memory no more.
    fn forget(&mut self, queue_pair: u32) {
        let on_it = self.posted.iter_mut().filter(|it| it.queue_pair == queue_pair);
        on_it.for_each(|it| it.in_flight = false);
        self.waiting.retain(|(whose, ..)| *whose != queue_pair);
    }

    /// Whether `bytes` from `address` on are registered with `rkey`, and all of `flags` are allowed.
    fn allows(&self, address: u64, bytes: usize, rkey: u32, flags: u32) -> bool {
        self.regions.iter().any(|&(start, length, key, allowed)| {
            let inside = address.checked_sub(start).is_some_and(|at| at as usize + bytes <= length);
            inside && key == rkey && allowed.cast_unsigned() & flags == flags
        })
    }

    fn complete(&mut self, posted: &Posted, status: c_uint) {
        let mut raw = completion(posted.work, status);
        raw.qp_num = posted.queue_pair;
        self.completions.push_back(raw);
    }

    /// Does what a READ does, and says whether it could.
    fn read(&self, posted: &Posted) -> bool {
        let from = posted.remote.checked_sub(PUBLISHED).and_then(|at| usize::try_from(at).ok());
        let from = from.and_then(|at| self.published.get(at..)?.get(..posted.bytes));
        let Some(from) = from.filter(|_| posted.opcode == ibv_wr_opcode::IBV_WR_RDMA_READ) else {
            return false;
        };
        let to = std::ptr::with_exposed_provenance_mut::<u8>(posted.local as usize);
        // SAFETY: the request is in flight, so its buffer of this length is mapped and nobody else
        // looks at it (the contract of `Landing`).
        unsafe { to.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        true
    }
}

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

/// Looks at the state, or changes it.
pub(super) fn state<R>(look: impl FnOnce(&mut State) -> R) -> R {
    STATE.with_borrow_mut(look)
}

/// How often `call` was made.
#[must_use]
pub fn count(call: &str) -> usize {
    state(|it| it.calls.iter().filter(|name| **name == call).count())
}

/// Makes `call` fail with error `number` from now on; 0 lets it work.
pub fn fail(call: &'static str, number: i32) {
    state(|it| it.fail.insert(call, Failure { number, left: None, made: 0 }));
}

/// Makes the next `times` of `call` fail with error `number`.
pub fn fail_times(call: &'static str, number: i32, times: usize) {
    state(|it| it.fail.insert(call, Failure { number, left: Some(times), made: 0 }));
}

/// How often `call` has failed since it was last told to.
#[must_use]
pub fn failures(call: &'static str) -> usize {
    state(|it| it.fail.get(call).map_or(0, |failure| failure.made))
}

/// Has the next `call` of this thread run `first` before it does anything: wait for another thread, say.
pub fn before_next(call: &'static str, first: impl FnOnce() + 'static) {
    state(|it| it.before.insert(call, Box::new(first)));
}

/// The fake as a library: devices `fake0` and `fake1`, described below `sysfs`.
#[must_use]
pub fn library(sysfs: &Path) -> Arc<Library> {
    Library::from_table(functions::TABLE, sysfs)
}

/// Publishes `bytes` to READs of every device in place of those before; says where they begin.
pub fn publish(bytes: Vec<u8>) -> u64 {
    state(|it| it.published = bytes);
    PUBLISHED
}

/// `device` says that it has failed (`IBV_EVENT_DEVICE_FATAL`).
pub fn break_device(device: &str) {
    state(|it| it.events.push_back((number(device), event::DEVICE_FATAL, 0)));
}

/// The flags of this thread's registrations so far, as `ibv_reg_mr(3)` has them.
#[must_use]
pub fn registrations() -> Vec<i32> {
    state(|it| it.access.clone())
}

/// What the peer may do through each queue pair that was made on `device`, in the order in which they
/// were: `qp_access_flags` of `ibv_modify_qp(3)`.
#[must_use]
pub fn allowed(device: &str) -> Vec<u32> {
    let device = number(device);
    state(|it| {
        let made = (FIRST_PAIR..).zip(&it.pairs).filter(|(_, (its, _))| *its == device);
        made.map(|(number, _)| it.allowed.get(&number).copied().unwrap_or(0)).collect()
    })
}

/// Where the READs in flight on `device` begin, and how many bytes each has.
#[must_use]
pub fn flying(device: &str) -> Vec<(u64, usize)> {
    let device = number(device);
    state(|it| {
        let flying = it.posted.iter().filter(|p| p.in_flight && it.is_on(p.queue_pair, device));
        flying.map(|posted| (posted.remote, posted.bytes)).collect()
    })
}

/// How many requests `device` has been given so far.
#[must_use]
pub fn posted(device: &str) -> usize {
    let device = number(device);
    state(|it| it.posted.iter().filter(|posted| it.is_on(posted.queue_pair, device)).count())
}

/// Everything in flight on `device` ends well: READs bring what is published, or the remote access
/// error where nothing is.
pub fn bring(device: &str) {
    let device = number(device);
    state(|it| {
        for posted in it.take_flying(device) {
            let is_message = posted.opcode == ibv_wr_opcode::IBV_WR_SEND;
            if !is_message && !it.read(&posted) {
                it.complete(&posted, ibv_wc_status::IBV_WC_REM_ACCESS_ERR);
            } else if posted.flags & ibv_send_flags::IBV_SEND_SIGNALED.0 != 0 {
                it.complete(&posted, ibv_wc_status::IBV_WC_SUCCESS);
            }
        }
    });
}

/// Everything in flight on `device` comes back as flushed, as after its queue pairs went in error.
pub fn flush(device: &str) {
    let device = number(device);
    state(|it| {
        for posted in it.take_flying(device) {
            it.complete(&posted, ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
        }
    });
}

/// Takes the messages that were sent and not taken yet: queue pair and bytes.
#[must_use]
pub fn sent() -> Vec<(u32, Vec<u8>)> {
    state(|it| it.sent.drain(..).collect())
}

/// Does a peer's WRITE of `bytes` to `address`. Returns whether a live registration with `rkey` allows it;
/// nothing is written where none does.
#[must_use]
pub fn write(address: u64, rkey: u32, bytes: &[u8]) -> bool {
    let flags = ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
    if !state(|it| it.allows(address, bytes.len(), rkey, flags)) {
        return false;
    }
    let to = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
    // SAFETY: a live registration has these bytes, so they are mapped, and a peer may write there for as
    // long as it lives: nobody looks at them before it is gone.
    unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    true
}

/// Brings `message` into the oldest receive of `queue_pair` that waits. Returns whether one did.
pub fn receive(queue_pair: u32, message: &[u8]) -> bool {
    let waiting = state(|it| {
        let at = it.waiting.iter().position(|(whose, ..)| *whose == queue_pair)?;
        it.waiting.remove(at)
    });
    let Some((_, work, address)) = waiting else { return false };
    let to = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
    // SAFETY: the receive is posted, so its buffer, which is longer than any message of the tests, is
    // mapped and nobody looks at it.
    unsafe { to.copy_from_nonoverlapping(message.as_ptr(), message.len()) };
    let mut raw = completion(work, ibv_wc_status::IBV_WC_SUCCESS);
    raw.opcode = ffi::ibv_wc_opcode::IBV_WC_RECV;
    (raw.byte_len, raw.qp_num) = (message.len() as u32, queue_pair);
    state(|it| it.completions.push_back(raw));
    true
}

/// What is in flight on `device`'s queue pairs in error comes back as flushed, receives as well.
pub fn flush_failed(device: &str) {
    let device = number(device);
    state(|it| {
        let mut failed = it.failed.clone();
        failed.retain(|queue_pair| it.is_on(*queue_pair, device));
        let is_failed = |queue_pair: u32| failed.contains(&queue_pair);
        let mut all = std::mem::take(&mut it.posted);
        for posted in all.iter_mut().filter(|it| it.in_flight && is_failed(it.queue_pair)) {
            posted.in_flight = false;
            it.complete(posted, ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
        }
        it.posted = all;
        let receives = std::mem::take(&mut it.waiting);
        let (flushed, waiting): (VecDeque<_>, VecDeque<_>) =
            receives.into_iter().partition(|(whose, ..)| is_failed(*whose));
        it.waiting = waiting;
        for (queue_pair, work, _) in flushed {
            let mut raw = completion(work, ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
            raw.qp_num = queue_pair;
            it.completions.push_back(raw);
        }
    });
}

/// A device's number among the fake's.
fn number(device: &str) -> c_int {
    if device == "fake0" { 1 } else { 2 }
}

/// A device of the fake, open.
#[cfg(test)]
pub(crate) fn device() -> Arc<super::Context> {
    library(Path::new("/absent")).open_device("fake0").unwrap()
}

/// A completion as the device writes it.
pub(super) fn completion(work: u64, status: c_uint) -> ffi::ibv_wc {
    let mut raw = ffi::ibv_wc::zeroed();
    raw.wr_id = work;
    raw.status = status;
    raw
}
