//! Which experts a token goes to, and the tokens of every expert (mixture of experts, Shazeer et al. 2017, arXiv 1701.06538).
//!
//! A token has `k` slots, one for each of its experts, in the order of experts. Slots are grouped by expert, and within it in the
//! order of tokens, so that the products of an expert are over neighbouring rows: there is no padding.
//!
//! The experts of a token can be given: the trainer then uses those of the sampler (routing replay, Ma et al. 2025,
//! arXiv 2510.11370). Their weights, and the gradient of the router, are those of its own logits in any case.
//!
//! Invariant: the router and its softmax are f32, whatever the weights of experts are packed as. The results of a token are summed
//! in the order of experts, as transformers does.

use std::ops::Range;

use super::simd::{exp, max, vectorized};
use crate::layer::ExpertSpec;

/// Routes of `T` tokens to `k` of `E` experts each.
#[derive(Clone, Debug)]
pub(crate) struct ExpertRoutes {
    spec: ExpertSpec,
    /// `[T, E]` probabilities of all experts.
    probabilities: Vec<f32>,
    /// `[T, k]` the experts of each token, ascending.
    experts: Vec<u32>,
    /// `[T, k]` what the results of the experts are multiplied with.
    weights: Vec<f32>,
    /// `[T, k]` the row of each slot among the grouped ones.
    rows: Vec<u32>,
    /// `[T k]` the slot of each grouped row.
    slots: Vec<u32>,
    /// `[E + 1]` where the rows of each expert begin.
    starts: Vec<usize>,
    /// Tokens whose experts were given.
    given: u64,
    /// Those of them for which the router prefers another expert.
    changed: u64,
}

/// The number that stands for an expert that is not given.
pub const ANY_EXPERT: u16 = u16::MAX;

/// Experts that are given to `T` tokens in a layer: a part of the experts in all layers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GivenExperts<'a> {
    /// `[T, slots]` experts of each token in all layers, ascending in each; [`ANY_EXPERT`] where the router chooses.
    pub(crate) all: &'a [u16],
    /// Experts of a token in all layers.
    pub(crate) slots: usize,
    /// The first of them in this layer.
    pub(crate) first: usize,
}

impl<'a> GivenExperts<'a> {
    /// Those of the tokens from `token` on.
    pub(crate) fn after(self, token: usize) -> Self {
        Self { all: self.all.get(token * self.slots..).unwrap_or_default(), ..self }
    }

    /// The experts of `token` if they are `per_token` of `count`.
    fn of(self, token: usize, per_token: usize, count: usize) -> Option<&'a [u16]> {
        let experts = self.all.get(token * self.slots + self.first..)?.get(..per_token)?;
        experts.iter().all(|expert| (*expert as usize) < count).then_some(experts)
    }
}

impl ExpertRoutes {
    /// The routes for the router's `logits [T, E]`: the `k` experts of largest probability, of equal ones the first, or those that
    /// are `given`.
    pub(crate) fn new(mut logits: Vec<f32>, spec: ExpertSpec, given: Option<GivenExperts<'_>>) -> Self {
        let ExpertSpec { count, per_token, normalized } = spec;
        softmax_rows(&mut logits, count);
        let probabilities = logits;
        let tokens = probabilities.len() / count;
        let (mut experts, mut weights) = (Vec::new(), Vec::new());
        let mut counts = [0, 0];
        let mut ranking: Vec<u32> = Vec::with_capacity(count);
        for (token, row) in probabilities.chunks_exact(count).enumerate() {
            let chosen = choose(row, per_token, &mut ranking);
            if let Some(given) = given.and_then(|given| given.of(token, per_token, count)) {
                let changed = chosen.iter().zip(given).any(|(own, given)| *own != u32::from(*given));
                chosen.iter_mut().zip(given).for_each(|(own, given)| *own = u32::from(*given));
                counts = [counts[0] + 1, counts[1] + u64::from(changed)];
            }
            let total: f32 = if normalized { chosen.iter().map(|e| row[*e as usize]).sum() } else { 1.0 };
            weights.extend(chosen.iter().map(|expert| row[*expert as usize] / total));
            experts.extend_from_slice(chosen);
        }
        let [given, changed] = counts;
        let mut starts = vec![0; count + 1];
        experts.iter().for_each(|expert| starts[*expert as usize + 1] += 1);
        (0..count).for_each(|expert| starts[expert + 1] += starts[expert]);
        let mut next = starts.clone();
        let (mut rows, mut slots) = (vec![0; tokens * per_token], vec![0; tokens * per_token]);
        for (slot, expert) in experts.iter().enumerate() {
            let row = &mut next[*expert as usize];
            rows[slot] = *row as u32;
            slots[*row] = slot as u32;
            *row += 1;
        }
        Self { spec, probabilities, experts, weights, rows, slots, starts, given, changed }
    }

