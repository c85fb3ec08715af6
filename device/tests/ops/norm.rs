//! RMSNorm, forward and backward, against f64.

use device::ops::norm::{RmsNorm, add_rms_norm, rms_norm, rms_norm_backward};
use device::{Storage, bf16};

use crate::common::{assert_close, devices, noise};

use super::support::{narrow, wide, widen};

const EPS: f32 = 1e-2;

/// Inverse root mean square of a row.
fn inverse(x: &[f64]) -> f64 {
    1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + f64::from(EPS)).sqrt()
}

fn check<T: Storage>(tolerance: f64, [offset, factor]: [f32; 2]) {
    for device in devices() {
        for (rows, width) in [(3, 1), (5, 7), (2, 33), (67, 40), (3, 896), (9, 2048), (0, 16), (2, 2600)] {
            let x: Vec<T> = narrow(noise(rows * width, 1));
            let (w, g): (Vec<T>, Vec<T>) = (narrow(noise(width, 2)), narrow(noise(rows * width, 3)));
            let base: Vec<T> = narrow(noise(rows * width, 4));
            let start = noise(width, 5);
            let [on_x, on_w, on_g, on_base] =
                [&x, &w, &g, &base].map(|values| device.upload(values).unwrap());
            let mut out = device.zeros::<T>(rows * width).unwrap();
            let norm = RmsNorm { offset, factor, ..RmsNorm::new(on_w.all(), EPS) };
            rms_norm(&device, on_x.all(), norm, out.all_mut()).unwrap();

            let (x, g, base) = (wide(&x), wide(&g), wide(&base));
            let (offset, factor) = (f64::from(offset), f64::from(factor));
            let w: Vec<f64> = wide(&w).iter().map(|w| (w + offset) * factor).collect();
            let mut expected = Vec::new();
            let mut expected_dx = Vec::new();
            let mut expected_dw: Vec<f64> = start.iter().map(|v| f64::from(*v)).collect();
            for (x, g) in x.chunks(width).zip(g.chunks(width)) {
                let inv = inverse(x);
                let pull: f64 =
                    (0..width).map(|i| g[i] * w[i] * x[i]).sum::<f64>() * inv.powi(3) / width as f64;
                for i in 0..width {
                    expected.push(x[i] * inv * w[i]);
                    expected_dx.push(g[i] * w[i] * inv - x[i] * pull);
                    expected_dw[i] += g[i] * x[i] * inv * factor;
                }
            }
            assert_close(&widen(&device.download(out.all()).unwrap()), &expected, tolerance);
            let mut sum = device.upload(&narrow::<T>(base.iter().map(|v| *v as f32).collect())).unwrap();
            add_rms_norm(&device, on_x.all(), norm, sum.all_mut()).unwrap();
            let expected: Vec<f64> = expected.iter().zip(&base).map(|(y, base)| y + base).collect();
            assert_close(&widen(&device.download(sum.all()).unwrap()), &expected, tolerance);

            for with_base in [false, true] {
                let under = with_base.then(|| on_base.all());
                let mut dw = device.upload(&start).unwrap();
                let (dx, of_weight) = (out.all_mut(), with_base.then(|| dw.all_mut()));
                rms_norm_backward(&device, on_x.all(), norm, on_g.all(), under, dx, of_weight).unwrap();
                if with_base {
                    assert_close(&device.download(dw.all()).unwrap(), &expected_dw, 1e-5);
                }
                let expected: Vec<f64> = expected_dx
                    .iter()
                    .zip(&base)
                    .map(|(dx, base)| if with_base { dx + base } else { *dx })
                    .collect();
                assert_close(&widen(&device.download(out.all()).unwrap()), &expected, tolerance);
            }
        }
    }
}

#[test]
fn norms_match_f64() {
    for changes in [[0.0, 1.0], [1.0, 1.0], [0.5, -0.3]] {
        check::<f32>(2e-5, changes);
        check::<bf16>(8e-3, changes);
    }
}

#[test]
fn unaligned_views_give_the_same_result() {
    for device in devices() {
        let (rows, width) = (3, 64);
        let x: Vec<bf16> = narrow(noise(rows * width + 1, 1));
        let w: Vec<bf16> = narrow(noise(width, 2));
        let (shifted, w) = (device.upload(&x).unwrap(), device.upload(&w).unwrap());
        let straight = device.upload(&x[1..]).unwrap();
        let mut out = [device.zeros::<bf16>(rows * width).unwrap(), device.zeros(rows * width).unwrap()];
        let norm = RmsNorm::new(w.all(), EPS);
        rms_norm(&device, shifted.view(1..x.len()), norm, out[0].all_mut()).unwrap();
        rms_norm(&device, straight.all(), norm, out[1].all_mut()).unwrap();
        let [a, b] = out.map(|out| device.download(out.all()).unwrap());
        assert_close(&widen(&a), &wide(&b), 8e-3);
    }
}

#[test]
fn many_rows_are_summed_in_parts() {
    for device in devices() {
        let (rows, width) = (SLABS_AND_MORE, 3);
        let (x, g) = (noise(rows * width, 1), noise(rows * width, 2));
        let [on_x, on_g] = [&x, &g].map(|values| device.upload(values).unwrap());
        let ones = device.upload(&vec![1.0; width]).unwrap();
        let norm = RmsNorm::new(ones.all(), EPS);
        let (mut out, mut found) = (device.uninit(rows * width).unwrap(), Vec::new());
        for _ in 0..2 {
            let mut dw = device.zeros::<f32>(width).unwrap();
            let (dx, of_weight) = (out.all_mut(), Some(dw.all_mut()));
            rms_norm_backward(&device, on_x.all(), norm, on_g.all(), None, dx, of_weight).unwrap();
            found.push(device.download(dw.all()).unwrap());
        }
        let mut expected = vec![0.0; width];
        for (x, g) in wide(&x).chunks(width).zip(wide(&g).chunks(width)) {
            let inv = inverse(x);
            (0..width).for_each(|i| expected[i] += g[i] * x[i] * inv);
        }
        assert_close(&found[0], &expected, 1e-4);
        assert_eq!(found[0], found[1]);
    }
}

/// Enough rows for several per part.
const SLABS_AND_MORE: usize = 512 * 64 + 77;
