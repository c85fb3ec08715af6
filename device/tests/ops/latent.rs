//! The heads of latent attention against f64.

use device::ops::heads::HeadAngles;
use device::ops::latent::{
    HeadParts, HeadPartsMut, LatentHeads, assemble, assemble_backward, join_columns, narrow_values,
    split_columns, widen_values,
};
use device::{Storage, bf16};

use crate::common::{assert_close, devices, noise};

use super::support::{narrow, wide, widen};

/// Odd parts, parts of 16 bytes, values that are narrower than keys and as wide, one head, and the heads of a model.
fn cases() -> Vec<(usize, LatentHeads)> {
    let of =
        |heads, [nope, rope, value]: [usize; 3]| LatentHeads { heads, nope, rope, value, interleaved: true };
    let all = [
        (5, of(3, [3, 2, 5])),
        (0, of(2, [8, 8, 8])),
        (4, of(1, [7, 6, 1])),
        (7, of(4, [16, 16, 24])),
        (3, of(16, [128, 64, 128])),
        (2, of(5, [192, 64, 256])),
    ];
    let halves = |(rows, heads)| (rows, LatentHeads { interleaved: false, ..heads });
    all.into_iter().chain(all.into_iter().map(halves)).collect()
}

/// `x [rope]` rotated, or for the transpose the inverse.
fn rotated(heads: LatentHeads, x: &[f64], cos: &[f64], sin: &[f64], back: bool) -> Vec<f64> {
    let half = heads.rope / 2;
    let mut out = vec![0.0; heads.rope];
    for i in 0..half {
        let [a, b] = if heads.interleaved { [2 * i, 2 * i + 1] } else { [i, half + i] };
        if back {
            (out[a], out[b]) = (x[i] * cos[i] + x[half + i] * sin[i], x[half + i] * cos[i] - x[i] * sin[i]);
        } else {
            (out[i], out[half + i]) = (x[a] * cos[i] - x[b] * sin[i], x[b] * cos[i] + x[a] * sin[i]);
        }
    }
    out
}

/// Prepared queries, keys and values of a row.
fn assembled(
    heads: LatentHeads,
    [queries, expanded, rotary]: [&[f64]; 3],
    cos: &[f64],
    sin: &[f64],
) -> Vec<f64> {
    let LatentHeads { nope, rope, value, .. } = heads;
    let mut out = Vec::new();
    for query in queries.chunks(nope + rope) {
        out.extend_from_slice(&query[..nope]);
        out.extend(rotated(heads, &query[nope..], cos, sin, false));
    }
    for expanded in expanded.chunks(nope + value) {
        out.extend_from_slice(&expanded[..nope]);
        out.extend(rotated(heads, rotary, cos, sin, false));
    }
    for expanded in expanded.chunks(nope + value) {
        out.extend_from_slice(&expanded[nope..]);
        out.resize(out.len() + nope + rope - value, 0.0);
    }
    out
}

/// The gradients of the parts of a row, for the gradient `g` of what is prepared.
fn slopes(heads: LatentHeads, g: &[f64], cos: &[f64], sin: &[f64]) -> [Vec<f64>; 3] {
    let LatentHeads { heads: count, nope, rope, value, .. } = heads;
    let width = nope + rope;
    let head = |number: usize| &g[number * width..(number + 1) * width];
    let (mut queries, mut expanded, mut sum) = (Vec::new(), Vec::new(), vec![0.0; rope]);
    for number in 0..count {
        queries.extend_from_slice(&head(number)[..nope]);
        queries.extend(rotated(heads, &head(number)[nope..], cos, sin, true));
        expanded.extend_from_slice(&head(count + number)[..nope]);
        expanded.extend_from_slice(&head(2 * count + number)[..value]);
        sum.iter_mut().zip(&head(count + number)[nope..]).for_each(|(sum, g)| *sum += g);
    }
    [queries, expanded, rotated(heads, &sum, cos, sin, true)]
}

