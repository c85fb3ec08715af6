//! The encoding of a group, and its row. Invariant: an encoded group decodes to an equal one. The id is not encoded,
//! since a group with an idempotency key has none before it is accepted.

use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};
use trajectory::{
    Branch, Component, Group, GroupId, KeptTokens, PolicyVersion, Sample, SampleStreams, Score, Task,
    TokenExperts, Trajectory, Turn, VersionRun,
};

use crate::BufferError;
use crate::ledger::{Arrival, ArrivalIdentity, GroupRow};

/// Maximum length of an idempotency key, bytes.
pub(crate) const MAX_KEY: usize = 128;

/// A group that is to be stored.
#[derive(Clone, Debug)]
pub(crate) struct IncomingGroup {
    /// Its idempotency key; `None`: it has the id of its admission.
    key: Option<String>,
    group: Group,
    /// Its sender, for people; `None`: this process.
    sender: Option<String>,
}

impl IncomingGroup {
    /// A group with the id of its admission.
    pub(crate) fn admitted(group: Group) -> Self {
        Self { key: None, group, sender: None }
    }

    /// A group under an idempotency key.
    pub(crate) fn keyed(key: impl Into<String>, group: Group) -> Self {
        Self { key: Some(key.into()), group, sender: None }
    }

    pub(crate) fn sent_by(self, sender: String) -> Self {
        Self { sender: Some(sender), ..self }
    }
}

/// A validated and encoded group.
#[derive(Debug)]
pub(crate) struct PreparedGroup {
    identity: ArrivalIdentity,
    pub(crate) group: Group,
    oldest: PolicyVersion,
    newest: PolicyVersion,
    contents: Vec<u128>,
    sender: Option<String>,
    pub(crate) payload: Vec<u8>,
}

/// The encoded form. Streams are little-endian bytes, copied as a whole: a group has thousands of numbers.
#[derive(Serialize)]
struct EncodedGroup<'a> {
    task: &'a Task,
    trajectories: Vec<EncodedTrajectory<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sender: Option<&'a str>,
}

#[derive(Serialize)]
struct EncodedTrajectory<'a> {
    index: u32,
    token_ids: ByteField<'a>,
    loss_mask: ByteField<'a>,
    behavior_logprobs: ByteField<'a>,
    versions: &'a [VersionRun],
    kept: Option<&'a KeptTokens>,
    #[serde(skip_serializing_if = "Option::is_none")]
    experts: Option<EncodedExperts>,
    temperature: f32,
    turns: &'a [Turn],
    text: &'a str,
    score: &'a Score,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    baseline: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    branches: Vec<EncodedBranch<'a>>,
}

#[derive(Serialize)]
struct EncodedBranch<'a> {
    token_ids: ByteField<'a>,
    loss_mask: ByteField<'a>,
    behavior_logprobs: ByteField<'a>,
    versions: &'a [VersionRun],
    kept: Option<&'a KeptTokens>,
    #[serde(skip_serializing_if = "Option::is_none")]
    experts: Option<EncodedExperts>,
    temperature: f32,
    turns: &'a [Turn],
}

/// The same, borrowed from the bytes.
#[derive(Deserialize)]
struct DecodedGroup<'a> {
    task: Task,
    #[serde(borrow)]
    trajectories: Vec<DecodedTrajectory<'a>>,
}

#[derive(Deserialize)]
struct DecodedTrajectory<'a> {
    index: u32,
    token_ids: &'a [u8],
    loss_mask: &'a [u8],
    behavior_logprobs: &'a [u8],
    versions: Vec<VersionRun>,
    kept: Option<KeptTokens>,
    /// Omitted if they were not recorded, and by programs that do not know them.
    #[serde(default, borrow)]
    experts: Option<DecodedExperts<'a>>,
    temperature: f32,
    turns: Vec<Turn>,
    text: String,
    score: Score,
    /// Omitted if false, and by programs without baselines.
    #[serde(default)]
    baseline: bool,
    /// Omitted without roles.
    #[serde(default)]
    role: Option<String>,
    /// Omitted without branches, and by programs that do not know them.
    #[serde(default, borrow)]
    branches: Vec<DecodedBranch<'a>>,
}

#[derive(Deserialize)]
struct DecodedBranch<'a> {
    token_ids: &'a [u8],
    loss_mask: &'a [u8],
    behavior_logprobs: &'a [u8],
    versions: Vec<VersionRun>,
    kept: Option<KeptTokens>,
    /// Omitted if they were not recorded, and by programs that do not know them.
    #[serde(default, borrow)]
    experts: Option<DecodedExperts<'a>>,
    temperature: f32,
    turns: Vec<Turn>,
}

