//! Entry point: arguments in, text and exit status out.
//!
//! Invariant: every error is printed once, here. Exit 0 ok, 1 the run failed, 2 the input was wrong.

use std::alloc::{GlobalAlloc, Layout};
use std::process::ExitCode;

use rlrun::args::Cli;
use rlrun::commands;
use rlrun::failure::Failure;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator(mimalloc::MiMalloc);

/// Every operation of the decoder allocates its result; glibc would map and zero large ones each time. What is large
/// begins at a cache line: products are a fifth slower on registers that straddle two.
struct Allocator(mimalloc::MiMalloc);

impl Allocator {
    const LARGE: usize = 1024;
    const LINE: usize = 64;

    fn aligned(layout: Layout) -> Layout {
        if layout.size() < Self::LARGE {
            return layout;
        }
        layout.align_to(Self::LINE).unwrap_or(layout)
    }
}

#[expect(unsafe_code, reason = "all calls are passed on; a stricter alignment satisfies every caller")]
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        unsafe { self.0.alloc(Self::aligned(layout)) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        unsafe { self.0.alloc_zeroed(Self::aligned(layout)) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // Freeing needs neither size nor alignment.
        unsafe { self.0.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let align = if size < Self::LARGE { layout.align() } else { layout.align().max(Self::LINE) };
        let Ok(aligned) = Layout::from_size_align(layout.size(), align) else { return std::ptr::null_mut() };
        unsafe { self.0.realloc(pointer, aligned, size) }
    }
}

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
