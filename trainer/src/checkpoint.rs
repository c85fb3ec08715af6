//! Checkpoints: everything that a later process needs to go on as if nothing had happened.
//!
//! ```text
//! checkpoints/step_000120/
//!   model/                  Hugging Face directory: config, tokenizer, weights as f32
//!   adapter/                with LoRA: the adapter in PEFT's layout; `model/` has it merged in
//!   optimizer.safetensors   the state of every tensor that is trained
//!   critic/                 with a critic of its own: the same two of its network, as a sequence classifier
//!   trainer.json            format, version, updates, tokens
//!   manifest.json           a digest of every file
//! checkpoints/base/         with LoRA: the frozen model as a Hugging Face directory, written once
//! ```
//!
//! The frozen weights cannot be computed from the merged ones, which have fewer bits than the sum, so they are kept as
//! they were when training began. They take the space of one checkpoint, and a run stays whole when its directory moves
//! or the model that it started from goes away.
//!
//! Invariant: a checkpoint appears whole or not at all, and is read only if every file is the one that was written.
//! Random streams are counted from seed and group, and groups come from the buffer's journal, so neither has a state to
//! save.

mod whole;
mod writer;

use std::borrow::Cow;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::{ModelDirectory, ParameterSpec, Parameters, ThreadPool, atomic, files, manifest};
use serde::{Deserialize, Serialize};
use trajectory::PolicyVersion;

use crate::TrainerError;
use crate::learner::Learner;
use crate::lora::{Adapter, LoraConfig};
use crate::optimizer::{Optimizer, OptimizerConfig};
use crate::{lora_files, moment_files};

pub use whole::{Whole, check, set_aside_after};
pub use writer::{CheckpointTime, Writer, WriterConfig};

/// Version of the layout on disk: 2 has a manifest, 1 had none.
const FORMAT: u32 = 2;
/// The oldest layout that is read.
const OLDEST_FORMAT: u32 = 1;
/// File of the numbers.
const NUMBERS: &str = "trainer.json";

/// The numbers of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Layout on disk.
    pub format: u32,
    /// Training steps completed.
    pub version: PolicyVersion,
    /// Updates of the optimizer.
    pub updates: u64,
    /// Updates of the critic's optimizer.
    #[serde(default)]
    pub critic_updates: u64,
    /// Tokens trained on.
    pub trained_tokens: u64,
    /// Wall time of the run so far, seconds.
    pub time_s: f64,
}

/// A checkpoint that was read.
#[derive(Debug)]
pub struct Checkpoint {
    /// Its model directory, without weights.
    pub directory: ModelDirectory,
    /// Its weights.
    pub parameters: Parameters,
    /// Its adapter, if that is what the run trains.
    pub adapter: Option<Adapter>,
    /// Its optimizer.
    pub optimizer: Optimizer,
    /// Its numbers.
    pub state: TrainerState,
    /// Whether its files have digests.
    pub whole: Whole,
}

/// Which checkpoints stay when a new one is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// So many of the newest; at least one.
    pub keep_last: usize,
    /// Versions that are multiples of it, for ever; 0 for none.
    pub keep_every: u64,
}

/// What a checkpoint is made of, between two steps.
#[derive(Debug)]
pub struct Contents<'a> {
    /// The policy.
    pub policy: NetworkState<'a>,
    /// A critic of its own, if there is one.
    pub critic: Option<NetworkState<'a>>,
    /// The numbers.
    pub state: &'a TrainerState,
}

/// A network in training.
#[derive(Debug)]
pub struct NetworkState<'a> {
    /// Everything of its model that is no weight.
    pub directory: &'a Arc<ModelDirectory>,
    /// Its weights.
    pub parameters: Cow<'a, Parameters>,
    /// Its optimizer, with the state of every tensor that is trained.
    pub optimizer: Cow<'a, Optimizer>,
    /// What is trained in place of the weights, if anything; merged into them already.
    pub adapter: Option<&'a Adapter>,
}

impl Retention {
    /// The `keep_last` newest alone.
    #[must_use]
    pub fn last(keep_last: usize) -> Self {
        Self { keep_last, keep_every: 0 }
    }

