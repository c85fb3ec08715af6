//! Rows of JSON files: one object per line, or one array of objects.
//!
//! Invariant: rows are parsed one by one, so that neither a file nor an array is in memory as a whole, and an error names the
//! line. A `.json` file is an array if its first character is `[`. Whole numbers that would be rounded are refused.

use std::cell::Cell;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek};
use std::ops::Range;
use std::os::unix::fs::FileExt;
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
        let place = RowLocation { path: shared.clone(), row: number };
        if may_be_rounded(&value)
            && let Some(number) = wide_integer(&line)
        {
            return Err(TaskError::WideInteger { place, number });
        }
        rows.push(place, value)?;
    }
    Ok(())
}

/// Whether a value has a number beyond 64 bits. The parser takes such a whole number for one with a fraction.
fn may_be_rounded(value: &Value) -> bool {
    /// Whole numbers of 64 bits are between minus this and twice this.
    const LEAST: f64 = (1u64 << 63) as f64;
    match value {
        Value::Number(number) => number.is_f64() && number.as_f64().is_some_and(|x| x.abs() >= LEAST),
        Value::Array(list) => list.iter().any(may_be_rounded),
        Value::Object(map) => map.values().any(may_be_rounded),
        Value::Null | Value::Bool(_) | Value::String(_) => false,
    }
}

/// The first whole number of a JSON text that 64 bits do not hold, as it is written there.
fn wide_integer(json: &[u8]) -> Option<String> {
    let is_part = |byte: &u8| byte.is_ascii_digit() || b"+-.eE".contains(byte);
    let (mut at, mut quoted) = (0, false);
    while at < json.len() {
        match json[at] {
            b'\\' if quoted => at += 2,
            b'"' => {
                quoted = !quoted;
                at += 1;
            }
            b'-' | b'0'..=b'9' if !quoted => {
                let len = json[at..].iter().take_while(|byte| is_part(byte)).count();
                let number = String::from_utf8_lossy(&json[at..at + len]);
                let is_whole = !number.contains(['.', 'e', 'E']);
                if is_whole && number.parse::<u64>().is_err() && number.parse::<i64>().is_err() {
                    return Some(number.into_owned());
                }
                at += len;
            }
            _ => at += 1,
        }
    }
    None
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
    let file = reader.get_ref().try_clone();
    let file = file.map_err(|source| TaskError::Read { path: path.to_owned(), source })?;
    let (bounded, left) = BoundedRows::new(reader);
    let mut deserializer = Deserializer::from_reader(bounded);
    let mut refused = None;
    let elements = JsonElements { rows, path: path.into(), file, left: &left, refused: &mut refused };
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
    /// The file of the array, which is read at a position of its own.
    file: File,
    left: &'a Cell<u64>,
    /// The row that is no object, or has a number that was rounded.
    refused: &'a mut Option<TaskError>,
}

impl JsonElements<'_> {
    /// Adds a row, whose text is at `bytes` of the file.
    fn push(&mut self, row: usize, value: Value, bytes: Range<u64>) -> Result<(), TaskError> {
        let place = RowLocation { path: Arc::clone(&self.path), row };
        if may_be_rounded(&value) {
            let mut text = vec![0; (bytes.end - bytes.start) as usize];
            let read = self.file.read_exact_at(&mut text, bytes.start);
            read.map_err(|source| TaskError::Read { path: self.path.to_path_buf(), source })?;
            if let Some(number) = wide_integer(&text) {
                return Err(TaskError::WideInteger { place, number });
            }
        }
        self.rows.push(place, value)
    }
}

impl<'de> Visitor<'de> for JsonElements<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut elements: A) -> Result<(), A::Error> {
        // The parser has read up to the first element, and then one byte beyond the value at most.
        let mut end = MAX_ROW_BYTES - self.left.get();
        for row in 1.. {
            let start = end.saturating_sub(1);
            self.left.set(MAX_ROW_BYTES);
            if self.rows.full() {
                break;
            }
            let Some(value) = elements.next_element::<Value>()? else { break };
            end += MAX_ROW_BYTES - self.left.get();
            if let Err(error) = self.push(row, value, start..end) {
                *self.refused = Some(error);
                return Err(A::Error::custom("a row is refused"));
            }
        }
        Ok(())
    }
}
