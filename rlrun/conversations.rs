//! Completions of a dataset as training samples: texts, or messages in TRL's form.
//!
//! Invariant: the tokens of an assistant turn are those that sampling would produce after the rendered conversation before
//! it: the encoded text and the token that ends it. No other token is in the loss.

use model::{ChatMessage, ChatOptions, ModelDirectory, SpecialTokens};
use rollout::tasks::prompt;
use serde_json::Value;
use trajectory::{Message, Prompt, Sample, Task};

use crate::demonstrations;
use crate::failure::Failure;

/// Keys of what an assistant has thought, in the templates of model families.
const THOUGHTS: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];

/// The completion that is trained on.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ConversationCompletion {
    /// One answer.
    Text(String),
    /// A conversation whose assistant turns from `learnt` on are in the loss.
    Messages {
        /// All messages, with those of the prompt.
        messages: Vec<ChatMessage>,
        /// The first message that may be in the loss.
        learnt: usize,
    },
}

/// The completion in `column`: a text, or a list of messages. A list that begins with the messages of the prompt, or with
/// the prompt as a user's message, is the whole conversation; any other follows the prompt.
///
/// # Errors
/// If the task has no such column, it is neither, or no assistant turn follows the prompt.
pub(crate) fn completion(task: &Task, column: &str) -> Result<ConversationCompletion, Failure> {
    let Some(list @ Value::Array(_)) = task.columns.get(column) else {
        return Ok(ConversationCompletion::Text(demonstrations::text(task, Some(column))?));
    };
    let messages = messages(task, column, list)?;
    let before = match &task.prompt {
        Prompt::Messages(prompt) => prompt.clone(),
        Prompt::Text(text) => vec![Message::new("user", text.clone())],
    };
    let mut before: Vec<ChatMessage> = before.iter().map(ChatMessage::from).collect();
    // A system message of the recipe precedes those of the row.
    let asked: Vec<usize> = (0..before.len()).filter(|at| before[*at].role != "system").collect();
    let given: Vec<usize> = (0..messages.len()).filter(|at| messages[*at].role != "system").collect();
    let same = |(at, other): (&usize, &usize)| {
        let (asked, given) = (&before[*at], &messages[*other]);
        (&asked.role, &asked.content) == (&given.role, &given.content)
    };
    let whole = given.len() > asked.len() && asked.iter().zip(&given).all(same);
    let answers: Vec<ChatMessage> = if whole {
        // The row has all keys of the prompt's messages.
        for (at, other) in asked.iter().zip(&given) {
            before[*at] = messages[*other].clone();
        }
        given[asked.len()..].iter().map(|at| messages[*at].clone()).collect()
    } else {
        messages
    };
    let learnt = before.len();
    match &answers[..] {
        // One answer to the prompt as it is sampled from.
        [answer] if answer.role == "assistant" && is_text(answer) => {
            return Ok(ConversationCompletion::Text(answer.content.clone()));
        }
        answers if answers.iter().any(|message| message.role == "assistant") => {}
        _ => return Err(wrong(task, column, "has no assistant turn after the prompt")),
    }
    Ok(ConversationCompletion::Messages { messages: before.into_iter().chain(answers).collect(), learnt })
}

/// Whether the content of a message is all that its assistant has said.
fn is_text(message: &ChatMessage) -> bool {
    message.tool_calls.is_empty() && !THOUGHTS.iter().any(|key| message.extra.contains_key(*key))
}

/// The conversation in `column`, of which every assistant turn is learnt; `None` if the task has no such column.
///
/// # Errors
/// If it is no list of messages, or has no assistant turn.
pub(crate) fn conversation(task: &Task, column: &str) -> Result<Option<ConversationCompletion>, Failure> {
    let Some(value) = task.columns.get(column) else { return Ok(None) };
    let mut messages = messages(task, column, value)?;
    if !messages.iter().any(|message| message.role == "assistant") {
        return Err(wrong(task, column, "has no assistant turn"));
    }
    // `data.system_prompt` stands in the prompt of the task, in place of the row's own.
    if let Prompt::Messages(prompt) = &task.prompt
        && let Some(system) = prompt.first().filter(|message| message.role == "system")
    {
        messages.retain(|message| message.role != "system");
        messages.insert(0, ChatMessage::from(system));
    }
    Ok(Some(ConversationCompletion::Messages { messages, learnt: 0 }))
}

impl ConversationCompletion {
    /// Prompt and completion as something to learn.
    ///
    /// # Errors
    /// If there is no chat template for messages, or it refuses them or rewrites earlier turns.
    pub(crate) fn sample(&self, directory: &ModelDirectory, task: &Task) -> Result<Sample, Failure> {
        match self {
            Self::Text(text) => demonstrations::sample(directory, &task.prompt, text),
            Self::Messages { messages, learnt } => {
                let (token_ids, mask) = turns(directory, messages, *learnt).map_err(|error| match error {
                    Failure::Argument(reason) => Failure::Argument(format!("task {}: {reason}", task.id.0)),
                    other => other,
                })?;
                demonstrations::learnt(token_ids, mask)
            }
        }
    }
}

