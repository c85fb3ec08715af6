//! Which experts a token goes to, and the tokens of every expert (mixture of experts, Shazeer et al. 2017, arXiv 1701.06538).
//!
//! A token has `k` slots, one for each of its experts, in the order of experts. Slots are grouped by expert, and within it in the
//! order of tokens, so that the products of an expert are over neighbouring rows: there is no padding. [`chosen`] chooses the
//! experts; [`ExpertRoutes::weighed`] weighs and groups experts that are given, however they were chosen.
//!
//! The experts of a token can be given: the trainer then uses those of the sampler (routing replay, Ma et al. 2025,
//! arXiv 2510.11370). Their weights, and the gradient of the router, are those of its own logits in any case.
//!
//! Invariant: the router and its scores are f32, whatever the weights of experts are packed as. The results of a token are summed
//! in the order of experts, as transformers does.

use std::ops::Range;

use super::simd::{exp, max, vectorized};
use crate::layer::{ExpertSpec, RouterKind};

/// Routes of `T` tokens to `k` of `E` experts each.
#[derive(Clone, Debug)]
pub(crate) struct ExpertRoutes {
    spec: ExpertSpec,
    /// `[T, E]` scores of all experts.
    scores: Vec<f32>,
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

/// `[T, E]` scores for the router's `logits [T, E]`, of which weights are made: probabilities of all experts, their sigmoids, or
/// the logits themselves.
fn scores(mut logits: Vec<f32>, spec: &ExpertSpec) -> Vec<f32> {
    match spec.router {
        RouterKind::Softmax { .. } => softmax_rows(&mut logits, spec.count),
        RouterKind::Sigmoid { .. } => sigmoids(&mut logits),
        RouterKind::SoftmaxOfChosen => {}
    }
    logits
}

/// `[T, k]` the experts of each token, ascending: those with the largest `scores [T, E]`, of equal ones the first. `correction
/// [E]` is added to the scores that are compared; it is empty for none.
fn chosen(scores: &[f32], correction: &[f32], spec: &ExpertSpec) -> Vec<u32> {
    let (count, per_token) = (spec.count, spec.per_token);
    let mut experts = Vec::with_capacity(scores.len() / count * per_token);
    let (mut compared, mut ranking) = (vec![0.0; count], Vec::with_capacity(count));
    for row in scores.chunks_exact(count) {
        compared.copy_from_slice(row);
        compared.iter_mut().zip(correction).for_each(|(score, correction)| *score += correction);
        ranking.clear();
        match spec.router {
            RouterKind::Sigmoid { groups, chosen_groups, .. } if chosen_groups < groups => {
                let width = count / groups;
                for group in best_groups(&compared, width, chosen_groups) {
                    ranking.extend((group * width) as u32..((group + 1) * width) as u32);
                }
            }
            _ => ranking.extend(0..count as u32),
        }
        let by_score =
            |a: &u32, b: &u32| compared[*b as usize].total_cmp(&compared[*a as usize]).then(a.cmp(b));
        if per_token < ranking.len() {
            ranking.select_nth_unstable_by(per_token, by_score);
        }
        let best = &mut ranking[..per_token];
        best.sort_unstable();
        experts.extend_from_slice(best);
    }
    experts
}

/// The `count` groups of `width` neighbouring experts with the largest sums of their two best `scores [E]` (DeepSeek-V3, arXiv
/// 2412.19437, section 2.1.2).
fn best_groups(scores: &[f32], width: usize, count: usize) -> Vec<usize> {
    let sum_of_two = |group: &[f32]| {
        let (first, second) =
            group.iter().fold((f32::NEG_INFINITY, f32::NEG_INFINITY), |(first, second), score| {
                if *score > first { (*score, first) } else { (first, second.max(*score)) }
            });
        first + second
    };
    let sums: Vec<f32> = scores.chunks_exact(width).map(sum_of_two).collect();
    let mut groups: Vec<usize> = (0..sums.len()).collect();
    groups.sort_by(|a, b| sums[*b].total_cmp(&sums[*a]).then(a.cmp(b)));
    groups.truncate(count);
    groups
}

/// `[T, k]` what the results of the given `experts [T, k]` are multiplied with, for the `scores [T, E]` of all.
fn weights_of(scores: &[f32], experts: &[u32], spec: &ExpertSpec) -> Vec<f32> {
    let mut weights = Vec::with_capacity(experts.len());
    for (row, chosen) in scores.chunks_exact(spec.count).zip(experts.chunks_exact(spec.per_token)) {
        let scores = chosen.iter().map(|expert| row[*expert as usize]);
        match spec.router {
            RouterKind::Softmax { normalized } => {
                let total = if normalized { scores.clone().sum::<f32>() } else { 1.0 };
                weights.extend(scores.map(|score| score / total));
            }
            RouterKind::Sigmoid { normalized, scale, .. } => {
                let total = if normalized { scores.clone().sum::<f32>() + LEAST_TOTAL } else { 1.0 };
                weights.extend(scores.map(|score| score / total * scale));
            }
            RouterKind::SoftmaxOfChosen => {
                let start = weights.len();
                weights.extend(scores);
                softmax_rows(&mut weights[start..], spec.per_token);
            }
        }
    }
    weights
}

/// Added to the sum of sigmoids that divides them, which may all be 0.
const LEAST_TOTAL: f32 = 1e-20;

impl ExpertRoutes {
    /// The routes for the router's `logits [T, E]`. `correction [E]` is added to the scores that choose experts, not to those
    /// that weigh them; it is empty for none. Experts that are `given` are taken instead.
    pub(crate) fn new(
        logits: Vec<f32>,
        correction: &[f32],
        spec: ExpertSpec,
        given: Option<GivenExperts<'_>>,
    ) -> Self {
        let scores = scores(logits, &spec);
        let mut experts = chosen(&scores, correction, &spec);
        let mut counts = [0, 0];
        for (token, own) in experts.chunks_exact_mut(spec.per_token).enumerate() {
            if let Some(given) = given.and_then(|given| given.of(token, spec.per_token, spec.count)) {
                let changed = own.iter().zip(given).any(|(own, given)| *own != u32::from(*given));
                own.iter_mut().zip(given).for_each(|(own, given)| *own = u32::from(*given));
                counts = [counts[0] + 1, counts[1] + u64::from(changed)];
            }
        }
        let [given, changed] = counts;
        Self { given, changed, ..Self::weighed(experts, scores, spec) }
    }

