//! What a peer has sent of a frame that is not whole yet.
//!
//! The thread that listens to the peers has rails to look after as well, so it takes what is there
//! and never waits for more: half a frame stays here until the rest has come, or its time is over.
//! One look takes at most about [`LOOK_BYTES`], so that a peer that never stops sending does not
//! keep the thread either.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::wire::frame::{FrameError, FrameHeader, HEADER_BYTES};
use crate::wire::io::IoError;

/// Most bytes that one look takes, but for the last step's.
const LOOK_BYTES: usize = 1 << 20;
/// Most bytes that the buffer grows by at a time: a length that is not followed by bytes costs no
/// more than that.
const STEP_BYTES: usize = 1 << 16;

/// A frame on its way.
#[derive(Default)]
pub(super) struct Inbox {
    header: Option<FrameHeader>,
    /// What has come of the header, and once that is known, of the body.
    bytes: Vec<u8>,
    /// When the first byte came.
    since: Option<Instant>,
}

impl Inbox {
    /// Takes what has come over `socket`, and the frame if that makes it whole.
    pub(super) fn take(
        &mut self,
        socket: &TcpStream,
        most_body_bytes: u64,
    ) -> Result<Option<(FrameHeader, Vec<u8>)>, IoError> {
        let mut looked = 0;
        while looked < LOOK_BYTES {
            let came = self.receive(socket)?;
            if came == 0 {
                break;
            }
            looked += came;
            if self.header.is_none() && self.missing() == 0 {
                self.header = Some(decode(&self.bytes, most_body_bytes)?);
                self.bytes.clear();
            }
            if self.missing() == 0
                && let Some(header) = self.header.take()
            {
                self.since = None;
                return Ok(Some((header, std::mem::take(&mut self.bytes))));
            }
        }
        Ok(None)
    }

    /// Whether a frame has been on its way for `bound`.
    pub(super) fn is_late(&self, bound: Duration) -> bool {
        self.since.is_some_and(|since| since.elapsed() >= bound)
    }

    /// Bytes that are still to come of the header, or of the body.
    fn missing(&self) -> usize {
        let body = |header: &FrameHeader| usize::try_from(header.body_bytes).unwrap_or(usize::MAX);
        self.header.as_ref().map_or(HEADER_BYTES, body).saturating_sub(self.bytes.len())
    }

    /// Takes some of them, and says how many; 0 where there are none at the moment.
    fn receive(&mut self, socket: &TcpStream) -> Result<usize, IoError> {
        let start = self.bytes.len();
        self.bytes.resize(start + self.missing().min(STEP_BYTES), 0);
        let came = recv(socket, &mut self.bytes[start..], RecvFlags::DONTWAIT);
        let count = came.as_ref().map_or(0, |(_, count)| *count);
        self.bytes.truncate(start + count);
        match came {
            Ok(_) if count == 0 => Err(IoError::Closed),
            Ok(_) => {
                self.since.get_or_insert_with(Instant::now);
                Ok(count)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(Errno::CONNRESET) => Err(IoError::Closed),
            Err(error) => Err(IoError::Socket(error.into())),
        }
    }
}

fn decode(bytes: &[u8], most: u64) -> Result<FrameHeader, IoError> {
    let header = FrameHeader::decode(bytes.first_chunk().ok_or(IoError::Closed)?)?;
    let (frame, found) = (header.frame, header.body_bytes);
    if found > most {
        return Err(FrameError::Length { frame, found, least: 0, most }.into());
    }
    Ok(header)
}

/// Sends a short answer without waiting. A peer that has taken so few of those before that there is
/// no room for it is as good as silent.
pub(super) fn answer(socket: &TcpStream, bytes: &[u8]) -> Result<(), String> {
    match send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
        Ok(sent) if sent == bytes.len() => Ok(()),
        Ok(_) | Err(Errno::AGAIN) => Err("the peer takes no answers".into()),
        Err(error) => Err(format!("the connection failed: {}", std::io::Error::from(error))),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;

    use super::*;
    use crate::wire::frame::{FrameType, Status};
    use crate::wire::handshake::encode_frame;

    /// The peer's end and ours; the peer's sends at once.
    fn ends() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        peer.set_nodelay(true).unwrap();
        (peer, listener.accept().unwrap().0)
    }

