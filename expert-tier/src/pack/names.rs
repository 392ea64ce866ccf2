//! Tells expert tensors from dense ones by the structure of their names.
//!
//! Names are paths with segments between dots. `layers.<n>` places a tensor in layer `n` of the
//! tree that the segments before it name. After that, the segment `experts` (exactly, so that
//! `shared_experts` is not meant) makes it an expert's tensor:
//!
//! * `experts.<E>...`: the tensor of expert `E`;
//! * `experts` and anything else: a tensor of all experts, cut along its first dimension, as is
//!   `block_sparse_moe.input_linear` or `block_sparse_moe.output_linear`.
//!
//! A router below `experts` is dense, as every router is. Two kinds of expert tensors stay dense and
//! are named ([`Aside`]): those of a tree without `layers.<n>`, and those below another segment
//! that ends in `experts`.
//!
//! No architecture is named anywhere. What has the segment and does not fit is an error: an
//! expert tensor that is silently taken for a dense one gives wrong answers later.

use crate::layout::MAX_EXPERTS;

/// Where a tensor belongs.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Place<'a> {
    /// The tree's prefix (`model.` say, with its dot) and the layer's number.
    pub(super) layer: Option<(&'a str, u32)>,
    /// Set for expert tensors; then `layer` is set too.
    pub(super) role: Option<Role>,
    /// Set for routed experts that stay among the dense weights.
    pub(super) aside: Option<Aside<'a>>,
}

impl<'a> Place<'a> {
    fn dense(layer: Option<(&'a str, u32)>) -> Self {
        Self { layer, role: None, aside: None }
    }
}

/// Why a routed expert's tensor stays dense, and the start of its name under which a summary lists it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Aside<'a> {
    /// No `layers.<number>` stands before `experts`: `mtp.0` of `mtp.0.ffn.experts.1.w1.weight`.
    NoLayer { path: &'a str },
    /// The segment is not `experts` but ends so: `model.layers.0.mlp.chunk_experts`.
    OtherName { path: &'a str },
}

/// What an expert tensor is to its layer. The names start after `layers.<n>.`.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// One expert's; the name has `*` for the expert's number.
    Each { expert: u32, name: String },
    /// All experts', to be cut.
    Fused { name: String },
}

/// Classifies a tensor by its name and its number of dimensions.
///
/// # Errors
/// It looks like an expert's and is not understood; the text says why.
pub(super) fn classify(name: &str, dims: usize) -> Result<Place<'_>, String> {
    let segments: Vec<Segment<'_>> = segments(name).collect();
    let layer_at = segments.windows(2).position(|w| w[0].text == "layers" && w[1].is_digits());
    let first = layer_at.map_or(0, |at| at + 2);
    // A dense tensor's layer only counts towards the size of its tree.
    let dense_layer = || {
        let number = layer_at.and_then(|at| segments[at + 1].number().ok());
        layer_at.zip(number).map(|(at, n)| (&name[..segments[at].start], n))
    };
    let Some(mark) = expert_mark(&segments) else {
        let aside = other_experts(&segments, dims);
        let aside = aside.map(|end| Aside::OtherName { path: &name[..end] });
        return Ok(Place { layer: dense_layer(), role: None, aside });
    };
    let number = segments.get(mark.at + 1).filter(|next| mark.per_expert && next.is_digits());
    if number.is_none() && is_router(&segments[mark.after..], dims) {
        return Ok(Place::dense(dense_layer()));
    }
    let Some(at) = layer_at.filter(|_| mark.at >= first) else {
        let aside = Some(Aside::NoLayer { path: &name[..tree_end(&segments, mark.at)] });
        return Ok(Place { layer: None, role: None, aside });
    };
    let layer = segments[at + 1].number().map_err(|why| format!("its layer number {why}"))?;
    if name.contains('*') {
        return Err("its name contains `*`, which stands for the expert's number".into());
    }
    let tail = &name[segments.get(first).map_or(name.len(), |s| s.start)..];
    let role = match number {
        Some(number) => each(name, tail, number)?,
        None => fused(&segments[mark.after..], tail)?,
    };
    let layer = Some((&name[..segments[at].start], layer));
    Ok(Place { layer, role: Some(role), aside: None })
}

/// Whether `inner`, the segments after `experts`, name a part of the router.
///
/// `gate` alone may also be the projection of that name, all experts' in one tensor; then it has a
/// dimension more.
fn is_router(inner: &[Segment<'_>], dims: usize) -> bool {
    let text = |at: usize| inner.get(at).map(|s| s.text);
    let gate = match (text(0), text(1)) {
        (Some("gate"), Some("bias")) => dims <= 1,
        (Some("gate"), None | Some("weight")) => dims <= 2,
        _ => false,
    };
    let router = |s: &Segment<'_>| {
        s.text == "router" || s.text.starts_with("router_") || s.text.contains("score_correction")
    };
    gate || inner.iter().any(router)
}

