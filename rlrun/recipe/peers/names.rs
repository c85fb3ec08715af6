//! Names in the configurations of verl, TRL, prime-rl, AReaL, OpenRLHF, slime, SkyRL and NeMo-RL, and what they are here.
//!
//! Invariant: every key is one of the schema, also those within notes (tested), and no name stands here twice. A name with a
//! dot stands for a key in a section; it wins over the bare name.

/// What peers write (lower-case, `_` for `-`, several names apart by spaces); our key, empty if there is none; what else is to
/// be said, or what there is in place of a key. In the order of our keys.
pub(crate) const PEERS: &[(&str, &str, &str)] = &[
    (
        "model_name_or_path model_name model_id pretrain pretrained hf_checkpoint model.name actor.path",
        "model.path",
        "",
    ),
    ("torch_dtype bf16 fp16", "model.dtype", ""),
    ("train_files dataset_name prompt_data dataset_path", "data.train", ""),
    ("val_files eval_prompt_data eval_dataset test_files valid_dataset", "data.eval", ""),
    ("prompt_key input_key", "data.prompt_column", ""),
    ("filter_overlong_prompts truncation", "data.overlong_prompts", ""),
    ("shuffle_dataset rollout_shuffle", "data.shuffle", ""),
    (
        "num_generations n_samples n n_samples_per_prompt rollouts_per_example num_generations_per_prompt \
         num_return_sequences_in_group samples_per_prompt",
        "rollout.group_size",
        "",
    ),
    (
        "max_response_length max_new_tokens max_completion_tokens rollout_max_response_len \
         generate_max_len max_tokens",
        "rollout.max_completion_length",
        "",
    ),
    ("ignore_eos", "rollout.ignore_stop", ""),
    (
        "max_num_seqs max_concurrent_rollouts max_inflight max_inflight_tasks per_device_eval_batch_size \
         max_running_requests sglang_server_concurrency num_parallel_generation_workers",
        "rollout.max_running",
        "",
    ),
    ("max_num_batched_tokens", "rollout.prefill_chunk", ""),
    (
        "filter_groups dynamic_sampling_filter_path over_sampling_batch_size dynamic_filtering",
        "curation.dynamic_sampling",
        "",
    ),
    ("max_num_gen_batches", "curation.max_refill_ratio", ""),
    ("train_batch_size batch_size", "buffer.batch_groups", ""),
    (
        "max_head_offpolicyness max_off_policy_steps staleness_threshold max_off_policy_threshold \
         max_staleness_steps max_trajectory_age_steps max_weight_staleness max_steps_off_policy \
         max_policy_age max_lag async_steps",
        "buffer.max_staleness",
        "",
    ),
    (
        "epsilon clip_ratio_low eps_clip eps_clip_low ratio_clip_min clip_lower epsilon_low dppo_mask_low",
        "algorithm.clip_eps_low",
        "",
    ),
    (
        "epsilon_high clip_ratio_high eps_clip_high eps_clip_higher ratio_clip_max clip_higher \
         dppo_mask_high",
        "algorithm.clip_eps_high",
        "",
    ),
    (
        "behav_imp_weight_cap vllm_importance_sampling_cap rollout_is_threshold tis_clip \
         vllm_importance_sampling_clip_max behave_weight_threshold",
        "algorithm.behavior_weight_cap",
        "",
    ),
    ("delta clip_ratio_c eps_clip_c c_clip ratio_clip_c", "algorithm.dual_clip", ""),
    ("use_decoupled_loss prox_logp_method bypass_mode", "algorithm.proximal", ""),
    (
        "rollout_correction vllm_importance_sampling_mode use_tis rollout_is rollout_rs \
         rejection_sampling truncated_importance_sampling_type vllm_importance_sampling_correction \
         use_importance_sampling_correction is_correction",
        "algorithm.correction",
        "",
    ),
    (
        "kl_loss_coef kl_ctl beta init_kl_coef kl_beta kl_penalty_coef reference_policy_kl_penalty \
         kl.init_coef kl_ctrl.kl_coef",
        "algorithm.kl_coef",
        "",
    ),
    ("kl_loss_type kl_penalty kl.estimator kl_type", "algorithm.kl_estimator", ""),
    ("entropy_coeff entropy_loss_coef", "algorithm.entropy_coef", ""),
    ("top_entropy_quantile", "algorithm.entropy_share", ""),
    (
        "adv_estimator loss_mode policy_loss_type advantage_estimator advantage.estimator algo.type \
         loss_fn policy_loss importance_sampling_level",
        "algorithm.kind",
        "",
    ),
    ("lam lambd gae_lambda", "algorithm.lambda", ""),
    ("vf_coef", "critic.coef", ""),
    ("cliprange_value", "critic.value_clip", ""),
    ("critic_warmup", "critic.pretrain_steps", ""),
    ("label_smoothing", "supervised.smoothing", ""),
    ("norm_adv_by_std_in_grpo divide_advantage_by_std normalize_rewards", "algorithm.scale_rewards", ""),
    ("loss_agg_mode loss_type loss_reduction calculate_per_token_loss", "algorithm.loss_agg", ""),
    ("optim", "trainer.optimizer", ""),
    ("lr actor_learning_rate", "trainer.learning_rate", ""),
    (
        "max_steps total_training_steps num_rollout max_num_steps total_steps num_training_steps",
        "trainer.steps",
        "",
    ),
    ("grad_clip max_norm clip_grad gradient_clipping", "trainer.max_grad_norm", ""),
    ("moe_router_bias_update_rate", "trainer.router_correction_rate", ""),
    ("num_iterations ppo_epochs max_epochs update_epochs", "trainer.epochs", ""),
    ("ppo_n_minibatches", "trainer.minibatches", ""),
    ("ppo_max_token_len_per_gpu", "trainer.microbatch_tokens", ""),
    ("lr_scheduler_type lr_scheduler lr_decay_style scheduler_type", "trainer.schedule", ""),
    ("lr_warmup_steps", "trainer.warmup_steps", ""),
    ("r lora_r lora_rank", "lora.rank", ""),
    ("lora_alpha", "lora.alpha", ""),
    ("lora_target_modules", "lora.target_modules", ""),
    ("optimizer_offload adam_offload offload_optimizer cpu_offload", "placement.optimizer", ""),
    (
        "ref_reward_offload ref.fsdp_config.param_offload ref.fsdp_config.cpu_offload",
        "placement.reference_weights",
        "",
    ),
    (
        "test_freq eval_steps eval_interval eval_strategy evaluator.freq_steps val_period eval_every",
        "eval.interval",
        "",
    ),
    (
        "save_steps save_freq save_interval save_strategy saver.freq_steps ckpt_interval ckpt.interval \
         save_every",
        "checkpoint.interval",
        "",
    ),
    ("save_total_limit max_actor_ckpt_to_keep ckpt.keep_last max_ckpt_num", "checkpoint.keep_last", ""),
    ("run_name experiment_name trial_name", "name", ""),
    ("label_key answer_key", "data.answer_column", ""),
    ("apply_chat_template", "data.chat", ""),
    ("prompt_max_len rollout_max_prompt_len", "data.max_prompt_length", ""),
    (
        "max_model_len vllm_max_model_length seq_len max_length max_seq_len max_seq_length \
         max_total_sequence_length max_len",
        "data.max_prompt_length",
        "and `rollout.max_completion_length`: prompt and completion are bounded by themselves",
    ),
    ("rollout_temperature", "rollout.temperature", ""),
    ("rollout_top_p", "rollout.top_p", ""),
    ("rollout_top_k", "rollout.top_k", ""),
    ("rollout_stop stop_strings", "rollout.stop", ""),
    (
        "gpu_memory_utilization vllm_gpu_memory_utilization mem_fraction_static \
         sglang_mem_fraction_static",
        "rollout.kv_cache_tokens",
        "in tokens, not as a share of the memory",
    ),
    (
        "partial_rollout partial_rollout_enable in_flight_weight_updates inflight_updates",
        "rollout.on_update",
        "",
    ),
    (
        "hybrid_engine colocate colocate_all_models free_cache_engine vllm_enable_sleep_mode \
         enable_sleep_mode",
        "placement.policy",
        "",
    ),
    (
        "n_gpus_per_node nnodes num_gpus num_train_gpus actor_num_gpus_per_node",
        "trainer.world",
        "with `placement.trainer_devices` and `placement.rollout_devices`",
    ),
    (
        "tensor_model_parallel_size",
        "trainer.parallel.tensor",
        "with `model.reduction = \"tree\"`; a sampler's is `rollout.tensor`",
    ),
    (
        "ulysses_sequence_parallel_size context_parallel_size sequence_parallel_size cp_size cp",
        "trainer.parallel.context",
        "",
    ),
    ("pipeline_model_parallel_size pp pp_size pipeline_parallel_size", "trainer.parallel.pipeline", ""),
    (
        "ep expert_model_parallel_size expert_parallel_size",
        "trainer.parallel.expert",
        "a divisor of the ranks that divide data and tokens",
    ),
    ("cp_style", "trainer.parallel.exchange", "`heads` is Ulysses, `keys` gathers keys and values"),
    ("num_infer_gpus rollout_num_gpus vllm_num_engines", "placement.rollout_workers", ""),
    ("zero_stage", "trainer.zero", ""),
    (
        "rollout_batch_size global_batch_size generation_batch_size consumer_batch_size \
         num_prompts_per_step groups_per_batch train.batch_size orchestrator.batch_size",
        "buffer.batch_groups",
        "counted in groups of `rollout.group_size` completions",
    ),
    (
        "per_device_train_batch_size",
        "buffer.batch_groups",
        "counted in groups of `rollout.group_size` completions; `trainer.microbatch_tokens` bounds what \
         is in memory at a time, and without sampling it is `supervised.batch`",
    ),
    (
        "gradient_accumulation_steps",
        "trainer.microbatch_tokens",
        "a batch (`buffer.batch_groups`) is cut into `trainer.leaves` parts and these into micro-batches of so many \
         tokens, and their gradients are accumulated",
    ),
    (
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu log_prob_micro_batch_size_per_gpu \
         micro_train_batch_size micro_rollout_batch_size micro_batch_size use_dynamic_bsz \
         max_tokens_per_gpu token_budget",
        "trainer.microbatch_tokens",
        "counted in tokens, packed",
    ),
    (
        "ppo_mini_batch_size policy_mini_batch_size steps_per_generation num_steps_per_rollout",
        "trainer.minibatches",
        "as the number of updates that a batch is split into",
    ),
    (
        "async_enable async_train async_queue_size async_generation_ratio trainer_mode async_mode",
        "buffer.max_staleness",
        "in policy versions; 0 is synchronous",
    ),
    ("max_off_policy_strategy async_unused_samples_handler", "buffer.on_stale", ""),
    ("use_kl_loss", "algorithm.kl_coef", "above 0 it is on"),
    ("use_kl_in_reward", "algorithm.kl_in", "with `algorithm.kl_coef` above 0"),
    ("clip_ratio cliprange clip_range pg_clip", "algorithm.clip_eps_low", "and `algorithm.clip_eps_high`"),
    ("tis_clip_low", "algorithm.behavior_weight_floor", ""),
    ("use_leave_one_out_baseline", "algorithm.kind", "\"rloo\" has that baseline"),
    ("discount", "algorithm.gamma", ""),
    (
        "ref_model ref_load ref.path",
        "algorithm.reference",
        "without it the policy that training started from",
    ),
    ("critic_learning_rate critic.optim.lr critic.lr", "critic.learning_rate", ""),
    (
        "total_epochs num_train_epochs num_epochs num_episodes total_train_epochs",
        "trainer.steps",
        "a run is counted in steps, and tasks come again when all had their turn",
    ),
    ("adam_epsilon", "trainer.adam_eps", ""),
    ("betas adam_betas", "trainer.adam_beta1", "and `trainer.adam_beta2`"),
    (
        "warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio lr_warmup_fraction",
        "trainer.warmup_steps",
        "in steps",
    ),
    (
        "gradient_checkpointing enable_gradient_checkpointing activation_checkpointing \
         recompute_granularity",
        "trainer.recompute",
        "",
    ),
    ("eval.n val_kwargs.n n_samples_per_eval_prompt", "eval.samples", ""),
    ("val_kwargs.temperature", "eval.temperature", ""),
    ("pass_reward", "eval.correct.threshold", "it was a key of `[curation]`"),
    ("ckpt.keep_interval", "checkpoint.keep_every", ""),
    (
        "weight_broadcast.type weight_update_mode update_weight_transport weight_sync_backend",
        "weights.transport",
        "",
    ),
    (
        "report_to logger logging_steps project_name stats_logger swanlab mlflow",
        "",
        "nothing is uploaded: every metric of a step is in `metrics.jsonl` of the run directory, and in event files of TensorBoard",
    ),
    ("tensorboard", "log.tensorboard", ""),
    ("use_wandb wandb wandb_project", "log.wandb", "`offline` writes files that `wandb sync` uploads"),
    (
        "push_to_hub hub_model_id",
        "",
        "nothing is uploaded: `rlrun export RUN --out DIR` writes a Hugging Face directory",
    ),
    (
        "resume resume_mode resume_from_checkpoint resume_from_path load_checkpoint",
        "",
        "go on with a run by `rlrun resume RUN`",
    ),
    (
        "output_dir output_path default_local_dir fileroot save_path ckpt_path",
        "",
        "`--run-dir DIR` says where the run is written",
    ),
    ("use_vllm vllm sglang inference", "", "rlrun samples by itself: `[rollout]` says how"),
    (
        "vllm_mode vllm_server_host vllm_server_base_url",
        "",
        "rlrun samples by itself: `placement.policy` says whether sampler and trainer take turns",
    ),
    (
        "tensor_parallel_size vllm_tensor_parallel_size rollout.tensor_model_parallel_size",
        "rollout.tensor",
        "with `model.reduction = \"tree\"`",
    ),
    (
        "fsdp fsdp_config deepspeed megatron",
        "",
        "`trainer.world` and `trainer.zero` say how many ranks train and what they share",
    ),
    ("ray ray_init num_nodes", "", "rlrun starts its own processes: `placement.processes`"),
    (
        "sync_ref_model ref_model_sync_steps",
        "",
        "the reference does not move: it is `algorithm.reference`, or the policy that training started \
         from",
    ),
    ("peft_config use_peft use_lora peft", "", "write a section `[lora]`"),
    ("lora_dropout", "", "LoRA is trained without dropout: leave it out"),
    (
        "reward_funcs reward_fn reward_function custom_reward_function custom_reward_function.path \
         compute_score custom_rm_path rm_type reward",
        "",
        "rewards are sections `[[rewards]]`; `kind = \"python\"` with `path` takes a function as it is",
    ),
    (
        "reward_weights",
        "",
        "every section `[[rewards]]` has a `weight`; `--set rewards.NAME.weight=0.5` changes one",
    ),
    (
        "remote_rm_url reward.remote_url reward_model reward_model_path reward_pretrain",
        "",
        "a reward model is a section `[[rewards]]` with `kind = \"model\"` and `path`, a server one with \
         `kind = \"http\"` and `url`",
    ),
    ("val_before_train eval_on_start", "", "tasks are evaluated before the first step in any case"),
    ("save_hf_ckpt", "", "every checkpoint has a directory `model/` in Hugging Face format"),
    ("update_weights_interval weight_sync_steps parameter_sync_step", "", "every step publishes a version"),
    (
        "actor_rollout_ref",
        "",
        "verl's `actor` is `[algorithm]` and `[trainer]` here, its `rollout` `[rollout]`, its `ref` \
         `algorithm.reference`",
    ),
    ("actor", "", "the policy's loss is `[algorithm]`, its updates `[trainer]`"),
    ("ref", "", "the reference is `algorithm.reference`"),
    ("gconfig sampling_params", "", "how completions are sampled is `[rollout]`"),
    (
        "orchestrator",
        "",
        "batches and staleness are `[buffer]`, sampling is `[rollout]`, evaluations are `[eval]`",
    ),
    ("grpo", "", "`algorithm.kind = \"grpo\"`; its keys are in `[algorithm]`"),
    ("async_training", "", "asynchrony is `buffer.max_staleness`"),
    ("saver ckpt", "", "checkpoints are `[checkpoint]`"),
    ("evaluator", "", "evaluations are `[eval]`"),
    ("optim_args", "", "the optimizer is in `[trainer]`"),
];

