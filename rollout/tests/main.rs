//! The engine on a tiny random model, scoring beside it, and a scripted sampler in place of an engine.

mod across;
mod adapter_slots;
mod adapters;
mod beside;
mod curated;
mod datasets;
mod engine;
mod episodes;
#[cfg(feature = "emulator")]
mod on_device;
mod overdue;
mod ranks;
mod recurrent;
mod remote;
mod replayed;
mod requests;
mod roles;
mod sampler;
mod scarce;
mod scoring;
mod speculation;
mod templates;
mod updates;

use model::{Architecture, Config, Decoder, ModelDirectory, Parameters, Sampling, Sizes};
use rollout::{Completion, Engine, EngineConfig, RequestOptions, SampleRequest, StopRules};
use trajectory::{GroupId, PolicyVersion};

/// A fresh character-level model in a directory that goes with it.
struct Model {
    directory: ModelDirectory,
    _files: tempfile::TempDir,
}

impl Model {
    fn new() -> Self {
        Self::with_context(128)
    }

    fn with_context(tokens: usize) -> Self {
        Self::of_family(Architecture::Qwen2, tokens)
    }

    fn of_family(family: Architecture, tokens: usize) -> Self {
        let files = tempfile::tempdir().unwrap();
        let mut config = Config::fresh(&Sizes {
            vocab_size: 100,
            hidden_size: 32,
            intermediate_size: 48,
            num_layers: 2,
            num_heads: 4,
            num_kv_heads: 2,
            max_position_embeddings: tokens,
        })
        .of_family(family);
        config.initializer_range = 0.3;
        let directory = ModelDirectory::fresh(&files.path().join("model"), &config, 11).unwrap();
        Self { directory, _files: files }
    }

    fn parameters(&self) -> Parameters {
        self.directory.load_parameters().unwrap()
    }

    /// Other weights of the same shape.
    fn other_parameters(&self) -> Parameters {
        Parameters::random(self.directory.config(), 99)
    }

    fn decoder(&self, parameters: &Parameters) -> Decoder {
        Decoder::new(self.directory.config(), parameters)
    }

    fn stop(&self, strings: &[&str]) -> StopRules {
        StopRules {
            token_ids: self.directory.stop_token_ids().to_vec(),
            strings: strings.iter().map(ToString::to_string).collect(),
            tokenizer: self.directory.tokenizer().clone(),
        }
    }

    fn engine(&self, config: EngineConfig, strings: &[&str]) -> Engine {
        Engine::new(config, self.stop(strings), self.decoder(&self.parameters()), PolicyVersion(0)).unwrap()
    }
}

const CONFIG: EngineConfig = EngineConfig {
    max_running: 8,
    prefill_chunk: 16,
    kv_cache_tokens: None,
    max_prompt_length: 40,
    max_completion_length: 24,
    max_episode_length: 0,
    max_samples: 8,
    seed: 3,
};

/// A request whose prompt is made of its number.
fn request(group: u64, samples: usize, sampling: Sampling) -> SampleRequest {
    let length = 1 + group * 7 % 38;
    SampleRequest {
        group: GroupId(group),
        prompt: (0..length).map(|i| 4 + ((i * 13 + group * 5) % 90) as u32).collect(),
        first_index: 0,
        turn: 0,
        samples,
        sampling,
        max_completion_length: 24,
        baseline: false,
        keep_cache: false,
        options: RequestOptions::default(),
    }
}

/// What was sampled, whatever of the prompts was in the KV cache.
fn sampled(completions: Vec<Completion>) -> Vec<Completion> {
    completions.into_iter().map(|completion| Completion { prefill: Vec::new(), ..completion }).collect()
}

/// Submits each of `requests` as soon as the engine has capacity for it and returns all completions by group and index.
fn complete(engine: &mut Engine, requests: Vec<SampleRequest>) -> Vec<Completion> {
    let mut waiting = requests.into_iter().peekable();
    let mut completions = Vec::new();
    while waiting.peek().is_some() || !engine.is_idle() {
        while let Some(request) = waiting.next_if(|request| engine.has_capacity(request.samples)) {
            engine.submit(request).unwrap();
        }
        completions.extend(engine.step().unwrap());
    }
    completions.sort_by_key(|c| (c.group, c.index));
    completions
}
