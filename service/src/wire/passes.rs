//! Requests for passes: a `ForwardBackwardRequest` in protobuf, and the JSON of older SDKs.
//!
//! Invariant: both encodings of the same request are read as the same [`PassRequest`].

use std::collections::BTreeMap;
use std::fmt;

use prost::Message as _;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, SeqAccess, Visitor};

use super::json::{InputTokens, numbered, read_request, unserved_chunk};
use super::protobuf::{ChunkKind, DatumMessage, PassMessage, SettingKind, SpanKind};
use super::scan::{check_pass, request_of_pass};
use super::tensors::{ElementBudget, SentTensor, numbers};
use super::{ModelRequest, WireError, refuse};
use crate::data::{Datum, LossSetting, LossValues, PassRequest, SampledSpan};

/// Checks a pass as far as that needs no model.
fn checked(pass: PassRequest) -> Result<PassRequest, WireError> {
    if pass.data.is_empty() {
        return refuse("`data`: a pass needs at least one sequence");
    }
    match &pass.loss[..] {
        "custom" => refuse(
            "`loss_fn`: a custom loss is not run on the server; use forward_backward_custom, which computes it in the \
             client",
        ),
        _ => Ok(pass),
    }
}

/// Reads a `ForwardBackwardRequest`.
///
/// # Errors
/// Bytes that are no message with a model and a number. Unknown fields, tensors that contradict themselves, and what is not served
/// are errors of the content.
pub(crate) fn pass_from_protobuf(body: &[u8]) -> Result<ModelRequest<PassRequest>, WireError> {
    let read = || {
        check_pass(body)?;
        PassMessage::decode(body).map_err(|error| {
            WireError(format!("the body is no protobuf message `ForwardBackwardRequest`: {error}"))
        })
    };
    match read() {
        Ok(message) => {
            let seq_id = numbered(Some(i64::from(message.seq_id)))?;
            let model_id = message.model_id.clone();
            Ok(ModelRequest { model_id, seq_id, content: pass_from_message(message) })
        }
        Err(error) => match request_of_pass(body) {
            Some((model_id, seq_id)) => Ok(ModelRequest { model_id, seq_id, content: Err(error) }),
            None => Err(error),
        },
    }
}

fn pass_from_message(message: PassMessage) -> Result<PassRequest, WireError> {
    let mut settings: BTreeMap<String, LossSetting> = BTreeMap::new();
    for (name, number) in message.loss_fn_config {
        settings.insert(name, LossSetting::Number(number));
    }
    for (name, setting) in message.loss_fn_config_v2 {
        let setting = match setting.value {
            Some(SettingKind::Number(number)) => LossSetting::Number(number),
            Some(SettingKind::Text(text)) => LossSetting::Text(text),
            None => return refuse(format!("`loss_fn_config.{name}` has no value")),
        };
        settings.insert(name, setting);
    }
    let mut budget = ElementBudget::new();
    let mut data = Vec::with_capacity(message.data.len());
    for (index, datum) in message.data.into_iter().enumerate() {
        let datum = datum_from_message(datum, &mut budget);
        data.push(datum.map_err(|error| WireError(format!("`data[{index}]`: {error}")))?);
    }
    let pass = PassRequest { loss: message.loss_fn, settings, data, forward_only: message.forward_only };
    checked(pass)
}

