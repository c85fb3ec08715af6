//! Reads one number in normalised notation, exactly.
//!
//! Numbers are `q * sqrt(r)` with rational `q` and `r`: whole numbers, decimals, fractions, mixed numbers, scientific
//! notation, square roots and their products and quotients. They are kept as sign and square, so that equality needs
//! no tolerance.
//!
//! Invariant: the whole text must be the number. Sums, powers (but of ten), variables and functions are not read.

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{One, Signed, ToPrimitive, Zero};

/// Longest run of digits and greatest power of ten that is read: reading is quadratic in it.
const MAX_DIGITS: usize = 400;
/// Deepest nesting of fractions and roots.
const MAX_DEPTH: usize = 8;
/// Significant digits from which a decimal stands for a number that has no finite decimal form.
const MIN_SIGNIFICANT: usize = 4;

/// A real number `q * sqrt(r)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Number {
    negative: bool,
    square: BigRational,
    /// The value of one unit in the last place, if it was written as a decimal that may be a rounding.
    last_place: Option<BigRational>,
}

impl Number {
    /// Reads a text that is one number and nothing else, blanks aside.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut cursor = Cursor { rest: text.trim() };
        let number = cursor.signed(0)?;
        cursor.rest.trim().is_empty().then_some(number)
    }

    /// Exact equality, or agreement to the last place of a decimal with a number that has no finite decimal form.
    #[must_use]
    pub fn equals(&self, other: &Self) -> bool {
        if self.negative != other.negative {
            return false;
        }
        self.square == other.square || self.rounds(other) || other.rounds(self)
    }

    /// Whether `self` is the decimal to which `exact` is rounded or cut off.
    fn rounds(&self, exact: &Self) -> bool {
        let Some(unit) = &self.last_place else { return false };
        if exact.finite_decimal() {
            return false;
        }
        let Some(decimal) = root(&self.square) else { return false };
        let half = unit / BigInt::from(2);
        let square = |value: BigRational| &value * &value;
        (square(&decimal - &half)..square(&decimal + unit)).contains(&exact.square)
            && (exact.square < square(&decimal + &half) || exact.square >= self.square)
    }

    fn finite_decimal(&self) -> bool {
        let Some(root) = root(&self.square) else { return false };
        let mut denominator = root.denom().clone();
        for prime in [2, 5] {
            let prime = BigInt::from(prime);
            while (&denominator % &prime).is_zero() {
                denominator /= &prime;
            }
        }
        denominator.is_one()
    }

    fn rational(value: &BigRational) -> Self {
        Self { negative: value.is_negative(), square: value * value, last_place: None }
    }

    fn times(&self, other: &Self) -> Self {
        let square = &self.square * &other.square;
        let negative = self.negative != other.negative && !square.is_zero();
        Self { negative, square, last_place: None }
    }

    fn over(&self, other: &Self) -> Option<Self> {
        if other.square.is_zero() {
            return None;
        }
        let inverse = Self { square: other.square.recip(), ..other.clone() };
        Some(self.times(&inverse))
    }
}

/// Reads a number that a unit may follow, set as `\text{...}`; per cent signs are dropped.
///
/// A unit that changes the value (`\text{ million}`) or is not made of letters makes it no number.
#[must_use]
pub fn with_unit(text: &str) -> Option<(Number, Option<String>)> {
    const VALUE_CHANGING: [&str; 12] = [
        "hundred",
        "thousand",
        "million",
        "billion",
        "trillion",
        "dozen",
        "half",
        "squared",
        "cubed",
        "factorial",
        "pi",
        "and",
    ];
    let text = text.trim();
    let Some((front, unit)) = text.split_once("\\text{") else {
        let number = Number::parse(text.trim_end_matches(['%', ' ']))?;
        return Some((number, None));
    };
    let (unit, power) = unit.split_once('}')?;
    let plain = unit.chars().all(|c| c.is_ascii_alphabetic() || " ./".contains(c));
    let power = power.trim();
    if !plain || !["", "^2", "^{2}", "^3", "^{3}", "."].contains(&power) {
        return None;
    }
    let unit = unit.to_ascii_lowercase();
    if unit.split_whitespace().any(|word| VALUE_CHANGING.contains(&word.trim_end_matches('s'))) {
        return None;
    }
    let number = Number::parse(front.trim_end_matches(['%', ' ']))?;
    let unit = unit.trim_matches([' ', '.']).trim_end_matches('s').to_owned();
    Some((number, Some(unit).filter(|unit| !unit.is_empty())))
}

