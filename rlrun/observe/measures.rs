//! The metrics of a step: what the trainer says of the policy, and how fast both sides were.
//!
//! Invariant: it computes from the inputs of a step and writes nothing.

use trainer::StepReport;
use trainer::rank_spans::RankPhase;
use trainer::report::ExpertLoads;

use super::{Observer, ObserverInputs};
use crate::metrics::Metrics;

/// Difference of idle shares from which one side counts as the bottleneck.
pub(super) const CLEAR: f64 = 0.1;

impl Observer<'_> {
    /// Rewards, losses and the state of the policy.
    pub(super) fn policy(&self, metrics: &mut Metrics, inputs: &ObserverInputs<'_>) {
        let StepReport { version, counts, sums, grad_norm, updates, learning_rate, batch, .. } = inputs.step;
        let groups = counts.groups.max(1) as f64;
        metrics.set("step", version.0 as f64);
        metrics.set("time_s", inputs.time_s);
        let scored = |value: f64| if batch.scored > 0 { value } else { f64::NAN };
        metrics.set("reward/mean", scored(batch.reward.mean));
        metrics.set("reward/std", scored(batch.reward.std));
        for (role, mean) in &batch.roles {
            metrics.set(&format!("reward/role/{role}"), *mean);
        }
        let filling = version.0 <= self.first.0 + self.recipe.buffer.max_staleness;
        metrics.set("buffer/filling", f64::from(filling));
        metrics.set("reward/frac_zero_std", counts.zero_variance as f64 / groups);
        if let Some(evaluation) = inputs.evaluation {
            evaluation.measure(metrics);
        }
        metrics.set("loss/mean", sums.loss);
        metrics.set("entropy/mean", sums.mean(sums.entropy));
        metrics.set("kl/mismatch", sums.mean_compared(sums.mismatch));
        metrics.set("logprob_abs_diff/mean", sums.mean_compared(sums.logprob_abs_diff));
        metrics.set("logprob_abs_diff/max", sums.logprob_abs_diff_max);
        metrics.set("is/mean", sums.mean_kept(sums.behavior_weight));
        metrics.set("is/max", sums.behavior_weight_max);
        metrics.set("is/ess", sums.effective_share());
        metrics.set("is/masked_frac", sums.mean_sampled(sums.masked as f64));
        metrics.set("clip/low_mean", sums.mean_sampled(sums.clipped_low as f64));
        metrics.set("clip/high_mean", sums.mean_sampled(sums.clipped_high as f64));
        self.algorithm(metrics, inputs.step);
        self.experts(metrics, &sums.experts);
        if counts.unjudged > 0 {
            metrics.set("reward/unjudged", counts.unjudged as f64);
        }
        metrics.set("optim/grad_norm", f64::from(*grad_norm));
        metrics.set("optim/lr", f64::from(*learning_rate));
        metrics.set("optim/updates", *updates as f64);
        metrics.set("prompts/mean_length", batch.prompt_length);
        metrics.set("completions/mean_length", batch.length.mean);
        metrics.set("completions/min_length", batch.length.min);
        metrics.set("completions/max_length", batch.length.max);
        metrics.set("completions/clipped_ratio", batch.clipped_ratio);
        metrics.set("staleness/mean", batch.staleness.mean);
        metrics.set("staleness/max", batch.staleness.max);
        metrics.set("staleness/p95", batch.staleness.p95);
        metrics.set("staleness/spans", batch.versions_per_sample);
        metrics.set("buffer/size", inputs.step.buffer_size as f64);
        metrics.set("buffer/dropped_stale", self.dropped_stale as f64);
    }

    /// Metrics of models with experts.
    fn experts(&self, metrics: &mut Metrics, loads: &ExpertLoads) {
        for (name, value) in [
            ("experts/load_cv", loads.variation()),
            ("experts/load_peak", loads.peak()),
            ("experts/replayed", loads.replayed()),
            ("experts/changed", loads.changed()),
        ] {
            if let Some(value) = value {
                metrics.set(name, value);
            }
        }
    }

    /// Metrics of single algorithms.
    fn algorithm(&self, metrics: &mut Metrics, step: &StepReport) {
        let StepReport { counts, sums, critic, .. } = step;
        let algorithm = self.recipe.algorithm();
        if self.recipe.algorithm.dual_clip.is_some() {
            metrics.set("clip/dual_mean", sums.mean_sampled(sums.clipped_dual as f64));
        }
        if algorithm.needs_reference() {
            metrics.set("kl/ref", sums.mean_sampled(sums.reference_kl));
        }
        if algorithm.demonstration_gate.is_some() {
            metrics.set("demonstrated_frac", counts.demonstrated as f64 / counts.groups.max(1) as f64);
        }
        if let Some(critic) = critic {
            metrics.set("critic/loss", critic.loss);
            metrics.set("critic/value", critic.value);
            metrics.set("critic/explained_variance", critic.explained_variance);
            metrics.set("critic/grad_norm", f64::from(critic.grad_norm));
        }
    }
}

