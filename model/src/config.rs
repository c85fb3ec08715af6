//! Model configuration: the part of Hugging Face's `config.json` that determines the network.
//!
//! Invariant: the decoder computes the network of a [`Config`] from [`Config::load`] or [`Config::from_json`] as transformers
//! does, for every sequence up to [`Config::max_context`]. A key with an unsupported meaning is refused by name. The storage
//! type of weights is that of the tensor files; `torch_dtype` and `dtype` are not read.

mod attention;
mod experts;
pub(crate) mod families;
pub(crate) mod keys;
mod latent;
mod read;
mod recurrence;
#[cfg(test)]
pub(crate) mod tests;
pub(crate) mod text;
mod write;

pub use families::Architecture;
pub use read::{MAX_LAYERS, MAX_WEIGHTS};

use self::experts::ExpertRule;
use crate::layer::{AttentionSpec, FeedForward, LatentSpec, LayerSpec};
use crate::rotary::Rotary;

/// The key of [`Reduction`] in `config.json`, which is absent for the default.
pub(crate) const REDUCTION_KEY: &str = "rlrun_reduction";

/// Shape of a decoder-only transformer with grouped-query attention and RMSNorm.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The family of the files.
    pub architecture: Architecture,
    /// The head on the last hidden state.
    pub head: Head,
    /// Rows of the embedding; may exceed the tokenizer's vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the gated network of layers without experts. Experts have a width of their own.
    pub intermediate_size: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of one head, even; `num_heads * head_dim` may differ from `hidden_size`. With latents, that of a query or a key.
    pub head_dim: usize,
    /// Added to the mean square under the root.
    pub rms_norm_eps: f32,
    /// Added to the weights of all norms, which are stored without it: 1 for Gemma, 0 for others.
    pub norm_offset: f32,
    /// Multiplies embedded tokens.
    pub embedding_multiplier: f32,
    /// Divides logits.
    pub logits_scaling: f32,
    /// The head is the embedding, and the files hold no `lm_head.weight`.
    pub tie_word_embeddings: bool,
    /// What each layer computes, from the first to the last; at least one.
    pub layers: Vec<LayerSpec>,
    /// Tokens that the position embedding was made for.
    pub max_position_embeddings: usize,
    /// Tokens that end a completion, ascending, without repeats; may be empty.
    pub eos_token_ids: Vec<u32>,
    /// Token that starts a text, where the model has one.
    pub bos_token_id: Option<u32>,
    /// Token that fills batches elsewhere; rlrun never pads.
    pub pad_token_id: Option<u32>,
    /// Standard deviation of the weights of a fresh model.
    pub initializer_range: f64,
    /// Order of the sums that tensor-parallel ranks would share.
    pub reduction: Reduction,
}

/// Order of the sums over the inner dimension of row-parallel products: the forward of `o_proj` and `down_proj`, and the input
/// gradients of `q_proj`, `k_proj`, `v_proj`, `q_b_proj`, `kv_b_proj`, `gate_proj`, `up_proj` and the head. Part of the numerics,
/// not of the network: both give the same function, rounded differently.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduction {
    /// One chain in ascending order: the fastest.
    #[default]
    Chain,
    /// A balanced binary tree over 16 fixed chunks: the bits of 1, 2, 4, 8 or 16 tensor-parallel ranks.
    Tree,
}

/// The head on the last hidden state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Head {
    /// The next token.
    #[default]
    Language,
    /// The next token, and a value: a policy that is its own critic.
    LanguageAndValue,
    /// A value alone: a critic or a reward model, to others a sequence classifier with one label.
    Value,
    /// None, and no final norm: the layers of a stage of a pipeline ([`ModelShard`](crate::ModelShard)), which are not a whole model.
    None,
}

/// Sizes of a fresh model; see [`Config::fresh`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the gated MLP.
    pub intermediate_size: usize,
    /// Transformer blocks.
    pub num_layers: usize,
    /// Query heads; divides `hidden_size`.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Longest sequence, tokens.
    pub max_position_embeddings: usize,
}

