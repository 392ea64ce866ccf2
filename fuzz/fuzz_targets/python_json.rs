//! The number literals of Python's `json` in a `config.json`.

#![no_main]

use expert_tier::pack::quoted_for_fuzzing;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

fuzz_target!(|text: &[u8]| {
    let quoted = quoted_for_fuzzing(text);
    assert_eq!(quoted_for_fuzzing(&quoted), quoted, "what is quoted is left alone");
    assert!(quoted.len() >= text.len() && (quoted.len() - text.len()).is_multiple_of(2));
    // What is JSON already is left as it is.
    if serde_json::from_slice::<Value>(text).is_ok() {
        assert_eq!(quoted, text);
    }
});
