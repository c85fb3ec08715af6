//! Are two scalar expressions equal?
//!
//! Exact values first. Then rational expressions modulo 2^61 - 1 at [`EXACT_POINTS`] random points: different expressions
//! of total degree d pass for equal with probability at most (d / 2^61)^3, below 1e-46 for d = 1000; equal ones always
//! pass. Then everything else in f64 at [`POINTS`] random points where both sides are defined: there a difference below
//! the error bounds (about 1e-12 relative) is not seen, and two expressions are taken for equal that agree on that many
//! points of the common domain. Points come from the seed alone.
//!
//! Invariant: `None` only if a side cannot be evaluated at all.

use std::cell::Cell;

use num_rational::BigRational;
use num_traits::{One, Signed, ToPrimitive, Zero};

use super::approx::Approx;
use super::modular::{self, Absent, PRIME, mix};
use super::node::{Literal, MathFunction, Node};
use super::numeric::{Evaluator, RealPoint, constant, unit};
use super::rational;

/// Random points of the exact test.
const EXACT_POINTS: usize = 3;
/// Points at which two expressions must agree in f64.
const POINTS: usize = 8;
/// Points that are drawn of each kind, as some are outside of the domain.
const DRAWS: u64 = 16;
/// Significant digits from which a decimal stands for a value that has no finite decimal form.
const MIN_SIGNIFICANT: u32 = 4;
/// The same in an answer of several numbers, which all have to agree.
const MIN_SIGNIFICANT_OF_PART: u32 = 2;
/// Decimal places from which a decimal is compared to six places, as Math-Verify does with all.
const LONG_DECIMAL: u32 = 7;

/// Whether both have the same value everywhere.
pub(super) fn equal(gold: &Node, pred: &Node, seed: u64, left: &Cell<u32>) -> Option<bool> {
    if gold == pred {
        return Some(true);
    }
    if infinite(gold) || infinite(pred) {
        return Some(infinity(gold).is_some_and(|sign| infinity(pred) == Some(sign)));
    }
    match (rational::exact(gold), rational::exact(pred)) {
        (Some(a), Some(b)) => {
            Some(a == b || long_decimals(gold, pred, &a, &b) || either_rounds(gold, pred, MIN_SIGNIFICANT))
        }
        _ => {
            let same = modularly(gold, pred, seed).or_else(|| numerically(gold, pred, seed, left));
            match same {
                Some(false) => Some(either_rounds(gold, pred, MIN_SIGNIFICANT)),
                same => same,
            }
        }
    }
}

/// Whether an infinity stands anywhere but in a bound.
fn infinite(node: &Node) -> bool {
    match node {
        Node::Infinity => true,
        Node::Calculus(_) => false,
        node => node.children().into_iter().any(infinite),
    }
}

/// The sign of an infinity, if the tree is one.
pub(super) fn infinity(node: &Node) -> Option<i8> {
    match node {
        Node::Infinity => Some(1),
        Node::Negate(part) => infinity(part).map(|sign| -sign),
        Node::Quantity(part, _) => infinity(part),
        _ => None,
    }
}

/// Whether two quantities that depend on variables are proportional by a positive (`true`) or a negative constant.
///
/// `None` if they are not, or if one of them vanishes.
pub(super) fn proportional(a: &Node, b: &Node, seed: u64, left: &Cell<u32>) -> Option<bool> {
    let mut names = vec![];
    a.variables(&mut names);
    b.variables(&mut names);
    if names.is_empty() {
        // Any two constants are proportional: these must be the same.
        let same = |b: &Node| equal(a, b, seed, left) == Some(true);
        let opposite = || same(&b.clone().negated()).then_some(false);
        return if same(b) { Some(true) } else { opposite() };
    }
    let with = Evaluator::new(false, left);
    let mut ratio: Option<f64> = None;
    let mut found = 0;
    for draw in 0..3 * DRAWS {
        let mut point = real_point(&names, draw, seed);
        let (Some(x), Some(y)) = (with.value(a, &mut point), with.value(b, &mut point)) else { continue };
        if x.size() <= 1e3 * x.error || y.size() <= 1e3 * y.error {
            if (x.size() <= 1e3 * x.error) != (y.size() <= 1e3 * y.error) && x.error.max(y.error) < 1e-9 {
                return None;
            }
            continue;
        }
        let next = x.re / y.re;
        if ratio.is_some_and(|ratio| (next - ratio).abs() > 1e-9 * ratio.abs()) {
            return None;
        }
        ratio = Some(next);
        found += 1;
        if found >= POINTS {
            break;
        }
    }
    let ratio = ratio.filter(|_| found >= POINTS)?;
    let exact = modular_proportional(a, b, &names, seed);
    (exact != Some(false)).then_some(ratio > 0.0)
}

