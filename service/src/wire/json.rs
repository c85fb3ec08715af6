//! Bodies of requests in JSON, beside those of passes and of sampling.
//!
//! Invariant: a field that is not listed here is refused by its name. Fields that change no result are listed and not read: what
//! a client notes about itself. Numbers and names are checked before the service sees them. A request of a model has its number
//! also where its content is refused.

use std::convert::Infallible;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::{ModelRequest, WireError, refuse};
use crate::data::AdamParameters;
use crate::training::{LoadInto, LoraRequest, NewModel, SampleFrom, SamplerSave, SaveRequest};

/// The only optimizer that the bodies of `optim_step` have parameters for.
const ADAM: &str = "adamw";

/// Reads a body. Nesting is limited by the decoder.
///
/// # Errors
/// What is no JSON of this form; the message names the field and its position.
pub(crate) fn read_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, WireError> {
    serde_json::from_slice(body).map_err(|error| WireError(format!("the body cannot be read: {error}")))
}

/// Model and number of a request, whatever else its body has.
#[derive(Deserialize)]
struct NumberedBody {
    model_id: String,
    seq_id: Option<i64>,
}

/// Reads the body of a request of a model.
///
/// # Errors
/// What is no JSON object with a model and a number.
pub(crate) fn read_request<B: DeserializeOwned, T>(
    body: &[u8],
    into: impl FnOnce(B) -> Result<ModelRequest<T>, WireError>,
) -> Result<ModelRequest<T>, WireError> {
    read_json(body).and_then(into).or_else(|error| refused_request(body, error))
}

/// The request whose content is refused with `error`, or the error if the body has no model or no number.
fn refused_request<T>(body: &[u8], error: WireError) -> Result<ModelRequest<T>, WireError> {
    let Ok(NumberedBody { model_id, seq_id }) = serde_json::from_slice(body) else { return Err(error) };
    match numbered(seq_id) {
        Ok(seq_id) => Ok(ModelRequest { model_id, seq_id, content: Err(error) }),
        Err(_) => Err(error),
    }
}

/// Why a piece of an input that is not text is refused.
pub(super) fn unserved_chunk(kind: &str) -> String {
    format!("chunks of type `{kind}` are not served here, the models read text; send `encoded_text`")
}

/// The tokens of a `ModelInput`, of all of its chunks.
#[derive(Debug)]
pub(super) struct InputTokens(pub(super) Vec<u32>);

impl<'de> Deserialize<'de> for InputTokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Chunks;
        impl<'de> Visitor<'de> for Chunks {
            type Value = Vec<u32>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of chunks")
            }

            /// Chunks are joined one by one, as an empty chunk takes more memory than bytes of the body.
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<u32>, A::Error> {
                let mut tokens = Vec::new();
                while let Some(chunk) = list.next_element::<ChunkBody>()? {
                    match (chunk.kind.as_deref(), chunk.tokens) {
                        (None | Some("encoded_text"), Some(more)) => tokens.extend(more),
                        (Some("encoded_text") | None, None) => return Err(A::Error::missing_field("tokens")),
                        (Some(kind), _) => return Err(A::Error::custom(unserved_chunk(kind))),
                    }
                }
                Ok(tokens)
            }
        }
        struct ChunkList(Vec<u32>);
        impl<'de> Deserialize<'de> for ChunkList {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_seq(Chunks).map(Self)
            }
        }
        struct Input;
        impl<'de> Visitor<'de> for Input {
            type Value = InputTokens;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with `chunks`")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<InputTokens, A::Error> {
                let mut tokens = None;
                while let Some(name) = map.next_key::<String>()? {
                    if name != "chunks" {
                        return Err(A::Error::unknown_field(&name, &["chunks"]));
                    }
                    tokens = Some(map.next_value::<ChunkList>()?.0);
                }
                tokens.map(InputTokens).ok_or_else(|| A::Error::missing_field("chunks"))
            }
        }
        deserializer.deserialize_map(Input)
    }
}

