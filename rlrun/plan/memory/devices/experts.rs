//! What experts need on a device, where it is not what they need on the processor.
//!
//! A device reads the rows of experts where the tokens have them: only the results of experts, or the gradients of their inputs, have a
//! copy for every expert of a token. Its routes stay there until the backward.

use model::{Config, Recompute};

use super::super::{F32, Size, product};

/// `size` of a model of the shape `config`, with the experts of a device whose values have `width` bytes.
pub(super) fn with_experts(size: Size, config: &Config, recompute: Recompute, width: u64) -> Size {
    let Some(spec) = config.experts() else { return size };
    let n = |size: usize| size as u64;
    let (hidden, slots) = (n(config.hidden_size), n(config.expert_slots()));
    let rows = product(&[n(spec.per_token), hidden]);
    // Scores; weights and their gradients, experts, and the lists of rows and slots.
    let routes = product(&[F32, n(spec.count).saturating_add(6 * n(spec.per_token))]);
    let kept = if recompute == Recompute::None { n(config.num_layers()) } else { 1 };
    let copies = product(&[2, width, rows]);
    let given = product(&[size_of::<u16>() as u64, slots]);
    let activations_per_token = size
        .activations_per_token
        .saturating_sub(copies)
        .saturating_add(product(&[routes, kept]))
        .saturating_add(given);
    // A step has the memory of experts and that of other networks side by side, and remembers the experts of every layer.
    let activated = n(spec.per_token) * n(spec.width) + n(spec.shared_width);
    let gated = if spec.shared_gate { hidden + F32 } else { 0 };
    let all_have = config.layers.iter().all(|layer| layer.feed_forward.experts().is_some());
    let others = if all_have { 0 } else { 2 * n(config.intermediate_size) };
    let values = rows.saturating_add(activated).saturating_add(gated).saturating_add(others);
    let layer_per_token = size
        .layer_per_token
        .saturating_add(product(&[width, values]))
        .saturating_add(routes)
        .saturating_add(product(&[F32, slots]));
    Size { activations_per_token, layer_per_token, ..size }
}

#[cfg(test)]
mod tests {
    use model::{Architecture, Quantization};

    use super::*;
    use crate::plan::tests::SIZES;

    #[test]
    fn rows_of_experts_and_routes_are_counted() {
        let dense = Config::fresh(&SIZES);
        let of = |config: &Config, recompute| {
            let size = Size::of(config, recompute, Quantization::None, 2);
            (size, with_experts(size, config, recompute, 2))
        };
        let (before, after) = of(&dense, Recompute::None);
        assert_eq!(before, after, "no experts, no difference");
        let config = dense.of_family(Architecture::Qwen3Moe);
        let spec = config.experts().unwrap();
        let (k, m) = (spec.per_token as u64, spec.width as u64);
        let routes = 4 * (spec.count as u64 + 6 * k);
        for (recompute, layers) in [(Recompute::None, 2), (Recompute::Block, 1)] {
            let (before, after) = of(&config, recompute);
            let added = layers * routes + 2 * 2 * k;
            assert_eq!(after.activations_per_token, before.activations_per_token - 2 * 2 * k * 8 + added);
            let step = 2 * (k * 8 + k * m) + routes + 4 * 2 * k;
            assert_eq!(after.layer_per_token, before.layer_per_token + step);
        }
    }
}
