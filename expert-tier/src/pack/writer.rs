//! Writes records: several workers, each a stream of large blocks at its own place in a file.
//!
//! A layer's file is one sequence of strides, so a run of experts is one contiguous stretch of
//! it. A worker fills a block of [`BLOCK_BYTES`] by reading the sources straight into place,
//! takes the checksums of each piece of at most [`PIECE_BYTES`] while it is still in the cache,
//! and writes the block out whole. Headers are left zero: they carry the fingerprint, which
//! exists once every checksum does, and are written in a second pass of one small write each.
//!
//! Memory: workers x BLOCK_BYTES, of many workers BLOCKS_BYTES in all, and 4 bytes per chunk of payload (0.0016 % of the store with
//! chunks of 256 KiB). Files: per worker one being written and those its reader keeps, and the
//! few that wait for the flusher.
//!
//! Dirty pages are flushed while the workers go on: a worker asks for its file every
//! [`FLUSH_BYTES`], so that the sync at the end has little left to do.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;

use super::PackError;
use super::filesystem::{allocate, synced};
use super::journal::{self, JournalWriter, Staged};
use super::queue::{Queue, Run};
use super::source::{Content, Reader};
use crate::layout::{ExpertLayout, LayerLayout};
use crate::record::{RecordIdentity, encode_header};
use crate::store::manifest::{ChecksumDigest, Manifest, layer_file_name};

/// Bytes per write.
const BLOCK_BYTES: usize = 4 << 20;
/// Most bytes of all workers' blocks; above 64 workers the blocks become smaller.
const BLOCKS_BYTES: usize = 256 << 20;
/// Bytes read before their checksum is taken; half of a usual second-level cache.
const PIECE_BYTES: u64 = 512 << 10;
/// Bytes a worker writes between two requests to flush.
const FLUSH_BYTES: u64 = 64 << 20;

/// CRC-32 of every chunk of every record, by layer, expert and chunk.
pub(super) struct Checksums(Vec<Vec<u32>>);

impl Checksums {
    /// One digest per layer, for the manifest.
    pub(super) fn digests(&self) -> Vec<[u8; 32]> {
        let digest = |crcs: &Vec<u32>| {
            let mut digest = ChecksumDigest::default();
            digest.record(crcs.iter().copied());
            digest.finish()
        };
        self.0.iter().map(digest).collect()
    }

    pub(super) fn record(&self, index: usize, layer: &LayerLayout, expert: u32) -> &[u32] {
        let chunks = layer.chunks() as usize;
        &self.0[index][expert as usize * chunks..][..chunks]
    }
}

/// A flag that ends a pack, and where its store would have been.
#[derive(Clone, Copy)]
pub(super) struct Interrupt<'a> {
    pub(super) stop: &'a AtomicBool,
    pub(super) out: &'a Path,
}

impl Interrupt<'_> {
    /// Fails once the flag is set.
    pub(super) fn check(&self) -> Result<(), PackError> {
        // Relaxed: the flag guards no other data.
        match self.stop.load(Ordering::Relaxed) {
            true => Err(PackError::Interrupted { out: self.out.into() }),
            false => Ok(()),
        }
    }
}

/// What the workers of one pack share.
pub(super) struct Job<'a> {
    /// The directory that receives the files.
    pub(super) dir: &'a Path,
    /// What to write.
    pub(super) layout: &'a ExpertLayout,
    /// Where the payloads come from.
    pub(super) content: &'a Content,
    /// How many threads work.
    pub(super) workers: usize,
    /// Told of bytes as they are written, from any worker.
    pub(super) progress: &'a (dyn Fn(u64) + Sync),
    /// Asked before every block.
    pub(super) interrupt: Interrupt<'a>,
    /// Told of every record that was written, where the pack may be resumed.
    pub(super) journal: Option<&'a JournalWriter>,
}

