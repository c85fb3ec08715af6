//! Evaluations of a policy: their sets, metrics and messages.
//!
//! Invariant: failures are reported with every accuracy. Failing rewards never suppress an accuracy, and without
//! `eval.correct` there is none.

use model::ModelDirectory;
use rollout::evaluate::{
    Evaluation, EvaluationConfig, EvaluationObserver, EvaluationSet, Failures, evaluate,
};
use rollout::{Network, PromptSet};

use crate::failure::Failure;
use crate::metrics::Metrics;
use crate::prepare::{Prepared, RewardRuntime};
use crate::recipe::{DEFAULT_SET, Recipe};
use crate::sampler::SamplerSetup;

/// A further set of held-out tasks.
#[derive(Debug)]
pub struct NamedSet {
    /// Its name in metrics.
    pub name: String,
    /// Its tasks.
    pub prompts: PromptSet,
    /// Answers per task.
    pub samples: usize,
}

/// Which sets are asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// All of them.
    All,
    /// The first: that of `data.eval`, if there is one.
    First,
}

/// An evaluation of a policy.
#[derive(Debug)]
pub struct EvaluationRequest<'a> {
    /// On these sets.
    pub which: Which,
    /// The policy.
    pub network: Network,
    /// Its tokenizer and stop tokens.
    pub directory: &'a ModelDirectory,
    /// Where the rewards run.
    pub runtime: &'a RewardRuntime,
    /// Stop flag and progress.
    pub watch: &'a EvaluationObserver<'a>,
}

/// The answers of a policy to all sets that it was asked.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluated {
    /// Name and answers of each set, at least one; that of `data.eval` is the first.
    sets: Vec<(String, Evaluation)>,
}

impl Prepared {
    /// The sets of held-out tasks by name; that of `data.eval` is the first.
    #[must_use]
    pub fn evaluation_sets(&self, recipe: &Recipe, which: Which) -> Vec<(&str, EvaluationSet<'_>)> {
        let (tasks, samples) = (recipe.eval.tasks, recipe.eval.samples);
        let default =
            self.eval.iter().map(|prompts| (DEFAULT_SET, EvaluationSet { prompts, tasks, samples }));
        // Files of further sets are read up to their number of tasks.
        let further = self.sets.iter().map(|NamedSet { name, prompts, samples }| {
            (&name[..], EvaluationSet { prompts, tasks: None, samples: *samples })
        });
        let asked = if which == Which::First { 1 } else { usize::MAX };
        // Without rewards answers cannot be judged.
        default.chain(further).take(asked).filter(|_| self.rewards.is_some()).collect()
    }

    /// Answers of `network` to the held-out tasks; `None` if there are none, or it was stopped.
    ///
    /// # Errors
    /// If generation or a reward with `on_error = "fail"` fails, or rewards judge nothing for `deadlines.wait_s`.
    pub fn evaluate(
        &self,
        recipe: &Recipe,
        request: EvaluationRequest<'_>,
    ) -> Result<Option<Evaluated>, Failure> {
        let EvaluationRequest { which, network, directory, runtime, watch } = request;
        let (names, sets): (Vec<&str>, Vec<_>) = self.evaluation_sets(recipe, which).into_iter().unzip();
        let (Some(rewards), false) = (&self.rewards, sets.is_empty()) else { return Ok(None) };
        let longest = sets.iter().map(|set| set.prompts.longest()).max().unwrap_or(0);
        let engine = recipe.engine(longest, directory.config().max_context());
        let config = EvaluationConfig {
            sampling: recipe.eval_sampling(),
            max_completion_length: engine.max_completion_length,
            max_samples: engine.max_samples,
            wait: recipe.wait(),
        };
        let mut sampler = SamplerSetup { recipe, directory, prepared: self }.fixed(engine, network)?;
        let evaluations =
            evaluate(&config, &mut *sampler, self.episodes.clone(), &sets, rewards, runtime.handle(), watch)?;
        let named = |all: Vec<Evaluation>| names.into_iter().map(str::to_owned).zip(all).collect();
        Ok(evaluations.map(|all| Evaluated { sets: named(all) }))
    }
}

