//! The hot operations of the decoder, each with its backward pass.
//!
//! Every operation takes and returns tensors on one device; what runs on the CPU is a loop over slices, compiled for
//! each instruction set by [`simd`]. Backward operations are explicit functions, not nodes of an autograd graph:
//! nothing can cut a gradient silently, and a layer can be reversed alone.
//!
//! # Invariants
//! - A row of any result depends on its own inputs only, bit for bit, never on the other rows of the batch.
//! - Sampling and training call the same functions, so equal weights give equal log-probabilities.
//! - An operation runs on the calling thread unless it takes a [`ThreadPool`]; the number of threads
//!   changes no bit.
//!
//! # Layout
//! - [`linear`] over [`gemm`], of f32 weights or of quantised [`blocks`], or over [`int8`] and [`bf16`], which share the tiles of
//!   [`dot`]; [`adapters`]: the low-rank factors of its rows; [`norm`], [`residual`], [`embedding`]
//! - [`gated_unit`], [`clamped_swiglu`]: gated activations
//! - [`heads`]: per-head norm and rotary embedding
//! - [`latent`]: queries, keys and values of their parts
//! - [`experts`]: the routes of tokens to experts; [`row_gate`]: the gate of the network beside them
//! - [`attention`]: packed and paged
//! - [`delta_net`]: a recurrence, over [`causal_convolution`] and [`delta_rule`]; [`result_gate`]: gates on the results of both
//! - [`head`]: logits fused with log-probability and entropy, over [`softmax`]; [`value`]: the value head

pub(crate) mod adapters;
pub(crate) mod attention;
pub(crate) mod bf16;
pub(crate) mod blocks;
pub(crate) mod causal_convolution;
pub(crate) mod clamped_swiglu;
pub(crate) mod delta_net;
pub(crate) mod delta_rule;
pub(crate) mod dot;
pub(crate) mod embedding;
pub(crate) mod experts;
pub(crate) mod gated_unit;
pub(crate) mod gemm;
pub(crate) mod head;
pub(crate) mod heads;
pub(crate) mod int8;
pub(crate) mod latent;
pub(crate) mod linear;
pub(crate) mod norm;
pub(crate) mod residual;
pub(crate) mod result_gate;
pub(crate) mod row_gate;
pub(crate) mod simd;
pub(crate) mod softmax;
pub(crate) mod value;

use std::ops::{Deref, Range};

use candle_core::{CpuStorage, Device, Result, Storage, Tensor, bail};

use crate::ThreadPool;

/// The f32 values of a contiguous CPU tensor, borrowed.
struct TensorValues<S> {
    storage: S,
    range: Range<usize>,
}

/// Borrows the values of `tensor`.
///
/// # Errors
/// If the tensor is not contiguous, not f32 or not on the CPU.
pub(crate) fn values(tensor: &Tensor) -> Result<impl Deref<Target = [f32]>> {
    let (storage, layout) = tensor.storage_and_layout();
    let Some((start, end)) = layout.contiguous_offsets() else {
        bail!(
            "the operation needs a contiguous tensor, not shape {:?} with strides {:?}",
            layout.shape(),
            layout.stride()
        )
    };
    match &*storage {
        Storage::Cpu(CpuStorage::F32(_)) => Ok(TensorValues { storage, range: start..end }),
        other => bail!("no kernel for {:?} on {:?}", other.dtype(), other.device().location()),
    }
}

impl<S: Deref<Target = Storage>> Deref for TensorValues<S> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        let Storage::Cpu(CpuStorage::F32(values)) = &*self.storage else {
            unreachable!("`values` borrows no other storage");
        };
        &values[self.range.clone()]
    }
}

/// Wraps the `[rows, columns]` result of a CPU loop.
pub(crate) fn matrix(result: Vec<f32>, columns: usize) -> Result<Tensor> {
    let rows = result.len().checked_div(columns).unwrap_or(0);
    Tensor::from_vec(result, (rows, columns), &Device::Cpu)
}

