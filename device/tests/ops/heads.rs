//! QK norm and rotary embedding against f64.

use device::ops::heads::{
    HeadAngles, HeadNorm, HeadNormBackward, HeadShape, Preparation, angles, prepare, prepare_backward,
    prepare_to_pages,
};
use device::ops::paged::{NO_SLOT, PAGE, page_len, write_pages};
use device::{Device, DeviceBuffer, Storage, bf16};

use crate::common::{assert_close, devices, noise};

use super::support::{narrow, wide, widen};

const EPS: f32 = 1e-2;
/// Head shapes and their division into lanes: one value, 16 bytes, several iterations.
const SHAPES: [(usize, HeadShape); 7] = [
    (3, shape(1, 1, 2)),
    (5, shape(4, 2, 6)),
    (40, shape(3, 1, 32)),
    (3, shape(14, 2, 64)),
    (2, shape(2, 1, 128)),
    (3, shape(2, 1, 90)),
    (0, shape(2, 1, 16)),
];

const fn shape(heads: usize, kv_heads: usize, head_dim: usize) -> HeadShape {
    HeadShape { heads, kv_heads, head_dim }
}

/// What is done with heads.
#[derive(Clone, Copy, Debug)]
struct HeadOptions {
    norm: NormOfHeads,
    offset: f32,
    /// Rotated pairs; `None` for a layer without rotary embedding.
    pairs: Option<usize>,
    amplitude: f32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NormOfHeads {
    None,
    PerHead,
    Whole,
}

/// A case in f64.
struct HeadCase {
    shape: HeadShape,
    /// Rotated pairs.
    pairs: usize,
    cos: Vec<f64>,
    sin: Vec<f64>,
    /// Weights with their offset.
    norm: Option<[Vec<f64>; 2]>,
}

impl HeadCase {
    /// Rotates the pairs of a head of row `row`; `direction` -1 is the inverse.
    fn rotate(&self, head: &mut [f64], row: usize, direction: f64) {
        let pairs = self.pairs;
        for i in 0..pairs {
            let (cos, sin) = (self.cos[row * pairs + i], direction * self.sin[row * pairs + i]);
            let (a, b) = (head[i], head[i + pairs]);
            (head[i], head[i + pairs]) = (a * cos - b * sin, b * cos + a * sin);
        }
    }

    /// Calls `visit` with row, head and offset of every query and key.
    fn visit(&self, len: usize, mut visit: impl FnMut(usize, usize, usize)) {
        for row in 0..len / self.shape.width() {
            for head in 0..self.shape.heads + self.shape.kv_heads {
                visit(row, head, row * self.shape.width() + head * self.shape.head_dim);
            }
        }
    }

    /// Calls `visit` with the number, 0 or 1, and the columns of every part of all rows that is normalised.
    fn visit_normed(&self, len: usize, mut visit: impl FnMut(usize, std::ops::Range<usize>)) {
        let Some(norm) = &self.norm else { return };
        for row in 0..len / self.shape.width() {
            for (which, part) in self.shape.parts().into_iter().enumerate() {
                let start = row * self.shape.width();
                for first in part.clone().step_by(norm[which].len()) {
                    visit(which, start + first..start + first + norm[which].len());
                }
            }
        }
    }

    fn inverse(head: &[f64]) -> f64 {
        1.0 / (head.iter().map(|x| x * x).sum::<f64>() / head.len() as f64 + f64::from(EPS)).sqrt()
    }

    fn prepare(&self, qkv: &mut [f64]) {
        self.visit_normed(qkv.len(), |which, columns| {
            let (x, weight) = (&mut qkv[columns], &self.norm.as_ref().unwrap()[which]);
            let inverse = Self::inverse(x);
            x.iter_mut().zip(weight).for_each(|(x, w)| *x *= inverse * w);
        });
        self.visit(qkv.len(), |row, _, at| self.rotate(&mut qkv[at..at + self.shape.head_dim], row, 1.0));
    }

