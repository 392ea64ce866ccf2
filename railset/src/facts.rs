//! What a host has in RDMA devices, as plain data.
//!
//! Nothing here knows verbs: a driver reads the facts from the devices, tests make them up. All
//! decisions in this crate are made on these types.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A path MTU, in bytes of payload per packet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub enum Mtu {
    /// 256 bytes.
    B256,
    /// 512 bytes.
    B512,
    /// 1024 bytes; what RoCE gets out of an Ethernet MTU of 1500.
    B1024,
    /// 2048 bytes.
    B2048,
    /// 4096 bytes; needs an Ethernet MTU of about 4200.
    B4096,
}

impl Mtu {
    /// Every value, smallest first.
    pub const ALL: [Self; 5] = [Self::B256, Self::B512, Self::B1024, Self::B2048, Self::B4096];

    /// Payload bytes per packet, 256 to 4096.
    #[must_use]
    pub fn bytes(self) -> u32 {
        128 << self.wire()
    }

    /// The number that stands for it, 1 to 5, as in `enum ibv_mtu` (`ibv_query_port(3)`).
    #[must_use]
    pub fn wire(self) -> u8 {
        match self {
            Self::B256 => 1,
            Self::B512 => 2,
            Self::B1024 => 3,
            Self::B2048 => 4,
            Self::B4096 => 5,
        }
    }

    /// The MTU that `found` stands for, if it stands for one.
    #[must_use]
    pub fn from_wire(found: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|mtu| mtu.wire() == found)
    }
}

impl fmt::Display for Mtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes().fmt(f)
    }
}

/// A port's 128-bit address: an IPv6 address, an IPv4 one mapped into it, or subnet prefix and GUID.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Gid(pub [u8; 16]);

/// What kind of address a [`Gid`] is; both ends of a RoCE rail need the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Family {
    /// `::ffff:a.b.c.d`.
    Ipv4,
    /// Any other.
    Ipv6,
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ipv4 => "IPv4",
            Self::Ipv6 => "IPv6",
        })
    }
}

impl Gid {
    /// The GID of an address, as RoCEv2 forms it: an IPv4 address is mapped into IPv6.
    #[must_use]
    pub fn from_ip(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(v4) => Self(v4.to_ipv6_mapped().octets()),
            IpAddr::V6(v6) => Self(v6.octets()),
        }
    }

    /// The address as IPv6.
    #[must_use]
    pub fn as_ipv6(&self) -> Ipv6Addr {
        Ipv6Addr::from(self.0)
    }

    /// The IPv4 address of `::ffff:a.b.c.d`.
    #[must_use]
    pub fn as_ipv4(&self) -> Option<Ipv4Addr> {
        self.as_ipv6().to_ipv4_mapped()
    }

    /// The address in the family it belongs to.
    #[must_use]
    pub fn ip(&self) -> IpAddr {
        self.as_ipv4().map_or(IpAddr::V6(self.as_ipv6()), IpAddr::V4)
    }

    /// Which family that is.
    #[must_use]
    pub fn family(&self) -> Family {
        if self.as_ipv4().is_some() { Family::Ipv4 } else { Family::Ipv6 }
    }

    /// An address of `fe80::/10`: good on one link only, and which link it does not say.
    #[must_use]
    pub fn is_link_local(&self) -> bool {
        self.as_ipv6().is_unicast_link_local()
    }

    /// An address of `169.254.0.0/16`. Two machines on one cable often have nothing else.
    #[must_use]
    pub fn is_ipv4_link_local(&self) -> bool {
        self.as_ipv4().is_some_and(|v4| v4.is_link_local())
    }

    /// An address that a packet can be sent to from another machine and that names one machine:
    /// not link-local, unspecified, loopback, multicast or broadcast.
    #[must_use]
    pub fn is_routable(&self) -> bool {
        if let Some(v4) = self.as_ipv4() {
            return !(v4.is_unspecified()
                || v4.is_loopback()
                || v4.is_multicast()
                || v4.is_broadcast());
        }
        let v6 = self.as_ipv6();
        !(v6.is_unspecified()
            || v6.is_loopback()
            || v6.is_multicast()
            || v6.is_unicast_link_local())
    }

    /// The first half: an InfiniBand subnet's number.
    #[must_use]
    pub fn subnet_prefix(&self) -> u64 {
        (u128::from_be_bytes(self.0) >> 64) as u64
    }

    /// Whether all bytes are zero, as in an unused row of a port's table.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0 == [0; 16]
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_ipv6().fmt(f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}

/// What a port is cabled to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LinkLayer {
    /// InfiniBand: addresses are LIDs given by a subnet manager.
    InfiniBand,
    /// Ethernet, so RoCE: addresses are GIDs, LIDs mean nothing.
    Ethernet,
}

impl fmt::Display for LinkLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "InfiniBand",
            Self::Ethernet => "Ethernet",
        })
    }
}

