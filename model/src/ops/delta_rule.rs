//! The recurrence of a gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): every value head has a state `S [key_dim, value_dim]`,
//! which a token decays, corrects where its key points, and reads with its query:
//! `S = decay S; S += k ((v - S^T k) strength)^T; o = S^T q`.
//!
//! Training computes it token by token, as decoding does, so that both have the same bits; a product of chunks, as GPUs prefer it,
//! would round otherwise. The backward keeps the state of every [`CHUNK`]th token and computes those between again, so that its
//! memory is that of few states (Chen et al. 2016, arXiv 1604.06174).

use super::simd::{dot, vectorized};
use crate::layer::DeltaNetSpec;

/// Tokens whose states the backward has at a time.
pub(crate) const CHUNK: usize = 32;

/// Added to the sum of squares of queries and keys under the root.
const EPS: f32 = 1e-6;

vectorized! {
    /// Divides queries and keys of `heads [T, channels]` by their lengths, and queries by the root of their width too, in place.
    pub(crate) fn normalize(heads: &mut [f32], spec: DeltaNetSpec) {
        let scale = (spec.key_dim as f32).powf(-0.5);
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
        let scale = (spec.key_dim as f32).powf(-0.5);
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
}

vectorized! {
    /// Advances the states `[value_heads, key_dim, value_dim]` by all tokens, and reads them to `out [T, values]`.
    pub(crate) fn advance(tokens: DeltaTokens<'_>, states: &mut [f32], out: &mut [f32]) {
        let DeltaNetSpec { key_dim, value_dim, .. } = tokens.spec;
        let mut update = vec![0.0; value_dim];
        for (head, state) in states.chunks_exact_mut(key_dim * value_dim).enumerate() {
            let rows = out.chunks_exact_mut(tokens.spec.value_width());
            for (token, row) in rows.enumerate() {
                let of = tokens.head(token, head);
                correct(&of, state, &mut update);
                let read = &mut row[head * value_dim..][..value_dim];
                read.fill(0.0);
                let rows = state.chunks_exact_mut(value_dim);
                for ((query, key), state) in of.query.iter().zip(of.key).zip(rows) {
                    for ((state, update), read) in state.iter_mut().zip(&update).zip(&mut *read) {
                        *state = key.mul_add(*update, *state);
                        *read = query.mul_add(*state, *read);
                    }
                }
            }
        }
    }
}

/// Decays `state`, and computes the `update [value_dim]` of its key.
#[inline(always)]
fn correct(of: &HeadToken<'_>, state: &mut [f32], update: &mut [f32]) {
    predict(of, state, update);
    update.iter_mut().zip(of.value).for_each(|(update, value)| *update = (value - *update) * of.strength);
}

/// Decays `state`, and reads it with the key to `read [value_dim]`.
#[inline(always)]
fn predict(of: &HeadToken<'_>, state: &mut [f32], read: &mut [f32]) {
    read.fill(0.0);
    for (key, state) in of.key.iter().zip(state.chunks_exact_mut(read.len())) {
        for (state, read) in state.iter_mut().zip(&mut *read) {
            *state *= of.decay;
            *read = key.mul_add(*state, *read);
        }
    }
}

/// Advances `state` of one head by one token. `error [value_dim]` is what the value differs from what was predicted.
#[inline(always)]
fn step(of: &HeadToken<'_>, state: &mut [f32], error: &mut [f32], update: &mut [f32]) {
    predict(of, state, error);
    error.iter_mut().zip(of.value).for_each(|(error, value)| *error = value - *error);
    update.iter_mut().zip(&*error).for_each(|(update, error)| *update = error * of.strength);
    for (key, state) in of.key.iter().zip(state.chunks_exact_mut(update.len())) {
        for (state, update) in state.iter_mut().zip(&*update) {
            *state = key.mul_add(*update, *state);
        }
    }
}

/// Gradients of [`advance`].
#[derive(Debug)]
pub(crate) struct DeltaGradients<'a> {
    /// `[value_heads, key_dim, value_dim]` gradient of the states after all tokens, which becomes that of those before.
    pub(crate) states: &'a mut [f32],
    /// `[T, channels]` of the heads; added to.
    pub(crate) heads: &'a mut [f32],
    /// `[T, 2 value_heads]` of the gates; overwritten.
    pub(crate) gates: &'a mut [f32],
}

