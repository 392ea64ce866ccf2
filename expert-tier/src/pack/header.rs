//! Reads the header of a safetensors file without holding its text.
//!
//! A file is `n: u64 | n bytes of JSON | data`. The JSON maps tensor names to dtype, shape and a
//! range of the data; real ones exceed 100 MB, so they are streamed, and an entry costs 16 bytes
//! here besides what the caller keeps of it. The ranges must cover the data without hole or
//! overlap, and the file must end where they do.

use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::marker::PhantomData;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::OFlags;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::foreign::starts_as_safetensors;
use super::{PackError, foreign};
use crate::dtype::Dtype;
use crate::files::{FileIdentity, open_regular};

/// Longest header accepted.
pub(super) const MAX_HEADER_BYTES: u64 = 512 << 20;
/// Most dimensions read of any tensor; more than any framework has.
const MAX_DIMS: usize = 64;
const METADATA: &str = "__metadata__";

/// One entry of a header.
#[derive(Debug, Deserialize)]
pub(super) struct Entry {
    /// As the file spells it: a dense tensor may have a type that is not known here.
    pub(super) dtype: String,
    #[serde(deserialize_with = "dims")]
    pub(super) shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl Entry {
    /// Bytes of the tensor in the file.
    pub(super) fn bytes(&self) -> u64 {
        self.data_offsets.1.saturating_sub(self.data_offsets.0)
    }
}

/// Calls `each` with every tensor: its name, its entry, and where in the file its bytes start.
/// Returns which file it was, and [`header_crc32`].
///
/// # Errors
/// The file breaks the format, or `each` refuses a tensor.
pub(super) fn read_header(
    path: &Path,
    shard: &str,
    mut each: impl FnMut(String, Entry, u64) -> Result<(), PackError>,
) -> Result<(FileIdentity, u32), PackError> {
    let mut file = open_regular(path, OFlags::RDONLY).map_err(PackError::io("open", path))?;
    // Before the first byte is read: a change from here on makes another identity.
    let identity = FileIdentity::of(&file).map_err(PackError::io("look at", path))?;
    let found = identity.bytes();
    let head = foreign::head_of(&file).map_err(PackError::io("read", path))?;
    if !starts_as_safetensors(&head)
        && let Some(foreign) = foreign::recognise(&head).or_else(|| foreign::json_text(&head))
    {
        return Err(foreign.error(path, "a safetensors shard"));
    }
    let length = |expected| PackError::ShardLength { shard: shard.into(), found, expected };
    if found < 8 {
        return Err(length(8));
    }
    let mut prefix = [0; 8];
    file.read_exact(&mut prefix).map_err(PackError::io("read", path))?;
    let header_bytes = u64::from_le_bytes(prefix);
    if header_bytes > MAX_HEADER_BYTES {
        let why = format!("the header has {header_bytes} bytes, accepted are {MAX_HEADER_BYTES}");
        return Err(PackError::document(path, why));
    }
    let data_start = 8 + header_bytes;
    if found < data_start {
        return Err(length(data_start));
    }
    let mut spans = Vec::new();
    stream(&file, path, header_bytes, |name, entry: Entry| {
        check_length(path, &name, &entry)?;
        let (start, end) = entry.data_offsets;
        spans.push((start, end));
        each(name, entry, data_start.saturating_add(start))
    })?;
    spans.sort_unstable();
    let mut covered = 0;
    for &(start, end) in &spans {
        if start != covered {
            return Err(misplaced(&mut file, path, header_bytes, (start, end), covered));
        }
        covered = end;
    }
    let expected = data_start.saturating_add(covered);
    if found != expected {
        return Err(length(expected));
    }
    let crc = header_crc32(&file).map_err(PackError::io("read", path))?;
    Ok((identity, crc))
}

/// CRC-32 of a shard's header and of the length before it.
pub(super) fn header_crc32(file: &File) -> io::Result<u32> {
    let mut block = vec![0; 1 << 20];
    file.read_exact_at(&mut block[..8], 0)?;
    let mut hash = crc32fast::Hasher::new();
    hash.update(&block[..8]);
    let length = u64::from_le_bytes(std::array::from_fn(|at| block[at]));
    let (mut at, end) = (8, 8 + length.min(MAX_HEADER_BYTES));
    while at < end {
        let part = &mut block[..usize::try_from(end - at).unwrap_or(usize::MAX).min(1 << 20)];
        file.read_exact_at(part, at)?;
        hash.update(part);
        at += part.len() as u64;
    }
    Ok(hash.finalize())
}

fn check_length(path: &Path, name: &str, entry: &Entry) -> Result<(), PackError> {
    let (start, end) = entry.data_offsets;
    let Some(found) = end.checked_sub(start) else {
        let why = format!("{name} has data_offsets [{start}, {end}]");
        return Err(PackError::document(path, why));
    };
    let Ok(dtype) = entry.dtype.parse::<Dtype>() else { return Ok(()) };
    let expected = dtype.tensor_bytes(&entry.shape);
    if expected == Some(found) {
        return Ok(());
    }
    let expected = expected.map_or("no whole number of".into(), |bytes| bytes.to_string());
    let shape = &entry.shape;
    let why = format!("{name} has {found} bytes, {dtype} {shape:?} makes it {expected} bytes");
    Err(PackError::document(path, why))
}

/// Reads the header again to name the tensor that does not start where the one before it ends.
fn misplaced(
    file: &mut File,
    path: &Path,
    header_bytes: u64,
    span: (u64, u64),
    covered: u64,
) -> PackError {
    if let Err(error) = file.seek(SeekFrom::Start(8)) {
        return PackError::io("read", path)(error);
    }
    let mut culprit = String::from("a tensor");
    let again = stream(file, path, header_bytes, |name, entry: Entry| {
        if entry.data_offsets == span {
            culprit = name;
        }
        Ok(())
    });
    if let Err(error) = again {
        return error;
    }
    let fault = if span.0 < covered { "overlaps the one before it" } else { "leaves a hole" };
    let start = span.0;
    let why = format!("{culprit} starts at data byte {start}, expected {covered}: it {fault}");
    PackError::document(path, why)
}

fn stream(
    file: &File,
    path: &Path,
    header_bytes: u64,
    each: impl FnMut(String, Entry) -> Result<(), PackError>,
) -> Result<(), PackError> {
    let reader = BufReader::with_capacity(256 << 10, file.take(header_bytes));
    let mut json = serde_json::Deserializer::from_reader(reader);
    let mut refused = None;
    let outcome =
        EachEntry::new(each, &mut refused).deserialize(&mut json).and_then(|()| json.end());
    match (refused, outcome) {
        (Some(error), _) => Err(error),
        (None, Ok(())) => Ok(()),
        (None, Err(error)) => Err(PackError::document(path, format!("bad header: {error}"))),
    }
}

/// Feeds a JSON object's entries to `each`, one at a time, leaving out `__metadata__`.
pub(super) struct EachEntry<'a, V, F: FnMut(String, V) -> Result<(), PackError>> {
    each: F,
    /// Receives the error of `each`, which serde's errors cannot carry.
    refused: &'a mut Option<PackError>,
    value: PhantomData<V>,
}

