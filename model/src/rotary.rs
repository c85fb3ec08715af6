//! Rotary position embedding as data (RoPE, Su et al. 2021, arXiv 2104.09864): the frequencies of the rotated pairs of a head.
//!
//! Invariant: frequencies are those of transformers, in its order of operations and its rounding.

/// The rotary position embedding of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    /// Base of the wavelengths.
    pub theta: f64,
    /// Share of a head's width that is rotated, above 0 and up to 1: the first values of a head.
    pub share: f64,
    /// Scaling of the frequencies for long contexts.
    pub scaling: RopeScaling,
}

/// Scaling of the rotary frequencies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// None.
    None,
    /// All frequencies by the same factor (Chen et al. 2023, arXiv 2306.15595).
    Linear {
        /// Divides every frequency.
        factor: f64,
    },
    /// Llama 3.1: long wavelengths by the factor, short ones not at all, smooth in between.
    Llama3 {
        /// Divides the low frequencies.
        factor: f64,
        /// Wavelengths above `original_max_position_embeddings / low_freq_factor` are fully stretched.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position_embeddings / high_freq_factor` are left alone.
        high_freq_factor: f64,
        /// Context that the model was pretrained with, tokens.
        original_max_position_embeddings: usize,
    },
    /// YaRN (Peng et al. 2023, arXiv 2309.00071): low frequencies by the factor, high ones not at all, and a linear ramp over
    /// the pairs in between.
    Yarn(Yarn),
}

/// Parameters of YaRN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// Divides the low frequencies.
    pub factor: f64,
    /// Multiplies cosines and sines, and so scores by its square.
    pub attention_factor: f64,
    /// Rotations within the original context from which on a pair is left alone.
    pub beta_fast: f64,
    /// Rotations within the original context up to which a pair is fully stretched.
    pub beta_slow: f64,
    /// Weight of the factor's logarithm in a magnitude whose square multiplies scores too (`mscale_all_dim` of DeepSeek-V3); 0 for
    /// none.
    pub score_weight: f64,
    /// Whether the ends of the ramp are rounded to whole pairs.
    pub truncate: bool,
    /// Context that the model was pretrained with, tokens.
    pub original_max_position_embeddings: usize,
}

impl Rotary {
    /// All of a head, without scaling.
    #[must_use]
    pub fn plain(theta: f64) -> Self {
        Self { theta, share: 1.0, scaling: RopeScaling::None }
    }

    /// Number of values that are rotated in a head of `head_dim` values.
    #[must_use]
    pub fn width(&self, head_dim: usize) -> usize {
        (head_dim as f64 * self.share) as usize
    }

    /// Multiplies cosines and sines.
    #[must_use]
    pub fn amplitude(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn(yarn) => yarn.attention_factor as f32,
            RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } => 1.0,
        }
    }

    /// `[width / 2]` radians per position of each rotated pair of a head of `head_dim` values, scaling applied.
    #[must_use]
    pub fn inv_freq(&self, head_dim: usize) -> Vec<f32> {
        let width = self.width(head_dim);
        let power = |i: usize| libm::powf(self.theta as f32, (2 * i) as f32 / width as f32);
        let plain = (0..width / 2).map(|i| 1.0 / power(i));
        match self.scaling {
            RopeScaling::None => plain.collect(),
            RopeScaling::Linear { factor } => plain.map(|freq| freq / factor as f32).collect(),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let context = original_max_position_embeddings as f64;
                let stretch = |freq: f32| {
                    let turns = context * f64::from(freq) / std::f64::consts::TAU;
                    if turns < low_freq_factor {
                        freq / factor as f32
                    } else if turns > high_freq_factor {
                        freq
                    } else {
                        let smooth =
                            ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)) as f32;
                        (1.0 - smooth) * freq / factor as f32 + smooth * freq
                    }
                };
                plain.map(stretch).collect()
            }
            RopeScaling::Yarn(yarn) => {
                let [low, high] = yarn.ramp(self.theta, width);
                let mix = |(i, freq): (usize, f32)| {
                    let ramp = ((i as f32 - low) / (high - low)).clamp(0.0, 1.0);
                    let kept = 1.0 - ramp;
                    1.0 / (yarn.factor as f32 * power(i)) * (1.0 - kept) + freq * kept
                };
                plain.enumerate().map(mix).collect()
            }
        }
    }
}

impl Yarn {
    /// The pair up to which frequencies are left alone, and the one from which on they are fully stretched.
    fn ramp(&self, theta: f64, width: usize) -> [f32; 2] {
        let context = self.original_max_position_embeddings as f64;
        let pair = |rotations: f64| {
            width as f64 * libm::log(context / (rotations * std::f64::consts::TAU)) / (2.0 * libm::log(theta))
        };
        let (mut low, mut high) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(width.saturating_sub(1) as f64));
        // Two equal ends would divide by zero.
        if low == high {
            high += 0.001;
        }
        [low as f32, high as f32]
    }

    /// The attention factor of a context stretched by `factor`, for a weight of its logarithm.
    #[must_use]
    pub fn magnitude(factor: f64, weight: f64) -> f64 {
        if factor <= 1.0 { 1.0 } else { 0.1 * weight * libm::log(factor) + 1.0 }
    }
}
