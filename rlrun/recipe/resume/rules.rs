//! Which keys may change when a run is resumed.
//!
//! Invariant: every key of the schema declares its rule in the comment above it (tested). A key that may change is read at
//! every start and takes effect from the next step on. A key that stays defines the run, or the form of its saved state.

use crate::recipe::manual::{self, Key};

/// Whether a key may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// It takes effect from the next step on.
    MayChange,
    /// It stays, for this reason.
    Stays(&'static str),
}

/// The words behind `resume =` for keys that stay, and the reasons.
const REASONS: [(&str, &str); 8] = [
    ("run", "it belongs to the directory of the run"),
    ("policy", "the policy is that of the run's checkpoint"),
    ("tasks", "a resume continues at a position in the task order, which depends on it"),
    ("warmup", "the warm-up is what training started from"),
    ("groups", "groups in the buffer depend on it"),
    ("reward", "trajectories that wait in the buffer were scored with it"),
    ("experiment", "it is what the run learns"),
    ("state", "the state in the checkpoint (optimizer, adapter, critic or island) would not fit"),
];

/// The rule of a key, by its path without the indexes of lists; `None` if there is no such key.
pub(crate) fn rule(path: &str) -> Option<Rule> {
    manual::keys().iter().find(|key| key.path == path).and_then(|key| declared(key))
}

/// The rule that a key declares.
pub(in crate::recipe) fn declared(key: &Key) -> Option<Rule> {
    if key.resume == "changes" {
        return Some(Rule::MayChange);
    }
    REASONS.iter().find(|(word, _)| *word == key.resume).map(|(_, reason)| Rule::Stays(reason))
}
