//! What goes wrong between a client and a peer that are connected over RDMA: rails that are slow,
//! cut or spoilt with READs in flight, ends that die, freeze or lie. Each fault must end in right
//! bytes or in an error that says what it was, with every slot back.
//!
//! Runs as root in the guest that `scripts/soft-roce` boots, whose devices and cables are named
//! here. Faults that need work in flight count how often there was some, and fail on never.
#![cfg(metrale_rdma_verbs)]

#[path = "../peer_support/mod.rs"]
mod peer_support;
#[path = "../peer_support/rail_client.rs"]
mod rail_client;
#[path = "../../gpu-sys/tests/verbs_support/mod.rs"]
mod verbs_support;

mod cables;
mod cuts;
mod hostile_clients;
mod hostile_peers;
mod large;
mod limits;
mod one_sided;
mod ports;
mod relay;
mod restarts;
mod slots;
mod stale_tables;
