//! The convolution, the gates and the recurrence of a gated DeltaNet against f64: the formulas of Yang et al. 2024, arXiv 2412.06464,
//! token by token, and their derivatives along directions.

use std::ops::Range;

use device::ops::attention::Segment;
use device::ops::convolution::{
    ConvolutionInputs, DeltaGates, DeltaShape, HeadGradients, InputSource, SequenceSlots,
    convolution_inputs_backward, convolution_kernel_gradient, convolve, convolve_backward, keep_inputs,
    open_gates, open_gates_backward,
};
use device::ops::delta_rule::{DeltaOperands, DeltaRuns, delta_rule, delta_rule_backward, delta_rule_decode};
use device::{Device, Storage, bf16};

use crate::common::{assert_close, devices, noise};

use super::support::{narrow, wide, widen};

/// Heads that are no multiple of a warp, and one that needs two tiles of columns.
const SHAPES: [DeltaShape; 3] = [
    DeltaShape { key_heads: 1, value_heads: 2, key_dim: 5, value_dim: 3, taps: 4 },
    DeltaShape { key_heads: 2, value_heads: 4, key_dim: 16, value_dim: 40, taps: 2 },
    DeltaShape { key_heads: 1, value_heads: 1, key_dim: 33, value_dim: 32, taps: 3 },
];

const ROWS: usize = 69;

/// A sequence of two tokens, one of more than two chunks that three others continue, and one of one chunk; row 67 is in none.
fn segments() -> Vec<Segment> {
    let of = |rows, prefix| Segment { rows, prefix };
    vec![
        of(0..2, 0..0),
        of(2..37, 0..0),
        of(37..38, 2..37),
        of(38..50, 2..37),
        of(50..67, 2..37),
        of(68..69, 0..0),
    ]
}

/// Weights and inputs of all operations, in the storage of the device.
struct Case<T: Storage> {
    shape: DeltaShape,
    /// `[ROWS, channels + 3]`
    projection: Vec<T>,
    kernel: Vec<T>,
    /// `[ROWS, 2, value_heads]`
    gates: Vec<f32>,
    logs: Vec<T>,
    bias: Vec<T>,
}

/// The operands in f64, in the order of [`Case`].
type Operands = [Vec<f64>; 5];

impl<T: Storage> Case<T> {
    fn new(shape: DeltaShape) -> Self {
        let (channels, heads) = (shape.channels(), shape.value_heads);
        Self {
            shape,
            projection: narrow(noise(ROWS * (channels + 3), 1)),
            kernel: narrow(noise(channels * shape.taps, 2)),
            gates: noise(ROWS * 2 * heads, 3),
            logs: narrow(noise(heads, 4)),
            bias: narrow(noise(heads, 5)),
        }
    }

