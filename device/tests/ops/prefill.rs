//! Prefill attention over a paged KV cache has the bits of attention over whole sequences.

use std::ops::Range;

use device::ops::heads::HeadShape;
use device::ops::paged::PageTable;
use device::ops::prefill::{Chunk, Chunks, prefill_attention};
use device::{Device, Storage, bf16};

use crate::common::{assert_close, devices};

use super::attention::{TestRule, forward, shape};
use super::paged::Cached;
use super::support::{wide, widen};

/// Results of the positions `places` of sequences, concatenated.
fn attend<T: Storage>(
    device: &Device,
    cached: &Cached<T>,
    rule: &TestRule,
    chunks: &[(usize, Range<usize>)],
) -> Vec<T> {
    let (mut rows, mut list) = (Vec::new(), Vec::new());
    let width = cached.shape.width();
    for (sequence, places) in chunks {
        let (from, begin) = (cached.segments[*sequence].rows.start, rows.len() / width);
        rows.extend_from_slice(&cached.qkv[(from + places.start) * width..(from + places.end) * width]);
        list.push(Chunk { rows: begin..begin + places.len(), position: places.start, sequence: *sequence });
    }
    let list = Chunks::new(device, &list).unwrap();
    let qkv = device.upload(&rows).unwrap();
    let mut out = device.zeros::<T>(rows.len() / width * cached.shape.query_width()).unwrap();
    let table = PageTable { pages: cached.tables.all(), columns: cached.max_pages };
    let sinks = device.upload(&rule.stored::<T>()).unwrap();
    let (cache, heads) = (cached.cache.all(), rule.heads(&sinks));
    prefill_attention(device, qkv.all(), cache, &list, table, heads, out.all_mut()).unwrap();
    device.download(out.all()).unwrap()
}

fn check<T: Storage + PartialEq>(shape: HeadShape, tolerance: f64) {
    for rule in std::iter::once(TestRule::full(shape)).chain(TestRule::variants(shape, 70)) {
        check_rule::<T>(&rule, tolerance);
    }
}

fn check_rule<T: Storage + PartialEq>(rule: &TestRule, tolerance: f64) {
    let (shape, width) = (rule.shape, rule.shape.query_width());
    for device in devices() {
        let lengths = [1, 15, 64, 65, 130, 200];
        let cached = Cached::<T>::new(&device, &lengths, 16, shape);
        let whole: Vec<_> = lengths.iter().copied().enumerate().map(|(i, length)| (i, 0..length)).collect();
        let found = attend(&device, &cached, rule, &whole);
        let qkv = wide(&cached.qkv);
        let (expected, _) = rule.reference::<T>(&qkv).forward(&cached.segments);
        assert_close(&widen(&found), &expected, tolerance);
        let (in_a_pack, _) = forward(&device, &cached.qkv, &cached.segments, rule);
        assert!(found == in_a_pack, "the bits of a pack");

        // For every division into chunks, in any order.
        let cut = [(5, 70..200), (4, 127..130), (0, 0..1), (4, 0..127), (5, 0..70), (3, 64..65)];
        let pieces = attend(&device, &cached, rule, &cut);
        let mut at = 0;
        for (sequence, places) in cut {
            let from = cached.segments[sequence].rows.start + places.start;
            let of_whole = &found[from * width..(from + places.len()) * width];
            assert!(pieces[at..at + of_whole.len()] == *of_whole, "{places:?} of sequence {sequence}");
            at += of_whole.len();
        }
        assert!(attend(&device, &cached, rule, &[]).is_empty());
    }
}

#[test]
fn f32_kernels_match_f64() {
    check::<f32>(shape(2, 1, 16), 1e-5);
    check::<f32>(shape(3, 3, 7), 1e-5);
    check::<bf16>(shape(2, 1, 40), 1e-2);
}

#[test]
fn tensor_core_kernels_match_f64() {
    check::<bf16>(shape(4, 2, 64), 1e-2);
    check::<bf16>(shape(2, 2, 128), 1e-2);
}
