//! Opening a store and reading records from it.
//!
//! Records are read with positional reads, never through a mapping, so a file that somebody
//! truncates while it is open gives an error and not a SIGBUS.

use std::fs::File;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::OFlags;

use crate::files::open_regular;
use crate::key::ExpertKey;
use crate::layout::{KeyError, LayerLayout};
use crate::store::manifest::{FILE_NAME, MAX_BYTES, Manifest, ManifestError, layer_file_name};

/// Why a store cannot be opened or read.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// An operation on one of the store's files failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// `manifest.json` is not one this program can use.
    #[error("{}: {source}", path.display())]
    Manifest {
        /// The manifest's path.
        path: PathBuf,
        /// What is wrong with it.
        source: ManifestError,
    },
    /// A file of records has another length than the manifest gives it.
    #[error(
        "{} has {found} bytes, the manifest makes it {expected}: the store is damaged, \
         pack it again", path.display()
    )]
    Length {
        /// The file.
        path: PathBuf,
        /// Bytes it has.
        found: u64,
        /// Bytes it should have.
        expected: u64,
    },
    /// A read ended before the bytes that the manifest promises.
    #[error("{} ended at byte {at} inside {key}: it was truncated", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The record that was being read.
        key: ExpertKey,
        /// Where the file ended.
        at: u64,
    },
    /// A range outside the record.
    #[error("{key}: bytes {start} to {end} are outside a record of {stride}")]
    Range {
        /// The record.
        key: ExpertKey,
        /// First byte asked for.
        start: u64,
        /// End of the range asked for.
        end: u64,
        /// Bytes of the record with its padding.
        stride: u64,
    },
    /// The store has no such record.
    #[error(transparent)]
    Key(#[from] KeyError),
}

/// An open store: its manifest, and one open file per layer.
#[derive(Debug)]
pub struct ExpertStore {
    dir: PathBuf,
    manifest: Arc<Manifest>,
    files: Vec<File>,
}

impl ExpertStore {
    /// Opens the store in `dir` and checks its manifest and the length of every file.
    ///
    /// Records are not read here; [`Mismatch`](crate::record::Mismatch) finds damaged ones when
    /// they are fetched, and `metrale verify` finds all of them.
    ///
    /// # Errors
    /// The directory is not a store, was altered or truncated, or cannot be read.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        let manifest = read_manifest(dir)?;
        let mut files = Vec::with_capacity(manifest.layout().layers().len());
        for layer in manifest.layout().layers() {
            files.push(open_layer(dir, layer)?);
        }
        Ok(Self { dir: dir.to_owned(), manifest: Arc::new(manifest), files })
    }

    /// The store's directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What the store holds.
    #[must_use]
    pub fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    /// The open file of every layer, in the layout's order.
    #[must_use]
    pub fn files(&self) -> &[File] {
        &self.files
    }

    /// Fills `out` with the bytes of record `key` that start at `offset` within it.
    ///
    /// Offsets run over the whole stride: header, payload and padding.
    ///
    /// # Errors
    /// There is no such record, the range leaves it, or the file ended or failed.
    pub fn read_at(&self, key: ExpertKey, offset: u64, out: &mut [u8]) -> Result<(), StoreError> {
        let mut done = 0;
        while done < out.len() {
            let at = offset + done as u64;
            done += self.read_some(key, at, out.len() - done, |file, place| {
                rustix::io::pread(file, &mut out[done..], place)
            })?;
        }
        Ok(())
    }

    /// Reads once into uninitialised memory and says how many bytes came: at least one.
    ///
    /// # Errors
    /// As for [`read_at`](Self::read_at).
    pub fn read_uninit_at(
        &self,
        key: ExpertKey,
        offset: u64,
        out: &mut [MaybeUninit<u8>],
    ) -> Result<usize, StoreError> {
        self.read_some(key, offset, out.len(), |file, place| {
            rustix::io::pread(file, &mut *out, place).map(|(filled, _)| filled.len())
        })
    }

    /// Sends up to `bytes` of record `key` from byte `offset` on to `socket`, from the page cache
    /// and without passing through this process; says how many went: at least one.
    ///
    /// # Errors
    /// As for [`read_at`](Self::read_at); [`StoreError::Io`] also where the socket failed, its
    /// send timeout passed, or it does not block and has no room.
    pub fn send_at(
        &self,
        key: ExpertKey,
        offset: u64,
        bytes: usize,
        socket: impl AsFd,
    ) -> Result<usize, StoreError> {
        self.read_some(key, offset, bytes, |file, place| {
            rustix::fs::sendfile(&socket, file, Some(&mut { place }), bytes)
        })
    }

    /// One positional read within a record, of at least a byte; a short one is the caller's to
    /// continue.
    fn read_some(
        &self,
        key: ExpertKey,
        offset: u64,
        bytes: usize,
        mut read: impl FnMut(&File, u64) -> rustix::io::Result<usize>,
    ) -> Result<usize, StoreError> {
        let layer = self.manifest.layout().locate(key)?;
        let stride = layer.stride();
        let end = offset.saturating_add(bytes as u64);
        if end > stride {
            return Err(StoreError::Range { key, start: offset, end, stride });
        }
        if bytes == 0 {
            return Ok(0);
        }
        let index = self.manifest.layout().layer_index(key.layer);
        let Some(file) = index.and_then(|i| self.files.get(i)) else {
            return Err(StoreError::Range { key, start: offset, end, stride });
        };
        // Experts and strides are bounded, so the product is far below 2^63.
        let place = u64::from(key.expert) * stride + offset;
        let path = || self.dir.join(layer_file_name(key.layer));
        loop {
            return match read(file, place) {
                Ok(0) => Err(StoreError::Truncated { path: path(), key, at: place }),
                Ok(count) => Ok(count),
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno) => {
                    Err(StoreError::Io { action: "read", path: path(), source: errno.into() })
                }
            };
        }
    }
}

fn read_manifest(dir: &Path) -> Result<Manifest, StoreError> {
    let path = dir.join(FILE_NAME);
    let io = |action, source| StoreError::Io { action, path: path.clone(), source };
    let file = open_regular(&path, OFlags::RDONLY).map_err(|error| io("open", error))?;
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(|error| io("read", error))?;
    Manifest::parse(&bytes).map_err(|source| StoreError::Manifest { path: path.clone(), source })
}

fn open_layer(dir: &Path, layer: &LayerLayout) -> Result<File, StoreError> {
    let path = dir.join(layer_file_name(layer.layer()));
    let io = |action, source| StoreError::Io { action, path: path.clone(), source };
    let file = open_regular(&path, OFlags::RDONLY).map_err(|error| io("open", error))?;
    let found = file.metadata().map_err(|error| io("stat", error))?.len();
    let expected = u64::from(layer.experts()) * layer.stride();
    if found != expected {
        return Err(StoreError::Length { path, found, expected });
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;
    use crate::testing::TestStore;

    #[test]
    fn a_read_that_a_signal_interrupts_is_tried_again() {
        let store = TestStore::new(1, 2, &[5_000], 1).open();
        let mut signals = 3;
        let read = store.read_some(ExpertKey::new(0, 1), 0, 100, |_, _| {
            if signals > 0 {
                signals -= 1;
                return Err(Errno::INTR);
            }
            Ok(100)
        });
        assert_eq!((read.unwrap(), signals), (100, 0));
    }
}