    /// The routes to the given `experts [T, k]`, those of a token ascending, which are weighed by their `scores [T, E]`.
    fn weighed(experts: Vec<u32>, scores: Vec<f32>, spec: ExpertSpec) -> Self {
        let (count, slots_of_all) = (spec.count, experts.len());
        let weights = weights_of(&scores, &experts, &spec);
        let mut starts = vec![0; count + 1];
        experts.iter().for_each(|expert| starts[*expert as usize + 1] += 1);
        (0..count).for_each(|expert| starts[expert + 1] += starts[expert]);
        let mut next = starts.clone();
        let (mut rows, mut slots) = (vec![0; slots_of_all], vec![0; slots_of_all]);
        for (slot, expert) in experts.iter().enumerate() {
            let row = &mut next[*expert as usize];
            rows[slot] = *row as u32;
            slots[*row] = slot as u32;
            *row += 1;
        }
        Self { spec, scores, experts, weights, rows, slots, starts, given: 0, changed: 0 }
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
        self.of_experts(expert..expert + 1)
    }

    /// The grouped rows of neighbouring `experts`.
    pub(crate) fn of_experts(&self, experts: Range<usize>) -> Range<usize> {
        self.starts[experts.start]..self.starts[experts.end]
    }

    /// `[rows, width]` the rows of `x [T, width]`, grouped.
    pub(crate) fn grouped(&self, x: &[f32], width: usize) -> Vec<f32> {
        let mut out = Vec::with_capacity(self.len() * width);
        for slot in &self.slots {
            out.extend_from_slice(&x[*slot as usize / self.spec.per_token * width..][..width]);
        }
        out
    }

    /// `[rows]` the adapters of the grouped rows, of those `[T]` of the tokens; empty if no token has one.
    pub(crate) fn grouped_adapters(&self, adapters: &[Option<usize>]) -> Vec<Option<usize>> {
        let of_slot = |slot: &u32| adapters.get(*slot as usize / self.spec.per_token).copied();
        self.slots.iter().map_while(of_slot).collect()
    }

