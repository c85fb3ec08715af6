//! Which columns of a dataset make a task.
//!
//! Invariant: columns are chosen once, on the first row, and every row must have them; a recipe that names a column
//! never falls back to another.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use trajectory::{Message, Prompt, Task, TaskId};

use super::rows::{DatasetRow, TaskSplit, read, type_of};
use super::{TaskError, prompt};

/// Columns that hold the prompt, in the order they are tried.
const PROMPT_COLUMNS: [&str; 5] = ["prompt", "question", "problem", "input", "query"];
/// Columns that hold the reference answer, in the order they are tried.
const ANSWER_COLUMNS: [&str; 6] =
    ["answer", "solution", "ground_truth", "reward_model.ground_truth", "label", "output"];

/// How rows become tasks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TaskSource {
    /// Column of the prompt, dots reaching into nested objects; found by its usual names if not given.
    pub prompt_column: Option<String>,
    /// Column of the reference answer, likewise; tasks may go without one if it is not given.
    pub answer_column: Option<String>,
    /// First message of every prompt, in place of the system message that a row may have. Implies `chat`.
    pub system_prompt: Option<String>,
    /// Text with `{column}` placeholders that makes the prompt, in place of a prompt column.
    pub prompt_template: Option<String>,
    /// Make messages of prompts that are text, so that the chat template of the model is applied.
    pub chat: bool,
    /// Column of whole conversations, which hold their own prompt: the messages before the last assistant turn. Read where
    /// a row has no prompt column of the usual names and none is given.
    pub conversation_column: Option<String>,
    /// Rows that are read at most.
    pub limit: Option<usize>,
    /// The split that is read of a saved dataset which has several.
    pub split: TaskSplit,
}

impl TaskSource {
    /// Reads files (`.jsonl`, `.json`, `.csv`, `.parquet`, `.arrow`) and directories of them as one dataset.
    ///
    /// # Errors
    /// Everything of [`TaskError`] that concerns files, rows and columns; a dataset without rows.
    pub fn load(&self, paths: &[PathBuf]) -> Result<Vec<Task>, TaskError> {
        let rows = read(paths, self.split, self.limit)?;
        let Some(first) = rows.first() else {
            return Err(TaskError::Empty { paths: paths.iter().map(|p| p.display().to_string()).collect() });
        };
        let columns = self.columns(first)?;
        rows.into_iter().zip(0..).map(|(row, id)| self.task(&columns, TaskId(id), row)).collect()
    }

    fn columns(&self, first: &DatasetRow) -> Result<DatasetColumns, TaskError> {
        let prompt = match (&self.prompt_template, &self.prompt_column) {
            (Some(_), Some(_)) => return Err(TaskError::TemplateAndColumn),
            (Some(template), None) => PromptFrom::Template(template.clone()),
            (None, Some(column)) => PromptFrom::Column(column.clone()),
            (None, None) => {
                let present = |column: &&str| prompt::cell(&first.columns, column).is_some();
                let conversation = self.conversation_column.as_deref().filter(|column| present(column));
                match (PROMPT_COLUMNS.into_iter().find(present), conversation) {
                    (Some(column), _) => PromptFrom::Column(column.to_owned()),
                    (None, Some(column)) => PromptFrom::Conversation(column.to_owned()),
                    (None, None) => {
                        let usual = PROMPT_COLUMNS.join("`, `");
                        return Err(missing(first, &usual, "the prompt (`prompt_column`)"));
                    }
                }
            }
        };
        let usable =
            |column: &&str| prompt::cell(&first.columns, column).is_some_and(|v| prompt::text(v).is_some());
        let answer = match &self.answer_column {
            Some(column) => Some(column.clone()),
            None => ANSWER_COLUMNS.into_iter().find(usable).map(str::to_owned),
        };
        Ok(DatasetColumns { prompt, answer })
    }

    fn task(&self, columns: &DatasetColumns, id: TaskId, row: DatasetRow) -> Result<Task, TaskError> {
        let prompt = match &columns.prompt {
            PromptFrom::Template(template) => Prompt::Text(prompt::fill(&row, template)?),
            PromptFrom::Column(column) => {
                let value = prompt::cell(&row.columns, column)
                    .ok_or_else(|| missing(&row, column, "the prompt (`prompt_column`)"))?;
                prompt::from_cell(&row, column, value)?
            }
            PromptFrom::Conversation(column) => {
                let value = prompt::cell(&row.columns, column)
                    .ok_or_else(|| missing(&row, column, "a conversation"))?;
                prompt::of_conversation(&row, column, value)?
            }
        };
        let answer = columns.answer.as_ref().map(|column| answer(&row, column)).transpose()?;
        Ok(Task { id, prompt: self.conversation(prompt), answer, columns: row.columns })
    }

