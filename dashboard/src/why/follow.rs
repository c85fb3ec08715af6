//! The critical paths of a run whose timeline grows, for the page.
//!
//! Invariant: one look reads a part of the file, and nothing that was read before.

use std::io;
use std::path::Path;

use serde_json::{Value, json};

use super::reader::PathReader;
use super::{Advisor, RunExplanation};
use crate::lines::LineTail;

/// Bytes of the file that one look reads.
const PART_BYTES: u64 = 16 << 20;
/// Looks for one answer: it is about the part of the file that was read.
const LOOKS: usize = 8;
/// A recommendation is computed again when the run has so many more steps, as a share.
const MORE_STEPS: f64 = 0.1;

/// The steps of a run, as far as its timeline has been read.
#[derive(Debug)]
pub(crate) struct FollowedPaths {
    tail: LineTail,
    reader: PathReader,
    /// Recommendations, and the number of steps that they are for.
    advice: Option<(u64, Value)>,
}

impl FollowedPaths {
    pub(crate) fn new(root: &Path) -> Self {
        let tail = LineTail::new(root, "timeline.jsonl").in_parts(PART_BYTES);
        Self { tail, reader: PathReader::default(), advice: None }
    }

    /// The answer of the API: the explanation of what has been read of the timeline of the run in `root`, with the share of the file
    /// that this is, and the recommendations of `advisor`.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub(crate) fn answer(&mut self, root: &Path, advisor: Option<&Advisor>) -> io::Result<Value> {
        for _ in 0..LOOKS {
            self.tail.poll(&mut self.reader)?;
            if !self.tail.behind() {
                break;
            }
        }
        let explanation = RunExplanation::of(&self.reader);
        let mut answer = explanation.to_json();
        answer["read"] = json!(self.tail.share());
        if let Some(advisor) = advisor.filter(|_| explanation.steps > 0) {
            let enough = |(steps, _): &&(u64, Value)| {
                explanation.steps as f64 <= *steps as f64 * (1.0 + MORE_STEPS) && explanation.steps >= *steps
            };
            let advice = match self.advice.as_ref().filter(enough) {
                Some((_, advice)) => advice.clone(),
                None => {
                    let advice = advisor(root, &explanation);
                    self.advice = Some((explanation.steps, advice.clone()));
                    advice
                }
            };
            answer["recommendations"] = advice;
        }
        Ok(answer)
    }
}
