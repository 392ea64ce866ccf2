//! The arena of a backend: as large as is set, or as large as can be had.
//!
//! Without a size set, an arena holds the records that are asked for, at most [`DEFAULT_ARENA_BYTES`]
//! and what the locked-memory limit has room for ([`LockLimit::room`]); a slot for one record in any
//! case. The kernel has the last word: what it refuses is tried half as large, down to one slot.

use anyhow::anyhow;
use expert_tier::arena::{ArenaError, ArenaOptions, ExpertArena};
use expert_tier::layout::ExpertLayout;
use expert_tier::tier::ExpertTier;
use gpu_sys::limits::{Bytes, LockLimit, Registrations, whole_huge_pages};
use gpu_sys::pinned::{HugePages, PinError};
#[cfg(metrale_rdma_verbs)]
use gpu_sys::verbs::VerbsError;

use super::BackendArgs;

/// Most bytes of an arena that nobody has set.
pub(crate) const DEFAULT_ARENA_BYTES: u64 = 256 << 20;

impl BackendArgs {
    /// An arena for `tier`, which knows it; without a size set, one that holds `most_records` at once
    /// if the default allows it.
    pub(super) fn arena(
        &self,
        tier: &dyn ExpertTier,
        most_records: u64,
    ) -> anyhow::Result<ExpertArena> {
        let (given, ..) = self.arena_wish()?;
        match given {
            Some(bytes) => self.arena_of(tier, bytes).map_err(|error| explain(tier, bytes, error)),
            None => self.default_arena(tier, most_records),
        }
    }

    /// A small arena for `tier`, which knows it, whatever size is set: for `bytes` of records, 4 at
    /// least, as far as the locked-memory limit allows.
    pub(crate) fn small_arena(
        &self,
        tier: &dyn ExpertTier,
        bytes: u64,
    ) -> anyhow::Result<ExpertArena> {
        let records = (bytes / tier.manifest().layout().max_stride().max(1)).max(4);
        self.default_arena(tier, records)
    }

    fn default_arena(
        &self,
        tier: &dyn ExpertTier,
        most_records: u64,
    ) -> anyhow::Result<ExpertArena> {
        let layout = tier.manifest().layout();
        let (limit, registrations) = (LockLimit::current(), tier.registrations());
        let (_, huge_pages, _) = self.arena_wish()?;
        let wanted = wanted_bytes(layout, most_records);
        let mut bytes = default_bytes(layout, wanted, huge_pages, limit.room(&registrations));
        let mut reason = None;
        // Each try has half of the bytes of the one before, so these are few.
        let arena = loop {
            match self.arena_of(tier, bytes) {
                Ok(arena) => break arena,
                Err(error) if error.is_of_size() && bytes > layout.max_stride() => {
                    reason.get_or_insert_with(|| error.to_string());
                    bytes = whole_huge_pages(bytes / 2).max(layout.max_stride());
                }
                Err(error) => return Err(explain(tier, bytes, error)),
            }
        };
        if bytes < wanted {
            let (bytes, wanted) = (Bytes(bytes), Bytes(wanted));
            let reason = reason.unwrap_or_else(|| limit_text(&limit, &registrations));
            tracing::info!(
                "the arena is {bytes} instead of {wanted}: {reason}; raise `ulimit -l`, or grant \
                 CAP_IPC_LOCK, to hold more records at once"
            );
        }
        Ok(arena)
    }

    /// An arena of `bytes`, registered with what `tier` reads through.
    fn arena_of(&self, tier: &dyn ExpertTier, bytes: u64) -> Result<ExpertArena, ArenaError> {
        let mut options = ArenaOptions::for_layout(tier.manifest().layout(), bytes)?;
        // Settings were looked at before the backend was opened.
        if let Ok((_, huge_pages, numa)) = self.arena_wish() {
            (options.huge_pages, options.numa) = (huge_pages, numa);
        }
        let arena = ExpertArena::new(&options)?;
        tier.use_arena(&arena)?;
        Ok(arena)
    }
}

