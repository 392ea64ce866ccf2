//! What the peer publishes over RDMA: its rails, and where in its memory the experts are.
//!
//! Order of a start: rails are chosen; the locked-memory limit and what the devices register are
//! held against what is needed; records are read into the region; it is registered once with each
//! device, for remote reading alone, however many clients will come. Only then is anything offered.
//!
//! A client's queue pairs are made in its handshake and destroyed with its control connection. The
//! peer posts nothing on them and polls nothing: READs are the device's work.

mod client;
mod resident;

use std::sync::Arc;
use std::time::Instant;

use expert_tier::store::{ExpertStore, StoreError};
use gpu_sys::limits::{Bytes, IpcLock, LockLimit};
use gpu_sys::pinned::{PinError, PinnedPages};
use gpu_sys::verbs::{
    Access, Context, Library, Memory, MemoryRegion, ProtectionDomain, VerbsError,
};
use railset::choose::{RailSpec, Wish};
use railset::driver;
use railset::handshake::peer::PeerRails;
use railset::message::MAX_QPS_PER_RAIL;
use railset::pairing::{ServeError, serve_rails};
use railset::table::{Column, LayerTable, SPILLED, Table, TableError};

use crate::ledger::Ledger;
use crate::push::{PushCounts, PushEngine, PushError, PushOptions};
pub(crate) use client::{ClientEnd, RailClient};
use resident::Plan;

/// The generation of a table that never changes.
const GENERATION: u64 = 1;

/// Which rails a peer is to serve.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum RailsWish {
    /// Every active one; none is no error.
    #[default]
    Discover,
    /// None, even where there are some.
    Off,
    /// These.
    These(Vec<Wish>),
}

/// Why rails cannot be published.
#[derive(Debug, thiserror::Error)]
pub enum RailsError {
    /// This build has no verbs, or the system none.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// The rails that are wished for cannot be had.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The region that holds all records is larger than memory can be.
    #[error("all records together need {}, more than can be addressed", Bytes(*bytes))]
    TooLarge {
        /// Bytes needed.
        bytes: u64,
    },
    /// The budget holds not even one record.
    #[error(
        "--dram-budget {} is less than one record of the largest layer: give {} or more",
        Bytes(*budget), Bytes(*slot_bytes)
    )]
    Budget {
        /// Bytes allowed.
        budget: u64,
        /// Bytes of a slot.
        slot_bytes: u64,
    },
    /// Registering would go over the locked-memory limit.
    #[error(
        "publishing over RDMA needs {} of locked memory ({} for each of {devices} devices), the \
         limit is {limit}: raise `ulimit -l` (LimitMEMLOCK= in a systemd unit, --ulimit memlock= for \
         a container), grant CAP_IPC_LOCK, name fewer devices with --rail, or serve over TCP alone \
         with --rail none",
        Bytes(*needed_bytes), Bytes(*bytes)
    )]
    LockLimit {
        /// Bytes of the region.
        bytes: u64,
        /// Devices that register it.
        devices: u64,
        /// Bytes for all of them.
        needed_bytes: u64,
        /// The limit in force.
        limit: LockLimit,
    },
    /// A device does not register regions that large.
    #[error(
        "{device} registers at most {} at once, all records together need {}: name other devices \
         with --rail, or serve over TCP alone with --rail none",
        Bytes(*max_bytes), Bytes(*bytes)
    )]
    MaxRegion {
        /// The device.
        device: String,
        /// Its `max_mr_size`.
        max_bytes: u64,
        /// Bytes of the region.
        bytes: u64,
    },
    /// The region's memory could not be pinned.
    #[error("the memory for the published records: {source}; --rail none serves over TCP alone")]
    Pin {
        /// Why not.
        source: PinError,
    },
    /// A record could not be read.
    #[error("reading the records to publish: {source}")]
    Load {
        /// Why not.
        source: StoreError,
    },
    /// The table of all records would be larger than clients take.
    #[error("the published table: {source}")]
    Table {
        /// What is too large.
        source: TableError,
    },
    /// Spilled records cannot be sent.
    #[error("{0}; without --dram-budget nothing is spilled")]
    Push(#[from] PushError),
}

/// What is offered to every client.
pub(crate) struct Published {
    rails: Arc<PeerRails>,
    domains: Vec<Arc<ProtectionDomain>>,
    /// For each rail which device it is on, by the order of the devices.
    of_rail: Vec<usize>,
    table: Table,
    plan: Plan,
    ledger: Arc<Ledger>,
    /// What serves the records that are spilled, if any are.
    push: Option<PushEngine>,
    // Holds the memory; registrations hold it too, and go first.
    _regions: Vec<MemoryRegion>,
}

