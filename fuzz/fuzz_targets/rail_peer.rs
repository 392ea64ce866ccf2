//! The peer's side of the rails' handshake against a client that may send anything.

#![no_main]

use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use metrale_fuzz::rails::{ends, messages, peer_rails, table};
use railset::facts::Mtu;
use railset::handshake::HandshakeError;
use railset::handshake::peer::{PeerAction, PeerHandshake, PeerRails, PeerWaits};
use railset::message::{MAX_USAGE, SpillTerms, Transfer};

static RAILS: LazyLock<Arc<PeerRails>> =
    LazyLock::new(|| Arc::new(PeerRails::new(&peer_rails(), 4, 1, 1, 4096, Some(TERMS))));

const TERMS: SpillTerms = SpillTerms { transfer: Transfer::Push, credits: 8, range_bytes: 1 << 20 };

fuzz_target!(|bytes: &[u8]| {
    let mut peer = PeerHandshake::new(Arc::clone(&RAILS));
    for (generation, (kind, body)) in (2..).zip(messages(bytes)) {
        let taken = peer.on_message(kind, body);
        let taken = taken.and_then(|actions| drive(&mut peer, actions));
        let taken = taken.and_then(|()| peer.update(&table(generation)).map(drop));
        if taken.is_err() {
            assert_eq!(peer.waits_for(), PeerWaits::Failed);
            assert!(peer.on_message(kind, body).is_err(), "taken after a failure");
            return;
        }
        assert!(peer.acknowledged().is_none_or(|acknowledged| acknowledged <= generation));
    }
});

fn drive(peer: &mut PeerHandshake, actions: Vec<PeerAction>) -> Result<(), HandshakeError> {
    for action in actions {
        match action {
            PeerAction::Send(kind, body) => {
                let (least, most) = kind.body_range();
                assert!((least..=most).contains(&body.len()));
            }
            PeerAction::CreateQueuePairs(rails) => {
                assert!((1..=2).contains(&rails.len()));
                for rail in &rails {
                    let up = &rail.bring_up;
                    assert!((1..=4).contains(&up.remote.len()), "no more than were offered");
                    assert!(up.mtu <= Mtu::B1024 && (1..=16).contains(&up.depth));
                }
                assert!(rails.len() == 1 || rails[0].local.device != rails[1].local.device);
                let made: Vec<_> =
                    rails.iter().map(|rail| ends(rail.bring_up.remote.len())).collect();
                let more = peer.on_created(&made, &table(1))?;
                drive(peer, more)?;
            }
            PeerAction::Acknowledged(generation) => {
                assert_eq!(peer.acknowledged(), Some(generation));
            }
            PeerAction::Usage(usage) => assert!(usage.entries.len() <= MAX_USAGE),
            PeerAction::Damaged(_) => {}
        }
    }
    Ok(())
}
