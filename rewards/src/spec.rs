//! A reward as a recipe states it.
//!
//! Invariant: one flat table holds the keys of all kinds, and which kind takes which is known to the [`crate::Registry`]
//! alone; a key that the kind does not take is an error there, so nothing that a user wrote is ignored. This file does not
//! know TOML, files or lines; the recipe layer adds where an error comes from.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use model::{Placement, Quantization};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::gsm8k::Gsm8kMethod;
use crate::math::OnUnknown;
use crate::{OnError, Scope};

/// One entry of `[[rewards]]`. A key that the kind does not take is an error.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RewardSpec {
    /// Which kind of reward: a built-in one, or one that the program was built with.
    // resume = reward, worker = run
    pub kind: String,
    /// Name in metrics, unique; the kind if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub name: Option<String>,
    /// Factor in the sum; with 0 the reward is only watched. TRL `reward_weights`.
    #[serde(default = "one")]
    // resume = reward, worker = run
    pub weight: f64,
    /// The effect of a failure.
    #[serde(default)]
    // resume = changes, worker = run
    pub on_error: OnError,
    /// Seconds that one call may take. Built-in kinds that only compute, such as `math`, bound their work instead.
    #[serde(default = "thirty")]
    // resume = changes, worker = run
    pub timeout_s: f64,
    /// Calls at the same time.
    #[serde(default = "sixty_four")]
    // resume = changes, worker = run
    pub concurrency: usize,
    /// `regex` (required), `format` (think and answer tags if not given): regular expression.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub pattern: Option<String>,
    /// `regex`: whether the first capture group is compared with the answer, instead of the pattern only being found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub compare: Option<bool>,
    /// `gsm8k`: how the answer is found; strict if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub method: Option<Gsm8kMethod>,
    /// `length`: tokens at which the penalty is full; `rollout.max_completion_length` if not given, and required for
    /// episodes of several turns, whose tokens after the prompt it counts. verl `overlong_buffer`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub max_length: Option<usize>,
    /// `length` (required): tokens before `max_length` over which the penalty grows from 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub cache: Option<usize>,
    /// `math`: whether names of variables count; yes if not given. Math-Verify `strict`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub strict: Option<bool>,
    /// `math`: the outcome if the reference cannot be read; zero if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub on_unknown: Option<OnUnknown>,
    /// `math_dapo`: whether only the last box counts, character by character; no if not given. verl `strict_box_verify`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub strict_box: Option<bool>,
    /// `countdown`: the value of an answer that is wrong but has the form of one; 0.1 if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub format_score: Option<f64>,
    /// `repetition`: words that are compared at a time; 3 if not given. open-r1 `repetition_n_grams`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub ngram: Option<usize>,
    /// `repetition`: the value if everything is a repetition, at most 0; -1 if not given. open-r1
    /// `repetition_max_penalty`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub max_penalty: Option<f64>,
    /// `python`: a file, or `module:function`. `model`: a model directory. Relative to the file that names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = operator
    pub path: Option<PathBuf>,
    /// `model`: on the policy's device, or on a worker of its own (the default).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub placement: Option<Placement>,
    /// `model`: how coarsely the weights of the layers are represented; `none` if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub quantization: Option<Quantization>,
    /// `model`: most tokens of a packed batch; 8192 if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub batch_tokens: Option<usize>,
    /// `model`, separated: most cores that it uses at a time; all if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub threads: Option<usize>,
    /// `python`: the input of one call. `group`: all completions of a task that are sampled together, the default for
    /// functions that take lists (dialects `trl`, `verl_batch`, `slime_group`, `verifiers_group`). `trajectory`: a
    /// completion as soon as it ends; functions that take lists get those that wait, of any tasks, and must judge each
    /// by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub scope: Option<Scope>,
    /// `python`: whose convention the function follows: `auto` (the default, by its parameters), `trl`, `verl`, `verl_batch`,
    /// `openrlhf`, `areal`, `slime`, `slime_group`, `verifiers`, `verifiers_group`. `http`: `openrlhf` (the default) or `slime`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub dialect: Option<String>,
    /// `python`, `code`: interpreter; `python3` if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = operator
    pub python: Option<String>,
    /// `python`: most trajectories that one process is given at a time, groups aside, which stay whole; 64 if not given. `http`, dialect `openrlhf`: most
    /// trajectories of one request; 1 if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub batch: Option<usize>,
    /// `python`: MiB that a process may allocate beyond what importing the file takes; 4096 if not given. `code`: MiB of
    /// address space of each process; 512 if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub memory_mb: Option<u64>,
    /// `code`: language of the programs, as it stands after a fence; `python` if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub language: Option<String>,
    /// `code`: command that runs a program of another language, with `{file}` for its file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = operator
    pub command: Option<Vec<String>>,
    /// `code`: column with the tests; `tests` if there is one, else the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub tests_column: Option<String>,
    /// `code`: `auto` (the default), `bubblewrap`, `landlock`, or `none` for programs that can be trusted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = operator
    pub sandbox: Option<String>,
    /// `code`: seconds of processor time of a program in one test; 10 if not given. `timeout_s` is for all tests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub cpu_s: Option<f64>,
    /// `code`: KiB that a program may write, or twice the expected output if that is more; 64 if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub max_output_kib: Option<usize>,
    /// `code`: processes and threads of a program at the same time; 16 if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub max_processes: Option<u64>,
    /// `code`: whether passing some of the tests is worth their share, instead of nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub partial: Option<bool>,
    /// `http`, `judge` (both required): where to ask, `http://` or `https://`. `model`: where `rlrun serve reward` listens, in
    /// place of `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = operator
    pub url: Option<String>,
    /// `http`, `judge`: hosts, addresses and networks that may be connected to; the host of `url` if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = operator
    pub allow: Option<Vec<String>>,
    /// `http`, `judge`: variable of the environment that holds a bearer token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = operator
    pub token_env: Option<String>,
    /// `http`, `judge`: most repetitions of a request that failed to connect or found a busy server; 4 if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub retries: Option<u32>,
    /// `http`, `judge`: largest answer, KiB; 1024 if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub max_answer_kib: Option<u64>,
    /// `judge` (required): name of the model, as the server knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub model: Option<String>,
    /// `judge`: system message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub system: Option<String>,
    /// `judge`: the question to the model, with `{prompt}`, `{completion}`, `{answer}` and `{columns.NAME}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub template: Option<String>,
    /// `judge`: sampling temperature; 0 if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub temperature: Option<f64>,
    /// `judge`: most tokens of its reply; 512 if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub max_tokens: Option<u64>,
    /// `judge`: regular expression whose last match captures the score; `Score: 7` and the like if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub parse: Option<String>,
    /// `judge`: words and their values; the verdict is one of them, alone in a line or after a label. Instead of `parse`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub choices: Option<BTreeMap<String, f64>>,
    /// `judge`: divisor of a parsed score; 1 if not given, 10 with the default question.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = run
    pub scale: Option<f64>,
    /// `python`: name of the function, where the file has several candidates. verl `custom_reward_function.name`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = operator
    pub function: Option<String>,
    /// `python`: processes; 2 if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub workers: Option<usize>,
    /// `python`: variables that the function gets beside PATH, HOME and others without secrets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = operator
    pub environment: Option<Vec<String>>,
    /// `python`: keyword arguments of the function (verl `reward_kwargs`). Own kinds: whatever they read.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    // resume = reward, worker = operator
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
            strict: None,
            on_unknown: None,
            strict_box: None,
            format_score: None,
            ngram: None,
            max_penalty: None,
            path: None,
            placement: None,
            quantization: None,
            batch_tokens: None,
            threads: None,
            scope: None,
            dialect: None,
            python: None,
            batch: None,
            memory_mb: None,
            language: None,
            command: None,
            tests_column: None,
            sandbox: None,
            cpu_s: None,
            max_output_kib: None,
            max_processes: None,
            partial: None,
            url: None,
            allow: None,
            token_env: None,
            retries: None,
            max_answer_kib: None,
            model: None,
            system: None,
            template: None,
            temperature: None,
            max_tokens: None,
            parse: None,
            choices: None,
            scale: None,
            function: None,
            workers: None,
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
