//! The client's side of the handshake against a peer that may send anything.

#![no_main]

use std::sync::{Arc, LazyLock};

use expert_tier::store::manifest::Manifest;
use expert_tier::wire::Secret;
use expert_tier::wire::handshake::{ClientHandshake, Goal, Step};
use libfuzzer_sys::fuzz_target;
use metrale_fuzz::{frames, unknown_secret};

static STORE: LazyLock<Arc<Manifest>> = LazyLock::new(|| Arc::new(metrale_fuzz::manifest()));

fuzz_target!(|bytes: &[u8]| {
    let wanted = Goal::Discover(Some(STORE.fingerprint()));
    for goal in [Goal::Discover(None), wanted, Goal::Resume(Arc::clone(&STORE)), Goal::Status] {
        let wants_weights = !matches!(goal, Goal::Status);
        let picky = !matches!(goal, Goal::Discover(None));
        let sealed = converse(goal.clone(), Some(unknown_secret()), bytes);
        assert!(sealed.is_none(), "a peer without the secret was believed");
        let Some(manifest) = converse(goal, None, bytes) else { continue };
        assert_eq!(manifest.is_some(), wants_weights);
        if let Some(manifest) = manifest.filter(|_| picky) {
            assert_eq!(manifest, *STORE, "attached to another store");
        }
    }
});

/// Feeds the frames of `bytes` to a client until it is done or refuses; what it ended with.
fn converse(goal: Goal, secret: Option<Secret>, bytes: &[u8]) -> Option<Option<Arc<Manifest>>> {
    let (mut client, hello) = ClientHandshake::start(goal, secret, [1; 16], [2; 32]);
    assert_eq!(frames(&hello).count(), 1);
    let mut frames_in = frames(bytes);
    loop {
        let (header, body) = frames_in.next()?;
        match client.on_frame(&header, body).ok()? {
            Step::Send(answer) => assert_eq!(frames(&answer).count(), 1, "one whole frame"),
            Step::Read => {}
            Step::Done => break,
        }
        assert!(client.manifest().is_none(), "a manifest was handed out before the end");
    }
    if let Some((header, body)) = frames_in.next() {
        assert!(client.on_frame(&header, body).is_err(), "a frame after the end was accepted");
    }
    Some(client.manifest().cloned())
}
