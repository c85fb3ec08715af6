//! `code`: does the program in the completion pass the tests of the task? Run in a sandbox, judged outside of it.
//!
//! Invariant: a value in [0, 1]. If the program crashes, loops, forks or tries to open files or the network, it does not pass the
//! test; a sandbox that fails is an error of the reward and never a score.
//!
//! Known limit: tests that are code ([`suite::TestSuite::Asserts`]) run in the interpreter of the program, where a program written
//! to attack them can make them pass, for example by values that are equal to everything. Inputs and calls have no such
//! weakness: the expected result never enters the sandbox.

pub mod compare;
pub mod extract;
pub mod run;
pub mod suite;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Semaphore;

use self::run::{ProgramRunner, ProgramTester, TestResult};
use self::suite::TestSuite;
use crate::registry::RewardKind;
use crate::reward::{Judged, each};
use crate::{BoxFuture, Load, Outcome, Reward, RewardContext, RewardError, RewardInput, RewardSpec};
use host::sandbox::{
    Interpreter, ReadableFiles, Sandbox, SandboxChoice, SandboxLimits, SandboxMethod, readable,
};

const PYTHON: &str = "python";
/// As the testers of APPS and LiveCodeBench, which allow 6 to 10 seconds.
const CPU_S: f64 = 10.0;
const MEMORY_MB: u64 = 512;
const OUTPUT_KIB: usize = 64;
const PROCESSES: u64 = 16;

/// The kind `code`.
pub(crate) fn kind() -> RewardKind {
    const KEYS: [&str; 10] = [
        "language",
        "command",
        "tests_column",
        "sandbox",
        "memory_mb",
        "cpu_s",
        "max_output_kib",
        "max_processes",
        "partial",
        "python",
    ];
    RewardKind::new("code", &KEYS, &[], |spec, context| Ok(Box::new(CodeReward::new(spec, context)?)))
}

/// Programs against tests.
pub struct CodeReward {
    name: String,
    language: String,
    tests_column: Option<String>,
    trial: Arc<ProgramTester>,
    running: Semaphore,
    load: Load,
}

impl CodeReward {
    /// Finds the interpreter and a sandbox that works; takes a fraction of a second.
    ///
    /// # Errors
    /// No runtime, an invalid parameter, no interpreter, no sandbox that works on this machine.
    pub fn new(spec: &RewardSpec, context: &RewardContext) -> Result<Self, RewardError> {
        context.runtime(spec)?;
        let failed = |reason: String| RewardError::Start { reward: spec.name().to_owned(), reason };
        let wrong = |field: &str, reason: &str| spec.wrong(field, reason);
        let language = spec.language.as_deref().unwrap_or(PYTHON).to_lowercase();
        let choice = spec.sandbox.as_deref().unwrap_or("auto");
        let choice = SandboxChoice::parse(choice)
            .ok_or_else(|| wrong("sandbox", "is \"auto\", \"bubblewrap\", \"landlock\" or \"none\""))?;
        std::fs::create_dir_all(&context.scratch)
            .map_err(|error| failed(format!("{}: {error}", context.scratch.display())))?;
        let path = context.environment.get("PATH").map_or("", String::as_str);
        let (runner, readable) = match &spec.command {
            Some(_) if spec.python.is_some() => {
                return Err(wrong("python", "is not for programs that `command` runs"));
            }
            Some(command) => {
                by_command(command, &language, path).map_err(|reason| wrong("command", &reason))?
            }
            None if language == PYTHON => {
                by_python(spec.python.as_deref().unwrap_or("python3"), context).map_err(failed)?
            }
            None => return Err(wrong("language", "is not Python; say in `command` what runs its programs")),
        };
        let sandbox = Sandbox::open(choice, &readable, path, &context.scratch);
        let sandbox = sandbox.map_err(|error| failed(error.to_string()))?;
        let limits = limits(spec)?;
        let trial = ProgramTester { sandbox, runner, limits, partial: spec.partial.unwrap_or_default() };
        Ok(Self {
            name: spec.name().to_owned(),
            language,
            tests_column: spec.tests_column.clone(),
            trial: Arc::new(trial),
            // Programs compute: with more of them than cores, each would exceed its time.
            running: Semaphore::new(spec.concurrency.clamp(1, cores())),
            load: Load::default(),
        })
    }

    async fn judge(&self, input: &RewardInput<'_>) -> Judged {
        let waiting = self.load.wait();
        let failed = |reason: String| input.trajectory().failed(&self.name, reason);
        let suite = TestSuite::of(input.task, self.tests_column.as_deref()).map_err(failed)?;
        let Some(program) = extract::program(input.text, &self.language, &|code| suite.is_defined_in(code))
        else {
            let why = Some("there is no program in the completion".to_owned());
            return Ok(outcome(&TestResult { passed: 0, tests: suite.len(), why }, false));
        };
        // The semaphore is never closed, so a permit always comes.
        let _permit = self.running.acquire().await;
        let _running = waiting.begin();
        let cancelled = Cancel(Arc::new(AtomicBool::new(false)));
        let (flag, trial, program) =
            (Arc::clone(&cancelled.0), Arc::clone(&self.trial), program.into_owned());
        let run = tokio::task::spawn_blocking(move || trial.run(&program, &suite, &flag));
        match run.await {
            Ok(Ok(verdict)) => Ok(outcome(&verdict, self.trial.partial)),
            Ok(Err(error)) => Err(failed(error.to_string())),
            Err(_) => Err(failed("the run panicked; its message is in the log".to_owned())),
        }
    }
}

