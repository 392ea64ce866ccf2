//! Spilled records, as a peer sends them to a client that speaks the protocol by hand: what is right,
//! what a client may not ask for, and ends and disks that fail with requests under way.
//!
//! Runs as root in the guest that `scripts/soft-roce` boots. /scratch has direct reads, /tmp has not.
#![cfg(metrale_rdma_verbs)]

#[path = "../peer_support/mod.rs"]
mod peer_support;
#[path = "../peer_support/rail_client.rs"]
mod rail_client;
#[path = "../../gpu-sys/tests/verbs_support/mod.rs"]
mod verbs_support;

mod bad_sectors;
#[path = "../verbs_faults/cables.rs"]
#[allow(dead_code, reason = "these tests use a part of it")]
mod cables;
mod client;
mod fair;
mod faults;
mod hanging_disk;
mod hostile;
mod right;
mod stage;
