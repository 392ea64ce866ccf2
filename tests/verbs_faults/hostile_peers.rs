//! Peers that say what no peer says: each is refused with a name, within the bound, and the queue
//! pairs go with the connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::ExpertTier;
use expert_tier::verbs::VerbsTier;
use expert_tier::wire::frame::{FrameType, Status};
use expert_tier::wire::handshake::encode_frame;
use railset::message::{Connected, Offer};
use railset::table::Column;

use crate::cables::{connect, keys, options, peer, unplug, wait_queue_pairs};
use crate::peer_support::log::Logged;
use crate::peer_support::process::Peer;
use crate::peer_support::scripted::Scripted;
use crate::peer_support::{assert_right, fetch, fetch_until_right, wait_until};
use crate::relay::{self, Frame, changed_table, unchanged};

const CONNECT: Duration = Duration::from_secs(3);

/// Connects through a relay that makes `change` of every frame to the client, which must refuse
/// with all of `expected`.
fn refused(
    peer: &Peer,
    what: &str,
    expected: &[&str],
    change: impl Fn(Frame) -> Vec<u8> + Send + Sync + 'static,
) {
    let relay = relay::start(peer.address(), move |_, f| change(f), |_, f| unchanged(f));
    let started = Instant::now();
    let result = VerbsTier::connect(options(relay.address()));
    let Err(error) = result else { panic!("{what} was taken") };
    let text = error.to_string();
    println!("{what}: {text}");
    for word in expected {
        assert!(text.contains(word), "{what}: {text:?} does not name {word:?}");
    }
    // A start tries both rails, one after the other.
    assert!(started.elapsed() < 2 * CONNECT + Duration::from_secs(2), "{what}: not bounded");
    wait_queue_pairs(peer, 0);
}

fn refused_table(
    peer: &Peer,
    what: &str,
    expected: &[&str],
    change: impl Fn(&mut railset::table::LayerTable) + Send + Sync + 'static,
) {
    refused(peer, what, expected, move |(frame, body)| match frame {
        FrameType::RailsTable => changed_table(&body, 0, &change),
        _ => unchanged((frame, body)),
    });
}

fn refused_offer(
    peer: &Peer,
    what: &str,
    expected: &[&str],
    change: impl Fn(&mut Offer) + Send + Sync + 'static,
) {
    refused(peer, what, expected, move |(frame, body)| match frame {
        FrameType::RailsOffer => {
            let mut offer = Offer::decode(&body).expect("a real peer's offer");
            change(&mut offer);
            encode_frame(frame, Status::Ok, &offer.encode())
        }
        _ => unchanged((frame, body)),
    });
}

