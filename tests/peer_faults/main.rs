//! What goes wrong between a client and a peer: each fault comes in over a real socket, and must
//! end in an error that says what it was, with every slot back and nothing wrong handed out.

#[path = "../peer_support/mod.rs"]
mod peer_support;

mod bad_answers;
mod cancelled;
mod crowds;
mod dialling;
mod health;
mod hostile_clients;
mod no_peer;
mod restarts;
mod slow_readers;
mod stalls;
mod totals;
mod truncated_stores;
