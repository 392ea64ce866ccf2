//! Sending to a client that may be slow, and may not be silent.
//!
//! The socket does not block, and the clock is this module's own: the socket's send timeout starts
//! anew with each buffer inside of one call. The clock of `--stall-ms` starts when the socket's buffer
//! has no room, and anew whenever the client's end has acknowledged bytes. poll(2) alone would not do:
//! it calls a socket writable only when a third of its buffer is free, which a slow client may take
//! longer for.

use std::io::{self, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use gpu_sys::sockets::unacknowledged_bytes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::End;

/// Longest time between two looks at what the client has acknowledged.
const LOOK: Duration = Duration::from_millis(20);

/// Sends all of `bytes`; the client may take nothing for `stall` at most.
pub(super) fn send_all(
    mut socket: &TcpStream,
    mut bytes: &[u8],
    stall: Duration,
) -> Result<(), End> {
    while !bytes.is_empty() {
        match socket.write(bytes) {
            Ok(0) => return Err(End::Closed),
            Ok(count) => bytes = &bytes[count..],
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted => {}
                io::ErrorKind::WouldBlock => wait_for_room(socket, stall)?,
                io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                    return Err(End::Closed);
                }
                _ => return Err(error.into()),
            },
        }
    }
    Ok(())
}

/// Waits until the socket has room for more. A socket that has failed has: the next call says why.
pub(super) fn wait_for_room(socket: &TcpStream, stall: Duration) -> Result<(), End> {
    let (mut unacknowledged, mut moved) = (unacknowledged_bytes(socket)?, Instant::now());
    loop {
        let left = stall.saturating_sub(moved.elapsed());
        if left.is_zero() {
            return Err(End::Stalled(stall.as_millis()));
        }
        if is_ready(socket, PollFlags::OUT, left.min(LOOK))? {
            return Ok(());
        }
        let now = unacknowledged_bytes(socket)?;
        if now < unacknowledged {
            (unacknowledged, moved) = (now, Instant::now());
        }
    }
}

/// Whether `socket` can do what `wanted` says, or has failed, within `wait`.
pub(super) fn is_ready(socket: &TcpStream, wanted: PollFlags, wait: Duration) -> io::Result<bool> {
    let wait = Timespec::try_from(wait).map_err(io::Error::other)?;
    match poll(&mut [PollFd::new(socket, wanted)], Some(&wait)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
