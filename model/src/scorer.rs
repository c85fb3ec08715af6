//! Reward models: networks that score a sequence.
//!
//! Invariant: the score of a sequence does not depend on its batch. Our decoder with a value head scores packed sequences
//! without padding and computes a common prompt once. Sequence classifiers of other architectures are those of
//! candle-transformers, and score one sequence at a time.
//!
//! Two of those classifiers give a plain score: DeBERTa-v2/v3 and XLM-RoBERTa. (ModernBERT's ends in a softmax, which is 1 for
//! a single label; candle-transformers has no classifier on other decoders.)

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{debertav2, xlm_roberta};
use serde_json::Value;
use trajectory::Prompt;

use crate::config::families::class_prefixes;
use crate::files;
use crate::resident::{MemoryBudget, ResidentParameters};
use crate::{
    Config, Decoder, Head, ModelDirectory, ModelError, Pack, Quantization, Recompute, SpecialTokens, Target,
    ThreadPool, Tokenizer,
};

/// Classes of reward models that are no decoders.
const ENCODERS: [&str; 2] = ["DebertaV2ForSequenceClassification", "XLMRobertaForSequenceClassification"];

/// A reward model.
pub struct SequenceScorer {
    tokenizer: Tokenizer,
    fingerprint: String,
    network: ScorerNetwork,
}

/// Token ids of a prompt and its completion.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptCompletion {
    /// The prompt; empty where both are encoded as one.
    pub prompt: Vec<u32>,
    /// Its completion, with the token that ends it if it has ended.
    pub completion: Vec<u32>,
}

impl PromptCompletion {
    /// Tokens in all.
    #[must_use]
    pub fn len(&self) -> usize {
        self.prompt.len() + self.completion.len()
    }

    /// Whether there is no token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

enum ScorerNetwork {
    /// Our decoder with a value head: the value after the last token.
    Decoder(Box<DecoderScorer>),
    /// A classifier with one label.
    Classifier(Box<Classifier>),
}

struct DecoderScorer {
    directory: ModelDirectory,
    parameters: ResidentParameters,
    /// The network of weights that stay in memory.
    loaded: Option<Decoder>,
    quantization: Quantization,
}

struct Classifier {
    path: PathBuf,
    network: Encoder,
    max_context: usize,
}

enum Encoder {
    Deberta(Box<debertav2::DebertaV2SeqClassificationModel>),
    Roberta(Box<xlm_roberta::XLMRobertaForSequenceClassification>),
}

impl std::fmt::Debug for SequenceScorer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SequenceScorer").field("tokenizer", &self.tokenizer).finish_non_exhaustive()
    }
}

impl SequenceScorer {
    /// Opens a reward model in Hugging Face layout: a sequence classifier with one label. Its weights stay in memory if
    /// they fit `budget`; classifiers of other architectures always stay.
    ///
    /// # Errors
    /// If a file is missing or broken, or the model is none that gives a sequence one number.
    pub fn open(path: &Path, quantization: Quantization, budget: &MemoryBudget) -> Result<Self, ModelError> {
        let keys = if ModelDirectory::is_file(path) { Value::Null } else { config_json(path)? };
        let class = keys["architectures"][0].as_str().unwrap_or_default().to_owned();
        let (tokenizer, network) = match class.as_str() {
            class if ENCODERS.contains(&class) => {
                let tokenizer = Tokenizer::load(&path.join("tokenizer.json"))?;
                (tokenizer, ScorerNetwork::Classifier(Box::new(Classifier::open(path, class, &keys)?)))
            }
            _ => {
                let directory = ModelDirectory::open(path)?;
                if directory.config().head != Head::Value {
                    return Err(ModelError::Unsupported {
                        path: if ModelDirectory::is_file(path) {
                            path.to_owned()
                        } else {
                            path.join("config.json")
                        },
                        key: "architectures".to_owned(),
                        found: directory.config().architecture.class_name(directory.config().head),
                        supported: format!(
                            "reward models: {}, DebertaV2 and XLMRoberta ForSequenceClassification with one label",
                            class_prefixes()
                        ),
                    });
                }
                let parameters = ResidentParameters::open(path, directory.config(), budget)?;
                let tokenizer = directory.tokenizer().clone();
                let loaded =
                    (!parameters.is_swapped()).then(|| decoder(&parameters, quantization)).transpose()?;
                (
                    tokenizer,
                    ScorerNetwork::Decoder(Box::new(DecoderScorer {
                        directory,
                        parameters,
                        loaded,
                        quantization,
                    })),
                )
            }
        };
        let fingerprint = tokenizer.fingerprint();
        Ok(Self { tokenizer, fingerprint, network })
    }

