//! The record header, and the check that stands between bytes and a residency.
//!
//! A header read from disk or network is an [`UnverifiedHeader`] until its checksum held; then it
//! is a [`RecordHeader`], whose fields may still name another record. [`RecordCheck`] compares
//! them with the [`RecordIdentity`] that was asked for and follows the payload's checksums as the
//! bytes arrive, so that nothing has to be read twice.
//!
//! ```text
//! offset bytes
//!      0     8  magic "MTRLEXPR"
//!      8     2  version, 1
//!     10     2  zero
//!     12     4  header bytes, a multiple of 256: where the payload starts
//!     16    16  first 16 bytes of the store fingerprint
//!     32     4  layer
//!     36     4  expert
//!     40     8  payload bytes
//!     48     4  chunk bytes
//!     52     4  chunks
//!     56     8  first 8 bytes of the spec digest
//!     64    4n  CRC-32 of each chunk of the payload
//!  64+4n        zeros up to the last four bytes
//!   end-4     4  CRC-32 of all header bytes before this field
//! ```
//!
//! All integers are little-endian. CRC-32 is the one of IEEE 802.3 (zlib's).
//!
//! Version history: 1 (2026-11) first.

use std::fmt;

use crate::fingerprint::{Fingerprint, PREFIX_BYTES};
use crate::key::ExpertKey;
use crate::layout::{HEADER_FIXED_BYTES, LayerLayout, SpecDigest, header_bytes};

/// First bytes of every record.
pub const MAGIC: [u8; 8] = *b"MTRLEXPR";
/// The version of the record format that this crate reads and writes.
pub const VERSION: u16 = 1;

const FIXED: usize = HEADER_FIXED_BYTES as usize;

/// What a record must say of itself to be the one that was asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordIdentity {
    /// The store's fingerprint, shortened as the header carries it.
    pub fingerprint_prefix: [u8; PREFIX_BYTES],
    /// Layer and expert.
    pub key: ExpertKey,
    /// Digest of the layer's tensor list.
    pub spec: SpecDigest,
    /// Length of the payload.
    pub payload_bytes: u64,
    /// Payload bytes per checksum.
    pub chunk_bytes: u32,
}

impl RecordIdentity {
    /// The identity of expert `expert` of `layer` in the store named by `fingerprint`.
    #[must_use]
    pub fn new(fingerprint: &Fingerprint, layer: &LayerLayout, expert: u32) -> Self {
        Self {
            fingerprint_prefix: fingerprint.prefix(),
            key: ExpertKey::new(layer.layer(), expert),
            spec: layer.spec().digest(),
            payload_bytes: layer.spec().payload_bytes(),
            chunk_bytes: layer.chunk_bytes(),
        }
    }

    /// Chunks in the payload.
    #[must_use]
    pub fn chunks(&self) -> u64 {
        self.payload_bytes.div_ceil(u64::from(self.chunk_bytes))
    }

    /// Bytes of the header.
    #[must_use]
    pub fn header_bytes(&self) -> u64 {
        header_bytes(self.chunks())
    }

    /// Bytes of header and payload.
    #[must_use]
    pub fn record_bytes(&self) -> u64 {
        self.header_bytes() + self.payload_bytes
    }
}

/// How a record differs from the one that was asked for.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum Mismatch {
    /// Fewer bytes than a header has.
    #[error("the record ends after {found} bytes, it has {expected}")]
    Short {
        /// Bytes there were.
        found: u64,
        /// Bytes a whole record has.
        expected: u64,
    },
    /// The first bytes are not a record's.
    #[error("no record header: magic {found:02x?}")]
    Magic {
        /// The first eight bytes.
        found: [u8; 8],
    },
    /// Another version of the format.
    #[error("record format version {found}, this program reads {VERSION}")]
    Version {
        /// The version found.
        found: u16,
    },
    /// The header's own checksum or structure is wrong.
    #[error("damaged record header: {field} is {found}, expected {expected}")]
    Header {
        /// Which field.
        field: &'static str,
        /// The value found.
        found: u64,
        /// The value that follows from the rest.
        expected: u64,
    },
    /// A sound header of another record.
    #[error("another record: {field} is {found}, expected {expected}")]
    Identity {
        /// Which field.
        field: &'static str,
        /// The value found.
        found: String,
        /// The value asked for.
        expected: String,
    },
    /// Nobody looked: the record was received for a measurement.
    #[cfg(feature = "unverified")]
    #[error("the record was not checked")]
    NotChecked,
    /// A chunk's bytes do not have the checksum that the header gives.
    #[error("chunk {chunk} has CRC-32 {found:08x}, its header says {expected:08x}")]
    Checksum {
        /// The chunk's index in the payload.
        chunk: u64,
        /// Checksum of the bytes.
        found: u32,
        /// Checksum in the header.
        expected: u32,
    },
}

