//! The pipeline: who runs, in which order it starts and stops, and what is written down.
//!
//! ```text
//! tasks -> sampler thread -> rewards (tokio) -> buffer -> trainer (this thread) -> weights -> sampler
//! ```
//!
//! Invariant: it owns nothing that flows through. Groups go by the buffer, versions by the weights; the pipeline starts
//! both sides, measures, and stops the other when one ends. A run without sampling is in `rlrun/pipeline/without_sampling.rs`.

mod without_sampling;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use buffer::Producer;
use model::{Cores, Decoder, Head, ModelDirectory, Parameters};
use rewards::RewardSet;
use rollout::applier::Applier;
use rollout::curation::Curation;
use rollout::evaluate::Evaluation;
use rollout::scoring::Scorer;
use rollout::{Engine, Progress, RolloutError, Worker};
use trainer::critic::CriticKind;
use trainer::lora::Adapter;
use trainer::optimizer::{Optimizer, OptimizerConfig, OptimizerKind};
use trainer::{Checkpoint, Learner, LearnerConfig, Trainer, TrainerState};
use trajectory::PolicyVersion;
use weights::{Publisher, Subscriber};

use crate::companions::Starting;
use crate::curation;
use crate::failure::Failure;
use crate::forward_edge::{self, Edge};
use crate::observe::{Observer, StepInputs};
use crate::prepare::{Prepared, RewardRuntime};
use crate::program::Program;
use crate::recipe::Recipe;
use crate::recipe::schema::Warmup;
use crate::recipe::words::Store;
use crate::report::{Report, SamplePair, Summary};
use crate::run_dir::RunDir;
use crate::signals::Signals;
use crate::supervised;
use crate::warmup::warm_up;

/// Decay of the second moment in the warm-up.
const WARMUP_BETA2: f32 = 0.95;
/// Steps of the warm-up between looks at the accuracy, if the recipe names one to stop at.
const WARMUP_LOOK_UP: u64 = 50;
/// Pairs of answers shown at the end.
const SHOWN: usize = 6;

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// All steps are done.
    Done,
    /// It was asked to stop, and saved.
    Stopped,
}

/// Trains as `recipe` says, in `run_dir`, from its last checkpoint if there is one.
///
/// # Errors
/// Whatever ended the run.
pub fn run(recipe: &Recipe, run_dir: &RunDir, report: &Report, program: &Program) -> Result<Ending, Failure> {
    let program = program.clone();
    run_in(recipe, run_dir, report, Surroundings { cores: Cores::all(), rewards: None, program })
}

/// What a run finds around it.
#[derive(Debug)]
pub struct Surroundings {
    /// The cores that sampler and trainer share.
    pub cores: Arc<Cores>,
    /// The kinds of rewards that the recipe names, and the variables of the process.
    pub program: Program,
    /// Rewards in place of the recipe's, if there are any.
    pub rewards: Option<Arc<RewardSet>>,
}

/// The same with other surroundings than the whole machine and the recipe's rewards.
///
/// # Errors
/// Whatever ended the run.
pub fn run_in(
    recipe: &Recipe,
    run_dir: &RunDir,
    report: &Report,
    surroundings: Surroundings,
) -> Result<Ending, Failure> {
    let logs = run_dir.logs();
    let system = |source| Failure::System { what: format!("write a log in {}", logs.display()), source };
    report.log_to(&logs).map_err(system)?;
    let Surroundings { cores, rewards, program } = surroundings;
    let (runtime, signals) = (RewardRuntime::new(&program, &cores)?, Signals::listen()?);
    Run { recipe, run_dir, report, rewards, runtime, signals, cores }.go()
}

/// What all parts of a run need.
struct Run<'a> {
    recipe: &'a Recipe,
    run_dir: &'a RunDir,
    report: &'a Report,
    /// In place of the recipe's.
    rewards: Option<Arc<RewardSet>>,
    runtime: RewardRuntime,
    signals: Signals,
    cores: Arc<Cores>,
}

/// What training starts from.
struct Start {
    learner: Learner,
    directory: ModelDirectory,
    prepared: Prepared,
    state: TrainerState,
    /// Answers before the first step; `None` for a run that goes on after another.
    evaluation: Option<Evaluation>,
}

/// What training ends with.
struct Trained {
    version: PolicyVersion,
    time_s: f64,
    evaluation: Option<Evaluation>,
}

