//! How far an arm may leave the policies that sampled its batches.
//!
//! Invariant: what is compared with the bounds is what `metrics.jsonl` has of the step, for the arm and for the recorded run.

use trainer::StepReport;

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
    /// The bound that `step` crosses, with its value; `recorded` are the numbers of the same step of the recorded run.
    pub(crate) fn crossed(&self, step: &StepReport, recorded: &StepNumbers) -> Option<String> {
        let sums = &step.sums;
        let (kl, ess) = (sums.mean_compared(sums.mismatch), sums.effective_share());
        let Self { max_kl, min_ess, .. } = self;
        if kl - recorded.kl > *max_kl {
            return Some(format!(
                "the KL divergence of the arm from the policies that sampled the batch is {kl:.4} nats per token, more than \
                 --max-kl {max_kl} above the {:.4} of the recorded run",
                recorded.kl
            ));
        }
        (ess < min_ess.min(recorded.ess)).then(|| {
            format!(
                "the effective share of the batch's tokens is {ess:.3}, below --min-ess {min_ess} and the {:.3} of the recorded run",
                recorded.ess
            )
        })
    }
}