    /// Checks the `config.json` of a model that gives tokens or scores; its weights need not be there.
    ///
    /// # Errors
    /// If the file cannot be read, or no such model has this `config.json`.
    pub fn check_config(path: &Path) -> Result<(), ModelError> {
        match config_json(path)?["architectures"][0].as_str() {
            Some(class) if ENCODERS.contains(&class) => Ok(()),
            _ => Config::load(path).map(drop),
        }
    }

    /// Whether the tokenizer has this fingerprint, so that token ids can be reused without encoding the text again.
    #[must_use]
    pub fn shares_tokens(&self, fingerprint: &str) -> bool {
        self.reads_tokens_of() == Some(fingerprint)
    }

    /// The fingerprint of the tokenizer whose token ids it accepts; `None` if it accepts texts only.
    #[must_use]
    pub fn reads_tokens_of(&self) -> Option<&str> {
        matches!(self.network, ScorerNetwork::Decoder(_)).then_some(&*self.fingerprint)
    }

    /// Its tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Whether the weights are read for every use.
    #[must_use]
    pub fn is_swapped(&self) -> bool {
        matches!(&self.network, ScorerNetwork::Decoder(scorer) if scorer.parameters.is_swapped())
    }

    /// Longest sequence, tokens.
    #[must_use]
    pub fn max_context(&self) -> usize {
        match &self.network {
            ScorerNetwork::Decoder(scorer) => scorer.directory.config().max_context(),
            ScorerNetwork::Classifier(classifier) => classifier.max_context,
        }
    }

    /// Tokens of a prompt and its completion; `ended` says that the completion was not cut off. Decoders get their own
    /// chat template and the token that ends a turn, classifiers a pair of texts.
    ///
    /// # Errors
    /// If the tokenizer or the template refuses them.
    pub fn encode(
        &self,
        prompt: &Prompt,
        completion: &str,
        ended: bool,
    ) -> Result<PromptCompletion, ModelError> {
        match &self.network {
            ScorerNetwork::Decoder(scorer) => {
                let prompt = scorer.directory.encode_prompt(prompt)?;
                let mut completion = self.tokenizer.encode(completion, SpecialTokens::Omit)?;
                completion.extend(scorer.directory.stop_token_ids().first().filter(|_| ended));
                Ok(PromptCompletion { prompt, completion })
            }
            ScorerNetwork::Classifier(_) => {
                let prompt = match prompt {
                    Prompt::Text(text) => text.clone(),
                    Prompt::Messages(messages) => {
                        messages.iter().map(|m| m.content.as_str()).collect::<Vec<_>>().join("\n")
                    }
                };
                Ok(PromptCompletion {
                    prompt: Vec::new(),
                    completion: self.tokenizer.encode_pair(&prompt, completion)?,
                })
            }
        }
    }

    /// `[n]` scores of `sequences [n]`, each of 1 to [`SequenceScorer::max_context`] tokens. Sequences are packed up to
    /// `batch_tokens` tokens; a longer one is a pack of its own. Weights that are not kept are read once.
    ///
    /// # Errors
    /// If weights cannot be read again, or a token lies beyond the vocabulary.
    pub fn score(
        &self,
        sequences: &[PromptCompletion],
        batch_tokens: usize,
        pool: &ThreadPool,
    ) -> Result<Vec<f32>, ScoreError> {
        let loaded = self.load()?;
        let mut scores = Vec::with_capacity(sequences.len());
        let mut rest = sequences;
        while !rest.is_empty() {
            let mut tokens = 0;
            let fits = |answered: &&PromptCompletion| {
                tokens += answered.len();
                tokens <= batch_tokens
            };
            let (now, later) = rest.split_at(rest.iter().take_while(fits).count().max(1));
            scores.extend(loaded.score(now, pool)?);
            rest = later;
        }
        Ok(scores)
    }

