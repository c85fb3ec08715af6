//! Derivatives, integrals, limits and series. Derivatives are symbolic, the others are numerical.
//!
//! Definite integrals use the double-exponential rule (Takahasi, Mori 1974). Limits and slowly converging series use
//! Richardson extrapolation. The error of a value is the difference of its last two refinements.
//!
//! Invariant: refinements that do not converge give no value. A derivative is no larger than the remaining work allows.

use std::cell::Cell;

use num_traits::ToPrimitive;

use super::approx::Approx;
use super::node::{Calculus, MathFunction, Node};
use super::numeric::{Evaluator, RealPoint};
use super::rational;

/// Most refinements of a value.
const MAX_LEVEL: i32 = 6;
/// Most terms of a finite series.
const MAX_TERMS: f64 = 2000.0;
/// Relative change of refinements that counts as converged.
const SETTLED: f64 = 1e-8;

/// The value at a point.
pub(super) fn value<'a>(
    with: &Evaluator<'_>,
    calculus: &'a Calculus,
    point: &mut RealPoint<'a>,
) -> Option<Approx> {
    match calculus {
        Calculus::Derivative(body, variable, order) => {
            let derivative =
                (0..*order).try_fold(body.clone(), |body, _| differentiate(&body, variable, with.left()))?;
            // The derivative is a temporary, so it is evaluated at a copy of the point.
            let mut copy: RealPoint<'_> = point.clone();
            with.value(&derivative, &mut copy)
        }
        Calculus::Integral(body, variable, Some((low, high))) => {
            integral(with, body, variable, low, high, point)
        }
        Calculus::Integral(_, _, None) => None,
        Calculus::Limit(body, variable, at, side) => limit(with, body, variable, at, *side, point),
        Calculus::Series(body, index, first, last, product) => {
            series(with, body, index, first, last, *product, point)
        }
    }
}

/// The symbolic derivative; `None` for functions without a rule here. `left`: the remaining node visits, of which a
/// derivative takes one for every node that it may copy.
pub(super) fn differentiate(node: &Node, x: &str, left: &Cell<u32>) -> Option<Node> {
    let copies = if let Node::Product(factors) = node { factors.len() } else { 2 };
    let cost = u32::try_from(copies.checked_mul(node.size())?).ok()?;
    left.set(left.get().checked_sub(cost)?);
    let zero = Node::integer(0);
    let d = |node: &Node| differentiate(node, x, left);
    let times = |a: Node, b: Node| Node::Product(vec![a, b]);
    let over = |a: Node, b: Node| Node::Quotient(Box::new(a), Box::new(b));
    let power = |a: &Node, b: Node| Node::Power(Box::new(a.clone()), Box::new(b));
    let constant = !node.any(&|node| matches!(node, Node::Symbol(name) if name == x));
    if constant && !node.any(&|node| matches!(node, Node::Apply(..) | Node::Calculus(_))) {
        return Some(zero);
    }
    Some(match node {
        Node::Symbol(_) => Node::integer(1),
        Node::Sum(terms) => Node::Sum(terms.iter().map(d).collect::<Option<_>>()?),
        Node::Negate(part) => d(part)?.negated(),
        Node::Product(factors) => {
            let mut terms = vec![];
            for at in 0..factors.len() {
                let mut term = factors.clone();
                term[at] = d(&factors[at])?;
                terms.push(Node::Product(term));
            }
            Node::Sum(terms)
        }
        Node::Quotient(a, b) => {
            let numerator = times(d(a)?, (**b).clone()).minus(times((**a).clone(), d(b)?));
            over(numerator, power(b, Node::integer(2)))
        }
        Node::Power(base, exponent) if rational::exact(exponent).is_some() => {
            let less = (**exponent).clone().minus(Node::integer(1));
            times(times((**exponent).clone(), power(base, less)), d(base)?)
        }
        Node::Power(base, exponent) => {
            let e = matches!(&**base, Node::Symbol(name) if name == "e");
            if e {
                return Some(times(node.clone(), d(exponent)?));
            }
            let ln = Node::Function(MathFunction::Ln, vec![(**base).clone()]);
            let inner = times(d(exponent)?, ln);
            let outer = over(times((**exponent).clone(), d(base)?), (**base).clone());
            times(node.clone(), Node::Sum(vec![inner, outer]))
        }
        Node::Root(degree, radicand) => {
            let exponent = over(Node::integer(1), (**degree).clone());
            return d(&Node::Power(radicand.clone(), Box::new(exponent)));
        }
        Node::Quantity(part, _) => d(part)?,
        Node::Function(function, arguments) => times(slope(*function, arguments)?, d(arguments.last()?)?),
        _ => return None,
    })
}

