//! The section `[curation]`.
//!
//! Invariant: everything is off by default, and a key that needs another says so.

use serde::{Deserialize, Serialize};

/// `[curation]`: which tasks are drawn and which groups are trained on; all off by default.
///
/// A trajectory passes if it is correct (`[eval.correct]`). The pass rate of a task is that of the newest group that was
/// sampled of it, in this run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CurationSection {
    /// Drop groups whose rewards are all equal and sample others in their place, so that every group of a batch teaches
    /// something (DAPO). verl `filter_groups.enable`.
    // resume = changes, worker = ignored
    pub dynamic_sampling: bool,
    /// Of `dynamic_sampling`: most groups dropped for every one that is kept, counted over a batch; beyond it groups go
    /// through as they are. verl `max_num_gen_batches`.
    // resume = changes, worker = ignored
    pub max_refill_ratio: f64,
    /// A task with this pass rate or a higher one is not drawn again (ScaleRL's no-positive-resampling has 0.9).
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub max_pass_rate: Option<f64>,
    /// A task of which none of so many trajectories passed is not drawn again (RIF-RFT).
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub filter_after: Option<u64>,
    /// Tasks with this pass rate or a higher one are easy: they are drawn with the probability `easy_share`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub easy_pass_rate: Option<f64>,
    /// Of `easy_pass_rate`: probability that an easy task is drawn when its turn comes.
    // resume = changes, worker = ignored
    pub easy_share: f64,
    /// Tasks with this pass rate or a lower one are hard: they are drawn with the probability `hard_share`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub hard_pass_rate: Option<f64>,
    /// Of `hard_pass_rate`: probability that a hard task is drawn when its turn comes.
    // resume = changes, worker = ignored
    pub hard_share: f64,
    /// From this pass rate on groups become smaller, linearly down to `min_group_size` at 1 (DART has 0.6).
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub shrink_above: Option<f64>,
    /// Of `shrink_above`: completions of a task that always passes.
    // resume = changes, worker = ignored
    pub min_group_size: usize,
    /// Put the newest success of a task into its next group in which nothing passed (DART), if it is within
    /// `buffer.max_staleness`. Needs `buffer.on_stale = "drop"`.
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

    /// Whether anything asks which trajectories pass.
    #[must_use]
    pub fn asks_what_passes(&self) -> bool {
        let rates = [self.max_pass_rate, self.easy_pass_rate, self.hard_pass_rate, self.shrink_above];
        self.success_pool || self.filter_after.is_some() || rates.iter().any(Option::is_some)
    }

    /// The keys that say nothing as long as the key beside them is not set.
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
