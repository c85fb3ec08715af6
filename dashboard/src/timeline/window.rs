//! The answer for a range of time: lanes with their spans, trajectories, stalls, and which lane waits for what.
//!
//! Invariant: at most [`READ_BYTES`] of the file are read. A range with more is answered with the sums of its chunks, which
//! `exact` says. A response has at most [`MAX_SPANS`] spans and [`MAX_TRAJECTORIES`] trajectories.

use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use super::index::{TimelineChunk, TimelineIndex, TimelineNames};
use super::picture::{LanePicture, NewSpans, TimeRange, micros};
use crate::lines::{for_each_line, open_inside};
use crate::span_line::SpanLine;

/// Most bytes of the file that a request reads.
pub(super) const READ_BYTES: u64 = 16 << 20;
/// Most spans of a response.
pub(super) const MAX_SPANS: usize = 16_000;
/// Most trajectories of a response.
const MAX_TRAJECTORIES: usize = 300;
/// Steps of the window that is shown first.
const DEFAULT_STEPS: usize = 20;
/// Most pixels that spans are computed for.
const MAX_PIXELS: usize = 2000;
/// Most steps that are marked.
const MAX_MARKS: usize = 60;
/// Most waits that the sentence names.
const MAX_CLAUSES: usize = 4;
/// A shorter share of the time is no reason for a sentence.
const LEAST_SHARE: f64 = 0.01;

/// The range that is asked for.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub(crate) struct TimelineQuery {
    /// First and last time, seconds; without both the newest steps are shown.
    pub(crate) from: Option<f64>,
    pub(crate) to: Option<f64>,
    /// Width of the drawing, pixels.
    pub(crate) pixels: Option<usize>,
}

/// An answer whose spans are not read yet.
#[derive(Debug)]
pub(crate) struct TimelineAnswer {
    names: TimelineNames,
    chunks: Vec<TimelineChunk>,
    range: TimeRange,
    /// First and last time of the file, seconds; `None` if it has no spans.
    whole: Option<(f64, f64)>,
    steps: Vec<(u64, f64)>,
    stalls: Vec<(f64, f64, String)>,
    unreadable: u64,
    /// Share of the file that the index has.
    indexed: f64,
}

/// What was read for an answer.
#[derive(Debug, Default)]
struct WindowContents {
    lanes: Vec<LanePicture>,
    /// Starts and ends, seconds, with the fields.
    trajectories: Vec<(f64, f64, Value)>,
    trajectories_left_out: usize,
}

impl TimelineAnswer {
    pub(super) fn plan(index: &TimelineIndex, query: TimelineQuery, indexed: f64, skipped: u64) -> Self {
        let whole = index.range();
        let (first, last) = whole.unwrap_or((0.0, 1.0));
        let asked = query.from.zip(query.to).filter(|(from, to)| to > from && (to - from).is_finite());
        let (from, to) = asked.unwrap_or_else(|| {
            let newest = index.steps.len().checked_sub(DEFAULT_STEPS).and_then(|at| index.steps.get(at));
            (newest.map_or(first, |(_, start)| *start), last)
        });
        // A window of no length has no pixels.
        let to = if to > from { to } else { from + 1e-3 };
        let pixels = query.pixels.unwrap_or(800).clamp(50, MAX_PIXELS);
        let range = TimeRange { from, to, pixels };
        let inside = index.steps.iter().filter(|(_, at)| *at >= from && *at <= to);
        let inside: Vec<(u64, f64)> = inside.copied().collect();
        let every = inside.len().div_ceil(MAX_MARKS).max(1);
        Self {
            names: index.names.clone(),
            chunks: index.chunks.iter().filter(|chunk| range.touches(chunk.all)).cloned().collect(),
            range,
            whole,
            steps: inside.into_iter().step_by(every).collect(),
            stalls: index.stalls.iter().filter(|stall| range.touches((stall.0, stall.1))).cloned().collect(),
            unreadable: index.unreadable + skipped,
            indexed,
        }
    }

