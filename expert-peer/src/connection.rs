//! One client's connection: handshake, then requests answered in order.

#[cfg(metrale_rdma_verbs)]
mod direct;
mod fetch;
#[cfg(metrale_rdma_verbs)]
mod rails;
mod send;

use std::io::{self, Read};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use expert_tier::fingerprint::Fingerprint;
use expert_tier::store::StoreError;
use expert_tier::wire::frame::{
    FrameError, FrameHeader, FrameType, HEADER_BYTES, MAX_TEXT_BYTES, Status,
};
use expert_tier::wire::handshake::{HandshakeError, ServerHandshake, refusal};
use expert_tier::wire::io::{Clock, IoError, read_frame, write_all};
use expert_tier::wire::message::Welcome;
use metrics::{Counter, Histogram, counter, histogram};
use rand::Rng;
use rustix::event::PollFlags;
use socket2::{SockRef, TcpKeepalive};

#[cfg(metrale_rdma_verbs)]
use crate::rails::{ClientEnd, RailClient};
use crate::registry::Place;
use crate::server::Shared;
#[cfg(metrale_rdma_verbs)]
use direct::Direct;
use send::{is_ready, send_all};

/// Records up to this size pass through the connection's buffer: one read and one send cost less
/// than a header of its own and a `sendfile`.
const BUFFER_BYTES: usize = 256 * 1024;
/// How long a connection that the peer ends is kept for the client to read its last answers.
const LINGER: Duration = Duration::from_secs(1);
/// How often an idle connection looks whether the peer is shutting down, and whether records have
/// moved: well within what `--move-ack-ms` is by default.
const TICK: Duration = Duration::from_millis(200);

