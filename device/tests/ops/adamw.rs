//! AdamW updates against f64.

use device::ops::adamw::{AdamwStep, adamw};
use device::{Storage, bf16};

use crate::common::{assert_close, devices, noise};

const STEP: AdamwStep = AdamwStep {
    gradient: 0.7,
    beta1: 0.9,
    beta2: 0.99,
    eps: 1e-8,
    step_size: 0.03,
    second_scale: 1.5,
    keep: 0.999,
};

fn check<T: Storage>(with_compute: bool) {
    for device in devices() {
        for len in [0, 1, 3, 1024, 4099, 70_001] {
            let (values, gradient) = (noise(len, 1), noise(len, 2));
            let first = noise(len, 3);
            let second: Vec<f32> = noise(len, 4).into_iter().map(f32::abs).collect();
            let on_gradient = device.upload(&gradient).unwrap();
            let [mut v, mut m, mut s] =
                [&values, &first, &second].map(|values| device.upload(values).unwrap());
            let mut compute = device.zeros::<T>(len).unwrap();
            let to = with_compute.then(|| compute.all_mut());
            adamw(&device, &STEP, v.all_mut(), m.all_mut(), s.all_mut(), on_gradient.all(), to).unwrap();

            let of = |x: f32| f64::from(x);
            let slope = |i: usize| of(gradient[i]) * of(STEP.gradient);
            let mean = |i: usize| of(STEP.beta1) * of(first[i]) + (1.0 - of(STEP.beta1)) * slope(i);
            let square =
                |i: usize| of(STEP.beta2) * of(second[i]) + (1.0 - of(STEP.beta2)) * slope(i).powi(2);
            let value = |i: usize| {
                let root = (square(i) * of(STEP.second_scale)).sqrt() + of(STEP.eps);
                of(values[i]) * of(STEP.keep) - of(STEP.step_size) * mean(i) / root
            };
            let found = device.download(v.all()).unwrap();
            assert_close(&found, &(0..len).map(value).collect::<Vec<f64>>(), 2e-6);
            assert_close(&device.download(m.all()).unwrap(), &(0..len).map(mean).collect::<Vec<f64>>(), 2e-6);
            assert_close(
                &device.download(s.all()).unwrap(),
                &(0..len).map(square).collect::<Vec<f64>>(),
                2e-6,
            );
            let rounded = device.download(compute.all()).unwrap();
            for (rounded, value) in rounded.iter().zip(&found) {
                let expected = if with_compute { T::narrow(*value).widen() } else { 0.0 };
                assert_eq!(rounded.widen().to_bits(), expected.to_bits());
            }
        }
    }
}

#[test]
fn updates_match_f64() {
    check::<f32>(true);
    check::<bf16>(true);
    check::<bf16>(false);
}

/// `p = torch.nn.Parameter(torch.tensor([1.0, -2.0])); o = torch.optim.AdamW([p], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)`
/// `for g in ([0.5, -1.0], [0.25, 3.0], [-1.0, 0.1]): p.grad = torch.tensor(g); o.step(); print(p.tolist())`
#[test]
fn golden() {
    let expected = [[0.89, -1.88], [0.787_170_7, -1.910_129_6], [0.799_641, -1.931_345_8]];
    let gradients = [[0.5, -1.0], [0.25, 3.0], [-1.0, 0.1]];
    for device in devices() {
        let mut values = device.upload(&[1.0_f32, -2.0]).unwrap();
        let [mut first, mut second] = [0; 2].map(|_| device.zeros::<f32>(2).unwrap());
        for (t, (gradient, expected)) in (1..).zip(gradients.into_iter().zip(expected)) {
            let step = AdamwStep {
                gradient: 1.0,
                beta1: 0.9,
                beta2: 0.95,
                eps: 1e-8,
                step_size: 0.1 / (1.0 - 0.9_f32.powi(t)),
                second_scale: 1.0 / (1.0 - 0.95_f32.powi(t)),
                keep: 1.0 - 0.1 * 0.1,
            };
            let gradient = device.upload(&gradient).unwrap();
            let moments = (first.all_mut(), second.all_mut());
            let compute = None::<device::ViewMut<'_, bf16>>;
            adamw(&device, &step, values.all_mut(), moments.0, moments.1, gradient.all(), compute).unwrap();
            assert_close(&device.download(values.all()).unwrap(), &expected, 2e-6);
        }
    }
}