    fn keeps(self, version: PolicyVersion) -> bool {
        self.keep_every > 0 && version.0.is_multiple_of(self.keep_every)
    }
}

impl<'a> NetworkState<'a> {
    /// That of `learner`, whose model is described by `directory`, collected from its ranks.
    ///
    /// # Errors
    /// If a rank is gone.
    pub fn of(directory: &'a Arc<ModelDirectory>, learner: &'a Learner) -> Result<Self, TrainerError> {
        let (parameters, optimizer) = (learner.parameters()?, learner.optimizer()?);
        Ok(Self { directory, parameters, optimizer, adapter: learner.adapter() })
    }

    /// Bytes of its files, without those that do not grow with the model.
    fn bytes(&self) -> u64 {
        let adapter = self.adapter.map_or(0, |adapter| adapter.values().len());
        let values = 4 * (self.parameters.values().len() + adapter) as u64;
        values.saturating_add(self.optimizer.config().state_bytes(self.trained()))
    }

    /// The tensors that the optimizer moves, in the order of its states.
    fn trained(&self) -> &[ParameterSpec] {
        self.adapter.map_or(self.parameters.layout().specs(), Adapter::specs)
    }
}

impl TrainerState {
    /// The state after `version` steps.
    #[must_use]
    pub fn new(version: PolicyVersion, updates: u64, trained_tokens: u64, time_s: f64) -> Self {
        Self { format: FORMAT, version, updates, critic_updates: 0, trained_tokens, time_s }
    }
}

/// Directory of the checkpoint after `version` steps.
#[must_use]
pub fn path(checkpoints: &Path, version: PolicyVersion) -> PathBuf {
    checkpoints.join(format!("step_{:06}", version.0))
}

/// The adapter in the directory of a checkpoint; not there without LoRA.
#[must_use]
pub fn adapter_path(checkpoint: &Path) -> PathBuf {
    checkpoint.join("adapter")
}

/// The frozen model of a run with LoRA.
#[must_use]
pub fn base_path(checkpoints: &Path) -> PathBuf {
    checkpoints.join("base")
}

/// The critic in the directory of a checkpoint; not there without one of its own.
#[must_use]
pub fn critic_path(checkpoint: &Path) -> PathBuf {
    checkpoint.join("critic")
}

/// Versions that have a checkpoint, ascending.
#[must_use]
pub fn list(checkpoints: &Path) -> Vec<PolicyVersion> {
    let Ok(entries) = std::fs::read_dir(checkpoints) else { return Vec::new() };
    let version = |entry: std::io::Result<std::fs::DirEntry>| {
        let name = entry.ok()?.file_name();
        name.to_str()?.strip_prefix("step_")?.parse().ok().map(PolicyVersion)
    };
    let mut versions: Vec<_> = entries.filter_map(version).collect();
    versions.sort_unstable();
    versions
}

/// Writes a checkpoint of `contents` if it is not there yet, then removes those that `retention` does not keep.
///
/// # Errors
/// If something cannot be written; nothing has the checkpoint's name then.
pub fn save(
    checkpoints: &Path,
    contents: &Contents<'_>,
    retention: Retention,
) -> Result<PathBuf, TrainerError> {
    let target = path(checkpoints, contents.state.version);
    if target.exists() {
        // A run goes on from its newest checkpoint, so this is the same state; to write it anew would mean a moment
        // without it, in which a crash loses what the buffer has already forgotten.
        return Ok(target);
    }
    write(checkpoints, &target, contents).map_err(|error| no_space(error, &target, contents))?;
    let versions = list(checkpoints);
    for old in &versions[..versions.len().saturating_sub(retention.keep_last.max(1))] {
        if *old != contents.state.version && !retention.keeps(*old) {
            remove(&path(checkpoints, *old))?;
        }
    }
    Ok(target)
}

