//! A group on the wire, and its way from and to the group of `trajectory`.
//!
//! Invariant: lossless in both directions. A [`Submission`] that becomes a group keeps every trainable stream bit for bit,
//! and what [`GroupView`] shows becomes the same group again. Streams move, they are never copied.

use std::fmt;

use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde::ser::{SerializeStruct, Serializer};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use trajectory::{
    Component, Group, GroupId, KeptTokens, Message, PolicyVersion, Prompt, Sample, SampleError,
    SampleStreams, Score, StopReason, Task, TaskId, Trajectory, Turn, VersionRun,
};
use utoipa::ToSchema;

use super::free::FreeFormLimits;
use super::schema;
use crate::http::problem::{Evidence, ProblemCode};

/// Longest key of a group, bytes.
const MAX_KEY: usize = 128;

/// A group that is sent to the buffer: either one that was admitted, with its `id`, or one of the client's own, with a
/// `key` under which it is stored once.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Submission {
    /// The id that an admission gave out.
    id: Option<u64>,
    /// A name of the client's own, 1 to 128 bytes of printable ASCII.
    #[schema(min_length = 1, max_length = 128)]
    key: Option<String>,
    /// What was asked.
    task: Option<TaskBody>,
    /// The episodes, ordered by index.
    #[schema(min_items = 1)]
    trajectories: Vec<TrajectoryBody>,
}

/// One dataset row.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = TaskRequest)]
pub(super) struct TaskBody {
    /// Which row of the dataset.
    #[serde(default)]
    id: u64,
    /// Text, or the messages of a conversation.
    #[schema(schema_with = schema::prompt)]
    prompt: PromptBody,
    /// The reference answer.
    answer: Option<String>,
    /// Every column of the row.
    #[serde(default)]
    #[schema(value_type = Object)]
    columns: Map<String, Value>,
}

/// One message of a conversation.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Message)]
pub(super) struct MessageBody {
    /// `system`, `user` or `assistant`.
    role: String,
    /// Its text.
    content: String,
}

/// One episode. The three streams have one entry per token, prompt and completion.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = TrajectoryRequest)]
pub(super) struct TrajectoryBody {
    /// Prompt and completion.
    token_ids: Vec<u32>,
    /// True where the policy chose the token and is trained on it; never for the first.
    loss_mask: Vec<bool>,
    /// Nats, under the distribution that really sampled the token; 0 where the mask is false.
    behavior_logprobs: Vec<f32>,
    /// Which policy version sampled which tokens, as runs over all of them.
    versions: Option<Vec<RunBody>>,
    /// The version that sampled all tokens, instead of `versions`.
    policy_version: Option<u64>,
    /// The temperature of sampling, above 0.
    #[serde(default = "one")]
    temperature: f32,
    /// What truncation (top-k, top-p) left to choose from.
    kept: Option<KeptBody>,
    /// Which of the episodes this is, ascending from 0 in a group; its position if left out.
    index: Option<u32>,
    /// The model calls, in order.
    #[serde(default)]
    turns: Vec<TurnBody>,
    /// The last completion as text, for people and rewards.
    #[serde(default)]
    text: String,
    /// Weighted sum of the rewards; without it the trajectory is not trained on.
    reward: Option<f64>,
    /// Each reward by itself.
    #[serde(default)]
    rewards: Vec<RewardBody>,
    /// Whether the answer is correct, whatever its reward; algorithms that ask need it.
    correct: Option<bool>,
    /// Whether it was decoded greedily only to be compared with: its loss mask is false everywhere.
    #[serde(default)]
    baseline: bool,
}

/// Consecutive tokens of one policy version.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = VersionRun)]
struct RunBody {
    /// The version.
    version: u64,
    /// Number of tokens.
    #[schema(minimum = 1)]
    len: u32,
}

/// For every token of the loss mask, in order, the ids that it was chosen from.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = KeptTokens)]
struct KeptBody {
    /// Where each set starts in `ids`, and at last the length of `ids`.
    offsets: Vec<u32>,
    /// Token ids, ascending within a set.
    ids: Vec<u32>,
}

/// One model call.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Turn)]
struct TurnBody {
    /// First token of the completion.
    start: usize,
    /// One past its last token, the stop token included.
    end: usize,
    /// Why it ended.
    #[schema(schema_with = schema::stop)]
    stop: StopReason,
    /// What this call by itself is worth, for rewards of the process; not part of the trajectory's reward.
    reward: Option<f64>,
}

