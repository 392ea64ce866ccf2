//! A routing trace.

#![no_main]

use std::io::{BufRead, BufReader};

use expert_tier::trace::{Acquire, TraceReader};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

fuzz_target!(|bytes: &[u8]| {
    let (acquires, whole) = read(bytes);
    // Through a buffer that cuts lines anywhere, the same.
    assert_eq!(read(BufReader::with_capacity(7, bytes)), (acquires.clone(), whole));

    let lines = bytes.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    let mut lines = lines.filter(|line| !line.is_empty());
    for acquire in &acquires {
        let line = lines.next().expect("an acquire is a line");
        let line: Value = serde_json::from_slice(line).expect("what was accepted is JSON");
        assert_eq!(line["step"].as_u64(), Some(acquire.step));
        let experts = line["experts"].as_array().expect("a list");
        let layer = u64::from(acquire.layer);
        assert_eq!(experts.len(), acquire.keys().count());
        for (expert, key) in experts.iter().zip(acquire.keys()) {
            assert_eq!(expert.as_u64(), Some(u64::from(key.expert)));
            assert_eq!(
                line["layer"].as_u64().map(|n| (n, key.layer)),
                Some((layer, acquire.layer))
            );
        }
        if let Some(weights) = &acquire.weights {
            assert_eq!(weights.len(), experts.len());
        }
    }
    assert_eq!(lines.next().is_none(), whole, "lines were left out, or the end was missed");
});

/// The acquires up to the first line that is none, and whether there was no such line.
fn read(input: impl BufRead) -> (Vec<Acquire>, bool) {
    let mut reader = TraceReader::new(input);
    let mut acquires = Vec::new();
    loop {
        match reader.read() {
            Ok(Some(acquire)) => acquires.push(acquire),
            Ok(None) => return (acquires, true),
            Err(_) => return (acquires, false),
        }
    }
}
