//! A learner that shares its device with a sampler keeps its bits, every rank broadcasts its shard from its device, and of an offloaded
//! network the device has one layer.

use std::sync::Arc;
use std::time::Duration;

use device::Device;
use device::device::DeviceLocation;
use model::on_device::DeviceDtype;
use model::{
    Config, Layout, MemoryBudget, Parameters, Recompute, ResidentParameters, Sizes, ThreadPool, Unit,
};
use trajectory::{PolicyVersion, Sample, SampleStreams, VersionRun};
use weights::direct::nccl::{NcclConfig, NcclPublisher, NcclSubscriber};
use weights::{DevicePublisher, DeviceSubscriber, Hub, HubConfig};

use super::{DeviceConfig, FrozenPlace, OptimizerPlace, by_dtype, open};
use crate::colocation::Colocation;
use crate::frozen::Frozen;
use crate::learner::{Learner, LearnerConfig};
use crate::optimizer::{OptimizerConfig, OptimizerKind};
use crate::supervised::{DemonstrationLoss, imitate};
use crate::{Leader, WeightPublisher, follow};

fn model() -> Config {
    Config::fresh(&Sizes {
        vocab_size: 20,
        hidden_size: 16,
        intermediate_size: 64,
        num_layers: 1,
        num_heads: 2,
        num_kv_heads: 1,
        max_position_embeddings: 16,
    })
}

fn settings(dtype: DeviceDtype, optimizer: OptimizerPlace) -> LearnerConfig {
    settings_at(DeviceLocation::of_tests(), dtype, optimizer)
}

fn settings_at(place: DeviceLocation, dtype: DeviceDtype, optimizer: OptimizerPlace) -> LearnerConfig {
    LearnerConfig {
        optimizer: OptimizerConfig::standard(OptimizerKind::Adamw, 0.95),
        max_grad_norm: 1.0,
        router_correction_rate: 0.0,
        microbatch_tokens: 64,
        recompute: Recompute::None,
        world: 1,
        parallel: crate::ParallelConfig::DATA,
        leaves: 4,
        zero: 1,
        wait: Duration::from_secs(60),
        device: Some(DeviceConfig { optimizer, ..DeviceConfig::new(place, dtype) }),
    }
}

fn learner(dtype: DeviceDtype, optimizer: OptimizerPlace) -> Learner {
    Learner::new(settings(dtype, optimizer), model(), Parameters::random(&model(), 3), None).unwrap()
}

fn sample() -> Sample {
    Sample::new(SampleStreams {
        token_ids: vec![3, 14, 15, 9, 2, 6],
        loss_mask: vec![false, false, true, true, true, true],
        behavior_logprobs: vec![0.0, 0.0, -1.0, -1.0, -1.0, -1.0],
        versions: vec![VersionRun { version: PolicyVersion(0), len: 6 }],
        kept: None,
        experts: None,
        temperature: 1.0,
    })
    .unwrap()
}

fn step(learner: &mut Learner) {
    let sample = sample();
    learner.step(&[&sample], &DemonstrationLoss::over(&[&sample]), 1e-2).unwrap();
}

#[test]
fn state_returns_to_the_device_with_the_same_bits() {
    let len = Layout::new(&model()).len() as u64;
    for (dtype, place, computed) in [
        (DeviceDtype::F32, OptimizerPlace::Device, 4),
        (DeviceDtype::Bf16, OptimizerPlace::Device, 6),
        (DeviceDtype::Bf16, OptimizerPlace::Host, 2),
    ] {
        let mut undisturbed = learner(dtype, place);
        (0..3).for_each(|_| step(&mut undisturbed));
        let moments = if place == OptimizerPlace::Device { 8 } else { 0 };
        // Memory for everything, for the optimizer alone, for nothing.
        for (budget, stays) in [(u64::MAX, moments + computed), (8 * len, moments), (0, 0)] {
            let mut learner = learner(dtype, place);
            let directory = tempfile::tempdir().unwrap();
            let [turn, _other] = model::turns::share_device("the trainer", "a sampler", || {});
            let budget = MemoryBudget::new(Some(budget));
            let mut colocation = Colocation::new(turn, directory.path(), &budget, vec![&mut learner]);
            let in_memory = |learner: &Learner| learner.device_bytes().iter().sum::<u64>();
            for _ in 0..2 {
                step(&mut learner);
                assert_eq!(in_memory(&learner), (moments + computed) * len);
                colocation.rest(vec![&mut learner]).unwrap();
                assert_eq!(in_memory(&learner), stays * len, "{dtype:?} {place:?}");
                assert!(colocation.freed_bytes() >= 4 * len, "gradients leave in any case");
                colocation.wake(vec![&mut learner]).unwrap();
            }
            step(&mut learner);
            assert!(learner.parameters().unwrap().values() == undisturbed.parameters().unwrap().values());
            assert!(learner.optimizer().unwrap() == undisturbed.optimizer().unwrap());
        }
    }
}

