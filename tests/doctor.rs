//! `metrale doctor`: what it prints, what its exit status says, and that it never does without a
//! fix.

mod peer_support;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use expert_tier::key::ExpertKey;
use expert_tier::testing::TestStore;
use expert_tier::wire::frame::{FrameType, Status};
use expert_tier::wire::handshake::encode_frame;
use expert_tier::wire::message::Welcome;
use serde_json::Value;

use peer_support::process::{Peer, metrale};
use peer_support::scripted::Scripted;
use peer_support::small_store;

/// `metrale doctor ARGS`, with an arena that is quick to pin.
fn doctor(args: &[&str]) -> Command {
    let mut command = metrale();
    command.env("METRALE_LOG", "warn").env("METRALE_EXPERT_ARENA_BYTES", "1MiB");
    command.arg("doctor").args(args);
    command
}

/// The same where libibverbs cannot be opened: a file of that name which is no library comes first.
fn without_verbs(args: &[&str]) -> (Command, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("libibverbs.so.1"), "no library").unwrap();
    let mut command = doctor(args);
    command.env("LD_LIBRARY_PATH", dir.path());
    (command, dir)
}

/// The checks of a run that ends with `code`, each of which has the form that is documented.
fn checks(mut command: Command, code: i32) -> Vec<Value> {
    let Output { status, stdout, stderr } = command.arg("--json").output().expect("metrale starts");
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert_eq!(status.code(), Some(code), "{stdout}{stderr}");
    assert_eq!(stdout.lines().count(), 1, "{stdout}");
    let report: Value = serde_json::from_str(&stdout).expect("one JSON object");
    assert_eq!(report.as_object().unwrap().len(), 1, "{report}");
    let checks = report["checks"].as_array().expect("a list of checks").clone();
    for check in &checks {
        let fields: Vec<_> = check.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(fields, ["fix", "found", "name", "status"], "{check}");
        let text = |field: &str| check[field].as_str().expect("a text");
        assert!(!text("name").is_empty() && !text("found").is_empty(), "{check}");
        match text("status") {
            "ok" => assert_eq!(text("fix"), "", "{check}"),
            "warn" | "fail" => assert!(!text("fix").is_empty(), "{check}"),
            other => panic!("{other} is no status: {check}"),
        }
    }
    let failed = checks.iter().any(|check| check["status"] == "fail");
    assert_eq!(failed, code == 1, "{report}");
    checks
}

/// The check called `name`: its status, what was found, and the fix.
fn check<'a>(checks: &'a [Value], name: &str) -> (&'a str, &'a str, &'a str) {
    let found = checks.iter().find(|check| check["name"] == name);
    let found = found.unwrap_or_else(|| panic!("no check {name} in {checks:?}"));
    let text = |field: &str| found[field].as_str().expect("a text");
    (text("status"), text("found"), text("fix"))
}

#[test]
fn a_machine_without_rdma_is_told_what_to_use_and_has_not_failed() {
    let (command, _dir) = without_verbs(&[]);
    let checks = checks(command, 0);
    let (status, found, fix) = check(&checks, "libibverbs");
    assert_eq!(status, "warn");
    assert!(found.starts_with("rdma-verbs is not available: libibverbs.so.1"), "{found}");
    assert!(fix.contains("rdma-core") && fix.contains("--expert-backend rdma"), "{fix}");
    for name in ["secret file", "locked memory", "huge pages", "io_uring"] {
        check(&checks, name);
    }
    assert!(checks.iter().any(|check| check["name"].as_str().unwrap().starts_with("CUDA")));
}

#[test]
fn rails_that_are_asked_for_and_cannot_be_had_are_a_failure() {
    for asked in [
        &["--expert-backend", "rdma-verbs"][..],
        &["--expert-dual-rail", "1"],
        &["--expert-rdma-dev", "mlx5_0"],
        &["--expert-rail2-gid", "3"],
    ] {
        let (command, _dir) = without_verbs(asked);
        assert_eq!(check(&checks(command, 1), "libibverbs").0, "fail", "{asked:?}");
    }
}

#[test]
fn a_peer_is_measured_over_tcp() {
    let store = small_store(401);
    let peer = Peer::start(&store.path(), &["--rail", "none"]);
    let checks = checks(doctor(&["--peer", &peer.address()]), 0);
    let (status, found, _) = check(&checks, "peer");
    assert_eq!(status, "ok");
    let fingerprint = peer.status().fingerprint;
    assert!(found.contains(&fingerprint) && found.contains("16 records"), "{found}");
    let (status, found, _) = check(&checks, "TCP round trip");
    assert!(status == "ok" && found.contains(" us, the median for a record of "), "{found}");
    let (status, found, _) = check(&checks, "TCP bandwidth");
    assert!(
        status == "ok" && found.contains("b/s (") && found.contains("2 connections"),
        "{found}"
    );
    let (status, _, fix) = check(&checks, "peer's rails");
    assert!(status == "warn" && fix.contains("--rail none"), "{fix}");
    // One record for each round trip, and more for the bandwidth.
    assert!(peer.status().served > 101, "{:?}", peer.status());
}

