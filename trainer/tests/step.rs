//! A training step between a buffer and a weight publisher.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use buffer::{AdmitRequest, Buffer, BufferConfig, BufferError, Consumer, Finalized, OnStale, Producer};
use model::{ModelDirectory, ResidentParameters};
use trainer::Frozen;
use trainer::WeightPublisher;
use trainer::algorithm::{Algorithm, Proximal};
use trainer::checkpoint::{CheckpointArchive, CheckpointWriterConfig, Retention, list, load};
use trainer::loss::Correction;
use trainer::optimizer::OptimizerKind;
use trainer::schedule::{LearningRateSchedule, ScheduleShape};
use trainer::{
    AuxiliaryModels, Learner, LearnerConfig, Trainer, TrainerConfig, TrainerError, TrainerParts, TrainerState,
};
use trajectory::{Group, PolicyVersion};
use weights::Subscriber;
use weights::memory::MemorySubscriber;

use crate::shared_buffer::SharedBuffer;
use crate::{LEARNER, SPLIT, config, group, with_optimizer};

const SOON: Duration = Duration::from_secs(20);

struct StepBench<S> {
    files: tempfile::TempDir,
    buffer: Arc<Buffer>,
    /// Whether another process has taken the buffer over.
    deposed: Arc<AtomicBool>,
    subscriber: S,
    trainer: Trainer,
    stop: Arc<AtomicBool>,
}

fn bench(change: impl FnOnce(&mut TrainerConfig)) -> StepBench<MemorySubscriber> {
    archived_bench(None, change)
}

/// The same with an archive of checkpoints.
fn archived_bench(
    archive: Option<Arc<dyn CheckpointArchive>>,
    change: impl FnOnce(&mut TrainerConfig),
) -> StepBench<MemorySubscriber> {
    let (publisher, hub) = weights::memory::hub();
    let subscriber = hub.subscribe("sampler").unwrap();
    bench_of(LEARNER, (WeightPublisher::Host(Arc::new(publisher)), subscriber), archive, change)
}

/// [`bench`] with ranks, publisher, subscriber and archive.
fn bench_of<S>(
    learner: LearnerConfig,
    (publisher, subscriber): (WeightPublisher, S),
    archive: Option<Arc<dyn CheckpointArchive>>,
    change: impl FnOnce(&mut TrainerConfig),
) -> StepBench<S> {
    let files = tempfile::tempdir().unwrap();
    let directory = ModelDirectory::fresh(&files.path().join("model"), &config(), 5).unwrap();
    let learner = Learner::new(learner, config(), directory.load_parameters().unwrap(), None).unwrap();
    let buffer_config = BufferConfig { on_stale: OnStale::Drop, ..BufferConfig::new(2, 2) };
    let buffer = Arc::new(Buffer::in_memory(buffer_config).unwrap());
    let mut settings = TrainerConfig {
        adapt_microbatch: false,
        algorithm: Algorithm::grpo(),
        schedule: LearningRateSchedule {
            peak: 1e-2,
            shape: ScheduleShape::Constant,
            warmup_steps: 0,
            decay_steps: 0,
            steps: 10,
        },
        split: SPLIT,
        epochs: 1,
        bitwise: false,
        checkpoint_interval: 2,
        checkpoint: CheckpointWriterConfig {
            checkpoints: files.path().join("checkpoints"),
            retention: Retention::last(1),
            asynchronous: true,
            wait: SOON,
        },
        logged_groups: 1,
        wait: SOON,
    };
    std::fs::create_dir(&settings.checkpoint.checkpoints).unwrap();
    change(&mut settings);
    let (stop, deposed) = (Arc::new(AtomicBool::new(false)), Arc::default());
    // The reference policy: the initial weights.
    let reference = settings.algorithm.needs_reference().then(|| {
        let parameters = Arc::new(directory.load_parameters().unwrap());
        Frozen { weights: ResidentParameters::of(config(), parameters).into(), pool: None }
    });
    let state = TrainerState::at(PolicyVersion(0));
    let parts = TrainerParts {
        learner,
        auxiliary: AuxiliaryModels { reference, ..AuxiliaryModels::default() },
        directory: Arc::new(directory),
        buffer: Arc::new(SharedBuffer { buffer: Arc::clone(&buffer), deposed: Arc::clone(&deposed) }),
        publisher,
        stop: Arc::clone(&stop),
        archive,
        exchange: None,
        elasticity: None,
    };
    let trainer = Trainer::start(settings, parts, &state).unwrap();
    StepBench { files, buffer, deposed, subscriber, trainer, stop }
}

