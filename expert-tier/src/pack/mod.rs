//! Packs a checkpoint, or made-up weights, into an expert store.
//!
//! [`plan`] reads headers and decides everything; [`run`] moves bytes. A plan is complete: what
//! it does not complain about is packed, and only a failing disk or a file that changes meanwhile
//! can stop it. The store appears at its path whole or not at all.
//!
//! ```
//! use expert_tier::pack::{self, SyntheticSpec};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = std::env::temp_dir().join(format!("pack-doc-{}", std::process::id()));
//! let spec: SyntheticSpec = "layers=2,experts=4,bytes=10000,seed=1".parse()?;
//! let summary = pack::pack_synthetic(&spec, &dir)?;
//! assert_eq!(summary.records, 8);
//! # std::fs::remove_dir_all(&dir)?;
//! # Ok(())
//! # }
//! ```

mod checkpoint;
mod config;
mod dense;
mod error;
mod filesystem;
mod foreign;
mod group;
mod header;
mod journal;
mod names;
mod python_json;
mod queue;
mod recheck;
mod source;
mod staging;
mod synthetic;
mod writer;

use std::fs::File;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use self::checkpoint::{Checkpoint, Shard};
pub use self::dense::DenseTensor;
pub use self::error::PackError;
use self::filesystem::synced;
#[doc(hidden)]
pub use self::foreign::recognise_for_fuzzing;
#[doc(hidden)]
pub use self::journal::journal_for_fuzzing;
use self::journal::{Head, Journal, SourceFile, Staged};
#[doc(hidden)]
pub use self::python_json::quoted_for_fuzzing;
use self::source::{Content, ShardContent};
use self::staging::{Staging, Target};
pub use self::synthetic::SyntheticSpec;
pub(crate) use self::writer::each_worker;
use self::writer::{Interrupt, Job};
use crate::fingerprint::Fingerprint;
use crate::layout::{DEFAULT_CHUNK_BYTES, ExpertLayout, LayerLayout};
use crate::store::manifest::{self, Manifest};

/// What to pack.
#[derive(Clone, Debug)]
pub enum Source {
    /// A directory with `config.json` and safetensors.
    Checkpoint(PathBuf),
    /// Made-up weights.
    Synthetic(SyntheticSpec),
}

/// Most threads of a pack.
pub const MAX_WORKERS: usize = 256;

/// What becomes of what was packed when a pack does not finish: it fails, is interrupted or killed.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Unfinished {
    /// It is removed, after a kill by the next pack to the same place.
    #[default]
    Remove,
    /// It stays beside the output, and the next pack with this setting goes on with it: if it is of
    /// the same plan and the sources did not change, else it begins anew.
    Keep,
}

/// Settings of a pack.
#[derive(Clone, Debug)]
pub struct PackOptions {
    /// Payload bytes per checksum; part of the store, and so of its fingerprint.
    pub chunk_bytes: u32,
    /// Threads, at most [`MAX_WORKERS`]; `None` for one per core. Where the system gives fewer, the
    /// pack goes on with those.
    pub workers: Option<NonZeroUsize>,
    /// Whether a pack that does not finish can be resumed.
    pub unfinished: Unfinished,
}

impl Default for PackOptions {
    fn default() -> Self {
        Self { chunk_bytes: DEFAULT_CHUNK_BYTES, workers: None, unfinished: Unfinished::Remove }
    }
}

/// Everything that is known before the first weight is read.
#[derive(Debug)]
pub struct PackPlan {
    model: String,
    layout: ExpertLayout,
    left_dense: Vec<String>,
    content: Content,
    workers: usize,
    unfinished: Unfinished,
}

impl PackPlan {
    /// The checkpoint's `model_type`.
    #[must_use]
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The layers, records and tensors of the store to be.
    #[must_use]
    pub fn layout(&self) -> &ExpertLayout {
        &self.layout
    }

    /// Routed experts that are not packed: the layers of another tree than the model's main one
    /// (`mtp.layers.0`, or `mtp.0` where it has no `layers.<number>`), and experts under another
    /// segment than `experts` (`model.layers.0.mlp.chunk_experts`).
    #[must_use]
    pub fn left_dense(&self) -> &[String] {
        &self.left_dense
    }

    /// Bytes of all record files; the manifest comes on top.
    #[must_use]
    pub fn store_bytes(&self) -> u64 {
        let layer_bytes = |l: &LayerLayout| l.stride().saturating_mul(u64::from(l.experts()));
        self.layout.layers().iter().map(layer_bytes).fold(0, u64::saturating_add)
    }

