//! How large an arena is and how it is cut into slots.

use std::time::Duration;

use gpu_sys::limits::Bytes;
use gpu_sys::pinned::{HugePages, NumaPlacement};

use super::ArenaError;
use crate::layout::{ExpertLayout, STRIDE_ALIGN};

/// Most slots in an arena: at most 192 bytes of bookkeeping each, so 192 MiB in all.
pub const MAX_SLOTS: u32 = 1 << 20;
/// How long a stream that cannot be marked, or the device at the arena's end, is waited for.
pub const DEFAULT_DRAIN_WAIT: Duration = Duration::from_secs(10);
/// Strides within this fraction (1/8) of a larger one share its slots: the bytes lost in each are
/// fewer than what a slab of their own would leave idle.
const MERGE_DIVISOR: u64 = 8;

/// What an arena is to be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ArenaOptions {
    /// The slabs; slot sizes are rounded up to [`STRIDE_ALIGN`].
    pub slabs: Vec<SlabPlan>,
    /// Whether to try for huge pages.
    pub huge_pages: HugePages,
    /// Where the memory should be: best on the node that NIC and device are attached to.
    pub numa: NumaPlacement,
    /// Whether a device is to see it.
    pub cuda: CudaUse,
    /// How long a stream that cannot be marked, or the device at the arena's end, is waited for
    /// before memory is given up for good.
    pub drain_wait: Duration,
}

/// Slots of one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlabPlan {
    /// Bytes of each slot.
    pub slot_bytes: u64,
    /// How many.
    pub slots: u32,
}

/// Whether to register an arena with CUDA.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CudaUse {
    /// With this device where there is one; host addresses alone elsewhere, with a log line.
    Auto {
        /// The device's number.
        ordinal: u32,
    },
    /// With this device; without it there is no arena.
    Require {
        /// The device's number.
        ordinal: u32,
    },
    /// Not at all.
    Off,
}

impl Default for CudaUse {
    fn default() -> Self {
        Self::Auto { ordinal: 0 }
    }
}

impl ArenaOptions {
    /// An arena of these slabs, everything else by default.
    #[must_use]
    pub fn with_slabs(slabs: Vec<SlabPlan>) -> Self {
        Self {
            slabs,
            huge_pages: HugePages::default(),
            numa: NumaPlacement::default(),
            cuda: CudaUse::default(),
            drain_wait: DEFAULT_DRAIN_WAIT,
        }
    }

    /// Bytes that hold every record of `layout` at once, or `most_bytes` where that is less; never
    /// less than the largest record needs.
    #[must_use]
    pub fn bytes_for(layout: &ExpertLayout, most_bytes: u64) -> u64 {
        let store_bytes: u64 =
            classes(layout).iter().map(|c| c.slot_bytes.saturating_mul(c.records)).sum();
        store_bytes.min(most_bytes).max(layout.max_stride())
    }

    /// Cuts `arena_bytes` into slots for the records of `layout`.
    ///
    /// One slab per stride, strides that are close sharing one; each slab gets slots in
    /// proportion to how many records it is for, and what is left over goes to the largest that
    /// still fits. There is always a slot for the largest record.
    ///
    /// All of `arena_bytes` is pinned, less what is not enough for a slot, however small the store
    /// is: [`bytes_for`](Self::bytes_for) says what a store can use.
    ///
    /// # Errors
    /// `arena_bytes` is too small for one record of the largest layer.
    pub fn for_layout(layout: &ExpertLayout, arena_bytes: u64) -> Result<Self, ArenaError> {
        let needed_bytes = layout.max_stride();
        if arena_bytes < needed_bytes {
            return Err(ArenaError::TooSmall { arena_bytes, needed_bytes });
        }
        let classes = classes(layout);
        // Not zero: every class has a record, and strides are at least STRIDE_ALIGN.
        let store_bytes: u128 =
            classes.iter().map(|c| u128::from(c.slot_bytes) * u128::from(c.records)).sum();
        // Room for every record comes first, or where that is too much, for the largest one; the
        // rest is shared out.
        let whole = u128::from(arena_bytes) >= store_bytes;
        let first = if whole { store_bytes } else { u128::from(needed_bytes) };
        let shared = u128::from(arena_bytes) - first;
        let mut slabs: Vec<_> = classes
            .iter()
            .map(|class| {
                let records = u128::from(class.records);
                let slots = shared * records / store_bytes + if whole { records } else { 0 };
                SlabPlan { slot_bytes: class.slot_bytes, slots: bounded(slots) }
            })
            .collect();
        if let Some(largest) = slabs.last_mut().filter(|_| !whole) {
            largest.slots = bounded(u128::from(largest.slots) + 1);
        }
        let planned: u64 = slabs.iter().map(|s| s.slot_bytes * u64::from(s.slots)).sum();
        let mut left = arena_bytes.saturating_sub(planned);
        for slab in slabs.iter_mut().rev() {
            if slab.slot_bytes <= left && slab.slots < MAX_SLOTS {
                slab.slots += 1;
                left -= slab.slot_bytes;
            }
        }
        slabs.retain(|slab| slab.slots > 0);
        Ok(Self::with_slabs(slabs))
    }

