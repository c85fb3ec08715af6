//! Loops that reach the limits of a machine, and the decoder's operations one by one, for `rlrun-bench`.
//!
//! Invariant: a loop reports its amount of work and nothing else. It reads no clock and starts no thread. The benchmark
//! does both.

use std::hint::black_box;
use std::ops::Range;
use std::sync::Arc;

use candle_core::Result;

use crate::ThreadPool;
use crate::ops::attention::{self, AttentionRule, PAGE, PageLayout, Segment};
use crate::ops::gated_unit::{GateActivation, gated_unit};
use crate::ops::heads::HeadShape;
use crate::ops::linear::{FlatValues, Linear, weight_gradient};
use crate::ops::matrix;
use crate::ops::norm::rms_norm;
use crate::ops::simd::{LANES, Vector, widest};
use crate::{Config, ParameterSpec, Parameters};

/// Sums in registers that do not wait for each other: more than two units of latency four can keep busy, few enough for the 16
/// registers of AVX2.
const CHAINS: usize = 12;

/// Does fused multiply-adds on registers alone, on the widest vectors of this machine that the decoder uses, and
/// returns the floating-point operations: two per multiply-add and lane.
#[must_use]
pub fn multiply_adds(rounds: u32) -> f64 {
    let mut operations = 0.0;
    chains(rounds, &mut operations);
    operations
}

/// Reads `values` (`[n]`) without the rest of the last block. Returns their sum, so that no read is removed.
#[must_use]
pub fn read(values: &[f32]) -> f32 {
    let mut sum = 0.0;
    sums(values, &mut sum);
    sum
}

widest! {
    fn chains(rounds: u32, operations: &mut f64) = chains_in::<__m512> | <__m256> | <>
}

widest! {
    fn sums(values: &[f32], sum: &mut f32) = sums_in::<__m512> | <__m256> | <>
}

#[inline(always)]
fn chains_in<V: Vector>(rounds: u32, operations: &mut f64) {
    // Unknown to the compiler; the sums stay normal numbers, since slow ones would be no peak.
    let (values, factor) = black_box(([0.5_f32; LANES], 1e-3_f32));
    #[expect(unsafe_code, reason = "a register is not wider than the array")]
    let values = unsafe { V::load_at(values.as_ptr()) };
    let mut sums = [V::zero(); CHAINS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = values.mul_add(factor, *sum);
        }
    }
    for sum in sums {
        black_box(stored(sum));
    }
    *operations = f64::from(rounds) * (2 * CHAINS * V::WIDTH) as f64;
}

#[inline(always)]
fn sums_in<V: Vector>(values: &[f32], sum: &mut f32) {
    let mut sums = [V::zero(); CHAINS];
    for block in values.chunks_exact(CHAINS * V::WIDTH) {
        for (sum, values) in sums.iter_mut().zip(block.chunks_exact(V::WIDTH)) {
            #[expect(unsafe_code, reason = "the chunk has the width of a register")]
            let values = unsafe { V::load_at(values.as_ptr()) };
            *sum = values.mul_add(1.0, *sum);
        }
    }
    *sum = sums.into_iter().flat_map(stored).sum();
}

/// The values of a register, and zeros.
#[inline(always)]
fn stored<V: Vector>(register: V) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    #[expect(unsafe_code, reason = "a register is not wider than the array")]
    unsafe {
        register.store_at(out.as_mut_ptr());
    }
    out
}

/// One operation of the decoder on random numbers of the shapes that a model gives it.
pub struct Operation {
    /// What it is, such as `gate_up`; with `_train` where the weight is read unpacked, `_dx` and `_dw` for its backward.
    pub name: &'static str,
    /// Floating-point operations of a call; 0 where they are not what it is about.
    pub flops: f64,
    /// Bytes that a call reads and writes, each operand once.
    pub bytes: f64,
    work: Box<dyn FnMut() -> Result<()>>,
}

impl std::fmt::Debug for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Operation").field("name", &self.name).finish_non_exhaustive()
    }
}

/// What one call of an operation needs.
#[derive(Clone, Copy)]
struct OperationCost {
    flops: usize,
    /// Numbers that it reads and writes, each operand once.
    numbers: usize,
}

