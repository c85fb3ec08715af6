//! Episodes of a scripted player: demonstrations for a warm-up, and what `rlrun check` plays.
//!
//! Invariant: a scripted episode has exactly the tokens that sampling the same texts would give, since it is played through
//! the same streams.

use std::sync::atomic::AtomicU64;

use environments::{Action, Demonstration, EnvironmentError};
use model::{ModelDirectory, Sampling, SpecialTokens};
use tokio::runtime::Handle;
use trajectory::{GroupId, PolicyVersion, StopReason, Task, VersionRun};

use super::streams::{AfterTurn, EndedTurn, EpisodeStreams, opening};
use super::{Episode, EpisodeConfig, EpisodeEnd};
use crate::RolloutError;
use crate::sampler::{Completion, RequestOptions, SampleRequest};

/// How a scripted episode is played.
#[derive(Clone, Copy)]
pub struct ScriptedEpisode<'a> {
    /// The model whose tokens it has.
    pub directory: &'a ModelDirectory,
    /// Where environments wait.
    pub runtime: &'a Handle,
    /// Most tokens of a completion.
    pub max_completion_length: usize,
    /// What the player says where the environment has no script; `None` ends the episode.
    pub otherwise: Option<&'a str>,
}

impl std::fmt::Debug for ScriptedEpisode<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ScriptedEpisode").field("otherwise", &self.otherwise).finish_non_exhaustive()
    }
}

/// Plays `task`, whose prompt is `prompt [P]`; `next` gives player and random number of every turn. Returns what every role
/// said and read. The log-probabilities are 0: a script has none.
///
/// # Errors
/// An environment that fails, messages or texts that cannot be encoded.
pub fn play_script(
    config: &EpisodeConfig,
    ScriptedEpisode { directory, runtime, max_completion_length, otherwise }: ScriptedEpisode<'_>,
    task: &Task,
    prompt: &[u32],
    mut next: impl FnMut() -> (Demonstration, u64),
) -> Result<Vec<Episode>, RolloutError> {
    let played_in = config.of_task(task)?;
    let mut environment = played_in.factory.create();
    let opened = runtime.block_on(async {
        played_in.acquired(&mut *environment, task, config.wait, &AtomicU64::new(0)).await?;
        played_in.in_time(0, environment.reset(task)).await
    });
    let failed = |error: EnvironmentError| not_opened(played_in, prompt, error);
    let messages = match opened {
        Ok(messages) => messages,
        Err(error) => return Ok(failed(error)),
    };
    let mut prompt = opening(played_in, task, prompt, &messages)?;
    let mut streams = EpisodeStreams::new(played_in.clone(), request(max_completion_length), 0);
    loop {
        let (player, draw) = next();
        let said = environment.scripted(player, draw).or_else(|| otherwise.map(str::to_owned));
        let Some(text) = said else {
            return Ok(streams.finish(&EpisodeEnd::MaxTurns, &prompt, PolicyVersion::default()));
        };
        let mut spoken = directory.tokenizer().encode(&text, SpecialTokens::Omit)?;
        spoken.extend(directory.stop_token_ids().first());
        let EndedTurn { turn, role, text, stop, last } =
            streams.completed(completion(&prompt, &spoken, text));
        let action = Action { turn, role, text: &text, stop, last };
        let observation = match runtime.block_on(played_in.in_time(turn, environment.step(action))) {
            Ok(observation) => streams.observed(task, observation, config.max_tokens)?,
            Err(error) => Err(error),
        };
        let end = match observation {
            Ok(AfterTurn::Request(request)) => {
                prompt = request.prompt;
                continue;
            }
            Ok(AfterTurn::End(end)) => end,
            Err(error) => error.into(),
        };
        return Ok(streams.finish(&end, &prompt, PolicyVersion::default()));
    }
}

/// An episode that its environment did not open.
fn not_opened(
    played_in: &super::EpisodeEnvironment,
    prompt: &[u32],
    error: EnvironmentError,
) -> Vec<Episode> {
    let streams = EpisodeStreams::new(played_in.clone(), request(1), 0);
    streams.finish(&error.into(), prompt, PolicyVersion::default())
}

fn request(max_completion_length: usize) -> SampleRequest {
    SampleRequest {
        group: GroupId(0),
        prompt: Vec::new(),
        first_index: 0,
        turn: 0,
        samples: 1,
        sampling: Sampling::PLAIN,
        max_completion_length,
        baseline: false,
        keep_cache: false,
        options: RequestOptions::default(),
    }
}

/// `spoken [C]` after `prompt [P]`, as a sampler would return it.
fn completion(prompt: &[u32], spoken: &[u32], text: String) -> Completion {
    Completion {
        group: GroupId(0),
        index: 0,
        prompt_length: prompt.len(),
        prompt_version: PolicyVersion::default(),
        prefill: Vec::new(),
        token_ids: [prompt, spoken].concat(),
        logprobs: vec![0.0; spoken.len()],
        versions: vec![VersionRun { version: PolicyVersion::default(), len: spoken.len() as u32 }],
        inserted: None,
        baseline: false,
        kept: None,
        experts: None,
        alternatives: Vec::new(),
        text,
        stop: StopReason::StopToken,
        sampling: Sampling::PLAIN,
    }
}
