//! Work requests: what is asked of the device, and the buffer that goes with it.

use std::fmt;
use std::ptr::NonNull;

use super::error::{PostRefused, VerbsError};
use super::ffi::{self, Zeroed, ibv_send_flags, ibv_wr_opcode};
use super::memory::MemoryRegion;

/// Longest message sent from within the request; every device that this is for takes as many.
pub const MAX_INLINE_BYTES: usize = 128;
/// Longest message that the specification knows.
const MAX_MESSAGE_BYTES: usize = 1 << 31;

/// Owns bytes that a READ may land in.
///
/// # Safety
/// `landing` returns the same bytes every time, however the value is moved. They stay mapped as long
/// as the value lives, and between the value's being put in a [`Post`] and its coming back nothing
/// but the device writes there and nothing reads there. A value that has no such bytes returns a
/// length of 0, and cannot be read into.
pub unsafe trait Landing {
    /// Where the bytes start, and how many there are.
    fn landing(&self) -> (NonNull<u8>, usize);
}

// SAFETY: the bytes of what is there, and none where nothing is.
unsafe impl<T: Landing> Landing for Option<T> {
    fn landing(&self) -> (NonNull<u8>, usize) {
        self.as_ref().map_or((NonNull::dangling(), 0), T::landing)
    }
}

/// Owns, or shares, bytes that a WRITE may come from.
///
/// # Safety
/// `source` returns the same bytes every time, however the value is moved. They stay mapped and
/// initialised as long as the value lives. If somebody writes there meanwhile, the peer may get any
/// mixture.
pub unsafe trait Source {
    /// Where the bytes start, and how many there are.
    fn source(&self) -> (NonNull<u8>, usize);
}

// SAFETY: the bytes of what is there, and none where nothing is.
unsafe impl<T: Source> Source for Option<T> {
    fn source(&self) -> (NonNull<u8>, usize) {
        self.as_ref().map_or((NonNull::dangling(), 0), T::source)
    }
}

// SAFETY: the bytes of the first, which lives as long; what comes with it is the caller's.
unsafe impl<T: Source, U> Source for (T, U) {
    fn source(&self) -> (NonNull<u8>, usize) {
        self.0.source()
    }
}

/// Bytes at a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Remote {
    /// Address of the first, as the peer's registration counts.
    pub address: u64,
    /// The registration's remote key.
    pub rkey: u32,
}

/// Whether a request reports its end by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signal {
    /// It does.
    Yes,
    /// Its end is known from a later one's. The queue pair signals nevertheless when it has posted
    /// half its depth without; what fails always reports.
    No,
}

/// A work request, with what is in flight as long as it is.
pub struct Post<T> {
    pub(super) work: Work,
    pub(super) signal: Signal,
    pub(super) carried: T,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    Read { local: Local, remote: Remote },
    Write { local: Local, remote: Remote, immediate: Option<u32> },
    Send { message: [u8; MAX_INLINE_BYTES], bytes: u32 },
}

/// Bytes here, inside a registration.
#[derive(Clone, Copy, Debug)]
pub(super) struct Local {
    address: u64,
    bytes: u32,
    lkey: u32,
}

impl<T> fmt::Debug for Post<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.work {
            Work::Read { local, remote } => write!(f, "Post(READ of {local:?} from {remote:x?})"),
            Work::Write { local, remote, immediate } => {
                write!(f, "Post(WRITE of {local:?} to {remote:x?}, immediate {immediate:x?})")
            }
            Work::Send { bytes, .. } => write!(f, "Post(SEND of {bytes} bytes)"),
        }
    }
}

impl<T: Landing> Post<T> {
    /// Reads as many bytes as `target` has from `remote` into it. `region` is a registration of this
    /// device that covers them, with local write access.
    ///
    /// # Errors
    /// The target has no bytes, or they are not in `region`: the target comes back.
    pub fn read(
        target: T,
        region: &MemoryRegion,
        remote: Remote,
        signal: Signal,
    ) -> Result<Self, PostRefused<T>> {
        let (start, bytes) = target.landing();
        match Local::inside(region, start, bytes) {
            Ok(local) => Ok(Self { work: Work::Read { local, remote }, signal, carried: target }),
            Err(reason) => Err(PostRefused { carried: target, reason }),
        }
    }
}

