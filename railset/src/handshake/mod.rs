//! How both ends agree on queue pairs and on the first table, as state machines.
//!
//! ```text
//! client                                 peer
//!   Request  ->
//!                                     <- Offer
//!   FindRoutes, then pairs rails
//!   CreateQueuePairs
//!   Connect  ->
//!                                        CreateQueuePairs, connected to the client's
//!                                     <- Connected
//!                                     <- Table
//!   ConnectQueuePairs
//!   Ready, TableAck  ->
//!                                        Acknowledged
//!                                     <- Table        a newer generation, at any time from here on
//!   TableChanged, TableAck  ->
//!   Usage, Damaged  ->                   at any time from here on
//! ```
//!
//! An acknowledgement stands for every older table too: the client has put them away.
//!
//! The peer's ends are ready to receive before `Connected` leaves, so a client may post as soon as
//! its own are up. The path MTU and the READ depth are the smaller of what both ends have: one
//! taken from the local port alone comes up and then fails on the first READ.
//!
//! The machines do no I/O and read no clock: a message's kind and body or the driver's answer come
//! in, actions go out. How long a step may take is the driver's to bound; [`waits_for`] says what
//! a machine waits for, for the error that a bound ends in. After an error a machine takes nothing
//! more: the connection and its queue pairs are to be dropped.
//!
//! [`waits_for`]: client::ClientRails::waits_for

pub mod client;
pub mod peer;

use crate::choose::{Address, Reason};
use crate::facts::{Gid, Mtu};
use crate::message::{Kind, QueuePairEnd};
use crate::pairing::PairError;
use crate::table::TableError;
use crate::wire::DecodeError;

