//! Accuracy and rewards of a policy on held-out tasks: a sampler without buffer and without training.
//!
//! # Layout
//! - `statistics`: pass@k and intervals
//!
//! Invariant: every answer counts in the accuracy; an answer that could not be judged is not correct, and is counted as
//! failed. A stopped evaluation ends within one decode step. Rewards that do not answer end it with an error.

mod statistics;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use model::Sampling;
use rewards::RewardSet;
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use trajectory::{Component, GroupId, Score, Task, episode_reward};

use crate::RolloutError;
use crate::episode::{Episode, EpisodeConfig, EpisodeDriver, EpisodeEnd};
use crate::prompts::PromptSet;
use crate::sampler::{RequestOptions, SampleRequest, Sampler};
use crate::scoring::{ENVIRONMENT, environment_component, reward_input, unscored};

pub use statistics::{interval, pass_at_k, powers_of_two};

/// Longest wait for the sampler or for rewards before an evaluation looks whether it should stop.
const LOOK_UP: Duration = Duration::from_millis(50);
/// First bit of the set's number in a group id: the random streams of a set do not depend on the other sets.
const SET: u32 = 40;

/// How an evaluation samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EvaluationConfig {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Longest completion, tokens.
    pub max_completion_length: usize,
    /// Most completions of one prompt in a request.
    pub max_samples: usize,
    /// Longest wait for the next answer to be judged.
    pub wait: Duration,
}

/// Held-out tasks that are evaluated together.
#[derive(Clone, Copy, Debug)]
pub struct EvaluationSet<'a> {
    /// The tasks.
    pub prompts: &'a PromptSet,
    /// How many of them, from the first on; `None` for all.
    pub tasks: Option<usize>,
    /// Answers per task, at least 1.
    pub samples: usize,
}

impl EvaluationSet<'_> {
    /// Tasks that are asked.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.tasks.unwrap_or(usize::MAX).min(self.prompts.len())
    }

    /// Answers that are made.
    #[must_use]
    pub fn answers(&self) -> usize {
        self.tasks() * self.samples
    }
}

/// Progress of an evaluation, read by other threads.
#[derive(Debug, Default)]
pub struct EvaluationProgress {
    /// Answers requested.
    pub answers: AtomicU64,
    /// Answers generated.
    pub generated: AtomicU64,
    /// Answers judged.
    pub judged: AtomicU64,
    /// Polls of the sampler in all evaluations so far.
    pub steps: AtomicU64,
}

/// Stops an evaluation and reads its progress.
#[derive(Clone, Copy)]
pub struct EvaluationObserver<'a> {
    /// Set when the evaluation should end without a result.
    pub stop: &'a AtomicBool,
    /// Its progress.
    pub progress: &'a EvaluationProgress,
    /// Called with the number of judged answers when it changes.
    pub show: &'a dyn Fn(u64),
}

impl std::fmt::Debug for EvaluationObserver<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EvaluationObserver").field("progress", &self.progress).finish_non_exhaustive()
    }
}

/// One answer of the policy.
#[derive(Clone, Debug, PartialEq)]
pub struct EvaluatedAnswer {
    /// What was asked.
    pub task: Arc<Task>,
    /// The completion as text.
    pub text: String,
    /// `[tokens]` prompt, completions and the messages between them, stop tokens included.
    pub token_ids: Vec<u32>,
    /// Number of tokens before the answer.
    pub prompt_length: usize,
    /// Tokens of the answer.
    pub tokens: usize,
    /// Its rewards as a whole.
    pub score: Score,
    /// Its reward, that of its turns included; see [`episode_reward`].
    pub reward: Option<f64>,
}

/// The answers of a policy to one set.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// All answers to a task in a row, in the order of the tasks.
    pub answers: Vec<EvaluatedAnswer>,
    /// Answers per task.
    pub samples: usize,
    /// Name of the reward that decides which answers are correct.
    pub criterion: Option<String>,
}

