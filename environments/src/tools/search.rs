//! `search`: passages of local text files, ranked by BM25 (Robertson and Zaragoza 2009).
//!
//! Invariant: files are read once, when the tool is made, within [`MAX_BYTES`]; a call reads nothing. The work of a call is
//! bounded by [`MAX_WORDS`] and done on a thread of its own, so that it delays no sampler.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io};

use serde_json::{Map, Value, json};

use super::{Tool, ToolError};
use crate::{BoxFuture, ToolSchema};

/// Most text of all files, bytes.
const MAX_BYTES: u64 = 256 << 20;
/// Endings of the files that are read.
const ENDINGS: [&str; 4] = ["txt", "md", "rst", "jsonl"];
/// Longest passage, characters; paragraphs are joined up to this length.
const PASSAGE_CHARS: usize = 800;
/// Saturation of the frequency of a word.
const K1: f64 = 1.2;
/// Weight of the length of a passage.
const B: f64 = 0.75;
/// Passages of an answer if the call does not say how many.
const RESULTS: usize = 3;
/// Most different words of a query; those after them are not looked for.
const MAX_WORDS: usize = 64;
/// Most passages of an answer.
const MAX_RESULTS: usize = 20;

/// Finds passages by their words.
#[derive(Debug)]
pub struct Search {
    schema: ToolSchema,
    corpus: Arc<Corpus>,
}

/// The passages of all files.
#[derive(Debug)]
struct Corpus {
    passages: Vec<Passage>,
    /// Passages that contain a word, and how often.
    index: HashMap<String, Vec<(u32, u32)>>,
    /// Mean number of words of a passage.
    mean_words: f64,
}

#[derive(Debug)]
struct Passage {
    /// The file, relative to the directory of the tool.
    file: String,
    text: String,
    words: u32,
}

/// Why files cannot be searched.
#[derive(Debug, thiserror::Error)]
pub enum SearchError {
    /// A file or directory cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Which one.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// There is nothing to find.
    #[error("{} has no text in files that end with .txt, .md, .rst or .jsonl", path.display())]
    Empty {
        /// The directory.
        path: PathBuf,
    },
    /// There is more text than is searched.
    #[error("{} has more than {} MiB of text; search a smaller directory, or run a search server and call it through `mcp`", path.display(), MAX_BYTES >> 20)]
    TooLarge {
        /// The directory.
        path: PathBuf,
    },
}

impl Search {
    /// Reads the text files of `directory` and of the directories in it.
    ///
    /// # Errors
    /// See [`SearchError`].
    pub fn new(directory: &Path) -> Result<Self, SearchError> {
        let mut passages = Vec::new();
        let mut left = MAX_BYTES;
        for path in text_files(directory)? {
            let read = |source| SearchError::Read { path: path.clone(), source };
            let size = fs::metadata(&path).map_err(read)?.len();
            left =
                left.checked_sub(size).ok_or_else(|| SearchError::TooLarge { path: directory.to_owned() })?;
            let text = String::from_utf8_lossy(&fs::read(&path).map_err(read)?).into_owned();
            let file = path.strip_prefix(directory).unwrap_or(&path).display().to_string();
            let text = passages_of(&text).into_iter();
            passages.extend(text.map(|text| Passage { file: file.clone(), words: 0, text }));
        }
        if passages.is_empty() {
            return Err(SearchError::Empty { path: directory.to_owned() });
        }
        let mut index: HashMap<String, Vec<(u32, u32)>> = HashMap::new();
        for (n, passage) in (0..).zip(&mut passages) {
            for word in words(&passage.text) {
                passage.words += 1;
                let found = index.entry(word).or_default();
                match found.last_mut() {
                    Some((last, count)) if *last == n => *count += 1,
                    _ => found.push((n, 1)),
                }
            }
        }
        let all: u64 = passages.iter().map(|passage| u64::from(passage.words)).sum();
        let mean_words = all as f64 / passages.len() as f64;
        let schema = ToolSchema {
            name: "search".to_owned(),
            description: "Finds passages of text by their words.".to_owned(),
            parameters: json!({
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "words to look for"},
                    "results": {"type": "integer", "description": "number of passages"},
                },
                "required": ["query"],
            }),
        };
        Ok(Self { schema, corpus: Arc::new(Corpus { passages, index, mean_words }) })
    }
}

impl Corpus {
    /// The best passages for `query`, best first; passages of the same score in the order of the files.
    fn best(&self, query: &str, results: usize) -> Vec<&Passage> {
        let mut scores: HashMap<u32, f64> = HashMap::new();
        let count = self.passages.len() as f64;
        for (word, repeats) in counted(query) {
            let Some(found) = self.index.get(&word) else { continue };
            let containing = found.len() as f64;
            let rarity = (1.0 + (count - containing + 0.5) / (containing + 0.5)).ln();
            for (passage, times) in found {
                let length = f64::from(self.passages[*passage as usize].words) / self.mean_words;
                let times = f64::from(*times);
                *scores.entry(*passage).or_default() +=
                    repeats * rarity * times * (K1 + 1.0) / (times + K1 * (1.0 - B + B * length));
            }
        }
        let mut ranked: Vec<(u32, f64)> = scores.into_iter().collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        ranked.iter().take(results).map(|(passage, _)| &self.passages[*passage as usize]).collect()
    }
}

