//! Routing traces: which experts a model asked for, step by step.
//!
//! JSON lines, one acquire a line, in order:
//! `{"step":0,"layer":3,"experts":[5,1],"weights":[0.7,0.3]}`. `step` numbers forward passes,
//! `experts` is the union over the batch, `weights` may be missing. Other fields are passed over.

use std::fmt;
use std::io::{self, BufRead, Read};

use serde::Deserialize;
use serde::de::{Deserializer, Error, Unexpected, Visitor};

use crate::key::ExpertKey;
use crate::layout::MAX_EXPERTS;

/// Longest line accepted: room for every expert of the largest layer, with weights.
pub const MAX_LINE_BYTES: u64 = 4 << 20;

const EXAMPLE: &str = r#"{"step":0,"layer":3,"experts":[5,1]}"#;

/// One layer of one forward pass.
#[derive(Clone, PartialEq, Debug, Deserialize)]
pub struct Acquire {
    /// The forward pass.
    #[serde(deserialize_with = "number")]
    pub step: u64,
    /// The model's own layer number.
    #[serde(deserialize_with = "number")]
    pub layer: u32,
    /// The experts routed to.
    #[serde(deserialize_with = "numbers")]
    pub experts: Vec<u32>,
    /// The router's weights, one per expert, where the trace has them.
    #[serde(default, deserialize_with = "weights")]
    pub weights: Option<Vec<f32>>,
}

impl Acquire {
    /// The records needed.
    pub fn keys(&self) -> impl Iterator<Item = ExpertKey> + '_ {
        self.experts.iter().map(|&expert| ExpertKey::new(self.layer, expert))
    }
}

/// A line that is no acquire.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file could not be read.
    #[error("cannot read the trace: {0}")]
    Io(#[from] io::Error),
    /// The line is not JSON of the right shape.
    #[error("line {line} of the trace: expected {EXAMPLE}, weights or not; column {column}: {why}")]
    Json {
        /// The line's number, from 1.
        line: u64,
        /// Where in the line, from 1.
        column: usize,
        /// What is wrong with it.
        why: String,
    },
    /// The line exceeds a limit, or its parts do not fit each other.
    #[error("line {line} of the trace: {what} is {found}, allowed is {limit}")]
    Range {
        /// The line's number, from 1.
        line: u64,
        /// What is out of range.
        what: &'static str,
        /// The number found.
        found: u64,
        /// The number allowed.
        limit: u64,
    },
}

/// Reads a trace line by line.
#[derive(Debug)]
pub struct TraceReader<R> {
    input: R,
    line: u64,
    text: Vec<u8>,
}

impl<R: BufRead> TraceReader<R> {
    /// Reads from `input`.
    #[must_use]
    pub fn new(input: R) -> Self {
        Self { input, line: 0, text: Vec::new() }
    }

    /// The next acquire, or `None` at the end; empty lines are passed over.
    ///
    /// # Errors
    /// The input failed, or the line is no acquire.
    pub fn read(&mut self) -> Result<Option<Acquire>, TraceError> {
        loop {
            self.line += 1;
            self.text.clear();
            let mut limited = self.input.by_ref().take(MAX_LINE_BYTES + 1);
            if limited.read_until(b'\n', &mut self.text)? == 0 {
                return Ok(None);
            }
            self.bounded("its length in bytes", self.text.len() as u64, MAX_LINE_BYTES)?;
            let text = self.text.trim_ascii();
            if text.is_empty() {
                continue;
            }
            let line = self.line;
            // serde would take a list of the values too.
            if !text.starts_with(b"{") {
                let why = "not a JSON object".into();
                return Err(TraceError::Json { line, column: 1, why });
            }
            let acquire: Acquire =
                serde_json::from_slice(text).map_err(|error| not_an_acquire(line, &error))?;
            let experts = acquire.experts.len() as u64;
            self.bounded("its number of experts", experts, u64::from(MAX_EXPERTS))?;
            if let Some(weights) = &acquire.weights
                && weights.len() as u64 != experts
            {
                let (what, found) = ("its number of weights", weights.len() as u64);
                return Err(TraceError::Range { line, what, found, limit: experts });
            }
            return Ok(Some(acquire));
        }
    }

    fn bounded(&self, what: &'static str, found: u64, limit: u64) -> Result<(), TraceError> {
        if found <= limit {
            return Ok(());
        }
        Err(TraceError::Range { line: self.line, what, found, limit })
    }
}

impl<R: BufRead> Iterator for TraceReader<R> {
    type Item = Result<Acquire, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
    }
}

fn not_an_acquire(line: u64, error: &serde_json::Error) -> TraceError {
    // The parser was given one line and counts it as its first.
    let (text, place) = (error.to_string(), format!(" at line 1 column {}", error.column()));
    let why = text.strip_suffix(&place).unwrap_or(&text).into();
    TraceError::Json { line, column: error.column(), why }
}

/// A whole number; errors say so in words for people who do not know this program's types.
struct Whole<T>(T);

impl<'de, T: TryFrom<u64>> Deserialize<'de> for Whole<T> {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        struct WholeVisitor;

