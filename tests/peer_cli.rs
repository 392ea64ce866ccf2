//! `metrale peer` as people and scripts use it.

mod peer_support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use expert_tier::testing::TestStore;
#[cfg(metrale_rdma_verbs)]
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use peer_support::process::{Peer, metrale, run};
use peer_support::{BOUND, small_store, wait_for, wait_until};

fn peer_run(store: &Path) -> Command {
    let mut command = metrale();
    command.args(["peer", "run", "--store"]).arg(store);
    command
}

/// The error of a command that must end with `code` and print nothing.
fn fails(command: &mut Command, code: i32) -> String {
    let output = command.output().expect("metrale starts");
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    let text = String::from_utf8(output.stderr).expect("messages are UTF-8");
    text.lines().last().unwrap_or_default().to_owned()
}

fn secret_file(store: &TestStore, text: &str) -> String {
    let path = store.scratch().join(format!("secret-{}", text.len()));
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn listening_beyond_loopback_takes_a_secret_or_the_word_of_the_operator() {
    let store = small_store(111);
    for listen in ["0.0.0.0:0", "[::]:0", "192.0.2.1:9909"] {
        let error = fails(peer_run(&store.path()).args(["--listen", listen]), 1);
        assert!(error.contains("--secret-file") && error.contains("--insecure"), "{error}");
    }
    // The later --listen wins over the guard's own.
    let secret = secret_file(&store, "a secret of this test");
    for args in [["--insecure", "--drain-ms=100"], ["--secret-file", &secret]] {
        let address = serve_on(&store, "0.0.0.0:0", &args);
        assert!(address.starts_with("0.0.0.0:"), "{address}");
    }
}

#[test]
fn a_peer_listens_on_a_name() {
    let store = small_store(116);
    let address = serve_on(&store, "localhost:0", &[]);
    assert!(address.starts_with("127.0.0.1:") || address.starts_with("[::1]:"), "{address}");
    let error = fails(peer_run(&store.path()).args(["--listen", "no such host:1"]), 1);
    assert!(error.contains("cannot resolve no such host:1"), "{error}");
}

#[test]
fn a_peer_serves_on_when_nobody_reads_its_stdout() {
    let store = small_store(117);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut child = peer_run(&store.path())
        .args(["--listen", "127.0.0.1:0"])
        .stdout(writer)
        .stderr(Stdio::piped())
        .spawn()
        .expect("metrale starts");
    // It logs where it listens or ends; either ends the wait.
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let closed = log.find(|line| line.contains("stdout is closed")).expect("a log line");
    assert!(closed.contains("WARN"), "{closed}");
    let (_, address) = closed.split_once("address=").expect("the address");
    let address = address.split_whitespace().next().unwrap();
    succeed(&run(&["peer", "status", address]));
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    // The log is read to its end, so that no write of the peer's blocks.
    log.for_each(drop);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_secret_that_others_may_read_is_warned_of() {
    use std::os::unix::fs::PermissionsExt;
    let store = small_store(118);
    let secret = secret_file(&store, "a secret with a mode of its own");
    let warning = format!("chmod 600 {secret}");
    for (mode, warned) in [(0o600, false), (0o400, false), (0o640, true), (0o604, true)] {
        std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(mode)).unwrap();
        let peer = Peer::start(&store.path(), &["--secret-file", &secret]);
        assert_eq!(peer.log().contains(&warning), warned, "{mode:o}: {}", peer.log());
        let output = run(&["peer", "status", &peer.address(), "--secret-file", &secret]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        succeed(&output);
        assert_eq!(said.contains(&warning), warned, "{mode:o}: {said}");
    }
}

#[test]
fn a_log_level_that_does_not_exist_is_warned_of_and_the_default_taken() {
    let store = small_store(119);
    let log = |wish: &str| {
        let mut command = metrale();
        command.args(["fetch", "--all", "--store"]).arg(store.path()).env("METRALE_LOG", wish);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let default = log("");
    assert!(default.contains("INFO") && !default.contains("METRALE_LOG"), "{default}");
    for wish in ["WARNN", "expert_tier=loud", "warn,,"] {
        let said = log(wish);
        assert!(said.contains("INFO"), "{said}");
        assert!(said.contains(&format!("METRALE_LOG=\"{wish}\"")), "{said}");
    }
    assert_eq!(log("warn"), "");
    assert_eq!(log("OFF"), "");
}

/// Starts a peer on `listen`, and returns the address that it says; ends it.
fn serve_on(store: &TestStore, listen: &str, args: &[&str]) -> String {
    let mut child = peer_run(&store.path())
        .args(["--listen", listen])
        .args(args)
        .stdout(Stdio::piped())
        .spawn()
        .expect("metrale starts");
    let mut line = String::new();
    // It prints its one line or ends; either ends the wait.
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    line.trim_end().strip_prefix("listening on ").unwrap_or_default().to_owned()
}

#[cfg(metrale_rdma_verbs)]
fn a_peer_looks_at_what_it_was_asked_for_before_it_looks_for_devices(store: &TestStore) {
    let refused = |args: &[&str], code, words: &[&str]| {
        let listen = ["--listen", "127.0.0.1:0"];
        let error = fails(peer_run(&store.path()).args(listen).args(args), code);
        for word in words {
            assert!(error.contains(word), "{args:?}: {error:?} does not name {word:?}");
        }
    };
    let of_no_use = [
        ["--dram-budget", "1MiB"],
        ["--resident-profile", "any"],
        ["--spill-source", "mmap"],
        ["--spill-transfer", "stage"],
    ];
    for flag in of_no_use {
        refused(&[&["--rail", "none"][..], &flag].concat(), 2, &[flag[0], "--rail none"]);
    }
    refused(&["--rail", "none", "--rail", "rxe0"], 2, &["--rail none stands alone"]);

    refused(&["--dram-budget", "1KiB"], 1, &["--dram-budget", "1 KiB"]);
    refused(&["--push-buffers", "100KiB"], 1, &["--push-buffers", "100 KiB", "512 KiB"]);
    refused(&["--push-pinned", "1MiB"], 1, &["--push-pinned"]);
    let staged = ["--spill-transfer", "stage", "--spill-source", "mmap"];
    refused(&staged, 1, &["--spill-transfer stage", "--spill-source mmap"]);

    let profile = store.scratch().join("profile");
    let path = profile.to_str().expect("UTF-8");
    refused(&["--resident-profile", path], 1, &[path, "No such file"]);
    std::fs::write(&profile, "{\"layer\":9,\"expert\":0,\"count\":1}\n").unwrap();
    refused(&["--resident-profile", path], 1, &[path, "line 1"]);
    std::fs::remove_file(&profile).unwrap();
    // Nobody writes to it: to open it would be to wait.
    mknodat(CWD, &profile, FileType::Fifo, Mode::RWXU, 0).unwrap();
    refused(&["--resident-profile", path], 1, &[path, "not a regular file but a FIFO"]);
}

#[test]
fn a_peer_that_cannot_start_says_why() {
    let store = small_store(112);
    let error = fails(peer_run(&store.path()).args(["--listen", "nowhere"]), 2);
    assert!(!error.is_empty());
    let error = fails(peer_run(&store.path()).args(["--max-clients", "0"]), 2);
    assert!(!error.is_empty());

    #[cfg(metrale_rdma_verbs)]
    a_peer_looks_at_what_it_was_asked_for_before_it_looks_for_devices(&store);

    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let error = fails(peer_run(&store.path()).args(["--listen", &address]), 1);
    assert!(error.contains("cannot listen on") && error.contains(&address), "{error}");
    let metrics = ["--listen", "127.0.0.1:0", "--metrics-listen", &address];
    let error = fails(peer_run(&store.path()).args(metrics), 1);
    assert!(error.contains("cannot serve metrics on") && error.contains(&address), "{error}");

    let error = fails(metrale().args(["peer", "run"]), 2);
    assert!(error.contains("--store") && error.contains("METRALE_EXPERT_STORE"), "{error}");
    let empty = metrale().args(["peer", "run"]).env("METRALE_EXPERT_STORE", "").output().unwrap();
    assert_eq!(empty.status.code(), Some(2));
    let absent = store.scratch().join("absent");
    let error = fails(&mut peer_run(&absent), 1);
    assert!(error.contains("absent/manifest.json"), "{error}");

    let short = secret_file(&store, "short");
    let error = fails(peer_run(&store.path()).args(["--secret-file", &short]), 1);
    assert!(error.contains("16 to 4096 bytes"), "{error}");
    let error = fails(peer_run(&store.path()).env("METRALE_EXPERT_SECRET_FILE", &short), 1);
    assert!(error.contains("16 to 4096 bytes"), "{error}");
}

#[test]
fn a_store_that_was_cut_is_not_published() {
    let store = small_store(113);
    let file = store.path().join("layer-00001.records");
    let length = file.metadata().unwrap().len();
    std::fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(length - 1).unwrap();
    let error = fails(&mut peer_run(&store.path()), 1);
    assert!(error.contains("layer-00001.records"), "{error}");
    assert!(error.contains(&length.to_string()), "{error}");
}

fn succeed(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).expect("results are UTF-8")
}

/// The fields of `metrale peer status --json`, by name.
const STATUS_FIELDS: [&str; 34] = [
    "bytes",
    "clients",
    "connections",
    "cpu_s",
    "demotions",
    "draining",
    "errors",
    "fingerprint",
    "layers",
    "max_clients",
    "model",
    "promotions",
    "push_errors",
    "push_lanes",
    "push_queue",
    "pushed_bytes",
    "pushes",
    "queue_pairs",
    "rails",
    "records",
    "refused",
    "residency",
    "resident_bytes",
    "resident_records",
    "rss_bytes",
    "served",
    "spill_source",
    "spill_transfer",
    "spilled_records",
    "table_generation",
    "uptime_s",
    "verbs_calls",
    "version",
    "withdrawn",
];

#[test]
fn the_status_of_a_peer_has_the_documented_fields() {
    let store = small_store(114);
    let secret = secret_file(&store, "another secret of this test");
    let peer = Peer::start(&store.path(), &["--secret-file", &secret, "--max-clients", "7"]);
    let address = peer.address();
    let fetch = ["fetch", "--all", "--expert-backend", "rdma", "--peer", &address];
    succeed(&run(&[&fetch[..], &["--secret-file", &secret]].concat()));
    let status = ["peer", "status", &address, "--secret-file", &secret];
    let json = succeed(&run(&[&status[..], &["--json"]].concat()));
    assert_eq!(json.lines().count(), 1, "{json}");
    let report: Value = serde_json::from_str(&json).expect("one JSON object");
    let mut fields: Vec<_> = report.as_object().unwrap().keys().map(String::as_str).collect();
    fields.sort_unstable();
    assert_eq!(fields, STATUS_FIELDS);
    let fingerprint = store.open().manifest().fingerprint().to_string();
    assert_eq!(report["fingerprint"], fingerprint);
    assert_eq!((&report["served"], &report["errors"]), (&16.into(), &0.into()));
    assert_eq!((&report["layers"], &report["records"]), (&2.into(), &16.into()));
    assert_eq!((&report["max_clients"], &report["draining"]), (&7.into(), &false.into()));
    assert!(report["rss_bytes"].as_u64().unwrap() > 1 << 20);

    let text = succeed(&run(&status));
    assert!(text.contains(&fingerprint) && text.contains("16 served"), "{text}");

    let from_environment = metrale()
        .args(["peer", "status"])
        .env("METRALE_EXPERT_PEER", &address)
        .env("METRALE_EXPERT_SECRET_FILE", &secret)
        .output()
        .unwrap();
    assert!(succeed(&from_environment).contains(&fingerprint));
    let error = fails(metrale().args(["peer", "status"]), 2);
    assert!(error.contains("METRALE_EXPERT_PEER"), "{error}");

    // Without the secret nothing is said, and an address where nobody listens is no peer.
    let output = run(&["peer", "status", &address]);
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("the peer wants a secret") && !said.contains(&fingerprint), "{said}");
    let output = run(&["peer", "status", "127.0.0.1:1"]);
    assert_eq!(output.status.code(), Some(1));
}

/// `GET /metrics`, once the exporter answers.
fn scrape(address: &str) -> String {
    wait_for("an answer at /metrics", || {
        let mut socket = TcpStream::connect(address).ok()?;
        socket.set_read_timeout(Some(BOUND)).ok()?;
        let request =
            format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        socket.write_all(request.as_bytes()).ok()?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer).ok()?;
        answer.starts_with("HTTP/1.1 200").then_some(answer)
    })
}

