//! Stores that are damaged, half-written or cannot be written.

mod support;

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use support::{fail, metrale, mkfifo, run, succeed};

const SPEC: &str = "layers=2,experts=3,bytes=20000,seed=3";

struct Store {
    dir: tempfile::TempDir,
}

impl Store {
    fn pack() -> Self {
        let store = Self { dir: tempfile::tempdir().unwrap() };
        succeed(&["pack", "--synthetic", SPEC, "--out", store.path().to_str().unwrap()]);
        store
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("store")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// Every command that opens a store refuses this one and names `named`.
    #[track_caller]
    fn is_refused(&self, named: &[&str]) {
        let path = self.path();
        let path = path.to_str().unwrap();
        for args in [
            vec!["inspect", path],
            vec!["verify", path],
            vec!["extract", path, "--layer", "0", "--expert", "0"],
        ] {
            let error = fail(&args);
            for name in named {
                assert!(error.contains(name), "{name:?} is not in: {error}");
            }
        }
    }

    /// `verify` exits with 1 and prints these lines.
    #[track_caller]
    fn is_damaged(&self, lines: &[&str]) {
        let output = run(&["verify", self.path().to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(text.lines().count(), lines.len(), "{text}");
        for (found, expected) in text.lines().zip(lines) {
            assert!(found.starts_with(expected), "{found}, expected {expected}");
        }
    }
}

#[test]
fn a_truncated_store_is_refused_with_the_file_and_both_lengths() {
    let store = Store::pack();
    let file = store.file("layer-00001.records");
    let length = fs::metadata(&file).unwrap().len();
    fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(length - 4096).unwrap();
    store.is_refused(&["layer-00001.records", &length.to_string(), &(length - 4096).to_string()]);
    fs::remove_file(&file).unwrap();
    store.is_refused(&["layer-00001.records"]);
    fs::remove_file(store.file("manifest.json")).unwrap();
    store.is_refused(&["manifest.json"]);
}

#[test]
fn what_is_no_regular_file_in_a_store_is_named_and_not_waited_for() {
    let store = Store::pack();
    for name in ["layer-00001.records", "manifest.json"] {
        let file = store.file(name);
        fs::remove_file(&file).unwrap();
        mkfifo(&file);
        store.is_refused(&[name, "not a regular file but a FIFO"]);
        fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &file).unwrap();
        store.is_refused(&[name, "not a regular file but a device"]);
        fs::remove_file(&file).unwrap();
        fs::create_dir(&file).unwrap();
        store.is_refused(&[name, "not a regular file but a directory"]);
    }
}

#[test]
fn a_flipped_bit_is_found_by_verify_and_never_extracted() {
    let store = Store::pack();
    let path = store.file("layer-00001.records");
    let bytes = fs::read(&path).unwrap();
    let stride = bytes.len() / 3;
    // In the header, in the payload, in the padding after it.
    for at in [20, 300, 20_000, stride - 1] {
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        let place = 2 * stride + at;
        file.write_all_at(&[bytes[place] ^ 4], place as u64).unwrap();
        store.is_damaged(&["damaged layer 1 expert 2: "]);
        file.write_all_at(&bytes[place..=place], place as u64).unwrap();
    }
    succeed(&["verify", store.path().to_str().unwrap()]);
    let mut bad = bytes.clone();
    bad[stride + 5000] ^= 1;
    bad[12] ^= 1;
    fs::write(&path, &bad).unwrap();
    store.is_damaged(&["damaged layer 1 expert 0: ", "damaged layer 1 expert 1: chunk 0 has CRC"]);
    let path = store.path();
    let tensor = "model.layers.1.mlp.experts.1.weight";
    let args = ["--layer", "1", "--expert", "1", "--tensor", tensor];
    let error = fail(&[&["extract", path.to_str().unwrap()], &args[..]].concat());
    assert!(error.contains("layer 1 expert 1: chunk 0 has CRC-32"), "{error}");
}

#[test]
fn an_altered_manifest_is_refused() {
    let store = Store::pack();
    let text = fs::read_to_string(store.file("manifest.json")).unwrap();
    fs::write(store.file("manifest.json"), text.replacen("synthetic", "synthetix", 1)).unwrap();
    store.is_refused(&["manifest.json", "was altered"]);
    fs::write(store.file("manifest.json"), &text[..text.len() / 2]).unwrap();
    store.is_refused(&["manifest.json", "not readable"]);
}

#[test]
fn a_store_of_another_version_is_named_as_such() {
    let store = Store::pack();
    let manifest = store.file("manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, text.replacen("\"version\": 1", "\"version\": 7", 1)).unwrap();
    store.is_refused(&["store format version 7, this program reads 1", "pack the store again"]);
    fs::write(&manifest, text).unwrap();
    let records = store.file("layer-00000.records");
    let file = fs::OpenOptions::new().write(true).open(records).unwrap();
    file.write_all_at(&9_u16.to_le_bytes(), 8).unwrap();
    store.is_damaged(&["damaged layer 0 expert 0: record format version 9, this program reads 1"]);
}

#[test]
fn a_place_that_is_not_empty_is_left_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("store");
    fs::create_dir(&out).unwrap();
    let args = ["pack", "--synthetic", SPEC, "--out", out.to_str().unwrap()];
    fs::write(out.join("precious"), "data").unwrap();
    let error = fail(&args);
    assert!(error.contains(out.to_str().unwrap()) && error.contains("not empty"), "{error}");
    assert_eq!(fs::read(out.join("precious")).unwrap(), b"data");
    fs::remove_file(out.join("precious")).unwrap();
    succeed(&args);
    assert!(fail(&args).contains("not empty"));
    fs::remove_dir_all(&out).unwrap();
    fs::write(&out, "file").unwrap();
    assert!(fail(&args).contains("not a directory"));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn wrong_usage_exits_with_2() {
    for args in [
        vec!["pack", "--out", "/tmp/x"],
        vec!["pack", "--checkpoint", "a", "--synthetic", SPEC, "--out", "/tmp/x"],
        vec!["pack", "--synthetic", "layers=0,experts=1,bytes=1", "--out", "/tmp/x"],
        vec!["pack", "--synthetic", SPEC],
        vec!["pack", "--synthetic", SPEC, "--out", "/tmp/x", "--workers", "0"],
        vec!["pack", "--synthetic", SPEC, "--out", "/tmp/x", "--workers", "257"],
        vec!["pack", "--synthetic", SPEC, "--out", "/tmp/x", "--chunk-bytes", "5000"],
        vec!["inspect"],
        vec!["frobnicate"],
    ] {
        assert_eq!(run(&args).status.code(), Some(2), "{args:?}");
    }
}

/// A pack that is far from done and certainly under way.
fn long_pack(dir: &Path) -> std::process::Child {
    let mut child = metrale()
        .args(["pack", "--synthetic", "layers=1,experts=3000,bytes=1048576", "--out"])
        .arg(dir.join("store"))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while !has_records(dir) {
        assert!(Instant::now() < deadline, "the pack did not start");
        assert_eq!(child.try_wait().unwrap(), None, "the pack ended by itself");
        std::thread::yield_now();
    }
    child
}

#[test]
fn a_pack_that_is_told_to_end_cleans_up_and_fails() {
    for signal in [Signal::TERM, Signal::INT] {
        let dir = tempfile::tempdir().unwrap();
        let child = long_pack(dir.path());
        rustix::process::kill_process(Pid::from_child(&child), signal).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains("interrupted: nothing was written to"), "{error}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

#[test]
fn a_file_that_outgrows_its_limit_is_an_error_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let script = "ulimit -f 8; exec \"$0\" \"$@\"";
    let mut shell = Command::new("sh");
    shell.args(["-c", script, env!("CARGO_BIN_EXE_metrale"), "pack", "--synthetic", SPEC, "--out"]);
    let output = shell.arg(dir.path().join("store")).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("layer-0000") && error.contains("File too large"), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// A command as another user, if this one is root, after `script`.
fn as_nobody(dir: &Path, script: &str) -> Command {
    // A copy, since the build directory may be out of that user's reach; by another process, since
    // a program cannot be started while a child of this one has inherited it open for writing.
    let program = dir.join("metrale");
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_metrale")).arg(&program).status();
    assert!(copied.unwrap().success());
    for path in [dir, &program] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{script}; exec \"$0\" \"$@\"")]).arg(program);
    if rustix::process::geteuid().is_root() {
        command.uid(54321).gid(54321);
    }
    command
}

