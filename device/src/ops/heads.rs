//! Queries and keys between projection and attention: RMSNorm per head (QK norm, Qwen3) or of all heads together (OLMo),
//! and rotary position embedding (RoPE, arXiv 2104.09864) in the half-split layout of Hugging Face, which rotates the
//! pairs `(x[i], x[i + pairs])` of a head; the values behind the pairs are unchanged.

use super::norm::{RmsNorm, RowColumns, rms_norm_backward_in_place, rms_norm_in_place, weight_gradient_of};
use super::paged::page_len;
use super::rows::{add_bias, add_partial_sums};
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

/// The RMSNorm of queries and keys.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorm<'a, T: Storage> {
    /// Scale of the queries: `[head_dim]` for each head apart, or `[heads * head_dim]` for all together.
    pub query: View<'a, T>,
    /// Scale of the keys, likewise.
    pub key: View<'a, T>,
    /// Added to the weights.
    pub offset: f32,
    /// Added to the mean square.
    pub eps: f32,
}

/// Cosines and sines of the angles of some positions, shared by all layers with the same rotary embedding.
#[derive(Clone, Copy, Debug)]
pub struct HeadAngles<'a> {
    /// Number of rotated pairs of a head.
    pub pairs: usize,
    /// `[rows, pairs]`
    pub cos: View<'a, f32>,
    /// `[rows, pairs]`
    pub sin: View<'a, f32>,
}

impl<'a, T: Storage> HeadNorm<'a, T> {
    /// The norms of all queries and of all keys together, with their columns in a row; `None` if each head has its own.
    fn whole(&self, shape: HeadShape) -> Option<[(RowColumns, RmsNorm<'a, T>); 2]> {
        let widths = [self.query.len(), self.key.len()];
        if widths == [shape.head_dim; 2] {
            return None;
        }
        assert_eq!(widths, shape.parts().map(|part| part.len()), "weights of the norms of {shape:?}");
        let Self { query, key, offset, eps } = *self;
        let norm = |weight| RmsNorm { weight, offset, factor: 1.0, eps };
        let [queries, keys] =
            shape.parts().map(|part| RowColumns { first: part.start, stride: shape.width() });
        Some([(queries, norm(query)), (keys, norm(key))])
    }
}

/// Cosines and sines `[rows, pairs]` of the angles `position * inv_freq[i]`, multiplied by `amplitude`, from `positions
/// [rows]` and `inv_freq [pairs]`.
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
    amplitude: f32,
    cos: ViewMut<'_, f32>,
    sin: ViewMut<'_, f32>,
) -> Result<()> {
    let (rows, pairs) = (positions.len(), inv_freq.len());
    let count = rows * pairs;
    assert!(cos.len() == count && sin.len() == count, "{count} angles, {} and {}", cos.len(), sin.len());
    let [rows, pairs] = [rows, pairs].map(|n| Argument::from(size(n)));
    let arguments =
        [positions.into(), inv_freq.into(), amplitude.into(), rows, pairs, cos.into(), sin.into()];
    device.launch("angles", [count.div_ceil(THREADS), 1, 1], THREADS, 0, &arguments)
}

/// What is done with queries and keys of a projection, and with its values what concerns them.
#[derive(Clone, Copy, Debug)]
pub struct Preparation<'a, T: Storage> {
    /// `[width]` is added to each row first.
    pub bias: Option<View<'a, T>>,
    /// Normalises queries and keys.
    pub norm: Option<HeadNorm<'a, T>>,
    /// Rotates queries and keys last.
    pub angles: Option<HeadAngles<'a>>,
}

/// Prepares `qkv [rows, width]` in place.
///
/// # Errors
/// If a launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn prepare<T: Storage>(
    device: &Device,
    mut qkv: ViewMut<'_, T>,
    shape: HeadShape,
    how: Preparation<'_, T>,
) -> Result<()> {
    let how = prepare_whole(device, qkv.reborrow(), shape, how)?;
    if how.bias.is_none() && how.norm.is_none() && how.angles.is_none() {
        return Ok(());
    }
    launch_prepare(device, qkv, shape, how, None)
}

