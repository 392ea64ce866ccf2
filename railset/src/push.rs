//! The messages for spilled experts; they travel on a queue pair of their own, each in one SEND.
//!
//! All numbers are little-endian.
//!
//! ```text
//! client to peer
//!   Fetch    1 u8, zero 3, layer u32, expert u32, bytes u32, id u64, offset u64,
//!            address u64, rkey u32, zero 4                                          48 bytes
//!   Release  2 u8, zero 7, id u64                                                   16 bytes
//! peer to client
//!   Receipt  3 u8, status u8, zero 2, bytes u32, id u64, address u64, rkey u32, zero 4
//!                                                                                   32 bytes
//! ```
//!
//! A `Fetch` asks for `bytes` bytes of a record, header included, from `offset` on. With
//! [`Transfer::Push`] its address and key are the client's, of memory where the peer may write just
//! these bytes and until the receipt; the peer WRITEs them there, and its receipt follows on the same
//! queue pair, so what it speaks of has been placed before. With [`Transfer::Stage`] they are zero;
//! the receipt has the address and the key where the client READs the bytes, and the client's
//! `Release` gives that place back. A receipt that is not [`PushStatus::Done`] has neither, and the
//! bytes may have been written in part.
//!
//! An id names a request from its `Fetch` to its receipt, or to its `Release` where there is one.
//! A client has at most as many under way as the offer has credits.
//!
//! [`Transfer::Push`]: crate::message::Transfer::Push
//! [`Transfer::Stage`]: crate::message::Transfer::Stage

use crate::wire::{DecodeError, Reader, within};

/// Bytes of the longest message to the peer.
pub const MAX_REQUEST_BYTES: usize = FETCH_BYTES;
/// Bytes of a receipt.
pub const RECEIPT_BYTES: usize = 32;

const FETCH_BYTES: usize = 48;
const RELEASE_BYTES: usize = 16;
const FETCH: u8 = 1;
const RELEASE: u8 = 2;
const RECEIPT: u8 = 3;

/// Bytes at either end, as the other end's device names them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Window {
    /// The first.
    pub address: u64,
    /// The key of the registration that they lie in.
    pub rkey: u32,
}

/// What a client says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PushRequest {
    /// It wants bytes of a record.
    Fetch(Fetch),
    /// It has READ what was staged for a request.
    Release {
        /// The request's id.
        id: u64,
    },
}

/// Which bytes a client wants, and where.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fetch {
    /// Names the request; no other that is under way on this queue pair has it.
    pub id: u64,
    /// The model's number of the layer.
    pub layer: u32,
    /// The expert.
    pub expert: u32,
    /// Where in the record the bytes start.
    pub offset: u64,
    /// How many, 1 or more.
    pub bytes: u32,
    /// Where they go.
    pub into: Window,
}

/// How a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum PushStatus {
    /// All bytes are where they were asked for, or staged.
    Done,
    /// The store has no such layer or expert.
    NoSuchKey,
    /// The record has no such bytes, or the request asks for more than one may.
    OutOfRange,
    /// The disk did not give the bytes.
    Unreadable,
    /// The peer's own copy is damaged, and withdrawn.
    Damaged,
    /// Another request with this id is under way.
    InUse,
    /// The peer had no room for it in time; later it may.
    Busy,
}

impl PushStatus {
    /// Every status, in the order of its numbers on the wire.
    pub const ALL: [Self; 7] = [
        Self::Done,
        Self::NoSuchKey,
        Self::OutOfRange,
        Self::Unreadable,
        Self::Damaged,
        Self::InUse,
        Self::Busy,
    ];

    /// The name for errors, logs and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::NoSuchKey => "no_such_key",
            Self::OutOfRange => "out_of_range",
            Self::Unreadable => "unreadable",
            Self::Damaged => "damaged",
            Self::InUse => "id_in_use",
            Self::Busy => "busy",
        }
    }

    fn wire(self) -> u8 {
        self as u8
    }
}

/// The end of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Receipt {
    /// The request's.
    pub id: u64,
    /// How it ended.
    pub status: PushStatus,
    /// Bytes written or staged: the request's, or 0.
    pub bytes: u32,
    /// Where they are staged; zeros where they were written.
    pub staged: Window,
}

impl PushRequest {
    /// The message, in the first bytes of the array; says how many.
    #[must_use]
    pub fn encode(&self) -> ([u8; MAX_REQUEST_BYTES], usize) {
        let mut out = [0; MAX_REQUEST_BYTES];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        match self {
            Self::Fetch(fetch) => {
                put(0, &[FETCH]);
                put(4, &fetch.layer.to_le_bytes());
                put(8, &fetch.expert.to_le_bytes());
                put(12, &fetch.bytes.to_le_bytes());
                put(16, &fetch.id.to_le_bytes());
                put(24, &fetch.offset.to_le_bytes());
                put(32, &fetch.into.address.to_le_bytes());
                put(40, &fetch.into.rkey.to_le_bytes());
                (out, FETCH_BYTES)
            }
            Self::Release { id } => {
                put(0, &[RELEASE]);
                put(8, &id.to_le_bytes());
                (out, RELEASE_BYTES)
            }
        }
    }

    /// # Errors
    /// [`DecodeError`] names the field that no message has.
    pub fn decode(message: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(message);
        match reader.u8("message")? {
            FETCH => {
                reader.reserved("fetch", 3)?;
                let (layer, expert) = (reader.u32("layer")?, reader.u32("expert")?);
                let bytes = reader.u32("bytes")?;
                let bytes = within("bytes", bytes, 1..=u64::from(u32::MAX))?;
                let (id, offset) = (reader.u64("id")?, reader.u64("offset")?);
                let into = window(&mut reader)?;
                reader.finish("fetch")?;
                Ok(Self::Fetch(Fetch { id, layer, expert, offset, bytes, into }))
            }
            RELEASE => {
                reader.reserved("release", 7)?;
                let id = reader.u64("id")?;
                reader.finish("release")?;
                Ok(Self::Release { id })
            }
            found => Err(DecodeError::Unknown { what: "message", found: u64::from(found) }),
        }
    }
}

