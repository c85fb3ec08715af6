//! A training step as a row of a table or as a line.
//!
//! Invariant: a measurement that was not taken is a dash, never a zero. A row is no wider than the terminal, unless that
//! is narrower than the columns that are always shown; a row is one line for every measurement.

use crate::metrics::Metrics;

/// Rows between headers.
pub(super) const HEADER_EVERY: usize = 20;

/// A column of the table. A further one is a further entry of [`COLUMNS`].
struct Column {
    name: &'static str,
    /// Characters of its widest cell, at least those of its name.
    width: usize,
    /// A narrow terminal omits the column with the highest number first; 0 is always shown.
    spared: u8,
    cell: fn(&Metrics) -> String,
}

const COLUMNS: [Column; 10] = [
    Column { name: "step", width: 5, spared: 0, cell: |m| decimals(m.get("step"), 0) },
    Column { name: "reward", width: 7, spared: 0, cell: reward },
    Column { name: "accuracy", width: 8, spared: 1, cell: |m| decimals(m.get("eval/accuracy"), 3) },
    Column { name: "loss", width: 9, spared: 7, cell: |m| decimals(m.get("loss/mean"), 5) },
    Column { name: "stale", width: 8, spared: 3, cell: staleness },
    Column { name: "sample/s", width: 8, spared: 5, cell: |m| thousands(m.get("rollout/tokens_per_s")) },
    Column { name: "train/s", width: 8, spared: 4, cell: |m| thousands(m.get("trainer/tokens_per_s")) },
    Column { name: "idle s/t", width: 9, spared: 6, cell: idle },
    Column { name: "time", width: 7, spared: 2, cell: |m| seconds(m.get("time/step")) },
    Column { name: "bottleneck", width: 10, spared: 8, cell: bottleneck },
];

/// The columns that fit the width of the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TableLayout {
    /// Columns with a larger `spared` are hidden.
    spare: u8,
    /// Spaces between columns.
    gap: usize,
    /// Columns of characters of the terminal.
    width: usize,
}

impl TableLayout {
    /// The most columns that fit into `width` characters.
    pub(crate) fn fitting(width: usize) -> Self {
        let most = COLUMNS.iter().map(|column| column.spared).max().unwrap_or(0);
        let layouts = (0..=most).rev().flat_map(|spare| [2, 1].map(move |gap| Self { spare, gap, width }));
        let mut layouts = layouts.skip_while(|layout| layout.taken() > width);
        layouts.next().unwrap_or(Self { spare: 0, gap: 1, width })
    }

    /// The header of the table.
    pub(crate) fn header(self) -> String {
        self.join(|column| column.name.to_owned())
    }

    /// A step as a row of the table, and its notes below.
    pub(crate) fn row(self, metrics: &Metrics) -> String {
        let row = self.join(|column| (column.cell)(metrics));
        let indent = " ".repeat(COLUMNS[0].width + self.gap);
        let width = self.width.saturating_sub(indent.len()).max(20);
        let notes = metrics.notes.iter().flat_map(|note| wrapped(&plain(note), width));
        notes.fold(row, |shown, note| format!("{shown}\n{indent}{note}"))
    }

    fn columns(self) -> impl Iterator<Item = &'static Column> {
        COLUMNS.iter().filter(move |column| column.spared <= self.spare)
    }

    /// Characters of a row.
    fn taken(self) -> usize {
        self.columns().map(|column| column.width + self.gap).sum::<usize>() - self.gap
    }

    fn join(self, cell: impl Fn(&Column) -> String) -> String {
        let padded = self.columns().map(|column| format!("{:>width$}", cell(column), width = column.width));
        padded.collect::<Vec<_>>().join(&" ".repeat(self.gap)).trim_end().to_owned()
    }
}

/// A step as one line that explains itself.
pub(super) fn line(metrics: &Metrics) -> String {
    let number = |name, places| decimals(metrics.get(name), places);
    let line = format!(
        "step {}: reward {}, accuracy {}, loss {}, staleness {}, sampling {} tok/s, training {} tok/s, \
         idle sampler/trainer {}, {}",
        number("step", 0),
        reward(metrics),
        number("eval/accuracy", 3),
        number("loss/mean", 5),
        staleness(metrics),
        thousands(metrics.get("rollout/tokens_per_s")),
        thousands(metrics.get("trainer/tokens_per_s")),
        idle(metrics),
        seconds(metrics.get("time/step")),
    );
    metrics.remarks().fold(line, |line, remark| format!("{line}; {}", plain(remark)))
}

/// The text without line breaks and what else a terminal would obey.
pub(crate) fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// The text as lines of at most `width` characters, broken between words where that can be.
pub(crate) fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let mut rest: Vec<char> = word.chars().collect();
        loop {
            let line = lines.last_mut().map_or(0, |line| line.chars().count());
            let space = usize::from(line > 0);
            if let Some(last) = lines.last_mut()
                && line + space + rest.len() <= width
            {
                last.extend(std::iter::repeat_n(' ', space).chain(rest));
                break;
            }
            if line == 0 {
                let tail = rest.split_off(width);
                if let Some(last) = lines.last_mut() {
                    last.extend(rest);
                }
                rest = tail;
            }
            lines.push(String::new());
        }
    }
    lines
}

fn decimals(value: Option<f64>, places: usize) -> String {
    let value = value.filter(|value| !value.is_nan());
    // A number with so many digits before the point needs none after it.
    value.map_or("-".to_owned(), |value| match value.abs() {
        large if large >= 1e4 && places > 0 => format!("{value:.1e}"),
        large if large >= 100.0 && places > 1 => format!("{value:.1}"),
        _ => format!("{value:.places$}"),
    })
}

