//! How many records are held in memory: what the operator says, or what the machine lets us pin.
//!
//! ```text
//! one region of slots x slot bytes, pinned once and registered with every device, so
//!   slots x slot bytes            <= memory that can be pinned beside the reserve for others
//!   slots x slot bytes            <= what each device registers at once
//!   slots x slot bytes x devices  <= the locked-memory limit, where it applies: registrations
//!   slots x slot bytes            <= the same less what is locked already: the pages themselves
//! ```
//!
//! The last two are the sum of [`LockLimit::room`], which clients use, too.
//!
//! Where records are spilled, the buffers through which they go are pinned besides, and registered
//! with every device and with io_uring; they come off each of these but what a device registers at
//! once.

use expert_tier::layout::ExpertLayout;
use gpu_sys::limits::{
    Available, Bytes, LockLimit, Registrations, free_huge_pages, whole_huge_pages,
};
use gpu_sys::pinned::{HUGE_PAGE_BYTES, NumaPlacement, RESERVE_MAX_BYTES, usable_memory};
use railset::message::{SpillTerms, Transfer};

use super::RailsError;
use crate::push::{PushOptions, SpillMemory};

/// Requests for spilled records that a client may have under way on a rail: enough to keep the disk
/// and the rail busy at once, few enough that a client's share of the buffers is small.
pub(super) const CREDITS: u16 = 32;
/// Most bytes of one such request: large enough that its messages cost little beside it, small enough
/// that clients take turns.
pub(super) const RANGE_BYTES: u32 = 1 << 20;

/// Most bytes that a client grants on a rail at once: its requests for spilled records.
pub const GRANT_BYTES_PER_RAIL: u64 = CREDITS as u64 * RANGE_BYTES as u64;

/// Part of the memory that a region takes by itself at most, as one of so many, beside the reserve:
/// what is available changes by the moment, and connections and the file cache want some, too.
const SLACK_DIVISOR: u64 = 16;

/// How many slots there are, and what for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Plan {
    pub(super) slot_bytes: u64,
    pub(super) slots: u64,
    /// Records of the store.
    pub(super) records: u64,
    /// What keeps the others out, for the log.
    pub(super) bound_by: String,
}

/// What limits a region.
#[derive(Clone, Debug)]
pub(super) struct Bounds {
    /// Each device with its `max_mr_size`.
    pub(super) devices: Vec<(String, u64)>,
    /// What the process may lock.
    pub(super) lock: LockLimit,
    /// What can be pinned, and what says so; `None` where nobody does.
    pub(super) memory: Option<Available>,
    /// What is pinned and registered besides, if anything is spilled.
    pub(super) spill: SpillMemory,
}

impl Bounds {
    /// Those of this process now.
    pub(super) fn current(devices: Vec<(String, u64)>, push: &PushOptions) -> Self {
        // The pool of huge pages is apart from what counts as available.
        let pool = free_huge_pages(HUGE_PAGE_BYTES as u64, None) * HUGE_PAGE_BYTES as u64;
        let pool = Available { bytes: pool, bound_by: "the pool of huge pages".into() };
        let usable = usable_memory(NumaPlacement::Local);
        let memory = usable.map(|usable| if pool.bytes > usable.bytes { pool } else { usable });
        let spill = push.memory(devices.len() as u64);
        Self { devices, lock: LockLimit::current(), memory, spill }
    }

    /// The most bytes of a region beside `spill` under each bound, with the bound's name.
    fn most(&self, spill: SpillMemory) -> Vec<(u64, String)> {
        let mut most: Vec<_> = Vec::new();
        let registrations = self.registrations(spill);
        if let Some(room) = self.lock.room(&registrations) {
            let devices = registrations.devices;
            let name = format!("the locked-memory limit ({}, {devices} devices)", self.lock);
            most.push((whole_huge_pages(room), name));
        }
        if let Some(Available { bytes, bound_by }) = &self.memory {
            let name = format!("{} that can be pinned by {bound_by}", Bytes(*bytes));
            let slack = (bytes / SLACK_DIVISOR).min(RESERVE_MAX_BYTES);
            most.push((whole_huge_pages((bytes - slack).saturating_sub(spill.pinned)), name));
        }
        let device = |(name, bytes): &(String, u64)| (*bytes, format!("what {name} registers"));
        most.extend(self.devices.iter().map(device));
        most
    }

