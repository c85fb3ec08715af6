//! The rules of the keys that let a run change a setting by what it measures.
//!
//! Invariant: a key that has nothing to choose from is refused.

use trainer::microbatch::LEAST_TOKENS;

use super::Recipe;
use super::ranges::Checker;
use super::words::{Ranks, StoreWord};

/// Refuses keys without a choice.
pub(super) fn check(recipe: &Recipe, checker: &mut Checker<'_>) {
    let Recipe { buffer, rollout, trainer, placement, .. } = recipe;
    if recipe.supervised.is_some() {
        for (path, given) in [
            ("trainer.adapt_microbatch", trainer.adapt_microbatch),
            ("placement.adapt_samplers", placement.adapt_samplers),
        ] {
            if given {
                let message = format!("`{path}` has no effect on training without sampling (`[supervised]`)");
                checker.report(path, message, "remove it");
            }
        }
        return;
    }
    if buffer.adapt_staleness && buffer.max_staleness == 0 {
        let message = "`buffer.adapt_staleness` has no effect with a bound of 0 (`buffer.max_staleness`)";
        let paths = ["buffer.adapt_staleness", "buffer.max_staleness"];
        checker.report_latest(&paths, message, "raise `buffer.max_staleness`, or remove it");
    }
    if rollout.adapt_running && rollout.max_running <= rollout.group_size {
        let message = format!(
            "`rollout.adapt_running` chooses between `rollout.group_size` and `rollout.max_running`, which are {} and {}",
            rollout.group_size, rollout.max_running
        );
        let paths = ["rollout.adapt_running", "rollout.max_running", "rollout.group_size"];
        checker.report_latest(&paths, message, "raise `rollout.max_running`, or remove it");
    }
    if placement.adapt_samplers {
        check_samplers(recipe, checker);
    }
    if trainer.adapt_microbatch && trainer.microbatch_tokens < 2 * LEAST_TOKENS {
        let message = format!(
            "`trainer.adapt_microbatch` chooses between {LEAST_TOKENS} and `trainer.microbatch_tokens`, which is {}",
            trainer.microbatch_tokens
        );
        let paths = ["trainer.adapt_microbatch", "trainer.microbatch_tokens"];
        checker.report_latest(&paths, message, "raise `trainer.microbatch_tokens`, or remove it");
    }
    if trainer.adapt_microbatch && trainer.ranks != Ranks::Threads {
        let message =
            "`trainer.adapt_microbatch` is for ranks that are threads: others plan a step by themselves";
        let paths = ["trainer.adapt_microbatch", "trainer.ranks"];
        checker.report_latest(&paths, message, "remove one of the two");
    }
}

fn check_samplers(recipe: &Recipe, checker: &mut Checker<'_>) {
    let path = "placement.adapt_samplers";
    let (processes, workers) = (recipe.placement.processes, recipe.rollout_workers());
    if recipe.buffer.store == StoreWord::Http {
        let message = "`placement.adapt_samplers` has no effect on a buffer that another process serves (`buffer.store`)";
        checker.report_latest(&[path, "buffer.store"], message, "remove it");
    } else if recipe.buffer.listen.is_none() && (!processes || workers < 2) {
        let message = format!(
            "`{path}` chooses how many samplers in processes of their own get slots, and this run has {}",
            if processes { "one" } else { "none" }
        );
        let help =
            "raise `placement.rollout_workers` with `placement.processes`, set `buffer.listen`, or remove it";
        checker.report_latest(&[path, "placement.rollout_workers", "placement.processes"], message, help);
    }
}
