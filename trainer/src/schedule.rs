//! The learning rate at every step.

use serde::{Deserialize, Serialize};

/// Shape of the learning rate after its warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shape {
    /// Stays.
    #[default]
    Constant,
    /// Falls to 0 in a line.
    Linear,
    /// Falls to 0 along half a cosine.
    Cosine,
    /// Warm-up, stable, decay: stays, and falls to 0 in a line over the last `decay_steps`.
    Wsd,
}

/// A learning rate over a run: a linear rise over `warmup_steps`, then its shape until `steps`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    /// Highest value.
    pub peak: f32,
    /// Shape after the rise.
    pub shape: Shape,
    /// Steps of the rise.
    pub warmup_steps: u64,
    /// Steps of the fall at the end, of [`Shape::Wsd`] alone; the others take no notice.
    pub decay_steps: u64,
    /// Steps in all.
    pub steps: u64,
}

impl Schedule {
    /// The learning rate of the step with index `step`, from 0. The first step of a rise is not 0.
    #[must_use]
    pub fn at(&self, step: u64) -> f32 {
        if step < self.warmup_steps {
            return self.peak * (step + 1) as f32 / self.warmup_steps as f32;
        }
        let span = self.steps.saturating_sub(self.warmup_steps).max(1);
        let progress = ((step - self.warmup_steps) as f32 / span as f32).min(1.0);
        self.peak
            * match self.shape {
                Shape::Constant => 1.0,
                Shape::Linear => 1.0 - progress,
                Shape::Cosine => 0.5 * (1.0 + (std::f32::consts::PI * progress).cos()),
                Shape::Wsd => {
                    let left = self.steps.saturating_sub(step);
                    if left < self.decay_steps { left as f32 / self.decay_steps as f32 } else { 1.0 }
                }
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rises_then_falls() {
        let at =
            |shape, step| Schedule { peak: 2.0, shape, warmup_steps: 4, decay_steps: 4, steps: 12 }.at(step);
        assert_eq!([0, 1, 3, 4, 11].map(|s| at(Shape::Constant, s)), [0.5, 1.0, 2.0, 2.0, 2.0]);
        assert_eq!([4, 8, 12, 99].map(|s| at(Shape::Linear, s)), [2.0, 1.0, 0.0, 0.0]);
        assert!((at(Shape::Cosine, 8) - 1.0).abs() < 1e-6);
        let nothing = Schedule { peak: 1.0, shape: Shape::Linear, warmup_steps: 0, decay_steps: 0, steps: 0 };
        assert_eq!(nothing.at(0), 1.0);
    }

    #[test]
    fn wsd_stays_and_falls_at_the_end() {
        let wsd = |decay_steps, step| {
            Schedule { peak: 2.0, shape: Shape::Wsd, warmup_steps: 2, decay_steps, steps: 10 }.at(step)
        };
        let all: Vec<f32> = (0..11).map(|step| wsd(4, step)).collect();
        assert_eq!(all, [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0]);
        // Without a stable phase it is the linear one, without a decay the constant one.
        let linear = Schedule { peak: 2.0, shape: Shape::Linear, warmup_steps: 2, decay_steps: 0, steps: 10 };
        assert!((0..12).all(|step| wsd(8, step) == linear.at(step)));
        assert!((2..12).all(|step| wsd(0, step) == 2.0));
        // The decay, all of it, is a part of the run.
        let area: f32 = (6..10).map(|step| wsd(4, step)).sum();
        assert_eq!(area, 5.0);
    }
}
