//! What vLLM and SGLang are asked, and what they answer.
//!
//! Requests and answers of vLLM 0.32 (`/inference/v1/generate`, started with `--enable-scale-out`) and SGLang 0.5
//! (`/generate`); both report the version of the weights of every token as spans over the completion. Older releases of SGLang
//! name the version at its end alone.
//!
//! Invariant: an answer of another form is an error that quotes it; nothing of it is guessed.

use std::path::Path;

use model::Sampling;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use trajectory::{PolicyVersion, StopReason, VersionRun};

use super::client::EngineFailure;
use super::push::WrittenFiles;
use crate::sampler::OnUpdate;

/// Name of the LoRA adapter of the policy in an engine.
pub(super) const ADAPTER: &str = "rlrun-policy";

/// A rollout engine of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineKind {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
}

/// Completions of one prompt.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct EngineRequest {
    /// Its id.
    pub(super) id: String,
    /// `[P]` tokens before the completion.
    pub(super) token_ids: Vec<u32>,
    /// Number of completions.
    pub(super) samples: usize,
    /// How tokens are chosen.
    pub(super) sampling: Sampling,
    /// Longest completion, tokens.
    pub(super) max_tokens: usize,
    /// Fewest tokens before a stop token ends it.
    pub(super) min_tokens: usize,
    /// Tokens that end it.
    pub(super) stop_token_ids: Vec<u32>,
    /// Seed of its random numbers.
    pub(super) seed: u64,
    /// Whether the experts of all tokens are wanted.
    pub(super) experts: bool,
    /// The version that the engine serves: what it has cached of prompts under another one is not reused.
    pub(super) version: PolicyVersion,
}

/// How a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EngineEnd {
    Stopped(StopReason),
    /// It was stopped from outside, and can be continued.
    Aborted,
}

/// A completion, or the part of it before it was aborted; `C` tokens.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct EngineCompletion {
    /// `[C]`
    pub(super) token_ids: Vec<u32>,
    /// `[C]` log-probabilities, nats.
    pub(super) logprobs: Vec<f32>,
    /// Runs over all `C` tokens.
    pub(super) versions: Vec<VersionRun>,
    pub(super) end: EngineEnd,
    /// The experts of prompt and completion, as the engine has written them.
    pub(super) experts: Option<String>,
}

/// A call of an engine.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct EngineCall {
    pub(super) path: &'static str,
    /// `None` for no body.
    pub(super) body: Option<Value>,
}

impl EngineCall {
    fn new(path: &'static str, body: Value) -> Self {
        Self { path, body: Some(body) }
    }

    fn bare(path: &'static str) -> Self {
        Self { path, body: None }
    }

    /// Whether its body has the name of a directory.
    pub(super) fn names(&self, directory: &Path) -> bool {
        let name = directory.display().to_string();
        let values =
            |body: &Value| body.as_object().is_some_and(|body| body.values().any(|value| *value == name));
        self.body.as_ref().is_some_and(|body| values(body) || values(&body["kwargs"]))
    }
}

