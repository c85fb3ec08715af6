//! The terminal output of a run.
//!
//! Invariant: the report only shows; a failed write to the terminal never stops a run. Its content is in the files of the
//! run directory too. The step table goes to standard output, progress bars to standard error.

mod summary;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
pub(crate) use summary::curve;
pub use summary::{SamplePair, Summary};
pub(crate) use table::{TableLayout, plain, wrapped};

use crate::metrics::Metrics;

/// How much is shown, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Nothing.
    Quiet,
    /// One line per step, for pipes and CI.
    Plain,
    /// Progress bars and a table.
    Terminal {
        /// Whether the header is emphasised.
        color: bool,
    },
}

impl Style {
    /// The style for standard output as it is. `NO_COLOR` and `CI` count if they are set and not empty.
    #[must_use]
    pub fn detect(quiet: bool, env: &BTreeMap<String, String>) -> Self {
        Self::choose(quiet, console::Term::stdout().is_term(), env)
    }

    fn choose(quiet: bool, terminal: bool, env: &BTreeMap<String, String>) -> Self {
        let set = |name: &str| env.get(name).is_some_and(|value| !value.is_empty());
        match (quiet, terminal && !set("CI")) {
            (true, _) => Self::Quiet,
            (false, false) => Self::Plain,
            (false, true) => Self::Terminal { color: !set("NO_COLOR") },
        }
    }
}

/// Characters of a line where no terminal says how many it has.
const USUAL_WIDTH: usize = 80;

/// The report of one run; shared by all roles.
pub struct Report {
    style: Style,
    /// Characters of a line, if the user has said how many.
    width: Option<usize>,
    bars: MultiProgress,
    out: Mutex<Out>,
    /// Rewards with a failure that was shown.
    failed: Mutex<BTreeSet<String>>,
}

struct Out {
    writer: Box<dyn Write + Send>,
    rows: usize,
    /// The columns of the last header.
    layout: Option<table::TableLayout>,
    /// A copy of every line, in every style.
    log: Option<File>,
}

impl Out {
    /// A full disk does not end the run here: the metrics hold the same values.
    fn log(&mut self, text: &str) {
        if let Some(log) = &mut self.log {
            let _ = writeln!(log, "{}", console::strip_ansi_codes(text));
        }
    }
}

impl std::fmt::Debug for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Report").field("style", &self.style).finish_non_exhaustive()
    }
}

/// A part of the run with a known length, such as the warm-up. Dropped, its bar disappears.
#[derive(Debug)]
pub struct ReportPhase<'a> {
    report: &'a Report,
    name: String,
    bar: Option<ProgressBar>,
}

impl Report {
    /// A report to standard output.
    #[must_use]
    pub fn new(style: Style) -> Self {
        Self::with_writer(style, Box::new(io::stdout()))
    }

    /// A report to any writer.
    #[must_use]
    pub fn with_writer(style: Style, writer: Box<dyn Write + Send>) -> Self {
        let out = Mutex::new(Out { writer, rows: 0, layout: None, log: None });
        Self { style, width: None, bars: MultiProgress::new(), out, failed: Mutex::default() }
    }

    /// A report with lines of `width` characters; `None` is the width of the terminal.
    #[must_use]
    pub fn wide(self, width: Option<usize>) -> Self {
        Self { width, ..self }
    }

    /// Characters of a line: those of the terminal as it is now, which a user may resize.
    fn width(&self) -> usize {
        let of_terminal = || console::Term::stdout().size_checked().map(|(_, columns)| usize::from(columns));
        self.width.or_else(of_terminal).unwrap_or(USUAL_WIDTH)
    }

    /// Starts a part of the run of `total` units (steps, tasks or trajectories).
    #[must_use]
    pub fn phase(&self, name: &str, total: u64) -> ReportPhase<'_> {
        if matches!(self.style, Style::Plain | Style::Quiet) {
            self.write(&format!("{name}: {total} to do"));
        }
        self.bar(name, total)
    }

    /// The same for a part that comes often: without a terminal it is not announced.
    #[must_use]
    pub fn bar(&self, name: &str, total: u64) -> ReportPhase<'_> {
        let bar = match self.style {
            Style::Terminal { .. } => Some(self.bars.add(new_bar(name, total))),
            Style::Plain | Style::Quiet => None,
        };
        ReportPhase { report: self, name: name.to_owned(), bar }
    }

    /// Shows a training step.
    pub fn step(&self, metrics: &Metrics) {
        match self.style {
            Style::Quiet | Style::Plain => self.write(&table::line(metrics)),
            Style::Terminal { color } => {
                let layout = table::TableLayout::fitting(self.width());
                let header_due = {
                    let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
                    out.rows += 1;
                    let due = (out.rows - 1).is_multiple_of(table::HEADER_EVERY);
                    out.layout.replace(layout) != Some(layout) || due
                };
                let row = layout.row(metrics);
                if header_due {
                    let header = console::style(layout.header()).bold().force_styling(color);
                    self.write(&format!("{header}\n{row}"));
                } else {
                    self.write(&row);
                }
            }
        }
    }

    /// Shows the first failure of a reward in full; later ones are counted in the step line.
    pub fn first_failure(&self, reward: &str, failure: &str) {
        let first = self.failed.lock().unwrap_or_else(PoisonError::into_inner).insert(reward.to_owned());
        if first {
            self.note(&format!("the first failure of reward `{reward}`: {failure}"));
        }
    }

    /// Shows a line of text.
    pub fn note(&self, text: &str) {
        self.write(text);
    }

    /// Also writes every line to a new file in `logs`, one per attempt at the run.
    ///
    /// # Errors
    /// The file cannot be made.
    pub fn log_to(&self, logs: &Path) -> io::Result<()> {
        let names = std::fs::read_dir(logs)?.map(|entry| Ok(entry?.file_name()));
        let names = names.collect::<io::Result<Vec<_>>>()?;
        // Workers and rewards have logs of their own there.
        let before = names.iter().filter(|name| name.to_string_lossy().starts_with("attempt_")).count();
        let attempt = before + 1;
        let file = File::create(logs.join(format!("attempt_{attempt}.log")))?;
        self.out.lock().unwrap_or_else(PoisonError::into_inner).log = Some(file);
        Ok(())
    }

    /// Shows what the run achieved and what can be done with it.
    pub fn summary(&self, summary: &Summary) {
        self.note(&format!("{summary:width$}", width = self.width()));
    }

    fn write(&self, text: &str) {
        self.bars.suspend(|| {
            let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
            out.log(text);
            if self.style == Style::Quiet {
                return;
            }
            // A closed pipe must not end a run that others wait for; its files go on.
            let _ = writeln!(out.writer, "{text}").and_then(|()| out.writer.flush());
        });
    }
}

