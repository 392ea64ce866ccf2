//! What the checks found, as a table for people and as JSON for programs.

use std::fmt::Write;

use expert_peer::cli::printable;
use serde::Serialize;

use crate::output::{self, count};

/// How a check came out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Status {
    /// As it should be.
    Ok,
    /// It works and could be better, or nobody has asked for it.
    Warn,
    /// It keeps what was asked for from working.
    Fail,
}

impl Status {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// One check.
#[derive(Serialize, Debug)]
pub(super) struct Check {
    pub(super) name: String,
    pub(super) status: Status,
    pub(super) found: String,
    /// What to do; empty where nothing needs doing.
    pub(super) fix: String,
}

/// All checks, in the order in which they were made.
#[derive(Serialize, Default)]
pub(super) struct Report {
    checks: Vec<Check>,
}

impl Report {
    pub(super) fn ok(&mut self, name: impl Into<String>, found: impl Into<String>) {
        self.say(Status::Ok, name, found, "");
    }

    pub(super) fn warn(
        &mut self,
        name: impl Into<String>,
        found: impl Into<String>,
        fix: impl Into<String>,
    ) {
        self.say(Status::Warn, name, found, fix);
    }

    pub(super) fn fail(
        &mut self,
        name: impl Into<String>,
        found: impl Into<String>,
        fix: impl Into<String>,
    ) {
        self.say(Status::Fail, name, found, fix);
    }

    pub(super) fn say(
        &mut self,
        status: Status,
        name: impl Into<String>,
        found: impl Into<String>,
        fix: impl Into<String>,
    ) {
        let (name, found, fix) = (name.into(), found.into(), fix.into());
        self.checks.push(Check { name, status, found, fix });
    }

    pub(super) fn has_failure(&self) -> bool {
        self.count(Status::Fail) > 0
    }

    pub(super) fn print(&self, json: bool) -> anyhow::Result<()> {
        if json { output::json(self) } else { output::text(&self.table()) }
    }

    fn count(&self, status: Status) -> u64 {
        self.checks.iter().filter(|check| check.status == status).count() as u64
    }

    fn table(&self) -> String {
        let width = self.checks.iter().map(|check| check.name.chars().count()).max().unwrap_or(0);
        let mut table = String::new();
        // Names come from the system and texts from peers: no line of them may start another.
        for Check { name, status, found, fix } in &self.checks {
            let (name, found, fix) = (printable(name), printable(found), printable(fix));
            let _infallible = writeln!(table, "{:<4}  {name:width$}  {found}", status.name());
            if !fix.is_empty() {
                let _infallible = writeln!(table, "{:<4}  {:width$}  fix: {fix}", "", "");
            }
        }
        let (warnings, failures) = (self.count(Status::Warn), self.count(Status::Fail));
        let _infallible = writeln!(
            table,
            "{}: {} ok, {}, {}",
            count(self.checks.len() as u64, "check"),
            self.count(Status::Ok),
            count(warnings, "warning"),
            count(failures, "failure")
        );
        table
    }
}

/// Bits per second as a person reads them: `97.6 Gb/s`.
pub(super) fn bit_rate(bits_per_s: f64) -> String {
    match bits_per_s {
        rate if rate >= 1e9 => format!("{:.1} Gb/s", rate / 1e9),
        rate if rate >= 1e6 => format!("{:.1} Mb/s", rate / 1e6),
        rate => format!("{:.1} kb/s", rate / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_a_line_per_check_and_one_per_fix() {
        let mut report = Report::default();
        report.ok("a", "well");
        report.warn("longer", "so\nso\u{1b}[2J", "do this");
        assert!(!report.has_failure());
        report.fail("b", "gone", "");
        assert!(report.has_failure());
        assert_eq!(
            report.table(),
            "ok    a       well\n\
             warn  longer  so\\nso\\u{1b}[2J\n\
             \u{20}             fix: do this\n\
             fail  b       gone\n\
             3 checks: 1 ok, 1 warning, 1 failure\n"
        );
    }

    #[test]
    fn rates_are_told_in_bits() {
        assert_eq!(bit_rate(200e9), "200.0 Gb/s");
        assert_eq!(bit_rate(13.04e9), "13.0 Gb/s");
        assert_eq!(bit_rate(94.2e6), "94.2 Mb/s");
        assert_eq!(bit_rate(0.0), "0.0 kb/s");
    }
}
