//! Whole frames over a blocking socket, each within a deadline.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::wire::frame::{FrameError, FrameHeader, HEADER_BYTES};

/// Why a frame could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum IoError {
    /// The other end closed before, or in the middle of, a frame.
    #[error("the other end closed the connection")]
    Closed,
    /// The deadline passed.
    #[error("no answer within {} ms", waited.as_millis())]
    Deadline {
        /// How long was waited.
        waited: Duration,
    },
    /// The socket failed.
    #[error("the connection failed: {0}")]
    Socket(#[source] io::Error),
    /// Bytes that are no frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
}

/// Reads a frame whose body is at most `most_body_bytes`, all of it within `wait`.
///
/// # Errors
/// The connection ended or failed, the time is up, or the bytes are no frame allowed here.
pub fn read_frame(
    stream: &mut TcpStream,
    most_body_bytes: u64,
    wait: Duration,
) -> Result<(FrameHeader, Vec<u8>), IoError> {
    let clock = Clock { start: Instant::now(), wait };
    let mut bytes = [0; HEADER_BYTES];
    read_full(stream, &mut bytes, &clock)?;
    let header = FrameHeader::decode(&bytes)?;
    if header.body_bytes > most_body_bytes {
        let (frame, found, most) = (header.frame, header.body_bytes, most_body_bytes);
        return Err(FrameError::Length { frame, found, least: 0, most }.into());
    }
    // The body grows as its bytes come, so a length that is not followed by bytes costs nothing.
    let mut body = Vec::new();
    let mut left = usize::try_from(header.body_bytes).unwrap_or(usize::MAX);
    while left > 0 {
        let start = body.len();
        body.resize(start + left.min(1 << 16), 0);
        read_full(stream, &mut body[start..], &clock)?;
        left -= body.len() - start;
    }
    Ok((header, body))
}

/// Writes all of `bytes` within `wait`.
///
/// # Errors
/// The connection ended or failed, or the time is up.
pub fn write_all(stream: &mut TcpStream, bytes: &[u8], wait: Duration) -> Result<(), IoError> {
    let clock = Clock { start: Instant::now(), wait };
    let mut rest = bytes;
    while !rest.is_empty() {
        stream.set_write_timeout(Some(clock.left()?)).map_err(IoError::Socket)?;
        match stream.write(rest) {
            Ok(0) => return Err(IoError::Closed),
            Ok(count) => rest = &rest[count..],
            Err(error) => clock.judge(error)?,
        }
    }
    Ok(())
}

fn read_full(stream: &mut TcpStream, out: &mut [u8], clock: &Clock) -> Result<(), IoError> {
    let mut done = 0;
    while done < out.len() {
        stream.set_read_timeout(Some(clock.left()?)).map_err(IoError::Socket)?;
        match stream.read(&mut out[done..]) {
            Ok(0) => return Err(IoError::Closed),
            Ok(count) => done += count,
            Err(error) => clock.judge(error)?,
        }
    }
    Ok(())
}

struct Clock {
    start: Instant,
    wait: Duration,
}

impl Clock {
    /// Time left, never zero: a zero timeout means for ever to `setsockopt`.
    fn left(&self) -> Result<Duration, IoError> {
        let left = self.wait.saturating_sub(self.start.elapsed());
        if left.is_zero() { Err(IoError::Deadline { waited: self.wait }) } else { Ok(left) }
    }

    /// `Ok` where the call may be tried again.
    fn judge(&self, error: io::Error) -> Result<(), IoError> {
        match error.kind() {
            io::ErrorKind::Interrupted => Ok(()),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => self.left().map(drop),
            io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionAborted => Err(IoError::Closed),
            _ => Err(IoError::Socket(error)),
        }
    }
}
