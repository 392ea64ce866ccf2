//! The ends of queue pairs.

use super::MAX_QPS_PER_RAIL;
use crate::wire::{DecodeError, Reader, within};

/// Bytes of a queue pair's end.
pub(super) const END_BYTES: usize = 8;

/// A queue pair's number: 24 bits, none of the reserved ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Qpn(u32);

impl Qpn {
    /// # Errors
    /// The number has more than 24 bits, or is 0, 1 or 0xFFFFFF, which no RC queue pair has.
    pub fn new(number: u32) -> Result<Self, DecodeError> {
        within("queue pair number", number, 2..=0xff_fffe).map(Self)
    }

    /// The number, 2 to 0xFFFFFE.
    #[must_use]
    pub fn value(self) -> u32 {
        self.0
    }
}

/// The number of a queue pair's first packet: 24 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Psn(u32);

impl Psn {
    /// # Errors
    /// The number has more than 24 bits.
    pub fn new(number: u32) -> Result<Self, DecodeError> {
        within("packet sequence number", number, 0..=0xff_ffff).map(Self)
    }

    /// The lowest 24 bits of a random number. Random, so that packets of an earlier queue pair
    /// with the same number are not taken for ours.
    #[must_use]
    pub fn from_random(random: u32) -> Self {
        Self(random & 0xff_ffff)
    }

    /// The number, 0 to 0xFFFFFF.
    #[must_use]
    pub fn value(self) -> u32 {
        self.0
    }
}

/// One end of a queue pair, as the other end must know it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueuePairEnd {
    /// Its number.
    pub qpn: Qpn,
    /// The number of the first packet it sends.
    pub psn: Psn,
}

pub(super) fn queue_pair_count(reader: &mut Reader<'_>) -> Result<u8, DecodeError> {
    let what = "number of queue pairs";
    within(what, reader.u8(what)?, 1..=MAX_QPS_PER_RAIL as u64)
}

pub(super) fn ends(reader: &mut Reader<'_>, count: u8) -> Result<Vec<QueuePairEnd>, DecodeError> {
    let end = |reader: &mut Reader<'_>| {
        let qpn = Qpn::new(reader.u32("queue pair number")?)?;
        let psn = Psn::new(reader.u32("packet sequence number")?)?;
        Ok(QueuePairEnd { qpn, psn })
    };
    (0..count).map(|_| end(reader)).collect()
}

pub(super) fn put_ends(out: &mut Vec<u8>, ends: &[QueuePairEnd]) {
    for end in ends {
        out.extend(end.qpn.0.to_le_bytes());
        out.extend(end.psn.0.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_random_number_becomes_a_packet_number() {
        assert_eq!(Psn::from_random(0xabcd_ef01).value(), 0xcd_ef01);
        assert!(Psn::new(1 << 24).is_err() && Qpn::new(0xff_ffff).is_err() && Qpn::new(1).is_err());
    }
}
