//! `rlrun generate`: a model answers prompts, or chats. That of a run with an environment plays an episode for every prompt.

use std::io::{BufRead, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use device::Device;
use environments::EnvironmentContext;
use model::{ModelDirectory, Quantization, Sampling, SharedCores, ThreadPool};
use rollout::{
    Engine, EngineConfig, Episode, EpisodeConfig, EpisodeDriver, LocalSampler, RequestOptions, SampleRequest,
    Sampler, ServeOn, StopRules,
};
use trajectory::{GroupId, Message, PolicyVersion, Prompt, Task, TaskId};

use super::checkpoint_paths::{model_of, network_of};
use super::{load, scratch_directory};
use crate::acting::Acting;
use crate::args::GenerateArgs;
use crate::failure::Failure;
use crate::huggingface::HuggingFace;
use crate::prepare::RewardRuntime;
use crate::program::Program;
use crate::recipe::{DataSource, Recipe};

/// Longest wait for an environment before the command polls again.
const LOOK_UP: Duration = Duration::from_millis(50);

/// Answers the prompts of `args`, or those of the terminal until the end of input.
pub(super) fn generate(args: &GenerateArgs, program: &Program) -> Result<String, Failure> {
    let target = HuggingFace::of(program).model(&args.target)?;
    let directory = ModelDirectory::open(&model_of(&target, None)?)?;
    let played = recipe_with_environment(&args.target, directory.path(), program)?;
    let stop = played.as_ref().map(|recipe| recipe.stop_rules(&directory));
    let mut generator = TextGenerator::open(args, directory, stop)?;
    let mut player = played.map(|recipe| EpisodePlayer::open(recipe, &generator, program)).transpose()?;
    if !args.interactive {
        let answer = |prompt: &String| match &mut player {
            Some(player) => player.play(&mut generator, prompt),
            None => generator.answer(&generator.prompt(prompt, &[])),
        };
        let answers: Result<Vec<String>, Failure> = args.prompts.iter().map(answer).collect();
        return Ok(answers?.join("\n"));
    }
    let system = |source| Failure::System { what: "write to the terminal".to_owned(), source };
    let mut out = std::io::stdout();
    let mut history = Vec::new();
    write!(out, "> ").and_then(|()| out.flush()).map_err(system)?;
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(system)?;
        if let Some(player) = &mut player {
            let played = player.play(&mut generator, &line)?;
            write!(out, "{played}\n> ").and_then(|()| out.flush()).map_err(system)?;
            continue;
        }
        let answer = generator.answer(&generator.prompt(&line, &history))?;
        write!(out, "{answer}\n> ").and_then(|()| out.flush()).map_err(system)?;
        history.extend([Message::new("user", line), Message::new("assistant", answer)]);
    }
    Ok(String::new())
}

/// Generates the answers to prompts, one by one.
struct TextGenerator {
    directory: ModelDirectory,
    sampler: LocalSampler,
    sampling: Sampling,
    max_tokens: usize,
    asked: u64,
}

impl TextGenerator {
    /// Without `stop`, only the stop tokens of the model end an answer.
    fn open(
        args: &GenerateArgs,
        directory: ModelDirectory,
        stop: Option<StopRules>,
    ) -> Result<Self, Failure> {
        let context = directory.config().max_context();
        let max_tokens = args.max_tokens.min(context.saturating_sub(1)).max(1);
        let device = args.on.device()?;
        let config = EngineConfig {
            max_running: 1,
            prefill_chunk: EngineConfig::default_prefill_chunk(device.is_some()),
            kv_cache_tokens: None,
            max_prompt_length: context,
            max_completion_length: max_tokens,
            max_episode_length: context,
            max_samples: 1,
            seed: 0,
        };
        let stop = stop.unwrap_or_else(|| StopRules {
            token_ids: directory.stop_token_ids().to_vec(),
            strings: Vec::new(),
            tokenizer: directory.tokenizer().clone(),
        });
        let on = match device {
            None => ServeOn::Host(Quantization::None),
            Some((place, dtype)) => ServeOn::Device(Device::open(place)?, dtype),
        };
        let (network, cores) = (network_of(&directory, &on)?, SharedCores::all());
        let engine = Engine::new(config, stop, network, PolicyVersion::default())?
            .on(Arc::new(ThreadPool::new(&cores, cores.total())));
        let sampling = Sampling { temperature: args.temperature as f32, ..Sampling::PLAIN };
        Ok(Self { directory, sampler: LocalSampler::fixed(engine), sampling, max_tokens, asked: 0 })
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
        let request = self.request(prompt, max_completion_length);
        self.sampler.submit(request)?;
        let mut text = String::new();
        while !self.sampler.is_idle() {
            for completion in self.sampler.poll(LOOK_UP)? {
                text = completion.text;
            }
        }
        Ok(text)
    }

