//! A client and a peer with two rails each, and the bytes between them.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use railset::choose::{RailSpec, Wish};
use railset::facts::{DeviceFacts, Gid, GidFacts, GidKind, LinkLayer, Mtu, PortFacts, PortState};
use railset::handshake::client::{ClientAction, ClientRails, ClientSettings, ClientWaits};
use railset::handshake::peer::{PeerAction, PeerHandshake, PeerRails, PeerWaits};
use railset::handshake::{BringUp, HandshakeError};
use railset::message::{Kind, Psn, Qpn, QueuePairEnd, SpillTerms, TableAck};
use railset::pairing::serve_rails;
use railset::route::KernelRoute;
use railset::table::{Column, LayerShape, LayerTable, SPILLED, Table};

/// More than any run takes.
const MAX_STEPS: usize = 20_000;
/// A frame of the simulated link: kind, length, body.
const FRAME_BYTES: usize = 5;

/// How the link behaves.
#[derive(Default)]
pub(crate) struct Link {
    /// Delays and cuts up at random; without it everything arrives at once.
    pub(crate) seed: Option<u64>,
    /// Carries so many bytes, both ways together, and then nothing.
    pub(crate) cut: Option<usize>,
    /// Sets one byte of what is carried to a value.
    pub(crate) change: Option<(usize, u8)>,
}

pub(crate) struct World {
    pub(crate) devices: Vec<DeviceFacts>,
    pub(crate) rails: Arc<PeerRails>,
    pub(crate) client: ClientRails,
    pub(crate) peer: PeerHandshake,
    pub(crate) client_ends: Vec<Vec<QueuePairEnd>>,
    pub(crate) client_ups: Vec<BringUp>,
    /// For each of the client's rails, what its last queue pair is for.
    pub(crate) client_pushes: Vec<Option<SpillTerms>>,
    pub(crate) peer_ends: Vec<Vec<QueuePairEnd>>,
    pub(crate) peer_ups: Vec<BringUp>,
    /// For each of the peer's rails, what its last queue pair is for.
    pub(crate) peer_pushes: Vec<Option<SpillTerms>>,
    pub(crate) acknowledged: Vec<u64>,
    /// What the client's driver did with tables, in order.
    pub(crate) client_tables: Vec<TableStep>,
    /// Bytes that have arrived, both ways together.
    pub(crate) carried: usize,
    holds_up: bool,
    to_peer: Pipe,
    to_client: Pipe,
    next_qpn: u32,
}

/// What a client's driver does with the table of a generation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TableStep {
    /// Posts by it from now on, and by none before it.
    Uses(u64),
    /// Says so to the peer, which overwrites what only older tables name.
    Acknowledges(u64),
}

/// One direction: what is on the way, and what has arrived.
#[derive(Default)]
struct Pipe {
    on_the_way: VecDeque<u8>,
    arrived: Vec<u8>,
}

impl Pipe {
    fn send(&mut self, kind: Kind, body: &[u8]) {
        let at = Kind::ALL.iter().position(|known| *known == kind).unwrap();
        self.on_the_way.push_back(u8::try_from(at).unwrap());
        self.on_the_way.extend(u32::try_from(body.len()).unwrap().to_le_bytes());
        self.on_the_way.extend(body);
    }

    /// The next message that has arrived in full; one longer than its kind allows ends the link,
    /// as the frames of the real connection do.
    fn next(&mut self) -> Option<(Kind, Vec<u8>)> {
        let [kind, l0, l1, l2, l3, rest @ ..] = &self.arrived[..] else { return None };
        let kind = *Kind::ALL.get(usize::from(*kind))?;
        let length = u32::from_le_bytes([*l0, *l1, *l2, *l3]) as usize;
        if length > kind.body_range().1 {
            return None;
        }
        let body = rest.get(..length)?.to_vec();
        self.arrived.drain(..FRAME_BYTES + length);
        Some((kind, body))
    }
}

pub(crate) fn gid(text: &str) -> Gid {
    Gid(text.parse::<Ipv6Addr>().unwrap().octets())
}

pub(crate) fn device(name: &str, node_guid: u64, address: &str) -> DeviceFacts {
    let row = |(index, text): (u8, &str)| GidFacts {
        index,
        gid: gid(text),
        kind: GidKind::RoceV2,
        netdev: None,
    };
    let port = PortFacts {
        number: 1,
        state: PortState::Active,
        link_layer: LinkLayer::Ethernet,
        lid: 0,
        active_mtu: Mtu::B1024,
        bits_per_s: None,
        gids: (0..).zip(["fe80::1", address]).map(row).collect(),
    };
    DeviceFacts {
        name: name.into(),
        node_guid,
        numa_node: None,
        interfaces: Vec::new(),
        ports: vec![port],
        initiator_depth: 16,
        responder_depth: 16,
        max_qp_wr: 1024,
        max_mr_size: u64::MAX,
    }
}