#[test]
fn a_peer_without_rails_fails_who_asks_for_rails() {
    let store = small_store(402);
    let peer = Peer::start(&store.path(), &["--rail", "none"]);
    let args = ["--peer", &peer.address(), "--expert-backend", "rdma-verbs"];
    assert_eq!(check(&checks(doctor(&args), 1), "peer's rails").0, "fail");
}

#[test]
fn a_peer_that_is_not_there_is_named_and_nothing_is_measured() {
    let address = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().to_string()
    };
    let checks = checks(doctor(&["--peer", &address]), 1);
    let (status, found, fix) = check(&checks, "peer");
    assert!(status == "fail" && found.contains(&address), "{found}");
    assert!(fix.contains("expert-peer") && fix.contains("--listen"), "{fix}");
    assert!(!checks.iter().any(|check| check["name"].as_str().unwrap().starts_with("TCP")));
}

#[test]
fn a_peer_that_says_nothing_costs_the_time_to_connect_and_no_more() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let checks = checks(doctor(&["--peer", &address, "--connect-ms", "200"]), 1);
    let (_, found, fix) = check(&checks, "peer");
    assert!(found.contains("200 ms; METRALE_EXPERT_CONNECT_MS"), "{found}");
    assert!(fix.contains("--expert-connect-ms"), "{fix}");
}

#[test]
fn another_program_at_the_peers_address_is_told_from_a_peer() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let answers = std::thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        client.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        // What it has sent would be lost with a connection that is closed on unread bytes.
        let _ = client.read_to_end(&mut Vec::new());
    });
    let checks = checks(doctor(&["--peer", &address]), 1);
    let (status, _, fix) = check(&checks, "peer");
    assert!(status == "fail" && fix.contains("another program"), "{fix}");
    answers.join().unwrap();
}

#[test]
fn a_damaged_record_and_a_peer_that_stalls_are_told_apart() {
    let store = TestStore::new(1, 1, &[5_000], 406);
    store.flip_bit(ExpertKey::new(0, 0), 4_000);
    let peer = Peer::start(&store.path(), &["--rail", "none"]);
    let damaged = checks(doctor(&["--peer", &peer.address()]), 1);
    let (status, found, fix) = check(&damaged, "TCP");
    assert!(status == "fail" && found.contains("CRC"), "{found}");
    assert!(fix.contains("metrale verify"), "{fix}");

    let manifest = Arc::clone(store.open().manifest());
    let status = serde_json::to_string(&peer.status()).unwrap();
    let stalls = Scripted::start(move |conn| {
        // The first is asked how it is, the others for records.
        if conn.nth > 0 {
            conn.attach(&manifest)?;
            return conn.ignore();
        }
        let manifest_bytes = manifest.as_bytes().len() as u64;
        conn.welcome(Welcome { fingerprint: manifest.fingerprint(), manifest_bytes })?;
        conn.read()?;
        conn.send(&encode_frame(FrameType::StatusReport, Status::Ok, status.as_bytes()))
    });
    let args = ["--peer", &stalls.address(), "--deadline-ms", "200"];
    let slow = checks(doctor(&args), 1);
    let (status, found, fix) = check(&slow, "TCP");
    assert!(status == "fail" && found.contains("DEADLINE_MS"), "{found}");
    assert!(fix.contains("--expert-deadline-ms"), "{fix}");
}

#[test]
fn another_store_than_the_wished_one_is_a_failure() {
    let store = small_store(403);
    let peer = Peer::start(&store.path(), &["--rail", "none"]);
    let other = "0".repeat(64);
    let checks = checks(doctor(&["--peer", &peer.address(), "--fingerprint", &other]), 1);
    assert_eq!(check(&checks, "peer").0, "ok");
    let (status, found, _) = check(&checks, "TCP");
    assert!(status == "fail" && found.contains(&other), "{found}");
}

fn secret(dir: &Path, text: &str, mode: u32) -> PathBuf {
    let file = dir.join("secret");
    fs::write(&file, text).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
    file
}

#[test]
fn the_secret_is_looked_at_before_the_peer_is_asked() {
    let dir = tempfile::tempdir().unwrap();
    let (long, address) = ("a secret for the doctor's tests\n", "127.0.0.1:9");
    let look = |file: &Path, code: i32| {
        let mut command = doctor(&["--secret-file", file.to_str().unwrap()]);
        if code == 1 {
            command.args(["--peer", address]);
        }
        checks(command, code)
    };
    let good = look(&secret(dir.path(), long, 0o600), 0);
    assert_eq!(check(&good, "secret file").0, "ok");
    let shared = look(&secret(dir.path(), long, 0o644), 0);
    let (status, found, fix) = check(&shared, "secret file");
    assert!(status == "warn" && found.contains("mode 644") && fix.contains("chmod 600"), "{found}");
    for file in [secret(dir.path(), "short", 0o600), dir.path().join("absent")] {
        let checks = look(&file, 1);
        let (status, _, fix) = check(&checks, "secret file");
        assert!(status == "fail" && fix.contains("urandom"), "{fix}");
        let (status, found, _) = check(&checks, "peer");
        assert!(status == "fail" && found.contains("was not asked"), "{found}");
    }
}

