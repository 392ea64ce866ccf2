//! The devices that a peer serves rails on, and the region of records registered with each.
//!
//! | what happens | who sees it | what follows |
//! |---|---|---|
//! | a port comes up or goes down, a GID moves, an MTU changes | the survey for the next client | the offer |
//! | a device appears | the thread, within `--survey-ms` | it is opened and registered once |
//! | a device fails, is taken out or renamed | the thread, by an event or within `--survey-ms` | its clients' connections end; then it is deregistered and closed |
//!
//! A survey reads each open device's ports and GID tables, and waits for no other device or client.
//! Opening and registering take time with the size of the region, so the thread alone does them after
//! the start. A registration that fails costs the rails of its device: the log says so once for each
//! reason, and it is tried again after [`RETRY`], or when another device was closed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gpu_sys::limits::Bytes;
use gpu_sys::slots::SlotMemory;
use gpu_sys::verbs::{
    Access, AsyncEvent, Context, Library, Memory, MemoryRegion, PortFacts, ProtectionDomain,
    VerbsError,
};
use railset::choose::{RailSpec, Wish};
use railset::driver;
use railset::facts::DeviceFacts;
use railset::pairing::{RailsNow, ServeError, rails_now};
use railset::table::Column;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{RailsError, RailsWish};
use crate::push::{Bell, PushEngine, PushError};

/// How long a device that could not be registered is left alone.
const RETRY: Duration = Duration::from_secs(30);
/// Looks between two surveys that nothing asked for: a GID that moved without an event is in the log
/// by then.
const FULL_LOOK: u32 = 10;

/// The devices that are open, and what is registered with them.
pub(super) struct Devices {
    library: Arc<Library>,
    /// The rails that are wished for; none is every one that there is.
    wishes: Vec<Wish>,
    interval: Duration,
    known: Mutex<Vec<Known>>,
    shared: OnceLock<Shared>,
    said: Mutex<Said>,
}

/// What every device registers.
struct Shared {
    memory: Arc<SlotMemory>,
    bytes: usize,
    push: Option<Arc<PushEngine>>,
}

/// A device that is open.
#[derive(Clone)]
struct Known {
    context: Arc<Context>,
    served: Option<Arc<Served>>,
    /// Not registered before this moment, since that failed.
    retry_at: Option<Instant>,
    /// Its ports when they were last looked at.
    ports: Vec<PortFacts>,
}

/// A device with the region registered. The registration goes when nobody holds this any more, which
/// is after the queue pairs of the device's clients.
pub(super) struct Served {
    region: MemoryRegion,
    domain: Arc<ProtectionDomain>,
    push_device: Option<usize>,
    lost: AtomicBool,
}

/// What the log has said, so that it says each thing once.
#[derive(Default)]
struct Said {
    rails: Vec<String>,
    missing: Option<String>,
    left_out: BTreeMap<String, String>,
}

impl Served {
    pub(super) fn new(
        (domain, region): (Arc<ProtectionDomain>, MemoryRegion),
        push_device: Option<usize>,
    ) -> Self {
        Self { region, domain, push_device, lost: AtomicBool::new(false) }
    }

    pub(super) fn name(&self) -> &str {
        self.domain.context().name()
    }

    pub(super) fn domain(&self) -> &Arc<ProtectionDomain> {
        &self.domain
    }

    /// Where clients READ through this device.
    pub(super) fn column(&self) -> Column {
        Column { base: self.region.address(), rkey: self.region.rkey() }
    }

    /// The device's number where spilled records are sent from.
    pub(super) fn push_device(&self) -> Option<usize> {
        self.push_device
    }

    /// Whether the device failed or is gone: what is on it ends.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }
}