/// Words that peers have for values: our key, their word, ours.
pub(crate) const WORDS: &[(&str, &str, &str)] = &[
    ("algorithm.kind", "gae", "ppo"),
    ("algorithm.kind", "reinforce++", "reinforce_pp"),
    ("algorithm.kind", "reinforce_plus_plus", "reinforce_pp"),
    ("algorithm.kind", "reinforce++_baseline", "reinforce_pp_baseline"),
    ("algorithm.kind", "reinforce_plus_plus_baseline", "reinforce_pp_baseline"),
    ("algorithm.kind", "group_norm", "grpo"),
    ("algorithm.kind", "grpo_passk", "pass_at_k"),
    ("algorithm.kind", "geo_mean", "gmpo"),
    ("algorithm.kind", "dppo_tv", "dppo"),
    ("algorithm.kind", "opd", "distill"),
    ("algorithm.correction", "tis", "token_truncate"),
    ("algorithm.correction", "icepop", "token_mask"),
    ("algorithm.correction", "seq-mask-tis", "sequence_mask"),
    ("algorithm.kl_estimator", "low_var_kl", "k3"),
    ("algorithm.kl_estimator", "kl", "k1"),
    ("algorithm.kl_estimator", "mse", "k2"),
    ("algorithm.loss_agg", "grpo", "sequence_mean"),
    ("algorithm.loss_agg", "dapo", "token_mean"),
    ("algorithm.loss_agg", "bnpo", "token_mean"),
    ("algorithm.loss_agg", "dr_grpo", "constant"),
    ("algorithm.loss_agg", "seq-mean-token-mean", "sequence_mean"),
    ("algorithm.loss_agg", "seq-mean-token-sum", "sequence_sum"),
    ("algorithm.loss_agg", "seq-mean-token-sum-norm", "constant"),
    ("trainer.optimizer", "adamw_torch", "adamw"),
    ("trainer.optimizer", "adamw_torch_fused", "adamw"),
    ("trainer.optimizer", "adamw_bnb_8bit", "adamw8bit"),
    ("trainer.optimizer", "paged_adamw_8bit", "adamw8bit"),
    ("trainer.schedule", "constant_with_warmup", "constant"),
    ("trainer.schedule", "warmup_stable_decay", "wsd"),
];
