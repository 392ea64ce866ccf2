//! Groups expert tensors into records: which tensors a layer's experts have, and where they lie.
//!
//! Everything that the experts of a layer must have in common is checked here. A per-expert
//! tensor costs 20 bytes, its name and shape are kept once per layer.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::PackError;
use super::config::{Config, Disagreement};
use super::header::Entry;
use super::names::{Aside, Place, Role};
use super::source::{LayerSource, Spot, TensorSource};
use crate::dtype::Dtype;
use crate::layout::{ExpertLayout, ExpertRecordSpec, LayerLayout, TensorSpec};

/// A tensor of a shard.
pub(super) struct Found {
    pub(super) shard: u32,
    /// Where in the file its bytes start.
    pub(super) offset: u64,
    pub(super) entry: Entry,
}

/// Every tree of layers of a checkpoint.
#[derive(Default)]
pub(super) struct Trees {
    /// By prefix.
    layered: BTreeMap<String, Tree>,
    /// Parts of the model with experts whose names have no `layers.<number>`: what a summary calls
    /// them, and the first tensor of each.
    unlayered: BTreeMap<String, String>,
    /// Routed experts below another segment than `experts`, and the first tensor of each.
    other_names: BTreeMap<String, String>,
}

#[derive(Default)]
struct Tree {
    /// All layers, dense ones too.
    layers: BTreeSet<u32>,
    moe: BTreeMap<u32, Layer>,
}

/// The expert tensors of a layer, by their name after `layers.<n>.`.
#[derive(Default)]
struct Layer(BTreeMap<String, Tensor>);

struct Tensor {
    kind: Kind,
    at: Places,
    /// The first expert whose tensor is of another kind.
    conflict: Option<Conflict>,
}

struct Conflict {
    expert: u32,
    kind: Kind,
    /// Experts whose tensors are not of the first one's kind.
    experts: u64,
}

enum Places {
    Each(Vec<(u32, Spot)>),
    Fused(Spot),
}

#[derive(PartialEq, Eq)]
struct Kind {
    dtype: String,
    shape: Vec<u64>,
}

impl Kind {
    /// Whether it is one value, be its shape `[]` or `[1]`.
    fn is_single(&self) -> bool {
        self.shape.iter().all(|&dim| dim == 1)
    }

    /// Whether a tensor without an expert's number is one value that each of `experts` has: a
    /// scale for all of them, say.
    fn is_shared(&self, experts: u32) -> bool {
        self.is_single() && self.shape.first() != Some(&u64::from(experts))
    }
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?}", self.dtype, self.shape)
    }
}

/// What [`Trees::records`] makes of a checkpoint.
pub(super) struct Records {
    pub(super) layout: ExpertLayout,
    /// The prefix of the tree that is packed.
    pub(super) main: String,
    pub(super) sources: Vec<LayerSource>,
    pub(super) left_dense: Vec<String>,
}

impl Trees {
    /// Adds the tensor `name`; of a dense one only its layer is kept.
    pub(super) fn add(&mut self, name: &str, place: Place<'_>, found: Found) {
        let (asides, path) = match place.aside {
            Some(Aside::NoLayer { path }) => (&mut self.unlayered, path),
            Some(Aside::OtherName { path }) => (&mut self.other_names, path),
            None => (&mut self.other_names, ""),
        };
        if !path.is_empty() && !asides.contains_key(path) {
            asides.insert(path.into(), name.into());
        }
        let Some((prefix, number)) = place.layer else { return };
        if !self.layered.contains_key(prefix) {
            self.layered.insert(prefix.into(), Tree::default());
        }
        let Some(tree) = self.layered.get_mut(prefix) else { return };
        tree.layers.insert(number);
        let Some(role) = place.role else { return };
        let layer = tree.moe.entry(number).or_default();
        let spot = Spot { shard: found.shard, offset: found.offset };
        let kind = Kind { dtype: found.entry.dtype, shape: found.entry.shape };
        match role {
            Role::Fused { name } => {
                let tensor = Tensor { kind, at: Places::Fused(spot), conflict: None };
                layer.0.insert(name, tensor);
            }
            Role::Each { expert, name } => layer.add_expert(expert, name, spot, kind),
        }
    }