/// A directory that the user of [`as_nobody`] may write to.
fn open_to_all(dir: &Path) -> PathBuf {
    let open = dir.join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
    open
}

#[test]
fn packing_and_verifying_go_on_where_no_thread_can_be_started() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_to_all(dir.path()).join("store");
    // Of a user with processes already, none may be added; of a new one, only the first runs.
    let run = |args: &[&str]| {
        let output = as_nobody(dir.path(), "prlimit --pid $$ --nproc=1")
            .args(args)
            .arg(&store)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let log = run(&["pack", "--synthetic", SPEC, "--workers", "200", "--out"]);
    assert!(log.contains("cannot start a thread"), "{log}");
    run(&["verify"]);
    succeed(&["verify", store.to_str().unwrap()]);
}

#[test]
fn a_parent_that_cannot_be_written_to_is_named_by_a_dry_run_too() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("closed/deep/store");
    fs::create_dir(dir.path().join("closed")).unwrap();
    fs::set_permissions(dir.path().join("closed"), fs::Permissions::from_mode(0o555)).unwrap();
    for dry_run in [&["--dry-run"][..], &[]] {
        let mut command = as_nobody(dir.path(), "true");
        command.args(["pack", "--synthetic", SPEC, "--out"]).arg(&out).args(dry_run);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains("/closed first, which refuses: Permission denied"), "{error}");
    }
}

