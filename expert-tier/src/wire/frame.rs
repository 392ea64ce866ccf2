//! Frames: a fixed header and a body of the length it states.
//!
//! ```text
//! offset bytes
//!      0     2  type
//!      2     2  status, 0 outside answers
//!      4     4  zero
//!      8     8  request id, 0 outside requests and their answers
//!     16     8  body length
//! ```
//!
//! [`FrameHeader::decode`] refuses a body longer than its type allows, so nothing is ever
//! allocated for a length that an outsider made up.

use railset::message::Kind;

use crate::layout::{MAX_CHUNKS, MAX_PAYLOAD_BYTES, header_bytes};
use crate::store::manifest;

/// Bytes of a frame header.
pub const HEADER_BYTES: usize = 24;

/// Longest text in a refusal or error answer.
pub const MAX_TEXT_BYTES: u64 = 1024;
/// Longest status document.
pub const MAX_STATUS_BYTES: u64 = 1 << 20;

/// An enum of the wire, and the list of its values: one place to add a variant to.
macro_rules! wire_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$about:meta])* $variant:ident = $value:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(u16)]
        pub enum $name {
            $($(#[$about])* $variant = $value,)*
        }

        impl $name {
            /// Every value.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// The value that stands for `found` on the wire.
            fn from_wire(found: u16) -> Option<Self> {
                match found {
                    $($value => Some(Self::$variant),)*
                    _ => None,
                }
            }
        }
    };
}

wire_enum! {
    /// What a frame carries.
    FrameType {
        /// Client: who I am, which versions I speak, a nonce.
        ClientHello = 1,
        /// Peer: the version chosen, whether a proof is wanted, a nonce.
        ServerHello = 2,
        /// Client: proof that it knows the secret.
        ClientProof = 3,
        /// Peer: proof that it knows the secret.
        ServerProof = 4,
        /// Peer: the handshake is over; which store this is.
        Welcome = 5,
        /// Client: send the manifest.
        ManifestRequest = 6,
        /// Peer: the manifest's bytes.
        Manifest = 7,
        /// Client: I will fetch from the store of this fingerprint.
        Attach = 8,
        /// Peer: fetches are answered from here on.
        Attached = 9,
        /// Client: send a record.
        Fetch = 16,
        /// Peer: the record, or a status and a text.
        Record = 17,
        /// Client: describe yourself.
        StatusRequest = 18,
        /// Peer: a JSON document.
        StatusReport = 19,
        /// Client, attached: which rails are there?
        RailsRequest = 24,
        /// Peer: these.
        RailsOffer = 25,
        /// Client: I use these of them, with these queue pairs.
        RailsConnect = 26,
        /// Peer: mine are connected to yours.
        RailsConnected = 27,
        /// Peer: where in its memory the experts are, from now on.
        RailsTable = 28,
        /// Client: I use the table of this generation and no older one.
        RailsTableAck = 29,
        /// Client: how often I have read which experts since the last report.
        RailsUsage = 30,
        /// Client: the bytes of this expert were not its record's.
        RailsDamaged = 31,
        /// Peer: I will not serve you, with the reason; the connection closes.
        Refusal = 32,
        /// Peer: I am shutting down; requests already sent are still answered.
        Drain = 33,
    }
}

impl FrameType {
    /// Shortest and longest body of this type, in bytes.
    #[must_use]
    pub fn body_range(self) -> (u64, u64) {
        match self {
            Self::ClientHello => (64, 64),
            Self::ServerHello => (56, 56),
            Self::ClientProof | Self::ServerProof | Self::Attach => (32, 32),
            Self::Welcome => (40, 40),
            Self::Fetch => (8, 8),
            Self::Manifest => (0, manifest::MAX_BYTES),
            Self::Record => (0, header_bytes(MAX_CHUNKS) + MAX_PAYLOAD_BYTES),
            Self::StatusReport => (0, MAX_STATUS_BYTES),
            Self::Refusal => (0, MAX_TEXT_BYTES),
            Self::RailsRequest => rails(Kind::Request),
            Self::RailsOffer => rails(Kind::Offer),
            Self::RailsConnect => rails(Kind::Connect),
            Self::RailsConnected => rails(Kind::Connected),
            Self::RailsTable => rails(Kind::Table),
            Self::RailsTableAck => rails(Kind::TableAck),
            Self::RailsUsage => rails(Kind::Usage),
            Self::RailsDamaged => rails(Kind::Damaged),
            Self::ManifestRequest | Self::Attached | Self::StatusRequest | Self::Drain => (0, 0),
        }
    }
}

/// What `railset` says of a body of its own.
fn rails(kind: Kind) -> (u64, u64) {
    let (least, most) = kind.body_range();
    (least as u64, most as u64)
}

