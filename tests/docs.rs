//! What the documents say that the code can check.

use std::fs;
use std::path::Path;

use gpu_sys::env::TABLE;

#[test]
fn the_readme_lists_every_variable_with_its_default_and_unit() {
    let readme = include_str!("../README.md");
    for variable in TABLE {
        let (name, default, unit, help) =
            (variable.name, variable.default, variable.unit, variable.help);
        let row = format!("| `{name}` | {default} | {unit} | {help} |");
        assert!(readme.contains(&row), "README.md lacks this row:\n{row}");
    }
}

/// The names given to `counter!`, `gauge!` and `histogram!` in the sources under `dir`.
fn metric_names(dir: &Path, names: &mut Vec<String>) {
    for entry in fs::read_dir(dir).expect("a directory of the repository") {
        let path = entry.expect("a directory of the repository").path();
        if path.is_dir() {
            metric_names(&path, names);
            continue;
        }
        let source = fs::read_to_string(&path).expect("sources are UTF-8");
        for call in ["counter!(", "gauge!(", "histogram!("] {
            let calls = source.split(call).skip(1);
            let names_here = calls.filter_map(|rest| rest.trim_start().strip_prefix('"'));
            names.extend(names_here.filter_map(|rest| rest.split('"').next()).map(String::from));
        }
    }
}

#[test]
fn every_metric_is_documented() {
    let document = include_str!("../docs/metrics.md");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut names = Vec::new();
    for directory in ["expert-peer/src", "expert-tier/src"] {
        metric_names(&root.join(directory), &mut names);
    }
    assert!(names.len() >= 13, "{names:?}");
    for name in names {
        assert!(document.contains(&format!("| `{name}` |")), "docs/metrics.md lacks {name}");
    }
}

#[test]
fn the_store_format_lists_the_bits_of_every_element_type() {
    use expert_tier::dtype::Dtype;
    let document = include_str!("../docs/store-format.md");
    let (_, list) = document.split_once("| bits | `dtype` |").expect("a table of types");
    let rows: Vec<Vec<&str>> = list
        .lines()
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    let mut listed = 0;
    for row in rows {
        let [bits, names] = row[..] else { panic!("{row:?}") };
        for name in names.split_whitespace() {
            let dtype: Dtype = name.trim_matches('`').parse().expect("a type of the format");
            assert_eq!(dtype.bits().to_string(), bits, "{name}");
            listed += 1;
        }
    }
    assert_eq!(listed, 22);
}

/// The beginnings of the texts, up to what is filled in, that `warn!` and `error!` log in `source`.
fn logged_texts(source: &str) -> Vec<String> {
    let calls = source.split("tracing::warn!(").flat_map(|part| part.split("tracing::error!("));
    // What is in front of the first call is none.
    let mut texts = Vec::new();
    for call in calls.skip(1).filter_map(|rest| rest.split_once(");")) {
        // The text is the last literal; a wrapped one goes on behind the spaces of the next line.
        let text = call.0.rsplit('"').nth(1).unwrap_or_default();
        let lines = text.split("\\\n").map(str::trim_start);
        let text: String = lines.collect();
        let told = text.split(['{', '`']).next().unwrap_or_default();
        texts.extend(Some(told.to_owned()).filter(|told| !told.is_empty()));
    }
    texts
}

#[test]
fn the_guide_for_operators_has_every_warning_and_error_of_peers_and_remote_backends() {
    let document = include_str!("../docs/operations.md");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut texts = Vec::new();
    for directory in ["expert-peer/src", "expert-tier/src/tcp", "expert-tier/src/verbs"] {
        let mut sources = String::new();
        read_sources(&root.join(directory), &mut sources);
        texts.extend(logged_texts(&sources));
    }
    assert!(texts.len() >= 23, "{texts:?}");
    for text in texts {
        let row = format!("| `{}", text.trim_end_matches([' ', ';']));
        assert!(document.contains(&row), "docs/operations.md lacks the log line {text:?}");
    }
}

/// Every test, and every file of tests, that the table of invariants cites.
#[test]
fn the_tests_that_the_architecture_cites_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources = String::new();
    for folder in ["tests", "railset", "expert-peer", "expert-tier", "gpu-sys"] {
        read_sources(&root.join(folder), &mut sources);
    }
    let contract = include_str!("../expert-tier/src/testing/contract.rs");
    let rows = include_str!("../ARCHITECTURE.md").lines().filter(|line| line.starts_with("| I"));
    for (number, row) in (1..).zip(rows) {
        assert!(row.starts_with(&format!("| I{number} |")), "I{number} is missing before {row}");
        let cell = row.rsplit('|').nth(1).expect("a row has cells");
        let cited: Vec<_> = cell.split('`').skip(1).step_by(2).collect();
        assert!(!cited.is_empty(), "no test is cited for I{number}");
        for cited in cited {
            let found = match cited.contains('/') {
                true => holds_tests(&root.join(cited)),
                false => is_test(&sources, cited) || contract.contains(&format!("pub fn {cited}(")),
            };
            assert!(found, "ARCHITECTURE.md cites {cited} for I{number}: that is no test");
        }
    }
}

/// Whether `sources` have a test called `name`: the attribute stands before it, perhaps with others.
fn is_test(sources: &str, name: &str) -> bool {
    sources.match_indices(&format!("fn {name}(")).any(|(at, _)| {
        let before = sources[..at].lines().rev().skip_while(|line| line.trim().is_empty());
        before
            .map(str::trim)
            .take_while(|line| line.starts_with("#[") || line.starts_with("//"))
            .any(|line| line == "#[test]")
    })
}

/// Whether a file has tests, or a folder a file with some.
fn holds_tests(path: &Path) -> bool {
    let mut sources = String::new();
    match path.is_dir() {
        // A fuzz target is a test, too.
        true => read_sources(path, &mut sources),
        false => sources = fs::read_to_string(path).unwrap_or_default(),
    }
    sources.contains("#[test]") || sources.contains("fuzz_target!")
}

fn read_sources(folder: &Path, into: &mut String) {
    for entry in fs::read_dir(folder).expect("a folder of the repository") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            read_sources(&path, into);
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            into.push_str(&fs::read_to_string(path).expect("a source file"));
        }
    }
}
