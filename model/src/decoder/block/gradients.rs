//! Gradients of the weights of a block, apart from those of inputs.
//!
//! Invariant: they are sums over all tokens in their order, one range of rows of a weight per thread, so that their bits do not depend
//! on how tokens were shared among threads.

use candle_core::{Result, Tensor};

use super::super::feed_forward::FeedForwardOperands;
use super::super::mixer::{self, MixerVectors};
use super::{BranchReverse, FeedForwardReverse, ReversedAttention, TransformerBlock};
use crate::ThreadPool;
use crate::layer::{LayerRanges, Operand};
use crate::low_rank::{UnitFactors, WeightGradient, carve};
use crate::ops::heads::sum_head_groups;
use crate::ops::linear::{bias_gradient, weight_gradient};
use crate::ops::norm::rms_norm_weight_gradient;
use crate::ops::row_ranges;
use crate::pass_ranks::failed;

/// The computation of one range of weight gradients, independent of the others.
pub(in crate::decoder) type GradientJob<'a> = Box<dyn FnOnce() -> Result<()> + Send + 'a>;

/// The operands of the attention half, in the order of the layout.
const ATTENTION: [Operand; 21] = [
    Operand::AttentionNorm,
    Operand::Qkv,
    Operand::QkvBias,
    Operand::QueryKeyNorm,
    Operand::Sinks,
    Operand::DeltaGates,
    Operand::Convolution,
    Operand::DecayRate,
    Operand::TimeBias,
    Operand::ResultNorm,
    Operand::QueryDown,
    Operand::QueryDownBias,
    Operand::QueryLatentNorm,
    Operand::QueryUp,
    Operand::KeyDown,
    Operand::KeyDownBias,
    Operand::KeyLatentNorm,
    Operand::KeyUp,
    Operand::Output,
    Operand::OutputBias,
    Operand::AttentionAfterNorm,
];

/// The operands of the feed-forward half, in the order of the layout.
const FEED_FORWARD: [Operand; 11] = [
    Operand::FeedForwardNorm,
    Operand::Router,
    Operand::RouterBias,
    Operand::GateUp,
    Operand::GateUpBias,
    Operand::Down,
    Operand::DownBias,
    Operand::SharedGateUp,
    Operand::SharedDown,
    Operand::SharedGate,
    Operand::FeedForwardAfterNorm,
];

/// Gradients of the operands of half a layer.
pub(in crate::decoder) struct OperandGradients<'a>(Vec<(Operand, WeightGradient<'a>)>);

impl<'a> OperandGradients<'a> {
    /// Those of `operands`, in the order of the layout, of the layer's `gradients`, or of its `factors`.
    fn new<const N: usize>(
        operands: [Operand; N],
        ranges: &LayerRanges,
        gradients: &'a mut [f32],
        factors: Option<UnitFactors<'a>>,
    ) -> Self {
        let parts = carve(gradients, operands.map(|operand| &ranges[operand]), factors);
        Self(operands.into_iter().zip(parts).collect())
    }

    /// That of a matrix, which is taken out; empty if the layer does not have it.
    pub(in crate::decoder) fn matrix(&mut self, operand: Operand) -> WeightGradient<'a> {
        let found = self.0.iter().position(|(of, _)| *of == operand);
        found.map_or(WeightGradient::Whole(&mut []), |at| self.0.swap_remove(at).1)
    }

    /// That of a vector, which is taken out; empty if the layer does not have it, or it is frozen.
    pub(in crate::decoder) fn vector(&mut self, operand: Operand) -> &'a mut [f32] {
        self.matrix(operand).vector()
    }
}

impl TransformerBlock {
    /// Adds the weight gradients of the feed-forward half to the layer's `gradients`, or to those of its `factors`; `pieces` are
    /// in the order of tokens.
    pub(in crate::decoder) fn feed_forward_gradients(
        &self,
        pieces: &[FeedForwardReverse],
        gradients: &mut [f32],
        factors: Option<UnitFactors<'_>>,
        pool: &ThreadPool,
    ) -> Result<()> {
        let mut of = OperandGradients::new(FEED_FORWARD, &self.ranges, gradients, factors);
        let [norm, after] =
            [Operand::FeedForwardNorm, Operand::FeedForwardAfterNorm].map(|norm| of.vector(norm));
        let mut jobs = self.feed_forward.gradient_jobs(pieces, &mut of, pool);
        // Only matrices have factors.
        if factors.is_none() {
            jobs.push(Box::new(|| {
                pieces.iter().try_for_each(|p| {
                    p.branch.add_norm_gradient(self.eps, after)?;
                    norm_gradient(&p.middle, self.eps, &p.d_normed, norm)
                })
            }));
        }
        pool.map(jobs, |job| job()).into_iter().collect()
    }

    /// Adds the gradients of the experts of this rank to the layer's `gradients`, if ranks divide the experts; `sections` are those
    /// of this rank, none otherwise.
    pub(in crate::decoder) fn shared_expert_gradients(
        &self,
        sections: &[FeedForwardOperands],
        gradients: &mut [f32],
        pool: &ThreadPool,
    ) -> Result<()> {
        if sections.is_empty() {
            return Ok(());
        }
        let mut of = OperandGradients::new(FEED_FORWARD, &self.ranges, gradients, None);
        let jobs = self.feed_forward.shared_gradient_jobs(sections, &mut of);
        pool.map(jobs, |job| job()).into_iter().collect()
    }