/// A port's logical state (`ibv_query_port(3)`); only an active one carries data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PortState {
    /// No cable, or the netdev is down.
    Down,
    /// InfiniBand only: there is a link, and no subnet manager has configured it.
    Initialising,
    /// InfiniBand only: configured, not yet activated.
    Armed,
    /// Carries data.
    Active,
    /// Any other number the driver gave.
    Other(u32),
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Down => f.write_str("down"),
            Self::Initialising => f.write_str("initialising (no subnet manager)"),
            Self::Armed => f.write_str("armed (not activated)"),
            Self::Active => f.write_str("active"),
            Self::Other(number) => write!(f, "in state {number}"),
        }
    }
}

/// Which protocol a GID table's row speaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GidKind {
    /// InfiniBand.
    Ib,
    /// RoCE over plain Ethernet frames: not routable, not interoperable with version 2.
    RoceV1,
    /// RoCE over UDP port 4791.
    RoceV2,
    /// The kernel does not say; it is not used, since the other end could not tell either.
    Unknown,
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ib => "IB",
            Self::RoceV1 => "RoCEv1",
            Self::RoceV2 => "RoCEv2",
            Self::Unknown => "unknown",
        })
    }
}

/// A used row of a port's GID table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GidFacts {
    /// Its index, which is what a queue pair is given. `ibv_global_route.sgid_index` has 8 bits.
    pub index: u8,
    /// The address.
    pub gid: Gid,
    /// The protocol it speaks.
    pub kind: GidKind,
    /// The network interface it comes from, where there is one.
    pub netdev: Option<String>,
}

/// A port of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PortFacts {
    /// Its number, from 1.
    pub number: u8,
    /// Whether it carries data.
    pub state: PortState,
    /// What it is cabled to.
    pub link_layer: LinkLayer,
    /// InfiniBand's local identifier, 0 on Ethernet or where none was given.
    pub lid: u16,
    /// The largest packets it sends now.
    pub active_mtu: Mtu,
    /// Its speed in bits per second, where the driver says.
    pub bits_per_s: Option<u64>,
    /// The used rows of its GID table, by index.
    pub gids: Vec<GidFacts>,
}

/// An RDMA device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceFacts {
    /// Its name, as `ibv_devices` lists it.
    pub name: String,
    /// The adapter function's number, the same under any name; 0 where a driver gives none.
    pub node_guid: u64,
    /// The memory node it is attached to.
    pub numa_node: Option<u32>,
    /// The network interfaces that belong to it, as far as the kernel says.
    pub interfaces: Vec<String>,
    /// Its ports.
    pub ports: Vec<PortFacts>,
    /// Most READs that a queue pair may have outstanding as initiator (`max_qp_init_rd_atom`).
    pub initiator_depth: u8,
    /// Most READs that a queue pair answers at once (`max_qp_rd_atom`).
    pub responder_depth: u8,
    /// Most work requests in a queue.
    pub max_qp_wr: u32,
    /// Largest region that can be registered, in bytes.
    pub max_mr_size: u64,
}

impl DeviceFacts {
    /// Whether the network interface `name` is the device's own, or has rows in a GID table of its
    /// ports, as a VLAN above one has.
    #[must_use]
    pub fn has_interface(&self, name: &str) -> bool {
        let rows = self.ports.iter().flat_map(|port| &port.gids);
        let netdevs = rows.filter_map(|row| row.netdev.as_ref());
        self.interfaces.iter().chain(netdevs).any(|interface| interface == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(text: &str) -> Gid {
        Gid(text.parse::<Ipv6Addr>().unwrap().octets())
    }

    #[test]
    fn an_mtu_has_the_number_that_verbs_give_it() {
        let rows = [(1, 256), (2, 512), (3, 1024), (4, 2048), (5, 4096)];
        for (mtu, (wire, bytes)) in Mtu::ALL.into_iter().zip(rows) {
            assert_eq!((mtu.wire(), mtu.bytes()), (wire, bytes));
            assert_eq!(Mtu::from_wire(wire), Some(mtu));
        }
        assert_eq!((Mtu::from_wire(0), Mtu::from_wire(6)), (None, None));
        assert_eq!(Mtu::B4096.min(Mtu::B1024), Mtu::B1024);
    }

    #[test]
    fn a_gid_reads_as_the_address_it_is() {
        let mapped = gid("::ffff:10.1.0.2");
        assert_eq!(mapped.to_string(), "::ffff:10.1.0.2");
        assert_eq!(mapped.as_ipv4(), Some(Ipv4Addr::new(10, 1, 0, 2)));
        assert_eq!(mapped.family(), Family::Ipv4);
        assert_eq!(Gid::from_ip(mapped.ip()), mapped);
        assert_eq!(gid("fe80::1").as_ipv4(), None);
        assert_eq!(gid("fe80:0:0:1::2").subnet_prefix(), 0xfe80_0000_0000_0001);
    }

    #[test]
    fn link_local_and_other_useless_addresses_are_not_routable() {
        for text in ["fe80::1", "febf::1", "::", "::1", "ff02::1", "::ffff:127.0.0.1"] {
            assert!(!gid(text).is_routable(), "{text}");
        }
        for text in ["::ffff:10.1.0.2", "fd00::1", "2001:db8::1", "::ffff:169.254.3.4"] {
            assert!(gid(text).is_routable(), "{text}");
        }
        assert!(gid("::ffff:169.254.3.4").is_ipv4_link_local());
        assert!(gid("fe80::1").is_link_local() && !gid("fec0::1").is_link_local());
    }
}
