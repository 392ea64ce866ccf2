//! Verbs on devices: both ends of a rail in one process. Runs in a guest with software RDMA:
//! `scripts/soft-roce PROGRAM --ignored --test-threads=1`, where PROGRAM is this file's.
#![cfg(metrale_rdma_verbs)]

mod support;
mod verbs_support;

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_sys::limits::{IpcLock, LockLimit};
use gpu_sys::verbs::{
    Access, AsyncEvent, CompletionChannel, CompletionQueue, GidKind, Library, LinkLayer, Memory,
    MemoryRegion, Mtu, PortState, Post, QueuePairState, RemoteAccess, Signal, VerbsError,
    WorkError, WorkStatus,
};
use verbs_support::{Block, End, Pair, pages, remote_at};

const CHUNK: usize = 64 << 10;
const DEADLINE: Duration = Duration::from_secs(20);

/// Every deadline and every figure of the guest is in seconds of its processor's counter; those of its
/// real-time clock come from outside.
#[test]
#[ignore = "needs an RDMA device: scripts/soft-roce"]
fn a_second_in_the_guest_is_as_long_as_outside() {
    let next_second = || {
        let clock = || std::fs::read_to_string("/sys/class/rtc/rtc0/since_epoch").unwrap();
        let (now, started) = (clock(), Instant::now());
        while clock() == now {
            assert!(started.elapsed() < DEADLINE, "the real-time clock stands still at {now}");
        }
        Instant::now()
    };
    let started = next_second();
    let ended = (0..5).fold(started, |_, _| next_second());
    let seconds = ended.duration_since(started);
    println!("five seconds of the real-time clock are {seconds:?}");
    assert!(seconds.as_secs_f64() > 4.0 && seconds.as_secs_f64() < 6.0, "{seconds:?}");
}

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
fn a_queue_pair_allows_what_it_was_made_to_allow() {
    for access in RemoteAccess::ALL {
        let pair = Pair::connect(16, 0, access);
        assert_eq!(pair.far.queue_pair.remote_access().unwrap(), access);
        assert_eq!(pair.near.queue_pair.remote_access().unwrap(), RemoteAccess::None);
    }
}

/// Posts a READ or a WRITE of the first bytes of `region`; says how it ended.
fn attempt(pair: &mut Pair, region: &MemoryRegion, write: bool) -> Result<(), WorkStatus> {
    let mine = pages(CHUNK);
    mine.fill(0xee);
    let local = pair.near.register(&mine, Access::LocalWrite);
    let (block, remote) = (Block::new(&mine, 0, CHUNK), remote_at(region, 0));
    let post = match write {
        true => Post::write(block, &local, remote, Signal::Yes),
        false => Post::read(block, &local, remote, Signal::Yes),
    };
    assert_eq!(pair.near.queue_pair.post(&mut vec![post.unwrap()]).unwrap(), 1);
    pair.near.drain(DEADLINE)[0].1.map_err(|error| error.status)
}

/// Queue pair and registration each have their say; here the queue pair allows everything.
#[test]
#[ignore = "needs an RDMA device: scripts/soft-roce"]
fn a_registration_alone_refuses_what_it_does_not_allow() {
    let all = [Access::LocalRead, Access::LocalWrite, Access::RemoteRead, Access::RemoteWrite];
    for access in all {
        for write in [false, true] {
            let mut pair = Pair::connect(16, 0, RemoteAccess::ReadWrite);
            let theirs = pages(CHUNK);
            theirs.fill(0x5a);
            let region = pair.far.register(&theirs, access);
            let allowed = match access {
                Access::LocalRead | Access::LocalWrite => false,
                Access::RemoteRead => !write,
                Access::RemoteWrite => write,
            };
            let expected = if allowed { Ok(()) } else { Err(WorkStatus::RemoteAccess) };
            let ended = attempt(&mut pair, &region, write);
            assert_eq!(ended, expected, "{access:?}, a WRITE: {write}");
            region.deregister().unwrap();
            let left = if allowed && write { 0xee } else { 0x5a };
            assert!(theirs.bytes(0, CHUNK).iter().all(|byte| *byte == left), "{access:?}");
        }
    }
}