    /// `[rows]` the weight of each grouped row.
    pub(crate) fn row_weights(&self) -> Vec<f32> {
        self.slots.iter().map(|slot| self.weights[*slot as usize]).collect()
    }

    /// `[T, k]` values of slots, of those `[rows]` of the grouped rows.
    pub(crate) fn by_slot(&self, of_rows: &[f32]) -> Vec<f32> {
        self.rows.iter().map(|row| of_rows[*row as usize]).collect()
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

    /// `[T, E]` gradient of the logits for the gradient `d_weights [T, k]` of the weights. The correction has none: it chooses and
    /// does not weigh.
    pub(crate) fn backward(&self, d_weights: &[f32]) -> Vec<f32> {
        let ExpertSpec { count, per_token, router, .. } = self.spec;
        let mut d_logits = vec![0.0; self.scores.len()];
        let tokens = self.scores.chunks_exact(count).zip(d_logits.chunks_exact_mut(count));
        let slots = self.experts.chunks_exact(per_token).zip(self.weights.chunks_exact(per_token));
        for (((scores, d_logits), (experts, weights)), d_weights) in
            tokens.zip(slots).zip(d_weights.chunks_exact(per_token))
        {
            let slots = ChosenSlots { scores, experts, weights, d_weights };
            match router {
                RouterKind::Softmax { normalized } => slots.softmax_backward(normalized, d_logits),
                RouterKind::Sigmoid { normalized, scale, .. } => {
                    slots.sigmoid_backward(normalized, scale, d_logits);
                }
                RouterKind::SoftmaxOfChosen => slots.chosen_backward(d_logits),
            }
        }
        d_logits
    }
}

/// Multiplies each row of `values [rows, width]` with its weight, of `weights [rows]`.
pub(crate) fn weigh(values: &mut [f32], weights: &[f32], width: usize) {
    for (row, weight) in values.chunks_exact_mut(width).zip(weights) {
        row.iter_mut().for_each(|value| *value *= weight);
    }
}

/// `[rows]` dot products of the rows of `a` and `b`, both `[rows, width]`: the gradient of weights, if they are the gradient and the
/// value of what is weighted. Products are balanced binary trees over `chunks` of the width, a power of two.
pub(crate) fn row_products(a: &[f32], b: &[f32], width: usize, chunks: usize) -> Vec<f32> {
    let rows = a.chunks_exact(width).zip(b.chunks_exact(width));
    rows.map(|(a, b)| tree_dot(a, b, 0..chunks, chunks)).collect()
}

/// Adds the dot products of the rows `g [rows, width]` and `bias [width]` to `products [rows]`.
pub(crate) fn add_products(g: &[f32], bias: &[f32], products: &mut [f32]) {
    for (product, g) in products.iter_mut().zip(g.chunks_exact(bias.len())) {
        *product += super::simd::dot(g, bias);
    }
}

/// One token in the backward.
struct ChosenSlots<'a> {
    /// `[E]`
    scores: &'a [f32],
    /// `[k]`
    experts: &'a [u32],
    /// `[k]`
    weights: &'a [f32],
    /// `[k]`
    d_weights: &'a [f32],
}

impl ChosenSlots<'_> {
    fn score(&self, slot: usize) -> f32 {
        self.scores[self.experts[slot] as usize]
    }

    fn sum(&self, of: impl Fn(usize) -> f32) -> f32 {
        (0..self.experts.len()).map(of).sum()
    }

    /// Of `w = s / sum(s)` over the chosen: `ds = (dw - sum(dw w)) / sum(s)`, the second and third of these.
    fn shift_and_total(&self, normalized: bool) -> (f32, f32) {
        match normalized {
            true => (self.sum(|i| self.d_weights[i] * self.weights[i]), self.sum(|i| self.score(i))),
            false => (0.0, 1.0),
        }
    }

