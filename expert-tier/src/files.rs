//! Opening files that somebody else put where they are: never waiting for one, and taking only
//! what can be read as a file.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{Mode, OFlags, fcntl_getfl, fcntl_setfl};
use serde::{Deserialize, Serialize};

/// Opens a regular file for reading; one that nobody writes to is no wait.
///
/// # Errors
/// The file cannot be opened, or is none; the text says what it is instead.
pub fn open(path: &Path) -> io::Result<File> {
    open_regular(path, OFlags::RDONLY)
}

/// The same, with `flags` besides.
///
/// A FIFO would otherwise block its opener until somebody writes to it, so the file is opened
/// without waiting and looked at afterwards; the flag is taken back, since io_uring answers reads
/// of a file that has it with `EAGAIN`.
///
/// # Errors
/// The file cannot be opened, or is none; the text says what it is instead.
pub(crate) fn open_regular(path: &Path, flags: OFlags) -> io::Result<File> {
    let opened = rustix::fs::open(
        path,
        flags | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY,
        Mode::empty(),
    );
    let file = match opened.map(File::from).map_err(io::Error::from) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && path.is_symlink() => {
            return Err(io::Error::new(error.kind(), "it is a symbolic link to nothing"));
        }
        // What a socket answers, and a device that nobody is behind.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NXIO.raw_os_error()) => {
            return Err(not_regular("a socket or device"));
        }
        opened => opened?,
    };
    let kind = file.metadata()?.file_type();
    if !kind.is_file() {
        return Err(not_regular(match () {
            () if kind.is_dir() => "a directory",
            () if kind.is_fifo() => "a FIFO",
            () => "a device",
        }));
    }
    fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    Ok(file)
}

fn not_regular(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("not a regular file but {what}"))
}

/// What tells a file from any other, and from itself after a change.
///
/// A change within the clock tick (10 ms at most) of the file's previous one can go unseen by
/// its times; whoever replaces a file changes its number, and whoever writes for longer is seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileIdentity {
    pub(crate) device: u64,
    pub(crate) number: u64,
    links: u64,
    pub(crate) bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// How a file's identity differs from an earlier one of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    /// It has other bytes, or may have: it was replaced, removed or written to.
    Content(&'static str),
    /// Its number or the time of its inode differs, and its length and time of writing do not. Some
    /// file systems number a file anew whenever they are asked, and a link or a chmod does this;
    /// so does a copy in its place with the time set back. Only its bytes can tell.
    Moved(&'static str),
}

impl Change {
    /// What is different, for people.
    pub(crate) fn how(self) -> &'static str {
        match self {
            Self::Content(how) | Self::Moved(how) => how,
        }
    }

    /// Whether the file has other bytes, or may have.
    pub(crate) fn is_of_content(self) -> bool {
        matches!(self, Self::Content(_))
    }
}

impl FileIdentity {
    /// The identity of an open file.
    ///
    /// # Errors
    /// The system cannot tell.
    pub(crate) fn of(file: &File) -> io::Result<Self> {
        let found = file.metadata()?;
        Ok(Self {
            device: found.dev(),
            number: found.ino(),
            links: found.nlink(),
            bytes: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        })
    }

    /// The file's length.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How `now` differs; `None` where it does not.
    pub(crate) fn difference(&self, now: &Self) -> Option<Change> {
        let renumbered = (self.device, self.number) != (now.device, now.number);
        // A file that is open lives on without a name.
        if now.links == 0 && self.links != 0 {
            return Some(Change::Content("it was replaced or removed"));
        }
        if (self.bytes, self.modified) == (now.bytes, now.modified) {
            return match () {
                () if renumbered => Some(Change::Moved("its inode has another number")),
                () if self.changed != now.changed => Some(Change::Moved(
                    "its inode changed, by a write whose time was set back, a link or a chmod",
                )),
                () => None,
            };
        }
        Some(Change::Content(match () {
            () if renumbered => "it was replaced or removed",
            () if self.bytes != now.bytes => "its length changed",
            () => "it was written to",
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn refusal(path: &Path) -> String {
        open_regular(path, OFlags::RDONLY).unwrap_err().to_string()
    }

    #[test]
    fn only_regular_files_are_opened_and_none_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        rustix::fs::mkfifoat(rustix::fs::CWD, at("fifo"), Mode::RUSR | Mode::WUSR).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        std::os::unix::fs::symlink("nowhere", at("dangling")).unwrap();
        assert_eq!(refusal(&at("fifo")), "not a regular file but a FIFO");
        assert_eq!(refusal(dir.path()), "not a regular file but a directory");
        assert_eq!(refusal(&at("socket")), "not a regular file but a socket or device");
        assert_eq!(refusal(Path::new("/dev/zero")), "not a regular file but a device");
        assert_eq!(refusal(&at("dangling")), "it is a symbolic link to nothing");
        assert!(refusal(&at("absent")).contains("No such file"));
        fs::write(at("file"), "x").unwrap();
        let file = open_regular(&at("file"), OFlags::RDONLY).unwrap();
        assert!(!fcntl_getfl(&file).unwrap().contains(OFlags::NONBLOCK));
    }

    #[test]
    fn a_file_is_told_from_its_replacement_and_from_itself_after_a_change() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "one").unwrap();
        let old = File::open(&path).unwrap();
        let before = FileIdentity::of(&old).unwrap();
        assert_eq!(before.difference(&FileIdentity::of(&old).unwrap()), None);
        fs::write(dir.path().join("other"), "two").unwrap();
        fs::rename(dir.path().join("other"), &path).unwrap();
        let replaced = FileIdentity::of(&File::open(&path).unwrap()).unwrap();
        let content = |how| Some(Change::Content(how));
        if replaced.modified != before.modified {
            assert_eq!(before.difference(&replaced), content("it was replaced or removed"));
        }
        let replaced = FileIdentity::of(&old).unwrap();
        assert_eq!(before.difference(&replaced), content("it was replaced or removed"));
        let written = FileIdentity { modified: (0, 0), ..before };
        assert_eq!(before.difference(&written), content("it was written to"));
        let longer = FileIdentity { bytes: 4, ..before };
        assert_eq!(before.difference(&longer), content("its length changed"));
        let other = FileIdentity { number: before.number + 1, modified: (0, 0), ..before };
        assert_eq!(before.difference(&other), content("it was replaced or removed"));
    }

    #[test]
    fn another_inode_number_alone_is_no_change_of_content() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "one").unwrap();
        let file = File::open(dir.path().join("file")).unwrap();
        let before = FileIdentity::of(&file).unwrap();
        for moved in [
            FileIdentity { number: before.number + 1, ..before },
            FileIdentity { device: before.device + 1, changed: (0, 0), ..before },
            FileIdentity { changed: (0, 0), ..before },
        ] {
            let change = before.difference(&moved);
            assert!(change.is_some_and(|change| !change.is_of_content()), "{change:?}");
        }
        // A file system that counts no links.
        let unlinked = FileIdentity { links: 0, ..before };
        assert_eq!(unlinked.difference(&unlinked), None);
    }
}