impl Devices {
    /// The devices for `wish`, open and not registered. `None` where none is wished for, or where there
    /// is no device and any would do.
    pub(super) fn find(
        wish: &RailsWish,
        require: bool,
        interval: Duration,
    ) -> Result<Option<Self>, RailsError> {
        let wishes = match wish {
            RailsWish::Off => return Ok(None),
            RailsWish::Discover => Vec::new(),
            RailsWish::These(wishes) => wishes.clone(),
        };
        let optional = wishes.is_empty() && !require;
        let over_tcp = |reason: &dyn std::fmt::Display| {
            tracing::warn!(%reason, "no rails: records are served over TCP alone until a restart");
            Ok(None)
        };
        let library = match Library::open() {
            Err(error) if optional => return over_tcp(&error),
            library => library?,
        };
        let devices = Self::of(library, wishes, interval);
        devices.open_new()?;
        let RailsNow { rails, missing } = devices.rails_now(&devices.facts())?;
        if let Some(twice) = missing.iter().find(|it| matches!(it, ServeError::OneRail { .. })) {
            return Err(twice.clone().into());
        }
        let why = missing.first().map(ToString::to_string).unwrap_or_default();
        if rails.is_empty() && require {
            return Err(RailsError::Required(why));
        }
        if optional && devices.lock().is_empty() {
            return over_tcp(&why);
        }
        Ok(Some(devices))
    }

    /// Devices of `library`, none of them open.
    pub(super) fn of(library: Arc<Library>, wishes: Vec<Wish>, interval: Duration) -> Self {
        let (known, shared, said) = Default::default();
        Self { library, wishes, interval, known, shared, said }
    }

    /// The devices that are to be registered at the start, each with its `max_mr_size`; a rail whose
    /// device is not there yet counts as one, since it is to have its share of locked memory.
    pub(super) fn bounds(&self) -> Vec<(String, u64)> {
        let facts = self.facts();
        let mut bounds: Vec<_> = self.wanted(&facts).iter().map(bound).collect();
        let is_missing = |wish: &&Wish| !facts.iter().any(|it| wish.is_for(it, &facts));
        let missing = self.wishes.iter().filter(is_missing);
        bounds.extend(missing.map(|wish| (wish.device.clone().unwrap_or_default(), u64::MAX)));
        bounds
    }

