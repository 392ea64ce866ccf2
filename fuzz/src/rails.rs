//! Two rails at each end, for the targets that drive the rails' handshake.

use railset::choose::RailSpec;
use railset::facts::{DeviceFacts, Gid, GidFacts, GidKind, LinkLayer, Mtu, PortFacts, PortState};
use railset::message::{Kind, Psn, Qpn, QueuePairEnd};
use railset::pairing::serve_rails;
use railset::table::{Column, LayerShape, LayerTable, SPILLED, Table};

/// A RoCE device with the address `10.NETWORK.0.HOST`.
#[must_use]
pub fn device(name: &str, network: u8, host: u8) -> DeviceFacts {
    let address = std::net::IpAddr::from([10, network, 0, host]);
    let row =
        GidFacts { index: 1, gid: Gid::from_ip(address), kind: GidKind::RoceV2, netdev: None };
    let port = PortFacts {
        number: 1,
        state: PortState::Active,
        link_layer: LinkLayer::Ethernet,
        lid: 0,
        active_mtu: Mtu::B1024,
        bits_per_s: None,
        gids: vec![row],
    };
    DeviceFacts {
        name: name.into(),
        node_guid: u64::from(network) << 8 | u64::from(host),
        numa_node: None,
        interfaces: Vec::new(),
        ports: vec![port],
        initiator_depth: 16,
        responder_depth: 16,
        max_qp_wr: 1024,
        max_mr_size: u64::MAX,
    }
}

/// The client's devices.
#[must_use]
pub fn client_devices() -> Vec<DeviceFacts> {
    vec![device("rxe0", 1, 1), device("rxe1", 2, 1)]
}

/// The peer's rails.
///
/// # Panics
/// Never: both devices have a usable address.
#[must_use]
pub fn peer_rails() -> Vec<RailSpec> {
    let rails = serve_rails(&[device("rxe0p", 1, 2), device("rxe1p", 2, 2)], &[]);
    rails.expect("both are usable").into_iter().map(|choice| choice.spec).collect()
}

/// The layers of the store.
#[must_use]
pub fn shapes() -> Vec<LayerShape> {
    vec![LayerShape { layer: 3, experts: 2, record_bytes: 4096 }]
}

/// A table of that store for two rails.
///
/// # Panics
/// Never: it is inside the limits.
#[must_use]
pub fn table(generation: u64) -> Table {
    let columns = vec![Column { base: 0x1000, rkey: 1 }, Column { base: 0x2000, rkey: 2 }];
    let layer = LayerTable { layer: 3, slot_stride: 4096, columns, slots: vec![0, SPILLED] };
    Table::new(generation, vec![layer]).expect("inside the limits")
}

/// `count` queue pairs.
///
/// # Panics
/// Never: the numbers are in range.
#[must_use]
pub fn ends(count: usize) -> Vec<QueuePairEnd> {
    let end =
        |qpn| QueuePairEnd { qpn: Qpn::new(qpn).expect("in range"), psn: Psn::from_random(7) };
    (16..).take(count).map(end).collect()
}

/// The messages that `bytes` hold: kind, length as two bytes, body.
pub fn messages(mut bytes: &[u8]) -> impl Iterator<Item = (Kind, &[u8])> {
    std::iter::from_fn(move || {
        let ([kind, l0, l1], rest) = bytes.split_first_chunk()?;
        let length = usize::from(u16::from_le_bytes([*l0, *l1]));
        let (body, rest) = rest.split_at_checked(length)?;
        bytes = rest;
        Some((Kind::ALL[usize::from(*kind) % Kind::ALL.len()], body))
    })
}