/// Why two ends do not come together.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum HandshakeError {
    /// Bytes that are no body of their kind.
    #[error("the {kind:?} message: {source}")]
    Decode {
        /// The message.
        kind: Kind,
        /// What is wrong with it.
        source: DecodeError,
    },
    /// A message that does not belong here, or came before.
    #[error("a {found:?} message came while waiting for {expected}")]
    OutOfTurn {
        /// The message.
        found: Kind,
        /// What would have been right.
        expected: &'static str,
    },
    /// The driver called a method that is not due; the driver's fault.
    #[error("{called} was called while waiting for {expected}")]
    Driver {
        /// The method.
        called: &'static str,
        /// What would have been right.
        expected: &'static str,
    },
    /// The driver brought another number of queue pairs than it was asked for; the driver's fault.
    #[error("{found} {what} were made, {expected} were asked for")]
    Made {
        /// What was made.
        what: &'static str,
        /// How many.
        found: usize,
        /// How many were asked for.
        expected: usize,
    },
    /// No rails could be paired.
    #[error(transparent)]
    Pair(#[from] PairError),
    /// The table is unusable, or another store's.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The offer has one index twice.
    #[error("the peer offers rail {index} twice")]
    OfferedTwice {
        /// The index.
        index: u8,
    },
    /// The peer's slots are smaller than a record.
    #[error("the peer's slots have {found} bytes, a record of layer {layer} has {record_bytes}")]
    SlotTooSmall {
        /// Bytes of the peer's slots.
        found: u64,
        /// A layer with larger records.
        layer: u32,
        /// Bytes of its records.
        record_bytes: u64,
    },
    /// The client connects a rail that was not offered.
    #[error("the client connects rail {index}, offered are {offered} rails")]
    NotOffered {
        /// The index.
        index: u8,
        /// Rails offered.
        offered: usize,
    },
    /// The client connects one rail twice, or two of its own that are one.
    #[error("the client's rails {first} and {second} are one")]
    OneRail {
        /// Index of the first.
        first: u8,
        /// Index of the second.
        second: u8,
    },
    /// The client wants more queue pairs than it may have.
    #[error("the client wants {found} queue pairs on rail {index}, it may have {most}")]
    TooManyQueuePairs {
        /// The rail's index.
        index: u8,
        /// Queue pairs wanted.
        found: usize,
        /// Queue pairs allowed.
        most: u8,
    },
    /// The client wants a queue pair for spilled experts of a peer that has none.
    #[error("the client wants pushes on rail {index}, nothing is spilled here")]
    NothingSpilled {
        /// The rail's index.
        index: u8,
    },
    /// The client's address cannot be reached from the offered one.
    #[error(
        "the client's address {client} on rail {index} cannot be reached from {offered}: {why}"
    )]
    Unreachable {
        /// The rail's index.
        index: u8,
        /// The client's address.
        client: Gid,
        /// The peer's address.
        offered: Gid,
        /// What is wrong.
        why: Reason,
    },
    /// The peer connected other rails than the client's, or in another order.
    #[error("the peer connected rails {found:?}, this client's are {expected:?}")]
    OtherRails {
        /// Indices of the peer's answer.
        found: Vec<u8>,
        /// Indices of the client's connect.
        expected: Vec<u8>,
    },
    /// The peer connected another number of queue pairs.
    #[error("the peer connected {found} queue pairs on rail {index}, this client has {expected}")]
    QueuePairs {
        /// The rail's index.
        index: u8,
        /// The peer's number.
        found: usize,
        /// This client's number.
        expected: usize,
    },
    /// The agreed MTU is larger than one of the ports'.
    #[error("the peer chose a path MTU of {found} on rail {index}, the two ports allow {most}")]
    MtuTooLarge {
        /// The rail's index.
        index: u8,
        /// The peer's choice.
        found: Mtu,
        /// The smaller of both ports'.
        most: Mtu,
    },
    /// The agreed depth is larger than one end's.
    #[error("the peer chose a READ depth of {found} on rail {index}, the two ends allow {most}")]
    DepthTooLarge {
        /// The rail's index.
        index: u8,
        /// The peer's choice.
        found: u8,
        /// The smaller of both ends'.
        most: u8,
    },
    /// A table that is not newer than the one before.
    #[error("a table of generation {found} follows one of generation {current}")]
    OldTable {
        /// The new table's generation.
        found: u64,
        /// The generation of the one before.
        current: u64,
    },
    /// The client acknowledges a table that was not sent, or one it has acknowledged before.
    #[error("the client acknowledges table generation {found}; due are {due:?}")]
    Acknowledged {
        /// The generation acknowledged.
        found: u64,
        /// Those that are not acknowledged; each also stands for the ones before it.
        due: Vec<u64>,
    },
    /// The client acknowledges nothing.
    #[error("the client has not acknowledged the last {most} tables")]
    Unacknowledged {
        /// Tables on their way.
        most: usize,
    },
    /// The table to publish has no column for an offered rail; the driver's fault.
    #[error("the table has {found} columns, {expected} rails are offered")]
    Columns {
        /// Columns of the table.
        found: usize,
        /// Rails offered.
        expected: usize,
    },
}

/// What a rail's queue pairs are brought up with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BringUp {
    /// The peer's index of the rail.
    pub index: u8,
    /// How packets find the other end.
    pub address: Address,
    /// The path MTU: the smaller of both ports'.
    pub mtu: Mtu,
    /// READs outstanding per queue pair, 1 to 255: the client's `max_rd_atomic` and the peer's
    /// `max_dest_rd_atomic`.
    pub depth: u8,
    /// The other end of each queue pair, in the order of our own.
    pub remote: Vec<QueuePairEnd>,
}

fn decoded<T>(kind: Kind, result: Result<T, DecodeError>) -> Result<T, HandshakeError> {
    result.map_err(|source| HandshakeError::Decode { kind, source })
}

fn made(what: &'static str, found: usize, expected: usize) -> Result<(), HandshakeError> {
    if found == expected {
        return Ok(());
    }
    Err(HandshakeError::Made { what, found, expected })
}
