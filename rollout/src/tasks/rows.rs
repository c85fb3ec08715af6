//! Datasets in files as rows of JSON values: JSON Lines, JSON arrays, CSV, Parquet, and what `save_to_disk` of the Python
//! package `datasets` wrote.
//!
//! Invariant: rows come in file order, directories in name order of their shards, and every row has its location.
//! At most `limit` rows are read; a row of a text file is no longer than its limit. Prompts and answers are chosen elsewhere.
//!
//! # Layout
//! - `json`, `csv`, `parquet`, `arrow`: one format each
//! - `saved`: the files of a directory that `save_to_disk` wrote

mod arrow;
mod csv;
mod json;
mod parquet;
mod saved;

use std::cell::Cell;
use std::fmt;
use std::io::{self, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::TaskError;

/// Longest row of a text file, bytes.
const MAX_ROW_BYTES: u64 = 64 << 20;

/// One row of a dataset.
#[derive(Clone, Debug, PartialEq)]
pub struct DatasetRow {
    /// Its file and line.
    pub place: RowLocation,
    /// Its cells by column.
    pub columns: Map<String, Value>,
}

/// File and line of a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowLocation {
    /// The file.
    pub path: Arc<Path>,
    /// Line of a file of lines, else the number of the row, from 1.
    pub row: usize,
}

impl fmt::Display for RowLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.path.display(), self.row)
    }
}

/// Which split of a dataset is read where none is named.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskSplit {
    /// The training split.
    #[default]
    Train,
    /// The test split, or else the validation split.
    HeldOut,
}

impl TaskSplit {
    /// Usual names of the split; the first that a dataset has is read.
    #[must_use]
    pub fn names(self) -> &'static [&'static str] {
        match self {
            Self::Train => &["train"],
            Self::HeldOut => &["test", "validation", "valid", "val", "dev", "eval"],
        }
    }
}

/// Reads files and directories of shards one after the other, `limit` rows at most.
///
/// # Errors
/// A path that does not exist, cannot be read or has an unknown extension; a row that is malformed.
pub fn read(paths: &[PathBuf], split: TaskSplit, limit: Option<usize>) -> Result<Vec<DatasetRow>, TaskError> {
    let mut rows = DatasetRows { rows: vec![], limit: limit.unwrap_or(usize::MAX) };
    for path in paths {
        for file in files(path, split)? {
            match DatasetFormat::of(&file) {
                Some(DatasetFormat::Lines) => json::read_lines(&mut rows, &file)?,
                Some(DatasetFormat::Json) => json::read(&mut rows, &file)?,
                Some(DatasetFormat::Csv) => csv::read(&mut rows, &file)?,
                Some(DatasetFormat::Parquet) => parquet::read(&mut rows, &file)?,
                Some(DatasetFormat::Arrow) => arrow::read(&mut rows, &file)?,
                None => return Err(TaskError::Extension { path: file }),
            }
        }
    }
    Ok(rows.rows)
}

/// Whether a file of this name is read as a dataset.
#[must_use]
pub fn is_dataset(path: &Path) -> bool {
    DatasetFormat::of(path).is_some()
}

/// JSON type of a value, with an article, for messages.
pub(super) fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum DatasetFormat {
    /// One object per line.
    Lines,
    /// One array of objects, or one object per line.
    Json,
    Csv,
    Parquet,
    Arrow,
}

impl DatasetFormat {
    fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()? {
            "jsonl" => Some(Self::Lines),
            "json" => Some(Self::Json),
            "csv" => Some(Self::Csv),
            "parquet" => Some(Self::Parquet),
            "arrow" => Some(Self::Arrow),
            _ => None,
        }
    }
}

