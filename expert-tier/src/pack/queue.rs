//! Which records a worker packs next.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use crate::layout::{ExpertLayout, LayerLayout};

/// Bytes of consecutive records that a worker claims at a time.
const RUN_BYTES: u64 = 64 << 20;

/// Consecutive experts of one layer.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct Run {
    /// The layer's position in the layout.
    pub(super) layer: usize,
    pub(super) experts: Range<u32>,
}

/// Hands out runs so that workers write to different files while there are enough of them:
/// two writers of one file wait for each other in the kernel.
pub(super) struct Queue(Mutex<Vec<Pending>>);

struct Pending {
    runs: VecDeque<Range<u32>>,
    workers: usize,
}

impl Queue {
    /// All records of `layout` but those that are `known`, by layer and expert.
    pub(super) fn new(layout: &ExpertLayout, known: &[Vec<bool>]) -> Self {
        let pending = |(layer, known): (&LayerLayout, &Vec<bool>)| {
            let per_run = u32::try_from(RUN_BYTES / layer.stride()).unwrap_or(u32::MAX).max(1);
            let mut runs: VecDeque<Range<u32>> = VecDeque::new();
            for (expert, _) in (0..layer.experts()).zip(known).filter(|(_, known)| !**known) {
                match runs.back_mut() {
                    Some(run) if run.end == expert && run.end - run.start < per_run => run.end += 1,
                    _ => runs.push_back(expert..expert + 1),
                }
            }
            Pending { runs, workers: 0 }
        };
        Self(Mutex::new(layout.layers().iter().zip(known).map(pending).collect()))
    }

    /// The next run of the layer `previous` if it has one, else of the one with fewest workers.
    pub(super) fn claim(&self, previous: Option<usize>) -> Option<Run> {
        // A poisoned lock means that a worker panicked; that panic is raised when it is joined.
        let mut layers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(previous) = previous {
            layers[previous].workers -= 1;
        }
        let open = |layer: &Pending| !layer.runs.is_empty();
        let index = match previous {
            Some(index) if open(&layers[index]) => index,
            _ => (0..layers.len())
                .filter(|&i| open(&layers[i]))
                .min_by_key(|&i| layers[i].workers)?,
        };
        let layer = &mut layers[index];
        let experts = layer.runs.pop_front()?;
        layer.workers += 1;
        Some(Run { layer: index, experts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pack::SyntheticSpec;

    #[test]
    fn every_record_that_is_not_known_is_handed_out_once() {
        // Three records of the first layer make a run.
        let spec: SyntheticSpec = "layers=2,experts=7,bytes=20000000".parse().unwrap();
        let layout = spec.layout(262_144).unwrap();
        let mut known = vec![vec![false; 7]; 2];
        known[0][3] = true;
        known[1] = vec![true, true, true, true, true, false, true];
        let queue = Queue::new(&layout, &known);
        let run = |layer, experts| Some(Run { layer, experts });
        assert_eq!(queue.claim(None), run(0, 0..3));
        assert_eq!(queue.claim(None), run(1, 5..6));
        assert_eq!(queue.claim(Some(0)), run(0, 4..7));
        assert_eq!(queue.claim(Some(1)), None);
    }
}
