//! What a pack that may be resumed has written so far: a file in its staging directory.
//!
//! Lines of JSON. The first is the [`Head`]: which plan this is, and of which sources. Each further
//! one is a record that lies in its layer's file, with the CRC-32 of each chunk of its payload. A
//! line may be torn, or there before its record is on the disk, since nothing is synced: a reader
//! takes lines up to the first that is none, and believes a record only if its bytes have these
//! checksums.
//!
//! A line has 8 digits for each chunk, 65,536 of which a record may have, so `LINE_BYTES` hold any.

use std::fs::File;
use std::io::{self, BufRead, Read, Write};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::files::FileIdentity;
use crate::fingerprint::Fingerprint;
use crate::layout::{ExpertLayout, LayerLayout, MAX_CHUNKS};

/// Its name in the staging directory.
pub(super) const FILE_NAME: &str = "pack-journal";
const FORMAT: &str = "metrale-pack-journal";
const VERSION: u32 = 1;
/// Longest line of a record.
const LINE_BYTES: u64 = 8 * MAX_CHUNKS + 128;
/// Longest first line: some 300 bytes for each of the 65,536 shards there may be.
const HEAD_BYTES: u64 = 32 << 20;

/// Which pack a journal is of.
#[derive(Clone, Serialize, Deserialize, PartialEq, Eq, Debug)]
#[serde(deny_unknown_fields)]
pub(super) struct Head {
    format: String,
    version: u32,
    /// Fingerprint of the store's manifest with zeros for all checksums.
    plan: String,
    /// The description of made-up weights; empty for a checkpoint.
    synthetic: String,
    /// Every shard.
    pub(super) sources: Vec<SourceFile>,
}

/// A shard as it was when its header was read.
#[derive(Clone, Serialize, Deserialize, PartialEq, Eq, Debug)]
#[serde(deny_unknown_fields)]
pub(super) struct SourceFile {
    pub(super) name: String,
    pub(super) header_crc32: u32,
    pub(super) identity: FileIdentity,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    layer: u32,
    expert: u32,
    crcs: String,
}

impl Head {
    pub(super) fn new(plan: &Fingerprint, synthetic: String, sources: Vec<SourceFile>) -> Self {
        let (format, plan) = (FORMAT.into(), plan.to_string());
        Self { format, version: VERSION, plan, synthetic, sources }
    }

    /// Why a pack of `now` cannot go on with what a pack of `self` wrote. The names of the sources
    /// of which only the content can tell whether they are the same are added to `moved`.
    pub(super) fn obstacle(&self, now: &Self, moved: &mut Vec<String>) -> Option<String> {
        if (&self.format, self.version) != (&now.format, now.version) {
            return Some("another version of this program wrote it".into());
        }
        let names = |head: &Self| head.sources.iter().map(|s| s.name.clone()).collect::<Vec<_>>();
        for (before, after) in self.sources.iter().zip(&now.sources) {
            if before.name != after.name {
                break;
            }
            let name = &before.name;
            match before.identity.difference(&after.identity) {
                Some(change) if change.is_of_content() => {
                    return Some(format!("shard {name} is not as it was: {}", change.how()));
                }
                _ if before.header_crc32 != after.header_crc32 => {
                    return Some(format!("shard {name} is not as it was: its header changed"));
                }
                Some(_) => moved.push(name.clone()),
                None => {}
            }
        }
        if names(self) != names(now) || self.plan != now.plan || self.synthetic != now.synthetic {
            return Some("it is of another checkpoint, or of other settings".into());
        }
        None
    }
}

/// The records that lie in a staging directory, with their checksums.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Staged {
    /// By layer, expert and chunk; zeros for a record that is not there.
    pub(super) crcs: Vec<Vec<u32>>,
    /// By layer and expert.
    pub(super) known: Vec<Vec<bool>>,
}

impl Staged {
    /// None of `layout`'s records.
    pub(super) fn nothing(layout: &ExpertLayout) -> Self {
        let crcs = |l: &LayerLayout| vec![0; l.experts() as usize * l.chunks() as usize];
        let known = |l: &LayerLayout| vec![false; l.experts() as usize];
        Self {
            crcs: layout.layers().iter().map(crcs).collect(),
            known: layout.layers().iter().map(known).collect(),
        }
    }

    /// How many records there are.
    pub(super) fn records(&self) -> u64 {
        self.known.iter().flatten().filter(|&&known| known).count() as u64
    }

