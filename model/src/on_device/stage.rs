//! Passes over packs of a decoder of some layers, those of a stage of a pipeline. Residual streams go to other stages through the host.
//!
//! `T` are the tokens of a pack, or those that this rank computes if ranks share them.
//!
//! Invariant: a residual stream and its gradient keep their bits on the way, because f32 has all values of the storage type.

use device::{DeviceBuffer, Result, Storage};

use super::DeviceDecoder;
use super::factors::PassGradients;
use super::layer::RouteCounts;
use super::train::DeviceLayersTrace;
use super::units::{UnitGradients, UnitWeights};
use crate::{Pack, Prediction, SampleSlopes, Target, TrainedTargets};

impl<T: Storage> DeviceDecoder<T> {
    /// Runs the layers of the decoder, of the residual stream `input [T, d]` before them, or of the embedded tokens. Returns the residual
    /// stream after them, `[T, d]`, and what the `backward` needs if there is one. Synchronises.
    ///
    /// # Errors
    /// If a token id lies beyond the vocabulary, weights are not available, or the device fails.
    ///
    /// # Panics
    /// If the residual stream or the experts are of another pack or model.
    pub fn advance(
        &self,
        weights: &mut dyn UnitWeights<T>,
        pack: &Pack,
        input: Option<&[f32]>,
        backward: bool,
    ) -> Result<(Vec<f32>, DeviceLayersTrace<T>)> {
        let mut trace = self.begin(pack, backward.then_some(self.recompute))?;
        let x = match input {
            Some(input) => self.stream(input, trace.tokens())?,
            None => self.embedded(weights, &trace)?,
        };
        let x = self.run_layers(weights, &mut trace, x)?;
        Ok((self.sent(&x)?, trace))
    }

    /// Predictions of `targets [n]`, each from its row of `rows [n]` of the residual stream `x [T, d]` after the last layer of the model.
    /// Synchronises.
    ///
    /// # Errors
    /// If a token id lies beyond the vocabulary, weights are not available, or the device fails.
    ///
    /// # Panics
    /// If the numbers of rows and targets differ.
    pub fn predict(
        &self,
        weights: &mut dyn UnitWeights<T>,
        pack: &Pack,
        x: &[f32],
        rows: &[usize],
        targets: &[Target<'_>],
    ) -> Result<Vec<Prediction>> {
        let context = self.context(pack);
        let asked = self.ask_rows(context.as_ref(), rows, targets, false)?;
        let x = self.stream(x, x.len() / self.config.hidden_size)?;
        Ok(self.run_head(weights, x, asked, context.as_ref())?.0)
    }

    /// Forward and backward of the final norm and the head for the residual stream `x [T, d]` after the last layer of the model, with the
    /// derivatives that `slopes` returns for the predictions of all samples. Returns the gradient of `x`. Synchronises.
    ///
    /// # Errors
    /// If a token id lies beyond the vocabulary, weights are not available, a reduction of gradients fails, or the device fails.
    ///
    /// # Panics
    /// If the numbers of rows, targets and slopes differ.
    pub fn train_head(
        &self,
        weights: &mut dyn UnitWeights<T>,
        pack: &Pack,
        x: &[f32],
        trained: TrainedTargets<'_>,
        slopes: &mut SampleSlopes<'_>,
        gradients: &mut dyn UnitGradients,
    ) -> Result<Vec<f32>> {
        let tokens = x.len() / self.config.hidden_size;
        let context = self.context(pack);
        let asked = self.ask_rows(context.as_ref(), trained.rows, trained.targets, true)?;
        let (predictions, head) = self.run_head(weights, self.stream(x, tokens)?, asked, context.as_ref())?;
        let slopes = slopes(0..trained.samples.len(), &predictions);
        let mut gradients = PassGradients { sink: gradients, factors: None, layout: &self.layout };
        let d = self.reverse_head(weights, head, tokens, &slopes, &mut gradients)?;
        self.sent(&d)
    }

    /// Backward of the layers, and of the embedding if the decoder has one, for the gradient `d [T, d]` of the residual stream after them.
    /// Returns that of the residual stream before them, `[T, d]`, and the tokens of the experts of the layers. Synchronises.
    ///
    /// # Errors
    /// If weights are not available, a reduction of gradients fails, or the device fails.
    ///
    /// # Panics
    /// If `d` is of another pack.
    pub fn reverse(
        &self,
        weights: &mut dyn UnitWeights<T>,
        trace: DeviceLayersTrace<T>,
        d: &[f32],
        gradients: &mut dyn UnitGradients,
    ) -> Result<(Vec<f32>, RouteCounts)> {
        let mut gradients = PassGradients { sink: gradients, factors: None, layout: &self.layout };
        let d = self.stream(d, trace.tokens())?;
        let (d, counts) = self.reverse_layers(weights, trace, d, &mut gradients)?;
        Ok((self.sent(&d)?, counts))
    }

    /// A residual stream `[tokens, d]` from the host.
    fn stream(&self, values: &[f32], tokens: usize) -> Result<DeviceBuffer<T>> {
        assert_eq!(values.len(), tokens * self.config.hidden_size, "a residual stream is [tokens, d]");
        let values: Vec<T> = values.iter().map(|value| T::narrow(*value)).collect();
        self.activations.upload(&values)
    }

    /// A residual stream on the host.
    fn sent(&self, x: &DeviceBuffer<T>) -> Result<Vec<f32>> {
        // A download has no deadline, and a rank that shares the weights may be lost.
        self.wait_for_ranks()?;
        Ok(self.activations.download(x.all())?.into_iter().map(T::widen).collect())
    }
}
