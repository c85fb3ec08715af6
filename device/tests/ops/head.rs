//! Log-probability, entropy and their gradients against a reference.

use device::ops::head::{HeadTarget, HeadTargets, PREDICTED, predict, predict_backward};
use device::{Device, Storage, bf16};

use crate::common::{assert_close, devices, noise, rounded};

/// RowTarget of a row.
struct RowTarget {
    token: u32,
    temperature: f32,
    kept: Option<Vec<u32>>,
}

/// Rows of every kind: default, high and low temperature, and with truncation.
fn targets(rows: usize, vocabulary: usize) -> Vec<RowTarget> {
    let target = |i: usize| {
        let kept: Option<Vec<u32>> = match i % 4 {
            2 => Some(
                (0..vocabulary as u32)
                    .filter(|id| *id == 0 || (id * 7 + i as u32).is_multiple_of(5))
                    .collect(),
            ),
            3 => Some(vec![(i * 11 % vocabulary) as u32]),
            _ => None,
        };
        let token = match &kept {
            Some(kept) => kept[i % kept.len()],
            None => (i * 31 % vocabulary) as u32,
        };
        RowTarget { token, temperature: [1.0, 0.6, 1.3][i % 3], kept }
    };
    (0..rows).map(target).collect()
}

fn uploaded(device: &Device, targets: &[RowTarget]) -> HeadTargets {
    let rows = targets.iter().map(|target| HeadTarget {
        token: target.token,
        temperature: target.temperature,
        kept: target.kept.as_deref(),
    });
    HeadTargets::new(device, rows).unwrap()
}

/// Log-probability and entropy, and the gradient by the logits of `slopes[0] * logprob + slopes[1] * entropy`.
fn expected(logits: &[f32], target: &RowTarget, slopes: &[f32]) -> ([f64; 2], Vec<f64>) {
    let all: Vec<u32> = (0..logits.len() as u32).collect();
    let kept = target.kept.as_ref().unwrap_or(&all);
    let scale = 1.0 / f64::from(target.temperature);
    let scaled = |id: u32| f64::from(logits[id as usize]) * scale;
    let top = kept.iter().map(|id| scaled(*id)).fold(f64::NEG_INFINITY, f64::max);
    let log_sum = top + kept.iter().map(|id| (scaled(*id) - top).exp()).sum::<f64>().ln();
    let log_p = |id: u32| scaled(id) - log_sum;
    let entropy = -kept.iter().map(|id| log_p(*id).exp() * log_p(*id)).sum::<f64>();
    let mut gradient = vec![0.0; logits.len()];
    for id in kept {
        let p = log_p(*id).exp();
        let hit = f64::from(u8::from(*id == target.token));
        gradient[*id as usize] =
            scale * (f64::from(slopes[0]) * (hit - p) - f64::from(slopes[1]) * p * (log_p(*id) + entropy));
    }
    ([log_p(target.token).min(0.0), entropy], gradient)
}

fn check<T: Storage>(device: &Device, rows: usize, vocabulary: usize, tolerance: f64) {
    let logits: Vec<f32> = noise(rows * vocabulary, 5).iter().map(|z| 9.0 * z).collect();
    let mut slopes = noise(2 * rows, 6);
    slopes[1] = 0.0;
    let all = targets(rows + 3, vocabulary);
    let on_device = uploaded(device, &all);
    assert_eq!(on_device.len(), rows + 3);
    let logits_there = device.upload(&logits).unwrap();
    let mut predicted = device.uninit(PREDICTED * rows).unwrap();
    predict(device, logits_there.all(), vocabulary, &on_device, 3, predicted.all_mut()).unwrap();
    let slopes_there = device.upload(&slopes).unwrap();
    let mut gradient = device.uninit::<T>(logits.len()).unwrap();
    let (slopes_view, out) = (slopes_there.all(), gradient.all_mut());
    let known = (predicted.all(), slopes_view);
    predict_backward(device, logits_there.all(), vocabulary, &on_device, 3, known, out).unwrap();
    let (predicted, gradient) =
        (device.download(predicted.all()).unwrap(), device.download(gradient.all()).unwrap());
    for row in 0..rows {
        let part = row * vocabulary..(row + 1) * vocabulary;
        let pair = 2 * row..2 * row + 2;
        let (prediction, slope) = expected(&logits[part.clone()], &all[row + 3], &slopes[pair.clone()]);
        assert_close(&predicted[PREDICTED * row..PREDICTED * row + 2], &prediction, 1e-5);
        let found: Vec<f32> = gradient[part].iter().map(|value| value.widen()).collect();
        assert_close(&found, &slope, tolerance);
        assert!(found.iter().zip(&slope).all(|(found, slope)| *slope != 0.0 || *found == 0.0), "row {row}");
    }
}

#[test]
fn predictions_and_gradients_match_f64() {
    for device in devices() {
        for (rows, vocabulary) in [(9, 37), (6, 1000), (5, 4099), (2, 9000), (3, 1)] {
            check::<f32>(&device, rows, vocabulary, 2e-5);
            check::<bf16>(&device, rows, vocabulary, 5e-3);
        }
    }
}

#[test]
fn zero_rows_are_a_no_op() {
    for device in devices() {
        let none = HeadTargets::new(&device, std::iter::empty()).unwrap();
        assert!(none.is_empty());
        let (logits, mut out) = (device.zeros::<f32>(0).unwrap(), device.zeros::<f32>(0).unwrap());
        predict(&device, logits.all(), 10, &none, 0, out.all_mut()).unwrap();
    }
}

/// Minus infinity marks an impossible token; NaN marks a numerical error.
#[test]
fn infinite_logits_and_nan_logits_are_distinguished() {
    let mut logits = rounded(&noise(2 * 50, 7));
    let whole = logits[..50].to_vec();
    logits[5..45].fill(f32::NEG_INFINITY);
    logits[70] = f32::NAN;
    let open: Vec<u32> = (0..5).chain(45..50).collect();
    for device in devices() {
        let all = [
            RowTarget { token: 2, temperature: 0.8, kept: None },
            RowTarget { token: 2, temperature: 0.8, kept: None },
        ];
        let there = device.upload(&logits).unwrap();
        let mut out = device.uninit(2 * PREDICTED).unwrap();
        predict(&device, there.all(), 50, &uploaded(&device, &all), 0, out.all_mut()).unwrap();
        let found = device.download(out.all()).unwrap();
        let among = RowTarget { token: 2, temperature: 0.8, kept: Some(open.clone()) };
        assert_close(&found[..2], &expected(&whole, &among, &[0.0, 0.0]).0, 1e-5);
        let of_second = &found[PREDICTED..PREDICTED + 2];
        assert!(of_second.iter().all(|value| value.is_nan()), "{found:?}");
    }
}