    /// How many bytes of the layers' files these take.
    pub(super) fn bytes(&self, layout: &ExpertLayout) -> u64 {
        let of = |(layer, known): (&LayerLayout, &Vec<bool>)| {
            layer.stride() * known.iter().filter(|&&known| known).count() as u64
        };
        layout.layers().iter().zip(&self.known).map(of).sum()
    }

    fn insert(&mut self, layout: &ExpertLayout, line: &Line) -> Option<()> {
        let index = layout.layer_index(line.layer)?;
        let chunks = layout.layers()[index].chunks() as usize;
        let known = self.known[index].get_mut(line.expert as usize)?;
        let digits = line.crcs.as_bytes();
        if digits.len() != 8 * chunks || !digits.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        let record = &mut self.crcs[index][line.expert as usize * chunks..][..chunks];
        for (crc, digits) in record.iter_mut().zip(digits.chunks(8)) {
            *crc = u32::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
        }
        *known = true;
        Some(())
    }
}

/// A journal that was read.
pub(super) struct Journal {
    pub(super) head: Head,
    pub(super) staged: Staged,
    /// Bytes up to the end of the last line that is one: where the next one belongs.
    pub(super) bytes: u64,
}

/// Reads the journal of a pack of `layout`; `None` where it has no first line.
///
/// # Errors
/// It cannot be read.
pub(super) fn read(mut input: impl BufRead, layout: &ExpertLayout) -> io::Result<Option<Journal>> {
    let mut line = Vec::new();
    if !read_line(&mut input, HEAD_BYTES, &mut line)? {
        return Ok(None);
    }
    let Ok(head) = serde_json::from_slice::<Head>(&line) else { return Ok(None) };
    let mut bytes = line.len() as u64;
    let mut staged = Staged::nothing(layout);
    while read_line(&mut input, LINE_BYTES, &mut line)? {
        let Ok(record) = serde_json::from_slice::<Line>(&line) else { break };
        if staged.insert(layout, &record).is_none() {
            break;
        }
        bytes += line.len() as u64;
    }
    Ok(Some(Journal { head, staged, bytes }))
}

/// Reads a line with its end; `false` at the end of the file, and for one that is torn or too long.
fn read_line(input: &mut impl BufRead, limit: u64, line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    input.by_ref().take(limit).read_until(b'\n', line)?;
    Ok(line.last() == Some(&b'\n'))
}

/// Adds lines to a journal, from any worker.
pub(super) struct JournalWriter(Mutex<File>);

impl JournalWriter {
    /// A writer to `file`, at whose end the next line belongs.
    pub(super) fn new(file: File) -> Self {
        Self(Mutex::new(file))
    }

    /// Writes the first line.
    pub(super) fn head(&self, head: &Head) -> io::Result<()> {
        let mut line = serde_json::to_vec(head)?;
        line.push(b'\n');
        self.append(&line)
    }

    /// Says that the records of `layer` from `first` on lie in its file; `crcs` has those of all
    /// their chunks.
    pub(super) fn records(&self, layer: &LayerLayout, first: u32, crcs: &[u32]) -> io::Result<()> {
        let mut lines = Vec::new();
        for (expert, crcs) in (first..).zip(crcs.chunks(layer.chunks() as usize)) {
            let crcs = crcs.iter().map(|crc| format!("{crc:08x}")).collect();
            serde_json::to_writer(&mut lines, &Line { layer: layer.layer(), expert, crcs })?;
            lines.push(b'\n');
        }
        self.append(&lines)
    }

    fn append(&self, lines: &[u8]) -> io::Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write_all(lines)
    }
}

