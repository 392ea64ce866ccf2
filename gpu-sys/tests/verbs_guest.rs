//! Verbs on devices: both ends of a rail in one process. Runs in a guest with software RDMA:
//! `scripts/soft-roce PROGRAM --ignored --test-threads=1`, where PROGRAM is this file's.
#![cfg(metrale_rdma_verbs)]

mod verbs_support;

use std::time::Duration;

use gpu_sys::verbs::{Access, Post, RemoteAccess, Signal, WorkStatus};
use verbs_support::{Block, End, Pair, pages, remote_at};

const CHUNK: usize = 64 << 10;
const DEADLINE: Duration = Duration::from_secs(20);

#[test]
#[ignore = "needs an RDMA device: scripts/soft-roce"]
fn a_read_brings_the_peers_bytes() {
    let mut pair = Pair::connect(64, 0, RemoteAccess::Read);
    let theirs = pages(CHUNK);
    theirs.fill(0x5a);
    let region = pair.far.register(&theirs, Access::RemoteRead);
    let mine = pages(CHUNK);
    let local = pair.near.register(&mine, Access::LocalWrite);
    let block = Block::new(&mine, 0, CHUNK);
    let mut batch = vec![Post::read(block, &local, remote_at(&region, 0), Signal::Yes).unwrap()];
    assert_eq!(pair.near.queue_pair.post(&mut batch).unwrap(), 1);
    let ended = pair.near.drain(DEADLINE);
    assert_eq!(ended.len(), 1);
    assert_eq!(ended[0].1, Ok(()));
    assert!(mine.bytes(0, CHUNK).iter().all(|byte| *byte == 0x5a));
}

#[test]
#[ignore = "needs an RDMA device: scripts/soft-roce"]
fn one_signal_ends_a_batch_of_32() {
    let mut pair = Pair::connect(64, 0, RemoteAccess::Read);
    let theirs = pages(32 * CHUNK);
    (0..32).for_each(|at| theirs.fill_part(at * CHUNK, CHUNK, at as u8 + 1));
    let region = pair.far.register(&theirs, Access::RemoteRead);
    let mine = pages(32 * CHUNK);
    let local = pair.near.register(&mine, Access::LocalWrite);
    let mut batch: Vec<_> = (0..32)
        .map(|at| {
            let block = Block::new(&mine, at * CHUNK, CHUNK);
            let signal = if at == 31 { Signal::Yes } else { Signal::No };
            Post::read(block, &local, remote_at(&region, (at * CHUNK) as u64), signal).unwrap()
        })
        .collect();
    assert_eq!(pair.near.queue_pair.post(&mut batch).unwrap(), 32);
    assert_eq!(pair.near.queue_pair.in_flight(), 32);
    let ended = pair.near.drain(DEADLINE);
    assert_eq!(pair.near.completions, 1);
    let places: Vec<_> = ended.iter().map(|(block, _)| block.at / CHUNK).collect();
    assert_eq!(places, (0..32).collect::<Vec<_>>());
    for (block, outcome) in &ended {
        assert_eq!(*outcome, Ok(()));
        let value = (block.at / CHUNK) as u8 + 1;
        assert!(mine.bytes(block.at, CHUNK).iter().all(|byte| *byte == value));
    }
}

#[test]
#[ignore = "needs an RDMA device: scripts/soft-roce"]
fn a_failed_queue_pair_gives_every_buffer_back() {
    let mut pair = Pair::connect(64, 0, RemoteAccess::Read);
    let theirs = pages(CHUNK);
    let region = pair.far.register(&theirs, Access::RemoteRead);
    let mine = pages(32 * CHUNK);
    let local = pair.near.register(&mine, Access::LocalWrite);
    let mut batch: Vec<_> = (0..32)
        .map(|at| {
            let block = Block::new(&mine, at * CHUNK, CHUNK);
            Post::read(block, &local, remote_at(&region, 0), Signal::No).unwrap()
        })
        .collect();
    assert_eq!(pair.near.queue_pair.post(&mut batch).unwrap(), 32);
    pair.near.queue_pair.fail().unwrap();
    let ended = pair.near.drain(DEADLINE);
    assert_eq!(ended.len(), 32);
    let flushed = |error: &gpu_sys::verbs::WorkError| error.status == WorkStatus::Flushed;
    assert!(ended.last().unwrap().1.is_err_and(|error| flushed(&error)));
    assert_eq!(pair.near.queue_pair.in_flight(), 0);
}

#[test]
#[ignore = "needs an RDMA device: scripts/soft-roce"]
fn a_stale_key_fails_its_read_and_flushes_those_behind() {
    let mut pair = Pair::connect(64, 0, RemoteAccess::Read);
    let theirs = pages(CHUNK);
    let good = pair.far.register(&theirs, Access::RemoteRead);
    let gone = pair.far.register(&theirs, Access::RemoteRead);
    let stale = remote_at(&gone, 0);
    gone.deregister().unwrap();
    let mine = pages(16 * CHUNK);
    let local = pair.near.register(&mine, Access::LocalWrite);
    let mut batch: Vec<_> = (0..16)
        .map(|at| {
            let block = Block::new(&mine, at * CHUNK, CHUNK);
            let remote = if at == 5 { stale } else { remote_at(&good, 0) };
            Post::read(block, &local, remote, Signal::No).unwrap()
        })
        .collect();
    assert_eq!(pair.near.queue_pair.post(&mut batch).unwrap(), 16);
    let ended = pair.near.drain(DEADLINE);
    let statuses: Vec<_> =
        ended.iter().map(|(_, outcome)| outcome.map_err(|error| error.status)).collect();
    assert!(statuses[..5].iter().all(Result::is_ok), "{statuses:?}");
    assert_eq!(statuses[5], Err(WorkStatus::RemoteAccess));
    assert!(statuses[6..].iter().all(|it| *it == Err(WorkStatus::Flushed)), "{statuses:?}");
}

#[test]
#[ignore = "needs an RDMA device: scripts/soft-roce"]
fn the_device_says_what_it_is() {
    let end = End::open("rxe0");
    let context = end.domain.context();
    let facts = context.port(1).unwrap();
    eprintln_facts(&format!("{facts:?} {:?}", context.limits()));
    assert_eq!(facts.state, gpu_sys::verbs::PortState::Active);
    assert_eq!(facts.link_layer, gpu_sys::verbs::LinkLayer::Ethernet);
    assert_eq!(facts.active_mtu, gpu_sys::verbs::Mtu::Bytes4096);
    let gids = context.gids(1).unwrap();
    eprintln_facts(&format!("{gids:?}"));
    let routable = gids.iter().find(|entry| entry.index == 1).unwrap();
    assert_eq!(routable.gid[10..], [0xff, 0xff, 10, 1, 0, 1]);
    assert_eq!(routable.kind, Some(gpu_sys::verbs::GidKind::RoceV2));
    assert_eq!(routable.netdev.as_deref(), Some("v0"));
    assert_eq!(context.numa_node(), None);
    assert!(context.port(2).is_err());
}

fn eprintln_facts(text: &str) {
    println!("{text}");
}
