//! Opening files that somebody else put where they are: never waiting for one, and taking only
//! what can be read as a file.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{Mode, OFlags, fcntl_getfl, fcntl_setfl};

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
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FileIdentity {
    device: u64,
    number: u64,
    links: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
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

    /// How `now` differs, for people; `None` where it does not.
    pub(crate) fn difference(&self, now: &Self) -> Option<&'static str> {
        // A file that is open lives on without a name.
        if (self.device, self.number) != (now.device, now.number) || now.links == 0 {
            return Some("it was replaced or removed");
        }
        if self.bytes != now.bytes {
            return Some("its length changed");
        }
        if self.modified != now.modified {
            return Some("it was written to");
        }
        (self.changed != now.changed)
            .then_some("its inode changed, by a write whose time was set back, a link or a chmod")
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
        assert_eq!(before.difference(&replaced), Some("it was replaced or removed"));
        let replaced = FileIdentity::of(&old).unwrap();
        assert_eq!(before.difference(&replaced), Some("it was replaced or removed"));
        let written = FileIdentity { modified: (0, 0), ..before };
        assert_eq!(before.difference(&written), Some("it was written to"));
        let longer = FileIdentity { bytes: 4, ..before };
        assert_eq!(before.difference(&longer), Some("its length changed"));
        let touched = FileIdentity { changed: (0, 0), ..before };
        assert!(before.difference(&touched).is_some_and(|why| why.contains("chmod")));
    }
}
