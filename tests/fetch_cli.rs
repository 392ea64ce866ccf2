//! `metrale fetch` and `metrale bench` as people and scripts use them.

mod peer_support;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use expert_tier::key::ExpertKey;
use expert_tier::testing::TestStore;
use serde_json::Value;

use peer_support::process::{Peer, metrale};
use peer_support::{small_store, wait_until};

/// `metrale fetch` by the peer, of everything.
fn fetch_all(peer: &Peer) -> Command {
    let mut command = metrale();
    command.args(["fetch", "--all", "--expert-backend", "rdma", "--peer", &peer.address()]);
    command
}

/// `metrale fetch` from the store, of what the test adds.
fn fetch_local(store: &Path) -> Command {
    let mut command = metrale();
    command.args(["fetch", "--expert-backend", "posix", "--store"]).arg(store);
    command
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("messages are UTF-8")
}

/// The last line of stderr: the program's error, after its log.
fn error(output: &Output) -> String {
    assert!(output.stdout.is_empty(), "{output:?}");
    let text = stderr(output);
    let line = text.lines().last().unwrap_or_default().to_owned();
    assert!(line.starts_with("metrale: "), "{text}");
    line
}

/// The error of a command that must end with `code`.
fn fails(command: &mut Command, code: i32) -> String {
    let output = command.output().expect("metrale starts");
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    error(&output)
}

/// The one JSON object of a command that must end with `code`.
fn json(command: &mut Command, code: i32) -> Value {
    let output = command.arg("--json").output().expect("metrale starts");
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("JSON is UTF-8");
    assert_eq!(text.lines().count(), 1, "{text}");
    serde_json::from_str(&text).expect("one JSON object")
}

/// Fails unless `object` has these fields and no other.
fn assert_fields(object: &Value, fields: &[&str]) {
    let mut found: Vec<_> = object.as_object().expect("an object").keys().collect();
    let mut fields = fields.to_vec();
    found.sort();
    fields.sort_unstable();
    assert_eq!(found, fields);
}

#[test]
fn a_fetch_without_a_backend_is_one_from_a_local_store_and_says_what_it_lacks() {
    for command in [["fetch", "--all"].as_slice(), &["bench", "fetch"]] {
        let error = fails(metrale().args(command).env("METRALE_EXPERT_BACKEND", ""), 2);
        assert!(error.contains("the uma backend needs a store"), "{error}");
        let error = fails(metrale().args(command).args(["--peer", "127.0.0.1:1"]), 2);
        assert!(error.contains("choose --expert-backend rdma"), "{error}");
    }
    let store = TestStore::mixed(11);
    let report = json(metrale().args(["fetch", "--all", "--store"]).arg(store.path()), 0);
    assert_eq!(report["backend"], "uma");
}

#[test]
fn an_unknown_backend_is_wrong_usage_and_one_that_is_not_built_in_is_not() {
    let all = || {
        let mut command = metrale();
        command.args(["fetch", "--all"]);
        command
    };
    let error = fails(all().args(["--expert-backend", "floppy"]), 2);
    assert!(error.contains("floppy") && error.contains("METRALE_EXPERT_BACKEND"), "{error}");
    let error = fails(all().env("METRALE_EXPERT_BACKEND", "floppy"), 2);
    assert!(error.contains("posix") && error.contains("METRALE_EXPERT_BACKEND"), "{error}");
    // Whether the library is missing, a device, or both.
    let verbs = ["--expert-backend", "rdma-verbs", "--peer", "127.0.0.1:9"];
    let error = fails(all().args(verbs), 1);
    assert!(error.contains("--expert-backend rdma"), "{error}");
    let error = fails(all().args(["--expert-backend", "rdma-verbs"]), 2);
    assert!(error.contains("METRALE_EXPERT_PEER"), "{error}");
}

#[test]
fn a_backend_without_its_source_is_wrong_usage() {
    let all = |backend| {
        let mut command = metrale();
        command.args(["fetch", "--all", "--expert-backend", backend]);
        command
    };
    let error = fails(&mut all("posix"), 2);
    assert!(error.contains("--expert-store") && error.contains("METRALE_EXPERT_STORE"), "{error}");
    let error = fails(&mut all("rdma"), 2);
    assert!(error.contains("--expert-peer") && error.contains("METRALE_EXPERT_PEER"), "{error}");
}

