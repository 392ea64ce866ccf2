//! Frame headers and the fixed bodies behind them, from either end of a connection.

#![no_main]

use expert_tier::wire::frame::{FrameHeader, HEADER_BYTES, MAX_TEXT_BYTES, Status};
use expert_tier::wire::message::{ClientHello, ServerHello, Welcome, decode_fetch, encode_fetch};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((head, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return };
    if let Ok(header) = FrameHeader::decode(head) {
        assert_eq!(header.encode(), *head, "a header has one form");
        let (least, most) = match header.status {
            Status::Ok => header.frame.body_range(),
            _ => (0, MAX_TEXT_BYTES),
        };
        assert!((least..=most).contains(&header.body_bytes));
    }
    bodies(rest);
    for length in [ClientHello::BYTES, ServerHello::BYTES, Welcome::BYTES] {
        if let Some(body) = rest.get(..length) {
            bodies(body);
        }
    }
    if let Some(body) = rest.first_chunk() {
        assert_eq!(encode_fetch(decode_fetch(body)), *body);
    }
});

/// A body that is accepted says the same after a round trip, whatever its reserved bytes held.
fn bodies(body: &[u8]) {
    if let Some(hello) = ClientHello::decode(body) {
        assert_eq!(hello.encode(), body);
    }
    if let Some(hello) = ServerHello::decode(body) {
        assert_eq!(ServerHello::decode(&hello.encode()), Some(hello));
    }
    if let Some(welcome) = Welcome::decode(body) {
        assert_eq!(welcome.encode(), body);
    }
}
