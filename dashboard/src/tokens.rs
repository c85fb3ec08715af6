//! Tokens of one trajectory, as `samples/step_X_tokens.jsonl` has them.
//!
//! Invariant: a request reads at most [`MAX_READ_BYTES`] and returns at most [`MAX_ROWS`] rows. Texts of tokens are JSON
//! strings, never markup.

use std::io::{self, Read};
use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::lines::{for_each_line, open_inside};

/// Most bytes of a file that a request reads.
const MAX_READ_BYTES: u64 = 256 << 20;
/// Most rows of a response; a row is a branch of the trajectory.
const MAX_ROWS: usize = 16;
/// A response ends with the row that exceeds it, bytes of its lines.
const MAX_RESPONSE_BYTES: usize = 4 << 20;

/// Which trajectory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TrajectoryName {
    pub(crate) step: u64,
    pub(crate) group: u64,
    /// Its number in the group.
    pub(crate) index: u64,
}

/// What says whose a line is.
#[derive(Debug, Deserialize)]
struct TokenLine {
    group: Option<u64>,
    index: Option<u64>,
}

/// The rows of a trajectory; `None` if the step has no tokens.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn rows(root: &Path, name: TrajectoryName) -> io::Result<Option<Value>> {
    let (mut rows, mut bytes, mut left_out) = (Vec::new(), 0, 0);
    let read = for_each_row(root, name.step, |group, index, line| {
        if (group, index) != (name.group, name.index) {
            // The rows of a trajectory follow each other.
            return rows.is_empty();
        }
        if rows.len() == MAX_ROWS || bytes > MAX_RESPONSE_BYTES {
            left_out += 1;
            return true;
        }
        bytes += line.len();
        rows.extend(serde_json::from_slice::<Value>(line).ok());
        true
    })?;
    let Some(read) = read else { return Ok(None) };
    let complete = !rows.is_empty() || read < MAX_READ_BYTES;
    Ok(Some(json!({ "rows": rows, "left_out": left_out, "complete": complete })))
}

/// Calls `f` with group, index and line of every row of a step until it returns false. Returns the bytes of the lines that
/// were read; `None` if the step has no tokens.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn for_each_row(
    root: &Path,
    step: u64,
    mut f: impl FnMut(u64, u64, &[u8]) -> bool,
) -> io::Result<Option<u64>> {
    let path = root.join("samples").join(format!("step_{step:06}_tokens.jsonl"));
    let Some(file) = open_inside(root, &path)? else { return Ok(None) };
    let mut read = 0;
    for_each_line(file.take(MAX_READ_BYTES), |line| {
        let Some(line) = line else { return true };
        read += line.len() as u64;
        match serde_json::from_slice::<TokenLine>(line) {
            Ok(TokenLine { group: Some(group), index: Some(index) }) => f(group, index, line),
            _ => true,
        }
    })?;
    Ok(Some(read))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lines::MAX_LINE_BYTES;

    #[test]
    fn the_rows_of_a_trajectory_are_found_between_others() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("samples")).unwrap();
        let row = |group: u64, index: u64, branch: u64| {
            json!({"group": group, "index": index, "branch": branch, "texts": ["<b>"], "trainer_logprobs": [null]})
                .to_string()
        };
        let lines = [
            row(1, 0, 0),
            "x".repeat(MAX_LINE_BYTES + 1),
            row(1, 1, 0),
            row(1, 1, 1),
            "[]".to_owned(),
            row(2, 1, 0),
        ];
        std::fs::write(directory.path().join("samples/step_000003_tokens.jsonl"), lines.join("\n")).unwrap();
        let rows = |group, index| rows(directory.path(), TrajectoryName { step: 3, group, index }).unwrap();
        let found = rows(1, 1).unwrap();
        assert_eq!(found["rows"].as_array().unwrap().len(), 2);
        assert_eq!((&found["rows"][1]["branch"], &found["rows"][1]["texts"]), (&json!(1), &json!(["<b>"])));
        assert_eq!(rows(2, 1).unwrap()["rows"][0]["group"], 2);
        assert_eq!(rows(9, 9).unwrap(), json!({"rows": [], "left_out": 0, "complete": true}));
        let other = TrajectoryName { step: 4, group: 1, index: 1 };
        assert!(super::rows(directory.path(), other).unwrap().is_none());
    }

    #[test]
    fn rows_have_a_limit() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("samples")).unwrap();
        let lines = "{\"group\":1,\"index\":1}\n".repeat(MAX_ROWS + 5);
        std::fs::write(directory.path().join("samples/step_000001_tokens.jsonl"), lines).unwrap();
        let found = rows(directory.path(), TrajectoryName { step: 1, group: 1, index: 1 }).unwrap().unwrap();
        assert_eq!((found["rows"].as_array().unwrap().len(), &found["left_out"]), (MAX_ROWS, &json!(5)));
    }
}
