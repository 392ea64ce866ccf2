//! What an arena needs of locked memory on the devices of the rails, and its registration there.
//!
//! A device that refuses the arena costs its rails, which end and are tried again later, and no fetch
//! that another rail can carry. Where no rail would be left, the arena is refused. So that a limit is
//! found out at the start and not by the first fetch, a grant of the largest part is tried, too.

use std::sync::Arc;

use gpu_sys::limits::Registrations;
use gpu_sys::verbs::VerbsError;
use railset::message::{SpillTerms, Transfer};

use super::desk::Desk;
use super::devices::Device;
use super::push::PushLane;
use super::rail::Rail;
use crate::arena::ExpertArena;

/// Bytes that a rail locks and registers beside the arena: what it is tried with, and the receives of
/// its queue pair for spilled records; twice, for one that is set up before its predecessor is gone.
const BESIDE_BYTES: u64 = 64 << 10;

/// Why no rail takes an arena.
pub(super) struct ArenaRefused {
    /// What was to be registered.
    pub(super) what: &'static str,
    pub(super) error: VerbsError,
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
        let beside_bytes = BESIDE_BYTES * devices;
        let (locked_bytes, registered_bytes) = (beside_bytes, beside_bytes);
        Registrations { devices, grant_bytes, locked_bytes, registered_bytes }
    }

    /// Registers `arena` with the devices of the rails. Rails end whose device refuses, if there are
    /// others.
    pub(super) fn use_arena(&self, arena: &ExpertArena) -> Result<(), ArenaRefused> {
        let registered = self.devices.register(arena).into_iter();
        let what = "the arena cannot be registered";
        let refusal = |(device, error)| Refusal { device, why: ArenaRefused { what, error } };
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
                let what = "there is no room beside the arena for a grant of what the peer pushes";
                refused.push(Refusal { device, why: ArenaRefused { what, error } });
            }
        }
    }

    /// Fails where `device` has no room for a grant of the largest part. While other grants are out,
    /// that says nothing.
    pub(super) fn try_grant(&self, device: &Device, terms: SpillTerms) -> Result<(), VerbsError> {
        if terms.transfer != Transfer::Push {
            return Ok(());
        }
        let records = self.manifest.layout().layers().iter().map(|layer| layer.record_bytes());
        let bytes = records.max().unwrap_or(0).min(terms.range_bytes.into());
        match device.try_grant(usize::try_from(bytes).unwrap_or(usize::MAX)) {
            Err(error) if error.is_of_size() && self.grants.is_idle() => Err(error),
            _ => Ok(()),
        }
    }
}
