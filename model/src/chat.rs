//! Messages to prompt text, with the chat template that came with the model.
//!
//! Invariant: the text is what transformers' `apply_chat_template` gives, byte for byte. It invents no template: a model
//! without one takes text prompts only.

use std::path::{Path, PathBuf};

use hf_chat_template::{Error, TokenizerConfig};
use trajectory::Message;

use crate::ModelError;

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    inner: hf_chat_template::ChatTemplate,
    path: PathBuf,
}

impl ChatTemplate {
    /// Reads `chat_template.jinja` of a model directory or, without it, the `chat_template` of its
    /// `tokenizer_config.json` (one template, or a list of which the one named `default` counts). `None` if the model
    /// has no template.
    ///
    /// # Errors
    /// If a file cannot be read, or the template does not compile.
    pub fn load(dir: &Path) -> Result<Option<Self>, ModelError> {
        let config_path = dir.join("tokenizer_config.json");
        let config = read(&config_path)?.map_or(Ok(TokenizerConfig::default()), |text| {
            serde_json::from_str(&text)
                .map_err(|err| ModelError::Json { path: config_path.clone(), reason: err.to_string() })
        })?;
        let path = dir.join("chat_template.jinja");
        let (compiled, path) = if let Some(text) = read(&path)? {
            (hf_chat_template::ChatTemplate::from_template_and_config(&text, &config), path)
        } else if config.chat_template.is_some() {
            (hf_chat_template::ChatTemplate::from_tokenizer_config(&config), config_path)
        } else {
            return Ok(None);
        };
        match compiled {
            Ok(inner) => Ok(Some(Self { inner, path })),
            Err(err) => Err(ModelError::Template { path, reason: err.to_string() }),
        }
    }

    /// The prompt for a conversation. `add_generation_prompt` opens the assistant's turn at the end, as one wants
    /// before sampling.
    ///
    /// # Errors
    /// If the template refuses the conversation (many insist on alternating roles) or fails on it.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, ModelError> {
        let converted: Vec<_> = messages
            .iter()
            .map(|m| hf_chat_template::Message::new(m.role.as_str(), m.content.as_str()))
            .collect();
        self.inner.render_messages(&converted, add_generation_prompt).map_err(|err| ModelError::Render {
            path: self.path.clone(),
            roles: messages.iter().map(|m| m.role.as_str()).collect::<Vec<_>>().join(", "),
            reason: match err {
                Error::TemplateRaised { message } => message,
                other => other.to_string(),
            },
        })
    }

    /// The file that it came from.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn read(path: &Path) -> Result<Option<String>, ModelError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(err) if err.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ModelError::Read { path: path.to_owned(), source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHATML: &str = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}\
                          {% if add_generation_prompt %}[assistant]{% endif %}";

    fn user(content: &str) -> Vec<Message> {
        vec![Message { role: "user".to_owned(), content: content.to_owned() }]
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
    fn a_broken_template_is_named() {
        let err = ChatTemplate::load(dir(&[("chat_template.jinja", "{% for %}")]).path()).unwrap_err();
        assert!(matches!(err, ModelError::Template { .. }), "{err}");
        assert!(err.to_string().contains("chat_template.jinja"), "{err}");
        let err = ChatTemplate::load(dir(&[("tokenizer_config.json", "{")]).path()).unwrap_err();
        assert!(matches!(err, ModelError::Json { .. }), "{err}");
    }

    #[test]
    fn what_the_template_says_against_a_conversation_is_passed_on() {
        let files = dir(&[("chat_template.jinja", "{{ raise_exception('roles must alternate') }}")]);
        let template = ChatTemplate::load(files.path()).unwrap().unwrap();
        let messages = [user("a"), user("b")].concat();
        let err = template.render(&messages, true).unwrap_err().to_string();
        assert!(err.contains("the roles user, user: roles must alternate"), "{err}");
    }
}
