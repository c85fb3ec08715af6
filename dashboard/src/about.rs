//! What a run directory says of its environment, and where its time went.
//!
//! Invariant: files are shown as they are, within limits: `run.json`, and the first lines of the logs of its attempts.

use std::io::{self, Read};
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::events::cut;
use crate::lines::{for_each_line, open_inside};
use crate::table::MetricsTable;

/// Most bytes of `run.json` that are read.
const MAX_FACTS_BYTES: u64 = 64 << 10;
/// Most attempts that are shown: the first start and the newest resumes.
const MAX_ATTEMPTS: usize = 8;
/// Lines of a log that are shown; the program says first what it runs and where.
const LOG_LINES: usize = 12;
/// Longest line of a log that is shown, bytes.
const MAX_LOG_LINE_BYTES: usize = 400;

/// Environment and timings of a run.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn about(root: &Path, table: &MetricsTable) -> io::Result<Value> {
    let step = table.totals("time/step").map_or(0.0, |(sum, ..)| sum);
    let names = table.names().filter(|name| name.starts_with("time/"));
    let timings = names.filter_map(|name| {
        let (sum, count, most) = table.totals(name)?;
        let share = (step > 0.0).then_some(sum / step);
        Some(json!({ "name": name, "total_s": sum, "mean_s": sum / count as f64, "max_s": most, "share": share }))
    });
    Ok(json!({
        "page": env!("CARGO_PKG_VERSION"),
        "facts": facts(root)?,
        "attempts": attempts(root)?,
        "timings": timings.collect::<Vec<_>>(),
    }))
}

/// The object in `run.json`; empty if there is none.
fn facts(root: &Path) -> io::Result<Map<String, Value>> {
    let Some(file) = open_inside(root, &root.join("run.json"))? else { return Ok(Map::new()) };
    let mut bytes = Vec::new();
    file.take(MAX_FACTS_BYTES).read_to_end(&mut bytes)?;
    Ok(serde_json::from_slice(&bytes).unwrap_or_default())
}

/// The first lines of `logs/attempt_N.log`.
fn attempts(root: &Path) -> io::Result<Vec<Value>> {
    let entries = match std::fs::read_dir(root.join("logs")) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let number = |entry: io::Result<std::fs::DirEntry>| {
        let name = entry.ok()?.file_name().into_string().ok()?;
        name.strip_prefix("attempt_")?.strip_suffix(".log")?.parse::<u64>().ok()
    };
    let mut numbers: Vec<u64> = entries.filter_map(number).collect();
    numbers.sort_unstable();
    let newest = numbers.len().saturating_sub(MAX_ATTEMPTS - 1).max(1);
    let shown = numbers.iter().enumerate().filter(|(at, _)| *at == 0 || *at >= newest);
    shown.map(|(_, number)| head(root, *number)).collect()
}

fn head(root: &Path, attempt: u64) -> io::Result<Value> {
    let name = format!("attempt_{attempt}.log");
    let mut lines = Vec::new();
    if let Some(file) = open_inside(root, &root.join("logs").join(&name))? {
        for_each_line(file, |line| {
            let text = String::from_utf8_lossy(line.unwrap_or_default());
            lines.push(cut(text.trim_end(), MAX_LOG_LINE_BYTES).to_owned());
            lines.len() < LOG_LINES
        })?;
    }
    Ok(json!({ "name": name, "lines": lines }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environment_and_timings_are_those_of_the_files() {
        let directory = tempfile::tempdir().unwrap();
        let mut table = MetricsTable::default();
        for line in [
            r#"{"step":1,"time/step":2,"time/wait_for_batch":0.5}"#,
            r#"{"step":2,"time/step":4,"time/wait_for_batch":1}"#,
        ] {
            table.add(&serde_json::from_str(line).unwrap());
        }
        let empty = about(directory.path(), &MetricsTable::default()).unwrap();
        assert_eq!(
            (&empty["facts"], &empty["attempts"], &empty["timings"]),
            (&json!({}), &json!([]), &json!([]))
        );
        std::fs::create_dir(directory.path().join("logs")).unwrap();
        std::fs::write(directory.path().join("run.json"), r#"{"format":2,"rlrun":"0.1.0"}"#).unwrap();
        for attempt in 1..=20 {
            let text = format!("attempt {attempt}\n{}", "line\n".repeat(50));
            std::fs::write(directory.path().join(format!("logs/attempt_{attempt}.log")), text).unwrap();
        }
        let about = about(directory.path(), &table).unwrap();
        assert_eq!(about["facts"]["rlrun"], "0.1.0");
        let attempts = about["attempts"].as_array().unwrap();
        assert_eq!(attempts.len(), MAX_ATTEMPTS);
        assert_eq!(
            (&attempts[0]["name"], &attempts[1]["lines"][0]),
            (&json!("attempt_1.log"), &json!("attempt 14"))
        );
        assert_eq!(attempts[0]["lines"].as_array().unwrap().len(), LOG_LINES);
        assert_eq!(
            about["timings"][1],
            json!({"name": "time/wait_for_batch", "total_s": 1.5, "mean_s": 0.75, "max_s": 1.0, "share": 0.25})
        );
    }
}
