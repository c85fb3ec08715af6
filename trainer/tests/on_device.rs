//! Ranks on a device make the steps of ranks on the processor. The device is the emulator, which runs the kernels' source.

mod experts;
mod optimizer;
mod ranks;

use std::sync::Arc;

use device::DeviceError;
use device::device::DeviceLocation;
use model::on_device::DeviceDtype;
use model::{
    Config, Head, Layout, MemoryBudget, ModelDirectory, Parameters, Prediction, PredictionGradient,
    Recompute, ResidentParameters,
};
use trainer::learner::RowLoss;
use trainer::optimizer::{Optimizer, OptimizerConfig, OptimizerKind};
use trainer::report::TokenSums;
use trainer::supervised::DemonstrationLoss;
use trainer::{
    CollectivePlace, DeviceConfig, Frozen, FrozenPlace, Learner, LearnerConfig, OptimizerPlace, TrainerError,
};
use trajectory::Group;

use crate::{LEARNER, config, group, learner, policy_step, samples, with_optimizer};

/// Settings under which an update is a smooth function of the gradient, on the processor.
fn smooth(kind: OptimizerKind) -> LearnerConfig {
    let settings = with_optimizer(kind);
    let optimizer = OptimizerConfig { eps: 1e-2, ..settings.optimizer };
    LearnerConfig { optimizer, microbatch_tokens: 30, ..settings }
}

/// The same on a device.
fn on_device(dtype: DeviceDtype) -> LearnerConfig {
    placed(dtype, OptimizerPlace::Device, &smooth(OptimizerKind::Adamw))
}

fn placed(dtype: DeviceDtype, optimizer: OptimizerPlace, settings: &LearnerConfig) -> LearnerConfig {
    let place = DeviceLocation::of_tests();
    let places = vec![place; 4].into(); // All ranks share it.
    let device = DeviceConfig { optimizer, places, ..DeviceConfig::new(place, dtype) };
    LearnerConfig { device: Some(device), ..settings.clone() }
}

/// Ranks that exchange through the host, or from device to device. Those need a GPU each, or the emulator.
fn exchanging(collective: CollectivePlace, settings: LearnerConfig) -> LearnerConfig {
    let device = settings.device.map(|device| match collective {
        CollectivePlace::Device => {
            let optimizer = device.optimizer;
            DeviceConfig {
                optimizer,
                collective,
                ..DeviceConfig::new(DeviceLocation::Emulated, device.dtype)
            }
        }
        _ => DeviceConfig { collective, ..device },
    });
    LearnerConfig { device, ..settings }
}

/// Few and short rows, because the emulator is slow.
fn batch() -> Vec<Arc<Group>> {
    vec![group(0, &[1.0, 0.0], 0.0), group(5, &[0.2, 0.9, 0.1], 0.0)]
}

fn values(learner: &Learner) -> Vec<f32> {
    learner.parameters().unwrap().values().to_vec()
}

/// Weights after each of some steps, norms of the gradients, and the report of the last step.
fn steps(mut learner: Learner, steps: usize) -> (Vec<Vec<f32>>, Vec<f32>, TokenSums) {
    let groups = batch();
    let (mut weights, mut norms, mut sums) = (Vec::new(), Vec::new(), TokenSums::default());
    for _ in 0..steps {
        let (norm, of_step) = policy_step(&mut learner, &groups, 1e-2);
        norms.push(norm);
        weights.push(values(&learner));
        sums = of_step;
    }
    (weights, norms, sums)
}

fn advance(learner: &mut Learner, steps: usize) {
    for _ in 0..steps {
        policy_step(learner, &batch(), 1e-2);
    }
}

/// The largest difference relative to the magnitude of the values.
fn difference(ours: &[f32], theirs: &[f32]) -> f32 {
    let norm = (theirs.iter().map(|x| x * x).sum::<f32>() / theirs.len() as f32).sqrt();
    ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / norm
}

fn assert_same(ours: &[f32], theirs: &[f32], tolerance: f32, what: &str) {
    let found = difference(ours, theirs);
    assert!(found <= tolerance, "{what}: {found} of 1");
}