/// A device that serves one or more rails.
struct Served {
    context: Arc<Context>,
    domain: Arc<ProtectionDomain>,
}

impl Published {
    /// Reads, registers and describes all of `store`; `None` where there is no rail and none was
    /// asked for.
    pub(crate) fn new(
        store: &Arc<ExpertStore>,
        wish: &RailsWish,
        dram_budget: Option<u64>,
        push: &PushOptions,
    ) -> Result<Option<Self>, RailsError> {
        let Some((library, specs)) = find_rails(wish)? else { return Ok(None) };
        let plan = Plan::of(store, dram_budget)?;
        let (served, of_rail) = open_devices(&library, &specs)?;
        let most = |device: &Served| {
            (device.context.name().to_owned(), device.context.limits().max_mr_size)
        };
        let devices: Vec<_> = served.iter().map(most).collect();
        let terms = plan.spill(push.transfer);
        let buffers = terms.map_or(0, |_| push.locked_bytes());
        let bytes = plan.bytes().saturating_add(buffers);
        hold_against_limits(&devices, bytes, LockLimit::current())?;
        let pages = Arc::new(resident::load(store, plan)?);
        let regions = register(&served, &pages, plan)?;
        let table = describe(store, plan, &of_rail, &regions)?;
        let layers = table.layers().len() as u32;
        let most_pairs = MAX_QPS_PER_RAIL as u8;
        let rails = PeerRails::new(&specs, most_pairs, layers, GENERATION, plan.slot_bytes, terms);
        let domains = of_rail.iter().map(|&device| Arc::clone(&served[device].domain)).collect();
        let (rails, ledger) = (Arc::new(rails), Arc::new(Ledger::new(store.manifest())));
        let devices = served.iter().map(|device| Arc::clone(&device.domain)).collect();
        let start = |terms| PushEngine::start(store, &ledger, devices, terms, push);
        let push = terms.map(start).transpose()?;
        Ok(Some(Self { rails, domains, of_rail, table, plan, ledger, push, _regions: regions }))
    }

    /// Devices of the rails, in the order of the offer.
    pub(crate) fn rail_names(&self) -> Vec<String> {
        let name = |rail: &railset::message::OfferedRail| {
            format!("{} port {} ({})", rail.device, rail.port, rail.gid)
        };
        self.rails.offer().rails.iter().map(name).collect()
    }

    /// What is known of each record.
    pub(crate) fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// Where spilled records come from and how, and what has come of it; `None` where none are.
    pub(crate) fn pushes(&self) -> Option<((&'static str, &'static str), PushCounts)> {
        self.push.as_ref().map(|push| (push.names(), push.counts()))
    }

    /// Records held in memory, and the bytes of the region that holds them.
    pub(crate) fn resident(&self) -> (u64, u64) {
        (self.plan.slots, self.plan.bytes())
    }
}

/// The library, and the rails that are to be served.
type FoundRails = (Arc<Library>, Vec<RailSpec>);

/// The library and the rails, or `None` where discovery finds none.
fn find_rails(wish: &RailsWish) -> Result<Option<FoundRails>, RailsError> {
    let wishes: &[Wish] = match wish {
        RailsWish::Off => return Ok(None),
        RailsWish::Discover => &[],
        RailsWish::These(wishes) => wishes,
    };
    let found = Library::open().and_then(|library| Ok((driver::devices(&library)?, library)));
    let optional = *wish == RailsWish::Discover;
    let (devices, library) = match found {
        Err(error) if optional => {
            tracing::info!(reason = %error, "no rails: records are served over TCP alone");
            return Ok(None);
        }
        found => found?,
    };
    let choices = match serve_rails(&devices, wishes) {
        Err(error) if optional => {
            tracing::info!(reason = %error, "no rails: records are served over TCP alone");
            return Ok(None);
        }
        choices => choices?,
    };
    choices.iter().for_each(|choice| tracing::info!("rail {choice}"));
    Ok(Some((library, choices.into_iter().map(|choice| choice.spec).collect())))
}

/// Each device once, and for each rail which one it is on.
fn open_devices(
    library: &Arc<Library>,
    specs: &[RailSpec],
) -> Result<(Vec<Served>, Vec<usize>), RailsError> {
    let mut served: Vec<Served> = Vec::new();
    let mut of_rail = Vec::new();
    for spec in specs {
        let known = served.iter().position(|device| device.context.name() == spec.device);
        of_rail.push(known.unwrap_or(served.len()));
        if known.is_none() {
            let context = library.open_device(&spec.device)?;
            served.push(Served { domain: ProtectionDomain::new(&context)?, context });
        }
    }
    Ok((served, of_rail))
}

