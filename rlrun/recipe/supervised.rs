//! The rules of `[supervised]`: training without sampling.
//!
//! Invariant: with this section, sections that say how to sample, to wait and to compare are errors, because nothing would
//! come of them.

use super::ranges::{Checker, NOT_NEGATIVE, POSITIVE, SHARE};
use super::schema::{RawRecipe, Supervised};
use super::words::SupervisedKind;

/// Sections that say nothing to training without sampling.
pub(super) const WITHOUT_EFFECT: [&str; 7] = [
    "environment",
    "buffer",
    "algorithm",
    "critic",
    "curation",
    "placement.rollout_threads",
    "placement.policy",
];

impl Supervised {
    /// Keys that say nothing to the kind.
    pub(super) fn keys_without_effect(&self) -> &'static [&'static str] {
        match self.kind {
            SupervisedKind::Sft => &["chosen_column", "rejected_column", "beta", "smoothing", "margin"],
            SupervisedKind::Dpo => &["completion_column", "messages_column", "margin"],
            SupervisedKind::Ipo => &["completion_column", "messages_column", "smoothing", "margin"],
            SupervisedKind::RewardModel => &["completion_column", "messages_column", "beta", "smoothing"],
        }
    }
}

/// Checks the section, and that nothing else is said that it leaves without effect.
pub(super) fn check(raw: &RawRecipe, generated: bool, checker: &mut Checker<'_>) {
    let Some(supervised) = &raw.supervised else { return };
    checker.number("supervised.beta", supervised.beta, POSITIVE);
    checker.number("supervised.smoothing", supervised.smoothing, SHARE);
    checker.number("supervised.margin", supervised.margin, NOT_NEGATIVE);
    checker.at_least_one("supervised.batch", supervised.batch);
    let kind = supervised.kind.as_str();
    for key in supervised.keys_without_effect() {
        let path = format!("supervised.{key}");
        if checker.given(&path) {
            let message = format!("`{path}` has no effect with `supervised.kind = \"{kind}\"`");
            checker.report(&path, message, "remove it");
        }
    }
    if generated {
        for key in ["completion_column", "messages_column", "chosen_column", "rejected_column"] {
            let path = format!("supervised.{key}");
            if checker.given(&path) {
                let message = format!("`{path}` has no effect on the generated tasks of `data.arithmetic`");
                checker.report(&path, message, "remove it, or name files in `data.train`");
            }
        }
    }
    let further = ["trainer.minibatches", "trainer.epochs", "trainer.router_correction_rate"];
    for path in WITHOUT_EFFECT.iter().chain(&further) {
        if let Some(path) = checker.first_given(path) {
            let message = format!("`{path}` has no effect on training without sampling (`[supervised]`)");
            checker.report(&path, message, "remove it");
        }
    }
    if supervised.kind == SupervisedKind::RewardModel && !raw.rewards.is_empty() {
        let message = "a reward model is trained on pairs: `[[rewards]]` has no effect";
        checker.report("rewards[0].kind", message, "remove it");
    }
    if supervised.kind == SupervisedKind::RewardModel && raw.lora.is_some() {
        let message = "`[lora]` would freeze the new head of the reward model";
        checker.report("lora.rank", message, "remove the section");
    }
}
