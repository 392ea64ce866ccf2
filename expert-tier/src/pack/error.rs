//! Why a pack stopped. Every variant names the file, tensor or setting to look at.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::layout::LayoutError;

/// Why a checkpoint could not be packed. Nothing is left behind at the output path, except by
/// [`Unsynced`](Self::Unsynced), and nothing beside it, except by [`Kept`](Self::Kept).
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// A system call on a file failed.
    #[error("cannot {operation} {}: {source}", path.display())]
    Io {
        /// What was tried, as a verb.
        operation: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The input directory is not a checkpoint.
    #[error("{} is not a safetensors checkpoint: {why}", path.display())]
    NotACheckpoint {
        /// The directory.
        path: PathBuf,
        /// What is missing or ambiguous.
        why: String,
    },
    /// A JSON file is not what it should be.
    #[error("{}: {why}", path.display())]
    Document {
        /// `config.json`, the index, or a shard whose header this is.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A file of another kind stands where one of the checkpoint's should.
    #[error("{} is {kind}, expected {expected}: {advice}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What it is.
        kind: String,
        /// What should be there.
        expected: &'static str,
        /// What to do about it.
        advice: &'static str,
    },
    /// The index names a file that is not there.
    #[error("shard {shard} is absent: the index says it holds {tensor}")]
    ShardAbsent {
        /// The file.
        shard: String,
        /// A tensor that the index places there.
        tensor: String,
    },
    /// A shard's length is not what its header describes.
    #[error("shard {shard} has {found} bytes, its header describes {expected}: {}",
        if found < expected { "it is truncated" } else { "it has bytes that no tensor owns" })]
    ShardLength {
        /// The file.
        shard: String,
        /// Its length.
        found: u64,
        /// The length that its header describes.
        expected: u64,
    },
    /// A shard is not the one whose header was read.
    #[error(
        "shard {shard} changed while it was packed: {how}; pack again when nobody writes to it"
    )]
    ShardChanged {
        /// The file.
        shard: String,
        /// What tells it from the one that was planned with.
        how: &'static str,
    },
    /// One name in two places.
    #[error("duplicate tensor {tensor}: in {first} and in {second}")]
    DuplicateTensor {
        /// The name.
        tensor: String,
        /// A shard that has it.
        first: String,
        /// Another shard, or the same one.
        second: String,
    },
    /// The index places a tensor in a shard that has no such tensor.
    #[error("the index says shard {shard} holds {tensor}, the shard has no such tensor")]
    NotInShard {
        /// The name.
        tensor: String,
        /// The shard that the index gives.
        shard: String,
    },
    /// A tensor lies in another shard than the index says.
    #[error("{tensor} lies in shard {found}, the index says {stated}")]
    WrongShard {
        /// The name.
        tensor: String,
        /// Where it is.
        found: String,
        /// Where the index says it is.
        stated: String,
    },
    /// A file that no shard is has experts of the model.
    #[error("{file} holds {tensor}, and {why}: move it elsewhere, or have the index name it")]
    Stray {
        /// The file.
        file: String,
        /// An expert's tensor in it.
        tensor: String,
        /// Why it is none of the shards.
        why: String,
    },
    /// A tensor that looks like an expert's and fits no known structure.
    #[error("{tensor} looks like an expert tensor and is not understood: {why}")]
    NotUnderstood {
        /// The name.
        tensor: String,
        /// What does not fit.
        why: String,
    },
    /// An expert lacks what another expert of its layer has.
    #[error("{tensor} is missing, {sibling} is there")]
    MissingTensor {
        /// The absent tensor's full name.
        tensor: String,
        /// A sibling's tensor that is there.
        sibling: String,
    },
    /// Experts of a layer differ where they must not.
    #[error(
        "{tensor} is {found}, its sibling {sibling} is {expected}: {differ} of the {experts} experts \
         of layer {layer} differ from the others. All records of a layer have one layout; two kinds \
         of experts in a layer (for text and for images, say) would need a layout each, which the \
         store format does not have"
    )]
    SiblingDiffers {
        /// The name.
        tensor: String,
        /// Its type and shape.
        found: String,
        /// The tensor it was compared with.
        sibling: String,
        /// That one's type and shape.
        expected: String,
        /// The layer's number.
        layer: u32,
        /// Experts whose tensor is not like the sibling's.
        differ: u64,
        /// Experts that have the tensor.
        experts: u64,
    },
    /// An expert's tensor of a kind that a store cannot hold.
    #[error("{tensor} is {kind}, which cannot be packed: {needed}")]
    Unsupported {
        /// The name.
        tensor: String,
        /// What it is.
        kind: &'static str,
        /// Why not, and what could be packed instead.
        needed: &'static str,
    },
    /// `config.json` and the tensors disagree.
    #[error(
        "config.json says {key} = {stated}, but layer {layer} has {found} experts (see {tensor})"
    )]
    ExpertCount {
        /// The key in `config.json`.
        key: String,
        /// Its value, or what it comes to.
        stated: String,
        /// The layer's number.
        layer: u32,
        /// How many experts its tensors make.
        found: u64,
        /// A tensor that shows it.
        tensor: String,
    },
    /// There is nothing to pack.
    #[error("{} has no expert tensors: {why}", path.display())]
    Dense {
        /// The checkpoint.
        path: PathBuf,
        /// What that suggests.
        why: String,
    },
    /// A limit of the store format is exceeded.
    #[error("the store format cannot hold this: {0}")]
    Layout(#[from] LayoutError),
    /// The manifest would be larger than readers accept.
    #[error("the manifest would have {found} bytes, readers accept {limit}")]
    ManifestTooLarge {
        /// Its length.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// The output path cannot take a store.
    #[error("cannot write a store to {}: {why}", path.display())]
    Output {
        /// The path given.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// A worker's block cannot be allocated.
    #[error("no memory for a block of {bytes} bytes: ask for fewer --workers")]
    Memory {
        /// Its length.
        bytes: usize,
    },
    /// The pack was told to stop.
    #[error("interrupted: nothing was written to {}", out.display())]
    Interrupted {
        /// Where the store was to be.
        out: PathBuf,
    },
    /// The pack did not finish, and what it has packed so far is kept.
    #[error(
        "{source}; what was packed is kept in {}: the same command goes on with it, with --resume",
        staging.display()
    )]
    Kept {
        /// Why it did not finish.
        source: Box<Self>,
        /// The staging directory.
        staging: PathBuf,
    },
    /// The last step failed; unlike after every other error, the store is there.
    #[error(
        "the store is at {} and complete, but {} could not be synced: {source}; after a power \
         failure the store may be gone",
        out.display(),
        parent.display()
    )]
    Unsynced {
        /// The store.
        out: PathBuf,
        /// The directory that it lies in.
        parent: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file system is too full.
    #[error(
        "the store needs {needed} bytes, {} has {free} free: free some or choose another --out",
        path.display()
    )]
    NoSpace {
        /// A directory on the file system.
        path: PathBuf,
        /// Bytes the store takes.
        needed: u64,
        /// Bytes available.
        free: u64,
    },
    /// A synthetic store that cannot be.
    #[error("synthetic store {text:?}: {why}; write layers=4,experts=16,bytes=1048576,seed=1")]
    Synthetic {
        /// The description given.
        text: String,
        /// What is wrong with it.
        why: String,
    },
}

impl PackError {
    /// Turns an I/O error into one that names the operation and the path.
    pub(super) fn io(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { operation, path, source }
    }

    pub(super) fn output(path: &Path, why: impl fmt::Display) -> Self {
        Self::Output { path: path.into(), why: why.to_string() }
    }

    pub(super) fn document(path: &Path, why: impl fmt::Display) -> Self {
        Self::Document { path: path.into(), why: why.to_string() }
    }
}
