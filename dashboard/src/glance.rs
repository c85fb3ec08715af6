//! A run at a glance, for lists of runs: what the ends of its files say.
//!
//! Invariant: of a file at most [`MAX_TAIL_BYTES`] are read, whatever its length. A file that is torn, damaged or missing costs what
//! it would have said and nothing else.

use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::time::SystemTime;

use serde_json::{Map, Value};

use crate::events::LastEvent;
use crate::lines::open_inside;
use crate::recipe::ResolvedRecipe;

/// What is read of the end of a file, bytes: some hundred steps.
const MAX_TAIL_BYTES: u64 = 1 << 20;

/// What is known of a run without reading its files as a whole.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RunGlance {
    /// Steps that are done; `None` before the first line of metrics.
    pub step: Option<u64>,
    /// Steps that the recipe asks for.
    pub steps: Option<u64>,
    /// Last measured share of correct answers.
    pub accuracy: Option<f64>,
    /// Mean reward of the last step.
    pub reward: Option<f64>,
    /// What its last event says.
    pub last: LastEvent,
    /// When a file of the run changed last; the start of 1970 if there is none.
    pub changed: SystemTime,
}

impl RunGlance {
    /// Reads the ends of the files of the run in `root`.
    #[must_use]
    pub fn read(root: &Path) -> Self {
        let (mut step, mut accuracy, mut reward) = (None, None, None);
        for line in last_objects(root, "metrics.jsonl") {
            step = step.or_else(|| line.get("step").and_then(Value::as_u64));
            reward = reward.or_else(|| line.get("reward/mean").and_then(Value::as_f64));
            accuracy = accuracy.or_else(|| line.get("eval/accuracy").and_then(Value::as_f64));
            if step.is_some() && accuracy.is_some() && reward.is_some() {
                break;
            }
        }
        let changed = ["metrics.jsonl", "events.jsonl", "resolved.toml"].map(|name| {
            std::fs::metadata(root.join(name))
                .and_then(|found| found.modified())
                .unwrap_or(SystemTime::UNIX_EPOCH)
        });
        Self {
            step,
            steps: planned_steps(root),
            accuracy,
            reward,
            last: last_event(root),
            changed: changed.into_iter().max().unwrap_or(SystemTime::UNIX_EPOCH),
        }
    }
}

/// What the last event of the run in `root` says.
#[must_use]
pub fn last_event(root: &Path) -> LastEvent {
    last_objects(root, "events.jsonl").find_map(|event| LastEvent::of(&event)).unwrap_or(LastEvent::None)
}

/// Steps that the recipe of the run in `root` asks for.
#[must_use]
pub fn planned_steps(root: &Path) -> Option<u64> {
    ResolvedRecipe::read(root).ok().flatten()?.steps()
}

/// The JSON objects at the end of a file of lines, the last one first; what is no object is passed over.
fn last_objects(root: &Path, name: &str) -> impl Iterator<Item = Map<String, Value>> {
    let tail = tail(root, name).unwrap_or_default();
    let mut lines: Vec<Vec<u8>> = tail.split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
    std::iter::from_fn(move || lines.pop()).filter_map(|line| serde_json::from_slice(&line).ok())
}

/// The last bytes of a regular file.
fn tail(root: &Path, name: &str) -> io::Result<Vec<u8>> {
    let Some(mut file) = open_inside(root, &root.join(name))? else { return Ok(Vec::new()) };
    let start = file.metadata()?.len().saturating_sub(MAX_TAIL_BYTES);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(MAX_TAIL_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_count_and_long_files_cost_no_more() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        assert_eq!(RunGlance::read(root).changed, SystemTime::UNIX_EPOCH);
        let filler = format!("{{\"step\":1,\"eval/accuracy\":0.25,\"pad\":\"{}\"}}\n", "x".repeat(1000));
        let text = format!("{}{{\"step\":9,\"reward/mean\":0.5}}\n{{\"step\":10,\"rew", filler.repeat(2000));
        std::fs::write(root.join("metrics.jsonl"), text).unwrap();
        std::fs::write(root.join("resolved.toml"), "[trainer]\nsteps = 12  # --set\n").unwrap();
        let found = RunGlance::read(root);
        assert_eq!((found.step, found.steps, found.last), (Some(9), Some(12), LastEvent::None));
        assert_eq!((found.accuracy, found.reward), (Some(0.25), Some(0.5)));
        let events = "{\"event\":\"start\"}\n{\"event\":\"stall\"}\n{\"event\":\"end\",\"fields\":{\"done\":true}}\n{\"torn";
        std::fs::write(root.join("events.jsonl"), events).unwrap();
        assert_eq!(last_event(root), LastEvent::Done);
    }
}
