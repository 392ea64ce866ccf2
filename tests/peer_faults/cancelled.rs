//! Cancelling and closing while a peer withholds the answer.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use expert_tier::error::FetchError;
use expert_tier::key::ExpertKey;
use expert_tier::tcp::{TcpOptions, TcpTier};
use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::{CompletionQueue, ExpertTier};

use crate::peer_support::scripted::{Scripted, answer, record};
use crate::peer_support::{
    BOUND, assert_right, fetch, next, options, small_store, submit, wait_until,
};

const KEY: ExpertKey = ExpertKey::new(1, 3);

/// Deadlines play no part here.
fn patient(peer: &Scripted) -> TcpOptions {
    TcpOptions { deadline: BOUND, ..options(peer.address()) }
}

/// A peer that tells the test of each request, and answers the first half of the record at once
/// and the second half when the test says so; `false` breaks the connection instead.
struct Withholding {
    // Goes before the peer, whose script waits for it.
    go: Sender<bool>,
    asked: Receiver<ExpertKey>,
    peer: Scripted,
}

impl Withholding {
    fn start(store: &Arc<TestStore>) -> Self {
        let ((tell, asked), (go, wait)) = (channel(), channel::<bool>());
        let (tell, wait) = (Mutex::new(tell), Mutex::new(wait));
        let theirs = Arc::clone(store);
        let peer = Scripted::attached(store, move |conn| {
            loop {
                let (id, key) = conn.request()?;
                let whole = answer(id, &record(&theirs, key));
                let (first, second) = whole.split_at(whole.len() / 2);
                conn.send(first)?;
                tell.lock().unwrap().send(key)?;
                anyhow::ensure!(wait.lock().unwrap().recv_timeout(BOUND)?, "told to break");
                conn.send(second)?;
            }
        });
        Self { go, asked, peer }
    }

    fn wait_asked(&self) -> ExpertKey {
        self.asked.recv_timeout(BOUND).expect("a request in time")
    }
}

#[test]
fn a_cancelled_fetch_keeps_its_slot_until_the_completion_is_reaped() {
    let store = Arc::new(small_store(31));
    let withholding = Withholding::start(&store);
    let tier = TcpTier::connect(patient(&withholding.peer)).unwrap();
    let arena = small_arena(2);
    let queue = CompletionQueue::new();
    // The first is being received, the second is on the wire behind it.
    let keys = [KEY, ExpertKey::new(1, 4)];
    let tickets = submit(&tier, &arena, &keys, &queue);
    withholding.wait_asked();
    tickets.iter().for_each(|&ticket| tier.cancel(ticket));
    // The peer may still write: the slots must not be anybody's, and no completion may say so.
    assert!(tier.poll(&queue, Duration::ZERO).is_none());
    assert_eq!(arena.free_slots(), 0);
    for (reaped, key) in keys.into_iter().enumerate() {
        withholding.go.send(true).unwrap();
        let completion = next(&tier, &queue);
        assert_eq!(completion.ticket, tickets[reaped]);
        assert_eq!(arena.free_slots(), reaped, "the completion has the slot until it is dropped");
        match completion.outcome {
            Ok(fetched) => assert_right(&store, key, &fetched),
            Err(failure) => {
                assert!(matches!(*failure.error, FetchError::Cancelled { .. }), "{failure}");
                assert!(failure.slot.is_some());
            }
        }
        assert_eq!(arena.free_slots(), reaped + 1);
    }
    assert!(tier.poll(&queue, Duration::ZERO).is_none(), "one completion for one request");
    withholding.go.send(true).unwrap();
    assert_right(&store, KEY, &fetch(&tier, &arena, KEY).unwrap());
}

#[test]
fn a_cancelled_fetch_whose_connection_breaks_is_not_sent_again() {
    let store = Arc::new(small_store(32));
    let withholding = Withholding::start(&store);
    let tier = TcpTier::connect(patient(&withholding.peer)).unwrap();
    let arena = small_arena(2);
    let queue = CompletionQueue::new();
    // The first is being received, the second waits for its turn on the wire.
    let other = ExpertKey::new(1, 4);
    let tickets = submit(&tier, &arena, &[KEY, other], &queue);
    withholding.wait_asked();
    tickets.iter().for_each(|&ticket| tier.cancel(ticket));
    withholding.go.send(false).unwrap();
    for _ in 0..2 {
        let failure = next(&tier, &queue).outcome.expect_err("cancelled and cut off");
        assert!(matches!(*failure.error, FetchError::Cancelled { .. }), "{failure}");
        assert!(failure.slot.is_some());
    }
    assert_eq!(arena.free_slots(), 2);
    wait_until("the reconnection", || tier.healthy());
    withholding.go.send(true).unwrap();
    let fetched = fetch(&tier, &arena, other).unwrap();
    assert_right(&store, other, &fetched);
    assert_eq!(withholding.wait_asked(), other);
    assert!(withholding.asked.try_recv().is_err(), "a cancelled request was sent again");
}

#[test]
fn closing_in_the_middle_of_a_record_ends_every_request_as_closed() {
    let store = Arc::new(small_store(33));
    let withholding = Withholding::start(&store);
    // One attempt: closing must not look like a failed one.
    let options = TcpOptions { attempts: 1, depth: 2, ..patient(&withholding.peer) };
    let tier = TcpTier::connect(options).unwrap();
    let arena = small_arena(4);
    let queue = CompletionQueue::new();
    let keys: Vec<_> = (0..4).map(|expert| ExpertKey::new(1, expert)).collect();
    submit(&tier, &arena, &keys, &queue);
    withholding.wait_asked();
    drop(tier);
    for _ in &keys {
        let completion = queue.pop(Duration::ZERO).expect("every request has ended");
        let failure = completion.outcome.expect_err("closed before the answer");
        assert!(matches!(*failure.error, FetchError::Closed { .. }), "{failure}");
    }
    assert_eq!(arena.free_slots(), 4);
}
