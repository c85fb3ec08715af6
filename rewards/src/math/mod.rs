//! `math`: decides whether the final answer of a completion is mathematically equal to the reference answer.
//!
//! [`grade`] finds both answers (`extract`), reads them (`lex` with the names in `commands`, `parse`, `operand`) as trees
//! (`node`) and compares the trees (`compare`): numbers exactly (`rational`), expressions by identity testing (`identity`),
//! inequalities and intervals as sets of real numbers (`region`), equations by their solutions (`curve`), sequences and matrices
//! part by part.
//!
//! # What counts as equal
//! - Numbers: the same value in any notation. `28\%` is 28 and 0.28. A decimal of four or more significant digits stands
//!   for a value without a finite decimal form that it is rounded to or cut off from (`0.3333` is 1/3, `0.33` is not).
//! - Expressions: equal at random points. Of rational ones the error probability is below 1e-46, see `identity`.
//! - `x = 5` is the value 5. A value never matches an unsolved equation.
//!   Ends of intervals and cells of matrices are numbers in this respect too; two significant digits do there.
//! - Physical units may be missing but not contradict each other. Other words after a number do not count.
//! - Tuples are ordered, sets and lists are not, `(1, 2)` is also an open interval, `x > 2` is `(2, \infty)`, and so are
//!   `0 < f(x) < 1` and `|x - 1| > 2` the sets that they describe; systems and functions are compared by name.
//!
//! # What is unknown
//! The verdict is unknown for a reference outside of the grammar, unless both answers are the same text. The reward's
//! `on_unknown` defines the outcome.
//!
//! Invariants: the verdict depends on the two texts alone. No input takes more than some milliseconds: length of the text,
//! depth, size of numbers, evaluations and comparisons are bounded. No input panics.

mod approx;
mod calculus;
mod clause;
mod commands;
mod compare;
mod curve;
mod ending;
mod extract;
mod identity;
mod lex;
mod matrix;
mod modular;
mod naming;
mod node;
mod notation;
mod numeric;
mod operand;
mod operand_calculus;
mod parse;
mod rational;
mod region;
mod reward;
mod system;
mod units;
mod words;

pub(crate) use reward::kind;
pub use reward::{MathReward, OnUnknown};

use std::cell::Cell;

use extract::Found;
use lex::Mode;
use node::Node;
use parse::Options;
use units::Side;

/// The verdict of the grader on one completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MathVerdict {
    /// Whether the completion matches the reference; `None` if that is unknown.
    pub equal: Option<bool>,
    /// The comparison that decided.
    pub decided_by: DecidedBy,
}

/// The comparison that decided a [`MathVerdict`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DecidedBy {
    /// Both answers compared as text.
    Text,
    /// Values without variables.
    Number,
    /// Expressions with variables.
    Symbolic,
    /// Equations and inequalities.
    Relation,
    /// Sets and intervals.
    Set,
    /// Tuples and lists.
    Sequence,
    /// Matrices and vectors.
    Matrix,
    /// The completion states no answer that can be parsed.
    NoAnswer,
    /// The reference cannot be parsed, or the two cannot be compared.
    Unknown,
}

impl DecidedBy {
    /// The name in metrics and samples.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Number => "number",
            Self::Symbolic => "symbolic",
            Self::Relation => "relation",
            Self::Set => "set",
            Self::Sequence => "sequence",
            Self::Matrix => "matrix",
            Self::NoAnswer => "no_answer",
            Self::Unknown => "unknown",
        }
    }
}

