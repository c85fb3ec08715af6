//! The files of a directory that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` of the Python package `datasets` wrote.
//!
//! ```text
//!   DIR/dataset_dict.json            {"splits": ["train", "test"]}, with one directory per split
//!   DIR/state.json                   {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], ..}
//!   DIR/data-00000-of-00001.arrow    rows, see the reader of Arrow streams
//! ```
//! Invariant: only files directly in the directory are named, whatever the description says.

use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::TaskSplit;
use crate::tasks::TaskError;

#[derive(Deserialize)]
struct SavedSplits {
    splits: Vec<String>,
}

#[derive(Deserialize)]
struct SavedState {
    #[serde(rename = "_data_files")]
    data_files: Vec<SavedFile>,
    /// Rows that are chosen of the files, in versions of `datasets` before 2.0.
    #[serde(rename = "_indices_files", default)]
    indices_files: Option<Vec<SavedFile>>,
}

#[derive(Deserialize)]
struct SavedFile {
    filename: String,
}

/// The files of a saved dataset, of the named split if it has several; `None` for another directory.
pub(super) fn files(directory: &Path, split: TaskSplit) -> Result<Option<Vec<PathBuf>>, TaskError> {
    let refused = |path: &Path, reason: String| Err(TaskError::Saved { path: path.to_owned(), reason });
    if let Some(SavedSplits { splits }) = described(&directory.join("dataset_dict.json"))? {
        let named = split.names().iter().find(|name| splits.iter().any(|split| split == *name));
        let Some(name) = named else {
            let there: Vec<String> = splits.iter().map(|split| format!("`{split}`")).collect();
            let reason = format!(
                "it has the splits {}, and none of the names {}; name the directory of a split, such as {}",
                there.join(", "),
                split.names().join(", "),
                directory.join(splits.first().map_or("SPLIT", String::as_str)).display()
            );
            return refused(directory, reason);
        };
        let of_split = directory.join(name);
        let files = of_state(&of_split)?;
        return match files {
            Some(files) => Ok(Some(files)),
            None => refused(&of_split, "it has no `state.json`".to_owned()),
        };
    }
    of_state(directory)
}

fn of_state(directory: &Path) -> Result<Option<Vec<PathBuf>>, TaskError> {
    let path = directory.join("state.json");
    let Some(state) = described::<SavedState>(&path)? else { return Ok(None) };
    let refused = |reason: String| Err(TaskError::Saved { path: path.clone(), reason });
    if state.indices_files.is_some_and(|files| !files.is_empty()) {
        return refused("it selects rows by a file of indices, as versions before 2.0 did".to_owned());
    }
    let mut files = Vec::new();
    for SavedFile { filename } in state.data_files {
        let mut parts = Path::new(&filename).components();
        let (Some(Component::Normal(name)), None) = (parts.next(), parts.next()) else {
            return refused(format!(
                "it names the file {filename:?}, which is not directly in the directory"
            ));
        };
        let file = directory.join(name);
        if !file.exists() {
            return refused(format!(
                "it names the file {filename:?}, which is not there; copy the whole directory"
            ));
        }
        files.push(file);
    }
    if files.is_empty() { refused("it names no file".to_owned()) } else { Ok(Some(files)) }
}

/// A description in JSON, if it is there.
fn described<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, TaskError> {
    let text = model::files::read_text_if_there(path, model::files::MAX_JSON_BYTES)
        .map_err(|source| TaskError::Read { path: path.to_owned(), source })?;
    let Some(text) = text else { return Ok(None) };
    serde_json::from_str(&text).map(Some).map_err(|error| TaskError::Saved {
        path: path.to_owned(),
        reason: format!("it is not the description of a dataset: {error}"),
    })
}