/// The derivative of a function with respect to its last argument.
fn slope(function: MathFunction, arguments: &[Node]) -> Option<Node> {
    use MathFunction as F;
    let x = arguments.last()?;
    let call = |function, x: &Node| Node::Function(function, vec![x.clone()]);
    let square = |node: Node| Node::Power(Box::new(node), Box::new(Node::integer(2)));
    let inverse = |node: Node| Node::Quotient(Box::new(Node::integer(1)), Box::new(node));
    let one = || Node::integer(1);
    let root = |node: Node| Node::Root(Box::new(Node::integer(2)), Box::new(node));
    Some(match function {
        F::Sin => call(F::Cos, x),
        F::Cos => call(F::Sin, x).negated(),
        F::Tan => square(call(F::Sec, x)),
        F::Cot => square(call(F::Csc, x)).negated(),
        F::Sec => Node::Product(vec![call(F::Sec, x), call(F::Tan, x)]),
        F::Csc => Node::Product(vec![call(F::Csc, x), call(F::Cot, x)]).negated(),
        F::Arcsin => inverse(root(one().minus(square(x.clone())))),
        F::Arccos => inverse(root(one().minus(square(x.clone())))).negated(),
        F::Arctan => inverse(Node::Sum(vec![one(), square(x.clone())])),
        F::Arccot => inverse(Node::Sum(vec![one(), square(x.clone())])).negated(),
        F::Sinh => call(F::Cosh, x),
        F::Cosh => call(F::Sinh, x),
        F::Tanh => one().minus(square(call(F::Tanh, x))),
        F::Arsinh => inverse(root(Node::Sum(vec![one(), square(x.clone())]))),
        F::Arcosh => inverse(root(square(x.clone()).minus(one()))),
        F::Artanh => inverse(one().minus(square(x.clone()))),
        F::Exp => call(F::Exp, x),
        F::Ln => inverse(x.clone()),
        F::Log => {
            let base = arguments.first()?;
            base.any(&|node| matches!(node, Node::Symbol(name) if name != "e"))
                .then_some(())
                .map_or(Some(()), |()| None)?;
            inverse(Node::Product(vec![x.clone(), call(F::Ln, base)]))
        }
        F::Abs => Node::Quotient(Box::new(x.clone()), Box::new(call(F::Abs, x))),
        _ => return None,
    })
}

/// A bound as a number; `None` inside if it is infinite, with the sign.
fn bound<'a>(with: &Evaluator<'_>, node: &'a Node, point: &mut RealPoint<'a>) -> Option<f64> {
    match node {
        Node::Infinity => Some(f64::INFINITY),
        Node::Negate(part) => Some(-bound(with, part, point)?),
        node => with.value(node, point).filter(|value| value.real()).map(|value| value.re),
    }
}

fn integral<'a>(
    with: &Evaluator<'_>,
    body: &'a Node,
    variable: &'a str,
    low: &'a Node,
    high: &'a Node,
    point: &mut RealPoint<'a>,
) -> Option<Approx> {
    let (low, high) = (bound(with, low, point)?, bound(with, high, point)?);
    if low > high {
        return between(with, body, variable, high, low, point).map(Approx::negated);
    }
    between(with, body, variable, low, high, point)
}

