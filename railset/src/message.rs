//! The bodies that set up queue pairs; they travel on the control connection after its handshake.
//!
//! All numbers are little-endian. History: version 1, the first; version 2, spilled experts.
//!
//! ```text
//! Request    version u16, zero 6
//! Offer      version u16, rails u8, transfer u8 (0 nothing is spilled, 1 push, 2 stage), layers u32,
//!            generation u64, slot bytes u64, credits u16, zero 2, range bytes u32, rails x 112:
//!              index u8, port u8, link layer u8 (1 InfiniBand, 2 Ethernet), MTU u8 (1-5),
//!              LID u16, READ depth u8, most queue pairs u8, node GUID u64, GID 16,
//!              name bytes u8, zero 15, name 64 (zeros behind it)
//! Connect    rails u8, zero 7, rails x:
//!              index u8, port u8, MTU u8, READ depth u8, LID u16, queue pairs u8,
//!              push u8 (1: the last queue pair is for spilled experts), node GUID u64, GID 16, queue pairs x (QPN u32, PSN u32)
//! Connected  rails u8, zero 7, rails x:
//!              index u8, MTU u8, READ depth u8, queue pairs u8, zero 4,
//!              queue pairs x (QPN u32, PSN u32)
//! Table      see the `table` module
//! TableAck   generation u64
//! Usage      entries u32, zero 4, entries x (layer u32, expert u32, READs u32)
//! Damaged    layer u32, expert u32
//! ```
//!
//! | limit | value | why |
//! |---|---|---|
//! | [`MAX_RAILS`] | 8 | twice the ports of the largest adapters in use |
//! | [`MAX_QPS_PER_RAIL`] | 16 | one rail is full with two; 16 x 16 READs outlast any latency |
//! | [`MAX_NAME_BYTES`] | 64 | `IBV_SYSFS_NAME_MAX` |
//! | LID | 0 (Ethernet) or 1 to 0xBFFF | unicast LIDs, InfiniBand specification, volume 1, 4.1.3 |
//! | QPN | 2 to 0xFF_FFFE | 24 bits; 0, 1 and 0xFF_FFFF name management and multicast, 3.5.10 |
//! | PSN | 0 to 0xFF_FFFF | 24 bits |
//! | credits | 1 to 1024 | receives that the peer keeps posted for each client and rail |
//! | range bytes | 1 MiB to 1 GiB | one request asks for a piece of 256 KiB and the longest header at least |
//! | [`MAX_USAGE`] | 4096 | a report of every expert of a store is a few of them |
//! | READ depth | 1 to 255 | `ibv_qp_attr.max_rd_atomic` has 8 bits; 0 would allow no READ |

use crate::facts::{Gid, LinkLayer, Mtu};
use crate::table::{MAX_LAYERS, MAX_TABLE_BYTES};
use crate::wire::{DecodeError, Reader, within};

/// The version of these bodies.
pub const VERSION: u16 = 2;
/// Most rails that a peer offers.
pub const MAX_RAILS: usize = 8;
/// Most queue pairs that a client has on a rail.
pub const MAX_QPS_PER_RAIL: usize = 16;
/// Longest device name, in bytes.
pub const MAX_NAME_BYTES: usize = 64;
/// Largest LID that names one port.
pub const MAX_LID: u16 = 0xbfff;

/// Most entries of a usage report.
pub const MAX_USAGE: usize = 4096;
/// Most requests for spilled experts that a client has under way on a rail.
pub const MAX_CREDITS: u16 = 1024;
/// Fewest and most bytes that one request for a spilled expert may be allowed.
pub const RANGE_BYTES: std::ops::RangeInclusive<u32> = 1 << 20..=1 << 30;

/// Bytes of an offer before its rails, and of each rail.
const OFFER_BYTES: (usize, usize) = (32, 112);
/// Bytes of a connect before its rails, and of each rail before its queue pairs.
const CONNECT_BYTES: (usize, usize) = (8, 32);
/// Bytes of a connected before its rails, and of each rail before its queue pairs.
const CONNECTED_BYTES: (usize, usize) = (8, 8);
/// Bytes of a usage report before its entries, and of each entry.
const USAGE_BYTES: (usize, usize) = (8, 12);
/// Bytes of a queue pair's end.
const END_BYTES: usize = 8;

