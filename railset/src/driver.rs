//! The one part that asks the system: what devices there are, which way the kernel would send, and
//! what a queue pair is told of what the handshake agreed on.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use gpu_sys::verbs::{
    self, AckTimeout, Context, Destination, Library, LocalEnd, MinRnrTimer, RemoteEnd, Retries,
    VerbsError,
};
use rustix::net::netdevice::index_to_name;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, connect, recv, send, socket_with,
};

use crate::choose::{Address, RailSpec};
use crate::facts::{DeviceFacts, Gid, GidFacts, GidKind, LinkLayer, Mtu, PortFacts, PortState};
use crate::handshake::BringUp;
use crate::message::{Psn, QueuePairEnd};
use crate::route::{self, Answer, KernelRoute};

/// What [`AckTimeout`] a rail's queue pairs have: 2^17 times 4.096 us, 0.54 s. It must be longer than
/// a queue pair may wait while the rail carries what others asked for, or the device asks again for
/// what is on its way and makes the wait longer still: on a rail of 50 Mbit/s two queue pairs were
/// seen to wait 0.25 s for each other, and with the usual 67 ms to carry a third of what they could.
/// A lost answer costs this once; a rail that is gone is noticed by our own deadline, not by this.
const ACK_TIMEOUT: u8 = 17;
/// Any port would do: nothing is sent there.
const DISCARD_PORT: u16 = 9;
/// Most bytes of the kernel's answer to a request for a route; a route's attributes take about 200.
const ROUTE_ANSWER_BYTES: usize = 4096;

/// Why devices were left out, by name: a process looks again and again while a rail is missing, and
/// says it once.
static LEFT_OUT: Mutex<BTreeMap<String, String>> = Mutex::new(BTreeMap::new());

/// The devices of this host that can be opened, with their ports as they are now. One that cannot is
/// left out, and the log says why, once for each reason.
///
/// # Errors
/// The devices cannot be listed.
pub fn devices(library: &Arc<Library>) -> Result<Vec<DeviceFacts>, VerbsError> {
    let mut found = Vec::new();
    for listed in library.devices()? {
        let name = listed.name;
        let facts = library.open_device(&name).and_then(|context| facts(&context));
        let why = facts.as_ref().err().map(ToString::to_string);
        if is_news(&name, why.as_deref())
            && let Some(error) = why
        {
            tracing::warn!(device = name, error, "left out");
        }
        found.extend(facts.ok());
    }
    Ok(found)
}

/// Whether that `device` is left out for this reason, or is not, has changed.
fn is_news(device: &str, why: Option<&str>) -> bool {
    // Whoever panicked with it had at most one entry changed.
    let mut known = LEFT_OUT.lock().unwrap_or_else(PoisonError::into_inner);
    if known.get(device).map(String::as_str) == why {
        return false;
    }
    match why {
        Some(why) => known.insert(device.to_owned(), why.to_owned()),
        None => known.remove(device),
    };
    true
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
        interfaces: context.interfaces(),
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
        state,
        link_layer,
        lid: facts.lid,
        active_mtu: Mtu::from_wire(facts.active_mtu.to_wire()).unwrap_or(Mtu::B256),
        bits_per_s: facts.speed_bits_per_s,
        gids: context.gids(number)?.into_iter().filter_map(gid).collect(),
    })
}

/// The way that the kernel would send to `gid`; `None` where it has no route. Nothing is sent.
#[must_use]
pub fn route_towards(gid: &Gid) -> Option<KernelRoute> {
    if !gid.is_routable() {
        return None;
    }
    let socket = route_socket().ok();
    let answer = socket.as_ref().and_then(|socket| ask_route(socket, gid.ip()));
    let Answer { source, interface, is_local } = answer.unwrap_or_default();
    let source = source.or_else(|| source_towards(gid.ip()))?;
    // What goes to the host itself passes through `lo`, which is the interface of no rail.
    let named = interface.filter(|_| !is_local).zip(socket);
    let interface = named.and_then(|(index, socket)| index_to_name(&socket, index).ok());
    Some(KernelRoute { source, interface })
}

/// A socket that the kernel's routing tables answer on.
fn route_socket() -> rustix::io::Result<OwnedFd> {
    let (family, flags) = (AddressFamily::NETLINK, SocketFlags::CLOEXEC);
    // No protocol is number 0, `NETLINK_ROUTE`.
    let socket = socket_with(family, SocketType::RAW, flags, None)?;
    connect(&socket, &SocketAddrNetlink::new(0, 0))?;
    Ok(socket)
}

/// Asks for the route to `to`. The kernel has answered when the request has been sent, so nothing is
/// waited for.
fn ask_route(socket: &OwnedFd, to: IpAddr) -> Option<Answer> {
    send(socket, &route::request(to), SendFlags::empty()).ok()?;
    let mut answer = [0; ROUTE_ANSWER_BYTES];
    let (bytes, _) = recv(socket, &mut answer[..], RecvFlags::DONTWAIT).ok()?;
    route::answer(answer.get(..bytes)?)
}

