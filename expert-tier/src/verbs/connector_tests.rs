//! When a rail is tried, and what is said of it; without a peer.

use super::super::VerbsOptions;
use super::super::devices::Devices;
use super::*;

const BACKOFF: BackoffSettings = BackoffSettings { first_ms: 10, most_ms: 100 };
const ABSENT: Duration = Duration::from_secs(30);
const DEADLINE: Duration = Duration::from_secs(2);

fn after(start: Instant, ms: u64) -> Instant {
    start + Duration::from_millis(ms)
}

#[test]
fn a_rail_that_has_never_been_waits_long_beside_another_and_not_without_one() {
    let start = Instant::now();
    let attempts = Attempts::new(BACKOFF, false, start);
    assert_eq!(attempts.due_in(start, Others::Up, ABSENT), ABSENT);
    let alone = attempts.due_in(start, Others::None, ABSENT);
    assert!(alone >= Duration::from_millis(5) && alone <= Duration::from_millis(10), "{alone:?}");
    // The other one is lost meanwhile: this one is due at once.
    let later = after(start, 11);
    assert_eq!(attempts.due_in(later, Others::None, ABSENT), Duration::ZERO);
    assert_eq!(attempts.due_in(later, Others::Up, ABSENT), ABSENT - Duration::from_millis(11));
}

#[test]
fn a_rail_that_was_there_is_tried_soon_and_then_less_and_less_often() {
    let start = Instant::now();
    let mut attempts = Attempts::new(BACKOFF, true, start);
    let lost = after(start, 5000);
    attempts.is_missing(lost, DEADLINE);
    let wait = |attempts: &Attempts, now| attempts.due_in(now, Others::Up, ABSENT).as_micros();
    assert!((5000..=10_000).contains(&wait(&attempts, lost)));
    // Asking again changes nothing.
    attempts.is_missing(after(lost, 1), DEADLINE);
    assert!((4000..=9000).contains(&wait(&attempts, after(lost, 1))));
    let mut now = lost;
    for most_us in [20_000, 40_000, 80_000, 100_000, 100_000] {
        now = after(now, 100);
        attempts.failed(now);
        let wait = wait(&attempts, now);
        assert!((most_us / 2..=most_us).contains(&wait), "{wait} of {most_us}");
    }
}

#[test]
fn a_rail_that_breaks_at_once_keeps_its_back_off() {
    let start = Instant::now();
    let mut attempts = Attempts::new(BACKOFF, true, start);
    let mut now = start;
    for most_us in [10_000, 20_000, 40_000] {
        attempts.is_missing(now, DEADLINE);
        let wait = attempts.due_in(now, Others::None, ABSENT).as_micros();
        assert!((most_us / 2..=most_us).contains(&wait), "{wait} of {most_us}");
        now = after(now, 100);
        attempts.succeeded(now);
    }
    now = after(now, 2001);
    attempts.is_missing(now, DEADLINE);
    let wait = attempts.due_in(now, Others::None, ABSENT).as_micros();
    assert!((5000..=10_000).contains(&wait), "{wait}: it has been there for the deadline");
}

#[test]
fn a_reason_is_said_once_whichever_rail_it_keeps_away() {
    let complaints = Complaints::default();
    assert!(complaints.is_news(0, "gone"));
    assert!(!complaints.is_news(0, "gone") && !complaints.is_news(1, "gone"));
    assert!(complaints.is_news(1, "busy") && !complaints.is_news(1, "busy"));
    complaints.clear(0);
    assert!(complaints.is_news(0, "gone"));
    complaints.clear(0);
    complaints.clear(1);
    assert!(complaints.is_news(1, "gone"));
}

#[test]
fn only_what_the_way_is_to_blame_for_counts_against_a_pair() {
    let peer = || String::from("peer");
    let tried = OpenError::TryOut { rail: "rxe0".into(), peer: peer(), why: "nothing".into() };
    assert_eq!(blame(&tried), Blame::Pair);
    let source = Box::new(PairError::NoneBeside(OneRail::NotRouted).into());
    let paired = OpenError::Agree { peer: peer(), source };
    assert!(is_nothing_else(&paired) && !is_nothing_else(&tried));
    assert_eq!(blame(&paired), Blame::Other);
}

#[test]
fn a_second_rail_is_possible_where_only_this_host_lacks_it() {
    let port = || OneRail::OneLocalRail { device: "rxe0".into(), port: 1 };
    let two = [None, Some(OneRail::NotRouted), Some(port())];
    for why in two {
        assert_eq!(possible(why.as_ref(), DualRail::Auto), 2, "{why:?}");
        assert_eq!(possible(why.as_ref(), DualRail::One), 1, "{why:?}");
    }
    assert_eq!(possible(Some(&OneRail::PeerOffersOne), DualRail::Two), 1);
}

#[test]
fn a_rail_that_comes_up_for_the_first_time_is_no_reconnect() {
    let store = crate::testing::TestStore::new(1, 1, &[1000], 3);
    let manifest = Arc::clone(store.open().manifest());
    let known = Devices::of(gpu_sys::verbs::fake::library(std::path::Path::new("/absent")));
    let desk = Desk::new(VerbsOptions::new("peer"), manifest, known).expect("a desk");
    let mut attempts = Attempts::new(BACKOFF, false, Instant::now());
    attempts.count(&desk);
    assert_eq!(desk.reconnects(), 0);
    attempts.succeeded(Instant::now());
    attempts.is_missing(Instant::now(), DEADLINE);
    attempts.count(&desk);
    assert_eq!(desk.reconnects(), 1);
}
