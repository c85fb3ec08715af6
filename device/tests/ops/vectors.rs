//! Flat vectors: casts, sums and squares.

use device::ops::vectors::{add, add_multiple, cast, scale, sum_of_squares};
use device::{Storage, bf16};

use crate::common::{devices, noise};

use super::support::narrow;

const LENGTHS: [usize; 6] = [0, 1, 3, 1024, 4099, 70_001];

fn check_cast<A: Storage, B: Storage>() {
    for device in devices() {
        for len in LENGTHS {
            let from: Vec<A> = narrow(noise(len, 1));
            let on = device.upload(&from).unwrap();
            let mut to = device.zeros::<B>(len).unwrap();
            cast(&device, on.all(), to.all_mut()).unwrap();
            let expected: Vec<B> = from.iter().map(|value| B::narrow(value.widen())).collect();
            assert_eq!(bytes(&device.download(to.all()).unwrap()), bytes(&expected));
        }
    }
}

/// As bits of f32.
fn bytes<T: Storage>(values: &[T]) -> Vec<u32> {
    values.iter().map(|value| value.widen().to_bits()).collect()
}

#[test]
fn casts_round_to_nearest() {
    check_cast::<f32, f32>();
    check_cast::<f32, bf16>();
    check_cast::<bf16, f32>();
    check_cast::<bf16, bf16>();
    for device in devices() {
        let special =
            [f32::NAN, f32::INFINITY, -f32::INFINITY, f32::MAX, -0.0, 1e-40, 1.001_953_1, 1.005_859_4];
        let from = device.upload(&special).unwrap();
        let mut to = device.zeros::<bf16>(special.len()).unwrap();
        cast(&device, from.all(), to.all_mut()).unwrap();
        let found = device.download(to.all()).unwrap();
        assert!(found[0].is_nan());
        let expected = special.map(bf16::from_f32);
        assert_eq!(bytes(&found[1..]), bytes(&expected[1..]));
    }
}

#[test]
fn vectors_are_added_and_multiplied() {
    for device in devices() {
        // Aligned and unaligned.
        for (first, len) in LENGTHS.map(|len| (0, len)).into_iter().chain([(1, 4100)]) {
            let (a, b) = (noise(first + len, 1), noise(first + len, 2));
            let (on_a, mut on_b) = (device.upload(&a).unwrap(), device.upload(&b).unwrap());
            add(&device, on_a.view(first..first + len), on_b.view_mut(first..first + len)).unwrap();
            scale(&device, 0.3, on_b.view_mut(first..first + len)).unwrap();
            let mut expected = b.clone();
            (first..first + len).for_each(|i| expected[i] = (b[i] + a[i]) * 0.3);
            assert_eq!(device.download(on_b.all()).unwrap(), expected);
        }
    }
}

#[test]
fn multiples_are_added() {
    fn check<T: Storage>() {
        for device in devices() {
            for (first, len) in LENGTHS.map(|len| (0, len)).into_iter().chain([(1, 4100)]) {
                let (a, b): (Vec<T>, Vec<T>) = (narrow(noise(first + len, 1)), narrow(noise(first + len, 2)));
                let (on_a, mut on_b) = (device.upload(&a).unwrap(), device.upload(&b).unwrap());
                let range = first..first + len;
                add_multiple(&device, on_a.view(range.clone()), -0.3, on_b.view_mut(range.clone())).unwrap();
                scale(&device, 1.7, on_b.view_mut(range.clone())).unwrap();
                let mut expected = b.clone();
                for i in range {
                    let sum = T::narrow((-0.3_f32).mul_add(a[i].widen(), b[i].widen()));
                    expected[i] = T::narrow(sum.widen() * 1.7);
                }
                assert_eq!(bytes(&device.download(on_b.all()).unwrap()), bytes(&expected));
            }
        }
    }
    check::<f32>();
    check::<bf16>();
}

#[test]
fn squares_are_summed_in_f64() {
    for device in devices() {
        for len in LENGTHS {
            let x = noise(len, 1);
            let expected: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
            let on = device.upload(&x).unwrap();
            let found = sum_of_squares(&device, on.all()).unwrap();
            assert!((found - expected).abs() <= 1e-12 * expected, "{found} in place of {expected}");
            assert_eq!(found.to_bits(), sum_of_squares(&device, on.all()).unwrap().to_bits());
        }
        let large = device.upload(&[1e30_f32; 10]).unwrap();
        assert!((sum_of_squares(&device, large.all()).unwrap() / 1e61 - 1.0).abs() < 1e-6);
        for (odd, is_nan) in [(f32::NAN, true), (f32::INFINITY, false)] {
            let mut x = noise(5000, 1);
            x[4321] = odd;
            let sum = sum_of_squares(&device, device.upload(&x).unwrap().all()).unwrap();
            assert!(!sum.is_finite() && sum.is_nan() == is_nan);
        }
    }
}
