//! NeMo-RL's performance table: when one step of staleness loses.
//!
//! Invariant: a model has two inputs, generation and training on all GPUs, fitted to its synchronous row and its row with a staleness
//! of 1. On H100 the row with a staleness of 8 on 192 GPUs is a prediction. On GB200 both rows are fitted: what is checked is that
//! no division of its GPUs into halves wins, and why.

use super::{PublishedRow, RowUse};
use crate::decode::DecodeCurve;
use crate::lengths::LengthModel;
use crate::outcome::over_seeds;
use crate::scenario::{ResourceSharing, Scenario, SimulationError};
use crate::{SamplerFleet, TrainingCost};

const TABLE: &str = "NeMo-RL v0.6, performance table, Qwen3-30B-A3B, 2,048 completions of 3,200 tokens";
const SEEDS: u64 = 3;

/// What was fitted for one kind of GPU.
struct FittedPhases {
    /// Factor of a decode step of 12 ms and 0.1 ms for each sequence.
    decode: f64,
    /// Training on all GPUs of the synchronous row, seconds.
    training_s: f64,
}

/// Both rows cannot be met with one speed of each side: the row with a staleness of 1 has another pipeline degree.
const H100: FittedPhases = FittedPhases { decode: 1.12, training_s: 80.0 };
const GB200: FittedPhases = FittedPhases { decode: 0.725, training_s: 150.0 };

/// Replicas that sample, the share of the synchronous row's GPUs that train, and the bound.
struct ReplicaDivision {
    replicas: usize,
    training: f64,
    max_staleness: u64,
}

fn step_s(fitted: &FittedPhases, division: &ReplicaDivision) -> Result<f64, SimulationError> {
    let lengths = LengthModel::with_mean(3_203.0, 4_096.0, 0.5, 0.5);
    let tokens = 2_048.0 * lengths.mean();
    let colocated = division.max_staleness == 0;
    let scenario = Scenario {
        max_staleness: division.max_staleness,
        steps: 14 + 2 * division.max_staleness,
        warm_steps: 4 + division.max_staleness,
        samplers: SamplerFleet {
            count: division.replicas,
            decode: DecodeCurve::linear([0.012, 1e-4, 0.0]).times(fitted.decode),
            ..Scenario::new(1, 1, LengthModel::constant(1.0)).samplers
        },
        trainer: TrainingCost::per_token(fitted.training_s / division.training / tokens),
        sharing: if colocated { ResourceSharing::Turns { switch_s: 0.0 } } else { ResourceSharing::Separate },
        // 64 prompts with 32 completions each.
        ..Scenario::new(64, 32, lengths)
    };
    Ok(over_seeds(&scenario, SEEDS)?.step_s.p50)
}

pub(super) fn rows() -> Result<Vec<PublishedRow>, SimulationError> {
    let division = |replicas, training, max_staleness| ReplicaDivision { replicas, training, max_staleness };
    let mut rows = Vec::new();
    for (name, fitted, division, published, tolerance, used) in [
        ("H100, synchronous on 32", &H100, division(16, 1.0, 0), 192.0, 0.1, RowUse::Fitted),
        ("H100, 16 + 16, staleness 1", &H100, division(8, 0.5, 1), 152.0, 0.1, RowUse::Fitted),
        ("H100, 64 + 128, staleness 8", &H100, division(32, 4.0, 8), 34.5, 0.3, RowUse::Predicted),
        ("GB200, synchronous on 16", &GB200, division(16, 1.0, 0), 221.0, 0.05, RowUse::Fitted),
        ("GB200, 8 + 8, staleness 1", &GB200, division(8, 0.5, 1), 301.0, 0.05, RowUse::Fitted),
    ] {
        rows.push(PublishedRow {
            name: format!("NeMo-RL, {name}"),
            source: TABLE,
            unit: "s",
            published,
            predicted: step_s(fitted, &division)?,
            tolerance,
            used,
        });
    }
    Ok(rows)
}
