//! What a step waits for or works at: a resource and its name.
//!
//! Invariant: the words of [`CauseKind::as_str`] are those of `docs/why.md` and of `rlrun why --json`.

use std::fmt;

/// A resource on the critical path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum CauseKind {
    /// A sampler computes.
    Sampling,
    /// A reward judges.
    Reward,
    /// An environment or a tool answers.
    Environment,
    /// A group is handed over, or a batch is leased.
    Buffer,
    /// The journal commits, or a checkpoint is written.
    Disk,
    /// A version is published, or a sampler waits for it or applies it.
    Weights,
    /// The process of a worker had no processor.
    Paused,
    /// All ranks of the trainer compute, or most of them.
    Training,
    /// One rank computes, or a minority, while the others wait.
    SlowRank,
    /// All ranks wait for their exchange.
    RankExchange,
    /// The policy is evaluated.
    Evaluation,
    /// Sampler and trainer hand the device over.
    PhaseSwitch,
    /// The trainer continues with other ranks.
    Regroup,
    /// The state of all ranks is copied to the memory of the first.
    Snapshot,
    /// The trainer writes the records of a step.
    Records,
    /// Nothing in the timeline says what.
    Unknown,
}

impl CauseKind {
    /// The word in JSON and text.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sampling => "sampling",
            Self::Reward => "reward",
            Self::Environment => "environment",
            Self::Buffer => "buffer",
            Self::Disk => "disk",
            Self::Weights => "weights",
            Self::Paused => "paused",
            Self::Training => "training",
            Self::SlowRank => "slow_rank",
            Self::RankExchange => "rank_exchange",
            Self::Evaluation => "evaluation",
            Self::PhaseSwitch => "phase_switch",
            Self::Regroup => "regroup",
            Self::Snapshot => "snapshot",
            Self::Records => "records",
            Self::Unknown => "unknown",
        }
    }

    /// Whether it takes time by itself in every step, so that more of it is no fault of a resource: work varies with the lengths
    /// of completions.
    pub(super) fn is_work(self) -> bool {
        use CauseKind::{Evaluation, PhaseSwitch, Records, Sampling, Training, Unknown};
        matches!(self, Sampling | Training | Evaluation | PhaseSwitch | Records | Unknown)
    }
}

impl fmt::Display for CauseKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A resource with its name: a sampler, a reward, a rank, a file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cause {
    /// The resource.
    pub kind: CauseKind,
    /// Its name; empty if there is one of its kind.
    pub name: String,
}

impl Cause {
    pub(super) fn new(kind: CauseKind, name: &str) -> Self {
        Self { kind, name: name.to_owned() }
    }

    /// One of its kind.
    pub(super) fn only(kind: CauseKind) -> Self {
        Self::new(kind, "")
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.name;
        match self.kind {
            kind if name.is_empty() => kind.fmt(f),
            kind => write!(f, "{kind} `{name}`"),
        }
    }
}
