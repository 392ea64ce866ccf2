//! `DEV[:GID]` and the number of rails, from a command line or the environment.

#![no_main]

use libfuzzer_sys::fuzz_target;
use railset::choose::Wish;
use railset::message::MAX_NAME_BYTES;
use railset::pairing::DualRail;

fuzz_target!(|text: &str| {
    assert_eq!(text.parse::<DualRail>().is_ok(), text == "0" || text == "1");
    let Ok(wish) = text.parse::<Wish>() else { return };
    let device = wish.device.expect("a rail has a device");
    assert!((1..=MAX_NAME_BYTES).contains(&device.len()));
    let (name, index) = text.split_once(':').unwrap_or((text, ""));
    assert_eq!(name, device);
    assert_eq!(index.parse::<u8>().ok(), wish.gid_index);
});
