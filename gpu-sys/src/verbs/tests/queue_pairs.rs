//! Posting, completing, connecting and receiving.

use super::*;

#[test]
fn what_the_device_does_not_take_stays_in_the_batch() {
    let mut bench = Bench::new(16, 0);
    state(|it| it.refuse_at = Some(3));
    let mut batch = bench.reads(8, Signal::Yes);
    let error = bench.pair.post(&mut batch).unwrap_err();
    assert_eq!((error.taken, error.offered), (3, 8));
    assert!(error.reason.is_transient(), "{error}");
    let left: Vec<_> = batch.iter().map(|post| post.carried.at / 8).collect();
    assert_eq!(left, [3, 4, 5, 6, 7]);
    assert_eq!(bench.pair.in_flight(), 3);
    assert_eq!(bench.complete(2, status::IBV_WC_SUCCESS), [(0, Ok(())), (1, Ok(())), (2, Ok(()))]);
    // The rest is posted later, under numbers that follow.
    state(|it| it.refuse_at = None);
    assert_eq!(bench.pair.post(&mut batch).unwrap(), 5);
    assert_eq!(bench.complete(3, status::IBV_WC_SUCCESS), [(3, Ok(()))]);
}

#[test]
fn a_full_queue_takes_what_fits_and_leaves_the_rest() {
    let mut bench = Bench::new(4, 0);
    let mut batch = bench.reads(6, Signal::No);
    assert_eq!(bench.pair.post(&mut batch).unwrap(), 4);
    assert_eq!((batch.len(), bench.pair.room()), (2, 0));
    assert_eq!(bench.pair.post(&mut batch).unwrap(), 0);
    assert_eq!(count("ibv_post_send"), 1);
    bench.complete(1, status::IBV_WC_SUCCESS);
    assert_eq!(bench.pair.post(&mut batch).unwrap(), 2);
}

#[test]
fn a_completion_ends_the_unsignalled_requests_before_it_in_order() {
    let mut bench = Bench::new(64, 0);
    let mut batch = bench.reads(7, Signal::No);
    batch.push(bench.read(56, Signal::Yes));
    assert_eq!(bench.pair.post(&mut batch).unwrap(), 8);
    assert_eq!(count("ibv_post_send"), 1);
    assert_eq!(signalled().iter().filter(|it| **it).count(), 1);
    let ended = bench.complete(7, status::IBV_WC_SUCCESS);
    assert_eq!(ended, (0..8).map(|at| (at, Ok(()))).collect::<Vec<_>>());
    assert_eq!(bench.pair.in_flight(), 0);
}

#[test]
fn a_queue_pair_signals_by_itself_at_half_its_depth() {
    let mut bench = Bench::new(8, 0);
    let mut batch = bench.reads(3, Signal::No);
    bench.pair.post(&mut batch).unwrap();
    let mut batch = bench.reads(5, Signal::No);
    bench.pair.post(&mut batch).unwrap();
    let yes = |at| at % 4 == 3;
    assert_eq!(signalled(), (0..8).map(yes).collect::<Vec<_>>());
}

#[test]
fn requests_that_were_refused_do_not_count_as_signalled() {
    let mut bench = Bench::new(8, 0);
    state(|it| it.refuse_at = Some(2));
    let mut batch = bench.reads(4, Signal::No);
    bench.pair.post(&mut batch).unwrap_err();
    state(|it| it.refuse_at = None);
    bench.pair.post(&mut batch).unwrap();
    assert_eq!(signalled(), [false, false, false, true]);
}

#[test]
fn a_failed_request_ends_with_its_status_and_those_behind_it_flushed() {
    let mut bench = Bench::new(16, 0);
    let mut batch = bench.reads(4, Signal::No);
    bench.pair.post(&mut batch).unwrap();
    let ended = bench.complete(1, status::IBV_WC_REM_ACCESS_ERR);
    assert_eq!(ended, [(0, Ok(())), (1, Err(WorkStatus::RemoteAccess))]);
    for at in [2, 3] {
        let flushed = bench.complete(at, status::IBV_WC_WR_FLUSH_ERR);
        assert_eq!(flushed, [(at, Err(WorkStatus::Flushed))]);
    }
    let stale = WorkError { status: WorkStatus::RemoteAccess, vendor_err: 0 };
    assert!(!stale.is_transient());
    assert!(WorkError { status: WorkStatus::Flushed, ..stale }.is_transient());
    assert!(stale.to_string().contains("IBV_WC_REM_ACCESS_ERR"));
}

