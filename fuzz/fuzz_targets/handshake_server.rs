//! The peer's side of the handshake against a client that may send anything.

#![no_main]

use std::sync::LazyLock;

use expert_tier::store::manifest::Manifest;
use expert_tier::wire::frame::MAX_TEXT_BYTES;
use expert_tier::wire::handshake::{ServerHandshake, encode_refusal, refusal};
use expert_tier::wire::message::{ClientHello, Welcome};
use expert_tier::wire::{FrameType, Secret};
use libfuzzer_sys::fuzz_target;
use metrale_fuzz::{frames, unknown_secret};

static STORE: LazyLock<Manifest> = LazyLock::new(metrale_fuzz::manifest);

fuzz_target!(|bytes: &[u8]| {
    assert!(!converse(Some(unknown_secret()), bytes), "a client without the secret came in");
    if converse(None, bytes) {
        let (header, body) = frames(bytes).next().expect("a client was welcomed");
        assert_eq!(header.frame, FrameType::ClientHello);
        assert!(ClientHello::decode(body).is_some());
    }
});

/// Feeds the frames of `bytes` to a peer until it welcomes the client or refuses.
fn converse(secret: Option<Secret>, bytes: &[u8]) -> bool {
    let welcome =
        Welcome { fingerprint: STORE.fingerprint(), manifest_bytes: STORE.as_bytes().len() as u64 };
    let mut server = ServerHandshake::new(secret, [3; 32], welcome);
    let mut frames_in = frames(bytes);
    while let Some((header, body)) = frames_in.next() {
        let step = match server.on_frame(&header, body) {
            Ok(step) => step,
            Err(error) => {
                let (status, text) = refusal(&error);
                let bytes = encode_refusal(status, &text);
                let (header, body) = frames(&bytes).next().expect("a refusal is a whole frame");
                assert_eq!(header.frame, FrameType::Refusal);
                assert!(body.len() as u64 <= MAX_TEXT_BYTES);
                return false;
            }
        };
        let welcomed = frames(&step.send).any(|(header, _)| header.frame == FrameType::Welcome);
        assert_eq!(welcomed, step.done, "the store is named at the end and not before");
        if step.done {
            if let Some((header, body)) = frames_in.next() {
                assert!(server.on_frame(&header, body).is_err(), "a frame after the end");
            }
            return true;
        }
    }
    false
}