/// The flags that errors name.
const HANDSHAKE_MS: &str = "--handshake-ms";
const STALL_MS: &str = "--stall-ms";

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
enum End {
    #[error("the client closed")]
    Closed,
    #[error("{0}")]
    Handshake(#[from] HandshakeError),
    #[error("{0}")]
    Frame(#[from] FrameError),
    #[error("{0}")]
    Full(#[from] crate::registry::Full),
    #[error("{0}")]
    Io(#[from] IoError),
    #[error("the connection failed: {0}")]
    Socket(#[from] io::Error),
    #[error("the client asked for nothing within {0} ms; {HANDSHAKE_MS} bounds this")]
    Idle(u128),
    #[error("the client took no bytes for {0} ms; {STALL_MS} bounds this")]
    Stalled(u128),
    #[error("{0}")]
    Store(#[from] StoreError),
    #[cfg(metrale_rdma_verbs)]
    #[error("within a record: {0}")]
    Disk(String),
    #[cfg(metrale_rdma_verbs)]
    #[error("this peer publishes no rails: records come over TCP alone")]
    NoRails,
    #[cfg(metrale_rdma_verbs)]
    #[error(
        "this peer can serve no rail at the moment: none of its RDMA ports is up with an address \
         that clients can reach; `metrale doctor` at the peer says which and why"
    )]
    NoRailNow,
    #[cfg(metrale_rdma_verbs)]
    #[error("{0}")]
    Rails(#[from] ClientEnd),
    #[error("the client wants store {wanted}, this peer publishes {published}")]
    OtherStore { wanted: Fingerprint, published: Fingerprint },
}

/// A connection and the thread that serves it.
pub(crate) struct Connection {
    shared: Arc<Shared>,
    place: Place,
    socket: TcpStream,
    client: SocketAddr,
    client_id: [u8; 16],
    attached: bool,
    welcomed: Instant,
    told_to_drain: bool,
    /// The one buffer of the connection: a frame header and a piece of a record.
    buffer: Vec<u8>,
    counters: Counters,
    #[cfg(metrale_rdma_verbs)]
    rail_client: Option<RailClient>,
    /// What reads past the page cache, once something has.
    #[cfg(metrale_rdma_verbs)]
    direct: Direct,
}

struct Counters {
    served: Counter,
    bytes: Counter,
    seconds: Histogram,
}

impl Connection {
    pub(crate) fn new(
        shared: Arc<Shared>,
        place: Place,
        socket: TcpStream,
        client: SocketAddr,
    ) -> Self {
        let counters = Counters {
            served: counter!("metrale_peer_requests_total", "status" => Status::Ok.name()),
            bytes: counter!("metrale_peer_bytes_total"),
            seconds: histogram!("metrale_peer_request_seconds"),
        };
        Self {
            shared,
            place,
            socket,
            client,
            client_id: [0; 16],
            attached: false,
            welcomed: Instant::now(),
            told_to_drain: false,
            buffer: Vec::new(),
            counters,
            #[cfg(metrale_rdma_verbs)]
            rail_client: None,
            #[cfg(metrale_rdma_verbs)]
            direct: Direct::Untried,
        }
    }

    /// Serves until the connection ends.
    pub(crate) fn run(mut self) {
        let client = self.client;
        let end = self.greet().and_then(|()| self.serve());
        #[cfg(metrale_rdma_verbs)]
        self.end_rails();
        let Err(end) = end else { return };
        // What is said now has bounds of its own, by the socket's timeouts.
        if let Err(error) = self.socket.set_nonblocking(false) {
            tracing::debug!(%client, %error, "a socket stays as it is");
            return;
        }
        match &end {
            End::Closed => tracing::debug!(%client, "a connection ended"),
            End::Handshake(error) => {
                let (status, text) = refusal(error);
                self.shared.refuse(&self.socket, client, status, &text);
            }
            End::Frame(error) => {
                self.shared.refuse(&self.socket, client, Status::Protocol, &error.to_string());
            }
            End::Full(full) => {
                self.shared.refuse(&self.socket, client, Status::Busy, &full.to_string());
            }
            #[cfg(metrale_rdma_verbs)]
            End::NoRails | End::NoRailNow => {
                self.shared.refuse(&self.socket, client, Status::NoRails, &end.to_string());
            }
            #[cfg(metrale_rdma_verbs)]
            End::Rails(ClientEnd::Agree(error)) => {
                self.shared.refuse(&self.socket, client, Status::Protocol, &error.to_string());
            }
            #[cfg(metrale_rdma_verbs)]
            End::Rails(error) => {
                tracing::error!(%client, %error, "no rails for a client");
                self.shared.refuse(&self.socket, client, Status::NoRails, &error.to_string());
            }
            End::OtherStore { .. } => {
                self.shared.refuse(&self.socket, client, Status::OtherStore, &end.to_string());
            }
            End::Io(IoError::Closed) => tracing::debug!(%client, "closed before the handshake"),
            End::Store(error) => {
                self.count_error(Status::Unreadable);
                tracing::error!(%client, %error, "dropped a connection within a record");
            }
            #[cfg(metrale_rdma_verbs)]
            End::Disk(_) => {
                self.count_error(Status::Unreadable);
                tracing::error!(%client, reason = %end, "dropped a connection");
            }
            End::Idle(_) => tracing::debug!(%client, reason = %end, "dropped a connection"),
            End::Io(_) | End::Socket(_) | End::Stalled(_) => {
                tracing::warn!(%client, reason = %end, "dropped a connection");
            }
        }
        if !matches!(end, End::Closed | End::Io(IoError::Closed) | End::Stalled(_)) {
            self.linger();
        }
    }

    /// Lets the client read what has been sent. Closing a socket with bytes unread makes the
    /// kernel reset the connection, and the client lose answers that were on their way.
    fn linger(&mut self) {
        let until = Instant::now() + LINGER;
        let mut rest = [0; 4096];
        if self.socket.shutdown(Shutdown::Write).is_err() {
            return;
        }
        loop {
            let left = until.saturating_duration_since(Instant::now());
            // No timeout of zero: that means none at all.
            if left.is_zero() || self.socket.set_read_timeout(Some(left)).is_err() {
                return;
            }
            match self.socket.read(&mut rest) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
    }

    /// The handshake up to `Welcome`, all of it within one bound.
    fn greet(&mut self) -> Result<(), End> {
        self.prepare();
        let manifest = self.shared.store.manifest();
        let welcome = Welcome {
            fingerprint: manifest.fingerprint(),
            manifest_bytes: manifest.as_bytes().len() as u64,
        };
        let mut nonce = [0; 32];
        rand::rng().fill_bytes(&mut nonce);
        let secret = self.shared.options.secret.clone();
        let mut handshake = ServerHandshake::new(secret, nonce, welcome);
        let clock = Clock::start(self.shared.options.handshake, HANDSHAKE_MS);
        loop {
            let (header, body) = match read_frame(&mut self.socket, MAX_TEXT_BYTES, &clock) {
                Err(IoError::Frame(error)) => return Err(error.into()),
                other => other?,
            };
            let step = handshake.on_frame(&header, &body)?;
            write_all(&mut self.socket, &step.send, &clock)?;
            self.client_id = step.client_id.unwrap_or(self.client_id);
            if step.done {
                self.place.welcomed();
                return Ok(());
            }
        }
    }

    /// Options that make a vanished client noticed and a small answer leave at once.
    fn prepare(&self) {
        let alive = TcpKeepalive::new()
            .with_time(Duration::from_secs(20))
            .with_interval(Duration::from_secs(5))
            .with_retries(4);
        let set = self
            .socket
            .set_nodelay(true)
            .and_then(|()| SockRef::from(&self.socket).set_tcp_keepalive(&alive));
        if let Err(error) = set {
            tracing::debug!(client = %self.client, %error, "a socket option was refused");
        }
    }

    fn serve(&mut self) -> Result<(), End> {
        // Waiting is done in poll(2), by clocks of our own.
        self.socket.set_nonblocking(true)?;
        self.welcomed = Instant::now();
        loop {
            let mut bytes = [0; HEADER_BYTES];
            self.read(&mut bytes)?;
            let header = FrameHeader::decode(&bytes)?;
            match header.frame {
                FrameType::Fetch if self.attached => self.fetch(&header)?,
                FrameType::Attach => self.attach()?,
                FrameType::ManifestRequest => {
                    let manifest = Arc::clone(self.shared.store.manifest());
                    self.send_control(FrameType::Manifest, manifest.as_bytes())?;
                }
                FrameType::StatusRequest => {
                    let report = self.shared.status();
                    let json = serde_json::to_vec(&report).map_err(io::Error::other)?;
                    self.send_control(FrameType::StatusReport, &json)?;
                }
                #[cfg(metrale_rdma_verbs)]
                frame if self.attached && frame.rails_kind().is_some() => self.rails(&header)?,
                found => {
                    let expected =
                        "Attach, ManifestRequest, StatusRequest or, once attached, Fetch";
                    return Err(FrameError::Unexpected { found, expected }.into());
                }
            }
        }
    }

    fn attach(&mut self) -> Result<(), End> {
        let mut body = [0; 32];
        self.read_rest(&mut body)?;
        let (wanted, published) = (Fingerprint(body), self.shared.store.manifest().fingerprint());
        if wanted != published {
            return Err(End::OtherStore { wanted, published });
        }
        self.place.attach(self.client_id)?;
        if !self.attached {
            self.attached = true;
            self.buffer = vec![0; HEADER_BYTES + BUFFER_BYTES];
            let id = u32::from_le_bytes([
                self.client_id[0],
                self.client_id[1],
                self.client_id[2],
                self.client_id[3],
            ]);
            tracing::info!(client = %self.client, id = format!("{id:08x}"), "attached");
        }
        self.send_control(FrameType::Attached, &[])
    }

    /// Sends a frame without copying its body, which may be a manifest of many megabytes.
    fn send_control(&self, frame: FrameType, body: &[u8]) -> Result<(), End> {
        let header = FrameHeader::control(frame, body.len() as u64).encode();
        send_all(&self.socket, &header, self.shared.options.stall)?;
        send_all(&self.socket, body, self.shared.options.stall)
    }

    /// Sends the first `bytes` of the buffer.
    fn send(&self, bytes: usize) -> Result<(), End> {
        send_all(&self.socket, &self.buffer[..bytes], self.shared.options.stall)
    }

    /// Fills `out`. A client that has attached may be idle before it asks for as long as it likes;
    /// one that has not must attach or leave within the handshake's bound after the welcome; and
    /// a request that has begun must come whole within that bound. Tells the client when the peer
    /// drains.
    fn read(&mut self, out: &mut [u8]) -> Result<(), End> {
        self.read_since(out, None)
    }

    /// Fills `out` with what belongs to a header that has arrived.
    fn read_rest(&mut self, out: &mut [u8]) -> Result<(), End> {
        self.read_since(out, Some(Instant::now()))
    }

    fn read_since(&mut self, out: &mut [u8], mut begun: Option<Instant>) -> Result<(), End> {
        let mut done = 0;
        while done < out.len() {
            if self.shared.shutdown.begun() && !self.told_to_drain {
                self.told_to_drain = true;
                self.send_control(FrameType::Drain, &[])?;
            }
            // What waits for data here wakes often enough for a client to follow in time.
            #[cfg(metrale_rdma_verbs)]
            self.follow_table()?;
            match self.socket.read(&mut out[done..]) {
                Ok(0) => return Err(End::Closed),
                Ok(count) => done += count,
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock => {
                        let _readable = is_ready(&self.socket, PollFlags::IN, TICK)?;
                    }
                    io::ErrorKind::ConnectionReset => return Err(End::Closed),
                    _ => return Err(error.into()),
                },
            }
            let limit = self.shared.options.handshake;
            if !self.attached && self.welcomed.elapsed() > limit {
                return Err(End::Idle(limit.as_millis()));
            }
            if done > 0 {
                begun.get_or_insert_with(Instant::now);
            }
            if done < out.len() && begun.is_some_and(|begun| begun.elapsed() > limit) {
                let (bound, setting) = (limit, HANDSHAKE_MS);
                return Err(End::Io(IoError::Deadline { bound, setting }));
            }
        }
        Ok(())
    }
}
