//! Checkpoints of a trainer, and what the buffer may forget once they are durable.
//!
//! Invariant: a group is acknowledged only after a checkpoint that contains it is durable.

use std::borrow::Cow;
use std::path::PathBuf;

use buffer::BufferError;

use super::elastic::own_error;
use super::{CONSUMER, Trainer, networks};
use crate::TrainerError;
use crate::checkpoint::{CheckpointContents, CheckpointTime, CheckpointWriter, NetworkState, TrainerState};

impl Trainer {
    /// Acknowledges everything before the start version, which is in a checkpoint.
    pub(super) fn acknowledge_start(&mut self) -> Result<(), TrainerError> {
        match self.buffer.ack_through(CONSUMER, self.version) {
            // An empty buffer, or one that has not seen the steps before the checkpoint.
            Err(BufferError::FutureVersion { .. }) => {
                self.buffer.set_version(self.version, true)?;
                Ok(self.buffer.ack_through(CONSUMER, self.version)?)
            }
            // The checkpoint contains groups that were also leased to another consumer. Training cannot undo that.
            Err(error @ BufferError::LeaseLost { .. }) => {
                self.lost_lease = Some(error);
                Ok(())
            }
            acknowledged => Ok(acknowledged?),
        }
    }

    /// Whether `checkpoint_interval` asks for a checkpoint of the current version.
    #[must_use]
    pub fn checkpoint_due(&self) -> bool {
        let interval = self.config.checkpoint_interval;
        interval > 0 && self.version.0.is_multiple_of(interval)
    }

    /// Acknowledges the current version to the buffer without a checkpoint. For buffers in memory, which a crash loses
    /// anyway.
    ///
    /// # Errors
    /// If the buffer fails.
    pub fn forget(&self) -> Result<(), TrainerError> {
        Ok(self.buffer.ack_through(CONSUMER, self.version)?)
    }

    /// Takes a checkpoint of the current version. With `asynchronous` it is written in the background; the next step
    /// that finds it durable acknowledges its groups to the buffer.
    ///
    /// # Errors
    /// If the checkpoint, or the one before, cannot be written.
    pub fn checkpoint(&mut self) -> Result<(), TrainerError> {
        self.save(|writer, contents| writer.save(contents))
    }

    /// The last checkpoint of a run; durable when this returns.
    ///
    /// # Errors
    /// As [`Self::checkpoint`].
    pub fn last_checkpoint(&mut self) -> Result<PathBuf, TrainerError> {
        self.save(|writer, contents| writer.save_now(&contents))
    }

    /// Writes a checkpoint with `write`, then acknowledges what is durable.
    fn save<R>(
        &mut self,
        write: impl FnOnce(&mut CheckpointWriter, CheckpointContents<'_>) -> Result<R, TrainerError>,
    ) -> Result<R, TrainerError> {
        if let Some(colocation) = &mut self.colocation {
            colocation.wake(networks(&mut self.learner, &mut self.auxiliary))?;
        }
        self.with_ranks(own_error, Self::take_snapshot)?;
        let updates = self.learner.updates();
        let critic = self.auxiliary.critic.as_ref().and_then(|critic| critic.network.as_ref());
        let state = TrainerState {
            updates,
            critic_updates: critic.map_or(0, |network| network.learner.updates()),
            trained_tokens: self.trained_tokens,
            time_s: self.time_s(),
            ..TrainerState::at(self.version)
        };
        let snapshot = self.elastic.as_ref().and_then(|elastic| elastic.states_at(self.version));
        let (policy, critic) = match snapshot {
            Some(states) => states,
            None => (
                NetworkState::of(&self.directory, &self.learner)?,
                critic.map(|network| NetworkState::of(&network.directory, &network.learner)).transpose()?,
            ),
        };
        let island = self.exchange.as_ref().map(|exchange| Cow::Owned(exchange.state()));
        let contents = CheckpointContents { policy, critic, state: &state, island };
        let written = write(&mut self.writer, contents)?;
        self.forget_durable()?;
        Ok(written)
    }

    /// Acknowledges the groups of a checkpoint that became durable since the last call.
    fn forget_durable(&mut self) -> Result<(), TrainerError> {
        match self.writer.take_durable()? {
            Some(version) => Ok(self.buffer.ack_through(CONSUMER, version)?),
            None => Ok(()),
        }
    }

    /// Time spent on checkpoints since the last step.
    pub(super) fn checkpoint_time(&mut self) -> Result<CheckpointTime, TrainerError> {
        self.forget_durable()?;
        Ok(self.writer.take_time())
    }
}
