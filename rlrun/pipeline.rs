//! The pipeline: who runs, in which order it starts and stops, and what is written down.
//!
//! ```text
//! tasks -> sampler thread -> rewards (tokio) -> buffer -> trainer (this thread) -> weights -> sampler
//! ```
//!
//! Invariant: it owns nothing that flows through. Groups go by the buffer, versions by the weights; the pipeline starts
//! both sides, measures, and stops the other when one ends. A run without sampling is in `rlrun/pipeline/without_sampling.rs`.

mod exchange;
mod push;
mod rewind;
mod samplers;
mod start;
mod view;
mod without_sampling;

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use buffer::{Consumer, GroupLimits, Producer};
use collective::tcp;
use model::{ModelDirectory, SharedCores};
use rewards::RewardSet;
use rollout::applier::{Applier, Incoming};
use rollout::curation::Curation;
use rollout::evaluate::Watch;
use rollout::scoring::Scorer;
use rollout::{Engine, LocalSampler, Network, Progress, Worker};
use trainer::{Leader, Learner, Trainer, TrainerError, TrainerParts, TrainerState};
use trajectory::PolicyVersion;
use weights::Hub;

use crate::auxiliary_models::Starting;
use crate::curation;
use crate::evaluation::{Evaluated, Which};
use crate::failure::{Failure, REQUEUE};
use crate::forward_edge::{Door, Edge, Opening};
use crate::observe::{Observer, StepInputs};
use crate::peers::Peers;
use crate::prepare::{Prepared, RewardRuntime};
use crate::program::Program;
use crate::recipe::Recipe;
use crate::recipe::words::{Ranks, Store};
use crate::report::{Report, SamplePair, Summary};
use crate::run_dir::RunDir;
use crate::signals::Signals;
use crate::stage::{self, Doing, Stage};
use crate::watchdog::Watchdog;
use crate::workers::membership::{derived, token};
use crate::workers::reward::is_served;
use crate::workers::trainer::MEETING;
use exchange::Exchange;
use push::Push;
use samplers::{SamplerThread, Samplers};
use start::Start;
use view::View;

/// Pairs of answers shown at the end.
const SHOWN: usize = 6;

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// All steps are done.
    Done,
    /// It was asked to stop, and saved.
    Stopped,
    /// The same by a launcher, which should start it again.
    Requeued,
}

/// Trains as `recipe` says, in `run_dir`, from its last checkpoint if there is one.
///
/// # Errors
/// Whatever ended the run.
pub fn run(
    recipe: &Recipe,
    run_dir: &RunDir,
    report: &Arc<Report>,
    program: &Program,
) -> Result<Ending, Failure> {
    run_in(recipe, run_dir, report, RunOptions::new(program))
}

/// What a run uses of its process, and what replaces parts of its recipe.
#[derive(Debug)]
pub struct RunOptions {
    /// The cores that sampler and trainer share.
    pub(crate) cores: Arc<SharedCores>,
    /// The kinds of rewards that the recipe names, and the variables of the process.
    pub(crate) program: Program,
    /// Rewards in place of the recipe's.
    pub(crate) rewards: Option<Arc<RewardSet>>,
    /// The listener that the controller has opened for the workers; without it the sampler is a thread of this process.
    pub(crate) door: Option<Door>,
    /// The leader of ranks that a launcher has started.
    pub(crate) leader: Option<Arc<Leader>>,
    /// The checkpoint to resume from; the last by default.
    pub(crate) from: Option<PolicyVersion>,
}

impl RunOptions {
    /// All cores of the machine and the rewards of the recipe.
    #[must_use]
    pub fn new(program: &Program) -> Self {
        let (cores, program) = (SharedCores::all(), program.clone());
        Self { cores, rewards: None, program, door: None, leader: None, from: None }
    }

    /// Computes on `cores`.
    #[must_use]
    pub fn cores(self, cores: Arc<SharedCores>) -> Self {
        Self { cores, ..self }
    }

    /// Scores with `rewards` in place of those of the recipe.
    #[must_use]
    pub fn rewards(self, rewards: Option<Arc<RewardSet>>) -> Self {
        Self { rewards, ..self }
    }
}

