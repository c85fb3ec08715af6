//! `status.json`: what buffer, leases, receivers of weights and roles were when the run last wrote it.
//!
//! Invariant: the file is shown as it is, within [`MAX_STATUS_BYTES`]; one that is no JSON object is named as a problem.

use std::io::{self, Read};
use std::path::Path;
use std::time::SystemTime;

use serde_json::{Map, Value, json};

use crate::lines::open_inside;

/// Most bytes of the file that are read.
const MAX_STATUS_BYTES: u64 = 2 << 20;

/// The last status of a run, and how old it is; `None` if there is none.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn read(root: &Path, now: SystemTime) -> io::Result<Option<Value>> {
    let Some(file) = open_inside(root, &root.join("status.json"))? else { return Ok(None) };
    let metadata = file.metadata()?;
    let age = metadata.modified().ok().and_then(|modified| now.duration_since(modified).ok());
    let too_long = metadata.len() > MAX_STATUS_BYTES;
    let mut bytes = Vec::new();
    file.take(MAX_STATUS_BYTES).read_to_end(&mut bytes)?;
    let problem = if too_long {
        format!("the file has {} bytes; at most {MAX_STATUS_BYTES} are read", metadata.len())
    } else {
        "the file is no JSON object".to_owned()
    };
    let status = serde_json::from_slice::<Map<String, Value>>(&bytes);
    let found = status.map_or_else(|_| json!({ "problem": problem }), Value::Object);
    Ok(Some(json!({ "status": found, "age_s": age.map(|age| age.as_secs_f64()) })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_shown_as_written_or_named_as_a_problem() {
        let directory = tempfile::tempdir().unwrap();
        let later = SystemTime::now() + std::time::Duration::from_secs(60);
        let read = || read(directory.path(), later).unwrap();
        assert_eq!(read(), None);
        std::fs::write(directory.path().join("status.json"), r#"{"step":8,"new":[1]}"#).unwrap();
        let found = read().unwrap();
        assert_eq!(found["status"], json!({"step": 8, "new": [1]}));
        assert!(found["age_s"].as_f64().unwrap() > 50.0);
        for (text, problem) in [
            ("[1".to_owned(), "the file is no JSON object"),
            (
                "x".repeat(MAX_STATUS_BYTES as usize + 1),
                "the file has 2097153 bytes; at most 2097152 are read",
            ),
        ] {
            std::fs::write(directory.path().join("status.json"), text).unwrap();
            assert_eq!(read().unwrap()["status"], json!({"problem": problem}));
        }
    }
}
