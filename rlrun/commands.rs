//! What the commands do.
//!
//! Invariant: a command returns what it has to say or one error with its exit status. Only what grows while the user
//! watches (the report of a run, a chat, measurements) is written before the command ends.

mod export;

use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use buffer::Buffer;
use device::Device;

use model::{Config, ModelDirectory, Quantization, Sampling, SharedCores, ThreadPool};
use rollout::evaluate::Watch;
use rollout::{Engine, EngineConfig, Network, SampleRequest, ServeOn, StopRules};
use trainer::Leader;
use trajectory::{GroupId, Message, PolicyVersion, Prompt};

use crate::args::{
    Cli, Command, EvalArgs, GenerateArgs, InitArgs, Loudness, RecipeArgs, ResumeArgs, RewardWhat, RunArgs,
    ServeWhat, WorkerWhat,
};
use crate::controller;
use crate::doctor;
use crate::evaluation::Which;
use crate::explain;
use crate::failure::Failure;
use crate::fit;
use crate::forward_edge;
use crate::init;
use crate::pipeline::{self, Ending, RunOptions};
use crate::plan;
use crate::plan::memory::{Memory, devices};
use crate::prepare::{Prepared, RewardRuntime};
use crate::program::Program;
use crate::recipe::words::Store;
use crate::recipe::{Change, DataSource, Diagnostic, Model, Origins, Recipe, Resumption};
use crate::report::{Report, Style};
use crate::reward;
use crate::run_dir::{self, RecipeTexts, RunDir};
use crate::serve;
use crate::stage::{Doing, Stage};
use crate::supervised::Lessons;
use crate::workers;

/// Does what the command line says; `program` is what it is done with. Returns what there is to say.
///
/// # Errors
/// What went wrong, ready to be shown.
pub fn execute(cli: &Cli, program: &Program) -> Result<String, Failure> {
    match &cli.command {
        Command::Check(args) => check(args, program),
        Command::Plan(args) => plan(args, program),
        Command::Init(args) => write_template(args),
        Command::Doctor(args) => Ok(doctor::run(args)),
        Command::Explain(args) => explain::run(args, program),
        Command::Run(args) => run(args, program),
        Command::Eval(args) => eval(args, program),
        Command::Generate(args) => generate(args),
        Command::Export(args) => export::export(args, program),
        Command::Resume(args) => resume(args, program),
        Command::Worker(what) => worker(what, program),
        Command::Serve(ServeWhat::Buffer(args)) => serve::buffer(args),
        Command::Reward(RewardWhat::Grade(args)) => {
            reward::grade(args, program, std::io::stdin().lock(), &mut std::io::stdout())?;
            Ok(String::new())
        }
        Command::Reward(RewardWhat::Test(args)) => reward::test(args, program),
        Command::Serve(ServeWhat::Reward(args)) => serve::reward(args),
        Command::Fit(args) => fit::run(args),
    }
}

fn run(args: &RunArgs, program: &Program) -> Result<String, Failure> {
    let mut sets = args.recipe.sets.clone();
    sets.extend(args.name.as_ref().map(|name| format!("name={name:?}")));
    let (recipe, origins) = load(&args.recipe.recipe, &sets, program)?;
    let given = std::fs::read_to_string(&args.recipe.recipe).map_err(|source| Failure::System {
        what: format!("read {}", args.recipe.recipe.display()),
        source,
    })?;
    refuse_what_does_not_fit(&recipe)?;
    let Some(leader) = launched(&recipe)? else { return Ok(String::new()) };
    let place = run_dir::place(args.run_dir.as_deref(), &recipe.name);
    let resolved = recipe.resolved_toml(&origins);
    let run_dir = RunDir::create(&place, RecipeTexts { given: &given, resolved: &resolved })?;
    let result = train((&recipe, leader), (run_dir, None), &args.loudness, program);
    if result.as_ref().is_err_and(|failure| failure.exit_code() == 2) {
        let run_dir = RunDir::open(&place)?;
        if !run_dir.has_begun() {
            // The name must be free when the mistake is mended.
            run_dir.remove()?;
        }
    }
    result
}

