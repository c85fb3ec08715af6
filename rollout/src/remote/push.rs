//! Weights for engines of others: a directory that they load, with all weights or a LoRA adapter, and the proof that they serve it.
//!
//! Invariant: an engine counts as serving a version only after its log-probabilities of the probe prompts are those that this
//! process computes with the weights, within the bound. An engine that was paused is resumed, whatever failed meanwhile.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use model::{
    Decoder, Layout, ModelDirectory, ModelError, Pack, Parameters, Sampling, Target, ThreadPool, WeightDtype,
};
use serde_json::Value;
use trajectory::PolicyVersion;
use weights::Snapshot;

use super::client::{EngineClient, EngineFailure};
use super::protocol::{ADAPTER, EngineCall, EngineKind, EngineRequest};
use crate::RolloutError;
use crate::sampler::OnUpdate;

/// Deadline of a call that needs no work.
const CALL: Duration = Duration::from_secs(60);

/// How weights reach engines, and how that is checked.
#[derive(Clone, Debug)]
pub struct PushConfig {
    /// Directory that this process and all engines see.
    pub directory: PathBuf,
    /// Number format of the files.
    pub dtype: WeightDtype,
    /// Whether engines, which must be vLLM, have the base model and load the LoRA adapter of a version alone.
    pub adapter: bool,
    /// `[3][P]` prompts whose completions are compared.
    pub probes: Vec<Vec<u32>>,
    /// Tokens that an engine generates after each: enough to leave what the policy is sure of.
    pub probe_tokens: usize,
    /// Largest difference of a log-probability, nats.
    pub bound: f64,
    /// Deadline for loading a version.
    pub wait: Duration,
}

/// A version on the disk, with what is needed to check an engine that has loaded it.
#[derive(Debug)]
pub(super) struct WrittenVersion {
    pub(super) version: PolicyVersion,
    files: WrittenFiles,
    decoder: Decoder,
}

/// What an engine loads: a directory.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum WrittenFiles {
    /// All weights in Hugging Face form.
    Weights(PathBuf),
    /// A LoRA adapter in PEFT's layout, for the model that the engine was started with.
    Adapter(PathBuf),
}

impl WrittenFiles {
    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Weights(path) | Self::Adapter(path) => path,
        }
    }
}

impl WrittenVersion {
    /// The name by which an engine samples from this version, which serves the model `base`.
    pub(super) fn served_name<'a>(&self, base: &'a str) -> &'a str {
        match self.files {
            WrittenFiles::Weights(_) => base,
            WrittenFiles::Adapter(_) => ADAPTER,
        }
    }
}

/// Writes and loads versions.
#[derive(Debug)]
pub(super) struct WeightPusher {
    pub(super) kind: EngineKind,
    pub(super) config: PushConfig,
    pub(super) model: Arc<ModelDirectory>,
    /// Temperature of training samples: engines report log-probabilities of it.
    pub(super) temperature: f32,
    pub(super) pool: Arc<ThreadPool>,
    /// Time without an answer after which an engine is asked whether something has paused it.
    pub(super) quiet: Duration,
}

/// An engine has loaded a version and proven it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct ProvenLoad {
    /// How long it stood still.
    pub(super) stalled: Duration,
    /// Whether another program had paused it meanwhile.
    pub(super) resumed: bool,
}

