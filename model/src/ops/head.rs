//! The language-model head fused with log-softmax, target log-probability and entropy, as Cut Cross-Entropy (Wijmans et al.
//! 2024, arXiv 2411.09009) and the chunked fused linear loss of Liger Kernel (Hsu et al. 2024, arXiv 2410.10989).
//!
//! Invariant: logits are in memory for a few rows at a time; those of a whole batch never are.

use candle_core::{Result, Tensor};

use super::gemm::{Right, StridedMatrix, multiply_add};
use super::linear::Linear;
use super::softmax::{probabilities, scale_and_normalizer};
use super::{matrix, row_ranges, unwritten, values};
use crate::ThreadPool;

/// Logits of one thread that the forward has in memory at a time: they stay in its cache.
const FORWARD: usize = 1 << 18;
/// Logits that the backward has in memory at a time: enough rows that reading and writing the whole weight gradient per pass
/// costs little.
const BACKWARD: usize = 1 << 24;

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

/// `[M]` predictions for `hidden [M, d]` and `targets [M]`.
pub(crate) fn predict(
    hidden: &Tensor,
    head: &Linear,
    targets: &[Target<'_>],
    pool: &ThreadPool,
) -> Result<Vec<Prediction>> {
    let (_, width) = hidden.dims2()?;
    let hidden = values(hidden)?;
    let predict = |rows: std::ops::Range<usize>| {
        let mut predictions = Vec::with_capacity(rows.len());
        let visit = |row: &mut [f32], target: &Target<'_>| {
            predictions.push(Distribution::new(row, target).prediction());
        };
        for_each_row(&hidden[rows.start * width..rows.end * width], width, head, &targets[rows], visit);
        predictions
    };
    Ok(pool.map(row_ranges(targets.len(), pool.threads(), 1), predict).concat())
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
    let rows = (BACKWARD / vocabulary).max(64);
    let chunks = targets.chunks(rows).zip(gradients.chunks(rows));
    let chunks = chunks.zip(hidden.chunks(rows * width).zip(d_hidden.chunks_mut(rows * width)));
    for ((targets, gradients), (hidden, d_hidden)) in chunks {
        let mut d_logits = vec![0.0; targets.len() * vocabulary];
        let ranges = row_ranges(targets.len(), pool.threads(), 1);
        let per_part = ranges[0].len();
        let outs = d_logits.chunks_mut(per_part * vocabulary).zip(d_hidden.chunks_mut(per_part * width));
        pool.map(ranges.into_iter().zip(outs).collect(), |(rows, (d_logits, d_hidden))| {
            let mut outs = d_logits.chunks_exact_mut(vocabulary).zip(&gradients[rows.clone()]);
            let hidden = &hidden[rows.start * width..rows.end * width];
            for_each_row(hidden, width, head, &targets[rows], |row, target| {
                if let Some((out, gradient)) = outs.next() {
                    Distribution::new(row, target).backward(*gradient, out);
                }
            });
            head.input_gradient_slice(d_logits, d_hidden);
        });
        let ranges = row_ranges(vocabulary, pool.threads(), 8);
        let per_part = ranges[0].len();
        let outs = weight_gradient.chunks_mut(per_part * width);
        pool.map(ranges.into_iter().zip(outs).collect(), |(rows, out)| {
            let left = StridedMatrix::new(&d_logits, vocabulary).transposed().rows(rows);
            multiply_add(left, Right::Unpacked(StridedMatrix::new(hidden, width)), out);
        });
    }
    matrix(d_hidden, width)
}

/// Hands each row of logits to `visit`, with its target.
fn for_each_row(
    hidden: &[f32],
    width: usize,
    head: &Linear,
    targets: &[Target<'_>],
    mut visit: impl FnMut(&mut [f32], &Target<'_>),
) {
    let vocabulary = head.output();
    let rows = (FORWARD / vocabulary).clamp(32, 1024);
    let mut logits = unwritten(rows.min(targets.len()) * vocabulary);
    for (hidden, targets) in hidden.chunks(rows * width).zip(targets.chunks(rows)) {
        let logits = &mut logits[..targets.len() * vocabulary];
        head.apply_slice(hidden, logits);
        for (row, target) in logits.chunks_exact_mut(vocabulary).zip(targets) {
            visit(row, target);
        }
    }
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

    /// Index of the target token among the scaled logits.
    fn slot(&self) -> usize {
        match self.target.kept {
            None => self.target.token as usize,
            Some(kept) => kept.partition_point(|id| *id < self.target.token),
        }
    }

    fn prediction(self) -> Prediction {
        let logprob = (self.scaled[self.slot()] - self.log_normalizer).min(0.0);
        Prediction { logprob, entropy: probabilities(self.scaled, self.log_normalizer), value: 0.0 }
    }

    /// `d log p_t / d z_i = [i = t] - p_i` and `d H / d z_i = -p_i (log p_i + H)`, both times `1 / temperature`.
    fn backward(self, gradient: PredictionGradient, out: &mut [f32]) {
        let slot = self.slot();
        let inv = 1.0 / self.target.temperature;
        let log_p = (gradient.entropy != 0.0)
            .then(|| self.scaled.iter().map(|z| z - self.log_normalizer).collect::<Vec<_>>());
        let entropy = probabilities(self.scaled, self.log_normalizer);
        let at = |i: usize| self.target.kept.map_or(i, |kept| kept[i] as usize);
        for (i, p) in self.scaled.iter().enumerate() {
            let mut d = -gradient.logprob * p;
            if let Some(log_p) = &log_p {
                d -= gradient.entropy * p * (log_p[i] + entropy);
            }
            out[at(i)] = d * inv;
        }
        out[at(slot)] += gradient.logprob * inv;
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
