//! Rows of Arrow streams, which `save_to_disk` of the Python package `datasets` writes.
//!
//! Invariant: memory follows from the bytes of the file and never from a number in it: the decoder takes the file in pieces,
//! and the cells of a file are at most [`CELLS_PER_BYTE`] times its bytes. Cells have the JSON form of Parquet cells. Types
//! that repeat a value without its bytes (dictionaries, runs, views) are refused; `datasets` writes none.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowPrimitiveType, Date32Type, Date64Type, DurationMicrosecondType, DurationMillisecondType,
    DurationNanosecondType, DurationSecondType, Float16Type, Float32Type, Float64Type, Int8Type, Int16Type,
    Int32Type, Int64Type, Time32MillisecondType, Time32SecondType, Time64MicrosecondType,
    Time64NanosecondType, TimestampMicrosecondType, TimestampMillisecondType, TimestampNanosecondType,
    TimestampSecondType, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, RecordBatch, StructArray};
use arrow_buffer::Buffer;
use arrow_ipc::reader::StreamDecoder;
use arrow_schema::{DataType, TimeUnit};
use parquet::data_type::ByteArray;
use parquet::record::Field;
use serde_json::{Map, Value};

use super::parquet::{cell as of_field, name};
use super::{DatasetRow, DatasetRows, RowLocation, guarded};
use crate::tasks::TaskError;

/// Bytes that are decoded at a time.
const PIECE_BYTES: usize = 1 << 20;
/// Cells that a byte of a file may make: a null takes no more than its bit in a bitmap.
const CELLS_PER_BYTE: u64 = 16;
/// How a file begins that is no stream but the format with a footer.
const FILE_FORMAT: &[u8] = b"ARROW1";
/// Microseconds since 1970 of the last year that is shown, and of the first one before it.
const LAST_MICROSECONDS: i64 = 8_000_000_000_000_000_000;
/// The same in days.
const LAST_DAYS: i64 = LAST_MICROSECONDS / 86_400_000_000;

/// Adds the rows of the file.
pub(super) fn read(rows: &mut DatasetRows, path: &Path) -> Result<(), TaskError> {
    let file =
        model::files::open(path).map_err(|source| TaskError::Read { path: path.to_owned(), source })?;
    let before = rows.rows.len();
    guarded(|| read_stream(rows, path, file)).map_err(|reason| TaskError::Arrow {
        path: path.to_owned(),
        row: rows.rows.len() - before + 1,
        reason,
    })
}

fn read_stream(rows: &mut DatasetRows, path: &Path, mut file: File) -> Result<(), String> {
    let length = file.metadata().map_err(|error| error.to_string())?.len();
    let mut cells = CellBudget { left: length.saturating_mul(CELLS_PER_BYTE) };
    let shared: Arc<Path> = path.into();
    let mut decoder = StreamDecoder::new();
    let (mut number, mut first) = (0, true);
    while !rows.full() {
        let mut piece = Vec::new();
        Read::take(&mut file, PIECE_BYTES as u64)
            .read_to_end(&mut piece)
            .map_err(|error| error.to_string())?;
        if first && piece.starts_with(FILE_FORMAT) {
            return Err("it is an Arrow file (Feather), and only Arrow streams are read".to_owned());
        }
        first = false;
        if piece.is_empty() {
            decoder.finish().map_err(|error| error.to_string())?;
            return match decoder.schema() {
                Some(_) => Ok(()),
                None => Err("it has no schema".to_owned()),
            };
        }
        let mut piece = Buffer::from_vec(piece);
        while !piece.is_empty() && !rows.full() {
            if let Some(batch) = decoder.decode(&mut piece).map_err(|error| error.to_string())? {
                read_batch(rows, &shared, &batch, &mut number, &mut cells)?;
            }
        }
    }
    Ok(())
}

fn read_batch(
    rows: &mut DatasetRows,
    path: &Arc<Path>,
    batch: &RecordBatch,
    number: &mut usize,
    cells: &mut CellBudget,
) -> Result<(), String> {
    let schema = batch.schema();
    for row in 0..batch.num_rows() {
        if rows.full() {
            break;
        }
        cells.take()?;
        let mut columns = Map::new();
        for (field, column) in schema.fields().iter().zip(batch.columns()) {
            let value =
                cell(column, row, cells).map_err(|reason| format!("column `{}`: {reason}", field.name()))?;
            columns.insert(field.name().clone(), value);
        }
        *number += 1;
        rows.rows.push(DatasetRow { place: RowLocation { path: Arc::clone(path), row: *number }, columns });
    }
    Ok(())
}

/// Cells that the rest of a file may have.
struct CellBudget {
    left: u64,
}

impl CellBudget {
    fn take(&mut self) -> Result<(), String> {
        let left = self.left.checked_sub(1);
        self.left = left.ok_or("it has more cells than its bytes can hold, so it is damaged")?;
        Ok(())
    }
}

