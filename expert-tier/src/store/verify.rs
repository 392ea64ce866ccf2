//! Reads records from a store and lets only checked bytes through; checks whole stores.
//!
//! A record is read chunk by chunk, so that memory is bounded by the chunk and not by the record:
//! one header and one chunk per reader, at most 16 MiB and a little, whatever the store.

use std::io;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use crate::key::ExpertKey;
use crate::layout::LayerLayout;
use crate::pack::each_worker;
use crate::record::{Mismatch, RecordIdentity, UnverifiedHeader, encode_header};
use crate::store::manifest::ChecksumDigest;
use crate::store::{ExpertStore, StoreError};

/// Bytes of padding compared at a time.
const PADDING_BYTES: usize = 64 << 10;

/// Why bytes of a record were not handed out.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The record cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The bytes are not those of the record asked for.
    #[error("{key}: {mismatch}")]
    Mismatch {
        /// The record.
        key: ExpertKey,
        /// What differs.
        mismatch: Mismatch,
    },
    /// Bytes that no checksum covers and that must be zero are not.
    #[error("{key}: byte {at} of the record must be zero padding")]
    Padding {
        /// The record.
        key: ExpertKey,
        /// Position from the record's start.
        at: u64,
    },
    /// The receiver of the bytes failed.
    #[error("cannot hand on {key}: {source}")]
    Sink {
        /// The record.
        key: ExpertKey,
        /// The receiver's error.
        source: io::Error,
    },
}

impl RecordError {
    /// The error without the record's name, for a line that has it already.
    #[must_use]
    pub fn reason(&self) -> String {
        match self {
            Self::Mismatch { mismatch, .. } => mismatch.to_string(),
            Self::Padding { at, .. } => format!("byte {at} of the record must be zero padding"),
            Self::Store(error) => error.to_string(),
            Self::Sink { source, .. } => source.to_string(),
        }
    }
}

/// A record whose header was checked, and whose payload is checked as it is read.
#[derive(Debug)]
pub struct RecordReader<'a> {
    store: &'a ExpertStore,
    identity: RecordIdentity,
    chunk_crcs: Vec<u32>,
}

impl<'a> RecordReader<'a> {
    /// Reads and checks the header of `key`.
    ///
    /// # Errors
    /// There is no such record, it cannot be read, or its header is damaged or another's.
    pub fn open(store: &'a ExpertStore, key: ExpertKey) -> Result<Self, RecordError> {
        let identity = store.manifest().identity(key).map_err(StoreError::from)?;
        let mut bytes = vec![0; usize_of(identity.header_bytes())];
        store.read_at(key, 0, &mut bytes)?;
        let differs = |mismatch| RecordError::Mismatch { key, mismatch };
        let header = UnverifiedHeader::new(&bytes).verify().map_err(differs)?;
        header.expect(&identity).map_err(differs)?;
        let chunk_crcs: Vec<u32> =
            (0..identity.chunks()).map_while(|chunk| header.chunk_crc(chunk)).collect();
        // `expect` compared the number of chunks, so there is a checksum for each.
        let mut written = vec![0; bytes.len()];
        encode_header(&identity, &chunk_crcs, &mut written);
        match bytes.iter().zip(&written).position(|(found, expected)| found != expected) {
            Some(at) => Err(RecordError::Padding { key, at: at as u64 }),
            None => Ok(Self { store, identity, chunk_crcs }),
        }
    }

    /// The checksum of each chunk of the payload, as the header gives it.
    #[must_use]
    pub fn chunk_crcs(&self) -> &[u32] {
        &self.chunk_crcs
    }

    /// Passes `bytes` bytes of the payload from `offset` on to `sink`, each chunk after its
    /// checksum held.
    ///
    /// # Errors
    /// A chunk cannot be read or is damaged, the range leaves the payload, or `sink` fails.
    /// Chunks before the failing one have been passed on.
    pub fn read(
        &self,
        offset: u64,
        bytes: u64,
        mut sink: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), RecordError> {
        let RecordIdentity { key, payload_bytes, .. } = self.identity;
        let end = offset.saturating_add(bytes);
        if end > payload_bytes {
            let stride = payload_bytes;
            return Err(StoreError::Range { key, start: offset, end, stride }.into());
        }
        let chunk_bytes = u64::from(self.identity.chunk_bytes);
        let mut buffer = vec![0; usize_of(chunk_bytes.min(payload_bytes))];
        let mut at = offset;
        while at < end {
            let chunk = at / chunk_bytes;
            let start = chunk * chunk_bytes;
            let chunk_end = (start + chunk_bytes).min(payload_bytes);
            let data = &mut buffer[..usize_of(chunk_end - start)];
            self.store.read_at(key, self.identity.header_bytes() + start, data)?;
            let (found, expected) = (crc32fast::hash(data), self.chunk_crcs[usize_of(chunk)]);
            if found != expected {
                let mismatch = Mismatch::Checksum { chunk, found, expected };
                return Err(RecordError::Mismatch { key, mismatch });
            }
            let part = &data[usize_of(at - start)..usize_of(end.min(chunk_end) - start)];
            sink(part).map_err(|source| RecordError::Sink { key, source })?;
            at = chunk_end;
        }
        Ok(())
    }

