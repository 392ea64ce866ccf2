//! Which rails there are: the client's `Request` and the peer's `Offer`.

use super::fields::{count, depth, lid, port, rail_count};
use super::{MAX_CREDITS, MAX_NAME_BYTES, MAX_QPS_PER_RAIL, RANGE_BYTES, VERSION};
use crate::facts::{Gid, LinkLayer, Mtu};
use crate::table::MAX_LAYERS;
use crate::wire::{DecodeError, Reader, within};

/// Bytes of an offer before its rails, and of each rail.
pub(super) const OFFER_BYTES: (usize, usize) = (32, 112);

/// `Request`: the client wants rails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request;

/// `Offer`: the peer's rails, and how large the table will be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Offer {
    /// The rails, 1 to [`MAX_RAILS`](super::MAX_RAILS).
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

fn version(reader: &mut Reader<'_>) -> Result<(), DecodeError> {
    let range = u64::from(VERSION)..=u64::from(VERSION);
    within("version of the rails' protocol", reader.u16("version")?, range).map(drop)
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
mod tests {
    use super::*;
    use crate::message::Kind;
    use crate::message::golden::{assert_length_matters, refusal};
    use crate::testing::gid;

    fn offer() -> Offer {
        let rail = OfferedRail {
            index: 4,
            device: "rxe0p".into(),
            node_guid: 0x0102_0304_0506_0708,
            port: 1,
            link_layer: LinkLayer::Ethernet,
            gid: gid("::ffff:10.1.0.2"),
            lid: 0,
            mtu: Mtu::B1024,
            depth: 16,
            most_queue_pairs: 8,
        };
        let spill =
            SpillTerms { transfer: Transfer::Push, credits: 0x0102, range_bytes: 0x0010_0000 };
        let (rails, spill) = (vec![rail], Some(spill));
        Offer { rails, layers: 94, generation: 3, slot_bytes: 0x0091_0000, spill }
    }

    /// Written from the table in the folder's header, as far as the name.
    #[rustfmt::skip]
    const OFFER: [u8; 80] = [
        2, 0, 1, 1,  94, 0, 0, 0,  3, 0, 0, 0, 0, 0, 0, 0,  0, 0, 0x91, 0, 0, 0, 0, 0,
        2, 1, 0, 0,  0, 0, 0x10, 0,
        4, 1, 2, 3,  0, 0,  16, 8,  8, 7, 6, 5, 4, 3, 2, 1,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1, 0, 2,
        5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ];

    fn golden_offer() -> Vec<u8> {
        let mut bytes = OFFER.to_vec();
        bytes.extend(b"rxe0p");
        bytes.resize(32 + 112, 0);
        bytes
    }

    #[test]
    fn the_bytes_of_a_request_and_an_offer_are_frozen() {
        assert_eq!(Request.encode(), [2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(Request::decode(&[2, 0, 0, 0, 0, 0, 0, 0]), Ok(Request));
        assert_eq!(offer().encode(), golden_offer());
        assert_eq!(Offer::decode(&golden_offer()), Ok(offer()));
    }

    #[test]
    fn an_offer_of_nothing_spilled_has_no_terms() {
        let offer = Offer { spill: None, ..offer() };
        let bytes = offer.encode();
        assert_eq!((bytes[3], &bytes[24..32]), (0, &[0; 8][..]));
        assert_eq!(Offer::decode(&bytes), Ok(offer));
        for (at, value) in [(3, 3), (3, 1), (24, 1), (28, 1)] {
            let mut bytes = bytes.clone();
            bytes[at] = value;
            Offer::decode(&bytes).expect_err(&format!("byte {at} is {value}"));
        }
    }

    #[test]
    fn every_cut_and_every_longer_body_is_refused() {
        assert_length_matters(&Request.encode(), Request::decode);
        assert_length_matters(&golden_offer(), Offer::decode);
    }

    #[test]
    fn a_value_that_cannot_be_is_refused_by_name() {
        let offer = |at, value| refusal(&golden_offer(), at, value, Offer::decode);
        assert!(offer(0, 1).contains("version of the rails' protocol is 1, allowed are 2 to 2"));
        assert!(offer(2, 0).contains("number of rails is 0"));
        assert!(offer(2, 9).contains("number of rails is 9, allowed are 1 to 8"));
        assert!(offer(3, 3).contains("transfer 3 does not exist"));
        assert!(offer(25, 0xff).contains("credits is 65282, allowed are 1 to 1024"));
        assert!(offer(26, 1).contains("reserved bytes of the offer"));
        assert!(offer(30, 0).contains("range bytes is 0, allowed are 1048576 to 1073741824"));
        assert!(offer(6, 1).contains("layers is 65630"));
        assert!(offer(32 + 1, 0).contains("port is 0"));
        assert!(offer(32 + 2, 3).contains("link layer 3 does not exist"));
        assert!(offer(32 + 3, 0).contains("path MTU number 0 does not exist"));
        assert!(offer(32 + 3, 6).contains("path MTU number 6 does not exist"));
        assert!(offer(32 + 5, 0xc0).contains("LID is 49152"));
        assert!(offer(32 + 6, 0).contains("READ depth is 0"));
        assert!(offer(32 + 7, 17).contains("most queue pairs is 17"));
        assert!(offer(32 + 32, 65).contains("bytes of a device name is 65"));
        assert!(offer(32 + 32, 4).contains("reserved bytes of the device name"));
        assert!(offer(32 + 48, b'\n').contains("device name is not printable"));
        assert!(offer(32 + 48, 0xff).contains("device name is not printable"));
    }

    #[test]
    fn a_name_that_is_too_long_is_cut_between_characters() {
        let mut long = offer();
        long.rails[0].device = "é".repeat(33);
        let found = Offer::decode(&long.encode()).unwrap();
        assert_eq!(found.rails[0].device, "é".repeat(32));
        long.rails[0].device = format!("x{}", "é".repeat(32));
        let found = Offer::decode(&long.encode()).unwrap();
        assert_eq!(found.rails[0].device, format!("x{}", "é".repeat(31)));
    }

    #[test]
    fn the_largest_and_smallest_bodies_lie_in_the_stated_range() {
        let length = |rails| {
            let rails = vec![offer().rails[0].clone(); rails];
            Offer { rails, ..offer() }.encode().len()
        };
        assert_eq!(Kind::Offer.body_range(), (length(1), length(8)));
        assert_eq!(Kind::Request.body_range(), (8, 8));
    }
}
