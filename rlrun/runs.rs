//! `rlrun runs`: the run directories below a directory, with their state and their last measurements.
//!
//! Invariant: it reads what `dashboard::RunGlance` reads, and changes no file.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use dashboard::{LastEvent, RunGlance};
use serde_json::{Value, json};

use crate::args::RunsArgs;
use crate::failure::Failure;
use crate::run_dir;

/// Entries of directories that are looked at; further ones are left out, which is said.
const MAX_ENTRIES: usize = 20_000;
/// How deep below the directory a run may lie.
const MAX_DEPTH: usize = 4;
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
    runs.sort_by(|a, b| b.glance.changed.cmp(&a.glance.changed).then_with(|| a.path.cmp(&b.path)));
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

/// A run with its state.
#[derive(Debug)]
struct ListedRun {
    path: PathBuf,
    state: RunState,
    glance: RunGlance,
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
    /// The state of a run that no process has open.
    pub(crate) fn closed(last: LastEvent) -> Self {
        match last {
            LastEvent::Done => Self::Done,
            LastEvent::Stopped => Self::Stopped,
            LastEvent::None | LastEvent::Open => Self::Interrupted,
        }
    }

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
        let glance = RunGlance::read(&path);
        let state = if run_dir::is_in_use(&path) { RunState::Running } else { RunState::closed(glance.last) };
        Self { path, state, glance }
    }

    /// How long ago a file changed; 0 after a clock was set back.
    fn age(&self, now: SystemTime) -> Duration {
        now.duration_since(self.glance.changed).unwrap_or_default()
    }

    fn json(&self, now: SystemTime) -> Value {
        let RunGlance { step, steps, accuracy, reward, .. } = self.glance;
        json!({
            "path": self.path,
            "state": self.state.as_str(),
            "step": step,
            "steps": steps,
            "accuracy": accuracy,
            "reward": reward,
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
        let RunGlance { step, steps, accuracy, reward, .. } = run.glance;
        let step = step.map_or("-".to_owned(), |step| step.to_string());
        let steps = steps.map_or(String::new(), |steps| format!("/{steps}"));
        text += &format!(
            "\n{name:width$}  {:11} {:>11}  {:>8}  {:>6}  {} ago",
            run.state.as_str(),
            step + &steps,
            number(accuracy, 4),
            number(reward, 3),
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
    use std::fs::{self, File};

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