impl<T: Source> Post<T> {
    /// Writes the bytes of `source` to `remote`. `region` is a registration of this device that
    /// covers them.
    ///
    /// # Errors
    /// The source has no bytes, or they are not in `region`: the source comes back.
    pub fn write(
        source: T,
        region: &MemoryRegion,
        remote: Remote,
        signal: Signal,
    ) -> Result<Self, PostRefused<T>> {
        Self::write_bytes(source, region, remote, None, signal)
    }

    /// The same, and the peer gets a receive completion with `immediate` after the bytes are there.
    /// The source may have no bytes.
    ///
    /// # Errors
    /// As for [`Post::write`].
    pub fn write_with_immediate(
        source: T,
        region: &MemoryRegion,
        remote: Remote,
        immediate: u32,
        signal: Signal,
    ) -> Result<Self, PostRefused<T>> {
        Self::write_bytes(source, region, remote, Some(immediate), signal)
    }

    fn write_bytes(
        source: T,
        region: &MemoryRegion,
        remote: Remote,
        immediate: Option<u32>,
        signal: Signal,
    ) -> Result<Self, PostRefused<T>> {
        let (start, bytes) = source.source();
        let local = match (bytes, immediate) {
            (0, Some(_)) => Ok(Local { address: 0, bytes: 0, lkey: 0 }),
            _ => Local::inside(region, start, bytes),
        };
        match local {
            Ok(local) => {
                Ok(Self { work: Work::Write { local, remote, immediate }, signal, carried: source })
            }
            Err(reason) => Err(PostRefused { carried: source, reason }),
        }
    }
}

impl<T> Post<T> {
    /// Sends `message`, which is copied, into a receive of the peer; `carried` only comes back.
    ///
    /// # Errors
    /// The message is longer than [`MAX_INLINE_BYTES`]: `carried` comes back.
    pub fn send(carried: T, message: &[u8], signal: Signal) -> Result<Self, PostRefused<T>> {
        let mut copy = [0; MAX_INLINE_BYTES];
        let Some(place) = copy.get_mut(..message.len()) else {
            let reason = VerbsError::Setting {
                what: "a message length",
                value: message.len() as u64,
                on: "a request".into(),
                allowed: format!("at most {MAX_INLINE_BYTES} bytes"),
            };
            return Err(PostRefused { carried, reason });
        };
        place.copy_from_slice(message);
        let work = Work::Send { message: copy, bytes: message.len() as u32 };
        Ok(Self { work, signal, carried })
    }

    /// Length of the message of a SEND.
    pub(super) fn message_bytes(&self) -> u64 {
        match self.work {
            Work::Send { bytes, .. } => bytes.into(),
            Work::Read { .. } | Work::Write { .. } => 0,
        }
    }

    /// What goes with the request.
    pub fn into_carried(self) -> T {
        self.carried
    }
}

impl Local {
    fn inside(region: &MemoryRegion, start: NonNull<u8>, bytes: usize) -> Result<Self, VerbsError> {
        if !(1..=MAX_MESSAGE_BYTES).contains(&bytes) {
            return Err(VerbsError::Setting {
                what: "a message length",
                value: bytes as u64,
                on: region.device().to_owned(),
                allowed: format!("1 to {MAX_MESSAGE_BYTES} bytes"),
            });
        }
        if !region.covers(start, bytes) {
            let offset = start.as_ptr().addr().wrapping_sub(region.address() as usize);
            let end = offset.wrapping_add(bytes);
            return Err(VerbsError::Range { start: offset, end, bytes: region.len() });
        }
        let address = start.as_ptr().addr() as u64;
        Ok(Self { address, bytes: bytes as u32, lkey: region.lkey() })
    }
}

