//! Fetches expert records into a pinned, GPU-visible arena.

#![deny(unsafe_code)]

pub mod arena;
pub mod dtype;
pub mod fingerprint;
pub mod key;
pub mod layout;
pub mod pack;
pub mod record;
pub mod residency;
pub mod store;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod wire;