/// Trains in `run_dir` as the recipe says: in this process, or in processes that this one looks after. It goes on from
/// the checkpoint `from`, or from the last.
fn train(
    (recipe, leader): (&Recipe, Option<Arc<Leader>>),
    (run_dir, from): (RunDir, Option<PolicyVersion>),
    loudness: &Loudness,
    program: &Program,
) -> Result<String, Failure> {
    let path = run_dir.path().to_path_buf();
    let ending = if recipe.placement.processes {
        // The process that leads may be started again, and goes on from the last checkpoint whenever it is.
        let aside = from.map(|from| trainer::checkpoint::set_aside_after(&run_dir.checkpoints(), Some(from)));
        for (version, place) in aside.transpose()?.unwrap_or_default() {
            let (version, place) = (version.0, place.display());
            report(loudness, program).note(&format!("the checkpoint of step {version} is kept in {place}"));
        }
        controller::run(recipe, run_dir, *loudness)?
    } else {
        let options = RunOptions { leader, from, ..RunOptions::new(program) };
        pipeline::run_in(recipe, &run_dir, &report(loudness, program), options)?
    };
    ended(ending, &path)
}

/// The leader of the ranks that `mpirun` has started, if the recipe says so and this is the first; `None` if this was
/// another one, whose work is done.
fn launched(recipe: &Recipe) -> Result<Option<Option<Arc<Leader>>>, Failure> {
    #[cfg(feature = "mpi")]
    if recipe.trainer.ranks == crate::recipe::words::Ranks::Mpi {
        use collective::{Collective, mpi};
        use trainer::{TrainerError, follow};
        let ranks = mpi::start(recipe.wait()).map_err(TrainerError::from)?;
        if ranks.world() != recipe.trainer.world {
            let (started, wanted) = (ranks.world(), recipe.trainer.world);
            let what = format!(
                "mpirun has started {started} ranks, and trainer.world is {wanted}: make them the same"
            );
            return Err(Failure::Argument(what));
        }
        if ranks.rank() == 0 {
            return Ok(Some(Some(Leader::new(Arc::new(ranks)))));
        }
        follow(Arc::new(ranks), Arc::new(recipe.trainer_pool(&SharedCores::all())))?;
        return Ok(None);
    }
    // Without the feature a recipe that asks for it was refused.
    let _ = recipe;
    Ok(Some(None))
}

/// A run that its launcher has stopped asks to be started again.
fn ended(ending: Ending, run_dir: &Path) -> Result<String, Failure> {
    if ending == Ending::Requeued {
        let run_dir = run_dir.display();
        return Err(Failure::Requeue(format!(
            "stopped and saved; to be started again as: rlrun resume {run_dir}"
        )));
    }
    Ok(String::new())
}

fn worker(what: &WorkerWhat, program: &Program) -> Result<String, Failure> {
    match what {
        WorkerWhat::Rollout(args) => workers::rollout::run(args, program).map(|()| String::new()),
        WorkerWhat::Trainer(args) => workers::trainer::run(args, program).map(|()| String::new()),
        WorkerWhat::Reward(args) => workers::reward::run(args, program).map(|()| String::new()),
        WorkerWhat::Lead(args) => ended(controller::lead::run(args, program)?, &args.run),
        WorkerWhat::Templates => model::chat::serve().map(|()| String::new()).map_err(|source| {
            Failure::System { what: "render chat templates for another process".to_owned(), source }
        }),
    }
}

fn resume(args: &ResumeArgs, program: &Program) -> Result<String, Failure> {
    let run_dir = RunDir::open(&args.run)?;
    let path = run_dir.resolved_recipe();
    let before = std::fs::read_to_string(&path)
        .map_err(|source| Failure::System { what: format!("read {}", path.display()), source })?;
    let resume = run_dir.resumes()? + 1;
    let Resumption { recipe, origins, changes } =
        Recipe::resume(&path, &args.sets, (program, resume)).map_err(Failure::Recipe)?;
    refuse_what_does_not_fit(&recipe)?;
    let journal = forward_edge::journal(run_dir.path());
    let keeps_one = recipe.buffer.store == Store::Redb && recipe.supervised.is_none();
    if args.without_journal && keeps_one && !journal.exists() {
        drop(Buffer::open(journal, recipe.buffer_config())?);
    }
    let from = args.from.map(PolicyVersion);
    if let Some(from) = from {
        trainer::checkpoint::check(&checkpoint_of(&args.run, Some(from.0))?)?;
    }
    if !changes.is_empty() {
        run_dir.replace_resolved(&recipe.resolved_toml(&origins))?;
        let shown: Vec<String> = changes.iter().map(ToString::to_string).collect();
        report(&args.loudness, program).note(&format!("resume {resume} changes {}", shown.join(", ")));
    }
    let said: Vec<_> = changes.iter().map(Change::to_json).collect();
    record(&run_dir, "resume", &serde_json::json!({ "resume": resume, "changes": said }))?;
    let Some(leader) = launched(&recipe)? else { return Ok(String::new()) };
    let result = train((&recipe, leader), (run_dir, from), &args.loudness, program);
    if result.as_ref().is_err_and(|failure| failure.exit_code() == 2) && !changes.is_empty() {
        // New values that do not fit model or data must not stand in the way of the next try.
        let run_dir = RunDir::open(&args.run)?;
        run_dir.replace_resolved(&before)?;
        record(&run_dir, "changes_undone", &serde_json::json!({ "resume": resume }))?;
    }
    result
}

