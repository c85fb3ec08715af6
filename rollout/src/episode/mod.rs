//! Episodes: the turns of the policy in an environment, as one token stream.
//!
//! # Layout
//! - `driver`: [`EpisodeDriver`], which plays episodes with a sampler
//! - `streams`: the token streams of an episode in play, one for every role
//! - `scripted`: episodes of a scripted player, for demonstrations and for `rlrun check`
//! - `config`: [`EpisodeConfig`], which environment a task is played in
//! - `bridge`: [`MessageEncoder`], the tokens of messages that follow a completion
//! - `played`: [`ExternalPlayer`], for episodes whose loop is elsewhere
//!
//! # Invariants
//! - Token ids that were sampled are never tokenised again: a later turn continues exactly the ids before it.
//! - Tokens that the policy did not sample have no loss and no behavior log-probability.
//! - Turns and tokens of an episode are bounded, and so is every wait for its environment.

mod bridge;
mod config;
mod driver;
mod played;
mod scripted;
mod streams;

use std::collections::BTreeMap;

use environments::EnvironmentError;
use trajectory::{
    Branch, GroupId, KeptTokens, PolicyVersion, Sample, SampleError, SampleStreams, StopReason, Turn,
    VersionRun,
};

pub use bridge::{ChatEncoder, MessageEncoder};
pub use config::{ENVIRONMENT_COLUMN, EpisodeConfig, EpisodeEnvironment, named_by};
pub use driver::EpisodeDriver;
pub use played::{EpisodePlace, ExternalPlayer, PlayedEpisode};
pub use scripted::{ScriptedEpisode, play_script};

use crate::sampler::{Completion, SampleRequest};

/// One episode, or what one role of it said and read: prompt, completions, messages of the environment, and rewards of the
/// turns.
#[derive(Clone, Debug, PartialEq)]
pub struct Episode {
    /// The group that it belongs to.
    pub group: GroupId,
    /// Which of the group's trajectories it is: those of the first role come first.
    pub index: u32,
    /// The role that the policy played; `None` in an environment without roles.
    pub role: Option<String>,
    /// Whether it was decoded greedily as a baseline.
    pub baseline: bool,
    /// Number of tokens before the first turn.
    pub prompt_length: usize,
    /// Prompt, completions and the messages between them, with loss mask, behavior log-probabilities and versions.
    streams: SampleStreams,
    /// The turns of the policy, in order; empty if the environment failed before the first.
    pub turns: Vec<Turn>,
    /// Further token streams of an episode that was played elsewhere.
    pub branches: Vec<Branch>,
    /// The last completion as text, without stop token and stop string; empty before the first.
    pub text: String,
    /// Everything after the prompt as text, for people: completions, and messages with their roles.
    pub transcript: String,
    /// What happened in its environment, by name: calls of tools, and bad ones among them.
    pub counts: BTreeMap<&'static str, u64>,
    /// Why it ended.
    pub end: EpisodeEnd,
}

/// Why an episode ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EpisodeEnd {
    /// The environment is done.
    Done,
    /// It reached the most turns that the environment allows.
    MaxTurns,
    /// A completion reached its length limit.
    Truncated,
    /// What follows the last turn does not fit the context.
    ContextFull,
    /// The environment failed. The episode is not trained on.
    Failed(EpisodeFailure),
}

/// How an environment failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EpisodeFailure {
    /// Which of the few ways.
    pub kind: FailureKind,
    /// What happened.
    pub reason: String,
}

/// The ways in which an environment fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// A turn took too long.
    TurnTimeout,
    /// The episode took too long.
    EpisodeTimeout,
    /// No environment became free.
    NoneFree,
    /// Anything else.
    Error,
}

impl FailureKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::TurnTimeout, Self::EpisodeTimeout, Self::NoneFree, Self::Error];

    /// Its name in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::TurnTimeout => "turn_timeout",
            Self::EpisodeTimeout => "episode_timeout",
            Self::NoneFree => "none_free",
            Self::Error => "error",
        }
    }
}

impl From<EnvironmentError> for EpisodeEnd {
    fn from(error: EnvironmentError) -> Self {
        let kind = match error {
            EnvironmentError::TimedOut { .. } => FailureKind::TurnTimeout,
            EnvironmentError::EpisodeTooLong { .. } => FailureKind::EpisodeTimeout,
            EnvironmentError::NoneFree { .. } => FailureKind::NoneFree,
            _ => FailureKind::Error,
        };
        Self::Failed(EpisodeFailure { kind, reason: error.to_string() })
    }
}

impl EpisodeEnd {
    /// The names of the ends that are no failure.
    pub const NAMES: [&str; 4] = ["done", "max_turns", "max_tokens", "context_full"];

    /// Its name in metrics.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::MaxTurns => "max_turns",
            Self::Truncated => "max_tokens",
            Self::ContextFull => "context_full",
            Self::Failed(_) => "failed",
        }
    }
}

impl From<Completion> for Episode {
    /// The episode whose only turn so far is `completion`.
    fn from(completion: Completion) -> Self {
        let mut episode = Self {
            group: completion.group,
            index: completion.index,
            role: None,
            baseline: completion.baseline,
            prompt_length: completion.prompt_length,
            streams: SampleStreams {
                temperature: if completion.baseline { 1.0 } else { completion.sampling.temperature },
                ..SampleStreams::default()
            },
            turns: Vec::with_capacity(1),
            branches: Vec::new(),
            text: String::new(),
            transcript: String::new(),
            counts: BTreeMap::new(),
            end: EpisodeEnd::Done,
        };
        episode.push(completion);
        episode
    }
}

