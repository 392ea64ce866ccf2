//! The right to write to a part of a record, which a peer has for one request.
//!
//! It is a registration of just these bytes, and it ends by deregistering them: that is the one proof
//! that the peer writes there no more, whatever became of the request.

use gpu_sys::verbs::{MemoryRegion, VerbsError};
use railset::push::Window;

use super::devices::Device;
use super::grants::GrantPlace;
use crate::arena::Part;

/// Why a part is lost whose grant cannot be ended.
pub(super) const NOT_REVOKED: &str = "the peer's right to write it could not be revoked";

/// A part, and what lets the peer write to it.
pub(super) struct Granted {
    grant: Option<MemoryRegion>,
    /// There until it is revoked.
    part: Option<Part>,
    /// Dropped last: there is room for another grant once this one is revoked.
    _place: Option<GrantPlace>,
}

/// A part that was not granted, its place, and why.
pub(super) type Refused = Box<(Part, GrantPlace, VerbsError)>;

impl Granted {
    /// Lets the peer write to `part` through `device`.
    ///
    /// # Errors
    /// The device refuses: the part and its place come back.
    pub(super) fn to_peer(device: &Device, part: Part, place: GrantPlace) -> Result<Self, Refused> {
        match device.grant(&part) {
            Ok(grant) => Ok(Self { grant: Some(grant), part: Some(part), _place: Some(place) }),
            Err(error) => Err(Box::new((part, place, error))),
        }
    }

    /// A part that nobody but this side's own device writes to.
    pub(super) fn to_nobody(part: Part) -> Self {
        Self { grant: None, part: Some(part), _place: None }
    }

    /// The number of its call.
    pub(super) fn tag(&self) -> u32 {
        self.part.as_ref().map_or(0, Part::tag)
    }

    /// Bytes of the part.
    pub(super) fn bytes(&self) -> usize {
        self.range().len()
    }

    pub(super) fn range(&self) -> std::ops::Range<usize> {
        self.part.as_ref().map_or(0..0, Part::range)
    }

    /// Where the peer writes.
    pub(super) fn window(&self) -> Window {
        let window = |it: &MemoryRegion| Window { address: it.address(), rkey: it.rkey() };
        self.grant.as_ref().map_or(Window::default(), window)
    }

    /// Ends the peer's access, after which it writes no more. Where that cannot be done, the part is
    /// lost, and its slot with it: the peer may still write there.
    pub(super) fn revoke(mut self) -> Option<Part> {
        self.take_back()
    }

    fn take_back(&mut self) -> Option<Part> {
        let part = self.part.take()?;
        let Some(grant) = self.grant.take() else { return Some(part) };
        match grant.deregister() {
            Ok(()) => Some(part),
            Err(error) => {
                tracing::error!(%error, "a peer's right to write cannot be revoked: a slot is lost");
                part.quarantine();
                std::mem::forget(part);
                None
            }
        }
    }
}

impl Drop for Granted {
    fn drop(&mut self) {
        drop(self.take_back());
    }
}