/// Cancels a run when the future that waits for it is dropped.
struct Cancel(Arc<AtomicBool>);

impl Drop for Cancel {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn outcome(verdict: &TestResult, partial: bool) -> Outcome {
    let TestResult { passed, tests, why } = verdict;
    #[expect(clippy::cast_precision_loss, reason = "there are far less than 2^52 tests")]
    let share = *passed as f64 / (*tests).max(1) as f64;
    let value = if partial || passed == tests { share } else { 0.0 };
    let outcome = Outcome::from(value).with("passed", *passed).with("tests", *tests);
    match why {
        Some(why) => outcome.with("why", why.as_str()),
        None => outcome,
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

fn limits(spec: &RewardSpec) -> Result<SandboxLimits, RewardError> {
    let cpu_s = spec.cpu_s.unwrap_or(CPU_S.min(spec.timeout_s));
    let cpu = Duration::try_from_secs_f64(cpu_s).ok().filter(|cpu| !cpu.is_zero());
    let positive = |field: &str, found: u64| {
        if found > 0 { Ok(found) } else { Err(spec.wrong(field, "must be at least 1")) }
    };
    let memory_mb = positive("memory_mb", spec.memory_mb.unwrap_or(MEMORY_MB))?;
    let output_kib = spec.max_output_kib.unwrap_or(OUTPUT_KIB);
    positive("max_output_kib", output_kib as u64)?;
    Ok(SandboxLimits {
        wall: spec.timeout(),
        cpu: cpu.ok_or_else(|| spec.wrong("cpu_s", "must be a positive number of seconds"))?,
        memory: memory_mb.saturating_mul(1 << 20),
        output: output_kib.saturating_mul(1 << 10),
        processes: positive("max_processes", spec.max_processes.unwrap_or(PROCESSES))?,
    })
}

fn by_python(python: &str, context: &RewardContext) -> Result<(ProgramRunner, ReadableFiles), String> {
    let Interpreter { executable, directories } =
        Interpreter::find(python, &context.environment, &context.scratch)?;
    let readable = ReadableFiles::new(&directories, Some(executable.clone()))?;
    Ok((ProgramRunner::Python(executable), readable))
}

fn by_command(
    command: &[String],
    language: &str,
    path: &str,
) -> Result<(ProgramRunner, ReadableFiles), String> {
    let Some((first, rest)) = command.split_first() else { return Err("is empty".to_owned()) };
    if !command.iter().any(|word| word.contains("{file}")) {
        return Err("does not say where the program stands; write `{file}` there".to_owned());
    }
    let program =
        readable::find(first, path).ok_or_else(|| format!("names `{first}`, which is not in `PATH`"))?;
    let real: PathBuf = program.canonicalize().map_err(|error| format!("names {first}: {error}"))?;
    // Its files are beside the directory `bin` that it is in.
    let directories: Vec<PathBuf> =
        real.parent().and_then(std::path::Path::parent).map(PathBuf::from).into_iter().collect();
    let system = real.starts_with("/usr") || real.starts_with("/bin");
    let readable = ReadableFiles::new(if system { &[] } else { &directories }, Some(real.clone()))?;
    let mut argv = vec![real.display().to_string()];
    argv.extend_from_slice(rest);
    let ending = match language {
        "python" => "py",
        "javascript" => "js",
        "typescript" => "ts",
        "rust" => "rs",
        "bash" => "sh",
        "ruby" => "rb",
        other if other.chars().all(|c| c.is_ascii_alphanumeric()) => other,
        _ => "txt",
    };
    Ok((ProgramRunner::Command { argv, file: format!("program.{ending}") }, readable))
}

impl fmt::Debug for CodeReward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CodeReward")
            .field("name", &self.name)
            .field("trial", &self.trial)
            .finish_non_exhaustive()
    }
}

impl Reward for CodeReward {
    fn name(&self) -> &str {
        &self.name
    }

    fn score<'a>(&'a self, inputs: &'a [RewardInput<'a>]) -> BoxFuture<'a, Vec<Judged>> {
        each(inputs, |input| self.judge(input))
    }

    fn about(&self) -> Option<String> {
        let place = match self.trial.sandbox.method() {
            SandboxMethod::Bubblewrap { processes: true, .. } => "in bubblewrap",
            SandboxMethod::Bubblewrap { .. } => "in bubblewrap, without processes of their own",
            SandboxMethod::Landlock => "in a sandbox of Landlock and seccomp",
            SandboxMethod::Unconfined => "without a sandbox",
        };
        Some(format!("runs {} programs {place}", self.language))
    }

    fn load(&self) -> &Load {
        &self.load
    }
}
