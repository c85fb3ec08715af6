//! A reward as a recipe states it.
//!
//! Invariant: one flat table holds the keys of all kinds, and which kind takes which is known to the [`crate::Registry`]
//! alone; a key that the kind does not take is an error there, so nothing that a user wrote is ignored. This file does not
//! know TOML, files or lines; the recipe layer adds where an error comes from.

use std::path::PathBuf;
use std::time::Duration;

use model::{Placement, Quantization};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::gsm8k::Gsm8kMethod;
use crate::{OnError, Scope};

/// One entry of `[[rewards]]`. A key that the kind does not take is an error.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RewardSpec {
    /// Which kind of reward: a built-in one, or one that the program was built with.
    pub kind: String,
    /// Name in metrics, unique; the kind if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Factor in the sum; with 0 the reward is only watched. TRL `reward_weights`.
    #[serde(default = "one")]
    pub weight: f64,
    /// What a failure does.
    #[serde(default)]
    pub on_error: OnError,
    /// Seconds that one call may take.
    #[serde(default = "thirty")]
    pub timeout_s: f64,
    /// Calls at the same time.
    #[serde(default = "sixty_four")]
    pub concurrency: usize,
    /// `regex` (required), `format` (think and answer tags if not given): regular expression.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pattern: Option<String>,
    /// `regex`: whether the first capture group is compared with the answer, instead of the pattern only being found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compare: Option<bool>,
    /// `gsm8k`: how the answer is found; strict if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<Gsm8kMethod>,
    /// `length`: tokens at which the penalty is full; `rollout.max_completion_length` if not given. verl
    /// `overlong_buffer`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_length: Option<usize>,
    /// `length` (required): tokens before `max_length` over which the penalty grows from 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<usize>,
    /// `python`: a file, or `module:function`. `model`: a model directory. Relative to the file that names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// `model`: on the policy's device, or on a worker of its own (the default).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
    /// `model`: how coarsely the weights of the layers are represented; `none` if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantization: Option<Quantization>,
    /// `model`: most tokens of a packed batch; 8192 if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch_tokens: Option<usize>,
    /// `model`, separated: most cores that it uses at a time; all if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// `python`: single trajectories as they end (the default), or whole groups, for functions that compare.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<Scope>,
    /// `python`: name of the function, where the file has several candidates. verl `custom_reward_function.name`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub function: Option<String>,
    /// `python`: whose convention the function follows: `auto` (the default, by its parameters), `trl`, `verl`,
    /// `verl_batch`, `openrlhf`, `areal`, `slime`, `slime_group`, `verifiers`, `verifiers_group`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dialect: Option<String>,
    /// `python`: interpreter, 3.9 or newer; `python3` if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub python: Option<String>,
    /// `python`: processes; 2 if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<usize>,
    /// `python`: most trajectories that one process is given at a time; 64 if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<usize>,
    /// `python`: MiB that a process may allocate beyond what importing the file takes; 4096 if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u64>,
    /// `python`: variables that the function gets beside PATH, HOME and others without secrets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment: Option<Vec<String>>,
    /// `python`: keyword arguments of the function (verl `reward_kwargs`). Own kinds: whatever they read.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub parameters: Map<String, Value>,
}

impl RewardSpec {
    /// A reward of weight 1 with default parameters.
    #[must_use]
    pub fn new(kind: impl Into<String>) -> Self {
        Self {
            kind: kind.into(),
            name: None,
            weight: one(),
            on_error: OnError::default(),
            timeout_s: thirty(),
            concurrency: sixty_four(),
            pattern: None,
            compare: None,
            method: None,
            max_length: None,
            cache: None,
            path: None,
            placement: None,
            quantization: None,
            batch_tokens: None,
            threads: None,
            scope: None,
            function: None,
            dialect: None,
            python: None,
            workers: None,
            batch: None,
            memory_mb: None,
            environment: None,
            parameters: Map::new(),
        }
    }

    /// Name of the reward: as given, else its kind.
    #[must_use]
    pub fn name(&self) -> &str {
        self.name.as_deref().unwrap_or(&self.kind)
    }

    /// Longest time of one call.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        Duration::try_from_secs_f64(self.timeout_s).unwrap_or(Duration::MAX)
    }

    /// The keys of single kinds that are given.
    pub(crate) fn given(&self) -> Vec<String> {
        const COMMON: [&str; 6] = ["kind", "name", "weight", "on_error", "timeout_s", "concurrency"];
        let Ok(Value::Object(table)) = serde_json::to_value(self) else { return Vec::new() };
        table.into_iter().map(|(key, _)| key).filter(|key| !COMMON.contains(&key.as_str())).collect()
    }
}

fn one() -> f64 {
    1.0
}

fn thirty() -> f64 {
    30.0
}

fn sixty_four() -> usize {
    64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(json: &str) -> Result<RewardSpec, serde_json::Error> {
        serde_json::from_str(json)
    }

    #[test]
    fn defaults_are_weight_one_skip_and_the_kind_as_name() {
        let spec = spec(r#"{"kind": "gsm8k"}"#).unwrap();
        assert_eq!(spec, RewardSpec::new("gsm8k"));
        assert_eq!((spec.weight, spec.on_error, spec.name()), (1.0, OnError::Skip, "gsm8k"));
        assert_eq!(spec.given(), Vec::<String>::new());
    }

    #[test]
    fn unknown_keys_do_not_deserialise_and_own_keys_are_seen() {
        let key = spec(r#"{"kind": "math", "wieght": 2}"#).unwrap_err().to_string();
        assert!(key.contains("wieght"), "{key}");
        let given =
            spec(r#"{"kind": "regex", "weight": 2, "pattern": "x", "compare": false}"#).unwrap().given();
        assert_eq!(given, ["pattern", "compare"]);
    }
}
