//! What the targets share: second implementations to compare with, and the means to forge.
//!
//! A checksum in front of a decoder stops the fuzzer at the door, as it does a damaged file; a
//! forger computes it. The targets therefore try each input twice: as it is, and with its
//! checksums made right.

pub mod rails;

use expert_tier::store::manifest::Manifest;
use expert_tier::wire::{FrameHeader, HEADER_BYTES, Secret};
use sha2::{Digest, Sha256};

/// CRC-32 of IEEE 802.3, bit by bit: slow, and unlike the table-driven one it is compared with.
#[must_use]
pub fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 };
        }
    }
    !crc
}

/// The little-endian `u32` at `at`, if there are four bytes.
#[must_use]
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let four = bytes.get(at..at.checked_add(4)?)?;
    Some(four.iter().rev().fold(0, |value, byte| value << 8 | u32::from(*byte)))
}

/// Puts `bytes` at `at` where they fit, else leaves `out` alone.
pub fn put(out: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(place) = out.get_mut(at..at + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}

/// `bytes` with the record header's lengths and checksum made right for the chunks it states.
#[must_use]
pub fn forge_record(bytes: &[u8]) -> Option<Vec<u8>> {
    let header_len = header_len(bytes)?;
    let mut forged = bytes.to_vec();
    put(&mut forged, 0, b"MTRLEXPR\x01\x00");
    put(&mut forged, 12, &u32::try_from(header_len).ok()?.to_le_bytes());
    let crc = crc32(forged.get(..header_len - 4)?);
    put(&mut forged, header_len - 4, &crc.to_le_bytes());
    Some(forged)
}

/// The length that a header with the stated number of chunks must have.
#[must_use]
pub fn header_len(bytes: &[u8]) -> Option<usize> {
    let chunks = usize::try_from(u32_at(bytes, 52)?).ok()?;
    Some((68 + 4 * chunks).div_ceil(256) * 256)
}

/// `bytes` with a manifest's fingerprint made right, if they are a document that has one.
#[must_use]
pub fn forge_manifest(bytes: &[u8]) -> Option<Vec<u8>> {
    let document: serde_json::Value = serde_json::from_slice(bytes).ok()?;
    let stated = document.get("fingerprint")?.as_str().filter(|text| text.len() == 64)?;
    let at = bytes.windows(64).position(|window| window == stated.as_bytes())?;
    let mut forged = bytes.to_vec();
    put(&mut forged, at, &[b'0'; 64]);
    let digest: [u8; 32] = Sha256::digest(&forged).into();
    let text: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    put(&mut forged, at, text.as_bytes());
    Some(forged)
}

/// The frames that `bytes` begin with, up to the first that is none or is cut short.
pub fn frames(mut bytes: &[u8]) -> impl Iterator<Item = (FrameHeader, &[u8])> {
    std::iter::from_fn(move || {
        let (head, rest) = bytes.split_first_chunk::<HEADER_BYTES>()?;
        let header = FrameHeader::decode(head).ok()?;
        let (body, rest) = rest.split_at_checked(usize::try_from(header.body_bytes).ok()?)?;
        bytes = rest;
        Some((header, body))
    })
}

/// A secret that no input contains: what it protects must stay closed.
///
/// # Panics
/// Never: the text is long enough to be a secret.
#[must_use]
pub fn unknown_secret() -> Secret {
    Secret::new(b"known to one end of every fuzzed handshake").expect("long enough")
}

/// The store that the fuzzed ends serve or want.
///
/// # Panics
/// The seed is not a manifest: `fuzz/make-seeds` and the format have come apart.
#[must_use]
pub fn manifest() -> Manifest {
    let bytes = include_bytes!("../seeds/manifest/one-layer");
    Manifest::parse(bytes).expect("the seed is a sound manifest")
}