    /// Number of grouped rows.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Number of tokens.
    pub(crate) fn tokens(&self) -> usize {
        self.experts.len() / self.spec.per_token
    }

    /// `[E]` number of tokens of each expert.
    pub(crate) fn load(&self) -> Vec<u64> {
        self.starts.windows(2).map(|pair| (pair[1] - pair[0]) as u64).collect()
    }

    /// `[T, k]` the experts of each token, ascending.
    pub(crate) fn experts(&self) -> &[u32] {
        &self.experts
    }

    /// Tokens whose experts were given, and those of them for which the router prefers another expert.
    pub(crate) fn replayed(&self) -> [u64; 2] {
        [self.given, self.changed]
    }

    /// The experts that have tokens, each with its grouped rows.
    pub(crate) fn busy(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let rows = self.starts.windows(2).map(|pair| pair[0]..pair[1]).enumerate();
        rows.filter(|(_, rows)| !rows.is_empty())
    }

    /// The grouped rows of `expert`.
    pub(crate) fn of_expert(&self, expert: usize) -> Range<usize> {
        self.starts[expert]..self.starts[expert + 1]
    }

    /// `[rows, width]` the rows of `x [T, width]`, grouped.
    pub(crate) fn grouped(&self, x: &[f32], width: usize) -> Vec<f32> {
        let mut out = Vec::with_capacity(self.len() * width);
        for slot in &self.slots {
            out.extend_from_slice(&x[*slot as usize / self.spec.per_token * width..][..width]);
        }
        out
    }

    /// The same, each multiplied with the weight of its slot.
    pub(crate) fn weighted(&self, x: &[f32], width: usize) -> Vec<f32> {
        let mut out = self.grouped(x, width);
        for (row, slot) in out.chunks_exact_mut(width).zip(&self.slots) {
            let weight = self.weights[*slot as usize];
            row.iter_mut().for_each(|value| *value *= weight);
        }
        out
    }

    /// Adds the results `y [rows, width]` of the experts to `out [T, width]`, each with its weight.
    pub(crate) fn add_weighted(&self, y: &[f32], out: &mut [f32], width: usize) {
        let slots =
            self.rows.chunks_exact(self.spec.per_token).zip(self.weights.chunks_exact(self.spec.per_token));
        for (out, (rows, weights)) in out.chunks_exact_mut(width).zip(slots) {
            for (row, weight) in rows.iter().zip(weights) {
                add_scaled(out, &y[*row as usize * width..][..width], *weight);
            }
        }
    }

    /// Adds the gradients `y [rows, width]` of the grouped rows to those of their tokens, `out [T, width]`.
    pub(crate) fn add(&self, y: &[f32], out: &mut [f32], width: usize) {
        for (out, rows) in out.chunks_exact_mut(width).zip(self.rows.chunks_exact(self.spec.per_token)) {
            for row in rows {
                add_scaled(out, &y[*row as usize * width..][..width], 1.0);
            }
        }
    }

