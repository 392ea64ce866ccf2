//! The first bytes of a file that is no shard.

#![no_main]

use expert_tier::pack::recognise_for_fuzzing;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|head: &[u8]| {
    let Some((kind, advice)) = recognise_for_fuzzing(head) else { return };
    assert!(!kind.is_empty() && kind.len() < 1024 && !advice.is_empty(), "{kind:?} {advice:?}");
    // Control characters of a text are shown escaped.
    assert!(!kind.contains(char::is_control), "{kind:?}");
    if head.starts_with(b"GGUF") {
        assert!(kind.contains("GGUF"), "{kind}");
    }
});
