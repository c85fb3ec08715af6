//! AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101), with moments in f32 or in 8 bits.
//!
//! Invariant: the update goes over everything once, in pieces that are cut at fixed places and do not depend on each
//! other, so its bits do not depend on who computes them.

use model::Layout;
use serde::{Deserialize, Serialize};

use crate::moments::{Factors, MIN_CODED, Moments, Piece, noise};

/// Which optimizer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerKind {
    /// AdamW with f32 moments: 8 bytes per weight.
    #[default]
    Adamw,
    /// AdamW with 8-bit moments: 2 bytes per weight, and two scales per block of 256.
    Adamw8bit,
}

/// Hyperparameters.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamWConfig {
    /// How moments are kept.
    pub kind: OptimizerKind,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay of matrices; norms and biases do not decay.
    pub weight_decay: f32,
}

/// The state of an optimizer.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamW {
    config: AdamWConfig,
    /// Updates done.
    updates: u64,
    /// Of every tensor, in the order of the layout.
    moments: Vec<Moments>,
}

impl OptimizerKind {
    /// The word of the recipe.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Adamw => "adamw",
            Self::Adamw8bit => "adamw8bit",
        }
    }

    /// Memory of both moments of a value, bytes; in 8 bits without the scales, which add a sixty-fourth.
    #[must_use]
    pub fn bytes_per_value(self) -> u64 {
        match self {
            Self::Adamw => 8,
            Self::Adamw8bit => 2,
        }
    }

    /// Moments of a tensor of `len` values before the first update.
    #[must_use]
    pub fn moments(self, len: usize) -> Moments {
        match self {
            Self::Adamw8bit if len >= MIN_CODED => Moments::coded(len),
            Self::Adamw | Self::Adamw8bit => Moments::full(len),
        }
    }
}

impl AdamW {
    /// An optimizer that has not seen a gradient, for the tensors of `layout`.
    #[must_use]
    pub fn new(config: AdamWConfig, layout: &Layout) -> Self {
        let moments = layout.specs().iter().map(|spec| config.kind.moments(spec.len())).collect();
        Self { config, updates: 0, moments }
    }

    /// One that goes on from saved moments, of every tensor in the order of its layout.
    #[must_use]
    pub fn resume(config: AdamWConfig, updates: u64, moments: Vec<Moments>) -> Self {
        Self { config, updates, moments }
    }

    /// Updates done.
    #[must_use]
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// How moments are kept.
    #[must_use]
    pub fn kind(&self) -> OptimizerKind {
        self.config.kind
    }

    /// Moments of every tensor, in the order of the layout.
    #[must_use]
    pub fn moments(&self) -> &[Moments] {
        &self.moments
    }

    /// Updates `values` for `scale * gradients`, both in the order of `layout`.
    ///
    /// # Panics
    /// If there are more or fewer values than the optimizer was made for.
    pub fn update(
        &mut self,
        layout: &Layout,
        values: &mut [f32],
        (gradients, scale): (&[f32], f32),
        learning_rate: f32,
    ) {
        assert!(
            values.len() == layout.len()
                && gradients.len() == layout.len()
                && self
                    .moments
                    .iter()
                    .map(Moments::len)
                    .eq(layout.specs().iter().map(model::ParameterSpec::len)),
            "one moment per value"
        );
        self.updates += 1;
        let AdamWConfig { beta1, beta2, eps, weight_decay, .. } = self.config;
        let t = i32::try_from(self.updates).unwrap_or(i32::MAX);
        let factors = Factors {
            gradient: scale,
            beta1,
            beta2,
            eps,
            step_size: learning_rate / (1.0 - beta1.powi(t)),
            second_scale: 1.0 / (1.0 - beta2.powi(t)),
            keep: 1.0,
            seed: noise(self.updates as u32),
        };
        let mut pieces = Vec::new();
        let mut rest = values;
        for ((tensor, spec), moments) in (0..).zip(layout.specs()).zip(&mut self.moments) {
            let (values, after) = rest.split_at_mut(spec.len());
            rest = after;
            let keep = if spec.shape.len() > 1 { 1.0 - learning_rate * weight_decay } else { 1.0 };
            let factors = Factors { keep, seed: noise(factors.seed ^ tensor), ..factors };
            pieces.extend(moments.pieces(values, &gradients[spec.range()], factors));
        }
        pieces.into_iter().for_each(Piece::update);
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
        let config =
            AdamWConfig { kind: OptimizerKind::Adamw, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let mut optimizer = AdamW::new(config, &layout);
        let (mut values, mut gradients) = (vec![0.0; layout.len()], vec![0.0; layout.len()]);
        (values[0], values[1]) = (1.0, -2.0);
        let expected = [(0.89, -1.88), (0.787_170_7, -1.910_129_6), (0.799_641, -1.931_345_8)];
        for ((g0, g1), (e0, e1)) in [(0.5, -1.0), (0.25, 3.0), (-1.0, 0.1)].into_iter().zip(expected) {
            (gradients[0], gradients[1]) = (g0, g1);
            optimizer.update(&layout, &mut values, (&gradients, 1.0), 0.1);
            assert!(
                (values[0] - e0).abs() < 2e-6 && (values[1] - e1).abs() < 2e-6,
                "{} {}",
                values[0],
                values[1]
            );
        }
    }

    /// Squared distance to the minimum of a quadratic whose curvatures span three orders of magnitude, after noisy
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
        let mut optimizer =
            AdamW::new(AdamWConfig { kind, beta1: 0.9, beta2, eps: 1e-8, weight_decay: 0.0 }, &layout);
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
            optimizer.update(&layout, &mut values, (&gradients, 1.0), 0.02 * left);
        }
        let squares = values.iter().zip(&target).map(|(value, target)| (f64::from(*value) - target).powi(2));
        squares.sum::<f64>() / layout.len() as f64
    }

    #[test]
    fn moments_in_8_bits_get_as_far_as_in_f32() {
        for beta2 in [0.95, 0.999] {
            let (full, coded) =
                (distance(OptimizerKind::Adamw, beta2), distance(OptimizerKind::Adamw8bit, beta2));
            assert!(full < 0.01 && full != coded, "from 0.33 to {full}");
            assert!((coded / full - 1.0).abs() < 0.05, "beta2 {beta2}: {coded} in 8 bits, {full} in f32");
        }
    }
}