/// Prepares `qkv [rows, width]` in place, and writes keys and values to the `cache` of one layer as
/// [`write_pages`](super::paged::write_pages) does, each row to its slot in `slots [rows]`.
///
/// # Errors
/// If a launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn prepare_to_pages<T: Storage>(
    device: &Device,
    mut qkv: ViewMut<'_, T>,
    shape: HeadShape,
    how: Preparation<'_, T>,
    slots: View<'_, u32>,
    cache: ViewMut<'_, T>,
) -> Result<()> {
    assert_eq!(slots.len(), rows_of(qkv.len(), shape.width()), "each row has a slot");
    rows_of(cache.len(), page_len(shape));
    let how = prepare_whole(device, qkv.reborrow(), shape, how)?;
    launch_prepare(device, qkv, shape, how, Some((slots, cache)))
}

/// Normalises all queries and all keys of `qkv` together if the norm is such a one. Returns what is left to do.
fn prepare_whole<'a, T: Storage>(
    device: &Device,
    mut qkv: ViewMut<'_, T>,
    shape: HeadShape,
    how: Preparation<'a, T>,
) -> Result<Preparation<'a, T>> {
    let Some(parts) = how.norm.and_then(|norm| norm.whole(shape)) else { return Ok(how) };
    if let Some(bias) = how.bias {
        add_bias(device, qkv.reborrow(), bias)?;
    }
    for (columns, norm) in parts {
        rms_norm_in_place(device, &qkv, columns, norm)?;
    }
    Ok(Preparation { bias: None, norm: None, ..how })
}

fn launch_prepare<T: Storage>(
    device: &Device,
    qkv: ViewMut<'_, T>,
    shape: HeadShape,
    how: Preparation<'_, T>,
    pages: Option<(View<'_, u32>, ViewMut<'_, T>)>,
) -> Result<()> {
    let Preparation { bias, norm, angles } = how;
    if let Some(bias) = bias {
        assert_eq!(bias.len(), shape.width(), "a bias has a value per column");
    }
    let rotated = shape.heads + shape.kv_heads;
    let heads = if bias.is_some() || pages.is_some() { rotated + shape.kv_heads } else { rotated };
    let blocks = blocks::<T>(qkv.len(), shape, heads);
    let mut arguments = shape_arguments(qkv.len(), shape, angles);
    arguments.extend(norm_arguments(norm));
    arguments.extend([bias.into(), Argument::from(qkv)]);
    arguments.extend(match pages {
        Some((slots, cache)) => [slots.into(), cache.into()],
        None => [Argument::null(); 2],
    });
    device.launch(&format!("prepare_{}", T::SUFFIX), [blocks, 1, 1], THREADS, 0, &arguments)
}

/// A norm of queries and keys in the backward.
#[derive(Debug)]
pub struct HeadNormBackward<'a, T: Storage> {
    /// The norm.
    pub norm: HeadNorm<'a, T>,
    /// `[rows, width]` the raw projection.
    pub raw: View<'a, T>,
    /// The gradients of the weights, those of the queries first, are added to these; `None` if they are frozen.
    pub gradient: Option<ViewMut<'a, f32>>,
}

/// Converts `g [rows, width]`, the gradient of the prepared projection, to that of the raw projection, in place.
///
/// # Errors
/// If a launch fails, or there is no memory for partial sums.
///
/// # Panics
/// If the shapes do not fit.
pub fn prepare_backward<T: Storage>(
    device: &Device,
    shape: HeadShape,
    norm: Option<HeadNormBackward<'_, T>>,
    angles: Option<HeadAngles<'_>>,
    mut g: ViewMut<'_, T>,
) -> Result<()> {
    let Some(HeadNormBackward { norm, raw, mut gradient }) = norm else {
        return match angles {
            Some(_) => launch_backward(device, shape, None, angles, &g),
            None => Ok(()),
        };
    };
    assert_eq!(raw.len(), g.len(), "a gradient has the shape of what it is of");
    let Some(parts) = norm.whole(shape) else {
        if let Some(gradient) = gradient {
            head_norm_gradient(device, raw, (shape, norm.eps), angles, g.as_view(), gradient)?;
        }
        return launch_backward(device, shape, Some((raw, norm)), angles, &g);
    };
    if angles.is_some() {
        launch_backward(device, shape, None, angles, &g)?;
    }
    let queries = norm.query.len();
    for ((columns, norm), of) in parts.into_iter().zip([0..queries, queries..queries + norm.key.len()]) {
        if let Some(gradient) = &mut gradient {
            weight_gradient_of(device, raw, columns, norm, g.as_view(), gradient.slice_mut(of))?;
        }
        rms_norm_backward_in_place(device, raw, columns, norm, &g.reborrow())?;
    }
    Ok(())
}

