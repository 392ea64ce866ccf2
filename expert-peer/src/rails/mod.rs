//! What the peer publishes over RDMA: its rails, and where in its memory the experts are.
//!
//! Order of a start: rails are chosen; the locked-memory limit and what the devices register are
//! held against what is needed; records are read into the region; it is registered once with each
//! device, for remote reading alone, however many clients will come. Only then is anything offered.
//! What the slots hold changes later (`residency/`), the registrations do not.
//!
//! A client's queue pairs are made in its handshake and destroyed with its control connection. The
//! peer posts nothing on them and polls nothing: READs are the device's work.

mod budget;
mod client;
mod resident;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use expert_tier::key::ExpertKey;
use expert_tier::store::{ExpertStore, StoreError};
use gpu_sys::limits::{Bytes, LockLimit};
use gpu_sys::pinned::PinError;
use gpu_sys::slots::SlotMemory;
use gpu_sys::verbs::{
    Access, Context, Library, Memory, MemoryRegion, ProtectionDomain, VerbsError,
};
use railset::choose::{RailSpec, Wish as RailWish};
use railset::driver;
use railset::handshake::peer::PeerRails;
use railset::message::MAX_QPS_PER_RAIL;
use railset::pairing::{ServeError, serve_rails};
use railset::table::{Column, TableError};

use crate::disk::Disk;
use crate::ledger::Ledger;
use crate::push::{PushCounts, PushEngine, PushError, PushOptions};
use crate::residency::keeper::{Keeper, Start};
use crate::residency::{ProfileError, Residency, ResidencyOptions, profile};
pub use budget::GRANT_BYTES_PER_RAIL;
use budget::{Bounds, Plan};
pub(crate) use client::{ClientEnd, RailClient};
use resident::Loaded;

/// Which rails a peer is to serve.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum RailsWish {
    /// Every active one; none is no error.
    #[default]
    Discover,
    /// None, even where there are some.
    Off,
    /// These.
    These(Vec<RailWish>),
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
    /// The profile cannot be used.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// There is not that much memory.
    #[error(
        "{} of memory are asked for to hold records in and to send others from, {} can be pinned by \
         {bound_by}: lower --dram-budget, --push-buffers or --push-pinned, free memory, or serve over \
         TCP alone with --rail none",
        Bytes(*bytes), Bytes(*usable_bytes)
    )]
    Memory {
        /// Bytes of the region and of the buffers.
        bytes: u64,
        /// Bytes that can be pinned beside the reserve for others.
        usable_bytes: u64,
        /// What sets the bound.
        bound_by: String,
    },
    /// Registering would go over the locked-memory limit.
    #[error(
        "publishing over RDMA needs {} of locked memory ({} for each of {devices} devices, {} for \
         spilled records), the limit is {limit}: raise `ulimit -l` (LimitMEMLOCK= in a systemd unit, \
         --ulimit memlock= for a container), grant CAP_IPC_LOCK, lower --dram-budget, --push-buffers \
         or --push-pinned, name fewer devices with --rail, or serve over TCP alone with --rail none",
        Bytes(*needed_bytes), Bytes(*bytes), Bytes(*spill_bytes)
    )]
    LockLimit {
        /// Bytes of the region.
        bytes: u64,
        /// Devices that register it.
        devices: u64,
        /// Bytes for spilled records, with all devices.
        spill_bytes: u64,
        /// Bytes in all, or of the pages that are pinned, whichever is more.
        needed_bytes: u64,
        /// The limit in force.
        limit: LockLimit,
    },
    /// A device does not register regions that large.
    #[error(
        "{device} registers at most {} at once, the records to hold need {}: lower --dram-budget, \
         name other devices with --rail, or serve over TCP alone with --rail none",
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
    #[error(
        "the memory for the published records: {source}; lower --dram-budget, or serve over TCP \
         alone with --rail none"
    )]
    Pin {
        /// Why not.
        source: PinError,
    },
    /// None of the records could be read.
    #[error("of the records to hold none can be read, {records} were tried: {source}")]
    Load {
        /// How many were tried.
        records: usize,
        /// Why the last of them could not.
        source: StoreError,
    },
    /// The table of all records would be larger than clients take.
    #[error("the published table: {source}")]
    Table {
        /// What is too large.
        source: TableError,
    },
    /// Spilled records cannot be sent.
    #[error(transparent)]
    Push(#[from] PushError),
}

/// What is to be published.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish<'a> {
    pub(crate) rails: &'a RailsWish,
    pub(crate) dram_budget: Option<u64>,
    pub(crate) profile: Option<&'a Path>,
    pub(crate) residency: ResidencyOptions,
    pub(crate) push: &'a PushOptions,
    /// What spilled records are read from.
    pub(crate) disk: &'a Disk,
}

