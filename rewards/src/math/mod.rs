//! `math`: is the final answer of a completion mathematically equal to the reference answer?
//!
//! [`grade`] finds both answers (`extract`), reads them (`lex`, `parse`, `operand`) as trees (`node`) and compares the trees
//! (`compare`): numbers exactly (`rational`), expressions by identity testing (`identity`), inequalities and intervals as sets
//! of real numbers (`region`), equations by their solutions (`curve`), sequences and matrices part by part.
//!
//! # What counts as equal
//! - Numbers: the same value in any notation. `28\%` is 28 and 0.28. A decimal of four or more significant digits stands
//!   for a value without a finite decimal form that it is rounded to or cut off from (`0.3333` is 1/3, `0.33` is not).
//! - Expressions: equal at random points. Of rational ones the error probability is below 1e-46, see `identity`.
//! - `x = 5` is the value 5; a value never stands for an unsolved equation.
//! - Physical units may be left out but not contradict each other; other words after a number do not count.
//! - Tuples are ordered, sets and lists are not, `(1, 2)` is also an open interval, `x > 2` is `(2, \infty)`.
//!
//! # What is unknown
//! A reference outside of the grammar, unless both answers are the same text. The reward's `on_unknown` says what then.
//!
//! Invariants: the verdict depends on the two texts alone; no input takes more than some milliseconds (length of what is
//! read, depth, size of numbers, evaluations and comparisons are bounded) and none panics.

mod approx;
mod calculus;
mod compare;
mod curve;
mod extract;
mod identity;
mod lex;
mod matrix;
mod modular;
mod node;
mod numeric;
mod operand;
mod parse;
mod rational;
mod region;
mod words;

use extract::Found;
use lex::Mode;
use node::Node;
use parse::Options;

use crate::registry::{Kind, pure};
use crate::{RewardError, RewardInput};

/// What the grader says about one completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Whether the completion answers as the reference does; `None` if that cannot be told.
    pub equal: Option<bool>,
    /// What decided.
    pub decided_by: DecidedBy,
}

/// How a [`Verdict`] came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DecidedBy {
    /// Both answers are, or are not, the same text.
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
    /// The completion states no answer, or none that can be read.
    NoAnswer,
    /// The reference cannot be read, or the two cannot be compared.
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

/// The kind `math`.
pub(crate) fn kind() -> Kind {
    Kind::new("math", &[], &[], |spec, _| Ok(pure(spec, score)))
}

/// 1.0 or 0.0; `reward` is the name under which errors are reported.
///
/// # Errors
/// The task has no reference answer.
pub fn score(reward: &str, input: &RewardInput<'_>) -> Result<f64, RewardError> {
    let verdict = grade(input.answer(reward)?, input.text, input.truncated, true);
    Ok(f64::from(u8::from(verdict.equal == Some(true))))
}

/// Compares the final answer of a completion with a reference, which may be an answer or a whole solution.
///
/// `truncated`: whether the completion was cut off, so that only what it finished counts. `strict`: whether names of
/// variables count; without, `f(x)` is `f(y)`.
#[must_use]
pub fn grade(gold: &str, completion: &str, truncated: bool, strict: bool) -> Verdict {
    let preds = extract::completion(completion, truncated);
    let golds = extract::reference(gold);
    let (Some(pred), Some(gold)) = (preds.first(), golds.first()) else {
        return Verdict { equal: Some(false), decided_by: DecidedBy::NoAnswer };
    };
    if let (Some(a), Some(b)) = (plain_integer(&gold.text), plain_integer(&pred.text)) {
        return Verdict { equal: Some(a == b), decided_by: DecidedBy::Number };
    }
    let text = words::bare(&gold.text);
    if !text.is_empty() && preds.iter().any(|pred| words::bare(&pred.text) == text) {
        return Verdict { equal: Some(true), decided_by: DecidedBy::Text };
    }
    let golds = first_readable(&golds);
    if golds.is_empty() {
        return Verdict { equal: None, decided_by: DecidedBy::Unknown };
    }
    let readings = first_readable(&preds);
    if readings.is_empty() {
        return Verdict { equal: Some(false), decided_by: DecidedBy::NoAnswer };
    }
    judged(&golds, &readings, strict, seed(&gold.text, &pred.text))
}

