//! Pass@k training (arXiv 2508.10751): a task counts as solved if one of k attempts is correct.
//!
//! Invariant: the advantage is the mean over all subsets of k trajectories that contain the trajectory, in closed form,
//! without sampling.

use super::EPSILON;

/// Advantages `[trajectories]` of trajectories that are correct or not (`right`); `k` is clamped to their number.
///
/// With `N` trajectories: a subset of k has reward 1 if one of it is correct. With `m` incorrect ones of `N`, the mean is `R = 1
/// - C(m, k) / C(N, k)` and the standard deviation `s = sqrt(R (1 - R))`. All subsets with a given correct trajectory
/// have reward 1: its advantage is `(1 - R) / s`. Those with a given incorrect one have mean `1 - C(m - 1, k - 1) / C(N
/// - 1, k - 1)`.
#[must_use]
pub fn advantages(right: &[bool], k: usize) -> Vec<f64> {
    let n = right.len();
    let k = k.clamp(1, n.max(1));
    let wrong = right.iter().filter(|right| !**right).count();
    let mean = 1.0 - share(wrong, n, k);
    let deviation = (mean * (1.0 - mean)).max(0.0).sqrt();
    if deviation == 0.0 {
        return vec![0.0; n];
    }
    let of_right = (1.0 - mean) / (deviation + EPSILON);
    let with_it = if wrong == 0 { 0.0 } else { share(wrong - 1, n - 1, k - 1) };
    let of_wrong = (1.0 - mean - with_it) / (deviation + EPSILON);
    right.iter().map(|right| if *right { of_right } else { of_wrong }).collect()
}

/// `C(m, k) / C(n, k)` as a product, which cannot overflow.
fn share(m: usize, n: usize, k: usize) -> f64 {
    if m < k {
        return 0.0;
    }
    (0..k).map(|i| (m - i) as f64 / (n - i) as f64).product()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_mean_over_all_subsets() {
        let right = [true, false, false, true, false, false];
        let (n, k) = (right.len(), 3);
        let subsets: Vec<u32> = (0..1u32 << n).filter(|set| set.count_ones() == k as u32).collect();
        let worth = |set: &u32| f64::from(u8::from((0..n).any(|i| set >> i & 1 == 1 && right[i])));
        let mean = subsets.iter().map(worth).sum::<f64>() / subsets.len() as f64;
        let std = (mean * (1.0 - mean)).sqrt();
        for (i, advantage) in advantages(&right, k).into_iter().enumerate() {
            let with: Vec<&u32> = subsets.iter().filter(|set| **set >> i & 1 == 1).collect();
            let of_it = with.iter().map(|set| worth(set)).sum::<f64>() / with.len() as f64;
            assert!((advantage - (of_it - mean) / (std + EPSILON)).abs() < 1e-12, "{i}: {advantage}");
        }
    }

    #[test]
    fn with_one_attempt_it_is_the_normalised_reward() {
        let ours = advantages(&[true, false, false, false], 1);
        let std = 0.1875_f64.sqrt() + EPSILON;
        assert!((ours[0] - 0.75 / std).abs() < 1e-12 && (ours[1] + 0.25 / std).abs() < 1e-12, "{ours:?}");
    }
}