impl Job<'_> {
    /// Creates the files at their final lengths, so that a full disk shows before any work.
    pub(super) fn preallocate(&self) -> Result<(), PackError> {
        for layer in self.layout.layers() {
            self.interrupt.check()?;
            let path = self.dir.join(layer_file_name(layer.layer()));
            let opened = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
            let file = opened.map_err(PackError::io("create", &path))?;
            let bytes = layer.stride() * u64::from(layer.experts());
            allocate(&file, bytes).map_err(PackError::io("allocate", &path))?;
        }
        Ok(())
    }

    /// Writes every payload but those that are `staged`; the headers' places stay zero.
    pub(super) fn payloads(&self, staged: Staged) -> Result<Checksums, PackError> {
        let queue = Queue::new(self.layout, &staged.known);
        let checksums = Mutex::new(staged.crcs);
        let (flush, requests) = mpsc::channel();
        thread::scope(|scope| {
            let flusher = thread::Builder::new().spawn_scoped(scope, || flush_all(requests));
            let stop = AtomicBool::new(false);
            let work = || {
                let done = self.work(&queue, &stop, &checksums, flush.clone());
                if done.is_err() {
                    stop.store(true, Ordering::Relaxed);
                }
                done
            };
            let outcomes = each_worker(self.workers, &work);
            drop(flush);
            // Without the thread nothing is flushed early; the sync at the end is what counts.
            let flushed = flusher.map_or(Ok(()), join);
            outcomes.into_iter().collect::<Result<(), _>>()?;
            flushed
        })?;
        Ok(Checksums(checksums.into_inner().unwrap_or_else(PoisonError::into_inner)))
    }

    fn work(
        &self,
        queue: &Queue,
        stop: &AtomicBool,
        checksums: &Mutex<Vec<Vec<u32>>>,
        flush: mpsc::Sender<(PathBuf, Arc<File>)>,
    ) -> Result<(), PackError> {
        let mut reader = self.content.reader();
        let mut buffer = block(BLOCK_BYTES.min(BLOCKS_BYTES / self.workers.max(1)))?;
        let mut previous = None;
        let mut since_flush = 0;
        while let Some(run) = queue.claim(previous)
            && !stop.load(Ordering::Relaxed)
        {
            let layer = &self.layout.layers()[run.layer];
            let path = self.dir.join(layer_file_name(layer.layer()));
            let file = Arc::new(open_layer_file(&path)?);
            let blocks = Blocks::new(&file, &path, &mut buffer, layer, run.experts.start);
            let crcs = self.write_run(&run, layer, &mut reader, blocks)?;
            let first = run.experts.start as usize * layer.chunks() as usize;
            lock(checksums)[run.layer][first..][..crcs.len()].copy_from_slice(&crcs);
            if let Some(journal) = self.journal {
                let written = journal.records(layer, run.experts.start, &crcs);
                written.map_err(PackError::io("write", &self.dir.join(journal::FILE_NAME)))?;
            }
            since_flush += layer.stride() * u64::from(run.experts.end - run.experts.start);
            if since_flush >= FLUSH_BYTES {
                since_flush = 0;
                // There may be no flusher, or it ended with an error that is reported when it is
                // joined.
                let _ = flush.send((path, file));
            }
            previous = Some(run.layer);
        }
        reader.finish()
    }

    fn write_run(
        &self,
        run: &Run,
        layer: &LayerLayout,
        reader: &mut Reader<'_>,
        mut blocks: Blocks<'_>,
    ) -> Result<Vec<u32>, PackError> {
        let payload_bytes = layer.spec().payload_bytes();
        let mut crcs = ChunkCrcs::new(layer.chunk_bytes());
        for expert in run.experts.clone() {
            if expert + 1 < run.experts.end {
                reader.will_need(layer, run.layer, expert + 1)?;
            }
            blocks.zeros(layer.header_bytes())?;
            let mut done = 0;
            while done < payload_bytes {
                self.interrupt.check()?;
                let piece = blocks.space((payload_bytes - done).min(PIECE_BYTES))?;
                reader.read(layer, run.layer, expert, done, piece)?;
                crcs.update(piece);
                done += piece.len() as u64;
            }
            crcs.end_record();
            blocks.zeros(layer.stride() - layer.record_bytes())?;
            (self.progress)(layer.stride());
        }
        blocks.write_out()?;
        Ok(crcs.finished)
    }

    /// Writes every header, now that the fingerprint is known, and syncs every file.
    pub(super) fn headers(
        &self,
        manifest: &Manifest,
        checksums: &Checksums,
    ) -> Result<(), PackError> {
        let next = AtomicUsize::new(0);
        let work = || {
            let layers = self.layout.layers();
            while let Some(layer) = layers.get(next.fetch_add(1, Ordering::Relaxed)) {
                // Relaxed: the counter hands out indices and guards no other data.
                self.layer_headers(layer, manifest, checksums)?;
            }
            Ok(())
        };
        each_worker(self.workers, &work).into_iter().collect()
    }

    fn layer_headers(
        &self,
        layer: &LayerLayout,
        manifest: &Manifest,
        checksums: &Checksums,
    ) -> Result<(), PackError> {
        let index = self.layout.layer_index(layer.layer()).unwrap_or_default();
        let path = self.dir.join(layer_file_name(layer.layer()));
        let file = open_layer_file(&path)?;
        let mut header = vec![0; layer.header_bytes() as usize];
        for expert in 0..layer.experts() {
            self.interrupt.check()?;
            let identity = RecordIdentity::new(&manifest.fingerprint(), layer, expert);
            encode_header(&identity, checksums.record(index, layer, expert), &mut header);
            let at = u64::from(expert) * layer.stride();
            file.write_all_at(&header, at).map_err(PackError::io("write", &path))?;
        }
        synced(file.sync_all(), &path).map_err(PackError::io("sync", &path))
    }
}

