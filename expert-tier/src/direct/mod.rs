//! Reading a store past the page cache: `O_DIRECT` through io_uring, into memory that the reader
//! owns until the last byte is there.
//!
//! `DirectFiles` finds out whether the store's files can be read so, and names the reason where
//! they cannot; `ring` does the reading. [`SlotReader`] reads into slots for others than the backends
//! of this crate.

pub(crate) mod ring;
mod slots;
mod table;

use std::fs::File;
use std::io;

use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};

pub use self::slots::{SlotRead, SlotReadEnd, SlotReader, SlotReaderOptions};
use crate::layout::STRIDE_ALIGN;
use crate::store::ExpertStore;
use crate::store::manifest::layer_file_name;

/// The alignment of a store's records and of an arena's slots, which is what the reader offers.
const OFFERED_ALIGN: u32 = STRIDE_ALIGN as u32;
/// `STATX_DIOALIGN` of statx(2), from Linux 6.1; rustix has the fields but not the bit.
const STATX_DIOALIGN: StatxFlags = StatxFlags::from_bits_retain(0x2000);

/// Why a store cannot be read past the page cache.
#[derive(Debug, thiserror::Error)]
pub enum NotDirect {
    /// The file system refuses `O_DIRECT`.
    #[error("{file} cannot be opened with O_DIRECT: {source}")]
    Open {
        /// The file.
        file: String,
        /// The system's answer.
        source: io::Error,
    },
    /// The file system says that it has no direct reads for this file.
    #[error("{file} has no direct reads, says statx")]
    Unsupported {
        /// The file.
        file: String,
    },
    /// Direct reads need more alignment than a store has.
    #[error(
        "{file} needs direct reads aligned to {offset} bytes in the file and {memory} in memory, \
         a store has {OFFERED_ALIGN}"
    )]
    Alignment {
        /// The file.
        file: String,
        /// Alignment in the file.
        offset: u32,
        /// Alignment in memory.
        memory: u32,
    },
    /// A first read failed.
    #[error("a direct read of {file} failed: {source}")]
    Read {
        /// The file.
        file: String,
        /// The system's answer.
        source: io::Error,
    },
    /// There is no io_uring for this process.
    #[error("io_uring is not to be had: {0}")]
    Ring(#[source] io::Error),
}

impl NotDirect {
    /// The value of the label `reason` in metrics.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Open { .. } => "o_direct_refused",
            Self::Unsupported { .. } => "no_direct_reads",
            Self::Alignment { .. } => "alignment",
            Self::Read { .. } => "direct_read_failed",
            Self::Ring(_) => "no_io_uring",
        }
    }
}

/// A store's files, open for direct reads, in order of layer.
#[derive(Debug)]
pub(crate) struct DirectFiles(pub(crate) Vec<File>);

impl DirectFiles {
    /// Opens every layer's file, looks at what its file system asks, and reads a page of it.
    pub(crate) fn open(store: &ExpertStore) -> Result<Self, NotDirect> {
        let mut files = Vec::new();
        for layer in store.manifest().layout().layers() {
            let name = layer_file_name(layer.layer());
            let file = open(store, &name)?;
            check_alignment(&file, &name)?;
            read_a_page(&file).map_err(|source| NotDirect::Read { file: name, source })?;
            files.push(file);
        }
        Ok(Self(files))
    }
}

fn open(store: &ExpertStore, name: &str) -> Result<File, NotDirect> {
    let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
    let opened = rustix::fs::open(store.dir().join(name), flags, Mode::empty());
    let file = name.to_owned();
    opened.map(File::from).map_err(|errno| NotDirect::Open { file, source: errno.into() })
}

/// Where statx does not answer, the first read does.
fn check_alignment(file: &File, name: &str) -> Result<(), NotDirect> {
    let Ok(found) = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, STATX_DIOALIGN) else {
        return Ok(());
    };
    if found.stx_mask & STATX_DIOALIGN.bits() == 0 {
        return Ok(());
    }
    let file = name.to_owned();
    let (offset, memory) = (found.stx_dio_offset_align, found.stx_dio_mem_align);
    if offset == 0 || memory == 0 {
        return Err(NotDirect::Unsupported { file });
    }
    if OFFERED_ALIGN.is_multiple_of(offset) && OFFERED_ALIGN.is_multiple_of(memory) {
        return Ok(());
    }
    Err(NotDirect::Alignment { file, offset, memory })
}

fn read_a_page(file: &File) -> io::Result<()> {
    #[repr(C, align(4096))]
    struct Page([u8; 4096]);
    let mut page = Page([0; 4096]);
    // How much comes does not matter: that a file is too short is for whoever wants its records.
    rustix::io::pread(file, &mut page.0, 0)?;
    Ok(())
}
