//! Writes a file that is either whole or as it was before.
//!
//! The bytes go to a file of a new name beside the target, which then takes the target's name.
//! Links are followed first: what is replaced is what they lead to, never a link. What is no
//! regular file cannot be replaced and is written as it is, and so is what a link of `/proc` leads
//! to: `/dev/stdout` means this process's open file, whatever name that has or had.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::PROC_SUPER_MAGIC;

/// Links followed before they are taken for a loop; the kernel's own limit.
const MAX_LINKS: usize = 40;
/// Names tried for the new file; each failure means that a killed process left one.
const ATTEMPTS: u32 = 16;

/// Writes `bytes` to `path`.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    match target(path)? {
        Target::Name { name, found } => replace(&name, found.as_ref(), bytes),
        Target::Stdout => {
            let mut stdout = io::stdout().lock();
            stdout.write_all(bytes).and_then(|()| stdout.flush())
        }
        // Appended where that means something: what an open file holds already is not ours.
        Target::AsItIs => OpenOptions::new().append(true).open(path)?.write_all(bytes),
    }
}

enum Target {
    /// No link, and a regular file or nothing.
    Name {
        name: PathBuf,
        found: Option<Metadata>,
    },
    /// This process's standard output, to be written where its other output ends.
    Stdout,
    AsItIs,
}

fn target(path: &Path) -> io::Result<Target> {
    let found = match path.metadata() {
        Ok(found) => Some(found),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let mut name = path.to_path_buf();
    for _ in 0..MAX_LINKS {
        if !name.is_symlink() {
            let regular = found.as_ref().is_none_or(Metadata::is_file);
            return Ok(if regular { Target::Name { name, found } } else { Target::AsItIs });
        }
        if is_in_proc(&name) {
            let stdout = rustix::fs::fstat(io::stdout())?;
            let stdout = (stdout.st_dev, stdout.st_ino);
            let same = found.is_some_and(|found| (found.dev(), found.ino()) == stdout);
            return Ok(if same { Target::Stdout } else { Target::AsItIs });
        }
        let to = fs::read_link(&name)?;
        name.pop();
        name.push(to);
    }
    Err(io::Error::other(format!("more than {MAX_LINKS} symbolic links in a row")))
}

/// Whether a link is one of those that lead to open files and not to names.
fn is_in_proc(link: &Path) -> bool {
    let dir = link.parent().filter(|dir| !dir.as_os_str().is_empty());
    rustix::fs::statfs(dir.unwrap_or(Path::new(".")))
        .is_ok_and(|found| found.f_type == PROC_SUPER_MAGIC)
}

fn replace(name: &Path, found: Option<&Metadata>, bytes: &[u8]) -> io::Result<()> {
    if name.file_name().is_none() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a file name"));
    }
    let (mut file, partial) = create_beside(name)?;
    let written = file
        .write_all(bytes)
        .and_then(|()| found.map_or(Ok(()), |old| file.set_permissions(old.permissions())))
        .and_then(|()| fs::rename(&partial, name));
    if written.is_err() {
        // The first error is the one to report; what is left is a file of ours.
        drop(fs::remove_file(&partial));
    }
    written
}

/// A new file, and its name: no link that somebody put there is followed.
fn create_beside(name: &Path) -> io::Result<(File, PathBuf)> {
    let mut last = io::Error::from(io::ErrorKind::AlreadyExists);
    for attempt in 0..ATTEMPTS {
        let partial = format!(".metrale-{}-{attempt}.partial", std::process::id());
        let partial = name.with_file_name(partial);
        match File::create_new(&partial) {
            Ok(file) => return Ok((file, partial)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_link_is_followed_and_what_it_leads_to_is_replaced_or_made() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("sub")).unwrap();
        fs::write(at("sub/old"), "old").unwrap();
        fs::set_permissions(at("sub/old"), fs::Permissions::from_mode(0o600)).unwrap();
        symlink("sub/old", at("link")).unwrap();
        symlink("link", at("link to a link")).unwrap();
        symlink("sub/new", at("to nothing yet")).unwrap();
        write_whole(&at("link to a link"), b"one").unwrap();
        write_whole(&at("to nothing yet"), b"two").unwrap();
        write_whole(&at("plain"), b"three").unwrap();
        for (name, content) in [("sub/old", "one"), ("sub/new", "two"), ("plain", "three")] {
            assert!(!at(name).is_symlink(), "{name}");
            assert_eq!(fs::read_to_string(at(name)).unwrap(), content);
        }
        for link in ["link", "link to a link", "to nothing yet"] {
            assert!(at(link).is_symlink(), "{link}");
        }
        assert_eq!(fs::metadata(at("sub/old")).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(at("sub")).unwrap().count(), 2, "nothing else is left");
    }

    #[test]
    fn what_cannot_be_replaced_is_an_error_or_written_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        symlink("loop", at("loop")).unwrap();
        assert!(write_whole(&at("loop"), b"x").is_err());
        assert!(write_whole(dir.path(), b"x").is_err());
        assert!(write_whole(&at("absent/file"), b"x").is_err());
        symlink("/dev/null", at("null")).unwrap();
        write_whole(&at("null"), b"x").unwrap();
        assert!(at("null").is_symlink());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "nothing else is left");
    }

    #[test]
    fn a_link_to_an_open_file_appends_to_it_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "before ").unwrap();
        let file = File::options().append(true).open(&path).unwrap();
        let link = dir.path().join("link");
        let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
        symlink(format!("/proc/self/fd/{fd}"), &link).unwrap();
        write_whole(&link, b"after").unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read_to_string(&path).unwrap(), "before after");
    }
}
