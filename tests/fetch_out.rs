//! Where `metrale fetch --out` writes.

mod support;

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::process::Stdio;

use expert_tier::key::ExpertKey;
use support::{metrale, succeed};

const SPEC: &str = "layers=1,experts=1,bytes=20000,seed=3";

#[test]
fn a_link_to_stdout_stays_and_stdout_receives_the_payload() {
    let dir = tempfile::tempdir().unwrap();
    let (store, link) = (dir.path().join("store"), dir.path().join("link"));
    succeed(&["pack", "--synthetic", SPEC, "--out", store.to_str().unwrap()]);
    symlink("/proc/self/fd/1", &link).unwrap();
    let fetch = |stdout: Stdio| {
        let mut command = metrale();
        command.args(["fetch", "--layer", "0", "--expert", "0"]);
        command.arg("--expert-arena-bytes").arg("1048576").arg("--store").arg(&store);
        let output = command.arg("--out").arg(&link).stdout(stdout).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert!(link.is_symlink());
        output.stdout
    };
    let spec: expert_tier::pack::SyntheticSpec = SPEC.parse().unwrap();
    let payload = spec.payload(ExpertKey::new(0, 0));
    // A pipe, and a file that has something in it already.
    assert!(fetch(Stdio::piped()).starts_with(&payload));
    let file = dir.path().join("file");
    fs::write(&file, "before").unwrap();
    fetch(File::options().append(true).open(&file).unwrap().into());
    let written = fs::read(&file).unwrap();
    assert!(written.starts_with(&[b"before", &payload[..]].concat()));
}
