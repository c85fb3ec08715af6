//! Gated units, the activations of a feed-forward network (Shazeer 2020, arXiv 2002.05202).

use super::{rows_of, size, tiles};
use crate::backend::Argument;
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{View, ViewMut};

/// What a gated unit computes of a gate and of `up`, the value beside it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UnitKind {
    /// `silu(gate) * up`
    Silu,
    /// `gelu(gate) * up`, with the approximation of GELU by a hyperbolic tangent (Hendrycks and Gimpel 2016, arXiv 1606.08415).
    Gelu,
    /// `g * sigmoid(alpha * g) * (u + 1)`, where `g` and `u` are gate and `up` within bounds (OpenAI 2025, arXiv 2508.10925).
    Clamped {
        /// Factor of the gate in the sigmoid.
        alpha: f32,
        /// Bound of every entry of the gate from above, and of `up` on both sides.
        limit: f32,
    },
}

impl UnitKind {
    fn kernel(self) -> &'static str {
        match self {
            Self::Silu => "silu",
            Self::Gelu => "gelu",
            Self::Clamped { .. } => "clamped",
        }
    }

    /// Kernel arguments: the factor and the bound of the clamped unit.
    fn arguments(self) -> [Argument; 2] {
        match self {
            Self::Silu | Self::Gelu => [0.0_f32.into(), 0.0_f32.into()],
            Self::Clamped { alpha, limit } => [alpha.into(), limit.into()],
        }
    }
}

/// The unit of `gate_up [rows, 2 width]`, with the gate in the first half of each row, into `out [rows, width]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn gated_unit<T: Storage>(
    device: &Device,
    kind: UnitKind,
    gate_up: View<'_, T>,
    width: usize,
    out: ViewMut<'_, T>,
) -> Result<()> {
    let rows = rows_of(gate_up.len(), 2 * width);
    assert_eq!(out.len(), rows * width, "the result has a value for each gate");
    let (blocks, threads) = tiles::<T>(width);
    let [alpha, limit] = kind.arguments();
    let arguments = [gate_up.into(), size(width).into(), alpha, limit, out.into()];
    let kernel = format!("{}_unit_{}", kind.kernel(), T::SUFFIX);
    device.launch(&kernel, [rows, blocks, 1], threads, 0, &arguments)
}

/// Gradient of `gate_up [rows, 2 width]` from `g [rows, width]`, that of the result, into `out [rows, 2 width]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn gated_unit_backward<T: Storage>(
    device: &Device,
    kind: UnitKind,
    gate_up: View<'_, T>,
    width: usize,
    g: View<'_, T>,
    out: ViewMut<'_, T>,
) -> Result<()> {
    launch_backward(device, kind, gate_up, width, g, Argument::null(), out)
}

/// [`gated_unit_backward`] of `g [rows, width]`, over which the result of the unit is written.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn gated_unit_backward_in_place<T: Storage>(
    device: &Device,
    kind: UnitKind,
    gate_up: View<'_, T>,
    width: usize,
    g: ViewMut<'_, T>,
    out: ViewMut<'_, T>,
) -> Result<()> {
    launch_backward(device, kind, gate_up, width, g.as_view(), Argument::from(&g), out)
}

/// Launches the backward; `result` is null, or receives the result of the unit.
fn launch_backward<T: Storage>(
    device: &Device,
    kind: UnitKind,
    gate_up: View<'_, T>,
    width: usize,
    g: View<'_, T>,
    result: Argument,
    out: ViewMut<'_, T>,
) -> Result<()> {
    let rows = rows_of(gate_up.len(), 2 * width);
    assert_eq!(g.len(), rows * width, "a gradient has the shape of what it is of");
    assert_eq!(out.len(), gate_up.len(), "a gradient has the shape of what it is of");
    let (blocks, threads) = tiles::<T>(width);
    let [alpha, limit] = kind.arguments();
    let arguments = [gate_up.into(), size(width).into(), alpha, limit, g.into(), result, out.into()];
    let kernel = format!("{}_unit_backward_{}", kind.kernel(), T::SUFFIX);
    device.launch(&kernel, [rows, blocks, 1], threads, 0, &arguments)
}
