//! The bodies that set up queue pairs; they travel on the control connection after its handshake.
//!
//! All numbers are little-endian. History: version 1, the first; version 2, spilled experts.
//!
//! ```text
//! Request    version u16, zero 6
//! Offer      version u16, rails u8, transfer u8 (0 nothing is spilled, 1 push, 2 stage), layers u32,
//!            generation u64, slot bytes u64, credits u16, zero 2, range bytes u32, rails x 112:
//!              index u8, port u8, link layer u8 (1 InfiniBand, 2 Ethernet), MTU u8 (1-5),
//!              LID u16, READ depth u8, most queue pairs u8, node GUID u64, GID 16,
//!              name bytes u8, zero 15, name 64 (zeros behind it)
//! Connect    rails u8, zero 7, rails x:
//!              index u8, port u8, MTU u8, READ depth u8, LID u16, queue pairs u8,
//!              push u8 (1: the last queue pair is for spilled experts), node GUID u64, GID 16, queue pairs x (QPN u32, PSN u32)
//! Connected  rails u8, zero 7, rails x:
//!              index u8, MTU u8, READ depth u8, queue pairs u8, zero 4,
//!              queue pairs x (QPN u32, PSN u32)
//! Table      see the `table` module
//! TableAck   generation u64
//! Usage      entries u32, zero 4, entries x (layer u32, expert u32, READs u32)
//! Damaged    layer u32, expert u32
//! ```
//!
//! | limit | value | why |
//! |---|---|---|
//! | [`MAX_RAILS`] | 8 | twice the ports of the largest adapters in use |
//! | [`MAX_QPS_PER_RAIL`] | 16 | one rail is full with two; 16 x 16 READs outlast any latency |
//! | [`MAX_NAME_BYTES`] | 64 | `IBV_SYSFS_NAME_MAX` |
//! | LID | 0 (Ethernet) or 1 to 0xBFFF | unicast LIDs, InfiniBand specification, volume 1, 4.1.3 |
//! | QPN | 2 to 0xFF_FFFE | 24 bits; 0, 1 and 0xFF_FFFF name management and multicast, 3.5.10 |
//! | PSN | 0 to 0xFF_FFFF | 24 bits |
//! | credits | 1 to 1024 | receives that the peer keeps posted for each client and rail |
//! | range bytes | 1 MiB to 1 GiB | one request asks for a piece of 256 KiB and the longest header at least |
//! | [`MAX_USAGE`] | 4096 | a report of every expert of a store is a few of them |
//! | READ depth | 1 to 255 | `ibv_qp_attr.max_rd_atomic` has 8 bits; 0 would allow no READ |

mod connect;
mod fields;
#[cfg(test)]
mod golden;
mod offer;
mod queue_pair;
mod report;

pub use connect::{Connect, ConnectRail, Connected, ConnectedRail};
pub use offer::{Offer, OfferedRail, Request, SpillTerms, Transfer};
pub use queue_pair::{Psn, Qpn, QueuePairEnd};
pub use report::{Damaged, TableAck, Usage, UsageEntry};

use connect::{CONNECT_BYTES, CONNECTED_BYTES};
use offer::OFFER_BYTES;
use queue_pair::END_BYTES;
use report::USAGE_BYTES;

use crate::table::MAX_TABLE_BYTES;

/// The version of these bodies.
pub const VERSION: u16 = 2;
/// Most rails that a peer offers.
pub const MAX_RAILS: usize = 8;
/// Most queue pairs that a client has on a rail.
pub const MAX_QPS_PER_RAIL: usize = 16;
/// Longest device name, in bytes.
pub const MAX_NAME_BYTES: usize = 64;
/// Largest LID that names one port.
pub const MAX_LID: u16 = 0xbfff;

/// Most entries of a usage report.
pub const MAX_USAGE: usize = 4096;
/// Most requests for spilled experts that a client has under way on a rail.
pub const MAX_CREDITS: u16 = 1024;
/// Fewest and most bytes that one request for a spilled expert may be allowed.
pub const RANGE_BYTES: std::ops::RangeInclusive<u32> = 1 << 20..=1 << 30;

/// What a body is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Kind {
    /// Client: which rails are there?
    Request,
    /// Peer: these.
    Offer,
    /// Client: I use these of them, with these queue pairs.
    Connect,
    /// Peer: mine are connected to yours.
    Connected,
    /// Peer: where the experts are.
    Table,
    /// Client: I use the table of this generation and no older one.
    TableAck,
    /// Client: how often I have read which experts since the last report.
    Usage,
    /// Client: the bytes of this expert were not its record's.
    Damaged,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 8] = [
        Self::Request,
        Self::Offer,
        Self::Connect,
        Self::Connected,
        Self::Table,
        Self::TableAck,
        Self::Usage,
        Self::Damaged,
    ];

    /// Whether it is the client that sends it.
    #[must_use]
    pub fn is_from_client(self) -> bool {
        matches!(self, Self::Request | Self::Connect | Self::TableAck | Self::Usage | Self::Damaged)
    }

    /// Shortest and longest body, in bytes: what a frame may be allocated for.
    #[must_use]
    pub fn body_range(self) -> (usize, usize) {
        let range = |(head, rail): (usize, usize), ends: usize| {
            let most = head + MAX_RAILS * (rail + ends * END_BYTES);
            (head + rail + ends.min(1) * END_BYTES, most)
        };
        match self {
            Self::Request | Self::TableAck | Self::Damaged => (8, 8),
            Self::Usage => (USAGE_BYTES.0, USAGE_BYTES.0 + MAX_USAGE * USAGE_BYTES.1),
            Self::Offer => range(OFFER_BYTES, 0),
            Self::Connect => range(CONNECT_BYTES, MAX_QPS_PER_RAIL),
            Self::Connected => range(CONNECTED_BYTES, MAX_QPS_PER_RAIL),
            Self::Table => (crate::table::MIN_TABLE_BYTES, MAX_TABLE_BYTES),
        }
    }
}
