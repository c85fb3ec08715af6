//! The feed-forward network of a layer on its normalised input: one gated network, or experts.
//!
//! Invariant: as in `block`: the backward is the exact vector-Jacobian product, and gradients of weights are computed apart, over
//! all tokens in their order. The products of experts run over the tokens that they have, so that the cost is that of the experts
//! in use.

use std::ops::Range;

use candle_core::{Result, Tensor};

use super::block::{GradientJob, weight_jobs};
use crate::ThreadPool;
use crate::layer::ExpertSpec;
use crate::ops::experts::ExpertRoutes;
use crate::ops::geglu::{geglu, geglu_backward};
use crate::ops::linear::{Linear, weight_gradient};
use crate::ops::swiglu::{SwigluReverse, swiglu, swiglu_backward};
use crate::ops::{matrix, unwritten, values};

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

/// What the gate goes through.
#[derive(Clone, Copy, Debug)]
pub(super) enum GatedActivation {
    Silu,
    Gelu,
}

/// A router, and the networks that it chooses from.
#[derive(Clone, Debug)]
pub(super) struct ExpertWeights {
    pub(super) spec: ExpertSpec,
    pub(super) router: Linear,
    pub(super) experts: Vec<GatedWeights>,
}

/// Activations for the backward.
#[derive(Debug)]
pub(super) enum FeedForwardTrace {
    /// `[T, 2 m]`
    Gated(Tensor),
    /// The routes, and `[rows, 2 m]` of the grouped rows.
    Experts(Box<ExpertRoutes>, Tensor),
}

/// What gradients of weights are computed from. With experts, rows are the grouped ones.
#[derive(Debug)]
pub(super) struct FeedForwardOperands {
    /// `[rows, d]` normalised input.
    input: Tensor,
    /// `[rows, m]`
    activated: Tensor,
    /// `[rows, 2 m]`
    d_gate_up: Tensor,
    /// `[rows, d]` gradient of the result.
    g: Tensor,
    /// The routes, and the gradient `[T, E]` of the router's logits.
    routed: Option<(Box<ExpertRoutes>, Tensor)>,
}

impl FeedForwardWeights {
    /// Memory of the linear layers, bytes.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Gated(gated) => gated.bytes(),
            Self::Experts(ExpertWeights { router, experts, .. }) => {
                router.bytes() + experts.iter().map(GatedWeights::bytes).sum::<usize>()
            }
        }
    }

    /// Forward up to the activation, of the normalised input `x [T, d]`.
    pub(super) fn begin(&self, x: &Tensor, pool: &ThreadPool) -> Result<FeedForwardTrace> {
        match self {
            Self::Gated(gated) => Ok(FeedForwardTrace::Gated(gated.gate_up.apply(x, pool)?)),
            Self::Experts(experts) => experts.begin(x, pool),
        }
    }

    /// `base [T, d]` plus the result.
    pub(super) fn finish(
        &self,
        base: &Tensor,
        trace: &FeedForwardTrace,
        pool: &ThreadPool,
    ) -> Result<Tensor> {
        match (self, trace) {
            (Self::Gated(gated), FeedForwardTrace::Gated(gate_up)) => {
                gated.down.add_to(base, &gated.activation.forward(gate_up, pool)?, pool)
            }
            (Self::Experts(experts), FeedForwardTrace::Experts(routes, gate_up)) => {
                experts.finish(base, routes, gate_up, pool)
            }
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
                let d_activated = gated.down.input_gradient_values(g)?;
                let SwigluReverse { activated, d_gate_up } =
                    gated.activation.backward(gate_up, d_activated)?;
                let d_x = gated.gate_up.input_gradient(&d_gate_up)?;
                let (input, g) = (x.clone(), g.clone());
                Ok((d_x, FeedForwardOperands { input, activated, d_gate_up, g, routed: None }))
            }
            (Self::Experts(experts), FeedForwardTrace::Experts(routes, gate_up)) => {
                experts.backward(x, routes, gate_up, g)
            }
            _ => candle_core::bail!("the activations are of another kind of layer"),
        }
    }
}

impl GatedActivation {
    fn forward(self, gate_up: &Tensor, pool: &ThreadPool) -> Result<Tensor> {
        match self {
            Self::Silu => swiglu(gate_up, pool),
            Self::Gelu => geglu(gate_up, pool),
        }
    }

    fn backward(self, gate_up: &Tensor, g: Vec<f32>) -> Result<SwigluReverse> {
        match self {
            Self::Silu => swiglu_backward(gate_up, g),
            Self::Gelu => geglu_backward(gate_up, g),
        }
    }
}

impl GatedWeights {
    fn bytes(&self) -> usize {
        self.gate_up.bytes() + self.down.bytes()
    }
}

impl ExpertWeights {
    fn begin(&self, x: &Tensor, pool: &ThreadPool) -> Result<FeedForwardTrace> {
        let routes = ExpertRoutes::new(self.router.apply_values(x, pool)?, self.spec);
        let width = x.dim(1)?;
        let grouped = routes.grouped(&values(x)?, width);
        let gate_up = self.each(&routes, &grouped, |expert| &expert.gate_up, pool);
        let gate_up = matrix(gate_up, self.experts[0].gate_up.output())?;
        Ok(FeedForwardTrace::Experts(Box::new(routes), gate_up))
    }

    fn finish(
        &self,
        base: &Tensor,
        routes: &ExpertRoutes,
        gate_up: &Tensor,
        pool: &ThreadPool,
    ) -> Result<Tensor> {
        let activated = swiglu(gate_up, pool)?;
        let y = self.each(routes, &values(&activated)?, |expert| &expert.down, pool);
        let width = base.dim(1)?;
        let mut out = values(base)?.to_vec();
        routes.add_weighted(&y, &mut out, width);
        matrix(out, width)
    }

