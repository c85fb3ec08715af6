//! Checkpoints: the complete state of the trainer, from which a later process resumes with the same bits.
//!
//! ```text
//! checkpoints/step_000120/
//!   model/                  Hugging Face directory: config, tokenizer, f32 master weights
//!   adapter/                with LoRA: the adapter in PEFT's layout; `model/` has it merged
//!   optimizer.safetensors   optimizer state of every trained tensor
//!   critic/                 with a separate critic: its model and optimizer, as a sequence classifier
//!   trainer.json            format, version, updates, tokens
//!   island.bin              with slow links: outer weights, residual, and the exchange under way
//!   manifest.json           a digest of every file
//! checkpoints/base/         with LoRA: the frozen model as a Hugging Face directory, written once
//! ```
//!
//! If the frozen weights stay quantised, `base/` has a copy of their files, and `model/` has no weights.
//!
//! With LoRA the frozen weights cannot be computed from the merged ones, which were rounded, so they are stored as they
//! were when training began. They take the space of one checkpoint. A run stays complete if its directory moves or its
//! original model is deleted.
//!
//! Invariant: a checkpoint is complete or absent, and is read only if every file matches the manifest. Random streams
//! are derived from seed and group number, and groups are in the buffer's journal, so neither needs saved state.

mod integrity;
mod writer;

use std::borrow::Cow;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::{
    AdaptedBase, FrozenParameters, ModelDirectory, ParameterSpec, Parameters, ThreadPool, atomic, files,
    manifest,
};
use serde::{Deserialize, Serialize};
use trajectory::PolicyVersion;

use crate::TrainerError;
use crate::learner::Learner;
use crate::lora::{Adapter, LoraConfig};
use crate::optimizer::{Optimizer, OptimizerConfig};
use crate::state_weights::StateWeights;
use crate::{lora_files, optimizer_files};

pub use integrity::{CheckpointIntegrity, check, set_aside_after};
pub(crate) use writer::NetworkCopy;
pub use writer::{CheckpointArchive, CheckpointTime, CheckpointWriter, CheckpointWriterConfig};

/// Version of the layout on disk: format 2 has a manifest, format 1 had none.
const FORMAT: u32 = 2;
/// The oldest format that can be read.
const OLDEST_FORMAT: u32 = 1;
/// File of the trainer's counters.
const NUMBERS: &str = "trainer.json";
/// File of the state of an island.
const ISLAND: &str = "island.bin";

/// Counters of the trainer at a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Format of the layout on disk.
    pub format: u32,
    /// Training steps completed.
    pub version: PolicyVersion,
    /// Updates of the policy's optimizer.
    pub updates: u64,
    /// Updates of the critic's optimizer.
    #[serde(default)]
    pub critic_updates: u64,
    /// Tokens trained on.
    pub trained_tokens: u64,
    /// Wall time of the run so far, seconds.
    pub time_s: f64,
}

/// A checkpoint that was loaded.
#[derive(Debug)]
pub struct Checkpoint {
    /// Its model directory without weights.
    pub directory: ModelDirectory,
    /// Its weights.
    pub weights: StateWeights,
    /// Its LoRA adapter, if the run trains one.
    pub adapter: Option<Adapter>,
    /// Its optimizer state.
    pub optimizer: Optimizer,
    /// Its counters.
    pub state: TrainerState,
    /// The state of an island, if the run is one.
    pub island: Option<Vec<u8>>,
    /// Whether its files were compared with digests.
    pub integrity: CheckpointIntegrity,
}

/// A separate critic that was loaded from a checkpoint.
#[derive(Debug)]
pub struct CriticCheckpoint {
    /// Its model directory without weights.
    pub directory: ModelDirectory,
    /// Its weights: the f32 master weights.
    pub parameters: Parameters,
    /// Its optimizer state.
    pub optimizer: Optimizer,
}

/// Which checkpoints are kept when a new one is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// Number of newest checkpoints to keep, at least 1.
    pub keep_last: usize,
    /// Versions that are multiples of this are kept forever; 0 for none.
    pub keep_every: u64,
}

/// The state to be saved, between two steps.
#[derive(Debug)]
pub struct CheckpointContents<'a> {
    /// The policy.
    pub policy: NetworkState<'a>,
    /// A separate critic, if any.
    pub critic: Option<NetworkState<'a>>,
    /// The counters.
    pub state: &'a TrainerState,
    /// The state of an island, if the run is one.
    pub island: Option<Cow<'a, [u8]>>,
}