/// [`run`] with options.
///
/// # Errors
/// Whatever ended the run.
pub fn run_in(
    recipe: &Recipe,
    run_dir: &RunDir,
    report: &Arc<Report>,
    options: RunOptions,
) -> Result<Ending, Failure> {
    let signals = Signals::listen()?;
    let logs = run_dir.logs();
    let system = |source| Failure::System { what: format!("write a log in {}", logs.display()), source };
    report.log_to(&logs).map_err(system)?;
    let RunOptions { cores, rewards, program, door, leader, from } = options;
    let runtime = RewardRuntime::new(&program, &cores)?;
    let report = Arc::clone(report);
    let (limits, peers, stage) = (Arc::default(), Arc::default(), Arc::default());
    let mut run = Run {
        recipe,
        run_dir,
        report,
        rewards,
        runtime,
        signals,
        cores,
        door,
        leader,
        from,
        limits,
        peers,
        stage,
    };
    run.go()
}

/// What all parts of a run need.
struct Run<'a> {
    recipe: &'a Recipe,
    run_dir: &'a RunDir,
    report: Arc<Report>,
    /// In place of the recipe's.
    rewards: Option<Arc<RewardSet>>,
    runtime: RewardRuntime,
    signals: Signals,
    cores: Arc<SharedCores>,
    door: Option<Door>,
    /// Of the ranks of the trainer, where they are processes.
    leader: Option<Arc<Leader>>,
    /// The checkpoint to go on from, if it is not the last.
    from: Option<PolicyVersion>,
    /// What groups from elsewhere must keep to, once the model is open.
    limits: Arc<OnceLock<GroupLimits>>,
    /// What other processes sent that was refused.
    peers: Arc<Peers>,
    /// What this thread does.
    stage: Arc<Stage>,
}

/// What training ends with.
struct Trained {
    version: PolicyVersion,
    time_s: f64,
    /// Of the last version, if it was evaluated.
    evaluation: Option<Evaluated>,
    /// Whether all steps are done and their evaluation was stopped.
    cut_short: bool,
}

