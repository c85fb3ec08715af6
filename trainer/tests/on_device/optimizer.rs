//! Updates of weights on a device or on the host, and what a checkpoint has of them.

use std::sync::Arc;

use device::bf16;
use model::on_device::DeviceDtype;
use model::{ModelDirectory, Parameters};
use trainer::checkpoint::load;
use trainer::lora::{Adapter, LoraConfig, TargetModule};
use trainer::moments::Moments;
use trainer::optimizer::{OptimizerKind, TensorState};
use trainer::{Learner, LearnerConfig, LearnerWeights, OptimizerPlace, TrainerState};
use trajectory::PolicyVersion;

use super::{advance, assert_same, batch, on_device, placed, smooth, steps, values};
use crate::sharded::Flat;
use crate::{LEARNER, config, learner, policy_step, samples, save};

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
