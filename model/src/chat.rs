//! Chat templates: messages to prompt text.
//!
//! Invariant: the text is that of transformers' `apply_chat_template`, byte for byte. A model without a template takes text
//! prompts only.

mod apart;

use std::borrow::Cow;
use std::io;
use std::path::{Path, PathBuf};

use hf_chat_template::{ChatTemplateField, Error, RenderInput, TokenizerConfig};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use trajectory::Message;

use crate::{ModelError, files};

use apart::TemplateInput;
pub use apart::{render_apart, serve};

/// Name of the template for conversations with tools, where a model has several.
const TOOL_USE: &str = "tool_use";
/// Name of the template for all others.
const DEFAULT: &str = "default";
/// Variables that transformers passes as `None` where the caller gives none.
const OPTIONAL_VARIABLES: [&str; 2] = ["tools", "documents"];

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    inner: CompiledTemplate,
    sources: TemplateSources,
    path: PathBuf,
}

#[derive(Debug)]
enum CompiledTemplate {
    /// In this process.
    Here(Box<Compiled>),
    /// In another process: the digest of the sources.
    Apart(String),
}

/// One message as chat templates take it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// The text of the message.
    pub content: String,
    /// Calls of tools by the assistant, in the form of OpenAI's `tool_calls` with `arguments` as objects.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<Value>,
    /// Further keys, such as `name`, `tool_call_id` and `reasoning_content`.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub extra: Map<String, Value>,
}

/// How a conversation is rendered.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatOptions {
    /// Descriptions of tools, in the form of OpenAI's `tools`.
    pub tools: Vec<Value>,
    /// Whether the assistant's turn is opened at the end, for sampling.
    pub add_generation_prompt: bool,
    /// Further variables of the template, such as `enable_thinking`.
    pub variables: Map<String, Value>,
}

/// The texts that a template is compiled from.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct TemplateSources {
    /// `chat_template.jinja`; without it the template is in `config`.
    template: Option<String>,
    /// `tokenizer_config.json`, which has the special tokens.
    config: Option<String>,
}

/// A template in this process.
#[derive(Debug)]
struct Compiled {
    template: hf_chat_template::ChatTemplate,
    /// The template for conversations with tools, if it is another.
    with_tools: Option<hf_chat_template::ChatTemplate>,
    /// Variables that are null where the caller gives none.
    null_variables: Vec<&'static str>,
}

/// Failure to render a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum TemplateFailure {
    /// The template does not compile.
    Compile(String),
    /// The template refuses the conversation, in these words.
    Raised(String),
    /// The template fails.
    Render(String),
}

impl From<&Message> for ChatMessage {
    fn from(message: &Message) -> Self {
        let id = message.tool_call_id.clone().map(|id| ("tool_call_id".to_owned(), Value::String(id)));
        Self {
            role: message.role.clone(),
            content: message.content.clone(),
            tool_calls: Vec::new(),
            extra: id.into_iter().collect(),
        }
    }
}

impl ChatTemplate {
    /// Reads `chat_template.jinja` of a model directory or, without it, the `chat_template` of its
    /// `tokenizer_config.json` (one template, or a list: `tool_use` for conversations with tools, `default` for others). `None`
    /// if the model has no template. After [`render_apart`] it runs in a process of its own, which has limits.
    ///
    /// # Errors
    /// If a file cannot be read, or the template does not compile.
    pub fn load(dir: &Path) -> Result<Option<Self>, ModelError> {
        let read = |path: &Path, limit| {
            files::read_text_if_there(path, limit)
                .map_err(|source| ModelError::Read { path: path.to_owned(), source })
        };
        let config_path = dir.join("tokenizer_config.json");
        let config = read(&config_path, files::MAX_JSON_BYTES)?;
        let parsed = parse(config.as_deref())
            .map_err(|err| ModelError::Json { path: config_path.clone(), reason: err.to_string() })?;
        let path = dir.join("chat_template.jinja");
        let template = read(&path, files::MAX_TEMPLATE_BYTES)?;
        let path = match template {
            Some(_) => path,
            None if parsed.chat_template.is_some() => config_path,
            None => return Ok(None),
        };
        Self::compile(path, TemplateSources { template, config }).map(Some)
    }

