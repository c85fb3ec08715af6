//! Records of the journal as a damaged disk can hold them: no bytes make a decoder panic.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| buffer::fuzzing::records(bytes));
