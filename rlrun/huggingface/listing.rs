//! The files of a commit, and which of them a model or a dataset consists of.
//!
//! Invariant: nothing here asks for a file; names come from the network and were checked to lie within the repository.

use model::DESCRIPTION_FILES;
use rollout::tasks::TaskSplit;
use rollout::tasks::rows::is_dataset;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::name::{RepositoryName, is_commit, is_file};

/// Weights in one file.
const WEIGHTS: &str = "model.safetensors";
/// Names of the files that weights are divided into.
pub(super) const INDEX: &str = "model.safetensors.index.json";
/// Files of an adapter.
pub(super) const ADAPTER: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];
/// Splits, and the words in file names that mean them.
const SPLITS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "val", "dev"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];
/// Most names that a message lists.
const MOST_NAMED: usize = 12;

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RepositoryFile {
    /// Its path in the repository.
    pub(super) name: String,
    /// Its size in bytes, if the hub says it.
    #[serde(default)]
    pub(super) size: Option<u64>,
}

/// What a commit has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RepositoryListing {
    pub(super) commit: String,
    pub(super) files: Vec<RepositoryFile>,
    /// `configs` of the header of a dataset's README.md, as the hub gives it.
    #[serde(default)]
    pub(super) configs: Value,
    /// Whether these are all files, and not only those in the cache.
    pub(super) whole: bool,
}

/// The files of one split.
#[derive(Debug, PartialEq)]
struct SplitFiles {
    split: String,
    files: Vec<String>,
}

impl RepositoryListing {
    /// Whether commit and names are as they must be.
    pub(super) fn is_plain(&self) -> bool {
        is_commit(&self.commit) && self.files.iter().all(|file| is_file(&file.name))
    }

    /// Whether the commit has this file.
    pub(super) fn has(&self, file: &str) -> bool {
        self.files.iter().any(|known| known.name == file)
    }

    /// The size of a file, bytes, if it is known.
    pub(super) fn size_bytes(&self, file: &str) -> Option<u64> {
        self.files.iter().find(|known| known.name == file)?.size
    }

    /// The files that describe a model.
    pub(super) fn description(&self) -> Vec<String> {
        let there = DESCRIPTION_FILES.into_iter().filter(|file| self.has(file));
        there.map(str::to_owned).collect()
    }

    /// Checks that the files are there that a model needs beside its weights.
    ///
    /// # Errors
    /// Which is missing, and how to make it.
    pub(super) fn check_description(&self, name: &RepositoryName) -> Result<(), String> {
        if !self.has("config.json") {
            return Err(
                "the repository has no `config.json`; name one that has it, as transformers writes it"
                    .to_owned(),
            );
        }
        if self.has("tokenizer.json") {
            return Ok(());
        }
        let repository = &name.repository;
        Err(format!(
            "the repository has no `tokenizer.json`; make it with transformers: fetch the files with `hf download {repository} \
             --local-dir DIR`, run `AutoTokenizer.from_pretrained(\"DIR\").save_pretrained(\"DIR\")` in Python, and name DIR in \
             place of the repository: `model.path = \"DIR\"`"
        ))
    }

