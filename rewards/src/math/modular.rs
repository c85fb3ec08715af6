//! Values of rational expressions modulo the prime 2^61 - 1, for identity testing.
//!
//! Two rational expressions of total degree at most d that differ agree at a random point with probability at most
//! d / (2^61 - 2) (Schwartz 1980, Zippel 1979). `\pi` is transcendental, so it is one more indeterminate.
//!
//! Invariant: a value exists only if every step is exact. Division by zero, roots and functions have no value.

use num_bigint::BigInt;
use num_integer::Integer;
use num_rational::BigRational;
use num_traits::ToPrimitive;

use super::node::Node;
use super::rational;

/// The Mersenne prime 2^61 - 1.
pub(super) const PRIME: u64 = (1 << 61) - 1;

/// Variables and their values. `\pi` has its own name.
pub(super) type ResiduePoint<'a> = [(&'a str, u64)];

/// Why an expression has no value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Absent {
    /// Not a rational expression.
    Irrational,
    /// A division by zero at this point.
    Pole,
}

/// The value of a rational expression at a point.
pub(super) fn value(node: &Node, point: &ResiduePoint<'_>) -> Result<u64, Absent> {
    Ok(match node {
        Node::Number(literal) => residue(&literal.value)?,
        Node::Pi => lookup("\\pi", point)?,
        Node::Symbol(name) => lookup(name, point)?,
        Node::Sum(terms) => {
            let mut sum = 0;
            for term in terms {
                sum = add(sum, value(term, point)?);
            }
            sum
        }
        Node::Product(factors) => {
            let mut product = 1;
            for factor in factors {
                product = multiply(product, value(factor, point)?);
            }
            product
        }
        Node::Negate(part) => negate(value(part, point)?),
        Node::Quotient(a, b) => multiply(value(a, point)?, invert(value(b, point)?)?),
        Node::Power(base, exponent) => {
            let exponent =
                rational::exact(exponent).filter(BigRational::is_integer).ok_or(Absent::Irrational)?;
            power(value(base, point)?, exponent.numer())?
        }
        Node::Percent(part) => multiply(value(part, point)?, invert(100)?),
        Node::Quantity(part, _) => value(part, point)?,
        Node::Apply(name, arguments) => {
            let mut hash = name.bytes().fold(0x9e37_79b9, |hash, byte| mix(hash ^ u64::from(byte)));
            for argument in arguments {
                hash = mix(hash ^ value(argument, point)?);
            }
            hash % PRIME
        }
        node => residue(&rational::exact(node).ok_or(Absent::Irrational)?)?,
    })
}

/// A bijection of 64 bits that looks random (the finaliser of SplitMix64).
pub(super) fn mix(mut bits: u64) -> u64 {
    bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

pub(super) fn multiply(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    u64::try_from(product % u128::from(PRIME)).unwrap_or(0)
}

fn lookup(name: &str, point: &ResiduePoint<'_>) -> Result<u64, Absent> {
    point.iter().find(|(known, _)| *known == name).map(|(_, value)| *value).ok_or(Absent::Irrational)
}

fn residue(value: &BigRational) -> Result<u64, Absent> {
    let modulus = BigInt::from(PRIME);
    let reduce = |whole: &BigInt| whole.mod_floor(&modulus).to_u64().unwrap_or(0);
    let numerator = reduce(value.numer());
    if value.is_integer() { Ok(numerator) } else { Ok(multiply(numerator, invert(reduce(value.denom()))?)) }
}

fn add(a: u64, b: u64) -> u64 {
    (a + b) % PRIME
}

fn negate(a: u64) -> u64 {
    (PRIME - a) % PRIME
}

fn invert(a: u64) -> Result<u64, Absent> {
    if a == 0 { Err(Absent::Pole) } else { Ok(raise(a, PRIME - 2)) }
}

/// By Fermat's little theorem, exponents count modulo p - 1.
fn power(base: u64, exponent: &BigInt) -> Result<u64, Absent> {
    if base == 0 {
        return if *exponent > BigInt::from(0) { Ok(0) } else { Err(Absent::Pole) };
    }
    let exponent = exponent.mod_floor(&BigInt::from(PRIME - 1)).to_u64().unwrap_or(0);
    Ok(raise(base, exponent))
}

fn raise(mut base: u64, mut exponent: u64) -> u64 {
    let mut result = 1;
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = multiply(result, base);
        }
        base = multiply(base, base);
        exponent >>= 1;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_modulo_the_prime() {
        assert_eq!(multiply(3, invert(3).unwrap()), 1);
        assert_eq!(invert(0), Err(Absent::Pole));
        assert_eq!(power(5, &BigInt::from(-1)).unwrap(), invert(5).unwrap());
        assert_eq!(
            residue(&BigRational::new((-1).into(), 2.into())).unwrap(),
            multiply(PRIME - 1, invert(2).unwrap())
        );
    }
}