    /// The slabs in ascending order of slot size, with sizes rounded up and everything bounded,
    /// and the bytes they take together.
    pub(super) fn checked_slabs(&self) -> Result<(Vec<SlabPlan>, usize), ArenaError> {
        let mut slabs = self.slabs.clone();
        slabs.retain(|slab| slab.slots > 0);
        slabs.sort_by_key(|slab| slab.slot_bytes);
        let mut bytes = 0_u64;
        let mut slots = 0_u32;
        for slab in &mut slabs {
            let found = slab.slot_bytes;
            let too_large =
                || ArenaError::Plan { what: "slot bytes", found, limit: isize::MAX as u64 };
            slab.slot_bytes =
                found.max(1).checked_next_multiple_of(STRIDE_ALIGN).ok_or_else(too_large)?;
            bytes = slab
                .slot_bytes
                .checked_mul(u64::from(slab.slots))
                .and_then(|slab_bytes| slab_bytes.checked_add(bytes))
                .filter(|bytes| *bytes <= isize::MAX as u64)
                .ok_or_else(too_large)?;
            slots = slots.saturating_add(slab.slots);
        }
        if slots == 0 || slots > MAX_SLOTS {
            let (found, limit) = (u64::from(slots), u64::from(MAX_SLOTS));
            return Err(ArenaError::Plan { what: "slots", found, limit });
        }
        // Bounded by isize::MAX above.
        Ok((slabs, usize::try_from(bytes).unwrap_or(usize::MAX)))
    }
}

impl std::fmt::Display for SlabPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} x {}", self.slots, Bytes(self.slot_bytes))
    }
}

/// Records that share a slot size.
#[derive(Clone, Copy)]
struct Class {
    slot_bytes: u64,
    records: u64,
}

/// The strides of `layout` and how many records have them, ascending, close ones merged upwards.
fn classes(layout: &ExpertLayout) -> Vec<Class> {
    let of = |l: &crate::layout::LayerLayout| Class {
        slot_bytes: l.stride(),
        records: u64::from(l.experts()),
    };
    let mut found: Vec<Class> = layout.layers().iter().map(of).collect();
    found.sort_by_key(|class| std::cmp::Reverse(class.slot_bytes));
    let mut merged: Vec<Class> = Vec::new();
    for class in found {
        match merged.last_mut() {
            Some(larger)
                if class.slot_bytes >= larger.slot_bytes - larger.slot_bytes / MERGE_DIVISOR =>
            {
                larger.records += class.records;
            }
            _ => merged.push(class),
        }
    }
    merged.reverse();
    merged
}

