//! Entry point of `rlrun-bench`: the allocator of rlrun, and the command line.

use std::process::ExitCode;

use rlrun::allocator::Allocator;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn main() -> ExitCode {
    rlrun_bench::main()
}