/// The value of the sample whose line starts with `name`; 0 where there is none yet.
fn sample(text: &str, name: &str) -> f64 {
    let line =
        text.lines().find(|line| line.strip_prefix(name).is_some_and(|l| l.starts_with(' ')));
    line.and_then(|line| line.rsplit(' ').next()).map_or(0.0, |value| value.parse().unwrap())
}

#[test]
fn the_metrics_of_a_peer_grow_with_what_it_does() {
    let store = small_store(115);
    // A port that is free now; the exporter does not say which one it took of its own.
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let metrics = free.local_addr().unwrap().to_string();
    drop(free);
    let peer = Peer::start(&store.path(), &["--metrics-listen", &metrics]);
    let served = "metrale_peer_requests_total{status=\"ok\"}";
    let before = sample(&scrape(&metrics), served);
    let address = peer.address();
    let fetch = ["fetch", "--all", "--expert-backend", "rdma", "--peer", &address];
    succeed(&run(&fetch));
    let mut stranger = TcpStream::connect(&address).unwrap();
    stranger.write_all(&[0xff; 64]).unwrap();
    wait_until("the refusal to be counted", || {
        sample(&scrape(&metrics), "metrale_peer_refusals_total{status=\"protocol\"}") == 1.0
    });
    let text = scrape(&metrics);
    assert_eq!(sample(&text, served), before + 16.0, "{text}");
    let bytes = peer.status().bytes as f64;
    assert!(bytes > 0.0);
    assert_eq!(sample(&text, "metrale_peer_bytes_total"), bytes, "{text}");
    assert!(text.contains("# TYPE metrale_peer_requests_total counter"), "{text}");
    assert!(text.contains("metrale_peer_request_seconds"), "{text}");
    for name in ["requests_total", "bytes_total", "request_seconds", "refusals_total", "clients"] {
        assert!(text.contains(&format!("# HELP metrale_peer_{name} ")), "{name}: {text}");
    }
    wait_until("the client's leaving to be seen", || {
        sample(&scrape(&metrics), "metrale_peer_clients") == 0.0
    });
}

