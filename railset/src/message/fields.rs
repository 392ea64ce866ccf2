//! The fields that several bodies have.

use super::{MAX_LID, MAX_RAILS};
use crate::wire::{DecodeError, Reader, within};

pub(super) fn rail_count(reader: &mut Reader<'_>) -> Result<u8, DecodeError> {
    within("number of rails", reader.u8("number of rails")?, 1..=MAX_RAILS as u64)
}

pub(super) fn port(reader: &mut Reader<'_>) -> Result<u8, DecodeError> {
    within("port", reader.u8("port")?, 1..=255)
}

pub(super) fn lid(reader: &mut Reader<'_>) -> Result<u16, DecodeError> {
    within("LID", reader.u16("LID")?, 0..=u64::from(MAX_LID))
}

pub(super) fn depth(reader: &mut Reader<'_>) -> Result<u8, DecodeError> {
    within("READ depth", reader.u8("READ depth")?, 1..=255)
}

/// A count for the wire; one that does not fit becomes 255, which every decoder refuses.
pub(super) fn count(items: usize) -> u8 {
    u8::try_from(items).unwrap_or(u8::MAX)
}
