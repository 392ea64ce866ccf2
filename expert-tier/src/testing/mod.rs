//! What tests of this crate and of those above it share: small stores, a backend that fails on
//! demand, and the contract that every backend must keep.

#![allow(clippy::missing_panics_doc, reason = "a failed expectation is how a test speaks")]

pub mod contract;
mod faulty;
mod meters;
mod store;

pub use faulty::{Fault, FaultyTier};
pub use meters::Meters;
pub use store::{TestStore, small_arena, sound_record, tiny_manifest};