impl EngineKind {
    /// How it has to be started, for messages; `adapter`: to load LoRA adapters.
    pub(super) fn start_with(self, adapter: bool) -> &'static str {
        match self {
            Self::Vllm if adapter => {
                "start it with VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and `vllm serve MODEL --enable-scale-out \
                 --logprobs-mode processed_logprobs --enable-lora --max-lora-rank RANK`, with the base model of the recipe and \
                 at least its rank, or leave `rollout.push_adapter` out"
            }
            Self::Vllm => {
                "start it with VLLM_SERVER_DEV_MODE=1 and `vllm serve MODEL --enable-scale-out --logprobs-mode \
                 processed_logprobs`, the model of the recipe and `--dtype float32` where weights are f32"
            }
            Self::Sglang => {
                "start it with `python -m sglang.launch_server --model-path MODEL`, the model of the recipe"
            }
        }
    }

    /// How it has to be started to name the experts of tokens, for messages.
    pub(super) fn start_with_experts(self) -> &'static str {
        match self {
            Self::Vllm => {
                "start vLLM with --enable-return-routed-experts, or leave `rollout.routing_replay` out"
            }
            Self::Sglang => {
                "start SGLang with --enable-return-routed-experts, or leave `rollout.routing_replay` out"
            }
        }
    }

    /// The call for completions of `model`.
    pub(super) fn generate(self, model: &str, request: &EngineRequest) -> EngineCall {
        let EngineRequest { id, token_ids, samples, sampling, max_tokens, .. } = request;
        let EngineRequest { min_tokens, stop_token_ids, seed, version, experts, .. } = request;
        let salt = format!("rlrun-{version}");
        // Neither engine takes a seed above 63 bits.
        let seed = seed >> 1;
        match self {
            Self::Vllm => EngineCall::new(
                "/inference/v1/generate",
                json!({
                    "model": model,
                    "request_id": id,
                    "token_ids": token_ids,
                    "return_token_ids": true,
                    "output_mode": "tokens",
                    "cache_salt": salt,
                    "stream": false,
                    "sampling_params": {
                        "n": samples,
                        "max_tokens": max_tokens,
                        "min_tokens": min_tokens,
                        "temperature": sampling.temperature,
                        "top_p": 1.0,
                        "logprobs": 0,
                        "seed": seed,
                        "stop_token_ids": stop_token_ids,
                        // The stop tokens of the recipe are all of them.
                        "ignore_eos": true,
                    },
                }),
            ),
            Self::Sglang => EngineCall::new(
                "/generate",
                json!({
                    "rid": if *samples == 1 { json!(id) } else { json!((0..*samples).map(|n| format!("{id}-{n}")).collect::<Vec<_>>()) },
                    "input_ids": token_ids,
                    "return_logprob": true,
                    "return_routed_experts": experts,
                    "logprob_start_len": -1,
                    "cache_salt": salt,
                    "stream": false,
                    "sampling_params": {
                        "n": samples,
                        "max_new_tokens": max_tokens,
                        "min_new_tokens": min_tokens,
                        "temperature": sampling.temperature,
                        "top_p": 1.0,
                        "sampling_seed": seed,
                        "stop_token_ids": stop_token_ids,
                        "ignore_eos": true,
                        "skip_special_tokens": false,
                    },
                }),
            ),
        }
    }

    /// The completions in an answer to [`generate`](Self::generate). Tokens without a version are of `served`, which the engine
    /// had when it was asked: the oldest that can have sampled them.
    ///
    /// # Errors
    /// What is missing in it. An engine whose weights rlrun has not pushed, because it was started again, is
    /// [`EngineFailure::Gone`].
    pub(super) fn completions(
        self,
        answer: &Value,
        served: PolicyVersion,
    ) -> Result<Vec<EngineCompletion>, EngineFailure> {
        self.read(answer, served).map_err(|wrong| match wrong {
            WrongAnswer::Form(what) => EngineFailure::Refused(format!("answers with {what}")),
            WrongAnswer::Version(name) => EngineFailure::Gone(format!("has weights of the version {name:?}")),
        })
    }

    fn read(self, answer: &Value, served: PolicyVersion) -> Result<Vec<EngineCompletion>, WrongAnswer> {
        match self {
            Self::Vllm => {
                let choices = answer["choices"].as_array().ok_or("no `choices`")?;
                let mut choices: Vec<&Value> = choices.iter().collect();
                choices.sort_by_key(|choice| choice["index"].as_u64());
                choices.into_iter().map(|choice| vllm_choice(choice, served)).collect()
            }
            Self::Sglang => match answer {
                Value::Array(all) => all.iter().map(|one| sglang_completion(one, served)).collect(),
                one => Ok(vec![sglang_completion(one, served)?]),
            },
        }
    }

    /// Ends the requests with the id `id`.
    pub(super) fn abort(self, id: &str, samples: usize) -> Vec<EngineCall> {
        match self {
            Self::Vllm => vec![EngineCall::new("/abort_requests", json!({ "request_ids": [id] }))],
            Self::Sglang if samples == 1 => vec![EngineCall::new("/abort_request", json!({ "rid": id }))],
            Self::Sglang => (0..samples)
                .map(|n| EngineCall::new("/abort_request", json!({ "rid": format!("{id}-{n}") })))
                .collect(),
        }
    }

    /// Stops it between two steps; requests in flight stay.
    pub(super) fn pause(self) -> EngineCall {
        match self {
            Self::Vllm => EngineCall::bare("/pause?mode=keep"),
            Self::Sglang => EngineCall::new("/pause_generation", json!({ "mode": "in_place" })),
        }
    }

    /// Lets it go on. It can be called again.
    pub(super) fn resume(self) -> EngineCall {
        match self {
            Self::Vllm => EngineCall::bare("/resume"),
            Self::Sglang => EngineCall::new("/continue_generation", json!({})),
        }
    }

    /// The calls that load `version` from `files` while it is paused.
    pub(super) fn load(
        self,
        files: &WrittenFiles,
        version: PolicyVersion,
        on_update: OnUpdate,
    ) -> Vec<EngineCall> {
        let (path, named) = (files.path().display().to_string(), version.0.to_string());
        let recompute = on_update == OnUpdate::Recompute;
        match self {
            Self::Vllm => vec![
                match files {
                    WrittenFiles::Weights(_) => EngineCall::new(
                        "/collective_rpc",
                        json!({ "method": "reload_weights", "kwargs": { "weights_path": path } }),
                    ),
                    WrittenFiles::Adapter(_) => EngineCall::new(
                        "/v1/load_lora_adapter",
                        json!({ "lora_name": ADAPTER, "lora_path": path, "load_inplace": true }),
                    ),
                },
                // What is cached of prompts is of the old weights. Requests in flight keep their own unless they are recomputed.
                EngineCall::bare(match recompute {
                    true => "/reset_prefix_cache?reset_running_requests=true",
                    false => "/reset_prefix_cache",
                }),
                EngineCall::new("/update_weight_version", json!({ "new_version": named })),
            ],
            Self::Sglang => vec![EngineCall::new(
                "/update_weights_from_disk",
                json!({
                    "model_path": path,
                    "weight_version": named,
                    "abort_all_requests": false,
                    "keep_pause": true,
                    "flush_cache": recompute,
                }),
            )],
        }
    }

    /// The question whether it is paused; `None` if it cannot be asked.
    pub(super) fn is_paused(self) -> Option<&'static str> {
        match self {
            Self::Vllm => Some("/is_paused"),
            Self::Sglang => None,
        }
    }

    /// Requests that wait within the engine, in an answer to `/metrics`; `None` if it does not say.
    pub(super) fn queued(self, metrics: &str) -> Option<u64> {
        let name = match self {
            Self::Vllm => "vllm:num_requests_waiting",
            Self::Sglang => "sglang:num_queue_reqs",
        };
        // One line for each of its ranks: a name, labels in braces, and a value.
        let value = |line: &str| {
            let rest = line.strip_prefix(name)?;
            let of_name = rest.starts_with(['{', ' ']);
            let value: f64 = rest.rsplit(' ').next()?.parse().ok()?;
            of_name.then_some(value.max(0.0) as u64)
        };
        metrics.lines().filter_map(value).reduce(u64::saturating_add)
    }

    /// The names of the models that it serves and the longest context of each, in an answer to `/v1/models`.
    pub(super) fn models(answer: &Value) -> Vec<(String, Option<u64>)> {
        let models = answer["data"].as_array().map(Vec::as_slice).unwrap_or_default();
        let named = models
            .iter()
            .filter_map(|model| Some((model["id"].as_str()?.to_owned(), model["max_model_len"].as_u64())));
        named.collect()
    }
}

