//! `math`: 1 if the final answer of a completion is mathematically equal to the reference answer, else 0.
//!
//! Three steps: [`extract`] finds the final answer in a text, [`latex`] brings its notation to one form, and
//! [`number`] reads it as an exact number. Two numbers are compared exactly (or to the last place that a decimal of
//! four or more significant digits states, if the other side has no finite decimal form), anything else as normalised
//! text; a number never equals a text.
//!
//! Invariant: in doubt the verdict is 0. An unevaluated expression (`37+48`) is not an answer, a number whose
//! surroundings may change its value (`5 million`, `4x`, `204_5`) is not that number, and units or variables that
//! contradict each other are not equal. No algebra is done: `x+1` and `1+x` differ here.

pub mod extract;
pub mod latex;
pub mod number;

use std::sync::LazyLock;

use regex::Regex;

use crate::registry::{Kind, pure};
use crate::{RewardError, RewardInput};
use number::Number;

/// The kind `math`.
pub(crate) fn kind() -> Kind {
    Kind::new("math", &[], &[], |spec, _| Ok(pure(spec, score)))
}

/// 1.0 or 0.0; `reward` is the name under which errors are reported.
///
/// # Errors
/// The task has no reference answer.
pub fn score(reward: &str, input: &RewardInput<'_>) -> Result<f64, RewardError> {
    let reference = Answer::read(extract::reference(input.answer(reward)?));
    let found = extract::completion(input.text, input.truncated);
    let equal = found.is_some_and(|found| reference.equals(&Answer::read(found)));
    Ok(f64::from(u8::from(equal)))
}

/// A final answer, read as far as this grader can.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The variable it was assigned to, as in `x = 5`, normalised.
    pub variable: Option<String>,
    /// What it is.
    pub value: Value,
}

/// What an [`Answer`] states.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A number and the unit that was set as text after it, if any.
    Number(Number, Option<String>),
    /// Anything else, in normal form; never a number, possibly empty.
    Text(String),
}

impl Answer {
    /// Reads a final answer as [`extract`] finds it.
    #[must_use]
    pub fn read(answer: &str) -> Self {
        let latex = latex::normalise(answer);
        let (variable, stated) = assignment(&latex);
        let value = match number::with_unit(stated).or_else(|| sole_number(stated)) {
            Some((number, unit)) => Value::Number(number, unit),
            None => Value::Text(latex::bare(stated)),
        };
        Self { variable, value }
    }

    /// Whether both state the same.
    #[must_use]
    pub fn equals(&self, other: &Self) -> bool {
        agree(self.variable.as_ref(), other.variable.as_ref())
            && match (&self.value, &other.value) {
                (Value::Number(a, unit), Value::Number(b, other_unit)) => {
                    agree(unit.as_ref(), other_unit.as_ref()) && a.equals(b)
                }
                (Value::Text(a), Value::Text(b)) => !a.is_empty() && a == b,
                _ => false,
            }
    }
}

/// Whether two optional remarks do not contradict each other.
fn agree(a: Option<&String>, b: Option<&String>) -> bool {
    a.is_none() || b.is_none() || a == b
}

/// Splits `x = 2+3 = 5 \approx 4.9` into the variable and `5`; anything whose left side is no plain variable stays.
fn assignment(latex: &str) -> (Option<String>, &str) {
    static VARIABLE: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"\A\s*(\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?(?:\([A-Za-z0-9]\))?)\s*=")
            .expect("constant pattern")
    });
    let Some(captures) = VARIABLE.captures(latex) else { return (None, latex) };
    let stated = latex.rsplit_once('=').map_or(latex, |(_, last)| last);
    let exact = stated.split_once("\\approx").map_or(stated, |(exact, _)| exact);
    // A list such as `x = 1, y = 2` states more than one thing: it stays a text.
    if latex[captures[0].len()..].contains([',', ';', '<', '>']) && latex.matches('=').count() > 1 {
        return (None, latex);
    }
    (Some(captures[1].replace(['{', '}'], "")), exact)
}

