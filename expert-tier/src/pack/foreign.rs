//! What a file is that stands where a shard or a `config.json` should, and what to do about it.
//!
//! A kind is told by its first [`HEAD_BYTES`] bytes, and only after they were found to be no start
//! of what was expected, so a sound file is never refused here. Names and suffixes say nothing.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::PackError;

/// Bytes of a file that are looked at; a tar says what it is at 257.
pub(super) const HEAD_BYTES: usize = 512;
/// Most characters of a text that an error repeats.
const SHOWN_CHARS: usize = 60;

const PICKLE: &str = "shards must be safetensors, since a pickle runs code where it is read: download the \
     safetensors files of the model, or convert it (transformers: save_pretrained)";
const AGAIN: &str = "download or copy it again";
const UNPACK: &str = "unpack it first";

/// Kinds with fixed first bytes.
const MAGICS: [(&[u8], &str, &str); 22] = [
    (b"GGUF", "a GGUF file", "pack the safetensors checkpoint that it was made from"),
    (b"lmgg", "a GGML file", "pack the safetensors checkpoint that it was made from"),
    (b"tjgg", "a GGML file", "pack the safetensors checkpoint that it was made from"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes .bin, .pt and .pth", PICKLE),
    (b"\x80\x02", "a Python pickle", PICKLE),
    (b"\x80\x03", "a Python pickle", PICKLE),
    (b"\x80\x04", "a Python pickle", PICKLE),
    (b"\x80\x05", "a Python pickle", PICKLE),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", PICKLE),
    (b"\x93NUMPY", "a NumPy array", PICKLE),
    (b"\x00\x05\x16\x07", "AppleDouble metadata of macOS (the `._` file of another)", "delete it"),
    (b"\x00\x05\x16\x00", "an AppleSingle file of macOS", UNPACK),
    (b"\x00\x00\x00\x01Bud1", "a .DS_Store of macOS", "delete it"),
    (b"\x1f\x8b", "compressed with gzip", UNPACK),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", UNPACK),
    (b"\xfd7zXZ\0", "compressed with xz", UNPACK),
    (b"BZh", "compressed with bzip2", UNPACK),
    (b"\x04\x22\x4d\x18", "compressed with lz4", UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    (b"\xff\xfe", "text in UTF-16", "save it as UTF-8"),
    (b"\xfe\xff", "text in UTF-16", "save it as UTF-8"),
    (b"\xef\xbb\xbf{", "JSON behind a byte order mark", "save it as UTF-8 without one"),
];

/// A kind of file, and what to do with one.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct Foreign {
    pub(super) kind: String,
    pub(super) advice: &'static str,
}

impl Foreign {
    fn new(kind: impl Into<String>, advice: &'static str) -> Self {
        Self { kind: kind.into(), advice }
    }

    /// The error for `path`, which should have been `expected`.
    pub(super) fn error(self, path: &Path, expected: &'static str) -> PackError {
        let Self { kind, advice } = self;
        PackError::Foreign { path: path.into(), kind, expected, advice }
    }

    /// Whether macOS wrote the file beside another, for that one's metadata.
    pub(super) fn is_apple_double(&self) -> bool {
        self.kind.starts_with("AppleDouble")
    }
}

/// The first bytes of `file`, up to [`HEAD_BYTES`].
pub(super) fn head_of(file: &File) -> io::Result<Vec<u8>> {
    let mut head = vec![0; HEAD_BYTES];
    let mut filled = 0;
    while filled < head.len() {
        match file.read_at(&mut head[filled..], filled as u64) {
            Ok(0) => break,
            Ok(bytes) => filled += bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    head.truncate(filled);
    Ok(head)
}

/// Whether `head` starts as a safetensors file does: a header's length, and its opening brace.
pub(super) fn starts_as_safetensors(head: &[u8]) -> bool {
    head.get(8) == Some(&b'{') && head[4..8] == [0; 4]
}

/// What a file with these first bytes is, if it is a known kind; `head` is all of it where it is
/// shorter than [`HEAD_BYTES`].
pub(super) fn recognise(head: &[u8]) -> Option<Foreign> {
    if head.is_empty() {
        return Some(Foreign::new("empty", AGAIN));
    }
    let magic = MAGICS.iter().find(|(magic, ..)| head.starts_with(magic));
    if let Some((_, kind, advice)) = magic {
        return Some(Foreign::new(*kind, advice));
    }
    if head.get(257..262) == Some(b"ustar") {
        return Some(Foreign::new("a tar archive", UNPACK));
    }
    if head.len() >= 16 && head.iter().all(|&byte| byte == 0) {
        let advice = "its place was reserved and its bytes never came: download or copy it again";
        return Some(Foreign::new("zeros from its start on", advice));
    }
    if starts_as_safetensors(head) {
        return Some(Foreign::new("a safetensors file", AGAIN));
    }
    recognise_text(head)
}

fn recognise_text(head: &[u8]) -> Option<Foreign> {
    // The last character may be cut.
    let text = match std::str::from_utf8(head) {
        Ok(text) => text,
        Err(error) if error.error_len().is_none() => {
            std::str::from_utf8(&head[..error.valid_up_to()]).ok()?
        }
        Err(_) => return None,
    };
    let text = text.trim_start_matches('\u{feff}').trim();
    let binary = |c: char| c.is_control() && !c.is_whitespace();
    if text.contains(binary) || text.starts_with(['{', '[']) && !is_answer(text) {
        return None;
    }
    let first = text.lines().next().unwrap_or_default();
    if first.starts_with("version https://") && text.contains("oid sha256:")
        || first.starts_with("version https://git-lfs")
        || first.starts_with("version https://hawser")
    {
        let advice = "run `git lfs pull` in the checkpoint, or download the files themselves";
        return Some(Foreign::new("a Git LFS pointer, and not the file that it points to", advice));
    }
    if first.contains("/annex/objects/") {
        let advice = "run `git annex get` in the checkpoint";
        return Some(Foreign::new("a git-annex pointer, and not the file", advice));
    }
    if first.starts_with("# xet version") {
        let advice = "install git-xet and run `git lfs pull`, or download the files themselves";
        return Some(Foreign::new("a Xet pointer, and not the file that it points to", advice));
    }
    if text.starts_with('<') {
        let advice = "a server answered with a page where the file was asked for, often because of \
                      a login, a licence to accept or a proxy: see what it says, and download again";
        return Some(Foreign::new("a web page", advice));
    }
    let shown: String = first.chars().take(SHOWN_CHARS).collect();
    if !first.contains(' ') && first.contains('/') && text.lines().count() == 1 {
        let advice = "copy what it leads to, with a tool that keeps or follows links";
        return Some(Foreign::new(format!("the text of a link, {shown:?}"), advice));
    }
    let advice =
        "a server may have answered so, to a download without a token, say: download again";
    Some(Foreign::new(format!("text that begins {shown:?}"), advice))
}

/// What JSON text is where a shard should be.
pub(super) fn json_text(head: &[u8]) -> Option<Foreign> {
    let first = head.trim_ascii_start().first();
    let text = first == Some(&b'{') && std::str::from_utf8(&head[..head.len().min(8)]).is_ok();
    let binary = head.iter().any(|byte| byte.is_ascii_control() && !byte.is_ascii_whitespace());
    (text && !binary).then(|| Foreign::new("JSON text", AGAIN))
}

/// Whether JSON is what a server answers instead of a file.
pub(super) fn is_answer(text: &str) -> bool {
    let start: String = text.chars().filter(|c| !c.is_whitespace()).take(16).collect();
    ["{\"error\":", "{\"message\":", "{\"detail\":"].iter().any(|key| start.starts_with(key))
}

/// For the fuzz target of this module; not for use. Kind and advice.
#[doc(hidden)]
#[must_use]
pub fn recognise_for_fuzzing(head: &[u8]) -> Option<(String, &'static str)> {
    recognise(head).map(|foreign| (foreign.kind, foreign.advice))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_stand_in_for_shards_are_told_by_their_first_bytes() {
        let mut tar = [0_u8; 512];
        tar[..5].copy_from_slice(b"a.txt");
        tar[257..262].copy_from_slice(b"ustar");
        let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 7\n";
        let frame = [&b"\x80\x04\x95\x0a\0\0\0\0\0\0\0"[..], b"}."].concat();
        for (head, kind, advice) in [
            (&b""[..], "empty", "again"),
            (pointer, "Git LFS pointer", "git lfs pull"),
            (b"version https://hawser.github.com/spec/v1\n", "Git LFS pointer", "git lfs pull"),
            (b"../.git/annex/objects/aa/bb/x\n", "git-annex", "git annex get"),
            (b"<!DOCTYPE html><html>", "web page", "login"),
            (b"\n  <html lang=\"en\">", "web page", "login"),
            (b"<?xml version=\"1.0\"?><Error>", "web page", "login"),
            (b"GGUF\x03\0\0\0", "GGUF", "safetensors checkpoint that it was made from"),
            (b"PK\x03\x04\x14\0\0\0", "zip archive", "convert"),
            (b"\x80\x02}q\0.", "pickle", "convert"),
            (&frame, "pickle", "convert"),
            (b"\0\x05\x16\x07\0\x02\0\0Mac OS X", "AppleDouble", "delete"),
            (b"\0\0\0\x01Bud1\0\0", ".DS_Store", "delete"),
            (b"\x1f\x8b\x08\0", "gzip", "unpack"),
            (&tar, "tar archive", "unpack"),
            (&[0; 512], "zeros", "again"),
            (b"Invalid username or password.", "text that begins \"Invalid user", "token"),
            (b"{\"error\":\"Repository not found\"}", "text that begins", "token"),
            (b"../../blobs/0a1b2c", "text of a link", "links"),
            (b"\xef\xbb\xbf{\"a\": 1}", "byte order mark", "UTF-8"),
            (b"\xff\xfe{\0", "UTF-16", "UTF-8"),
        ] {
            let found = recognise(head).unwrap_or_else(|| panic!("{kind} is not recognised"));
            assert!(found.kind.contains(kind) && found.advice.contains(advice), "{found:?}");
        }
        for head in [&b"\x10\0\0\0\0\0\0\0"[..], b"{\"a\": 1}", b"[1]", &[0xff; 512], b"\x02\0"] {
            assert_eq!(recognise(head), None, "{head:?}");
        }
    }

    #[test]
    fn json_in_place_of_a_shard_is_named() {
        let found = json_text(b" {\"metadata\": {}, \"weight_map\": {}}").unwrap();
        assert_eq!((found.kind.as_str(), found.advice), ("JSON text", AGAIN));
        assert_eq!(json_text(b"{\x01\0\0\0\0\0\0{\""), None);
    }

    #[test]
    fn a_shards_first_bytes_are_a_length_and_a_brace() {
        assert!(starts_as_safetensors(b"\x40\x01\0\0\0\0\0\0{\""));
        for head in
            [&b""[..], b"\x40\x01\0\0\0\0\0\0", b"{\"a\": {}}", b"\0\x05\x16\x07\0\x02\0\0{"]
        {
            assert!(!starts_as_safetensors(head), "{head:?}");
        }
    }
}
