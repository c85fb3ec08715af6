//! The update of what balances the loads of experts without a loss (Wang et al. 2024, arXiv 2408.15664; DeepSeek-V3, DeepSeek-AI
//! 2024, arXiv 2412.19437):
//!
//! ```text
//! b_e += rate * sign(mean load - load_e)
//! ```
//!
//! A router adds `b` to the scores that choose experts; it has no gradient, and no optimizer updates it.
//!
//! Invariant: loads are numbers of tokens, summed over the leaves of all ranks, so every rank adds the same values, for every
//! number of ranks and every ZeRO stage that has the same micro-batches.

use std::cmp::Ordering;
use std::ops::Range;

use model::{Config, Layout};

use super::{Learner, LearnerConfig, RowLoss};
use crate::TrainerError;
use crate::report::ExpertLoads;

/// What is added to the correction of a layer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RouterStep {
    /// The correction among the flat parameters.
    place: Range<usize>,
    /// `[experts]` what is added.
    of_expert: Vec<f32>,
}

impl LearnerConfig {
    /// Checks that a learner of `model`, or of an adapter of it, can update what balances loads, if it is asked to.
    ///
    /// # Errors
    /// If the model has nothing to update, or it is frozen.
    pub(crate) fn check_routers(&self, model: &Config, adapts: bool) -> Result<(), TrainerError> {
        let rate = self.router_correction_rate;
        let reason = if adapts {
            "all weights under an adapter are frozen, and its files have no place for routers"
        } else if !model.has_router_correction() {
            "the routers of the model have no correction (`e_score_correction_bias`)"
        } else {
            return Ok(());
        };
        if rate == 0.0 { Ok(()) } else { Err(TrainerError::RouterCorrection { rate, reason }) }
    }
}

impl Learner {
    /// Updates what balances the loads of experts after an update of the weights, from the `reports` of the leaves of all ranks. A
    /// gradient of zero made no update.
    pub(super) fn balance<L: RowLoss>(
        &mut self,
        grad_norm: f32,
        reports: &[Vec<L::Report>],
    ) -> Result<(), TrainerError> {
        let rate = self.config.router_correction_rate;
        if rate == 0.0 || grad_norm == 0.0 {
            return Ok(());
        }
        let mut loads = ExpertLoads::default();
        reports.iter().flatten().filter_map(L::loads).for_each(|of_leaf| loads.merge(of_leaf));
        self.ranks_mut().try_for_each(|rank| {
            let first = rank.shard().map_or(0, |shard| shard.layers().start);
            let steps = RouterStep::all(rank.own_layout(), loads.of_layers().skip(first), rate);
            rank.correct(&steps)
        })
    }
}

impl RouterStep {
    /// The steps of the layers of `layout` whose experts had tokens: `[experts]` of each layer in `loads`.
    fn all<'a>(layout: &Layout, loads: impl Iterator<Item = &'a [u64]>, rate: f32) -> Vec<Self> {
        let of_layer = |(index, of_expert): (usize, &[u64])| {
            let place = layout.router_correction(index);
            let (total, count) = (of_expert.iter().sum::<u64>(), of_expert.len() as u64);
            let step = |load: &u64| match (load * count).cmp(&total) {
                Ordering::Less => rate,
                Ordering::Equal => 0.0,
                Ordering::Greater => -rate,
            };
            let is_of_router = count > 0 && place.len() == of_expert.len();
            is_of_router.then(|| Self { place, of_expert: of_expert.iter().map(step).collect() })
        };
        loads.take(layout.layers().len()).enumerate().filter_map(of_layer).collect()
    }

    /// The correction among the flat parameters.
    pub(crate) fn place(&self) -> Range<usize> {
        self.place.clone()
    }

    /// Adds the step to `values [place]`, the flat parameters of the range `place`.
    pub(crate) fn add(&self, place: &Range<usize>, values: &mut [f32]) {
        for (at, step) in self.place.clone().zip(&self.of_expert).filter(|(at, _)| place.contains(at)) {
            values[at - place.start] += step;
        }
    }
}

#[cfg(test)]
mod tests {
    use model::{Architecture, Config, RoutedTokens, Sizes};

    use super::*;

    #[test]
    fn experts_below_the_mean_rise_and_those_above_fall() {
        let sizes = Sizes {
            vocab_size: 20,
            hidden_size: 8,
            intermediate_size: 8,
            num_layers: 2,
            num_heads: 2,
            num_kv_heads: 2,
            max_position_embeddings: 16,
        };
        let layout = Layout::new(&Config::fresh(&sizes).of_family(Architecture::Glm4Moe));
        let mut loads = ExpertLoads::default();
        let tokens = |of_expert: [u64; 4]| RoutedTokens {
            of_expert: of_expert.to_vec(),
            tokens: of_expert.iter().sum::<u64>() / 2,
            ..RoutedTokens::default()
        };
        loads.add(&[RoutedTokens::default(), tokens([1, 4, 2, 1])]);
        let steps = RouterStep::all(&layout, loads.of_layers(), 0.5);
        let place = layout.router_correction(1);
        assert_eq!(steps, [RouterStep { place: place.clone(), of_expert: vec![0.5, -0.5, 0.0, 0.5] }]);
        // A part of the values: the last of the layer before, and the first two experts.
        let mut values = vec![0.0; 3];
        steps[0].add(&(place.start - 1..place.start + 2), &mut values);
        assert_eq!(values, [0.0, 0.5, -0.5]);
    }
}