    /// Checks the bytes between the payload and the next record.
    fn check_padding(&self, layer: &LayerLayout) -> Result<(), RecordError> {
        let key = self.identity.key;
        let mut buffer = vec![0; PADDING_BYTES];
        let mut at = layer.record_bytes();
        while at < layer.stride() {
            let part = &mut buffer[..usize_of(layer.stride() - at).min(PADDING_BYTES)];
            self.store.read_at(key, at, part)?;
            if let Some(odd) = part.iter().position(|&byte| byte != 0) {
                return Err(RecordError::Padding { key, at: at + odd as u64 });
            }
            at += part.len() as u64;
        }
        Ok(())
    }
}

/// One damaged record, or a layer whose records are each sound and not the packed ones.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Damage {
    /// The layer's number.
    pub layer: u32,
    /// The expert; `None` where the whole layer is meant.
    pub expert: Option<u32>,
    /// What is wrong.
    pub why: String,
}

impl std::fmt::Display for Damage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "layer {}", self.layer)?;
        if let Some(expert) = self.expert {
            write!(f, " expert {expert}")?;
        }
        write!(f, ": {}", self.why)
    }
}

/// Reads all of `store` and says what is damaged, by layer and expert; empty if nothing is.
///
/// Checks every byte: headers, identities, chunks, padding, and the checksums of each layer
/// against the manifest, which finds a record that was exchanged for another sound one of the
/// same name. `progress` is called from worker threads with the bytes checked since its last
/// call. A record that cannot be read counts as damaged.
#[must_use]
pub fn verify(store: &ExpertStore, progress: &(dyn Fn(u64) + Sync)) -> Vec<Damage> {
    let layout = store.manifest().layout();
    let keys: Vec<ExpertKey> = layout.keys().collect();
    let next = AtomicU64::new(0);
    let found = Mutex::new(Vec::with_capacity(keys.len()));
    let work = || {
        // Relaxed: the counter hands out positions and guards no other data.
        while let Some(&key) = keys.get(usize_of(next.fetch_add(1, Ordering::Relaxed))) {
            let outcome = check_record(store, key);
            let stride = layout.layer(key.layer).map_or(0, LayerLayout::stride);
            found.lock().unwrap_or_else(PoisonError::into_inner).push((key, outcome));
            progress(stride);
        }
    };
    let workers = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    each_worker(workers, &work);
    let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    found.sort_unstable_by_key(|&(key, _)| key);
    report(store, &found)
}

fn check_record(store: &ExpertStore, key: ExpertKey) -> Result<Vec<u32>, RecordError> {
    let record = RecordReader::open(store, key)?;
    record.read(0, record.identity.payload_bytes, |_| Ok(()))?;
    let layer = store.manifest().layout().locate(key).map_err(StoreError::from)?;
    record.check_padding(layer)?;
    Ok(record.chunk_crcs)
}

type Outcome = (ExpertKey, Result<Vec<u32>, RecordError>);

fn report(store: &ExpertStore, outcomes: &[Outcome]) -> Vec<Damage> {
    let mut damaged = Vec::new();
    for layer in outcomes.chunk_by(|(a, _), (b, _)| a.layer == b.layer) {
        let before = damaged.len();
        let mut digest = ChecksumDigest::default();
        for (key, outcome) in layer {
            match outcome {
                Ok(crcs) => digest.record(crcs.iter().copied()),
                Err(error) => {
                    let (layer, expert) = (key.layer, Some(key.expert));
                    damaged.push(Damage { layer, expert, why: error.reason() });
                }
            }
        }
        let layer = layer[0].0.layer;
        let packed = store.manifest().checksums(layer);
        if damaged.len() == before && packed != Some(digest.finish()) {
            let why = "every record is sound, but their checksums are not those that the \
                       manifest was written with: a record was replaced";
            damaged.push(Damage { layer, expert: None, why: why.into() });
        }
    }
    damaged
}

