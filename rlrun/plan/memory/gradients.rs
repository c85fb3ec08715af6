//! The memory of gradients: of the micro-batch in its backward pass, of the tree over leaves, and between ranks.

use model::{Layout, ParameterSpec};
use trainer::lora::{LoraConfig, TargetModule};
use trainer::microbatch::MicrobatchControl;
use trainer::plan::sum_buffers;

use super::super::BatchPlan;
use super::{F32, product};
use crate::recipe::Recipe;

/// Numbers of values whose gradients are formed.
#[derive(Clone, Copy, Debug)]
pub(super) struct TrainedValues {
    /// Of the whole model.
    all: u64,
    /// Of the largest layer.
    layer: u64,
    /// Of embedding and tail.
    ends: u64,
}

impl TrainedValues {
    /// All weights of a `layout`.
    fn weights(layout: &Layout) -> Self {
        let layer = layout.layers().iter().map(std::ops::Range::len).max().unwrap_or(0);
        let ends = layout.len() - layout.layers().iter().map(std::ops::Range::len).sum::<usize>();
        Self { all: layout.len() as u64, layer: layer as u64, ends: ends as u64 }
    }

    /// The factors of an adapter of a model of this `layout`.
    fn factors(lora: &LoraConfig, layout: &Layout) -> Self {
        let sum = |specs: &[ParameterSpec]| {
            let (shapes, _) = lora.shapes(specs);
            shapes.iter().map(|spec| spec.len() as u64).fold(0, u64::saturating_add)
        };
        let within = |layer: &std::ops::Range<usize>| {
            let inside = layout.specs().iter().filter(|spec| layer.contains(&spec.offset));
            sum(&inside.cloned().collect::<Vec<_>>())
        };
        let all = sum(layout.specs());
        let layers: Vec<u64> = layout.layers().iter().map(within).collect();
        let ends = all - layers.iter().copied().fold(0, u64::saturating_add).min(all);
        Self { all, layer: layers.into_iter().max().unwrap_or(0), ends }
    }

    /// Bytes of both ends of the model and of some layers.
    fn units(self, layers: u64) -> u64 {
        product(&[F32, self.ends.saturating_add(layers.saturating_mul(self.layer))])
    }
}

/// Largest number of gradients of experts that a device forms to project them on an adapter: those of one operand of a layer.
fn projected(lora: &LoraConfig, layout: &Layout) -> u64 {
    let of = |layer: &std::ops::Range<usize>, projections: &[TargetModule]| {
        if !projections.iter().any(|projection| lora.target_modules.contains(projection)) {
            return 0;
        }
        let is_formed = |spec: &&ParameterSpec| {
            let module = TargetModule::of_weight(&spec.name);
            layer.contains(&spec.offset)
                && spec.name.contains(".experts.")
                && module.is_some_and(|module| projections.contains(&module))
        };
        layout.specs().iter().filter(is_formed).map(|spec| spec.len() as u64).sum()
    };
    let operands = [&[TargetModule::GateProj, TargetModule::UpProj][..], &[TargetModule::DownProj]];
    let of_layer = |layer| operands.map(|projections| of(layer, projections)).into_iter().max();
    layout.layers().iter().filter_map(of_layer).max().unwrap_or(0)
}

/// Bytes of the gradients of all ranks of a trainer of this `layout`; with an adapter, of its factors. A device forms those of
/// experts whole, one operand at a time.
pub(super) fn bytes(recipe: &Recipe, layout: &Layout, lora: Option<&LoraConfig>) -> u64 {
    // Ranks with different shards have the gradients of one model together; each has layers on their way.
    let parallel = recipe.trainer.parallel.config();
    let (models, zero) = ((recipe.trainer.world / parallel.shards().max(1)) as u64, recipe.trainer.zero);
    let world = models * parallel.pipeline.max(1) as u64;
    let on_device = recipe.devices().trains();
    let weights = TrainedValues::weights(layout);
    let trained = lora.map_or(weights, |lora| TrainedValues::factors(lora, layout));
    let all = product(&[F32, trained.all]);
    let scratch = match lora {
        Some(lora) if on_device => product(&[F32, world, projected(lora, layout)]),
        _ => 0,
    };
    let leaves = recipe.learner().step_leaves();
    let sections = parallel.context.sections() / parallel.context.degree.max(1);
    let slots = leaves / parallel.data(recipe.trainer.world).max(1) * sections;
    let least = match recipe.trainer.adapt_microbatch {
        true => MicrobatchControl::least(recipe.trainer.microbatch_tokens),
        false => recipe.trainer.microbatch_tokens,
    };
    let several = BatchPlan::of(recipe).max_tokens.div_ceil(leaves.max(1) as u64) > least as u64;
    let chained = several && zero >= 2;
    let sums = product(&[all, sum_buffers(slots, if chained { 2 } else { 1 }) as u64]);
    if world == 1 {
        if on_device {
            return all.saturating_add(scratch);
        }
        let current = if slots == 1 && !chained {
            // The first leaf of two is written where it is summed.
            0
        } else if several && zero < 2 {
            all
        } else {
            trained.units(1)
        };
        return sums.saturating_add(current);
    }
    if zero >= 2 {
        // The layers whose gradients are being reduced, wait, and are being computed.
        let units = product(&[world, trained.units(3)]);
        return sums.saturating_add(units).saturating_add(scratch);
    }
    let waiting = product(&[all, u64::from(slots.max(1).ilog2())]);
    all.saturating_add(product(&[models, all.saturating_add(waiting)])).saturating_add(scratch)
}

