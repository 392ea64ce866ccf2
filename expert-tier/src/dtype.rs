//! Element types, named as the safetensors format names them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// An element type of the safetensors format (`dtype` in a file's header).
///
/// Bytes are never converted: the type is kept so that a runtime knows what it was handed and so
/// that a tensor's length can be checked against its shape.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "&'static str")]
pub enum Dtype {
    /// Boolean, one byte each.
    Bool,
    /// 4-bit float, two to a byte.
    F4,
    /// 6-bit float with 2 exponent bits, packed.
    F6E2M3,
    /// 6-bit float with 3 exponent bits, packed.
    F6E3M2,
    /// Unsigned byte; also the container of packed formats.
    U8,
    /// Signed byte.
    I8,
    /// 8-bit float with 5 exponent bits.
    F8E5M2,
    /// 8-bit float with 4 exponent bits.
    F8E4M3,
    /// 8-bit power of two, the scale type of the MX formats.
    F8E8M0,
    /// 8-bit float with 4 exponent bits, finite and without negative zero.
    F8E4M3Fnuz,
    /// 8-bit float with 5 exponent bits, finite and without negative zero.
    F8E5M2Fnuz,
    /// Signed 16-bit integer.
    I16,
    /// Unsigned 16-bit integer.
    U16,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned 32-bit integer.
    U32,
    /// IEEE single.
    F32,
    /// Complex of two singles.
    C64,
    /// IEEE double.
    F64,
    /// Signed 64-bit integer.
    I64,
    /// Unsigned 64-bit integer.
    U64,
}

/// Name in the safetensors header and bits per element, for every type.
const TABLE: [(Dtype, &str, u64); 22] = [
    (Dtype::Bool, "BOOL", 8),
    (Dtype::F4, "F4", 4),
    (Dtype::F6E2M3, "F6_E2M3", 6),
    (Dtype::F6E3M2, "F6_E3M2", 6),
    (Dtype::U8, "U8", 8),
    (Dtype::I8, "I8", 8),
    (Dtype::F8E5M2, "F8_E5M2", 8),
    (Dtype::F8E4M3, "F8_E4M3", 8),
    (Dtype::F8E8M0, "F8_E8M0", 8),
    (Dtype::F8E4M3Fnuz, "F8_E4M3FNUZ", 8),
    (Dtype::F8E5M2Fnuz, "F8_E5M2FNUZ", 8),
    (Dtype::I16, "I16", 16),
    (Dtype::U16, "U16", 16),
    (Dtype::F16, "F16", 16),
    (Dtype::Bf16, "BF16", 16),
    (Dtype::I32, "I32", 32),
    (Dtype::U32, "U32", 32),
    (Dtype::F32, "F32", 32),
    (Dtype::C64, "C64", 64),
    (Dtype::F64, "F64", 64),
    (Dtype::I64, "I64", 64),
    (Dtype::U64, "U64", 64),
];

impl Dtype {
    /// The type's name in a safetensors header.
    #[must_use]
    pub fn name(self) -> &'static str {
        TABLE.iter().find(|row| row.0 == self).map_or("U8", |row| row.1)
    }

    /// Bits per element: 4, 6, 8, 16, 32 or 64.
    #[must_use]
    pub fn bits(self) -> u64 {
        TABLE.iter().find(|row| row.0 == self).map_or(8, |row| row.2)
    }

    /// Bytes of a tensor of this type and `shape`; a scalar has the shape `[]`.
    ///
    /// `None` where the length overflows or is not a whole number of bytes.
    #[must_use]
    pub fn tensor_bytes(self, shape: &[u64]) -> Option<u64> {
        let elements = shape.iter().try_fold(1_u64, |n, &dim| n.checked_mul(dim))?;
        let bits = elements.checked_mul(self.bits())?;
        (bits % 8 == 0).then_some(bits / 8)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A `dtype` that the safetensors format does not define.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("unknown dtype {0:?}")]
pub struct UnknownDtype(pub String);

impl FromStr for Dtype {
    type Err = UnknownDtype;

    fn from_str(name: &str) -> Result<Self, UnknownDtype> {
        let row = TABLE.iter().find(|row| row.1 == name);
        row.map(|row| row.0).ok_or_else(|| UnknownDtype(name.chars().take(32).collect()))
    }
}

impl TryFrom<String> for Dtype {
    type Error = UnknownDtype;

    fn try_from(name: String) -> Result<Self, UnknownDtype> {
        name.parse()
    }
}

impl From<Dtype> for &'static str {
    fn from(dtype: Dtype) -> Self {
        dtype.name()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_is_found_by_its_own_name() {
        for (dtype, name, bits) in TABLE {
            assert_eq!(name.parse(), Ok(dtype));
            assert_eq!((dtype.name(), dtype.bits()), (name, bits));
        }
    }

    #[test]
    fn names_and_widths_are_those_of_the_safetensors_crate() {
        use safetensors::Dtype as Reference;
        for (name, bits) in [
            ("BOOL", Reference::BOOL.bitsize()),
            ("F4", Reference::F4.bitsize()),
            ("F6_E2M3", Reference::F6_E2M3.bitsize()),
            ("F8_E8M0", Reference::F8_E8M0.bitsize()),
            ("BF16", Reference::BF16.bitsize()),
            ("C64", Reference::C64.bitsize()),
            ("U64", Reference::U64.bitsize()),
        ] {
            assert_eq!(name.parse::<Dtype>().map(Dtype::bits), Ok(bits as u64), "{name}");
        }
    }

    #[test]
    fn a_length_that_overflows_or_splits_a_byte_has_no_value() {
        assert_eq!(Dtype::F4.tensor_bytes(&[3]), None);
        assert_eq!(Dtype::F4.tensor_bytes(&[3, 2]), Some(3));
        assert_eq!(Dtype::F32.tensor_bytes(&[]), Some(4));
        assert_eq!(Dtype::U64.tensor_bytes(&[u64::MAX, 2]), None);
    }
}
