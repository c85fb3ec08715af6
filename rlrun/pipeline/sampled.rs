//! Training on sampled groups: connects trainer, samplers, buffer and weights, and stops them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use buffer::{Buffer, Consumer, Producer};
use islands::CoordinatorClient;
use model::{DeviceTurn, turns};
use rollout::remote::EngineKind;
use rollout::scoring::Scorer;
use rollout::{Sampler, Worker, WorkerConfig};
use trainer::checkpoint::CheckpointArchive;
use trainer::{OuterExchange, Trainer, TrainerParts};
use weights::Hub;

use super::samplers::{SAMPLER_NAME, SamplerThread, Samplers};
use super::services::RunServices;
use super::start::StartingState;
use super::steps::{StepConnections, StepFollower};
use super::view::WatchdogView;
use super::weights::WeightPublishing;
use super::{Run, TrainingResult};
use crate::allocator;
use crate::auxiliary_models::AuxiliarySetup;
use crate::curation;
use crate::engines::{self, EngineProcess, EngineSetup};
use crate::failure::{Failure, REQUEUE};
use crate::island::RunIsland;
use crate::observe::Observer;
use crate::prepare::Prepared;
use crate::run_buffer::{OWN_SAMPLER, RunBuffer};
use crate::sampler::{SamplerSetup, SamplerWeights, published_network};
use crate::schedule::{self, ScheduleRecorder};
use crate::status::RunStatus;
use crate::timeline::Timeline;
use crate::trainer_progress::{self, TrainerPhase};
use crate::watchdog::Watchdog;

/// What the watchdog looks at and writes.
struct WatchedRun {
    consumer: Arc<dyn Consumer>,
    hub: Hub,
    /// The buffer, if it is in this process.
    own: Option<Arc<Buffer>>,
    status: Arc<RunStatus>,
    timeline: Option<Arc<Timeline>>,
}

