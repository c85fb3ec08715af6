//! The critic's loss: `0.5 * max((V - R)^2, (V_clipped - R)^2)`, where `V_clipped` is at most `clip` away from what the
//! critic said before the step (PPO's value clipping; Stable Baselines and verl `cliprange_value`).

/// Loss of one token and its derivative by the value. `old` is the value before the step, `target` the return.
#[must_use]
pub fn token(value: f64, old: f64, target: f64, clip: Option<f64>) -> (f64, f64) {
    let plain = (0.5 * (value - target).powi(2), value - target);
    let Some(clip) = clip else { return plain };
    let bounded = value.clamp(old - clip, old + clip);
    let loss = 0.5 * (bounded - target).powi(2);
    if loss > plain.0 {
        // The bound holds the value, so it has no gradient.
        return (loss, 0.0);
    }
    plain
}
