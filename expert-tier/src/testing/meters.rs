//! A metrics recorder that a test looks into, and through which it can hold a backend's threads.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use metrics::{
    Counter, CounterFn, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};

/// Counters by name and labels, such as `metrale_fetch_total{backend=uma,outcome=ok}`.
///
/// A test sets it for its own thread with [`metrics::with_local_recorder`]; a backend that is made
/// there counts here wherever its threads run.
#[derive(Clone, Default)]
pub struct Meters(Arc<Mutex<State>>);

type Action = Arc<dyn Fn() + Send + Sync>;

#[derive(Default)]
struct State {
    counts: BTreeMap<String, u64>,
    actions: BTreeMap<String, Action>,
}

/// One counter.
struct Meter {
    meters: Meters,
    name: String,
    labelled: String,
}

impl Meters {
    /// A recorder that has counted nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// What the counter with these labels, in order, has come to.
    #[must_use]
    pub fn count(&self, labelled: &str) -> u64 {
        self.lock().counts.get(labelled).copied().unwrap_or_default()
    }

    /// From now on does `action` whenever a counter named `name` counts, on the thread that counts.
    pub fn on(&self, name: &str, action: impl Fn() + Send + Sync + 'static) {
        self.lock().actions.insert(name.into(), Arc::new(action));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CounterFn for Meter {
    fn increment(&self, value: u64) {
        let mut state = self.meters.lock();
        *state.counts.entry(self.labelled.clone()).or_default() += value;
        let action = state.actions.get(&self.name).cloned();
        drop(state);
        action.into_iter().for_each(|action| action());
    }

    fn absolute(&self, value: u64) {
        self.meters.lock().counts.insert(self.labelled.clone(), value);
    }
}

impl Recorder for Meters {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let name = key.name().to_owned();
        let labels: Vec<_> = key.labels().map(|l| format!("{}={}", l.key(), l.value())).collect();
        let labelled = format!("{name}{{{}}}", labels.join(","));
        Counter::from_arc(Arc::new(Meter { meters: self.clone(), name, labelled }))
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}