/// Compares the final answer of a completion with a reference, which may be an answer or a whole solution.
///
/// `truncated`: whether the completion was cut off, so that only its complete parts count. `strict`: whether names of
/// variables count; otherwise `f(x)` equals `f(y)`.
#[must_use]
pub fn grade(gold: &str, completion: &str, truncated: bool, strict: bool) -> MathVerdict {
    let preds = extract::completion(completion, truncated);
    let golds = extract::reference(gold);
    let (Some(pred), Some(gold)) = (preds.first(), golds.first()) else {
        return MathVerdict { equal: Some(false), decided_by: DecidedBy::NoAnswer };
    };
    if let (Some(a), Some(b)) = (plain_integer(&gold.text), plain_integer(&pred.text)) {
        return MathVerdict { equal: Some(a == b), decided_by: DecidedBy::Number };
    }
    if !gold.text.contains('$')
        && let (Some(a), Some(b)) = (plain_integer(&gold.text), integer_with_unit(&pred.text))
    {
        return MathVerdict { equal: Some(a == b), decided_by: DecidedBy::Number };
    }
    if same_text(&gold.text, &preds) {
        return MathVerdict { equal: Some(true), decided_by: DecidedBy::Text };
    }
    let golds = first_readable(&golds, Side::Reference);
    if golds.is_empty() {
        return MathVerdict { equal: None, decided_by: DecidedBy::Unknown };
    }
    let readings = first_readable(&preds, Side::Answer);
    let words = |node: &Node| matches!(node, Node::Words(_));
    if readings.is_empty() || (readings.iter().all(words) && !golds.iter().any(words)) {
        return MathVerdict { equal: Some(false), decided_by: DecidedBy::NoAnswer };
    }
    judged(&golds, &readings, strict, seed(&gold.text, &pred.text))
}