    /// Reads the spans and makes the answer.
    pub(super) fn read(mut self, root: &Path) -> io::Result<Value> {
        let bytes: u64 = self.chunks.iter().map(|chunk| chunk.bytes.1 - chunk.bytes.0).sum();
        let exact = bytes <= READ_BYTES;
        let contents = if exact { self.spans_of_file(root)? } else { self.sums_of_chunks() };
        Ok(self.to_json(contents, exact))
    }

    /// Long spans that a lane may have.
    fn most(&self) -> usize {
        MAX_SPANS / self.names.lanes.len().max(8)
    }

    /// Pixels of a lane: with many lanes fewer than there are.
    fn lane_range(&self) -> TimeRange {
        TimeRange { pixels: self.range.pixels.min(self.most()), ..self.range }
    }

    fn spans_of_file(&mut self, root: &Path) -> io::Result<WindowContents> {
        let mut contents = WindowContents::default();
        let Some(mut file) = open_inside(root, &root.join("timeline.jsonl"))? else { return Ok(contents) };
        for chunk in std::mem::take(&mut self.chunks) {
            file.seek(SeekFrom::Start(chunk.bytes.0))?;
            for_each_line((&file).take(chunk.bytes.1 - chunk.bytes.0), |line| {
                if let Some(line) = line.and_then(SpanLine::parse) {
                    self.add(&line, &mut contents);
                }
                true
            })?;
        }
        Ok(contents)
    }

    fn add(&mut self, line: &SpanLine<'_>, contents: &mut WindowContents) {
        let times = (line.start, line.end());
        if !self.range.touches(times) {
            return;
        }
        if line.is_trajectory() {
            contents.trajectories.push((times.0, times.1, line.details().into()));
            if contents.trajectories.len() >= 2 * MAX_TRAJECTORIES {
                contents.keep_newest();
            }
            return;
        }
        let (lane, kind) = self.names.of(line);
        let (range, most) = (self.lane_range(), self.most());
        let new = NewSpans { times, kinds: &[(kind, times.1 - times.0)], spans: 1 };
        contents.lane(lane).add(range, most, &self.names, new, || line.details());
    }

    /// The lanes as far as the index knows them: the seconds of every kind in a chunk.
    fn sums_of_chunks(&self) -> WindowContents {
        let mut contents = WindowContents::default();
        let (range, most) = (self.lane_range(), self.most());
        for (chunk, next) in self.chunks.iter().zip(self.chunks.iter().skip(1).map(Some).chain([None])) {
            let end = next.map_or(chunk.spans.1, |next| next.spans.0.clamp(chunk.spans.0, chunk.spans.1));
            let times = (chunk.spans.0, end.max(chunk.spans.0));
            if !range.touches(times) {
                continue;
            }
            for lane in 0..self.names.lanes.len() as u16 {
                let of_lane: Vec<_> = chunk.totals.iter().filter(|total| total.lane == lane).collect();
                if of_lane.is_empty() {
                    continue;
                }
                let kinds: Vec<(u16, f64)> =
                    of_lane.iter().map(|total| (total.kind, f64::from(total.seconds))).collect();
                // A chunk counts as several spans also where it has one: its time is not exact.
                let spans = of_lane.iter().map(|total| u64::from(total.spans)).sum::<u64>().max(2);
                let new = NewSpans { times, kinds: &kinds, spans };
                contents.lane(lane).add(range, most, &self.names, new, serde_json::Map::new);
            }
        }
        contents
    }

