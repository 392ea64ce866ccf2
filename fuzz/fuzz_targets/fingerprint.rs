//! A fingerprint's text: from a manifest, a command line or a peer.

#![no_main]

use expert_tier::dtype::Dtype;
use expert_tier::fingerprint::Fingerprint;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(fingerprint) = text.parse::<Fingerprint>() {
        assert_eq!(fingerprint.to_string(), text.to_ascii_lowercase());
    } else {
        let digits = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        assert!(!digits, "64 hexadecimal digits were refused");
    }
    if let Ok(dtype) = text.parse::<Dtype>() {
        assert_eq!(dtype.name(), text);
    }
});