/// Whether a candidate has the same tokens as the reference, or the same words.
fn same_text(gold: &str, preds: &[Found<'_>]) -> bool {
    let written = words::written(gold);
    let prose = words::prose(gold);
    preds.iter().any(|pred| {
        (!written.is_empty() && words::written(&pred.text) == written)
            || (prose.is_some() && words::prose(&pred.text) == prose)
    })
}

/// The verdict over all readings. One equal pair decides.
fn judged(golds: &[Node], preds: &[Node], strict: bool, seed: u64) -> MathVerdict {
    let decided_by = shape(&golds[0]);
    let visits = Cell::new(numeric::BUDGET);
    let mut equal = Some(false);
    for gold in golds {
        for pred in preds {
            match compare::same(gold, pred, strict, seed, &visits) {
                Some(true) => return MathVerdict { equal: Some(true), decided_by },
                Some(false) => {}
                None => equal = None,
            }
        }
    }
    MathVerdict { equal, decided_by: if equal.is_none() { DecidedBy::Unknown } else { decided_by } }
}

fn shape(gold: &Node) -> DecidedBy {
    match gold {
        Node::Words(_) => DecidedBy::Text,
        Node::Chain(..) => DecidedBy::Relation,
        Node::Tuple(_) | Node::List(..) => DecidedBy::Sequence,
        Node::Set(_)
        | Node::Interval(_)
        | Node::Union(..)
        | Node::Intersection(..)
        | Node::Difference(..) => DecidedBy::Set,
        Node::Named(_) | Node::Builder(_) => DecidedBy::Set,
        gold if gold.any(&|node| matches!(node, Node::Matrix(_))) => DecidedBy::Matrix,
        gold => {
            let mut names = vec![];
            gold.variables(&mut names);
            if names.is_empty() { DecidedBy::Number } else { DecidedBy::Symbolic }
        }
    }
}

/// All readings of the first candidate that can be parsed.
fn first_readable(found: &[Found<'_>], side: Side) -> Vec<Node> {
    found.iter().map(|found| readings(found, side)).find(|readings| !readings.is_empty()).unwrap_or_default()
}

/// The trees that an answer may mean: those of its value, and the letter of a choice before it.
fn readings(found: &Found<'_>, side: Side) -> Vec<Node> {
    let text = words::one_meridiem(found.text.trim());
    let Some((letter, value)) = choice(&text) else { return readings_of_value(&text, found.formula, side) };
    let mut nodes = readings_of_value(value.trim(), found.formula, side);
    nodes.push(Node::Symbol(letter.to_owned()));
    nodes
}

/// The trees that a value may mean: `1/2x`, commas and runs of letters can be read in two ways.
fn readings_of_value(text: &str, formula: bool, side: Side) -> Vec<Node> {
    let mut modes = vec![];
    if formula {
        modes.push(Mode::Formula);
        if has_word(text) {
            modes.push(Mode::Plain);
        }
    } else {
        modes.push(Mode::Plain);
    }
    let short = !formula && text.len() <= lex::MAX_BYTES;
    let with_units = if short { units::with_units(text, side) } else { None };
    // In a formula a comma after another digit than zero lists.
    if units::decimal_comma(text, side) && (!formula || text.trim_start_matches('-').starts_with("0,")) {
        modes.push(Mode::PlainDecimalComma);
    }
    let quotient = text.contains('/') && text.contains(|c: char| c.is_ascii_digit());
    let mut nodes: Vec<Node> = vec![];
    let texts = modes.into_iter().map(|mode| (text, mode));
    let texts = texts.chain(with_units.iter().map(|text| (text.as_str(), Mode::Plain)));
    for (text, mode) in texts {
        for loose_division in [false, true] {
            if loose_division && !quotient {
                continue;
            }
            let node = parse::answer(text, Options { mode, loose_division });
            let node = node.map(|node| valued(node, text));
            if let Some(node) = node.filter(|node| !nodes.contains(node)) {
                nodes.push(node);
            }
        }
    }
    nodes
}

/// The meaning of words as a tree, and a number with the currency of the sign beside it.
fn valued(node: Node, text: &str) -> Node {
    match node {
        Node::Words(words) => match words::spelled(&words) {
            Some(value) => Node::integer(value),
            None if words::nothing(&words) => Node::Named('0'),
            None => Node::Words(words),
        },
        Node::Number(_) => match words::currency(text) {
            Some(unit) => Node::Quantity(Box::new(node), unit.to_owned()),
            None => node,
        },
        node => node,
    }
}

/// The letter and the value of an answer with both, such as `(B) 6`, `B) 6` or `\textbf{(B)}\ 6`.
fn choice(text: &str) -> Option<(&str, &str)> {
    let wrapped =
        ["\\textbf{", "\\text{", "\\mathrm{", "\\mathbf{"].iter().find_map(|open| text.strip_prefix(open));
    let inner = wrapped.unwrap_or(text);
    let inner = inner.strip_prefix('(').unwrap_or(inner);
    let letter = inner.get(..1).filter(|letter| ("A".."F").contains(letter))?;
    let rest = inner[1..].strip_prefix(')')?;
    let rest = if wrapped.is_some() { rest.strip_prefix('}')? } else { rest };
    let value = rest.trim_start_matches(['\\', ' ', '~', ',', ':']);
    let spaced = value.len() < rest.len() && !value.is_empty();
    // The backslash of the next command belongs to the value.
    let value = &rest[rest.len()
        - value.len()
        - usize::from(value.starts_with(|c: char| c.is_ascii_alphabetic()) && rest.contains('\\'))..];
    spaced.then_some((letter, value))
}

/// Whether the text has a run of letters that is no command and may be a word.
fn has_word(text: &str) -> bool {
    let mut rest = text;
    while let Some(at) = rest.find(|c: char| c.is_ascii_alphabetic()) {
        let len = rest[at..].bytes().take_while(u8::is_ascii_alphabetic).count();
        if len > 3 && !rest[..at].ends_with('\\') {
            return true;
        }
        rest = &rest[at + len..];
    }
    false
}

/// The sign and digits of a whole number in usual notation, without leading zeros and thousands marks.
fn plain_integer(text: &str) -> Option<(bool, u64)> {
    let text = text.trim();
    let (negative, digits) = text.strip_prefix('-').map_or((false, text), |digits| (true, digits));
    let digits = digits.strip_prefix('$').unwrap_or(digits);
    // `0,111` has no thousands.
    if digits.starts_with('0') && digits.contains(',') {
        return None;
    }
    let groups = digits.split(',');
    let mut value = 0u64;
    for (at, group) in groups.enumerate() {
        let whole = !group.is_empty() && group.len() <= if digits.contains(',') { 3 } else { 18 };
        if !whole
            || (at > 0 && group.len() != 3)
            || at > 5
            || !group.bytes().all(|byte| byte.is_ascii_digit())
        {
            return None;
        }
        value = group.bytes().fold(value, |value, digit| value * 10 + u64::from(digit - b'0'));
    }
    Some((negative && value > 0, value))
}

/// A whole number with currency, decimals that are zeros, or the name of what is counted, as `\$18.00` and `18\text{ eggs}`.
fn integer_with_unit(text: &str) -> Option<(bool, u64)> {
    let text = text.trim();
    let text = text.strip_prefix('\\').filter(|text| text.starts_with('$')).unwrap_or(text);
    let len = text.bytes().take_while(|byte| byte.is_ascii_digit() || b"$-,".contains(byte)).count();
    let (number, rest) = text.split_at(len);
    let decimals =
        rest.strip_prefix('.').map_or(0, |decimals| 1 + decimals.bytes().take_while(|b| *b == b'0').count());
    let unit = rest[decimals..].trim();
    let inner = unit
        .strip_prefix("\\text{")
        .and_then(|unit| unit.strip_suffix('}'))
        .or(unit.is_empty().then_some(""))?;
    let counted = |word: &str| {
        let plain = word.bytes().all(|byte| byte.is_ascii_alphabetic()) && word.len() > 1;
        let special = matches!(word, "and" | "or" | "percent" | "percentage" | "pct" | "degrees" | "degree");
        plain && !special && !words::changes_value(word) && words::scale(word).is_none()
    };
    if number.ends_with(',') || !inner.split_whitespace().all(counted) { None } else { plain_integer(number) }
}

/// A seed from two texts (FNV-1a), so that verdicts are reproducible.
fn seed(gold: &str, pred: &str) -> u64 {
    let bytes = gold.bytes().chain(std::iter::once(0)).chain(pred.bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn equal(gold: &str, pred: &str) -> Option<bool> {
        grade(gold, pred, false, true).equal
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
            ("1500", "\\boxed{1.5 \\times 10^{3}}"),
            ("0.00012", "1.2e-4"),
            ("18", "That is $18 per day.\nThe answer is: $18."),
            ("x=5", "\\boxed{5}"),
            ("\\text{Evelyn}", "\\boxed{Evelyn}"),
            ("(1,\\infty)", "\\boxed{ \\left( 1, \\infty \\right) }"),
            ("work\n#### 1,234", "#### $1,234"),
            ("\\frac13", "0.33333"),
            ("\\sqrt{17}", "\\boxed{4.1231}"),
            ("5000000", "\\boxed{5 \\text{ million}}"),
            ("\\frac{d}{dx} x^3", "\\boxed{3x^2}"),
            ("\\int_0^1 x^2 dx", "\\boxed{\\frac13}"),
            ("\\sum_{k=1}^{\\infty} \\frac{1}{2^k}", "\\boxed{1}"),
            ("\\lim_{x \\to 0} \\frac{\\sin x}{x}", "\\boxed{1}"),
            ("e^{i\\pi}", "\\boxed{-1}"),
            ("y = -\\frac12 x + 3", "\\boxed{x + 2y = 6}"),
            ("\\frac{a}{b} = c", "\\boxed{a = bc}"),
            ("x^2 + y^2 < 4", "\\boxed{4 > y^2 + x^2}"),
            ("(-\\infty,0)\\cup(0,\\infty)", "\\boxed{x \\ne 0}"),
            ("\\mathbb{R}\\setminus\\{3\\}", "\\boxed{(-\\infty,3)\\cup(3,\\infty)}"),
            (
                "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}^2",
                "\\boxed{\\begin{bmatrix}7&10\\\\15&22\\end{bmatrix}}",
            ),
            ("10000000!", "\\boxed{10000000!}"),
            ("0.\\overline{3}", "\\boxed{1/3}"),
            ("6", "Therefore the answer is (B) 6."),
            ("\\textbf{(B)}\\ \\frac{1}{2}", "\\boxed{B}"),
            ("\\textbf{(B)}\\ \\frac{1}{2}", "\\boxed{0.5}"),
            ("f^{-1}(x)=\\frac{x-1}{2}", "\\boxed{\\frac{x-1}{2}}"),
        ] {
            assert_eq!(equal(answer, text), Some(true), "{answer:?} against {text:?}");
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
            ("\\frac13", "0.33"),
            ("\\frac13", "0.3334"),
            ("0.12345", "0.1234"),
            ("7", "7!"),
            ("7", "x^7"),
            ("7", "10-7"),
            ("7", "5 / 7"),
            ("7", "7/0"),
            ("1", "\\boxed{"),
            ("E", "\\boxed{e}"),
            ("2", "\\boxed{x=1, y=2}"),
            ("\\ln |x|", "\\boxed{\\ln x}"),
            ("|x|", "\\boxed{x}"),
            ("\\sqrt{x^2}", "\\boxed{x}"),
            ("x = y", "\\boxed{x^2 = y^2}"),
            ("7 = 11a + c", "\\boxed{11a+c}"),
            ("2 < x < 5", "\\boxed{(2, 5]}"),
            ("a=1,b=2", "\\boxed{a=2,b=1}"),
            ("f(2) < f(1) < f(4)", "\\boxed{f(2) < f(1) < f(5)}"),
            ("10^{20}+1", "\\boxed{10^{20}}"),
            ("x + 10^{-15}", "\\boxed{x}"),
        ] {
            assert_ne!(equal(answer, text), Some(true), "{answer:?} against {text:?}");
        }
    }

    /// Each of these took a stack, a core or the memory for itself when nothing bounded it.
    #[test]
    fn repetitive_answers_take_little_work() {
        let matrix = "\\begin{pmatrix}x&x\\\\x&x\\end{pmatrix}";
        for answer in [
            "A) ".repeat(60_000),
            format!("{}x^", "\\frac{d}{dx}".repeat(40)),
            format!("{}|x", "\\int \\frac{d}{dx}".repeat(40)),
            format!("\\frac{{d^4}}{{dx^4}} {}", "x ".repeat(1000)),
            format!("\\int_0^1 \\frac{{d^4}}{{dx^4}} {} dx", "\\sin(x) ".repeat(200)),
            matrix.repeat(60),
            format!("{}{matrix}{}", "(".repeat(8), ")^4".repeat(8)),
        ] {
            let answer = format!("\\boxed{{{answer}}}");
            for gold in ["5", "x^2", matrix] {
                assert_ne!(equal(gold, &answer), Some(true), "{gold}, {answer:.60}");
            }
        }
    }

    #[test]
    fn a_cut_off_completion_answers_only_what_it_finished() {
        let cut = |text| grade("18", text, true, true).equal == Some(true);
        assert!(cut("so \\boxed{18} and") && cut("so \\boxed{18}") && cut("#### 18\n\nNext"));
        assert!(!cut("#### 18") && !cut("she has 18 eggs and"));
    }

    #[test]
    fn the_deciding_key_is_named() {
        let decided = |gold, pred| grade(gold, pred, false, true).decided_by.as_str();
        assert_eq!(decided("5", "\\boxed{6}"), "number");
        assert_eq!(decided("x+1", "\\boxed{1+x}"), "symbolic");
        assert_eq!(decided("x<1", "\\boxed{-x>-1}"), "relation");
        assert_eq!(decided("[0,1)", "\\boxed{(0,1)}"), "set");
        assert_eq!(decided("(0,1,2)", "\\boxed{(0,1,3)}"), "sequence");
        assert_eq!(decided("\\text{even}", "\\boxed{\\text{odd}}"), "text");
        assert_eq!(decided("5", "no idea"), "no_answer");
        assert_eq!(decided("\\undefined{\\{)", "\\boxed{5}"), "unknown");
    }

    /// What graders trip over, between bars of three.
    const PIECES: &str = "\\boxed{---}---{---\\frac---\\sqrt---[---]---(---)---$---\\(---\\]---####---answer is---:---\\text{---\\left\
        ---\\---\\\\---1------0---7/0---,---.---1,000---e9---10^---\\times---=---x--- ---\n---%---^\\circ---{,}---\u{e9}\
        ---\u{2212}---\u{1f600}---\u{b0}---_5---!---|---<---\\le---\\in---\\cup---\\infty---\\pm---\\{---\\}---\\int_0^1\
        ---dx---\\sum_{n=1}^---\\lim_{x\\to 0}---\\begin{pmatrix}---&---\\end{pmatrix}---\\sin---\\log_---f(---and---or\
        ---million---cm---'---^---\\overline{3}---\\mathbb{R}---9^9^9---\\{x|---\\max(---\\det---\\partial---\\choose\
        ---\\begin{cases}---\\end{cases}---f: ---\\mapsto---\\to---\u{b2}---\u{207b}---\u{bd}---m/s---0,1---||---\\text{m^2}\
        ---\u{221a}3---2\u{3c0}---f(x)---\\left\\{---where $x$";

    fn texts() -> impl Strategy<Value = String> {
        let pieces: Vec<&str> = PIECES.split("---").chain(["-"]).collect();
        let pieces = prop::collection::vec(prop::sample::select(pieces), 0..40);
        prop_oneof![any::<String>(), pieces.prop_map(|pieces| pieces.concat())]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn no_text_panics_and_every_answer_equals_itself(a in texts(), b in texts(), truncated: bool, strict: bool) {
            let first = grade(&a, &b, truncated, strict);
            prop_assert_eq!(first, grade(&a, &b, truncated, strict));
            let boxed = format!("\\boxed{{{a}}}");
            let whole = extract::balanced(&boxed[7..]) == Some(a.len()) && !a.contains("boxed");
            if whole && !words::written(&a).is_empty() {
                prop_assert_ne!(grade(&boxed, &boxed, false, strict).equal, Some(false));
            }
        }

        #[test]
        fn whole_numbers_equal_themselves_only(a in -100_000i64..100_000, b in -100_000i64..100_000) {
            prop_assert_eq!(equal(&a.to_string(), &format!("It is \\boxed{{{a}.0}}.")), Some(true));
            prop_assert_eq!(equal(&a.to_string(), &format!("The answer is {b}.")), Some(a == b));
        }

        #[test]
        fn fractions_equal_their_multiples(a in -999i64..999, b in 1i64..999, k in 1i64..99) {
            let text = format!("\\boxed{{\\frac{{{}}}{{{}}}}}", a * k, b * k);
            prop_assert_eq!(equal(&format!("{a}/{b}"), &text), Some(true));
            prop_assert_eq!(equal(&format!("{}/{b}", a + 1), &text), Some(false));
        }

        #[test]
        fn products_equal_their_expansions(a in -30i64..30, b in -30i64..30, c in 1i64..5) {
            let product = format!("({c}x+{a})(x-({b}))");
            let expanded = format!("{c}x^2 + ({})x - ({})", a - b * c, a * b);
            prop_assert_eq!(equal(&product, &format!("\\boxed{{{expanded}}}")), Some(true));
            prop_assert_eq!(equal(&product, &format!("\\boxed{{{expanded} + 1}}")), Some(false));
        }

        #[test]
        fn scaled_inequalities_are_the_same(a in -20i64..20, b in -20i64..20, k in 1i64..9) {
            let gold = format!("{a}x + y \\le {b}");
            let scaled = format!("\\boxed{{{} \\ge {}x + {k}y}}", b * k, a * k);
            prop_assert_eq!(equal(&gold, &scaled), Some(true));
            let flipped = format!("\\boxed{{{} \\le {}x + {k}y}}", b * k, a * k);
            prop_assert_eq!(equal(&gold, &flipped), Some(false));
        }
    }
}
