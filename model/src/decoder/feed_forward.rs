//! The feed-forward network of a layer on its normalised input: one gated network, or experts.
//!
//! Invariant: as in `block`: the backward is the exact vector-Jacobian product, and gradients of weights are computed apart, over
//! all tokens in their order. The products of experts run over the tokens that they have, so that the cost is that of the experts
//! in use.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor};
use collective::Collective;

use super::block::{GradientJob, OperandGradients, weight_jobs};
use super::shared_experts::ExpertRows;
use crate::ThreadPool;
use crate::layer::{ExpertActivation, ExpertSpec, Operand, SwigluClamp};
use crate::low_rank::WeightGradient;
use crate::ops::adapters::LinearPass;
use crate::ops::clamped_swiglu::{clamped_swiglu, clamped_swiglu_backward};
use crate::ops::experts::{ExpertRoutes, GivenExperts, add_products, row_products, weigh};
use crate::ops::gated_unit::{GateActivation, GatedUnitReverse, gated_unit, gated_unit_backward};
use crate::ops::linear::{Linear, bias_gradient};
use crate::ops::row_gate::{add_gated, gated_backward};
use crate::ops::{matrix, unwritten, values};
use crate::pass_ranks::failed;

/// The weights.
#[derive(Clone, Debug)]
pub(super) enum FeedForwardWeights {
    Gated(GatedWeights),
    Experts(ExpertWeights),
}

/// A gated network: `down(activation(gate(x)) * up(x))`.
#[derive(Clone, Debug)]
pub(super) struct GatedWeights {
    pub(super) activation: GatedActivation,
    pub(super) gate_up: Linear,
    pub(super) down: Linear,
}

/// The activation of a gated network.
#[derive(Clone, Copy, Debug)]
pub(super) enum GatedActivation {
    /// `silu(gate) * up` or `gelu(gate) * up`
    Unit(GateActivation),
    /// The first with bounded operands.
    Clamped(SwigluClamp),
}

impl From<ExpertActivation> for GatedActivation {
    fn from(activation: ExpertActivation) -> Self {
        match activation {
            ExpertActivation::SwiGlu => Self::Unit(GateActivation::Silu),
            ExpertActivation::Clamped(clamp) => Self::Clamped(clamp),
        }
    }
}

/// A router, and the networks that it chooses from.
#[derive(Clone, Debug)]
pub(super) struct ExpertWeights {
    pub(super) spec: ExpertSpec,
    /// The first of this layer's experts among those of a token in all layers.
    pub(super) first_slot: usize,
    pub(super) router: Linear,
    /// `[E]` added to the scores that choose experts; empty for none.
    pub(super) correction: Vec<f32>,
    pub(super) experts: Vec<GatedWeights>,
    /// The network that every token goes through besides its experts.
    pub(super) shared: Option<Box<GatedWeights>>,
    /// `[1, d]` of the sigmoid that the result of that network is multiplied with; absent without one.
    pub(super) shared_gate: Option<Linear>,
    /// The ranks that share the weights of each expert.
    pub(super) ranks: Option<Arc<dyn Collective>>,
    /// The ranks that divide the experts; the weights of those of others are not read.
    pub(super) divided: Option<Arc<dyn Collective>>,
    /// Chunks of the width of an expert whose products with gradients are summed apart, as leaves of a tree; 1 for one chain.
    pub(super) chunks: usize,
}

/// Activations for the backward.
#[derive(Debug)]
pub(super) enum FeedForwardTrace {
    /// `[T, 2 m]`
    Gated(Tensor),
    /// Boxed: it has the routes.
    Experts(Box<ExpertTrace>),
}

impl FeedForwardTrace {
    /// The routes of the tokens, if the layer has experts.
    pub(super) fn routes(&self) -> Option<&ExpertRoutes> {
        match self {
            Self::Gated(_) => None,
            Self::Experts(trace) => Some(&trace.routes),
        }
    }
}

