//! One session: its messages, its interactions, and what it is worth.
//!
//! Invariant: an interaction is recorded once, when its answer is complete; a call that was cancelled leaves nothing.

use std::sync::Arc;

use rollout::{RequestHandle, SampleRequest};
use serde_json::Value;
use tokio::time::Instant;
use trajectory::{PolicyVersion, SampleError, StopReason, TokenExperts, VersionRun};

use super::tokens::next_prompt;
use super::{
    DriftCounts, Interaction, InteractionRole, MessageTree, NextPrompt, NodeId, PromptRenderer, SessionError,
    SessionLimits, SessionMessage, SessionRow, roles, rows,
};

/// What a session is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionPurpose {
    /// Its interactions are trained on: their sampling is that of the run.
    #[default]
    Train,
    /// They are not: their sampling is what the agent asks for.
    Eval,
}

/// How the policy is sampled in the session of an episode, whatever its agent asks for.
#[derive(Clone, Debug)]
pub struct SessionSampler {
    /// Where completions are requested.
    pub requests: RequestHandle,
    /// Sampling and longest completion, without prompt.
    pub request: SampleRequest,
    /// Most tokens of prompt and completion.
    pub max_tokens: usize,
    /// Seed of its completions, which depend on it and on their number in the session: not on when they are requested.
    pub seed: u64,
}

/// A conversation that the policy is asked to continue.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionRequest {
    /// The tools that are offered; null without tools.
    pub tools: Value,
    /// The conversation.
    pub messages: Vec<SessionMessage>,
    /// The sampling parameters that the agent asked for, for the record.
    pub requested: Value,
}

/// What was sampled for a request. `C` tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionResponse {
    /// The id of the completion that the agent gets.
    pub id: String,
    /// The answer as the agent gets it.
    pub message: SessionMessage,
    /// `[C]` what was sampled, its stop token included.
    pub sampled_ids: Vec<u32>,
    /// `[C]` behavior log-probabilities, nats.
    pub logprobs: Vec<f32>,
    /// Runs of policy versions over the sampled tokens.
    pub versions: Vec<VersionRun>,
    /// The version that began to prefill the prompt.
    pub prompt_version: PolicyVersion,
    /// The experts of the tokens of prompt and completion, if the sampler records them.
    pub experts: Option<TokenExperts>,
    /// The temperature that was sampled at.
    pub temperature: f32,
    /// Why it ended.
    pub stop: StopReason,
    /// The completion as text, without its stop token.
    pub text: String,
}

/// A session.
#[derive(Debug)]
pub struct AgentSession {
    /// Its id, which is not secret.
    pub id: String,
    /// What it is about, in the words of who started it.
    pub task_id: Option<String>,
    /// What who started it wants to find in its export.
    pub metadata: Value,
    /// What it is for.
    pub purpose: SessionPurpose,
    /// Most interactions.
    pub max_calls: usize,
    /// Of the session of an episode: how the policy is sampled.
    pub sampler: Option<Arc<SessionSampler>>,
    pub(super) ended: bool,
    pub(super) last_used: Instant,
    pub(super) under_way: usize,
    limits: SessionLimits,
    tree: MessageTree,
    interactions: Vec<Interaction>,
    /// `[interactions]` the sampling parameters that were asked for.
    requested: Vec<Value>,
    drift: DriftCounts,
    bytes: usize,
}

impl AgentSession {
    pub(super) fn new(id: String, limits: SessionLimits, now: Instant) -> Self {
        Self {
            id,
            task_id: None,
            metadata: Value::Null,
            purpose: SessionPurpose::Train,
            max_calls: limits.max_calls,
            sampler: None,
            ended: false,
            last_used: now,
            under_way: 0,
            limits,
            tree: MessageTree::default(),
            interactions: Vec::new(),
            requested: Vec::new(),
            drift: DriftCounts::default(),
            bytes: 0,
        }
    }

    /// The prompt of the next interaction.
    ///
    /// # Errors
    /// Those of `renderer`.
    pub fn next_prompt<R: PromptRenderer>(
        &self,
        request: &SessionRequest,
        renderer: &R,
    ) -> Result<NextPrompt, R::Error> {
        next_prompt(&self.tree, &self.interactions, &request.tools, &request.messages, renderer)
    }