impl<'a, V, F: FnMut(String, V) -> Result<(), PackError>> EachEntry<'a, V, F> {
    pub(super) fn new(each: F, refused: &'a mut Option<PackError>) -> Self {
        Self { each, refused, value: PhantomData }
    }
}

impl<'de, V, F> DeserializeSeed<'de> for EachEntry<'_, V, F>
where
    V: Deserialize<'de>,
    F: FnMut(String, V) -> Result<(), PackError>,
{
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, V, F> Visitor<'de> for EachEntry<'_, V, F>
where
    V: Deserialize<'de>,
    F: FnMut(String, V) -> Result<(), PackError>,
{
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with an entry per tensor")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let value = map.next_value();
            let value = value.map_err(|error| A::Error::custom(format!("{name}: {error}")))?;
            if let Err(error) = (self.each)(name, value) {
                *self.refused = Some(error);
                return Err(A::Error::custom("refused"));
            }
        }
        Ok(())
    }
}

fn dims<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<u64>, D::Error> {
    struct Dims;
    impl<'de> Visitor<'de> for Dims {
        type Value = Vec<u64>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "at most {MAX_DIMS} dimensions")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u64>, A::Error> {
            let mut dims = Vec::new();
            while let Some(dim) = seq.next_element()? {
                if dims.len() == MAX_DIMS {
                    return Err(A::Error::custom(format!("more than {MAX_DIMS} dimensions")));
                }
                dims.push(dim);
            }
            Ok(dims)
        }
    }
    deserializer.deserialize_seq(Dims)
}