/// The JSON form of the cell at `row`.
fn cell(array: &dyn Array, row: usize, cells: &mut CellBudget) -> Result<Value, String> {
    cells.take()?;
    if array.is_null(row) {
        return Ok(Value::Null);
    }
    Ok(match array.data_type() {
        DataType::Null => Value::Null,
        DataType::Boolean => Value::Bool(array.as_boolean().value(row)),
        DataType::Int8 => of::<Int8Type>(array, row).into(),
        DataType::Int16 => of::<Int16Type>(array, row).into(),
        DataType::Int32 => of::<Int32Type>(array, row).into(),
        DataType::Int64 => of::<Int64Type>(array, row).into(),
        DataType::UInt8 => of::<UInt8Type>(array, row).into(),
        DataType::UInt16 => of::<UInt16Type>(array, row).into(),
        DataType::UInt32 => of::<UInt32Type>(array, row).into(),
        DataType::UInt64 => of::<UInt64Type>(array, row).into(),
        DataType::Float16 => of_field(&Field::Float(of::<Float16Type>(array, row).to_f32())),
        DataType::Float32 => of_field(&Field::Float(of::<Float32Type>(array, row))),
        DataType::Float64 => of_field(&Field::Double(of::<Float64Type>(array, row))),
        DataType::Decimal32(..) => {
            array.as_primitive::<arrow_array::types::Decimal32Type>().value_as_string(row).into()
        }
        DataType::Decimal64(..) => {
            array.as_primitive::<arrow_array::types::Decimal64Type>().value_as_string(row).into()
        }
        DataType::Decimal128(..) => {
            array.as_primitive::<arrow_array::types::Decimal128Type>().value_as_string(row).into()
        }
        DataType::Decimal256(..) => {
            array.as_primitive::<arrow_array::types::Decimal256Type>().value_as_string(row).into()
        }
        DataType::Utf8 => array.as_string::<i32>().value(row).into(),
        DataType::LargeUtf8 => array.as_string::<i64>().value(row).into(),
        DataType::Binary => bytes(array.as_binary::<i32>().value(row)),
        DataType::LargeBinary => bytes(array.as_binary::<i64>().value(row)),
        DataType::FixedSizeBinary(_) => bytes(array.as_fixed_size_binary().value(row)),
        DataType::Date32 => date(i64::from(of::<Date32Type>(array, row)))?,
        DataType::Date64 => date(of::<Date64Type>(array, row) / 86_400_000)?,
        DataType::Timestamp(unit, _) => timestamp(array, row, *unit)?,
        DataType::Time32(_) | DataType::Time64(_) => time(array, row),
        DataType::Duration(unit) => duration(array, row, *unit),
        DataType::List(_) => list(&array.as_list::<i32>().value(row), cells)?,
        DataType::LargeList(_) => list(&array.as_list::<i64>().value(row), cells)?,
        DataType::FixedSizeList(..) => list(&array.as_fixed_size_list().value(row), cells)?,
        DataType::Struct(_) => Value::Object(object(array.as_struct(), row, cells)?),
        DataType::Map(..) => {
            let entries = array.as_map().value(row);
            let mut map = Map::new();
            for entry in 0..entries.len() {
                let key = name(cell(entries.column(0), entry, cells)?);
                map.insert(key, cell(entries.column(1), entry, cells)?);
            }
            Value::Object(map)
        }
        other => return Err(format!("cells of type {other} are not read")),
    })
}

fn of<T: ArrowPrimitiveType>(array: &dyn Array, row: usize) -> T::Native {
    array.as_primitive::<T>().value(row)
}

fn bytes(value: &[u8]) -> Value {
    of_field(&Field::Bytes(ByteArray::from(value.to_vec())))
}

fn list(values: &dyn Array, cells: &mut CellBudget) -> Result<Value, String> {
    let mut list = Vec::new();
    for at in 0..values.len() {
        list.push(cell(values, at, cells)?);
    }
    Ok(Value::Array(list))
}

fn object(array: &StructArray, row: usize, cells: &mut CellBudget) -> Result<Map<String, Value>, String> {
    let mut found = Map::new();
    for (field, column) in array.fields().iter().zip(array.columns()) {
        found.insert(field.name().clone(), cell(column, row, cells)?);
    }
    Ok(found)
}

fn date(days: i64) -> Result<Value, String> {
    let shown = i32::try_from(days).ok().filter(|_| days.abs() < LAST_DAYS);
    Ok(of_field(&Field::Date(shown.ok_or_else(|| format!("day {days} is in no year that can be shown"))?)))
}

fn timestamp(array: &dyn Array, row: usize, unit: TimeUnit) -> Result<Value, String> {
    let (count, per_second) = match unit {
        TimeUnit::Second => (of::<TimestampSecondType>(array, row), 1),
        TimeUnit::Millisecond => (of::<TimestampMillisecondType>(array, row), 1_000),
        TimeUnit::Microsecond => (of::<TimestampMicrosecondType>(array, row), 1_000_000),
        TimeUnit::Nanosecond => (of::<TimestampNanosecondType>(array, row).div_euclid(1_000), 1_000_000),
    };
    let micros = count.checked_mul(1_000_000 / per_second);
    let micros = micros.filter(|micros| micros.unsigned_abs() < LAST_MICROSECONDS.unsigned_abs());
    let micros = micros.ok_or_else(|| format!("time {count} is in no year that can be shown"))?;
    Ok(of_field(&Field::TimestampMicros(micros)))
}

fn time(array: &dyn Array, row: usize) -> Value {
    of_field(&match array.data_type() {
        DataType::Time32(TimeUnit::Second) => {
            Field::TimeMillis(of::<Time32SecondType>(array, row).saturating_mul(1_000))
        }
        DataType::Time32(_) => Field::TimeMillis(of::<Time32MillisecondType>(array, row)),
        DataType::Time64(TimeUnit::Nanosecond) => {
            Field::TimeMicros(of::<Time64NanosecondType>(array, row) / 1_000)
        }
        _ => Field::TimeMicros(of::<Time64MicrosecondType>(array, row)),
    })
}

/// A number of the column's own units.
fn duration(array: &dyn Array, row: usize, unit: TimeUnit) -> Value {
    match unit {
        TimeUnit::Second => of::<DurationSecondType>(array, row),
        TimeUnit::Millisecond => of::<DurationMillisecondType>(array, row),
        TimeUnit::Microsecond => of::<DurationMicrosecondType>(array, row),
        TimeUnit::Nanosecond => of::<DurationNanosecondType>(array, row),
    }
    .into()
}
