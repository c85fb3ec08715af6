//! The gate on the result of a gated DeltaNet against f64.

use device::ops::result_gate::{gate_result, gate_result_backward};
use device::{Storage, bf16};

use crate::common::{assert_close, devices, noise};

use super::support::{narrow, wide, widen};

fn check<T: Storage>(tolerance: f64) {
    for device in devices() {
        for (rows, width, first) in [(0, 3, 2), (1, 1, 0), (5, 7, 4), (40, 64, 128)] {
            let stride = first + width;
            let (x, g): (Vec<T>, Vec<T>) = (narrow(noise(rows * width, 1)), narrow(noise(rows * width, 2)));
            let projection: Vec<T> = narrow(noise(rows * stride, 3).into_iter().map(|x| 4.0 * x).collect());
            let [on_x, mut on_g, on_projection] = [&x, &g, &projection].map(|x| device.upload(x).unwrap());
            let mut out = device.zeros::<T>(x.len()).unwrap();
            let mut d_projection = device.upload(&vec![T::narrow(7.0); projection.len()]).unwrap();
            gate_result(&device, on_x.all(), on_projection.all(), width, out.all_mut()).unwrap();
            gate_result_backward(
                &device,
                on_x.all(),
                on_projection.all(),
                width,
                on_g.all_mut(),
                d_projection.all_mut(),
            )
            .unwrap();
            let (mut expected, mut dx, mut of_gates) = (Vec::new(), Vec::new(), vec![7.0; projection.len()]);
            for (at, (x, g)) in wide(&x).into_iter().zip(wide(&g)).enumerate() {
                let place = at / width * stride + first + at % width;
                let gate = f64::from(projection[place].widen());
                let open = 1.0 / (1.0 + (-gate).exp());
                expected.push(x * gate * open);
                dx.push(g * gate * open);
                of_gates[place] = g * x * open * (1.0 + gate * (1.0 - open));
            }
            assert_close(&widen(&device.download(out.all()).unwrap()), &expected, tolerance);
            assert_close(&widen(&device.download(on_g.all()).unwrap()), &dx, tolerance);
            assert_close(&widen(&device.download(d_projection.all()).unwrap()), &of_gates, tolerance);
        }
    }
}

#[test]
fn gated_results_match_f64() {
    check::<f32>(1e-5);
    check::<bf16>(8e-3);
}
