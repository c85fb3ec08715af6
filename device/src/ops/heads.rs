//! Queries and keys between projection and attention: RMSNorm per head (QK norm, Qwen3), and rotary position embedding
//! (RoPE, arXiv 2104.09864) in the half-split layout of Hugging Face, which rotates the pairs `(x[i], x[i + half])`.

use super::rows::add_partial_sums;
use super::{PACK, THREADS, rows_of, size, slabs};
use crate::backend::Argument;
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{View, ViewMut};

/// Smallest number of rows per block in the gradient of the norm's weights.
const SLAB: usize = 32;

/// Layout of a row of the fused projection, `[(heads + 2 kv_heads) * head_dim]`: queries, keys, values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadShape {
    /// Number of query heads.
    pub heads: usize,
    /// Number of key-value heads; divides `heads`.
    pub kv_heads: usize,
    /// Head dimension.
    pub head_dim: usize,
}

impl HeadShape {
    /// Width of a row of the fused projection, values.
    #[must_use]
    pub fn width(self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Width of the keys, or of the values, of a row.
    #[must_use]
    pub fn kv_width(self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// The queries and the keys of a row.
    #[must_use]
    pub fn parts(self) -> [std::ops::Range<usize>; 2] {
        let queries = self.query_width();
        [0..queries, queries..queries + self.kv_width()]
    }

    /// Width of the queries of a row.
    #[must_use]
    pub fn query_width(self) -> usize {
        self.heads * self.head_dim
    }
}

/// Weights of the per-head RMSNorm.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorm<'a, T: Storage> {
    /// `[head_dim]` scale of the queries.
    pub query: View<'a, T>,
    /// `[head_dim]` scale of the keys.
    pub key: View<'a, T>,
    /// Added to the mean square.
    pub eps: f32,
}

/// Cosines and sines `[rows, half]` of the angles `position * inv_freq[i]`, from `positions [rows]` and `inv_freq
/// [half]`, with `half = head_dim / 2`. They are shared by all layers.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn angles(
    device: &Device,
    positions: View<'_, u32>,
    inv_freq: View<'_, f32>,
    cos: ViewMut<'_, f32>,
    sin: ViewMut<'_, f32>,
) -> Result<()> {
    let (rows, half) = (positions.len(), inv_freq.len());
    let count = rows * half;
    assert!(cos.len() == count && sin.len() == count, "{count} angles, {} and {}", cos.len(), sin.len());
    let arguments =
        [positions.into(), inv_freq.into(), size(rows).into(), size(half).into(), cos.into(), sin.into()];
    device.launch("angles", [count.div_ceil(THREADS), 1, 1], THREADS, 0, &arguments)
}

/// Normalises (if the model has a QK norm) and rotates queries and keys of `qkv [rows, width]` in place; values are
/// unchanged. `cos` and `sin` `[rows, head_dim / 2]` come from [`angles`].
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn prepare<T: Storage>(
    device: &Device,
    qkv: ViewMut<'_, T>,
    shape: HeadShape,
    norm: Option<HeadNorm<'_, T>>,
    cos: View<'_, f32>,
    sin: View<'_, f32>,
) -> Result<()> {
    let mut arguments = shape_arguments(qkv.len(), shape, cos, sin);
    arguments.extend(norm_arguments(shape, norm));
    let blocks = blocks::<T>(qkv.len(), shape);
    arguments.push(qkv.into());
    device.launch(&format!("prepare_{}", T::SUFFIX), [blocks, 1, 1], THREADS, 0, &arguments)
}

