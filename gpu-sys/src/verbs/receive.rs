//! The receives that a queue pair keeps posted.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::completion::WorkCompletion;
use super::error::{SettleError, VerbsError, check};
use super::ffi::{self, Zeroed};
use super::flight::Serial;
use super::memory::{Access, MemoryRegion, ProtectionDomain};
use super::settings::QueuePairOptions;
use crate::pinned::{HugePages, NumaPlacement, PinnedOptions, PinnedPages};

/// Longest message that can be received: these are for control, not for records.
const MAX_RECEIVE_BYTES: usize = 64 << 10;

/// What a receive brought.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Received<'a> {
    /// The message; empty for a WRITE with an immediate value, whose bytes went elsewhere.
    pub message: &'a [u8],
    /// The immediate value, if there was one.
    pub immediate: Option<u32>,
}

/// `count` buffers of `each` bytes in one registration, dropped before the pages they lie in, and
/// after the queue pair.
pub(super) struct Receives {
    region: Option<MemoryRegion>,
    pages: Option<Arc<PinnedPages>>,
    each: usize,
    count: u32,
}

impl Receives {
    pub(super) fn new(
        domain: &Arc<ProtectionDomain>,
        options: &QueuePairOptions,
    ) -> Result<Self, VerbsError> {
        let (each, count) = (options.recv_bytes, options.recv_wr);
        if each > MAX_RECEIVE_BYTES {
            return Err(VerbsError::Setting {
                what: "a receive length",
                value: each as u64,
                on: domain.context().name().to_owned(),
                allowed: format!("at most {MAX_RECEIVE_BYTES} bytes"),
            });
        }
        let bytes = each * count as usize;
        if bytes == 0 {
            return Ok(Self { region: None, pages: None, each: 0, count });
        }
        let (huge_pages, numa) = (HugePages::Off, NumaPlacement::Local);
        let pages = Arc::new(PinnedPages::new(&PinnedOptions { bytes, huge_pages, numa })?);
        let memory: Arc<PinnedPages> = Arc::clone(&pages);
        let region = MemoryRegion::register(domain, memory, 0..bytes, Access::LocalWrite)?;
        Ok(Self { region: Some(region), pages: Some(pages), each, count })
    }

    /// Posts all of them, on a queue that has none posted.
    pub(super) fn post_all(&self, qp: *mut ffi::ibv_qp, serial: Serial) -> Result<(), VerbsError> {
        (0..self.count).try_for_each(|index| self.post(qp, serial, index))
    }

    /// Whether there is a receive of that number.
    pub(super) fn has(&self, index: u32) -> bool {
        index < self.count
    }

    /// What a completion of receive `index`, which is one of these, brought.
    pub(super) fn received(
        &self,
        index: u32,
        completion: &WorkCompletion,
    ) -> Result<Received<'_>, SettleError> {
        let immediate = completion.immediate;
        if completion.written {
            return Ok(Received { message: &[], immediate });
        }
        let (bytes, room) = (completion.bytes as usize, self.each);
        if bytes > room {
            let queue_pair = completion.queue_pair;
            return Err(SettleError::TooLong { queue_pair, bytes: completion.bytes, room });
        }
        let Some(pages) = &self.pages else {
            return Ok(Received { message: &[], immediate });
        };
        let start = pages.address().as_ptr().wrapping_add(index as usize * self.each);
        // SAFETY: the buffer lies in the pages, which were zeroed when they were made; its receive
        // has completed and is not posted again while this borrow lives.
        let message = unsafe { std::slice::from_raw_parts(start, bytes) };
        Ok(Received { message, immediate })
    }

    /// Posts one that is not posted.
    pub(super) fn post(
        &self,
        qp: *mut ffi::ibv_qp,
        serial: Serial,
        index: u32,
    ) -> Result<(), VerbsError> {
        let mut request = ffi::ibv_recv_wr::zeroed();
        let mut piece = ffi::ibv_sge { addr: 0, length: 0, lkey: 0 };
        if let Some(region) = &self.region {
            piece.addr = region.address() + u64::from(index) * self.each as u64;
            piece.length = self.each as u32;
            piece.lkey = region.lkey();
        }
        request.wr_id = serial.receive(index);
        request.sg_list = &raw mut piece;
        request.num_sge = i32::from(piece.length > 0);
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair is live, the list is of one request, and its buffer is not posted
        // and stays registered until the queue pair is gone.
        let status = unsafe { ffi::ibv_post_recv(qp, &raw mut request, &raw mut bad) };
        check("ibv_post_recv", status, format_args!("receive {index} of {}", self.count))
    }

    /// Gives up the buffers without freeing them: the device may still write there.
    pub(super) fn leak(self) {
        let _kept = ManuallyDrop::new(self);
    }
}