    fn softmax_backward(&self, normalized: bool, d_logits: &mut [f32]) {
        let (shift, total) = self.shift_and_total(normalized);
        let d_probability = |i: usize| (self.d_weights[i] - shift) / total;
        // Of the softmax: `dz = p (dp - sum(dp p))`, over all experts.
        let mean = self.sum(|i| d_probability(i) * self.score(i));
        d_logits.iter_mut().zip(self.scores).for_each(|(d, p)| *d = -p * mean);
        for (i, expert) in self.experts.iter().enumerate() {
            d_logits[*expert as usize] += self.score(i) * d_probability(i);
        }
    }

    /// Of the sigmoid: `dz = ds s (1 - s)`; of the factor: `dw` times it.
    fn sigmoid_backward(&self, normalized: bool, scale: f32, d_logits: &mut [f32]) {
        let (shift, total) = self.shift_and_total(normalized);
        for (i, expert) in self.experts.iter().enumerate() {
            let score = self.score(i);
            let d_score = (self.d_weights[i] * scale - shift) / (total + LEAST_TOTAL);
            d_logits[*expert as usize] = d_score * score * (1.0 - score);
        }
    }

    fn chosen_backward(&self, d_logits: &mut [f32]) {
        let mean = self.sum(|i| self.d_weights[i] * self.weights[i]);
        for (i, expert) in self.experts.iter().enumerate() {
            d_logits[*expert as usize] = self.weights[i] * (self.d_weights[i] - mean);
        }
    }
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
    fn sigmoids(logits: &mut [f32]) {
        for z in logits {
            *z = 1.0 / (1.0 + exp(-*z));
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

/// The dot product of `a [n]` and `b [n]` over some of `count` chunks, as a balanced binary tree.
fn tree_dot(a: &[f32], b: &[f32], chunks: Range<usize>, count: usize) -> f32 {
    if chunks.len() == 1 {
        let steps = chunks.start * a.len() / count..chunks.end * a.len() / count;
        return super::simd::dot(&a[steps.clone()], &b[steps]);
    }
    let middle = chunks.start + chunks.len() / 2;
    tree_dot(a, b, chunks.start..middle, count) + tree_dot(a, b, middle..chunks.end, count)
}

#[cfg(test)]
mod tests {
    use super::super::check::{gradient, noise, weighted};
    use super::*;
    use crate::layer::ExpertActivation;

    const SPEC: ExpertSpec = ExpertSpec {
        count: 6,
        per_token: 2,
        width: 3,
        router: RouterKind::Softmax { normalized: true },
        shared_width: 0,
        shared_gate: false,
        bias: false,
        fused_files: false,
        activation: ExpertActivation::SwiGlu,
    };

    fn sigmoid(normalized: bool, chosen_groups: usize) -> RouterKind {
        RouterKind::Sigmoid { normalized, groups: 3, chosen_groups, scale: 2.5 }
    }

    #[test]
    fn every_slot_has_a_row_of_its_expert_in_the_order_of_tokens() {
        let routes = ExpertRoutes::new(noise(9 * 6, 3), &[], SPEC, None);
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
    fn of_equal_scores_the_first_experts_are_chosen() {
        let routers = [SPEC.router, sigmoid(true, 2), RouterKind::SoftmaxOfChosen];
        for router in routers {
            let routes = ExpertRoutes::new(vec![0.0; 12], &[], ExpertSpec { router, ..SPEC }, None);
            assert_eq!(routes.experts, [0, 1, 0, 1], "{router:?}");
        }
        let every = ExpertSpec { count: 2, router: RouterKind::Softmax { normalized: false }, ..SPEC };
        assert_eq!(ExpertRoutes::new(vec![0.5, 0.25], &[], every, None).experts, [0, 1]);
    }

    #[test]
    fn a_correction_and_groups_choose_and_do_not_weigh() {
        let logits = vec![3.0, -1.0, 1.0, 0.9, -2.0, 2.0];
        let of = |router, correction: &[f32]| {
            let routes = ExpertRoutes::new(logits.clone(), correction, ExpertSpec { router, ..SPEC }, None);
            (routes.experts, routes.weights)
        };
        let (experts, weights) = of(sigmoid(false, 3), &[]);
        assert_eq!(experts, [0, 5]);
        // The group of experts 2 and 3 has the largest sum, though neither is among the two best.
        assert_eq!(of(sigmoid(false, 1), &[]).0, [2, 3]);
        // Of two groups, those of experts 0 and 1, and of 2 and 3, the best two.
        assert_eq!(of(sigmoid(false, 2), &[]).0, [0, 2]);
        let (corrected, corrected_weights) = of(sigmoid(false, 3), &[-1.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
        assert_eq!(corrected, [4, 5]);
        assert_eq!(corrected_weights[1], weights[1], "a weight is of the score without its correction");
        let expected = 2.5 / (1.0 + (2.0_f32).exp());
        assert!((corrected_weights[0] - expected).abs() < 1e-6, "{corrected_weights:?}");
        let (_, normalized) = of(sigmoid(true, 3), &[]);
        assert!((normalized.iter().sum::<f32>() - 2.5).abs() < 1e-6, "{normalized:?}");
        let (_, of_chosen) = of(RouterKind::SoftmaxOfChosen, &[]);
        assert!((of_chosen[0] - 1.0 / (1.0 + (-1.0_f32).exp())).abs() < 1e-6, "{of_chosen:?}");
    }

    #[test]
    fn given_experts_are_weighed_with_the_own_scores() {
        let logits = noise(3 * 6, 3);
        let own = ExpertRoutes::new(logits.clone(), &[], SPEC, None);
        let first = own.experts()[..2].iter().map(|expert| *expert as u16);
        // Two layers, of which this is the second: the own experts, others, and experts that are not there.
        let all: Vec<u16> =
            [7, 7].into_iter().chain(first).chain([7, 7, 0, 4, 7, 7, ANY_EXPERT, ANY_EXPERT]).collect();
        let given = GivenExperts { all: &all, slots: 4, first: 2 };
        let routes = ExpertRoutes::new(logits, &[], SPEC, Some(given));
        assert_eq!(routes.experts()[2..4], [0, 4]);
        assert_eq!(
            (&routes.experts()[..2], &routes.experts()[4..]),
            (&own.experts()[..2], &own.experts()[4..])
        );
        let changed = u64::from(own.experts()[2..4] != [0, 4]);
        assert_eq!(routes.replayed(), [2, changed]);
        let [first, last] = [0, 4].map(|expert| own.scores[6 + expert]);
        assert!((routes.weights[2] - first / (first + last)).abs() < 1e-6);
        let cut = GivenExperts { all: &all[..1], ..given };
        assert_eq!(ExpertRoutes::new(noise(18, 3), &[], SPEC, Some(cut)).replayed(), [0, 0]);
    }

    #[test]
    fn backward_is_the_derivative() {
        let softmax = |normalized| RouterKind::Softmax { normalized };
        for router in
            [softmax(true), softmax(false), sigmoid(true, 2), sigmoid(false, 3), RouterKind::SoftmaxOfChosen]
        {
            let spec = ExpertSpec { router, ..SPEC };
            let all = [0, 1, 2, 3, 0, 4, 1, 2];
            let given = GivenExperts { all: &all, slots: 2, first: 0 };
            for given in [None, Some(given)] {
                backward_of(spec, given);
            }
        }
    }

    fn backward_of(spec: ExpertSpec, given: Option<GivenExperts<'_>>) {
        // Far enough apart that a small change chooses no other experts.
        let logits: Vec<f32> =
            noise(4 * 6, 11).iter().enumerate().map(|(i, z)| z + (i * 5 % 7) as f32 * 0.7).collect();
        let (y, c) = (noise(4 * 2 * 3, 5), noise(4 * 3, 7));
        let loss = |logits: &[f32]| {
            let mut out = vec![0.0; 4 * 3];
            ExpertRoutes::new(logits.to_vec(), &[], spec, given).add_weighted(&y, &mut out, 3);
            weighted(&out, &c)
        };
        let routes = ExpertRoutes::new(logits.clone(), &[], spec, given);
        let d_weights = routes.by_slot(&row_products(&routes.grouped(&c, 3), &y, 3, 1));
        gradient(loss, &logits, &routes.backward(&d_weights), 1e-2);
        let mut weights = vec![1.0; 8];
        weigh(&mut weights, &routes.row_weights(), 1);
        assert_eq!(routes.by_slot(&weights), routes.weights);
    }
}
