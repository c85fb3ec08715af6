//! Which keys may change when a run is resumed.
//!
//! Invariant: every key of the schema stands in exactly one of the two lists (tested), so that a new key is decided on.
//! What may change is read at every start and takes effect from the next step on; what may not is what the run is, or the
//! form of what it has kept.

/// Whether a key may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// It takes effect from the next step on.
    MayChange,
    /// It stays, because of this.
    Stays(&'static str),
}

/// Sections with the keys that may change.
const MAY_CHANGE: &[(&str, &str)] = &[
    ("model", "dtype reduction"),
    ("data", "eval"),
    ("supervised", "beta smoothing margin"),
    (
        "rollout",
        "max_completion_length temperature top_p top_k min_p max_running prefill_chunk kv_cache_tokens on_update \
         quantization bitwise",
    ),
    (
        "rewards[]",
        "on_error timeout_s concurrency placement quantization batch_tokens threads python batch memory_mb sandbox cpu_s \
         max_output_kib max_processes url allow token_env retries max_answer_kib workers environment",
    ),
    (
        "curation",
        "dynamic_sampling max_refill_ratio max_pass_rate filter_after easy_pass_rate easy_share \
         hard_pass_rate hard_share shrink_above min_group_size success_pool",
    ),
    (
        "buffer",
        "max_staleness on_stale order reward_temperature max_uses dedup max_mib url token_file listen tls_cert tls_key \
         insecure",
    ),
    (
        "algorithm",
        "clip_eps_low clip_eps_high dual_clip importance_cap proximal correction behavior_weight_cap \
         behavior_weight_floor scale_rewards loss_agg kl_coef kl_estimator kl_in reference entropy_coef entropy_share \
         nll_coef gamma lambda length_adaptive beta attempts demonstration_gate",
    ),
    ("critic", "learning_rate coef value_clip lambda pretrain_steps"),
    (
        "trainer",
        "steps learning_rate schedule warmup_steps decay_steps weight_decay adam_beta1 adam_beta2 adam_eps momentum \
         max_grad_norm minibatches epochs microbatch_tokens recompute world leaves ranks zero collective",
    ),
    (
        "placement",
        "device trainer_device trainer_devices rollout_device rollout_devices optimizer processes rollout_workers restarts \
         policy rollout_threads trainer_threads reference critic memory_mib",
    ),
    ("eval", "interval tasks samples temperature"),
    ("eval.sets[]", "name path prompt_column answer_column prompt_template tasks samples"),
    ("checkpoint", "interval keep_last keep_every asynchronous"),
    ("weights", "transport dtype full_every compress"),
    ("log", "samples"),
    ("deadlines", "wait_s quiet_s heartbeat_s"),
];

const OF_RUN: &str = "it belongs to the directory of the run";
const OF_POLICY: &str = "the policy is that of the run's checkpoint";
const OF_TASKS: &str = "which task is next follows from how many groups there have been of these";
const OF_WARMUP: &str = "the warm-up is what training started from";
const OF_GROUPS: &str = "groups that wait in the buffer are of this form";
const OF_REWARD: &str = "trajectories that wait in the buffer were scored with it";
const OF_EXPERIMENT: &str = "it is what the run learns";
const OF_STATE: &str = "the checkpoint has the state of another form";

/// Why keys stay, sections, and their keys.
const STAYS: &[(&str, &str, &str)] = &[
    (OF_RUN, "", "extends name"),
    (OF_TASKS, "", "seed"),
    (OF_POLICY, "model", "path"),
    (
        OF_POLICY,
        "model.random",
        "architecture hidden_size intermediate_size num_layers num_heads num_kv_heads initializer_range",
    ),
    (
        OF_TASKS,
        "data",
        "train prompt_column answer_column prompt_template system_prompt chat max_prompt_length overlong_prompts shuffle",
    ),
    (OF_TASKS, "data.arithmetic", "max_operand train_tasks eval_tasks"),
    (OF_WARMUP, "warmup", "steps batch_tasks learning_rate wrong_share stop_accuracy"),
    (OF_EXPERIMENT, "supervised", "kind completion_column messages_column chosen_column rejected_column"),
    (OF_TASKS, "supervised", "batch"),
    (
        OF_GROUPS,
        "rollout",
        "group_size stop stop_token_ids ignore_stop interrupt_text interrupt_after_min interrupt_after_max",
    ),
    (
        OF_REWARD,
        "rewards[]",
        "kind name weight pattern compare method max_length cache strict on_unknown strict_box format_score ngram \
         max_penalty path scope dialect language command tests_column partial model system template temperature max_tokens \
         parse choices scale function parameters",
    ),
    (OF_REWARD, "eval.correct", "reward threshold"),
    (OF_GROUPS, "buffer", "batch_groups store"),
    (OF_EXPERIMENT, "algorithm", "kind demonstration_column"),
    (OF_STATE, "critic", "kind"),
    (OF_STATE, "trainer", "optimizer dion_rank_fraction"),
    (OF_STATE, "lora", "rank alpha target_modules path"),
];

/// The rule of a key, by its path without the places of lists; `None` if there is no such key.
pub(crate) fn rule(path: &str) -> Option<Rule> {
    all().into_iter().find(|(known, _)| known == path).map(|(_, rule)| rule)
}

/// Every key of both lists with its rule.
pub(in crate::recipe) fn all() -> Vec<(String, Rule)> {
    let path = |section: &str, key: &str| {
        if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") }
    };
    let may_change = MAY_CHANGE.iter().flat_map(|(section, keys)| {
        keys.split_whitespace().map(move |key| (path(section, key), Rule::MayChange))
    });
    let stays = STAYS.iter().flat_map(|(why, section, keys)| {
        keys.split_whitespace().map(move |key| (path(section, key), Rule::Stays(why)))
    });
    may_change.chain(stays).collect()
}
