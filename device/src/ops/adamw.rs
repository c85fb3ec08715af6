//! AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101) with f32 moments.

use super::THREADS;
use super::vectors::{blocks, count};
use crate::backend::Argument;
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{View, ViewMut};

/// The numbers of one update, the same for all values of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamwStep {
    /// Multiplies the gradients: below 1 where they are clipped.
    pub gradient: f32,
    /// What an update leaves of the mean of the gradients.
    pub beta1: f32,
    /// What an update leaves of the mean of their squares.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Learning rate over the bias correction of the first moment: `rate / (1 - beta1^t)`.
    pub step_size: f32,
    /// Bias correction of the second moment: `1 / (1 - beta2^t)`.
    pub second_scale: f32,
    /// What weight decay leaves of a value: `1 - rate * decay`, or 1 where nothing decays.
    pub keep: f32,
}

/// Updates `values [n]` and their moments `first [n]` and `second [n]` for `gradient [n]`; `compute [n]` gets what the
/// values become, rounded to what the model computes with.
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