/// Activations of experts.
#[derive(Debug)]
pub(super) struct ExpertTrace {
    routes: ExpertRoutes,
    /// The rows that the experts of this rank compute.
    rows: ExpertRows,
    /// `[rows, d]` the rows, if others have sent them.
    input: Option<Tensor>,
    /// `[rows, 2 m]` of the rows.
    gate_up: Tensor,
    /// `[T, 2 s]` of the shared network.
    shared: Option<Tensor>,
    /// `[T, 1]` of its gate before the sigmoid, if it has one.
    shared_gate: Option<Tensor>,
}

/// What gradients of weights are computed from.
#[derive(Debug)]
pub(super) struct FeedForwardOperands {
    /// With experts, rows are those of the experts of this rank.
    gated: GatedOperands,
    routed: Option<Box<RoutedOperands>>,
}

/// Those of gated networks.
#[derive(Debug)]
pub(super) struct GatedOperands {
    /// `[rows, d]` normalised input.
    input: Tensor,
    /// `[rows, m]`
    activated: Tensor,
    /// `[rows, 2 m]`
    d_gate_up: Tensor,
    /// `[rows, d]` gradient of the result.
    g: Tensor,
}

/// Those of routes, and of the network beside them.
#[derive(Debug)]
struct RoutedOperands {
    routes: ExpertRoutes,
    rows: ExpertRows,
    /// `[T, E]` gradient of the router's logits.
    d_logits: Tensor,
    shared: Option<GatedOperands>,
    /// `[T, 1]` gradient of the gate of the shared network.
    d_shared_gate: Option<Tensor>,
}

impl FeedForwardOperands {
    /// Those of the shared network, if the layer has one.
    fn shared(&self) -> Option<&GatedOperands> {
        self.routed.as_ref()?.shared.as_ref()
    }

    /// The routes of the tokens, if the layer has experts.
    pub(super) fn routes(&self) -> Option<&ExpertRoutes> {
        self.routed.as_ref().map(|routed| &routed.routes)
    }

    /// Those of the experts of this rank, with their rows, if they are of the tokens of several ranks.
    pub(super) fn received(&self) -> Option<(&GatedOperands, &ExpertRows)> {
        let rows = &self.routed.as_ref()?.rows;
        rows.are_received().then_some((&self.gated, rows))
    }
}

impl FeedForwardWeights {
    /// Memory of the linear layers, bytes.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Gated(gated) => gated.bytes(),
            Self::Experts(ExpertWeights { router, experts, shared, shared_gate, .. }) => {
                let shared = shared.as_deref();
                router.bytes()
                    + shared_gate.as_ref().map_or(0, Linear::bytes)
                    + experts.iter().chain(shared).map(GatedWeights::bytes).sum::<usize>()
            }
        }
    }

    /// Calls `change` for every linear layer.
    pub(super) fn change_linears(&mut self, change: &mut impl FnMut(&mut Linear)) {
        let mut of_network = |network: &mut GatedWeights| {
            change(&mut network.gate_up);
            change(&mut network.down);
        };
        match self {
            Self::Gated(gated) => of_network(gated),
            Self::Experts(ExpertWeights { router, experts, shared, shared_gate, .. }) => {
                experts.iter_mut().chain(shared.as_deref_mut()).for_each(&mut of_network);
                change(router);
                shared_gate.iter_mut().for_each(change);
            }
        }
    }

    /// Makes it the part of one of `ranks` that share its weights.
    pub(super) fn share(&mut self, ranks: &Arc<dyn Collective>) {
        let of_network = |network: &mut GatedWeights, sums| {
            network.gate_up.share(ranks, sums);
            network.down.share(ranks, sums);
        };
        match self {
            Self::Gated(gated) => of_network(gated, true),
            Self::Experts(of) => {
                // Experts compute on several threads, and the results of all of them are summed in one call.
                of.experts.iter_mut().for_each(|expert| of_network(expert, false));
                of.shared.as_deref_mut().into_iter().for_each(|network| of_network(network, true));
                of.chunks /= ranks.world();
                of.ranks = Some(Arc::clone(ranks));
            }
        }
    }

    /// Makes its experts those of one of `ranks` that divide them.
    pub(super) fn divide(&mut self, ranks: &Arc<dyn Collective>) {
        if let Self::Experts(experts) = self {
            experts.divided = Some(Arc::clone(ranks));
        }
    }

    /// Forward up to the activation, of the normalised input `x [T, d]`; its experts may be `given`.
    pub(super) fn begin(
        &self,
        x: &Tensor,
        given: Option<GivenExperts<'_>>,
        on: LinearPass<'_>,
    ) -> Result<FeedForwardTrace> {
        match self {
            Self::Gated(gated) => Ok(FeedForwardTrace::Gated(gated.gate_up.apply(x, on)?)),
            Self::Experts(experts) => experts.begin(x, given, on),
        }
    }

    /// `base [T, d]` plus the result.
    pub(super) fn finish(
        &self,
        base: &Tensor,
        trace: &FeedForwardTrace,
        on: LinearPass<'_>,
    ) -> Result<Tensor> {
        match (self, trace) {
            (Self::Gated(gated), FeedForwardTrace::Gated(gate_up)) => {
                gated.down.add_to(base, &gated.activation.forward(gate_up, on.pool)?, on)
            }
            (Self::Experts(experts), FeedForwardTrace::Experts(trace)) => experts.finish(base, trace, on),
            _ => candle_core::bail!("the activations are of another kind of layer"),
        }
    }

    /// Backward for the gradient `g [T, d]` of the result: the gradient `[T, d]` of `x`, and the operands of weight gradients.
    pub(super) fn backward(
        &self,
        x: &Tensor,
        trace: &FeedForwardTrace,
        g: &Tensor,
    ) -> Result<(Tensor, FeedForwardOperands)> {
        match (self, trace) {
            (Self::Gated(gated), FeedForwardTrace::Gated(gate_up)) => {
                let (d_x, gated) = gated.backward(x, gate_up, g)?;
                Ok((d_x, FeedForwardOperands { gated, routed: None }))
            }
            (Self::Experts(experts), FeedForwardTrace::Experts(trace)) => experts.backward(x, trace, g),
            _ => candle_core::bail!("the activations are of another kind of layer"),
        }
    }
}

