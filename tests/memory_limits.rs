//! Fetches of processes that may lock little memory, or whose container forbids to lock any: each
//! works, or fails at the start with the numbers and the setting to change.

mod peer_support;

use std::process::{Command, Output};

use expert_tier::testing::TestStore;
use peer_support::process::Peer;

/// A record with its header.
const RECORD_BYTES: u64 = 700_001 + 4095;

/// `metrale fetch --all` behind the words of `wrapper`.
fn fetch(wrapper: &[&str], args: &[&str]) -> Output {
    let mut words = wrapper.iter().chain(&[env!("CARGO_BIN_EXE_metrale"), "fetch", "--all"]);
    let mut command = Command::new("timeout");
    command.arg("60").args(&mut words).args(args);
    command.env("METRALE_LOG", "info").env("NO_COLOR", "1");
    command.output().expect("timeout starts")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs `check` with the arguments of each backend that this machine has.
fn with_backends(store: &TestStore, check: impl Fn(&[&str])) {
    let dir = store.path();
    let dir = dir.to_str().expect("a path");
    for backend in ["posix", "uma"] {
        check(&["--expert-backend", backend, "--store", dir]);
    }
    let peer = Peer::start(&store.path(), &["--rail", "none"]);
    check(&["--expert-backend", "rdma", "--peer", &peer.address()]);
}

fn script() -> &'static str {
    concat!(env!("CARGO_MANIFEST_DIR"), "/gpu-sys/tests/support/deny.py")
}

#[test]
fn under_any_limit_a_fetch_works_or_says_at_the_start_what_to_raise() {
    let store = TestStore::new(2, 8, &[700_001], 108);
    with_backends(&store, |args| {
        for bytes in [0, 64 << 10, 512 << 10, 1 << 20, 2 << 20, 5 << 20, 8 << 20] {
            let limit = format!("--memlock={bytes}:{bytes}");
            // Only root has the capability to begin with, and the right to drop it.
            let all = ["setpriv", "--bounding-set=-ipc_lock", "prlimit", &limit];
            let is_root = rustix::process::geteuid().is_root();
            let output = fetch(if is_root { &all } else { &all[2..] }, args);
            let said = said(&output);
            let works = bytes >= RECORD_BYTES;
            assert_eq!(output.status.code(), Some(if works { 0 } else { 1 }), "{bytes}: {said}");
            if !works {
                for part in ["one record of this store needs", "the limit is", "ulimit -l"] {
                    assert!(said.contains(part), "{bytes}: {part:?} is not in {said}");
                }
            }
        }
    });
}

#[test]
fn a_capability_that_is_of_another_user_namespace_is_not_relied_on() {
    let store = TestStore::new(2, 8, &[700_001], 109);
    let wrapper = |limit| ["prlimit", limit, "unshare", "--user", "--map-root-user"];
    with_backends(&store, |args| {
        let output = fetch(&wrapper("--memlock=4194304:4194304"), args);
        assert!(output.status.success(), "{}", said(&output));
        assert!(said(&output).contains("CAP_IPC_LOCK does not lift"), "{}", said(&output));
        let output = fetch(&wrapper("--memlock=65536:65536"), args);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("ulimit -l") && !said.contains("lifted by"), "{said}");
    });
}

#[test]
fn where_a_container_forbids_to_lock_memory_records_come_and_one_line_says_so() {
    let store = TestStore::new(2, 8, &[700_001], 110);
    let calls: Vec<String> =
        [libc_number("mlock"), libc_number("munlock")].iter().map(u64::to_string).collect();
    with_backends(&store, |args| {
        let output = fetch(&["python3", script(), "EPERM", &calls.join(",")], args);
        let said = said(&output);
        assert!(output.status.success(), "{said}");
        assert_eq!(said.matches("mlock is refused").count(), 1, "{said}");
        assert!(!said.contains("is leaked"), "{said}");
    });
}

#[test]
fn where_a_container_forbids_to_choose_a_memory_node_only_who_chooses_one_is_refused() {
    let store = TestStore::new(2, 8, &[700_001], 111);
    let call = libc_number("mbind").to_string();
    let wrapper = ["python3", script(), "EPERM", &call];
    with_backends(&store, |args| {
        assert!(fetch(&wrapper, args).status.success());
        let output = fetch(&wrapper, &[args, &["--numa-node", "0"]].concat());
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("mbind failed") && said.contains("--expert-numa-node"), "{said}");
    });
}

/// The number of a system call.
fn libc_number(name: &str) -> u64 {
    let x86 = cfg!(target_arch = "x86_64");
    match name {
        "mlock" => {
            if x86 {
                149
            } else {
                228
            }
        }
        "munlock" => {
            if x86 {
                150
            } else {
                229
            }
        }
        "mbind" => {
            if x86 {
                237
            } else {
                235
            }
        }
        other => panic!("{other} is not in this list"),
    }
}
