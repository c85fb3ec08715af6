//! QK norm and rotary embedding against f64.

use device::ops::heads::{HeadNorm, HeadShape, angles, head_norm_gradient, prepare, prepare_backward};
use device::{Device, Storage, bf16};

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

/// A case in f64.
struct HeadCase {
    shape: HeadShape,
    cos: Vec<f64>,
    sin: Vec<f64>,
    norm: Option<[Vec<f64>; 2]>,
}

impl HeadCase {
    /// Rotates the pairs of a head of row `row`; `direction` -1 is the inverse.
    fn rotate(&self, head: &mut [f64], row: usize, direction: f64) {
        let half = self.shape.head_dim / 2;
        for i in 0..half {
            let (cos, sin) = (self.cos[row * half + i], direction * self.sin[row * half + i]);
            let (a, b) = (head[i], head[i + half]);
            (head[i], head[i + half]) = (a * cos - b * sin, b * cos + a * sin);
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

    fn weight(&self, head: usize) -> Option<&[f64]> {
        self.norm.as_ref().map(|norm| norm[usize::from(head >= self.shape.heads)].as_slice())
    }

    fn inverse(head: &[f64]) -> f64 {
        1.0 / (head.iter().map(|x| x * x).sum::<f64>() / head.len() as f64 + f64::from(EPS)).sqrt()
    }

    fn prepare(&self, qkv: &mut [f64]) {
        self.visit(qkv.len(), |row, head, at| {
            let x = &mut qkv[at..at + self.shape.head_dim];
            if let Some(weight) = self.weight(head) {
                let inverse = Self::inverse(x);
                x.iter_mut().zip(weight).for_each(|(x, w)| *x *= inverse * w);
            }
            self.rotate(x, row, 1.0);
        });
    }

    /// Gradient of the raw projection, in place of `g`, and of the weights.
    fn backward(&self, raw: &[f64], g: &mut [f64]) -> Vec<f64> {
        let dim = self.shape.head_dim;
        let mut slopes = vec![0.0; 2 * dim];
        self.visit(raw.len(), |row, head, at| {
            let (x, g) = (&raw[at..at + dim], &mut g[at..at + dim]);
            self.rotate(g, row, -1.0);
            let inverse = Self::inverse(x);
            let to = usize::from(head >= self.shape.heads) * dim;
            (0..dim).for_each(|i| slopes[to + i] += g[i] * x[i] * inverse);
            if let Some(w) = self.weight(head) {
                let product: f64 = (0..dim).map(|i| g[i] * w[i] * x[i]).sum();
                let pull = product * inverse.powi(3) / dim as f64;
                (0..dim).for_each(|i| g[i] = g[i] * w[i] * inverse - x[i] * pull);
            }
        });
        slopes
    }
}

fn check<T: Storage>(device: &Device, rows: usize, shape: HeadShape, with_norm: bool, tolerance: f64) {
    let (count, dim) = (rows * shape.width(), shape.head_dim);
    let positions: Vec<u32> = (0..rows as u32).map(|row| row * 37 % 101).collect();
    let inv_freq: Vec<f32> = (0..dim / 2).map(|i| 1e4_f32.powf(-2.0 * i as f32 / dim as f32)).collect();
    let (on_positions, on_freq) = (device.upload(&positions).unwrap(), device.upload(&inv_freq).unwrap());
    let [mut cos, mut sin] = [0; 2].map(|_| device.zeros::<f32>(rows * dim / 2).unwrap());
    angles(device, on_positions.all(), on_freq.all(), cos.all_mut(), sin.all_mut()).unwrap();

    let (raw, g): (Vec<T>, Vec<T>) = (narrow(noise(count, 1)), narrow(noise(count, 2)));
    let (query, key): (Vec<T>, Vec<T>) = (narrow(noise(dim, 3)), narrow(noise(dim, 4)));
    let start = noise(2 * dim, 5);
    let [on_raw, on_query, on_key, on_g] =
        [&raw, &query, &key, &g].map(|values| device.upload(values).unwrap());
    let norm = with_norm.then(|| HeadNorm { query: on_query.all(), key: on_key.all(), eps: EPS });
    let case = HeadCase {
        shape,
        cos: wide(&device.download(cos.all()).unwrap()),
        sin: wide(&device.download(sin.all()).unwrap()),
        norm: with_norm.then(|| [wide(&query), wide(&key)]),
    };

    let mut out = device.upload(&raw).unwrap();
    prepare(device, out.all_mut(), shape, norm, cos.all(), sin.all()).unwrap();
    let mut expected = wide(&raw);
    case.prepare(&mut expected);
    assert_close(&widen(&device.download(out.all()).unwrap()), &expected, tolerance);

    let mut dx = device.upload(&g).unwrap();
    let needed = with_norm.then(|| on_raw.all());
    prepare_backward(device, needed, shape, norm, cos.all(), sin.all(), dx.all_mut()).unwrap();
    let mut expected = wide(&g);
    let slopes = case.backward(&wide(&raw), &mut expected);
    assert_close(&widen(&device.download(dx.all()).unwrap()), &expected, tolerance);

    let mut gradient = device.upload(&start).unwrap();
    let (c, s) = (cos.all(), sin.all());
    head_norm_gradient(device, on_raw.all(), shape, EPS, c, s, on_g.all(), gradient.all_mut()).unwrap();
    let expected: Vec<f64> =
        slopes.iter().zip(&start).map(|(slope, start)| slope + f64::from(*start)).collect();
    assert_close(&device.download(gradient.all()).unwrap(), &expected, 2e-5);
}

#[test]
fn heads_match_f64() {
    for device in devices() {
        for (rows, shape) in SHAPES {
            for with_norm in [false, true] {
                check::<f32>(&device, rows, shape, with_norm, 2e-5);
                check::<bf16>(&device, rows, shape, with_norm, 8e-3);
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
        angles(&device, on_positions.all(), on_freq.all(), cos.all_mut(), sin.all_mut()).unwrap();
        // The angle itself is f32 by design.
        let angles: Vec<f64> =
            positions.iter().flat_map(|p| inv_freq.map(|f| f64::from(*p as f32 * f))).collect();
        let expected: Vec<f64> = angles.iter().map(|a| a.cos()).collect();
        assert_close(&device.download(cos.all()).unwrap(), &expected, 1e-6);
        let expected: Vec<f64> = angles.iter().map(|a| a.sin()).collect();
        assert_close(&device.download(sin.all()).unwrap(), &expected, 1e-6);
    }
}