/// The lists that a batch is posted from, made once and filled anew each time.
pub(super) struct Lists {
    requests: Vec<ffi::ibv_send_wr>,
    pieces: Vec<ffi::ibv_sge>,
}

// SAFETY: the pointers in it are read by nobody but `ibv_post_send`, during the call for which
// `fill` has just set them.
unsafe impl Send for Lists {}

impl Lists {
    /// Lists of `depth` requests.
    pub(super) fn new(depth: usize) -> Self {
        let piece = ffi::ibv_sge { addr: 0, length: 0, lkey: 0 };
        let requests = std::iter::repeat_with(ffi::ibv_send_wr::zeroed).take(depth).collect();
        Self { requests, pieces: vec![piece; depth] }
    }

    /// Writes `posts` down as one linked list and returns its head; at least one, at most as many
    /// as the lists have room for. The list points into the lists and into `posts`.
    pub(super) fn fill<T>(
        &mut self,
        posts: &[Post<T>],
        number: impl Fn(usize) -> u64,
        mut signalled: impl FnMut(&Post<T>) -> bool,
    ) -> *mut ffi::ibv_send_wr {
        let head = self.requests.as_mut_ptr();
        let pieces = self.pieces.as_mut_ptr();
        for (index, (post, request)) in posts.iter().zip(&mut self.requests).enumerate() {
            let mut flags = if signalled(post) { ibv_send_flags::IBV_SEND_SIGNALED.0 } else { 0 };
            let piece = post.work.piece();
            if matches!(post.work, Work::Send { .. }) {
                flags |= ibv_send_flags::IBV_SEND_INLINE.0;
            }
            request.wr_id = number(index);
            // Both stay inside their vectors: `index + 1` is a place of them or the end.
            let last = index + 1 == posts.len();
            request.next = if last { std::ptr::null_mut() } else { head.wrapping_add(index + 1) };
            request.sg_list = pieces.wrapping_add(index);
            request.num_sge = i32::from(piece.length > 0);
            request.send_flags = flags;
            post.work.describe(request);
            self.pieces[index] = piece;
        }
        head
    }

    /// The place of a request in the list, if the pointer is to one of it.
    pub(super) fn place(&self, request: *const ffi::ibv_send_wr, count: usize) -> Option<usize> {
        let size = size_of::<ffi::ibv_send_wr>();
        let offset = request.addr().checked_sub(self.requests.as_ptr().addr())?;
        (offset.is_multiple_of(size) && offset / size < count).then_some(offset / size)
    }
}

impl Work {
    /// The bytes here that the request names.
    fn piece(&self) -> ffi::ibv_sge {
        match self {
            Self::Read { local, .. } | Self::Write { local, .. } => {
                ffi::ibv_sge { addr: local.address, length: local.bytes, lkey: local.lkey }
            }
            // Inline: read during the post, without a key.
            Self::Send { message, bytes } => {
                ffi::ibv_sge { addr: message.as_ptr().addr() as u64, length: *bytes, lkey: 0 }
            }
        }
    }

    /// Writes down what is asked for.
    fn describe(&self, request: &mut ffi::ibv_send_wr) {
        let (opcode, remote, immediate) = match self {
            Self::Read { remote, .. } => (ibv_wr_opcode::IBV_WR_RDMA_READ, Some(remote), 0),
            Self::Write { remote, immediate: None, .. } => {
                (ibv_wr_opcode::IBV_WR_RDMA_WRITE, Some(remote), 0)
            }
            Self::Write { remote, immediate: Some(value), .. } => {
                (ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM, Some(remote), *value)
            }
            Self::Send { .. } => (ibv_wr_opcode::IBV_WR_SEND, None, 0),
        };
        let (remote_addr, rkey) = remote.map_or((0, 0), |remote| (remote.address, remote.rkey));
        request.opcode = opcode;
        request.imm_data_invalidated_rkey_union.imm_data = immediate.to_be();
        request.wr.rdma = ffi::rdma_t { remote_addr, rkey };
    }
}
