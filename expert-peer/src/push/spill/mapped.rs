//! The files' own pages, registered for one push each.
//!
//! Registering brings the pages in and pins them, so the disk's time passes there, on threads of its
//! own; deregistering is done there too. What is registered at once is within `--push-pinned`.

use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

use gpu_sys::verbs::{
    Access, FileMapping, FilePages, Memory, MemoryRegion, ProtectionDomain, probe_file_pages,
};

use super::super::desk::Chunk;
use super::super::options::PushError;
use super::workers::Workers;
use super::{Ended, Filled, Makings, mapping_count, whole_request};

/// Most threads that register: each waits for one range of the disk's.
const PIN_THREADS: usize = 8;

/// The devices that pages are registered with, by their numbers; `None` where one is gone.
pub(in crate::push) type Domains = Arc<RwLock<Vec<Option<Arc<ProtectionDomain>>>>>;

pub(in crate::push) struct Mapped {
    domains: Domains,
    workers: Workers<Work, Done>,
    /// Ranges that are registered, or about to be.
    pinned: usize,
    count: usize,
    threads: usize,
    chunk_bytes: u64,
}

enum Work {
    Pin(Chunk, usize),
    Unpin(Arc<MemoryRegion>),
}

enum Done {
    Pinned(Ended),
    Unpinned,
}

impl Mapped {
    pub(super) fn open(makings: &Makings<'_>) -> Result<Self, PushError> {
        for domain in makings.devices {
            probe(domain, makings.store.dir())?;
        }
        let chunk_bytes = whole_request(makings.range_bytes);
        let count = mapping_count(makings.options, makings.range_bytes)?;
        let layers = makings.store.manifest().layout().layers();
        let map = |(layer, file): (&expert_tier::layout::LayerLayout, _)| {
            let bytes = u64::from(layer.experts()) * layer.stride();
            FileMapping::of(file, bytes)
                .map_err(|source| PushError::Map { layer: layer.layer(), source })
        };
        let files = layers.iter().zip(makings.store.files()).map(map);
        let files: Vec<Arc<FileMapping>> = files.collect::<Result<_, _>>()?;
        let domains: Domains =
            Arc::new(RwLock::new(makings.devices.iter().cloned().map(Some).collect()));
        let devices = Arc::clone(&domains);
        let act = move |work| match work {
            Work::Pin(chunk, device) => Done::Pinned(pin(&files, &devices, chunk, device)),
            Work::Unpin(region) => {
                drop(region);
                Done::Unpinned
            }
        };
        let threads = PIN_THREADS.min(makings.options.reads as usize);
        let workers = Workers::start("push-pin", threads, makings.bell, act)?;
        Ok(Self { domains, workers, pinned: 0, count, threads, chunk_bytes })
    }

    pub(super) fn domains(&self) -> &Domains {
        &self.domains
    }

    pub(super) fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    pub(super) fn reads(&self) -> usize {
        self.threads
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    pub(super) fn has_room(&self) -> bool {
        self.pinned < self.count
    }

    pub(super) fn start(&mut self, chunk: Chunk, device: usize) {
        self.pinned += 1;
        self.workers.give(Work::Pin(chunk, device));
    }

    pub(super) fn turn(&mut self, ended: &mut Vec<Ended>) {
        while let Some(done) = self.workers.take() {
            match done {
                Done::Unpinned => self.pinned -= 1,
                Done::Pinned(end) => {
                    if end.outcome.is_err() {
                        self.pinned -= 1;
                    }
                    ended.push(end);
                }
            }
        }
    }

    pub(super) fn take_back(&mut self, region: Arc<MemoryRegion>) {
        self.workers.give(Work::Unpin(region));
    }
}

/// An error where the device of `domain` does not register the pages of files in `dir`.
pub(in crate::push) fn probe(domain: &Arc<ProtectionDomain>, dir: &Path) -> Result<(), PushError> {
    let device = domain.context().name().to_owned();
    match probe_file_pages(domain, dir)? {
        FilePages::Registered => Ok(()),
        FilePages::Refused(source) => Err(PushError::Mapping { device, source }),
    }
}

/// Registers the pages of a chunk.
fn pin(files: &[Arc<FileMapping>], devices: &Domains, chunk: Chunk, device: usize) -> Ended {
    let register = || {
        let file = &files[chunk.place.layer_at];
        let domains = devices.read().unwrap_or_else(PoisonError::into_inner);
        let domain = domains.get(device).cloned().flatten();
        drop(domains);
        let domain = domain.ok_or_else(|| "the device is gone".to_owned())?;
        let start = usize::try_from(chunk.place.start + chunk.from).unwrap_or(usize::MAX);
        let memory: Arc<dyn Memory> = Arc::<FileMapping>::clone(file);
        let range = start..start.saturating_add(chunk.bytes);
        let region = MemoryRegion::register(&domain, memory, range, Access::LocalRead)
            .map_err(|error| error.to_string())?;
        let part = file.part(start + chunk.skip..start + chunk.skip + chunk.wanted);
        Ok(Filled::File(part, Arc::new(region)))
    };
    Ended { chunk, outcome: register() }
}