/// Answers for which one reward failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failures {
    /// How many.
    pub answers: usize,
    /// Why the first of them failed.
    pub example: String,
}

impl Evaluation {
    /// Number of tasks.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.answers.len() / self.samples.max(1)
    }

    /// Tokens sampled.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.answers.iter().map(|answer| answer.tokens).sum()
    }

    /// `[tasks]` correct answers; `None` without a criterion.
    fn correct(&self) -> Option<Vec<usize>> {
        self.criterion.as_ref()?;
        let correct = |answer: &&EvaluatedAnswer| answer.score.correct == Some(true);
        Some(self.answers.chunks(self.samples.max(1)).map(|of| of.iter().filter(correct).count()).collect())
    }

    fn shares(&self) -> Option<Vec<f64>> {
        let correct = self.correct().filter(|correct| !correct.is_empty())?;
        Some(correct.into_iter().map(|correct| correct as f64 / self.samples as f64).collect())
    }

    /// Share of correct answers among all answers, which with n answers per task is avg@n; `None` without a criterion.
    #[must_use]
    pub fn accuracy(&self) -> Option<f64> {
        let shares = self.shares()?;
        Some(shares.iter().sum::<f64>() / shares.len() as f64)
    }

    /// 95 % interval of the accuracy: see [`interval`].
    #[must_use]
    pub fn interval(&self) -> Option<(f64, f64)> {
        Some(interval(&self.shares()?, self.samples))
    }

    /// Mean over the tasks of [`pass_at_k`], for every power of two up to the number of answers; empty without a criterion.
    #[must_use]
    pub fn pass_at(&self) -> Vec<(usize, f64)> {
        let Some(correct) = self.correct().filter(|correct| !correct.is_empty()) else { return Vec::new() };
        let mean = |k| {
            let each = correct.iter().map(|correct| pass_at_k(self.samples, *correct, k));
            each.sum::<f64>() / correct.len() as f64
        };
        powers_of_two(self.samples).map(|k| (k, mean(k))).collect()
    }

    /// Mean reward over the answers that have one; `None` if none has.
    #[must_use]
    pub fn reward(&self) -> Option<f64> {
        let totals: Vec<f64> = self.answers.iter().filter_map(|answer| answer.reward).collect();
        (!totals.is_empty()).then(|| totals.iter().sum::<f64>() / totals.len() as f64)
    }

    /// Means over the episodes of what their environment counted, by name; empty without an environment of several turns.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<&str, f64> {
        let episodes: Vec<&Component> = self
            .answers
            .iter()
            .filter_map(|answer| answer.score.components.iter().find(|said| said.name == ENVIRONMENT))
            .collect();
        let mut counts: BTreeMap<&str, f64> = BTreeMap::new();
        for (name, count) in episodes.iter().flat_map(|component| component.numbers()) {
            *counts.entry(name).or_default() += count / episodes.len() as f64;
        }
        counts
    }

    /// Answers for which at least one reward failed.
    #[must_use]
    pub fn failed(&self) -> usize {
        let failed =
            |answer: &&EvaluatedAnswer| answer.score.components.iter().any(|said| said.error.is_some());
        self.answers.iter().filter(failed).count()
    }

    /// The rewards that failed, by name.
    #[must_use]
    pub fn failures(&self) -> BTreeMap<&str, Failures> {
        let mut failures: BTreeMap<&str, Failures> = BTreeMap::new();
        for component in self.answers.iter().flat_map(|answer| &answer.score.components) {
            let Some(error) = &component.error else { continue };
            let of = failures
                .entry(&component.name)
                .or_insert_with(|| Failures { answers: 0, example: error.clone() });
            of.answers += 1;
        }
        failures
    }

    /// Answers that the criterion judged: all but those for which it failed or did not apply.
    #[must_use]
    pub fn judged(&self) -> usize {
        let judged = |answer: &&EvaluatedAnswer| {
            let of = |name: &String| answer.score.components.iter().find(|said| said.name == *name);
            self.criterion.as_ref().and_then(of).is_some_and(|said| said.value.is_some())
        };
        self.answers.iter().filter(judged).count()
    }
}

