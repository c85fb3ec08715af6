//! Rows of JSON files: one object per line, or one array of objects.
//!
//! Invariant: rows are parsed one by one, so that neither a file nor an array is in memory as a whole, and an error names the
//! line. A `.json` file is an array if its first character is `[`.

use std::cell::Cell;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek};
use std::path::Path;
use std::sync::Arc;

use serde::de::{Deserializer as _, Error as _, SeqAccess, Visitor};
use serde_json::{Deserializer, Value};

use super::{BoundedRows, DatasetRows, MAX_ROW_BYTES, RowLocation};
use crate::tasks::TaskError;

/// Adds the rows of a file that is either an array of objects or has one object per line.
pub(super) fn read(rows: &mut DatasetRows, path: &Path) -> Result<(), TaskError> {
    let unreadable = |source| TaskError::Read { path: path.to_owned(), source };
    let mut reader = BufReader::new(model::files::open(path).map_err(unreadable)?);
    let first = first_character(&mut reader).map_err(unreadable)?;
    reader.rewind().map_err(unreadable)?;
    match first {
        Some(b'[') => read_array(rows, path, reader),
        _ => lines(rows, path, reader),
    }
}

/// Adds the rows of a file that has one object per line.
pub(super) fn read_lines(rows: &mut DatasetRows, path: &Path) -> Result<(), TaskError> {
    let file =
        model::files::open(path).map_err(|source| TaskError::Read { path: path.to_owned(), source })?;
    lines(rows, path, BufReader::new(file))
}

fn lines(rows: &mut DatasetRows, path: &Path, mut reader: BufReader<File>) -> Result<(), TaskError> {
    let unreadable = |source| TaskError::Read { path: path.to_owned(), source };
    let shared: Arc<Path> = path.into();
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let mut bounded = Read::take(&mut reader, MAX_ROW_BYTES + 1);
        if rows.full() || bounded.read_until(b'\n', &mut line).map_err(unreadable)? == 0 {
            break;
        }
        let broken = |reason| TaskError::Json { path: path.to_owned(), line: number, reason };
        if line.len() as u64 > MAX_ROW_BYTES {
            let reason = format!("it is longer than {} MiB; one row stands in a line", MAX_ROW_BYTES >> 20);
            return Err(broken(reason));
        }
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let value = serde_json::from_slice(&line).map_err(|error| broken(error.to_string()))?;
        rows.push(RowLocation { path: shared.clone(), row: number }, value)?;
    }
    Ok(())
}

/// The first character that is no white space.
fn first_character(reader: &mut impl BufRead) -> io::Result<Option<u8>> {
    loop {
        let bytes = reader.fill_buf()?;
        if let Some(first) = bytes.iter().find(|byte| !byte.is_ascii_whitespace()) {
            return Ok(Some(*first));
        }
        let count = bytes.len();
        if count == 0 {
            return Ok(None);
        }
        reader.consume(count);
    }
}

fn read_array(rows: &mut DatasetRows, path: &Path, reader: BufReader<File>) -> Result<(), TaskError> {
    let (bounded, left) = BoundedRows::new(reader);
    let mut deserializer = Deserializer::from_reader(bounded);
    let mut refused = None;
    let elements = JsonElements { rows, path: path.into(), left: &left, refused: &mut refused };
    let read = deserializer.deserialize_seq(elements).and_then(|()| match rows.full() {
        true => Ok(()),
        false => deserializer.end(),
    });
    if let Some(refused) = refused {
        return Err(refused);
    }
    match read {
        // The rest of the array is not read, which the deserializer takes for a mistake.
        Err(_) if rows.full() => Ok(()),
        Err(error) => {
            Err(TaskError::JsonArray { path: path.to_owned(), line: error.line(), reason: error.to_string() })
        }
        Ok(()) => Ok(()),
    }
}

/// Takes the elements of an array as rows.
struct JsonElements<'a> {
    rows: &'a mut DatasetRows,
    path: Arc<Path>,
    left: &'a Cell<u64>,
    /// The row that is no object.
    refused: &'a mut Option<TaskError>,
}

impl<'de> Visitor<'de> for JsonElements<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        for row in 1.. {
            self.left.set(MAX_ROW_BYTES);
            if self.rows.full() {
                break;
            }
            let Some(value) = elements.next_element::<Value>()? else { break };
            if let Err(error) = self.rows.push(RowLocation { path: Arc::clone(&self.path), row }, value) {
                *self.refused = Some(error);
                return Err(A::Error::custom("a row is no object"));
            }
        }
        Ok(())
    }
}
