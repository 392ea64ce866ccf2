//! `metrale inspect`, `verify` and `extract` as people and scripts use them.

mod support;

use expert_tier::key::ExpertKey;
use expert_tier::testing::TestStore;
use serde_json::{Value, json};

use support::{fail, run, succeed};

fn path(store: &TestStore) -> String {
    store.path().to_str().expect("a path of the test's own").to_owned()
}

#[test]
fn verify_reports_as_json_what_it_reports_in_lines() {
    let store = TestStore::new(2, 3, &[5_000], 201);
    let verify = |code: i32| -> Value {
        let output = run(&["verify", &path(&store), "--json"]);
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        serde_json::from_str(&text).expect("one JSON object")
    };
    assert_eq!(verify(0), json!({ "sound": true, "records": 6, "damaged": [] }));
    store.flip_bit(ExpertKey::new(1, 2), 4_000);
    let report = verify(1);
    assert_eq!((&report["sound"], &report["records"]), (&false.into(), &6.into()));
    let [damaged] = &report["damaged"].as_array().unwrap()[..] else { panic!("{report}") };
    assert_eq!((&damaged["layer"], &damaged["expert"]), (&1.into(), &2.into()));
    let lines = String::from_utf8(run(&["verify", &path(&store)]).stdout).unwrap();
    let why = damaged["why"].as_str().unwrap();
    assert_eq!(lines, format!("damaged layer 1 expert 2: {why}\n"));
}

#[test]
fn a_store_of_one_record_is_told_in_the_singular() {
    let store = TestStore::new(1, 1, &[100], 202);
    let verified = String::from_utf8(succeed(&["verify", &path(&store)])).unwrap();
    assert!(verified.starts_with("1 record is sound, "), "{verified}");
    let shown = String::from_utf8(succeed(&["inspect", &path(&store)])).unwrap();
    assert!(shown.contains("1 in 1 layer, ") && shown.contains(": 1 expert, "), "{shown}");
}

#[test]
fn a_directory_that_is_no_store_is_named_as_such_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().to_str().unwrap();
    let one = ["--layer", "0", "--expert", "0"];
    let serve = ["peer", "run", "--listen", "127.0.0.1:0", "--store", dir];
    let fetches = ["posix", "uma"].map(|backend| {
        [&["fetch", "--expert-backend", backend, "--store", dir], &one[..]].concat()
    });
    let mut commands = vec![vec!["inspect", dir], vec!["verify", dir], serve.to_vec()];
    commands.push([&["extract", dir], &one[..]].concat());
    commands.extend(fetches);
    for command in commands {
        let error = fail(&command);
        let said = format!("{dir} is not an expert store (no manifest.json)");
        assert!(error.contains(&said) && error.contains("metrale pack"), "{command:?}: {error}");
    }
    let absent = format!("{dir}/absent");
    assert!(fail(&["inspect", &absent]).contains("absent/manifest.json"));
}

#[test]
fn a_tensor_is_found_by_any_of_its_names() {
    let store = TestStore::new(2, 3, &[5_000], 203);
    let names = [
        "model.layers.1.mlp.experts.2.weight",
        "model.layers.1.mlp.experts.*.weight",
        "mlp.experts.*.weight",
    ];
    for name in names {
        let bytes =
            succeed(&["extract", &path(&store), "--layer", "1", "--expert", "2", "--tensor", name]);
        assert!(bytes == store.payload(ExpertKey::new(1, 2)), "{name}");
    }
    let other = "model.layers.1.mlp.experts.1.weight";
    let error =
        fail(&["extract", &path(&store), "--layer", "1", "--expert", "2", "--tensor", other]);
    assert!(error.contains(names[0]), "{error}");
}