/// Converts `g [rows, width]`, the gradient of the prepared projection, to that of the raw projection, in place. `raw
/// [rows, width]` is needed with a QK norm.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit, or there is a norm and no `raw`.
pub fn prepare_backward<T: Storage>(
    device: &Device,
    raw: Option<View<'_, T>>,
    shape: HeadShape,
    norm: Option<HeadNorm<'_, T>>,
    cos: View<'_, f32>,
    sin: View<'_, f32>,
    g: ViewMut<'_, T>,
) -> Result<()> {
    assert!(norm.is_none() || raw.is_some(), "the backward of a norm needs what was normalised");
    assert!(raw.is_none_or(|raw| raw.len() == g.len()), "a gradient has the shape of what it is of");
    let mut arguments = shape_arguments(g.len(), shape, cos, sin);
    arguments.push(raw.into());
    arguments.extend(norm_arguments(shape, norm));
    let blocks = blocks::<T>(g.len(), shape);
    arguments.push(g.into());
    device.launch(&format!("prepare_backward_{}", T::SUFFIX), [blocks, 1, 1], THREADS, 0, &arguments)
}

/// Adds the gradients of the weights of query norm and key norm to `gradient [2 * head_dim]`, from the raw projection
/// `raw [rows, width]` and the gradient `g [rows, width]` of the prepared one.
///
/// # Errors
/// If a launch fails, or there is no memory for partial sums.
///
/// # Panics
/// If the shapes do not fit.
#[expect(clippy::too_many_arguments, reason = "what the backward takes, and where the sums go")]
pub fn head_norm_gradient<T: Storage>(
    device: &Device,
    raw: View<'_, T>,
    shape: HeadShape,
    eps: f32,
    cos: View<'_, f32>,
    sin: View<'_, f32>,
    g: View<'_, T>,
    gradient: ViewMut<'_, f32>,
) -> Result<()> {
    assert_eq!(raw.len(), g.len(), "a gradient has the shape of what it is of");
    assert_eq!(gradient.len(), 2 * shape.head_dim, "one gradient of the queries' weight, one of the keys'");
    let mut arguments = shape_arguments(raw.len(), shape, cos, sin);
    let rows = raw.len() / shape.width();
    if rows == 0 {
        return Ok(());
    }
    let (slab, parts) = slabs(rows, SLAB);
    let mut partial = device.uninit::<f32>(parts * gradient.len())?;
    let own: [Argument; 5] = [raw.into(), eps.into(), g.into(), size(slab).into(), partial.all_mut().into()];
    arguments.extend(own);
    device.launch(&format!("head_norm_slopes_{}", T::SUFFIX), [parts, 2, 1], THREADS, 0, &arguments)?;
    add_partial_sums(device, partial.all(), gradient)
}

/// Common arguments of all kernels over heads, for `len` values of a projection.
fn shape_arguments(len: usize, shape: HeadShape, cos: View<'_, f32>, sin: View<'_, f32>) -> Vec<Argument> {
    let HeadShape { heads, kv_heads, head_dim } = shape;
    let rows = rows_of(len, shape.width());
    assert!(head_dim.is_multiple_of(2), "a head of {head_dim} values is no pairs");
    let angles = rows * head_dim / 2;
    assert!(cos.len() == angles && sin.len() == angles, "{angles} angles, {} and {}", cos.len(), sin.len());
    // Kernels index heads with 32 bits.
    size(rows * (heads + 2 * kv_heads));
    let sizes = [rows, heads, kv_heads, head_dim].map(|n| size(n).into());
    sizes.into_iter().chain([cos.into(), sin.into()]).collect()
}

fn norm_arguments<T: Storage>(shape: HeadShape, norm: Option<HeadNorm<'_, T>>) -> [Argument; 3] {
    match norm {
        Some(HeadNorm { query, key, eps }) => {
            let (q, k) = (query.len(), key.len());
            assert!(q == shape.head_dim && k == q, "weights {q} and {k} of heads of {}", shape.head_dim);
            [query.into(), key.into(), eps.into()]
        }
        None => [Argument::null(), Argument::null(), 0.0_f32.into()],
    }
}

/// Blocks of [`THREADS`] threads in which every query and key of `len` values has one lane per 16 bytes of each half.
fn blocks<T>(len: usize, shape: HeadShape) -> usize {
    let lanes = (shape.head_dim / 2).div_ceil(PACK / size_of::<T>()).next_power_of_two().min(32);
    (len / shape.width() * (shape.heads + shape.kv_heads) * lanes).div_ceil(THREADS)
}
