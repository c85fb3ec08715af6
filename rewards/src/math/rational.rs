//! Exact values: whole numbers and fractions of bounded size.
//!
//! Invariant: no value has more than [`MAX_BITS`] bits, which bounds the work for any notation (`9^{9^9}`, `10000000!`).
//! Greater numbers have no exact value here.

use num_bigint::BigInt;
use num_integer::Integer;
use num_rational::BigRational;
use num_traits::{One, Signed, ToPrimitive, Zero};

use super::node::{Calculus, MathFunction, Node};

/// Greatest size of a numerator or denominator, bits.
pub(super) const MAX_BITS: u64 = 2048;
/// Most terms of a sum or a product with an exact value.
const MAX_TERMS: i64 = 200;
/// Greatest number whose factorial is within [`MAX_BITS`].
const MAX_FACTORIAL: u32 = 300;
/// Most rows of a matrix with a determinant.
const MAX_DETERMINANT: usize = 6;

/// The value of a tree without variables, roots and transcendental functions.
pub(super) fn exact(node: &Node) -> Option<BigRational> {
    let value = match node {
        Node::Number(literal) => literal.value.clone(),
        Node::Based(digits, base) => based(digits, *base)?,
        Node::Sum(terms) => {
            let mut sum = BigRational::zero();
            for term in terms {
                sum = bounded(sum + exact(term)?)?;
            }
            sum
        }
        Node::Product(factors) => {
            let mut product = BigRational::one();
            for factor in factors {
                product = bounded(product * exact(factor)?)?;
            }
            product
        }
        Node::Negate(part) => -exact(part)?,
        Node::Quotient(a, b) => divided(exact(a)?, &exact(b)?)?,
        Node::Power(base, exponent) => power(&exact(base)?, &exact(exponent)?)?,
        Node::Root(degree, radicand) => root(exact(degree)?.to_u32_exact()?, &exact(radicand)?)?,
        Node::Percent(part) => exact(part)? / BigRational::from_integer(100.into()),
        Node::Quantity(part, _) => exact(part)?,
        Node::Ratio(parts) => match parts.as_slice() {
            [a, b] => divided(exact(a)?, &exact(b)?)?,
            _ => return None,
        },
        Node::Function(function, arguments) => apply(*function, arguments)?,
        Node::Calculus(calculus) => series(calculus)?,
        _ => return None,
    };
    bounded(value)
}

/// `None` for a value that is too large.
fn bounded(value: BigRational) -> Option<BigRational> {
    (value.numer().bits() <= MAX_BITS && value.denom().bits() <= MAX_BITS).then_some(value)
}

fn divided(a: BigRational, b: &BigRational) -> Option<BigRational> {
    if b.is_zero() { None } else { Some(a / b) }
}

trait ExactInteger {
    fn to_u32_exact(&self) -> Option<u32>;
    fn to_i64_exact(&self) -> Option<i64>;
}

impl ExactInteger for BigRational {
    fn to_u32_exact(&self) -> Option<u32> {
        if self.is_integer() { self.numer().to_u32() } else { None }
    }

    fn to_i64_exact(&self) -> Option<i64> {
        if self.is_integer() { self.numer().to_i64() } else { None }
    }
}

fn power(base: &BigRational, exponent: &BigRational) -> Option<BigRational> {
    if !exponent.is_integer() {
        // 8^{2/3}, but of positive bases only: roots of others are not single-valued.
        let degree = exponent.denom().to_u32()?;
        if !base.is_positive() {
            return None;
        }
        return power(&root(degree, base)?, &BigRational::from_integer(exponent.numer().clone()));
    }
    let exponent = exponent.numer().to_i64()?;
    if base.is_zero() {
        return (exponent > 0).then(BigRational::zero);
    }
    let size = exponent.unsigned_abs();
    let bits = base.numer().bits().max(base.denom().bits());
    let trivial = base.numer().magnitude().is_one() && base.denom().is_one();
    if !trivial && bits.checked_sub(1)?.checked_mul(size)? > MAX_BITS {
        return None;
    }
    let size = if trivial { u32::try_from(size % 2).ok()? } else { u32::try_from(size).ok()? };
    let value = BigRational::new(base.numer().pow(size), base.denom().pow(size));
    Some(if exponent < 0 { value.recip() } else { value })
}

