//! Adaptive group size (DART, arXiv 2509.23866): fewer completions of tasks that mostly succeed, whose advantages are small.
//!
//! Invariant: between the minimum and the whole group, never rising with the pass rate.

use super::Shrink;

/// Completions of a group whose task passes `pass_rate` of its newest one: `whole` up to `shrink.above`, from there
/// linear down to `shrink.min` at 1, rounded to the nearest.
pub(super) fn completions(whole: usize, shrink: Shrink, pass_rate: f64) -> usize {
    let Shrink { above, min } = shrink;
    let least = min.min(whole);
    let way = ((pass_rate - above) / (1.0 - above)).clamp(0.0, 1.0);
    whole - ((whole - least) as f64 * way).round() as usize
}
