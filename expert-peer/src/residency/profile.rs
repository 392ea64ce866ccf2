//! A profile: how often each record was fetched in some run, to start from.
//!
//! One JSON object per line, `{"layer":3,"expert":17,"count":240}`; empty lines are skipped, lines
//! that name the same record add up. A profile of another model is refused where it shows: at the
//! first record that the store does not have.

use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use expert_tier::files;
use expert_tier::key::ExpertKey;
use serde::Deserialize;

use crate::ledger::Ledger;

/// Most bytes of a profile: enough for each of the 1,048,576 records that a table can have.
const MAX_BYTES: u64 = 64 << 20;
/// Most bytes of a line.
const MAX_LINE_BYTES: usize = 1024;

/// Why a profile cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The file cannot be read.
    #[error("--resident-profile {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The file is larger than any profile.
    #[error("--resident-profile {}: more than {MAX_BYTES} bytes, which no profile has", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// A line is no entry.
    #[error(
        "--resident-profile {}, line {line}: {reason}; a line is \
         {{\"layer\":3,\"expert\":17,\"count\":240}}", path.display()
    )]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// A line names a record that the store does not have.
    #[error(
        "--resident-profile {}, line {line}: the store has no expert {} in a layer {}: this is a \
         profile of another store", path.display(), key.expert, key.layer
    )]
    OtherStore {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The record.
        key: ExpertKey,
    },
}

#[derive(Deserialize)]
struct Entry {
    layer: u32,
    expert: u32,
    count: u64,
}

/// The counts of the profile in `path`, by the numbers that `ledger` gives the records.
pub(crate) fn read(path: &Path, ledger: &Ledger) -> Result<Vec<u64>, ProfileError> {
    let failed = |source| ProfileError::Read { path: path.into(), source };
    let file = files::open(path).map_err(failed)?;
    parse(BufReader::new(file.take(MAX_BYTES + 1)), path, ledger)
}

fn parse(mut from: impl BufRead, path: &Path, ledger: &Ledger) -> Result<Vec<u64>, ProfileError> {
    let mut counts = vec![0_u64; ledger.records()];
    let (mut text, mut read, mut line) = (Vec::new(), 0, 0);
    loop {
        text.clear();
        let most = MAX_LINE_BYTES as u64 + 1;
        let count = from.by_ref().take(most).read_until(b'\n', &mut text);
        let count = count.map_err(|source| ProfileError::Read { path: path.into(), source })?;
        if count == 0 {
            return Ok(counts);
        }
        read += count as u64;
        line += 1;
        if read > MAX_BYTES {
            return Err(ProfileError::TooLarge { path: path.into() });
        }
        let wrong = |reason| ProfileError::Line { path: path.into(), line, reason };
        if text.len() > MAX_LINE_BYTES {
            return Err(wrong(format!("it is longer than {MAX_LINE_BYTES} bytes")));
        }
        if text.trim_ascii().is_empty() {
            continue;
        }
        let Entry { layer, expert, count } =
            serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        let key = ExpertKey::new(layer, expert);
        let other = || ProfileError::OtherStore { path: path.into(), line, key };
        let record = ledger.number(key).ok_or_else(other)?;
        counts[record] = counts[record].saturating_add(count);
    }
}

#[cfg(test)]
mod tests {
    use expert_tier::testing::TestStore;

    use super::*;

    fn parsed(text: &str) -> Result<Vec<u64>, String> {
        let store = TestStore::new(2, 3, &[300], 8).open();
        let ledger = Ledger::new(store.manifest());
        parse(text.as_bytes(), Path::new("p.jsonl"), &ledger).map_err(|error| error.to_string())
    }

    #[test]
    fn lines_that_name_a_record_add_up() {
        let text = "{\"layer\":0,\"expert\":2,\"count\":7}\n\n  \r\n\
                    {\"count\":1,\"layer\":1,\"expert\":0,\"note\":\"x\"}\r\n\
                    {\"layer\":0,\"expert\":2,\"count\":5}";
        assert_eq!(parsed(text).unwrap(), [0, 0, 12, 1, 0, 0]);
        let most = format!("{{\"layer\":0,\"expert\":0,\"count\":{}}}\n", u64::MAX).repeat(2);
        assert_eq!(parsed(&most).unwrap()[0], u64::MAX);
        assert_eq!(parsed("").unwrap(), [0; 6]);
    }

    #[test]
    fn what_is_no_profile_of_this_store_is_refused_with_its_line() {
        let good = "{\"layer\":0,\"expert\":2,\"count\":7}\n";
        for (line, words) in [
            (
                "{\"layer\":0,\"expert\":3,\"count\":1}",
                "no expert 3 in a layer 0: this is a profile of another",
            ),
            ("{\"layer\":9,\"expert\":0,\"count\":1}", "no expert 0 in a layer 9"),
            ("{\"layer\":0,\"expert\":1}", "missing field `count`"),
            ("{\"layer\":0,\"expert\":1,\"count\":-1}", "a line is {\"layer\":3"),
            ("{\"layer\":0,\"expert\":1,\"count\":1} x", "trailing"),
            ("nonsense", "expected"),
            ("[0,1,2,3]", "line 2"),
            ("\0\0\0", "line 2"),
        ] {
            let error = parsed(&format!("{good}{line}\n{good}")).unwrap_err();
            for part in ["--resident-profile p.jsonl, line 2", words] {
                assert!(error.contains(part), "{part:?} is not in {error}");
            }
        }
        let long = format!("{good}{}\n", " ".repeat(MAX_LINE_BYTES));
        assert!(parsed(&long).unwrap_err().contains("line 2: it is longer than 1024"), "too long");
    }

    #[test]
    fn a_profile_of_more_bytes_than_any_has_is_refused() {
        let blank = " ".repeat(MAX_LINE_BYTES - 1) + "\n";
        let lines = usize::try_from(MAX_BYTES).unwrap() / MAX_LINE_BYTES;
        let enough = blank.repeat(lines);
        assert_eq!(parsed(&enough).unwrap(), [0; 6]);
        assert!(parsed(&(enough + " ")).unwrap_err().contains("which no profile has"));
    }
}
