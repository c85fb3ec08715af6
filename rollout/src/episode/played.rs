//! Episodes whose loop is elsewhere: an agent calls the policy as it likes, and says when it is done.
//!
//! The driver gives such an episode a place in a group and a handle of its sampler's request queue. A player plays it with
//! them, and returns the rows that were sampled.
//!
//! Invariant: a player whose future is dropped leaves nothing behind: the run has stopped.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use environments::{AgentSource, BoxFuture, EnvironmentLimits};
use tokio::runtime::Handle;
use tokio::task::{JoinError, JoinSet};
use trajectory::{Branch, GroupId, PolicyVersion, Task};

use super::{Episode, EpisodeEnd, EpisodeFailure, FailureKind};
use crate::RolloutError;
use crate::requests::RequestHandle;
use crate::sampler::SampleRequest;

/// Plays whole episodes.
pub trait ExternalPlayer: Send + Sync + fmt::Debug {
    /// Plays an episode. It bounds its own time. A failure is an end of the episode.
    fn play(&self, place: EpisodePlace) -> BoxFuture<'static, PlayedEpisode>;
}

/// The place of an episode in its group, and how the policy is sampled in it.
#[derive(Clone, Debug)]
pub struct EpisodePlace {
    /// What it is about.
    pub task: Arc<Task>,
    /// Its group.
    pub group: GroupId,
    /// Which of the group's episodes it is.
    pub index: u32,
    /// Sampling and limits of every completion; without prompt.
    pub request: SampleRequest,
    /// Where completions are requested.
    pub requests: RequestHandle,
    /// Most tokens of a branch, prompt and completions.
    pub max_tokens: usize,
    /// Who plays it.
    pub agents: AgentSource,
    /// What bounds it.
    pub limits: EnvironmentLimits,
}

/// An episode that was played elsewhere.
#[derive(Clone, Debug)]
pub struct PlayedEpisode {
    /// Its rows, in order; none if the policy was asked nothing.
    pub branches: Vec<Branch>,
    /// Number of tokens of the first row before its first completion.
    pub prompt_length: usize,
    /// The last completion as text.
    pub text: String,
    /// All completions, and what was said between them, for people.
    pub transcript: String,
    /// What happened, by name.
    pub counts: BTreeMap<&'static str, u64>,
    /// Why it ended.
    pub end: EpisodeEnd,
}

impl PlayedEpisode {
    /// An episode that failed for `reason`: it is not trained on.
    #[must_use]
    pub fn failed(reason: impl Into<String>) -> Self {
        Self {
            branches: Vec::new(),
            prompt_length: 0,
            text: String::new(),
            transcript: String::new(),
            counts: BTreeMap::new(),
            end: EpisodeEnd::Failed(EpisodeFailure { kind: FailureKind::Error, reason: reason.into() }),
        }
    }
}

/// Longest wait for an episode, before requests of its agent are looked for.
const AGENT_LOOK_UP: Duration = Duration::from_micros(500);

/// The episodes that are being played.
#[derive(Debug, Default)]
pub(super) struct ExternalEpisodes {
    playing: JoinSet<(EpisodePlace, PlayedEpisode)>,
}

impl ExternalEpisodes {
    pub(super) fn is_empty(&self) -> bool {
        self.playing.is_empty()
    }

    /// Lets `player` play at `place`.
    pub(super) fn start(&mut self, player: &dyn ExternalPlayer, place: EpisodePlace, runtime: &Handle) {
        let playing = player.play(place.clone());
        self.playing.spawn_on(async move { (place, playing.await) }, runtime);
    }

    /// Those that have ended, after up to `wait` for the first, and never longer than requests of agents may wait. `served` is the
    /// version of the sampler.
    ///
    /// # Errors
    /// A player that panicked.
    pub(super) fn ended(
        &mut self,
        wait: Duration,
        runtime: &Handle,
        served: PolicyVersion,
    ) -> Result<Vec<Episode>, RolloutError> {
        let mut joined = Vec::new();
        if !wait.is_zero() {
            let playing = &mut self.playing;
            let next = async { tokio::time::timeout(wait.min(AGENT_LOOK_UP), playing.join_next()).await };
            joined.extend(runtime.block_on(next).ok().flatten());
        }
        joined.extend(std::iter::from_fn(|| self.playing.try_join_next()));
        let episode = |joined: Result<(EpisodePlace, PlayedEpisode), JoinError>| {
            let (place, played) =
                joined.map_err(|_| RolloutError::Ended { who: "the episode of an agent" })?;
            Ok(Episode::played(&place.request, place.index, played, served))
        };
        joined.into_iter().map(episode).collect()
    }
}

impl Episode {
    /// The episode of `played` at the place of `request` and `index`; `served` stands for the version of an episode without a
    /// completion.
    fn played(request: &SampleRequest, index: u32, played: PlayedEpisode, served: PolicyVersion) -> Self {
        let PlayedEpisode { branches, prompt_length, text, transcript, counts, end } = played;
        let mut branches = branches.into_iter();
        let Some(Branch { sample, turns }) = branches.next() else {
            let end = match end {
                EpisodeEnd::Failed(failure) => EpisodeEnd::Failed(failure),
                _ => EpisodeEnd::Failed(EpisodeFailure {
                    kind: FailureKind::Error,
                    reason: "it has no completion of the policy that can be trained on".to_owned(),
                }),
            };
            // A sample has a token, and this one is not trained on: an agent that asked nothing has no prompt.
            let prompt = if request.prompt.is_empty() { vec![0] } else { request.prompt.clone() };
            return Self { text, transcript, ..Self::without_turn(request, index, prompt, served, end) };
        };
        Self {
            group: request.group,
            index,
            role: None,
            baseline: false,
            prompt_length,
            streams: sample.into(),
            turns,
            branches: branches.collect(),
            text,
            transcript,
            counts,
            end,
        }
    }
}