/// Bytes of an arena that nobody has set, without a limit.
fn wanted_bytes(layout: &ExpertLayout, most_records: u64) -> u64 {
    let needed = layout.max_stride().saturating_mul(most_records.min(layout.records()));
    DEFAULT_ARENA_BYTES.min(needed).max(layout.max_stride())
}

/// Bytes of an arena that nobody has set, where the locked-memory limit has `room`: whole huge pages,
/// as that many are pinned, and one slot at least.
fn default_bytes(
    layout: &ExpertLayout,
    wanted: u64,
    huge_pages: HugePages,
    room: Option<u64>,
) -> u64 {
    let Some(room) = room.filter(|room| *room < wanted) else { return wanted };
    let bytes = match huge_pages {
        HugePages::Prefer => whole_huge_pages(room),
        HugePages::Off => room,
    };
    bytes.max(layout.max_stride())
}

/// The limit, and what counts against it beside the pages.
fn limit_text(limit: &LockLimit, registrations: &Registrations) -> String {
    let mut text = format!("the locked-memory limit is {limit}");
    if limit.pinned_bytes > 0 {
        text.push_str(&format!(", {} are registered", Bytes(limit.pinned_bytes)));
    }
    if registrations.devices > 1 {
        text.push_str(&format!(", each of {} devices counts", registrations.devices));
    }
    if registrations.grant_bytes > 0 {
        text.push_str(", what the peer pushes counts again");
    }
    text
}

/// The error of an arena of `bytes`.
fn explain(tier: &dyn ExpertTier, bytes: u64, error: ArenaError) -> anyhow::Error {
    let record_bytes = tier.manifest().layout().max_stride();
    let is_limit = match &error {
        ArenaError::Pin(PinError::LockLimit { .. }) => true,
        #[cfg(metrale_rdma_verbs)]
        ArenaError::Register { source, .. } => matches!(**source, VerbsError::LockLimit { .. }),
        _ => false,
    };
    if !is_limit || bytes > record_bytes {
        return anyhow::Error::new(error).context("cannot make the arena");
    }
    // The library's advice to lower the arena would be no help here.
    let limit = LockLimit::current();
    let needed = Bytes(tier.registrations().needed_bytes(record_bytes));
    anyhow!(
        "one record of this store needs {needed} of locked memory, {}: raise `ulimit -l` \
         (LimitMEMLOCK= in a systemd unit, --ulimit memlock= for a container), or grant \
         CAP_IPC_LOCK; no smaller arena would do",
        limit_text(&limit, &tier.registrations()).replacen(
            "the locked-memory limit",
            "the limit",
            1
        )
    )
}

#[cfg(test)]
mod tests {
    use expert_tier::testing::TestStore;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_default_arena_has_room_under_the_limit_and_for_one_record_at_least() {
        let store = TestStore::new(1, 64, &[1_000_000], 5).open();
        let layout = store.manifest().layout();
        let stride = layout.max_stride();
        let bytes =
            |huge_pages, room| default_bytes(layout, wanted_bytes(layout, 64), huge_pages, room);
        assert_eq!(wanted_bytes(layout, 3), 3 * stride);
        assert_eq!(wanted_bytes(layout, u64::MAX), 64 * stride);
        assert_eq!(bytes(HugePages::Prefer, None), 64 * stride);
        // With a page of it taken, 8 MiB have room for 6 in whole huge pages.
        assert_eq!(bytes(HugePages::Prefer, Some(8 * MIB - 8192)), 6 * MIB);
        assert_eq!(bytes(HugePages::Off, Some(8 * MIB - 8192)), 8 * MIB - 8192);
        assert_eq!(bytes(HugePages::Prefer, Some(0)), stride);
        assert_eq!(bytes(HugePages::Prefer, Some(DEFAULT_ARENA_BYTES)), 64 * stride);
    }
}
