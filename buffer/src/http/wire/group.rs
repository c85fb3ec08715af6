//! A group on the wire, and its conversion from and to `trajectory`.
//!
//! Invariant: both conversions are lossless. A [`Submission`] keeps every trainable stream bit for bit, and
//! [`GroupView`] converts back to the same group. Streams are moved, not copied.

use std::fmt;

use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde::ser::{SerializeStruct, Serializer};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use trajectory::{
    Branch, Component, Group, GroupId, Message, Prompt, Score, StopReason, Task, TaskId, Trajectory,
};
use utoipa::ToSchema;

use super::branch::{BranchBody, BranchView, checked_branches};
use super::free::FreeFormLimits;
use super::schema;
use crate::http::problem::{Evidence, ProblemCode};

/// Maximum length of an idempotency key, bytes.
const MAX_KEY: usize = 128;

/// A group for the buffer: an admitted one with its `id`, or one of the client with an idempotency `key`, under which
/// it is stored once.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Submission {
    /// The id of the admission.
    id: Option<u64>,
    /// The idempotency key, 1 to 128 bytes of printable ASCII.
    #[schema(min_length = 1, max_length = 128)]
    key: Option<String>,
    /// The task.
    task: Option<TaskBody>,
    /// The trajectories, ordered by index.
    #[schema(min_items = 1)]
    trajectories: Vec<TrajectoryBody>,
}

/// One dataset row.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = TaskRequest)]
pub(super) struct TaskBody {
    /// Row number in the dataset.
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

/// One trajectory. The three streams have one entry per token, prompt and completion.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = TrajectoryRequest)]
pub(super) struct TrajectoryBody {
    /// Token ids of prompt and completion.
    token_ids: Vec<u32>,
    /// True for tokens that the policy sampled and that are trained on; never for the first.
    loss_mask: Vec<bool>,
    /// Log-probability under the distribution that the token was sampled from, nats; 0 where the mask is false.
    behavior_logprobs: Vec<f32>,
    /// Runs of policy versions over all tokens.
    versions: Option<Vec<RunBody>>,
    /// The version that sampled all tokens, instead of `versions`.
    policy_version: Option<u64>,
    /// Sampling temperature, above 0.
    #[serde(default = "one")]
    temperature: f32,
    /// The tokens that truncation (top-k, top-p) kept.
    kept: Option<KeptBody>,
    /// The experts of the tokens, of a model with experts.
    experts: Option<ExpertsBody>,
    /// Index of the trajectory in its group, ascending from 0; its position if omitted.
    index: Option<u32>,
    /// The model calls, in order.
    #[serde(default)]
    turns: Vec<TurnBody>,
    /// The last completion as text.
    #[serde(default)]
    text: String,
    /// Weighted sum of the rewards; without it the trajectory is not trained on.
    reward: Option<f64>,
    /// The rewards by function.
    #[serde(default)]
    rewards: Vec<RewardBody>,
    /// Whether the answer is correct, independent of its reward; some algorithms need it.
    correct: Option<bool>,
    /// Whether it is a greedy baseline: its loss mask is false everywhere.
    #[serde(default)]
    baseline: bool,
    /// The role that the policy played, if the episode has several: trajectories of the same role are compared.
    role: Option<String>,
    /// Further token streams of the episode, if its agent rewrote its history or asked a second agent.
    #[serde(default)]
    #[schema(max_items = 1023)]
    branches: Vec<BranchBody>,
}

/// Consecutive tokens of one policy version.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = VersionRun)]
pub(super) struct RunBody {
    /// The version.
    pub(super) version: u64,
    /// Number of tokens.
    #[schema(minimum = 1)]
    pub(super) len: u32,
}

/// For every token of the loss mask, in order, the ids that truncation kept.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = KeptTokens)]
pub(super) struct KeptBody {
    /// Offset of each set in `ids`, followed by the length of `ids`.
    pub(super) offsets: Vec<u32>,
    /// Token ids, ascending within a set.
    pub(super) ids: Vec<u32>,
}

/// For every token but the last, the experts that the network of the sampler chose.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = TokenExperts)]
pub(super) struct ExpertsBody {
    /// Experts of a token in each layer that has some.
    #[schema(minimum = 1)]
    pub(super) per_token: u32,
    /// Numbers of experts: of the first token in all layers, ascending in each, then of the next token.
    pub(super) ids: Vec<u16>,
}

/// One model call.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Turn)]
pub(super) struct TurnBody {
    /// First token of the completion.
    pub(super) start: usize,
    /// One past its last token, including the stop token.
    pub(super) end: usize,
    /// Why it ended.
    #[schema(schema_with = schema::stop)]
    pub(super) stop: StopReason,
    /// Reward of this turn alone. It is not part of the trajectory's `reward`; where trajectories are compared, the rewards of
    /// the turns are added to it.
    pub(super) reward: Option<f64>,
    /// Runs of the versions that computed the keys and values of the tokens before the completion, up to it; empty if one did for
    /// all that were not in the KV cache.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) prefill: Vec<RunBody>,
}

/// Result of one reward function.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Reward)]
struct RewardBody {
    /// Its name.
    name: String,
    /// The reward; none if the function failed.
    value: Option<f64>,
    /// The failure.
    error: Option<String>,
    /// Its details, by name.
    #[serde(default)]
    #[schema(value_type = Object)]
    details: Map<String, Value>,
}

/// Limits of one group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ItemLimits {
    /// Maximum number of trajectories in a group.
    pub(crate) trajectories: usize,
    /// Maximum number of tokens in a trajectory.
    pub(crate) tokens: usize,
    /// Vocabulary size; none: any id.
    pub(crate) vocabulary: Option<u32>,
    /// Maximum number of values in columns and details together.
    pub(crate) values: usize,
    /// Maximum bytes of the name of a column, a detail or a reward.
    pub(crate) name_bytes: usize,
    /// Maximum nesting of lists and objects.
    pub(crate) depth: usize,
    /// Whether every trajectory with a reward needs `correct`.
    pub(crate) correct: bool,
}

