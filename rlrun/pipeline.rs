//! The pipeline: the parts of a run, the order in which they start and stop, and what is recorded.
//!
//! ```text
//! tasks -> sampler thread -> rewards (tokio) -> buffer -> trainer (this thread) -> weights -> sampler
//! ```
//!
//! - `start`: the checkpoint or the fresh model that training starts from
//! - `services`: the buffer, the weight hub and the listener for workers
//! - `replayed`: training on recorded groups, which are sampled again
//! - `sampled`: training on sampled groups, around the loop in `steps`; `without_sampling`: supervised training
//! - `ranks`: the trainer's ranks that are processes
//! - `admission`: how far samplers run ahead, and how many get slots
//! - `samplers`: the sampler thread and the rollout workers; `weights`: how versions reach them
//! - `evaluate`: held-out tasks; `view`: what the watchdog sees; `rewind`: the buffer after a resume from an older checkpoint
//!
//! Invariant: the pipeline owns no data in flight. Groups go through the buffer and versions through the hub; the pipeline
//! starts sampler and trainer, measures them, and stops one when the other ends.

mod admission;
mod evaluate;
mod ranks;
mod replayed;
mod rewind;
mod sampled;
mod samplers;
mod services;
mod start;
mod steps;
mod view;
mod weights;
mod without_sampling;

use std::sync::{Arc, OnceLock};

use buffer::GroupLimits;
use model::SharedCores;
use rewards::RewardSet;
use trainer::Leader;
use trajectory::PolicyVersion;

pub(crate) use self::replayed::replay_in;
pub(crate) use self::weights::remote_subscriber;
use crate::archive::{self, ArchiveSetup, RunArchive};
use crate::evaluation::Evaluated;
use crate::failure::Failure;
use crate::observe::Observer;
use crate::peers::Peers;
use crate::prepare::RewardRuntime;
use crate::program::Program;
use crate::recipe::Recipe;
use crate::recipe::schema::Supervised;
use crate::report::{Report, Summary};
use crate::run_buffer::RunListener;
use crate::run_dir::RunDir;
use crate::run_page::RunPage;
use crate::signals::Signals;
use crate::trainer_progress::TrainerProgress;
use services::RunServices;

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// All steps are done.
    Done,
    /// The user stopped it, and it saved.
    Stopped,
    /// A launcher stopped it, and it saved; the launcher should start it again.
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

/// The resources of the process that a run uses, and overrides of its recipe.
#[derive(Debug)]
pub struct RunOptions {
    /// The cores that sampler and trainer share.
    pub(crate) cores: Arc<SharedCores>,
    /// The kinds of rewards that the recipe names, and the variables of the process.
    pub(crate) program: Program,
    /// Rewards in place of the recipe's.
    pub(crate) rewards: Option<Arc<RewardSet>>,
    /// The listener that the controller has opened for the workers; without it the sampler is a thread of this process.
    pub(crate) listener: Option<RunListener>,
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
        Self { cores, rewards: None, program, listener: None, leader: None, from: None }
    }

    /// Computes on `cores`.
    #[must_use]
    pub fn cores(self, cores: Arc<SharedCores>) -> Self {
        Self { cores, ..self }
    }

    /// Scores with `rewards` instead of those of the recipe.
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
    let program = options.program.clone();
    let mut run = Run::open(recipe, run_dir, report, options)?;
    run.archive = open_archive(recipe, run_dir, report, &program)?;
    let _page = RunPage::start(recipe, run_dir, run.runtime.handle(), report)?;
    let source = match &recipe.supervised {
        Some(config) => TrainingSource::Supervised(config),
        None => TrainingSource::Sampled(run.open_services()?),
    };
    run.run(source)
}

/// The context that all parts of a run share.
struct Run<'a> {
    recipe: &'a Recipe,
    run_dir: &'a RunDir,
    report: Arc<Report>,
    /// Replaces those of the recipe.
    rewards: Option<Arc<RewardSet>>,
    runtime: RewardRuntime,
    signals: Signals,
    cores: Arc<SharedCores>,
    /// The listener of the controller; without it the sampler is a thread of this process.
    listener: Option<RunListener>,
    /// The leader of the trainer's ranks, where they are processes.
    leader: Option<Arc<Leader>>,
    /// The checkpoint to resume from; the last by default.
    from: Option<PolicyVersion>,
    /// The archive of the run, if its recipe names one.
    archive: Option<Arc<dyn RunArchive>>,
    /// Limits on groups that other processes send, once the model is open.
    limits: Arc<OnceLock<GroupLimits>>,
    /// Requests of other processes that were refused.
    peers: Arc<Peers>,
    /// The phase of this thread.
    progress: Arc<TrainerProgress>,
    /// Whether the policy is evaluated where the recipe says so.
    evaluates: bool,
    /// Whether it repeats a recorded run. A replay that was stopped is not resumed.
    is_replay: bool,
}

