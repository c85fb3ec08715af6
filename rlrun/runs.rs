//! `rlrun runs`: the run directories below a directory, with their state and their last measurements.
//!
//! Invariant: it reads the ends of files, within limits, and changes none. A file that is torn, damaged or missing costs what it
//! would have said and nothing else.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::{Map, Value, json};

use crate::args::RunsArgs;
use crate::failure::Failure;
use crate::run_dir;

/// Entries of directories that are looked at; further ones are left out, which is said.
const MAX_ENTRIES: usize = 20_000;
/// How deep below the directory a run may lie.
const MAX_DEPTH: usize = 4;
/// What is read of the end of a file, bytes: some hundred steps.
const MAX_TAIL_BYTES: u64 = 1 << 20;
/// Longest resolved recipe, bytes.
const MAX_RECIPE_BYTES: u64 = 1 << 20;
/// Characters of a name in the table.
const MAX_NAME_COLUMNS: usize = 60;

/// The runs below a directory as a table, or as JSON.
///
/// # Errors
/// If there is no such directory.
pub(crate) fn run(args: &RunsArgs) -> Result<String, Failure> {
    let root = &args.directory;
    if !root.is_dir() {
        let why = format!("there is no directory `{}`; start a run with `rlrun RECIPE`", root.display());
        return Err(Failure::Argument(why));
    }
    let (found, all) = find(root);
    let now = SystemTime::now();
    let mut runs: Vec<ListedRun> = found.into_iter().map(ListedRun::read).collect();
    runs.sort_by(|a, b| b.changed.cmp(&a.changed).then_with(|| a.path.cmp(&b.path)));
    if args.json {
        let runs: Vec<Value> = runs.iter().map(|run| run.json(now)).collect();
        return Ok(format!("{:#}", json!({ "runs": runs, "complete": all })));
    }
    let mut text = table(&runs, now);
    if !all {
        text += &format!("\nthere is more: after {MAX_ENTRIES} entries of directories the search ends");
    }
    Ok(text)
}

/// What is known of a run.
#[derive(Debug)]
struct ListedRun {
    path: PathBuf,
    state: RunState,
    /// Steps that are done; `None` before the first line of metrics.
    step: Option<u64>,
    /// Steps that the recipe asks for.
    steps: Option<u64>,
    /// Last measured share of correct answers.
    accuracy: Option<f64>,
    /// Mean reward of the last step.
    reward: Option<f64>,
    /// When a file of the run changed last.
    changed: SystemTime,
}

/// Whether a run goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunState {
    /// A process has it open.
    Running,
    /// It reached its last step.
    Done,
    /// A signal ended it, and it saved.
    Stopped,
    /// No process has it open, and it did not say that it ends: it failed, or was killed.
    Interrupted,
}

impl RunState {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Done => "done",
            Self::Stopped => "stopped",
            Self::Interrupted => "interrupted",
        }
    }
}

impl ListedRun {
    fn read(path: PathBuf) -> Self {
        let (mut step, mut accuracy, mut reward) = (None, None, None);
        for line in last_objects(&path.join("metrics.jsonl")) {
            step = step.or_else(|| line.get("step").and_then(Value::as_u64));
            reward = reward.or_else(|| line.get("reward/mean").and_then(Value::as_f64));
            accuracy = accuracy.or_else(|| line.get("eval/accuracy").and_then(Value::as_f64));
            if step.is_some() && accuracy.is_some() && reward.is_some() {
                break;
            }
        }
        let state = if run_dir::is_in_use(&path) { RunState::Running } else { last_state(&path) };
        let changed = ["metrics.jsonl", "events.jsonl", "resolved.toml"].map(|name| {
            std::fs::metadata(path.join(name))
                .and_then(|found| found.modified())
                .unwrap_or(SystemTime::UNIX_EPOCH)
        });
        let changed = changed.into_iter().max().unwrap_or(SystemTime::UNIX_EPOCH);
        Self { state, step, steps: steps(&path), accuracy, reward, changed, path }
    }