#[test]
fn two_ends_with_different_secrets_are_told_so() {
    let dir = tempfile::tempdir().unwrap();
    let ours = secret(dir.path(), "one secret, and quite long\n", 0o600);
    let theirs = dir.path().join("theirs");
    fs::write(&theirs, "another secret, as long as it\n").unwrap();
    let store = small_store(404);
    let peer = Peer::start_with(&store.path(), &["--rail", "none"], Some(&theirs));
    let args = ["--peer", &peer.address(), "--secret-file", ours.to_str().unwrap()];
    let checks = checks(doctor(&args), 1);
    let (status, found, fix) = check(&checks, "peer");
    assert!(status == "fail" && found.contains("secret"), "{found}");
    assert!(fix.contains("same secret file"), "{fix}");
}

#[test]
fn a_store_is_opened_and_its_file_system_tried() {
    let store = TestStore::new(1, 2, &[5_000], 405);
    let path = store.path();
    let sound = checks(doctor(&["--store", path.to_str().unwrap()]), 0);
    let (status, found, _) = check(&sound, "store");
    assert!(status == "ok" && found.contains("2 records"), "{found}");
    check(&sound, "O_DIRECT");
    let empty = tempfile::tempdir().unwrap();
    let none = checks(doctor(&["--store", empty.path().to_str().unwrap()]), 1);
    let (status, found, _) = check(&none, "store");
    assert!(status == "fail" && found.contains("is not an expert store"), "{found}");
}

/// `doctor` with a locked-memory limit of 64 KiB and without the right to pass over it.
fn with_little_locked_memory(args: &[&str]) -> Command {
    let inner = doctor(args);
    let drop_rights = match rustix::process::geteuid().is_root() {
        true => "exec setpriv --bounding-set=-all --inh-caps=-all",
        false => "exec",
    };
    let mut command = Command::new("sh");
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command.env("METRALE_LOG", "warn");
    command.arg("-c").arg(format!("ulimit -l 64; {drop_rights} \"$0\" \"$@\""));
    command.arg(inner.get_program()).args(inner.get_args());
    command
}

#[test]
fn a_low_limit_of_locked_memory_is_told_and_fails_who_sets_the_arenas_size() {
    let default = checks(with_little_locked_memory(&[]), 0);
    let (status, found, fix) = check(&default, "locked memory");
    assert!(status == "warn" && found.contains("the limit is 64 KiB"), "{found}");
    assert!(fix.contains("ulimit -l") && fix.contains("LimitMEMLOCK="), "{fix}");
    let set = checks(with_little_locked_memory(&["--arena-bytes", "1MiB"]), 1);
    let (status, found, _) = check(&set, "locked memory");
    assert!(status == "fail" && found.contains("--expert-arena-bytes needs 1 MiB"), "{found}");
}

#[test]
fn people_get_a_table_with_a_line_for_each_fix_and_a_sum() {
    let (mut command, _dir) = without_verbs(&[]);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let warning = text.lines().position(|line| line.starts_with("warn  libibverbs")).unwrap();
    let fix = text.lines().nth(warning + 1).unwrap().trim_start();
    assert!(fix.starts_with("fix: install rdma-core"), "{text}");
    let sum = text.lines().last().unwrap();
    assert!(sum.contains(" checks: ") && sum.ends_with(" 0 failures"), "{text}");
}

#[test]
fn wrong_usage_is_told_before_anything_is_looked_at() {
    for args in [
        &["--expert-dual-rail", "7"][..],
        &["--expert-backend", "carrier-pigeon"],
        &["--peer", "127.0.0.1:9", "--expert-depth", "0"],
        &["--peer", "127.0.0.1"],
        &["--expert-rdma-dev", ""],
        &["--expert-rail2-dev", "../mlx5_0"],
        &["--expert-rdma-dev", "mlx5_0:3"],
        &["--fallback", "posix"],
        &["--expert-backend", "rdma", "--fallback", "tcp"],
        &["--expert-uma-piece-bytes", "5"],
    ] {
        let output = doctor(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {output:?}");
        assert!(output.stdout.is_empty(), "{output:?}");
    }
    // A client would not start with these, whether or not there is a peer to ask.
    for (variable, value) in [
        ("METRALE_EXPERT_QUEUE_PAIRS", "17"),
        ("METRALE_EXPERT_FINGERPRINT", "zz"),
        ("METRALE_EXPERT_FALLBACK", "floppy"),
        ("METRALE_EXPERT_RDMA_DEV", "../mlx5_0"),
        ("METRALE_EXPERT_DEADLINE_MS", "0"),
    ] {
        let output = doctor(&[]).env(variable, value).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{variable}: {output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.stdout.is_empty() && said.contains(variable), "{output:?}");
    }
}
