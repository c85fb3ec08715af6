//! Values of any scalar expression in f64 with error bounds: roots, powers, logarithms, trigonometry, calculus.
//!
//! Expressions without the imaginary unit are evaluated over the reals: an even root or a logarithm of a negative number is
//! undefined. Expressions with it have principal values.
//!
//! Invariant: the work is bounded by [`BUDGET`] node visits.

use std::cell::Cell;
use std::f64::consts::{E, FRAC_PI_2, PI};

use num_traits::ToPrimitive;

use super::approx::Approx;
use super::calculus;
use super::modular::mix;
use super::node::{MathFunction, Node};
use super::rational;

/// Most node visits of one verdict: two or three milliseconds.
pub(super) const BUDGET: u32 = 60_000;
/// Most node visits for one constant.
const CONSTANT: u32 = 2000;

/// Context of an evaluation.
#[derive(Debug)]
pub(super) struct Evaluator<'w> {
    complex: bool,
    left: &'w Cell<u32>,
}

/// Variables and their values.
pub(super) type RealPoint<'a> = Vec<(&'a str, f64)>;

/// The value of a constant, real unless the imaginary unit occurs in it.
pub(super) fn constant(node: &Node) -> Option<Approx> {
    let left = Cell::new(CONSTANT);
    Evaluator::new(node.complex(), &left).value(node, &mut vec![])
}

impl<'w> Evaluator<'w> {
    /// `complex`: whether values are principal values. `left`: the remaining node visits, which the evaluation decrements.
    pub(super) fn new(complex: bool, left: &'w Cell<u32>) -> Self {
        Self { complex, left }
    }

    /// The remaining node visits.
    pub(super) fn left(&self) -> &Cell<u32> {
        self.left
    }

    /// Whether the budget of node visits is used up.
    pub(super) fn exhausted(&self) -> bool {
        self.left.get() == 0
    }

