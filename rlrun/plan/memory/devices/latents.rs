//! What a decode step with latents needs on a device besides the memory of any attention.

use model::{Config, LatentSpec};

use super::super::{Size, product};

/// `size` of a model of the shape `config`, with the latents of a device whose values have `width` bytes.
pub(super) fn with_latents(size: Size, config: &Config, width: u64) -> Size {
    let Some(LatentSpec { query_rank, key_rank, nope, rope, value, .. }) = config.latent() else {
        return size;
    };
    // A latent, normalised, and the parts of queries, keys and values. Latents before their norms are counted for any device.
    let latents = query_rank.unwrap_or(0).max(key_rank) + key_rank;
    let of_head = (nope + rope) + (nope + value) + value;
    let values = (latents + config.num_heads * of_head) as u64;
    Size { layer_per_token: size.layer_per_token.saturating_add(product(&[width, values])), ..size }
}

#[cfg(test)]
mod tests {
    use model::{Architecture, Quantization, Recompute, Sizes};

    use super::*;

    #[test]
    fn steps_have_the_parts_of_heads() {
        let sizes = Sizes {
            vocab_size: 10,
            hidden_size: 32,
            intermediate_size: 16,
            num_layers: 2,
            num_heads: 2,
            num_kv_heads: 2,
            max_position_embeddings: 64,
        };
        let dense = Config::fresh(&sizes);
        let of = |config: &Config| {
            let size = Size::of(config, Recompute::None, Quantization::None, 2);
            (size, with_latents(size, config, 2))
        };
        let (before, after) = of(&dense);
        assert_eq!(before, after, "no latents, no difference");
        // Heads of 16 values: latents of 16 and 8, a rotated part of 8.
        let (before, after) = of(&dense.of_family(Architecture::DeepseekV3));
        let values = 16 + 8 + 2 * ((16 + 8) + (16 + 16) + 16);
        assert_eq!(after, Size { layer_per_token: before.layer_per_token + 2 * values, ..before });
    }
}
