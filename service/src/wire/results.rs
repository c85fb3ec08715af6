//! What requests ended in: protobuf for passes and completions where the client accepts it, JSON otherwise.
//!
//! Invariant: both encodings have the same numbers. A metric that is not finite is sent as it is.

use std::collections::BTreeSet;

use serde_json::json;

use super::numbers::JsonText;
use super::protobuf::{
    self, BatchedMessage, ElementType, PassOutputMessage, RecordMessage, SampleMessage, SequenceMessage,
    TensorLayout, TensorMessage, TopkMessage,
};
use crate::data::{PassOutput, SampledTokens, SamplingOutput, ScoredToken};
use crate::outcome::{FailedRequest, FailureCategory, RequestOutcome, WaitState};

/// Name of the records that outputs of sequences are in.
const RECORD: &str = "ArrayRecord";
/// What the SDK reads as a cell without a token.
const NO_TOKEN: ScoredToken = (0, -99_999.0);

/// How a result is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResultEncoding {
    Json,
    Protobuf,
}

/// A body of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ResultBody {
    pub(crate) media_type: &'static str,
    pub(crate) bytes: Vec<u8>,
}

impl ResultBody {
    fn json(bytes: Vec<u8>) -> Self {
        Self { media_type: "application/json", bytes }
    }

    fn value(value: &serde_json::Value) -> Self {
        Self::json(value.to_string().into_bytes())
    }

    fn protobuf(message: &impl prost::Message) -> Self {
        Self { media_type: protobuf::MEDIA_TYPE, bytes: message.encode_to_vec() }
    }
}

/// The result of a request. Only passes and completions have a form in protobuf.
pub(crate) fn encode_outcome(outcome: &RequestOutcome, encoding: ResultEncoding) -> ResultBody {
    match outcome {
        RequestOutcome::Passed(output) if encoding == ResultEncoding::Protobuf => {
            ResultBody::protobuf(&pass_message(output))
        }
        RequestOutcome::Sampled(output) if encoding == ResultEncoding::Protobuf => {
            ResultBody::protobuf(&sample_message(output))
        }
        RequestOutcome::Passed(output) => ResultBody::json(pass_text(output).into_bytes()),
        RequestOutcome::Sampled(output) => ResultBody::json(sample_text(output).into_bytes()),
        RequestOutcome::Stepped { metrics } => {
            let mut text = JsonText::default();
            text.raw("{\"metrics\":").metrics(metrics).raw("}");
            ResultBody::json(text.into_bytes())
        }
        RequestOutcome::ModelCreated { model_id } => {
            ResultBody::value(&json!({"model_id": model_id, "type": "create_model"}))
        }
        RequestOutcome::WeightsSaved { path } => {
            ResultBody::value(&json!({"path": path, "type": "save_weights"}))
        }
        RequestOutcome::WeightsLoaded { path, model_id } => {
            ResultBody::value(&json!({"path": path, "model_id": model_id, "type": "load_weights"}))
        }
        RequestOutcome::SamplerSaved { path, sampling_session_id } => ResultBody::value(&json!({
            "path": path, "sampling_session_id": sampling_session_id, "type": "save_weights_for_sampler",
        })),
        RequestOutcome::Unloaded { model_id } => {
            ResultBody::value(&json!({"model_id": model_id, "type": "unload_model"}))
        }
    }
}

/// The result of a request that failed.
pub(crate) fn encode_failure(failure: &FailedRequest) -> ResultBody {
    let category = match failure.category {
        FailureCategory::User => "user",
        FailureCategory::Server => "server",
    };
    ResultBody::value(&json!({"error": failure.message, "category": category}))
}

/// The answer of a request that has no result yet.
pub(crate) fn encode_pending(request_id: &str, queue: WaitState, reason: &str) -> ResultBody {
    let queue = match queue {
        WaitState::Active => "active",
        WaitState::PausedCapacity => "paused_capacity",
        WaitState::PausedRateLimit => "paused_rate_limit",
    };
    let mut body = json!({"type": "try_again", "request_id": request_id, "queue_state": queue});
    if !reason.is_empty() {
        body["queue_state_reason"] = reason.into();
    }
    ResultBody::value(&body)
}

