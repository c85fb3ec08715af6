//! The language-model head fused with log-softmax, target log-probability and entropy, as Cut Cross-Entropy (Wijmans et al.
//! 2024, arXiv 2411.09009) and the chunked fused linear loss of Liger Kernel (Hsu et al. 2024, arXiv 2410.10989).
//!
//! Invariant: logits are in memory for a few rows at a time; those of a whole batch never are.

mod shared;

use std::ops::Range;

use candle_core::{Result, Tensor};
use collective::even_shards;

use self::shared::{LogitsMove, exchange_logits, gather_predictions};
use super::gemm::{Right, StridedMatrix, multiply_add};
use super::linear::Linear;
use super::simd::{exp, vectorized};
use super::softmax::{entropy, scale_and_normalizer};
use super::{row_ranges, unwritten, values};
use crate::low_rank::WeightGradient;
use crate::pass_ranks::failed;
use crate::{TensorRanks, ThreadPool};

/// Logits in memory at a time: enough rows that reading the whole weight, and reading and writing its gradient, costs little
/// beside the products.
const LOGITS: usize = 1 << 25;

/// Rows whose logits are in memory at a time, of a vocabulary of `vocab_size` tokens, if they have at most `logits`.
fn rows_at_a_time(logits: usize, vocab_size: usize) -> usize {
    (logits / vocab_size.max(1)).max(8)
}

/// Memory of the logits of a training pass that predicts `rows` tokens of a vocabulary of `vocab_size`, bytes.
#[must_use]
pub fn logits_bytes(rows: usize, vocab_size: usize) -> usize {
    let rows = rows.min(rows_at_a_time(LOGITS, vocab_size));
    rows.saturating_mul(vocab_size).saturating_mul(size_of::<f32>())
}

/// The token that a row predicts, and the distribution of its log-probability.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// The token whose log-probability is wanted.
    pub token: u32,
    /// Temperature of the distribution, above 0.
    pub temperature: f32,
    /// `[kept]` token ids that top-p, min-p and top-k left, ascending; `None` for all.
    pub kept: Option<&'a [u32]>,
}

impl Target<'_> {
    /// The slots of a row of logits that belong to tokens of the distribution.
    fn scaled<'r>(&self, row: &'r mut [f32]) -> &'r mut [f32] {
        let slots = self.kept.map_or(row.len(), <[u32]>::len);
        &mut row[..slots]
    }

    /// Index of the token among the kept ones.
    fn slot(&self) -> usize {
        match self.kept {
            None => self.token as usize,
            Some(kept) => kept.partition_point(|id| *id < self.token),
        }
    }
}

/// Result of the head for one target.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prediction {
    /// Log-probability of the target token, nats.
    pub logprob: f32,
    /// Entropy of the distribution, nats.
    pub entropy: f32,
    /// Value estimate of the state before the token; 0 without a value head.
    pub value: f32,
}

impl Prediction {
    /// Numbers of a prediction in a message.
    pub const NUMBERS: usize = 3;

    /// `[3 n]` the numbers of `predictions [n]` in a message.
    #[must_use]
    pub fn to_numbers(predictions: &[Self]) -> Vec<f32> {
        predictions.iter().flat_map(|p| [p.logprob, p.entropy, p.value]).collect()
    }

    /// The predictions of the `numbers [3 n]` of a message.
    pub fn of_numbers(numbers: &[f32]) -> impl Iterator<Item = Self> {
        let triples = numbers.as_chunks::<{ Self::NUMBERS }>().0.iter();
        triples.map(|&[logprob, entropy, value]| Self { logprob, entropy, value })
    }
}

/// Derivative of a loss by a [`Prediction`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PredictionGradient {
    /// By the log-probability.
    pub logprob: f32,
    /// By the entropy.
    pub entropy: f32,
    /// By the value; without a value head it has no effect.
    pub value: f32,
}

/// Derivatives of a loss by the predictions of some consecutive samples.
pub type SampleSlopes<'a> = dyn FnMut(Range<usize>, &[Prediction]) -> Vec<PredictionGradient> + 'a;

/// What a training pass predicts.
#[derive(Clone, Copy, Debug)]
pub struct TrainedTargets<'a> {
    /// `[n]` row of the pack that predicts each target.
    pub rows: &'a [usize],
    /// `[n]` the targets.
    pub targets: &'a [Target<'a>],
    /// Numbers of targets of each sample, which add up to `n`. The loss of a sample depends on its own predictions.
    pub samples: &'a [usize],
}

