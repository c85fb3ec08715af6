//! Who decides each key of a recipe for a worker that joins: the run, or the operator of the worker's machine.
//!
//! Invariant: a key decides nothing on a worker unless it is listed here. What the run decides is data: numbers, words that
//! choose among things of this program, texts. What names a file, code, a program, an address or a variable of the
//! environment is the operator's, and so is what takes a protection away. A key of the schema that is not listed fails a
//! test.

/// Who decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    /// The run: it is data.
    Run,
    /// The operator of this machine.
    Operator,
    /// A worker has no use for it; it is taken out.
    Neither,
}

/// Sections and what the run decides of them. Lists of tables are written with `[]`.
const RUN: [(&str, &[&str]); 12] = [
    ("", &["name", "seed"]),
    ("model", &["dtype", "reduction"]),
    (
        "data",
        &[
            "prompt_column",
            "answer_column",
            "prompt_template",
            "system_prompt",
            "chat",
            "max_prompt_length",
            "overlong_prompts",
            "shuffle",
        ],
    ),
    ("data.arithmetic", &["max_operand", "train_tasks", "eval_tasks"]),
    (
        "rollout",
        &[
            "group_size",
            "max_completion_length",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "stop",
            "stop_token_ids",
            "ignore_stop",
            "max_running",
            "prefill_chunk",
            "kv_cache_tokens",
            "interrupt_text",
            "interrupt_after_min",
            "interrupt_after_max",
            "on_update",
            "quantization",
            "bitwise",
        ],
    ),
    (
        "rewards[]",
        &[
            "kind",
            "name",
            "weight",
            "on_error",
            "timeout_s",
            "concurrency",
            "pattern",
            "compare",
            "method",
            "max_length",
            "cache",
            "strict",
            "strict_box",
            "format_score",
            "ngram",
            "max_penalty",
            "placement",
            "quantization",
            "batch_tokens",
            "threads",
            "scope",
            "dialect",
            "batch",
            "memory_mb",
            "language",
            "tests_column",
            "cpu_s",
            "max_output_kib",
            "max_processes",
            "partial",
            "retries",
            "max_answer_kib",
            "model",
            "system",
            "template",
            "temperature",
            "max_tokens",
            "parse",
            "choices",
            "scale",
            "workers",
        ],
    ),
    (
        "buffer",
        &[
            "batch_groups",
            "max_staleness",
            "on_stale",
            "order",
            "reward_temperature",
            "max_uses",
            "dedup",
            "max_mib",
        ],
    ),
    (
        "algorithm",
        &[
            "kind",
            "clip_eps_low",
            "clip_eps_high",
            "dual_clip",
            "importance_cap",
            "proximal",
            "correction",
            "behavior_weight_cap",
            "behavior_weight_floor",
            "scale_rewards",
            "loss_agg",
            "kl_coef",
            "kl_estimator",
            "kl_in",
            "entropy_coef",
            "entropy_share",
            "nll_coef",
            "gamma",
            "lambda",
            "length_adaptive",
            "beta",
            "attempts",
            "demonstration_gate",
            "demonstration_column",
        ],
    ),
    (
        "trainer",
        &[
            "steps",
            "optimizer",
            "learning_rate",
            "schedule",
            "warmup_steps",
            "decay_steps",
            "weight_decay",
            "adam_beta1",
            "adam_beta2",
            "adam_eps",
            "momentum",
            "dion_rank_fraction",
            "max_grad_norm",
            "minibatches",
            "epochs",
            "microbatch_tokens",
            "recompute",
            "world",
            "leaves",
            "zero",
            "collective",
        ],
    ),
    (
        "placement",
        &[
            "device",
            "trainer_device",
            "trainer_devices",
            "rollout_device",
            "rollout_devices",
            "optimizer",
            "processes",
            "rollout_workers",
            "restarts",
            "policy",
            "rollout_threads",
            "trainer_threads",
            "reference",
            "critic",
            "memory_mib",
        ],
    ),
    ("weights", &["transport", "dtype", "full_every", "compress"]),
    ("deadlines", &["wait_s", "quiet_s", "heartbeat_s"]),
];

