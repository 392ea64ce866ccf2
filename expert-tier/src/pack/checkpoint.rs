//! Opens a checkpoint: which shards there are, what they hold, and whether the index agrees.
//!
//! Memory: 16 bytes and a place in a hash table for each tensor, so that a name that occurs twice
//! is found wherever it does; names themselves are kept for expert tensors only, once per layer
//! and not per expert.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::OFlags;
use serde::de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, Visitor};

use super::config::Config;
use super::foreign::Foreign;
use super::group::{Found, Trees};
use super::header::{EachEntry, MAX_HEADER_BYTES, header_crc32, read_header};
use super::names::{Place, classify};
use super::{PackError, foreign};
use crate::files::{Change, FileIdentity, open_regular};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
const CONFIG: &str = "config.json";
const SUFFIX: &str = ".safetensors";
/// Most shards; several times those of the largest checkpoint published so far.
const MAX_SHARDS: usize = 65_536;

/// A file of tensors, as it was when its header was read.
#[derive(Debug)]
pub(super) struct Shard {
    /// Within the checkpoint's directory.
    pub(super) name: String,
    pub(super) identity: FileIdentity,
    /// CRC-32 of the header with its length.
    pub(super) header_crc32: u32,
    /// Whether it was seen with an identity of which only its bytes can tell whether it is the file
    /// that was planned with.
    moved: AtomicBool,
}

impl Shard {
    /// Opens the shard, which must be the file that was planned with.
    pub(super) fn open(&self, dir: &Path) -> Result<File, PackError> {
        let path = dir.join(&self.name);
        let opened = open_regular(&path, OFlags::RDONLY);
        let file = opened.map_err(PackError::io("open", &path))?;
        self.check_unchanged(&file, dir)?;
        Ok(file)
    }

    /// Refuses what was read from `file` if it is not what was planned with. What was read before
    /// this call is of one state of the file with the header that says where to read; unless the
    /// shard has [moved](Self::has_moved).
    pub(super) fn check_unchanged(&self, file: &File, dir: &Path) -> Result<(), PackError> {
        let now = FileIdentity::of(file);
        let now = now.map_err(|error| PackError::io("look at", &dir.join(&self.name))(error))?;
        match self.identity.difference(&now) {
            None => Ok(()),
            Some(Change::Moved(_)) => {
                self.set_moved();
                Ok(())
            }
            Some(Change::Content(how)) => Err(self.changed(how)),
        }
    }

    /// Whether all that was read of it must be compared with what can be read now.
    pub(super) fn has_moved(&self) -> bool {
        // Relaxed: looked at when those who set it have been joined.
        self.moved.load(Ordering::Relaxed)
    }

    pub(super) fn set_moved(&self) {
        self.moved.store(true, Ordering::Relaxed);
    }

    /// Compares the header with the one that was planned with.
    pub(super) fn check_header(&self, dir: &Path) -> Result<(), PackError> {
        let file = self.open(dir)?;
        let found = header_crc32(&file).map_err(PackError::io("read", &dir.join(&self.name)))?;
        if found == self.header_crc32 { Ok(()) } else { Err(self.changed("its header changed")) }
    }

    pub(super) fn changed(&self, how: &'static str) -> PackError {
        PackError::ShardChanged { shard: self.name.clone(), how }
    }
}

/// A checkpoint whose every header was read and found sound.
pub(super) struct Checkpoint {
    pub(super) config: Config,
    /// Tensors refer to them by position.
    pub(super) shards: Vec<Shard>,
    pub(super) trees: Trees,
}

