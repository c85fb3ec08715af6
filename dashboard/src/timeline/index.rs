//! Where which time is in `timeline.jsonl`: chunks of lines with their ranges of time and their seconds by lane and kind.
//!
//! Invariant: at most [`MAX_CHUNKS`] chunks are kept. When they are full, neighbours are merged and new chunks get twice as
//! long, so that a file of any length has an index of the same size.

use std::collections::VecDeque;

use crate::lines::LineSink;
use crate::span_line::SpanLine;

/// Most chunks of a file.
const MAX_CHUNKS: usize = 4096;
/// Bytes of a chunk of a short file.
const FIRST_CHUNK_BYTES: u64 = 64 << 10;
/// Most lanes; the spans of others are in the last one.
pub(super) const MAX_LANES: usize = 64;
/// Most kinds, with what a wait is for; others count as the last one.
const MAX_KINDS: usize = 128;
/// Most pairs of lane and kind of a chunk.
const MAX_TOTALS: usize = 256;
/// Newest steps whose starts are known.
const MAX_STEPS: usize = 256;
/// Newest stalls that are kept.
const MAX_STALLS: usize = 200;

/// Names of lanes and kinds, by number.
#[derive(Clone, Debug, Default)]
pub(super) struct TimelineNames {
    pub(super) lanes: Vec<String>,
    /// A kind, and what a wait is for.
    pub(super) kinds: Vec<(String, Option<String>)>,
}

impl TimelineNames {
    /// Lane and kind of a span.
    pub(super) fn of(&mut self, line: &SpanLine<'_>) -> (u16, u16) {
        let other = |full: bool, name: &str| if full { "other".to_owned() } else { name.to_owned() };
        let lane = self.lanes.iter().position(|known| known == line.lane()).unwrap_or_else(|| {
            if self.lanes.len() < MAX_LANES {
                self.lanes.push(other(self.lanes.len() + 1 == MAX_LANES, line.lane()));
            }
            self.lanes.len() - 1
        });
        let same = |(kind, why): &(String, Option<String>)| {
            kind == line.kind() && why.as_deref() == line.waits_for()
        };
        let kind = self.kinds.iter().position(same).unwrap_or_else(|| {
            if self.kinds.len() < MAX_KINDS {
                let full = self.kinds.len() + 1 == MAX_KINDS;
                let why = line.waits_for().filter(|_| !full).map(str::to_owned);
                self.kinds.push((other(full, line.kind()), why));
            }
            self.kinds.len() - 1
        });
        (lane as u16, kind as u16)
    }
}

/// Spans of one lane and kind in a chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct KindTotal {
    pub(super) lane: u16,
    pub(super) kind: u16,
    pub(super) spans: u32,
    pub(super) seconds: f32,
}

/// A part of the file that ends between two lines.
#[derive(Clone, Debug)]
pub(super) struct TimelineChunk {
    /// First byte, and the byte behind the last.
    pub(super) bytes: (u64, u64),
    /// First start and last end of its spans, seconds.
    pub(super) spans: (f64, f64),
    /// The same, of its spans and trajectories, seconds.
    pub(super) all: (f64, f64),
    pub(super) totals: Vec<KindTotal>,
}

impl TimelineChunk {
    fn at(offset: u64) -> Self {
        let nothing = (f64::INFINITY, f64::NEG_INFINITY);
        Self { bytes: (offset, offset), spans: nothing, all: nothing, totals: Vec::new() }
    }

    fn add(&mut self, total: KindTotal) {
        let same = |known: &KindTotal| (known.lane, known.kind) == (total.lane, total.kind);
        match self.totals.iter().position(same) {
            Some(at) => {
                let known = &mut self.totals[at];
                known.spans = known.spans.saturating_add(total.spans);
                known.seconds += total.seconds;
            }
            None if self.totals.len() < MAX_TOTALS => self.totals.push(total),
            None => {}
        }
    }

    fn absorb(&mut self, next: &Self) {
        self.bytes.1 = next.bytes.1;
        self.spans = hull(self.spans, next.spans);
        self.all = hull(self.all, next.all);
        next.totals.iter().for_each(|total| self.add(*total));
    }
}

/// The index of a file that grows.
#[derive(Debug)]
pub(super) struct TimelineIndex {
    pub(super) names: TimelineNames,
    pub(super) chunks: Vec<TimelineChunk>,
    chunk_bytes: u64,
    /// The newest steps and when the trainer began them, seconds.
    pub(super) steps: VecDeque<(u64, f64)>,
    /// The newest stalls that the watchdog saw: start and end, seconds, and its sentence.
    pub(super) stalls: VecDeque<(f64, f64, String)>,
    /// Lines that are no spans.
    pub(super) unreadable: u64,
    offset: u64,
}

impl Default for TimelineIndex {
    fn default() -> Self {
        Self {
            names: TimelineNames::default(),
            chunks: Vec::new(),
            chunk_bytes: FIRST_CHUNK_BYTES,
            steps: VecDeque::new(),
            stalls: VecDeque::new(),
            unreadable: 0,
            offset: 0,
        }
    }
}

impl TimelineIndex {
    /// First start and last end of all spans, seconds; `None` if there is none.
    pub(super) fn range(&self) -> Option<(f64, f64)> {
        let range = self
            .chunks
            .iter()
            .fold((f64::INFINITY, f64::NEG_INFINITY), |range, chunk| hull(range, chunk.spans));
        (range.0 <= range.1).then_some(range)
    }