/// State of a network in training.
#[derive(Debug)]
pub struct NetworkState<'a> {
    /// The model files other than weights.
    pub directory: &'a Arc<ModelDirectory>,
    /// Its weights.
    pub weights: StateWeights,
    /// Optimizer state of every trained tensor.
    pub optimizer: Cow<'a, Optimizer>,
    /// The LoRA adapter, if one is trained.
    pub adapter: Option<&'a Adapter>,
}

impl Retention {
    /// Keeps the `keep_last` newest only.
    #[must_use]
    pub fn last(keep_last: usize) -> Self {
        Self { keep_last, keep_every: 0 }
    }

    /// Those of `versions`, ascending, that are not kept. The newest is always kept.
    #[must_use]
    pub fn superseded(self, versions: &[PolicyVersion]) -> Vec<PolicyVersion> {
        let older = &versions[..versions.len().saturating_sub(self.keep_last.max(1))];
        let keeps =
            |version: &PolicyVersion| self.keep_every > 0 && version.0.is_multiple_of(self.keep_every);
        older.iter().copied().filter(|version| !keeps(version)).collect()
    }
}

impl<'a> NetworkState<'a> {
    /// Gathers the state of `learner` from its ranks; `directory` describes its model.
    ///
    /// # Errors
    /// If a rank has ended.
    pub fn of(directory: &'a Arc<ModelDirectory>, learner: &'a Learner) -> Result<Self, TrainerError> {
        let weights = match learner.adapted() {
            Some(policy) => StateWeights::Quantized(Arc::clone(policy.base())),
            None => StateWeights::Whole(learner.parameters()?),
        };
        Ok(Self { directory, weights, optimizer: learner.optimizer()?, adapter: learner.adapter() })
    }

    /// Size of the files that grow with the model, bytes.
    fn bytes(&self) -> u64 {
        let adapter = self.adapter.map_or(0, |adapter| adapter.values().len());
        let merged = match &self.weights {
            StateWeights::Whole(parameters) => parameters.values().len(),
            StateWeights::Quantized(_) => 0,
        };
        let values = 4 * (merged + adapter) as u64;
        values.saturating_add(self.optimizer.config().state_bytes(self.trained()))
    }

    /// The trained tensors, in the order of the optimizer states.
    fn trained(&self) -> &[ParameterSpec] {
        trained(&self.weights, self.adapter)
    }
}

fn trained<'a>(weights: &'a StateWeights, adapter: Option<&'a Adapter>) -> &'a [ParameterSpec] {
    adapter.map_or(weights.specs(), Adapter::specs)
}

impl TrainerState {
    /// The counters after `version` steps, all others 0.
    #[must_use]
    pub fn at(version: PolicyVersion) -> Self {
        Self { format: FORMAT, version, updates: 0, critic_updates: 0, trained_tokens: 0, time_s: 0.0 }
    }
}

/// Directory of the checkpoint after `version` steps.
#[must_use]
pub fn path(checkpoints: &Path, version: PolicyVersion) -> PathBuf {
    checkpoints.join(format!("step_{:06}", version.0))
}

/// The adapter in a checkpoint directory; absent without LoRA.
#[must_use]
pub fn adapter_path(checkpoint: &Path) -> PathBuf {
    checkpoint.join("adapter")
}

/// The frozen model of a run with LoRA.
#[must_use]
pub fn base_path(checkpoints: &Path) -> PathBuf {
    checkpoints.join("base")
}

/// The frozen model under the adapter of the checkpoint `dir`, if it stays quantised.
fn quantized_base(dir: &Path) -> Option<PathBuf> {
    let stays = adapter_path(dir).is_dir() && !ModelDirectory::has_weights(&dir.join("model"));
    dir.parent().filter(|_| stays).map(base_path)
}

/// The critic in a checkpoint directory; absent without a separate critic.
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

/// Writes a checkpoint unless it exists, then removes those that `retention` does not keep.
///
/// # Errors
/// If a file cannot be written; then no directory has the checkpoint's name.
pub fn save(
    checkpoints: &Path,
    contents: &CheckpointContents<'_>,
    retention: Retention,
) -> Result<PathBuf, TrainerError> {
    let target = path(checkpoints, contents.state.version);
    if target.exists() {
        // A run resumes from its newest checkpoint, so this is the same state. Replacing it would leave a moment
        // without it, in which a crash loses groups that the buffer has already dropped.
        return Ok(target);
    }
    write(checkpoints, &target, contents).map_err(|error| no_space(error, &target, contents))?;
    for old in retention.superseded(&list(checkpoints)) {
        if old != contents.state.version {
            remove(&path(checkpoints, old))?;
        }
    }
    Ok(target)
}

