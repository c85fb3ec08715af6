//! verl's asynchronous trainers on H20 GPUs: thresholds of staleness, and divisions of GPUs.
//!
//! Invariant: generation is fitted to the colocated step and to the threshold 0; updates are inputs, as published for each row. The
//! other waits are predictions.

use super::{PublishedRow, RowUse};
use crate::decode::DecodeCurve;
use crate::lengths::LengthModel;
use crate::outcome::{RangeOverSeeds, over_seeds};
use crate::scenario::{ApplyRule, PrefillCost, Scenario, SimulationError, WeightDelivery};
use crate::{SamplerFleet, TrainingCost};

const THRESHOLDS: &str =
    "verl, https://verl.readthedocs.io/en/latest/advance/fully_async.html, 128-card stale ablation";
const DIVISIONS: &str = "verl, documentation of the asynchronous trainers, 30B on 128 and 16 GPUs";

/// Mean length and standard deviation of its logarithm, and the factor of the estimated time of a sequence in a decode step: fitted by
/// a random search to the colocated generation on 32, 64 and 128 GPUs (357.41, 150.72 and 177.85 s, which no model of one experiment
/// can have: lengths differ between these runs) and to the wait at threshold 0 (128.47 s).
const LENGTHS: [f64; 2] = [804.1, 0.8284];
const SEQUENCES: f64 = 5.125;
/// Factor of all times of decode steps, fitted to the wait at threshold 0 alone.
const STEPS: f64 = 0.965;
/// Tokens of the longest completion.
const CAP: f64 = 28_672.0;
/// Between the update and the wait of a step: 231.34 - 128.47 - 98.77 s, of the row with the threshold 0.
const PUBLISH_S: f64 = 4.1;
/// Leases of a step: 512 prompts in parts of `require_batches` 4 x `ppo_mini_batch_size` 32.
const LEASES: usize = 4;

/// A decode step of 7.6B bf16 weights on an H20 (4 TB/s, 148 TFLOP/s), at 60 % of both: 15.2 GB are read, a sequence takes 2 x 7.6e9
/// operations, a token of context 57,344 bytes (28 layers, 4 heads of 128 for keys and values).
fn decode() -> DecodeCurve {
    let [sequence, token] = [15.2e9 / 89e12, 57_344.0 / 2.4e12];
    DecodeCurve::linear([15.2e9 / 2.4e12, SEQUENCES * sequence, SEQUENCES * token]).times(STEPS)
}

/// An eighth of the experiment: 64 of 512 prompts with 16 completions each, on `gpus` GPUs that sample.
fn scenario(gpus: usize, threshold: f64, update_s: f64, leases: usize) -> Scenario {
    let [mean, sigma] = LENGTHS;
    let lengths = LengthModel::with_mean(mean, CAP, sigma, 0.5);
    let tokens = 64.0 * 16.0 * (lengths.mean() + 200.0);
    Scenario {
        // The threshold bounds the samples that are ahead, as `slots`; the version of a sample is not looked at.
        max_staleness: 8,
        slots: Some((64.0 * (1.0 + threshold)).round() as usize),
        steps: 40,
        warm_steps: 10,
        prompt_tokens: 200.0,
        samplers: SamplerFleet {
            count: gpus,
            decode: decode(),
            prefill: PrefillCost { fixed_s: 0.0, per_token_s: 1.0 / 6_000.0 },
            max_running: 1024,
            count_adapts: false,
            running_adapts: false,
            kv_tokens: f64::INFINITY,
            absences: Vec::new(),
        },
        trainer: TrainingCost { leases, ..TrainingCost::per_token(update_s / tokens) },
        weights: WeightDelivery {
            publish_s: PUBLISH_S,
            push_s: 0.0,
            stall_s: 0.0,
            apply: ApplyRule::Recompute,
        },
        ..Scenario::new(64, 16, lengths)
    }
}

/// A trainer that streams, with generation on 64 GPUs.
fn streamed(threshold: f64, update_s: f64) -> Result<RangeOverSeeds, SimulationError> {
    over_seeds(&scenario(8, threshold, update_s, LEASES), 5)
}