/// Adds an event to those of the run.
fn record(run_dir: &RunDir, event: &str, fields: &serde_json::Value) -> Result<(), Failure> {
    let mut events = run_dir.events()?;
    events.append(&serde_json::json!({ "event": event, "fields": fields }))?;
    Ok(events.sync()?)
}

/// The report of a run as loud as the user wants it.
fn report(loudness: &Loudness, program: &Program) -> Arc<Report> {
    let style = Style::detect(loudness.quiet, program.environment());
    Arc::new(Report::new(style).wide(loudness.width))
}

fn check(args: &RecipeArgs, program: &Program) -> Result<String, Failure> {
    let (recipe, origins) = load(&args.recipe, &args.sets, program)?;
    check_files(&recipe, &origins).map_err(Failure::Recipe)?;
    let scratch = scratch_directory()?;
    let directory = recipe.open_model(scratch.path())?;
    let runtime = RewardRuntime::new(program, &SharedCores::all())?;
    let prepared = Prepared::new(&recipe, &directory, (&runtime, scratch.path()))?;
    // Whether weights are whole and of the right shapes shows only when they are read.
    recipe.adapter(&directory.load_parameters()?)?;
    if let Some(supervised) = &recipe.supervised {
        let files = ModelDirectory::open(directory.path())?;
        // Without the reference: only its completions are looked at.
        Lessons::new(&recipe, supervised, (files, &prepared), None)?;
    }
    let held_out = prepared.held_out();
    let placement = plan::placement(&recipe).map_or_else(String::new, |line| line + "\n");
    let understood = prepared.understood().chain(recipe.describe_correct());
    let understood: String = understood.map(|line| line + "\n").collect();
    let note = recipe.algorithm.note().map_or_else(String::new, |note| format!("{note}\n"));
    let window = directory.config().window_note().map_or_else(String::new, |note| note + "\n");
    Ok(understood
        + &note
        + &format!(
            "{placement}{window}{}: no mistakes found; {} parameters, {} tasks ({} left out as too long), {held_out} held out, longest prompt \
         {} tokens",
            args.recipe.display(),
            model::Layout::new(directory.config()).len(),
            prepared.train.len(),
            prepared.train.dropped(),
            prepared.train.longest(),
        ))
}

fn plan(args: &RecipeArgs, program: &Program) -> Result<String, Failure> {
    let (recipe, origins) = load(&args.recipe, &args.sets, program)?;
    let config = shape(&recipe)?;
    let tokenizer = match &recipe.model {
        Model::Path(path) => file_size(&path.join("tokenizer.json"))?,
        Model::Random(_) => model::characters().to_string().len() as u64,
    };
    let memory = Memory::of(&recipe, &config, tokenizer);
    let on_devices = match recipe.devices().any() {
        true => devices::describe(&recipe, &config, &devices::there(&recipe, &config)),
        false => None,
    };
    let on_devices = on_devices.map_or_else(String::new, |text| format!("\n{text}"));
    let (resolved, described) = (recipe.resolved_toml(&origins), plan::describe(&recipe));
    Ok(format!("{resolved}\n{described}\nmemory\n{memory}{on_devices}"))
}

/// The shape of the recipe's model.
fn shape(recipe: &Recipe) -> Result<Config, Failure> {
    match &recipe.model {
        Model::Path(path) => Ok(Config::load(path)?),
        Model::Random(sizes) => Ok(recipe.fresh_model(sizes)),
    }
}