/// The verdict of one reward function.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Reward)]
struct RewardBody {
    /// Its name.
    name: String,
    /// What the trajectory is worth to it; none if it failed.
    value: Option<f64>,
    /// Why it failed.
    error: Option<String>,
    /// What else it said, by name.
    #[serde(default)]
    #[schema(value_type = Object)]
    details: Map<String, Value>,
}

/// What a group may have, whoever sends it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ItemLimits {
    /// Trajectories in a group.
    pub(crate) trajectories: usize,
    /// Tokens in a trajectory.
    pub(crate) tokens: usize,
    /// Token ids are below; none: any id.
    pub(crate) vocabulary: Option<u32>,
    /// Values in columns and details together.
    pub(crate) values: usize,
    /// Bytes of the name of a column, a detail or a reward.
    pub(crate) name_bytes: usize,
    /// Lists and objects within each other.
    pub(crate) depth: usize,
    /// Whether every trajectory with a reward has to say whether it is correct.
    pub(crate) correct: bool,
}

/// Under which name a group is stored.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SubmissionIdentity {
    Admitted(GroupId),
    Key(String),
}

/// Why one group of many is not stored.
#[derive(Debug)]
pub(crate) struct Rejection {
    pub(crate) code: ProblemCode,
    pub(crate) detail: String,
    pub(crate) evidence: Evidence,
}

pub(super) type ValidationResult<T> = Result<T, Rejection>;

pub(super) fn reject<T>(code: ProblemCode, detail: impl Into<String>) -> ValidationResult<T> {
    Err(Rejection { code, detail: detail.into(), evidence: Evidence::default() })
}

impl Submission {
    /// The group that was meant, and its name; the id of a group with a key is the buffer's to give.
    pub(crate) fn check(self, limits: ItemLimits) -> ValidationResult<(SubmissionIdentity, Group)> {
        let identity = match (self.id, self.key) {
            (Some(id), None) => SubmissionIdentity::Admitted(GroupId(id)),
            (None, Some(key)) => SubmissionIdentity::Key(checked_key(key)?),
            (None, None) => {
                return reject(
                    ProblemCode::NoIdentity,
                    "give the `id` of an admission or a `key` of your own",
                );
            }
            (Some(_), Some(_)) => {
                return reject(
                    ProblemCode::TwoIdentities,
                    "give either the `id` of an admission or a `key`, not both",
                );
            }
        };
        let count = self.trajectories.len();
        if count == 0 {
            return reject(ProblemCode::EmptyGroup, "`trajectories` is empty; abort the admission instead");
        }
        if count > limits.trajectories {
            let most = limits.trajectories;
            return reject(
                ProblemCode::TooManyTrajectories,
                format!("{count} trajectories, at most {most} are taken"),
            );
        }
        let mut free = FreeFormLimits::new(limits);
        self.task.iter().try_for_each(|task| free.check("columns", &task.columns))?;
        let mut trajectories: Vec<Trajectory> = Vec::with_capacity(count);
        for (n, body) in self.trajectories.into_iter().enumerate() {
            let trajectory = body.check(n, limits, &mut free).map_err(|rejection| Rejection {
                detail: format!("trajectories[{n}]: {}", rejection.detail),
                ..rejection
            })?;
            if let Some(before) = trajectories.last().filter(|before| before.index >= trajectory.index) {
                let detail =
                    format!("trajectories[{n}] has index {} after {}", trajectory.index, before.index);
                return reject(ProblemCode::BadIndex, detail);
            }
            trajectories.push(trajectory);
        }
        let id = if let SubmissionIdentity::Admitted(id) = identity { id } else { GroupId(0) };
        let task = self.task.map_or_else(no_task, TaskBody::into_task);
        Ok((identity, Group { id, task, trajectories }))
    }
}

fn checked_key(key: String) -> ValidationResult<String> {
    let printable = key.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ');
    if printable && (1..=MAX_KEY).contains(&key.len()) {
        return Ok(key);
    }
    let length = key.len();
    reject(
        ProblemCode::BadKey,
        format!("a key is 1 to {MAX_KEY} bytes of printable ASCII, this one has {length} bytes"),
    )
}

fn no_task() -> Task {
    Task { id: TaskId(0), prompt: Prompt::Text(String::new()), answer: None, columns: Map::new() }
}

impl TaskBody {
    fn into_task(self) -> Task {
        Task { id: TaskId(self.id), prompt: self.prompt.0, answer: self.answer, columns: self.columns }
    }
}

