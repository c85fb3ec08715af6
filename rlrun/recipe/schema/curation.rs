//! The section `[curation]`.
//!
//! Invariant: everything is off by default, and the documentation of a key names the key that it needs.

use serde::{Deserialize, Serialize};

/// `[curation]`: selection of tasks to sample and of groups to train on; all off by default.
///
/// A trajectory passes if it is correct (`[eval.correct]`). The pass rate of a task is the fraction of passes in the newest
/// group that this run sampled for the task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CurationSection {
    /// Whether groups with equal rewards are dropped and replaced by other groups, so that every group of a batch has a
    /// gradient (DAPO). verl `filter_groups.enable`.
    // resume = changes, worker = ignored
    pub dynamic_sampling: bool,
    /// For `dynamic_sampling`: largest number of dropped groups per kept group in a batch. Beyond it no group of the batch
    /// is dropped. verl `max_num_gen_batches`.
    // resume = changes, worker = ignored
    pub max_refill_ratio: f64,
    /// A task with at least this pass rate is not sampled again (0.9 in ScaleRL's no-positive-resampling).
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub max_pass_rate: Option<f64>,
    /// A task is not sampled again if none of its trajectories passed, after this number of trajectories (RIF-RFT).
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub filter_after: Option<u64>,
    /// Tasks with at least this pass rate are easy; they are sampled with probability `easy_share`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub easy_pass_rate: Option<f64>,
    /// For `easy_pass_rate`: probability that an easy task is sampled in its turn.
    // resume = changes, worker = ignored
    pub easy_share: f64,
    /// Tasks with at most this pass rate are hard; they are sampled with probability `hard_share`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub hard_pass_rate: Option<f64>,
    /// For `hard_pass_rate`: probability that a hard task is sampled in its turn.
    // resume = changes, worker = ignored
    pub hard_share: f64,
    /// Pass rate above which groups shrink, linearly down to `min_group_size` at pass rate 1 (0.6 in DART).
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub shrink_above: Option<f64>,
    /// For `shrink_above`: group size of a task with pass rate 1.
    // resume = changes, worker = ignored
    pub min_group_size: usize,
    /// Turns that an episode may have beyond those of the longest correct episode of its task (DART). If not given, and for a task
    /// without a correct one, the limit is that of the environment.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub turn_margin: Option<usize>,
    /// Whether the newest correct trajectory of a task is added to its next group without one (DART), if its staleness is
    /// within `buffer.max_staleness`. Needs `buffer.on_stale = "drop"`.
    // resume = changes, worker = ignored
    pub success_pool: bool,
}

impl Default for CurationSection {
    fn default() -> Self {
        Self {
            dynamic_sampling: false,
            max_refill_ratio: 10.0,
            max_pass_rate: None,
            filter_after: None,
            easy_pass_rate: None,
            easy_share: 0.1,
            hard_pass_rate: None,
            hard_share: 0.1,
            shrink_above: None,
            min_group_size: 2,
            turn_margin: None,
            success_pool: false,
        }
    }
}

impl CurationSection {
    /// Whether anything is on.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.dynamic_sampling || self.asks_what_passes()
    }

    /// Whether any key needs to know which trajectories pass.
    #[must_use]
    pub fn asks_what_passes(&self) -> bool {
        let rates = [self.max_pass_rate, self.easy_pass_rate, self.hard_pass_rate, self.shrink_above];
        self.success_pool
            || self.filter_after.is_some()
            || self.turn_margin.is_some()
            || rates.iter().any(Option::is_some)
    }

    /// Keys without effect, each with the key that is not set and that it needs.
    #[must_use]
    pub fn keys_without_effect(&self) -> Vec<(&'static str, &'static str)> {
        [
            (self.dynamic_sampling, "max_refill_ratio", "dynamic_sampling"),
            (self.easy_pass_rate.is_some(), "easy_share", "easy_pass_rate"),
            (self.hard_pass_rate.is_some(), "hard_share", "hard_pass_rate"),
            (self.shrink_above.is_some(), "min_group_size", "shrink_above"),
        ]
        .into_iter()
        .filter_map(|(on, key, needs)| (!on).then_some((key, needs)))
        .collect()
    }
}
