//! Ranks that shard optimizer state, gradients and weights make the same step as one rank.

use model::{Parameters, Prediction, PredictionGradient, Recompute};
use trainer::learner::RowLoss;
use trainer::lora::{Adapter, LoraConfig, TargetModule};
use trainer::optimizer::{OptimizerConfig, OptimizerKind};
use trainer::report::TokenSums;
use trainer::supervised::DemonstrationLoss;
use trainer::{Learner, LearnerConfig, TrainerError};

use crate::{LEARNER, config, groups, learner, policy_step, samples, with_optimizer};

const WORLDS: [usize; 2] = [2, 3];
const STAGES: [usize; 3] = [1, 2, 3];

/// Settings under which an update is a smooth function of the gradient. Otherwise the first step of AdamW is the sign of each
/// gradient, and rounding near zero changes whole steps.
fn smooth(kind: OptimizerKind) -> LearnerConfig {
    let settings = with_optimizer(kind);
    LearnerConfig { optimizer: OptimizerConfig { eps: 1e-2, ..settings.optimizer }, ..settings }
}

/// Weights after each of some steps, norms of the gradients, and the report of the last step.
fn steps(mut learner: Learner) -> (Vec<Vec<f32>>, Vec<f32>, TokenSums) {
    let groups = groups();
    let (mut weights, mut norms) = (Vec::new(), Vec::new());
    let mut sums = TokenSums::default();
    for _ in 0..3 {
        let (norm, of_step) = policy_step(&mut learner, &groups, 1e-2);
        norms.push(norm);
        weights.push(learner.parameters().unwrap().values().to_vec());
        sums = of_step;
    }
    (weights, norms, sums)
}

/// Asserts that `ours` equals `theirs` up to rounding, relative to the magnitude of the values.
fn assert_same(ours: &[f32], theirs: &[f32], tolerance: f32, what: &str) {
    let norm = (theirs.iter().map(|x| x * x).sum::<f32>() / theirs.len() as f32).sqrt();
    let largest = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(largest <= tolerance * norm, "{what}: {largest} of {norm}");
}

#[test]
fn every_world_and_stage_makes_the_step_of_one_rank() {
    ranks_make_the_step_of_one(|kind, world, zero, microbatch_tokens| {
        kind == OptimizerKind::Adamw || (world, microbatch_tokens) == (3, 20) && zero != 2
    });
}

#[test]
#[ignore = "takes minutes; each optimizer with two stages is above"]
fn ranks_make_the_step_of_one_in_all_combinations() {
    ranks_make_the_step_of_one(|_, _, _, _| true);
}

/// For combinations of an optimizer, a number of ranks, a stage and tokens per micro-batch.
fn ranks_make_the_step_of_one(includes: impl Fn(OptimizerKind, usize, usize, usize) -> bool) {
    for kind in OptimizerKind::ALL {
        let (expected, norms, sums) = steps(learner(smooth(kind)));
        for world in WORLDS {
            for zero in STAGES {
                for microbatch_tokens in [20, 100_000] {
                    if !includes(kind, world, zero, microbatch_tokens) {
                        continue;
                    }
                    let settings = LearnerConfig { world, zero, microbatch_tokens, ..smooth(kind) };
                    let (values, other, reported) = steps(learner(settings));
                    let what = format!("{kind:?}, world {world}, stage {zero}, {microbatch_tokens} tokens");
                    assert_same(&values[0], &expected[0], 1e-6, &what);
                    assert_same(&other[..1], &norms[..1], 1e-6, &what);
                    // 8-bit moments round stochastically to 4 bits of mantissa.
                    let tolerance = if kind == OptimizerKind::Adamw8bit { 1e-3 } else { 1e-5 };
                    assert_same(&values[2], &expected[2], tolerance, &what);
                    assert_same(&other, &norms, tolerance, &what);
                    assert_eq!(reported.tokens, sums.tokens, "{what}");
                    assert!((reported.loss - sums.loss).abs() < 1e-4, "{what}");
                }
            }
        }
    }
}

#[test]
fn stages_give_the_same_bits() {
    stages_are_equal(|kind, world| kind == OptimizerKind::Adamw || world == 3);
}

#[test]
#[ignore = "takes minutes; each optimizer on three ranks is above"]
fn stages_give_the_same_bits_in_all_combinations() {
    stages_are_equal(|_, _| true);
}

/// For combinations of an optimizer and a number of ranks.
fn stages_are_equal(includes: impl Fn(OptimizerKind, usize) -> bool) {
    for kind in OptimizerKind::ALL {
        for (world, recompute) in [(2, Recompute::None), (3, Recompute::Block), (4, Recompute::Sequence)] {
            if !includes(kind, world) {
                continue;
            }
            let run = |zero, microbatch_tokens| {
                steps(learner(LearnerConfig { world, zero, microbatch_tokens, recompute, ..smooth(kind) }))
            };
            assert!(run(2, 20) == run(3, 20), "{kind:?}, world {world}: several micro-batches");
            let one = run(1, 100_000);
            assert!(one == run(2, 100_000) && one == run(3, 100_000), "{kind:?}, world {world}");
            assert!(one == run(1, 100_000), "{kind:?}, world {world}: the same step twice");
        }
    }
}