    /// Whether one more interaction with `messages` messages fits the limits.
    pub(super) fn fits(&self, messages: usize) -> Result<(), SessionError> {
        let over = |what, limit| SessionError::Limit { session: self.id.clone(), what, limit };
        match () {
            () if self.interactions.len() >= self.max_calls => {
                Err(over("interactions, the most that it may have", self.max_calls))
            }
            () if self.tree.len() + 1 >= self.limits.max_messages || messages >= self.limits.max_messages => {
                Err(over("messages in its tree, the most that it may have", self.limits.max_messages))
            }
            () if self.bytes >= self.limits.max_bytes => {
                Err(over("bytes of messages and tokens, the most that it may have", self.limits.max_bytes))
            }
            () => Ok(()),
        }
    }

    /// Records the answers to a request whose prompt was `prompt`: one, or several of which the agent takes one.
    pub(super) fn record(
        &mut self,
        request: &SessionRequest,
        prompt: &NextPrompt,
        responses: Vec<SessionResponse>,
    ) {
        let SessionRequest { tools, messages, requested } = request;
        self.drift.count(prompt.continuation);
        let located = self.tree.locate(tools, messages);
        let asked = self.tree.extend(tools, located, messages);
        for response in responses {
            self.answer(tools, asked, prompt, response);
            self.requested.push(requested.clone());
        }
        self.bytes = self.tree.bytes() + self.interactions.iter().map(Interaction::bytes).sum::<usize>();
    }

    fn answer(
        &mut self,
        tools: &Value,
        asked: Option<NodeId>,
        prompt: &NextPrompt,
        response: SessionResponse,
    ) {
        let node = self.tree.respond(tools, asked, response.message, self.interactions.len());
        self.interactions.push(Interaction {
            id: response.id,
            prompt_ids: prompt.token_ids.clone(),
            sampled_ids: response.sampled_ids,
            logprobs: response.logprobs,
            versions: response.versions,
            prompt_version: response.prompt_version,
            experts: response.experts,
            temperature: response.temperature,
            stop: response.stop,
            text: response.text,
            continuation: prompt.continuation,
            asked,
            response: node,
            has_tools: tools.as_array().is_some_and(|tools| !tools.is_empty()),
            reward: None,
        });
    }

    /// Sets the reward of an interaction; of the last one without an id.
    ///
    /// # Errors
    /// A reward that is not finite, an interaction that there is not.
    pub fn set_reward(&mut self, interaction: Option<&str>, reward: f64) -> Result<(), SessionError> {
        if !reward.is_finite() {
            return Err(SessionError::Reward { value: reward });
        }
        let interactions = self.interactions.len();
        let place = match interaction {
            None => self.interactions.last_mut(),
            Some(id) => self.interactions.iter_mut().find(|interaction| interaction.id == id),
        };
        let Some(place) = place else {
            let interaction = interaction.unwrap_or("at all").to_owned();
            return Err(SessionError::NoInteraction { session: self.id.clone(), interaction, interactions });
        };
        place.reward = Some(reward);
        Ok(())
    }

    /// The interactions, in the order of their answers.
    #[must_use]
    pub fn interactions(&self) -> &[Interaction] {
        &self.interactions
    }

    /// `[interactions]` the sampling parameters that the agent asked for.
    #[must_use]
    pub fn requested(&self) -> &[Value] {
        &self.requested
    }

    /// `[interactions]` what each interaction is for training.
    #[must_use]
    pub fn roles(&self) -> Vec<InteractionRole> {
        roles(&self.tree, &self.interactions)
    }

    /// The rows that are trained on.
    ///
    /// # Errors
    /// Log-probabilities that no sampler gives.
    pub fn rows(&self) -> Result<Vec<SessionRow>, SampleError> {
        rows(&self.interactions, &self.roles())
    }

    /// What was said after the first prompt, for people: the conversation of the last interaction of the agent.
    #[must_use]
    pub fn transcript(&self) -> String {
        let roles = self.roles();
        let mut agents =
            self.interactions.iter().zip(&roles).filter(|(_, role)| **role == InteractionRole::Agent);
        let Some((last, _)) = agents.next_back() else { return String::new() };
        let mut text = String::new();
        let path = self.tree.path(last.response);
        for message in path.iter().skip_while(|message| message.role() != "assistant") {
            match message.role() {
                "assistant" => text += message.text(),
                role => text += &format!("\n[{role}] {}\n", message.text()),
            }
        }
        text
    }

    /// How its prompts relate to those before them.
    #[must_use]
    pub fn drift(&self) -> DriftCounts {
        self.drift
    }

    /// Whether it has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Approximate bytes in memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// When it was last used.
    #[must_use]
    pub fn last_used(&self) -> Instant {
        self.last_used
    }
}
