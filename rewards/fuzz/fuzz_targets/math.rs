//! Two texts, parted by a zero byte: no reference and no completion make the math grader panic or hang, and its verdict
//! is the same twice.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rewards::math::grade;

fuzz_target!(|bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    let (gold, completion) = text.split_once('\0').unwrap_or((&text, &text));
    let verdict = grade(gold, completion, false, true);
    assert_eq!(verdict, grade(gold, completion, false, true));
    let _ = grade(gold, completion, true, false);
    let boxed = format!("\\boxed{{{completion}}}");
    let _ = grade(gold, &boxed, false, true);
});
