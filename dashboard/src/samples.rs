//! Sampled groups of a run: the steps that have them, pages of a step, and a search over steps.
//!
//! Invariant: a response is bounded: by groups, by bytes of a page, by characters of a text. A text that is cut says how
//! long it is. Texts are JSON strings, never markup.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::Path;

use serde_json::{Value, json};

use crate::events::cut;
use crate::lines::{for_each_line, open_inside};

/// Most steps that are listed; of more the newest are.
const MAX_STEPS: usize = 100_000;
/// Most groups of a page.
const MAX_GROUPS: usize = 16;
/// A page ends with the group that exceeds it, bytes of its lines.
const MAX_PAGE_BYTES: usize = 2 << 20;
/// Longest text of a page; a longer one is cut, bytes.
const MAX_TEXT_BYTES: usize = 100_000;
/// Most reasons to stop that a page lists.
const MAX_STOPS: usize = 20;
/// Longest reason to stop, bytes.
const MAX_STOP_BYTES: usize = 100;
/// Most results of a search.
const MAX_HITS: usize = 60;
/// Bytes of files that one request searches; the next request resumes where it ended.
const SEARCH_BYTES: u64 = 64 << 20;
/// Characters of a result on either side of what was found.
const EXCERPT: usize = 60;

/// Steps with samples, in ascending order.
///
/// # Errors
/// A directory that cannot be read. A run without samples has none.
pub(crate) fn steps(root: &Path) -> io::Result<Vec<u64>> {
    let entries = match std::fs::read_dir(root.join("samples")) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    Ok(newest(names, MAX_STEPS))
}

/// The newest `most` steps whose files have one of `names`, in ascending order.
fn newest(names: impl Iterator<Item = String>, most: usize) -> Vec<u64> {
    let step = |name: String| name.strip_prefix("step_")?.strip_suffix(".jsonl")?.parse::<u64>().ok();
    let mut steps = BTreeSet::new();
    for step in names.filter_map(step) {
        steps.insert(step);
        if steps.len() > most {
            steps.pop_first();
        }
    }
    steps.into_iter().collect()
}

/// Which groups of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SamplePage<'a> {
    pub(crate) step: u64,
    /// Groups before the page.
    pub(crate) offset: usize,
    pub(crate) filter: SampleFilter<'a>,
}

/// Which groups are wanted; by default all.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SampleFilter<'a> {
    /// Only groups with this text, in any case; empty for all.
    pub(crate) text: &'a str,
    /// Only groups with a trajectory whose reward is between these two.
    pub(crate) reward: Option<(f64, f64)>,
    /// Only groups with a trajectory that ended for this reason; empty for all.
    pub(crate) stop: &'a str,
    /// Only groups whose trajectories have different rewards.
    pub(crate) differing: bool,
}

impl SampleFilter<'_> {
    fn accepts(&self, group: &Value, text: &str) -> bool {
        let has_text =
            || text.is_empty() || texts(group).any(|(_, found)| found.to_lowercase().contains(text));
        (!self.differing || rewards_differ(group))
            && ((self.reward.is_none() && self.stop.is_empty())
                || trajectories(group).iter().any(|trajectory| self.accepts_trajectory(trajectory)))
            && has_text()
    }

    fn accepts_trajectory(&self, trajectory: &Value) -> bool {
        let reward = trajectory["reward"].as_f64();
        self.reward.is_none_or(|(from, to)| reward.is_some_and(|reward| reward >= from && reward <= to))
            && (self.stop.is_empty() || trajectory["stop"] == self.stop)
    }
}

/// A page of the groups of a step; `None` if the step has no samples.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn page(root: &Path, asked: SamplePage<'_>) -> io::Result<Option<Value>> {
    let Some(file) = open_step(root, asked.step)? else { return Ok(None) };
    let text = asked.filter.text.to_lowercase();
    let (mut groups, mut matching, mut bytes, mut skipped) = (Vec::new(), 0, 0, 0);
    let mut stops = BTreeSet::new();
    for_each_line(file, |line| {
        let Some(mut group) = line.and_then(|line| serde_json::from_slice::<Value>(line).ok()) else {
            skipped += 1;
            return true;
        };
        for stop in trajectories(&group).iter().filter_map(|trajectory| trajectory["stop"].as_str()) {
            if stops.len() < MAX_STOPS && !stops.contains(stop) {
                stops.insert(cut(stop, MAX_STOP_BYTES).to_owned());
            }
        }
        if !asked.filter.accepts(&group, &text) {
            return true;
        }
        matching += 1;
        let fits = groups.len() < MAX_GROUPS && bytes < MAX_PAGE_BYTES;
        if matching > asked.offset && fits {
            bytes += line.map_or(0, <[u8]>::len);
            cut_texts(&mut group);
            groups.push(group);
        }
        true
    })?;
    let next = asked.offset + groups.len();
    Ok(Some(json!({
        "step": asked.step,
        "groups": groups,
        "matching": matching,
        "next": (next < matching).then_some(next),
        "skipped_lines": skipped,
        "stops": stops,
    })))
}

