//! The records of a run: metrics, events and sampled trajectories, and their part in the terminal.
//!
//! Invariant: files are authoritative and written first; the terminal shows the same numbers.

mod adapted;
mod exchange;
mod measures;
mod peers;
mod ranks;
mod rewards;
mod running;
mod samples;
mod spans;
mod tokens;
mod weights;

use std::ops::Range;
use std::sync::Arc;

use ::rewards::LoadCounts;
use ::weights::{Distribution, Lag, PushCost};
use buffer::Buffer;
use model::ModelDirectory;
use rollout::{Activity, Progress};
use serde_json::json;
use trainer::StepReport;
use trainer::report::ComponentStatistics;
use trajectory::PolicyVersion;

use crate::diagnosis::Diagnosis;
use crate::evaluation::Evaluated;
use crate::failure::Failure;
use crate::metrics::Metrics;
use crate::peers::Refused;
use crate::recipe::Recipe;
use crate::report::Report;
use crate::run_dir::{JsonLines, RunDir};
use crate::status::{RunStatus, StepStatus};
use crate::timeline::Timeline;
use crate::trackers::Trackers;
pub use adapted::AdmissionLimits;
use spans::SpanWriter;
use tokens::TokenWriter;

/// Steps in a row without a scored trajectory after which a run ends.
const UNSCORED: u32 = 3;

/// Writes down what happens in a run.
#[derive(Debug)]
pub struct Observer<'a> {
    recipe: &'a Recipe,
    run_dir: &'a RunDir,
    report: &'a Arc<Report>,
    /// `None` until the run knows the step that it resumes from.
    metrics: Option<JsonLines>,
    trackers: Trackers,
    /// `None` without `log.timeline`, and before the first step.
    spans: Option<SpanWriter>,
    /// `None` for a run that no page follows.
    status: Option<Arc<RunStatus>>,
    /// `None` without `log.tokens`.
    tokens: Option<TokenWriter>,
    diagnosis: Diagnosis,
    /// The version that this attempt at the run starts from.
    first: PolicyVersion,
    events: JsonLines,
    dropped_stale: u64,
    /// Rejected input of other processes.
    counts: peers::PeerCounts,
    /// Whether trajectories that do not say whether they are correct have been named.
    unjudged_named: bool,
    /// Steps in a row of which no trajectory could be scored.
    unscored: u32,
    /// Mean number of sequences that samplers run at once, as they last reported it, if that adapts.
    running_limit: Option<f64>,
}

/// Everything that is known of a step.
#[derive(Debug)]
pub struct ObserverInputs<'a> {
    /// What the trainer says.
    pub step: &'a StepReport,
    /// Answers to the held-out tasks, if an evaluation was due.
    pub evaluation: Option<&'a Evaluated>,
    /// What each sampler did since the last step, by name.
    pub activity: &'a [(String, Activity)],
    /// Begin and end of the evaluation, if one was due, seconds of the run.
    pub evaluated: Option<Range<f64>>,
    /// The load of each reward during the step, by name.
    pub rewards: &'a [(String, LoadCounts)],
    /// Cost of the last weight push.
    pub push: Option<PushCost>,
    /// The version of every sampler.
    pub lags: &'a [Lag],
    /// How versions have been sent so far.
    pub distribution: Distribution,
    /// Rejected input of other processes during the step.
    pub refused: &'a [Refused],
    /// The work of the sampler up to the begin of the step.
    pub sampler_before: Progress,
    /// The work of the sampler up to the end of the step.
    pub sampler_after: Progress,
    /// Wall time of the step with its evaluation, seconds.
    pub step_s: f64,
    /// The limits of admission that adapt.
    pub limits: AdmissionLimits,
    /// Wall time of the run, seconds.
    pub time_s: f64,
}