/// What a body is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Kind {
    /// Client: which rails are there?
    Request,
    /// Peer: these.
    Offer,
    /// Client: I use these of them, with these queue pairs.
    Connect,
    /// Peer: mine are connected to yours.
    Connected,
    /// Peer: where the experts are.
    Table,
    /// Client: I use the table of this generation and no older one.
    TableAck,
    /// Client: how often I have read which experts since the last report.
    Usage,
    /// Client: the bytes of this expert were not its record's.
    Damaged,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 8] = [
        Self::Request,
        Self::Offer,
        Self::Connect,
        Self::Connected,
        Self::Table,
        Self::TableAck,
        Self::Usage,
        Self::Damaged,
    ];

    /// Whether it is the client that sends it.
    #[must_use]
    pub fn is_from_client(self) -> bool {
        matches!(self, Self::Request | Self::Connect | Self::TableAck | Self::Usage | Self::Damaged)
    }

    /// Shortest and longest body, in bytes: what a frame may be allocated for.
    #[must_use]
    pub fn body_range(self) -> (usize, usize) {
        let range = |(head, rail): (usize, usize), ends: usize| {
            let most = head + MAX_RAILS * (rail + ends * END_BYTES);
            (head + rail + ends.min(1) * END_BYTES, most)
        };
        match self {
            Self::Request | Self::TableAck | Self::Damaged => (8, 8),
            Self::Usage => (USAGE_BYTES.0, USAGE_BYTES.0 + MAX_USAGE * USAGE_BYTES.1),
            Self::Offer => range(OFFER_BYTES, 0),
            Self::Connect => range(CONNECT_BYTES, MAX_QPS_PER_RAIL),
            Self::Connected => range(CONNECTED_BYTES, MAX_QPS_PER_RAIL),
            Self::Table => (crate::table::MIN_TABLE_BYTES, MAX_TABLE_BYTES),
        }
    }
}

/// A queue pair's number: 24 bits, none of the reserved ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Qpn(u32);

impl Qpn {
    /// # Errors
    /// The number has more than 24 bits, or is 0, 1 or 0xFFFFFF, which no RC queue pair has.
    pub fn new(number: u32) -> Result<Self, DecodeError> {
        within("queue pair number", number, 2..=0xff_fffe).map(Self)
    }

    /// The number, 2 to 0xFFFFFE.
    #[must_use]
    pub fn value(self) -> u32 {
        self.0
    }
}

/// The number of a queue pair's first packet: 24 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Psn(u32);

impl Psn {
    /// # Errors
    /// The number has more than 24 bits.
    pub fn new(number: u32) -> Result<Self, DecodeError> {
        within("packet sequence number", number, 0..=0xff_ffff).map(Self)
    }

    /// The lowest 24 bits of a random number. Random, so that packets of an earlier queue pair
    /// with the same number are not taken for ours.
    #[must_use]
    pub fn from_random(random: u32) -> Self {
        Self(random & 0xff_ffff)
    }

    /// The number, 0 to 0xFFFFFF.
    #[must_use]
    pub fn value(self) -> u32 {
        self.0
    }
}

/// One end of a queue pair, as the other end must know it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueuePairEnd {
    /// Its number.
    pub qpn: Qpn,
    /// The number of the first packet it sends.
    pub psn: Psn,
}

/// `Request`: the client wants rails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request;

/// A rail that a peer offers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OfferedRail {
    /// The peer's name for it; unique in an offer.
    pub index: u8,
    /// The device's name on the peer, for logs.
    pub device: String,
    /// The device's number.
    pub node_guid: u64,
    /// The port's number, from 1.
    pub port: u8,
    /// What the port is cabled to.
    pub link_layer: LinkLayer,
    /// The port's address.
    pub gid: Gid,
    /// The port's LID, 0 on Ethernet.
    pub lid: u16,
    /// The port's active MTU.
    pub mtu: Mtu,
    /// READs that a queue pair answers at once, 1 to 255.
    pub depth: u8,
    /// Queue pairs that a client may have here, 1 to [`MAX_QPS_PER_RAIL`].
    pub most_queue_pairs: u8,
}