impl Run<'_> {
    fn go(&mut self) -> Result<Ending, Failure> {
        let exchange = match &self.recipe.supervised {
            Some(_) => None,
            None => Some(self.exchange()?),
        };
        self.meet_servers(exchange.as_ref())?;
        self.meet_ranks(exchange.as_ref())?;
        self.run(exchange)
    }

    /// Waits for the other processes of the trainer, if it has some that join.
    fn meet_ranks(&mut self, exchange: Option<&Exchange>) -> Result<(), Failure> {
        let (Some(exchange), Ranks::Processes) = (exchange, self.recipe.trainer.ranks) else { return Ok(()) };
        let Some(served) = &exchange.edge.served else { return Ok(()) };
        let own = self.recipe.buffer.token_file.as_deref().map(|file| token(file, "writer")).transpose()?;
        let known = self.door.as_ref().map(|door| door.token.as_str()).or(own.as_deref());
        let secret = derived(known, MEETING).unwrap_or_default();
        let address = SocketAddr::new(served.address.ip(), 0);
        let listener = tcp::Listener::bind(address, secret.as_bytes()).map_err(TrainerError::from)?;
        let system = |source| Failure::System { what: "read the address for ranks".to_owned(), source };
        let port = listener.local_addr().map_err(system)?.port();
        exchange.desk.meet(Some(port));
        let (world, wait) = (self.recipe.trainer.world, self.recipe.wait());
        self.report.note(&format!("waiting for {} more ranks of the trainer", world - 1));
        let collective = listener.accept(world, wait).map_err(TrainerError::from)?;
        // One that comes later, because it was started again, waits until this process is started again too.
        exchange.desk.meet(None);
        self.leader = Some(Leader::new(Arc::new(collective)));
        Ok(())
    }

    /// What stands between those who sample and those who train, before either is there.
    fn exchange(&self) -> Result<Exchange, Failure> {
        let opening = Opening {
            recipe: self.recipe,
            run_dir: self.run_dir.path(),
            runtime: &self.runtime,
            report: &self.report,
            door: self.door.as_ref(),
            has_begun: self.run_dir.has_begun(),
            limits: &self.limits,
            peers: &self.peers,
        };
        Exchange::open(&opening, &self.run_dir.resolved_recipe())
    }

    /// Waits for the processes that serve the reward models of a run of processes.
    fn meet_servers(&mut self, exchange: Option<&Exchange>) -> Result<(), Failure> {
        let (Some(exchange), Some(_)) = (exchange, &self.door) else { return Ok(()) };
        let wanted = self.recipe.rewards.iter().filter(|spec| is_served(spec));
        let wanted: Vec<&str> = wanted.map(|spec| spec.name()).collect();
        let stop = self.signals.stop_flag();
        self.runtime.ask(exchange.servers(&wanted, self.recipe.wait(), &stop)?);
        Ok(())
    }

    fn run(&self, exchange: Option<Exchange>) -> Result<Ending, Failure> {
        let mut observer = Observer::new(self.recipe, self.run_dir, &self.report)?;
        let stopped = || if self.signals.terminated() { Ending::Requeued } else { Ending::Stopped };
        let report = Arc::clone(&self.report);
        let watchdog = self.stage.watch_alone(self.recipe, move |text| report.note(text))?;
        let Some(start) = self.starting_point(&mut observer)? else { return Ok(stopped()) };
        let version = start.state.version;
        observer.event("start", &serde_json::json!({ "version": version, "time_s": start.state.time_s }))?;
        observer.resume_after(version)?;
        if let Some(evaluation) = &start.evaluation {
            observer.initial(version, evaluation)?;
        }
        let before = start.evaluation.clone();
        let trained = match (&self.recipe.supervised, exchange) {
            (None, Some(exchange)) => self.train(start, exchange, &mut observer, watchdog)?,
            (Some(supervised), _) => self.supervise(supervised, start, &mut observer)?,
            (None, None) => unreachable!("what is sampled for is opened first"),
        };
        observer.diagnosis().iter().for_each(|line| self.report.note(line));
        let done = trained.version.0 >= self.recipe.trainer.steps && !trained.cut_short;
        let ending = if done { Ending::Done } else { stopped() };
        observer.event("end", &serde_json::json!({ "version": trained.version, "done": done }))?;
        if done {
            let accuracy = trained.evaluation.as_ref().and_then(Evaluated::accuracy);
            self.report.summary(&Summary {
                accuracy_before: accuracy.as_ref().and_then(|(metric, _)| observer.first_value(metric)),
                accuracy_after: accuracy.map(|(_, accuracy)| accuracy),
                steps: trained.version.0,
                time_s: trained.time_s,
                run_dir: self.run_dir.path().to_path_buf(),
                samples: pairs(before.as_ref(), trained.evaluation.as_ref()),
            });
        } else {
            let (step, dir) = (trained.version.0, self.run_dir.path().display());
            self.report.note(&format!(
                "stopped after step {step}; everything is saved; go on with: rlrun resume {dir}"
            ));
        }
        Ok(ending)
    }

    /// Runs sampler and trainer until all steps are done or somebody stops.
    fn train(
        &self,
        start: Start,
        exchange: Exchange,
        observer: &mut Observer<'_>,
        watchdog: Watchdog,
    ) -> Result<Trained, Failure> {
        self.stage.enter(Doing::Opening);
        let Start { learner, directory, prepared, state, went_back, .. } = start;
        let auxiliary = self.beside(&learner, (&directory, &prepared), &state).auxiliary_models()?;
        let Exchange { edge, hub, roster, desk } = exchange;
        let Edge { producer, consumer, own, served } = edge;
        self.rewind((own.as_ref(), &consumer), (state.version, went_back), observer)?;
        desk.describe(&directory)?;
        let stop = self.signals.stop_flag();
        let push = Push::new(self.recipe, &hub, served.is_some(), self.door.is_none())?;
        let worker = match self.door {
            Some(_) => None,
            None => Some(self.worker(&learner, (&directory, &prepared), &state, (&producer, &hub, &push))?),
        };
        let rewards = prepared.rewards.clone().filter(|_| worker.is_some());

        let config = self.recipe.trainer(self.run_dir.checkpoints());
        let evaluated = self.recipe.opened(directory.path())?;
        let (buffer, publisher, stop_flag) = (Arc::clone(&consumer), push.publishing(), Arc::clone(&stop));
        let parts = TrainerParts { learner, auxiliary, directory, buffer, publisher, stop: stop_flag };
        let mut trainer = Trainer::start(config, parts, &state)?;
        if let Some(lost) = trainer.lost_lease() {
            self.report.note(&format!("warning: {lost}; the checkpoint contains these groups all the same"));
        }
        let seats = self
            .recipe
            .is_colocated()
            .then(|| model::turns::share_device("the trainer", "a sampler", crate::allocator::release));
        let seat = seats.map(|[first, second]| {
            trainer.colocate(first, self.run_dir.path(), &prepared.budget);
            second
        });
        let worker = worker.map(|worker| worker.taking_turns(turn)).transpose()?;
        let inside =
            worker.map(|worker| SamplerThread::spawn(worker, producer, Arc::clone(&stop))).transpose()?;
        let mut samplers = Samplers { inside, roster, rewards };
        // From here on it looks at the samplers too.
        drop(watchdog);
        let watchdog = self.watch(&samplers, (consumer, hub.clone()))?;
        let trained = self.steps(&mut trainer, (&samplers, &push), observer, |trainer| {
            self.evaluate(&prepared, trainer.learner(), &evaluated)
        });
        drop(watchdog);
        let cut_short = self.is_cut_short(&prepared);
        stop.store(true, Ordering::Relaxed);
        let joined = samplers.join();
        // What was trained is kept, however the sampler ended.
        let saved = trained.is_ok().then(|| observer.sync().and_then(|()| Ok(trainer.last_checkpoint()?)));
        samplers.part();
        // An error of the sampler stops the trainer, so it comes first; otherwise the trainer's own counts.
        joined?;
        let evaluation = trained?;
        saved.transpose()?;
        let cut_short = cut_short && evaluation.is_none();
        Ok(Trained { version: trainer.version(), time_s: trainer.time_s(), evaluation, cut_short })
    }

    /// The sampler of this process, around the weights that training starts from.
    fn worker(
        &self,
        learner: &Learner,
        (directory, prepared): (&ModelDirectory, &Prepared),
        state: &TrainerState,
        (producer, hub, push): (&Arc<dyn Producer>, &Hub, &Push),
    ) -> Result<Worker, Failure> {
        let on = self.recipe.serve_on()?;
        let network = Network::new(&on, directory.config(), &*learner.parameters()?)?;
        let engine = self.recipe.engine(prepared.train.longest());
        let stop_rules = self.recipe.stop_rules(directory);
        let interruption = self.recipe.interruption(&stop_rules)?;
        let engine = Engine::new(engine, stop_rules, network, state.version)?
            .interrupting(interruption)
            .on(Arc::clone(&prepared.pool));
        let curation = curation::open(self.recipe, self.run_dir, &prepared.train)?;
        let incoming = push.incoming(self.recipe, hub, engine.model())?;
        Ok(self.sampler(engine, prepared, (Arc::clone(producer), curation), incoming))
    }

    /// The thread that notices when the run does not get on.
    fn watch(
        &self,
        samplers: &Samplers,
        (consumer, hub): (Arc<dyn Consumer>, Hub),
    ) -> Result<Watchdog, Failure> {
        let view = View {
            stage: Arc::clone(&self.stage),
            inside: samplers.inside.as_ref().map(|sampler| Arc::clone(&sampler.progress)),
            roster: Arc::clone(&samplers.roster),
            consumer,
            hub,
            peers: Arc::clone(&self.peers),
            heartbeat: Duration::from_secs_f64(self.recipe.deadlines.heartbeat_s),
            report: Arc::clone(&self.report),
        };
        let report = Arc::clone(&self.report);
        // A controller starts it again.
        let status = if self.door.is_some() { i32::from(REQUEUE) } else { 1 };
        let end = move || std::process::exit(status);
        Watchdog::start(stage::limits(self.recipe), move || view.look(), move |text| report.note(text), end)
    }

    /// What stands beside the policy that training starts from.
    fn beside<'b>(
        &'b self,
        learner: &'b Learner,
        (directory, prepared): (&'b ModelDirectory, &'b Prepared),
        state: &'b TrainerState,
    ) -> Starting<'b> {
        let (cores, leader) = (&self.cores, self.leader.as_ref());
        let (recipe, run_dir) = (self.recipe, self.run_dir);
        Starting { recipe, run_dir, directory, learner, state, prepared, cores, leader }
    }

    /// A sampler around `engine`, with its rewards and its source of weights.
    fn sampler(
        &self,
        engine: Engine,
        prepared: &Prepared,
        (producer, curation): (Arc<dyn Producer>, Option<Curation>),
        incoming: Incoming,
    ) -> Worker {
        let capacity = self.recipe.rollout.max_running * 2;
        let Some(rewards) = prepared.rewards.clone() else {
            unreachable!("a recipe without rewards is refused where something is sampled")
        };
        let scorer = Scorer::start(self.runtime.handle(), rewards, producer, curation.clone(), capacity);
        let applier = match self.recipe.is_colocated() {
            true => Applier::inline(incoming),
            false => Applier::start(incoming),
        };
        let sampler = Box::new(LocalSampler::new(engine, applier));
        let worker = Worker::new(self.recipe.worker(), sampler, Arc::clone(&prepared.train), scorer);
        worker.curated(curation)
    }

    /// The training steps, each measured; evaluations where they are due. Returns that of the last version.
    fn steps(
        &self,
        trainer: &mut Trainer,
        (samplers, push): (&Samplers, &Push),
        observer: &mut Observer<'_>,
        evaluate: impl Fn(&Trainer) -> Result<Option<Evaluated>, Failure>,
    ) -> Result<Option<Evaluated>, Failure> {
        let (steps, interval) = (self.recipe.trainer.steps, self.recipe.eval.interval);
        let phase = self.report.phase("training", steps);
        phase.set(trainer.version().0, "");
        let mut window = (Progress::default(), Progress::default());
        let mut last = None;
        let mut clock = Instant::now();
        while trainer.version().0 < steps {
            self.stage.reach(trainer.version());
            self.stage.enter(Doing::Step);
            let Some(step) = trainer.step()? else { return Ok(None) };
            let version = trainer.version().0;
            self.stage.reach(trainer.version());
            let due = version == steps || (interval > 0 && version.is_multiple_of(interval));
            let evaluation = if due && !self.signals.stop_requested() { evaluate(trainer)? } else { None };
            self.stage.enter(Doing::Writing);
            let now = samplers.progress();
            // Other processes say what they did each second; until they say so again, what they said last holds.
            if now != window.1 {
                window = (window.1, now);
            }
            let (lags, refused) = (push.lags()?, self.peers.take());
            observer.step(&StepInputs {
                step: &step,
                push: (push.last()?, &lags),
                evaluation: evaluation.as_ref(),
                rewards: &samplers.take_loads(),
                refused: &refused,
                sampler: window,
                step_s: clock.elapsed().as_secs_f64(),
                time_s: trainer.time_s(),
            })?;
            clock = Instant::now();
            if trainer.checkpoint_due() {
                observer.sync()?;
                trainer.checkpoint()?;
            } else if self.recipe.checkpoint.interval == 0 && self.recipe.buffer.store == Store::Memory {
                trainer.forget()?;
            }
            phase.set(version, &format!("reward {:.3}", step.batch.reward.mean));
            last = evaluation;
        }
        if last.is_none() && !self.signals.stop_requested() {
            // A run that was resumed after its last step has measured nothing yet.
            last = evaluate(trainer)?;
            last.iter().try_for_each(|of| observer.late(trainer.version(), trainer.time_s(), of))?;
        }
        Ok(last)
    }

    /// Answers of the policy as it is trained, in f32 however coarsely it is sampled from; `None` without held-out tasks, or
    /// if it was stopped.
    fn evaluate(
        &self,
        prepared: &Prepared,
        learner: &Learner,
        directory: &ModelDirectory,
    ) -> Result<Option<Evaluated>, Failure> {
        self.look(Which::All, prepared, learner, directory)
    }

    /// The same for some of the sets.
    fn look(
        &self,
        which: Which,
        prepared: &Prepared,
        learner: &Learner,
        directory: &ModelDirectory,
    ) -> Result<Option<Evaluated>, Failure> {
        let sets = prepared.evaluation_sets(self.recipe, which);
        if sets.is_empty() || self.signals.stop_requested() {
            return Ok(None);
        }
        self.stage.enter(Doing::Evaluation);
        let answers: usize = sets.iter().map(|(_, set)| set.answers()).sum();
        let bar = self.report.bar("evaluation", answers as u64);
        let network = Network::new(&self.recipe.evaluate_on()?, learner.model(), &*learner.parameters()?)?;
        let (stop, show) = (self.signals.stop_flag(), |judged| bar.set(judged, ""));
        let watch = Watch { stop: &stop, progress: self.stage.evaluation(), show: &show };
        prepared.evaluate(self.recipe, (network, directory), (&self.runtime, &watch), which)
    }

    /// Whether an evaluation that is missing at the end was stopped.
    fn is_cut_short(&self, prepared: &Prepared) -> bool {
        self.signals.stop_requested() && !prepared.evaluation_sets(self.recipe, Which::All).is_empty()
    }
}

/// The same tasks answered before and after, those first that changed.
fn pairs(before: Option<&Evaluated>, after: Option<&Evaluated>) -> Vec<SamplePair> {
    let (Some(before), Some(after)) = (before, after) else { return Vec::new() };
    let (before, after) = (before.first(), after.first());
    let mut pairs: Vec<SamplePair> = before
        .answers
        .iter()
        .zip(&after.answers)
        .step_by(before.samples.max(1))
        .map(|(before, after)| SamplePair {
            prompt: crate::prepare::prompt_text(&before.task),
            before: before.text.clone(),
            after: after.text.clone(),
        })
        .collect();
    pairs.sort_by_key(|pair| pair.before == pair.after);
    pairs.truncate(SHOWN);
    pairs
}
