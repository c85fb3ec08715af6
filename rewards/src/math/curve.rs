//! Decides whether two equations in several variables have the same real solutions.
//!
//! Newton's method finds points on one curve from random starts. They are tested on the other curve, in both directions.
//!
//! Invariant: the result is `true` only if [`POINTS`] solutions of each equation are solutions of the other.

use std::cell::Cell;

use super::modular::mix;
use super::node::Node;
use super::numeric::{Evaluator, RealPoint, unit};

/// Number of solutions of each equation that must solve the other.
const POINTS: usize = 8;
/// Number of random starts for each equation.
const STARTS: u64 = 40;
/// Most steps of Newton's method.
const STEPS: usize = 30;

/// Whether `a = 0` and `b = 0` have the same solutions, of two or more variables.
pub(super) fn same(a: &Node, b: &Node, seed: u64, left: &Cell<u32>) -> bool {
    let (mut names, mut others) = (vec![], vec![]);
    a.variables(&mut names);
    b.variables(&mut others);
    let together = names.len() == others.len() && names.iter().all(|name| others.contains(name));
    together && names.len() > 1 && lies_on(a, b, &names, seed, left) && lies_on(b, a, &names, seed, left)
}

/// Whether solutions of the first solve the second.
fn lies_on<'a>(first: &'a Node, second: &'a Node, names: &[&'a str], seed: u64, left: &Cell<u32>) -> bool {
    let with = Evaluator::new(false, left);
    let mut found = 0;
    for start in 0..STARTS {
        let mut bits = mix(seed ^ mix(start));
        let mut point: RealPoint<'a> = names
            .iter()
            .map(|name| {
                bits = mix(bits);
                (*name, 5.0 * unit(bits) - 2.5)
            })
            .collect();
        let free = usize::try_from(start).unwrap_or(0) % names.len();
        if !solve(&with, first, &mut point, free) {
            continue;
        }
        // A solution in value: the residual is small relative to its slope.
        let Some((residual, slope)) = newton(&with, second, &mut point, free) else { continue };
        if residual.abs() > 1e-6 * slope.abs().max(1e-3) {
            return false;
        }
        found += 1;
        if found >= POINTS {
            return true;
        }
    }
    false
}

/// Moves one coordinate to a solution.
fn solve<'a>(with: &Evaluator<'_>, node: &'a Node, point: &mut RealPoint<'a>, free: usize) -> bool {
    for _ in 0..STEPS {
        let Some((residual, slope)) = newton(with, node, point, free) else { return false };
        let step = residual / slope;
        if !step.is_finite() || step.abs() > 1e3 {
            return false;
        }
        point[free].1 -= step;
        if step.abs() < 1e-12 {
            return true;
        }
    }
    false
}

/// The value and the slope in one coordinate, by a central difference.
fn newton<'a>(
    with: &Evaluator<'_>,
    node: &'a Node,
    point: &mut RealPoint<'a>,
    free: usize,
) -> Option<(f64, f64)> {
    let at = point[free].1;
    let h = 1e-6;
    let mut value = |x: f64| {
        point[free].1 = x;
        let value = with.value(node, point);
        point[free].1 = at;
        value.filter(|value| value.real()).map(|value| value.re)
    };
    let (low, middle, high) = (value(at - h)?, value(at)?, value(at + h)?);
    Some((middle, (high - low) / (2.0 * h)))
}
