//! `timeline.jsonl` of a run: what each role did when, and the way of trajectories from admission to training.
//!
//! - `index`: where which time is in the file; `picture`: spans of one lane on pixels
//! - `window`: the answer for a range of time
//!
//! Invariant: the file may have any length. Memory has a limit that does not depend on it, a request reads at most
//! `window::READ_BYTES` of it, and a response has at most `window::MAX_SPANS` spans.

mod index;
mod picture;
mod window;

use std::io;
use std::path::Path;

use serde_json::Value;

use crate::lines::LineTail;
use index::TimelineIndex;
pub(crate) use window::TimelineQuery;

/// Bytes of the file that one look reads.
const PART_BYTES: u64 = 16 << 20;

/// The timeline of a run, as far as its file has been read.
#[derive(Debug)]
pub(crate) struct FollowedTimeline {
    tail: LineTail,
    index: TimelineIndex,
}

impl FollowedTimeline {
    pub(crate) fn new(root: &Path) -> Self {
        Self {
            tail: LineTail::new(root, "timeline.jsonl").in_parts(PART_BYTES),
            index: TimelineIndex::default(),
        }
    }

    /// Reads what is new, a part at a time. Returns whether anything changed.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub(crate) fn poll(&mut self) -> io::Result<bool> {
        self.tail.poll(&mut self.index)
    }

    /// Whether a part of the file is left for the next look.
    pub(crate) fn behind(&self) -> bool {
        self.tail.behind()
    }

    /// What an answer needs, so that the file is read without the lock of this timeline.
    pub(crate) fn plan(&self, query: TimelineQuery) -> window::TimelineAnswer {
        window::TimelineAnswer::plan(&self.index, query, self.tail.share(), self.tail.skipped())
    }
}

/// The answer for a range of time of the run in `root`.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn answer(root: &Path, planned: window::TimelineAnswer) -> io::Result<Value> {
    planned.read(root)
}
