//! Fetches expert records into a pinned, GPU-visible arena.

#![deny(unsafe_code)]

mod account;
pub mod arena;
pub mod dtype;
pub mod error;
pub mod fingerprint;
pub mod key;
pub mod layout;
pub mod pack;
pub mod posix;
pub mod record;
pub mod residency;
pub mod store;
pub mod tcp;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tier;
pub mod wire;
