//! Paths to a peer, and when to try one again. Pure logic: nothing here does I/O.

#![forbid(unsafe_code)]

mod backoff;

pub use backoff::{Backoff, BackoffSettings};