    /// Gradient of the raw projection, in place of `g`, and of the weights.
    fn backward(&self, raw: &[f64], g: &mut [f64]) -> Vec<f64> {
        self.visit(g.len(), |row, _, at| self.rotate(&mut g[at..at + self.shape.head_dim], row, -1.0));
        let mut slopes: Vec<Vec<f64>> = Vec::new();
        slopes.extend(self.norm.iter().flatten().map(|weight| vec![0.0; weight.len()]));
        self.visit_normed(raw.len(), |which, columns| {
            let (x, g, w) = (&raw[columns.clone()], &mut g[columns], &self.norm.as_ref().unwrap()[which]);
            let (inverse, width) = (Self::inverse(x), w.len());
            (0..width).for_each(|i| slopes[which][i] += g[i] * x[i] * inverse);
            let product: f64 = (0..width).map(|i| g[i] * w[i] * x[i]).sum();
            let pull = product * inverse.powi(3) / width as f64;
            (0..width).for_each(|i| g[i] = g[i] * w[i] * inverse - x[i] * pull);
        });
        slopes.concat()
    }
}

fn check<T: Storage>(device: &Device, rows: usize, shape: HeadShape, options: HeadOptions, tolerance: f64) {
    let HeadOptions { norm, offset, pairs, amplitude } = options;
    let (count, dim) = (rows * shape.width(), shape.head_dim);
    let positions: Vec<u32> = (0..rows as u32).map(|row| row * 37 % 101).collect();
    let rotated = pairs.unwrap_or(0);
    let inv_freq: Vec<f32> = (0..rotated).map(|i| 1e4_f32.powf(-2.0 * i as f32 / dim as f32)).collect();
    let (on_positions, on_freq) = (device.upload(&positions).unwrap(), device.upload(&inv_freq).unwrap());
    let [mut cos, mut sin] = [0; 2].map(|_| device.zeros::<f32>(rows * rotated).unwrap());
    angles(device, on_positions.all(), on_freq.all(), amplitude, cos.all_mut(), sin.all_mut()).unwrap();
    let on_angles = pairs.map(|pairs| HeadAngles { pairs, cos: cos.all(), sin: sin.all() });

    let (raw, g): (Vec<T>, Vec<T>) = (narrow(noise(count, 1)), narrow(noise(count, 2)));
    let [of_query, of_key] = match norm {
        NormOfHeads::None | NormOfHeads::PerHead => [dim; 2],
        NormOfHeads::Whole => shape.parts().map(|part| part.len()),
    };
    let (query, key): (Vec<T>, Vec<T>) = (narrow(noise(of_query, 3)), narrow(noise(of_key, 4)));
    let start = noise(of_query + of_key, 5);
    let [on_raw, on_query, on_key] = [&raw, &query, &key].map(|values| device.upload(values).unwrap());
    let on_norm = (norm != NormOfHeads::None).then(|| HeadNorm {
        query: on_query.all(),
        key: on_key.all(),
        offset,
        eps: EPS,
    });
    let with_offset = |w: &[T]| wide(w).iter().map(|w| w + f64::from(offset)).collect::<Vec<f64>>();
    let case = HeadCase {
        shape,
        pairs: rotated,
        cos: wide(&device.download(cos.all()).unwrap()),
        sin: wide(&device.download(sin.all()).unwrap()),
        norm: on_norm.map(|_| [with_offset(&query), with_offset(&key)]),
    };

    let mut out = device.upload(&raw).unwrap();
    let how = Preparation { bias: None, norm: on_norm, angles: on_angles };
    prepare(device, out.all_mut(), shape, how).unwrap();
    let mut expected = wide(&raw);
    case.prepare(&mut expected);
    assert_close(&widen(&device.download(out.all()).unwrap()), &expected, tolerance);

    let bias: Vec<T> = narrow(noise(shape.width(), 6));
    let on_bias = device.upload(&bias).unwrap();
    let mut out = device.upload(&raw).unwrap();
    let how = Preparation { bias: Some(on_bias.all()), ..how };
    prepare(device, out.all_mut(), shape, how).unwrap();
    let mut expected = wide(&raw);
    expected.iter_mut().zip(wide(&bias).iter().cycle()).for_each(|(x, bias)| *x += bias);
    case.prepare(&mut expected);
    let found = device.download(out.all()).unwrap();
    assert_close(&widen(&found), &expected, 2.0 * tolerance);
    for how in [how, Preparation { bias: None, ..how }] {
        check_pages(device, &on_raw, shape, how);
    }

    let mut dx = device.upload(&g).unwrap();
    let mut gradient = device.upload(&start).unwrap();
    let of_norm =
        on_norm.map(|norm| HeadNormBackward { norm, raw: on_raw.all(), gradient: Some(gradient.all_mut()) });
    prepare_backward(device, shape, of_norm, on_angles, dx.all_mut()).unwrap();
    let mut expected = wide(&g);
    let slopes = case.backward(&wide(&raw), &mut expected);
    assert_close(&widen(&device.download(dx.all()).unwrap()), &expected, tolerance);
    if on_norm.is_some() {
        let expected: Vec<f64> =
            slopes.iter().zip(&start).map(|(slope, start)| slope + f64::from(*start)).collect();
        // The gradient of a weight of all heads together is computed from rotated values as they are stored.
        let of_weights = if norm == NormOfHeads::Whole { tolerance } else { 2e-5 };
        assert_close(&device.download(gradient.all()).unwrap(), &expected, of_weights);
    }
}

/// Keys and values get to pages as they are written there apart.
fn check_pages<T: Storage>(
    device: &Device,
    raw: &DeviceBuffer<T>,
    shape: HeadShape,
    how: Preparation<'_, T>,
) {
    let rows = raw.len() / shape.width();
    let pages = rows.div_ceil(PAGE) + 1;
    let slots: Vec<u32> =
        (0..rows).map(|row| if row == 1 { NO_SLOT } else { (pages * PAGE - 1 - row) as u32 }).collect();
    let slots = device.upload(&slots).unwrap();
    let [mut apart, mut together] = [0; 2].map(|_| device.zeros::<T>(raw.len()).unwrap());
    let [mut expected, mut found] = [0; 2].map(|_| device.zeros::<T>(pages * page_len(shape)).unwrap());
    device.copy(raw.all(), apart.all_mut()).unwrap();
    device.copy(raw.all(), together.all_mut()).unwrap();
    prepare(device, apart.all_mut(), shape, how).unwrap();
    write_pages(device, apart.all(), slots.all(), shape, expected.all_mut()).unwrap();
    prepare_to_pages(device, together.all_mut(), shape, how, slots.all(), found.all_mut()).unwrap();
    for (found, expected) in [(&together, &apart), (&found, &expected)] {
        let [found, expected] =
            [found, expected].map(|values| widen(&device.download(values.all()).unwrap()));
        assert!(found == expected, "{shape:?} {how:?}");
    }
}

#[test]
fn heads_match_f64() {
    for device in devices() {
        for (rows, shape) in SHAPES {
            let half = shape.head_dim / 2;
            for norm in [NormOfHeads::None, NormOfHeads::PerHead, NormOfHeads::Whole] {
                let plain = HeadOptions { norm, offset: 0.0, pairs: Some(half), amplitude: 1.0 };
                let partial = HeadOptions { offset: 1.0, pairs: Some(half / 2), amplitude: 1.3, ..plain };
                let none = HeadOptions { pairs: None, ..plain };
                for options in [plain, partial, none] {
                    check::<f32>(&device, rows, shape, options, 2e-5);
                    check::<bf16>(&device, rows, shape, options, 1.2e-2);
                }
            }
        }
    }
}

#[test]
fn angles_are_accurate_at_large_positions() {
    for device in devices() {
        let (positions, inv_freq) = ([0, 1, 31, 4095, 131_071], [1.0, 0.3, 1e-4]);
        let (on_positions, on_freq) = (device.upload(&positions).unwrap(), device.upload(&inv_freq).unwrap());
        let [mut cos, mut sin] = [0; 2].map(|_| device.zeros::<f32>(15).unwrap());
        angles(&device, on_positions.all(), on_freq.all(), 0.7, cos.all_mut(), sin.all_mut()).unwrap();
        // The angle itself is f32 by design.
        let angles: Vec<f64> =
            positions.iter().flat_map(|p| inv_freq.map(|f| f64::from(*p as f32 * f))).collect();
        let expected: Vec<f64> = angles.iter().map(|a| 0.7 * a.cos()).collect();
        assert_close(&device.download(cos.all()).unwrap(), &expected, 1e-6);
        let expected: Vec<f64> = angles.iter().map(|a| 0.7 * a.sin()).collect();
        assert_close(&device.download(sin.all()).unwrap(), &expected, 1e-6);
    }
}
