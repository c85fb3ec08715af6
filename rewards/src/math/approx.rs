//! Complex numbers in f64, each with an error bound.
//!
//! Invariant: the exact value lies within `error` of the stated value. The bounds are of first order with a safety factor.
//! An operation that is undefined or has an unbounded error has no value.

/// Error of one rounding, with a margin for library functions with errors of a few units.
const EPSILON: f64 = 4.0 * f64::EPSILON;

/// A complex value with the radius of a disk that contains the exact value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Approx {
    pub(super) re: f64,
    pub(super) im: f64,
    pub(super) error: f64,
}

impl Approx {
    pub(super) fn exact(re: f64) -> Self {
        Self { re, im: 0.0, error: 0.0 }
    }

    /// A real value with the error of one rounding.
    pub(super) fn rounded(re: f64) -> Self {
        Self { re, im: 0.0, error: EPSILON * re.abs() }
    }

    pub(super) const I: Self = Self { re: 0.0, im: 1.0, error: 0.0 };

    pub(super) fn size(self) -> f64 {
        self.re.hypot(self.im)
    }

    pub(super) fn real(self) -> bool {
        self.im.abs() <= self.error
    }

    pub(super) fn finite(self) -> Option<Self> {
        (self.re.is_finite() && self.im.is_finite() && self.error.is_finite()).then_some(self)
    }

    fn new(re: f64, im: f64, error: f64) -> Self {
        Self { re, im, error: error + EPSILON * re.hypot(im) }
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self::new(self.re + other.re, self.im + other.im, self.error + other.error)
    }

    pub(super) fn negated(self) -> Self {
        Self { re: -self.re, im: -self.im, ..self }
    }

    pub(super) fn minus(self, other: Self) -> Self {
        self.plus(other.negated())
    }

    pub(super) fn times(self, other: Self) -> Self {
        let error = self.size() * other.error + other.size() * self.error + self.error * other.error;
        let (re, im) = (self.re * other.re - self.im * other.im, self.re * other.im + self.im * other.re);
        Self::new(re, im, error)
    }

    pub(super) fn over(self, other: Self) -> Option<Self> {
        let square = other.re * other.re + other.im * other.im;
        let size = other.size();
        if size <= 4.0 * other.error || square == 0.0 {
            return None;
        }
        let re = (self.re * other.re + self.im * other.im) / square;
        let im = (self.im * other.re - self.re * other.im) / square;
        let error = (self.error + re.hypot(im) * other.error) / (size - other.error);
        Self::new(re, im, error).finite()
    }

    pub(super) fn exp(self) -> Option<Self> {
        let size = self.re.exp();
        Self::new(size * self.im.cos(), size * self.im.sin(), size * (self.error + EPSILON * self.size()))
            .finite()
    }

    /// The principal logarithm.
    pub(super) fn ln(self) -> Option<Self> {
        let size = self.size();
        if size <= 4.0 * self.error || size == 0.0 {
            return None;
        }
        Self::new(size.ln(), self.im.atan2(self.re), self.error / (size - self.error) + EPSILON).finite()
    }

    pub(super) fn sine(self) -> Option<Self> {
        let (re, im) = (self.re.sin() * self.im.cosh(), self.re.cos() * self.im.sinh());
        Self::new(re, im, self.im.cosh() * (self.error + EPSILON * self.size())).finite()
    }

    pub(super) fn cosine(self) -> Option<Self> {
        let (re, im) = (self.re.cos() * self.im.cosh(), -self.re.sin() * self.im.sinh());
        Self::new(re, im, self.im.cosh() * (self.error + EPSILON * self.size())).finite()
    }

    /// A real function whose derivative at the point is bounded by `slope`.
    pub(super) fn through(self, function: impl Fn(f64) -> f64, slope: f64) -> Option<Self> {
        if !self.real() {
            return None;
        }
        let re = function(self.re);
        Self { re, im: 0.0, error: slope * self.error + EPSILON * re.abs() + f64::MIN_POSITIVE }.finite()
    }

    /// Repeated multiplication.
    pub(super) fn to_integer(self, exponent: u32) -> Option<Self> {
        let mut result = Self::exact(1.0);
        let mut base = self;
        let mut left = exponent;
        while left > 0 {
            if left & 1 == 1 {
                result = result.times(base);
            }
            base = base.times(base);
            left >>= 1;
        }
        result.finite()
    }

    pub(super) fn absolute(self) -> Self {
        Self::new(self.size(), 0.0, self.error)
    }

    /// The gamma function of a real number (Lanczos, g = 7, n = 9; relative error under 1e-13).
    pub(super) fn gamma(self) -> Option<Self> {
        const COEFFICIENTS: [f64; 9] = [
            0.999_999_999_999_809_9,
            676.520_368_121_885_1,
            -1_259.139_216_722_402_8,
            771.323_428_777_653_1,
            -176.615_029_162_140_6,
            12.507_343_278_686_905,
            -0.138_571_095_265_720_12,
            9.984_369_578_019_572e-6,
            1.505_632_735_149_311_6e-7,
        ];
        if !self.real() || self.re < 0.5 {
            return None;
        }
        let x = self.re - 1.0;
        let mut series = COEFFICIENTS[0];
        for (at, coefficient) in (1..9u8).zip(&COEFFICIENTS[1..]) {
            series += coefficient / (x + f64::from(at));
        }
        let t = x + 7.5;
        let re = (2.0 * std::f64::consts::PI).sqrt() * t.powf(x + 0.5) * (-t).exp() * series;
        Self { re, im: 0.0, error: re.abs() * (1e-12 + self.error * t.ln().abs()) }.finite()
    }
}
