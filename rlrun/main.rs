//! Entry point: arguments in, text and exit status out.
//!
//! Invariant: every error is printed once, here. Exit 0 ok, 1 the run failed, 2 the input was wrong.

use std::process::ExitCode;

use rlrun::args::Cli;
use rlrun::commands;
use rlrun::failure::Failure;

/// Every operation of the decoder allocates its result; glibc would map and zero large ones each time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let cli = match Cli::parse_args(std::env::args_os()) {
        Ok(cli) => cli,
        Err(message) => message.exit(),
    };
    // A value that is not UTF-8 is shown as far as it can be, in the error that it causes.
    let text = |raw: std::ffi::OsString| raw.to_string_lossy().into_owned();
    let env: Vec<_> = std::env::vars_os().map(|(name, value)| (text(name), text(value))).collect();
    match commands::execute(&cli, &env) {
        Ok(text) => {
            if !text.is_empty() {
                print(&text);
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            // A diagnostic of the recipe says itself that it is one.
            let label = if matches!(error, Failure::Recipe(_)) { "" } else { "error: " };
            eprintln!("{label}{error}");
            ExitCode::from(error.exit_code())
        }
    }
}

/// Prints to standard output; a closed pipe (`rlrun plan R | head`) is no error.
fn print(text: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stdout(), "{text}");
}
