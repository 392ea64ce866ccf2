use expert_tier::key::ExpertKey;

use super::*;

const A: LaneId = LaneId(1);
const B: LaneId = LaneId(2);
const ANNE: ClientId = ClientId([1; 16]);
const BERT: ClientId = ClientId([2; 16]);
const PAGE: u64 = PAGE_BYTES;
const DEADLINE: Duration = Duration::from_millis(100);
const LEASE: Duration = Duration::from_millis(500);

fn limits() -> Limits {
    Limits {
        credits: 4,
        chunk_bytes: 4 * PAGE,
        reads: 8,
        per_client: 6,
        deadline: DEADLINE,
        lease: LEASE,
        stages: false,
    }
}

/// A desk with a lane of Anne's, A, and one of Bert's, B.
fn desk(limits: Limits) -> Desk {
    let mut desk = Desk::new(limits, Disk::default());
    desk.add_lane(A, ANNE);
    desk.add_lane(B, BERT);
    desk
}

fn place() -> Place {
    Place { key: ExpertKey::new(3, 5), layer_at: 0, start: 40 * PAGE }
}

fn fetch(id: u64, offset: u64, bytes: u64) -> Fetch {
    let into = Window { address: 0x10_0000, rkey: 7 };
    Fetch { id, layer: 3, expert: 5, offset, bytes: bytes as u32, into }
}

fn receipt(id: u64, status: PushStatus, bytes: u64) -> Receipt {
    Receipt { id, status, bytes: bytes as u32, staged: Window::default() }
}

fn take(desk: &mut Desk, lane: LaneId, fetch: Fetch, now: Instant) {
    assert_eq!(desk.fetch(lane, fetch, Ok(place()), 0, now), Ok(None));
}

fn expired(desk: &mut Desk, now: Instant) -> Vec<Overdue> {
    let mut all = Vec::new();
    desk.expire(now, |overdue| all.push(overdue));
    all
}

#[test]
fn a_range_is_read_in_whole_pages_and_written_where_it_was_asked_for() {
    let now = Instant::now();
    for (offset, bytes) in [(0, 10 * PAGE), (5, 10 * PAGE), (PAGE - 1, 2), (3 * PAGE + 7, 100_000)]
    {
        let mut desk = desk(Limits { per_client: 99, reads: 99, ..limits() });
        take(&mut desk, A, fetch(9, offset, bytes), now);
        let chunks: Vec<_> = std::iter::from_fn(|| desk.next_chunk(now)).collect();
        let mut next = offset;
        for (at, chunk) in chunks.iter().enumerate() {
            assert_eq!((chunk.from % PAGE, chunk.bytes as u64 % PAGE), (0, 0));
            assert!(chunk.bytes as u64 <= 4 * PAGE && chunk.skip + chunk.wanted <= chunk.bytes);
            assert_eq!(chunk.from + chunk.skip as u64, next, "no gap and nothing twice");
            let into = Window { address: 0x10_0000 + next - offset, rkey: 7 };
            next += chunk.wanted as u64;
            let last = at + 1 == chunks.len();
            let end = last.then(|| receipt(9, PushStatus::Done, bytes));
            assert_eq!(desk.read(chunk, true, now), Verdict::Write(into, end));
        }
        assert_eq!(next, offset + bytes, "all of it");
        assert_eq!(desk.queued(), 0);
    }
}

#[test]
fn the_receipt_follows_whichever_chunk_is_read_last() {
    let (mut desk, now) = (desk(limits()), Instant::now());
    take(&mut desk, A, fetch(9, 0, 8 * PAGE), now);
    let chunks: Vec<_> = std::iter::from_fn(|| desk.next_chunk(now)).collect();
    assert!(matches!(desk.read(&chunks[1], true, now), Verdict::Write(_, None)));
    assert!(matches!(desk.read(&chunks[0], true, now), Verdict::Write(_, Some(_))));
}

