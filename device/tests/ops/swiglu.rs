//! SwiGLU against f64.

use device::ops::swiglu::{swiglu, swiglu_backward};
use device::{Storage, bf16};

use crate::common::{assert_close, devices, noise};

use super::support::{narrow, wide, widen};

fn check<T: Storage>(tolerance: f64) {
    for device in devices() {
        for (rows, width) in [(3, 1), (5, 7), (2, 33), (67, 40), (3, 896), (0, 16), (2, 2600)] {
            // Some gates are far from zero.
            let values = noise(rows * 2 * width, 1).into_iter().map(|value| value * 4.0).collect();
            let (gate_up, g): (Vec<T>, Vec<T>) = (narrow(values), narrow(noise(rows * width, 2)));
            let (on_gate_up, on_g) = (device.upload(&gate_up).unwrap(), device.upload(&g).unwrap());
            let mut out = device.zeros::<T>(rows * width).unwrap();
            let mut dx = device.zeros::<T>(rows * 2 * width).unwrap();
            swiglu(&device, on_gate_up.all(), width, out.all_mut()).unwrap();
            swiglu_backward(&device, on_gate_up.all(), width, on_g.all(), dx.all_mut()).unwrap();

            let (mut expected, mut expected_dx) = (Vec::new(), Vec::new());
            for (row, g) in wide(&gate_up).chunks(2 * width).zip(wide(&g).chunks(width)) {
                let (gate, up) = row.split_at(width);
                let open: Vec<f64> = gate.iter().map(|gate| 1.0 / (1.0 + (-gate).exp())).collect();
                expected.extend((0..width).map(|i| gate[i] * open[i] * up[i]));
                expected_dx
                    .extend((0..width).map(|i| g[i] * up[i] * open[i] * (1.0 + gate[i] * (1.0 - open[i]))));
                expected_dx.extend((0..width).map(|i| g[i] * gate[i] * open[i]));
            }
            assert_close(&widen(&device.download(out.all()).unwrap()), &expected, tolerance);
            assert_close(&widen(&device.download(dx.all()).unwrap()), &expected_dx, tolerance);
        }
    }
}

#[test]
fn activations_match_f64() {
    check::<f32>(1e-5);
    check::<bf16>(8e-3);
}

#[test]
fn large_gates_do_not_overflow() {
    for device in devices() {
        let gate_up = device.upload(&[-200.0_f32, 200.0, 1.0, 1.0]).unwrap();
        let (mut out, mut dx) = (device.zeros(2).unwrap(), device.zeros(4).unwrap());
        swiglu(&device, gate_up.all(), 2, out.all_mut()).unwrap();
        assert_eq!(device.download(out.all()).unwrap(), [0.0, 200.0]);
        let g = device.upload(&[1.0_f32, 1.0]).unwrap();
        swiglu_backward(&device, gate_up.all(), 2, g.all(), dx.all_mut()).unwrap();
        assert_eq!(device.download(dx.all()).unwrap(), [0.0, 1.0, 0.0, 200.0]);
    }
}
