//! Entry point of the program as it is: the allocator, and the command line with the built-in rewards.

use std::process::ExitCode;

use rewards::Registry;
use rlrun::allocator::Allocator;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn main() -> ExitCode {
    rlrun::main(Registry::builtin())
}
