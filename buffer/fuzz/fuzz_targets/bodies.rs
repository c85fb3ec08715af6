//! Request bodies as anybody can send them: no bytes make a parser panic, and a group that is taken is given back equal.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| buffer::fuzzing::bodies(bytes));