#[test]
fn a_variable_that_cannot_be_used_is_wrong_usage_and_named() {
    let store = small_store(91);
    let peer = Peer::start(&store.path(), &[]);
    let of_peer = |name, value: &str| {
        let mut command = metrale();
        command.args(["fetch", "--all", "--expert-backend", "rdma"]);
        command.env("METRALE_EXPERT_PEER", peer.address()).env(name, value);
        command
    };
    for (name, value) in [
        ("METRALE_EXPERT_DEPTH", "many"),
        ("METRALE_EXPERT_DEPTH", "0"),
        ("METRALE_EXPERT_DEPTH", "513"),
        ("METRALE_EXPERT_STREAMS", "17"),
        ("METRALE_EXPERT_STREAMS", "-1"),
        ("METRALE_EXPERT_DEADLINE_MS", "1s"),
        ("METRALE_EXPERT_DEADLINE_MS", "0"),
        ("METRALE_EXPERT_CONNECT_MS", "99999999999999999999"),
        ("METRALE_EXPERT_ATTEMPTS", "0"),
        ("METRALE_EXPERT_FINGERPRINT", "abcd"),
        ("METRALE_EXPERT_ARENA_BYTES", "1GB"),
        ("METRALE_EXPERT_PEER", "peer-without-port"),
        ("METRALE_EXPERT_HUGE_PAGES", "maybe"),
        ("METRALE_EXPERT_NUMA_NODE", "first"),
    ] {
        let error = fails(&mut of_peer(name, value), 2);
        assert!(error.contains(name), "{error}");
        assert!(error.contains(value), "{error}");
        // The same command does with the variable empty.
        let report = json(fetch_all(&peer).env(name, ""), 0);
        assert_eq!((&report["records"], &report["errors"]), (&16.into(), &0.into()));
    }
    let not_text = OsStr::from_bytes(b"\xff\xfe");
    let error = fails(fetch_all(&peer).env("METRALE_EXPERT_DEPTH", not_text), 2);
    assert!(error.contains("METRALE_EXPERT_DEPTH") && error.contains("UTF-8"), "{error}");
}

#[test]
fn a_flag_wins_over_its_variable() {
    let store = small_store(92);
    let peer = Peer::start(&store.path(), &[]);
    let report = json(
        fetch_all(&peer)
            .args(["--depth", "4", "--streams", "1", "--deadline-ms", "5000"])
            .env("METRALE_EXPERT_BACKEND", "posix")
            .env("METRALE_EXPERT_PEER", "127.0.0.1:1")
            .env("METRALE_EXPERT_DEPTH", "many")
            .env("METRALE_EXPERT_STREAMS", "99")
            .env("METRALE_EXPERT_DEADLINE_MS", "never"),
        0,
    );
    assert_eq!(report["records"], 16);
    let report = json(
        metrale()
            .args(["fetch", "--all"])
            .env("METRALE_EXPERT_BACKEND", "rdma")
            .env("METRALE_EXPERT_PEER", peer.address()),
        0,
    );
    assert_eq!(report["backend"], "rdma");
}

#[test]
fn the_report_of_a_fetch_has_the_documented_fields() {
    let store = small_store(93);
    let peer = Peer::start(&store.path(), &[]);
    let bytes = 8 * (5_000 + 300_001);
    for (mut command, backend, source) in
        [(fetch_all(&peer), "rdma", "tcp"), (fetch_local(&store.path()), "posix", "local")]
    {
        if backend == "posix" {
            command.arg("--all");
        }
        let report = json(&mut command, 0);
        let fields = ["backend", "records", "errors", "bytes", "seconds", "by_source"];
        assert_fields(&report, &fields);
        assert_fields(&report["by_source"], &["read", "push", "tcp", "local"]);
        assert_eq!(report["backend"], backend);
        assert_eq!((&report["records"], &report["errors"]), (&16.into(), &0.into()));
        assert_eq!(report["bytes"], bytes);
        assert!(report["seconds"].as_f64().unwrap() > 0.0);
        for name in ["read", "push", "tcp", "local"] {
            assert_eq!(report["by_source"][name], if name == source { 16 } else { 0 }, "{name}");
        }
    }
}

