//! The critical paths of a run whose timeline grows, for the page.
//!
//! Invariant: one look reads a part of the file, and nothing that was read before.

use std::io;
use std::path::Path;

use serde_json::{Value, json};

use super::RunExplanation;
use super::reader::PathReader;
use crate::lines::LineTail;

/// Bytes of the file that one look reads.
const PART_BYTES: u64 = 16 << 20;

/// The steps of a run, as far as its timeline has been read.
#[derive(Debug)]
pub(crate) struct FollowedPaths {
    tail: LineTail,
    reader: PathReader,
}

impl FollowedPaths {
    pub(crate) fn new(root: &Path) -> Self {
        let tail = LineTail::new(root, "timeline.jsonl").in_parts(PART_BYTES);
        Self { tail, reader: PathReader::default() }
    }

    /// Reads what is new, a part at a time.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub(crate) fn poll(&mut self) -> io::Result<bool> {
        self.tail.poll(&mut self.reader)
    }

    /// The explanation of what was read, and the share of the file that was, 0 to 1.
    pub(crate) fn explanation(&self) -> (RunExplanation, f64) {
        (RunExplanation::of(&self.reader), self.tail.share())
    }
}

/// The answer of the API: an explanation with the recommendations for it.
pub(crate) fn answer((explanation, read): &(RunExplanation, f64), recommendations: Option<Value>) -> Value {
    let mut answer = explanation.to_json();
    answer["read"] = json!(read);
    if let Some(recommendations) = recommendations {
        answer["recommendations"] = recommendations;
    }
    answer
}