#[test]
fn clients_take_turns_chunk_by_chunk() {
    let (mut desk, now) = (desk(limits()), Instant::now());
    (1..4).for_each(|id| take(&mut desk, A, fetch(id, 0, 16 * PAGE), now));
    take(&mut desk, B, fetch(1, 0, 8 * PAGE), now);
    let turns: Vec<_> =
        std::iter::from_fn(|| desk.next_chunk(now)).map(|chunk| chunk.lane).collect();
    assert_eq!(turns, [A, B, A, B, A, A, A, A], "B waits for one chunk of A's at most");
}

#[test]
fn reads_and_a_clients_buffers_have_bounds() {
    let now = Instant::now();
    let mut few_reads = desk(Limits { reads: 2, ..limits() });
    take(&mut few_reads, A, fetch(1, 0, 40 * PAGE), now);
    let chunk = few_reads.next_chunk(now).unwrap();
    few_reads.next_chunk(now).unwrap();
    assert_eq!(few_reads.next_chunk(now), None);
    few_reads.read(&chunk, true, now);
    few_reads.next_chunk(now).expect("a read has ended, although its buffer is still held");

    let mut few_buffers = desk(Limits { per_client: 2, ..limits() });
    take(&mut few_buffers, A, fetch(1, 0, 40 * PAGE), now);
    take(&mut few_buffers, B, fetch(1, 0, 40 * PAGE), now);
    let chunks: Vec<_> = std::iter::from_fn(|| few_buffers.next_chunk(now)).collect();
    assert_eq!(chunks.len(), 4, "two of each");
    few_buffers.read(&chunks[0], true, now);
    assert_eq!(few_buffers.next_chunk(now), None, "it is being written");
    few_buffers.released(A);
    assert_eq!(few_buffers.next_chunk(now).unwrap().lane, A);
}

#[test]
fn a_client_that_goes_beyond_its_credits_breaks_the_protocol() {
    let (mut desk, now) = (desk(limits()), Instant::now());
    (0..4).for_each(|id| take(&mut desk, A, fetch(id, 0, PAGE), now));
    let one_more = desk.fetch(A, fetch(4, 0, PAGE), Ok(place()), 0, now);
    assert_eq!(one_more, Err(Breach::Credits { credits: 4 }));
    // Refusals that have not left count as well: their client cannot know of them.
    let refused = desk.fetch(B, fetch(1, 0, 1), Err(PushStatus::NoSuchKey), 4, now);
    assert_eq!(refused, Err(Breach::Credits { credits: 4 }));
    let chunk = desk.next_chunk(now).unwrap();
    desk.read(&chunk, true, now);
    take(&mut desk, A, fetch(4, 0, PAGE), now);
}

#[test]
fn an_id_is_live_until_its_receipt() {
    let (mut desk, now) = (desk(limits()), Instant::now());
    take(&mut desk, A, fetch(1, 0, PAGE), now);
    let in_use = Ok(Some(receipt(1, PushStatus::InUse, 0)));
    assert_eq!(desk.fetch(A, fetch(1, 0, PAGE), Ok(place()), 0, now), in_use);
    take(&mut desk, B, fetch(1, 0, PAGE), now);
    let chunk = desk.next_chunk(now).unwrap();
    assert_eq!(chunk.lane, A);
    desk.read(&chunk, true, now);
    take(&mut desk, A, fetch(1, 0, PAGE), now);
}

#[test]
fn what_cannot_be_had_is_refused_at_once() {
    let (mut desk, now) = (desk(limits()), Instant::now());
    for status in [PushStatus::NoSuchKey, PushStatus::OutOfRange, PushStatus::Damaged] {
        let refused = desk.fetch(A, fetch(1, 0, PAGE), Err(status), 0, now);
        assert_eq!(refused, Ok(Some(receipt(1, status, 0))));
    }
    assert_eq!((desk.queued(), desk.next_chunk(now)), (0, None));
}

