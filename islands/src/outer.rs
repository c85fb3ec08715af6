//! The outer optimizer: stochastic gradient descent with Nesterov momentum, as `torch.optim.SGD(nesterov=True)` computes it.
//!
//! ```text
//! m = momentum * m + g
//! update = rate * (g + momentum * m)
//! ```
//!
//! `g` is the mean outer gradient of a round, and the update is subtracted from the outer weights. DiLoCo (Douillard et al. 2023,
//! arXiv 2311.08105) uses the rate 0.7 and the momentum 0.9.

use serde::{Deserialize, Serialize};

/// Hyperparameters of the outer optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct OuterOptimizer {
    /// Learning rate.
    pub rate: f32,
    /// Decay of the momentum.
    pub momentum: f32,
}

impl Default for OuterOptimizer {
    fn default() -> Self {
        Self { rate: 0.7, momentum: 0.9 }
    }
}

impl OuterOptimizer {
    /// The update for the mean outer `gradient`, `[values]`, which is to be subtracted from the weights. Changes `momentum`,
    /// `[values]`.
    #[must_use]
    pub fn update(self, gradient: &[f32], momentum: &mut [f32]) -> Vec<f32> {
        let step = |(gradient, momentum): (&f32, &mut f32)| {
            *momentum = self.momentum * *momentum + gradient;
            self.rate * (gradient + self.momentum * *momentum)
        };
        gradient.iter().zip(momentum).map(step).collect()
    }
}

/// The sum of outer gradients in f64, in the order in which they were added.
#[derive(Clone, Debug)]
pub struct GradientSum {
    sum: Vec<f64>,
    count: u64,
}

impl GradientSum {
    /// The sum of no outer gradients of `len` values.
    #[must_use]
    pub fn new(len: usize) -> Self {
        Self { sum: vec![0.0; len], count: 0 }
    }

    /// Adds `gradient`, `[values]`.
    pub fn add(&mut self, gradient: &[f32]) {
        self.sum.iter_mut().zip(gradient).for_each(|(sum, value)| *sum += f64::from(*value));
        self.count += 1;
    }

    /// The mean, `[values]`; zeros without any.
    #[must_use]
    pub fn mean(&self) -> Vec<f32> {
        let count = self.count.max(1) as f64;
        self.sum.iter().map(|sum| (sum / count) as f32).collect()
    }
}

/// The norm of `values`, `[values]`.
#[must_use]
pub fn norm(values: &[f32]) -> f64 {
    values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt()
}