/// What is wrong with an answer.
enum WrongAnswer {
    Form(String),
    /// It is of weights with a name that rlrun does not give.
    Version(String),
}

impl From<String> for WrongAnswer {
    fn from(what: String) -> Self {
        Self::Form(what)
    }
}

impl From<&str> for WrongAnswer {
    fn from(what: &str) -> Self {
        Self::Form(what.to_owned())
    }
}

fn vllm_choice(choice: &Value, served: PolicyVersion) -> Result<EngineCompletion, WrongAnswer> {
    let token_ids = ids(&choice["token_ids"]).ok_or("no `token_ids`; start vLLM with --enable-scale-out")?;
    let content = choice["logprobs"]["content"].as_array().ok_or("no `logprobs`")?;
    let logprobs = content.iter().map(|token| token["logprob"].as_f64()).collect::<Option<Vec<f64>>>();
    let logprobs = logprobs.ok_or("a token has no `logprob`")?;
    let end = match choice["finish_reason"].as_str() {
        Some("stop") => EngineEnd::Stopped(StopReason::StopToken),
        Some("length") => EngineEnd::Stopped(StopReason::Length),
        Some("abort") => EngineEnd::Aborted,
        other => return Err(format!("`finish_reason` is {other:?}").into()),
    };
    let whole = completion(token_ids, &logprobs, end, spans(&choice["weight_versions"])?, served)?;
    Ok(EngineCompletion { experts: text(&choice["routed_experts"]), ..whole })
}

