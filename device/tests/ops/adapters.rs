//! Factors of rows with different adapters against f64.

use device::ops::adapters::{
    AdaptedOutputs, AdapterFactors, AdapterPlace, NO_ADAPTER, RowAdapters, add_adapted, add_embedded,
    shrunk_len,
};
use device::{Device, DeviceBuffer, Storage, bf16};

use crate::common::{assert_close, devices, noise};

use super::support::{narrow, wide, widen};

/// An operation with some networks, whose adapters differ in rank; the last adapter has nothing of the second site.
struct Case<T: Storage> {
    of: AdaptedOutputs,
    /// All factors.
    factors: Vec<T>,
}

impl<T: Storage> Case<T> {
    fn new(
        [input, output, networks]: [usize; 3],
        sites: Vec<std::ops::Range<usize>>,
        ranks: &[usize],
    ) -> Self {
        let (mut len, mut places) = (3, Vec::new());
        for number in 0..networks * sites.len() * ranks.len() {
            let (site, adapter) = (number / ranks.len() % sites.len(), number % ranks.len());
            let rank = ranks[adapter];
            let (a, b) = (len, len + rank * input);
            let there = site != 1 || adapter + 1 < ranks.len();
            places.push(there.then_some(AdapterPlace { a, b, rank, scale: 0.5 + adapter as f32 }));
            if there {
                len = b + rank * sites[site].len();
            }
        }
        let factors = narrow(noise(len, 7));
        Self { of: AdaptedOutputs { input, output, sites, adapters: ranks.len(), places }, factors }
    }

    fn on(&self, device: &Device) -> (DeviceBuffer<T>, DeviceBuffer<u32>) {
        let table = self.of.table(self.factors.len());
        (device.upload(&self.factors).unwrap(), device.upload(&table).unwrap())
    }

    /// What the adapter adds to the row `out` of the network, where `product` gives that of a row of `A` with the input.
    fn add(&self, network: usize, adapter: u32, out: &mut [f64], product: impl Fn(&[f64]) -> f64) {
        let AdaptedOutputs { input, sites, adapters, places, .. } = &self.of;
        let factors = wide(&self.factors);
        for (site, columns) in sites.iter().enumerate().filter(|_| (adapter as usize) < *adapters) {
            let place = places[(network * sites.len() + site) * adapters + adapter as usize];
            let Some(AdapterPlace { a, b, rank, scale }) = place else { continue };
            let shrunk: Vec<f64> = (0..rank).map(|i| product(&factors[a + i * input..][..*input])).collect();
            for (row, out) in out[columns.clone()].iter_mut().enumerate() {
                let own = factors[b + row * rank..][..rank].iter().zip(&shrunk);
                *out += f64::from(scale) * own.map(|(b, shrunk)| b * shrunk).sum::<f64>();
            }
        }
    }
}

