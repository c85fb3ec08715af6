//! Ranks that are processes give the same bits as ranks of one process. Threads that share only a collective stand for
//! processes.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use buffer::{AdmitRequest, Buffer, BufferConfig, Consumer, OnStale, Producer};
use collective::{HostCollective, threads};
use model::{Config, Head, ModelDirectory, Parameters, Placement, ResidentParameters, ThreadPool, Unit};
use trainer::algorithm::Algorithm;
use trainer::checkpoint::{CheckpointWriterConfig, Retention};
use trainer::critic::{Critic, CriticConfig, CriticKind, CriticNetwork};
use trainer::lora::{Adapter, LoraConfig, TargetModule};
use trainer::loss::preference::Preference;
use trainer::objective::ValueLossConfig;
use trainer::optimizer::{Optimizer, OptimizerKind};
use trainer::schedule::{LearningRateSchedule, ScheduleShape};
use trainer::supervised::{PairLoss, imitate};
use trainer::trainer::elastic::{Elasticity, Regrouping};
use trainer::{
    AuxiliaryModels, Followed, Frozen, Leader, Learner, LearnerConfig, Trainer, TrainerConfig, TrainerError,
    TrainerParts, TrainerState, WeightPublisher, follow,
};
use trajectory::{Group, PolicyVersion};
use weights::hub::HubConfig;
use weights::{Hub, HubPublisher, PublishConfig, Subscriber};

use crate::recording::Recording;
use crate::router_correction::{BALANCED, with_experts};
use crate::{LEARNER, SPLIT, config, group, groups, samples, with_optimizer};

pub(crate) const SOON: Duration = Duration::from_secs(60);
/// Steps of [`trained`].
const STEPS: u64 = 3;

/// The leader of `world` ranks and its followers.
pub(crate) struct Processes {
    pub(crate) leader: Arc<Leader>,
    followers: Vec<JoinHandle<Result<Followed, TrainerError>>>,
}

impl Processes {
    pub(crate) fn new(world: usize) -> Self {
        Self::of(threads::group(world, SOON).into_iter().map(|rank| Arc::new(rank) as Arc<_>).collect())
    }

    /// `ranks`, the leader's first.
    pub(crate) fn of(mut ranks: Vec<Arc<dyn HostCollective>>) -> Self {
        let leader = Leader::new(ranks.remove(0));
        let start = |rank| std::thread::spawn(move || follow(rank, Arc::new(ThreadPool::single())));
        Self { leader, followers: ranks.into_iter().map(start).collect() }
    }

    /// Ends the leader, and returns the errors of the followers, which all have one.
    pub(crate) fn errors(self) -> Vec<String> {
        drop(self.leader);
        let ended = self.followers.into_iter().map(|follower| follower.join().unwrap());
        ended.map(|ended| ended.unwrap_err().to_string()).collect()
    }

    /// Ends the leader and the followers.
    pub(crate) fn end(self) {
        drop(self.leader);
        for follower in self.followers {
            assert_eq!(follower.join().unwrap().unwrap(), Followed::Stopped);
        }
    }
}

/// Makes a learner with threads as ranks, or with the followers of a leader.
pub(crate) type Make<'a> =
    &'a dyn Fn(LearnerConfig, Config, Parameters, Option<Adapter>, Option<Optimizer>) -> Learner;