/// How a spilled expert comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Transfer {
    /// The peer WRITEs it into the client's memory.
    Push,
    /// The peer holds it ready in its own memory, and the client READs it.
    Stage,
}

/// What a peer allows for spilled experts, per client and rail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SpillTerms {
    /// How they come.
    pub transfer: Transfer,
    /// Requests under way at once, 1 to [`MAX_CREDITS`].
    pub credits: u16,
    /// Most bytes that one request asks for, in [`RANGE_BYTES`].
    pub range_bytes: u32,
}

/// `Offer`: the peer's rails, and how large the table will be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Offer {
    /// The rails, 1 to [`MAX_RAILS`].
    pub rails: Vec<OfferedRail>,
    /// Layers of the table.
    pub layers: u32,
    /// The table's generation when this was sent.
    pub generation: u64,
    /// Bytes of a slot: no record is larger.
    pub slot_bytes: u64,
    /// How spilled experts come; `None` where nothing is spilled, or ever will be.
    pub spill: Option<SpillTerms>,
}

/// A rail that a client connects.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConnectRail {
    /// The offered rail's index.
    pub index: u8,
    /// The client's device.
    pub node_guid: u64,
    /// The client's port, from 1.
    pub port: u8,
    /// The client's address.
    pub gid: Gid,
    /// The client's LID, 0 on Ethernet.
    pub lid: u16,
    /// The client's port's active MTU.
    pub mtu: Mtu,
    /// READs that a queue pair of the client's has outstanding, 1 to 255.
    pub depth: u8,
    /// The client's ends, 1 to [`MAX_QPS_PER_RAIL`].
    pub queue_pairs: Vec<QueuePairEnd>,
    /// Whether the last of them is for spilled experts.
    pub push: bool,
}

/// `Connect`: the rails that a client uses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Connect {
    /// The rails, 1 to [`MAX_RAILS`]. Their order is that of every later message.
    pub rails: Vec<ConnectRail>,
}

/// A rail whose queue pairs the peer has connected.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConnectedRail {
    /// The offered rail's index.
    pub index: u8,
    /// The path MTU of both ends: the smaller of the two ports'.
    pub mtu: Mtu,
    /// READs outstanding per queue pair: the smaller of what both ends can.
    pub depth: u8,
    /// The peer's ends, in the order of the client's.
    pub queue_pairs: Vec<QueuePairEnd>,
}

/// `Connected`: the peer's side is up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Connected {
    /// The rails, in the order of the `Connect`.
    pub rails: Vec<ConnectedRail>,
}

/// `TableAck`: the client has put an older table away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TableAck {
    /// The generation that it uses from now on.
    pub generation: u64,
}

/// `Usage`: how often a client has read experts from the peer's memory, of which the peer sees
/// nothing.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// At most [`MAX_USAGE`].
    pub entries: Vec<UsageEntry>,
}

/// How often one expert was read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UsageEntry {
    /// The model's number of the layer.
    pub layer: u32,
    /// The expert.
    pub expert: u32,
    /// READs of the whole record.
    pub reads: u32,
}

/// `Damaged`: what came for an expert was not its record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Damaged {
    /// The model's number of the layer.
    pub layer: u32,
    /// The expert.
    pub expert: u32,
}

impl Request {
    /// The body's bytes.
    #[must_use]
    pub fn encode(self) -> Vec<u8> {
        let mut out = VERSION.to_le_bytes().to_vec();
        out.resize(8, 0);
        out
    }

    /// # Errors
    /// The body is not one of this version's.
    pub fn decode(body: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(body);
        version(&mut reader)?;
        reader.reserved("request", 6)?;
        reader.finish("request")?;
        Ok(Self)
    }
}

impl TableAck {
    /// The body's bytes.
    #[must_use]
    pub fn encode(self) -> Vec<u8> {
        self.generation.to_le_bytes().to_vec()
    }

