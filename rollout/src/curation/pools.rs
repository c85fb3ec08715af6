//! Difficulty pools (prime-rl): tasks that are too easy or too hard are drawn less often.
//!
//! Invariant: whether a place in the stream of tasks is drawn depends on the seed, the group's id and the pass rate of its
//! task alone.

use trajectory::GroupId;

use super::{CurationConfig, DifficultyPool};
use crate::tasks::random::{Purpose, RandomStream};

/// Whether the group is drawn, if its task passes `pass_rate` of its newest group.
pub(super) fn drawn(config: &CurationConfig, group: GroupId, pass_rate: f64) -> bool {
    let easy = config.easy.filter(|pool| pass_rate >= pool.pass_rate);
    let hard = config.hard.filter(|pool| pass_rate <= pool.pass_rate);
    // The pools do not overlap.
    easy.or(hard).is_none_or(|DifficultyPool { share, .. }| uniform(config.seed, group) < share)
}

/// A number in [0, 1) of its own for every group.
fn uniform(seed: u64, group: GroupId) -> f64 {
    let mut stream = RandomStream::new(seed, &Purpose { name: *b"pools...", number: group.0 });
    stream.below(1 << 53) as f64 / (1u64 << 53) as f64
}
