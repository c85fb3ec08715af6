//! Groups and calls that the cases share, for other tests of a buffer too. Invariant: a call that fails panics.

use std::time::Duration;

use trajectory::{
    Component, Group, GroupId, PolicyVersion, Prompt, Sample, SampleStreams, Score, StopReason, Task, TaskId,
    Trajectory, Turn, VersionRun,
};

use super::BothSides;
use crate::payload::{FinishedGroup, IncomingGroup, PreparedGroup};
use crate::store::{AppendGroup, WriteCompletion};
use crate::{AdmitRequest, BufferConfig, BufferError, Consumer, Finalized, Lease, LeaseRequest, Producer};

/// A deadline for what must happen: far longer than it takes.
pub const SOON: Duration = Duration::from_secs(30);
/// No wait: for what must have happened already, or must not happen.
pub const NOW: Duration = Duration::ZERO;
/// A hold that expires soon, and that a server also accepts.
pub(super) const HOLD: Duration = Duration::from_millis(100);

/// Name of the consumer.
pub const TRAINER: &str = "trainer";

/// A policy version.
#[must_use]
pub fn v(version: u64) -> PolicyVersion {
    PolicyVersion(version)
}

/// The configuration of `batch_groups` and `max_staleness`, with defaults.
#[must_use]
pub fn config(batch_groups: usize, max_staleness: u64) -> BufferConfig {
    BufferConfig::new(batch_groups, max_staleness)
}

/// A group with two trajectories that use every field, sampled from version `served`.
#[must_use]
pub fn group(id: GroupId, served: PolicyVersion) -> Group {
    let sample = Sample::new(SampleStreams {
        token_ids: vec![7, 70_000, u32::try_from(id.0 & 0xffff_ffff).unwrap()],
        loss_mask: vec![false, true, true],
        behavior_logprobs: vec![0.0, -0.1, -12.5],
        versions: [1, 2].map(|len| VersionRun { version: served, len }).to_vec(),
        kept: None,
        experts: None,
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
        turns: vec![Turn {
            completion: 1..3,
            stop: StopReason::Length,
            reward: Some(-0.5),
            prefill: Vec::new(),
        }],
        text: format!("text {}", id.0),
        score: Score {
            total: Some(1.0 / f64::from(index + 3)),
            components: vec![failed.clone()],
            correct: [None, Some(true), Some(false)][index as usize % 3],
        },
        branches: Vec::new(),
        baseline: false,
        role: None,
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

/// A group as a buffer hands it to a store.
#[must_use]
pub fn append(group: Group, done: WriteCompletion) -> AppendGroup {
    let id = group.id;
    let prepared = PreparedGroup::new(IncomingGroup::admitted(group), false).unwrap();
    let FinishedGroup { row, key, payload, group, sender } = prepared.finish(id, &[]).unwrap();
    AppendGroup { row, key, payload, group: group.into(), sender, done }
}

/// Admits up to `limit` groups for a sampler that serves `served`, without waiting.
pub fn admit(buffer: &(impl Producer + ?Sized), served: PolicyVersion, limit: usize) -> Vec<GroupId> {
    buffer.admit(AdmitRequest { served, limit, hold: None, holder: None }, NOW).unwrap()
}

/// Admits, claims and finalizes `count` groups as a sampler that serves `served`.
pub fn generate(buffer: &(impl Producer + ?Sized), served: PolicyVersion, count: usize) -> Vec<GroupId> {
    let ids = admit(buffer, served, count);
    assert_eq!(ids.len(), count, "not enough slots");
    for id in &ids {
        buffer.claim(*id, served).unwrap();
        assert_eq!(buffer.finalize(group(*id, served)).unwrap(), Finalized::Accepted);
    }
    ids
}

/// Leases the batch of `step`.
pub fn lease(buffer: &(impl Consumer + ?Sized), step: u64, wait: Duration) -> Result<Lease, BufferError> {
    buffer.lease(&LeaseRequest::step(TRAINER, v(step)), wait)
}

/// Leases the batch of `step`; its ids.
pub fn leased(buffer: &(impl Consumer + ?Sized), step: u64) -> Vec<u64> {
    lease(buffer, step, NOW).unwrap().groups.iter().map(|group| group.id.0).collect()
}

/// Waits until a hold expires: a waiting lease call ends holds. This one asks for more groups than there are.
pub(super) fn wait_for_expiry(buffer: &dyn BothSides) {
    let before = buffer.stats().unwrap().expired;
    let nothing = LeaseRequest {
        groups: Some(usize::MAX),
        at_least: Some(usize::MAX),
        step: None,
        ..LeaseRequest::step("observer", v(0))
    };
    while buffer.stats().unwrap().expired == before {
        let error = buffer.lease(&nothing, HOLD).unwrap_err();
        assert!(matches!(error, BufferError::LeaseTimeout { .. }), "{error}");
    }
}