impl GatedActivation {
    /// `[T, m]` of `gate_up [T, 2 m]`.
    fn forward(self, gate_up: &Tensor, pool: &ThreadPool) -> Result<Tensor> {
        match self {
            Self::Unit(activation) => gated_unit(gate_up, activation, pool),
            Self::Clamped(clamp) => clamped_swiglu(gate_up, clamp, pool),
        }
    }

    /// Backward for the gradient `g [T, m]`.
    fn backward(self, gate_up: &Tensor, g: Vec<f32>) -> Result<GatedUnitReverse> {
        match self {
            Self::Unit(activation) => gated_unit_backward(gate_up, activation, g),
            Self::Clamped(clamp) => clamped_swiglu_backward(gate_up, clamp, g),
        }
    }
}

impl GatedWeights {
    fn bytes(&self) -> usize {
        self.gate_up.bytes() + self.down.bytes()
    }

    /// Backward for `gate_up [T, 2 m]` and the gradient `g [T, d]` of the result.
    fn backward(&self, x: &Tensor, gate_up: &Tensor, g: &Tensor) -> Result<(Tensor, GatedOperands)> {
        let d_activated = self.down.input_gradient_values(g)?;
        let GatedUnitReverse { activated, d_gate_up } = self.activation.backward(gate_up, d_activated)?;
        let d_x = self.gate_up.input_gradient(&d_gate_up)?;
        Ok((d_x, GatedOperands { input: x.clone(), activated, d_gate_up, g: g.clone() }))
    }
}

impl ExpertWeights {
    fn begin(
        &self,
        x: &Tensor,
        given: Option<GivenExperts<'_>>,
        on: LinearPass<'_>,
    ) -> Result<FeedForwardTrace> {
        let given = given.map(|given| GivenExperts { first: self.first_slot, ..given });
        let routes = ExpertRoutes::new(self.router.apply_values(x, on)?, &self.correction, self.spec, given);
        let width = x.dim(1)?;
        let rows = ExpertRows::new(&routes, self.divided.as_ref())?;
        let input = rows.dispatch(routes.grouped(&values(x)?, width), width)?;
        let adapted = LinearPass { adapters: &routes.grouped_adapters(on.adapters), ..on };
        let gate_up = self.each(&rows, &input, |expert| &expert.gate_up, adapted);
        let gate_up = matrix(gate_up, self.experts[0].gate_up.output())?;
        let input = rows.are_received().then(|| matrix(input, width)).transpose()?;
        let shared = self.shared.as_ref().map(|network| network.gate_up.apply(x, on)).transpose()?;
        let shared_gate = self.shared_gate.as_ref().map(|gate| gate.apply(x, on)).transpose()?;
        Ok(FeedForwardTrace::Experts(Box::new(ExpertTrace {
            routes,
            rows,
            input,
            gate_up,
            shared,
            shared_gate,
        })))
    }