#[test]
fn worlds_that_are_powers_of_two_give_the_same_bits() {
    powers_of_two_are_equal(|kind, adapts, microbatch_tokens| {
        kind == OptimizerKind::Adamw || microbatch_tokens != 20 && (!adapts || kind == OptimizerKind::Dion)
    });
}

#[test]
#[ignore = "takes minutes; each optimizer with one size of micro-batches is above"]
fn worlds_that_are_powers_of_two_give_the_same_bits_in_all_combinations() {
    powers_of_two_are_equal(|_, _, _| true);
}

/// For combinations of an optimizer, whether it trains an adapter, and tokens per micro-batch: 20, 30 or many.
fn powers_of_two_are_equal(includes: impl Fn(OptimizerKind, bool, usize) -> bool) {
    for kind in OptimizerKind::ALL {
        for adapts in [false, true] {
            let run = |world, leaves, zero, microbatch_tokens| {
                let settings = LearnerConfig { world, leaves, zero, microbatch_tokens, ..smooth(kind) };
                let mut learner = if adapts { adapting(settings) } else { learner(settings) };
                let norms = [0, 1].map(|_| policy_step(&mut learner, &groups(), 1e-2));
                let weights = learner.parameters().unwrap();
                let weights: Vec<u32> = weights.values().iter().map(|value| value.to_bits()).collect();
                (norms, weights, learner.optimizer().unwrap().into_owned())
            };
            for microbatch_tokens in [20, 100_000] {
                if !includes(kind, adapts, microbatch_tokens) {
                    continue;
                }
                let expected = STAGES.map(|zero| run(1, 4, zero, microbatch_tokens));
                for (zero, expected) in STAGES.into_iter().zip(&expected) {
                    for world in [2, 4] {
                        let what =
                            format!("{kind:?}, {world} ranks, stage {zero}, {microbatch_tokens} tokens");
                        assert!(run(world, 4, zero, microbatch_tokens) == *expected, "{what}");
                    }
                }
                assert!(expected[1] == expected[2], "{kind:?}: gathered weights are those that are there");
                assert!(microbatch_tokens == 20 || expected[0] == expected[1], "{kind:?}: stages differ");
            }
            // There are at least as many leaves as ranks.
            let few = !includes(kind, adapts, 30);
            assert!(few || run(8, 1, 2, 30) == run(1, 8, 2, 30), "{kind:?}: 8 ranks");
        }
    }
}

fn adapting(settings: LearnerConfig) -> Learner {
    let base = Parameters::random(&config(), 5);
    let lora = LoraConfig { rank: 3, alpha: 6.0, target_modules: TargetModule::BLOCK.to_vec() };
    let mut adapter = Adapter::new(lora, &base, 1);
    for (i, value) in adapter.values_mut().iter_mut().enumerate() {
        *value += 0.05 * (i as f32 * 0.7).sin();
    }
    Learner::adapting(settings, config(), base, adapter, None).unwrap()
}

#[test]
fn adapters_are_sharded_like_weights() {
    for kind in OptimizerKind::ALL {
        let mut alone = adapting(smooth(kind));
        let groups = groups();
        let (norm, _) = policy_step(&mut alone, &groups, 1e-2);
        for world in WORLDS {
            for zero in STAGES {
                let mut shared =
                    adapting(LearnerConfig { world, zero, microbatch_tokens: 30, ..smooth(kind) });
                let (other, _) = policy_step(&mut shared, &groups, 1e-2);
                let what = format!("{kind:?}, world {world}, stage {zero}");
                assert_same(&[other], &[norm], 1e-5, &what);
                let (ours, theirs) = (shared.adapter().unwrap(), alone.adapter().unwrap());
                assert_same(ours.values(), theirs.values(), 1e-5, &what);
                let (ours, theirs) = (shared.parameters().unwrap(), alone.parameters().unwrap());
                assert_same(ours.values(), theirs.values(), 1e-5, &what);
            }
        }
    }
}

/// A loss without a gradient.
pub(crate) struct Flat;

impl RowLoss for Flat {
    type Report = ();

    fn row(&self, _: usize, predictions: &[Prediction], (): &mut ()) -> Vec<PredictionGradient> {
        vec![PredictionGradient::default(); predictions.len()]
    }
}

