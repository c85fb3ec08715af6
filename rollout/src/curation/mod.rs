//! Which tasks are drawn, with how many completions, and which groups are worth a training step.
//!
//! A [`Curator`] takes the outcomes of groups and decides twice: before a group starts ([`Decision`]) and when it is scored
//! ([`CurationVerdict`]). A rejected group is aborted without a retry, so that its slot is free for the next place in the
//! stream of tasks.
//!
//! # Layout
//! - `curator`: the state machine; `shared`: how worker and scorer share one, and where its history is written
//! - `history`: past results of a task
//! - `refill`: dynamic sampling, groups with equal rewards are replaced (DAPO, arXiv 2503.14476)
//! - `pools`: easy and hard tasks are drawn less often (prime-rl)
//! - `size`: fewer completions of tasks that mostly succeed (DART)
//! - `turns`: fewer turns of tasks whose successes are short (DART)
//! - `successes`: a stored success for a group that failed entirely (DART)
//!
//! # Invariants
//! - No clock and no ambient randomness: a decision is a function of the configuration, the group id and the history of its
//!   task.
//! - Every skipped place and every dropped group is counted, with its reason.

mod curator;
mod history;
mod pools;
mod refill;
mod shared;
mod size;
mod successes;
mod turns;

pub use curator::{CurationVerdict, Curator, Decision, Exhausted, SettledGroup, Skip};
pub use history::TaskOutcome;
pub use shared::{Curation, OutcomeSink};

/// Configuration of a curator; `None` and false are off.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CurationConfig {
    /// Seed of the draws.
    pub seed: u64,
    /// Completions of a group, at most.
    pub group_size: usize,
    /// Groups per training step.
    pub batch_groups: usize,
    /// Most versions between the oldest token of a sample and the step that trains on it.
    pub max_staleness: u64,
    /// Training steps of the run: a sampler of the last version has nothing left to do.
    pub steps: u64,
    /// Groups whose rewards are all equal are dropped, at most so many for every group that is kept; `None`: kept.
    pub max_refill_ratio: Option<f64>,
    /// A task that passes at least this share of its newest group is not drawn again.
    pub max_pass_rate: Option<f64>,
    /// A task without a success in so many trajectories is not drawn again.
    pub filter_after: Option<u64>,
    /// Tasks that pass at least this share of their newest group are drawn less often.
    pub easy: Option<DifficultyPool>,
    /// Tasks that pass at most this share of their newest group are drawn less often.
    pub hard: Option<DifficultyPool>,
    /// Groups of tasks that mostly succeed are smaller.
    pub shrink: Option<Shrink>,
    /// An episode has at most so many turns more than the longest success of its task; `None`: the limit of its
    /// environment.
    pub turn_margin: Option<usize>,
    /// Whether one trajectory of a group that failed entirely gives way to a stored success of its task.
    pub success_pool: bool,
}

/// Tasks beyond a pass rate, and how many of them are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DifficultyPool {
    /// Where the pool begins, in [0, 1].
    pub pass_rate: f64,
    /// Share of its places in the stream that are drawn, in (0, 1].
    pub share: f64,
}

/// How groups become smaller.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shrink {
    /// Pass rate up to which groups are whole, in [0, 1).
    pub above: f64,
    /// Completions of a group whose task always passes, at least 1.
    pub min: usize,
}

/// What a curator has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct CurationCounts {
    /// Groups dropped because their rewards are all equal, and replaced by others.
    pub refilled: u64,
    /// Groups with equal rewards that went on because too many had been dropped.
    pub let_through: u64,
    /// Places of the stream passed over because their task passes too often.
    pub retired: u64,
    /// Places passed over because their task never passed.
    pub unlearnable: u64,
    /// Places passed over because their task is easy or hard, and it was not drawn.
    pub pooled_out: u64,
    /// Groups started with fewer completions.
    pub shrunk: u64,
    /// Groups started with a limit on the turns of their episodes.
    #[serde(default)]
    pub turn_limited: u64,
    /// Groups that failed entirely and got a stored success.
    pub replayed_successes: u64,
}

impl std::ops::AddAssign for CurationCounts {
    fn add_assign(&mut self, other: Self) {
        self.refilled = self.refilled.saturating_add(other.refilled);
        self.let_through = self.let_through.saturating_add(other.let_through);
        self.retired = self.retired.saturating_add(other.retired);
        self.unlearnable = self.unlearnable.saturating_add(other.unlearnable);
        self.pooled_out = self.pooled_out.saturating_add(other.pooled_out);
        self.shrunk = self.shrunk.saturating_add(other.shrunk);
        self.turn_limited = self.turn_limited.saturating_add(other.turn_limited);
        self.replayed_successes = self.replayed_successes.saturating_add(other.replayed_successes);
    }
}

impl CurationConfig {
    /// Slots of the buffer that groups take.
    #[must_use]
    pub fn slots(&self) -> usize {
        let versions = usize::try_from(self.max_staleness).unwrap_or(usize::MAX).saturating_add(1);
        versions.saturating_mul(self.batch_groups)
    }
}
