//! A model in training: its weights or its adapter, the gradients since the last update, its optimizer.
//!
//! Invariant: one pass and an update have the bits of a step of a run over the same rows.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use model::{LowRank, Parameters};
use trainer::checkpoint::{self, CheckpointContents, NetworkState, Retention, TrainerState};
use trainer::lora::{Adapter, LoraConfig};
use trainer::optimizer::Optimizer;
use trainer::{GradientSums, Learner, StateWeights, TargetRows, TrainerError, UpdateParameters};
use trajectory::PolicyVersion;

use crate::base::{BaseModel, optimizer};
use crate::data::{AdamParameters, PassOutput, PassRequest};
use crate::losses::{PassReport, PreparedPass};
use crate::outcome::FailedRequest;
use crate::training::LoraRequest;

/// A model in training.
#[derive(Debug)]
pub struct TrainedModel {
    base: Arc<BaseModel>,
    learner: Learner,
    lora: Option<LoraConfig>,
    sums: GradientSums,
    version: PolicyVersion,
    trained_tokens: u64,
    /// The losses and the tokens of the passes since the last update.
    since_update: (f64, usize),
}

/// Weights to sample from.
#[derive(Clone, Debug)]
pub enum SamplingWeights {
    /// The factors of an adapter.
    Factors(Arc<LowRank>),
    /// All weights.
    Whole(Arc<Parameters>),
}

impl TrainedModel {
    /// A model that trains the adapter `lora` over `base`, or all weights if there is none. An adapter without a seed has that of
    /// 0.
    ///
    /// # Errors
    /// Layers that the model lacks, weights that cannot be read.
    pub fn new(base: &Arc<BaseModel>, lora: Option<&LoraRequest>) -> Result<Self, FailedRequest> {
        let lora = lora.map(|request| Ok((base.lora(request)?, request.seed.unwrap_or(0)))).transpose()?;
        let of_server = |error: &dyn std::fmt::Display| FailedRequest::server(error.to_string());
        let config = base.learner();
        let (learner, lora) = match lora {
            Some((lora, seed)) => {
                let frozen = base.frozen().map_err(|error| of_server(&error))?;
                let adapter = Adapter::over(lora.clone(), &frozen, seed);
                (Learner::over(config, frozen, adapter, None), Some(lora))
            }
            None => {
                let parameters = base.parameters().map_err(|error| of_server(&error))?;
                (Learner::new(config, base.directory().config().clone(), parameters, None), None)
            }
        };
        let learner = learner.map_err(|error| of_server(&error))?.on(Arc::clone(base.pool()));
        let (sums, version) = (GradientSums::default(), PolicyVersion(0));
        Ok(Self {
            base: Arc::clone(base),
            learner,
            lora,
            sums,
            version,
            trained_tokens: 0,
            since_update: (0.0, 0),
        })
    }

    /// Its base model.
    #[must_use]
    pub fn base(&self) -> &Arc<BaseModel> {
        &self.base
    }

    /// Number of updates and loads since it was made.
    #[must_use]
    pub fn version(&self) -> PolicyVersion {
        self.version
    }

    /// A forward pass, and a backward pass whose gradients are added to those since the last update unless the request is a forward
    /// pass alone.
    ///
    /// # Errors
    /// Data that do not fit; the gradients are then as before.
    pub fn pass(&mut self, request: &PassRequest) -> Result<PassOutput, FailedRequest> {
        let (vocabulary, context) = (self.base.directory().config().vocab_size, self.base.info().max_context);
        let prepared = PreparedPass::new(request, vocabulary, context)?;
        let samples = prepared.samples();
        let rows = TargetRows { rows: &samples, targets: Some(prepared.targets()) };
        let failed = |error: TrainerError| FailedRequest::server(error.to_string());
        let report = if request.forward_only {
            prepared.reported(&self.learner.score_targets(rows).map_err(failed)?)
        } else {
            let reports = self.learner.add_gradients(rows, &prepared, &mut self.sums).map_err(failed)?;
            let mut all = PassReport::default();
            reports.into_iter().for_each(|report| all.merge(report));
            self.trained_tokens += prepared.tokens() as u64;
            self.since_update.0 += all.loss();
            self.since_update.1 += prepared.tokens();
            all
        };
        Ok(PassOutput { outputs: prepared.outputs(&report), metrics: report.metrics(&prepared) })
    }

