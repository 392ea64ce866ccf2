//! Where payload bytes come from: generated, or read from a checkpoint's shards.

use super::PackError;
use super::synthetic::SyntheticSpec;
use crate::key::ExpertKey;
use crate::layout::LayerLayout;

/// The origin of every payload of a plan.
#[derive(Debug)]
pub(super) enum Content {
    /// Computed.
    Synthetic(SyntheticSpec),
}

impl Content {
    /// A reader for one worker.
    pub(super) fn reader(&self) -> Reader<'_> {
        match self {
            Self::Synthetic(spec) => Reader::Synthetic(spec),
        }
    }
}

/// One worker's way to the bytes.
pub(super) enum Reader<'a> {
    /// Computes.
    Synthetic(&'a SyntheticSpec),
}

impl Reader<'_> {
    /// Fills `out` with the payload bytes of `expert` that start at `offset`.
    pub(super) fn read(
        &mut self,
        layer: &LayerLayout,
        _index: usize,
        expert: u32,
        offset: u64,
        out: &mut [u8],
    ) -> Result<(), PackError> {
        match self {
            Self::Synthetic(spec) => spec.fill(ExpertKey::new(layer.layer(), expert), offset, out),
        }
        Ok(())
    }

    /// Says that this expert comes next, so that the kernel may read ahead.
    pub(super) fn will_need(&mut self, _index: usize, _expert: u32) {}
}