fn write(checkpoints: &Path, target: &Path, contents: &CheckpointContents<'_>) -> Result<(), TrainerError> {
    let CheckpointContents { policy, critic, state, island } = contents;
    if let Some(adapter) = policy.adapter {
        save_base(checkpoints, policy, adapter)?;
    }
    Ok(atomic::directory(target, |dir| {
        write_network(dir, policy)?;
        if let Some(adapter) = policy.adapter {
            let base = base_path(checkpoints);
            let base = std::path::absolute(&base).unwrap_or(base);
            lora_files::write(&adapter_path(dir), adapter, &base.to_string_lossy())?;
            // A manifest for the adapter alone, which can be read without the checkpoint.
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
        if let Some(island) = island {
            let path = dir.join(ISLAND);
            std::fs::write(&path, island).map_err(write_error(path.clone()))?;
        }
        manifest::write(dir)?;
        fail::fail_point!("checkpoint-rename", |errno: Option<String>| {
            let number = errno.and_then(|number| number.parse().ok()).unwrap_or_default();
            Err(write_error(numbers.clone())(io::Error::from_raw_os_error(number)))
        });
        Ok(())
    })?)
}

/// Writes the weights and the optimizer state of a network.
fn write_network(dir: &Path, network: &NetworkState<'_>) -> Result<(), model::ModelError> {
    let model = dir.join("model");
    match &network.weights {
        StateWeights::Whole(parameters) => network.directory.save(&model, parameters)?,
        StateWeights::Quantized(_) => network.directory.describe(&model)?,
    }
    let optimizer = dir.join("optimizer.safetensors");
    fail::fail_point!("checkpoint-write", |errno: Option<String>| {
        let number = errno.and_then(|number| number.parse().ok()).unwrap_or_default();
        Err(write_error(optimizer.clone())(io::Error::from_raw_os_error(number)))
    });
    optimizer_files::write(&optimizer, network.trained(), &network.optimizer)
        .map_err(write_error(optimizer.clone()))
}

/// `error`; if the disk is full, with the size of the checkpoint `target` and a remedy.
fn no_space(error: TrainerError, target: &Path, contents: &CheckpointContents<'_>) -> TrainerError {
    let TrainerError::Model(model::ModelError::Write { path, source }) = &error else { return error };
    let full = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded, io::ErrorKind::FileTooLarge];
    if !full.contains(&source.kind()) {
        return error;
    }
    let networks = [Some(&contents.policy), contents.critic.as_ref()];
    let bytes = networks.into_iter().flatten().map(NetworkState::bytes).fold(0, u64::saturating_add);
    let reason = format!(
        "needs {bytes} bytes, and the disk is full ({}: {source}); the previous checkpoint is intact: free disk space, or \
         lower checkpoint.keep_last, and continue with rlrun resume",
        path.display()
    );
    TrainerError::Checkpoint { path: target.to_owned(), reason }
}

fn write_error(path: PathBuf) -> impl FnOnce(std::io::Error) -> model::ModelError {
    move |source| model::ModelError::Write { path, source }
}

/// Writes the frozen model before the first checkpoint. An existing one without any checkpoint is from a killed
/// attempt, maybe with other settings.
fn save_base(checkpoints: &Path, policy: &NetworkState<'_>, adapter: &Adapter) -> Result<(), TrainerError> {
    let path = base_path(checkpoints);
    if path.exists() {
        if !list(checkpoints).is_empty() {
            return Ok(());
        }
        remove(&path)?;
    }
    match &policy.weights {
        StateWeights::Whole(merged) => policy.directory.save(&path, &adapter.base_parameters(merged))?,
        StateWeights::Quantized(base) => atomic::directory(&path, |dir| {
            base.copy_to(dir)?;
            manifest::write(dir)
        })?,
    }
    Ok(())
}

