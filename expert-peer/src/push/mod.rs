//! Sending the records that are not in memory: pushes, and stages.
//!
//! A client has one queue pair for them on each rail, its *lane*; the queue pairs that READs come on
//! are never touched. One thread serves every lane ([`engine`]), by a desk that says who is next
//! ([`desk`]), from a source that reads the disk beside it ([`spill`]).
//!
//! A lane whose queue pair breaks is ended with its client's control connection: the client's other
//! queue pairs go with that, and it comes back with new ones. Nobody else is affected.

mod bell;
mod desk;
mod engine;
mod lane;
mod options;
mod place;
mod spill;
mod stats;

use std::collections::{BTreeMap, HashMap};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::JoinHandle;

use expert_tier::store::ExpertStore;
use gpu_sys::verbs::{
    CompletionChannel, CompletionQueue, LocalEnd, MinRnrTimer, PreparedQueuePair, ProtectionDomain,
    QueuePair, QueuePairOptions, RemoteEnd, VerbsError,
};
use railset::message::{SpillTerms, Transfer};

use crate::disk::Disk;
use crate::ledger::Ledger;
pub(crate) use bell::Bell;
pub(crate) use desk::ClientId;
use desk::{Desk, LaneId};
use engine::{Engine, Mail, Unreadable, per_client};
use lane::{Carried, Lane};
pub(crate) use options::SpillMemory;
pub use options::{PushError, PushOptions, SpillWish};
use spill::{Makings, Registrar, Spill};
pub(crate) use stats::{PushCounts, PushStats};

/// The RNR timer of lanes: how long a client is told to wait for which no receive is posted. One is
/// posted for everything that a client may have under way, so this concerns a client that goes beyond
/// while the thread has not come to look: 2.56 ms is longer than a turn of the thread's, and short
/// enough that such a client is soon found out. 0 would be 655 ms.
const RNR_TIMER: u8 = 16;

/// What serves spilled records. Dropping it ends every lane and waits for the thread.
pub(crate) struct PushEngine {
    /// By their numbers, which are used once; `None` where one is gone.
    devices: RwLock<Vec<Option<PushDevice>>>,
    registrar: Registrar,
    terms: SpillTerms,
    per_client: usize,
    source: &'static str,
    post: Post,
    next_lane: AtomicU64,
    stats: Arc<PushStats>,
    thread: Option<JoinHandle<()>>,
}

/// A device that spilled records are sent through.
#[derive(Clone)]
struct PushDevice {
    domain: Arc<ProtectionDomain>,
    channel: Arc<CompletionChannel>,
}

impl PushDevice {
    fn new(domain: Arc<ProtectionDomain>) -> Result<Self, VerbsError> {
        let channel = CompletionChannel::new(domain.context())?;
        Ok(Self { domain, channel })
    }
}

/// The way to the thread.
#[derive(Clone)]
struct Post {
    mail: Sender<Mail>,
    bell: Bell,
}

impl Post {
    fn send(&self, mail: Mail) {
        // A thread that has ended has ended its lanes, too.
        let _taken = self.mail.send(mail);
        self.bell.ring();
    }
}

/// A lane's queue pair that is not connected.
pub(crate) struct PreparedLane {
    prepared: PreparedQueuePair<Carried>,
    queue: Arc<CompletionQueue>,
    device: usize,
}

/// Keeps a lane; dropping it ends the lane, soon after.
pub(crate) struct LaneTicket {
    post: Post,
    lane: LaneId,
}

impl PushEngine {
    /// Opens a source of spilled records, and starts the thread. `devices` are those of the rails,
    /// each once.
    pub(crate) fn start(
        store: &Arc<ExpertStore>,
        ledger: &Arc<Ledger>,
        devices: Vec<Arc<ProtectionDomain>>,
        terms: SpillTerms,
        options: &PushOptions,
        disk: &Disk,
    ) -> Result<Self, PushError> {
        let bell = Bell::new().map_err(PushError::Bell)?;
        let range_bytes = terms.range_bytes;
        let makings = Makings { store, options, devices: &devices, range_bytes, bell: &bell };
        let spill = Spill::open(&makings)?;
        let source = spill.name();
        tracing::info!(
            source,
            transfer = transfer_name(terms.transfer),
            buffers = spill.room(),
            reads = spill.reads(),
            "spilled records are sent when they are asked for"
        );
        let registrar = spill.registrar(store);
        let devices: Vec<_> = devices.into_iter().map(PushDevice::new).collect::<Result<_, _>>()?;
        let channels = devices.iter().map(|device| Some(Arc::clone(&device.channel))).collect();
        let stats = Arc::<PushStats>::default();
        let (sender, mail) = channel();
        let per_client = per_client(spill.room());
        let engine = Engine {
            lanes: BTreeMap::new(),
            staged: HashMap::new(),
            desk: Desk::new(Engine::limits(terms, &spill, options), disk.clone()),
            spill,
            terms,
            deadline: options.deadline,
            stall: options.stall,
            manifest: Arc::clone(store.manifest()),
            ledger: Arc::clone(ledger),
            channels,
            mail,
            bell: bell.clone(),
            stats: Arc::clone(&stats),
            unreadable: Unreadable::default(),
        };
        let (post, name) = (Post { mail: sender, bell }, "push");
        let builder = std::thread::Builder::new().name(name.into());
        let thread = builder.spawn(move || engine.run());
        let thread = Some(thread.map_err(|source| PushError::Thread { name, source })?);
        let next_lane = AtomicU64::new(0);
        let devices = RwLock::new(devices.into_iter().map(Some).collect());
        Ok(Self { devices, registrar, terms, per_client, source, post, next_lane, stats, thread })
    }

