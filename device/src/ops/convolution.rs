//! The inputs of a gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): a causal depthwise convolution with SiLU, queries and keys
//! divided by their lengths, and the gates of the recurrence.
//!
//! The convolution of a row sees inputs of the tokens before it by their [`InputSource`]s, so that a pack of sequences, of which some
//! continue others, and a step that continues what sequences keep are the same to it.

use super::rows::add_partial_sums;
use super::vectors::blocks;
use super::{THREADS, rows_of, size, slabs};
use crate::backend::Argument;
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{View, ViewMut};

/// Most tokens that a convolution sees.
pub const MAX_TAPS: usize = 8;
/// Most values of a head.
pub const MAX_HEAD: usize = 256;
/// Heads per block.
const WARPS: usize = 8;
/// Smallest number of rows per block in the gradient of the kernel.
const SLAB: usize = 64;

/// The sizes of a gated DeltaNet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values; a multiple of `key_heads`.
    pub value_heads: usize,
    /// Width of a query or key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Tokens that the convolution sees.
    pub taps: usize,
}

impl DeltaShape {
    /// Width of queries, keys and values.
    #[must_use]
    pub fn channels(self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_width()
    }

    /// Width of all values, and of the result.
    #[must_use]
    pub fn value_width(self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Values of the states of all heads.
    #[must_use]
    pub fn states_len(self) -> usize {
        self.value_width() * self.key_dim
    }

    /// Values of the inputs before the next token that the convolution sees.
    #[must_use]
    pub fn inputs_len(self) -> usize {
        (self.taps - 1) * self.channels()
    }

    fn arguments(self) -> [Argument; 5] {
        let fits = self.taps <= MAX_TAPS && self.key_dim.max(self.value_dim) <= MAX_HEAD;
        assert!(fits, "{self:?}: at most {MAX_TAPS} taps, and heads of {MAX_HEAD} values");
        [self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.taps].map(|n| size(n).into())
    }

    /// Blocks of a launch with a warp for every head of `rows` rows.
    fn grid(self, rows: usize) -> [usize; 3] {
        [(rows * (2 * self.key_heads + self.value_heads)).div_ceil(WARPS), 1, 1]
    }
}

/// Where the input of an earlier token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputSource {
    /// In a row of the batch.
    Row(usize),
    /// Nowhere: the sequence begins after it.
    None,
    /// An entry of the inputs that the sequence keeps, oldest first.
    Kept(usize),
}

impl InputSource {
    /// As kernels read it.
    #[must_use]
    pub fn pack(self) -> u32 {
        match self {
            Self::Row(row) => size(row) as u32,
            Self::None => u32::MAX,
            Self::Kept(entry) => u32::MAX - 1 - size(entry) as u32,
        }
    }
}

/// What the convolution sees. `T` rows.
#[derive(Clone, Copy, Debug)]
pub struct ConvolutionInputs<'a, T: Storage> {
    /// The sizes.
    pub shape: DeltaShape,
    /// `[T, stride]`, whose rows begin with the channels.
    pub projection: View<'a, T>,
    /// `[channels, taps]`, the token itself last.
    pub kernel: View<'a, T>,
    /// `[T, taps - 1]` the packed [`InputSource`] of the tokens before, nearest first.
    pub sources: View<'a, u32>,
}

/// What sequences keep of the tokens before a step.
#[derive(Clone, Copy, Debug)]
pub struct SequenceSlots<'a> {
    /// `[sequences]` slots of the pool.
    pub slots: View<'a, u32>,
    /// `[sequences + 1]` the first row of each sequence, and the end of the last.
    pub firsts: View<'a, u32>,
    /// `[T]` the sequence of each row.
    pub owners: View<'a, u32>,
    /// `[T]` positions of the tokens in their sequences; one that begins at 0 keeps nothing yet.
    pub positions: View<'a, u32>,
    /// Values from a slot to the next one.
    pub stride: usize,
}

impl SequenceSlots<'_> {
    /// Number of sequences.
    pub(super) fn count(&self) -> usize {
        assert_eq!(
            self.firsts.len(),
            self.slots.len() + 1,
            "sequences have a first row, and the last an end"
        );
        self.slots.len()
    }
}

impl<T: Storage> ConvolutionInputs<'_, T> {
    /// Number of rows, and of their values.
    fn rows(&self) -> [usize; 2] {
        let (channels, taps) = (self.shape.channels(), self.shape.taps);
        assert_eq!(self.kernel.len(), channels * taps, "the kernel is [channels, taps]");
        let rows =
            if taps > 1 { rows_of(self.sources.len(), taps - 1) } else { self.projection.len() / channels };
        let stride = self.projection.len().checked_div(rows).unwrap_or(channels);
        assert!(
            stride >= channels && rows * stride == self.projection.len(),
            "{rows} rows of {channels} channels"
        );
        [rows, stride]
    }
}