    /// The prompt with the messages that this asks for: the system message, and text as a message of the user.
    #[must_use]
    pub fn conversation(&self, prompt: Prompt) -> Prompt {
        let mut messages = match prompt {
            Prompt::Text(text) if !self.chat && self.system_prompt.is_none() => return Prompt::Text(text),
            Prompt::Text(content) => vec![Message::new("user", content)],
            Prompt::Messages(messages) => messages,
        };
        if let Some(system) = &self.system_prompt {
            messages.retain(|message| message.role != "system");
            messages.insert(0, Message::new("system", system.clone()));
        }
        Prompt::Messages(messages)
    }
}

struct DatasetColumns {
    prompt: PromptFrom,
    answer: Option<String>,
}

enum PromptFrom {
    Column(String),
    Conversation(String),
    Template(String),
}

fn answer(row: &DatasetRow, column: &str) -> Result<String, TaskError> {
    let value = prompt::cell(&row.columns, column)
        .ok_or_else(|| missing(row, column, "the answer (`answer_column`)"))?;
    prompt::text(value).ok_or_else(|| TaskError::CellType {
        place: row.place.clone(),
        column: column.to_owned(),
        found: type_of(value).to_owned(),
        expected: "an answer must be a string, a number or a boolean; name its column in `answer_column`",
    })
}

