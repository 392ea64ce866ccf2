//! Fetches one record over and over, for a profiler that counts instructions.
//!
//! `fetch_path PAYLOAD_BYTES FETCHES`: by the `posix` backend, whose only system call is a read, so
//! that what a user-space profiler counts is the fetch path and nothing else.

use std::time::Duration;

use expert_tier::key::ExpertKey;
use expert_tier::posix::{PosixOptions, PosixTier};
use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::ExpertTier;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let mut number = || args.next().and_then(|arg| arg.parse::<u64>().ok());
    let (Some(payload_bytes), Some(fetches)) = (number(), number()) else {
        return Err("usage: fetch_path PAYLOAD_BYTES FETCHES".into());
    };
    let store = TestStore::new(1, 1, &[payload_bytes], 1);
    let tier = PosixTier::open(&store.path(), PosixOptions::default())?;
    let arena = small_arena(2);
    for _ in 0..fetches {
        let slot = arena.acquire(payload_bytes, Duration::from_secs(1))?;
        let fetched = tier.fetch(ExpertKey::new(0, 0), slot)?;
        std::hint::black_box(fetched.residency.payload());
    }
    Ok(())
}
