//! Ports and their GIDs.

use std::fs;
use std::path::Path;

use super::ffi::{self, ibv_mtu, ibv_port_state};

/// Most entries of a GID table that are looked at; devices have 1024 at most today.
pub(super) const MAX_GIDS: u32 = 4096;

const LINK_LAYER_INFINIBAND: u8 = 1;
const LINK_LAYER_ETHERNET: u8 = 2;

/// The payload of one RDMA packet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Mtu {
    /// 256 bytes.
    Bytes256,
    /// 512 bytes.
    Bytes512,
    /// 1024 bytes: what fits an Ethernet frame of 1500.
    Bytes1024,
    /// 2048 bytes.
    Bytes2048,
    /// 4096 bytes.
    Bytes4096,
}

impl Mtu {
    const ALL: [Self; 5] =
        [Self::Bytes256, Self::Bytes512, Self::Bytes1024, Self::Bytes2048, Self::Bytes4096];

    /// The MTU that `value` stands for in packets and in `enum ibv_mtu`: 1 is 256, 5 is 4096.
    #[must_use]
    pub fn from_wire(value: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|mtu| mtu.to_wire() == value)
    }

    /// See [`Mtu::from_wire`].
    #[must_use]
    pub fn to_wire(self) -> u8 {
        (match self {
            Self::Bytes256 => ibv_mtu::IBV_MTU_256,
            Self::Bytes512 => ibv_mtu::IBV_MTU_512,
            Self::Bytes1024 => ibv_mtu::IBV_MTU_1024,
            Self::Bytes2048 => ibv_mtu::IBV_MTU_2048,
            Self::Bytes4096 => ibv_mtu::IBV_MTU_4096,
        }) as u8
    }

    /// Bytes.
    #[must_use]
    pub fn bytes(self) -> u32 {
        128 << self.to_wire()
    }

    fn from_raw(raw: ibv_mtu::Type) -> Self {
        // A larger one than we know carries what we know; a broken one is taken for the smallest.
        let value = u8::try_from(raw).unwrap_or(u8::MAX);
        match Self::from_wire(value) {
            Some(mtu) => mtu,
            None if value == 0 => Self::Bytes256,
            None => Self::Bytes4096,
        }
    }
}

/// `enum ibv_port_state`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PortState {
    /// No link.
    Down,
    /// A link that is not configured (InfiniBand: no subnet manager yet).
    Initializing,
    /// Configured, not yet active.
    Armed,
    /// Carries traffic.
    Active,
    /// Active, with the link down for a moment.
    ActiveDeferred,
    /// Something else.
    Other(u32),
}

/// The state of the wire (`phys_state`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PhysicalState {
    /// Asleep.
    Sleep,
    /// Looking for the other end: no cable, or nobody there.
    Polling,
    /// Switched off.
    Disabled,
    /// Agreeing on speed and width.
    Training,
    /// Up.
    LinkUp,
    /// Repairing errors.
    Recovery,
    /// Something else.
    Other(u8),
}

/// What carries the packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LinkLayer {
    /// InfiniBand, addressed by LID.
    InfiniBand,
    /// Ethernet (RoCE), addressed by GID.
    Ethernet,
    /// Not said.
    Unspecified,
}

/// A port as it is now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PortFacts {
    /// Logical state.
    pub state: PortState,
    /// State of the wire.
    pub physical: PhysicalState,
    /// Largest packet payload that the port carries now.
    pub active_mtu: Mtu,
    /// InfiniBand's local identifier; 0 on Ethernet.
    pub lid: u16,
    /// What carries the packets.
    pub link_layer: LinkLayer,
    /// Places in the GID table, used or not.
    pub gid_table_len: u32,
    /// Longest message in bytes.
    pub max_message_bytes: u32,
    /// Signalling rate in bits per second, lanes times speed; `None` where the device says nothing
    /// that is known here. A software device says what it likes.
    pub speed_bits_per_s: Option<u64>,
}

impl PortFacts {
    pub(super) fn from_raw(raw: &ffi::ibv_port_attr) -> Self {
        Self {
            state: port_state(raw.state),
            physical: physical_state(raw.phys_state),
            active_mtu: Mtu::from_raw(raw.active_mtu),
            lid: raw.lid,
            link_layer: match raw.link_layer {
                LINK_LAYER_INFINIBAND => LinkLayer::InfiniBand,
                LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
                _ => LinkLayer::Unspecified,
            },
            gid_table_len: u32::try_from(raw.gid_tbl_len).unwrap_or(0),
            max_message_bytes: raw.max_msg_sz,
            speed_bits_per_s: speed(raw.active_speed, raw.active_width),
        }
    }
}