impl Tool for Search {
    fn schema(&self) -> &ToolSchema {
        &self.schema
    }

    fn call<'a>(&'a self, arguments: &'a Map<String, Value>) -> BoxFuture<'a, Result<String, ToolError>> {
        let query = arguments.get("query").and_then(Value::as_str).unwrap_or_default().to_owned();
        let results = arguments.get("results").and_then(Value::as_u64).map_or(RESULTS, |n| n as usize);
        let corpus = Arc::clone(&self.corpus);
        let answer = tokio::task::spawn_blocking(move || {
            let found = corpus.best(&query, results.clamp(1, MAX_RESULTS));
            let listed = found.iter().map(|passage| format!("{}: {}", passage.file, passage.text));
            let listed = listed.collect::<Vec<_>>().join("\n\n");
            if listed.is_empty() { "nothing was found".to_owned() } else { listed }
        });
        Box::pin(async {
            answer.await.map_err(|error| ToolError::Unusable(format!("the search ended early: {error}")))
        })
    }
}

/// Text files below `directory`, in the order of their paths. Links are not followed.
fn text_files(directory: &Path) -> Result<Vec<PathBuf>, SearchError> {
    let mut files = Vec::new();
    let mut open = vec![directory.to_owned()];
    while let Some(path) = open.pop() {
        let read = |source| SearchError::Read { path: path.clone(), source };
        for entry in fs::read_dir(&path).map_err(read)? {
            let entry = entry.map_err(read)?;
            let (kind, path) = (entry.file_type().map_err(read)?, entry.path());
            let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
            if kind.is_dir() {
                open.push(path);
            } else if kind.is_file() && ENDINGS.contains(&ending) {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Paragraphs of a text, joined and cut to about [`PASSAGE_CHARS`].
fn passages_of(text: &str) -> Vec<String> {
    let mut passages: Vec<String> = Vec::new();
    for paragraph in text.split("\n\n").map(str::trim).filter(|paragraph| !paragraph.is_empty()) {
        let mut line = String::new();
        for word in paragraph.split_whitespace() {
            if !line.is_empty() && line.len() + word.len() >= PASSAGE_CHARS {
                passages.push(std::mem::take(&mut line));
            }
            line += if line.is_empty() { "" } else { " " };
            line += word;
        }
        match passages.last_mut() {
            Some(last) if last.len() + line.len() < PASSAGE_CHARS => *last = format!("{last} {line}"),
            _ => passages.push(line),
        }
    }
    passages
}

/// The different words of a query, and how often each occurs in it.
fn counted(query: &str) -> Vec<(String, f64)> {
    let mut counted: Vec<(String, f64)> = Vec::new();
    for word in words(query) {
        match counted.iter().position(|(known, _)| *known == word) {
            Some(at) => counted[at].1 += 1.0,
            None if counted.len() < MAX_WORDS => counted.push((word, 1.0)),
            None => {}
        }
    }
    counted
}

/// Words of a text, lower case.
fn words(text: &str) -> impl Iterator<Item = String> + '_ {
    text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()).map(str::to_lowercase)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passages_with_rare_words_come_first() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("more")).unwrap();
        let long = "The sea is wide. ".repeat(60);
        fs::write(directory.path().join("sea.txt"), format!("{long}\n\nA whale is in the sea.")).unwrap();
        fs::write(directory.path().join("more/bird.md"), "A bird is in the air.").unwrap();
        fs::write(directory.path().join("ignored.bin"), "whale whale whale").unwrap();
        let corpus = Search::new(directory.path()).unwrap().corpus;
        let best = corpus.best("where is the WHALE?", 2);
        assert!(best[0].text.contains("whale"), "{best:?}");
        assert_eq!(corpus.best("bird", 5)[0].file, "more/bird.md");
        assert!(corpus.best("mountain", 5).is_empty());
        assert!(corpus.passages.iter().all(|passage| passage.text.len() < PASSAGE_CHARS));
    }

    #[test]
    fn a_repetitive_query_costs_as_much_as_its_words() {
        assert_eq!(counted("The sea, the SEA the"), [("the".to_owned(), 3.0), ("sea".to_owned(), 2.0)]);
        let many: String = (0..10_000).map(|n| format!("word{n} ")).collect();
        assert_eq!(counted(&many).len(), MAX_WORDS);
    }

    #[test]
    fn a_directory_without_text_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        assert!(matches!(Search::new(directory.path()), Err(SearchError::Empty { .. })));
        let gone = directory.path().join("gone");
        assert!(Search::new(&gone).unwrap_err().to_string().contains("gone"));
    }
}
