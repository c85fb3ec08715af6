//! The interface to sessions: agents whose key is that of a session, and whose turns are recorded.
//!
//! Invariant: without sessions an endpoint keeps nothing of a request. A turn that is dropped without
//! [`SessionTurn::record`] did not happen: its client left, or it failed.

use std::fmt;

use model::Sampling;
use rollout::RequestHandle;

use crate::ApiError;
use crate::answer::Choice;
use crate::conversation::{ChatRenderer, Conversation};

/// The sessions of an endpoint.
pub trait SessionRegistry: Send + Sync + fmt::Debug {
    /// A turn of the session that `key` is the key of. `None` if it is no key of a session: the endpoint then accepts it as
    /// it accepts keys without sessions.
    ///
    /// # Errors
    /// A session that cannot have another turn now, with the status for its client: 410 if it has ended, 409 if it is in
    /// use, 429 above its limits.
    fn begin_turn(&self, key: &str) -> Option<Result<Box<dyn SessionTurn>, ApiError>>;

    /// Whether `key` is the key of a session, which may ask for models and count tokens; nothing is recorded.
    fn knows(&self, key: &str) -> bool;
}

/// One turn of a session, from its request to its answer.
pub trait SessionTurn: Send + fmt::Debug {
    /// How the turn is sampled: a session for training may insist on the policy's own distribution.
    fn sampling(&mut self, asked: Sampling) -> Sampling {
        asked
    }

    /// Where its completions are requested, if not where those of all other clients are.
    fn requests(&self) -> Option<RequestHandle> {
        None
    }

    /// Seed of its completions, if not what the client asks for.
    fn seed(&self) -> Option<u64> {
        None
    }

    /// Longest completion after a prompt of `prompt` tokens, where `asked` was asked for; `None` for what the context leaves.
    fn longest(&self, prompt: usize, asked: Option<usize>) -> Option<usize> {
        let _ = prompt;
        asked
    }

    /// `[P]` the prompt of `conversation`: that which was sampled before is continued with the same tokens where the messages
    /// are the same.
    ///
    /// # Errors
    /// A conversation that cannot be rendered.
    fn prompt(&mut self, conversation: Conversation, renderer: &ChatRenderer) -> Result<Vec<u32>, ApiError> {
        renderer.encode(conversation)
    }

    /// The turn was answered: `choices` continue `prompt [P]`, under the id that the client gets. The answer is sent after it.
    fn record(self: Box<Self>, id: &str, prompt: &[u32], choices: &[Choice]);
}
