//! The critical paths of a run whose timeline grows, for the page.
//!
//! Invariant: one look reads a part of the file, and nothing that was read before. No lock of what was read is kept while recommendations are
//! computed.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use serde_json::{Value, json};

use super::reader::PathReader;
use super::{Advisor, RunExplanation};
use crate::lines::LineTail;

/// Bytes of the file that one look reads.
const PART_BYTES: u64 = 16 << 20;
/// Looks for one answer: it is about the part of the file that was read.
const LOOKS: usize = 8;
/// Recommendations are computed again when the run has so many more steps.
const MORE_STEPS: u64 = 10;
/// And this part of its steps more.
const MORE_STEPS_PART: u64 = 10;

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

    /// The explanation of what has been read of the timeline, and the answer of the API, which has the share of the file that this is.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub(crate) fn answer(&mut self) -> io::Result<(RunExplanation, Value)> {
        for _ in 0..LOOKS {
            self.tail.poll(&mut self.reader)?;
            if !self.tail.behind() {
                break;
            }
        }
        let explanation = RunExplanation::of(&self.reader);
        let mut answer = explanation.to_json();
        answer["read"] = json!(self.tail.share());
        Ok((explanation, answer))
    }
}

/// An advisor that computes for one request at a time, and what it has recommended.
pub(crate) struct SerialAdvisor {
    advisor: Advisor,
    /// Locked while it computes.
    turn: Mutex<()>,
    /// The newest recommendations by run directory, and the number of steps that they are for.
    known: Mutex<BTreeMap<PathBuf, (u64, Value)>>,
}

impl SerialAdvisor {
    pub(crate) fn new(advisor: Advisor) -> Self {
        Self { advisor, turn: Mutex::new(()), known: Mutex::new(BTreeMap::new()) }
    }

    /// Recommendations for the run in `root`. While it computes for another request these are the last ones; `None` without any.
    pub(crate) fn advice(&self, root: &Path, explanation: &RunExplanation) -> Option<Value> {
        let known = self.known().get(root).cloned();
        let steps = explanation.steps;
        let (from, advice) = known.unzip();
        let is_new = |from: u64| (from..from + MORE_STEPS.max(from / MORE_STEPS_PART)).contains(&steps);
        if steps == 0 || from.is_some_and(is_new) {
            return advice;
        }
        let _turn = match self.turn.try_lock() {
            Ok(turn) => turn,
            // A panic has left nothing half done.
            Err(TryLockError::Poisoned(turn)) => turn.into_inner(),
            Err(TryLockError::WouldBlock) => return advice,
        };
        let advice = (self.advisor)(root, explanation);
        self.known().insert(root.to_path_buf(), (steps, advice.clone()));
        Some(advice)
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<PathBuf, (u64, Value)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::lines::LineSink as _;

    #[test]
    fn an_advisor_is_asked_once_for_several_steps_and_by_one_request_at_a_time() {
        let asked = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&asked);
        let advisor = SerialAdvisor::new(Arc::new(move |_: &Path, of: &RunExplanation| {
            count.fetch_add(1, Ordering::Relaxed);
            json!(of.steps)
        }));
        let of = |steps: u64| {
            let mut reader = PathReader::default();
            for step in 1..=steps {
                let line = format!(
                    r#"{{"lane":"trainer","kind":"forward_backward","start":{step},"end":{},"step":{step}}}"#,
                    step + 1
                );
                reader.line(line.as_bytes());
            }
            RunExplanation::of(&reader)
        };
        let advice = |root: &str, steps: u64| advisor.advice(Path::new(root), &of(steps));
        assert_eq!(advice("a", 0), None);
        assert_eq!(
            [1, 2, 10].map(|steps| advice("a", steps)),
            [Some(json!(1)), Some(json!(1)), Some(json!(1))]
        );
        assert_eq!(advice("a", 11), Some(json!(11)));
        let turn = advisor.turn.lock().unwrap();
        assert_eq!(
            (advice("a", 40), advice("b", 40)),
            (Some(json!(11)), None),
            "another request has its turn"
        );
        drop(turn);
        assert_eq!((advice("a", 200), advice("a", 219)), (Some(json!(200)), Some(json!(200))));
        assert_eq!(advice("a", 3), Some(json!(3)), "the file was replaced");
        assert_eq!(asked.load(Ordering::Relaxed), 4);
    }
}