/// Where the answers of a set are among those of all sets.
struct AnswerLayout {
    /// First answer.
    first: usize,
    /// Requests per task, of `chunk` answers each but the last.
    requests: usize,
    chunk: usize,
}

impl AnswerLayout {
    fn of(sets: &[EvaluationSet<'_>], most: usize) -> Vec<Self> {
        let mut first = 0;
        let plan = |set: &EvaluationSet<'_>| {
            let chunk = set.samples.min(most).max(1);
            let plan = Self { first, requests: set.samples.div_ceil(chunk), chunk };
            first += set.answers();
            plan
        };
        sets.iter().map(plan).collect()
    }

    /// Number of the request among those of the set.
    fn request(group: GroupId) -> usize {
        (group.0 & ((1 << SET) - 1)) as usize
    }

    /// Place in its set of the task of a group.
    fn task(&self, group: GroupId) -> usize {
        Self::request(group) / self.requests
    }

    /// Answers that a request makes.
    fn chunk_of(&self, set: &EvaluationSet<'_>, group: GroupId) -> usize {
        self.chunk.min(set.samples - Self::request(group) % self.requests * self.chunk)
    }

    /// Place among the answers of all sets of an episode.
    fn place(&self, set: &EvaluationSet<'_>, episode: &Episode) -> usize {
        let part = Self::request(episode.group) % self.requests;
        let answer = part * self.chunk + episode.index as usize;
        self.first + self.task(episode.group) * set.samples + answer
    }
}

/// The requests of an evaluation, in order.
fn requests<'a>(
    sets: &'a [EvaluationSet<'a>],
    plans: &'a [AnswerLayout],
    config: &'a EvaluationConfig,
) -> impl Iterator<Item = SampleRequest> + 'a {
    let of_set = move |(n, (set, plan)): (usize, (&'a EvaluationSet<'a>, &'a AnswerLayout))| {
        let tasks = set.prompts.iter().take(set.tasks()).enumerate();
        tasks.flat_map(move |(task, (_, prompt))| {
            (0..plan.requests).map(move |part| SampleRequest {
                group: GroupId(((n as u64) << SET) | (task * plan.requests + part) as u64),
                prompt: prompt.to_vec(),
                first_index: 0,
                turn: 0,
                samples: plan.chunk.min(set.samples - part * plan.chunk),
                sampling: config.sampling,
                max_completion_length: config.max_completion_length,
                baseline: false,
                keep_cache: false,
                options: RequestOptions::default(),
            })
        })
    };
    sets.iter().zip(plans).enumerate().flat_map(of_set)
}

/// Answers that rewards judge at the moment; dropping it cancels them.
struct AnswersInScoring<'a> {
    open: JoinSet<PlacedAnswer>,
    answers: Vec<Option<EvaluatedAnswer>>,
    watch: &'a EvaluationObserver<'a>,
    /// When the last answer was judged.
    last: Instant,
}

/// The answer at a place of the evaluation, judged.
struct PlacedAnswer {
    place: usize,
    answer: Result<EvaluatedAnswer, RolloutError>,
}

