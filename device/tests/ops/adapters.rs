//! Factors of rows with different adapters against f64.

use device::ops::adapters::{
    AdaptedOutputs, AdapterFactors, AdapterPlace, NO_ADAPTER, RowAdapters, add_adapted, add_embedded,
    shrunk_len,
};
use device::ops::experts::ExpertInputs;
use device::ops::routes::{RouteInputs, RouteMemory, Router, RouterKind};
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

    /// As kernels take it.
    fn there<'a>(&self, factors: &'a DeviceBuffer<T>, table: &'a DeviceBuffer<u32>) -> AdapterFactors<'a, T> {
        AdapterFactors {
            factors: factors.all(),
            table: table.all(),
            sites: self.of.sites.len(),
            adapters: self.of.adapters,
            rank: self.of.rank(),
        }
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

/// Linear operations of tokens that have adapter 1, none, 0, 2, and so on. `Out` is what results are stored in. With experts, each
/// token has rows of `per_token` of them, in the order of experts, whose inputs are those `of_tokens` or their own.
fn check<T: Storage, Out: Storage>(case: &Case<T>, (per_token, of_tokens): (usize, bool), tolerance: f64) {
    for device in devices() {
        for tokens in [1, 7, 20] {
            check_tokens::<T, Out>(&device, case, tokens, (per_token, of_tokens), tolerance);
        }
    }
}

fn check_tokens<T: Storage, Out: Storage>(
    device: &Device,
    case: &Case<T>,
    tokens: usize,
    (per_token, of_tokens): (usize, bool),
    tolerance: f64,
) {
    let (factors, table) = case.on(device);
    let ([input, output], experts) = ([case.of.input, case.of.output], case.of.networks());
    let router = Router { experts, per_token, kind: RouterKind::Softmax { normalized: true } };
    let mut memory = RouteMemory::new(device, &[router], tokens).unwrap();
    device.upload_to(&noise(tokens * experts, 3), memory.logits(router, tokens)).unwrap();
    let inputs = RouteInputs::<T> { bias: None, correction: None, given: None, padding: None };
    memory.route(device, router, tokens, inputs).unwrap();
    let routes = memory.routes(router, tokens);
    let [chosen, row_of] = [routes.experts, routes.rows].map(|list| device.download(list).unwrap());
    let rows = tokens * per_token;
    let adapters: Vec<u32> = (0..tokens).map(|t| [1, NO_ADAPTER, 0, 2, 0][t % 5]).collect();
    let x: Vec<T> = narrow(noise(if of_tokens { tokens } else { rows } * input, 1));
    let start: Vec<Out> = narrow(noise(rows * output, 2));
    let (on_adapters, on_x) = (device.upload(&adapters).unwrap(), device.upload(&x).unwrap());
    let mut out = device.upload(&start).unwrap();
    let of = case.there(&factors, &table);
    let mut shrunk = device.upload(&vec![f32::NAN; shrunk_len(&of, rows)]).unwrap();
    let by = RowAdapters { of_tokens: on_adapters.all(), routes: (experts > 1).then_some(routes) };
    let on_x = if of_tokens { ExpertInputs::OfTokens(on_x.all()) } else { ExpertInputs::OfRows(on_x.all()) };
    add_adapted(device, &of, &by, (on_x, input), shrunk.all_mut(), out.all_mut()).unwrap();

    let (x, mut expected) = (wide(&x), wide(&start));
    for slot in 0..rows {
        let (token, row) = (slot / per_token, row_of[slot] as usize);
        let x = &x[if of_tokens { token } else { row } * input..][..input];
        let product = |a: &[f64]| a.iter().zip(x).map(|(a, x)| a * x).sum();
        let out = &mut expected[row * output..(row + 1) * output];
        case.add(chosen[slot] as usize, adapters[token], out, product);
    }
    let found = widen(&device.download(out.all()).unwrap());
    assert_close(&found, &expected, tolerance);
    for slot in 0..rows {
        let own = row_of[slot] as usize * output..(row_of[slot] as usize + 1) * output;
        let is_unchanged = found[own.clone()] == widen(&start[own]);
        assert_eq!(is_unchanged, adapters[slot / per_token] == NO_ADAPTER, "slot {slot}");
    }
}

/// Odd widths and ranks, then widths of 16 bytes, several sites with columns of none between them, and many ranks.
fn check_all<T: Storage, Out: Storage>(tolerance: f64) {
    let plain = (1, true);
    check::<T, Out>(&Case::new([7, 11, 1], vec![0..11], &[3, 1, 2]), plain, tolerance);
    let sites = vec![0..320, 320..340, 400..600];
    check::<T, Out>(&Case::new([64, 600, 1], sites, &[8, 16, 24]), plain, tolerance);
    check::<T, Out>(&Case::new([40, 24, 1], vec![0..24], &[33, 5, 1]), plain, tolerance);
    let of_experts = Case::new([16, 30, 5], vec![0..15, 15..30], &[4, 2, 9]);
    for of_tokens in [true, false] {
        check::<T, Out>(&of_experts, (3, of_tokens), tolerance);
        check::<T, Out>(&of_experts, (1, of_tokens), tolerance);
    }
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
        let of = case.there(&factors, &table);
        let by = RowAdapters { of_tokens: on_adapters.all(), routes: None };
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
