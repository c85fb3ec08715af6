//! Lengths of completions, in tokens.
//!
//! Invariant: every length is at least 1 token; those of one group are drawn from its own difficulty, the same for a group that is
//! sampled again.

use crate::draws::{DrawPurpose, Draws};

/// A distribution of the lengths of completions.
#[derive(Clone, Debug, PartialEq)]
pub enum LengthModel {
    /// Lengths that were seen, tokens; every completion draws one of them. At least one.
    Empirical(Vec<f64>),
    /// Log-normal, and cut at a cap as a sampler does. The logarithm is that of the prompt, whose deviation over prompts is
    /// `between`, and a deviation `within` its group.
    LogNormal {
        /// Median, tokens.
        median: f64,
        /// Standard deviation of the logarithm over prompts.
        between: f64,
        /// Standard deviation of the logarithm within a group.
        within: f64,
        /// Longest completion, tokens.
        cap: f64,
    },
}

impl LengthModel {
    /// All completions have this number of tokens.
    #[must_use]
    pub fn constant(tokens: f64) -> Self {
        Self::Empirical(vec![tokens])
    }

    /// A log-normal whose mean after the cut at `cap` is `mean` (both tokens), with the deviation `sigma` of the logarithm, of whose
    /// square the share `shared` is that of prompts. A mean at or above the cap gives completions that all reach the cap.
    #[must_use]
    pub fn with_mean(mean: f64, cap: f64, sigma: f64, shared: f64) -> Self {
        if mean >= cap || sigma <= 0.0 {
            return Self::constant(mean.min(cap).max(1.0));
        }
        // The mean after the cut rises with the median, up to the cap.
        let (mut low, mut high) =
            (libm::log(mean) - 4.0 * sigma * sigma - 1.0, libm::log(cap) + 40.0 * sigma);
        for _ in 0..200 {
            let middle = f64::midpoint(low, high);
            if mean_of_cut(middle, sigma, cap) < mean { low = middle } else { high = middle }
        }
        let shared = shared.clamp(0.0, 1.0);
        let (between, within) = (sigma * libm::sqrt(shared), sigma * libm::sqrt(1.0 - shared));
        Self::LogNormal { median: libm::exp(low), between, within, cap }
    }

    /// A log-normal from what a run reports: the mean of its completions, the longest of `count` of them on average, and the cap, all
    /// tokens. A longest completion at the cap gives the least deviation that reaches it.
    #[must_use]
    pub fn from_longest([mean, longest, cap]: [f64; 3], count: f64, shared: f64) -> Self {
        // Expected largest of `count` normal numbers (Cramer 1946).
        let root = libm::sqrt(2.0 * libm::log(count.max(3.0)));
        let largest =
            root - (libm::log(root * root / 2.0) + libm::log(4.0 * std::f64::consts::PI)) / (2.0 * root);
        let (mut low, mut high) = (1e-3, largest.min(2.5));
        for _ in 0..60 {
            let sigma = f64::midpoint(low, high);
            let reached = match Self::with_mean(mean, cap, sigma, shared) {
                Self::LogNormal { median, .. } => median * libm::exp(sigma * largest),
                Self::Empirical(_) => cap,
            };
            if reached < longest.min(cap) { low = sigma } else { high = sigma }
        }
        Self::with_mean(mean, cap, high, shared)
    }

    /// Mean, tokens.
    #[must_use]
    pub fn mean(&self) -> f64 {
        match self {
            Self::Empirical(lengths) => lengths.iter().sum::<f64>() / lengths.len().max(1) as f64,
            Self::LogNormal { median, between, within, cap } => {
                mean_of_cut(libm::log(*median), libm::sqrt(between * between + within * within), *cap)
            }
        }
    }

    /// Longest completion that can be drawn, tokens.
    #[must_use]
    pub fn longest(&self) -> f64 {
        match self {
            Self::Empirical(lengths) => lengths.iter().copied().fold(1.0, f64::max),
            Self::LogNormal { cap, .. } => *cap,
        }
    }

    /// The lengths of the `size` completions of a group.
    pub(crate) fn draw(&self, seed: u64, group: u64, size: usize) -> Vec<f64> {
        let mut draws = Draws::new(seed, DrawPurpose::Lengths, group);
        match self {
            Self::Empirical(lengths) => {
                (0..size).map(|_| lengths[draws.below(lengths.len())].max(1.0)).collect()
            }
            Self::LogNormal { median, between, within, cap } => {
                let prompt = libm::log(*median) + between * draws.normal();
                (0..size)
                    .map(|_| libm::exp(prompt + within * draws.normal()).min(*cap).max(1.0).round())
                    .collect()
            }
        }
    }