    /// The files of its weights: one, or the index that names them.
    ///
    /// # Errors
    /// What the repository has instead.
    pub(super) fn weights(&self, name: &RepositoryName) -> Result<&'static str, String> {
        if let Some(file) = [WEIGHTS, INDEX].into_iter().find(|file| self.has(file)) {
            return Ok(file);
        }
        let ending = |ending: &str| -> Vec<&str> {
            let names = self.files.iter().map(|file| file.name.as_str());
            names.filter(|name| name.ends_with(ending)).take(MOST_NAMED).collect()
        };
        let (quantised, pickled) = (ending(".gguf"), ending(".bin"));
        let base = RepositoryName { file: None, revision: None, ..name.clone() };
        Err(if let Some(first) = quantised.first() {
            format!(
                "the repository has no `{WEIGHTS}` but GGUF files: {}; name one of them, such as {base}/{first}",
                quantised.join(", ")
            )
        } else if self.has(ADAPTER[1]) {
            "the repository has an adapter and no model; name its base model in `model.path`, and it in `lora.path`"
                .to_owned()
        } else if pickled.is_empty() {
            format!("the repository has no `{WEIGHTS}`; name one that has a model in this format")
        } else {
            format!(
                "the repository has no `{WEIGHTS}`, and {} can run code when it is read; name a repository or a revision (such \
                 as `@refs/pr/1`) with safetensors, or convert it with transformers: `save_pretrained`",
                pickled[0]
            )
        })
    }

    /// The files of a dataset's split, in order.
    ///
    /// # Errors
    /// A configuration or a split that is not there, with those that are; files that are not read.
    pub(super) fn rows(&self, name: &RepositoryName, split: TaskSplit) -> Result<Vec<String>, String> {
        let configs = self.configs.as_array().filter(|configs| !configs.is_empty());
        let splits = match configs {
            Some(configs) => self.declared(configs, name)?,
            None => self.inferred(name)?,
        };
        let named = |names: &[&str]| {
            names.iter().find_map(|name| splits.iter().find(|of| canonical(&of.split) == canonical(name)))
        };
        let chosen = match &name.split {
            Some(split) => splits.iter().find(|of| of.split == *split).or_else(|| named(&[split.as_str()])),
            None => named(split.names()),
        };
        let Some(chosen) = chosen else {
            let there: Vec<&str> = splits.iter().map(|of| of.split.as_str()).collect();
            let wanted = name.split.as_deref().unwrap_or(split.names()[0]);
            let example = RepositoryName {
                split: there.first().map(|split| (*split).to_owned()),
                revision: None,
                ..name.clone()
            };
            return Err(format!(
                "the dataset has no split `{wanted}`; it has {}; name one, such as {example}",
                quoted(&there)
            ));
        };
        if let Some(other) = chosen.files.iter().find(|file| !is_dataset(file.as_ref())) {
            return Err(format!(
                "its file {other} is not read, only .jsonl, .json, .csv, .parquet and .arrow; the hub has a Parquet copy of most \
                 datasets at the revision `@refs/convert/parquet`"
            ));
        }
        if !self.whole {
            complete(&chosen.files)?;
        }
        Ok(chosen.files.clone())
    }

    /// The splits of a configuration that the header of README.md declares.
    fn declared(&self, configs: &[Value], name: &RepositoryName) -> Result<Vec<SplitFiles>, String> {
        let text = |value: &Value, key: &str| value.get(key).and_then(Value::as_str).map(str::to_owned);
        let names: Vec<String> = configs.iter().filter_map(|config| text(config, "config_name")).collect();
        let is_default = |config: &&Value| config.get("default").and_then(Value::as_bool) == Some(true);
        let called = |wanted: &str| {
            configs.iter().find(|config| text(config, "config_name").as_deref() == Some(wanted))
        };
        let config = match &name.config {
            Some(wanted) => called(wanted),
            None => configs.iter().find(is_default).or_else(|| called("default")).or(match configs {
                [one] => Some(one),
                _ => None,
            }),
        };
        let Some(config) = config else { return Err(no_config(name, &names)) };
        let below =
            text(config, "data_dir").map_or(String::new(), |folder| format!("{}/", folder.trim_matches('/')));
        let matching = |patterns: &Value| -> Vec<String> {
            let patterns = match patterns {
                Value::Array(list) => list.iter().filter_map(Value::as_str).collect(),
                one => one.as_str().into_iter().collect::<Vec<_>>(),
            };
            let mut found: Vec<String> = Vec::new();
            for pattern in patterns {
                let pattern = format!("{below}{}", pattern.trim_start_matches("./"));
                let names = self.files.iter().map(|file| &file.name);
                let mut new: Vec<String> =
                    names.filter(|name| matches(&pattern, name) && !found.contains(name)).cloned().collect();
                new.sort();
                found.extend(new);
            }
            found
        };
        let mut splits = Vec::new();
        match config.get("data_files") {
            None => {
                return Ok(by_words(
                    self.files.iter().filter_map(|file| file.name.strip_prefix(&below).map(|_| &file.name)),
                ));
            }
            Some(Value::Object(map)) => {
                let of = |(split, patterns): (&String, &Value)| (split.clone(), matching(patterns));
                splits.extend(map.iter().map(of));
            }
            Some(Value::Array(list)) if list.iter().all(Value::is_object) => {
                for entry in list {
                    let split = text(entry, "split").unwrap_or_else(|| "train".to_owned());
                    splits.push((split, matching(entry.get("path").unwrap_or(&Value::Null))));
                }
            }
            Some(patterns) => splits.push(("train".to_owned(), matching(patterns))),
        }
        let splits: Vec<SplitFiles> = splits
            .into_iter()
            .filter(|(_, files)| !files.is_empty())
            .map(|(split, files)| SplitFiles { split, files })
            .collect();
        if splits.is_empty() {
            Err("none of the files that its README.md declares is there".to_owned())
        } else {
            Ok(splits)
        }
    }

    /// The splits by the words in the names of files, for a dataset that declares nothing.
    fn inferred(&self, name: &RepositoryName) -> Result<Vec<SplitFiles>, String> {
        let rows: Vec<&String> =
            self.files.iter().map(|file| &file.name).filter(|file| is_dataset(file.as_ref())).collect();
        // Descriptions of the dataset itself.
        let about = ["dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"];
        let rows: Vec<&String> =
            rows.into_iter().filter(|file| !about.iter().any(|about| file.ends_with(about))).collect();
        let folder = |file: &str| file.split_once('/').map(|(folder, _)| folder.to_owned());
        let mut folders: Vec<String> = rows.iter().filter_map(|file| folder(file)).collect();
        folders.dedup();
        let of_folder = |wanted: &str| {
            by_words(rows.iter().copied().filter(|file| folder(file).as_deref() == Some(wanted)))
        };
        if let Some(config) = &name.config {
            let splits = of_folder(config);
            return if splits.is_empty() { Err(no_config(name, &folders)) } else { Ok(splits) };
        }
        let is_config =
            |folder: &String| folder != "data" && canonical(folder) == folder.as_str() && !is_split(folder);
        let at_root = rows.iter().any(|file| !file.contains('/'));
        match &folders[..] {
            [] if rows.is_empty() => {
                Err("the repository has no .jsonl, .json, .csv, .parquet or .arrow file".to_owned())
            }
            [one] if !at_root => Ok(of_folder(one)),
            _ if !at_root && folders.iter().all(is_config) => Err(no_config(name, &folders)),
            _ => Ok(by_words(rows.iter().copied())),
        }
    }
}