    /// Registers `memory` with the devices that are wanted now, at once: pinning takes the kernel a
    /// while per gigabyte. Then starts what sends spilled records through them.
    ///
    /// # Errors
    /// No device registers it, though there are some.
    pub(super) fn register(
        &self,
        memory: Arc<SlotMemory>,
        bytes: u64,
        push: impl FnOnce(Vec<Arc<ProtectionDomain>>) -> Result<Option<PushEngine>, PushError>,
    ) -> Result<Option<Arc<PushEngine>>, RailsError> {
        let facts = self.facts();
        let wanted: Vec<_> = self.wanted(&facts).iter().map(|it| it.name.clone()).collect();
        let mut known = self.lock().clone();
        let bytes = bytes as usize;
        let registered: Vec<_> = std::thread::scope(|scope| {
            let memory = &memory;
            let is_wanted = |it: &&mut Known| wanted.iter().any(|name| name == it.context.name());
            let start = |device: &mut Known| {
                let context = Arc::clone(&device.context);
                scope.spawn(move || register(&context, memory, bytes))
            };
            let mut started = Vec::new();
            for device in known.iter_mut().filter(is_wanted) {
                started.push((start(device), device));
            }
            let join = |(thread, device): (std::thread::ScopedJoinHandle<'_, _>, _)| {
                (thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), device)
            };
            started.into_iter().map(join).collect()
        });
        let (mut served, mut first_error) = (Vec::new(), None);
        for (outcome, device) in registered {
            match outcome {
                Ok(registration) => served.push((registration, device)),
                Err(error) => {
                    self.leave_out(device.context.name(), Some(&error));
                    device.retry_at = Some(Instant::now() + RETRY);
                    first_error = first_error.or(Some(error));
                }
            }
        }
        if let (true, Some(error)) = (served.is_empty(), first_error) {
            return Err(error.into());
        }
        let domains = served.iter().map(|((domain, _), _)| Arc::clone(domain)).collect();
        let push = push(domains)?.map(Arc::new);
        for (at, (registration, device)) in served.into_iter().enumerate() {
            let push_device = push.is_some().then_some(at);
            device.served = Some(Arc::new(Served::new(registration, push_device)));
        }
        self.replace(known);
        let _first = self.shared.set(Shared { memory, bytes, push: push.clone() });
        self.survey();
        Ok(push)
    }

    /// The rails that can be served now, and the device of each.
    pub(super) fn survey(&self) -> (Vec<RailSpec>, Vec<Arc<Served>>) {
        let known = self.lock().clone();
        let now = match self.rails_now(&facts_of(&known)) {
            Ok(now) => now,
            Err(error) => RailsNow { rails: Vec::new(), missing: vec![error] },
        };
        let served = |name: &str| {
            let device = known.iter().find(|it| it.context.name() == name)?;
            device.served.clone().filter(|served| !served.is_lost())
        };
        let mut found = Vec::new();
        let mut said = Vec::new();
        for choice in now.rails {
            if let Some(served) = served(&choice.spec.device) {
                said.push(choice.to_string());
                found.push((choice.spec, served));
            }
        }
        self.say(said, &now.missing);
        found.into_iter().unzip()
    }

    /// Logs the rails that came and went since the last survey.
    fn say(&self, rails: Vec<String>, missing: &[ServeError]) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let missing: Vec<_> = missing.iter().map(ToString::to_string).collect();
        let missing = Some(missing.join("; ")).filter(|missing| !missing.is_empty());
        if said.rails == rails && said.missing == missing {
            return;
        }
        for rail in rails.iter().filter(|rail| !said.rails.contains(rail)) {
            tracing::info!("rail {rail}");
        }
        for gone in said.rails.iter().filter(|rail| !rails.contains(rail)) {
            tracing::info!("no more a rail: {gone}");
        }
        let reason = missing.as_deref().unwrap_or("no device could register the records");
        if rails.is_empty() {
            tracing::warn!(
                reason,
                "no rails: records are served over TCP alone until there are some"
            );
        } else if missing.is_some() && said.missing != missing {
            tracing::warn!(reason, "a rail is missing; it is served when it is there");
        }
        (said.rails, said.missing) = (rails, missing);
    }

    /// Opens the devices that are there and are not open, as far as they may be wanted.
    fn open_new(&self) -> Result<(), VerbsError> {
        let listed = self.library.devices()?;
        let mut known = self.lock().clone();
        let facts = facts_of(&known);
        let is_found = |wish: &Wish| facts.iter().any(|it| wish.is_for(it, &facts));
        if !self.wishes.is_empty() && self.wishes.iter().all(is_found) {
            return Ok(());
        }
        for listing in listed {
            if known.iter().any(|it| it.context.name() == listing.name) {
                continue;
            }
            let opened = self.library.open_device(&listing.name);
            self.leave_out(&listing.name, opened.as_ref().err());
            let Ok(context) = opened else { continue };
            known.push(Known { context, served: None, retry_at: None, ports: Vec::new() });
        }
        let facts = facts_of(&known);
        let is_wanted = |name: &str| {
            let device = facts.iter().find(|it| it.name == name);
            let wished = |it| self.wishes.iter().any(|wish| wish.is_for(it, &facts));
            self.wishes.is_empty() || device.is_some_and(wished)
        };
        known.retain(|it| it.served.is_some() || is_wanted(it.context.name()));
        self.replace(known);
        Ok(())
    }

    /// Follows what happened to the devices.
    fn look(&self, look: u32) {
        let listed = match self.library.devices() {
            Ok(listed) => listed,
            Err(error) => return tracing::debug!(%error, "the RDMA devices cannot be listed"),
        };
        let mut changed = look.is_multiple_of(FULL_LOOK);
        let mut known = self.lock().clone();
        let before = known.len();
        known.retain_mut(|device| {
            let name = device.context.name();
            let is_listed = listed.iter().any(|it| it.name == name);
            let (events, fate) = fate(&device.context, is_listed);
            let ports = ports(&device.context);
            changed |= events || ports != device.ports;
            device.ports = ports;
            let Some(fate) = fate else { return true };
            tracing::warn!(
                device = name,
                reason = fate,
                "a device is closed, and its clients' rails end"
            );
            if let Some(served) = &device.served {
                served.lost.store(true, Ordering::Relaxed);
                let push = self.shared.get().and_then(|shared| shared.push.as_ref());
                if let (Some(push), Some(at)) = (push, served.push_device) {
                    push.remove_device(at);
                }
            }
            false
        });
        if known.len() < before {
            known.iter_mut().for_each(|it| it.retry_at = None);
            changed = true;
        }
        let names = known.iter().map(|it| it.context.name().to_owned()).collect::<Vec<_>>();
        changed |= listed.iter().any(|it| !names.contains(&it.name));
        self.replace(known);
        if !changed {
            return;
        }
        if let Err(error) = self.open_new() {
            tracing::debug!(%error, "the RDMA devices cannot be listed");
        }
        self.register_new();
        self.survey();
    }

    /// Registers the region with the devices that are wanted and have not got it.
    fn register_new(&self) {
        let Some(shared) = self.shared.get() else { return };
        let facts = self.facts();
        let wanted: Vec<_> = self.wanted(&facts).iter().map(|it| it.name.clone()).collect();
        let mut known = self.lock().clone();
        for device in known.iter_mut().filter(|it| it.served.is_none()) {
            let name = device.context.name();
            let is_due = device.retry_at.is_none_or(|at| at <= Instant::now());
            if !is_due || !wanted.iter().any(|it| it == name) {
                continue;
            }
            let registered = serve(&device.context, shared);
            self.leave_out(name, registered.as_ref().err());
            match registered {
                Ok(served) => device.served = Some(Arc::new(served)),
                Err(_) => device.retry_at = Some(Instant::now() + RETRY),
            }
        }
        self.replace(known);
    }

    /// Logs why a device is left out, once for each reason; `None` is that it is not.
    fn leave_out<E: std::fmt::Display>(&self, device: &str, why: Option<&E>) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(why) = why.map(ToString::to_string) else {
            said.left_out.remove(device);
            return;
        };
        if said.left_out.get(device) != Some(&why) {
            tracing::warn!(device, reason = why, "this device serves no rails for now");
            said.left_out.insert(device.to_owned(), why);
        }
    }

    /// Those of `facts` that the region is registered with: what was named; else what has a rail, and
    /// where none has, every one, so that a port that comes up later is served at once.
    fn wanted<'a>(&self, facts: &'a [DeviceFacts]) -> Vec<&'a DeviceFacts> {
        let rails = self.rails_now(facts).unwrap_or_default().rails;
        let has_rail = |it: &&DeviceFacts| rails.iter().any(|rail| rail.spec.device == it.name);
        let all = !self.wishes.is_empty() || rails.is_empty();
        facts.iter().filter(|it| all || has_rail(it)).collect()
    }

    fn rails_now(&self, facts: &[DeviceFacts]) -> Result<RailsNow, ServeError> {
        rails_now(facts, &self.wishes)
    }

    fn facts(&self) -> Vec<DeviceFacts> {
        facts_of(&self.lock().clone())
    }

    /// Makes `known` the list. What is in the old one alone goes once the lock is free: deregistering a
    /// region takes long, and every offer looks at the list.
    fn replace(&self, known: Vec<Known>) {
        let old = std::mem::replace(&mut *self.lock(), known);
        drop(old);
    }

    /// Each change is one assignment, so a poisoned lock guards sound data.
    fn lock(&self) -> MutexGuard<'_, Vec<Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the open devices have; one that does not answer is left out.
