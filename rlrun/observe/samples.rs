//! `samples/step_N.jsonl`: the first groups of a batch, for people to read.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

use serde_json::json;
use trainer::token_log::RowTokens;
use trajectory::{Group, Sample, Trajectory, Turn};

use crate::failure::Failure;
use crate::prepare::prompt_text;

/// Writes `groups`, a line each, with the advantages in `rows`.
pub(super) fn write(path: &Path, groups: &[Arc<Group>], rows: &[RowTokens]) -> Result<(), Failure> {
    written(path, |file| groups.iter().try_for_each(|group| writeln!(file, "{}", readable(group, rows))))
}

/// Makes the file `path` with what `write` writes.
pub(super) fn written(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>,
) -> Result<(), Failure> {
    let made = File::create(path).and_then(|file| {
        let mut file = BufWriter::new(file);
        write(&mut file)?;
        file.flush()
    });
    made.map_err(|source| Failure::System { what: format!("write {}", path.display()), source })
}

/// A turn of an episode as one JSON object.
fn readable_turn(turn: &Turn) -> serde_json::Value {
    json!({ "tokens": turn.completion.len(), "stop": turn.stop, "reward": turn.reward })
}

/// A branch of an episode as one JSON object.
fn readable_branch((sample, turns): (&Sample, &[Turn])) -> serde_json::Value {
    json!({
        "tokens": sample.token_ids().len(),
        "trained": sample.trained_tokens(),
        "turns": turns.len(),
        "versions": sample.versions(),
    })
}

/// A group as one JSON object, with the advantages in `rows`.
pub(super) fn readable(group: &Group, rows: &[RowTokens]) -> serde_json::Value {
    let trajectories: Vec<_> = group
        .trajectories
        .iter()
        .map(|trajectory| {
            let mut shown = json!({
                "index": trajectory.index,
                "completion": trajectory.text,
                "reward": trajectory.reward(),
                "advantage": advantage(group, trajectory, rows),
                "components": trajectory.score.components,
                "tokens": trajectory.completion_tokens(),
                "stop": trajectory.all_turns().last().map(|turn| turn.stop),
                "versions": trajectory.sample.versions(),
            });
            let several = trajectory.all_turns().nth(1).is_some();
            if several || trajectory.all_turns().any(|turn| turn.reward.is_some()) {
                shown["turns"] = trajectory.all_turns().map(readable_turn).collect();
            }
            if !trajectory.branches.is_empty() {
                shown["branches"] = trajectory.rows().map(readable_branch).collect();
            }
            if trajectory.baseline {
                shown["baseline"] = true.into();
            }
            if let Some(role) = &trajectory.role {
                shown["role"] = role.clone().into();
            }
            shown
        })
        .collect();
    json!({
        "group": group.id,
        "task": group.task.id,
        "prompt": prompt_text(&group.task),
        "answer": group.task.answer,
        "trajectories": trajectories,
    })
}

/// The mean advantage of a trajectory's tokens; 0 if it has a reward and no gradient, `None` if it was not trained on.
fn advantage(group: &Group, trajectory: &Trajectory, rows: &[RowTokens]) -> Option<f64> {
    let own = rows.iter().filter(|row| (row.group, row.index) == (group.id, trajectory.index));
    let (mut sum, mut count) = (0.0, 0);
    for advantage in own.flat_map(|row| &row.advantages) {
        sum += advantage;
        count += 1;
    }
    match count {
        0 => (trajectory.reward().is_some() && !trajectory.baseline).then_some(0.0),
        _ => Some(sum / f64::from(count)),
    }
}