fn no_config(name: &RepositoryName, there: &[String]) -> String {
    let found: Vec<&str> = there.iter().map(String::as_str).collect();
    let example = RepositoryName { config: there.first().cloned(), revision: None, ..name.clone() };
    let wanted = name
        .config
        .as_ref()
        .map_or("several configurations".to_owned(), |config| format!("no configuration `{config}`"));
    format!("the dataset has {wanted}: there are {}; name one, such as {example}", quoted(&found))
}

fn quoted(names: &[&str]) -> String {
    let shown: Vec<String> = names.iter().take(MOST_NAMED).map(|name| format!("`{name}`")).collect();
    if names.len() > MOST_NAMED { format!("{} and more", shown.join(", ")) } else { shown.join(", ") }
}

/// The files by the split that a word of their names means; those without one are for training.
fn by_words<'a>(files: impl Iterator<Item = &'a String>) -> Vec<SplitFiles> {
    let mut splits: Vec<SplitFiles> = Vec::new();
    for file in files.filter(|file| is_dataset(file.as_ref())) {
        let words = |part: &str| {
            part.split(|c: char| !c.is_ascii_alphanumeric())
                .find(|word| is_split(word))
                .map(canonical)
                .map(str::to_owned)
        };
        // The name of the file counts before those of its folders.
        let split = file.rsplit('/').find_map(words).unwrap_or_else(|| "train".to_owned());
        match splits.iter_mut().find(|of| of.split == split) {
            Some(of) => of.files.push(file.clone()),
            None => splits.push(SplitFiles { split, files: vec![file.clone()] }),
        }
    }
    splits.iter_mut().for_each(|of| of.files.sort());
    splits
}

fn is_split(word: &str) -> bool {
    SPLITS.iter().any(|(_, words)| words.contains(&word))
}

/// The usual name of a split.
fn canonical(word: &str) -> &str {
    SPLITS.iter().find(|(_, words)| words.contains(&word)).map_or(word, |(name, _)| name)
}