    /// The template of the content of a `tokenizer_config.json`, if it has one; `path` names it in errors.
    ///
    /// # Errors
    /// If the content is no JSON, or the template does not compile.
    pub(crate) fn from_config(path: &Path, config: &str) -> Result<Option<Self>, ModelError> {
        let parsed = parse(Some(config))
            .map_err(|err| ModelError::Json { path: path.to_owned(), reason: err.to_string() })?;
        if parsed.chat_template.is_none() {
            return Ok(None);
        }
        let sources = TemplateSources { template: None, config: Some(config.to_owned()) };
        Self::compile(path.to_owned(), sources).map(Some)
    }

    fn compile(path: PathBuf, sources: TemplateSources) -> Result<Self, ModelError> {
        let inner = match apart::renderer() {
            None => Compiled::new(&sources).map(|compiled| CompiledTemplate::Here(Box::new(compiled))),
            Some(renderer) => {
                let key = sources.key();
                renderer.ask(&key, &sources, None).map(|_| CompiledTemplate::Apart(key))
            }
        };
        match inner {
            Ok(inner) => Ok(Self { inner, sources, path }),
            Err(
                TemplateFailure::Compile(reason)
                | TemplateFailure::Raised(reason)
                | TemplateFailure::Render(reason),
            ) => Err(ModelError::Template { path, reason }),
        }
    }

