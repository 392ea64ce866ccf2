//! Stores of made-up weights, for benchmarks and tests.
//!
//! The payload of a record is a function of seed, layer and expert alone, so that anybody can
//! compute what a fetch must return without having the store. Word `i` (8 bytes, little-endian)
//! of a payload is `mix(base + (i + 1) x GAMMA)`, where
//! `base = mix(mix(mix(seed) ^ layer) ^ expert)` and `mix` is the finalizer of SplitMix64; all
//! arithmetic is modulo 2^64. docs/store-format.md repeats this for readers in other languages.

use std::fmt;
use std::str::FromStr;

use super::PackError;
use crate::dtype::Dtype;
use crate::key::ExpertKey;
use crate::layout::{
    ExpertLayout, ExpertRecordSpec, LayerLayout, LayoutError, MAX_EXPERTS, MAX_LAYERS,
    MAX_PAYLOAD_BYTES, TensorSpec,
};

const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// The shape of a synthetic store; reads `layers=4,experts=16,bytes=1048576/65536,seed=1`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SyntheticSpec {
    layers: u32,
    experts: u32,
    payload_bytes: Vec<u64>,
    seed: u64,
}

impl SyntheticSpec {
    /// A store of `layers` layers, numbered from 0, with `experts` records each; layer `n` has
    /// payloads of `payload_bytes[n % len]` bytes.
    ///
    /// # Errors
    /// A number is zero or exceeds what a store can hold.
    pub fn new(
        layers: u32,
        experts: u32,
        payload_bytes: &[u64],
        seed: u64,
    ) -> Result<Self, PackError> {
        let spec = Self { layers, experts, payload_bytes: payload_bytes.into(), seed };
        match spec.fault() {
            Some(why) => Err(PackError::Synthetic { text: spec.to_string(), why }),
            None => Ok(spec),
        }
    }

    fn fault(&self) -> Option<String> {
        if self.layers == 0 || self.layers as usize > MAX_LAYERS {
            return Some(format!("layers is {}, allowed is 1 to {MAX_LAYERS}", self.layers));
        }
        if self.experts == 0 || self.experts > MAX_EXPERTS {
            return Some(format!("experts is {}, allowed is 1 to {MAX_EXPERTS}", self.experts));
        }
        let limits = 1..=MAX_PAYLOAD_BYTES;
        if self.payload_bytes.is_empty() || self.payload_bytes.len() > MAX_LAYERS {
            return Some(format!("bytes has {} lengths", self.payload_bytes.len()));
        }
        let bad = self.payload_bytes.iter().find(|bytes| !limits.contains(bytes))?;
        Some(format!("bytes is {bad}, allowed is 1 to {MAX_PAYLOAD_BYTES}"))
    }

    /// The payload of `key`, whole. For tests; [`fill`](Self::fill) writes any part of it.
    #[must_use]
    pub fn payload(&self, key: ExpertKey) -> Vec<u8> {
        let mut payload = vec![0; usize::try_from(self.layer_bytes(key.layer)).unwrap_or(0)];
        self.fill(key, 0, &mut payload);
        payload
    }

    /// Writes the bytes of `key`'s payload that start at `offset` into `out`.
    pub fn fill(&self, key: ExpertKey, offset: u64, out: &mut [u8]) {
        let base = mix(mix(mix(self.seed) ^ u64::from(key.layer)) ^ u64::from(key.expert));
        let word = |i: u64| mix(base.wrapping_add(i.wrapping_add(1).wrapping_mul(GAMMA)));
        // The few bytes up to the first whole word, then words, then what is left.
        let skipped = (offset % 8) as usize;
        let lead = ((8 - skipped) % 8).min(out.len());
        let (head, rest) = out.split_at_mut(lead);
        head.copy_from_slice(&word(offset / 8).to_le_bytes()[skipped..][..lead]);
        let first = offset.div_ceil(8);
        let mut words = rest.chunks_exact_mut(8);
        let mut i = first;
        for chunk in &mut words {
            chunk.copy_from_slice(&word(i).to_le_bytes());
            i += 1;
        }
        let tail = words.into_remainder();
        let last = word(i).to_le_bytes();
        tail.copy_from_slice(&last[..tail.len()]);
    }

    fn layer_bytes(&self, layer: u32) -> u64 {
        self.payload_bytes[layer as usize % self.payload_bytes.len()]
    }

