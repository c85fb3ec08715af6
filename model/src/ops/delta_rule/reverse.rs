//! Backward of the recurrence of a gated DeltaNet, in chunks as its forward (Yang et al. 2024, arXiv 2412.06464).
//!
//! Invariant: the gradients are the exact vector-Jacobian product of the forward. Chunks begin with the first token here, not where the
//! sequence has them: that changes the rounding of a gradient, and nothing else. No gradient is divided by a decay, which may be 0.

use std::ops::Range;

use super::super::gemm::{Right, StridedMatrix, multiply, multiply_add};
use super::super::simd::{dot, vectorized};
use super::{CHUNK, DeltaTokens, combine};
use crate::layer::DeltaNetSpec;

/// Gradients of the recurrence.
#[derive(Debug)]
pub(crate) struct DeltaGradients<'a> {
    /// `[value_heads, key_dim, value_dim]` gradient of the states after all tokens, which becomes that of those before.
    pub(crate) states: &'a mut [f32],
    /// `[T, channels]` of the heads; added to.
    pub(crate) heads: &'a mut [f32],
    /// `[T, 2 value_heads]` of the strengths, then of the logarithms of the decays; overwritten.
    pub(crate) gates: &'a mut [f32],
}

vectorized! {
    /// Backward of [`advance`](super::advance) from `states [value_heads, key_dim, value_dim]` for the gradient `g [T, values]` of what
    /// was read.
    pub(crate) fn reverse(tokens: DeltaTokens<'_>, states: &[f32], g: &[f32], gradients: DeltaGradients<'_>) {
        let DeltaNetSpec { value_heads, key_dim, value_dim, .. } = tokens.spec;
        let (len, size) = (tokens.len(), key_dim * value_dim);
        let mut gradients = gradients;
        for head in 0..value_heads {
            let mut state = states[head * size..][..size].to_vec();
            let mut chunks = Vec::with_capacity(len.div_ceil(CHUNK));
            for first in (0..len).step_by(CHUNK) {
                let chunk = HeadChunk::new(tokens, first..len.min(first + CHUNK), head, &state);
                if chunk.tokens.end < len {
                    chunk.fold(&mut state);
                }
                chunks.push(chunk);
            }
            while let Some(chunk) = chunks.pop() {
                chunk.reverse(tokens, head, g, &mut gradients);
            }
        }
    }
}

/// One chunk in one value head: what its backward reads. `n` tokens, fewer than [`CHUNK`] in the last.
struct HeadChunk {
    tokens: Range<usize>,
    /// `[key_dim, value_dim]` before the chunk.
    state: Vec<f32>,
    /// `[2 n, key_dim]` queries, then keys.
    pairs: Vec<f32>,
    /// `[2 n, n]` products of queries, then of keys, with the keys.
    dots: Vec<f32>,
    /// `[2 n, value_dim]` what queries, then keys, read of the state.
    reads: Vec<f32>,
    /// `[n, n]` the product of the decays after the token of the column up to that of the row; 0 for later columns.
    ratios: Vec<f32>,
    /// `[n]` the product of the decays up to each token.
    totals: Vec<f32>,
    /// `[n, value_dim]` what values differ from what was predicted.
    errors: Vec<f32>,
    /// `[n, value_dim]`
    updates: Vec<f32>,
}

/// The transpose of `values [rows, columns]` as the right matrix of a product.
fn turned(values: &[f32], columns: usize) -> Right<'_> {
    Right::Unpacked(StridedMatrix::new(values, columns).transposed())
}

fn plain(values: &[f32], columns: usize) -> Right<'_> {
    Right::Unpacked(StridedMatrix::new(values, columns))
}