    /// The prompt for a conversation. `add_generation_prompt` opens the assistant's turn at the end, for
    /// sampling.
    ///
    /// # Errors
    /// If the template refuses the conversation (many insist on alternating roles), fails on it, or needs more time or
    /// memory than its process has.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, ModelError> {
        self.render_with_tools(messages, &[], add_generation_prompt)
    }

    /// [`Self::render`] with descriptions of `tools`, objects in the form of OpenAI's `tools`. A template that knows no tools
    /// ignores them; see [`Self::knows_tools`].
    ///
    /// # Errors
    /// Those of [`Self::render`].
    pub fn render_with_tools(
        &self,
        messages: &[Message],
        tools: &[Value],
        add_generation_prompt: bool,
    ) -> Result<String, ModelError> {
        let messages = messages.iter().map(ChatMessage::from).collect();
        let options = ChatOptions { tools: tools.to_vec(), add_generation_prompt, variables: Map::new() };
        self.render_chat(messages, options)
    }

    /// The text of a conversation whose messages may have calls of tools and keys of their own.
    ///
    /// # Errors
    /// Those of [`Self::render`].
    pub fn render_chat(
        &self,
        messages: Vec<ChatMessage>,
        options: ChatOptions,
    ) -> Result<String, ModelError> {
        let roles = messages.iter().map(|m| m.role.as_str()).collect::<Vec<_>>().join(", ");
        let ChatOptions { tools, add_generation_prompt: open, variables } = options;
        let conversation = TemplateInput { messages, tools, open, variables };
        let rendered = match (&self.inner, apart::renderer()) {
            (CompiledTemplate::Here(compiled), _) => compiled.render(conversation),
            (CompiledTemplate::Apart(key), Some(renderer)) => {
                renderer.ask(key, &self.sources, Some(conversation))
            }
            (CompiledTemplate::Apart(_), None) => {
                Compiled::new(&self.sources).and_then(|compiled| compiled.render(conversation))
            }
        };
        rendered.map_err(|failed| ModelError::Render {
            path: self.path.clone(),
            roles,
            reason: match failed {
                TemplateFailure::Compile(reason)
                | TemplateFailure::Raised(reason)
                | TemplateFailure::Render(reason) => reason,
            },
        })
    }

    /// The text of the template; of several, of that for conversations with tools.
    #[must_use]
    pub fn text(&self) -> Cow<'_, str> {
        self.sources.text()
    }

    /// Whether the template describes the tools that it is given.
    #[must_use]
    pub fn knows_tools(&self) -> bool {
        self.text().contains("tools")
    }

    /// The file that it came from.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl TemplateSources {
    /// The text of the template: of several in a `tokenizer_config.json`, that for conversations with tools.
    fn text(&self) -> Cow<'_, str> {
        if let Some(template) = &self.template {
            return Cow::Borrowed(template);
        }
        match parse(self.config.as_deref()).ok().and_then(|config| config.chat_template) {
            Some(ChatTemplateField::Single(text)) => Cow::Owned(text),
            Some(ChatTemplateField::Named(list)) => {
                let named = |name: &str| list.iter().find(|template| template.name == name);
                let chosen = named(TOOL_USE).or_else(|| named(DEFAULT)).or(list.first());
                Cow::Owned(chosen.map(|template| template.template.clone()).unwrap_or_default())
            }
            None => Cow::Borrowed(""),
        }
    }

    /// A digest of both.
    fn key(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for text in [&self.template, &self.config] {
            hasher.update(&(text.as_ref().map_or(u64::MAX, |text| text.len() as u64)).to_le_bytes());
            hasher.update(text.as_deref().unwrap_or_default().as_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }
}

impl Compiled {
    fn new(sources: &TemplateSources) -> Result<Self, TemplateFailure> {
        let config =
            parse(sources.config.as_deref()).map_err(|error| TemplateFailure::Compile(error.to_string()))?;
        let failed = |error: Error| TemplateFailure::Compile(error.to_string());
        let compiled = match &sources.template {
            Some(text) => hf_chat_template::ChatTemplate::from_template_and_config(text, &config),
            None => hf_chat_template::ChatTemplate::from_tokenizer_config(&config),
        };
        let template = compiled.map_err(failed)?;
        let with_tools = match (&sources.template, &config.chat_template) {
            (None, Some(ChatTemplateField::Named(list))) if list.iter().any(|of| of.name == TOOL_USE) => {
                let builder = hf_chat_template::ChatTemplate::builder_from_config(&config).map_err(failed)?;
                Some(builder.template_name(TOOL_USE).build().map_err(failed)?)
            }
            _ => None,
        };
        let texts = match (&sources.template, &config.chat_template) {
            (Some(text), _) | (None, Some(ChatTemplateField::Single(text))) => vec![text.as_str()],
            (None, Some(ChatTemplateField::Named(list))) => {
                list.iter().map(|of| of.template.as_str()).collect()
            }
            (None, None) => Vec::new(),
        };
        Ok(Self { template, with_tools, null_variables: null_variables(&texts) })
    }

    fn render(&self, conversation: TemplateInput) -> Result<String, TemplateFailure> {
        let TemplateInput { messages, tools, open, variables } = conversation;
        let message = |ChatMessage { role, content, tool_calls, extra }: ChatMessage| {
            let message = hf_chat_template::Message::new(role, content);
            hf_chat_template::Message { tool_calls, extra, ..message }
        };
        let messages = messages.into_iter().map(message).collect();
        let template = self.with_tools.as_ref().filter(|_| !tools.is_empty()).unwrap_or(&self.template);
        let mut extra = variables;
        for name in self.null_variables.iter().filter(|name| **name != "tools" || tools.is_empty()) {
            extra.entry(*name).or_insert(Value::Null);
        }
        let input =
            RenderInput { messages, tools, add_generation_prompt: open, extra, ..RenderInput::default() };
        template.render(&input).map_err(|error| match error {
            Error::TemplateRaised { message } => TemplateFailure::Raised(message),
            other => TemplateFailure::Render(other.to_string()),
        })
    }
}

/// Those of [`OPTIONAL_VARIABLES`] that are null where the caller gives none. To the engine null is iterable, which `None` is not,
/// so a variable stays undefined if a template of `texts` asks whether it is iterable.
fn null_variables(texts: &[&str]) -> Vec<&'static str> {
    let asks = |text: &str, name: &str| {
        let words = text.split(|c: char| !(c.is_alphanumeric() || "_.".contains(c)));
        let words: Vec<&str> = words.filter(|word| !word.is_empty() && *word != "not").collect();
        words.windows(3).any(|at| at == [name, "is", "iterable"])
    };
    let null = OPTIONAL_VARIABLES.into_iter();
    null.filter(|name| !texts.iter().any(|text| asks(text, name))).collect()
}

