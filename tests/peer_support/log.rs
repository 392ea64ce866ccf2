//! What this process logs, line by line.

use std::io::Write;
use std::sync::{Mutex, OnceLock};

use tracing_subscriber::fmt::MakeWriter;

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Every line that this process has logged since the first of these was made, those of other
/// tests in it too: look for something of your own.
pub(crate) struct Logged(());

impl Logged {
    pub(crate) fn start() -> Self {
        static STARTED: OnceLock<()> = OnceLock::new();
        STARTED.get_or_init(|| {
            let log = tracing_subscriber::fmt().with_writer(Keep).with_ansi(false).finish();
            tracing::subscriber::set_global_default(log).expect("nobody else sets one");
        });
        Self(())
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        LINES.lock().expect("nobody panics with it").clone()
    }
}

/// Gets each line as one write.
struct Keep;

impl Write for Keep {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        let text = String::from_utf8_lossy(line).into_owned();
        LINES.lock().expect("nobody panics with it").push(text);
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Keep {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        Self
    }
}