/// Refuses shards of which some are missing, by the `-00000-of-00002` in their names.
fn complete(files: &[String]) -> Result<(), String> {
    for file in files {
        let Some((stem, rest)) = file.rsplit_once("-of-") else { continue };
        let total =
            rest.split(|c: char| !c.is_ascii_digit()).next().and_then(|total| total.parse::<usize>().ok());
        let (Some(total), Some((shards, _))) = (total, stem.rsplit_once('-')) else { continue };
        let there = files.iter().filter(|other| other.starts_with(shards) && other.contains("-of-")).count();
        if there < total {
            return Err(format!(
                "only {there} of {total} files like {file} are in the cache; fetch it once without HF_HUB_OFFLINE"
            ));
        }
    }
    Ok(())
}

/// Whether a pattern of a README.md means a file: `*` and `?` stay within a folder, `**` does not.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    // `reached[n]`: whether the pattern so far means the first n characters.
    let mut reached: Vec<bool> = std::iter::once(true).chain(name.iter().map(|_| false)).collect();
    let mut rest = &pattern[..];
    while !rest.is_empty() {
        let folders = rest.starts_with(&['*', '*', '/']);
        let any = rest.starts_with(&['*', '*']);
        let mut open = false;
        let mut next = vec![false; name.len() + 1];
        for n in 0..=name.len() {
            let last = n.checked_sub(1).map(|last| name[last]);
            next[n] = if folders {
                open |= reached[n];
                reached[n] || (open && last == Some('/'))
            } else if rest[0] == '*' {
                open = reached[n] || (open && (any || last != Some('/')));
                open
            } else {
                last.is_some_and(|last| rest[0] == last || (rest[0] == '?' && last != '/')) && reached[n - 1]
            };
        }
        reached = next;
        rest = &rest[if folders {
            3
        } else if any {
            2
        } else {
            1
        }..];
    }
    reached[name.len()]
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::super::name::RepositoryKind;
    use super::*;

    fn listing(files: &[&str], configs: Value) -> RepositoryListing {
        let files =
            files.iter().map(|name| RepositoryFile { name: (*name).to_owned(), size: None }).collect();
        RepositoryListing { commit: "0".repeat(40), files, configs, whole: true }
    }

    fn rows(listing: &RepositoryListing, name: &str, split: TaskSplit) -> Result<Vec<String>, String> {
        listing.rows(&RepositoryName::parse(Path::new(name), RepositoryKind::Dataset).unwrap(), split)
    }

    #[test]
    fn declared_configurations_are_followed() {
        use TaskSplit::{HeldOut, Train};
        let files = ["README.md", "main/test-0.parquet", "main/train-0.parquet", "socratic/train-0.parquet"];
        let gsm8k = listing(
            &files,
            json!([
                {"config_name": "main", "data_files": [
                    {"split": "train", "path": "main/train-*"}, {"split": "test", "path": ["main/test-*"]}]},
                {"config_name": "socratic", "data_files": "socratic/**"},
            ]),
        );
        assert_eq!(rows(&gsm8k, "hf:openai/gsm8k:main", Train).unwrap(), ["main/train-0.parquet"]);
        assert_eq!(rows(&gsm8k, "hf:openai/gsm8k:main", HeldOut).unwrap(), ["main/test-0.parquet"]);
        assert_eq!(rows(&gsm8k, "hf:openai/gsm8k:main:test", Train).unwrap(), ["main/test-0.parquet"]);
        assert_eq!(rows(&gsm8k, "hf:openai/gsm8k:socratic", Train).unwrap(), ["socratic/train-0.parquet"]);
        for (name, split, expected) in [
            (
                "hf:openai/gsm8k",
                Train,
                "several configurations: there are `main`, `socratic`; name one, such as hf:openai/gsm8k:main",
            ),
            ("hf:openai/gsm8k:mian", Train, "no configuration `mian`: there are `main`, `socratic`"),
            (
                "hf:openai/gsm8k:socratic",
                HeldOut,
                "no split `test`; it has `train`; name one, such as hf:openai/gsm8k:socratic:train",
            ),
            ("hf:openai/gsm8k:main:dev", Train, "no split `dev`; it has `train`, `test`"),
        ] {
            let error = rows(&gsm8k, name, split).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        let one = json!([{"config_name": "default", "data_dir": "d", "data_files": {"validation": "*.csv"}}]);
        let validation = listing(&["d/a.csv", "d/e/b.csv"], one);
        assert_eq!(rows(&validation, "hf:a/b", HeldOut).unwrap(), ["d/a.csv"]);
    }

    #[test]
    fn without_a_declaration_names_of_files_tell_the_splits() {
        use TaskSplit::{HeldOut, Train};
        let data = listing(
            &["data/train-00001.parquet", "data/train-00000.parquet", "data/valid.parquet"],
            Value::Null,
        );
        assert_eq!(
            rows(&data, "hf:a/b", Train).unwrap(),
            ["data/train-00000.parquet", "data/train-00001.parquet"]
        );
        assert_eq!(rows(&data, "hf:a/b", HeldOut).unwrap(), ["data/valid.parquet"]);
        assert_eq!(rows(&data, "hf:a/b::validation", Train).unwrap(), ["data/valid.parquet"]);
        let converted = listing(
            &["main/test/0000.parquet", "main/train/0000.parquet", "other/train/0000.parquet"],
            Value::Null,
        );
        assert_eq!(rows(&converted, "hf:a/b:main", HeldOut).unwrap(), ["main/test/0000.parquet"]);
        assert!(rows(&converted, "hf:a/b", Train).unwrap_err().contains("there are `main`, `other`"));
        let plain = listing(&["questions.jsonl", "dataset_infos.json"], Value::Null);
        assert_eq!(rows(&plain, "hf:a/b", Train).unwrap(), ["questions.jsonl"]);
        assert!(
            rows(&listing(&["a.zip"], Value::Null), "hf:a/b", Train).unwrap_err().contains("has no .jsonl")
        );
        let zipped = listing(&["a.zip"], json!([{"config_name": "default", "data_files": "a.*"}]));
        assert!(rows(&zipped, "hf:a/b", Train).unwrap_err().contains("a.zip is not read"));
    }

    #[test]
    fn shards_that_are_not_in_the_cache_are_missed() {
        let files = ["data/train-00000-of-00002.parquet", "data/test-00000-of-00001.parquet"];
        let cached = RepositoryListing { whole: false, ..listing(&files, Value::Null) };
        assert!(rows(&cached, "hf:a/b", TaskSplit::Train).unwrap_err().contains("only 1 of 2 files"));
        assert_eq!(rows(&cached, "hf:a/b", TaskSplit::HeldOut).unwrap().len(), 1);
    }

    #[test]
    fn a_repository_without_safetensors_says_what_it_has() {
        let name = RepositoryName::parse(Path::new("hf:a/b@v1"), RepositoryKind::Model).unwrap();
        let weights = |files: &[&str]| listing(files, Value::Null).weights(&name);
        assert_eq!(weights(&["model.safetensors", INDEX]), Ok("model.safetensors"));
        assert_eq!(weights(&["model-00001-of-00002.safetensors", INDEX]), Ok(INDEX));
        assert!(weights(&["b.Q4_0.gguf"]).unwrap_err().contains("such as hf:a/b/b.Q4_0.gguf"));
        assert!(weights(&["pytorch_model.bin"]).unwrap_err().contains("pytorch_model.bin can run code"));
        assert!(weights(&["adapter_model.safetensors"]).unwrap_err().contains("`lora.path`"));
        assert!(weights(&["README.md"]).unwrap_err().contains("has no `model.safetensors`"));
    }

    #[test]
    fn a_repository_without_a_tokenizer_says_how_to_make_it() {
        let name = RepositoryName::parse(Path::new("hf:a/b"), RepositoryKind::Model).unwrap();
        let checked = |files: &[&str]| listing(files, Value::Null).check_description(&name);
        assert_eq!(checked(&["config.json", "tokenizer.json"]), Ok(()));
        assert!(checked(&["tokenizer.json"]).unwrap_err().contains("no `config.json`"));
        let reason = checked(&["config.json", "tokenizer.model"]).unwrap_err();
        for part in ["no `tokenizer.json`", "hf download a/b", "save_pretrained", "`model.path = \"DIR\"`"] {
            assert!(reason.contains(part), "{reason}");
        }
    }

    #[test]
    fn patterns_stay_within_a_folder_unless_they_say_more() {
        for (pattern, name, expected) in [
            ("main/train-*", "main/train-00000-of-00001.parquet", true),
            ("*.csv", "a/b.csv", false),
            ("**/*.csv", "a/b/c.csv", true),
            ("**/*.csv", "c.csv", true),
            ("data/**", "data/a/b.json", true),
            ("a?c.json", "abc.json", true),
            ("a?c.json", "a/c.json", false),
            ("a", "ab", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
        assert!(!matches(&"*a".repeat(200), &"a".repeat(200).replace('a', "ab")));
    }
}