/// A run that its devices have no room for is refused before it begins.
fn refuse_what_does_not_fit(recipe: &Recipe) -> Result<(), Failure> {
    if !recipe.devices().any() {
        return Ok(());
    }
    let config = shape(recipe)?;
    devices::refuse(recipe, &config, &devices::there(recipe, &config))
}

fn file_size(path: &Path) -> Result<u64, Failure> {
    let system = |source| Failure::System { what: format!("read {}", path.display()), source };
    Ok(std::fs::metadata(path).map_err(system)?.len())
}

fn write_template(args: &InitArgs) -> Result<String, Failure> {
    let path = args.file.as_deref().unwrap_or(Path::new(args.template.file_name()));
    init::init(args.template, path)?;
    Ok(format!("wrote {}; next: rlrun {}", path.display(), path.display()))
}

fn eval(args: &EvalArgs, program: &Program) -> Result<String, Failure> {
    let mut sets = args.sets.clone();
    sets.extend(args.samples.map(|samples| format!("eval.samples={samples}")));
    sets.extend(args.temperature.map(|temperature| format!("eval.temperature={temperature}")));
    sets.extend(args.tasks.map(|tasks| format!("eval.tasks={tasks}")));
    let (recipe, _) = load(&args.recipe, &sets, program)?;
    // An interrupt ends the process at once: there is nothing to save.
    let (stage, stop) = (Arc::new(Stage::default()), AtomicBool::new(false));
    let _watchdog = stage.watch_alone(&recipe, |text| eprintln!("{text}"))?;
    let directory = recipe.opened(&model_of(&args.target, None)?)?;
    let (runtime, scratch) = (RewardRuntime::new(program, &SharedCores::all())?, scratch_directory()?);
    let prepared = Prepared::new(&recipe, &directory, (&runtime, scratch.path()))?;
    stage.meet(prepared.rewards.clone());
    let parameters = directory.load_parameters()?;
    let network = Network::new(&recipe.evaluate_on()?, directory.config(), &parameters)?;
    stage.enter(Doing::Evaluation);
    let watch = Watch { stop: &stop, progress: stage.evaluation(), show: &|_| {} };
    let evaluated = prepared.evaluate(&recipe, (network, &directory), (&runtime, &watch), Which::All)?;
    let Some(evaluated) = evaluated else {
        let what = format!("{} has no held-out tasks; name some under data.eval", args.recipe.display());
        return Err(Failure::NotThere(what));
    };
    if let Some(why) = evaluated.diagnosis() {
        return Err(Failure::Unscored(why));
    }
    let mut lines = evaluated.lines();
    if let Some(line) = lines.last_mut() {
        *line += &format!(", {} tokens sampled", evaluated.tokens());
    }
    lines.extend(evaluated.failures());
    Ok(lines.join("\n"))
}

fn generate(args: &GenerateArgs) -> Result<String, Failure> {
    let mut speaker = Speaker::open(args)?;
    if !args.interactive {
        let answers: Result<Vec<String>, Failure> =
            args.prompts.iter().map(|prompt| speaker.answer(&speaker.prompt(prompt, &[]))).collect();
        return Ok(answers?.join("\n"));
    }
    let system = |source| Failure::System { what: "talk to the terminal".to_owned(), source };
    let mut out = std::io::stdout();
    let mut history = Vec::new();
    write!(out, "> ").and_then(|()| out.flush()).map_err(system)?;
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(system)?;
        let answer = speaker.answer(&speaker.prompt(&line, &history))?;
        write!(out, "{answer}\n> ").and_then(|()| out.flush()).map_err(system)?;
        let message = |role: &str, content| Message { role: role.to_owned(), content };
        history.extend([message("user", line), message("assistant", answer)]);
    }
    Ok(String::new())
}

/// A model that answers prompts one by one.
struct Speaker {
    directory: ModelDirectory,
    engine: Engine,
    sampling: Sampling,
    max_tokens: usize,
    asked: u64,
}

