//! Gated units against f64.

use device::ops::gated_unit::{UnitKind, gated_unit, gated_unit_backward, gated_unit_backward_in_place};
use device::{Storage, bf16};

use crate::common::{assert_close, devices, noise};

use super::support::{narrow, wide, widen};

const KINDS: [UnitKind; 3] =
    [UnitKind::Silu, UnitKind::Gelu, UnitKind::Clamped { alpha: 1.702_f32, limit: 1.5 }];

/// Value, and derivatives by gate and up.
fn unit(kind: UnitKind, gate: f64, up: f64) -> [f64; 3] {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match kind {
        UnitKind::Silu => {
            let open = sigmoid(gate);
            [gate * open * up, up * open * (1.0 + gate * (1.0 - open)), gate * open]
        }
        UnitKind::Gelu => {
            let root = (2.0 / std::f64::consts::PI).sqrt();
            let bent = (root * (gate + 0.044715 * gate.powi(3))).tanh();
            let slope = root * (1.0 + 3.0 * 0.044715 * gate * gate) * (1.0 - bent * bent);
            let gelu = gate / 2.0 * (1.0 + bent);
            [gelu * up, up * ((1.0 + bent) / 2.0 + gate / 2.0 * slope), gelu]
        }
        UnitKind::Clamped { alpha, limit } => {
            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
            let (g, u) = (gate.min(limit), up.clamp(-limit, limit));
            let open = sigmoid(alpha * g);
            let by_gate = (u + 1.0) * open * (1.0 + alpha * g * (1.0 - open));
            let within = |inside: bool, slope: f64| if inside { slope } else { 0.0 };
            [(u + 1.0) * g * open, within(gate <= limit, by_gate), within(up.abs() <= limit, g * open)]
        }
    }
}

fn check<T: Storage>(kind: UnitKind, tolerance: f64) {
    for device in devices() {
        for (rows, width) in [(3, 1), (5, 7), (2, 33), (67, 40), (3, 896), (0, 16), (2, 2600)] {
            // Some gates are far from zero.
            let values = noise(rows * 2 * width, 1).into_iter().map(|value| value * 4.0).collect();
            let (gate_up, g): (Vec<T>, Vec<T>) = (narrow(values), narrow(noise(rows * width, 2)));
            let (on_gate_up, on_g) = (device.upload(&gate_up).unwrap(), device.upload(&g).unwrap());
            let mut out = device.zeros::<T>(rows * width).unwrap();
            let mut dx = device.zeros::<T>(rows * 2 * width).unwrap();
            gated_unit(&device, kind, on_gate_up.all(), width, out.all_mut()).unwrap();
            gated_unit_backward(&device, kind, on_gate_up.all(), width, on_g.all(), dx.all_mut()).unwrap();
            let (mut again, mut dx_again) =
                (device.upload(&g).unwrap(), device.zeros::<T>(dx.len()).unwrap());
            let (of_gate_up, to) = (on_gate_up.all(), dx_again.all_mut());
            gated_unit_backward_in_place(&device, kind, of_gate_up, width, again.all_mut(), to).unwrap();
            for (one, other) in [(&again, &out), (&dx_again, &dx)] {
                let [one, other] = [one, other].map(|buffer| widen(&device.download(buffer.all()).unwrap()));
                assert!(one == other);
            }

            let (mut expected, mut expected_dx) = (Vec::new(), Vec::new());
            for (row, g) in wide(&gate_up).chunks(2 * width).zip(wide(&g).chunks(width)) {
                let all: Vec<_> = (0..width).map(|i| unit(kind, row[i], row[width + i])).collect();
                expected.extend(all.iter().map(|[value, _, _]| value));
                expected_dx.extend(all.iter().zip(g).map(|([_, by_gate, _], g)| g * by_gate));
                expected_dx.extend(all.iter().zip(g).map(|([_, _, by_up], g)| g * by_up));
            }
            assert_close(&widen(&device.download(out.all()).unwrap()), &expected, tolerance);
            assert_close(&widen(&device.download(dx.all()).unwrap()), &expected_dx, tolerance);
        }
    }
}

#[test]
fn activations_match_f64() {
    for kind in KINDS {
        check::<f32>(kind, 1e-5);
        check::<bf16>(kind, 8e-3);
    }
}

#[test]
fn large_gates_do_not_overflow() {
    for device in devices() {
        for kind in [UnitKind::Silu, UnitKind::Gelu] {
            for large in [200.0_f32, 1e20] {
                let gate_up = device.upload(&[-large, large, 1.0, 1.0]).unwrap();
                let (mut out, mut dx) = (device.zeros(2).unwrap(), device.zeros(4).unwrap());
                gated_unit(&device, kind, gate_up.all(), 2, out.all_mut()).unwrap();
                assert_eq!(device.download(out.all()).unwrap(), [0.0, large]);
                let g = device.upload(&[1.0_f32, 1.0]).unwrap();
                gated_unit_backward(&device, kind, gate_up.all(), 2, g.all(), dx.all_mut()).unwrap();
                assert_eq!(device.download(dx.all()).unwrap(), [0.0, 1.0, 0.0, large]);
            }
        }
    }
}