    /// Multiplies each row of `values [rows, width]` with the weight of its slot. Returns `[T, k]` the dot products of `values`
    /// before and `others [rows, width]`: the gradient of the weights, if they are the gradient and the value of what is weighted.
    pub(crate) fn weigh(&self, values: &mut [f32], others: &[f32], width: usize) -> Vec<f32> {
        let mut products = vec![0.0; self.len()];
        let rows = values.chunks_exact_mut(width).zip(others.chunks_exact(width));
        for ((values, others), slot) in rows.zip(&self.slots) {
            let slot = *slot as usize;
            products[slot] = super::simd::dot(values, others);
            values.iter_mut().for_each(|value| *value *= self.weights[slot]);
        }
        products
    }

    /// `[T, E]` gradient of the logits for the gradient `d_weights [T, k]` of the weights.
    pub(crate) fn backward(&self, d_weights: &[f32]) -> Vec<f32> {
        let ExpertSpec { count, per_token, normalized } = self.spec;
        let mut d_logits = vec![0.0; self.probabilities.len()];
        let tokens = self.probabilities.chunks_exact(count).zip(d_logits.chunks_exact_mut(count));
        let slots = self.experts.chunks_exact(per_token).zip(self.weights.chunks_exact(per_token));
        for (((row, d_row), (experts, weights)), d_weights) in
            tokens.zip(slots).zip(d_weights.chunks_exact(per_token))
        {
            // Of `w = p / sum(p)` over the chosen: `dp = (dw - sum(dw w)) / sum(p)`.
            let chosen = |of: &dyn Fn(usize) -> f32| (0..per_token).map(of).sum::<f32>();
            let (shift, total) = match normalized {
                true => (chosen(&|i| d_weights[i] * weights[i]), chosen(&|i| row[experts[i] as usize])),
                false => (0.0, 1.0),
            };
            let d_probability = |i: usize| (d_weights[i] - shift) / total;
            // Of the softmax: `dz = p (dp - sum(dp p))`, over all experts.
            let mean = chosen(&|i| d_probability(i) * row[experts[i] as usize]);
            d_row.iter_mut().zip(row).for_each(|(d, p)| *d = -p * mean);
            for (i, expert) in experts.iter().enumerate() {
                d_row[*expert as usize] += row[*expert as usize] * d_probability(i);
            }
        }
        d_logits
    }
}

/// The `per_token` experts of largest probability in `row [E]`, ascending; of equal ones the first.
fn choose<'a>(row: &[f32], per_token: usize, ranking: &'a mut Vec<u32>) -> &'a mut [u32] {
    ranking.clear();
    ranking.extend(0..row.len() as u32);
    let by_probability = |a: &u32, b: &u32| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b));
    if per_token < row.len() {
        ranking.select_nth_unstable_by(per_token, by_probability);
    }
    let chosen = &mut ranking[..per_token];
    chosen.sort_unstable();
    chosen
}

vectorized! {
    fn softmax_rows(logits: &mut [f32], width: usize) {
        for row in logits.chunks_exact_mut(width) {
            let top = max(row);
            let mut total = 0.0_f32;
            for z in row.iter_mut() {
                *z = exp(*z - top);
                total += *z;
            }
            for z in row.iter_mut() {
                *z /= total;
            }
        }
    }
}