/// Runs `work` with both kinds of learner, and asserts equal results.
fn same<R: PartialEq>(world: usize, what: &str, work: impl Fn(Make<'_>) -> R) {
    let with_threads = work(&|config, model, parameters, adapter, optimizer| {
        let config = LearnerConfig { world, ..config };
        match adapter {
            Some(adapter) => Learner::adapting(config, model, parameters, adapter, optimizer).unwrap(),
            None => Learner::new(config, model, parameters, optimizer).unwrap(),
        }
    });
    let processes = Processes::new(world);
    let leader = &processes.leader;
    let with_processes = work(&|config, model, parameters, adapter, optimizer| {
        leader.learner(config, model, parameters, adapter, optimizer).unwrap()
    });
    processes.end();
    assert!(with_threads == with_processes, "{what}, world {world}");
}

/// The state that a checkpoint contains.
fn state(learner: &Learner) -> (Parameters, Optimizer, Option<Adapter>) {
    let (parameters, optimizer) = (learner.parameters().unwrap(), learner.optimizer().unwrap());
    (Parameters::clone(&parameters), optimizer.into_owned(), learner.adapter().cloned())
}

fn bits(learner: &Learner) -> (Vec<u32>, Optimizer, Option<Adapter>) {
    let (parameters, optimizer, adapter) = state(learner);
    (parameters.values().iter().map(|value| value.to_bits()).collect(), optimizer, adapter)
}

#[test]
fn demonstrations_and_pairs_are_learned_by_all_processes() {
    let groups = groups();
    let rows = samples(&groups);
    for (kind, world, zero) in
        [(OptimizerKind::Adamw, 2, 1), (OptimizerKind::Adamw8bit, 3, 3), (OptimizerKind::Dion, 2, 2)]
    {
        same(world, &format!("{kind:?}, stage {zero}"), |make| {
            let settings = LearnerConfig { zero, microbatch_tokens: 30, ..with_optimizer(kind) };
            let parameters = Parameters::random(&config(), 5);
            let mut learner = make(settings.clone(), config(), parameters.clone(), None, None);
            let imitated = imitate(&mut learner, &rows, 1e-3).unwrap();
            let (parameters, optimizer, _) = state(&learner);
            drop(learner);
            // Another learner restores its optimizer from the saved state.
            let mut learner = make(settings, config(), parameters.clone(), None, Some(optimizer));
            let reference =
                Frozen { weights: ResidentParameters::of(config(), Arc::new(parameters)).into(), pool: None };
            let preference = Preference::Dpo { beta: 0.5, smoothing: 0.0 };
            let pairs = PairLoss::Preference { preference, reference: Box::new(reference) };
            let reports = [1e-3, 1e-3].map(|rate| pairs.step(&mut learner, &rows, rate).unwrap());
            let measured = pairs.measure(&learner, &rows).unwrap();
            assert_eq!(learner.updates(), 3);
            (imitated, reports, measured, bits(&learner))
        });
    }
}

#[test]
fn an_adapter_is_sent_and_trained() {
    let groups = groups();
    let rows = samples(&groups);
    for zero in [1, 3] {
        same(2, &format!("stage {zero}"), |make| {
            let base = Parameters::random(&config(), 5);
            let lora = LoraConfig { rank: 2, alpha: 4.0, target_modules: vec![TargetModule::QProj] };
            let adapter = Adapter::new(lora, &base, 1);
            let mut learner = make(LearnerConfig { zero, ..LEARNER }, config(), base, Some(adapter), None);
            let losses: Vec<_> = (0..2).map(|_| imitate(&mut learner, &rows, 1e-2).unwrap()).collect();
            (losses, bits(&learner))
        });
    }
}

#[test]
fn processes_give_the_bits_of_one_rank() {
    let groups = groups();
    let rows = samples(&groups);
    for (zero, adapts) in [(1, false), (2, true), (3, false)] {
        let base = Parameters::random(&config(), 5);
        let settings = LearnerConfig { zero, microbatch_tokens: 30, ..LEARNER };
        let adapter = adapts.then(|| {
            let lora = LoraConfig { rank: 3, alpha: 6.0, target_modules: TargetModule::BLOCK.to_vec() };
            Adapter::new(lora, &base, 1)
        });
        let trained = |mut learner: Learner| {
            let norms = [0, 1].map(|_| imitate(&mut learner, &rows, 1e-2).unwrap().grad_norm.to_bits());
            (norms, bits(&learner))
        };
        let expected = trained(match adapter.clone() {
            Some(adapter) => {
                Learner::adapting(settings.clone(), config(), base.clone(), adapter, None).unwrap()
            }
            None => Learner::new(settings.clone(), config(), base.clone(), None).unwrap(),
        });
        for world in [2, 4] {
            let processes = Processes::new(world);
            let leader = &processes.leader;
            let learner = leader.learner(settings.clone(), config(), base.clone(), adapter.clone(), None);
            assert!(trained(learner.unwrap()) == expected, "stage {zero}, {world} processes");
            processes.end();
        }
    }
}

/// Two epochs of two minibatches.
fn settings_of(algorithm: &Algorithm, files: &std::path::Path) -> TrainerConfig {
    let schedule = LearningRateSchedule {
        peak: 1e-3,
        shape: ScheduleShape::Constant,
        warmup_steps: 0,
        decay_steps: 0,
        steps: 10,
    };
    let split = trainer::batch::BatchSplit { minibatches: 2, ..SPLIT };
    TrainerConfig {
        adapt_microbatch: false,
        algorithm: algorithm.clone(),
        schedule,
        split,
        epochs: 2,
        bitwise: false,
        checkpoint_interval: 0,
        checkpoint: CheckpointWriterConfig {
            checkpoints: files.join("checkpoints"),
            retention: Retention::last(1),
            asynchronous: true,
            wait: SOON,
        },
        logged_groups: 1,
        wait: SOON,
    }
}

/// What a trainer is made of.
pub(crate) struct TrainedWith<'a> {
    pub(crate) model: &'a Config,
    pub(crate) settings: LearnerConfig,
    pub(crate) algorithm: &'a Algorithm,
    pub(crate) critic: Option<CriticKind>,
    pub(crate) elasticity: Option<Elasticity>,
}