impl TrajectoryBody {
    fn check(
        self,
        position: usize,
        limits: ItemLimits,
        free: &mut FreeFormLimits,
    ) -> ValidationResult<Trajectory> {
        let tokens = self.token_ids.len();
        if tokens == 0 {
            return reject(ProblemCode::EmptyTrajectory, "`token_ids` is empty");
        }
        if tokens > limits.tokens {
            return reject(
                ProblemCode::TooManyTokens,
                format!("{tokens} tokens, at most {} are taken", limits.tokens),
            );
        }
        if let Some(size) = limits.vocabulary {
            let kept = self.kept.iter().flat_map(|kept| &kept.ids);
            if let Some(id) = self.token_ids.iter().chain(kept).find(|id| **id >= size) {
                let detail = format!("token id {id}; the vocabulary has {size} ids, from 0");
                return reject(ProblemCode::TokenOutOfVocabulary, detail);
            }
        }
        for reward in &self.rewards {
            free.name("rewards", &reward.name)?;
            free.check("details", &reward.details)?;
        }
        check_turns(&self.turns, tokens)?;
        let components = self.rewards.iter().filter_map(|reward| reward.value);
        let turns = self.turns.iter().filter_map(|turn| turn.reward);
        if let Some(reward) =
            self.reward.into_iter().chain(components).chain(turns).find(|reward| !reward.is_finite())
        {
            return reject(ProblemCode::NotFinite, format!("a reward is {reward}"));
        }
        if let Some(token) = self.loss_mask.iter().position(|trained| self.baseline && *trained) {
            let detail = format!("`loss_mask` is true at token {token}; a `baseline` is not trained on");
            return reject(ProblemCode::BadBaseline, detail);
        }
        if limits.correct && self.correct.is_none() && self.reward.is_some() && !self.baseline {
            let detail = "`correct` is missing; the algorithm of this run asks which answers are correct";
            return reject(ProblemCode::NoVerdict, detail);
        }
        let sample = Sample::new(SampleStreams {
            versions: runs(self.versions, self.policy_version, tokens)?,
            token_ids: self.token_ids,
            loss_mask: self.loss_mask,
            behavior_logprobs: self.behavior_logprobs,
            kept: self.kept.map(|kept| KeptTokens { offsets: kept.offsets, ids: kept.ids }),
            temperature: self.temperature,
        })
        .or_else(|error| reject(code_of(&error), error.to_string()))?;
        let component = |RewardBody { name, value, error, details }: RewardBody| Component {
            name,
            value,
            error,
            details,
        };
        let turn =
            |TurnBody { start, end, stop, reward }: TurnBody| Turn { completion: start..end, stop, reward };
        Ok(Trajectory {
            index: self.index.unwrap_or(u32::try_from(position).unwrap_or(u32::MAX)),
            sample,
            turns: self.turns.into_iter().map(turn).collect(),
            text: self.text,
            score: Score {
                total: self.reward,
                components: self.rewards.into_iter().map(component).collect(),
                correct: self.correct,
            },
            baseline: self.baseline,
        })
    }
}

fn check_turns(turns: &[TurnBody], tokens: usize) -> ValidationResult<()> {
    let mut free = 0;
    for (n, turn) in turns.iter().enumerate() {
        if turn.start < free || turn.end < turn.start || turn.end > tokens {
            let TurnBody { start, end, .. } = turn;
            let detail = format!(
                "turns[{n}] is {start}..{end}; turns are ascending, do not overlap and end by {tokens}"
            );
            return reject(ProblemCode::BadTurn, detail);
        }
        free = turn.end;
    }
    Ok(())
}

fn runs(
    versions: Option<Vec<RunBody>>,
    version: Option<u64>,
    tokens: usize,
) -> ValidationResult<Vec<VersionRun>> {
    match (versions, version) {
        (Some(runs), None) => match runs.iter().position(|run| run.len == 0) {
            Some(n) => reject(ProblemCode::BadVersions, format!("versions[{n}] has no tokens; leave it out")),
            None => {
                let run = |run: RunBody| VersionRun { version: PolicyVersion(run.version), len: run.len };
                Ok(runs.into_iter().map(run).collect())
            }
        },
        (None, Some(version)) => match u32::try_from(tokens) {
            Ok(len) => Ok(vec![VersionRun { version: PolicyVersion(version), len }]),
            Err(_) => {
                reject(ProblemCode::TooManyTokens, format!("{tokens} tokens are more than one run can have"))
            }
        },
        (None, None) => reject(ProblemCode::BadVersions, "give `policy_version` or `versions`"),
        (Some(_), Some(_)) => {
            reject(ProblemCode::BadVersions, "give either `policy_version` or `versions`, not both")
        }
    }
}

