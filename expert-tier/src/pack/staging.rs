//! A directory beside the output that becomes the store in one rename, or nothing.
//!
//! A staging directory is named `.NAME.partial-<random>` and its owner holds an exclusive `flock`
//! on it for as long as it lives, so a later pack can tell a killed pack's leftovers (nobody
//! holds the lock) from a live one's work. The lock is taken on the directory itself: nothing has
//! to be removed from it before it is published. A file system without locks keeps leftovers.
//!
//! With [`Unfinished::Keep`] there is a [journal](super::journal) in it, and a pack that does not
//! finish leaves both. The next such pack to the same place goes on with them. The journal must
//! not become part of the store, so it leaves the directory before the rename, for a place beside
//! it; from there it is put back where the store was not published after all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Once;

use rustix::fs::{
    Access, AtFlags, CWD, FlockOperation, OFlags, StatxAttributes, StatxFlags, accessat, flock,
    statx,
};

use super::filesystem::{free_bytes, is_unsupported, sync_directory};
use super::journal::{self, Head, Journal, JournalWriter};
use super::{PackError, Unfinished};
use crate::files::open_regular;
use crate::layout::{ExpertLayout, LayerLayout};
use crate::store::manifest::layer_file_name;

/// Tries to find an unused name; each failure means that another pack took a random one.
const ATTEMPTS: usize = 16;
/// What the name of a journal beside its staging directory ends in.
const JOURNAL_SUFFIX: &str = ".journal";

