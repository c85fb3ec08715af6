//! The model or the checkpoint that an argument names: a model directory, a GGUF file, or a run; and its weights.

use std::path::{Path, PathBuf};

use model::{AdaptedBase, ModelDirectory, Parameters, Quantization, SharedCores, ThreadPool};
use rollout::{Network, ServeOn};

use crate::failure::Failure;

/// The model directory of a run's checkpoint (the newest without `step`), or `target` itself if it is a model.
pub(super) fn model_of(target: &Path, step: Option<u64>) -> Result<PathBuf, Failure> {
    if step.is_none() && ModelDirectory::is_model(target) {
        return Ok(target.to_path_buf());
    }
    Ok(checkpoint_of(target, step)?.join("model"))
}

/// A run's checkpoint (the newest without `step`).
pub(super) fn checkpoint_of(target: &Path, step: Option<u64>) -> Result<PathBuf, Failure> {
    let checkpoints = target.join("checkpoints");
    let versions = trainer::checkpoint::list(&checkpoints);
    let chosen = match step {
        Some(step) => versions.iter().find(|version| version.0 == step),
        None => versions.last(),
    };
    let Some(version) = chosen else {
        let known: Vec<String> = versions.iter().map(|version| version.0.to_string()).collect();
        return Err(Failure::NotThere(match step {
            Some(step) if !known.is_empty() => format!(
                "{} has no checkpoint of step {step}; there are those of steps {}",
                target.display(),
                known.join(", ")
            ),
            _ => format!(
                "{} is neither a model directory (no config.json), nor a GGUF file, nor a run with checkpoints",
                target.display()
            ),
        }));
    };
    Ok(trainer::checkpoint::path(&checkpoints, *version))
}

/// A network of the model of `directory`. Over a base that stays quantised the adapter is merged only where it has to be.
pub(super) fn network_of(directory: &ModelDirectory, on: &ServeOn) -> Result<Network, Failure> {
    let quantizes = matches!(on, ServeOn::Host(quantization) if *quantization != Quantization::None);
    if !quantizes && let Some(policy) = adapted(directory)? {
        return Ok(Network::adapted(on, &policy)?);
    }
    Ok(Network::new(on, directory.config(), &parameters_of(directory)?)?)
}

/// The weights of the model of `directory` in f32.
pub(super) fn parameters_of(directory: &ModelDirectory) -> Result<Parameters, Failure> {
    let Some(policy) = adapted(directory)? else { return Ok(directory.load_parameters()?) };
    let cores = SharedCores::all();
    Ok(policy.merged(&ThreadPool::new(&cores, cores.total()))?)
}

/// The policy, if `directory` is that of a checkpoint whose base stays quantised.
fn adapted(directory: &ModelDirectory) -> Result<Option<AdaptedBase>, Failure> {
    let Some(checkpoint) = directory.path().parent() else { return Ok(None) };
    Ok(trainer::checkpoint::load_adapted(checkpoint, directory)?)
}
