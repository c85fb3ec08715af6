//! Runs episodes: requests of the sampler and calls of environments, concurrently.
//!
//! Requests fill the batch of the sampler in the order in which they are ready: an environment that answers late delays its
//! own episode and no other. The rollout worker admits new groups only after next turns are submitted.
//!
//! Invariant: every episode that was started ends once, in the result of [`EpisodeDriver::poll`] or by an abort. With
//! [`SingleTurn`] every call is answered at once, and the sampler gets the requests that it would get without a driver.

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use environments::{
    Action, Environment, EnvironmentError, EnvironmentFactory, EnvironmentLimits, Observation, SingleTurn,
};
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use trajectory::{GroupId, Message, PolicyVersion, StopReason, Task};

use super::{Episode, EpisodeEnd, MessageEncoder};
use crate::RolloutError;
use crate::sampler::{Completion, SampleRequest, Sampler};

/// What episodes are played in.
#[derive(Clone, Debug)]
pub struct EpisodeConfig {
    /// Makes the environments.
    pub environments: Arc<dyn EnvironmentFactory>,
    /// Tokens of their messages; `None` for environments that add none.
    pub encoder: Option<Arc<dyn MessageEncoder>>,
    /// Most tokens of an episode, at most the context of the model.
    pub max_tokens: usize,
}

impl EpisodeConfig {
    /// One completion per task.
    #[must_use]
    pub fn single_turn() -> Self {
        Self { environments: Arc::new(SingleTurn), encoder: None, max_tokens: usize::MAX }
    }

    fn encoder(&self) -> Result<&dyn MessageEncoder, RolloutError> {
        let environment = || self.environments.name().to_owned();
        self.encoder.as_deref().ok_or_else(|| RolloutError::NoEncoder { environment: environment() })
    }
}

/// Plays the episodes of a rollout worker or an evaluation.
#[derive(Debug)]
pub struct EpisodeDriver {
    config: EpisodeConfig,
    limits: EnvironmentLimits,
    runtime: Handle,
    /// Groups whose environments have not all opened.
    opening: HashMap<GroupId, OpeningGroup>,
    open: HashMap<EpisodeKey, OpenEpisode>,
    /// Requests that the sampler has had no capacity for.
    ready: VecDeque<SampleRequest>,
    /// Calls of environments that were not answered at once.
    calls: JoinSet<AnsweredCall>,
    /// Episodes that ended outside of a poll of the sampler.
    ended: Vec<Episode>,
}

/// Group and index of an episode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct EpisodeKey {
    group: GroupId,
    index: u32,
}

/// A group whose environments open its episodes.
#[derive(Debug)]
struct OpeningGroup {
    request: SampleRequest,
    task: Arc<Task>,
    /// First prompt of every episode; `None` until its environment has opened, or if that failed.
    prompts: Vec<Option<Vec<u32>>>,
    /// Environments that have not answered.
    left: usize,
}

/// An episode that has not ended.
#[derive(Debug)]
struct OpenEpisode {
    task: Arc<Task>,
    /// What its turns ask of the sampler, without prompt.
    request: SampleRequest,
    /// `None` while a call of it is under way.
    environment: Option<Box<dyn Environment>>,
    /// `None` before its first completion.
    episode: Option<Episode>,
    /// When its environment was asked to open it.
    started: Instant,
}

/// A call of an environment that returned.
struct AnsweredCall {
    key: EpisodeKey,
    /// `None` if the call ran over its time.
    environment: Option<Box<dyn Environment>>,
    answer: EnvironmentAnswer,
}

enum EnvironmentAnswer {
    Reset(Result<Vec<Message>, EnvironmentError>),
    Step(Result<Observation, EnvironmentError>),
}

impl EpisodeDriver {
    /// A driver with `config`. Environments wait on `runtime`.
    #[must_use]
    pub fn new(config: EpisodeConfig, runtime: Handle) -> Self {
        Self {
            limits: config.environments.limits(),
            config,
            runtime,
            opening: HashMap::new(),
            open: HashMap::new(),
            ready: VecDeque::new(),
            calls: JoinSet::new(),
            ended: Vec::new(),
        }
    }

