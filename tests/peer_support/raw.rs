//! A client that speaks the protocol by hand, to say what [`TcpTier`] never would.
//!
//! [`TcpTier`]: expert_tier::tcp::TcpTier

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use expert_tier::key::ExpertKey;
use expert_tier::store::manifest::Manifest;
use expert_tier::wire::frame::{FrameHeader, FrameType, Status};
use expert_tier::wire::handshake::{ClientHandshake, Goal, Step, encode_frame};
use expert_tier::wire::io::{Clock, IoError, read_frame, write_all};
use expert_tier::wire::message::encode_fetch;

use super::BOUND;

/// Room for any record of a test's store.
const MOST_BYTES: u64 = 4 << 20;

pub(crate) struct Raw(pub(crate) TcpStream);

impl Raw {
    /// Connects and says nothing.
    pub(crate) fn connect(peer: &str) -> Self {
        Self(TcpStream::connect(peer).expect("a peer that listens"))
    }

    /// Connects as `client` and shakes hands up to `Welcome`.
    pub(crate) fn welcomed(peer: &str, client: u8) -> Self {
        let mut raw = Self::connect(peer);
        let (mut handshake, hello) =
            ClientHandshake::start(Goal::Status, None, [client; 16], [1; 32]);
        raw.send(&hello);
        loop {
            let (header, body) = raw.read().expect("the peer's handshake");
            match handshake.on_frame(&header, &body).expect("a peer without a secret") {
                Step::Send(bytes) => raw.send(&bytes),
                Step::Read => {}
                Step::Done => return raw,
            }
        }
    }

    /// Connects as `client` and attaches to the store of `manifest`.
    pub(crate) fn attached(peer: &str, client: u8, manifest: &Manifest) -> Self {
        let mut raw = Self::welcomed(peer, client);
        raw.send_frame(FrameType::Attach, &manifest.fingerprint().0);
        let (header, _) = raw.read().expect("an answer to Attach");
        assert_eq!(header.frame, FrameType::Attached);
        raw
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        write_all(&mut self.0, bytes, &Clock::start(BOUND, "a test")).expect("a peer that reads");
    }

    /// Sends what the peer may no longer want to read.
    pub(crate) fn try_send(&mut self, bytes: &[u8]) -> bool {
        self.0.write_all(bytes).is_ok()
    }

    pub(crate) fn send_frame(&mut self, frame: FrameType, body: &[u8]) {
        self.send(&encode_frame(frame, Status::Ok, body));
    }

    pub(crate) fn request(&mut self, id: u64, key: ExpertKey) {
        self.send(&request(id, key));
    }

    /// Asks for the status; false when the peer has ended the connection.
    pub(crate) fn try_status(&mut self) -> bool {
        let asked = self.try_send(&encode_frame(FrameType::StatusRequest, Status::Ok, &[]));
        asked && self.read().is_ok()
    }

    pub(crate) fn read(&mut self) -> Result<(FrameHeader, Vec<u8>), IoError> {
        read_frame(&mut self.0, MOST_BYTES, &Clock::start(BOUND, "a test"))
    }

    /// The refusal that must come next, and then the end.
    pub(crate) fn refusal(&mut self) -> (Status, String) {
        let (header, body) = self.read().expect("a refusal");
        assert_eq!(header.frame, FrameType::Refusal);
        self.expect_end();
        (header.status, String::from_utf8(body).expect("a text"))
    }

    /// Fails unless the peer closes without another byte.
    pub(crate) fn expect_end(&mut self) {
        assert_eq!(self.rest(), 0, "bytes where the end was due");
    }

    /// Reads to the connection's end and says how many bytes came.
    pub(crate) fn rest(&mut self) -> usize {
        self.0.set_read_timeout(Some(BOUND)).expect("a socket takes a timeout");
        let mut bytes = vec![0; 1 << 16];
        let mut sum = 0;
        loop {
            match self.0.read(&mut bytes) {
                Ok(0) => return sum,
                Ok(count) => sum += count,
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return sum,
                Err(error) => panic!("the peer did not close: {error}"),
            }
        }
    }

    /// Says that nothing more will be sent.
    pub(crate) fn finish(&mut self) {
        self.0.shutdown(Shutdown::Write).expect("an open socket");
    }
}

/// The bytes of a request.
pub(crate) fn request(id: u64, key: ExpertKey) -> Vec<u8> {
    let body = encode_fetch(key);
    let header =
        FrameHeader { request_id: id, ..FrameHeader::control(FrameType::Fetch, body.len() as u64) };
    [&header.encode()[..], &body].concat()
}

/// A bound for things that a test waits for to be over by a setting of `ms`.
pub(crate) fn soon_after(ms: u64) -> Duration {
    Duration::from_millis(ms) + Duration::from_secs(3)
}
