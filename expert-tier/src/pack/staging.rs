//! A directory beside the output that becomes the store in one rename, or nothing.
//!
//! A staging directory is named `.NAME.partial-<random>` and its owner holds an exclusive `flock`
//! on it for as long as it lives, so a later pack can tell a killed pack's leftovers (nobody
//! holds the lock) from a live one's work. The lock is taken on the directory itself: nothing has
//! to be removed from it before it is published.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    Access, AtFlags, CWD, FlockOperation, StatxAttributes, StatxFlags, accessat, flock, statx,
};

use super::PackError;

/// Tries to find an unused name; each failure means that another pack took a random one.
const ATTEMPTS: usize = 16;

/// The checked place where a store is going to be.
#[derive(Debug)]
pub(super) struct Target {
    out: PathBuf,
    parent: PathBuf,
    name: String,
}

impl Target {
    /// Accepts a path where nothing is, or an empty directory.
    pub(super) fn check(out: &Path) -> Result<Self, PackError> {
        let resolved = match fs::symlink_metadata(out) {
            Ok(_) => fs::canonicalize(out).map_err(PackError::io("resolve", out))?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                std::path::absolute(out).map_err(PackError::io("resolve", out))?
            }
            Err(error) => return Err(PackError::io("look at", out)(error)),
        };
        if resolved.exists() {
            if !resolved.is_dir() {
                return Err(PackError::output(out, "it exists and is not a directory"));
            }
            let entries = fs::read_dir(&resolved).map_err(PackError::io("list", out))?;
            let count = entries.take(1000).count();
            if count > 0 {
                let why = format!(
                    "the directory is not empty ({count}{} entries): empty it or choose another",
                    if count == 1000 { " or more" } else { "" }
                );
                return Err(PackError::output(out, why));
            }
        }
        let (Some(parent), Some(name)) = (resolved.parent(), resolved.file_name()) else {
            return Err(PackError::output(out, "it has no parent directory"));
        };
        if is_mount_point(&resolved, parent) {
            let why = format!(
                "it is a mount point, and a store takes its place in one rename: choose a \
                 directory in it, {} say",
                resolved.join("store").display()
            );
            return Err(PackError::output(out, why));
        }
        check_writable(out, parent)?;
        let Some(name) = name.to_str() else {
            return Err(PackError::output(out, "its name is not UTF-8"));
        };
        Ok(Self { parent: parent.into(), name: name.into(), out: resolved.clone() })
    }

    /// Refuses a store of `needed` bytes where the file system has fewer available.
    pub(super) fn check_space(&self, needed: u64) -> Result<(), PackError> {
        let dir = existing(&self.parent);
        let stat = rustix::fs::statvfs(dir)
            .map_err(|errno| PackError::io("ask for the free space of", dir)(errno.into()))?;
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        if free < needed {
            return Err(PackError::NoSpace { path: dir.into(), needed, free });
        }
        Ok(())
    }
}

/// The directory itself, or the nearest above it that is there already.
fn existing(dir: &Path) -> &Path {
    dir.ancestors().find(|dir| dir.exists()).unwrap_or(dir)
}

/// Whether a rename onto `dir` would fail because another file system begins there, or the same
/// one once more.
fn is_mount_point(dir: &Path, parent: &Path) -> bool {
    let device = |path: &Path| fs::symlink_metadata(path).map(|found| found.dev()).ok();
    let found = statx(CWD, dir, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS);
    let marked = found.is_ok_and(|it| it.stx_attributes.contains(StatxAttributes::MOUNT_ROOT));
    marked || device(dir).is_some_and(|of_dir| device(parent) != Some(of_dir))
}

/// Refuses a place beside which nothing can be created.
fn check_writable(out: &Path, parent: &Path) -> Result<(), PackError> {
    let dir = existing(parent);
    accessat(CWD, dir, Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS).map_err(|errno| {
        let (dir, error) = (dir.display(), io::Error::from(errno));
        PackError::output(out, format!("a store is made in {dir} first, which refuses: {error}"))
    })
}

/// A locked, private directory that is removed when dropped, unless it was published.
#[derive(Debug)]
pub(super) struct Staging {
    target: Target,
    path: PathBuf,
    /// Holds the lock; `None` once the directory has become the store.
    lock: Option<File>,
}

impl Staging {
    /// Removes what killed packs left for the same target, then makes a directory of its own.
    pub(super) fn create(target: Target) -> Result<Self, PackError> {
        fs::create_dir_all(&target.parent).map_err(PackError::io("create", &target.parent))?;
        remove_leftovers(&target)?;
        for _ in 0..ATTEMPTS {
            let name = format!("{}{:016x}", prefix(&target), rand::random::<u64>());
            let path = target.parent.join(name);
            match fs::create_dir(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(PackError::io("create", &path)(error)),
            }
            match lock_directory(&path) {
                Ok(Some(lock)) => return Ok(Self { target, path, lock: Some(lock) }),
                Ok(None) => {}
                Err(error) => {
                    // It is empty, and without a lock nobody could tell whose it is.
                    drop(fs::remove_dir(&path));
                    return Err(PackError::io("lock", &path)(error));
                }
            }
        }
        let why = format!("no staging directory could be locked in {ATTEMPTS} attempts");
        Err(PackError::output(&target.out, why))
    }

