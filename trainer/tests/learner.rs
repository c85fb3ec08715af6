//! Gradients and updates do not depend on micro-batches and world size.

use model::{Prediction, PredictionGradient};
use trainer::learner::RowLoss;
use trainer::report::TokenSums;
use trainer::supervised::DemonstrationLoss;
use trainer::{Learner, LearnerConfig, TrainerError};

use crate::{LEARNER, eight_bit, group, groups, learner, policy_step, samples};

/// One step on all groups; the weights after it and the sums.
fn step(settings: LearnerConfig) -> (Vec<f32>, TokenSums) {
    let mut learner = learner(settings);
    let (_, sums) = policy_step(&mut learner, &groups(), 1e-2);
    (learner.into_parameters().unwrap().into_values(), sums)
}

#[test]
fn world_sizes_and_micro_batches_give_the_same_step() {
    let (expected, sums) = step(LEARNER);
    let start = learner(LEARNER).into_parameters().unwrap().into_values();
    let moved: f32 = expected.iter().zip(&start).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(moved > 5e-3, "the step moves weights: {moved}");
    for world in [1, 2, 4] {
        for microbatch_tokens in [1, 40, 100_000] {
            let (values, other) = step(LearnerConfig { world, microbatch_tokens, ..LEARNER });
            // Adam's first step is the sign of the gradient: where that is rounding noise, a weight may go either way.
            let differ = values
                .iter()
                .zip(&expected)
                .filter(|(a, b)| (*a - *b).abs() > 1e-6 * moved.max(b.abs()))
                .count();
            assert!(
                differ < values.len() / 500,
                "world {world}: {differ} of {} weights differ",
                values.len()
            );
            assert_eq!((other.tokens, other.clipped_low), (sums.tokens, sums.clipped_low));
            assert!((other.loss - sums.loss).abs() < 1e-6);
        }
    }
    assert_eq!(step(LEARNER).0, expected, "the same step twice gives the same bits");
}

#[test]
fn on_policy_sampler_and_trainer_agree_exactly() {
    let (_, sums) = step(LEARNER);
    assert_eq!((sums.logprob_abs_diff_max, sums.mismatch), (0.0, 0.0));
    assert_eq!(sums.effective_share(), 1.0);
}

#[test]
fn off_policy_tokens_are_reported_and_weighted() {
    let (_, sums) = policy_step(&mut learner(LEARNER), &[group(0, &[1.0, 0.0], -0.3)], 1e-3);
    let mean = sums.mean(sums.behavior_weight);
    assert!((mean - 0.3_f64.exp()).abs() < 1e-4, "{mean}");
    assert!((sums.logprob_abs_diff_max - 0.3).abs() < 1e-4);
}

/// A loss whose derivative overflows.
struct Infinite;

impl RowLoss for Infinite {
    type Report = ();

    fn row(&self, _: usize, predictions: &[Prediction], (): &mut ()) -> Vec<PredictionGradient> {
        predictions
            .iter()
            .map(|_| PredictionGradient { logprob: f32::INFINITY, entropy: 0.0, value: 0.0 })
            .collect()
    }
}

#[test]
fn a_non_finite_gradient_changes_no_weight() {
    let groups = groups();
    let mut learner: Learner = learner(LEARNER);
    let before = learner.parameters().unwrap().values().to_vec();
    let error = learner.step(&samples(&groups), &Infinite, 1e-3).unwrap_err();
    assert!(matches!(error, TrainerError::GradientNotFinite { update: 0, rows: 18 }), "{error}");
    assert_eq!(learner.parameters().unwrap().values(), before);
}

#[test]
fn scores_are_in_the_order_of_the_rows() {
    let groups = groups();
    let rows = samples(&groups);
    let scored = learner(LearnerConfig { world: 3, microbatch_tokens: 20, ..LEARNER }).score(&rows).unwrap();
    for (row, predictions) in rows.iter().zip(scored) {
        let behavior: Vec<f32> = row.behavior_logprobs()[2..].to_vec();
        assert_eq!(predictions.iter().map(|p| p.logprob).collect::<Vec<_>>(), behavior);
    }
}

#[test]
fn moments_in_8_bits_learn_like_f32() {
    let groups = groups();
    let rows = samples(&groups);
    let losses = |settings: LearnerConfig| {
        let mut learner = learner(settings);
        let mut step = |_| {
            let step = learner.step(&rows, &DemonstrationLoss::over(&rows), 3e-3).unwrap();
            step.reports.iter().sum()
        };
        (0..60).map(&mut step).collect::<Vec<f64>>()
    };
    let (full, coded) = (losses(LEARNER), losses(eight_bit()));
    assert!(full[59] < 0.3 * full[0], "from {} to {}", full[0], full[59]);
    assert_ne!(full, coded);
    for (step, (full, coded)) in full.iter().zip(&coded).enumerate() {
        assert!((full - coded).abs() < 0.03 * full + 0.01, "step {step}: {coded} in 8 bits, {full} in f32");
    }
}
