//! What the user sees of a download: a bar on a terminal, else a line at its start and now and then.
//!
//! Invariant: it goes to standard error, so that the output of a command stays what it is.

use std::time::{Duration, Instant};

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

/// Time between two lines of one download.
const LINE_EVERY: Duration = Duration::from_secs(20);

/// The progress of one file.
pub(super) struct FetchProgress {
    file: String,
    size_bytes: u64,
    bar: Option<ProgressBar>,
    /// When the last line was written.
    said: Instant,
}

impl FetchProgress {
    /// Begins with the bytes that are there already.
    pub(super) fn new(file: &str, size_bytes: u64, have: u64) -> Self {
        let bar = console::Term::stderr().is_term().then(|| {
            let form = "{msg} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} ({eta})";
            let style = ProgressStyle::with_template(form).unwrap_or_else(|_| ProgressStyle::default_bar());
            let bar = ProgressBar::new(size_bytes).with_style(style).with_message(file.to_owned());
            bar.set_position(have);
            // The speed is that of this download.
            bar.reset_eta();
            bar
        });
        if bar.is_none() {
            let kept = if have > 0 { format!(", {} are there", HumanBytes(have)) } else { String::new() };
            eprintln!("fetching {file} ({}{kept})", HumanBytes(size_bytes));
        }
        Self { file: file.to_owned(), size_bytes, bar, said: Instant::now() }
    }

    /// Shows that so many bytes are there.
    pub(super) fn reach(&mut self, have: u64) {
        match &self.bar {
            Some(bar) => bar.set_position(have),
            None if self.said.elapsed() >= LINE_EVERY => {
                eprintln!("fetching {}: {} of {}", self.file, HumanBytes(have), HumanBytes(self.size_bytes));
                self.said = Instant::now();
            }
            None => {}
        }
    }

    /// Removes the bar.
    pub(super) fn finish(self) {
        self.bar.iter().for_each(ProgressBar::finish_and_clear);
    }
}
