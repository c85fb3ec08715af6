//! What the notation of a scalar says beyond its value: times of day, whole percentages, approximations.
//!
//! Invariant: `false` or `None` for anything that is not clearly written so; the value then decides alone.

use num_integer::gcd;
use num_rational::BigRational;
use num_traits::ToPrimitive;

use super::node::Node;
use super::numeric::constant;
use super::rational;

/// Whether a ratio is written as a time of day is, and not in lowest terms as ratios are.
pub(super) fn time_of_day(parts: &[Node]) -> bool {
    let whole = |node: &Node| match node {
        Node::Quantity(part, _) => rational::exact(part)?.to_integer().to_u32(),
        Node::Number(literal) => literal.value.is_integer().then(|| literal.value.to_integer())?.to_u32(),
        _ => None,
    };
    let [hours, minutes] = parts else { return false };
    let (Some(hours), Some(minutes)) = (whole(hours), whole(minutes)) else { return false };
    hours <= 24 && (10..60).contains(&minutes) && gcd(hours, minutes) > 1
}

/// `am` or `pm` after a time of day.
pub(super) fn meridiem(node: &Node) -> Option<String> {
    let Node::Quantity(_, unit) = node else { return None };
    Some(unit.to_ascii_lowercase()).filter(|unit| unit == "am" || unit == "pm")
}

/// Whether a reference without the sign may be meant in per cent: a number as written, and no fraction of one.
pub(super) fn plain_percentage(node: &Node) -> bool {
    match node {
        Node::Number(literal) => literal.value >= BigRational::from_integer(1.into()),
        Node::Negate(part) => plain_percentage(part),
        _ => false,
    }
}

/// Whether an approximation can be one: within a tenth, or not to be evaluated.
pub(super) fn close(exact: &Node, approximate: &Node) -> bool {
    match (constant(exact), constant(approximate)) {
        (Some(a), Some(b)) => a.minus(b).size() <= 0.1 * a.size(),
        _ => true,
    }
}