/// For the fuzz target of this module; not for use. The journal that the lines which were read
/// make, and how many bytes of `input` those are.
#[doc(hidden)]
#[must_use]
pub fn journal_for_fuzzing(input: &[u8], layout: &ExpertLayout) -> Option<(Vec<u8>, u64)> {
    let journal = read(input, layout).ok()??;
    let mut lines = serde_json::to_vec(&journal.head).ok()?;
    lines.push(b'\n');
    for (index, layer) in layout.layers().iter().enumerate() {
        let chunks = layer.chunks() as usize;
        for expert in (0..layer.experts()).filter(|&e| journal.staged.known[index][e as usize]) {
            let crcs = &journal.staged.crcs[index][expert as usize * chunks..][..chunks];
            let crcs = crcs.iter().map(|crc| format!("{crc:08x}")).collect();
            serde_json::to_writer(&mut lines, &Line { layer: layer.layer(), expert, crcs }).ok()?;
            lines.push(b'\n');
        }
    }
    Some((lines, journal.bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pack::SyntheticSpec;

    fn layout() -> ExpertLayout {
        let spec: SyntheticSpec = "layers=2,experts=3,bytes=9000".parse().unwrap();
        spec.layout(4096).unwrap()
    }

    fn head() -> Head {
        // A file that stays as it is meanwhile.
        let file = File::open(std::env::current_exe().unwrap()).unwrap();
        let identity = FileIdentity::of(&file).unwrap();
        let source = SourceFile { name: "a.safetensors".into(), header_crc32: 7, identity };
        Head::new(&Fingerprint([3; 32]), String::new(), vec![source])
    }

    fn written() -> Vec<u8> {
        let file = tempfile::NamedTempFile::new().unwrap();
        let writer = JournalWriter::new(file.reopen().unwrap());
        let layout = layout();
        writer.head(&head()).unwrap();
        writer.records(&layout.layers()[1], 1, &[1, 2, 3, 4, 5, 0xffff_ffff]).unwrap();
        std::fs::read(file.path()).unwrap()
    }

    #[test]
    fn a_journal_reads_back_what_was_written_up_to_the_first_torn_line() {
        let (text, layout) = (written(), layout());
        let journal = read(&text[..], &layout).unwrap().unwrap();
        assert_eq!((journal.head, journal.bytes), (head(), text.len() as u64));
        assert_eq!(journal.staged.known, [[false; 3], [false, true, true]]);
        assert_eq!(journal.staged.crcs[1], [0, 0, 0, 1, 2, 3, 4, 5, 0xffff_ffff]);
        let first = text.iter().position(|&byte| byte == b'\n').unwrap() + 1;
        let second = first + text[first..].iter().position(|&byte| byte == b'\n').unwrap() + 1;
        for length in 0..text.len() {
            let torn = read(&text[..length], &layout).unwrap();
            let found = torn.map(|journal| (journal.staged.records(), journal.bytes));
            let expected = match length {
                short if short < first => None,
                one if one < second => Some((0, first as u64)),
                _ => Some((1, second as u64)),
            };
            assert_eq!(found, expected, "{length}");
        }
    }

    #[test]
    fn lines_that_do_not_fit_the_layout_end_a_journal() {
        let text = written();
        let first = text.iter().position(|&byte| byte == b'\n').unwrap() + 1;
        let zeros = "0".repeat(24);
        for line in [
            format!(r#"{{"layer":2,"expert":0,"crcs":"{zeros}"}}"#),
            format!(r#"{{"layer":0,"expert":3,"crcs":"{zeros}"}}"#),
            format!(r#"{{"layer":0,"expert":0,"crcs":"{zeros}0"}}"#),
            format!(r#"{{"layer":0,"expert":0,"crcs":"+{}"}}"#, &zeros[1..]),
            format!(r#"{{"layer":0,"expert":0,"crcs":"{zeros}","more":1}}"#),
        ] {
            let bad = [&text[..first], line.as_bytes(), b"\n", &text[first..]].concat();
            let journal = read(&bad[..], &layout()).unwrap().unwrap();
            assert_eq!((journal.staged.records(), journal.bytes), (0, first as u64), "{line}");
        }
    }

    #[test]
    fn a_source_that_changed_is_named_and_one_whose_inode_moved_is_read_again() {
        let before = head();
        let with = |change: fn(&mut SourceFile)| {
            let mut after = head();
            after.sources = before.sources.clone();
            change(&mut after.sources[0]);
            let mut moved = Vec::new();
            (before.obstacle(&after, &mut moved), moved)
        };
        assert_eq!(with(|_| {}), (None, vec![]));
        let (why, _) = with(|source| source.header_crc32 = 8);
        assert!(why.is_some_and(|why| why.contains("a.safetensors is not as it was")));
        let (why, _) = with(|source| source.name = "b.safetensors".into());
        assert!(why.is_some_and(|why| why.contains("another checkpoint")));
        let moved = with(|source| source.identity.number += 1);
        assert_eq!(moved, (None, vec!["a.safetensors".to_string()]));
        let (why, _) = with(|source| source.identity.bytes += 1);
        assert!(why.is_some_and(|why| why.contains("its length changed")));
    }
}
