//! AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101): the factors of one update.
//!
//! Invariant: the factors are functions of the configuration and the update number, so a resumed run has the same ones.
//! `moments.rs` has the loops over the values.

use crate::moments::{AdamwFactors, noise};
use crate::optimizer::OptimizerConfig;

/// Factors of one update of all tensors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdamwUpdate {
    /// Factors that are equal for all tensors.
    factors: AdamwFactors,
    /// Weight decay of matrices: `1 - learning_rate * weight_decay`.
    keep: f32,
}

impl AdamwUpdate {
    /// Factors of update number `update`, from 1, with gradients scaled by `scale`.
    pub(crate) fn new(config: &OptimizerConfig, update: u64, learning_rate: f32, scale: f32) -> Self {
        let OptimizerConfig { beta1, beta2, eps, weight_decay, .. } = *config;
        let t = i32::try_from(update).unwrap_or(i32::MAX);
        let factors = AdamwFactors {
            gradient: scale,
            beta1,
            beta2,
            eps,
            step_size: learning_rate / (1.0 - beta1.powi(t)),
            second_scale: 1.0 / (1.0 - beta2.powi(t)),
            keep: 1.0,
            seed: noise(update as u32),
        };
        Self { factors, keep: 1.0 - learning_rate * weight_decay }
    }

    /// Factors of tensor `tensor`; weight decay applies to matrices only.
    pub(crate) fn of(&self, tensor: u32, matrix: bool) -> AdamwFactors {
        let seed = noise(self.factors.seed ^ tensor);
        AdamwFactors { keep: if matrix { self.keep } else { 1.0 }, seed, ..self.factors }
    }
}

#[cfg(test)]
mod tests {
    use model::{Config, Layout, Sizes, ThreadPool};

    use super::*;
    use crate::optimizer::{Optimizer, OptimizerKind, ScaledGradients};

    /// `p = torch.nn.Parameter(torch.tensor([1.0, -2.0])); o = torch.optim.AdamW([p], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)`
    /// `for g in ([0.5, -1.0], [0.25, 3.0], [-1.0, 0.1]): p.grad = torch.tensor(g); o.step(); print(p.tolist())`
    #[test]
    fn golden() {
        let sizes = Sizes {
            vocab_size: 4,
            hidden_size: 4,
            intermediate_size: 4,
            num_layers: 1,
            num_heads: 2,
            num_kv_heads: 1,
            max_position_embeddings: 8,
        };
        let layout = Layout::new(&Config::fresh(&sizes));
        let config =
            OptimizerConfig { weight_decay: 0.1, ..OptimizerConfig::standard(OptimizerKind::Adamw, 0.95) };
        let mut optimizer = Optimizer::new(config, layout.specs());
        let (mut values, mut gradients) = (vec![0.0; layout.len()], vec![0.0; layout.len()]);
        (values[0], values[1]) = (1.0, -2.0);
        let expected = [(0.89, -1.88), (0.787_170_7, -1.910_129_6), (0.799_641, -1.931_345_8)];
        for ((g0, g1), (e0, e1)) in [(0.5, -1.0), (0.25, 3.0), (-1.0, 0.1)].into_iter().zip(expected) {
            (gradients[0], gradients[1]) = (g0, g1);
            optimizer.update(
                layout.specs(),
                &mut values,
                ScaledGradients { gradients: &gradients, scale: 1.0 },
                0.1,
                &ThreadPool::single(),
            );
            assert!(
                (values[0] - e0).abs() < 2e-6 && (values[1] - e1).abs() < 2e-6,
                "{} {}",
                values[0],
                values[1]
            );
        }
    }

    /// Mean squared distance to the minimum of a quadratic with curvatures over three orders of magnitude, after noisy
    /// gradients.
    fn distance(kind: OptimizerKind, beta2: f32) -> f64 {
        const STEPS: u32 = 600;
        let sizes = Sizes {
            vocab_size: 100,
            hidden_size: 64,
            intermediate_size: 64,
            num_layers: 1,
            num_heads: 2,
            num_kv_heads: 1,
            max_position_embeddings: 8,
        };
        let layout = Layout::new(&Config::fresh(&sizes));
        let mut optimizer = Optimizer::new(OptimizerConfig::standard(kind, beta2), layout.specs());
        let unit =
            |i: usize, seed: u32| f64::from(noise(i as u32 ^ noise(seed))) / f64::from(u32::MAX) * 2.0 - 1.0;
        let target: Vec<f64> = (0..layout.len()).map(|i| unit(i, 1)).collect();
        let mut values = vec![0.0; layout.len()];
        for step in 0..STEPS {
            let gradient = |(i, value): (usize, &f32)| {
                let curvature = 10.0_f64.powf(1.5 * unit(i, 2));
                (curvature * (f64::from(*value) - target[i] + 0.5 * unit(i, 10 + step))) as f32
            };
            let gradients: Vec<f32> = values.iter().enumerate().map(gradient).collect();
            let left = 1.0 - step as f32 / STEPS as f32;
            optimizer.update(
                layout.specs(),
                &mut values,
                ScaledGradients { gradients: &gradients, scale: 1.0 },
                0.02 * left,
                &ThreadPool::single(),
            );
        }
        let squares = values.iter().zip(&target).map(|(value, target)| (f64::from(*value) - target).powi(2));
        squares.sum::<f64>() / layout.len() as f64
    }

    #[test]
    fn moments_in_8_bits_converge_like_f32() {
        for beta2 in [0.95, 0.999] {
            let (full, coded) =
                (distance(OptimizerKind::Adamw, beta2), distance(OptimizerKind::Adamw8bit, beta2));
            assert!(full < 0.01 && full != coded, "from 0.33 to {full}");
            assert!((coded / full - 1.0).abs() < 0.05, "beta2 {beta2}: {coded} in 8 bits, {full} in f32");
        }
    }
}