impl Config {
    /// A small Qwen2 with tied embeddings and the special tokens of the character tokenizer (pad 0, bos 1, eos 2).
    #[must_use]
    pub fn fresh(sizes: &Sizes) -> Self {
        Self {
            architecture: Architecture::Qwen2,
            head: Head::Language,
            vocab_size: sizes.vocab_size,
            hidden_size: sizes.hidden_size,
            intermediate_size: sizes.intermediate_size,
            num_heads: sizes.num_heads,
            num_kv_heads: sizes.num_kv_heads,
            head_dim: sizes.hidden_size / sizes.num_heads.max(1),
            rms_norm_eps: 1e-6,
            norm_offset: 0.0,
            embedding_multiplier: 1.0,
            logits_scaling: 1.0,
            tie_word_embeddings: true,
            layers: vec![Architecture::Qwen2.family().layer(false, None); sizes.num_layers],
            max_position_embeddings: sizes.max_position_embeddings,
            eos_token_ids: vec![2],
            bos_token_id: Some(1),
            pad_token_id: Some(0),
            initializer_range: 0.02,
            reduction: Reduction::Chain,
        }
    }

    /// The same sizes in another family; one with experts has four of this width, of which a token has two. One with latents has a
    /// key and a value for every query head, and keys that are wider by their rotated part.
    #[must_use]
    pub fn of_family(self, architecture: Architecture) -> Self {
        let experts = match architecture.family().experts {
            ExpertRule::Never => None,
            ExpertRule::Keys(keys) => Some(keys.fresh(self.intermediate_size)),
        };
        let (family, count) = (architecture.family(), self.num_layers());
        let layer = family.layer(false, experts);
        let rotates = |index: usize| !family.rotary.skips || attention::rotates(index, attention::INTERVAL);
        let rotary = |index| layer.attention.rotary.filter(|_| rotates(index));
        let latent = family.latent.then(|| LatentSpec::fresh(self.hidden_size, self.head_dim));
        let attention = |index| AttentionSpec { rotary: rotary(index), latent, ..layer.attention };
        let of = |index| {
            let layer = LayerSpec { attention: attention(index), ..layer };
            let delta_net = recurrence::fresh(&self, family.recurrence, index);
            delta_net.map_or(layer, |delta_net| recurrence::in_place_of_attention(layer, delta_net))
        };
        Self {
            architecture,
            num_kv_heads: latent.map_or(self.num_kv_heads, |_| self.num_heads),
            head_dim: latent.map_or(self.head_dim, |latent| latent.head_dim()),
            norm_offset: family.norm_offset,
            embedding_multiplier: family.embedding_multiplier(self.hidden_size),
            layers: (0..count).map(of).collect(),
            ..self
        }
    }

    /// The same with `count` experts of which a token has `per_token`, if the family has experts.
    #[must_use]
    pub fn with_experts(self, count: usize, per_token: usize) -> Self {
        self.map_layers(|mut layer| {
            if let FeedForward::Experts(spec) = &mut layer.feed_forward {
                (spec.count, spec.per_token) = (count, per_token);
            }
            layer
        })
    }

    /// The same with every layer changed by `change`.
    #[must_use]
    pub fn map_layers(mut self, change: impl Fn(LayerSpec) -> LayerSpec) -> Self {
        self.layers.iter_mut().for_each(|layer| *layer = change(*layer));
        self
    }

    /// Number of transformer blocks.
    #[must_use]
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// The rotary embeddings of the layers, each once, in the order of the layers.
    #[must_use]
    pub fn rotaries(&self) -> Vec<Rotary> {
        let mut rotaries = Vec::new();
        for rotary in self.layers.iter().filter_map(|layer| layer.attention.rotary) {
            if !rotaries.contains(&rotary) {
                rotaries.push(rotary);
            }
        }
        rotaries
    }

    /// Longest sequence, in tokens, that the model computes as it was trained to.
    #[must_use]
    pub fn max_context(&self) -> usize {
        self.max_position_embeddings
    }

    /// The limit on the length of sequences and its reason, for messages.
    #[must_use]
    pub fn context_limit(&self) -> String {
        format!("{} tokens that the model can see (max_position_embeddings)", self.max_context())
    }
}