/// The experts of tokens: a byte each, or two where a number does not fit.
#[derive(Serialize)]
struct EncodedExperts {
    per_token: u32,
    bytes_each: usize,
    #[serde(serialize_with = "as_bytes")]
    ids: Vec<u8>,
}

#[derive(Deserialize)]
struct DecodedExperts<'a> {
    per_token: u32,
    bytes_each: usize,
    ids: &'a [u8],
}

fn as_bytes<S: Serializer>(ids: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_bytes(ids)
}

/// A slice encoded as one byte string.
struct ByteField<'a>(&'a [u8]);

impl Serialize for ByteField<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0)
    }
}

impl PreparedGroup {
    /// # Errors
    /// A group without trajectories; an unusable idempotency key.
    pub(crate) fn new(incoming: IncomingGroup, dedup: bool) -> Result<Self, BufferError> {
        let IncomingGroup { key, group, sender } = incoming;
        let identity = match key {
            None => ArrivalIdentity::Admitted(group.id),
            Some(key) if key.is_empty() || key.len() > MAX_KEY => {
                return Err(BufferError::Key { length: key.len(), limit: MAX_KEY });
            }
            Some(key) => ArrivalIdentity::Keyed(digest(&[key.as_bytes()])),
        };
        let oldest = group.oldest_version().ok_or(BufferError::EmptyGroup { group: group.id })?;
        let runs = group.trajectories.iter().flat_map(Trajectory::samples).flat_map(Sample::versions);
        let newest = runs.map(|run| run.version).max().unwrap_or(oldest);
        let contents = if dedup { contents(&group) } else { Vec::new() };
        let payload = encode(&group, sender.as_deref())?;
        Ok(Self { identity, group, oldest, newest, contents, sender, payload })
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

    /// The group to write: under `id`, without the trajectories that `keep` excludes.
    pub(crate) fn finish(mut self, id: GroupId, keep: &[bool]) -> Result<FinishedGroup, BufferError> {
        self.group.id = id;
        if keep.contains(&false) {
            retain(&mut self.group.trajectories, keep);
            retain(&mut self.contents, keep);
            self.payload = encode(&self.group, self.sender.as_deref())?;
        }
        let Self { identity, group, oldest, contents, sender, payload, .. } = self;
        let rewards: Vec<f64> = group.rewards().collect();
        let samples = group.trajectories.iter().flat_map(Trajectory::samples);
        let tokens = samples.map(|sample| sample.token_ids().len() as u64);
        let row = GroupRow {
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
            ArrivalIdentity::Keyed(key) => Some(key),
            ArrivalIdentity::Admitted(_) => None,
        };
        Ok(FinishedGroup { row, key, payload, group, sender })
    }
}

/// A group ready to be written.
#[derive(Debug)]
pub(crate) struct FinishedGroup {
    pub(crate) row: GroupRow,
    pub(crate) key: Option<u128>,
    pub(crate) payload: Vec<u8>,
    pub(crate) group: Group,
    pub(crate) sender: Option<String>,
}

/// The payload of a group as [`decode`] reads it, without its id and its sender.
///
/// # Errors
/// What cannot be encoded.
pub fn encode_group(group: &Group) -> Result<Vec<u8>, BufferError> {
    encode(group, None)
}

/// MessagePack with named fields, so a later program can add some.
fn encode(group: &Group, sender: Option<&str>) -> Result<Vec<u8>, BufferError> {
    let Group { task, trajectories, id } = group;
    let trajectories = trajectories.iter().map(EncodedTrajectory::from).collect();
    rmp_serde::to_vec_named(&EncodedGroup { task, trajectories, sender })
        .map_err(|error| BufferError::NotEncodable { group: *id, reason: error.to_string() })
}

/// Decodes the payload of [`AppendGroup`](crate::store::AppendGroup); the id is not part of it.
///
/// # Errors
/// What is wrong with the bytes.
pub fn decode(id: GroupId, payload: &[u8]) -> Result<Group, String> {
    let decoded: DecodedGroup<'_> = rmp_serde::from_slice(payload).map_err(|error| error.to_string())?;
    let trajectories = decoded.trajectories.into_iter().map(Trajectory::try_from);
    Ok(Group { id, task: decoded.task, trajectories: trajectories.collect::<Result<_, _>>()? })
}

/// The sender in the payload of [`AppendGroup`](crate::store::AppendGroup), if it is recorded.
#[must_use]
pub fn sender(payload: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct SenderField {
        #[serde(default)]
        sender: Option<String>,
    }
    rmp_serde::from_slice::<SenderField>(payload).ok()?.sender
}

/// Approximate bytes of a group in memory: columns and details take many times their encoded size.
pub(crate) fn weight(group: &Group) -> u64 {
    const STRUCT: usize = 512;
    let map =
        |map: &Map<String, Value>| map.iter().map(|(name, value)| name.len() + value_weight(value)).sum();
    let component = |component: &Component| STRUCT + map(&component.details);
    let trajectory = |t: &Trajectory| {
        let row = |sample: &Sample| {
            let kept = sample.kept().map_or(0, |kept| kept.ids.len() + kept.offsets.len());
            let experts = sample.experts().map_or(0, |experts| experts.ids.len());
            STRUCT + 4 * (3 * sample.token_ids().len() + kept) + 2 * experts
        };
        let components: usize = t.score.components.iter().map(component).sum();
        t.samples().map(row).sum::<usize>() + t.text.len() + components
    };
    let columns: usize = map(&group.task.columns);
    (STRUCT + columns + group.trajectories.iter().map(trajectory).sum::<usize>()) as u64
}

fn value_weight(value: &Value) -> usize {
    const EACH: usize = 2 * size_of::<Value>();
    EACH + match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        Value::String(text) => text.len(),
        Value::Array(items) => EACH + items.iter().map(value_weight).sum::<usize>(),
        // The table and its first entries.
        Value::Object(map) => {
            4 * EACH + map.iter().map(|(name, value)| name.len() + value_weight(value)).sum::<usize>()
        }
    }
}

