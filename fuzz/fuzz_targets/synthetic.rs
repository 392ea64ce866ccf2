//! The description of a synthetic store, from a command line.

#![no_main]

use expert_tier::key::ExpertKey;
use expert_tier::pack::{self, PackOptions, Source, SyntheticSpec};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(spec) = text.parse::<SyntheticSpec>() else { return };
    assert_eq!(spec.to_string().parse::<SyntheticSpec>().expect("it parsed before"), spec);
    let Ok(plan) = pack::plan(&Source::Synthetic(spec.clone()), &PackOptions::default()) else {
        return;
    };
    let layer = plan.layout().layers().last().expect("a store has layers");
    let key = ExpertKey::new(layer.layer(), layer.experts() - 1);
    let length = usize::try_from(layer.spec().payload_bytes()).expect("64 bits");
    // The last bytes of a payload, computed alone, whatever its length.
    let mut tail = [0; 24];
    let from = length.saturating_sub(tail.len());
    spec.fill(key, from as u64, &mut tail[..length - from]);
    if length <= 4096 {
        assert_eq!(spec.payload(key)[from..], tail[..length - from]);
    }
});