/// A piece of an input. Fields of pieces that are not text are not read: those are refused by their type.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ChunkBody {
    #[serde(rename = "type")]
    kind: Option<String>,
    tokens: Option<Vec<u32>>,
    #[serde(default, rename = "data")]
    _data: IgnoredAny,
    #[serde(default, rename = "dmel")]
    _dmel: IgnoredAny,
    #[serde(default, rename = "format")]
    _format: IgnoredAny,
    #[serde(default, rename = "location")]
    _location: IgnoredAny,
    #[serde(default, rename = "expected_tokens")]
    _expected_tokens: IgnoredAny,
}

/// The number of a request of a model.
pub(super) fn numbered(seq_id: Option<i64>) -> Result<u64, WireError> {
    match seq_id.and_then(|seq_id| u64::try_from(seq_id).ok()).filter(|seq_id| *seq_id > 0) {
        Some(seq_id) => Ok(seq_id),
        None => refuse("`seq_id`: requests of a model are numbered from 1; use the SDK's training client"),
    }
}

/// Body of `create_model`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CreateModelBody {
    session_id: String,
    model_seq_id: u64,
    base_model: String,
    lora_config: Option<LoraBody>,
    optimizer_config: Option<OptimizerBody>,
    #[serde(default, rename = "user_metadata")]
    _user_metadata: IgnoredAny,
    #[serde(default, rename = "type")]
    _type: IgnoredAny,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LoraBody {
    rank: usize,
    seed: Option<i64>,
    #[serde(default = "yes")]
    train_unembed: bool,
    #[serde(default = "yes")]
    train_mlp: bool,
    #[serde(default = "yes")]
    train_attn: bool,
}

fn yes() -> bool {
    true
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OptimizerBody {
    #[serde(rename = "type")]
    kind: String,
    version: Option<u64>,
}

impl CreateModelBody {
    pub(crate) fn into_new(self) -> Result<NewModel, WireError> {
        let lora = match self.lora_config {
            Some(lora) if lora.rank == 0 => return refuse("`lora_config.rank`: the rank is at least 1"),
            lora => lora.map(|lora| LoraRequest {
                rank: lora.rank,
                // Any integer is a seed.
                seed: lora.seed.map(i64::cast_unsigned),
                train_unembed: lora.train_unembed,
                train_mlp: lora.train_mlp,
                train_attn: lora.train_attn,
            }),
        };
        let optimizer = match self.optimizer_config {
            None => ADAM.to_owned(),
            Some(OptimizerBody { kind, version: None | Some(1) }) => kind,
            Some(OptimizerBody { kind, version: Some(version) }) => {
                return refuse(format!(
                    "`optimizer_config.version`: version {version} of {kind} is not served here"
                ));
            }
        };
        Ok(NewModel {
            session_id: self.session_id,
            model_seq_id: self.model_seq_id,
            base_model: self.base_model,
            lora,
            optimizer,
        })
    }
}

/// Body of `optim_step`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OptimStepBody {
    model_id: String,
    seq_id: Option<i64>,
    adam_params: Option<AdamBody>,
    optimizer_params: Option<OtherOptimizer>,
    #[serde(default, rename = "type")]
    _type: IgnoredAny,
}

/// Parameters of another optimizer: only its name is read, as it is refused.
#[derive(Deserialize)]
struct OtherOptimizer {
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AdamBody {
    learning_rate: Option<f64>,
    beta1: Option<f64>,
    beta2: Option<f64>,
    eps: Option<f64>,
    weight_decay: Option<f64>,
    grad_clip_norm: Option<f64>,
}

impl OptimStepBody {
    /// The model, the number of the request, and the hyperparameters.
    ///
    /// # Errors
    /// If the request has no number.
    pub(crate) fn into_step(self) -> Result<ModelRequest<AdamParameters>, WireError> {
        let (model_id, seq_id) = (self.model_id.clone(), numbered(self.seq_id)?);
        Ok(ModelRequest { model_id, seq_id, content: self.parameters() })
    }

