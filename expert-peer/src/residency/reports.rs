//! What clients say of records that came to them damaged, until somebody looks.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use expert_tier::key::ExpertKey;

/// Records that wait to be looked at. What comes beyond them is dropped: who still gets a damaged
/// record says so again.
const MAX_REPORTS: usize = 64;

/// Reports, each record once, in the order they came.
#[derive(Default)]
pub(crate) struct Reports(Mutex<VecDeque<ExpertKey>>);

impl Reports {
    /// A client got other bytes than this record's.
    pub(crate) fn report(&self, key: ExpertKey) {
        let mut waiting = self.lock();
        if waiting.len() < MAX_REPORTS && !waiting.contains(&key) {
            waiting.push_back(key);
        }
    }

    /// Takes the first `most`.
    pub(crate) fn take(&self, most: usize) -> Vec<ExpertKey> {
        let mut waiting = self.lock();
        let count = waiting.len().min(most);
        waiting.drain(..count).collect()
    }

    /// Every change under the lock is whole.
    fn lock(&self) -> MutexGuard<'_, VecDeque<ExpertKey>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_record_waits_once_and_so_many_at_most() {
        let reports = Reports::default();
        for expert in (0..5).chain(0..5) {
            reports.report(ExpertKey::new(1, expert));
        }
        let experts = |keys: Vec<ExpertKey>| keys.iter().map(|key| key.expert).collect::<Vec<_>>();
        assert_eq!(experts(reports.take(3)), [0, 1, 2]);
        assert_eq!(experts(reports.take(3)), [3, 4]);
        (0..1000).for_each(|expert| reports.report(ExpertKey::new(1, expert)));
        assert_eq!(reports.take(usize::MAX).len(), MAX_REPORTS);
    }
}
