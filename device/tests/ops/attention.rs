//! Attention over packs, forward and backward, against a reference in f64.

use std::ops::Range;

use device::ops::attention::{Segment, Segments, attention, attention_backward};
use device::ops::heads::HeadShape;
use device::{Device, Storage, bf16};

use crate::common::{assert_close, devices, noise};

use super::support::{narrow, wide, widen};

pub(super) const fn shape(heads: usize, kv_heads: usize, head_dim: usize) -> HeadShape {
    HeadShape { heads, kv_heads, head_dim }
}

/// AttentionReference in f64 for `qkv [rows, width]`.
pub(super) struct AttentionReference<'a> {
    pub(super) qkv: &'a [f64],
    pub(super) shape: HeadShape,
}

/// Softmax weights of a query by key row, and the log-sum-exp of its scores.
struct SoftmaxWeights {
    keys: Vec<usize>,
    weights: Vec<f64>,
    log_sum: f64,
}

impl AttentionReference<'_> {
    fn columns(&self, row: usize, head: usize) -> &[f64] {
        &self.qkv[row * self.shape.width() + head * self.shape.head_dim..][..self.shape.head_dim]
    }

    /// Key head and value head of query head `h`.
    fn key_and_value(&self, h: usize) -> [usize; 2] {
        let HeadShape { heads, kv_heads, .. } = self.shape;
        let kv = h / (heads / kv_heads);
        [heads + kv, heads + kv_heads + kv]
    }

    fn scale(&self) -> f64 {
        (self.shape.head_dim as f64).powf(-0.5)
    }

    fn weights(&self, segment: &Segment, row: usize, h: usize) -> SoftmaxWeights {
        let keys: Vec<usize> = segment.prefix.clone().chain(segment.rows.start..=row).collect();
        let [key, _] = self.key_and_value(h);
        let score = |k: &usize| dot(self.columns(row, h), self.columns(*k, key)) * self.scale();
        let scores: Vec<f64> = keys.iter().map(score).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - top).exp()).sum();
        let log_sum = top + sum.ln();
        let weights = scores.iter().map(|score| (score - log_sum).exp()).collect();
        SoftmaxWeights { keys, weights, log_sum }
    }

    /// Results `[rows, query_width]` and `log_sums [heads, rows]`.
    pub(super) fn forward(&self, segments: &[Segment]) -> (Vec<f64>, Vec<f64>) {
        let HeadShape { heads, head_dim, .. } = self.shape;
        let rows = self.qkv.len() / self.shape.width();
        let (mut out, mut log_sums) = (vec![0.0; rows * heads * head_dim], vec![0.0; heads * rows]);
        for segment in segments {
            for row in segment.rows.clone() {
                for h in 0..heads {
                    let SoftmaxWeights { keys, weights, log_sum } = self.weights(segment, row, h);
                    let [_, value] = self.key_and_value(h);
                    log_sums[h * rows + row] = log_sum;
                    let out = &mut out[(row * heads + h) * head_dim..][..head_dim];
                    for (k, weight) in keys.iter().zip(weights) {
                        add(out, weight, self.columns(*k, value));
                    }
                }
            }
        }
        (out, log_sums)
    }

    /// Gradient of `qkv` from that of the result.
    fn backward(&self, segments: &[Segment], g: &[f64]) -> Vec<f64> {
        let HeadShape { heads, head_dim, .. } = self.shape;
        let mut gradient = vec![0.0; self.qkv.len()];
        let place = |row: usize, head: usize| row * self.shape.width() + head * head_dim;
        for segment in segments {
            for row in segment.rows.clone() {
                for h in 0..heads {
                    let SoftmaxWeights { keys, weights, .. } = self.weights(segment, row, h);
                    let [key, value] = self.key_and_value(h);
                    let g = &g[(row * heads + h) * head_dim..][..head_dim];
                    let slopes: Vec<f64> = keys.iter().map(|k| dot(g, self.columns(*k, value))).collect();
                    let mean = dot(&weights, &slopes);
                    for ((k, weight), slope) in keys.iter().zip(&weights).zip(&slopes) {
                        let change = weight * (slope - mean) * self.scale();
                        add(&mut gradient[place(row, h)..], change, self.columns(*k, key));
                        add(&mut gradient[place(*k, key)..], change, self.columns(row, h));
                        add(&mut gradient[place(*k, value)..], *weight, g);
                    }
                }
            }
        }
        gradient
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(to: &mut [f64], by: f64, values: &[f64]) {
    to.iter_mut().zip(values).for_each(|(to, value)| *to += by * value);
}

/// Consecutive segments of `(rows, prefix)` from row `first`.
fn segments(first: usize, of: &[(usize, Range<usize>)]) -> Vec<Segment> {
    let mut start = first;
    let segment = |(n, prefix): &(usize, Range<usize>)| {
        start += n;
        Segment { rows: start - n..start, prefix: prefix.clone() }
    };
    of.iter().map(segment).collect()
}

fn rows_of(segments: &[Segment]) -> usize {
    segments.last().map_or(0, |last| last.rows.end)
}

/// Queries, keys and values with uneven softmax weights.
fn steep<T: Storage>(len: usize, seed: u64) -> Vec<T> {
    narrow(noise(len, seed).into_iter().map(|x| 2.0 * x).collect())
}

pub(super) fn forward<T: Storage>(
    device: &Device,
    qkv: &[T],
    list: &[Segment],
    shape: HeadShape,
) -> (Vec<T>, Vec<f32>) {
    let rows = qkv.len() / shape.width();
    let on_segments = Segments::new(device, list, rows).unwrap();
    let on_qkv = device.upload(qkv).unwrap();
    let mut out = device.upload(&vec![T::narrow(f32::NAN); rows * shape.query_width()]).unwrap();
    let mut log_sums = device.zeros::<f32>(rows * shape.heads).unwrap();
    attention(device, on_qkv.all(), &on_segments, shape, out.all_mut(), log_sums.all_mut()).unwrap();
    (device.download(out.all()).unwrap(), device.download(log_sums.all()).unwrap())
}

fn backward<T: Storage>(device: &Device, qkv: &[T], list: &[Segment], shape: HeadShape, g: &[T]) -> Vec<T> {
    let (out, log_sums) = forward(device, qkv, list, shape);
    let on_segments = Segments::new(device, list, qkv.len() / shape.width()).unwrap();
    let [on_qkv, on_out, on_g] = [qkv, &out, g].map(|values| device.upload(values).unwrap());
    let sums = device.upload(&log_sums).unwrap();
    let mut dqkv = device.upload(&vec![T::narrow(f32::NAN); qkv.len()]).unwrap();
    let to = dqkv.all_mut();
    attention_backward(device, on_qkv.all(), &on_segments, shape, on_out.all(), sums.all(), on_g.all(), to)
        .unwrap();
    device.download(dqkv.all()).unwrap()
}

/// Some columns of rows of `width`.
fn columns<V: Copy>(values: &[V], width: usize, columns: Range<usize>) -> Vec<V> {
    values.chunks(width).flat_map(|row| row[columns.clone()].to_vec()).collect()
}

fn check<T: Storage>(list: &[Segment], rows: usize, shape: HeadShape, tolerance: f64) {
    for device in devices() {
        let qkv: Vec<T> = steep(rows * shape.width(), 1);
        let g: Vec<T> = narrow(noise(rows * shape.query_width(), 2));
        let (qkv64, g64) = (wide(&qkv), wide(&g));
        let reference = AttentionReference { qkv: &qkv64, shape };
        let (out, log_sums) = forward(&device, &qkv, list, shape);
        let (expected, expected_sums) = reference.forward(list);
        assert_close(&widen(&out), &expected, tolerance);
        let inside = |i: usize| list.iter().any(|segment| segment.rows.contains(&(i % rows)));
        let sums: Vec<f32> =
            log_sums.iter().enumerate().map(|(i, sum)| if inside(i) { *sum } else { 0.0 }).collect();
        assert_close(&sums, &expected_sums, 1e-5);

        let gradient = widen(&backward(&device, &qkv, list, shape, &g));
        let expected = reference.backward(list, &g64);
        // Each part at its own scale: gradients of values are larger.
        let (queries, keys) = (shape.query_width(), shape.query_width() + shape.kv_width());
        for part in [0..queries, queries..keys, keys..shape.width()] {
            let [found, expected] = [
                columns(&gradient, shape.width(), part.clone()).into_iter().map(f64::from).collect(),
                columns(&expected, shape.width(), part),
            ];
            let found: Vec<f32> = found.into_iter().map(|x: f64| x as f32).collect();
            assert_close(&found, &expected, 2.0 * tolerance);
        }
    }
}

/// Lengths around tile sizes, prefixes that end inside tiles or cover parts of segments.
fn mixed() -> Vec<Segment> {
    segments(0, &[(1, 0..0), (15, 0..0), (65, 0..16), (64, 16..81), (70, 16..81), (130, 0..0), (3, 150..300)])
}

#[test]
fn f32_kernels_match_f64() {
    for shape in [shape(2, 1, 16), shape(1, 1, 7), shape(7, 1, 20), shape(2, 2, 64)] {
        check::<f32>(&mixed(), rows_of(&mixed()), shape, 2e-5);
    }
    let few = segments(0, &[(33, 0..0), (40, 0..33)]);
    check::<f32>(&few, 73, shape(2, 1, 256), 2e-5);
    check::<bf16>(&few, 73, shape(4, 2, 16), 1e-2);
    check::<bf16>(&few, 73, shape(1, 1, 80), 1e-2);
}

#[test]
fn tensor_core_kernels_match_f64() {
    for shape in [shape(1, 1, 64), shape(7, 1, 64), shape(4, 2, 64), shape(2, 1, 128)] {
        check::<bf16>(&mixed(), rows_of(&mixed()), shape, 2e-2);
    }
}

#[test]
fn keys_of_many_queries_are_split() {
    let mut of = vec![(90, 0..0)];
    of.resize(10, (130, 0..90));
    let list = segments(0, &of);
    check::<f32>(&list, rows_of(&list), shape(2, 1, 4), 2e-5);
    check::<bf16>(&list, rows_of(&list), shape(1, 1, 64), 2e-2);
}

#[test]
fn rows_outside_segments_are_zero() {
    let list = [Segment { rows: 3..20, prefix: 0..0 }, Segment { rows: 25..30, prefix: 3..10 }];
    check::<f32>(&list, 33, shape(1, 1, 8), 2e-5);
    check::<bf16>(&list, 33, shape(1, 1, 64), 2e-2);
    check::<bf16>(&[], 5, shape(1, 1, 64), 2e-2);
    check::<f32>(&[], 0, shape(1, 1, 8), 2e-5);
}

/// Rows `rows` of `[_, width]`.
fn part<V: Copy>(values: &[V], width: usize, rows: Range<usize>) -> Vec<V> {
    values[rows.start * width..rows.end * width].to_vec()
}

#[test]
fn the_bits_of_a_result_do_not_depend_on_the_packing() {
    fn check<T: Storage + PartialEq>(shape: HeadShape) {
        let width = shape.query_width();
        for device in devices() {
            for (prefix, own) in [(1, 1), (7, 60), (64, 65), (90, 70)] {
                let qkv: Vec<T> = steep((prefix + own) * shape.width(), 3);
                let (whole, _) = forward(&device, &qkv, &segments(0, &[(prefix + own, 0..0)]), shape);
                let shared = segments(0, &[(prefix, 0..0), (own, 0..prefix)]);
                assert!(forward(&device, &qkv, &shared, shape).0 == whole, "{prefix} and {own}");
                // After and before other segments.
                let others: Vec<T> = steep(37 * shape.width(), 4);
                let packed = [others.as_slice(), &qkv, &others].concat();
                let list = segments(0, &[(37, 0..0), (prefix, 0..0), (own, 37..37 + prefix), (37, 0..37)]);
                let (out, _) = forward(&device, &packed, &list, shape);
                assert!(part(&out, width, 37..37 + prefix + own) == whole, "{prefix} and {own} among others");
            }
        }
    }
    check::<f32>(shape(2, 1, 16));
    check::<bf16>(shape(2, 1, 64));
    check::<bf16>(shape(1, 1, 128));
}