    /// What [`run`] would report, without a fingerprint: it depends on weights not read yet.
    #[must_use]
    pub fn summary(&self) -> PackSummary {
        PackSummary {
            fingerprint: None,
            layers: self.layout.layers().len(),
            records: self.layout.records(),
            bytes: self.store_bytes(),
            resumed_bytes: 0,
            elapsed: Duration::ZERO,
            left_dense: self.left_dense.clone(),
        }
    }

    /// Finds out whether a store can be written to `out`, without touching it.
    ///
    /// # Errors
    /// There is something at `out` already, or its file system has too little space.
    pub fn check_output(&self, out: &Path) -> Result<(), PackError> {
        Target::check(out)?.check_space(self.needed_bytes()?)
    }

    /// Bytes that the store takes on a disk.
    fn needed_bytes(&self) -> Result<u64, PackError> {
        Ok(self.store_bytes().saturating_add(self.manifest_bytes()?))
    }

    /// The manifest with zeros for checksums.
    fn draft(&self) -> Manifest {
        let checksums = vec![[0; 32]; self.layout.layers().len()];
        Manifest::new(self.model.clone(), self.layout.clone(), checksums)
    }

    /// What a journal of this plan begins with.
    fn journal_head(&self) -> Head {
        let (synthetic, shards) = match &self.content {
            Content::Synthetic(spec) => (spec.to_string(), &[][..]),
            Content::Shards(content) => (String::new(), &content.shards[..]),
        };
        let source = |shard: &Shard| SourceFile {
            name: shard.name.clone(),
            header_crc32: shard.header_crc32,
            identity: shard.identity,
        };
        Head::new(&self.draft().fingerprint(), synthetic, shards.iter().map(source).collect())
    }

    /// Marks the shards of these names as moved.
    fn set_moved(&self, names: &[String]) {
        let Content::Shards(content) = &self.content else { return };
        content
            .shards
            .iter()
            .filter(|shard| names.contains(&shard.name))
            .for_each(Shard::set_moved);
    }

    /// Length of the manifest, which does not depend on the checksums in it.
    fn manifest_bytes(&self) -> Result<u64, PackError> {
        let draft = self.draft();
        let (found, limit) = (draft.as_bytes().len() as u64, manifest::MAX_BYTES);
        if found > limit {
            return Err(PackError::ManifestTooLarge { found, limit });
        }
        Ok(found)
    }
}

/// What a pack did.
#[derive(Clone, Debug)]
pub struct PackSummary {
    /// The store's name; `None` for a pack that was only planned.
    pub fingerprint: Option<Fingerprint>,
    /// MoE layers.
    pub layers: usize,
    /// Records of all layers.
    pub records: u64,
    /// Bytes of all record files, headers and alignment included.
    pub bytes: u64,
    /// Those of the bytes that an earlier pack had written.
    pub resumed_bytes: u64,
    /// Time that [`run`] took.
    pub elapsed: Duration,
    /// See [`PackPlan::left_dense`].
    pub left_dense: Vec<String>,
}

/// Reads what describes the source and decides what each record holds.
///
/// # Errors
/// The source cannot be packed; the error names the file, tensor or setting.
pub fn plan(source: &Source, options: &PackOptions) -> Result<PackPlan, PackError> {
    let workers = options.workers.or_else(|| thread::available_parallelism().ok());
    let workers = workers.map_or(1, NonZeroUsize::get).min(MAX_WORKERS);
    match source {
        Source::Synthetic(spec) => Ok(PackPlan {
            model: "synthetic".into(),
            layout: spec.layout(options.chunk_bytes)?,
            left_dense: Vec::new(),
            content: Content::Synthetic(spec.clone()),
            workers,
            unfinished: options.unfinished,
        }),
        Source::Checkpoint(dir) => {
            let Checkpoint { config, shards, trees } = Checkpoint::open(dir)?;
            let records = trees.records(dir, &config, options.chunk_bytes)?;
            let (main, layers) = (records.main, records.sources);
            let content = ShardContent { dir: dir.clone(), shards, main, layers };
            Ok(PackPlan {
                model: config.model,
                layout: records.layout,
                left_dense: records.left_dense,
                content: Content::Shards(content),
                workers,
                unfinished: options.unfinished,
            })
        }
    }
}

