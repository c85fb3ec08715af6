//! What other frameworks call the keys of a recipe, for people who come from there.
//!
//! Invariant: every name on the right is a key of the schema (tested). Foreign names are never accepted, only
//! explained.

use super::schema::RawRecipe;

/// Foreign name and ours, in the order of the schema.
pub(super) const NAMES: [(&str, &str); 81] = [
    ("model_name_or_path", "model.path"),
    ("torch_dtype", "model.dtype"),
    ("train_files", "data.train"),
    ("dataset_name", "data.train"),
    ("val_files", "data.eval"),
    ("prompt_key", "data.prompt_column"),
    ("filter_overlong_prompts", "data.overlong_prompts"),
    ("shuffle_dataset", "data.shuffle"),
    ("num_generations", "rollout.group_size"),
    ("n_samples", "rollout.group_size"),
    ("n", "rollout.group_size"),
    ("max_response_length", "rollout.max_completion_length"),
    ("max_new_tokens", "rollout.max_completion_length"),
    ("max_completion_tokens", "rollout.max_completion_length"),
    ("ignore_eos", "rollout.ignore_stop"),
    ("max_num_seqs", "rollout.max_running"),
    ("max_concurrent_rollouts", "rollout.max_running"),
    ("max_num_batched_tokens", "rollout.prefill_chunk"),
    ("filter_groups", "curation.dynamic_sampling"),
    ("max_num_gen_batches", "curation.max_refill_ratio"),
    ("train_batch_size", "buffer.batch_groups"),
    ("batch_size", "buffer.batch_groups"),
    ("max_head_offpolicyness", "buffer.max_staleness"),
    ("max_off_policy_steps", "buffer.max_staleness"),
    ("staleness_threshold", "buffer.max_staleness"),
    ("epsilon", "algorithm.clip_eps_low"),
    ("clip_ratio_low", "algorithm.clip_eps_low"),
    ("eps_clip", "algorithm.clip_eps_low"),
    ("epsilon_high", "algorithm.clip_eps_high"),
    ("clip_ratio_high", "algorithm.clip_eps_high"),
    ("behav_imp_weight_cap", "algorithm.behavior_weight_cap"),
    ("delta", "algorithm.dual_clip"),
    ("clip_ratio_c", "algorithm.dual_clip"),
    ("eps_clip_c", "algorithm.dual_clip"),
    ("use_decoupled_loss", "algorithm.proximal"),
    ("prox_logp_method", "algorithm.proximal"),
    ("bypass_mode", "algorithm.proximal"),
    ("rollout_correction", "algorithm.correction"),
    ("vllm_importance_sampling_mode", "algorithm.correction"),
    ("vllm_importance_sampling_cap", "algorithm.behavior_weight_cap"),
    ("rollout_is_threshold", "algorithm.behavior_weight_cap"),
    ("tis_clip", "algorithm.behavior_weight_cap"),
    ("use_tis", "algorithm.correction"),
    ("kl_loss_coef", "algorithm.kl_coef"),
    ("kl_ctl", "algorithm.kl_coef"),
    ("kl_loss_type", "algorithm.kl_estimator"),
    ("entropy_coeff", "algorithm.entropy_coef"),
    ("top_entropy_quantile", "algorithm.entropy_share"),
    ("adv_estimator", "algorithm.kind"),
    ("loss_mode", "algorithm.kind"),
    ("policy_loss_type", "algorithm.kind"),
    ("lam", "algorithm.lambda"),
    ("vf_coef", "critic.coef"),
    ("cliprange_value", "critic.value_clip"),
    ("critic_warmup", "critic.pretrain_steps"),
    ("label_smoothing", "supervised.smoothing"),
    ("norm_adv_by_std_in_grpo", "algorithm.scale_rewards"),
    ("loss_agg_mode", "algorithm.loss_agg"),
    ("loss_type", "algorithm.loss_agg"),
    ("optim", "trainer.optimizer"),
    ("lr", "trainer.learning_rate"),
    ("max_steps", "trainer.steps"),
    ("total_training_steps", "trainer.steps"),
    ("grad_clip", "trainer.max_grad_norm"),
    ("num_iterations", "trainer.epochs"),
    ("ppo_epochs", "trainer.epochs"),
    ("ppo_n_minibatches", "trainer.minibatches"),
    ("ppo_max_token_len_per_gpu", "trainer.microbatch_tokens"),
    ("lr_scheduler_type", "trainer.schedule"),
    ("lr_warmup_steps", "trainer.warmup_steps"),
    ("r", "lora.rank"),
    ("lora_r", "lora.rank"),
    ("lora_rank", "lora.rank"),
    ("lora_alpha", "lora.alpha"),
    ("lora_target_modules", "lora.target_modules"),
    ("optimizer_offload", "placement.optimizer"),
    // A key of earlier versions.
    ("pass_reward", "eval.correct.threshold"),
    ("test_freq", "eval.interval"),
    ("eval_steps", "eval.interval"),
    ("save_steps", "checkpoint.interval"),
    ("save_total_limit", "checkpoint.keep_last"),
];

/// Our name of a key that a peer calls `key`.
pub(super) fn our_name(key: &str) -> Option<&'static str> {
    NAMES.iter().find(|(foreign, _)| *foreign == key).map(|(_, ours)| *ours)
}

/// The path of a key of this name in some other section. Keys without a default are not found.
pub(super) fn key_elsewhere(key: &str) -> Option<String> {
    let schema = toml::Value::try_from(RawRecipe::default()).ok()?;
    let sections = schema.as_table()?.iter().filter_map(|(name, value)| Some((name, value.as_table()?)));
    sections.filter(|(_, section)| section.contains_key(key)).map(|(name, _)| format!("{name}.{key}")).next()
}
