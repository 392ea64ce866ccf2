//! `metrale`: packs expert stores, looks into them, publishes them, and fetches from them.
//!
//! Exit status: 0 done, 2 wrong usage, 1 everything else. Results go to stdout, everything else
//! to stderr.
#![forbid(unsafe_code)]

mod backend;
mod commands;
mod output;
mod progress;
mod signals;
mod whole_file;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use expert_peer::cli::{LOG_HELP, exit_code, one_line, start_logging};

use crate::commands::{bench, doctor, extract, fetch, inspect, pack, peer, verify};

#[derive(Parser)]
#[command(name = "metrale", version, about, max_term_width = 100, after_help = LOG_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Pack a safetensors checkpoint, or made-up weights, into an expert store
    #[command(after_help = LOG_HELP)]
    Pack(pack::Args),
    /// Show what a store holds
    Inspect(inspect::Args),
    /// Read all of a store and name every damaged record
    Verify(verify::Args),
    /// Write an expert's tensors to stdout
    Extract(extract::Args),
    /// Fetch experts into the arena, checked
    #[command(after_help = LOG_HELP)]
    Fetch(Box<fetch::Args>),
    /// Measure how fast experts come
    Bench(Box<bench::Args>),
    /// Look for what keeps experts from coming, or from coming fast, and say what to do about it
    #[command(after_help = LOG_HELP)]
    Doctor(Box<doctor::Args>),
    /// Publish a store, or ask who does
    Peer(peer::Args),
}

fn main() -> ExitCode {
    gpu_sys::limits::raise_open_files();
    start_logging();
    let outcome = match Cli::parse().command {
        Command::Pack(args) => pack::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Extract(args) => extract::run(&args),
        Command::Fetch(args) => fetch::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Peer(args) => peer::run(&args),
    };
    match outcome {
        Ok(status) => status,
        // Whoever read our output had enough of it.
        Err(error) if output::is_unread(&error) => ExitCode::SUCCESS,
        Err(error) => {
            expert_peer::cli::complain(format_args!("metrale: {}", one_line(&error)));
            exit_code(&error)
        }
    }
}
