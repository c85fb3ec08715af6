//! What is trained on, what is sampled, and what comes out of both, in no protocol's form.

use std::collections::BTreeMap;

/// One sequence to train on, of `N` positions. Position `i` predicts target `i` from the tokens up to `i`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Datum {
    /// `[N]` input tokens.
    pub tokens: Vec<u32>,
    /// Inputs of the loss by name: `target_tokens`, `weights`, `advantages`, `logprobs` and options per token.
    pub inputs: BTreeMap<String, LossTensor>,
    /// The sampled sequences that its tokens come from, as far as the client says so.
    pub sampled: Vec<SampledSpan>,
}

/// An input of a loss, dense, in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub struct LossTensor {
    /// Its numbers.
    pub values: LossValues,
    /// Its shape.
    pub shape: Vec<usize>,
}

impl Datum {
    /// A sequence of `tokens [N]` with inputs of the loss by name.
    pub fn new<'a>(tokens: Vec<u32>, inputs: impl IntoIterator<Item = (&'a str, LossTensor)>) -> Self {
        let inputs = inputs.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect();
        Self { tokens, inputs, sampled: Vec::new() }
    }
}

impl LossTensor {
    /// Token ids `[N]`.
    #[must_use]
    pub fn tokens(ids: &[u32]) -> Self {
        Self {
            values: LossValues::Int(ids.iter().map(|id| i64::from(*id)).collect()),
            shape: vec![ids.len()],
        }
    }

    /// Numbers `[N]`.
    #[must_use]
    pub fn floats(values: Vec<f32>) -> Self {
        Self { shape: vec![values.len()], values: LossValues::Float(values) }
    }
}

/// Numbers of a [`LossTensor`].
#[derive(Clone, Debug, PartialEq)]
pub enum LossValues {
    /// In f32.
    Float(Vec<f32>),
    /// In i64.
    Int(Vec<i64>),
}

/// Tokens of a datum that were sampled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SampledSpan {
    /// The sequence, as the service named it.
    pub sequence_id: String,
    /// Its first token of the span.
    pub offset: usize,
    /// Tokens.
    pub length: usize,
}

/// A setting of a loss.
#[derive(Clone, Debug, PartialEq)]
pub enum LossSetting {
    /// A number.
    Number(f64),
    /// A text.
    Text(String),
}

/// A forward pass over data, and a backward pass whose gradients are added to those before.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PassRequest {
    /// Name of the loss.
    pub loss: String,
    /// Its settings by name.
    pub settings: BTreeMap<String, LossSetting>,
    /// The sequences.
    pub data: Vec<Datum>,
    /// Whether there is no backward pass.
    pub forward_only: bool,
}

/// What a pass computed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PassOutput {
    /// Of each datum its outputs by name: `logprobs [N]`, nats.
    pub outputs: Vec<BTreeMap<String, Vec<f32>>>,
    /// Metrics by `name:reduction`.
    pub metrics: BTreeMap<String, f64>,
}

/// Hyperparameters of one update by AdamW.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamParameters {
    /// Learning rate.
    pub learning_rate: f32,
    /// Decay rate of the first moment.
    pub beta1: f32,
    /// Decay rate of the second moment.
    pub beta2: f32,
    /// Added to the square root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f32,
    /// Gradients are scaled down to this norm; 0 for no limit.
    pub grad_clip_norm: f32,
}

impl Default for AdamParameters {
    /// The defaults of tinker's clients.
    fn default() -> Self {
        Self {
            learning_rate: 1e-4,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-12,
            weight_decay: 0.0,
            grad_clip_norm: 0.0,
        }
    }
}

/// What ends a completion beside its length.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum StopForm {
    /// The stop tokens of the model.
    #[default]
    Model,
    /// One of these strings, and the stop tokens of the model.
    Strings(Vec<String>),
    /// One of these tokens alone; nothing if there are none.
    Tokens(Vec<u32>),
}

/// Completions that are wanted of a prompt of `P` tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingRequest {
    /// `[P]`
    pub prompt: Vec<u32>,
    /// Number of completions, at least 1.
    pub samples: usize,
    /// Longest completion, tokens; `None` for what the context leaves.
    pub max_tokens: Option<usize>,
    /// Seed of the completions; `None` for one of the service.
    pub seed: Option<u64>,
    /// What ends them.
    pub stop: StopForm,
    /// Temperature; 0 for the most likely token.
    pub temperature: f32,
    /// Number of most likely tokens that are drawn from; `None` for all.
    pub top_k: Option<usize>,
    /// Probability of the most likely tokens that are drawn from; 1 for all.
    pub top_p: f32,
    /// Most likely tokens that are reported for each sampled one.
    pub alternatives: usize,
    /// Whether log-probabilities of the prompt are wanted.
    pub prompt_logprobs: bool,
    /// Most likely tokens that are reported at each position of the prompt.
    pub prompt_alternatives: usize,
    /// Only so many of the last positions of the prompt are scored; `None` for all.
    pub prompt_last: Option<usize>,
    /// `[P - 1][K]` tokens whose log-probabilities are wanted at the positions after the first; negative for none.
    pub prompt_targets: Option<(Vec<i64>, usize)>,
}

impl SamplingRequest {
    /// `samples` completions of `prompt [P]` of at most `max_tokens` tokens, at temperature 1.
    #[must_use]
    pub fn new(prompt: Vec<u32>, samples: usize, max_tokens: usize) -> Self {
        Self {
            prompt,
            samples,
            max_tokens: Some(max_tokens),
            seed: None,
            stop: StopForm::Model,
            temperature: 1.0,
            top_k: None,
            top_p: 1.0,
            alternatives: 0,
            prompt_logprobs: false,
            prompt_alternatives: 0,
            prompt_last: None,
            prompt_targets: None,
        }
    }
}

/// A token and its log-probability, nats.
pub type ScoredToken = (u32, f32);

/// One completion of `C` tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SampledTokens {
    /// Whether a stop rule ended it; otherwise its length did.
    pub stopped: bool,
    /// `[C]`
    pub tokens: Vec<u32>,
    /// `[C]` nats, of the distribution that they were drawn from.
    pub logprobs: Vec<f32>,
    /// `[C]` the most likely tokens; empty if none were asked for.
    pub alternatives: Vec<Vec<ScoredToken>>,
}

/// What was sampled of a [`SamplingRequest`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingOutput {
    /// The completions.
    pub sequences: Vec<SampledTokens>,
    /// `[P]` nats; NaN at the first position and where none was computed. `None` if not asked for.
    pub prompt_logprobs: Option<Vec<f32>>,
    /// `[P]` the most likely tokens; empty at the first position and where none were computed. `None` if not asked for.
    pub prompt_alternatives: Option<Vec<Vec<ScoredToken>>>,
    /// `[P - 1][K]` as [`SamplingRequest::prompt_targets`]; 0 where none was asked for.
    pub prompt_targets: Option<(Vec<f32>, usize)>,
    /// Prompt tokens whose keys and values were in the cache.
    pub cached_tokens: usize,
    /// The version of the weights that sampled the last token; 0 if none was sampled.
    pub version: u64,
}
