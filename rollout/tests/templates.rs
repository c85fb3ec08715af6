//! Chat templates of model families: the tokens of later turns against transformers.
//!
//! Invariant: the tokens of a turn begin with all tokens before, whatever the template does to past turns. The test is ignored
//! where transformers and the templates may be missing; `tests/run --all` runs it with the interpreter of the variable PYTHON
//! and the templates of llama.cpp in the folder of the variable RLRUN_TEMPLATES.

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
}

fn task(messages: Vec<Message>) -> Task {
    Task { id: TaskId(0), prompt: Prompt::Messages(messages), answer: None, columns: serde_json::Map::new() }
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
    let (mut equal, mut changed) = (0, 0);
    for family in std::fs::read_dir(directory.path()).unwrap() {
        let family = family.unwrap().path();
        let name = family.file_name().unwrap().to_string_lossy().into_owned();
        let cases = std::fs::read_to_string(family.join("cases.json")).unwrap();
        for case in serde_json::from_str::<Vec<Case>>(&cases).unwrap() {
            let at = format!("{name}, {}", case.name);
            let model = ModelDirectory::open(&family).unwrap().with_tools(case.tools.clone());
            let model = Arc::new(model);
            let encoder = ChatEncoder::new(Arc::clone(&model));
            let first = task(case.steps[0].messages.clone());
            let mut ids = encoder.opening(&first, &[]).unwrap();
            assert_eq!(ids, case.steps[0].ids, "{at}: the first prompt");
            for pair in case.steps.windows(2) {
                ids.extend(model.tokenizer().encode(&pair[0].completion, SpecialTokens::Omit).unwrap());
                // A completion that was cut before its stop token gets the end of its turn from the template.
                let open = *ids.last().unwrap();
                let cut = encoder.following(&first, open, &pair[1].messages).unwrap();
                ids.extend(model.stop_token_ids().first());
                let closed = encoder.following(&first, *ids.last().unwrap(), &pair[1].messages).unwrap();
                assert_eq!((cut[0], &cut[1..]), (model.stop_token_ids()[0], &closed[..]), "{at}");
                let before = ids.clone();
                ids.extend(closed);
                assert!(ids.starts_with(&before) && ids.len() > before.len(), "{at}");
                if case.kept {
                    assert_eq!(
                        model.tokenizer().decode_special(&ids).unwrap(),
                        model.tokenizer().decode_special(&pair[1].ids).unwrap(),
                        "{at}"
                    );
                    assert_eq!(ids, pair[1].ids, "{at}");
                } else {
                    // What is new is what the template adds: both end with the new messages and the open turn.
                    assert!(pair[1].ids.ends_with(&ids[before.len() + 1..]), "{at}");
                }
            }
            if case.kept {
                equal += 1
            } else {
                changed += 1
            }
            println!("{at}: {}", if case.kept { "equal" } else { "the template changes past turns" });
        }
    }
    assert!(equal > 12, "{equal} conversations are equal, {changed} are changed by their templates");
}
