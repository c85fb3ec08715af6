//! The heads of multi-head latent attention (MLA, DeepSeek-V2, DeepSeek-AI 2024, arXiv 2405.04434): queries, keys and values of all
//! heads, made of their parts.
//!
//! A query or a key has a part without position, then one that is rotated; the rotated part of the keys is common to all heads.
//! Values may be narrower than keys, and are padded with zeros, so that attention runs over heads of one width.
//!
//! Invariant: a row depends on its own inputs only. Attention and its cache see expanded keys and values: a position takes the
//! memory of all heads, not that of its latent.

use super::heads::{Angles, HeadShape};
use super::{rows_each, unwritten};
use crate::ThreadPool;

/// Widths of the parts of a head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LatentShape {
    pub(crate) heads: usize,
    /// Of a query or a key, without position.
    pub(crate) nope: usize,
    /// Of a query or a key, rotated; even.
    pub(crate) rope: usize,
    /// Of a value; at most that of a key.
    pub(crate) value: usize,
    /// Whether the values of a rotated pair are neighbours.
    pub(crate) interleaved: bool,
}

/// Parts of queries, keys and values, or their gradients.
#[derive(Debug)]
pub(crate) struct LatentParts {
    /// `[T, heads * (nope + rope)]`
    pub(crate) queries: Vec<f32>,
    /// `[T, heads * (nope + value)]` keys without position, and values, of each head.
    pub(crate) expanded: Vec<f32>,
    /// `[T, rope]` what is rotated of the keys.
    pub(crate) rotary: Vec<f32>,
}

/// The parts of one row.
#[derive(Clone, Copy)]
struct PartRow<'a> {
    queries: &'a [f32],
    expanded: &'a [f32],
    rotary: &'a [f32],
}

impl LatentShape {
    /// Width of a query or a key.
    fn head(self) -> usize {
        self.nope + self.rope
    }

    /// Widths of a row of each of the parts.
    fn widths(self) -> [usize; 3] {
        [self.heads * self.head(), self.heads * (self.nope + self.value), self.rope]
    }

    /// The heads of attention.
    pub(crate) fn padded(self) -> HeadShape {
        HeadShape { heads: self.heads, kv_heads: self.heads, head_dim: self.head() }
    }

    /// `[T, width]` prepared queries, keys and padded values. `angles` are those of the same tokens.
    pub(crate) fn assemble(self, parts: &LatentParts, angles: &Angles, pool: &ThreadPool) -> Vec<f32> {
        let (width, [queries, expanded, rotary]) = (self.padded().width(), self.widths());
        let tokens = parts.rotary.len() / rotary;
        let mut out = unwritten(tokens * width);
        let each = rows_each(tokens, out.len(), pool);
        let threads = out.chunks_mut(each * width).enumerate().collect();
        pool.map(threads, |(thread, out)| {
            for (row, out) in (thread * each..).zip(out.chunks_exact_mut(width)) {
                let part = PartRow {
                    queries: &parts.queries[row * queries..][..queries],
                    expanded: &parts.expanded[row * expanded..][..expanded],
                    rotary: &parts.rotary[row * rotary..][..rotary],
                };
                self.assemble_row(part, self.rotation(angles, row), out);
            }
        });
        out
    }

    /// `out [width]` of one row.
    fn assemble_row(self, parts: PartRow<'_>, rotation: PairRotation<'_>, out: &mut [f32]) {
        let (head, nope) = (self.head(), self.nope);
        let (queries, rest) = out.split_at_mut(self.heads * head);
        let (keys, values) = rest.split_at_mut(self.heads * head);
        for (out, query) in queries.chunks_exact_mut(head).zip(parts.queries.chunks_exact(head)) {
            out[..nope].copy_from_slice(&query[..nope]);
            rotation.rotate(&query[nope..], &mut out[nope..]);
        }
        let expanded = parts.expanded.chunks_exact(nope + self.value);
        let outs = keys.chunks_exact_mut(head).zip(values.chunks_exact_mut(head));
        for ((key, value), expanded) in outs.zip(expanded) {
            key[..nope].copy_from_slice(&expanded[..nope]);
            rotation.rotate(parts.rotary, &mut key[nope..]);
            let (value, padding) = value.split_at_mut(self.value);
            value.copy_from_slice(&expanded[nope..]);
            padding.fill(0.0);
        }
    }

