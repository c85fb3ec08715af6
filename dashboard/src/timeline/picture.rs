//! Spans of one lane on pixels.
//!
//! Invariant: spans shorter than a pixel are merged with those that begin in the same pixel, and of longer ones a number is
//! kept that does not depend on the file. Seconds of waits are those of all spans.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::index::TimelineNames;
use crate::span_line::is_wait;

/// The range of time that is drawn, and its resolution.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimeRange {
    /// First and last, seconds.
    pub(super) from: f64,
    pub(super) to: f64,
    /// Width of the drawing, pixels.
    pub(super) pixels: usize,
}

impl TimeRange {
    /// Seconds of a pixel.
    pub(super) fn pixel(self) -> f64 {
        (self.to - self.from) / self.pixels.max(1) as f64
    }

    pub(super) fn touches(self, times: (f64, f64)) -> bool {
        times.1 >= self.from && times.0 <= self.to
    }

    /// Seconds of a span that are in the range.
    pub(super) fn overlap(self, times: (f64, f64)) -> f64 {
        (times.1.min(self.to) - times.0.max(self.from)).max(0.0)
    }
}

/// One span, or several that a pixel cannot separate.
#[derive(Debug)]
struct DrawnSpan {
    times: (f64, f64),
    /// Seconds by kind.
    kinds: Vec<(u16, f64)>,
    spans: u64,
    /// Fields of a single span.
    details: Map<String, Value>,
}

impl DrawnSpan {
    fn absorb(&mut self, times: (f64, f64), kinds: &[(u16, f64)], spans: u64) {
        self.times = (self.times.0.min(times.0), self.times.1.max(times.1));
        self.spans += spans;
        self.details = Map::new();
        for (kind, seconds) in kinds {
            match self.kinds.iter_mut().find(|(known, _)| known == kind) {
                Some((_, sum)) => *sum += seconds,
                None => self.kinds.push((*kind, *seconds)),
            }
        }
    }

    fn to_json(&self, names: &TimelineNames) -> Value {
        let longest = self.kinds.iter().max_by(|a, b| a.1.total_cmp(&b.1)).map(|(kind, _)| *kind);
        let name = |kind: u16| names.kinds.get(usize::from(kind)).map_or("", |(kind, _)| kind);
        let mut span = self.details.clone();
        span.insert("start".to_owned(), micros(self.times.0));
        span.insert("end".to_owned(), micros(self.times.1));
        span.insert("kind".to_owned(), longest.map_or("", name).into());
        if self.spans > 1 {
            let mut seconds = BTreeMap::<&str, f64>::new();
            self.kinds.iter().for_each(|(kind, sum)| *seconds.entry(name(*kind)).or_default() += sum);
            let seconds: Map<String, Value> =
                seconds.into_iter().map(|(kind, sum)| (kind.to_owned(), micros(sum))).collect();
            span.insert("spans".to_owned(), self.spans.into());
            span.insert("seconds".to_owned(), seconds.into());
        }
        span.into()
    }
}

/// A lane of the drawing.
#[derive(Debug, Default)]
pub(super) struct LanePicture {
    /// Merged spans by the pixel that they begin in.
    short: BTreeMap<i64, DrawnSpan>,
    long: Vec<DrawnSpan>,
    /// Seconds of each kind of wait in the range.
    waits: BTreeMap<u16, f64>,
    left_out: u64,
}

impl LanePicture {
    /// Adds spans between two times, `kinds` with their seconds. At most `most` long spans are kept.
    pub(super) fn add(
        &mut self,
        range: TimeRange,
        most: usize,
        names: &TimelineNames,
        new: NewSpans<'_>,
        details: impl FnOnce() -> Map<String, Value>,
    ) {
        let NewSpans { times, kinds, spans } = new;
        let length = times.1 - times.0;
        let inside = if length > 0.0 { range.overlap(times) / length } else { 0.0 };
        for (kind, seconds) in kinds {
            if names.kinds.get(usize::from(*kind)).is_some_and(|(name, _)| is_wait(name)) {
                *self.waits.entry(*kind).or_default() += seconds * inside;
            }
        }
        let fresh = |details| DrawnSpan { times, kinds: kinds.to_vec(), spans, details };
        if length < range.pixel() {
            let pixel = ((times.0 - range.from) / range.pixel()) as i64;
            match self.short.get_mut(&pixel) {
                Some(known) => known.absorb(times, kinds, spans),
                None => {
                    self.short.insert(pixel, fresh(details()));
                }
            }
        } else if self.long.len() < most {
            self.long.push(fresh(details()));
        } else {
            self.left_out += spans;
        }
    }

