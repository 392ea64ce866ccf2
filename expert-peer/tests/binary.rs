//! The `expert-peer` program does what `metrale peer run` does.

use std::io::{BufRead, BufReader};
use std::path::Path;
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
