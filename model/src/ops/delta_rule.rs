//! The recurrence of a gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): every value head has a state `S [key_dim, value_dim]`,
//! which a token decays, corrects where its key points, and reads with its query:
//! `S = decay S; S += k ((v - S^T k) strength)^T; o = S^T q`.
//!
//! It is computed in chunks of [`CHUNK`] tokens (Yang et al. 2024, arXiv 2406.06484): `S0` stays the state before the chunk, and the
//! tokens of the chunk keep their keys and updates. With `g_t` the product of decays since `S0`, and `r_ti` that of the decays after
//! token `i` up to `t`,
//! `u_t = strength_t (v_t - g_t S0^T k_t - sum_{i<t} r_ti (k_t . k_i) u_i)`, and `o_t = g_t S0^T q_t + sum_{i<=t} r_ti (q_t . k_i) u_i`;
//! a full chunk makes `S0` into `g S0 + sum_i r_i k_i u_i^T`.
//!
//! Invariant: a row depends on those before it alone, chunks begin at multiples of their length in the sequence, and every sum is one
//! chain of fused multiply-adds in ascending order. So training, which has products of whole chunks, and decoding, which adds row
//! after row to the chunk begun, have the same bits.

mod reverse;

use std::ops::Range;

pub(crate) use self::reverse::{DeltaGradients, reverse};
use super::gemm::{Right, StridedMatrix, multiply, multiply_add};
use super::simd::{dot, vectorized};
use crate::layer::DeltaNetSpec;

/// Tokens of a chunk.
pub(crate) const CHUNK: usize = 16;

/// New tokens of a chunk from which on packing a state for a product costs less than it saves.
const WORTH_PACKING: usize = 4;

/// Columns of a sum that stay in registers.
const BLOCK: usize = 64;

/// Added to the sum of squares of queries and keys under the root.
const EPS: f32 = 1e-6;

vectorized! {
    /// Divides queries and keys of `heads [T, channels]` by their lengths, and queries by the root of their width too, in place.
    pub(crate) fn normalize(heads: &mut [f32], spec: DeltaNetSpec) {
        let scale = libm::powf(spec.key_dim as f32, -0.5);
        for token in heads.chunks_exact_mut(spec.channels()) {
            for (head, x) in token.chunks_exact_mut(spec.key_dim).take(2 * spec.key_heads).enumerate() {
                let factor = inverse_length(x) * if head < spec.key_heads { scale } else { 1.0 };
                x.iter_mut().for_each(|x| *x *= factor);
            }
        }
    }
}

vectorized! {
    /// Turns the gradient `g [T, channels]` of what [`normalize`] gives into that of the `raw`, in place.
    pub(crate) fn normalize_backward(raw: &[f32], spec: DeltaNetSpec, g: &mut [f32]) {
        let scale = libm::powf(spec.key_dim as f32, -0.5);
        for (raw, g) in raw.chunks_exact(spec.channels()).zip(g.chunks_exact_mut(spec.channels())) {
            let heads = raw.chunks_exact(spec.key_dim).zip(g.chunks_exact_mut(spec.key_dim));
            for (head, (x, g)) in heads.take(2 * spec.key_heads).enumerate() {
                let inverse = inverse_length(x);
                let factor = inverse * if head < spec.key_heads { scale } else { 1.0 };
                let along = dot(x, g) * inverse * inverse;
                g.iter_mut().zip(x).for_each(|(g, x)| *g = (*g - along * x) * factor);
            }
        }
    }
}

#[inline(always)]
fn inverse_length(x: &[f32]) -> f32 {
    1.0 / (dot(x, x) + EPS).sqrt()
}

/// Tokens as the recurrence reads them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeltaTokens<'a> {
    pub(crate) spec: DeltaNetSpec,
    /// `[T, channels]` normalised queries and keys, and values.
    pub(crate) heads: &'a [f32],
    /// `[T, 2 value_heads]` strengths of updates, then factors of decay.
    pub(crate) gates: &'a [f32],
}

/// What one token gives to one value head.
#[derive(Clone, Copy)]
struct HeadToken<'a> {
    query: &'a [f32],
    key: &'a [f32],
    value: &'a [f32],
    strength: f32,
    decay: f32,
}

