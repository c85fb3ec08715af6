//! AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101), fused over flat slices.
//!
//! Invariant: the update of a value depends on that value's gradient and moments only, so any shard of the flat
//! buffers can be updated by whoever owns it.

use model::Layout;
use serde::{Deserialize, Serialize};

/// Hyperparameters.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay of matrices; norms and biases do not decay.
    pub weight_decay: f32,
}

/// Moments of all values, in the canonical order of the parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamW {
    config: AdamWConfig,
    /// Updates done.
    updates: u64,
    first: Vec<f32>,
    second: Vec<f32>,
}

impl AdamW {
    /// An optimizer that has not seen a gradient, for `len` values.
    #[must_use]
    pub fn new(config: AdamWConfig, len: usize) -> Self {
        Self { config, updates: 0, first: vec![0.0; len], second: vec![0.0; len] }
    }

    /// One that goes on from saved moments.
    ///
    /// # Panics
    /// If the moments differ in length.
    #[must_use]
    pub fn resume(config: AdamWConfig, updates: u64, (first, second): (Vec<f32>, Vec<f32>)) -> Self {
        assert_eq!(first.len(), second.len(), "both moments are of the same values");
        Self { config, updates, first, second }
    }

    /// Updates done.
    #[must_use]
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// First and second moments.
    #[must_use]
    pub fn moments(&self) -> (&[f32], &[f32]) {
        (&self.first, &self.second)
    }

    /// Updates `values` for `gradients`, both in the order of `layout`.
    ///
    /// # Panics
    /// If there are more or fewer values than the optimizer was made for.
    pub fn update(&mut self, layout: &Layout, values: &mut [f32], gradients: &[f32], learning_rate: f32) {
        assert!(
            values.len() == self.first.len() && gradients.len() == self.first.len(),
            "one moment per value"
        );
        self.updates += 1;
        let AdamWConfig { beta1, beta2, eps, weight_decay } = self.config;
        let t = i32::try_from(self.updates).unwrap_or(i32::MAX);
        let step_size = learning_rate / (1.0 - beta1.powi(t));
        let second_scale = 1.0 / (1.0 - beta2.powi(t));
        for spec in layout.specs() {
            let range = spec.range();
            let keep = if spec.shape.len() > 1 { 1.0 - learning_rate * weight_decay } else { 1.0 };
            let moments = self.first[range.clone()].iter_mut().zip(&mut self.second[range.clone()]);
            for ((value, g), (m, v)) in values[range.clone()].iter_mut().zip(&gradients[range]).zip(moments) {
                *m = beta1 * *m + (1.0 - beta1) * g;
                *v = beta2 * *v + (1.0 - beta2) * g * g;
                *value = *value * keep - step_size * *m / ((*v * second_scale).sqrt() + eps);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use model::{Config, Sizes};

    use super::*;

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
        let config = AdamWConfig { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let mut optimizer = AdamW::new(config, layout.len());
        let (mut values, mut gradients) = (vec![0.0; layout.len()], vec![0.0; layout.len()]);
        (values[0], values[1]) = (1.0, -2.0);
        let expected = [(0.89, -1.88), (0.787_170_7, -1.910_129_6), (0.799_641, -1.931_345_8)];
        for ((g0, g1), (e0, e1)) in [(0.5, -1.0), (0.25, 3.0), (-1.0, 0.1)].into_iter().zip(expected) {
            (gradients[0], gradients[1]) = (g0, g1);
            optimizer.update(&layout, &mut values, &gradients, 0.1);
            assert!(
                (values[0] - e0).abs() < 2e-6 && (values[1] - e1).abs() < 2e-6,
                "{} {}",
                values[0],
                values[1]
            );
        }
    }
}