/// Identity of a stored group.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SubmissionIdentity {
    Admitted(GroupId),
    Key(String),
}

/// Why a group is not stored.
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
    /// Validates and converts the group, and its identity. The buffer assigns the id of a group with a key.
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
        let first = BranchBody {
            token_ids: self.token_ids,
            loss_mask: self.loss_mask,
            behavior_logprobs: self.behavior_logprobs,
            versions: self.versions,
            policy_version: self.policy_version,
            temperature: self.temperature,
            kept: self.kept,
            experts: self.experts,
            turns: self.turns,
        };
        let Branch { sample, turns } = first.check(limits, self.baseline)?;
        let branches = checked_branches(self.branches, limits, self.baseline)?;
        self.role.iter().try_for_each(|role| free.name("role", role))?;
        for reward in &self.rewards {
            free.name("rewards", &reward.name)?;
            free.check("details", &reward.details)?;
        }
        let components = self.rewards.iter().filter_map(|reward| reward.value);
        if let Some(reward) = self.reward.into_iter().chain(components).find(|reward| !reward.is_finite()) {
            return reject(ProblemCode::NotFinite, format!("a reward is {reward}"));
        }
        if limits.correct && self.correct.is_none() && self.reward.is_some() && !self.baseline {
            let detail = "`correct` is missing; the algorithm of this run asks which answers are correct";
            return reject(ProblemCode::NoVerdict, detail);
        }
        let component = |RewardBody { name, value, error, details }: RewardBody| Component {
            name,
            value,
            error,
            details,
        };
        Ok(Trajectory {
            index: self.index.unwrap_or(u32::try_from(position).unwrap_or(u32::MAX)),
            sample,
            turns,
            branches,
            text: self.text,
            score: Score {
                total: self.reward,
                components: self.rewards.into_iter().map(component).collect(),
                correct: self.correct,
            },
            baseline: self.baseline,
            role: self.role,
        })
    }
}

pub(super) fn one() -> f32 {
    1.0
}

/// A string or a sequence of messages, decided by its type without reading it twice.
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
                    messages.push(Message::new(role, content));
                }
                Ok(PromptBody(Prompt::Messages(messages)))
            }
        }
        deserializer.deserialize_any(PromptVisitor)
    }
}

/// A group in an answer; every field is present, but `branches` and `experts` only where there are some.
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

/// A slice whose elements are serialized through a view.
pub(super) struct MappedSequence<'a, T, V>(pub(super) &'a [T], pub(super) fn(&'a T) -> V);

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
        let Trajectory { index, sample, turns, branches, text, score, baseline, role } = self.0;
        let fields = 14 + usize::from(!branches.is_empty()) + usize::from(sample.experts().is_some());
        let mut trajectory = serializer.serialize_struct("Trajectory", fields)?;
        trajectory.serialize_field("token_ids", sample.token_ids())?;
        trajectory.serialize_field("loss_mask", sample.loss_mask())?;
        trajectory.serialize_field("behavior_logprobs", sample.behavior_logprobs())?;
        trajectory.serialize_field("versions", sample.versions())?;
        trajectory.serialize_field("temperature", &sample.temperature())?;
        trajectory.serialize_field("kept", &sample.kept())?;
        trajectory.serialize_field("index", index)?;
        trajectory.serialize_field("turns", &MappedSequence(turns, TurnBody::from))?;
        trajectory.serialize_field("text", text)?;
        trajectory.serialize_field("reward", &score.total)?;
        trajectory.serialize_field("rewards", &score.components)?;
        trajectory.serialize_field("correct", &score.correct)?;
        trajectory.serialize_field("baseline", baseline)?;
        trajectory.serialize_field("role", role)?;
        // Clients that do not know experts or branches read groups that have none.
        if let Some(experts) = sample.experts() {
            trajectory.serialize_field("experts", experts)?;
        }
        if !branches.is_empty() {
            trajectory.serialize_field("branches", &MappedSequence(branches, BranchView))?;
        }
        trajectory.end()
    }
}
