//! An environment as a recipe states it.
//!
//! Invariant: one flat table has the keys of all kinds, and which kind takes which is known to the
//! [`EnvironmentRegistry`](crate::EnvironmentRegistry) alone. A key that the kind does not take is an error there.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::tools::MAX_ANSWER_CHARS;
use crate::{EnvironmentLimits, EnvironmentSpecError, ToolCallFormat};

/// Keys that all kinds take.
pub(crate) const COMMON: [&str; 6] =
    ["max_turns", "max_tokens", "discount", "tool_timeout_s", "turn_timeout_s", "episode_timeout_s"];

/// `[environment]`: what the policy acts in, for episodes of several turns. Without this section an episode is one completion.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EnvironmentSpec {
    /// Which kind of environment: `tools`, `python`, `openenv`, `retry`, `guess_number`, `tic_tac_toe`, or one that the
    /// program was built with; `agent` and `sessions` for agents whose loop is their own, which call `[endpoint]`.
    // resume = experiment, worker = run
    pub kind: String,
    /// Most turns of the policy in an episode, which then ends as it is. TRL `max_tool_calling_iterations`, verl
    /// `max_assistant_turns`.
    // resume = experiment, worker = run
    pub max_turns: usize,
    /// Most tokens of an episode: prompt, completions, and what the environment says. The context of the model if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = experiment, worker = run
    pub max_tokens: Option<usize>,
    /// Factor of a turn's reward for every turn before it, from 0 to 1.
    // resume = experiment, worker = run
    pub discount: f64,
    /// Longest call of a tool, seconds. The model reads that there was no answer.
    // resume = changes, worker = run
    pub tool_timeout_s: f64,
    /// Longest turn of the environment, seconds. A later answer fails the episode, which is not trained on.
    // resume = changes, worker = run
    pub turn_timeout_s: f64,
    /// Longest episode, seconds. A longer one fails, and is not trained on.
    // resume = changes, worker = run
    pub episode_timeout_s: f64,
    /// `tools`, `python`: form in which the model writes calls. If not given, the form that the chat template of the model teaches, and
    /// `json` if it teaches none.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = experiment, worker = run
    pub format: Option<ToolCallFormat>,
    /// `tools`, `python`: whether prompts describe the tools: by the chat template if it knows tools, else in the system message; yes if
    /// not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = tasks, worker = run
    pub describe_tools: Option<bool>,
    /// `tools`, `python`: longest answer of a tool that the model gets, characters; the middle of a longer one is left out. 4096 if not
    /// given. verl `max_tool_response_length`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = experiment, worker = run
    pub max_answer_chars: Option<usize>,
    /// `tools`, `python`: whether a turn with a call that cannot be read or made is not trained on; no if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = experiment, worker = run
    pub mask_bad_calls: Option<bool>,
    /// `tools`: what every call is worth, for example -0.1; nothing if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = experiment, worker = run
    pub call_reward: Option<f64>,
    /// `retry`: message after a wrong answer; "That is not right. Try again." if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = experiment, worker = run
    pub hint: Option<String>,
    /// `openenv`: address of the server, `http://HOST:PORT` or `ws://HOST:PORT/PATH`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = operator
    pub url: Option<String>,
    /// `openenv`: field of the action that has the completion, if that is no JSON object; `message` if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = experiment, worker = run
    pub action: Option<String>,
    /// `python`: a file, `FILE.py:NAME`, or `module:NAME`; `agent`: a function, `FILE.py:NAME` or `module:NAME`. Relative to the
    /// file that names it.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = experiment, worker = operator
    pub path: Option<PathBuf>,
    /// `agent`, `sessions`: a built-in kind of environment whose scripted player a warm-up learns from, with the same `parameters`;
    /// its messages are what the agent has to say.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = experiment, worker = run
    pub script: Option<String>,
    /// `python`: whose convention the environment follows: `trl`, `skyrl_gym`, `gymnasium` or `plain`; by its methods if not
    /// given.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = experiment, worker = run
    pub dialect: Option<String>,
    /// `python`, `agent`, tools `python` and `code`: interpreter; `python3` if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = operator
    pub python: Option<String>,
    /// `python`, `agent`: most processes, one for every open episode, 64 if not given; further episodes wait. Tools `python`: processes
    /// of each entry; 4 if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub processes: Option<usize>,
    /// `python`, `agent`, tools `python`: MiB that a process may allocate beyond what importing the file takes; 4096 if not given. Tool
    /// `code`: MiB of address space of a program; 512 if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub memory_mb: Option<u64>,
    /// `python`, `agent`, tools `python` and `mcp`: environment variables that the processes get besides the usual ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = operator
    pub environment: Option<Vec<String>>,
    /// `python`, `agent`: keyword arguments of the environment or the agent. `openenv`: fields of its `reset`. `guess_number`: `max`, `cost`.
    /// `tic_tac_toe`: `opponent`, `opening_moves`. Other kinds: values for an environment that the program was built with.
    #[serde(skip_serializing_if = "Map::is_empty")]
    // resume = experiment, worker = operator
    pub parameters: Map<String, Value>,
    /// `tools`: what the policy may call.
    pub tools: Vec<ToolSpec>,
    /// Other environments by name, for tasks whose column `environment` has that name. Each has the keys of this section that it
    /// does not give itself; with another `kind`, only those that all kinds take.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    // resume = experiment, worker = operator
    pub named: BTreeMap<String, Map<String, Value>>,
}