/// The head of a pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedHead<'a> {
    /// `[V, d]`, or this rank's rows of it.
    pub(crate) weight: &'a Linear,
    /// The ranks that have the other rows; `None` if this one has all.
    pub(crate) tensor: Option<&'a TensorRanks>,
}

/// Result of [`train`].
pub(crate) struct HeadReverse {
    /// `[M]` derivatives of the loss by the predictions.
    pub(crate) slopes: Vec<PredictionGradient>,
    /// `[M, d]` gradient of the hidden states.
    pub(crate) d_hidden: Vec<f32>,
}

/// `[M]` predictions for `hidden [M, d]` and `targets [M]`.
pub(crate) fn predict(
    hidden: &Tensor,
    head: SharedHead<'_>,
    targets: &[Target<'_>],
    pool: &ThreadPool,
) -> Result<Vec<Prediction>> {
    let hidden = values(hidden)?;
    let mut logits = RowLogits::new(&hidden, head, targets, LOGITS, pool);
    let mut predictions = Vec::with_capacity(targets.len());
    for rows in row_chunks(0..targets.len(), logits.most_rows) {
        predictions.extend(logits.normalize(rows)?);
    }
    Ok(predictions)
}

/// Predictions of the targets for `hidden [M, d]`, and backward with the derivatives that `slopes_of` returns for them.
/// `predictions [M]` have their values and get the rest. Adds the gradient of the head's weight `[V, d]` to `weight_gradient`.
/// Logits are computed once, but for samples whose logits exceed the memory.
pub(crate) fn train(
    hidden: &Tensor,
    head: SharedHead<'_>,
    trained: TrainedTargets<'_>,
    predictions: &mut [Prediction],
    slopes_of: &mut SampleSlopes<'_>,
    weight_gradient: &mut WeightGradient<'_>,
    pool: &ThreadPool,
) -> Result<HeadReverse> {
    let hidden = values(hidden)?;
    let logits = RowLogits::new(&hidden, head, trained.targets, LOGITS, pool);
    logits.train(trained.samples, predictions, slopes_of, weight_gradient)
}

/// Consecutive samples, and their rows.
struct SampleRows {
    samples: Range<usize>,
    rows: Range<usize>,
}

/// Cuts samples, whose numbers of rows are given, into chunks of at most `most` rows, or of one sample.
fn sample_chunks(samples: &[usize], most: usize) -> Vec<SampleRows> {
    let mut chunks: Vec<SampleRows> = Vec::new();
    let mut end = 0;
    for (sample, rows) in samples.iter().enumerate() {
        match chunks.last_mut() {
            Some(last) if end + rows - last.rows.start <= most => {
                (last.samples.end, last.rows.end) = (sample + 1, end + rows);
            }
            _ => chunks.push(SampleRows { samples: sample..sample + 1, rows: end..end + rows }),
        }
        end += rows;
    }
    chunks
}

/// Cuts rows into ranges of at most `most`.
fn row_chunks(rows: Range<usize>, most: usize) -> Vec<Range<usize>> {
    rows.clone().step_by(most).map(|start| start..(start + most).min(rows.end)).collect()
}

/// The logits of some rows at a time.
struct RowLogits<'a> {
    /// `[M, d]`
    hidden: &'a [f32],
    width: usize,
    head: SharedHead<'a>,
    /// `[M]`
    targets: &'a [Target<'a>],
    pool: &'a ThreadPool,
    /// Rows whose logits are in memory at a time.
    most_rows: usize,
    /// `[most_rows, V]`; among ranks, of the rows that this one normalises.
    logits: Vec<f32>,
    /// Of the rows whose logits are in memory.
    normalized: Vec<NormalizedRow>,
}

/// A row whose logits are scaled, those of kept tokens first.
#[derive(Clone, Copy)]
struct NormalizedRow {
    log_normalizer: f32,
    prediction: Prediction,
}

