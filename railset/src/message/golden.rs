//! What decoders say of golden bytes that were changed.

use std::fmt::Debug;

use crate::wire::DecodeError;

type Decode<T> = fn(&[u8]) -> Result<T, DecodeError>;

/// Fails unless `golden` is a body, and neither a cut of it nor a longer one is.
pub(super) fn assert_length_matters<T: Debug>(golden: &[u8], decode: Decode<T>) {
    decode(golden).unwrap();
    for length in 0..golden.len() {
        decode(&golden[..length]).expect_err(&format!("{length} of {}", golden.len()));
    }
    decode(&[golden, &[0]].concat()).expect_err("a byte behind the end");
}

/// The refusal of `golden` with one byte changed.
pub(super) fn refusal<T: Debug>(golden: &[u8], at: usize, value: u8, decode: Decode<T>) -> String {
    let mut bytes = golden.to_vec();
    bytes[at] = value;
    decode(&bytes).unwrap_err().to_string()
}
