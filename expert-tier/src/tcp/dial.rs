//! Connecting to a peer: resolve, connect, handshake, each within one bound.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_sys::env;
use rand::Rng;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use socket2::{Domain, Protocol, Socket, Type};

use super::addresses::Addresses;
use crate::store::manifest::{self, Manifest};
use crate::wire::frame::{FrameType, MAX_STATUS_BYTES};
use crate::wire::handshake::{ClientHandshake, Goal, HandshakeError, Step, encode_frame};
use crate::wire::io::{Clock, IoError, TICK, read_frame, write_all};
use crate::wire::{Secret, Status};

/// Why a peer could not be reached.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// The address is not `HOST:PORT`, or the host has no address.
    #[error("cannot resolve {peer:?}: {source}; a peer is HOST:PORT, 127.0.0.1:9909 say")]
    Resolve {
        /// The address given.
        peer: String,
        /// The resolver's answer.
        source: io::Error,
    },
    /// Nobody accepted the connection.
    #[error("cannot connect to {peer}: {source}; is expert-peer running there?")]
    Connect {
        /// The address given.
        peer: String,
        /// The system's answer.
        source: io::Error,
    },
    /// The connection failed during the handshake.
    #[error("{peer}: {source}")]
    Io {
        /// The address given.
        peer: String,
        /// What happened.
        source: IoError,
    },
    /// The handshake failed.
    #[error("{peer}: {source}")]
    Handshake {
        /// The address given.
        peer: String,
        /// What happened.
        source: HandshakeError,
    },
    /// The handshake ended without what it was made for.
    #[error("{peer}: the handshake brought no manifest")]
    NoManifest {
        /// The address given.
        peer: String,
    },
    /// The system gave no thread.
    #[error("cannot start a thread to {what}: {source}; the limit is `ulimit -u` or a cgroup's")]
    Thread {
        /// What it was for.
        what: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// The peer's status is not what a status is.
    #[error("{peer}: the status it sent is not readable")]
    BadStatus {
        /// The address given.
        peer: String,
    },
}

impl DialError {
    /// Whether the peer refused because it has as many clients or connections as it allows.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        let Self::Handshake { source, .. } = self else { return false };
        matches!(source, HandshakeError::Refused { status: Status::Busy, .. })
    }
}

/// Whom to dial, and as whom.
#[derive(Clone, Debug)]
pub struct Dialler {
    /// `HOST:PORT`.
    pub peer: String,
    /// The shared secret, if there is one.
    pub secret: Option<Secret>,
    /// Bound of the whole: connect, handshake and, where that is what is asked for, status.
    pub connect: Duration,
    /// Identifies this client on all its connections.
    pub client_id: [u8; 16],
    addresses: Addresses,
}

impl Dialler {
    /// A dialler with a random client id.
    #[must_use]
    pub fn new(peer: String, secret: Option<Secret>, connect: Duration) -> Self {
        let mut client_id = [0; 16];
        rand::rng().fill_bytes(&mut client_id);
        Self { peer, secret, connect, client_id, addresses: Addresses::of_the_system() }
    }

    /// Connects and shakes hands.
    ///
    /// # Errors
    /// [`DialError`] says at which step it ended, and why.
    pub fn dial(&self, goal: Goal) -> Result<(TcpStream, Option<Arc<Manifest>>), DialError> {
        self.dial_by(goal, &self.clock())
    }

    /// The same, given up soon after `stopped` says so.
    pub(crate) fn dial_unless(
        &self,
        stopped: &dyn Fn() -> bool,
        goal: Goal,
    ) -> Result<TcpStream, DialError> {
        self.dial_by(goal, &self.clock().or_when(stopped)).map(|(socket, _)| socket)
    }

    /// Asks the peer to describe itself; the answer is the JSON document it sent.
    ///
    /// # Errors
    /// The peer cannot be reached, or answers with something else.
    pub fn status(&self) -> Result<String, DialError> {
        let clock = self.clock();
        let (mut socket, _) = self.dial_by(Goal::Status, &clock)?;
        let io = |source| DialError::Io { peer: self.peer.clone(), source };
        let request = encode_frame(FrameType::StatusRequest, Status::Ok, &[]);
        write_all(&mut socket, &request, &clock).map_err(io)?;
        let bad = || DialError::BadStatus { peer: self.peer.clone() };
        loop {
            let (header, body) = read_frame(&mut socket, MAX_STATUS_BYTES, &clock).map_err(io)?;
            match header.frame {
                FrameType::StatusReport => return String::from_utf8(body).map_err(|_| bad()),
                // A draining peer says so to every connection; it still answers.
                FrameType::Drain => {}
                _ => return Err(bad()),
            }
        }
    }

