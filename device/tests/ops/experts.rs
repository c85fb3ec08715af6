//! Products of experts and their rows against a reference in f64.

use device::ops::experts::{
    BiasedResults, ExpertInputs, ExpertProduct, add_gated, add_slots, bias_gradients, gated_backward,
    weigh_rows, weight_gradients,
};
use device::ops::routes::{GivenSlots, Padding, RouteInputs, RouteMemory, Router, RouterKind};
use device::{Device, DeviceBuffer, Storage, bf16};

use crate::common::{assert_close, devices, noise};

use super::support::{narrow, wide, widen};

const KIND: RouterKind = RouterKind::Softmax { normalized: true };

/// Tokens that are routed, and what a reference needs of it.
struct Case {
    router: Router,
    tokens: usize,
    memory: RouteMemory,
    /// Expert, token and weight of each row.
    rows: Vec<(usize, usize, f64)>,
    /// `[T, k]` the row of each slot.
    row_of: Vec<usize>,
}

impl Case {
    /// Every third token goes to the first experts, so that some have many rows; the last expert has none.
    fn new(device: &Device, router: Router, tokens: usize) -> Self {
        let mut memory = RouteMemory::new(device, &[router], tokens).unwrap();
        device.upload_to(&noise(tokens * router.experts, 3), memory.logits(router, tokens)).unwrap();
        let all = router.experts - 1;
        let of = |token: usize| {
            let step = if token.is_multiple_of(3) { 0 } else { token % all };
            let mut own: Vec<u16> = (0..router.per_token).map(|k| ((k + step) % all) as u16).collect();
            own.sort_unstable();
            own
        };
        let given: Vec<u16> = (0..tokens).flat_map(of).collect();
        let given = device.upload(&given).unwrap();
        let given = Some(GivenSlots { all: given.all(), slots: router.per_token, first: 0 });
        let inputs = RouteInputs::<f32> { bias: None, correction: None, given, padding: None };
        memory.route(device, router, tokens, inputs).unwrap();
        let routes = memory.routes(router, tokens);
        let [experts, slots, row_of] =
            [routes.experts, routes.slots, routes.rows].map(|list| device.download(list).unwrap());
        let weights = device.download(routes.weights).unwrap();
        let row = |slot: &u32| {
            let slot = *slot as usize;
            (experts[slot] as usize, slot / router.per_token, f64::from(weights[slot]))
        };
        let rows = slots.iter().map(row).collect();
        let row_of = row_of.iter().map(|row| *row as usize).collect();
        Self { router, tokens, memory, rows, row_of }
    }
}

fn cases(device: &Device) -> Vec<Case> {
    let router = |experts, per_token| Router { experts, per_token, kind: KIND };
    // Low tiles, of which some are not full, and high ones.
    vec![
        Case::new(device, router(5, 2), 3),
        Case::new(device, router(9, 3), 60),
        Case::new(device, router(3, 2), 140),
    ]
}

fn upload<T: Storage>(device: &Device, len: usize, seed: u64) -> (DeviceBuffer<T>, Vec<f64>) {
    let values: Vec<T> = narrow(noise(len, seed));
    (device.upload(&values).unwrap(), wide(&values))
}

fn check_products<T: Storage>(tolerance: f64) {
    for device in devices() {
        for case in cases(&device) {
            // Widths that vectors divide, and that they do not.
            for (input, output) in [(48, 136), (7, 33), (130, 20)] {
                check_product::<T>(&device, &case, [input, output], tolerance);
            }
        }
    }
}

fn check_product<T: Storage>(device: &Device, case: &Case, [input, output]: [usize; 2], tolerance: f64) {
    let Case { router, tokens, memory, rows, .. } = case;
    let (routes, len) = (memory.routes(*router, *tokens), rows.len());
    let (on_weights, weights) = upload::<T>(device, router.experts * input * output, 1);
    let (on_bias, bias) = upload::<T>(device, router.experts * output, 2);
    let (on_x, x) = upload::<T>(device, tokens * input, 3);
    let (on_g, g) = upload::<T>(device, len * output, 4);
    let product = ExpertProduct { weights: on_weights.all(), bias: Some(on_bias.all()), input, output };
    let mut out = device.zeros::<T>(len * output).unwrap();
    product.apply(device, &routes, ExpertInputs::OfTokens(on_x.all()), out.all_mut()).unwrap();
    let mut d_x = device.zeros::<T>(len * input).unwrap();
    product.input_gradient(device, &routes, ExpertInputs::OfRows(on_g.all()), d_x.all_mut()).unwrap();
    let start = noise(router.experts * input * output, 5);
    let mut d_weights = device.upload(&start).unwrap();
    let (of_g, of_x) = (ExpertInputs::OfRows(on_g.all()), ExpertInputs::OfTokens(on_x.all()));
    weight_gradients(device, &routes, of_g, of_x, input, d_weights.all_mut()).unwrap();

    let (mut expected, mut expected_dx) = (Vec::new(), Vec::new());
    let mut expected_weights: Vec<f64> = start.iter().map(|value| f64::from(*value)).collect();
    for ((expert, token, _), g) in rows.iter().zip(g.chunks(output)) {
        let own = &weights[expert * input * output..][..input * output];
        let x = &x[token * input..][..input];
        let of = |n: usize| own[n * input..][..input].iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
        expected.extend((0..output).map(|n| of(n) + bias[expert * output + n]));
        expected_dx.extend((0..input).map(|k| (0..output).map(|n| g[n] * own[n * input + k]).sum::<f64>()));
        for (n, g) in g.iter().enumerate() {
            let to = &mut expected_weights[(expert * output + n) * input..][..input];
            to.iter_mut().zip(x).for_each(|(to, x)| *to += g * x);
        }
    }
    assert_close(&widen(&device.download(out.all()).unwrap()), &expected, tolerance);
    assert_close(&widen(&device.download(d_x.all()).unwrap()), &expected_dx, tolerance);
    assert_close(&device.download(d_weights.all()).unwrap(), &expected_weights, 1e-5);
}

