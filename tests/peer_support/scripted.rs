//! A peer that the test plays: it speaks the real protocol, until the script says otherwise.

use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use anyhow::{Context, ensure};
use expert_tier::key::ExpertKey;
use expert_tier::store::manifest::Manifest;
use expert_tier::testing::TestStore;
use expert_tier::wire::frame::{FrameHeader, FrameType, Status};
use expert_tier::wire::handshake::{ServerHandshake, encode_frame};
use expert_tier::wire::io::{Clock, read_frame, write_all};
use expert_tier::wire::message::{Welcome, decode_fetch};

use super::BOUND;

/// What a scripted peer does with one connection. An error means that the client has left.
pub(crate) type Script = dyn Fn(&mut Conn) -> anyhow::Result<()> + Send + Sync;

/// A listener whose connections run a script, each on its own thread; ends with its guard.
pub(crate) struct Scripted {
    address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    stop: AtomicBool,
    accepted: AtomicUsize,
    sockets: Mutex<Vec<TcpStream>>,
}

/// One connection of a scripted peer.
pub(crate) struct Conn {
    pub(crate) socket: TcpStream,
    /// Connections before this one.
    pub(crate) nth: usize,
}

impl Scripted {
    pub(crate) fn start(
        script: impl Fn(&mut Conn) -> anyhow::Result<()> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("a bound socket");
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            accepted: AtomicUsize::new(0),
            sockets: Mutex::default(),
        });
        let (script, theirs): (Arc<Script>, _) = (Arc::new(script), Arc::clone(&shared));
        let acceptor = std::thread::spawn(move || accept(&listener, &script, &theirs));
        Self { address, shared, acceptor: Some(acceptor) }
    }

    /// A peer that attaches every client and then runs `script`.
    pub(crate) fn attached(
        store: &TestStore,
        script: impl Fn(&mut Conn) -> anyhow::Result<()> + Send + Sync + 'static,
    ) -> Self {
        let manifest = Arc::clone(store.open().manifest());
        Self::start(move |conn| {
            conn.attach(&manifest)?;
            script(conn)
        })
    }

    pub(crate) fn address(&self) -> String {
        self.address.to_string()
    }

    /// Connections accepted so far.
    pub(crate) fn accepted(&self) -> usize {
        self.shared.accepted.load(Ordering::Relaxed)
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        // Wakes the acceptor, which then ends every script by shutting its socket down.
        drop(TcpStream::connect(self.address));
        if let Some(acceptor) = self.acceptor.take()
            && acceptor.join().is_err()
            && !std::thread::panicking()
        {
            panic!("a script panicked");
        }
    }
}

fn accept(listener: &TcpListener, script: &Arc<Script>, shared: &Arc<Shared>) {
    let mut scripts = Vec::new();
    for socket in listener.incoming() {
        if shared.stop.load(Ordering::Relaxed) {
            break;
        }
        let Ok(socket) = socket else { continue };
        let nth = shared.accepted.fetch_add(1, Ordering::Relaxed);
        socket.set_read_timeout(Some(BOUND)).expect("a socket takes a timeout");
        socket.set_nodelay(true).expect("a TCP socket");
        let clone = socket.try_clone().expect("a descriptor");
        shared.sockets.lock().expect("no script panics with it").push(clone);
        let script = Arc::clone(script);
        scripts.push(std::thread::spawn(move || {
            let mut conn = Conn { socket, nth };
            // The client may leave at any time; what it was told is for the test to judge.
            let _ = script(&mut conn);
            let _ = conn.socket.shutdown(Shutdown::Both);
        }));
    }
    for socket in shared.sockets.lock().expect("no script panics with it").drain(..) {
        let _ = socket.shutdown(Shutdown::Both);
    }
    scripts.into_iter().for_each(|script| script.join().expect("a script that does not panic"));
}

impl Conn {
    /// The handshake of a peer of `manifest`, up to and including `Attached`.
    pub(crate) fn attach(&mut self, manifest: &Manifest) -> anyhow::Result<()> {
        self.welcome(Welcome {
            fingerprint: manifest.fingerprint(),
            manifest_bytes: manifest.as_bytes().len() as u64,
        })?;
        loop {
            let (header, body) = self.read()?;
            match header.frame {
                FrameType::ManifestRequest => {
                    self.send(&encode_frame(FrameType::Manifest, Status::Ok, manifest.as_bytes()))?;
                }
                FrameType::Attach => {
                    ensure!(body == manifest.fingerprint().0, "another store is wanted");
                    return self.send(&encode_frame(FrameType::Attached, Status::Ok, &[]));
                }
                other => anyhow::bail!("{other:?} in the handshake"),
            }
        }
    }

    /// The handshake up to and including `welcome`.
    pub(crate) fn welcome(&mut self, welcome: Welcome) -> anyhow::Result<()> {
        let mut handshake = ServerHandshake::new(None, [7; 32], welcome);
        let (header, body) = self.read()?;
        let step = handshake.on_frame(&header, &body)?;
        self.send(&step.send)
    }

    /// The next frame of the client.
    pub(crate) fn read(&mut self) -> anyhow::Result<(FrameHeader, Vec<u8>)> {
        Ok(read_frame(&mut self.socket, 1024, &Clock::start(BOUND, "a test"))?)
    }

    /// The next request: its id, and the record wanted.
    pub(crate) fn request(&mut self) -> anyhow::Result<(u64, ExpertKey)> {
        let (header, body) = self.read()?;
        ensure!(header.frame == FrameType::Fetch, "{:?} where a Fetch was due", header.frame);
        let body = body.first_chunk().context("decode checked the length")?;
        Ok((header.request_id, decode_fetch(body)))
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        Ok(write_all(&mut self.socket, bytes, &Clock::start(BOUND, "a test"))?)
    }

    /// Answers as an honest peer would, until the client leaves.
    pub(crate) fn serve(&mut self, store: &TestStore) -> anyhow::Result<()> {
        loop {
            let (id, key) = self.request()?;
            self.send(&answer(id, &record(store, key)))?;
        }
    }

    /// Reads and forgets until the client leaves.
    pub(crate) fn ignore(&mut self) -> anyhow::Result<()> {
        loop {
            self.read()?;
        }
    }
}

/// The answer to request `id`: `record` with its true length.
pub(crate) fn answer(id: u64, record: &[u8]) -> Vec<u8> {
    [&answer_header(id, record.len() as u64)[..], record].concat()
}

/// The header of an answer that announces `bytes`.
pub(crate) fn answer_header(id: u64, bytes: u64) -> [u8; 24] {
    status_header(id, Status::Ok, bytes)
}

/// The header of an answer with a status.
pub(crate) fn status_header(id: u64, status: Status, bytes: u64) -> [u8; 24] {
    let frame = FrameType::Record;
    FrameHeader { frame, status, request_id: id, body_bytes: bytes }.encode()
}

/// The bytes of a record as they lie in the store.
pub(crate) fn record(store: &TestStore, key: ExpertKey) -> Vec<u8> {
    let store = store.open();
    let layer = store.manifest().layout().locate(key).expect("a key of the store");
    let mut bytes = vec![0; usize::try_from(layer.record_bytes()).expect("a small record")];
    store.read_at(key, 0, &mut bytes).expect("a sound store");
    bytes
}