fn facts_of(known: &[Known]) -> Vec<DeviceFacts> {
    known.iter().filter_map(|device| driver::facts(&device.context).ok()).collect()
}

fn bound(device: &&DeviceFacts) -> (String, u64) {
    (device.name.clone(), device.max_mr_size)
}

/// The ports of a device; those that do not answer are left out.
fn ports(context: &Context) -> Vec<PortFacts> {
    (1..=context.limits().ports).filter_map(|port| context.port(port).ok()).collect()
}

/// Takes a device's events: whether there were any, and why the device is of no use any more, if it
/// is not.
fn fate(context: &Context, is_listed: bool) -> (bool, Option<&'static str>) {
    let mut any = false;
    loop {
        match context.next_event() {
            Ok(None) => break,
            Ok(Some(event)) => {
                tracing::info!(device = context.name(), ?event, "the device says");
                any = true;
                if event == AsyncEvent::DeviceFatal {
                    return (any, Some("the device failed"));
                }
            }
            Err(_) => return (any, Some("the device does not answer")),
        }
    }
    match (is_listed, context.is_current()) {
        (false, _) => (any, Some("the device is not there any more under this name")),
        (true, false) => (any, Some("the device was taken out and is there anew")),
        (true, true) if ports(context).is_empty() => (any, Some("the device does not answer")),
        (true, true) => (any, None),
    }
}

