//! Attention over packs, forward and backward, against a reference in f64.

use std::ops::Range;

use device::ops::attention::{
    AttentionForward, AttentionHeads, Segment, Segments, attention, attention_backward,
};
use device::ops::heads::HeadShape;
use device::{Device, DeviceBuffer, Storage, bf16};

use crate::common::{assert_close, devices, noise};

use super::support::{narrow, wide, widen};

pub(super) const fn shape(heads: usize, kv_heads: usize, head_dim: usize) -> HeadShape {
    HeadShape { heads, kv_heads, head_dim }
}

/// How scores become weights, on the host.
#[derive(Clone, Debug)]
pub(super) struct TestRule {
    pub(super) shape: HeadShape,
    pub(super) scale: f32,
    pub(super) window: usize,
    /// `[heads]`, or empty for none.
    pub(super) sinks: Vec<f32>,
}

impl TestRule {
    pub(super) fn full(shape: HeadShape) -> Self {
        let AttentionHeads { scale, window, .. } = AttentionHeads::<f32>::full(shape);
        Self { shape, scale, window, sinks: Vec::new() }
    }

    /// With a window, or with sinks, or both, and with a scale of its own.
    pub(super) fn variants(shape: HeadShape, window: usize) -> [Self; 3] {
        let sinks: Vec<f32> = noise(shape.heads, 9).into_iter().map(|sink| 2.0 * sink).collect();
        let full = Self::full(shape);
        [
            Self { window, ..full.clone() },
            Self { sinks: sinks.clone(), scale: 0.7 * full.scale, ..full.clone() },
            Self { window, sinks, ..full },
        ]
    }

    /// The sinks as a device stores them.
    pub(super) fn stored<T: Storage>(&self) -> Vec<T> {
        narrow(self.sinks.clone())
    }

    /// On the device, with `sinks` that were uploaded.
    pub(super) fn heads<'a, T: Storage>(&self, sinks: &'a DeviceBuffer<T>) -> AttentionHeads<'a, T> {
        let sinks = (!sinks.is_empty()).then(|| sinks.all());
        AttentionHeads { shape: self.shape, scale: self.scale, window: self.window, sinks }
    }

    /// The reference for `qkv [rows, width]`, with sinks as `T` stores them.
    pub(super) fn reference<'a, T: Storage>(&self, qkv: &'a [f64]) -> AttentionReference<'a> {
        let Self { shape, scale, window, .. } = *self;
        AttentionReference { qkv, shape, scale: f64::from(scale), window, sinks: wide(&self.stored::<T>()) }
    }
}

/// Attention in f64 for `qkv [rows, width]`.
pub(super) struct AttentionReference<'a> {
    qkv: &'a [f64],
    shape: HeadShape,
    scale: f64,
    window: usize,
    sinks: Vec<f64>,
}

/// Softmax weights of a query by key row, the weight of the sink, and the log-sum-exp of the scores.
struct SoftmaxWeights {
    keys: Vec<usize>,
    weights: Vec<f64>,
    of_sink: f64,
    log_sum: f64,
}

/// Gradients of `qkv` and of the sinks.
struct ReferenceGradient {
    qkv: Vec<f64>,
    sinks: Vec<f64>,
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

    fn weights(&self, segment: &Segment, row: usize, h: usize) -> SoftmaxWeights {
        let mut keys: Vec<usize> = segment.prefix.clone().chain(segment.rows.start..=row).collect();
        keys.drain(..keys.len().saturating_sub(self.window));
        let [key, _] = self.key_and_value(h);
        let score = |k: &usize| dot(self.columns(row, h), self.columns(*k, key)) * self.scale;
        let scores: Vec<f64> = keys.iter().map(score).collect();
        let sink = self.sinks.get(h).copied();
        let all = || scores.iter().copied().chain(sink);
        let top = all().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = all().map(|score| (score - top).exp()).sum();
        let log_sum = top + sum.ln();
        let weights = scores.iter().map(|score| (score - log_sum).exp()).collect();
        let of_sink = sink.map_or(0.0, |sink| (sink - log_sum).exp());
        SoftmaxWeights { keys, weights, of_sink, log_sum }
    }

