//! Bytes that tinker's SDK wrote and reads, and bytes that it does not write.
//!
//! Invariant: the constants were made by the protobuf module of SDK 0.38.0, not by this crate.

use std::collections::BTreeMap;

use proptest::prelude::*;
use prost::Message as _;
use serde_json::{Value, json};

use super::protobuf::{DatumMessage, PassMessage, PassOutputMessage, SampleMessage};
use super::*;
use crate::data::{
    AdamParameters, LossSetting, LossTensor, LossValues, PassOutput, SampledSpan, SampledTokens,
    SamplingOutput,
};
use crate::outcome::{FailedRequest, FailureCategory, RequestOutcome, WaitState};
use crate::training::{LoadInto, SampleFrom};

/// A request that SDK 0.38.0 wrote, with all kinds of tensors, in hexadecimal.
const REQUEST: &str = "\
    0a0a73313a747261696e3a3010031acc010a100a0e0a0c01000000020000002c0100000a080a060a040400000012250a0a61\
    6476616e746167657312170a10000000000000803f0000803f000080bf180122010412230a086c6f6770726f627312170a10\
    00000000000080bf000000bf000000c0180122010412380a0d7461726765745f746f6b656e7312270a200200000000000000\
    2c010000000000000400000000000000050000000000000018022201041a080a060a02713018031a0a12080a027130100118\
    0122080a060a0271301801220812060a02713018031af2010a100a0e0a0c09000000080000000700000012130a0468616c66\
    120b0a04803f00c01804220102125f0a0d7461726765745f746f6b656e73124e12460a100500000000000000060000000000\
    0000122000000000000000000100000000000000010000000000000002000000000000001a10000000000000000001000000\
    0000000018022202030212510a07776569676874731246123e0a080000003f000000bf122000000000000000000100000000\
    000000010000000000000002000000000000001a100000000000000000010000000000000018012202030212150a05776f72\
    6473120c0a08ffffffff070000001803220370706f2a1d0a12636c69705f6c6f775f7468726573686f6c64119a9999999999\
    e93f3a1f0a12636c69705f6c6f775f7468726573686f6c641209099a9999999999e93f3a0f0a046d6f646512071205746f6b\
    656e";

/// A request that SDK 0.38.0 wrote, with an image, in hexadecimal.
const IMAGE: &str = "\
    0a0a73313a747261696e3a3010011a310a0d120b0a0489504e471203706e6712200a0d7461726765745f746f6b656e73120f\
    0a0801000000000000001802220101220d63726f73735f656e74726f7079";

/// A `ForwardBackwardOutput` that SDK 0.38.0 wrote and read, in hexadecimal.
const PASSED: &str = "\
    0a0b41727261795265636f7264124f0a0b41727261795265636f7264123e0a086c6f6770726f627312320a0c0000c0bf0000\
    80be000040c012200000000000000000080000000000000008000000000000000c00000000000000180118031a130a086c6f\
    73733a73756d110000000000001340";

/// A `SampleResponse` that SDK 0.38.0 wrote and read, in hexadecimal.
const SAMPLED: &str = "\
    0a3e120805000000060000001a08000080bf000000c022280a10050000000900000006000000000000001210000080bf0000\
    c0bf000000c0804fc3c7180220020a0e08011204701101001a04000000bf12080000c07f000040bf1a180a08000000000300\
    00001208804fc3c7000000be1801200220012a100a08000080bf00000000180122020102";

