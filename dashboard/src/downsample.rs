//! Fewer points of a curve, without losing its extremes.
//!
//! Invariant: at most two points per bucket are kept, the smallest and the largest value of the bucket, in the order of x.
//! A curve that has no more points than that is kept whole.

/// Indices of the points of a curve that are drawn on `buckets` pixels.
///
/// `x`: `[points]`, in ascending order. `y`: `[points]`; values that are not finite are kept only where a bucket has no
/// other. Returns at most `2 * buckets` indices in ascending order.
pub(crate) fn min_max(x: &[f64], y: &[f64], buckets: usize) -> Vec<usize> {
    assert_eq!(x.len(), y.len(), "a point has an x and a y");
    let buckets = buckets.max(1);
    if x.len() <= 2 * buckets {
        return (0..x.len()).collect();
    }
    let (first, last) = (x[0], x[x.len() - 1]);
    // Of points with one x all are in the first bucket.
    let scale = if last > first { buckets as f64 / (last - first) } else { 0.0 };
    let bucket = |index: usize| (((x[index] - first) * scale) as usize).min(buckets - 1);
    let mut kept = Vec::with_capacity(2 * buckets);
    let mut start = 0;
    while start < x.len() {
        let this = bucket(start);
        let end = (start..x.len()).find(|index| bucket(*index) != this).unwrap_or(x.len());
        let finite = || (start..end).filter(|index| y[*index].is_finite());
        let least = finite().reduce(|a, b| if y[b] < y[a] { b } else { a });
        let most = finite().reduce(|a, b| if y[b] > y[a] { b } else { a });
        match (least, most) {
            (Some(least), Some(most)) if least == most => kept.push(least),
            (Some(least), Some(most)) => kept.extend([least.min(most), least.max(most)]),
            _ => kept.push(start),
        }
        start = end;
    }
    kept
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_bucket_keeps_its_extremes(
            steps in prop::collection::vec((0.0_f64..3.0, -1e3_f64..1e3), 0..600),
            buckets in 1_usize..60,
        ) {
            let mut at = 0.0;
            let x: Vec<f64> = steps.iter().map(|(dx, _)| { at += dx; at }).collect();
            let y: Vec<f64> = steps.iter().map(|(_, y)| *y).collect();
            let kept = min_max(&x, &y, buckets);
            prop_assert!(kept.len() <= 2 * buckets);
            prop_assert!(kept.windows(2).all(|pair| pair[0] < pair[1]));
            if x.is_empty() { return Ok(()); }
            let width = (x[x.len() - 1] - x[0]) / buckets as f64;
            // Buckets as half-open ranges of x, with a margin for rounding at their edges.
            for bucket in 0..buckets {
                let (low, high) = (x[0] + width * bucket as f64, x[0] + width * (bucket + 1) as f64);
                let margin = 1e-9 * (1.0 + high.abs());
                let inside = (0..x.len()).filter(|i| x[*i] >= low + margin && x[*i] < high - margin);
                let near: Vec<f64> = kept.iter().filter(|i| x[**i] >= low - margin && x[**i] <= high + margin)
                    .map(|i| y[*i]).collect();
                for index in inside {
                    prop_assert!(near.iter().any(|value| *value <= y[index]));
                    prop_assert!(near.iter().any(|value| *value >= y[index]));
                }
            }
        }
    }

    #[test]
    fn short_curves_are_whole_and_gaps_stay() {
        assert_eq!(min_max(&[1.0, 2.0, 3.0], &[5.0, f64::NAN, 5.0], 2), [0, 1, 2]);
        let x: Vec<f64> = (0..10).map(f64::from).collect();
        let mut y = vec![1.0; 10];
        y[3] = f64::NAN;
        y[7] = 9.0;
        assert_eq!(min_max(&x, &y, 2), [0, 5, 7]);
        assert_eq!(min_max(&x, &[f64::NAN; 10], 2), [0, 5]);
        assert_eq!(min_max(&[2.0; 10], &y, 2), [0, 7]);
        assert!(min_max(&[], &[], 3).is_empty());
    }
}