#[test]
fn a_completion_of_nothing_in_flight_is_an_error_and_ends_nothing() {
    let mut bench = Bench::new(16, 0);
    let mut batch = bench.reads(2, Signal::Yes);
    bench.pair.post(&mut batch).unwrap();
    let first = state(|it| it.posted[0].work);
    // Too far ahead, another queue pair's, and a receive's.
    for work in [first + 2, first + (1 << 32), first | 1 << 63, u64::MAX, 0] {
        state(|it| it.completions.push_back(completion(work, status::IBV_WC_SUCCESS)));
        assert!(matches!(bench.settle(), Err(SettleError::Unknown { .. })), "{work:#x}");
    }
    assert_eq!(bench.pair.in_flight(), 2);
    bench.complete(1, status::IBV_WC_SUCCESS);
    // The same once more.
    state(|it| it.completions.push_back(completion(first, status::IBV_WC_SUCCESS)));
    let text = bench.settle().unwrap_err().to_string();
    assert!(text.contains("has 0 in flight and not that one"), "{text}");
}

#[test]
fn a_queue_pair_is_destroyed_before_what_it_has_in_flight_is_dropped() {
    let mut bench = Bench::new(16, 0);
    let mut batch = bench.reads(2, Signal::Yes);
    bench.pair.post(&mut batch).unwrap();
    let Bench { pair, region, memory, drops, .. } = bench;
    drop((memory, region));
    assert_eq!(drops.load(Ordering::Relaxed), 0);
    drop(pair);
    assert_eq!((count("ibv_destroy_qp"), drops.load(Ordering::Relaxed)), (1, 1));
}

#[test]
fn what_a_queue_pair_that_cannot_be_destroyed_has_in_flight_is_leaked() {
    let mut bench = Bench::new(16, 4);
    let mut batch = bench.reads(2, Signal::Yes);
    bench.pair.post(&mut batch).unwrap();
    let Bench { pair, queue, region, memory, drops } = bench;
    fail("ibv_destroy_qp", libc::EBUSY);
    drop((memory, region));
    drop(pair);
    assert_eq!(drops.load(Ordering::Relaxed), 0);
    drop(queue);
    let kept = ["ibv_destroy_cq", "ibv_dealloc_pd", "ibv_close_device"].map(count);
    assert_eq!(kept, [0; 3]);
    // Our own region went; the receives' did not.
    assert_eq!(count("ibv_dereg_mr"), 1);
}

#[test]
fn a_target_outside_its_region_comes_back() {
    let bench = Bench::new(16, 0);
    let (other, _) = counted();
    let outside = Flying { memory: other, at: 8, bytes: 8 };
    let refused = Post::read(outside, &bench.region, REMOTE, Signal::Yes).unwrap_err();
    assert_eq!(refused.carried.at, 8);
    assert!(matches!(refused.reason, VerbsError::Range { .. }), "{refused}");
    let empty = Flying { memory: Arc::clone(&bench.memory), at: 0, bytes: 0 };
    assert!(Post::read(empty, &bench.region, REMOTE, Signal::Yes).is_err());
    let domain = domain();
    let half = MemoryRegion::register(&domain, bench.memory.clone(), 0..64, Access::LocalWrite);
    let over = Flying { memory: Arc::clone(&bench.memory), at: 60, bytes: 8 };
    assert!(Post::read(over, &half.unwrap(), REMOTE, Signal::Yes).is_err());
}

#[test]
fn a_message_longer_than_the_queue_pair_was_made_for_stays_in_the_batch() {
    let mut bench = Bench::new(16, 0);
    let flying = || Flying { memory: Arc::clone(&bench.memory), at: 0, bytes: 8 };
    let send = |bytes: usize| Post::send(flying(), &vec![1; bytes], Signal::Yes);
    let mut batch = vec![send(32).unwrap(), send(33).unwrap(), send(1).unwrap()];
    assert!(send(129).is_err());
    let error = bench.pair.post(&mut batch).unwrap_err();
    assert_eq!((error.taken, batch.len()), (1, 2));
    assert!(error.to_string().contains("length of 33"), "{error}");
}