    /// # Errors
    /// The body has another length.
    pub fn decode(body: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(body);
        let generation = reader.u64("generation")?;
        reader.finish("table acknowledgement")?;
        Ok(Self { generation })
    }
}

impl Usage {
    /// The body's bytes; entries beyond [`MAX_USAGE`] are left out.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let entries = &self.entries[..self.entries.len().min(MAX_USAGE)];
        let mut out = (entries.len() as u32).to_le_bytes().to_vec();
        out.extend([0; 4]);
        for entry in entries {
            out.extend(entry.layer.to_le_bytes());
            out.extend(entry.expert.to_le_bytes());
            out.extend(entry.reads.to_le_bytes());
        }
        out
    }

    /// # Errors
    /// [`DecodeError`] names the field that no report has.
    pub fn decode(body: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(body);
        let what = "entries of a usage report";
        let entries = within(what, reader.u32(what)?, 0..=MAX_USAGE as u64)?;
        reader.reserved("usage", 4)?;
        let entry = |reader: &mut Reader<'_>| {
            let (layer, expert) = (reader.u32("layer")?, reader.u32("expert")?);
            Ok(UsageEntry { layer, expert, reads: reader.u32("READs")? })
        };
        let entries = (0..entries).map(|_| entry(&mut reader)).collect::<Result<_, _>>()?;
        reader.finish("usage")?;
        Ok(Self { entries })
    }
}

impl Damaged {
    /// The body's bytes.
    #[must_use]
    pub fn encode(self) -> Vec<u8> {
        [self.layer.to_le_bytes(), self.expert.to_le_bytes()].concat()
    }

    /// # Errors
    /// The body has another length.
    pub fn decode(body: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(body);
        let (layer, expert) = (reader.u32("layer")?, reader.u32("expert")?);
        reader.finish("damaged")?;
        Ok(Self { layer, expert })
    }
}

impl Offer {
    /// The body's bytes. A name longer than [`MAX_NAME_BYTES`] is cut; what else lies outside the
    /// limits, the other end refuses.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(OFFER_BYTES.0 + self.rails.len() * OFFER_BYTES.1);
        out.extend(VERSION.to_le_bytes());
        let transfer = self.spill.map_or(0, |spill| transfer_wire(spill.transfer));
        out.extend([count(self.rails.len()), transfer]);
        out.extend(self.layers.to_le_bytes());
        out.extend(self.generation.to_le_bytes());
        out.extend(self.slot_bytes.to_le_bytes());
        out.extend(self.spill.map_or(0, |spill| spill.credits).to_le_bytes());
        out.extend([0; 2]);
        out.extend(self.spill.map_or(0, |spill| spill.range_bytes).to_le_bytes());
        for rail in &self.rails {
            let name = &rail.device[..rail.device.floor_char_boundary(MAX_NAME_BYTES)];
            let layer = link_layer_wire(rail.link_layer);
            out.extend([rail.index, rail.port, layer, rail.mtu.wire()]);
            out.extend(rail.lid.to_le_bytes());
            out.extend([rail.depth, rail.most_queue_pairs]);
            out.extend(rail.node_guid.to_le_bytes());
            out.extend(rail.gid.0);
            let end = out.len() + 16 + MAX_NAME_BYTES;
            out.push(count(name.len()));
            out.extend([0; 15]);
            out.extend(name.as_bytes());
            out.resize(end, 0);
        }
        out
    }

    /// # Errors
    /// [`DecodeError`] names the field that no offer has.
    pub fn decode(body: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(body);
        version(&mut reader)?;
        let rails = rail_count(&mut reader)?;
        let transfer = reader.u8("transfer")?;
        let layers = within("layers", reader.u32("layers")?, 1..=MAX_LAYERS as u64)?;
        let generation = reader.u64("generation")?;
        let slot_bytes = within("slot bytes", reader.u64("slot bytes")?, 1..=u64::MAX)?;
        let spill = spill_terms(&mut reader, transfer)?;
        let rails = (0..rails).map(|_| offered_rail(&mut reader)).collect::<Result<_, _>>()?;
        reader.finish("offer")?;
        Ok(Self { rails, layers, generation, slot_bytes, spill })
    }
}

