//! Wakes a thread that waits in poll(2).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

/// An eventfd. Cheap to clone; all clones are one bell.
#[derive(Clone, Debug)]
pub(crate) struct Bell(Arc<OwnedFd>);

impl Bell {
    pub(crate) fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(fd)))
    }

    pub(crate) fn ring(&self) {
        #[expect(
            clippy::host_endian_bytes,
            reason = "eventfd(2) counts in the machine's own order"
        )]
        let once = 1_u64.to_ne_bytes();
        // A full counter has been rung enough; no other error can befall an eventfd of ours.
        let _rung = rustix::io::write(&*self.0, &once);
    }

    /// Takes the rings so far; says if there were any.
    pub(crate) fn hush(&self) -> bool {
        rustix::io::read(&*self.0, &mut [0; 8]).is_ok()
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