/// Queries and keys, normalised, and values, into `out [T, channels]`. `kept` is what sequences keep, if sources are there: for each
/// slot `[taps - 1, channels]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn convolve<T: Storage>(
    device: &Device,
    inputs: ConvolutionInputs<'_, T>,
    kept: Option<(View<'_, f32>, SequenceSlots<'_>)>,
    out: ViewMut<'_, T>,
) -> Result<()> {
    let [rows, stride] = inputs.rows();
    assert_eq!(out.len(), rows * inputs.shape.channels(), "the result is [T, channels]");
    let ConvolutionInputs { shape, projection, kernel, sources } = inputs;
    let mut arguments = vec![projection.into(), size(stride).into(), kernel.into(), sources.into()];
    match kept {
        None => arguments.extend([Argument::null(), Argument::null(), Argument::null(), 0_i64.into()]),
        Some((pool, SequenceSlots { slots, owners, stride, .. })) => {
            assert_eq!(owners.len(), rows, "every row has a sequence");
            arguments.extend::<[Argument; 4]>([
                pool.into(),
                slots.into(),
                owners.into(),
                (stride as i64).into(),
            ]);
        }
    }
    arguments.push((rows as i64).into());
    arguments.extend(shape.arguments());
    arguments.push(out.into());
    device.launch(&format!("convolve_{}", T::SUFFIX), shape.grid(rows), THREADS, 0, &arguments)
}

/// Moves the last inputs of every sequence to what it keeps: for each slot of `pool` `[taps - 1, channels]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn keep_inputs<T: Storage>(
    device: &Device,
    inputs: ConvolutionInputs<'_, T>,
    of: SequenceSlots<'_>,
    pool: ViewMut<'_, f32>,
) -> Result<()> {
    let ([_, stride], channels) = (inputs.rows(), inputs.shape.channels());
    let arguments = [
        inputs.projection.into(),
        size(stride).into(),
        of.positions.into(),
        of.firsts.into(),
        of.slots.into(),
        (of.stride as i64).into(),
        size(channels).into(),
        size(inputs.shape.taps).into(),
        pool.into(),
    ];
    let grid = [channels.div_ceil(THREADS), of.count(), 1];
    device.launch(&format!("keep_inputs_{}", T::SUFFIX), grid, THREADS, 0, &arguments)
}

/// Gradients of what [`convolve`] gives. `T` rows.
#[derive(Clone, Copy, Debug)]
pub struct HeadGradients<'a> {
    /// `[T, value_heads, 2, key_dim]` of queries and keys, by value head.
    pub pairs: View<'a, f32>,
    /// `[T, value_heads, value_dim]`
    pub values: View<'a, f32>,
}

/// Gradient of the sums before their activation, into `d_sums [T, channels]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn convolve_backward<T: Storage>(
    device: &Device,
    inputs: ConvolutionInputs<'_, T>,
    g: HeadGradients<'_>,
    d_sums: ViewMut<'_, f32>,
) -> Result<()> {
    let [rows, stride] = inputs.rows();
    let ConvolutionInputs { shape, projection, kernel, sources } = inputs;
    assert_eq!(g.pairs.len(), rows * shape.value_heads * 2 * shape.key_dim, "gradients of queries and keys");
    assert_eq!(g.values.len(), rows * shape.value_width(), "gradients of values");
    assert_eq!(d_sums.len(), rows * shape.channels(), "the result is [T, channels]");
    let mut arguments = vec![projection.into(), size(stride).into(), kernel.into(), sources.into()];
    arguments.extend::<[Argument; 3]>([g.pairs.into(), g.values.into(), (rows as i64).into()]);
    arguments.extend(shape.arguments());
    arguments.push(d_sums.into());
    device.launch(&format!("convolve_backward_{}", T::SUFFIX), shape.grid(rows), THREADS, 0, &arguments)
}

/// The rows that see each row of a pack.
#[derive(Clone, Copy, Debug)]
pub struct InputUses<'a> {
    /// `[T + 1]` where those of each row begin.
    pub starts: View<'a, u32>,
    /// `[_, 2]`: the row that sees it, and how many tokens it is before that.
    pub uses: View<'a, u32>,
}

/// Gradient of the channels of the projection, into the beginnings of the rows of `d_projection [T, stride]`, for that of the sums,
/// `d_sums [T, channels]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn convolution_inputs_backward<T: Storage>(
    device: &Device,
    inputs: ConvolutionInputs<'_, T>,
    uses: InputUses<'_>,
    d_sums: View<'_, f32>,
    d_projection: ViewMut<'_, T>,
) -> Result<()> {
    let ([rows, stride], channels) = (inputs.rows(), inputs.shape.channels());
    assert_eq!(uses.starts.len(), rows + 1, "uses of every row");
    assert_eq!(d_sums.len(), rows * channels, "gradients of sums");
    assert_eq!(d_projection.len(), rows * stride, "a gradient has the shape of what it is of");
    let [channels_of, taps, stride] = [channels, inputs.shape.taps, stride].map(|n| Argument::from(size(n)));
    let (kernel, starts, uses) = (inputs.kernel.into(), uses.starts.into(), uses.uses.into());
    let rows_of = (rows as i64).into();
    let arguments =
        [d_sums.into(), kernel, starts, uses, rows_of, channels_of, taps, stride, d_projection.into()];
    let (kernel, grid) = ("convolution_inputs_backward", [blocks(rows * channels), 1, 1]);
    device.launch(&format!("{kernel}_{}", T::SUFFIX), grid, THREADS, 0, &arguments)
}

