//! The token streams of an episode in play: one for every role.
//!
//! Invariant: a stream grows by completions of its role and by messages to it alone, so its prefix is computed once,
//! whatever other roles say.

use std::collections::BTreeMap;

use environments::{EnvironmentError, EnvironmentLimits, Observation};
use trajectory::{Message, PolicyVersion, StopReason, Task};

use super::{Episode, EpisodeEnd, EpisodeEnvironment};
use crate::RolloutError;
use crate::sampler::{Completion, SampleRequest};

/// One episode in play.
#[derive(Debug)]
pub(super) struct EpisodeStreams {
    environment: EpisodeEnvironment,
    limits: EnvironmentLimits,
    /// What every turn asks of the sampler, without prompt.
    pub(super) request: SampleRequest,
    /// Which of the group's episodes it is.
    index: u32,
    /// `[roles]` `None` before the role's first completion.
    roles: Vec<Option<Episode>>,
    /// The role that acts.
    acting: usize,
    /// Turns of all roles.
    turns: usize,
    /// What a reward of the next turn is multiplied by.
    factor: f64,
    counts: BTreeMap<&'static str, u64>,
}

/// The first prompt `[P]` of an episode of `task`, whose own prompt is `prompt`, after its environment opened it with
/// `messages`.
///
/// # Errors
/// Messages that cannot be encoded; an episode that begins with nothing.
pub(super) fn opening(
    environment: &EpisodeEnvironment,
    task: &Task,
    prompt: &[u32],
    messages: &[Message],
) -> Result<Vec<u32>, RolloutError> {
    let tokens = match messages {
        [] => prompt.to_vec(),
        messages => environment.encoder()?.opening(task, messages)?,
    };
    if tokens.is_empty() {
        let environment = environment.factory.name().to_owned();
        return Err(RolloutError::NoOpening { task: task.id, environment });
    }
    Ok(tokens)
}

/// A turn that has ended, as its environment sees it.
pub(super) struct EndedTurn {
    pub(super) turn: usize,
    pub(super) role: usize,
    pub(super) text: String,
    pub(super) stop: StopReason,
    /// Whether no turn follows.
    pub(super) last: bool,
}

/// What follows an observation.
pub(super) enum AfterTurn {
    End(EpisodeEnd),
    /// The next turn, of the role that acts now.
    Request(SampleRequest),
}

impl EpisodeStreams {
    /// Episode `index` of the group of `request`.
    pub(super) fn new(environment: EpisodeEnvironment, request: SampleRequest, index: u32) -> Self {
        let roles = vec![None; environment.roles()];
        Self {
            limits: environment.factory.limits(),
            environment,
            request,
            index,
            roles,
            acting: 0,
            turns: 0,
            factor: 1.0,
            counts: BTreeMap::new(),
        }
    }

    /// The same with at most `max_turns` turns.
    pub(super) fn within(mut self, max_turns: usize) -> Self {
        self.limits.max_turns = self.limits.max_turns.min(max_turns.max(1));
        self
    }

    pub(super) fn environment(&self) -> &EpisodeEnvironment {
        &self.environment
    }

    pub(super) fn limits(&self) -> EnvironmentLimits {
        self.limits
    }

    /// The turn that is under way, from 0.
    pub(super) fn turn(&self) -> usize {
        self.turns.saturating_sub(1)
    }

    /// Which of the group's sequences a role is.
    fn sequence(&self, role: usize) -> u32 {
        (role * self.request.sequences()) as u32 + self.index
    }

    /// Which of the group's sequences the acting role is.
    pub(super) fn acting_sequence(&self) -> u32 {
        self.sequence(self.acting)
    }

    /// The longest completion that follows `prompt [P]`, tokens; 0 if none fits.
    pub(super) fn longest_completion(&self, prompt: &[u32], max_tokens: usize) -> usize {
        self.request.max_completion_length.min(max_tokens.saturating_sub(prompt.len()))
    }

    /// The request of a turn of the acting role.
    pub(super) fn next_request(&self, prompt: Vec<u32>, max_completion_length: usize) -> SampleRequest {
        let baseline = self.index as usize >= self.request.samples;
        let turns = self.roles[self.acting].as_ref().map_or(0, |episode| episode.turns.len());
        SampleRequest {
            prompt,
            first_index: self.sequence(self.acting),
            turn: turns as u32,
            samples: usize::from(!baseline),
            max_completion_length,
            baseline,
            ..self.request.clone()
        }
    }

