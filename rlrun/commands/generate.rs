//! `rlrun generate`: a model answers prompts, or chats.

use std::io::{BufRead, Write};
use std::sync::Arc;

use device::Device;
use model::{ModelDirectory, Quantization, Sampling, SharedCores, ThreadPool};
use rollout::{Engine, EngineConfig, Network, SampleRequest, ServeOn, StopRules};
use trajectory::{GroupId, Message, PolicyVersion, Prompt};

use super::checkpoint_paths::model_of;
use crate::args::GenerateArgs;
use crate::failure::Failure;
use crate::huggingface::HuggingFace;
use crate::program::Program;

/// Answers the prompts of `args`, or those of the terminal until the end of input.
pub(super) fn generate(args: &GenerateArgs, program: &Program) -> Result<String, Failure> {
    let mut generator = TextGenerator::open(args, program)?;
    if !args.interactive {
        let answers: Result<Vec<String>, Failure> =
            args.prompts.iter().map(|prompt| generator.answer(&generator.prompt(prompt, &[]))).collect();
        return Ok(answers?.join("\n"));
    }
    let system = |source| Failure::System { what: "write to the terminal".to_owned(), source };
    let mut out = std::io::stdout();
    let mut history = Vec::new();
    write!(out, "> ").and_then(|()| out.flush()).map_err(system)?;
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(system)?;
        let answer = generator.answer(&generator.prompt(&line, &history))?;
        write!(out, "{answer}\n> ").and_then(|()| out.flush()).map_err(system)?;
        history.extend([Message::new("user", line), Message::new("assistant", answer)]);
    }
    Ok(String::new())
}

/// Generates the answers to prompts, one by one.
struct TextGenerator {
    directory: ModelDirectory,
    engine: Engine,
    sampling: Sampling,
    max_tokens: usize,
    asked: u64,
}

impl TextGenerator {
    fn open(args: &GenerateArgs, program: &Program) -> Result<Self, Failure> {
        let target = HuggingFace::of(program).model(&args.target)?;
        let directory = ModelDirectory::open(&model_of(&target, None)?)?;
        let parameters = directory.load_parameters()?;
        let context = directory.config().max_context();
        let max_tokens = args.max_tokens.min(context.saturating_sub(1)).max(1);
        let device = args.on.device()?;
        let config = EngineConfig {
            max_running: 1,
            prefill_chunk: EngineConfig::default_prefill_chunk(device.is_some()),
            kv_cache_tokens: None,
            max_prompt_length: context,
            max_completion_length: max_tokens,
            max_episode_length: 0,
            max_samples: 1,
            seed: 0,
        };
        let stop = StopRules {
            token_ids: directory.stop_token_ids().to_vec(),
            strings: Vec::new(),
            tokenizer: directory.tokenizer().clone(),
        };
        let on = match device {
            None => ServeOn::Host(Quantization::None),
            Some((place, dtype)) => ServeOn::Device(Device::open(place)?, dtype),
        };
        let (network, cores) = (Network::new(&on, directory.config(), &parameters)?, SharedCores::all());
        let engine = Engine::new(config, stop, network, PolicyVersion::default())?
            .on(Arc::new(ThreadPool::new(&cores, cores.total())));
        let sampling = Sampling { temperature: args.temperature as f32, ..Sampling::PLAIN };
        Ok(Self { directory, engine, sampling, max_tokens, asked: 0 })
    }

    /// Messages for a model with a chat template, text for any other.
    fn prompt(&self, text: &str, history: &[Message]) -> Prompt {
        if self.directory.template().is_none() {
            return Prompt::Text(text.to_owned());
        }
        let mut messages = history.to_vec();
        messages.push(Message::new("user", text));
        Prompt::Messages(messages)
    }

    fn answer(&mut self, prompt: &Prompt) -> Result<String, Failure> {
        let prompt = self.directory.encode_prompt(prompt)?;
        let context = self.directory.config().max_context();
        // The engine refuses a prompt that fills the context, with the numbers.
        let max_completion_length = self.max_tokens.min(context.saturating_sub(prompt.len())).max(1);
        let (group, sampling) = (GroupId(self.asked), self.sampling);
        let baseline = false;
        self.engine.submit(SampleRequest {
            group,
            prompt,
            samples: 1,
            sampling,
            max_completion_length,
            baseline,
            keep_cache: false,
            first_index: 0,
            turn: 0,
        })?;
        self.asked += 1;
        let mut text = String::new();
        while !self.engine.is_idle() {
            for completion in self.engine.step()? {
                text = completion.text;
            }
        }
        Ok(text)
    }
}
