//! Ranks on a device make the steps of ranks on the processor. The device is the emulator, which runs the kernels' source.

use std::sync::Arc;
use std::time::Duration;

use device::device::DeviceLocation;
use device::{DeviceError, bf16};
use model::on_device::DeviceDtype;
use model::{
    Config, Head, Layout, MemoryBudget, ModelDirectory, Parameters, Prediction, PredictionGradient,
    Recompute, ResidentParameters, ThreadPool,
};
use trainer::checkpoint::load;
use trainer::learner::RowLoss;
use trainer::lora::{Adapter, LoraConfig, TargetModule};
use trainer::moments::Moments;
use trainer::optimizer::{Optimizer, OptimizerConfig, OptimizerKind, TensorState};
use trainer::report::TokenSums;
use trainer::supervised::DemonstrationLoss;
use trainer::{
    CollectivePlace, DeviceConfig, Frozen, FrozenPlace, Leader, Learner, LearnerConfig, LearnerWeights,
    OptimizerPlace, TrainerError, TrainerState, follow,
};
use trajectory::{Group, PolicyVersion, Sample, SampleStreams, VersionRun};

use crate::router_correction::{BALANCED, skewed, with_experts};
use crate::sharded::Flat;
use crate::{LEARNER, config, group, learner, policy_step, samples, save, with_optimizer};

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
fn a_zero_gradient_makes_no_update_on_a_device() {
    let groups = batch();
    let rows = samples(&groups);
    for place in [OptimizerPlace::Device, OptimizerPlace::Host] {
        for (world, zero) in [(1, 1), (2, 3)] {
            let settings = placed(DeviceDtype::F32, place, &smooth(OptimizerKind::Adamw));
            let mut learner = learner(LearnerConfig { world, zero, ..settings });
            advance(&mut learner, 1);
            let (before, optimizer) = (values(&learner), learner.optimizer().unwrap().into_owned());
            let norm = learner.step(&rows, &Flat, 1e-2).unwrap().grad_norm;
            assert_eq!((norm, learner.updates()), (0.0, 1), "{place:?}, world {world}");
            assert_eq!(values(&learner), before, "{place:?}, world {world}");
            assert!(*learner.optimizer().unwrap() == optimizer, "{place:?}, world {world}");
        }
    }
}

#[test]
fn host_and_device_optimizers_make_the_same_updates() {
    for dtype in [DeviceDtype::F32, DeviceDtype::Bf16] {
        let run = |place| {
            let mut learner = learner(placed(dtype, place, &smooth(OptimizerKind::Adamw)));
            advance(&mut learner, 3);
            let optimizer = learner.optimizer().unwrap().into_owned();
            (values(&learner), optimizer)
        };
        let (on_device, optimizer) = run(OptimizerPlace::Device);
        let (on_host, other) = run(OptimizerPlace::Host);
        // The last bit of a master weight may change that of its bf16 value.
        assert_same(&on_device, &on_host, [1e-6, 1e-3][dtype as usize], &format!("{dtype:?}"));
        assert_eq!((optimizer.updates(), other.updates()), (3, 3));
        assert_eq!(optimizer.states().len(), other.states().len());
    }
}