/// Where the name of the first segment ends that ends in `experts` and holds routed ones: a number
/// follows, or the tensor has as many dimensions as all experts' matrices in one.
fn other_experts(segments: &[Segment<'_>], dims: usize) -> Option<usize> {
    let routed = |s: &Segment<'_>| s.text.ends_with("experts") && !s.text.contains("shared");
    let at = segments.iter().position(routed)?;
    let numbered = segments[at + 1..].iter().any(Segment::is_digits);
    (numbered || dims >= 3).then(|| segments[at].end())
}

/// Where the name of a tree without `layers.<number>` ends: behind the last number before
/// `experts`, else before `experts`.
fn tree_end(segments: &[Segment<'_>], mark: usize) -> usize {
    let before = &segments[..mark];
    let last = before.iter().rfind(|s| s.is_digits()).or(before.last());
    last.unwrap_or(&segments[mark]).end()
}

fn each(name: &str, tail: &str, number: &Segment<'_>) -> Result<Role, String> {
    let expert = number.number().map_err(|why| format!("its expert number {why}"))?;
    if expert >= MAX_EXPERTS {
        return Err(format!("its expert number is above the limit of {}", MAX_EXPERTS - 1));
    }
    let start = number.start - (name.len() - tail.len());
    let (before, after) = (&tail[..start], &tail[start + number.text.len()..]);
    Ok(Role::Each { expert, name: format!("{before}*{after}") })
}

/// `inner` are the segments after the one that marks a fused tensor.
fn fused(inner: &[Segment<'_>], tail: &str) -> Result<Role, String> {
    if let Some(numbered) = inner.iter().find(|s| s.is_digits()) {
        return Err(format!("the number {} is not where an expert's is", numbered.text));
    }
    if let Some(odd) = inner.first().filter(|s| s.text.starts_with("expert")) {
        return Err(format!("`{}` is not a number", odd.text));
    }
    Ok(Role::Fused { name: tail.into() })
}

/// The segment that makes a tensor an expert's.
struct Mark {
    at: usize,
    /// The first segment after the mark.
    after: usize,
    /// An expert's number may follow.
    per_expert: bool,
}

fn expert_mark(segments: &[Segment<'_>]) -> Option<Mark> {
    segments.iter().enumerate().find_map(|(at, segment)| {
        let next = segments.get(at + 1).map(|s| s.text);
        match (segment.text, next) {
            ("experts", _) => Some(Mark { at, after: at + 1, per_expert: true }),
            ("block_sparse_moe", Some("input_linear" | "output_linear")) => {
                Some(Mark { at, after: at + 2, per_expert: false })
            }
            _ => None,
        }
    })
}

struct Segment<'a> {
    start: usize,
    text: &'a str,
}

impl Segment<'_> {
    fn end(&self) -> usize {
        self.start + self.text.len()
    }

    fn is_digits(&self) -> bool {
        !self.text.is_empty() && self.text.bytes().all(|byte| byte.is_ascii_digit())
    }

    /// The number, if it is written the one way in which it can be written back.
    fn number(&self) -> Result<u32, String> {
        if self.text.len() > 1 && self.text.starts_with('0') {
            return Err(format!("{} has a leading zero", self.text));
        }
        self.text.parse().map_err(|_| format!("{} is too large", self.text))
    }
}

fn segments(name: &str) -> impl Iterator<Item = Segment<'_>> {
    let mut start = 0;
    name.split('.').map(move |text| {
        let segment = Segment { start, text };
        start += text.len() + 1;
        segment
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structure_alone_tells_expert_tensors_from_dense_ones() {
        for (name, tree, layer, role) in [
            (
                "model.layers.3.mlp.experts.17.up_proj.weight",
                "model.",
                3,
                "17 mlp.experts.*.up_proj.weight",
            ),
            (
                "language_model.model.layers.103.moe.experts.0.w1.scale",
                "language_model.model.",
                103,
                "0 moe.experts.*.w1.scale",
            ),
            ("layers.0.ffn.experts.5.w2.weight", "", 0, "5 ffn.experts.*.w2.weight"),
            ("model.layers.1.experts.2", "model.", 1, "2 experts.*"),
            ("mtp.layers.0.mlp.experts.1.layers.4.w", "mtp.", 0, "1 mlp.experts.*.layers.4.w"),
            (
                "model.layers.0.mlp.experts.gate_up_proj_blocks",
                "model.",
                0,
                "fused mlp.experts.gate_up_proj_blocks",
            ),
            ("model.layers.0.mlp.experts.w13.weight", "model.", 0, "fused mlp.experts.w13.weight"),
            (
                "model.layers.9.block_sparse_moe.input_linear.weight",
                "model.",
                9,
                "fused block_sparse_moe.input_linear.weight",
            ),
            (
                "model.layers.9.block_sparse_moe.experts.1.w1.weight",
                "model.",
                9,
                "1 block_sparse_moe.experts.*.w1.weight",
            ),
        ] {
            let place = classify(name, 3).expect(name);
            assert_eq!(place.layer, Some((tree, layer)), "{name}");
            let found = match place.role.expect(name) {
                Role::Each { expert, name } => format!("{expert} {name}"),
                Role::Fused { name } => format!("fused {name}"),
            };
            assert_eq!(found, role, "{name}");
        }
    }

    #[test]
    fn shared_experts_and_routers_are_dense() {
        for (name, layer) in [
            ("model.layers.3.mlp.shared_experts.up_proj.weight", Some(("model.", 3))),
            ("model.layers.3.mlp.shared_expert_gate.weight", Some(("model.", 3))),
            ("model.layers.3.mlp.gate.weight", Some(("model.", 3))),
            ("model.layers.0.block_sparse_moe.router.layer.weight", Some(("model.", 0))),
            ("model.layers.0.shared_mlp.input_linear.weight", Some(("model.", 0))),
            ("model.layers.007.norm.weight", None),
            ("model.layers.norm.weight", None),
            ("lm_head.weight", None),
        ] {
            assert_eq!(classify(name, 2), Ok(Place::dense(layer)), "{name}");
        }
    }

    #[test]
    fn a_router_below_experts_is_dense_and_a_stacked_gate_projection_is_not() {
        for (name, dims, routes) in [
            ("model.layers.3.mlp.experts.router.weight", 2, true),
            ("model.layers.3.mlp.experts.router.layer.0.weight", 2, true),
            ("model.layers.3.mlp.experts.router_bias", 1, true),
            ("model.layers.3.mlp.experts.e_score_correction_bias", 1, true),
            ("model.layers.3.mlp.experts.gate.e_score_correction_bias", 1, true),
            ("model.layers.3.mlp.experts.gate.weight", 2, true),
            ("model.layers.3.mlp.experts.gate.bias", 1, true),
            ("model.layers.3.mlp.experts.gate.weight", 3, false),
            ("model.layers.3.mlp.experts.gate.bias", 2, false),
            ("model.layers.3.mlp.experts.gate_proj.weight", 2, false),
            ("model.layers.3.mlp.experts.gate_up_proj", 3, false),
            ("model.layers.3.mlp.experts.0.gate.weight", 2, false),
            ("model.layers.3.mlp.experts.0.router.weight", 2, false),
        ] {
            let place = classify(name, dims).expect(name);
            assert_eq!(place.role.is_none(), routes, "{name} of {dims} dimensions");
            assert_eq!((place.layer, place.aside), (Some(("model.", 3)), None), "{name}");
        }
    }

    #[test]
    fn routed_experts_that_stay_dense_have_a_name_to_be_listed_under() {
        let aside = |name, dims| classify(name, dims).expect(name).aside;
        for (name, dims, path) in [
            ("mtp.0.ffn.experts.1.w1.weight", 2, "mtp.0"),
            ("model.mtp.2.block.experts.w13", 3, "model.mtp.2"),
            ("transformer.blocks.0.ffn.experts.0.w1", 2, "transformer.blocks.0"),
            ("nextn.mlp.experts.0.w1", 2, "nextn.mlp"),
            ("model.layers.x.mlp.experts.0.w1", 2, "model.layers.x.mlp"),
            ("experts.0.layers.1.weight", 2, "experts"),
        ] {
            assert_eq!(aside(name, dims), Some(Aside::NoLayer { path }), "{name}");
        }
        for (name, dims, path) in [
            ("model.layers.0.mlp.chunk_experts.3.up.weight", 2, "model.layers.0.mlp.chunk_experts"),
            ("model.layers.0.mlp.local_experts.w.3", 2, "model.layers.0.mlp.local_experts"),
            ("mtp.0.routed_experts.gate_up_proj", 3, "mtp.0.routed_experts"),
        ] {
            assert_eq!(aside(name, dims), Some(Aside::OtherName { path }), "{name}");
        }
        for name in [
            "model.layers.0.mlp.shared_experts.0.up.weight",
            "model.layers.0.mlp.moe_shared_experts.0.up.weight",
            "model.layers.0.mlp.null_experts.bias",
            "mtp.0.ffn.experts.router.weight",
        ] {
            assert_eq!(aside(name, 2), None, "{name}");
        }
    }

    #[test]
    fn what_looks_like_an_expert_and_does_not_fit_is_refused() {
        for (name, why) in [
            ("model.layers.0.mlp.experts.expert_0.wi.weight", "`expert_0` is not a number"),
            ("model.layers.0.mlp.experts.01.w1.weight", "01 has a leading zero"),
            ("model.layers.00.mlp.experts.1.w1.weight", "00 has a leading zero"),
            ("model.layers.0.mlp.experts.99999999999.w1", "99999999999 is too large"),
            ("model.layers.0.mlp.experts.65536.w1", "limit of 65535"),
            ("model.layers.99999999999.mlp.experts.0.w1", "99999999999 is too large"),
            ("model.layers.0.mlp.experts.gate_up_projs.3.weight", "the number 3 is not where"),
            ("model.layers.0.block_sparse_moe.input_linear.0.weight", "the number 0 is not where"),
            ("model.layers.0.mlp.experts.1.w*.weight", "contains `*`"),
            ("model.layers.0.mlp.experts.*.w1.weight", "contains `*`"),
        ] {
            let error = classify(name, 2).expect_err(name);
            assert!(error.contains(why), "{name}: {error}");
        }
    }
}