impl Evaluated {
    /// The first set: that of `data.eval`, if there is one.
    #[must_use]
    pub fn first(&self) -> &Evaluation {
        &self.sets[0].1
    }

    /// Share of correct answers of the first set, and the name of its metric; `None` if nothing says what is correct.
    #[must_use]
    pub fn accuracy(&self) -> Option<(String, f64)> {
        let (name, evaluation) = &self.sets[0];
        Some((metric(name, "accuracy"), evaluation.accuracy()?))
    }

    /// A metric that every evaluation of these sets writes.
    #[must_use]
    pub fn mark(&self) -> String {
        metric(&self.sets[0].0, "failed")
    }

    /// Writes down what was measured: of the set `default` under `eval/`, of others under `eval/NAME/`.
    pub fn measure(&self, metrics: &mut Metrics) {
        for (name, evaluation) in &self.sets {
            let mut set = |key: &str, value: Option<f64>| {
                if let Some(value) = value {
                    metrics.set(&metric(name, key), value);
                }
            };
            set("accuracy", evaluation.accuracy());
            set("accuracy_low", evaluation.interval().map(|(low, _)| low));
            set("accuracy_high", evaluation.interval().map(|(_, high)| high));
            if evaluation.samples > 1 {
                set(&format!("avg@{}", evaluation.samples), evaluation.accuracy());
                evaluation.pass_at().into_iter().for_each(|(k, pass)| set(&format!("pass@{k}"), Some(pass)));
            }
            set("reward", evaluation.reward());
            set("failed", Some(evaluation.failed() as f64));
            for (count, mean) in evaluation.counts() {
                set(&format!("environment/{count}"), Some(mean));
            }
        }
    }

    /// Tokens sampled.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.sets.iter().map(|(_, evaluation)| evaluation.tokens()).sum()
    }

    /// The answers as JSON objects, in the order of the sets, tasks and samples.
    pub fn answers(&self) -> impl Iterator<Item = serde_json::Value> + '_ {
        self.sets.iter().flat_map(|(set, evaluation)| {
            let samples = evaluation.samples.max(1);
            evaluation.answers.iter().enumerate().map(move |(place, answer)| {
                let (prompt, completion) = answer.token_ids.split_at(answer.prompt_length);
                serde_json::json!({
                    "set": set,
                    "task": answer.task.id.0,
                    "sample": place % samples,
                    "prompt": answer.task.prompt,
                    "prompt_ids": prompt,
                    "completion_ids": completion,
                    "text": answer.text,
                    "answer": answer.task.answer,
                    "correct": answer.score.correct,
                    "reward": answer.reward,
                })
            })
        })
    }

    /// The results, one line per set.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        self.sets.iter().map(|(name, evaluation)| prefix(name) + &line(evaluation)).collect()
    }

    /// The failures, one line per set and reward.
    #[must_use]
    pub fn failures(&self) -> Vec<String> {
        let of_set = |(name, evaluation): &(String, Evaluation)| -> Vec<String> {
            failures(evaluation).into_iter().map(|line| prefix(name) + &line).collect()
        };
        self.sets.iter().flat_map(of_set).collect()
    }

    /// Why an accuracy is no measure of the policy: no answer of a set could be judged.
    #[must_use]
    pub fn diagnosis(&self) -> Option<String> {
        let unjudged = |(_, evaluation): &&(String, Evaluation)| {
            evaluation.criterion.is_some() && !evaluation.answers.is_empty() && evaluation.judged() == 0
        };
        let (name, evaluation) = self.sets.iter().find(unjudged)?;
        let (reward, answers) = (evaluation.criterion.as_deref()?, evaluation.answers.len());
        let why = match evaluation.failures().get(reward) {
            Some(Failures { example, .. }) => format!("the first of its failures: {example}"),
            None => "it does not apply to any of them".to_owned(),
        };
        Some(format!(
            "{}accuracy 0, because reward `{reward}` could judge none of {answers} answers; {why}",
            prefix(name)
        ))
    }
}

