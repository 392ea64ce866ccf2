//! The driver on real devices: two rails, rxe0 to rxe0p and rxe1 to rxe1p, as scripts/soft-roce
//! boots them.

#![cfg(metrale_rdma_verbs)]

use std::net::IpAddr;

use gpu_sys::verbs::Library;
use railset::choose::{Routed, Wish};
use railset::driver::{devices as read_devices, route_towards};
use railset::facts::{DeviceFacts, Gid, GidKind, LinkLayer, PortState};
use railset::handshake::peer::PeerRails;
use railset::pairing::{RailWishes, pair, serve_rails};
use railset::route::KernelRoute;

fn devices() -> Vec<DeviceFacts> {
    let library = Library::open().expect("libibverbs");
    read_devices(&library).expect("a list of devices")
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
#[ignore = "needs an RDMA device: scripts/soft-roce"]
fn a_devices_facts_are_what_the_kernel_has() {
    let devices = devices();
    let names: Vec<_> = devices.iter().map(|device| device.name.as_str()).collect();
    for name in ["rxe0", "rxe0p", "rxe1", "rxe1p"] {
        assert!(names.contains(&name), "{names:?}");
    }
    let rxe0 = devices.iter().find(|device| device.name == "rxe0").unwrap();
    let [port] = &rxe0.ports[..] else { panic!("{rxe0:?}") };
    assert_eq!((port.number, port.state), (1, PortState::Active));
    assert_eq!((port.link_layer, port.lid), (LinkLayer::Ethernet, 0));
    assert!(rxe0.initiator_depth > 0 && rxe0.responder_depth > 0 && rxe0.max_qp_wr > 0);
    let row = port.gids.iter().find(|row| row.gid == Gid::from_ip(ip("10.1.0.1"))).unwrap();
    assert_eq!((row.kind, row.netdev.as_deref()), (GidKind::RoceV2, Some("v0")));
    assert!(port.gids.iter().any(|row| row.gid.is_link_local()), "{port:?}");
}

#[test]
#[ignore = "needs an RDMA device: scripts/soft-roce"]
fn each_rail_leaves_from_the_port_that_the_kernel_would_use() {
    let devices = devices();
    let wishes: Vec<Wish> = ["rxe0p", "rxe1p"].map(|name| name.parse().unwrap()).into();
    let rails = serve_rails(&devices, &wishes).unwrap();
    let specs: Vec<_> = rails.into_iter().map(|rail| rail.spec).collect();
    let offer = PeerRails::new(&specs, 4, 1, 1, 4096, None).offer().clone();
    let peers: Vec<Gid> = offer.rails.iter().map(|rail| rail.gid).collect();
    let routes: Vec<_> = peers.iter().map(route_towards).collect();
    let route = |source, interface: &str| {
        Some(KernelRoute { source: ip(source), interface: Some(interface.into()) })
    };
    assert_eq!(routes, [route("10.1.0.1", "v0"), route("10.2.0.1", "v1")]);
    let pairing = pair(&offer.rails, &devices, &routes, &RailWishes::default()).unwrap();
    println!("{pairing}");
    let local: Vec<_> = pairing.pairs.iter().map(|pair| &*pair.local.spec.device).collect();
    assert_eq!(local, ["rxe0", "rxe1"]);
    for pair in &pairing.pairs {
        assert_eq!(pair.local.explanation.routed, Routed::Source);
    }
}
