//! Rails: paths to a peer over RDMA devices.
//!
//! | module | what it decides |
//! |---|---|
//! | [`facts`] | nothing: what a host has, as plain data |
//! | [`choose`] | which device, port and GID, and why |
//! | [`route`] | nothing: what the kernel says of the way to an address |
//! | [`pairing`] | which of the peer's rails with which of our own |
//! | [`message`], [`push`], [`table`], [`wire`] | the bytes of both ends' messages |
//! | [`handshake`] | how both ends agree on queue pairs and a table |
//! | [`Backoff`] | when to try a rail again that is missing |
//! | `driver` | nothing: it asks the system for facts and routes |
//!
//! All but the driver is pure logic: nothing does I/O or reads a clock.

#![forbid(unsafe_code)]

mod backoff;
pub mod choose;
#[cfg(metrale_rdma_verbs)]
pub mod driver;
pub mod facts;
pub mod handshake;
pub mod message;
pub mod pairing;
pub mod push;
pub mod route;
pub mod table;
#[cfg(test)]
mod testing;
pub mod wire;

pub use backoff::{Backoff, BackoffSettings};