    /// An error unless a region of `region_bytes` beside `spill` keeps to all of them. Before
    /// anything is read: a refusal after half an hour of loading would be no help.
    fn hold(&self, region_bytes: u64, spill: SpillMemory) -> Result<(), RailsError> {
        let over = |(_, most): &&(String, u64)| region_bytes > *most;
        if let Some((device, max_bytes)) = self.devices.iter().find(over) {
            let (device, max_bytes, bytes) = (device.clone(), *max_bytes, region_bytes);
            return Err(RailsError::MaxRegion { device, max_bytes, bytes });
        }
        let (registrations, limit) = (self.registrations(spill), self.lock);
        if !limit.holds(region_bytes, &registrations) {
            let (bytes, devices, spill_bytes) = (region_bytes, registrations.devices, spill.locked);
            let needed_bytes = registrations.needed_bytes(region_bytes);
            return Err(RailsError::LockLimit { bytes, devices, spill_bytes, needed_bytes, limit });
        }
        let pinned_bytes = pinned(region_bytes).saturating_add(spill.pinned);
        match &self.memory {
            Some(Available { bytes: usable_bytes, bound_by }) if pinned_bytes > *usable_bytes => {
                let (usable_bytes, bound_by) = (*usable_bytes, bound_by.clone());
                Err(RailsError::Memory { bytes: pinned_bytes, usable_bytes, bound_by })
            }
            _ => Ok(()),
        }
    }

    /// What is locked and registered of a region beside `spill`, and with it.
    fn registrations(&self, spill: SpillMemory) -> Registrations {
        Registrations {
            devices: (self.devices.len() as u64).max(1),
            grant_bytes: 0,
            locked_bytes: spill.pinned,
            registered_bytes: spill.locked,
        }
    }
}

/// Bytes that are pinned for a region of `bytes`: whole huge pages, where there is one.
fn pinned(bytes: u64) -> u64 {
    let page = HUGE_PAGE_BYTES as u64;
    if bytes < page { bytes } else { bytes.div_ceil(page).saturating_mul(page) }
}

/// An error where a budget holds not even one record.
pub(super) fn hold_against_a_record(
    budget: Option<u64>,
    layout: &ExpertLayout,
) -> Result<(), RailsError> {
    let slot_bytes = layout.max_stride();
    match budget {
        Some(budget) if budget < slot_bytes => Err(RailsError::Budget { budget, slot_bytes }),
        _ => Ok(()),
    }
}

impl Plan {
    /// Slots for as many records of the layout as `budget` allows, which is one at least
    /// ([`hold_against_a_record`]); without a budget, as fit the bounds.
    pub(super) fn of(
        layout: &ExpertLayout,
        budget: Option<u64>,
        bounds: &Bounds,
    ) -> Result<Self, RailsError> {
        let (slot_bytes, records) = (layout.max_stride(), layout.records());
        let all_bytes = records.saturating_mul(slot_bytes);
        let all = (all_bytes, "nothing".to_owned());
        let least = |bounds: Vec<(u64, String)>| bounds.into_iter().min_by_key(|(it, _)| *it);
        let most = match budget {
            Some(budget) => least(vec![all, (budget, "--dram-budget".into())]),
            None => match least(bounds.most(SpillMemory::default()))
                .filter(|(bytes, _)| *bytes < all_bytes)
            {
                None => Some(all),
                Some(_) => least(bounds.most(bounds.spill)),
            },
        };
        let (most, bound_by) = most.unwrap_or_default();
        // At least one: what stands against even that is an error, and `hold` has its words.
        let slots = (most / slot_bytes).clamp(1, records);
        let spilled = slots < records;
        let bound_by = if spilled { bound_by } else { "nothing".to_owned() };
        let plan = Self { slot_bytes, slots, records, bound_by };
        bounds.hold(plan.bytes(), if spilled { bounds.spill } else { SpillMemory::default() })?;
        Ok(plan)
    }

    /// How the records come that have no slot, if there are any.
    pub(super) fn spill(&self, transfer: Transfer) -> Option<SpillTerms> {
        let terms = SpillTerms { transfer, credits: CREDITS, range_bytes: RANGE_BYTES };
        (self.slots < self.records).then_some(terms)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.slot_bytes.saturating_mul(self.slots)
    }

    /// The records to start with, ascending: the most counted of `profile`, then in the order of the
    /// layers.
    pub(super) fn first_records(&self, profile: Option<&[u64]>) -> Vec<usize> {
        let (records, slots) = (self.records as usize, self.slots as usize);
        let mut order: Vec<usize> = (0..records).collect();
        if let Some(counts) = profile {
            // A stable sort: equal counts stay in the order of the layers.
            order.sort_by_key(|&record| std::cmp::Reverse(counts[record]));
        }
        order.truncate(slots);
        order.sort_unstable();
        order
    }
}

#[cfg(test)]
#[path = "budget_tests.rs"]
mod tests;