impl WeightPusher {
    /// Writes `snapshot` into a directory of its own; removes all but the version before.
    ///
    /// # Errors
    /// A directory that cannot be written, weights of another model.
    pub(super) fn write(
        &self,
        snapshot: &Snapshot,
        before: Option<PolicyVersion>,
    ) -> Result<WrittenVersion, RolloutError> {
        let layout = Arc::new(Layout::new(self.model.config()));
        let parameters = Parameters::from_values(layout, snapshot.values.to_vec())?;
        let version = snapshot.version;
        let directory = &self.config.directory;
        let failed = |path: &Path| {
            let path = path.to_path_buf();
            move |source| RolloutError::Model(ModelError::Write { path, source })
        };
        std::fs::create_dir_all(directory).map_err(failed(directory))?;
        let kept = [Some(version), before].map(|version| version.map(name_of));
        for entry in std::fs::read_dir(directory).map_err(failed(directory))?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let stale = name.starts_with(PREFIX) && !kept.iter().flatten().any(|kept| *kept == name);
            if stale {
                // What an engine still has open stays readable for it; what cannot be removed is tried again.
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
        let path = directory.join(name_of(version));
        if path.exists() {
            // Of an earlier process of the run: the same version may have other weights.
            std::fs::remove_dir_all(&path).map_err(failed(&path))?;
        }
        let absolute = std::path::absolute(&path).unwrap_or_else(|_| path.clone());
        let files = match (&snapshot.adapter, self.config.adapter) {
            (_, false) => {
                self.model.export(&path, &parameters, self.config.dtype)?;
                WrittenFiles::Weights(absolute)
            }
            (Some(adapter), true) => {
                adapter.write(&path).map_err(failed(&path))?;
                WrittenFiles::Adapter(absolute)
            }
            (None, true) => {
                let source = io::Error::other("the trainer has published no adapter");
                return Err(failed(&path)(source));
            }
        };
        Ok(WrittenVersion { version, files, decoder: Decoder::new(self.model.config(), &parameters) })
    }

    /// Loads `written` into `engine`, which serves the model `served`.
    ///
    /// # Errors
    /// What the engine answered; log-probabilities that are not those of the weights.
    pub(super) fn load(
        &self,
        engine: &EngineClient,
        served: &str,
        written: &WrittenVersion,
        on_update: OnUpdate,
    ) -> Result<ProvenLoad, EngineFailure> {
        let (start, path) = (Instant::now(), written.files.path());
        let paused = engine.call(&self.kind.pause(), CALL);
        let loaded = paused.and_then(|_| {
            let calls = self.kind.load(&written.files, written.version, on_update);
            let answer = |call: &EngineCall| {
                let answer = engine.call(call, self.config.wait);
                answer.map_err(|failure| if call.names(path) { failure.about(path) } else { failure })
            };
            calls.iter().try_for_each(|call| match answer(call)? {
                answer if answer["success"] == false && !call.path.contains("prefix_cache") => {
                    Err(EngineFailure::Refused(format!("answers {} with {answer}", call.path)))
                }
                _ => Ok(()),
            })
        });
        let resumed =
            engine.call(&self.kind.resume(), CALL).or_else(|_| engine.call(&self.kind.resume(), CALL));
        loaded?;
        resumed?;
        let stalled = start.elapsed();
        let resumed = self.probe(engine, served, written)?;
        Ok(ProvenLoad { stalled, resumed })
    }

    /// Compares log-probabilities of the engine with those of the weights. Returns whether it had to be resumed.
    fn probe(
        &self,
        engine: &EngineClient,
        served: &str,
        written: &WrittenVersion,
    ) -> Result<bool, EngineFailure> {
        let mut resumed = false;
        let sampling = Sampling { temperature: self.temperature, ..Sampling::PLAIN };
        for (number, prompt) in self.config.probes.iter().enumerate() {
            let request = EngineRequest {
                id: format!("rlrun-probe-{}-{number}", written.version.0),
                token_ids: prompt.clone(),
                samples: 1,
                sampling,
                max_tokens: self.config.probe_tokens,
                min_tokens: 0,
                stop_token_ids: Vec::new(),
                seed: written.version.0 ^ number as u64,
                experts: false,
                version: written.version,
            };
            let answer = self.patiently(engine, &self.kind.generate(served, &request), &mut resumed)?;
            let refused = |reason: String| EngineFailure::Refused(reason);
            let completions = self.kind.completions(&answer, written.version)?;
            let [completion] = &completions[..] else {
                return Err(refused(format!("answers one prompt with {} completions", completions.len())));
            };
            let own = self.score(written, prompt, &completion.token_ids).map_err(refused)?;
            for ((token, theirs), own) in completion.token_ids.iter().zip(&completion.logprobs).zip(own) {
                let difference = (f64::from(*theirs) - f64::from(own)).abs();
                if difference.is_nan() || difference > self.config.bound {
                    let (version, bound, temperature) =
                        (written.version, self.config.bound, self.temperature);
                    return Err(refused(format!(
                        "gives token {token} the log-probability {theirs:.4} with the weights of {version}, and rlrun \
                         {own:.4} at temperature {temperature}: more than {bound} apart, so it serves other weights, \
                         another number format, or log-probabilities of another temperature"
                    )));
                }
            }
        }
        Ok(resumed)
    }

    /// Makes `call` with growing deadlines; between two tries an engine that something has paused is resumed.
    fn patiently(
        &self,
        engine: &EngineClient,
        call: &EngineCall,
        resumed: &mut bool,
    ) -> Result<Value, EngineFailure> {
        let mut deadline = self.quiet;
        loop {
            let answer = engine.call(call, deadline.min(self.config.wait));
            let Err(EngineFailure::Gone(_)) = &answer else { return answer };
            if deadline >= self.config.wait {
                return answer;
            }
            if is_paused(engine, self.kind)? {
                engine.call(&self.kind.resume(), CALL)?;
                *resumed = true;
            }
            deadline *= 2;
        }
    }

    /// Log-probabilities `[C]` of `completion [C]` after `prompt`, nats.
    fn score(
        &self,
        written: &WrittenVersion,
        prompt: &[u32],
        completion: &[u32],
    ) -> Result<Vec<f32>, String> {
        let mut pack = Pack::new();
        let tokens = [prompt, completion].concat();
        pack.push(&tokens).map_err(|error| error.to_string())?;
        let rows: Vec<usize> = (prompt.len() - 1..tokens.len() - 1).collect();
        let temperature = if self.temperature > 0.0 { self.temperature } else { 1.0 };
        let targets: Vec<Target<'_>> =
            completion.iter().map(|token| Target { token: *token, temperature, kept: None }).collect();
        let scored = written.decoder.score(&pack, &rows, &targets, &self.pool);
        let scored = scored.map_err(|error| format!("answers with tokens of another vocabulary: {error}"))?;
        Ok(scored.iter().map(|prediction| prediction.logprob).collect())
    }
}

/// Whether something has paused the engine; false if it cannot be asked.
///
/// # Errors
/// It does not answer.
pub(super) fn is_paused(engine: &EngineClient, kind: EngineKind) -> Result<bool, EngineFailure> {
    let Some(path) = kind.is_paused() else { return Ok(false) };
    Ok(engine.get(path, CALL)?["is_paused"] == true)
}

/// What the name of a directory of weights begins with.
const PREFIX: &str = "version_";

fn name_of(version: PolicyVersion) -> String {
    format!("{PREFIX}{:06}", version.0)
}
