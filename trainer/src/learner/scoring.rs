//! Predictions of rows by all ranks of a learner.

use collective::{HostCollective, Position};
use model::Prediction;
use trajectory::Sample;

use super::{Learner, LearnerProcesses};
use crate::TrainerError;
use crate::frozen::Frozen;
use crate::rank::{PlannedRows, Rank, ScoredRows};
use crate::rank_spans::RankPhase;
use crate::ranks::on_each;

impl Learner {
    /// Predictions of the trained tokens of each row under the current weights.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, or a rank fails.
    pub fn score(&self, rows: &[&Sample]) -> Result<Vec<Vec<Prediction>>, TrainerError> {
        let pool = self.rank_pool(&self.pool);
        let part = |rank| self.config.data(rank);
        self.scored(rows, part, |rank, task| rank.during(RankPhase::Score, || rank.score(task, &pool)))
    }

    /// Predictions of the trained tokens of each row under a frozen model, where that is placed.
    ///
    /// # Errors
    /// If a token is outside its vocabulary, or its weights cannot be read again.
    pub fn score_under(
        &self,
        frozen: &Frozen,
        rows: &[&Sample],
    ) -> Result<Vec<Vec<Prediction>>, TrainerError> {
        let weights = frozen.weights.load()?;
        let pool = self.rank_pool(frozen.pool.as_ref().unwrap_or(&self.pool));
        // A model with its own threads scores beside the policy, whose phases are those of the rank.
        let beside = frozen.pool.is_some() && !self.is_spread();
        self.scored(
            rows,
            |rank| self.config.frozen_part(rank),
            |rank, task| {
                let score = || rank.score_under(&weights, task, &pool);
                if beside { score() } else { rank.during(RankPhase::Score, score) }
            },
        )
    }

    /// Predictions of `rows`; rank `r` computes part `part(r)`, maybe with others.
    fn scored(
        &self,
        rows: &[&Sample],
        part: impl Fn(usize) -> Position,
        score: impl Fn(&Rank, PlannedRows<'_>) -> Result<ScoredRows, TrainerError> + Sync,
    ) -> Result<Vec<Vec<Prediction>>, TrainerError> {
        let plan = self.plan(rows, part(0).world);
        let task = PlannedRows { rows, plan: &plan, targets: None };
        let mut scored = vec![Vec::new(); rows.len()];
        for rank in on_each(self.ranks().collect(), |rank| score(rank, task))? {
            rank.into_iter().for_each(|(row, predictions)| scored[row] = predictions);
        }
        if let Some(LearnerProcesses { collective, .. }) = &self.spread {
            self.first
                .during(RankPhase::Wait, || exchange_predictions(&**collective, task, part, &mut scored))?;
        }
        Ok(scored)
    }
}

/// All-gathers the predictions of all processes into `scored`.
fn exchange_predictions(
    collective: &dyn HostCollective,
    task: PlannedRows<'_>,
    part: impl Fn(usize) -> Position,
    scored: &mut [Vec<Prediction>],
) -> Result<(), TrainerError> {
    const BYTES: usize = 12;
    let rows_of = |rank: usize| task.plan[part(rank).rank].iter().flat_map(|batch| &batch.rows).copied();
    let numbers = |p: &Prediction| [p.logprob, p.entropy, p.value].map(f32::to_le_bytes).concat();
    let own = rows_of(collective.rank()).flat_map(|row| scored[row].iter().flat_map(numbers)).collect();
    for (rank, bytes) in collective.all_gather_bytes(own)?.iter().enumerate() {
        let expected = rows_of(rank).map(|row| task.rows[row].trained_tokens()).sum::<usize>();
        if bytes.len() != BYTES * expected {
            let reason = format!("rank {rank} sent {} bytes for {expected} predictions", bytes.len());
            return Err(TrainerError::Message { reason });
        }
        let (numbers, _) = bytes.as_chunks::<4>();
        let (triples, _) = numbers.as_chunks::<3>();
        let mut predictions = triples.iter().map(|triple| triple.map(f32::from_le_bytes));
        for row in rows_of(rank).filter(|_| rank != collective.rank()) {
            let next = predictions.by_ref().take(task.rows[row].trained_tokens());
            scored[row] =
                next.map(|[logprob, entropy, value]| Prediction { logprob, entropy, value }).collect();
        }
    }
    Ok(())
}
