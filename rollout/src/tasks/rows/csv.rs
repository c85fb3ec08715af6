//! Rows of CSV files: the first line names the columns, every cell is a text.
//!
//! Invariant: cells are texts as they are written, so that `007` and `1e3` stay what they are; every row has as many cells as
//! there are columns, and an error names the line.

use std::path::Path;
use std::sync::Arc;

use csv::{Error, ErrorKind, ReaderBuilder, StringRecord};
use serde_json::{Map, Value};

use super::{BoundedRows, DatasetRow, DatasetRows, MAX_ROW_BYTES, RowLocation};
use crate::tasks::TaskError;

/// Adds the rows of the file.
pub(super) fn read(rows: &mut DatasetRows, path: &Path) -> Result<(), TaskError> {
    let file =
        model::files::open(path).map_err(|source| TaskError::Read { path: path.to_owned(), source })?;
    let (bounded, left) = BoundedRows::new(file);
    let mut reader = ReaderBuilder::new().from_reader(bounded);
    let broken = |error: &Error, line| TaskError::Csv {
        path: path.to_owned(),
        line: error.position().map_or(line, csv::Position::line),
        reason: reason(error),
    };
    let names = reader.headers().map_err(|error| broken(&error, 1))?.clone();
    if let Some(name) = twice(&names) {
        let reason = format!("two columns are named `{name}`");
        return Err(TaskError::Csv { path: path.to_owned(), line: 1, reason });
    }
    let shared: Arc<Path> = path.into();
    let mut record = StringRecord::new();
    while !rows.full() {
        left.set(MAX_ROW_BYTES);
        let line = reader.position().line();
        if !reader.read_record(&mut record).map_err(|error| broken(&error, line))? {
            break;
        }
        let line = record.position().map_or(line, csv::Position::line);
        let cells = names.iter().zip(&record);
        let columns: Map<String, Value> =
            cells.map(|(name, cell)| (name.to_owned(), Value::from(cell))).collect();
        let place = RowLocation { path: Arc::clone(&shared), row: usize::try_from(line).unwrap_or_default() };
        rows.rows.push(DatasetRow { place, columns });
    }
    Ok(())
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
