//! Conversions between device storage and f64.

use device::Storage;

pub(super) fn narrow<T: Storage>(values: Vec<f32>) -> Vec<T> {
    values.into_iter().map(T::narrow).collect()
}

pub(super) fn widen<T: Storage>(values: &[T]) -> Vec<f32> {
    values.iter().map(|value| value.widen()).collect()
}

pub(super) fn wide<T: Storage>(values: &[T]) -> Vec<f64> {
    values.iter().map(|value| f64::from(value.widen())).collect()
}