vectorized! {
    /// Backward of [`advance`] from `states` for the gradient `g [T, values]` of what was read.
    pub(crate) fn reverse(tokens: DeltaTokens<'_>, states: &[f32], g: &[f32], gradients: DeltaGradients<'_>) {
        let DeltaNetSpec { value_heads, key_dim, value_dim, .. } = tokens.spec;
        let (len, size) = (tokens.len(), key_dim * value_dim);
        let chunks = len.div_ceil(CHUNK);
        let mut kept = vec![0.0; chunks * size];
        let mut history = vec![0.0; (CHUNK + 1) * size];
        let (mut errors, mut scratch) = (vec![0.0; CHUNK * value_dim], vec![0.0; 2 * value_dim]);
        for head in 0..value_heads {
            let mut state = states[head * size..][..size].to_vec();
            for (chunk, kept) in kept.chunks_exact_mut(size).enumerate() {
                kept.copy_from_slice(&state);
                for token in (chunk * CHUNK..len.min((chunk + 1) * CHUNK)).take_while(|_| chunk + 1 < chunks) {
                    let (error, update) = scratch.split_at_mut(value_dim);
                    step(&tokens.head(token, head), &mut state, error, update);
                }
            }
            let d_state = &mut gradients.states[head * size..][..size];
            for chunk in (0..chunks).rev() {
                let first = chunk * CHUNK;
                let own = first..len.min(first + CHUNK);
                history[..size].copy_from_slice(&kept[chunk * size..][..size]);
                for token in own.clone() {
                    let (before, after) = history[(token - first) * size..].split_at_mut(size);
                    after[..size].copy_from_slice(before);
                    let error = &mut errors[(token - first) * value_dim..][..value_dim];
                    step(&tokens.head(token, head), &mut after[..size], error, &mut scratch[..value_dim]);
                }
                for token in own.rev() {
                    let at = token - first;
                    let of_token = TokenReverse {
                        of: tokens.head(token, head),
                        before: &history[at * size..][..size],
                        after: &history[(at + 1) * size..][..size],
                        error: &errors[at * value_dim..][..value_dim],
                        g: &g[token * tokens.spec.value_width() + head * value_dim..][..value_dim],
                    };
                    let row = &mut gradients.heads[token * tokens.spec.channels()..][..tokens.spec.channels()];
                    let [strength, decay] = reverse_token(tokens.spec, head, &of_token, d_state, row, &mut scratch);
                    let gates = &mut gradients.gates[token * 2 * value_heads..][..2 * value_heads];
                    (gates[head], gates[value_heads + head]) = (strength, decay);
                }
            }
        }
    }
}

/// What the backward of one token in one head needs.
struct TokenReverse<'a> {
    of: HeadToken<'a>,
    /// `[key_dim, value_dim]` the state before the token.
    before: &'a [f32],
    /// The state after it.
    after: &'a [f32],
    /// `[value_dim]`
    error: &'a [f32],
    /// `[value_dim]` gradient of what was read.
    g: &'a [f32],
}

