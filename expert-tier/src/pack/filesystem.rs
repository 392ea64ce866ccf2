//! What a file system may not offer, and what a pack does without it: it goes on, and says so once.
//!
//! Network, FUSE and memory file systems leave out much: how much room there is (no blocks at all,
//! or no answer), space set aside, the syncing of directories. None of that says that a pack
//! cannot be done; a full disk shows when it is written to.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Once;

use rustix::fs::{FallocateFlags, StatVfs, fallocate, statvfs};
use rustix::io::Errno;

static NO_FREE_SPACE: Once = Once::new();
static NO_SYNC: Once = Once::new();

/// Whether a call failed because its file system does not have it.
pub(super) fn is_unsupported(error: &io::Error) -> bool {
    // EBADF and EISDIR are what some answer for a directory that is open for reading.
    let not_there = [
        Errno::INVAL,
        Errno::NOSYS,
        Errno::OPNOTSUPP,
        Errno::NOTSUP,
        Errno::NOTTY,
        Errno::BADF,
        Errno::ISDIR,
    ];
    let number = error.raw_os_error();
    not_there.iter().any(|errno| number == Some(errno.raw_os_error()))
}

/// Bytes that the file system of `dir` has room for; `None` where it does not say.
pub(super) fn free_bytes(dir: &Path) -> Option<u64> {
    let free = free_of(statvfs(dir));
    if free.is_none() {
        NO_FREE_SPACE.call_once(|| {
            let dir = dir.display();
            tracing::warn!("the file system of {dir} does not say how much room it has: going on");
        });
    }
    free
}

fn free_of(stat: Result<StatVfs, Errno>) -> Option<u64> {
    let stat = stat.ok().filter(|stat| stat.f_blocks != 0 && stat.f_frsize != 0)?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Makes `file` as long as it is going to be, with its space set aside where that can be done.
pub(super) fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    loop {
        match fallocate(file, FallocateFlags::empty(), 0, bytes).map_err(io::Error::from) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if is_unsupported(&error) => break,
            other => return other,
        }
    }
    match file.set_len(bytes) {
        // The writes will make it longer.
        Err(error) if is_unsupported(&error) => Ok(()),
        other => other,
    }
}

/// The outcome of syncing `path`, where it is none that its file system cannot.
pub(super) fn synced(outcome: io::Result<()>, path: &Path) -> io::Result<()> {
    match outcome {
        Err(error) if is_unsupported(&error) => {
            NO_SYNC.call_once(|| {
                let path = path.display();
                tracing::warn!(
                    "the file system of {path} does not sync it ({error}): going on; after a power \
                     failure the store may be damaged or gone, which `metrale verify` finds"
                );
            });
            Ok(())
        }
        other => other,
    }
}

/// Syncs a directory's entries.
pub(super) fn sync_directory(path: &Path) -> io::Result<()> {
    synced(File::open(path).and_then(|dir| dir.sync_all()), path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(errno: Errno) -> io::Result<()> {
        Err(errno.into())
    }

    #[test]
    fn a_file_system_without_figures_is_not_taken_for_a_full_one() {
        let stat = || statvfs("/").unwrap();
        assert!(free_of(Ok(stat())).is_some());
        assert_eq!(free_of(Ok(StatVfs { f_blocks: 0, f_bavail: 0, ..stat() })), None);
        assert_eq!(free_of(Ok(StatVfs { f_frsize: 0, ..stat() })), None);
        let full = StatVfs { f_blocks: 100, f_bavail: 0, f_frsize: 4096, ..stat() };
        assert_eq!(free_of(Ok(full)), Some(0));
        for errno in [Errno::NOSYS, Errno::OPNOTSUPP, Errno::INVAL, Errno::ACCESS] {
            assert_eq!(free_of(Err(errno)), None, "{errno}");
        }
    }

    #[test]
    fn a_sync_that_is_not_there_is_no_failure_and_one_that_fails_is() {
        let path = Path::new("x");
        for errno in [Errno::INVAL, Errno::OPNOTSUPP, Errno::NOSYS, Errno::BADF, Errno::ISDIR] {
            assert!(synced(failed(errno), path).is_ok(), "{errno}");
        }
        for errno in [Errno::IO, Errno::NOSPC, Errno::DQUOT, Errno::STALE] {
            assert!(synced(failed(errno), path).is_err(), "{errno}");
        }
    }
}
