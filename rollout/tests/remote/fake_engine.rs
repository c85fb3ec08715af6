//! A server in place of vLLM or SGLang, with a real model that it loads from the pushed directory.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use model::{Decoder, ModelDirectory, Pack, Target, ThreadPool};
use rollout::remote::EngineKind;
use serde_json::{Value, json};

/// Name of the model that an engine was started with.
pub(super) const BASE: &str = "policy";
/// What an engine has and does.
pub(super) struct EngineScript {
    pub(super) kind: EngineKind,
    pub(super) decoder: Option<Decoder>,
    pub(super) version: String,
    pub(super) paused: bool,
    /// Requests except probes wait, although nothing has paused it.
    pub(super) stuck: bool,
    /// Paths of all calls.
    pub(super) calls: Vec<String>,
    /// The next generation ends after so many tokens as if it had been aborted.
    pub(super) abort_after: Option<usize>,
    /// Another program pauses it before the next generation.
    pub(super) paused_before: bool,
    /// Added to every log-probability.
    pub(super) shift: f64,
    pub(super) context: u64,
    /// Requests that wait within it.
    pub(super) queued: u64,
    /// The name by which what was loaded last is sampled from.
    pub(super) served: String,
    /// Its answers name no versions.
    pub(super) unversioned: bool,
    /// Whether it was started to name the experts of tokens.
    pub(super) experts: bool,
}

/// A server in place of an engine.
pub(super) struct FakeEngine {
    pub(super) address: SocketAddr,
    pub(super) script: Arc<Mutex<EngineScript>>,
    pub(super) over: Arc<AtomicBool>,
    pub(super) thread: Option<JoinHandle<()>>,
}

impl FakeEngine {
    pub(super) fn new(kind: EngineKind) -> Self {
        let script = EngineScript {
            kind,
            decoder: None,
            version: "default".to_owned(),
            paused: false,
            stuck: false,
            calls: Vec::new(),
            abort_after: None,
            paused_before: false,
            shift: 0.0,
            context: 128,
            queued: 0,
            served: BASE.to_owned(),
            unversioned: false,
            experts: false,
        };
        Self::listen(([127, 0, 0, 1], 0).into(), Arc::new(Mutex::new(script)))
    }

    pub(super) fn listen(address: SocketAddr, script: Arc<Mutex<EngineScript>>) -> Self {
        let listener = TcpListener::bind(address).unwrap();
        let (address, over) = (listener.local_addr().unwrap(), Arc::new(AtomicBool::new(false)));
        let (theirs, stop) = (Arc::clone(&script), Arc::clone(&over));
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let (script, stop) = (Arc::clone(&theirs), Arc::clone(&stop));
                std::thread::spawn(move || answer(stream.unwrap(), &script, &stop));
            }
        });
        Self { address, script, over, thread: Some(thread) }
    }

    pub(super) fn script(&self) -> MutexGuard<'_, EngineScript> {
        self.script.lock().unwrap()
    }

    /// Ends as a killed process does: connections close without an answer.
    pub(super) fn kill(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        drop(TcpStream::connect(self.address));
        self.thread.take().into_iter().for_each(|thread| thread.join().unwrap());
    }

    /// The same address again, with nothing loaded.
    pub(super) fn start_again(&mut self) {
        {
            let mut script = self.script();
            (script.decoder, script.version, script.paused) = (None, "default".to_owned(), false);
            script.calls.clear();
        }
        *self = Self::listen(self.address, Arc::clone(&self.script));
    }
}

impl Drop for FakeEngine {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.kill();
        }
    }
}

