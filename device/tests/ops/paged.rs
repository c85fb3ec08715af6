//! Decode attention over a paged KV cache against a reference in f64.

use device::ops::attention::{AttentionHeads, Segment};
use device::ops::heads::HeadShape;
use device::ops::paged::{
    NO_SLOT, PAGE, PageTable, PagedTokens, copy_pages, page_len, paged_attention, scratch_len, write_pages,
};
use device::{Device, DeviceBuffer, Storage, bf16};

use crate::common::{assert_close, devices, noise};

use super::attention::{TestRule, shape};
use super::support::{narrow, wide, widen};

/// Sequences in a cache whose unused pages and positions are NaN.
pub(super) struct Cached<T: Storage> {
    pub(super) shape: HeadShape,
    pub(super) max_pages: usize,
    /// `[rows, width]` of all sequences.
    pub(super) qkv: Vec<T>,
    /// Rows of each sequence.
    pub(super) segments: Vec<Segment>,
    pub(super) tables: DeviceBuffer<u32>,
    pub(super) cache: DeviceBuffer<T>,
}

impl<T: Storage> Cached<T> {
    pub(super) fn new(device: &Device, lengths: &[usize], max_pages: usize, shape: HeadShape) -> Self {
        let rows: usize = lengths.iter().sum();
        let qkv: Vec<T> = narrow(noise(rows * shape.width(), 7).into_iter().map(|x| 2.0 * x).collect());
        let mut segments = Vec::new();
        let (mut start, mut pages) = (0, 0);
        let mut tables = Vec::new();
        let mut slots = Vec::new();
        for length in lengths {
            segments.push(Segment { rows: start..start + length, prefix: 0..0 });
            start += length;
            // In reverse order, with an unused page between any two.
            let used = length.div_ceil(PAGE);
            let table: Vec<u32> = (0..used).map(|page| (pages + 2 * (used - page) - 1) as u32).collect();
            pages += 2 * used;
            slots.extend((0..*length).map(|at| table[at / PAGE] * PAGE as u32 + (at % PAGE) as u32));
            tables.extend(table.into_iter().chain(std::iter::repeat(u32::MAX)).take(max_pages));
        }
        let nan = vec![T::narrow(f32::NAN); (pages + 1) * page_len(shape)];
        let mut cache = device.upload(&nan).unwrap();
        let (on_qkv, slots) = (device.upload(&qkv).unwrap(), device.upload(&slots).unwrap());
        write_pages(device, on_qkv.all(), slots.all(), shape, cache.all_mut()).unwrap();
        let tables = device.upload(&tables).unwrap();
        Self { shape, max_pages, qkv, segments, tables, cache }
    }

    /// Results of tokens, given as sequence and position.
    fn attend(&self, device: &Device, rule: &TestRule, tokens: &[(usize, usize)]) -> Vec<T> {
        let width = self.shape.width();
        let row = |(sequence, at): &(usize, usize)| self.segments[*sequence].rows.start + at;
        let qkv: Vec<T> =
            tokens.iter().flat_map(|token| self.qkv[row(token) * width..][..width].to_vec()).collect();
        let positions: Vec<u32> = tokens.iter().map(|(_, at)| *at as u32).collect();
        let sequences: Vec<u32> = tokens.iter().map(|(sequence, _)| *sequence as u32).collect();
        let [positions, sequences] = [positions, sequences].map(|values| device.upload(&values).unwrap());
        let qkv = device.upload(&qkv).unwrap();
        let mut out = device.zeros::<T>(tokens.len() * self.shape.query_width()).unwrap();
        let mut scratch = device.zeros::<f32>(scratch_len(tokens.len(), self.max_pages, self.shape)).unwrap();
        let paged = PagedTokens {
            positions: positions.all(),
            table: PageTable { pages: self.tables.all(), columns: self.max_pages },
            sequence_of: sequences.all(),
        };
        let sinks = device.upload(&rule.stored::<T>()).unwrap();
        let (to, heads) = (out.all_mut(), rule.heads(&sinks));
        paged_attention(device, qkv.all(), self.cache.all(), &paged, heads, to, scratch.all_mut()).unwrap();
        device.download(out.all()).unwrap()
    }
}

fn check<T: Storage + PartialEq>(shape: HeadShape, tolerance: f64) {
    check_rule::<T>(&TestRule::full(shape), tolerance);
}