#[test]
fn a_staging_directory_that_cannot_be_locked_is_not_left_behind() {
    let dir = tempfile::tempdir().unwrap();
    let open = open_to_all(dir.path());
    // With this mask not even its maker can open the directory that is to be locked.
    let mut command = as_nobody(dir.path(), "umask 777");
    let command = command.args(["pack", "--synthetic", SPEC, "--out"]).arg(open.join("store"));
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("cannot lock"), "{error}");
    assert_eq!(fs::read_dir(open).unwrap().count(), 0);
}

#[test]
#[ignore = "needs root to mount a tmpfs"]
fn an_empty_mount_point_is_refused_before_any_work() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Tmpfs::mount(dir.path().join("disk"), 8 << 20);
    let bound = dir.path().join("bound");
    fs::create_dir_all(dir.path().join("elsewhere")).unwrap();
    fs::create_dir(&bound).unwrap();
    let mut bind = Command::new("mount");
    bind.arg("--bind").arg(dir.path().join("elsewhere")).arg(&bound);
    assert!(bind.status().unwrap().success());
    let bound = Tmpfs(bound);
    for mounted in [&disk.0, &bound.0] {
        let args = ["pack", "--dry-run", "--synthetic", SPEC, "--out", mounted.to_str().unwrap()];
        let error = fail(&args);
        let advice = mounted.join("store").display().to_string();
        assert!(error.contains("mount point") && error.contains(&advice), "{error}");
    }
    succeed(&["pack", "--synthetic", SPEC, "--out", disk.0.join("store").to_str().unwrap()]);
}

#[test]
fn a_killed_pack_leaves_no_store_and_the_next_one_cleans_up() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("store");
    let mut child = long_pack(dir.path());
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(9));
    assert!(!out.exists());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "one staging directory is left");
    succeed(&["pack", "--synthetic", SPEC, "--out", out.to_str().unwrap()]);
    succeed(&["verify", out.to_str().unwrap()]);
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(left, [out]);
}

fn has_records(dir: &Path) -> bool {
    let staged = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    staged.map(|path| path.join("layer-00000.records")).any(|path| path.exists())
}

#[test]
fn a_store_larger_than_the_free_space_is_refused_before_any_work() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("store");
    let huge = "layers=4000,experts=60000,bytes=8000000000";
    let error = fail(&["pack", "--synthetic", huge, "--out", out.to_str().unwrap()]);
    assert!(error.contains("the store needs 1920") && error.contains("free"), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// A small tmpfs, unmounted at the end.
struct Tmpfs(PathBuf);

impl Tmpfs {
    fn mount(at: PathBuf, bytes: u64) -> Self {
        fs::create_dir(&at).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"]).arg(&at);
        assert!(mount.status().unwrap().success(), "cannot mount a tmpfs: run as root");
        Self(at)
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[test]
#[ignore = "needs root to mount a tmpfs"]
fn a_disk_that_fills_up_during_the_pack_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Tmpfs::mount(dir.path().join("disk"), 8 << 20);
    let out = disk.0.join("store");
    let out = out.to_str().unwrap();
    let args = |spec| ["pack", "--synthetic", spec, "--out", out];
    let error = fail(&args("layers=1,experts=4,bytes=4000000"));
    assert!(error.contains("the store needs 16") && error.contains(" free"), "{error}");
    // The free space is there when it is asked for, and gone when it is taken: the number of
    // files is limited too, and the check does not count those.
    let remount = Command::new("mount").args(["-o", "remount,nr_inodes=4"]).arg(&disk.0).status();
    assert!(remount.unwrap().success());
    let error = fail(&args("layers=4,experts=1,bytes=4000"));
    assert!(error.contains("layer-0000") && error.contains("No space left"), "{error}");
    assert_eq!(fs::read_dir(&disk.0).unwrap().count(), 0);
    succeed(&args("layers=1,experts=1,bytes=4000"));
}

#[test]
fn memory_does_not_grow_with_the_records() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("store");
    // Address space, which bounds memory; code and thread stacks are in it too.
    let script = "ulimit -v 200000; exec \"$0\" \"$@\"";
    let limited = |args: &[&str]| {
        let mut shell = Command::new("sh");
        let output = shell.args(["-c", script, env!("CARGO_BIN_EXE_metrale")]).args(args).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    let out = out.to_str().unwrap();
    limited(&["pack", "--synthetic", "layers=1,experts=2,bytes=300000000", "--out", out]);
    limited(&["verify", out]);
}
