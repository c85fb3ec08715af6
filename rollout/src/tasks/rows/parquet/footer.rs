//! The schema in the footer of a Parquet file, before the reader builds it.
//!
//! ```text
//! data | FileMetaData in Thrift's compact protocol | its length u32, little endian | "PAR1"
//! FileMetaData  : field 2, a list of SchemaElement: the schema, depth first
//! SchemaElement : field 5, the number of children
//! ```
//! Invariant: the schema of a footer that passes nests no deeper than [`MAX_DEPTH`], and no group has more children than elements
//! follow it. The reader recurses once per level and reserves memory for the children that are declared.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Deepest nesting of a schema.
const MAX_DEPTH: usize = 64;
/// Deepest nesting of structures in a footer.
const MAX_STRUCTURES: usize = 16;
/// Bytes behind the footer.
const TAIL_BYTES: u64 = 8;
const MAGIC: &[u8] = b"PAR1";

/// Types of Thrift's compact protocol.
const I32: u8 = 5;
const BINARY: u8 = 8;
const LIST: u8 = 9;
const STRUCT: u8 = 12;
/// Types of the fields of a SchemaElement, from field 1.
const ELEMENT: [u8; 10] = [I32, I32, I32, BINARY, I32, I32, I32, I32, I32, STRUCT];
/// The field of a SchemaElement with the number of its children.
const CHILDREN: i64 = 5;
/// The field of a footer with the schema.
const SCHEMA: i64 = 2;

/// Checks the schema of a file; what is no Parquet file is left to the reader.
///
/// # Errors
/// What is wrong with the schema.
pub(super) fn check(file: &File) -> Result<(), String> {
    let read = |at: u64, len: u64| -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, at)?;
        Ok(bytes)
    };
    let length = file.metadata().map_err(|error| error.to_string())?.len();
    let Some(end) = length.checked_sub(TAIL_BYTES) else { return Ok(()) };
    let tail = read(end, TAIL_BYTES).map_err(|error| error.to_string())?;
    let size = tail.first_chunk().copied().map_or(0, u32::from_le_bytes);
    match end.checked_sub(size.into()) {
        Some(start) if tail.ends_with(MAGIC) => {
            check_footer(&read(start, size.into()).map_err(|error| error.to_string())?)
        }
        _ => Ok(()),
    }
}

fn check_footer(footer: &[u8]) -> Result<(), String> {
    let damaged = || "its footer is damaged".to_owned();
    let mut walk = FooterWalk { rest: footer };
    let mut last = 0;
    while let Some((kind, id)) = walk.field(&mut last).ok_or_else(damaged)? {
        match (id, kind) {
            (SCHEMA, LIST) => check_tree(&walk.schema().ok_or_else(damaged)?)?,
            (SCHEMA, _) => return Err(damaged()),
            _ => walk.skip(kind, MAX_STRUCTURES).ok_or_else(damaged)?,
        }
    }
    Ok(())
}

/// Checks a tree by the numbers of children of its nodes, depth first.
fn check_tree(children: &[u64]) -> Result<(), String> {
    // Children that are to come, of every group that is open.
    let mut open: Vec<u64> = Vec::new();
    for (at, count) in children.iter().enumerate() {
        while open.last() == Some(&0) {
            open.pop();
        }
        if let Some(left) = open.last_mut() {
            *left -= 1;
        }
        let following = (children.len() - at - 1) as u64;
        if *count > following {
            return Err(format!("its schema has a group of {count} columns, and {following} follow"));
        }
        if *count > 0 {
            open.push(*count);
        }
        if open.len() > MAX_DEPTH {
            return Err(format!("its schema nests deeper than {MAX_DEPTH} levels"));
        }
    }
    Ok(())
}

/// A walk through a footer; everything is `None` where it ends too early or is none.
struct FooterWalk<'a> {
    rest: &'a [u8],
}

