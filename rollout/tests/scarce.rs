//! Groups with more episodes than there are environments at a time: no episode waits for an environment that a waiting one of
//! its group occupies.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use environments::{
    Action, BoxFuture, Environment, EnvironmentContext, EnvironmentError, EnvironmentFactory,
    EnvironmentLimits, EnvironmentRegistry, EnvironmentSpec, Observation,
};
use futures_util::{SinkExt, StreamExt};
use model::Sampling;
use rollout::{Episode, EpisodeConfig, EpisodeEnd, EpisodeFailure, FailureKind, LocalSampler, Sampler};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_tungstenite::accept_async;
use tokio_tungstenite::tungstenite::Message as Frame;
use trajectory::{Message, Task};

use crate::Model;
use crate::episodes::{LONG, STOPS, chatting_of, play_with, played_in, question};

/// Environments of one turn, of which as many exist at a time as there are permits.
#[derive(Clone, Debug)]
struct Scarce {
    free: Arc<Semaphore>,
    /// How long a turn takes.
    turn: Duration,
}

#[derive(Debug)]
struct ScarceEpisode {
    scarce: Scarce,
    /// What it occupies until it is dropped.
    owned: Option<OwnedSemaphorePermit>,
}

impl EnvironmentFactory for Scarce {
    fn name(&self) -> &str {
        "scarce"
    }

    fn limits(&self) -> EnvironmentLimits {
        EnvironmentLimits { step_timeout: LIMIT, episode_timeout: LIMIT, ..EnvironmentLimits::default() }
    }

    fn create(&self) -> Box<dyn Environment> {
        Box::new(ScarceEpisode { scarce: self.clone(), owned: None })
    }
}

impl Environment for ScarceEpisode {
    fn acquire<'a>(&'a mut self, _: &'a Task) -> BoxFuture<'a, Result<(), EnvironmentError>> {
        Box::pin(async {
            self.owned = Arc::clone(&self.scarce.free).acquire_owned().await.ok();
            Ok(())
        })
    }

    fn reset<'a>(&'a mut self, _: &'a Task) -> BoxFuture<'a, Result<Vec<Message>, EnvironmentError>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn step<'a>(&'a mut self, _: Action<'a>) -> BoxFuture<'a, Result<Observation, EnvironmentError>> {
        assert!(self.owned.is_some(), "a turn in an environment that has not opened");
        Box::pin(async {
            if !self.scarce.turn.is_zero() {
                tokio::time::sleep(self.scarce.turn).await;
            }
            Ok(Observation { done: true, ..Observation::default() })
        })
    }
}

/// Longest turn and longest episode.
const LIMIT: Duration = Duration::from_secs(2);

/// Episodes of one group, and the tokens that were prefilled for it.
fn group_of_three(factory: Arc<dyn EnvironmentFactory>) -> (Vec<Episode>, u64) {
    let (model, directory) = chatting_of(Model::new());
    let mut sampler = LocalSampler::fixed(model.engine(LONG, &STOPS));
    let config = EpisodeConfig { wait: LIMIT, ..played_in(&directory, factory) };
    let episodes = play_with(&mut sampler, &directory, config, &[question(1)], Sampling::PLAIN);
    (episodes, sampler.counts().prefilled_tokens)
}

fn scarce(environments: usize, turn: Duration) -> Arc<Scarce> {
    Arc::new(Scarce { free: Arc::new(Semaphore::new(environments)), turn })
}

fn ends(episodes: &[Episode]) -> Vec<EpisodeEnd> {
    episodes.iter().map(|episode| episode.end.clone()).collect()
}

const DONE: [EpisodeEnd; 3] = [EpisodeEnd::Done, EpisodeEnd::Done, EpisodeEnd::Done];

#[test]
fn one_environment_plays_a_group_one_after_the_other() {
    let (one, prefilled) = group_of_three(scarce(1, Duration::ZERO));
    assert_eq!(ends(&one), DONE);
    let prompt = one[0].prompt_length as u64;
    assert_eq!(prefilled, 3 * prompt, "each episode begins by itself");
    // Where all open at once, they share the prefill of their prompt, and are the same episodes.
    let (all, prefilled) = group_of_three(scarce(3, Duration::ZERO));
    assert_eq!((&all, prefilled), (&one, prompt));
    // Two open at once and share; the third begins by itself.
    let (two, prefilled) = group_of_three(scarce(2, Duration::ZERO));
    assert_eq!((&two, prefilled), (&one, 2 * prompt));
}

/// The third episode waits longer for an environment than a turn or an episode may take.
#[test]
fn the_wait_for_an_environment_counts_against_no_limit() {
    let (episodes, _) = group_of_three(scarce(1, LIMIT * 3 / 5));
    assert_eq!(ends(&episodes), DONE);
}

#[test]
fn a_wait_in_which_no_environment_becomes_free_ends() {
    let (episodes, _) = group_of_three(scarce(0, Duration::ZERO));
    for end in ends(&episodes) {
        let EpisodeEnd::Failed(EpisodeFailure { kind, reason }) = end else { panic!("{end:?}") };
        assert!(reason.contains("none became free within 2 s"), "{reason}");
        assert_eq!(kind, FailureKind::NoneFree);
    }
}

/// Serves episodes of one turn, `capacity` at a time, as OpenEnv 0.10 does.
async fn serve(stream: TcpStream, open: Arc<AtomicUsize>, capacity: usize) {
    let mut socket = accept_async(stream).await.unwrap();
    if open.fetch_add(1, Ordering::SeqCst) >= capacity {
        open.fetch_sub(1, Ordering::SeqCst);
        let full = json!({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}});
        let _ = socket.send(Frame::text(full.to_string())).await;
        return;
    }
    while let Some(Ok(Frame::Text(request))) = socket.next().await {
        let request: Value = serde_json::from_str(&request).unwrap();
        let done = match request["type"].as_str() {
            Some("reset") => false,
            Some("step") => true,
            _ => break,
        };
        let data = json!({"observation": {"text": "go"}, "reward": 1.0, "done": done});
        let answer = json!({"type": "observation", "data": data});
        socket.send(Frame::text(answer.to_string())).await.unwrap();
    }
    open.fetch_sub(1, Ordering::SeqCst);
}

#[test]
fn a_server_with_one_session_plays_a_group_one_after_the_other() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    runtime.spawn(async move {
        let open = Arc::new(AtomicUsize::new(0));
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, Arc::clone(&open), 1));
        }
    });
    let spec = EnvironmentSpec {
        kind: "openenv".to_owned(),
        url: Some(format!("http://{address}")),
        turn_timeout_s: 10.0,
        ..EnvironmentSpec::default()
    };
    let factory = EnvironmentRegistry::builtin().build(&spec, &EnvironmentContext::default()).unwrap();
    let (episodes, _) = group_of_three(factory);
    assert_eq!(ends(&episodes), DONE);
    assert!(episodes.iter().all(|episode| episode.turns[0].reward == Some(1.0)));
}
