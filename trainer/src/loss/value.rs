//! The value loss of the critic: `0.5 * max((V - R)^2, (V_clipped - R)^2)`, where `V_clipped` is within `clip` of the
//! value before the step (PPO value clipping; Stable Baselines and verl `cliprange_value`).

/// The critic's prediction for one token and its target.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ValuePrediction {
    /// Value under the current weights.
    pub value: f64,
    /// Value before the step.
    pub old: f64,
    /// The return.
    pub target: f64,
}

/// The loss of one token and its derivative by the value. `clip` bounds the change of the value.
#[must_use]
pub fn token(ValuePrediction { value, old, target }: ValuePrediction, clip: Option<f64>) -> (f64, f64) {
    let plain = (0.5 * (value - target).powi(2), value - target);
    let Some(clip) = clip else { return plain };
    let bounded = value.clamp(old - clip, old + clip);
    let loss = 0.5 * (bounded - target).powi(2);
    if loss > plain.0 {
        // The clipped value is constant, so the gradient is 0.
        return (loss, 0.0);
    }
    plain
}