fn code_of(error: &SampleError) -> ProblemCode {
    match error {
        SampleError::Empty => ProblemCode::EmptyTrajectory,
        SampleError::FirstTokenTrained => ProblemCode::FirstTokenTrained,
        SampleError::Logprob { value, .. } if value.is_finite() => ProblemCode::LogprobPositive,
        SampleError::Logprob { .. } => ProblemCode::NotFinite,
        SampleError::Temperature(_) => ProblemCode::BadTemperature,
        SampleError::Kept { .. } => ProblemCode::BadKept,
        _ => ProblemCode::UnequalLengths,
    }
}

fn one() -> f32 {
    1.0
}

/// A string or a sequence of messages: told apart by what comes, without reading it twice.
#[derive(Debug)]
struct PromptBody(Prompt);

impl<'de> Deserialize<'de> for PromptBody {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PromptVisitor;
        impl<'de> Visitor<'de> for PromptVisitor {
            type Value = PromptBody;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, or a list of messages with `role` and `content`")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<PromptBody, E> {
                Ok(PromptBody(Prompt::Text(text.to_owned())))
            }

            fn visit_string<E: de::Error>(self, text: String) -> Result<PromptBody, E> {
                Ok(PromptBody(Prompt::Text(text)))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<PromptBody, A::Error> {
                let mut messages = Vec::new();
                while let Some(MessageBody { role, content }) = sequence.next_element()? {
                    messages.push(Message { role, content });
                }
                Ok(PromptBody(Prompt::Messages(messages)))
            }
        }
        deserializer.deserialize_any(PromptVisitor)
    }
}

/// A group as it is answered; every field is there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupView<'a> {
    pub(crate) group: &'a Group,
    /// Instead of the id, for a client that submits under a key.
    pub(crate) key: Option<&'a str>,
}

impl<'a> From<&'a Group> for GroupView<'a> {
    fn from(group: &'a Group) -> Self {
        Self { group, key: None }
    }
}

impl Serialize for GroupView<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Group { id, task, trajectories } = self.group;
        let mut group = serializer.serialize_struct("Group", 3)?;
        match self.key {
            Some(key) => group.serialize_field("key", key)?,
            None => group.serialize_field("id", id)?,
        }
        group.serialize_field("task", &TaskView(task))?;
        group.serialize_field("trajectories", &MappedSequence(trajectories, TrajectoryView))?;
        group.end()
    }
}

/// A slice whose elements are shown through a view.
struct MappedSequence<'a, T, V>(&'a [T], fn(&'a T) -> V);

impl<T, V: Serialize> Serialize for MappedSequence<'_, T, V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(self.1))
    }
}

struct TaskView<'a>(&'a Task);

impl Serialize for TaskView<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Task { id, prompt, answer, columns } = self.0;
        let mut task = serializer.serialize_struct("Task", 4)?;
        task.serialize_field("id", id)?;
        match prompt {
            Prompt::Text(text) => task.serialize_field("prompt", text)?,
            Prompt::Messages(messages) => task.serialize_field("prompt", messages)?,
        }
        task.serialize_field("answer", answer)?;
        task.serialize_field("columns", columns)?;
        task.end()
    }
}

struct TrajectoryView<'a>(&'a Trajectory);

impl Serialize for TrajectoryView<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Trajectory { index, sample, turns, text, score, baseline } = self.0;
        let mut trajectory = serializer.serialize_struct("Trajectory", 13)?;
        trajectory.serialize_field("token_ids", sample.token_ids())?;
        trajectory.serialize_field("loss_mask", sample.loss_mask())?;
        trajectory.serialize_field("behavior_logprobs", sample.behavior_logprobs())?;
        trajectory.serialize_field("versions", sample.versions())?;
        trajectory.serialize_field("temperature", &sample.temperature())?;
        trajectory.serialize_field("kept", &sample.kept())?;
        trajectory.serialize_field("index", index)?;
        let turn = |turn: &Turn| TurnBody {
            start: turn.completion.start,
            end: turn.completion.end,
            stop: turn.stop,
            reward: turn.reward,
        };
        trajectory.serialize_field("turns", &MappedSequence(turns, turn))?;
        trajectory.serialize_field("text", text)?;
        trajectory.serialize_field("reward", &score.total)?;
        trajectory.serialize_field("rewards", &score.components)?;
        trajectory.serialize_field("correct", &score.correct)?;
        trajectory.serialize_field("baseline", baseline)?;
        trajectory.end()
    }
}
