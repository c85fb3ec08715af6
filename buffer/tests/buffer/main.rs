//! The buffer as its users see it: one suite for every store, the journal over restarts, and under kill -9.

mod conformance;
mod crash;
mod journal;

use std::time::Duration;

use buffer::{BufferConfig, Consumer, Finalized, OnStale, Producer};
use trajectory::{
    Component, Group, GroupId, PolicyVersion, Prompt, Sample, SampleStreams, Score, StopReason, Task, TaskId,
    Trajectory, Turn, VersionRun,
};

/// For what must happen: far longer than it takes.
const SOON: Duration = Duration::from_secs(30);
/// For what must not happen by itself.
const NOW: Duration = Duration::ZERO;

fn v(version: u64) -> PolicyVersion {
    PolicyVersion(version)
}

fn config(batch_groups: usize, max_staleness: u64) -> BufferConfig {
    BufferConfig { batch_groups, max_staleness, on_stale: OnStale::Wait }
}

/// A group with a bit of everything; `oldest` samples its first trained token.
fn group(id: GroupId, oldest: PolicyVersion) -> Group {
    let runs = [(oldest.next(), 1), (oldest, 1), (oldest.next(), 1)];
    let sample = Sample::new(SampleStreams {
        token_ids: vec![7, 70_000, u32::try_from(id.0).unwrap()],
        loss_mask: vec![false, true, true],
        behavior_logprobs: vec![0.0, -0.1, -12.5],
        versions: runs.map(|(version, len)| VersionRun { version, len }).to_vec(),
        kept: None,
        temperature: 0.7,
    })
    .unwrap();
    let columns =
        [("level".to_owned(), 3.into()), ("source".to_owned(), "here".into())].into_iter().collect();
    let failed = Component { name: "judge".to_owned(), value: None, error: Some("timed out".to_owned()) };
    let trajectory = |index| Trajectory {
        index,
        sample: sample.clone(),
        turns: vec![Turn { completion: 1..3, stop: StopReason::Length }],
        text: format!("text {}", id.0),
        score: Score { total: Some(1.0 / f64::from(index + 3)), components: vec![failed.clone()] },
    };
    Group {
        id,
        task: Task {
            id: TaskId(id.0),
            prompt: Prompt::Text("?".to_owned()),
            answer: Some("!".to_owned()),
            columns,
        },
        trajectories: vec![trajectory(0), trajectory(1)],
    }
}

/// Admits, claims and finalizes `count` groups as a sampler that serves `served`.
fn generate(buffer: &impl Producer, served: PolicyVersion, count: usize) -> Vec<GroupId> {
    let ids = buffer.admit(served, count, NOW).unwrap();
    assert_eq!(ids.len(), count, "not enough slots");
    for id in &ids {
        buffer.claim(*id, served).unwrap();
        assert_eq!(buffer.finalize(group(*id, served)).unwrap(), Finalized::Accepted);
    }
    ids
}

fn leased(buffer: &impl Consumer, step: u64) -> Vec<u64> {
    buffer.lease(v(step), NOW).unwrap().groups.iter().map(|group| group.id.0).collect()
}
