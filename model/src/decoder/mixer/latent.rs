//! The projections of multi-head latent attention (MLA, DeepSeek-V2, DeepSeek-AI 2024, arXiv 2405.04434), forward and backward.
//!
//! Invariant: as in `mixer`.

use candle_core::{Result, Tensor};

use super::{MixerOperands, MixerReverse, MixerTrace, Projected};
use crate::ThreadPool;
use crate::decoder::LayerAngles;
use crate::decoder::block::{GradientJob, OperandGradients, weight_jobs};
use crate::layer::{LATENT_EPS, Operand};
use crate::ops::adapters::LinearPass;
use crate::ops::attention::AttentionRule;
use crate::ops::latent::{LatentParts, LatentShape};
use crate::ops::linear::{Linear, bias_gradient};
use crate::ops::norm::{rms_norm, rms_norm_backward, rms_norm_weight_gradient};
use crate::ops::{matrix, values};

/// The weights.
#[derive(Clone, Debug)]
pub(in crate::decoder) struct LatentWeights {
    shape: LatentShape,
    rule: AttentionRule<'static>,
    /// Number of its rotary embedding among `Config::rotaries`.
    pub(in crate::decoder) rotary: Option<usize>,
    /// To the latent of queries; absent if they have none.
    query_latent: Option<NormedLatent>,
    /// To the queries of all heads, from their latent or from the input.
    queries: Linear,
    /// To the latent of keys and values, and behind it what is rotated of the keys.
    key_latent: NormedLatent,
    /// To the keys without position and the values of all heads.
    expand: Linear,
}

/// A projection to a latent, and the weight `[rank]` of its norm.
#[derive(Clone, Debug)]
struct NormedLatent {
    down: Linear,
    norm: Vec<f32>,
}

/// Activations for the backward.
#[derive(Debug)]
pub(in crate::decoder) struct LatentTrace {
    /// `[T, rank]` before its norm.
    query_latent: Option<Tensor>,
    /// `[T, rank]` before its norm.
    key_latent: Tensor,
}

/// What gradients of weights are computed from.
#[derive(Debug)]
pub(in crate::decoder) struct LatentOperands {
    /// With the gradient `[T, rank]` of the result of the projection.
    query_latent: Option<(LatentReverse, Tensor)>,
    /// `[T, rank]` the normalised latent, or `[T, d]` the input of the layer.
    query_input: Tensor,
    d_queries: Tensor,
    key_latent: LatentReverse,
    /// `[T, rank]` the normalised latent.
    key_input: Tensor,
    d_expanded: Tensor,
}

/// Backward of a latent.
#[derive(Debug)]
struct LatentReverse {
    /// `[T, rank]` before its norm.
    latent: Tensor,
    /// `[T, rank]` gradient of the normalised latent.
    d_normed: Tensor,
}

/// A part of a pack: its normalised input, and what its backward gave.
pub(in crate::decoder) trait LatentPiece: Sync {
    /// `[T, d]`
    fn normed(&self) -> &Tensor;
    /// `[T, key_rank + rope]` gradient of the projection to the latent of keys and values.
    fn d_projected(&self) -> &Tensor;
    /// Absent in a layer without latents.
    fn operands(&self) -> Option<&LatentOperands>;
}

impl LatentWeights {
    /// Those of a layer, of its vectors and linear operations, which may have a latent of queries; `rotary` is the number of its embedding.
    pub(in crate::decoder) fn new(
        shape: LatentShape,
        (rule, rotary): (AttentionRule<'static>, Option<usize>),
        has_query_latent: bool,
        vector: impl Fn(Operand) -> Vec<f32>,
        linear: impl Fn(Operand) -> Linear,
    ) -> Self {
        let latent = |down: Operand, norm: Operand| NormedLatent { down: linear(down), norm: vector(norm) };
        let of_queries = || latent(Operand::QueryDown, Operand::QueryLatentNorm);
        Self {
            shape,
            rule,
            rotary,
            query_latent: has_query_latent.then(of_queries),
            queries: linear(Operand::QueryUp),
            key_latent: latent(Operand::KeyDown, Operand::KeyLatentNorm),
            expand: linear(Operand::KeyUp),
        }
    }

    pub(super) fn rule(&self) -> AttentionRule<'_> {
        self.rule
    }