/// Loads the checkpoint in `dir` after comparing its files with the manifest, if it has one.
///
/// # Errors
/// If a file is missing, broken or changed, the format is of a newer rlrun, the optimizer state is of another optimizer
/// kind, or the adapter differs from `lora` (no adapter if `None`).
pub fn load(
    dir: &Path,
    optimizer: OptimizerConfig,
    lora: Option<&LoraConfig>,
) -> Result<Checkpoint, TrainerError> {
    let integrity = check(dir)?;
    // New checkpoints have the current format.
    let state = TrainerState { format: FORMAT, ..numbers(dir)? };
    let directory = ModelDirectory::open(&dir.join("model"))?;
    let (weights, adapter) = match (quantized_base(dir), lora) {
        (Some(file), Some(lora)) => {
            let base = load_quantized(&file, &directory)?;
            let adapter = Adapter::open_over(&adapter_path(dir), lora, &base)?;
            (StateWeights::Quantized(Arc::new(base)), Some(adapter))
        }
        _ => {
            // `check` has already compared the digests.
            let parameters = Parameters::load(directory.path(), directory.config())?;
            let adapter = load_adapter(dir, &parameters, lora)?;
            (StateWeights::Whole(Arc::new(parameters)), adapter)
        }
    };
    let specs = trained(&weights, adapter.as_ref());
    let states = optimizer_files::read(&dir.join("optimizer.safetensors"), specs, &optimizer)?;
    let optimizer = Optimizer::from_states(optimizer, state.updates, states);
    let island = island(dir)?;
    Ok(Checkpoint { directory, weights, adapter, optimizer, state, island, integrity })
}

/// The policy of the checkpoint in `dir`, if its base stays quantised; `directory` is its model.
///
/// # Errors
/// If a file is missing, broken or changed.
pub fn load_adapted(dir: &Path, directory: &ModelDirectory) -> Result<Option<AdaptedBase>, TrainerError> {
    let Some(file) = quantized_base(dir) else { return Ok(None) };
    check(dir)?;
    let base = load_quantized(&file, directory)?;
    let path = adapter_path(dir);
    let adapter = Adapter::open_over(&path, &lora_files::config(&path)?, &base)?;
    Ok(Some(AdaptedBase::new(Arc::new(base), Arc::clone(adapter.factors()))))
}

fn load_quantized(base: &Path, directory: &ModelDirectory) -> Result<FrozenParameters, TrainerError> {
    manifest::check(base)?;
    Ok(FrozenParameters::load(&FrozenParameters::copied_to(base), directory.config())?)
}

/// The state of an island in the checkpoint `dir`, whose digests were compared.
fn island(dir: &Path) -> Result<Option<Vec<u8>>, TrainerError> {
    let path = dir.join(ISLAND);
    match std::fs::read(&path) {
        Ok(state) => Ok(Some(state)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(broken(&path, format!("cannot be read: {error}; check the permissions"))),
    }
}

/// Reads the counters of the checkpoint in `dir`.
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

/// Loads the separate critic of the checkpoint in `dir`, whose counters are `state`.
///
/// # Errors
/// If it is missing or broken, or its optimizer state is of another optimizer kind.
pub fn load_critic(
    dir: &Path,
    state: &TrainerState,
    optimizer: OptimizerConfig,
) -> Result<CriticCheckpoint, TrainerError> {
    let path = critic_path(dir);
    if !path.exists() {
        let reason = "does not exist, so the run has no separate critic, but the recipe has one; start a new run from \
                      the checkpoint's model";
        return Err(broken(&path, reason.to_owned()));
    }
    let directory = ModelDirectory::open(&path.join("model"))?;
    let parameters = directory.load_parameters()?;
    let specs = parameters.layout().specs();
    let states = optimizer_files::read(&path.join("optimizer.safetensors"), specs, &optimizer)?;
    let optimizer = Optimizer::from_states(optimizer, state.critic_updates, states);
    Ok(CriticCheckpoint { directory, parameters, optimizer })
}

/// Loads the adapter of a checkpoint; `merged` are the merged weights.
fn load_adapter(
    dir: &Path,
    merged: &Parameters,
    lora: Option<&LoraConfig>,
) -> Result<Option<Adapter>, TrainerError> {
    let path = adapter_path(dir);
    let Some(lora) = lora else {
        if path.exists() {
            let reason = "exists, so the run trains LoRA, but the recipe has no section `[lora]`; add it, or start \
                          a new run from the checkpoint's model";
            return Err(TrainerError::Adapter { path, reason: reason.to_owned() });
        }
        return Ok(None);
    };
    if !path.exists() {
        let reason = "does not exist, so the run trains all weights, but the recipe has a section `[lora]`; remove it, or \
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
            "with {} merged is not the model of the checkpoint; restore the base model that the run wrote",
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
