//! The name of an expert record.

use std::fmt;

/// Names one expert of one layer.
///
/// `layer` is the model's own layer number (the number after the path segment `layers` in the
/// checkpoint), so a model whose first layers are dense starts at a number above zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ExpertKey {
    /// The model's own layer number.
    pub layer: u32,
    /// The expert's index within the layer, from 0.
    pub expert: u32,
}

impl ExpertKey {
    /// Names expert `expert` of layer `layer`.
    #[must_use]
    pub const fn new(layer: u32, expert: u32) -> Self {
        Self { layer, expert }
    }
}

impl fmt::Display for ExpertKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {} expert {}", self.layer, self.expert)
    }
}
