//! What `config.json` says about experts.

use std::io::Read;
use std::path::Path;

use rustix::fs::OFlags;
use serde_json::{Map, Value};

use super::foreign::is_answer;
use super::{PackError, foreign, python_json};
use crate::files::open_regular;

/// What an error calls this file.
const EXPECTED: &str = "the model's configuration in JSON";

/// Largest `config.json` accepted; real ones have less than 100 KB. As a parsed document it takes
/// some 30 times that at worst.
const MAX_BYTES: u64 = 4 << 20;
/// Most characters of a value that an error repeats.
const SHOWN_CHARS: usize = 60;
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
    /// One per layer, or one per group of each layer's experts; `null` is not compared.
    List(Vec<Option<u64>>),
}

/// What a config says and the tensors do not.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct Disagreement {
    pub(super) key: String,
    pub(super) stated: String,
}

impl Config {
    pub(super) fn read(path: &Path) -> Result<Self, PackError> {
        let file = open_regular(path, OFlags::RDONLY).map_err(PackError::io("open", path))?;
        let mut text = Vec::new();
        file.take(MAX_BYTES + 1).read_to_end(&mut text).map_err(PackError::io("read", path))?;
        if text.len() as u64 > MAX_BYTES {
            return Err(PackError::document(path, format!("longer than {MAX_BYTES} bytes")));
        }
        let config: Map<String, Value> = serde_json::from_slice(&python_json::quoted(&text))
            .map_err(|error| {
                let head = &text[..text.len().min(foreign::HEAD_BYTES)];
                let foreign = foreign::recognise(head).filter(|_| !error.is_data());
                match foreign {
                    Some(foreign) => foreign.error(path, EXPECTED),
                    None => PackError::document(path, error),
                }
            })?;
        let named = ["model_type", "architectures"].iter().any(|key| config.contains_key(*key));
        if !named && let Some(answer) = std::str::from_utf8(&text).ok().filter(|t| is_answer(t)) {
            let head = &answer.as_bytes()[..answer.len().min(foreign::HEAD_BYTES)];
            if let Some(foreign) = foreign::recognise(head) {
                return Err(foreign.error(path, EXPECTED));
            }
        }
        Self::from_map(&config).map_err(|why| PackError::document(path, why))
    }

    fn from_map(config: &Map<String, Value>) -> Result<Self, String> {
        let architecture = || config.get("architectures")?.get(0)?.as_str();
        let model = config.get("model_type").and_then(Value::as_str).or_else(architecture);
        let model = model.unwrap_or("unknown").chars().take(128).collect();
        // Exact names anywhere win over similar ones; the outermost level that has any counts.
        let level = |exact| (0..=MAX_DEPTH).map(move |depth| counts_at(config, depth, "", exact));
        let found = level(true).chain(level(false)).find(|counts| !counts.is_empty());
        let counts = found.unwrap_or_default().into_iter().map(|(key, count)| match count {
            Ok(count) => Ok((key, count)),
            Err(value) => Err(format!("{key} is {}, expected a number of experts", shown(&value))),
        });
        Ok(Self { model, counts: counts.collect::<Result<_, _>>()? })
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
    /// per MoE layer, else its sum must be the layer's count: some models have several groups of
    /// experts in each layer and number them through. A config with several counts (a model with
    /// two towers) agrees if one of them does.
    pub(super) fn disagrees(
        &self,
        layers: &[u32],
        position: usize,
        found: u64,
    ) -> Option<Disagreement> {
        let mut disagreement = None;
        for (key, count) in &self.counts {
            let stated = match count.of(layers, position) {
                Stated::Nothing => continue,
                Stated::Count(stated) if stated == found => return None,
                Stated::Count(stated) => stated.to_string(),
                Stated::Unfit(list) => format!(
                    "{}, which has an entry neither per layer nor per MoE layer",
                    shown(&Value::from(list.iter().map(|n| Value::from(*n)).collect::<Vec<_>>()))
                ),
            };
            disagreement.get_or_insert_with(|| Disagreement { key: key.clone(), stated });
        }
        disagreement
    }

    /// Whether `count` is stated for a layer.
    pub(super) fn states(&self, layers: &[u32], position: usize, count: u64) -> bool {
        self.counts.iter().any(|(_, stated)| stated.of(layers, position) == Stated::Count(count))
    }
}

/// What is stated for a layer.
#[derive(PartialEq, Eq, Debug)]
enum Stated<'a> {
    Nothing,
    Count(u64),
    /// A list whose length fits nothing.
    Unfit(&'a [Option<u64>]),
}

impl Count {
    fn of(&self, layers: &[u32], position: usize) -> Stated<'_> {
        let list = match self {
            Self::Every(count) => return Stated::Count(*count),
            Self::List(list) => list,
        };
        let (Some(&last), Some(&layer)) = (layers.last(), layers.get(position)) else {
            return Stated::Nothing;
        };
        let index = match list.len() {
            len if len > last as usize => layer as usize,
            len if len == layers.len() => position,
            _ => return groups(list).map_or(Stated::Unfit(list), Stated::Count),
        };
        list.get(index).copied().flatten().map_or(Stated::Nothing, Stated::Count)
    }