fn check_rule<T: Storage + PartialEq>(rule: &TestRule, tolerance: f64) {
    let (shape, width) = (rule.shape, rule.shape.query_width());
    for device in devices() {
        let lengths = [1, 15, 16, 17, 130, 300, 600];
        let cached = Cached::<T>::new(&device, &lengths, 40, shape);
        let tokens: Vec<(usize, usize)> = lengths
            .iter()
            .enumerate()
            .flat_map(|(sequence, length)| [(sequence, length - 1), (sequence, length / 2)])
            .chain([(6, 255), (6, 256), (6, 511)])
            .collect();
        let found = cached.attend(&device, rule, &tokens);
        let qkv = wide(&cached.qkv);
        let (expected, _) = rule.reference::<T>(&qkv).forward(&cached.segments);
        let expected: Vec<f64> = tokens
            .iter()
            .flat_map(|(sequence, at)| {
                expected[(cached.segments[*sequence].rows.start + at) * width..][..width].to_vec()
            })
            .collect();
        assert_close(&widen(&found), &expected, tolerance);
        // One token at a time.
        for (i, token) in tokens.iter().enumerate().step_by(3) {
            assert!(
                cached.attend(&device, rule, &[*token]) == found[i * width..][..width],
                "{token:?} alone"
            );
        }
        // In a grid without parts.
        let short = Cached::<T>::new(&device, &lengths[..5], 9, shape);
        assert!(
            short.attend(&device, rule, &tokens[..10]) == found[..10 * width],
            "where contexts are short"
        );
        assert!(short.attend(&device, rule, &[]).is_empty());
    }
}

#[test]
fn f32_kernels_match_f64() {
    check::<f32>(shape(2, 1, 16), 1e-5);
    check::<f32>(shape(9, 1, 7), 1e-5);
    check::<f32>(shape(14, 2, 40), 1e-5);
    check::<bf16>(shape(2, 2, 16), 1e-2);
    check::<bf16>(shape(1, 1, 256), 1e-2);
}

#[test]
fn tensor_core_kernels_match_f64() {
    check::<bf16>(shape(1, 1, 64), 1e-2);
    check::<bf16>(shape(14, 2, 64), 1e-2);
    check::<bf16>(shape(17, 1, 64), 1e-2);
    check::<bf16>(shape(4, 2, 128), 1e-2);
}

/// Windows of one position, within a page, over pages, over parts and longer than a context.
#[test]
fn windows_and_sinks_match_f64() {
    for window in [1, 5, 16, 17, 100, 256, 257, 300, 1000] {
        for rule in TestRule::variants(shape(2, 1, 8), window) {
            check_rule::<f32>(&rule, 1e-5);
        }
    }
    for window in [1, 17, 257] {
        for rule in TestRule::variants(shape(4, 2, 64), window) {
            check_rule::<bf16>(&rule, 1e-2);
        }
    }
    for rule in TestRule::variants(shape(9, 1, 24), 40) {
        check_rule::<bf16>(&rule, 1e-2);
    }
    for rule in TestRule::variants(shape(17, 1, 128), 40) {
        check_rule::<bf16>(&rule, 1e-2);
    }
}

/// Positions whose keys and values are NaN, before the page where the window begins.
#[test]
fn pages_outside_of_windows_are_not_read() {
    fn check<T: Storage + PartialEq>(shape: HeadShape) {
        let rule = TestRule { window: 40, ..TestRule::full(shape) };
        for device in devices() {
            let mut cached = Cached::<T>::new(&device, &[600], 40, shape);
            let expected = cached.attend(&device, &rule, &[(0, 598), (0, 599)]);
            let nan = device.upload(&vec![T::narrow(f32::NAN); 544 * shape.width()]).unwrap();
            let pages = device.download(cached.tables.all()).unwrap();
            let slots: Vec<u32> =
                (0..544).map(|at| pages[at / PAGE] * PAGE as u32 + (at % PAGE) as u32).collect();
            let slots = device.upload(&slots).unwrap();
            write_pages(&device, nan.all(), slots.all(), shape, cached.cache.all_mut()).unwrap();
            assert!(cached.attend(&device, &rule, &[(0, 598), (0, 599)]) == expected);
        }
    }
    check::<f32>(shape(2, 1, 8));
    check::<bf16>(shape(2, 1, 64));
}