impl<'a> From<&'a Trajectory> for EncodedTrajectory<'a> {
    fn from(trajectory: &'a Trajectory) -> Self {
        let Trajectory { index, sample, turns, branches, text, score, baseline, role } = trajectory;
        Self {
            index: *index,
            token_ids: ByteField(bytemuck::cast_slice(sample.token_ids())),
            loss_mask: ByteField(bytemuck::cast_slice(sample.loss_mask())),
            behavior_logprobs: ByteField(bytemuck::cast_slice(sample.behavior_logprobs())),
            versions: sample.versions(),
            kept: sample.kept(),
            experts: sample.experts().map(EncodedExperts::from),
            temperature: sample.temperature(),
            turns,
            text,
            score,
            baseline: *baseline,
            role: role.as_deref(),
            branches: branches.iter().map(EncodedBranch::from).collect(),
        }
    }
}

impl<'a> From<&'a Branch> for EncodedBranch<'a> {
    fn from(Branch { sample, turns }: &'a Branch) -> Self {
        Self {
            token_ids: ByteField(bytemuck::cast_slice(sample.token_ids())),
            loss_mask: ByteField(bytemuck::cast_slice(sample.loss_mask())),
            behavior_logprobs: ByteField(bytemuck::cast_slice(sample.behavior_logprobs())),
            versions: sample.versions(),
            kept: sample.kept(),
            experts: sample.experts().map(EncodedExperts::from),
            temperature: sample.temperature(),
            turns,
        }
    }
}

impl From<&TokenExperts> for EncodedExperts {
    fn from(TokenExperts { per_token, ids }: &TokenExperts) -> Self {
        let narrow: Result<Vec<u8>, _> = ids.iter().map(|id| u8::try_from(*id)).collect();
        let (bytes_each, ids) = match narrow {
            Ok(ids) => (1, ids),
            Err(_) => (2, ids.iter().flat_map(|id| id.to_le_bytes()).collect()),
        };
        Self { per_token: *per_token, bytes_each, ids }
    }
}

impl TryFrom<DecodedExperts<'_>> for TokenExperts {
    type Error = String;

    fn try_from(DecodedExperts { per_token, bytes_each, ids }: DecodedExperts<'_>) -> Result<Self, String> {
        let ids = match (bytes_each, ids.as_chunks::<2>()) {
            (1, _) => ids.iter().map(|id| u16::from(*id)).collect(),
            (2, (pairs, [])) => pairs.iter().map(|pair| u16::from_le_bytes(*pair)).collect(),
            _ => return Err(format!("{} bytes do not hold experts of {bytes_each} bytes", ids.len())),
        };
        Ok(Self { per_token, ids })
    }
}

impl TryFrom<DecodedTrajectory<'_>> for Trajectory {
    type Error = String;

    fn try_from(decoded: DecodedTrajectory<'_>) -> Result<Self, String> {
        let DecodedTrajectory { token_ids, loss_mask, behavior_logprobs, versions, kept, .. } = decoded;
        let DecodedTrajectory { experts, temperature, turns, index, text, score, baseline, role, .. } =
            decoded;
        let first = DecodedBranch {
            token_ids,
            loss_mask,
            behavior_logprobs,
            versions,
            kept,
            experts,
            temperature,
            turns,
        };
        let Branch { sample, turns } = Branch::try_from(first)?;
        let branches = decoded.branches.into_iter().map(Branch::try_from).collect::<Result<_, _>>()?;
        Ok(Self { index, sample, turns, branches, text, score, baseline, role })
    }
}