impl Run<'_> {
    /// Runs samplers and trainer until all steps are done or the run is stopped.
    pub(super) fn train(
        &self,
        start: StartingState,
        services: RunServices,
        observer: &mut Observer<'_>,
        watchdog: Watchdog,
    ) -> Result<TrainingResult, Failure> {
        self.progress.enter(TrainerPhase::Opening);
        let auxiliary = self.auxiliary(&start).auxiliary_models()?;
        self.rewind(&services.buffer, &start, observer)?;
        let policy = start
            .learner
            .adapted()
            .filter(|_| self.recipe.buffer.listen.is_some() || self.listener.is_some());
        services.api.publish_model(&start.directory, policy.as_ref().map(|policy| &**policy.base()));
        let (stop, local) = (self.signals.stop_flag(), self.listener.is_none());
        let weights =
            WeightPublishing::new(self.recipe, &services.hub, services.buffer.server.is_some(), local)?;
        let _engine = EngineProcess::start(self.recipe, self.run_dir, &self.report)?;
        let worker = match local {
            true => Some(self.worker(&start, &services, &weights)?),
            false => None,
        };
        let RunServices { buffer, hub, registry, elasticity, .. } = services;
        // The server ends with the training.
        let RunBuffer { producer, consumer, server: _server, own } = buffer;
        let StartingState { learner, directory, prepared, state, island, .. } = start;
        let coordinator = island.as_ref().map(RunIsland::client);
        let rewards = prepared.rewards.clone().filter(|_| worker.is_some());

        let config = self.recipe.trainer(self.run_dir.checkpoints());
        let evaluated = self.recipe.opened(directory.path())?;
        let parts = TrainerParts {
            learner,
            auxiliary,
            directory,
            buffer: Arc::clone(&consumer),
            publisher: weights.publishing(),
            stop: Arc::clone(&stop),
            archive: self.archive.clone().map(|archive| archive as Arc<dyn CheckpointArchive>),
            exchange: island.map(|island| Box::new(island) as Box<dyn OuterExchange>),
            elasticity,
        };
        let mut trainer = Trainer::start(config, parts, &state)?;
        self.note_start(&trainer);
        let mut schedule = self.schedule(&trainer)?;
        let turn = self.shared_device(&mut trainer, &prepared);
        let worker = worker.map(|worker| worker.taking_turns(turn)).transpose()?;
        let local =
            worker.map(|worker| SamplerThread::spawn(worker, producer, Arc::clone(&stop))).transpose()?;
        let mut samplers = Samplers { local, registry, rewards };
        let timeline = observer.open_timeline(trainer.time_s(), own.clone());
        let status = Arc::new(RunStatus::new(self.run_dir.path()));
        observer.report_to(&status);
        // The next watchdog sees the samplers too.
        drop(watchdog);
        let watched = WatchedRun { consumer: Arc::clone(&consumer), hub, own: own.clone(), status, timeline };
        let last = Arc::clone(&watched.status);
        let watchdog = self.watch(&samplers, watched)?;
        let follower = schedule.as_mut().map(|schedule| schedule as &mut dyn StepFollower);
        let buffer = own.as_deref();
        let connections = StepConnections { samplers: &samplers, weights: &weights, buffer, follower };
        let trained = self.steps(&mut trainer, connections, observer, |trainer| {
            self.evaluate(&prepared, trainer.learner(), &evaluated)
        });
        drop(watchdog);
        let cut_short = self.is_cut_short(&prepared);
        stop.store(true, Ordering::Relaxed);
        let joined = samplers.join(observer);
        // The last version is saved however the sampler ended.
        let saved = trained.is_ok().then(|| observer.sync().and_then(|()| Ok(trainer.last_checkpoint()?)));
        samplers.stop_workers(observer);
        last.write(&["the run has ended".to_owned()], consumer.stats().ok().as_ref(), own.as_deref());
        // An error of the sampler stops the trainer, so it is reported first.
        joined?;
        let evaluation = trained?;
        saved.transpose()?;
        coordinator.iter().for_each(|coordinator| self.leave(coordinator));
        let cut_short = cut_short && evaluation.is_none();
        Ok(TrainingResult { version: trainer.version(), time_s: trainer.time_s(), evaluation, cut_short })
    }

    /// Reports what a trainer that has started does in another way than expected.
    fn note_start(&self, trainer: &Trainer) {
        if let Some(lost) = trainer.lost_lease() {
            self.report.note(&format!("warning: {lost}; the checkpoint contains these groups all the same"));
        }
        if let Some(reason) = trainer.learner().gather_reason() {
            self.report.note(&format!("the first rank gathers the weights of every version: {reason}"));
        }
    }

    /// The sampler's turns on the device that it shares with `trainer`, if the recipe places both there.
    fn shared_device(&self, trainer: &mut Trainer, prepared: &Prepared) -> Option<DeviceTurn> {
        self.recipe.is_colocated().then(|| {
            let [first, second] = turns::share_device("the trainer", "a sampler", allocator::release);
            trainer.colocate(first, self.run_dir.path(), &prepared.budget);
            second
        })
    }

    /// The schedule of the run, if the recipe wants one. Otherwise one from before a resume keeps the steps up to its checkpoint.
    fn schedule(&self, trainer: &Trainer) -> Result<Option<ScheduleRecorder>, Failure> {
        if !self.recipe.log.schedule {
            match schedule::cut_after(&schedule::path(self.run_dir.path()), trainer.version()) {
                // The run does without it.
                Err(error) if error.is_input() => self.report.note(&format!("warning: {error}")),
                cut => cut?,
            }
            return Ok(None);
        }
        let path = self.run_dir.resolved_recipe();
        let system = |source| Failure::System { what: format!("read {}", path.display()), source };
        let recipe = std::fs::read_to_string(&path).map_err(system)?;
        Ok(Some(ScheduleRecorder::start(self.run_dir.path(), recipe, trainer, &self.report)?))
    }

    /// Leaves the other islands.
    fn leave(&self, coordinator: &CoordinatorClient) {
        if let Err(error) = coordinator.leave() {
            let note = format!("warning: {error}; the other islands wait until the deadline of a round");
            self.report.note(&note);
        }
    }

    /// The inputs of the auxiliary models.
    pub(super) fn auxiliary<'b>(&'b self, start: &'b StartingState) -> AuxiliarySetup<'b> {
        AuxiliarySetup {
            recipe: self.recipe,
            run_dir: self.run_dir,
            directory: &start.directory,
            learner: &start.learner,
            state: &start.state,
            prepared: &start.prepared,
            cores: &self.cores,
            leader: self.leader.as_ref(),
        }
    }

    /// The sampler of this process, with the weights that training starts from.
    fn worker(
        &self,
        start: &StartingState,
        services: &RunServices,
        weights: &WeightPublishing,
    ) -> Result<Worker, Failure> {
        let prepared = &start.prepared;
        let sampler = match self.recipe.engine_kind() {
            Some(kind) => self.engines(kind, start, services)?,
            None => self.own_engine(start, services, weights)?,
        };
        let sampler = match &prepared.agents {
            Some(agents) => agents.training(sampler),
            None => sampler,
        };
        let curation = curation::open(self.recipe, self.run_dir, &prepared.train)?;
        let Some(rewards) = prepared.rewards.clone() else {
            return Err(Failure::Argument(
                "the recipe samples, and has no rewards: add one under [[rewards]]".to_owned(),
            ));
        };
        let producer: Arc<dyn Producer> = Arc::clone(&services.buffer.producer);
        let capacity = self.recipe.rollout.max_running * 2;
        let scorer = Scorer::start(self.runtime.handle(), rewards, producer, curation.clone(), capacity);
        // A sampler with an id asks less often, as one far from the buffer should.
        let holder = services.buffer.own.is_none().then_some(OWN_SAMPLER);
        let config = WorkerConfig { holder, ..self.recipe.worker() };
        let worker = Worker::new(config, sampler, Arc::clone(&prepared.train), scorer);
        Ok(worker.acting_in(prepared.episodes.clone()).curated(curation))
    }

    /// The engine of this process.
    fn own_engine(
        &self,
        start: &StartingState,
        services: &RunServices,
        weights: &WeightPublishing,
    ) -> Result<Box<dyn Sampler>, Failure> {
        let StartingState { learner, directory, prepared, state, .. } = start;
        let (dtype, serve_on) = (weights.dtype(self.recipe), self.recipe.serve_on()?);
        let network = published_network(&serve_on, directory.config(), learner, dtype)?;
        // The next version is uploaded on another stream than the engine's.
        let on = self.recipe.serve_on()?;
        let on = match learner.adapted() {
            Some(policy) => on.adapted(policy),
            None => on,
        };
        let incoming = weights.incoming(self.recipe, &services.hub, network.config(), on)?;
        let setup = SamplerSetup { recipe: self.recipe, directory, prepared };
        setup
            .updated(SamplerWeights { version: state.version, network, incoming }, self.recipe.is_colocated())
    }

    /// Engines of others.
    fn engines(
        &self,
        kind: EngineKind,
        start: &StartingState,
        services: &RunServices,
    ) -> Result<Box<dyn Sampler>, Failure> {
        let StartingState { directory, prepared, .. } = start;
        let subscriber = Arc::new(services.hub.subscribe(SAMPLER_NAME)?);
        let report = Arc::clone(&self.report);
        let setup = EngineSetup {
            recipe: self.recipe,
            weights_dir: self.run_dir.path().join(engines::WEIGHTS),
            directory,
            prepared,
            notice: Box::new(move |text| report.note(text)),
        };
        setup.sampler(kind, subscriber)
    }

    /// Starts the watchdog over trainer and samplers.
    fn watch(&self, samplers: &Samplers, watched: WatchedRun) -> Result<Watchdog, Failure> {
        let WatchedRun { consumer, hub, own, status, timeline } = watched;
        let view = WatchdogView {
            progress: Arc::clone(&self.progress),
            local: samplers.local.as_ref().map(|sampler| Arc::clone(&sampler.progress)),
            registry: Arc::clone(&samplers.registry),
            consumer,
            hub,
            peers: Arc::clone(&self.peers),
            heartbeat: Duration::from_secs_f64(self.recipe.deadlines.heartbeat_s),
            report: Arc::clone(&self.report),
            status,
            buffer: own,
        };
        let report = Arc::clone(&self.report);
        // With this status a controller starts the process again.
        let status = if self.listener.is_some() { i32::from(REQUEUE) } else { 1 };
        let end = move || std::process::exit(status);
        let limits = trainer_progress::limits(self.recipe);
        let quiet = limits.quiet.as_secs_f64();
        Watchdog::start(
            limits,
            move || view.snapshot(),
            move |text| {
                report.note(text);
                timeline.iter().for_each(|timeline| timeline.stalled(quiet, text));
            },
            end,
        )
    }
}