impl DeltaTokens<'_> {
    fn len(&self) -> usize {
        self.gates.len() / (2 * self.spec.value_heads)
    }

    #[inline(always)]
    fn head(&self, token: usize, head: usize) -> HeadToken<'_> {
        let DeltaNetSpec { value_heads, key_dim, value_dim, .. } = self.spec;
        let row = &self.heads[token * self.spec.channels()..][..self.spec.channels()];
        let of_key = head / self.spec.group() * key_dim;
        let gates = &self.gates[token * 2 * value_heads..];
        HeadToken {
            query: &row[of_key..][..key_dim],
            key: &row[self.spec.key_width() + of_key..][..key_dim],
            value: &row[2 * self.spec.key_width() + head * value_dim..][..value_dim],
            strength: gates[head],
            decay: gates[value_heads + head],
        }
    }

    /// `[2 n, key_dim]` the queries, then the keys, of some tokens for a value head.
    #[inline(always)]
    fn pairs(&self, tokens: Range<usize>, head: usize, pairs: &mut Vec<f32>) {
        pairs.clear();
        tokens.clone().for_each(|token| pairs.extend_from_slice(self.head(token, head).query));
        tokens.for_each(|token| pairs.extend_from_slice(self.head(token, head).key));
    }
}

/// The states of a sequence in one layer, in parts of the values that it keeps ([`state_len`]).
#[derive(Debug)]
pub(crate) struct DeltaState<'a> {
    /// `[value_heads, key_dim, value_dim]` before the chunk begun.
    states: &'a mut [f32],
    /// `[key_heads, key_dim, CHUNK]` keys of the chunk begun.
    keys: &'a mut [f32],
    /// `[value_heads, CHUNK, value_dim]` its updates.
    updates: &'a mut [f32],
    /// `[value_heads, CHUNK]` the product of the decays after each of its tokens.
    ratios: &'a mut [f32],
    /// `[value_heads]` the product of all its decays.
    totals: &'a mut [f32],
    /// The number of its tokens.
    rows: &'a mut f32,
}

/// Values of the states of a sequence in one layer.
pub(crate) fn state_len(spec: DeltaNetSpec) -> usize {
    let of_chunk = spec.key_width() + spec.value_width() + spec.value_heads;
    spec.heads_len() + of_chunk * CHUNK + spec.value_heads + 1
}

impl<'a> DeltaState<'a> {
    /// The parts of `values`.
    ///
    /// # Panics
    /// If there are not [`state_len`] values.
    pub(crate) fn of(spec: DeltaNetSpec, values: &'a mut [f32]) -> Self {
        assert_eq!(values.len(), state_len(spec), "the values of a state");
        let (states, rest) = values.split_at_mut(spec.heads_len());
        let (keys, rest) = rest.split_at_mut(spec.key_width() * CHUNK);
        let (updates, rest) = rest.split_at_mut(spec.value_width() * CHUNK);
        let (ratios, rest) = rest.split_at_mut(spec.value_heads * CHUNK);
        let (totals, rows) = rest.split_at_mut(spec.value_heads);
        if rows[0] == 0.0 {
            totals.fill(1.0);
        }
        Self { states, keys, updates, ratios, totals, rows: &mut rows[0] }
    }

    /// `[value_heads, key_dim, value_dim]` the states after the last token.
    pub(crate) fn folded(&self, spec: DeltaNetSpec) -> Vec<f32> {
        let (mut states, rows) = (self.states.to_vec(), *self.rows as usize);
        let size = spec.key_dim * spec.value_dim;
        for (head, state) in states.chunks_exact_mut(size).enumerate().take_while(|_| rows > 0) {
            let part = ChunkPart {
                keys: &self.keys[head / spec.group() * spec.key_dim * CHUNK..],
                updates: &self.updates[head * CHUNK * spec.value_dim..][..rows * spec.value_dim],
                ratios: &self.ratios[head * CHUNK..][..rows],
                total: self.totals[head],
            };
            fold(&part, state, &mut Vec::new());
        }
        states
    }
}

/// What some tokens of a chunk add to the state before them.
struct ChunkPart<'a> {
    /// `[key_dim, CHUNK]`, of which the first `rows` columns are read.
    keys: &'a [f32],
    /// `[rows, value_dim]`
    updates: &'a [f32],
    /// `[rows]`
    ratios: &'a [f32],
    total: f32,
}