    fn request(&mut self, prompt: Vec<u32>, max_completion_length: usize) -> SampleRequest {
        let group = GroupId(self.asked);
        self.asked += 1;
        SampleRequest {
            group,
            prompt,
            samples: 1,
            sampling: self.sampling,
            max_completion_length,
            baseline: false,
            keep_cache: false,
            options: RequestOptions::default(),
            first_index: 0,
            turn: 0,
        }
    }
}

/// The recipe of a run whose policy acts in an environment; `None` of other runs and of models. Its model is the `trained` one,
/// so the model that the run started from may be gone.
fn recipe_with_environment(
    target: &Path,
    trained: &Path,
    program: &Program,
) -> Result<Option<Recipe>, Failure> {
    let resolved = target.join("resolved.toml");
    let text = std::fs::read_to_string(&resolved).unwrap_or_default();
    let table = text.parse::<toml::Table>().unwrap_or_default();
    if !table.contains_key("environment") {
        return Ok(None);
    }
    let started_from = table.get("model").and_then(|model| model.get("path"));
    let path = || format!("model.path={}", toml::Value::from(trained.display().to_string()));
    let sets: Vec<String> = started_from.map(|_| path()).into_iter().collect();
    Ok(Some(load(&resolved, &sets, program)?.0))
}

/// Plays episodes in the environment of a run.
struct EpisodePlayer {
    recipe: Recipe,
    acting: Acting,
    episodes: EpisodeConfig,
    runtime: RewardRuntime,
    /// Logs of the environment; there until it is dropped.
    _scratch: tempfile::TempDir,
}

impl EpisodePlayer {
    fn open(recipe: Recipe, generator: &TextGenerator, program: &Program) -> Result<Self, Failure> {
        let (runtime, scratch) = (RewardRuntime::new(program, &SharedCores::all())?, scratch_directory()?);
        let context = EnvironmentContext {
            format: None,
            runtime: Some(runtime.handle().clone()),
            variables: Arc::clone(program.environment()),
            scratch: scratch.path().to_path_buf(),
        };
        let directory = &generator.directory;
        let acting = Acting::new(&recipe, directory, program.environments(), &context)?;
        let max_tokens = recipe.episode_tokens(directory.config().max_context());
        let episodes = acting.episodes(max_tokens, recipe.wait());
        Ok(Self { recipe, acting, episodes, runtime, _scratch: scratch })
    }

    /// One episode as text: what every role said and read. `text` is the prompt of the task; for an environment that makes its
    /// own tasks it is their number.
    fn play(&mut self, generator: &mut TextGenerator, text: &str) -> Result<String, Failure> {
        let number = text.trim().parse().unwrap_or(generator.asked);
        let prompt = match &self.recipe.data.source {
            DataSource::Seeds(seeds) => seeds.prompt.clone().unwrap_or_default(),
            _ => text.to_owned(),
        };
        let task = Task {
            id: TaskId(number),
            prompt: self.recipe.conversation(Prompt::Text(prompt)),
            answer: None,
            columns: serde_json::Map::from_iter([("seed".to_owned(), number.into())]),
        };
        let task = Arc::new(self.acting.described(task)?);
        let prompt = self.acting.encoded(&generator.directory, &task)?;
        let longest = self.recipe.rollout.max_completion_length.min(generator.max_tokens);
        let request = generator.request(prompt, longest);
        let mut driver = EpisodeDriver::new(self.episodes.clone(), self.runtime.handle().clone());
        let sampler = &mut generator.sampler;
        driver.start(sampler, &task, request)?;
        let mut ended = Vec::new();
        while !driver.is_idle() {
            ended.extend(driver.poll(sampler, LOOK_UP)?);
        }
        ended.sort_by_key(|episode| episode.index);
        Ok(ended.iter().map(shown).collect::<Vec<_>>().join("\n"))
    }
}

/// What a role said and read, and how it ended.
fn shown(episode: &Episode) -> String {
    let role = episode.role.as_ref().map_or(String::new(), |role| format!("[{role}] "));
    let rewards: Vec<f64> = episode.turns.iter().filter_map(|turn| turn.reward).collect();
    let rewards = match rewards.is_empty() {
        true => String::new(),
        false => format!(", rewards of turns {:.3}", rewards.iter().sum::<f64>()),
    };
    let (turns, end) = (episode.turns.len(), episode.end.name());
    format!("{role}{}\n({turns} turns{rewards}, ended by {end})", episode.transcript)
}
