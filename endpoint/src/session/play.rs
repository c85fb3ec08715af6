//! Episodes of a run whose agents bring their own loop: a session for each, and what is trained on of it.
//!
//! Invariant: the session of an episode is gone when the episode has ended, however it ended. An agent that fails or is lost
//! costs its episode, which is then not trained on and never scored 0.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use environments::{AgentCall, AgentRunner, AgentSource, BoxFuture, EnvironmentLimits};
use rollout::{EpisodeEnd, EpisodePlace, ExternalPlayer, PlayedEpisode};
use tokio::time::Instant;
use trajectory::{Branch, StopReason};

use super::turns::mixed;
use super::{
    AgentSession, InteractionRole, SessionPurpose, SessionSampler, SessionStart, SessionStore,
    WaitingEpisodes, credit,
};

/// Where agents find the endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointAddress {
    /// Up to and with `/v1`.
    pub base_url: String,
    /// Name of the model.
    pub model: String,
}

/// Plays the episodes of agents with sessions of an endpoint.
#[derive(Clone, Debug)]
pub struct SessionPlayer {
    store: SessionStore,
    waiting: WaitingEpisodes,
    address: EndpointAddress,
    /// Seed of the run.
    seed: u64,
}

/// Gives its session up if it is dropped, which the end of a run does.
struct OpenSession {
    store: SessionStore,
    id: String,
}

impl Drop for OpenSession {
    fn drop(&mut self) {
        // A session that was taken is no longer there.
        self.store.give_up(&self.id);
    }
}

impl SessionPlayer {
    /// Plays with the sessions of `store`, which an endpoint serves at `address`.
    #[must_use]
    pub fn new(store: SessionStore, waiting: WaitingEpisodes, address: EndpointAddress, seed: u64) -> Self {
        Self { store, waiting, address, seed }
    }

    async fn play_episode(self, place: EpisodePlace) -> PlayedEpisode {
        let limits = place.limits;
        match place.agents.clone() {
            AgentSource::Started(runner) => self.run(place, limits, runner).await,
            AgentSource::Awaited => self.await_agent(place, limits).await,
        }
    }

    /// Starts the agent of an episode, and waits until it is done.
    async fn run(
        self,
        place: EpisodePlace,
        limits: EnvironmentLimits,
        runner: Arc<dyn AgentRunner>,
    ) -> PlayedEpisode {
        let start = session_start(&place, limits, self.seed);
        let started = match self.store.start(start, Instant::now()) {
            Ok(started) => started,
            Err(error) => return PlayedEpisode::failed(format!("its agent got no session: {error}")),
        };
        let session = OpenSession { store: self.store.clone(), id: started.session_id.clone() };
        let call = AgentCall {
            base_url: &self.address.base_url,
            api_key: &started.api_key,
            model: &self.address.model,
            task: &place.task,
            index: place.index,
            temperature: place.request.sampling.temperature,
            max_completion_length: place.request.max_completion_length,
        };
        let reward = match runner.run(call).await {
            Ok(reward) => reward,
            Err(error) => return PlayedEpisode::failed(error.to_string()),
        };
        let Ok(mut taken) = self.store.take(&session.id) else {
            return PlayedEpisode::failed("the session of its agent expired");
        };
        if let Some(reward) = reward
            && let Err(error) = taken.set_reward(None, reward)
        {
            return PlayedEpisode::failed(format!("its agent was given a reward: {error}"));
        }
        played(&taken)
    }

    /// Waits for an agent, then until its session ends.
    async fn await_agent(self, place: EpisodePlace, limits: EnvironmentLimits) -> PlayedEpisode {
        let start = session_start(&place, limits, self.seed);
        let Ok(id) = self.waiting.offer(place, start).await else {
            return PlayedEpisode::failed("no agent can take it any more");
        };
        let session = OpenSession { store: self.store.clone(), id };
        if tokio::time::timeout(limits.episode_timeout, self.store.over(&session.id)).await.is_err() {
            let seconds = limits.episode_timeout.as_secs_f64();
            return PlayedEpisode::failed(format!("its agent did not end the session within {seconds:.0} s"));
        }
        match self.store.take(&session.id) {
            Ok(taken) => played(&taken),
            Err(_) => PlayedEpisode::failed("its agent was lost: the session expired without an end"),
        }
    }
}

impl ExternalPlayer for SessionPlayer {
    fn play(&self, place: EpisodePlace) -> BoxFuture<'static, PlayedEpisode> {
        Box::pin(self.clone().play_episode(place))
    }
}

/// What the session of an episode is started with.
fn session_start(place: &EpisodePlace, limits: EnvironmentLimits, seed: u64) -> SessionStart {
    let sampler = SessionSampler {
        requests: place.requests.clone(),
        request: place.request.clone(),
        max_tokens: place.max_tokens,
        seed: mixed([seed, place.group.0, u64::from(place.index)]),
    };
    SessionStart {
        task_id: Some(place.task.id.0.to_string()),
        purpose: SessionPurpose::Train,
        max_calls: Some(limits.max_turns),
        sampler: Some(Arc::new(sampler)),
        ..SessionStart::default()
    }
}

/// The episode of a session that has ended.
fn played(session: &AgentSession) -> PlayedEpisode {
    let rows = match session.rows() {
        Ok(rows) => rows,
        Err(error) => return PlayedEpisode::failed(format!("its tokens are no sample: {error}")),
    };
    let roles = session.roles();
    let mut agents =
        session.interactions().iter().zip(&roles).filter(|(_, role)| **role == InteractionRole::Agent);
    let last = agents.next_back().map(|(interaction, _)| interaction);
    let [turns, auxiliary, discarded] = credit::counts(&roles);
    let drift = session.drift();
    let counts = BTreeMap::from([
        ("turns", turns),
        ("branches", rows.len() as u64),
        ("auxiliary", auxiliary),
        ("discarded", discarded),
        ("clean", drift.clean),
        ("realign", drift.realign),
        ("fork", drift.fork),
    ]);
    PlayedEpisode {
        prompt_length: rows.first().map_or(0, |row| row.prompt_length),
        text: last.map(|interaction| interaction.text.clone()).unwrap_or_default(),
        transcript: session.transcript(),
        counts,
        end: match last.map(|interaction| interaction.stop) {
            Some(StopReason::Length) => EpisodeEnd::Truncated,
            _ => EpisodeEnd::Done,
        },
        branches: rows.into_iter().map(|row| Branch { sample: row.sample, turns: row.turns }).collect(),
    }
}

/// Gives up sessions that are not used, as long as `store` is served.
pub async fn expire_idle(store: SessionStore) {
    let each = (store.limits().idle / 8).clamp(Duration::from_millis(100), Duration::from_secs(10));
    loop {
        tokio::time::sleep(each).await;
        store.expire(Instant::now());
    }
}