/// Holds a region of `bytes` against what each device registers at once, and against what the
/// process may lock. Before anything is read: a refusal after half an hour of loading would be no
/// help.
fn hold_against_limits(
    devices: &[(String, u64)],
    bytes: u64,
    limit: LockLimit,
) -> Result<(), RailsError> {
    if let Some((device, max_bytes)) = devices.iter().find(|(_, most)| bytes > *most) {
        let (device, max_bytes) = (device.clone(), *max_bytes);
        return Err(RailsError::MaxRegion { device, max_bytes, bytes });
    }
    let devices = devices.len() as u64;
    let needed_bytes = bytes.saturating_mul(devices);
    if limit.capability != IpcLock::Granted && limit.soft_bytes.is_some_and(|s| needed_bytes > s) {
        return Err(RailsError::LockLimit { bytes, devices, needed_bytes, limit });
    }
    Ok(())
}

/// Registers the region with every device at once: pinning takes the kernel a while per gigabyte.
fn register(
    served: &[Served],
    pages: &Arc<PinnedPages>,
    plan: Plan,
) -> Result<Vec<MemoryRegion>, RailsError> {
    let bytes = plan.bytes() as usize;
    let register_with = |device: &Served| {
        let started = Instant::now();
        let memory: Arc<dyn Memory> = Arc::clone(pages) as Arc<dyn Memory>;
        let region = MemoryRegion::register(&device.domain, memory, 0..bytes, Access::RemoteRead)?;
        tracing::info!(device = device.context.name(), region = %Bytes(bytes as u64),
            ms = started.elapsed().as_millis(), "registered for remote reading");
        Ok(region)
    };
    std::thread::scope(|scope| {
        let register_with = &register_with;
        let started: Vec<_> =
            served.iter().map(|device| scope.spawn(move || register_with(device))).collect();
        let joined = started.into_iter().map(|thread| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        joined.collect()
    })
}

/// The table: record `n` is in slot `n`, whatever its layer, as far as there are slots.
fn describe(
    store: &ExpertStore,
    plan: Plan,
    of_rail: &[usize],
    regions: &[MemoryRegion],
) -> Result<Table, RailsError> {
    let columns: Vec<Column> = of_rail
        .iter()
        .map(|&device| Column { base: regions[device].address(), rkey: regions[device].rkey() })
        .collect();
    let (mut next, slots) = (0, plan.slots as u32);
    let layers = store.manifest().layout().layers().iter().map(|layer| {
        let first = next;
        next += layer.experts();
        let slot = |record| if record < slots { record } else { SPILLED };
        LayerTable {
            layer: layer.layer(),
            slot_stride: plan.slot_bytes,
            columns: columns.clone(),
            slots: (first..next).map(slot).collect(),
        }
    });
    Table::new(GENERATION, layers.collect()).map_err(|source| RailsError::Table { source })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn limit(soft_bytes: Option<u64>, capability: IpcLock) -> LockLimit {
        LockLimit { soft_bytes, hard_bytes: soft_bytes, locked_bytes: 0, capability }
    }

    fn devices() -> Vec<(String, u64)> {
        vec![("rxe0".into(), 64 * GIB), ("rxe1".into(), 48 * GIB)]
    }

    #[test]
    fn locked_memory_is_needed_once_for_each_device() {
        let hold = |bytes, limit| hold_against_limits(&devices(), bytes, limit);
        let allowed = limit(Some(20 * GIB), IpcLock::Absent);
        hold(10 * GIB, allowed).expect("twice 10 GiB");
        let error = hold(10 * GIB + 1, allowed).unwrap_err();
        assert!(matches!(error, RailsError::LockLimit { devices: 2, .. }), "{error}");
        let text = error.to_string();
        for part in ["2 devices", "20 GiB", "ulimit -l", "--rail none"] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        hold(40 * GIB, limit(Some(20 * GIB), IpcLock::Granted)).expect("the capability lifts it");
        hold(40 * GIB, limit(None, IpcLock::Absent)).expect("no limit");
        hold_against_limits(&devices(), u64::MAX / 2, allowed).expect_err("no overflow");
    }

    #[test]
    fn a_device_that_registers_less_at_once_is_named() {
        let none = limit(None, IpcLock::Absent);
        hold_against_limits(&devices(), 48 * GIB, none).expect("exactly what it takes");
        let error = hold_against_limits(&devices(), 48 * GIB + 1, none).unwrap_err();
        let text = error.to_string();
        for part in ["rxe1", "48 GiB", "--rail none"] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
    }
}