#[test]
fn a_failed_connect_gives_the_queue_pair_back_and_starts_over() {
    let domain = domain();
    let queue = CompletionQueue::new(domain.context(), 64).unwrap();
    let prepared = QueuePair::<()>::prepare(&domain, &queue, &queue, options(8, 2)).unwrap();
    let (remote, local) = ends();
    fail("ibv_modify_qp to RTS", libc::EINVAL);
    let error = prepared.connect(&remote, &local).unwrap_err();
    assert!(error.to_string().contains("queue pair 7 on fake0"), "{error}");
    fail("ibv_modify_qp to RTS", 0);
    let pair = error.prepared.connect(&remote, &local).unwrap();
    use ibv_qp_state as to;
    let steps = state(|it| it.states.clone());
    let wanted = [to::IBV_QPS_INIT, to::IBV_QPS_RTR, to::IBV_QPS_RESET];
    assert_eq!(steps[..3], wanted);
    assert_eq!(steps[3..], [to::IBV_QPS_INIT, to::IBV_QPS_RTR, to::IBV_QPS_RTS]);
    // Both receives, and both again after the reset.
    assert_eq!(state(|it| it.receives.len()), 4);
    assert_eq!(pair.state().unwrap(), QueuePairState::ReadyToSend);
}

#[test]
fn a_queue_pair_allows_what_it_says_and_no_more() {
    let domain = domain();
    let queue = CompletionQueue::new(domain.context(), 64).unwrap();
    let (remote, local) = ends();
    // `enum ibv_access_flags`: 2 is remote write, 4 remote read.
    for (remote_access, flags) in RemoteAccess::ALL.into_iter().zip([0, 4, 2, 4 | 2]) {
        let options = QueuePairOptions { remote_access, ..options(8, 0) };
        let prepared = QueuePair::<()>::prepare(&domain, &queue, &queue, options).unwrap();
        let asked = || state(|it| it.allowed.get(&prepared.number()).copied());
        assert_eq!(asked(), Some(flags), "{remote_access:?}");
        assert_eq!(prepared.remote_access().unwrap(), remote_access);
        // An attempt that failed starts over, with the same.
        fail("ibv_modify_qp to RTS", libc::EINVAL);
        let prepared = prepared.connect(&remote, &local).unwrap_err().prepared;
        fail("ibv_modify_qp to RTS", 0);
        state(|it| it.allowed.clear());
        let pair = prepared.connect(&remote, &local).unwrap();
        assert_eq!(state(|it| it.allowed.get(&pair.number()).copied()), Some(flags));
        assert_eq!(pair.remote_access().unwrap(), remote_access);
    }
}

#[test]
fn a_device_that_allows_more_than_was_asked_for_is_found_out() {
    let bench = Bench::new(8, 0);
    let allow = |flags| state(|it| it.allowed.insert(bench.pair.number(), flags));
    // Local write, which is the device's own; remote atomic.
    allow(1 | 4);
    assert_eq!(bench.pair.remote_access().unwrap(), RemoteAccess::Read);
    allow(8 | 4);
    let text = bench.pair.remote_access().unwrap_err().to_string();
    assert!(text.contains("queue pair 7 of fake0") && text.contains("0xc"), "{text}");
    fail("ibv_query_qp", libc::EINVAL);
    assert!(bench.pair.remote_access().is_err() && bench.pair.state().is_err());
}

#[test]
fn settings_that_wait_for_ever_are_refused() {
    assert!(Retries::new(7).unwrap_err().to_string().contains("0 to 6"));
    assert!(AckTimeout::new(0).unwrap_err().to_string().contains("1 to 31"));
    assert!(MinRnrTimer::new(0).is_err() && MinRnrTimer::new(32).is_err());
    assert_eq!(Retries::new(6).unwrap().value(), 6);
    assert_eq!(Psn::new(0x1234_5678).value(), 0x34_5678);
}

#[test]
fn a_completion_queue_promises_no_more_than_it_has() {
    let domain = domain();
    let queue = CompletionQueue::new(domain.context(), 16).unwrap();
    let prepare =
        |send, recv| QueuePair::<()>::prepare(&domain, &queue, &queue, options(send, recv));
    let first = prepare(8, 4).unwrap();
    let text = prepare(5, 0).unwrap_err().to_string();
    assert!(text.contains("16 entries") && text.contains("has 12 promised"), "{text}");
    // What a failed attempt had taken is free again.
    assert!(prepare(4, 4).is_err());
    let second = prepare(2, 2).unwrap();
    drop(first);
    prepare(8, 4).unwrap();
    drop(second);
    assert!(prepare(0, 0).is_err() && prepare(1025, 0).is_err());
    assert!(CompletionQueue::new(domain.context(), 0).is_err());
}

