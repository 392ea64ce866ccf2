//! Expert stores on disk: a directory with `manifest.json` and one file of records per layer.

pub mod manifest;
mod reader;
pub mod verify;

pub use reader::{ExpertStore, StoreError};
