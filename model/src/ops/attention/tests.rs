//! Attention: derivatives, shared prefixes, windows, and the same bits from pages.

use proptest::prelude::*;

use super::super::check::{gradient, noise, weighted};
use super::*;

fn segments(lengths: &[usize]) -> Vec<Segment> {
    let mut start = 0;
    let segment = |n: &usize| {
        start += n;
        Segment { rows: start - n..start, prefix: 0..0 }
    };
    lengths.iter().map(segment).collect()
}

fn forward(qkv: &[f32], segments: &[Segment], rule: AttentionRule) -> Vec<f32> {
    let qkv = matrix(qkv.to_vec(), rule.shape.width()).unwrap();
    values(&packed(&qkv, segments, 0, rule).unwrap()).unwrap().to_vec()
}

#[test]
fn backward_is_the_derivative() {
    let shape = HeadShape { heads: 4, kv_heads: 2, head_dim: 6 };
    // A prefix with two continuations, and sequences of their own.
    let mut segments = segments(&[5, 1, 3, 40]);
    segments[1].prefix = 0..5;
    segments[2].prefix = 0..5;
    let rows = 49;
    let x: Vec<f32> = noise(rows * shape.width(), 1).iter().map(|x| 2.0 * x).collect();
    let c = noise(rows * shape.query_width(), 2);
    let tensor = |v: &[f32], n| matrix(v.to_vec(), n).unwrap();
    let (qkv, g) = (tensor(&x, shape.width()), tensor(&c, shape.query_width()));
    for window in [usize::MAX, 35, 4, 1] {
        let rule = AttentionRule { window, scale: 0.6, ..AttentionRule::full(shape) };
        let loss = |x: &[f32]| weighted(&forward(x, &segments, rule), &c);
        let dx = packed_backward(&qkv, &segments, 0, rule, &g).unwrap();
        gradient(loss, &x, &dx, 5e-3);
    }
}

/// Rows of `sequence` in a pack of prefix and continuation are the rows of the whole.
#[test]
fn a_shared_prefix_gives_the_bits_of_the_whole() {
    let shape = HeadShape { heads: 6, kv_heads: 2, head_dim: 8 };
    for (prefix, own) in [(1, 1), (7, 40), (33, 5), (70, 70)] {
        let qkv = noise((prefix + own) * shape.width(), 3);
        for window in [usize::MAX, 20, 3] {
            let rule = AttentionRule { window, ..AttentionRule::full(shape) };
            let whole = forward(&qkv, &segments(&[prefix + own]), rule);
            let mut shared = segments(&[prefix, own]);
            shared[1].prefix = 0..prefix;
            assert_eq!(forward(&qkv, &shared, rule), whole);
        }
    }
}

/// A window of `w` is attention over the last `w` keys alone.
#[test]
fn keys_before_a_window_change_nothing() {
    let shape = HeadShape { heads: 2, kv_heads: 1, head_dim: 8 };
    let (rows, window) = (50, 7);
    let qkv = noise(rows * shape.width(), 4);
    let rule = AttentionRule { window, ..AttentionRule::full(shape) };
    let windowed = forward(&qkv, &segments(&[rows]), rule);
    for row in 0..rows {
        let first = (row + 1_usize).saturating_sub(window);
        let last = &qkv[first * shape.width()..(row + 1) * shape.width()];
        let alone = forward(last, &segments(&[row + 1 - first]), AttentionRule::full(shape));
        let width = shape.query_width();
        assert_eq!(windowed[row * width..][..width], alone[(row - first) * width..]);
    }
}

proptest! {
    #[test]
    fn paged_and_packed_give_the_same_bits(
        lengths in prop::collection::vec(1..70usize, 1..4), kv_heads in 1..3usize, per_kv in 1..8usize, dim in 1..20usize,
        window in prop::option::of(1..60usize)
    ) {
        let shape = HeadShape { heads: per_kv * kv_heads, kv_heads, head_dim: 2 * dim };
        let rows: usize = lengths.iter().sum();
        let qkv = noise(rows * shape.width(), 5);
        let rule = AttentionRule { window: window.unwrap_or(usize::MAX), ..AttentionRule::full(shape) };
        let expected = forward(&qkv, &segments(&lengths), rule);
        let layout = PageLayout::new(shape);
        let mut out = vec![0.0; expected.len()];
        for segment in segments(&lengths) {
            let mut pages = vec![vec![f32::NAN; layout.len()]; segment.rows.len().div_ceil(PAGE)];
            for (position, row) in segment.rows.enumerate() {
                let (queries, rest) = qkv[row * shape.width()..][..shape.width()].split_at(shape.query_width());
                let (key, value) = rest.split_at(shape.kv_width());
                layout.write(&mut pages[position / PAGE], position % PAGE, key, value);
                let pages: Vec<&[f32]> = pages[..=position / PAGE].iter().map(Vec::as_slice).collect();
                let out = &mut out[row * shape.query_width()..][..shape.query_width()];
                layout.attend(rule, queries, &pages, position + 1, &mut Vec::new(), out);
            }
        }
        prop_assert_eq!(out, expected);
    }
}
