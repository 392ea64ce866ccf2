//! The table that clients read by, and how far each of them has followed it.
//!
//! A table is published by putting it here; each connection's thread sends it to its own client when
//! it next looks, and says here what that client acknowledges. A slot may be rewritten once every
//! client has put away the tables that name it, or when those that have not have had their time:
//! what they read then fails their check.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use railset::table::Table;

/// The current table, and the clients that have one.
pub(crate) struct LiveTable {
    /// Of the current table, so that looking for a newer one takes no lock.
    generation: AtomicU64,
    state: Mutex<State>,
    /// A client has acknowledged something, or is gone.
    acknowledged: Condvar,
}

struct State {
    table: Arc<Table>,
    /// What each client has acknowledged.
    clients: HashMap<u64, u64>,
    next_client: u64,
}

/// A client's place among those that are waited for; it is given up when dropped.
pub(crate) struct Seat {
    live: Arc<LiveTable>,
    client: u64,
}

impl LiveTable {
    /// Starts with `table`.
    pub(crate) fn new(table: Table) -> Self {
        let generation = AtomicU64::new(table.generation());
        let state = State { table: Arc::new(table), clients: HashMap::new(), next_client: 0 };
        Self { generation, state: Mutex::new(state), acknowledged: Condvar::new() }
    }

    /// The generation of the current table.
    pub(crate) fn generation(&self) -> u64 {
        // Whoever sees a new one takes the lock to get at its table.
        self.generation.load(Ordering::Relaxed)
    }

    /// The current table.
    pub(crate) fn table(&self) -> Arc<Table> {
        Arc::clone(&self.lock().table)
    }

    /// Makes `table` the current one.
    pub(crate) fn publish(&self, table: Table) {
        let generation = table.generation();
        let mut state = self.lock();
        state.table = Arc::new(table);
        self.generation.store(generation, Ordering::Relaxed);
    }

    /// A place for a client that is about to get a table: it has acknowledged none. Taken before the
    /// table is, so that no newer one can pass between the two unnoticed.
    pub(crate) fn enter(self: &Arc<Self>) -> Seat {
        let mut state = self.lock();
        let client = state.next_client;
        state.next_client += 1;
        state.clients.insert(client, 0);
        Seat { live: Arc::clone(self), client }
    }

    /// Waits until every client has acknowledged `generation`, at most for `bound`; says how many
    /// have not.
    pub(crate) fn wait_acknowledged(&self, generation: u64, bound: Duration) -> usize {
        let behind = |state: &State| state.clients.values().filter(|it| **it < generation).count();
        let lagging = |state: &mut State| behind(state) > 0;
        let waited = self.acknowledged.wait_timeout_while(self.lock(), bound, lagging);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        behind(&state)
    }

    /// Every change under the lock is whole.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seat {
    /// The client reads by the table of `generation`, and by no older one.
    pub(crate) fn acknowledged(&self, generation: u64) {
        self.live.lock().clients.insert(self.client, generation);
        self.live.acknowledged.notify_all();
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.live.lock().clients.remove(&self.client);
        self.live.acknowledged.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use railset::table::{Column, LayerTable};

    use super::*;

    fn table(generation: u64) -> Table {
        let columns = vec![Column { base: 1, rkey: 1 }];
        let layer = LayerTable { layer: 0, slot_stride: 4096, columns, slots: vec![0] };
        Table::new(generation, vec![layer]).unwrap()
    }

    #[test]
    fn every_client_is_waited_for_until_it_follows_or_leaves() {
        const SHORT: Duration = Duration::from_millis(1);
        const LONG: Duration = Duration::from_secs(20);
        let live = Arc::new(LiveTable::new(table(1)));
        assert_eq!(live.wait_acknowledged(1, LONG), 0, "nobody is there");
        let (one, other) = (live.enter(), live.enter());
        live.publish(table(2));
        assert_eq!((live.generation(), live.table().generation()), (2, 2));
        assert_eq!(live.wait_acknowledged(2, SHORT), 2);
        one.acknowledged(1);
        assert_eq!(live.wait_acknowledged(2, SHORT), 2);
        std::thread::scope(|scope| {
            scope.spawn(|| one.acknowledged(2));
            scope.spawn(move || drop(other));
            assert_eq!(live.wait_acknowledged(2, LONG), 0);
        });
    }
}