fn answer(stream: TcpStream, script: &Mutex<EngineScript>, over: &AtomicBool) {
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head).unwrap_or(0) == 0 {
            return;
        }
    }
    let path = head.split(' ').nth(1).unwrap().to_owned();
    let length =
        head.lines().find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body).unwrap();
    let body: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
    script.lock().unwrap().calls.push(path.clone());
    if path.ends_with("/generate") {
        let probe = body.to_string().contains("rlrun-probe");
        {
            let mut script = script.lock().unwrap();
            script.paused |= std::mem::take(&mut script.paused_before);
        }
        loop {
            let script = script.lock().unwrap();
            if !script.paused && (probe || !script.stuck) {
                break;
            }
            drop(script);
            if over.load(Ordering::Relaxed) {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    let (status, answer) = script.lock().unwrap().answer(&path, &body);
    let text = match &path[..] {
        "/metrics" => format!("vllm:num_requests_waiting{{engine=\"0\"}} {answer}.0\n"),
        _ => answer.to_string(),
    };
    let head = format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", text.len());
    let _ = reader.get_mut().write_all((head + &text).as_bytes());
}

impl EngineScript {
    fn answer(&mut self, path: &str, body: &Value) -> (u16, Value) {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        match path {
            "/v1/models" => (200, json!({ "data": [{ "id": BASE, "max_model_len": self.context }] })),
            "/metrics" => (200, Value::from(self.queued)),
            "/pause?mode=keep" | "/pause_generation" => {
                self.paused = true;
                (200, json!({}))
            }
            "/resume" | "/continue_generation" => {
                self.paused = false;
                (200, json!({}))
            }
            "/is_paused" => (200, json!({ "is_paused": self.paused })),
            "/collective_rpc" => {
                assert!(self.paused && body["method"] == "reload_weights", "{body}");
                self.load(&text(&body["kwargs"]["weights_path"]));
                (200, json!({ "results": [null] }))
            }
            "/v1/load_lora_adapter" => {
                assert!(self.paused && body["load_inplace"] == true, "{body}");
                self.load(&text(&body["lora_path"]));
                self.served = text(&body["lora_name"]);
                (200, Value::from("Success"))
            }
            // Blocks are in use.
            "/reset_prefix_cache" | "/reset_prefix_cache?reset_running_requests=true" => {
                (200, json!({ "success": false }))
            }
            "/update_weight_version" => {
                self.version = text(&body["new_version"]);
                (200, json!({ "success": true }))
            }
            "/update_weights_from_disk" => {
                assert!(self.paused && body["keep_pause"] == true, "{body}");
                self.load(&text(&body["model_path"]));
                self.version = text(&body["weight_version"]);
                (200, json!({ "success": true, "message": "" }))
            }
            "/inference/v1/generate" | "/generate" => (200, self.generate(body)),
            "/abort_requests" | "/abort_request" => (200, json!({})),
            _ => (404, json!({ "error": { "message": path } })),
        }
    }

    fn load(&mut self, directory: &str) {
        let directory = ModelDirectory::open(Path::new(directory)).unwrap();
        self.decoder = Some(Decoder::new(directory.config(), &directory.load_parameters().unwrap()));
    }

    fn generate(&mut self, body: &Value) -> Value {
        let vllm = self.kind == EngineKind::Vllm;
        let prompt = &body[if vllm { "token_ids" } else { "input_ids" }];
        let prompt: Vec<u32> = serde_json::from_value(prompt.clone()).unwrap();
        assert!(!vllm || body["model"] == self.served, "{body}");
        let rules = &body["sampling_params"];
        let number = |name: &str| rules[name].as_u64().unwrap();
        // A cache of prompts is that of the version.
        assert!(
            self.version == "default"
                || self.unversioned
                || body["cache_salt"] == format!("rlrun-v{}", self.version),
            "{body}"
        );
        let most = number(if vllm { "max_tokens" } else { "max_new_tokens" });
        let seed = number(if vllm { "seed" } else { "sampling_seed" });
        let temperature = rules["temperature"].as_f64().unwrap() as f32;
        let completion = |n: u64| {
            let (mut tokens, mut finish) = (Vec::new(), "length");
            for place in 0..most {
                let token = ((seed % 1000 + 31 * n + 17 * place) % 100) as u32;
                tokens.push(token);
                if rules["stop_token_ids"].as_array().unwrap().contains(&token.into()) {
                    finish = "stop";
                    break;
                }
                if self.abort_after == Some(tokens.len()) {
                    finish = "abort";
                    break;
                }
            }
            let logprobs = self.score(&prompt, &tokens, temperature);
            (tokens, logprobs, finish)
        };
        let all: Vec<_> = (0..number("n")).map(completion).collect();
        self.abort_after = None;
        let wanted = self.experts && (vllm || body["return_routed_experts"] == true);
        let routes = |tokens: &[u32]| wanted.then(|| self.routes(&[&prompt[..], tokens].concat()));
        let version = &self.version;
        let spans = |end: usize| match self.unversioned {
            true => Value::Null,
            false => json!([{ "version": version, "start": 0, "end": end }]),
        };
        if vllm {
            let choice = |(index, (tokens, logprobs, finish)): (usize, (Vec<u32>, Vec<f64>, &str))| {
                let content =
                    tokens.iter().zip(&logprobs).map(|(id, of)| json!({ "token_id": id, "logprob": of }));
                json!({
                    "index": index, "finish_reason": finish, "token_ids": tokens,
                    "logprobs": { "content": content.collect::<Vec<_>>() },
                    "weight_versions": spans(tokens.len()),
                    "routed_experts": routes(&tokens),
                })
            };
            // In any order.
            let choices: Vec<Value> = all.into_iter().enumerate().map(choice).rev().collect();
            return json!({ "choices": choices });
        }
        let one = |(tokens, logprobs, finish): (Vec<u32>, Vec<f64>, &str)| {
            let pairs = tokens.iter().zip(&logprobs).map(|(id, of)| json!([of, id, null]));
            json!({ "output_ids": tokens, "meta_info": {
                "finish_reason": { "type": finish }, "weight_version": (!self.unversioned).then_some(version),
                "output_token_logprobs": pairs.collect::<Vec<_>>(),
                "routed_experts": routes(&tokens),
            } })
        };
        let mut all: Vec<Value> = all.into_iter().map(one).collect();
        if all.len() == 1 { all.remove(0) } else { all.into() }
    }

    /// The experts of `tokens` as an engine writes them: of every layer, most likely first, with numbers of their places.
    fn routes(&self, tokens: &[u32]) -> String {
        let experts = routed(tokens);
        let [rows, layers, per_token] = [tokens.len() - 1, 2, 2];
        let bytes: Vec<u8> = match self.kind {
            EngineKind::Sglang => experts.iter().flat_map(|id| u32::from(*id).to_le_bytes()).collect(),
            EngineKind::Vllm => {
                let mut header = format!(
                    "{{'descr': '|u1', 'fortran_order': False, 'shape': ({rows}, {layers}, {per_token}), }}"
                );
                header += &" ".repeat(63 - (10 + header.len()) % 64);
                header.push('\n');
                let length = (header.len() as u16).to_le_bytes();
                let ids = experts.iter().map(|id| *id as u8);
                b"\x93NUMPY\x01\x00".iter().copied().chain(length).chain(header.bytes()).chain(ids).collect()
            }
        };
        STANDARD.encode(bytes)
    }

    fn score(&self, prompt: &[u32], tokens: &[u32], temperature: f32) -> Vec<f64> {
        let temperature = if temperature > 0.0 { temperature } else { 1.0 };
        let mut pack = Pack::new();
        pack.push(&[prompt, tokens].concat()).unwrap();
        let rows: Vec<usize> = (prompt.len() - 1..prompt.len() + tokens.len() - 1).collect();
        let targets: Vec<_> =
            tokens.iter().map(|token| Target { token: *token, temperature, kept: None }).collect();
        let decoder = self.decoder.as_ref().expect("no request comes before weights");
        let scored = decoder.score(&pack, &rows, &targets, &ThreadPool::single()).unwrap();
        scored.iter().map(|one| f64::from(one.logprob) + self.shift).collect()
    }
}

/// Two different experts of 4 for every token and each of two layers.
pub(super) fn routed(tokens: &[u32]) -> Vec<u16> {
    let of = |(place, token): (usize, &u32)| {
        let first = (*token as usize + 3 * place) as u16;
        [(first + 1) % 4, first % 4, (first + 3) % 4, (first + 2) % 4]
    };
    tokens[..tokens.len() - 1].iter().enumerate().flat_map(of).collect()
}