impl Receipt {
    /// The message.
    #[must_use]
    pub fn encode(&self) -> [u8; RECEIPT_BYTES] {
        let mut out = [0; RECEIPT_BYTES];
        out[0] = RECEIPT;
        out[1] = self.status.wire();
        out[4..8].copy_from_slice(&self.bytes.to_le_bytes());
        out[8..16].copy_from_slice(&self.id.to_le_bytes());
        out[16..24].copy_from_slice(&self.staged.address.to_le_bytes());
        out[24..28].copy_from_slice(&self.staged.rkey.to_le_bytes());
        out
    }

    /// # Errors
    /// [`DecodeError`] names the field that no receipt has.
    pub fn decode(message: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(message);
        match reader.u8("message")? {
            RECEIPT => {}
            found => {
                return Err(DecodeError::Unknown { what: "message", found: u64::from(found) });
            }
        }
        let found = reader.u8("status")?;
        let status = PushStatus::ALL.get(usize::from(found)).copied();
        let what = "status";
        let status = status.ok_or(DecodeError::Unknown { what, found: u64::from(found) })?;
        reader.reserved("receipt", 2)?;
        let (bytes, id) = (reader.u32("bytes")?, reader.u64("id")?);
        let staged = window(&mut reader)?;
        reader.finish("receipt")?;
        Ok(Self { id, status, bytes, staged })
    }
}

fn window(reader: &mut Reader<'_>) -> Result<Window, DecodeError> {
    let (address, rkey) = (reader.u64("address")?, reader.u32("rkey")?);
    reader.reserved("window", 4)?;
    Ok(Window { address, rkey })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FETCHED: Fetch = Fetch {
        id: 0x0807_0605_0403_0201,
        layer: 3,
        expert: 258,
        offset: 0x1_0000_0000,
        bytes: 0x0004_0000,
        into: Window { address: 0x7f00_0000_1000, rkey: 0xdead_beef },
    };

    #[rustfmt::skip]
    const FETCH_MESSAGE: [u8; 48] = [
        1, 0, 0, 0,  3, 0, 0, 0,  2, 1, 0, 0,  0, 0, 4, 0,  1, 2, 3, 4, 5, 6, 7, 8,
        0, 0, 0, 0, 1, 0, 0, 0,  0, 0x10, 0, 0, 0, 0x7f, 0, 0,  0xef, 0xbe, 0xad, 0xde,  0, 0, 0, 0,
    ];

    #[rustfmt::skip]
    const RECEIPT_MESSAGE: [u8; 32] = [
        3, 6, 0, 0,  0, 1, 0, 0,  9, 0, 0, 0, 0, 0, 0, 0,  0, 0x20, 0, 0, 0, 0, 0, 0,  7, 0, 0, 0,
        0, 0, 0, 0,
    ];

    #[test]
    fn the_bytes_of_every_message_are_frozen() {
        let fetch = PushRequest::Fetch(FETCHED);
        assert_eq!(fetch.encode(), (FETCH_MESSAGE, 48));
        assert_eq!(PushRequest::decode(&FETCH_MESSAGE), Ok(fetch));
        let release = PushRequest::Release { id: 5 };
        let (bytes, length) = release.encode();
        assert_eq!(bytes[..length], [2, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(PushRequest::decode(&bytes[..length]), Ok(release));
        let staged = Window { address: 0x2000, rkey: 7 };
        let receipt = Receipt { id: 9, status: PushStatus::Busy, bytes: 256, staged };
        assert_eq!(receipt.encode(), RECEIPT_MESSAGE);
        assert_eq!(Receipt::decode(&RECEIPT_MESSAGE), Ok(receipt));
    }

    #[test]
    fn every_status_survives_the_wire() {
        for (number, status) in (0..).zip(PushStatus::ALL) {
            let receipt = Receipt { id: 1, status, bytes: 0, staged: Window::default() };
            let bytes = receipt.encode();
            assert_eq!((bytes[1], Receipt::decode(&bytes)), (number, Ok(receipt)));
        }
    }

    #[test]
    fn a_message_of_another_length_kind_or_with_filler_is_refused() {
        for length in 0..FETCH_MESSAGE.len() {
            PushRequest::decode(&FETCH_MESSAGE[..length]).unwrap_err();
        }
        for length in 0..RECEIPT_MESSAGE.len() {
            Receipt::decode(&RECEIPT_MESSAGE[..length]).unwrap_err();
        }
        PushRequest::decode(&[&FETCH_MESSAGE[..], &[0]].concat()).unwrap_err();
        Receipt::decode(&[&RECEIPT_MESSAGE[..], &[0]].concat()).unwrap_err();
        for (at, value) in [(0, 3), (0, 0), (1, 1), (44, 1)] {
            let mut bytes = FETCH_MESSAGE;
            bytes[at] = value;
            PushRequest::decode(&bytes).expect_err(&format!("byte {at} is {value}"));
        }
        for (at, value) in [(0, 1), (1, 7), (2, 1), (31, 1)] {
            let mut bytes = RECEIPT_MESSAGE;
            bytes[at] = value;
            Receipt::decode(&bytes).expect_err(&format!("byte {at} is {value}"));
        }
        let mut nothing = FETCH_MESSAGE;
        nothing[12..16].fill(0);
        PushRequest::decode(&nothing).unwrap_err();
    }
}
