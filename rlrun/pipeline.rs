//! The pipeline: who runs, in which order it starts and stops, and what is written down.
//!
//! ```text
//! tasks -> sampler thread -> rewards (tokio) -> buffer -> trainer (this thread) -> weights -> sampler
//! ```
//!
//! Invariant: it owns nothing that flows through. Groups go by the buffer, versions by the weights; the pipeline starts
//! both sides, measures, and stops the other when one ends.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use buffer::{Consumer, Journal, Memory, Producer};
use model::{Decoder, ModelDirectory, Purpose};
use rollout::applier::Applier;
use rollout::evaluate::Evaluation;
use rollout::scoring::Scorer;
use rollout::{Engine, Progress, RolloutError, Worker};
use trainer::{Checkpoint, Learner, StepReport, Trainer, TrainerState};
use trajectory::PolicyVersion;
use weights::Publisher;

use crate::failure::Failure;
use crate::observe::{Observer, StepInputs};
use crate::prepare::{Bench, Prepared};
use crate::recipe::Recipe;
use crate::recipe::words::Store;
use crate::report::{Report, SamplePair, Summary};
use crate::run_dir::RunDir;
use crate::signals::Signals;
use crate::warmup::warm_up;

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
pub fn run(recipe: &Recipe, run_dir: &RunDir, report: &Report) -> Result<Ending, Failure> {
    let signals = Signals::listen()?;
    let logs = run_dir.logs();
    let system = |source| Failure::System { what: format!("write a log in {}", logs.display()), source };
    report.log_to(&logs).map_err(system)?;
    let bench = Bench::new()?;
    let mut observer = Observer::new(recipe, run_dir, report)?;
    let Some((prepared, start)) = starting_point(recipe, run_dir, (&bench, report), &signals)? else {
        return Ok(Ending::Stopped);
    };
    observer.event(
        "start",
        &serde_json::json!({ "version": start.state.version, "time_s": start.state.time_s }),
    )?;
    observer.resume_after(start.state.version)?;
    let before = start.evaluation.clone();
    if let Some(evaluation) = &start.evaluation {
        observer.initial(start.state.version, evaluation)?;
    }
    let (ending, trainer, after) =
        train(recipe, run_dir, (&prepared, &bench, start), (&signals, report), &mut observer)?;
    let summary = Summary {
        accuracy_before: observer.first_accuracy().or(before.as_ref().map(Evaluation::accuracy)),
        accuracy_after: after.as_ref().map(Evaluation::accuracy),
        steps: trainer.version().0,
        time_s: trainer.time_s(),
        run_dir: run_dir.path().to_path_buf(),
        samples: pairs(before.as_ref(), after.as_ref()),
    };
    observer.event(
        "end",
        &serde_json::json!({ "version": trainer.version(), "ending": format!("{ending:?}") }),
    )?;
    match ending {
        Ending::Done => report.summary(&summary),
        Ending::Stopped => report.note(&format!(
            "stopped after step {}; everything is saved; go on with: rlrun resume {}",
            trainer.version().0,
            run_dir.path().display()
        )),
    }
    Ok(ending)
}

/// What training starts from.
struct Start {
    learner: Learner,
    directory: ModelDirectory,
    state: TrainerState,
    evaluation: Option<Evaluation>,
}

