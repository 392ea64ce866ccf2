//! Which records are worth a move between disk and memory. Pure: counts and time in, moves out.
//!
//! Each record has a score: its fetches, of which half are forgotten after [`HALF_LIFE`]. So a score
//! is what a record was fetched in about the last 1.44 half-lives.
//!
//! A spilled record takes a resident one's slot when its score is [`FACTOR`] times that one's and
//! [`MARGIN`] more. The factor is what keeps records of about equal use from changing places for
//! ever; the margin keeps chance from moving records that are hardly used at all. What the factor
//! costs is bounded: with fetches that fall off as 1/rank and 256 slots, a set that no move can
//! improve has 0.98 of the fetches of the best one.
//!
//! Moves cost I/O, so they are paid from a credit that grows by a number of bytes per second.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use super::places::Places;

/// In this time half of a score is forgotten: long enough that a batch does not look like a trend,
/// short enough that a new topic has its experts in memory within minutes.
const HALF_LIFE: Duration = Duration::from_secs(60);
/// How many times as wanted a record must be as the one whose slot it takes.
const FACTOR: f32 = 2.0;
/// How many fetches more it must have besides.
const MARGIN: f32 = 4.0;
/// Score for which a record gets a slot that is free: about one fetch lately.
const FREE_SCORE: f32 = 0.5;

/// A slot gets other contents.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Move {
    pub(crate) slot: u32,
    /// The record that is in it and goes; `None` where the slot is free.
    pub(crate) out: Option<usize>,
    /// The record that comes.
    pub(crate) into: Option<usize>,
}

/// The scores, and the credit for moves.
pub(crate) struct Policy {
    scores: Vec<f32>,
    /// What it costs to bring each record.
    record_bytes: Vec<u64>,
    bytes_per_s: u64,
    credit_bytes: u64,
}

impl Policy {
    /// Nothing is known yet of records of these sizes; moves may cost `bytes_per_s`.
    pub(crate) fn new(record_bytes: Vec<u64>, bytes_per_s: u64) -> Self {
        Self { scores: vec![0.0; record_bytes.len()], record_bytes, bytes_per_s, credit_bytes: 0 }
    }

    /// Forgets what `elapsed` makes old, and adds the fetches that `count` gives for each record.
    pub(crate) fn observe(&mut self, elapsed: Duration, mut count: impl FnMut(usize) -> u32) {
        let kept = 0.5_f32.powf(elapsed.as_secs_f32() / HALF_LIFE.as_secs_f32());
        for (record, score) in self.scores.iter_mut().enumerate() {
            *score = *score * kept + count(record) as f32;
        }
        let earned = (self.bytes_per_s as f64 * elapsed.as_secs_f64()) as u64;
        self.credit_bytes = self.credit_bytes.saturating_add(earned);
    }

    /// The moves that are worth their cost now, the most wanted record first; the credit pays them.
    /// A record for which `may_move` says no stays where it is.
    pub(crate) fn choose(
        &mut self,
        places: &Places,
        may_move: &impl Fn(usize) -> bool,
    ) -> Vec<Move> {
        let most = self.most_moves();
        let wanted = self.wanted(places, may_move, most);
        let mut free = places.free();
        let mut coldest = self.coldest(places, may_move, wanted.len()).into_iter();
        let mut moves = Vec::new();
        for record in wanted {
            let bytes = self.record_bytes[record];
            if bytes > self.credit_bytes {
                break;
            }
            let (slot, out) = match free.next() {
                Some(slot) => (slot, None),
                None => {
                    let Some(victim) = coldest.next() else { break };
                    let Some(slot) = places.slot(victim) else { break };
                    if self.scores[record] < FACTOR * self.scores[victim] + MARGIN {
                        break;
                    }
                    (slot, Some(victim))
                }
            };
            self.credit_bytes -= bytes;
            moves.push(Move { slot, out, into: Some(record) });
        }
        // What nothing was worth is not saved up, or a change in what is wanted would bring a flood
        // of moves. But what one record costs must come together.
        let dearest = self.record_bytes.iter().copied().max().unwrap_or(0);
        self.credit_bytes = self.credit_bytes.min(dearest);
        moves
    }

    /// As many moves as the credit can pay at most.
    fn most_moves(&self) -> usize {
        let least = self.record_bytes.iter().copied().min().unwrap_or(1).max(1);
        usize::try_from(self.credit_bytes / least).unwrap_or(usize::MAX)
    }

    /// At most `most` spilled records that are worth a slot, the most wanted first.
    fn wanted(
        &self,
        places: &Places,
        may_move: &impl Fn(usize) -> bool,
        most: usize,
    ) -> Vec<usize> {
        let worth = |record: &usize| {
            self.scores[*record] >= FREE_SCORE
                && places.slot(*record).is_none()
                && may_move(*record)
        };
        self.first(most, (0..self.scores.len()).filter(worth), |score| Reverse(Score(score)))
    }

    /// At most `most` resident records, the least wanted first.
    fn coldest(
        &self,
        places: &Places,
        may_move: &impl Fn(usize) -> bool,
        most: usize,
    ) -> Vec<usize> {
        self.first(most, places.resident().filter(|record| may_move(*record)), Score)
    }

    /// The `most` of `records` that are first in the order of `rank` of their scores, in that order.
    fn first<R: Ord>(
        &self,
        most: usize,
        records: impl Iterator<Item = usize>,
        rank: impl Fn(f32) -> R,
    ) -> Vec<usize> {
        let mut heap = BinaryHeap::new();
        for record in records {
            heap.push((rank(self.scores[record]), record));
            if heap.len() > most {
                heap.pop();
            }
        }
        heap.into_sorted_vec().into_iter().map(|(_, record)| record).collect()
    }
}

/// A score in its total order; none is not a number.
#[derive(PartialEq)]
struct Score(f32);

impl Eq for Score {}

impl PartialOrd for Score {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Score {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