impl TryFrom<DecodedBranch<'_>> for Branch {
    type Error = String;

    fn try_from(decoded: DecodedBranch<'_>) -> Result<Self, String> {
        let streams = SampleStreams {
            token_ids: numbers(decoded.token_ids, u32::from_le_bytes)?,
            loss_mask: decoded.loss_mask.iter().map(|byte| *byte != 0).collect(),
            behavior_logprobs: numbers(decoded.behavior_logprobs, f32::from_le_bytes)?,
            versions: decoded.versions,
            kept: decoded.kept,
            experts: decoded.experts.map(TokenExperts::try_from).transpose()?,
            temperature: decoded.temperature,
        };
        let sample = Sample::new(streams).map_err(|error| error.to_string())?;
        Ok(Self { sample, turns: decoded.turns })
    }
}

fn numbers<T>(bytes: &[u8], number: impl Fn([u8; 4]) -> T) -> Result<Vec<T>, String> {
    let (whole, rest) = bytes.as_chunks::<4>();
    if rest.is_empty() {
        Ok(whole.iter().map(|bytes| number(*bytes)).collect())
    } else {
        Err(format!("a stream of {} bytes does not hold whole numbers", bytes.len()))
    }
}

/// A digest for every trajectory: equal for equal tokens of the same task, and different for a baseline and a trained
/// trajectory, for different roles, and for different branches.
fn contents(group: &Group) -> Vec<u128> {
    let task = group.task.id.0.to_le_bytes();
    let bytes = |sample: &Sample| sample.token_ids().iter().flat_map(|token| token.to_le_bytes()).collect();
    let first = |trajectory: &Trajectory| {
        let tokens: Vec<u8> = bytes(&trajectory.sample);
        // One byte more than whole tokens, so no other tokens have the same bytes.
        let baseline: &[u8] = if trajectory.baseline { &[1] } else { &[] };
        match &trajectory.role {
            // Longer than a baseline's, and so no other trajectory's bytes.
            Some(role) => digest(&[&task, &tokens, baseline, &[2, 0], role.as_bytes()]),
            None => digest(&[&task, &tokens, baseline]),
        }
    };
    let with = |before: u128, branch: &Branch| {
        let tokens: Vec<u8> = bytes(&branch.sample);
        digest(&[b"branch", &before.to_le_bytes(), &tokens])
    };
    let of = |trajectory: &Trajectory| trajectory.branches.iter().fold(first(trajectory), with);
    group.trajectories.iter().map(of).collect()
}

/// Half of a BLAKE3 digest, 128 bits: collisions do not occur in practice.
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

#[cfg(test)]
mod tests {
    use trajectory::{Prompt, TaskId};

    use super::*;

    /// Experts with numbers of a byte and of two.
    #[test]
    fn experts_are_decoded_as_they_were_encoded() {
        let trajectory = |index: u32, ids: &[u16]| Trajectory {
            index,
            sample: Sample::new(SampleStreams {
                token_ids: vec![1, 2, 3],
                loss_mask: vec![false, true, true],
                behavior_logprobs: vec![0.0, -1.0, -0.5],
                versions: vec![VersionRun { version: PolicyVersion(0), len: 3 }],
                kept: None,
                experts: Some(TokenExperts { per_token: 2, ids: ids.to_vec() }),
                temperature: 1.0,
            })
            .unwrap(),
            turns: Vec::new(),
            branches: Vec::new(),
            text: String::new(),
            score: Score::default(),
            baseline: false,
            role: None,
        };
        let task =
            Task { id: TaskId(0), prompt: Prompt::Text("?".to_owned()), answer: None, columns: Map::new() };
        let trajectories = vec![trajectory(0, &[0, 255, 3, 4]), trajectory(1, &[0, 1, 2, 256])];
        let mut group = Group { id: GroupId(7), task, trajectories };
        let Trajectory { sample, .. } = group.trajectories[1].clone();
        group.trajectories[0].branches.push(Branch { sample, turns: Vec::new() });
        let payload = encode(&group, None).unwrap();
        assert_eq!(decode(GroupId(7), &payload).unwrap(), group);
        let odd = DecodedExperts { per_token: 1, bytes_each: 2, ids: &[1, 2, 3] };
        assert!(TokenExperts::try_from(odd).unwrap_err().contains("3 bytes"));
    }
}
