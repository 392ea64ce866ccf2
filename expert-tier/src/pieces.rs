//! Checking a record whose parts arrive in any order, on any thread.
//!
//! The payload is cut into *pieces*: a chunk each, or an equal share of a chunk that is larger than
//! [`PIECE_BYTES`]. The CRC-32 of a piece needs nothing but its own bytes, so whoever has them takes
//! it, before the header has arrived if need be. [`Pieces::verdict`] then compares the header with
//! the identity that was asked for, and the sums with the header's.

use std::ops::Range;

use crc32fast::Hasher;

use crate::record::{Mismatch, RecordIdentity, UnverifiedHeader};

/// Largest piece: a few of them keep several checking threads busy within one record, and one is
/// still in a core's cache when it is checked.
pub(crate) const PIECE_BYTES: u32 = 256 * 1024;

/// How the payload of one record is cut. Lengths and offsets are in the record, header included.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pieces {
    header_bytes: usize,
    record_bytes: usize,
    /// A power of two that divides the chunk.
    piece_bytes: usize,
}

impl Pieces {
    /// The pieces of `identity`; `None` where the record could not be addressed on this machine.
    pub(crate) fn of(identity: &RecordIdentity) -> Option<Self> {
        Some(Self {
            header_bytes: usize::try_from(identity.header_bytes()).ok()?,
            record_bytes: usize::try_from(identity.record_bytes()).ok()?,
            piece_bytes: identity.chunk_bytes.min(PIECE_BYTES) as usize,
        })
    }

    pub(crate) fn record_bytes(&self) -> usize {
        self.record_bytes
    }

    pub(crate) fn count(&self) -> usize {
        (self.record_bytes - self.header_bytes).div_ceil(self.piece_bytes)
    }

    /// Where a part that starts at `from` ends, if it is to have at most `most` bytes: at the end of
    /// a piece, and after one piece at least. The first part has the header, too.
    pub(crate) fn part_end(&self, from: usize, most: usize) -> usize {
        // The last piece may be shorter than the others.
        if self.record_bytes - from <= most {
            return self.record_bytes;
        }
        let first = from.max(self.header_bytes);
        let room = most.saturating_sub(first - from);
        let whole = (room / self.piece_bytes).max(1) * self.piece_bytes;
        self.record_bytes.min(first.saturating_add(whole))
    }

    /// The pieces that lie in `part`, which starts and ends where [`part_end`](Self::part_end) says,
    /// and where in the part's bytes each one is.
    pub(crate) fn within(
        &self,
        part: &Range<usize>,
    ) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let this = *self;
        let (start, end) = (part.start, part.end);
        let first = start.max(this.header_bytes);
        (first..end).step_by(this.piece_bytes).map(move |from| {
            let to = end.min(from + this.piece_bytes);
            ((from - this.header_bytes) / this.piece_bytes, from - start..to - start)
        })
    }

    /// Whether `header`, the record's first bytes, is that of `identity`, and `sums`, one per piece,
    /// are the checksums that it gives.
    ///
    /// # Errors
    /// The first difference found.
    pub(crate) fn verdict(
        &self,
        identity: &RecordIdentity,
        header: &[u8],
        sums: &[u32],
    ) -> Result<(), Mismatch> {
        let header = UnverifiedHeader::new(header).verify()?;
        header.expect(identity)?;
        let per_chunk = identity.chunk_bytes as usize / self.piece_bytes;
        for (chunk, sums) in (0..).zip(sums.chunks(per_chunk)) {
            let found = self.joined(chunk as usize * per_chunk, sums);
            let expected = header.chunk_crc(chunk).unwrap_or(!found);
            if found != expected {
                return Err(Mismatch::Checksum { chunk, found, expected });
            }
        }
        Ok(())
    }

    /// The checksum of the pieces from `first` on, one after another.
    fn joined(&self, first: usize, sums: &[u32]) -> u32 {
        let mut pieces = (first..).zip(sums).map(|(piece, &sum)| {
            let start = self.header_bytes + piece * self.piece_bytes;
            let bytes = self.piece_bytes.min(self.record_bytes - start);
            Hasher::new_with_initial_len(sum, bytes as u64)
        });
        let joined = pieces.next().map(|first| {
            pieces.fold(first, |mut joined, next| {
                joined.combine(&next);
                joined
            })
        });
        joined.map_or(0, Hasher::finalize)
    }
}

