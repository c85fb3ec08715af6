//! Datasets that the Python package `datasets` writes.
//!
//! Invariant: the rows are those that the package itself gives. The test is ignored where the package may be missing;
//! `tests/run` runs it with the interpreter of the variable PYTHON.

use std::path::Path;
use std::process::Command;

use rollout::tasks::TaskSplit;
use rollout::tasks::rows::read;
use serde_json::Value;

#[test]
#[ignore = "needs the Python package `datasets`"]
fn what_python_writes_is_read_as_it_was() {
    let directory = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/write_datasets.py");
    let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
    let written = Command::new(python).arg(script).arg(directory.path()).output().unwrap();
    assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
    for name in ["flat.csv", "full.jsonl", "full.json", "full.parquet", "full_saved", "splits"] {
        let rows = |path: &str, split| -> Vec<Value> {
            let rows = read(&[directory.path().join(path)], split, None).unwrap();
            rows.into_iter().map(|row| Value::Object(row.columns)).collect()
        };
        let expected = std::fs::read_to_string(directory.path().join(format!("{name}.expected"))).unwrap();
        let expected: Vec<Value> = expected.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(rows(name, TaskSplit::Train), expected, "{name}");
        if name == "splits" {
            assert_eq!(rows(name, TaskSplit::HeldOut), expected[1..], "{name}");
        }
    }
}
