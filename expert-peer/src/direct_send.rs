//! Sending records over TCP past the page cache: what the next pieces need of the disk is read while
//! the piece before them is sent.
//!
//! The disk may give nothing for a deadline: nothing of the piece that is due, nor of what it got before,
//! for whichever connection ([`Disk`]). While it does, a piece that waits in its queue costs no record.
//!
//! For a peer that is told to (`--spill-source direct`): records of a store far larger than memory
//! would only push others out of the page cache. Otherwise sendfile, which needs no buffers, is faster.

use std::collections::VecDeque;
use std::io;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use expert_tier::direct::{NotDirect, SlotRead, SlotReadEnd, SlotReader, SlotReaderOptions};
use expert_tier::store::ExpertStore;
use gpu_sys::pinned::{HugePages, NumaPlacement, PinError, PinnedOptions};
use gpu_sys::slots::{PinnedSlot, pin_slots};
use metrics::{Counter, counter};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::disk::{Disk, ReadId};

/// Bytes of one read.
const PIECE_BYTES: usize = 256 << 10;
/// Pieces of a connection that are read or sent: with two, the disk waits for every send; with these it
/// has several reads at once, as disks want.
const PIECES: usize = 8;
/// Longest wait of a connection that ends for reads that the disk has; its slots are leaked then.
const DROP_WAIT: Duration = Duration::from_secs(5);
/// What direct reads are aligned to.
const ALIGN: u64 = 4096;
/// A read that is found to have ended counts as a sign of the disk if the last look was no longer ago than
/// this part of the deadline: it may have ended long before, while the client was being waited for.
const PROMPT_DIVISOR: u32 = 8;

