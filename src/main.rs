//! `metrale`: packs expert stores, looks into them, and fetches from them.
#![forbid(unsafe_code)]

mod backend;
mod commands;
mod usage;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::commands::{bench, fetch, peer};

#[derive(Parser)]
#[command(name = "metrale", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Fetch experts into the arena, checked
    Fetch(fetch::Args),
    /// Measure how fast experts come
    Bench(bench::Args),
    /// Publish a store, or ask who does
    Peer(peer::Args),
}

fn main() -> ExitCode {
    expert_peer::cli::start_logging();
    let outcome = match Cli::parse().command {
        Command::Fetch(args) => fetch::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Peer(args) => peer::run(&args),
    };
    match outcome {
        Ok(status) => status,
        Err(error) => {
            eprintln!("metrale: {error:#}");
            ExitCode::FAILURE
        }
    }
}