/// Backward of one token in one head: turns `d_state`, adds to the gradients `row [channels]`, and returns those of strength and
/// decay. `scratch` has `2 * value_dim` values.
#[inline(always)]
fn reverse_token(
    spec: DeltaNetSpec,
    head: usize,
    TokenReverse { of, before, after, error, g }: &TokenReverse<'_>,
    d_state: &mut [f32],
    row: &mut [f32],
    scratch: &mut [f32],
) -> [f32; 2] {
    let DeltaNetSpec { key_dim, value_dim, .. } = spec;
    let (update, d_update) = scratch.split_at_mut(value_dim);
    let (queries, rest) = row.split_at_mut(spec.key_width());
    let (keys, values) = rest.split_at_mut(spec.key_width());
    let of_key = head / spec.group() * key_dim;
    let (d_query, d_key) = (&mut queries[of_key..][..key_dim], &mut keys[of_key..][..key_dim]);
    let d_value = &mut values[head * value_dim..][..value_dim];
    update.iter_mut().zip(*error).for_each(|(update, error)| *update = error * of.strength);
    d_update.fill(0.0);
    for i in 0..key_dim {
        let (query, key) = (of.query[i], of.key[i]);
        let d_state = &mut d_state[i * value_dim..][..value_dim];
        for ((d_state, g), d_update) in d_state.iter_mut().zip(*g).zip(&mut *d_update) {
            *d_state = query.mul_add(*g, *d_state);
            *d_update = key.mul_add(*d_state, *d_update);
        }
        d_query[i] += dot(&after[i * value_dim..][..value_dim], g);
        d_key[i] += dot(d_state, update);
    }
    let d_strength = dot(d_update, error);
    // The gradient of the error, which is that of the value.
    d_update.iter_mut().for_each(|g| *g *= of.strength);
    d_value.iter_mut().zip(&*d_update).for_each(|(d_value, g)| *d_value += g);
    let mut d_decay = 0.0;
    for i in 0..key_dim {
        let (key, before) = (of.key[i], &before[i * value_dim..][..value_dim]);
        let d_state = &mut d_state[i * value_dim..][..value_dim];
        d_key[i] -= of.decay * dot(before, d_update);
        d_state.iter_mut().zip(&*d_update).for_each(|(d_state, g)| *d_state = (-key).mul_add(*g, *d_state));
        d_decay += dot(d_state, before);
        d_state.iter_mut().for_each(|d_state| *d_state *= of.decay);
    }
    [d_strength, d_decay]
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

    /// Normalised heads, and gates between 0 and 1.
    fn tokens(len: usize) -> (Vec<f32>, Vec<f32>) {
        let mut heads = noise(len * SPEC.channels(), 1);
        normalize(&mut heads, SPEC);
        let gates = noise(len * 2 * SPEC.value_heads, 2);
        (heads, gates.into_iter().map(|gate| 0.6 + 0.35 * gate).collect())
    }

    fn read(heads: &[f32], gates: &[f32], states: &mut [f32]) -> Vec<f32> {
        let mut out = vec![7.0; heads.len() / SPEC.channels() * SPEC.value_width()];
        advance(DeltaTokens { spec: SPEC, heads, gates }, states, &mut out);
        out
    }

    /// The recurrence in f64, as its formula says.
    #[test]
    fn states_follow_the_formula() {
        let (heads, gates) = tokens(9);
        let mut states = noise(SPEC.heads_len(), 3);
        let mut exact: Vec<f64> = states.iter().map(|x| f64::from(*x)).collect();
        let out = read(&heads, &gates, &mut states);
        let of = DeltaTokens { spec: SPEC, heads: &heads, gates: &gates };
        let at = |i: usize, j: usize| i * SPEC.value_dim + j;
        for head in 0..SPEC.value_heads {
            let state = &mut exact[head * 35..][..35];
            for token in 0..9 {
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
        let mut whole = noise(SPEC.heads_len(), 3);
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
                let out = read(heads, gates, &mut states);
                weighted(&out, &c) + weighted(&states, &of_states)
            };
            let mut d_states = of_states.clone();
            let (mut d_heads, mut d_gates) = (vec![0.0; heads.len()], vec![9.0; gates.len()]);
            let tokens = DeltaTokens { spec: SPEC, heads: &heads, gates: &gates };
            let gradients =
                DeltaGradients { states: &mut d_states, heads: &mut d_heads, gates: &mut d_gates };
            reverse(tokens, &states, &c, gradients);
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