    /// The prefix of the tree that is packed: of those with experts the one with most MoE layers,
    /// then most layers, then the first by name.
    pub(super) fn main(&self) -> Option<&str> {
        let size = |tree: &Tree| (tree.moe.len(), tree.layers.len());
        // `rev`, since of equal maxima the last is taken.
        let main = self.layered.iter().rev().max_by_key(|(_, tree)| size(tree));
        main.filter(|(_, tree)| !tree.moe.is_empty()).map(|(prefix, _)| prefix.as_str())
    }

    /// Lays out the main tree.
    pub(super) fn records(
        self,
        path: &Path,
        config: &Config,
        chunk_bytes: u32,
    ) -> Result<Records, PackError> {
        let main = self.main().map(str::to_owned);
        let packed = main.as_ref().and_then(|main| self.layered.get(main));
        self.check_unlayered(packed.map_or(0, |tree| tree.moe.len()))?;
        let Some(main) = main else { return Err(self.dense(path, config)) };
        let mut left_dense: Vec<String> = self.unlayered.into_keys().collect();
        left_dense.extend(self.other_names.into_keys());
        let (mut layers, mut sources) = (Vec::new(), Vec::new());
        for (prefix, tree) in self.layered {
            if prefix != main {
                left_dense.extend(tree.moe.keys().map(|n| format!("{prefix}layers.{n}")));
                continue;
            }
            let numbers: Vec<u32> = tree.moe.keys().copied().collect();
            for (position, (number, layer)) in tree.moe.into_iter().enumerate() {
                let prefix = format!("{prefix}layers.{number}.");
                let context = Context { number, numbers: &numbers, position, prefix, config };
                let (layout, source) = layer.records(&context, chunk_bytes)?;
                layers.push(layout);
                sources.push(source);
            }
        }
        left_dense.sort_by(|a, b| by_number(a).cmp(by_number(b)));
        Ok(Records { layout: ExpertLayout::new(layers)?, main, sources, left_dense })
    }

    /// Refuses experts outside of `layers.<number>` that would be the main tree if they were
    /// understood: more MoE layers than the `packed` ones, however they are numbered.
    fn check_unlayered(&self, packed: usize) -> Result<(), PackError> {
        let stem = |path: &str| path.trim_end_matches(|c: char| c.is_ascii_digit()).to_owned();
        let mut sizes: BTreeMap<String, usize> = BTreeMap::new();
        for (path, tensor) in &self.unlayered {
            let size = sizes.entry(stem(path)).or_default();
            *size += 1;
            if *size > packed {
                let mut why = "no `layers.<number>` before `experts`".to_owned();
                if packed > 0 {
                    why.push_str(&format!(
                        ", and there are more such layers than the {packed} that would be packed"
                    ));
                }
                return Err(PackError::NotUnderstood { tensor: tensor.clone(), why });
            }
        }
        Ok(())
    }

    fn dense(&self, path: &Path, config: &Config) -> PackError {
        let mut why = match config.experts() {
            Some(stated) => format!(
                "config.json says {stated}, but no tensor is named `...layers.<n>...experts...` or \
                 `...layers.<n>...block_sparse_moe.{{input,output}}_linear...`"
            ),
            None => "it is a dense model".into(),
        };
        if let Some(tensor) = self.other_names.values().next() {
            why = format!(
                "its routed experts have a name that is not understood, {tensor}; their segment \
                 would have to be `experts`"
            );
        }
        PackError::Dense { path: path.into(), why }
    }
}

/// Text cut into parts that compare so that `layers.9` comes before `layers.10`.
fn by_number(text: &str) -> impl Iterator<Item = (u64, &str)> {
    text.split('.').map(|segment| (segment.parse().unwrap_or(u64::MAX), segment))
}

/// A layer's place in its model, for comparing and for naming.
struct Context<'a> {
    number: u32,
    numbers: &'a [u32],
    position: usize,
    prefix: String,
    config: &'a Config,
}