#[test]
fn other_optimizers_and_adapters_are_updated_on_the_host() {
    for kind in [OptimizerKind::Adamw8bit, OptimizerKind::Muon, OptimizerKind::Dion] {
        let (expected, _, _) = steps(learner(smooth(kind)), 2);
        let settings = placed(DeviceDtype::F32, OptimizerPlace::Device, &smooth(kind));
        let (found, _, _) = steps(learner(settings), 2);
        // 8-bit moments round stochastically to 4 bits of mantissa.
        let tolerance = if kind == OptimizerKind::Adamw8bit { 1e-3 } else { 1e-5 };
        assert_same(&found[1], &expected[1], tolerance, &format!("{kind:?}"));
    }
    let adapting = |settings| {
        let base = Parameters::random(&config(), 5);
        let lora = LoraConfig { rank: 3, alpha: 6.0, target_modules: TargetModule::BLOCK.to_vec() };
        let mut adapter = Adapter::new(lora, &base, 1);
        let numbered = adapter.values_mut().iter_mut().enumerate();
        numbered.for_each(|(i, value)| *value += 0.05 * (i as f32 * 0.7).sin());
        let mut learner = Learner::adapting(settings, config(), base, adapter, None).unwrap();
        advance(&mut learner, 2);
        if let Some((device, _)) = learner.device_weights() {
            let usage = device.memory_usage();
            let factors = 4 * learner.adapter().unwrap().values().len() as u64;
            let formed = usage.0.iter().filter(|(label, _)| *label == "gradients");
            assert!(formed.map(|(_, bytes)| *bytes).sum::<u64>() <= factors, "of the factors alone: {usage}");
        }
        (learner.adapter().unwrap().values().to_vec(), values(&learner))
    };
    let (expected, merged) = adapting(smooth(OptimizerKind::Adamw));
    for (world, zero) in [(1, 1), (2, 1), (2, 2)] {
        let (found, other) = adapting(LearnerConfig { world, zero, ..on_device(DeviceDtype::F32) });
        assert_same(&found, &expected, 1e-5, "the adapter");
        assert_same(&other, &merged, 1e-5, "what it is merged into");
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
fn master_weights_keep_updates_that_bf16_would_lose() {
    let mut learner = learner(on_device(DeviceDtype::Bf16));
    let start = values(&learner);
    for _ in 0..3 {
        policy_step(&mut learner, &batch(), 1e-6);
    }
    let moved = values(&learner);
    let changed = moved.iter().zip(&start).filter(|(a, b)| a != b).count();
    assert!(changed > moved.len() / 2, "{changed} of {} weights have moved", moved.len());
    let (device, LearnerWeights::Bf16(weights)) = learner.device_weights().unwrap() else {
        panic!("bf16 was asked for")
    };
    let rounded: Vec<bf16> = moved.iter().map(|value| bf16::from_f32(*value)).collect();
    assert!(device.download(weights).unwrap() == rounded, "it computes with what it trains, rounded");
    let of_start = start.iter().map(|value| bf16::from_f32(*value));
    let visible = rounded.iter().zip(of_start).filter(|(a, b)| **a != *b).count();
    assert!(visible < changed / 20, "rounded {visible} of them are others");
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
fn resuming_from_a_checkpoint_gives_the_same_bits() {
    for (dtype, place, world, zero) in [
        (DeviceDtype::F32, OptimizerPlace::Device, 1, 1),
        (DeviceDtype::Bf16, OptimizerPlace::Device, 1, 1),
        (DeviceDtype::Bf16, OptimizerPlace::Host, 1, 1),
        (DeviceDtype::Bf16, OptimizerPlace::Device, 2, 2),
        (DeviceDtype::F32, OptimizerPlace::Device, 3, 3),
    ] {
        let settings = LearnerConfig { world, zero, ..placed(dtype, place, &LEARNER) };
        let files = tempfile::tempdir().unwrap();
        let directory = Arc::new(ModelDirectory::fresh(&files.path().join("model"), &config(), 5).unwrap());
        let new =
            |parameters, optimizer| Learner::new(settings.clone(), config(), parameters, optimizer).unwrap();
        let mut learner = new(directory.load_parameters().unwrap(), None);
        advance(&mut learner, 2);
        let state = TrainerState {
            updates: learner.updates(),
            trained_tokens: 77,
            time_s: 1.5,
            ..TrainerState::at(PolicyVersion(2))
        };
        let dir = save(files.path(), &directory, &learner, &state, 2).unwrap();
        let read = load(&dir, settings.optimizer, None).unwrap();
        assert_eq!(read.weights.whole().unwrap().values(), values(&learner));
        assert_eq!(read.optimizer, *learner.optimizer().unwrap());
        let moved = |state: &TensorState| matches!(state, TensorState::Moments(Moments::Full { first, .. }) if first.iter().any(|m| *m != 0.0));
        assert!(read.optimizer.states().iter().any(moved), "the moments are those of the steps");
        let mut resumed = new(Parameters::clone(read.weights.whole().unwrap()), Some(read.optimizer));
        advance(&mut resumed, 2);
        advance(&mut learner, 2);
        assert_eq!(resumed.updates(), 4);
        assert_eq!(values(&resumed), values(&learner));
        assert_eq!(resumed.optimizer().unwrap(), learner.optimizer().unwrap());
    }
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

#[test]
fn several_ranks_make_the_step_of_one_rank() {
    for dtype in [DeviceDtype::F32, DeviceDtype::Bf16] {
        // Several ranks sum in another order: a change of the last bit of an f32 can change its bf16 rounding.
        let tolerance = if dtype == DeviceDtype::F32 { 1e-5 } else { 2e-3 };
        for collective in [CollectivePlace::Host, CollectivePlace::Device] {
            let (expected, norms, sums) = steps(learner(exchanging(collective, on_device(dtype))), 2);
            let run = |world, zero, microbatch_tokens| {
                let settings = LearnerConfig { world, zero, microbatch_tokens, ..on_device(dtype) };
                let found = steps(learner(exchanging(collective, settings)), 2);
                let what = format!(
                    "{dtype:?}, {collective:?}, {world} ranks, stage {zero}, {microbatch_tokens} tokens"
                );
                assert_same(&found.0[1], &expected[1], tolerance, &what);
                assert_same(&found.1, &norms, 10.0 * tolerance, &what);
                assert_eq!(found.2.tokens, sums.tokens, "{what}");
                found
            };
            run(3, 3, 20);
            // One of the ranks has no rows.
            run(2, 1, 100_000);
            run(2, 3, 100_000);
            run(2, 1, 20);
            assert!(run(2, 2, 20) == run(2, 3, 20), "{dtype:?}: gathered layers are those that are there");
        }
    }
}

#[test]
fn ranks_of_a_device_group_update_their_shards_on_their_devices() {
    let all = 4 * Layout::new(&config()).len() as u64;
    for (zero, computed) in [(1, 2 * all), (3, 0)] {
        let settings = LearnerConfig { world: 2, zero, ..on_device(DeviceDtype::F32) };
        let [mut meeting, mut apart] = [CollectivePlace::Device, CollectivePlace::Host]
            .map(|collective| learner(exchanging(collective, settings.clone())));
        advance(&mut meeting, 1);
        advance(&mut apart, 1);
        // Master weights and rounded shards once over all ranks; and all weights per rank below stage 3.
        assert_eq!(meeting.device_bytes(), [2 * all, 2 * all + computed], "stage {zero}");
        assert_eq!(apart.device_bytes()[0], 0, "moments are on the host");
        assert!(meeting.whole().unwrap().is_none(), "each owns its part");
        assert_eq!(meeting.device_weights().is_some(), zero == 1);
        let owned: usize = meeting.owned().unwrap().iter().map(|(_, values)| values.len()).sum();
        assert_eq!(4 * owned as u64, all);
        let (ours, theirs) = (meeting.optimizer().unwrap(), apart.optimizer().unwrap());
        assert_eq!((ours.updates(), ours.states().len()), (1, theirs.states().len()));
    }
}

/// A learner of experts whose first expert has every token, with corrections that the steps move.
fn balanced(device: Option<DeviceConfig>, settings: &LearnerConfig) -> Learner {
    let (config, settings) = (with_experts(), settings.clone());
    let settings =
        LearnerConfig { device, router_correction_rate: BALANCED.router_correction_rate, ..settings };
    Learner::new(settings, config.clone(), skewed(&config), None).unwrap()
}

#[test]
fn experts_learn_and_corrections_move_as_on_the_processor() {
    let plain = smooth(OptimizerKind::Adamw);
    let (expected, norms, sums) = steps(balanced(None, &plain), 3);
    assert!(sums.experts.variation().is_some_and(|variation| variation > 0.0));
    for (place, world) in
        [(OptimizerPlace::Device, 1), (OptimizerPlace::Host, 1), (OptimizerPlace::Device, 2)]
    {
        let device = placed(DeviceDtype::F32, place, &plain).device;
        let (found, other, reported) =
            steps(balanced(device, &LearnerConfig { world, zero: 2, ..plain.clone() }), 3);
        let what = format!("{place:?}, {world} ranks");
        assert_same(&found[2], &expected[2], 1e-5, &what);
        assert_same(&other, &norms, 1e-5, &what);
        assert_eq!(reported.experts, sums.experts, "{what}");
        // Corrections have no gradient and do not decay: they move by the rate alone.
        let layout = Layout::new(&with_experts());
        for layer in 0..with_experts().num_layers() {
            let place = layout.router_correction(layer);
            assert_eq!(found[2][place.clone()], expected[2][place], "{what}");
        }
    }
}

#[test]
fn corrections_that_are_not_updated_stay_on_a_device() {
    let config = with_experts();
    let optimizer = OptimizerConfig { weight_decay: 0.1, ..LEARNER.optimizer };
    for dtype in [DeviceDtype::F32, DeviceDtype::Bf16] {
        let settings = LearnerConfig { optimizer, ..placed(dtype, OptimizerPlace::Device, &LEARNER) };
        let mut learner = Learner::new(settings, config.clone(), skewed(&config), None).unwrap();
        let before = values(&learner);
        advance(&mut learner, 2);
        let (after, layout) = (values(&learner), Layout::new(&config));
        for layer in 0..config.num_layers() {
            let place = layout.router_correction(layer);
            assert_eq!(after[place.clone()], before[place], "{dtype:?}");
        }
        assert_ne!(after, before);
    }
}

#[test]
fn ranks_of_a_device_group_refuse_to_update_corrections() {
    let config = with_experts();
    let settings = exchanging(CollectivePlace::Device, on_device(DeviceDtype::F32));
    let settings = LearnerConfig { world: 2, router_correction_rate: 0.1, ..settings };
    let error = Learner::new(settings, config.clone(), skewed(&config), None).unwrap_err().to_string();
    assert!(error.contains("`trainer.router_correction_rate`"), "{error}");
    assert!(error.contains("trainer.collective = \"auto\""), "{error}");
}

#[test]
fn ranks_without_a_device_group_report_the_reason() {
    let settings = LearnerConfig { world: 2, ..placed(DeviceDtype::F32, OptimizerPlace::Host, &LEARNER) };
    let parameters = || Parameters::random(&config(), 5);
    let wished = exchanging(CollectivePlace::Device, settings.clone());
    let error = Learner::new(wished, config(), parameters(), None).unwrap_err().to_string();
    assert!(error.contains("update weights on the host") && error.contains("trainer.collective"), "{error}");
    let learner = Learner::new(settings, config(), parameters(), None).unwrap();
    assert!(learner.whole().unwrap().is_some(), "through the host they can");
}

#[test]
fn a_lost_rank_ends_the_step_on_devices() {
    let groups = batch();
    let rows = samples(&groups);
    let settings = LearnerConfig { world: 2, zero: 2, microbatch_tokens: 30, ..on_device(DeviceDtype::F32) };
    let settings = LearnerConfig { wait: Duration::from_secs(20), ..settings };
    let mut ranks = collective::threads::group(2, settings.wait).into_iter();
    let (first, second) = (ranks.next().unwrap(), ranks.next().unwrap());
    let leader = Leader::new(Arc::new(first));
    let follower = std::thread::spawn(move || follow(Arc::new(second), Arc::new(ThreadPool::single())));
    let parameters = Parameters::random(&config(), 5);
    let mut learner = leader.learner(settings, config(), parameters, None, None).unwrap();
    // A token outside the vocabulary ends the rank of its row. The other rank reports the loss of that rank.
    let beyond = Sample::new(SampleStreams {
        token_ids: vec![1, 1_000_000],
        loss_mask: vec![false, true],
        behavior_logprobs: vec![0.0, -1.0],
        versions: vec![VersionRun { version: PolicyVersion(0), len: 2 }],
        kept: None,
        experts: None,
        temperature: 1.0,
    })
    .unwrap();
    let rows: Vec<&Sample> = rows.into_iter().chain([&beyond]).collect();
    let error = trainer::supervised::imitate(&mut learner, &rows, 1e-2).unwrap_err().to_string();
    drop(learner);
    drop(leader);
    let other = follower.join().unwrap().unwrap_err().to_string();
    let said = [&error, &other].into_iter().filter(|text| text.contains("1000000")).count();
    assert_eq!(said, 1, "one names the token, the other the rank that is gone: {error}; {other}");
}

#[test]
fn every_process_of_a_trainer_has_a_device() {
    let groups = batch();
    let rows = samples(&groups);
    for (zero, collective) in [
        (1, CollectivePlace::Host),
        (3, CollectivePlace::Host),
        (2, CollectivePlace::Auto),
        (3, CollectivePlace::Auto),
    ] {
        let settings = LearnerConfig { world: 2, zero, microbatch_tokens: 30, ..on_device(DeviceDtype::F32) };
        let settings = exchanging(collective, settings);
        let parameters = || Parameters::random(&config(), 5);
        let step = |learner: &mut Learner| {
            let stepped = trainer::supervised::imitate(learner, &rows, 1e-2).unwrap();
            (stepped, values(learner), learner.optimizer().unwrap().into_owned())
        };
        let mut threads = Learner::new(settings.clone(), config(), parameters(), None).unwrap();
        let expected = step(&mut threads);
        let mut ranks = collective::threads::group(2, settings.wait).into_iter();
        let (first, second) = (ranks.next().unwrap(), ranks.next().unwrap());
        let leader = Leader::new(Arc::new(first));
        let follower = std::thread::spawn(move || follow(Arc::new(second), Arc::new(ThreadPool::single())));
        let mut learner = leader.learner(settings, config(), parameters(), None, None).unwrap();
        let found = step(&mut learner);
        drop(learner);
        drop(leader);
        follower.join().unwrap().unwrap();
        assert!(found == expected, "stage {zero}, {collective:?}");
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
