//! The journal of a pack that may be resumed.

#![no_main]

use std::sync::LazyLock;

use expert_tier::layout::ExpertLayout;
use expert_tier::pack::{self, PackOptions, Source, SyntheticSpec, journal_for_fuzzing};
use libfuzzer_sys::fuzz_target;

static LAYOUT: LazyLock<ExpertLayout> = LazyLock::new(|| {
    let spec: SyntheticSpec = "layers=2,experts=3,bytes=9000".parse().expect("a description");
    let options = PackOptions { chunk_bytes: 4096, ..PackOptions::default() };
    pack::plan(&Source::Synthetic(spec), &options).expect("a plan").layout().clone()
});

fuzz_target!(|bytes: &[u8]| {
    let Some((lines, used)) = journal_for_fuzzing(bytes, &LAYOUT) else { return };
    let used = usize::try_from(used).expect("64 bits");
    // It ends with a line, and what follows it changes nothing.
    assert_eq!(bytes[..used].last(), Some(&b'\n'));
    let same = Some((lines.clone(), used as u64));
    assert_eq!(journal_for_fuzzing(&bytes[..used], &LAYOUT), same);
    // What was read is written and read again.
    let again = journal_for_fuzzing(&lines, &LAYOUT).expect("our own lines");
    assert_eq!(again, (lines.clone(), lines.len() as u64));
});