/// Saturates: every use is bounded by a chunk, a header or a list in memory.
fn usize_of(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::FileExt;
    use std::path::Path;

    use super::*;
    use crate::pack::{self, PackOptions, Source};

    /// Two layers of three records, payloads of 5000 and 300 bytes, chunks of 4096.
    fn store(dir: &Path) -> ExpertStore {
        let spec = "layers=2,experts=3,bytes=5000/300,seed=5".parse().unwrap();
        let options = PackOptions { chunk_bytes: 4096, ..PackOptions::default() };
        let plan = pack::plan(&Source::Synthetic(spec), &options).unwrap();
        pack::run(&plan, dir, &|_| {}).unwrap();
        ExpertStore::open(dir).unwrap()
    }

    fn damage(dir: &Path) -> Vec<String> {
        let store = ExpertStore::open(dir).unwrap();
        verify(&store, &|_| {}).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_flipped_bit_is_found_wherever_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        assert!(damage(dir.path()).is_empty());
        for layer in store.manifest().layout().layers() {
            let path = dir.path().join(format!("layer-{:05}.records", layer.layer()));
            let good = fs::read(&path).unwrap();
            let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
            for at in (0..good.len()).step_by(97).chain([good.len() - 1]) {
                file.write_all_at(&[good[at] ^ 0x10], at as u64).unwrap();
                let expert = at as u64 / layer.stride();
                let found = damage(dir.path());
                let named = format!("layer {} expert {expert}: ", layer.layer());
                assert!(found.len() == 1 && found[0].starts_with(&named), "byte {at}: {found:?}");
                file.write_all_at(&good[at..=at], at as u64).unwrap();
            }
        }
        assert!(damage(dir.path()).is_empty());
    }

    #[test]
    fn a_sound_record_in_the_place_of_another_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let path = dir.path().join("layer-00001.records");
        let mut bytes = fs::read(&path).unwrap();
        // Expert 2 with other weights, and a header that is right for them.
        let identity = store.manifest().identity(ExpertKey::new(1, 2)).unwrap();
        let stride = 4096;
        let header = usize_of(identity.header_bytes());
        bytes[2 * stride + header] ^= 1;
        let payload = &bytes[2 * stride + header..][..usize_of(identity.payload_bytes)];
        let crc = crc32fast::hash(payload);
        encode_header(&identity, &[crc], &mut bytes[2 * stride..][..header]);
        fs::write(&path, &bytes).unwrap();
        let found = damage(dir.path());
        assert!(found.len() == 1 && found[0].starts_with("layer 1: "), "{found:?}");
        // Two sound records that changed places name themselves.
        bytes.copy_within(..stride, stride);
        fs::write(&path, &bytes).unwrap();
        let found = damage(dir.path());
        assert_eq!(found, ["layer 1 expert 1: another record: expert is 0, expected 1"]);
    }

    #[test]
    fn a_reader_hands_out_any_range_and_nothing_damaged() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let key = ExpertKey::new(0, 1);
        let spec: pack::SyntheticSpec = "layers=2,experts=3,bytes=5000/300,seed=5".parse().unwrap();
        let whole = spec.payload(key);
        let read = |offset, bytes| {
            let mut out = Vec::new();
            let record = RecordReader::open(&store, key)?;
            record.read(offset, bytes, |part| {
                out.extend_from_slice(part);
                Ok(())
            })?;
            Ok::<_, RecordError>(out)
        };
        for (offset, bytes) in [(0, 5000), (4000, 200), (4096, 904), (4999, 1), (17, 0)] {
            let expected = &whole[usize_of(offset)..usize_of(offset + bytes)];
            assert_eq!(read(offset, bytes).unwrap(), expected, "{offset} {bytes}");
        }
        assert!(read(4999, 2).is_err() && read(u64::MAX, 1).is_err());
        let path = dir.path().join("layer-00000.records");
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        let at = 8192 + 256 + 4096;
        file.write_all_at(&[whole[4096] ^ 1], at).unwrap();
        assert_eq!(read(0, 4096).unwrap(), whole[..4096], "the first chunk is sound");
        assert!(read(4095, 2).unwrap_err().to_string().contains("chunk 1 has CRC-32"));
    }
}