/// Credits and range bytes, which are zero where there is no transfer.
fn spill_terms(reader: &mut Reader<'_>, transfer: u8) -> Result<Option<SpillTerms>, DecodeError> {
    let credits = reader.u16("credits")?;
    reader.reserved("offer", 2)?;
    let range_bytes = reader.u32("range bytes")?;
    let transfer = match transfer {
        0 => {
            within("credits where nothing is spilled", credits, 0..=0)?;
            within("range bytes where nothing is spilled", range_bytes, 0..=0)?;
            return Ok(None);
        }
        1 => Transfer::Push,
        2 => Transfer::Stage,
        found => return Err(DecodeError::Unknown { what: "transfer", found: u64::from(found) }),
    };
    let credits = within("credits", credits, 1..=u64::from(MAX_CREDITS))?;
    let allowed = u64::from(*RANGE_BYTES.start())..=u64::from(*RANGE_BYTES.end());
    let range_bytes = within("range bytes", range_bytes, allowed)?;
    Ok(Some(SpillTerms { transfer, credits, range_bytes }))
}

fn offered_rail(reader: &mut Reader<'_>) -> Result<OfferedRail, DecodeError> {
    let index = reader.u8("rail index")?;
    let port = port(reader)?;
    let found = reader.u8("link layer")?;
    let link_layer = match found {
        1 => LinkLayer::InfiniBand,
        2 => LinkLayer::Ethernet,
        _ => return Err(DecodeError::Unknown { what: "link layer", found: u64::from(found) }),
    };
    let mtu = reader.mtu()?;
    let lid = lid(reader)?;
    let depth = depth(reader)?;
    let most = reader.u8("most queue pairs")?;
    let most_queue_pairs = within("most queue pairs", most, 1..=MAX_QPS_PER_RAIL as u64)?;
    let node_guid = reader.u64("node GUID")?;
    let gid = Gid(reader.array("GID")?);
    let device = name(reader)?;
    Ok(OfferedRail {
        index,
        device,
        node_guid,
        port,
        link_layer,
        gid,
        lid,
        mtu,
        depth,
        most_queue_pairs,
    })
}

/// A device's name: its length, and 64 bytes that are zero behind it.
fn name(reader: &mut Reader<'_>) -> Result<String, DecodeError> {
    let what = "device name";
    let bytes = within("bytes of a device name", reader.u8(what)?, 0..=MAX_NAME_BYTES as u64)?;
    reader.reserved("offer", 8)?;
    reader.reserved("offer", 7)?;
    let (name, padding) = reader.bytes(what, MAX_NAME_BYTES)?.split_at(usize::from(bytes));
    if let Some(found) = padding.iter().find(|byte| **byte != 0) {
        return Err(DecodeError::Reserved { what, found: u64::from(*found) });
    }
    let name = str::from_utf8(name).ok().filter(|name| !name.chars().any(char::is_control));
    name.map(String::from).ok_or(DecodeError::Text { what })
}

impl Connect {
    /// The body's bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![count(self.rails.len()), 0, 0, 0, 0, 0, 0, 0];
        for rail in &self.rails {
            out.extend([rail.index, rail.port, rail.mtu.wire(), rail.depth]);
            out.extend(rail.lid.to_le_bytes());
            out.extend([count(rail.queue_pairs.len()), u8::from(rail.push)]);
            out.extend(rail.node_guid.to_le_bytes());
            out.extend(rail.gid.0);
            put_ends(&mut out, &rail.queue_pairs);
        }
        out
    }

    /// # Errors
    /// [`DecodeError`] names the field that no connect has.
    pub fn decode(body: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(body);
        let rails = rail_count(&mut reader)?;
        reader.reserved("connect", 7)?;
        let rails = (0..rails).map(|_| connect_rail(&mut reader)).collect::<Result<_, _>>()?;
        reader.finish("connect")?;
        Ok(Self { rails })
    }
}

