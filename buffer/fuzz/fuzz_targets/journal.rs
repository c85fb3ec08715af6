//! A whole journal with some of its bytes changed: it is opened and read, or an error says why not.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| buffer::fuzzing::journal(bytes));
