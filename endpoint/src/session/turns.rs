//! Sessions behind the protocols of the endpoint: the key of a request names its session, its conversation is continued, and its
//! answer recorded.
//!
//! Invariant: in a session for training the policy is sampled from its own distribution, at the temperature of the run,
//! whatever the agent asks for; what it asked for is recorded.

use std::sync::Arc;

use model::{ModelDirectory, Sampling, SpecialTokens};
use rollout::{ChatEncoder, MessageEncoder, RequestHandle};
use serde_json::{Map, Value, json};
use tokio::time::Instant;
use trajectory::{Message, Prompt, Task, TaskId};

use super::{
    NextPrompt, PromptRenderer, SessionCall, SessionError, SessionMessage, SessionPurpose, SessionRequest,
    SessionResponse, SessionSampler, SessionStore,
};
use crate::ApiError;
use crate::answer::Choice;
use crate::conversation::{ChatRenderer, Conversation};
use crate::sessions::{SessionRegistry, SessionTurn};
use crate::tools::{ParsedText, Toolbox};

impl SessionRegistry for SessionStore {
    fn begin_turn(&self, key: &str) -> Option<Result<Box<dyn SessionTurn>, ApiError>> {
        match self.call(key, Instant::now()) {
            Err(SessionError::UnknownKey) => None,
            Err(error) => Some(Err(error.into())),
            Ok(call) => Some(Ok(Box::new(RecordedTurn::new(call)))),
        }
    }

    fn knows(&self, key: &str) -> bool {
        // A session that has ended is answered by 410, and not as a wrong key.
        !matches!(self.id_of(key), Err(SessionError::UnknownKey))
    }
}

/// A turn that is recorded.
#[derive(Debug)]
struct RecordedTurn {
    call: SessionCall,
    sampler: Option<Arc<SessionSampler>>,
    purpose: SessionPurpose,
    /// What was asked for, and what is used.
    sampling: Sampling,
    requested: Value,
    planned: Option<PlannedTurn>,
}

/// A turn whose conversation is known.
#[derive(Debug)]
struct PlannedTurn {
    request: SessionRequest,
    prompt: NextPrompt,
    /// How calls of tools are read.
    tools: Toolbox,
}

impl RecordedTurn {
    fn new(call: SessionCall) -> Self {
        let (sampler, purpose) = (call.sampler(), call.purpose());
        Self { call, sampler, purpose, sampling: Sampling::PLAIN, requested: Value::Null, planned: None }
    }
}

impl SessionTurn for RecordedTurn {
    fn requests(&self) -> Option<RequestHandle> {
        self.sampler.as_ref().map(|sampler| sampler.requests.clone())
    }

    fn seed(&self) -> Option<u64> {
        let sampler = self.sampler.as_ref()?;
        Some(mixed([sampler.seed, self.call.interactions() as u64]))
    }

    fn sampling(&mut self, asked: Sampling) -> Sampling {
        let Sampling { temperature, top_p, top_k, min_p } = asked;
        self.requested = json!({
            "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p,
        });
        self.sampling = match (&self.sampler, self.purpose) {
            (Some(sampler), _) => sampler.request.sampling,
            (None, SessionPurpose::Eval) => asked,
            // A greedy choice has nothing to learn from.
            (None, SessionPurpose::Train) if temperature == 0.0 => Sampling::PLAIN,
            (None, SessionPurpose::Train) => Sampling { temperature, ..Sampling::PLAIN },
        };
        self.sampling
    }

    fn longest(&self, prompt: usize, asked: Option<usize>) -> Option<usize> {
        let Some(sampler) = &self.sampler else { return asked };
        let left = sampler.max_tokens.saturating_sub(prompt).min(sampler.request.max_completion_length);
        Some(asked.map_or(left, |asked| asked.min(left)))
    }

    fn prompt(&mut self, conversation: Conversation, renderer: &ChatRenderer) -> Result<Vec<u32>, ApiError> {
        let messages: Vec<SessionMessage> = conversation.messages.iter().map(SessionMessage::from).collect();
        self.call.fits(messages.len())?;
        let tools = if conversation.tools.is_empty() {
            Value::Null
        } else {
            Value::Array(conversation.tools.clone())
        };
        let offered = Toolbox::of(conversation.tools.clone(), renderer.format());
        let request = SessionRequest { tools, messages, requested: std::mem::take(&mut self.requested) };
        let encoder = ChatEncoder::new(Arc::clone(renderer.directory()));
        let rendered = RenderedConversation { conversation, renderer, encoder };
        let prompt = self.call.next_prompt(&request, &rendered)?;
        if let Some(most) = self.sampler.as_ref().map(|sampler| sampler.max_tokens)
            && prompt.token_ids.len() >= most
        {
            let tokens = prompt.token_ids.len();
            let message =
                format!("the conversation has {tokens} tokens; an episode of this run has at most {most}");
            return Err(ApiError::invalid("messages", message));
        }
        let token_ids = prompt.token_ids.clone();
        self.planned = Some(PlannedTurn { request, prompt, tools: offered });
        Ok(token_ids)
    }

