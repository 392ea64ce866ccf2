//! The protocol between a client and an expert peer over TCP: frames, messages, handshake.
//!
//! docs/protocol.md is its reference. All integers are little-endian and of fixed width; encoding
//! and decoding are written by hand and frozen by golden-byte tests. Nothing here reads a clock,
//! and only [`io`] touches a socket.
//!
//! Version history: 1 (2026-11) first.

pub mod auth;
pub mod frame;
pub mod handshake;
pub mod io;
pub mod message;

pub use auth::Secret;
pub use frame::{FrameHeader, FrameType, HEADER_BYTES, Status};

/// The protocol version that this crate speaks.
pub const VERSION: u16 = 1;