    fn clock(&self) -> Clock<'static> {
        Clock::start(self.connect, env::EXPERT_CONNECT_MS.name)
    }

    fn dial_by(
        &self,
        goal: Goal,
        clock: &Clock<'_>,
    ) -> Result<(TcpStream, Option<Arc<Manifest>>), DialError> {
        let attached = self.attach(goal, clock);
        if attached.is_err() {
            // The host may have moved, and another may have its address.
            self.addresses.forget();
        }
        attached
    }

    fn attach(
        &self,
        goal: Goal,
        clock: &Clock<'_>,
    ) -> Result<(TcpStream, Option<Arc<Manifest>>), DialError> {
        let mut socket = self.connect(clock)?;
        let mut nonce = [0; 32];
        rand::rng().fill_bytes(&mut nonce);
        let (mut handshake, hello) =
            ClientHandshake::start(goal, self.secret.clone(), self.client_id, nonce);
        let io = |source| DialError::Io { peer: self.peer.clone(), source };
        write_all(&mut socket, &hello, clock).map_err(io)?;
        loop {
            let (header, body) = read_frame(&mut socket, manifest::MAX_BYTES, clock).map_err(io)?;
            let step = handshake
                .on_frame(&header, &body)
                .map_err(|source| DialError::Handshake { peer: self.peer.clone(), source })?;
            match step {
                Step::Send(bytes) => write_all(&mut socket, &bytes, clock).map_err(io)?,
                Step::Read => {}
                Step::Done => return Ok((socket, handshake.manifest().cloned())),
            }
        }
    }

    /// Tries each of the host's addresses in turn; each may take its share of what is left.
    fn connect(&self, clock: &Clock<'_>) -> Result<TcpStream, DialError> {
        let peer = &self.peer;
        let addresses = self.addresses.find(peer, clock)?;
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
        for (tried, &address) in addresses.iter().enumerate() {
            let untried = u32::try_from(addresses.len() - tried).unwrap_or(1);
            match clock.left().and_then(|left| connect_one(address, left / untried, clock)) {
                Ok(socket) => return Ok(socket),
                Err(source @ IoError::Stopped) => {
                    return Err(DialError::Io { peer: peer.clone(), source });
                }
                Err(IoError::Socket(error)) => last = error,
                Err(other) => last = io::Error::new(io::ErrorKind::TimedOut, other.to_string()),
            }
        }
        Err(DialError::Connect { peer: peer.clone(), source: last })
    }
}

/// Connects within `share` of what `clock` has left, looking each tick whether it was stopped.
fn connect_one(
    address: SocketAddr,
    share: Duration,
    clock: &Clock<'_>,
) -> Result<TcpStream, IoError> {
    let start = Instant::now();
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))
        .map_err(IoError::Socket)?;
    socket.set_nonblocking(true).map_err(IoError::Socket)?;
    match socket.connect(&address.into()) {
        Err(error) if error.raw_os_error() == Some(Errno::INPROGRESS.raw_os_error()) => {
            while !writable(&socket, clock.slice()?.min(TICK)).map_err(IoError::Socket)? {
                if start.elapsed() >= share {
                    return Err(clock.passed());
                }
            }
            if let Some(error) = socket.take_error().map_err(IoError::Socket)? {
                return Err(IoError::Socket(error));
            }
        }
        connected => connected.map_err(IoError::Socket)?,
    }
    if is_itself(&socket) {
        let itself = "the connection came back to itself: nothing listens on that port";
        return Err(IoError::Socket(io::Error::new(io::ErrorKind::ConnectionRefused, itself)));
    }
    socket.set_nonblocking(false).map_err(IoError::Socket)?;
    if let Err(error) = socket.set_tcp_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY was refused");
    }
    Ok(socket.into())
}

/// Whether both ends of a connection are this one socket. TCP allows that: a port that nothing listens
/// on may be the very one that the system gives to the connecting socket, and its two opening packets
/// then meet (RFC 9293, section 3.5, simultaneous open).
fn is_itself(socket: &Socket) -> bool {
    let ends = socket.local_addr().and_then(|local| Ok((local, socket.peer_addr()?)));
    ends.is_ok_and(|(local, peer)| local == peer)
}

/// Whether `socket` can be written to, or has failed, within `wait`.
fn writable(socket: &Socket, wait: Duration) -> io::Result<bool> {
    let wait = Timespec::try_from(wait).map_err(io::Error::other)?;
    match poll(&mut [PollFd::new(socket, PollFlags::OUT)], Some(&wait)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_connection_to_itself_is_told_from_one_to_somebody() {
        let any: SocketAddr = ([127, 0, 0, 1], 0).into();
        let alone = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).unwrap();
        alone.bind(&any.into()).unwrap();
        alone.connect(&alone.local_addr().unwrap()).unwrap();
        assert!(is_itself(&alone));

        let listener = TcpListener::bind(any).unwrap();
        let two = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(!is_itself(&two.into()));
    }
}