/// What only the operator decides, with all that is under it.
const OPERATOR: [&str; 12] = [
    "extends",
    "data.train",
    "rewards[].path",
    "rewards[].function",
    "rewards[].python",
    "rewards[].command",
    "rewards[].sandbox",
    "rewards[].url",
    "rewards[].allow",
    "rewards[].token_env",
    "rewards[].environment",
    "rewards[].parameters",
];

/// The key whose word decides whether it is data: one of its words runs Python.
pub(super) const ON_UNKNOWN: (&str, &str) = ("rewards[].on_unknown", "math_verify");

/// What a worker has no use for, with all that is under it.
const NEITHER: [&str; 20] = [
    // A worker gets the model's files from the run, and its weights; where the run has them is its own affair.
    "model.path",
    "model.random",
    // It trains nothing, and evaluates nothing.
    "algorithm.reference",
    "checkpoint",
    "critic",
    "curation",
    "data.eval",
    "eval",
    "log",
    "lora",
    "supervised",
    "trainer.ranks",
    "warmup",
    // How the run serves itself.
    "buffer.store",
    "buffer.url",
    "buffer.token_file",
    "buffer.listen",
    "buffer.tls_cert",
    "buffer.tls_key",
    "buffer.insecure",
];

/// Who decides the key `path`, such as `rewards[].weight`; `None` for one that is not listed, or for a section whose keys
/// differ.
pub(super) fn by(path: &str) -> Option<By> {
    let within = |above: &&&str| {
        path.strip_prefix(**above).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    if OPERATOR.iter().any(|above| within(&above)) {
        return Some(By::Operator);
    }
    if NEITHER.iter().any(|above| within(&above)) {
        return Some(By::Neither);
    }
    let (section, key) = path.rsplit_once('.').unwrap_or(("", path));
    let of_run = RUN.iter().any(|(of, keys)| *of == section && keys.contains(&key));
    (of_run || path == ON_UNKNOWN.0).then_some(By::Run)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::schema::RawRecipe;

    /// The keys that a table at `path` takes, from the error that names them; `None` where there is no such table.
    fn keys_under(path: &str) -> Option<Vec<String>> {
        let header = match path.strip_suffix("[]") {
            _ if path.is_empty() => String::new(),
            Some(list) => format!("[[{list}]]\n"),
            None => format!("[{path}]\n"),
        };
        let error = toml::from_str::<RawRecipe>(&format!("{header}no_such_key = 1\n")).err()?;
        let message = error.message().strip_prefix("unknown field `no_such_key`, expected ")?;
        Some(message.split('`').skip(1).step_by(2).map(str::to_owned).collect())
    }

    /// Every key of the schema that is no table of keys.
    fn leaves(path: &str, found: &mut Vec<String>) {
        for key in keys_under(path).unwrap_or_default() {
            let full = if path.is_empty() { key } else { format!("{path}.{key}") };
            let list = format!("{full}[]");
            if keys_under(&full).is_some() {
                leaves(&full, found);
            } else if keys_under(&list).is_some() {
                leaves(&list, found);
            } else {
                found.push(full);
            }
        }
    }

    #[test]
    fn somebody_decides_every_key_of_the_schema() {
        let mut keys = Vec::new();
        leaves("", &mut keys);
        assert!(keys.len() > 150 && keys.iter().any(|key| key == "data.arithmetic.max_operand"), "{keys:?}");
        let open: Vec<_> = keys.iter().filter(|key| by(key).is_none()).collect();
        assert!(
            open.is_empty(),
            "nobody decides {open:?} for a worker that joins; list each in rlrun/workers/permissions/keys.rs, under \
             OPERATOR if it names a file, code, a program, an address or a variable, or takes a protection away"
        );
        let listed = RUN.iter().flat_map(|(section, keys)| {
            keys.iter().map(
                move |key| if section.is_empty() { (*key).to_owned() } else { format!("{section}.{key}") },
            )
        });
        for key in listed {
            assert!(keys.contains(&key), "there is no `{key}` any more");
            assert_eq!(by(&key), Some(By::Run), "`{key}` is listed twice");
        }
        for above in OPERATOR.iter().chain(&NEITHER) {
            let under = |key: &&String| {
                key.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            };
            assert!(keys.iter().any(|key| under(&key)), "there is no `{above}` any more");
        }
    }
}