    /// The network with its weights in memory until the result is dropped.
    ///
    /// # Errors
    /// If weights that are swapped in cannot be read again.
    pub fn load(&self) -> Result<LoadedScorer<'_>, ModelError> {
        Ok(match &self.network {
            ScorerNetwork::Decoder(scorer) => match &scorer.loaded {
                Some(decoder) => LoadedScorer::Kept(decoder),
                None => LoadedScorer::Swapped(Box::new(decoder(&scorer.parameters, scorer.quantization)?)),
            },
            ScorerNetwork::Classifier(classifier) => LoadedScorer::Classifier(LoadedClassifier(classifier)),
        })
    }
}

/// A reward model with its weights in memory.
pub enum LoadedScorer<'a> {
    /// They stay in memory.
    Kept(&'a Decoder),
    /// They are freed with this value.
    Swapped(Box<Decoder>),
    /// Of another architecture; they stay in memory.
    Classifier(LoadedClassifier<'a>),
}

/// A classifier of another architecture.
pub struct LoadedClassifier<'a>(&'a Classifier);

impl std::fmt::Debug for LoadedScorer<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoadedScorer").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for LoadedClassifier<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoadedClassifier").finish_non_exhaustive()
    }
}

impl LoadedScorer<'_> {
    /// `[n]` scores of `sequences [n]` as one pack.
    ///
    /// # Errors
    /// If a token lies beyond the vocabulary, or a sequence has none.
    pub fn score(&self, sequences: &[PromptCompletion], pool: &ThreadPool) -> Result<Vec<f32>, ScoreError> {
        match self {
            Self::Kept(decoder) => score_pack(decoder, sequences, pool),
            Self::Swapped(decoder) => score_pack(decoder, sequences, pool),
            Self::Classifier(LoadedClassifier(classifier)) => {
                sequences.iter().map(|answered| Ok(classifier.score(&answered.completion)?)).collect()
            }
        }
    }
}