    /// How long ago a file changed; 0 after a clock was set back.
    fn age(&self, now: SystemTime) -> Duration {
        now.duration_since(self.changed).unwrap_or_default()
    }

    fn json(&self, now: SystemTime) -> Value {
        json!({
            "path": self.path,
            "state": self.state.as_str(),
            "step": self.step,
            "steps": self.steps,
            "accuracy": self.accuracy,
            "reward": self.reward,
            "age_s": self.age(now).as_secs(),
        })
    }
}

/// The run directories below `root`, itself included, and whether that is all of them. Links are not followed.
fn find(root: &Path) -> (Vec<PathBuf>, bool) {
    let (mut found, mut entries, mut all) = (Vec::new(), 0, true);
    let mut open = vec![(root.to_path_buf(), 0)];
    while let Some((directory, depth)) = open.pop() {
        if directory.join("resolved.toml").is_file() {
            found.push(directory);
            continue;
        }
        let inner = std::fs::read_dir(&directory).ok().into_iter().flatten().flatten();
        for entry in inner {
            entries += 1;
            if entries > MAX_ENTRIES {
                all = false;
                break;
            }
            if depth < MAX_DEPTH && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                open.push((entry.path(), depth + 1));
            }
        }
    }
    (found, all)
}

/// The JSON objects at the end of a file of lines, the last one first; what is no object is passed over.
fn last_objects(path: &Path) -> impl Iterator<Item = Map<String, Value>> {
    let tail = tail(path).unwrap_or_default();
    let mut lines: Vec<Vec<u8>> = tail.split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
    std::iter::from_fn(move || lines.pop()).filter_map(|line| serde_json::from_slice(&line).ok())
}