fn prefix(set: &str) -> String {
    if set == DEFAULT_SET { String::new() } else { format!("{set}: ") }
}

fn metric(set: &str, key: &str) -> String {
    if set == DEFAULT_SET { format!("eval/{key}") } else { format!("eval/{set}/{key}") }
}

fn line(evaluation: &Evaluation) -> String {
    let (tasks, samples) = (evaluation.tasks(), evaluation.samples);
    let each = if samples > 1 { format!(", {samples} answers each") } else { String::new() };
    let mut line = match (evaluation.accuracy(), evaluation.interval()) {
        (Some(accuracy), Some((low, high))) => {
            format!("accuracy {accuracy:.4} on {tasks} tasks{each} (95 % interval {low:.3} to {high:.3})")
        }
        _ => format!(
            "no accuracy on {tasks} tasks{each}: nothing says which answers are correct (`eval.correct`)"
        ),
    };
    if samples > 1 && evaluation.criterion.is_some() {
        line += &format!(", avg@{samples} {:.4}", evaluation.accuracy().unwrap_or_default());
        for (k, pass) in evaluation.pass_at() {
            line += &format!(", pass@{k} {pass:.4}");
        }
    }
    if let Some(reward) = evaluation.reward() {
        line += &format!(", reward {reward:.4}");
    }
    let failed = evaluation.failed();
    if failed > 0 {
        line += &format!(", {failed} of {} answers failed", evaluation.answers.len());
    }
    line
}

