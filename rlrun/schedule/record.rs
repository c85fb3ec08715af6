//! What the records of a schedule say, and their encoding: MessagePack with named fields, so that a later program can add some.
//!
//! Invariant: groups are encoded as the journal of the buffer has them.

use std::fmt;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use buffer::store::{decode_payload, encode_group};
use serde::{Deserialize, Serialize, Serializer};
use trainer::{Learner, StepReport, Trainer, TrainerError};
use trajectory::{Group, GroupId, PolicyVersion};

/// A record.
#[derive(Clone, Debug)]
pub(crate) enum ScheduleRecord {
    Start(StartRecord),
    Step(Box<StepRecord>),
}

/// A start or a resume of the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct StartRecord {
    /// The version that it starts from.
    pub(crate) version: PolicyVersion,
    /// The resolved recipe.
    pub(crate) recipe: String,
    /// The version of the program, and a digest of its binary.
    pub(crate) rlrun: String,
    pub(crate) build: String,
    /// The trained tensors.
    pub(crate) tensors: TrainedTensors,
}

/// The trained tensors of policy and critic, with digests of their values.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct TrainedTensors {
    /// Names, those of a critic under `critic.`; empty in records of steps, which have the tensors of their start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) names: Vec<String>,
    /// The first 64 bits of BLAKE3 over the values as little-endian f32.
    pub(crate) digests: Vec<u64>,
}

/// A training step.
#[derive(Clone, Debug)]
pub(crate) struct StepRecord {
    /// The version that it made.
    pub(crate) version: PolicyVersion,
    pub(crate) numbers: StepNumbers,
    /// In the order of the lease.
    pub(crate) groups: Vec<Arc<Group>>,
    /// After the step.
    pub(crate) tensors: TrainedTensors,
}

/// Numbers of a step, all finite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct StepNumbers {
    /// Wall time of the run after the step, seconds, as in `metrics.jsonl`.
    pub(crate) time_s: f64,
    pub(crate) learning_rate: f32,
    pub(crate) grad_norm: f32,
    /// Groups that were dropped as stale since the step before.
    pub(crate) dropped_stale: u64,
    /// KL divergence of the policy from those that sampled the batch, at the start of the step, nats per token.
    pub(crate) kl: f64,
    /// Effective share of the tokens of the batch.
    pub(crate) ess: f64,
    /// Most tokens of a micro-batch, if the size adapts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) microbatch_tokens: Option<usize>,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum EncodedRecord<'a> {
    Start(&'a StartRecord),
    Step(EncodedStep<'a>),
}

#[derive(Serialize)]
struct EncodedStep<'a> {
    version: PolicyVersion,
    numbers: StepNumbers,
    groups: Vec<EncodedLeasedGroup>,
    tensors: &'a TrainedTensors,
}

#[derive(Serialize)]
struct EncodedLeasedGroup {
    id: GroupId,
    #[serde(serialize_with = "as_bytes")]
    payload: Vec<u8>,
}

fn as_bytes<S: Serializer>(payload: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_bytes(payload)
}

/// The same, borrowed from the bytes.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum DecodedRecord<'a> {
    Start(StartRecord),
    #[serde(borrow)]
    Step(DecodedStep<'a>),
}

#[derive(Deserialize)]
struct DecodedStep<'a> {
    version: PolicyVersion,
    numbers: StepNumbers,
    #[serde(borrow)]
    groups: Vec<DecodedLeasedGroup<'a>>,
    tensors: TrainedTensors,
}

#[derive(Deserialize)]
struct DecodedLeasedGroup<'a> {
    id: GroupId,
    payload: &'a [u8],
}

impl ScheduleRecord {
    /// The tensors that training has after it.
    pub(super) fn tensors(&self) -> &TrainedTensors {
        match self {
            Self::Start(start) => &start.tensors,
            Self::Step(step) => &step.tensors,
        }
    }

    /// The version that training has after it.
    pub(crate) fn version(&self) -> PolicyVersion {
        match self {
            Self::Start(start) => start.version,
            Self::Step(step) => step.version,
        }
    }

    /// # Errors
    /// What is wrong with the bytes.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let decoded = rmp_serde::from_slice(bytes);
        let step = match decoded.map_err(|error| format!("has another form: {error}"))? {
            DecodedRecord::Start(start) => return Ok(Self::Start(start)),
            DecodedRecord::Step(step) => step,
        };
        let DecodedStep { version, numbers, groups, tensors } = step;
        numbers.check()?;
        let group = |group: DecodedLeasedGroup<'_>| {
            let decoded = decode_payload(group.id, group.payload);
            decoded.map(Arc::new).map_err(|reason| format!("has an unusable {}: {reason}", group.id))
        };
        let groups = groups.into_iter().map(group).collect::<Result<_, _>>()?;
        Ok(Self::Step(Box::new(StepRecord { version, numbers, groups, tensors })))
    }

    /// # Errors
    /// What cannot be encoded.
    pub(super) fn encode(&self) -> Result<Vec<u8>, String> {
        let record = match self {
            Self::Start(start) => EncodedRecord::Start(start),
            Self::Step(step) => {
                let StepRecord { version, numbers, groups, tensors } = &**step;
                numbers.check()?;
                let group = |group: &Arc<Group>| {
                    let refused = |error| format!("has a {} that cannot be encoded: {error}", group.id);
                    let payload = encode_group(group).map_err(refused)?;
                    Ok::<_, String>(EncodedLeasedGroup { id: group.id, payload })
                };
                let groups = groups.iter().map(group).collect::<Result<_, _>>()?;
                EncodedRecord::Step(EncodedStep { version: *version, numbers: *numbers, groups, tensors })
            }
        };
        rmp_serde::to_vec_named(&record).map_err(|error| format!("cannot be encoded: {error}"))
    }
}

