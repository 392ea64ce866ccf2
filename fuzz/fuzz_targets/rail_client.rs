//! The client's side of the rails' handshake against a peer that may send anything.

#![no_main]

use libfuzzer_sys::fuzz_target;
use metrale_fuzz::rails::{client_devices, ends, messages, shapes};
use railset::facts::Mtu;
use railset::handshake::HandshakeError;
use railset::handshake::client::{ClientAction, ClientRails, ClientSettings, ClientWaits};
use railset::message::Kind;

fuzz_target!(|bytes: &[u8]| {
    let (mut client, first) = ClientRails::start(ClientSettings::default(), shapes());
    assert!(matches!(first, ClientAction::Send(Kind::Request, _)));
    let mut newest = None;
    for (kind, body) in messages(bytes) {
        let taken = client.on_message(kind, body);
        let taken = taken.and_then(|actions| drive(&mut client, actions, &mut newest));
        if taken.is_err() {
            assert_eq!(client.waits_for(), ClientWaits::Failed);
            assert!(client.on_message(kind, body).is_err(), "taken after a failure");
            return;
        }
    }
});

fn drive(
    client: &mut ClientRails,
    actions: Vec<ClientAction>,
    newest: &mut Option<u64>,
) -> Result<(), HandshakeError> {
    for action in actions {
        match action {
            ClientAction::Send(kind, body) => {
                let (least, most) = kind.body_range();
                assert!((least..=most).contains(&body.len()));
            }
            ClientAction::FindRoutes(gids) => {
                let more = client.on_routes(&client_devices(), &vec![None; gids.len()])?;
                drive(client, more, newest)?;
            }
            ClientAction::CreateQueuePairs(creates) => {
                assert!((1..=2).contains(&creates.len()), "one or two rails");
                assert!(creates.len() == 1 || creates[0].local.device != creates[1].local.device);
                let made: Vec<_> =
                    creates.iter().map(|create| ends(usize::from(create.queue_pairs))).collect();
                let more = client.on_created(&made)?;
                drive(client, more, newest)?;
            }
            ClientAction::ConnectQueuePairs(ups) => {
                for (up, rail) in ups.iter().zip(client.rails()) {
                    assert!(up.mtu <= Mtu::B1024 && (1..=16).contains(&up.depth));
                    assert_eq!(up.remote.len(), usize::from(rail.queue_pairs));
                }
                let more = client.on_up()?;
                drive(client, more, newest)?;
            }
            ClientAction::Ready(table) | ClientAction::TableChanged(table) => {
                assert!(newest.is_none_or(|newest| newest < table.generation()));
                *newest = Some(table.generation());
                for expert in 0..3 {
                    let place = table.place(0, expert, 0);
                    assert!(place.is_none_or(|place| place.address.checked_add(4096).is_some()));
                }
            }
        }
    }
    Ok(())
}
