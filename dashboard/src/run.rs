//! One run directory, as far as its files have been read.
//!
//! Invariant: a run that is deleted, or whose files cannot be read, has a state that says so and does not affect others.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use crate::events::{LastEvent, RunHistory};
use crate::lines::LineTail;
use crate::recipe::ResolvedRecipe;
use crate::table::{MetricsSink, MetricsTable};
use crate::timeline::FollowedTimeline;
use crate::why::{FollowedPaths, SerialAdvisor};

/// A run without an end whose files have not changed for so long is not called running.
const QUIET: Duration = Duration::from_secs(600);

/// A run directory that is shown.
#[derive(Debug)]
pub(crate) struct ShownRun {
    /// The name on the page; unique.
    name: String,
    root: PathBuf,
    contents: Mutex<RunContents>,
    /// Its own lock: reading a long timeline delays nothing else.
    timeline: Mutex<FollowedTimeline>,
    /// Read when it is asked for.
    paths: Mutex<FollowedPaths>,
}

/// What was read of a run.
#[derive(Debug)]
pub(crate) struct RunContents {
    metrics_tail: LineTail,
    events_tail: LineTail,
    pub(crate) table: MetricsTable,
    pub(crate) history: RunHistory,
    /// Steps that the recipe asks for, and when the recipe was changed.
    planned: Option<(SystemTime, Option<u64>)>,
    samples_changed: Option<SystemTime>,
    status_changed: Option<SystemTime>,
    /// Rises with every change.
    pub(crate) revision: u64,
    missing: bool,
    /// Why the files could not be read the last time.
    problem: Option<String>,
}

impl ShownRun {
    /// The run of `root`, nothing of it read yet.
    pub(crate) fn new(name: String, root: &Path) -> Self {
        let contents = RunContents {
            metrics_tail: LineTail::new(root, "metrics.jsonl"),
            events_tail: LineTail::new(root, "events.jsonl"),
            table: MetricsTable::default(),
            history: RunHistory::default(),
            planned: None,
            samples_changed: None,
            status_changed: None,
            revision: 0,
            missing: false,
            problem: None,
        };
        let timeline = Mutex::new(FollowedTimeline::new(root));
        let paths = Mutex::new(FollowedPaths::new(root));
        Self { name, root: root.to_path_buf(), contents: Mutex::new(contents), timeline, paths }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// What was read. A panic while it was read leaves at most a line out.
    pub(crate) fn contents(&self) -> MutexGuard<'_, RunContents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was read of the timeline.
    pub(crate) fn timeline(&self) -> MutexGuard<'_, FollowedTimeline> {
        self.timeline.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the time of the run went, with the recommendations of `advisor`.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub(crate) fn why(&self, advisor: Option<&SerialAdvisor>) -> io::Result<Value> {
        let (explanation, mut answer) = self.paths.lock().unwrap_or_else(PoisonError::into_inner).answer()?;
        // Simulations take long: the lock is free again.
        if let Some(advice) = advisor.and_then(|advisor| advisor.advice(&self.root, &explanation)) {
            answer["recommendations"] = advice;
        }
        Ok(answer)
    }

    /// Reads what is new. Returns the revision.
    pub(crate) fn refresh(&self) -> u64 {
        // A timeline that cannot be read says so to those who ask for it.
        let spans = self.root.is_dir() && self.timeline().poll().unwrap_or(false);
        let mut contents = self.contents();
        let changed = contents.refresh(&self.root);
        contents.revision += u64::from(changed || spans);
        contents.revision
    }
}

impl RunContents {
    fn refresh(&mut self, root: &Path) -> bool {
        let missing = !root.is_dir();
        let mut changed = std::mem::replace(&mut self.missing, missing) != missing;
        if missing {
            // The page keeps what it has seen.
            return changed;
        }
        let modified =
            |name: &str| std::fs::metadata(root.join(name)).and_then(|found| found.modified()).ok();
        let recipe = modified("resolved.toml");
        if self.planned.map(|(at, _)| at) != recipe {
            let steps = ResolvedRecipe::read(root).ok().flatten().and_then(|recipe| recipe.steps());
            self.planned = recipe.map(|at| (at, steps));
            changed = true;
        }
        let samples = modified("samples");
        changed |= std::mem::replace(&mut self.samples_changed, samples) != samples;
        let status = modified("status.json");
        changed |= std::mem::replace(&mut self.status_changed, status) != status;
        let Self { metrics_tail, events_tail, table, history, .. } = self;
        let events = events_tail.poll(history);
        let metrics = metrics_tail.poll(&mut MetricsSink { table, history });
        let problem = events.as_ref().err().or(metrics.as_ref().err()).map(ToString::to_string);
        changed |= self.problem != problem || events.unwrap_or(false) || metrics.unwrap_or(false);
        self.problem = problem;
        changed
    }