pub(super) fn rows() -> Result<Vec<PublishedRow>, SimulationError> {
    let row = |name: &str, source, [published, predicted, tolerance]: [f64; 3], used| PublishedRow {
        name: format!("verl, {name}"),
        source,
        unit: "s",
        published,
        predicted,
        tolerance,
        used,
    };
    let mut rows = Vec::new();
    let colocated = over_seeds(&scenario(16, 0.0, 0.0, 1), 5)?;
    let generation = colocated.wait_s.p50;
    rows.push(row("7B, colocated generation on 128", THRESHOLDS, [177.85, generation, 0.25], RowUse::Fitted));
    // Threshold, wait, update and step, and the tolerance of the wait.
    for ([threshold, wait, update, step], tolerance, used) in [
        ([0.0, 128.47, 98.77, 231.34], 0.05, RowUse::Fitted),
        ([0.1, 58.17, 109.12, 171.30], 0.25, RowUse::Predicted),
        ([0.3, 38.88, 103.22, 146.11], 0.25, RowUse::Predicted),
        ([0.5, 33.14, 113.16, 150.63], 0.25, RowUse::Predicted),
    ] {
        let simulated = streamed(threshold, update)?;
        let name = |what| format!("7B, {what} at threshold {threshold}");
        rows.push(row(&name("wait"), THRESHOLDS, [wait, simulated.wait_s.p50, tolerance], used));
        rows.push(row(&name("step"), THRESHOLDS, [step, simulated.step_s.p50, 0.15], used));
    }
    for division in [&THIRTY_BILLION, &SIXTEEN_GPUS] {
        rows.push(row(
            division.name,
            DIVISIONS,
            [division.published_s, division.step_s(division.trainer)?, 0.25],
            RowUse::Predicted,
        ));
    }
    Ok(rows)
}

/// A colocated run and its division into GPUs that sample and GPUs that train.
struct DividedRun {
    name: &'static str,
    gpus: f64,
    /// GPUs that train in the published division.
    trainer: f64,
    /// Generation on all GPUs, seconds.
    generation_s: f64,
    /// Everything that the trainer does on `trainer` GPUs, seconds.
    training_s: f64,
    published_s: f64,
}

/// Inputs are the colocated generation (348.05 s) and, of the divided run, reference and update (50.05 and 206.63 s); the step and the
/// best division are predictions.
const THIRTY_BILLION: DividedRun = DividedRun {
    name: "30B, step with 96 + 32",
    gpus: 128.0,
    trainer: 32.0,
    generation_s: 348.05,
    training_s: 50.05 + 206.63,
    published_s: 282.75,
};

/// Inputs are the colocated step (484.6 s) and, of the divided run, the update (430 s, so 215 s on all GPUs, which leaves 269.6 s for
/// generation); the step is a prediction.
const SIXTEEN_GPUS: DividedRun = DividedRun {
    name: "16 GPUs, step with 8 + 8",
    gpus: 16.0,
    trainer: 8.0,
    generation_s: 269.6,
    training_s: 430.0,
    published_s: 490.0,
};

impl DividedRun {
    /// Seconds of a step if `trainer` GPUs train with a staleness of 1.
    fn step_s(&self, trainer: f64) -> Result<f64, SimulationError> {
        let gpus = 16.0;
        let samplers = ((self.gpus - trainer) / self.gpus * gpus).round() as usize;
        // Steps of 12 ms and 0.1 ms for each sequence before they are scaled, and lengths of no known distribution: assumptions.
        let lengths = LengthModel::with_mean(3_200.0, 8_192.0, 0.6, 0.5);
        let decode = DecodeCurve::linear([0.012, 1e-4, 0.0]);
        let run = |samplers: usize, decode: DecodeCurve, training_s: f64| {
            let mut run = Scenario { max_staleness: 0, ..Scenario::new(64, 16, lengths.clone()) };
            (run.samplers.decode, run.samplers.count) = (decode, samplers);
            run.trainer = TrainingCost::per_token(training_s / (1024.0 * lengths.mean()));
            run
        };
        let alone = over_seeds(&run(16, decode.clone(), 0.0), 3)?.step_s.p50;
        let decode = decode.times(self.generation_s / alone);
        let training_s = self.training_s * self.trainer / trainer;
        let divided = Scenario { max_staleness: 1, ..run(samplers, decode, training_s) };
        Ok(over_seeds(&divided, 3)?.step_s.p50)
    }
}

/// Steps of verl's 30B run by the number of its 128 GPUs that train: pairs of GPUs and seconds.
///
/// # Errors
/// As [`rows`].
pub(super) fn divisions_of_30b() -> Result<Vec<(f64, f64)>, SimulationError> {
    let trainers = [16.0, 32.0, 48.0, 64.0, 80.0, 96.0];
    trainers.into_iter().map(|trainer| Ok((trainer, THIRTY_BILLION.step_s(trainer)?))).collect()
}