fn sglang_completion(answer: &Value, served: PolicyVersion) -> Result<EngineCompletion, WrongAnswer> {
    let token_ids = ids(&answer["output_ids"]).ok_or("no `output_ids`")?;
    let meta = &answer["meta_info"];
    let tokens = meta["output_token_logprobs"].as_array().ok_or("no `output_token_logprobs`")?;
    let logprobs = tokens.iter().map(|token| token[0].as_f64()).collect::<Option<Vec<f64>>>();
    let logprobs = logprobs.ok_or("a token has no log-probability")?;
    let end = match meta["finish_reason"]["type"].as_str() {
        Some("stop") => EngineEnd::Stopped(StopReason::StopToken),
        Some("length") => EngineEnd::Stopped(StopReason::Length),
        Some("abort") => EngineEnd::Aborted,
        other => return Err(format!("`finish_reason` is {other:?}").into()),
    };
    let mut found = spans(&meta["weight_versions"])?;
    if found.is_empty()
        && let Some(version) = meta["weight_version"].as_str()
    {
        // It is the version at the end of the completion, the newest that can have sampled a token.
        let oldest = version.parse::<u64>().map_or(version.to_owned(), |last| last.min(served.0).to_string());
        found = vec![(oldest, 0, token_ids.len() as u64)];
    }
    let whole = completion(token_ids, &logprobs, end, found, served)?;
    Ok(EngineCompletion { experts: text(&meta["routed_experts"]), ..whole })
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn ids(value: &Value) -> Option<Vec<u32>> {
    let each = value.as_array()?.iter().map(|id| u32::try_from(id.as_u64()?).ok());
    each.collect()
}

type NamedSpan = (String, u64, u64);

/// Spans as objects; those of some releases of SGLang are arrays.
fn spans(value: &Value) -> Result<Vec<NamedSpan>, String> {
    let of = |span: &Value| {
        let part = |name: &str, place: usize| span.get(name).or_else(|| span.get(place)).cloned();
        let version = part("version", 0)?.as_str()?.to_owned();
        Some((version, part("start", 1)?.as_u64()?, part("end", 2)?.as_u64()?))
    };
    let each = value.as_array().map(Vec::as_slice).unwrap_or_default().iter();
    each.map(of).collect::<Option<Vec<_>>>().ok_or_else(|| format!("`weight_versions` are {value}"))
}

/// Checks the streams against each other.
fn completion(
    token_ids: Vec<u32>,
    logprobs: &[f64],
    end: EngineEnd,
    spans: Vec<NamedSpan>,
    served: PolicyVersion,
) -> Result<EngineCompletion, WrongAnswer> {
    let tokens = token_ids.len();
    if logprobs.len() != tokens {
        return Err(format!("{tokens} tokens with {} log-probabilities", logprobs.len()).into());
    }
    let mut versions: Vec<VersionRun> = Vec::new();
    let mut covered = 0;
    for (name, start, end) in spans {
        if start != covered || end < start || end > tokens as u64 {
            return Err(format!("the version {name:?} from token {start} to {end} of {tokens}").into());
        }
        covered = end;
        let Ok(number) = name.parse() else { return Err(WrongAnswer::Version(name)) };
        let version = PolicyVersion(number);
        push_run(&mut versions, version, end - start);
    }
    // The weights of an engine only become newer.
    let rest = versions.last().map_or(served, |run| run.version);
    push_run(&mut versions, rest, tokens as u64 - covered);
    // Engines may round a log-probability to slightly above 0.
    let logprobs = logprobs.iter().map(|logprob| logprob.min(0.0) as f32).collect();
    Ok(EngineCompletion { token_ids, logprobs, versions, end, experts: None })
}

/// Appends tokens of `version`.
pub(super) fn push_run(runs: &mut Vec<VersionRun>, version: PolicyVersion, tokens: u64) {
    let len = u32::try_from(tokens).unwrap_or(u32::MAX);
    match runs.last_mut() {
        _ if len == 0 => {}
        Some(last) if last.version == version => last.len = last.len.saturating_add(len),
        _ => runs.push(VersionRun { version, len }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVED: PolicyVersion = PolicyVersion(4);

    fn run(version: u64, len: u32) -> VersionRun {
        VersionRun { version: PolicyVersion(version), len }
    }

    fn vllm(weight_versions: &Value, finish: &str) -> Value {
        json!({ "choices": [{
            "index": 0, "finish_reason": finish, "token_ids": [5, 6, 7], "weight_versions": weight_versions,
            "logprobs": { "content": [
                { "token_id": 5, "logprob": -0.5 }, { "token_id": 6, "logprob": 1e-9 }, { "token_id": 7, "logprob": -2.0 },
            ] },
        }] })
    }

    fn refusal(read: Result<Vec<EngineCompletion>, EngineFailure>) -> String {
        match read {
            Err(EngineFailure::Refused(what)) => what,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn versions_of_vllm_are_spans_over_the_completion() {
        let spans =
            json!([{ "version": "3", "start": 0, "end": 1 }, { "version": "4", "start": 1, "end": 3 }]);
        let [read] = &EngineKind::Vllm.completions(&vllm(&spans, "stop"), SERVED).unwrap()[..] else {
            panic!()
        };
        assert_eq!((&read.token_ids[..], &read.logprobs[..]), (&[5, 6, 7][..], &[-0.5, 0.0, -2.0][..]));
        assert_eq!(read.versions, [run(3, 1), run(4, 2)]);
        assert_eq!(read.end, EngineEnd::Stopped(StopReason::StopToken));
        let without = EngineKind::Vllm.completions(&vllm(&Value::Null, "abort"), SERVED).unwrap();
        assert_eq!((&without[0].versions[..], without[0].end), (&[run(4, 3)][..], EngineEnd::Aborted));
    }

    #[test]
    fn an_answer_of_another_form_says_what_is_wrong() {
        let refused = |spans: Value, part: &str| {
            let error = refusal(EngineKind::Vllm.completions(&vllm(&spans, "stop"), SERVED));
            assert!(error.contains(part), "{error}");
        };
        refused(json!([{ "version": "3", "start": 1, "end": 3 }]), "from token 1 to 3");
        refused(json!([{ "version": "3", "start": 0, "end": 9 }]), "from token 0 to 9 of 3");
        refused(json!([7]), "`weight_versions` are [7]");
        for (answer, part) in [
            (json!({}), "no `choices`"),
            (json!({ "choices": [{}] }), "--enable-scale-out"),
            (json!({ "choices": [{ "token_ids": [1] }] }), "no `logprobs`"),
            (json!({ "choices": [{ "token_ids": [1], "logprobs": { "content": [] } }] }), "`finish_reason`"),
        ] {
            let error = refusal(EngineKind::Vllm.completions(&answer, SERVED));
            assert!(error.contains(part), "{error}");
        }
        let short = json!({ "output_ids": [1, 2], "meta_info": {
            "finish_reason": { "type": "stop" }, "output_token_logprobs": [[-1.0, 1, null]],
        } });
        let error = refusal(EngineKind::Sglang.completions(&short, SERVED));
        assert_eq!(error, "answers with 2 tokens with 1 log-probabilities");
        // It was started again since its last push.
        let base = json!([{ "version": "default", "start": 0, "end": 3 }]);
        let gone = EngineKind::Vllm.completions(&vllm(&base, "stop"), SERVED).unwrap_err();
        assert_eq!(gone, EngineFailure::Gone("has weights of the version \"default\"".to_owned()));
    }

    #[test]
    fn the_queue_of_an_engine_is_the_sum_over_its_ranks() {
        let metrics = "# TYPE vllm:num_requests_waiting gauge\n\
                       vllm:num_requests_waiting{engine=\"0\",model_name=\"a b\"} 3.0\n\
                       vllm:num_requests_waiting{engine=\"1\",model_name=\"a b\"} 4.0\n\
                       vllm:num_requests_waiting_by_reason{reason=\"capacity\"} 7.0\n";
        assert_eq!(EngineKind::Vllm.queued(metrics), Some(7));
        assert_eq!(EngineKind::Sglang.queued(metrics), None);
        assert_eq!(EngineKind::Sglang.queued("sglang:num_queue_reqs 2\n"), Some(2));
        assert_eq!(EngineKind::Vllm.queued("vllm:num_requests_waiting{} NaN"), Some(0));
    }

    #[test]
    fn sglang_names_one_version_or_spans() {
        let answer = |meta: Value| {
            let mut meta = meta;
            meta["finish_reason"] = json!({ "type": "length", "length": 2 });
            meta["output_token_logprobs"] = json!([[-0.25, 1, null], [-0.5, 2, null]]);
            json!({ "text": "x", "output_ids": [1, 2], "meta_info": meta })
        };
        let read = |answer: &Value| EngineKind::Sglang.completions(answer, SERVED).unwrap();
        let one = read(&answer(json!({ "weight_version": "2" })));
        assert_eq!(
            (&one[0].versions[..], one[0].end),
            (&[run(2, 2)][..], EngineEnd::Stopped(StopReason::Length))
        );
        // Weights came while it sampled: its tokens may be of the version that it had when it was asked.
        let one = read(&answer(json!({ "weight_version": "6" })));
        assert_eq!(one[0].versions, [run(4, 2)]);
        let one = read(&answer(json!({ "weight_versions": [{ "version": "5", "start": 0, "end": 1 }] })));
        assert_eq!(one[0].versions, [run(5, 2)]);
        let gone = EngineKind::Sglang.completions(&answer(json!({ "weight_version": "default" })), SERVED);
        assert_eq!(gone, Err(EngineFailure::Gone("has weights of the version \"default\"".to_owned())));
        let two =
            json!([answer(json!({ "weight_versions": [["2", 0, 1], ["3", 1, 2]] })), answer(json!({}))]);
        let two = read(&two);
        assert_eq!(
            (&two[0].versions[..], &two[1].versions[..]),
            (&[run(2, 1), run(3, 1)][..], &[run(4, 2)][..])
        );
    }
}