static NO_LOCKS: Once = Once::new();

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

    /// Refuses a store of `needed` bytes where the file system says that it has fewer available.
    pub(super) fn check_space(&self, needed: u64) -> Result<(), PackError> {
        let dir = existing(&self.parent);
        match free_bytes(dir) {
            Some(free) if free < needed => {
                Err(PackError::NoSpace { path: dir.into(), needed, free })
            }
            _ => Ok(()),
        }
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

/// A locked, private directory that is removed when dropped, unless it was published or is to be
/// resumed.
#[derive(Debug)]
pub(super) struct Staging {
    target: Target,
    path: PathBuf,
    unfinished: Unfinished,
    /// Holds the lock; `None` once the directory has become the store.
    lock: Option<File>,
}

impl Staging {
    /// Removes what killed packs left for the same target, then makes a directory of its own.
    ///
    /// # Errors
    /// There is no room for `needed` bytes, or nothing can be created.
    pub(super) fn create(target: Target, needed: u64) -> Result<Self, PackError> {
        for (path, _lock) in leftovers(&target)? {
            remove(&path, "left by a pack that was ended");
        }
        target.check_space(needed)?;
        Self::create_empty(target, Unfinished::Remove)
    }

    /// Takes over what an earlier pack of the same plan left, or begins anew; what it took over.
    ///
    /// # Errors
    /// As for [`create`](Self::create).
    pub(super) fn resume(
        target: Target,
        needed: u64,
        layout: &ExpertLayout,
        head: &Head,
        moved: &mut Vec<String>,
    ) -> Result<(Self, Option<Journal>), PackError> {
        let mut best: Option<(PathBuf, File, Journal, Vec<String>)> = None;
        for (path, lock) in leftovers(&target)? {
            let mut names = Vec::new();
            match adoptable(&path, layout, head, &mut names) {
                Ok(found)
                    if best
                        .as_ref()
                        .is_none_or(|b| b.2.staged.records() < found.staged.records()) =>
                {
                    let older = best.replace((path, lock, found, names));
                    older.inspect(|(path, ..)| remove(path, "another has more records"));
                }
                Ok(_) => remove(&path, "another has more records"),
                Err(why) => {
                    let shown = path.display();
                    tracing::warn!("starting over, and not with what is kept in {shown}: {why}");
                    remove(&path, "which cannot be resumed");
                }
            }
        }
        let Some((path, lock, journal, names)) = best else {
            target.check_space(needed)?;
            let staging = Self::create_empty(target, Unfinished::Keep)?;
            return Ok((staging, None));
        };
        moved.extend(names);
        let missing = needed.saturating_sub(allocated(&path));
        let staging = Self { target, path, unfinished: Unfinished::Keep, lock: Some(lock) };
        match staging.target.check_space(missing) {
            Ok(()) => Ok((staging, Some(journal))),
            Err(error) => Err(staging.kept(error)),
        }
    }

    fn create_empty(target: Target, unfinished: Unfinished) -> Result<Self, PackError> {
        fs::create_dir_all(&target.parent).map_err(PackError::io("create", &target.parent))?;
        for _ in 0..ATTEMPTS {
            let name = format!("{}{:016x}", prefix(&target), rand::random::<u64>());
            let path = target.parent.join(name);
            match fs::create_dir(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(PackError::io("create", &path)(error)),
            }
            match lock_directory(&path) {
                Ok(Lock::Held(lock) | Lock::Unsupported(lock)) => {
                    return Ok(Self { target, path, unfinished, lock: Some(lock) });
                }
                Ok(Lock::Taken) => {}
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

    /// A writer at the end of the journal, of which `bytes` are sound.
    ///
    /// # Errors
    /// It cannot be opened, or cut where the sound bytes end.
    pub(super) fn journal(&self, bytes: u64) -> Result<JournalWriter, PackError> {
        let path = self.path.join(journal::FILE_NAME);
        let open = || {
            let mut options = OpenOptions::new();
            options.append(true).create(true).custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
            let file = options.open(&path)?;
            file.set_len(bytes)?;
            Ok(JournalWriter::new(file))
        };
        open().map_err(PackError::io("write", &path))
    }

    /// Removes the directory when it is dropped, whatever was asked for.
    pub(super) fn discard(&mut self) {
        self.unfinished = Unfinished::Remove;
    }

    /// What `error` becomes where the directory stays.
    pub(super) fn kept(&self, error: PackError) -> PackError {
        match self.unfinished {
            Unfinished::Remove => error,
            Unfinished::Keep => {
                PackError::Kept { source: Box::new(error), staging: self.path.clone() }
            }
        }
    }

    /// Makes the directory the store: from here on readers see all of it.
    ///
    /// Its files must have been synced.
    ///
    /// # Errors
    /// The directory cannot be renamed; a journal is in it again. Or it has been, and could not be
    /// synced.
    pub(super) fn publish(&mut self) -> Result<(), PackError> {
        let (inside, beside) = (self.path.join(journal::FILE_NAME), journal_beside(&self.path));
        if self.unfinished == Unfinished::Keep {
            fs::rename(&inside, &beside).map_err(PackError::io("rename", &inside))?;
        }
        let published = sync_directory(&self.path)
            .map_err(PackError::io("sync", &self.path))
            .and_then(|()| self.rename());
        if self.unfinished == Unfinished::Keep {
            let settled = match published {
                Ok(()) => fs::remove_file(&beside),
                Err(_) => fs::rename(&beside, &inside),
            };
            if let Err(error) = settled {
                let path = beside.display();
                tracing::warn!("{path} is in nobody's way any more, and stays: {error}");
            }
        }
        published?;
        self.lock = None;
        let Target { out, parent, .. } = &self.target;
        sync_directory(parent).map_err(|source| PackError::Unsynced {
            out: out.clone(),
            parent: parent.clone(),
            source,
        })
    }

    fn rename(&self) -> Result<(), PackError> {
        fs::rename(&self.path, &self.target.out).map_err(|error| match error.kind() {
            io::ErrorKind::DirectoryNotEmpty => {
                PackError::output(&self.target.out, "the directory was filled during the pack")
            }
            _ => PackError::io("rename the finished store to", &self.target.out)(error),
        })
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // The lock is released after the removal, so that nobody else removes it meanwhile.
        if self.lock.is_some()
            && self.unfinished == Unfinished::Remove
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

fn journal_beside(staging: &Path) -> PathBuf {
    let mut name = staging.file_name().unwrap_or_default().to_owned();
    name.push(JOURNAL_SUFFIX);
    staging.with_file_name(name)
}

enum Lock {
    Held(File),
    /// Somebody else holds it, or the directory has gone meanwhile.
    Taken,
    /// The file system has no locks.
    Unsupported(File),
}

/// Locks a directory.
///
/// A cleaner can lock and remove a directory between its creation and this call, hence the look
/// at its path once the lock is held. Names are random, so what is there is the same directory;
/// its inode's number is not compared, since some file systems give another each time.
fn lock_directory(path: &Path) -> io::Result<Lock> {
    let gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    let file = match File::open(path) {
        Err(error) if gone(&error) => return Ok(Lock::Taken),
        opened => opened?,
    };
    match flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(io::Error::from) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Lock::Taken),
        Err(error) if is_unsupported(&error) || is_no_locks(&error) => {
            NO_LOCKS.call_once(|| {
                let path = path.display();
                tracing::warn!(
                    "{path} cannot be locked ({error}): what a killed pack leaves stays"
                );
            });
            return Ok(Lock::Unsupported(file));
        }
        Err(error) => return Err(error),
    }
    match fs::symlink_metadata(path) {
        Err(error) if gone(&error) => Ok(Lock::Taken),
        found => Ok(if found?.is_dir() { Lock::Held(file) } else { Lock::Taken }),
    }
}

fn is_no_locks(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::NOLCK.raw_os_error())
}

/// What packs to the same target left that nobody works on, each with its lock.
fn leftovers(target: &Target) -> Result<Vec<(PathBuf, File)>, PackError> {
    let prefix = prefix(target);
    let list = |error| PackError::io("list", &target.parent)(error);
    let entries = match fs::read_dir(&target.parent) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(list)?,
    };
    let (mut found, mut journals) = (Vec::new(), Vec::new());
    for entry in entries {
        let entry = entry.map_err(list)?;
        let name = entry.file_name();
        let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(&prefix)) else {
            continue;
        };
        let (random, journal) = match rest.strip_suffix(JOURNAL_SUFFIX) {
            Some(random) => (random, true),
            None => (rest, false),
        };
        if random.len() != 16 || !random.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            continue;
        }
        let kind = entry.file_type();
        if journal && kind.as_ref().is_ok_and(|kind| kind.is_file()) {
            journals.push(entry.path());
        }
        if journal || !kind.is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        // Another user's leftover is not worth failing for: this pack does not need its name.
        if let Ok(Lock::Held(lock)) = lock_directory(&entry.path()) {
            found.push((entry.path(), lock));
        }
    }
    for journal in journals {
        let staging = journal.with_extension("");
        if found.iter().any(|(path, _)| *path == staging) {
            // Its pack was killed just before the directory was to become the store.
            let _ = fs::rename(&journal, staging.join(journal::FILE_NAME));
        } else if !staging.exists() {
            let _ = fs::remove_file(&journal);
        }
    }
    Ok(found)
}