/// Packs `plan` into a store at `out`, which must not exist or be an empty directory.
///
/// `progress` is called from worker threads with the bytes written since its last call; the sum
/// is [`PackPlan::store_bytes`].
///
/// # Errors
/// A file cannot be read or written. Nothing is then at `out`, except for [`PackError::Unsynced`],
/// and nothing is left beside it, except for [`PackError::Kept`].
pub fn run(
    plan: &PackPlan,
    out: &Path,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<PackSummary, PackError> {
    run_until(plan, out, progress, &AtomicBool::new(false))
}

/// As [`run`], and gives up soon after `stop` is set: a signal handler may do that.
///
/// # Errors
/// As for [`run`], and [`PackError::Interrupted`] if `stop` was set before the store was whole.
pub fn run_until(
    plan: &PackPlan,
    out: &Path,
    progress: &(dyn Fn(u64) + Sync),
    stop: &AtomicBool,
) -> Result<PackSummary, PackError> {
    let started = Instant::now();
    let (target, needed) = (Target::check(out)?, plan.needed_bytes()?);
    let interrupt = Interrupt { stop, out };
    let (mut staging, journal) = match plan.unfinished {
        Unfinished::Remove => (Staging::create(target, needed)?, None),
        Unfinished::Keep => {
            let (head, mut moved) = (plan.journal_head(), Vec::new());
            let resumed = Staging::resume(target, needed, &plan.layout, &head, &mut moved)?;
            plan.set_moved(&moved);
            (resumed.0, Some((head, resumed.1)))
        }
    };
    match pack_into(plan, &staging, journal, progress, interrupt)
        .and_then(|outcome| staging.publish().map(|()| outcome))
    {
        Ok((fingerprint, resumed_bytes)) => Ok(PackSummary {
            fingerprint: Some(fingerprint),
            resumed_bytes,
            elapsed: started.elapsed(),
            ..plan.summary()
        }),
        // What was packed of the shard cannot be used.
        Err(error @ PackError::ShardChanged { .. }) => {
            staging.discard();
            Err(error)
        }
        Err(error @ PackError::Unsynced { .. }) => Err(error),
        Err(error) => Err(staging.kept(error)),
    }
}

/// Writes all files of the store into `staging`; its fingerprint, and the bytes that were there.
fn pack_into(
    plan: &PackPlan,
    staging: &Staging,
    journal: Option<(Head, Option<Journal>)>,
    progress: &(dyn Fn(u64) + Sync),
    interrupt: Interrupt<'_>,
) -> Result<(Fingerprint, u64), PackError> {
    let (layout, content, dir) = (&plan.layout, &plan.content, staging.path());
    let (records, bytes) = (layout.records(), plan.store_bytes());
    tracing::info!(records, bytes, "packing to {}", interrupt.out.display());
    let mut staged = Staged::nothing(layout);
    let mut writer = None;
    if let Some((head, found)) = journal {
        let path = dir.join(journal::FILE_NAME);
        let bytes = found.as_ref().map_or(0, |journal| journal.bytes);
        let opened = staging.journal(bytes)?;
        match found {
            Some(found) => staged = found.staged,
            None => opened.head(&head).map_err(PackError::io("write", &path))?,
        }
        tracing::info!(
            "{} of {} records are in {}; --resume goes on from what is there",
            staged.records(),
            layout.records(),
            dir.display()
        );
        writer = Some(opened);
    }
    let workers = plan.workers;
    let job = Job { dir, layout, content, workers, progress, interrupt, journal: writer.as_ref() };
    job.preallocate()?;
    job.check_staged(&mut staged)?;
    let resumed_bytes = staged.bytes(layout);
    let checksums = job.payloads(staged)?;
    job.check_moved(&checksums)?;
    let manifest = Manifest::new(plan.model.clone(), layout.clone(), checksums.digests());
    job.headers(&manifest, &checksums)?;
    write_manifest(dir, &manifest)?;
    interrupt.check()?;
    Ok((manifest.fingerprint(), resumed_bytes))
}

/// Plans and packs a synthetic store in one call, with default settings.
///
/// # Errors
/// As [`run`].
pub fn pack_synthetic(spec: &SyntheticSpec, out: &Path) -> Result<PackSummary, PackError> {
    let plan = plan(&Source::Synthetic(spec.clone()), &PackOptions::default())?;
    run(&plan, out, &|_| {})
}

fn write_manifest(dir: &Path, manifest: &Manifest) -> Result<(), PackError> {
    let path = dir.join(manifest::FILE_NAME);
    let write = || {
        let mut file = File::create_new(&path)?;
        file.write_all(manifest.as_bytes())?;
        synced(file.sync_all(), &path)
    };
    write().map_err(PackError::io("write", &path))
}
