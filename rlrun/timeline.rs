//! `timeline.jsonl`: when each role of a run did what, and the times of the stages of trajectories.
//!
//! Invariant: the file is only appended to, in whole lines; a resume removes nothing, because repeated steps took time too. A file
//! that cannot be written is named once and left; it never ends a run.

use std::borrow::Cow;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rewards::load::unix_seconds;
use serde::{Serialize, Serializer};
use trajectory::{GroupId, PolicyVersion};

use crate::report::Report;
use crate::trackers::SpanExporter;

/// Lane of the trainer's thread.
pub(crate) const TRAINER: &str = "trainer";

/// Something that a role did, or waited for. Times are seconds of the run.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct TimelineSpan {
    /// The role.
    pub(crate) lane: Cow<'static, str>,
    /// What it did.
    pub(crate) kind: &'static str,
    #[serde(serialize_with = "microseconds")]
    pub(crate) start: f64,
    #[serde(serialize_with = "microseconds")]
    pub(crate) end: f64,
    /// The training step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) step: Option<u64>,
    /// The version that was pushed or applied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) version: Option<PolicyVersion>,
    /// Trajectories that were judged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) count: Option<u64>,
    /// Bytes that were sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bytes: Option<u64>,
    /// What is to be said of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) note: Option<Cow<'static, str>>,
}

/// The way of a trajectory from its slot to the step that trained on it. Times are seconds of the run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TimelineTrajectory {
    pub(crate) group: GroupId,
    pub(crate) index: u32,
    /// The step that trained on it.
    pub(crate) step: u64,
    /// Staleness of its oldest token, versions.
    pub(crate) lag: u64,
    /// The versions that sampled it, in order.
    pub(crate) versions: Vec<PolicyVersion>,
    /// Its group got a slot; without a report of its sampler, its batch was leased.
    #[serde(serialize_with = "microseconds")]
    pub(crate) start: f64,
    /// Its last token was sampled, it was judged, its group was judged, and stored; `None` if no sampler has reported it.
    #[serde(flatten)]
    pub(crate) sampled: Option<SampledTimes>,
    /// Its batch was leased.
    #[serde(serialize_with = "microseconds")]
    pub(crate) leased: f64,
    /// Whether its group was the last of the batch to be stored.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) last: bool,
    /// The step was over.
    #[serde(serialize_with = "microseconds")]
    pub(crate) end: f64,
}

/// What a sampler reports of a trajectory. Times are seconds of the run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct SampledTimes {
    #[serde(serialize_with = "microseconds")]
    pub(crate) sampled: f64,
    #[serde(serialize_with = "microseconds")]
    pub(crate) scored: f64,
    #[serde(serialize_with = "microseconds")]
    pub(crate) settled: f64,
    #[serde(serialize_with = "microseconds")]
    pub(crate) stored: f64,
    /// Its name.
    pub(crate) sampler: String,
}

/// Seconds with six digits after the point, and no number that is not finite.
fn microseconds<S: Serializer>(seconds: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    let seconds = if seconds.is_finite() { *seconds } else { 0.0 };
    serializer.serialize_f64((seconds * 1e6).round() / 1e6)
}

/// A line of the file.
#[derive(Clone, Debug)]
pub(crate) enum TimelineLine {
    Span(TimelineSpan),
    Trajectory(TimelineTrajectory),
}

impl Serialize for TimelineLine {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Named<'a> {
            lane: &'static str,
            kind: &'static str,
            #[serde(flatten)]
            of: &'a TimelineTrajectory,
        }
        match self {
            Self::Span(span) => span.serialize(serializer),
            Self::Trajectory(of) => {
                Named { lane: "trajectory", kind: "trajectory", of }.serialize(serializer)
            }
        }
    }
}

/// The timeline of a run, which its roles share.
#[derive(Debug)]
pub(crate) struct Timeline {
    path: PathBuf,
    /// `None` after a failure.
    file: Mutex<Option<File>>,
    /// Seconds since 1970 at second 0 of the run, as if it had never been interrupted.
    origin: f64,
    report: Arc<Report>,
    /// `None` without `log.otlp`.
    exporter: Option<SpanExporter>,
    /// Whether spans were dropped because the collector is slow, which is said once.
    dropped: AtomicBool,
}

impl Timeline {
    /// Opens the file in `run_dir` to append, at second `time_s` of the run.
    pub(crate) fn open(run_dir: &Path, time_s: f64, report: &Arc<Report>) -> Self {
        let path = run_dir.join("timeline.jsonl");
        let opened = open(&path);
        let timeline = Self {
            path,
            file: Mutex::new(None),
            origin: unix_seconds() - time_s,
            report: Arc::clone(report),
            exporter: None,
            dropped: AtomicBool::new(false),
        };
        match opened {
            Ok(file) => *timeline.file.lock().unwrap_or_else(PoisonError::into_inner) = Some(file),
            Err(error) => timeline.left(&error),
        }
        timeline
    }

    /// The same, sent to the collector at `url` too, under the name `run`.
    pub(crate) fn sent_to(self, url: Option<&str>, run: &str) -> Self {
        let start = |url| SpanExporter::start(url, run, self.origin, &self.report);
        let exporter = match url.map(start).transpose() {
            Ok(exporter) => exporter,
            Err(reason) => {
                self.report.note(&format!("`log.otlp`: {reason}; the run goes on without it"));
                None
            }
        };
        Self { exporter, ..self }
    }