    pub(super) fn layout(&self, chunk_bytes: u32) -> Result<ExpertLayout, LayoutError> {
        let layer = |n: u32| {
            let tensor = TensorSpec {
                name: "mlp.experts.*.weight".into(),
                dtype: Dtype::U8,
                shape: vec![self.layer_bytes(n)],
                offset: 0,
                bytes: 0,
            };
            let spec = ExpertRecordSpec::lay_out(vec![tensor])?;
            LayerLayout::new(n, self.experts, format!("model.layers.{n}."), spec, chunk_bytes)
        };
        ExpertLayout::new((0..self.layers).map(layer).collect::<Result<_, _>>()?)
    }
}

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl fmt::Display for SyntheticSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layers={},experts={},bytes=", self.layers, self.experts)?;
        for (i, bytes) in self.payload_bytes.iter().enumerate() {
            write!(f, "{}{bytes}", if i == 0 { "" } else { "/" })?;
        }
        write!(f, ",seed={}", self.seed)
    }
}

impl FromStr for SyntheticSpec {
    type Err = PackError;

    /// Reads `key=value` pairs separated by commas: `layers`, `experts` and `bytes` are needed,
    /// `seed` is 0 where it is not given.
    fn from_str(text: &str) -> Result<Self, PackError> {
        let bad =
            |why: String| PackError::Synthetic { text: text.chars().take(200).collect(), why };
        let (mut layers, mut experts, mut bytes, mut seed) = (None, None, None, None);
        for pair in text.split(',') {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(bad(format!("{pair:?} is not KEY=VALUE")));
            };
            let number = |text: &str| {
                text.parse::<u64>().map_err(|error| bad(format!("{key}={text}: {error}")))
            };
            let twice = match key {
                "layers" => layers.replace(number(value)?).is_some(),
                "experts" => experts.replace(number(value)?).is_some(),
                "seed" => seed.replace(number(value)?).is_some(),
                "bytes" => {
                    let lengths: Result<Vec<_>, _> = value.split('/').map(number).collect();
                    bytes.replace(lengths?).is_some()
                }
                _ => return Err(bad(format!("unknown key {key:?}"))),
            };
            if twice {
                return Err(bad(format!("{key} is given twice")));
            }
        }
        let count = |value: Option<u64>, key: &str| {
            let value = value.ok_or_else(|| bad(format!("{key} is missing")))?;
            u32::try_from(value).map_err(|_| bad(format!("{key} is {value}: too many")))
        };
        let bytes = bytes.ok_or_else(|| bad("bytes is missing".into()))?;
        Self::new(count(layers, "layers")?, count(experts, "experts")?, &bytes, seed.unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_reads_back_what_it_prints() {
        let spec: SyntheticSpec = "layers=4,experts=16,bytes=1048576/65536,seed=1".parse().unwrap();
        assert_eq!(spec.to_string().parse::<SyntheticSpec>().unwrap(), spec);
        assert_eq!("experts=2,layers=1,bytes=9".parse::<SyntheticSpec>().unwrap().seed, 0);
        let layout = spec.layout(4096).unwrap();
        let bytes: Vec<_> = layout.layers().iter().map(|l| l.spec().payload_bytes()).collect();
        assert_eq!(bytes, [1_048_576, 65_536, 1_048_576, 65_536]);
    }

    #[test]
    fn a_bad_description_names_what_is_wrong() {
        for (text, named) in [
            ("layers=4,bytes=1", "experts is missing"),
            ("layers=4", "bytes is missing"),
            ("layers=0,experts=1,bytes=1", "layers is 0"),
            ("layers=1,experts=70000,bytes=1", "experts is 70000"),
            ("layers=1,experts=1,bytes=4/0", "bytes is 0"),
            ("layers=1,experts=1,bytes=", "bytes="),
            ("layers=1,layers=2,experts=1,bytes=1", "layers is given twice"),
            ("layers=1,experts=1,bytes=1,color=2", "unknown key \"color\""),
            ("layers", "is not KEY=VALUE"),
            ("layers=99999999999,experts=1,bytes=1", "too many"),
        ] {
            let error = text.parse::<SyntheticSpec>().expect_err(text).to_string();
            assert!(error.contains(named), "{text}: {error}");
        }
    }

    #[test]
    fn the_content_is_frozen() {
        let spec = SyntheticSpec::new(4, 16, &[20], 1).unwrap();
        let hex: String =
            spec.payload(ExpertKey::new(2, 3)).iter().map(|b| format!("{b:02x}")).collect();
        // Computed apart from this code, in Python.
        assert_eq!(hex, "e8ad1f3bbb5d4eae9c8a8642075ad585db321e71");
    }

    #[test]
    fn any_part_of_a_payload_is_the_same_bytes() {
        let spec = SyntheticSpec::new(1, 1, &[100], 7).unwrap();
        let key = ExpertKey::new(0, 0);
        let whole = spec.payload(key);
        for start in 0..40 {
            for end in start..60 {
                let mut part = vec![0; end - start];
                spec.fill(key, start as u64, &mut part);
                assert_eq!(part, whole[start..end], "{start}..{end}");
            }
        }
    }
}