#[test]
fn a_failed_read_ends_its_request_and_nothing_of_it_is_written_afterwards() {
    let (mut desk, now) = (desk(limits()), Instant::now());
    take(&mut desk, A, fetch(1, 0, 12 * PAGE), now);
    take(&mut desk, A, fetch(2, 0, PAGE), now);
    let chunks: Vec<_> = std::iter::from_fn(|| desk.next_chunk(now)).collect();
    assert!(matches!(desk.read(&chunks[0], true, now), Verdict::Write(_, None)));
    let failed = receipt(1, PushStatus::Unreadable, 0);
    assert_eq!(desk.read(&chunks[1], false, now), Verdict::Fail(failed));
    assert_eq!(desk.read(&chunks[2], true, now), Verdict::Forget);
    assert!(matches!(desk.read(&chunks[3], true, now), Verdict::Write(_, Some(_))), "another's");
}

#[test]
fn a_request_that_waits_finds_the_peer_busy_and_one_that_the_disk_keeps_is_unreadable() {
    let (mut desk, now) = (desk(Limits { reads: 1, ..limits() }), Instant::now());
    take(&mut desk, A, fetch(1, 0, PAGE), now);
    take(&mut desk, B, fetch(2, 0, PAGE), now + DEADLINE / 2);
    let kept = desk.next_chunk(now).unwrap();
    assert_eq!(desk.next_deadline(), Some(now + DEADLINE));
    assert_eq!(expired(&mut desk, now + DEADLINE - Duration::from_millis(1)), []);
    let unreadable = Overdue::Request(A, place().key, receipt(1, PushStatus::Unreadable, 0));
    assert_eq!(expired(&mut desk, now + DEADLINE), [unreadable]);
    let busy = Overdue::Request(B, place().key, receipt(2, PushStatus::Busy, 0));
    assert_eq!(desk.next_deadline(), Some(now + DEADLINE * 3 / 2));
    assert_eq!(expired(&mut desk, now + DEADLINE * 2), [busy]);
    // The read is the disk's still, and its buffer.
    take(&mut desk, B, fetch(3, 0, PAGE), now);
    assert_eq!(desk.next_chunk(now + DEADLINE * 2), None);
    assert_eq!(desk.read(&kept, true, now), Verdict::Forget);
    assert_eq!(desk.next_chunk(now).unwrap().lane, B);
}

#[test]
fn a_request_whose_chunks_wait_finds_the_peer_busy_although_some_have_been_read() {
    let now = Instant::now();
    let mut desk = desk(Limits { reads: 1, ..limits() });
    take(&mut desk, A, fetch(1, 0, 8 * PAGE), now);
    take(&mut desk, B, fetch(2, 0, PAGE), now);
    let first = desk.next_chunk(now).unwrap();
    let halfway = now + DEADLINE / 2;
    assert!(matches!(desk.read(&first, true, halfway), Verdict::Write(_, None)));
    let of_b = desk.next_chunk(halfway).unwrap();
    assert_eq!(of_b.lane, B);
    assert_eq!(desk.next_deadline(), Some(halfway + DEADLINE), "the disk gave something");
    assert_eq!(expired(&mut desk, now + DEADLINE), []);
    let end = |lane, id, status| Overdue::Request(lane, place().key, receipt(id, status, 0));
    let ends = [end(A, 1, PushStatus::Busy), end(B, 2, PushStatus::Unreadable)];
    assert_eq!(expired(&mut desk, halfway + DEADLINE), ends);
}

#[test]
fn a_queue_that_takes_longer_than_the_deadline_is_read_while_the_disk_gives() {
    let now = Instant::now();
    let mut desk = desk(Limits { credits: 40, reads: 4, per_client: 99, ..limits() });
    for id in 0..40 {
        take(&mut desk, A, fetch(id, 0, PAGE), now);
        take(&mut desk, B, fetch(id, 0, PAGE), now);
    }
    let (mut reading, mut done, mut at) = (VecDeque::new(), 0, now);
    while done < 80 {
        reading.extend(std::iter::from_fn(|| desk.next_chunk(at)));
        at += DEADLINE * 2 / 3;
        assert_eq!(expired(&mut desk, at), []);
        assert!(desk.next_deadline().unwrap() > at);
        let chunk = reading.pop_front().expect("one is being read");
        assert!(matches!(desk.read(&chunk, true, at), Verdict::Write(_, Some(_))));
        done += 1;
    }
    assert_eq!((desk.queued(), desk.next_deadline()), (0, None));
}

