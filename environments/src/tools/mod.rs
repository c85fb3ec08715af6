//! `tools`: the policy calls tools until it writes an answer without a call.
//!
//! # Layout
//! - [`ToolSet`]: the tools of an environment, and how their answers become messages
//! - `addition`: what a scripted player says to a generated addition
//! - `calculator`, `search`, `code`: tools that are built in; `mcp`: those of a server
//!
//! # Invariants
//! - A bad call costs nothing but its turn: the model reads the reason, and it is counted.
//! - Every call has a time limit, and every answer a longest length.
//! - Only a failure of rlrun or of its surroundings fails the episode; whatever a tool answers does not.

mod addition;
mod calculator;
#[cfg(target_os = "linux")]
mod code;
mod mcp;
mod search;

use std::fmt;
use std::sync::Arc;

use serde_json::{Map, Value};
use trajectory::{Message, Task};

use crate::{
    Action, BadCall, BoxFuture, Demonstration, Environment, EnvironmentError, EnvironmentFactory,
    EnvironmentLimits, Observation, ToolCall, ToolCallFormat, ToolSchema,
};

use addition::Addition;
pub use calculator::Calculator;
#[cfg(target_os = "linux")]
pub use code::CodeInterpreter;
pub(crate) use mcp::McpTool;
pub use search::{Search, SearchError};

/// Longest answer of a tool that a model gets, characters; see [`ToolSet::with_limits`].
pub const MAX_ANSWER_CHARS: usize = 4096;

/// Something that the policy can call.
pub trait Tool: Send + Sync + fmt::Debug {
    /// What the model is given of it.
    fn schema(&self) -> &ToolSchema;

    /// Calls it. `arguments` were checked against the schema.
    ///
    /// # Errors
    /// See [`ToolError`].
    fn call<'a>(&'a self, arguments: &'a Map<String, Value>) -> BoxFuture<'a, Result<String, ToolError>>;
}

/// Why a tool gave no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ToolError {
    /// The call was wrong, or the tool failed on it. The model reads the reason.
    #[error("{0}")]
    Refused(String),
    /// The tool cannot be used at all. The episode fails.
    #[error("{0}")]
    Unusable(String),
}

/// The tools of an environment.
#[derive(Debug)]
pub struct ToolSet {
    tools: Vec<Box<dyn Tool>>,
    schemas: Vec<ToolSchema>,
    format: ToolCallFormat,
    limits: EnvironmentLimits,
    max_answer_chars: usize,
    mask_bad_calls: bool,
    /// What every call is worth.
    call_reward: Option<f64>,
}

impl ToolSet {
    /// `tools`, which the model calls in `format`.
    #[must_use]
    pub fn new(tools: Vec<Box<dyn Tool>>, format: ToolCallFormat) -> Self {
        let schemas = tools.iter().map(|tool| tool.schema().clone()).collect();
        let limits = EnvironmentLimits::default();
        Self {
            tools,
            schemas,
            format,
            limits,
            max_answer_chars: MAX_ANSWER_CHARS,
            mask_bad_calls: false,
            call_reward: None,
        }
    }

    /// The same with other limits. A longer answer of a tool is cut in its middle.
    #[must_use]
    pub fn with_limits(self, limits: EnvironmentLimits, max_answer_chars: usize) -> Self {
        Self { limits, max_answer_chars, ..self }
    }

    /// The same; with `mask` a turn with a bad call is not trained on.
    #[must_use]
    pub fn masking_bad_calls(self, mask: bool) -> Self {
        Self { mask_bad_calls: mask, ..self }
    }

    /// The same; every call is worth `reward`, nothing with `None`.
    #[must_use]
    pub fn rewarding_calls(self, reward: Option<f64>) -> Self {
        Self { call_reward: reward, ..self }
    }

    /// What the model is given of the tools.
    #[must_use]
    pub fn schemas(&self) -> &[ToolSchema] {
        &self.schemas
    }

    /// The answer to a call, and whether the tool gave it.
    async fn answer(&self, call: &ToolCall) -> Result<Result<String, String>, ToolError> {
        let Some(tool) = self.tools.iter().find(|tool| tool.schema().name == call.name) else {
            let names: Vec<&str> = self.schemas.iter().map(|tool| &tool.name[..]).collect();
            return Ok(Err(format!("there is no tool {:?}; the tools are {}", call.name, names.join(", "))));
        };
        if let Err(BadCall { reason }) = tool.schema().check(call) {
            return Ok(Err(reason));
        }
        match tokio::time::timeout(self.limits.tool_timeout, tool.call(&call.arguments)).await {
            Ok(Ok(answer)) => Ok(Ok(answer)),
            Ok(Err(ToolError::Refused(reason))) => Ok(Err(reason)),
            Ok(Err(unusable)) => Err(unusable),
            Err(_) => Ok(Err(format!(
                "{} gave no answer within {:.0} s",
                call.name,
                self.limits.tool_timeout.as_secs_f64()
            ))),
        }
    }