/// Proportionality modulo the prime; `None` if a side is not rational.
fn modular_proportional(a: &Node, b: &Node, names: &[&str], seed: u64) -> Option<bool> {
    let mut first: Option<(u64, u64)> = None;
    let mut found = 0;
    for draw in 0..DRAWS {
        let point = residues(names, draw, seed);
        match (modular::value(a, &point), modular::value(b, &point)) {
            (Ok(x), Ok(y)) => {
                let (x0, y0) = *first.get_or_insert((x, y));
                if modular::multiply(x, y0) != modular::multiply(y, x0) {
                    return Some(false);
                }
                found += 1;
            }
            (Err(Absent::Irrational), _) | (_, Err(Absent::Irrational)) => return None,
            _ => {}
        }
        if found > EXACT_POINTS {
            return Some(true);
        }
    }
    None
}

/// Identity of rational expressions; `None` if one is not rational or never defined.
fn modularly(gold: &Node, pred: &Node, seed: u64) -> Option<bool> {
    let mut names = vec![];
    gold.variables(&mut names);
    pred.variables(&mut names);
    let mut found = 0;
    for draw in 0..DRAWS {
        let point = residues(&names, draw, seed);
        match (modular::value(gold, &point), modular::value(pred, &point)) {
            (Ok(a), Ok(b)) if a != b => return Some(false),
            (Ok(_), Ok(_)) => found += 1,
            (Err(Absent::Irrational), _) | (_, Err(Absent::Irrational)) => return None,
            _ => {}
        }
        if found >= EXACT_POINTS {
            return Some(true);
        }
    }
    None
}

fn residues<'a>(names: &[&'a str], draw: u64, seed: u64) -> Vec<(&'a str, u64)> {
    let mut bits = mix(seed ^ mix(draw));
    std::iter::once("\\pi")
        .chain(names.iter().copied())
        .map(|name| {
            bits = mix(bits);
            (name, bits % (PRIME - 1) + 1)
        })
        .collect()
}

/// Identity in f64 with error bounds.
fn numerically(gold: &Node, pred: &Node, seed: u64, left: &Cell<u32>) -> Option<bool> {
    let mut names = vec![];
    gold.variables(&mut names);
    pred.variables(&mut names);
    let complex = gold.complex() || pred.complex();
    let refined = |node: &Node| node.any(&|node| matches!(node, Node::Calculus(_)));
    let tolerance = if refined(gold) || refined(pred) { 1e-6 } else { 1e-9 };
    let absolute = |node: &Node| node.any(&|node| matches!(node, Node::Function(MathFunction::Abs, _)));
    let domain_counts = !names.is_empty() && (absolute(gold) || absolute(pred));
    let with = Evaluator::new(complex, left);
    let wanted = if names.is_empty() { 1 } else { POINTS };
    let draws = if names.is_empty() { 1 } else { 3 * DRAWS };
    let mut found = 0;
    for draw in 0..draws {
        let mut point = real_point(&names, draw, seed);
        let (a, b) = match (with.value(gold, &mut point), with.value(pred, &mut point)) {
            (Some(a), Some(b)) => (a, b),
            (None, None) => continue,
            // `|x|` says something about negative numbers, so that `\ln|x|` is not `\ln x`.
            _ if domain_counts && !with.exhausted() => return Some(false),
            _ => continue,
        };
        match agree(a, b, tolerance) {
            Some(true) => found += 1,
            Some(false) => return Some(false),
            None => {}
        }
        if found >= wanted {
            return Some(true);
        }
    }
    None
}