    /// Whether no episode is open.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.open.is_empty() && self.ended.is_empty()
    }

    /// Starts the episodes of a group: one for every sequence of `request`, whose prompt is that of `task`.
    ///
    /// # Errors
    /// A request that the sampler can never serve; messages that cannot be encoded.
    pub fn start(
        &mut self,
        sampler: &mut dyn Sampler,
        task: &Arc<Task>,
        request: SampleRequest,
    ) -> Result<(), RolloutError> {
        let request = SampleRequest { keep_cache: self.limits.max_turns > 1, ..request };
        let (group, sequences) = (request.group, request.sequences());
        let template = SampleRequest { prompt: Vec::new(), ..request };
        let opening =
            OpeningGroup { task: Arc::clone(task), prompts: vec![None; sequences], left: sequences, request };
        self.opening.insert(group, opening);
        for index in 0..sequences as u32 {
            let key = EpisodeKey { group, index };
            let mut environment = self.config.environments.create();
            let open = OpenEpisode {
                task: Arc::clone(task),
                request: template.clone(),
                environment: None,
                episode: None,
                started: Instant::now(),
            };
            self.open.insert(key, open);
            let task = Arc::clone(task);
            let call = async move {
                let answer = EnvironmentAnswer::Reset(environment.reset(&task).await);
                AnsweredCall { key, environment: Some(environment), answer }
            };
            if let Some(answered) = self.call(key, 0, call) {
                self.take(sampler, answered)?;
            }
        }
        Ok(())
    }

    /// Advances everything: takes the answers of environments, submits next turns, and polls the sampler. Returns the
    /// episodes that ended. Waits up to `wait` if nothing can be advanced at once.
    ///
    /// # Errors
    /// Those of the sampler; messages that cannot be encoded.
    pub fn poll(&mut self, sampler: &mut dyn Sampler, wait: Duration) -> Result<Vec<Episode>, RolloutError> {
        if sampler.is_idle() && self.ready.is_empty() && self.ended.is_empty() && !self.calls.is_empty() {
            let calls = &mut self.calls;
            let next = async { tokio::time::timeout(wait, calls.join_next()).await };
            if let Ok(Some(joined)) = self.runtime.block_on(next) {
                self.joined(sampler, joined)?;
            }
        }
        while let Some(joined) = self.calls.try_join_next() {
            self.joined(sampler, joined)?;
        }
        self.submit_ready(sampler)?;
        if !sampler.is_idle() {
            for completion in sampler.poll(wait)? {
                self.completed(sampler, completion)?;
            }
            self.submit_ready(sampler)?;
        }
        for episode in &self.ended {
            sampler.end_episode(episode.group, episode.index);
        }
        Ok(std::mem::take(&mut self.ended))
    }

    /// Submits requests in order of arrival as far as the sampler has capacity.
    fn submit_ready(&mut self, sampler: &mut dyn Sampler) -> Result<(), RolloutError> {
        while let Some(next) = self.ready.front() {
            if !sampler.has_capacity_for(next) {
                break;
            }
            let Some(request) = self.ready.pop_front() else { break };
            sampler.submit(request)?;
        }
        Ok(())
    }

    /// Begins a call of an environment; the answer if it was there at once.
    fn call(
        &mut self,
        key: EpisodeKey,
        turn: usize,
        call: impl Future<Output = AnsweredCall> + Send + 'static,
    ) -> Option<AnsweredCall> {
        let mut call: Pin<Box<dyn Future<Output = AnsweredCall> + Send>> = Box::pin(call);
        let inside = self.runtime.enter();
        if let Poll::Ready(answered) = call.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return Some(answered);
        }
        drop(inside);
        let (limit, environment) = (self.limits.step_timeout, self.config.environments.name().to_owned());
        let late = move |opening: bool| {
            let seconds = limit.as_secs_f64();
            let error = EnvironmentError::TimedOut { environment, turn, seconds };
            let answer = if opening {
                EnvironmentAnswer::Reset(Err(error))
            } else {
                EnvironmentAnswer::Step(Err(error))
            };
            AnsweredCall { key, environment: None, answer }
        };
        let opening = self.opening.contains_key(&key.group);
        let bounded =
            async move { tokio::time::timeout(limit, call).await.unwrap_or_else(|_| late(opening)) };
        self.calls.spawn_on(bounded, &self.runtime);
        None
    }

    fn joined(
        &mut self,
        sampler: &mut dyn Sampler,
        joined: Result<AnsweredCall, tokio::task::JoinError>,
    ) -> Result<(), RolloutError> {
        let answered = joined.map_err(|_| RolloutError::Ended { who: "a call of an environment" })?;
        self.take(sampler, answered)
    }

    /// Takes the answer of an environment.
    fn take(&mut self, sampler: &mut dyn Sampler, answered: AnsweredCall) -> Result<(), RolloutError> {
        let AnsweredCall { key, environment, answer } = answered;
        // Of a group that was aborted.
        let Some(open) = self.open.get_mut(&key) else { return Ok(()) };
        open.environment = environment;
        match answer {
            EnvironmentAnswer::Reset(opened) => self.opened(sampler, key, opened),
            EnvironmentAnswer::Step(stepped) => self.stepped(sampler, key, stepped),
        }
    }

    /// An environment has opened its episode. The last one of the group submits its requests: one for all episodes where
    /// the prompt is the same, which is then prefilled once.
    fn opened(
        &mut self,
        sampler: &mut dyn Sampler,
        key: EpisodeKey,
        opened: Result<Vec<Message>, EnvironmentError>,
    ) -> Result<(), RolloutError> {
        let Some(group) = self.opening.get_mut(&key.group) else { return Ok(()) };
        group.left -= 1;
        match opened {
            Ok(messages) => {
                let prompt = match &messages[..] {
                    [] => group.request.prompt.clone(),
                    messages => self.config.encoder()?.opening(&group.task, messages)?,
                };
                group.prompts[key.index as usize] = Some(prompt);
            }
            Err(error) => {
                let prompt = group.request.prompt.clone();
                self.fail(key, prompt, sampler.version(), &error);
            }
        }
        let Some(group) = self.opening.get(&key.group).filter(|group| group.left == 0) else { return Ok(()) };
        let first = group.prompts.first().cloned().flatten();
        let shared = first.filter(|first| group.prompts.iter().all(|prompt| prompt.as_ref() == Some(first)));
        let Some(OpeningGroup { request, prompts, .. }) = self.opening.remove(&key.group) else {
            return Ok(());
        };
        let (most, max_tokens) = (request.max_completion_length, self.config.max_tokens);
        let longest = |prompt: &[u32]| most.min(max_tokens.saturating_sub(prompt.len()));
        if let Some(prompt) = shared.filter(|prompt| longest(prompt) > 0) {
            let max_completion_length = longest(&prompt);
            self.ready.push_back(SampleRequest { prompt, max_completion_length, ..request });
            return self.submit_ready(sampler);
        }
        for (index, prompt) in prompts.into_iter().enumerate() {
            let Some(prompt) = prompt else { continue };
            let key = EpisodeKey { group: key.group, index: index as u32 };
            match longest(&prompt) {
                0 => self.end_without_turn(key, prompt, sampler.version(), EpisodeEnd::ContextFull),
                longest => self.ready.push_back(alone(&request, key.index, 0, prompt, longest)),
            }
        }
        self.submit_ready(sampler)
    }

    /// A completion of the sampler ends a turn, and the environment is asked what follows.
    fn completed(&mut self, sampler: &mut dyn Sampler, completion: Completion) -> Result<(), RolloutError> {
        let key = EpisodeKey { group: completion.group, index: completion.index };
        let Some(open) = self.open.get_mut(&key) else { return Ok(()) };
        let episode = match open.episode.take() {
            None => Episode::from(completion),
            Some(mut episode) => {
                episode.push(completion);
                episode
            }
        };
        let turn = episode.turns.len() - 1;
        let (text, stop) = (episode.text.clone(), episode.turns[turn].stop);
        open.episode = Some(episode);
        if stop == StopReason::Length {
            self.end(key, EpisodeEnd::Truncated);
            return Ok(());
        }
        let Some(mut environment) = open.environment.take() else { return Ok(()) };
        let call = async move {
            let answer = EnvironmentAnswer::Step(environment.step(Action { turn, text: &text, stop }).await);
            AnsweredCall { key, environment: Some(environment), answer }
        };
        match self.call(key, turn, call) {
            Some(answered) => self.take(sampler, answered),
            None => Ok(()),
        }
    }

    /// An environment has answered a turn.
    fn stepped(
        &mut self,
        sampler: &mut dyn Sampler,
        key: EpisodeKey,
        stepped: Result<Observation, EnvironmentError>,
    ) -> Result<(), RolloutError> {
        let Some(open) = self.open.get_mut(&key) else { return Ok(()) };
        let OpenEpisode { task, request, episode: Some(episode), started, .. } = open else { return Ok(()) };
        let turn = episode.turns.len() - 1;
        let environment = || self.config.environments.name().to_owned();
        let checked = stepped.and_then(|observation| match observation.reward {
            Some(reward) if !reward.is_finite() => {
                Err(EnvironmentError::Reward { environment: environment(), turn, reward })
            }
            _ => Ok(observation),
        });
        let seconds = self.limits.episode_timeout.as_secs_f64();
        let checked = checked.and_then(|observation| match started.elapsed() > self.limits.episode_timeout {
            true => Err(EnvironmentError::EpisodeTooLong { environment: environment(), turn, seconds }),
            false => Ok(observation),
        });
        let observation = match checked {
            Ok(observation) => observation,
            Err(error) => {
                self.end(key, EpisodeEnd::Failed(error.to_string()));
                return Ok(());
            }
        };
        episode.turns[turn].reward = observation.reward;
        for (event, count) in observation.counts {
            *episode.counts.entry(event).or_default() += count;
        }
        if observation.masked {
            episode.mask_last_turn();
        }
        if observation.done || turn + 1 >= self.limits.max_turns {
            let end = if observation.done { EpisodeEnd::Done } else { EpisodeEnd::MaxTurns };
            self.end(key, end);
            return Ok(());
        }
        let last = episode.token_ids().last().copied().unwrap_or_default();
        let following = self.config.encoder()?.following(task, last, &observation.messages)?;
        let length = episode.token_ids().len() + following.len();
        let longest = request.max_completion_length.min(self.config.max_tokens.saturating_sub(length));
        if longest == 0 {
            self.end(key, EpisodeEnd::ContextFull);
            return Ok(());
        }
        for Message { role, content, .. } in &observation.messages {
            episode.transcript += &format!("\n[{role}] {content}\n");
        }
        let prompt = [episode.token_ids(), &following].concat();
        self.ready.push_back(alone(request, key.index, turn as u32 + 1, prompt, longest));
        self.submit_ready(sampler)
    }

    /// Ends an episode.
    fn end(&mut self, key: EpisodeKey, end: EpisodeEnd) {
        let Some(OpenEpisode { episode: Some(mut episode), .. }) = self.open.remove(&key) else { return };
        if self.limits.max_turns > 1 {
            episode.counts.insert("turns", episode.turns.len() as u64);
            for event in self.config.environments.counts() {
                episode.counts.entry(event).or_default();
            }
        }
        self.ended.push(Episode { end, ..episode });
    }

    /// Ends an episode that its environment did not open.
    fn fail(&mut self, key: EpisodeKey, prompt: Vec<u32>, served: PolicyVersion, error: &EnvironmentError) {
        self.end_without_turn(key, prompt, served, EpisodeEnd::Failed(error.to_string()));
    }

    fn end_without_turn(
        &mut self,
        key: EpisodeKey,
        prompt: Vec<u32>,
        served: PolicyVersion,
        end: EpisodeEnd,
    ) {
        let Some(OpenEpisode { request, .. }) = self.open.remove(&key) else { return };
        self.ended.push(Episode::without_turn(&request, key.index, prompt, served, end));
    }
}

/// The request for one turn of one episode of the group of `request`.
fn alone(
    request: &SampleRequest,
    index: u32,
    turn: u32,
    prompt: Vec<u32>,
    max_completion_length: usize,
) -> SampleRequest {
    let baseline = index as usize >= request.samples;
    SampleRequest {
        group: request.group,
        prompt,
        first_index: index,
        turn,
        samples: usize::from(!baseline),
        sampling: request.sampling,
        max_completion_length,
        baseline,
        keep_cache: request.keep_cache,
    }
}