fn missing(row: &DatasetRow, column: &str, purpose: &'static str) -> TaskError {
    TaskError::MissingColumn {
        place: row.place.clone(),
        column: column.to_owned(),
        purpose,
        existing: row.columns.keys().cloned().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::rows::tests::fixture;

    fn load(source: &TaskSource, lines: &str) -> Result<Vec<Task>, TaskError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("d.jsonl");
        std::fs::write(&path, lines).unwrap();
        source.load(&[path])
    }

    fn messages(task: &Task) -> Vec<(&str, &str)> {
        let Prompt::Messages(messages) = &task.prompt else { panic!("text: {:?}", task.prompt) };
        messages.iter().map(|m| (m.role.as_str(), m.content.as_str())).collect()
    }

    #[test]
    fn usual_columns_are_found() {
        for prompt in PROMPT_COLUMNS {
            for answer in ["answer", "solution", "ground_truth", "label", "output"] {
                let line = format!(r#"{{"{prompt}": "2+2", "{answer}": 4, "other": [1]}}"#);
                let tasks = load(&TaskSource::default(), &line).unwrap();
                assert_eq!(tasks[0].prompt, Prompt::Text("2+2".into()), "{prompt}");
                assert_eq!(tasks[0].answer.as_deref(), Some("4"), "{answer}");
                assert_eq!(tasks[0].columns.len(), 3);
            }
        }
        let both =
            load(&TaskSource::default(), r#"{"question": "q", "prompt": "p", "answer": [1], "label": "l"}"#);
        let task = &both.unwrap()[0];
        assert_eq!((&task.prompt, task.answer.as_deref()), (&Prompt::Text("p".into()), Some("l")));
        assert_eq!(load(&TaskSource::default(), r#"{"prompt": "p"}"#).unwrap()[0].answer, None);
    }

    #[test]
    fn a_conversation_holds_its_own_prompt() {
        let source = TaskSource { conversation_column: Some("messages".into()), ..TaskSource::default() };
        let turn = |role: &str, content: &str| format!(r#"{{"role":"{role}","content":"{content}"}}"#);
        let of = |turns: &[String]| load(&source, &format!(r#"{{"messages":[{}]}}"#, turns.join(",")));
        let (ask, answer, more) = (turn("user", "a"), turn("assistant", "b"), turn("user", "c"));
        let tasks = of(&[ask.clone(), answer.clone(), more.clone(), answer.clone()]).unwrap();
        assert_eq!(messages(&tasks[0]), [("user", "a"), ("assistant", "b"), ("user", "c")]);
        // A prompt column of the row comes first, and without an answer there is nothing to learn.
        let with_prompt = r#"{"prompt":"p","messages":[{"role":"user","content":"a"}]}"#;
        assert_eq!(load(&source, with_prompt).unwrap()[0].prompt, Prompt::Text("p".into()));
        for (turns, found) in
            [(vec![ask.clone(), more], "no assistant turn"), (vec![answer], "nothing before its last")]
        {
            let message = of(&turns).unwrap_err().to_string();
            assert!(message.contains(found), "{message}");
        }
    }

    #[test]
    fn the_layout_of_verl_is_read_from_parquet() {
        let source = TaskSource { system_prompt: Some("Be brief.".into()), ..TaskSource::default() };
        let tasks = source.load(&[fixture("verl.parquet")]).unwrap();
        assert_eq!(tasks.len(), 3);
        assert_eq!(messages(&tasks[2]), [("system", "Be brief."), ("user", "2+2")]);
        assert_eq!(tasks[2].answer.as_deref(), Some("4"));
        assert_eq!(tasks[2].columns["extra_info"]["index"], 2);
    }

    #[test]
    fn text_becomes_messages_for_chat_and_system_prompts() {
        let line = r#"{"prompt": "hi"}"#;
        let chat = TaskSource { chat: true, ..TaskSource::default() };
        assert_eq!(messages(&load(&chat, line).unwrap()[0]), [("user", "hi")]);
        let system = TaskSource { system_prompt: Some("s".into()), ..TaskSource::default() };
        assert_eq!(messages(&load(&system, line).unwrap()[0]), [("system", "s"), ("user", "hi")]);
        let own = r#"{"prompt": [{"role": "system", "content": "old"}, {"role": "user", "content": "hi"}]}"#;
        assert_eq!(messages(&load(&system, own).unwrap()[0]), [("system", "s"), ("user", "hi")]);
        assert_eq!(messages(&load(&chat, own).unwrap()[0])[0], ("system", "old"));
    }

    #[test]
    fn named_columns_templates_and_limits() {
        let source = TaskSource {
            prompt_template: Some("Q: {m.q}\nA:".into()),
            answer_column: Some("m.a".into()),
            limit: Some(1),
            ..TaskSource::default()
        };
        let line = r#"{"prompt": "no", "m": {"q": "2+2", "a": 4.5}, "answer": "no"}"#;
        let tasks = load(&source, &format!("{line}\nnot json")).unwrap();
        assert_eq!(tasks.len(), 1);
        assert_eq!(tasks[0].prompt, Prompt::Text("Q: 2+2\nA:".into()));
        assert_eq!(tasks[0].answer.as_deref(), Some("4.5"));
    }

    #[test]
    fn errors_name_the_missing_column_and_the_columns_of_the_row() {
        let auto = load(&TaskSource::default(), r#"{"text": "hi", "n": 1}"#).unwrap_err().to_string();
        assert!(
            auto.ends_with(
                "d.jsonl:1: no column `prompt`, `question`, `problem`, `input`, `query` for the prompt \
                 (`prompt_column`); the row has `text`, `n`"
            ),
            "{auto}"
        );
        let later = load(&TaskSource::default(), "{\"prompt\": \"a\"}\n\n{\"question\": \"b\"}").unwrap_err();
        assert!(later.to_string().contains("d.jsonl:3: no column `prompt`"), "{later}");
        let named = TaskSource { answer_column: Some("gold".into()), ..TaskSource::default() };
        let error = load(&named, r#"{"prompt": "a", "answer": "b"}"#).unwrap_err();
        assert!(matches!(&error, TaskError::MissingColumn { column, .. } if column == "gold"), "{error}");
    }

    #[test]
    fn cells_of_wrong_type_and_empty_datasets_are_refused() {
        let lines = "{\"prompt\": \"a\", \"answer\": 1}\n{\"prompt\": \"b\", \"answer\": null}";
        let error = load(&TaskSource::default(), lines).unwrap_err().to_string();
        assert!(error.contains("d.jsonl:2: column `answer` is null; an answer must be"), "{error}");
        assert!(matches!(load(&TaskSource::default(), "\n"), Err(TaskError::Empty { .. })));
        let none = TaskSource { limit: Some(0), ..TaskSource::default() };
        assert!(matches!(load(&none, r#"{"prompt": "a"}"#), Err(TaskError::Empty { .. })));
        let both = TaskSource {
            prompt_template: Some("{prompt}".into()),
            prompt_column: Some("prompt".into()),
            ..TaskSource::default()
        };
        assert!(matches!(load(&both, r#"{"prompt": "a"}"#), Err(TaskError::TemplateAndColumn)));
    }

    /// Reads `../shared/data/gsm8k` beside the repository; says so and passes where it is not there.
    #[test]
    fn gsm8k_loads_as_it_is() {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/gsm8k");
        if !path.exists() {
            eprintln!("SKIPPED: there is no {}", path.display());
            return;
        }
        let tasks = TaskSource::default().load(&[path]).unwrap();
        assert_eq!(tasks.len(), 1319 + 7473);
        assert!(tasks.iter().all(|task| task.answer.as_ref().is_some_and(|a| a.contains("#### "))));
    }
}