impl From<Kind> for FrameType {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Request => Self::RailsRequest,
            Kind::Offer => Self::RailsOffer,
            Kind::Connect => Self::RailsConnect,
            Kind::Connected => Self::RailsConnected,
            Kind::Table => Self::RailsTable,
            Kind::TableAck => Self::RailsTableAck,
            Kind::Usage => Self::RailsUsage,
            Kind::Damaged => Self::RailsDamaged,
        }
    }
}

impl FrameType {
    /// Which body of `railset` the frame carries, if it is one of those that do.
    #[must_use]
    pub fn rails_kind(self) -> Option<Kind> {
        Kind::ALL.into_iter().find(|&kind| Self::from(kind) == self)
    }
}

wire_enum! {
    /// How a request ended; every value but [`Ok`](Status::Ok) concerns that request alone, or, in a
    /// refusal, the connection.
    Status {
        /// The record follows.
        Ok = 0,
        /// The store has no such record.
        NoSuchKey = 1,
        /// The peer could not read its copy, or found it damaged.
        Unreadable = 2,
        /// The client speaks no version that the peer does.
        Version = 3,
        /// The proof is wrong, or there is a secret on one side only.
        Secret = 4,
        /// As many clients or connections as allowed are here.
        Busy = 5,
        /// The client wants another store.
        OtherStore = 6,
        /// A frame that the protocol does not allow at this point.
        Protocol = 7,
        /// The peer is shutting down.
        Draining = 8,
        /// The peer publishes no rails: its records come over TCP alone.
        NoRails = 9,
    }
}

impl Status {
    /// The value for metrics and logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::NoSuchKey => "no_such_key",
            Self::Unreadable => "unreadable",
            Self::Version => "version",
            Self::Secret => "secret",
            Self::Busy => "busy",
            Self::OtherStore => "other_store",
            Self::Protocol => "protocol",
            Self::Draining => "draining",
            Self::NoRails => "no_rails",
        }
    }
}

/// Bytes that are no frame of this protocol.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum FrameError {
    /// The type is not one of [`FrameType`].
    #[error("frame type {found} does not exist: this does not speak the expert protocol")]
    Type {
        /// The value found.
        found: u16,
    },
    /// The status is not one of [`Status`].
    #[error("status {found} does not exist")]
    Status {
        /// The value found.
        found: u16,
    },
    /// A status on a frame that is neither an answer nor a refusal.
    #[error("status {} on a {frame:?} frame; only answers and refusals have one", status.name())]
    StatusHere {
        /// The frame's type.
        frame: FrameType,
        /// The status found.
        status: Status,
    },
    /// The reserved bytes are not zero.
    #[error("reserved bytes hold {found}")]
    Reserved {
        /// The value found.
        found: u32,
    },
    /// A request id in a frame that belongs to no request.
    #[error("a {frame:?} frame with the request id {found}")]
    RequestIdHere {
        /// The frame's type.
        frame: FrameType,
        /// The id stated.
        found: u64,
    },
    /// A body shorter or longer than its type allows.
    #[error("a {frame:?} frame of {found} bytes, allowed are {least} to {most}")]
    Length {
        /// The frame's type.
        frame: FrameType,
        /// The length stated.
        found: u64,
        /// Shortest allowed.
        least: u64,
        /// Longest allowed.
        most: u64,
    },
    /// A frame of another type than the protocol allows here.
    #[error("a {found:?} frame where {expected} was due")]
    Unexpected {
        /// The type found.
        found: FrameType,
        /// What would have been right.
        expected: &'static str,
    },
}

/// A frame header that was checked against its type's limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameHeader {
    /// What the frame carries.
    pub frame: FrameType,
    /// How the request ended.
    pub status: Status,
    /// The request that this belongs to.
    pub request_id: u64,
    /// Bytes of the body.
    pub body_bytes: u64,
}

impl FrameHeader {
    /// A header outside any request.
    #[must_use]
    pub fn control(frame: FrameType, body_bytes: u64) -> Self {
        Self { frame, status: Status::Ok, request_id: 0, body_bytes }
    }