/// Puts a complete group with these rewards into the buffer.
fn put(buffer: &Buffer, served: u64, rewards: &[f64]) {
    put_off_policy(buffer, served, rewards, 0.0);
}

/// The same with behavior log-probabilities shifted by `off_policy` nats.
fn put_off_policy(buffer: &Buffer, served: u64, rewards: &[f64], off_policy: f32) {
    let (served, begun) = (PolicyVersion(served), Instant::now());
    loop {
        let id = buffer.admit(AdmitRequest { served, limit: 1, hold: None, holder: None }, SOON).unwrap()[0];
        buffer.claim(id, served).unwrap();
        let group = group(id.0, rewards, off_policy);
        match buffer.finalize(Group::clone(&group)).unwrap() {
            Finalized::Accepted => return,
            // Its tokens are older than `served`, and no slot of their version is free yet.
            Finalized::Full => assert!(begun.elapsed() < SOON, "the trainer takes no group"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_step_makes_the_next_version_and_publishes_it() {
    let mut bench = bench(|_| {});
    let first = bench.subscriber.newest(None).unwrap().unwrap();
    assert_eq!(first.version, PolicyVersion(0));
    put(&bench.buffer, 0, &[1.0, 0.0]);
    put(&bench.buffer, 0, &[1.0, 1.0]);
    let report = bench.trainer.step().unwrap().unwrap();
    assert_eq!((report.version, report.counts.groups, report.counts.zero_variance), (PolicyVersion(1), 2, 1));
    assert_eq!(report.batch.reward.mean, 0.75);
    assert!(report.grad_norm > 0.0 && report.sums.tokens > 0);
    let second = bench.subscriber.newest(Some(PolicyVersion(0))).unwrap().unwrap();
    assert_eq!(second.version, PolicyVersion(1));
    assert_ne!(first.digest(), second.digest());
    assert_eq!(&second.values[..], bench.trainer.learner().parameters().unwrap().values());
}

/// Another process that has taken the buffer over makes the same version with other weights.
#[test]
fn a_trainer_that_was_deposed_while_it_trained_publishes_nothing() {
    let mut bench = bench(|_| {});
    put(&bench.buffer, 0, &[1.0, 0.0]);
    put(&bench.buffer, 0, &[1.0, 1.0]);
    bench.deposed.store(true, Ordering::Relaxed);
    let error = bench.trainer.step().unwrap_err();
    assert!(matches!(error, TrainerError::Buffer(BufferError::Deposed { .. })), "{error}");
    let newest = bench.subscriber.newest(None).unwrap().unwrap();
    assert_eq!(newest.version, PolicyVersion(0));
    assert_eq!(bench.buffer.stats().unwrap().leased, 2, "nothing is acknowledged");
}

/// In a pass of its own, or in the first update: the reported log-probabilities are those before the step.
#[test]
fn the_tokens_of_the_first_groups_are_reported() {
    for minibatches in [1, 2] {
        let mut bench = bench(|config| {
            (config.logged_groups, config.split.minibatches) = (1, minibatches);
        });
        (0..2).for_each(|_| put_off_policy(&bench.buffer, 0, &[1.0, 0.0], -0.25));
        let before = bench.trainer.learner().parameters().unwrap().clone();
        let report = bench.trainer.step().unwrap().unwrap();
        let (first, tokens) = (&report.groups[0], &report.tokens);
        let rows: Vec<_> = tokens.iter().map(|row| (row.group, row.index, row.branch)).collect();
        assert_eq!(rows, [(first.id, 0, 0), (first.id, 1, 0)]);
        let learner = Learner::new(LEARNER, config(), before.as_ref().clone(), None).unwrap();
        for (row, trajectory) in tokens.iter().zip(&first.trajectories) {
            let scored = &learner.score(&[&trajectory.sample]).unwrap()[0];
            let expected: Vec<f64> = scored.iter().map(|token| f64::from(token.logprob)).collect();
            assert_eq!(row.start_logprobs.as_ref().unwrap(), &expected);
            assert_eq!(row.advantages.len(), trajectory.trained_tokens());
            let sign = if row.index == 0 { 1.0 } else { -1.0 };
            assert!(row.advantages.iter().all(|advantage| advantage * sign > 0.0));
        }
    }
}

/// The first version is published without a subscriber.
#[cfg(feature = "emulator")]
#[test]
fn a_sampler_that_subscribes_during_a_wait_receives_the_published_version() {
    use device::Device;
    use device::device::DeviceLocation;
    use trainer::DeviceConfig;
    use weights::direct::nccl::{NcclConfig, NcclPublisher, NcclSubscriber};
    use weights::{DeviceSubscriber, Hub, HubConfig};

    let emulated = || Device::open(DeviceLocation::Emulated).unwrap();
    let hub = Hub::new(HubConfig::default());
    let publisher = NcclPublisher::<f32>::new(hub.clone(), &emulated(), NcclConfig::default());
    let device = DeviceConfig::new(DeviceLocation::Emulated, model::on_device::DeviceDtype::F32);
    let learner = LearnerConfig { device: Some(device), ..LEARNER };
    let mut bench = bench_of(learner, (WeightPublisher::F32(Arc::new(publisher)), ()), None, |_| {});
    let stop = Arc::clone(&bench.stop);
    let late = std::thread::spawn(move || {
        let sampler = NcclSubscriber::<f32>::within(&hub, "late", &emulated()).unwrap();
        let sent = sampler.wait_newer(None, SOON).unwrap();
        stop.store(true, Ordering::Relaxed);
        let sent = sent.expect("the version that the trainer starts from");
        (sent.version, emulated().download(sent.values.all()).unwrap())
    });
    assert!(bench.trainer.step().unwrap().is_none(), "it was stopped");
    let (version, values) = late.join().unwrap();
    assert_eq!(version, PolicyVersion(0));
    assert_eq!(values, bench.trainer.learner().parameters().unwrap().values());
}

#[test]
fn a_batch_without_variance_gives_a_version_with_equal_weights() {
    let mut bench = bench(|_| {});
    (0..2).for_each(|_| put(&bench.buffer, 0, &[1.0, 1.0]));
    let before = bench.trainer.learner().parameters().unwrap().values().to_vec();
    let report = bench.trainer.step().unwrap().unwrap();
    assert_eq!((report.version, report.sums.tokens), (PolicyVersion(1), 0));
    assert_eq!(bench.trainer.learner().parameters().unwrap().values(), before);
}

/// Whether rows are skipped before the forward pass or only have zero advantage: weight decay and momentum do not
/// apply.
#[test]
fn a_batch_without_a_gradient_makes_no_update() {
    for (kind, algorithm, world, zero) in [
        (OptimizerKind::Adamw, Algorithm::grpo(), 1, 1),
        (OptimizerKind::Adamw, Algorithm::reinforce(), 1, 1),
        (OptimizerKind::Adamw, Algorithm::reinforce(), 2, 1),
        (OptimizerKind::Muon, Algorithm::reinforce(), 2, 3),
        (OptimizerKind::Dion, Algorithm::process(), 1, 1),
    ] {
        let (publisher, hub) = weights::memory::hub();
        let edges = (WeightPublisher::Host(Arc::new(publisher)), hub.subscribe("sampler").unwrap());
        let learner = LearnerConfig { world, zero, ..with_optimizer(kind) };
        let mut bench = bench_of(learner, edges, None, |config| {
            (config.algorithm, config.split.minibatches) = (algorithm, 2);
        });
        (0..2).for_each(|_| put(&bench.buffer, 0, &[1.0, 0.0]));
        assert_eq!(bench.trainer.step().unwrap().unwrap().updates, 2);
        (0..2).for_each(|_| put(&bench.buffer, 1, &[1.0, 1.0]));
        let state = |bench: &StepBench<_>| {
            let learner = bench.trainer.learner();
            (learner.parameters().unwrap().as_ref().clone(), learner.optimizer().unwrap().into_owned())
        };
        let (weights, optimizer) = state(&bench);
        let report = bench.trainer.step().unwrap().unwrap();
        assert_eq!((report.version, report.updates, report.grad_norm), (PolicyVersion(2), 0, 0.0));
        let (after, optimizer_after) = state(&bench);
        assert_eq!(after.values(), weights.values(), "{kind:?}, world {world}");
        assert_eq!(optimizer_after, optimizer, "{kind:?}, world {world}");
    }
}

/// Trained tokens and denominators do not depend on which groups have another gradient.
#[test]
fn an_entropy_share_gives_the_same_step_with_a_tiny_kl_penalty() {
    let norm = |change: &dyn Fn(&mut Algorithm)| {
        let mut bench = bench(|config| {
            config.algorithm.entropy_share = 0.2;
            change(&mut config.algorithm);
        });
        put(&bench.buffer, 0, &[1.0, 0.0, 0.0]);
        put(&bench.buffer, 0, &[1.0, 1.0, 1.0]);
        bench.trainer.step().unwrap().unwrap().grad_norm
    };
    let plain = norm(&|_| {});
    let pulled = norm(&|algorithm| algorithm.kl.coef = 1e-12);
    let spread = norm(&|algorithm| algorithm.entropy_coef = 1e-12);
    let whole = norm(&|algorithm| algorithm.entropy_share = 1.0);
    assert!((plain / pulled - 1.0).abs() < 1e-4, "{plain} {pulled}");
    assert!((plain / spread - 1.0).abs() < 1e-4, "{plain} {spread}");
    assert!((plain / whole - 1.0).abs() > 0.05, "{plain} {whole}");
}

#[test]
fn checkpoints_acknowledge_groups_to_the_buffer() {
    let mut bench = bench(|config| config.checkpoint.asynchronous = false);
    for version in 0..2 {
        (0..2).for_each(|_| put(&bench.buffer, version, &[1.0, 0.0]));
        bench.trainer.step().unwrap().unwrap();
        assert_eq!(bench.trainer.checkpoint_due(), version == 1);
        if bench.trainer.checkpoint_due() {
            bench.trainer.checkpoint().unwrap();
        }
        let leased = bench.buffer.stats().unwrap().leased;
        assert_eq!(
            leased,
            if version == 0 { 2 } else { 0 },
            "groups are kept until a checkpoint holds their step"
        );
    }
    assert!(bench.files.path().join("checkpoints/step_000002/model/config.json").is_file());
}

/// An asynchronous checkpoint has the state of the moment when it was taken, and counts only when it is durable.
#[test]
fn an_asynchronous_checkpoint_has_the_state_when_it_was_due() {
    let mut bench = bench(|config| config.checkpoint.retention.keep_last = 2);
    (0..2).for_each(|_| put(&bench.buffer, 0, &[1.0, 0.0]));
    bench.trainer.step().unwrap().unwrap();
    let (first, optimizer) = (
        bench.trainer.learner().parameters().unwrap().as_ref().clone(),
        bench.trainer.learner().optimizer().unwrap().into_owned(),
    );
    bench.trainer.checkpoint().unwrap();
    (0..2).for_each(|_| put(&bench.buffer, 1, &[1.0, 0.0]));
    bench.trainer.step().unwrap().unwrap();
    assert_ne!(bench.trainer.learner().parameters().unwrap().values(), first.values());
    // The last checkpoint, and the one before it, are durable when it returns.
    let last = bench.trainer.last_checkpoint().unwrap();
    assert_eq!(bench.buffer.stats().unwrap().leased, 0);
    let read = |dir: &Path| load(dir, LEARNER.optimizer, None).unwrap();
    assert!(last.ends_with("step_000002"));
    assert_eq!(
        read(&last).weights.whole().unwrap().values(),
        bench.trainer.learner().parameters().unwrap().values()
    );
    let read = read(&bench.files.path().join("checkpoints/step_000001"));
    assert_eq!(read.weights.whole().unwrap().values(), first.values());
    assert_eq!((read.optimizer, read.state.version), (optimizer, PolicyVersion(1)));
}

/// An archive that stores a checkpoint once it is allowed to, and fails at the second.
#[derive(Debug, Default)]
struct SlowArchive {
    allowed: AtomicBool,
    stored: Mutex<Vec<PolicyVersion>>,
}

impl CheckpointArchive for SlowArchive {
    fn store(&self, directory: &Path, version: PolicyVersion) -> Result<(), TrainerError> {
        assert!(directory.join("manifest.json").is_file(), "a checkpoint is stored once it is complete");
        while !self.allowed.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut stored = self.stored.lock().unwrap();
        if !stored.is_empty() {
            return Err(TrainerError::Archive("the lead is another process".into()));
        }
        stored.push(version);
        Ok(())
    }
}

/// The deadline of the disk does not apply to the archive, which has its own.
#[test]
fn groups_are_acknowledged_once_the_archive_has_their_checkpoint() {
    let archive = Arc::new(SlowArchive::default());
    let of_trainer: Arc<dyn CheckpointArchive> = Arc::clone(&archive) as _;
    let mut bench = archived_bench(Some(of_trainer), |config| {
        config.checkpoint.wait = Duration::from_millis(200);
    });
    let step = |bench: &mut StepBench<_>, version| {
        (0..2).for_each(|_| put(&bench.buffer, version, &[1.0, 0.0]));
        bench.trainer.step().unwrap().unwrap();
    };
    step(&mut bench, 0);
    bench.trainer.checkpoint().unwrap();
    let checkpoint = bench.files.path().join("checkpoints/step_000001");
    while !checkpoint.exists() {
        std::thread::sleep(Duration::from_millis(1));
    }
    step(&mut bench, 1);
    assert_eq!(bench.buffer.stats().unwrap().leased, 4, "on disk is not enough");
    let allow = Arc::clone(&archive);
    let later = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(600));
        allow.allowed.store(true, Ordering::Relaxed);
    });
    // Waits for the first checkpoint, longer than the deadline of the disk.
    bench.trainer.checkpoint().unwrap();
    later.join().unwrap();
    assert_eq!(*archive.stored.lock().unwrap(), [PolicyVersion(1)]);
    assert_eq!(bench.buffer.stats().unwrap().leased, 2, "the groups of the first step are acknowledged");
    let error = bench.trainer.last_checkpoint().unwrap_err().to_string();
    assert!(error.contains("the lead is another process"), "{error}");
    assert_eq!(bench.buffer.stats().unwrap().leased, 2, "what the archive refused is not acknowledged");
}

#[test]
fn an_error_of_an_asynchronous_checkpoint_ends_the_run() {
    let mut bench = bench(|_| {});
    (0..2).for_each(|_| put(&bench.buffer, 0, &[1.0, 0.0]));
    bench.trainer.step().unwrap().unwrap();
    // A file blocks the directory of the checkpoint.
    let checkpoints = bench.files.path().join("checkpoints");
    std::fs::write(checkpoints.join("step_000001.partial"), "").unwrap();
    // The next call after the error returns it.
    let taken = bench.trainer.checkpoint();
    let error = taken.and_then(|()| bench.trainer.last_checkpoint()).unwrap_err().to_string();
    assert!(error.contains("step_000001"), "{error}");
    assert_eq!(bench.buffer.stats().unwrap().leased, 2, "nothing is forgotten that is in no checkpoint");
    assert!(list(&checkpoints).is_empty());
}

#[test]
fn later_minibatches_are_clipped_against_the_policy_at_the_start_of_the_step() {
    let mut bench = bench(|config| {
        config.algorithm = Algorithm::decoupled();
        (config.split.minibatches, config.epochs) = (2, 3);
    });
    (0..2).for_each(|_| put(&bench.buffer, 0, &[1.0, 0.0, 0.3]));
    let report = bench.trainer.step().unwrap().unwrap();
    assert_eq!(bench.trainer.learner().updates(), 6);
    let clipped = report.sums.clipped_low + report.sums.clipped_high;
    assert!(clipped > 0, "after five large updates some ratio has left the clip");
    // The behavior policy is that at the start of the step, so the correction weight is 1 although the policy has
    // changed.
    assert!((report.sums.mean(report.sums.behavior_weight) - 1.0).abs() < 1e-6);
    // The sampler is compared with the policy at the start of the step.
    assert!(report.sums.logprob_abs_diff_max < 1e-6);
    assert!(report.sums.mean_compared(report.sums.mismatch).abs() < 1e-6);
}

/// For any number of updates, and whether or not the algorithm uses that policy.
#[test]
fn sampler_and_trainer_are_compared_before_the_first_update() {
    let naive = Algorithm { proximal: Proximal::Behavior, ..Algorithm::grpo() };
    for algorithm in [Algorithm::grpo(), Algorithm::cispo(), naive] {
        for (minibatches, epochs) in [(1, 1), (1, 3), (2, 1), (2, 2)] {
            let mut bench = bench(|config| {
                config.algorithm = algorithm.clone();
                (config.split.minibatches, config.epochs) = (minibatches, epochs);
                config.schedule.peak = 1e-3;
            });
            (0..2).for_each(|_| put_off_policy(&bench.buffer, 0, &[1.0, 0.0, 0.3], -0.2));
            let report = bench.trainer.step().unwrap().unwrap();
            let sums = &report.sums;
            assert_eq!(report.updates as usize, minibatches * epochs);
            assert!(sums.compared > 0 && sums.sampled >= sums.compared);
            let k3 = 0.2_f64.exp() - 0.2 - 1.0;
            for (ours, expected) in [
                (sums.mean_compared(sums.logprob_abs_diff), 0.2),
                (sums.logprob_abs_diff_max, 0.2),
                (sums.mean_compared(sums.mismatch), k3),
            ] {
                assert!((ours - expected).abs() < 1e-5, "{ours} {expected}, {minibatches} x {epochs}");
            }
        }
    }
}

/// Samples that were not drawn from the policy of their version, as from a quantised sampler.
#[test]
fn the_correction_weighs_off_policy_samples_at_staleness_0() {
    let moved = 0.2_f32;
    for updates in [1, 3] {
        let run = |off_policy: f32| {
            let decoupled =
                Algorithm { correction: Correction::TokenTruncate { cap: 2.0 }, ..Algorithm::decoupled() };
            let mut bench = bench(|config| {
                config.algorithm = decoupled;
                (config.epochs, config.schedule.peak) = (updates, 1e-5);
            });
            (0..2).for_each(|_| put_off_policy(&bench.buffer, 0, &[1.0, 0.0, 0.3], off_policy));
            bench.trainer.step().unwrap().unwrap()
        };
        let (on_policy, off_policy) = (run(0.0), run(-moved));
        assert_eq!(off_policy.batch.staleness.max, 0.0);
        let sums = &off_policy.sums;
        // The weight is exp(proximal - behavior), below the cap of 2, independent of the current policy.
        let weight = f64::from(moved.exp());
        assert!((sums.mean(sums.behavior_weight) - weight).abs() < 1e-5, "{updates}: {sums:?}");
        assert_eq!(
            sums.clipped_low + sums.clipped_high,
            0,
            "the clip is anchored at the policy before the step"
        );
        // Only the weight differs: the clipped ratio is to the policy at the start of the step.
        if updates == 1 {
            let norms = f64::from(off_policy.grad_norm / on_policy.grad_norm);
            assert!((norms - weight).abs() < 1e-3, "{norms} {weight}");
        }
    }
}

#[test]
fn bitwise_accepts_equal_bits_and_rejects_others() {
    for (minibatches, epochs) in [(1, 1), (2, 2)] {
        let bitwise = |config: &mut TrainerConfig| {
            (config.bitwise, config.split.minibatches, config.epochs) = (true, minibatches, epochs);
        };
        let mut kept = bench(bitwise);
        (0..2).for_each(|_| put(&kept.buffer, 0, &[1.0, 0.0]));
        kept.trainer.step().unwrap().unwrap();
        // Samples of an older version may differ.
        (0..2).for_each(|_| put(&kept.buffer, 1, &[1.0, 0.0]));
        let older = kept.trainer.step().unwrap().unwrap();
        assert!(older.batch.staleness.max > 0.0 && older.sums.logprob_abs_diff_max > 0.0);

        let mut broken = bench(bitwise);
        put(&broken.buffer, 0, &[1.0, 0.0]);
        put_off_policy(&broken.buffer, 0, &[1.0, 0.0], -1e-6);
        let error = broken.trainer.step().unwrap_err();
        let TrainerError::NotBitwise { step: 1, group, behavior, proximal, .. } = error else {
            panic!("{error}")
        };
        assert_eq!(group.0, 1);
        assert!(behavior < proximal);
        let message = error.to_string();
        for part in ["step 1", "group 1", &behavior.to_string(), &proximal.to_string(), "rollout.bitwise"] {
            assert!(message.contains(part), "{message}");
        }
        assert_eq!(broken.trainer.version(), PolicyVersion(0));
    }
}

/// For every anchor of the loss and any number of updates.
#[test]
fn bitwise_compares_the_policy_at_the_start_of_the_step() {
    let naive = Algorithm { proximal: Proximal::Behavior, ..Algorithm::grpo() };
    for algorithm in [Algorithm::cispo(), Algorithm::aipo(), naive] {
        let several = |config: &mut TrainerConfig| {
            config.algorithm = algorithm.clone();
            (config.bitwise, config.split.minibatches, config.epochs) = (true, 2, 2);
        };
        let mut kept = bench(several);
        (0..2).for_each(|_| put(&kept.buffer, 0, &[1.0, 0.0]));
        kept.trainer.step().unwrap().unwrap();
        let mut broken = bench(several);
        (0..2).for_each(|_| put_off_policy(&broken.buffer, 0, &[1.0, 0.0], -1e-6));
        assert!(matches!(broken.trainer.step(), Err(TrainerError::NotBitwise { step: 1, .. })));
    }
}

#[test]
fn a_trainer_without_a_batch_fails_at_the_deadline_or_stops() {
    let mut bench = bench(|config| config.wait = Duration::from_millis(150));
    let one = AdmitRequest { served: PolicyVersion(0), limit: 1, hold: None, holder: None };
    let id = bench.buffer.admit(one, SOON).unwrap()[0];
    bench.buffer.claim(id, PolicyVersion(0)).unwrap();
    let error = bench.trainer.step().unwrap_err();
    let TrainerError::Buffer(BufferError::LeaseTimeout { waited, .. }) = &error else { panic!("{error}") };
    assert!(*waited >= Duration::from_millis(150), "the whole wait: {waited:?}");
    assert!(error.to_string().contains("1 claimed"), "{error}");
    bench.stop.store(true, Ordering::Relaxed);
    assert!(bench.trainer.step().unwrap().is_none());
}

#[test]
fn groups_that_cannot_be_trained_on_are_set_aside_until_there_are_too_many_in_a_row() {
    let mut bench = bench(|_| {});
    put(&bench.buffer, 0, &[2e9, 0.0]);
    (0..2).for_each(|_| put(&bench.buffer, 0, &[1.0, 0.0]));
    let report = bench.trainer.step().unwrap().unwrap();
    assert_eq!((report.counts.groups, report.quarantined_groups), (2, 1));
    let buffer = Arc::clone(&bench.buffer);
    let sampler = std::thread::spawn(move || (0..64).for_each(|_| put(&buffer, 1, &[2e9, 0.0])));
    let error = bench.trainer.step().unwrap_err();
    sampler.join().unwrap();
    assert!(matches!(error, TrainerError::OnlyUnfit { groups: 64, .. }), "{error}");
    assert!(error.to_string().contains("reward 2000000000"), "{error}");
}
