//! The tokens of the next prompt of a session.
//!
//! Invariant: what was sampled is never tokenised again while the agent only appends messages. A prompt that is rendered
//! again either begins with the tokens of a branch, or differs from it in its last response alone, or begins a new
//! branch; which of these it is is decided on tokens.

use serde_json::Value;
use trajectory::Message;

use super::{Interaction, MessageTree, SessionMessage};

/// A last response of at least this many tokens is not overwritten: the agent changed its history, and gets a new branch
/// (slime and TRL use the same number).
pub const REALIGN_BELOW: usize = 1024;

/// Most branches whose tokens are compared with a prompt that was rendered again, newest first.
const MOST_COMPARED: usize = 32;

/// Renders conversations for a model.
pub trait PromptRenderer {
    /// Why it cannot.
    type Error;

    /// `[P]` the whole conversation, and the beginning of the next turn.
    ///
    /// # Errors
    /// A chat template that refuses the messages.
    fn whole(&self) -> Result<Vec<u32>, Self::Error>;

    /// `[D]` the tokens between a completion that ends with `last_token` and the next turn, with `messages` between them.
    ///
    /// # Errors
    /// A chat template that refuses the messages.
    fn following(&self, last_token: u32, messages: &[Message]) -> Result<Vec<u32>, Self::Error>;
}

/// How a prompt relates to the interactions before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Continuation {
    /// It is the first prompt of the session, or repeats one that began a branch.
    First,
    /// It begins with all tokens of an interaction.
    Clean(usize),
    /// It begins with all tokens of an interaction but those of its response, which it has in other words.
    Realign(usize),
    /// It begins otherwise: a new branch.
    Fork,
}

impl Continuation {
    /// The interaction that it continues.
    #[must_use]
    pub fn interaction(self) -> Option<usize> {
        match self {
            Self::First | Self::Fork => None,
            Self::Clean(interaction) | Self::Realign(interaction) => Some(interaction),
        }
    }
}

/// Number of prompts by [`Continuation`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct DriftCounts {
    /// Prompts that begin with all tokens before them.
    pub clean: u64,
    /// Prompts that have the last response in other words.
    pub realign: u64,
    /// Prompts that began a new branch.
    pub fork: u64,
}

impl DriftCounts {
    /// Counts one more.
    pub fn count(&mut self, continuation: Continuation) {
        match continuation {
            Continuation::First => {}
            Continuation::Clean(_) => self.clean += 1,
            Continuation::Realign(_) => self.realign += 1,
            Continuation::Fork => self.fork += 1,
        }
    }
}

/// The prompt of an interaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NextPrompt {
    /// `[P]` its tokens.
    pub token_ids: Vec<u32>,
    /// What it continues.
    pub continuation: Continuation,
}

/// The prompt for `messages` after the `interactions` of a session.
///
/// # Errors
/// Those of `renderer`.
pub(super) fn next_prompt<R: PromptRenderer>(
    tree: &MessageTree,
    interactions: &[Interaction],
    tools: &Value,
    messages: &[SessionMessage],
    renderer: &R,
) -> Result<NextPrompt, R::Error> {
    let located = tree.locate(tools, messages);
    let before = located.node.and_then(|node| tree.last_response(node));
    if let Some((interaction, answered)) = before
        && messages[answered..].iter().all(SessionMessage::follows_completion)
        && answered < messages.len()
    {
        let mut token_ids = interactions[interaction].token_ids();
        let appended: Vec<Message> = messages[answered..].iter().map(SessionMessage::plain).collect();
        let last = token_ids.last().copied().unwrap_or_default();
        token_ids.extend(renderer.following(last, &appended)?);
        return Ok(NextPrompt { token_ids, continuation: Continuation::Clean(interaction) });
    }
    let token_ids = renderer.whole()?;
    let continuation = compare(interactions, &token_ids);
    Ok(NextPrompt { token_ids, continuation })
}

/// What `prompt [P]`, rendered as a whole, continues.
pub(super) fn compare(interactions: &[Interaction], prompt: &[u32]) -> Continuation {
    if interactions.is_empty() {
        return Continuation::First;
    }
    let same = |interaction: &&Interaction| interaction.prompt_ids == prompt;
    if let Some(repeated) = interactions.iter().rev().find(same) {
        return match repeated.continuation.interaction() {
            Some(_) => repeated.continuation,
            None => Continuation::First,
        };
    }
    let continued = |n: usize| interactions.iter().any(|later| later.continuation.interaction() == Some(n));
    // The longest beginning of the prompt, and the newest of several: an answer in other words is found at the end of its
    // branch, behind the tokens that the interactions before it have in common with the prompt.
    let candidate = |(n, interaction): (usize, &Interaction)| {
        let (asked, sampled) = (interaction.prompt_ids.len(), interaction.sampled_ids.len());
        if interaction.begins(prompt) {
            return Some((asked + sampled, n, Continuation::Clean(n)));
        }
        let changed = prompt.len() > asked && prompt.starts_with(&interaction.prompt_ids);
        let realigns = changed && sampled < REALIGN_BELOW && !continued(n);
        realigns.then_some((asked, n, Continuation::Realign(n)))
    };
    let newest = interactions.iter().enumerate().rev().take(MOST_COMPARED);
    let found = newest.filter_map(candidate).max_by_key(|(matched, n, _)| (*matched, *n));
    found.map_or(Continuation::Fork, |(.., continuation)| continuation)
}
