//! Where the facts come from: the devices through verbs, the routes through the kernel.
//!
//! The one file of this crate that does I/O. No call waits for another machine: queries go to the
//! device's driver, and connecting a UDP socket sends nothing.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::sync::Arc;

use gpu_sys::verbs;

use crate::choose::Address;
use crate::facts::{DeviceFacts, Gid, GidFacts, GidKind, LinkLayer, Mtu, PortFacts, PortState};
use crate::handshake::BringUp;

/// The UDP port of RoCEv2, so that a route by port would be the one that its packets take.
const ROCE_PORT: u16 = 4791;

/// What a host has.
#[derive(Debug)]
pub struct HostFacts {
    /// The devices that could be read, in the library's order.
    pub devices: Vec<DeviceFacts>,
    /// The others; to be logged, since a rail may be missing for it.
    pub unreadable: Vec<Unreadable>,
}

/// A device that could not be read.
#[derive(Debug, thiserror::Error)]
#[error("RDMA device {device} is left out: {source}")]
pub struct Unreadable {
    /// Its name.
    pub device: String,
    /// Why.
    pub source: verbs::VerbsError,
}

/// Reads every device of this host. One that cannot be read does not hide the others.
///
/// # Errors
/// The devices cannot be listed.
pub fn read_host(library: &Arc<verbs::Library>) -> Result<HostFacts, verbs::VerbsError> {
    let mut host = HostFacts { devices: Vec::new(), unreadable: Vec::new() };
    for verbs::DeviceListing { name, .. } in library.devices()? {
        let read = library.open_device(&name).and_then(|context| read_device(&context));
        match read {
            Ok(facts) => host.devices.push(facts),
            Err(source) => host.unreadable.push(Unreadable { device: name, source }),
        }
    }
    Ok(host)
}

/// Reads one device.
///
/// # Errors
/// The device or one of its ports cannot be queried.
pub fn read_device(context: &verbs::Context) -> Result<DeviceFacts, verbs::VerbsError> {
    let limits = context.limits();
    let port = |number| read_port(context, number);
    Ok(DeviceFacts {
        name: context.name().to_owned(),
        node_guid: limits.node_guid,
        numa_node: context.numa_node(),
        ports: (1..=limits.ports).map(port).collect::<Result<_, _>>()?,
        initiator_depth: depth(limits.max_qp_init_rd_atom),
        responder_depth: depth(limits.max_qp_rd_atom),
        max_qp_wr: limits.max_qp_wr,
        max_mr_size: limits.max_mr_size,
    })
}

fn read_port(context: &verbs::Context, number: u8) -> Result<PortFacts, verbs::VerbsError> {
    let port = context.port(number)?;
    let row = |entry: verbs::GidEntry| {
        let kind = match entry.kind {
            Some(verbs::GidKind::Ib) => GidKind::Ib,
            Some(verbs::GidKind::RoceV1) => GidKind::RoceV1,
            Some(verbs::GidKind::RoceV2) => GidKind::RoceV2,
            None => GidKind::Unknown,
        };
        // A row beyond 255 cannot be given to a queue pair.
        let index = u8::try_from(entry.index).ok()?;
        Some(GidFacts { index, gid: Gid(entry.gid), kind, netdev: entry.netdev })
    };
    Ok(PortFacts {
        number,
        state: match port.state {
            verbs::PortState::Down => PortState::Down,
            verbs::PortState::Initializing => PortState::Initialising,
            verbs::PortState::Armed => PortState::Armed,
            verbs::PortState::Active => PortState::Active,
            verbs::PortState::ActiveDeferred => PortState::Other(5),
            verbs::PortState::Other(number) => PortState::Other(number),
        },
        link_layer: match port.link_layer {
            verbs::LinkLayer::Ethernet => LinkLayer::Ethernet,
            // What does not say is older than RoCE (`ibv_query_port(3)`).
            verbs::LinkLayer::InfiniBand | verbs::LinkLayer::Unspecified => LinkLayer::InfiniBand,
        },
        lid: port.lid,
        active_mtu: port.active_mtu.into(),
        bits_per_s: port.speed_bits_per_s,
        gids: context.gids(number)?.into_iter().filter_map(row).collect(),
    })
}