impl Context<'_> {
    fn full_name(&self, name: &str, expert: u32) -> String {
        format!("{}{}", self.prefix, name.replacen('*', &expert.to_string(), 1))
    }

    fn not_understood(&self, name: &str, why: String) -> PackError {
        PackError::NotUnderstood { tensor: self.full_name(name, 0), why }
    }
}

impl Layer {
    fn add_expert(&mut self, expert: u32, name: String, spot: Spot, kind: Kind) {
        let Some(tensor) = self.0.get_mut(&name) else {
            let at = Places::Each(vec![(expert, spot)]);
            self.0.insert(name, Tensor { kind, at, conflict: None });
            return;
        };
        // A fused tensor's name never has the `*` that every name here has.
        if let Places::Each(spots) = &mut tensor.at {
            spots.push((expert, spot));
        }
        if tensor.kind != kind {
            let first = Conflict { expert, kind, experts: 0 };
            tensor.conflict.get_or_insert(first).experts += 1;
        }
    }

    fn records(
        mut self,
        context: &Context<'_>,
        chunk_bytes: u32,
    ) -> Result<(LayerLayout, LayerSource), PackError> {
        if let Some((name, _)) = self.0.iter().find(|(name, _)| is_bitsandbytes(name)) {
            return Err(PackError::Unsupported {
                tensor: context.full_name(name, 0),
                kind: "of a bitsandbytes 4-bit checkpoint",
                needed: "the state of such a tensor differs in length from expert to expert, and all \
                         records of a layer have one layout: pack the checkpoint that was quantised, \
                         or one in another format (FP8, GPTQ, AWQ, NVFP4)",
            });
        }
        for tensor in self.0.values_mut() {
            if let Places::Each(spots) = &mut tensor.at {
                spots.sort_unstable_by_key(|&(expert, _)| expert);
            }
        }
        self.check_siblings(context)?;
        let experts = self.count_experts(context)?;
        let mut specs = Vec::new();
        let mut tensors = Vec::new();
        // In byte order of the names, which is the order in a record.
        for (name, tensor) in self.0 {
            let dtype: Dtype = tensor
                .kind
                .dtype
                .parse()
                .map_err(|e| context.not_understood(&name, format!("{e}")))?;
            let (shape, source) = match tensor.at {
                Places::Each(spots) => {
                    let spots = spots.into_iter().map(|(_, spot)| spot).collect();
                    (tensor.kind.shape, TensorSource::Each(spots))
                }
                Places::Fused(spot) if tensor.kind.is_shared(experts) => {
                    (tensor.kind.shape, TensorSource::Shared(spot))
                }
                Places::Fused(spot) => (tensor.kind.shape[1..].to_vec(), TensorSource::Fused(spot)),
            };
            if dtype.tensor_bytes(&shape).is_none() {
                let why = format!("{dtype} {shape:?} per expert is no whole number of bytes");
                return Err(context.not_understood(&name, why));
            }
            specs.push(TensorSpec { name, dtype, shape, offset: 0, bytes: 0 });
            tensors.push(source);
        }
        let spec = ExpertRecordSpec::lay_out(specs)?;
        let prefix = context.prefix.clone();
        let layout = LayerLayout::new(context.number, experts, prefix, spec, chunk_bytes)?;
        Ok((layout, LayerSource { tensors }))
    }

    /// Experts 0 to the highest number must each have every tensor, of one type and shape.
    fn check_siblings(&self, context: &Context<'_>) -> Result<(), PackError> {
        let experts = self.highest_expert().map_or(0, |(_, highest)| highest + 1);
        for (name, tensor) in &self.0 {
            let Places::Each(spots) = &tensor.at else { continue };
            if let Some(Conflict { expert, kind, experts: differ }) = &tensor.conflict {
                return Err(PackError::SiblingDiffers {
                    tensor: context.full_name(name, *expert),
                    found: kind.to_string(),
                    sibling: context.full_name(name, first_other(spots, *expert)),
                    expected: tensor.kind.to_string(),
                    layer: context.number,
                    differ: *differ,
                    experts: spots.len() as u64,
                });
            }
            let there = spots.iter().map(|&(expert, _)| expert);
            if let Some(missing) = (0..experts)
                .zip(there.map(Some).chain(std::iter::repeat(None)))
                .find_map(|(wanted, found)| (found != Some(wanted)).then_some(wanted))
            {
                return Err(PackError::MissingTensor {
                    tensor: context.full_name(name, missing),
                    sibling: context.full_name(name, spots[0].0),
                });
            }
        }
        Ok(())
    }

