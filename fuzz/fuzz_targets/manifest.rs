//! `manifest.json`, from disk or from a peer.

#![no_main]

use expert_tier::key::ExpertKey;
use expert_tier::layout::{LayerLayout, MAX_CHUNKS, MAX_PAYLOAD_BYTES, STRIDE_ALIGN, TENSOR_ALIGN};
use expert_tier::store::manifest::Manifest;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    parse(bytes);
    if let Some(forged) = metrale_fuzz::forge_manifest(bytes) {
        parse(&forged);
    }
});

/// A manifest that is accepted survives both ways of writing it, and every number in it can be
/// used without a further check.
fn parse(bytes: &[u8]) {
    let Ok(manifest) = Manifest::parse(bytes) else { return };
    assert_eq!(manifest.as_bytes(), bytes);
    assert_eq!(Manifest::parse(bytes).expect("it parsed before"), manifest);

    let layout = manifest.layout();
    let digest = |layer: &LayerLayout| manifest.checksums(layer.layer()).expect("one per layer");
    let checksums = layout.layers().iter().map(digest).collect();
    let written = Manifest::new(manifest.model().into(), layout.clone(), checksums);
    let read = Manifest::parse(written.as_bytes()).expect("our own manifest parses");
    assert_eq!(read, written);
    assert_eq!(read.layout(), layout);

    layout.layers().iter().for_each(|layer| check_layer(&manifest, layer));
}

fn check_layer(manifest: &Manifest, layer: &LayerLayout) {
    let mut end = 0;
    for tensor in layer.spec().tensors() {
        assert!(tensor.offset.is_multiple_of(TENSOR_ALIGN));
        assert!(tensor.offset >= end, "{} overlaps the tensor before it", tensor.name);
        end = tensor.offset + tensor.bytes;
    }
    assert_eq!(end, layer.spec().payload_bytes());
    assert!(end <= MAX_PAYLOAD_BYTES && layer.chunks() <= MAX_CHUNKS);
    assert!(layer.stride() >= layer.record_bytes() && layer.stride().is_multiple_of(STRIDE_ALIGN));
    assert!(layer.stride().checked_mul(u64::from(layer.experts())).is_some());

    let key = |expert| ExpertKey::new(layer.layer(), expert);
    let last = manifest.identity(key(layer.experts() - 1)).expect("the last expert is there");
    assert_eq!(last.record_bytes(), layer.record_bytes());
    assert!(manifest.identity(key(layer.experts())).is_err());
}