fn floats(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

/// Tokens as i32, as the SDK reads them.
fn words(tokens: impl IntoIterator<Item = u32>) -> Vec<u8> {
    tokens.into_iter().flat_map(u32::to_le_bytes).collect()
}

fn pass_message(output: &PassOutput) -> PassOutputMessage {
    let names: BTreeSet<&String> = output.outputs.iter().flat_map(|datum| datum.keys()).collect();
    let field = |name: &&String| {
        let (mut data, mut offsets) = (Vec::new(), 0_i64.to_le_bytes().to_vec());
        for datum in &output.outputs {
            data.extend(floats(datum.get(*name).into_iter().flatten().copied()));
            offsets.extend((data.len() as i64).to_le_bytes());
        }
        let dtype = ElementType::Float32.into();
        ((*name).clone(), BatchedMessage { data, offsets, dtype, trailing_shape: Vec::new() })
    };
    let record = RecordMessage {
        type_tag: RECORD.to_owned(),
        fields: names.iter().map(field).collect(),
        num_datums: output.outputs.len() as i64,
    };
    PassOutputMessage {
        loss_fn_output_type: RECORD.to_owned(),
        loss_fn_outputs: vec![record],
        metrics: output.metrics.clone(),
    }
}

fn sample_message(output: &SamplingOutput) -> SampleMessage {
    let sequence = |sampled: &SampledTokens| SequenceMessage {
        stop_reason: i32::from(!sampled.stopped),
        tokens: words(sampled.tokens.iter().copied()),
        logprobs: Some(floats(sampled.logprobs.iter().copied())),
        topk_sampled_logprobs: topk_message(&sampled.alternatives),
    };
    let targets = output.prompt_targets.as_ref().map(|(values, width)| {
        let rows = values.len().checked_div(*width).unwrap_or_default();
        TensorMessage {
            layout: Some(TensorLayout::Dense(floats(values.iter().copied()))),
            dtype: ElementType::Float32.into(),
            shape: vec![rows as i64, *width as i64],
        }
    });
    SampleMessage {
        sequences: output.sequences.iter().map(sequence).collect(),
        prompt_logprobs: output.prompt_logprobs.as_ref().map(|values| floats(values.iter().copied())),
        topk_prompt_logprobs: output.prompt_alternatives.as_deref().and_then(topk_message),
        prompt_cache_hit_tokens: i32::try_from(output.cached_tokens).unwrap_or(i32::MAX),
        target_prompt_logprobs: targets,
    }
}

/// `[length, k]` tokens, where `k` is the most of any position. `None` if no position has any.
fn topk_message(positions: &[Vec<ScoredToken>]) -> Option<TopkMessage> {
    let k = positions.iter().map(Vec::len).max().filter(|k| *k > 0)?;
    let padding = std::iter::repeat(NO_TOKEN);
    let cells = || {
        let row = |tokens: &'_ Vec<ScoredToken>| tokens.clone().into_iter().chain(padding.clone()).take(k);
        positions.iter().flat_map(row)
    };
    Some(TopkMessage {
        token_ids: words(cells().map(|(token, _)| token)),
        logprobs: floats(cells().map(|(_, logprob)| logprob)),
        k: u32::try_from(k).ok()?,
        length: u32::try_from(positions.len()).ok()?,
    })
}

fn pass_text(output: &PassOutput) -> JsonText {
    let mut text = JsonText::default();
    text.raw("{\"loss_fn_output_type\":").string(RECORD).raw(",\"loss_fn_outputs\":");
    text.list(&output.outputs, |text, datum| {
        text.object(datum, |text, values| {
            text.raw("{\"data\":").list(values, |text, value| {
                text.number(*value);
            });
            text.raw(",\"dtype\":\"float32\",\"shape\":[").display(values.len()).raw("]}");
        });
    });
    text.raw(",\"metrics\":").metrics(&output.metrics).raw("}");
    text
}

fn sample_text(output: &SamplingOutput) -> JsonText {
    let mut text = JsonText::default();
    text.raw("{\"type\":\"sample\",\"sequences\":").list(&output.sequences, |text, sampled| {
        text.raw("{\"stop_reason\":").string(if sampled.stopped { "stop" } else { "length" });
        text.raw(",\"tokens\":").list(&sampled.tokens, |text, token| {
            text.display(token);
        });
        text.raw(",\"logprobs\":").list(&sampled.logprobs, |text, value| {
            text.number(*value);
        });
        if sampled.alternatives.iter().any(|position| !position.is_empty()) {
            topk_text(text.raw(",\"topk_logprobs\":"), &sampled.alternatives);
        }
        text.raw("}");
    });
    if let Some(logprobs) = &output.prompt_logprobs {
        text.raw(",\"prompt_logprobs\":").list(logprobs, |text, value| {
            // The SDK's type of a position without one is `None`.
            if value.is_nan() {
                text.raw("null")
            } else {
                text.number(*value)
            };
        });
    }
    if let Some(positions) = &output.prompt_alternatives {
        topk_text(text.raw(",\"topk_prompt_logprobs\":"), positions);
    }
    text.raw(",\"prompt_cache_hit_tokens\":").display(output.cached_tokens).raw("}");
    text
}

fn topk_text(text: &mut JsonText, positions: &[Vec<ScoredToken>]) {
    text.list(positions, |text, position| {
        if position.is_empty() {
            text.raw("null");
            return;
        }
        text.list(position, |text, (token, logprob)| {
            text.raw("[").display(token).raw(",").number(*logprob).raw("]");
        });
    });
}