impl<'a> Observer<'a> {
    /// Opens the files of `run_dir`.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn new(recipe: &'a Recipe, run_dir: &'a RunDir, report: &'a Arc<Report>) -> Result<Self, Failure> {
        let events = run_dir.events()?;
        Ok(Self {
            recipe,
            run_dir,
            report,
            metrics: None,
            trackers: Trackers::default(),
            spans: None,
            status: None,
            tokens: None,
            diagnosis: Diagnosis::new(recipe),
            first: PolicyVersion(0),
            events,
            dropped_stale: 0,
            counts: peers::PeerCounts::default(),
            unjudged_named: false,
            unscored: 0,
            running_limit: None,
        })
    }

    /// Forgets the metrics of steps after `version`, which are done again, and all before the first step.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn resume_after(&mut self, version: PolicyVersion) -> Result<(), Failure> {
        let metrics = self.run_dir.metrics(version.0)?;
        self.metrics = Some(metrics);
        self.trackers = Trackers::open(self.recipe, self.run_dir, version, self.report);
        self.first = version;
        for line in self.lines().lines() {
            let Ok(line) = serde_json::from_str(line) else { continue };
            let metrics = Metrics::read(&line);
            if metrics.get("step").is_some_and(|step| step > 0.0) {
                self.diagnosis.observe(&metrics);
            }
        }
        Ok(())
    }

    /// Opens the timeline at second `time_s` of the run, if the recipe wants one. It shows the commits of `buffer`, if the buffer is
    /// in this process.
    pub(crate) fn open_timeline(
        &mut self,
        time_s: f64,
        buffer: Option<Arc<Buffer>>,
    ) -> Option<Arc<Timeline>> {
        let trajectories = self.recipe.log.timeline;
        if trajectories == 0 {
            return None;
        }
        let timeline = Timeline::open(self.run_dir.path(), time_s, self.report);
        let timeline = Arc::new(timeline.sent_to(self.recipe.log.otlp.as_deref(), &self.recipe.name));
        timeline.started();
        self.spans = Some(SpanWriter::new(Arc::clone(&timeline), trajectories, buffer));
        Some(timeline)
    }

    /// Tells `status` of every step.
    pub(crate) fn report_to(&mut self, status: &Arc<RunStatus>) {
        self.status = Some(Arc::clone(status));
    }

    /// Writes samples token by token from now on, with the tokenizer of `directory`, if the recipe wants it.
    pub fn write_tokens(&mut self, directory: &Arc<ModelDirectory>) {
        self.tokens = self.recipe.log.tokens.then(|| TokenWriter::new(Arc::clone(directory)));
    }

    /// Waits until the metrics are on the disk: a step that a checkpoint holds is never done again.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn sync(&self) -> Result<(), Failure> {
        self.metrics.as_ref().map_or(Ok(()), |metrics| Ok(metrics.sync()?))
    }

    /// Writes an event with its fields.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn event(&mut self, name: &str, fields: &serde_json::Value) -> Result<(), Failure> {
        self.events.append(&json!({ "event": name, "fields": fields }))?;
        Ok(self.events.sync()?)
    }

    /// The problems that the metrics of all steps show, a line each.
    #[must_use]
    pub fn diagnosis(&self) -> Vec<String> {
        self.diagnosis.summary()
    }

    /// Writes what samplers report after the last step.
    pub(crate) fn late_reports(&mut self, activity: &[(String, Activity)], rewards: &[(String, LoadCounts)]) {
        self.spans.iter_mut().for_each(|spans| spans.late_reports(activity, rewards));
        if let Err(failure) = self.limit_changes(activity) {
            self.report.note(&format!(
                "the last changes of `rollout/running_limit` are not in the events: {failure}"
            ));
        }
    }

    /// Writes the ends of the timeline and of the logs of trackers.
    pub fn finish_logs(&mut self) {
        self.spans.iter_mut().for_each(SpanWriter::finish);
        self.trackers.finish(self.report);
    }

    /// The metrics that are written so far; empty if there are none.
    fn lines(&self) -> String {
        std::fs::read_to_string(self.run_dir.path().join("metrics.jsonl")).unwrap_or_default()
    }

    /// The mean reward of every step.
    #[must_use]
    pub fn rewards(&self) -> Vec<f64> {
        let reward = |line: &str| Metrics::read(&serde_json::from_str(line).ok()?).get("reward/mean");
        self.lines().lines().filter_map(reward).collect()
    }

    /// A measurement in the first line of the metrics: before any training, also of a run that was resumed.
    #[must_use]
    pub fn first_value(&self, metric: &str) -> Option<f64> {
        let first: serde_json::Value = serde_json::from_str(self.lines().lines().next()?).ok()?;
        (first.get("step")?.as_u64()? == 0).then(|| first.get(metric)?.as_f64()).flatten()
    }

    /// Writes and shows the evaluation that training starts from.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn initial(&mut self, version: PolicyVersion, evaluation: &Evaluated) -> Result<(), Failure> {
        self.evaluated(version, 0.0, evaluation)?;
        let lines = evaluation.lines();
        lines.iter().for_each(|line| self.report.note(&format!("before training: {line}")));
        self.failures_of(evaluation);
        Ok(())
    }

    /// Writes the evaluation of a step whose line was written without it, because the run was stopped in between; a line
    /// that has it stays alone.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn late(
        &mut self,
        version: PolicyVersion,
        time_s: f64,
        evaluation: &Evaluated,
    ) -> Result<(), Failure> {
        self.failures_of(evaluation);
        let text = std::fs::read_to_string(self.run_dir.path().join("metrics.jsonl")).unwrap_or_default();
        let there = format!("\"{}\"", evaluation.mark());
        if text.lines().last().is_some_and(|line| line.contains(&there)) {
            return Ok(());
        }
        self.evaluated(version, time_s, evaluation)
    }

    fn evaluated(
        &mut self,
        version: PolicyVersion,
        time_s: f64,
        evaluation: &Evaluated,
    ) -> Result<(), Failure> {
        let mut metrics = Metrics::default();
        metrics.set("step", version.0 as f64);
        metrics.set("time_s", time_s);
        evaluation.measure(&mut metrics);
        self.write(&metrics, None)
    }

    /// Says what failed in an evaluation, and if nothing of it could be judged.
    pub fn failures_of(&self, evaluation: &Evaluated) {
        let lines = evaluation.diagnosis().map_or_else(|| evaluation.failures(), |why| vec![why]);
        lines.iter().for_each(|line| self.report.note(&format!("evaluation: {line}")));
    }

    /// Writes and shows a step.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn step(&mut self, inputs: &ObserverInputs<'_>) -> Result<(), Failure> {
        self.dropped_stale += inputs.step.dropped_stale;
        let mut metrics = Metrics::default();
        self.policy(&mut metrics, inputs);
        rewards::measure(&self.recipe.rewards, &mut metrics, inputs);
        measures::speed(&mut metrics, inputs);
        rewards::name_culprits(&mut metrics, inputs);
        weights::measure(&mut metrics, inputs.push, inputs.lags, inputs.distribution);
        exchange::measure(&mut metrics, inputs.step.exchange);
        adapted::measure(&mut metrics, inputs.limits, inputs.step);
        self.microbatch_change(inputs.step)?;
        self.running(&mut metrics, inputs.activity)?;
        self.peers(&mut metrics, inputs)?;
        self.ranks(&mut metrics, inputs.step)?;
        crate::curation::measure(self.recipe, &mut metrics, inputs.sampler_before, inputs.sampler_after);
        metrics.set("memory/peak_mib", crate::memory::peak_mib());
        let found = self.diagnosis.observe(&metrics);
        metrics.notes.splice(0..0, found);
        self.explain_star(&metrics);
        self.write(&metrics, Some(inputs.step))?;
        self.samples(inputs.step)?;
        self.spans.iter_mut().for_each(|spans| spans.step(inputs));
        if let Some(status) = &self.status {
            status.step(StepStatus {
                step: inputs.step.version.0,
                time_s: inputs.time_s,
                bottleneck: metrics.bottleneck.clone(),
                push: inputs.push,
                lags: inputs.lags.to_vec(),
            });
        }
        self.report.step(&metrics);
        inputs.evaluation.iter().for_each(|evaluation| self.failures_of(evaluation));
        self.failures(inputs)
    }

    /// Says before the first marked reward what the mark means.
    fn explain_star(&self, metrics: &Metrics) {
        let step = metrics.get("step").unwrap_or_default() as u64;
        if metrics.get("buffer/filling") == Some(1.0) && step == self.first.0 + 1 {
            let steps = self.recipe.buffer.max_staleness;
            self.report.note(&format!(
                "*: while the buffer fills, for {steps} steps, batches hold the completions that ended first, which are the \
                 shortest: their mean reward does not compare with that of later batches"
            ));
        }
    }

    /// Shows the first failure of every reward in full, and ends a run whose rewards judge nothing any more.
    fn failures(&mut self, inputs: &ObserverInputs<'_>) -> Result<(), Failure> {
        for (name, load) in inputs.rewards {
            if let Some(example) = &load.example {
                self.report.first_failure(name, example);
            }
        }
        let (batch, unjudged) = (&inputs.step.batch, inputs.step.counts.unjudged);
        if unjudged > 0 && !std::mem::replace(&mut self.unjudged_named, true) {
            self.report.note(&format!(
                "{unjudged} trajectories of step {} were left out: they came without `correct`, and `algorithm.kind = \"{}\"` \
                 asks which answers are correct",
                inputs.step.version.0,
                self.recipe.algorithm.kind.as_str()
            ));
        }
        self.unscored = if batch.scored == unjudged { self.unscored + 1 } else { 0 };
        if self.unscored < UNSCORED {
            return Ok(());
        }
        let failed =
            |(name, said): (&String, &ComponentStatistics)| format!("`{name}` {} times", said.failed);
        let mut failed: Vec<_> =
            batch.components.iter().filter(|(_, said)| said.failed > 0).map(failed).collect();
        failed.extend((unjudged > 0).then(|| format!("to say what is correct {unjudged} trajectories")));
        Err(Failure::Unscored(format!(
            "no trajectory of the last {UNSCORED} steps could be scored, so there is nothing to learn from; in the last one \
             failed {}. The messages stand in {}",
            failed.join(", "),
            self.run_dir.samples(inputs.step.version.0).display()
        )))
    }

    /// Writes and shows what was measured without sampling.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn record(&mut self, metrics: &Metrics) -> Result<(), Failure> {
        self.write(metrics, None)?;
        self.report.step(metrics);
        Ok(())
    }

    /// Writes a line of metrics, and with the report of its step what trackers show besides.
    fn write(&mut self, metrics: &Metrics, step: Option<&StepReport>) -> Result<(), Failure> {
        let Some(file) = &mut self.metrics else {
            return Err(Failure::Internal("metrics were written before the run began".to_owned()));
        };
        file.append(metrics)?;
        self.trackers.write(metrics, step, self.report);
        Ok(())
    }

    /// Writes the first groups of the batch for people to read.
    fn samples(&mut self, step: &StepReport) -> Result<(), Failure> {
        if self.recipe.log.samples == 0 {
            return Ok(());
        }
        let groups = &step.groups[..step.groups.len().min(self.recipe.log.samples)];
        samples::write(&self.run_dir.samples(step.version.0), groups, &step.tokens)?;
        let Some(tokens) = &mut self.tokens else { return Ok(()) };
        tokens.write(&self.run_dir.tokens(step.version.0), groups, &step.tokens)
    }
}
