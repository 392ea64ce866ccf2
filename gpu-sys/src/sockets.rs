//! What the kernel knows of a TCP connection and the standard library does not ask it.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Bytes that were given to a TCP socket and that the other end has not acknowledged: `SIOCOUTQ` of
/// tcp(7).
///
/// # Errors
/// The kernel refuses the request, as it does for descriptors that are neither sockets nor terminals.
/// What other descriptors than TCP sockets answer has another meaning.
pub fn unacknowledged_bytes(socket: impl AsFd) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open as long as `socket` is borrowed, and `bytes` is a live, writable
    // `int`, which is all that this request writes to.
    let failed = unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &raw mut bytes) };
    if failed != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(usize::try_from(bytes).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn bytes_count_until_the_other_end_takes_them() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut receiver = listener.accept().unwrap().0;
        assert_eq!(unacknowledged_bytes(&sender).unwrap(), 0);
        sender.set_nonblocking(true).unwrap();
        let chunk = vec![0; 1 << 20];
        while sender.write(&chunk).is_ok() {}
        let full = unacknowledged_bytes(&sender).unwrap();
        assert!(full > 0);
        let (mut rest, started) = (vec![0; 1 << 20], Instant::now());
        while unacknowledged_bytes(&sender).unwrap() == full {
            assert!(started.elapsed() < Duration::from_secs(20), "nothing is acknowledged");
            assert!(receiver.read(&mut rest).unwrap() > 0);
        }
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(unacknowledged_bytes(null).is_err(), "no socket");
    }
}
