//! One result: a row of a table, or one JSON object on one line.
//!
//! # Fields of the object
//! | field | is |
//! |---|---|
//! | `measure` | `generate`, `train`, `loop` or `ops` |
//! | `model`, `parameters` | the last part of its path, and its weights in all |
//! | `threads` | threads that the work could use, and that the limits were measured on |
//! | settings | what was asked for, under the names of the options |
//! | `repeats`, `seconds`, `spread` | number of repeats, their median, and (longest - shortest) / median |
//! | `tokens`, `tokens_per_s` | tokens of one repeat, and per second of the median |
//! | `gflops`, `gbytes_per_s` | operations and traffic of [`super::cost`], 10^9 per second of the median |
//! | `peak_gflops`, `peak_gbytes_per_s` | limits of the machine, the better of before and after |
//! | `peak_drift` | by how much the arithmetic limit differed between before and after, relative |
//! | `share_of_fma`, `share_of_bandwidth` | `gflops` and `gbytes_per_s` by their limits |
//! | `device`, `dtype`, `device_mib` | where it computed, if not on the processor, and in what; memory of the device in use at the end. Limits are those of the device then: products of large matrices, and a copy, read and written |
//! | `memory_mib`, `memory_before_mib` | most resident memory meanwhile, loading included, and resident before |
//!
//! Further fields of a measure stand behind these: of `generate` the speed of the passes that prefill (`prefill_tokens_per_s`), and of
//! those in which all completions decode (`decode_ms` of one, `decode_tokens_per_s`, and their least traffic,
//! `decode_gbytes_per_s`), and of `loop` the times of its parts, from which `rlrun simulate` calibrates (`run`).
//!
//! Invariant: a field keeps its name and its meaning; what is not
//! measured is left out, never zero.

use rlrun::memory::MemoryUse;
use rlrun::simulate::measured_run::MeasuredRun;
use serde_json::{Map, Value, json};

use crate::cost::Cost;
use crate::machine::Peaks;