#[test]
fn the_file_of_one_record_is_its_payload() {
    let store = small_store(94);
    let peer = Peer::start(&store.path(), &[]);
    let out = store.scratch().join("expert.bin");
    std::fs::write(&out, "what was there before").unwrap();
    for mut command in [
        {
            let mut command = metrale();
            command.args(["fetch", "--expert-backend", "rdma", "--peer", &peer.address()]);
            command
        },
        fetch_local(&store.path()),
    ] {
        for key in [ExpertKey::new(0, 7), ExpertKey::new(1, 2)] {
            let (layer, expert) = (key.layer.to_string(), key.expert.to_string());
            let mut command = {
                let mut again = metrale();
                again.args(command.get_args()).args(["--layer", &layer, "--expert", &expert]);
                again
            };
            let report = json(command.arg("--out").arg(&out), 0);
            assert_eq!((&report["records"], &report["errors"]), (&1.into(), &0.into()));
            assert!(std::fs::read(&out).unwrap() == store.payload(key), "{key}");
        }
        let error = fails(
            command
                .args(["--layer", "0", "--expert", "0", "--out"])
                .arg(store.scratch().join("absent/file")),
            1,
        );
        assert!(error.contains("absent/file"), "{error}");
    }
    let left: Vec<_> = std::fs::read_dir(store.scratch())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .filter(|name| name.to_string_lossy().contains("partial"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_key_that_the_store_lacks_is_named() {
    let store = small_store(95);
    let error = fails(fetch_local(&store.path()).args(["--layer", "9", "--expert", "0"]), 1);
    assert!(error.contains("layer 9"), "{error}");
    let error = fails(fetch_local(&store.path()).args(["--layer", "1", "--expert", "8"]), 1);
    assert!(error.contains("layer 1 expert 8"), "{error}");
}

#[test]
fn a_trace_is_fetched_line_by_line() {
    // The router of kjv-moe: six layers of 32 experts, four of them a token and layer.
    let store = TestStore::new(6, 32, &[4096, 20_000], 96);
    let peer = Peer::start(&store.path(), &[]);
    let trace = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/traces/mixed.jsonl");
    let lines = std::fs::read_to_string(&trace).unwrap();
    let bytes: u64 = lines
        .lines()
        .map(|line| {
            let acquire: Value = serde_json::from_str(line).unwrap();
            let payload = [4096, 20_000][acquire["layer"].as_u64().unwrap() as usize % 2];
            payload * acquire["experts"].as_array().unwrap().len() as u64
        })
        .sum();
    for mut command in [
        {
            let mut command = metrale();
            command.args(["fetch", "--expert-backend", "rdma", "--peer", &peer.address()]);
            command
        },
        fetch_local(&store.path()),
    ] {
        let report = json(command.arg("--trace").arg(&trace), 0);
        assert_eq!((&report["records"], &report["errors"]), (&1200.into(), &0.into()));
        assert_eq!(report["bytes"], bytes);
    }
}

#[test]
fn a_trace_of_another_model_fails_record_by_record() {
    let store = small_store(97);
    let trace = store.scratch().join("trace.jsonl");
    let line = |layer: u32, experts: &str| {
        format!("{{\"step\":0,\"layer\":{layer},\"experts\":[{experts}]}}\n")
    };
    // The last lines have no key of the store at all.
    std::fs::write(&trace, line(0, "1,2,200") + &line(77, "1,2") + &line(1, "8")).unwrap();
    let mut command = fetch_local(&store.path());
    let output = command.arg("--trace").arg(&trace).arg("--json").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!((&report["records"], &report["errors"]), (&2.into(), &4.into()));
    let said = stderr(&output);
    assert!(said.contains("layer 77") && said.contains("layer 0 expert 200"), "{said}");

    std::fs::write(&trace, line(0, "1") + "{\"step\":1,\n").unwrap();
    let error = fails(fetch_local(&store.path()).arg("--trace").arg(&trace), 1);
    assert!(error.contains("line 2 of the trace") && error.contains("trace.jsonl"), "{error}");
    let absent = store.scratch().join("absent.jsonl");
    let error = fails(fetch_local(&store.path()).arg("--trace").arg(&absent), 1);
    assert!(error.contains("absent.jsonl"), "{error}");
}

#[test]
fn one_damaged_record_of_all_fails_alone() {
    let store = small_store(98);
    let peer = Peer::start(&store.path(), &[]);
    let damaged = ExpertKey::new(1, 6);
    store.flip_bit(damaged, 70_000);
    let mut local = fetch_local(&store.path());
    local.arg("--all");
    for mut command in [fetch_all(&peer), local] {
        let output = command.arg("--json").output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
        assert_eq!((&report["records"], &report["errors"]), (&15.into(), &1.into()));
        let said = stderr(&output);
        let errors: Vec<_> = said.lines().filter(|line| line.starts_with("metrale: ")).collect();
        assert_eq!(errors.len(), 1, "{said}");
        assert!(errors[0].contains(&damaged.to_string()), "{said}");
        assert!(errors[0].contains("CRC-32"), "{said}");
    }
}

#[test]
fn a_peer_that_is_not_there_or_not_the_one_wanted_is_an_error() {
    let (store, other) = (small_store(99), small_store(100));
    let mut peer = Peer::start(&store.path(), &[]);
    let wanted = other.open().manifest().fingerprint().to_string();
    let error = fails(fetch_all(&peer).args(["--expert-fingerprint", &wanted]), 1);
    assert!(error.contains("another model or other weights"), "{error}");
    let error = fails(fetch_all(&peer).env("METRALE_EXPERT_FINGERPRINT", &wanted), 1);
    assert!(error.contains("another model or other weights"), "{error}");
    let absent = store.scratch().join("no-secret");
    let error = fails(fetch_all(&peer).arg("--secret-file").arg(&absent), 1);
    assert!(error.contains("no-secret"), "{error}");
    peer.kill();
    let error = fails(&mut fetch_all(&peer), 1);
    assert!(error.contains("is expert-peer running there?"), "{error}");
}

#[test]
fn the_report_of_a_measurement_has_the_documented_fields() {
    let store = small_store(101);
    let peer = Peer::start(&store.path(), &[]);
    let bench = |backend: &str| {
        let mut command = metrale();
        command.args(["bench", "fetch", "--seconds", "0.2", "--batch", "4"]);
        command.args(["--expert-backend", backend]);
        command
    };
    let mut local = bench("posix");
    local.arg("--store").arg(store.path());
    let mut remote = bench("rdma");
    remote.args(["--peer", &peer.address()]);
    for (mut command, remote) in [(remote, true), (local, false)] {
        let report = json(&mut command, 0);
        let number = |name: &str| report[name].as_f64().unwrap_or_else(|| panic!("{name}"));
        assert_fields(
            &report,
            &[
                "records",
                "errors",
                "bytes",
                "seconds",
                "gb_per_s",
                "p50_us",
                "p99_us",
                "p999_us",
                "client_cpu_s",
                "peer_cpu_s",
            ],
        );
        assert!(number("records") >= 4.0 && number("errors") == 0.0);
        assert!(number("seconds") >= 0.2);
        let rate = number("bytes") / number("seconds") / 1e9;
        assert!((number("gb_per_s") / rate - 1.0).abs() < 1e-6);
        assert!(number("p50_us") > 0.0 && number("p50_us") <= number("p99_us"));
        assert!(number("p99_us") <= number("p999_us"));
        assert!(number("client_cpu_s") > 0.0);
        assert!(if remote { number("peer_cpu_s") > 0.0 } else { number("peer_cpu_s") == 0.0 });
    }
    for wrong in [["--seconds", "0"], ["--batch", "0"], ["--batch", "many"]] {
        let output = bench("posix").args(wrong).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
    }
}

#[test]
fn a_file_for_more_than_one_record_is_wrong_usage() {
    let store = small_store(102);
    let out = store.scratch().join("expert.bin");
    for what in [["--all"].as_slice(), &["--trace", "trace.jsonl"]] {
        let output = fetch_local(&store.path()).args(what).arg("--out").arg(&out).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(stderr(&output).contains("--out"), "{output:?}");
        assert!(!out.exists());
    }
}

#[test]
fn the_size_of_the_arena_takes_suffixes() {
    let store = small_store(103);
    for size in ["1M", "1MiB", "1024K", "1048576"] {
        let mut command = fetch_local(&store.path());
        let output = command.args(["--all", "--arena-bytes", size]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        // What is left of 1 MiB fits no further slot.
        assert!(stderr(&output).contains("slots 3 x 8 KiB + 3 x 296 KiB"), "{output:?}");
    }
    let error = fails(fetch_local(&store.path()).args(["--all", "--arena-bytes", "1K"]), 1);
    assert!(error.contains("an arena of 1 KiB is too small"), "{error}");
}

#[test]
fn the_help_names_every_variable_and_every_short_form() {
    let output = metrale().args(["fetch", "--help"]).output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    // What a peer is told is no matter of a client's.
    let of_clients = |name: &str| name.starts_with("METRALE_EXPERT_");
    for variable in gpu_sys::env::TABLE.iter().filter(|it| of_clients(it.name)) {
        let (name, flag) = (variable.name, variable.flag());
        assert!(help.contains(&format!("[env: {name}]")), "{name}");
        assert!(help.contains(&format!("--{flag} <")), "{flag}");
        let short = flag.trim_start_matches("expert-");
        let alias = short == "backend" || help.contains(&format!("[alias: --{short}]"));
        assert!(alias, "{short}: {help}");
    }
    for part in ["METRALE_LOG", "{\"step\":0,\"layer\":3,\"experts\":[5,1]}"] {
        assert!(help.contains(part), "{part}");
    }
}

#[test]
fn a_result_is_told_as_a_person_would_tell_it() {
    let store = small_store(104);
    let text = |command: &mut Command| {
        String::from_utf8(command.output().expect("metrale starts").stdout).unwrap()
    };
    let mut one = fetch_local(&store.path());
    let said = text(one.args(["--layer", "0", "--expert", "0"]));
    assert!(said.starts_with("1 record, 5000 bytes by posix"), "{said}");
    let trace = store.scratch().join("trace.jsonl");
    std::fs::write(&trace, "{\"step\":0,\"layer\":9,\"experts\":[1,2]}\n").unwrap();
    let said = text(fetch_local(&store.path()).arg("--trace").arg(&trace));
    assert!(said.starts_with("no record came by posix") && said.contains("2 failed"), "{said}");
    let mut local = metrale();
    local.args(["bench", "fetch", "--seconds", "0.1", "--store"]).arg(store.path());
    let said = text(&mut local);
    assert!(!said.contains("peer"), "{said}");
}

/// Starts a measurement by the peer, waits until it is past its half second of warming up, and
/// lets the test do something to the peer before the measurement ends.
fn measure_while(peer: &mut Peer, json: bool, disturb: impl FnOnce(&mut Peer)) -> Output {
    let mut command = metrale();
    command.args(["bench", "fetch", "--expert-backend", "rdma", "--peer", &peer.address()]);
    command.args(["--seconds", "3", "--deadline-ms", "100", "--connect-ms", "500"]);
    command.args(json.then_some("--json"));
    let child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("metrale starts");
    wait_until("the first records", || peer.status().served > 0);
    let begun_s = peer.status().uptime_s;
    wait_until("the warming up to end", || peer.status().uptime_s > begun_s + 1.0);
    disturb(peer);
    child.wait_with_output().expect("a child of ours")
}

#[test]
fn a_measurement_outlives_its_peer() {
    let store = small_store(105);
    for json in [true, false] {
        let mut peer = Peer::start(&store.path(), &[]);
        let output = measure_while(&mut peer, json, Peer::kill);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let said = stderr(&output);
        assert!(said.contains("the peer's processor time is unknown: cannot connect"), "{said}");
        let text = String::from_utf8(output.stdout).unwrap();
        if !json {
            assert!(text.contains(" here, unknown at the peer; "), "{text}");
            continue;
        }
        let report: Value = serde_json::from_str(&text).expect("one JSON object");
        let object = report.as_object().unwrap();
        assert_eq!(object.get("peer_cpu_s"), Some(&Value::Null), "{text}");
        assert!(report["records"].as_u64().unwrap() > 0, "{text}");
        // At most one failure per pause of 50 ms, and those of the loss itself.
        let errors = report["errors"].as_u64().unwrap();
        assert!((1..=100).contains(&errors), "{text}");
    }
}

#[test]
fn a_measurement_does_not_mix_two_lives_of_a_peer() {
    let store = small_store(106);
    let mut peer = Peer::start(&store.path(), &[]);
    let output = measure_while(&mut peer, true, |peer| {
        peer.kill();
        peer.restart(&store.path());
    });
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(report["peer_cpu_s"], Value::Null, "{output:?}");
    let said = stderr(&output);
    assert!(said.contains("processor time is unknown: the peer was restarted"), "{said}");
}

/// `metrale fetch` of everything with at most `limit_bytes` of locked memory.
fn fetch_locking(limit_bytes: u64, store: &Path) -> Output {
    use gpu_sys::limits::{IpcLock, LockLimit};
    let limit = format!("--memlock={limit_bytes}:{limit_bytes}");
    let mut command = match LockLimit::current().capability {
        IpcLock::Granted => {
            let mut command = Command::new("setpriv");
            command.args(["--bounding-set=-ipc_lock", "prlimit", &limit]);
            command
        }
        IpcLock::InNamespace | IpcLock::Absent => {
            let mut command = Command::new("prlimit");
            command.arg(limit);
            command
        }
    };
    command.arg(env!("CARGO_BIN_EXE_metrale"));
    command.args(["fetch", "--all", "--expert-backend", "posix", "--store"]).arg(store);
    command.env_remove("METRALE_LOG").output().expect("prlimit starts")
}

#[test]
fn a_low_limit_of_locked_memory_makes_the_arena_smaller_and_says_so() {
    let store = TestStore::new(1, 40, &[20_000], 107);
    let output = fetch_locking(100 << 10, &store.path());
    assert!(output.status.success(), "{output:?}");
    let said = stderr(&output);
    for part in ["the arena is 100 KiB instead of 800 KiB", "limit is 100 KiB", "ulimit -l"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let output = fetch_locking(16 << 10, &store.path());
    assert_eq!(output.status.code(), Some(1));
    let error = error(&output);
    for part in ["one record of this store needs 20 KiB", "limit is 16 KiB", "ulimit -l"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(!error.contains("lower the arena"), "{error}");
}

#[test]
fn a_pipe_whose_reader_left_within_the_record_has_not_been_written() {
    use std::io::Read;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    let store = small_store(31);
    let fifo = store.scratch().join("fifo");
    mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let reader = std::thread::spawn({
        let fifo = fifo.clone();
        // A pipe holds 64 KiB, the record has several times as much.
        move || std::fs::File::open(fifo).and_then(|mut pipe| pipe.read_exact(&mut [0; 100]))
    });
    let mut command = fetch_local(&store.path());
    command.args(["--layer", "1", "--expert", "3", "--out"]).arg(&fifo);
    let error = fails(&mut command, 1);
    assert!(error.contains(fifo.to_str().unwrap()), "{error}");
    reader.join().expect("no panic").unwrap();
}

#[test]
fn direct_reads_take_their_depth_and_size_from_settings() {
    let store = small_store(93);
    let fetch = || {
        let mut command = metrale();
        command.args(["fetch", "--all", "--expert-backend", "uma", "--store"]).arg(store.path());
        command
    };
    for (name, value) in [
        ("METRALE_EXPERT_UMA_DEPTH", "0"),
        ("METRALE_EXPERT_UMA_DEPTH", "4097"),
        ("METRALE_EXPERT_UMA_PIECE_BYTES", "4095"),
        ("METRALE_EXPERT_UMA_PIECE_BYTES", "5000"),
        ("METRALE_EXPERT_UMA_PIECE_BYTES", "16781312"),
    ] {
        let error = fails(fetch().env(name, value), 2);
        assert!(error.contains(name) && error.contains(value), "{error}");
    }
    let flags = ["--expert-uma-depth", "2", "--expert-uma-piece-bytes", "4096"];
    let report = json(fetch().args(flags).env("METRALE_EXPERT_UMA_DEPTH", "many"), 0);
    assert_eq!((&report["records"], &report["errors"]), (&16.into(), &0.into()));
}
