//! One call of the policy in a session: the prompt, what was sampled, and what it is for training.

use trajectory::{PolicyVersion, StopReason, TokenExperts, VersionRun};

use super::{Continuation, MessageTree, NodeId};

/// One call of the policy. `P` prompt tokens, `C` sampled tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Interaction {
    /// Its id, which the agent knows as the id of the completion.
    pub id: String,
    /// `[P]` the prompt.
    pub prompt_ids: Vec<u32>,
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
    /// The temperature that was sampled at; 0 for a greedy completion, which only an evaluation has.
    pub temperature: f32,
    /// Why it ended.
    pub stop: StopReason,
    /// The completion as text, without its stop token.
    pub text: String,
    /// What its prompt continues.
    pub continuation: Continuation,
    /// The last message of its conversation; `None` if its prompt was no conversation.
    pub asked: Option<NodeId>,
    /// Its response among the messages.
    pub response: NodeId,
    /// Whether the call offered tools.
    pub has_tools: bool,
    /// What it is worth by itself, if a reward was posted for it.
    pub reward: Option<f64>,
}

impl Interaction {
    /// `[P + C]` prompt and response.
    #[must_use]
    pub fn token_ids(&self) -> Vec<u32> {
        [&self.prompt_ids[..], &self.sampled_ids].concat()
    }

    /// Whether `prompt [P]` begins with all its tokens, and has more.
    pub(super) fn begins(&self, prompt: &[u32]) -> bool {
        let (asked, sampled) = (self.prompt_ids.len(), self.sampled_ids.len());
        prompt.len() > asked + sampled
            && prompt[..asked] == self.prompt_ids
            && prompt[asked..asked + sampled] == self.sampled_ids
    }

    /// Approximate bytes in memory.
    pub(super) fn bytes(&self) -> usize {
        let numbers = self.prompt_ids.len() + self.sampled_ids.len() + self.logprobs.len();
        let experts = self.experts.as_ref().map_or(0, |experts| experts.ids.len());
        size_of::<Self>()
            + 4 * numbers
            + 2 * experts
            + 16 * self.versions.len()
            + self.text.len()
            + self.id.len()
    }
}

/// What an interaction is for training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum InteractionRole {
    /// A turn of the agent.
    Agent,
    /// A call beside the agent's own conversation: without tools, in a session whose agent has tools. Title makers and
    /// summaries are such calls.
    Auxiliary,
    /// An answer that the agent did not continue: it asked the same again, or took another choice.
    Discarded,
}

/// The roles `[interactions]` of the interactions of a session.
///
/// Of several answers to the same conversation those that nothing follows are discarded; if nothing follows any of them, all
/// but the newest.
#[must_use]
pub fn roles(tree: &MessageTree, interactions: &[Interaction]) -> Vec<InteractionRole> {
    let tools = interactions.iter().any(|interaction| interaction.has_tools);
    let continued: Vec<bool> = (0..interactions.len())
        .map(|n| {
            let follows = |later: &Interaction| later.continuation.interaction() == Some(n);
            !tree.is_leaf(interactions[n].response) || interactions.iter().any(follows)
        })
        .collect();
    let role = |(n, interaction): (usize, &Interaction)| {
        let same = |other: &Interaction| match (other.asked, interaction.asked) {
            (None, None) => other.prompt_ids == interaction.prompt_ids,
            (other, this) => other == this,
        };
        let siblings: Vec<usize> = (0..interactions.len()).filter(|m| same(&interactions[*m])).collect();
        let newest = siblings.last() == Some(&n);
        let chosen = if siblings.iter().any(|m| continued[*m]) { continued[n] } else { newest };
        match () {
            () if !chosen => InteractionRole::Discarded,
            () if tools && !interaction.has_tools => InteractionRole::Auxiliary,
            () => InteractionRole::Agent,
        }
    };
    interactions.iter().enumerate().map(role).collect()
}
