//! Identity testing: decides whether two scalar expressions are equal.
//!
//! Exact values are compared first. Rational expressions are compared modulo 2^61 - 1 at [`EXACT_POINTS`] random points:
//! equal expressions always pass, and different ones of total degree d pass with probability at most (d / 2^61)^3, below
//! 1e-46 for d = 1000. All others are compared in f64 at [`POINTS`] random points where both sides are defined. This test
//! does not find a difference below the error bounds (about 1e-12 relative). The seed alone determines the points.
//!
//! Invariant: the result is `None` only if a side cannot be evaluated at all.

use std::cell::Cell;

use num_rational::BigRational;
use num_traits::{One, Signed, ToPrimitive, Zero};

use super::approx::Approx;
use super::modular::{self, Absent, PRIME, mix};
use super::node::{Literal, MathFunction, Node};
use super::numeric::{Evaluator, RealPoint, constant, unit};
use super::rational;

/// Number of random points of the exact test.
const EXACT_POINTS: usize = 3;
/// Number of points at which two expressions must agree in f64.
const POINTS: usize = 8;
/// Number of points drawn of each kind. Some are outside of the domain.
const DRAWS: u64 = 16;
/// Least significant digits of a decimal that matches a value without a finite decimal form.
const MIN_SIGNIFICANT: u32 = 4;
/// Least significant digits in an answer of several numbers, which all have to match.
const MIN_SIGNIFICANT_OF_PART: u32 = 2;
/// Least decimal places of a decimal that is compared to six places. Math-Verify compares all decimals so.
const LONG_DECIMAL: u32 = 7;

/// Whether two expressions have the same value everywhere.
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

/// Whether there is an infinity outside of a bound.
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
        // Any two constants are proportional, so they must be equal.
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

/// Identity of rational expressions; `None` if one is not rational or nowhere defined.
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
            // `|x|` is defined for negative numbers, so `\ln|x|` is not `\ln x`.
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

/// Values of variables: of both signs, then positive, then small whole numbers.
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

/// A decimal literal with its sign; `None` for another tree.
fn decimal(node: &Node) -> Option<(&Literal, bool)> {
    match node {
        Node::Number(literal) => Some((literal, false)),
        Node::Negate(part) => decimal(part).map(|(literal, negative)| (literal, !negative)),
        Node::Quantity(part, _) => decimal(part),
        _ => None,
    }
}

/// Whether one of two constants is a decimal that matches the other, which is no decimal.
pub(super) fn rounded_alike(gold: &Node, pred: &Node) -> bool {
    let long = || match (rational::exact(gold), rational::exact(pred)) {
        (Some(a), Some(b)) => long_decimals(gold, pred, &a, &b),
        _ => false,
    };
    either_rounds(gold, pred, MIN_SIGNIFICANT) || long()
}

/// Whether a cell of a matrix or an end of an interval matches, for which fewer digits suffice.
pub(super) fn rounded_part(gold: &Node, pred: &Node) -> bool {
    rounded_alike(gold, pred) || either_rounds(gold, pred, MIN_SIGNIFICANT_OF_PART)
}

fn either_rounds(gold: &Node, pred: &Node, digits: u32) -> bool {
    rounds(gold, pred, digits) || rounds(pred, gold, digits)
}

/// Whether the first is the second, rounded or cut off to a decimal of at least `digits` significant digits.
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
