//! What a client says once it is connected: `TableAck`, `Usage` and `Damaged`.

use super::MAX_USAGE;
use crate::wire::{DecodeError, Reader, within};

/// Bytes of a usage report before its entries, and of each entry.
pub(super) const USAGE_BYTES: (usize, usize) = (8, 12);

/// `TableAck`: the client has put an older table away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TableAck {
    /// The generation that it uses from now on.
    pub generation: u64,
}

/// `Usage`: how often a client has read experts from the peer's memory, of which the peer sees
/// nothing.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// At most [`MAX_USAGE`].
    pub entries: Vec<UsageEntry>,
}

/// How often one expert was read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UsageEntry {
    /// The model's number of the layer.
    pub layer: u32,
    /// The expert.
    pub expert: u32,
    /// READs of the whole record.
    pub reads: u32,
}

/// `Damaged`: what came for an expert was not its record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Damaged {
    /// The model's number of the layer.
    pub layer: u32,
    /// The expert.
    pub expert: u32,
}

impl TableAck {
    /// The body's bytes.
    #[must_use]
    pub fn encode(self) -> Vec<u8> {
        self.generation.to_le_bytes().to_vec()
    }

    /// # Errors
    /// The body has another length.
    pub fn decode(body: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(body);
        let generation = reader.u64("generation")?;
        reader.finish("table acknowledgement")?;
        Ok(Self { generation })
    }
}

impl Usage {
    /// The body's bytes; entries beyond [`MAX_USAGE`] are left out.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let entries = &self.entries[..self.entries.len().min(MAX_USAGE)];
        let mut out = (entries.len() as u32).to_le_bytes().to_vec();
        out.extend([0; 4]);
        for entry in entries {
            out.extend(entry.layer.to_le_bytes());
            out.extend(entry.expert.to_le_bytes());
            out.extend(entry.reads.to_le_bytes());
        }
        out
    }

    /// # Errors
    /// [`DecodeError`] names the field that no report has.
    pub fn decode(body: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(body);
        let what = "entries of a usage report";
        let entries = within(what, reader.u32(what)?, 0..=MAX_USAGE as u64)?;
        reader.reserved("usage", 4)?;
        let entry = |reader: &mut Reader<'_>| {
            let (layer, expert) = (reader.u32("layer")?, reader.u32("expert")?);
            Ok(UsageEntry { layer, expert, reads: reader.u32("READs")? })
        };
        let entries = (0..entries).map(|_| entry(&mut reader)).collect::<Result<_, _>>()?;
        reader.finish("usage")?;
        Ok(Self { entries })
    }
}

impl Damaged {
    /// The body's bytes.
    #[must_use]
    pub fn encode(self) -> Vec<u8> {
        [self.layer.to_le_bytes(), self.expert.to_le_bytes()].concat()
    }

    /// # Errors
    /// The body has another length.
    pub fn decode(body: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(body);
        let (layer, expert) = (reader.u32("layer")?, reader.u32("expert")?);
        reader.finish("damaged")?;
        Ok(Self { layer, expert })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::golden::assert_length_matters;

    /// Written from the table in the folder's header.
    #[rustfmt::skip]
    const USAGE: [u8; 20] = [1, 0, 0, 0,  0, 0, 0, 0,  7, 0, 0, 0,  2, 1, 0, 0,  3, 0, 0, 0];

    #[test]
    fn the_bytes_of_reports_are_frozen() {
        let ack = TableAck { generation: 0x0102 };
        assert_eq!(ack.encode(), [2, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(TableAck::decode(&ack.encode()), Ok(ack));
        let usage = Usage { entries: vec![UsageEntry { layer: 7, expert: 258, reads: 3 }] };
        assert_eq!((usage.encode(), Usage::decode(&USAGE)), (USAGE.to_vec(), Ok(usage)));
        let damaged = Damaged { layer: 7, expert: 258 };
        let bytes = [7, 0, 0, 0, 2, 1, 0, 0];
        assert_eq!((damaged.encode(), Damaged::decode(&bytes)), (bytes.to_vec(), Ok(damaged)));
    }

    #[test]
    fn every_cut_and_every_longer_body_is_refused() {
        assert_length_matters(&[0; 8], TableAck::decode);
        assert_length_matters(&USAGE, Usage::decode);
        assert_length_matters(&[0; 8], Damaged::decode);
    }
}