/// The real root, if it is rational.
pub(super) fn root(degree: u32, radicand: &BigRational) -> Option<BigRational> {
    if degree == 0 || degree > 64 || (radicand.is_negative() && degree.is_multiple_of(2)) {
        return None;
    }
    let (numerator, denominator) = (radicand.numer().nth_root(degree), radicand.denom().nth_root(degree));
    let exact = numerator.pow(degree) == *radicand.numer() && denominator.pow(degree) == *radicand.denom();
    exact.then(|| BigRational::new(numerator, denominator))
}

fn based(digits: &str, base: u32) -> Option<BigRational> {
    let value = BigInt::parse_bytes(digits.as_bytes(), base)?;
    Some(BigRational::from_integer(value))
}

fn apply(function: MathFunction, arguments: &[Node]) -> Option<BigRational> {
    if function == MathFunction::Det {
        return determinant(arguments.first()?);
    }
    let values = arguments.iter().map(exact).collect::<Option<Vec<_>>>()?;
    let first = values.first()?;
    let integers = || {
        values.iter().map(|value| value.is_integer().then(|| value.to_integer())).collect::<Option<Vec<_>>>()
    };
    let whole = BigRational::from_integer;
    Some(match function {
        MathFunction::Abs => first.abs(),
        MathFunction::Floor => first.floor(),
        MathFunction::Ceil => first.ceil(),
        MathFunction::Max => values.iter().max()?.clone(),
        MathFunction::Min => values.iter().min()?.clone(),
        MathFunction::Gcd => whole(integers()?.iter().fold(BigInt::zero(), |gcd, value| gcd.gcd(value))),
        MathFunction::Lcm => {
            let mut lcm = BigInt::one();
            for value in integers()? {
                lcm = lcm.lcm(&value);
                if lcm.bits() > MAX_BITS {
                    return None;
                }
            }
            whole(lcm)
        }
        MathFunction::Mod => {
            let [a, b] = values.as_slice() else { return None };
            if b.is_zero() {
                return None;
            }
            a - b * (a / b).floor()
        }
        MathFunction::Factorial => {
            let n = first.to_u32_exact().filter(|n| *n <= MAX_FACTORIAL)?;
            whole((1..=n).fold(BigInt::one(), |product, factor| product * factor))
        }
        MathFunction::Binomial => {
            let (n, k) = (first.to_i64_exact()?, values.get(1)?.to_i64_exact()?);
            if n < 0 || k < 0 || n > 10_000 {
                return None;
            }
            let k = k.min(n - k);
            if k > MAX_TERMS {
                return None;
            }
            whole(
                (1..=k.max(0))
                    .fold(BigInt::from(i64::from(k >= 0)), |binomial, i| binomial * (n - k + i) / i),
            )
        }
        _ => return None,
    })
}

/// The determinant, by Gaussian elimination.
fn determinant(node: &Node) -> Option<BigRational> {
    let Node::Matrix(rows) = node else { return None };
    let size = rows.len();
    if size > MAX_DETERMINANT || rows.iter().any(|row| row.len() != size) {
        return None;
    }
    let mut rows = rows
        .iter()
        .map(|row| row.iter().map(exact).collect::<Option<Vec<_>>>())
        .collect::<Option<Vec<_>>>()?;
    let mut determinant = BigRational::one();
    for column in 0..size {
        let Some(pivot) = (column..size).find(|row| !rows[*row][column].is_zero()) else {
            return Some(BigRational::zero());
        };
        if pivot != column {
            rows.swap(pivot, column);
            determinant = -determinant;
        }
        determinant = bounded(determinant * &rows[column][column])?;
        let pivot = rows[column].clone();
        for row in &mut rows[column + 1..] {
            let factor = &row[column] / &pivot[column];
            for (cell, above) in row.iter_mut().zip(&pivot).skip(column) {
                *cell = bounded(&*cell - &factor * above)?;
            }
        }
    }
    Some(determinant)
}

fn series(calculus: &Calculus) -> Option<BigRational> {
    let Calculus::Series(body, index, first, last, product) = calculus else { return None };
    let (first, last) = (exact(first)?.to_i64_exact()?, exact(last)?.to_i64_exact()?);
    if last.checked_sub(first)? >= MAX_TERMS || body.any(&|node| matches!(node, Node::Calculus(_))) {
        return None;
    }
    let mut value = if *product { BigRational::one() } else { BigRational::zero() };
    for at in first..=last {
        let term = exact(&body.substitute(index, &Node::integer(at)))?;
        value = bounded(if *product { value * term } else { value + term })?;
    }
    Some(value)
}
