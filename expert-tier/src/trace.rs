//! Routing traces: which experts a model asked for, step by step.
//!
//! JSON lines, one acquire a line, in order:
//! `{"step":0,"layer":3,"experts":[5,1],"weights":[0.7,0.3]}`. `step` numbers forward passes,
//! `experts` is the union over the batch, `weights` may be missing.

use std::io::{self, BufRead, Read};

use serde::Deserialize;

use crate::key::ExpertKey;
use crate::layout::MAX_EXPERTS;

/// Longest line accepted: room for every expert of the largest layer, with weights.
pub const MAX_LINE_BYTES: u64 = 4 << 20;

/// One layer of one forward pass.
#[derive(Clone, PartialEq, Debug, Deserialize)]
pub struct Acquire {
    /// The forward pass.
    pub step: u64,
    /// The model's own layer number.
    pub layer: u32,
    /// The experts routed to.
    pub experts: Vec<u32>,
    /// The router's weights, one per expert, where the trace has them.
    #[serde(default)]
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
    #[error("line {line} of the trace: {source}")]
    Json {
        /// The line's number, from 1.
        line: u64,
        /// What is wrong with it.
        source: serde_json::Error,
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
                let source = serde::de::Error::custom("not a JSON object");
                return Err(TraceError::Json { line, source });
            }
            let acquire: Acquire =
                serde_json::from_slice(text).map_err(|source| TraceError::Json { line, source })?;
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
        assert!(error("[0,3,[5]]").contains("line 1 of the trace: not a JSON object"));
        let weights = "{\"step\":0,\"layer\":3,\"experts\":[5],\"weights\":[]}";
        assert!(error(weights).contains("weights is 0, allowed is 1"));
        let long = " ".repeat(usize::try_from(MAX_LINE_BYTES).unwrap() + 1);
        assert!(error(&long).contains("length"));
    }
}