impl Run<'_> {
    fn go(&self) -> Result<Ending, Failure> {
        let mut observer = Observer::new(self.recipe, self.run_dir, self.report)?;
        let Some(start) = self.starting_point()? else { return Ok(Ending::Stopped) };
        let version = start.state.version;
        observer.event("start", &serde_json::json!({ "version": version, "time_s": start.state.time_s }))?;
        observer.resume_after(version)?;
        if let Some(evaluation) = &start.evaluation {
            observer.initial(version, evaluation)?;
        }
        let before = start.evaluation.clone();
        let trained = match &self.recipe.supervised {
            Some(supervised) => self.supervise(supervised, start, &mut observer)?,
            None => self.train(start, &mut observer)?,
        };
        let done = trained.version.0 >= self.recipe.trainer.steps;
        let ending = if done { Ending::Done } else { Ending::Stopped };
        observer.event("end", &serde_json::json!({ "version": trained.version, "done": done }))?;
        if done {
            self.report.summary(&Summary {
                accuracy_before: observer.first_accuracy(),
                accuracy_after: trained.evaluation.as_ref().map(Evaluation::accuracy),
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

    /// The last checkpoint, or the model of the recipe, warmed up if the recipe says so. `None` if it was stopped.
    fn starting_point(&self) -> Result<Option<Start>, Failure> {
        let recipe = self.recipe;
        let checkpoints = self.run_dir.checkpoints();
        if let Some(version) = trainer::checkpoint::list(&checkpoints).pop() {
            let path = trainer::checkpoint::path(&checkpoints, version);
            let Checkpoint { directory, parameters, adapter, optimizer, state } =
                trainer::checkpoint::load(&path, recipe.optimizer(), recipe.lora().as_ref())?;
            let prepared = self.prepared(&directory)?;
            let learner = self.learner(&directory, parameters, adapter, Some(optimizer));
            self.report.note(&format!("resumed after step {} from {}", version.0, path.display()));
            // A run that was killed before its first step may have been killed before its first line.
            let first = version == PolicyVersion::default();
            let evaluation = if first { self.evaluate(&prepared, &learner, &directory)? } else { None };
            return Ok(Some(Start { learner, directory, prepared, state, evaluation }));
        }
        let mut directory = recipe.open_model(self.run_dir.path())?;
        let prepared = self.prepared(&directory)?;
        prepared.announce(self.report, &directory);
        let mut parameters = directory.load_parameters()?;
        // What is wrong with an adapter shows before the warm-up, not after it.
        recipe.adapter(&parameters)?;
        if let Some(warmup) = &recipe.warmup {
            let Some(warm) = self.warmed_up(warmup, &prepared, &directory, parameters)? else {
                return Ok(None);
            };
            parameters = warm;
        }
        let shared = recipe.critic().is_some_and(|critic| critic.kind == CriticKind::Shared);
        let head = if shared { Head::LanguageAndValue } else { supervised::head(recipe) };
        if directory.config().head != head {
            directory = directory.with_head(head);
            parameters = parameters.with_head(directory.config());
        }
        let adapter = recipe.adapter(&parameters)?;
        if let Some(adapter) = &adapter {
            let trained = adapter.values().len();
            self.report.note(&format!("LoRA trains {trained} parameters, all others are frozen"));
        }
        let learner = self.learner(&directory, parameters, adapter, None);
        let state = TrainerState::new(PolicyVersion::default(), 0, 0, 0.0);
        if recipe.warmup.is_some() && recipe.checkpoint.interval > 0 {
            let keep = recipe.checkpoint.keep_last;
            trainer::checkpoint::save(&checkpoints, &directory, (&learner, None), &state, keep)?;
        }
        let evaluation = self.evaluate(&prepared, &learner, &directory)?;
        Ok(Some(Start { learner, directory, prepared, state, evaluation }))
    }

    fn prepared(&self, directory: &ModelDirectory) -> Result<Prepared, Failure> {
        let prepared = Prepared::new(self.recipe, directory, (&self.runtime, &self.run_dir.logs()))?;
        Ok(match &self.rewards {
            Some(rewards) => Prepared { rewards: Some(Arc::clone(rewards)), ..prepared },
            None => prepared,
        })
    }

    /// The learner of the training steps, on the cores that the recipe gives the trainer.
    fn learner(
        &self,
        directory: &ModelDirectory,
        parameters: Parameters,
        adapter: Option<Adapter>,
        optimizer: Option<Optimizer>,
    ) -> Learner {
        let (config, model) = (self.recipe.learner(), directory.config().clone());
        let learner = match adapter {
            Some(adapter) => Learner::adapting(config, model, parameters, adapter, optimizer),
            None => Learner::new(config, model, parameters, optimizer),
        };
        learner.on(Arc::new(self.recipe.trainer_team(&self.cores)))
    }

    /// The parameters after the warm-up; `None` if it was stopped.
    fn warmed_up(
        &self,
        warmup: &Warmup,
        prepared: &Prepared,
        directory: &ModelDirectory,
        parameters: Parameters,
    ) -> Result<Option<Parameters>, Failure> {
        // AdamW on all weights, whatever the training steps do; only how it keeps its moments is the recipe's.
        let kind = match self.recipe.trainer.optimizer {
            OptimizerKind::Adamw8bit => OptimizerKind::Adamw8bit,
            OptimizerKind::Adamw | OptimizerKind::Muon | OptimizerKind::Dion => OptimizerKind::Adamw,
        };
        let optimizer = OptimizerConfig::usual(kind, WARMUP_BETA2);
        let config = LearnerConfig { optimizer, ..self.recipe.learner() };
        let mut learner = Learner::new(config, directory.config().clone(), parameters, None)
            .on(Arc::new(self.recipe.trainer_team(&self.cores)));
        let phase = self.report.phase("warm-up", warmup.steps as u64);
        let mut last_loss = 0.0;
        let tasks = prepared.train_tasks();
        warm_up(warmup, self.recipe.seed, (&mut learner, directory), &tasks, |step, loss, learner| {
            last_loss = loss;
            phase.set(step, &format!("loss {loss:.3}"));
            if let Some(wanted) = warmup.stop_accuracy
                && step.is_multiple_of(WARMUP_LOOK_UP)
                && let Some(evaluation) = self.evaluate(prepared, learner, directory)?
                && evaluation.accuracy() >= wanted
            {
                return Ok(false);
            }
            Ok(!self.signals.stop_requested())
        })?;
        if self.signals.stop_requested() {
            phase.finish(&format!(
                "stopped; start it again with: rlrun resume {}",
                self.run_dir.path().display()
            ));
            return Ok(None);
        }
        let wrong = 100.0 * warmup.wrong_share;
        phase.finish(&format!("loss {last_loss:.3} on demonstrations of which {wrong:.0} % are wrong"));
        Ok(Some(learner.into_parameters()))
    }

    /// Runs sampler and trainer until all steps are done or somebody stops.
    fn train(&self, start: Start, observer: &mut Observer<'_>) -> Result<Trained, Failure> {
        let Start { learner, directory, prepared, state, .. } = start;
        let companions = self.beside(&learner, (&directory, &prepared), &state).companions()?;
        let Edge { producer, consumer, served: _served } =
            forward_edge::open(self.recipe, self.run_dir.path(), &self.runtime, self.report)?;
        let (publisher, hub) = weights::memory::hub();
        let subscriber = Arc::new(hub.subscribe("sampler 0")?);
        let quantization = self.recipe.rollout.quantization;
        let decoder = Decoder::sampler(directory.config(), learner.parameters(), quantization);
        let engine = self.recipe.engine(prepared.train.longest());
        let stop_rules = self.recipe.stop_rules(&directory);
        let interruption = self.recipe.interruption(&stop_rules)?;
        let engine = Engine::new(engine, stop_rules, decoder, state.version)?
            .interrupting(interruption)
            .on(Arc::clone(&prepared.team));
        let curation = curation::open(self.recipe, self.run_dir, &prepared.train)?;
        let worker = self.sampler(engine, &prepared, (Arc::clone(&producer), curation), subscriber);

        let stop = self.signals.stop_flag();
        let config = self.recipe.trainer(self.run_dir.checkpoints());
        let edges: (_, Arc<dyn Publisher>) = (consumer, Arc::new(publisher));
        let evaluated = ModelDirectory::open(directory.path())?;
        let mut trainer =
            Trainer::start(config, (learner, companions, &state), directory, edges, Arc::clone(&stop))?;
        let seats = self
            .recipe
            .is_colocated()
            .then(|| model::turns::turns("the trainer", "a sampler", crate::allocator::release));
        let seat = seats.map(|[first, second]| {
            trainer.colocate(first, self.run_dir.path(), &prepared.budget);
            second
        });
        let sampler = Sampler::spawn(worker.taking_turns(seat), producer, Arc::clone(&stop))?;
        let beside = (&sampler, prepared.rewards.as_deref());
        let trained = self.steps(&mut trainer, beside, observer, |trainer| {
            self.evaluate(&prepared, trainer.learner(), &evaluated)
        });
        stop.store(true, Ordering::Relaxed);
        let joined = sampler.join();
        // What was trained is kept, however the sampler ended.
        let saved = trained.is_ok().then(|| trainer.checkpoint()).transpose();
        // An error of the sampler stops the trainer, so it comes first; otherwise the trainer's own counts.
        joined?;
        let evaluation = trained?;
        saved?;
        Ok(Trained { version: trainer.version(), time_s: trainer.time_s(), evaluation })
    }

    /// What stands beside the policy that training starts from.
    fn beside<'b>(
        &'b self,
        learner: &'b Learner,
        (directory, prepared): (&'b ModelDirectory, &'b Prepared),
        state: &'b TrainerState,
    ) -> Starting<'b> {
        let cores = &self.cores;
        Starting { recipe: self.recipe, run_dir: self.run_dir, directory, learner, state, prepared, cores }
    }

    /// A sampler around `engine`, with its rewards and its source of weights.
    fn sampler(
        &self,
        engine: Engine,
        prepared: &Prepared,
        (producer, curation): (Arc<dyn Producer>, Option<Curation>),
        subscriber: Arc<dyn Subscriber>,
    ) -> Worker {
        let capacity = self.recipe.rollout.max_running * 2;
        let Some(rewards) = prepared.rewards.clone() else {
            unreachable!("a recipe without rewards is refused where something is sampled")
        };
        let scorer = Scorer::start(self.runtime.handle(), rewards, producer, curation.clone(), capacity);
        let (config, quantization) = (engine.model().clone(), self.recipe.rollout.quantization);
        let applier = if self.recipe.is_colocated() {
            Applier::inline(subscriber, config, quantization)
        } else {
            Applier::start(subscriber, config, quantization)
        };
        Worker::new(self.recipe.worker(), engine, Arc::clone(&prepared.train), applier, scorer)
            .curated(curation)
    }

    /// The training steps, each measured; evaluations where they are due. Returns the last of them.
    fn steps(
        &self,
        trainer: &mut Trainer,
        (sampler, rewards): (&Sampler, Option<&RewardSet>),
        observer: &mut Observer<'_>,
        evaluate: impl Fn(&Trainer) -> Result<Option<Evaluation>, Failure>,
    ) -> Result<Option<Evaluation>, Failure> {
        let (steps, interval) = (self.recipe.trainer.steps, self.recipe.eval.interval);
        let phase = self.report.phase("training", steps);
        phase.set(trainer.version().0, "");
        let mut progress = Progress::default();
        let mut last = None;
        let mut clock = Instant::now();
        while trainer.version().0 < steps {
            let Some(step) = trainer.step()? else { return Ok(last) };
            let version = trainer.version().0;
            let due = version == steps || (interval > 0 && version.is_multiple_of(interval));
            let evaluation = if due && !self.signals.stop_requested() { evaluate(trainer)? } else { None };
            let now = sampler.progress();
            observer.step(&StepInputs {
                step: &step,
                evaluation: evaluation.as_ref(),
                rewards: &rewards.map(RewardSet::take_loads).unwrap_or_default(),
                sampler: (progress, now),
                step_s: clock.elapsed().as_secs_f64(),
                time_s: trainer.time_s(),
            })?;
            clock = Instant::now();
            progress = now;
            if trainer.checkpoint_due() {
                observer.sync()?;
                trainer.checkpoint()?;
            } else if self.recipe.checkpoint.interval == 0 && self.recipe.buffer.store == Store::Memory {
                trainer.forget()?;
            }
            phase.set(version, &format!("reward {:.3}", step.batch.reward.mean));
            last = evaluation.or(last);
        }
        // A run that was resumed after its last step has measured nothing yet.
        if last.is_none() { evaluate(trainer) } else { Ok(last) }
    }

    /// Answers of the policy as it is trained, in f32 however coarsely it is sampled from.
    fn evaluate(
        &self,
        prepared: &Prepared,
        learner: &Learner,
        directory: &ModelDirectory,
    ) -> Result<Option<Evaluation>, Failure> {
        let decoder = Decoder::new(learner.model(), learner.parameters());
        prepared.evaluate(self.recipe, decoder, directory, &self.runtime)
    }
}

/// The thread of a sampler.
struct Sampler {
    thread: JoinHandle<Result<(), RolloutError>>,
    progress: Arc<Mutex<Progress>>,
}

impl Sampler {
    /// Starts `worker`; if it fails, it sets `stop`.
    fn spawn(worker: Worker, producer: Arc<dyn Producer>, stop: Arc<AtomicBool>) -> Result<Self, Failure> {
        let progress = worker.progress();
        let work = move || {
            let result = worker.run(&*producer, &stop);
            if result.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            result
        };
        let system = |source| Failure::System { what: "start the thread of the sampler".to_owned(), source };
        let thread = std::thread::Builder::new().name("sampler 0".to_owned()).spawn(work).map_err(system)?;
        Ok(Self { thread, progress })
    }

    fn progress(&self) -> Progress {
        *self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn join(self) -> Result<(), Failure> {
        match self.thread.join() {
            Ok(result) => Ok(result?),
            Err(_) => Err(Failure::Internal("the sampler panicked".to_owned())),
        }
    }
}

/// The same tasks answered before and after, those first that changed.
fn pairs(before: Option<&Evaluation>, after: Option<&Evaluation>) -> Vec<SamplePair> {
    let (Some(before), Some(after)) = (before, after) else { return Vec::new() };
    let mut pairs: Vec<SamplePair> = before
        .answers
        .iter()
        .zip(&after.answers)
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