/// The other way round: the registration allows a WRITE. What tests of whole systems go by: this
/// device names the two refusals differently.
#[test]
#[ignore = "needs an RDMA device: scripts/soft-roce"]
fn a_queue_pair_alone_refuses_what_it_does_not_allow() {
    for access in RemoteAccess::ALL {
        for write in [false, true] {
            let mut pair = Pair::connect(16, 0, access);
            let theirs = pages(CHUNK);
            theirs.fill(0x5a);
            let how = if write { Access::RemoteWrite } else { Access::RemoteRead };
            let region = pair.far.register(&theirs, how);
            let allowed = match access {
                RemoteAccess::None => false,
                RemoteAccess::Read => !write,
                RemoteAccess::Write => write,
                RemoteAccess::ReadWrite => true,
            };
            let expected = if allowed { Ok(()) } else { Err(WorkStatus::RemoteInvalidRequest) };
            let ended = attempt(&mut pair, &region, write);
            assert_eq!(ended, expected, "{access:?}, a WRITE: {write}");
        }
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
    let flushed = |error: WorkError| error.status == WorkStatus::Flushed;
    assert!(ended.last().unwrap().1.is_err_and(flushed));
    assert_eq!(pair.near.queue_pair.state().unwrap(), QueuePairState::Error);
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
fn devices_say_what_they_are() {
    let library = Library::open().unwrap();
    let devices = library.devices().unwrap();
    let mut names: Vec<_> = devices.iter().map(|device| device.name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["rxe0", "rxe0p", "rxe1", "rxe1p"]);
    assert!(devices.iter().all(|device| device.node_guid != 0), "{devices:?}");
    let context = library.open_device("rxe0").unwrap();
    let facts = context.port(1).unwrap();
    assert_eq!((facts.state, facts.link_layer), (PortState::Active, LinkLayer::Ethernet));
    assert_eq!((facts.active_mtu, facts.lid), (Mtu::Bytes4096, 0));
    let gids = context.gids(1).unwrap();
    let routable = gids.iter().find(|entry| entry.index == 1).unwrap();
    assert_eq!(routable.gid[10..], [0xff, 0xff, 10, 1, 0, 1]);
    assert_eq!((routable.kind, routable.netdev.as_deref()), (Some(GidKind::RoceV2), Some("v0")));
    assert_eq!(context.numa_node(), None);
    assert!(context.limits().max_qp_rd_atom >= 16, "{:?}", context.limits());
    let text = library.open_device("mlx5_0").unwrap_err().to_string();
    assert!(text.contains("rxe1p"), "{text}");
}

#[test]
#[ignore = "needs an RDMA device: scripts/soft-roce"]
fn a_write_and_its_receipt_arrive_in_that_order() {
    let mut pair = Pair::connect(16, 4, RemoteAccess::Write);
    let source = pages(CHUNK);
    source.fill(0x77);
    let local = pair.near.register(&source, Access::LocalRead);
    let slot = pages(CHUNK);
    let grant = pair.far.register(&slot, Access::RemoteWrite);
    let remote = remote_at(&grant, 0);
    let block = |bytes| Block::new(&source, 0, bytes);
    let write = Post::write(block(CHUNK), &local, remote, Signal::No).unwrap();
    let receipt = Post::write_with_immediate(block(0), &local, remote, 0xabcd_1234, Signal::No);
    let message = Post::send(block(0), b"that was it", Signal::Yes).unwrap();
    let mut batch = vec![write, receipt.unwrap(), message];
    assert_eq!(pair.near.queue_pair.post(&mut batch).unwrap(), 3);
    let received = pair.far.receive(2, DEADLINE);
    assert_eq!(received[0], (Vec::new(), Some(0xabcd_1234)));
    assert_eq!(received[1], (b"that was it".to_vec(), None));
    grant.deregister().unwrap();
    assert!(slot.bytes(0, CHUNK).iter().all(|byte| *byte == 0x77));
    assert!(pair.near.drain(DEADLINE).iter().all(|(_, outcome)| outcome.is_ok()));
}

#[test]
#[ignore = "needs an RDMA device: scripts/soft-roce"]
fn more_messages_than_receives_arrive() {
    let mut pair = Pair::connect(64, 2, RemoteAccess::None);
    let source = pages(CHUNK);
    for at in 0..20_u8 {
        let block = Block::new(&source, 0, 0);
        let mut batch = vec![Post::send(block, &[at; 64], Signal::No).unwrap()];
        assert_eq!(pair.near.queue_pair.post(&mut batch).unwrap(), 1);
    }
    let received = pair.far.receive(20, DEADLINE);
    let wanted: Vec<_> = (0..20).map(|at| (vec![at; 64], None)).collect();
    assert_eq!(received, wanted);
}

#[test]
#[ignore = "needs an RDMA device: scripts/soft-roce"]
fn nothing_is_written_after_a_grant_was_deregistered() {
    const MESSAGE: usize = 256 << 10;
    for round in 0..10 {
        let mut pair = Pair::connect(64, 0, RemoteAccess::Write);
        let source = pages(MESSAGE);
        source.fill(0xee);
        let local = pair.near.register(&source, Access::LocalRead);
        let slot = pages(MESSAGE);
        let grant = pair.far.register(&slot, Access::RemoteWrite);
        let write = |_| {
            let block = Block::new(&source, 0, MESSAGE);
            Post::write(block, &local, remote_at(&grant, 0), Signal::Yes).unwrap()
        };
        let mut batch: Vec<_> = (0..64).map(write).collect();
        assert_eq!(pair.near.queue_pair.post(&mut batch).unwrap(), 64);
        // The first ones are there; the others are on their way.
        pair.near.drain_to(62, DEADLINE);
        grant.deregister().unwrap();
        slot.fill(0);
        let ended = pair.near.drain(DEADLINE);
        let zero = slot.bytes(0, MESSAGE).iter().all(|byte| *byte == 0);
        assert!(zero, "round {round}: written after ibv_dereg_mr returned");
        let refused = |(_, outcome): &(Block, Result<(), WorkError>)| outcome.is_err();
        assert!(ended.iter().any(refused), "round {round}: everything had been written before");
    }
}

#[test]
#[ignore = "needs an RDMA device: scripts/soft-roce"]
fn a_peer_that_is_gone_costs_its_retries_and_no_more() {
    let Pair { mut near, far } = Pair::connect(16, 0, RemoteAccess::Read);
    let theirs = pages(CHUNK);
    let region = far.register(&theirs, Access::RemoteRead);
    let remote = remote_at(&region, 0);
    drop(far);
    let mine = pages(CHUNK);
    let local = near.register(&mine, Access::LocalWrite);
    let block = Block::new(&mine, 0, CHUNK);
    let mut batch = vec![Post::read(block, &local, remote, Signal::Yes).unwrap()];
    near.queue_pair.post(&mut batch).unwrap();
    let ended = near.drain(DEADLINE);
    assert_eq!(ended[0].1.unwrap_err().status, WorkStatus::RetriesExceeded);
}

#[test]
#[ignore = "needs an RDMA device: scripts/soft-roce"]
fn an_armed_queue_wakes_its_channel() {
    let end = End::open("rxe0");
    let channel = CompletionChannel::new(end.domain.context()).unwrap();
    let queue = CompletionQueue::with_channel(&channel, 64).unwrap();
    queue.arm().unwrap();
    let started = Instant::now();
    assert!(!channel.wait(Duration::from_millis(50)).unwrap());
    assert!(started.elapsed() >= Duration::from_millis(50));
    let mut pair = Pair::with_queues(&end, &queue, 16);
    let mine = pages(CHUNK);
    let local = pair.near.register(&mine, Access::LocalRead);
    let theirs = pages(CHUNK);
    let grant = pair.far.register(&theirs, Access::RemoteWrite);
    for _ in 0..3 {
        queue.arm().unwrap();
        let block = Block::new(&mine, 0, 8);
        let mut batch =
            vec![Post::write(block, &local, remote_at(&grant, 0), Signal::Yes).unwrap()];
        pair.near.queue_pair.post(&mut batch).unwrap();
        assert!(channel.wait(DEADLINE).unwrap());
        assert_eq!(pair.near.drain(DEADLINE).len(), 1);
    }
    assert!(pair.far.queue.arm().is_err());
}

#[test]
#[ignore = "needs an RDMA device: scripts/soft-roce"]
fn a_port_that_goes_down_and_comes_up_says_so() {
    let end = End::open("rxe1");
    let context = end.domain.context();
    let ip = |words: &str| {
        let status = Command::new("ip").args(words.split(' ')).status().unwrap();
        assert!(status.success(), "ip {words}");
    };
    let wait_for = |wanted: AsyncEvent, state: fn(PortState) -> bool| {
        let started = Instant::now();
        loop {
            match context.next_event().unwrap() {
                Some(event) if event == wanted => break,
                Some(_) => {}
                None => {
                    let left = DEADLINE.saturating_sub(started.elapsed());
                    assert!(!left.is_zero(), "no {wanted:?}");
                    let mut fds =
                        [rustix::event::PollFd::new(&**context, rustix::event::PollFlags::IN)];
                    let left = rustix::event::Timespec::try_from(left).unwrap();
                    rustix::event::poll(&mut fds, Some(&left)).unwrap();
                }
            }
        }
        assert!(state(context.port(1).unwrap().state), "{:?}", context.port(1));
    };
    assert_eq!(context.next_event().unwrap(), None);
    ip("link set v1 down");
    wait_for(AsyncEvent::PortError { port: 1 }, |state| state == PortState::Down);
    ip("link set v1 up");
    // It went with the link, and later tests want packets to cross the cable.
    ip("route replace 10.2.0.2 dev v1 table 111 src 10.2.0.1");
    wait_for(AsyncEvent::PortActive { port: 1 }, |state| state == PortState::Active);
}

#[test]
#[ignore = "needs an RDMA device: scripts/soft-roce"]
fn a_registration_over_the_locked_memory_limit_names_the_numbers_and_the_knob() {
    let name = "a_registration_over_the_locked_memory_limit_names_the_numbers_and_the_knob";
    support::with_lock_limit(name, 1 << 20, || {
        assert_eq!(LockLimit::current().capability, IpcLock::Absent);
        let end = End::open("rxe0");
        let memory: Arc<Heap> = Arc::new(Heap(vec![0_u8; 4 << 20].into_boxed_slice()));
        let register = |bytes: usize| {
            let memory: Arc<Heap> = Arc::clone(&memory);
            MemoryRegion::register(&end.domain, memory, 0..bytes, Access::LocalWrite)
        };
        let error = register(4 << 20).unwrap_err();
        assert!(matches!(error, VerbsError::LockLimit { .. }), "{error}");
        let text = error.to_string();
        for part in ["rxe0 needs 4 MiB", "limit is 1 MiB", "ulimit -l", "CAP_IPC_LOCK"] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        // What is registered already counts, and is free again afterwards.
        let first = register(700 << 10).unwrap();
        let text = register(700 << 10).unwrap_err().to_string();
        assert!(text.contains("on top of 70"), "{text}");
        first.deregister().unwrap();
        drop(register(700 << 10).unwrap());
    });
}

/// Memory that is not locked: only the registration counts.
struct Heap(Box<[u8]>);

// SAFETY: the box stays where it is, and nobody looks into it while it is registered.
unsafe impl Memory for Heap {
    fn region(&self) -> (std::ptr::NonNull<u8>, usize) {
        (std::ptr::NonNull::from(&*self.0).cast(), self.0.len())
    }
}
