//! `countdown`: does the last `<answer>` combine exactly the given numbers to the target? As TinyZero and verl score it: 1 if
//! so, `format_score` if there is an answer that does not, 0 without one.
//!
//! The numbers are the column `nums` (or `numbers`) and the number `target`, or an object with both in the column
//! `ground_truth`, in `reward_model.ground_truth`, or as JSON in the reference answer. The whole completion is searched, where
//! TinyZero takes its last line only.
//!
//! Invariant: arithmetic is exact and of bounded size; an expression that Python would not evaluate is a wrong answer.

use std::sync::LazyLock;

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{Signed, ToPrimitive, Zero};
use regex::Regex;
use serde_json::Value;
use trajectory::Task;

use crate::registry::{RewardKind, pure};
use crate::{RewardError, RewardInput};

/// Value of an answer that is wrong, if the recipe names no other.
const FORMAT_SCORE: f64 = 0.1;
/// Longest equation, in bytes.
const MAX_BYTES: usize = 1024;
/// Deepest nesting of parentheses and signs.
const MAX_DEPTH: usize = 32;
/// Greatest size of a value, in bits.
const MAX_BITS: u64 = 4096;

/// The kind `countdown`.
pub(crate) fn kind() -> RewardKind {
    RewardKind::self_contained("countdown", &["format_score"], &[], |spec, _| {
        let format_score = spec.format_score.unwrap_or(FORMAT_SCORE);
        if !format_score.is_finite() {
            return Err(spec.wrong("format_score", "must be a finite number"));
        }
        Ok(pure(spec, move |label, input| score(label, format_score, input)))
    })
}

/// 1.0, `format_score` or 0.0; `reward` is the name under which errors are reported.
///
/// # Errors
/// The row does not say the numbers and the target.
pub fn score(reward: &str, format_score: f64, input: &RewardInput<'_>) -> Result<f64, RewardError> {
    let (numbers, target) = puzzle(input.task).ok_or_else(|| {
        let reason = "the row needs the columns `nums` (whole numbers) and `target` (a number), or both in \
                      `ground_truth`";
        input.trajectory().failed(reward, reason)
    })?;
    let Some(equation) = equation(input.text) else { return Ok(0.0) };
    Ok(if solves(equation, &numbers, &target) { 1.0 } else { format_score })
}

/// The content of the last `<answer>`, within one line.
fn equation(text: &str) -> Option<&str> {
    static ANSWER: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r"<answer>(.*?)</answer>").expect("constant pattern"));
    let last = ANSWER.captures_iter(text).last()?;
    last.get(1).map(|found| found.as_str().trim())
}

/// Whether the equation uses each number once and has the value of the target.
#[must_use]
pub fn solves(equation: &str, numbers: &[u64], target: &BigRational) -> bool {
    if equation.len() > MAX_BYTES {
        return false;
    }
    let used = equation.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    let Some(mut used) = used.map(|digits| digits.parse().ok()).collect::<Option<Vec<u64>>>() else {
        return false;
    };
    let mut numbers = numbers.to_vec();
    used.sort_unstable();
    numbers.sort_unstable();
    let tolerance = BigRational::new(1.into(), 100_000.into());
    used == numbers && evaluate(equation).is_some_and(|value| (value - target).abs() < tolerance)
}

fn puzzle(task: &Task) -> Option<(Vec<u64>, BigRational)> {
    let columns = &task.columns;
    let read = |get: &dyn Fn(&str) -> Option<Value>| {
        let numbers = get("nums").or_else(|| get("numbers"))?;
        let numbers = numbers.as_array()?.iter().map(whole).collect::<Option<Vec<_>>>()?;
        Some((numbers, number(&get("target")?)?))
    };
    let within = |object: Option<&Value>| object.and_then(|object| read(&|key| object.get(key).cloned()));
    read(&|key| columns.get(key).cloned())
        .or_else(|| within(columns.get("ground_truth")))
        .or_else(|| within(columns.get("reward_model").and_then(|model| model.get("ground_truth"))))
        .or_else(|| {
            let answer = serde_json::from_str(task.answer.as_deref()?).ok();
            within(answer.as_ref())
        })
        .or_else(|| {
            // The target alone in the reference answer.
            let target = task.answer.as_deref()?.trim().parse().ok()?;
            read(&|key| {
                if key == "target" {
                    Some(Value::Number(serde_json::Number::from_f64(target)?))
                } else {
                    columns.get(key).cloned()
                }
            })
        })
}

