//! The linear operations of a layer in a step, with what the adapters of its tokens add.

use device::ops::adapters::{NO_ADAPTER, RowAdapters, add_adapted, add_embedded};
use device::ops::experts::ExpertInputs;
use device::ops::routes::RoutedRows;
use device::ops::rows::add_bias;
use device::{Device, DeviceBuffer, Matrix, Result, Storage, View, ViewMut};

use super::{AdaptedDecoder, StepLayer};
use crate::StepSequence;
use crate::layer::Operand;
use crate::on_device::adapters::DeviceAdapters;
use crate::on_device::layer::linear;

/// Memory of what adapters add; empty without adapters.
#[derive(Debug)]
pub(super) struct AdapterMemory {
    /// `[T]` the adapter of each token.
    of_tokens: DeviceBuffer<u32>,
    /// What is between the two products of one operation.
    shrunk: DeviceBuffer<f32>,
}

/// A number for each token of `sequences`, those of padding included: its adapter.
fn adapters_of(sequences: &[StepSequence<'_>], tokens: usize) -> Vec<u32> {
    let mut all = Vec::with_capacity(tokens);
    for sequence in sequences {
        all.extend(std::iter::repeat_n(number_of(sequence), sequence.tokens.len()));
    }
    all.resize(tokens, NO_ADAPTER);
    all
}

/// The adapter of `sequence`, as kernels take it.
fn number_of(sequence: &StepSequence<'_>) -> u32 {
    sequence.adapter.map_or(NO_ADAPTER, |adapter| adapter as u32)
}

/// The adapters of the tokens of `sequences` whose hidden states are wanted.
pub(super) fn wanted_adapters(sequences: &[StepSequence<'_>]) -> Vec<u32> {
    let of = |sequence: &StepSequence<'_>| std::iter::repeat_n(number_of(sequence), sequence.wanted);
    sequences.iter().flat_map(of).collect()
}

impl AdapterMemory {
    /// Memory for `tokens` tokens.
    pub(super) fn new<T: Storage>(
        device: &Device,
        adapters: Option<&DeviceAdapters<T>>,
        tokens: usize,
    ) -> Result<Self> {
        let rows = if adapters.is_some() { tokens } else { 0 };
        let shrunk = adapters.map_or(0, |adapters| adapters.scratch(tokens));
        Ok(Self { of_tokens: device.uninit(rows)?, shrunk: device.uninit(shrunk)? })
    }

    /// Uploads the adapters of the tokens of `sequences`; there are `tokens` with those that are padding.
    pub(super) fn fill(
        &mut self,
        device: &Device,
        sequences: &[StepSequence<'_>],
        tokens: usize,
    ) -> Result<()> {
        device.upload_to(&adapters_of(sequences, tokens), self.of_tokens.view_mut(0..tokens))
    }
}

impl<T: Storage> AdaptedDecoder<'_, T> {
    /// Adds what adapters add to the rows `x [T, d]` of the embedded tokens `ids [T]`.
    pub(super) fn embed(&self, ids: View<'_, u32>, own: &mut AdapterMemory, x: ViewMut<'_, T>) -> Result<()> {
        let Some(of) = self.adapters.and_then(DeviceAdapters::embedding) else { return Ok(()) };
        let AdapterMemory { of_tokens, shrunk } = own;
        let rows = RowAdapters { of_tokens: of_tokens.view(0..ids.len()), routes: None };
        let tokens = (ids, self.decoder.config().vocab_size);
        add_embedded(self.decoder.device(), &of, &rows, tokens, shrunk.all_mut(), x)
    }
}

impl<T: Storage> StepLayer<'_, T> {
    /// The linear operation `operand` of `x [T, in]`, with its bias, into `to [T, out]`, or added to it if `kept`.
    pub(super) fn linear(
        &self,
        operand: Operand,
        x: Matrix<'_, T>,
        (mut to, kept): (ViewMut<'_, T>, bool),
        own: &mut AdapterMemory,
    ) -> Result<()> {
        self.linear_without_bias(operand, x, (to.reborrow(), kept), own)?;
        match self.bias(operand) {
            Some(bias) => add_bias(self.decoder.device(), to, bias),
            None => Ok(()),
        }
    }

    /// The bias `[out]` of the linear operation `operand`, if it has any.
    pub(super) fn bias(&self, operand: Operand) -> Option<View<'_, T>> {
        let ranges = self.decoder.layout().ranges(self.index);
        let bias = operand.bias().map(|bias| &ranges[bias]).filter(|bias| !bias.is_empty());
        bias.map(|bias| self.at(bias))
    }

    /// [`Self::linear`] before its bias is added.
    pub(super) fn linear_without_bias(
        &self,
        operand: Operand,
        x: Matrix<'_, T>,
        (mut to, kept): (ViewMut<'_, T>, bool),
        own: &mut AdapterMemory,
    ) -> Result<()> {
        let weight = self.matrix(operand, x.columns());
        linear(self.decoder.device(), x.values(), weight, to.reborrow(), kept)?;
        self.adapt(operand, (ExpertInputs::OfTokens(x.values()), x.columns()), None, to, own)
    }

    /// Adds what the adapters of the tokens add to `to [rows, out]`, the result of the operation `operand` of `x` of this width. With
    /// experts, `routes` are those of the tokens.
    pub(super) fn adapt<Out: Storage>(
        &self,
        operand: Operand,
        x: (ExpertInputs<'_, T>, usize),
        routes: Option<RoutedRows<'_>>,
        to: ViewMut<'_, Out>,
        own: &mut AdapterMemory,
    ) -> Result<()> {
        let Some(of) = self.adapters.and_then(|adapters| adapters.of_layer(self.index, operand)) else {
            return Ok(());
        };
        let AdapterMemory { of_tokens, shrunk } = own;
        let rows = RowAdapters { of_tokens: of_tokens.view(0..self.tokens), routes };
        add_adapted(self.decoder.device(), &of, &rows, x, shrunk.all_mut(), to)
    }
}
