//! Curation as a recipe means it, with its history in the run directory.
//!
//! Invariant: without `[curation]` there is neither a curator nor a file. With it, `curation.jsonl` is only ever added to:
//! what a task's trajectories were worth stays true when the steps after them are done again.

use std::error::Error;
use std::path::Path;

use rollout::curation::{
    Curation, CurationConfig, Curator, DifficultyPool, OutcomeSink, Shrink, TaskOutcome,
};
use rollout::{Interruption, Progress, PromptSet, RolloutError, StopRules};

use crate::failure::Failure;
use crate::metrics::Metrics;
use crate::recipe::Recipe;
use crate::run_dir::{JsonLines, JsonLinesError, RunDir, RunDirError};

impl Recipe {
    /// The configuration of the curator; `None` if `[curation]` is off.
    #[must_use]
    pub fn curation(&self) -> Option<CurationConfig> {
        let curation = &self.curation;
        let pool = |share| move |pass_rate| DifficultyPool { pass_rate, share };
        curation.is_on().then(|| CurationConfig {
            seed: self.seed,
            group_size: self.rollout.group_size,
            batch_groups: self.buffer.batch_groups,
            max_staleness: self.buffer.max_staleness,
            steps: self.trainer.steps,
            max_refill_ratio: curation.dynamic_sampling.then_some(curation.max_refill_ratio),
            max_pass_rate: curation.max_pass_rate,
            filter_after: curation.filter_after,
            easy: curation.easy_pass_rate.map(pool(curation.easy_share)),
            hard: curation.hard_pass_rate.map(pool(curation.hard_share)),
            shrink: curation.shrink_above.map(|above| Shrink { above, min: curation.min_group_size }),
            turn_margin: curation.turn_margin,
            success_pool: curation.success_pool,
        })
    }

    /// The text that is put into long completions, if there is one.
    ///
    /// # Errors
    /// A text that cannot be put in.
    pub fn interruption(&self, stop: &StopRules) -> Result<Option<Interruption>, RolloutError> {
        let rollout = &self.rollout;
        let keys = (&rollout.interrupt_text, rollout.interrupt_after_min, rollout.interrupt_after_max);
        let (Some(text), Some(min), Some(max)) = keys else { return Ok(None) };
        Interruption::new(text, min..=max, stop, rollout.max_completion_length).map(Some)
    }
}

/// The curator of a run over `tasks`; it continues from the state of an earlier process.
///
/// # Errors
/// A history that cannot be read or written, or holds a line that rlrun did not write.
pub(crate) fn open(
    recipe: &Recipe,
    run_dir: &RunDir,
    tasks: &PromptSet,
) -> Result<Option<Curation>, Failure> {
    let Some(config) = recipe.curation() else { return Ok(None) };
    let (lines, outcomes) = history(&run_dir.path().join("curation.jsonl")).map_err(RunDirError::from)?;
    let mut curator = Curator::new(config, tasks.iter().map(|(task, _)| task.id));
    outcomes.iter().for_each(|outcome| curator.learn(outcome));
    Ok(Some(Curation::new(curator, Box::new(Sink(lines)))))
}

/// Writes what curation did in a step, if the recipe uses it.
pub(crate) fn measure(recipe: &Recipe, metrics: &mut Metrics, before: Progress, after: Progress) {
    let (then, now) = (before.curation, after.curation);
    if recipe.curation.is_on() {
        for (name, before, after) in [
            ("refilled", then.refilled, now.refilled),
            ("let_through", then.let_through, now.let_through),
            ("retired", then.retired, now.retired),
            ("unlearnable", then.unlearnable, now.unlearnable),
            ("pooled_out", then.pooled_out, now.pooled_out),
            ("shrunk", then.shrunk, now.shrunk),
            ("turn_limited", then.turn_limited, now.turn_limited),
            ("replayed_successes", then.replayed_successes, now.replayed_successes),
        ] {
            metrics.set(&format!("curation/{name}"), after.saturating_sub(before) as f64);
        }
    }
    if recipe.rollout.interrupt_text.is_some() {
        let interrupted = after.engine.interrupted.saturating_sub(before.engine.interrupted);
        metrics.set("curation/interrupted", interrupted as f64);
    }
}

/// The file to append to, and what it holds. A torn last line is what a crash leaves and is cut off.
fn history(path: &Path) -> Result<(JsonLines, Vec<TaskOutcome>), JsonLinesError> {
    let lines = JsonLines::open(path, None)?;
    let io = |source| JsonLinesError::Io { verb: "read", path: path.to_path_buf(), source };
    let text = std::fs::read_to_string(path).map_err(io)?;
    let outcomes = text.lines().enumerate().map(|(n, line)| {
        read(line).map_err(|reason| {
            let (path, line) = (path.to_path_buf(), n + 1);
            JsonLinesError::Unexpected { path, line, reason }
        })
    });
    Ok((lines, outcomes.collect::<Result<_, _>>()?))
}

fn read(line: &str) -> Result<TaskOutcome, String> {
    let outcome: TaskOutcome = serde_json::from_str(line).map_err(|error| error.to_string())?;
    let TaskOutcome { passes, trajectories, .. } = outcome;
    if trajectories == 0 || passes > trajectories {
        return Err(format!("{passes} of {trajectories} trajectories passed"));
    }
    Ok(outcome)
}

/// The history as the scorer writes it.
struct Sink(JsonLines);

impl OutcomeSink for Sink {
    fn append(&mut self, outcome: &TaskOutcome) -> Result<(), Box<dyn Error + Send + Sync>> {
        Ok(self.0.append(outcome)?)
    }
}

#[cfg(test)]
mod tests {
    use trajectory::{GroupId, PolicyVersion, TaskId};

    use super::*;

    fn outcome(task: u64) -> TaskOutcome {
        TaskOutcome {
            task: TaskId(task),
            group: GroupId(7),
            version: PolicyVersion(3),
            passes: 1,
            trajectories: 4,
            success_turns: Some(2),
        }
    }

    #[test]
    fn a_history_comes_back_but_for_a_torn_last_line() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("curation.jsonl");
        let (lines, none) = history(&path).unwrap();
        assert_eq!(none, []);
        let mut sink = Sink(lines);
        sink.append(&outcome(1)).unwrap();
        sink.append(&outcome(2)).unwrap();
        let whole = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, format!("{whole}{{\"task\":3,\"gro")).unwrap();
        let (_, known) = history(&path).unwrap();
        assert_eq!(known, [outcome(1), outcome(2)]);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), whole);
    }

    #[test]
    fn an_invalid_line_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("curation.jsonl");
        let sound = serde_json::to_string(&outcome(1)).unwrap();
        for (line, evidence) in [
            (r#"{"task":1}"#.to_owned(), "missing field"),
            ("17".to_owned(), "is not a JSON object"),
            (sound.replace("\"passes\":1", "\"passes\":5"), "5 of 4 trajectories passed"),
            (sound.replace("\"passes\"", "\"pases\""), "unknown field `pases`"),
        ] {
            std::fs::write(&path, format!("{sound}\n{line}\n{sound}\n")).unwrap();
            let error = history(&path).unwrap_err().to_string();
            assert!(error.contains("curation.jsonl` line 2") && error.contains(evidence), "{error}");
        }
    }
}
