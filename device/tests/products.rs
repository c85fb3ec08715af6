//! Matrix products against a plain loop in f64.

use device::{Matrix, MatrixMut, Storage, bf16};

use crate::common::{assert_close, devices, noise};

fn check<A: Storage, C: Storage>(tolerance: f64) {
    for device in devices() {
        for (m, n, k) in [(1, 1, 1), (3, 5, 7), (33, 17, 64)] {
            for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
                let narrow = |values: Vec<f32>| values.into_iter().map(A::narrow).collect::<Vec<A>>();
                let (a, b) = (narrow(noise(m * k, 1)), narrow(noise(k * n, 2)));
                let c: Vec<C> = noise(m * n, 3).into_iter().map(C::narrow).collect();
                let (on_a, on_b) = (device.upload(&a).unwrap(), device.upload(&b).unwrap());
                let mut on_c = device.upload(&c).unwrap();
                let left =
                    if ta { Matrix::new(on_a.all(), m).transposed() } else { Matrix::new(on_a.all(), k) };
                let right =
                    if tb { Matrix::new(on_b.all(), k).transposed() } else { Matrix::new(on_b.all(), n) };
                device.product(left, right, MatrixMut::new(on_c.all_mut(), n), 0.5, 2.0).unwrap();
                let at = |i: usize, p: usize| f64::from(a[if ta { p * m + i } else { i * k + p }].widen());
                let bt = |p: usize, j: usize| f64::from(b[if tb { j * k + p } else { p * n + j }].widen());
                let expected: Vec<f64> = (0..m * n)
                    .map(|x| {
                        let sum: f64 = (0..k).map(|p| at(x / n, p) * bt(p, x % n)).sum();
                        0.5 * sum + 2.0 * f64::from(c[x].widen())
                    })
                    .collect();
                let found: Vec<f32> =
                    device.download(on_c.all()).unwrap().into_iter().map(Storage::widen).collect();
                assert_close(&found, &expected, tolerance);
            }
        }
    }
}

#[test]
fn products_match_f64() {
    check::<f32, f32>(1e-5);
    check::<bf16, f32>(1e-5);
    check::<bf16, bf16>(8e-3);
}
