//! Fetches Mixture-of-Experts weights into a pinned, GPU-visible arena: what an inference runtime
//! embeds.
//!
//! A [store] holds a model's experts as fixed-stride, checksummed records. A backend, an
//! [`ExpertTier`](tier::ExpertTier), gets records from a [local store](posix) or from an
//! [expert peer](tcp) into slots of an [arena], and hands out an
//! [`ExpertResidency`](residency::ExpertResidency) only after identity and checksum have been
//! compared on the very bytes that it hands out.
//!
//! ```no_run
//! use std::path::Path;
//! use std::time::Duration;
//!
//! use expert_tier::arena::{ArenaOptions, ExpertArena};
//! use expert_tier::tcp::{TcpOptions, TcpTier};
//! use expert_tier::tier::{CompletionQueue, ExpertTier, FetchRequest};
//! use expert_tier::wire::Secret;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let secret = Some(Secret::read(Path::new("secret"))?);
//! let tier = TcpTier::connect(TcpOptions { secret, ..TcpOptions::new("10.0.0.2:9909") })?;
//! let layout = tier.manifest().layout();
//! // Room for the whole store if 256 MiB are enough for it; all of this is pinned.
//! let arena_bytes = ArenaOptions::bytes_for(layout, 256 << 20);
//! let arena = ExpertArena::new(&ArenaOptions::for_layout(layout, arena_bytes)?)?;
//!
//! // The experts that a layer was routed to, all at once; here the store's first four.
//! let queue = CompletionQueue::new();
//! let mut batch = Vec::new();
//! for key in layout.keys().take(4) {
//!     let bytes = layout.locate(key)?.record_bytes();
//!     batch.push(FetchRequest::new(key, arena.acquire(bytes, Duration::from_secs(1))?));
//! }
//! let mut due = batch.len();
//! tier.submit(&mut batch, &queue);
//! while due > 0 {
//!     let Some(completion) = tier.poll(&queue, Duration::from_secs(1)) else { continue };
//!     due -= 1;
//!     let key = completion.key;
//!     let expert = completion.outcome?.residency;
//!     for tensor in expert.tensors() {
//!         // The first bytes of the weights, and where a kernel finds them if there is a GPU.
//!         let (name, first) = (&tensor.spec.name, &tensor.bytes[..tensor.bytes.len().min(4)]);
//!         println!("{key} {name}: {first:02x?}, on the device at {:x?}", tensor.device_address);
//!     }
//!     // A kernel that reads it is launched here; then `expert.release_after(&stream)`.
//! }
//! # Ok(())
//! # }
//! ```

#![deny(unsafe_code)]

mod account;
pub mod arena;
pub mod checker;
pub mod direct;
pub mod dtype;
pub mod error;
pub mod fallback;
pub mod files;
pub mod fingerprint;
pub mod key;
pub mod layout;
mod owed;
pub mod pack;
mod pieces;
pub mod posix;
mod progress;
pub mod record;
pub mod residency;
pub mod store;
pub mod tcp;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tier;
pub mod trace;
pub mod uma;
#[cfg(metrale_rdma_verbs)]
pub mod verbs;
pub mod wire;
mod worker;