/// Where a text occurs, from the newest step before `before` to older ones.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn search(root: &Path, text: &str, before: Option<u64>) -> io::Result<Value> {
    let wanted = text.to_lowercase();
    let (mut hits, mut budget, mut next) = (Vec::new(), SEARCH_BYTES, None);
    for step in steps(root)?.into_iter().rev().filter(|step| before.is_none_or(|before| *step < before)) {
        let Some(file) = open_step(root, step)? else { continue };
        let length = file.metadata()?.len();
        if hits.len() >= MAX_HITS || (length > budget && budget < SEARCH_BYTES) {
            next = Some(step + 1);
            break;
        }
        budget = budget.saturating_sub(length);
        for_each_line(file, |line| {
            let group = line.and_then(|line| serde_json::from_slice::<Value>(line).ok());
            let Some(group) = group else { return true };
            for (index, found) in texts(&group) {
                if let Some(excerpt) = excerpt(found, &wanted) {
                    hits.push(json!({
                        "step": step, "group": group["group"], "trajectory": index, "excerpt": excerpt,
                    }));
                }
            }
            hits.len() < MAX_HITS
        })?;
    }
    Ok(json!({ "hits": hits, "next": next }))
}

/// The file of a step; `None` if there is none.
pub(crate) fn open_step(root: &Path, step: u64) -> io::Result<Option<File>> {
    open_inside(root, &root.join("samples").join(format!("step_{step:06}.jsonl")))
}

/// The prompt of a group (`None`) and the completions of its trajectories with their indices.
fn texts(group: &Value) -> impl Iterator<Item = (Option<usize>, &str)> {
    let prompt = group["prompt"].as_str().map(|text| (None, text));
    let completions = trajectories(group)
        .iter()
        .enumerate()
        .filter_map(|(index, trajectory)| Some((Some(index), trajectory["completion"].as_str()?)));
    prompt.into_iter().chain(completions)
}

fn trajectories(group: &Value) -> &[Value] {
    group["trajectories"].as_array().map(Vec::as_slice).unwrap_or_default()
}

/// Whether the trajectories that are no baselines have different rewards.
fn rewards_differ(group: &Value) -> bool {
    let compared = trajectories(group).iter().filter(|trajectory| trajectory["baseline"] != true);
    let mut rewards = compared.filter_map(|trajectory| trajectory["reward"].as_f64());
    rewards.next().is_some_and(|first| rewards.any(|reward| reward != first))
}

/// Cuts long texts of a group, and writes their length beside them.
pub(crate) fn cut_texts(value: &mut Value) {
    match value {
        Value::String(text) if text.len() > MAX_TEXT_BYTES => {
            let kept = cut(text, MAX_TEXT_BYTES).to_owned();
            *text = format!("{kept}\n[cut: the text has {} bytes]", text.len());
        }
        Value::Array(list) => list.iter_mut().for_each(cut_texts),
        Value::Object(map) => map.values_mut().for_each(cut_texts),
        _ => {}
    }
}