    /// A completion of the acting role.
    pub(super) fn completed(&mut self, completion: Completion) -> EndedTurn {
        let place = &mut self.roles[self.acting];
        let episode = match place.take() {
            None => {
                let role = self.environment.factory.roles().get(self.acting).cloned();
                Episode { role, ..Episode::from(completion) }
            }
            Some(mut episode) => {
                episode.push(completion);
                episode
            }
        };
        let episode = place.insert(episode);
        let stop = episode.turns.last().map_or(StopReason::StopToken, |turn| turn.stop);
        self.turns += 1;
        let (text, last) = (episode.text.clone(), self.turns >= self.limits.max_turns);
        EndedTurn { turn: self.turns - 1, role: self.acting, text, stop, last }
    }

    /// Takes what the environment says of the last turn, and asks for the next one.
    ///
    /// # Errors
    /// A role that there is not, a reward that is no finite number; messages that cannot be encoded.
    pub(super) fn observed(
        &mut self,
        task: &Task,
        observation: Observation,
        max_tokens: usize,
    ) -> Result<Result<AfterTurn, EnvironmentError>, RolloutError> {
        if let Err(error) = self.checked(&observation) {
            return Ok(Err(error));
        }
        let Observation { next_role, messages, reward, other_rewards, done, masked, counts } = observation;
        if let Some(episode) = &mut self.roles[self.acting] {
            if let Some(turn) = episode.turns.last_mut() {
                turn.reward = reward.map(|reward| reward * self.factor);
            }
            if masked {
                episode.mask_last_turn();
            }
        }
        for (role, reward) in other_rewards {
            if let Some(turn) = self.roles[role].as_mut().and_then(|episode| episode.turns.last_mut()) {
                turn.reward = Some(turn.reward.unwrap_or(0.0) + reward * self.factor);
            }
        }
        for (event, count) in counts {
            *self.counts.entry(event).or_default() += count;
        }
        self.factor *= self.environment.discount;
        if done || self.turns >= self.limits.max_turns {
            let end = if done { EpisodeEnd::Done } else { EpisodeEnd::MaxTurns };
            return Ok(Ok(AfterTurn::End(end)));
        }
        self.acting = next_role;
        self.asked(task, &messages, max_tokens).map(Ok)
    }

    fn checked(&self, observation: &Observation) -> Result<(), EnvironmentError> {
        let (environment, turn, roles) = (self.environment.factory.name(), self.turn(), self.roles.len());
        let of_others = observation.other_rewards.iter();
        let named = of_others.clone().map(|(role, _)| *role).chain([observation.next_role]);
        if let Some(role) = { named }.find(|role| *role >= roles) {
            return Err(EnvironmentError::Role { environment: environment.to_owned(), turn, role, roles });
        }
        let mut rewards = of_others.map(|(_, reward)| *reward).chain(observation.reward);
        match rewards.find(|reward| !reward.is_finite()) {
            Some(reward) => {
                Err(EnvironmentError::Reward { environment: environment.to_owned(), turn, reward })
            }
            None => Ok(()),
        }
    }

    /// The next turn of the acting role, which reads `messages` first.
    fn asked(
        &mut self,
        task: &Task,
        messages: &[Message],
        max_tokens: usize,
    ) -> Result<AfterTurn, RolloutError> {
        let encoder = self.environment.encoder()?;
        let prompt = match &mut self.roles[self.acting] {
            None => encoder.opening(task, messages)?,
            Some(episode) => {
                let last = episode.token_ids().last().copied().unwrap_or_default();
                let following = encoder.following(task, last, messages)?;
                for Message { role, content, .. } in messages {
                    episode.transcript += &format!("\n[{role}] {content}\n");
                }
                [episode.token_ids(), &following].concat()
            }
        };
        Ok(match self.longest_completion(&prompt, max_tokens) {
            0 => AfterTurn::End(EpisodeEnd::ContextFull),
            longest => AfterTurn::Request(self.next_request(prompt, longest)),
        })
    }

    /// The trajectories of the episode, one for every role. `prompt` stands for the prompt of a role that had no turn, which
    /// `served` would have sampled.
    pub(super) fn finish(mut self, end: &EpisodeEnd, prompt: &[u32], served: PolicyVersion) -> Vec<Episode> {
        if self.limits.max_turns > 1 && self.turns > 0 {
            self.counts.insert("turns", self.turns as u64);
            for event in self.environment.factory.counts() {
                self.counts.entry(event).or_default();
            }
        }
        let started = self.roles.iter().flatten().next();
        let prompt = started.map_or(prompt, |episode| &episode.token_ids()[..episode.prompt_length]).to_vec();
        (0..self.roles.len())
            .map(|role| match self.roles[role].take() {
                Some(episode) => Episode { end: end.clone(), counts: self.counts.clone(), ..episode },
                None => Episode {
                    role: self.environment.factory.roles().get(role).cloned(),
                    counts: self.counts.clone(),
                    ..Episode::without_turn(
                        &self.request,
                        self.sequence(role),
                        prompt.clone(),
                        served,
                        end.clone(),
                    )
                },
            })
            .collect()
    }
}
