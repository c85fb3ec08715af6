//! The final norm, the language-model head fused with log-probability and entropy (Cut Cross-Entropy, arXiv 2411.09009; Liger
//! Kernel, arXiv 2410.10989), and the value head.
//!
//! Invariant: logits are in memory for [`HEAD_ROWS`] rows at a time; those of a whole pack never are.

use std::ops::Range;

use device::ops::head::{HeadTarget, HeadTargets, PREDICTED, predict, predict_backward};
use device::{DeviceBuffer, Matrix, MatrixMut, Result, Storage, View};

use super::factors::PassGradients;
use super::layer::{input_gradient, weight_gradient};
use super::units::{UnitWeights, within};
use super::{DeviceDecoder, check_ids};
use crate::{Head, Prediction, PredictionGradient, Target, Unit};

/// Rows whose logits are in memory at a time: so many that reading and writing the gradient of the head, once for all of them, takes
/// less time than their product; 1.2 GB for a vocabulary of 150 thousand tokens.
pub const HEAD_ROWS: usize = 2048;

/// Targets on the device.
#[derive(Debug)]
pub(super) struct DeviceTargets {
    targets: HeadTargets,
    len: usize,
    /// `[M, 4]` the results of [`predict`], for the backward; empty without a language-model head.
    predicted: DeviceBuffer<f32>,
}