/// What is offered to every client.
pub(crate) struct Published {
    rails: Arc<PeerRails>,
    domains: Vec<Arc<ProtectionDomain>>,
    /// For each rail which device it is on, by the order of the devices.
    of_rail: Vec<usize>,
    residency: Arc<Residency>,
    region_bytes: u64,
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
    /// Reads, registers and describes as much of `store` as is wished for, and gives the keeper of
    /// it, which is to run; `None` where there is no rail and none was asked for.
    pub(crate) fn new(
        store: &Arc<ExpertStore>,
        wish: Wish<'_>,
    ) -> Result<Option<(Self, Keeper)>, RailsError> {
        // What is wrong with what was asked for is said also where it is of no use: the host may come
        // up with a device the next time.
        let ledger = Arc::new(Ledger::new(store.manifest()));
        let profile = wish.profile.map(|path| profile::read(path, &ledger)).transpose()?;
        budget::hold_against_a_record(wish.dram_budget, store.manifest().layout())?;
        wish.push.check(budget::RANGE_BYTES)?;
        let Some((library, specs)) = find_rails(wish.rails)? else {
            if wish.dram_budget.is_some() || wish.profile.is_some() {
                tracing::warn!("no rails: a DRAM budget and a profile are of no use");
            }
            return Ok(None);
        };
        let (served, of_rail) = open_devices(&library, &specs)?;
        let most = |device: &Served| {
            (device.context.name().to_owned(), device.context.limits().max_mr_size)
        };
        let bounds = Bounds::current(served.iter().map(most).collect(), wish.push);
        let layout = store.manifest().layout();
        let plan = Plan::of(layout, wish.dram_budget, &bounds)?;
        let records = plan.first_records(profile.as_deref());
        let all: Vec<ExpertKey> = layout.keys().collect();
        let keys: Vec<_> = records.iter().map(|&record| all[record]).collect();
        let Loaded { memory, slots, sound } = resident::load(store, &plan, &keys, &ledger)?;
        let published = records.iter().zip(sound).map(|(&record, sound)| sound.then_some(record));
        let records = published.collect();
        let regions = register(&served, &memory, &plan)?;
        let column = |&device: &usize| {
            let region: &MemoryRegion = &regions[device];
            Column { base: region.address(), rkey: region.rkey() }
        };
        let columns = of_rail.iter().map(column).collect();
        let start = Start { slots, slot_bytes: plan.slot_bytes, records, columns };
        let (residency, keeper) =
            Keeper::new(store.manifest(), Arc::clone(&ledger), start, wish.residency)
                .map_err(|source| RailsError::Table { source })?;
        let terms = plan.spill(wish.push.transfer);
        let (generation, layers) = (residency.live().generation(), layout.layers().len() as u32);
        let most_pairs = MAX_QPS_PER_RAIL as u8;
        let rails = PeerRails::new(&specs, most_pairs, layers, generation, plan.slot_bytes, terms);
        let domains = of_rail.iter().map(|&device| Arc::clone(&served[device].domain)).collect();
        let devices = served.iter().map(|device| Arc::clone(&device.domain)).collect();
        let start = |terms| PushEngine::start(store, &ledger, devices, terms, wish.push, wish.disk);
        let push = terms.map(start).transpose()?;
        let (rails, region_bytes) = (Arc::new(rails), plan.bytes());
        let published =
            Self { rails, domains, of_rail, residency, region_bytes, push, _regions: regions };
        Ok(Some((published, keeper)))
    }

    /// Devices of the rails, in the order of the offer.
    pub(crate) fn rail_names(&self) -> Vec<String> {
        let name = |rail: &railset::message::OfferedRail| {
            format!("{} port {} ({})", rail.device, rail.port, rail.gid)
        };
        self.rails.offer().rails.iter().map(name).collect()
    }

    /// Where spilled records come from and how, and what has come of it; `None` where none are.
    pub(crate) fn pushes(&self) -> Option<((&'static str, &'static str), PushCounts)> {
        self.push.as_ref().map(|push| (push.names(), push.counts()))
    }

    /// Which records are in memory.
    pub(crate) fn residency(&self) -> &Arc<Residency> {
        &self.residency
    }

    /// Bytes of the region that holds records.
    pub(crate) fn region_bytes(&self) -> u64 {
        self.region_bytes
    }
}

/// The library, and the rails that are to be served.
type FoundRails = (Arc<Library>, Vec<RailSpec>);

/// The library and the rails, or `None` where discovery finds none.
fn find_rails(wish: &RailsWish) -> Result<Option<FoundRails>, RailsError> {
    let wishes: &[RailWish] = match wish {
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

/// Registers the region with every device at once: pinning takes the kernel a while per gigabyte.
fn register(
    served: &[Served],
    pages: &Arc<SlotMemory>,
    plan: &Plan,
) -> Result<Vec<MemoryRegion>, RailsError> {
    let bytes = plan.bytes() as usize;
    let register_with = |device: &Served| {
        let started = Instant::now();
        let region = publish(&device.domain, Arc::clone(pages) as Arc<dyn Memory>, bytes)?;
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

/// Registers memory so that clients may read it, and nobody may write.
fn publish(
    domain: &Arc<ProtectionDomain>,
    memory: Arc<dyn Memory>,
    bytes: usize,
) -> Result<MemoryRegion, VerbsError> {
    MemoryRegion::register(domain, memory, 0..bytes, Access::RemoteRead)
}
