//! Is what a program gave what was expected?
//!
//! Invariant: whole numbers are compared exactly, numbers with a point or an exponent to 1e-5 of their size and 1e-8, as the
//! testers of APPS do. White space at the ends of lines and of the text never counts.

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
    // A program may print 2.0 or 2 for 2.00, but not 2 for 3 or 1e2 for the word "1e2x".
    if found == expected || !(point(found) || point(expected)) {
        return found == expected;
    }
    match (found.parse(), expected.parse()) {
        (Ok(found), Ok(expected)) => close(found, expected),
        _ => false,
    }
}

fn same_number(found: &Value, expected: &Value) -> bool {
    let whole = |value: &Value| match value {
        Value::Bool(value) => Some(i128::from(*value)),
        _ => value.as_i64().map(i128::from).or_else(|| value.as_u64().map(i128::from)),
    };
    match (whole(found), whole(expected)) {
        (Some(found), Some(expected)) => found == expected,
        (found_whole, expected_whole) => {
            #[expect(clippy::cast_precision_loss, reason = "compared to a part in 100 000")]
            let float = |whole: Option<i128>, value: &Value| {
                whole.map(|whole| whole as f64).or_else(|| value.as_f64())
            };
            match (float(found_whole, found), float(expected_whole, expected)) {
                (Some(found), Some(expected)) => close(found, expected),
                _ => false,
            }
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