/// The double-exponential rule. The step is halved until the value converges.
fn between<'a>(
    with: &Evaluator<'_>,
    body: &'a Node,
    variable: &'a str,
    low: f64,
    high: f64,
    point: &mut RealPoint<'a>,
) -> Option<Approx> {
    // Position and weight of the abscissa t.
    let place = |t: f64| {
        let (s, ds) = (std::f64::consts::FRAC_PI_2 * t.sinh(), std::f64::consts::FRAC_PI_2 * t.cosh());
        match (low.is_finite(), high.is_finite()) {
            (true, true) => {
                let half = (high - low) / 2.0;
                (low + half * (1.0 + s.tanh()), half * ds / s.cosh().powi(2))
            }
            (true, false) => (low + s.exp(), ds * s.exp()),
            (false, true) => (high - s.exp(), ds * s.exp()),
            (false, false) => (s.sinh(), ds * s.cosh()),
        }
    };
    let mut previous: Option<f64> = None;
    for level in 1..=MAX_LEVEL {
        let step = 2f64.powi(-level);
        let mut sum = 0.0;
        let count = (4.0 / step).to_i32()?;
        for k in -count..=count {
            let (x, weight) = place(f64::from(k) * step);
            if !x.is_finite() || weight < 1e-300 || x <= low || x >= high {
                continue;
            }
            point.push((variable, x));
            let value = with.value(body, point);
            point.pop();
            if with.exhausted() {
                return None;
            }
            // A point where rounding makes the integrand undefined has a negligible weight.
            let value = value.filter(|value| value.real()).map_or(0.0, |value| value.re * weight);
            sum += if value.is_finite() { value } else { 0.0 };
        }
        let next = sum * step;
        if let Some(before) =
            previous.filter(|before| (next - before).abs() <= SETTLED * next.abs().max(1e-3))
        {
            let error = (next - before).abs().mul_add(0.1, 1e-10 * next.abs().max(1e-3));
            return Approx { re: next, im: 0.0, error }.finite();
        }
        previous = Some(next);
    }
    None
}

fn limit<'a>(
    with: &Evaluator<'_>,
    body: &'a Node,
    variable: &'a str,
    at: &'a Node,
    side: i8,
    point: &mut RealPoint<'a>,
) -> Option<Approx> {
    let at = bound(with, at, point)?;
    let mut from = |direction: f64| {
        let samples: Option<Vec<f64>> = (3..14)
            .map(|level| {
                let h = 2f64.powi(-level);
                let x = if at.is_finite() { at + direction * h } else { at.signum() / h };
                point.push((variable, x));
                let value = with.value(body, point);
                point.pop();
                value.filter(|value| value.real()).map(|value| value.re)
            })
            .collect();
        settled(&samples?)
    };
    if at.is_infinite() || side != 0 {
        return from(f64::from(if side == 0 { 1 } else { side }));
    }
    let (right, left) = (from(1.0)?, from(-1.0)?);
    ((right.re - left.re).abs() <= right.error + left.error + SETTLED * right.re.abs()).then_some(right)
}

/// Richardson extrapolation of values at repeatedly halved steps.
fn settled(samples: &[f64]) -> Option<Approx> {
    let mut row = samples.to_vec();
    let mut best: Option<(f64, f64)> = None;
    let mut factor = 1.0;
    while row.len() > 2 {
        let last = row.len() - 1;
        let change = (row[last] - row[last - 1]).abs();
        if best.is_none_or(|(_, least)| change < least) {
            best = Some((row[last], change));
        }
        factor *= 2.0;
        row = row.windows(2).map(|pair| pair[1] + (pair[1] - pair[0]) / (factor - 1.0)).collect();
    }
    let (value, change) = best?;
    (change <= SETTLED * value.abs().max(1e-2))
        .then(|| Approx { re: value, im: 0.0, error: change + 1e-10 * value.abs().max(1e-2) })?
        .finite()
}

fn series<'a>(
    with: &Evaluator<'_>,
    body: &'a Node,
    index: &'a str,
    first: &'a Node,
    last: &'a Node,
    product: bool,
    point: &mut RealPoint<'a>,
) -> Option<Approx> {
    let (first, last) = (bound(with, first, point)?, bound(with, last, point)?);
    if first.fract() != 0.0 || (last.is_finite() && (last.fract() != 0.0 || last - first > MAX_TERMS)) {
        return None;
    }
    let mut total = Approx::exact(if product { 1.0 } else { 0.0 });
    // Partial sums after 16, 32, 64, ... terms.
    let mut partial = vec![];
    let mut at = first;
    let mut count = 0u32;
    while at <= last && f64::from(count) <= MAX_TERMS {
        point.push((index, at));
        let term = with.value(body, point);
        point.pop();
        let term = term?;
        total = if product { total.times(term) } else { total.plus(term) };
        at += 1.0;
        count += 1;
        let negligible = if product { (term.re - 1.0).abs() } else { term.size() } <= 1e-17 * total.size();
        if last.is_infinite() && negligible && count > 8 {
            return total.finite();
        }
        if count.is_power_of_two() && count >= 16 {
            partial.push(total.re);
        }
    }
    if last.is_finite() { total.finite() } else { settled(&partial) }
}