fn block(bytes: usize) -> Result<Vec<u8>, PackError> {
    let mut block = Vec::new();
    block.try_reserve_exact(bytes).map_err(|_| PackError::Memory { bytes })?;
    block.resize(bytes, 0);
    Ok(block)
}

fn open_layer_file(path: &Path) -> Result<File, PackError> {
    OpenOptions::new().write(true).open(path).map_err(PackError::io("open", path))
}

/// A block being filled, and the place in the file where it goes.
struct Blocks<'a> {
    file: &'a File,
    path: &'a Path,
    buffer: &'a mut [u8],
    filled: usize,
    at: u64,
}

impl<'a> Blocks<'a> {
    fn new(
        file: &'a File,
        path: &'a Path,
        buffer: &'a mut [u8],
        layer: &LayerLayout,
        first_expert: u32,
    ) -> Self {
        let at = u64::from(first_expert) * layer.stride();
        Self { file, path, buffer, filled: 0, at }
    }

    /// The next bytes of the block: at least one, at most `wanted`.
    fn space(&mut self, wanted: u64) -> Result<&mut [u8], PackError> {
        if self.filled == self.buffer.len() {
            self.write_out()?;
        }
        let room = self.buffer.len() - self.filled;
        let given = usize::try_from(wanted).unwrap_or(room).min(room);
        let start = self.filled;
        self.filled += given;
        Ok(&mut self.buffer[start..self.filled])
    }

    fn zeros(&mut self, mut count: u64) -> Result<(), PackError> {
        while count > 0 {
            let space = self.space(count)?;
            space.fill(0);
            count -= space.len() as u64;
        }
        Ok(())
    }

    fn write_out(&mut self) -> Result<(), PackError> {
        let bytes = &self.buffer[..self.filled];
        self.file.write_all_at(bytes, self.at).map_err(PackError::io("write", self.path))?;
        self.at += self.filled as u64;
        self.filled = 0;
        Ok(())
    }
}

/// Checksums of a payload's chunks as its bytes come by in pieces of any size.
struct ChunkCrcs {
    chunk_bytes: usize,
    in_chunk: usize,
    hasher: crc32fast::Hasher,
    finished: Vec<u32>,
}

impl ChunkCrcs {
    fn new(chunk_bytes: u32) -> Self {
        let hasher = crc32fast::Hasher::new();
        Self { chunk_bytes: chunk_bytes as usize, in_chunk: 0, hasher, finished: Vec::new() }
    }

    fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(self.chunk_bytes - self.in_chunk));
            self.hasher.update(now);
            self.in_chunk += now.len();
            if self.in_chunk == self.chunk_bytes {
                self.close();
            }
            bytes = later;
        }
    }

    /// Closes a last, shorter chunk.
    fn end_record(&mut self) {
        if self.in_chunk > 0 {
            self.close();
        }
    }

    fn close(&mut self) {
        self.finished.push(std::mem::take(&mut self.hasher).finalize());
        self.in_chunk = 0;
    }
}

/// Syncs each file asked for, once however often it was asked for meanwhile.
fn flush_all(requests: mpsc::Receiver<(PathBuf, Arc<File>)>) -> Result<(), PackError> {
    while let Ok(first) = requests.recv() {
        let mut files = vec![first];
        for (path, file) in requests.try_iter() {
            // Kept in order; of two handles of one file, one sync covers both.
            files.retain(|(known, _)| *known != path);
            files.push((path, file));
        }
        for (path, file) in files {
            synced(file.sync_data(), &path).map_err(PackError::io("sync", &path))?;
        }
    }
    Ok(())
}

/// Runs `work` on `workers` threads, this one among them, and waits for all of them.
///
/// Where the system gives fewer threads, those do the work: it must be such that any number can.
pub(crate) fn each_worker<T: Send>(workers: usize, work: &(impl Fn() -> T + Sync)) -> Vec<T> {
    thread::scope(|scope| {
        let start = |_| thread::Builder::new().spawn_scoped(scope, work);
        let mut threads = Vec::new();
        for started in (1..workers).map(start) {
            match started {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    let threads = threads.len() + 1;
                    tracing::warn!("cannot start a thread: {error}; going on with {threads}");
                    break;
                }
            }
        }
        let own = work();
        std::iter::once(own).chain(threads.into_iter().map(join)).collect()
    })
}

/// The thread's result; its panic goes on in this one.
fn join<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// A poisoned lock means that a worker panicked, and [`join`] raises that panic; the data behind
/// the lock is not used afterwards.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
