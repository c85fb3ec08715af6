//! Rows of Parquet files, and the JSON form of their cells.
//!
//! Invariant: the reader may panic on damaged files; a panic is an error that names the file.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use parquet::errors::ParquetError;
use parquet::file::serialized_reader::SerializedFileReader;
use parquet::record::{Field, Row};
use serde_json::{Map, Number, Value};

use super::{DatasetRow, DatasetRows, RowLocation, guarded};
use crate::tasks::TaskError;

/// Adds the rows of the file.
pub(super) fn read(rows: &mut DatasetRows, path: &Path) -> Result<(), TaskError> {
    let file =
        model::files::open(path).map_err(|source| TaskError::Read { path: path.to_owned(), source })?;
    guarded(|| read_rows(rows, path, file).map_err(|error| error.to_string()))
        .map_err(|reason| TaskError::Parquet { path: path.to_owned(), reason })
}

fn read_rows(rows: &mut DatasetRows, path: &Path, file: File) -> Result<(), ParquetError> {
    let shared: Arc<Path> = path.into();
    let all = SerializedFileReader::new(file)?.into_iter();
    for (number, row) in (1..).zip(all.take(rows.limit - rows.rows.len())) {
        let place = RowLocation { path: shared.clone(), row: number };
        rows.rows.push(DatasetRow { place, columns: object(&row?) });
    }
    Ok(())
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