/// Makes `state [key_dim, value_dim]` that after the tokens of `part`.
#[inline(always)]
fn fold(part: &ChunkPart<'_>, state: &mut [f32], scaled: &mut Vec<f32>) {
    let (rows, width) = (part.ratios.len(), part.updates.len() / part.ratios.len());
    scaled.clear();
    for (updates, ratio) in part.updates.chunks_exact(width).zip(part.ratios) {
        scaled.extend(updates.iter().map(|update| ratio * update));
    }
    state.iter_mut().for_each(|x| *x *= part.total);
    let keys = StridedMatrix::strided(part.keys, state.len() / width, rows, CHUNK);
    multiply_add(keys, Right::Unpacked(StridedMatrix::new(scaled, width)), state);
}

/// `out [columns] += weights [rows] x values [rows, columns]`.
#[inline(always)]
fn combine(weights: &[f32], values: &[f32], out: &mut [f32]) {
    let width = out.len();
    combine_each([weights], values, width, [out]);
}

/// The sums of [`combine`] for several rows of weights, in one pass over the values.
#[inline(always)]
fn combine_each<const N: usize>(weights: [&[f32]; N], values: &[f32], width: usize, out: [&mut [f32]; N]) {
    let mut out = out;
    let rows = weights[0].len().min(values.len() / width);
    let weights = weights.map(|weights| &weights[..rows]);
    let blocks = width / BLOCK * BLOCK;
    for first in (0..blocks).step_by(BLOCK) {
        let mut sums = [[0.0_f32; BLOCK]; N];
        for (sums, out) in sums.iter_mut().zip(&out) {
            sums.copy_from_slice(&out[first..][..BLOCK]);
        }
        for (row, values) in values.chunks_exact(width).take(rows).enumerate() {
            let Some(values) = values[first..][..BLOCK].as_array::<BLOCK>() else { continue };
            for (sums, weights) in sums.iter_mut().zip(&weights) {
                let weight = weights[row];
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum = weight.mul_add(*value, *sum);
                }
            }
        }
        for (sums, out) in sums.iter().zip(&mut out) {
            out[first..][..BLOCK].copy_from_slice(sums);
        }
    }
    for (weights, out) in weights.iter().zip(&mut out) {
        for (weight, row) in weights.iter().zip(values.chunks_exact(width)) {
            for (sum, value) in out[blocks..].iter_mut().zip(&row[blocks..]) {
                *sum = weight.mul_add(*value, *sum);
            }
        }
    }
}

/// `out [rows, columns] = left [rows, inner] x right [inner, columns]`, with the bits of a row alone.
#[inline(always)]
fn rows_product(left: &[f32], right: &[f32], inner: usize, out: &mut [f32]) {
    let columns = right.len() / inner;
    if left.len() >= 2 * WORTH_PACKING * inner {
        let right = Right::Unpacked(StridedMatrix::new(right, columns));
        return multiply(StridedMatrix::new(left, inner), right, out);
    }
    out.fill(0.0);
    // An even number of rows: queries and keys.
    for (left, out) in left.chunks_exact(2 * inner).zip(out.chunks_exact_mut(2 * columns)) {
        let ([a, b], [out_a, out_b]) = (left.split_at(inner).into(), out.split_at_mut(columns).into());
        combine_each([a, b], right, columns, [out_a, out_b]);
    }
}

/// Buffers of one piece of a chunk.
#[derive(Default)]
struct PieceBuffers {
    /// `[2 n, key_dim]` queries, then keys.
    pairs: Vec<f32>,
    /// `[2 n, CHUNK]` their products with the keys of the chunk.
    dots: Vec<f32>,
    /// `[2 n, value_dim]` what they read of the state before the chunk.
    reads: Vec<f32>,
    scaled: Vec<f32>,
}

vectorized! {
    /// Advances `state` by all tokens, and reads it to `out [T, values]`.
    pub(crate) fn advance(tokens: DeltaTokens<'_>, state: DeltaState<'_>, out: &mut [f32]) {
        let (mut pieces, mut state) = (PieceBuffers::default(), state);
        let (mut first, len) = (0, tokens.len());
        while first < len {
            let end = len.min(first + CHUNK - *state.rows as usize);
            advance_piece(tokens, first..end, &mut state, out, &mut pieces);
            first = end;
        }
    }
}

