//! The arenas that no rail takes, so that a batch of requests does not register one of them again for
//! each request.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpu_sys::verbs::VerbsError;

use crate::arena::{ExpertArena, WeakArena};

/// The refused arenas, and why each is refused.
#[derive(Default)]
pub(super) struct RefusedArenas(Mutex<List>);

#[derive(Default)]
struct List {
    /// Changes whenever a refusal may no longer hold.
    age: u64,
    refused: Vec<(WeakArena, Arc<VerbsError>)>,
}

impl RefusedArenas {
    /// Why `arena` is refused; `None` where it may be tried.
    pub(super) fn why(&self, arena: &ExpertArena) -> Option<Arc<VerbsError>> {
        let list = self.lock();
        let found = list.refused.iter().find(|(refused, _)| refused.is(arena));
        found.map(|(_, why)| Arc::clone(why))
    }

    /// What [`note`](Self::note) is told, taken before an arena is tried.
    pub(super) fn age(&self) -> u64 {
        self.lock().age
    }

    /// `arena` was refused, unless a rail has come up since `age` was taken: that rail may take it.
    pub(super) fn note(&self, age: u64, arena: &ExpertArena, why: &Arc<VerbsError>) {
        let mut list = self.lock();
        if list.age != age {
            return;
        }
        list.refused.retain(|(refused, _)| !refused.is_gone() && !refused.is(arena));
        list.refused.push((arena.downgrade(), Arc::clone(why)));
    }

    /// `arena` is tried again.
    pub(super) fn forget(&self, arena: &ExpertArena) {
        self.lock().refused.retain(|(refused, _)| !refused.is(arena));
    }

    /// A rail is up, which may take what was refused.
    pub(super) fn forget_all(&self) {
        let mut list = self.lock();
        list.age += 1;
        list.refused.clear();
    }

    /// No state is left half-changed by the code under this lock.
    fn lock(&self) -> MutexGuard<'_, List> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