fn datum_from_message(message: DatumMessage, budget: &mut ElementBudget) -> Result<Datum, WireError> {
    let mut tokens = Vec::new();
    for chunk in message.model_input {
        let text = match chunk.kind {
            Some(ChunkKind::EncodedText(text)) => text,
            Some(ChunkKind::Image(_)) => {
                return refuse(format!("`model_input`: {}", unserved_chunk("image")));
            }
            Some(ChunkKind::Dmel(_)) => return refuse(format!("`model_input`: {}", unserved_chunk("dmel"))),
            None => return refuse("`model_input`: a chunk has no content of a known kind"),
        };
        let words = numbers("model_input", &text.tokens, i32::from_le_bytes)?;
        for token in words {
            let Ok(token) = u32::try_from(token) else {
                return refuse(format!("`model_input`: {token} is no token"));
            };
            tokens.push(token);
        }
    }
    let mut inputs = BTreeMap::new();
    for (name, tensor) in message.loss_fn_inputs {
        let tensor = SentTensor::from_message(&name, tensor)?.dense(&name, 0, budget)?;
        inputs.insert(name, tensor);
    }
    // The spans of the targets: those are what the loss is computed of.
    let mut sampled = Vec::new();
    for span in message.loss_fn_input_spans {
        if let Some(SpanKind::Sampled(span)) = span.kind {
            let (Ok(offset), Ok(length)) = (usize::try_from(span.offset), usize::try_from(span.length))
            else {
                return refuse("`loss_fn_input_spans`: a span has a negative offset or length");
            };
            sampled.push(SampledSpan { sequence_id: span.sequence_id, offset, length });
        }
    }
    Ok(Datum { tokens, inputs, sampled })
}

/// Body of `forward_backward` in JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PassBody {
    forward_backward_input: InputBody,
    model_id: String,
    seq_id: Option<i64>,
    #[serde(default, rename = "type")]
    _type: IgnoredAny,
}

/// Body of `forward` in JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ForwardBody {
    forward_input: InputBody,
    model_id: String,
    seq_id: Option<i64>,
    #[serde(default, rename = "type")]
    _type: IgnoredAny,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct InputBody {
    data: Vec<DatumBody>,
    loss_fn: String,
    loss_fn_config: Option<BTreeMap<String, SettingBody>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DatumBody {
    model_input: InputTokens,
    loss_fn_inputs: BTreeMap<String, TensorBody>,
}

/// A tensor in JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TensorBody {
    data: NumbersBody,
    dtype: String,
    shape: Option<Vec<i64>>,
    sparse_crow_indices: Option<Vec<i64>>,
    sparse_col_indices: Option<Vec<i64>>,
}

impl TensorBody {
    pub(super) fn into_sent(self, name: &str) -> Result<SentTensor, WireError> {
        let values = match (&self.dtype[..], self.data) {
            ("float32", NumbersBody::Floats(values)) => {
                LossValues::Float(values.into_iter().map(|value| value as f32).collect())
            }
            ("float32", NumbersBody::Ints(values)) => {
                LossValues::Float(values.into_iter().map(|value| value as f32).collect())
            }
            ("int64", NumbersBody::Ints(values)) => LossValues::Int(values),
            ("int64", NumbersBody::Floats(_)) => {
                return refuse(format!("`{name}`: a tensor of type int64 has numbers with a fraction"));
            }
            (other, _) => {
                return refuse(format!("`{name}`: type `{other}` is not known; send float32 or int64"));
            }
        };
        let csr = match (self.sparse_crow_indices, self.sparse_col_indices) {
            (None, None) => None,
            (Some(rows), Some(columns)) => Some((rows, columns)),
            _ => return refuse(format!("`{name}`: a sparse tensor needs both of its lists of indices")),
        };
        Ok(SentTensor { values, shape: self.shape, csr })
    }
}

/// A list of numbers: integers keep all their bits.
#[derive(Debug, PartialEq)]
enum NumbersBody {
    Ints(Vec<i64>),
    Floats(Vec<f64>),
}

impl<'de> Deserialize<'de> for NumbersBody {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Numbers;
        impl<'de> Visitor<'de> for Numbers {
            type Value = NumbersBody;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a flat list of numbers")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<NumbersBody, A::Error> {
                let mut ints = Vec::new();
                let first = loop {
                    match list.next_element()? {
                        None => return Ok(NumbersBody::Ints(ints)),
                        Some(NumberBody::Int(int)) => ints.push(int),
                        Some(NumberBody::Float(float)) => break float,
                    }
                };
                let mut floats: Vec<f64> = ints.into_iter().map(|int| int as f64).collect();
                floats.push(first);
                while let Some(number) = list.next_element()? {
                    floats.push(match number {
                        NumberBody::Int(int) => int as f64,
                        NumberBody::Float(float) => float,
                    });
                }
                Ok(NumbersBody::Floats(floats))
            }
        }
        deserializer.deserialize_seq(Numbers)
    }
}