#[test]
fn every_process_broadcasts_its_shard() {
    // Members of a broadcast need a GPU each, or the emulator.
    let settings = settings_at(DeviceLocation::Emulated, DeviceDtype::F32, OptimizerPlace::Device);
    let settings = LearnerConfig { world: 2, zero: 2, ..settings };
    let mut ranks = collective::threads::group(2, Duration::from_secs(60)).into_iter();
    let (first, second) = (ranks.next().unwrap(), ranks.next().unwrap());
    let leader = Leader::new(Arc::new(first));
    let follower = std::thread::spawn(move || follow(Arc::new(second), Arc::new(ThreadPool::single())));
    let parameters = Parameters::random(&model(), 3);
    let mut trained = leader.learner(settings, model(), parameters, None, None).unwrap();
    // The followers take part in this step.
    imitate(&mut trained, &[&sample()], 1e-2).unwrap();

    let hub = Hub::new(HubConfig::default());
    let device = || Device::open(DeviceLocation::Emulated).unwrap();
    let publisher = Arc::new(NcclPublisher::<f32>::new(hub.clone(), &device(), NcclConfig::default()));
    let sampler = NcclSubscriber::<f32>::within(&hub, "sampler", &device()).unwrap();
    assert!(sampler.newest(None).unwrap().is_none(), "it is there before the first version is");
    let wait = Duration::from_secs(60);
    let receiving = std::thread::spawn(move || sampler.wait_newer(None, wait).unwrap().unwrap());
    let publishing = WeightPublisher::F32(Arc::clone(&publisher) as _);
    publishing.publish(PolicyVersion(1), &trained).unwrap();
    let weights = receiving.join().unwrap();
    let values = device().download(weights.values.all()).unwrap();
    assert!(values == trained.parameters().unwrap().values());
    assert_eq!(publisher.last_push().unwrap().unwrap().attempts, 1);
    let cuts = trained.push_cuts();
    assert_eq!((cuts.len(), cuts[0].start, cuts[1].end), (2, 0, Layout::new(&model()).len()));
    assert!(cuts.iter().all(|cut| !cut.is_empty()), "{cuts:?}");
    drop(trained);
    drop(leader);
    follower.join().unwrap().unwrap();
}

#[test]
fn of_an_offloaded_network_the_device_has_one_layer_and_its_scores_have_the_same_bits() {
    let sizes = Sizes {
        vocab_size: 20,
        hidden_size: 16,
        intermediate_size: 64,
        num_layers: 3,
        num_heads: 2,
        num_kv_heads: 1,
        max_position_embeddings: 16,
    };
    let model = Config::fresh(&sizes);
    let parameters = Arc::new(Parameters::random(&model, 7));
    let layout = parameters.layout();
    let one_layer: usize =
        [Unit::Embedding, Unit::Layer(1), Unit::Tail].map(|unit| layout.unit(unit).len()).iter().sum();
    for (dtype, bytes) in [(DeviceDtype::F32, 4), (DeviceDtype::Bf16, 2)] {
        let mut scores = Vec::new();
        for (frozen_place, values) in [(FrozenPlace::Device, layout.len()), (FrozenPlace::Host, one_layer)] {
            let settings = settings(dtype, OptimizerPlace::Host);
            let device =
                settings.device.clone().map(|device| DeviceConfig { frozen: frozen_place, ..device });
            let network = open(device.as_ref().unwrap(), 0, &model, layout, Recompute::None).unwrap();
            by_dtype!(network, network => {
                let frozen = network.frozen(&model, &parameters, true).unwrap();
                let pass = frozen.pass().unwrap();
                let usage = network.device().memory_usage();
                let label = usage.0.iter().find(|(label, _)| *label == "frozen weights");
                assert_eq!(label.map(|(_, bytes)| *bytes), Some(bytes * values as u64), "{dtype:?} {usage}");
                drop(pass);
            });
            // Two ranks, of which each scores rows of its own.
            let settings = LearnerConfig { world: 2, zero: 3, device, ..settings };
            let learner = Learner::new(settings, model.clone(), Parameters::random(&model, 3), None).unwrap();
            let weights = ResidentParameters::of(model.clone(), Arc::clone(&parameters));
            let frozen = Frozen { weights: weights.into(), pool: None };
            let rows = [sample(), sample(), sample()];
            let scored = learner.score_under(&frozen, &rows.each_ref()).unwrap();
            scores.push(scored.concat().iter().map(|p| [p.logprob, p.entropy]).collect::<Vec<_>>());
        }
        assert!(!scores[0].is_empty() && scores[0] == scores[1], "{dtype:?}: {scores:?}");
    }
}
