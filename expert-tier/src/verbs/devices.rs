//! The devices that a client uses, and the arenas registered with them.
//!
//! A device is opened once and kept, so that a peer that comes back costs no registration. An arena
//! is registered once per device, whole: registering is slow, and a slot's address is all that a
//! READ needs. The registration lets the device write what our own READs bring, and peers nothing. A
//! peer that is to write gets a registration of its own of the bytes that it is to write.
//!
//! Opening a device and registering an arena take as long as the arena is large, and no setting bounds
//! that. So neither is done under a lock that a request takes, and no registration is dropped under one:
//! the lists are locked to look something up, to add it or to take it out, and locks of their own keep
//! two threads from opening one device twice ([`Devices::opening`]) or registering one arena twice
//! ([`Device::registering`]).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use gpu_sys::verbs::{
    Access, CompletionChannel, Context, Landing, Library, Memory, MemoryRegion, PortState,
    ProtectionDomain, VerbsError,
};
use railset::choose::{Asker, ChooseError, choose};
use railset::driver;
use railset::facts::DeviceFacts;
use railset::pairing::{DualRail, RailWishes};

use super::OpenError;
use crate::arena::{ArenaId, ExpertArena, Part};

/// The library, and what was opened of it.
pub(super) struct Devices {
    library: Arc<Library>,
    known: Mutex<Known>,
    /// One lock for each device's name, held while that device is opened. Opening one device does not
    /// wait for another.
    opening: Mutex<BTreeMap<String, Arc<Mutex<()>>>>,
}

/// Devices and arenas, under one lock: a new device and a new arena cannot miss each other.
#[derive(Default)]
struct Known {
    /// Each has every arena registered that was known when it was added.
    opened: Vec<Arc<Device>>,
    /// Every arena that was named or used, for devices that are opened later.
    arenas: Vec<ExpertArena>,
}

/// An open device.
pub(super) struct Device {
    domain: Arc<ProtectionDomain>,
    /// Wakes whoever waits for what peers were asked for.
    channel: OnceLock<Arc<CompletionChannel>>,
    registered: Mutex<Vec<Registered>>,
    /// Arenas that the device refuses to register; its rails end.
    refused: Mutex<Vec<ArenaId>>,
    /// Held while an arena is registered.
    registering: Mutex<()>,
}

/// An arena that a device knows.
struct Registered {
    id: ArenaId,
    memory: Arc<dyn Memory>,
    region: Arc<MemoryRegion>,
}

impl Devices {
    pub(super) fn open() -> Result<Self, VerbsError> {
        Ok(Self::of(Library::open()?))
    }

    pub(super) fn of(library: Arc<Library>) -> Self {
        Self { library, known: Mutex::default(), opening: Mutex::default() }
    }

    /// Fails where no device, port and GID could carry any rail, whoever the peer is; where two are asked
    /// for and one of them has nothing; and where a device is named that does not exist.
    pub(super) fn fit(&self, wishes: &RailWishes) -> Result<(), OpenError> {
        Ok(fit(&self.facts()?, wishes)?)
    }

    /// What devices there are now, and how their ports are.
    pub(super) fn facts(&self) -> Result<Vec<DeviceFacts>, VerbsError> {
        driver::devices(&self.library)
    }

    /// The device called `name`, with every known arena registered. Waits for whoever opens it already.
    pub(super) fn device(&self, name: &str) -> Result<Arc<Device>, VerbsError> {
        let opening = Arc::clone(lock(&self.opening).entry(name.to_owned()).or_default());
        let _opening = lock(&opening);
        loop {
            let mut known = lock(&self.known);
            // A device that was taken out and made anew has its name, and nothing else, of the old one.
            let is_stale = |it: &mut Arc<Device>| it.name() == name && !it.context().is_current();
            let stale: Vec<_> = known.opened.extract_if(.., is_stale).collect();
            let opened = known.opened.iter().find(|it| it.name() == name).cloned();
            drop(known);
            drop(stale);
            let is_new = opened.is_none();
            let device = match opened {
                Some(device) => device,
                None => {
                    let domain = ProtectionDomain::new(&self.library.open_device(name)?)?;
                    Arc::new(Device::of(domain))
                }
            };
            if self.register_all(&device, is_new)? {
                return Ok(device);
            }
        }
    }

