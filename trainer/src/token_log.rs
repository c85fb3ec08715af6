//! The values of single tokens in an update, for the logs of a run: advantages, and log-probabilities at the start of the
//! step.
//!
//! Invariant: it costs no pass of the network. A log-probability is reported if the update computes it in this process:
//! in a scoring pass, or before the first optimizer step.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use trajectory::{Group, GroupId, Sample};

use crate::batch::BatchRow;
use crate::loss_inputs::LossInputs;

/// The trained tokens of one row; `T` of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowTokens {
    /// Its group.
    pub group: GroupId,
    /// Index of its trajectory in the group.
    pub index: u32,
    /// Which branch of the trajectory it is, from 0.
    pub branch: usize,
    /// `[T]` advantages.
    pub advantages: Vec<f64>,
    /// `[T]` log-probabilities under the policy at the start of the step, nats; `None` where they are not known.
    pub start_logprobs: Option<Vec<f64>>,
}

/// The rows of a batch whose tokens are reported, and the log-probabilities that were computed of them.
#[derive(Debug)]
pub struct TokenLog {
    /// `[rows]` whether the row is reported.
    wanted: Vec<bool>,
    /// By row.
    start_logprobs: Mutex<BTreeMap<usize, Vec<f64>>>,
}

impl TokenLog {
    /// Reports the `rows` of `samples`.
    pub(crate) fn new(rows: &[BatchRow<'_>], samples: &[&Sample]) -> Self {
        let is_wanted = |row: &BatchRow<'_>| samples.iter().any(|sample| std::ptr::eq(*sample, row.sample));
        Self { wanted: rows.iter().map(is_wanted).collect(), start_logprobs: Mutex::default() }
    }

    /// Takes the log-probabilities of `row` at the start of the step, `[T]`, nats.
    pub(crate) fn observe(&self, row: usize, start_logprobs: &[f64]) {
        if self.wanted.get(row) == Some(&true) {
            let mut known = self.start_logprobs.lock().unwrap_or_else(PoisonError::into_inner);
            known.insert(row, start_logprobs.to_vec());
        }
    }

    /// The tokens of the reported rows, which belong to `groups`.
    pub(crate) fn tokens<G: AsRef<Group>>(
        self,
        groups: &[G],
        rows: &[BatchRow<'_>],
        inputs: &[LossInputs],
    ) -> Vec<RowTokens> {
        let mut known = self.start_logprobs.into_inner().unwrap_or_else(PoisonError::into_inner);
        let each = rows.iter().zip(inputs).enumerate().filter(|(row, _)| self.wanted[*row]);
        each.filter_map(|(row, (of, inputs))| {
            let (group, index, branch) = groups.iter().find_map(|group| place(group.as_ref(), of.sample))?;
            let start_logprobs = inputs.start_logprobs.clone().or_else(|| known.remove(&row));
            Some(RowTokens { group, index, branch, advantages: inputs.advantages.clone(), start_logprobs })
        })
        .collect()
    }
}

/// The group, the index of the trajectory and the branch of `sample`, if it belongs to `group`.
fn place(group: &Group, sample: &Sample) -> Option<(GroupId, u32, usize)> {
    group.trajectories.iter().find_map(|trajectory| {
        let branch = trajectory.samples().position(|own| std::ptr::eq(own, sample))?;
        Some((group.id, trajectory.index, branch))
    })
}