impl FooterWalk<'_> {
    /// `[elements]` numbers of children of a schema.
    fn schema(&mut self) -> Option<Vec<u64>> {
        let (kind, size) = self.list()?;
        let mut children = Vec::new();
        for _ in 0..size {
            if kind != STRUCT {
                return None;
            }
            let (mut last, mut count) = (0, 0);
            while let Some((kind, id)) = self.field(&mut last)? {
                let known = usize::try_from(id).ok()?.checked_sub(1)?;
                match ELEMENT.get(known) {
                    Some(expected) if *expected != kind => return None,
                    _ if id == CHILDREN => count = u64::try_from(self.signed()?).ok()?,
                    _ => self.skip(kind, MAX_STRUCTURES)?,
                }
            }
            children.push(count);
        }
        Some(children)
    }

    /// Type and id of the next field of a structure; `Some(None)` at its end.
    fn field(&mut self, last: &mut i64) -> Option<Option<(u8, i64)>> {
        let header = self.byte()?;
        let (delta, kind) = (header >> 4, header & 15);
        if kind == 0 {
            return Some(None);
        }
        *last = if delta == 0 { self.signed()? } else { last.saturating_add(i64::from(delta)) };
        Some(Some((kind, *last)))
    }

    /// Type and number of the elements of a list.
    fn list(&mut self) -> Option<(u8, u64)> {
        let header = self.byte()?;
        let (size, kind) = (header >> 4, header & 15);
        let size = if size == 15 { self.unsigned()? } else { size.into() };
        Some((kind, size))
    }

    /// Skips the value of a field, within at most `deepest` more structures.
    fn skip(&mut self, kind: u8, deepest: usize) -> Option<()> {
        match kind {
            // The type of a field says which boolean it is.
            1 | 2 => Some(()),
            LIST | 10 => {
                let (kind, size) = self.list()?;
                (0..size).try_for_each(|_| self.skip_element(kind, deepest))
            }
            11 => {
                let size = self.unsigned()?;
                let kinds = if size == 0 { 0 } else { self.byte()? };
                (0..size).try_for_each(|_| {
                    self.skip_element(kinds >> 4, deepest)?;
                    self.skip_element(kinds & 15, deepest)
                })
            }
            STRUCT => {
                let (deepest, mut last) = (deepest.checked_sub(1)?, 0);
                while let Some((kind, _)) = self.field(&mut last)? {
                    self.skip(kind, deepest)?;
                }
                Some(())
            }
            3 => self.take(1),
            4..=6 => self.unsigned().map(drop),
            7 => self.take(8),
            BINARY => {
                let len = self.unsigned()?;
                self.take(len)
            }
            13 => self.take(16),
            _ => None,
        }
    }

    /// Skips an element of a list: each has a byte or more.
    fn skip_element(&mut self, kind: u8, deepest: usize) -> Option<()> {
        match kind {
            1 | 2 => self.take(1),
            _ => self.skip(kind, deepest.checked_sub(1)?),
        }
    }

    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(*first)
    }

    fn take(&mut self, len: u64) -> Option<()> {
        self.rest = self.rest.get(usize::try_from(len).ok()?..)?;
        Some(())
    }

    fn unsigned(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..u64::BITS).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 127) << shift;
            if byte < 128 {
                return Some(value);
            }
        }
        None
    }

    fn signed(&mut self) -> Option<i64> {
        let value = self.unsigned()?;
        Some((value >> 1) as i64 ^ -((value & 1) as i64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A footer with a schema of groups and columns, by their numbers of children below 64.
    fn footer(children: &[u8]) -> Vec<u8> {
        // Field 1: version 1. Field 2: a list of structures.
        let mut bytes = vec![0x15, 2, 0x19, 0xfc, children.len() as u8];
        for count in children {
            // Field 4: the name `a`. Field 5.
            bytes.extend([0x48, 1, b'a', 0x15, count * 2, 0]);
        }
        // Field 3: a number of rows.
        bytes.extend([0x16, 2, 0]);
        bytes
    }

    #[test]
    fn a_schema_that_takes_stack_or_memory_is_refused() {
        assert_eq!(check_footer(&footer(&[2, 0, 1, 0])), Ok(()));
        assert_eq!(check_footer(&footer(&[&[1u8; 64][..], &[0]].concat())), Ok(()));
        let deep = check_footer(&footer(&[&[1u8; 65][..], &[0]].concat())).unwrap_err();
        assert!(deep.contains("deeper than 64 levels"), "{deep}");
        let wide = check_footer(&footer(&[1, 60])).unwrap_err();
        assert!(wide.contains("a group of 60 columns, and 0 follow"), "{wide}");
        let whole = footer(&[1, 0]);
        for len in 0..whole.len() {
            assert_eq!(check_footer(&whole[..len]), Err("its footer is damaged".to_owned()), "{len}");
        }
    }
}