enum NumberBody {
    Int(i64),
    Float(f64),
}

impl<'de> Deserialize<'de> for NumberBody {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Number;
        impl Visitor<'_> for Number {
            type Value = NumberBody;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number")
            }

            fn visit_i64<E>(self, value: i64) -> Result<NumberBody, E> {
                Ok(NumberBody::Int(value))
            }

            fn visit_u64<E>(self, value: u64) -> Result<NumberBody, E> {
                Ok(i64::try_from(value).map_or(NumberBody::Float(value as f64), NumberBody::Int))
            }

            fn visit_f64<E>(self, value: f64) -> Result<NumberBody, E> {
                Ok(NumberBody::Float(value))
            }
        }
        deserializer.deserialize_any(Number)
    }
}

/// A setting of a loss in JSON: a number or a text.
struct SettingBody(LossSetting);

impl<'de> Deserialize<'de> for SettingBody {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Setting;
        impl<'de> Visitor<'de> for Setting {
            type Value = SettingBody;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number or a text")
            }

            fn visit_i64<E>(self, value: i64) -> Result<SettingBody, E> {
                Ok(SettingBody(LossSetting::Number(value as f64)))
            }

            fn visit_u64<E>(self, value: u64) -> Result<SettingBody, E> {
                Ok(SettingBody(LossSetting::Number(value as f64)))
            }

            fn visit_f64<E>(self, value: f64) -> Result<SettingBody, E> {
                Ok(SettingBody(LossSetting::Number(value)))
            }

            fn visit_str<E>(self, value: &str) -> Result<SettingBody, E> {
                Ok(SettingBody(LossSetting::Text(value.to_owned())))
            }
        }
        deserializer.deserialize_any(Setting)
    }
}

/// Reads the JSON of `forward_backward`.
///
/// # Errors
/// As [`pass_from_protobuf`].
pub(crate) fn pass_from_json(body: &[u8]) -> Result<ModelRequest<PassRequest>, WireError> {
    read_request(body, |PassBody { forward_backward_input, model_id, seq_id, .. }| {
        let seq_id = numbered(seq_id)?;
        Ok(ModelRequest { model_id, seq_id, content: pass_from_input(forward_backward_input, false) })
    })
}

/// Reads the JSON of `forward`.
///
/// # Errors
/// As [`pass_from_protobuf`].
pub(crate) fn forward_from_json(body: &[u8]) -> Result<ModelRequest<PassRequest>, WireError> {
    read_request(body, |ForwardBody { forward_input, model_id, seq_id, .. }| {
        let seq_id = numbered(seq_id)?;
        Ok(ModelRequest { model_id, seq_id, content: pass_from_input(forward_input, true) })
    })
}

fn pass_from_input(input: InputBody, forward_only: bool) -> Result<PassRequest, WireError> {
    let settings = input.loss_fn_config.unwrap_or_default();
    let settings = settings.into_iter().map(|(name, SettingBody(setting))| (name, setting)).collect();
    let mut budget = ElementBudget::new();
    let mut data = Vec::with_capacity(input.data.len());
    for (index, datum) in input.data.into_iter().enumerate() {
        let datum = datum_from_body(datum, &mut budget);
        data.push(datum.map_err(|error| WireError(format!("`data[{index}]`: {error}")))?);
    }
    let pass = PassRequest { loss: input.loss_fn, settings, data, forward_only };
    checked(pass)
}

fn datum_from_body(body: DatumBody, budget: &mut ElementBudget) -> Result<Datum, WireError> {
    let mut inputs = BTreeMap::new();
    for (name, tensor) in body.loss_fn_inputs {
        let tensor = tensor.into_sent(&name)?.dense(&name, 0, budget)?;
        inputs.insert(name, tensor);
    }
    Ok(Datum { tokens: body.model_input.0, inputs, sampled: Vec::new() })
}