/// The tokens of a conversation up to its last assistant turn, and which of them are in the loss.
fn turns(
    directory: &ModelDirectory,
    messages: &[ChatMessage],
    learnt: usize,
) -> Result<(Vec<u32>, Vec<bool>), Failure> {
    let no_template =
        "messages need a chat template, and the model has none; give texts, or add `chat_template.jinja`";
    let template = directory.template().ok_or_else(|| Failure::Argument(no_template.to_owned()))?;
    let encode = |text: &str| directory.tokenizer().encode(text, SpecialTokens::Omit);
    let render = |turns: &[ChatMessage], add_generation_prompt: bool| {
        template.render_chat(turns.to_vec(), ChatOptions { add_generation_prompt, ..ChatOptions::default() })
    };
    let (mut token_ids, mut mask, mut done) = (Vec::new(), Vec::new(), String::new());
    let mut push = |ids: &[u32], learnt: bool| {
        token_ids.extend_from_slice(ids);
        mask.extend(std::iter::repeat_n(learnt, ids.len()));
    };
    for turn in (learnt..messages.len()).filter(|at| messages[*at].role == "assistant") {
        let before = render(&messages[..turn], true)?;
        let after = render(&messages[..=turn], false)?;
        let (Some(asked), Some(answered)) = (before.strip_prefix(&done), after.strip_prefix(&before)) else {
            return Err(Failure::Argument(format!(
                "{} renders the turns before message {turn} differently once it follows, so that the tokens that the \
                 assistant would have sampled are not known; give conversations with one assistant turn, or another template",
                template.path().display()
            )));
        };
        push(&encode(asked)?, false);
        let ids = encode(answered)?;
        // Text of the template after the end of the turn is not sampled.
        let ends = |id: &u32| directory.stop_token_ids().contains(id);
        let end = ids.iter().position(ends).map_or(ids.len(), |end| end + 1);
        push(&ids[..end], true);
        push(&ids[end..], false);
        done = after;
    }
    Ok((token_ids, mask))
}

fn messages(task: &Task, column: &str, value: &Value) -> Result<Vec<ChatMessage>, Failure> {
    let expected = "a list of messages with `role` and `content` as strings";
    prompt::chat_messages(value)
        .map_err(|found| wrong(task, column, &format!("is {found}; it must be {expected}")))
}

