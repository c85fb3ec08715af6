//! Time of a decode step, by the number of running sequences and the tokens that they attend to.
//!
//! Invariant: `T(n, k) = a(n) + b k`, with `a` linear between the points of a measured table and beyond its ends. So the time of `x`
//! steps of `n` sequences is a quadratic function of `x`, which is inverted without a search.

/// Time of a decode step.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodeCurve {
    /// Running sequences, ascending, and the time of their step without any context, seconds. At least one point.
    points: Vec<(f64, f64)>,
    /// Time for every token that is attended to, seconds.
    per_context_token_s: f64,
}

impl DecodeCurve {
    /// `T(n, k) = t0 + t1 n + t2 k`, each in seconds: of a step, of a sequence, of a token that it attends to.
    #[must_use]
    pub fn linear([t0, t1, t2]: [f64; 3]) -> Self {
        Self { points: vec![(0.0, t0), (1.0, t0 + t1)], per_context_token_s: t2 }
    }

    /// A measured table: `[points]` pairs of running sequences and seconds of a step, for contexts of `context` tokens each, of which
    /// every token takes `per_context_token_s`, or less if contexts would take more than half of a step. `None` without a point, or with
    /// a number that is no time.
    #[must_use]
    pub fn measured(points: &[(f64, f64)], context: f64, per_context_token_s: f64) -> Option<Self> {
        let good = |&(sequences, seconds): &(f64, f64)| {
            sequences.is_finite() && sequences >= 0.0 && seconds.is_finite() && seconds > 0.0
        };
        if points.is_empty() || !points.iter().all(good) || !per_context_token_s.is_finite() {
            return None;
        }
        // A step that is faster than its context would take has read that from a cache.
        let read = points.iter().map(|(sequences, seconds)| seconds / 2.0 / (sequences * context));
        let per_context_token_s =
            read.filter(|seconds| seconds.is_finite()).fold(per_context_token_s.max(0.0), f64::min);
        let free = |&(sequences, seconds): &(f64, f64)| {
            (sequences, seconds - per_context_token_s * sequences * context)
        };
        let mut points: Vec<(f64, f64)> = points.iter().map(free).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        points.dedup_by(|later, earlier| later.0 == earlier.0);
        // More sequences never take less time.
        for index in 1..points.len() {
            points[index].1 = points[index].1.max(points[index - 1].1);
        }
        Some(Self { points, per_context_token_s })
    }

    /// The same curve with every time multiplied.
    #[must_use]
    pub fn times(&self, factor: f64) -> Self {
        Self {
            points: self.points.iter().map(|&(n, seconds)| (n, seconds * factor)).collect(),
            per_context_token_s: self.per_context_token_s * factor,
        }
    }

    /// The same curve with `[of a step, of a sequence]` seconds more.
    #[must_use]
    pub fn plus(&self, [step_s, sequence_s]: [f64; 2]) -> Self {
        let points = self.points.iter().map(|&(n, seconds)| (n, seconds + step_s + sequence_s * n));
        Self { points: points.collect(), per_context_token_s: self.per_context_token_s }
    }

    /// Seconds of a step of `sequences`, which attend to `context` tokens together.
    #[must_use]
    pub fn step_s(&self, sequences: f64, context: f64) -> f64 {
        self.without_context(sequences) + self.per_context_token_s * context
    }

    /// Seconds of `steps` steps of `sequences`, which at first attend to `context` tokens together.
    #[must_use]
    pub fn seconds(&self, sequences: f64, context: f64, steps: f64) -> f64 {
        steps * self.step_s(sequences, context) + self.per_context_token_s * sequences * steps * steps / 2.0
    }

    /// Steps that `sequences` make in `seconds`; the inverse of [`Self::seconds`].
    #[must_use]
    pub fn steps(&self, sequences: f64, context: f64, seconds: f64) -> f64 {
        let first = self.step_s(sequences, context);
        let grows = self.per_context_token_s * sequences;
        2.0 * seconds / (first + libm::sqrt(first * first + 2.0 * grows * seconds))
    }

    fn without_context(&self, sequences: f64) -> f64 {
        let after = self.points.partition_point(|point| point.0 <= sequences);
        let (left, right) = match self.points.len() {
            1 => return self.points[0].1,
            length if after >= length => (length - 2, length - 1),
            _ => (after.max(1) - 1, after.max(1)),
        };
        let [(n0, s0), (n1, s1)] = [self.points[left], self.points[right]];
        // Below the first point a step is not faster than the line through the first two says, nor than half of the first.
        (s0 + (s1 - s0) * (sequences - n0) / (n1 - n0)).max(self.points[0].1 / 2.0)
    }

    /// Whether every step takes some time.
    pub(crate) fn is_usable(&self) -> bool {
        self.points.iter().all(|point| point.1.is_finite() && point.1 > 0.0)
            && self.per_context_token_s.is_finite()
            && self.per_context_token_s >= 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_added_counts_for_every_step_and_sequence() {
        let curve = DecodeCurve::linear([0.01, 1e-4, 1e-6]).plus([0.002, 3e-4]);
        assert!((curve.step_s(10.0, 1000.0) - (0.012 + 4e-3 + 1e-3)).abs() < 1e-12);
    }

    #[test]
    fn steps_are_the_inverse_of_seconds() {
        let curve = DecodeCurve::linear([0.01, 1e-4, 1e-8]);
        for (sequences, context, steps) in [(1.0, 0.0, 1.0), (64.0, 1e5, 3000.0), (512.0, 3e6, 0.25)] {
            let seconds = curve.seconds(sequences, context, steps);
            assert!((curve.steps(sequences, context, seconds) / steps - 1.0).abs() < 1e-9);
            // The sum over single steps, up to the half step by which a sum is before its integral.
            let single: f64 = (0..steps as u32)
                .map(|step| curve.step_s(sequences, context + f64::from(step) * sequences))
                .sum();
            assert!(steps < 1.0 || (seconds / single - 1.0).abs() < 1e-3, "{seconds} {single}");
        }
    }

    #[test]
    fn a_table_is_interpolated_and_has_its_points() {
        let table = [(1.0, 0.001), (32.0, 0.002), (256.0, 0.006)];
        let curve = DecodeCurve::measured(&table, 100.0, 1e-8).unwrap();
        let cached = DecodeCurve::measured(&table, 100.0, 1e-3).unwrap();
        for (n, seconds) in table {
            assert!((curve.step_s(n, 100.0 * n) - seconds).abs() < 1e-12);
            assert!((cached.step_s(n, 100.0 * n) - seconds).abs() < 1e-12, "of contexts that take too long");
        }
        let middle = curve.step_s(144.0, 14400.0);
        assert!((middle - 0.004).abs() < 1e-6, "{middle}");
        assert!((curve.step_s(480.0, 48000.0) - 0.010).abs() < 1e-6, "the last two points continue");
        assert!(curve.step_s(0.5, 0.0) > 0.0);
        assert_eq!(DecodeCurve::measured(&[], 1.0, 0.0), None);
        assert_eq!(DecodeCurve::measured(&[(1.0, f64::NAN)], 1.0, 0.0), None);
        let falls = DecodeCurve::measured(&[(1.0, 0.002), (2.0, 0.001)], 0.0, 0.0).unwrap();
        assert_eq!(falls.step_s(2.0, 0.0), 0.002, "noise does not make more sequences faster");
    }
}
