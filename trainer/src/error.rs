//! What can go wrong in training, with the evidence.

use std::path::PathBuf;

use trajectory::GroupId;

/// Why a training step or a checkpoint failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainerError {
    /// The network could not compute.
    #[error("the network failed: {0}")]
    Compute(#[from] candle_core::Error),
    /// A device could not be used, or has no room.
    #[error(transparent)]
    Device(#[from] device::DeviceError),
    /// Weights are to be published from a device that does not have them.
    #[error(
        "the weights are to be published from the trainer's device, which does not have all of them; set weights.transport"
    )]
    NotOnDevice,
    /// Ranks are to exchange from device to device and cannot.
    #[error(
        "the ranks cannot exchange from device to device: {reason}; set trainer.collective = \"auto\" to let them do it through the host"
    )]
    NoCollective {
        /// Who cannot.
        reason: String,
    },
    /// A gradient is infinite or not a number.
    #[error(
        "the gradient of update {update} over {rows} rows is not finite; lower trainer.learning_rate, or check the rewards for extreme values"
    )]
    GradientNotFinite {
        /// Updates done before.
        update: u64,
        /// Rows of the minibatch.
        rows: usize,
    },
    /// A sample of the current version has other log-probabilities than the trainer computes.
    #[error(
        "step {step}: the sampler recorded {behavior} for trained token {token} of trajectory {trajectory} of {group}, the trainer computes {proximal} with the same weights, and rollout.bitwise promises the same bits; set it to false to go on, and report this"
    )]
    NotBitwise {
        /// The step that was not done.
        step: u64,
        /// The group of the sample.
        group: GroupId,
        /// Index of its trajectory in the group.
        trajectory: u32,
        /// Which of its trained tokens, from 0.
        token: usize,
        /// Log-probability that the sampler recorded, nats.
        behavior: f32,
        /// Log-probability under the policy before the step, nats.
        proximal: f32,
    },
    /// The buffer failed, or no batch came in time.
    #[error(transparent)]
    Buffer(#[from] buffer::BufferError),
    /// The weights could not be published, or a sampler serves others than it says.
    #[error(transparent)]
    Weights(#[from] weights::WeightsError),
    /// One of several ranks failed.
    #[error("rank {rank} of {world} failed: {source}")]
    Rank {
        /// Which, from 0.
        rank: usize,
        /// How many there are.
        world: usize,
        /// Why.
        source: Box<TrainerError>,
    },
    /// A rank met a bug.
    #[error("it panicked: {message}; report this")]
    Panicked {
        /// What the panic said.
        message: String,
    },
    /// A rank failed in an earlier call.
    #[error("the ranks have ended after an earlier error; resume the run from its last checkpoint")]
    RanksEnded,
    /// Processes of one trainer do not understand each other.
    #[error("a message between the ranks of the trainer: {reason}; all ranks need the same rlrun")]
    Message {
        /// What is wrong with it.
        reason: String,
    },
    /// A thread could not be started.
    #[error("cannot start a thread of the trainer: {source}; see how many threads the system allows")]
    Thread {
        /// What the system said.
        source: std::io::Error,
    },
    /// The ranks could not do something together.
    #[error(transparent)]
    Collective(#[from] crate::collective::CollectiveError),
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
    /// A checkpoint is not the one that was written.
    #[error("checkpoint {checkpoint}: {reason}")]
    Damaged {
        /// Its directory.
        checkpoint: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// The sampler keeps the device that they share.
    #[error(transparent)]
    Turn(#[from] model::TurnTimeout),
    /// What the trainer needs cannot be moved out of memory, or back.
    #[error(
        "what the trainer needs cannot be kept in a file in {directory} while the sampler has the device: {source}; make \
         room there, or raise placement.memory_mib so that it stays in memory"
    )]
    Scratch {
        /// Where the file is.
        directory: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A LoRA adapter could not be read, or is not the one that the recipe describes.
    #[error("adapter {path}: {reason}")]
    Adapter {
        /// The file or directory.
        path: PathBuf,
        /// What went wrong and what to do.
        reason: String,
    },
}
