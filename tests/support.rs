//! The binary as a user runs it: in a temporary directory.
//!
//! Invariant: tests read only the files and the output of a run.

use std::io::{Read, Write};
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use model::{Config, ModelDirectory, Sizes};
use serde_json::{Map, Value};

/// A run of seconds: a small model after a short warm-up, and a reward whose mean is about 0.5.
///
/// `--set` cannot add rewards, so this is a separate recipe.
const SMALL: &str = r#"
[model.random]
num_kv_heads = 2
[data.arithmetic]
train_tasks = 200
eval_tasks = 20
[warmup]
steps = 30
batch_tasks = 16
[rollout]
group_size = 8
max_running = 192
[[rewards]]
kind = "regex"
pattern = "[02468]$"
[buffer]
batch_groups = 8
[trainer]
steps = 12
learning_rate = 1e-3
[eval]
interval = 0
[checkpoint]
interval = 3
[log]
samples = 8
"#;

/// Makes the reward `regex` of `small.toml` the criterion of a correct answer.
pub(crate) const CORRECT: &str = "eval.correct.reward=regex";

/// Pause between two looks at a run in progress.
const LOOK_UP: Duration = Duration::from_millis(2);

/// A working directory with the recipe `small.toml`.
pub(crate) struct Home {
    root: tempfile::TempDir,
}

/// A command in progress; dropping it kills the process, also if the test fails.
pub(crate) struct Running(Child);

/// A finished command.
pub(crate) struct Done {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// A stage of a run that its files show.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Moment {
    /// The fresh model exists: the warm-up has begun.
    WarmUp,
    /// The checkpoint of this step exists.
    Checkpoint(u64),
    /// Training has begun for the n-th time.
    Start(usize),
    /// The metrics of this step are written.
    Step(u64),
}

impl Home {
    pub(crate) fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let base = repository().join("recipes/grpo_math.toml");
        std::fs::write(root.path().join("small.toml"), format!("extends = {base:?}\n{SMALL}")).unwrap();
        Self { root }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        path
    }

    /// The binary with `args` and captured output.
    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rlrun"));
        command.args(args).current_dir(self.root.path()).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs to the end.
    pub(crate) fn rlrun(&self, args: &[&str]) -> Done {
        self.rlrun_with(&[], args)
    }

    /// The same with `input` on standard input.
    pub(crate) fn rlrun_reading(&self, input: &str, args: &[&str]) -> Done {
        let mut child = Running(self.command(args).stdin(Stdio::piped()).spawn().unwrap());
        // A few lines fit in the buffer of the pipe.
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        finish(child)
    }

    /// The same with these variables.
    pub(crate) fn rlrun_with(&self, variables: &[(&str, &str)], args: &[&str]) -> Done {
        let mut command = self.command(args);
        let Output { status, stdout, stderr } = command.envs(variables.iter().copied()).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Done { status, stdout: text(stdout), stderr: text(stderr) }
    }

    /// Runs `small.toml` with `sets` in the run directory `name`, to an end without error.
    pub(crate) fn small(&self, name: &str, sets: &[&str]) -> Run {
        self.rlrun(&small_args(name, sets)).ok();
        self.run(name)
    }

    /// Starts `small.toml` with `sets` in the run directory `name`.
    pub(crate) fn start_small(&self, name: &str, sets: &[&str]) -> Running {
        self.start(&small_args(name, sets))
    }

    /// The same with a number of steps that no test reaches, and without output, so that no pipe fills up.
    pub(crate) fn start_endless(&self, name: &str, sets: &[&str]) -> Running {
        let sets = [sets, &["trainer.steps=100000"]].concat();
        self.start(&[&["-q"], &small_args(name, &sets)[..]].concat())
    }

    pub(crate) fn start(&self, args: &[&str]) -> Running {
        self.start_with(&[], args)
    }

    /// The same with these variables.
    pub(crate) fn start_with(&self, variables: &[(&str, &str)], args: &[&str]) -> Running {
        Running(self.command(args).envs(variables.iter().copied()).spawn().unwrap())
    }

    pub(crate) fn run(&self, name: &str) -> Run {
        Run { path: self.path(name) }
    }
}