/// The last checkpoint, or the model of the recipe, warmed up if the recipe says so. `None` if it was stopped.
fn starting_point(
    recipe: &Recipe,
    run_dir: &RunDir,
    (bench, report): (&Bench, &Report),
    signals: &Signals,
) -> Result<Option<(Prepared, Start)>, Failure> {
    let checkpoints = run_dir.checkpoints();
    if let Some(version) = trainer::checkpoint::list(&checkpoints).pop() {
        let path = trainer::checkpoint::path(&checkpoints, version);
        let Checkpoint { directory, parameters, optimizer, state } =
            trainer::checkpoint::load(&path, recipe.adamw())?;
        let prepared = Prepared::new(recipe, &directory)?;
        let learner = Learner::new(recipe.learner(), directory.config().clone(), parameters, Some(optimizer));
        report.note(&format!("resumed after step {} from {}", version.0, path.display()));
        return Ok(Some((prepared, Start { learner, directory, state, evaluation: None })));
    }
    let directory = recipe.open_model(run_dir.path())?;
    let prepared = Prepared::new(recipe, &directory)?;
    prepared.announce(report, &directory);
    let model = directory.config().clone();
    let mut parameters = directory.load_parameters()?;
    if recipe.warmup.is_some() {
        let Some(warm) = warmed_up(recipe, (&prepared, bench, report), (&directory, parameters), signals)?
        else {
            return Ok(None);
        };
        parameters = warm;
    }
    let learner = Learner::new(recipe.learner(), model, parameters, None);
    let state = TrainerState::new(PolicyVersion::default(), 0, 0, 0.0);
    if recipe.warmup.is_some() && recipe.checkpoint.interval > 0 {
        trainer::checkpoint::save(&checkpoints, &directory, &learner, &state, recipe.checkpoint.keep_last)?;
    }
    let evaluation = prepared.evaluate(recipe, &learner, &directory, bench)?;
    Ok(Some((prepared, Start { learner, directory, state, evaluation })))
}

fn warmed_up(
    recipe: &Recipe,
    (prepared, bench, report): (&Prepared, &Bench, &Report),
    (directory, parameters): (&ModelDirectory, model::Parameters),
    signals: &Signals,
) -> Result<Option<model::Parameters>, Failure> {
    let Some(warmup) = &recipe.warmup else { return Ok(Some(parameters)) };
    let mut config = recipe.learner();
    config.adamw = trainer::adamw::AdamWConfig { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0 };
    let mut learner = Learner::new(config, directory.config().clone(), parameters, None);
    let phase = report.phase("warm-up", warmup.steps as u64);
    let mut last_loss = 0.0;
    let tasks = prepared.train_tasks();
    warm_up(warmup, recipe.seed, (&mut learner, directory), &tasks, |step, loss, learner| {
        last_loss = loss;
        phase.set(step, &format!("loss {loss:.3}"));
        if let Some(wanted) = warmup.stop_accuracy
            && step.is_multiple_of(50)
            && let Some(evaluation) = prepared.evaluate(recipe, learner, directory, bench)?
            && evaluation.accuracy() >= wanted
        {
            return Ok(false);
        }
        Ok(!signals.stop_requested())
    })?;
    if signals.stop_requested() {
        phase.finish("stopped; the warm-up starts again with `rlrun resume`");
        return Ok(None);
    }
    phase.finish(&format!(
        "loss {last_loss:.3} on demonstrations of which {:.0} % are wrong",
        100.0 * warmup.wrong_share
    ));
    Ok(Some(learner.into_parameters()))
}