    fn record(self: Box<Self>, id: &str, prompt: &[u32], choices: &[Choice]) {
        let Self { call, sampling, requested, planned, .. } = *self;
        // A prompt without messages is a conversation of its own, whose text is not compared.
        let PlannedTurn { mut request, prompt, tools } = planned.unwrap_or_else(|| {
            let token_ids = prompt.to_vec();
            let request = SessionRequest { tools: Value::Null, messages: Vec::new(), requested: Value::Null };
            let continuation = call.continuation(&token_ids);
            PlannedTurn { request, prompt: NextPrompt { token_ids, continuation }, tools: Toolbox::default() }
        });
        if !requested.is_null() {
            request.requested = requested;
        }
        let response = |choice: &Choice| {
            let ParsedText { content, calls } = tools.parse(&choice.text);
            SessionResponse {
                id: if choices.len() == 1 { id.to_owned() } else { format!("{id}-{}", choice.index) },
                message: SessionMessage::calling(content, &calls),
                sampled_ids: choice.token_ids.clone(),
                logprobs: choice.logprobs.clone(),
                versions: choice.versions.clone(),
                prompt_version: choice.prompt_version,
                experts: choice.experts.clone(),
                temperature: sampling.temperature,
                stop: choice.stop,
                text: choice.text.clone(),
            }
        };
        // Further prompts of one request belong to no conversation.
        let responses = choices.iter().filter(|choice| choice.prompt == 0).map(response).collect();
        call.record(&request, &prompt, responses, Instant::now());
    }
}

/// A number that depends on all of `parts`.
pub(super) fn mixed<const N: usize>(parts: [u64; N]) -> u64 {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&part.to_le_bytes());
    }
    let mut bytes = [0; 8];
    hasher.finalize_xof().fill(&mut bytes);
    u64::from_le_bytes(bytes)
}

/// A conversation, rendered as the endpoint renders it for everyone, or as what follows a completion.
#[derive(Debug)]
struct RenderedConversation<'a> {
    conversation: Conversation,
    renderer: &'a ChatRenderer,
    encoder: ChatEncoder,
}

impl PromptRenderer for RenderedConversation<'_> {
    type Error = ApiError;

    fn whole(&self) -> Result<Vec<u32>, ApiError> {
        let directory = self.renderer.directory();
        match directory.template() {
            Some(_) => self.renderer.encode(self.conversation.clone()),
            None => plain(&self.conversation, directory),
        }
    }

    fn following(&self, last_token: u32, messages: &[Message]) -> Result<Vec<u32>, ApiError> {
        let following = self.encoder.following(&conversation_task(), last_token, messages);
        following.map_err(|error| ApiError::invalid("messages", error.to_string()))
    }
}

/// `[P]` a conversation for a model without a chat template: texts as they are, each with a line end unless it ends in white
/// space; answers end with the token that ends a completion. This is how episodes of such models are encoded everywhere.
fn plain(conversation: &Conversation, directory: &ModelDirectory) -> Result<Vec<u32>, ApiError> {
    let mut tokens = Vec::new();
    for message in &conversation.messages {
        let answered = message.role == "assistant";
        let line_end = if answered || message.content.ends_with(char::is_whitespace) { "" } else { "\n" };
        let text = format!("{}{line_end}", message.content);
        let encoded = directory.tokenizer().encode(&text, SpecialTokens::Omit);
        tokens.extend(encoded.map_err(|error| ApiError::invalid("messages", error.to_string()))?);
        tokens.extend(directory.stop_token_ids().first().filter(|_| answered));
    }
    Ok(tokens)
}

/// A task whose prompt is a conversation, for an encoder that asks.
fn conversation_task() -> Task {
    Task { id: TaskId(0), prompt: Prompt::Messages(Vec::new()), answer: None, columns: Map::new() }
}
