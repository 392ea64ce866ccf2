//! What the peer publishes over RDMA: its rails, and where in its memory the experts are.
//!
//! Order of a start: devices are chosen; the locked-memory limit and what the devices register are
//! held against what is needed; records are read into the region; it is registered once with each
//! device, for remote reading alone, however many clients will come. Only then is anything offered.
//! What the slots hold changes later (`residency/`).
//!
//! Devices and ports come and go while the peer runs (`devices.rs`). Each client is offered what its
//! own survey finds, and a thread registers devices that come and drops those that are gone.
//!
//! A client's queue pairs are made in its handshake and destroyed with its control connection. The
//! peer posts nothing on them and polls nothing: READs are the device's work.

mod budget;
mod client;
mod devices;
mod resident;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use expert_tier::key::ExpertKey;
use expert_tier::store::{ExpertStore, StoreError};
use gpu_sys::limits::{Bytes, LockLimit};
use gpu_sys::pinned::PinError;
use gpu_sys::verbs::VerbsError;
use railset::choose::Wish as RailWish;
use railset::handshake::peer::PeerRails;
use railset::message::{MAX_QPS_PER_RAIL, SpillTerms};
use railset::pairing::ServeError;
use railset::table::{Column, TableError};

use crate::disk::Disk;
use crate::ledger::Ledger;
use crate::push::{PushCounts, PushEngine, PushError, PushOptions};
use crate::residency::keeper::{Keeper, Start};
use crate::residency::{ProfileError, Residency, ResidencyOptions, profile};
pub use budget::GRANT_BYTES_PER_RAIL;
use budget::{Bounds, Plan};
pub(crate) use client::{ClientEnd, RailClient};
pub(crate) use devices::SurveyThread;
use devices::{Devices, Served};
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
    /// No rail can be served, and RDMA is required.
    #[error(
        "--require-rails (METRALE_REQUIRE_RAILS): no rail can be served: {0}; without it the peer \
         serves over TCP and offers rails when there are some"
    )]
    Required(String),
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
    /// Whether a peer that can serve no rail does not start.
    pub(crate) require: bool,
    /// From one look at the devices to the next, where none of them says anything.
    pub(crate) survey: Duration,
    pub(crate) dram_budget: Option<u64>,
    pub(crate) profile: Option<&'a Path>,
    pub(crate) residency: ResidencyOptions,
    pub(crate) push: &'a PushOptions,
    /// What spilled records are read from.
    pub(crate) disk: &'a Disk,
}

/// What is offered to every client.
pub(crate) struct Published {
    devices: Arc<Devices>,
    residency: Arc<Residency>,
    layers: u32,
    slot_bytes: u64,
    region_bytes: u64,
    terms: Option<SpillTerms>,
    /// What serves the records that are spilled, if any are.
    push: Option<Arc<PushEngine>>,
}

/// What a client is offered, by the survey that was made for it.
pub(crate) struct Offered {
    rails: PeerRails,
    /// The device of each rail.
    served: Vec<Arc<Served>>,
}

impl Published {
    /// Reads, registers and describes as much of `store` as is wished for, and gives the keeper of
    /// it, which is to run; `None` where the host has no device and none was asked for.
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
        let Some(devices) = Devices::find(wish.rails, wish.require, wish.survey)? else {
            if wish.dram_budget.is_some() || wish.profile.is_some() {
                tracing::warn!("no rails: a DRAM budget and a profile are of no use");
            }
            return Ok(None);
        };
        let bounds = Bounds::current(devices.bounds(), wish.push);
        let layout = store.manifest().layout();
        let plan = Plan::of(layout, wish.dram_budget, &bounds)?;
        let records = plan.first_records(profile.as_deref());
        let all: Vec<ExpertKey> = layout.keys().collect();
        let keys: Vec<_> = records.iter().map(|&record| all[record]).collect();
        let Loaded { memory, slots, sound } = resident::load(store, &plan, &keys, &ledger)?;
        let published = records.iter().zip(sound).map(|(&record, sound)| sound.then_some(record));
        let records = published.collect();
        // A client's table has the columns of its own rails; no client READs by this one.
        let columns = vec![Column { base: memory.pages().address().addr().get() as u64, rkey: 0 }];
        let start = Start { slots, slot_bytes: plan.slot_bytes, records, columns };
        let (residency, keeper) =
            Keeper::new(store.manifest(), Arc::clone(&ledger), start, wish.residency)
                .map_err(|source| RailsError::Table { source })?;
        let terms = plan.spill(wish.push.transfer);
        let push = |domains| {
            let start =
                |terms| PushEngine::start(store, &ledger, domains, terms, wish.push, wish.disk);
            terms.map(start).transpose()
        };
        let push = devices.register(memory, plan.bytes(), push)?;
        let (layers, slot_bytes) = (layout.layers().len() as u32, plan.slot_bytes);
        let region_bytes = plan.bytes();
        let devices = Arc::new(devices);
        let published = Self { devices, residency, layers, slot_bytes, region_bytes, terms, push };
        Ok(Some((published, keeper)))
    }

    /// Surveys the devices, and gives what a client that comes now is offered; `None` where no rail
    /// can be served.
    pub(crate) fn offer(&self) -> Option<Offered> {
        let (specs, served) = self.devices.survey();
        if specs.is_empty() {
            return None;
        }
        let generation = self.residency.live().generation();
        let most_pairs = MAX_QPS_PER_RAIL as u8;
        let Self { layers, slot_bytes, terms, .. } = *self;
        let rails = PeerRails::new(&specs, most_pairs, layers, generation, slot_bytes, terms);
        Some(Offered { rails, served })
    }

    /// The rails that a client that comes now is offered, in the order of the offer.
    pub(crate) fn rail_names(&self) -> Vec<String> {
        let name = |rail: &railset::choose::RailSpec| {
            format!("{} port {} ({})", rail.device, rail.port, rail.gid)
        };
        self.devices.survey().0.iter().map(name).collect()
    }

    /// Starts the thread that follows the devices; it ends with what this gives.
    pub(crate) fn follow_devices(&self) -> std::io::Result<SurveyThread> {
        devices::follow(&self.devices)
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
