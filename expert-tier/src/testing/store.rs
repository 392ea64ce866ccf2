//! Small stores and arenas.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::arena::{ArenaOptions, ExpertArena, SlabPlan};
use crate::dtype::Dtype;
use crate::key::ExpertKey;
use crate::layout::{ExpertLayout, ExpertRecordSpec, LayerLayout, TensorSpec};
use crate::pack::{SyntheticSpec, pack_synthetic};
use crate::record::{RecordIdentity, encode_header};
use crate::store::ExpertStore;
use crate::store::manifest::{Manifest, layer_file_name};

/// A manifest of two layers of four experts, without a store behind it; `seed` makes it another.
#[must_use]
pub fn tiny_manifest(seed: u8) -> Manifest {
    let tensor = |name: &str, shape: &[u64]| TensorSpec {
        name: name.into(),
        dtype: Dtype::Bf16,
        shape: shape.into(),
        offset: 0,
        bytes: 0,
    };
    let layer = |number: u32, rows: u64| {
        let tensors = vec![tensor("mlp.experts.*.up.weight", &[rows, 64]), tensor("b", &[64])];
        let spec = ExpertRecordSpec::lay_out(tensors).expect("small tensors are within limits");
        LayerLayout::new(number, 4, format!("model.layers.{number}."), spec, 4096)
            .expect("four experts are within limits")
    };
    let layout = ExpertLayout::new(vec![layer(1, 32), layer(3, 80)]).expect("ascending");
    Manifest::new("tiny".into(), layout, vec![[seed; 32], [seed; 32]])
}

/// A synthetic store in a directory of its own, which goes with it.
pub struct TestStore {
    dir: TempDir,
    spec: SyntheticSpec,
}

impl TestStore {
    /// Three layers of eight experts: records of one chunk, of several with a short last one, and
    /// of whole chunks.
    #[must_use]
    pub fn mixed(seed: u64) -> Self {
        Self::new(3, 8, &[5_000, 700_001, 524_288], seed)
    }

    /// A store of the given shape; see [`SyntheticSpec::new`].
    #[must_use]
    pub fn new(layers: u32, experts: u32, payload_bytes: &[u64], seed: u64) -> Self {
        Self::new_in(&std::env::temp_dir(), layers, experts, payload_bytes, seed)
    }

    /// The same, in a directory in `place`.
    #[must_use]
    pub fn new_in(
        place: &Path,
        layers: u32,
        experts: u32,
        payload_bytes: &[u64],
        seed: u64,
    ) -> Self {
        let spec = SyntheticSpec::new(layers, experts, payload_bytes, seed).expect("small store");
        let dir = tempfile::tempdir_in(place).expect("a temporary directory");
        pack_synthetic(&spec, &dir.path().join("store")).expect("packing a small store");
        Self { dir, spec }
    }

    /// The same, on the disk of the target directory, wherever that is: the temporary directory may be
    /// memory, which has no direct reads.
    #[must_use]
    pub fn on_disk(layers: u32, experts: u32, payload_bytes: &[u64], seed: u64) -> Self {
        let program = std::env::current_exe().expect("a test is a program");
        let place = program.parent().expect("a program is in a directory");
        Self::new_in(place, layers, experts, payload_bytes, seed)
    }

    /// The store's directory.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("store")
    }

    /// A place beside the store for a test's own files.
    #[must_use]
    pub fn scratch(&self) -> &Path {
        self.dir.path()
    }

    /// What the record of `key` must hold, computed without the store.
    #[must_use]
    pub fn payload(&self, key: ExpertKey) -> Vec<u8> {
        self.spec.payload(key)
    }

    /// The store, opened.
    #[must_use]
    pub fn open(&self) -> ExpertStore {
        ExpertStore::open(&self.path()).expect("the store that was just packed")
    }

    /// Flips a bit in the byte of `key`'s record that lies `offset` bytes from its start.
    pub fn flip_bit(&self, key: ExpertKey, offset: u64) {
        let store = self.open();
        let layer = store.manifest().layout().locate(key).expect("a key of the store");
        let at = u64::from(key.expert) * layer.stride() + offset;
        let path = self.path().join(layer_file_name(key.layer));
        let file = OpenOptions::new().read(true).write(true).open(path).expect("a file of ours");
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).expect("a byte of the record");
        file.write_all_at(&[byte[0] ^ 0x10], at).expect("a byte of the record");
    }
}

/// The record of `identity` with this payload, sound to the last checksum.
#[must_use]
pub fn sound_record(identity: &RecordIdentity, payload: &[u8]) -> Vec<u8> {
    assert_eq!(payload.len() as u64, identity.payload_bytes, "the identity's payload");
    let chunk = usize::try_from(identity.chunk_bytes).expect("a small chunk");
    let crcs: Vec<u32> = payload.chunks(chunk).map(crc32fast::hash).collect();
    let mut record = vec![0; usize::try_from(identity.header_bytes()).expect("a small header")];
    encode_header(identity, &crcs, &mut record);
    record.extend_from_slice(payload);
    record
}

/// An arena of `slots` slots for records up to 1 MiB.
#[must_use]
pub fn small_arena(slots: u32) -> ExpertArena {
    let slabs = vec![SlabPlan { slot_bytes: 1 << 20, slots }];
    ExpertArena::new(&ArenaOptions::with_slabs(slabs)).expect("a few MiB of locked memory")
}
