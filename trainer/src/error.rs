//! What can go wrong in training, with the evidence.

use std::path::PathBuf;

/// Why a training step or a checkpoint failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainerError {
    /// The network could not compute.
    #[error("the network failed: {0}")]
    Compute(#[from] candle_core::Error),
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
    /// The buffer failed, or no batch came in time.
    #[error(transparent)]
    Buffer(#[from] buffer::BufferError),
    /// The weights could not be published, or a sampler serves others than it says.
    #[error(transparent)]
    Weights(#[from] weights::WeightsError),
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
}