/// A publisher and a sampler with shared memory in `directory`, where ranks that stand for processes write their shards.
fn in_shared_memory(directory: &Path) -> (WeightPublisher, impl Subscriber + use<>) {
    let hub = Hub::new(HubConfig::default());
    let sampler = hub.subscribe("sampler").unwrap();
    let shm = Some(directory.to_owned());
    let publisher = HubPublisher::new(hub, PublishConfig { shm, ..PublishConfig::default() }).unwrap();
    (WeightPublisher::Host(Arc::new(publisher)), sampler)
}

/// Steps of a trainer with all auxiliary models, and how its ranks have changed.
pub(crate) fn trained(make: Make<'_>, with: TrainedWith<'_>) -> (impl PartialEq + use<>, Vec<Regrouping>) {
    let TrainedWith { model, settings, algorithm, critic, elasticity } = with;
    let files = tempfile::tempdir().unwrap();
    let mut directory = ModelDirectory::fresh(&files.path().join("model"), model, 5).unwrap();
    let mut parameters = directory.load_parameters().unwrap();
    let frozen = ResidentParameters::of(model.clone(), Arc::new(parameters.clone()));
    let network = (critic == Some(CriticKind::Separate)).then(|| {
        let directory = ModelDirectory::open(directory.path()).unwrap().with_head(Head::Value);
        let parameters = parameters.with_head(directory.config());
        let learner = make(settings.clone(), directory.config().clone(), parameters, None, None);
        CriticNetwork { learner, directory: Arc::new(directory) }
    });
    if critic == Some(CriticKind::Shared) {
        directory = directory.with_head(Head::LanguageAndValue);
        parameters = parameters.with_head(directory.config());
    }
    let learner = make(settings, directory.config().clone(), parameters, None, None);
    let critic = critic.map(|kind| {
        let term = ValueLossConfig { coef: 0.5, clip: Some(0.2) };
        let placement = Placement::Separated;
        Critic {
            config: CriticConfig { kind, term, learning_rate: 1e-3, pretrain_steps: 1, placement },
            network,
        }
    });
    let reference = algorithm.needs_reference().then(|| Frozen { weights: frozen.into(), pool: None });
    let buffer_config = BufferConfig { on_stale: OnStale::Drop, ..BufferConfig::new(3, 2) };
    let buffer = Arc::new(Buffer::in_memory(buffer_config).unwrap());
    let (publisher, sampler) = in_shared_memory(files.path());
    let trainer_config = settings_of(algorithm, files.path());
    std::fs::create_dir(&trainer_config.checkpoint.checkpoints).unwrap();
    let demonstration = Group::clone(&group(9, &[1.0], 0.0)).trajectories.remove(0).sample;
    let demonstrate = algorithm
        .demonstration_gate
        .is_some()
        .then(|| -> trainer::trainer::Demonstrate { Box::new(move |_| Some(demonstration.clone())) });
    let auxiliary = AuxiliaryModels { reference, critic, demonstrate };
    let state = TrainerState::at(PolicyVersion(0));
    let parts = TrainerParts {
        learner,
        auxiliary,
        directory: Arc::new(directory),
        buffer: Arc::clone(&buffer) as Arc<dyn Consumer>,
        publisher,
        stop: Arc::new(AtomicBool::new(false)),
        archive: None,
        exchange: None,
        elasticity,
    };
    let mut trainer = Trainer::start(trainer_config, parts, &state).unwrap();
    let (mut reports, mut regroupings) = (Vec::new(), Vec::new());
    for version in 0..STEPS {
        for rewards in [&[1.0, 0.0, 0.3][..], &[0.0, 0.0, 0.2], &[0.5, 1.0]] {
            let served = PolicyVersion(version);
            let id =
                buffer.admit(AdmitRequest { served, limit: 1, hold: None, holder: None }, SOON).unwrap()[0];
            buffer.claim(id, served).unwrap();
            buffer.finalize(Group::clone(&group(id.0, rewards, -0.1))).unwrap();
        }
        let report = trainer.step().unwrap().unwrap();
        reports.push((report.sums, report.critic, report.grad_norm));
        regroupings.extend(report.regroupings);
    }
    trainer.checkpoint().unwrap();
    let critic = trainer.critic().and_then(|critic| critic.network.as_ref());
    let networks = (bits(trainer.learner()), critic.map(|network| bits(&network.learner)));
    let newest = sampler.newest(None).unwrap().unwrap();
    assert_eq!(newest.version, PolicyVersion(STEPS));
    assert!(newest.values.iter().zip(&networks.0.0).all(|(value, bits)| value.to_bits() == *bits));
    ((reports, networks), regroupings)
}

