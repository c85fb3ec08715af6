//! JSON Lines and Parquet files as rows of JSON values.
//!
//! Invariant: rows come in file order, directories in name order of their shards, and every row has its location.
//! At most `limit` rows are read. Prompts and answers are chosen elsewhere.

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::errors::ParquetError;
use parquet::file::serialized_reader::SerializedFileReader;
use parquet::record::Field;
use serde_json::{Map, Number, Value};

use super::TaskError;

/// Longest line of a text file, bytes.
const MAX_LINE_BYTES: u64 = 64 << 20;

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
    /// Line of a text file or row of a Parquet file, from 1.
    pub row: usize,
}

impl fmt::Display for RowLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.path.display(), self.row)
    }
}

/// Reads files and directories of shards one after the other, `limit` rows at most.
///
/// # Errors
/// A path that does not exist, cannot be read or has an unknown extension; a row that is malformed.
pub fn read(paths: &[PathBuf], limit: Option<usize>) -> Result<Vec<DatasetRow>, TaskError> {
    let mut rows = DatasetRows { rows: vec![], limit: limit.unwrap_or(usize::MAX) };
    for path in paths {
        for file in files(path)? {
            match DatasetFormat::of(&file) {
                Some(DatasetFormat::Lines) => rows.read_lines(&file)?,
                Some(DatasetFormat::Parquet) => rows.read_parquet(&file)?,
                None => return Err(TaskError::Extension { path: file }),
            }
        }
    }
    Ok(rows.rows)
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

#[derive(Clone, Copy)]
enum DatasetFormat {
    Lines,
    Parquet,
}

impl DatasetFormat {
    fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()? {
            "jsonl" | "json" => Some(Self::Lines),
            "parquet" => Some(Self::Parquet),
            _ => None,
        }
    }
}

/// The path itself, or the shards of a directory by name.
fn files(path: &Path) -> Result<Vec<PathBuf>, TaskError> {
    if !path.exists() {
        return Err(TaskError::NotFound { path: path.to_owned() });
    }
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let unreadable = |source| TaskError::Read { path: path.to_owned(), source };
    let entries = path.read_dir().map_err(unreadable)?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>();
    let mut shards = paths.map_err(unreadable)?;
    // Dataset folders hold cards, licences and caches beside their shards.
    shards.retain(|shard| shard.is_file() && DatasetFormat::of(shard).is_some());
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

    fn read_lines(&mut self, path: &Path) -> Result<(), TaskError> {
        let unreadable = |source| TaskError::Read { path: path.to_owned(), source };
        let shared: Arc<Path> = path.into();
        let mut reader = BufReader::new(model::files::open(path).map_err(unreadable)?);
        let mut line = Vec::new();
        for number in 1.. {
            line.clear();
            let mut bounded = Read::take(&mut reader, MAX_LINE_BYTES + 1);
            if self.full() || bounded.read_until(b'\n', &mut line).map_err(unreadable)? == 0 {
                break;
            }
            if line.len() as u64 > MAX_LINE_BYTES {
                let reason =
                    format!("it is longer than {} MiB; one row stands in a line", MAX_LINE_BYTES >> 20);
                return Err(TaskError::Json { path: path.to_owned(), line: number, reason });
            }
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let value = serde_json::from_slice(&line).map_err(|error| TaskError::Json {
                path: path.to_owned(),
                line: number,
                reason: error.to_string(),
            })?;
            self.push(RowLocation { path: shared.clone(), row: number }, value)?;
        }
        Ok(())
    }

    fn read_parquet(&mut self, path: &Path) -> Result<(), TaskError> {
        let file =
            model::files::open(path).map_err(|source| TaskError::Read { path: path.to_owned(), source })?;
        let broken = |reason: String| TaskError::Parquet { path: path.to_owned(), reason };
        // The reader panics on some truncated pages and on unknown physical types.
        let read = catch_unwind(AssertUnwindSafe(|| self.read_rows(path, file)));
        let read = read.map_err(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason is given");
            broken(format!("it is damaged, or has a column of a kind that is not read ({text})"))
        });
        read?.map_err(|error| broken(error.to_string()))
    }

    fn read_rows(&mut self, path: &Path, file: File) -> Result<(), ParquetError> {
        let shared: Arc<Path> = path.into();
        let rows = SerializedFileReader::new(file)?.into_iter();
        for (number, row) in (1..).zip(rows.take(self.limit - self.rows.len())) {
            self.rows.push(DatasetRow {
                place: RowLocation { path: shared.clone(), row: number },
                columns: object(&row?),
            });
        }
        Ok(())
    }
}

/// A row or a struct of a Parquet file.
fn object(row: &parquet::record::Row) -> Map<String, Value> {
    row.get_column_iter().map(|(name, field)| (name.clone(), cell(field))).collect()
}