    /// `[rows, out]` a layer of every expert on its rows of `x [rows, in]`.
    fn each(
        &self,
        routes: &ExpertRoutes,
        x: &[f32],
        layer: impl Fn(&GatedWeights) -> &Linear + Sync,
        pool: &ThreadPool,
    ) -> Vec<f32> {
        let output = layer(&self.experts[0]).output();
        let input = x.len().checked_div(routes.len()).unwrap_or(0);
        let mut out = unwritten(routes.len() * output);
        let mut rest = &mut out[..];
        let mut parts = Vec::new();
        for (expert, rows) in routes.busy() {
            let (own, after) = rest.split_at_mut(rows.len() * output);
            rest = after;
            parts.push((&self.experts[expert], &x[rows.start * input..rows.end * input], own));
        }
        let alone = ThreadPool::single();
        pool.map(parts, |(expert, x, out)| layer(expert).apply_slice(x, out, &alone));
        out
    }

    fn backward(
        &self,
        x: &Tensor,
        routes: &ExpertRoutes,
        gate_up: &Tensor,
        g: &Tensor,
    ) -> Result<(Tensor, FeedForwardOperands)> {
        let (_, width) = x.dims2()?;
        let inner = gate_up.dim(1)? / 2;
        let g = values(g)?;
        // The gradient of an expert's result is that of the token with the weight of the slot. Without the weight it also gives the
        // gradient of the weight: `g . (W a) = (W^T g) . a`.
        let mut d_activated =
            self.each_input_gradient(routes, &routes.grouped(&g, width), |expert| &expert.down, inner);
        let activated = values(&swiglu(gate_up, &ThreadPool::single())?)?.to_vec();
        let d_weights = routes.weigh(&mut d_activated, &activated, inner);
        let SwigluReverse { activated, d_gate_up } = swiglu_backward(gate_up, d_activated)?;
        let d_grouped =
            self.each_input_gradient(routes, &values(&d_gate_up)?, |expert| &expert.gate_up, width);
        let d_logits = matrix(routes.backward(&d_weights), self.spec.count)?;
        let mut d_x = self.router.input_gradient_values(&d_logits)?;
        routes.add(&d_grouped, &mut d_x, width);
        let operands = FeedForwardOperands {
            input: matrix(routes.grouped(&values(x)?, width), width)?,
            activated,
            d_gate_up,
            g: matrix(routes.weighted(&g, width), width)?,
            routed: Some((Box::new(routes.clone()), d_logits)),
        };
        Ok((matrix(d_x, width)?, operands))
    }

    /// `[rows, input]` gradients of the inputs of a layer of every expert, for the gradients `g [rows, out]` of its results.
    fn each_input_gradient(
        &self,
        routes: &ExpertRoutes,
        g: &[f32],
        layer: impl Fn(&GatedWeights) -> &Linear,
        input: usize,
    ) -> Vec<f32> {
        let output = layer(&self.experts[0]).output();
        let mut out = unwritten(routes.len() * input);
        for (expert, rows) in routes.busy() {
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

/// Gradients of the weights, as parts of those of a layer; `router` is empty without experts.
pub(super) struct FeedForwardGradients<'a> {
    pub(super) router: &'a mut [f32],
    pub(super) gate_up: &'a mut [f32],
    pub(super) down: &'a mut [f32],
}

impl FeedForwardWeights {
    /// The jobs that add the gradients of the weights; `pieces` are in the order of tokens.
    pub(super) fn gradient_jobs<'a, P: FeedForwardPiece>(
        &self,
        pieces: &'a [P],
        gradients: FeedForwardGradients<'a>,
        pool: &ThreadPool,
    ) -> Vec<GradientJob<'a>> {
        let FeedForwardGradients { router, gate_up, down } = gradients;
        let mut jobs: Vec<GradientJob<'a>> = Vec::new();
        let Self::Experts(ExpertWeights { experts, .. }) = self else {
            weight_jobs(&mut jobs, pieces, gate_up, |p| (&p.operands().input, &p.operands().d_gate_up), pool);
            weight_jobs(&mut jobs, pieces, down, |p| (&p.operands().activated, &p.operands().g), pool);
            return jobs;
        };
        let routed = |piece: &'a P| piece.operands().routed.as_ref().map(|routed| (piece, routed));
        let (of_gate_up, of_down) = (gate_up.len() / experts.len(), down.len() / experts.len());
        let each = gate_up.chunks_exact_mut(of_gate_up).zip(down.chunks_exact_mut(of_down));
        for (expert, (gate_up, down)) in each.enumerate() {
            jobs.push(Box::new(move || {
                pieces.iter().filter_map(routed).try_for_each(|(piece, (routes, _))| {
                    let (rows, of) = (routes.of_expert(expert), piece.operands());
                    add_gradient(&of.input, &of.d_gate_up, &rows, gate_up)?;
                    add_gradient(&of.activated, &of.g, &rows, down)
                })
            }));
        }
        jobs.push(Box::new(move || {
            pieces.iter().filter_map(routed).try_for_each(|(piece, (_, d_logits))| {
                add_gradient(piece.normed(), d_logits, &(0..d_logits.dim(0)?), router)
            })
        }));
        jobs
    }
}

/// Adds the gradient of a weight `[out, in]`, of `rows` of the input `x [_, in]` and of the gradient `g [_, out]` of the result.
fn add_gradient(x: &Tensor, g: &Tensor, rows: &Range<usize>, gradient: &mut [f32]) -> Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let (x, g) = (x.narrow(0, rows.start, rows.len())?, g.narrow(0, rows.start, rows.len())?);
    weight_gradient(&x, &g, 0..g.dim(1)?, gradient)
}