/// A measured amount of work and its duration.
#[derive(Clone, Debug, Default)]
pub struct Work {
    /// Which measure it is.
    pub name: &'static str,
    /// The last part of the model's path.
    pub model: String,
    /// Weights of the model.
    pub parameters: usize,
    /// The settings of the measure, under the names of the options.
    pub settings: Vec<(&'static str, Value)>,
    /// `[repeats]` wall time of each, at least one.
    pub seconds: Vec<f64>,
    /// Tokens of one repeat.
    pub tokens: f64,
    /// Work of one repeat.
    pub cost: Cost,
    /// Further results with names of their own.
    pub further: Vec<(&'static str, f64)>,
    /// What a loop measured of itself, in JSON alone.
    pub run: Option<MeasuredRun>,
}

/// A piece of work against the limits of the machine.
#[derive(Clone, Debug)]
pub struct Measure {
    /// What was done.
    pub work: Work,
    /// Memory around it.
    pub memory: MemoryUse,
    /// Limits before and after.
    pub peaks: [Peaks; 2],
    /// Threads that could be used.
    pub threads: usize,
}

/// Columns of the table: header and width.
const COLUMNS: [(&str, usize); 9] = [
    ("measure", 8),
    ("ms", 10),
    ("spread", 7),
    ("tokens/s", 10),
    ("GFLOP/s", 9),
    ("of FMA", 7),
    ("GB/s", 7),
    ("of mem", 7),
    ("MiB", 7),
];

/// The header of the table.
#[must_use]
pub fn header() -> String {
    join(&COLUMNS.map(|(name, _)| name.to_owned()), "settings")
}

impl Measure {
    /// Median wall time of a repeat, seconds.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        median(&self.work.seconds)
    }

    /// Tokens of a repeat.
    #[must_use]
    pub fn tokens(&self) -> f64 {
        self.work.tokens
    }

    /// The result as a row of the table.
    #[must_use]
    pub fn row(&self) -> String {
        let (rate, limit) = (self.rate(), self.limit());
        let percent = |share: f64| format!("{:.0}%", 100.0 * share);
        let cells = [
            self.work.name.to_owned(),
            milliseconds(self.seconds()),
            percent(spread(&self.work.seconds)),
            format!("{:.0}", self.work.tokens / self.seconds()),
            format!("{:.1}", rate.gflops),
            percent(rate.gflops / limit.gflops),
            format!("{:.1}", rate.gbytes_per_s),
            percent(rate.gbytes_per_s / limit.gbytes_per_s),
            format!("{:.0}", self.memory.peak),
        ];
        let settings = self.work.settings.iter().map(|(name, value)| match value {
            Value::String(word) => format!("{name} {word}"),
            other => format!("{name} {other}"),
        });
        let further = self.work.further.iter().map(|(name, value)| format!("{name} {value:.3}"));
        join(&cells, &settings.chain(further).collect::<Vec<_>>().join(", "))
    }

    /// The result as one JSON object; the fields are listed at the top of this file.
    #[must_use]
    pub fn json(&self) -> Value {
        let (rate, limit) = (self.rate(), self.limit());
        let [before, after] = self.peaks.map(|peaks| peaks.gflops);
        let mut fields = Map::new();
        let mut set = |name: &str, value: Value| fields.insert(name.to_owned(), value);
        set("measure", json!(self.work.name));
        set("model", json!(self.work.model));
        set("parameters", json!(self.work.parameters));
        set("threads", json!(self.threads));
        for (name, value) in &self.work.settings {
            set(name, value.clone());
        }
        set("repeats", json!(self.work.seconds.len()));
        for (name, value) in [
            ("seconds", self.seconds()),
            ("spread", spread(&self.work.seconds)),
            ("tokens", self.work.tokens),
            ("tokens_per_s", self.work.tokens / self.seconds()),
            ("gflops", rate.gflops),
            ("gbytes_per_s", rate.gbytes_per_s),
            ("peak_gflops", limit.gflops),
            ("peak_gbytes_per_s", limit.gbytes_per_s),
            ("peak_drift", (before - after).abs() / limit.gflops),
            ("share_of_fma", rate.gflops / limit.gflops),
            ("share_of_bandwidth", rate.gbytes_per_s / limit.gbytes_per_s),
            ("memory_mib", self.memory.peak),
            ("memory_before_mib", self.memory.before),
        ] {
            set(name, json!(value));
        }
        for (name, value) in &self.work.further {
            set(name, json!(value));
        }
        if let Some(run) = &self.work.run {
            set("run", json!(run));
        }
        Value::Object(fields)
    }

    /// What was done per second.
    fn rate(&self) -> Peaks {
        let Cost { flops, bytes } = self.work.cost * (1e-9 / self.seconds());
        Peaks { gflops: flops, gbytes_per_s: bytes }
    }

    /// The better of the limits before and after.
    fn limit(&self) -> Peaks {
        let [a, b] = self.peaks;
        Peaks { gflops: a.gflops.max(b.gflops), gbytes_per_s: a.gbytes_per_s.max(b.gbytes_per_s) }
    }
}

/// The median of `values` (`[n]`): the middle value, or the mean of the two middle values. NaN if `n` is 0.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

/// Four digits at least, from microseconds to minutes.
fn milliseconds(seconds: f64) -> String {
    if seconds < 1e-2 { format!("{:.4}", 1e3 * seconds) } else { format!("{:.2}", 1e3 * seconds) }
}

/// (longest - shortest) / median.
fn spread(values: &[f64]) -> f64 {
    let longest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let shortest = values.iter().copied().fold(f64::INFINITY, f64::min);
    (longest - shortest) / median(values)
}

fn join(cells: &[String; COLUMNS.len()], last: &str) -> String {
    let padded = cells.iter().zip(COLUMNS).map(|(cell, (_, width))| format!("{cell:>width$}"));
    padded.chain([last.to_owned()]).collect::<Vec<_>>().join("  ").trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measure() -> Measure {
        let peaks = |gflops, gbytes_per_s| Peaks { gflops, gbytes_per_s };
        Measure {
            work: Work {
                name: "generate",
                model: "tiny".to_owned(),
                parameters: 1000,
                settings: vec![("batch", json!(8))],
                seconds: vec![0.2, 0.1, 0.4],
                tokens: 50.0,
                cost: Cost { flops: 4e9, bytes: 1e9 },
                further: vec![("padding", 0.25)],
                run: None,
            },
            memory: MemoryUse { before: 10.0, peak: 12.5 },
            peaks: [peaks(80.0, 8.0), peaks(100.0, 10.0)],
            threads: 2,
        }
    }

    #[test]
    fn rows_align_with_their_header() {
        let expected = [
            " measure          ms   spread    tokens/s    GFLOP/s   of FMA     GB/s   of mem      MiB  settings",
            "generate      200.00     150%         250       20.0      20%      5.0      50%       12  batch 8, padding 0.250",
        ];
        assert_eq!([header(), measure().row()], expected);
    }

    #[test]
    fn the_object_holds_every_field_once() {
        let expected = concat!(
            r#"{"measure":"generate","model":"tiny","parameters":1000,"threads":2,"batch":8,"repeats":3,"#,
            r#""seconds":0.2,"spread":1.5000000000000002,"tokens":50.0,"tokens_per_s":250.0,"gflops":20.0,"#,
            r#""gbytes_per_s":5.0,"peak_gflops":100.0,"peak_gbytes_per_s":10.0,"peak_drift":0.2,"#,
            r#""share_of_fma":0.2,"share_of_bandwidth":0.5,"memory_mib":12.5,"memory_before_mib":10.0,"padding":0.25}"#
        );
        assert_eq!(measure().json().to_string(), expected);
    }

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }
}
