//! What `metrale` and `expert-peer` have in common as programs: values, errors, exit codes, logs.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::fmt::{self, Display};
use std::io::{self, IsTerminal};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::ExitCode;
use std::str::FromStr;

use expert_tier::store::StoreError;
use expert_tier::wire::Secret;
use expert_tier::wire::auth::SecretError;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

const LOG_VARIABLE: &str = "METRALE_LOG";
const DEFAULT_LOG: &str = "info";

/// What the help of both programs says of the log.
pub const LOG_HELP: &str = "Log lines go to stderr. METRALE_LOG chooses which: off, error, warn, \
    info, debug or trace [default: info];\nTARGET=LEVEL sets one part's own, as in \
    METRALE_LOG=warn,expert_tier=debug.";

/// Wrong usage that clap cannot see: flags or variables that are missing or cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

impl UsageError {
    /// Wrong usage that `error` describes.
    #[must_use]
    pub fn new(error: impl Display) -> Self {
        Self(error.to_string())
    }
}

/// The exit status of a program that `error` ended: 2 for wrong usage, 1 for everything else.
#[must_use]
pub fn exit_code(error: &anyhow::Error) -> ExitCode {
    ExitCode::from(if error.is::<UsageError>() { 2 } else { 1 })
}

/// A host and a port, `HOST:PORT`; whether the host exists is found out when it is used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostPort(pub String);

impl FromStr for HostPort {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
                Ok(Self(text.into()))
            }
            _ => Err("not HOST:PORT, as in 127.0.0.1:9909"),
        }
    }
}

impl Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Reads the secret in `file`, with a warning where others than its owner may read it too.
///
/// # Errors
/// The file cannot be read, or holds no secret.
pub fn read_secret(file: &Path) -> Result<Secret, SecretError> {
    let secret = Secret::read(file)?;
    // Pipes and devices have modes that say nothing of who else gets the bytes.
    let shared = |found: &std::fs::Metadata| found.permissions().mode() & 0o077 != 0;
    if std::fs::metadata(file).is_ok_and(|found| found.is_file() && shared(&found)) {
        let file = file.display();
        tracing::warn!("others may read the secret file {file}: chmod 600 {file}");
    }
    Ok(secret)
}

/// The error of opening the store in `dir`, with advice where the directory is something else.
#[must_use]
pub fn store_error(dir: &Path, error: StoreError) -> anyhow::Error {
    let absent = |source: &io::Error| source.kind() == io::ErrorKind::NotFound;
    match &error {
        StoreError::Io { action: "open", path, source }
            if absent(source) && path.ends_with("manifest.json") && dir.is_dir() =>
        {
            let dir = dir.display();
            anyhow::anyhow!(
                "{dir} is not an expert store (no manifest.json): pack one with `metrale pack`"
            )
        }
        _ => error.into(),
    }
}

/// Sends log lines to stderr; `METRALE_LOG` chooses which, as [`LOG_HELP`] has it.
pub fn start_logging() {
    let wish = std::env::var_os(LOG_VARIABLE).filter(|wish| !wish.is_empty());
    let chosen = wish.as_deref().map(parse_filter);
    let usable = chosen.clone().and_then(Result::ok).unwrap_or_else(|| DEFAULT_LOG.into());
    let _already_set = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(usable))
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        // A log that cannot be written (a full disk, a reader that left) must not end what it is
        // about; reporting the failure to stderr, which it is, would panic.
        .log_internal_errors(false)
        .try_init();
    if let Some(Err(reason)) = chosen {
        let wish = wish.unwrap_or_default();
        tracing::warn!("{LOG_VARIABLE}={wish:?}: {reason}; using {DEFAULT_LOG}");
    }
}

/// The filter in `wish`, or why it is none.
///
/// The filter's own syntax takes any word as the name of a part to log everything of, so a
/// mistyped level would be a filter that lets nothing through.
fn parse_filter(wish: &OsStr) -> Result<String, String> {
    let text = wish.to_str().ok_or("not UTF-8")?;
    // The parser takes nothing for a level, too.
    let level = |part: &str| !part.trim().is_empty() && part.trim().parse::<LevelFilter>().is_ok();
    match text.split(',').find(|part| !part.contains('=') && !level(part)) {
        Some(part) => Err(format!(
            "{part:?} is neither off, error, warn, info, debug, trace nor TARGET=LEVEL"
        )),
        None => EnvFilter::try_new(text).map(|_| text.into()).map_err(|error| error.to_string()),
    }
}

/// Writes a line to stderr, as `eprintln` would, but without a panic where it cannot be written,
/// and as [`printable`] text: errors quote what files and peers say.
pub fn complain(line: impl Display) {
    use io::Write;
    let _unwritten = writeln!(io::stderr(), "{}", printable(&line.to_string()));
}

/// The text with control characters escaped, as Rust escapes them, and those that turn the
/// direction of what follows: a name in a file must not drive the terminal that shows it.
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    let turns = |c: char| matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let unfit = |c: char| c.is_control() || turns(c);
    if !text.contains(unfit) {
        return text.into();
    }
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match (c.is_control(), turns(c)) {
            (true, _) => shown.extend(c.escape_debug()),
            (false, true) => shown.extend(c.escape_unicode()),
            (false, false) => shown.push(c),
        }
    }
    shown.into()
}

/// The error and its causes in one line, leaving out a cause that the text before it has already.
#[must_use]
pub fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if line.is_empty() {
            line = cause;
        } else if !line.contains(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    line.replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_control_character_reaches_a_terminal_and_all_else_does() {
        for (text, shown) in [
            ("\u{1b}[2J\r\n\0", "\\u{1b}[2J\\r\\n\\0"),
            ("\u{9b}31m\u{7f}", "\\u{9b}31m\\u{7f}"),
            ("a\u{202e}b", "a\\u{202e}b"),
            ("模型.\"é\" 😀\\", "模型.\"é\" 😀\\"),
        ] {
            assert_eq!(printable(text), shown);
        }
    }

    #[test]
    fn a_log_filter_is_made_of_levels_and_of_targets_with_levels() {
        for text in ["warn", "WARN", "off", "debug,hyper=off", "expert_tier=trace"] {
            assert_eq!(parse_filter(text.as_ref()), Ok(text.into()));
        }
        for text in ["WARNN", "warn,verbos", "expert_tier", "expert_tier=loud", "warn,"] {
            assert!(parse_filter(text.as_ref()).is_err(), "{text}");
        }
    }

    #[test]
    fn an_address_has_a_host_and_a_port() {
        for text in ["127.0.0.1:9909", "[::1]:1", "a-name:65535"] {
            assert_eq!(text.parse(), Ok(HostPort(text.into())));
        }
        for text in ["", "127.0.0.1", ":9909", "host:", "host:port", "host:65536"] {
            assert!(text.parse::<HostPort>().is_err(), "{text}");
        }
    }
}