/// Whether two approximations may be the same value; `None` if their errors are too large to tell.
fn agree(a: Approx, b: Approx, tolerance: f64) -> Option<bool> {
    let difference = a.minus(b);
    let scale = a.size().max(b.size());
    let error = 8.0 * difference.error;
    if difference.size() > error && difference.size() > 1e-12 * scale {
        return Some(false);
    }
    (error <= tolerance * scale.max(1e-3)).then_some(true)
}

/// Values for variables: of both signs, then positive, then small whole numbers.
fn real_point<'a>(names: &[&'a str], draw: u64, seed: u64) -> RealPoint<'a> {
    let mut bits = mix(seed ^ mix(draw ^ 0xabcd));
    names
        .iter()
        .map(|name| {
            bits = mix(bits);
            let size = 0.3 + 3.4 * unit(bits);
            let value = match draw / DRAWS {
                0 if bits & 1 == 1 => -size,
                0 | 1 => size,
                _ => f64::from(u8::try_from(bits % 9 + 1).unwrap_or(1)),
            };
            (*name, value)
        })
        .collect()
}

/// The decimal literal that a tree is, with its sign.
fn decimal(node: &Node) -> Option<(&Literal, bool)> {
    match node {
        Node::Number(literal) => Some((literal, false)),
        Node::Negate(part) => decimal(part).map(|(literal, negative)| (literal, !negative)),
        Node::Quantity(part, _) => decimal(part),
        _ => None,
    }
}

/// Whether one of two constants is a decimal that stands for the other, which is no decimal.
pub(super) fn rounded_alike(gold: &Node, pred: &Node) -> bool {
    let long = || match (rational::exact(gold), rational::exact(pred)) {
        (Some(a), Some(b)) => long_decimals(gold, pred, &a, &b),
        _ => false,
    };
    either_rounds(gold, pred, MIN_SIGNIFICANT) || long()
}

/// The same of a cell of a matrix or an end of an interval, where fewer digits do.
pub(super) fn rounded_part(gold: &Node, pred: &Node) -> bool {
    rounded_alike(gold, pred) || either_rounds(gold, pred, MIN_SIGNIFICANT_OF_PART)
}

fn either_rounds(gold: &Node, pred: &Node, digits: u32) -> bool {
    rounds(gold, pred, digits) || rounds(pred, gold, digits)
}

/// Whether the first is the decimal of at least `digits` significant digits to which the second is rounded or cut off.
fn rounds(decimal_side: &Node, other: &Node, digits: u32) -> bool {
    let Some((literal, negative)) = decimal(decimal_side) else { return false };
    if literal.places == 0 || literal.significant < digits || decimal(other).is_some() {
        return false;
    }
    let unit = BigRational::new(One::one(), num_bigint::BigInt::from(10u8).pow(literal.places));
    let other = match rational::exact(other) {
        Some(exact) if finite_decimal(&exact) => return false,
        Some(exact) => exact,
        None => {
            let Some(value) = constant(other).filter(|value| value.real()) else { return false };
            let Some(value) = BigRational::from_float(value.re) else { return false };
            value
        }
    };
    if other.is_negative() != negative && !other.is_zero() {
        return false;
    }
    let distance = other.abs() - &literal.value;
    let half = &unit / BigRational::from_integer(2.into());
    distance > -half && distance < unit
}

fn finite_decimal(value: &BigRational) -> bool {
    let mut denominator = value.denom().clone();
    for prime in [2u8, 5] {
        let prime = num_bigint::BigInt::from(prime);
        while (&denominator % &prime).is_zero() {
            denominator /= &prime;
        }
    }
    denominator.is_one()
}

/// Whether one side is a decimal of many places that agrees to six, as floating-point output does.
fn long_decimals(gold: &Node, pred: &Node, a: &BigRational, b: &BigRational) -> bool {
    let long = |node: &Node| decimal(node).is_some_and(|(literal, _)| literal.places >= LONG_DECIMAL);
    if !long(gold) && !long(pred) {
        return false;
    }
    let scaled = |value: &BigRational| (value * BigRational::from_integer(1_000_000.into())).round();
    let large = a.abs().to_f64().is_some_and(|size| size > 1e-3);
    large && scaled(a) == scaled(b)
}
