//! Names of other frameworks, as their users type them.

use std::collections::BTreeSet;

use super::*;
use crate::recipe::manual;
use crate::recipe::peers::{WORDS, peers};

/// Keys within backticks; sections are in brackets there, files have a slash or an ending.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2).filter(|name| name.contains('.') && !name.contains([' ', '=']))
}

#[test]
fn names_of_peers_lead_to_keys_that_exist() {
    let known: BTreeSet<&str> = manual::keys().iter().map(|key| key.path.as_str()).collect();
    let mut seen = BTreeSet::new();
    for peer in peers() {
        assert!(peer.key.is_empty() || known.contains(peer.key), "{peer:?}");
        assert!(!peer.key.is_empty() || !peer.note.is_empty(), "{peer:?} says nothing");
        for key in quoted(peer.note).filter(|name| *name != "metrics.jsonl") {
            assert!(known.contains(key), "{peer:?}: {key}");
        }
        for name in peer.names() {
            assert!(seen.insert(name), "{name} stands there twice");
            assert!(!known.contains(name), "{name} is a key of ours");
        }
    }
    for (key, theirs, ours) in WORDS {
        let key = manual::keys().iter().find(|known| known.path == *key).unwrap();
        let manual::Kind::Words(words) = &key.kind else { panic!("{} takes no words", key.path) };
        assert!(words.iter().any(|(word, _)| word == ours), "{theirs}: {ours}");
        assert!(words.iter().all(|(word, _)| word != theirs), "{theirs} is a word of ours");
    }
}

#[test]
fn foreign_keys_are_explained_in_any_section() {
    for (set, hint) in [
        ("algorithm.adv_estimator=grpo", "rlrun calls it `algorithm.kind`"),
        ("trainer.per_device_train_batch_size=8", "`buffer.batch_groups`, counted in groups"),
        ("per_device_train_batch_size=8", "`buffer.batch_groups`, counted in groups"),
        ("trainer.gradient_accumulation_steps=4", "rlrun calls it `trainer.microbatch_tokens`"),
        ("trainer.beta=0.04", "rlrun calls it `algorithm.kl_coef`"),
        ("report_to=wandb", "nothing is uploaded: every metric of a step is in `metrics.jsonl`"),
        ("log.report_to=[\"wandb\"]", "nothing is uploaded"),
        ("eval.n=8", "rlrun calls it `eval.samples`"),
        ("rollout.n=8", "rlrun calls it `rollout.group_size`"),
        ("actor_rollout_ref.rollout.n=8", "`actor_rollout_ref.rollout.n` is `rollout.group_size`"),
        (
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "`actor_rollout_ref.actor.optim.lr` is `trainer.learning_rate`",
        ),
        ("actor_rollout_ref.actor={clip_ratio=0.2}", "verl's `actor` is `[algorithm]`"),
        ("critic.optim.lr=1e-5", "`critic.optim.lr` is `critic.learning_rate`"),
        ("gconfig.n_samples=4", "`gconfig.n_samples` is `rollout.group_size`"),
        (
            "orchestrator.max_off_policy_steps=2",
            "`orchestrator.max_off_policy_steps` is `buffer.max_staleness`",
        ),
        ("rollout-batch-size=8", "rlrun calls it `buffer.batch_groups`"),
        ("reward_funcs=[\"f\"]", "`kind = \"python\"`"),
        ("trainer.Learning_Rate=1", ""),
        ("rollout.clip_eps_low=1", "there is `algorithm.clip_eps_low`"),
        ("top_p=0.9", "there is `rollout.top_p`"),
    ] {
        let shown = Case::new(MINIMAL).load(&[set], &[]);
        if hint.is_empty() {
            assert!(shown.is_ok(), "{set}");
            continue;
        }
        let shown = shown.unwrap_err()[0].to_string();
        assert!(shown.starts_with("error: unknown key `") && shown.contains(hint), "{set}: {shown}");
    }
}

#[test]
fn beta_of_trl_is_not_that_of_trajectory_balance() {
    let case = Case::new(MINIMAL);
    let shown = case.errors(&["algorithm.beta=0.04"], &[]);
    assert!(shown.contains("has no effect") && shown.contains("`algorithm.kl_coef`"), "{shown}");
    case.load(&["algorithm.kind=tb", "algorithm.beta=0.04"], &[]).unwrap();
}

#[test]
fn words_are_found_in_any_case_and_in_those_of_peers() {
    for (set, near) in [
        ("algorithm.kind=GRPO", "grpo"),
        ("algorithm.kind=Dr.GRPO", "dr_grpo"),
        ("algorithm.kind=reinforce++", "reinforce_pp"),
        ("algorithm.kl_estimator=low_var_kl", "k3"),
        ("algorithm.loss_agg=token-mean", "token_mean"),
        ("algorithm.loss_agg=seq-mean-token-mean", "sequence_mean"),
        ("trainer.optimizer=adamw_torch", "adamw"),
        ("trainer.schedule=Cosine", "cosine"),
        ("rollout.on_update=KEEP", "keep"),
        ("rewards[0].kind=GSM8K", "gsm8k"),
        ("rewards[0].on_error=Zero", "zero"),
    ] {
        let shown = Case::new(MINIMAL).errors(&[set], &[]);
        assert!(shown.contains(&format!("did you mean \"{near}\"?")), "{set}: {shown}");
    }
    for (set, help) in [
        ("data.shuffle=True", "write true, without quotes"),
        ("trainer.learning_rate=\"1e-6\"", "write 1e-6, without quotes"),
    ] {
        let shown = Case::new(MINIMAL).errors(&[set], &[]);
        assert!(shown.contains(help), "{set}: {shown}");
    }
}