/// An uninitialised buffer for a result that is written before it is read: zeroing would be another pass over the memory.
#[expect(
    unsafe_code,
    clippy::uninit_vec,
    reason = "every operation writes all of its result and reads none of it"
)]
pub(crate) fn unwritten(len: usize) -> Vec<f32> {
    let mut values = Vec::with_capacity(len);
    unsafe {
        values.set_len(len);
    }
    values
}

/// Cuts `rows` into at most `parts` ranges, at least one. All have the same length, a multiple of `unit`, but the last.
pub(crate) fn row_ranges(rows: usize, parts: usize, unit: usize) -> Vec<Range<usize>> {
    let each = rows.div_ceil(parts.max(1)).next_multiple_of(unit).max(unit);
    let count = rows.div_ceil(each).max(1);
    (0..count).map(|i| i * each..((i + 1) * each).min(rows)).collect()
}

/// Values from which on threads share the rows of an operation that reads each value once.
const WORTH_SHARING: usize = 1 << 13;

/// Rows for each thread, of `rows` rows with `values` values in all.
pub(crate) fn rows_each(rows: usize, values: usize, pool: &ThreadPool) -> usize {
    let threads = if values < WORTH_SHARING { 1 } else { pool.threads() };
    rows.div_ceil(threads).max(1)
}

#[cfg(test)]
pub(crate) mod check {
    //! What operations promise: derivatives, and rows that depend on nothing but themselves.

    use crate::{SharedCores, ThreadPool};

    use super::dot::StoreMode;

    /// Deterministic values in about [-1, 1].
    pub(crate) fn noise(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
        (0..n)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 17;
                state ^= state << 5;
                (state >> 8) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    /// Asserts that `gradient` is the derivative of `f` at `x`, along random directions, to `tolerance` relative.
    pub(crate) fn gradient(f: impl Fn(&[f32]) -> f64, x: &[f32], gradient: &[f32], tolerance: f64) {
        assert_eq!(x.len(), gradient.len());
        for seed in 1..6 {
            let direction = noise(x.len(), 1000 + seed);
            let step = 1e-2_f32;
            let at = |sign: f32| -> f64 {
                f(&x.iter().zip(&direction).map(|(x, d)| x + sign * step * d).collect::<Vec<_>>())
            };
            let numeric = (at(1.0) - at(-1.0)) / (2.0 * f64::from(step));
            let exact: f64 =
                gradient.iter().zip(&direction).map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
            let scale = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt().max(1e-3);
            assert!(
                (numeric - exact).abs() <= tolerance * scale,
                "finite difference {numeric}, backward {exact}"
            );
        }
    }

    /// Asserts that row `row` of the product `run` of `x` `[m, k]`, `[m, n]`, has the same bits alone, and that on three threads it is
    /// added to what is there.
    pub(crate) fn row_is_independent(
        x: &[f32],
        [m, n]: [usize; 2],
        row: usize,
        run: impl Fn(&[f32], &mut [f32], StoreMode, &ThreadPool),
    ) {
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        let (mut all, mut alone) = (vec![7.0; m * n], vec![7.0; n]);
        run(x, &mut all, StoreMode::Replace, &ThreadPool::single());
        let k = x.len() / m;
        run(&x[row * k..][..k], &mut alone, StoreMode::Replace, &ThreadPool::single());
        assert_eq!(bits(&alone), bits(&all[row * n..][..n]));
        let mut sum = noise(m * n, 3);
        let expected: Vec<f32> = sum.iter().zip(&all).map(|(a, b)| a + b).collect();
        run(x, &mut sum, StoreMode::Add, &ThreadPool::new(&SharedCores::new(3), 3));
        assert_eq!(bits(&sum), bits(&expected));
    }

    /// `sum(coefficients * values)` in f64.
    pub(crate) fn weighted(values: &[f32], coefficients: &[f32]) -> f64 {
        assert_eq!(values.len(), coefficients.len());
        values.iter().zip(coefficients).map(|(v, c)| f64::from(*v) * f64::from(*c)).sum()
    }
}
