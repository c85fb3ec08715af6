//! Rows of CSV files: the first line names the columns, every cell is a text.
//!
//! Invariant: cells are texts as they are written, so that `007` and `1e3` stay what they are; every row has as many cells as
//! there are columns, and an error names the line.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use csv::{Error, ErrorKind, Position, ReaderBuilder, StringRecord};
use serde_json::{Map, Value};

use super::{BoundedRows, DatasetRow, DatasetRows, MAX_ROW_BYTES, RowLocation};
use crate::tasks::TaskError;

/// Adds the rows of the file.
pub(super) fn read(rows: &mut DatasetRows, path: &Path) -> Result<(), TaskError> {
    let open =
        || model::files::open(path).map_err(|source| TaskError::Read { path: path.to_owned(), source });
    let lines = open()?;
    let (bounded, left) = BoundedRows::new(open()?);
    let mut reader = ReaderBuilder::new().from_reader(bounded);
    let broken = |error: &Error, before: &Position| TaskError::Csv {
        path: path.to_owned(),
        line: line_of(&lines, error.position().unwrap_or(before)),
        reason: reason(error),
    };
    let names = reader.headers().map_err(|error| broken(&error, &Position::new()))?.clone();
    if let Some(name) = twice(&names) {
        let reason = format!("two columns are named `{name}`");
        return Err(TaskError::Csv { path: path.to_owned(), line: 1, reason });
    }
    let shared: Arc<Path> = path.into();
    let mut record = StringRecord::new();
    while !rows.full() {
        left.set(MAX_ROW_BYTES);
        let before = reader.position().clone();
        if !reader.read_record(&mut record).map_err(|error| broken(&error, &before))? {
            break;
        }
        let line = line_of(&lines, record.position().unwrap_or(&before));
        let cells = names.iter().zip(&record);
        let columns: Map<String, Value> =
            cells.map(|(name, cell)| (name.to_owned(), Value::from(cell))).collect();
        let place = RowLocation { path: Arc::clone(&shared), row: usize::try_from(line).unwrap_or_default() };
        rows.rows.push(DatasetRow { place, columns });
    }
    Ok(())
}

/// The line at which a row begins. Its position is where the row before ends, which may be before line breaks: the second
/// character of `\r\n`, and empty lines.
fn line_of(file: &File, position: &Position) -> u64 {
    let (mut line, mut bytes) = (position.line(), [0; 64]);
    let mut at = position.byte();
    loop {
        // A file that cannot be read any more has no other line.
        let count = file.read_at(&mut bytes, at).unwrap_or(0);
        let breaks = bytes[..count].iter().take_while(|byte| matches!(byte, b'\r' | b'\n'));
        line += breaks.clone().filter(|byte| **byte == b'\n').count() as u64;
        let skipped = breaks.count();
        if skipped < bytes.len() {
            return line;
        }
        at += skipped as u64;
    }
}

/// What is wrong, without the place, which the caller names.
fn reason(error: &Error) -> String {
    match error.kind() {
        ErrorKind::Utf8 { err, .. } => format!("cell {} is not UTF-8", err.field() + 1),
        ErrorKind::UnequalLengths { expected_len, len, .. } => {
            format!("it has {len} cells, and the first line names {expected_len} columns")
        }
        ErrorKind::Io(error) => error.to_string(),
        _ => error.to_string(),
    }
}

/// A name that two columns have.
fn twice(names: &StringRecord) -> Option<&str> {
    let mut seen = std::collections::BTreeSet::new();
    names.iter().find(|name| !seen.insert(*name))
}