/// Why sequences could not be scored.
#[derive(Debug, thiserror::Error)]
pub enum ScoreError {
    /// The weights cannot be read again.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The network refused the tokens.
    #[error("the network failed: {0}")]
    Compute(#[from] candle_core::Error),
    /// A sequence has no token.
    #[error("a sequence without tokens cannot be scored")]
    Empty,
}

fn decoder(parameters: &ResidentParameters, quantization: Quantization) -> Result<Decoder, ModelError> {
    let weights = parameters.get()?;
    Ok(match quantization {
        Quantization::None => Decoder::trainable(parameters.config(), &weights, Recompute::Sequence),
        Quantization::Int8 | Quantization::Bf16 => {
            Decoder::sampler(parameters.config(), &weights, quantization)
        }
    })
}

/// Scores sequences as one pack; the prompt of neighbours is computed once, where it is the same.
fn score_pack(
    decoder: &Decoder,
    sequences: &[PromptCompletion],
    pool: &ThreadPool,
) -> Result<Vec<f32>, ScoreError> {
    let mut pack = Pack::new();
    let mut rows = Vec::with_capacity(sequences.len());
    let mut shared: Option<(&[u32], usize)> = None;
    for PromptCompletion { prompt, completion } in sequences {
        let push = |pack: &mut Pack, tokens: &[u32]| pack.push(tokens).map_err(|_| ScoreError::Empty);
        rows.push(match (shared, completion.as_slice()) {
            _ if prompt.is_empty() => {
                shared = None;
                push(&mut pack, completion)? + completion.len() - 1
            }
            (_, []) => {
                shared = None;
                push(&mut pack, prompt)? + prompt.len() - 1
            }
            (known, rest) => {
                let prefix = match known {
                    Some((tokens, prefix)) if tokens == prompt => prefix,
                    _ => push(&mut pack, prompt)?,
                };
                shared = Some((prompt, prefix));
                let start = pack.push_continuation(prefix, rest).map_err(|_| ScoreError::Empty)?;
                start + rest.len() - 1
            }
        });
    }
    // A value head looks at no target.
    let target = Target { token: 0, temperature: 1.0, kept: None };
    let targets = vec![target; rows.len()];
    Ok(decoder.score(&pack, &rows, &targets, pool)?.iter().map(|prediction| prediction.value).collect())
}

impl Classifier {
    fn open(path: &Path, class: &str, keys: &Value) -> Result<Self, ModelError> {
        let file = path.join("config.json");
        let labels = match (&keys["id2label"], &keys["num_labels"]) {
            (Value::Object(labels), _) => labels.len() as u64,
            (_, labels) => labels.as_u64().unwrap_or(2),
        };
        if labels != 1 {
            return Err(ModelError::Unsupported {
                path: file,
                key: "id2label".to_owned(),
                found: format!("{labels} labels"),
                supported: "one label, the score".to_owned(),
            });
        }
        let json =
            |error: serde_json::Error| ModelError::Json { path: file.clone(), reason: error.to_string() };
        let broken = |error: candle_core::Error| ModelError::Json {
            path: path.to_owned(),
            reason: format!("its weights are not those of its config.json: {error}"),
        };
        let weights = crate::weight_files::variables(path)?;
        let builder = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
        let network = if class.starts_with("DebertaV2") {
            let mut config: debertav2::Config = serde_json::from_value(keys.clone()).map_err(json)?;
            // Files of before transformers 4.3 leave out what its classes have as defaults.
            config.pooler_hidden_size.get_or_insert(config.hidden_size);
            config.pooler_dropout.get_or_insert(0.0);
            config.pooler_hidden_act.get_or_insert(debertav2::HiddenAct::Gelu);
            let one = [(0, "LABEL_0".to_owned())].into_iter().collect();
            let load = debertav2::DebertaV2SeqClassificationModel::load;
            Encoder::Deberta(Box::new(load(builder.pp("deberta"), &config, Some(one)).map_err(broken)?))
        } else {
            let mut keys = keys.clone();
            if let Value::Object(keys) = &mut keys {
                // Left out since transformers 5, which knows no other.
                keys.entry("position_embedding_type").or_insert_with(|| "absolute".into());
            }
            let config: xlm_roberta::Config = serde_json::from_value(keys).map_err(json)?;
            let load = xlm_roberta::XLMRobertaForSequenceClassification::new;
            Encoder::Roberta(Box::new(load(1, &config, builder).map_err(broken)?))
        };
        let max = keys["max_position_embeddings"].as_u64().unwrap_or(512) as usize;
        // RoBERTa counts positions from its padding token on.
        let max_context = if matches!(network, Encoder::Roberta(_)) { max.saturating_sub(2) } else { max };
        Ok(Self { path: path.to_owned(), network, max_context })
    }

    fn score(&self, tokens: &[u32]) -> candle_core::Result<f32> {
        if tokens.is_empty() {
            candle_core::bail!("{}: a sequence without tokens cannot be scored", self.path.display());
        }
        let ids = Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)?;
        let logits = match &self.network {
            Encoder::Deberta(network) => network.forward(&ids, None, None)?,
            Encoder::Roberta(network) => {
                let mask = Tensor::ones((1, tokens.len()), DType::F32, &Device::Cpu)?;
                network.forward(&ids, &mask, &ids.zeros_like()?)?
            }
        };
        logits.flatten_all()?.get(0)?.to_scalar::<f32>()
    }
}

fn config_json(path: &Path) -> Result<Value, ModelError> {
    let file = path.join("config.json");
    let bytes = files::read(&file, files::MAX_JSON_BYTES)
        .map_err(|source| ModelError::Read { path: file.clone(), source })?;
    serde_json::from_slice(&bytes).map_err(|error| ModelError::Json { path: file, reason: error.to_string() })
}
