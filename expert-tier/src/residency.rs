//! What a fetch returns: one expert's tensors in the arena, valid while the lease lives.

use std::fmt;
use std::sync::Arc;

use gpu_sys::cuda::{CudaError, Event, EventState, Stream};

use crate::arena::{LeaseEnd, Ready, Slot};
use crate::key::ExpertKey;
use crate::layout::{LayerLayout, TensorSpec};
use crate::store::manifest::Manifest;

/// A lease on a checked record; clones share it, and the slot is free again after the last one.
///
/// A device that reads the record must be waited for: end the lease with
/// [`release_after`](Self::release_after) and not by dropping it.
///
/// Neither leasing nor cloning allocates.
pub struct ExpertResidency {
    slot: Slot<Ready>,
    manifest: Arc<Manifest>,
    layer_index: usize,
}

/// One tensor of a resident expert.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Its name, type, shape and place.
    pub spec: &'a TensorSpec,
    /// Its bytes, as in the checkpoint.
    pub bytes: &'a [u8],
    /// Where the CPU sees its first byte.
    pub host_address: usize,
    /// Where the device sees its first byte, if the arena has a device.
    pub device_address: Option<u64>,
}

/// A lease whose end could not be tied to a stream.
#[derive(Debug, thiserror::Error)]
#[error(
    "{key}: the stream could not be marked ({mark}) nor waited for ({wait}), so its slot is not \
     used again"
)]
pub struct ReleaseError {
    /// The record whose slot is lost.
    pub key: ExpertKey,
    /// Why no event could be made or recorded.
    pub mark: CudaError,
    /// Why waiting failed.
    #[source]
    pub wait: CudaError,
}

impl ExpertResidency {
    /// # Panics
    /// `manifest` is of another store than the slot's record.
    pub(crate) fn new(slot: Slot<Ready>, manifest: &Arc<Manifest>) -> Self {
        let identity = slot.identity();
        let stated = manifest.identity(identity.key);
        assert_eq!(stated.as_ref(), Ok(identity), "a lease takes the manifest of its record");
        let layer_index = manifest
            .layout()
            .layer_index(identity.key.layer)
            .expect("the manifest has just given this layer's identity");
        slot.lease();
        Self { slot, manifest: Arc::clone(manifest), layer_index }
    }

    /// Which expert this is.
    #[must_use]
    pub fn key(&self) -> ExpertKey {
        self.slot.identity().key
    }

    /// The manifest of the store that the record is from.
    #[must_use]
    pub fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    /// The layer that the record belongs to.
    #[must_use]
    pub fn layout(&self) -> &LayerLayout {
        &self.manifest.layout().layers()[self.layer_index]
    }

    /// All tensors, at the offsets that their specs say.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        self.slot.payload()
    }

    /// The tensors, in the order in which they lie in the record.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorView<'_>> {
        self.layout().spec().tensors().iter().map(|spec| self.view(spec))
    }

    /// The tensor of this name (see [`TensorSpec::name`]).
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let tensors = self.layout().spec().tensors();
        // A spec sorts its tensors by name.
        let at = tensors.binary_search_by(|spec| spec.name.as_str().cmp(name)).ok()?;
        Some(self.view(&tensors[at]))
    }

    /// Ends this lease once `stream` has finished what was enqueued on it so far.
    ///
    /// Returns at once. The slot is given out again when every clone is gone and every stream
    /// that a clone was released after has come past its place.
    ///
    /// # Errors
    /// The stream could neither be marked nor waited for: the slot is never used again, so that
    /// nothing is written where the device may still read.
    pub fn release_after(self, stream: &Stream) -> Result<(), ReleaseError> {
        let mark = match Event::record_on(stream) {
            Ok(event) => {
                self.slot.with_end(|end| add_event(end, event));
                return Ok(());
            }
            Err(error) => error,
        };
        let key = self.key();
        tracing::warn!(%key, error = %mark, "no CUDA event could be had: waiting for the stream");
        stream.synchronize(self.slot.drain_wait()).map_err(|wait| {
            self.slot.with_end(|end| *end = LeaseEnd::Never);
            ReleaseError { key, mark, wait }
        })
    }

    fn view<'a>(&'a self, spec: &'a TensorSpec) -> TensorView<'a> {
        // Within the payload: the layout placed the tensor there, and the record has been checked
        // to have that many bytes.
        let (start, end) = (spec.offset as usize, (spec.offset + spec.bytes) as usize);
        TensorView {
            spec,
            bytes: &self.payload()[start..end],
            host_address: self.slot.host_address() + start,
            device_address: self.slot.device_address().map(|at| at + spec.offset),
        }
    }
}

fn add_event(end: &mut LeaseEnd, event: Event) {
    match end {
        // Once lost, no event brings it back.
        LeaseEnd::Never => {}
        LeaseEnd::Now | LeaseEnd::Shared | LeaseEnd::LastOut => *end = LeaseEnd::After(vec![event]),
        LeaseEnd::After(events) => {
            // Keeps the list as short as there are streams at work, however often a long lease is
            // cloned and released. An event that errs is kept for the pool to see.
            events.retain(|event| event.query() != Ok(EventState::Done));
            events.push(event);
        }
    }
}

impl Clone for ExpertResidency {
    fn clone(&self) -> Self {
        let manifest = Arc::clone(&self.manifest);
        Self { slot: self.slot.share(), manifest, layer_index: self.layer_index }
    }
}

impl Drop for ExpertResidency {
    fn drop(&mut self) {
        self.slot.leave();
    }
}

impl fmt::Debug for ExpertResidency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExpertResidency")
            .field("key", &self.key())
            .field("payload_bytes", &self.payload().len())
            .field("host_address", &format_args!("{:#x}", self.slot.host_address()))
            .field("device_address", &self.slot.device_address())
            .finish()
    }
}