    /// Why it cannot be drawn from, if it cannot.
    pub(crate) fn unusable(&self) -> Option<String> {
        match self {
            Self::Empirical(lengths) if lengths.is_empty() => Some("no length is given".to_owned()),
            Self::Empirical(lengths) => {
                let bad = lengths.iter().find(|length| !length.is_finite() || **length < 1.0)?;
                Some(format!("a length is {bad}, and must be a number of tokens, 1 or more"))
            }
            Self::LogNormal { median, between, within, cap } => {
                let good = median.is_finite() && *median > 0.0 && cap.is_finite() && *cap >= 1.0;
                let spread = [between, within].iter().all(|sigma| sigma.is_finite() && **sigma >= 0.0);
                (!good || !spread).then(|| {
                    format!("median {median}, cap {cap} and deviations {between}, {within} must be positive numbers")
                })
            }
        }
    }
}

/// Mean of a log-normal with the median `exp(mu)` that is cut at `cap`: E[min(X, cap)].
fn mean_of_cut(mu: f64, sigma: f64, cap: f64) -> f64 {
    if sigma <= 0.0 {
        return libm::exp(mu).min(cap);
    }
    let below = (libm::log(cap) - mu) / sigma;
    let whole = libm::exp(mu + sigma * sigma / 2.0);
    whole * normal_below(below - sigma) + cap * (1.0 - normal_below(below))
}

/// Standard normal distribution function.
fn normal_below(x: f64) -> f64 {
    0.5 * libm::erfc(-x / std::f64::consts::SQRT_2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_log_normal_has_the_mean_that_was_asked_for() {
        for (mean, cap, sigma) in [(3203.0, 4096.0, 0.5), (9500.0, 27648.0, 0.6), (50.0, 480.0, 0.8)] {
            let model = LengthModel::with_mean(mean, cap, sigma, 0.5);
            assert!((model.mean() / mean - 1.0).abs() < 1e-6, "{model:?}");
            let drawn: Vec<f64> = (0..4000).flat_map(|group| model.draw(1, group, 8)).collect();
            let seen = drawn.iter().sum::<f64>() / drawn.len() as f64;
            assert!((seen / mean - 1.0).abs() < 0.03, "{seen} of {mean}");
            assert!(drawn.iter().all(|length| (1.0..=cap).contains(length)));
        }
        assert_eq!(LengthModel::with_mean(900.0, 512.0, 0.5, 0.5), LengthModel::constant(512.0));
    }

    #[test]
    fn the_spread_follows_from_the_longest_of_many() {
        for sigma in [0.3, 0.8] {
            let model = LengthModel::with_mean(60.0, 1e6, sigma, 0.5);
            let longest = |batch: u64| {
                let lengths = (batch * 32..batch * 32 + 32).flat_map(|group| model.draw(5, group, 8));
                lengths.fold(0.0, f64::max)
            };
            let longest = (0..40).map(longest).sum::<f64>() / 40.0;
            let found = LengthModel::from_longest([60.0, longest, 1e6], 256.0, 0.5);
            let LengthModel::LogNormal { between, within, .. } = found else { panic!("{found:?}") };
            let found = (between * between + within * within).sqrt();
            assert!((found / sigma - 1.0).abs() < 0.15, "{found} instead of {sigma}");
        }
    }

    #[test]
    fn completions_of_a_group_resemble_each_other() {
        let spread = |shared: f64| {
            let model = LengthModel::with_mean(500.0, 1e9, 0.8, shared);
            let of_group = |group| {
                let lengths = model.draw(3, group, 16);
                let logs: Vec<f64> = lengths.iter().map(|length| length.ln()).collect();
                let mean = logs.iter().sum::<f64>() / 16.0;
                logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>() / 15.0
            };
            (0..500).map(of_group).sum::<f64>() / 500.0
        };
        // The variance within a group is the share that prompts do not have.
        assert!((spread(0.75) - 0.16).abs() < 0.02 && (spread(0.0) - 0.64).abs() < 0.04);
        let model = LengthModel::with_mean(500.0, 4096.0, 0.8, 0.5);
        assert_eq!(model.draw(3, 9, 4), model.draw(3, 9, 4), "a group that is sampled again has its lengths");
        assert_ne!(model.draw(3, 9, 4), model.draw(4, 9, 4));
    }
}
