//! Where payload bytes come from: generated, or read from a checkpoint's shards.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use rustix::fs::{Advice, fadvise};

use super::PackError;
use super::checkpoint::Shard;
use super::synthetic::SyntheticSpec;
use crate::key::ExpertKey;
use crate::layout::{LayerLayout, TensorSpec};

/// Shards that one worker keeps open; more are closed and opened again.
const OPEN_SHARDS: usize = 64;
/// Tensors shorter than this are not worth a system call to announce them.
const ADVISE_BYTES: u64 = 256 << 10;

/// The origin of every payload of a plan.
#[derive(Debug)]
pub(super) enum Content {
    /// Computed.
    Synthetic(SyntheticSpec),
    /// Read.
    Shards(ShardContent),
}

/// Where each tensor of each layer lies in a checkpoint.
#[derive(Debug)]
pub(super) struct ShardContent {
    pub(super) dir: PathBuf,
    pub(super) shards: Vec<Shard>,
    /// The prefix of the tree that is packed.
    pub(super) main: String,
    /// In the order of the plan's layers.
    pub(super) layers: Vec<LayerSource>,
}

/// Where a layer's tensors lie, in the order of its spec.
#[derive(Debug)]
pub(super) struct LayerSource {
    pub(super) tensors: Vec<TensorSource>,
}

/// Where one tensor's bytes lie.
#[derive(Debug)]
pub(super) enum TensorSource {
    /// A tensor per expert, by expert.
    Each(Vec<Spot>),
    /// One tensor with the experts' slices one after another.
    Fused(Spot),
    /// One value that all experts share.
    Shared(Spot),
}

/// A place in a shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Spot {
    pub(super) shard: u32,
    /// From the file's start.
    pub(super) offset: u64,
}

impl TensorSource {
    pub(super) fn spot(&self, tensor: &TensorSpec, expert: u32) -> Option<Spot> {
        match self {
            Self::Each(spots) => spots.get(expert as usize).copied(),
            Self::Fused(spot) => {
                let offset = spot.offset + u64::from(expert) * tensor.bytes;
                Some(Spot { offset, ..*spot })
            }
            Self::Shared(spot) => Some(*spot),
        }
    }
}

impl Content {
    /// A reader for one worker.
    pub(super) fn reader(&self) -> Reader<'_> {
        match self {
            Self::Synthetic(spec) => Reader::Synthetic(spec),
            Self::Shards(content) => Reader::Shards { content, open: HashMap::new() },
        }
    }
}

/// One worker's way to the bytes.
pub(super) enum Reader<'a> {
    /// Computes.
    Synthetic(&'a SyntheticSpec),
    /// Reads, with the files it has open.
    Shards { content: &'a ShardContent, open: HashMap<u32, File> },
}

impl Reader<'_> {
    /// Fills `out` with the payload bytes of `expert` that start at `offset`.
    pub(super) fn read(
        &mut self,
        layer: &LayerLayout,
        index: usize,
        expert: u32,
        offset: u64,
        mut out: &mut [u8],
    ) -> Result<(), PackError> {
        if let Self::Synthetic(spec) = self {
            spec.fill(ExpertKey::new(layer.layer(), expert), offset, out);
            return Ok(());
        }
        let tensors = layer.spec().tensors();
        let mut at = offset;
        let first = tensors.partition_point(|t| t.offset + t.bytes <= offset);
        for (i, tensor) in tensors.iter().enumerate().skip(first) {
            let padding = usize_of(tensor.offset.saturating_sub(at)).min(out.len());
            let (zeros, rest) = out.split_at_mut(padding);
            zeros.fill(0);
            at += padding as u64;
            let wanted = usize_of((tensor.offset + tensor.bytes).saturating_sub(at));
            let (bytes, rest) = rest.split_at_mut(wanted.min(rest.len()));
            if !bytes.is_empty() {
                self.read_tensor(tensor, (index, i), expert, at - tensor.offset, bytes)?;
            }
            at += bytes.len() as u64;
            out = rest;
            if out.is_empty() {
                break;
            }
        }
        Ok(())
    }

    fn read_tensor(
        &mut self,
        tensor: &TensorSpec,
        (layer, index): (usize, usize),
        expert: u32,
        offset: u64,
        out: &mut [u8],
    ) -> Result<(), PackError> {
        let Self::Shards { content, open } = self else { return Ok(()) };
        // The plan has a place for every tensor of every expert.
        let Some(spot) = content.layers[layer].tensors[index].spot(tensor, expert) else {
            return Ok(());
        };
        let path = || content.dir.join(&content.shards[spot.shard as usize].name);
        let file = open_shard(content, open, spot.shard)?;
        file.read_exact_at(out, spot.offset + offset).map_err(|error| {
            if error.kind() == io::ErrorKind::UnexpectedEof {
                PackError::document(
                    &path(),
                    format!("it became shorter while {} was read", tensor.name),
                )
            } else {
                PackError::io("read", &path())(error)
            }
        })
    }

    /// To be called after the last read: refuses all that was read if a shard changed meanwhile.
    pub(super) fn finish(self) -> Result<(), PackError> {
        match self {
            Self::Synthetic(_) => Ok(()),
            Self::Shards { content, mut open } => close_shards(content, &mut open),
        }
    }

    /// Says that this expert comes next, so that the kernel reads ahead.
    pub(super) fn will_need(
        &mut self,
        layer: &LayerLayout,
        index: usize,
        expert: u32,
    ) -> Result<(), PackError> {
        let Self::Shards { content, open } = self else { return Ok(()) };
        let tensors = layer.spec().tensors().iter().zip(&content.layers[index].tensors);
        for (tensor, source) in tensors.filter(|(tensor, _)| tensor.bytes >= ADVISE_BYTES) {
            let Some(spot) = source.spot(tensor, expert) else { continue };
            let file = open_shard(content, open, spot.shard)?;
            let bytes = std::num::NonZero::new(tensor.bytes);
            // Advice only: what goes wrong here shows when the tensor is read.
            let _ = fadvise(file, spot.offset, bytes, Advice::WillNeed);
        }
        Ok(())
    }
}

fn open_shard<'a>(
    content: &ShardContent,
    open: &'a mut HashMap<u32, File>,
    shard: u32,
) -> Result<&'a File, PackError> {
    if open.len() >= OPEN_SHARDS && !open.contains_key(&shard) {
        close_shards(content, open)?;
    }
    match open.entry(shard) {
        std::collections::hash_map::Entry::Occupied(entry) => Ok(entry.into_mut()),
        std::collections::hash_map::Entry::Vacant(entry) => {
            Ok(entry.insert(content.shards[shard as usize].open(&content.dir)?))
        }
    }
}

/// Closes shards, once it is certain that all that was read of them is what was planned.
fn close_shards(content: &ShardContent, open: &mut HashMap<u32, File>) -> Result<(), PackError> {
    for (shard, file) in open.drain() {
        content.shards[shard as usize].check_unchanged(&file, &content.dir)?;
    }
    Ok(())
}

/// Saturates: every use takes the minimum with a length in memory.
fn usize_of(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
