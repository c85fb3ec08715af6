//! Statistics of accuracies: pass@k and confidence intervals.
//!
//! Invariant: tasks are the unit: several answers to one task are one draw of a task, never independent evidence.

/// 97.5 % quantile of the standard normal distribution: a two-sided interval of 95 %.
const Z: f64 = 1.959_963_984_540_054;

/// Unbiased estimate of the probability that at least one of `k` answers is correct, from `correct` of `samples`:
/// `1 - C(n - c, k) / C(n, k)` (Codex, arXiv 2107.03374).
#[must_use]
pub fn pass_at_k(samples: usize, correct: usize, k: usize) -> f64 {
    if samples < correct + k {
        return 1.0;
    }
    1.0 - (samples - correct + 1..=samples).map(|i| 1.0 - k as f64 / i as f64).product::<f64>()
}

/// Powers of two from 1 up to `samples`.
pub fn powers_of_two(samples: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1usize), |k| k.checked_mul(2)).take_while(move |k| *k <= samples)
}

/// 95 % interval of the accuracy, given `[tasks]` shares of correct answers among `samples` each; (0, 1) without a task.
///
/// Wilson's interval of a binomial share, over the effective number of answers: as many independent answers as would have
/// the variance that the shares of the tasks have (cluster-robust, tasks as clusters). With one answer per task that is the
/// number of tasks; it is never more than the number of answers.
#[must_use]
pub fn interval(shares: &[f64], samples: usize) -> (f64, f64) {
    let tasks = shares.len() as f64;
    if shares.is_empty() {
        return (0.0, 1.0);
    }
    let mean = shares.iter().sum::<f64>() / tasks;
    let squares: f64 = shares.iter().map(|share| (share - mean).powi(2)).sum();
    let variance = squares / (tasks - 1.0) / tasks;
    let binomial = mean * (1.0 - mean);
    // Shares that are all 0 or all 1, or a single task, say nothing of how tasks vary.
    let known = samples > 1 && shares.len() > 1 && binomial > 0.0;
    let effective = if known { (binomial / variance).min(tasks * samples as f64) } else { tasks };
    wilson(mean, effective)
}

/// Wilson's interval (1927) of a share among `n` independent draws.
fn wilson(share: f64, n: f64) -> (f64, f64) {
    let z = Z * Z / n;
    let middle = (share + z / 2.0) / (1.0 + z);
    let half = Z / (1.0 + z) * (share * (1.0 - share) / n + z / (4.0 * n)).sqrt();
    ((middle - half).max(0.0), (middle + half).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(ours: f64, expected: f64) {
        assert!((ours - expected).abs() < 1e-6, "{ours} {expected}");
    }

    /// `1 - math.comb(n - c, k) / math.comb(n, k)` in Python.
    #[test]
    fn pass_at_k_is_the_share_of_subsets_with_a_correct_answer() {
        for (n, c, k, expected) in [
            (8, 0, 4, 0.0),
            (8, 1, 1, 0.125),
            (8, 1, 8, 1.0),
            (8, 2, 4, 0.785_714),
            (10, 3, 2, 0.533_333),
            (64, 5, 32, 0.973_588),
            (4, 4, 1, 1.0),
        ] {
            close(pass_at_k(n, c, k), expected);
        }
        assert_eq!(powers_of_two(12).collect::<Vec<_>>(), [1, 2, 4, 8]);
        assert_eq!(powers_of_two(1).collect::<Vec<_>>(), [1]);
    }

    /// `statsmodels.stats.proportion.proportion_confint(c, n, method="wilson")`.
    #[test]
    fn one_answer_per_task_has_the_interval_of_wilson() {
        let shares = |correct: usize, tasks: usize| -> Vec<f64> {
            (0..tasks).map(|i| f64::from(u8::from(i < correct))).collect()
        };
        for (correct, tasks, expected) in [
            (73, 200, (0.301_405, 0.433_683)),
            (0, 20, (0.0, 0.161_125)),
            (20, 20, (0.838_875, 1.0)),
            (1, 1, (0.206_549, 1.0)),
        ] {
            let ours = interval(&shares(correct, tasks), 1);
            close(ours.0, expected.0);
            close(ours.1, expected.1);
        }
        assert_eq!(interval(&[], 1), (0.0, 1.0));
    }

    #[test]
    fn answers_to_one_task_are_no_independent_evidence() {
        // Every task all right or all wrong: as uncertain as one answer each, but for the variance of a sample.
        let clustered: Vec<f64> = (0..100).map(|i| f64::from(u8::from(i < 50))).collect();
        let (once, many) = (interval(&clustered, 1), interval(&clustered, 16));
        assert!(many.1 - many.0 >= once.1 - once.0 && many.1 - many.0 < 1.02 * (once.1 - once.0));
        // Every task half right: no more certain than so many independent answers.
        let (low, high) = interval(&[0.5; 100], 16);
        let independent = wilson(0.5, 1600.0);
        assert_eq!((low, high), independent);
        // One task says no more than one task.
        assert_eq!(interval(&[0.75], 16), wilson(0.75, 1.0));
    }
}
