//! The language-model head fused with log-softmax, target log-probability and entropy, as Cut Cross-Entropy (Wijmans et al.
//! 2024, arXiv 2411.09009) and the chunked fused linear loss of Liger Kernel (Hsu et al. 2024, arXiv 2410.10989).
//!
//! Invariant: logits are in memory for a few rows at a time; those of a whole batch never are.

use candle_core::{Result, Tensor};

use super::gemm::{Right, StridedMatrix, multiply_add};
use super::linear::Linear;
use super::simd::vectorized;
use super::softmax::{probabilities, scale_and_normalizer};
use super::{matrix, row_ranges, unwritten, values};
use crate::ThreadPool;

/// Logits in memory at a time: enough rows that reading the whole weight, and reading and writing its gradient, costs little
/// beside the products.
const LOGITS: usize = 1 << 24;

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

/// Rows whose logits are in memory at a time.
fn rows_at_a_time(vocabulary: usize) -> usize {
    (LOGITS / vocabulary).max(64)
}

/// `[M]` predictions for `hidden [M, d]` and `targets [M]`.
pub(crate) fn predict(
    hidden: &Tensor,
    head: &Linear,
    targets: &[Target<'_>],
    pool: &ThreadPool,
) -> Result<Vec<Prediction>> {
    let (_, width) = hidden.dims2()?;
    let (hidden, vocabulary) = (values(hidden)?, head.output());
    let rows = rows_at_a_time(vocabulary);
    let mut logits = unwritten(rows.min(targets.len()) * vocabulary);
    let mut predictions = Vec::with_capacity(targets.len());
    for (hidden, targets) in hidden.chunks(rows * width).zip(targets.chunks(rows)) {
        let logits = &mut logits[..targets.len() * vocabulary];
        head.apply_slice(hidden, logits, pool);
        let each = row_ranges(targets.len(), pool.threads(), 1)[0].len();
        let parts = logits.chunks_mut(each * vocabulary).zip(targets.chunks(each)).collect();
        let predicted = pool.map(parts, |(logits, targets): (&mut [f32], &[Target<'_>])| {
            let rows = logits.chunks_exact_mut(vocabulary).zip(targets);
            rows.map(|(row, target)| Distribution::new(row, target).prediction()).collect::<Vec<_>>()
        });
        predictions.extend(predicted.into_iter().flatten());
    }
    Ok(predictions)
}

/// Gradient `[M, d]` of `hidden [M, d]` for `targets [M]` and the slopes `gradients [M]` of their predictions; adds that of
/// the head's weight to `weight_gradient [V, d]`.
pub(crate) fn predict_backward(
    hidden: &Tensor,
    head: &Linear,
    targets: &[Target<'_>],
    gradients: &[PredictionGradient],
    weight_gradient: &mut [f32],
    pool: &ThreadPool,
) -> Result<Tensor> {
    let (_, width) = hidden.dims2()?;
    let (hidden, vocabulary) = (values(hidden)?, head.output());
    let mut d_hidden = unwritten(hidden.len());
    let rows = rows_at_a_time(vocabulary);
    let mut logits = unwritten(rows.min(targets.len()) * vocabulary);
    let chunks = targets.chunks(rows).zip(gradients.chunks(rows));
    let chunks = chunks.zip(hidden.chunks(rows * width).zip(d_hidden.chunks_mut(rows * width)));
    for ((targets, gradients), (hidden, d_hidden)) in chunks {
        let logits = &mut logits[..targets.len() * vocabulary];
        head.apply_slice(hidden, logits, pool);
        let each = row_ranges(targets.len(), pool.threads(), 1)[0].len();
        let slopes = targets.chunks(each).zip(gradients.chunks(each));
        let outs = logits.chunks_mut(each * vocabulary).zip(d_hidden.chunks_mut(each * width));
        pool.map(slopes.zip(outs).collect(), |((targets, gradients), (logits, d_hidden))| {
            let rows = logits.chunks_exact_mut(vocabulary).zip(targets.iter().zip(gradients));
            rows.for_each(|(row, (target, gradient))| differentiate(row, target, *gradient));
            head.input_gradient_slice(logits, d_hidden);
        });
        let d_logits = &*logits;
        let ranges = row_ranges(vocabulary, pool.threads(), 8);
        let outs = weight_gradient.chunks_mut(ranges[0].len() * width);
        pool.map(ranges.into_iter().zip(outs).collect(), |(rows, out)| {
            let left = StridedMatrix::new(d_logits, vocabulary).transposed().rows(rows);
            multiply_add(left, Right::Unpacked(StridedMatrix::new(hidden, width)), out);
        });
    }
    matrix(d_hidden, width)
}

/// One row of logits as the sampling distribution of a target: temperature and truncation applied.
struct Distribution<'a> {
    target: &'a Target<'a>,
    /// Scaled logits of the kept tokens first; all tokens if nothing was cut off.
    scaled: &'a mut [f32],
    log_normalizer: f32,
}

impl<'a> Distribution<'a> {
    fn new(row: &'a mut [f32], target: &'a Target<'a>) -> Self {
        let scaled = match target.kept {
            None => row,
            Some(kept) => {
                // Ascending ids: slot i is read at an index of at least i, so compacting in place is safe.
                for (slot, id) in kept.iter().enumerate() {
                    row[slot] = row[*id as usize];
                }
                &mut row[..kept.len()]
            }
        };
        let log_normalizer = scale_and_normalizer(scaled, 1.0 / target.temperature);
        Self { target, scaled, log_normalizer }
    }

    fn prediction(self) -> Prediction {
        let logprob = (self.scaled[self.target.slot()] - self.log_normalizer).min(0.0);
        Prediction { logprob, entropy: probabilities(self.scaled, self.log_normalizer), value: 0.0 }
    }
}

/// Turns a row of logits `z` into the derivatives of a loss by them: `d log p_t / d z_i = [i = t] - p_i` and
/// `d H / d z_i = -p_i (log p_i + H)`, both times `1 / temperature`; zero for tokens that were cut off.
fn differentiate(row: &mut [f32], target: &Target<'_>, gradient: PredictionGradient) {
    let Distribution { scaled, log_normalizer, .. } = Distribution::new(row, target);
    let slot = target.slot();
    let inv = 1.0 / target.temperature;
    let log_p =
        (gradient.entropy != 0.0).then(|| scaled.iter().map(|z| z - log_normalizer).collect::<Vec<_>>());
    let entropy = probabilities(scaled, log_normalizer);
    match log_p {
        None => scale(scaled, -gradient.logprob, inv),
        Some(log_p) => {
            for (p, log_p) in scaled.iter_mut().zip(log_p) {
                *p = (-gradient.logprob * *p - gradient.entropy * *p * (log_p + entropy)) * inv;
            }
        }
    }
    scaled[slot] += gradient.logprob * inv;
    let Some(kept) = target.kept else { return };
    row[kept.len()..].fill(0.0);
    // Ascending ids: slot i moves to an index of at least i, and those behind it have moved.
    for (slot, id) in kept.iter().enumerate().rev() {
        let d = std::mem::take(&mut row[slot]);
        row[*id as usize] = d;
    }
}

vectorized! {
    /// `x = x * by * then` for every value.
    fn scale(values: &mut [f32], by: f32, then: f32) {
        for x in values {
            *x = by * *x * then;
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

    fn loss(hidden: &[f32], weight: &[f32], targets: &[Target<'_>], c: &[PredictionGradient]) -> f64 {
        let hidden = Tensor::from_vec(hidden.to_vec(), (targets.len(), WIDTH), &Device::Cpu).unwrap();
        let predictions =
            predict(&hidden, &Linear::packed(weight, WIDTH, None), targets, &ThreadPool::single()).unwrap();
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
        let tensor = Tensor::from_vec(hidden.clone(), (rows, WIDTH), &Device::Cpu).unwrap();
        let mut dw = vec![0.0; weight.len()];
        let layer = Linear::trainable(&weight, WIDTH);
        let dh = predict_backward(&tensor, &layer, &targets, &c, &mut dw, &ThreadPool::single()).unwrap();
        gradient(|h| loss(h, &weight, &targets, &c), &hidden, &values(&dh).unwrap(), 2e-3);
        gradient(|w| loss(&hidden, w, &targets, &c), &weight, &dw, 2e-3);
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
                predict(&hidden, &head, &[target], &ThreadPool::single()).unwrap()[0].logprob.exp()
            })
            .sum();
        assert!((total - 1.0).abs() < 1e-6, "{total}");
    }
}
