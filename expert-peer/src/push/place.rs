//! Where in the store the bytes of a request are.

use expert_tier::key::ExpertKey;
use expert_tier::store::manifest::Manifest;
use railset::push::{Fetch, PushStatus};

use crate::ledger::Ledger;

/// A record's place in the store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place {
    pub(super) key: ExpertKey,
    /// Position of its layer in the layout.
    pub(super) layer_at: usize,
    /// Where it starts in the layer's file.
    pub(super) start: u64,
}

impl Place {
    /// Holds a request against the store: the record must be there and sound as far as is known,
    /// and have the bytes, of which there may be `range_bytes` at most.
    pub(super) fn of(
        manifest: &Manifest,
        ledger: &Ledger,
        fetch: &Fetch,
        range_bytes: u32,
    ) -> Result<Self, PushStatus> {
        let key = ExpertKey::new(fetch.layer, fetch.expert);
        let (layer_at, layer) =
            manifest.layout().locate_at(key).map_err(|_| PushStatus::NoSuchKey)?;
        let end = fetch.offset.checked_add(u64::from(fetch.bytes));
        let inside = end.is_some_and(|end| end <= layer.record_bytes());
        if fetch.bytes == 0 || fetch.bytes > range_bytes || !inside {
            return Err(PushStatus::OutOfRange);
        }
        if ledger.is_withdrawn(key) {
            return Err(PushStatus::Damaged);
        }
        // Experts and strides are bounded, so the product is far below 2^63.
        Ok(Self { key, layer_at, start: u64::from(key.expert) * layer.stride() })
    }
}

#[cfg(test)]
mod tests {
    use expert_tier::testing::TestStore;
    use railset::push::Window;

    use super::*;

    #[test]
    fn only_bytes_of_records_that_are_there_have_a_place() {
        let store = TestStore::mixed(5).open();
        let (manifest, ledger) = (store.manifest(), Ledger::new(store.manifest()));
        let layer = &manifest.layout().layers()[1];
        let (number, record) = (layer.layer(), layer.record_bytes());
        let place = |layer, expert, offset, bytes| {
            let into = Window { address: 4096, rkey: 1 };
            let fetch = Fetch { id: 1, layer, expert, offset, bytes, into };
            Place::of(manifest, &ledger, &fetch, 1 << 16)
        };
        let found = place(number, 3, record - 9, 9).unwrap();
        assert_eq!((found.layer_at, found.start), (1, 3 * layer.stride()));
        assert_eq!(place(number, 8, 0, 1), Err(PushStatus::NoSuchKey));
        assert_eq!(place(9999, 0, 0, 1), Err(PushStatus::NoSuchKey));
        let out = Err(PushStatus::OutOfRange);
        assert_eq!(place(number, 3, record - 9, 10), out, "the padding is not the record's");
        for (offset, bytes) in [(u64::MAX, 1), (0, u32::MAX), (u64::MAX, u32::MAX), (0, 0)] {
            assert_eq!(place(number, 3, offset, bytes), out);
        }
        assert_eq!(place(number, 3, 0, (1 << 16) + 1), out, "more than one request may have");
        ledger.withdraw(ExpertKey::new(number, 3));
        assert_eq!(place(number, 3, 0, 9), Err(PushStatus::Damaged));
        place(number, 4, 0, 9).expect("another record");
    }
}