impl<'a> RowLogits<'a> {
    /// With at most `most` logits in memory, but those of a few rows.
    fn new(
        hidden: &'a [f32],
        head: SharedHead<'a>,
        targets: &'a [Target<'a>],
        most: usize,
        pool: &'a ThreadPool,
    ) -> Self {
        let width = hidden.len().checked_div(targets.len()).unwrap_or(0);
        let most_rows = rows_at_a_time(most, head.weight.output());
        Self { hidden, width, head, targets, pool, most_rows, logits: Vec::new(), normalized: Vec::new() }
    }

    /// See [`train`].
    fn train(
        mut self,
        samples: &[usize],
        predictions: &mut [Prediction],
        slopes_of: &mut SampleSlopes<'_>,
        weight_gradient: &mut WeightGradient<'_>,
    ) -> Result<HeadReverse> {
        let mut d_hidden = unwritten(self.hidden.len());
        let mut slopes = Vec::with_capacity(self.targets.len());
        for SampleRows { samples, rows } in sample_chunks(samples, self.most_rows) {
            let chunks = row_chunks(rows.clone(), self.most_rows);
            for chunk in &chunks {
                let normalized = self.normalize(chunk.clone())?;
                for (prediction, row) in predictions[chunk.clone()].iter_mut().zip(normalized) {
                    *prediction = Prediction { value: prediction.value, ..row };
                }
            }
            slopes.extend(slopes_of(samples, &predictions[rows]));
            for chunk in &chunks {
                if chunks.len() > 1 {
                    self.normalize(chunk.clone())?;
                }
                self.reverse(chunk.clone(), &slopes, &mut d_hidden, weight_gradient)?;
            }
        }
        Ok(HeadReverse { slopes, d_hidden })
    }

    /// Predictions of `rows`, whose logits are computed and scaled. Among ranks each normalises some of them.
    fn normalize(&mut self, rows: Range<usize>) -> Result<Vec<Prediction>> {
        let own = self.own_rows(&rows);
        let vocabulary = self.vocabulary();
        if self.logits.len() < own.len() * vocabulary {
            self.logits = unwritten(own.len() * vocabulary);
        }
        let hidden = &self.hidden[rows.start * self.width..rows.end * self.width];
        let logits = &mut self.logits[..own.len() * vocabulary];
        match self.head.tensor {
            None => self.head.weight.apply_slice(hidden, logits, self.pool),
            Some(tensor) => {
                let mut parts = unwritten(rows.len() * self.head.weight.output());
                self.head.weight.apply_slice(hidden, &mut parts, self.pool);
                exchange_logits(tensor, rows.len(), LogitsMove::ToRows, &mut parts, logits)?;
            }
        }
        let each = row_ranges(own.len(), self.pool.threads(), 1)[0].len().max(1);
        let parts = logits.chunks_mut(each * vocabulary).zip(self.targets[own].chunks(each)).collect();
        let normalized = self.pool.map(parts, |(logits, targets): (&mut [f32], &[Target<'_>])| {
            let rows = logits.chunks_exact_mut(vocabulary).zip(targets);
            rows.map(|(row, target)| normalize(row, target)).collect::<Vec<_>>()
        });
        self.normalized = normalized.concat();
        let own: Vec<Prediction> = self.normalized.iter().map(|row| row.prediction).collect();
        match self.head.tensor {
            None => Ok(own),
            Some(tensor) => gather_predictions(&*tensor.ranks, rows.len(), &own),
        }
    }

    /// Tokens of all ranks.
    fn vocabulary(&self) -> usize {
        self.head.tensor.map_or(self.head.weight.output(), |tensor| tensor.vocabulary)
    }

    /// The rows of `rows` that this rank normalises.
    fn own_rows(&self, rows: &Range<usize>) -> Range<usize> {
        let Some(TensorRanks { ranks, .. }) = self.head.tensor else { return rows.clone() };
        let own = even_shards(rows.len(), ranks.world())[ranks.rank()].clone();
        rows.start + own.start..rows.start + own.end
    }

    /// Writes the gradient of the hidden states of `rows`, whose logits are in memory, to their part of `d_hidden [M, d]`, for
    /// the derivatives `slopes [M]`, and adds that of the weight. The logits are lost.
    fn reverse(
        &mut self,
        rows: Range<usize>,
        slopes: &[PredictionGradient],
        d_hidden: &mut [f32],
        weight_gradient: &mut WeightGradient<'_>,
    ) -> Result<()> {
        let Self { hidden, width, head, targets, pool, .. } = *self;
        let (own, vocabulary) = (self.own_rows(&rows), self.vocabulary());
        let logits = &mut self.logits[..own.len() * vocabulary];
        let each = row_ranges(own.len(), pool.threads(), 1)[0].len().max(1);
        let of_rows = targets[own.clone()].chunks(each).zip(slopes[own].chunks(each));
        let of_rows = of_rows.zip(self.normalized.chunks(each)).zip(logits.chunks_mut(each * vocabulary));
        pool.map(of_rows.collect(), |(((targets, slopes), normalized), logits)| {
            let of_rows = targets.iter().zip(slopes).zip(normalized);
            for (row, ((target, slope), normalized)) in logits.chunks_exact_mut(vocabulary).zip(of_rows) {
                differentiate(row, target, normalized, *slope);
            }
        });
        let mut parts;
        let d_logits = match head.tensor {
            None => logits,
            Some(tensor) => {
                parts = unwritten(rows.len() * head.weight.output());
                exchange_logits(tensor, rows.len(), LogitsMove::ToVocabulary, &mut parts, logits)?;
                &mut parts
            }
        };
        let values = rows.start * width..rows.end * width;
        let (vocabulary, d_hidden) = (head.weight.output(), &mut d_hidden[values.clone()]);
        let each = row_ranges(rows.len(), pool.threads(), 1)[0].len();
        let of_rows = d_logits.chunks(each * vocabulary).zip(d_hidden.chunks_mut(each * width));
        pool.map(of_rows.collect(), |(g, d_hidden)| head.weight.input_gradient_slice(g, d_hidden));
        if let Some(TensorRanks { ranks, .. }) = head.tensor {
            ranks.all_reduce(d_hidden).map_err(failed)?;
        }
        let (d_logits, hidden) = (&*d_logits, &hidden[values]);
        let weight_gradient = match weight_gradient {
            WeightGradient::Whole(gradient) => gradient,
            WeightGradient::Factors(all) => {
                all.iter_mut().for_each(|own| own.add_values(hidden, width, d_logits, vocabulary));
                return Ok(());
            }
        };
        let hidden = StridedMatrix::new(hidden, width);
        let ranges = row_ranges(vocabulary, pool.threads(), 8);
        let outs = weight_gradient.chunks_mut(ranges[0].len() * width);
        pool.map(ranges.into_iter().zip(outs).collect(), |(rows, out)| {
            let left = StridedMatrix::new(d_logits, vocabulary).transposed().rows(rows);
            multiply_add(left, Right::Unpacked(hidden), out);
        });
        Ok(())
    }
}