#[test]
fn products_match_f64() {
    check_products::<f32>(1e-5);
    check_products::<bf16>(8e-3);
}

/// The bits of a row do not depend on the rows beside it, nor on the height of the tile that it is in.
fn check_bits<T: Storage + PartialEq>() {
    let router = Router { experts: 3, per_token: 2, kind: KIND };
    for device in devices() {
        let (input, output) = (72, 40);
        let (weights, _) = upload::<T>(&device, 3 * input * output, 1);
        let (x, _) = upload::<T>(&device, 140 * input, 2);
        let product = ExpertProduct { weights: weights.all(), bias: None, input, output };
        let of = |tokens: usize| {
            let Case { memory, row_of, .. } = Case::new(&device, router, tokens);
            let mut out = device.zeros::<T>(tokens * 2 * output).unwrap();
            let x = ExpertInputs::OfTokens(x.view(0..tokens * input));
            product.apply(&device, &memory.routes(router, tokens), x, out.all_mut()).unwrap();
            let out = device.download(out.all()).unwrap();
            let rows = row_of[..10].iter().map(|row| out[row * output..][..output].to_vec());
            rows.collect::<Vec<_>>()
        };
        assert!(of(5) == of(140));
    }
}

#[test]
fn a_row_has_the_same_bits_beside_any_other_rows() {
    check_bits::<f32>();
    check_bits::<bf16>();
}

fn check_rows<T: Storage>(tolerance: f64) {
    for device in devices() {
        for Case { router, tokens, memory, rows, row_of } in cases(&device) {
            let (routes, len, k) = (memory.routes(router, tokens), rows.len(), router.per_token);
            for (width, hidden) in [(40, 24), (7, 33)] {
                let (on_y, y) = upload::<T>(&device, len * width, 1);
                for weighted in [false, true] {
                    let (mut out, base) = upload::<T>(&device, tokens * width, 2);
                    add_slots(&device, &routes, on_y.all(), weighted, out.all_mut()).unwrap();
                    let mut expected = base;
                    for (slot, row) in row_of.iter().enumerate() {
                        let weight = if weighted { rows[*row].2 } else { 1.0 };
                        let to = &mut expected[slot / k * width..][..width];
                        to.iter_mut().zip(&y[row * width..]).for_each(|(to, y)| *to += weight * y);
                    }
                    assert_close(&widen(&device.download(out.all()).unwrap()), &expected, tolerance);
                }

                let (mut d, own_d) = upload::<T>(&device, len * width, 3);
                let (mut a, own_a) = upload::<T>(&device, len * width, 4);
                let (on_g, g) = upload::<T>(&device, tokens * hidden, 5);
                let (on_bias, bias) = upload::<T>(&device, router.experts * hidden, 6);
                let mut d_weights = device.zeros::<f32>(len).unwrap();
                let biased = Some(BiasedResults { g: on_g.all(), bias: on_bias.all() });
                let (of_d, of_a) = (d.all_mut(), a.all_mut());
                weigh_rows(&device, &routes, of_d, of_a, biased, d_weights.all_mut()).unwrap();
                let mut expected = vec![0.0; len];
                for (slot, row) in row_of.iter().enumerate() {
                    let (expert, token, _) = rows[*row];
                    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                    expected[slot] = dot(&own_d[row * width..][..width], &own_a[row * width..])
                        + dot(&g[token * hidden..][..hidden], &bias[expert * hidden..]);
                }
                assert_close(&device.download(d_weights.all()).unwrap(), &expected, 1e-5);
                for (found, own) in [(&d, &own_d), (&a, &own_a)] {
                    let expected: Vec<f64> =
                        own.iter().enumerate().map(|(i, value)| value * rows[i / width].2).collect();
                    assert_close(&widen(&device.download(found.all()).unwrap()), &expected, tolerance);
                }
            }
        }
    }
}

#[test]
fn rows_are_summed_and_weighed() {
    check_rows::<f32>(1e-5);
    check_rows::<bf16>(8e-3);
}