vectorized! {
    fn add_scaled(out: &mut [f32], row: &[f32], scale: f32) {
        for (out, y) in out.iter_mut().zip(row) {
            *out += scale * y;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{gradient, noise, weighted};
    use super::*;

    const SPEC: ExpertSpec = ExpertSpec { count: 5, per_token: 2, normalized: true };

    #[test]
    fn every_slot_has_a_row_of_its_expert_in_the_order_of_tokens() {
        let routes = ExpertRoutes::new(noise(9 * 5, 3), SPEC, None);
        assert_eq!(routes.len(), 18);
        for (expert, rows) in routes.busy() {
            let slots = &routes.slots[rows.clone()];
            assert!(slots.windows(2).all(|pair| pair[0] < pair[1]));
            assert!(slots.iter().all(|slot| routes.experts[*slot as usize] as usize == expert));
            assert!(rows.zip(slots).all(|(row, slot)| routes.rows[*slot as usize] as usize == row));
        }
        for (weights, experts) in routes.weights.chunks(2).zip(routes.experts.chunks(2)) {
            assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6 && experts[0] < experts[1]);
        }
        let x: Vec<f32> = (0..9 * 3).map(|value| value as f32).collect();
        let mut sums = vec![0.0; x.len()];
        routes.add(&routes.grouped(&x, 3), &mut sums, 3);
        assert!(sums.iter().zip(&x).all(|(sum, x)| *sum == 2.0 * x), "both slots of a token have its row");
    }

    #[test]
    fn of_equal_probabilities_the_first_experts_are_chosen() {
        let routes = ExpertRoutes::new(vec![0.0; 10], SPEC, None);
        assert_eq!(routes.experts, [0, 1, 0, 1]);
        let both = ExpertSpec { count: 2, per_token: 2, normalized: false };
        let every = ExpertRoutes::new(vec![0.5, 0.25], both, None);
        assert_eq!(every.experts, [0, 1]);
    }

    #[test]
    fn given_experts_are_weighed_with_the_own_probabilities() {
        let logits = noise(3 * 5, 3);
        let own = ExpertRoutes::new(logits.clone(), SPEC, None);
        let first = own.experts()[..2].iter().map(|expert| *expert as u16);
        // Two layers, of which this is the second: the own experts, others, and experts that are not there.
        let all: Vec<u16> =
            [7, 7].into_iter().chain(first).chain([7, 7, 0, 4, 7, 7, ANY_EXPERT, ANY_EXPERT]).collect();
        let given = GivenExperts { all: &all, slots: 4, first: 2 };
        let routes = ExpertRoutes::new(logits, SPEC, Some(given));
        assert_eq!(routes.experts()[2..4], [0, 4]);
        assert_eq!(
            (&routes.experts()[..2], &routes.experts()[4..]),
            (&own.experts()[..2], &own.experts()[4..])
        );
        let changed = u64::from(own.experts()[2..4] != [0, 4]);
        assert_eq!(routes.replayed(), [2, changed]);
        let [first, last] = [0, 4].map(|expert| own.probabilities[5 + expert]);
        assert!((routes.weights[2] - first / (first + last)).abs() < 1e-6);
        assert_eq!(
            ExpertRoutes::new(noise(15, 3), SPEC, Some(GivenExperts { all: &all[..1], ..given })).replayed(),
            [0, 0]
        );
    }

    #[test]
    fn backward_is_the_derivative() {
        for (normalized, given) in [(true, false), (false, false), (true, true)] {
            let spec = ExpertSpec { normalized, ..SPEC };
            let all = [0, 1, 2, 3, 0, 4, 1, 2];
            let given = given.then_some(GivenExperts { all: &all, slots: 2, first: 0 });
            // Far enough apart that a small change chooses no other experts.
            let logits: Vec<f32> =
                noise(4 * 5, 11).iter().enumerate().map(|(i, z)| z + (i * 3 % 5) as f32).collect();
            let (y, c) = (noise(4 * 2 * 3, 5), noise(4 * 3, 7));
            let loss = |logits: &[f32]| {
                let mut out = vec![0.0; 4 * 3];
                ExpertRoutes::new(logits.to_vec(), spec, given).add_weighted(&y, &mut out, 3);
                weighted(&out, &c)
            };
            let routes = ExpertRoutes::new(logits.clone(), spec, given);
            let mut d_y = routes.grouped(&c, 3);
            let d_weights = routes.weigh(&mut d_y, &y, 3);
            gradient(loss, &logits, &routes.backward(&d_weights), 1e-2);
            assert_eq!(d_y, routes.weighted(&c, 3));
        }
    }
}
