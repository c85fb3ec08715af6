//! Chat templates of model families: the tokens of later turns against transformers.
//!
//! Invariant: the tokens of a turn begin with all tokens before, whatever the template does to past turns. Three families are
//! recorded; the test of all of them is ignored where transformers and the templates may be missing. `tests/run --all` runs it
//! with the interpreter of the variable PYTHON and the templates of llama.cpp in the folder of the variable RLRUN_TEMPLATES.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use model::{ModelDirectory, SpecialTokens};
use rollout::{ChatEncoder, MessageEncoder};
use serde::Deserialize;
use trajectory::{Message, Prompt, Task, TaskId};

#[derive(Deserialize)]
struct Case {
    name: String,
    steps: Vec<Step>,
    tools: Vec<serde_json::Value>,
    /// Whether the template has the prefix property in this conversation.
    kept: bool,
}

#[derive(Deserialize)]
struct Step {
    messages: Vec<Message>,
    /// Of transformers.
    ids: Vec<u32>,
    completion: String,
    /// The token that ends it.
    end: u32,
}

fn task(messages: Vec<Message>) -> Task {
    Task { id: TaskId(0), prompt: Prompt::Messages(messages), answer: None, columns: serde_json::Map::new() }
}

/// The families that are recorded in `goldens/turns`, which `write_template_cases.py` has written of `goldens/templates`.
#[test]
fn later_turns_are_those_that_transformers_was_recorded_with() {
    let recorded = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/turns");
    assert_eq!(compared(&recorded), Compared { equal: 9, changed: 0 });
}

#[test]
#[ignore = "needs transformers, and the templates of llama.cpp"]
fn later_turns_continue_all_tokens_before_and_are_those_of_transformers() {
    let templates = std::env::var_os("RLRUN_TEMPLATES").expect("RLRUN_TEMPLATES names a folder of templates");
    let directory = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/write_template_cases.py");
    let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
    let written = Command::new(python).arg(script).arg(templates).arg(directory.path()).output().unwrap();
    assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
    let compared = compared(directory.path());
    assert!(compared.equal > 12, "{compared:?}");
}

/// Conversations whose tokens are those of transformers, and those whose templates change past turns.
#[derive(Debug, Default, PartialEq, Eq)]
struct Compared {
    equal: usize,
    changed: usize,
}

/// Compares the conversations of all families in `directory`.
fn compared(directory: &Path) -> Compared {
    let mut compared = Compared::default();
    for family in std::fs::read_dir(directory).unwrap() {
        let family = family.unwrap().path();
        let name = family.file_name().unwrap().to_string_lossy().into_owned();
        let cases = std::fs::read_to_string(family.join("cases.json")).unwrap();
        for case in serde_json::from_str::<Vec<Case>>(&cases).unwrap() {
            let at = format!("{name}, {}", case.name);
            let model = ModelDirectory::open(&family).unwrap().with_tools(case.tools.clone());
            check(&case, &Arc::new(model), &at);
            let count = if case.kept { &mut compared.equal } else { &mut compared.changed };
            *count += 1;
        }
    }
    compared
}

/// Every step begins with all ids before it, and is that of transformers if the template has the prefix property.
fn check(case: &Case, model: &Arc<ModelDirectory>, at: &str) {
    let encoder = ChatEncoder::new(Arc::clone(model));
    let first = task(case.steps[0].messages.clone());
    let mut ids = encoder.opening(&first, &[]).unwrap();
    assert_eq!(ids, case.steps[0].ids, "{at}: the first prompt");
    for pair in case.steps.windows(2) {
        ids.extend(model.tokenizer().encode(&pair[0].completion, SpecialTokens::Omit).unwrap());
        // A completion that was cut before its stop token gets the end of its turn from the template.
        let open = *ids.last().unwrap();
        let cut = encoder.following(&first, open, &pair[1].messages).unwrap();
        assert!(model.stop_token_ids().contains(&pair[0].end), "{at}");
        ids.push(pair[0].end);
        let closed = encoder.following(&first, pair[0].end, &pair[1].messages).unwrap();
        assert_eq!((cut[0], &cut[1..]), (pair[0].end, &closed[..]), "{at}");
        let before = ids.clone();
        ids.extend(closed);
        assert!(ids.starts_with(&before) && ids.len() > before.len(), "{at}");
        if case.kept {
            let text = |ids: &[u32]| model.tokenizer().decode_special(ids).unwrap();
            assert_eq!(text(&ids), text(&pair[1].ids), "{at}");
            assert_eq!(ids, pair[1].ids, "{at}");
        } else {
            // What is new is what the template adds: both end with the new messages and the open turn.
            assert!(pair[1].ids.ends_with(&ids[before.len() + 1..]), "{at}");
        }
    }
}

/// GLM ends a turn with the token of the next role. If the policy ended it with that of a tool and the environment is a user,
/// the token of the user follows; what was sampled stays.
#[test]
fn the_token_of_the_next_role_is_written_if_the_completion_ended_with_another() {
    let family = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/turns/glm");
    let model = Arc::new(ModelDirectory::open(&family).unwrap());
    let encoder = ChatEncoder::new(Arc::clone(&model));
    let first = task(vec![Message::new("user", "?")]);
    let token = |text: &str| model.tokenizer().encode(text, SpecialTokens::Omit).unwrap()[0];
    let following = |last: u32, role: &str| {
        let messages = [Message::new(role, "more")];
        model.tokenizer().decode_special(&encoder.following(&first, last, &messages).unwrap()).unwrap()
    };
    let (user, tool) = (token("<|user|>"), token("<|observation|>"));
    assert_eq!(following(user, "user"), "\nmore<|assistant|>\n");
    assert_eq!(following(tool, "user"), "<|user|>\nmore<|assistant|>\n");
    let answer = "\n<tool_response>\nmore\n</tool_response><|assistant|>\n";
    assert_eq!(following(tool, "tool"), answer);
    assert_eq!(following(user, "tool"), format!("<|observation|>{answer}"));
}