/// The last bytes of a regular file.
fn tail(path: &Path) -> io::Result<Vec<u8>> {
    let mut file: File = model::files::open(path)?;
    let start = file.metadata()?.len().saturating_sub(MAX_TAIL_BYTES);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(MAX_TAIL_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// What the events of a run say that no process has open.
pub(crate) fn last_state(path: &Path) -> RunState {
    for event in last_objects(&path.join("events.jsonl")) {
        match event.get("event").and_then(Value::as_str) {
            Some("end") if event["fields"]["done"] == true => return RunState::Done,
            Some("end") => return RunState::Stopped,
            Some("start" | "resume") => return RunState::Interrupted,
            _ => {}
        }
    }
    RunState::Interrupted
}

/// Steps that the recipe of a run asks for.
pub(crate) fn steps(path: &Path) -> Option<u64> {
    let text = model::files::read_text(&path.join("resolved.toml"), MAX_RECIPE_BYTES).ok()?;
    let steps = text.parse::<toml::Table>().ok()?.get("trainer")?.get("steps")?.as_integer()?;
    steps.try_into().ok()
}

/// One line per run.
fn table(runs: &[ListedRun], now: SystemTime) -> String {
    if runs.is_empty() {
        return "no runs; start one with `rlrun RECIPE`".to_owned();
    }
    let names: Vec<String> = runs.iter().map(|run| shown(&run.path)).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0).max(3);
    let mut text = format!("{:width$}  state              step  accuracy  reward  changed", "run");
    for (run, name) in runs.iter().zip(names) {
        let number = |value: Option<f64>, digits: usize| {
            value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
        };
        let step = run.step.map_or("-".to_owned(), |step| step.to_string());
        let steps = run.steps.map_or(String::new(), |steps| format!("/{steps}"));
        text += &format!(
            "\n{name:width$}  {:11} {:>11}  {:>8}  {:>6}  {} ago",
            run.state.as_str(),
            step + &steps,
            number(run.accuracy, 4),
            number(run.reward, 3),
            rounded(run.age(now)),
        );
    }
    text
}

/// A path in the table: without control characters, and its end if it is long.
fn shown(path: &Path) -> String {
    let name: String = path.to_string_lossy().chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    let cut = name.chars().count().saturating_sub(MAX_NAME_COLUMNS);
    if cut == 0 { name } else { format!("...{}", name.chars().skip(cut + 3).collect::<String>()) }
}

/// A duration in its largest unit.
fn rounded(age: Duration) -> String {
    let seconds = age.as_secs();
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..86_400 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::run_dir::{RecipeTexts, RunDir};

    const TEXTS: RecipeTexts<'static> = RecipeTexts { given: "", resolved: "[trainer]\nsteps = 7\n" };

    fn listed(root: &Path) -> Vec<Value> {
        let text = run(&RunsArgs { directory: root.to_path_buf(), json: true }).unwrap();
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["complete"], true);
        value["runs"].as_array().unwrap().clone()
    }

    #[test]
    fn a_run_is_running_while_it_is_open_and_then_what_its_last_event_says() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("sweep/a");
        let open = RunDir::create(&path, TEXTS).unwrap();
        let metrics =
            "{\"step\":0,\"eval/accuracy\":0.25}\n{\"step\":1,\"reward/mean\":0.5}\n{\"step\":2,\"rew";
        fs::write(path.join("metrics.jsonl"), metrics).unwrap();
        let start = "{\"event\":\"start\",\"fields\":{}}\n";
        fs::write(path.join("events.jsonl"), start).unwrap();
        let shown = &listed(directory.path())[0];
        assert_eq!(
            (&shown["state"], &shown["step"], &shown["steps"], &shown["accuracy"], &shown["reward"]),
            (&json!("running"), &json!(1), &json!(7), &json!(0.25), &json!(0.5))
        );
        drop(open);
        for (events, state) in [
            (start.to_owned(), "interrupted"),
            (format!("{start}{{\"event\":\"end\",\"fields\":{{\"done\":false}}}}\n"), "stopped"),
            (format!("{start}{{\"event\":\"end\",\"fields\":{{\"done\":true}}}}\n{{\"torn"), "done"),
        ] {
            fs::write(path.join("events.jsonl"), events).unwrap();
            assert_eq!(listed(directory.path())[0]["state"], state);
        }
        assert!(RunDir::open(&path).is_ok(), "listing leaves no lock");
    }

    #[test]
    fn runs_with_damaged_files_are_listed_too_and_the_newest_is_first() {
        let directory = tempfile::tempdir().unwrap();
        for name in ["old", "new"] {
            fs::create_dir(directory.path().join(name)).unwrap();
            fs::write(directory.path().join(name).join("resolved.toml"), [0xff, 0x00, b'[']).unwrap();
        }
        fs::create_dir(directory.path().join("old/metrics.jsonl")).unwrap();
        let past = SystemTime::now() - Duration::from_secs(7200);
        for name in ["old/resolved.toml", "old/metrics.jsonl"] {
            File::open(directory.path().join(name)).unwrap().set_modified(past).unwrap();
        }
        fs::write(directory.path().join("new/metrics.jsonl"), "[1]\nnull\n\u{0}\n{\"step\":-1}\n").unwrap();
        let text = run(&RunsArgs { directory: directory.path().to_path_buf(), json: false }).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(lines[1].contains("/new") && lines[1].contains("interrupted"), "{text}");
        assert!(lines[2].contains("/old") && lines[2].ends_with("2 h ago"), "{text}");
    }

    #[test]
    fn without_runs_it_says_how_to_start_one() {
        let directory = tempfile::tempdir().unwrap();
        let args = |path: &Path| RunsArgs { directory: path.to_path_buf(), json: false };
        assert!(run(&args(directory.path())).unwrap().starts_with("no runs"));
        assert_eq!(run(&args(&directory.path().join("missing"))).unwrap_err().exit_code(), 2);
    }

    #[test]
    fn long_and_strange_names_are_one_line() {
        assert_eq!(shown(Path::new("a\nb\u{1b}[31m")), "a?b?[31m");
        let long = shown(Path::new(&"x".repeat(100)));
        assert_eq!((long.chars().count(), &long[..4]), (MAX_NAME_COLUMNS, "...x"));
    }
}