#[test]
fn strangers_at_the_metrics_port_hold_neither_the_peer_nor_the_metrics_up() {
    let store = small_store(95);
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let metrics = free.local_addr().unwrap().to_string();
    drop(free);
    let peer = Peer::start(&store.path(), &["--metrics-listen", &metrics]);
    scrape(&metrics);
    let before = peer.resources().1;
    let strangers: Vec<_> = (0..60).map(|_| TcpStream::connect(&metrics).unwrap()).collect();
    // Sixteen places at most, and each is free again after a few seconds.
    scrape(&metrics);
    assert!(peer.resources().1 <= before + 20, "{} more", peer.resources().1 - before);
    assert_eq!(peer.status().records, store.open().manifest().layout().records());
    drop(strangers);
}

#[test]
fn a_log_that_cannot_be_written_ends_nothing() {
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let status = metrale().args(["inspect", "nowhere"]).stderr(full()).status().unwrap();
    assert_eq!(status.code(), Some(1));

    let store = small_store(96);
    let mut command = peer_run(&store.path());
    command.args(["--listen", "127.0.0.1:0"]).stderr(full()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("listening on ").expect("the peer serves").to_owned();
    for _ in 0..3 {
        let all = ["fetch", "--all", "--expert-backend", "rdma", "--peer", &address];
        assert!(run(&all).status.success());
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[cfg(metrale_rdma_verbs)]
#[test]
fn the_help_names_the_variables_of_peers() {
    let output = metrale().args(["peer", "run", "--help"]).output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    let of_peers = |name: &str| !name.starts_with("METRALE_EXPERT_");
    let variables = gpu_sys::env::TABLE.iter().filter(|it| of_peers(it.name));
    for variable in variables {
        let (name, flag) = (variable.name, variable.flag());
        assert!(
            help.contains(&format!("[env: {name}")) && help.contains(&format!("--{flag}")),
            "{name}"
        );
    }
}