impl HeadChunk {
    #[inline(always)]
    fn new(all: DeltaTokens<'_>, tokens: Range<usize>, head: usize, state: &[f32]) -> Self {
        let DeltaNetSpec { key_dim, value_dim, .. } = all.spec;
        let n = tokens.len();
        let mut pairs = Vec::with_capacity(2 * n * key_dim);
        all.pairs(tokens.clone(), head, &mut pairs);
        let left = StridedMatrix::new(&pairs, key_dim);
        let (mut dots, mut reads) = (vec![0.0; 2 * n * n], vec![0.0; 2 * n * value_dim]);
        multiply(left, turned(&pairs[n * key_dim..], key_dim), &mut dots);
        multiply(left, plain(state, value_dim), &mut reads);
        let (mut ratios, mut totals) = (vec![0.0; n * n], Vec::with_capacity(n));
        let (mut errors, mut updates) = (vec![0.0; n * value_dim], vec![0.0; n * value_dim]);
        let mut total = 1.0;
        for (row, token) in tokens.clone().enumerate() {
            let of = all.head(token, head);
            total *= of.decay;
            totals.push(total);
            let (before, own) = ratios.split_at_mut(row * n);
            let last = before.len().saturating_sub(n);
            own[..row].iter_mut().zip(&before[last..]).for_each(|(ratio, before)| *ratio = before * of.decay);
            own[row] = 1.0;
            let mut weights = [0.0; CHUNK];
            let of_dots = &dots[(n + row) * n..][..row];
            weights.iter_mut().zip(of_dots).zip(&*own).for_each(|((w, dot), ratio)| *w = dot * ratio);
            let error = &mut errors[row * value_dim..][..value_dim];
            let read = &reads[(n + row) * value_dim..][..value_dim];
            error.iter_mut().zip(read).for_each(|(error, read)| *error = total * read);
            let (known, rest) = updates.split_at_mut(row * value_dim);
            combine(&weights, known, error);
            error.iter_mut().zip(of.value).for_each(|(error, value)| *error = value - *error);
            rest.iter_mut().zip(error).for_each(|(update, error)| *update = *error * of.strength);
        }
        Self { tokens, state: state.to_vec(), pairs, dots, reads, ratios, totals, errors, updates }
    }

    /// Product of the decays after each token up to the last.
    fn last_ratios(&self) -> &[f32] {
        &self.ratios[(self.tokens.len() - 1) * self.tokens.len()..]
    }

    /// The product of all decays.
    fn total(&self) -> f32 {
        self.totals[self.tokens.len() - 1]
    }

    /// The queries, then the keys: `[n, key_dim]` each.
    fn halves(&self) -> (&[f32], &[f32]) {
        self.pairs.split_at(self.pairs.len() / 2)
    }

    /// Makes `state`, that before the chunk, the one after it.
    #[inline(always)]
    fn fold(&self, state: &mut [f32]) {
        let n = self.tokens.len();
        let (key_dim, value_dim) = (self.pairs.len() / 2 / n, self.updates.len() / n);
        let mut scaled = self.updates.clone();
        scale_rows(&mut scaled, self.last_ratios());
        let total = self.total();
        state.iter_mut().for_each(|x| *x *= total);
        let keys = StridedMatrix::new(self.halves().1, key_dim).transposed();
        multiply_add(keys, plain(&scaled, value_dim), state);
    }

