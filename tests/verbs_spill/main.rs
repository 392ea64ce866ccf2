//! Spilled experts, as a client sees them: from a peer that the test plays, which may say and write
//! what no peer would.
//!
//! Runs as root in the guest that `scripts/soft-roce` boots, whose devices and cables are named
//! here.
#![cfg(metrale_rdma_verbs)]

#[path = "../verbs_faults/cables.rs"]
#[allow(dead_code, reason = "a part of it is used here")]
mod cables;
#[path = "../peer_support/mod.rs"]
mod peer_support;
#[path = "../verbs_faults/relay.rs"]
#[allow(dead_code, reason = "a part of it is used here")]
mod relay;
#[path = "../../gpu-sys/tests/verbs_support/mod.rs"]
mod verbs_support;

mod answers;
mod large;
mod pusher;
mod revocation;