fn whole(value: &Value) -> Option<u64> {
    let number = value.as_f64().filter(|number| *number >= 0.0 && number.fract() == 0.0);
    value.as_u64().or_else(|| number?.to_u64()).or_else(|| value.as_str()?.trim().parse().ok())
}

fn number(value: &Value) -> Option<BigRational> {
    let number = value.as_f64().or_else(|| value.as_str()?.trim().parse().ok())?;
    BigRational::from_float(number)
}

/// The value of an arithmetic expression as Python reads it; `None` if it would raise.
fn evaluate(text: &str) -> Option<BigRational> {
    let mut parser = ExpressionParser { rest: text.trim(), depth: 0 };
    let value = parser.sum()?;
    parser.rest.trim().is_empty().then_some(value)
}

struct ExpressionParser<'a> {
    rest: &'a str,
    depth: usize,
}

impl ExpressionParser<'_> {
    fn eat(&mut self, sign: &str) -> bool {
        let rest = self.rest.trim_start();
        // `*` is not the first half of `**`, nor `/` of `//`.
        let longer = sign.len() == 1
            && "*/".contains(sign)
            && rest.get(1..).is_some_and(|rest| rest.starts_with(sign));
        match rest.strip_prefix(sign) {
            Some(after) if !longer => {
                self.rest = after;
                true
            }
            _ => false,
        }
    }

    fn sum(&mut self) -> Option<BigRational> {
        if self.depth > MAX_DEPTH {
            return None;
        }
        self.depth += 1;
        let mut value = self.product()?;
        loop {
            if self.eat("+") {
                value += self.product()?;
            } else if self.eat("-") {
                value -= self.product()?;
            } else {
                self.depth -= 1;
                return bounded(value);
            }
        }
    }

    fn product(&mut self) -> Option<BigRational> {
        let mut value = self.signed()?;
        loop {
            if self.eat("*") {
                value = bounded(value * self.signed()?)?;
            } else if self.eat("//") {
                value = quotient(value, &self.signed()?)?.floor();
            } else if self.eat("/") {
                value = quotient(value, &self.signed()?)?;
            } else {
                return Some(value);
            }
        }
    }

    fn signed(&mut self) -> Option<BigRational> {
        if self.depth > MAX_DEPTH {
            return None;
        }
        self.depth += 1;
        let value = if self.eat("-") {
            -self.signed()?
        } else if self.eat("+") {
            self.signed()?
        } else {
            self.power()?
        };
        self.depth -= 1;
        Some(value)
    }

    fn power(&mut self) -> Option<BigRational> {
        let base = self.atom()?;
        if !self.eat("**") {
            return Some(base);
        }
        let exponent = self.signed()?;
        let size = exponent.numer().to_i32().filter(|_| exponent.is_integer())?;
        let bits = base.numer().bits().max(base.denom().bits());
        if (base.is_zero() && size < 0) || bits.checked_mul(u64::from(size.unsigned_abs()))? > MAX_BITS {
            return None;
        }
        Some(base.pow(size))
    }

    fn atom(&mut self) -> Option<BigRational> {
        if self.eat("(") {
            let value = self.sum()?;
            return self.eat(")").then_some(value);
        }
        let text = self.rest.trim_start();
        let digits = |text: &str| text.bytes().take_while(u8::is_ascii_digit).count();
        let whole = digits(text);
        let decimals = text[whole..].strip_prefix('.').map_or(0, digits);
        let point = usize::from(text[whole..].starts_with('.'));
        let literal = &text[..whole + point + decimals];
        // Python refuses `007`, but not `00`.
        let padded =
            point == 0 && whole > 1 && literal.starts_with('0') && literal.bytes().any(|digit| digit != b'0');
        if whole + decimals == 0 || padded {
            return None;
        }
        self.rest = &text[literal.len()..];
        let significant: BigInt = literal.replace('.', "").parse().ok()?;
        let places = u32::try_from(decimals).ok()?;
        Some(BigRational::new(significant, BigInt::from(10u8).pow(places)))
    }
}

