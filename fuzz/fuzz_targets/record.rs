//! A record's bytes, from disk or from a peer, as they arrive.

#![no_main]

use arbitrary::Arbitrary;
use expert_tier::dtype::Dtype;
use expert_tier::fingerprint::Fingerprint;
use expert_tier::layout::{ExpertRecordSpec, LayerLayout, TensorSpec};
use expert_tier::record::{RecordCheck, RecordIdentity, UnverifiedHeader, encode_header};
use libfuzzer_sys::fuzz_target;
use metrale_fuzz::{crc32, forge_record, header_len, put, u32_at};

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    layer: u32,
    expert: u32,
    payload_bytes: u16,
    /// Chunk size: 4096 shifted by this, 4 or 8 KiB.
    chunk_shift: u8,
    fingerprint: [u8; 32],
    /// Where the bytes are cut on their way in.
    step: u16,
    /// A byte of the sound record to change, and how.
    flip: (u32, u8),
    bytes: &'a [u8],
}

fuzz_target!(|input: Input<'_>| {
    let Some(identity) = identity(&input) else { return };
    header(input.bytes);
    record(&identity, input.bytes, input.step);
    if let Some(forged) = forge_record(input.bytes) {
        header(&forged);
        record(&identity, &forged, input.step);
    }
    let mut sound = encode(&identity, input.bytes);
    record(&identity, &sound, input.step);
    assert_eq!(verdict(&identity, &sound, input.step), Ok(()), "a sound record was refused");

    let at = input.flip.0 as usize % sound.len();
    sound[at] ^= input.flip.1.max(1);
    assert!(verdict(&identity, &sound, input.step).is_err(), "byte {at} changed unnoticed");
    // Changed once more, by one who can compute the header's checksum.
    if let Some(forged) = forge_record(&sound).filter(|forged| at < forged.len()) {
        record(&identity, &forged, input.step);
    }
});

/// Only identities that a store can have: their limits are the layout's business.
fn identity(input: &Input<'_>) -> Option<RecordIdentity> {
    let tensor = TensorSpec {
        name: "tensor".into(),
        dtype: Dtype::U8,
        // Four chunks of the smallest size and a byte: more would cost inputs and show nothing new.
        shape: vec![u64::from(input.payload_bytes) % 16_386],
        offset: 0,
        bytes: 0,
    };
    let spec = ExpertRecordSpec::lay_out(vec![tensor]).ok()?;
    let chunk_bytes = 4096 << (input.chunk_shift % 2);
    let layer = LayerLayout::new(input.layer, 1, String::new(), spec, chunk_bytes).ok()?;
    Some(RecordIdentity::new(&Fingerprint(input.fingerprint), &layer, input.expert))
}

/// The record of `identity` whose payload is `bytes`, repeated.
fn encode(identity: &RecordIdentity, bytes: &[u8]) -> Vec<u8> {
    let content = if bytes.is_empty() { &[0] } else { bytes };
    let payload_len = usize::try_from(identity.payload_bytes).expect("16 bits");
    let payload: Vec<u8> = content.iter().copied().cycle().take(payload_len).collect();
    let crcs: Vec<u32> = payload.chunks(identity.chunk_bytes as usize).map(crc32).collect();
    let mut record = vec![0; usize::try_from(identity.header_bytes()).expect("few chunks")];
    encode_header(identity, &crcs, &mut record);
    record.extend(payload);
    record
}

/// A header that is accepted has the magic, the length and the checksum it should.
fn header(bytes: &[u8]) {
    let Ok(header) = UnverifiedHeader::new(bytes).verify() else { return };
    let length = header_len(bytes).expect("an accepted header has all its fields");
    assert_eq!(&bytes[..10], b"MTRLEXPR\x01\x00");
    assert_eq!(u32_at(bytes, 12).map(|n| n as usize), Some(length));
    assert_eq!(u32_at(bytes, length - 4), Some(crc32(&bytes[..length - 4])));
    let chunks = u64::from(u32_at(bytes, 52).expect("within the header"));
    assert_eq!(header.chunk_crc(chunks), None);
    assert!(chunks == 0 || header.chunk_crc(chunks - 1).is_some());
}

/// A record that is accepted says what was asked for and has the checksums it states, and no way
/// of cutting it changes the verdict.
fn record(identity: &RecordIdentity, bytes: &[u8], step: u16) {
    let whole = verdict(identity, bytes, u16::MAX);
    assert_eq!(verdict(identity, bytes, step).is_ok(), whole.is_ok());
    if whole.is_err() {
        return;
    }
    let length = usize::try_from(identity.record_bytes()).expect("a small record");
    let (header, payload) = bytes[..length].split_at(header_len(bytes).expect("accepted"));
    for (chunk, data) in payload.chunks(identity.chunk_bytes as usize).enumerate() {
        assert_eq!(u32_at(header, 64 + 4 * chunk), Some(crc32(data)), "chunk {chunk}");
    }
    let mut fields = header[..64].to_vec();
    put(&mut fields, 10, &[0, 0]);
    put(&mut fields, 16, &identity.fingerprint_prefix);
    put(&mut fields, 32, &identity.key.layer.to_le_bytes());
    put(&mut fields, 36, &identity.key.expert.to_le_bytes());
    put(&mut fields, 40, &identity.payload_bytes.to_le_bytes());
    put(&mut fields, 48, &identity.chunk_bytes.to_le_bytes());
    put(&mut fields, 56, &identity.spec.0);
    assert_eq!(fields, header[..64], "another record was accepted");
}

/// The verdict on `bytes` fed `step` bytes at a time.
fn verdict(identity: &RecordIdentity, bytes: &[u8], step: u16) -> Result<(), String> {
    // Not byte by byte: that would spend the fuzzing time on calls rather than on inputs.
    let step = usize::from(step).max(bytes.len() / 64).max(1);
    let mut check = RecordCheck::new(*identity);
    for end in (step..bytes.len()).step_by(step).chain([bytes.len()]) {
        check.advance(&bytes[..end]);
    }
    check.finish().map_err(|error| error.to_string())
}
