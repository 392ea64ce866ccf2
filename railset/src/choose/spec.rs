//! The two ends of a rail.

use std::fmt;

use super::explain::Reason;
use crate::facts::{Gid, LinkLayer, Mtu};

/// A local end of a rail.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RailSpec {
    /// The device's name.
    pub device: String,
    /// The device's number.
    pub node_guid: u64,
    /// The memory node the device is attached to.
    pub numa_node: Option<u32>,
    /// The port, from 1.
    pub port: u8,
    /// What the port is cabled to.
    pub link_layer: LinkLayer,
    /// Index of the GID in the port's table.
    pub gid_index: u8,
    /// The GID.
    pub gid: Gid,
    /// The port's LID, 0 on Ethernet.
    pub lid: u16,
    /// The port's active MTU.
    pub mtu: Mtu,
    /// The network interface, where there is one.
    pub netdev: Option<String>,
    /// The port's speed in bits per second, where known.
    pub bits_per_s: Option<u64>,
    /// READs that a queue pair may have outstanding as initiator.
    pub initiator_depth: u8,
    /// READs that a queue pair answers at once.
    pub responder_depth: u8,
}

impl RailSpec {
    /// The names under which two rails are one.
    #[must_use]
    pub fn identity(&self) -> RailIdentity {
        RailIdentity { node_guid: self.node_guid, port: self.port, gid: self.gid }
    }
}

impl fmt::Display for RailSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, port, gid_index, gid, mtu, .. } = self;
        write!(f, "{device} port {port} GID {gid_index} ({gid}")?;
        if let Some(netdev) = &self.netdev {
            write!(f, " on {netdev}")?;
        }
        write!(f, ", {}, MTU {mtu}", self.link_layer)?;
        if let Some(bits) = self.bits_per_s {
            write!(f, ", {} Gb/s", bits / 1_000_000_000)?;
        }
        f.write_str(")")
    }
}

/// What tells one rail from another.
#[derive(PartialEq, Eq, Clone, Copy, Debug)]
pub struct RailIdentity {
    /// The device's number; 0 is no number.
    pub node_guid: u64,
    /// The port.
    pub port: u8,
    /// The address.
    pub gid: Gid,
}

impl RailIdentity {
    /// Whether both are one rail: one port of one device, or one address.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let port = (self.node_guid, self.port) == (other.node_guid, other.port);
        (port && self.node_guid != 0) || self.gid == other.gid
    }
}

/// The peer's end of a rail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Target {
    /// What the peer's port is cabled to.
    pub link_layer: LinkLayer,
    /// The peer's address.
    pub gid: Gid,
    /// The peer's LID, 0 on Ethernet.
    pub lid: u16,
}

/// How packets find the other end (`ibv_ah_attr`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Address {
    /// RoCE, by GID.
    Ethernet {
        /// The GID.
        gid: Gid,
    },
    /// InfiniBand.
    InfiniBand {
        /// The LID; 0 where the other end has none.
        lid: u16,
        /// The GID for a global route header: another subnet, or no LID.
        gid: Option<Gid>,
    },
}

impl Target {
    /// Why no rail can end here, if there is a reason.
    #[must_use]
    pub fn fault(&self) -> Option<Reason> {
        let is_global = self.gid.is_routable();
        match self.link_layer {
            LinkLayer::Ethernet if self.gid.is_link_local() => Some(Reason::LinkLocal),
            LinkLayer::Ethernet if !is_global => Some(Reason::NotRoutable),
            LinkLayer::InfiniBand if self.lid == 0 && !is_global => Some(Reason::NoLid),
            _ => None,
        }
    }

    /// Why no rail can go from here to `peer`, if there is a reason.
    #[must_use]
    pub fn obstacle(&self, peer: &Self) -> Option<Reason> {
        if self.link_layer != peer.link_layer {
            return Some(Reason::OtherLinkLayer { peer: peer.link_layer });
        }
        if self.fault().or(peer.fault()).is_some() {
            let gid = if self.fault().is_some() { self.gid } else { peer.gid };
            return Some(Reason::NoEnd { gid });
        }
        match self.link_layer {
            LinkLayer::Ethernet => {
                let family = peer.gid.family();
                (family != self.gid.family()).then_some(Reason::OtherFamily { peer: family })
            }
            LinkLayer::InfiniBand => {
                let is_near = self.gid.subnet_prefix() == peer.gid.subnet_prefix();
                let have_lids = self.lid != 0 && peer.lid != 0;
                let are_global = self.gid.is_routable() && peer.gid.is_routable();
                let is_reached = (is_near && have_lids) || are_global;
                (!is_reached).then_some(Reason::OtherSubnet)
            }
        }
    }

    /// How `self` is addressed from a port with the GID `from`.
    #[must_use]
    pub fn address(&self, from: &Gid) -> Address {
        let Self { link_layer, gid, lid } = *self;
        match link_layer {
            LinkLayer::Ethernet => Address::Ethernet { gid },
            LinkLayer::InfiniBand => {
                let is_near = lid != 0 && gid.subnet_prefix() == from.subnet_prefix();
                Address::InfiniBand { lid, gid: (!is_near).then_some(gid) }
            }
        }
    }
}