fn quotient(a: BigRational, b: &BigRational) -> Option<BigRational> {
    if b.is_zero() { None } else { bounded(a / b) }
}

fn bounded(value: BigRational) -> Option<BigRational> {
    (value.numer().bits() <= MAX_BITS && value.denom().bits() <= MAX_BITS).then_some(value)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::testing::{input, task};

    fn verdict(text: &str) -> f64 {
        let mut task = task("");
        task.columns.insert("nums".into(), json!([3, 5, 7, 2]));
        task.columns.insert("target".into(), json!(24));
        score("countdown", FORMAT_SCORE, &input(&task, text)).unwrap()
    }

    #[test]
    fn each_number_once_to_the_target() {
        for (equation, expected) in [
            ("(7 - 3) * (5 + 2 - 1)", 0.1),
            ("(7 + 5) * 2 * (3 - 2)", 0.1),
            ("(7 + 5) * 2", 0.1),
            ("3 * (7 + 2) - 5 + 2", 0.1),
            ("7 * 2 + 5 * 2", 0.1),
            ("7*(5-2)+3", 1.0),
            ("3 + 7 * ( 5 - 2 )", 1.0),
            ("7*(5-2)+3 = 24", 0.1),
            ("7*(5-2)+3.", 1.0),
            ("7*(5-2)+03", 0.1),
            ("7(5-2)+3", 0.1),
            ("7*(5-2)+3/0", 0.1),
            ("__import__('os')", 0.1),
            ("", 0.1),
        ] {
            assert_eq!(verdict(&format!("so <answer>{equation}</answer>")), expected, "{equation}");
        }
        assert_eq!(verdict("7*(5-2)+3"), 0.0);
        assert_eq!(verdict("<answer>1</answer> no, <answer>7*(5-2)+3</answer>"), 1.0);
        assert_eq!(verdict("<answer>7*(5-2)+3\n</answer>"), 0.0);
    }

    #[test]
    fn arithmetic_is_that_of_python_and_exact() {
        for (text, value) in [
            ("1/3*3", "1"),
            ("2**3**2", "512"),
            ("-2**2", "-4"),
            ("7//2", "3"),
            ("2**-1", "1/2"),
            ("--3", "3"),
            (".5+.5", "1"),
        ] {
            assert_eq!(evaluate(text).map(|value| value.to_string()).as_deref(), Some(value), "{text}");
        }
        for text in ["1/0", "9**9**9", "1 2", "(1", "1)", "*3", "2**.5"] {
            assert_eq!(evaluate(text), None, "{text}");
        }
        assert_eq!(evaluate(&"(".repeat(1000)), None);
    }

    #[test]
    fn numbers_are_found_where_datasets_keep_them() {
        let puzzle_of = |column: &str, value: Value| {
            let mut task = task("{}");
            task.columns.insert(column.into(), value);
            puzzle(&task)
        };
        let truth = json!({"numbers": [1, 2], "target": 3});
        let expected = Some((vec![1, 2], BigRational::from_integer(3.into())));
        assert_eq!(puzzle_of("ground_truth", truth.clone()), expected);
        assert_eq!(puzzle_of("reward_model", json!({"ground_truth": truth})), expected);
        assert_eq!(puzzle(&task(&truth.to_string())), expected);
        assert_eq!(puzzle_of("nums", json!([1, 2])), None);
        let error = score("countdown", 0.1, &input(&task("4"), "")).unwrap_err().to_string();
        assert!(error.contains("`nums`"), "{error}");
    }

    proptest! {
        #[test]
        fn no_text_panics(text in any::<String>(), signs in "[0-9+*/(). -]{0,60}") {
            evaluate(&text);
            evaluate(&signs);
        }
    }
}