fn check<T: Storage>(rows: usize, heads: LatentHeads, turned: bool, tolerance: f64) {
    for device in devices() {
        let (half, width) = (heads.rope / 2, heads.padded().width());
        let [queries, expanded, rotary] = heads.widths();
        let parts: [Vec<T>; 3] =
            [(queries, 1), (expanded, 2), (rotary, 3)].map(|(width, seed)| narrow(noise(rows * width, seed)));
        let g: Vec<T> = narrow(noise(rows * width, 4));
        let [cos, sin] = [5, 6].map(|seed| noise(rows * half, seed));
        let [on_cos, on_sin] = [&cos, &sin].map(|values| device.upload(values).unwrap());
        let angles = turned.then(|| HeadAngles { pairs: half, cos: on_cos.all(), sin: on_sin.all() });
        let row_of =
            |values: &[f64], row: usize, width: usize| values[row * width..(row + 1) * width].to_vec();
        let angles_of = |row: usize| {
            if turned {
                (row_of(&wide(&cos), row, half), row_of(&wide(&sin), row, half))
            } else {
                (vec![1.0; half], vec![0.0; half])
            }
        };

        let on = parts.each_ref().map(|part| device.upload(part).unwrap());
        let on_parts = HeadParts { queries: on[0].all(), expanded: on[1].all(), rotary: on[2].all() };
        let mut out = device.upload(&g).unwrap();
        assemble(&device, heads, on_parts, angles, out.all_mut()).unwrap();
        let all = parts.each_ref().map(|part| wide(part));
        let mut expected = Vec::new();
        for row in 0..rows {
            let (cos, sin) = angles_of(row);
            let [q, e, r] =
                [(0, queries), (1, expanded), (2, rotary)].map(|(at, width)| row_of(&all[at], row, width));
            expected.extend(assembled(heads, [&q, &e, &r], &cos, &sin));
        }
        assert_close(&widen(&device.download(out.all()).unwrap()), &expected, tolerance);

        let on_g = device.upload(&g).unwrap();
        // Whatever was there is replaced.
        let mut d = parts.each_ref().map(|part| device.upload(part).unwrap());
        let [d_queries, d_expanded, d_rotary] = d.each_mut().map(|part| part.all_mut());
        let to = HeadPartsMut { queries: d_queries, expanded: d_expanded, rotary: d_rotary };
        assemble_backward(&device, heads, on_g.all(), angles, to).unwrap();
        let mut expected = [Vec::new(), Vec::new(), Vec::new()];
        for row in 0..rows {
            let (cos, sin) = angles_of(row);
            let of_row = slopes(heads, &row_of(&wide(&g), row, width), &cos, &sin);
            expected.iter_mut().zip(of_row).for_each(|(all, own)| all.extend(own));
        }
        for (found, expected) in d.iter().zip(expected) {
            assert_close(&widen(&device.download(found.all()).unwrap()), &expected, tolerance);
        }
    }
}

#[test]
fn heads_are_made_of_their_parts() {
    for (rows, heads) in cases() {
        for turned in [true, false] {
            check::<f32>(rows, heads, turned, 1e-5);
            check::<bf16>(rows, heads, turned, 1.2e-2);
        }
    }
}

fn check_columns<T: Storage + PartialEq>() {
    for device in devices() {
        for (rows, left, right) in [(5, 3, 2), (3, 64, 16), (0, 8, 8), (40, 512, 64), (2, 9, 8)] {
            let both: Vec<T> = narrow(noise(rows * (left + right), 1));
            let (mut first, mut second) = (Vec::new(), Vec::new());
            for row in both.chunks(left + right) {
                first.extend_from_slice(&row[..left]);
                second.extend_from_slice(&row[left..]);
            }
            let on = device.upload(&both).unwrap();
            let mut parts = [rows * left, rows * right].map(|len| device.zeros::<T>(len).unwrap());
            let [to_first, to_second] = parts.each_mut().map(|part| part.all_mut());
            split_columns(&device, on.all(), left, to_first, to_second).unwrap();
            assert!(device.download(parts[0].all()).unwrap() == first, "{left} of {rows} rows");
            assert!(device.download(parts[1].all()).unwrap() == second, "{right} of {rows} rows");
            let mut joined = device.zeros::<T>(both.len()).unwrap();
            join_columns(&device, parts[0].all(), left, parts[1].all(), joined.all_mut()).unwrap();
            assert!(device.download(joined.all()).unwrap() == both, "{left} and {right} of {rows} rows");
        }
    }
}

#[test]
fn columns_are_divided_and_joined() {
    check_columns::<f32>();
    check_columns::<bf16>();
}

#[test]
fn values_lose_and_get_their_padding() {
    for device in devices() {
        for (rows, heads) in cases() {
            let (padded, value) = (heads.nope + heads.rope, heads.value);
            let attended = noise(rows * heads.heads * padded, 1);
            let expected: Vec<f32> =
                attended.chunks(padded).flat_map(|head| head[..value].iter().copied()).collect();
            let on = device.upload(&attended).unwrap();
            let mut narrowed = device.zeros::<f32>(expected.len()).unwrap();
            narrow_values(&device, heads, on.all(), narrowed.all_mut()).unwrap();
            assert_eq!(device.download(narrowed.all()).unwrap(), expected);
            let mut widened = device.upload(&attended).unwrap();
            widen_values(&device, heads, narrowed.all(), widened.all_mut()).unwrap();
            let zeros = vec![0.0; padded - value];
            let expected: Vec<f32> =
                attended.chunks(padded).flat_map(|head| [&head[..value], &zeros].concat()).collect();
            assert_eq!(device.download(widened.all()).unwrap(), expected);
        }
    }
}