/// The path itself, the files of a saved dataset, or the shards of a directory by name.
fn files(path: &Path, split: TaskSplit) -> Result<Vec<PathBuf>, TaskError> {
    if !path.exists() {
        return Err(TaskError::NotFound { path: path.to_owned() });
    }
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    if let Some(files) = saved::files(path, split)? {
        return Ok(files);
    }
    let unreadable = |source| TaskError::Read { path: path.to_owned(), source };
    let entries = path.read_dir().map_err(unreadable)?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>();
    let mut shards = paths.map_err(unreadable)?;
    // Dataset folders hold cards, licences and caches beside their shards, and what macOS writes about them (`._train.jsonl`).
    let hidden =
        |shard: &Path| shard.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
    shards.retain(|shard| shard.is_file() && is_dataset(shard) && !hidden(shard));
    shards.sort();
    if shards.is_empty() { Err(TaskError::NoShards { path: path.to_owned() }) } else { Ok(shards) }
}

struct DatasetRows {
    rows: Vec<DatasetRow>,
    limit: usize,
}

impl DatasetRows {
    fn full(&self) -> bool {
        self.rows.len() >= self.limit
    }

    fn push(&mut self, place: RowLocation, value: Value) -> Result<(), TaskError> {
        let Value::Object(columns) = value else {
            return Err(TaskError::NotAnObject { place, found: type_of(&value) });
        };
        self.rows.push(DatasetRow { place, columns });
        Ok(())
    }
}

/// A text file whose rows have a limit: a quote or a brace that is never closed does not fill the memory.
struct BoundedRows<R> {
    inner: R,
    /// Bytes that may be read before the row ends.
    left: Rc<Cell<u64>>,
}

impl<R: Read> BoundedRows<R> {
    /// The file, and what the reader of rows sets to [`MAX_ROW_BYTES`] after each row.
    fn new(inner: R) -> (Self, Rc<Cell<u64>>) {
        let left = Rc::new(Cell::new(MAX_ROW_BYTES));
        (Self { inner, left: Rc::clone(&left) }, left)
    }
}

impl<R: Read> Read for BoundedRows<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(bytes)?;
        let Some(left) = self.left.get().checked_sub(count as u64) else {
            let reason = format!("a row is longer than {} MiB", MAX_ROW_BYTES >> 20);
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, reason));
        };
        self.left.set(left);
        Ok(count)
    }
}