fn write(checkpoints: &Path, target: &Path, contents: &Contents<'_>) -> Result<(), TrainerError> {
    let Contents { policy, critic, state } = contents;
    if let Some(adapter) = policy.adapter {
        save_base(checkpoints, policy.directory, || adapter.base_parameters(&policy.parameters))?;
    }
    Ok(atomic::directory(target, |dir| {
        write_network(dir, policy)?;
        if let Some(adapter) = policy.adapter {
            lora_files::write(&adapter_path(dir), adapter, &base_path(checkpoints))?;
            // One of its own: adapters are also read alone.
            manifest::write(&adapter_path(dir))?;
        }
        if let Some(critic) = critic {
            let dir = critic_path(dir);
            std::fs::create_dir(&dir).map_err(write_error(dir.clone()))?;
            write_network(&dir, critic)?;
        }
        let numbers = dir.join(NUMBERS);
        let json = serde_json::to_vec_pretty(state).unwrap_or_default();
        std::fs::write(&numbers, json).map_err(write_error(numbers.clone()))?;
        manifest::write(dir)?;
        fail::fail_point!("checkpoint-rename", |errno: Option<String>| {
            let number = errno.and_then(|number| number.parse().ok()).unwrap_or_default();
            Err(write_error(numbers.clone())(io::Error::from_raw_os_error(number)))
        });
        Ok(())
    })?)
}

/// Writes the weights of a network and the state of its optimizer.
fn write_network(dir: &Path, network: &NetworkState<'_>) -> Result<(), model::ModelError> {
    network.directory.save(&dir.join("model"), &network.parameters)?;
    let optimizer = dir.join("optimizer.safetensors");
    fail::fail_point!("checkpoint-write", |errno: Option<String>| {
        let number = errno.and_then(|number| number.parse().ok()).unwrap_or_default();
        Err(write_error(optimizer.clone())(io::Error::from_raw_os_error(number)))
    });
    moment_files::write(&optimizer, network.trained(), &network.optimizer)
        .map_err(write_error(optimizer.clone()))
}

/// `error`, or what a full disk means for the checkpoint `target`.
fn no_space(error: TrainerError, target: &Path, contents: &Contents<'_>) -> TrainerError {
    let TrainerError::Model(model::ModelError::Write { path, source }) = &error else { return error };
    let full = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded, io::ErrorKind::FileTooLarge];
    if !full.contains(&source.kind()) {
        return error;
    }
    let networks = [Some(&contents.policy), contents.critic.as_ref()];
    let bytes = networks.into_iter().flatten().map(NetworkState::bytes).fold(0, u64::saturating_add);
    let reason = format!(
        "takes {bytes} bytes, and the disk is full ({}: {source}); the checkpoint before it is whole: make room, or \
         lower checkpoint.keep_last, and go on with rlrun resume",
        path.display()
    );
    TrainerError::Checkpoint { path: target.to_owned(), reason }
}

fn write_error(path: PathBuf) -> impl FnOnce(std::io::Error) -> model::ModelError {
    move |source| model::ModelError::Write { path, source }
}

/// Writes the frozen model before the first checkpoint. What is there without any is of an attempt that was killed, and
/// may be of other settings.
fn save_base(
    checkpoints: &Path,
    directory: &ModelDirectory,
    base: impl FnOnce() -> Parameters,
) -> Result<(), TrainerError> {
    let path = base_path(checkpoints);
    if path.exists() {
        if !list(checkpoints).is_empty() {
            return Ok(());
        }
        remove(&path)?;
    }
    Ok(directory.save(&path, &base())?)
}

/// Reads the checkpoint in `dir`. Its files are compared with its manifest, if it has one.
///
/// # Errors
/// If a file is missing, broken or not the one that was written, the layout is of a newer rlrun, the state is of another
/// optimizer than `optimizer`, or another adapter was trained than `lora` (none if `None`).
pub fn load(
    dir: &Path,
    optimizer: OptimizerConfig,
    lora: Option<&LoraConfig>,
) -> Result<Checkpoint, TrainerError> {
    let whole = check(dir)?;
    // What is written from now on is of today's layout.
    let state = TrainerState { format: FORMAT, ..numbers(dir)? };
    let directory = ModelDirectory::open(&dir.join("model"))?;
    // What `check` has compared already is not compared again.
    let parameters = Parameters::load(directory.path(), directory.config())?;
    let adapter = load_adapter(dir, &parameters, lora)?;
    let specs = adapter.as_ref().map_or(parameters.layout().specs(), Adapter::specs);
    let states = moment_files::read(&dir.join("optimizer.safetensors"), specs, &optimizer)?;
    let optimizer = Optimizer::resume(optimizer, state.updates, states);
    Ok(Checkpoint { directory, parameters, adapter, optimizer, state, whole })
}