/// The archive that the recipe names. Its lead is replaced once training can start.
fn open_archive(
    recipe: &Recipe,
    run_dir: &RunDir,
    report: &Arc<Report>,
    program: &Program,
) -> Result<Option<Arc<dyn RunArchive>>, Failure> {
    let Some(url) = recipe.archive() else { return Ok(None) };
    let setup = ArchiveSetup {
        url: &url,
        name: &recipe.name,
        run_dir: run_dir.path(),
        retention: recipe.retention(),
        environment: program.environment(),
        // Its error names the cause, so it comes before those of roles that wait for the trainer meanwhile.
        patience: recipe.wait() / 2,
        report,
    };
    Ok(Some(archive::open(&setup)?))
}

/// Where the samples of a run come from.
enum TrainingSource<'a> {
    /// From samplers, through the services of the run.
    Sampled(RunServices),
    /// From the tasks: demonstrations or pairs.
    Supervised(&'a Supervised),
}

/// What training ends with.
struct TrainingResult {
    version: PolicyVersion,
    time_s: f64,
    /// The evaluation of the last version, if there was one.
    evaluation: Option<Evaluated>,
    /// Whether all steps are done and their evaluation was stopped.
    cut_short: bool,
}

impl<'a> Run<'a> {
    /// The context of a run that has opened nothing yet.
    fn open(
        recipe: &'a Recipe,
        run_dir: &'a RunDir,
        report: &Arc<Report>,
        options: RunOptions,
    ) -> Result<Self, Failure> {
        let signals = Signals::listen()?;
        let logs = run_dir.logs();
        let system = |source| Failure::System { what: format!("write a log in {}", logs.display()), source };
        report.log_to(&logs).map_err(system)?;
        let RunOptions { cores, rewards, program, listener, leader, from } = options;
        let runtime = RewardRuntime::new(&program, &cores)?;
        Ok(Self {
            recipe,
            run_dir,
            report: Arc::clone(report),
            rewards,
            runtime,
            signals,
            cores,
            listener,
            leader,
            from,
            archive: None,
            limits: Arc::default(),
            peers: Arc::default(),
            progress: Arc::default(),
            evaluates: true,
            is_replay: false,
        })
    }
}

impl Run<'_> {
    /// Archives the checkpoint that training starts from: what it contains is acknowledged to the buffer next.
    fn archive_start(&self, version: PolicyVersion, observer: &mut Observer<'_>) -> Result<(), Failure> {
        let Some(archive) = &self.archive else { return Ok(()) };
        observer.sync()?;
        archive.take_lead()?;
        let checkpoint = trainer::checkpoint::path(&self.run_dir.checkpoints(), version);
        if checkpoint.is_dir() {
            archive.store(&checkpoint, version)?;
        }
        Ok(())
    }

    /// Archives what the run wrote after its last checkpoint.
    fn archive_end(&self) -> Result<(), Failure> {
        Ok(self.archive.as_ref().map_or(Ok(()), |archive| archive.finish())?)
    }

    fn run(&self, source: TrainingSource<'_>) -> Result<Ending, Failure> {
        let mut observer = Observer::new(self.recipe, self.run_dir, &self.report)?;
        let stopped = || if self.signals.terminated() { Ending::Requeued } else { Ending::Stopped };
        let report = Arc::clone(&self.report);
        let watchdog = self.progress.watch(self.recipe, move |text| report.note(text))?;
        let Some(start) = self.starting_state(&mut observer)? else { return Ok(stopped()) };
        let version = start.state.version;
        start.record(&mut observer)?;
        let before = start.evaluation.clone();
        self.archive_start(version, &mut observer)?;
        let result = match source {
            TrainingSource::Sampled(services) => self.train(start, services, &mut observer, watchdog)?,
            TrainingSource::Supervised(config) => self.supervise(config, start, &mut observer)?,
        };
        observer.diagnosis().iter().for_each(|line| self.report.note(line));
        observer.finish_logs();
        let done = result.version.0 >= self.recipe.trainer.steps && !result.cut_short;
        observer.event("end", &serde_json::json!({ "version": result.version, "done": done }))?;
        if !done {
            let (step, dir) = (result.version.0, self.run_dir.path().display());
            self.report.note(&format!(
                "stopped after step {step}; everything is saved; go on with: rlrun resume {dir}"
            ));
            self.archive_end()?;
            return Ok(stopped());
        }
        let accuracy = result.evaluation.as_ref().and_then(Evaluated::accuracy);
        self.report.summary(&Summary {
            accuracy_before: accuracy.as_ref().and_then(|(metric, _)| observer.first_value(metric)),
            accuracy_after: accuracy.map(|(_, accuracy)| accuracy),
            steps: result.version.0,
            time_s: result.time_s,
            rewards: observer.rewards(),
            run_dir: self.run_dir.path().to_path_buf(),
            samples: evaluate::pairs(before.as_ref(), result.evaluation.as_ref()),
        });
        self.archive_end()?;
        Ok(Ending::Done)
    }
}
