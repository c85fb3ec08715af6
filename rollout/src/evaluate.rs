//! Accuracy of a policy on held-out tasks: the same engine, without buffer and without training.

use std::sync::Arc;

use model::{Sampling, Team};
use rewards::RewardSet;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use trajectory::{GroupId, PolicyVersion, Score, Task};

use crate::RolloutError;
use crate::engine::{Completion, Engine, EngineConfig, Network, Request, StopRules};
use crate::prompts::PromptSet;
use crate::scoring::reward_input;

/// How an evaluation samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EvaluationConfig {
    /// Bounds of the engine.
    pub engine: EngineConfig,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tasks evaluated, from the first on; `None` for all.
    pub tasks: Option<usize>,
}

/// One task with the answer of the policy.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// What was asked.
    pub task: Arc<Task>,
    /// What the policy said.
    pub text: String,
    /// What it is worth.
    pub score: Score,
}

/// The answers of a policy, in the order of the tasks.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// One per task.
    pub answers: Vec<Answer>,
    /// Tokens sampled.
    pub tokens: u64,
}

impl Evaluation {
    /// Mean of the first reward of the recipe, which is the one that judges correctness, over the answers that it could
    /// judge; not a number if there is none.
    #[must_use]
    pub fn accuracy(&self) -> f64 {
        let judged = self.answers.iter().filter_map(|answer| answer.score.components.first()?.value);
        let (sum, count) = judged.fold((0.0, 0), |(sum, count), value| (sum + value, count + 1));
        sum / f64::from(count)
    }

    /// How many answers the first reward could not judge, and why not the first of them.
    #[must_use]
    pub fn failed(&self) -> (usize, Option<&str>) {
        let failures =
            self.answers.iter().filter_map(|answer| answer.score.components.first()?.error.as_deref());
        (failures.clone().count(), failures.clone().next())
    }
}

/// An answer that is being scored.
type Scoring = JoinHandle<Result<Answer, RolloutError>>;

/// Lets `network` answer the tasks of `prompts`, on the cores of `team`.
///
/// # Errors
/// If the engine, the tokenizer or a reward with `on_error = "fail"` fails.
pub fn evaluate(
    config: &EvaluationConfig,
    (network, team): (Network, Arc<Team>),
    prompts: &PromptSet,
    (stop, rewards, runtime): (&StopRules, &Arc<RewardSet>, &Handle),
) -> Result<Evaluation, RolloutError> {
    let count = config.tasks.unwrap_or(usize::MAX).min(prompts.len());
    let mut engine = Engine::new(config.engine, stop.clone(), network, PolicyVersion::default())?.on(team);
    let mut waiting = prompts.iter().take(count).enumerate().peekable();
    let tasks: Vec<Arc<Task>> = prompts.iter().take(count).map(|(task, _)| Arc::clone(task)).collect();
    let mut scoring: Vec<Option<Scoring>> = (0..count).map(|_| None).collect();
    while waiting.peek().is_some() || !engine.is_idle() {
        while engine.has_room(1) {
            let Some((place, (_, prompt))) = waiting.next() else { break };
            engine.submit(Request {
                group: GroupId(place as u64),
                prompt: prompt.to_vec(),
                samples: 1,
                sampling: config.sampling,
                max_completion_length: config.engine.max_completion_length,
                baseline: false,
            })?;
        }
        for completion in engine.step()? {
            let place = completion.group.0 as usize;
            let (task, rewards) = (Arc::clone(&tasks[place]), Arc::clone(rewards));
            let max_completion_length = config.engine.max_completion_length;
            // Rewards run beside the generation of what is still open.
            scoring[place] = Some(runtime.spawn(score(task, completion, max_completion_length, rewards)));
        }
    }
    let mut answers = Vec::with_capacity(count);
    for scored in scoring.into_iter().flatten() {
        let ended = |_| RolloutError::Ended { who: "the scoring of an evaluation" };
        answers.push(runtime.block_on(scored).map_err(ended)??);
    }
    Ok(Evaluation { answers, tokens: engine.counts().sampled_tokens })
}

async fn score(
    task: Arc<Task>,
    completion: Completion,
    max_completion_length: usize,
    rewards: Arc<RewardSet>,
) -> Result<Answer, RolloutError> {
    let score = rewards.score(&[reward_input(&task, &completion, max_completion_length)]).await?;
    let score = score.into_iter().next().unwrap_or_default();
    Ok(Answer { task, text: completion.text, score })
}