impl Operation {
    fn new(name: &'static str, cost: OperationCost, work: impl FnMut() -> Result<()> + 'static) -> Self {
        let bytes = (size_of::<f32>() * cost.numbers) as f64;
        Self { name, flops: cost.flops as f64, bytes, work: Box::new(work) }
    }

    /// Does it once, on this thread.
    ///
    /// # Errors
    /// Those of the operation; with the shapes of a model that could be opened there are none.
    pub fn run(&mut self) -> Result<()> {
        (self.work)()
    }
}

/// The operations of one layer and of the head of a model of this shape, on `rows` tokens. Attention sees as many: from
/// the cache every token sees `rows` others, in a pack they are one sequence.
///
/// # Errors
/// If a matrix cannot be made, or the model has latents, whose matrices are others.
pub fn operations(config: &Config, rows: usize) -> Result<Vec<Operation>> {
    if config.latent().is_some() {
        candle_core::bail!(
            "the matrices of models with latents are not measured one by one; measure a training step"
        );
    }
    let one_layer = Config { layers: config.layers[..1].to_vec(), ..config.clone() };
    let parameters = Arc::new(Parameters::random(&one_layer, 0));
    let span = |first: &str, last: &str| {
        let range = |name: &str| {
            let spec = parameters.layout().spec(&format!("model.layers.0.{name}"));
            spec.map(ParameterSpec::range).unwrap_or_default()
        };
        range(first).start..range(last).end
    };
    let shape = config.head_shape();
    let (hidden, middle) = (config.hidden_size, config.intermediate_size);
    let mut all = Vec::new();
    for (name, weight, input) in [
        (
            ["qkv", "qkv_train", "qkv_dx", "qkv_dw"],
            span("self_attn.q_proj.weight", "self_attn.v_proj.weight"),
            hidden,
        ),
        (
            ["output", "output_train", "output_dx", "output_dw"],
            span("self_attn.o_proj.weight", "self_attn.o_proj.weight"),
            shape.query_width(),
        ),
        (
            ["gate_up", "gate_up_train", "gate_up_dx", "gate_up_dw"],
            span("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            hidden,
        ),
        (
            ["down", "down_train", "down_dx", "down_dw"],
            span("mlp.down_proj.weight", "mlp.down_proj.weight"),
            middle,
        ),
        (["head", "head_train", "head_dx", "head_dw"], parameters.layout().head(), hidden),
    ] {
        all.extend(products(name, &parameters, weight, input, rows)?);
    }
    all.extend(attention(shape, rows)?);
    let random = |columns: usize| matrix(noise(rows * columns), columns);
    let x = random(hidden)?;
    let scale = vec![1.0; hidden];
    let moved = |numbers: usize| OperationCost { flops: 0, numbers };
    let norm = move || rms_norm(&x, &scale, 1e-6, &ThreadPool::single()).map(done);
    all.push(Operation::new("norm", moved(2 * rows * hidden), norm));
    let gate_up = random(2 * middle)?;
    all.push(Operation::new("swiglu", moved(3 * rows * middle), move || {
        gated_unit(&gate_up, GateActivation::Silu, &ThreadPool::single()).map(done)
    }));
    Ok(all)
}

/// A linear layer forward with its weight packed and unpacked, and both halves of its backward.
fn products(
    names: [&'static str; 4],
    parameters: &Arc<Parameters>,
    weight: Range<usize>,
    input: usize,
    rows: usize,
) -> Result<[Operation; 4]> {
    let output = weight.len() / input;
    let packed = Linear::packed(&parameters.values()[weight.clone()], input, None);
    let flat = Linear::flat(&FlatValues::Model(Arc::clone(parameters)), weight.clone(), input, &(0..0));
    let (x, g) = (matrix(noise(rows * input), input)?, matrix(noise(rows * output), output)?);
    let numbers = weight.len() + rows * (input + output);
    let cost = OperationCost { flops: 2 * rows * weight.len(), numbers };
    let mut gradient = vec![0.0; weight.len()];
    let [forward, train, dx, dw] = names;
    let (x_packed, x_flat, g_flat, back) = (x.clone(), x.clone(), g.clone(), flat.clone());
    Ok([
        Operation::new(forward, cost, move || packed.apply(&x_packed, &ThreadPool::single()).map(done)),
        Operation::new(train, cost, move || flat.apply(&x_flat, &ThreadPool::single()).map(done)),
        Operation::new(dx, cost, move || back.input_gradient(&g_flat).map(done)),
        Operation::new(dw, cost, move || weight_gradient(&x, &g, 0..output, &mut gradient)),
    ])
}

/// Attention over the cache and over a pack, forward and backward.
fn attention(shape: HeadShape, rows: usize) -> Result<[Operation; 3]> {
    let (layout, rule) = (PageLayout::new(shape), AttentionRule::full(shape));
    let pages: Vec<Vec<f32>> = (0..rows.div_ceil(PAGE)).map(|_| noise(layout.len())).collect();
    let queries = noise(rows * shape.query_width());
    let mut weights = Vec::new();
    let read = 2 * rows * rows * shape.kv_width() + 2 * rows * shape.query_width();
    let decode = move || {
        let pages: Vec<&[f32]> = pages.iter().map(Vec::as_slice).collect();
        let mut out = vec![0.0; queries.len()];
        let outs = out.chunks_exact_mut(shape.query_width());
        for (queries, out) in queries.chunks_exact(shape.query_width()).zip(outs) {
            layout.attend(rule, queries, &pages, rows, &mut weights, out);
        }
        done(out);
        Ok(())
    };
    let qkv = matrix(noise(rows * shape.width()), shape.width())?;
    let g = matrix(noise(rows * shape.query_width()), shape.query_width())?;
    let segments = [Segment { rows: 0..rows, prefix: 0..0 }];
    // Half of all pairs of tokens, two products for each; the backward has five.
    let pairs = rows * (rows + 1) / 2 * shape.query_width();
    let numbers = rows * (shape.width() + shape.query_width());
    let (qkv_back, segments_back) = (qkv.clone(), segments.clone());
    let cached = OperationCost { flops: 4 * rows * rows * shape.query_width(), numbers: read };
    let forward = OperationCost { flops: 4 * pairs, numbers };
    let backward = OperationCost { flops: 10 * pairs, numbers: 2 * numbers };
    Ok([
        Operation::new("attention_cache", cached, decode),
        Operation::new("attention_pack", forward, move || {
            attention::packed(&qkv, &segments, 0, rule).map(done)
        }),
        Operation::new("attention_pack_dx", backward, move || {
            attention::packed_backward(&qkv_back, &segments_back, 0, rule, &g).map(done)
        }),
    ])
}

/// Keeps the compiler from removing a computation whose result is unused.
fn done<T>(result: T) {
    black_box(result);
}

/// Deterministic values in [-1, 1).
fn noise(count: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_u32;
    let next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_counted_by_the_round() {
        let one = multiply_adds(1);
        assert!([4.0, 8.0, 16.0].contains(&(one / 24.0)), "{one} operations in a round");
        assert_eq!(multiply_adds(1000), 1000.0 * one);
    }

    #[test]
    fn every_operation_runs_at_every_size() {
        let config = Config::fresh(&crate::Sizes {
            vocab_size: 20,
            hidden_size: 16,
            intermediate_size: 24,
            num_layers: 3,
            num_heads: 4,
            num_kv_heads: 2,
            max_position_embeddings: 64,
        });
        for rows in [1, 8, 33] {
            let mut all = operations(&config, rows).unwrap();
            all.iter_mut().for_each(|operation| operation.run().unwrap());
            let flops = |name: &str| all.iter().find(|o| o.name == name).unwrap().flops;
            assert_eq!(flops("gate_up"), (2 * rows * 16 * 48) as f64);
            assert_eq!(flops("head_dw"), (2 * rows * 16 * 20) as f64);
            assert_eq!(flops("attention_pack"), (2 * rows * (rows + 1) * 16) as f64);
            let names: std::collections::BTreeSet<_> = all.iter().map(|o| o.name).collect();
            assert_eq!(names.len(), all.len(), "a name tells an operation");
        }
    }

    #[test]
    fn the_reading_benchmark_reads_all_values() {
        let mut values = vec![1.0; 3 * LANES * CHAINS];
        assert_eq!(read(&values), 576.0);
        values[200] = 3.0;
        assert_eq!(read(&values), 578.0);
    }
}
