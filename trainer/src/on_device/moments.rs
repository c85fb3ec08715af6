//! First and second moments on a device, and the AdamW update of the values that they belong to.
//!
//! A single rank has the moments of all tensors, a rank of a device group those of its fragments, which are concatenated.

use std::ops::Range;

use device::ops::adamw::{AdamwStep, adamw};
use device::{Device, DeviceBuffer, Storage, View};
use model::{Layout, ParameterSpec};

use super::loaded::UpdatedWeights;
use crate::TrainerError;
use crate::adamw::AdamwUpdate;
use crate::moments::Moments;
use crate::optimizer::TensorState;
use crate::zero::Fragment;

/// The moments of the values that a rank trains.
pub(crate) struct DeviceMoments {
    /// The trained pieces, in the order of their values.
    pieces: Vec<Piece>,
    first: DeviceBuffer<f32>,
    second: DeviceBuffer<f32>,
}

/// A tensor or a part of one.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    tensor: u32,
    /// Whether the tensor has more than one dimension.
    matrix: bool,
    /// Range among the concatenated values.
    place: Range<usize>,
}

/// The update of neighbouring pieces.
#[derive(Clone, Debug)]
struct PlacedStep {
    place: Range<usize>,
    step: AdamwStep,
}

impl Piece {
    /// All tensors of a model.
    pub(crate) fn tensors(layout: &Layout) -> Vec<Self> {
        let tensors = layout.specs().iter().enumerate();
        tensors.map(|(tensor, spec)| Self::new(tensor, spec, spec.range())).collect()
    }

    /// Fragments of tensors of a model, concatenated.
    pub(crate) fn fragments(layout: &Layout, fragments: &[Fragment]) -> Vec<Self> {
        let mut end = 0;
        let piece = |Fragment { tensor, within }: &Fragment| {
            let start = end;
            end += within.len();
            Self::new(*tensor, &layout.specs()[*tensor], start..end)
        };
        fragments.iter().map(piece).collect()
    }

    fn new(tensor: usize, spec: &ParameterSpec, place: Range<usize>) -> Self {
        Self { tensor: tensor as u32, matrix: spec.shape.len() > 1, place }
    }
}

impl DeviceMoments {
    /// Copies the moments of all `pieces`, one of `states` each, to the device.
    ///
    /// # Errors
    /// If the memory of the device is too small, or the states are not moments in f32.
    pub(crate) fn load(
        device: &Device,
        pieces: Vec<Piece>,
        states: &[TensorState],
    ) -> Result<Self, TrainerError> {
        let optimizer = device.labelled("optimizer");
        let len = pieces.last().map_or(0, |piece| piece.place.end);
        let mut moments = Self { first: optimizer.uninit(len)?, second: optimizer.uninit(len)?, pieces };
        for (piece, state) in moments.pieces.iter().zip(states) {
            let TensorState::Moments(Moments::Full { first, second }) = state else {
                let reason =
                    "its device updates weights with AdamW, but the optimizer state is not f32 moments";
                return Err(TrainerError::State { reason });
            };
            optimizer.upload_to(first, moments.first.view_mut(piece.place.clone()))?;
            optimizer.upload_to(second, moments.second.view_mut(piece.place.clone()))?;
        }
        Ok(moments)
    }

    /// Copies the moments of each piece to the host.
    ///
    /// # Errors
    /// If the device fails.
    pub(crate) fn read(&self, device: &Device) -> device::Result<Vec<TensorState>> {
        let of =
            |buffer: &DeviceBuffer<f32>, piece: &Piece| device.download(buffer.view(piece.place.clone()));
        let state = |piece: &Piece| {
            let (first, second) = (of(&self.first, piece)?, of(&self.second, piece)?);
            Ok(TensorState::Moments(Moments::Full { first, second }))
        };
        self.pieces.iter().map(state).collect()
    }

    /// Updates the moments and the `weights` with `gradients`, `[trained values]`.
    ///
    /// # Errors
    /// If the device fails.
    pub(crate) fn update<T: Storage>(
        &mut self,
        device: &Device,
        adam: &AdamwUpdate,
        weights: UpdatedWeights<'_, T>,
        gradients: View<'_, f32>,
    ) -> device::Result<()> {
        let UpdatedWeights { masters, mut rounded } = weights;
        for PlacedStep { place, step } in steps(adam, &self.pieces) {
            let rounded = rounded.as_mut().map(|rounded| rounded.view_mut(place.clone()));
            let first = self.first.view_mut(place.clone());
            let second = self.second.view_mut(place.clone());
            let (values, gradients) = (masters.view_mut(place.clone()), gradients.slice(place));
            adamw::<T>(device, &step, values, first, second, gradients, rounded)?;
        }
        Ok(())
    }

    /// Number of values that the rank trains.
    pub(crate) fn len(&self) -> usize {
        self.first.len()
    }

    /// Memory, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.first.bytes() + self.second.bytes()
    }
}

/// The updates of neighbouring pieces. Pieces with equal factors share an update.
fn steps(adam: &AdamwUpdate, pieces: &[Piece]) -> Vec<PlacedStep> {
    let mut steps: Vec<PlacedStep> = Vec::new();
    for Piece { tensor, matrix, place } in pieces {
        let factors = adam.of(*tensor, *matrix);
        let step = AdamwStep {
            gradient: factors.gradient,
            beta1: factors.beta1,
            beta2: factors.beta2,
            eps: factors.eps,
            step_size: factors.step_size,
            second_scale: factors.second_scale,
            keep: factors.keep,
        };
        match steps.last_mut() {
            Some(last) if last.step == step => last.place.end = place.end,
            _ => steps.push(PlacedStep { place: place.clone(), step }),
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use model::{Config, Sizes};

    use super::*;
    use crate::optimizer::{OptimizerConfig, OptimizerKind};

    #[test]
    fn neighbouring_tensors_with_equal_factors_share_an_update() {
        let layout = Layout::new(&Config::fresh(&Sizes {
            vocab_size: 4,
            hidden_size: 4,
            intermediate_size: 4,
            num_layers: 2,
            num_heads: 2,
            num_kv_heads: 1,
            max_position_embeddings: 8,
        }));
        for weight_decay in [0.0, 0.1] {
            let config =
                OptimizerConfig { weight_decay, ..OptimizerConfig::standard(OptimizerKind::Adamw, 0.95) };
            let adam = AdamwUpdate::new(&config, 3, 0.5, 0.7);
            let steps = steps(&adam, &Piece::tensors(&layout));
            let mut end = 0;
            for PlacedStep { place, step } in &steps {
                assert_eq!(place.start, end);
                end = place.end;
                let inside = layout.specs().iter().filter(|spec| place.contains(&spec.offset));
                let keep =
                    inside.map(|spec| if spec.shape.len() > 1 { 1.0 - 0.5 * weight_decay } else { 1.0 });
                assert!(keep.into_iter().all(|keep| keep == step.keep));
            }
            assert_eq!(end, layout.len());
            assert_eq!(steps.len() == 1, weight_decay == 0.0);
        }
    }
}
