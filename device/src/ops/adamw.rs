//! AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101) with f32 moments.

use super::THREADS;
use super::vectors::{blocks, count};
use crate::backend::Argument;
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{View, ViewMut};

/// Factors of one update, equal for all values of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamwStep {
    /// Gradient scale; below 1 if the gradient is clipped.
    pub gradient: f32,
    /// Decay rate of the first moment.
    pub beta1: f32,
    /// Decay rate of the second moment.
    pub beta2: f32,
    /// Added to the square root of the second moment.
    pub eps: f32,
    /// Learning rate divided by the bias correction of the first moment: `rate / (1 - beta1^t)`.
    pub step_size: f32,
    /// Bias correction of the second moment: `1 / (1 - beta2^t)`.
    pub second_scale: f32,
    /// Weight decay: `1 - rate * decay`, or 1 without decay.
    pub keep: f32,
}

/// Updates master weights `values [n]` and moments `first [n]`, `second [n]` with `gradient [n]`. `compute [n]`
/// receives the new values rounded to the model's storage type.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the lengths differ.
pub fn adamw<T: Storage>(
    device: &Device,
    step: &AdamwStep,
    values: ViewMut<'_, f32>,
    first: ViewMut<'_, f32>,
    second: ViewMut<'_, f32>,
    gradient: View<'_, f32>,
    compute: Option<ViewMut<'_, T>>,
) -> Result<()> {
    let len = values.len();
    assert!(
        first.len() == len && second.len() == len,
        "moments {} and {} of {len}",
        first.len(),
        second.len()
    );
    assert_eq!(gradient.len(), len, "a gradient has the shape of what it is of");
    assert!(compute.as_ref().is_none_or(|compute| compute.len() == len), "a rounded value for each");
    let AdamwStep { gradient: scale, beta1, beta2, eps, step_size, second_scale, keep } = *step;
    let arguments = [
        scale.into(),
        beta1.into(),
        beta2.into(),
        eps.into(),
        step_size.into(),
        second_scale.into(),
        keep.into(),
        count(len),
        values.into(),
        first.into(),
        second.into(),
        gradient.into(),
        compute.map_or_else(Argument::null, Argument::from),
    ];
    device.launch(&format!("adamw_{}", T::SUFFIX), [blocks(len), 1, 1], THREADS, 0, &arguments)
}
