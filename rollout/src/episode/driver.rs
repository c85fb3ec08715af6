//! Runs episodes: requests of the sampler and calls of environments, concurrently.
//!
//! Requests fill the batch of the sampler in the order in which they are ready: an environment that answers late delays its
//! own episode and no other. The rollout worker admits new groups only after next turns are submitted. An episode over its time
//! ends whatever it waits for: its environment, or the sampler.
//!
//! Invariant: every episode that was started ends once, in the result of [`EpisodeDriver::poll`] or by an abort. With
//! [`SingleTurn`](environments::SingleTurn) every call is answered at once, and the sampler gets the requests that it would get without a driver.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use environments::{Action, AgentSource, Environment, EnvironmentError, Observation};
use tokio::runtime::Handle;
use tokio::task::{AbortHandle, JoinError, JoinSet};
use trajectory::{GroupId, Message, PolicyVersion, StopReason, Task};

use super::config::EpisodeEnvironment;
use super::played::ExternalEpisodes;
use super::streams::{AfterTurn, EndedTurn, EpisodeStreams, opening};
use super::{Episode, EpisodeConfig, EpisodeEnd, EpisodePlace};
use crate::RolloutError;
use crate::sampler::{Completion, SampleRequest, Sampler};

/// Pause between two looks for episodes that are over their time.
const LOOK_UP: Duration = Duration::from_millis(50);

/// Plays the episodes of a rollout worker or an evaluation.
#[derive(Debug)]
pub struct EpisodeDriver {
    config: EpisodeConfig,
    runtime: Handle,
    /// First prompts `[P]` of episodes that opened since requests were made last.
    opened: BTreeMap<EpisodeKey, Vec<u32>>,
    open: HashMap<EpisodeKey, OpenEpisode>,
    /// The groups of the open episodes.
    groups: HashMap<GroupId, GroupInPlay>,
    /// Requests that the sampler has had no capacity for.
    ready: VecDeque<SampleRequest>,
    /// Waits for a free environment that are over.
    granted: Arc<AtomicU64>,
    /// Calls of environments that were not answered at once.
    calls: JoinSet<AnsweredCall>,
    /// Episodes whose loop is elsewhere.
    played: ExternalEpisodes,
    /// Episodes that ended outside of a poll of the sampler.
    ended: Vec<Episode>,
    /// Sequences, by group and index, that the sampler works at although their episodes are over.
    left: HashSet<(GroupId, u32)>,
    /// When episodes over their time are looked for again.
    next_look: Instant,
}

/// Group and index of an episode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct EpisodeKey {
    group: GroupId,
    index: u32,
}

/// A group of which an episode is open.
#[derive(Debug)]
struct GroupInPlay {
    /// `[P]` the prompt of the task.
    prompt: Vec<u32>,
    /// Episodes of the group.
    sequences: u32,
    /// Those that are open.
    open: u32,
}

/// An episode that has not ended.
#[derive(Debug)]
struct OpenEpisode {
    task: Arc<Task>,
    streams: EpisodeStreams,
    /// `None` while a call of it is under way.
    environment: Option<Box<dyn Environment>>,
    /// The call that is under way beside the driver.
    call: Option<AbortHandle>,
    /// When its environment was asked to open it; `None` before it has answered.
    started: Option<Instant>,
}

impl OpenEpisode {
    fn is_overdue(&self, now: Instant) -> bool {
        let limit = self.streams.limits().episode_timeout;
        self.started.is_some_and(|started| now.saturating_duration_since(started) > limit)
    }
}

/// A call of an environment that returned.
struct AnsweredCall {
    key: EpisodeKey,
    environment: Box<dyn Environment>,
    answer: EnvironmentAnswer,
}

enum EnvironmentAnswer {
    /// Of an environment that was asked at this moment.
    Reset(Result<Vec<Message>, EnvironmentError>, Instant),
    Step(Result<Observation, EnvironmentError>),
}

impl EpisodeDriver {
    /// A driver with `config`. Environments wait on `runtime`.
    #[must_use]
    pub fn new(config: EpisodeConfig, runtime: Handle) -> Self {
        Self {
            config,
            runtime,
            opened: BTreeMap::new(),
            open: HashMap::new(),
            groups: HashMap::new(),
            ready: VecDeque::new(),
            granted: Arc::default(),
            calls: JoinSet::new(),
            played: ExternalEpisodes::default(),
            ended: Vec::new(),
            left: HashSet::new(),
            next_look: Instant::now(),
        }
    }