    /// Registers what is sent with a device that has come, and gives its number.
    pub(crate) fn add_device(&self, domain: &Arc<ProtectionDomain>) -> Result<usize, PushError> {
        let device = PushDevice::new(Arc::clone(domain))?;
        // One thread adds devices, so the number is still free when the registration is there.
        let at = self.devices.read().unwrap_or_else(PoisonError::into_inner).len();
        let region = self.registrar.add(at, domain)?;
        self.post.send(Mail::Device(at, region, Arc::clone(&device.channel)));
        self.devices.write().unwrap_or_else(PoisonError::into_inner).push(Some(device));
        Ok(at)
    }

    /// Ends the lanes on a device that is gone, and drops what is registered with it, soon after.
    pub(crate) fn remove_device(&self, at: usize) {
        let mut devices = self.devices.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = devices.get_mut(at) {
            *device = None;
        }
        drop(devices);
        self.registrar.remove(at);
        self.post.send(Mail::DeviceGone(at));
    }

    /// Makes the queue pair of a client's lane on a port of device `device`.
    pub(crate) fn prepare(&self, device: usize, port: u8) -> Result<PreparedLane, VerbsError> {
        let devices = self.devices.read().unwrap_or_else(PoisonError::into_inner);
        let known = devices.get(device).cloned().flatten();
        drop(devices);
        // One that is gone between the offer and this is no device any more.
        let Some(PushDevice { domain, channel }) = known else {
            let (name, found) = (format!("number {device} of the spilled records"), Vec::new());
            return Err(VerbsError::NoSuchDevice { name, found });
        };
        let SpillTerms { transfer, credits, .. } = self.terms;
        let max_wr = domain.context().limits().max_qp_wr;
        let sizes = lane::sizes(transfer, credits.into(), self.per_client, max_wr);
        let options = QueuePairOptions { port, ..sizes };
        let entries = options.send_wr + options.recv_wr;
        let queue = CompletionQueue::with_channel(&channel, entries)?;
        let prepared = QueuePair::prepare(&domain, &queue, &queue, options)?;
        Ok(PreparedLane { prepared, queue, device })
    }

    /// Connects a lane of `client`'s and begins to serve it. `socket` is its control connection.
    pub(crate) fn connect(
        &self,
        lane: PreparedLane,
        (remote, local): (&RemoteEnd, &LocalEnd),
        client: ClientId,
        socket: TcpStream,
    ) -> Result<LaneTicket, VerbsError> {
        let PreparedLane { prepared, queue, device } = lane;
        let local = LocalEnd { min_rnr_timer: MinRnrTimer::new(RNR_TIMER)?, ..*local };
        let queue_pair = prepared.connect(remote, &local).map_err(|error| error.source)?;
        let id = LaneId(self.next_lane.fetch_add(1, Ordering::Relaxed));
        let lane = Lane::new(queue_pair, queue, device, socket);
        self.stats.lane_came();
        self.post.send(Mail::Lane(id, client, Box::new(lane)));
        Ok(LaneTicket { post: self.post.clone(), lane: id })
    }

    /// Where the records are read from, and how they come to clients.
    pub(crate) fn names(&self) -> (&'static str, &'static str) {
        (self.source, transfer_name(self.terms.transfer))
    }

    pub(crate) fn counts(&self) -> PushCounts {
        self.stats.counts()
    }
}

impl PreparedLane {
    pub(crate) fn number(&self) -> u32 {
        self.prepared.number()
    }
}

impl Drop for LaneTicket {
    fn drop(&mut self) {
        self.post.send(Mail::Left(self.lane));
    }
}

impl Drop for PushEngine {
    fn drop(&mut self) {
        self.post.send(Mail::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that sends spilled records had panicked");
        }
    }
}

/// The name for logs, flags and the status.
fn transfer_name(transfer: Transfer) -> &'static str {
    match transfer {
        Transfer::Push => "push",
        Transfer::Stage => "stage",
    }
}