    /// Results `[rows, query_width]` and `log_sums [heads, rows]`.
    pub(super) fn forward(&self, segments: &[Segment]) -> (Vec<f64>, Vec<f64>) {
        let HeadShape { heads, head_dim, .. } = self.shape;
        let rows = self.qkv.len() / self.shape.width();
        let (mut out, mut log_sums) = (vec![0.0; rows * heads * head_dim], vec![0.0; heads * rows]);
        for segment in segments {
            for row in segment.rows.clone() {
                for h in 0..heads {
                    let SoftmaxWeights { keys, weights, log_sum, .. } = self.weights(segment, row, h);
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

    /// From the gradient of the result.
    fn backward(&self, segments: &[Segment], g: &[f64]) -> ReferenceGradient {
        let HeadShape { heads, head_dim, .. } = self.shape;
        let mut gradient = vec![0.0; self.qkv.len()];
        let mut of_sinks = vec![0.0; self.sinks.len()];
        let place = |row: usize, head: usize| row * self.shape.width() + head * head_dim;
        for segment in segments {
            for row in segment.rows.clone() {
                for h in 0..heads {
                    let SoftmaxWeights { keys, weights, of_sink, .. } = self.weights(segment, row, h);
                    let [key, value] = self.key_and_value(h);
                    let g = &g[(row * heads + h) * head_dim..][..head_dim];
                    let slopes: Vec<f64> = keys.iter().map(|k| dot(g, self.columns(*k, value))).collect();
                    let mean = dot(&weights, &slopes);
                    if let Some(gradient) = of_sinks.get_mut(h) {
                        *gradient -= of_sink * mean;
                    }
                    for ((k, weight), slope) in keys.iter().zip(&weights).zip(&slopes) {
                        let change = weight * (slope - mean) * self.scale;
                        add(&mut gradient[place(row, h)..], change, self.columns(*k, key));
                        add(&mut gradient[place(*k, key)..], change, self.columns(row, h));
                        add(&mut gradient[place(*k, value)..], *weight, g);
                    }
                }
            }
        }
        ReferenceGradient { qkv: gradient, sinks: of_sinks }
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
    rule: &TestRule,
) -> (Vec<T>, Vec<f32>) {
    let (rows, shape) = (qkv.len() / rule.shape.width(), rule.shape);
    let on_segments = Segments::new(device, list, rows, &[]).unwrap();
    let (on_qkv, sinks) = (device.upload(qkv).unwrap(), device.upload(&rule.stored::<T>()).unwrap());
    let mut out = device.upload(&vec![T::narrow(f32::NAN); rows * shape.query_width()]).unwrap();
    let mut log_sums = device.zeros::<f32>(rows * shape.heads).unwrap();
    let heads = rule.heads(&sinks);
    attention(device, on_qkv.all(), &on_segments, heads, out.all_mut(), log_sums.all_mut()).unwrap();
    (device.download(out.all()).unwrap(), device.download(log_sums.all()).unwrap())
}

/// Gradients of `qkv`, and of the sinks added to 1.
fn backward<T: Storage>(
    device: &Device,
    qkv: &[T],
    list: &[Segment],
    rule: &TestRule,
    g: &[T],
) -> (Vec<T>, Vec<f32>) {
    let (out, log_sums) = forward(device, qkv, list, rule);
    let rows = qkv.len() / rule.shape.width();
    let on_segments = Segments::new(device, list, rows, &[1, rule.window]).unwrap();
    let [on_qkv, on_out, on_g] = [qkv, &out, g].map(|values| device.upload(values).unwrap());
    let (sums, sinks) = (device.upload(&log_sums).unwrap(), device.upload(&rule.stored::<T>()).unwrap());
    let mut dqkv = device.upload(&vec![T::narrow(f32::NAN); qkv.len()]).unwrap();
    let mut d_sinks = device.upload(&vec![1.0; rule.sinks.len()]).unwrap();
    let forward = AttentionForward { qkv: on_qkv.all(), out: on_out.all(), log_sums: sums.all() };
    let (heads, to, of_sinks) = (rule.heads(&sinks), dqkv.all_mut(), d_sinks.all_mut());
    attention_backward(device, forward, &on_segments, heads, on_g.all(), to, of_sinks).unwrap();
    (device.download(dqkv.all()).unwrap(), device.download(d_sinks.all()).unwrap())
}

/// Some columns of rows of `width`.
fn columns<V: Copy>(values: &[V], width: usize, columns: Range<usize>) -> Vec<V> {
    values.chunks(width).flat_map(|row| row[columns.clone()].to_vec()).collect()
}

fn check<T: Storage>(list: &[Segment], rows: usize, shape: HeadShape, tolerance: f64) {
    check_rule::<T>(list, rows, &TestRule::full(shape), tolerance);
}

fn check_rule<T: Storage>(list: &[Segment], rows: usize, rule: &TestRule, tolerance: f64) {
    let shape = rule.shape;
    for device in devices() {
        let qkv: Vec<T> = steep(rows * shape.width(), 1);
        let g: Vec<T> = narrow(noise(rows * shape.query_width(), 2));
        let (qkv64, g64) = (wide(&qkv), wide(&g));
        let reference = rule.reference::<T>(&qkv64);
        let (out, log_sums) = forward(&device, &qkv, list, rule);
        let (expected, expected_sums) = reference.forward(list);
        assert_close(&widen(&out), &expected, tolerance);
        let inside = |i: usize| list.iter().any(|segment| segment.rows.contains(&(i % rows)));
        let sums: Vec<f32> =
            log_sums.iter().enumerate().map(|(i, sum)| if inside(i) { *sum } else { 0.0 }).collect();
        assert_close(&sums, &expected_sums, 1e-5);

        let (gradient, of_sinks) = backward(&device, &qkv, list, rule, &g);
        let (gradient, expected) = (widen(&gradient), reference.backward(list, &g64));
        // Each part at its own scale: gradients of values are larger.
        let (queries, keys) = (shape.query_width(), shape.query_width() + shape.kv_width());
        for part in [0..queries, queries..keys, keys..shape.width()] {
            let found = columns(&gradient, shape.width(), part.clone());
            let expected = columns(&expected.qkv, shape.width(), part);
            assert_close(&found, &expected, 2.0 * tolerance);
        }
        let expected: Vec<f64> = expected.sinks.iter().map(|slope| slope + 1.0).collect();
        assert_close(&of_sinks, &expected, 2.0 * tolerance);
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

/// Windows of one key, within a tile, of a tile, over several tiles and longer than all segments.
const WINDOWS: [usize; 6] = [1, 30, 64, 65, 100, 1000];

#[test]
fn windows_and_sinks_match_f64() {
    let (list, rows) = (mixed(), rows_of(&mixed()));
    for window in WINDOWS {
        // The weight of one key alone is 1, and gradients of its score are 0.
        let of = |rule: &TestRule| window > 1 || !rule.sinks.is_empty();
        for rule in TestRule::variants(shape(2, 1, 8), window).iter().filter(|rule| of(rule)) {
            check_rule::<f32>(&list, rows, rule, 2e-5);
        }
    }
    for window in [2, 65] {
        for rule in TestRule::variants(shape(2, 1, 64), window) {
            check_rule::<bf16>(&list, rows, &rule, 2e-2);
        }
    }
    for rule in TestRule::variants(shape(2, 2, 128), 70) {
        check_rule::<bf16>(&list, rows, &rule, 2e-2);
    }
    for rule in TestRule::variants(shape(2, 1, 24), 70) {
        check_rule::<bf16>(&list, rows, &rule, 2e-2);
    }
}

/// Keys whose queries are split under a window, and segments with rows outside of them.
#[test]
fn windows_of_shared_prefixes_match_f64() {
    let mut of = vec![(90, 0..0)];
    of.resize(13, (130, 0..90));
    let list = segments(0, &of);
    let outside = [Segment { rows: 3..20, prefix: 0..0 }, Segment { rows: 25..95, prefix: 3..10 }];
    for rule in TestRule::variants(shape(2, 1, 4), 150) {
        check_rule::<f32>(&list, rows_of(&list), &rule, 2e-5);
        check_rule::<f32>(&outside, 99, &TestRule { window: rule.window.min(12), ..rule }, 2e-5);
    }
    let [.., rule] = TestRule::variants(shape(1, 1, 64), 150);
    check_rule::<bf16>(&list, rows_of(&list), &rule, 2e-2);
    check_rule::<bf16>(&outside, 99, &TestRule { window: 12, ..rule }, 2e-2);
}

/// Rows whose keys and values are NaN, before the window of the rows that are checked: a tile that is read has NaN results.
#[test]
fn tiles_outside_of_windows_are_not_read() {
    fn check<T: Storage + PartialEq>(shape: HeadShape) {
        let (rows, first, width) = (300, 128, shape.width());
        let rule = TestRule { window: 20, ..TestRule::full(shape) };
        let list = segments(0, &[(rows, 0..0)]);
        let qkv: Vec<T> = steep(rows * width, 1);
        let g: Vec<T> = narrow(noise(rows * shape.query_width(), 2));
        let mut broken = qkv.clone();
        for row in broken.chunks_mut(width).take(64) {
            row[shape.query_width()..].fill(T::narrow(f32::NAN));
        }
        for device in devices() {
            let results = |qkv: &[T]| {
                let (out, _) = forward(&device, qkv, &list, &rule);
                let (gradient, _) = backward(&device, qkv, &list, &rule, &g);
                (part(&out, shape.query_width(), first..rows), part(&gradient, width, first..rows))
            };
            assert!(results(&broken) == results(&qkv), "the tiles of the first 64 keys");
        }
    }
    check::<f32>(shape(2, 1, 8));
    check::<bf16>(shape(2, 1, 64));
}

#[test]
fn a_backward_needs_the_work_lists_of_its_window() {
    let (shape, rule) = (shape(1, 1, 8), TestRule::full(shape(1, 1, 8)));
    for device in devices() {
        let list = segments(0, &[(5, 0..0)]);
        let on_segments = Segments::new(&device, &list, 5, &[3]).unwrap();
        let [qkv, mut dqkv] = [0; 2].map(|_| device.zeros::<f32>(5 * shape.width()).unwrap());
        let [out, log_sums] = [5 * shape.query_width(), 5].map(|len| device.zeros::<f32>(len).unwrap());
        let forward = AttentionForward { qkv: qkv.all(), out: out.all(), log_sums: log_sums.all() };
        let mut none = device.zeros::<f32>(0).unwrap();
        let (to, of_sinks) = (dqkv.all_mut(), none.all_mut());
        let heads = AttentionHeads::full(rule.shape);
        let error = attention_backward(&device, forward, &on_segments, heads, out.all(), to, of_sinks);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("no work lists for a window"), "{error}");
    }
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
    fn check<T: Storage + PartialEq>(rule: &TestRule) {
        let (shape, width) = (rule.shape, rule.shape.query_width());
        for device in devices() {
            for (prefix, own) in [(1, 1), (7, 60), (64, 65), (90, 70)] {
                let qkv: Vec<T> = steep((prefix + own) * shape.width(), 3);
                let (whole, _) = forward(&device, &qkv, &segments(0, &[(prefix + own, 0..0)]), rule);
                let shared = segments(0, &[(prefix, 0..0), (own, 0..prefix)]);
                assert!(forward(&device, &qkv, &shared, rule).0 == whole, "{prefix} and {own}");
                // After and before other segments.
                let others: Vec<T> = steep(37 * shape.width(), 4);
                let packed = [others.as_slice(), &qkv, &others].concat();
                let list = segments(0, &[(37, 0..0), (prefix, 0..0), (own, 37..37 + prefix), (37, 0..37)]);
                let (out, _) = forward(&device, &packed, &list, rule);
                assert!(part(&out, width, 37..37 + prefix + own) == whole, "{prefix} and {own} among others");
            }
        }
    }
    for shape in [shape(2, 1, 16), shape(2, 1, 64), shape(1, 1, 128)] {
        for rule in std::iter::once(TestRule::full(shape)).chain(TestRule::variants(shape, 20)) {
            match shape.head_dim {
                16 => check::<f32>(&rule),
                _ => check::<bf16>(&rule),
            }
        }
    }
}