    fn finish(&self, base: &Tensor, trace: &ExpertTrace, on: LinearPass<'_>) -> Result<Tensor> {
        let ExpertTrace { routes, rows, gate_up, shared, shared_gate, .. } = trace;
        let activated = self.activation().forward(gate_up, on.pool)?;
        let adapted = LinearPass { adapters: &routes.grouped_adapters(on.adapters), ..on };
        let mut y = self.each(rows, &values(&activated)?, |expert| &expert.down, adapted);
        self.sum_over_ranks(&mut y)?;
        let width = base.dim(1)?;
        let y = rows.combine(y, width)?;
        let mut out = values(base)?.to_vec();
        routes.add_weighted(&y, &mut out, width);
        let out = matrix(out, width)?;
        match (&self.shared, shared) {
            (Some(network), Some(gate_up)) => {
                let activated = network.activation.forward(gate_up, on.pool)?;
                match shared_gate {
                    None => network.down.add_to(&out, &activated, on),
                    Some(gate) => add_gated(&out, &network.down.apply(&activated, on)?, gate),
                }
            }
            _ => Ok(out),
        }
    }

    fn activation(&self) -> GatedActivation {
        self.spec.activation.into()
    }

    /// Sums partial sums `[n]` over the ranks that share the weights of experts.
    fn sum_over_ranks(&self, partial: &mut [f32]) -> Result<()> {
        self.ranks.as_ref().map_or(Ok(()), |ranks| ranks.all_reduce(partial).map_err(failed))
    }

    /// `[rows, out]` a layer of every expert on its rows of `x [rows, in]`; adapters are those of rows.
    fn each(
        &self,
        rows: &ExpertRows,
        x: &[f32],
        layer: impl Fn(&GatedWeights) -> &Linear + Sync,
        on: LinearPass<'_>,
    ) -> Vec<f32> {
        let output = layer(&self.experts[0]).output();
        let input = x.len().checked_div(rows.len()).unwrap_or(0);
        let mut out = unwritten(rows.len() * output);
        let mut rest = &mut out[..];
        let mut parts = Vec::new();
        for (expert, rows) in rows.runs() {
            let (own, after) = rest.split_at_mut(rows.len() * output);
            rest = after;
            let x = &x[rows.start * input..rows.end * input];
            parts.push((&self.experts[expert], x, on.adapters.get(rows).unwrap_or_default(), own));
        }
        let alone = ThreadPool::single();
        on.pool.map(parts, |(expert, x, adapters, out)| {
            layer(expert).apply_slice(x, out, LinearPass { pool: &alone, adapters });
        });
        out
    }