    /// Writes that the run was started or resumed just now.
    pub(crate) fn started(&self) {
        let start = self.now();
        let span = TimelineSpan {
            lane: TRAINER.into(),
            kind: "start",
            start,
            end: start,
            ..TimelineSpan::default()
        };
        self.write(&[TimelineLine::Span(span)]);
    }

    /// The second of the run at `unix` seconds since 1970.
    pub(crate) fn second(&self, unix: f64) -> f64 {
        unix - self.origin
    }

    /// Now, in seconds of the run.
    pub(crate) fn now(&self) -> f64 {
        self.second(unix_seconds())
    }

    /// Appends `lines` in a single write.
    pub(crate) fn write(&self, lines: &[TimelineLine]) {
        if lines.is_empty() {
            return;
        }
        let mut bytes = Vec::new();
        for line in lines {
            if serde_json::to_writer(&mut bytes, line).is_ok() {
                bytes.push(b'\n');
            }
        }
        if let Some(exporter) = &self.exporter
            && !exporter.send(lines)
            && !self.dropped.swap(true, Ordering::Relaxed)
        {
            self.report.note("the collector of `log.otlp` is slower than the run; spans are dropped");
        }
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = &mut *file
            && let Err(error) = open.write_all(&bytes)
        {
            *file = None;
            drop(file);
            self.left(&error);
        }
    }

    /// The watchdog has seen no progress for at least `quiet` seconds, and says why in `text`.
    pub(crate) fn stalled(&self, quiet: f64, text: &str) {
        let end = self.now();
        let note = Some(text.to_owned().into());
        let (lane, kind, start) = ("watchdog".into(), "stall", end - quiet);
        self.write(&[TimelineLine::Span(TimelineSpan {
            lane,
            kind,
            start,
            end,
            note,
            ..TimelineSpan::default()
        })]);
    }

    fn left(&self, error: &std::io::Error) {
        let path = self.path.display();
        self.report.note(&format!("{path} cannot be written: {error}; the run goes on without it"));
    }
}

/// Opens `path` to append; ends a line that a crash has torn.
fn open(path: &Path) -> std::io::Result<File> {
    let mut file = File::options().read(true).append(true).create(true).open(path)?;
    let mut last = [b'\n'];
    if file.seek(SeekFrom::End(0))? > 0 {
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
    }
    if last != [b'\n'] {
        file.write_all(b"\n")?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Style;

    #[test]
    fn lines_have_the_documented_form_and_a_torn_one_is_ended() {
        let directory = tempfile::tempdir().unwrap();
        let report = Arc::new(Report::new(Style::detect(true, &Default::default())));
        std::fs::write(directory.path().join("timeline.jsonl"), "{\"lane\":\"tra").unwrap();
        let timeline = Timeline::open(directory.path(), 10.0, &report);
        assert!((timeline.now() - 10.0).abs() < 60.0);
        let span = TimelineSpan {
            lane: "weights".into(),
            kind: "push",
            start: 1.000_000_4,
            end: f64::NAN,
            version: Some(PolicyVersion(3)),
            bytes: Some(7),
            ..TimelineSpan::default()
        };
        let sampled = SampledTimes {
            sampled: 1.0,
            scored: 1.25,
            settled: 1.375,
            stored: 1.5,
            sampler: "sampler 0".to_owned(),
        };
        let trajectory = TimelineTrajectory {
            group: GroupId(9),
            index: 1,
            step: 4,
            lag: 2,
            versions: vec![PolicyVersion(1), PolicyVersion(2)],
            start: 0.5,
            sampled: Some(sampled),
            leased: 2.0,
            last: true,
            end: 3.0,
        };
        let unknown = TimelineTrajectory { sampled: None, last: false, ..trajectory.clone() };
        timeline.write(&[
            TimelineLine::Span(span),
            TimelineLine::Trajectory(trajectory),
            TimelineLine::Trajectory(unknown),
        ]);
        let text = std::fs::read_to_string(directory.path().join("timeline.jsonl")).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "{\"lane\":\"tra");
        let expected = [
            r#"{"lane":"weights","kind":"push","start":1.0,"end":0.0,"version":3,"bytes":7}"#,
            r#"{"lane":"trajectory","kind":"trajectory","group":9,"index":1,"step":4,"lag":2,"versions":[1,2],"start":0.5,"sampled":1.0,"scored":1.25,"settled":1.375,"stored":1.5,"sampler":"sampler 0","leased":2.0,"last":true,"end":3.0}"#,
            r#"{"lane":"trajectory","kind":"trajectory","group":9,"index":1,"step":4,"lag":2,"versions":[1,2],"start":0.5,"leased":2.0,"end":3.0}"#,
        ];
        assert_eq!(lines[1..], expected);
    }

    #[test]
    fn a_place_that_cannot_be_written_is_left() {
        let directory = tempfile::tempdir().unwrap();
        let report = Arc::new(Report::new(Style::detect(true, &Default::default())));
        let timeline = Timeline::open(&directory.path().join("missing"), 0.0, &report);
        timeline.write(&[TimelineLine::Span(TimelineSpan::default())]);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
