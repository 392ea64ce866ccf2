//! Hosts for the unit tests.

use std::net::{IpAddr, Ipv6Addr};

use crate::facts::{DeviceFacts, Gid, GidFacts, GidKind, LinkLayer, Mtu, PortFacts, PortState};
use crate::route::KernelRoute;

pub(crate) fn gid(text: &str) -> Gid {
    Gid(text.parse::<Ipv6Addr>().unwrap().octets())
}

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// A route of which the source address alone is known.
pub(crate) fn via(text: &str) -> KernelRoute {
    ip(text).into()
}

fn port(link_layer: LinkLayer, kind: GidKind, addresses: &[&str]) -> PortFacts {
    let row = |(index, text): (usize, &&str)| GidFacts {
        index: u8::try_from(index).unwrap(),
        gid: gid(text),
        kind,
        netdev: None,
    };
    PortFacts {
        number: 1,
        state: PortState::Active,
        link_layer,
        lid: 0,
        active_mtu: Mtu::B1024,
        bits_per_s: None,
        gids: addresses.iter().enumerate().map(row).collect(),
    }
}

/// A RoCE port without an interface.
pub(crate) fn ethernet(number: u8, addresses: &[&str]) -> PortFacts {
    PortFacts { number, ..port(LinkLayer::Ethernet, GidKind::RoceV2, addresses) }
}

/// Port 1 of a RoCE device, on an interface.
pub(crate) fn roce(netdev: &str, addresses: &[&str]) -> PortFacts {
    let mut port = ethernet(1, addresses);
    for row in &mut port.gids {
        row.netdev = Some(netdev.into());
    }
    port
}

pub(crate) fn infiniband(lid: u16, addresses: &[&str]) -> PortFacts {
    PortFacts { lid, ..port(LinkLayer::InfiniBand, GidKind::Ib, addresses) }
}

pub(crate) fn device(name: &str, node_guid: u64, ports: Vec<PortFacts>) -> DeviceFacts {
    DeviceFacts {
        name: name.into(),
        node_guid,
        numa_node: None,
        interfaces: Vec::new(),
        ports,
        initiator_depth: 16,
        responder_depth: 16,
        max_qp_wr: 1024,
        max_mr_size: u64::MAX,
    }
}