/// The source address of a datagram socket that is connected to `to`.
fn source_towards(to: IpAddr) -> Option<IpAddr> {
    let any: IpAddr = match to {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0)).ok()?;
    socket.connect(SocketAddr::new(to, DISCARD_PORT)).ok()?;
    let source = socket.local_addr().ok()?.ip();
    (!source.is_unspecified()).then_some(source)
}

/// The two ends of a queue pair whose own end is on `spec` and starts with `psn`.
#[must_use]
pub fn ends(
    up: &BringUp,
    spec: &RailSpec,
    remote: QueuePairEnd,
    psn: Psn,
) -> (RemoteEnd, LocalEnd) {
    let destination = match up.address {
        Address::Ethernet { gid } => Destination::Ethernet { gid: gid.0 },
        Address::InfiniBand { lid, gid } => {
            Destination::InfiniBand { lid, gid: gid.map(|gid| gid.0) }
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
        // One end READs the other, so one of these is not used. The device refuses it all the same where
        // it is more than the device has.
        max_rd_atomic: up.depth.min(spec.initiator_depth),
        max_dest_rd_atomic: up.depth.min(spec.responder_depth),
        ack_timeout: AckTimeout::new(ACK_TIMEOUT).unwrap_or_default(),
        retries: Retries::default(),
        rnr_retries: Retries::default(),
        min_rnr_timer: MinRnrTimer::default(),
    };
    (remote, local)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Qpn;
    use crate::testing::{device, gid, ip, roce};

    #[test]
    fn a_device_that_is_left_out_is_told_once_for_each_reason() {
        let told = [Some("busy"), Some("busy"), Some("gone"), None, None, Some("gone")];
        let told = told.map(|why| is_news("a test's", why));
        assert_eq!(told, [true, false, true, true, false, true]);
    }

    #[test]
    fn an_address_that_names_no_machine_has_no_route() {
        // Loopback is no address of a rail, whatever the kernel would do.
        for address in ["::ffff:127.0.0.1", "::", "fe80::1", "ff02::1"] {
            assert_eq!(route_towards(&gid(address)), None, "{address}");
        }
    }

    #[test]
    fn the_kernel_says_through_which_interface_it_would_send() {
        let socket = route_socket().expect("the kernel has routes");
        let own = ask_route(&socket, ip("127.0.0.1")).expect("a route to this host");
        assert!(own.is_local && own.source == Some(ip("127.0.0.1")), "{own:?}");
        let name = index_to_name(&socket, own.interface.expect("an interface"));
        assert_eq!(name.as_deref(), Ok("lo"));
    }

    #[test]
    fn every_mtu_is_the_same_on_both_sides() {
        for mtu in Mtu::ALL {
            let theirs = verbs::Mtu::from_wire(mtu.wire()).unwrap();
            assert_eq!((theirs.bytes(), theirs.to_wire()), (mtu.bytes(), mtu.wire()));
        }
    }

    #[test]
    fn both_ends_are_told_what_was_agreed() {
        let hosts = [device("a", 1, vec![roce("v0", &["fe80::1", "::ffff:10.1.0.1"])])];
        let choice = crate::pairing::serve_rails(&hosts, &[]).unwrap().remove(0);
        let end = QueuePairEnd { qpn: Qpn::new(17).unwrap(), psn: Psn::new(23).unwrap() };
        let peer = gid("::ffff:10.1.0.2");
        let address = Address::Ethernet { gid: peer };
        let up = BringUp { index: 0, address, mtu: Mtu::B2048, depth: 5, remote: vec![end] };
        let (remote, local) = ends(&up, &choice.spec, end, Psn::new(42).unwrap());
        let told = RemoteEnd {
            queue_pair: 17,
            psn: verbs::Psn::new(23),
            destination: Destination::Ethernet { gid: peer.0 },
            mtu: verbs::Mtu::Bytes2048,
            max_dest_rd_atomic: 5,
        };
        assert_eq!(remote, told);
        assert_eq!((local.gid_index, local.psn.value(), local.max_rd_atomic), (1, 42, 5));
        let spec = RailSpec { responder_depth: 2, ..choice.spec.clone() };
        let (_, client) = ends(&up, &spec, end, end.psn);
        assert_eq!((client.max_rd_atomic, client.max_dest_rd_atomic), (5, 2), "its own limits");
        let spec = RailSpec { initiator_depth: 1, ..choice.spec.clone() };
        let (_, server) = ends(&up, &spec, end, end.psn);
        assert_eq!((server.max_rd_atomic, server.max_dest_rd_atomic), (1, 5), "its own limits");
        let address = Address::InfiniBand { lid: 9, gid: Some(peer) };
        let (remote, _) = ends(&BringUp { address, ..up }, &choice.spec, end, end.psn);
        let destination = Destination::InfiniBand { lid: 9, gid: Some(peer.0) };
        assert_eq!(remote.destination, destination, "the other end's LID, not ours");
    }
}