    /// The answers to the calls of a completion; `None` if it has none.
    pub(crate) async fn observe(&self, action: Action<'_>) -> Result<Observation, EnvironmentError> {
        let calls = self.format.parse(action.text, &self.schemas);
        let done = calls.is_empty();
        // A turn without a call is worth 0, not -0.
        let reward = self.call_reward.map(|each| 0.0 + each * calls.len() as f64);
        let mut observation = Observation { done, reward, ..Observation::default() };
        for call in calls {
            observation.count(CALLS);
            let (answer, id) = match call {
                Ok(call) => {
                    let failed = |error: ToolError| EnvironmentError::Failed {
                        environment: NAME.to_owned(),
                        turn: action.turn,
                        evidence: format!("tool {}: {error}", call.name),
                    };
                    (self.answer(&call).await.map_err(failed)?, call.id)
                }
                Err(BadCall { reason }) => (Err(reason), None),
            };
            let text = answer.unwrap_or_else(|reason| {
                observation.count(BAD_CALLS);
                observation.masked = self.mask_bad_calls;
                format!("error: {reason}")
            });
            let content = shortened(text, self.max_answer_chars);
            observation.messages.push(Message { tool_call_id: id, ..Message::new("tool", content) });
        }
        Ok(observation)
    }
}

/// Name of the environment.
const NAME: &str = "tools";
/// Counts the calls of a completion, and those that got a reason instead of an answer.
const CALLS: &str = "tool_calls";
const BAD_CALLS: &str = "bad_calls";
/// What environments with tools count.
pub(crate) const COUNTS: &[&str] = &[CALLS, BAD_CALLS];

/// Makes environments with the tools of a set.
#[derive(Clone, Debug)]
pub struct Tools {
    set: Arc<ToolSet>,
}

impl Tools {
    /// Environments with the tools of `set`.
    #[must_use]
    pub fn new(set: ToolSet) -> Self {
        Self { set: Arc::new(set) }
    }
}

impl EnvironmentFactory for Tools {
    fn name(&self) -> &str {
        NAME
    }

    fn limits(&self) -> EnvironmentLimits {
        self.set.limits
    }

    fn about(&self) -> Option<String> {
        let names: Vec<&str> = self.set.schemas.iter().map(|tool| &tool.name[..]).collect();
        let (names, format) = (names.join(", "), self.set.format.name());
        Some(format!(
            "`{NAME}`: {names}; calls are in the form `{format}`, at most {} turns",
            self.set.limits.max_turns
        ))
    }

    fn counts(&self) -> &'static [&'static str] {
        COUNTS
    }

    fn tools(&self) -> &[ToolSchema] {
        self.set.schemas()
    }

    fn create(&self) -> Box<dyn Environment> {
        Box::new(ToolEpisode { set: Arc::clone(&self.set), addition: None, answer: None })
    }
}

/// One episode.
#[derive(Debug)]
struct ToolEpisode {
    set: Arc<ToolSet>,
    /// What a scripted player adds.
    addition: Option<Addition>,
    /// The last answer of a tool.
    answer: Option<String>,
}

impl Environment for ToolEpisode {
    fn reset<'a>(&'a mut self, task: &'a Task) -> BoxFuture<'a, Result<Vec<Message>, EnvironmentError>> {
        self.addition = Addition::of(task);
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn step<'a>(&'a mut self, action: Action<'a>) -> BoxFuture<'a, Result<Observation, EnvironmentError>> {
        let call = async move {
            let observation = self.set.observe(action).await?;
            self.answer = observation.messages.last().map(|message| message.content.clone());
            Ok(observation)
        };
        Box::pin(call)
    }

    /// Of a generated addition: a right player asks the calculator and repeats its answer, a wrong one adds in the head.
    fn scripted(&self, player: Demonstration, _: u64) -> Option<String> {
        let (addition, calculator) = (self.addition?, self.set.schemas.first()?);
        match (&self.answer, player) {
            (Some(answer), _) => Some(answer.clone()),
            (None, Demonstration::Right) => Some(self.set.format.write(&addition.call(&calculator.name))),
            (None, Demonstration::Wrong) => Some(addition.without_carry().to_string()),
        }
    }
}

/// `text`, or its beginning and its end with the number of characters between them.
fn shortened(text: String, max_chars: usize) -> String {
    let length = text.chars().count();
    if length <= max_chars {
        return text;
    }
    let at = |n: usize| text.char_indices().nth(n).map_or(text.len(), |(at, _)| at);
    let (head, tail) = (at(max_chars / 2), at(length - (max_chars - max_chars / 2)));
    format!("{}\n[{} characters left out]\n{}", &text[..head], length - max_chars, &text[tail..])
}