    /// The word for a state: `missing`, `waiting`, `running`, `quiet`, `stopped` or `done`.
    fn state(&self, now: SystemTime) -> &'static str {
        match self.history.last() {
            _ if self.missing => "missing",
            LastEvent::Done => "done",
            LastEvent::Stopped => "stopped",
            _ if self.age(now).is_some_and(|age| age > QUIET) => "quiet",
            // Copied metrics may come without their events.
            LastEvent::None if self.table.last_row().is_none() => "waiting",
            LastEvent::Open | LastEvent::None => "running",
        }
    }

    /// Since when no file has changed.
    fn age(&self, now: SystemTime) -> Option<Duration> {
        let last = [self.metrics_tail.modified(), self.events_tail.modified()].into_iter().flatten().max();
        // A clock that was set back: now.
        last.map(|last| now.duration_since(last).unwrap_or_default())
    }

    /// State, progress and last values of the run, as `/api/runs` has them.
    pub(crate) fn describe(&self, name: &str, now: SystemTime) -> Value {
        let (step, time_s) = self.table.last_row().unzip();
        let too_long = self.metrics_tail.skipped() + self.events_tail.skipped();
        json!({
            "name": name,
            "revision": self.revision,
            "state": self.state(now),
            "step": step,
            "steps": self.planned.and_then(|(_, steps)| steps),
            "time_s": time_s.filter(|time_s| time_s.is_finite()),
            "age_s": self.age(now).map(|age| age.as_secs()),
            "remark": self.history.current_remark(),
            "problem": self.problem,
            "truncated": self.table.truncated(),
            "skipped_lines": too_long,
            "last": self.table.last_values(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_followed_from_its_first_line_to_its_removal() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("run");
        std::fs::create_dir(&root).unwrap();
        let run = ShownRun::new("run".to_owned(), &root);
        let state = |run: &ShownRun| run.contents().describe("run", SystemTime::now());
        let first = run.refresh();
        assert_eq!(state(&run)["state"], "waiting");
        let start = "{\"event\":\"start\",\"fields\":{}}\n";
        std::fs::write(root.join("events.jsonl"), start).unwrap();
        let recipe = "[trainer]\nsteps = 7  # --set\n";
        std::fs::write(root.join("resolved.toml"), recipe).unwrap();
        std::fs::write(root.join("metrics.jsonl"), "{\"step\":1,\"time_s\":2.5,\"a\":0.1}\n{\"ste").unwrap();
        let second = run.refresh();
        assert!(second > first);
        assert_eq!(run.refresh(), second, "nothing is new");
        let shown = state(&run);
        assert_eq!(
            (&shown["state"], &shown["step"], &shown["steps"]),
            (&json!("running"), &json!(1.0), &json!(7))
        );
        assert_eq!(shown["last"]["a"], 0.1);
        let later = SystemTime::now() + QUIET + Duration::from_secs(5);
        assert_eq!(run.contents().describe("run", later)["state"], "quiet");
        std::fs::remove_file(root.join("metrics.jsonl")).unwrap();
        let third = run.refresh();
        assert!(third > second);
        assert_eq!(state(&run)["last"]["a"], 0.1, "its files are removed before the directory");
        std::fs::remove_dir_all(&root).unwrap();
        assert!(run.refresh() > third);
        let shown = state(&run);
        assert_eq!((&shown["state"], &shown["last"]["a"]), (&json!("missing"), &json!(0.1)));
    }
}