/// The checksum of one piece's bytes.
pub(crate) fn sum(piece: &[u8]) -> u32 {
    crc32fast::hash(piece)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::ExpertKey;
    use crate::layout::SpecDigest;
    use crate::testing::sound_record;

    fn identity(payload_bytes: u64, chunk_bytes: u32) -> RecordIdentity {
        RecordIdentity {
            fingerprint_prefix: *b"fingerprint-1234",
            key: ExpertKey::new(3, 7),
            spec: SpecDigest(*b"specspec"),
            payload_bytes,
            chunk_bytes,
        }
    }

    fn record(identity: &RecordIdentity) -> Vec<u8> {
        let payload: Vec<u8> = (0..identity.payload_bytes).map(|i| (i * 7 % 251) as u8).collect();
        sound_record(identity, &payload)
    }

    /// Checks `record` in parts of at most `most` bytes, the last part first.
    fn verdict(identity: &RecordIdentity, record: &[u8], most: usize) -> Result<(), Mismatch> {
        let pieces = Pieces::of(identity).unwrap();
        let mut parts = vec![];
        let mut from = 0;
        while from < pieces.record_bytes() {
            let to = pieces.part_end(from, most);
            parts.push(from..to);
            from = to;
        }
        let mut sums = vec![None; pieces.count()];
        for part in parts.into_iter().rev() {
            let bytes = &record[part.clone()];
            for (piece, range) in pieces.within(&part) {
                assert_eq!(sums[piece].replace(sum(&bytes[range])), None, "piece {piece} twice");
            }
        }
        let sums: Vec<u32> = sums.into_iter().map(|sum| sum.expect("every piece")).collect();
        pieces.verdict(identity, record, &sums)
    }

    const CASES: [(u64, u32); 7] = [
        (10_000, 4096),
        (4096, 4096),
        (1, 4096),
        (300_000, 65_536),
        (1_000_000, 262_144),
        (1_300_000, 524_288),
        (2_500_000, 1_048_576),
    ];

    #[test]
    fn a_sound_record_passes_whatever_its_parts() {
        for (payload, chunk) in CASES {
            let identity = identity(payload, chunk);
            let record = record(&identity);
            for most in [1, 4096, 10_000, 262_144, 1 << 20, usize::MAX] {
                assert_eq!(verdict(&identity, &record, most), Ok(()), "{payload}/{chunk}/{most}");
            }
        }
    }

    #[test]
    fn a_part_has_at_most_what_it_may_and_a_header_besides() {
        for (payload, chunk) in CASES {
            let pieces = Pieces::of(&identity(payload, chunk)).unwrap();
            let mut from = 0;
            while from < pieces.record_bytes() {
                let to = pieces.part_end(from, PIECE_BYTES as usize);
                assert!(to > from && to - from <= PIECE_BYTES as usize + pieces.header_bytes);
                from = to;
            }
        }
    }

    #[test]
    fn every_flipped_bit_is_found_and_its_chunk_named() {
        let identity = identity(1_300_000, 524_288);
        let good = record(&identity);
        let header = identity.header_bytes() as usize;
        for at in (0..good.len()).step_by(9973).chain([good.len() - 1]) {
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            let error = verdict(&identity, &bad, 262_144).unwrap_err();
            match error {
                Mismatch::Checksum { chunk, .. } => {
                    assert_eq!(chunk, ((at - header) / 524_288) as u64);
                }
                _ => assert!(at < header, "byte {at}: {error}"),
            }
        }
    }

    #[test]
    fn a_sound_record_of_another_identity_is_named_as_such() {
        let right = identity(10_000, 4096);
        let record = record(&right);
        let other = RecordIdentity { key: ExpertKey::new(3, 8), ..right };
        let error = verdict(&other, &record, 4096).unwrap_err();
        assert!(matches!(error, Mismatch::Identity { field: "expert", .. }), "{error}");
    }
}