    fn chunk(&mut self) -> &mut TimelineChunk {
        if self.chunks.last().is_none_or(|chunk| chunk.bytes.1 - chunk.bytes.0 >= self.chunk_bytes) {
            if self.chunks.len() >= MAX_CHUNKS {
                self.chunks = self.chunks.chunks(2).map(merged).collect();
                self.chunk_bytes *= 2;
            }
            self.chunks.push(TimelineChunk::at(self.offset));
        }
        let last = self.chunks.len() - 1;
        &mut self.chunks[last]
    }

    fn begin(&mut self, step: u64, at: f64) {
        match self.steps.back_mut() {
            Some((newest, start)) if *newest == step => *start = start.min(at),
            // The last spans of a step may come with those of the next one.
            Some((newest, _)) if *newest > step && *newest - step < MAX_STEPS as u64 => {}
            _ => {
                self.steps.push_back((step, at));
                if self.steps.len() > MAX_STEPS {
                    self.steps.pop_front();
                }
            }
        }
    }
}

impl LineSink for TimelineIndex {
    fn restart(&mut self) {
        *self = Self::default();
    }

    fn at(&mut self, offset: u64) {
        self.offset = offset;
    }

    fn line(&mut self, line: &[u8]) {
        let end = self.offset + line.len() as u64 + 1;
        let Some(parsed) = SpanLine::parse(line) else {
            self.unreadable += 1;
            return;
        };
        let times = (parsed.start, parsed.end());
        let is_trajectory = parsed.is_trajectory();
        let total = (!is_trajectory).then(|| {
            let (lane, kind) = self.names.of(&parsed);
            KindTotal { lane, kind, spans: 1, seconds: (times.1 - times.0) as f32 }
        });
        if let Some(step) = parsed.step.filter(|_| parsed.lane().starts_with("trainer")) {
            self.begin(step, parsed.start);
        }
        if parsed.kind() == "stall" {
            self.stalls.push_back((times.0, times.1, parsed.note().unwrap_or_default().to_owned()));
            if self.stalls.len() > MAX_STALLS {
                self.stalls.pop_front();
            }
        }
        let chunk = self.chunk();
        chunk.bytes.1 = end;
        chunk.all = hull(chunk.all, times);
        if let Some(total) = total {
            chunk.spans = hull(chunk.spans, times);
            chunk.add(total);
        }
    }
}

fn merged(pair: &[TimelineChunk]) -> TimelineChunk {
    let mut first = pair[0].clone();
    pair[1..].iter().for_each(|next| first.absorb(next));
    first
}

fn hull(a: (f64, f64), b: (f64, f64)) -> (f64, f64) {
    (a.0.min(b.0), a.1.max(b.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_any_length_has_an_index_of_the_same_size() {
        let mut index = TimelineIndex::default();
        let (mut offset, lines) = (0, 40_000);
        // Long notes make few lines many bytes.
        let note = "x".repeat(20_000);
        for number in 0..lines {
            let line = format!(
                r#"{{"lane":"trainer","kind":"wait_for_batch","start":{number},"end":{number}.5,"step":{number},"note":"{note}"}}"#
            );
            index.at(offset);
            index.line(line.as_bytes());
            offset += line.len() as u64 + 1;
        }
        assert!(index.chunks.len() <= MAX_CHUNKS && index.chunks.len() > MAX_CHUNKS / 4);
        let bytes: Vec<_> = index.chunks.iter().map(|chunk| chunk.bytes).collect();
        assert!(bytes.windows(2).all(|pair| pair[0].1 == pair[1].0), "chunks are the whole file");
        assert_eq!((bytes[0].0, bytes[bytes.len() - 1].1), (0, offset));
        let spans: u32 = index.chunks.iter().flat_map(|chunk| &chunk.totals).map(|total| total.spans).sum();
        assert_eq!(spans, lines);
        assert_eq!(index.range(), Some((0.0, f64::from(lines) - 0.5)));
        assert_eq!((index.steps.len(), index.steps.back()), (MAX_STEPS, Some(&(39_999, 39_999.0))));
    }

    #[test]
    fn names_have_limits_and_lines_of_other_forms_are_counted() {
        let mut index = TimelineIndex::default();
        for number in 0..300 {
            let line =
                format!(r#"{{"lane":"lane {number}","kind":"kind {number}","start":0,"end":1,"new":[]}}"#);
            index.line(line.as_bytes());
        }
        let far = "{\"lane\":\"a\",\"kind\":\"b\",\"start\":0,\"end\":1e300}";
        for broken in ["{\"lane\":\"a\"}", "[]", "{\"lane\":\"trainer\",\"ki", far] {
            index.line(broken.as_bytes());
        }
        assert_eq!((index.names.lanes.len(), index.names.kinds.len()), (MAX_LANES, MAX_KINDS));
        assert_eq!(index.names.lanes[MAX_LANES - 1], "other");
        assert_eq!(index.unreadable, 4);
        let spans: u32 = index.chunks.iter().flat_map(|chunk| &chunk.totals).map(|total| total.spans).sum();
        assert_eq!(spans, 300);
    }
}