fn cell(field: &Field) -> Value {
    match field {
        // The shortest number that is this one in 32 bits: 0.1, and not the f64 next to it.
        Field::Float(x) => {
            x.to_string().parse::<f64>().ok().and_then(Number::from_f64).map_or(Value::Null, Value::Number)
        }
        Field::Group(row) => Value::Object(object(row)),
        Field::ListInternal(list) => list.elements().iter().map(cell).collect(),
        Field::MapInternal(map) => {
            let name = |key: &Field| match cell(key) {
                Value::String(name) => name,
                other => other.to_string(),
            };
            Value::Object(map.entries().iter().map(|(key, value)| (name(key), cell(value))).collect())
        }
        _ => field.to_json_value(),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;

    /// A Parquet file that pyarrow has written.
    pub(in super::super) fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("src/tasks/fixtures").join(name)
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
        let columns = |path: &PathBuf| -> Vec<_> {
            read(std::slice::from_ref(path), None).unwrap().into_iter().map(|row| row.columns).collect()
        };
        assert_eq!(columns(&lines), columns(&parquet));
        assert_eq!(columns(&lines)[1]["x"], json!(1.5));
        let second = &read(&[parquet], None).unwrap()[1];
        assert!(second.place.to_string().ends_with("rows.parquet:2"));
    }

    #[test]
    fn columns_of_every_kind_are_read() {
        let rows = read(&[fixture("kinds.parquet")], None).unwrap();
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
            assert_eq!(Value::Object(row.columns), expected);
        }
    }

    #[test]
    fn damaged_parquet_files_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("damaged.parquet");
        for name in ["rows.parquet", "kinds.parquet", "verl.parquet"] {
            let whole = std::fs::read(fixture(name)).unwrap();
            for at in 0..whole.len() {
                let mut damaged = whole.clone();
                damaged[at] ^= 1 << (at % 8);
                std::fs::write(&path, &damaged).unwrap();
                if let Err(error) = read(std::slice::from_ref(&path), None) {
                    assert!(matches!(error, TaskError::Parquet { .. }), "byte {at} of {name}: {error}");
                }
            }
            std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
            assert!(matches!(read(std::slice::from_ref(&path), None), Err(TaskError::Parquet { .. })));
        }
    }

    #[test]
    fn shards_come_in_name_order_and_other_files_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in
            [("b-00001.jsonl", "{\"n\":2}\n\n{\"n\":3}"), ("b-00000.json", "{\"n\":1}\n"), ("README.md", "#")]
        {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        let numbers = |limit| -> Vec<_> {
            let rows = read(&[dir.path().to_owned()], limit).unwrap();
            rows.iter().map(|row| (row.columns["n"].as_u64().unwrap(), row.place.row)).collect()
        };
        assert_eq!(numbers(None), [(1, 1), (2, 1), (3, 3)]);
        assert_eq!(numbers(Some(2)), [(1, 1), (2, 1)]);
        let again = [dir.path().join("b-00001.jsonl"), dir.path().join("b-00000.json")];
        assert_eq!(read(&again, None).unwrap().len(), 3);
    }

    #[test]
    fn limits_reach_into_parquet_files() {
        let path = fixture("rows.parquet");
        assert_eq!(read(&[path.clone(), path], Some(3)).unwrap().len(), 3);
    }

    #[test]
    fn every_bad_file_has_its_own_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str, content: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, content).unwrap();
            path
        };
        let error = |path: &Path| read(&[path.to_owned()], None).unwrap_err();
        let message = |path: &Path| error(path).to_string();

        assert!(matches!(error(&dir.path().join("no.jsonl")), TaskError::NotFound { .. }));
        assert!(matches!(error(&path("a.csv", b"a,b")), TaskError::Extension { .. }));
        assert!(matches!(error(&path("plain", b"")), TaskError::Extension { .. }));
        assert!(matches!(error(&path("bad.parquet", b"PAR1 not")), TaskError::Parquet { .. }));

        let cut = path("cut.jsonl", b"{\"a\":1}\n{\"a\":\n");
        assert!(matches!(error(&cut), TaskError::Json { line: 2, .. }));
        assert!(message(&cut).contains("cut.jsonl:2: not valid JSON: EOF"), "{}", message(&cut));
        let bytes = path("bytes.jsonl", b"{\"a\":\"\xff\"}\n");
        assert!(matches!(error(&bytes), TaskError::Json { line: 1, .. }));

        let list = path("list.json", b"[{\"a\":1}]\n");
        assert!(message(&list).ends_with("list.json:1: a row must be an object with columns, found a list"));

        let empty = tempfile::tempdir().unwrap();
        assert!(matches!(error(empty.path()), TaskError::NoShards { .. }));
    }
}
