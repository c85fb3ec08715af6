//! What a recurrence needs on a device, where it is not what it needs on the processor.

use device::ops::delta_rule::STATES_BYTES;
use model::Config;

use super::super::{F32, Size, product};

/// `size` of a model of the shape `config`, with the recurrence of a device whose values have `width` bytes.
pub(super) fn with_recurrence(size: Size, config: &Config, width: u64) -> Size {
    let Some(spec) = config.delta_net() else { return size };
    let n = |size: usize| size as u64;
    let (keys, values) = (n(spec.key_heads * spec.key_dim), n(spec.value_heads * spec.value_dim));
    let channels = 2 * keys + values;
    // A backward has the gradients of queries and keys by value head, of values, sums and gates in f32, and no copy of them in the
    // storage of activations.
    let exact = 2 * n(spec.value_heads * spec.key_dim) + values + channels + 6 * n(spec.value_heads);
    let [of_token, _] = config.recurrence_scratch().map(n);
    let activations_per_token = size
        .activations_per_token
        .saturating_sub(product(&[width, of_token]))
        .saturating_add(product(&[F32, exact]))
        .saturating_add(product(&[width, 2 * channels + values]));
    // A step has the memory of attention beside that of the recurrence.
    let [queries, cached] = [config.num_heads, config.num_kv_heads].map(|heads| n(heads * config.head_dim));
    let beside = product(&[width, 4 * queries + 2 * cached + channels + values]);
    let layer_per_token =
        size.layer_per_token.saturating_add(beside).saturating_add(product(&[F32, 2, n(spec.value_heads)]));
    Size { activations_per_token, layer_per_token, recurrence: n(STATES_BYTES), ..size }
}

#[cfg(test)]
mod tests {
    use model::{Architecture, Quantization, Recompute, Sizes};

    use super::*;

    #[test]
    fn gradients_in_f32_and_the_memory_of_attention_are_counted() {
        let sizes = Sizes {
            vocab_size: 10,
            hidden_size: 32,
            intermediate_size: 16,
            num_layers: 4,
            num_heads: 2,
            num_kv_heads: 2,
            max_position_embeddings: 64,
        };
        let dense = Config::fresh(&sizes);
        let of = |config: &Config| {
            let size = Size::of(config, Recompute::None, Quantization::None, 2);
            (size, with_recurrence(size, config, 2))
        };
        let (before, after) = of(&dense);
        assert_eq!(before, after, "no recurrence, no difference");
        let config = dense.of_family(Architecture::Qwen35);
        let spec = config.delta_net().unwrap();
        let (keys, values) =
            ((spec.key_heads * spec.key_dim) as u64, (spec.value_heads * spec.value_dim) as u64);
        let (before, after) = of(&config);
        let heads = spec.value_heads as u64;
        let exact = 2 * heads * spec.key_dim as u64 + 2 * values + 2 * keys + 6 * heads;
        let scratch = 2 * config.recurrence_scratch()[0] as u64;
        let activations = before.activations_per_token - scratch + 4 * exact + 2 * (4 * keys + 3 * values);
        let attention = (4 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim;
        let step = before.layer_per_token + 2 * (attention as u64 + 2 * keys + 2 * values) + 8 * heads;
        let expected = Size {
            activations_per_token: activations,
            layer_per_token: step,
            recurrence: 256 << 20,
            ..before
        };
        assert_eq!(after, expected);
    }
}
