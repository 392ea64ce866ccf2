//! The bodies that set up queue pairs, from either end.

#![no_main]

use libfuzzer_sys::fuzz_target;
use railset::message::{
    Connect, Connected, Damaged, Kind, MAX_CREDITS, MAX_LID, MAX_QPS_PER_RAIL, MAX_RAILS,
    MAX_USAGE, Offer, QueuePairEnd, RANGE_BYTES, Request, TableAck, Usage,
};
use railset::push::{PushRequest, Receipt};

fuzz_target!(|bytes: &[u8]| {
    if Request::decode(bytes).is_ok() {
        assert_eq!(Request.encode(), bytes);
        sized(Kind::Request, bytes);
    }
    if let Ok(ack) = TableAck::decode(bytes) {
        assert_eq!(ack.encode(), bytes);
        sized(Kind::TableAck, bytes);
    }
    if let Ok(damaged) = Damaged::decode(bytes) {
        assert_eq!(damaged.encode(), bytes);
        sized(Kind::Damaged, bytes);
    }
    if let Ok(usage) = Usage::decode(bytes) {
        assert_eq!(usage.encode(), bytes, "a report has one form");
        sized(Kind::Usage, bytes);
        assert!(usage.entries.len() <= MAX_USAGE);
    }
    if let Ok(request) = PushRequest::decode(bytes) {
        let (message, length) = request.encode();
        assert_eq!(&message[..length], bytes, "a request has one form");
    }
    if let Ok(receipt) = Receipt::decode(bytes) {
        assert_eq!(receipt.encode(), bytes, "a receipt has one form");
    }
    if let Ok(offer) = Offer::decode(bytes) {
        assert_eq!(offer.encode(), bytes, "an offer has one form");
        sized(Kind::Offer, bytes);
        assert!((1..=MAX_RAILS).contains(&offer.rails.len()) && offer.slot_bytes > 0);
        if let Some(spill) = offer.spill {
            assert!((1..=MAX_CREDITS).contains(&spill.credits));
            assert!(RANGE_BYTES.contains(&spill.range_bytes));
        }
        for rail in &offer.rails {
            assert!(rail.lid <= MAX_LID && rail.depth > 0 && rail.port > 0);
            let allowed = usize::from(rail.most_queue_pairs);
            assert!((1..=MAX_QPS_PER_RAIL).contains(&allowed));
            assert!(!rail.device.contains(char::is_control));
        }
    }
    if let Ok(connect) = Connect::decode(bytes) {
        assert_eq!(connect.encode(), bytes, "a connect has one form");
        sized(Kind::Connect, bytes);
        connect.rails.iter().for_each(|rail| ends(&rail.queue_pairs));
    }
    if let Ok(connected) = Connected::decode(bytes) {
        assert_eq!(connected.encode(), bytes, "a connected has one form");
        sized(Kind::Connected, bytes);
        connected.rails.iter().for_each(|rail| ends(&rail.queue_pairs));
    }
});

fn sized(kind: Kind, body: &[u8]) {
    let (least, most) = kind.body_range();
    assert!((least..=most).contains(&body.len()), "{kind:?} of {} bytes", body.len());
}

fn ends(ends: &[QueuePairEnd]) {
    assert!((1..=MAX_QPS_PER_RAIL).contains(&ends.len()));
    for end in ends {
        assert!((2..0xff_ffff).contains(&end.qpn.value()) && end.psn.value() < 1 << 24);
    }
}