/// The rational square root, if there is one.
fn root(square: &BigRational) -> Option<BigRational> {
    let (numerator, denominator) = (square.numer().sqrt(), square.denom().sqrt());
    let exact =
        &(&numerator * &numerator) == square.numer() && &(&denominator * &denominator) == square.denom();
    exact.then(|| BigRational::new(numerator, denominator))
}

struct Cursor<'a> {
    rest: &'a str,
}

impl<'a> Cursor<'a> {
    fn signed(&mut self, depth: usize) -> Option<Number> {
        let negative = self.eat("-");
        if !negative {
            self.eat("+");
        }
        let mut number = self.quotient(depth)?;
        number.negative = (number.negative != negative) && !number.square.is_zero();
        Some(number)
    }

    fn quotient(&mut self, depth: usize) -> Option<Number> {
        let number = self.product(depth)?;
        if self.eat("/") { number.over(&self.product(depth)?) } else { Some(number) }
    }

    /// A literal, a fraction and a square root, in this order, each at most once.
    fn product(&mut self, depth: usize) -> Option<Number> {
        if depth > MAX_DEPTH {
            return None;
        }
        if let Some(inner) = self.group('(', ')') {
            return Cursor { rest: inner }.whole(depth + 1);
        }
        let literal = self.literal()?;
        let fraction = self.fraction(depth)?;
        let mut number = match (literal, fraction) {
            (Some(literal), None) => Some(literal),
            (None, Some(fraction)) => Some(fraction),
            (Some(literal), Some(fraction)) => Some(mixed(&literal, &fraction)?),
            (None, None) => None,
        };
        if self.eat("\\sqrt") {
            let radicand = self.argument(depth)?;
            let radicand = root(&radicand.square).filter(|_| !radicand.negative)?;
            let surd = Number { negative: false, square: radicand, last_place: None };
            number = Some(number.map_or_else(|| surd.clone(), |number| number.times(&surd)));
        }
        number
    }

    /// `\frac{..}{..}`, or `1/2` after the blank of a mixed number; `Some(None)` if neither is next.
    fn fraction(&mut self, depth: usize) -> Option<Option<Number>> {
        if self.eat("\\frac") {
            let numerator = self.argument(depth)?;
            return Some(Some(numerator.over(&self.argument(depth)?)?));
        }
        let plain = self.rest.trim_start();
        if plain.len() == self.rest.len() || !plain.starts_with(|c: char| c.is_ascii_digit()) {
            return Some(None);
        }
        let (numerator, denominator) = plain.split_once('/')?;
        self.rest = "";
        let part = |digits| Some(Number::rational(&BigRational::from(whole(digits)?)));
        Some(Some(part(numerator)?.over(&part(denominator)?)?))
    }

    fn argument(&mut self, depth: usize) -> Option<Number> {
        let inner = self.group('{', '}')?;
        Cursor { rest: inner }.whole(depth + 1)
    }

    fn whole(mut self, depth: usize) -> Option<Number> {
        let number = self.signed(depth)?;
        self.rest.trim().is_empty().then_some(number)
    }

