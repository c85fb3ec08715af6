//! The environment of a recipe, for the model of the recipe: prompts that describe its tools, and what episodes need.
//!
//! Invariant: without `[environment]` prompts are as the dataset has them, and an episode is one completion.

use std::sync::Arc;

use environments::{EnvironmentContext, EnvironmentFactory, EnvironmentRegistry, ToolCallFormat};
use model::{ChatTemplate, ModelDirectory, ModelError};
use rollout::{ChatEncoder, EpisodeConfig};
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

/// The environment that the policy acts in.
pub(crate) struct Acting {
    /// `None` without an environment.
    environment: Option<OpenEnvironment>,
}

struct OpenEnvironment {
    factory: Arc<dyn EnvironmentFactory>,
    /// The model, whose prompts describe the tools if its chat template knows tools.
    directory: Arc<ModelDirectory>,
    /// Whether prompts describe the tools.
    describes: bool,
    /// What the system message says of the tools, if the template does not describe them.
    description: Option<String>,
}

impl Acting {
    /// The environment of `recipe` for the model of `directory`.
    ///
    /// # Errors
    /// An environment that cannot be made.
    pub(crate) fn new(
        recipe: &Recipe,
        directory: &ModelDirectory,
        registry: &EnvironmentRegistry,
        context: EnvironmentContext,
    ) -> Result<Self, Failure> {
        let Some(spec) = &recipe.environment else { return Ok(Self { environment: None }) };
        let template = directory.template();
        let taught = template.and_then(|template| ToolCallFormat::of_template(&template.text()));
        let context = EnvironmentContext { format: taught, ..context };
        let factory = registry
            .build(spec, &context)
            .map_err(|error| Failure::Argument(format!("`environment.{}`: {error}", error.key())))?;
        let opened = recipe.opened(directory.path())?;
        let tools = factory.tools();
        let describe = spec.describe_tools.unwrap_or(true) && !tools.is_empty();
        let (directory, description) = match template {
            Some(template) if describe && template.knows_tools() => {
                (opened.with_tools(tools.iter().map(|tool| tool.to_json()).collect()), None)
            }
            _ if describe => {
                let format = spec.format.or(taught).unwrap_or(ToolCallFormat::Json);
                (opened, Some(format.describe(tools)))
            }
            _ => (opened, None),
        };
        let directory = Arc::new(directory);
        Ok(Self {
            environment: Some(OpenEnvironment { factory, directory, describes: describe, description }),
        })
    }

    /// The model that prompts are encoded for.
    pub(crate) fn directory<'a>(&'a self, plain: &'a ModelDirectory) -> &'a ModelDirectory {
        self.environment.as_ref().map_or(plain, |open| &open.directory)
    }

    /// A task whose prompt describes the tools.
    ///
    /// # Errors
    /// A prompt that is plain text: tools are described in a system message.
    pub(crate) fn described(&self, mut task: Task) -> Result<Task, Failure> {
        let Some(OpenEnvironment { factory, describes, description, .. }) = &self.environment else {
            return Ok(task);
        };
        match (&mut task.prompt, description) {
            (Prompt::Messages(messages), Some(description)) => {
                match messages.first_mut().filter(|first| first.role == "system") {
                    Some(system) => system.content = format!("{}\n\n{description}", system.content),
                    None => messages.insert(0, Message::new("system", description.clone())),
                }
                Ok(task)
            }
            (Prompt::Text(_), _) if *describes => Err(Failure::Argument(format!(
                "`environment.describe_tools`: the prompts are plain text, which cannot describe the tools of `{}`; set \
                 `data.chat = true`, or describe them in the prompts yourself and set `describe_tools = false`",
                factory.name()
            ))),
            _ => Ok(task),
        }
    }

    /// How environment and chat template were understood, one line each.
    pub(crate) fn notes(&self) -> Vec<String> {
        let Some(OpenEnvironment { factory, directory, .. }) = &self.environment else { return Vec::new() };
        let about = factory.about().map(|about| format!("environment {about}"));
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
        about.into_iter().chain(turns.map(str::to_owned)).collect()
    }

    /// What episodes of at most `max_tokens` tokens are played in.
    pub(crate) fn episodes(&self, max_tokens: usize) -> EpisodeConfig {
        let Some(OpenEnvironment { factory, directory, .. }) = &self.environment else {
            return EpisodeConfig::single_turn();
        };
        EpisodeConfig {
            environments: Arc::clone(factory),
            encoder: Some(Arc::new(ChatEncoder::new(Arc::clone(directory)))),
            max_tokens,
        }
    }
}
