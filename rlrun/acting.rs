//! The environments of a recipe, for the model of the recipe: prompts that describe their tools, and what episodes need.
//!
//! Invariant: without `[environment]` prompts are as the dataset has them, and an episode is one completion.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use environments::{
    EnvironmentContext, EnvironmentFactory, EnvironmentRegistry, EnvironmentSpec, ToolCallFormat,
};
use model::{ChatTemplate, ModelDirectory, ModelError};
use rollout::{ChatEncoder, EpisodeConfig, EpisodeEnvironment, RolloutError, named_by};
use serde_json::{Map, Value};
use trajectory::{Message, Prompt, Task};

use crate::failure::Failure;
use crate::recipe::Recipe;

/// Whether the text of two turns, with thoughts, is the beginning of the text of three.
fn keeps_turns(template: &ChatTemplate) -> Result<bool, ModelError> {
    let turn = |n: usize| {
        let answer = format!("<think>\nthought {n}\n</think>\n\nanswer {n}");
        [Message::new("user", format!("question {n}")), Message::new("assistant", answer)]
    };
    let conversation = [turn(1), turn(2), turn(3)].concat();
    let two = template.render(&conversation[..4], false)?;
    Ok(template.render(&conversation, false)?.starts_with(&two))
}

/// The environments that the policy acts in.
pub(crate) struct Acting {
    /// `None` without an environment.
    environment: Option<OpenEnvironment>,
    /// The environments that tasks name.
    named: BTreeMap<String, OpenEnvironment>,
}

pub(crate) struct OpenEnvironment {
    factory: Arc<dyn EnvironmentFactory>,
    /// The model, whose prompts describe the tools if its chat template knows tools.
    directory: Arc<ModelDirectory>,
    /// Whether prompts describe the tools.
    describes: bool,
    /// What the system message says of the tools, if the template does not describe them.
    description: Option<String>,
    discount: f64,
}

impl OpenEnvironment {
    fn new(
        spec: &EnvironmentSpec,
        recipe: &Recipe,
        directory: &ModelDirectory,
        registry: &EnvironmentRegistry,
        context: &EnvironmentContext,
    ) -> Result<Self, Failure> {
        let template = directory.template();
        let taught = template.and_then(|template| ToolCallFormat::of_template(&template.text()));
        let context = EnvironmentContext { format: taught, ..context.clone() };
        let factory = registry
            .build(spec, &context)
            .map_err(|error| Failure::Argument(format!("`environment.{}`: {error}", error.key())))?;
        let opened = recipe.opened(directory.path())?;
        let tools = factory.tools();
        let describes = spec.describe_tools.unwrap_or(true) && !tools.is_empty();
        let (directory, description) = match template {
            Some(template) if describes && template.knows_tools() => {
                (opened.with_tools(tools.iter().map(|tool| tool.to_json()).collect()), None)
            }
            _ if describes => {
                let format = spec.format.or(taught).unwrap_or(ToolCallFormat::Json);
                (opened, Some(format.describe(tools)))
            }
            _ => (opened, None),
        };
        let directory = Arc::new(directory);
        Ok(Self { factory, directory, describes, description, discount: spec.discount })
    }

    /// A task whose prompt describes the tools.
    fn described(&self, mut task: Task) -> Result<Task, Failure> {
        match (&mut task.prompt, &self.description) {
            (Prompt::Messages(messages), Some(description)) => {
                match messages.first_mut().filter(|first| first.role == "system") {
                    Some(system) => system.content = format!("{}\n\n{description}", system.content),
                    None => messages.insert(0, Message::new("system", description.clone())),
                }
                Ok(task)
            }
            (Prompt::Text(_), _) if self.describes => Err(Failure::Argument(format!(
                "`environment.describe_tools`: the prompts are plain text, which cannot describe the tools of `{}`; set \
                 `data.chat = true`, or describe them in the prompts yourself and set `describe_tools = false`",
                self.factory.name()
            ))),
            _ => Ok(task),
        }
    }

    fn playing(&self) -> EpisodeEnvironment {
        let encoder = Arc::new(ChatEncoder::new(Arc::clone(&self.directory)));
        EpisodeEnvironment {
            discount: self.discount,
            ..EpisodeEnvironment::new(Arc::clone(&self.factory), Some(encoder))
        }
    }
}

