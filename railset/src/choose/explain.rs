//! Why a rail is what it is, and why it is none of the others.

use std::fmt;

use super::spec::RailSpec;
use super::wish::Wish;
use crate::facts::{Family, Gid, GidKind, LinkLayer, PortState};

/// Why a device, port or GID does not carry the rail.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Reason {
    /// The user named another device.
    #[error("another device is wished")]
    OtherDeviceWished,
    /// The user named an interface, and this row is of another.
    #[error("another interface is wished")]
    OtherInterfaceWished,
    /// The port carries no data.
    #[error("the port is {0}")]
    Port(PortState),
    /// The port's table is empty.
    #[error("the port has no GID: its network interface has no address")]
    NoGid,
    /// The user named another GID.
    #[error("another GID index is wished")]
    OtherGidWished,
    /// The row speaks another protocol.
    #[error("its kind is {0}, not RoCEv2")]
    NotRoceV2(GidKind),
    /// An IPv6 link-local address.
    #[error("it is link-local, which no peer can answer")]
    LinkLocal,
    /// An address that names no machine.
    #[error("it is not the address of one machine")]
    NotRoutable,
    /// The peer's address is of the other family.
    #[error("the peer's address is {peer}")]
    OtherFamily {
        /// The peer's family.
        peer: Family,
    },
    /// The peer's port is of another kind.
    #[error("the peer's port is {peer}")]
    OtherLinkLayer {
        /// The peer's kind.
        peer: LinkLayer,
    },
    /// InfiniBand with neither LID nor global GID.
    #[error("the port has no LID and this is no global GID (is a subnet manager running?)")]
    NoLid,
    /// Neither LIDs of one InfiniBand subnet nor global GIDs.
    #[error("the ends have neither LIDs of one InfiniBand subnet nor global GIDs")]
    OtherSubnet,
    /// One of the ends has an address that no rail can have.
    #[error("{gid} is an address that no other machine can answer")]
    NoEnd {
        /// The address.
        gid: Gid,
    },
    /// Usable, but another one is better.
    #[error("usable, but the other was preferred")]
    Outranked,
}

/// Why a usable GID stands where it does; better ones first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Routed {
    /// Its address is the route's source.
    Source,
    /// It is on the interface that the route leaves from.
    Netdev,
    /// Its address is the route's source, but the route uses another interface.
    SourceElsewhere,
    /// The route is not known.
    Unknown,
    /// The route leaves from another RDMA port.
    OtherPort,
    /// The route leaves from something that is no RDMA port.
    Elsewhere,
    /// Its port has the peer's own address.
    PeersOwn,
}

impl fmt::Display for Routed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "its address is the source of the route to the peer",
            Self::Netdev => "it is on the interface of the route to the peer",
            Self::SourceElsewhere => {
                "its address is the source of the route to the peer, which uses another interface"
            }
            Self::Unknown => "it is the first usable one",
            Self::OtherPort => "the route to the peer leaves from another RDMA port",
            Self::Elsewhere => {
                "NOTHING BETTER: the route to the peer leaves from no RDMA port, so the peer may \
                 be out of reach"
            }
            Self::PeersOwn => {
                "NOTHING BETTER: its port has the peer's own address, so both ends are one port; \
                 unless the peer is on this host, the address is used twice or the route is lost"
            }
        })
    }
}

/// Something that was judged and not chosen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PassedOver {
    /// The device.
    pub device: String,
    /// Its port, where the reason is not the device's.
    pub port: Option<u8>,
    /// The row of the GID table, where the reason is not the port's.
    pub gid: Option<(u8, Gid)>,
    /// Why.
    pub reason: Reason,
}

impl fmt::Display for PassedOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.device)?;
        if let Some(port) = self.port {
            write!(f, " port {port}")?;
        }
        if let Some((index, gid)) = self.gid {
            write!(f, " GID {index} ({gid})")?;
        }
        write!(f, ": {}", self.reason)
    }
}

/// Why a rail is what it is; its `Display` is one line for the log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Explanation {
    /// How the chosen one relates to the route.
    pub routed: Routed,
    /// What the user asked for.
    pub wish: Wish,
    /// Everything else, in the order of devices, ports and indices.
    pub passed: Vec<PassedOver>,
}

/// Reasons in a line of the log or an error; a host may have hundreds of GIDs.
const SHOWN: usize = 6;

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.wish.device, self.wish.gid_index) {
            (Some(_), Some(_)) => f.write_str("device and GID as wished; ")?,
            (Some(_), None) => f.write_str("device as wished; ")?,
            (None, Some(_)) => f.write_str("GID index as wished; ")?,
            (None, None) => {}
        }
        self.routed.fmt(f)?;
        if self.passed.is_empty() {
            return Ok(());
        }
        write!(f, "; passed over: {}", listed(&self.passed))
    }
}

/// The first few of `items`, and how many more there are.
pub(crate) fn listed<T: ToString>(items: &[T]) -> String {
    let shown: Vec<_> = items.iter().take(SHOWN).map(ToString::to_string).collect();
    let more = items.len().saturating_sub(SHOWN);
    match (shown.is_empty(), more) {
        (true, _) => "nothing".into(),
        (_, 0) => shown.join("; "),
        _ => format!("{}; and {more} more", shown.join("; ")),
    }
}

/// A rail and why.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Choice {
    /// The rail's local end.
    pub spec: RailSpec,
    /// Why this one.
    pub explanation: Explanation,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.spec, self.explanation)
    }
}
