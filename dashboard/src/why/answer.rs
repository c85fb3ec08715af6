//! An explanation as JSON: what `rlrun why --json` prints and the page shows.
//!
//! Invariant: the fields are those of `docs/why.md`. Seconds have six digits after the point, shares four.

use serde_json::{Value, json};

use super::{Cause, CauseShare, ExplainedStep, RunExplanation, Stall};

impl RunExplanation {
    /// The object, without recommendations.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let list = |shares: &[CauseShare]| shares.iter().map(share).collect::<Vec<_>>();
        json!({
            "steps": self.steps,
            "attempts": self.attempts,
            "wall_s": micros(self.wall_s),
            "median_step_s": micros(self.median_step_s),
            "causes": list(&self.causes),
            "stragglers": list(&self.stragglers),
            "stalls": self.stalls.iter().map(stall).collect::<Vec<_>>(),
            "slowest_steps": self.slowest.iter().map(ExplainedStep::to_json).collect::<Vec<_>>(),
            "unreadable_lines": self.unreadable,
            "dropped_spans": self.dropped,
        })
    }
}

impl ExplainedStep {
    /// The object.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let part = |(cause, seconds): &(Cause, f64)| json!({"cause": cause.kind.as_str(), "name": cause.name, "seconds": micros(*seconds)});
        json!({
            "step": self.step,
            "start_s": micros(self.start_s),
            "seconds": micros(self.seconds),
            "path": self.path.iter().map(part).collect::<Vec<_>>(),
        })
    }
}

fn share(share: &CauseShare) -> Value {
    json!({
        "cause": share.cause.kind.as_str(),
        "name": share.cause.name,
        "seconds": micros(share.seconds),
        "share": (share.share * 1e4).round() / 1e4,
        "steps": share.steps,
    })
}

fn stall(stall: &Stall) -> Value {
    json!({
        "cause": stall.cause.kind.as_str(),
        "name": stall.cause.name,
        "excess_s": micros(stall.excess_s),
        "median_s": micros(stall.median_s),
        "longest_s": micros(stall.longest_s),
        "longest_step": stall.longest_step,
        "steps": stall.steps,
        "lasting": stall.is_lasting,
    })
}

fn micros(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e6
}
