//! A router and its experts on a device: what passes over packs and decode steps share.
//!
//! Logits of a router are f32, whatever weights are stored in, and so are the scores and weights that follow from them.

use std::ops::Range;

use device::ops::experts::ExpertProduct;
use device::ops::gated_unit::UnitKind;
use device::ops::routes::{GivenSlots, Padding, RouteInputs, RouteMemory, Router};
use device::{Device, Matrix, MatrixMut, Result, Storage, View, ViewMut};

use super::DeviceDecoder;
use crate::Config;
use crate::layer::{ExpertActivation, ExpertSpec, FeedForward, LayerRanges, Operand};

/// The weights of a router and its experts, and the network beside them.
#[derive(Clone, Debug)]
pub(super) struct DeviceExperts<'a, T: Storage> {
    pub(super) spec: ExpertSpec,
    /// The experts that this rank has.
    own: Range<usize>,
    hidden: usize,
    ranges: &'a LayerRanges,
    /// The values of the layer.
    weights: View<'a, T>,
}

impl From<ExpertActivation> for UnitKind {
    fn from(activation: ExpertActivation) -> Self {
        match activation {
            ExpertActivation::SwiGlu => Self::Silu,
            ExpertActivation::Clamped(clamp) => Self::Clamped { alpha: clamp.alpha, limit: clamp.limit },
        }
    }
}

impl ExpertSpec {
    /// Its router, for devices.
    pub(super) fn router(&self) -> Router {
        Router { experts: self.count, per_token: self.per_token, kind: self.router }
    }
}

impl FeedForward {
    /// The activation of the network, or of each of its experts.
    pub(super) fn unit(self) -> UnitKind {
        match self {
            Self::SwiGlu => UnitKind::Silu,
            Self::GeGlu => UnitKind::Gelu,
            Self::Experts(spec) => spec.activation.into(),
        }
    }
}

/// The experts of all layers that have some.
pub(super) fn all_experts(config: &Config) -> impl Iterator<Item = ExpertSpec> {
    config.layers.iter().filter_map(|layer| layer.feed_forward.experts())
}

impl<'a, T: Storage> DeviceExperts<'a, T> {
    /// Those of layer `index`, whose values are `weights`.
    pub(super) fn new(
        decoder: &'a DeviceDecoder<T>,
        index: usize,
        weights: View<'a, T>,
        spec: ExpertSpec,
    ) -> Self {
        let (hidden, ranges) = (decoder.config.hidden_size, decoder.layout.ranges(index));
        let own = decoder.ranks.own_experts(spec.count);
        Self { spec, own, hidden, ranges, weights }
    }

    /// The router of rows that are of own experts, one each.
    pub(super) fn own_router(&self) -> Router {
        Router { experts: self.own.len(), per_token: 1, kind: self.spec.router }
    }

    /// The part of `operand`, which has values for every expert, of own experts; empty if the layer does not have it.
    pub(super) fn own_range(&self, operand: Operand) -> Range<usize> {
        let range = &self.ranges[operand];
        let each = range.len() / self.spec.count;
        range.start + self.own.start * each..range.start + self.own.end * each
    }

    /// The values of [`Self::own_range`], if the layer has them.
    pub(super) fn own_values(&self, operand: Operand) -> Option<View<'a, T>> {
        let range = self.own_range(operand);
        (!range.is_empty()).then(|| self.weights.slice(range))
    }

    /// The values of `operand`, if the layer has them.
    pub(super) fn values(&self, operand: Operand) -> Option<View<'a, T>> {
        let range = &self.ranges[operand];
        (!range.is_empty()).then(|| self.weights.slice(range.clone()))
    }

    /// The matrix `[out, input]` of `operand`.
    pub(super) fn matrix(&self, operand: Operand, input: usize) -> Matrix<'a, T> {
        Matrix::new(self.weights.slice(self.ranges[operand].clone()), input)
    }

    /// The product of own experts with their inputs: gate and up.
    pub(super) fn gate_up(&self) -> ExpertProduct<'a, T> {
        self.product(Operand::GateUp, Operand::GateUpBias, [self.hidden, 2 * self.spec.width])
    }

    /// The product of own experts with their activations.
    pub(super) fn down(&self) -> ExpertProduct<'a, T> {
        self.product(Operand::Down, Operand::DownBias, [self.spec.width, self.hidden])
    }

    fn product(&self, weights: Operand, bias: Operand, [input, output]: [usize; 2]) -> ExpertProduct<'a, T> {
        let weights = self.weights.slice(self.own_range(weights));
        ExpertProduct { weights, bias: self.own_values(bias), input, output }
    }

    /// Routes the tokens `x [T, d]`.
    pub(super) fn route(
        &self,
        device: &Device,
        x: View<'_, T>,
        routes: &mut RouteMemory,
        given: Option<GivenSlots<'_>>,
        padding: Option<Padding<'_>>,
    ) -> Result<()> {
        let (router, tokens) = (self.spec.router(), x.len() / self.hidden);
        self.logits(device, Operand::Router, x, routes.logits(router, tokens))?;
        let [bias, correction] =
            [Operand::RouterBias, Operand::RouterCorrection].map(|operand| self.values(operand));
        routes.route(device, router, tokens, RouteInputs { bias, correction, given, padding })
    }

    /// `[T, out]` products of `x [T, d]` with the matrix of `operand`, in f32.
    pub(super) fn logits(
        &self,
        device: &Device,
        operand: Operand,
        x: View<'_, T>,
        out: ViewMut<'_, f32>,
    ) -> Result<()> {
        let weight = self.matrix(operand, self.hidden);
        let out = MatrixMut::new(out, weight.rows());
        device.product(Matrix::new(x, self.hidden), weight.transposed(), out, 1.0, 0.0)
    }
}