impl<T: Storage> DeviceDecoder<T> {
    /// Targets, checked: a kernel would read beyond the logits.
    pub(super) fn ask(&self, targets: &[Target<'_>]) -> Result<DeviceTargets> {
        let tokens: Vec<u32> = targets.iter().map(|target| target.token).collect();
        let kept = targets.iter().filter_map(|target| target.kept);
        for ids in std::iter::once(&tokens[..]).chain(kept) {
            check_ids(&self.device, "head", ids, self.config.vocab_size)?;
        }
        let all = targets.iter();
        let all = all.map(|Target { token, temperature, kept }| HeadTarget {
            token: *token,
            temperature: *temperature,
            kept: *kept,
        });
        let of_row = if self.config.head == Head::Value { 0 } else { PREDICTED };
        Ok(DeviceTargets {
            targets: HeadTargets::new(&self.activations, all)?,
            len: targets.len(),
            predicted: self.activations.uninit(of_row * targets.len())?,
        })
    }

    /// Unit of the head, and where it lies in it.
    pub(super) fn head_place(&self) -> (Unit, Range<usize>) {
        let place = self.layout.head();
        let unit =
            if place.start < self.layout.unit(Unit::Tail).start { Unit::Embedding } else { Unit::Tail };
        (unit, within(&self.layout, unit, &place))
    }

    /// Where the weight of the final norm lies in the tail.
    pub(super) fn final_norm(&self) -> Range<usize> {
        let spec = self.layout.spec("model.norm.weight").map_or(0..0, crate::ParameterSpec::range);
        within(&self.layout, Unit::Tail, &spec)
    }

    /// `[rows, V]` logits of `hidden [rows, d]`.
    pub(super) fn logits(&self, hidden: View<'_, T>, weight: View<'_, T>) -> Result<DeviceBuffer<f32>> {
        let (width, vocabulary) = (self.config.hidden_size, self.config.vocab_size);
        let mut logits = self.activations.uninit(hidden.len() / width * vocabulary)?;
        let (hidden, weight) = (Matrix::new(hidden, width), Matrix::new(weight, width).transposed());
        self.device.product(hidden, weight, MatrixMut::new(logits.all_mut(), vocabulary), 1.0, 0.0)?;
        Ok(logits)
    }

    /// Predictions of `normed [M, d]`. Waits.
    pub(super) fn predictions(
        &self,
        weights: &mut dyn UnitWeights<T>,
        normed: &DeviceBuffer<T>,
        asked: &mut DeviceTargets,
    ) -> Result<Vec<Prediction>> {
        let (width, rows) = (self.config.hidden_size, asked.len);
        let mut predictions = vec![Prediction::default(); rows];
        if self.config.head != Head::Value {
            let (unit, place) = self.head_place();
            let weight = weights.unit(unit)?.slice(place);
            for first in (0..rows).step_by(HEAD_ROWS) {
                let last = (first + HEAD_ROWS).min(rows);
                let logits = self.logits(normed.view(first * width..last * width), weight)?;
                let vocabulary = self.config.vocab_size;
                let out = asked.predicted.view_mut(PREDICTED * first..PREDICTED * last);
                predict(&self.device, logits.all(), vocabulary, &asked.targets, first, out)?;
            }
            let found = self.device.download(asked.predicted.all())?;
            for (prediction, found) in predictions.iter_mut().zip(found.chunks_exact(PREDICTED)) {
                (prediction.logprob, prediction.entropy) = (found[0], found[1]);
            }
        }
        if let Some(place) = self.layout.value_head() {
            let tail = weights.unit(Unit::Tail)?;
            let weight = tail.slice(within(&self.layout, Unit::Tail, &place));
            let mut out = self.activations.uninit::<f32>(rows)?;
            let (hidden, weight) =
                (Matrix::new(normed.all(), width), Matrix::new(weight, width).transposed());
            self.device.product(hidden, weight, MatrixMut::new(out.all_mut(), 1), 1.0, 0.0)?;
            let found = self.device.download(out.all())?;
            predictions.iter_mut().zip(found).for_each(|(prediction, value)| prediction.value = value);
        }
        Ok(predictions)
    }

    /// `[M, d]` gradient of `normed`, whose predictions were computed; adds those of the heads.
    pub(super) fn predictions_backward(
        &self,
        weights: &mut dyn UnitWeights<T>,
        normed: &DeviceBuffer<T>,
        asked: &DeviceTargets,
        slopes: &[PredictionGradient],
        gradients: &mut PassGradients<'_, T>,
    ) -> Result<DeviceBuffer<T>> {
        let (device, width) = (&self.activations, self.config.hidden_size);
        let mut d_normed = device.zeros::<T>(normed.len())?;
        if self.config.head != Head::Value {
            let (unit, place) = self.head_place();
            let weight = weights.unit(unit)?.slice(place.clone());
            let pairs: Vec<f32> = slopes.iter().flat_map(|slope| [slope.logprob, slope.entropy]).collect();
            let (pairs, vocabulary) = (device.upload(&pairs)?, self.config.vocab_size);
            for first in (0..asked.len).step_by(HEAD_ROWS) {
                let last = (first + HEAD_ROWS).min(asked.len);
                let piece = first * width..last * width;
                let logits = self.logits(normed.view(piece.clone()), weight)?;
                let mut d_logits = device.uninit::<T>(logits.len())?;
                let known = asked.predicted.view(PREDICTED * first..PREDICTED * last);
                let (pairs, out) = (pairs.view(2 * first..2 * last), d_logits.all_mut());
                predict_backward(
                    device,
                    logits.all(),
                    vocabulary,
                    &asked.targets,
                    first,
                    (known, pairs),
                    out,
                )?;
                drop(logits);
                let x = Matrix::new(normed.view(piece.clone()), width);
                gradients.unit(unit)?.add(device, &place, x, d_logits.all())?;
                let d_piece = input_gradient(device, d_logits.all(), Matrix::new(weight, width))?;
                device.copy(d_piece.all(), d_normed.view_mut(piece))?;
            }
        }
        if let Some(place) = self.layout.value_head()
            && slopes.iter().any(|slope| slope.value != 0.0)
        {
            let place = within(&self.layout, Unit::Tail, &place);
            let values: Vec<T> = slopes.iter().map(|slope| T::narrow(slope.value)).collect();
            let values = device.upload(&values)?;
            let weight = weights.unit(Unit::Tail)?.slice(place.clone());
            let (column, row) = (Matrix::new(values.all(), 1), Matrix::new(weight, width));
            device.product(column, row, MatrixMut::new(d_normed.all_mut(), width), 1.0, 1.0)?;
            let x = Matrix::new(normed.all(), width);
            // It has no factors, as on the processor.
            if let Some(of_head) = gradients.unit(Unit::Tail)?.vector(&place) {
                weight_gradient(device, x, values.all(), of_head)?;
            }
        }
        Ok(d_normed)
    }
}
