//! Learning-rate schedules.

use serde::{Deserialize, Serialize};

/// Shape of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleShape {
    /// Constant.
    #[default]
    Constant,
    /// Linear decay to 0.
    Linear,
    /// Cosine decay to 0.
    Cosine,
    /// Warm-up, stable, decay (WSD): constant, then linear decay to 0 over the last `decay_steps`.
    Wsd,
}

/// Learning rate per training step: linear warm-up over `warmup_steps`, then `shape` until `steps`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LearningRateSchedule {
    /// Largest learning rate.
    pub peak: f32,
    /// Shape after the warm-up.
    pub shape: ScheduleShape,
    /// Steps of the linear warm-up.
    pub warmup_steps: u64,
    /// Steps of the decay at the end; for [`ScheduleShape::Wsd`] only.
    pub decay_steps: u64,
    /// Total steps.
    pub steps: u64,
}

impl LearningRateSchedule {
    /// Learning rate of step `step`, from 0. That of the first warm-up step is above 0.
    #[must_use]
    pub fn at(&self, step: u64) -> f32 {
        if step < self.warmup_steps {
            return self.peak * (step + 1) as f32 / self.warmup_steps as f32;
        }
        let span = self.steps.saturating_sub(self.warmup_steps).max(1);
        let progress = ((step - self.warmup_steps) as f32 / span as f32).min(1.0);
        self.peak
            * match self.shape {
                ScheduleShape::Constant => 1.0,
                ScheduleShape::Linear => 1.0 - progress,
                ScheduleShape::Cosine => 0.5 * (1.0 + libm::cosf(std::f32::consts::PI * progress)),
                ScheduleShape::Wsd => {
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
        let at = |shape, step| {
            LearningRateSchedule { peak: 2.0, shape, warmup_steps: 4, decay_steps: 4, steps: 12 }.at(step)
        };
        assert_eq!([0, 1, 3, 4, 11].map(|s| at(ScheduleShape::Constant, s)), [0.5, 1.0, 2.0, 2.0, 2.0]);
        assert_eq!([4, 8, 12, 99].map(|s| at(ScheduleShape::Linear, s)), [2.0, 1.0, 0.0, 0.0]);
        assert!((at(ScheduleShape::Cosine, 8) - 1.0).abs() < 1e-6);
        let nothing = LearningRateSchedule {
            peak: 1.0,
            shape: ScheduleShape::Linear,
            warmup_steps: 0,
            decay_steps: 0,
            steps: 0,
        };
        assert_eq!(nothing.at(0), 1.0);
    }

    #[test]
    fn wsd_stays_and_falls_at_the_end() {
        let wsd = |decay_steps, step| {
            LearningRateSchedule {
                peak: 2.0,
                shape: ScheduleShape::Wsd,
                warmup_steps: 2,
                decay_steps,
                steps: 10,
            }
            .at(step)
        };
        let all: Vec<f32> = (0..11).map(|step| wsd(4, step)).collect();
        assert_eq!(all, [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0]);
        // Without a stable phase WSD is linear, without a decay it is constant.
        let linear = LearningRateSchedule {
            peak: 2.0,
            shape: ScheduleShape::Linear,
            warmup_steps: 2,
            decay_steps: 0,
            steps: 10,
        };
        assert!((0..12).all(|step| wsd(8, step) == linear.at(step)));
        assert!((2..12).all(|step| wsd(0, step) == 2.0));
        // The whole decay is within the run.
        let area: f32 = (6..10).map(|step| wsd(4, step)).sum();
        assert_eq!(area, 5.0);
    }
}