/// Why records cannot be read past the page cache.
#[derive(Debug, thiserror::Error)]
pub enum NoReader {
    /// There is no memory for the pieces.
    #[error("the buffers for direct reads: {0}")]
    Pin(#[from] PinError),
    /// There are no direct reads.
    #[error(transparent)]
    Direct(#[from] NotDirect),
}

/// Finds out whether `store` can be sent so, by what a connection would need.
pub(crate) fn probe(store: &ExpertStore) -> Result<(), NoReader> {
    DirectSender::new(store, Disk::default()).map(drop)
}

/// What a peer knows of connections that got no direct reads although the store has them: locked
/// memory, or descriptors, were used up.
pub(crate) struct Shortages {
    said: AtomicBool,
    fallbacks: Counter,
}

impl Shortages {
    pub(crate) fn new() -> Self {
        let fallbacks = counter!("metrale_peer_fallbacks_total", "from" => "direct");
        Self { said: AtomicBool::new(false), fallbacks }
    }

    /// One more connection reads through the page cache; said once.
    pub(crate) fn one_more(&self, error: &NoReader) {
        self.fallbacks.increment(1);
        if !self.said.swap(true, Ordering::Relaxed) {
            tracing::warn!(%error, "no direct reads for a connection: it reads through the page cache");
        }
    }
}

/// Why a record was not sent whole.
#[derive(Debug)]
pub(crate) enum SendError<E> {
    /// The disk.
    Read(io::Error),
    /// Nothing came of the disk for the deadline.
    Stalled,
    /// Whatever took the bytes.
    Sink(E),
}

/// The reads of one connection.
pub(crate) struct DirectSender {
    reader: SlotReader<(usize, ReadId)>,
    free: Vec<PinnedSlot>,
    disk: Disk,
    /// What the disk has, the earliest first.
    reading: VecDeque<ReadId>,
    /// When the reads were last looked at, or waited for.
    looked: Instant,
}

/// Bytes of a layer's file that are to be sent.
#[derive(Clone, Copy)]
pub(crate) struct Stretch {
    /// The layer, by its position in the store.
    pub(crate) layer_at: usize,
    /// Where they start in its file.
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// A piece on its way: where its bytes lie in its slot, and the slot once it has been read.
struct Piece {
    skip: usize,
    bytes: usize,
    slot: Option<PinnedSlot>,
}

/// A connection may end with reads under way. They are not the disk's to be late with any more.
impl Drop for DirectSender {
    fn drop(&mut self) {
        let now = Instant::now();
        self.reading.drain(..).for_each(|read| self.disk.end(read, false, now));
    }
}

impl DirectSender {
    pub(crate) fn new(store: &ExpertStore, disk: Disk) -> Result<Self, NoReader> {
        let options =
            PinnedOptions { bytes: 0, huge_pages: HugePages::Off, numa: NumaPlacement::Local };
        let (memory, free) = pin_slots(PIECE_BYTES, PIECES, options)?;
        let depth = NonZeroU32::new(PIECES as u32).unwrap_or(NonZeroU32::MIN);
        let options = SlotReaderOptions { depth, piece_bytes: PIECE_BYTES, drop_wait: DROP_WAIT };
        let reader = SlotReader::open(store, &memory, options)?;
        let reading = VecDeque::with_capacity(PIECES);
        Ok(Self { reader, free, disk, reading, looked: Instant::now() })
    }

    /// Gives the bytes of `stretch` to `sink`, in order and as they come; nothing may come of the disk
    /// for `deadline` at most. What an earlier call left with the disk comes first.
    pub(crate) fn send<E>(
        &mut self,
        stretch: Stretch,
        deadline: Duration,
        mut sink: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), SendError<E>> {
        self.settle(deadline)?;
        self.send_some(stretch, deadline, &mut sink)
    }

    /// Waits for the reads that a call left under way as it failed, before their slots are used again.
    /// Whoever was to be told of that failure has been told by now.
    fn settle<E>(&mut self, deadline: Duration) -> Result<(), SendError<E>> {
        let started = Instant::now();
        loop {
            let mut left = Vec::new();
            self.turn(deadline, |end| left.push(end.slot)).map_err(SendError::Read)?;
            self.free.append(&mut left);
            // With none left nothing would end the wait but its bound.
            if self.reader.under_way() == 0 {
                return Ok(());
            }
            self.wait(deadline, started)?;
        }
    }

    /// Starts reads and hands out those that have ended.
    fn turn(
        &mut self,
        deadline: Duration,
        mut each: impl FnMut(SlotReadEnd<(usize, ReadId)>),
    ) -> io::Result<()> {
        let Self { reader, disk, reading, looked, .. } = self;
        let now = Instant::now();
        let prompt = now.saturating_duration_since(*looked) <= deadline / PROMPT_DIVISOR;
        *looked = now;
        reader.turn(|end| {
            let (_, read) = end.tag;
            disk.end(read, prompt && end.outcome.is_ok(), now);
            reading.retain(|other| *other != read);
            each(end);
        })
    }

    fn send_some<E>(
        &mut self,
        stretch: Stretch,
        deadline: Duration,
        sink: &mut impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), SendError<E>> {
        let mut pieces: VecDeque<Piece> = VecDeque::with_capacity(PIECES);
        let (mut first, mut asked) = (0, 0);
        let started = Instant::now();
        while asked < stretch.bytes || !pieces.is_empty() {
            while asked < stretch.bytes
                && let Some(slot) = self.free.pop()
            {
                let (piece, read) = next_piece(stretch, asked);
                asked += piece.bytes as u64;
                let id = self.disk.begin(Instant::now());
                self.reading.push_back(id);
                self.reader.submit(read, slot, (first + pieces.len(), id));
                pieces.push_back(piece);
            }
            let (mut failed, mut spare) = (None, Vec::new());
            let turned = self.turn(deadline, |end| match end.outcome {
                Ok(()) => {
                    if let Some(piece) = pieces.get_mut(end.tag.0 - first) {
                        piece.slot = Some(end.slot);
                    }
                }
                Err(error) => {
                    failed = Some(error);
                    spare.push(end.slot);
                }
            });
            self.free.append(&mut spare);
            if let Some(error) = turned.err().or(failed) {
                self.free.extend(pieces.into_iter().filter_map(|piece| piece.slot));
                return Err(SendError::Read(error));
            }
            let Some(slot) = pieces.front_mut().and_then(|piece| piece.slot.take()) else {
                if let Err(stalled) = self.wait(deadline, started) {
                    self.free.extend(pieces.into_iter().filter_map(|piece| piece.slot));
                    return Err(stalled);
                }
                continue;
            };
            if let Some(Piece { skip, bytes, .. }) = pieces.pop_front() {
                first += 1;
                let sent = sink(&slot.bytes()[skip..skip + bytes]);
                self.free.push(slot);
                if let Err(error) = sent {
                    self.free.extend(pieces.into_iter().filter_map(|piece| piece.slot));
                    return Err(SendError::Sink(error));
                }
            }
        }
        Ok(())
    }

    /// Waits for a read that ends, or until the earliest may be late.
    ///
    /// # Errors
    /// Since `started` and for `deadline` the disk has given neither the earliest read nor one that it
    /// got before.
    fn wait<E>(&mut self, deadline: Duration, started: Instant) -> Result<(), SendError<E>> {
        let since = self.reading.front().and_then(|first| self.disk.since(*first));
        let silence = since.map_or(started, |since| since.max(started)).elapsed();
        if silence >= deadline {
            return Err(SendError::Stalled);
        }
        let timeout = Timespec::try_from(deadline.saturating_sub(silence)).ok();
        let mut fds = [PollFd::new(&self.reader, PollFlags::IN)];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            // The next turn says what is wrong.
            Err(error) => tracing::debug!(%error, "cannot wait for the disk"),
        }
        self.looked = Instant::now();
        Ok(())
    }
}

/// The piece of `stretch` from byte `done` on, and the read that brings it: aligned at both ends.
fn next_piece(stretch: Stretch, done: u64) -> (Piece, SlotRead) {
    let at = stretch.offset + done;
    let offset = at / ALIGN * ALIGN;
    // Both below the bytes of a slot.
    let skip = (at - offset) as usize;
    let room = (PIECE_BYTES - skip) as u64;
    let bytes = room.min(stretch.bytes - done) as usize;
    let read_bytes = (skip + bytes).next_multiple_of(ALIGN as usize);
    let read = SlotRead { layer_at: stretch.layer_at, offset, bytes: read_bytes };
    (Piece { skip, bytes, slot: None }, read)
}

#[cfg(test)]
mod tests {
    use expert_tier::testing::TestStore;

    use super::*;

    const STALL: Duration = Duration::from_secs(20);

    /// On a file system with direct reads, which the target directory's usually is.
    fn sender(store: &TestStore) -> Option<DirectSender> {
        match DirectSender::new(&store.open(), Disk::default()) {
            Ok(sender) => Some(sender),
            Err(reason) => {
                println!("not tried here: {reason}");
                None
            }
        }
    }

    fn store() -> TestStore {
        TestStore::on_disk(2, 3, &[3_000_001, 5_000], 9)
    }

    fn stretch(store: &TestStore, expert: u64, from: u64) -> Stretch {
        let layout = store.open().manifest().layout().clone();
        let layer = &layout.layers()[0];
        let (offset, bytes) = (expert * layer.stride() + from, layer.record_bytes() - from);
        Stretch { layer_at: 0, offset, bytes }
    }

    #[test]
    fn records_come_whole_and_in_order_from_any_byte_on() {
        let store = store();
        let Some(mut sender) = sender(&store) else { return };
        for (expert, from) in [(0, 0), (1, 1), (2, 4097), (0, 262_144), (1, 3_000_000)] {
            let mut got = Vec::new();
            let sink = |bytes: &[u8]| -> Result<(), ()> {
                got.extend_from_slice(bytes);
                Ok(())
            };
            let stretch = stretch(&store, expert, from);
            assert!(sender.send(stretch, STALL, sink).is_ok());
            let mut expected = vec![0; stretch.bytes as usize];
            let key = expert_tier::key::ExpertKey::new(0, expert as u32);
            store.open().read_at(key, from, &mut expected).expect("a sound store");
            assert!(got == expected, "expert {expert} from {from}");
        }
    }

    #[test]
    fn after_a_sink_that_fails_and_a_file_that_is_short_records_come_again() {
        let store = store();
        let Some(mut sender) = sender(&store) else { return };
        let started = Instant::now();
        for _ in 0..3 {
            let failed = sender.send(stretch(&store, 0, 0), STALL, |_| Err("full"));
            assert!(matches!(failed, Err(SendError::Sink("full"))), "{failed:?}");
            let beyond = Stretch { offset: 1 << 40, ..stretch(&store, 0, 0) };
            let failed = sender.send(beyond, STALL, |_| Ok::<_, ()>(()));
            assert!(matches!(failed, Err(SendError::Read(_))), "{failed:?}");
            let mut bytes = 0;
            let whole = stretch(&store, 2, 0);
            let sent = sender.send(whole, STALL, |piece| {
                bytes += piece.len() as u64;
                Ok::<_, ()>(())
            });
            assert!(sent.is_ok() && bytes == whole.bytes, "{bytes}");
        }
        assert!(sender.settle::<()>(STALL).is_ok());
        assert_eq!(sender.free.len(), PIECES, "every slot is back");
        assert!(started.elapsed() < STALL, "nobody waits for reads that have ended");
    }

    #[test]
    fn a_connection_that_ends_with_reads_under_way_leaves_none_of_them_to_the_disk() {
        let store = store();
        let disk = Disk::default();
        let Ok(mut sender) = DirectSender::new(&store.open(), disk.clone()) else { return };
        let failed = sender.send(stretch(&store, 0, 0), STALL, |_| Err("full"));
        assert!(matches!(failed, Err(SendError::Sink("full"))), "{failed:?}");
        assert!(!sender.reading.is_empty(), "reads behind the first one are under way");
        drop(sender);
        assert!(format!("{disk:?}").contains("under_way: []"), "{disk:?}");
    }
}
