//! A real peer process, which ends with its guard.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use expert_peer::StatusReport;
use expert_tier::tcp::Dialler;
use expert_tier::wire::Secret;
use rustix::process::{Pid, Signal, kill_process};

use super::{BOUND, wait_for, wait_until};

/// What a peer that spills is given unless a test says otherwise: the disk of a busy machine may keep a
/// record for longer than the default, which then is no fault.
const PUSH_DEADLINE: [&str; 2] = ["--push-deadline-ms", "15000"];

/// A running `metrale peer run`.
pub(crate) struct Peer {
    child: Child,
    address: String,
    secret: Option<Secret>,
    args: Vec<OsString>,
    log: Arc<Mutex<String>>,
    readers: Vec<JoinHandle<()>>,
}

/// `metrale` with an environment of the test's own.
pub(crate) fn metrale() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_metrale"));
    command.env_clear();
    command
}

/// Runs `metrale` to its end.
pub(crate) fn run(args: &[&str]) -> Output {
    metrale().args(args).output().expect("metrale starts")
}

impl Peer {
    /// Starts a peer for the store in `store` on a free port of 127.0.0.1; one that spills is patient with
    /// its disk.
    pub(crate) fn start(store: &Path, args: &[&str]) -> Self {
        Self::start_with(store, args, None)
    }

    /// Starts a peer that wants the secret in the file `secret`.
    pub(crate) fn start_with(store: &Path, args: &[&str], secret: Option<&Path>) -> Self {
        let mut all: Vec<OsString> = args.iter().map(OsString::from).collect();
        if args.contains(&"--dram-budget") && !args.contains(&PUSH_DEADLINE[0]) {
            all.extend(PUSH_DEADLINE.map(OsString::from));
        }
        if let Some(file) = secret {
            all.extend(["--secret-file".into(), file.into()]);
        }
        let secret = secret.map(|file| Secret::read(file).expect("a secret that the test wrote"));
        let log = Arc::default();
        let (child, address, readers) =
            spawn(store, "127.0.0.1:0", &all, &log).unwrap_or_else(|log| panic!("no peer: {log}"));
        Self { child, address, secret, args: all, log, readers }
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> String {
        self.address.clone()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Everything it has logged so far, by all its lives.
    pub(crate) fn log(&self) -> String {
        self.log.lock().expect("no reader panicked").clone()
    }

    /// Waits for a log line that has `text` in it.
    pub(crate) fn wait_log(&self, text: &str) {
        wait_until(&format!("a log line with {text:?}"), || self.log().contains(text));
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("the child has not been reaped");
    }

    /// Stops every thread of it, and waits until they have stopped.
    pub(crate) fn freeze(&self) {
        self.signal(Signal::STOP);
        let tasks = format!("/proc/{}/task", self.pid());
        wait_until("every thread to stop", || {
            let tasks = std::fs::read_dir(&tasks).expect("a process of ours");
            tasks.flatten().all(|task| {
                // A thread that has ended meanwhile has stopped, too.
                std::fs::read_to_string(task.path().join("stat"))
                    .map_or(true, |stat| stat.contains(") T "))
            })
        });
    }

    /// SIGKILL, and waits for the end.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("a child of ours");
        self.child.wait().expect("a child of ours");
        self.readers.drain(..).for_each(|reader| reader.join().expect("a reader that ends"));
    }

    /// Waits until it has ended by itself.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let status = wait_for("the peer's end", || self.child.try_wait().expect("a child"));
        self.readers.drain(..).for_each(|reader| reader.join().expect("a reader that ends"));
        status
    }

    /// Whether it still runs.
    pub(crate) fn runs(&mut self) -> bool {
        self.child.try_wait().expect("a child of ours").is_none()
    }

    /// Starts it again on the same port, with the store in `store`, once it has ended.
    pub(crate) fn restart(&mut self, store: &Path) {
        assert!(!self.runs(), "the peer must have ended");
        // The port was ours and is nobody's now; somebody's outgoing connection may have it for a
        // moment.
        (self.child, _, self.readers) = wait_for("the peer's restart on its port", || {
            spawn(store, &self.address, &self.args, &self.log).ok()
        });
    }

    /// What it says of itself.
    pub(crate) fn status(&self) -> StatusReport {
        let dialler = Dialler::new(self.address(), self.secret.clone(), BOUND);
        serde_json::from_str(&dialler.status().expect("a status"))
            .expect("a status of this version")
    }

    /// Threads and open descriptors of the process.
    pub(crate) fn resources(&self) -> (usize, usize) {
        let count = |what| {
            let entries = std::fs::read_dir(format!("/proc/{}/{what}", self.pid()));
            entries.expect("a process of ours").count()
        };
        (count("task"), count("fd"))
    }

    /// Threads and descriptors of a peer that serves nobody: the least of many looks, since its survey
    /// of the devices opens files for a moment, about once a second. A peer that has answered has
    /// started all of its threads.
    pub(crate) fn idle_resources(&self) -> (usize, usize) {
        let _answer = self.status();
        let looks = (0..100).map(|_| self.resources());
        looks.min().expect("there are looks")
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // An error means that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.readers.drain(..).for_each(|reader| drop(reader.join()));
        if std::thread::panicking() {
            println!(
                "the peer's log:\n{}",
                self.log.lock().map(|log| log.clone()).unwrap_or_default()
            );
        }
    }
}

/// Starts a peer and waits until it serves; `Err` has its log if it ended instead.
fn spawn(
    store: &Path,
    listen: &str,
    args: &[OsString],
    log: &Arc<Mutex<String>>,
) -> Result<(Child, String, Vec<JoinHandle<()>>), String> {
    let mut child = metrale()
        .args(["peer", "run", "--listen", listen, "--store"])
        .arg(store)
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("metrale starts");
    let stdout: Arc<Mutex<String>> = Arc::default();
    let readers = vec![
        collect(child.stdout.take().expect("a pipe"), Arc::clone(&stdout)),
        collect(child.stderr.take().expect("a pipe"), Arc::clone(log)),
    ];
    let line = wait_for("`listening on` or the peer's end", || {
        let ended = child.try_wait().expect("a child of ours").is_some();
        let stdout = stdout.lock().expect("no reader panicked");
        stdout.contains('\n').then(|| stdout.clone()).or_else(|| ended.then(String::new))
    });
    match line.trim_end().strip_prefix("listening on ") {
        Some(address) => Ok((child, address.to_owned(), readers)),
        None => {
            child.kill().and_then(|()| child.wait()).expect("a child of ours");
            readers.into_iter().for_each(|reader| reader.join().expect("a reader that ends"));
            Err(format!("{line}{}", log.lock().expect("no reader panicked")))
        }
    }
}

/// Reads lines into `into` until the pipe's end.
fn collect(pipe: impl Read + Send + 'static, into: Arc<Mutex<String>>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let mut pipe = BufReader::new(pipe);
        let mut line = String::new();
        while pipe.read_line(&mut line).is_ok_and(|count| count > 0) {
            into.lock().expect("nobody panics with the log").push_str(&line);
            line.clear();
        }
    })
}