fn refused_connected(
    peer: &Peer,
    what: &str,
    expected: &[&str],
    change: impl Fn(&mut Connected) + Send + Sync + 'static,
) {
    refused(peer, what, expected, move |(frame, body)| match frame {
        FrameType::RailsConnected => {
            let mut connected = Connected::decode(&body).expect("a real peer's answer");
            change(&mut connected);
            encode_frame(frame, Status::Ok, &connected.encode())
        }
        _ => unchanged((frame, body)),
    });
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn tables_that_cannot_be_are_refused_by_name() {
    let store = TestStore::mixed(51);
    let peer = peer(&store);
    refused_table(&peer, "base 0", &["layer 0", "rail 0 is 0"], |layer| {
        layer.columns[0].base = 0;
    });
    refused_table(&peer, "a base that wraps", &["ends beyond the address space"], |layer| {
        layer.columns[0].base = u64::MAX - 4096;
    });
    refused_table(&peer, "a slot that wraps", &["ends beyond the address space"], |layer| {
        layer.slots[3] = u32::MAX - 1;
        layer.slot_stride = u64::MAX / 2;
    });
    refused_table(&peer, "a small stride", &["a slot has 4096 bytes"], |layer| {
        layer.slot_stride = 4096;
    });
    refused_table(&peer, "fewer experts", &["layer 0 has 7 experts"], |layer| {
        layer.slots.pop();
    });
    refused_table(&peer, "another layer", &["layer 77 stands where"], |layer| layer.layer = 77);
    refused_table(&peer, "a second rail", &["2 rails"], |layer| {
        layer.columns.push(Column { base: 4096, rkey: 1 });
    });
    refused_table(&peer, "keys that are none", &["remote access error"], |layer| {
        layer.columns[0].rkey ^= 0x00ff_ff00;
    });
    refused(&peer, "half a table", &["table"], |(frame, body)| match frame {
        FrameType::RailsTable => encode_frame(frame, Status::Ok, &body[..body.len() - 3]),
        _ => unchanged((frame, body)),
    });
    refused(&peer, "experts without end", &["experts"], |(frame, mut body)| {
        if frame == FrameType::RailsTable {
            body[20..24].copy_from_slice(&u32::MAX.to_le_bytes());
        }
        unchanged((frame, body))
    });
    drop(connect(options(peer.address())));
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn offers_and_answers_that_cannot_be_are_refused_by_name() {
    let store = TestStore::mixed(52);
    let peer = peer(&store);
    refused_offer(&peer, "another number of layers", &["7 layers"], |offer| offer.layers = 7);
    refused_offer(&peer, "small slots", &["slots have 8192 bytes"], |o| o.slot_bytes = 8192);
    refused_offer(&peer, "a rail twice", &["rail 0 twice"], |offer| {
        offer.rails.iter_mut().for_each(|rail| rail.index = 0);
    });
    refused_offer(&peer, "GIDs without a route", &["ibv_modify_qp", "10.99.0.1"], |offer| {
        offer.rails.iter_mut().for_each(|rail| rail.gid.0[12..].copy_from_slice(&[10, 99, 0, 1]));
    });
    refused_connected(&peer, "another rail", &["connected rails [5]"], |connected| {
        connected.rails[0].index = 5;
    });
    refused_connected(&peer, "fewer queue pairs", &["1 queue pairs on rail 0"], |connected| {
        connected.rails[0].queue_pairs.pop();
    });
    refused_connected(&peer, "a deep queue", &["READ depth of 255"], |c| c.rails[0].depth = 255);
    refused(&peer, "an answer out of turn", &["Connected", "Offer"], |(frame, body)| match frame {
        FrameType::RailsOffer => {
            let mut body = vec![0; 24];
            body[0] = 1;
            encode_frame(FrameType::RailsConnected, Status::Ok, &body)
        }
        _ => unchanged((frame, body)),
    });
    drop(connect(options(peer.address())));
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_peer_that_falls_silent_in_the_handshake_costs_the_connects_bound() {
    let store = TestStore::mixed(53);
    let peer = peer(&store);
    for silent in [FrameType::RailsOffer, FrameType::RailsConnected, FrameType::RailsTable] {
        let what = format!("silence instead of {silent:?}");
        let fell_silent = AtomicBool::new(false);
        refused(&peer, &what, &["METRALE_EXPERT_CONNECT_MS"], move |(frame, body)| {
            fell_silent.fetch_or(frame == silent, Ordering::Relaxed);
            let is_silent = fell_silent.load(Ordering::Relaxed);
            if is_silent { Vec::new() } else { unchanged((frame, body)) }
        });
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_peer_that_has_fallen_silent_is_complained_of_once_and_used_when_it_speaks() {
    let logged = Logged::start();
    let store = TestStore::mixed(54);
    let mut peer = peer(&store);
    let silent = Arc::new(AtomicBool::new(false));
    let is_silent = Arc::clone(&silent);
    let relay = relay::start(
        peer.address(),
        move |_, (frame, body)| match frame {
            FrameType::RailsOffer if is_silent.load(Ordering::Relaxed) => Vec::new(),
            _ => unchanged((frame, body)),
        },
        |_, frame| unchanged(frame),
    );
    let mut options = options(relay.address());
    options.connect = Duration::from_millis(1200);
    options.deadline = Duration::from_millis(400);
    let tier = connect(options);
    let (keys, arena) = (keys(&tier), small_arena(1));
    silent.store(true, Ordering::Relaxed);
    peer.kill();
    peer.restart(&store.path());
    let begun = relay.accepted();
    wait_until("attempts to connect", || relay.accepted() >= begun + 5);
    let failure = fetch(&tier, &arena, keys[0]).expect_err("no rails");
    assert!(failure.to_string().contains("METRALE_EXPERT_CONNECT_MS"), "{failure}");
    drop(failure);
    let mine =
        |line: &&String| line.contains(&relay.address()) && line.contains("no rail; trying again");
    let complaints: Vec<_> = logged.lines().iter().filter(mine).cloned().collect();
    let silences = complaints.iter().filter(|line| line.contains("no answer within")).count();
    assert_eq!(silences, 1, "{complaints:?}");
    silent.store(false, Ordering::Relaxed);
    fetch_until_right(&tier, &arena, &store, keys[0]);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn tables_without_end_cost_no_fetch_and_do_not_keep_a_client_from_closing() {
    let store = TestStore::mixed(55);
    let peer = peer(&store);
    let sent = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&sent);
    let relay = relay::start(
        peer.address(),
        move |_, (frame, body)| match frame {
            // As many as fit into a few megabytes, one newer than the other.
            FrameType::RailsTable => {
                let mut all = unchanged((frame, body.clone()));
                for later in 1..10_000 {
                    all.extend(changed_table(&body, later, |_| ()));
                    count.fetch_add(1, Ordering::Relaxed);
                }
                all
            }
            _ => unchanged((frame, body)),
        },
        // The peer knows nothing of them.
        |_, (frame, body)| match frame {
            FrameType::RailsTableAck => Vec::new(),
            _ => unchanged((frame, body)),
        },
    );
    let tier = connect(options(relay.address()));
    let (keys, arena) = (keys(&tier), small_arena(1));
    for &key in &keys {
        assert_right(&store, key, &fetch(&tier, &arena, key).expect("a newer table"));
    }
    assert!(tier.healthy());
    let started = Instant::now();
    drop(tier);
    println!("{} tables; closed in {:?}", sent.load(Ordering::Relaxed), started.elapsed());
    assert!(started.elapsed() < Duration::from_secs(3));
}

/// A relay whose first client gets half of another table behind its own.
fn halving(peer: &Peer) -> Scripted {
    let to_client = |nth, (frame, body): Frame| {
        let is_first = nth == 0 && frame == FrameType::RailsTable;
        let more = if is_first { changed_table(&body, 1, |_| ()) } else { Vec::new() };
        [unchanged((frame, body)), more[..more.len() / 2].to_vec()].concat()
    };
    relay::start(peer.address(), to_client, |_, frame| unchanged(frame))
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn half_a_frame_of_one_rails_peer_delays_no_event_of_the_other() {
    let store = TestStore::mixed(56);
    let peer = peer(&store);
    let relay = halving(&peer);
    let mut options = options(relay.address());
    // As long as a thread that waits for the other half would be kept.
    (options.deadline, options.total) = (Duration::from_secs(60), Duration::from_secs(90));
    let tier = connect(options);
    wait_until("both rails", || tier.rails_up() == 2);
    let started = Instant::now();
    let _out = unplug(1);
    wait_until("the end of the second rail", || tier.rails_up() == 1);
    println!("noticed within {:?}", started.elapsed());
    let (keys, arena) = (keys(&tier), small_arena(1));
    assert_right(&store, keys[0], &fetch(&tier, &arena, keys[0]).expect("the first rail"));
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_frame_that_is_never_finished_costs_its_rail_after_the_deadline() {
    let logged = Logged::start();
    let store = TestStore::mixed(57);
    let peer = peer(&store);
    let relay = halving(&peer);
    let mut options = options(relay.address());
    options.deadline = Duration::from_millis(700);
    let tier = connect(options);
    wait_until("a rail anew", || tier.reconnects() > 0);
    let mine = |line: &&String| line.contains(&relay.address()) && line.contains("a rail is lost");
    let lost: Vec<_> = logged.lines().iter().filter(mine).cloned().collect();
    assert!(lost.iter().any(|line| line.contains("METRALE_EXPERT_DEADLINE_MS")), "{lost:?}");
    let (keys, arena) = (keys(&tier), small_arena(1));
    fetch_until_right(&tier, &arena, &store, keys[0]);
}
