//! The errors of rewards, from a recipe's `[[rewards]]` to a score.
//!
//! Invariant: each message names the reward, shows the value that was found and the change to make.

use crate::TrajectoryRef;

/// Why rewards cannot be built, or a trajectory not be scored.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RewardError {
    /// There is no reward.
    #[error("no reward is configured; add at least one `[[rewards]]` entry")]
    Empty,
    /// Two rewards would be logged under one name.
    #[error("two rewards are named `{name}`; give one of them another `name`")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// The criterion of correct answers names a reward that does not exist.
    #[error("there is no reward `{name}` to judge what is correct; there are {known}")]
    UnknownCriterion {
        /// The name.
        name: String,
        /// The existing names, as text.
        known: String,
    },
    /// An unknown kind.
    #[error("there is no reward of kind `{kind}`; there are {known}")]
    UnknownKind {
        /// The kind.
        kind: String,
        /// The existing kinds, as text.
        known: String,
    },
    /// A reward that waits has no runtime.
    #[error(
        "reward `{reward}` waits for others and needs a runtime with timers; give one in the `RewardContext`"
    )]
    NoRuntime {
        /// Name of the reward.
        reward: String,
    },
    /// A name that is not valid in a metric.
    #[error("a reward of kind `{kind}` has an empty name; leave `name` out to call it `{kind}`")]
    EmptyName {
        /// The kind.
        kind: String,
    },
    /// A parameter that the kind does not read.
    #[error("reward `{reward}` of kind `{kind}` does not take `{field}`; it takes {takes}")]
    ForeignField {
        /// Name of the reward.
        reward: String,
        /// Its kind.
        kind: String,
        /// The parameter.
        field: String,
        /// The parameters that the kind reads, as text.
        takes: String,
    },
    /// A required parameter is missing.
    #[error("reward `{reward}` of kind `{kind}` needs `{field}`")]
    MissingField {
        /// Name of the reward.
        reward: String,
        /// Its kind.
        kind: String,
        /// The parameter.
        field: String,
    },
    /// A pattern that is not a regular expression.
    #[error("reward `{reward}`: pattern `{pattern}` is not a regular expression: {reason}")]
    Pattern {
        /// Name of the reward.
        reward: String,
        /// The pattern.
        pattern: String,
        /// The message of the parser.
        reason: String,
    },
    /// A pattern is to be compared with the answer but captures nothing.
    #[error(
        "reward `{reward}`: pattern `{pattern}` has no capture group to compare with the answer; \
         put parentheses around the answer or leave `compare` out"
    )]
    NoCapture {
        /// Name of the reward.
        reward: String,
        /// The pattern.
        pattern: String,
    },
    /// A weight that is not a finite number.
    #[error("reward `{reward}` has weight {weight}; it must be finite")]
    Weight {
        /// Name of the reward.
        reward: String,
        /// The weight.
        weight: f64,
    },
    /// The overlong penalty has an invalid range.
    #[error(
        "reward `{reward}` has `cache` = {cache} tokens and a maximal length of {max_length}; \
         `cache` must be at least 1 and at most the maximal length"
    )]
    Cache {
        /// Name of the reward.
        reward: String,
        /// Tokens over which the penalty grows.
        cache: usize,
        /// Tokens at which it is -1.
        max_length: usize,
    },
    /// A reward compares with a reference answer that the row lacks.
    #[error(
        "reward `{reward}` needs a reference answer, but {trajectory} has none; name its column in `answer_column`"
    )]
    NoAnswer {
        /// Name of the reward.
        reward: String,
        /// The trajectory.
        trajectory: TrajectoryRef,
    },
    /// A reward returned a value that cannot be trained on.
    #[error("reward `{reward}` is {value} for {trajectory}; it must be finite")]
    NotFinite {
        /// Name of the reward, or `total` for the weighted sum.
        reward: String,
        /// The trajectory.
        trajectory: TrajectoryRef,
        /// The value.
        value: f64,
    },
    /// A reward did not answer in time.
    #[error(
        "reward `{reward}` gave no answer for {trajectory} within {seconds:.1} s; raise its `timeout_s` if it may take longer"
    )]
    Timeout {
        /// Name of the reward.
        reward: String,
        /// The trajectory.
        trajectory: TrajectoryRef,
        /// The timeout, seconds.
        seconds: f64,
    },
    /// A parameter with a value that it cannot have.
    #[error("reward `{reward}`: `{field}` {reason}")]
    Parameter {
        /// Name of the reward.
        reward: String,
        /// The parameter.
        field: String,
        /// The reason, as the end of a sentence.
        reason: String,
    },
    /// A process, a model or a sandbox that a reward needs cannot be started.
    #[error("reward `{reward}` cannot be started: {reason}")]
    Start {
        /// Name of the reward.
        reward: String,
        /// The reason and the remedy.
        reason: String,
    },
    /// Something outside this crate (a process, a server, a model) failed.
    #[error("reward `{reward}` failed for {trajectory}: {reason}")]
    Failed {
        /// Name of the reward.
        reward: String,
        /// The trajectory.
        trajectory: TrajectoryRef,
        /// The reason and the remedy.
        reason: String,
    },
}