    /// Registers every known arena with `device`, and adds it if it is new. False where it was forgotten
    /// meanwhile.
    fn register_all(&self, device: &Arc<Device>, is_new: bool) -> Result<bool, VerbsError> {
        loop {
            let mut known = lock(&self.known);
            // Also one that the device has refused before.
            let new = known.arenas.iter().find(|arena| device.region(arena.id()).is_none());
            if let Some(arena) = new.cloned() {
                drop(known);
                device.register(&arena)?;
                continue;
            }
            let dropped = device.take_unlisted(&known.arenas);
            if is_new {
                known.opened.push(Arc::clone(device));
            }
            let is_there = known.opened.iter().any(|it| Arc::ptr_eq(it, device));
            drop(known);
            drop(dropped);
            return Ok(is_there);
        }
    }

    /// Drops `device`. The next [`device`](Self::device) of its name opens it again and registers every
    /// arena with it.
    pub(super) fn forget(&self, device: &Arc<Device>) {
        let mut known = lock(&self.known);
        let forgotten: Vec<_> =
            known.opened.extract_if(.., |known| Arc::ptr_eq(known, device)).collect();
        drop(known);
        // The last handle on it deregisters every arena.
        drop(forgotten);
    }

    /// Adds the open devices that `devices` lacks.
    pub(super) fn add_opened(&self, devices: &mut Vec<Arc<Device>>) {
        for device in &lock(&self.known).opened {
            if !devices.iter().any(|it| Arc::ptr_eq(it, device)) {
                devices.push(Arc::clone(device));
            }
        }
    }

    /// Registers `arena` with every open device, and with those that are opened later. Returns the
    /// devices that refuse.
    pub(super) fn register(&self, arena: &ExpertArena) -> Vec<(Arc<Device>, VerbsError)> {
        let mut known = lock(&self.known);
        if !known.arenas.iter().any(|it| it.id() == arena.id()) {
            known.arenas.push(arena.clone());
        }
        let opened = known.opened.clone();
        drop(known);
        let refused =
            |device: &Arc<Device>| Some((Arc::clone(device), device.register(arena).err()?));
        let refusals = opened.iter().filter_map(refused).collect();
        let known = lock(&self.known);
        let dropped: Vec<_> =
            opened.iter().flat_map(|device| device.take_unlisted(&known.arenas)).collect();
        drop(known);
        drop(dropped);
        refusals
    }

    /// Drops the registrations of `arena`, and registers it with no device that is opened later.
    pub(super) fn drop_arena(&self, arena: ArenaId) {
        let mut known = lock(&self.known);
        let listed: Vec<_> = known.arenas.extract_if(.., |it| it.id() == arena).collect();
        let dropped: Vec<_> =
            known.opened.iter().flat_map(|device| device.take_unlisted(&known.arenas)).collect();
        drop(known);
        drop((dropped, listed));
    }

    /// Devices that are open.
    pub(super) fn opened(&self) -> usize {
        lock(&self.known).opened.len()
    }

    /// Whether every open device has registered `arena`, or refused to. Waits for no registration.
    pub(super) fn knows(&self, arena: &ExpertArena) -> bool {
        let known = lock(&self.known);
        known.arenas.iter().any(|it| it.id() == arena.id())
            && known.opened.iter().all(|device| device.knows(arena.id()))
    }
}

impl Device {
    fn of(domain: Arc<ProtectionDomain>) -> Self {
        Self {
            domain,
            channel: OnceLock::new(),
            registered: Mutex::default(),
            refused: Mutex::default(),
            registering: Mutex::default(),
        }
    }

    pub(super) fn name(&self) -> &str {
        self.domain.context().name()
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        self.domain.context()
    }

    /// Whether a port carries traffic at the moment; a port that does not answer does not.
    pub(super) fn is_active(&self, port: u8) -> bool {
        let state = self.context().port(port).map(|facts| facts.state);
        matches!(state, Ok(PortState::Active | PortState::ActiveDeferred))
    }

