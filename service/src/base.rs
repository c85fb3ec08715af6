//! A base model of the service: its files, and its frozen weights, which all adapters share.
//!
//! Invariant: the frozen weights are read once, when the first adapter or sampler needs them.

use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use model::{
    FrozenParameters, ModelDirectory, ModelError, Parameters, SharedCores, TargetModule, ThreadPool,
};
use trainer::LearnerConfig;
use trainer::lora::LoraConfig;
use trainer::optimizer::{OptimizerConfig, OptimizerKind};

use crate::data::AdamParameters;
use crate::outcome::FailedRequest;
use crate::training::{BaseInfo, LoraRequest};

/// The scale of adapters is this over their rank, as in tinker.
const ALPHA: f64 = 32.0;
/// Largest rank of an adapter.
const MAX_RANK: usize = 1024;
/// Most tokens of a micro-batch.
const MICROBATCH_TOKENS: usize = 4096;
/// Leaves that the gradients of a call are summed from, as in a recipe.
const LEAVES: usize = 4;
/// Longest wait of ranks; a learner of the service has one.
const WAIT: std::time::Duration = std::time::Duration::from_secs(600);

/// A base model.
#[derive(Debug)]
pub struct BaseModel {
    info: BaseInfo,
    directory: Arc<ModelDirectory>,
    /// `None` until they are needed.
    frozen: Mutex<Option<Arc<FrozenParameters>>>,
    /// Of the frozen weights.
    digest: OnceLock<String>,
    pool: Arc<ThreadPool>,
}

impl BaseModel {
    /// The model in `path`, a Hugging Face directory or a GGUF file, named `name`. Sequences have at most `max_context` tokens;
    /// `None` for what the model allows. Passes use at most `threads` of `cores`.
    ///
    /// # Errors
    /// If the files are not those of a model.
    pub fn open(
        name: &str,
        path: &Path,
        max_context: Option<usize>,
        (cores, threads): (&Arc<SharedCores>, usize),
    ) -> Result<Self, ModelError> {
        let directory = Arc::new(ModelDirectory::open(path)?);
        let of_model = directory.config().max_context();
        let architecture = format!("{:?}", directory.config().architecture).to_lowercase();
        let info = BaseInfo {
            name: name.to_owned(),
            path: std::path::absolute(path).unwrap_or_else(|_| path.to_owned()),
            architecture,
            max_context: max_context.map_or(of_model, |most| most.min(of_model)),
        };
        let pool = Arc::new(ThreadPool::new(cores, threads));
        Ok(Self { info, directory, frozen: Mutex::default(), digest: OnceLock::new(), pool })
    }

    /// Name, directory and context.
    #[must_use]
    pub fn info(&self) -> &BaseInfo {
        &self.info
    }

    /// Its files.
    #[must_use]
    pub fn directory(&self) -> &Arc<ModelDirectory> {
        &self.directory
    }

    /// The threads of its passes.
    #[must_use]
    pub fn pool(&self) -> &Arc<ThreadPool> {
        &self.pool
    }