/// A header's bytes before their checksum was compared.
#[derive(Clone, Copy)]
pub struct UnverifiedHeader<'a>(&'a [u8]);

impl<'a> UnverifiedHeader<'a> {
    /// Takes the bytes at a record's start; more than the header may follow.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Checks magic, version, structure and checksum.
    ///
    /// # Errors
    /// [`Mismatch`] says which of them failed.
    pub fn verify(self) -> Result<RecordHeader<'a>, Mismatch> {
        let bytes = self.0;
        let found = bytes.len() as u64;
        if bytes.len() < FIXED {
            return Err(Mismatch::Short { found, expected: HEADER_FIXED_BYTES });
        }
        let magic: [u8; 8] = array(bytes, 0);
        if magic != MAGIC {
            return Err(Mismatch::Magic { found: magic });
        }
        let version = u16::from_le_bytes(array(bytes, 8));
        if version != VERSION {
            return Err(Mismatch::Version { found: version });
        }
        let chunks = u64::from(u32::from_le_bytes(array(bytes, 52)));
        let expected = header_bytes(chunks);
        let stated = u64::from(u32::from_le_bytes(array(bytes, 12)));
        if stated != expected {
            return Err(Mismatch::Header { field: "header bytes", found: stated, expected });
        }
        let Some(header) = usize::try_from(expected).ok().and_then(|n| bytes.get(..n)) else {
            return Err(Mismatch::Short { found, expected });
        };
        let (body, crc) = header.split_at(header.len() - 4);
        let stated = u32::from_le_bytes(array(crc, 0));
        let computed = crc32fast::hash(body);
        if stated != computed {
            let (found, expected) = (u64::from(stated), u64::from(computed));
            return Err(Mismatch::Header { field: "CRC-32", found, expected });
        }
        Ok(RecordHeader(header))
    }
}

/// A header whose checksum held. It may still be another record's.
#[derive(Clone, Copy)]
pub struct RecordHeader<'a>(&'a [u8]);

impl RecordHeader<'_> {
    /// Layer and expert.
    #[must_use]
    pub fn key(&self) -> ExpertKey {
        ExpertKey::new(self.u32(32), self.u32(36))
    }

    /// The shortened store fingerprint.
    #[must_use]
    pub fn fingerprint_prefix(&self) -> [u8; PREFIX_BYTES] {
        array(self.0, 16)
    }

    /// CRC-32 of payload chunk `chunk`, if there is such a chunk.
    #[must_use]
    pub fn chunk_crc(&self, chunk: u64) -> Option<u32> {
        let chunk = usize::try_from(chunk).ok()?;
        (chunk < self.u32(52) as usize).then(|| self.u32(FIXED + 4 * chunk))
    }

    /// Compares every field with what was asked for.
    ///
    /// # Errors
    /// [`Mismatch::Identity`] with the first field that differs.
    pub fn expect(&self, identity: &RecordIdentity) -> Result<(), Mismatch> {
        let key = self.key();
        let payload = u64::from_le_bytes(array(self.0, 40));
        differs("version's reserved field", u16::from_le_bytes(array(self.0, 10)), 0)?;
        differs(
            "store fingerprint",
            Hex(&self.fingerprint_prefix()),
            Hex(&identity.fingerprint_prefix),
        )?;
        differs("layer", key.layer, identity.key.layer)?;
        differs("expert", key.expert, identity.key.expert)?;
        differs("payload bytes", payload, identity.payload_bytes)?;
        differs("chunk bytes", self.u32(48), identity.chunk_bytes)?;
        differs("chunks", u64::from(self.u32(52)), identity.chunks())?;
        differs("spec digest", Hex(&array::<8>(self.0, 56)), Hex(&identity.spec.0))
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(array(self.0, at))
    }
}

