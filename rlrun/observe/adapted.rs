//! Settings that follow what a run measures: the lead of samplers, their number, and the size of a micro-batch.

use serde_json::json;
use trainer::StepReport;

use super::Observer;
use crate::failure::Failure;
use crate::metrics::Metrics;

/// The limits of admission from now on, where they adapt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdmissionLimits {
    /// By how many versions samplers run ahead (`buffer.adapt_staleness`).
    pub ahead: Option<u64>,
    /// How many samplers get slots (`placement.adapt_samplers`).
    pub samplers: Option<u64>,
}

/// Records what adapts.
pub(super) fn measure(metrics: &mut Metrics, limits: AdmissionLimits, step: &StepReport) {
    limits.ahead.iter().for_each(|versions| metrics.set("buffer/ahead", *versions as f64));
    limits.samplers.iter().for_each(|samplers| metrics.set("rollout/active_samplers", *samplers as f64));
    if let Some(microbatch) = &step.microbatch {
        metrics.set("trainer/microbatch_tokens", microbatch.tokens as f64);
    }
}

impl Observer<'_> {
    /// Writes an event if another size of micro-batch is kept after the step.
    pub(super) fn microbatch_change(&mut self, step: &StepReport) -> Result<(), Failure> {
        let Some(change) = step.microbatch.as_ref().and_then(|microbatch| microbatch.change.as_ref()) else {
            return Ok(());
        };
        let measured =
            |(tokens, rate): &(usize, f64)| json!({ "microbatch_tokens": tokens, "tokens_per_s": rate });
        let fields = json!({
            "version": step.version,
            "microbatch_tokens_before": change.before,
            "microbatch_tokens": change.after,
            "measured": change.measured.iter().map(measured).collect::<Vec<_>>(),
        });
        self.event("microbatch", &fields)
    }
}