#[test]
fn a_spread_trainer_makes_the_steps_of_one_process() {
    let mut pulled = Algorithm::grpo();
    pulled.kl.coef = 0.1;
    for (name, algorithm, critic, world, zero) in [
        ("grpo", Algorithm::grpo(), None, 2, 3),
        ("grpo with a reference", pulled, None, 3, 2),
        ("hpt", Algorithm::hpt(), None, 2, 1),
        ("ppo", Algorithm::ppo(), Some(CriticKind::Separate), 2, 3),
        ("ppo", Algorithm::ppo(), Some(CriticKind::Shared), 2, 2),
    ] {
        let settings = LearnerConfig { zero, microbatch_tokens: 40, ..LEARNER };
        let what = format!("{name} {critic:?}, stage {zero}");
        same(world, &what, |make| {
            let (model, algorithm, settings) = (&config(), &algorithm, settings.clone());
            trained(make, TrainedWith { model, settings, algorithm, critic, elasticity: None })
        });
    }
}

#[test]
fn routers_of_all_processes_are_corrected_alike() {
    for zero in [1, 3] {
        let settings = LearnerConfig { zero, ..BALANCED };
        let model = with_experts();
        same(2, &format!("routers, stage {zero}"), |make| {
            let (model, algorithm, settings) = (&model, &Algorithm::grpo(), settings.clone());
            trained(make, TrainedWith { model, settings, algorithm, critic: None, elasticity: None })
        });
    }
}