fn wrong(task: &Task, column: &str, what: &str) -> Failure {
    Failure::Argument(format!("task {}: column `{column}` {what}", task.id.0))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use model::{Config, Sizes};
    use serde_json::json;
    use trajectory::TaskId;

    use super::*;

    const SIZES: Sizes = Sizes {
        vocab_size: model::CHARACTERS,
        hidden_size: 16,
        intermediate_size: 32,
        num_layers: 1,
        num_heads: 2,
        num_kv_heads: 2,
        max_position_embeddings: 64,
    };
    const TEMPLATE: &str = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>\n{% endfor %}\
                            {% if add_generation_prompt %}[assistant]{% endif %}";

    fn with_template(dir: &Path, template: &str) -> ModelDirectory {
        let path = dir.join("model");
        ModelDirectory::fresh(&path, &Config::fresh(&SIZES), 1).unwrap();
        std::fs::write(path.join("chat_template.jinja"), template).unwrap();
        ModelDirectory::open(&path).unwrap()
    }

    fn task(prompt: Prompt, columns: &Value) -> Task {
        let Value::Object(columns) = columns.clone() else { panic!("no columns") };
        Task { id: TaskId(3), prompt, answer: None, columns }
    }

    fn turn(role: &str, content: &str) -> Message {
        Message::new(role, content)
    }

    /// The prompt and the trained completion of a sample, as text with special tokens.
    fn parts(directory: &ModelDirectory, sample: &Sample) -> (String, String) {
        let of = |learnt: bool| {
            let tokens = sample.token_ids().iter().zip(sample.loss_mask());
            let ids: Vec<u32> = tokens.filter(|(_, mask)| **mask == learnt).map(|(id, _)| *id).collect();
            directory.tokenizer().decode_special(&ids).unwrap()
        };
        (of(false), of(true))
    }

    #[test]
    fn assistant_turns_alone_are_learnt() {
        let files = tempfile::tempdir().unwrap();
        let directory = with_template(files.path(), TEMPLATE);
        let columns = json!({ "messages": [
            {"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}, {"role": "user", "content": "e"},
        ]});
        let task = task(Prompt::Messages(vec![turn("user", "a")]), &columns);
        let whole = conversation(&task, "messages").unwrap().unwrap().sample(&directory, &task).unwrap();
        let read = "[system]s<eos>\n[user]a<eos>\n[assistant]\n[user]c<eos>\n[assistant]\n";
        assert_eq!(parts(&directory, &whole), (read.to_owned(), "b<eos>d<eos>".to_owned()));
        assert_eq!(conversation(&task, "other").unwrap(), None);
    }

    #[test]
    fn a_completion_is_a_text_or_messages_with_or_without_the_prompt() {
        let files = tempfile::tempdir().unwrap();
        let directory = with_template(files.path(), TEMPLATE);
        let ask = json!({"role": "user", "content": "a"});
        let answer = json!({"role": "assistant", "content": "b"});
        let prompt = || Prompt::Messages(vec![turn("user", "a")]);
        for value in [json!("b"), json!([answer]), json!([ask, answer])] {
            let task = task(prompt(), &json!({ "completion": value }));
            assert_eq!(
                completion(&task, "completion").unwrap(),
                ConversationCompletion::Text("b".to_owned())
            );
        }
        // A prompt that is text, beside whole conversations.
        let text = task(Prompt::Text("a".to_owned()), &json!({ "chosen": [ask, answer] }));
        assert_eq!(completion(&text, "chosen").unwrap(), ConversationCompletion::Text("b".to_owned()));
        let turns = json!({ "completion": [answer, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}] });
        let several = task(prompt(), &turns);
        let sample = completion(&several, "completion").unwrap().sample(&directory, &several).unwrap();
        let read = "[user]a<eos>\n[assistant]\n[user]c<eos>\n[assistant]\n";
        assert_eq!(parts(&directory, &sample), (read.to_owned(), "b<eos>d<eos>".to_owned()));
    }

    #[test]
    fn calls_of_tools_are_learnt_as_the_template_writes_them() {
        let files = tempfile::tempdir().unwrap();
        let calls = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\
                     {% for call in m.tool_calls %}({{ call.function.name }} {{ call.function.arguments.a }}){% endfor %}<eos>\
                     {% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";
        let directory = with_template(files.path(), calls);
        let call = json!([{"type": "function", "function": {"name": "add", "arguments": "{\"a\": 7}"}}]);
        let ask = json!({"role": "user", "content": "a"});
        let answer = json!({"role": "assistant", "content": null, "tool_calls": call});
        let rest = [json!({"role": "tool", "content": "8"}), json!({"role": "assistant", "content": "c"})];
        let prompt = || Prompt::Messages(vec![turn("user", "a")]);
        let single = task(prompt(), &json!({ "completion": [answer] }));
        let sample = completion(&single, "completion").unwrap().sample(&directory, &single).unwrap();
        assert_eq!(parts(&directory, &sample).1, "(add 7)<eos>");
        let columns = json!({ "messages": [ask, answer, rest[0], rest[1]] });
        let several = task(prompt(), &columns);
        let sample =
            conversation(&several, "messages").unwrap().unwrap().sample(&directory, &several).unwrap();
        assert_eq!(parts(&directory, &sample).1, "(add 7)<eos>c<eos>");
    }

    #[test]
    fn samples_without_a_trained_token_are_refused_with_the_reason() {
        let files = tempfile::tempdir().unwrap();
        // Earlier answers are rewritten, as templates do that leave out earlier thoughts.
        let forgets = "{% for m in messages %}[{{ m.role }}]{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}<eos>\
                       {% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";
        let directory = with_template(files.path(), forgets);
        let answer = json!({"role": "assistant", "content": "b"});
        let ask = json!({"role": "user", "content": "a"});
        let several = task(Prompt::Text("a".to_owned()), &json!({ "messages": [ask, answer, ask, answer] }));
        let error =
            conversation(&several, "messages").unwrap().unwrap().sample(&directory, &several).unwrap_err();
        for part in ["task 3", "chat_template.jinja", "before message 3", "one assistant turn"] {
            assert!(error.to_string().contains(part), "{error}");
        }
        let unanswered =
            task(Prompt::Text("a".to_owned()), &json!({ "messages": [ask], "completion": [ask], "x": [{}] }));
        let error = |failed: Failure| failed.to_string();
        assert!(
            conversation(&unanswered, "messages").map_err(error).unwrap_err().contains("no assistant turn")
        );
        let message = completion(&unanswered, "completion").map_err(error).unwrap_err();
        assert!(message.contains("no assistant turn after the prompt"), "{message}");
        assert!(completion(&unanswered, "x").map_err(error).unwrap_err().contains("no `role`"));
        assert!(completion(&unanswered, "y").map_err(error).unwrap_err().contains("column `y`"));
    }
}