/// The verdict over all readings: any pair that is equal decides.
fn judged(golds: &[Node], preds: &[Node], strict: bool, seed: u64) -> Verdict {
    let decided_by = kind(&golds[0]);
    let mut equal = Some(false);
    for gold in golds {
        for pred in preds {
            match compare::same(gold, pred, strict, seed) {
                Some(true) => return Verdict { equal: Some(true), decided_by },
                Some(false) => {}
                None => equal = None,
            }
        }
    }
    Verdict { equal, decided_by: if equal.is_none() { DecidedBy::Unknown } else { decided_by } }
}

fn kind(gold: &Node) -> DecidedBy {
    match gold {
        Node::Words(_) => DecidedBy::Text,
        Node::Chain(..) => DecidedBy::Relation,
        Node::Tuple(_) | Node::List(..) => DecidedBy::Sequence,
        Node::Set(_) | Node::Interval(_) | Node::Union(..) | Node::Intersection(..) | Node::Difference(..) => DecidedBy::Set,
        Node::Named(_) | Node::Builder(_) => DecidedBy::Set,
        gold if gold.any(&|node| matches!(node, Node::Matrix(_))) => DecidedBy::Matrix,
        gold => {
            let mut names = vec![];
            gold.variables(&mut names);
            if names.is_empty() { DecidedBy::Number } else { DecidedBy::Symbolic }
        }
    }
}

/// All readings of the first candidate that can be read.
fn first_readable(found: &[Found<'_>]) -> Vec<Node> {
    found.iter().map(readings).find(|readings| !readings.is_empty()).unwrap_or_default()
}

/// The trees that an answer may mean: `1/2x`, commas and runs of letters can be read in two ways.
fn readings(found: &Found<'_>) -> Vec<Node> {
    let text = found.text.trim();
    let mut modes = vec![];
    if found.formula {
        modes.push(Mode::Formula);
        if has_word(text) {
            modes.push(Mode::Plain);
        }
    } else {
        modes.push(Mode::Plain);
        if text.bytes().zip(text.bytes().skip(1)).any(|(a, b)| a == b',' && b.is_ascii_digit()) {
            modes.push(Mode::PlainDecimalComma);
        }
    }
    let quotient = text.contains('/') && text.contains(|c: char| c.is_ascii_digit());
    let mut nodes: Vec<Node> = vec![];
    for mode in modes {
        for loose_division in [false, true] {
            if loose_division && !quotient {
                continue;
            }
            let node = parse::answer(text, Options { mode, loose_division });
            if let Some(node) = node.filter(|node| !nodes.contains(node)) {
                nodes.push(node);
            }
        }
    }
    nodes
}

/// Whether there is a run of letters that is no command and may be a word.
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

/// The sign and digits of a whole number as most answers are written, without leading zeros and thousands marks.
fn plain_integer(text: &str) -> Option<(bool, u64)> {
    let text = text.trim();
    let (negative, digits) = text.strip_prefix('-').map_or((false, text), |digits| (true, digits));
    let digits = digits.strip_prefix('$').unwrap_or(digits);
    let groups = digits.split(',');
    let mut value = 0u64;
    for (at, group) in groups.enumerate() {
        let whole = !group.is_empty() && group.len() <= if digits.contains(',') { 3 } else { 18 };
        if !whole || (at > 0 && group.len() != 3) || at > 5 || !group.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        value = group.bytes().fold(value, |value, digit| value * 10 + u64::from(digit - b'0'));
    }
    Some((negative && value > 0, value))
}

/// A seed from two texts (FNV-1a), so that verdicts can be repeated.
fn seed(gold: &str, pred: &str) -> u64 {
    let bytes = gold.bytes().chain(std::iter::once(0)).chain(pred.bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