/// Runs sampler and trainer until all steps are done or somebody stops.
fn train(
    recipe: &Recipe,
    run_dir: &RunDir,
    (prepared, bench, start): (&Prepared, &Bench, Start),
    (signals, report): (&Signals, &Report),
    observer: &mut Observer<'_>,
) -> Result<(Ending, Trainer, Option<Evaluation>), Failure> {
    let (producer, consumer) = open_buffer(recipe, run_dir.path())?;
    let (publisher, hub) = weights::memory::hub();
    let publisher: Arc<dyn Publisher> = Arc::new(publisher);
    let subscriber = Arc::new(hub.subscribe("sampler 0")?);
    let model = start.directory.config().clone();

    let longest = prepared.train.longest().max(prepared.eval.as_ref().map_or(0, rollout::PromptSet::longest));
    let decoder = Decoder::new(&model, start.learner.parameters(), Purpose::Inference);
    let stop_rules = recipe.stop_rules(&start.directory);
    let engine = Engine::new(recipe.engine(longest), stop_rules, decoder, start.state.version)?;
    let capacity = recipe.rollout.max_running * 2;
    let scorer =
        Scorer::start(bench.handle(), Arc::clone(&prepared.rewards), Arc::clone(&producer), capacity);
    let applier = Applier::start(subscriber, model);
    let worker = Worker::new(recipe.worker(), engine, Arc::clone(&prepared.train), applier, scorer);
    let eval_directory = ModelDirectory::open(start.directory.path())?;

    let stop = signals.stop_flag();
    let config = recipe.trainer(run_dir.checkpoints());
    let edges = (consumer, publisher);
    let mut trainer =
        Trainer::start(config, (start.learner, &start.state), start.directory, edges, Arc::clone(&stop))?;
    let sampler = Sampler::spawn(worker, producer, Arc::clone(&stop))?;
    let mut last_evaluation = None;
    let trained =
        steps(recipe, (&mut trainer, &sampler), (observer, report), &mut last_evaluation, |trainer| {
            prepared.evaluate(recipe, trainer.learner(), &eval_directory, bench)
        });
    let was_stopped = stop.swap(true, Ordering::Relaxed);
    let sampled = sampler.join();
    // An error of the sampler stops the trainer, so it comes first; otherwise the trainer's own counts.
    sampled?;
    trained?;
    let ending = if trainer.version().0 >= recipe.trainer.steps { Ending::Done } else { Ending::Stopped };
    debug_assert!(was_stopped || ending == Ending::Done, "only a stop ends a run before its last step");
    if recipe.checkpoint.interval > 0 {
        trainer.checkpoint()?;
    }
    Ok((ending, trainer, last_evaluation))
}

/// The training steps, each measured; evaluations where they are due.
fn steps(
    recipe: &Recipe,
    (trainer, sampler): (&mut Trainer, &Sampler),
    (observer, report): (&mut Observer<'_>, &Report),
    last_evaluation: &mut Option<Evaluation>,
    evaluate: impl Fn(&Trainer) -> Result<Option<Evaluation>, Failure>,
) -> Result<(), Failure> {
    let mut progress = Progress::default();
    let phase = report.phase("training", recipe.trainer.steps);
    phase.set(trainer.version().0, "");
    while trainer.version().0 < recipe.trainer.steps {
        let clock = std::time::Instant::now();
        let Some(step): Option<StepReport> = trainer.step()? else { break };
        let version = trainer.version().0;
        let due = recipe.eval.interval > 0 && version.is_multiple_of(recipe.eval.interval);
        let evaluation = if due || version == recipe.trainer.steps { evaluate(trainer)? } else { None };
        let now = sampler.progress();
        observer.step(&StepInputs {
            step: &step,
            evaluation: evaluation.as_ref(),
            sampler: (progress, now),
            step_s: clock.elapsed().as_secs_f64(),
            time_s: trainer.time_s(),
        })?;
        progress = now;
        phase.set(version, &format!("reward {:.3}", step.batch.reward.mean));
        if evaluation.is_some() {
            *last_evaluation = evaluation;
        }
    }
    if last_evaluation.is_none() && trainer.version().0 >= recipe.trainer.steps {
        *last_evaluation = evaluate(trainer)?;
    }
    Ok(())
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

/// The two ends of one buffer.
type BufferEnds = (Arc<dyn Producer>, Arc<dyn Consumer>);

fn open_buffer(recipe: &Recipe, run_dir: &Path) -> Result<BufferEnds, Failure> {
    let config = recipe.buffer_config();
    Ok(match recipe.buffer.store {
        Store::Redb => {
            let buffer = Arc::new(Journal::open(run_dir.join("buffer.redb"), config)?);
            (Arc::clone(&buffer) as Arc<dyn Producer>, buffer)
        }
        Store::Memory => {
            let buffer = Arc::new(Memory::new(config)?);
            (Arc::clone(&buffer) as Arc<dyn Producer>, buffer)
        }
    })
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
