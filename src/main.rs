//! `metrale`: packs expert stores, looks into them, and fetches from them.
//!
//! Exit status: 0 done, 2 wrong usage, 1 everything else. Results go to stdout, everything else
//! to stderr.
#![forbid(unsafe_code)]

mod commands;
mod output;

use std::io;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::commands::{extract, inspect, pack, verify};

#[derive(Parser)]
#[command(name = "metrale", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Pack a safetensors checkpoint, or made-up weights, into an expert store
    Pack(pack::Args),
    /// Show what a store holds
    Inspect(inspect::Args),
    /// Read all of a store and name every damaged record
    Verify(verify::Args),
    /// Write an expert's tensors to stdout
    Extract(extract::Args),
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("METRALE_LOG")
                .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info")),
        )
        .with_writer(io::stderr)
        .init();
    let outcome = match Cli::parse().command {
        Command::Pack(args) => pack::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Extract(args) => extract::run(&args),
    };
    match outcome {
        Ok(status) => status,
        // Whoever read our output had enough of it.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("metrale: {}", one_line(&error));
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

/// The error and its causes, leaving out a cause that the text before it has already.
fn one_line(error: &anyhow::Error) -> String {
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
