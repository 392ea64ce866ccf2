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
    /// The error number that a call of this name returns.
    pub(super) fail: HashMap<&'static str, c_int>,
    /// What the next call of this name does first.
    pub(super) before: HashMap<&'static str, Box<dyn FnOnce()>>,
    /// `ibv_post_send` refuses the request at this place of its list, with ENOMEM.
    pub(super) refuse_at: Option<usize>,
    /// Requests that were taken.
    pub(super) posted: Vec<Posted>,
    /// Receives that were taken: number and buffer.
    pub(super) receives: Vec<(u64, u64)>,
    /// What the next polls bring; what names no queue pair goes to whoever polls first.
    pub(super) completions: VecDeque<ffi::ibv_wc>,
    /// What the next events are: device, type and port.
    pub(super) events: VecDeque<(c_int, c_uint, c_int)>,
    /// States that queue pairs were moved to.
    pub(super) states: Vec<c_uint>,
    /// Flags of the registrations so far.
    pub(super) access: Vec<c_int>,
    /// `max_mr_size` of the device; 0 is 1 GiB.
    pub(super) max_mr_size: u64,
    /// Each queue pair's device, and the address of the queue it reports to, from [`FIRST_PAIR`] on.
    pairs: Vec<(c_int, usize)>,
    /// What READs bring.
    published: Vec<u8>,
    keys: u32,
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
    state(|it| it.fail.insert(call, number));
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
            if !it.read(&posted) {
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