    /// Updates the weights with the gradients since the last update. Returns metrics by `name:reduction`. Without a gradient, or with
    /// one of zero, the weights stay, and so does the version.
    ///
    /// # Errors
    /// Hyperparameters that are not possible, a gradient that is not finite; the gradients are gone then, and the weights unchanged.
    pub fn optim_step(&mut self, adam: &AdamParameters) -> Result<BTreeMap<String, f64>, FailedRequest> {
        let (loss, tokens) = std::mem::take(&mut self.since_update);
        if let Err(reason) = check(adam) {
            self.sums.clear();
            return Err(FailedRequest::user(reason));
        }
        let rows = self.sums.rows();
        let clip = adam.grad_clip_norm;
        let parameters = UpdateParameters {
            learning_rate: adam.learning_rate,
            optimizer: optimizer(adam),
            max_grad_norm: if clip > 0.0 { clip } else { f32::INFINITY },
        };
        let norm = self.learner.update(&mut self.sums, parameters).map_err(|error| match error {
            TrainerError::GradientNotFinite { .. } => FailedRequest::user(error.to_string()),
            other => FailedRequest::server(other.to_string()),
        })?;
        if norm > 0.0 {
            self.version = self.version.next();
        }
        let clipped = if clip > 0.0 && norm > clip { 1.0 } else { 0.0 };
        Ok(BTreeMap::from([
            ("grad_norm:mean".to_owned(), f64::from(norm)),
            ("clipped:mean".to_owned(), clipped),
            ("loss:sum".to_owned(), loss),
            ("rows:sum".to_owned(), rows as f64),
            ("tokens:sum".to_owned(), tokens as f64),
            ("version:max".to_owned(), self.version.0 as f64),
        ]))
    }

    /// Its weights, to sample from.
    ///
    /// # Errors
    /// If they are not in memory.
    pub fn weights(&self) -> Result<SamplingWeights, FailedRequest> {
        if let Some(adapter) = self.learner.adapter() {
            return Ok(SamplingWeights::Factors(Arc::clone(adapter.factors())));
        }
        let parameters = self.learner.parameters();
        parameters.map(SamplingWeights::Whole).map_err(|error| FailedRequest::server(error.to_string()))
    }

    /// Writes weights and optimizer as a checkpoint of a run into `checkpoints`, for its version. Returns that.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn save(&self, checkpoints: &Path) -> Result<PolicyVersion, TrainerError> {
        let policy = NetworkState::of(self.base.directory(), &self.learner)?;
        let state = TrainerState {
            updates: self.learner.updates(),
            trained_tokens: self.trained_tokens,
            ..TrainerState::at(self.version)
        };
        let contents = CheckpointContents { policy, critic: None, state: &state, island: None };
        // Every one has a name.
        checkpoint::save(checkpoints, &contents, Retention { keep_last: usize::MAX, keep_every: 0 })?;
        Ok(self.version)
    }

    /// Writes its weights for sampling to the new directory `dir`: an adapter in PEFT's layout, or a Hugging Face directory.
    ///
    /// # Errors
    /// If `dir` exists, or a file cannot be written.
    pub fn export(&self, dir: &Path) -> Result<(), TrainerError> {
        match self.learner.adapter() {
            Some(adapter) => adapter.save(dir, &self.base.info().path.to_string_lossy()),
            None => Ok(self.base.directory().save(dir, &*self.learner.parameters()?)?),
        }
    }

    /// Takes the weights of the checkpoint `dir`, and its optimizer if `with_optimizer`; without it moments begin at zero. Gradients
    /// since the last update are forgotten.
    ///
    /// # Errors
    /// If a file is missing, broken or changed, or of another model; the model is then as before.
    pub fn load(&mut self, dir: &Path, with_optimizer: bool) -> Result<(), TrainerError> {
        let config = self.base.learner();
        let loaded = checkpoint::load(dir, config.optimizer, self.lora.as_ref())?;
        let fresh = |optimizer: Optimizer| with_optimizer.then_some(optimizer);
        let learner = match (loaded.weights, loaded.adapter) {
            // The base of the service is shared; the service compares its digest with that of the model that was saved.
            (StateWeights::Quantized(_), Some(adapter)) => {
                Learner::over(config, self.base.frozen()?, adapter, fresh(loaded.optimizer))?
            }
            (StateWeights::Whole(parameters), None) => {
                let (model, parameters) =
                    (self.base.directory().config().clone(), Arc::unwrap_or_clone(parameters));
                Learner::new(config, model, parameters, fresh(loaded.optimizer))?
            }
            _ => return Err(TrainerError::QuantizedBase),
        };
        self.learner = learner.on(Arc::clone(self.base.pool()));
        self.sums.clear();
        self.since_update = (0.0, 0);
        self.version = self.version.next();
        self.trained_tokens = loaded.state.trained_tokens;
        Ok(())
    }
}

/// Checks hyperparameters.
fn check(adam: &AdamParameters) -> Result<(), String> {
    let AdamParameters { learning_rate, beta1, beta2, eps, weight_decay, grad_clip_norm } = *adam;
    if eps.is_nan() || eps <= 0.0 {
        return Err(format!("`eps` is {eps}, and must be above 0: it is divided by where a gradient is 0"));
    }
    let at_least_zero = [("learning_rate", learning_rate), ("eps", eps), ("weight_decay", weight_decay)];
    for (name, value) in at_least_zero {
        if !value.is_finite() || value < 0.0 {
            return Err(format!("`{name}` is {value}, and must be a finite number of at least 0"));
        }
    }
    for (name, value) in [("beta1", beta1), ("beta2", beta2)] {
        if !(0.0..1.0).contains(&value) {
            return Err(format!("`{name}` is {value}, and must be at least 0 and below 1"));
        }
    }
    match grad_clip_norm.is_nan() {
        true => Err("`grad_clip_norm` is not a number; 0 is no limit".to_owned()),
        false => Ok(()),
    }
}
