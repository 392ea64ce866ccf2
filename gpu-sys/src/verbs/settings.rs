//! What a queue pair is made with, and what it is told when it is connected.
//!
//! Values for which the device would wait for ever are not values of these types: a retry count of
//! 7 means "without end" for a receiver that is not ready (`ibv_modify_qp(3)`), was seen to mean it
//! for a peer that is gone too, and an acknowledgement timeout of 0 means "never".

use super::error::VerbsError;
use super::port::Mtu;

macro_rules! bounded {
    ($($(#[$doc:meta])* $name:ident($what:literal, $low:literal..=$high:literal, default $default:literal);)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
        pub struct $name(u8);

        impl $name {
            /// Checks the value.
            ///
            /// # Errors
            /// It is not one of those described above.
            pub fn new(value: u8) -> Result<Self, VerbsError> {
                if ($low..=$high).contains(&value) {
                    return Ok(Self(value));
                }
                Err(VerbsError::Setting {
                    what: $what,
                    value: value.into(),
                    on: "a queue pair".into(),
                    allowed: concat!(stringify!($low), " to ", stringify!($high)).into(),
                })
            }

            /// The value as the device takes it.
            #[must_use]
            pub fn value(self) -> u8 {
                self.0
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self($default)
            }
        }
    )*};
}

bounded! {
    /// How long the device waits for an acknowledgement before it sends again: 4.096 us times two to
    /// this power, 1 to 31. The default, 14, is 67 ms.
    AckTimeout("an acknowledgement timeout", 1..=31, default 14);
    /// How often the device sends again before it gives up, 0 to 6; 7 would be "without end".
    Retries("a retry count", 0..=6, default 6);
    /// How long a peer is told to wait when no receive is posted here, as the specification numbers
    /// the times: 1 is 10 us, 12 (the default) 640 us, 31 491 ms. 0 would be 655 ms, the longest.
    MinRnrTimer("a receiver-not-ready timer", 1..=31, default 12);
}

/// A packet sequence number: 24 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Psn(u32);

impl Psn {
    /// The low 24 bits of `value`; best a random one, so that packets of an older connection are
    /// not taken for this one's.
    #[must_use]
    pub fn new(value: u32) -> Self {
        Self(value & 0xff_ffff)
    }

    /// The number.
    #[must_use]
    pub fn value(self) -> u32 {
        self.0
    }
}

/// What a peer may do through a queue pair, on top of sending: registrations must allow it too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RemoteAccess {
    /// Nothing: a pure requester.
    None,
    /// READ.
    Read,
    /// WRITE.
    Write,
    /// READ and WRITE.
    ReadWrite,
}

impl RemoteAccess {
    /// Every value.
    pub const ALL: [Self; 4] = [Self::None, Self::Read, Self::Write, Self::ReadWrite];
}

/// What a queue pair is made with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueuePairOptions {
    /// The port it goes through; they count from 1.
    pub port: u8,
    /// Requests in flight at once, at least 1.
    pub send_wr: u32,
    /// Receives that are kept posted; 0 for a queue pair that is sent nothing.
    pub recv_wr: u32,
    /// Longest message that is received, in bytes; 0 where only WRITEs with an immediate value come.
    pub recv_bytes: usize,
    /// Longest message that is sent, in bytes; at most
    /// [`MAX_INLINE_BYTES`](super::MAX_INLINE_BYTES).
    pub inline_bytes: u32,
    /// What the peer may do.
    pub remote_access: RemoteAccess,
}

/// Where packets go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Destination {
    /// RoCE: the peer's GID.
    Ethernet {
        /// The GID.
        gid: [u8; 16],
    },
    /// InfiniBand: the peer's LID, and its GID where it is in another subnet.
    InfiniBand {
        /// The LID.
        lid: u16,
        /// The GID, if packets need a global header.
        gid: Option<[u8; 16]>,
    },
}

/// The peer's end of a connection, as the handshake told it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemoteEnd {
    /// Its queue pair's number: 24 bits.
    pub queue_pair: u32,
    /// Its first packet's number.
    pub psn: Psn,
    /// Where it is.
    pub destination: Destination,
    /// The path's MTU: the smaller one of both ports'.
    pub mtu: Mtu,
    /// READs that it answers at once (its `max_dest_rd_atomic`).
    pub max_dest_rd_atomic: u8,
}

/// Our end of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LocalEnd {
    /// Index of our GID in the port's table.
    pub gid_index: u8,
    /// Our first packet's number, as the peer was told.
    pub psn: Psn,
    /// READs that we have asked for at once; the peer's `max_dest_rd_atomic` bounds it further.
    pub max_rd_atomic: u8,
    /// READs of the peer that we answer at once, as it was told.
    pub max_dest_rd_atomic: u8,
    /// See [`AckTimeout`].
    pub ack_timeout: AckTimeout,
    /// How often to send again what is not acknowledged.
    pub retries: Retries,
    /// How often to send again what the peer had no receive for.
    pub rnr_retries: Retries,
    /// See [`MinRnrTimer`].
    pub min_rnr_timer: MinRnrTimer,
}