        impl Visitor<'_> for WholeVisitor {
            type Value = u64;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number that is not negative")
            }

            fn visit_u64<E>(self, found: u64) -> Result<u64, E> {
                Ok(found)
            }
        }

        let found = input.deserialize_u64(WholeVisitor)?;
        let smaller = || Error::invalid_value(Unexpected::Unsigned(found), &"a smaller number");
        T::try_from(found).map(Self).map_err(|_| smaller())
    }
}

fn number<'de, D: Deserializer<'de>, T: TryFrom<u64>>(input: D) -> Result<T, D::Error> {
    Whole::deserialize(input).map(|Whole(number)| number)
}

fn numbers<'de, D: Deserializer<'de>>(input: D) -> Result<Vec<u32>, D::Error> {
    let numbers = Vec::<Whole<u32>>::deserialize(input)?;
    Ok(numbers.into_iter().map(|Whole(number)| number).collect())
}

/// A number with or without a fraction.
struct Weight(f32);

impl<'de> Deserialize<'de> for Weight {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        struct WeightVisitor;

        impl Visitor<'_> for WeightVisitor {
            type Value = f32;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number")
            }

            fn visit_f64<E>(self, found: f64) -> Result<f32, E> {
                Ok(found as f32)
            }

            fn visit_u64<E>(self, found: u64) -> Result<f32, E> {
                Ok(found as f32)
            }

            fn visit_i64<E>(self, found: i64) -> Result<f32, E> {
                Ok(found as f32)
            }
        }

        input.deserialize_f32(WeightVisitor).map(Self)
    }
}

fn weights<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Vec<f32>>, D::Error> {
    let weights = Option::<Vec<Weight>>::deserialize(input)?;
    Ok(weights.map(|weights| weights.into_iter().map(|Weight(weight)| weight).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(text: &str) -> Result<Vec<Acquire>, TraceError> {
        TraceReader::new(text.as_bytes()).collect()
    }

    #[test]
    fn lines_with_and_without_weights_are_read_in_order() {
        let text = "{\"step\":0,\"layer\":3,\"experts\":[5,1],\"weights\":[0.5,0.25]}\n\n\
                    {\"step\":1,\"layer\":3,\"experts\":[]}";
        let acquires = all(text).unwrap();
        assert_eq!(acquires.len(), 2);
        let keys: Vec<_> = acquires[0].keys().collect();
        assert_eq!(keys, [ExpertKey::new(3, 5), ExpertKey::new(3, 1)]);
        assert_eq!(acquires[0].weights.as_deref(), Some(&[0.5, 0.25][..]));
        assert_eq!(acquires[1].weights, None);
    }

    #[test]
    fn a_bad_line_is_named_by_its_number() {
        let error = |text: &str| all(text).unwrap_err().to_string();
        let good = "{\"step\":0,\"layer\":3,\"experts\":[5]}\n";
        assert!(error(&format!("{good}nonsense")).starts_with("line 2 of the trace"));
        let list = error("[0,3,[5]]");
        assert!(list.contains(EXAMPLE) && list.ends_with("column 1: not a JSON object"), "{list}");
        let weights = "{\"step\":0,\"layer\":3,\"experts\":[5],\"weights\":[]}";
        assert!(error(weights).contains("weights is 0, allowed is 1"));
        let long = " ".repeat(usize::try_from(MAX_LINE_BYTES).unwrap() + 1);
        assert!(error(&long).contains("length"));
    }
    #[test]
    fn what_is_wrong_with_a_line_is_said_without_names_of_this_programs_types() {
        for (text, why) in [
            (r#"{"step":0,"layer":3}"#, "column 20: missing field `experts`"),
            (r#"{"step":0,"layer":"x","experts":[]}"#, "\"x\", expected a whole number"),
            (r#"{"step":0,"layer":-1,"experts":[]}"#, "`-1`, expected a whole number"),
            (r#"{"step":0,"layer":1.5,"experts":[]}"#, "expected a whole number"),
            (r#"{"step":0,"layer":4294967296,"experts":[]}"#, "expected a smaller number"),
            (r#"{"step":0,"layer":3,"experts":{}}"#, "expected a sequence"),
            (r#"{"step":0,"layer":3,"experts":[[]]}"#, "expected a whole number"),
            (r#"{"step":0,"layer":3,"experts":[1],"weights":["x"]}"#, "expected a number"),
            (r#"{"step":0,"layer":3,"experts":[1],"weights":0.5}"#, "expected a sequence"),
            (r#"{"step":0,"step":0}"#, "duplicate field `step`"),
            (r#"{"step":0,"layer""#, "EOF while parsing"),
        ] {
            let error = all(text).unwrap_err().to_string();
            assert!(error.contains(EXAMPLE) && error.contains(why), "{error}");
            for ours in ["Acquire", "u64", "u32", "f32", "struct", "line 1 column"] {
                assert!(!error.contains(ours), "{error}");
            }
        }
        let whole = r#"{"step":0,"layer":3,"experts":[1,2],"weights":[1,-2],"note":"other"}"#;
        assert_eq!(all(whole).unwrap()[0].weights.as_deref(), Some(&[1.0, -2.0][..]));
    }
}