    /// The content of a balanced group that is next.
    fn group(&mut self, open: char, close: char) -> Option<&'a str> {
        let inner = self.rest.trim_start().strip_prefix(open)?;
        let mut depth = 1usize;
        for (at, c) in inner.char_indices() {
            depth = if c == open {
                depth + 1
            } else if c == close {
                depth - 1
            } else {
                depth
            };
            if depth == 0 {
                self.rest = &inner[at + close.len_utf8()..];
                return Some(&inner[..at]);
            }
        }
        None
    }

    /// Digits with thousands marks, decimals and a power of ten; `Some(None)` if none is next, `None` if malformed.
    fn literal(&mut self) -> Option<Option<Number>> {
        let text = self.rest.trim_start();
        if !text.starts_with(|c: char| c.is_ascii_digit() || c == '.') {
            let power = text.starts_with("10^");
            return if power { None } else { Some(None) };
        }
        let (units, rest) = units(text)?;
        let (decimals, rest) = match rest.strip_prefix('.') {
            Some(rest) => rest.split_at(digits(rest)),
            None => ("", rest),
        };
        if units.is_empty() && decimals.is_empty() {
            return None;
        }
        let significant = format!("{units}{decimals}");
        let mantissa = whole(&significant)?;
        let (exponent, rest) = power_of_ten(rest)?;
        self.rest = rest;
        let places = i64::try_from(decimals.len()).ok()?;
        let value = BigRational::from(mantissa) * ten_to(exponent - places);
        let mut number = Number::rational(&value);
        let enough = significant.trim_start_matches('0').len() >= MIN_SIGNIFICANT;
        if enough && !decimals.is_empty() && exponent == 0 {
            number.last_place = Some(ten_to(-places));
        }
        Some(Some(number))
    }

    fn eat(&mut self, token: &str) -> bool {
        match self.rest.trim_start().strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }
}

/// `2\frac{1}{2}` is 2.5: a whole number and a proper fraction. Anything else of this look is ambiguous.
fn mixed(units: &Number, fraction: &Number) -> Option<Number> {
    let (units, fraction) = (root(&units.square)?, root(&fraction.square).filter(|_| !fraction.negative)?);
    let proper = units.is_integer() && fraction < BigRational::one();
    proper.then(|| Number::rational(&(units + fraction)))
}

/// The digits before the decimal point without their thousands marks, and what follows. `None` if the marks are not
/// every three digits, as in `1,22`.
fn units(text: &str) -> Option<(String, &str)> {
    let (first, mut rest) = text.split_at(digits(text));
    let mut units = first.to_owned();
    while let Some(mark) = rest.chars().next().filter(|c| [',', ' '].contains(c)) {
        let group = digits(&rest[1..]);
        let grouped = group == 3 && (1..=3).contains(&first.len());
        if mark == ' ' && !grouped {
            break;
        }
        if !grouped {
            return None;
        }
        units.push_str(&rest[1..4]);
        rest = &rest[4..];
    }
    Some((units, rest))
}

/// `e-4`, `\times 10^{-4}`, `*10^-4` or nothing; `None` if malformed or too great.
fn power_of_ten(text: &str) -> Option<(i64, &str)> {
    let scientific = text.strip_prefix(['e', 'E']);
    let (exponent, rest) = match scientific {
        Some(rest) => {
            let len = usize::from(rest.starts_with(['-', '+']));
            rest.split_at(len + digits(&rest[len..]))
        }
        None => {
            let blankless = text.trim_start();
            let factor = ["\\times", "*", "x"].iter().find_map(|sign| blankless.strip_prefix(sign));
            let Some(power) = factor.and_then(|rest| rest.trim_start().strip_prefix("10^")) else {
                return Some((0, text));
            };
            match power.strip_prefix('{') {
                Some(braced) => braced.split_once('}')?,
                None => power
                    .split_at(usize::from(power.starts_with('-')) + digits(power.trim_start_matches('-'))),
            }
        }
    };
    let exponent: i64 = exponent.trim().parse().ok()?;
    let bounded = exponent.unsigned_abs().to_usize().is_some_and(|size| size <= MAX_DIGITS);
    bounded.then_some((exponent, rest))
}

