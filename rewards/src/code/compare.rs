//! Compares the output or the result of a program with the expected one.
//!
//! Invariant: where a whole number is expected it must be exactly that one; a number that is expected with a point or an exponent
//! may differ by 1e-5 of its size and 1e-8, as in the testers of APPS. White space at the ends of lines and of the text never
//! counts.

use serde_json::Value;

/// Whether outputs are the same, line by line, and where they are not, word by word.
#[must_use]
pub fn same_output(found: &str, expected: &str) -> bool {
    let lines =
        |text: &'_ str| text.trim_end().lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>();
    let (found, expected) = (lines(found.trim_start_matches('\n')), lines(expected.trim_start_matches('\n')));
    found.len() == expected.len()
        && found.iter().zip(&expected).all(|(found, expected)| same_line(found, expected))
}

/// Whether values are the same. Lists and objects are compared one by one; true is 1, as in Python.
#[must_use]
pub fn same_value(found: &Value, expected: &Value) -> bool {
    match (found, expected) {
        (Value::Array(found), Value::Array(expected)) => {
            found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| same_value(a, b))
        }
        (Value::Object(found), Value::Object(expected)) => {
            found.len() == expected.len()
                && found
                    .iter()
                    .all(|(key, value)| expected.get(key).is_some_and(|other| same_value(value, other)))
        }
        (Value::Number(_) | Value::Bool(_), Value::Number(_) | Value::Bool(_)) => {
            same_number(found, expected)
        }
        _ => found == expected,
    }
}

fn same_line(found: &str, expected: &str) -> bool {
    if found == expected {
        return true;
    }
    let (found, expected): (Vec<_>, Vec<_>) =
        (found.split_whitespace().collect(), expected.split_whitespace().collect());
    found.len() == expected.len() && found.iter().zip(&expected).all(|(a, b)| same_word(a, b))
}

fn same_word(found: &str, expected: &str) -> bool {
    let point = |word: &str| word.contains(['.', 'e', 'E']);
    if found == expected || !(point(found) || point(expected)) {
        return found == expected;
    }
    if !point(expected) {
        // A program may print 2.0 for 2.
        return whole(expected).is_some_and(|expected| whole(found) == Some(expected));
    }
    match (found.parse(), expected.parse()) {
        (Ok(found), Ok(expected)) => close(found, expected),
        _ => false,
    }
}

/// Sign and digits of the whole number that a decimal such as `-20.0` or `2e+01` is exactly; nothing if it is none.
fn whole(word: &str) -> Option<(bool, String)> {
    let (mantissa, exponent) = match word.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, exponent.parse::<i32>().ok()?),
        None => (word, 0),
    };
    let (negative, mantissa) = match mantissa.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, mantissa.strip_prefix('+').unwrap_or(mantissa)),
    };
    let (before, after) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let mut digits = format!("{before}{after}");
    if digits.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let places = i32::try_from(after.len()).ok()?.checked_sub(exponent)?;
    // No float has more digits.
    if places < -400 {
        return None;
    }
    for _ in places..0 {
        digits.push('0');
    }
    for _ in 0..places {
        match digits.pop() {
            Some('0') => {}
            Some(_) => return None,
            None => break,
        }
    }
    let digits = digits.trim_start_matches('0');
    Some((negative && !digits.is_empty(), digits.to_owned()))
}

fn same_number(found: &Value, expected: &Value) -> bool {
    let whole = |value: &Value| match value {
        Value::Bool(value) => Some(i128::from(*value)),
        _ => value.as_i64().map(i128::from).or_else(|| value.as_u64().map(i128::from)),
    };
    match (whole(found), whole(expected)) {
        (Some(found), Some(expected)) => found == expected,
        #[expect(
            clippy::cast_possible_truncation,
            reason = "it is whole, and out of range it differs anyway"
        )]
        (None, Some(expected)) => {
            found.as_f64().is_some_and(|found| found.fract() == 0.0 && found as i128 == expected)
        }
        #[expect(clippy::cast_precision_loss, reason = "compared to a part in 100 000")]
        (found_whole, None) => {
            let found = found_whole.map(|whole| whole as f64).or_else(|| found.as_f64());
            found.zip(expected.as_f64()).is_some_and(|(found, expected)| close(found, expected))
        }
    }
}

fn close(found: f64, expected: f64) -> bool {
    #[expect(clippy::float_cmp, reason = "equal infinities have no difference")]
    let equal = found == expected;
    equal || (found - expected).abs() <= 1e-8 + 1e-5 * expected.abs()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn outputs() {
        for (found, expected, same) in [
            ("1 2\n", "1 2", true),
            ("1 2 \n3\n\n", "1 2\n3", true),
            ("1  2", "1 2", true),
            ("1\n2", "1 2", false),
            ("0.333333333", "0.33333333333", true),
            ("0.34", "0.33", false),
            ("2.0", "2", true),
            ("-20.", "-20", true),
            ("1e+16", "10000000000000000", true),
            ("0e-2147483647", "0", true),
            ("1.50e1", "15", true),
            ("-0.0", "0", true),
            ("1.5e0", "1", false),
            ("1e999999999", "1", false),
            ("123456000.", "123456789", false),
            ("100000.9", "100000", false),
            ("9007199254740993.0", "9007199254740992", false),
            ("100000.9", "100000.0", true),
            (".", "0", false),
            ("1.0", "one", false),
            ("100001", "100000", false),
            ("Yes", "YES", false),
            ("", "", true),
            ("", "0", false),
            ("nan", "nan", true),
            ("1.0 x", "1 y", false),
        ] {
            assert_eq!(same_output(found, expected), same, "{found:?} {expected:?}");
        }
    }

    #[test]
    fn values() {
        for (found, expected, same) in [
            (json!([1, 2]), json!([1, 2]), true),
            (json!([2, 1]), json!([1, 2]), false),
            (json!(true), json!(1), true),
            (json!("1"), json!(1), false),
            (json!(0.1 + 0.2), json!(0.3), true),
            (json!(2), json!(2.0), true),
            (json!(2.0), json!(2), true),
            (json!(100_000.9), json!(100_000), false),
            (json!(100_000.9), json!(100_000.0), true),
            (json!(9_007_199_254_740_992.0), json!(9_007_199_254_740_993_u64), false),
            (json!(u64::MAX), json!(u64::MAX - 1), false),
            (json!({"a": [1.0]}), json!({"a": [1]}), true),
            (json!({"a": 1}), json!({"a": 1, "b": 2}), false),
            (json!(null), json!(0), false),
        ] {
            assert_eq!(same_value(&found, &expected), same, "{found} {expected}");
        }
    }

    proptest! {
        #[test]
        fn a_text_is_itself(text in any::<String>()) {
            prop_assert!(same_output(&text, &text));
        }

        #[test]
        fn whole_numbers_differ_as_soon_as_they_do(a in any::<i64>(), b in any::<i64>()) {
            prop_assert_eq!(same_output(&a.to_string(), &b.to_string()), a == b);
            prop_assert_eq!(same_value(&json!(a), &json!(b)), a == b);
        }
    }
}