    /// The value at a point; `None` where it is undefined or not a scalar.
    pub(super) fn value<'a>(&self, node: &'a Node, point: &mut RealPoint<'a>) -> Option<Approx> {
        self.left.set(self.left.get().checked_sub(1)?);
        match node {
            Node::Number(literal) => Approx::rounded(literal.value.to_f64()?).finite(),
            Node::Pi => Some(Approx::rounded(PI)),
            Node::Symbol(name) => symbol(name, point),
            Node::Apply(name, arguments) => self.unknown(name, arguments, point),
            Node::Sum(terms) => {
                let mut sum = Approx::exact(0.0);
                for term in terms {
                    sum = sum.plus(self.value(term, point)?);
                }
                sum.finite()
            }
            Node::Product(factors) => {
                let mut product = Approx::exact(1.0);
                for factor in factors {
                    product = product.times(self.value(factor, point)?);
                }
                product.finite()
            }
            Node::Negate(part) => Some(self.value(part, point)?.negated()),
            Node::Quotient(a, b) => {
                let numerator = self.value(a, point)?;
                numerator.over(self.value(b, point)?)
            }
            Node::Power(base, exponent) => self.power(base, exponent, point),
            Node::Root(degree, radicand) => {
                let degree = rational::exact(degree)?;
                let degree = if degree.is_integer() { degree.numer().to_u32()? } else { return None };
                self.root(degree, self.value(radicand, point)?)
            }
            Node::Percent(part) => self.value(part, point)?.over(Approx::exact(100.0)),
            Node::Degree(part) => Some(self.value(part, point)?.times(Approx::rounded(PI / 180.0))),
            Node::Quantity(part, _) => self.value(part, point),
            Node::Ratio(parts) if parts.len() == 2 => {
                let first = self.value(&parts[0], point)?;
                first.over(self.value(&parts[1], point)?)
            }
            Node::Function(function, arguments) => self.function(*function, node, arguments, point),
            Node::Calculus(calculus) => calculus::value(self, calculus, point),
            Node::Based(..) => Approx::rounded(rational::exact(node)?.to_f64()?).finite(),
            _ => None,
        }
    }

    fn power<'a>(&self, base: &'a Node, exponent: &'a Node, point: &mut RealPoint<'a>) -> Option<Approx> {
        let exponent = self.value(exponent, point)?;
        if matches!(base, Node::Symbol(name) if name == "e" && symbol_is_free(name, point)) {
            return exponent.exp();
        }
        let base = self.value(base, point)?;
        let whole =
            exponent.im == 0.0 && exponent.re.fract() == 0.0 && exponent.error <= 1e-12 * exponent.re.abs();
        if whole && exponent.re.abs() <= 1024.0 {
            let size = exponent.re.abs().to_u32()?;
            let power = base.to_integer(size)?;
            return if exponent.re < 0.0 { Approx::exact(1.0).over(power) } else { Some(power) };
        }
        if base.size() <= base.error || base.size() == 0.0 {
            return (exponent.re > exponent.error && exponent.real()).then(|| Approx::exact(0.0));
        }
        if !self.complex && (base.re < 0.0 || !base.real() || !exponent.real()) {
            return None;
        }
        exponent.times(base.ln()?).exp()
    }

    fn root(&self, degree: u32, radicand: Approx) -> Option<Approx> {
        if degree == 0 || degree > 64 {
            return None;
        }
        let inverse = f64::from(degree).recip();
        if radicand.size() <= 4.0 * radicand.error || radicand.size() == 0.0 {
            let error = (5.0 * radicand.error).powf(inverse);
            return Some(Approx { error, ..Approx::exact(0.0) });
        }
        let negative = radicand.re < 0.0;
        if radicand.real() && (!negative || (degree % 2 == 1 && !self.complex)) {
            let size = radicand.re.abs().powf(inverse);
            let error =
                size * inverse * radicand.error / (radicand.re.abs() - radicand.error) + f64::EPSILON * size;
            return Approx { re: if negative { -size } else { size }, im: 0.0, error: 2.0 * error }.finite();
        }
        if !self.complex {
            return None;
        }
        radicand.ln()?.over(Approx::exact(f64::from(degree)))?.exp()
    }

    fn function<'a>(
        &self,
        function: MathFunction,
        node: &'a Node,
        arguments: &'a [Node],
        point: &mut RealPoint<'a>,
    ) -> Option<Approx> {
        use MathFunction as F;
        if matches!(function, F::Gcd | F::Lcm | F::Det) {
            return Approx::rounded(rational::exact(node)?.to_f64()?).finite();
        }
        let x = self.value(arguments.first()?, point)?;
        let one = Approx::exact(1.0);
        match function {
            F::Sin => x.sine(),
            F::Cos => x.cosine(),
            F::Tan => x.sine()?.over(x.cosine()?),
            F::Cot => x.cosine()?.over(x.sine()?),
            F::Sec => one.over(x.cosine()?),
            F::Csc => one.over(x.sine()?),
            F::Arcsin | F::Arccos => {
                if x.re.abs() > 1.0 + x.error {
                    return None;
                }
                let inside = x.re.clamp(-1.0, 1.0);
                let slope = (1.0 - inside * inside).max(x.error + 1e-16).sqrt().recip();
                x.through(
                    |x| {
                        if function == F::Arcsin {
                            x.clamp(-1.0, 1.0).asin()
                        } else {
                            x.clamp(-1.0, 1.0).acos()
                        }
                    },
                    slope,
                )
            }
            F::Arctan => x.through(f64::atan, 1.0),
            F::Arccot => x.through(|x| FRAC_PI_2 - x.atan(), 1.0),
            F::Sinh => x.exp()?.minus(x.negated().exp()?).over(Approx::exact(2.0)),
            F::Cosh => x.exp()?.plus(x.negated().exp()?).over(Approx::exact(2.0)),
            F::Tanh => x.through(f64::tanh, 1.0),
            F::Arsinh => x.through(f64::asinh, 1.0),
            F::Arcosh if x.re > 1.0 => x.through(f64::acosh, (x.re * x.re - 1.0).max(1e-16).sqrt().recip()),
            F::Artanh if x.re.abs() < 1.0 => x.through(f64::atanh, (1.0 - x.re * x.re).max(1e-16).recip()),
            F::Exp => x.exp(),
            F::Ln => self.logarithm(x),
            F::Log => {
                let argument = self.value(arguments.get(1)?, point)?;
                self.logarithm(argument)?.over(self.logarithm(x)?)
            }
            F::Abs => Some(x.absolute()),
            F::Factorial => x.plus(one).gamma(),
            F::Binomial => {
                if let Some(exact) = rational::exact(node) {
                    return Approx::rounded(exact.to_f64()?).finite();
                }
                let k = self.value(arguments.get(1)?, point)?;
                let below = k.plus(one).gamma()?.times(x.minus(k).plus(one).gamma()?);
                x.plus(one).gamma()?.over(below)
            }
            F::Floor | F::Ceil => step(function, arguments, x),
            F::Max | F::Min => self.extreme(function, x, &arguments[1..], point),
            F::Mod => {
                let divisor = self.value(arguments.get(1)?, point)?;
                let quotient = x.over(divisor)?;
                let near = (quotient.re - quotient.re.round()).abs() <= quotient.error;
                (!near && quotient.real()).then(|| x.minus(divisor.times(Approx::exact(quotient.re.floor()))))
            }
            _ => None,
        }
    }

    fn extreme<'a>(
        &self,
        function: MathFunction,
        first: Approx,
        others: &'a [Node],
        point: &mut RealPoint<'a>,
    ) -> Option<Approx> {
        let mut best = first;
        for other in others {
            let next = self.value(other, point)?;
            if !next.real() || !best.real() {
                return None;
            }
            best = if (next.re > best.re) == (function == MathFunction::Max) { next } else { best };
        }
        Some(best)
    }

    fn logarithm(&self, x: Approx) -> Option<Approx> {
        if !self.complex && (x.re <= 0.0 || !x.real()) {
            return None;
        }
        x.ln()
    }

    /// An unknown function. Its name selects a smooth function, so equal arguments have equal values.
    fn unknown<'a>(&self, name: &str, arguments: &'a [Node], point: &mut RealPoint<'a>) -> Option<Approx> {
        let hash = name.bytes().fold(0, |hash, byte| mix(hash ^ u64::from(byte)));
        let mut value = Approx::exact(unit(hash));
        for (at, argument) in (1u64..).zip(arguments) {
            let factor = Approx::exact(1.0 + unit(mix(hash ^ at)));
            value = value.plus(factor.times(self.value(argument, point)?).sine()?.times(factor));
        }
        Some(value)
    }
}