    /// Turns the gradient of the state after the chunk into that of the state before, and writes those of its tokens.
    #[inline(always)]
    fn reverse(&self, all: DeltaTokens<'_>, head: usize, g: &[f32], gradients: &mut DeltaGradients<'_>) {
        let spec = all.spec;
        let DeltaNetSpec { key_dim, value_dim, .. } = spec;
        let n = self.tokens.len();
        let d_state = &mut gradients.states[head * self.state.len()..][..self.state.len()];
        // [2 n, value_dim] gradients of what queries read, and the negative ones of the errors.
        let mut d_reads = Vec::with_capacity(2 * n * value_dim);
        for token in self.tokens.clone() {
            d_reads.extend_from_slice(&g[token * spec.value_width() + head * value_dim..][..value_dim]);
        }
        let mut d_updates = self.updates_backward(&d_reads, d_state);
        let mut sums = DecayGradients::new(self, d_state);
        let mut d_pairs = vec![0.0; 2 * n * key_dim];
        self.last_update_backward(d_state, &mut sums, &mut d_pairs[n * key_dim..]);
        for (row, token) in self.tokens.clone().enumerate().rev() {
            let strength = all.head(token, head).strength;
            let (before, own) = d_updates.split_at_mut(row * value_dim);
            let own = &mut own[..value_dim];
            gradients.gates[token * 2 * spec.value_heads + head] =
                dot(own, &self.errors[row * value_dim..][..value_dim]);
            own.iter_mut().for_each(|g| *g *= strength);
            for (at, before) in before.chunks_exact_mut(value_dim).enumerate() {
                let weight = -self.ratios[row * n + at] * self.dots[(n + row) * n + at];
                before.iter_mut().zip(&*own).for_each(|(sum, g)| *sum = weight.mul_add(*g, *sum));
            }
        }
        // These are the gradients of the errors now, which are those of the values.
        d_reads.extend(d_updates.iter().map(|g| -g));
        let mut d_dots = vec![0.0; 2 * n * n];
        multiply(StridedMatrix::new(&d_reads, value_dim), turned(&self.updates, value_dim), &mut d_dots);
        self.ratios_backward(&mut d_dots, &mut sums);
        for (at, g) in d_reads.chunks_exact_mut(value_dim).enumerate() {
            let total = self.totals[at % n];
            sums.add(at % n, total * dot(g, &self.reads[at * value_dim..][..value_dim]));
            g.iter_mut().for_each(|g| *g *= total);
        }
        multiply_add(StridedMatrix::new(&d_reads, value_dim), turned(&self.state, value_dim), &mut d_pairs);
        self.dots_backward(&d_dots, &mut d_pairs);
        let total = self.total();
        d_state.iter_mut().for_each(|g| *g *= total);
        let pairs = StridedMatrix::new(&self.pairs, key_dim).transposed();
        multiply_add(pairs, plain(&d_reads, value_dim), d_state);
        let of_key = head / spec.group() * key_dim;
        for (row, token) in self.tokens.clone().enumerate() {
            let heads = &mut gradients.heads[token * spec.channels()..][..spec.channels()];
            let (queries, rest) = heads.split_at_mut(spec.key_width());
            let (keys, values) = rest.split_at_mut(spec.key_width());
            add(&mut queries[of_key..][..key_dim], &d_pairs[row * key_dim..]);
            add(&mut keys[of_key..][..key_dim], &d_pairs[(n + row) * key_dim..]);
            add(&mut values[head * value_dim..][..value_dim], &d_updates[row * value_dim..]);
            gradients.gates[token * 2 * spec.value_heads + spec.value_heads + head] = sums.logs[row];
        }
    }

    /// `[n, value_dim]` gradients of the updates from what is read after them, `d_out [n, value_dim]`, and from the state after the chunk.
    #[inline(always)]
    fn updates_backward(&self, d_out: &[f32], d_state: &[f32]) -> Vec<f32> {
        let n = self.tokens.len();
        let (key_dim, value_dim) = (self.pairs.len() / 2 / n, self.updates.len() / n);
        let mut d_updates = vec![0.0; n * value_dim];
        multiply(StridedMatrix::new(self.halves().1, key_dim), plain(d_state, value_dim), &mut d_updates);
        scale_rows(&mut d_updates, self.last_ratios());
        let weights: Vec<f32> = self.ratios.iter().zip(&self.dots).map(|(ratio, dot)| ratio * dot).collect();
        let weights = StridedMatrix::new(&weights, n).transposed();
        multiply_add(weights, plain(d_out, value_dim), &mut d_updates);
        d_updates
    }