/// Linear operations of rows that have adapter 1, none, 0, 2, and so on. `Out` is what results are stored in.
fn check<T: Storage, Out: Storage>(case: &Case<T>, per_token: usize, shared: bool, tolerance: f64) {
    for device in devices() {
        let (factors, table) = case.on(&device);
        let AdaptedOutputs { input, output, .. } = case.of;
        for tokens in [1, 7, 20] {
            let rows = tokens * per_token;
            let adapters: Vec<u32> = (0..tokens).map(|t| [1, NO_ADAPTER, 0, 2, 0][t % 5]).collect();
            let networks: Vec<u32> = (0..rows).map(|row| (row * 7 % case.of.networks()) as u32).collect();
            let inputs = if shared { tokens } else { rows };
            let x: Vec<T> = narrow(noise(inputs * input, 1));
            let start: Vec<Out> = narrow(noise(rows * output, 2));
            let [on_adapters, on_networks] =
                [&adapters, &networks].map(|values| device.upload(values).unwrap());
            let of = AdapterFactors {
                factors: factors.all(),
                table: table.all(),
                sites: case.of.sites.len(),
                adapters: case.of.adapters,
                rank: case.of.rank(),
            };
            let several = case.of.networks() > 1;
            let by =
                RowAdapters { of_tokens: on_adapters.all(), networks: several.then(|| on_networks.all()) };
            let (on_x, mut out) = (device.upload(&x).unwrap(), device.upload(&start).unwrap());
            let mut shrunk = device.upload(&vec![f32::NAN; shrunk_len(&of, rows)]).unwrap();
            let x_of = (on_x.all(), input);
            add_adapted(&device, &of, &by, x_of, shrunk.all_mut(), out.all_mut()).unwrap();
            let (x, mut expected) = (wide(&x), wide(&start));
            for (row, out) in expected.chunks_mut(output).enumerate() {
                let token = row / per_token;
                let x = &x[if shared { token } else { row } * input..][..input];
                let network = if several { networks[row] as usize } else { 0 };
                let product = |a: &[f64]| a.iter().zip(x).map(|(a, x)| a * x).sum();
                case.add(network, adapters[token], out, product);
            }
            let found = widen(&device.download(out.all()).unwrap());
            assert_close(&found, &expected, tolerance);
            for (row, found) in found.chunks(output).enumerate() {
                let before = widen(&start[row * output..(row + 1) * output]);
                assert_eq!(found == before, adapters[row / per_token] == NO_ADAPTER, "row {row}");
            }
        }
    }
}

/// Odd widths and ranks, then widths of 16 bytes, several sites with columns of none between them, and many ranks.
fn check_all<T: Storage, Out: Storage>(tolerance: f64) {
    check::<T, Out>(&Case::new([7, 11, 1], vec![0..11], &[3, 1, 2]), 1, false, tolerance);
    check::<T, Out>(
        &Case::new([64, 600, 1], vec![0..320, 320..340, 400..600], &[8, 16, 24]),
        1,
        false,
        tolerance,
    );
    check::<T, Out>(&Case::new([40, 24, 1], vec![0..24], &[33, 5, 1]), 1, false, tolerance);
    let of_experts = Case::new([16, 30, 5], vec![0..15, 15..30], &[4, 2, 9]);
    check::<T, Out>(&of_experts, 3, true, tolerance);
    check::<T, Out>(&of_experts, 3, false, tolerance);
}

#[test]
fn rows_get_the_products_of_their_adapters() {
    check_all::<f32, f32>(1e-5);
    check_all::<bf16, bf16>(1e-2);
    check_all::<bf16, f32>(1e-5);
}

#[test]
fn tokens_get_the_rows_of_their_adapters() {
    for device in devices() {
        let (vocabulary, width) = (13, 20);
        let case = Case::<f32>::new([vocabulary, width, 1], vec![0..width], &[3, 5]);
        let (factors, table) = case.on(&device);
        let (ids, adapters) = ([12_u32, 0, 5, 5, 7], [1, 0, NO_ADAPTER, 1, 0]);
        let [on_ids, on_adapters] = [ids, adapters].map(|values| device.upload(&values).unwrap());
        let of = AdapterFactors {
            factors: factors.all(),
            table: table.all(),
            sites: 1,
            adapters: 2,
            rank: case.of.rank(),
        };
        let by = RowAdapters { of_tokens: on_adapters.all(), networks: None };
        let start = noise(ids.len() * width, 3);
        let mut out = device.upload(&start).unwrap();
        let mut shrunk = device.zeros(shrunk_len(&of, ids.len())).unwrap();
        let tokens = (on_ids.all(), vocabulary);
        add_embedded(&device, &of, &by, tokens, shrunk.all_mut(), out.all_mut()).unwrap();
        let mut expected = wide(&start);
        for ((id, adapter), out) in ids.iter().zip(adapters).zip(expected.chunks_mut(width)) {
            case.add(0, adapter, out, |a| a[*id as usize]);
        }
        assert_close(&device.download(out.all()).unwrap(), &expected, 1e-6);
    }
}