fn digits(text: &str) -> usize {
    text.bytes().take_while(u8::is_ascii_digit).count()
}

fn whole(digits: &str) -> Option<BigInt> {
    let digits = digits.trim();
    let plain =
        !digits.is_empty() && digits.len() <= MAX_DIGITS && digits.bytes().all(|b| b.is_ascii_digit());
    if plain { digits.parse().ok() } else { None }
}

fn ten_to(exponent: i64) -> BigRational {
    let size = u32::try_from(exponent.unsigned_abs()).unwrap_or(u32::MAX);
    let power = BigRational::from(BigInt::from(10).pow(size));
    if exponent < 0 { power.recip() } else { power }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn equal(a: &str, b: &str) -> bool {
        Number::parse(a).unwrap().equals(&Number::parse(b).unwrap())
    }

    #[test]
    fn one_number_in_many_forms() {
        for (a, b) in [
            ("1,234,567.50", "1234567.5"),
            ("1 000", "1000"),
            ("-0", "0"),
            ("-.5", "\\frac{-1}{2}"),
            ("\\frac{1}{-2}", "-\\frac{1}{2}"),
            ("3/4", "0.75"),
            ("-2 1/2", "-2.5"),
            ("-2\\frac{1}{2}", "-5/2"),
            ("2\\sqrt{3}", "\\sqrt{12}"),
            ("\\sqrt{3}/3", "1/\\sqrt{3}"),
            ("\\sqrt{\\frac{9}{4}}", "1.5"),
            ("\\frac{\\frac{1}{2}}{3}", "1/6"),
            ("(5)", "5"),
            ("1.5\\times 10^{-3}", "0.0015"),
            ("2e3", "2000"),
            ("0.6667", "2/3"),
            ("0.6666", "2/3"),
            ("-3.1622", "-\\sqrt{10}"),
        ] {
            assert!(equal(a, b) && equal(b, a), "{a} and {b}");
        }
    }

    #[test]
    fn numbers_that_are_close_are_not_equal() {
        for (a, b) in [
            ("0.667", "2/3"),
            ("0.6668", "2/3"),
            ("0.6665", "2/3"),
            ("0.0001", "1/7000"),
            ("0.12345", "0.1234"),
            ("0.1250", "0.12500001"),
            ("1.0000", "10000/10001"),
            ("-1", "1"),
            ("\\sqrt{2}", "\\sqrt{3}"),
        ] {
            assert!(!equal(a, b) && !equal(b, a), "{a} and {b}");
        }
    }

    #[test]
    fn what_is_no_number() {
        let deep = format!("{}1{}", "\\frac{".repeat(5000), "}{1}".repeat(5000));
        let long = "9".repeat(MAX_DIGITS + 1);
        for text in [
            "",
            "-",
            ".",
            "x",
            "1+2",
            "1,22",
            "1,2",
            "12,34,567",
            "1 2",
            "1/0",
            "\\frac{1}{0}",
            "2^{3}",
            "10^3",
            "4x",
            "\\sqrt{-1}",
            "\\sqrt[3]{8}",
            "\\frac{1}",
            "2\\frac{3}{2}",
            "1.5 1/2",
            "1e",
            "1e999999999",
            "--1",
            "1.2.3",
            "\\frac{1}{2}3",
            deep.as_str(),
            long.as_str(),
        ] {
            assert_eq!(Number::parse(text), None, "{text:.40}");
        }
    }

    #[test]
    fn units_are_kept_unless_they_change_the_value() {
        let unit = |text| with_unit(text).map(|(_, unit)| unit);
        assert_eq!(unit("5\\text{ Meters}"), Some(Some("meter".into())));
        assert_eq!(unit("5\\text{cm}^2"), Some(Some("cm".into())));
        assert_eq!(unit("5%"), Some(None));
        assert_eq!(unit("5\\text{ million}"), None);
        assert_eq!(unit("5\\text{ or }6"), None);
        assert_eq!(unit("\\text{five}"), None);
    }
}