fn port_state(raw: ibv_port_state::Type) -> PortState {
    match raw {
        ibv_port_state::IBV_PORT_DOWN => PortState::Down,
        ibv_port_state::IBV_PORT_INIT => PortState::Initializing,
        ibv_port_state::IBV_PORT_ARMED => PortState::Armed,
        ibv_port_state::IBV_PORT_ACTIVE => PortState::Active,
        ibv_port_state::IBV_PORT_ACTIVE_DEFER => PortState::ActiveDeferred,
        other => PortState::Other(other),
    }
}

/// ibv_query_port(3) names none; these are InfiniBand's PortPhysicalState values.
fn physical_state(raw: u8) -> PhysicalState {
    match raw {
        1 => PhysicalState::Sleep,
        2 => PhysicalState::Polling,
        3 => PhysicalState::Disabled,
        4 => PhysicalState::Training,
        5 => PhysicalState::LinkUp,
        6 => PhysicalState::Recovery,
        other => PhysicalState::Other(other),
    }
}

/// `active_speed` and `active_width` as `ibv_devinfo` reads them.
fn speed(speed: u8, width: u8) -> Option<u64> {
    const MEGABIT: u64 = 1_000_000;
    let lane = match speed {
        1 => 2_500 * MEGABIT,
        2 => 5_000 * MEGABIT,
        4 | 8 => 10_000 * MEGABIT,
        16 => 14_000 * MEGABIT,
        32 => 25_000 * MEGABIT,
        64 => 50_000 * MEGABIT,
        128 => 100_000 * MEGABIT,
        _ => return None,
    };
    let lanes = match width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => return None,
    };
    Some(lane * lanes)
}

/// How a GID is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GidKind {
    /// InfiniBand.
    Ib,
    /// RoCE v1: not routable.
    RoceV1,
    /// RoCE v2: over UDP, routable.
    RoceV2,
}

/// A place in a port's GID table that is used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GidEntry {
    /// Its index.
    pub index: u32,
    /// The GID: for RoCE v2 an IPv6 address, or an IPv4 one as `::ffff:a.b.c.d`.
    pub gid: [u8; 16],
    /// How it is used; `None` where the kernel does not say.
    pub kind: Option<GidKind>,
    /// The network interface it belongs to, if any.
    pub netdev: Option<String>,
}

/// Adds to a GID what the kernel says of it below `directory` (`.../ports/1/gid_attrs`).
pub(super) fn gid_entry(
    index: u32,
    gid: [u8; 16],
    link_layer: LinkLayer,
    directory: &Path,
) -> GidEntry {
    let read = |kind: &str| {
        let text = fs::read_to_string(directory.join(kind).join(index.to_string())).ok()?;
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    };
    let kind = match (read("types").as_deref(), link_layer) {
        (_, LinkLayer::InfiniBand) => Some(GidKind::Ib),
        (Some("RoCE v2"), _) => Some(GidKind::RoceV2),
        (Some("IB/RoCE v1"), _) => Some(GidKind::RoceV1),
        _ => None,
    };
    GidEntry { index, gid, kind, netdev: read("ndevs") }
}

#[cfg(test)]
mod unit_tests {
    use super::*;

    #[test]
    fn an_mtu_survives_the_wire_and_the_smaller_one_is_less() {
        for (value, bytes) in [(1, 256), (2, 512), (3, 1024), (4, 2048), (5, 4096)] {
            let mtu = Mtu::from_wire(value).unwrap();
            assert_eq!((mtu.to_wire(), mtu.bytes()), (value, bytes));
        }
        assert_eq!((Mtu::from_wire(0), Mtu::from_wire(6)), (None, None));
        assert_eq!(Mtu::Bytes4096.min(Mtu::Bytes1024), Mtu::Bytes1024);
    }

    #[test]
    fn speed_is_lanes_times_their_rate() {
        assert_eq!(speed(32, 2), Some(100_000_000_000));
        assert_eq!(speed(64, 2), Some(200_000_000_000));
        assert_eq!(speed(1, 1), Some(2_500_000_000));
        assert_eq!((speed(0, 2), speed(32, 0)), (None, None));
    }
}