#[test]
fn f32_steps_match_the_processor() {
    let (expected, norms, sums) = steps(learner(smooth(OptimizerKind::Adamw)), 5);
    assert!(difference(&expected[0], &expected[4]) > 1e-2, "the steps move weights");
    for place in [OptimizerPlace::Device, OptimizerPlace::Host] {
        let settings = placed(DeviceDtype::F32, place, &smooth(OptimizerKind::Adamw));
        let (found, other, reported) = steps(learner(settings), 5);
        for step in [0, 4] {
            assert_same(&found[step], &expected[step], 1e-5, &format!("{place:?}, step {step}"));
        }
        assert_same(&other, &norms, 1e-5, "norms");
        assert_eq!((reported.tokens, reported.clipped_low), (sums.tokens, sums.clipped_low));
        assert!((reported.loss - sums.loss).abs() < 1e-5, "{} {}", reported.loss, sums.loss);
        assert!((reported.entropy - sums.entropy).abs() < 1e-3 * sums.entropy.abs());
    }
}

#[test]
fn bf16_learns_like_f32() {
    let groups = batch();
    let rows = samples(&groups);
    let losses = |dtype| {
        let settings = placed(dtype, OptimizerPlace::Device, &LEARNER);
        let mut learner = learner(settings);
        let mut step = |_| {
            let step = learner.step(&rows, &DemonstrationLoss::over(&rows), 1e-2).unwrap();
            step.reports.iter().sum()
        };
        (0..10).map(&mut step).collect::<Vec<f64>>()
    };
    let (full, rounded) = (losses(DeviceDtype::F32), losses(DeviceDtype::Bf16));
    assert!(full[9] < 0.7 * full[0], "from {} to {}", full[0], full[9]);
    assert_ne!(full, rounded);
    for (step, (full, rounded)) in full.iter().zip(&rounded).enumerate() {
        assert!((full - rounded).abs() < 0.03 * full, "step {step}: {rounded} in bf16, {full} in f32");
    }
}

#[test]
fn recomputed_activations_have_the_same_bits() {
    for dtype in [DeviceDtype::F32, DeviceDtype::Bf16] {
        let run = |recompute| steps(learner(LearnerConfig { recompute, ..on_device(dtype) }), 2);
        let expected = run(Recompute::None);
        assert!(expected == run(Recompute::None), "{dtype:?}: the same steps twice");
        for recompute in [Recompute::Block, Recompute::Sequence] {
            assert!(expected == run(recompute), "{dtype:?}, {recompute:?}");
        }
    }
}

#[test]
fn device_scores_match_the_processor() {
    let groups = batch();
    let rows = samples(&groups);
    let other = Arc::new(Parameters::random(&config(), 6));
    let files = tempfile::tempdir().unwrap();
    let directory = ModelDirectory::fresh(&files.path().join("model"), &config(), 6).unwrap();
    let kept = ResidentParameters::of(config(), other);
    let swapped = ResidentParameters::open(directory.path(), &config(), &MemoryBudget::new(Some(0))).unwrap();
    assert!(swapped.is_swapped());
    let flat = |scored: Vec<Vec<Prediction>>| -> Vec<f32> {
        scored.into_iter().flatten().flat_map(|p| [p.logprob, p.entropy]).collect()
    };
    let processor = learner(smooth(OptimizerKind::Adamw));
    let frozen = [kept, swapped].map(|weights| Frozen { weights: weights.into(), pool: None });
    let expected = flat(processor.score(&rows).unwrap());
    let expected_under = flat(processor.score_under(&frozen[0], &rows).unwrap());
    assert!(difference(&expected, &expected_under) > 0.1);
    for (world, zero, offloads) in [(1, 1, false), (1, 1, true), (2, 1, false), (3, 3, true)] {
        let mut settings = LearnerConfig { world, zero, ..on_device(DeviceDtype::F32) };
        settings.device.iter_mut().filter(|_| offloads).for_each(|device| device.frozen = FrozenPlace::Host);
        let learner = learner(settings);
        assert_same(&flat(learner.score(&rows).unwrap()), &expected, 1e-5, "its own weights");
        for frozen in frozen.iter().chain(&frozen[..1]) {
            let scored = flat(learner.score_under(frozen, &rows).unwrap());
            assert_same(&scored, &expected_under, 1e-5, "frozen weights");
        }
        if let Some((device, _)) = learner.device_weights() {
            let (usage, all) = (device.memory_usage(), 4 * Layout::new(&config()).len() as u64);
            let stays = usage.0.contains(&("frozen weights", all));
            assert_eq!(stays, !offloads, "one copy stays, or none: {usage}");
        }
    }
    let rounded = flat(learner(on_device(DeviceDtype::Bf16)).score(&rows).unwrap());
    assert!(rounded != expected);
    assert_same(&rounded, &expected, 0.1, "bf16");
}

/// The mean square of the predicted values, as the loss of a critic.
struct Values;

impl RowLoss for Values {
    type Report = f64;

