//! The report of a simulation, as text and as JSON.
//!
//! Invariant: both have the same numbers; text is ASCII.

use std::fmt::Write;

use serde_json::{Value, json};
use simulator::published::{PublishedRow, rows};
use simulator::{LimitingSide, OutcomeRange, RangeOverSeeds, Scenario};

use super::hardware::Hardware;
use crate::failure::Failure;
use crate::recipe::Recipe;

/// A simulated recipe.
pub(super) struct Shown<'a> {
    pub(super) recipe: &'a Recipe,
    pub(super) hardware: &'a Hardware,
    pub(super) scenario: &'a Scenario,
    pub(super) range: &'a RangeOverSeeds,
    pub(super) notes: &'a [String],
}

impl Shown<'_> {
    fn measures(&self) -> [(&'static str, &'static str, OutcomeRange); 7] {
        let range = self.range;
        [
            ("step_s", "seconds of a step", range.step_s),
            ("tokens_per_s", "trained tokens per second", range.tokens_per_s),
            ("sampler_idle", "share of the time in which a sampler waits", range.sampler_idle),
            ("samplers", "samplers that get groups", range.active_samplers),
            ("trainer_idle", "share of the time in which the trainer waits for a batch", range.trainer_idle),
            ("wait_s", "seconds of a step in which the trainer waits for a batch", range.wait_s),
            ("staleness", "mean staleness, versions", range.mean_staleness),
        ]
    }

    pub(super) fn text(&self) -> String {
        let Self { recipe, hardware, scenario, range, notes } = self;
        let mut out = format!(
            "{}: {} steps in virtual time on {}, {} seeds; completions of {:.0} tokens on average\n\n{:14} {:>10} {:>10} {:>10}\n",
            recipe.name,
            scenario.steps,
            hardware.name,
            range.seeds,
            scenario.lengths.mean(),
            "",
            "p10",
            "median",
            "p90"
        );
        for (name, about, OutcomeRange { p10, p50, p90 }) in self.measures() {
            // Writing to a string cannot fail.
            let _ = writeln!(
                out,
                "{name:14} {:>10} {:>10} {:>10}  {about}",
                digits(p10),
                digits(p50),
                digits(p90)
            );
        }
        let groups: u64 = range.staleness.iter().sum();
        let shares = range.staleness.iter().enumerate().filter(|(_, count)| **count > 0);
        let shares: Vec<String> = shares
            .map(|(versions, count)| {
                format!("{versions}: {:.0} %", 100.0 * *count as f64 / groups.max(1) as f64)
            })
            .collect();
        let _ = writeln!(out, "\ngroups by staleness: {}; dropped: {}", shares.join(", "), range.dropped);
        let _ = write!(out, "limited by {}", limits_in_words(range.limits()));
        for note in *notes {
            let _ = write!(out, "\nnote: {note}");
        }
        out
    }

    pub(super) fn json(&self) -> String {
        let ranges = self.measures().map(|(name, _, range)| {
            (name.to_owned(), json!({"p10": range.p10, "p50": range.p50, "p90": range.p90}))
        });
        let mut object = json!({
            "run": self.recipe.name,
            "hardware": self.hardware.name,
            "steps": self.scenario.steps,
            "seeds": self.range.seeds,
            "mean_length": self.scenario.lengths.mean(),
            "staleness_groups": self.range.staleness,
            "dropped": self.range.dropped,
            "limited_by": self.range.limits().to_string(),
            "notes": self.notes,
        });
        if let Value::Object(fields) = &mut object {
            fields.extend(ranges);
        }
        object.to_string()
    }
}

/// What limits a run, in words.
pub(crate) fn limits_in_words(side: LimitingSide) -> &'static str {
    match side {
        LimitingSide::Sampling => "sampling: the trainer waits for batches",
        LimitingSide::Training => "training: samplers wait for versions",
        LimitingSide::Waiting => {
            "waiting: both sides wait, for the longest completions, for rewards or for weights"
        }
    }
}

/// Three significant digits at least.
pub(crate) fn digits(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 1.0 => format!("{value:.2}"),
        size if size >= 0.001 || size == 0.0 => format!("{value:.4}"),
        _ => format!("{value:.2e}"),
    }
}

/// Published rows beside their predictions.
pub(super) fn published(as_json: bool) -> Result<String, Failure> {
    let rows = rows().map_err(|error| Failure::Internal(error.to_string()))?;
    if as_json {
        let object = |row: &PublishedRow| {
            json!({
                "name": row.name, "source": row.source, "unit": row.unit, "published": row.published, "predicted": row.predicted,
                "error": row.error(), "tolerance": row.tolerance, "used": row.used.to_string(),
            })
            .to_string()
        };
        return Ok(rows.iter().map(object).collect::<Vec<_>>().join("\n"));
    }
    let mut out =
        format!("{:42} {:>10} {:>10} {:>7}  {:9}  unit\n", "row", "published", "predicted", "error", "use");
    for row in &rows {
        let (published, predicted) = (digits(row.published), digits(row.predicted));
        let _ = writeln!(
            out,
            "{:42} {published:>10} {predicted:>10} {:>+6.1}%  {:9}  {}",
            row.name,
            100.0 * row.error(),
            row.used,
            row.unit
        );
    }
    out.push_str(
        "\nfitted: an input was fitted to this number, so that it shows nothing; predicted: none was\n",
    );
    let mut sources: Vec<&str> = rows.iter().map(|row| row.source).collect();
    sources.dedup();
    out.push_str(&sources.join("\n"));
    Ok(out)
}
