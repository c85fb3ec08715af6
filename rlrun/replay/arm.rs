//! How far an arm may leave the policies that sampled its batches.
//!
//! Invariant: what is compared with the bounds is what `metrics.jsonl` has of the step, for the arm and for the recorded run.

use crate::schedule::StepNumbers;

/// The bounds of an arm that trains on trajectories of other policies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ArmBounds {
    /// How much the KL divergence from the policies that sampled a batch, at the start of a step, may exceed that of the recorded
    /// run in the same step, nats per token (`kl/mismatch`).
    pub(crate) max_kl: f64,
    /// Smallest effective share of the tokens of a batch (`is/ess`), unless that of the recorded run is smaller.
    pub(crate) min_ess: f64,
    /// Whether the arm goes on once one is crossed.
    pub(crate) keep_going: bool,
}

impl ArmBounds {
    /// The bound that a step with the numbers `made` crosses, with its value; `recorded` are those of the same step of the recorded
    /// run. What is not a number crosses both.
    pub(crate) fn crossed(&self, made: &StepNumbers, recorded: &StepNumbers) -> Option<String> {
        let Self { max_kl, min_ess, .. } = self;
        let StepNumbers { kl, ess, .. } = made;
        let is_near = kl - recorded.kl <= *max_kl;
        if !is_near {
            return Some(format!(
                "the KL divergence of the arm from the policies that sampled the batch is {kl:.4} nats per token, more than \
                 --max-kl {max_kl} above the {:.4} of the recorded run",
                recorded.kl
            ));
        }
        let is_effective = *ess >= min_ess.min(recorded.ess);
        (!is_effective).then(|| {
            format!(
                "the effective share of the batch's tokens is {ess:.3}, below --min-ess {min_ess} and the {:.3} of the recorded run",
                recorded.ess
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arm_crosses_a_bound_beside_the_recorded_run() {
        let bounds = ArmBounds { max_kl: 0.05, min_ess: 0.5, keep_going: false };
        let numbers = |kl, ess| StepNumbers { kl, ess, ..StepNumbers::default() };
        let recorded = numbers(0.1, 0.4);
        for (kl, ess, crossed) in [
            (0.12, 0.4, None),
            (0.12, 0.39, Some("--min-ess")),
            (0.2, 1.0, Some("--max-kl")),
            (f64::NAN, 1.0, Some("--max-kl")),
            (0.1, f64::NAN, Some("--min-ess")),
        ] {
            let reason = bounds.crossed(&numbers(kl, ess), &recorded);
            match (&reason, crossed) {
                (None, None) => {}
                (Some(reason), Some(bound)) => assert!(reason.contains(bound), "{reason}"),
                _ => panic!("{kl} {ess}: {reason:?}"),
            }
        }
    }
}
