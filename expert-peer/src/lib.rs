//! The serving side: an expert peer publishes a store to any number of clients.
//!
//! [`Server`] is the library; [`cli`] is the command line that `expert-peer` and
//! `metrale peer run` share.
//!
//! One thread accepts, one thread per connection serves; a connection's memory is one send
//! buffer, so the peer's memory is bounded by the connections it allows.

#![forbid(unsafe_code)]

pub mod cli;
mod connection;
#[cfg(metrale_rdma_verbs)]
mod direct_send;
#[cfg(metrale_rdma_verbs)]
mod disk;
#[cfg(metrale_rdma_verbs)]
mod ledger;
mod meters;
mod metrics_http;
mod program;
#[cfg(metrale_rdma_verbs)]
mod push;
#[cfg(metrale_rdma_verbs)]
mod rails;
mod registry;
#[cfg(metrale_rdma_verbs)]
mod residency;
#[cfg(metrale_rdma_verbs)]
mod seldom;
mod sendfile;
mod server;
mod status;
pub mod values;

#[cfg(metrale_rdma_verbs)]
pub use direct_send::NoReader;
#[cfg(metrale_rdma_verbs)]
pub use push::{PushError, PushOptions, SpillWish};
#[cfg(metrale_rdma_verbs)]
pub use rails::{GRANT_BYTES_PER_RAIL, RailsError, RailsWish};
#[cfg(metrale_rdma_verbs)]
pub use residency::{ProfileError, ResidencyOptions};
pub use server::{Exposure, PeerError, PeerOptions, Server, Shutdown};
pub use status::{LayerResidency, PushReport, ResidencyReport, StatusReport};
