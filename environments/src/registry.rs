//! The kinds of environments that a recipe can name: the built-in ones, and those that a user's program registers.
//!
//! Invariant: a kind says which keys it takes; that is checked here, for all kinds alike, before anything is made.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::runtime::Handle;

use crate::openenv::OpenEnv;
use crate::python::{PythonEnvironments, PythonFunction};
use crate::spec::COMMON;
#[cfg(target_os = "linux")]
use crate::tools::CodeInterpreter;
use crate::tools::{Calculator, McpTool, Search, Tool, ToolSet, Tools};
use crate::{
    Agents, AwaitedAgents, EnvironmentFactory, EnvironmentSpec, GuessNumber, Retry, TicTacToe,
    ToolCallFormat, ToolSpec,
};

/// What `retry` says after a wrong answer.
const HINT: &str = "That is not right. Try again.";

/// The parts of a run that environments use.
#[derive(Clone, Default)]
pub struct EnvironmentContext {
    /// The form of calls that the chat template of the model teaches.
    pub format: Option<ToolCallFormat>,
    /// The runtime for processes and connections; environments that only compute do without it.
    pub runtime: Option<Handle>,
    /// Environment variables of the process; an environment reads those that its recipe names.
    pub variables: Arc<BTreeMap<String, String>>,
    /// A directory of the run for logs.
    pub scratch: PathBuf,
}

/// Without the values of variables: secrets are among them.
impl fmt::Debug for EnvironmentContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EnvironmentContext")
            .field("format", &self.format)
            .field("scratch", &self.scratch)
            .finish_non_exhaustive()
    }
}

/// The environments of a spec, or why there are none.
pub type Made = Result<Arc<dyn EnvironmentFactory>, EnvironmentSpecError>;

/// Makes environments from a checked spec.
type BuildEnvironment = dyn Fn(&EnvironmentSpec, &EnvironmentContext) -> Made + Send + Sync;

/// A kind of environment, the key `kind` of `[environment]`.
#[derive(Clone)]
pub struct EnvironmentKind {
    /// Keys in addition to those that all kinds take.
    parameters: &'static [&'static str],
    build: Arc<BuildEnvironment>,
}

impl fmt::Debug for EnvironmentKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EnvironmentKind").field("parameters", &self.parameters).finish_non_exhaustive()
    }
}

/// Why an environment cannot be made from what a recipe says.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnvironmentSpecError {
    /// There is no such kind.
    #[error("there is no environment of kind \"{kind}\"; there are {known}")]
    UnknownKind {
        /// What was asked for.
        kind: String,
        /// The names that exist.
        known: String,
    },
    /// The kind does not take this key.
    #[error("the environment `{kind}` does not take `{key}`; it takes {takes}")]
    ForeignKey {
        /// The kind.
        kind: String,
        /// The key.
        key: String,
        /// The keys that it takes.
        takes: String,
    },
    /// A key has a value with which nothing can be made.
    #[error("`{key}` {reason}")]
    Value {
        /// The key, below `environment`.
        key: String,
        /// What is wrong and what to do; it ends a sentence that begins with the key.
        reason: String,
    },
}

impl EnvironmentSpecError {
    /// The key that it is about, below `environment`.
    #[must_use]
    pub fn key(&self) -> &str {
        match self {
            Self::UnknownKind { .. } => "kind",
            Self::ForeignKey { key, .. } | Self::Value { key, .. } => key,
        }
    }
}

/// All kinds by name.
#[derive(Clone, Debug)]
pub struct EnvironmentRegistry {
    kinds: BTreeMap<String, EnvironmentKind>,
}

impl Default for EnvironmentRegistry {
    fn default() -> Self {
        Self::builtin()
    }
}

impl EnvironmentRegistry {
    /// The kinds that every rlrun has.
    #[must_use]
    pub fn builtin() -> Self {
        const TOOLS: &[&str] = &[
            "tools",
            "format",
            "describe_tools",
            "max_answer_chars",
            "mask_bad_calls",
            "call_reward",
            "python",
            "processes",
            "memory_mb",
            "environment",
        ];
        const PYTHON: &[&str] = &[
            "path",
            "dialect",
            "parameters",
            "python",
            "processes",
            "memory_mb",
            "environment",
            "format",
            "describe_tools",
            "max_answer_chars",
            "mask_bad_calls",
        ];
        let retry = |spec: &EnvironmentSpec, _: &EnvironmentContext| -> Made {
            let hint = spec.hint.as_deref().unwrap_or(HINT);
            Ok(Arc::new(Retry::new(spec.limits(), hint)))
        };
        let python = |spec: &EnvironmentSpec, context: &EnvironmentContext| -> Made {
            Ok(Arc::new(PythonEnvironments::new(spec, context)?))
        };
        const AGENT: &[&str] =
            &["path", "script", "parameters", "python", "processes", "memory_mb", "environment"];
        let agent = |spec: &EnvironmentSpec, context: &EnvironmentContext| -> Made {
            Ok(Arc::new(Agents::new(spec, context)?))
        };
        let none = Self { kinds: BTreeMap::new() };
        none.with("tools", TOOLS, tools)
            .with("python", PYTHON, python)
            .with("openenv", &["url", "action", "parameters"], |spec, _| Ok(Arc::new(OpenEnv::new(spec)?)))
            .with("agent", AGENT, agent)
            .with("sessions", &["script", "parameters"], |spec, _| Ok(Arc::new(AwaitedAgents::new(spec)?)))
            .with("retry", &["hint"], retry)
            .with("guess_number", &["parameters"], |spec, _| Ok(Arc::new(GuessNumber::new(spec)?)))
            .with("tic_tac_toe", &["parameters"], |spec, _| Ok(Arc::new(TicTacToe::new(spec)?)))
    }

