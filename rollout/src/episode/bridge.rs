//! The tokens of messages that an environment adds to an episode.
//!
//! Invariant: tokens are only ever appended. What the policy sampled is never rendered or tokenised again, so it does not
//! matter whether the chat template would render a past turn as it was sampled.

use std::fmt;
use std::sync::Arc;

use model::tokenizer::SpecialTokens;
use model::{ChatTemplate, ModelDirectory};
use trajectory::{Message, Prompt, Task};

use crate::RolloutError;

/// Stands for a completion while the messages after it are rendered.
const COMPLETION: &str = "rlrun-completion";

/// Turns the messages of an environment into tokens.
pub trait MessageEncoder: Send + Sync + fmt::Debug {
    /// `[P]` the first prompt: that of `task`, followed by `messages`.
    ///
    /// # Errors
    /// A chat template that refuses the messages.
    fn opening(&self, task: &Task, messages: &[Message]) -> Result<Vec<u32>, RolloutError>;

    /// `[D]` the tokens between a completion that ends with `last_token` and the next turn: the end of the turn as far as
    /// the completion lacks it, `messages`, and the beginning of the next turn.
    ///
    /// # Errors
    /// A chat template that refuses the messages.
    fn following(&self, task: &Task, last_token: u32, messages: &[Message])
    -> Result<Vec<u32>, RolloutError>;
}

/// Messages by the chat template of a model; plain text where the prompt of the task is plain text.
#[derive(Clone, Debug)]
pub struct ChatEncoder {
    directory: Arc<ModelDirectory>,
}

impl ChatEncoder {
    /// For the model of `directory`.
    #[must_use]
    pub fn new(directory: Arc<ModelDirectory>) -> Self {
        Self { directory }
    }

    /// What `template` writes after a completion that `messages` follow.
    fn after_completion(
        &self,
        template: &ChatTemplate,
        messages: &[Message],
        open_turn: bool,
    ) -> Result<Vec<u32>, RolloutError> {
        let mut conversation = vec![Message::new("user", "?"), Message::new("assistant", COMPLETION)];
        conversation.extend((0..).zip(messages).map(|(n, message)| identified(n, message)));
        let rendered = template.render(&conversation, open_turn)?;
        match rendered.split_once(COMPLETION) {
            Some((_, after)) => self.encode(after),
            None => Err(RolloutError::Template { path: template.path().to_owned() }),
        }
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, RolloutError> {
        Ok(self.directory.tokenizer().encode(text, SpecialTokens::Omit)?)
    }
}

impl MessageEncoder for ChatEncoder {
    fn opening(&self, task: &Task, messages: &[Message]) -> Result<Vec<u32>, RolloutError> {
        let prompt = match &task.prompt {
            Prompt::Text(text) => Prompt::Text(format!("{text}{}", plain(messages))),
            Prompt::Messages(before) => Prompt::Messages([&before[..], messages].concat()),
        };
        Ok(self.directory.encode_prompt(&prompt)?)
    }

    /// Renders a synthetic conversation whose only completion is a placeholder, and encodes the text after it. That text
    /// begins with the template's end of a turn; where the completion ends with that token already, it is left out.
    fn following(
        &self,
        task: &Task,
        last_token: u32,
        messages: &[Message],
    ) -> Result<Vec<u32>, RolloutError> {
        let (Prompt::Messages(_), Some(template)) = (&task.prompt, self.directory.template()) else {
            return self.encode(&plain(messages));
        };
        let mut tokens = self.after_completion(template, messages, true)?;
        let Some(first) = tokens.first().copied() else { return Ok(tokens) };
        let ends = |token: u32| self.directory.stop_token_ids().contains(&token);
        // A family may end turns with several tokens, of which the template writes one. Where it writes none, as in GLM, the
        // token of the next role ends a turn: that of another role than the completion ended with has to follow.
        let closed = first == last_token
            || (ends(first)
                && ends(last_token)
                && self.after_completion(template, &[], false)?.first() == Some(&first));
        if closed {
            tokens.remove(0);
        }
        Ok(tokens)
    }
}

/// The message with the id of a call, which some templates insist on for answers of tools: nine letters and digits, as
/// Mistral has it.
fn identified(n: usize, message: &Message) -> Message {
    let missing = message.role == "tool" && message.tool_call_id.is_none();
    let id = if missing { Some(format!("call{n:05}")) } else { message.tool_call_id.clone() };
    Message { tool_call_id: id, ..message.clone() }
}

/// Messages as plain text, each with a line end unless it ends in white space: a completion that follows a number would
/// otherwise continue it.
fn plain(messages: &[Message]) -> String {
    let end = |content: &str| if content.ends_with(char::is_whitespace) { "" } else { "\n" };
    messages.iter().map(|message| format!("{}{}", message.content, end(&message.content))).collect()
}