impl AnswersInScoring<'_> {
    fn take(&mut self, joined: Result<PlacedAnswer, tokio::task::JoinError>) -> Result<(), RolloutError> {
        let ended = |_| RolloutError::Ended { who: "the scoring of an evaluation" };
        let PlacedAnswer { place, answer } = joined.map_err(ended)?;
        self.answers[place] = Some(answer?);
        self.last = Instant::now();
        let judged = self.watch.progress.judged.fetch_add(1, Ordering::Relaxed) + 1;
        (self.watch.show)(judged);
        Ok(())
    }

    /// Takes the answers that have been judged.
    fn poll(&mut self) -> Result<(), RolloutError> {
        while let Some(joined) = self.open.try_join_next() {
            self.take(joined)?;
        }
        Ok(())
    }

    /// Waits for the remaining answers; false if it was stopped.
    fn finish(&mut self, runtime: &Handle, wait: Duration) -> Result<bool, RolloutError> {
        self.last = Instant::now();
        while !self.open.is_empty() {
            if self.watch.stop.load(Ordering::Relaxed) {
                return Ok(false);
            }
            let next = async { tokio::time::timeout(LOOK_UP, self.open.join_next()).await };
            match runtime.block_on(next) {
                Ok(Some(joined)) => self.take(joined)?,
                Ok(None) => break,
                Err(_) if self.last.elapsed() >= wait => {
                    let (open, all) = (self.open.len(), self.answers.len());
                    return Err(RolloutError::Deadline {
                        who: "an evaluation",
                        whom: format!("rewards to judge {open} of {all} answers"),
                        seconds: wait.as_secs_f64(),
                    });
                }
                Err(_) => {}
            }
        }
        Ok(true)
    }
}

/// Lets `sampler` answer the tasks of `sets` in the environments of `episodes`; one evaluation per set, or `None` if it was stopped.
///
/// # Errors
/// If the sampler or a reward with `on_error = "fail"` fails; rewards that judge nothing for `config.wait`.
pub fn evaluate(
    config: &EvaluationConfig,
    sampler: &mut dyn Sampler,
    episodes: EpisodeConfig,
    sets: &[EvaluationSet<'_>],
    rewards: &Arc<RewardSet>,
    runtime: &Handle,
    watch: &EvaluationObserver<'_>,
) -> Result<Option<Vec<Evaluation>>, RolloutError> {
    let plans = AnswerLayout::of(sets, config.max_samples);
    let all: usize = sets.iter().map(EvaluationSet::answers).sum();
    watch.progress.answers.store(all as u64, Ordering::Relaxed);
    watch.progress.generated.store(0, Ordering::Relaxed);
    watch.progress.judged.store(0, Ordering::Relaxed);
    let mut waiting = requests(sets, &plans, config).peekable();
    let mut judging =
        AnswersInScoring { open: JoinSet::new(), answers: vec![None; all], watch, last: Instant::now() };
    let mut episodes = EpisodeDriver::new(episodes, runtime.clone());
    while waiting.peek().is_some() || !episodes.is_idle() {
        if watch.stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        while let Some(request) = waiting.next_if(|request| sampler.has_capacity(request.samples)) {
            let n = (request.group.0 >> SET) as usize;
            let task = Arc::clone(sets[n].prompts.task(plans[n].task(request.group)));
            let _ = episodes.start(sampler, &task, request)?;
        }
        for episode in episodes.poll(sampler, LOOK_UP)? {
            let n = (episode.group.0 >> SET) as usize;
            let task = Arc::clone(sets[n].prompts.task(plans[n].task(episode.group)));
            // The answer to a task with several roles is what the first role did.
            if plans[n].chunk_of(&sets[n], episode.group) <= episode.index as usize {
                continue;
            }
            let place = plans[n].place(&sets[n], &episode);
            let (rewards, longest) = (Arc::clone(rewards), config.max_completion_length);
            // Rewards run beside the generation of the remaining answers.
            let judge =
                async move { PlacedAnswer { place, answer: score(task, episode, longest, rewards).await } };
            judging.open.spawn_on(judge, runtime);
            watch.progress.generated.fetch_add(1, Ordering::Relaxed);
        }
        watch.progress.steps.fetch_add(1, Ordering::Relaxed);
        judging.poll()?;
    }
    if !judging.finish(runtime, config.wait)? {
        return Ok(None);
    }
    let mut answers = judging.answers.into_iter().flatten();
    let criterion = rewards.criterion().map(|criterion| criterion.reward.clone());
    let of_set = |set: &EvaluationSet<'_>| Evaluation {
        answers: answers.by_ref().take(set.answers()).collect(),
        samples: set.samples,
        criterion: criterion.clone(),
    };
    Ok(Some(sets.iter().map(of_set).collect()))
}

