//! Errors of the trainer, each with its evidence.

use std::path::PathBuf;

use buffer::Unfit;
use trajectory::GroupId;

/// Why a training step or a checkpoint failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainerError {
    /// A forward or backward pass of the network failed.
    #[error("the network failed: {0}")]
    Compute(#[source] candle_core::Error),
    /// Ranks cannot share the tokens of a micro-batch.
    #[error(
        "`trainer.parallel.context` is {degree} and a micro-batch has {sections} sections: {reason}; set both context and \
         sections to 1, or use another model or exchange"
    )]
    Context {
        /// Ranks that share a micro-batch.
        degree: usize,
        /// Its sections.
        sections: usize,
        /// Why not.
        reason: String,
    },
    /// A device is not available, or its memory is full.
    #[error(transparent)]
    Device(#[from] device::DeviceError),
    /// The weights are to be published from a device that does not have all of them.
    #[error(
        "the weights are to be published from the trainer's device, which does not have all of them; set weights.transport"
    )]
    NotOnDevice,
    /// The ranks cannot communicate from device to device.
    #[error(
        "the ranks cannot communicate from device to device: {reason}; set trainer.collective = \"auto\" to use host memory"
    )]
    NoCollective {
        /// Which rank cannot, and why.
        reason: String,
    },
    /// Gradients are summed over several calls by one rank that updates its weights on the host.
    #[error(
        "gradients of several calls are summed by a single rank that updates its weights on the host; use one rank, on the processor \
         or with its optimizer on the host"
    )]
    SumsOfSeveral,
    /// An update by another optimizer than the one whose state there is.
    #[error(
        "the state is that of {found}, and the update is by {wanted}; keep the optimizer that training began with"
    )]
    OtherOptimizer {
        /// Kind of the state.
        found: &'static str,
        /// Kind of the update.
        wanted: &'static str,
    },
    /// The tokens to predict cannot be those of the rows.
    #[error("the tokens to predict do not fit: {reason}")]
    Targets {
        /// What does not fit.
        reason: String,
    },
    /// A gradient is infinite or NaN.
    #[error(
        "the gradient of update {update} over {rows} rows is not finite; lower trainer.learning_rate, or check the rewards for extreme values"
    )]
    GradientNotFinite {
        /// Optimizer updates before this one.
        update: u64,
        /// Rows of the minibatch.
        rows: usize,
    },
    /// The sampler and the trainer computed different log-probabilities with the same weights.
    #[error(
        "step {step}: the sampler recorded {behavior} for trained token {token} of trajectory {trajectory} of {group}, the trainer computes {proximal} with the same weights, and rollout.bitwise requires the same bits; set it to false to continue, and report this"
    )]
    NotBitwise {
        /// The step that failed.
        step: u64,
        /// The group of the sample.
        group: GroupId,
        /// Index of its trajectory in the group.
        trajectory: u32,
        /// Index among its trained tokens, from 0.
        token: usize,
        /// Log-probability that the sampler recorded, nats.
        behavior: f32,
        /// Log-probability under the policy at the start of the step, nats.
        proximal: f32,
    },
    /// The buffer failed, or no batch came in time.
    #[error(transparent)]
    Buffer(#[from] buffer::BufferError),
    /// The weights could not be published, or a sampler reported a digest of other weights.
    #[error(transparent)]
    Weights(#[from] weights::WeightsError),
    /// One of several ranks failed.
    #[error("rank {rank} of {world} failed: {source}")]
    Rank {
        /// Which rank, from 0.
        rank: usize,
        /// World size.
        world: usize,
        /// Why.
        source: Box<TrainerError>,
    },
    /// A rank panicked.
    #[error("it panicked: {message}; report this")]
    Panicked {
        /// The panic message.
        message: String,
    },
    /// One group after another cannot be trained on.
    #[error(
        "the last {groups} groups of the buffer cannot be trained on and are in quarantine; the last one: {reason}; what \
         sampled them does not match this run's model or rlrun"
    )]
    OnlyUnfit {
        /// Number of groups.
        groups: u64,
        /// What is wrong with the last one.
        reason: Unfit,
    },
    /// What balances the loads of experts cannot be updated.
    #[error("`trainer.router_correction_rate` is {rate}, and {reason}; leave it out")]
    RouterCorrection {
        /// The rate.
        rate: f32,
        /// Why not.
        reason: &'static str,
    },
    /// A model has none of the layers that an adapter is for.
    #[error(
        "the model has none of the layers in `lora.target_modules`, so nothing would be trained; name some of {there}"
    )]
    NoTarget {
        /// The layers that it has.
        there: String,
    },
    /// The state of a rank is not where an operation needs it.
    #[error("a rank of the trainer cannot continue: {reason}; report this")]
    State {
        /// What is missing.
        reason: &'static str,
    },
    /// Outer gradients cannot be exchanged with other islands.
    #[error("{reason}")]
    Exchange {
        /// What failed, with a remedy.
        reason: String,
    },
    /// A rank failed in an earlier call.
    #[error("the ranks have ended after an earlier error; resume the run from its last checkpoint")]
    RanksEnded,
    /// The ranks cannot divide the work as the degrees say.
    #[error("the degrees of trainer.parallel do not fit: {reason}")]
    Parallel {
        /// What does not fit, and what is possible.
        reason: String,
    },
    /// A message from another process of the trainer could not be decoded.
    #[error("a message between the ranks of the trainer: {reason}; all ranks need the same rlrun")]
    Message {
        /// What is wrong with it.
        reason: String,
    },
    /// A thread could not be started.
    #[error("cannot start a thread of the trainer: {source}; raise the thread limit of the system")]
    Thread {
        /// The error of the system.
        source: std::io::Error,
    },
    /// A collective operation of the ranks failed.
    #[error(transparent)]
    Collective(#[from] collective::CollectiveError),
    /// The files of a model could not be read or written.
    #[error(transparent)]
    Model(#[from] model::ModelError),
    /// A checkpoint could not be read or written.
    #[error("checkpoint {path}: {reason}")]
    Checkpoint {
        /// The file or directory.
        path: PathBuf,
        /// What went wrong and what to do.
        reason: String,
    },
    /// A checkpoint does not match its manifest.
    #[error("checkpoint {checkpoint}: {reason}")]
    Damaged {
        /// Its directory.
        checkpoint: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// The sampler did not release the shared device in time.
    #[error(transparent)]
    Turn(#[from] model::TurnTimeout),
    /// The trainer's state could not be moved to a file, or back.
    #[error(
        "the state of the trainer cannot be moved to a file in {directory} while the sampler uses the device: {source}; free \
         disk space there, or raise placement.memory_mib so that the state stays in memory"
    )]
    Scratch {
        /// Directory of the file.
        directory: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A checkpoint could not be stored in the archive of the run.
    #[error("the archive of the run: {0}")]
    Archive(Box<dyn std::error::Error + Send + Sync>),
    /// An adapter of one end of a model whose ends are one tensor.
    #[error(
        "`lora.target_modules` names \"{module}\", but the model computes its embedding and its head with one tensor; leave it \
         out, or use a model that has two (tie_word_embeddings is false in its config.json)"
    )]
    TiedTarget {
        /// The layer.
        module: &'static str,
    },
    /// An operation on the weights in f32 of a learner that has none.
    #[error(
        "the base of the adapter stays quantised, so the trainer has no weights in f32; load the model without quantisation to \
         publish or save them"
    )]
    QuantizedBase,
    /// A LoRA adapter could not be read, or differs from the recipe.
    #[error("adapter {path}: {reason}")]
    Adapter {
        /// The file or directory.
        path: PathBuf,
        /// What went wrong and what to do.
        reason: String,
    },
}

impl TrainerError {
    /// A stage is to go on with micro-batch number `at`, which it has not begun.
    pub(crate) fn no_forward(at: usize) -> Self {
        Self::Message { reason: format!("a stage has no forward of micro-batch {at}, which comes back") }
    }
}

impl From<candle_core::Error> for TrainerError {
    fn from(error: candle_core::Error) -> Self {
        model::failed_call(error).map_or_else(Self::Compute, Self::Collective)
    }
}