/// Advances `state` by `piece`, tokens of one chunk.
#[inline(always)]
fn advance_piece(
    tokens: DeltaTokens<'_>,
    piece: Range<usize>,
    state: &mut DeltaState<'_>,
    out: &mut [f32],
    PieceBuffers { pairs, dots, reads, scaled }: &mut PieceBuffers,
) {
    let DeltaNetSpec { key_dim, value_dim, .. } = tokens.spec;
    let (before, count) = (*state.rows as usize, piece.len());
    let (rows, width) = (before + count, tokens.spec.value_width());
    dots.resize(2 * count * CHUNK, 0.0);
    reads.resize(2 * count * value_dim, 0.0);
    for head in 0..tokens.spec.value_heads {
        let keys = &mut state.keys[head / tokens.spec.group() * key_dim * CHUNK..][..key_dim * CHUNK];
        if head % tokens.spec.group() == 0 {
            tokens.pairs(piece.clone(), head, pairs);
            for (row, key) in (before..).zip(pairs[count * key_dim..].chunks_exact(key_dim)) {
                keys[row..].iter_mut().step_by(CHUNK).zip(key).for_each(|(slot, key)| *slot = *key);
            }
            rows_product(pairs, keys, key_dim, dots);
        }
        let own = &mut state.states[head * key_dim * value_dim..][..key_dim * value_dim];
        rows_product(pairs, own, key_dim, reads);
        let updates = &mut state.updates[head * CHUNK * value_dim..][..rows * value_dim];
        let ratios = &mut state.ratios[head * CHUNK..][..rows];
        for (at, token) in piece.clone().enumerate() {
            let (of, row) = (tokens.head(token, head), before + at);
            state.totals[head] *= of.decay;
            ratios[..row].iter_mut().for_each(|ratio| *ratio *= of.decay);
            ratios[row] = 1.0;
            let total = state.totals[head];
            let weights = |dots: &[f32]| {
                let mut weights = [0.0; CHUNK];
                weights.iter_mut().zip(dots).zip(&*ratios).for_each(|((w, dot), ratio)| *w = dot * ratio);
                weights
            };
            let (known, rest) = updates.split_at_mut(row * value_dim);
            let update = &mut rest[..value_dim];
            let of_key = count + at;
            let read = &reads[of_key * value_dim..][..value_dim];
            update.iter_mut().zip(read).for_each(|(update, read)| *update = total * read);
            combine(&weights(&dots[of_key * CHUNK..][..row]), known, update);
            update.iter_mut().zip(of.value).for_each(|(u, value)| *u = (value - *u) * of.strength);
            let out = &mut out[token * width + head * value_dim..][..value_dim];
            let read = &reads[at * value_dim..][..value_dim];
            out.iter_mut().zip(read).for_each(|(out, read)| *out = total * read);
            combine(&weights(&dots[at * CHUNK..][..=row]), &updates[..(row + 1) * value_dim], out);
        }
        if rows == CHUNK {
            let part = ChunkPart { keys, updates, ratios, total: state.totals[head] };
            fold(&part, own, scaled);
            state.totals[head] = 1.0;
        }
    }
    *state.rows = (rows % CHUNK) as f32;
}

#[cfg(test)]
mod tests {
    use super::super::check::{gradient, noise, weighted};
    use super::*;
    use crate::layer::DeltaNetFiles;

    const SPEC: DeltaNetSpec = DeltaNetSpec {
        key_heads: 2,
        value_heads: 4,
        key_dim: 5,
        value_dim: 7,
        taps: 4,
        files: DeltaNetFiles::Apart,
    };

    /// More than two chunks.
    const TOKENS: usize = 2 * CHUNK + 5;

    /// Normalised heads, and gates between 0 and 1.
    fn tokens(len: usize) -> (Vec<f32>, Vec<f32>) {
        let mut heads = noise(len * SPEC.channels(), 1);
        normalize(&mut heads, SPEC);
        let gates = noise(len * 2 * SPEC.value_heads, 2);
        (heads, gates.into_iter().map(|gate| 0.6 + 0.35 * gate).collect())
    }

    /// A state at the beginning of a chunk.
    fn begun() -> Vec<f32> {
        let mut values = noise(SPEC.heads_len(), 3);
        values.resize(state_len(SPEC), 0.0);
        values
    }

    fn read(heads: &[f32], gates: &[f32], states: &mut [f32]) -> Vec<f32> {
        let mut out = vec![7.0; heads.len() / SPEC.channels() * SPEC.value_width()];
        advance(DeltaTokens { spec: SPEC, heads, gates }, DeltaState::of(SPEC, states), &mut out);
        out
    }