impl Speaker {
    fn open(args: &GenerateArgs) -> Result<Self, Failure> {
        let directory = ModelDirectory::open(&model_of(&args.target, None)?)?;
        let parameters = directory.load_parameters()?;
        let context = directory.config().max_context();
        let max_tokens = args.max_tokens.min(context.saturating_sub(1)).max(1);
        let device = args.on.device()?;
        let config = EngineConfig {
            max_running: 1,
            prefill_chunk: EngineConfig::default_prefill_chunk(device.is_some()),
            kv_cache_tokens: None,
            max_prompt_length: context,
            max_completion_length: max_tokens,
            max_samples: 1,
            seed: 0,
        };
        let stop = StopRules {
            token_ids: directory.stop_token_ids().to_vec(),
            strings: Vec::new(),
            tokenizer: directory.tokenizer().clone(),
        };
        let on = match device {
            None => ServeOn::Host(Quantization::None),
            Some((place, dtype)) => ServeOn::Device(Device::open(place)?, dtype),
        };
        let (network, cores) = (Network::new(&on, directory.config(), &parameters)?, SharedCores::all());
        let engine = Engine::new(config, stop, network, PolicyVersion::default())?
            .on(Arc::new(ThreadPool::new(&cores, cores.total())));
        let sampling = Sampling { temperature: args.temperature as f32, ..Sampling::PLAIN };
        Ok(Self { directory, engine, sampling, max_tokens, asked: 0 })
    }

    /// A model with a chat template is talked to in messages, any other continues text.
    fn prompt(&self, text: &str, history: &[Message]) -> Prompt {
        if self.directory.template().is_none() {
            return Prompt::Text(text.to_owned());
        }
        let mut messages = history.to_vec();
        messages.push(Message { role: "user".to_owned(), content: text.to_owned() });
        Prompt::Messages(messages)
    }

    fn answer(&mut self, prompt: &Prompt) -> Result<String, Failure> {
        let prompt = self.directory.encode_prompt(prompt)?;
        let context = self.directory.config().max_context();
        // A prompt that fills the context leaves room for nothing, which the engine refuses with the numbers.
        let max_completion_length = self.max_tokens.min(context.saturating_sub(prompt.len())).max(1);
        let (group, sampling) = (GroupId(self.asked), self.sampling);
        let baseline = false;
        self.engine.submit(SampleRequest {
            group,
            prompt,
            samples: 1,
            sampling,
            max_completion_length,
            baseline,
        })?;
        self.asked += 1;
        let mut text = String::new();
        while !self.engine.is_idle() {
            for completion in self.engine.step()? {
                text = completion.text;
            }
        }
        Ok(text)
    }
}

fn load(path: &Path, sets: &[String], program: &Program) -> Result<(Recipe, Origins), Failure> {
    Recipe::load(path, sets, program).map_err(Failure::Recipe)
}

/// The model directory of a run's checkpoint (the newest without `step`), or `target` itself if it is a model.
fn model_of(target: &Path, step: Option<u64>) -> Result<PathBuf, Failure> {
    if step.is_none() && target.join("config.json").is_file() {
        return Ok(target.to_path_buf());
    }
    Ok(checkpoint_of(target, step)?.join("model"))
}

/// A run's checkpoint (the newest without `step`).
fn checkpoint_of(target: &Path, step: Option<u64>) -> Result<PathBuf, Failure> {
    let checkpoints = target.join("checkpoints");
    let versions = trainer::checkpoint::list(&checkpoints);
    let chosen = match step {
        Some(step) => versions.iter().find(|version| version.0 == step),
        None => versions.last(),
    };
    let Some(version) = chosen else {
        let known: Vec<String> = versions.iter().map(|version| version.0.to_string()).collect();
        return Err(Failure::NotThere(match step {
            Some(step) if !known.is_empty() => format!(
                "{} has no checkpoint of step {step}; there are those of steps {}",
                target.display(),
                known.join(", ")
            ),
            _ => format!(
                "{} is neither a model directory (no config.json) nor a run with checkpoints",
                target.display()
            ),
        }));
    };
    Ok(trainer::checkpoint::path(&checkpoints, *version))
}

/// A directory that disappears again, for the fresh model of a check.
fn scratch_directory() -> Result<tempfile::TempDir, Failure> {
    tempfile::tempdir()
        .map_err(|source| Failure::System { what: "make a temporary directory".to_owned(), source })
}