/// Reads the numbers of the checkpoint in `dir`.
fn numbers(dir: &Path) -> Result<TrainerState, TrainerError> {
    let path = dir.join(NUMBERS);
    let damaged = |reason| TrainerError::Damaged { checkpoint: dir.to_owned(), reason };
    let json = files::read(&path, files::MAX_JSON_BYTES)
        .map_err(|error| damaged(format!("{NUMBERS} cannot be read: {error}")))?;
    let state: TrainerState =
        serde_json::from_slice(&json).map_err(|error| damaged(format!("{NUMBERS} is not valid: {error}")))?;
    if (OLDEST_FORMAT..=FORMAT).contains(&state.format) {
        return Ok(state);
    }
    let found = state.format;
    let reason = format!(
        "has format {found}, this rlrun reads {OLDEST_FORMAT} to {FORMAT}; use the rlrun that wrote it"
    );
    Err(broken(&path, reason))
}

/// Reads the critic of the checkpoint in `dir`, whose numbers are `state`, with its directory and its optimizer.
///
/// # Errors
/// If it is not there or broken, or its optimizer is another than `optimizer`.
pub fn load_critic(
    dir: &Path,
    state: &TrainerState,
    optimizer: OptimizerConfig,
) -> Result<(ModelDirectory, Parameters, Optimizer), TrainerError> {
    let path = critic_path(dir);
    if !path.exists() {
        let reason = "is not there, so the run has no critic of its own, but the recipe has one; start a new run from \
                      the checkpoint's model";
        return Err(broken(&path, reason.to_owned()));
    }
    let directory = ModelDirectory::open(&path.join("model"))?;
    let parameters = directory.load_parameters()?;
    let specs = parameters.layout().specs();
    let states = moment_files::read(&path.join("optimizer.safetensors"), specs, &optimizer)?;
    Ok((directory, parameters, Optimizer::resume(optimizer, state.critic_updates, states)))
}

/// The adapter of a checkpoint whose merged weights are `merged`.
fn load_adapter(
    dir: &Path,
    merged: &Parameters,
    lora: Option<&LoraConfig>,
) -> Result<Option<Adapter>, TrainerError> {
    let path = adapter_path(dir);
    let Some(lora) = lora else {
        if path.exists() {
            let reason = "is there, so the run trains LoRA, but the recipe has no section `[lora]`; write it, or start \
                          a new run from the checkpoint's model";
            return Err(TrainerError::Adapter { path, reason: reason.to_owned() });
        }
        return Ok(None);
    };
    if !path.exists() {
        let reason = "is not there, so the run trains all weights, but the recipe has a section `[lora]`; remove it, or \
                      start a new run from the checkpoint's model";
        return Err(TrainerError::Adapter { path, reason: reason.to_owned() });
    }
    let base = dir.parent().map(base_path).unwrap_or_default();
    let mut parameters = ModelDirectory::open(&base)?.load_parameters()?;
    if parameters.layout() != merged.layout() {
        return Err(broken(&base, "is a model of another shape than the checkpoint".to_owned()));
    }
    let adapter = Adapter::open(&path, lora, &parameters)?;
    adapter.merge(parameters.values_mut(), &ThreadPool::single());
    if parameters.values() != merged.values() {
        let reason = format!(
            "with {} merged in is not the model of the checkpoint; restore the one that the run has written",
            path.display()
        );
        return Err(broken(&base, reason));
    }
    Ok(Some(adapter))
}

fn broken(path: &Path, reason: String) -> TrainerError {
    TrainerError::Checkpoint { path: path.to_owned(), reason }
}

fn remove(dir: &Path) -> Result<(), TrainerError> {
    std::fs::remove_dir_all(dir).map_err(|error| TrainerError::Checkpoint {
        path: dir.to_owned(),
        reason: format!("cannot be removed: {error}; check the permissions"),
    })
}
