//! Gather, scatter and sums of rows against a reference.

use device::ops::rows::{RowGroups, add_bias, add_rows, column_sums, gather_rows, scatter_rows};
use device::{Storage, bf16};

use crate::common::{assert_close, devices, noise};

use super::support::{narrow, wide, widen};

const WIDTHS: [usize; 6] = [1, 7, 33, 40, 896, 2600];

fn check<T: Storage + PartialEq>(tolerance: f64) {
    // One key often, some once, some never, unsorted.
    let keys = [3, 9, 3, 0, 3, 3, 8, 3, 0, 3, 3, 3];
    let n = 11;
    for device in devices() {
        for width in WIDTHS {
            let (table, g): (Vec<T>, Vec<T>) =
                (narrow(noise(n * width, 1)), narrow(noise(keys.len() * width, 2)));
            let (on_table, on_keys) = (device.upload(&table).unwrap(), device.upload(&keys).unwrap());
            let mut out = device.zeros::<T>(keys.len() * width).unwrap();
            gather_rows(&device, on_table.all(), on_keys.all(), width, out.all_mut()).unwrap();
            let expected: Vec<T> =
                keys.iter().flat_map(|key| table[*key as usize * width..][..width].iter().copied()).collect();
            assert_eq!(device.download(out.all()).unwrap(), expected);

            let groups = RowGroups::new(&device, &keys).unwrap();
            assert_eq!((groups.len(), groups.groups()), (12, 4));
            let on_g = device.upload(&g).unwrap();
            let start = noise(n * width, 3);
            let mut sums = start.clone();
            let mut expected = vec![0.0; n * width];
            for (key, g) in keys.iter().zip(g.chunks(width)) {
                for (i, g) in g.iter().enumerate() {
                    sums[*key as usize * width + i] += g.widen();
                    expected[*key as usize * width + i] += f64::from(g.widen());
                }
            }
            let mut to = device.upload(&start).unwrap();
            add_rows(&device, on_g.all(), &groups, width, to.all_mut()).unwrap();
            // In row order, as on the CPU.
            assert_eq!(device.download(to.all()).unwrap(), sums);

            let mut to = device.upload(&table).unwrap();
            scatter_rows(&device, on_g.all(), &groups, width, to.all_mut()).unwrap();
            assert_close(&widen(&device.download(to.all()).unwrap()), &expected, tolerance);
        }
    }
}

#[test]
fn rows_are_gathered_and_summed() {
    check::<f32>(1e-6);
    check::<bf16>(8e-3);
}

#[test]
fn zero_rows_are_a_no_op() {
    for device in devices() {
        let groups = RowGroups::new(&device, &[]).unwrap();
        assert!(groups.is_empty());
        let none = device.zeros::<f32>(0).unwrap();
        let mut to = device.upload(&[1.0_f32; 6]).unwrap();
        add_rows(&device, none.all(), &groups, 3, to.all_mut()).unwrap();
        column_sums(&device, none.all(), to.view_mut(0..3)).unwrap();
        assert_eq!(device.download(to.all()).unwrap(), [1.0; 6]);
        scatter_rows(&device, none.all(), &groups, 3, to.all_mut()).unwrap();
        assert_eq!(device.download(to.all()).unwrap(), [0.0; 6]);
        let no_rows = device.zeros::<u32>(0).unwrap();
        let mut out = device.zeros::<f32>(0).unwrap();
        gather_rows(&device, to.all(), no_rows.all(), 3, out.all_mut()).unwrap();
    }
}

fn check_columns<T: Storage>(tolerance: f64) {
    for device in devices() {
        for (rows, width) in [(1, 1), (5, 7), (130, 33), (67, 40), (3, 896), (2, 2600), (33_000, 2)] {
            let (x, bias): (Vec<T>, Vec<T>) = (narrow(noise(rows * width, 1)), narrow(noise(width, 2)));
            let (mut on_x, on_bias) = (device.upload(&x).unwrap(), device.upload(&bias).unwrap());
            let start = noise(width, 3);
            let mut sums = device.upload(&start).unwrap();
            column_sums(&device, on_x.all(), sums.all_mut()).unwrap();
            let mut expected: Vec<f64> = start.iter().map(|start| f64::from(*start)).collect();
            wide(&x).chunks(width).for_each(|row| (0..width).for_each(|i| expected[i] += row[i]));
            assert_close(&device.download(sums.all()).unwrap(), &expected, 1e-4);

            add_bias(&device, on_x.all_mut(), on_bias.all()).unwrap();
            let bias = wide(&bias);
            let expected: Vec<f64> = wide(&x).iter().enumerate().map(|(i, x)| x + bias[i % width]).collect();
            assert_close(&widen(&device.download(on_x.all()).unwrap()), &expected, tolerance);
        }
    }
}

#[test]
fn column_sums_match_f64() {
    check_columns::<f32>(1e-6);
    check_columns::<bf16>(8e-3);
}