/// Turns a row of logits into the scaled logits of the sampling distribution, temperature and truncation applied.
fn normalize(row: &mut [f32], target: &Target<'_>) -> NormalizedRow {
    // Ascending ids: slot i is read at an index of at least i, so compacting in place is safe.
    for (slot, id) in target.kept.iter().copied().flatten().enumerate() {
        row[slot] = row[*id as usize];
    }
    let scaled = target.scaled(row);
    let log_normalizer = scale_and_normalizer(scaled, 1.0 / target.temperature);
    let logprob = (scaled[target.slot()] - log_normalizer).min(0.0);
    let prediction = Prediction { logprob, entropy: entropy(scaled, log_normalizer), value: 0.0 };
    NormalizedRow { log_normalizer, prediction }
}

/// Turns a normalised row of logits `z` into the derivatives of a loss by them: `d log p_t / d z_i = [i = t] - p_i` and
/// `d H / d z_i = -p_i (log p_i + H)`, both times `1 / temperature`; zero for tokens that were cut off.
fn differentiate(
    row: &mut [f32],
    target: &Target<'_>,
    normalized: &NormalizedRow,
    slope: PredictionGradient,
) {
    let NormalizedRow { log_normalizer, prediction: Prediction { entropy, .. } } = *normalized;
    let slot = target.slot();
    let inv = 1.0 / target.temperature;
    let scaled = target.scaled(row);
    if slope.entropy == 0.0 {
        logprob_slopes(scaled, log_normalizer, -slope.logprob, inv);
    } else {
        entropy_slopes(scaled, log_normalizer, entropy, slope, inv);
    }
    scaled[slot] += slope.logprob * inv;
    let Some(kept) = target.kept else { return };
    row[kept.len()..].fill(0.0);
    // Ascending ids: slot i moves to an index of at least i, and those behind it have moved.
    for (slot, id) in kept.iter().enumerate().rev() {
        let d = std::mem::take(&mut row[slot]);
        row[*id as usize] = d;
    }
}

vectorized! {
    /// Turns each scaled logit into `by p inv`.
    fn logprob_slopes(scaled: &mut [f32], log_normalizer: f32, by: f32, inv: f32) {
        for z in scaled {
            *z = by * exp(*z - log_normalizer) * inv;
        }
    }
}