    /// Adds the kind `name`: `make` reads its own keys from the table `parameters` of the spec. A kind of that name is
    /// replaced.
    #[must_use]
    pub fn register(
        self,
        name: &str,
        make: impl Fn(&EnvironmentSpec, &EnvironmentContext) -> Made + Send + Sync + 'static,
    ) -> Self {
        self.with(name, &["parameters"], make)
    }

    fn with(
        mut self,
        name: &str,
        parameters: &'static [&'static str],
        build: impl Fn(&EnvironmentSpec, &EnvironmentContext) -> Made + Send + Sync + 'static,
    ) -> Self {
        self.kinds.insert(name.to_owned(), EnvironmentKind { parameters, build: Arc::new(build) });
        self
    }

    /// The names of all kinds.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.kinds.keys().map(String::as_str)
    }

    /// Whether the keys of `spec` are those of its kind.
    ///
    /// # Errors
    /// An unknown kind, a key that the kind does not take.
    pub fn check(&self, spec: &EnvironmentSpec) -> Result<(), EnvironmentSpecError> {
        self.kind(spec).map(drop)
    }

    fn kind(&self, spec: &EnvironmentSpec) -> Result<&EnvironmentKind, EnvironmentSpecError> {
        let Some(kind) = self.kinds.get(&spec.kind) else {
            let known = self.names().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
            return Err(EnvironmentSpecError::UnknownKind { kind: spec.kind.clone(), known });
        };
        if let Some(key) = spec.given().into_iter().find(|key| !kind.parameters.contains(key)) {
            let takes = kind.parameters.iter().copied().chain(COMMON);
            return Err(EnvironmentSpecError::ForeignKey {
                kind: spec.kind.clone(),
                key: key.to_owned(),
                takes: takes.map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", "),
            });
        }
        Ok(kind)
    }

    /// The environments of `spec`.
    ///
    /// # Errors
    /// Those of [`EnvironmentRegistry::check`], and a value with which nothing can be made.
    pub fn build(&self, spec: &EnvironmentSpec, context: &EnvironmentContext) -> Made {
        (self.kind(spec)?.build)(spec, context)
    }
}

/// The environment `tools`.
fn tools(spec: &EnvironmentSpec, context: &EnvironmentContext) -> Made {
    let wrong = |key: String, reason: String| EnvironmentSpecError::Value { key, reason };
    if spec.tools.is_empty() {
        let reason = "is empty; write `[[environment.tools]]` with `kind = \"calculator\"` or another kind";
        return Err(wrong("tools".to_owned(), reason.to_owned()));
    }
    let mut made: Vec<Box<dyn Tool>> = Vec::new();
    for (n, tool) in spec.tools.iter().enumerate() {
        let at = |key: &str, reason: String| wrong(format!("tools[{n}].{key}"), reason);
        for tool in tools_of(tool, spec, context).map_err(|(key, reason)| at(key, reason))? {
            let name = tool.schema().name.clone();
            if made.iter().any(|other| other.schema().name == name) {
                let reason = format!("gives a second tool `{name}`; a model could not tell them apart");
                return Err(at("kind", reason));
            }
            made.push(tool);
        }
    }
    let format = spec.format.or(context.format).unwrap_or(ToolCallFormat::Json);
    let set = ToolSet::new(made, format)
        .with_limits(spec.limits(), spec.answer_chars())
        .masking_bad_calls(spec.mask_bad_calls.unwrap_or(false))
        .rewarding_calls(spec.call_reward);
    Ok(Arc::new(Tools::new(set)))
}

