//! Reads again what a pack cannot otherwise be sure of: records that an earlier pack left, and
//! sources whose inode is not the one that was planned with.
//!
//! Both are compared with the checksums of the payload that were taken when it was packed, chunk by
//! chunk. Memory: a chunk for each worker.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::PackError;
use super::journal::Staged;
use super::source::{Content, LayerSource, ShardContent};
use super::writer::{Checksums, Job, each_worker};
use crate::layout::LayerLayout;
use crate::store::manifest::layer_file_name;

impl Job<'_> {
    /// Reads the records of `staged` and forgets those whose bytes are not as they were packed.
    ///
    /// # Errors
    /// The pack was interrupted. A record that cannot be read is packed again.
    pub(super) fn check_staged(&self, staged: &mut Staged) -> Result<(), PackError> {
        let mut keys = Vec::new();
        for (index, known) in staged.known.iter().enumerate() {
            let there = (0_u32..).zip(known).filter(|(_, known)| **known);
            keys.extend(there.map(|(expert, _)| (index, expert)));
        }
        let damaged = Mutex::new(Vec::new());
        let crcs = &staged.crcs;
        self.for_each(&keys, |&(index, expert), buffer| {
            let layer = &self.layout.layers()[index];
            let chunks = layer.chunks() as usize;
            let expected = &crcs[index][expert as usize * chunks..][..chunks];
            let path = self.dir.join(layer_file_name(layer.layer()));
            let sound =
                File::open(path).is_ok_and(|f| is_staged(&f, layer, expert, expected, buffer));
            match sound {
                true => (self.progress)(layer.stride()),
                false => {
                    damaged.lock().unwrap_or_else(PoisonError::into_inner).push((index, expert));
                }
            }
            Ok(())
        })?;
        let damaged = damaged.into_inner().unwrap_or_else(PoisonError::into_inner);
        if !damaged.is_empty() {
            let records = damaged.len();
            tracing::warn!(records, "records that an earlier pack left are damaged: packed again");
        }
        for (index, expert) in damaged {
            staged.known[index][expert as usize] = false;
        }
        Ok(())
    }

    /// Compares what was packed of shards whose inode moved with what can be read of them now.
    ///
    /// # Errors
    /// A shard has other bytes than those that were packed, or cannot be read.
    pub(super) fn check_moved(&self, checksums: &Checksums) -> Result<(), PackError> {
        let Content::Shards(content) = self.content else { return Ok(()) };
        let moved: Vec<_> = content.shards.iter().filter(|shard| shard.has_moved()).collect();
        let Some(first) = moved.first() else { return Ok(()) };
        tracing::warn!(
            shards = moved.len(),
            "inodes are not those from when the headers were read ({} ...): what was packed of these \
             shards is read once more and compared",
            first.name
        );
        for shard in &moved {
            shard.check_header(&content.dir)?;
        }
        let keys: Vec<_> = (0..self.layout.layers().len())
            .flat_map(|index| (0..self.layout.layers()[index].experts()).map(move |e| (index, e)))
            .collect();
        self.for_each(&keys, |&(index, expert), buffer| {
            let layer = &self.layout.layers()[index];
            let crcs = checksums.record(index, layer, expert);
            let mut reader = self.content.reader();
            for (chunk, shard) in moved_chunks(content, layer, &content.layers[index], expert) {
                self.interrupt.check()?;
                let start = chunk * u64::from(layer.chunk_bytes());
                let bytes = layer.spec().payload_bytes() - start;
                buffer.resize(usize_of(bytes.min(u64::from(layer.chunk_bytes()))), 0);
                reader.read(layer, index, expert, start, buffer)?;
                if crc32fast::hash(buffer) != crcs[usize_of(chunk)] {
                    let how = "its bytes are not those that were packed";
                    return Err(content.shards[shard as usize].changed(how));
                }
            }
            reader.finish()
        })
    }

    /// Calls `work` with each of `keys` and a buffer, on all workers.
    fn for_each<K: Sync>(
        &self,
        keys: &[K],
        work: impl Fn(&K, &mut Vec<u8>) -> Result<(), PackError> + Sync,
    ) -> Result<(), PackError> {
        let next = AtomicUsize::new(0);
        let all = || {
            let mut buffer = Vec::new();
            // Relaxed: the counter hands out positions and guards no other data.
            while let Some(key) = keys.get(next.fetch_add(1, Ordering::Relaxed)) {
                let done = self.interrupt.check().and_then(|()| work(key, &mut buffer));
                if done.is_err() {
                    next.store(keys.len(), Ordering::Relaxed);
                    return done;
                }
            }
            Ok(())
        };
        each_worker(self.workers, &all).into_iter().collect()
    }
}

/// Whether the payload of a record in `file` has these checksums, and zeros behind it.
fn is_staged(
    file: &File,
    layer: &LayerLayout,
    expert: u32,
    crcs: &[u32],
    buffer: &mut Vec<u8>,
) -> bool {
    let start = u64::from(expert) * layer.stride() + layer.header_bytes();
    let (payload, chunk_bytes) = (layer.spec().payload_bytes(), u64::from(layer.chunk_bytes()));
    let mut at = 0;
    for &crc in crcs {
        buffer.resize(usize_of((payload - at).min(chunk_bytes)), 0);
        if file.read_exact_at(buffer, start + at).is_err() || crc32fast::hash(buffer) != crc {
            return false;
        }
        at += buffer.len() as u64;
    }
    buffer.resize(usize_of(layer.stride() - layer.record_bytes()), 0);
    file.read_exact_at(buffer, start + payload).is_ok() && buffer.iter().all(|&byte| byte == 0)
}

/// The chunks of a record that have bytes of a shard that moved, each with one such shard.
fn moved_chunks(
    content: &ShardContent,
    layer: &LayerLayout,
    source: &LayerSource,
    expert: u32,
) -> Vec<(u64, u32)> {
    let mut chunks: Vec<(u64, u32)> = Vec::new();
    let chunk_bytes = u64::from(layer.chunk_bytes());
    for (tensor, place) in layer.spec().tensors().iter().zip(&source.tensors) {
        let Some(spot) = place.spot(tensor, expert) else { continue };
        if !content.shards[spot.shard as usize].has_moved() {
            continue;
        }
        let last = (tensor.offset + tensor.bytes - 1) / chunk_bytes;
        let next = chunks.last().map_or(0, |(chunk, _)| chunk + 1);
        chunks.extend((next.max(tensor.offset / chunk_bytes)..=last).map(|c| (c, spot.shard)));
    }
    chunks
}

/// Saturates: every use is a chunk's length or number.
fn usize_of(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
