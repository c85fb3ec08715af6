//! Rollout engines of others in a run: their configuration, and a process that this run starts and restarts.
//!
//! Invariant: a process that the run has started ends with it. One that ends earlier is started again, at most once in
//! [`AGAIN`]; the sampler leaves it out meanwhile.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use model::{ModelDirectory, WeightDtype};
use rollout::Sampler;
use rollout::remote::{EngineKind, EngineNotice, PushConfig, RemoteEnginesConfig, RemoteSampler};
use weights::Subscriber;

use crate::companion::Companion;
use crate::failure::Failure;
use crate::prepare::Prepared;
use crate::recipe::Recipe;
use crate::recipe::words::{EngineWord, WeightDtypeWord};
use crate::report::Report;
use crate::run_dir::RunDir;

/// Time between two starts of an engine.
const AGAIN: Duration = Duration::from_secs(10);
/// Pause between two looks at it.
const LOOK_UP: Duration = Duration::from_millis(200);
/// Time without an answer after which an engine is asked whether something has paused it.
const QUIET: Duration = Duration::from_secs(10);
/// Time in which it ends by itself.
const GRACE: Duration = Duration::from_secs(5);
/// Prompts whose completions prove which weights an engine serves.
const PROBES: usize = 3;
/// Name of the directory of weights in a run directory.
pub(crate) const WEIGHTS: &str = "engine_weights";
/// Most tokens after each of them.
const PROBED: usize = 64;

impl Recipe {
    /// The kind of the engines, if they are of others.
    #[must_use]
    pub(crate) fn engine_kind(&self) -> Option<EngineKind> {
        match self.rollout.engine {
            EngineWord::Own => None,
            EngineWord::Vllm => Some(EngineKind::Vllm),
            EngineWord::Sglang => Some(EngineKind::Sglang),
        }
    }
}

/// What a sampler of engines is made of.
pub(crate) struct EngineSetup<'a> {
    pub(crate) recipe: &'a Recipe,
    /// For the weights, if the recipe names no directory.
    pub(crate) weights_dir: PathBuf,
    pub(crate) directory: &'a Arc<ModelDirectory>,
    pub(crate) prepared: &'a Prepared,
    /// Shows what happens to an engine.
    pub(crate) notice: EngineNotice,
}

impl EngineSetup<'_> {
    /// The sampler of the training tasks, with the engines of `kind`, which get the weights of `subscriber`.
    ///
    /// # Errors
    /// Certificates of the system that cannot be read.
    pub(crate) fn sampler(
        self,
        kind: EngineKind,
        subscriber: Arc<dyn Subscriber>,
    ) -> Result<Box<dyn Sampler>, Failure> {
        let Self { recipe, weights_dir, directory, prepared, notice } = self;
        let rollout = &recipe.rollout;
        let dtype = match recipe.weights.dtype {
            WeightDtypeWord::F32 => WeightDtype::F32,
            WeightDtypeWord::Bf16 => WeightDtype::Bf16,
        };
        let probes = (0..PROBES as u64).map(|task| prepared.train.of(trajectory::GroupId(task)).1.to_vec());
        let push = PushConfig {
            directory: rollout.weights_dir.clone().unwrap_or(weights_dir),
            dtype,
            adapter: rollout.push_adapter,
            probes: probes.collect(),
            probe_tokens: rollout.max_completion_length.min(PROBED),
            bound: rollout.probe_bound,
            wait: recipe.wait(),
        };
        let config = RemoteEnginesConfig {
            kind,
            urls: rollout.urls.clone(),
            max_running: rollout.max_running,
            max_length: prepared.train.longest() + rollout.max_completion_length,
            seed: recipe.seed,
            temperature: recipe.worker().sampling.temperature,
            stop_rules: recipe.stop_rules(directory),
            experts: rollout.routing_replay,
            push,
            wait: recipe.wait(),
            quiet: QUIET,
            notice,
        };
        let pool = Arc::clone(&prepared.pool);
        Ok(Box::new(RemoteSampler::new(config, Arc::clone(directory), subscriber, pool)?))
    }
}

/// The engine that a run has started. It ends when this is dropped.
pub(crate) struct EngineProcess {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl EngineProcess {
    /// Starts the engine of `recipe`; `None` if it names no command.
    ///
    /// # Errors
    /// A program that is not installed, a process that cannot be started.
    pub(crate) fn start(
        recipe: &Recipe,
        run_dir: &RunDir,
        report: &Arc<Report>,
    ) -> Result<Option<Self>, Failure> {
        let Some((program, arguments)) = recipe.rollout.command.split_first() else { return Ok(None) };
        let (program, arguments) = (program.clone(), arguments.to_vec());
        let log: PathBuf = run_dir.logs().join("engine.log");
        let start = {
            let log = log.clone();
            move || Companion::start(OsStr::new(&program), &arguments, &log, GRACE)
        };
        let failed = |source| Failure::System { what: "start `rollout.command`".to_owned(), source };
        let mut engine = start().map_err(failed)?;
        report.note(&format!("the rollout engine is started; its output is in {}", log.display()));
        let over = Arc::new(AtomicBool::new(false));
        let (stop, report) = (Arc::clone(&over), Arc::clone(report));
        let work = move || {
            let mut begun = Instant::now();
            while !stop.load(Ordering::Relaxed) {
                std::thread::sleep(LOOK_UP);
                let ended = engine.ended().ok().flatten();
                let Some(status) = ended.filter(|_| begun.elapsed() > AGAIN) else { continue };
                let log = log.display();
                report.note(&format!(
                    "the rollout engine has ended ({status}; see {log}) and is started again"
                ));
                begun = Instant::now();
                match start() {
                    Ok(next) => engine = next,
                    Err(error) => report.note(&format!("the rollout engine cannot be started: {error}")),
                }
            }
            // It is asked to end, and killed if it does not.
            let _ = engine.finish();
        };
        let thread = std::thread::Builder::new().name("engine process".to_owned()).spawn(work);
        Ok(Some(Self { over, thread: Some(thread.map_err(failed)?) }))
    }
}

impl Drop for EngineProcess {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        // Its deadline bounds this; a panic of it was printed.
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}