#[test]
fn a_destroyed_queue_pair_hands_back_what_was_in_flight_in_order() {
    let mut bench = Bench::new(16, 2);
    let mut batch = bench.reads(3, Signal::No);
    bench.pair.post(&mut batch).unwrap();
    let Bench { pair, .. } = bench;
    let mut back = Vec::new();
    let each = |released: Released<'_, Flying>| match released {
        Released::Free(flying) => back.push((flying.at / 8, count("ibv_destroy_qp"))),
        Released::Leaked(_) => panic!("the queue pair is gone"),
    };
    pair.destroy(each).unwrap();
    assert_eq!(back, [(0, 1), (1, 1), (2, 1)]);
    assert_eq!(count("ibv_destroy_qp"), 1);
}

#[test]
fn a_queue_pair_that_cannot_be_destroyed_shows_what_it_leaks() {
    let mut bench = Bench::new(16, 0);
    let mut batch = bench.reads(2, Signal::No);
    bench.pair.post(&mut batch).unwrap();
    let Bench { pair, region, memory, drops, .. } = bench;
    drop((region, memory));
    fail("ibv_destroy_qp", libc::EBUSY);
    let mut leaked = Vec::new();
    let each = |released: Released<'_, Flying>| match released {
        Released::Free(_) => panic!("the device may still write there"),
        Released::Leaked(flying) => leaked.push(flying.at / 8),
    };
    let error = pair.destroy(each).unwrap_err();
    assert!(error.to_string().contains("ibv_destroy_qp on queue pair 7 of fake0"), "{error}");
    assert_eq!((leaked, count("ibv_destroy_qp")), (vec![0, 1], 2));
    assert_eq!(drops.load(Ordering::Relaxed), 0);
}

#[test]
fn a_receive_is_shown_and_posted_again() {
    let mut bench = Bench::new(8, 2);
    let (work, _) = state(|it| it.receives[1]);
    let mut raw = completion(work, status::IBV_WC_SUCCESS);
    raw.byte_len = 5;
    state(|it| it.completions.push_back(raw));
    let mut found = Completions::with_room(4);
    bench.queue.poll(&mut found).unwrap();
    let arrived = found.iter().next().unwrap();
    assert!(arrived.is_receive());
    let mut shown = None;
    let show = |it: Result<Received<'_>, WorkError>| {
        shown = it.ok().map(|it| (it.message.to_vec(), it.immediate));
    };
    bench.pair.receive(&arrived, show).unwrap();
    assert_eq!(shown, Some((vec![0; 5], None)));
    let (posted, again) = state(|it| (it.receives.len(), it.receives[2]));
    assert_eq!((posted, again), (3, state(|it| it.receives[1])));
    // It is not a request of ours.
    assert!(matches!(bench.pair.settle(&arrived, |_, _| {}), Err(SettleError::Unknown { .. })));
}

#[test]
fn a_receive_that_cannot_be_is_an_error_and_a_flushed_one_is_not_posted_again() {
    let mut bench = Bench::new(8, 2);
    let (work, _) = state(|it| it.receives[0]);
    let take = |bench: &mut Bench, raw| {
        state(|it| it.completions.push_back(raw));
        let mut found = Completions::with_room(1);
        bench.queue.poll(&mut found).unwrap();
        let arrived = found.iter().next().unwrap();
        let mut failed = None;
        let taken = bench.pair.receive(&arrived, |it| failed = it.err().map(|error| error.status));
        (taken, failed)
    };
    let mut long = completion(work, status::IBV_WC_SUCCESS);
    long.byte_len = 65;
    assert!(matches!(
        take(&mut bench, long).0,
        Err(SettleError::TooLong { bytes: 65, room: 64, .. })
    ));
    let beyond = completion(work + 2, status::IBV_WC_SUCCESS);
    assert!(matches!(take(&mut bench, beyond).0, Err(SettleError::Unknown { .. })));
    let (taken, failed) = take(&mut bench, completion(work, status::IBV_WC_WR_FLUSH_ERR));
    assert_eq!((taken.is_ok(), failed), (true, Some(WorkStatus::Flushed)));
    assert_eq!(state(|it| it.receives.len()), 2);
    fail("ibv_post_recv", libc::ENOMEM);
    let good = completion(work, status::IBV_WC_SUCCESS);
    assert!(matches!(take(&mut bench, good).0, Err(SettleError::Repost(_))));
}