impl Acting {
    /// The environments of `recipe` for the model of `directory`.
    ///
    /// # Errors
    /// An environment that cannot be made.
    pub(crate) fn new(
        recipe: &Recipe,
        directory: &ModelDirectory,
        registry: &EnvironmentRegistry,
        context: &EnvironmentContext,
    ) -> Result<Self, Failure> {
        let Some(spec) = &recipe.environment else {
            return Ok(Self { environment: None, named: BTreeMap::new() });
        };
        let open = |spec: &EnvironmentSpec| OpenEnvironment::new(spec, recipe, directory, registry, context);
        let named = |(name, keys): (&String, &Map<String, Value>)| {
            let wrong = |error| Failure::Argument(format!("`environment.named.{name}`: {error}"));
            Ok::<_, Failure>((name.clone(), open(&spec.with_keys(keys).map_err(wrong)?)?))
        };
        Ok(Self {
            environment: Some(open(spec)?),
            named: spec.named.iter().map(named).collect::<Result<_, _>>()?,
        })
    }

    /// The environment of a task; `None` without environments.
    ///
    /// # Errors
    /// A task that names an environment that there is not.
    pub(crate) fn of(&self, task: &Task) -> Result<Option<&OpenEnvironment>, RolloutError> {
        Ok(named_by(task, &self.named)?.or(self.environment.as_ref()))
    }

    /// Looks for a task that names an environment that there is not; `files` has the tasks as rows.
    ///
    /// # Errors
    /// The first such task, with its file and its row.
    pub(crate) fn check_names(&self, tasks: &[Task], files: &[PathBuf]) -> Result<(), Failure> {
        for task in tasks {
            self.of(task).map_err(|error| {
                let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
                Failure::Argument(format!("{}, row {}: {error}", files.join(", "), task.id.0 + 1))
            })?;
        }
        Ok(())
    }

    /// The prompt of a task, `[P]` tokens, for the model of `plain`; empty if its environment begins the conversation.
    ///
    /// # Errors
    /// A prompt that cannot be encoded.
    pub(crate) fn encoded(&self, plain: &ModelDirectory, task: &Task) -> Result<Vec<u32>, RolloutError> {
        let Some(environment) = self.of(task)? else { return Ok(plain.encode_prompt(&task.prompt)?) };
        match &task.prompt {
            Prompt::Text(text) if text.is_empty() => Ok(Vec::new()),
            Prompt::Messages(messages) if messages.iter().all(|said| said.role == "system") => Ok(Vec::new()),
            prompt => Ok(environment.directory.encode_prompt(prompt)?),
        }
    }

    /// A task whose prompt describes the tools of its environment.
    ///
    /// # Errors
    /// A task of an unknown environment; a prompt that is plain text: tools are described in a system message.
    pub(crate) fn described(&self, task: Task) -> Result<Task, Failure> {
        match self.of(&task)? {
            Some(environment) => environment.described(task),
            None => Ok(task),
        }
    }

    /// How environments and chat template were understood, one line each.
    pub(crate) fn notes(&self) -> Vec<String> {
        let Some(OpenEnvironment { factory, directory, .. }) = &self.environment else { return Vec::new() };
        let about = factory.about().map(|about| format!("environment {about}"));
        let named = self.named.iter().filter_map(|(name, open)| {
            Some(format!("environment of tasks with the name \"{name}\": {}", open.factory.about()?))
        });
        let turns = directory.template().filter(|_| factory.limits().max_turns > 1).map(|template| {
            match keeps_turns(template) {
                Ok(true) => "the chat template renders past turns as they were: an episode is what it would render",
                Ok(false) => {
                    "the chat template changes past turns (it drops their thoughts, for instance); an episode keeps them as they \
                     were sampled"
                }
                Err(_) => {
                    "the chat template refuses a conversation of three turns; an episode renders what is new by itself"
                }
            }
        });
        about.into_iter().chain(named).chain(turns.map(str::to_owned)).collect()
    }

    /// What episodes of at most `max_tokens` tokens are played in, which wait for a free environment up to `wait`.
    pub(crate) fn episodes(&self, max_tokens: usize, wait: Duration) -> EpisodeConfig {
        let Some(environment) = &self.environment else { return EpisodeConfig::single_turn() };
        let named = self.named.iter().map(|(name, open)| (name.clone(), open.playing())).collect();
        EpisodeConfig { environment: environment.playing(), named, max_tokens, wait }
    }
}
