//! What a run measures, in the formats of experiment trackers beside its own files.
//!
//! Invariant: the files of a run are authoritative and complete without these. A tracker that cannot be written is named once and
//! left; it never ends a run.

mod encoding;
mod otlp;
mod tensorboard;
mod upload;
mod wandb;

use std::borrow::Cow;
use std::io;

use trainer::StepReport;
use trajectory::{Group, PolicyVersion, Trajectory};

use crate::metrics::Metrics;
use crate::recipe::Recipe;
use crate::recipe::words::WandbLog;
use crate::report::Report;
use crate::run_dir::RunDir;
pub(crate) use otlp::SpanExporter;
use tensorboard::{EventFile, EventSummary};
use upload::Uploader;
use wandb::OfflineRun;

/// Most completions of a step that TensorBoard gets.
const MAX_COMPLETIONS: usize = 4;
/// Longest text of a prompt or a completion that TensorBoard gets; a longer one is cut, bytes.
const MAX_TEXT_BYTES: usize = 4096;

/// The trackers of a run.
#[derive(Debug, Default)]
pub(crate) struct Trackers {
    tensorboard: Option<EventFile>,
    /// Whether TensorBoard gets the first group of every step as text.
    with_samples: bool,
    wandb: Option<OfflineRun>,
    uploader: Option<Uploader>,
}

impl Trackers {
    /// Opens those that the recipe wants, for the steps after `done`.
    pub(crate) fn open(recipe: &Recipe, run_dir: &RunDir, done: PolicyVersion, report: &Report) -> Self {
        let (log, path) = (&recipe.log, run_dir.path());
        let directory = path.join("tensorboard");
        let first = if done.0 == 0 { 0 } else { done.0 + 1 };
        let tensorboard = log.tensorboard.then(|| EventFile::create(&directory, first));
        let wandb = (log.wandb != WandbLog::Off).then(|| {
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            OfflineRun::create(path, &name, &recipe.values())
        });
        let (tensorboard, wandb) = (opened("TensorBoard", tensorboard, report), opened("W&B", wandb, report));
        let online = wandb.as_ref().filter(|_| log.wandb == WandbLog::Online);
        let started =
            online.map(|run| Uploader::start("wandb", run.directory(), run_dir.logs().join("wandb.log")));
        let uploader = started.transpose().unwrap_or_else(|error| {
            report.note(&format!("the run is not uploaded to W&B while it goes on: {error}"));
            None
        });
        Self { tensorboard, with_samples: log.samples > 0, wandb, uploader }
    }

    /// Writes the ends of the logs. What is uploaded while the run goes on is uploaded to its end; of other logs of W&B the
    /// terminal says how they are.
    pub(crate) fn finish(&mut self, report: &Report) {
        self.tensorboard = None;
        let Some(run) = self.wandb.take() else { return };
        let directory = run.directory().to_path_buf();
        // The record of its end.
        drop(run);
        match self.uploader.take() {
            Some(uploader) => uploader.finish(&directory, report),
            None => report.note(&format!("upload it to W&B with `wandb sync {}`", directory.display())),
        }
    }

    /// Writes a line of metrics; with the report of its step also distributions and samples.
    pub(crate) fn write(&mut self, metrics: &Metrics, step: Option<&StepReport>, report: &Report) {
        let number = metrics.get("step").unwrap_or_default() as u64;
        let values = || metrics.iter().filter(|(name, _)| *name != "step");
        if let Some(file) = &mut self.tensorboard {
            let mut summary = EventSummary::default();
            values().for_each(|(name, value)| summary.scalar(name, value));
            if let Some(step) = step {
                distributions(&mut summary, step);
                if let Some(group) = step.groups.first().filter(|_| self.with_samples) {
                    summary.text("samples", &group_text(group));
                }
            }
            if let Err(error) = file.append(number, &summary) {
                left("TensorBoard", &error, report);
                self.tensorboard = None;
            }
        }
        if let Some(run) = &mut self.wandb
            && let Err(error) = run.append(number, values())
        {
            left("W&B", &error, report);
            self.wandb = None;
        }
    }
}