    fn backward(&self, x: &Tensor, trace: &ExpertTrace, g: &Tensor) -> Result<(Tensor, FeedForwardOperands)> {
        let ExpertTrace { routes, rows, input, gate_up, shared, shared_gate } = trace;
        let (_, width) = x.dims2()?;
        let (inner, activation) = (gate_up.dim(1)? / 2, self.activation());
        // The gradient of an expert's result is that of the token with the weight of the slot. Without the weight it also gives the
        // gradient of the weight: `g . (W a + b) = (W^T g) . a + g . b`.
        let (mut of_rows, weights) =
            rows.dispatch_with(routes.grouped(&values(g)?, width), routes.row_weights(), width)?;
        let mut d_activated = self.each_input_gradient(rows, &of_rows, |expert| &expert.down, inner);
        let activated = values(&activation.forward(gate_up, &ThreadPool::single())?)?.to_vec();
        let mut d_weights = row_products(&d_activated, &activated, inner, self.chunks);
        weigh(&mut d_activated, &weights, inner);
        self.sum_over_ranks(&mut d_weights)?;
        for (expert, rows) in rows.runs() {
            if let Some(bias) = self.experts[expert].down.bias() {
                add_products(&of_rows[rows.start * width..], bias, &mut d_weights[rows]);
            }
        }
        weigh(&mut of_rows, &weights, width);
        let GatedUnitReverse { activated, d_gate_up } = activation.backward(gate_up, d_activated)?;
        let mut d_rows =
            self.each_input_gradient(rows, &values(&d_gate_up)?, |expert| &expert.gate_up, width);
        self.sum_over_ranks(&mut d_rows)?;
        let (d_grouped, d_weights) = rows.combine_with(d_rows, d_weights, width)?;
        let d_logits = matrix(routes.backward(&routes.by_slot(&d_weights)), self.spec.count)?;
        let mut d_x = self.router.input_gradient_values(&d_logits)?;
        routes.add(&d_grouped, &mut d_x, width);
        let mut d_x = matrix(d_x, width)?;
        let (mut of_shared, mut d_shared_gate) = (None, None);
        if let (Some(network), Some(gate_up)) = (&self.shared, shared) {
            let mut d_result = g.clone();
            if let (Some(weights), Some(gate)) = (&self.shared_gate, shared_gate) {
                let alone = ThreadPool::single();
                let result = network.down.apply(&network.activation.forward(gate_up, &alone)?, &alone)?;
                let (of_result, d_gate) = gated_backward(&result, gate, g)?;
                d_x = (d_x + weights.input_gradient(&d_gate)?)?;
                (d_result, d_shared_gate) = (of_result, Some(d_gate));
            }
            let (d_input, operands) = network.backward(x, gate_up, &d_result)?;
            d_x = (d_x + d_input)?;
            of_shared = Some(operands);
        }
        let gated = GatedOperands {
            input: match input {
                Some(received) => received.clone(),
                None => matrix(routes.grouped(&values(x)?, width), width)?,
            },
            activated,
            d_gate_up,
            g: matrix(of_rows, width)?,
        };
        let (routes, rows) = (routes.clone(), rows.clone());
        let routed = RoutedOperands { routes, rows, d_logits, shared: of_shared, d_shared_gate };
        Ok((d_x, FeedForwardOperands { gated, routed: Some(Box::new(routed)) }))
    }

    /// `[rows, input]` gradients of the inputs of a layer of every expert, for the gradients `g [rows, out]` of its results.
    fn each_input_gradient(
        &self,
        rows: &ExpertRows,
        g: &[f32],
        layer: impl Fn(&GatedWeights) -> &Linear,
        input: usize,
    ) -> Vec<f32> {
        let output = layer(&self.experts[0]).output();
        let mut out = unwritten(rows.len() * input);
        for (expert, rows) in rows.runs() {
            let g = &g[rows.start * output..rows.end * output];
            let own = &mut out[rows.start * input..rows.end * input];
            layer(&self.experts[expert]).input_gradient_slice(g, own);
        }
        out
    }
}

/// A piece of a backward: the normalised input `[T, d]` and the operands.
pub(super) trait FeedForwardPiece: Sync {
    fn normed(&self) -> &Tensor;
    fn operands(&self) -> &FeedForwardOperands;
}

