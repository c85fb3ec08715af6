//! Why a run, or a command that needs a model, failed.

use crate::huggingface::RepositoryError;
use crate::recipe::Diagnostic;
use crate::run_dir::{JsonLinesError, RunDirError};

/// Exit status that asks a launcher to start the same again: `EX_TEMPFAIL` of sysexits.h.
pub const REQUEUE: u8 = 75;

/// Why a run failed. Errors in the user's input are distinct from errors at run time.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The recipe is wrong.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n\n"))]
    Recipe(Vec<Diagnostic>),
    /// A template cannot be written.
    #[error(transparent)]
    Init(#[from] crate::init::InitError),
    /// The run directory cannot be used.
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    /// Metrics or events cannot be written.
    #[error(transparent)]
    Lines(#[from] JsonLinesError),
    /// A model directory is wrong.
    #[error(transparent)]
    Model(#[from] model::ModelError),
    /// A dataset is wrong.
    #[error(transparent)]
    Tasks(#[from] rollout::tasks::TaskError),
    /// A model or a dataset cannot be had from the Hugging Face Hub.
    #[error(transparent)]
    Repository(#[from] RepositoryError),
    /// The archive of a run cannot be used.
    #[error(transparent)]
    Archive(#[from] crate::archive::ArchiveError),
    /// A reward is wrong.
    #[error(transparent)]
    Reward(#[from] rewards::RewardError),
    /// Generation failed.
    #[error(transparent)]
    Rollout(#[from] rollout::RolloutError),
    /// Training failed.
    #[error(transparent)]
    Trainer(#[from] trainer::TrainerError),
    /// A schedule cannot be used.
    #[error(transparent)]
    Schedule(#[from] crate::schedule::ScheduleError),
    /// A replay differs from the run that was recorded.
    #[error("{0}")]
    Differs(String),
    /// The buffer failed.
    #[error(transparent)]
    Buffer(#[from] buffer::BufferError),
    /// Outer gradients cannot be exchanged.
    #[error(transparent)]
    Island(#[from] islands::IslandError),
    /// A server cannot listen.
    #[error(transparent)]
    Server(#[from] buffer::http::ServerError),
    /// A token file is wrong.
    #[error(transparent)]
    Tokens(#[from] buffer::http::TokenError),
    /// A certificate is wrong.
    #[error(transparent)]
    Tls(#[from] buffer::http::TlsError),
    /// The transport of the weights failed.
    #[error(transparent)]
    Weights(#[from] weights::WeightsError),
    /// A device cannot be used, is full, or has failed.
    #[error(transparent)]
    Device(#[from] device::DeviceError),
    /// The run needs more memory than a device has free.
    #[error("{0}; `rlrun plan` shows all of it")]
    DoesNotFit(String),
    /// The network failed.
    #[error("the network failed: {0}")]
    Compute(#[from] candle_core::Error),
    /// The system refused something.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The named thing does not exist.
    #[error("{0}")]
    NotThere(String),
    /// Arguments of the command line that do not fit each other or the model.
    #[error("{0}")]
    Argument(String),
    /// The rewards of a run judge nothing any more.
    #[error("{0}")]
    Unscored(String),
    /// The process ends early and asks its launcher to start it again: the launcher stopped the run, or a worker lost the
    /// connection to its run.
    #[error("{0}")]
    Requeue(String),
    /// A process of the run cannot be kept alive.
    #[error("{name} {how}; see why it ends, then go on with `rlrun resume`")]
    Died {
        /// Which one.
        name: String,
        /// How, and its last words.
        how: String,
    },
    /// A process of the run has failed with this status and has printed the reason.
    #[error("")]
    ChildFailed(u8),
    /// Something that cannot happen did.
    #[error("{0}; this is a mistake in rlrun, please report it")]
    Internal(String),
}

impl Failure {
    /// 2 if the input was wrong, 75 if it should be started again, 1 if the run failed.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Recipe(_)
            | Self::Init(_)
            | Self::RunDir(_)
            | Self::Model(_)
            | Self::Tasks(_)
            | Self::Reward(_)
            | Self::NotThere(_)
            | Self::Tokens(_)
            | Self::Tls(_)
            | Self::DoesNotFit(_)
            | Self::Device(device::DeviceError::Unavailable { .. })
            | Self::Argument(_) => 2,
            Self::Requeue(_) => REQUEUE,
            Self::ChildFailed(status) => *status,
            Self::Trainer(trainer::TrainerError::Adapter { .. }) => 2,
            Self::Schedule(error) if error.is_input() => 2,
            Self::Server(error) if error.is_input() => 2,
            Self::Archive(error) if error.is_input() => 2,
            Self::Repository(error) if error.is_input() => 2,
            Self::Buffer(error) if crate::serve::is_input(error) => 2,
            Self::Rollout(error) if error.is_input() => 2,
            Self::Island(error) if error.is_input() => 2,
            _ => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use device::DeviceError;
    use device::error::{ByteCount, MemoryUsage};

    use super::*;

    #[test]
    fn a_missing_device_is_an_input_error_and_a_full_one_a_failure_that_names_its_user() {
        let (device, reason) = ("cuda:0".to_owned(), "no driver".to_owned());
        let gone = Failure::from(DeviceError::Unavailable { device: device.clone(), reason });
        assert_eq!(gone.exit_code(), 2);
        let full = Failure::from(DeviceError::OutOfMemory {
            device,
            wanted: ByteCount(2 << 30),
            label: "activations",
            free: ByteCount(1 << 30),
            total: ByteCount(80 << 30),
            usage: MemoryUsage(vec![("optimizer", 40 << 30), ("weights", 20 << 30)]),
            remedy: "lower it",
        });
        assert_eq!(full.exit_code(), 1);
        let text = full.to_string();
        assert!(
            text.contains("2.00 GiB more of activations") && text.contains("optimizer (40.00 GiB)"),
            "{text}"
        );
    }
}