    /// The count that a value is, or that value.
    fn read(value: &Value) -> Result<Self, Value> {
        let entry = |entry: &Value| match entry {
            Value::Null => Ok(None),
            number => number.as_u64().map(Some).ok_or_else(|| value.clone()),
        };
        match value {
            Value::Array(list) => Ok(Self::List(list.iter().map(entry).collect::<Result<_, _>>()?)),
            value => value.as_u64().map(Self::Every).ok_or_else(|| value.clone()),
        }
    }
}

fn counts_at(
    config: &Map<String, Value>,
    depth: usize,
    prefix: &str,
    exact: bool,
) -> Vec<(String, Result<Count, Value>)> {
    let mut found = Vec::new();
    for (key, value) in config {
        let path = format!("{prefix}{key}");
        match value {
            Value::Object(inner) if depth > 0 => {
                found.extend(counts_at(inner, depth - 1, &format!("{path}."), exact));
            }
            Value::Null => {}
            value if depth == 0 && counts_experts(key, exact) => {
                let count = Count::read(value);
                // A similar name may mean something else; only the known ones must be counts.
                found.extend((exact || count.is_ok()).then_some((path, count)));
            }
            _ => {}
        }
    }
    found
}

/// The number of experts of a layer that has several groups of them.
fn groups(list: &[Option<u64>]) -> Option<u64> {
    if list.is_empty() {
        return None;
    }
    list.iter().try_fold(0_u64, |sum, count| sum.checked_add((*count)?))
}

/// A value as an error shows it.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
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
        Config::from_map(&serde_json::from_str(text).unwrap()).unwrap()
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
            assert!(config.disagrees(&[0, 1, 2], 1, 7).is_some_and(|d| d.stated == "8"), "{text}");
        }
    }

    #[test]
    fn a_list_is_read_by_layer_or_by_position_or_not_at_all() {
        let list = config(r#"{"num_experts": [0, 4, 8]}"#);
        assert_eq!(list.disagrees(&[1, 2], 0, 4), None);
        let says = |stated: &str| Some(("num_experts".to_string(), stated.to_string()));
        let says_of = |layers, position, found| {
            list.disagrees(layers, position, found).map(|d| (d.key, d.stated))
        };
        assert_eq!(says_of(&[1, 2], 0, 8), says("4"));
        assert_eq!(list.disagrees(&[3, 5, 7], 2, 8), None);
        assert_eq!(says_of(&[3, 5, 7], 2, 4), says("8"));
        // A length that fits nothing: groups of experts, if their sum is the count.
        assert_eq!(says_of(&[3, 5], 1, 12), None);
        assert_eq!(says_of(&[3, 5], 1, 99), says("12"));
        for value in ["[4,null,4]", "[]"] {
            let list = config(&format!("{{\"num_experts\": {value}}}"));
            let unfit = list.disagrees(&[3, 5], 1, 8).unwrap().stated;
            assert!(unfit.starts_with(&format!("{value}, which has an entry neither")), "{unfit}");
        }
    }

    #[test]
    fn a_known_key_whose_value_is_no_count_is_refused_with_both() {
        for value in
            ["-1", "2.0", "\"2\"", "true", "{\"a\": 3}", "99999999999999999999999", "[2,[3]]"]
        {
            for key in ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"] {
                for text in [
                    format!("{{\"{key}\": {value}}}"),
                    format!("{{\"text_config\": {{\"{key}\": {value}}}}}"),
                    format!("{{\"{key}\": {value}, \"num_routed_experts\": 4}}"),
                ] {
                    let why = Config::from_map(&serde_json::from_str(&text).unwrap()).unwrap_err();
                    assert!(why.contains(&format!("{key} is ")), "{text}: {why}");
                }
            }
        }
        let long = format!("{{\"num_experts\": \"{}\"}}", "x".repeat(1000));
        let why = Config::from_map(&serde_json::from_str(&long).unwrap()).unwrap_err();
        assert!(why.len() < 120, "{why}");
        assert_eq!(config(r#"{"num_my_experts": "two"}"#).experts(), None);
    }

    #[test]
    fn a_config_without_a_count_agrees_with_any() {
        let silent = config(r#"{"num_experts_per_tok": 2, "num_experts": null}"#);
        assert_eq!((silent.experts(), silent.disagrees(&[0], 0, 5)), (None, None));
        assert_eq!(silent.model, "unknown");
        assert_eq!(config(r#"{"architectures": ["Foo"]}"#).model, "Foo");
    }
}
