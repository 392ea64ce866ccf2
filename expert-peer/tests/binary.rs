//! The `expert-peer` program does what `metrale peer run` does.

#[cfg(metrale_rdma_verbs)]
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
#[cfg(metrale_rdma_verbs)]
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use expert_tier::key::ExpertKey;
use expert_tier::tcp::{TcpOptions, TcpTier};
use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::ExpertTier;
use expert_tier::wire::Secret;
use rustix::process::{Pid, Signal, kill_process};

fn expert_peer() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_expert-peer"));
    command.env_clear();
    command
}

/// Ends the process with the test.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        // An error means that it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(store: &Path, secret: &Path) -> (Guard, String) {
    let child = expert_peer()
        .args(["--listen", "127.0.0.1:0", "--store"])
        .arg(store)
        .env("METRALE_EXPERT_SECRET_FILE", secret)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("expert-peer starts");
    let mut guard = Guard(child);
    let mut line = String::new();
    // It prints its one line or ends; either ends the wait.
    BufReader::new(guard.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim_end().strip_prefix("listening on ").expect("the address").to_owned();
    (guard, address)
}

#[test]
fn it_serves_whoever_knows_the_secret_and_drains_when_told() {
    let store = TestStore::new(1, 4, &[10_000], 1);
    let secret = store.scratch().join("secret");
    std::fs::write(&secret, "the secret of this very test").unwrap();
    let (mut peer, address) = start(&store.path(), &secret);
    assert!(TcpTier::connect(TcpOptions::new(&address)).is_err());
    let secret = Some(Secret::read(&secret).unwrap());
    let tier = TcpTier::connect(TcpOptions { secret, ..TcpOptions::new(&address) }).unwrap();
    let arena = small_arena(1);
    let key = ExpertKey::new(0, 2);
    let fetched = tier.fetch(key, arena.try_acquire(1).unwrap()).unwrap();
    assert!(fetched.residency.payload() == store.payload(key));
    kill_process(Pid::from_child(&peer.0), Signal::TERM).unwrap();
    // Bounded by --drain-ms, and by the runner's limit for a test.
    assert_eq!(peer.0.wait().unwrap().code(), Some(0));
}

/// A peer that may lock `kilobytes` and reads past the page cache.
#[cfg(metrale_rdma_verbs)]
fn start_limited(store: &Path, kilobytes: u64) -> (Guard, String, PathBuf) {
    let log = store.join("../log");
    let child = Command::new("sh")
        .arg("-c")
        .arg(format!(
            "ulimit -l {kilobytes}; without='setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock'
             # Who may not give the capability up has none.
             $without true 2>&- || without=
             exec $without {} --spill-source direct --rail none --listen 127.0.0.1:0 --store \"$0\"",
            env!("CARGO_BIN_EXE_expert-peer")
        ))
        .arg(store)
        .stdout(Stdio::piped())
        .stderr(File::create(&log).unwrap())
        .spawn()
        .expect("a shell");
    let mut guard = Guard(child);
    let mut line = String::new();
    BufReader::new(guard.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim_end().strip_prefix("listening on ").unwrap_or_default().to_owned();
    (guard, address, log)
}

#[cfg(metrale_rdma_verbs)]
#[test]
fn a_connection_that_gets_no_memory_for_direct_reads_is_served_all_the_same() {
    // The target directory's file system usually has direct reads.
    let store = TestStore::new_in(Path::new(env!("CARGO_TARGET_TMPDIR")), 1, 4, &[300_000], 1);
    // Room for one connection's 2 MiB.
    let (_peer, address, log) = start_limited(&store.path(), 3 << 10);
    let log = || std::fs::read_to_string(&log).unwrap();
    if address.is_empty() && log().contains("direct read") {
        println!("not tried here: {}", log());
        return;
    }
    let (arena, key) = (small_arena(1), ExpertKey::new(0, 2));
    let tiers: Vec<_> = (0..3)
        .map(|_| {
            let options = TcpOptions { streams: 1, ..TcpOptions::new(&address) };
            let tier = TcpTier::connect(options).unwrap();
            for _ in 0..2 {
                let fetched = tier.fetch(key, arena.try_acquire(1).unwrap()).unwrap();
                assert!(fetched.residency.payload() == store.payload(key));
            }
            tier
        })
        .collect();
    let said = log().matches("no direct reads for a connection").count();
    assert_eq!((tiers.len(), said), (3, 1), "{}", log());
}

#[cfg(metrale_rdma_verbs)]
#[test]
fn direct_reads_that_are_not_to_be_had_are_an_error_at_the_start() {
    let store = TestStore::new_in(Path::new(env!("CARGO_TARGET_TMPDIR")), 1, 4, &[300_000], 1);
    let (mut peer, address, log) = start_limited(&store.path(), 1 << 10);
    // One that listens would not end by itself.
    assert!(address.is_empty(), "it listens");
    assert_eq!(peer.0.wait().unwrap().code(), Some(1));
    let log = std::fs::read_to_string(log).unwrap();
    assert!(log.contains("--spill-source direct: "), "{log}");
}

#[test]
fn it_says_what_is_wrong_under_its_own_name() {
    let store = TestStore::new(1, 1, &[100], 1);
    for (args, code, said) in [
        (vec![], 2, "--store"),
        (vec!["--store", "/nonexistent"], 1, "/nonexistent/manifest.json"),
        (vec!["--store", store.path().to_str().unwrap(), "--listen", "0.0.0.0:0"], 1, "--insecure"),
    ] {
        let output = expert_peer().args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        assert!(output.stdout.is_empty());
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.starts_with("expert-peer: ") && text.contains(said), "{text}");
    }
}