    fn row(&self, _: usize, predictions: &[Prediction], report: &mut f64) -> Vec<PredictionGradient> {
        let slope = |prediction: &Prediction| {
            *report += f64::from(prediction.value - 1.0).powi(2);
            PredictionGradient { value: 2.0 * (prediction.value - 1.0), ..PredictionGradient::default() }
        };
        predictions.iter().map(slope).collect()
    }
}

#[test]
fn a_critic_learns_on_a_device() {
    let groups = batch();
    let rows = samples(&groups);
    let model = Config { head: Head::Value, ..config() };
    let run = |settings| {
        let parameters = Parameters::random(&config(), 5).with_head(&model);
        let mut critic = Learner::new(settings, model.clone(), parameters, None).unwrap();
        let losses: Vec<f64> =
            (0..3).map(|_| critic.step(&rows, &Values, 1e-2).unwrap().reports.iter().sum()).collect();
        (losses, values(&critic))
    };
    let (losses, expected) = run(smooth(OptimizerKind::Adamw));
    let (other, found) = run(on_device(DeviceDtype::F32));
    assert!(losses[2] < losses[0]);
    assert!(losses.iter().zip(&other).all(|(a, b)| (a - b).abs() < 1e-4 * a), "{losses:?} {other:?}");
    assert_same(&found, &expected, 1e-5, "weights");
}

/// A loss whose derivative overflows.
struct Infinite;

impl RowLoss for Infinite {
    type Report = ();

    fn row(&self, _: usize, predictions: &[Prediction], (): &mut ()) -> Vec<PredictionGradient> {
        let slope = PredictionGradient { logprob: f32::INFINITY, ..PredictionGradient::default() };
        vec![slope; predictions.len()]
    }
}

#[test]
fn a_non_finite_gradient_changes_no_state() {
    for (world, dtype, place) in [
        (1, DeviceDtype::F32, OptimizerPlace::Device),
        (1, DeviceDtype::Bf16, OptimizerPlace::Device),
        (1, DeviceDtype::Bf16, OptimizerPlace::Host),
        (2, DeviceDtype::F32, OptimizerPlace::Device),
    ] {
        let settings = LearnerConfig { world, ..placed(dtype, place, &LEARNER) };
        let [mut learner, mut undisturbed] = [settings.clone(), settings].map(learner);
        policy_step(&mut learner, &batch(), 1e-3);
        policy_step(&mut undisturbed, &batch(), 1e-3);
        let error = learner.step(&samples(&batch()), &Infinite, 1e-3).unwrap_err();
        assert!(matches!(error, TrainerError::GradientNotFinite { update: 1, rows: 5 }), "{error}");
        assert_eq!(values(&learner), values(&undisturbed));
        policy_step(&mut learner, &batch(), 1e-3);
        policy_step(&mut undisturbed, &batch(), 1e-3);
        assert_eq!(values(&learner), values(&undisturbed), "the step after it");
    }
}

#[test]
fn a_missing_or_small_device_is_an_error() {
    let settings = LearnerConfig {
        device: Some(DeviceConfig::new(DeviceLocation::Cuda(99), DeviceDtype::F32)),
        ..LEARNER
    };
    let parameters = Parameters::random(&config(), 5);
    let error = Learner::new(settings, config(), parameters, None).unwrap_err();
    assert!(matches!(error, TrainerError::Device(_)) && error.to_string().contains("cuda:99"), "{error}");

    // Zero pages that are never read take no host memory.
    let huge = Config { vocab_size: 70_000_000, ..config() };
    let parameters = Parameters::zeros(Arc::new(Layout::new(&huge)));
    let device = Some(DeviceConfig::new(DeviceLocation::Emulated, DeviceDtype::F32));
    let settings = LearnerConfig { device, ..LEARNER };
    let optimizer = Optimizer::from_states(settings.optimizer, 0, Vec::new());
    let error = Learner::new(settings, huge, parameters, Some(optimizer)).unwrap_err();
    let TrainerError::Device(own @ DeviceError::OutOfMemory { label: "weights", .. }) = &error else {
        panic!("{error}")
    };
    assert_eq!(error.to_string(), own.to_string());
    assert!(own.to_string().contains("has no memory for") && own.to_string().contains("rlrun plan"), "{own}");
}

#[test]
fn off_policy_tokens_are_weighted_on_a_device() {
    let (_, sums) =
        policy_step(&mut learner(on_device(DeviceDtype::F32)), &[group(0, &[1.0, 0.0], -0.3)], 1e-3);
    let mean = sums.mean(sums.behavior_weight);
    assert!((mean - 0.3_f64.exp()).abs() < 1e-4, "{mean}");
}
