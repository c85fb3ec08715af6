//! A training step as a row of a table or as a line.
//!
//! Invariant: a measurement that was not taken is a dash, never a zero. Columns are as wide as their header or wider,
//! so that rows align in any terminal.

use crate::metrics::Metrics;

/// Rows between headers.
pub(super) const HEADER_EVERY: usize = 20;

/// Header and width of a column, and how its cell reads.
type Column = (&'static str, usize, fn(&Metrics) -> String);

const COLUMNS: [Column; 10] = [
    ("step", 5, |m| decimals(m.get("step"), 0)),
    ("reward", 7, reward),
    ("accuracy", 8, |m| decimals(m.get("eval/accuracy"), 3)),
    ("loss", 9, |m| decimals(m.get("loss/mean"), 5)),
    ("stale", 8, staleness),
    ("sample/s", 8, |m| thousands(m.get("rollout/tokens_per_s"))),
    ("train/s", 8, |m| thousands(m.get("trainer/tokens_per_s"))),
    ("idle s/t", 9, idle),
    ("time", 7, |m| seconds(m.get("time/step"))),
    ("bottleneck", 0, remarks),
];

/// The header of the table.
pub(super) fn header() -> String {
    join(COLUMNS.map(|(name, width, _)| (name.to_owned(), width)))
}

/// A step as a row of the table.
pub(super) fn row(metrics: &Metrics) -> String {
    join(COLUMNS.map(|(_, width, cell)| (cell(metrics), width)))
}

/// A step as one line that explains itself.
pub(super) fn line(metrics: &Metrics) -> String {
    let number = |name, places| decimals(metrics.get(name), places);
    let mut line = format!(
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
    let remarks = remarks(metrics);
    if !remarks.is_empty() {
        line.push_str("; ");
        line.push_str(&remarks);
    }
    line
}

/// What is wrong with the step, what it waited for, and whether it left the policy as it was.
fn remarks(metrics: &Metrics) -> String {
    let unchanged = metrics.get("optim/updates") == Some(0.0);
    let remarks = [&*metrics.diagnosis, &*metrics.bottleneck, if unchanged { "no policy update" } else { "" }];
    remarks.into_iter().filter(|remark| !remark.is_empty()).collect::<Vec<_>>().join("; ")
}

fn join(cells: [(String, usize); 10]) -> String {
    let padded = cells.map(|(cell, width)| format!("{cell:>width$}"));
    padded.join("  ").trim_end().to_owned()
}

fn decimals(value: Option<f64>, places: usize) -> String {
    value.filter(|value| !value.is_nan()).map_or("-".to_owned(), |value| format!("{value:.places$}"))
}

/// Mean reward of the batch; a star while the buffer fills, when batches hold the shortest completions.
fn reward(metrics: &Metrics) -> String {
    let star = if metrics.get("buffer/filling") == Some(1.0) { "*" } else { "" };
    decimals(metrics.get("reward/mean"), 3) + star
}

/// Mean and maximum in versions.
fn staleness(metrics: &Metrics) -> String {
    let max = decimals(metrics.get("staleness/max"), 0);
    format!("{}/{max}", decimals(metrics.get("staleness/mean"), 1))
}

/// Share of the step that sampler and trainer did nothing.
fn idle(metrics: &Metrics) -> String {
    let percent = |name| metrics.get(name).map_or("-".to_owned(), |ratio| format!("{:.0}%", ratio * 100.0));
    format!("{}/{}", percent("rollout/idle_ratio"), percent("trainer/idle_ratio"))
}

fn seconds(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), |value| format!("{value:.2}s"))
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
        metrics.bottleneck = "trainer waits for rollout".to_owned();
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
            "   12    0.457         -   -0.01235     1.2/4     12.3k      1.0k     3%/40%    1.23s  trainer waits for rollout",
        ];
        assert_eq!([header(), row(&metrics())], expected);
    }

    #[test]
    fn rewards_of_batches_while_the_buffer_fills_have_a_star() {
        let mut metrics = metrics();
        metrics.set("buffer/filling", 1.0);
        metrics.diagnosis = "every trajectory has the reward 0.000".to_owned();
        assert!(row(&metrics).starts_with("   12   0.457* "), "{}", row(&metrics));
        assert!(line(&metrics).contains("reward 0.457*, "));
        let remarks = "every trajectory has the reward 0.000; trainer waits for rollout";
        assert!(row(&metrics).ends_with(remarks) && line(&metrics).ends_with(remarks));
    }

    #[test]
    fn a_step_without_an_update_says_so() {
        let mut metrics = metrics();
        metrics.set("optim/updates", 1.0);
        assert!(!line(&metrics).contains("update") && !row(&metrics).contains("update"));
        metrics.set("optim/updates", 0.0);
        for shown in [line(&metrics), row(&metrics)] {
            assert!(shown.ends_with("trainer waits for rollout; no policy update"), "{shown}");
        }
    }

    #[test]
    fn a_line_explains_itself() {
        let expected = "step 12: reward 0.457, accuracy -, loss -0.01235, staleness 1.2/4, sampling 12.3k tok/s, \
                        training 1.0k tok/s, idle sampler/trainer 3%/40%, 1.23s; trainer waits for rollout";
        assert_eq!(line(&metrics()), expected);
    }
}