/// Runs a reader of a binary format, some of which panic on damaged files.
fn guarded<T>(read: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason is given");
        Err(format!("it is damaged, or has a column of a kind that is not read ({text})"))
    })
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    /// A Parquet file that pyarrow has written.
    pub(in super::super) fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("src/tasks/fixtures").join(name)
    }

    fn all(paths: &[PathBuf], limit: Option<usize>) -> Result<Vec<DatasetRow>, TaskError> {
        read(paths, TaskSplit::Train, limit)
    }

    const LINES: &str = concat!(
        r#"{"prompt":[{"role":"user","content":"2+2"}],"reward_model":{"ground_truth":"4"},"n":4,"x":null}"#,
        "\n",
        r#"{"prompt":[{"role":"user","content":"2+3"}],"reward_model":{"ground_truth":"5"},"n":5,"x":1.5}"#,
        "\n"
    );

    #[test]
    fn parquet_and_lines_give_the_same_rows() {
        let dir = tempfile::tempdir().unwrap();
        let (lines, parquet) = (dir.path().join("a.jsonl"), fixture("rows.parquet"));
        std::fs::write(&lines, LINES).unwrap();
        let array = dir.path().join("a.json");
        std::fs::write(&array, format!(" \n[{}]\n", LINES.trim_end().replace('\n', ",\n"))).unwrap();
        let columns = |path: &PathBuf| -> Vec<_> {
            all(std::slice::from_ref(path), None).unwrap().into_iter().map(|row| row.columns).collect()
        };
        assert_eq!(columns(&lines), columns(&parquet));
        assert_eq!(columns(&lines), columns(&array));
        assert_eq!(columns(&lines)[1]["x"], json!(1.5));
        let second = &all(&[parquet], None).unwrap()[1];
        assert!(second.place.to_string().ends_with("rows.parquet:2"));
    }

    #[test]
    fn columns_of_every_kind_are_read() {
        for name in ["kinds.parquet", "kinds.arrow"] {
            kinds_are_read(name);
        }
    }

    fn kinds_are_read(name: &str) {
        let rows = all(&[fixture(name)], None).unwrap();
        let expected = [
            json!({
                "large": "a\u{e9}\u{4e2d}", "categories": "easy", "flag": true, "small": -3, "unsigned": u64::MAX,
                "single": 0.1, "nothing": null, "lists": [[1, 2], []], "large_lists": ["x"], "map": {"k": 0.1},
                "price": "1.50", "day": "2024-02-29", "time": "2024-02-29 12:30:00.000000 +00:00", "bytes": "AP8="
            }),
            json!({
                "large": null, "categories": "hard", "flag": null, "small": 200, "unsigned": 0, "single": -2.0,
                "nothing": null, "lists": null, "large_lists": [], "map": {}, "price": null, "day": null,
                "time": null, "bytes": ""
            }),
        ];
        assert_eq!(rows.len(), 2);
        for (row, expected) in rows.into_iter().zip(expected) {
            assert_eq!(Value::Object(row.columns), expected, "{name}");
        }
    }

    #[test]
    fn damaged_binary_files_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["rows.parquet", "kinds.parquet", "verl.parquet", "kinds.arrow"] {
            let path = dir.path().join("damaged").with_extension(name.rsplit_once('.').unwrap().1);
            let named = |error: &TaskError| match error {
                TaskError::Parquet { .. } => name.ends_with(".parquet"),
                TaskError::Arrow { .. } => name.ends_with(".arrow"),
                _ => false,
            };
            let whole = std::fs::read(fixture(name)).unwrap();
            for at in 0..whole.len() {
                let mut damaged = whole.clone();
                damaged[at] ^= 1 << (at % 8);
                std::fs::write(&path, &damaged).unwrap();
                if let Err(error) = all(std::slice::from_ref(&path), None) {
                    assert!(named(&error), "byte {at} of {name}: {error}");
                }
            }
            std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
            assert!(named(&all(std::slice::from_ref(&path), None).unwrap_err()));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        /// No text is read without an end or ends the process; a limit of one row is kept.
        #[test]
        fn any_bytes_are_rows_or_an_error_that_names_the_file(
            bytes in proptest::collection::vec(prop_oneof![any::<u8>(), prop::sample::select(b"[]{}\",:\n1a".to_vec())], 0..64),
            name in prop::sample::select(vec!["d.json", "d.jsonl", "d.csv", "d.arrow", "d.parquet"]),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            let one = all(std::slice::from_ref(&path), Some(1));
            prop_assert!(one.is_err() || one.unwrap().len() <= 1);
            if let Err(error) = all(&[path], None) {
                prop_assert!(error.to_string().contains(name), "{}", error);
            }
        }
    }

    #[test]
    fn csv_cells_are_texts_and_errors_name_the_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.csv");
        let rows = |text: &[u8], limit| {
            std::fs::write(&path, text).unwrap();
            all(std::slice::from_ref(&path), limit)
        };
        let read = rows(b"\xef\xbb\xbfquestion,answer\n\"a, \"\"b\"\"\nc\",007\r\n,\n", None).unwrap();
        let cells: Vec<_> = read.iter().map(|row| Value::Object(row.columns.clone())).collect();
        assert_eq!(cells[0], json!({"question": "a, \"b\"\nc", "answer": "007"}));
        assert_eq!((&cells[1], read[1].place.row), (&json!({"question": "", "answer": ""}), 4));
        for (text, expected) in [
            (
                &b"a,b\r\n\r\n1,2\r\n3\r\n"[..],
                "t.csv:4: not valid CSV: it has 1 cells, and the first line names 2 columns",
            ),
            (
                &b"a,b\n1,2\n3\n"[..],
                "t.csv:3: not valid CSV: it has 1 cells, and the first line names 2 columns",
            ),
            (b"a,b\n1,2\n3,\xff\n", "t.csv:3: not valid CSV: cell 2 is not UTF-8"),
            (b"a,b,a\n1,2,3\n", "t.csv:1: not valid CSV: two columns are named `a`"),
            (b"a,\xff\n", "t.csv:1: not valid CSV: cell 2 is not UTF-8"),
        ] {
            let error = rows(text, None).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        // The rest of the file is not looked at.
        assert_eq!(rows(b"a\n1\n\xff\n", Some(1)).unwrap().len(), 1);
    }

    #[test]
    fn arrays_are_read_row_by_row() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.json");
        let rows = |text: &str, limit| {
            std::fs::write(&path, text).unwrap();
            all(std::slice::from_ref(&path), limit)
        };
        let text = "[\n {\"n\": 1},\n {\"n\": 2},\n {\"n\":\n";
        assert_eq!(rows(text, Some(2)).unwrap()[1].place.row, 2);
        let error = rows(text, None).unwrap_err().to_string();
        assert!(error.contains("t.json:5: not a valid JSON array of objects: EOF"), "{error}");
        let error = rows("[{\"n\": 1}, 2]", None).unwrap_err().to_string();
        assert!(error.ends_with("t.json:2: a row must be an object with columns, found a number"), "{error}");
        let error = rows("[{\"n\": 1}] [", None).unwrap_err().to_string();
        assert!(error.contains("trailing characters"), "{error}");
        assert!(rows("[]", None).unwrap().is_empty());
    }

    #[test]
    fn whole_numbers_beyond_64_bits_are_refused_where_they_stand() {
        let dir = tempfile::tempdir().unwrap();
        let wide = "18446744073709551617";
        let fits = format!(
            r#"{{"n": 18446744073709551615, "m": -9223372036854775808, "x": 1e20, "t": "{wide}\"{wide}"}}"#
        );
        let row = format!(r#"{{"n": [{{"m": {wide}}}]}}"#);
        for (name, start, between, end) in [("t.jsonl", "", "\n", "\n"), ("t.json", "[", ",\n", "]")] {
            let path = dir.path().join(name);
            std::fs::write(&path, format!("{start}{fits}{between}{fits}{end}")).unwrap();
            let rows = all(std::slice::from_ref(&path), None).unwrap();
            assert_eq!((rows.len(), rows[1].columns["n"].as_u64()), (2, Some(u64::MAX)));
            std::fs::write(&path, format!("{start}{fits}{between}{row}{end}")).unwrap();
            let error = all(&[path], None).unwrap_err().to_string();
            assert!(error.contains(&format!("{name}:2: the whole number {wide} needs")), "{error}");
            assert!(error.ends_with("write it as a string"), "{error}");
        }
    }

    #[test]
    fn a_row_without_an_end_is_refused_at_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        for (name, start) in [("t.json", "[\""), ("t.csv", "a\n\"")] {
            let path = dir.path().join(name);
            std::fs::write(&path, start).unwrap();
            let file = std::fs::File::options().write(true).open(&path).unwrap();
            // Zeros without blocks on the disk.
            file.set_len(MAX_ROW_BYTES + (1 << 20)).unwrap();
            let error = all(&[path], None).unwrap_err().to_string();
            assert!(
                error.contains("a row is longer than 64 MiB") || error.contains("control character"),
                "{error}"
            );
        }
    }

    #[test]
    fn saved_datasets_are_read_split_by_split() {
        let directory = fixture("saved");
        let questions = |path: &Path, split| -> Vec<String> {
            let rows = read(&[path.to_owned()], split, None).unwrap();
            rows.iter().map(|row| row.columns["question"].as_str().unwrap().to_owned()).collect()
        };
        assert_eq!(questions(&directory, TaskSplit::Train), ["train 0", "train 1", "train 2"]);
        assert_eq!(questions(&directory, TaskSplit::HeldOut), ["validation 0"]);
        assert_eq!(questions(&directory.join("validation"), TaskSplit::Train), ["validation 0"]);

        let dir = tempfile::tempdir().unwrap();
        let refused = |name: &str, text: &str| {
            std::fs::write(dir.path().join(name), text).unwrap();
            all(&[dir.path().to_owned()], None).unwrap_err().to_string()
        };
        for (text, expected) in [
            (
                r#"{"_data_files": [{"filename": "../kinds.arrow"}]}"#,
                "which is not directly in the directory",
            ),
            (r#"{"_data_files": []}"#, "it names no file"),
            (r#"{"_data_files": [{"filename": "data.arrow"}]}"#, "\"data.arrow\", which is not there"),
            (r#"{"_data_files": [], "_indices_files": [{"filename": "i"}]}"#, "file of indices"),
            ("{", "not the description of a dataset: EOF"),
        ] {
            let error = refused("state.json", text);
            assert!(error.contains(expected), "{error}");
        }
        let error = refused("dataset_dict.json", r#"{"splits": ["a", "b"]}"#);
        assert!(error.contains("it has the splits `a`, `b`, and none of the names train;"), "{error}");
    }

    #[test]
    fn shards_come_in_name_order_and_other_files_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("b-00001.jsonl", "{\"n\":2}\n\n{\"n\":3}"),
            ("b-00000.json", "{\"n\":1}\n"),
            ("README.md", "#"),
            ("._b.jsonl", "\u{5}"),
        ] {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        let numbers = |limit| -> Vec<_> {
            let rows = all(&[dir.path().to_owned()], limit).unwrap();
            rows.iter().map(|row| (row.columns["n"].as_u64().unwrap(), row.place.row)).collect()
        };
        assert_eq!(numbers(None), [(1, 1), (2, 1), (3, 3)]);
        assert_eq!(numbers(Some(2)), [(1, 1), (2, 1)]);
        let again = [dir.path().join("b-00001.jsonl"), dir.path().join("b-00000.json")];
        assert_eq!(all(&again, None).unwrap().len(), 3);
    }

    #[test]
    fn limits_reach_into_parquet_files() {
        let path = fixture("rows.parquet");
        assert_eq!(all(&[path.clone(), path], Some(3)).unwrap().len(), 3);
    }

    #[test]
    fn every_bad_file_has_its_own_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str, content: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, content).unwrap();
            path
        };
        let error = |path: &Path| all(&[path.to_owned()], None).unwrap_err();
        let message = |path: &Path| error(path).to_string();

        assert!(matches!(error(&dir.path().join("no.jsonl")), TaskError::NotFound { .. }));
        assert!(matches!(error(&path("a.txt", b"a,b")), TaskError::Extension { .. }));
        assert!(matches!(error(&path("plain", b"")), TaskError::Extension { .. }));
        assert!(matches!(error(&path("bad.parquet", b"PAR1 not")), TaskError::Parquet { .. }));

        let cut = path("cut.jsonl", b"{\"a\":1}\n{\"a\":\n");
        assert!(matches!(error(&cut), TaskError::Json { line: 2, .. }));
        assert!(message(&cut).contains("cut.jsonl:2: not valid JSON: EOF"), "{}", message(&cut));
        let bytes = path("bytes.jsonl", b"{\"a\":\"\xff\"}\n");
        assert!(matches!(error(&bytes), TaskError::Json { line: 1, .. }));

        let list = path("list.jsonl", b"[{\"a\":1}]\n");
        assert!(message(&list).ends_with("list.jsonl:1: a row must be an object with columns, found a list"));

        let empty = tempfile::tempdir().unwrap();
        assert!(matches!(error(empty.path()), TaskError::NoShards { .. }));
    }
}
