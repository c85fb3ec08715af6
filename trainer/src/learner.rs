//! The weights that are trained: forward and backward over micro-batches, clipping, the optimizer.
//!
//! Invariant: a step is a function of the rows, the weights and the optimizer state. Ranks (threads) add their
//! gradients in order of rank, so a step repeats bit for bit, and world sizes differ by rounding only.

use std::sync::Arc;

use model::{Config, Decoder, Gradients, Parameters, Prediction, PredictionGradient, Purpose};

use crate::TrainerError;
use crate::adamw::{AdamW, AdamWConfig};
use crate::batch::Row;
use crate::packing::{MicroBatch, Packed, assign, micro_batches, pack, row_tokens};

/// How the learner computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearnerConfig {
    /// Parameters of the optimizer.
    pub adamw: AdamWConfig,
    /// Gradients are scaled down to this norm.
    pub max_grad_norm: f32,
    /// Tokens of a micro-batch.
    pub microbatch_tokens: usize,
    /// Ranks that share a step: threads.
    pub world: usize,
}

/// One policy in training.
#[derive(Debug)]
pub struct Learner {
    config: LearnerConfig,
    model: Config,
    parameters: Parameters,
    optimizer: AdamW,
    /// The parameters, packed; made anew after every update.
    decoder: Decoder,
}

/// A loss over the predictions of one row.
pub trait RowLoss: Sync {
    /// What it reports of the tokens of a rank; merged in order of rank.
    type Report: Default + Send;

    /// Derivatives of the loss by each of `predictions`, which belong to the trained tokens of row `index`.
    fn row(
        &self,
        index: usize,
        predictions: &[Prediction],
        report: &mut Self::Report,
    ) -> Vec<PredictionGradient>;
}

impl Learner {
    /// Starts from `parameters`; `optimizer` is `None` for a fresh one.
    #[must_use]
    pub fn new(
        config: LearnerConfig,
        model: Config,
        parameters: Parameters,
        optimizer: Option<AdamW>,
    ) -> Self {
        let optimizer = optimizer.unwrap_or_else(|| AdamW::new(config.adamw, parameters.layout().len()));
        let decoder = Decoder::new(&model, &parameters, Purpose::Training);
        Self { config, model, parameters, optimizer, decoder }
    }

    /// The weights.
    #[must_use]
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// The optimizer with its moments.
    #[must_use]
    pub fn optimizer(&self) -> &AdamW {
        &self.optimizer
    }

    /// The model that is trained.
    #[must_use]
    pub fn model(&self) -> &Config {
        &self.model
    }

    /// Gives up the weights.
    #[must_use]
    pub fn into_parameters(self) -> Parameters {
        self.parameters
    }

    /// Predictions of the trained tokens of each row under the current weights.
    ///
    /// # Errors
    /// If a token lies beyond the vocabulary.
    pub fn score(&self, rows: &[Row<'_>]) -> Result<Vec<Vec<Prediction>>, TrainerError> {
        let work = |batch: &MicroBatch| -> Result<Vec<(usize, Vec<Prediction>)>, TrainerError> {
            let packed = pack(batch.rows.iter().map(|row| &rows[*row]));
            let all = self.decoder.score(&packed.pack, &packed.positions, &packed.targets)?;
            let mut out = Vec::with_capacity(batch.rows.len());
            let mut from = 0;
            for (row, trained) in batch.rows.iter().zip(&packed.trained) {
                out.push((*row, all[from..from + trained].to_vec()));
                from += trained;
            }
            Ok(out)
        };
        let mut scored = vec![Vec::new(); rows.len()];
        for rank in self.on_ranks(rows, |mine| mine.iter().map(|b| work(b)).collect::<Result<Vec<_>, _>>())? {
            rank.into_iter().flatten().for_each(|(row, predictions)| scored[row] = predictions);
        }
        Ok(scored)
    }

    /// One optimizer step on the sum of `loss` over `rows`. Returns the gradient norm before clipping, and what each
    /// rank reports.
    ///
    /// # Errors
    /// If a token lies beyond the vocabulary or the gradient is not finite; the weights are then as before.
    pub fn step<L: RowLoss>(
        &mut self,
        rows: &[Row<'_>],
        loss: &L,
        learning_rate: f32,
    ) -> Result<(f32, Vec<L::Report>), TrainerError> {
        let ranks = self.on_ranks(rows, |mine| self.accumulate(rows, mine, loss))?;
        let mut reports = Vec::with_capacity(ranks.len());
        let mut total: Option<Gradients> = None;
        for (gradients, report) in ranks {
            reports.push(report);
            match &mut total {
                Some(total) => total.add(&gradients),
                None => total = Some(gradients),
            }
        }
        let Some(mut gradients) = total else { return Ok((0.0, reports)) };
        let norm = norm(gradients.values());
        if !norm.is_finite() {
            return Err(TrainerError::GradientNotFinite {
                update: self.optimizer.updates(),
                rows: rows.len(),
            });
        }
        let scale = self.config.max_grad_norm / (norm + 1e-6);
        if scale < 1.0 {
            gradients.values_mut().iter_mut().for_each(|g| *g *= scale);
        }
        let layout = Arc::clone(self.parameters.layout());
        self.optimizer.update(&layout, self.parameters.values_mut(), gradients.values(), learning_rate);
        self.decoder = Decoder::new(&self.model, &self.parameters, Purpose::Training);
        Ok((norm, reports))
    }

    fn accumulate<L: RowLoss>(
        &self,
        rows: &[Row<'_>],
        mine: &[&MicroBatch],
        loss: &L,
    ) -> Result<(Gradients, L::Report), TrainerError> {
        let mut gradients = Gradients::zeros(self.parameters.layout());
        let mut report = L::Report::default();
        for batch in mine {
            let Packed { pack, positions, targets, trained } = pack(batch.rows.iter().map(|row| &rows[*row]));
            let (predictions, trace) = self.decoder.forward(&pack, &positions, &targets)?;
            let mut slopes = Vec::with_capacity(predictions.len());
            for (row, trained) in batch.rows.iter().zip(&trained) {
                let from = slopes.len();
                slopes.extend(loss.row(*row, &predictions[from..from + trained], &mut report));
            }
            self.decoder.backward(&pack, trace, &targets, &slopes, &mut gradients)?;
        }
        Ok((gradients, report))
    }

    /// Runs `work` on every rank's share of the micro-batches; results in order of rank.
    fn on_ranks<'b, R: Send>(
        &self,
        rows: &[Row<'_>],
        work: impl Fn(&[&MicroBatch]) -> Result<R, TrainerError> + Sync + 'b,
    ) -> Result<Vec<R>, TrainerError> {
        let lengths: Vec<usize> = rows.iter().map(row_tokens).collect();
        let batches = micro_batches(&lengths, self.config.microbatch_tokens, self.config.world);
        let shares: Vec<Vec<&MicroBatch>> = assign(&batches, self.config.world)
            .into_iter()
            .filter(|mine| !mine.is_empty())
            .map(|mine| mine.into_iter().map(|i| &batches[i]).collect())
            .collect();
        if let [only] = &shares[..] {
            return Ok(vec![work(only)?]);
        }
        std::thread::scope(|scope| {
            let ranks: Vec<_> = shares.iter().map(|mine| scope.spawn(|| work(mine))).collect();
            ranks
                .into_iter()
                .map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        })
    }
}

/// Euclidean norm, summed in f64.
fn norm(values: &[f32]) -> f32 {
    values.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt() as f32
}