/// What surrounds `wanted`, which is in lower case, in `text`.
fn excerpt(text: &str, wanted: &str) -> Option<String> {
    // Lower case may have other lengths; positions are counted in characters of that form.
    let lower = text.to_lowercase();
    let at = lower.find(wanted)?;
    let same = lower.len() == text.len() && text.is_char_boundary(at);
    let (shown, at) = if same { (text, at) } else { (&lower[..], at) };
    let start = shown[..at].char_indices().rev().nth(EXCERPT).map_or(0, |(index, _)| index);
    let rest = &shown[start..];
    let length = EXCERPT * 2 + wanted.chars().count();
    let end = rest.char_indices().nth(length).map_or(rest.len(), |(index, _)| index);
    Some(rest[..end].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lines::MAX_LINE_BYTES;

    fn run(groups: &[(u64, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("samples")).unwrap();
        for (step, text) in groups {
            std::fs::write(directory.path().join(format!("samples/step_{step:06}.jsonl")), text).unwrap();
        }
        directory
    }

    fn group(id: usize, completion: &str) -> String {
        json!({"group": id, "prompt": "p", "trajectories": [{"completion": completion, "reward": 0.5}]})
            .to_string()
    }

    #[test]
    fn steps_are_those_of_the_files() {
        let directory = run(&[(10, ""), (2, "")]);
        std::fs::write(directory.path().join("samples/step_x.jsonl"), "").unwrap();
        assert_eq!(steps(directory.path()).unwrap(), [2, 10]);
        assert!(steps(&directory.path().join("none")).unwrap().is_empty());
    }

    #[test]
    fn the_newest_steps_are_listed_whatever_else_is_in_the_directory() {
        let files = |step: u64| [format!("step_{step:06}_tokens.jsonl"), format!("step_{step:06}.jsonl")];
        // A directory is in no order, and may have a step twice.
        let names = [3, 1, 4, 2].into_iter().flat_map(files).chain(["step_4.jsonl".to_owned()]);
        assert_eq!(newest(names.clone(), 9), [1, 2, 3, 4]);
        assert_eq!(newest(names, 3), [2, 3, 4]);
    }

    #[test]
    fn pages_follow_each_other_and_filter() {
        let lines: String = (0..40).map(|id| group(id, &format!("Text {id}")) + "\n").collect();
        let directory = run(&[(1, &lines)]);
        let page = |offset, text| {
            let filter = SampleFilter { text, ..SampleFilter::default() };
            page(directory.path(), SamplePage { step: 1, offset, filter }).unwrap().unwrap()
        };
        let (mut offset, mut seen) = (Some(0), Vec::new());
        while let Some(at) = offset {
            let page = page(at as usize, "");
            seen.extend(
                page["groups"].as_array().unwrap().iter().map(|group| group["group"].as_u64().unwrap()),
            );
            offset = page["next"].as_u64();
        }
        assert_eq!(seen, (0..40).collect::<Vec<u64>>());
        let found = page(0, "text 3");
        assert_eq!((found["matching"].as_u64(), found["groups"].as_array().unwrap().len()), (Some(11), 11));
        assert!(super::page(directory.path(), all_of(9)).unwrap().is_none());
    }

    /// The first page of a step.
    fn all_of(step: u64) -> SamplePage<'static> {
        SamplePage { step, offset: 0, filter: SampleFilter::default() }
    }

    #[test]
    fn groups_are_filtered_by_reward_stop_and_difference() {
        let group =
            |id: usize, trajectories: Value| json!({"group": id, "trajectories": trajectories}).to_string();
        let lines = [
            group(0, json!([{"reward": 0.0, "stop": "length"}, {"reward": 1.0, "stop": "stop_token"}])),
            group(1, json!([{"reward": 1.0, "stop": "length"}, {"reward": 1.0, "stop": "length"}])),
            group(2, json!([{"reward": 0.5}, {"reward": 0.5}, {"reward": 9.0, "baseline": true}])),
            group(3, json!([{"reward": null, "stop": "length"}])),
        ];
        let directory = run(&[(1, &lines.join("\n"))]);
        let found = |filter| {
            let page = page(directory.path(), SamplePage { filter, ..all_of(1) }).unwrap().unwrap();
            assert_eq!(page["stops"], json!(["length", "stop_token"]));
            let groups = page["groups"].as_array().unwrap().clone();
            groups.iter().map(|group| group["group"].as_u64().unwrap()).collect::<Vec<_>>()
        };
        let all = SampleFilter::default();
        assert_eq!(found(SampleFilter { differing: true, ..all }), [0]);
        assert_eq!(found(SampleFilter { reward: Some((0.4, 1.0)), ..all }), [0, 1, 2]);
        assert_eq!(found(SampleFilter { stop: "length", ..all }), [0, 1, 3]);
        // One trajectory must have both.
        assert_eq!(found(SampleFilter { stop: "stop_token", reward: Some((0.0, 0.0)), ..all }), [0; 0]);
    }

    #[test]
    fn torn_and_huge_lines_are_counted_and_long_texts_are_cut() {
        let long = "\u{e4}".repeat(MAX_TEXT_BYTES);
        let lines = [group(0, "a"), "x".repeat(MAX_LINE_BYTES + 5), group(1, &long), "{\"gro".to_owned()];
        let directory = run(&[(1, &lines.join("\n"))]);
        let page = page(directory.path(), all_of(1)).unwrap().unwrap();
        assert_eq!((page["skipped_lines"].as_u64(), page["groups"].as_array().unwrap().len()), (Some(2), 2));
        let text = page["groups"][1]["trajectories"][0]["completion"].as_str().unwrap();
        assert!(text.ends_with("[cut: the text has 200000 bytes]") && text.len() < MAX_TEXT_BYTES + 50);
    }

    #[test]
    fn a_search_goes_from_new_to_old() {
        let directory = run(&[(1, &group(0, "needle")), (2, &group(0, "hay")), (3, &group(7, "a NEEDLE b"))]);
        let found = search(directory.path(), "Needle", None).unwrap();
        let hits = found["hits"].as_array().unwrap();
        assert_eq!(hits.iter().map(|hit| hit["step"].as_u64().unwrap()).collect::<Vec<_>>(), [3, 1]);
        assert_eq!((&hits[0]["group"], &hits[0]["excerpt"]), (&json!(7), &json!("a NEEDLE b")));
        assert_eq!(search(directory.path(), "needle", Some(3)).unwrap()["hits"][0]["step"], 1);
        // The lower case of this letter is longer.
        assert_eq!(excerpt("\u{130}x needle", "needle").unwrap(), "i\u{307}x needle");
    }
}