/// Writes the header of `identity` with the payload's checksums into `out`.
///
/// # Panics
/// `out` is not exactly the header's length, or `chunk_crcs` not one per chunk: both follow from
/// `identity`, so this is a fault of the caller's.
pub fn encode_header(identity: &RecordIdentity, chunk_crcs: &[u32], out: &mut [u8]) {
    assert_eq!(out.len() as u64, identity.header_bytes(), "header length");
    assert_eq!(chunk_crcs.len() as u64, identity.chunks(), "checksums");
    let header_len = u32::try_from(out.len()).expect("MAX_CHUNKS bounds a header far below 4 GiB");
    let chunks = u32::try_from(chunk_crcs.len()).expect("MAX_CHUNKS fits");
    out.fill(0);
    put(out, 0, &MAGIC);
    put(out, 8, &VERSION.to_le_bytes());
    put(out, 12, &header_len.to_le_bytes());
    put(out, 16, &identity.fingerprint_prefix);
    put(out, 32, &identity.key.layer.to_le_bytes());
    put(out, 36, &identity.key.expert.to_le_bytes());
    put(out, 40, &identity.payload_bytes.to_le_bytes());
    put(out, 48, &identity.chunk_bytes.to_le_bytes());
    put(out, 52, &chunks.to_le_bytes());
    put(out, 56, &identity.spec.0);
    for (i, crc) in chunk_crcs.iter().enumerate() {
        put(out, FIXED + 4 * i, &crc.to_le_bytes());
    }
    let end = out.len() - 4;
    let crc = crc32fast::hash(&out[..end]);
    put(out, end, &crc.to_le_bytes());
}

/// Follows one record as its bytes arrive in order, and decides whether it is the right one.
///
/// Feed it with [`advance`](Self::advance) after each read, then ask [`finish`](Self::finish).
/// The first mismatch stays: later bytes cannot mend it.
#[derive(Debug)]
pub struct RecordCheck {
    identity: RecordIdentity,
    checked: usize,
    hasher: crc32fast::Hasher,
    verdict: Result<(), Mismatch>,
}

impl RecordCheck {
    /// Expects `identity`.
    #[must_use]
    pub fn new(identity: RecordIdentity) -> Self {
        Self { identity, checked: 0, hasher: crc32fast::Hasher::new(), verdict: Ok(()) }
    }

    /// Looks at nothing and never passes.
    #[cfg(feature = "unverified")]
    pub(crate) fn unwanted(identity: RecordIdentity) -> Self {
        Self { verdict: Err(Mismatch::NotChecked), ..Self::new(identity) }
    }

    /// What this check expects.
    #[must_use]
    pub fn identity(&self) -> &RecordIdentity {
        &self.identity
    }

    /// Checks what is new in `record`, the record's bytes from its start to where they end now.
    ///
    /// Bytes that an earlier call has seen must not have changed since.
    pub fn advance(&mut self, record: &[u8]) {
        if self.verdict.is_ok() {
            self.verdict = self.step(record);
        }
    }

    /// The verdict over the whole record.
    ///
    /// # Errors
    /// The first mismatch found, or [`Mismatch::Short`] where bytes are missing.
    pub fn finish(&self) -> Result<(), Mismatch> {
        self.verdict.clone()?;
        let (found, expected) = (self.checked as u64, self.identity.record_bytes());
        if found == expected { Ok(()) } else { Err(Mismatch::Short { found, expected }) }
    }

    fn step(&mut self, record: &[u8]) -> Result<(), Mismatch> {
        let header_len = usize_of(self.identity.header_bytes());
        let end = usize_of(self.identity.record_bytes()).min(record.len());
        if end < header_len {
            return Ok(());
        }
        let header = if self.checked < header_len {
            let header = UnverifiedHeader::new(record).verify()?;
            header.expect(&self.identity)?;
            self.checked = header_len;
            header
        } else {
            // Verified when it was complete, and the caller keeps what it has fed.
            RecordHeader(&record[..header_len])
        };
        let chunk_bytes = self.identity.chunk_bytes as usize;
        while self.checked < end {
            let chunk = (self.checked - header_len) / chunk_bytes;
            let chunk_end = (header_len + (chunk + 1) * chunk_bytes)
                .min(usize_of(self.identity.record_bytes()));
            let upto = chunk_end.min(end);
            self.hasher.update(&record[self.checked..upto]);
            self.checked = upto;
            if upto == chunk_end {
                self.close_chunk(header, chunk as u64)?;
            }
        }
        Ok(())
    }

    fn close_chunk(&mut self, header: RecordHeader<'_>, chunk: u64) -> Result<(), Mismatch> {
        let found = std::mem::take(&mut self.hasher).finalize();
        let expected = header.chunk_crc(chunk).unwrap_or(!found);
        if found == expected { Ok(()) } else { Err(Mismatch::Checksum { chunk, found, expected }) }
    }
}

