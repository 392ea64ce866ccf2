//! Reading and writing fixed-width little-endian fields of bodies from outside.
//!
//! A `Reader` never reads past its end, and a count is held against its limit, and against the
//! bytes that are there, before anything is allocated for it.

use crate::facts::Mtu;

/// A body that is not one of this protocol.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum DecodeError {
    /// The body ends early.
    #[error("{what}: {needed} bytes were due and {found} are left")]
    Short {
        /// What was being read.
        what: &'static str,
        /// Bytes that it takes.
        needed: u64,
        /// Bytes that were left.
        found: u64,
    },
    /// Bytes follow the last field.
    #[error("{found} bytes follow the end of the {what}")]
    Trailing {
        /// The message.
        what: &'static str,
        /// Bytes left over.
        found: u64,
    },
    /// A count or number is outside its limits.
    #[error("{what} is {found}, allowed are {least} to {most}")]
    OutOfRange {
        /// The field.
        what: &'static str,
        /// The value found.
        found: u64,
        /// Smallest allowed.
        least: u64,
        /// Largest allowed.
        most: u64,
    },
    /// A number stands for nothing.
    #[error("{what} {found} does not exist")]
    Unknown {
        /// The field.
        what: &'static str,
        /// The value found.
        found: u64,
    },
    /// Bytes that must be zero are not.
    #[error("reserved bytes of the {what} hold {found}")]
    Reserved {
        /// The message.
        what: &'static str,
        /// The value found.
        found: u64,
    },
    /// A text is not UTF-8, or has control characters.
    #[error("{what} is not printable UTF-8")]
    Text {
        /// The field.
        what: &'static str,
    },
}

/// Takes fields from the front of a body.
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(body: &'a [u8]) -> Self {
        Self { rest: body }
    }

    pub(crate) fn bytes(
        &mut self,
        what: &'static str,
        count: usize,
    ) -> Result<&'a [u8], DecodeError> {
        let short =
            DecodeError::Short { what, needed: count as u64, found: self.rest.len() as u64 };
        let (taken, rest) = self.rest.split_at_checked(count).ok_or(short)?;
        self.rest = rest;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(
        &mut self,
        what: &'static str,
    ) -> Result<[u8; N], DecodeError> {
        let short = DecodeError::Short { what, needed: N as u64, found: self.rest.len() as u64 };
        let (taken, rest) = self.rest.split_first_chunk().ok_or(short)?;
        self.rest = rest;
        Ok(*taken)
    }

    pub(crate) fn u8(&mut self, what: &'static str) -> Result<u8, DecodeError> {
        Ok(u8::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn u16(&mut self, what: &'static str) -> Result<u16, DecodeError> {
        Ok(u16::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn u32(&mut self, what: &'static str) -> Result<u32, DecodeError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn u64(&mut self, what: &'static str) -> Result<u64, DecodeError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn mtu(&mut self) -> Result<Mtu, DecodeError> {
        let found = self.u8("path MTU")?;
        Mtu::from_wire(found)
            .ok_or(DecodeError::Unknown { what: "path MTU number", found: u64::from(found) })
    }

    /// `count` bytes that must be zero, at most eight.
    pub(crate) fn reserved(&mut self, what: &'static str, count: usize) -> Result<(), DecodeError> {
        let taken = self.bytes(what, count)?;
        let found = taken.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        if found == 0 { Ok(()) } else { Err(DecodeError::Reserved { what, found }) }
    }

    pub(crate) fn finish(self, what: &'static str) -> Result<(), DecodeError> {
        if self.rest.is_empty() {
            return Ok(());
        }
        Err(DecodeError::Trailing { what, found: self.rest.len() as u64 })
    }
}

/// `found`, if it lies within the limits.
pub(crate) fn within<T: Into<u64> + Copy>(
    what: &'static str,
    found: T,
    limits: std::ops::RangeInclusive<u64>,
) -> Result<T, DecodeError> {
    let value = found.into();
    if limits.contains(&value) {
        return Ok(found);
    }
    Err(DecodeError::OutOfRange { what, found: value, least: *limits.start(), most: *limits.end() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_little_endian_and_a_short_body_is_an_error() {
        let mut reader = Reader::new(&[1, 2, 0, 3, 0, 0, 0, 4, 5]);
        assert_eq!(reader.u8("a"), Ok(1));
        assert_eq!(reader.u16("b"), Ok(2));
        assert_eq!(reader.u32("c"), Ok(3));
        let short = DecodeError::Short { what: "d", needed: 8, found: 2 };
        assert_eq!(reader.u64("d"), Err(short));
        let over = DecodeError::Trailing { what: "body", found: 2 };
        assert_eq!(reader.finish("body"), Err(over));
    }

    #[test]
    fn reserved_bytes_must_be_zero() {
        assert_eq!(Reader::new(&[0, 0, 0]).reserved("offer", 3), Ok(()));
        let found = Reader::new(&[0, 1, 0]).reserved("offer", 3);
        assert_eq!(found, Err(DecodeError::Reserved { what: "offer", found: 256 }));
    }
}
