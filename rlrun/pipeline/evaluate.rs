//! Evaluations of the policy on held-out tasks, before, between and after the training steps.

use model::ModelDirectory;
use rollout::Network;
use rollout::evaluate::EvaluationObserver;
use trainer::Learner;

use super::Run;
use crate::evaluation::{Evaluated, EvaluationRequest, Which};
use crate::failure::Failure;
use crate::prepare::{Prepared, prompt_text};
use crate::report::SamplePair;
use crate::sampler::network_of;
use crate::trainer_progress::TrainerPhase;

/// Pairs of answers shown at the end of a run.
const SHOWN: usize = 6;

impl Run<'_> {
    /// Evaluates the policy in f32, whatever the sampler's quantization; `None` without held-out tasks, or if it was stopped.
    pub(super) fn evaluate(
        &self,
        prepared: &Prepared,
        learner: &Learner,
        directory: &ModelDirectory,
    ) -> Result<Option<Evaluated>, Failure> {
        if !self.evaluates {
            return Ok(None);
        }
        self.evaluate_sets(Which::All, prepared, learner, directory)
    }

    /// [`Run::evaluate`] on some of the sets.
    pub(super) fn evaluate_sets(
        &self,
        which: Which,
        prepared: &Prepared,
        learner: &Learner,
        directory: &ModelDirectory,
    ) -> Result<Option<Evaluated>, Failure> {
        let sets = prepared.evaluation_sets(self.recipe, which);
        if sets.is_empty() || self.signals.stop_requested() {
            return Ok(None);
        }
        self.progress.enter(TrainerPhase::Evaluation);
        let answers: usize = sets.iter().map(|(_, set)| set.answers()).sum();
        let bar = self.report.bar("evaluation", answers as u64);
        let network = match learner.adapted() {
            Some(policy) => Network::adapted(&self.recipe.evaluate_on()?, &policy)?,
            None => network_of(&self.recipe.evaluate_on()?, learner.model(), learner)?,
        };
        let (stop, show) = (self.signals.stop_flag(), |judged| bar.set(judged, ""));
        let watch = EvaluationObserver { stop: &stop, progress: self.progress.evaluation(), show: &show };
        let (runtime, watch) = (&self.runtime, &watch);
        prepared.evaluate(self.recipe, EvaluationRequest { which, network, directory, runtime, watch })
    }

    /// Whether the evaluation after the last step is missing because the run was stopped.
    pub(super) fn is_cut_short(&self, prepared: &Prepared) -> bool {
        self.signals.stop_requested() && !prepared.evaluation_sets(self.recipe, Which::All).is_empty()
    }
}

/// Answers to the same tasks before and after training; those that changed come first.
pub(super) fn pairs(before: Option<&Evaluated>, after: Option<&Evaluated>) -> Vec<SamplePair> {
    let (Some(before), Some(after)) = (before, after) else { return Vec::new() };
    let (before, after) = (before.first(), after.first());
    let mut pairs: Vec<SamplePair> = before
        .answers
        .iter()
        .zip(&after.answers)
        .step_by(before.samples.max(1))
        .map(|(before, after)| SamplePair {
            prompt: prompt_text(&before.task),
            before: before.text.clone(),
            after: after.text.clone(),
        })
        .collect();
    pairs.sort_by_key(|pair| pair.before == pair.after);
    pairs.truncate(SHOWN);
    pairs
}