    /// Memory of the linear operations, bytes.
    pub(super) fn bytes(&self) -> usize {
        let of_queries = self.query_latent.as_ref().map_or(0, |latent| latent.down.bytes());
        of_queries + self.queries.bytes() + self.key_latent.down.bytes() + self.expand.bytes()
    }

    /// Calls `change` for every linear layer.
    pub(super) fn change_linears(&mut self, change: &mut impl FnMut(&mut Linear)) {
        let of_queries = self.query_latent.iter_mut().map(|latent| &mut latent.down);
        of_queries.chain([&mut self.queries, &mut self.key_latent.down, &mut self.expand]).for_each(change);
    }

    /// Prepared queries, keys and padded values `[T, width]` of the normalised input `x [T, d]`.
    pub(super) fn project(&self, x: &Tensor, angles: &LayerAngles, on: LinearPass<'_>) -> Result<Projected> {
        let (queries, query_latent) = match &self.query_latent {
            None => (self.queries.apply_values(x, on)?, None),
            Some(NormedLatent { down, norm }) => {
                let latent = down.apply(x, on)?;
                let normed = rms_norm(&latent, norm, LATENT_EPS, on.pool)?;
                (self.queries.apply_values(&normed, on)?, Some(latent))
            }
        };
        let (key_latent, rotary) = self.split(&self.key_latent.down.apply(x, on)?)?;
        let normed = rms_norm(&key_latent, &self.key_latent.norm, LATENT_EPS, on.pool)?;
        let expanded = self.expand.apply_values(&normed, on)?;
        let (parts, angles) = (LatentParts { queries, expanded, rotary }, angles.of(self.rotary));
        let prepared = matrix(self.shape.assemble(&parts, angles, on.pool), self.shape.padded().width())?;
        Ok(Projected {
            raw: None,
            latent: Some(LatentTrace { query_latent, key_latent }),
            prepared,
            gate: None,
        })
    }

    /// Latent `[T, rank]` and rotated part `[T, rope]` of keys.
    fn split(&self, both: &Tensor) -> Result<(Tensor, Vec<f32>)> {
        let (rank, rope) = (self.key_latent.norm.len(), self.shape.rope);
        let both = values(both)?;
        let (mut latent, mut rotary) = (Vec::new(), Vec::new());
        for row in both.chunks_exact(rank + rope) {
            latent.extend_from_slice(&row[..rank]);
            rotary.extend_from_slice(&row[rank..]);
        }
        Ok((matrix(latent, rank)?, rotary))
    }

    /// `[T, heads * value]` of the results `[T, heads * (nope + rope)]` of attention over padded values.
    pub(super) fn narrowed(&self, attended: &Tensor) -> Result<Tensor> {
        matrix(self.shape.narrowed(&values(attended)?), self.shape.heads * self.shape.value)
    }

    /// The gradient of the results of attention for the gradient `g [T, heads * value]` of the narrowed.
    pub(super) fn widened(&self, g: &Tensor) -> Result<Tensor> {
        matrix(self.shape.widened(&values(g)?), self.shape.padded().query_width())
    }