fn connect_rail(reader: &mut Reader<'_>) -> Result<ConnectRail, DecodeError> {
    let index = reader.u8("rail index")?;
    let port = port(reader)?;
    let mtu = reader.mtu()?;
    let depth = depth(reader)?;
    let lid = lid(reader)?;
    let pairs = queue_pair_count(reader)?;
    let push = within("push", reader.u8("push")?, 0..=1)? == 1;
    let node_guid = reader.u64("node GUID")?;
    let gid = Gid(reader.array("GID")?);
    let queue_pairs = ends(reader, pairs)?;
    Ok(ConnectRail { index, node_guid, port, gid, lid, mtu, depth, queue_pairs, push })
}

impl Connected {
    /// The body's bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![count(self.rails.len()), 0, 0, 0, 0, 0, 0, 0];
        for rail in &self.rails {
            out.extend([rail.index, rail.mtu.wire(), rail.depth, count(rail.queue_pairs.len())]);
            out.extend([0; 4]);
            put_ends(&mut out, &rail.queue_pairs);
        }
        out
    }

    /// # Errors
    /// [`DecodeError`] names the field that no connected has.
    pub fn decode(body: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(body);
        let rails = rail_count(&mut reader)?;
        reader.reserved("connected", 7)?;
        let rails = (0..rails).map(|_| connected_rail(&mut reader)).collect::<Result<_, _>>()?;
        reader.finish("connected")?;
        Ok(Self { rails })
    }
}

fn connected_rail(reader: &mut Reader<'_>) -> Result<ConnectedRail, DecodeError> {
    let index = reader.u8("rail index")?;
    let mtu = reader.mtu()?;
    let depth = depth(reader)?;
    let pairs = queue_pair_count(reader)?;
    reader.reserved("connected", 4)?;
    Ok(ConnectedRail { index, mtu, depth, queue_pairs: ends(reader, pairs)? })
}

fn version(reader: &mut Reader<'_>) -> Result<(), DecodeError> {
    let range = u64::from(VERSION)..=u64::from(VERSION);
    within("version of the rails' protocol", reader.u16("version")?, range).map(drop)
}

fn rail_count(reader: &mut Reader<'_>) -> Result<u8, DecodeError> {
    within("number of rails", reader.u8("number of rails")?, 1..=MAX_RAILS as u64)
}

fn queue_pair_count(reader: &mut Reader<'_>) -> Result<u8, DecodeError> {
    let what = "number of queue pairs";
    within(what, reader.u8(what)?, 1..=MAX_QPS_PER_RAIL as u64)
}

fn port(reader: &mut Reader<'_>) -> Result<u8, DecodeError> {
    within("port", reader.u8("port")?, 1..=255)
}

fn lid(reader: &mut Reader<'_>) -> Result<u16, DecodeError> {
    within("LID", reader.u16("LID")?, 0..=u64::from(MAX_LID))
}

fn depth(reader: &mut Reader<'_>) -> Result<u8, DecodeError> {
    within("READ depth", reader.u8("READ depth")?, 1..=255)
}

fn ends(reader: &mut Reader<'_>, count: u8) -> Result<Vec<QueuePairEnd>, DecodeError> {
    let end = |reader: &mut Reader<'_>| {
        let qpn = Qpn::new(reader.u32("queue pair number")?)?;
        let psn = Psn::new(reader.u32("packet sequence number")?)?;
        Ok(QueuePairEnd { qpn, psn })
    };
    (0..count).map(|_| end(reader)).collect()
}

fn put_ends(out: &mut Vec<u8>, ends: &[QueuePairEnd]) {
    for end in ends {
        out.extend(end.qpn.0.to_le_bytes());
        out.extend(end.psn.0.to_le_bytes());
    }
}

/// A count for the wire; one that does not fit becomes 255, which every decoder refuses.
fn count(items: usize) -> u8 {
    u8::try_from(items).unwrap_or(u8::MAX)
}

fn transfer_wire(transfer: Transfer) -> u8 {
    match transfer {
        Transfer::Push => 1,
        Transfer::Stage => 2,
    }
}

fn link_layer_wire(link_layer: LinkLayer) -> u8 {
    match link_layer {
        LinkLayer::InfiniBand => 1,
        LinkLayer::Ethernet => 2,
    }
}

#[cfg(test)]
#[path = "message_tests.rs"]
mod tests;
