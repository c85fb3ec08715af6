//! The buffer as its users see it: one suite for every store, the journal over restarts, and under kill -9.

mod conformance;
mod crash;
mod formats;
mod http;
mod journal;
mod rewind;
mod served;

use std::time::Duration;

use buffer::{AdmitRequest, BufferConfig, BufferError, Consumer, Finalized, Lease, LeaseRequest, Producer};
use trajectory::{
    Component, Group, GroupId, PolicyVersion, Prompt, Sample, SampleStreams, Score, StopReason, Task, TaskId,
    Trajectory, Turn, VersionRun,
};

/// For what must happen: far longer than it takes.
const SOON: Duration = Duration::from_secs(30);
/// For what must not happen by itself.
const NOW: Duration = Duration::ZERO;

/// Who trains.
const TRAINER: &str = "trainer";

fn v(version: u64) -> PolicyVersion {
    PolicyVersion(version)
}

fn config(batch_groups: usize, max_staleness: u64) -> BufferConfig {
    BufferConfig::new(batch_groups, max_staleness)
}

/// A group with a bit of everything.
fn group(id: GroupId, served: PolicyVersion) -> Group {
    let sample = Sample::new(SampleStreams {
        token_ids: vec![7, 70_000, u32::try_from(id.0 & 0xffff_ffff).unwrap()],
        loss_mask: vec![false, true, true],
        behavior_logprobs: vec![0.0, -0.1, -12.5],
        versions: [1, 2].map(|len| VersionRun { version: served, len }).to_vec(),
        kept: None,
        temperature: 0.7,
    })
    .unwrap();
    let columns =
        [("level".to_owned(), 3.into()), ("source".to_owned(), "here".into())].into_iter().collect();
    let failed = Component {
        name: "judge".to_owned(),
        value: None,
        error: Some("timed out".to_owned()),
        ..Component::default()
    };
    let trajectory = |index| Trajectory {
        index,
        sample: sample.clone(),
        turns: vec![Turn { completion: 1..3, stop: StopReason::Length, reward: Some(-0.5) }],
        text: format!("text {}", id.0),
        score: Score {
            total: Some(1.0 / f64::from(index + 3)),
            components: vec![failed.clone()],
            correct: [None, Some(true), Some(false)][index as usize % 3],
        },
        baseline: false,
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

/// Slots for a sampler that ends with the buffer.
fn admit(buffer: &impl Producer, served: PolicyVersion, limit: usize) -> Vec<GroupId> {
    buffer.admit(AdmitRequest { served, limit, hold: None, holder: None }, NOW).unwrap()
}

/// Admits, claims and finalizes `count` groups as a sampler that serves `served`.
fn generate(buffer: &impl Producer, served: PolicyVersion, count: usize) -> Vec<GroupId> {
    let ids = admit(buffer, served, count);
    assert_eq!(ids.len(), count, "not enough slots");
    for id in &ids {
        buffer.claim(*id, served).unwrap();
        assert_eq!(buffer.finalize(group(*id, served)).unwrap(), Finalized::Accepted);
    }
    ids
}

fn lease(buffer: &impl Consumer, step: u64, wait: Duration) -> Result<Lease, BufferError> {
    buffer.lease(&LeaseRequest::step(TRAINER, v(step)), wait)
}

/// The ids of the batch for `step`.
fn leased(buffer: &impl Consumer, step: u64) -> Vec<u64> {
    lease(buffer, step, NOW).unwrap().groups.iter().map(|group| group.id.0).collect()
}
