//! Gates on the result of attention against f64.

use device::ops::gates::{gate, gate_backward, gate_in_place, join_gates, split_gates};
use device::ops::heads::HeadShape;
use device::{Storage, bf16};

use crate::common::{assert_close, devices, noise};

use super::attention::shape;
use super::support::{narrow, wide, widen};

/// Odd widths, and widths of 16 bytes.
const SHAPES: [(usize, HeadShape); 4] =
    [(5, shape(4, 2, 6)), (3, shape(3, 1, 16)), (0, shape(2, 1, 8)), (40, shape(2, 2, 64))];

fn check_parts<T: Storage + PartialEq>() {
    for device in devices() {
        for (rows, shape) in SHAPES {
            let (queries, dim) = (shape.query_width(), shape.head_dim);
            let projection: Vec<T> = narrow(noise(rows * (shape.width() + queries), 1));
            let (mut qkv, mut gates) = (Vec::new(), Vec::new());
            for row in projection.chunks(shape.width() + queries) {
                let (heads, rest) = row.split_at(2 * queries);
                for head in heads.chunks(2 * dim) {
                    qkv.extend_from_slice(&head[..dim]);
                    gates.extend_from_slice(&head[dim..]);
                }
                qkv.extend_from_slice(rest);
            }
            let on = device.upload(&projection).unwrap();
            let mut on_qkv = device.zeros::<T>(qkv.len()).unwrap();
            let mut on_gates = device.zeros::<T>(gates.len()).unwrap();
            split_gates(&device, on.all(), shape, on_qkv.all_mut(), on_gates.all_mut()).unwrap();
            assert!(device.download(on_qkv.all()).unwrap() == qkv, "{shape:?}");
            assert!(device.download(on_gates.all()).unwrap() == gates, "{shape:?}");
            let mut joined = device.zeros::<T>(projection.len()).unwrap();
            join_gates(&device, on_qkv.all(), on_gates.all(), shape, joined.all_mut()).unwrap();
            assert!(device.download(joined.all()).unwrap() == projection, "{shape:?}");
        }
    }
}

#[test]
fn gates_lie_behind_the_query_of_their_head() {
    check_parts::<f32>();
    check_parts::<bf16>();
}

fn check<T: Storage + PartialEq>(tolerance: f64) {
    for device in devices() {
        for len in [0, 1, 7, 1024, 4099] {
            let (x, g): (Vec<T>, Vec<T>) = (narrow(noise(len, 1)), narrow(noise(len, 2)));
            let gates: Vec<T> = narrow(noise(len, 3).into_iter().map(|gate| 4.0 * gate).collect());
            let [on_x, on_gates, mut on_g] = [&x, &gates, &g].map(|values| device.upload(values).unwrap());
            let [mut out, mut d_gates] = [0; 2].map(|_| device.zeros::<T>(len).unwrap());
            gate(&device, on_x.all(), on_gates.all(), out.all_mut()).unwrap();
            gate_backward(&device, on_x.all(), on_gates.all(), on_g.all_mut(), d_gates.all_mut()).unwrap();
            let (mut expected, mut dx, mut of_gates) = (Vec::new(), Vec::new(), Vec::new());
            for ((x, gate), g) in wide(&x).iter().zip(wide(&gates)).zip(wide(&g)) {
                let open = 1.0 / (1.0 + (-gate).exp());
                expected.push(x * open);
                dx.push(g * open);
                of_gates.push(g * x * open * (1.0 - open));
            }
            let found = device.download(out.all()).unwrap();
            assert_close(&widen(&found), &expected, tolerance);
            assert_close(&widen(&device.download(on_g.all()).unwrap()), &dx, tolerance);
            assert_close(&widen(&device.download(d_gates.all()).unwrap()), &of_gates, tolerance);
            let mut again = device.upload(&x).unwrap();
            gate_in_place(&device, on_gates.all(), again.all_mut()).unwrap();
            assert!(device.download(again.all()).unwrap() == found, "the bits of {len} gates in place");
        }
    }
}

#[test]
fn gates_match_f64() {
    check::<f32>(1e-5);
    check::<bf16>(8e-3);
}