impl Checkpoint {
    pub(super) fn open(dir: &Path) -> Result<Self, PackError> {
        let not = |why: String| PackError::NotACheckpoint { path: dir.into(), why };
        match fs::metadata(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(not("no such directory".into()));
            }
            Err(error) => return Err(PackError::io("look at", dir)(error)),
            Ok(found) if !found.is_dir() => return Err(not(not_a_directory(dir))),
            Ok(_) => {}
        }
        if !is_there(&dir.join(CONFIG))? {
            return Err(not(format!("it has no {CONFIG}")));
        }
        let config = Config::read(&dir.join(CONFIG))?;
        let index = dir.join(INDEX);
        let indexed = is_there(&index)?;
        let files = list(dir)?;
        let shards = if indexed { Shards::of_index(&index)? } else { Shards::single(dir, &files)? };
        let mut names = Names::default();
        let mut trees = Trees::default();
        let mut identities = Vec::new();
        for number in 0..shards.names.len() {
            identities.push(shards.scan(dir, number, &mut names, &mut trees)?);
        }
        if indexed {
            check_index(&index, &shards.names, &names)?;
        }
        check_strays(dir, files, &shards.names, indexed, trees.main())?;
        let shards = shards.names.into_iter().zip(identities);
        let shards = shards.map(|(name, (identity, header_crc32))| {
            let moved = AtomicBool::new(false);
            Shard { name, identity, header_crc32, moved }
        });
        Ok(Self { config, shards: shards.collect(), trees })
    }
}

/// Whether there is anything of this name, be it a link to nothing: what is there and cannot be
/// read must stop the pack, and not be taken for absent.
fn is_there(path: &Path) -> Result<bool, PackError> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(PackError::io("look at", path)(error)),
    }
}

/// What a path names that should be a checkpoint's directory and is none.
fn not_a_directory(path: &Path) -> String {
    let head = open_regular(path, OFlags::RDONLY).and_then(|file| foreign::head_of(&file));
    match head.ok().and_then(|head| foreign::recognise(&head)) {
        Some(Foreign { kind, advice }) if !kind.starts_with("a safetensors") => {
            format!("it is not a directory but {kind}: {advice}")
        }
        Some(_) => "it is not a directory but one of its shards: give the directory".into(),
        None => "it is not a directory".into(),
    }
}

/// Every `*.safetensors` of a directory, sorted, without those that hold metadata of macOS.
fn list(dir: &Path) -> Result<Vec<String>, PackError> {
    let mut names = Vec::new();
    let mut passed_over = Vec::new();
    for entry in fs::read_dir(dir).map_err(PackError::io("list", dir))? {
        let name = entry.map_err(PackError::io("list", dir))?.file_name();
        if !name.as_bytes().ends_with(SUFFIX.as_bytes()) {
            continue;
        }
        let name = name.into_string();
        let name = name.map_err(|name| {
            let why = format!("the name of its file {name:?} is not UTF-8");
            PackError::NotACheckpoint { path: dir.into(), why }
        })?;
        let list = if is_apple_double(dir, &name) { &mut passed_over } else { &mut names };
        list.push(name);
    }
    names.sort_unstable();
    if let Some(first) = passed_over.iter().min() {
        let files = passed_over.len();
        tracing::info!(files, "passed over AppleDouble files, which macOS writes: {first} ...");
    }
    Ok(names)
}

/// Whether `name` is what macOS keeps of another file on a file system without room for it: by its
/// name, and not a shard by its bytes.
fn is_apple_double(dir: &Path, name: &str) -> bool {
    let path = dir.join(name);
    let Some(of) = name.strip_prefix("._") else { return false };
    let head = open_regular(&path, OFlags::RDONLY).and_then(|file| foreign::head_of(&file));
    head.is_ok_and(|head| {
        let marked = foreign::recognise(&head).is_some_and(|foreign| foreign.is_apple_double());
        marked || dir.join(of).exists() && !foreign::starts_as_safetensors(&head)
    })
}