    fn operands(&self) -> Operands {
        let [projection, kernel, logs, bias] =
            [&self.projection, &self.kernel, &self.logs, &self.bias].map(|values| wide(values));
        [projection, kernel, wide(&self.gates), logs, bias]
    }
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// The tokens of a row before it, nearest first.
fn before(row: usize) -> Vec<usize> {
    let all = segments();
    let Some(Segment { rows, prefix }) = all.into_iter().find(|segment| segment.rows.contains(&row)) else {
        return Vec::new();
    };
    (rows.start..row).rev().chain(prefix.rev()).collect()
}

/// Normalised queries and keys, and values, `[ROWS, channels]`.
fn heads_of(shape: DeltaShape, [projection, kernel, ..]: &Operands) -> Vec<f64> {
    let (channels, mut out) = (shape.channels(), Vec::new());
    for row in 0..ROWS {
        let seen: Vec<usize> = [row].into_iter().chain(before(row)).take(shape.taps).collect();
        let mut values: Vec<f64> = (0..channels)
            .map(|channel| {
                let terms = seen.iter().enumerate().map(|(back, row)| {
                    kernel[channel * shape.taps + shape.taps - 1 - back]
                        * projection[row * (channels + 3) + channel]
                });
                silu(terms.sum())
            })
            .collect();
        for (head, x) in values.chunks_exact_mut(shape.key_dim).take(2 * shape.key_heads).enumerate() {
            let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
            let scale = if head < shape.key_heads { (shape.key_dim as f64).powf(-0.5) } else { 1.0 };
            x.iter_mut().for_each(|x| *x *= scale / length);
        }
        out.extend(values);
    }
    out
}

/// Strengths and decays, `[ROWS, 2, value_heads]`.
fn opened_of(shape: DeltaShape, [_, _, gates, logs, bias]: &Operands) -> Vec<f64> {
    let heads = shape.value_heads;
    let open = |(at, x): (usize, &f64)| match (at % (2 * heads)).checked_sub(heads) {
        None => 1.0 / (1.0 + (-x).exp()),
        Some(head) => (-logs[head].exp() * (x + bias[head]).exp().ln_1p()).exp(),
    };
    gates.iter().enumerate().map(open).collect()
}

/// The results `[ROWS, values]` of the recurrence.
fn read(shape: DeltaShape, heads: &[f64], opened: &[f64]) -> Vec<f64> {
    let DeltaShape { key_heads, value_heads, key_dim, value_dim, .. } = shape;
    let mut out = vec![0.0; ROWS * shape.value_width()];
    let mut advance = |rows: Range<usize>, states: &mut [f64]| {
        for row in rows {
            let x = &heads[row * shape.channels()..][..shape.channels()];
            for head in 0..value_heads {
                let state = &mut states[head * key_dim * value_dim..][..key_dim * value_dim];
                let of_key = head / (value_heads / key_heads) * key_dim;
                let (query, key) = (&x[of_key..], &x[key_heads * key_dim + of_key..]);
                let value = &x[2 * key_heads * key_dim + head * value_dim..];
                let [strength, decay] =
                    [0, value_heads].map(|half| opened[row * 2 * value_heads + half + head]);
                for j in 0..value_dim {
                    (0..key_dim).for_each(|i| state[i * value_dim + j] *= decay);
                    let known: f64 = (0..key_dim).map(|i| key[i] * state[i * value_dim + j]).sum();
                    let update = (value[j] - known) * strength;
                    (0..key_dim).for_each(|i| state[i * value_dim + j] += key[i] * update);
                    let read = (0..key_dim).map(|i| query[i] * state[i * value_dim + j]).sum();
                    out[(row * value_heads + head) * value_dim + j] = read;
                }
            }
        }
    };
    let mut end = Vec::new();
    for Segment { rows, prefix } in segments() {
        let mut states = if prefix.is_empty() { vec![0.0; shape.states_len()] } else { end.clone() };
        advance(rows, &mut states);
        if prefix.is_empty() {
            end = states;
        }
    }
    out
}

fn results(shape: DeltaShape, operands: &Operands) -> Vec<f64> {
    read(shape, &heads_of(shape, operands), &opened_of(shape, operands))
}

/// What a device computes of a case: heads, opened gates, results, and with `g [ROWS, values]` the gradients of all operands.
struct Found {
    heads: Vec<f32>,
    opened: Vec<f32>,
    out: Vec<f32>,
    gradients: [Vec<f32>; 5],
}

fn on_device<T: Storage>(device: &Device, case: &Case<T>, g: &[T]) -> Found {
    let (shape, heads) = (case.shape, case.shape.value_heads);
    let runs = DeltaRuns::new(device, &segments(), ROWS, shape.taps).unwrap();
    let [projection, kernel, logs, bias] =
        [&case.projection, &case.kernel, &case.logs, &case.bias].map(|x| device.upload(x).unwrap());
    let gates = device.upload(&case.gates).unwrap();
    let inputs = ConvolutionInputs {
        shape,
        projection: projection.all(),
        kernel: kernel.all(),
        sources: runs.sources(),
    };
    let mut on_heads = device.zeros::<T>(ROWS * shape.channels()).unwrap();
    convolve(device, inputs, None, on_heads.all_mut()).unwrap();
    let mut opened = device.zeros::<f32>(gates.len()).unwrap();
    let of_gates = DeltaGates { inputs: gates.all(), logs: logs.all(), bias: bias.all() };
    open_gates(device, of_gates, opened.all_mut()).unwrap();
    let operands = DeltaOperands { shape, heads: on_heads.all(), opened: opened.all() };
    let out = delta_rule(device, operands, &runs).unwrap();
    let g = device.upload(g).unwrap();
    let found = delta_rule_backward(device, operands, &runs, g.all()).unwrap();
    let mut d_sums = device.zeros::<f32>(on_heads.len()).unwrap();
    let of_heads = HeadGradients { pairs: found.pairs.all(), values: found.values.all() };
    convolve_backward(device, inputs, of_heads, d_sums.all_mut()).unwrap();
    let mut d_projection = device.zeros::<T>(projection.len()).unwrap();
    convolution_inputs_backward(device, inputs, runs.uses(), d_sums.all(), d_projection.all_mut()).unwrap();
    let mut d_kernel = device.zeros::<f32>(kernel.len()).unwrap();
    convolution_kernel_gradient(device, inputs, d_sums.all(), d_kernel.all_mut()).unwrap();
    let mut d_gates = device.zeros::<T>(gates.len()).unwrap();
    let mut d_vectors = device.zeros::<f32>(gates.len()).unwrap();
    open_gates_backward(device, of_gates, found.opened.all(), d_gates.all_mut(), d_vectors.all_mut())
        .unwrap();
    let mut vectors = vec![0.0; 2 * heads];
    for row in device.download(d_vectors.all()).unwrap().chunks_exact(2 * heads) {
        vectors.iter_mut().zip(row).for_each(|(sum, g)| *sum += g);
    }
    let bias = vectors.split_off(heads);
    let gradients = [
        widen(&device.download(d_projection.all()).unwrap()),
        device.download(d_kernel.all()).unwrap(),
        widen(&device.download(d_gates.all()).unwrap()),
        vectors,
        bias,
    ];
    Found {
        heads: widen(&device.download(on_heads.all()).unwrap()),
        opened: device.download(opened.all()).unwrap(),
        out: widen(&device.download(out.all()).unwrap()),
        gradients,
    }
}

#[test]
fn packs_match_f64() {
    for device in devices() {
        for shape in SHAPES {
            let case = Case::<f32>::new(shape);
            let operands = case.operands();
            let c = noise(ROWS * shape.value_width(), 9);
            let found = on_device(&device, &case, &c);
            assert_close(&found.heads, &heads_of(shape, &operands), 1e-5);
            assert_close(&found.opened, &opened_of(shape, &operands), 1e-5);
            assert_close(&found.out, &results(shape, &operands), 1e-5);
            let loss = |operands: &Operands| -> f64 {
                results(shape, operands).iter().zip(&c).map(|(out, c)| out * f64::from(*c)).sum()
            };
            for (number, gradient) in found.gradients.iter().enumerate() {
                for seed in 0..4 {
                    let direction = noise(gradient.len(), 20 + seed);
                    let along = |step: f64| {
                        let mut moved = operands.clone();
                        moved[number]
                            .iter_mut()
                            .zip(&direction)
                            .for_each(|(x, d)| *x += step * f64::from(*d));
                        loss(&moved)
                    };
                    let expected = (along(1e-5) - along(-1e-5)) / 2e-5;
                    let terms = gradient.iter().zip(&direction);
                    let slope: f64 = terms.map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
                    let scale = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
                    assert!(
                        (slope - expected).abs() < 2e-5 * scale,
                        "{shape:?}, operand {number}: {slope}, not {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn packs_in_bf16_match_f64() {
    for device in devices() {
        for shape in SHAPES {
            let case = Case::<bf16>::new(shape);
            let c: Vec<bf16> = narrow(noise(ROWS * shape.value_width(), 9));
            let found = on_device(&device, &case, &c);
            let exact = on_device(&device, &exact(&case), &widen(&c));
            let as_f64 = |values: &[f32]| values.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
            assert_close(&found.heads, &heads_of(shape, &case.operands()), 8e-3);
            assert_close(&found.out, &as_f64(&exact.out), 3e-2);
            for (found, exact) in found.gradients.iter().zip(&exact.gradients) {
                assert_close(found, &as_f64(exact), 5e-2);
            }
        }
    }
}

/// The same values in f32.
fn exact(case: &Case<bf16>) -> Case<f32> {
    let Case { shape, projection, kernel, gates, logs, bias } = case;
    let [projection, kernel, logs, bias] = [projection, kernel, logs, bias].map(|x| widen(x));
    Case { shape: *shape, projection, kernel, gates: gates.clone(), logs, bias }
}

/// New tokens of two sequences and of padding, cut into steps, give what a pack gives.
#[test]
fn states_go_on_between_steps() {
    for device in devices() {
        for shape in SHAPES {
            let case = Case::<f32>::new(shape);
            let whole = on_device(&device, &case, &vec![0.0; ROWS * shape.value_width()]).out;
            let stride = 7 + shape.inputs_len() + shape.states_len();
            // What a slot has of other sequences does not matter.
            let mut pool = device.upload(&vec![f32::NAN; 3 * stride]).unwrap();
            let mut at = [2, 0];
            for counts in [[1, 1], [3, 1], [1, 0], [20, 0], [1, 0]] {
                let rows: Vec<Range<usize>> = at.iter().zip(counts).map(|(at, n)| *at..*at + n).collect();
                let out = step(&device, &case, &rows, stride, &mut pool);
                let expected = rows.iter().flat_map(|rows| {
                    &whole[rows.start * shape.value_width()..rows.end * shape.value_width()]
                });
                let expected: Vec<f64> = expected.map(|x| f64::from(*x)).collect();
                assert_close(&out[..expected.len()], &expected, 1e-5);
                at.iter_mut().zip(counts).for_each(|(at, n)| *at += n);
            }
        }
    }
}

/// One step of the sequences that begin at rows 2 and 0, in slots 2 and 1, with the given rows next, and a padding token in slot 0.
fn step(
    device: &Device,
    case: &Case<f32>,
    rows: &[Range<usize>],
    stride: usize,
    pool: &mut device::DeviceBuffer<f32>,
) -> Vec<f32> {
    let (shape, width) = (case.shape, case.shape.channels() + 3);
    let (mut projection, mut gates, mut sources) = (Vec::new(), Vec::new(), Vec::new());
    let (mut slots, mut firsts, mut owners, mut positions) =
        (Vec::new(), vec![0_u32], Vec::new(), Vec::new());
    let mut push = |row: usize, position: usize, within: usize, owner: usize| {
        projection.extend_from_slice(&case.projection[row * width..][..width]);
        gates.extend_from_slice(&case.gates[row * 2 * shape.value_heads..][..2 * shape.value_heads]);
        for back in 1..shape.taps {
            let here = positions.len();
            sources.push(match (back <= within, back <= position) {
                (true, _) => InputSource::Row(here - back).pack(),
                (false, true) => InputSource::Kept(shape.taps - 1 + within - back).pack(),
                (false, false) => InputSource::None.pack(),
            });
        }
        positions.push(position as u32);
        owners.push(owner as u32);
    };
    let mut end = 0;
    for (number, (rows, begin)) in
        rows.iter().zip([2, 0]).enumerate().filter(|(_, (rows, _))| !rows.is_empty())
    {
        for row in rows.clone() {
            push(row, row - begin, row - rows.start, slots.len());
        }
        slots.push(2 - number as u32);
        end += rows.len();
        firsts.push(end as u32);
    }
    push(ROWS - 1, 0, 0, slots.len());
    slots.push(0);
    firsts.push(end as u32 + 1);
    let [slots, firsts, owners, positions, sources] =
        [slots, firsts, owners, positions, sources].map(|numbers| device.upload(&numbers).unwrap());
    let of = SequenceSlots {
        slots: slots.all(),
        firsts: firsts.all(),
        owners: owners.all(),
        positions: positions.all(),
        stride,
    };
    let [projection, kernel, gates, logs, bias] =
        [&projection, &case.kernel, &gates, &case.logs, &case.bias].map(|x| device.upload(x).unwrap());
    let inputs = ConvolutionInputs {
        shape,
        projection: projection.all(),
        kernel: kernel.all(),
        sources: sources.all(),
    };
    let count = owners.len();
    let mut heads = device.zeros::<f32>(count * shape.channels()).unwrap();
    let (from, middle) = (7, 7 + shape.inputs_len());
    convolve(device, inputs, Some((pool.view(from..pool.len()), of)), heads.all_mut()).unwrap();
    let mut opened = device.zeros::<f32>(gates.len()).unwrap();
    open_gates(
        device,
        DeltaGates { inputs: gates.all(), logs: logs.all(), bias: bias.all() },
        opened.all_mut(),
    )
    .unwrap();
    let mut out = device.zeros::<f32>(count * shape.value_width()).unwrap();
    let operands = DeltaOperands { shape, heads: heads.all(), opened: opened.all() };
    let len = pool.len();
    delta_rule_decode(device, operands, of, pool.view_mut(middle..len), out.all_mut()).unwrap();
    keep_inputs(device, inputs, of, pool.view_mut(from..len)).unwrap();
    device.download(out.all()).unwrap()
}