    /// Where the files of the store are written.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the directory the store: from here on readers see all of it.
    ///
    /// Its files must have been synced.
    pub(super) fn publish(mut self) -> Result<(), PackError> {
        sync_directory(&self.path)?;
        fs::rename(&self.path, &self.target.out).map_err(|error| match error.kind() {
            io::ErrorKind::DirectoryNotEmpty => {
                PackError::output(&self.target.out, "the directory was filled during the pack")
            }
            _ => PackError::io("rename the finished store to", &self.target.out)(error),
        })?;
        self.lock = None;
        let Target { out, parent, .. } = &self.target;
        File::open(parent).and_then(|dir| dir.sync_all()).map_err(|source| PackError::Unsynced {
            out: out.clone(),
            parent: parent.clone(),
            source,
        })
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // The lock is released after the removal, so that nobody else removes it meanwhile.
        if self.lock.is_some()
            && let Err(error) = fs::remove_dir_all(&self.path)
        {
            let path = self.path.display();
            tracing::warn!("cannot remove {path}: {error}; the next pack to the same place will");
        }
    }
}

fn prefix(target: &Target) -> String {
    format!(".{}.partial-", target.name)
}

/// Locks a directory; `None` where somebody else holds it or it has gone meanwhile.
///
/// A cleaner can lock and remove a directory between its creation and this call, hence the
/// comparison with what the path names once the lock is held.
fn lock_directory(path: &Path) -> io::Result<Option<File>> {
    let gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    let file = match File::open(path) {
        Err(error) if gone(&error) => return Ok(None),
        opened => opened?,
    };
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(errno) if errno == rustix::io::Errno::WOULDBLOCK => return Ok(None),
        locked => locked?,
    }
    let there = match fs::symlink_metadata(path) {
        Err(error) if gone(&error) => return Ok(None),
        found => found?,
    };
    let held = file.metadata()?;
    Ok(((there.dev(), there.ino()) == (held.dev(), held.ino())).then_some(file))
}

fn remove_leftovers(target: &Target) -> Result<(), PackError> {
    let prefix = prefix(target);
    let list = |error| PackError::io("list", &target.parent)(error);
    for entry in fs::read_dir(&target.parent).map_err(list)? {
        let entry = entry.map_err(list)?;
        let name = entry.file_name();
        let random = name.to_str().and_then(|name| name.strip_prefix(&prefix));
        let ours = random.is_some_and(|text| {
            text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
        });
        if !ours || !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let path = entry.path();
        // Another user's leftover is not worth failing for: this pack does not need its name.
        let Ok(Some(_lock)) = lock_directory(&path) else { continue };
        match fs::remove_dir_all(&path) {
            Ok(()) => tracing::info!("removed {}, left by a pack that was killed", path.display()),
            Err(error) => tracing::warn!("cannot remove {}: {error}", path.display()),
        }
    }
    Ok(())
}

fn sync_directory(path: &Path) -> Result<(), PackError> {
    File::open(path).and_then(|dir| dir.sync_all()).map_err(PackError::io("sync", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn staging(out: &Path) -> Staging {
        Staging::create(Target::check(out).unwrap()).unwrap()
    }

    #[test]
    fn leftovers_of_the_dead_are_removed_and_work_of_the_living_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("store");
        let live = staging(&out);
        let dead = dir.path().join(".store.partial-0123456789abcdef");
        fs::create_dir(&dead).unwrap();
        fs::write(dead.join("layer-00000.records"), "half").unwrap();
        let unrelated = dir.path().join(".store.partial-mine");
        fs::create_dir(&unrelated).unwrap();
        let second = staging(&out);
        assert!(live.path().exists() && second.path().exists() && unrelated.exists());
        assert!(!dead.exists());
        drop(second);
        drop(live);
        let left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().path()).collect();
        assert_eq!(left, [unrelated]);
    }

    #[test]
    fn of_two_packs_to_one_place_the_second_to_finish_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("store");
        let (first, second) = (staging(&out), staging(&out));
        for staged in [&first, &second] {
            fs::write(staged.path().join("manifest.json"), "{}").unwrap();
        }
        first.publish().unwrap();
        let error = second.publish().unwrap_err().to_string();
        assert!(error.contains("filled during the pack"), "{error}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_store_whose_parent_cannot_be_synced_is_said_to_be_there() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("store");
        let mut staged = staging(&out);
        staged.target.parent = dir.path().join("gone");
        let error = staged.publish().unwrap_err();
        assert!(matches!(error, PackError::Unsynced { .. }) && out.is_dir(), "{error}");
        let error = error.to_string();
        assert!(error.contains("store and complete, but") && error.contains("gone"), "{error}");
    }

    #[test]
    fn only_nothing_or_an_empty_directory_can_become_a_store() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Target::check(dir.path()).is_ok());
        assert!(Target::check(&dir.path().join("a/b/c")).is_ok());
        fs::write(dir.path().join("file"), "").unwrap();
        let error = Target::check(dir.path()).unwrap_err().to_string();
        assert!(error.contains("not empty (1 entries)"), "{error}");
        let error = Target::check(&dir.path().join("file")).unwrap_err().to_string();
        assert!(error.contains("not a directory"), "{error}");
        assert!(Target::check(Path::new("/")).is_err());
    }

    #[test]
    fn a_store_that_cannot_fit_is_refused_with_both_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let target = Target::check(&dir.path().join("x/store")).unwrap();
        target.check_space(1).unwrap();
        let error = target.check_space(u64::MAX).unwrap_err();
        assert!(matches!(error, PackError::NoSpace { needed: u64::MAX, .. }), "{error}");
    }
}
