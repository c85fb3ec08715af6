//! The same tasks at two steps of a run.
//!
//! Invariant: a page has at most [`MAX_PAIRS`] pairs, and a search for steps that share tasks reads at most
//! [`SEARCH_BYTES`] before it asks to be continued.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::lines::for_each_line;
use crate::samples::{cut_texts, open_step, steps};

/// Most pairs of groups of a page.
const MAX_PAIRS: usize = 8;
/// A page ends with the group that exceeds it, bytes of the lines of its earlier step.
const MAX_PAGE_BYTES: usize = 1 << 20;
/// Most tasks of a step that are compared.
const MAX_TASKS: usize = 10_000;
/// Most steps that a search for shared tasks names.
const MAX_STEPS: usize = 50;
/// Bytes of files that one search reads.
const SEARCH_BYTES: u64 = 64 << 20;

/// Two steps, and where a page begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepPair {
    pub(crate) step: u64,
    pub(crate) other: u64,
    /// Pairs before the page.
    pub(crate) offset: usize,
}

/// The task of a group; numbers and texts are different tasks.
#[derive(Debug, Deserialize)]
struct TaskLine {
    task: Value,
}

/// The steps before `before` with tasks of `step`, newest first, with the number of shared tasks.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn shared(root: &Path, step: u64, before: Option<u64>) -> io::Result<Value> {
    let wanted = tasks(root, step)?;
    let (mut found, mut budget, mut next) = (Vec::new(), SEARCH_BYTES, None);
    let others = steps(root)?.into_iter().rev();
    for other in others.filter(|other| *other != step && before.is_none_or(|before| *other < before)) {
        let Some(file) = open_step(root, other)? else { continue };
        let length = file.metadata()?.len();
        if found.len() >= MAX_STEPS || (length > budget && budget < SEARCH_BYTES) {
            next = Some(other + 1);
            break;
        }
        budget = budget.saturating_sub(length);
        let count = tasks(root, other)?.intersection(&wanted).count();
        if count > 0 {
            found.push(json!({ "step": other, "tasks": count }));
        }
    }
    Ok(json!({ "steps": found, "next": next }))
}

/// Groups of the same task at two steps; `None` if a step has no samples.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn pairs(root: &Path, pair: StepPair) -> io::Result<Option<Value>> {
    let StepPair { step, other, offset } = pair;
    let (Some(file), Some(other_file)) = (open_step(root, step)?, open_step(root, other)?) else {
        return Ok(None);
    };
    let theirs = tasks(root, other)?;
    let (mut ours, mut seen, mut bytes) = (Vec::<(String, Value)>::new(), BTreeSet::new(), 0);
    for_each_line(file, |line| {
        let Some(task) = line.and_then(task).filter(|task| theirs.contains(task)) else { return true };
        let is_new = seen.len() < MAX_TASKS && seen.insert(task.clone());
        if is_new && seen.len() > offset && ours.len() < MAX_PAIRS && bytes < MAX_PAGE_BYTES {
            bytes += line.map_or(0, <[u8]>::len);
            ours.extend(line.and_then(group).map(|group| (task, group)));
        }
        true
    })?;
    let mut found = BTreeMap::<String, Value>::new();
    for_each_line(other_file, |line| {
        let wanted = |task: &String| !found.contains_key(task) && ours.iter().any(|(known, _)| known == task);
        if let Some(task) = line.and_then(task).filter(wanted) {
            found.extend(line.and_then(group).map(|group| (task, group)));
        }
        found.len() < ours.len()
    })?;
    let next = offset + ours.len();
    let pairs: Vec<Value> = ours
        .into_iter()
        .filter_map(|(task, left)| Some(json!({ "left": left, "right": found.remove(&task)? })))
        .collect();
    Ok(Some(json!({
        "step": step,
        "other": other,
        "pairs": pairs,
        "matching": seen.len(),
        "next": (next < seen.len()).then_some(next),
    })))
}

/// The tasks of a step.
fn tasks(root: &Path, step: u64) -> io::Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    if let Some(file) = open_step(root, step)? {
        for_each_line(file, |line| {
            found.extend(line.and_then(task));
            found.len() < MAX_TASKS
        })?;
    }
    Ok(found)
}

fn task(line: &[u8]) -> Option<String> {
    serde_json::from_slice::<TaskLine>(line).ok().map(|line| line.task.to_string())
}

fn group(line: &[u8]) -> Option<Value> {
    let mut group = serde_json::from_slice::<Value>(line).ok()?;
    cut_texts(&mut group);
    Some(group)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(steps: &[(u64, &[u64])]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("samples")).unwrap();
        for (step, tasks) in steps {
            let lines: String = tasks
                .iter()
                .map(|task| {
                    format!("{{\"group\":{},\"task\":{task},\"trajectories\":[]}}\n", step * 100 + task)
                })
                .collect();
            std::fs::write(directory.path().join(format!("samples/step_{step:06}.jsonl")), lines).unwrap();
        }
        directory
    }

    #[test]
    fn groups_of_the_same_task_are_paired() {
        let run = run(&[(1, &[1, 2, 3]), (2, &[9, 3, 1, 3]), (3, &[7])]);
        let found = pairs(run.path(), StepPair { step: 2, other: 1, offset: 0 }).unwrap().unwrap();
        let groups: Vec<_> = found["pairs"]
            .as_array()
            .unwrap()
            .iter()
            .map(|pair| (pair["left"]["group"].as_u64().unwrap(), pair["right"]["group"].as_u64().unwrap()))
            .collect();
        assert_eq!(groups, [(203, 103), (201, 101)]);
        assert_eq!((&found["matching"], &found["next"]), (&json!(2), &Value::Null));
        assert!(pairs(run.path(), StepPair { step: 2, other: 8, offset: 0 }).unwrap().is_none());
        assert_eq!(shared(run.path(), 1, None).unwrap()["steps"], json!([{"step": 2, "tasks": 2}]));
        assert_eq!(shared(run.path(), 3, None).unwrap(), json!({"steps": [], "next": null}));
    }

    #[test]
    fn pages_of_pairs_follow_each_other() {
        let tasks: Vec<u64> = (0..20).collect();
        let run = run(&[(1, &tasks), (2, &tasks)]);
        let (mut offset, mut seen) = (Some(0), 0);
        while let Some(at) = offset {
            let page =
                pairs(run.path(), StepPair { step: 1, other: 2, offset: at as usize }).unwrap().unwrap();
            assert_eq!(page["pairs"][0]["left"]["task"], at);
            seen += page["pairs"].as_array().unwrap().len();
            offset = page["next"].as_u64();
        }
        assert_eq!(seen, 20);
    }
}
