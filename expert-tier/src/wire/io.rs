//! Whole frames over a blocking socket, each within a bound.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::wire::frame::{FrameError, FrameHeader, HEADER_BYTES};

/// How often a wait that somebody may end looks whether they have.
pub(crate) const TICK: Duration = Duration::from_millis(50);

/// Why a frame could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum IoError {
    /// The other end closed before, or in the middle of, a frame.
    #[error("the other end closed the connection")]
    Closed,
    /// The bound passed.
    #[error("no answer within {} ms; {setting} bounds this", bound.as_millis())]
    Deadline {
        /// The whole bound, of which earlier frames may have used a part.
        bound: Duration,
        /// The setting that it comes from.
        setting: &'static str,
    },
    /// Whoever waits no longer wants to.
    #[error("stopped")]
    Stopped,
    /// The socket failed.
    #[error("the connection failed: {0}")]
    Socket(#[source] io::Error),
    /// Bytes that are no frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
}

/// Bounds a whole exchange, however many frames it has.
#[derive(Clone, Copy)]
pub struct Clock<'a> {
    start: Instant,
    bound: Duration,
    setting: &'static str,
    stopped: Option<&'a dyn Fn() -> bool>,
}

impl Clock<'static> {
    /// Starts a bound of `bound`; errors name `setting` as where it comes from.
    #[must_use]
    pub fn start(bound: Duration, setting: &'static str) -> Self {
        Self { start: Instant::now(), bound, setting, stopped: None }
    }
}

impl<'a> Clock<'a> {
    /// The same bound, which also ends soon after `stopped` says so.
    #[must_use]
    pub fn or_when(self, stopped: &'a dyn Fn() -> bool) -> Self {
        Self { stopped: Some(stopped), ..self }
    }

    /// Time left, never zero: a zero timeout means for ever to `setsockopt`.
    ///
    /// # Errors
    /// [`IoError::Deadline`] when there is none, [`IoError::Stopped`] when it was ended.
    pub fn left(&self) -> Result<Duration, IoError> {
        if self.stopped.is_some_and(|stopped| stopped()) {
            return Err(IoError::Stopped);
        }
        let left = self.bound.saturating_sub(self.start.elapsed());
        if left.is_zero() { Err(self.passed()) } else { Ok(left) }
    }

    /// How long one system call may wait: all that is left, or a tick where somebody may end it.
    pub(crate) fn slice(&self) -> Result<Duration, IoError> {
        let left = self.left()?;
        Ok(if self.stopped.is_some() { left.min(TICK) } else { left })
    }

    /// The error of a bound that has passed.
    pub(crate) fn passed(&self) -> IoError {
        IoError::Deadline { bound: self.bound, setting: self.setting }
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

/// Reads a frame whose body is at most `most_body_bytes`, all of it while `clock` has time left.
///
/// # Errors
/// The connection ended or failed, the time is up, or the bytes are no frame allowed here.
pub fn read_frame(
    stream: &mut TcpStream,
    most_body_bytes: u64,
    clock: &Clock<'_>,
) -> Result<(FrameHeader, Vec<u8>), IoError> {
    let mut bytes = [0; HEADER_BYTES];
    read_full(stream, &mut bytes, clock)?;
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
        read_full(stream, &mut body[start..], clock)?;
        left -= body.len() - start;
    }
    Ok((header, body))
}

/// Writes all of `bytes` while `clock` has time left.
///
/// # Errors
/// The connection ended or failed, or the time is up.
pub fn write_all(stream: &mut TcpStream, bytes: &[u8], clock: &Clock<'_>) -> Result<(), IoError> {
    let mut rest = bytes;
    while !rest.is_empty() {
        stream.set_write_timeout(Some(clock.slice()?)).map_err(IoError::Socket)?;
        match stream.write(rest) {
            Ok(0) => return Err(IoError::Closed),
            Ok(count) => rest = &rest[count..],
            Err(error) => clock.judge(error)?,
        }
    }
    Ok(())
}

fn read_full(stream: &mut TcpStream, out: &mut [u8], clock: &Clock<'_>) -> Result<(), IoError> {
    let mut done = 0;
    while done < out.len() {
        stream.set_read_timeout(Some(clock.slice()?)).map_err(IoError::Socket)?;
        match stream.read(&mut out[done..]) {
            Ok(0) => return Err(IoError::Closed),
            Ok(count) => done += count,
            Err(error) => clock.judge(error)?,
        }
    }
    Ok(())
}
