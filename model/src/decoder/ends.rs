//! The ends of a network: the gradient of the embedding, and the final norm with the heads, forward and backward.

use std::ops::Range;

use candle_core::{Result, Tensor};

use super::pack::PackPart;
use super::{Decoder, GradientSink, gather, logit_factor};
use crate::low_rank::{WeightGradient, carve};
use crate::ops::head::{self, HeadReverse, Prediction, SampleSlopes, SharedHead, Target, TrainedTargets};
use crate::ops::norm::{rms_norm, rms_norm_backward, rms_norm_weight_gradient};
use crate::ops::residual::multiple;
use crate::ops::{matrix, value, values};
use crate::{Head, ThreadPool, Unit};

/// The row of a token `id` among the `own` rows of the embedding, if it is one of these.
fn own_id(id: u32, own: &Range<usize>) -> Option<u32> {
    let id = (id as usize).checked_sub(own.start).filter(|id| *id < own.len())?;
    u32::try_from(id).ok()
}

impl Decoder {
    /// Predictions from the hidden states `[targets, d]` after the final norm.
    pub(super) fn predict(
        &self,
        normed: &Tensor,
        targets: &[Target<'_>],
        pool: &ThreadPool,
    ) -> Result<Vec<Prediction>> {
        let mut predictions = match self.config.head {
            Head::Value | Head::None => vec![Prediction::default(); targets.len()],
            Head::Language | Head::LanguageAndValue => {
                head::predict(normed, self.shared_head(), targets, pool)?
            }
        };
        value::predict(normed, &self.value_head, &mut predictions)?;
        Ok(predictions)
    }

    /// The head, with the ranks that share its vocabulary.
    fn shared_head(&self) -> SharedHead<'_> {
        SharedHead { weight: &self.head, tensor: self.ranks.tensor.as_ref() }
    }

    /// Forward and backward of the final norm and the head for the rows `picked [targets, d]`. Returns their gradient.
    pub(super) fn reverse_head(
        &self,
        picked: &Tensor,
        trained: TrainedTargets<'_>,
        slopes: &mut SampleSlopes<'_>,
        gradients: &mut dyn GradientSink,
        pool: &ThreadPool,
    ) -> Result<Tensor> {
        let TrainedTargets { targets, samples, .. } = trained;
        let normed = rms_norm(picked, &self.final_norm, self.config.rms_norm_eps, pool)?;
        let mut predictions = vec![Prediction::default(); targets.len()];
        value::predict(&normed, &self.value_head, &mut predictions)?;

        let start = self.layout.unit(Unit::Tail).start;
        let in_tail = |range: Range<usize>| range.start - start..range.end - start;
        let HeadReverse { slopes, d_hidden } = match self.config.head {
            Head::Value | Head::None => {
                let slopes = slopes(0..samples.len(), &predictions);
                HeadReverse { slopes, d_hidden: vec![0.0; values(&normed)?.len()] }
            }
            Head::Language | Head::LanguageAndValue => {
                let place = self.layout.head();
                let (unit, place) =
                    if place.start < start { (Unit::Embedding, place) } else { (Unit::Tail, in_tail(place)) };
                let [mut gradient] = carve(gradients.unit(unit), [&place], self.factors_of(unit));
                head::train(
                    &normed,
                    self.shared_head(),
                    trained,
                    &mut predictions,
                    slopes,
                    &mut gradient,
                    pool,
                )?
            }
        };
        let mut d_normed = matrix(d_hidden, self.config.hidden_size)?;
        let factors = self.factors_of(Unit::Tail);
        if let Some(place) = self.layout.value_head() {
            let [gradient] = carve(gradients.unit(Unit::Tail), [&in_tail(place)], factors);
            d_normed = value::backward(&normed, &self.value_head, &slopes, gradient.vector(), d_normed)?;
        }
        let norm = self.layout.spec("model.norm.weight").map_or(start..start, crate::ParameterSpec::range);
        let eps = self.config.rms_norm_eps;
        let [norm_gradient] = carve(gradients.unit(Unit::Tail), [&in_tail(norm)], factors);
        let norm_gradient = norm_gradient.vector();
        if !norm_gradient.is_empty() {
            let d_normed = multiple(&d_normed, logit_factor(&self.config))?;
            rms_norm_weight_gradient(picked, eps, &d_normed, norm_gradient)?;
        }
        gradients.done(Unit::Tail);
        rms_norm_backward(picked, &self.final_norm, eps, &d_normed, None)
    }

    /// Adds the gradient of the embedding `table` for the gradient `d [T, d]` of the embedded tokens of a part.
    pub(super) fn add_embedded(
        &self,
        table: &mut WeightGradient<'_>,
        part: &PackPart<'_>,
        d: &Tensor,
    ) -> Result<()> {
        let d = multiple(d, self.config.embedding_multiplier)?;
        if self.ranks.tensor.is_none() {
            return table.add_embedded(part.token_ids(), &d);
        }
        let own = self.own_tokens();
        let tokens = part.token_ids().iter().enumerate();
        let (rows, ids): (Vec<usize>, Vec<u32>) =
            tokens.filter_map(|(row, id)| Some((row, own_id(*id, &own)?))).unzip();
        table.add_embedded(&ids, &gather(&[&d], &rows)?)
    }
}