/// Adds the gradient of the kernel to `gradient [channels, taps]`, for that of the sums, `d_sums [T, channels]`.
///
/// # Errors
/// If a launch fails, or there is no memory for partial sums.
///
/// # Panics
/// If the shapes do not fit.
pub fn convolution_kernel_gradient<T: Storage>(
    device: &Device,
    inputs: ConvolutionInputs<'_, T>,
    d_sums: View<'_, f32>,
    gradient: ViewMut<'_, f32>,
) -> Result<()> {
    let ([rows, stride], channels) = (inputs.rows(), inputs.shape.channels());
    assert_eq!(d_sums.len(), rows * channels, "gradients of sums");
    assert_eq!(gradient.len(), inputs.kernel.len(), "a gradient has the shape of what it is of");
    if rows == 0 {
        return Ok(());
    }
    let (slab, parts) = slabs(rows, SLAB);
    let mut partial = device.uninit::<f32>(parts * gradient.len())?;
    let [stride, rows, slab, channels_of, taps] =
        [stride, rows, slab, channels, inputs.shape.taps].map(|n| Argument::from(size(n)));
    let (x, sources, to) = (inputs.projection.into(), inputs.sources.into(), partial.all_mut().into());
    let arguments = [x, stride, sources, d_sums.into(), rows, slab, channels_of, taps, to];
    let (kernel, grid) = ("convolution_kernel_parts", [channels.div_ceil(THREADS), parts, 1]);
    device.launch(&format!("{kernel}_{}", T::SUFFIX), grid, THREADS, 0, &arguments)?;
    add_partial_sums(device, partial.all(), gradient)
}

/// The operands of the gates of a recurrence. `T` rows.
#[derive(Clone, Copy, Debug)]
pub struct DeltaGates<'a, T: Storage> {
    /// `[T, 2, heads]` of strengths, then of decays.
    pub inputs: View<'a, f32>,
    /// `[heads]` logarithms of the rates of decay.
    pub logs: View<'a, T>,
    /// `[heads]`
    pub bias: View<'a, T>,
}

impl<T: Storage> DeltaGates<'_, T> {
    /// Rows and heads.
    fn arguments(&self) -> [Argument; 2] {
        assert_eq!(self.logs.len(), self.bias.len(), "a head has a rate and a bias");
        let rows = rows_of(self.inputs.len(), 2 * self.logs.len());
        [(rows as i64).into(), size(self.logs.len()).into()]
    }
}

/// Strengths of updates and factors of decay, into `opened [T, 2, heads]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn open_gates<T: Storage>(
    device: &Device,
    gates: DeltaGates<'_, T>,
    opened: ViewMut<'_, f32>,
) -> Result<()> {
    assert_eq!(gates.inputs.len(), opened.len(), "a gate for each input");
    let ([rows, heads], grid) = (gates.arguments(), [blocks(opened.len()), 1, 1]);
    let arguments = [gates.inputs.into(), gates.logs.into(), gates.bias.into(), rows, heads, opened.into()];
    device.launch(&format!("open_gates_{}", T::SUFFIX), grid, THREADS, 0, &arguments)
}

/// Gradient of the inputs, into `dx [T, 2, heads]`, for `g [T, 2, heads]`, that of the strengths and of the logarithms of the decays.
/// Writes what each row adds to the gradients of `logs` and of `bias` to `d_vectors [T, 2, heads]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn open_gates_backward<T: Storage>(
    device: &Device,
    gates: DeltaGates<'_, T>,
    g: View<'_, f32>,
    dx: ViewMut<'_, T>,
    d_vectors: ViewMut<'_, f32>,
) -> Result<()> {
    let len = gates.inputs.len();
    assert_eq!([g.len(), dx.len(), d_vectors.len()], [len; 3], "a gradient has the shape of what it is of");
    let ([rows, heads], grid) = (gates.arguments(), [blocks(len), 1, 1]);
    let (x, logs, bias) = (gates.inputs.into(), gates.logs.into(), gates.bias.into());
    let arguments = [x, logs, bias, g.into(), rows, heads, dx.into(), d_vectors.into()];
    device.launch(&format!("open_gates_backward_{}", T::SUFFIX), grid, THREADS, 0, &arguments)
}
