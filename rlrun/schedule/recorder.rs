//! Writes the schedule of a run while it trains.
//!
//! Invariant: the record of a step is on disk before the checkpoint that contains the step.

use std::path::Path;

use trainer::{StepReport, Trainer};

use super::file::ScheduleFile;
use super::record::{ScheduleRecord, StartRecord, StepNumbers, StepRecord, TrainedTensors};
use super::{ScheduleError, build_id, path};
use crate::failure::Failure;
use crate::report::Report;

/// The schedule of a run that trains.
#[derive(Debug)]
pub(crate) struct ScheduleRecorder {
    file: ScheduleFile,
    path: std::path::PathBuf,
}

impl ScheduleRecorder {
    /// Records that the run in `run_dir` trains from the state of `trainer` on, as the resolved recipe `recipe` says. A schedule
    /// that does not lead to this state begins anew, after a note in `report`.
    ///
    /// # Errors
    /// A schedule that was edited, a file that cannot be written, a rank that has failed.
    pub(crate) fn start(
        run_dir: &Path,
        recipe: String,
        trainer: &Trainer,
        report: &Report,
    ) -> Result<Self, Failure> {
        let path = path(run_dir);
        let system = |source| Failure::System { what: "read the program that is running".to_owned(), source };
        let start = StartRecord {
            version: trainer.version(),
            recipe,
            rlrun: env!("CARGO_PKG_VERSION").to_owned(),
            build: build_id().map_err(system)?,
            tensors: TrainedTensors::of(trainer)?,
        };
        let file = ScheduleFile::open(&path, &start, |text| report.note(text))?;
        let mut recorder = Self { file, path };
        recorder.append(&ScheduleRecord::Start(start))?;
        Ok(recorder)
    }

    /// Records the step that `trainer` has made by second `time_s` of the run.
    ///
    /// # Errors
    /// A record that cannot be encoded, a file that cannot be written, a rank that has failed.
    pub(crate) fn step(&mut self, step: &StepReport, trainer: &Trainer, time_s: f64) -> Result<(), Failure> {
        let tensors = TrainedTensors { names: Vec::new(), ..TrainedTensors::of(trainer)? };
        let numbers = StepNumbers::of(step, time_s);
        let record = StepRecord { version: step.version, numbers, groups: step.groups.clone(), tensors };
        self.append(&ScheduleRecord::Step(Box::new(record)))
    }

    fn append(&mut self, record: &ScheduleRecord) -> Result<(), Failure> {
        let encoded = record.encode();
        let refused = |reason| ScheduleError::Encode { path: self.path.clone(), reason };
        Ok(self.file.append(&encoded.map_err(refused)?)?)
    }
}
