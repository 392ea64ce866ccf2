//! Processes that may not lock enough memory say so, with the numbers, before they serve or fetch.

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

use expert_tier::testing::TestStore;

use crate::cables::{RAILS, peer};
use crate::peer_support::process::Peer;

/// Runs `metrale` to its end without the capability that lifts the limit, and with a limit.
fn limited(kilobytes: u64, args: &[&str]) -> Output {
    limited_command(kilobytes, args).output().expect("a shell")
}

fn limited_command(kilobytes: u64, args: &[&str]) -> Command {
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg(format!(
            "ulimit -l {kilobytes}; exec setpriv --bounding-set -ipc_lock --inh-caps -ipc_lock \
             {} \"$@\"",
            env!("CARGO_BIN_EXE_metrale")
        ))
        .arg("metrale")
        .args(args);
    command
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_peer_that_may_not_lock_its_budget_does_not_listen() {
    // 16 records of 700 kB, once for each of two devices.
    let store = TestStore::new(2, 8, &[700_001], 91);
    let dir = store.path();
    let run = ["peer", "run", "--listen", "127.0.0.1:0", "--store", dir.to_str().expect("a path")];
    for rails in [&RAILS[..], &[]] {
        let refused = limited(8192, &[&run[..], &["--dram-budget", "64MiB"], rails].concat());
        let text = text(&refused);
        println!("{text}");
        assert_eq!(refused.status.code(), Some(1), "{text}");
        assert!(refused.stdout.is_empty(), "it listened");
        for word in
            ["MiB of locked memory", "the limit is", "ulimit -l", "--dram-budget", "--rail none"]
        {
            assert!(text.contains(word), "{text:?} does not name {word:?}");
        }
    }
    // Not even one record.
    let refused = limited(1024, &[&run[..], &RAILS].concat());
    assert_eq!(refused.status.code(), Some(1), "{}", text(&refused));
    assert!(text(&refused).contains("ulimit -l"), "{}", text(&refused));
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_peer_without_a_budget_holds_as_many_records_as_it_may_lock() {
    let store = TestStore::new(2, 8, &[700_001], 91);
    let dir = store.path();
    let run = ["peer", "run", "--listen", "127.0.0.1:0", "--store", dir.to_str().expect("a path")];
    let buffers = ["--push-buffers", "3MiB", "--push-pinned", "3MiB"];
    let mut child = limited_command(16_384, &[&run[..], &RAILS, &buffers].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a shell");
    let mut line = String::new();
    // It prints its one line or ends; either ends the wait.
    BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a pipe");
    child.kill().expect("a child of ours");
    let log = text(&child.wait_with_output().expect("a child of ours"));
    println!("{log}");
    assert!(line.starts_with("listening on "), "{log}");
    // 8 MiB for each device, less the buffers, which are registered with both and with io_uring, and
    // 1 MiB for clients' queue pairs.
    for word in ["records=2", "spilled=14", "locked-memory limit", "2 devices"] {
        assert!(log.contains(word), "{log:?} does not name {word:?}");
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_peer_without_rails_needs_no_locked_memory() {
    let store = TestStore::new(2, 8, &[700_001], 91);
    let peer = Peer::start(&store.path(), &["--rail", "none"]);
    let status = peer.status();
    assert_eq!((status.rails.len(), status.resident_bytes), (0, 0));
    let fetch = ["fetch", "--all", "--peer", &peer.address(), "--connect-ms", "5000"];
    let verbs = limited(65536, &[&fetch[..], &["--expert-backend", "rdma-verbs"]].concat());
    assert_eq!(verbs.status.code(), Some(1));
    assert!(text(&verbs).contains("--expert-backend rdma"), "{}", text(&verbs));
    let tcp = limited(65536, &[&fetch[..], &["--expert-backend", "rdma"]].concat());
    assert_eq!(tcp.status.code(), Some(0), "{}", text(&tcp));
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_client_that_may_not_lock_its_arena_says_so() {
    let store = TestStore::new(2, 8, &[700_001], 92);
    let peer = peer(&store);
    let address = peer.address();
    let fetch = [
        "fetch",
        "--expert-backend",
        "rdma-verbs",
        "--all",
        "--peer",
        &address,
        "--arena-bytes",
        "8388608",
        "--connect-ms",
        "5000",
    ];
    // Too little for the arena; for its registration with the second device, which costs that rail;
    // enough for one; for both.
    for (kilobytes, more, code, is_lost) in [
        (4096, &[][..], 1, false),
        (12288, &[], 0, true),
        (12288, &["--dual-rail", "0"], 0, false),
        (20480, &[], 0, false),
    ] {
        let output = limited(kilobytes, &[&fetch[..], more].concat());
        let text = text(&output);
        println!("{kilobytes} kB: {text}");
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert_eq!(text.contains("the arena cannot be registered"), is_lost, "{text}");
        if code != 0 {
            for word in ["MiB", "limit", "ulimit -l", "--expert-arena-bytes"] {
                assert!(text.contains(word), "{text:?} does not name {word:?}");
            }
        }
    }
    assert_eq!(peer.status().queue_pairs, 0);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn under_any_limit_a_client_works_or_says_at_the_start_what_to_raise() {
    let store = TestStore::new(2, 8, &[700_001], 93);
    let resident = peer(&store);
    let spilled = Peer::start(&store.path(), &[&RAILS[..], &["--dram-budget", "1MiB"]].concat());
    for (peer, spills) in [(&resident, false), (&spilled, true)] {
        let address = peer.address();
        let fetch = ["fetch", "--expert-backend", "rdma-verbs", "--all", "--peer", &address];
        let bounds = ["--connect-ms", "5000", "--deadline-ms", "5000"];
        for rails in ["0", "1"] {
            let rails = ["--dual-rail", rails];
            for mebibytes in [1, 2, 4, 6, 8, 16, 64] {
                let args = [&fetch[..], &bounds, &rails].concat();
                let output = limited(mebibytes << 10, &args);
                let text = text(&output);
                println!("{mebibytes} MiB, {rails:?}, spills: {spills}: {text}");
                if output.status.success() {
                    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &text;
                    assert!(said.contains("0 failed"), "{said}");
                    continue;
                }
                // One record of 0.7 MiB, with what it is tried with and, where it is pushed, its grant.
                assert!(mebibytes < if spills { 2 } else { 1 }, "{mebibytes} MiB: {text}");
                assert!(text.contains("one record of this store needs"), "{text}");
                assert!(text.contains("ulimit -l"), "{text}");
            }
        }
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_grant_that_meets_the_limit_waits_for_another_one_to_come_back() {
    let store = TestStore::new(2, 16, &[1_900_001], 94);
    let peer = Peer::start(&store.path(), &[&RAILS[..], &["--dram-budget", "2MiB"]].concat());
    let address = peer.address();
    let fetch = ["fetch", "--expert-backend", "rdma-verbs", "--all", "--peer", &address];
    let bounds = ["--connect-ms", "5000", "--deadline-ms", "5000", "--dual-rail", "0"];
    // 4 MiB of arena, and grants of 1 MiB at most: no room for one, for one, for two.
    for (kilobytes, code) in [(4800, 1), (5400, 0), (6400, 0)] {
        let args = [&fetch[..], &bounds, &["--arena-bytes", "4MiB"]].concat();
        let output = limited(kilobytes, &args);
        let text = text(&output);
        println!("{kilobytes} kB: {text}");
        assert_eq!(output.status.code(), Some(code), "{text}");
        if code != 0 {
            for word in ["grant", "MiB", "ulimit -l", "--expert-arena-bytes"] {
                assert!(text.contains(word), "{text:?} does not name {word:?}");
            }
        }
    }
}
