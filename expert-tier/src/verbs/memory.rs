//! What an arena needs of locked memory on the devices of the rails, and its registration there.
//!
//! A device that refuses the arena costs its rails, which end and are tried again later, and no fetch
//! that another rail can carry. Where no rail would be left, the arena is refused. So that a limit is
//! found out at the start and not by the first fetch, a grant of the largest part is tried, too.

use std::sync::Arc;

use gpu_sys::limits::Registrations;
use gpu_sys::verbs::VerbsError;
use railset::message::{SpillTerms, Transfer};
use railset::push::RECEIPT_BYTES;

use super::desk::Desk;
use super::devices::Device;
use super::push::PushLane;
use super::rail::Rail;
use super::session::{PROBE_BYTES, PROBES};
use crate::arena::ExpertArena;

/// Bytes that each device registers to try rails with.
const TRIAL_BYTES: u64 = PROBE_BYTES * PROBES as u64;
/// Receives of a rail's queue pair for spilled records are there twice while a rail is set up before
/// its predecessor is gone.
const RECEIVES_AT_ONCE: u64 = 2;
/// How often a grant is tried before it is refused: another one may come and go during the first.
const GRANT_TRIES: usize = 2;

/// Why no rail takes an arena.
pub(super) struct ArenaRefused {
    /// What was to be registered.
    pub(super) what: &'static str,
    pub(super) error: Arc<VerbsError>,
}

/// A device that does not take an arena.
struct Refusal {
    device: Arc<Device>,
    why: ArenaRefused,
}

impl Desk {
    /// What is registered of an arena once every rail is up that there can be.
    pub(super) fn registrations(&self) -> Registrations {
        let state = self.lock();
        let mut names: Vec<&str> = state.rails.iter().map(|rail| rail.device().name()).collect();
        names.sort_unstable();
        names.dedup();
        let missing = state.rails_wanted.saturating_sub(state.rails.len()) as u64;
        let devices = names.len() as u64 + missing;
        let granted = |rail: &Rail| rail.push.as_ref().map_or(0, PushLane::most_granted_bytes);
        let most = state.rails.iter().map(granted).max().unwrap_or(0);
        let grant_bytes = state.rails.iter().map(granted).sum::<u64>() + most * missing;
        let receives = |rail: &Rail| rail.push.as_ref().map_or(0, receive_bytes);
        let most = state.rails.iter().map(receives).max().unwrap_or(0);
        let receive_bytes = state.rails.iter().map(receives).sum::<u64>() + most * missing;
        let beside_bytes = TRIAL_BYTES * devices + RECEIVES_AT_ONCE * receive_bytes;
        let (locked_bytes, registered_bytes) = (beside_bytes, beside_bytes);
        Registrations { devices, grant_bytes, locked_bytes, registered_bytes }
    }

    /// Registers `arena` for a request, unless it is registered. One that was refused is not tried
    /// again before a rail comes up or [`use_arena`](Self::use_arena) is called: to register it takes
    /// as long as it is large, and a batch has many requests.
    pub(super) fn find_arena(&self, arena: &ExpertArena) -> Result<(), Arc<VerbsError>> {
        if self.devices.knows(arena) {
            return Ok(());
        }
        match self.refused_arenas.why(arena) {
            Some(why) => Err(why),
            None => self.use_arena(arena).map_err(|refused| refused.error),
        }
    }

    /// Registers `arena` with the devices of the rails. Rails end whose device refuses, if there are
    /// others.
    pub(super) fn use_arena(&self, arena: &ExpertArena) -> Result<(), ArenaRefused> {
        let age = self.refused_arenas.age();
        self.refused_arenas.forget(arena);
        let registered = self.register_arena(arena);
        registered.inspect_err(|refused| self.refused_arenas.note(age, arena, &refused.error))
    }

    fn register_arena(&self, arena: &ExpertArena) -> Result<(), ArenaRefused> {
        let registered = self.devices.register(arena).into_iter();
        let what = "the arena cannot be registered";
        let refusal = |(device, error)| {
            let error = Arc::new(error);
            Refusal { device, why: ArenaRefused { what, error } }
        };
        let mut refused: Vec<Refusal> = registered.map(refusal).collect();
        self.try_grants(arena, &mut refused);
        let Some(first) = refused.pop() else { return Ok(()) };
        let others = refused;
        let refuses = |device: &Arc<Device>| {
            let is_it = |it: &Refusal| Arc::ptr_eq(&it.device, device);
            is_it(&first) || others.iter().any(is_it)
        };
        let state = self.lock();
        let mut up = state.rails.iter().filter(|rail| rail.takes_more()).peekable();
        let is_taken = match up.peek() {
            Some(_) => up.any(|rail| !refuses(rail.device())),
            None => self.devices.opened() > others.len() + 1,
        };
        drop(state);
        if !is_taken {
            self.devices.drop_arena(arena.id());
            return Err(first.why);
        }
        for Refusal { device, why: ArenaRefused { what, error } } in
            others.into_iter().chain([first])
        {
            let why = format!("{what}: {error}");
            self.end_rails_where(|rail| Arc::ptr_eq(rail.device(), &device), &why);
        }
        Ok(())
    }

    /// Tries a grant on each device that peers push through; one that has no room for it beside the
    /// arena does without the arena.
    fn try_grants(&self, arena: &ExpertArena, refused: &mut Vec<Refusal>) {
        let state = self.lock();
        let lanes = state.rails.iter().filter_map(|rail| rail.push.as_ref());
        let mut tried: Vec<(Arc<Device>, SpillTerms)> = Vec::new();
        for lane in lanes {
            if !tried.iter().any(|(device, _)| Arc::ptr_eq(device, lane.device())) {
                tried.push((Arc::clone(lane.device()), lane.terms()));
            }
        }
        drop(state);
        for (device, terms) in tried {
            if refused.iter().any(|it| Arc::ptr_eq(&it.device, &device)) {
                continue;
            }
            if let Err(error) = self.try_grant(&device, terms) {
                device.refuse(arena.id());
                let what = "a grant of what the peer pushes cannot be registered beside the arena";
                let error = Arc::new(error);
                refused.push(Refusal { device, why: ArenaRefused { what, error } });
            }
        }
    }

    /// Fails where `device` does not register a grant of the largest part. Want of room says nothing
    /// while other grants are out. This one is counted among them as long as it is registered, so that
    /// a grant that it leaves no room for waits and does not fail.
    pub(super) fn try_grant(&self, device: &Device, terms: SpillTerms) -> Result<(), VerbsError> {
        if terms.transfer != Transfer::Push {
            return Ok(());
        }
        let records = self.manifest.layout().layers().iter().map(|layer| layer.record_bytes());
        let bytes = records.max().unwrap_or(0).min(terms.range_bytes.into());
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut place = self.grants.place();
        let mut tries_left = GRANT_TRIES;
        loop {
            let Err(error) = device.try_grant(bytes) else { return Ok(()) };
            if !error.is_of_size() {
                return Err(error);
            }
            tries_left -= 1;
            match place.wait_for_others() {
                Some(alone) if tries_left > 0 => place = alone,
                Some(_) => return Err(error),
                None => return Ok(()),
            }
        }
    }
}

/// Bytes of the receives for the peer's receipts, which are whole pages of their own.
fn receive_bytes(lane: &PushLane) -> u64 {
    let bytes = usize::from(lane.terms().credits) * RECEIPT_BYTES;
    bytes.next_multiple_of(rustix::param::page_size()) as u64
}