#[test]
fn a_chunk_that_the_disk_keeps_gains_no_time_by_those_that_it_got_later() {
    let now = Instant::now();
    let mut desk = desk(Limits { reads: 2, ..limits() });
    take(&mut desk, A, fetch(1, 0, PAGE), now);
    let kept = desk.next_chunk(now).unwrap();
    for id in 0..8 {
        let at = now + DEADLINE / 8 * id;
        take(&mut desk, B, fetch(id.into(), 0, PAGE), at);
        let chunk = desk.next_chunk(at).unwrap();
        assert!(matches!(desk.read(&chunk, true, at), Verdict::Write(_, Some(_))));
        desk.released(B);
    }
    assert_eq!(desk.next_deadline(), Some(now + DEADLINE));
    let end = Overdue::Request(A, place().key, receipt(1, PushStatus::Unreadable, 0));
    assert_eq!(expired(&mut desk, now + DEADLINE), [end]);
    assert_eq!(desk.next_deadline(), None, "nobody waits for it any more");
    assert_eq!(desk.read(&kept, true, now + DEADLINE), Verdict::Forget);
}

#[test]
fn a_clients_lanes_have_one_share_and_one_turn() {
    const A2: LaneId = LaneId(3);
    let now = Instant::now();
    let mut desk = desk(Limits { per_client: 4, reads: 99, ..limits() });
    desk.add_lane(A2, ANNE);
    for lane in [A, A2, B] {
        take(&mut desk, lane, fetch(1, 0, 40 * PAGE), now);
    }
    let chunks: Vec<_> = std::iter::from_fn(|| desk.next_chunk(now)).collect();
    let turns: Vec<_> = chunks.iter().map(|chunk| chunk.lane).collect();
    assert_eq!(turns, [A, B, A2, B, A, B, A2, B], "each client has four, by turns");
    // One of A's is being written; with A that comes back, and what is read does when it is.
    desk.read(&chunks[0], true, now);
    desk.remove_lane(A);
    assert_eq!(desk.next_chunk(now).unwrap().lane, A2);
    assert_eq!(desk.next_chunk(now), None);
    let next = LaneId(4);
    desk.add_lane(next, ANNE);
    take(&mut desk, next, fetch(1, 0, 40 * PAGE), now);
    assert_eq!(desk.next_chunk(now), None, "coming back brings no new share");
    assert_eq!(desk.read(&chunks[4], true, now), Verdict::Forget);
    assert_eq!(desk.next_chunk(now).unwrap().client, ANNE);
    assert_eq!(desk.next_chunk(now), None);
}

#[test]
fn a_client_is_forgotten_with_its_last_lane_and_its_last_read() {
    let (mut desk, now) = (desk(limits()), Instant::now());
    take(&mut desk, A, fetch(1, 0, 8 * PAGE), now);
    let chunks: Vec<_> = std::iter::from_fn(|| desk.next_chunk(now)).collect();
    desk.remove_lane(A);
    desk.remove_lane(B);
    assert!(desk.turns.is_empty() && desk.clients.len() == 1);
    chunks.iter().for_each(|chunk| assert_eq!(desk.read(chunk, true, now), Verdict::Forget));
    assert!(desk.clients.is_empty());
}

#[test]
fn a_lane_that_goes_takes_its_requests_along_and_leaves_its_reads_to_the_disk() {
    let (mut desk, now) = (desk(Limits { reads: 1, ..limits() }), Instant::now());
    take(&mut desk, A, fetch(1, 0, 8 * PAGE), now);
    take(&mut desk, B, fetch(1, 0, PAGE), now);
    let chunk = desk.next_chunk(now).unwrap();
    desk.remove_lane(A);
    assert_eq!((desk.queued(), desk.next_chunk(now)), (1, None));
    assert_eq!(desk.read(&chunk, true, now), Verdict::Forget);
    assert_eq!(desk.next_chunk(now).unwrap().lane, B);
    assert_eq!(desk.fetch(A, fetch(2, 0, PAGE), Ok(place()), 0, now), Ok(None), "nobody's");
}