    /// The gradients of the parts for the gradient `g [T, width]` of the result of [`LatentShape::assemble`].
    pub(crate) fn assemble_backward(self, g: &[f32], angles: &Angles) -> LatentParts {
        let (head, nope, width) = (self.head(), self.nope, self.padded().width());
        let tokens = g.len() / width;
        let [queries, expanded, rotary] = self.widths();
        let mut parts = LatentParts {
            queries: vec![0.0; tokens * queries],
            expanded: vec![0.0; tokens * expanded],
            rotary: vec![0.0; tokens * rotary],
        };
        let of_queries = parts.queries.chunks_exact_mut(queries);
        let of_expanded = parts.expanded.chunks_exact_mut(expanded);
        let rows = of_queries.zip(of_expanded).zip(parts.rotary.chunks_exact_mut(rotary));
        let mut of_keys = vec![0.0; self.rope];
        for (row, (g, ((queries, expanded), rotary))) in g.chunks_exact(width).zip(rows).enumerate() {
            let rotation = self.rotation(angles, row);
            let (g_queries, rest) = g.split_at(self.heads * head);
            let (g_keys, g_values) = rest.split_at(self.heads * head);
            for (d, g) in queries.chunks_exact_mut(head).zip(g_queries.chunks_exact(head)) {
                d[..nope].copy_from_slice(&g[..nope]);
                rotation.rotate_back(&g[nope..], &mut d[nope..]);
            }
            // The rotation is linear: the sum over heads comes first.
            of_keys.fill(0.0);
            let heads = expanded.chunks_exact_mut(nope + self.value);
            for ((d, key), value) in heads.zip(g_keys.chunks_exact(head)).zip(g_values.chunks_exact(head)) {
                d[..nope].copy_from_slice(&key[..nope]);
                d[nope..].copy_from_slice(&value[..self.value]);
                of_keys.iter_mut().zip(&key[nope..]).for_each(|(sum, g)| *sum += g);
            }
            rotation.rotate_back(&of_keys, rotary);
        }
        parts
    }

    /// `[T, heads * value]` of the results `[T, heads * (nope + rope)]` of attention over padded values.
    pub(crate) fn narrowed(self, attended: &[f32]) -> Vec<f32> {
        let mut out = unwritten(attended.len() / self.head() * self.value);
        let heads = out.chunks_exact_mut(self.value).zip(attended.chunks_exact(self.head()));
        heads.for_each(|(out, head)| out.copy_from_slice(&head[..self.value]));
        out
    }

    /// The gradient `[T, heads * (nope + rope)]` of these results for the gradient `g [T, heads * value]`.
    pub(crate) fn widened(self, g: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; g.len() / self.value * self.head()];
        let heads = out.chunks_exact_mut(self.head()).zip(g.chunks_exact(self.value));
        heads.for_each(|(out, g)| out[..self.value].copy_from_slice(g));
        out
    }

    fn rotation(self, angles: &Angles, row: usize) -> PairRotation<'_> {
        let (cos, sin) = angles.row(row);
        PairRotation { cos, sin, interleaved: self.interleaved }
    }
}

/// The rotation of one position (RoPE, Su et al. 2021, arXiv 2104.09864).
#[derive(Clone, Copy)]
struct PairRotation<'a> {
    /// `[rope / 2]`
    cos: &'a [f32],
    /// `[rope / 2]`
    sin: &'a [f32],
    interleaved: bool,
}

