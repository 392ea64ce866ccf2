//! `expert-peer`: publishes an expert store. The same as `metrale peer run`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

/// Publishes an expert store to clients
#[derive(Parser)]
#[command(version, max_term_width = 100, after_help = expert_peer::cli::LOG_HELP)]
struct Command {
    #[command(flatten)]
    args: expert_peer::cli::RunArgs,
}

fn main() -> ExitCode {
    gpu_sys::limits::raise_open_files();
    expert_peer::cli::start_logging();
    match expert_peer::cli::run(&Command::parse().args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            expert_peer::cli::complain(format_args!(
                "expert-peer: {}",
                expert_peer::cli::one_line(&error)
            ));
            expert_peer::cli::exit_code(&error)
        }
    }
}
