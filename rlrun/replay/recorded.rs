//! The schedule of a run, read and checked as a whole before anything is computed.
//!
//! Invariant: a schedule that passes has every step between its first and its last, and belongs to the run directory it is in.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;
use trajectory::PolicyVersion;

use crate::failure::Failure;
use crate::schedule::{self, ScheduleError, ScheduleReader, ScheduleRecord, StartRecord};

/// A recorded run.
pub(super) struct RecordedRun {
    /// Its schedule.
    pub(super) path: PathBuf,
    /// The version before the first step, and that of the last.
    pub(super) first: PolicyVersion,
    pub(super) last: PolicyVersion,
    starts: Vec<StartRecord>,
}

/// Steps of a run between a start and the next with another recipe or build.
pub(super) struct RecordedPart {
    pub(super) start: StartRecord,
    /// The version before the first step, and that of the last.
    pub(super) from: PolicyVersion,
    pub(super) until: PolicyVersion,
}

impl RecordedRun {
    /// Opens the schedule of the run in `run_dir`, and reads all of it.
    ///
    /// # Errors
    /// A schedule that is not there, was cut or edited, has no step, or is that of another run.
    pub(super) fn open(run_dir: &Path) -> Result<Self, Failure> {
        let resolved = run_dir.join("resolved.toml");
        let Ok(recipe) = std::fs::read_to_string(&resolved) else {
            return Err(crate::run_dir::RunDirError::NotARun { path: run_dir.to_path_buf() }.into());
        };
        let path = schedule::path(run_dir);
        let mut reader = ScheduleReader::open(&path)?;
        let (mut starts, mut times) = (Vec::<StartRecord>::new(), BTreeMap::new());
        let mut last = None;
        while let Some(record) = reader.next()? {
            match record {
                ScheduleRecord::Start(start) => {
                    // A resume that made no step.
                    starts.retain(|before| before.version < start.version);
                    starts.push(start);
                }
                ScheduleRecord::Step(step) => {
                    last = Some(step.version);
                    times.insert(step.version.0, step.numbers.time_s);
                }
            }
        }
        let (Some(newest), Some(last)) = (starts.last(), last) else {
            return Err(ScheduleError::Empty { path }.into());
        };
        let measured = measured_times(run_dir);
        let mut in_both = measured.iter().filter_map(|(step, time)| Some((*step, time == times.get(step)?)));
        if let Some((step, _)) = in_both.clone().find(|(_, same)| !same) {
            return Err(ScheduleError::other_time(&path, step).into());
        }
        if in_both.next().is_none() && newest.recipe != recipe && records_now(&recipe) {
            let reason = format!("its last start has another recipe than {}", resolved.display());
            return Err(ScheduleError::Foreign { path, reason }.into());
        }
        let missing = measured.keys().next_back().filter(|step| **step > last.0);
        if let Some(step) = missing.filter(|_| records_now(&recipe)) {
            let (bytes, after) = (reader.bytes(), format!("step {}", last.0));
            let after = format!("{after}, although metrics.jsonl has step {step}");
            return Err(ScheduleError::Cut { path, bytes, after }.into());
        }
        let first = starts.first().map_or(last, |start| start.version);
        Ok(Self { path, first, last, starts })
    }

    /// The steps after version `from`, by start. Starts of the same recipe and build continue each other.
    pub(super) fn parts(&self, from: PolicyVersion) -> Vec<RecordedPart> {
        let mut parts: Vec<RecordedPart> = Vec::new();
        for (n, start) in self.starts.iter().enumerate() {
            let until = self.starts.get(n + 1).map_or(self.last, |next| next.version);
            if until <= from {
                continue;
            }
            match parts.last_mut() {
                Some(part) if (&part.start.recipe, &part.start.build) == (&start.recipe, &start.build) => {
                    part.until = until;
                }
                _ => {
                    parts.push(RecordedPart { start: start.clone(), from: from.max(start.version), until });
                }
            }
        }
        parts
    }
}

/// Whether a resolved recipe says that the run is recorded; a resume may have ended the recording.
fn records_now(recipe: &str) -> bool {
    let recipe: Option<toml::Table> = recipe.parse().ok();
    recipe.and_then(|recipe| recipe.get("log")?.get("schedule")?.as_bool()).unwrap_or(false)
}

/// When the training steps of a run ended, seconds, by its metrics.
pub(crate) fn measured_times(run_dir: &Path) -> BTreeMap<u64, f64> {
    let text = std::fs::read_to_string(run_dir.join("metrics.jsonl")).unwrap_or_default();
    let line = |line: &str| {
        let line: Value = serde_json::from_str(line).ok()?;
        line.get("loss/mean")?;
        Some((line.get("step")?.as_u64()?, line.get("time_s")?.as_f64()?))
    };
    text.lines().filter_map(line).collect()
}
