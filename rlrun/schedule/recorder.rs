//! Writes the schedule of a run while it trains.
//!
//! Invariant: the record of a step is on disk before the checkpoint that contains the step.

use std::path::Path;

use rollout::Activity;
use trainer::{StepReport, Trainer};

use super::file::ScheduleFile;
use super::record::{SamplerEvents, ScheduleRecord, StartRecord, StepNumbers, StepRecord, TrainedTensors};
use super::{ScheduleError, build_id, path};
use crate::failure::Failure;

/// The schedule of a run that trains.
#[derive(Debug)]
pub(crate) struct ScheduleRecorder {
    file: ScheduleFile,
    path: std::path::PathBuf,
}

impl ScheduleRecorder {
    /// Records that the run in `run_dir` trains from the state of `trainer` on, as the resolved recipe `recipe` says.
    ///
    /// # Errors
    /// A schedule that was edited, a file that cannot be written, a rank that has failed.
    pub(crate) fn start(run_dir: &Path, recipe: String, trainer: &Trainer) -> Result<Self, Failure> {
        let path = path(run_dir);
        let system = |source| Failure::System { what: "read the program that is running".to_owned(), source };
        let start = StartRecord {
            version: trainer.version(),
            recipe,
            rlrun: env!("CARGO_PKG_VERSION").to_owned(),
            build: build_id().map_err(system)?,
            tensors: TrainedTensors::of(trainer)?,
        };
        let mut recorder = Self { file: ScheduleFile::open(&path, start.version)?, path };
        recorder.append(&ScheduleRecord::Start(start))?;
        Ok(recorder)
    }

    /// Records the step that `trainer` has made by second `time_s` of the run, and what samplers did meanwhile.
    ///
    /// # Errors
    /// A file that cannot be written, a rank that has failed.
    pub(crate) fn step(
        &mut self,
        step: &StepReport,
        trainer: &Trainer,
        activity: &[(String, Activity)],
        time_s: f64,
    ) -> Result<(), Failure> {
        let tensors = TrainedTensors { names: Vec::new(), ..TrainedTensors::of(trainer)? };
        let numbers = StepNumbers {
            time_s,
            learning_rate: step.learning_rate,
            grad_norm: step.grad_norm,
            dropped_stale: step.dropped_stale,
            kl: step.sums.mean_compared(step.sums.mismatch),
            ess: step.sums.effective_share(),
        };
        let (version, groups, events) = (step.version, step.groups.clone(), events(activity));
        let record = StepRecord { version, numbers, groups, tensors, events };
        self.append(&ScheduleRecord::Step(Box::new(record)))
    }

    fn append(&mut self, record: &ScheduleRecord) -> Result<(), Failure> {
        let encoded = record.encode();
        let refused = |reason| ScheduleError::Encode { path: self.path.clone(), reason };
        Ok(self.file.append(&encoded.map_err(refused)?)?)
    }
}

/// What samplers did, in the order of their clocks.
fn events(activity: &[(String, Activity)]) -> SamplerEvents {
    let mut events = SamplerEvents::default();
    for (name, done) in activity {
        let sampler = u16::try_from(events.samplers.len()).unwrap_or(u16::MAX);
        events.samplers.push(name.clone());
        events.left_out += done.left_out;
        for episode in &done.episodes {
            let known = events.arrivals.last().is_some_and(|arrival| arrival.1 == episode.group);
            if !known {
                events.arrivals.push((sampler, episode.group, episode.admitted, episode.stored));
            }
        }
        let applied = done.phases.iter().filter_map(|span| Some((sampler, span.version?, span.end)));
        events.applied.extend(applied);
    }
    events.arrivals.sort_by(|a, b| a.3.total_cmp(&b.3));
    events.applied.sort_by(|a, b| a.2.total_cmp(&b.2));
    events
}
