//! An rlrun with a custom reward: `cargo run --release --example custom_reward -- RECIPE.toml`.
//!
//! It has every command and every built-in reward of `rlrun`, and the kind `vowels`:
//!
//! ```toml
//! [[rewards]]
//! kind = "vowels"
//! weight = 0.5
//! timeout_s = 2
//! ```

use std::process::ExitCode;

use rewards::{FunctionError, FunctionInput, Registry};
use rlrun::allocator::Allocator;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

/// The share of vowels among the letters of a completion.
fn vowels(scored: &FunctionInput) -> Result<f64, FunctionError> {
    let letters = scored.text.chars().filter(|c| c.is_alphabetic()).count();
    let vowels = scored.text.chars().filter(|c| "aeiouAEIOU".contains(*c)).count();
    if letters == 0 {
        return Err("there is no letter to judge".into());
    }
    Ok(vowels as f64 / letters as f64)
}

fn main() -> ExitCode {
    rlrun::main(Registry::builtin().function("vowels", vowels))
}
