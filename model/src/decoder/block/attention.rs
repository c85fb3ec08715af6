//! The attention half of a block, forward and backward, around the mixing of tokens.
//!
//! Invariant: before and after the mixing a row of any result depends on its own inputs only, so that parts of a pack can be computed
//! apart.

use candle_core::{Result, Tensor};

use super::super::LayerAngles;
use super::super::mixer::{MixingReverse, Projected, ReversedGate};
use super::{AttentionReverse, AttentionTrace, BranchReverse, TransformerBlock};
use crate::ThreadPool;
use crate::ops::adapters::LinearPass;

/// The backward of the attention half up to that of the mixing.
#[derive(Debug)]
pub(in crate::decoder) struct BegunReverse {
    normed: Tensor,
    branch: BranchReverse,
    pub(in crate::decoder) gate: ReversedGate,
}

impl TransformerBlock {
    /// Forward of the attention half on `x [T, d]`; `mix` mixes what the mixer prepared.
    pub(in crate::decoder) fn attention<'a>(
        &self,
        x: &Tensor,
        angles: &LayerAngles,
        mix: impl FnOnce(&Tensor) -> Result<Tensor>,
        on: impl Into<LinearPass<'a>>,
    ) -> Result<AttentionTrace> {
        let on = on.into();
        let projected = self.begin_attention(x, angles, on)?;
        let mixed = mix(&projected.prepared)?;
        self.finish_attention(x, projected, mixed, on)
    }

    /// The projections of `x [T, d]`.
    pub(in crate::decoder) fn begin_attention<'a>(
        &self,
        x: &Tensor,
        angles: &LayerAngles,
        on: impl Into<LinearPass<'a>>,
    ) -> Result<Projected> {
        let on = on.into();
        self.mixer.project(&self.normed(x, &self.attention_norm, on.pool)?, angles, on)
    }

    /// The half for its input `x [T, d]`, after what was prepared of it was mixed to `mixed [T, mixed]`.
    pub(in crate::decoder) fn finish_attention<'a>(
        &self,
        x: &Tensor,
        projected: Projected,
        mixed: Tensor,
        on: impl Into<LinearPass<'a>>,
    ) -> Result<AttentionTrace> {
        let on = on.into();
        let mixer = self.mixer.finish(projected, mixed, on.pool)?;
        let middle = if self.adds_plainly() {
            self.output.add_to(x, &mixer.result, on)?
        } else {
            self.join(x, &self.output.apply(&mixer.result, on)?, &self.attention_after, on.pool)?
        };
        Ok(AttentionTrace { mixer, middle })
    }

    /// Backward of the attention half for the gradient `d_middle [T, d]` of its result. `mix_backward` is the backward of `mix`.
    pub(in crate::decoder) fn attention_backward(
        &self,
        input: &Tensor,
        trace: &AttentionTrace,
        angles: &LayerAngles,
        d_middle: &Tensor,
        mix_backward: impl FnOnce(&Tensor, &Tensor) -> Result<MixingReverse>,
    ) -> Result<AttentionReverse> {
        let begun = self.begin_attention_backward(input, trace, d_middle)?;
        let mixing = mix_backward(trace.prepared(), &begun.gate.d_mixed)?;
        self.finish_attention_backward(input, trace, angles, d_middle, begun, mixing)
    }

    /// The backward up to that of the mixing.
    pub(in crate::decoder) fn begin_attention_backward(
        &self,
        input: &Tensor,
        trace: &AttentionTrace,
        d_middle: &Tensor,
    ) -> Result<BegunReverse> {
        let alone = ThreadPool::single();
        let normed = self.normed(input, &self.attention_norm, &alone)?;
        let again = || self.output.apply(&trace.mixer.result, &alone);
        let branch = self.join_backward(&self.attention_after, d_middle, again)?;
        let d_mixed = self.output.input_gradient(&branch.d_result)?;
        Ok(BegunReverse { normed, branch, gate: self.mixer.begin_backward(&trace.mixer, d_mixed)? })
    }

    /// The rest of the backward.
    pub(in crate::decoder) fn finish_attention_backward(
        &self,
        input: &Tensor,
        trace: &AttentionTrace,
        angles: &LayerAngles,
        d_middle: &Tensor,
        BegunReverse { normed, branch, gate }: BegunReverse,
        mut mixing: MixingReverse,
    ) -> Result<AttentionReverse> {
        if let Some(ranks) = self.ranks.as_ref().and_then(|tensor| tensor.same_keys.as_ref()) {
            self.mixer.sum_keys(&mut mixing, ranks)?;
        }
        let mixer = self.mixer.finish_backward(&normed, &trace.mixer, angles, gate, mixing)?;
        let d_input = self.normed_backward(input, &self.attention_norm, &mixer.d_normed, d_middle)?;
        Ok(AttentionReverse { d_input, input: input.clone(), normed, mixer, branch })
    }
}

impl AttentionTrace {
    /// `[T, width]` what was mixed.
    pub(in crate::decoder) fn prepared(&self) -> &Tensor {
        &self.mixer.projected.prepared
    }
}
