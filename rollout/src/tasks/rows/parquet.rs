//! Rows of Parquet files, and the JSON form of their cells.
//!
//! Invariant: the reader may panic on damaged files; a panic is an error that names the file. A value that a file has once may be
//! in every row, so that a small file has rows without end: what they take in memory has a limit.

mod footer;

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use parquet::file::reader::FileReader;
use parquet::file::serialized_reader::SerializedFileReader;
use parquet::record::{Field, Row};
use serde_json::{Map, Number, Value};

use super::{DatasetRow, DatasetRows, RowLocation, guarded};
use crate::tasks::TaskError;

/// Least memory that the rows of a file may take, bytes.
const LEAST_BUDGET_BYTES: u64 = 4 << 30;
/// Memory that the rows of a file may take per byte of it, where that is more.
const BUDGET_PER_BYTE: u64 = 256;
/// Memory of a cell without its text, bytes.
const CELL_BYTES: u64 = 64;

/// Adds the rows of the file.
pub(super) fn read(rows: &mut DatasetRows, path: &Path) -> Result<(), TaskError> {
    let file =
        model::files::open(path).map_err(|source| TaskError::Read { path: path.to_owned(), source })?;
    let length = file.metadata().map_or(0, |file| file.len());
    let budget_bytes = length.saturating_mul(BUDGET_PER_BYTE).max(LEAST_BUDGET_BYTES);
    match guarded(|| read_rows(rows, path, file, budget_bytes)) {
        Ok(None) => Ok(()),
        Ok(Some(rows)) => Err(TaskError::Memory { path: path.to_owned(), rows, mib: budget_bytes >> 20 }),
        Err(reason) => Err(TaskError::Parquet { path: path.to_owned(), reason }),
    }
}

/// Adds rows within the budget; the number of the row that is beyond it, if one is.
fn read_rows(
    rows: &mut DatasetRows,
    path: &Path,
    file: File,
    budget_bytes: u64,
) -> Result<Option<usize>, String> {
    footer::check(&file)?;
    let shared: Arc<Path> = path.into();
    let reader = SerializedFileReader::new(file).map_err(|error| error.to_string())?;
    if reader.metadata().file_metadata().schema_descr().num_columns() == 0 {
        return Err("it has no columns".to_owned());
    }
    let mut taken_bytes = 0u64;
    for (number, row) in (1..).zip(reader.into_iter().take(rows.limit - rows.rows.len())) {
        let row = row.map_err(|error| error.to_string())?;
        taken_bytes = taken_bytes.saturating_add(row_bytes(&row));
        if taken_bytes > budget_bytes {
            return Ok(Some(number));
        }
        let place = RowLocation { path: shared.clone(), row: number };
        rows.rows.push(DatasetRow { place, columns: object(&row) });
    }
    Ok(None)
}

/// Memory that a row or a struct takes, about, bytes.
fn row_bytes(row: &Row) -> u64 {
    row.get_column_iter().map(|(name, field)| name.len() as u64 + cell_bytes(field)).sum()
}

/// Memory that a cell takes, about, bytes.
fn cell_bytes(field: &Field) -> u64 {
    CELL_BYTES
        + match field {
            Field::Str(text) => text.len() as u64,
            // As base64.
            Field::Bytes(bytes) => bytes.len() as u64 * 4 / 3,
            Field::Group(row) => row_bytes(row),
            Field::ListInternal(list) => list.elements().iter().map(cell_bytes).sum(),
            Field::MapInternal(map) => {
                map.entries().iter().map(|(key, value)| cell_bytes(key) + cell_bytes(value)).sum()
            }
            _ => 0,
        }
}

/// A row or a struct of a Parquet file.
fn object(row: &Row) -> Map<String, Value> {
    row.get_column_iter().map(|(name, field)| (name.clone(), cell(field))).collect()
}

/// The JSON form of a cell.
pub(super) fn cell(field: &Field) -> Value {
    match field {
        // The shortest number that is this one in 32 bits: 0.1, and not the f64 next to it.
        Field::Float(x) => {
            x.to_string().parse::<f64>().ok().and_then(Number::from_f64).map_or(Value::Null, Value::Number)
        }
        Field::Group(row) => Value::Object(object(row)),
        Field::ListInternal(list) => list.elements().iter().map(cell).collect(),
        Field::MapInternal(map) => {
            Value::Object(map.entries().iter().map(|(key, value)| (name(cell(key)), cell(value))).collect())
        }
        _ => field.to_json_value(),
    }
}

/// The name under which an entry of a map stands in an object.
pub(super) fn name(key: Value) -> String {
    match key {
        Value::String(name) => name,
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::types::Type;

    use super::*;
    use crate::tasks::rows::tests::fixture;

    fn rows() -> DatasetRows {
        DatasetRows { rows: vec![], limit: usize::MAX }
    }

    #[test]
    fn rows_that_take_too_much_memory_are_not_read() {
        let path = fixture("rows.parquet");
        let read = |budget_bytes| read_rows(&mut rows(), &path, File::open(&path).unwrap(), budget_bytes);
        assert_eq!(read(1 << 20), Ok(None));
        assert_eq!(read(100), Ok(Some(1)));
    }

    #[test]
    fn a_file_without_columns_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("none.parquet");
        let schema = Arc::new(Type::group_type_builder("rows").build().unwrap());
        let file = File::create(&path).unwrap();
        SerializedFileWriter::new(file, schema, Arc::default()).unwrap().close().unwrap();
        let error = super::read(&mut rows(), &path).unwrap_err().to_string();
        assert!(error.contains("none.parquet") && error.contains("it has no columns"), "{error}");
    }
}