    /// The recurrence in f64, as its formula says.
    #[test]
    fn states_follow_the_formula() {
        let (heads, gates) = tokens(TOKENS);
        let mut states = begun();
        let mut exact: Vec<f64> = states[..SPEC.heads_len()].iter().map(|x| f64::from(*x)).collect();
        let out = read(&heads, &gates, &mut states);
        let of = DeltaTokens { spec: SPEC, heads: &heads, gates: &gates };
        let at = |i: usize, j: usize| i * SPEC.value_dim + j;
        for head in 0..SPEC.value_heads {
            let state = &mut exact[head * 35..][..35];
            for token in 0..TOKENS {
                let HeadToken { query, key, value, strength, decay } = of.head(token, head);
                state.iter_mut().for_each(|x| *x *= f64::from(decay));
                for j in 0..SPEC.value_dim {
                    let known: f64 = (0..SPEC.key_dim).map(|i| f64::from(key[i]) * state[at(i, j)]).sum();
                    let update = (f64::from(value[j]) - known) * f64::from(strength);
                    (0..SPEC.key_dim).for_each(|i| state[at(i, j)] += f64::from(key[i]) * update);
                    let expected: f64 =
                        (0..SPEC.key_dim).map(|i| f64::from(query[i]) * state[at(i, j)]).sum();
                    let found = out[token * SPEC.value_width() + head * SPEC.value_dim + j];
                    assert!((f64::from(found) - expected).abs() < 1e-5, "{found}, not {expected}");
                }
            }
        }
    }

    #[test]
    fn pieces_of_a_sequence_have_the_bits_of_the_whole() {
        let (heads, gates) = tokens(40);
        let mut whole = begun();
        let mut state = whole.clone();
        let expected = read(&heads, &gates, &mut whole);
        let mut pieces = Vec::new();
        let (channels, of_gates) = (SPEC.channels(), 2 * SPEC.value_heads);
        for piece in [0..1, 1..17, 17..18, 18..40] {
            let heads = &heads[piece.start * channels..piece.end * channels];
            pieces.extend(read(heads, &gates[piece.start * of_gates..piece.end * of_gates], &mut state));
        }
        assert_eq!(pieces, expected);
        assert_eq!(state, whole);
    }

    #[test]
    fn backward_is_the_derivative() {
        // One chunk, and more of them with a rest.
        for len in [3, 2 * CHUNK + 3] {
            let (heads, gates) = tokens(len);
            let states = noise(SPEC.heads_len(), 3);
            let (c, of_states) = (noise(len * SPEC.value_width(), 4), noise(states.len(), 5));
            let loss = |heads: &[f32], gates: &[f32], states: &[f32]| {
                let mut states = states.to_vec();
                states.resize(state_len(SPEC), 0.0);
                let out = read(heads, gates, &mut states);
                let after = DeltaState::of(SPEC, &mut states).folded(SPEC);
                weighted(&out, &c) + weighted(&after, &of_states)
            };
            let mut d_states = of_states.clone();
            let (mut d_heads, mut d_gates) = (vec![0.0; heads.len()], vec![9.0; gates.len()]);
            let tokens = DeltaTokens { spec: SPEC, heads: &heads, gates: &gates };
            let gradients =
                DeltaGradients { states: &mut d_states, heads: &mut d_heads, gates: &mut d_gates };
            reverse(tokens, &states, &c, gradients);
            // Those of the logarithms of the decays.
            for (d_gates, gates) in d_gates.chunks_exact_mut(8).zip(gates.chunks_exact(8)) {
                d_gates[4..].iter_mut().zip(&gates[4..]).for_each(|(g, decay)| *g /= decay);
            }
            gradient(|x| loss(x, &gates, &states), &heads, &d_heads, 1e-2);
            gradient(|x| loss(&heads, x, &states), &gates, &d_gates, 1e-2);
            gradient(|x| loss(&heads, &gates, x), &states, &d_states, 1e-2);
        }
    }

    #[test]
    fn the_backward_of_lengths_is_the_derivative() {
        let (raw, c) = (noise(3 * SPEC.channels(), 1), noise(3 * SPEC.channels(), 2));
        let loss = |x: &[f32]| {
            let mut x = x.to_vec();
            normalize(&mut x, SPEC);
            weighted(&x, &c)
        };
        let mut g = c.clone();
        normalize_backward(&raw, SPEC, &mut g);
        gradient(loss, &raw, &g, 1e-2);
    }
}