#[test]
fn a_staged_place_is_held_until_its_release_or_the_end_of_its_lease() {
    let stages = Limits { stages: true, per_client: 1, ..limits() };
    let (mut desk, now) = (desk(stages), Instant::now());
    let unnamed = |id| Fetch { into: Window::default(), ..fetch(id, 0, PAGE) };
    let named = desk.fetch(A, fetch(1, 0, PAGE), Ok(place()), 0, now);
    assert_eq!(named, Err(Breach::Window));
    take(&mut desk, A, unnamed(1), now);
    take(&mut desk, A, unnamed(2), now);
    let chunk = desk.next_chunk(now).unwrap();
    let done = Verdict::Stage(receipt(1, PushStatus::Done, PAGE));
    assert_eq!(desk.read(&chunk, true, now), done);
    assert_eq!(desk.next_chunk(now), None, "the lane's one buffer is the client's");
    let in_use = desk.fetch(A, unnamed(1), Ok(place()), 0, now);
    assert_eq!(in_use, Ok(Some(receipt(1, PushStatus::InUse, 0))), "until its release");
    assert!(!desk.release(A, 7) && !desk.release(B, 1), "nothing is staged for those");
    assert!(desk.release(A, 1) && !desk.release(A, 1));
    desk.released(A);
    let chunk = desk.next_chunk(now).unwrap();
    desk.read(&chunk, true, now);
    assert_eq!(expired(&mut desk, now + LEASE), [Overdue::Lease(A, 2)]);
    assert!(!desk.release(A, 2), "too late");
}

/// Two lanes with all sorts of requests, a disk and a device that end things in any order.
#[test]
fn every_request_ends_once_and_every_bound_holds_whatever_the_order() {
    let now = Instant::now();
    for seed in 0..200_u64 {
        let mut state = seed;
        let mut roll = |sides: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888);
            (state >> 33) % sides
        };
        let limits = Limits { reads: 3, per_client: 2, ..limits() };
        let mut desk = desk(limits);
        let (mut reading, mut writing, mut ends) = (Vec::new(), Vec::new(), Vec::new());
        let mut asked = 0;
        for step in 0..2_000 {
            match roll(4) {
                0 if asked < 40 => {
                    let lane = if roll(2) == 0 { A } else { B };
                    let wanted = fetch(asked, roll(20_000), 1 + roll(60_000));
                    if desk.fetch(lane, wanted, Ok(place()), 0, now) == Ok(None) {
                        asked += 1;
                    }
                }
                1 => reading.extend(desk.next_chunk(now)),
                2 if !reading.is_empty() => {
                    let chunk: Chunk = reading.swap_remove(roll(reading.len() as u64) as usize);
                    match desk.read(&chunk, roll(9) > 0, now) {
                        Verdict::Write(_, end) => {
                            writing.push(chunk.lane);
                            ends.extend(end.map(|end| end.id));
                        }
                        Verdict::Fail(end) => ends.push(end.id),
                        Verdict::Forget => {}
                        Verdict::Stage(_) => panic!("nothing is staged"),
                    }
                }
                3 if !writing.is_empty() => desk.released(writing.swap_remove(0)),
                _ => {}
            }
            assert!(reading.len() <= 3, "seed {seed}, step {step}");
            for lane in [A, B] {
                let of_lane = reading.iter().filter(|chunk| chunk.lane == lane).count()
                    + writing.iter().filter(|of| **of == lane).count();
                assert!(of_lane <= 2, "seed {seed}, step {step}");
            }
        }
        ends.sort_unstable();
        let expected: Vec<_> = (0..asked).collect();
        assert_eq!((asked, &ends), (40, &expected), "seed {seed}");
    }
}