    /// The spans in the order of their starts.
    pub(super) fn spans(&self, names: &TimelineNames) -> Vec<Value> {
        let mut all: Vec<&DrawnSpan> = self.short.values().chain(&self.long).collect();
        all.sort_unstable_by(|a, b| a.times.0.total_cmp(&b.times.0));
        all.into_iter().map(|span| span.to_json(names)).collect()
    }

    /// What the lane waits for and its share of `seconds`, the largest first.
    pub(super) fn waits(&self, names: &TimelineNames, seconds: f64) -> Vec<(String, f64)> {
        let mut waits = BTreeMap::<String, f64>::new();
        for (kind, sum) in &self.waits {
            let Some((kind, why)) = names.kinds.get(usize::from(*kind)) else { continue };
            *waits.entry(awaited(kind, why.as_deref())).or_default() += sum;
        }
        let share = |sum: f64| if seconds > 0.0 { (sum / seconds).min(1.0) } else { 0.0 };
        let mut waits: Vec<(String, f64)> = waits.into_iter().map(|(what, sum)| (what, share(sum))).collect();
        waits.sort_unstable_by(|a, b| b.1.total_cmp(&a.1));
        waits
    }

    pub(super) fn left_out(&self) -> u64 {
        self.left_out
    }
}

/// Spans to add to a lane.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewSpans<'a> {
    /// First start and last end, seconds.
    pub(super) times: (f64, f64),
    /// Seconds by kind.
    pub(super) kinds: &'a [(u16, f64)],
    /// How many they are.
    pub(super) spans: u64,
}

/// What a kind of wait is for, in words.
fn awaited(kind: &str, why: Option<&str>) -> String {
    let named = match kind.strip_prefix("wait_for_") {
        Some("batch") => "batches".to_owned(),
        Some(what) => what.replace('_', " "),
        None => String::new(),
    };
    match (why, named.is_empty()) {
        (Some(why), _) => why.strip_prefix("for ").unwrap_or(why).to_owned(),
        (None, false) => named,
        (None, true) => "something that is not named".to_owned(),
    }
}

/// Seconds with six decimals.
pub(super) fn micros(seconds: f64) -> Value {
    json!((seconds * 1e6).round() / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> TimelineNames {
        let kind = |kind: &str, why: Option<&str>| (kind.to_owned(), why.map(str::to_owned));
        TimelineNames {
            lanes: vec!["a".to_owned()],
            kinds: vec![kind("sample", None), kind("wait", Some("a slot")), kind("wait_for_batch", None)],
        }
    }

    #[test]
    fn short_spans_share_a_pixel_and_waits_are_exact() {
        let (names, mut lane) = (names(), LanePicture::default());
        let range = TimeRange { from: 0.0, to: 100.0, pixels: 100 };
        let mut add = |start: f64, end: f64, kind: u16| {
            let new = NewSpans { times: (start, end), kinds: &[(kind, end - start)], spans: 1 };
            lane.add(range, 2, &names, new, || json!({"note": "n"}).as_object().unwrap().clone());
        };
        for index in 0..1000 {
            let start = f64::from(index) * 0.01;
            add(start, start + 0.006, 0);
            add(start + 0.006, start + 0.01, 1);
        }
        add(50.0, 60.0, 0);
        // Half of it is outside.
        add(90.0, 110.0, 2);
        add(60.0, 62.0, 0);
        let spans = lane.spans(&names);
        assert_eq!((spans.len(), lane.left_out()), (12, 1));
        assert_eq!((&spans[0]["kind"], &spans[0]["spans"]), (&json!("sample"), &json!(200)));
        assert_eq!(spans[0]["seconds"], json!({"sample": 0.6, "wait": 0.4}));
        assert_eq!(spans[0].get("note"), None);
        assert_eq!(spans[10], json!({"kind": "sample", "start": 50.0, "end": 60.0, "note": "n"}));
        let waits = lane.waits(&names, 100.0);
        assert_eq!(waits[0].0, "batches");
        assert!((waits[0].1 - 0.1).abs() < 1e-9 && (waits[1].1 - 0.04).abs() < 1e-9, "{waits:?}");
    }
}