/// Rounding down or up; `None` for an argument too close to a whole number.
fn step(function: MathFunction, arguments: &[Node], x: Approx) -> Option<Approx> {
    let round = |x: f64| if function == MathFunction::Floor { x.floor() } else { x.ceil() };
    if let Some(exact) = rational::exact(&arguments[0]) {
        let rounded = if function == MathFunction::Floor { exact.floor() } else { exact.ceil() };
        return Approx::rounded(rounded.to_f64()?).finite();
    }
    let near = (x.re - x.re.round()).abs() <= x.error;
    (x.real() && !near).then(|| Approx::exact(round(x.re)))
}

fn symbol(name: &str, point: &RealPoint<'_>) -> Option<Approx> {
    if let Some((_, value)) = point.iter().rev().find(|(known, _)| *known == name) {
        return Some(Approx::exact(*value));
    }
    match name {
        "e" => Some(Approx::rounded(E)),
        "i" => Some(Approx::I),
        _ => None,
    }
}

fn symbol_is_free(name: &str, point: &RealPoint<'_>) -> bool {
    !point.iter().any(|(known, _)| *known == name)
}

/// A number in [0, 1) from random bits.
#[expect(clippy::cast_precision_loss, reason = "53 bits are what a f64 holds")]
pub(super) fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}