impl fmt::Display for ScheduleRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start(start) => write!(f, "the start from step {}", start.version.0),
            Self::Step(step) => write!(f, "step {}", step.version.0),
        }
    }
}

impl StepNumbers {
    /// Those of `made`, after which the run is at second `time_s`.
    pub(crate) fn of(made: &StepReport, time_s: f64) -> Self {
        Self {
            time_s,
            learning_rate: made.learning_rate,
            grad_norm: made.grad_norm,
            dropped_stale: made.dropped_stale,
            kl: made.sums.mean_compared(made.sums.mismatch),
            ess: made.sums.effective_share(),
            microbatch_tokens: made.microbatch.as_ref().map(|microbatch| microbatch.tokens),
        }
    }

    /// # Errors
    /// The number that is not finite.
    fn check(&self) -> Result<(), String> {
        let (rate, norm) = (f64::from(self.learning_rate), f64::from(self.grad_norm));
        let all = [self.time_s, rate, norm, self.kl, self.ess];
        let named = ["time_s", "learning_rate", "grad_norm", "kl", "ess"].into_iter().zip(all);
        match { named }.find(|(_, value)| !value.is_finite()) {
            None => Ok(()),
            Some((name, value)) => Err(format!("has the number {value} as `{name}`")),
        }
    }

    /// How learning rate and norm of the gradient differ from those of `other`.
    pub(crate) fn differences(&self, other: &Self) -> String {
        let pairs = [
            ("learning rate", self.learning_rate, other.learning_rate),
            ("gradient norm", self.grad_norm, other.grad_norm),
        ];
        let shown = |(what, a, b): (&str, f32, f32)| {
            let apart = (f64::from(a) - f64::from(b)).abs();
            (a.to_bits() != b.to_bits()).then(|| format!("{what} {a:?} and {b:?}, {apart:.3e} apart"))
        };
        let shown: Vec<String> = pairs.into_iter().filter_map(shown).collect();
        if shown.is_empty() {
            "learning rate and gradient norm are equal".to_owned()
        } else {
            shown.join("; ")
        }
    }
}

impl TrainedTensors {
    /// The tensors that `trainer` trains, as they are now.
    ///
    /// # Errors
    /// If a rank has failed.
    pub(crate) fn of(trainer: &Trainer) -> Result<Self, TrainerError> {
        let mut tensors = Self::default();
        tensors.add("", trainer.learner())?;
        if let Some(network) = trainer.critic().and_then(|critic| critic.network.as_ref()) {
            tensors.add("critic.", &network.learner)?;
        }
        Ok(tensors)
    }

    fn add(&mut self, prefix: &str, learner: &Learner) -> Result<(), TrainerError> {
        let whole = match learner.adapter() {
            Some(_) => None,
            None => Some(learner.parameters()?),
        };
        let (specs, values) = match (learner.adapter(), &whole) {
            (Some(adapter), _) => (adapter.specs(), adapter.values()),
            (None, Some(parameters)) => (parameters.layout().specs(), parameters.values()),
            (None, None) => return Ok(()),
        };
        for spec in specs {
            self.names.push(format!("{prefix}{}", spec.name));
            self.digests.push(digest(&values[spec.range()]));
        }
        Ok(())
    }

    /// The name of the first tensor whose digest is another in `other`, which has the names of these.
    pub(crate) fn first_difference<'a>(&'a self, other: &Self) -> Option<&'a str> {
        if self.digests.len() != other.digests.len() {
            return Some("the number of tensors");
        }
        let at = self.digests.iter().zip(&other.digests).position(|(own, other)| own != other)?;
        Some(self.names.get(at).map_or("a tensor without a name", String::as_str))
    }
}

fn digest(values: &[f32]) -> u64 {
    let mut hasher = blake3::Hasher::new();
    if cfg!(target_endian = "little") {
        hasher.update(bytemuck::cast_slice(values));
    } else {
        for value in values {
            hasher.update(&value.to_le_bytes());
        }
    }
    let hash = *hasher.finalize().as_bytes();
    u64::from_le_bytes([hash[0], hash[1], hash[2], hash[3], hash[4], hash[5], hash[6], hash[7]])
}

/// Identifies the binary of this process: a digest of its file.
///
/// # Errors
/// If the file cannot be read.
pub(crate) fn build_id() -> std::io::Result<String> {
    let running = Path::new("/proc/self/exe");
    let path = if running.exists() { running.to_path_buf() } else { std::env::current_exe()? };
    let (mut file, mut hasher) = (std::fs::File::open(path)?, blake3::Hasher::new());
    let mut chunk = vec![0; 1 << 20];
    loop {
        match file.read(&mut chunk)? {
            0 => break,
            bytes => {
                hasher.update(&chunk[..bytes]);
            }
        }
    }
    Ok(hasher.finalize().to_hex().chars().take(16).collect())
}
