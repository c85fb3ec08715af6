//! Adaptive turn limits (DART, arXiv 2509.23866): an episode that has taken many more turns than any success of its task rarely
//! succeeds, and takes the longest.
//!
//! Invariant: never below the longest success, so that what was learnt can be done again.

/// Most turns of a task whose longest success had `longest`; `None` if a success has no turns.
pub(super) fn most(longest: u64, margin: usize) -> Option<usize> {
    let longest = usize::try_from(longest).ok().filter(|longest| *longest > 0)?;
    Some(longest.saturating_add(margin))
}
