//! What a run measured of itself: an earlier run, or the loop of `rlrun-bench`.
//!
//! Invariant: numbers are means over the steps after the start, in which a run differs from what it is later.

use environments::EnvironmentSpec;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use simulator::LatencyModel;

use super::hardware::HardwareKind;
use crate::recipe::words::WeightTransport;
use crate::settings::roles_of;

/// Steps that are left out at the start, beside one for each version of staleness.
const STARTING: usize = 3;
/// 95th percentile of the standard normal distribution.
const P95: f64 = 1.645;

/// Most groups in flight times completions of a group.
const MOST_SLOTS: u64 = 1 << 22;
/// No time in seconds and no length in tokens is as large.
const MOST_VALUE: f64 = 1e9;
/// Values of a recipe with which both sides have all cores.
const SHARED_CORES: [(&str, &str, &str); 3] = [
    ("placement", "processes", "false"),
    ("placement", "rollout_threads", ""),
    ("placement", "trainer_threads", ""),
];
/// Values of a recipe with which a training step is one pass.
const ONE_PASS: [(&str, &str, &str); 3] =
    [("trainer", "world", "1"), ("trainer", "epochs", "1"), ("trainer", "recompute", "\"none\"")];

/// The values of a recipe, by section and key.
pub type RecipeValues = Map<String, Value>;

/// Measurements of a run. Times are seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredRun {
    /// Groups of a batch, and completions of a group: each role of an environment has one of its own.
    pub batch: [usize; 2],
    /// Ranks of the trainer.
    #[serde(default = "one")]
    pub ranks: usize,
    /// Samplers.
    #[serde(default = "one")]
    pub samplers: usize,
    /// Most sequences that a sampler decodes together.
    pub max_running: usize,
    /// Bound on staleness, versions.
    pub max_staleness: u64,
    /// How weights go to samplers.
    pub transport: WeightTransport,
    /// Whether sampler and trainer share all cores of one process.
    pub shares_cores: bool,
    /// Whether a training step is one forward and backward pass on one rank, in which nothing is computed again.
    pub has_one_pass: bool,
    /// Share of the time in which the samplers, and the trainer, waited.
    pub idle: [f64; 2],
    /// Length of completions, and of the longest of a batch, tokens.
    pub lengths: [f64; 2],
    /// Length of prompts, tokens.
    pub prompt_tokens: Option<f64>,
    /// Share of the tokens of a batch that is trained: groups without variance are left out.
    pub trained_share: f64,
    /// Updates of a step.
    pub training_s: Option<f64>,
    /// Time that samplers worked for a token.
    pub sampled_token_s: Option<f64>,
    /// Publishing of weights.
    pub publish_s: Option<f64>,
    /// Time that the decoding of one sampler stops for new weights.
    pub stall_s: Option<f64>,
    /// Longest time that a step waited for a checkpoint.
    pub checkpoint_s: Option<f64>,
    /// Median, standard deviation of the logarithm, and longest time of the slowest reward.
    pub reward: Option<[f64; 3]>,
    /// Time between steps, in which logs are written.
    pub logs_s: f64,
    /// A commit of the journal.
    pub commit_s: Option<f64>,
}

impl MeasuredRun {
    /// Measurements of the run of a recipe with these `values`, from the texts of its `metrics.jsonl` and its `timeline.jsonl`, of which
    /// the second may be empty.
    ///
    /// # Errors
    /// Why there are none, as the end of a sentence about the run.
    pub fn of(values: &RecipeValues, metrics: &str, timeline: &str) -> Result<Self, String> {
        Self::means(values, metrics, timeline)
            .ok_or_else(|| "has no finished step to calibrate with".to_owned())?
            .checked()
    }

