//! The one part that asks the system: what devices there are, which way the kernel would send, and
//! what a queue pair is told of what the handshake agreed on.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;

use gpu_sys::verbs::{
    self, AckTimeout, Context, Destination, Library, LocalEnd, MinRnrTimer, RemoteEnd, Retries,
    VerbsError,
};

use crate::choose::{Address, RailSpec};
use crate::facts::{DeviceFacts, Gid, GidFacts, GidKind, LinkLayer, Mtu, PortFacts, PortState};
use crate::handshake::BringUp;
use crate::message::{Psn, QueuePairEnd};

/// Any port would do: nothing is sent there.
const DISCARD_PORT: u16 = 9;

/// The devices of this host that can be opened, with their ports as they are now. One that cannot is
/// left out, and the log says why.
///
/// # Errors
/// The devices cannot be listed.
pub fn devices(library: &Arc<Library>) -> Result<Vec<DeviceFacts>, VerbsError> {
    let mut found = Vec::new();
    for listed in library.devices()? {
        match library.open_device(&listed.name).and_then(|context| facts(&context)) {
            Ok(facts) => found.push(facts),
            Err(error) => tracing::warn!(device = listed.name, %error, "left out"),
        }
    }
    Ok(found)
}

/// What an open device has.
///
/// # Errors
/// The device does not answer.
pub fn facts(context: &Arc<Context>) -> Result<DeviceFacts, VerbsError> {
    let limits = context.limits();
    let depth = |reads: u32| u8::try_from(reads).unwrap_or(u8::MAX);
    let ports = (1..=limits.ports).map(|number| port(context, number));
    Ok(DeviceFacts {
        name: context.name().to_owned(),
        node_guid: limits.node_guid,
        numa_node: context.numa_node(),
        ports: ports.collect::<Result<_, _>>()?,
        initiator_depth: depth(limits.max_qp_init_rd_atom),
        responder_depth: depth(limits.max_qp_rd_atom),
        max_qp_wr: limits.max_qp_wr,
        max_mr_size: limits.max_mr_size,
    })
}

fn port(context: &Context, number: u8) -> Result<PortFacts, VerbsError> {
    let facts = context.port(number)?;
    let state = match facts.state {
        verbs::PortState::Down => PortState::Down,
        verbs::PortState::Initializing => PortState::Initialising,
        verbs::PortState::Armed => PortState::Armed,
        verbs::PortState::Active => PortState::Active,
        verbs::PortState::ActiveDeferred => PortState::Other(5),
        verbs::PortState::Other(number) => PortState::Other(number),
    };
    let link_layer = match facts.link_layer {
        verbs::LinkLayer::Ethernet => LinkLayer::Ethernet,
        // An old driver that does not say is an InfiniBand one (`ibv_query_port(3)`).
        _ => LinkLayer::InfiniBand,
    };
    let gid = |entry: verbs::GidEntry| {
        let kind = match entry.kind? {
            verbs::GidKind::Ib => GidKind::Ib,
            verbs::GidKind::RoceV1 => GidKind::RoceV1,
            verbs::GidKind::RoceV2 => GidKind::RoceV2,
        };
        let index = u8::try_from(entry.index).ok()?;
        Some(GidFacts { index, gid: Gid(entry.gid), kind, netdev: entry.netdev })
    };
    Ok(PortFacts {
        number,
        state,
        link_layer,
        lid: facts.lid,
        active_mtu: Mtu::from_wire(facts.active_mtu.to_wire()).unwrap_or(Mtu::B256),
        bits_per_s: facts.speed_bits_per_s,
        gids: context.gids(number)?.into_iter().filter_map(gid).collect(),
    })
}

/// The local address from which the kernel would send to `gid`; `None` where it has no route. A
/// connected datagram socket is asked, and nothing is sent.
#[must_use]
pub fn source_towards(gid: &Gid) -> Option<IpAddr> {
    if !gid.is_routable() {
        return None;
    }
    let any: IpAddr = match gid.ip() {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0)).ok()?;
    socket.connect(SocketAddr::new(gid.ip(), DISCARD_PORT)).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

/// The two ends of a queue pair whose own end is on `spec` and starts with `psn`.
#[must_use]
pub fn ends(
    up: &BringUp,
    spec: &RailSpec,
    remote: QueuePairEnd,
    psn: Psn,
) -> (RemoteEnd, LocalEnd) {
    let destination = match (up.address, spec.link_layer) {
        (Address::Lid(lid), _) => Destination::InfiniBand { lid, gid: None },
        (Address::Gid(gid), LinkLayer::Ethernet) => Destination::Ethernet { gid: gid.0 },
        // Between subnets a router's LID would be wanted, which a subnet manager knows; the
        // permissive one is not a path, so this fails where it is connected.
        (Address::Gid(gid), LinkLayer::InfiniBand) => {
            Destination::InfiniBand { lid: spec.lid, gid: Some(gid.0) }
        }
    };
    let remote = RemoteEnd {
        queue_pair: remote.qpn.value(),
        psn: verbs::Psn::new(remote.psn.value()),
        destination,
        // Both number MTUs as `enum ibv_mtu` does.
        mtu: verbs::Mtu::from_wire(up.mtu.wire()).unwrap_or(verbs::Mtu::Bytes256),
        max_dest_rd_atomic: up.depth,
    };
    let local = LocalEnd {
        gid_index: spec.gid_index,
        psn: verbs::Psn::new(psn.value()),
        max_rd_atomic: up.depth,
        max_dest_rd_atomic: up.depth,
        ack_timeout: AckTimeout::default(),
        retries: Retries::default(),
        rnr_retries: Retries::default(),
        min_rnr_timer: MinRnrTimer::default(),
    };
    (remote, local)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_to_this_machine_starts_at_its_own_address() {
        // Loopback is no address of a rail, whatever the kernel would do.
        assert_eq!(source_towards(&Gid::from_ip(Ipv4Addr::LOCALHOST.into())), None);
        assert_eq!(source_towards(&Gid([0; 16])), None);
        let link_local = "fe80::1".parse::<Ipv6Addr>().expect("an address");
        assert_eq!(source_towards(&Gid::from_ip(link_local.into())), None);
    }
}
