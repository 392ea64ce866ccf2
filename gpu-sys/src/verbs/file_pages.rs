//! The pages of a file, registered as they are.
//!
//! A peer that serves from the page cache needs a read-only shared mapping of the store's file to be
//! registered. Nobody here ever looks at such a mapping: of a file that was truncated meanwhile the
//! registration fails, where a look would end in SIGBUS. Kernels differ: Linux 6.1 refuses it with `EFAULT`, 6.12 does it without a copy. There
//! is nothing to ask, so it is tried, on a file of our own that no name leads to: nobody else can
//! shorten it, and its bytes are never looked at.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, Mode, OFlags, ftruncate, memfd_create, open};

use super::error::VerbsError;
use super::memory::{Access, Memory, MemoryRegion, ProtectionDomain};
use super::post::Source;
use crate::slots::SlotPart;

/// Two pages of the largest size that any supported machine has (64 KiB on some aarch64 kernels).
const PROBE_BYTES: usize = 128 * 1024;

/// Whether file pages can be registered.
#[derive(Debug)]
pub enum FilePages {
    /// For remote reading, without a copy.
    Registered,
    /// The kernel refuses, `EFAULT` before Linux 6.2.
    Refused(io::Error),
}

/// Registers a read-only shared mapping of a file without a name in `dir` for remote reading, and
/// lets go of it again. Where `dir` takes no such file, one in memory is used, whose pages are
/// treated alike.
///
/// # Errors
/// The file cannot be made or mapped, or the registration fails for another reason, such as the
/// locked-memory limit.
pub fn probe_file_pages(
    domain: &Arc<ProtectionDomain>,
    dir: &Path,
) -> Result<FilePages, VerbsError> {
    let mapping = FileMapping::probe(dir).map_err(|source| VerbsError::Call {
        call: "a mapping of a file",
        on: dir.display().to_string(),
        source,
    })?;
    let memory: Arc<dyn Memory> = Arc::new(mapping);
    match MemoryRegion::register(domain, memory, 0..PROBE_BYTES, Access::RemoteRead) {
        // Dropping the region deregisters it before the mapping goes.
        Ok(_region) => Ok(FilePages::Registered),
        Err(VerbsError::Call { source, .. }) if is_refusal(&source) => {
            Ok(FilePages::Refused(source))
        }
        Err(error) => Err(error),
    }
}

/// Whether the kernel says that it does not do this, rather than that it cannot now.
fn is_refusal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EFAULT | libc::EINVAL | libc::EOPNOTSUPP))
}

/// A read-only shared mapping of a file, for devices alone.
#[derive(Debug)]
pub struct FileMapping(MmapRaw);

/// A range of a mapped file that is written to a peer from.
#[derive(Debug)]
pub struct FilePart {
    mapping: Arc<FileMapping>,
    range: Range<usize>,
}

impl FileMapping {
    /// Maps the first `bytes` of `file`.
    ///
    /// # Errors
    /// There are none, or the file cannot be mapped.
    pub fn of(file: &File, bytes: u64) -> io::Result<Arc<Self>> {
        let length = usize::try_from(bytes).ok().filter(|length| *length > 0);
        let length = length.ok_or(io::ErrorKind::InvalidInput)?;
        // The mapping keeps the file.
        MmapOptions::new().len(length).map_raw_read_only(file).map(|raw| Arc::new(Self(raw)))
    }

    /// Lets `range` of it be sent; a range that does not lie in the mapping is cut to what does.
    #[must_use]
    pub fn part(self: &Arc<Self>, range: Range<usize>) -> FilePart {
        let end = range.end.min(self.0.len());
        FilePart { mapping: Arc::clone(self), range: range.start.min(end)..end }
    }

    fn probe(dir: &Path) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        let file = open(dir, flags, Mode::RUSR | Mode::WUSR)
            .or_else(|_| memfd_create("metrale-probe", MemfdFlags::CLOEXEC))?;
        ftruncate(&file, PROBE_BYTES as u64)?;
        let file = File::from(file);
        MmapOptions::new().len(PROBE_BYTES).map_raw_read_only(&file).map(Self)
    }
}

// SAFETY: one mapping, made once and unmapped when dropped, at the same address until then. It is
// read-only, so the kernel refuses to register it for writing; and no reference to its bytes exists.
unsafe impl Memory for FileMapping {
    fn region(&self) -> (NonNull<u8>, usize) {
        let start = NonNull::new(self.0.as_mut_ptr());
        (start.expect("mmap of a length above zero is never null"), self.0.len())
    }

    fn takes_writes(&self) -> bool {
        false
    }
}

// SAFETY: the range lies in the mapping, as `part` made sure, which is held. The device sends from
// pages that it has pinned, whatever becomes of the file; nobody else looks at them through this.
unsafe impl Source for FilePart {
    fn source(&self) -> (NonNull<u8>, usize) {
        let (start, _) = self.mapping.region();
        // SAFETY: as above, the start of the range is inside the mapping or its end.
        (unsafe { start.add(self.range.start) }, self.range.len())
    }
}

/// What WRITEs come from at a peer that has records both in slots and in files.
#[derive(Debug)]
pub enum WriteFrom {
    /// A part of a pinned slot.
    Slot(SlotPart),
    /// A part of a mapped file.
    File(FilePart),
}

// SAFETY: the bytes of whichever it is.
unsafe impl Source for WriteFrom {
    fn source(&self) -> (NonNull<u8>, usize) {
        match self {
            Self::Slot(part) => part.source(),
            Self::File(part) => part.source(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::{self, count, fail, state};
    use super::*;

    #[test]
    fn a_kernel_that_refuses_is_told_from_one_that_cannot_now() {
        for (errno, refused) in [(libc::EFAULT, true), (libc::ENOMEM, false)] {
            state(|it| *it = fake::State::default());
            let context = fake::library(Path::new("/absent")).open_device("fake0").unwrap();
            let domain = ProtectionDomain::new(&context).unwrap();
            fail("ibv_reg_mr", errno);
            let found = probe_file_pages(&domain, Path::new("/tmp"));
            assert_eq!(matches!(found, Ok(FilePages::Refused(_))), refused, "{found:?}");
        }
    }

    #[test]
    fn what_was_registered_is_let_go_of() {
        let context = fake::library(Path::new("/absent")).open_device("fake0").unwrap();
        let domain = ProtectionDomain::new(&context).unwrap();
        let found = probe_file_pages(&domain, Path::new("/tmp"));
        assert!(matches!(found, Ok(FilePages::Registered)), "{found:?}");
        assert_eq!((count("ibv_reg_mr"), count("ibv_dereg_mr")), (1, 1));
    }

    #[test]
    fn a_file_without_a_name_is_mapped_wherever_the_directory_is() {
        let dir = tempfile::tempdir().unwrap();
        for dir in [dir.path(), Path::new("/proc"), Path::new("/absent")] {
            let mapping = FileMapping::probe(dir).unwrap();
            assert_eq!(mapping.region().1, PROBE_BYTES, "{}", dir.display());
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left behind");
    }
}