/// A queue pair's attribute has 8 bits for it, and no READ at all would be of no use to anybody.
fn depth(device: u32) -> u8 {
    u8::try_from(device).unwrap_or(u8::MAX).max(1)
}

impl From<verbs::Mtu> for Mtu {
    fn from(mtu: verbs::Mtu) -> Self {
        match mtu {
            verbs::Mtu::Bytes256 => Self::B256,
            verbs::Mtu::Bytes512 => Self::B512,
            verbs::Mtu::Bytes1024 => Self::B1024,
            verbs::Mtu::Bytes2048 => Self::B2048,
            verbs::Mtu::Bytes4096 => Self::B4096,
        }
    }
}

impl From<Mtu> for verbs::Mtu {
    fn from(mtu: Mtu) -> Self {
        match mtu {
            Mtu::B256 => Self::Bytes256,
            Mtu::B512 => Self::Bytes512,
            Mtu::B1024 => Self::Bytes1024,
            Mtu::B2048 => Self::Bytes2048,
            Mtu::B4096 => Self::Bytes4096,
        }
    }
}

impl From<Address> for verbs::Destination {
    fn from(address: Address) -> Self {
        match address {
            Address::Ethernet { gid } => Self::Ethernet { gid: gid.0 },
            Address::InfiniBand { lid, gid } => Self::InfiniBand { lid, gid: gid.map(|gid| gid.0) },
        }
    }
}

impl BringUp {
    /// The other end of each queue pair, as a queue pair is told it.
    pub fn remote_ends(&self) -> impl Iterator<Item = verbs::RemoteEnd> {
        self.remote.iter().map(|end| verbs::RemoteEnd {
            queue_pair: end.qpn.value(),
            psn: verbs::Psn::new(end.psn.value()),
            destination: self.address.into(),
            mtu: self.mtu.into(),
            max_dest_rd_atomic: self.depth,
        })
    }
}

/// The local address from which the kernel would send to each of the peer's.
#[must_use]
pub fn route_sources(peers: &[Gid]) -> Vec<Option<IpAddr>> {
    peers.iter().map(route_source).collect()
}

/// `None` where there is no route, or where the GID is no address of the kernel's.
fn route_source(peer: &Gid) -> Option<IpAddr> {
    if !peer.is_routable() {
        return None;
    }
    let any = match peer.ip() {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect((peer.ip(), ROCE_PORT)).ok()?;
    let source = socket.local_addr().ok()?.ip();
    (!source.is_unspecified()).then_some(source)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Psn, Qpn, QueuePairEnd};
    use crate::testing::gid;

    #[test]
    fn an_address_that_names_no_machine_has_no_route() {
        let peers = ["::ffff:127.0.0.1", "fe80::1", "::", "ff02::1"].map(gid);
        assert_eq!(route_sources(&peers), [None; 4]);
    }

    #[test]
    fn every_mtu_is_the_same_on_both_sides() {
        for mtu in Mtu::ALL {
            let theirs = verbs::Mtu::from(mtu);
            assert_eq!((theirs.bytes(), theirs.to_wire()), (mtu.bytes(), mtu.wire()));
            assert_eq!(Mtu::from(theirs), mtu);
        }
    }

    #[test]
    fn a_queue_pair_is_told_what_was_agreed() {
        let end = QueuePairEnd { qpn: Qpn::new(17).unwrap(), psn: Psn::new(23).unwrap() };
        let peer = gid("::ffff:10.1.0.2");
        let address = Address::Ethernet { gid: peer };
        let up = BringUp { index: 0, address, mtu: Mtu::B2048, depth: 5, remote: vec![end] };
        let told: Vec<_> = up.remote_ends().collect();
        let destination = verbs::Destination::Ethernet { gid: peer.0 };
        let expected = verbs::RemoteEnd {
            queue_pair: 17,
            psn: verbs::Psn::new(23),
            destination,
            mtu: verbs::Mtu::Bytes2048,
            max_dest_rd_atomic: 5,
        };
        assert_eq!(told, [expected]);
    }

    #[test]
    fn a_devices_depth_fits_a_queue_pairs_attribute() {
        assert_eq!((depth(0), depth(16), depth(255), depth(256)), (1, 16, 255, 255));
    }
}