/// One entry of `[[environment.tools]]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ToolSpec {
    /// Which kind of tool: `calculator`, `search`, `python`, `code` or `mcp`.
    // resume = experiment, worker = run
    pub kind: String,
    /// `search`: directory of text files (`.txt`, `.md`, `.rst`, `.jsonl`). `python`: a file, whose functions are tools,
    /// `FILE.py:NAME`, or `module:NAME`. Relative to the file that names it.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = experiment, worker = operator
    pub path: Option<PathBuf>,
    /// `mcp`: program and arguments that start a server of the Model Context Protocol on its standard input and output.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = experiment, worker = operator
    pub command: Option<Vec<String>>,
    /// `mcp`: address of a server that runs, such as `https://HOST/mcp`, instead of a `command`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = operator
    pub url: Option<String>,
    /// `mcp` with `url`: environment variable with a bearer token for the server.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = operator
    pub token_env: Option<String>,
}

impl Default for EnvironmentSpec {
    fn default() -> Self {
        let EnvironmentLimits { max_turns, tool_timeout, step_timeout, episode_timeout } =
            EnvironmentLimits::default();
        Self {
            kind: String::new(),
            max_turns,
            max_tokens: None,
            discount: 1.0,
            tool_timeout_s: tool_timeout.as_secs_f64(),
            turn_timeout_s: step_timeout.as_secs_f64(),
            episode_timeout_s: episode_timeout.as_secs_f64(),
            format: None,
            describe_tools: None,
            max_answer_chars: None,
            mask_bad_calls: None,
            call_reward: None,
            hint: None,
            url: None,
            action: None,
            path: None,
            script: None,
            dialect: None,
            python: None,
            processes: None,
            memory_mb: None,
            environment: None,
            parameters: Map::new(),
            tools: Vec::new(),
            named: BTreeMap::new(),
        }
    }
}

impl EnvironmentSpec {
    /// The bounds of an episode.
    #[must_use]
    pub fn limits(&self) -> EnvironmentLimits {
        // Longer than any run, and no sum of times overflows.
        const LONGEST_S: f64 = 1e9;
        let seconds = |value: f64| Duration::from_secs_f64(value.clamp(0.0, LONGEST_S));
        EnvironmentLimits {
            max_turns: self.max_turns.max(1),
            tool_timeout: seconds(self.tool_timeout_s),
            step_timeout: seconds(self.turn_timeout_s),
            episode_timeout: seconds(self.episode_timeout_s),
        }
    }

    /// The environment `given` of [`EnvironmentSpec::named`], with the keys that it has from this one.
    ///
    /// # Errors
    /// A key that there is not, a value of a wrong type, names within names.
    pub fn with_keys(&self, given: &Map<String, Value>) -> Result<Self, EnvironmentSpecError> {
        let wrong = |reason: String| EnvironmentSpecError::Value { key: "named".to_owned(), reason };
        if given.contains_key("named") {
            return Err(wrong(
                "has an environment with a key `named`; names are in the outer section alone".to_owned(),
            ));
        }
        let other = given.get("kind").is_some_and(|kind| *kind != self.kind);
        let own = serde_json::to_value(Self { named: BTreeMap::new(), ..self.clone() });
        let Ok(Value::Object(mut keys)) = own else { return Err(wrong("cannot be merged".to_owned())) };
        keys.retain(|key, _| !other || COMMON.contains(&&key[..]));
        keys.extend(given.clone());
        serde_json::from_value(Value::Object(keys)).map_err(|error| wrong(format!("has a mistake: {error}")))
    }

    /// Its kind, and those of the environments that it names.
    pub fn kinds(&self) -> impl Iterator<Item = &str> {
        let named = self.named.values().filter_map(|keys| keys.get("kind").and_then(Value::as_str));
        std::iter::once(&self.kind[..]).chain(named)
    }

    /// The longest answer of a tool, characters.
    #[must_use]
    pub fn answer_chars(&self) -> usize {
        self.max_answer_chars.unwrap_or(MAX_ANSWER_CHARS)
    }

    /// The keys that were given, without those that all kinds take.
    pub(crate) fn given(&self) -> Vec<&'static str> {
        [
            (self.format.is_some(), "format"),
            (self.describe_tools.is_some(), "describe_tools"),
            (self.max_answer_chars.is_some(), "max_answer_chars"),
            (self.mask_bad_calls.is_some(), "mask_bad_calls"),
            (self.call_reward.is_some(), "call_reward"),
            (self.hint.is_some(), "hint"),
            (self.url.is_some(), "url"),
            (self.action.is_some(), "action"),
            (self.path.is_some(), "path"),
            (self.script.is_some(), "script"),
            (self.dialect.is_some(), "dialect"),
            (self.python.is_some(), "python"),
            (self.processes.is_some(), "processes"),
            (self.memory_mb.is_some(), "memory_mb"),
            (self.environment.is_some(), "environment"),
            (!self.parameters.is_empty(), "parameters"),
            (!self.tools.is_empty(), "tools"),
        ]
        .into_iter()
        .filter_map(|(given, key)| given.then_some(key))
        .collect()
    }
}