fn failures(evaluation: &Evaluation) -> Vec<String> {
    let all = evaluation.answers.len();
    let failed = |(reward, Failures { answers, example }): (&str, Failures)| {
        let wrong = evaluation.criterion.as_deref() == Some(reward);
        let wrong = if wrong { ", which count as wrong" } else { "" };
        format!("reward `{reward}` failed for {answers} of {all} answers{wrong}; the first: {example}")
    };
    let mut lines: Vec<String> = evaluation.failures().into_iter().map(failed).collect();
    let failed = evaluation
        .criterion
        .as_deref()
        .map_or(0, |reward| evaluation.failures().get(reward).map_or(0, |failures| failures.answers));
    let silent = all - evaluation.judged() - failed;
    if let Some(reward) = evaluation.criterion.as_deref().filter(|_| silent > 0) {
        lines.push(format!(
            "reward `{reward}` does not apply to {silent} of {all} answers, which count as wrong"
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rollout::evaluate::EvaluatedAnswer;
    use serde_json::Map;
    use trajectory::{Component, Prompt, Score, Task, TaskId};

    use super::*;

    /// Answers with the value that `math` gives them; an error where it failed, nothing where it does not apply.
    fn evaluation(samples: usize, values: &[Result<Option<f64>, &str>]) -> Evaluation {
        let prompt = Prompt::Text(String::new());
        let task = Arc::new(Task { id: TaskId(0), prompt, answer: None, columns: Map::new() });
        let answer = |said: &Result<Option<f64>, &str>| {
            let (value, error) = (said.unwrap_or(None), said.err().map(str::to_owned));
            let math = Component { name: "math".to_owned(), value, error, ..Component::default() };
            let correct = Some(value.is_some_and(|value| value >= 1.0));
            let score = Score { total: value.map(|value| 2.0 * value), components: vec![math], correct };
            let reward = score.total;
            EvaluatedAnswer {
                task: Arc::clone(&task),
                text: "2".to_owned(),
                token_ids: vec![5, 6, 7],
                prompt_length: 2,
                tokens: 1,
                score,
                reward,
            }
        };
        let criterion = Some("math".to_owned());
        Evaluation { answers: values.iter().map(answer).collect(), samples, criterion }
    }

    fn evaluated(sets: Vec<(&str, Evaluation)>) -> Evaluated {
        Evaluated { sets: sets.into_iter().map(|(name, of)| (name.to_owned(), of)).collect() }
    }

    #[test]
    fn every_set_has_metrics_and_a_line_of_its_own() {
        let values = [Ok(Some(1.0)), Err("late"), Ok(None), Ok(Some(0.0))];
        let both = evaluated(vec![("default", evaluation(1, &values)), ("aime", evaluation(2, &values))]);
        let mut metrics = Metrics::default();
        both.measure(&mut metrics);
        for (name, expected) in [
            ("eval/accuracy", 0.25),
            ("eval/reward", 1.0),
            ("eval/failed", 1.0),
            ("eval/aime/accuracy", 0.25),
            ("eval/aime/avg@2", 0.25),
            ("eval/aime/pass@1", 0.25),
            ("eval/aime/pass@2", 0.5),
            ("eval/aime/failed", 1.0),
        ] {
            assert_eq!(metrics.get(name), Some(expected), "{name}");
        }
        assert_eq!(metrics.get("eval/pass@1"), None);
        assert!(metrics.get("eval/accuracy_low").unwrap() < 0.25);
        assert_eq!(
            both.lines(),
            [
                "accuracy 0.2500 on 4 tasks (95 % interval 0.046 to 0.699), reward 1.0000, 1 of 4 answers failed",
                "aime: accuracy 0.2500 on 2 tasks, 2 answers each (95 % interval 0.037 to 0.744), avg@2 0.2500, \
                 pass@1 0.2500, pass@2 0.5000, reward 1.0000, 1 of 4 answers failed"
            ]
        );
        assert_eq!(
            both.failures()[..2],
            [
                "reward `math` failed for 1 of 4 answers, which count as wrong; the first: late",
                "reward `math` does not apply to 1 of 4 answers, which count as wrong"
            ]
        );
        assert_eq!((both.failures().len(), both.diagnosis()), (4, None));
        let answers: Vec<_> = both.answers().collect();
        let place = |n: usize| (answers[n]["set"].clone(), answers[n]["sample"].clone());
        assert_eq!(
            (place(3), place(5), answers.len()),
            (("default".into(), 0.into()), ("aime".into(), 1.into()), 8)
        );
        assert_eq!(
            (&answers[0]["prompt_ids"], &answers[0]["completion_ids"]),
            (&[5, 6][..].into(), &[7][..].into())
        );
        assert_eq!((&answers[0]["correct"], &answers[1]["reward"]), (&true.into(), &serde_json::Value::Null));
        assert_eq!(both.accuracy(), Some(("eval/accuracy".to_owned(), 0.25)));
    }

    #[test]
    fn an_accuracy_without_judged_tasks_is_explained() {
        let failed = evaluated(vec![("test", evaluation(1, &[Err("gone"), Err("gone")]))]);
        assert_eq!(
            failed.diagnosis().unwrap(),
            "test: accuracy 0, because reward `math` could judge none of 2 answers; the first of its failures: gone"
        );
        let mut metrics = Metrics::default();
        failed.measure(&mut metrics);
        assert_eq!(
            (metrics.get("eval/test/accuracy"), metrics.get("eval/test/failed")),
            (Some(0.0), Some(2.0))
        );
        assert_eq!(metrics.get("eval/test/reward"), None);
        let silent = evaluated(vec![("default", evaluation(1, &[Ok(None)]))]);
        assert!(silent.diagnosis().unwrap().ends_with("it does not apply to any of them"));
        let undeclared = Evaluation { criterion: None, ..evaluation(1, &[Ok(Some(1.0))]) };
        let undeclared = evaluated(vec![("default", undeclared)]);
        let mut metrics = Metrics::default();
        undeclared.measure(&mut metrics);
        assert_eq!((metrics.get("eval/accuracy"), metrics.get("eval/reward")), (None, Some(2.0)));
        assert_eq!((undeclared.accuracy(), undeclared.diagnosis()), (None, None));
        assert!(undeclared.lines()[0].starts_with("no accuracy on 1 tasks: nothing says"));
    }
}