impl FeedForwardWeights {
    /// The jobs that add the gradients of the weights; `pieces` are in the order of tokens.
    pub(super) fn gradient_jobs<'a, P: FeedForwardPiece>(
        &self,
        pieces: &'a [P],
        gradients: &mut OperandGradients<'a>,
        pool: &ThreadPool,
    ) -> Vec<GradientJob<'a>> {
        let [gate_up, down] = [Operand::GateUp, Operand::Down].map(|operand| gradients.matrix(operand));
        let mut jobs: Vec<GradientJob<'a>> = Vec::new();
        let Self::Experts(ExpertWeights { experts, divided, .. }) = self else {
            weight_jobs(&mut jobs, pieces, gate_up, |p| Some(p.operands().gated.of_gate_up()), pool);
            weight_jobs(&mut jobs, pieces, down, |p| Some(p.operands().gated.of_down()), pool);
            return jobs;
        };
        // Of all tokens, so the longest: they come first.
        let [shared_gate_up, shared_down, mut router, mut shared_gate] =
            [Operand::SharedGateUp, Operand::SharedDown, Operand::Router, Operand::SharedGate]
                .map(|operand| gradients.matrix(operand));
        let [router_bias, gate_up_bias, down_bias] =
            [Operand::RouterBias, Operand::GateUpBias, Operand::DownBias]
                .map(|operand| gradients.vector(operand));
        weight_jobs(&mut jobs, pieces, shared_gate_up, |p| Some(p.operands().shared()?.of_gate_up()), pool);
        weight_jobs(&mut jobs, pieces, shared_down, |p| Some(p.operands().shared()?.of_down()), pool);
        let routed = move |piece: &'a P| {
            let routed = piece.operands().routed.as_deref();
            routed.map(|routed| (piece, &piece.operands().gated, routed))
        };
        let split =
            |gradient: WeightGradient<'a>, layer: &Linear| gradient.split(experts.len(), layer.output());
        let matrices = split(gate_up, &experts[0].gate_up).into_iter().zip(split(down, &experts[0].down));
        let biases = parts(gate_up_bias, experts.len()).into_iter().zip(parts(down_bias, experts.len()));
        let all = matrices.zip(biases).enumerate().filter(|_| divided.is_none());
        for (expert, ((mut gate_up, mut down), (gate_up_bias, down_bias))) in all {
            jobs.push(Box::new(move || {
                pieces.iter().filter_map(routed).try_for_each(|(_, of, RoutedOperands { routes, .. })| {
                    let rows = routes.of_expert(expert);
                    of.add_gradients([&mut gate_up, &mut down], [gate_up_bias, down_bias], &rows)
                })
            }));
        }
        jobs.push(Box::new(move || {
            pieces.iter().filter_map(routed).try_for_each(|(piece, _, routed)| {
                let RoutedOperands { d_logits, d_shared_gate, .. } = routed;
                let rows = 0..d_logits.dim(0)?;
                router.add(piece.normed(), d_logits, &rows)?;
                if let Some(d_shared_gate) = d_shared_gate {
                    shared_gate.add(piece.normed(), d_shared_gate, &rows)?;
                }
                add_bias_gradient(d_logits, &rows, router_bias)
            })
        }));
        jobs
    }
}

impl GatedOperands {
    /// Input `[rows, d]` and gradient `[rows, 2 m]` of the first product.
    fn of_gate_up(&self) -> (&Tensor, &Tensor) {
        (&self.input, &self.d_gate_up)
    }

    /// Input `[rows, m]` and gradient `[rows, d]` of the second.
    fn of_down(&self) -> (&Tensor, &Tensor) {
        (&self.activated, &self.g)
    }

    /// Adds the gradients of both projections, and of their biases, of some `rows`.
    pub(super) fn add_gradients(
        &self,
        [gate_up, down]: [&mut WeightGradient<'_>; 2],
        [gate_up_bias, down_bias]: [&mut [f32]; 2],
        rows: &Range<usize>,
    ) -> Result<()> {
        gate_up.add(&self.input, &self.d_gate_up, rows)?;
        add_bias_gradient(&self.d_gate_up, rows, gate_up_bias)?;
        down.add(&self.activated, &self.g, rows)?;
        add_bias_gradient(&self.g, rows, down_bias)
    }
}

/// Cuts gradients into `count` equal parts.
pub(super) fn parts(gradients: &mut [f32], count: usize) -> Vec<&mut [f32]> {
    let (each, mut rest) = (gradients.len() / count, gradients);
    let cut = |_| {
        let (part, after) = std::mem::take(&mut rest).split_at_mut(each);
        rest = after;
        part
    };
    (0..count).map(cut).collect()
}

/// Adds the gradient of a bias `[out]`, empty for none, of `rows` of the gradient `g [_, out]` of the result.
fn add_bias_gradient(g: &Tensor, rows: &Range<usize>, gradient: &mut [f32]) -> Result<()> {
    if rows.is_empty() || gradient.is_empty() {
        return Ok(());
    }
    bias_gradient(&g.narrow(0, rows.start, rows.len())?, gradient)
}
