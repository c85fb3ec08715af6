//! Supervised training: demonstrations (SFT), preferences (DPO, IPO) and reward models.
//!
//! Invariant: example `i` of step `s` is a function of seed, `s` and `i`, so that a resumed run ends with the same bits.

use environments::Demonstration;
use model::{Head, ModelDirectory};
use rollout::PromptSet;
use rollout::tasks::arithmetic::Sum;
use trainer::loss::preference::Preference;
use trainer::schedule::LearningRateSchedule;
use trainer::supervised::{DemonstrationReport, PairLoss, PairReport, imitate};
use trainer::{Frozen, Learner};
use trajectory::{GroupId, Sample, Task};

use crate::conversations::{self, ConversationCompletion};
use crate::demonstrations::{self, masked};
use crate::failure::Failure;
use crate::metrics::Metrics;
use crate::prepare::Prepared;
use crate::recipe::Recipe;
use crate::recipe::schema::Supervised;
use crate::recipe::words::SupervisedKind;

/// Pairs of one scoring pass.
const MEASURED: usize = 64;

/// The examples and the loss of a supervised run.
pub(crate) struct SupervisedTraining<'a> {
    config: &'a Supervised,
    directory: ModelDirectory,
    generated: bool,
    max_context: usize,
    schedule: LearningRateSchedule,
    pairs: Option<PairLoss>,
}

/// Which head a model needs to be trained as the recipe says.
pub(crate) fn head(recipe: &Recipe) -> Head {
    match &recipe.supervised {
        Some(supervised) if supervised.kind == SupervisedKind::RewardModel => Head::Value,
        _ => Head::Language,
    }
}

impl<'a> SupervisedTraining<'a> {
    /// Training of models like `directory`; `reference` is needed by preference losses.
    pub(crate) fn new(
        recipe: &'a Recipe,
        config: &'a Supervised,
        directory: ModelDirectory,
        reference: Option<Frozen>,
    ) -> Self {
        let Supervised { kind, beta, smoothing, margin, .. } = *config;
        let preference = match kind {
            SupervisedKind::Sft | SupervisedKind::RewardModel => None,
            SupervisedKind::Dpo => Some(Preference::Dpo { beta, smoothing }),
            SupervisedKind::Ipo => Some(Preference::Ipo { beta }),
        };
        let pairs = match (preference, reference.map(Box::new)) {
            (Some(preference), Some(reference)) => Some(PairLoss::Preference { preference, reference }),
            _ if kind == SupervisedKind::RewardModel => Some(PairLoss::Reward { margin }),
            _ => None,
        };
        Self {
            config,
            generated: recipe.data.source.is_generated(),
            max_context: directory.config().max_context(),
            schedule: recipe.schedule(),
            directory,
            pairs,
        }
    }

    /// Makes every example once, so that a missing column is found before the first step. Returns the number of training
    /// examples.
    ///
    /// # Errors
    /// A task without a completion, one that is too long, or none to compare.
    pub(crate) fn check(&self, prepared: &Prepared) -> Result<usize, Failure> {
        let mut examples = 0;
        for (task, _) in prepared.train.iter() {
            examples += usize::from(!self.example(task)?.is_empty());
        }
        if examples == 0 {
            let what = "no task has a right and a wrong answer that differ, so there is nothing to compare";
            return Err(Failure::Argument(what.to_owned()));
        }
        for (task, _) in prepared.eval.iter().flat_map(PromptSet::iter) {
            self.example(task)?;
        }
        Ok(examples)
    }

    /// Trains one step; `step` counts from 0. Returns the metrics and the number of trained tokens.
    ///
    /// # Errors
    /// A task without an example, or a step that fails.
    pub(crate) fn step(
        &self,
        step: u64,
        learner: &mut Learner,
        tasks: &PromptSet,
    ) -> Result<(Metrics, u64), Failure> {
        let batch = self.config.batch as u64;
        let mut samples = Vec::new();
        let mut place = step * batch;
        // Tasks whose two answers are equal are skipped.
        while samples.len() < self.config.batch * self.rows_per_example() {
            samples.extend(self.example(tasks.of(GroupId(place)).0)?);
            place += 1;
        }
        let rows: Vec<&Sample> = samples.iter().collect();
        let rate = self.schedule.at(step);
        let mut metrics = Metrics::default();
        metrics.set("step", (step + 1) as f64);
        let grad_norm = match &self.pairs {
            None => {
                let DemonstrationReport { grad_norm, loss } = imitate(learner, &rows, rate)?;
                metrics.set("loss/mean", loss);
                grad_norm
            }
            Some(pairs) => {
                let PairReport { loss, accuracy, margin, grad_norm } = pairs.step(learner, &rows, rate)?;
                metrics.set("loss/mean", loss);
                metrics.set("pairs/accuracy", accuracy);
                metrics.set("pairs/margin", margin);
                grad_norm
            }
        };
        metrics.set("optim/grad_norm", f64::from(grad_norm));
        metrics.set("optim/lr", f64::from(rate));
        Ok((metrics, rows.iter().map(|row| row.trained_tokens() as u64).sum()))
    }