/// A protection domain, and the region registered in it for remote reading.
pub(super) fn register(
    context: &Arc<Context>,
    memory: &Arc<SlotMemory>,
    bytes: usize,
) -> Result<(Arc<ProtectionDomain>, MemoryRegion), VerbsError> {
    let started = Instant::now();
    let domain = ProtectionDomain::new(context)?;
    let memory: Arc<dyn Memory> = Arc::<SlotMemory>::clone(memory);
    let region = MemoryRegion::register(&domain, memory, 0..bytes, Access::RemoteRead)?;
    tracing::info!(device = context.name(), region = %Bytes(bytes as u64),
        ms = started.elapsed().as_millis(), "registered for remote reading");
    Ok((domain, region))
}

/// Registers everything with a device that has come.
fn serve(context: &Arc<Context>, shared: &Shared) -> Result<Served, RailsError> {
    let (domain, region) = register(context, &shared.memory, shared.bytes)?;
    let add = |push: &Arc<PushEngine>| push.add_device(&domain);
    let push_device = shared.push.as_ref().map(add).transpose()?;
    Ok(Served::new((domain, region), push_device))
}

/// Ends the thread that follows the devices when dropped, and waits for it.
pub(crate) struct SurveyThread {
    stop: Arc<AtomicBool>,
    bell: Bell,
    thread: Option<JoinHandle<()>>,
}

impl Drop for SurveyThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.bell.ring();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that follows the RDMA devices had panicked");
        }
    }
}

/// Starts a thread that follows the devices, until what this gives is dropped.
pub(super) fn follow(devices: &Arc<Devices>) -> std::io::Result<SurveyThread> {
    let (stop, bell) = (Arc::new(AtomicBool::new(false)), Bell::new()?);
    let (stopped, woken, devices) = (Arc::clone(&stop), bell.clone(), Arc::clone(devices));
    let run = move || {
        let mut look = 0_u32;
        while !stopped.load(Ordering::Relaxed) {
            look = look.wrapping_add(1);
            devices.look(look);
            wait(&devices, &woken);
        }
    };
    let thread = Some(std::thread::Builder::new().name("rails".into()).spawn(run)?);
    Ok(SurveyThread { stop, bell, thread })
}

/// Waits for an event of a device, for the bell, or for the interval.
fn wait(devices: &Devices, bell: &Bell) {
    let contexts: Vec<_> = devices.lock().iter().map(|it| Arc::clone(&it.context)).collect();
    let mut fds = vec![PollFd::new(bell, PollFlags::IN)];
    fds.extend(contexts.iter().map(|context| PollFd::new(context, PollFlags::IN)));
    let interval = Timespec::try_from(devices.interval).ok();
    // Interrupted or not, everything is looked at.
    let _woken = poll(&mut fds, interval.as_ref());
}
