//! What `config.json` says about experts.

use std::io::Read;
use std::path::Path;

use rustix::fs::OFlags;
use serde_json::{Map, Value};

use super::PackError;
use crate::files::open_regular;

/// Largest `config.json` accepted.
const MAX_BYTES: u64 = 64 << 20;
/// How deep a nested config (`text_config`, say) is looked for.
const MAX_DEPTH: usize = 3;
/// Names that mean the number of routed experts of a layer.
const EXACT: [&str; 5] = [
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
];
/// Parts of names that count something else.
const OTHER_COUNTS: [&str; 8] =
    ["per_tok", "shared", "active", "selected", "zero", "null", "redundant", "group"];

/// The part of a `config.json` that a pack needs.
#[derive(Debug)]
pub(super) struct Config {
    /// The model's name for its architecture, for people.
    pub(super) model: String,
    counts: Vec<(String, Count)>,
}

#[derive(Debug)]
enum Count {
    Every(u64),
    /// One per layer; entries that are not numbers are not compared.
    List(Vec<Option<u64>>),
}

impl Config {
    pub(super) fn read(path: &Path) -> Result<Self, PackError> {
        let file = open_regular(path, OFlags::RDONLY).map_err(PackError::io("open", path))?;
        let mut text = Vec::new();
        file.take(MAX_BYTES + 1).read_to_end(&mut text).map_err(PackError::io("read", path))?;
        if text.len() as u64 > MAX_BYTES {
            return Err(PackError::document(path, format!("longer than {MAX_BYTES} bytes")));
        }
        let config: Map<String, Value> =
            serde_json::from_slice(&text).map_err(|error| PackError::document(path, error))?;
        Ok(Self::from_map(&config))
    }

    fn from_map(config: &Map<String, Value>) -> Self {
        let architecture = || config.get("architectures")?.get(0)?.as_str();
        let model = config.get("model_type").and_then(Value::as_str).or_else(architecture);
        let model = model.unwrap_or("unknown").chars().take(128).collect();
        // Exact names anywhere win over similar ones; the outermost level that has any counts.
        let level = |exact| (0..=MAX_DEPTH).map(move |depth| counts_at(config, depth, "", exact));
        let found = level(true).chain(level(false)).find(|counts| !counts.is_empty());
        Self { model, counts: found.unwrap_or_default() }
    }

    /// A key and value that say that the model has experts.
    pub(super) fn experts(&self) -> Option<String> {
        self.counts.iter().find_map(|(key, count)| match count {
            Count::Every(n) => (*n > 1).then(|| format!("{key} = {n}")),
            Count::List(list) => Some(format!("{key} has {} entries", list.len())),
        })
    }

    /// Compares a layer with what is stated for it: the key and value that disagree, if any.
    ///
    /// `layers` are the numbers of all MoE layers and `position` says which of them this is. A
    /// list is read by layer number if it is long enough for that, by position if it has an entry
    /// per MoE layer, else not at all. A config with several counts (a model with two towers)
    /// agrees if one of them does.
    pub(super) fn disagrees(
        &self,
        layers: &[u32],
        position: usize,
        found: u64,
    ) -> Option<(&str, u64)> {
        let mut disagreement = None;
        for (key, count) in &self.counts {
            let Some(stated) = count.of(layers, position) else { continue };
            if stated == found {
                return None;
            }
            disagreement.get_or_insert((key.as_str(), stated));
        }
        disagreement
    }

    /// Whether `count` is stated for a layer.
    pub(super) fn states(&self, layers: &[u32], position: usize, count: u64) -> bool {
        self.counts.iter().any(|(_, stated)| stated.of(layers, position) == Some(count))
    }
}

impl Count {
    fn of(&self, layers: &[u32], position: usize) -> Option<u64> {
        match self {
            Self::Every(count) => Some(*count),
            Self::List(list) => {
                let last = *layers.last()? as usize;
                let index = match list.len() {
                    len if len > last => *layers.get(position)? as usize,
                    len if len == layers.len() => position,
                    _ => return None,
                };
                list.get(index).copied().flatten()
            }
        }
    }
}

fn counts_at(
    config: &Map<String, Value>,
    depth: usize,
    prefix: &str,
    exact: bool,
) -> Vec<(String, Count)> {
    let mut found = Vec::new();
    for (key, value) in config {
        let path = format!("{prefix}{key}");
        match value {
            Value::Object(inner) if depth > 0 => {
                found.extend(counts_at(inner, depth - 1, &format!("{path}."), exact));
            }
            Value::Number(number) if depth == 0 && counts_experts(key, exact) => {
                found.extend(number.as_u64().map(|n| (path, Count::Every(n))));
            }
            Value::Array(list) if depth == 0 && counts_experts(key, exact) => {
                found.push((path, Count::List(list.iter().map(Value::as_u64).collect())));
            }
            _ => {}
        }
    }
    found
}

fn counts_experts(key: &str, exact: bool) -> bool {
    if exact {
        return EXACT.contains(&key);
    }
    key.contains("num")
        && key.ends_with("experts")
        && !OTHER_COUNTS.iter().any(|other| key.contains(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        Config::from_map(&serde_json::from_str(text).unwrap())
    }

    #[test]
    fn the_number_of_experts_is_found_under_its_many_names() {
        for text in [
            r#"{"num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1}"#,
            r#"{"num_local_experts": 8}"#,
            r#"{"n_routed_experts": 8, "n_shared_experts": 1}"#,
            r#"{"moe_num_experts": 8, "moe_num_shared_experts": 2}"#,
            r#"{"text_config": {"num_local_experts": 8}, "vision_config": {}}"#,
            r#"{"thinker_config": {"text_config": {"num_experts": 8}}}"#,
            r#"{"moe_layer_num_ffn_experts": 8, "num_zero_experts": 3}"#,
            r#"{"num_experts": [8, 8, 8]}"#,
        ] {
            let config = config(text);
            assert_eq!(config.disagrees(&[0, 1, 2], 1, 8), None, "{text}");
            assert!(config.disagrees(&[0, 1, 2], 1, 7).is_some_and(|(_, n)| n == 8), "{text}");
        }
    }

    #[test]
    fn a_list_is_read_by_layer_or_by_position_or_not_at_all() {
        let list = config(r#"{"num_experts": [0, 4, 8]}"#);
        assert_eq!(list.disagrees(&[1, 2], 0, 4), None);
        assert_eq!(list.disagrees(&[1, 2], 0, 8), Some(("num_experts", 4)));
        assert_eq!(list.disagrees(&[3, 5, 7], 2, 8), None);
        assert_eq!(list.disagrees(&[3, 5, 7], 2, 4), Some(("num_experts", 8)));
        assert_eq!(list.disagrees(&[3, 5], 1, 99), None);
    }

    #[test]
    fn a_config_without_a_count_agrees_with_any() {
        let silent = config(r#"{"num_experts_per_tok": 2, "num_experts": null}"#);
        assert_eq!((silent.experts(), silent.disagrees(&[0], 0, 5)), (None, None));
        assert_eq!(silent.model, "unknown");
        assert_eq!(config(r#"{"architectures": ["Foo"]}"#).model, "Foo");
    }
}