fn check_biases<T: Storage>() {
    for device in devices() {
        for Case { router, tokens, memory, rows, .. } in cases(&device) {
            let routes = memory.routes(router, tokens);
            for width in [40, 7] {
                let start = noise(router.experts * width, 1);
                let mut sums = device.upload(&start).unwrap();
                let (on_g, g) = upload::<T>(&device, tokens * width, 2);
                let (on_rows, of_rows) = upload::<T>(&device, rows.len() * width, 3);
                let of_tokens = ExpertInputs::OfTokens(on_g.all());
                bias_gradients(&device, &routes, of_tokens, true, sums.all_mut()).unwrap();
                let plain = ExpertInputs::OfRows(on_rows.all());
                bias_gradients(&device, &routes, plain, false, sums.all_mut()).unwrap();
                let mut expected: Vec<f64> = start.iter().map(|value| f64::from(*value)).collect();
                for (row, (expert, token, weight)) in rows.iter().enumerate() {
                    for (i, to) in expected[expert * width..][..width].iter_mut().enumerate() {
                        *to += weight * g[token * width + i] + of_rows[row * width + i];
                    }
                }
                assert_close(&device.download(sums.all()).unwrap(), &expected, 1e-5);
            }
        }
    }
}

#[test]
fn biases_have_the_sums_of_their_rows() {
    check_biases::<f32>();
    check_biases::<bf16>();
}

#[test]
fn padding_adds_nothing() {
    let router = Router { experts: 4, per_token: 2, kind: KIND };
    for device in devices() {
        let mut memory = RouteMemory::new(&device, &[router], 3).unwrap();
        device.upload_to(&noise(12, 3), memory.logits(router, 3)).unwrap();
        let places = device.upload(&[5, 32, 6]).unwrap();
        let padding = Some(Padding { slots: places.all(), end: 32 });
        let inputs = RouteInputs::<f32> { bias: None, correction: None, given: None, padding };
        memory.route(&device, router, 3, inputs).unwrap();
        let routes = memory.routes(router, 3);
        let (weights, _) = upload::<f32>(&device, 4 * 6 * 8, 1);
        let (x, _) = upload::<f32>(&device, 3 * 6, 2);
        let product = ExpertProduct { weights: weights.all(), bias: None, input: 6, output: 8 };
        let mut y = device.upload(&[9.0_f32; 6 * 8]).unwrap();
        product.apply(&device, &routes, ExpertInputs::OfTokens(x.all()), y.all_mut()).unwrap();
        assert_eq!(device.download(y.view(4 * 8..6 * 8)).unwrap(), [9.0; 16], "rows of padding");
        let mut out = device.zeros::<f32>(3 * 8).unwrap();
        add_slots(&device, &routes, y.all(), true, out.all_mut()).unwrap();
        let out = device.download(out.all()).unwrap();
        let is_zero = |row: &[f32]| row.iter().all(|value| *value == 0.0);
        assert_eq!(out.chunks(8).map(is_zero).collect::<Vec<_>>(), [false, true, false]);
    }
}

fn check_gates<T: Storage>(tolerance: f64) {
    for device in devices() {
        for (rows, width) in [(3, 1), (5, 33), (2, 600), (0, 4)] {
            let ((on_y, y), (on_g, g)) =
                (upload::<T>(&device, rows * width, 1), upload::<T>(&device, rows * width, 2));
            let (on_gate, gate) = upload::<f32>(&device, rows, 3);
            let (mut out, base) = upload::<T>(&device, rows * width, 4);
            add_gated(&device, on_y.all(), on_gate.all(), out.all_mut()).unwrap();
            let (mut d_y, mut d_gate) =
                (device.zeros::<T>(rows * width).unwrap(), device.zeros(rows).unwrap());
            let (of_y, of_gate) = (d_y.all_mut(), d_gate.all_mut());
            gated_backward(&device, on_y.all(), on_gate.all(), on_g.all(), of_y, of_gate).unwrap();
            let open: Vec<f64> = gate.iter().map(|gate| 1.0 / (1.0 + (-gate).exp())).collect();
            let expected = |of: &dyn Fn(usize) -> f64| (0..rows * width).map(of).collect::<Vec<_>>();
            let sums = expected(&|i| base[i] + open[i / width] * y[i]);
            assert_close(&widen(&device.download(out.all()).unwrap()), &sums, tolerance);
            let slopes = expected(&|i| open[i / width] * g[i]);
            assert_close(&widen(&device.download(d_y.all()).unwrap()), &slopes, tolerance);
            let of_row = |row: usize| -> f64 { (row * width..(row + 1) * width).map(|i| y[i] * g[i]).sum() };
            let slopes: Vec<f64> =
                open.iter().enumerate().map(|(row, open)| of_row(row) * open * (1.0 - open)).collect();
            assert_close(&device.download(d_gate.all()).unwrap(), &slopes, 1e-5);
        }
    }
}

#[test]
fn gates_of_rows_match_f64() {
    check_gates::<f32>(1e-5);
    check_gates::<bf16>(8e-3);
}