fn remove(path: &Path, why: &str) {
    match fs::remove_dir_all(path) {
        Ok(()) => tracing::info!("removed {}, {why}", path.display()),
        Err(error) => tracing::warn!("cannot remove {}: {error}", path.display()),
    }
}

/// The journal of a leftover that a pack of `head` can go on with, or why it cannot. What does not
/// belong into it is removed.
fn adoptable(
    path: &Path,
    layout: &ExpertLayout,
    head: &Head,
    moved: &mut Vec<String>,
) -> Result<Journal, String> {
    let text = |error: io::Error| error.to_string();
    let owner = fs::metadata(path).map_err(text)?.uid();
    if owner != rustix::process::geteuid().as_raw() {
        return Err("it belongs to another user".into());
    }
    let file = open_regular(&path.join(journal::FILE_NAME), OFlags::RDONLY | OFlags::NOFOLLOW);
    let file = match file {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err("its pack was run without --resume".into());
        }
        file => file.map_err(text)?,
    };
    let journal = journal::read(BufReader::new(file), layout).map_err(text)?;
    let Some(journal) = journal else { return Err("it has no journal that can be read".into()) };
    if let Some(why) = journal.head.obstacle(head, moved) {
        return Err(why);
    }
    let ours: Vec<_> =
        layout.layers().iter().map(|l| layer_file_name(LayerLayout::layer(l))).collect();
    for entry in fs::read_dir(path).map_err(text)? {
        let entry = entry.map_err(text)?;
        let found = fs::symlink_metadata(entry.path()).map_err(text)?;
        let name = entry.file_name();
        let known = ours.iter().any(|ours| name == ours.as_str()) || name == journal::FILE_NAME;
        if found.is_file() && known && found.nlink() <= 1 {
            continue;
        }
        let removed = if found.is_dir() {
            fs::remove_dir_all(entry.path())
        } else {
            fs::remove_file(entry.path())
        };
        removed.map_err(text)?;
    }
    Ok(journal)
}

/// Bytes that the files of a directory take on their disk.
fn allocated(dir: &Path) -> u64 {
    let files = fs::read_dir(dir).into_iter().flatten().flatten();
    files.filter_map(|file| file.metadata().ok()).map(|found| found.blocks() * 512).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn staging(out: &Path) -> Staging {
        Staging::create(Target::check(out).unwrap(), 1).unwrap()
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
        let (mut first, mut second) = (staging(&out), staging(&out));
        for staged in [&first, &second] {
            fs::write(staged.path().join("manifest.json"), "{}").unwrap();
        }
        first.publish().unwrap();
        let error = second.publish().unwrap_err().to_string();
        assert!(error.contains("filled during the pack"), "{error}");
        drop(second);
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
