//! Which store a record belongs to.

use std::fmt;
use std::str::FromStr;

/// The SHA-256 that names a store: of its manifest and, through the manifest, of every record's
/// payload checksums. docs/store-format.md says over which bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 32]);

/// Bytes of a fingerprint that a record header carries.
pub const PREFIX_BYTES: usize = 16;

impl Fingerprint {
    /// The part that a record header carries.
    #[must_use]
    pub fn prefix(&self) -> [u8; PREFIX_BYTES] {
        let mut prefix = [0; PREFIX_BYTES];
        prefix.copy_from_slice(&self.0[..PREFIX_BYTES]);
        prefix
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A text that is not 64 hexadecimal digits.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("a fingerprint is 64 hexadecimal digits, found {0:?}")]
pub struct BadFingerprint(String);

impl FromStr for Fingerprint {
    type Err = BadFingerprint;

    fn from_str(text: &str) -> Result<Self, BadFingerprint> {
        let bad = || BadFingerprint(text.chars().take(80).collect());
        if text.len() != 64 || !text.is_ascii() {
            return Err(bad());
        }
        let mut bytes = [0; 32];
        for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let value = |digit: u8| char::from(digit).to_digit(16);
            let (Some(high), Some(low)) = (value(digits[0]), value(digits[1])) else {
                return Err(bad());
            };
            *byte = u8::try_from(high * 16 + low).map_err(|_| bad())?;
        }
        Ok(Self(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_reads_back_what_it_prints() {
        let mut bytes = [0xab; 32];
        bytes[0] = 0x01;
        let fingerprint = Fingerprint(bytes);
        assert_eq!(fingerprint.to_string().parse(), Ok(fingerprint));
        assert!("xyz".parse::<Fingerprint>().is_err());
        assert!("g".repeat(64).parse::<Fingerprint>().is_err());
        assert!("é".repeat(32).parse::<Fingerprint>().is_err());
    }
}