/// Times, rates and idle shares, and which side limits the run.
pub(super) fn speed(metrics: &mut Metrics, inputs: &ObserverInputs<'_>) {
    let time = &inputs.step.time;
    let (before, after) = (inputs.sampler_before, inputs.sampler_after);
    let (busy, idle) = (after.busy_s - before.busy_s, after.idle_s - before.idle_s);
    let per_second = |count: u64, seconds: f64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
    let share = |part: f64, whole: f64| if whole > 0.0 { (part / whole).clamp(0.0, 1.0) } else { 0.0 };
    let sampled = after.engine.sampled_tokens.saturating_sub(before.engine.sampled_tokens);
    let worked = time.wait_for_batch
        + time.forward_backward
        + time.save_checkpoint
        + time.weight_sync
        + time.phase_switch
        + time.snapshot;
    let rollout_idle = share(idle, busy + idle);
    let trainer_idle = share(time.wait_for_batch, worked);
    let proposed = after.engine.proposed_tokens.saturating_sub(before.engine.proposed_tokens);
    let accepted = after.engine.accepted_tokens.saturating_sub(before.engine.accepted_tokens);
    let reused = after.engine.reused_tokens.saturating_sub(before.engine.reused_tokens);
    let evicted = after.engine.evicted_tokens.saturating_sub(before.engine.evicted_tokens);
    if reused + evicted > 0 {
        metrics.set("rollout/reused_tokens", reused as f64);
        metrics.set("rollout/evicted_tokens", evicted as f64);
    }
    if proposed > 0 {
        metrics.set("rollout/speculation_acceptance", accepted as f64 / proposed as f64);
    }
    metrics.set("rollout/tokens_per_s", per_second(sampled, busy));
    metrics.set("trainer/tokens_per_s", per_second(inputs.step.sums.tokens, time.forward_backward));
    metrics.set("rollout/idle_ratio", rollout_idle);
    metrics.set("trainer/idle_ratio", trainer_idle);
    if let Some(waiting) = rank_wait(inputs.step) {
        metrics.set("trainer/rank_wait_ratio", waiting);
    }
    metrics.set("rollout/lag", after.served.staleness_at(inputs.step.version) as f64);
    metrics.set("time/step", inputs.step_s);
    metrics.set("time/wait_for_batch", time.wait_for_batch);
    metrics.set("time/forward_backward", time.forward_backward);
    metrics.set("time/save_ckpt", time.save_checkpoint);
    metrics.set("time/wait_ckpt", time.wait_for_checkpoint);
    metrics.set("time/write_ckpt", time.write_checkpoint);
    metrics.set("time/weight_sync", time.weight_sync);
    metrics.set("time/decode_stall", after.stall_s - before.stall_s);
    if inputs.step.freed_bytes > 0 || after.freed_bytes > 0 {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        metrics.set("time/phase_switch", time.phase_switch + after.switch_s - before.switch_s);
        metrics.set("memory/freed_trainer_mib", mib(inputs.step.freed_bytes));
        metrics.set("memory/freed_sampler_mib", mib(after.freed_bytes));
    }
    metrics.bottleneck = if trainer_idle > rollout_idle + CLEAR {
        format!("sampling: the trainer waits {:.0} % of the time", 100.0 * trainer_idle)
    } else if rollout_idle > trainer_idle + CLEAR {
        format!("training: the sampler waits {:.0} % of the time", 100.0 * rollout_idle)
    } else {
        String::new()
    };
}

/// Share of the updates of a step that its ranks wait for each other, a mean over the ranks; `None` for a single rank.
fn rank_wait(step: &StepReport) -> Option<f64> {
    let seconds = |waits: bool| {
        let all = step.ranks.iter().flatten().filter(move |span| !waits || span.phase == RankPhase::Wait);
        all.map(|span| span.end - span.start).sum::<f64>()
    };
    (!step.ranks.is_empty()).then(|| if seconds(false) > 0.0 { seconds(true) / seconds(false) } else { 0.0 })
}
