//! Whose queue pairs meet: the client's `Connect` and the peer's `Connected`.

use super::fields::{count, depth, lid, port, rail_count};
use super::queue_pair::{QueuePairEnd, ends, put_ends, queue_pair_count};
use crate::facts::{Gid, Mtu};
use crate::wire::{DecodeError, Reader, within};

/// Bytes of a connect before its rails, and of each rail before its queue pairs.
pub(super) const CONNECT_BYTES: (usize, usize) = (8, 32);

/// Bytes of a connected before its rails, and of each rail before its queue pairs.
pub(super) const CONNECTED_BYTES: (usize, usize) = (8, 8);

/// `Connect`: the rails that a client uses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Connect {
    /// The rails, 1 to [`MAX_RAILS`](super::MAX_RAILS). Their order is that of every later message.
    pub rails: Vec<ConnectRail>,
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
    /// The client's ends, 1 to [`MAX_QPS_PER_RAIL`](super::MAX_QPS_PER_RAIL).
    pub queue_pairs: Vec<QueuePairEnd>,
    /// Whether the last of them is for spilled experts.
    pub push: bool,
}

/// `Connected`: the peer's side is up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Connected {
    /// The rails, in the order of the `Connect`.
    pub rails: Vec<ConnectedRail>,
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
        Ok(Self { rails: decode_rails(body, "connect", connect_rail)? })
    }
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
        Ok(Self { rails: decode_rails(body, "connected", connected_rail)? })
    }
}

/// Either body: how many rails, and then each.
fn decode_rails<T>(
    body: &[u8],
    what: &'static str,
    rail: fn(&mut Reader<'_>) -> Result<T, DecodeError>,
) -> Result<Vec<T>, DecodeError> {
    let mut reader = Reader::new(body);
    let count = rail_count(&mut reader)?;
    reader.reserved(what, 7)?;
    let rails = (0..count).map(|_| rail(&mut reader)).collect::<Result<_, _>>()?;
    reader.finish(what)?;
    Ok(rails)
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

fn connected_rail(reader: &mut Reader<'_>) -> Result<ConnectedRail, DecodeError> {
    let index = reader.u8("rail index")?;
    let mtu = reader.mtu()?;
    let depth = depth(reader)?;
    let pairs = queue_pair_count(reader)?;
    reader.reserved("connected", 4)?;
    Ok(ConnectedRail { index, mtu, depth, queue_pairs: ends(reader, pairs)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::golden::{assert_length_matters, refusal};
    use crate::message::{Kind, Psn, Qpn};
    use crate::testing::gid;

    fn end(qpn: u32, psn: u32) -> QueuePairEnd {
        QueuePairEnd { qpn: Qpn::new(qpn).unwrap(), psn: Psn::new(psn).unwrap() }
    }

    fn connect() -> Connect {
        let rail = ConnectRail {
            index: 4,
            node_guid: 9,
            port: 2,
            gid: gid("::ffff:10.1.0.1"),
            lid: 0x1234,
            mtu: Mtu::B4096,
            depth: 128,
            queue_pairs: vec![end(0x11, 0x22), end(0x00ab_cdef, 0x00ff_ffff)],
            push: true,
        };
        Connect { rails: vec![rail] }
    }

    fn connected() -> Connected {
        let queue_pairs = vec![end(0x33, 0), end(0x44, 1)];
        let rail = ConnectedRail { index: 4, mtu: Mtu::B1024, depth: 16, queue_pairs };
        Connected { rails: vec![rail] }
    }

    /// Written from the table in the folder's header.
    #[rustfmt::skip]
    const CONNECT: [u8; 56] = [
        1, 0, 0, 0, 0, 0, 0, 0,
        4, 2, 5, 128,  0x34, 0x12,  2, 1,  9, 0, 0, 0, 0, 0, 0, 0,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1, 0, 1,
        0x11, 0, 0, 0,  0x22, 0, 0, 0,  0xef, 0xcd, 0xab, 0,  0xff, 0xff, 0xff, 0,
    ];

    /// As above.
    #[rustfmt::skip]
    const CONNECTED: [u8; 32] = [
        1, 0, 0, 0, 0, 0, 0, 0,
        4, 3, 16, 2,  0, 0, 0, 0,  0x33, 0, 0, 0,  0, 0, 0, 0,  0x44, 0, 0, 0,  1, 0, 0, 0,
    ];

    #[test]
    fn the_bytes_of_a_connect_and_a_connected_are_frozen() {
        assert_eq!(connect().encode(), CONNECT);
        assert_eq!(Connect::decode(&CONNECT), Ok(connect()));
        assert_eq!(connected().encode(), CONNECTED);
        assert_eq!(Connected::decode(&CONNECTED), Ok(connected()));
    }

    #[test]
    fn every_cut_and_every_longer_body_is_refused() {
        assert_length_matters(&CONNECT, Connect::decode);
        assert_length_matters(&CONNECTED, Connected::decode);
    }

    #[test]
    fn a_value_that_cannot_be_is_refused_by_name() {
        let connect = |at, value| refusal(&CONNECT, at, value, Connect::decode);
        assert!(connect(8 + 7, 2).contains("push is 2, allowed are 0 to 1"));
        assert!(connect(0, 9).contains("number of rails is 9"));
        assert!(connect(8 + 6, 0).contains("number of queue pairs is 0"));
        assert!(connect(8 + 6, 17).contains("number of queue pairs is 17, allowed are 1 to 16"));
        assert!(connect(8 + 32, 1).contains("queue pair number is 1, allowed are 2 to 16777214"));
        assert!(connect(8 + 32 + 3, 1).contains("queue pair number is 16777233"));
        assert!(connect(8 + 36 + 3, 1).contains("packet sequence number is 16777250"));
    }

    #[test]
    fn the_largest_and_smallest_bodies_lie_in_the_stated_range() {
        let lengths = |rails: usize, pairs: usize| {
            let (mut connect, mut connected) = (connect(), connected());
            connect.rails[0].queue_pairs = vec![end(2, 0); pairs];
            connect.rails = vec![connect.rails[0].clone(); rails];
            connected.rails[0].queue_pairs = vec![end(2, 0); pairs];
            connected.rails = vec![connected.rails[0].clone(); rails];
            [connect.encode(), connected.encode()].map(|body| body.len())
        };
        let ranges = [Kind::Connect, Kind::Connected].map(Kind::body_range);
        assert_eq!((lengths(1, 1), lengths(8, 16)), (ranges.map(|it| it.0), ranges.map(|it| it.1)));
    }
}
