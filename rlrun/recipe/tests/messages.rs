//! What the sources of the repository say to users: every key that a message names is there.

use std::collections::BTreeSet;

use super::*;
use crate::recipe::manual;

/// Folders whose messages speak of recipes.
const FOLDERS: [&str; 9] =
    ["rlrun", "rollout", "trainer", "rewards", "host", "model", "buffer", "weights", "device"];
/// Files of HTTP bodies, model directories and columns of datasets, whose names in backticks are no keys of a recipe.
const OF_OTHERS: [&str; 12] = [
    "buffer/src/http/",
    "model/src/",
    "weights/src/",
    "trainer/src/lora_files.rs",
    "rewards/src/code/suite.rs",
    "rlrun/conversations.rs",
    "rewards/src/countdown.rs",
    "rewards/src/http/",
    "rewards/src/reward_model/wire.rs",
    "host/src/sandbox/",
    "rollout/src/remote/",
    "rollout/src/tasks/prompt.rs",
];
/// Names in backticks that are commands, files, columns or fields of a group.
const NO_KEYS: [&str; 10] = [
    "log_metric",
    "mpirun",
    "a",
    "b",
    "rlrun",
    "correct",
    "save_pretrained",
    "save_to_disk",
    "to_parquet",
    "e_score_correction_bias",
];
/// Starts of the names of tensors.
const TENSORS: [&str; 3] = ["model.embed_tokens", "model.language_model", "model.visual"];
/// Endings of files and of names that only look like a key, such as `model.safetensors`.
const ENDINGS: [&str; 12] = [
    ".bin",
    ".rs",
    ".json",
    ".jsonl",
    ".redb",
    ".toml",
    ".safetensors",
    ".gguf",
    ".old",
    ".weight",
    ".layers",
    ".layers.0",
];

/// The string literals of a source, without its tests and comments.
fn literals(source: &str) -> Vec<String> {
    let source = source.split("#[cfg(test)]").next().unwrap_or_default();
    let code: String = source.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    let (mut literals, mut rest) = (Vec::new(), code.as_str());
    while let Some(start) = rest.find('"') {
        let mut text = String::new();
        let mut chars = rest[start + 1..].char_indices();
        let mut end = rest.len();
        while let Some((at, c)) = chars.next() {
            match c {
                '"' => {
                    end = start + 1 + at + 1;
                    break;
                }
                '\\' => drop(chars.next()),
                c => text.push(c),
            }
        }
        literals.push(text);
        rest = &rest[end.min(rest.len())..];
    }
    literals
}

/// `folder/...` of every source that is no test, with its text.
fn sources() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut open: Vec<PathBuf> = FOLDERS.iter().map(|folder| root.join(folder)).collect();
    let mut found = Vec::new();
    while let Some(path) = open.pop() {
        let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
        if path.is_dir() && !name.ends_with("tests") && !name.ends_with("target") {
            open.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if name.ends_with(".rs") && !name.ends_with("tests.rs") {
            found.push((name, fs::read_to_string(path).unwrap()));
        }
    }
    found
}

fn is_name(word: &str) -> bool {
    word.starts_with(|c: char| c.is_ascii_lowercase())
        && word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '_' | '.'))
}

#[test]
fn every_key_in_a_message_is_one_of_the_schema() {
    let keys: BTreeSet<String> = manual::keys().iter().map(|key| key.path.replace("[]", "")).collect();
    let sections: BTreeSet<String> =
        manual::sections().iter().map(|section| section.path.replace("[]", "")).collect();
    let names: BTreeSet<&str> =
        keys.iter().chain(&sections).map(|path| path.rsplit('.').next().unwrap()).collect();
    let exists = |path: &str| keys.contains(path) || sections.contains(path);
    let (mut wrong, mut dotted, mut bare) = (Vec::new(), 0, 0);
    // Names of peers are no keys of ours, which is tested where they are.
    for (file, text) in sources().into_iter().filter(|(file, _)| !file.ends_with("peers/names.rs")) {
        for literal in literals(&text) {
            let words = literal.split(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '_' | '.')));
            for word in words.map(|word| word.trim_matches('.')).filter(|word| is_name(word)) {
                let section = word.split('.').next().unwrap_or_default();
                if word.contains('.')
                    && sections.contains(section)
                    && !ENDINGS.iter().any(|e| word.ends_with(e))
                {
                    dotted += 1;
                    if !exists(word) && !TENSORS.contains(&word) {
                        wrong.push(format!("{file}: {word}"));
                    }
                }
            }
            let of_others = OF_OTHERS.iter().any(|start| file.starts_with(start));
            for word in literal.split('`').skip(1).step_by(2).filter(|word| is_name(word) && !of_others) {
                let is_file = ENDINGS.iter().any(|ending| word.ends_with(ending));
                bare += 1;
                if !is_file && !NO_KEYS.contains(&word) && !names.contains(word) && !exists(word) {
                    wrong.push(format!("{file}: `{word}`"));
                }
            }
        }
    }
    assert!(dotted > 200 && bare > 100, "only {dotted} and {bare} names were found");
    assert!(wrong.is_empty(), "these are no keys:\n{}", wrong.join("\n"));
}
