//! RDMA verbs behind owners: devices, registrations, completion queues and queue pairs.
//!
//! Three layers. `ffi` names the symbols of libibverbs and nothing else does. The types here own
//! what the library gives out, each holds what it was made from, and `Drop` gives it back in the
//! right order. Everything above speaks of rails, slots and experts.
//!
//! The promises:
//!
//! * A buffer in flight is not addressable: it goes in with its request ([`Post`]) and comes back
//!   with the request's completion ([`QueuePair::settle`]), also when the request failed or was
//!   flushed.
//! * A registration goes before the memory it covers; if that fails, the memory is leaked
//!   ([`MemoryRegion`]).
//! * Bring-up is a change of type: [`PreparedQueuePair`] cannot post, [`QueuePair`] can.
//! * Nothing here blocks without a bound, and nothing on the path of a request allocates once its
//!   queues have been filled once.
//!
//! Nothing is needed to build this. Where libibverbs is not installed, [`Library::open`] says what
//! to install.

mod calls;
mod completion;
mod context;
mod error;
mod events;
#[cfg(any(test, feature = "testing"))]
pub mod fake;
mod ffi;
mod file_pages;
mod flight;
mod library;
mod memory;
mod port;
mod post;
mod prepared;
mod queue_pair;
mod receive;
mod settings;
#[cfg(test)]
mod tests;
mod work;

pub use calls::calls;
pub use completion::{CompletionChannel, CompletionQueue, Completions, WorkCompletion};
pub use context::{Context, DeviceLimits};
pub use error::{ConnectError, DeregError, PostError, PostRefused, SettleError, VerbsError};
pub use events::AsyncEvent;
#[cfg(test)]
pub(crate) use fake::device as fake_device;
pub use file_pages::{FileMapping, FilePages, FilePart, WriteFrom, probe_file_pages};
pub use library::{DeviceListing, Library};
pub use memory::{Access, Memory, MemoryRegion, ProtectionDomain};
pub use port::{GidEntry, GidKind, LinkLayer, Mtu, PhysicalState, PortFacts, PortState};
pub use post::{Landing, MAX_INLINE_BYTES, Post, Remote, Signal, Source};
pub use prepared::PreparedQueuePair;
pub use queue_pair::{QueuePair, QueuePairState, Released};
pub use receive::Received;
pub use settings::{
    AckTimeout, Destination, LocalEnd, MinRnrTimer, Psn, QueuePairOptions, RemoteAccess, RemoteEnd,
    Retries,
};
pub use work::{WorkError, WorkStatus};