/// The only number in a prose answer such as `18 bolts of fabric.` or `28 percent`.
///
/// Refused if a word may change its value or anything but words and full stops stands around it.
fn sole_number(latex: &str) -> Option<(Number, Option<String>)> {
    const VALUE_CHANGING: [&str; 24] = [
        "hundred",
        "hundreds",
        "thousand",
        "thousands",
        "million",
        "millions",
        "billion",
        "billions",
        "trillion",
        "dozen",
        "dozens",
        "half",
        "halves",
        "third",
        "thirds",
        "quarter",
        "quarters",
        "squared",
        "cubed",
        "factorial",
        "pi",
        "sqrt",
        "root",
        "not",
    ];
    static WORDS: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"\A((?:[A-Za-z']+[\s:]+)*)(-?[0-9][0-9.,]*)%?((?:\s+[A-Za-z']+)*)\s*[.!]?\s*\z")
            .expect("constant pattern")
    });
    let captures = WORDS.captures(latex)?;
    let words = captures[1].split([' ', ':', '\n', '\t']).chain(captures[3].split_whitespace());
    let changed = words.filter(|word| !word.is_empty()).any(|word| {
        let single = word.len() == 1 && !word.eq_ignore_ascii_case("a");
        single || VALUE_CHANGING.contains(&word.to_ascii_lowercase().as_str())
    });
    let literal = captures[2].trim_end_matches(['.', ',']);
    if changed { None } else { Some((Number::parse(literal)?, None)) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{input, task};

    fn verdict(answer: &str, text: &str) -> f64 {
        score("math", &input(&task(answer), text)).unwrap()
    }

    #[test]
    fn equal_answers_in_other_notations() {
        for (answer, text) in [
            ("85", "85"),
            ("1000", "\\boxed{1{,}000}"),
            ("1000", "= 1 000"),
            ("\\frac{1}{2}", "\\boxed{\\tfrac12}"),
            ("0.5", "\\boxed{\\left(\\frac{1}{2}\\right)}"),
            ("\\frac{5}{2}", "\\boxed{2\\frac{1}{2}}"),
            ("2.5", "so the answer is 2 1/2."),
            ("50\\%", "**Answer:** 50%"),
            ("90^\\circ", "\\boxed{90}"),
            ("12", "\\boxed{12 \\text{ cm}^2}"),
            ("\\sqrt{12}", "\\boxed{2\\sqrt{3}}"),
            ("\\frac{\\sqrt{2}}{2}", "\\boxed{\\frac{1}{\\sqrt 2}}"),
            ("1500", "\\boxed{1.5 \\times 10^{3}}"),
            ("0.00012", "1.2e-4"),
            ("18", "That is $18 per day.\nThe answer is: $18."),
            ("x=5", "\\boxed{5}"),
            ("\\text{Evelyn}", "\\boxed{Evelyn}"),
            ("(1,\\infty)", "\\boxed{ \\left( 1, \\infty \\right) }"),
            ("work\n#### 1,234", "#### $1,234"),
            ("\\frac13", "0.33333"),
            ("\\sqrt{17}", "\\boxed{4.1231}"),
        ] {
            assert_eq!(verdict(answer, text), 1.0, "{answer:?} against {text:?}");
        }
    }

    #[test]
    fn what_is_not_the_answer() {
        for (answer, text) in [
            ("85", "37+48"),
            ("85", "84 or 85?"),
            ("5", "\\boxed{5 \\text{ million}}"),
            ("5", "The answer is 5 million."),
            ("5", "\\boxed{4}, not 5"),
            ("5", "The answer is not 5."),
            ("4", "The answer is 4x."),
            ("4", "The answer is 4 x."),
            ("4", "\\boxed{4\\sqrt{2}}"),
            ("4", "\\boxed{4\\pi}"),
            ("204", "\\boxed{204_5}"),
            ("5 \\text{ cm}", "\\boxed{5 \\text{ m}}"),
            ("x=5", "\\boxed{y=5}"),
            ("1.2", "\\boxed{1,2}"),
            ("12", "\\boxed{1 2}"),
            ("0.28", "28\\%"),
            ("\\frac13", "0.33"),
            ("\\frac13", "0.3334"),
            ("0.12345", "0.1234"),
            ("7", "7!"),
            ("7", "x^7"),
            ("7", "10-7"),
            ("7", "5 / 7"),
            ("7", "7/0"),
            ("1", "\\boxed{"),
            ("", ""),
            ("{}", "\\boxed{}"),
            ("E", "\\boxed{e}"),
            ("2", "\\boxed{x=1, y=2}"),
        ] {
            assert_eq!(verdict(answer, text), 0.0, "{answer:?} against {text:?}");
        }
    }

    #[test]
    fn a_cut_off_completion_answers_only_what_it_finished() {
        let task = task("18");
        let cut = |text| {
            let input = RewardInput { truncated: true, ..input(&task, text) };
            score("math", &input).unwrap()
        };
        assert_eq!(cut("so \\boxed{18} and"), 1.0);
        assert_eq!(cut("so \\boxed{18}"), 1.0);
        assert_eq!(cut("#### 18\n\nNext"), 1.0);
        assert_eq!(cut("#### 18"), 0.0);
        assert_eq!(cut("she has 18 eggs and"), 0.0);
    }

    /// Texts made of what graders trip over.
    fn texts() -> impl Strategy<Value = String> {
        let pieces = prop::sample::select(vec![
            "\\boxed{",
            "}",
            "{",
            "\\frac",
            "\\sqrt",
            "[",
            "]",
            "(",
            ")",
            "$",
            "\\(",
            "\\]",
            "####",
            "answer is",
            ":",
            "\\text{",
            "\\left",
            "\\",
            "\\\\",
            "1",
            "-",
            "0",
            "7/0",
            ",",
            ".",
            "1,000",
            "e9",
            "10^",
            "\\times",
            "=",
            "x",
            " ",
            "\n",
            "%",
            "^\\circ",
            "{,}",
            "\u{e9}",
            "\u{2212}",
            "\u{1f600}",
            "\u{b0}",
            "_5",
        ]);
        prop_oneof![any::<String>(), prop::collection::vec(pieces, 0..40).prop_map(|pieces| pieces.concat()),]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn no_text_panics_and_equality_is_symmetric(a in texts(), b in texts(), truncated: bool) {
            let task = task(&a);
            let input = RewardInput { truncated, ..input(&task, &b) };
            score("math", &input).unwrap();
            let (a, b) = (Answer::read(&a), Answer::read(&b));
            prop_assert_eq!(a.equals(&b), b.equals(&a));
        }

        #[test]
        fn whole_numbers_equal_themselves_only(a in -100_000i64..100_000, b in -100_000i64..100_000) {
            prop_assert_eq!(verdict(&a.to_string(), &format!("It is \\boxed{{{a}.0}}.")), 1.0);
            prop_assert_eq!(verdict(&a.to_string(), &format!("The answer is {b}.")), f64::from(u8::from(a == b)));
        }

        #[test]
        fn fractions_equal_their_multiples(a in -999i64..999, b in 1i64..999, k in 1i64..99) {
            let text = format!("\\boxed{{\\frac{{{}}}{{{}}}}}", a * k, b * k);
            prop_assert_eq!(verdict(&format!("{a}/{b}"), &text), 1.0);
            prop_assert_eq!(verdict(&format!("{}/{b}", a + 1), &text), 0.0);
        }
    }
}