#[test]
fn a_zero_gradient_makes_no_update_on_any_rank() {
    let groups = groups();
    let rows = samples(&groups);
    for kind in OptimizerKind::ALL {
        for (world, zero) in [(1, 1), (2, 1), (2, 2), (4, 3)] {
            let settings = LearnerConfig { world, zero, ..with_optimizer(kind) };
            for mut learner in [learner(settings.clone()), adapting(settings)] {
                policy_step(&mut learner, &groups, 1e-2);
                let weights = learner.parameters().unwrap().as_ref().clone();
                let optimizer = learner.optimizer().unwrap().into_owned();
                let norm = learner.step(&rows, &Flat, 1e-2).unwrap().grad_norm;
                let what = format!("{kind:?}, world {world}, stage {zero}");
                assert_eq!((norm, learner.updates()), (0.0, 1), "{what}");
                assert_eq!(learner.parameters().unwrap().values(), weights.values(), "{what}");
                assert!(*learner.optimizer().unwrap() == optimizer, "{what}");
            }
        }
    }
}

#[test]
fn optimizer_shards_join_and_split_without_loss() {
    let groups = groups();
    for kind in OptimizerKind::ALL {
        for (before, after) in [(1, 4), (4, 1), (3, 2)] {
            let settings = |world, zero| LearnerConfig { world, zero, ..smooth(kind) };
            let mut learner = learner(settings(before, 3));
            policy_step(&mut learner, &groups, 1e-2);
            let (parameters, optimizer) =
                (learner.parameters().unwrap().as_ref().clone(), learner.optimizer().unwrap().into_owned());
            let resumed =
                Learner::new(settings(after, 2), config(), parameters.clone(), Some(optimizer.clone()))
                    .unwrap();
            assert_eq!(resumed.optimizer().unwrap().into_owned(), optimizer, "{kind:?}");
            assert_eq!(resumed.parameters().unwrap().values(), parameters.values(), "{kind:?}");
            assert_eq!(resumed.updates(), 1);
            let mut written = vec![0.0; parameters.values().len()];
            resumed.owned().unwrap().into_iter().for_each(|(range, own)| written[range].copy_from_slice(own));
            assert_eq!(written, parameters.values());
        }
    }
}

#[test]
fn scores_have_the_same_bits_in_every_stage() {
    let groups = groups();
    let rows = samples(&groups);
    let expected = learner(LEARNER).score(&rows).unwrap();
    for (world, zero) in [(2, 1), (3, 2), (3, 3), (4, 3)] {
        for microbatch_tokens in [20, 100_000] {
            let learner = learner(LearnerConfig { world, zero, microbatch_tokens, ..LEARNER });
            assert_eq!(learner.score(&rows).unwrap(), expected, "world {world}, stage {zero}");
        }
    }
}

/// A loss that is infinite or panics for one row.
struct Bad {
    row: usize,
    panics: bool,
}

impl RowLoss for Bad {
    type Report = ();

    fn row(&self, row: usize, predictions: &[Prediction], (): &mut ()) -> Vec<PredictionGradient> {
        assert!(!self.panics || row != self.row, "row {row} is bad");
        let logprob = if row == self.row { f32::INFINITY } else { 0.1 };
        vec![PredictionGradient { logprob, entropy: 0.0, value: 0.0 }; predictions.len()]
    }
}

#[test]
fn all_ranks_reject_a_non_finite_gradient_and_continue() {
    let groups = groups();
    let rows = samples(&groups);
    for zero in STAGES {
        let mut learner = learner(LearnerConfig { world: 3, zero, ..LEARNER });
        let before = learner.parameters().unwrap().as_ref().clone();
        let error = learner.step(&rows, &Bad { row: 7, panics: false }, 1e-3).unwrap_err();
        assert!(matches!(error, TrainerError::GradientNotFinite { update: 0, rows: 18 }), "{error}");
        assert_eq!(learner.parameters().unwrap().values(), before.values());
        learner.step(&rows, &DemonstrationLoss::over(&rows), 1e-3).unwrap();
        assert_ne!(learner.parameters().unwrap().values(), before.values());
    }
}

#[test]
fn a_panic_is_reported_with_its_rank_and_ends_the_others() {
    let groups = groups();
    let rows = samples(&groups);
    for zero in STAGES {
        let mut learner = learner(LearnerConfig { world: 3, zero, microbatch_tokens: 20, ..LEARNER });
        let error = learner.step(&rows, &Bad { row: 11, panics: true }, 1e-3).unwrap_err();
        assert!(matches!(error, TrainerError::Rank { world: 3, .. }), "{error}");
        let message = error.to_string();
        assert!(message.contains("row 11 is bad") && message.contains("of 3 failed"), "{message}");
        let error = learner.step(&rows, &DemonstrationLoss::over(&rows), 1e-3).unwrap_err();
        assert!(error.to_string().contains("ended after an earlier error"), "{error}");
    }
}
