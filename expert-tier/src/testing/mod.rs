//! What tests of this crate and of those above it share: small stores, a backend that fails on
//! demand, and the contract that every backend must keep.

#![allow(clippy::missing_panics_doc, reason = "a failed expectation is how a test speaks")]

use crate::dtype::Dtype;
use crate::layout::{ExpertLayout, ExpertRecordSpec, LayerLayout, TensorSpec};
use crate::store::manifest::Manifest;

/// A manifest of two layers of four experts, without a store behind it; `seed` makes it another.
#[must_use]
pub fn tiny_manifest(seed: u8) -> Manifest {
    let tensor = |name: &str, shape: &[u64]| TensorSpec {
        name: name.into(),
        dtype: Dtype::Bf16,
        shape: shape.into(),
        offset: 0,
        bytes: 0,
    };
    let layer = |number: u32, rows: u64| {
        let tensors = vec![tensor("mlp.experts.*.up.weight", &[rows, 64]), tensor("b", &[64])];
        let spec = ExpertRecordSpec::lay_out(tensors).expect("small tensors are within limits");
        LayerLayout::new(number, 4, format!("model.layers.{number}."), spec, 4096)
            .expect("four experts are within limits")
    };
    let layout = ExpertLayout::new(vec![layer(1, 32), layer(3, 80)]).expect("ascending");
    Manifest::new("tiny".into(), layout, vec![[seed; 32], [seed; 32]])
}