    fn parameters(self) -> Result<AdamParameters, WireError> {
        if let Some(OtherOptimizer { kind }) = self.optimizer_params {
            return refuse(format!(
                "`optimizer_params`: the optimizer `{kind}` is not served here; create the model with adamw and send \
                 `adam_params`"
            ));
        }
        let Some(sent) = self.adam_params else {
            return refuse("`adam_params` are missing");
        };
        let usual = AdamParameters::default();
        let number = |name: &str, value: Option<f64>, default: f32| {
            let value = value.map_or(default, |value| value as f32);
            if value.is_finite() && value >= 0.0 {
                return Ok(value);
            }
            refuse(format!("`adam_params.{name}`: {value} is no finite number of at least 0"))
        };
        let rate = |name: &str, value: Option<f64>, default: f32| {
            number(name, value, default).and_then(|value| match value {
                ..1.0 => Ok(value),
                _ => refuse(format!("`adam_params.{name}`: {value} is not below 1")),
            })
        };
        Ok(AdamParameters {
            learning_rate: number("learning_rate", sent.learning_rate, usual.learning_rate)?,
            beta1: rate("beta1", sent.beta1, usual.beta1)?,
            beta2: rate("beta2", sent.beta2, usual.beta2)?,
            eps: number("eps", sent.eps, usual.eps)?,
            weight_decay: number("weight_decay", sent.weight_decay, usual.weight_decay)?,
            grad_clip_norm: number("grad_clip_norm", sent.grad_clip_norm, usual.grad_clip_norm)?,
        })
    }
}

/// Body of `save_weights`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SaveWeightsBody {
    model_id: String,
    path: Option<String>,
    seq_id: Option<i64>,
    ttl_seconds: Option<u64>,
    #[serde(default)]
    overwrite: bool,
    #[serde(default, rename = "user_metadata")]
    _user_metadata: IgnoredAny,
    #[serde(default, rename = "type")]
    _type: IgnoredAny,
}

impl SaveWeightsBody {
    /// The model, the number of the request, and what is saved. A state without a name has that of its number.
    ///
    /// # Errors
    /// If the request has no number.
    pub(crate) fn into_save(self) -> Result<ModelRequest<SaveRequest>, WireError> {
        let seq_id = numbered(self.seq_id)?;
        let name = self.path.unwrap_or_else(|| format!("{seq_id:06}"));
        let save = SaveRequest { name, overwrite: self.overwrite, ttl_s: self.ttl_seconds };
        Ok(ModelRequest { model_id: self.model_id, seq_id, content: Ok(save) })
    }
}

/// Body of `save_weights_for_sampler`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SamplerSaveBody {
    model_id: String,
    path: Option<String>,
    sampling_session_seq_id: Option<u64>,
    kind: Option<String>,
    seq_id: Option<i64>,
    ttl_seconds: Option<u64>,
    #[serde(default, rename = "user_metadata")]
    _user_metadata: IgnoredAny,
    #[serde(default, rename = "type")]
    _type: IgnoredAny,
}

impl SamplerSaveBody {
    /// The model, the number of the request, and what is published.
    ///
    /// # Errors
    /// If the request has no number.
    pub(crate) fn into_save(self) -> Result<ModelRequest<SamplerSave>, WireError> {
        let (model_id, seq_id) = (self.model_id.clone(), numbered(self.seq_id)?);
        Ok(ModelRequest { model_id, seq_id, content: self.save() })
    }

    fn save(self) -> Result<SamplerSave, WireError> {
        let inflight = match self.kind.as_deref() {
            None | Some("snapshot") => false,
            Some("inflight") => true,
            Some(kind) => {
                return refuse(format!("`kind`: `{kind}` is not known; send snapshot or inflight"));
            }
        };
        let ttl_s = self.ttl_seconds;
        let save = self.path.map(|name| SaveRequest { name, overwrite: false, ttl_s });
        Ok(SamplerSave { save, sampling_session_seq_id: self.sampling_session_seq_id, inflight })
    }
}