    /// The same measurements, if a run can have them.
    ///
    /// # Errors
    /// The first that none can have, as the end of a sentence about the run.
    pub fn checked(self) -> Result<Self, String> {
        let [groups, size] = self.batch;
        let slots = u64::try_from(groups)
            .ok()
            .and_then(|groups| groups.checked_mul(size as u64))
            .and_then(|completions| completions.checked_mul(self.max_staleness.checked_add(1)?))
            .filter(|slots| (1..=MOST_SLOTS).contains(slots));
        if slots.is_none() || [self.max_running, self.ranks, self.samplers].contains(&0) {
            return Err(format!(
                "has batches of {groups} x {size} completions, a bound of {}, {} running sequences, {} ranks and {} samplers",
                self.max_staleness, self.max_running, self.ranks, self.samplers
            ));
        }
        let times = [self.training_s, self.sampled_token_s, self.publish_s, self.stall_s, self.checkpoint_s];
        let times = times.into_iter().chain([self.commit_s, Some(self.logs_s), self.prompt_tokens]).flatten();
        let times = times.chain(self.reward.into_iter().flatten()).chain(self.lengths);
        if let Some(wrong) = times.into_iter().find(|value| !(0.0..MOST_VALUE).contains(value)) {
            return Err(format!("has {wrong} where a time or a length is"));
        }
        let mut shares = self.idle.into_iter().chain([self.trained_share]);
        match shares.find(|share| !(0.0..=1.0).contains(share)) {
            Some(wrong) => Err(format!("has {wrong} where a share is")),
            None => Ok(self),
        }
    }

    fn means(values: &RecipeValues, metrics: &str, timeline: &str) -> Option<Self> {
        let number = |section: &str, key: &str| value_of(values, section, key)?.as_u64();
        let count = |section: &str, key: &str| Some(number(section, key)? as usize);
        let size = count("rollout", "group_size")?.checked_mul(roles(values))?;
        let batch = [count("buffer", "batch_groups")?, size];
        let processes = has_values(values, &[("placement", "processes", "true")]);
        let samplers = count("placement", "rollout_workers").filter(|_| processes).unwrap_or(1).max(1);
        let max_staleness = number("buffer", "max_staleness")?;
        let epochs = number("trainer", "epochs").unwrap_or(1) as f64;
        let transport = value_of(values, "weights", "transport").cloned();
        let transport = transport.and_then(|word| serde_json::from_value(word).ok()).unwrap_or_default();
        // A last line of a run in progress may not be whole.
        let rows = metrics.lines().filter_map(|line| serde_json::from_str::<Map<String, Value>>(line).ok());
        let steps: Vec<Map<String, Value>> = rows.filter(|row| row.contains_key("reward/mean")).collect();
        let starting = STARTING.saturating_add(max_staleness as usize).min(steps.len() / 2);
        let steps = StepMetrics(&steps[starting..]);
        let length = steps.mean("completions/mean_length")?;
        let completions = batch[0] as f64 * batch[1] as f64;
        let saves = steps.0.iter().filter_map(|step| step.get("time/save_ckpt")?.as_f64());
        let saves = saves.filter(|seconds| *seconds > 0.0);
        Some(Self {
            batch,
            ranks: count("trainer", "world").unwrap_or(1),
            samplers,
            max_running: count("rollout", "max_running")?,
            max_staleness,
            transport,
            shares_cores: has_values(values, &SHARED_CORES),
            has_one_pass: has_values(values, &ONE_PASS),
            idle: ["rollout/idle_ratio", "trainer/idle_ratio"].map(|name| steps.mean(name).unwrap_or(0.0)),
            lengths: [length, steps.mean("completions/max_length")?],
            prompt_tokens: steps.mean("prompts/mean_length"),
            trained_share: steps.trained_share(epochs * completions),
            training_s: steps.mean("time/forward_backward").filter(|seconds| *seconds > 0.0),
            sampled_token_s: steps.mean_inverse("rollout/tokens_per_s"),
            publish_s: steps.mean("time/weight_sync"),
            // The metric is a sum over samplers.
            stall_s: steps.mean("time/decode_stall").map(|seconds| seconds / samplers as f64),
            checkpoint_s: saves.reduce(f64::max),
            reward: steps.slowest_reward(),
            logs_s: steps.time_between(),
            commit_s: mean_commit(timeline),
        })
    }

    /// The same with a training step that one rank makes alone: ranks on GPUs divide it, those on a processor have its cores together.
    pub(super) fn of_one_rank(mut self, hardware: HardwareKind) -> Self {
        if hardware == HardwareKind::Gpu {
            self.training_s = self.training_s.map(|seconds| seconds * self.ranks as f64);
        }
        self
    }

    /// Completions of a batch.
    pub(super) fn completions(&self) -> f64 {
        self.batch[0] as f64 * self.batch[1] as f64
    }

    /// Times of the slowest reward.
    pub(super) fn reward_time(&self) -> Option<LatencyModel> {
        self.reward.map(|[median_s, sigma, longest_s]| LatencyModel { median_s, sigma, longest_s })
    }
}

