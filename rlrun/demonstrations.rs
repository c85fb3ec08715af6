//! Demonstrations as samples: texts of a dataset, worked additions, and episodes of a scripted player.
//!
//! Invariant: the tokens of a demonstration are those that sampling would produce: the encoded prompt, the encoded text, the
//! token that ends a completion.

use environments::Demonstration;
use model::{ModelDirectory, SpecialTokens};
use rollout::tasks::arithmetic::Sum;
use rollout::{Episode, EpisodeEnd, EpisodeFailure, ScriptedEpisode, play_script};
use serde_json::Value;
use tokio::runtime::Handle;
use trajectory::{PolicyVersion, Prompt, Sample, SampleStreams, Task, VersionRun};

use crate::failure::Failure;
use crate::prepare::Prepared;

/// The text of a task's demonstration: a column of its row, or the worked answer of a generated addition.
///
/// # Errors
/// If the task has no such column, or the column is no text.
pub(crate) fn text(task: &Task, column: Option<&str>) -> Result<String, Failure> {
    let Some(column) = column else { return Ok(Sum::of(task)?.demonstration(Demonstration::Right)) };
    match task.columns.get(column) {
        Some(Value::String(text)) => Ok(text.clone()),
        found => {
            let found = found.map_or("is not there".to_owned(), |value| format!("is {value}"));
            let columns: Vec<&str> = task.columns.keys().map(String::as_str).collect();
            let there = columns.join(", ");
            Err(Failure::Argument(format!(
                "task {} has no text in column `{column}`: it {found}; its columns are {there}",
                task.id.0
            )))
        }
    }
}

/// Draws demonstrations for a warm-up.
pub(crate) struct Demonstrations<'a> {
    pub(crate) prepared: &'a Prepared,
    pub(crate) directory: &'a ModelDirectory,
    /// Where environments wait.
    pub(crate) runtime: &'a Handle,
    /// Most tokens of a completion.
    pub(crate) max_completion_length: usize,
    /// Whether tasks are played in an environment.
    pub(crate) episodes: bool,
}

impl Demonstrations<'_> {
    /// A demonstration of a task that is drawn, one sample for every role; `random` gives random numbers. A share
    /// `wrong_share` of them, or of the turns of an episode, is wrong. The demonstration of an addition is its worked answer
    /// where the environment has no scripted player.
    ///
    /// # Errors
    /// A task without a demonstration, an environment that fails.
    pub(crate) fn draw(
        &self,
        wrong_share: f64,
        mut random: impl FnMut() -> u32,
    ) -> Result<Vec<Sample>, Failure> {
        let train = &self.prepared.train;
        let place = (u64::from(random()) * train.len() as u64) >> 32;
        let task = train.task(place as usize);
        let player = |random: u32| {
            let wrong = f64::from(random) < wrong_share * 4_294_967_296.0;
            if wrong { Demonstration::Wrong } else { Demonstration::Right }
        };
        if !self.episodes {
            let text = Sum::of(task)?.demonstration(player(random()));
            return Ok(vec![sample(self.directory, &task.prompt, &text)?]);
        }
        let next = || (player(random()), u64::from(random()));
        let played = self.play(task, train.prompt(place as usize), None, next)?;
        let taken: Vec<&Episode> = played.iter().filter(|episode| !episode.turns.is_empty()).collect();
        if taken.is_empty() {
            if let Ok(sum) = Sum::of(task) {
                let text = sum.demonstration(player(random()));
                return Ok(vec![sample(self.directory, &task.prompt, &text)?]);
            }
            let name = self.prepared.episodes.of_task(task)?.factory.name();
            return Err(Failure::Argument(format!(
                "`warmup`: the environment `{name}` has no scripted player for task {}; remove `[warmup]` or set `warmup.steps = \
                 0`",
                task.id.0
            )));
        }
        let no_sample = |error| Failure::Internal(format!("a scripted episode is no sample: {error}"));
        taken.into_iter().map(|episode| episode.sample().map_err(no_sample)).collect()
    }

    /// An episode of the scripted player, one [`Episode`] for every role; see [`play_script`].
    ///
    /// # Errors
    /// An environment that fails, messages that cannot be encoded.
    pub(crate) fn play(
        &self,
        task: &Task,
        prompt: &[u32],
        otherwise: Option<&str>,
        next: impl FnMut() -> (Demonstration, u64),
    ) -> Result<Vec<Episode>, Failure> {
        let Self { prepared, directory, runtime, max_completion_length, .. } = *self;
        let script = ScriptedEpisode { directory, runtime, max_completion_length, otherwise };
        let played = play_script(&prepared.episodes, script, task, prompt, next)?;
        match played.first().map(|episode| &episode.end) {
            Some(EpisodeEnd::Failed(EpisodeFailure { reason, .. })) => {
                Err(Failure::Argument(format!("a scripted episode of task {}: {reason}", task.id.0)))
            }
            _ => Ok(played),
        }
    }
}

/// Prompt, text and the token that ends it, as something to learn.
///
/// # Errors
/// If the prompt cannot be encoded.
pub(crate) fn sample(directory: &ModelDirectory, prompt: &Prompt, text: &str) -> Result<Sample, Failure> {
    let prompt = directory.encode_prompt(prompt)?;
    let mut token_ids = prompt.clone();
    token_ids.extend(directory.tokenizer().encode(text, SpecialTokens::Omit)?);
    token_ids.extend(directory.stop_token_ids().first());
    masked(token_ids, prompt.len())
}

/// Tokens of which those from `trained` on are in the loss.
///
/// # Errors
/// If there is nothing before them.
pub(crate) fn masked(token_ids: Vec<u32>, trained: usize) -> Result<Sample, Failure> {
    let loss_mask = (0..token_ids.len()).map(|t| t >= trained).collect();
    learnt(token_ids, loss_mask)
}

/// Tokens of which those of `loss_mask` are in the loss.
///
/// # Errors
/// If none is, or the first.
pub(crate) fn learnt(token_ids: Vec<u32>, loss_mask: Vec<bool>) -> Result<Sample, Failure> {
    let tokens = token_ids.len();
    let streams = SampleStreams {
        loss_mask,
        behavior_logprobs: vec![0.0; tokens],
        versions: vec![VersionRun { version: PolicyVersion::default(), len: tokens as u32 }],
        kept: None,
        experts: None,
        temperature: 1.0,
        token_ids,
    };
    Sample::new(streams).map_err(|error| Failure::Internal(format!("a demonstration is no sample: {error}")))
}
