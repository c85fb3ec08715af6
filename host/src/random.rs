//! Text that other processes cannot guess, from the random source of the system.
//!
//! Invariant: all bits come from the system; there is no seed and no fallback.

use std::io;

/// `bytes` random bytes as hexadecimal digits, two for each byte.
///
/// # Errors
/// The system gives no random bytes.
pub fn hex(bytes: usize) -> io::Result<String> {
    let mut random = vec![0_u8; bytes];
    getrandom::fill(&mut random)
        .map_err(|error| io::Error::other(format!("the system gives no random bytes: {error}")))?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}