/// The metrics of some steps.
struct StepMetrics<'a>(&'a [Map<String, Value>]);

impl StepMetrics<'_> {
    fn mean(&self, name: &str) -> Option<f64> {
        let values: Vec<f64> = self.0.iter().filter_map(|step| step.get(name)?.as_f64()).collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    }

    /// Mean of the inverse of a speed: steps have about as many tokens each.
    fn mean_inverse(&self, name: &str) -> Option<f64> {
        let speeds = self.0.iter().filter_map(|step| step.get(name)?.as_f64());
        let values: Vec<f64> = speeds.filter(|speed| *speed > 0.0).map(|speed| 1.0 / speed).collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    }

    /// Share of the tokens of batches of so many `completions` that was trained.
    fn trained_share(&self, completions: f64) -> f64 {
        let of_step = |step: &Map<String, Value>| {
            let [speed, seconds, mean] =
                ["trainer/tokens_per_s", "time/forward_backward", "completions/mean_length"]
                    .map(|name| step.get(name).and_then(Value::as_f64));
            Some([speed? * seconds?, completions * mean?])
        };
        let [trained, sampled] =
            self.0.iter().filter_map(of_step).fold([0.0; 2], |[a, b], [c, d]| [a + c, b + d]);
        if trained > 0.0 && sampled > 0.0 { (trained / sampled).min(1.0) } else { 1.0 }
    }

    /// Mean time from the end of a step to the begin of the next one, seconds; 0 without two steps in a row.
    fn time_between(&self) -> f64 {
        let number = |step: &Map<String, Value>, name: &str| step.get(name)?.as_f64();
        let times = self.0.windows(2).filter_map(|pair| {
            let in_a_row = number(&pair[1], "step")? - number(&pair[0], "step")? == 1.0;
            let between =
                number(&pair[1], "time_s")? - number(&pair[0], "time_s")? - number(&pair[1], "time/step")?;
            in_a_row.then_some(between.max(0.0))
        });
        let times: Vec<f64> = times.collect();
        times.iter().sum::<f64>() / times.len().max(1) as f64
    }

    /// The reward that takes longest, by its 95th percentile: median, standard deviation of the logarithm, longest.
    fn slowest_reward(&self) -> Option<[f64; 3]> {
        let names = self.0.first()?.keys().filter_map(|key| key.strip_suffix("/latency_p95_s"));
        let of = |name: &str| {
            let [median, high] = ["p50", "p95"]
                .map(|share| self.mean(&format!("{name}/latency_{share}_s")).unwrap_or(0.0).max(0.0));
            let longest = self
                .0
                .iter()
                .filter_map(|step| step.get(&format!("{name}/latency_max_s"))?.as_f64())
                .fold(high, f64::max);
            let sigma = if median > 0.0 { ((high / median).ln() / P95).max(0.0) } else { 0.0 };
            [median, sigma, longest]
        };
        names.map(of).max_by(|a, b| a[2].total_cmp(&b[2]))
    }
}

/// What a measurement without a number of ranks or samplers has.
fn one() -> usize {
    1
}

/// Roles of the environment of a recipe.
fn roles(values: &RecipeValues) -> usize {
    let spec = values.get("environment").cloned();
    let spec = spec.and_then(|spec| serde_json::from_value::<EnvironmentSpec>(spec).ok());
    spec.as_ref().map_or(1, roles_of)
}

fn value_of<'a>(values: &'a RecipeValues, section: &str, key: &str) -> Option<&'a Value> {
    values.get(section)?.get(key)
}

/// Whether a recipe has these values, as JSON; an empty text is no value.
fn has_values(values: &RecipeValues, expected: &[(&str, &str, &str)]) -> bool {
    expected.iter().all(|(section, key, text)| {
        let found = value_of(values, section, key).map_or(String::new(), Value::to_string);
        found == *text
    })
}

/// Mean time of a commit in a timeline, seconds.
fn mean_commit(timeline: &str) -> Option<f64> {
    let spans = timeline.lines().filter(|line| line.contains("\"kind\":\"commit\"")).filter_map(|line| {
        let span: Map<String, Value> = serde_json::from_str(line).ok()?;
        Some(span.get("end")?.as_f64()? - span.get("start")?.as_f64()?)
    });
    let (sum, count) =
        spans.fold((0.0, 0.0), |(sum, count), seconds: f64| (sum + seconds.max(0.0), count + 1.0));
    (count > 0.0).then(|| sum / count)
}