/// Weights of other formats in a directory without safetensors, and what to do; empty if none.
fn other_weights(dir: &Path) -> String {
    const KINDS: [(&[&str], &str); 3] = [
        (&[".gguf", ".ggml"], "pack the safetensors checkpoint that it was made from"),
        (
            &[".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".npz"],
            "only safetensors are packed: download those of the model, or convert it \
             (transformers: save_pretrained)",
        ),
        (&[".incomplete", ".part", ".partial", ".aria2", ".crdownload"], "finish the download"),
    ];
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    let of = |suffixes: &[&str]| names.iter().find(|n| suffixes.iter().any(|s| n.ends_with(s)));
    let found = KINDS.iter().find_map(|(suffixes, advice)| Some((of(suffixes)?, advice)));
    found.map_or(String::new(), |(name, advice)| format!("; it has {name}: {advice}"))
}

/// The `7` of `model-00002-of-00007.safetensors`.
fn shards_by_name(name: &str) -> Option<u32> {
    let (head, total) = name.strip_suffix(SUFFIX)?.rsplit_once("-of-")?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = head.rsplit('-').next()?;
    (digits(number) && digits(total)).then(|| total.parse().unwrap_or(u32::MAX))
}

/// Refuses a checkpoint beside whose shards lies a file with more experts of the packed tree.
///
/// Other files are none of its business: the same model once more under other names
/// (`consolidated.safetensors`, whose tree has no prefix), adapters, vision towers. Where no
/// tree has experts yet, those of any tree are refused.
fn check_strays(
    dir: &Path,
    files: Vec<String>,
    shards: &[String],
    indexed: bool,
    main: Option<&str>,
) -> Result<(), PackError> {
    let known: HashSet<&str> = shards.iter().map(String::as_str).collect();
    for file in files.into_iter().filter(|name| !known.contains(name.as_str())) {
        let path = dir.join(&file);
        if path.is_dir() {
            continue;
        }
        read_header(&path, &file, |tensor, entry, _| match classify(&tensor, entry.shape.len()) {
            Ok(Place { layer: Some((tree, _)), role: Some(_), .. })
                if main.is_none_or(|main| main == tree) =>
            {
                let why = if indexed {
                    format!("{INDEX} does not name the file")
                } else {
                    format!("without an {INDEX} the checkpoint is {} alone", shards[0])
                };
                Err(PackError::Stray { file: file.clone(), tensor, why })
            }
            // A name that would not be understood is of some other layout.
            _ => Ok(()),
        })?;
    }
    Ok(())
}

/// The shards, each with the first tensor that the index places there.
struct Shards {
    names: Vec<String>,
    first_tensors: Vec<Option<String>>,
}

impl Shards {
    fn of_index(index: &Path) -> Result<Self, PackError> {
        let mut known: HashMap<String, String> = HashMap::new();
        read_index(index, |tensor, shard| {
            if known.contains_key(&shard) {
                return Ok(());
            }
            if shard.is_empty() || shard.contains(['/', '\0']) || shard == "." || shard == ".." {
                let why = format!("{tensor} is placed in {shard:?}, which is not a file name");
                return Err(PackError::document(index, why));
            }
            if known.len() == MAX_SHARDS {
                return Err(PackError::document(index, format!("more than {MAX_SHARDS} shards")));
            }
            known.insert(shard, tensor);
            Ok(())
        })?;
        let mut known: Vec<_> = known.into_iter().collect();
        known.sort_unstable();
        let (names, tensors) =
            known.into_iter().map(|(shard, tensor)| (shard, Some(tensor))).unzip();
        Ok(Self { names, first_tensors: tensors })
    }

    fn single(dir: &Path, files: &[String]) -> Result<Self, PackError> {
        let one = |name: String| Ok(Self { names: vec![name], first_tensors: vec![None] });
        if is_there(&dir.join(SINGLE))? {
            return one(SINGLE.into());
        }
        let not = |why: String| Err(PackError::NotACheckpoint { path: dir.into(), why });
        match files {
            [] => not(format!("it has neither {INDEX} nor {SINGLE}{}", other_weights(dir))),
            [name] if shards_by_name(name).is_some_and(|shards| shards > 1) => {
                not(format!("{name} is a part of it, going by its name, and there is no {INDEX}"))
            }
            [name] => one(name.clone()),
            [a, b, ..] => {
                let count = files.len();
                not(format!("it has {count} shards ({a}, {b}, ...) and no {INDEX}"))
            }
        }
    }

    fn scan(
        &self,
        dir: &Path,
        number: usize,
        names: &mut Names,
        trees: &mut Trees,
    ) -> Result<(FileIdentity, u32), PackError> {
        let shard = &self.names[number];
        let path = dir.join(shard);
        if let (Err(error), Some(tensor)) = (fs::metadata(&path), &self.first_tensors[number])
            && error.kind() == io::ErrorKind::NotFound
        {
            return Err(PackError::ShardAbsent { shard: shard.clone(), tensor: tensor.clone() });
        }
        // MAX_SHARDS bounds the number far below 2^32.
        let number = u32::try_from(number).unwrap_or(u32::MAX);
        read_header(&path, shard, |name, entry, offset| {
            if let Some(first) = names.insert(&name, number) {
                let first = self.names[first as usize].clone();
                let second = shard.clone();
                return Err(PackError::DuplicateTensor { tensor: name, first, second });
            }
            match classify(&name, entry.shape.len()) {
                Ok(place) => {
                    let found = Found { shard: number, offset, entry };
                    trees.add(&name, place, found);
                    Ok(())
                }
                Err(why) => Err(PackError::NotUnderstood { tensor: name, why }),
            }
        })
    }
}

/// Which shard has a tensor, by a 128-bit hash of its name.
///
/// The hashes are keyed at random, so that no file can be made to collide.
#[derive(Default)]
struct Names {
    low: RandomState,
    high: RandomState,
    shards: HashMap<(u64, u64), u32>,
}

impl Names {
    fn id(&self, name: &str) -> (u64, u64) {
        (self.low.hash_one(name), self.high.hash_one(name))
    }

    /// Remembers a tensor; the shard that has it already, if one does.
    fn insert(&mut self, name: &str, shard: u32) -> Option<u32> {
        self.shards.insert(self.id(name), shard)
    }

    fn shard(&self, name: &str) -> Option<u32> {
        self.shards.get(&self.id(name)).copied()
    }
}

/// Every entry of the index must be true. Tensors that it leaves out are taken all the same.
fn check_index(index: &Path, shards: &[String], names: &Names) -> Result<(), PackError> {
    read_index(index, |tensor, stated| match names.shard(&tensor) {
        None => Err(PackError::NotInShard { tensor, shard: stated }),
        Some(found) if shards[found as usize] != stated => {
            Err(PackError::WrongShard { tensor, found: shards[found as usize].clone(), stated })
        }
        Some(_) => Ok(()),
    })
}

/// Calls `each` with the entries of `weight_map`: tensor and shard.
fn read_index(
    path: &Path,
    each: impl FnMut(String, String) -> Result<(), PackError>,
) -> Result<(), PackError> {
    let file = open_regular(path, OFlags::RDONLY).map_err(PackError::io("open", path))?;
    let head = foreign::head_of(&file).map_err(PackError::io("read", path))?;
    if head.trim_ascii_start().first() != Some(&b'{')
        && let Some(foreign) = foreign::recognise(&head)
    {
        return Err(foreign.error(path, "an index of shards in JSON"));
    }
    let bytes = file.metadata().map_err(PackError::io("look at", path))?.len();
    if bytes > MAX_HEADER_BYTES {
        let why = format!("{bytes} bytes long, accepted are {MAX_HEADER_BYTES}");
        return Err(PackError::document(path, why));
    }
    let reader = BufReader::with_capacity(256 << 10, file.take(MAX_HEADER_BYTES));
    let mut json = serde_json::Deserializer::from_reader(reader);
    let mut refused = None;
    let outcome = WeightMap { each, refused: &mut refused }.deserialize(&mut json);
    match (refused, outcome.and_then(|()| json.end())) {
        (Some(error), _) => Err(error),
        (None, Ok(())) => Ok(()),
        (None, Err(error)) => Err(PackError::document(path, error)),
    }
}

/// Finds `weight_map` in an index and streams it.
struct WeightMap<'a, F> {
    each: F,
    refused: &'a mut Option<PackError>,
}

impl<'de, F: FnMut(String, String) -> Result<(), PackError>> DeserializeSeed<'de>
    for WeightMap<'_, F>
{
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, F: FnMut(String, String) -> Result<(), PackError>> Visitor<'de> for WeightMap<'_, F> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an index with a weight_map")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        let mut seen = false;
        while let Some(key) = map.next_key::<String>()? {
            if key != "weight_map" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            if std::mem::replace(&mut seen, true) {
                return Err(A::Error::custom("weight_map is there twice"));
            }
            map.next_value_seed(EachEntry::new(&mut self.each, self.refused))?;
        }
        if seen { Ok(()) } else { Err(A::Error::custom("it has no weight_map")) }
    }
}
