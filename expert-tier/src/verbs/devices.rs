//! The devices that a client uses, and the arenas registered with them.
//!
//! A device is opened once and kept, so that a peer that comes back costs no registration. An arena
//! is registered once per device, whole: registering is slow, and a slot's address is all that a
//! READ needs. The registration lets the device write what our own READs bring, and peers nothing. A
//! peer that is to write gets a registration of its own of the bytes that it is to write.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use gpu_sys::verbs::{
    Access, CompletionChannel, Context, Landing, Library, Memory, MemoryRegion, PortState,
    ProtectionDomain, VerbsError,
};
use railset::choose::{Asker, choose};
use railset::driver;
use railset::facts::DeviceFacts;
use railset::pairing::RailWishes;

use super::OpenError;
use crate::arena::{ArenaId, ExpertArena, Part};

/// The library, and what was opened of it.
pub(super) struct Devices {
    library: Arc<Library>,
    opened: Mutex<Vec<Arc<Device>>>,
    /// Every arena that was named or used, for devices that are opened later.
    arenas: Mutex<Vec<ExpertArena>>,
}

/// An open device.
pub(super) struct Device {
    domain: Arc<ProtectionDomain>,
    /// Wakes whoever waits for what peers were asked for.
    channel: OnceLock<Arc<CompletionChannel>>,
    registered: Mutex<Vec<Registered>>,
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
        Self { library, opened: Mutex::default(), arenas: Mutex::default() }
    }

    /// Fails where no device, port and GID could carry the first rail, whoever the peer is.
    pub(super) fn any(&self, wishes: &RailWishes) -> Result<(), OpenError> {
        choose(&self.facts()?, Asker::Rail1, &wishes.rails[0], None, None)?;
        Ok(())
    }

    /// What devices there are now, and how their ports are.
    pub(super) fn facts(&self) -> Result<Vec<DeviceFacts>, VerbsError> {
        driver::devices(&self.library)
    }

    /// The device called `name`, with every known arena registered.
    pub(super) fn device(&self, name: &str) -> Result<Arc<Device>, VerbsError> {
        let mut opened = lock(&self.opened);
        if let Some(device) = opened.iter().find(|device| device.name() == name) {
            return Ok(Arc::clone(device));
        }
        let domain = ProtectionDomain::new(&self.library.open_device(name)?)?;
        let device =
            Arc::new(Device { domain, channel: OnceLock::new(), registered: Mutex::default() });
        for arena in lock(&self.arenas).iter() {
            device.register(arena)?;
        }
        opened.push(Arc::clone(&device));
        Ok(device)
    }

    /// Opens `device` anew, and registers every arena with it again, where it is asked for once more.
    pub(super) fn forget(&self, device: &Arc<Device>) {
        lock(&self.opened).retain(|known| !Arc::ptr_eq(known, device));
    }

    /// Registers `arena` with every open device, and with those that are opened later.
    pub(super) fn register(&self, arena: &ExpertArena) -> Result<(), VerbsError> {
        let opened = lock(&self.opened);
        let mut arenas = lock(&self.arenas);
        if !arenas.iter().any(|known| known.id() == arena.id()) {
            arenas.push(arena.clone());
        }
        drop(arenas);
        opened.iter().try_for_each(|device| device.register(arena))
    }

    /// Whether `arena` has been registered, or will be where a device is opened.
    pub(super) fn knows(&self, arena: &ExpertArena) -> bool {
        let opened = lock(&self.opened);
        let known = lock(&self.arenas).iter().any(|known| known.id() == arena.id());
        known && opened.iter().all(|device| device.region(arena.id()).is_some())
    }
}

impl Device {
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

    /// The registration of an arena; `None` if it has none here.
    pub(super) fn region(&self, arena: ArenaId) -> Option<Arc<MemoryRegion>> {
        let registered = lock(&self.registered);
        registered.iter().find(|it| it.id == arena).map(|it| Arc::clone(&it.region))
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

    fn register(&self, arena: &ExpertArena) -> Result<(), VerbsError> {
        let mut registered = lock(&self.registered);
        if registered.iter().any(|it| it.id == arena.id()) {
            return Ok(());
        }
        let memory: Arc<dyn Memory> = Arc::new(arena.clone());
        let bytes = memory.region().1;
        let shared = Arc::clone(&memory);
        let region = MemoryRegion::register(&self.domain, shared, 0..bytes, Access::LocalWrite)?;
        tracing::debug!(device = self.name(), bytes, "the arena is registered");
        registered.push(Registered { id: arena.id(), memory, region: Arc::new(region) });
        Ok(())
    }
}

/// A list here changes by one push, so a poisoned lock guards sound data.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