    /// Adds the weight gradients of the attention half to the layer's `gradients`, or to those of its `factors`; `parts` are in
    /// the order of tokens.
    pub(in crate::decoder) fn attention_gradients(
        &self,
        parts: &[ReversedAttention<'_>],
        gradients: &mut [f32],
        factors: Option<UnitFactors<'_>>,
        pool: &ThreadPool,
    ) -> Result<()> {
        let mut of = OperandGradients::new(ATTENTION, &self.ranges, gradients, factors);
        let vectors = [Operand::AttentionNorm, Operand::OutputBias, Operand::AttentionAfterNorm];
        let (of_block, mut of_mixer) = (vectors.map(|vector| of.vector(vector)), MixerVectors::of(&mut of));
        let mut jobs: Vec<GradientJob<'_>> = Vec::new();
        weight_jobs(
            &mut jobs,
            parts,
            of.matrix(Operand::Qkv),
            |part| Some((&part.reverse.normed, &part.reverse.mixer.d_projected)),
            pool,
        );
        weight_jobs(
            &mut jobs,
            parts,
            of.matrix(Operand::DeltaGates),
            |part| Some((&part.reverse.normed, part.reverse.mixer.d_gates()?)),
            pool,
        );
        weight_jobs(
            &mut jobs,
            parts,
            of.matrix(Operand::Output),
            |part| Some((&part.trace.mixer.result, &part.reverse.branch.d_result)),
            pool,
        );
        mixer::gradient_jobs(&mut jobs, parts, &mut of, pool);
        if factors.is_some() {
            return pool.map(jobs, |job| job()).into_iter().collect();
        }
        jobs.push(Box::new(|| self.attention_vector_gradients(parts, of_block, &mut of_mixer)));
        pool.map(jobs, |job| job()).into_iter().collect()
    }

    /// Adds the gradients of the vectors of the attention half: those of the norm, of the bias of the output, of the norm after it, and
    /// of the mixer.
    fn attention_vector_gradients(
        &self,
        parts: &[ReversedAttention<'_>],
        [norm, output_bias, after]: [&mut [f32]; 3],
        vectors: &mut MixerVectors<'_>,
    ) -> Result<()> {
        let (norms, groups) = (self.mixer.head_norms(), self.head_groups);
        // One chain continues from pass to pass.
        let apart = groups != [1; 2] || self.ranks.is_some();
        let mut of_groups = vec![0.0; if apart { norms[0] * groups[0] + norms[1] * groups[1] } else { 0 }];
        for ReversedAttention { trace, reverse: r, angles } in parts {
            norm_gradient(&r.input, self.eps, &r.mixer.d_normed, norm)?;
            r.branch.add_norm_gradient(self.eps, after)?;
            self.mixer.vector_gradients(&trace.mixer, &r.mixer, vectors)?;
            let head_norm = if apart { &mut of_groups } else { &mut *vectors.head_norm };
            self.mixer.head_norm_gradient(&trace.mixer, &r.mixer, angles, groups, head_norm)?;
            if !output_bias.is_empty() {
                bias_gradient(&r.branch.d_result, output_bias)?;
            }
        }
        if apart {
            let mut sums = sum_head_groups(norms, groups, &mut of_groups);
            if let Some(tensor) = self.ranks.as_ref().filter(|_| !sums.is_empty()) {
                // Keys that several ranks have count once. This is the only number that changes no bit of another when it is added.
                if tensor.same_keys.as_ref().is_some_and(|ranks| ranks.rank() > 0) {
                    sums[norms[0]..].fill(-0.0);
                }
                tensor.ranks.all_reduce(&mut sums).map_err(failed)?;
            }
            vectors.head_norm.iter_mut().zip(sums).for_each(|(gradient, sum)| *gradient += sum);
        }
        Ok(())
    }
}

impl BranchReverse {
    /// Adds the gradient of the weight of the result's norm, if it is normalised.
    fn add_norm_gradient(&self, eps: f32, gradient: &mut [f32]) -> Result<()> {
        let Some([result, g]) = &self.normed else { return Ok(()) };
        rms_norm_weight_gradient(result, eps, g, gradient)
    }
}

/// Adds the gradient of the weight of a norm to `gradient`, which is empty if there is no norm.
fn norm_gradient(x: &Tensor, eps: f32, g: &Tensor, gradient: &mut [f32]) -> Result<()> {
    if gradient.is_empty() { Ok(()) } else { rms_norm_weight_gradient(x, eps, g, gradient) }
}

/// The gradient of one weight `[out, in]` over all `pieces`: a job per thread for a range of its rows, or a job for each pair of
/// factors. `operands` gives the input `[T, in]` and the gradient `[T, out]` of a piece, or nothing in a layer without the weight.
pub(in crate::decoder) fn weight_jobs<'a, P: Sync>(
    jobs: &mut Vec<GradientJob<'a>>,
    pieces: &'a [P],
    gradient: WeightGradient<'a>,
    operands: impl Fn(&P) -> Option<(&Tensor, &Tensor)> + Send + Sync + Copy + 'a,
    pool: &ThreadPool,
) {
    let Some(output) = pieces.first().and_then(operands).and_then(|(_, g)| g.dims().last().copied()) else {
        return;
    };
    let mut rest = match gradient {
        WeightGradient::Whole([]) => return,
        WeightGradient::Whole(gradient) => gradient,
        WeightGradient::Factors(all) => {
            for mut factors in all {
                jobs.push(Box::new(move || {
                    pieces.iter().filter_map(operands).try_for_each(|(x, g)| factors.add(x, g))
                }));
            }
            return;
        }
    };
    let input = rest.len() / output;
    for rows in row_ranges(output, pool.threads(), 8) {
        let (own, after) = rest.split_at_mut(rows.len() * input);
        rest = after;
        jobs.push(Box::new(move || {
            pieces.iter().filter_map(operands).try_for_each(|(x, g)| weight_gradient(x, g, rows.clone(), own))
        }));
    }
}