/// The tools of an entry, or the key that is wrong and why.
fn tools_of(
    ToolSpec { kind, path, command, url, token_env }: &ToolSpec,
    spec: &EnvironmentSpec,
    context: &EnvironmentContext,
) -> Result<Vec<Box<dyn Tool>>, (&'static str, String)> {
    let takes_path = ["search", "python"].contains(&&kind[..]);
    let path = match path {
        Some(_) if !takes_path => return Err(("path", format!("is nothing that `{kind}` takes; remove it"))),
        None if takes_path => return Err(("kind", format!("is `{kind}`, which needs a `path`"))),
        path => path.as_deref().unwrap_or(Path::new("")),
    };
    let of_mcp = [("command", command.is_some()), ("url", url.is_some()), ("token_env", token_env.is_some())];
    if let Some((key, _)) = of_mcp.into_iter().find(|(_, given)| *given && kind != "mcp") {
        return Err((key, format!("is nothing that `{kind}` takes; remove it")));
    }
    if kind == "mcp" {
        let (key, tools) = match (command, url) {
            (Some(_), Some(_)) => {
                return Err(("url", "stands beside `command`; remove one of them".to_owned()));
            }
            (Some(command), None) => ("command", McpTool::of_program(command, spec, context)),
            (None, Some(url)) => ("url", McpTool::of_address(url, token_env.as_deref(), spec, context)),
            (None, None) => return Err(("kind", "is `mcp`, which needs a `command` or a `url`".to_owned())),
        };
        let tools = tools.map_err(|reason| (key, format!("fails: {reason}")))?.into_iter();
        return Ok(tools.map(|tool| Box::new(tool) as Box<dyn Tool>).collect());
    }
    let failed = |reason: String| ("path", format!("fails: {reason}"));
    Ok(match &kind[..] {
        "calculator" => vec![Box::new(Calculator::default())],
        "search" => vec![Box::new(Search::new(path).map_err(|error| failed(error.to_string()))?)],
        "python" => {
            let functions = PythonFunction::all(path, spec, context).map_err(failed)?;
            functions.into_iter().map(|function| Box::new(function) as Box<dyn Tool>).collect()
        }
        #[cfg(target_os = "linux")]
        "code" => {
            let code = CodeInterpreter::new(spec, context);
            vec![Box::new(code.map_err(|reason| ("kind", format!("is `code`, which fails: {reason}")))?)]
        }
        #[cfg(not(target_os = "linux"))]
        "code" => return Err(("kind", "is `code`, whose sandbox needs Linux".to_owned())),
        other => {
            let reason =
                format!("is \"{other}\"; there are `calculator`, `search`, `python`, `code` and `mcp`");
            return Err(("kind", reason));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(kind: &str) -> EnvironmentSpec {
        EnvironmentSpec { kind: kind.to_owned(), ..EnvironmentSpec::default() }
    }

    #[test]
    fn a_kind_takes_its_own_keys_and_no_others() {
        let registry = EnvironmentRegistry::builtin();
        let build = |spec: &EnvironmentSpec| registry.build(spec, &EnvironmentContext::default());
        let error = |spec: &EnvironmentSpec| {
            let error = build(spec).unwrap_err();
            (error.key().to_owned(), error.to_string())
        };
        assert_eq!(build(&spec("retry")).unwrap().limits(), spec("retry").limits());
        let (key, text) = error(&spec("tool"));
        assert!(
            key == "kind"
                && text.contains("`agent`, `guess_number`, `openenv`, `python`, `retry`, `sessions`, `tic_tac_toe`, `tools`"),
            "{text}"
        );
        let (key, text) = error(&EnvironmentSpec { hint: Some(String::new()), ..spec("tools") });
        assert!(key == "hint" && text.contains("it takes `tools`, `format`"), "{text}");
        assert_eq!(error(&spec("tools")).0, "tools");
        let tool = |kind: &str| ToolSpec { kind: kind.to_owned(), ..ToolSpec::default() };
        let with = |tools: &[&str]| EnvironmentSpec {
            tools: tools.iter().map(|kind| tool(kind)).collect(),
            ..spec("tools")
        };
        assert_eq!(build(&with(&["calculator"])).unwrap().tools().len(), 1);
        for (tools, key) in [
            (&["calculator", "calculator"][..], "tools[1].kind"),
            (&["search"], "tools[0].kind"),
            (&["browser"], "tools[0].kind"),
        ] {
            assert_eq!(error(&with(tools)).0, key);
        }
    }

    #[test]
    fn a_program_adds_kinds_of_its_own() {
        let registry = EnvironmentRegistry::builtin().register("twice", |spec, _| {
            let hint = spec.parameters.get("hint").and_then(|hint| hint.as_str()).unwrap_or_default();
            Ok(Arc::new(Retry::new(spec.limits(), hint)))
        });
        let built = registry.build(&spec("twice"), &EnvironmentContext::default()).unwrap();
        assert_eq!(built.limits().max_turns, 16);
    }
}