    /// What comes of looking until `found` says that it is enough.
    fn look(inbox: &mut Inbox, socket: &TcpStream) -> Result<(FrameHeader, Vec<u8>), IoError> {
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(10) {
            if let Some(frame) = inbox.take(socket, 1 << 20)? {
                return Ok(frame);
            }
            std::thread::yield_now();
        }
        panic!("nothing came")
    }

    #[test]
    fn half_a_frame_stays_until_the_rest_has_come_and_nobody_waits() {
        let (mut peer, ours) = ends();
        let mut inbox = Inbox::default();
        assert!(inbox.take(&ours, 1 << 20).unwrap().is_none() && !inbox.is_late(Duration::ZERO));
        let table = vec![7; 300_000];
        let frame = encode_frame(FrameType::RailsTable, Status::Ok, &table);
        for (from, to) in [(0, 1), (1, 23), (23, 24), (24, 25), (25, frame.len() - 1)] {
            peer.write_all(&frame[from..to]).unwrap();
            assert!(inbox.take(&ours, 1 << 20).unwrap().is_none());
        }
        peer.write_all(&frame[frame.len() - 1..]).unwrap();
        // Another right behind it stays in the socket.
        peer.write_all(&encode_frame(FrameType::Drain, Status::Ok, &[])).unwrap();
        let (header, body) = look(&mut inbox, &ours).unwrap();
        assert!(header.frame == FrameType::RailsTable && body == table);
        assert!(!inbox.is_late(Duration::ZERO), "nothing is on its way");
        assert_eq!(look(&mut inbox, &ours).unwrap().0.frame, FrameType::Drain);
    }

    #[test]
    fn a_frames_time_runs_from_its_first_byte() {
        let (mut peer, ours) = ends();
        let mut inbox = Inbox::default();
        let frame = encode_frame(FrameType::RailsTable, Status::Ok, &[7; 100]);
        peer.write_all(&frame[..1]).unwrap();
        while inbox.since.is_none() {
            assert!(inbox.take(&ours, 1 << 20).unwrap().is_none());
        }
        let since = inbox.since;
        peer.write_all(&frame[1..60]).unwrap();
        while inbox.bytes.len() < 36 {
            assert!(inbox.take(&ours, 1 << 20).unwrap().is_none());
        }
        assert_eq!(inbox.since, since, "more bytes buy no more time");
        assert!(inbox.is_late(Duration::ZERO) && !inbox.is_late(Duration::from_secs(3600)));
    }

    #[test]
    fn a_long_frame_is_refused_by_its_header_and_a_closed_connection_is_said_to_be() {
        let (mut peer, ours) = ends();
        let mut frame = encode_frame(FrameType::RailsTable, Status::Ok, &[7; 100]);
        frame[16..24].copy_from_slice(&(2_u64 << 20).to_le_bytes());
        peer.write_all(&frame).unwrap();
        let error = look(&mut Inbox::default(), &ours).unwrap_err();
        assert!(matches!(error, IoError::Frame(FrameError::Length { .. })), "{error}");
        let (peer, ours) = ends();
        drop(peer);
        let error = look(&mut Inbox::default(), &ours).unwrap_err();
        assert!(matches!(error, IoError::Closed), "{error}");
    }

    #[test]
    fn a_peer_that_takes_no_answers_is_left_at_once() {
        let (peer, ours) = ends();
        let bytes = [0; 4096];
        let sent = (0..1 << 20).take_while(|_| answer(&ours, &bytes).is_ok()).count();
        assert!(sent > 0 && sent < 1 << 20, "{sent} answers went into nothing");
        drop(peer);
    }
}