    /// The header's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[0..2].copy_from_slice(&(self.frame as u16).to_le_bytes());
        out[2..4].copy_from_slice(&(self.status as u16).to_le_bytes());
        out[8..16].copy_from_slice(&self.request_id.to_le_bytes());
        out[16..24].copy_from_slice(&self.body_bytes.to_le_bytes());
        out
    }

    /// Reads a header and holds its length against the type's limits.
    ///
    /// # Errors
    /// [`FrameError`] names the field that no frame of this protocol has.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let [t0, t1, s0, s1, r0, r1, r2, r3, rest @ ..] = *bytes;
        let [i0, i1, i2, i3, i4, i5, i6, i7, l0, l1, l2, l3, l4, l5, l6, l7] = rest;
        let found = u16::from_le_bytes([t0, t1]);
        let frame = FrameType::from_wire(found).ok_or(FrameError::Type { found })?;
        let found = u16::from_le_bytes([s0, s1]);
        let status = Status::from_wire(found).ok_or(FrameError::Status { found })?;
        let found = u32::from_le_bytes([r0, r1, r2, r3]);
        if found != 0 {
            return Err(FrameError::Reserved { found });
        }
        let body_bytes = u64::from_le_bytes([l0, l1, l2, l3, l4, l5, l6, l7]);
        // A status changes what the body is, so it may stand only where a reader expects that.
        let (least, most) = match (status, frame) {
            (Status::Ok, _) => frame.body_range(),
            (_, FrameType::Record | FrameType::Refusal) => (0, MAX_TEXT_BYTES),
            _ => return Err(FrameError::StatusHere { frame, status }),
        };
        if body_bytes < least || body_bytes > most {
            return Err(FrameError::Length { frame, found: body_bytes, least, most });
        }
        let request_id = u64::from_le_bytes([i0, i1, i2, i3, i4, i5, i6, i7]);
        if request_id != 0 && !matches!(frame, FrameType::Fetch | FrameType::Record) {
            return Err(FrameError::RequestIdHere { frame, found: request_id });
        }
        Ok(Self { frame, status, request_id, body_bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_bytes_are_frozen() {
        let header = FrameHeader {
            frame: FrameType::Record,
            status: Status::Unreadable,
            request_id: 0x0102_0304_0506_0708,
            body_bytes: 0x20,
        };
        let bytes = [17, 0, 2, 0, 0, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1, 32, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(header.encode(), bytes);
        assert_eq!(FrameHeader::decode(&bytes), Ok(header));
    }

    #[test]
    fn every_type_and_status_survives_the_wire() {
        for &frame in FrameType::ALL {
            let header = FrameHeader::control(frame, frame.body_range().1);
            assert_eq!(FrameHeader::decode(&header.encode()), Ok(header));
        }
        for &status in Status::ALL {
            let header = FrameHeader { status, ..FrameHeader::control(FrameType::Refusal, 0) };
            assert_eq!(FrameHeader::decode(&header.encode()), Ok(header));
        }
    }

    #[test]
    fn the_lengths_that_each_type_allows_are_frozen() {
        assert_eq!(FrameType::StatusReport.body_range(), (0, 1_048_576));
        assert_eq!(FrameType::Refusal.body_range(), (0, 1024));
        let (least, most) = FrameType::Record.body_range();
        assert_eq!((least, most - MAX_PAYLOAD_BYTES), (0, header_bytes(MAX_CHUNKS)));
    }

    #[test]
    fn frames_of_rails_carry_the_body_that_they_are_named_after_and_others_none() {
        for kind in Kind::ALL {
            assert_eq!(FrameType::from(kind).rails_kind(), Some(kind));
        }
        let of_rails = FrameType::ALL.iter().filter(|frame| frame.rails_kind().is_some());
        assert_eq!(of_rails.count(), Kind::ALL.len());
        assert_eq!(FrameType::Record.rails_kind(), None);
    }

    #[test]
    fn a_status_stands_on_answers_and_refusals_alone() {
        for &frame in FrameType::ALL {
            let header = FrameHeader { status: Status::Busy, ..FrameHeader::control(frame, 0) };
            let allowed = matches!(frame, FrameType::Record | FrameType::Refusal);
            match FrameHeader::decode(&header.encode()) {
                Ok(found) => assert!(allowed && found == header),
                Err(error) => {
                    assert_eq!(error, FrameError::StatusHere { frame, status: Status::Busy });
                    assert!(!allowed);
                }
            }
        }
    }

    #[test]
    fn only_requests_and_their_answers_have_an_id() {
        for &frame in FrameType::ALL {
            let least = frame.body_range().0;
            let header = FrameHeader { request_id: 7, ..FrameHeader::control(frame, least) };
            let allowed = matches!(frame, FrameType::Fetch | FrameType::Record);
            assert_eq!(FrameHeader::decode(&header.encode()).is_ok(), allowed, "{frame:?}");
        }
    }

    #[test]
    fn a_length_beyond_its_type_is_refused_before_anything_is_allocated() {
        for &frame in FrameType::ALL {
            let (least, most) = frame.body_range();
            let over = FrameHeader::control(frame, most + 1).encode();
            assert!(matches!(FrameHeader::decode(&over), Err(FrameError::Length { .. })));
            if let Some(under) = least.checked_sub(1) {
                let under = FrameHeader::control(frame, under).encode();
                assert!(matches!(FrameHeader::decode(&under), Err(FrameError::Length { .. })));
            }
        }
    }

    #[test]
    fn http_is_not_this_protocol() {
        let bytes = b"HTTP/1.1 400 Bad Request";
        let error = FrameHeader::decode(bytes).unwrap_err();
        assert!(error.to_string().contains("does not speak the expert protocol"), "{error}");
    }
}