vectorized! {
    /// The same with the derivative of the entropy.
    fn entropy_slopes(scaled: &mut [f32], log_normalizer: f32, entropy: f32, slope: PredictionGradient, inv: f32) {
        for z in scaled {
            let log_p = *z - log_normalizer;
            let p = exp(log_p);
            *z = (-slope.logprob * p - slope.entropy * p * (log_p + entropy)) * inv;
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::super::check::{gradient, noise};
    use super::*;

    const WIDTH: usize = 6;
    const VOCABULARY: usize = 37;

    fn alone(weight: &Linear) -> SharedHead<'_> {
        SharedHead { weight, tensor: None }
    }

    fn loss(hidden: &[f32], weight: &[f32], targets: &[Target<'_>], c: &[PredictionGradient]) -> f64 {
        let hidden = Tensor::from_vec(hidden.to_vec(), (targets.len(), WIDTH), &Device::Cpu).unwrap();
        let predictions =
            predict(&hidden, alone(&Linear::packed(weight, WIDTH, None)), targets, &ThreadPool::single())
                .unwrap();
        let term = |(p, c): (&Prediction, &PredictionGradient)| {
            f64::from(p.logprob) * f64::from(c.logprob) + f64::from(p.entropy) * f64::from(c.entropy)
        };
        predictions.iter().zip(c).map(term).sum()
    }

    #[test]
    fn backward_is_the_derivative() {
        let kept = [3, 9, 20, 36];
        let rows = 67;
        let target = |i: usize| match i % 3 {
            0 => Target { token: (i * 5 % VOCABULARY) as u32, temperature: 1.0, kept: None },
            1 => Target { token: (i % VOCABULARY) as u32, temperature: 0.6, kept: None },
            _ => Target { token: kept[i % 4], temperature: 1.3, kept: Some(&kept) },
        };
        let targets: Vec<_> = (0..rows).map(target).collect();
        let (hidden, weight) = (noise(rows * WIDTH, 1), noise(VOCABULARY * WIDTH, 2));
        let c: Vec<_> = noise(2 * rows, 3)
            .chunks(2)
            .map(|c| PredictionGradient { logprob: c[0], entropy: c[1], value: 0.0 })
            .collect();
        let layer = Linear::trainable(&weight, WIDTH);
        let expected = {
            let tensor = Tensor::from_vec(hidden.clone(), (rows, WIDTH), &Device::Cpu).unwrap();
            predict(&tensor, alone(&layer), &targets, &ThreadPool::single()).unwrap()
        };
        let samples = [20, 0, 17, 30];
        // All at a time, samples at a time, and less than a sample.
        for most in [rows, 40, 10] {
            let pool = ThreadPool::single();
            let logits = RowLogits::new(&hidden, alone(&layer), &targets, most * VOCABULARY, &pool);
            let (mut predictions, mut dw) = (vec![Prediction::default(); rows], vec![0.0; weight.len()]);
            let mut calls = Vec::new();
            let mut slopes_of = |range: Range<usize>, predicted: &[Prediction]| {
                let start: usize = samples[..range.start].iter().sum();
                calls.push(range);
                c[start..start + predicted.len()].to_vec()
            };
            let mut whole = WeightGradient::Whole(&mut dw);
            let HeadReverse { slopes, d_hidden } =
                logits.train(&samples, &mut predictions, &mut slopes_of, &mut whole).unwrap();
            assert_eq!(calls.len(), [1, 2, 4][[rows, 40, 10].iter().position(|m| *m == most).unwrap()]);
            assert_eq!((&predictions, &slopes), (&expected, &c));
            gradient(|h| loss(h, &weight, &targets, &c), &hidden, &d_hidden, 2e-3);
            gradient(|w| loss(&hidden, w, &targets, &c), &weight, &dw, 2e-3);
        }
    }

    #[test]
    fn truncation_renormalises_over_what_was_kept() {
        let weight = noise(VOCABULARY * WIDTH, 2);
        let hidden = Tensor::from_vec(noise(WIDTH, 1), (1, WIDTH), &Device::Cpu).unwrap();
        let head = Linear::packed(&weight, WIDTH, None);
        let kept = [4, 17, 30];
        let total: f32 = kept
            .iter()
            .map(|t| {
                let target = Target { token: *t, temperature: 0.8, kept: Some(&kept) };
                predict(&hidden, alone(&head), &[target], &ThreadPool::single()).unwrap()[0].logprob.exp()
            })
            .sum();
        assert!((total - 1.0).abs() < 1e-6, "{total}");
    }
}