    /// The channel of the queues that are waited for without looking, made when it is first asked for.
    pub(super) fn channel(&self) -> Result<Arc<CompletionChannel>, VerbsError> {
        if let Some(channel) = self.channel.get() {
            return Ok(Arc::clone(channel));
        }
        // Two that make one at once keep one of them.
        let made = CompletionChannel::new(self.context())?;
        Ok(Arc::clone(self.channel.get_or_init(|| made)))
    }

    pub(super) fn domain(&self) -> &Arc<ProtectionDomain> {
        &self.domain
    }

    /// The registration of an arena; `None` if it has none here. Waits for no registration.
    pub(super) fn region(&self, arena: ArenaId) -> Option<Arc<MemoryRegion>> {
        let registered = lock(&self.registered);
        registered.iter().find(|it| it.id == arena).map(|it| Arc::clone(&it.region))
    }

    /// Whether it has registered an arena, or refused to.
    fn knows(&self, arena: ArenaId) -> bool {
        self.region(arena).is_some() || lock(&self.refused).contains(&arena)
    }

    /// Registers `bytes` of the largest arena again as a grant is, and undoes it: whether a grant has
    /// room beside what is registered. No peer is told of it.
    pub(super) fn try_grant(&self, bytes: usize) -> Result<(), VerbsError> {
        let registered = lock(&self.registered);
        let largest = registered.iter().max_by_key(|it| it.memory.region().1);
        let Some(memory) = largest.map(|it| Arc::clone(&it.memory)) else { return Ok(()) };
        drop(registered);
        let bytes = bytes.min(memory.region().1);
        MemoryRegion::register(&self.domain, memory, 0..bytes, Access::RemoteWrite).map(drop)
    }

    /// Drops the registration of an arena, which counts as refused from then on.
    pub(super) fn refuse(&self, arena: ArenaId) {
        let mut refused = lock(&self.refused);
        if !refused.contains(&arena) {
            refused.push(arena);
        }
        drop(refused);
        let mut registered = lock(&self.registered);
        let dropped: Vec<_> = registered.extract_if(.., |it| it.id == arena).collect();
        drop(registered);
        drop(dropped);
    }

    /// Forgets every arena that is not among `listed`. Its registration is for the caller to drop, where
    /// no lock is held: deregistering takes as long as the arena is large.
    fn take_unlisted(&self, listed: &[ExpertArena]) -> Vec<Registered> {
        let is_listed = |id: ArenaId| listed.iter().any(|arena| arena.id() == id);
        lock(&self.refused).retain(|id| is_listed(*id));
        lock(&self.registered).extract_if(.., |it| !is_listed(it.id)).collect()
    }

    /// Registers the bytes of `part`, and no more, for a peer to write.
    pub(super) fn grant(&self, part: &Part) -> Result<MemoryRegion, VerbsError> {
        let (start, bytes) = part.landing();
        let registered = lock(&self.registered);
        let arena = registered.iter().find(|it| it.id == part.arena_id());
        let memory = arena.map(|it| Arc::clone(&it.memory));
        drop(registered);
        let Some(memory) = memory else {
            return Err(VerbsError::Range { start: 0, end: bytes, bytes: 0 });
        };
        // A part lies in its arena's memory.
        let from = start.as_ptr().addr() - memory.region().0.as_ptr().addr();
        MemoryRegion::register(&self.domain, memory, from..from + bytes, Access::RemoteWrite)
    }

    /// Registers `arena`, unless it is registered. Waits for another registration in progress.
    fn register(&self, arena: &ExpertArena) -> Result<(), VerbsError> {
        let _registering = lock(&self.registering);
        if self.region(arena.id()).is_some() {
            return Ok(());
        }
        let memory: Arc<dyn Memory> = Arc::new(arena.clone());
        let bytes = memory.region().1;
        let shared = Arc::clone(&memory);
        let region = MemoryRegion::register(&self.domain, shared, 0..bytes, Access::LocalWrite)
            .inspect_err(|_| self.refuse(arena.id()))?;
        tracing::debug!(device = self.name(), bytes, "the arena is registered");
        let registered = Registered { id: arena.id(), memory, region: Arc::new(region) };
        lock(&self.registered).push(registered);
        lock(&self.refused).retain(|id| *id != arena.id());
        Ok(())
    }
}