impl ReportPhase<'_> {
    /// Shows how far the phase is.
    pub fn set(&self, position: u64, message: &str) {
        if let Some(bar) = &self.bar {
            bar.set_position(position);
            bar.set_message(message.to_owned());
        }
    }

    /// Ends the phase with a line that says what it achieved.
    pub fn finish(mut self, message: &str) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        self.report.note(&format!("{}: {message}", self.name));
    }
}

impl Drop for ReportPhase<'_> {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn new_bar(name: &str, total: u64) -> ProgressBar {
    let template = "{prefix} [{bar:30}] {pos}/{len} {elapsed}<{eta} {msg}";
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(total).with_style(style.progress_chars("=> ")).with_prefix(name.to_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// A writer whose text can be read by the test.
    #[derive(Clone, Default)]
    struct Shown(Arc<Mutex<Vec<u8>>>);

    impl Write for Shown {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn shown(style: Style, show: impl FnOnce(&Report)) -> String {
        let text = Shown::default();
        show(&Report::with_writer(style, Box::new(text.clone())).wide(Some(100)));
        let bytes = text.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn the_style_follows_the_terminal_and_the_environment() {
        let none = BTreeMap::new();
        let env = |name: &str, value: &str| BTreeMap::from([(name.to_owned(), value.to_owned())]);
        assert_eq!(Style::choose(true, true, &none), Style::Quiet);
        assert_eq!(Style::choose(false, false, &none), Style::Plain);
        assert_eq!(Style::choose(false, true, &none), Style::Terminal { color: true });
        assert_eq!(Style::choose(false, true, &env("NO_COLOR", "1")), Style::Terminal { color: false });
        assert_eq!(Style::choose(false, true, &env("NO_COLOR", "")), Style::Terminal { color: true });
        assert_eq!(Style::choose(false, true, &env("CI", "true")), Style::Plain);
    }

    #[test]
    fn a_pipe_gets_one_line_per_step() {
        let text = shown(Style::Plain, |report| {
            let phase = report.phase("warm-up", 10);
            phase.set(5, "loss 1.0");
            phase.finish("accuracy 0.30");
            report.step(&Metrics::default());
            report.note("done");
        });
        assert_eq!(text.lines().count(), 4, "{text}");
        assert!(text.starts_with("warm-up: 10 to do\nwarm-up: accuracy 0.30\nstep -"), "{text}");
    }

    #[test]
    fn a_reward_that_fails_is_shown_in_full_once() {
        let text = shown(Style::Plain, |report| {
            report.first_failure("code", "no sandbox");
            report.first_failure("code", "no sandbox either");
            report.first_failure("judge", "no answer");
        });
        let expected = "the first failure of reward `code`: no sandbox\nthe first failure of reward `judge`: no answer\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn the_header_is_repeated_and_quiet_is_quiet() {
        let steps = |report: &Report| (0..41).for_each(|_| report.step(&Metrics::default()));
        let plain = shown(Style::Terminal { color: false }, steps);
        assert_eq!(plain.matches("bottleneck").count(), 3, "{plain}");
        assert!(!plain.contains('\u{1b}'));
        assert!(shown(Style::Terminal { color: true }, steps).contains('\u{1b}'));
        assert_eq!(shown(Style::Quiet, steps), "");
    }

    #[test]
    fn a_terminal_of_eighty_columns_is_not_overrun() {
        let text = Shown::default();
        let report = Report::with_writer(Style::Terminal { color: false }, Box::new(text.clone()));
        let report = report.wide(Some(80));
        let mut metrics = Metrics::default();
        metrics.notes.push("reward `code`: 3 errors, ".repeat(9));
        report.step(&metrics);
        let row = |letter: char| letter.to_string().repeat(200);
        let pair = SamplePair { prompt: row('p'), before: row('b'), after: row('a') };
        report.summary(&Summary {
            samples: vec![pair],
            run_dir: "outputs/mine".into(),
            ..Summary::default()
        });
        let shown = String::from_utf8(text.0.lock().unwrap().clone()).unwrap();
        assert!(shown.lines().count() > 8, "{shown}");
        for line in shown.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }
}