/// Bytes of the weights of both ends of the model and of some layers.
pub(super) fn units(layout: &Layout, layers: u64) -> u64 {
    TrainedValues::weights(layout).units(layers)
}

#[cfg(test)]
mod tests {
    use device::device::DeviceLocation;
    use model::{Config, ExpertActivation, ExpertSpec, FeedForward, LayerSpec, RouterKind};

    use super::*;
    use crate::plan::tests::{SIZES, recipe};
    use crate::recipe::words::DeviceWord;

    fn config() -> Config {
        Config::fresh(&SIZES)
    }

    fn layout() -> Layout {
        Layout::new(&config())
    }

    #[test]
    fn more_leaves_of_a_rank_take_a_buffer_for_each_doubling() {
        let layout = layout();
        let all = 4 * layout.len() as u64;
        let of = |world, leaves, zero, microbatch_tokens| {
            let mut recipe = recipe();
            (recipe.trainer.world, recipe.trainer.leaves) = (world, leaves);
            (recipe.trainer.zero, recipe.trainer.microbatch_tokens) = (zero, microbatch_tokens);
            bytes(&recipe, &layout, None)
        };
        let (one, many) = (100_000, 100);
        assert_eq!([of(1, 1, 1, one), of(1, 1, 1, many)], [all, all]);
        assert_eq!([of(1, 4, 1, one), of(1, 4, 1, many)], [2 * all + units(&layout, 1), 3 * all]);
        assert_eq!(of(1, 4, 2, many), 3 * all + units(&layout, 1));
        assert_eq!([of(2, 4, 1, many), of(4, 4, 1, many)], [all + 2 * 2 * all, all + 4 * all]);
    }

    #[test]
    fn an_adapter_has_gradients_of_its_factors_alone() {
        let layout = layout();
        let target_modules = vec![TargetModule::QProj, TargetModule::DownProj];
        let lora = LoraConfig { rank: 2, alpha: 2.0, target_modules };
        let mut recipe = recipe();
        recipe.trainer.leaves = 1;
        let layer = 4 * 2 * ((8 + 8) + (16 + 8));
        assert_eq!(bytes(&recipe, &layout, Some(&lora)), 2 * layer);
        (recipe.trainer.world, recipe.trainer.zero) = (2, 2);
        recipe.trainer.microbatch_tokens = 100_000;
        assert_eq!(bytes(&recipe, &layout, Some(&lora)), 2 * layer + 2 * 3 * layer);
    }

    #[test]
    fn a_device_forms_those_of_factors_and_of_one_operand_of_experts() {
        let spec = ExpertSpec {
            count: 4,
            per_token: 2,
            width: 16,
            router: RouterKind::Softmax { normalized: true },
            shared_width: 0,
            shared_gate: false,
            bias: false,
            fused_files: false,
            activation: ExpertActivation::SwiGlu,
        };
        let layer = |layer| LayerSpec { feed_forward: FeedForward::Experts(spec), ..layer };
        let with_experts = Layout::new(&config().map_layers(layer));
        let mut recipe = recipe();
        recipe.placement.device = DeviceWord::At(DeviceLocation::Cuda(0));
        let of = |layout: &Layout, target_modules: &[TargetModule]| {
            let lora = LoraConfig { rank: 2, alpha: 2.0, target_modules: target_modules.to_vec() };
            bytes(&recipe, layout, Some(&lora))
        };
        let (query, down, up) = (TargetModule::QProj, TargetModule::DownProj, TargetModule::UpProj);
        let factors = 4 * 2 * 2 * (8 + 8);
        assert_eq!([of(&layout(), &[query]), of(&with_experts, &[query])], [factors; 2]);
        let (expert, formed) = (4 * 2 * 2 * 4 * (16 + 8), 4 * 4 * 16 * 8);
        assert_eq!(of(&with_experts, &[query, down]), factors + expert + formed);
        assert_eq!(of(&with_experts, &[query, up]), factors + expert + 2 * formed);
    }
}
