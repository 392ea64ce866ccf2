//! What goes to stdout and to the terminal.

use std::fmt;
use std::io::{self, StdoutLock, Write};

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

/// Writes one JSON object and a line end to stdout.
pub(crate) fn json(value: &impl Serialize) -> anyhow::Result<()> {
    let line = serde_json::to_string(value).context("cannot write the result as JSON")?;
    text(&(terminal_safe(&line) + "\n"))
}

/// JSON with the control characters escaped that it may have as they are, from U+007F on.
fn terminal_safe(json: &str) -> String {
    let mut safe = String::with_capacity(json.len() + 1);
    for c in json.chars() {
        if c.is_control() {
            safe.push_str(&format!("\\u{:04x}", u32::from(c)));
        } else {
            safe.push(c);
        }
    }
    safe
}

/// Writes text to stdout.
pub(crate) fn text(text: &str) -> anyhow::Result<()> {
    let mut stdout = stdout();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .context("cannot write to stdout")
}

/// The program's stdout. Its errors say that they are its own, and so not those of any other
/// pipe: see [`is_unread`].
pub(crate) fn stdout() -> impl Write {
    Stdout(io::stdout().lock())
}

/// Whether `error` is that whoever read our stdout had enough of it.
pub(crate) fn is_unread(error: &anyhow::Error) -> bool {
    error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>()).any(|cause| {
        let ours = cause.get_ref().is_some_and(|inner| inner.is::<StdoutError>());
        ours && cause.kind() == io::ErrorKind::BrokenPipe
    })
}

struct Stdout(StdoutLock<'static>);

/// Marks an error as one of stdout.
#[derive(Debug)]
struct StdoutError(io::Error);

impl fmt::Display for StdoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for StdoutError {}

fn mark(error: io::Error) -> io::Error {
    io::Error::new(error.kind(), StdoutError(error))
}

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(mark)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(mark)
    }
}

/// A bar on stderr that counts bytes; nothing where stderr is not a terminal.
pub(crate) fn progress_bar(bytes: u64) -> ProgressBar {
    let template = "{bar:40} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    let style = ProgressStyle::with_template(template);
    ProgressBar::new(bytes).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Bytes as a person reads them: `9.4 MB`.
pub(crate) fn human_bytes(bytes: u64) -> String {
    let units = ["kB", "MB", "GB", "TB", "PB"];
    let mut value = bytes as f64;
    let mut unit = "B";
    for next in units {
        if value < 1000.0 {
            break;
        }
        value /= 1000.0;
        unit = next;
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") }
}

/// A number of things as a person reads it: `1 record`, `2 records`.
pub(crate) fn count(number: u64, thing: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {thing}{plural}")
}

/// A shape as the tools print it: `[32,64]`, a scalar as `[]`.
pub(crate) fn shape(dims: &[u64]) -> String {
    let dims: Vec<String> = dims.iter().map(ToString::to_string).collect();
    format!("[{}]", dims.join(","))
}