/// Rotates `g [rows, width]` back, and through the norm of each head of the raw projection.
fn launch_backward<T: Storage>(
    device: &Device,
    shape: HeadShape,
    apart: Option<(View<'_, T>, HeadNorm<'_, T>)>,
    angles: Option<HeadAngles<'_>>,
    g: &ViewMut<'_, T>,
) -> Result<()> {
    let (raw, norm) = apart.unzip();
    let mut arguments = shape_arguments(g.len(), shape, angles);
    arguments.push(raw.into());
    arguments.extend(norm_arguments(norm));
    let blocks = blocks::<T>(g.len(), shape, shape.heads + shape.kv_heads);
    arguments.push(g.into());
    device.launch(&format!("prepare_backward_{}", T::SUFFIX), [blocks, 1, 1], THREADS, 0, &arguments)
}

/// Adds the gradients of the weights of query norm and key norm to `gradient [2 * head_dim]`, from the raw projection
/// `raw [rows, width]` and the gradient `g [rows, width]` of the prepared one.
fn head_norm_gradient<T: Storage>(
    device: &Device,
    raw: View<'_, T>,
    (shape, eps): (HeadShape, f32),
    angles: Option<HeadAngles<'_>>,
    g: View<'_, T>,
    gradient: ViewMut<'_, f32>,
) -> Result<()> {
    assert_eq!(gradient.len(), 2 * shape.head_dim, "one gradient of the queries' weight, one of the keys'");
    let mut arguments = shape_arguments(raw.len(), shape, angles);
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
fn shape_arguments(len: usize, shape: HeadShape, angles: Option<HeadAngles<'_>>) -> Vec<Argument> {
    let HeadShape { heads, kv_heads, head_dim } = shape;
    let rows = rows_of(len, shape.width());
    assert!(head_dim.is_multiple_of(2), "a head of {head_dim} values is no pairs");
    let pairs = angles.map_or(0, |angles| angles.pairs);
    assert!(2 * pairs <= head_dim, "{pairs} pairs in a head of {head_dim}");
    // Kernels index heads with 32 bits.
    size(rows * (heads + 2 * kv_heads));
    let sizes = [rows, heads, kv_heads, head_dim, pairs].map(|n| size(n).into());
    let tables = angles.map_or([Argument::null(); 2], |HeadAngles { cos, sin, .. }| {
        let count = rows * pairs;
        assert!(cos.len() == count && sin.len() == count, "{count} angles, {} and {}", cos.len(), sin.len());
        [cos.into(), sin.into()]
    });
    sizes.into_iter().chain(tables).collect()
}

/// Those of the norm of each head.
fn norm_arguments<T: Storage>(norm: Option<HeadNorm<'_, T>>) -> [Argument; 4] {
    match norm {
        Some(HeadNorm { query, key, offset, eps }) => [query.into(), key.into(), eps.into(), offset.into()],
        None => [Argument::null(), Argument::null(), 0.0_f32.into(), 0.0_f32.into()],
    }
}

/// Blocks of [`THREADS`] threads in which `heads` heads of each row of `len` values have one lane per 16 bytes of each half.
fn blocks<T>(len: usize, shape: HeadShape, heads: usize) -> usize {
    let lanes = (shape.head_dim / 2).div_ceil(PACK / size_of::<T>()).next_power_of_two().min(32);
    (len / shape.width() * heads * lanes).div_ceil(THREADS)
}