/// Its reward has no reference answer, so the recipe defines what is correct.
pub(crate) fn small_args<'a>(name: &'a str, sets: &[&'a str]) -> Vec<&'a str> {
    let sets = [CORRECT].iter().chain(sets).flat_map(|set| ["--set", set]);
    ["small.toml", "--run-dir", name].into_iter().chain(sets).collect()
}

impl Done {
    /// Panics with what was printed unless the exit status is 0.
    pub(crate) fn ok(self) -> Self {
        assert!(self.status.success(), "{:?}\n{}\n{}", self.status, self.stdout, self.stderr);
        self
    }

    /// Panics unless the exit status is 2 and every part of `evidence` is in the message, which is returned.
    pub(crate) fn refused(self, evidence: &[&str]) -> String {
        assert_eq!(self.status.code(), Some(2), "{}\n{}", self.stdout, self.stderr);
        for part in evidence {
            assert!(self.stderr.contains(part), "`{part}` is missing in:\n{}", self.stderr);
        }
        self.stderr
    }
}

/// Waits for the end of `child`.
pub(crate) fn finish(mut child: Running) -> Done {
    // The output of a run fits in the buffers of the pipes, so they can be read one after the other.
    let (mut stdout, mut stderr) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    Done { status: child.wait().unwrap(), stdout, stderr }
}

/// Sends SIGINT, as Ctrl-C does.
pub(crate) fn interrupt(child: &Child) {
    signal(child, "INT");
}

/// Sends a signal.
pub(crate) fn signal(child: &Child, name: &str) {
    signal_process(child.id(), name);
}

/// The same to a process that is known by its number.
pub(crate) fn signal_process(pid: u32, name: &str) {
    let status = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status().unwrap();
    assert!(status.success(), "no process {pid} to signal");
}

impl Deref for Running {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Running {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A run directory.
pub(crate) struct Run {
    pub(crate) path: PathBuf,
}

impl Run {
    /// All lines of `metrics.jsonl`; every metric in them is explained.
    pub(crate) fn metrics(&self) -> Vec<Map<String, Value>> {
        let lines = lines(&self.path.join("metrics.jsonl"));
        for name in lines.iter().flat_map(Map::keys) {
            assert!(
                rlrun::metrics::is_explained(name),
                "`{name}` has no unit and meaning; add it to rlrun/metrics/catalog.rs"
            );
        }
        lines
    }

    /// All lines of the controller, if the run has one.
    pub(crate) fn controller(&self) -> Vec<Map<String, Value>> {
        lines(&self.path.join("logs/controller.jsonl"))
    }

    /// The lines of training steps.
    pub(crate) fn steps(&self) -> Vec<Map<String, Value>> {
        self.metrics().into_iter().filter(|line| line["step"] != 0).collect()
    }

    /// The values of one measurement, by step.
    pub(crate) fn values(&self, name: &str) -> Vec<f64> {
        let value =
            |line: Map<String, Value>| line[name].as_f64().unwrap_or_else(|| panic!("{name} in {line:?}"));
        self.steps().into_iter().map(value).collect()
    }

    /// The sampled groups of a step.
    pub(crate) fn samples(&self, step: u64) -> Vec<Map<String, Value>> {
        lines(&self.path.join(format!("samples/step_{step:06}.jsonl")))
    }

    /// Directory of the checkpoint of a step.
    pub(crate) fn checkpoint(&self, step: u64) -> PathBuf {
        self.path.join(format!("checkpoints/step_{step:06}"))
    }

    /// Waits for `moment`; false if `child` ended before.
    ///
    /// # Panics
    /// If neither happens for ten minutes.
    pub(crate) fn wait_for(&self, moment: Moment, child: &mut Child) -> bool {
        let start = std::time::Instant::now();
        loop {
            let waited = start.elapsed();
            assert!(waited.as_secs() < 600, "{}: {moment:?} has not come in {waited:?}", self.path.display());
            if self.has_come(moment) {
                return true;
            }
            if child.try_wait().unwrap().is_some() {
                return false;
            }
            std::thread::sleep(LOOK_UP);
        }
    }

    /// Waits until the output of the run contains `text`.
    ///
    /// # Panics
    /// If `child` ends before, or after ten minutes.
    pub(crate) fn wait_to_show(&self, text: &str, child: &mut Child) {
        let start = std::time::Instant::now();
        let shown = || std::fs::read_to_string(self.path.join("logs/attempt_1.log")).unwrap_or_default();
        while !shown().contains(text) {
            assert!(child.try_wait().unwrap().is_none(), "`{text}` is missing in:\n{}", shown());
            assert!(start.elapsed().as_secs() < 600, "`{text}` is missing in:\n{}", shown());
            std::thread::sleep(LOOK_UP);
        }
    }

    fn has_come(&self, moment: Moment) -> bool {
        let count = |file: &str, text: &str| {
            std::fs::read_to_string(self.path.join(file)).unwrap_or_default().matches(text).count()
        };
        match moment {
            Moment::WarmUp => self.path.join("model").is_dir(),
            Moment::Checkpoint(step) => self.checkpoint(step).is_dir(),
            Moment::Start(n) => count("events.jsonl", r#""event":"start""#) >= n,
            Moment::Step(step) => count("metrics.jsonl", &format!("{{\"step\":{step},")) > 0,
        }
    }
}

pub(crate) fn lines(path: &Path) -> Vec<Map<String, Value>> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Sizes of a model that takes no time, with the characters as vocabulary and a context of `positions` tokens.
pub(crate) fn tiny_sizes(positions: usize) -> Sizes {
    Sizes {
        vocab_size: model::CHARACTERS,
        hidden_size: 16,
        intermediate_size: 32,
        num_layers: 1,
        num_heads: 2,
        num_kv_heads: 1,
        max_position_embeddings: positions,
    }
}

/// Makes such a model with random weights in `directory`.
pub(crate) fn tiny_model(directory: &Path, positions: usize) {
    ModelDirectory::fresh(directory, &Config::fresh(&tiny_sizes(positions)), 3).unwrap();
}

/// The root of the repository.
pub(crate) fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}