/// Mean reward of the batch; a star while the buffer fills, when batches hold the shortest completions.
fn reward(metrics: &Metrics) -> String {
    let star = if metrics.get("buffer/filling") == Some(1.0) { "*" } else { "" };
    decimals(metrics.get("reward/mean"), 3) + star
}

/// Mean and maximum in versions.
fn staleness(metrics: &Metrics) -> String {
    let (mean, max) = (metrics.get("staleness/mean"), decimals(metrics.get("staleness/max"), 0));
    format!("{}/{max}", decimals(mean, usize::from(mean.is_none_or(|mean| mean < 100.0))))
}

/// Share of the step that sampler and trainer did nothing.
fn idle(metrics: &Metrics) -> String {
    let percent = |name| metrics.get(name).map_or("-".to_owned(), |ratio| format!("{:.0}%", ratio * 100.0));
    format!("{}/{}", percent("rollout/idle_ratio"), percent("trainer/idle_ratio"))
}

/// The role that limits the run.
fn bottleneck(metrics: &Metrics) -> String {
    plain(metrics.bottleneck.split(':').next().unwrap_or_default()).chars().take(10).collect()
}

fn seconds(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), |value| match value {
        long if long >= 999.5 => format!("{long:.0}s"),
        value => format!("{value:.2}s"),
    })
}

fn thousands(value: Option<f64>) -> String {
    match value {
        None => "-".to_owned(),
        Some(value) if value < 999.5 => format!("{value:.0}"),
        Some(value) if value < 999_950.0 => format!("{:.1}k", value / 1e3),
        Some(value) => format!("{:.1}M", value / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics() -> Metrics {
        let mut metrics = Metrics::default();
        metrics.bottleneck = "sampling: the trainer waits 40 % of the time".to_owned();
        for (name, value) in [
            ("step", 12.0),
            ("reward/mean", 0.4567),
            ("loss/mean", -0.012_345),
            ("staleness/mean", 1.25),
            ("staleness/max", 4.0),
            ("rollout/tokens_per_s", 12_345.0),
            ("trainer/tokens_per_s", 999.6),
            ("rollout/idle_ratio", 0.031),
            ("trainer/idle_ratio", 0.4),
            ("time/step", 1.234),
        ] {
            metrics.set(name, value);
        }
        metrics
    }

    #[test]
    fn rows_align_with_their_header() {
        let expected = [
            " step   reward  accuracy       loss     stale  sample/s   train/s   idle s/t     time  bottleneck",
            "   12    0.457         -   -0.01235     1.2/4     12.3k      1.0k     3%/40%    1.23s    sampling",
        ];
        let layout = TableLayout::fitting(120);
        assert_eq!([layout.header(), layout.row(&metrics())], expected);
        let expected = [
            " step  reward accuracy      loss    stale sample/s  train/s  idle s/t    time",
            "   12   0.457        -  -0.01235    1.2/4    12.3k     1.0k    3%/40%   1.23s",
        ];
        let layout = TableLayout::fitting(80);
        assert_eq!([layout.header(), layout.row(&metrics())], expected);
    }

    /// Also with the largest numbers that a run has.
    #[test]
    fn no_row_is_wider_than_the_terminal() {
        let mut large = metrics();
        for (name, value) in [
            ("step", 99_999.0),
            ("reward/mean", -12_345.678),
            ("eval/accuracy", 1.0),
            ("loss/mean", -123_456_789.0),
            ("staleness/mean", 123.45),
            ("staleness/max", 128.0),
            ("rollout/tokens_per_s", 1e9),
            ("rollout/idle_ratio", 1.0),
            ("trainer/idle_ratio", 1.0),
            ("time/step", 123_456.7),
        ] {
            large.set(name, value);
        }
        large.notes.push(format!("reward `code` failed:\n\t{}, and so on", "x".repeat(100)));
        for width in 14..200 {
            let layout = TableLayout::fitting(width);
            let note_width = 27;
            for shown in [layout.header(), layout.row(&metrics()), layout.row(&large)] {
                for line in shown.lines() {
                    assert!(line.chars().count() <= width.max(note_width), "{width}: {line}");
                }
            }
            assert!(layout.header().starts_with(" step"), "{width}");
        }
        assert_eq!(TableLayout::fitting(1).header(), " step  reward");
    }

    #[test]
    fn notes_stand_below_the_row_and_in_the_line() {
        let mut metrics = metrics();
        metrics.notes.push("reward `a`: 2 errors\nTraceback".to_owned());
        let shown = TableLayout::fitting(80).row(&metrics);
        assert_eq!(shown.lines().nth(1), Some("      reward `a`: 2 errors Traceback"));
        let line = line(&metrics);
        assert!(line.ends_with("% of the time; reward `a`: 2 errors Traceback"), "{line}");
        assert_eq!(wrapped("one two three", 7), ["one two", "three"]);
        assert_eq!(wrapped("abcdefgh i", 3), ["abc", "def", "gh", "i"]);
    }

    #[test]
    fn rewards_of_batches_while_the_buffer_fills_have_a_star() {
        let mut metrics = metrics();
        metrics.set("buffer/filling", 1.0);
        let row = TableLayout::fitting(200).row(&metrics);
        assert!(row.starts_with("   12   0.457* "), "{row}");
        assert!(line(&metrics).contains("reward 0.457*, "));
    }

    #[test]
    fn a_line_explains_itself() {
        let expected = "step 12: reward 0.457, accuracy -, loss -0.01235, staleness 1.2/4, sampling 12.3k tok/s, \
                        training 1.0k tok/s, idle sampler/trainer 3%/40%, 1.23s; sampling: the trainer waits 40 % of \
                        the time";
        assert_eq!(line(&metrics()), expected);
    }
}