/// Body of `load_weights`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LoadWeightsBody {
    model_id: Option<String>,
    seq_id: Option<i64>,
    session_id: Option<String>,
    model_seq_id: Option<u64>,
    base_model: Option<String>,
    path: String,
    optimizer: bool,
    optimizer_config: Option<OptimizerBody>,
    weights_access_token: Option<String>,
    #[serde(default, rename = "user_metadata")]
    _user_metadata: IgnoredAny,
    #[serde(default, rename = "type")]
    _type: IgnoredAny,
}

/// What a body of `load_weights` asks for.
#[derive(Debug, PartialEq)]
pub(crate) enum LoadCall {
    /// A load into a model or a new one.
    Load {
        into: LoadInto,
        /// As `tinker://`.
        path: String,
        /// Whether the state of the optimizer is loaded.
        optimizer: bool,
    },
    /// A request of a model that is refused.
    Refused(ModelRequest<Infallible>),
}

/// Reads the JSON of `load_weights`.
///
/// # Errors
/// As [`read_request`]; a load into a new model has no number, and its errors are all here.
pub(crate) fn load_from_json(body: &[u8]) -> Result<LoadCall, WireError> {
    read_json(body)
        .and_then(LoadWeightsBody::into_load)
        .or_else(|error| refused_request(body, error).map(LoadCall::Refused))
}

impl LoadWeightsBody {
    fn into_load(self) -> Result<LoadCall, WireError> {
        if self.weights_access_token.is_some() {
            return refuse("`weights_access_token`: weights of other accounts are not served here");
        }
        if let Some(OptimizerBody { kind, .. }) = self.optimizer_config.filter(|config| config.kind != ADAM) {
            return refuse(format!(
                "`optimizer_config`: the optimizer `{kind}` is not served here; use {ADAM}"
            ));
        }
        let into = match (self.model_id, self.session_id, self.model_seq_id) {
            (Some(model_id), None, None) => LoadInto::Model { model_id, seq_id: numbered(self.seq_id)? },
            (None, Some(session_id), Some(model_seq_id)) => {
                LoadInto::New { session_id, model_seq_id, base_model: self.base_model }
            }
            _ => return refuse("send either `model_id` and `seq_id`, or `session_id` and `model_seq_id`"),
        };
        Ok(LoadCall::Load { into, path: self.path, optimizer: self.optimizer })
    }
}

/// Body of `create_sampling_session`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SamplingSessionBody {
    session_id: String,
    sampling_session_seq_id: u64,
    base_model: Option<String>,
    model_path: Option<String>,
    #[serde(default, rename = "type")]
    _type: IgnoredAny,
}

impl SamplingSessionBody {
    /// The session, the number of the sampling session in it, and what is sampled from. Saved weights know their base model.
    pub(crate) fn into_session(self) -> Result<(String, u64, SampleFrom), WireError> {
        let from = match (self.model_path, self.base_model) {
            (Some(path), _) => SampleFrom::Saved(path),
            (None, Some(base)) => SampleFrom::Base(base),
            (None, None) => return refuse("send a `base_model` or a `model_path`"),
        };
        Ok((self.session_id, self.sampling_session_seq_id, from))
    }
}

/// Body of a request that names a model alone: `get_info`, `unload_model`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ModelBody {
    pub(crate) model_id: String,
    #[serde(default, rename = "type")]
    _type: IgnoredAny,
}

/// Body of `session_heartbeat`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HeartbeatBody {
    pub(crate) session_id: String,
    #[serde(default, rename = "type")]
    _type: IgnoredAny,
}

/// Body of `retrieve_future`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RetrieveBody {
    pub(crate) request_id: String,
    #[serde(default)]
    pub(crate) allow_metadata_only: bool,
    #[serde(default, rename = "model_id")]
    _model_id: IgnoredAny,
}

/// Body of `cancel_future`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RequestBody {
    pub(crate) request_id: String,
}

/// Body of `weights_info`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WeightsInfoBody {
    pub(crate) tinker_path: String,
}