    /// Backward for the gradient `g [T, width]` of what was prepared of the normalised input `x [T, d]`.
    pub(super) fn backward(
        &self,
        x: &Tensor,
        trace: &MixerTrace,
        angles: &LayerAngles,
        g: &[f32],
    ) -> Result<MixerReverse> {
        let Some(trace) = &trace.projected.latent else {
            candle_core::bail!("a layer with latents has none in its trace: the trace is of another layer")
        };
        let alone = ThreadPool::single();
        let LatentShape { heads, nope, rope, value, .. } = self.shape;
        let LatentParts { queries, expanded, rotary } =
            self.shape.assemble_backward(g, angles.of(self.rotary));
        let d_queries = matrix(queries, heads * (nope + rope))?;
        let d_expanded = matrix(expanded, heads * (nope + value))?;
        let d_query_input = self.queries.input_gradient(&d_queries)?;
        let (d_of_queries, query_input, query_latent) = match (&self.query_latent, &trace.query_latent) {
            (Some(NormedLatent { down, norm }), Some(latent)) => {
                let d_down = rms_norm_backward(latent, norm, LATENT_EPS, &d_query_input, None)?;
                let d_x = down.input_gradient(&d_down)?;
                let reverse = LatentReverse { latent: latent.clone(), d_normed: d_query_input };
                (d_x, rms_norm(latent, norm, LATENT_EPS, &alone)?, Some((reverse, d_down)))
            }
            _ => (d_query_input, x.clone(), None),
        };
        let NormedLatent { down, norm } = &self.key_latent;
        let latent = &trace.key_latent;
        let d_normed = self.expand.input_gradient(&d_expanded)?;
        let d_latent = rms_norm_backward(latent, norm, LATENT_EPS, &d_normed, None)?;
        let mut both = Vec::with_capacity(rotary.len() / rope * (norm.len() + rope));
        for (latent, rotary) in values(&d_latent)?.chunks_exact(norm.len()).zip(rotary.chunks_exact(rope)) {
            both.extend_from_slice(latent);
            both.extend_from_slice(rotary);
        }
        let d_projected = matrix(both, norm.len() + rope)?;
        let d_normed_input = (d_of_queries + down.input_gradient(&d_projected)?)?;
        let key_input = rms_norm(latent, norm, LATENT_EPS, &alone)?;
        let key_latent = LatentReverse { latent: latent.clone(), d_normed };
        let operands =
            LatentOperands { query_latent, query_input, d_queries, key_latent, key_input, d_expanded };
        Ok(MixerReverse { d_normed: d_normed_input, d_projected, operands: MixerOperands::Latent(operands) })
    }
}

/// Appends the jobs that add the gradients of the weights, from [`Operand::QueryDown`] to [`Operand::KeyUp`]; `pieces` are in
/// the order of tokens.
pub(in crate::decoder) fn gradient_jobs<'a, P: LatentPiece>(
    jobs: &mut Vec<GradientJob<'a>>,
    pieces: &'a [P],
    gradients: &mut OperandGradients<'a>,
    pool: &ThreadPool,
) {
    let [query_down, queries, key_down, expand] =
        [Operand::QueryDown, Operand::QueryUp, Operand::KeyDown, Operand::KeyUp]
            .map(|operand| gradients.matrix(operand));
    let [query_down_bias, query_norm, key_down_bias, key_norm] =
        [Operand::QueryDownBias, Operand::QueryLatentNorm, Operand::KeyDownBias, Operand::KeyLatentNorm]
            .map(|operand| gradients.vector(operand));
    weight_jobs(
        jobs,
        pieces,
        query_down,
        |p| Some((p.normed(), &p.operands()?.query_latent.as_ref()?.1)),
        pool,
    );
    weight_jobs(jobs, pieces, queries, |p| p.operands().map(|of| (&of.query_input, &of.d_queries)), pool);
    weight_jobs(jobs, pieces, key_down, |p| Some((p.normed(), p.d_projected())), pool);
    weight_jobs(jobs, pieces, expand, |p| p.operands().map(|of| (&of.key_input, &of.d_expanded)), pool);
    jobs.push(Box::new(move || {
        for piece in pieces {
            let Some(of) = piece.operands() else { continue };
            if let Some((latent, d_down)) = &of.query_latent {
                latent.add_vectors(query_norm, d_down, query_down_bias)?;
            }
            of.key_latent.add_vectors(key_norm, piece.d_projected(), key_down_bias)?;
        }
        Ok(())
    }));
}

impl LatentReverse {
    /// Adds the gradients of the norm `[rank]`, and of the bias of the projection for the gradient `d_down` of its result; each is
    /// empty if it is frozen or not there.
    fn add_vectors(&self, norm: &mut [f32], d_down: &Tensor, bias: &mut [f32]) -> Result<()> {
        if !norm.is_empty() {
            rms_norm_weight_gradient(&self.latent, LATENT_EPS, &self.d_normed, norm)?;
        }
        if bias.is_empty() { Ok(()) } else { bias_gradient(d_down, bias) }
    }
}