fn fit(facts: &[DeviceFacts], wishes: &RailWishes) -> Result<(), ChooseError> {
    let rails = wishes.for_rails().iter().zip([Asker::Rail1, Asker::Rail2]);
    let errors = rails.filter_map(|(wish, asker)| choose(facts, asker, wish, None, None).err());
    let errors: Vec<_> = errors.collect();
    let is_missing =
        |error: &&ChooseError| matches!(error, ChooseError::WishedDeviceMissing { .. });
    // A port may come up, and an interface get its address; a name stays wrong.
    let fatal = errors.iter().find(is_missing).or_else(|| {
        let need_all = wishes.dual == DualRail::Two || errors.len() == wishes.for_rails().len();
        errors.first().filter(|_| need_all)
    });
    fatal.cloned().map_or(Ok(()), Err)
}

/// A list here changes by one push, so a poisoned lock guards sound data.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use railset::choose::Wish;
    use railset::facts::{Gid, GidFacts, GidKind, LinkLayer, Mtu, PortFacts, PortState};

    use super::*;

    fn device(name: &str, number: u8, state: PortState) -> DeviceFacts {
        let mut gid = [0; 16];
        gid[10..].copy_from_slice(&[0xff, 0xff, 10, number, 0, 1]);
        let gids = vec![GidFacts { index: 1, gid: Gid(gid), kind: GidKind::RoceV2, netdev: None }];
        let port = PortFacts {
            number: 1,
            state,
            link_layer: LinkLayer::Ethernet,
            lid: 0,
            active_mtu: Mtu::B1024,
            bits_per_s: None,
            gids,
        };
        DeviceFacts {
            name: name.into(),
            node_guid: number.into(),
            numa_node: None,
            interfaces: Vec::new(),
            ports: vec![port],
            initiator_depth: 16,
            responder_depth: 16,
            max_qp_wr: 1024,
            max_mr_size: u64::MAX,
        }
    }

    fn wishes(dual: DualRail, devices: [&str; 2]) -> RailWishes {
        let wish =
            |name: &str| Wish { device: (!name.is_empty()).then(|| name.into()), gid_index: None };
        RailWishes { dual, rails: devices.map(wish) }
    }

    #[test]
    fn a_client_may_start_where_one_rail_can_be_had_and_every_name_exists() {
        let (up, down) = (PortState::Active, PortState::Down);
        let refused = |states: [PortState; 2], dual, devices| {
            let facts = [device("a", 1, states[0]), device("b", 2, states[1])];
            fit(&facts, &wishes(dual, devices)).err().map(|error| error.to_string())
        };
        for devices in [["a", "b"], ["b", "a"], ["a", ""], ["", "a"]] {
            for states in [[up, down], [down, up], [up, up]] {
                assert_eq!(refused(states, DualRail::Auto, devices), None, "{devices:?}");
            }
        }
        let error = refused([down, down], DualRail::Auto, ["a", "b"]).expect("no port is up");
        assert!(error.contains("METRALE_EXPERT_RDMA_DEV names \"a\""), "{error}");
        let error = refused([up, down], DualRail::Two, ["a", "b"]).expect("two are needed");
        assert!(error.contains("METRALE_EXPERT_RAIL2_DEV names \"b\""), "{error}");
        assert!(refused([down, up], DualRail::One, ["a", "b"]).is_some(), "the first is the one");
        assert_eq!(refused([up, down], DualRail::One, ["a", "b"]), None);
        for dual in [DualRail::Auto, DualRail::Two] {
            let error = refused([up, up], dual, ["a", "gone"]).expect("a wrong name");
            assert!(error.contains("METRALE_EXPERT_RAIL2_DEV names \"gone\""), "{error}");
        }
    }
}