async fn score(
    task: Arc<Task>,
    episode: Episode,
    max_completion_length: usize,
    rewards: Arc<RewardSet>,
) -> Result<EvaluatedAnswer, RolloutError> {
    let mut score = if matches!(episode.end, EpisodeEnd::Failed(_)) {
        unscored(&episode)
    } else {
        let score = rewards.score(&[reward_input(&task, &episode, max_completion_length)]).await?;
        score.into_iter().next().unwrap_or_default()
    };
    score.components.extend(environment_component(&episode));
    let (tokens, reward) = (episode.completion_tokens(), episode_reward(&score, episode.all_turns()));
    let (token_ids, prompt_length) = (episode.token_ids().to_vec(), episode.prompt_length);
    Ok(EvaluatedAnswer { task, text: episode.text, token_ids, prompt_length, tokens, score, reward })
}

#[cfg(test)]
mod tests {
    use serde_json::Map;
    use trajectory::{Prompt, TaskId};

    use super::*;

    /// Answers with the value that `math` gives them; `None`: it failed.
    fn evaluation(samples: usize, values: &[Option<f64>]) -> Evaluation {
        let task = Arc::new(Task {
            id: TaskId(0),
            prompt: Prompt::Text(String::new()),
            answer: None,
            columns: Map::new(),
        });
        let answer = |value: &Option<f64>| {
            let error = value.is_none().then(|| "no answer within 5 s".to_owned());
            let math = Component { name: "math".to_owned(), value: *value, error, ..Component::default() };
            let correct = Some(value.is_some_and(|value| value >= 1.0));
            let score = Score { total: value.map(|value| value - 0.5), components: vec![math], correct };
            let reward = score.total;
            let (text, token_ids, prompt_length) = (String::new(), vec![7, 8, 9, 2], 1);
            EvaluatedAnswer {
                task: Arc::clone(&task),
                text,
                token_ids,
                prompt_length,
                tokens: 3,
                score,
                reward,
            }
        };
        Evaluation {
            answers: values.iter().map(answer).collect(),
            samples,
            criterion: Some("math".to_owned()),
        }
    }

    #[test]
    fn a_failed_answer_is_wrong_and_counted() {
        let some = evaluation(1, &[Some(1.0), None, None, Some(0.5), Some(2.0)]);
        assert_eq!((some.accuracy(), some.failed(), some.judged(), some.tokens()), (Some(0.4), 2, 3, 15));
        assert!((some.reward().unwrap() - 2.0 / 3.0).abs() < 1e-12, "{:?}", some.reward());
        let failures = some.failures();
        assert_eq!((failures.len(), failures["math"].answers), (1, 2));
        assert_eq!(failures["math"].example, "no answer within 5 s");
        let none = evaluation(1, &[None, None]);
        assert_eq!((none.accuracy(), none.reward(), none.judged(), none.failed()), (Some(0.0), None, 0, 2));
        assert_eq!(none.pass_at(), [(1, 0.0)]);
    }

    #[test]
    fn several_answers_give_avg_and_pass_at_k() {
        let [right, wrong] = [Some(1.0), Some(0.0)];
        let four = evaluation(4, &[right, wrong, wrong, wrong, wrong, wrong, wrong, wrong]);
        assert_eq!((four.tasks(), four.accuracy()), (2, Some(0.125)));
        assert_eq!(four.pass_at(), [(1, 0.125), (2, 0.25), (4, 0.5)]);
        let (low, high) = four.interval().unwrap();
        assert!(low < 0.05 && high > 0.45, "two tasks say little: {low} {high}");
    }

    #[test]
    fn without_a_criterion_there_is_no_accuracy() {
        let undeclared = Evaluation { criterion: None, ..evaluation(2, &[Some(1.0), Some(0.0)]) };
        assert_eq!((undeclared.accuracy(), undeclared.interval(), undeclared.judged()), (None, None, 0));
        assert!(undeclared.pass_at().is_empty());
        assert_eq!(undeclared.reward(), Some(0.0));
    }
}