pub(crate) fn shapes() -> Vec<LayerShape> {
    let shape = |layer, experts| LayerShape { layer, experts, record_bytes: 8000 };
    vec![shape(0, 2), shape(7, 3)]
}

pub(crate) fn table(generation: u64) -> Table {
    let layer = |layer, key: u32, slots: &[u32]| LayerTable {
        layer,
        slot_stride: 8192,
        columns: vec![
            Column { base: 0x1000_0000, rkey: 10 + key },
            Column { base: 0x2000_0000, rkey: 20 + key },
        ],
        slots: slots.to_vec(),
    };
    Table::new(generation, vec![layer(0, 0, &[0, SPILLED]), layer(7, 1, &[1, 2, 3])]).unwrap()
}

pub(crate) fn peer_specs() -> Vec<RailSpec> {
    let mut devices =
        vec![device("rxe0p", 11, "::ffff:10.1.0.2"), device("rxe1p", 12, "::ffff:10.2.0.2")];
    devices[1].ports[0].active_mtu = Mtu::B2048;
    let wishes: Vec<Wish> = Vec::new();
    serve_rails(&devices, &wishes).unwrap().into_iter().map(|choice| choice.spec).collect()
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with_rails(Arc::new(PeerRails::new(&peer_specs(), 8, 2, 3, 8192, None)))
    }

    pub(crate) fn with_rails(rails: Arc<PeerRails>) -> Self {
        let (client, first) = ClientRails::start(ClientSettings::default(), shapes());
        let mut world = Self {
            devices: vec![
                device("rxe0", 1, "::ffff:10.1.0.1"),
                device("rxe1", 2, "::ffff:10.2.0.1"),
            ],
            peer: PeerHandshake::new(Arc::clone(&rails)),
            rails,
            client,
            client_ends: Vec::new(),
            client_ups: Vec::new(),
            client_pushes: Vec::new(),
            peer_ends: Vec::new(),
            peer_ups: Vec::new(),
            peer_pushes: Vec::new(),
            acknowledged: Vec::new(),
            client_tables: Vec::new(),
            carried: 0,
            holds_up: false,
            to_peer: Pipe::default(),
            to_client: Pipe::default(),
            next_qpn: 100,
        };
        world.client_does(vec![first]).unwrap();
        world
    }

    /// Leaves the client's queue pairs on their way up, until the test calls `on_up`.
    pub(crate) fn hold_up(&mut self) {
        self.holds_up = true;
    }

    /// Starts over with these.
    pub(crate) fn settings(&mut self, settings: ClientSettings) {
        let (client, first) = ClientRails::start(settings, shapes());
        (self.client, self.to_peer) = (client, Pipe::default());
        self.client_does(vec![first]).unwrap();
    }

    /// Moves bytes and lets both ends act until nothing moves any more.
    pub(crate) fn run(&mut self, link: Link) -> Result<(), HandshakeError> {
        let mut random = link.seed.unwrap_or(0) | 1;
        for _ in 0..MAX_STEPS {
            let mut moved = false;
            for to_peer in [true, false] {
                random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767);
                let most = match link.seed {
                    Some(_) => usize::try_from((random >> 33) % 40).unwrap(),
                    None => usize::MAX,
                };
                moved |= self.carry(to_peer, most, &link);
            }
            while let Some((kind, body)) = self.to_peer.next() {
                let actions = self.peer.on_message(kind, &body)?;
                self.peer_does(actions)?;
                moved = true;
            }
            while let Some((kind, body)) = self.to_client.next() {
                let actions = self.client.on_message(kind, &body)?;
                self.client_does(actions)?;
                moved = true;
            }
            let is_cut = link.cut.is_some_and(|cut| self.carried >= cut);
            let is_quiet =
                self.to_peer.on_the_way.is_empty() && self.to_client.on_the_way.is_empty();
            if !moved && (is_cut || is_quiet) {
                return Ok(());
            }
        }
        panic!("the two ends never came to rest");
    }

    /// Carries up to `most` bytes one way.
    fn carry(&mut self, to_peer: bool, most: usize, link: &Link) -> bool {
        let pipe = if to_peer { &mut self.to_peer } else { &mut self.to_client };
        let left = link.cut.map_or(usize::MAX, |cut| cut.saturating_sub(self.carried));
        let count = pipe.on_the_way.len().min(most).min(left);
        for byte in pipe.on_the_way.drain(..count) {
            let changed = link.change.filter(|(at, _)| *at == self.carried);
            pipe.arrived.push(changed.map_or(byte, |(_, value)| value));
            self.carried += 1;
        }
        count > 0
    }

    fn ends(&mut self, count: usize) -> Vec<QueuePairEnd> {
        let from = self.next_qpn;
        self.next_qpn += u32::try_from(count).unwrap();
        let end = |qpn| QueuePairEnd {
            qpn: Qpn::new(qpn).unwrap(),
            psn: Psn::from_random(qpn.wrapping_mul(0x9e37_79b1)),
        };
        (from..self.next_qpn).map(end).collect()
    }

    pub(crate) fn client_does(&mut self, actions: Vec<ClientAction>) -> Result<(), HandshakeError> {
        for action in actions {
            match action {
                ClientAction::Send(kind, body) => {
                    if kind == Kind::TableAck {
                        let TableAck { generation } = TableAck::decode(&body).unwrap();
                        self.acknowledges(generation);
                    }
                    self.to_peer.send(kind, &body);
                }
                ClientAction::FindRoutes(gids) => {
                    let route = |gid| source(gid).map(KernelRoute::from);
                    let routes: Vec<_> = gids.iter().map(route).collect();
                    let actions = self.client.on_routes(&self.devices, &routes)?;
                    self.client_does(actions)?;
                }
                ClientAction::CreateQueuePairs(creates) => {
                    for create in creates {
                        let ends = self.ends(usize::from(create.queue_pairs));
                        self.client_ends.push(ends);
                        self.client_pushes.push(create.push);
                    }
                    let actions = self.client.on_created(&self.client_ends)?;
                    self.client_does(actions)?;
                }
                ClientAction::ConnectQueuePairs(ups) => {
                    self.client_ups = ups;
                    if self.holds_up {
                        continue;
                    }
                    let actions = self.client.on_up()?;
                    self.client_does(actions)?;
                }
                ClientAction::Ready(table) | ClientAction::TableChanged(table) => {
                    assert_eq!(self.client.table(), Some(&table));
                    self.client_tables.push(TableStep::Uses(table.generation()));
                }
            }
        }
        Ok(())
    }

    /// Fails unless the table of `generation` is in use already: from here on the peer may overwrite
    /// what an older one names, and a READ by that would bring another record.
    fn acknowledges(&mut self, generation: u64) {
        let last = self.client_tables.last();
        assert_eq!(last, Some(&TableStep::Uses(generation)), "acknowledged and not in use");
        self.client_tables.push(TableStep::Acknowledges(generation));
    }

    pub(crate) fn peer_does(&mut self, actions: Vec<PeerAction>) -> Result<(), HandshakeError> {
        for action in actions {
            match action {
                PeerAction::Send(kind, body) => self.to_client.send(kind, &body),
                PeerAction::CreateQueuePairs(creates) => {
                    for create in creates {
                        let ends = self.ends(create.bring_up.remote.len());
                        self.peer_ends.push(ends);
                        self.peer_ups.push(create.bring_up);
                        self.peer_pushes.push(create.push);
                    }
                    let actions = self.peer.on_created(&self.peer_ends, &table(3))?;
                    self.peer_does(actions)?;
                }
                PeerAction::Acknowledged(generation) => self.acknowledged.push(generation),
                PeerAction::Usage(_) | PeerAction::Damaged(_) => panic!("no client says so here"),
            }
        }
        Ok(())
    }

    pub(crate) fn is_ready(&self) -> bool {
        let waits = (self.client.waits_for(), self.peer.waits_for());
        waits == (ClientWaits::Nothing, PeerWaits::Nothing)
    }

    pub(crate) fn assert_ready(&self) {
        let (client, peer) = (self.client.waits_for(), self.peer.waits_for());
        assert!(self.is_ready(), "the client waits for {client:?}, the peer for {peer:?}");
    }
}

/// The address in the same /24, as this host's routes have it.
fn source(peer: &Gid) -> Option<IpAddr> {
    let [a, b, c, _] = peer.as_ipv4()?.octets();
    Some(IpAddr::from([a, b, c, 1]))
}
