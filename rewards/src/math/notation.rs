//! Meaning of a scalar's notation beyond its value: times of day, whole percentages, approximations.
//!
//! Invariant: the result is `false` or `None` for any notation that is not unambiguous. The value then decides alone.

use num_integer::gcd;
use num_rational::BigRational;
use num_traits::ToPrimitive;

use super::node::Node;
use super::numeric::constant;
use super::rational;

/// Whether a ratio has the notation of a time of day, and is not in lowest terms.
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

/// Whether a reference without the sign may be a percentage: a literal number that is no fraction of one.
pub(super) fn plain_percentage(node: &Node) -> bool {
    match node {
        Node::Number(literal) => literal.value >= BigRational::from_integer(1.into()),
        Node::Negate(part) => plain_percentage(part),
        _ => false,
    }
}

/// Whether an approximation is plausible: within a tenth, or impossible to evaluate.
pub(super) fn close(exact: &Node, approximate: &Node) -> bool {
    match (constant(exact), constant(approximate)) {
        (Some(a), Some(b)) => a.minus(b).size() <= 0.1 * a.size(),
        _ => true,
    }
}