/// Checks that the files a recipe names can be what it says, each mistake at the line that names it.
fn check_files(recipe: &Recipe, origins: &Origins) -> Result<(), Vec<Diagnostic>> {
    let at = |path: &str| origins.get(path).map(|origin| origin.value.clone());
    let mut errors = Vec::new();
    if let Model::Path(path) = &recipe.model {
        for file in ["config.json", "tokenizer.json"] {
            if !path.join(file).is_file() {
                let message = format!("model directory `{}` has no `{file}`", path.display());
                let help = "name a directory in Hugging Face format, with its tokenizer";
                errors.push(Diagnostic::new(message, at("model.path")).help(help));
            }
        }
    }
    if let DataSource::Files(files) = &recipe.data.source {
        for (key, paths) in [("data.train", &files.train), ("data.eval", &files.eval)] {
            for path in paths.iter().filter(|path| path.is_file()) {
                let known =
                    path.extension().is_some_and(|e| ["jsonl", "json", "parquet"].iter().any(|k| e == *k));
                if !known {
                    let message =
                        format!("`{}` is no dataset: it ends neither in .jsonl nor .parquet", path.display());
                    errors.push(Diagnostic::new(message, at(key)).help("convert or rename the file"));
                }
            }
        }
    }
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn execute_args(args: &[&str]) -> Result<String, Failure> {
        let cli =
            Cli::parse_args(std::iter::once("rlrun").chain(args.iter().copied()).map(Into::into)).unwrap();
        execute(&cli, &Program::default())
    }

    #[test]
    fn a_template_can_be_checked_and_planned() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("mine.toml");
        let file = file.to_str().unwrap();
        assert_eq!(execute_args(&["init", file]).unwrap(), format!("wrote {file}; next: rlrun {file}"));
        let checked = execute_args(&["check", file]).unwrap();
        assert!(
            checked.contains(&format!("{file}: no mistakes found; 113600 parameters, 8000 tasks")),
            "{checked}"
        );
        // A kind that does here what another one does.
        let process = execute_args(&["check", file, "--set", "algorithm.kind=process"]).unwrap();
        assert!(!checked.contains("note: ") && process.contains("it trains as \"grpo\" does"), "{process}");
        let plan = execute_args(&["plan", file, "--set", "trainer.steps=7"]).unwrap();
        assert!(
            plan.lines().any(|line| line.starts_with("steps = 7 ") && line.ends_with("  # --set"))
                && plan.contains("run           mine, 7 steps"),
            "{plan}"
        );
        let error =
            execute_args(&["check", file, "--set", "trainer.stepps=7", "--set", "seed=x"]).unwrap_err();
        assert_eq!((error.exit_code(), error.to_string().matches("error: ").count()), (2, 2), "{error}");
        assert_eq!(execute_args(&["init", file]).unwrap_err().exit_code(), 2);
    }

    #[test]
    fn a_plan_for_a_device_names_it_or_says_what_this_program_lacks() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("mine.toml");
        let file = file.to_str().unwrap();
        execute_args(&["init", file]).unwrap();
        assert!(!execute_args(&["plan", file]).unwrap().contains("the trainer, the sampler"));
        let planned = execute_args(&["plan", file, "--set", "placement.device=emulated"]);
        if cfg!(feature = "emulator") {
            let plan = planned.unwrap();
            assert!(plan.contains("\nemulated: the trainer, the sampler, in f32\n"), "{plan}");
            assert!(
                plan.lines()
                    .any(|line| line.starts_with("device = \"emulated\" ") && line.ends_with("  # --set")),
                "{plan}"
            );
        } else {
            let error = planned.unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains("build it with `--features emulator`"), "{error}");
        }
        assert!(execute_args(&["doctor"]).unwrap().contains("\ndevices\n"));
        let json: serde_json::Value =
            serde_json::from_str(&execute_args(&["doctor", "--json"]).unwrap()).unwrap();
        assert_eq!(json["devices"]["emulator"], cfg!(feature = "emulator"));
    }

    #[test]
    fn check_looks_at_the_model_directory_and_the_data_files() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("r.toml");
        let text = "[model]\npath = \".\"\n[data]\ntrain = \"t.csv\"\n[[rewards]]\nkind = \"math\"\n[trainer]\nsteps = 1\n";
        std::fs::write(&path, text).unwrap();
        std::fs::write(directory.path().join("t.csv"), "").unwrap();
        std::fs::write(directory.path().join("config.json"), "{}").unwrap();
        let error = execute_args(&["check", path.to_str().unwrap()]).unwrap_err().to_string();
        assert!(error.contains("has no `tokenizer.json`") && error.contains("r.toml:2:8"), "{error}");
        assert!(error.contains("is no dataset") && error.contains("r.toml:4:9"), "{error}");
    }
}