fn bytes(hexadecimal: &str) -> Vec<u8> {
    let (pairs, _) = hexadecimal.as_bytes().as_chunks::<2>();
    pairs.iter().map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What is asked for in a request of a model.
fn content<T>(request: Result<ModelRequest<T>, WireError>) -> Result<T, WireError> {
    request.and_then(|request| request.content)
}

fn floats(values: &[f32], shape: &[usize]) -> LossTensor {
    LossTensor { values: LossValues::Float(values.to_vec()), shape: shape.to_vec() }
}

fn ints(values: &[i64], shape: &[usize]) -> LossTensor {
    LossTensor { values: LossValues::Int(values.to_vec()), shape: shape.to_vec() }
}

#[test]
fn a_request_of_the_sdk_is_read() {
    let call = pass_from_protobuf(&bytes(REQUEST)).unwrap();
    assert_eq!((&call.model_id[..], call.seq_id), ("s1:train:0", 3));
    let pass = call.content.unwrap();
    assert_eq!((&pass.loss[..], pass.forward_only), ("ppo", false));
    let settings = [
        ("clip_low_threshold".to_owned(), LossSetting::Number(0.8)),
        ("mode".to_owned(), LossSetting::Text("token".to_owned())),
    ];
    assert_eq!(pass.settings, BTreeMap::from(settings));
    let [dense, sparse] = &pass.data[..] else { panic!("two sequences were sent") };
    assert_eq!(dense.tokens, [1, 2, 300, 4]);
    assert_eq!(dense.inputs["target_tokens"], ints(&[2, 300, 4, 5], &[4]));
    assert_eq!(dense.inputs["logprobs"], floats(&[0.0, -1.0, -0.5, -2.0], &[4]));
    assert_eq!(dense.inputs["advantages"], floats(&[0.0, 1.0, 1.0, -1.0], &[4]));
    assert_eq!(dense.sampled, [SampledSpan { sequence_id: "q0".to_owned(), offset: 0, length: 3 }]);
    assert_eq!(sparse.inputs["target_tokens"], ints(&[5, 0, 0, 0, 0, 6], &[3, 2]));
    assert_eq!(sparse.inputs["weights"], floats(&[0.5, 0.0, 0.0, 0.0, 0.0, -0.5], &[3, 2]));
    assert_eq!(sparse.inputs["half"], floats(&[1.0, -2.0], &[2]));
    assert_eq!(sparse.inputs["words"], ints(&[-1, 7], &[2]));
}

/// What [`REQUEST`] says, as SDK 0.24.1 writes it.
fn json_request() -> Value {
    json!({
        "forward_backward_input": {
            "data": [
                {
                    "model_input": {"chunks": [
                        {"tokens": [1, 2, 300], "type": "encoded_text"}, {"tokens": [4], "type": "encoded_text"},
                    ]},
                    "loss_fn_inputs": {
                        "target_tokens": {"data": [2, 300, 4, 5], "dtype": "int64", "shape": [4]},
                        "logprobs": {"data": [0.0, -1.0, -0.5, -2.0], "dtype": "float32", "shape": [4]},
                        "advantages": {"data": [0, 1, 1.0, -1], "dtype": "float32"},
                    },
                },
                {
                    "model_input": {"chunks": [{"tokens": [9, 8, 7], "type": "encoded_text"}]},
                    "loss_fn_inputs": {
                        "target_tokens": {
                            "data": [5, 6], "dtype": "int64", "shape": [3, 2],
                            "sparse_crow_indices": [0, 1, 1, 2], "sparse_col_indices": [0, 1],
                        },
                        "weights": {
                            "data": [0.5, -0.5], "dtype": "float32", "shape": [3, 2],
                            "sparse_crow_indices": [0, 1, 1, 2], "sparse_col_indices": [0, 1],
                        },
                        "half": {"data": [1, -2], "dtype": "float32", "shape": [2]},
                        "words": {"data": [-1, 7], "dtype": "int64", "shape": [2]},
                    },
                },
            ],
            "loss_fn": "ppo",
            "loss_fn_config": {"clip_low_threshold": 0.8, "mode": "token"},
        },
        "model_id": "s1:train:0", "seq_id": 3,
    })
}

/// The older SDK writes JSON: what it says is the same.
#[test]
fn both_encodings_are_read_as_the_same_request() {
    let body = json_request();
    let mut expected = content(pass_from_protobuf(&bytes(REQUEST))).unwrap();
    // JSON has no spans.
    expected.data[0].sampled.clear();
    assert_eq!(content(pass_from_json(body.to_string().as_bytes())).unwrap(), expected);
    let mut forward = body;
    let input = forward.as_object_mut().unwrap().remove("forward_backward_input").unwrap();
    forward["forward_input"] = input;
    expected.forward_only = true;
    assert_eq!(content(forward_from_json(forward.to_string().as_bytes())).unwrap(), expected);
}

#[test]
fn an_image_is_refused_with_the_reason() {
    let error = content(pass_from_protobuf(&bytes(IMAGE))).unwrap_err();
    assert!(
        error.0.contains("`data[0]`: `model_input`: chunks of type `image` are not served here"),
        "{error}"
    );
}

#[test]
fn what_is_not_served_is_refused_by_name() {
    let request = PassMessage::decode(&bytes(REQUEST)[..]).unwrap();
    type Change = fn(&mut PassMessage);
    let changes: [(Change, &str); 5] = [
        (|request| request.seq_id = 0, "`seq_id`"),
        (|request| request.data.clear(), "`data`"),
        (|request| request.loss_fn = "custom".to_owned(), "forward_backward_custom"),
        (
            |request| request.data[0].loss_fn_inputs.get_mut("logprobs").unwrap().dtype = 9,
            "`logprobs`: type 9",
        ),
        (
            |request| request.data[0].loss_fn_inputs.get_mut("logprobs").unwrap().shape = vec![5],
            "`logprobs`: shape",
        ),
    ];
    for (change, expected) in changes {
        let mut request = request.clone();
        change(&mut request);
        let error = content(pass_from_protobuf(&request.encode_to_vec())).unwrap_err();
        assert!(error.0.contains(expected), "{expected}: {error}");
    }
}

#[test]
fn an_unknown_field_of_a_message_is_refused_by_its_number() {
    let mut request = bytes(REQUEST);
    // Field 9, a number.
    request.extend([9 << 3, 1]);
    let error = content(pass_from_protobuf(&request)).unwrap_err();
    assert!(error.0.contains("field 9 of the protobuf message `ForwardBackwardRequest`"), "{error}");
}

/// Two bytes are one message of a few hundred bytes in memory.
#[test]
fn messages_are_counted_before_they_are_decoded() {
    let many = MAX_MESSAGE_BYTES / 256 + 1;
    let empty = [3 << 3 | 2, 0];
    let error = pass_from_protobuf(&empty.repeat(many)).unwrap_err();
    assert!(error.0.contains("too many messages"), "{error}");
    assert!(size_of::<DatumMessage>() <= 256);
}

#[test]
fn bodies_in_json_are_read_as_the_sdk_writes_them() {
    let create = json!({
        "session_id": "s1", "model_seq_id": 0, "base_model": "tiny", "user_metadata": {"a": "b"},
        "lora_config": {"rank": 8, "seed": -1, "train_unembed": false}, "optimizer_config": {"type": "adamw"},
        "type": "create_model",
    });
    let new = read_json::<CreateModelBody>(create.to_string().as_bytes()).unwrap().into_new().unwrap();
    let lora = new.lora.unwrap();
    assert_eq!((new.optimizer, lora.rank, lora.seed), ("adamw".to_owned(), 8, Some(u64::MAX)));
    assert_eq!((lora.train_unembed, lora.train_mlp, lora.train_attn), (false, true, true));

    let step =
        br#"{"model_id": "m", "seq_id": 2, "type": "optim_step", "adam_params": {"learning_rate": 0.5}}"#;
    let step = read_json::<OptimStepBody>(step).unwrap().into_step().unwrap();
    assert_eq!(step.seq_id, 2);
    assert_eq!(step.content.unwrap(), AdamParameters { learning_rate: 0.5, ..AdamParameters::default() });

    let load =
        br#"{"session_id": "s1", "model_seq_id": 1, "path": "tinker://a/weights/b", "optimizer": true}"#;
    let into = LoadInto::New { session_id: "s1".to_owned(), model_seq_id: 1, base_model: None };
    let expected = LoadCall::Load { into, path: "tinker://a/weights/b".to_owned(), optimizer: true };
    assert_eq!(load_from_json(load).unwrap(), expected);

    let save = br#"{"model_id": "m", "sampling_session_seq_id": 0, "kind": "inflight", "seq_id": 5}"#;
    let save = content(read_json::<SamplerSaveBody>(save).unwrap().into_save()).unwrap();
    assert!(save.inflight && save.save.is_none() && save.sampling_session_seq_id == Some(0));

    let state = br#"{"model_id": "m", "seq_id": 7, "ttl_seconds": 3600, "overwrite": true}"#;
    let state = content(read_json::<SaveWeightsBody>(state).unwrap().into_save()).unwrap();
    assert_eq!((&state.name[..], state.overwrite, state.ttl_s), ("000007", true, Some(3600)));

    let session = br#"{"session_id": "s1", "sampling_session_seq_id": 1, "base_model": "b", "model_path": "tinker://p"}"#;
    let (.., from) = read_json::<SamplingSessionBody>(session).unwrap().into_session().unwrap();
    assert_eq!(from, SampleFrom::Saved("tinker://p".to_owned()));
}

/// Requests behind it would wait for its number.
#[test]
fn a_request_whose_content_cannot_be_read_has_its_number() {
    let mut request = bytes(REQUEST);
    let whole = pass_from_protobuf(&request).unwrap();
    request.extend([9 << 3, 1]);
    let known = pass_from_protobuf(&request).unwrap();
    assert_eq!((known.model_id, known.seq_id), (whole.model_id, whole.seq_id));
    assert!(known.content.is_err());
    // A body that was cut is sent again.
    request.pop();
    pass_from_protobuf(&request).unwrap_err();
    let mut unnumbered = PassMessage::decode(&bytes(REQUEST)[..]).unwrap();
    unnumbered.seq_id = -1;
    pass_from_protobuf(&unnumbered.encode_to_vec()).unwrap_err();

    let json = |body: Value| pass_from_json(body.to_string().as_bytes());
    let body = json!({"model_id": "m", "seq_id": 4, "forward_backward_input": {"data": 7}, "more": [1]});
    let known = json(body).unwrap();
    assert_eq!((&known.model_id[..], known.seq_id), ("m", 4));
    assert!(known.content.unwrap_err().0.contains("invalid type"));
    json(json!({"model_id": "m", "seq_id": 0, "forward_backward_input": 7})).unwrap_err();
    json(json!({"model_id": 5, "seq_id": 1})).unwrap_err();
    pass_from_json(br#"{"model_id": "m", "seq_id": 4, "forward_backward_input": "#).unwrap_err();
}

#[test]
fn bodies_that_ask_for_more_are_refused_by_name() {
    fn error<T: serde::de::DeserializeOwned, U>(
        body: &Value,
        read: impl Fn(T) -> Result<U, WireError>,
    ) -> String {
        let read = read_json::<T>(body.to_string().as_bytes()).and_then(read);
        read.map(|_| ()).unwrap_err().0
    }
    let step = |fields: Value| {
        let body = json!({"model_id": "m", "seq_id": 1, "adam_params": fields});
        error(&body, |step: OptimStepBody| content(step.into_step()))
    };
    assert!(step(json!({"amsgrad": true})).contains("`amsgrad`"));
    assert!(step(json!({"beta2": 1})).contains("`adam_params.beta2`"));
    assert!(step(json!({"learning_rate": -1})).contains("`adam_params.learning_rate`"));
    assert!(step(json!({"eps": 1e300})).contains("`adam_params.eps`"));
    let muon =
        json!({"model_id": "m", "seq_id": 1, "optimizer_params": {"type": "dimuon", "learning_rate": 1}});
    assert!(error(&muon, |step: OptimStepBody| content(step.into_step())).contains("`dimuon` is not served"));
    let load =
        json!({"path": "p", "optimizer": false, "model_id": "m", "session_id": "s", "model_seq_id": 1});
    let load = load_from_json(load.to_string().as_bytes()).unwrap_err();
    assert!(load.0.contains("send either"), "{load}");
    let access =
        json!({"path": "p", "optimizer": false, "model_id": "m", "seq_id": 1, "weights_access_token": "t"});
    let LoadCall::Refused(access) = load_from_json(access.to_string().as_bytes()).unwrap() else {
        panic!("it is accepted");
    };
    let error_of_access = access.content.unwrap_err();
    assert!(access.seq_id == 1 && error_of_access.0.contains("`weights_access_token`"), "{error_of_access}");
    let kind = json!({"model_id": "m", "seq_id": 1, "path": "p", "kind": "live"});
    assert!(error(&kind, |save: SamplerSaveBody| content(save.into_save())).contains("`live`"));
}

fn pass_output() -> PassOutput {
    let datum = |values: &[f32]| BTreeMap::from([("logprobs".to_owned(), values.to_vec())]);
    PassOutput {
        outputs: vec![datum(&[-1.5, -0.25]), datum(&[]), datum(&[-3.0])],
        metrics: BTreeMap::from([("loss:sum".to_owned(), 4.75)]),
    }
}

fn sampling_output() -> SamplingOutput {
    SamplingOutput {
        sequences: vec![
            SampledTokens {
                stopped: true,
                tokens: vec![5, 6],
                logprobs: vec![-1.0, -2.0],
                alternatives: vec![vec![(5, -1.0), (9, -1.5)], vec![(6, -2.0)]],
            },
            SampledTokens {
                stopped: false,
                tokens: vec![70_000],
                logprobs: vec![-0.5],
                alternatives: Vec::new(),
            },
        ],
        prompt_logprobs: Some(vec![f32::NAN, -0.75]),
        prompt_alternatives: Some(vec![Vec::new(), vec![(3, -0.125)]]),
        prompt_targets: Some((vec![-1.0, 0.0], 2)),
        cached_tokens: 1,
        version: 4,
    }
}

#[test]
fn results_in_protobuf_are_the_bytes_that_the_sdk_reads() {
    let passed = encode_outcome(&RequestOutcome::Passed(pass_output()), ResultEncoding::Protobuf);
    assert_eq!(passed.media_type, protobuf::MEDIA_TYPE);
    assert_eq!(hexadecimal(&passed.bytes), PASSED);
    assert_eq!(PassOutputMessage::decode(&passed.bytes[..]).unwrap().loss_fn_outputs[0].num_datums, 3);
    let sampled = encode_outcome(&RequestOutcome::Sampled(sampling_output()), ResultEncoding::Protobuf);
    assert_eq!(hexadecimal(&sampled.bytes), SAMPLED);
    assert_eq!(SampleMessage::decode(&sampled.bytes[..]).unwrap().sequences.len(), 2);
}

#[test]
fn results_in_json_have_the_forms_of_the_older_sdk() {
    let read = |outcome: RequestOutcome| -> Value {
        let body = encode_outcome(&outcome, ResultEncoding::Json);
        assert_eq!(body.media_type, "application/json");
        serde_json::from_slice(&body.bytes).unwrap()
    };
    let passed = read(RequestOutcome::Passed(pass_output()));
    assert_eq!(
        passed["loss_fn_outputs"][0]["logprobs"],
        json!({"data": [-1.5, -0.25], "dtype": "float32", "shape": [2]})
    );
    assert_eq!(passed["metrics"], json!({"loss:sum": 4.75}));
    let sampled = read(RequestOutcome::Sampled(sampling_output()));
    assert_eq!(sampled["sequences"][0]["stop_reason"], "stop");
    assert_eq!(
        sampled["sequences"][1],
        json!({"stop_reason": "length", "tokens": [70_000], "logprobs": [-0.5]})
    );
    assert_eq!(sampled["prompt_logprobs"], json!([null, -0.75]));
    assert_eq!(sampled["topk_prompt_logprobs"], json!([null, [[3, -0.125]]]));
    let saved = read(RequestOutcome::SamplerSaved {
        path: None,
        sampling_session_id: Some("s1:sample:0".to_owned()),
    });
    assert_eq!(saved["sampling_session_id"], "s1:sample:0");
    let failure = FailedRequest { category: FailureCategory::User, message: "too long".to_owned() };
    assert_eq!(encode_failure(&failure).bytes, br#"{"error":"too long","category":"user"}"#);
    let pending: Value =
        serde_json::from_slice(&encode_pending("r1", WaitState::PausedRateLimit, "").bytes).unwrap();
    assert_eq!(pending, json!({"type": "try_again", "request_id": "r1", "queue_state": "paused_rate_limit"}));
}

/// Passes and completions alone have a form in protobuf; a loss that has diverged is shown as it is.
#[test]
fn metrics_that_are_not_finite_reach_the_client() {
    let metrics = BTreeMap::from([("grad_norm:mean".to_owned(), f64::NAN)]);
    let body = encode_outcome(&RequestOutcome::Stepped { metrics }, ResultEncoding::Protobuf);
    assert_eq!(body.bytes, br#"{"metrics":{"grad_norm:mean":"NaN"}}"#);
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(body: Vec<u8>) {
        let _ = pass_from_protobuf(&body);
        let _ = pass_from_json(&body);
        let _ = forward_from_json(&body);
        let _ = sample_from_json(&body);
    }

    /// A request with one byte changed or cut is read or refused, in bounded memory.
    #[test]
    fn damaged_requests_never_panic(at in 0_usize..800, byte: u8, length in 0_usize..800) {
        let mut body = bytes(REQUEST);
        let (at, length) = (at % body.len(), length % (body.len() + 1));
        body[at] = byte;
        if let Ok(pass) = content(pass_from_protobuf(&body)) {
            let numbers = pass.data.iter().flat_map(|datum| datum.inputs.values());
            let numbers: usize = numbers.map(|tensor| tensor.shape.iter().product::<usize>()).sum();
            prop_assert!(numbers <= MAX_ELEMENTS);
        }
        let _ = pass_from_protobuf(&body[..length]);
        let mut text = json_request().to_string().into_bytes();
        let (at, length) = (at % text.len(), length % (text.len() + 1));
        text[at] = byte;
        let _ = pass_from_json(&text);
        let _ = pass_from_json(&text[..length]);
    }

    #[test]
    fn tokens_are_read_as_they_were_written(tokens in proptest::collection::vec(0..=i32::MAX as u32, 1..50)) {
        let words: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        let mut request = PassMessage::decode(&bytes(REQUEST)[..]).unwrap();
        request.data.truncate(1);
        let text = protobuf::ChunkKind::EncodedText(protobuf::TextMessage { tokens: words });
        request.data[0].model_input = vec![protobuf::ChunkMessage { kind: Some(text) }];
        let pass = content(pass_from_protobuf(&request.encode_to_vec())).unwrap();
        prop_assert_eq!(&pass.data[0].tokens, &tokens);
    }
}
