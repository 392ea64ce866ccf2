//! Connecting to a peer: resolve, connect, handshake, each within one bound.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::Rng;

use crate::store::manifest::{self, Manifest};
use crate::wire::frame::{FrameType, MAX_STATUS_BYTES};
use crate::wire::handshake::{ClientHandshake, Goal, HandshakeError, Step, encode_frame};
use crate::wire::io::{IoError, read_frame, write_all};
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
    /// The peer's status is not what a status is.
    #[error("{peer}: the status it sent is not readable")]
    BadStatus {
        /// The address given.
        peer: String,
    },
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
}

impl Dialler {
    /// A dialler with a random client id.
    #[must_use]
    pub fn new(peer: String, secret: Option<Secret>, connect: Duration) -> Self {
        let mut client_id = [0; 16];
        rand::rng().fill_bytes(&mut client_id);
        Self { peer, secret, connect, client_id }
    }

    /// Connects and shakes hands.
    ///
    /// # Errors
    /// [`DialError`] says at which step it ended, and why.
    pub fn dial(&self, goal: Goal) -> Result<(TcpStream, Option<Arc<Manifest>>), DialError> {
        let start = Instant::now();
        let mut socket = self.connect()?;
        let left = || self.connect.saturating_sub(start.elapsed());
        let mut nonce = [0; 32];
        rand::rng().fill_bytes(&mut nonce);
        let (mut handshake, hello) =
            ClientHandshake::start(goal, self.secret.clone(), self.client_id, nonce);
        let io = |source| DialError::Io { peer: self.peer.clone(), source };
        write_all(&mut socket, &hello, left()).map_err(io)?;
        loop {
            let (header, body) =
                read_frame(&mut socket, manifest::MAX_BYTES, left()).map_err(io)?;
            let step = handshake
                .on_frame(&header, &body)
                .map_err(|source| DialError::Handshake { peer: self.peer.clone(), source })?;
            match step {
                Step::Send(bytes) => write_all(&mut socket, &bytes, left()).map_err(io)?,
                Step::Read => {}
                Step::Done => return Ok((socket, handshake.manifest().cloned())),
            }
        }
    }

    /// Asks the peer to describe itself; the answer is the JSON document it sent.
    ///
    /// # Errors
    /// The peer cannot be reached, or answers with something else.
    pub fn status(&self) -> Result<String, DialError> {
        let start = Instant::now();
        let (mut socket, _) = self.dial(Goal::Status)?;
        let left = || self.connect.saturating_sub(start.elapsed());
        let io = |source| DialError::Io { peer: self.peer.clone(), source };
        let request = encode_frame(FrameType::StatusRequest, Status::Ok, &[]);
        write_all(&mut socket, &request, left()).map_err(io)?;
        let bad = || DialError::BadStatus { peer: self.peer.clone() };
        loop {
            let (header, body) = read_frame(&mut socket, MAX_STATUS_BYTES, left()).map_err(io)?;
            match header.frame {
                FrameType::StatusReport => return String::from_utf8(body).map_err(|_| bad()),
                // A draining peer says so to every connection; it still answers.
                FrameType::Drain => {}
                _ => return Err(bad()),
            }
        }
    }

    /// Tries each of the host's addresses in turn; together they share the bound.
    fn connect(&self) -> Result<TcpStream, DialError> {
        let resolve = |source| DialError::Resolve { peer: self.peer.clone(), source };
        let addresses: Vec<SocketAddr> =
            self.peer.to_socket_addrs().map_err(resolve)?.take(8).collect();
        let share = self.connect / u32::try_from(addresses.len().max(1)).unwrap_or(1);
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
        for address in addresses {
            match TcpStream::connect_timeout(&address, share.max(Duration::from_millis(1))) {
                Ok(socket) => {
                    if let Err(error) = socket.set_nodelay(true) {
                        tracing::debug!(%error, "TCP_NODELAY was refused");
                    }
                    return Ok(socket);
                }
                Err(error) => last = error,
            }
        }
        Err(DialError::Connect { peer: self.peer.clone(), source: last })
    }
}