    /// Share of held-out pairs whose chosen answer is scored higher.
    ///
    /// # Errors
    /// A task without an example.
    pub(crate) fn pair_accuracy(&self, learner: &Learner, tasks: &PromptSet) -> Result<Option<f64>, Failure> {
        let Some(pairs) = &self.pairs else { return Ok(None) };
        let mut samples = Vec::new();
        for (task, _) in tasks.iter() {
            samples.extend(self.example(task)?);
        }
        let (mut right, all) = (0.0, (samples.len() / 2) as f64);
        for chunk in samples.chunks(2 * MEASURED) {
            let rows: Vec<&Sample> = chunk.iter().collect();
            let pairs = pairs.measure(learner, &rows)?;
            right += (pairs.accuracy * (rows.len() / 2) as f64).round();
        }
        Ok((all > 0.0).then(|| right / all))
    }

    /// Mean negative log-likelihood of the held-out demonstrations, nats a token; `None` for pairs.
    ///
    /// # Errors
    /// A task without an example, or a pass that fails.
    pub(crate) fn loss(&self, learner: &Learner, tasks: &PromptSet) -> Result<Option<f64>, Failure> {
        if self.config.kind != SupervisedKind::Sft {
            return Ok(None);
        }
        let mut samples = Vec::new();
        for (task, _) in tasks.iter() {
            samples.extend(self.example(task)?);
        }
        let (mut sum, mut tokens) = (0.0, 0);
        for chunk in samples.chunks(2 * MEASURED) {
            let rows: Vec<&Sample> = chunk.iter().collect();
            for prediction in learner.score(&rows)?.iter().flatten() {
                sum -= f64::from(prediction.logprob);
                tokens += 1;
            }
        }
        Ok((tokens > 0).then(|| sum / f64::from(tokens)))
    }

    fn rows_per_example(&self) -> usize {
        if self.config.kind == SupervisedKind::Sft { 1 } else { 2 }
    }

    /// The rows of a task: a demonstration, or a chosen and a rejected completion; none if those two are equal.
    fn example(&self, task: &Task) -> Result<Vec<Sample>, Failure> {
        self.completions(task)?.iter().map(|completion| self.row(task, completion)).collect()
    }

    fn completions(&self, task: &Task) -> Result<Vec<ConversationCompletion>, Failure> {
        let Supervised { kind, completion_column, messages_column, chosen_column, rejected_column, .. } =
            self.config;
        let completions = match (kind, self.generated) {
            (SupervisedKind::Sft, true) => {
                vec![ConversationCompletion::Text(demonstrations::text(task, None)?)]
            }
            (SupervisedKind::Sft, false) => {
                let whole = || conversations::conversation(task, messages_column);
                let given = task.columns.contains_key(completion_column);
                match if given { None } else { whole()? } {
                    Some(conversation) => vec![conversation],
                    None => vec![conversations::completion(task, completion_column)?],
                }
            }
            (_, true) => {
                let sum = Sum::of(task)?;
                let text = |kind| ConversationCompletion::Text(sum.demonstration(kind));
                [Demonstration::Right, Demonstration::Wrong].map(text).to_vec()
            }
            (_, false) => [chosen_column, rejected_column]
                .map(|column| conversations::completion(task, column))
                .into_iter()
                .collect::<Result<_, _>>()?,
        };
        let same = matches!(&completions[..], [chosen, rejected] if chosen == rejected);
        Ok(if same { Vec::new() } else { completions })
    }

    fn row(&self, task: &Task, completion: &ConversationCompletion) -> Result<Sample, Failure> {
        let mut sample = completion.sample(&self.directory, task)?;
        if self.config.kind == SupervisedKind::RewardModel {
            // The value head scores the last token; one more token is appended that is never read.
            let mut token_ids = sample.token_ids().to_vec();
            token_ids.extend(sample.token_ids().last().copied());
            let tokens = token_ids.len();
            sample = masked(token_ids, tokens - 1)?;
        }
        let tokens = sample.token_ids().len();
        if tokens > self.max_context {
            return Err(Failure::Argument(format!(
                "task {} has {tokens} tokens with its completion, more than the {}; leave it out",
                task.id.0,
                self.directory.config().context_limit()
            )));
        }
        Ok(sample)
    }
}