/// Layout limits bound every length far below a 64-bit `usize`; on a smaller one the arena that
/// the record would have to fit in could not exist, and saturation makes the check fail.
fn usize_of(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

fn differs<T: PartialEq + fmt::Display>(
    field: &'static str,
    found: T,
    expected: T,
) -> Result<(), Mismatch> {
    if found == expected {
        return Ok(());
    }
    Err(Mismatch::Identity { field, found: found.to_string(), expected: expected.to_string() })
}

#[derive(PartialEq)]
struct Hex<'a>(&'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The `N` bytes at `at`; every caller has checked the length.
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

fn put(out: &mut [u8], at: usize, bytes: &[u8]) {
    out[at..at + bytes.len()].copy_from_slice(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::sound_record;

    const CHUNK: u32 = 4096;

    fn identity() -> RecordIdentity {
        RecordIdentity {
            fingerprint_prefix: *b"fingerprint-1234",
            key: ExpertKey::new(3, 7),
            spec: SpecDigest(*b"specspec"),
            payload_bytes: 10_000,
            chunk_bytes: CHUNK,
        }
    }

    fn record() -> Vec<u8> {
        let identity = identity();
        let payload: Vec<u8> = (0..identity.payload_bytes).map(|i| (i * 7 % 251) as u8).collect();
        sound_record(&identity, &payload)
    }

    fn verdict(record: &[u8], step: usize) -> Result<(), Mismatch> {
        let mut check = RecordCheck::new(identity());
        for end in (step..record.len()).step_by(step).chain([record.len()]) {
            check.advance(&record[..end]);
        }
        check.finish()
    }

    #[test]
    fn the_header_bytes_are_frozen() {
        let record = record();
        let hex: String = record[..80].iter().map(|b| format!("{b:02x}")).collect();
        // Computed apart from this code, with Python's struct and zlib.
        assert_eq!(
            hex,
            "4d54524c4558505201000000000100006669\
             6e6765727072696e742d3132333403000000070000001027000000000000\
             001000000300000073706563737065636295a0ebc12a651c4ad60f7e00000000"
        );
        assert_eq!(record[80..252], [0; 172]);
        assert_eq!(record[252..256], 0xbb5e_afd3_u32.to_le_bytes());
    }

    #[test]
    fn a_sound_record_passes_however_it_arrives() {
        let record = record();
        for step in [1, 7, 64, 255, 256, 257, 4096, 5000, record.len()] {
            assert_eq!(verdict(&record, step), Ok(()), "in steps of {step}");
        }
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let good = record();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            assert!(verdict(&bad, 1000).is_err(), "byte {at}");
        }
    }

    #[test]
    fn a_missing_or_extra_byte_is_not_a_record() {
        let record = record();
        let error = verdict(&record[..record.len() - 1], 512).unwrap_err();
        assert!(matches!(error, Mismatch::Short { .. }), "{error}");
        assert!(verdict(&record[..100], 512).is_err());
        assert!(verdict(&[], 512).is_err());
    }

    #[test]
    fn a_sound_record_of_another_identity_is_named_as_such() {
        let record = record();
        type Change = (&'static str, fn(&mut RecordIdentity));
        let cases: [Change; 6] = [
            ("store fingerprint", |i| i.fingerprint_prefix[0] ^= 1),
            ("layer", |i| i.key.layer += 1),
            ("expert", |i| i.key.expert += 1),
            ("spec digest", |i| i.spec.0[7] ^= 1),
            ("payload bytes", |i| i.payload_bytes += 1),
            ("chunk bytes", |i| i.chunk_bytes *= 2),
        ];
        for (name, change) in cases {
            let mut other = identity();
            change(&mut other);
            let mut check = RecordCheck::new(other);
            check.advance(&record);
            let error = check.finish().unwrap_err();
            assert!(
                matches!(&error, Mismatch::Identity { field, .. } if *field == name),
                "{error}"
            );
        }
    }

    #[test]
    fn a_header_that_claims_more_chunks_than_there_are_bytes_is_short() {
        let mut bytes = record();
        put(&mut bytes, 52, &u32::MAX.to_le_bytes());
        assert!(UnverifiedHeader::new(&bytes).verify().is_err());
        let claimed = u32::try_from(header_bytes(60_000)).unwrap();
        put(&mut bytes, 52, &60_000_u32.to_le_bytes());
        put(&mut bytes, 12, &claimed.to_le_bytes());
        let error = UnverifiedHeader::new(&bytes).verify().err();
        assert!(matches!(error, Some(Mismatch::Short { .. })));
    }
}
