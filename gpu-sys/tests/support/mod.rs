//! Runs a test in a process of its own: with a driver library of our making, with less rights, or
//! under a filter of system calls as a container has one.
//!
//! The loader looks for libraries where it was told when the process started, and capabilities
//! once dropped do not come back; so such a test starts its own program again. The parent prepares
//! and waits, the child runs the body.

#![allow(dead_code, reason = "each test program uses a part of this")]

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

const CHILD: &str = "METRALE_TEST_CHILD";
const LOG: &str = "FAKE_CUDA_LOG";
const BUSY: &str = "FAKE_CUDA_BUSY";
const CHILD_SECONDS: &str = "60";

/// Which driver library the child is to find.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Driver {
    /// All functions are there.
    Whole,
    /// `cuEventCreate` is not.
    WithoutEvents,
    /// The files of that name are not libraries.
    Garbage,
}

/// What the body of a test sees of the fake driver.
pub(crate) struct Fake {
    log: PathBuf,
    busy: PathBuf,
}

/// Runs `body` in a child process that finds `driver`, with `settings` for the fake as extra
/// environment variables. `test` is the full name of the calling test.
pub(crate) fn with_driver(
    test: &str,
    driver: Driver,
    settings: &[(&str, &str)],
    body: impl FnOnce(&Fake),
) {
    if is_child(test) {
        let path = |name| PathBuf::from(std::env::var(name).expect("set by the parent"));
        return body(&Fake { log: path(LOG), busy: path(BUSY) });
    }
    let directory = tempfile::tempdir().unwrap();
    build(driver, directory.path());
    let mut paths = vec![directory.path().to_owned()];
    paths.extend(std::env::split_paths(&std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default()));
    std::fs::write(directory.path().join("log"), "").unwrap();
    let mut environment: Vec<(&str, OsString)> = vec![
        ("LD_LIBRARY_PATH", std::env::join_paths(paths).unwrap()),
        (LOG, directory.path().join("log").into()),
        (BUSY, directory.path().join("busy").into()),
    ];
    environment.extend(settings.iter().map(|(name, value)| (*name, value.into())));
    run_child(test, &[], &environment);
}

/// Runs `body` in a child process that finds a file of the name `library` that is none.
pub(crate) fn with_garbage(test: &str, library: &str, body: impl FnOnce()) {
    if is_child(test) {
        return body();
    }
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join(library), "not a library").unwrap();
    run_child(test, &[], &[("LD_LIBRARY_PATH", directory.path().into())]);
}

/// Runs `body` in a child process without `CAP_IPC_LOCK` that may lock `limit_bytes`.
pub(crate) fn with_lock_limit(test: &str, limit_bytes: u64, body: impl FnOnce()) {
    if is_child(test) {
        return body();
    }
    let limit = format!("--memlock={limit_bytes}:{limit_bytes}");
    // Only root has the capability to begin with, and the right to drop it from the bounding set.
    match rustix::process::geteuid().is_root() {
        true => run_child(test, &["setpriv", "--bounding-set=-ipc_lock", "prlimit", &limit], &[]),
        false => run_child(test, &["prlimit", &limit], &[]),
    }
}

/// Runs `body` in a child process for which a filter answers these system calls with `errno`: each is
/// a number, or `number:argument:value` for those calls that have the value in that argument.
pub(crate) fn with_denied(test: &str, errno: &str, calls: &[String], body: impl FnOnce()) {
    if is_child(test) {
        return body();
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/deny.py");
    run_child(test, &["python3", script, errno, &calls.join(",")], &[]);
}

/// Runs `body` in a child process in a user namespace of its own, where it is root, that may lock
/// `limit_bytes`.
pub(crate) fn with_user_namespace(test: &str, limit_bytes: u64, body: impl FnOnce()) {
    if is_child(test) {
        return body();
    }
    let limit = format!("--memlock={limit_bytes}:{limit_bytes}");
    run_child(test, &["prlimit", &limit, "unshare", "--user", "--map-root-user"], &[]);
}

fn is_child(test: &str) -> bool {
    std::env::var(CHILD).is_ok_and(|name| name == test)
}

fn run_child(test: &str, wrapper: &[&str], environment: &[(&str, OsString)]) {
    let output = Command::new("timeout")
        .arg(CHILD_SECONDS)
        .args(wrapper)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--include-ignored", "--nocapture", "--test-threads=1"])
        .env(CHILD, test)
        .envs(environment.iter().map(|(name, value)| (*name, value)))
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{}:\n{stdout}\n{stderr}", output.status);
    assert!(stdout.contains("1 passed"), "{test} is not the name of a test:\n{stdout}");
}

impl Fake {
    /// The calls made so far: name and argument each.
    pub(crate) fn calls(&self) -> Vec<(String, u64)> {
        let text = std::fs::read_to_string(&self.log).unwrap();
        let call = |line: &str| {
            let (name, argument) = line.split_once(' ').unwrap();
            (name.to_owned(), u64::from_str_radix(argument, 16).unwrap())
        };
        text.lines().map(call).collect()
    }

    /// Position of the first call of `name`.
    pub(crate) fn first(&self, name: &str) -> Option<usize> {
        self.calls().iter().position(|(called, _)| called == name)
    }

    /// How often `name` was called.
    pub(crate) fn count(&self, name: &str) -> usize {
        self.calls().iter().filter(|(called, _)| called == name).count()
    }

    /// From now on no event and no stream has finished.
    pub(crate) fn be_busy(&self) {
        std::fs::write(&self.busy, "").unwrap();
    }

    /// Everything enqueued has finished.
    pub(crate) fn be_done(&self) {
        std::fs::remove_file(&self.busy).unwrap();
    }
}

/// Whether a mapping of this process starts at `address`.
pub(crate) fn is_mapped(address: u64) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().any(|line| {
        let range = line.split(' ').next().unwrap_or_default();
        let (start, end) = range.split_once('-').unwrap();
        let number = |hex| u64::from_str_radix(hex, 16).unwrap();
        number(start) <= address && address < number(end)
    })
}

fn build(driver: Driver, directory: &Path) {
    let library = directory.join("libcuda.so.1");
    if driver == Driver::Garbage {
        // Both names, so that a real driver on this machine is not found in their place.
        for name in ["libcuda.so.1", "libcuda.so"] {
            std::fs::write(directory.join(name), "not a library").unwrap();
        }
        return;
    }
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../gpu-sys/tests/support/fake_libcuda.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&library);
    if driver == Driver::WithoutEvents {
        compiler.arg("-DWITHOUT_EVENTS");
    }
    let output = compiler.arg(source).output().expect("a C compiler named cc");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::os::unix::fs::symlink(&library, directory.join("libcuda.so")).unwrap();
}