impl PairRotation<'_> {
    /// Places of the pair `i` before the rotation. Behind it, the second values follow all first ones.
    fn pair(self, i: usize) -> [usize; 2] {
        if self.interleaved { [2 * i, 2 * i + 1] } else { [i, i + self.cos.len()] }
    }

    /// `x [rope]` rotated.
    fn rotate(self, x: &[f32], out: &mut [f32]) {
        let (first, second) = out.split_at_mut(self.cos.len());
        let angles = self.cos.iter().zip(self.sin);
        for (i, ((cos, sin), (first, second))) in angles.zip(first.iter_mut().zip(second)).enumerate() {
            let [a, b] = self.pair(i).map(|place| x[place]);
            (*first, *second) = (a * cos - b * sin, b * cos + a * sin);
        }
    }

    /// The gradient of `x [rope]` for the gradient `g [rope]` of the rotated.
    fn rotate_back(self, g: &[f32], out: &mut [f32]) {
        let (first, second) = g.split_at(self.cos.len());
        let angles = self.cos.iter().zip(self.sin);
        for (i, ((cos, sin), (first, second))) in angles.zip(first.iter().zip(second)).enumerate() {
            let [a, b] = self.pair(i);
            (out[a], out[b]) = (first * cos + second * sin, second * cos - first * sin);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{gradient, noise, weighted};
    use super::super::heads::Frequencies;
    use super::*;
    use crate::SharedCores;

    const TOKENS: usize = 3;

    fn shape(interleaved: bool) -> LatentShape {
        LatentShape { heads: 2, nope: 3, rope: 4, value: 5, interleaved }
    }

    fn angles() -> Angles {
        Angles::new(&[0, 1, 7], &Frequencies { inv_freq: vec![1.0, 0.3], amplitude: 1.2 })
    }

    /// The parts of the values `x [T, queries + expanded + rotary]`, one part after the other.
    fn parts(shape: LatentShape, x: &[f32]) -> LatentParts {
        let [queries, expanded, _] = shape.widths().map(|width| TOKENS * width);
        let (queries, rest) = x.split_at(queries);
        let (expanded, rotary) = rest.split_at(expanded);
        LatentParts { queries: queries.to_vec(), expanded: expanded.to_vec(), rotary: rotary.to_vec() }
    }

    #[test]
    fn backward_is_the_derivative() {
        for shape in [true, false].map(shape) {
            let (x, angles) = (noise(TOKENS * shape.widths().iter().sum::<usize>(), 1), angles());
            let c = noise(TOKENS * shape.padded().width(), 2);
            let alone = ThreadPool::single();
            let loss = |x: &[f32]| weighted(&shape.assemble(&parts(shape, x), &angles, &alone), &c);
            let LatentParts { queries, expanded, rotary } = shape.assemble_backward(&c, &angles);
            gradient(loss, &x, &[queries, expanded, rotary].concat(), 1e-3);

            let (x, c) = (noise(6 * shape.head(), 3), noise(6 * shape.value, 4));
            gradient(|x| weighted(&shape.narrowed(x), &c), &x, &shape.widened(&c), 1e-3);
        }
    }

    #[test]
    fn neighbours_become_halves() {
        // A permutation of the inputs is the only difference of the two layouts.
        let x = noise(4, 5);
        let swapped = [x[0], x[2], x[1], x[3]];
        let angles = angles();
        let rotated = |interleaved: bool, x: &[f32]| {
            let mut out = vec![0.0; 4];
            shape(interleaved).rotation(&angles, 2).rotate(x, &mut out);
            out
        };
        assert_eq!(rotated(true, &x), rotated(false, &swapped));
        assert_ne!(rotated(true, &x), rotated(false, &x));
    }

    #[test]
    fn threads_change_nothing() {
        let shape = LatentShape { heads: 8, nope: 40, rope: 4, value: 30, interleaved: true };
        let positions: Vec<u32> = (0..20).collect();
        let angles = Angles::new(&positions, &Frequencies { inv_freq: vec![1.0, 0.3], amplitude: 1.0 });
        let [queries, expanded, rotary] = shape.widths().map(|width| noise(20 * width, 6));
        let parts = LatentParts { queries, expanded, rotary };
        let alone = shape.assemble(&parts, &angles, &ThreadPool::single());
        let shared = shape.assemble(&parts, &angles, &ThreadPool::new(&SharedCores::new(3), 3));
        assert_eq!(alone, shared);
    }
}