#[test]
fn a_lost_follower_ends_the_step_with_its_number() {
    let groups = groups();
    let rows = samples(&groups);
    let mut ranks: Vec<Arc<dyn HostCollective>> =
        threads::group(3, SOON).into_iter().map(|rank| Arc::new(rank) as Arc<_>).collect();
    let leader = Leader::new(ranks.remove(0));
    // This rank receives the model and then ends, like a killed process.
    let dying = ranks.pop().unwrap();
    let lasting = ranks.pop().unwrap();
    let lasting = std::thread::spawn(move || follow(lasting, Arc::new(ThreadPool::single())));
    let units = config().num_layers() + 2;
    let dying = std::thread::spawn(move || {
        (0..=units).for_each(|_| drop(dying.broadcast_bytes(0, Vec::new()).unwrap()));
    });
    let parameters = Parameters::random(&config(), 5);
    let settings = LearnerConfig { zero: 3, ..LEARNER };
    let mut learner = leader.learner(settings, config(), parameters, None, None).unwrap();
    dying.join().unwrap();
    let error = imitate(&mut learner, &rows, 1e-3).unwrap_err();
    assert!(error.to_string().contains("rank 2 is gone"), "{error}");
    drop((learner, leader));
    let error = lasting.join().unwrap().unwrap_err();
    assert!(error.to_string().contains("rank 2 is gone"), "{error}");
}

#[test]
fn only_the_leader_receives_the_optimizer_state_of_other_ranks() {
    let mut ranks = threads::group(2, SOON);
    let follower = Recording::new(ranks.pop().unwrap(), &Arc::default());
    let gathered = follower.gathered();
    let processes = Processes::of(vec![Arc::new(ranks.pop().unwrap()), Arc::new(follower)]);
    let parameters = Parameters::random(&config(), 5);
    let weights = parameters.values().len();
    let learner = processes.leader.learner(LEARNER, config(), parameters, None, None).unwrap();
    assert_eq!(learner.optimizer().unwrap().states().len(), learner.trained().len());
    drop(learner);
    processes.end();
    // Each state has two moments of a weight.
    let gathered = gathered.load(Ordering::Relaxed);
    assert!(gathered < weights, "a follower has gathered {gathered} B");
}

/// Reduce-scatter runs on the communication thread: that of the last unit starts before the backward pass has the weights of
/// the first layer. One layer is gathered ahead, and none twice in a row.
#[test]
fn reduce_scatter_starts_before_the_backward_pass_ends() {
    const LAYERS: usize = 4;
    let mut config = config();
    config.layers = vec![config.layers[0]; LAYERS];
    let groups = groups();
    let rows = samples(&groups);
    let parameters = Parameters::random(&config, 5);
    let layout = Arc::clone(parameters.layout());
    let len = |unit| layout.unit(unit).len();
    let mut ranks = threads::group(2, SOON);
    let log = Arc::new(Mutex::new(Vec::new()));
    let follower = ranks.pop().unwrap();
    let follower = std::thread::spawn(move || follow(Arc::new(follower), Arc::new(ThreadPool::single())));
    let leader = Leader::new(Arc::new(Recording::new(ranks.pop().unwrap(), &log)));
    let settings = LearnerConfig { zero: 3, leaves: 2, microbatch_tokens: 100_000, ..LEARNER };
    let mut learner = leader.learner(settings, config, parameters, None, None).unwrap();
    imitate(&mut learner, &rows, 1e-3).unwrap();
    let log = std::mem::take(&mut *log.lock().unwrap());
    let calls: Vec<_> = log.iter().map(|(call, len, _)| (*call, *len)).collect();
    let (embedding, layer, tail) = (len(Unit::Embedding), len(Unit::Layer(0)), len(Unit::Tail));
    assert_eq!(calls[..2], [("gather", embedding), ("gather", tail)]);
    let first_reduced = calls.iter().position(|call| call.0 == "reduce").unwrap();
    let last_gathered = calls.iter().rposition(|call| call.0 == "gather").unwrap();
    assert!(first_reduced + 1 < last_gathered, "{calls:?}");
    let count = |wanted: (&str, usize)| calls.iter().filter(|call| **call == wanted).count();
    assert_eq!(count(("gather", layer)), 2 * LAYERS - 1, "{calls:?}");
    assert_eq!((count(("reduce", layer)), count(("reduce", tail))), (LAYERS, 1), "{calls:?}");
    assert!(log.iter().all(|(_, _, thread)| thread == "communication 0"), "{log:?}");
    drop((learner, leader));
    follower.join().unwrap().unwrap();
}
