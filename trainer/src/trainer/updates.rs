//! The optimizer updates of a batch, in the process of the trainer and in those of its ranks.
//!
//! Invariant: all processes get the same updates, in the same order.

use std::borrow::Cow;
use std::sync::Arc;

use trajectory::{Group, Sample};

use super::{AuxiliaryModels, Trainer};
use crate::TrainerError;
use crate::batch::{Batch, BatchCounts, BatchRow};
use crate::critic::{Critic, CriticNetwork};
use crate::lead::{RankCommand, UpdateCommand};
use crate::microbatch::MicrobatchReport;
use crate::report::LogprobMismatch;
use crate::update::{CriticUpdate, PolicyUpdate, UpdateResult};

impl Trainer {
    /// Trains with micro-batches of at most `tokens` from now on, as a recorded run did; the size does not adapt any more.
    ///
    /// # Panics
    /// If every rank is a process.
    pub fn set_microbatch_tokens(&mut self, tokens: usize) {
        self.microbatch = None;
        self.learner.set_microbatch_tokens(tokens);
    }

    /// The micro-batch of the step that has been made, if its size adapts; sets that of the next one.
    pub(super) fn next_microbatch(&mut self) -> Option<MicrobatchReport> {
        let (time, tokens) = (self.learner.take_update_time(), self.learner.microbatch_tokens());
        let mut change = None;
        if let Some(control) = &mut self.microbatch {
            change = control.observe(time);
            self.learner.set_microbatch_tokens(control.tokens());
        }
        self.config.adapt_microbatch.then_some(MicrobatchReport { tokens, change })
    }

    /// All optimizer updates of one batch.
    pub(super) fn update(
        &mut self,
        groups: &[Arc<Group>],
        learning_rate: f32,
    ) -> Result<(BatchCounts, UpdateResult), TrainerError> {
        let demonstrations: Vec<Option<Sample>> = match &self.auxiliary.demonstrate {
            Some(demonstrate) => {
                let of = |group: &Arc<Group>| demonstrate(&group.task).filter(|s| self.quarantine.sees(s));
                groups.iter().map(of).collect()
            }
            None => Vec::new(),
        };
        let batch = Batch::new(groups, &self.config.algorithm, self.config.split, &demonstrations);
        self.broadcast_update(groups, &demonstrations, learning_rate)?;
        let AuxiliaryModels { reference, critic, .. } = &mut self.auxiliary;
        let critic = critic.as_mut().map(|Critic { config, network }| CriticUpdate {
            config: *config,
            network: network.as_mut().map(|network| &mut network.learner),
        });
        let update = PolicyUpdate {
            algorithm: &self.config.algorithm,
            epochs: self.config.epochs,
            version: self.version,
            bitwise: self.config.bitwise,
            learning_rate,
            learner: &mut self.learner,
            critic,
            reference: reference.as_ref(),
            logged: &groups[..groups.len().min(self.config.logged_groups)],
        };
        match update.run(&batch)? {
            Ok(updated) => Ok((batch.counts, updated)),
            Err((row, mismatch)) => Err(self.not_bitwise(groups, row, mismatch)),
        }
    }

    /// Sends the same updates to the other processes of the trainer.
    fn broadcast_update(
        &self,
        groups: &[Arc<Group>],
        demonstrations: &[Option<Sample>],
        learning_rate: f32,
    ) -> Result<(), TrainerError> {
        let Some(remote) = self.learner.remote() else { return Ok(()) };
        if let Some(reference) = &self.auxiliary.reference {
            remote.send_reference(reference)?;
        }
        let number = |network: &CriticNetwork| network.learner.remote().map(|remote| remote.network);
        let critic = self.auxiliary.critic.as_ref();
        remote.send_command(&RankCommand::Update(Box::new(UpdateCommand {
            network: remote.network,
            critic: critic.map(|critic| (critic.config, critic.network.as_ref().and_then(number))),
            algorithm: Cow::Borrowed(&self.config.algorithm),
            split: self.config.split,
            epochs: self.config.epochs,
            bitwise: self.config.bitwise,
            version: self.version,
            learning_rate,
            groups: groups.iter().map(|group| Cow::Borrowed(&**group)).collect(),
            demonstrations: Cow::Borrowed(demonstrations),
        })))
    }

    fn not_bitwise(
        &self,
        groups: &[Arc<Group>],
        row: BatchRow<'_>,
        mismatch: LogprobMismatch,
    ) -> TrainerError {
        let LogprobMismatch { token, behavior, proximal, .. } = mismatch;
        let mut all = groups.iter().flat_map(|group| group.trajectories.iter().map(|t| (group.id, t)));
        let (group, trajectory) = all
            .find(|(_, trajectory)| trajectory.samples().any(|sample| std::ptr::eq(sample, row.sample)))
            .expect("rows are made of the samples of the batch");
        let (step, trajectory) = (self.version.next().0, trajectory.index);
        TrainerError::NotBitwise { step, group, trajectory, token, behavior, proximal }
    }
}