    /// Whether no episode is open, and the sampler works for none that was.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let none_open = self.open.is_empty() && self.played.is_empty();
        none_open && self.ended.is_empty() && self.left.is_empty()
    }

    /// Starts the episodes of a group: one for every sequence of `request`, whose prompt is that of `task`. Returns how many
    /// [`Episode`]s will end: one for every role of each.
    ///
    /// # Errors
    /// A request that the sampler can never serve; messages that cannot be encoded; a task of an unknown environment.
    pub fn start(
        &mut self,
        sampler: &mut dyn Sampler,
        task: &Arc<Task>,
        request: SampleRequest,
    ) -> Result<usize, RolloutError> {
        self.start_within(sampler, task, request, usize::MAX)
    }

    /// The same with episodes of at most `max_turns` turns, if their environment allows more.
    ///
    /// # Errors
    /// Those of [`EpisodeDriver::start`].
    pub fn start_within(
        &mut self,
        sampler: &mut dyn Sampler,
        task: &Arc<Task>,
        request: SampleRequest,
        max_turns: usize,
    ) -> Result<usize, RolloutError> {
        let played_in = self.config.of_task(task)?.clone();
        if let Some(agents) = played_in.factory.agents() {
            return self.start_played(sampler, task, &request, &played_in, &agents);
        }
        let request = SampleRequest { keep_cache: played_in.factory.limits().max_turns > 1, ..request };
        let (group, sequences) = (request.group, request.sequences());
        let template = SampleRequest { prompt: Vec::new(), options: request.options.clone(), ..request };
        let (prompt, open) = (request.prompt, sequences as u32);
        self.groups.insert(group, GroupInPlay { prompt, sequences: open, open });
        for index in 0..sequences as u32 {
            let key = EpisodeKey { group, index };
            let mut environment = played_in.factory.create();
            let open = OpenEpisode {
                task: Arc::clone(task),
                streams: EpisodeStreams::new(played_in.clone(), template.clone(), index).within(max_turns),
                environment: None,
                call: None,
                started: None,
            };
            self.open.insert(key, open);
            let task = Arc::clone(task);
            let (played_in, wait, granted) = (played_in.clone(), self.config.wait, Arc::clone(&self.granted));
            let call = async move {
                let acquired = played_in.acquired(&mut *environment, &task, wait, &granted).await;
                let started = Instant::now();
                let opened = match acquired {
                    Ok(()) => played_in.in_time(0, environment.reset(&task)).await,
                    Err(error) => Err(error),
                };
                AnsweredCall { key, environment, answer: EnvironmentAnswer::Reset(opened, started) }
            };
            if let Some(answered) = self.call(key, call) {
                self.take(sampler, answered)?;
            }
        }
        self.request_opened(sampler)?;
        Ok(sequences * played_in.roles())
    }

    /// Starts the episodes of a group whose loop is elsewhere.
    fn start_played(
        &mut self,
        sampler: &dyn Sampler,
        task: &Arc<Task>,
        request: &SampleRequest,
        played_in: &EpisodeEnvironment,
        agents: &AgentSource,
    ) -> Result<usize, RolloutError> {
        let (Some(player), Some(requests)) = (&played_in.player, sampler.requests()) else {
            return Err(RolloutError::NoEndpoint { environment: played_in.factory.name().to_owned() });
        };
        if request.baseline {
            return Err(RolloutError::NoGreedyAgent { environment: played_in.factory.name().to_owned() });
        }
        let sequences = request.sequences();
        for index in 0..sequences as u32 {
            let place = EpisodePlace {
                task: Arc::clone(task),
                group: request.group,
                index,
                request: request.clone(),
                requests: requests.clone(),
                max_tokens: self.config.max_tokens,
                agents: agents.clone(),
                limits: played_in.factory.limits(),
            };
            self.played.start(&**player, place, &self.runtime);
        }
        Ok(sequences)
    }

    /// Advances everything: takes the answers of environments, submits next turns, and polls the sampler. Returns the
    /// episodes that ended. Waits up to `wait` if nothing can be advanced at once.
    ///
    /// # Errors
    /// Those of the sampler; messages that cannot be encoded.
    pub fn poll(&mut self, sampler: &mut dyn Sampler, wait: Duration) -> Result<Vec<Episode>, RolloutError> {
        self.end_overdue(sampler.version());
        if sampler.is_idle() && self.ready.is_empty() && self.ended.is_empty() && !self.calls.is_empty() {
            let wait = wait.min(LOOK_UP);
            let calls = &mut self.calls;
            let next = async { tokio::time::timeout(wait, calls.join_next()).await };
            if let Ok(Some(joined)) = self.runtime.block_on(next) {
                self.joined(sampler, joined)?;
            }
        }
        while let Some(joined) = self.calls.try_join_next() {
            self.joined(sampler, joined)?;
        }
        if !self.played.is_empty() {
            let none_ready = self.ready.is_empty() && self.ended.is_empty() && self.calls.is_empty();
            let wait = if sampler.is_idle() && none_ready { wait } else { Duration::ZERO };
            self.ended.extend(self.played.ended(wait, &self.runtime, sampler.version())?);
        }
        self.request_opened(sampler)?;
        if !sampler.is_idle() {
            for completion in sampler.poll(wait.min(LOOK_UP))? {
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
        call: impl Future<Output = AnsweredCall> + Send + 'static,
    ) -> Option<AnsweredCall> {
        let mut call: Pin<Box<dyn Future<Output = AnsweredCall> + Send>> = Box::pin(call);
        let inside = self.runtime.enter();
        if let Poll::Ready(answered) = call.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return Some(answered);
        }
        drop(inside);
        let under_way = self.calls.spawn_on(call, &self.runtime);
        if let Some(open) = self.open.get_mut(&key) {
            open.call = Some(under_way);
        }
        None
    }

    fn joined(
        &mut self,
        sampler: &mut dyn Sampler,
        joined: Result<AnsweredCall, JoinError>,
    ) -> Result<(), RolloutError> {
        // Of an episode that ended before.
        if joined.as_ref().is_err_and(JoinError::is_cancelled) {
            return Ok(());
        }
        let answered = joined.map_err(|_| RolloutError::Ended { who: "a call of an environment" })?;
        self.take(sampler, answered)
    }

    /// Takes the answer of an environment.
    fn take(&mut self, sampler: &mut dyn Sampler, answered: AnsweredCall) -> Result<(), RolloutError> {
        let AnsweredCall { key, environment, answer } = answered;
        // Of a group that was aborted.
        let Some(open) = self.open.get_mut(&key) else { return Ok(()) };
        (open.environment, open.call) = (Some(environment), None);
        match answer {
            EnvironmentAnswer::Reset(opened, started) => {
                open.started = Some(started);
                self.opened(sampler, key, opened)
            }
            EnvironmentAnswer::Step(stepped) => self.stepped(sampler, key, stepped),
        }
    }

    /// An environment has opened its episode, or failed to.
    fn opened(
        &mut self,
        sampler: &mut dyn Sampler,
        key: EpisodeKey,
        opened: Result<Vec<Message>, EnvironmentError>,
    ) -> Result<(), RolloutError> {
        let (Some(open), Some(group)) = (self.open.get(&key), self.groups.get(&key.group)) else {
            return Ok(());
        };
        match opened {
            Ok(messages) => {
                let prompt = opening(open.streams.environment(), &open.task, &group.prompt, &messages)?;
                self.opened.insert(key, prompt);
            }
            Err(error) => {
                let prompt = group.prompt.clone();
                self.end(key, &error.into(), &prompt, sampler.version());
            }
        }
        Ok(())
    }

    /// Requests the first turns of the episodes that have opened since it was done last. Neighbours in a group with the same
    /// prompt share a request, which is prefilled once. No episode waits for others of its group: an open environment may hold
    /// what they need to open.
    fn request_opened(&mut self, sampler: &mut dyn Sampler) -> Result<(), RolloutError> {
        // The newest request, and the episode that may join it.
        let mut last: Option<(SampleRequest, EpisodeKey)> = None;
        for (key, prompt) in std::mem::take(&mut self.opened) {
            let Some(open) = self.open.get(&key) else { continue };
            let longest = open.streams.longest_completion(&prompt, self.config.max_tokens);
            if longest == 0 {
                self.end(key, &EpisodeEnd::ContextFull, &prompt, sampler.version());
                continue;
            }
            let next = EpisodeKey { index: key.index + 1, ..key };
            match &mut last {
                Some((request, end)) if *end == key && request.prompt == prompt => {
                    let one = open.streams.next_request(Vec::new(), longest);
                    request.samples += one.samples;
                    request.baseline |= one.baseline;
                    *end = next;
                }
                _ => {
                    let request = open.streams.next_request(prompt, longest);
                    self.ready.extend(last.replace((request, next)).map(|(request, _)| request));
                }
            }
        }
        self.ready.extend(last.map(|(request, _)| request));
        self.submit_ready(sampler)
    }

    /// A completion of the sampler ends a turn, and the environment is asked what follows.
    fn completed(&mut self, sampler: &mut dyn Sampler, completion: Completion) -> Result<(), RolloutError> {
        let group = completion.group;
        if self.left.remove(&(group, completion.index)) {
            sampler.end_episode(group, completion.index);
            return Ok(());
        }
        let Some(in_play) = self.groups.get(&group) else { return Ok(()) };
        // The sequences of a role come after those of the roles before it.
        let key = EpisodeKey { group, index: completion.index % in_play.sequences };
        let Some(open) = self.open.get_mut(&key) else { return Ok(()) };
        let EndedTurn { turn, role, text, stop, last } = open.streams.completed(completion);
        if stop == StopReason::Length {
            self.end(key, &EpisodeEnd::Truncated, &[], sampler.version());
            return Ok(());
        }
        let Some(mut environment) = open.environment.take() else { return Ok(()) };
        let played_in = open.streams.environment().clone();
        let call = async move {
            let action = Action { turn, role, text: &text, stop, last };
            let stepped = played_in.in_time(turn, environment.step(action)).await;
            AnsweredCall { key, environment, answer: EnvironmentAnswer::Step(stepped) }
        };
        match self.call(key, call) {
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
        let Some(OpenEpisode { task, streams, .. }) = self.open.get_mut(&key) else { return Ok(()) };
        let after = match stepped {
            Ok(observation) => streams.observed(task, observation, self.config.max_tokens)?,
            Err(error) => Err(error),
        };
        match after {
            Ok(AfterTurn::Request(request)) => {
                self.ready.push_back(request);
                return self.submit_ready(sampler);
            }
            Ok(AfterTurn::End(end)) => self.end(key, &end, &[], sampler.version()),
            Err(error) => self.end(key, &error.into(), &[], sampler.version()),
        }
        Ok(())
    }

    /// Ends the episodes that are over their time. `served` is the version of the sampler.
    fn end_overdue(&mut self, served: PolicyVersion) {
        let now = Instant::now();
        if now < self.next_look {
            return;
        }
        self.next_look = now + LOOK_UP;
        let overdue: Vec<EpisodeKey> =
            self.open.iter().filter(|(_, open)| open.is_overdue(now)).map(|(key, _)| *key).collect();
        for key in overdue {
            self.leave(key);
            let (Some(open), Some(group)) = (self.open.get(&key), self.groups.get(&key.group)) else {
                continue;
            };
            let error = EnvironmentError::EpisodeTooLong {
                environment: open.streams.environment().factory.name().to_owned(),
                turn: open.streams.turn(),
                seconds: open.streams.limits().episode_timeout.as_secs_f64(),
            };
            let prompt = group.prompt.clone();
            self.end(key, &error.into(), &prompt, served);
        }
    }

    /// Gives up what an episode waits for. What the sampler works at comes back, and is passed over then.
    fn leave(&mut self, key: EpisodeKey) {
        let Some(open) = self.open.get(&key) else { return };
        if let Some(call) = &open.call {
            call.abort();
            return;
        }
        let sequence = open.streams.acting_sequence();
        let asks = |request: &SampleRequest| {
            (request.group, request.first_index, request.sequences()) == (key.group, sequence, 1)
        };
        if let Some(at) = self.ready.iter().position(asks) {
            self.ready.remove(at);
        } else if self.opened.remove(&key).is_none() {
            self.left.insert((key.group, sequence));
        }
    }

    /// Ends an episode. `prompt` is that of an episode without a turn, which `served` would have sampled.
    fn end(&mut self, key: EpisodeKey, end: &EpisodeEnd, prompt: &[u32], served: PolicyVersion) {
        let Some(open) = self.open.remove(&key) else { return };
        self.ended.extend(open.streams.finish(end, prompt, served));
        if let Some(group) = self.groups.get_mut(&key.group) {
            group.open -= 1;
            if group.open == 0 {
                self.groups.remove(&key.group);
            }
        }
    }
}