    /// Gradients of the keys, `d_keys [n, key_dim]`, and of the decays in the state after the chunk.
    #[inline(always)]
    fn last_update_backward(&self, d_state: &[f32], sums: &mut DecayGradients, d_keys: &mut [f32]) {
        let n = self.tokens.len();
        let (key_dim, value_dim) = (self.pairs.len() / 2 / n, self.updates.len() / n);
        multiply(StridedMatrix::new(&self.updates, value_dim), turned(d_state, value_dim), d_keys);
        scale_rows(d_keys, self.last_ratios());
        let keys = self.halves().1.chunks_exact(key_dim);
        for (at, (d_key, key)) in d_keys.chunks_exact(key_dim).zip(keys).enumerate() {
            sums.after[(n - 1) * n + at] += dot(d_key, key);
        }
    }

    /// Makes `d_dots [2 n, n]`, the gradients of the products with their ratios, those of the products.
    #[inline(always)]
    fn ratios_backward(&self, d_dots: &mut [f32], sums: &mut DecayGradients) {
        let n = self.tokens.len();
        let (of_queries, of_keys) = d_dots.split_at_mut(n * n);
        // A token's update has the keys before it, and not its own.
        (0..n).for_each(|row| of_keys[row * n + row] = 0.0);
        for (half, d_dots) in [of_queries, of_keys].into_iter().enumerate() {
            let dots = &self.dots[half * n * n..][..n * n];
            let known = d_dots.iter_mut().zip(&self.ratios).zip(dots).zip(&mut sums.after);
            for (((g, ratio), dot), after) in known {
                *g *= ratio;
                *after = g.mul_add(*dot, *after);
            }
        }
        sums.spread();
    }

    /// Adds to `d_pairs [2 n, key_dim]` the gradients through the products, `d_dots [2 n, n]`.
    #[inline(always)]
    fn dots_backward(&self, d_dots: &[f32], d_pairs: &mut [f32]) {
        let n = self.tokens.len();
        let key_dim = self.pairs.len() / 2 / n;
        let keys = self.halves().1;
        let d_dots = StridedMatrix::new(d_dots, n);
        multiply_add(d_dots, plain(keys, key_dim), d_pairs);
        multiply_add(d_dots.transposed(), plain(&self.pairs, key_dim), &mut d_pairs[n * key_dim..]);
    }
}

/// Gradients of the logarithms of the decays of a chunk.
struct DecayGradients {
    /// `[n]`
    logs: Vec<f32>,
    /// `[n, n]` those of the products of the decays after the token of the column up to that of the row.
    after: Vec<f32>,
}

impl DecayGradients {
    /// With what the state after the chunk has of the one before.
    #[inline(always)]
    fn new(chunk: &HeadChunk, d_state: &[f32]) -> Self {
        let n = chunk.tokens.len();
        let whole = chunk.total() * dot(d_state, &chunk.state);
        Self { logs: vec![whole; n], after: vec![0.0; n * n] }
    }

    /// Adds the gradient of the product of the decays up to token `row`.
    fn add(&mut self, row: usize, g: f32) {
        self.logs[..=row].iter_mut().for_each(|sum| *sum += g);
    }

    /// Adds the gradients of the products to each of their decays.
    fn spread(&mut self) {
        let n = self.logs.len();
        for (row, after) in self.after.chunks_exact(n).enumerate() {
            let mut sum = 0.0;
            for (log, g) in self.logs[..=row].iter_mut().zip(after) {
                *log += sum;
                sum += g;
            }
        }
    }
}

/// Multiplies each row of `values` with its factor.
#[inline(always)]
fn scale_rows(values: &mut [f32], factors: &[f32]) {
    let width = values.len() / factors.len();
    for (row, factor) in values.chunks_exact_mut(width).zip(factors) {
        row.iter_mut().for_each(|x| *x *= factor);
    }
}

#[inline(always)]
fn add(sums: &mut [f32], values: &[f32]) {
    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
}
