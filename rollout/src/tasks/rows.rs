//! JSON Lines and Parquet files as rows of JSON values.
//!
//! Invariant: rows come in file order, directories in name order of their shards, and every row knows where it stood.
//! Only as many rows are read as were asked for. Nothing is known here of prompts and answers.

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_json::WriterBuilder;
use arrow_json::writer::LineDelimited;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Map, Value};

use super::TaskError;

/// One row of a dataset.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Where it stood.
    pub place: Place,
    /// Its cells by column.
    pub columns: Map<String, Value>,
}

/// Where a row stood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The file.
    pub path: Arc<Path>,
    /// Line of a text file or row of a Parquet file, from 1.
    pub row: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.path.display(), self.row)
    }
}

/// Reads files and directories of shards one after the other, `limit` rows at most.
///
/// # Errors
/// A path that does not exist, cannot be read or has an unknown extension; a row that is malformed.
pub fn read(paths: &[PathBuf], limit: Option<usize>) -> Result<Vec<Row>, TaskError> {
    let mut rows = Rows { rows: vec![], limit: limit.unwrap_or(usize::MAX) };
    for path in paths {
        for file in files(path)? {
            match Format::of(&file) {
                Some(Format::Lines) => rows.read_lines(&file)?,
                Some(Format::Parquet) => rows.read_parquet(&file)?,
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
enum Format {
    Lines,
    Parquet,
}

impl Format {
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
    shards.retain(|shard| shard.is_file() && Format::of(shard).is_some());
    shards.sort();
    if shards.is_empty() { Err(TaskError::NoShards { path: path.to_owned() }) } else { Ok(shards) }
}

struct Rows {
    rows: Vec<Row>,
    limit: usize,
}

impl Rows {
    fn full(&self) -> bool {
        self.rows.len() >= self.limit
    }

    fn push(&mut self, place: Place, value: Value) -> Result<(), TaskError> {
        let Value::Object(columns) = value else {
            return Err(TaskError::NotAnObject { place, found: type_of(&value) });
        };
        self.rows.push(Row { place, columns });
        Ok(())
    }

    fn read_lines(&mut self, path: &Path) -> Result<(), TaskError> {
        let unreadable = |source| TaskError::Read { path: path.to_owned(), source };
        let shared: Arc<Path> = path.into();
        let mut reader = BufReader::new(File::open(path).map_err(unreadable)?);
        let mut line = Vec::new();
        for number in 1.. {
            line.clear();
            if self.full() || reader.read_until(b'\n', &mut line).map_err(unreadable)? == 0 {
                break;
            }
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let value = serde_json::from_slice(&line).map_err(|error| TaskError::Json {
                path: path.to_owned(),
                line: number,
                reason: error.to_string(),
            })?;
            self.push(Place { path: shared.clone(), row: number }, value)?;
        }
        Ok(())
    }

    fn read_parquet(&mut self, path: &Path) -> Result<(), TaskError> {
        let broken = |error: &dyn fmt::Display| TaskError::Parquet {
            path: path.to_owned(),
            reason: error.to_string(),
        };
        let shared: Arc<Path> = path.into();
        let file = File::open(path).map_err(|source| TaskError::Read { path: path.to_owned(), source })?;
        let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|e| broken(&e))?;
        let wanted = self.limit - self.rows.len();
        let batches = builder.with_limit(wanted).build().map_err(|e| broken(&e))?;
        let mut number = 0;
        for batch in batches {
            let mut writer =
                WriterBuilder::new().with_explicit_nulls(true).build::<_, LineDelimited>(Vec::new());
            writer.write(&batch.map_err(|e| broken(&e))?).map_err(|e| broken(&e))?;
            writer.finish().map_err(|e| broken(&e))?;
            let lines = writer.into_inner();
            for value in serde_json::Deserializer::from_slice(&lines).into_iter() {
                number += 1;
                self.push(Place { path: shared.clone(), row: number }, value.map_err(|e| broken(&e))?)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Cursor;

    use arrow_json::ReaderBuilder;
    use arrow_json::reader::infer_json_schema;
    use parquet::arrow::ArrowWriter;
    use serde_json::json;

    use super::*;

    /// Writes JSON Lines as Parquet.
    pub(in super::super) fn write_parquet(path: &Path, lines: &str) {
        let (schema, _) = infer_json_schema(Cursor::new(lines), None).unwrap();
        let mut reader = ReaderBuilder::new(Arc::new(schema)).build(Cursor::new(lines)).unwrap();
        let batch = reader.next().unwrap().unwrap();
        let mut writer = ArrowWriter::try_new(File::create(path).unwrap(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
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
        let (lines, parquet) = (dir.path().join("a.jsonl"), dir.path().join("a.parquet"));
        std::fs::write(&lines, LINES).unwrap();
        write_parquet(&parquet, LINES);
        let columns = |path: &PathBuf| -> Vec<_> {
            read(std::slice::from_ref(path), None).unwrap().into_iter().map(|row| row.columns).collect()
        };
        assert_eq!(columns(&lines), columns(&parquet));
        assert_eq!(columns(&lines)[1]["x"], json!(1.5));
        let second = &read(&[parquet], None).unwrap()[1];
        assert!(second.place.to_string().ends_with("a.parquet:2"));
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
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.parquet");
        write_parquet(&path, LINES);
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