fn bounded(slots: u128) -> u32 {
    u32::try_from(slots).unwrap_or(u32::MAX).min(MAX_SLOTS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::layout::{ExpertRecordSpec, LayerLayout, TensorSpec};

    /// A layout whose layer `i` has `records[i].1` records of `records[i].0` payload bytes.
    fn layout(records: &[(u64, u32)]) -> ExpertLayout {
        let layer = |(number, &(bytes, experts)): (usize, &(u64, u32))| {
            let tensor = TensorSpec {
                name: "w".into(),
                dtype: Dtype::U8,
                shape: vec![bytes],
                offset: 0,
                bytes: 0,
            };
            let spec = ExpertRecordSpec::lay_out(vec![tensor]).unwrap();
            let number = u32::try_from(number).unwrap();
            LayerLayout::new(number, experts, String::new(), spec, 65_536).unwrap()
        };
        ExpertLayout::new(records.iter().enumerate().map(layer).collect()).unwrap()
    }

    fn bytes(options: &ArenaOptions) -> u64 {
        options.slabs.iter().map(|s| s.slot_bytes * u64::from(s.slots)).sum()
    }

    #[test]
    fn an_arena_smaller_than_a_record_names_what_it_needs() {
        let layout = layout(&[(1 << 20, 8)]);
        let error = ArenaOptions::for_layout(&layout, 1 << 20).unwrap_err().to_string();
        assert!(error.contains("--expert-arena-bytes") && error.contains("1.1 MiB"), "{error}");
    }

    #[test]
    fn the_smallest_arena_has_one_slot_for_the_largest_record() {
        let layout = layout(&[(4096, 60_000), (1 << 20, 1)]);
        let options = ArenaOptions::for_layout(&layout, layout.max_stride()).unwrap();
        assert_eq!(options.slabs, [SlabPlan { slot_bytes: layout.max_stride(), slots: 1 }]);
    }

    #[test]
    fn slots_are_in_proportion_to_records_and_fill_the_arena() {
        let layout = layout(&[(1 << 20, 64), (64 << 10, 64), (1 << 20, 64)]);
        let options = ArenaOptions::for_layout(&layout, 64 << 20).unwrap();
        let [small, large] = options.slabs[..] else { panic!("{:?}", options.slabs) };
        assert!(large.slots.abs_diff(2 * small.slots) <= 3, "{small} {large}");
        assert!(bytes(&options) <= 64 << 20);
        assert!(bytes(&options) > (64 << 20) - layout.max_stride(), "{small} {large}");
    }

    #[test]
    fn a_small_store_needs_no_more_than_room_for_all_its_records() {
        let layout = layout(&[(10_000, 3), (50_000, 2)]);
        let all = ArenaOptions::bytes_for(&layout, 256 << 20);
        let options = ArenaOptions::for_layout(&layout, all).unwrap();
        assert_eq!(options.slabs.iter().map(|s| s.slots).collect::<Vec<_>>(), [3, 2]);
        assert_eq!(bytes(&options), all);
        assert_eq!(ArenaOptions::bytes_for(&layout, 100_000), 100_000);
        assert_eq!(ArenaOptions::bytes_for(&layout, 1), layout.max_stride());
    }

    #[test]
    fn strides_that_are_close_share_a_slab() {
        let options =
            ArenaOptions::for_layout(&layout(&[(1 << 20, 8), (1_000_000, 8)]), 64 << 20).unwrap();
        assert_eq!(options.slabs.len(), 1);
    }

    #[test]
    fn no_arena_is_larger_than_what_was_given() {
        let layout = layout(&[(10_000, 3), (50_000, 200), (900_000, 5)]);
        for arena_bytes in (layout.max_stride()..40 << 20).step_by(4096 * 7) {
            let options = ArenaOptions::for_layout(&layout, arena_bytes).unwrap();
            assert!(bytes(&options) <= arena_bytes);
            assert_eq!(options.slabs.last().unwrap().slot_bytes, layout.max_stride());
        }
    }

    #[test]
    fn plans_without_slots_or_beyond_an_address_space_are_refused() {
        let plan = |slot_bytes, slots| {
            ArenaOptions::with_slabs(vec![SlabPlan { slot_bytes, slots }]).checked_slabs()
        };
        assert!(plan(4096, 0).is_err());
        assert!(plan(4096, MAX_SLOTS + 1).is_err());
        assert!(plan(u64::MAX, 1).is_err());
        assert!(plan(u64::MAX / 2, 4).is_err());
        let (slabs, bytes) = plan(1, 2).unwrap();
        assert_eq!((slabs[0].slot_bytes, bytes), (4096, 8192));
    }
}