impl Episode {
    /// An episode that ended before its first turn.
    fn without_turn(
        request: &SampleRequest,
        index: u32,
        prompt: Vec<u32>,
        served: PolicyVersion,
        end: EpisodeEnd,
    ) -> Self {
        // Of an environment that begins the conversation, and has not; a sample has a token.
        let prompt = if prompt.is_empty() { vec![0] } else { prompt };
        let tokens = prompt.len();
        Self {
            group: request.group,
            index,
            role: None,
            baseline: request.baseline && index as usize % request.sequences() >= request.samples,
            prompt_length: tokens,
            streams: SampleStreams {
                token_ids: prompt,
                loss_mask: vec![false; tokens],
                behavior_logprobs: vec![0.0; tokens],
                versions: vec![VersionRun { version: served, len: tokens as u32 }],
                kept: None,
                experts: None,
                temperature: 1.0,
            },
            turns: Vec::new(),
            branches: Vec::new(),
            text: String::new(),
            transcript: String::new(),
            counts: BTreeMap::new(),
            end,
        }
    }

    /// Takes the last turn out of what is trained on.
    fn mask_last_turn(&mut self) {
        let Some(Turn { completion, .. }) = self.turns.last() else { return };
        let streams = &mut self.streams;
        let trained = &mut streams.loss_mask[completion.clone()];
        let masked = trained.iter().filter(|trained| **trained).count();
        trained.fill(false);
        streams.behavior_logprobs[completion.clone()].fill(0.0);
        if let Some(kept) = &mut streams.kept {
            kept.offsets.truncate(kept.offsets.len() - masked);
            kept.ids.truncate(kept.offsets.last().map_or(0, |end| *end as usize));
        }
    }

    /// Appends a turn. Its prompt is all tokens of the episode, with the messages of the environment.
    ///
    /// Tokens that the policy did not sample carry the version that began to prefill them, which may be older than every
    /// sampled token: the sampled tokens depend on their KV cache.
    fn push(&mut self, completion: Completion) {
        let before = self.streams.token_ids.len();
        debug_assert!(
            completion.token_ids.starts_with(&self.streams.token_ids),
            "sampled ids stay as they are"
        );
        let (start, end) = (completion.prompt_length, completion.token_ids.len());
        let inserted = completion.inserted.unwrap_or_default();
        let streams = &mut self.streams;
        streams.loss_mask.resize(start, false);
        streams.loss_mask.extend((0..end - start).map(|n| !self.baseline && !inserted.contains(&n)));
        streams.behavior_logprobs.resize(start, 0.0);
        streams.behavior_logprobs.extend(&completion.logprobs);
        let prefilled = VersionRun { version: completion.prompt_version, len: (start - before) as u32 };
        for run in std::iter::once(prefilled).chain(completion.versions).filter(|run| run.len > 0) {
            match streams.versions.last_mut() {
                Some(last) if last.version == run.version => last.len += run.len,
                _ => streams.versions.push(run),
            }
        }
        if let Some(sets) = completion.kept {
            match &mut streams.kept {
                Some(kept) => append(kept, &sets),
                none => *none = Some(sets),
            }
        }
        streams.experts = match (streams.experts.take(), completion.experts) {
            (None, experts) if self.turns.is_empty() => experts,
            (Some(mut known), Some(experts)) => {
                known.extend(&experts);
                Some(known)
            }
            _ => None,
        };
        streams.token_ids = completion.token_ids;
        let prefill =
            if is_usual(&completion.prefill, before, start) { Vec::new() } else { completion.prefill };
        self.turns.push(Turn { completion: start..end, stop: completion.stop, reward: None, prefill });
        self.transcript += &completion.text;
        self.text = completion.text;
    }

    /// `[tokens]` prompt, completions and the messages between them.
    #[must_use]
    pub fn token_ids(&self) -> &[u32] {
        &self.streams.token_ids
    }

    /// The version that sampled the last token.
    #[must_use]
    pub fn version(&self) -> PolicyVersion {
        self.streams.versions.last().map_or_else(PolicyVersion::default, |run| run.version)
    }

    /// Tokens that the policy generated.
    #[must_use]
    pub fn completion_tokens(&self) -> usize {
        self.all_turns().map(|turn| turn.completion.len()).sum()
    }

    /// The turns of all its branches.
    pub fn all_turns(&self) -> impl Iterator<Item = &Turn> {
        self.turns.iter().chain(self.branches.iter().flat_map(|branch| &branch.turns))
    }

    /// Whether a limit on tokens cut it off.
    #[must_use]
    pub fn truncated(&self) -> bool {
        let cut = self.turns.last().is_some_and(|turn| turn.stop == StopReason::Length);
        cut || self.end == EpisodeEnd::ContextFull
    }

    /// The token streams that are trained on. No token of a baseline is; its temperature is set to 1.
    ///
    /// # Errors
    /// A greedy episode that is no baseline: a greedy choice has no log-probability to learn from.
    pub fn sample(&self) -> Result<Sample, SampleError> {
        Sample::new(self.streams.clone())
    }
}

/// Whether one version prefilled the prompt `[start]` of a turn, but for what a turn before it left in the KV cache: all of
/// its tokens, of which there are `before` with those before it, but the last.
fn is_usual(prefill: &[VersionRun], before: usize, start: usize) -> bool {
    // A later turn shows the version with the tokens that follow the turn before it.
    let usual = start - before.saturating_sub(1);
    prefill.len() <= 1 && start > before && prefill.iter().all(|run| run.len as usize == usual)
}

/// Appends the kept sets of a turn to those of the turns before it.
fn append(kept: &mut KeptTokens, turn: &KeptTokens) {
    let base = kept.ids.len() as u32;
    kept.offsets.extend(turn.offsets.iter().skip(1).map(|offset| base + offset));
    kept.ids.extend(&turn.ids);
}
