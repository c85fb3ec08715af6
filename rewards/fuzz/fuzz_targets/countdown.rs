//! Equations as a model can write them: none makes the evaluation panic or grow without bound.
#![no_main]

use libfuzzer_sys::fuzz_target;
use num_rational::BigRational;
use rewards::countdown::solves;

fuzz_target!(|bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    let used: Vec<u64> = text.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect();
    let _ = solves(&text, &used, &BigRational::from_integer(24.into()));
});