    /// Its frozen weights.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn frozen(&self) -> Result<Arc<FrozenParameters>, ModelError> {
        let mut frozen = self.frozen.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(frozen) = &*frozen {
            return Ok(Arc::clone(frozen));
        }
        let read = Arc::new(FrozenParameters::load(self.directory.path(), self.directory.config())?);
        *frozen = Some(Arc::clone(&read));
        Ok(read)
    }

    /// The digest of its frozen weights, in hexadecimal: what an adapter was trained over.
    ///
    /// # Errors
    /// If they cannot be read.
    pub(crate) fn digest(&self) -> Result<&str, FailedRequest> {
        if let Some(digest) = self.digest.get() {
            return Ok(digest);
        }
        let frozen = self.frozen().map_err(|error| FailedRequest::server(error.to_string()))?;
        let mut hasher = blake3::Hasher::new();
        for message in frozen.messages() {
            hasher.update(&message);
        }
        Ok(self.digest.get_or_init(|| hasher.finalize().to_hex().to_string()))
    }

    /// Checks that saved weights are of this base; an empty digest is not known.
    ///
    /// # Errors
    /// If they are of another.
    pub(crate) fn check_digest(&self, of_weights: &str) -> Result<(), FailedRequest> {
        if of_weights.is_empty() || self.digest()? == of_weights {
            return Ok(());
        }
        Err(FailedRequest::user(format!(
            "the weights were trained over another model than the one that is named {} now; start the service with that model",
            self.info.name
        )))
    }

    /// All its weights, for a model that trains them.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn parameters(&self) -> Result<Parameters, ModelError> {
        self.directory.load_parameters()
    }

    /// The adapter that `request` asks for: the layers that the model has, of those that are asked for.
    ///
    /// # Errors
    /// If none is left, or the rank is not possible.
    pub(crate) fn lora(&self, request: &LoraRequest) -> Result<LoraConfig, FailedRequest> {
        let LoraRequest { rank, train_unembed, train_mlp, train_attn, .. } = *request;
        if !(1..=MAX_RANK).contains(&rank) {
            return Err(FailedRequest::user(format!("the rank {rank} is not from 1 to {MAX_RANK}")));
        }
        let layout = model::Layout::new(self.directory.config());
        let specs = layout.specs();
        let wanted = |module: &TargetModule| match module {
            TargetModule::EmbedTokens => false,
            TargetModule::LmHead => train_unembed,
            TargetModule::GateProj | TargetModule::UpProj | TargetModule::DownProj => train_mlp,
            _ => train_attn,
        };
        let is_there = |module: &TargetModule| {
            LoraConfig { rank, alpha: ALPHA, target_modules: vec![*module] }.check(specs).is_ok()
        };
        let target_modules: Vec<_> =
            TargetModule::ALL.into_iter().filter(|module| wanted(module) && is_there(module)).collect();
        let config = LoraConfig { rank, alpha: ALPHA, target_modules };
        match config.target_modules.is_empty() {
            false => Ok(config),
            true => Err(FailedRequest::user(
                "no layer of the model would be trained; set train_attn, train_mlp, or train_unembed where head and embedding \
                 are two tensors",
            )),
        }
    }

    /// Memory of a model that trains the adapter `lora` over it, or all weights: values, gradients and two moments, bytes.
    ///
    /// # Errors
    /// Those of the adapter.
    pub(crate) fn training_bytes(&self, lora: Option<&LoraRequest>) -> Result<u64, FailedRequest> {
        const COPIES: u64 = 4;
        let layout = model::Layout::new(self.directory.config());
        let values = match lora {
            None => layout.len(),
            Some(request) => {
                let (specs, _) = self.lora(request)?.shapes(layout.specs());
                specs.last().map_or(0, |last| last.range().end)
            }
        };
        Ok(COPIES * size_of::<f32>() as u64 * values as u64)
    }

    /// How a learner of the service computes.
    pub(crate) fn learner(&self) -> LearnerConfig {
        LearnerConfig {
            optimizer: optimizer(&AdamParameters::default()),
            max_grad_norm: f32::INFINITY,
            router_correction_rate: 0.0,
            microbatch_tokens: MICROBATCH_TOKENS,
            recompute: model::Recompute::None,
            world: 1,
            parallel: trainer::ParallelConfig::default(),
            leaves: LEAVES,
            zero: 1,
            wait: WAIT,
            device: None,
        }
    }
}

/// AdamW with these hyperparameters.
pub(crate) fn optimizer(adam: &AdamParameters) -> OptimizerConfig {
    let AdamParameters { beta1, beta2, eps, weight_decay, .. } = *adam;
    OptimizerConfig { beta1, eps, weight_decay, ..OptimizerConfig::standard(OptimizerKind::Adamw, beta2) }
}