/// The content of a `tokenizer_config.json`, if there is one.
fn parse(config: Option<&str>) -> io::Result<TokenizerConfig> {
    config.map_or(Ok(TokenizerConfig::default()), |text| Ok(serde_json::from_str(text)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHATML: &str = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}\
                          {% if add_generation_prompt %}[assistant]{% endif %}";

    fn user(content: &str) -> Vec<Message> {
        vec![Message::new("user", content)]
    }

    fn dir(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in files {
            std::fs::write(dir.path().join(name), content).unwrap();
        }
        dir
    }

    #[test]
    fn a_template_is_found_in_each_of_its_places() {
        let single = serde_json::json!({"eos_token": "</s>", "chat_template": CHATML}).to_string();
        let token =
            serde_json::json!({"eos_token": {"content": "</s>"}, "chat_template": "ignored"}).to_string();
        let list = serde_json::json!({"eos_token": "</s>", "chat_template": [
            {"name": "tool_use", "template": "tools"}, {"name": "default", "template": CHATML}]});
        for files in [
            dir(&[("tokenizer_config.json", &single)]),
            dir(&[("tokenizer_config.json", &token), ("chat_template.jinja", CHATML)]),
            dir(&[("tokenizer_config.json", &list.to_string())]),
        ] {
            let template = ChatTemplate::load(files.path()).unwrap().unwrap();
            assert_eq!(template.render(&user("hi"), true).unwrap(), "[user]hi</s>[assistant]");
            assert_eq!(template.render(&user("hi"), false).unwrap(), "[user]hi</s>");
        }
        assert!(ChatTemplate::load(dir(&[]).path()).unwrap().is_none());
        assert!(ChatTemplate::load(dir(&[("tokenizer_config.json", "{}")]).path()).unwrap().is_none());
    }

    #[test]
    fn conversations_with_tools_have_the_template_for_them() {
        let tool_use = "{{ tools[0].name }} for {{ messages[0].content }}";
        let list = serde_json::json!({"chat_template": [
            {"name": "default", "template": "{{ messages[0].content }}"}, {"name": "tool_use", "template": tool_use}]});
        let template = ChatTemplate::load(dir(&[("tokenizer_config.json", &list.to_string())]).path());
        let template = template.unwrap().unwrap();
        let tools = [serde_json::json!({"name": "calculator"})];
        assert_eq!(template.render_with_tools(&user("hi"), &tools, true).unwrap(), "calculator for hi");
        assert_eq!(template.render(&user("hi"), true).unwrap(), "hi");
        assert_eq!((&*template.text(), template.knows_tools()), (tool_use, true));
        let plain = serde_json::json!({"chat_template": [
            {"name": "default", "template": "{{ messages }}"}, {"name": "rag", "template": "{{ tools }}"}]});
        let template = ChatTemplate::load(dir(&[("tokenizer_config.json", &plain.to_string())]).path());
        assert!(!template.unwrap().unwrap().knows_tools());
    }

    #[test]
    fn variables_that_are_not_given_are_none_as_in_transformers() {
        let render = |template: &str| {
            let files = dir(&[("chat_template.jinja", template)]);
            ChatTemplate::load(files.path()).unwrap().unwrap().render(&user("hi"), true).unwrap()
        };
        let names =
            "{{ tools is none }} {{ documents is none }} {{ tools is defined }} {{ other is defined }}";
        assert_eq!(render(names).to_lowercase(), "true true true false");
        assert_eq!(render("{% if tools is not none and tools|length > 0 %}tools{% endif %}."), ".");
        // The form of Qwen3-Coder.
        let iterable = "{% if not tools is defined %}{% set tools = [] %}{% endif %}\
                        {% if tools is iterable and tools | length > 0 %}tools{% endif %}.";
        assert_eq!(render(iterable), ".");
    }

    #[test]
    fn a_broken_template_is_named() {
        let err = ChatTemplate::load(dir(&[("chat_template.jinja", "{% for %}")]).path()).unwrap_err();
        assert!(matches!(err, ModelError::Template { .. }), "{err}");
        assert!(err.to_string().contains("chat_template.jinja"), "{err}");
        let err = ChatTemplate::load(dir(&[("tokenizer_config.json", "{")]).path()).unwrap_err();
        assert!(matches!(err, ModelError::Json { .. }), "{err}");
    }

    #[test]
    fn a_refusal_by_the_template_is_passed_on() {
        let files = dir(&[("chat_template.jinja", "{{ raise_exception('roles must alternate') }}")]);
        let template = ChatTemplate::load(files.path()).unwrap().unwrap();
        let messages = [user("a"), user("b")].concat();
        let err = template.render(&messages, true).unwrap_err().to_string();
        assert!(err.contains("the roles user, user: roles must alternate"), "{err}");
    }
}
