//! A group as bytes, and what the buffer knows of it without them. Invariant: what is encoded decodes to the same group; the
//! id is not part of it, since a group with a key has none before it is accepted.

use serde::{Deserialize, Serialize};
use trajectory::{Group, GroupId, PolicyVersion, Task, Trajectory};

use crate::BufferError;
use crate::ledger::{Arrival, Identity, Row};

/// Longest key, bytes.
pub(crate) const MAX_KEY: usize = 128;

/// A group on its way into the buffer.
#[derive(Clone, Debug)]
pub(crate) enum Incoming {
    /// Under the id of its admission.
    Admitted(Group),
    /// Under a key of its sender's.
    Keyed(String, Group),
}

/// A group with all that is known of it.
#[derive(Debug)]
pub(crate) struct Prepared {
    identity: Identity,
    pub(crate) group: Group,
    oldest: PolicyVersion,
    newest: PolicyVersion,
    contents: Vec<u128>,
    pub(crate) payload: Vec<u8>,
}

#[derive(Serialize)]
struct Encoded<'a> {
    task: &'a Task,
    trajectories: &'a [Trajectory],
}

#[derive(Deserialize)]
struct Decoded {
    task: Task,
    trajectories: Vec<Trajectory>,
}

impl Prepared {
    /// # Errors
    /// A group without trajectories; an unusable key.
    pub(crate) fn new(incoming: Incoming, dedup: bool) -> Result<Self, BufferError> {
        let (identity, group) = match incoming {
            Incoming::Admitted(group) => (Identity::Admitted(group.id), group),
            Incoming::Keyed(key, group) => {
                if key.is_empty() || key.len() > MAX_KEY {
                    return Err(BufferError::Key { length: key.len(), limit: MAX_KEY });
                }
                (Identity::Keyed(digest(&[key.as_bytes()])), group)
            }
        };
        let oldest = group.oldest_version().ok_or(BufferError::EmptyGroup { group: group.id })?;
        let runs = group.trajectories.iter().flat_map(|trajectory| trajectory.sample.versions());
        let newest = runs.map(|run| run.version).max().unwrap_or(oldest);
        let contents = if dedup { contents(&group) } else { Vec::new() };
        let payload = encode(&group)?;
        Ok(Self { identity, group, oldest, newest, contents, payload })
    }

    pub(crate) fn arrival(&self) -> Arrival<'_> {
        Arrival {
            identity: self.identity,
            oldest: self.oldest,
            newest: self.newest,
            bytes: self.payload.len() as u64,
            contents: &self.contents,
        }
    }

    /// What is written of it: under `id`, without the trajectories that are not to be kept.
    pub(crate) fn finish(mut self, id: GroupId, keep: &[bool]) -> Result<Written, BufferError> {
        self.group.id = id;
        if keep.contains(&false) {
            retain(&mut self.group.trajectories, keep);
            retain(&mut self.contents, keep);
            self.payload = encode(&self.group)?;
        }
        let Self { identity, group, oldest, contents, payload, .. } = self;
        let rewards: Vec<f64> = group.rewards().collect();
        let tokens = group.trajectories.iter().map(|trajectory| trajectory.sample.token_ids().len() as u64);
        let row = Row {
            id,
            oldest,
            task: group.task.id,
            tokens: tokens.sum(),
            bytes: payload.len() as u64,
            reward: (!rewards.is_empty()).then(|| rewards.iter().sum::<f64>() / rewards.len() as f64),
            uses: 0,
            contents,
        };
        let key = match identity {
            Identity::Keyed(key) => Some(key),
            Identity::Admitted(_) => None,
        };
        Ok(Written { row, key, payload, group })
    }
}

/// A group as it is kept.
#[derive(Debug)]
pub(crate) struct Written {
    pub(crate) row: Row,
    pub(crate) key: Option<u128>,
    pub(crate) payload: Vec<u8>,
    pub(crate) group: Group,
}

/// MessagePack with named fields, so that a later program can add some.
fn encode(group: &Group) -> Result<Vec<u8>, BufferError> {
    let Group { task, trajectories, id } = group;
    rmp_serde::to_vec_named(&Encoded { task, trajectories })
        .map_err(|error| BufferError::NotEncodable { group: *id, reason: error.to_string() })
}

/// The group that [`Prepared`] encoded.
pub(crate) fn decode(id: GroupId, payload: &[u8]) -> Result<Group, rmp_serde::decode::Error> {
    let Decoded { task, trajectories } = rmp_serde::from_slice(payload)?;
    Ok(Group { id, task, trajectories })
}

/// One for every trajectory: equal for equal tokens of the same task.
fn contents(group: &Group) -> Vec<u128> {
    let task = group.task.id.0.to_le_bytes();
    let of = |trajectory: &Trajectory| {
        let tokens: Vec<u8> =
            trajectory.sample.token_ids().iter().flat_map(|token| token.to_le_bytes()).collect();
        digest(&[&task, &tokens])
    };
    group.trajectories.iter().map(of).collect()
}

/// Half of a BLAKE3 digest: no two keys or contents ever share one.
fn digest(parts: &[&[u8]]) -> u128 {
    let mut hasher = blake3::Hasher::new();
    parts.iter().for_each(|part| {
        hasher.update(part);
    });
    let mut half = [0; 16];
    hasher.finalize_xof().fill(&mut half);
    u128::from_le_bytes(half)
}

fn retain<T>(items: &mut Vec<T>, keep: &[bool]) {
    let mut keep = keep.iter();
    items.retain(|_| *keep.next().unwrap_or(&true));
}
