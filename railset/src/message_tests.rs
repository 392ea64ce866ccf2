//! Golden bytes, written from the tables in the module's header.

use super::*;

fn mapped(last: u8) -> Gid {
    Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1, 0, last])
}

fn end(qpn: u32, psn: u32) -> QueuePairEnd {
    QueuePairEnd { qpn: Qpn::new(qpn).unwrap(), psn: Psn::new(psn).unwrap() }
}

fn offer() -> Offer {
    let rail = OfferedRail {
        index: 4,
        device: "rxe0p".into(),
        node_guid: 0x0102_0304_0506_0708,
        port: 1,
        link_layer: LinkLayer::Ethernet,
        gid: mapped(2),
        lid: 0,
        mtu: Mtu::B1024,
        depth: 16,
        most_queue_pairs: 8,
    };
    let spill = SpillTerms { transfer: Transfer::Push, credits: 0x0102, range_bytes: 0x0010_0000 };
    let (rails, spill) = (vec![rail], Some(spill));
    Offer { rails, layers: 94, generation: 3, slot_bytes: 0x0091_0000, spill }
}

fn connect() -> Connect {
    let rail = ConnectRail {
        index: 4,
        node_guid: 9,
        port: 2,
        gid: mapped(1),
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
    Connected { rails: vec![ConnectedRail { index: 4, mtu: Mtu::B1024, depth: 16, queue_pairs }] }
}

#[rustfmt::skip]
const OFFER: [u8; 80] = [
    2, 0, 1, 1,  94, 0, 0, 0,  3, 0, 0, 0, 0, 0, 0, 0,  0, 0, 0x91, 0, 0, 0, 0, 0,
    2, 1, 0, 0,  0, 0, 0x10, 0,
    4, 1, 2, 3,  0, 0,  16, 8,  8, 7, 6, 5, 4, 3, 2, 1,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1, 0, 2,
    5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];

#[rustfmt::skip]
const CONNECT: [u8; 56] = [
    1, 0, 0, 0, 0, 0, 0, 0,
    4, 2, 5, 128,  0x34, 0x12,  2, 1,  9, 0, 0, 0, 0, 0, 0, 0,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1, 0, 1,
    0x11, 0, 0, 0,  0x22, 0, 0, 0,  0xef, 0xcd, 0xab, 0,  0xff, 0xff, 0xff, 0,
];

#[rustfmt::skip]
const CONNECTED: [u8; 32] = [
    1, 0, 0, 0, 0, 0, 0, 0,
    4, 3, 16, 2,  0, 0, 0, 0,  0x33, 0, 0, 0,  0, 0, 0, 0,  0x44, 0, 0, 0,  1, 0, 0, 0,
];

#[rustfmt::skip]
const USAGE: [u8; 20] = [1, 0, 0, 0,  0, 0, 0, 0,  7, 0, 0, 0,  2, 1, 0, 0,  3, 0, 0, 0];

#[test]
fn the_bytes_of_reports_are_frozen() {
    let usage = Usage { entries: vec![UsageEntry { layer: 7, expert: 258, reads: 3 }] };
    assert_eq!((usage.encode(), Usage::decode(&USAGE)), (USAGE.to_vec(), Ok(usage)));
    let damaged = Damaged { layer: 7, expert: 258 };
    let bytes = [7, 0, 0, 0, 2, 1, 0, 0];
    assert_eq!((damaged.encode(), Damaged::decode(&bytes)), (bytes.to_vec(), Ok(damaged)));
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

fn golden_offer() -> Vec<u8> {
    let mut bytes = OFFER.to_vec();
    bytes.extend(b"rxe0p");
    bytes.resize(32 + 112, 0);
    bytes
}

#[test]
fn the_bytes_of_every_body_are_frozen() {
    assert_eq!(Request.encode(), [2, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(Request::decode(&[2, 0, 0, 0, 0, 0, 0, 0]), Ok(Request));
    assert_eq!(offer().encode(), golden_offer());
    assert_eq!(Offer::decode(&golden_offer()), Ok(offer()));
    assert_eq!(connect().encode(), CONNECT);
    assert_eq!(Connect::decode(&CONNECT), Ok(connect()));
    assert_eq!(connected().encode(), CONNECTED);
    assert_eq!(Connected::decode(&CONNECTED), Ok(connected()));
    let ack = TableAck { generation: 0x0102 };
    assert_eq!(ack.encode(), [2, 1, 0, 0, 0, 0, 0, 0]);
    assert_eq!(TableAck::decode(&ack.encode()), Ok(ack));
}

#[test]
fn every_cut_and_every_longer_body_is_refused() {
    type Accepts = fn(&[u8]) -> bool;
    let cases: [(Vec<u8>, Accepts); 7] = [
        (Request.encode(), |bytes| Request::decode(bytes).is_ok()),
        (golden_offer(), |bytes| Offer::decode(bytes).is_ok()),
        (CONNECT.to_vec(), |bytes| Connect::decode(bytes).is_ok()),
        (CONNECTED.to_vec(), |bytes| Connected::decode(bytes).is_ok()),
        (vec![0; 8], |bytes| TableAck::decode(bytes).is_ok()),
        (USAGE.to_vec(), |bytes| Usage::decode(bytes).is_ok()),
        (vec![0; 8], |bytes| Damaged::decode(bytes).is_ok()),
    ];
    for (mut bytes, accepts) in cases {
        assert!(accepts(&bytes));
        for length in 0..bytes.len() {
            assert!(!accepts(&bytes[..length]), "{length} of {}", bytes.len());
        }
        bytes.push(0);
        assert!(!accepts(&bytes));
    }
}

/// What the decoder says of a golden body with one byte changed.
fn with<T: std::fmt::Debug>(
    golden: &[u8],
    at: usize,
    value: u8,
    decode: impl Fn(&[u8]) -> Result<T, DecodeError>,
) -> String {
    let mut bytes = golden.to_vec();
    bytes[at] = value;
    decode(&bytes).unwrap_err().to_string()
}

#[test]
fn a_value_that_cannot_be_is_refused_by_name() {
    let offer = |at, value| with(&golden_offer(), at, value, Offer::decode);
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
    let connect = |at, value| with(&CONNECT, at, value, Connect::decode);
    assert!(connect(8 + 7, 2).contains("push is 2, allowed are 0 to 1"));
    assert!(connect(0, 9).contains("number of rails is 9"));
    assert!(connect(8 + 6, 0).contains("number of queue pairs is 0"));
    assert!(connect(8 + 6, 17).contains("number of queue pairs is 17, allowed are 1 to 16"));
    assert!(connect(8 + 32, 1).contains("queue pair number is 1, allowed are 2 to 16777214"));
    assert!(connect(8 + 32 + 3, 1).contains("queue pair number is 16777233"));
    assert!(connect(8 + 36 + 3, 1).contains("packet sequence number is 16777250"));
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
    let lengths = |rails: usize, pairs: usize| {
        let mut offer = offer();
        offer.rails = vec![offer.rails[0].clone(); rails];
        let mut connect = connect();
        connect.rails[0].queue_pairs = vec![end(2, 0); pairs];
        connect.rails = vec![connect.rails[0].clone(); rails];
        let mut connected = connected();
        connected.rails[0].queue_pairs = vec![end(2, 0); pairs];
        connected.rails = vec![connected.rails[0].clone(); rails];
        [offer.encode(), connect.encode(), connected.encode()].map(|body| body.len())
    };
    let kinds = [Kind::Offer, Kind::Connect, Kind::Connected];
    let least = kinds.map(|kind| kind.body_range().0);
    let most = kinds.map(|kind| kind.body_range().1);
    assert_eq!((lengths(1, 1), lengths(8, 16)), (least, most));
    assert_eq!(Kind::Request.body_range(), (8, 8));
}

#[test]
fn a_random_number_becomes_a_packet_number() {
    assert_eq!(Psn::from_random(0xabcd_ef01).value(), 0xcd_ef01);
    assert!(Psn::new(1 << 24).is_err() && Qpn::new(0xff_ffff).is_err() && Qpn::new(1).is_err());
}