#[test]
fn a_replayed_graph_reads_new_positions() {
    let (shape, width) = (shape(2, 1, 64), shape(2, 1, 64).query_width());
    let rule = TestRule { window: 200, ..TestRule::full(shape) };
    for device in devices() {
        let cached = Cached::<bf16>::new(&device, &[300], 20, shape);
        let mut qkv = device.zeros::<bf16>(shape.width()).unwrap();
        let mut positions = device.zeros::<u32>(1).unwrap();
        let sequences = device.zeros::<u32>(1).unwrap();
        let mut out = device.zeros::<bf16>(width).unwrap();
        let mut scratch = device.zeros::<f32>(scratch_len(1, 20, shape)).unwrap();
        let mut attend = || {
            let tokens = PagedTokens {
                positions: positions.all(),
                table: PageTable { pages: cached.tables.all(), columns: 20 },
                sequence_of: sequences.all(),
            };
            let (cache, to, scratch) = (cached.cache.all(), out.all_mut(), scratch.all_mut());
            let heads = AttentionHeads { window: rule.window, ..AttentionHeads::full(shape) };
            paged_attention(&device, qkv.all(), cache, &tokens, heads, to, scratch)
        };
        // Kernels have to be loaded before a capture.
        attend().unwrap();
        let graph = device.record(attend).unwrap();
        for at in [3, 270, 299, 255] {
            let row = &cached.qkv[at * shape.width()..][..shape.width()];
            device.upload_to(row, qkv.all_mut()).unwrap();
            device.upload_to(&[at as u32], positions.all_mut()).unwrap();
            graph.replay().unwrap();
            assert!(
                device.download(out.all()).unwrap() == cached.attend(&device, &rule, &[(0, at)]),
                "at {at}"
            );
        }
    }
}

#[test]
fn tokens_without_a_slot_are_not_written() {
    fn check<T: Storage + PartialEq>(shape: HeadShape) {
        for device in devices() {
            let qkv: Vec<T> = narrow(noise(3 * shape.width(), 1));
            let mut cache = device.zeros::<T>(2 * page_len(shape)).unwrap();
            let slots = device.upload(&[NO_SLOT, 5, PAGE as u32 + 2]).unwrap();
            let on_qkv = device.upload(&qkv).unwrap();
            write_pages(&device, on_qkv.all(), slots.all(), shape, cache.all_mut()).unwrap();
            let mut expected = vec![T::default(); 2 * page_len(shape)];
            for (row, page, place) in [(1, 0, 5), (2, 1, 2)] {
                for part in 0..2 * shape.kv_heads {
                    let from = row * shape.width() + (shape.heads + part) * shape.head_dim;
                    let to = page * page_len(shape) + (part * PAGE + place) * shape.head_dim;
                    expected[to..to + shape.head_dim].copy_from_slice(&qkv[from..][..shape.head_dim]);
                }
            }
            assert!(device.download(cache.all()).unwrap() == expected);
        }
    }
    check::<f32>(shape(2, 2, 7));
    check::<f32>(shape(2, 1, 8));
    check::<bf16>(shape(3, 1, 6));
    check::<bf16>(shape(3, 3, 24));
}

#[test]
fn pages_are_copied_in_every_layer() {
    fn check<T: Storage + PartialEq>(shape: HeadShape) {
        let (len, layers, pages) = (page_len(shape), 3, 5);
        for device in devices() {
            let mut expected: Vec<T> = narrow(noise(layers * pages * len, 2));
            let mut cache = device.upload(&expected).unwrap();
            let pairs = device.upload(&[4, 0, 1, 3, 4, 2_u32]).unwrap();
            copy_pages(&device, pairs.all(), cache.all_mut(), pages * len, len).unwrap();
            for layer in expected.chunks_mut(pages * len) {
                for (from, to) in [(4, 0), (1, 3), (4, 2)] {
                    layer.copy_within(from * len..(from + 1) * len, to * len);
                }
            }
            assert!(device.download(cache.all()).unwrap() == expected);
            let none = device.zeros::<u32>(0).unwrap();
            copy_pages(&device, none.all(), cache.all_mut(), pages * len, len).unwrap();
        }
    }
    check::<f32>(shape(2, 1, 7));
    check::<bf16>(shape(4, 2, 64));
}