fn opened<T>(name: &str, opened: Option<io::Result<T>>, report: &Report) -> Option<T> {
    match opened? {
        Ok(tracker) => Some(tracker),
        Err(error) => {
            left(name, &error, report);
            None
        }
    }
}

fn left(name: &str, error: &io::Error, report: &Report) {
    report.note(&format!("logs for {name} cannot be written: {error}; the run goes on without them"));
}

/// Distributions over the trajectories of a batch and over its sampled tokens.
fn distributions(summary: &mut EventSummary, step: &StepReport) {
    let trajectories = || step.groups.iter().flat_map(|group| group.sampled());
    let lengths: Vec<f64> = trajectories().map(|trajectory| trajectory.completion_tokens() as f64).collect();
    let rewards: Vec<f64> = trajectories().filter_map(Trajectory::reward).collect();
    // The version before the step is the one that is trained.
    let trained = PolicyVersion(step.version.0.saturating_sub(1));
    let staleness = |trajectory: &Trajectory| trajectory.oldest_version().staleness_at(trained) as f64;
    let stalenesses: Vec<f64> = trajectories().map(staleness).collect();
    summary.histogram("distribution/completion_length", &lengths);
    summary.histogram("distribution/reward", &rewards);
    summary.histogram("distribution/staleness", &stalenesses);
    summary.counted("distribution/importance_ratio", &step.sums.ratios.buckets());
}

/// The prompt of a group and its first completions, as Markdown.
fn group_text(group: &Group) -> String {
    let trajectories = group.trajectories.iter();
    let completions: Vec<_> =
        trajectories.map(|trajectory| (trajectory.reward(), &*trajectory.text)).collect();
    markdown(&crate::prepare::prompt_text(&group.task), &completions)
}

/// A prompt and the first of its `completions` (reward, text), as Markdown of bounded length.
fn markdown(prompt: &str, completions: &[(Option<f64>, &str)]) -> String {
    let mut shown = format!("**prompt**\n\n{}\n", indented(&cut(prompt)));
    for (reward, text) in completions.iter().take(MAX_COMPLETIONS) {
        let reward = reward.map_or_else(|| "no reward".to_owned(), |reward| format!("reward {reward}"));
        shown += &format!("\n**{reward}**\n\n{}\n", indented(&cut(text)));
    }
    let more = completions.len().saturating_sub(MAX_COMPLETIONS);
    if more > 0 {
        shown += &format!("\n{more} more completions are not shown\n");
    }
    shown
}

/// The start of a text that is longer than [`MAX_TEXT_BYTES`], and its length.
fn cut(text: &str) -> Cow<'_, str> {
    if text.len() <= MAX_TEXT_BYTES {
        return Cow::Borrowed(text);
    }
    let kept = &text[..text.floor_char_boundary(MAX_TEXT_BYTES)];
    Cow::Owned(format!("{kept}\n[cut: the text has {} bytes]", text.len()))
}

/// A text as a block of code in Markdown, which shows it as it is.
fn indented(text: &str) -> String {
    text.lines().map(|line| format!("    {line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_group_is_bounded_and_says_what_is_left_out() {
        let short = markdown("1 + 1", &[(Some(1.0), "2"), (None, "a\nb")]);
        let whole =
            "**prompt**\n\n    1 + 1\n\n\n**reward 1**\n\n    2\n\n\n**no reward**\n\n    a\n    b\n\n";
        assert_eq!(short, whole);
        // A character of two bytes lies across the limit.
        let long = format!("x{}", "\u{e4}".repeat(MAX_TEXT_BYTES));
        let text = markdown(&long, &[(Some(0.5), &*long); 8]);
        assert!(text.len() < (1 + MAX_COMPLETIONS) * (MAX_TEXT_BYTES + 100), "{} bytes", text.len());
        assert_eq!(text.matches("**reward 0.5**").count(), MAX_COMPLETIONS);
        assert_eq!(text.matches("    [cut: the text has 8193 bytes]\n").count(), 1 + MAX_COMPLETIONS);
        assert!(text.ends_with("4 more completions are not shown\n"), "{text}");
    }
}