    /// The highest expert with a tensor of its own, and that tensor's name.
    fn highest_expert(&self) -> Option<(&str, u32)> {
        self.0
            .iter()
            .filter_map(|(name, tensor)| match &tensor.at {
                Places::Each(spots) => Some((name.as_str(), spots.last()?.0)),
                Places::Fused(_) => None,
            })
            .max_by_key(|&(_, expert)| expert)
    }

    /// The layer's number of experts, on which all its tensors and the config must agree.
    fn count_experts(&self, context: &Context<'_>) -> Result<u32, PackError> {
        let fused = |tensor: &Tensor| match &tensor.at {
            Places::Fused(_) => Some(tensor.kind.shape.first().copied()),
            Places::Each(_) => None,
        };
        let (count, witness) = match self.highest_expert() {
            Some((name, highest)) => (u64::from(highest) + 1, context.full_name(name, highest)),
            None => self.fused_consensus(context),
        };
        for (name, tensor) in &self.0 {
            let kind = &tensor.kind;
            let why = match fused(tensor) {
                _ if count == 0 => {
                    "it is a scalar, and nothing says how many experts have it".into()
                }
                Some(first) if first != Some(count) && !kind.is_single() => format!(
                    "{kind} has a first dimension of {}, layer {} has {count} experts",
                    first.unwrap_or(0),
                    context.number
                ),
                _ => continue,
            };
            return Err(context.not_understood(name, why));
        }
        let (numbers, position) = (context.numbers, context.position);
        if let Some(Disagreement { key, stated }) =
            context.config.disagrees(numbers, position, count)
        {
            let layer = context.number;
            return Err(PackError::ExpertCount {
                key,
                stated,
                layer,
                found: count,
                tensor: witness,
            });
        }
        // Beyond 32 bits the layout's own limit would be exceeded too.
        Ok(u32::try_from(count).unwrap_or(u32::MAX))
    }

    /// Of a layer with fused tensors only: the first dimension that the config states, if a
    /// tensor has it, else the one that most tensors have, and a tensor that has it. A single
    /// value counts only where there is nothing else: all experts may share it.
    fn fused_consensus(&self, context: &Context<'_>) -> (u64, String) {
        let mut votes: BTreeMap<u64, (usize, &str)> = BTreeMap::new();
        let only_singles = self.0.values().all(|tensor| tensor.kind.is_single());
        let voters = self.0.iter().filter(|(_, t)| only_singles || !t.kind.is_single());
        for (name, tensor) in voters {
            if let Some(&first) = tensor.kind.shape.first() {
                votes.entry(first).or_insert((0, name)).0 += 1;
            }
        }
        let (numbers, position) = (context.numbers, context.position);
        let stated = |count: &u64| context.config.states(numbers, position, *count);
        let best = votes.iter().max_by_key(|(count, (votes, _))| (stated(count), *votes));
        best.map_or((0, String::new()), |(count, (_, name))| (*count, context.full_name(name, 0)))
    }
}

/// Whether a tensor holds what bitsandbytes keeps beside 4-bit weights.
fn is_bitsandbytes(name: &str) -> bool {
    name.split('.').any(|segment| segment.starts_with("bitsandbytes__") || segment == "quant_map")
}

fn first_other(spots: &[(u32, Spot)], expert: u32) -> u32 {
    spots.iter().map(|&(other, _)| other).find(|&other| other != expert).unwrap_or(expert)
}