    fn to_json(&self, mut contents: WindowContents, exact: bool) -> Value {
        contents.keep_newest();
        let TimeRange { from, to, .. } = self.range;
        let known = self.whole.map_or(0.0, |whole| self.range.overlap(whole));
        let mut order: Vec<usize> = (0..self.names.lanes.len()).collect();
        order.sort_unstable_by_key(|lane| lane_order(&self.names.lanes[*lane]));
        let none = LanePicture::default();
        let (mut clauses, mut lanes) = (Vec::new(), Vec::new());
        for lane in order {
            let (name, picture) = (&self.names.lanes[lane], contents.lanes.get(lane).unwrap_or(&none));
            let waits = picture.waits(&self.names, known);
            clauses.extend(waits.iter().map(|(what, share)| (*share, name.clone(), what.clone())));
            let waits: Vec<Value> =
                waits.into_iter().map(|(what, share)| json!({ "for": what, "share": share })).collect();
            let spans = picture.spans(&self.names);
            lanes.push(
                json!({ "name": name, "spans": spans, "waits": waits, "left_out": picture.left_out() }),
            );
        }
        let trajectories = contents.trajectories.into_iter().map(|(start, end, mut fields)| {
            fields["start"] = micros(start);
            fields["end"] = micros(end);
            fields
        });
        json!({
            "from": from,
            "to": to,
            "first": self.whole.map(|whole| whole.0),
            "last": self.whole.map(|whole| whole.1),
            "indexed": self.indexed,
            "exact": exact,
            "lanes": lanes,
            "sentence": sentence(clauses),
            "stalls": self.stalls.iter()
                .map(|(start, end, note)| json!({ "start": start, "end": end, "note": note }))
                .collect::<Vec<_>>(),
            "steps": self.steps.iter().map(|(step, at)| json!({ "step": step, "at": at })).collect::<Vec<_>>(),
            "trajectories": trajectories.collect::<Vec<_>>(),
            "trajectories_left_out": contents.trajectories_left_out,
            "unreadable": self.unreadable,
        })
    }
}

impl WindowContents {
    fn lane(&mut self, lane: u16) -> &mut LanePicture {
        let lane = usize::from(lane);
        if self.lanes.len() <= lane {
            self.lanes.resize_with(lane + 1, LanePicture::default);
        }
        &mut self.lanes[lane]
    }

    /// Keeps the trajectories that ended last, in the order of their starts.
    fn keep_newest(&mut self) {
        self.trajectories.sort_by(by(|one| -one.1));
        self.trajectories_left_out += self.trajectories.len().saturating_sub(MAX_TRAJECTORIES);
        self.trajectories.truncate(MAX_TRAJECTORIES);
        self.trajectories.sort_by(by(|one| one.0));
    }
}

/// An order of trajectories. One type for all orders, so that the program has one copy of the sort.
fn by(
    key: fn(&(f64, f64, Value)) -> f64,
) -> impl Fn(&(f64, f64, Value), &(f64, f64, Value)) -> std::cmp::Ordering {
    move |a, b| key(a).total_cmp(&key(b))
}

/// Trainer first, then samplers, rewards, weights and the watchdog; numbers in their order.
fn lane_order(name: &str) -> (usize, String, u64) {
    let kinds = ["trainer", "sampler", "reward", "weights", "watchdog"];
    let kind = kinds.iter().position(|kind| name.starts_with(kind)).unwrap_or(kinds.len());
    let digits = name.len() - name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    let (text, number) = name.split_at(name.len() - digits);
    (kind, text.trim_end().to_owned(), number.parse().unwrap_or(0))
}

/// Which lane waits for what: `(share, lane, what)`, the largest shares first.
fn sentence(mut clauses: Vec<(f64, String, String)>) -> String {
    clauses.retain(|(share, ..)| *share >= LEAST_SHARE);
    clauses.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
    let more = clauses.len().saturating_sub(MAX_CLAUSES);
    let clauses = clauses.iter().take(MAX_CLAUSES);
    let mut words: Vec<String> = clauses
        .map(|(share, lane, what)| format!("{lane} waits {:.0} % for {what}", 100.0 * share))
        .collect();
    if more > 0 {
        words.push(format!("{more} other waits are shorter"));
    }
    if words.is_empty() { "no lane waits".to_owned() } else { words.join("; ") }
}

#[cfg(test)]
mod tests;
