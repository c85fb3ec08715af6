//! The inputs of a simulation.
//!
//! Invariant: a scenario that [`Scenario::check`] accepts ends, or the simulation says which side waits for which.

use buffer::{BufferConfig, BufferError, OnStale};

use crate::cost::TrainingCost;
use crate::decode::DecodeCurve;
use crate::lengths::LengthModel;

/// Most completions in flight: each takes memory.
const MAX_IN_FLIGHT: u64 = 1 << 26;

/// A run to simulate. Times are seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// Training steps that are simulated.
    pub steps: u64,
    /// First steps that the means leave out, because they fill the buffer.
    pub warm_steps: u64,
    /// Groups of a training step.
    pub batch_groups: usize,
    /// Completions of a group.
    pub group_size: usize,
    /// Bound on staleness, versions.
    pub max_staleness: u64,
    /// What happens to groups that are too slow.
    pub on_stale: OnStale,
    /// A bound on groups that are live or leased for the current step, below (`max_staleness` + 1) batches: a fraction of a version
    /// of staleness, as in verl's `staleness_threshold`.
    pub slots: Option<usize>,
    /// Whether admission follows what the trainer waits for ([`buffer::AdmissionControl`]).
    pub lead_adapts: bool,
    /// Lengths of completions.
    pub lengths: LengthModel,
    /// Tokens of a prompt.
    pub prompt_tokens: f64,
    /// Turns with tools; `None` for single completions.
    pub tools: Option<ToolCalls>,
    /// Rewards.
    pub rewards: RewardService,
    /// Samplers.
    pub samplers: SamplerFleet,
    /// The trainer.
    pub trainer: TrainingCost,
    /// New weights on their way to samplers.
    pub weights: WeightDelivery,
    /// What samplers and trainer share.
    pub sharing: ResourceSharing,
}

/// A distribution of times: log-normal, and cut.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatencyModel {
    /// Median, seconds; 0 takes no time.
    pub median_s: f64,
    /// Standard deviation of the logarithm.
    pub sigma: f64,
    /// Longest, seconds.
    pub longest_s: f64,
}

/// Tool calls between the turns of an episode.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ToolCalls {
    /// Turns of an episode, which divide its completion equally. At least 1.
    pub turns: usize,
    /// Time of a call.
    pub time: LatencyModel,
    /// Tokens of an answer, which are prefilled.
    pub answer_tokens: f64,
}

/// Rewards of trajectories.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RewardService {
    /// Time of one reward.
    pub time: LatencyModel,
    /// Rewards at the same time; others wait in the order of their arrival.
    pub concurrency: usize,
}

/// Time to prefill.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillCost {
    /// Of every prefill, seconds.
    pub fixed_s: f64,
    /// Of a token, seconds.
    pub per_token_s: f64,
}

/// A sampler that is away.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplerAbsence {
    /// Which sampler, from 0.
    pub sampler: usize,
    /// When it goes away, seconds from the start.
    pub at_s: f64,
    /// How long it is away, seconds.
    pub for_s: f64,
    /// After how long its groups are revoked, seconds.
    pub noticed_after_s: f64,
}

/// Equal samplers.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerFleet {
    /// Number of samplers.
    pub count: usize,
    /// Decode step of one.
    pub decode: DecodeCurve,
    /// Prefill of one.
    pub prefill: PrefillCost,
    /// Sequences that one decodes together.
    pub max_running: usize,
    /// Whether only as many get groups as the trainer needs ([`buffer::AdmissionControl`]).
    pub count_adapts: bool,
    /// Whether each finds how many are enough, up to `max_running` ([`buffer::RunningControl`]).
    pub running_adapts: bool,
    /// Capacity of the KV cache of one, tokens; infinite for no limit.
    pub kv_tokens: f64,
    /// Absences.
    pub absences: Vec<SamplerAbsence>,
}

/// New weights on their way from the trainer to samplers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WeightDelivery {
    /// Time in which the trainer publishes and does nothing else, seconds.
    pub publish_s: f64,
    /// Time until a sampler has them, beside training and decoding, seconds.
    pub push_s: f64,
    /// Time in which a sampler that applies them does not decode, seconds.
    pub stall_s: f64,
    /// When and how they are applied.
    pub apply: ApplyRule,
}

/// When new weights are applied (`rollout.on_update`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApplyRule {
    /// At once; sequences keep their KV cache.
    Keep,
    /// At once; the context of every running sequence is prefilled again.
    Recompute,
    /// When the sequences in flight have ended; no group starts before.
    Drain,
}

/// What samplers and trainer share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ResourceSharing {
    /// Nothing.
    Separate,
    /// Cores of one machine: while both sides compute, each takes this many times as long.
    Cores {
        /// Factor of a decode step and a prefill, at least 1.
        sampler: f64,
        /// Factor of a training step, at least 1.
        trainer: f64,
    },
    /// Devices, by turns (colocated).
    Turns {
        /// Time to yield the devices, and to take them, seconds each.
        switch_s: f64,
    },
}

/// Why a scenario cannot be simulated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SimulationError {
    /// An input is out of range.
    #[error("{what}; correct the scenario")]
    Input {
        /// Which one, and its value.
        what: String,
    },
    /// The ledger refuses the configuration or a call.
    #[error("the buffer of the simulation: {0}")]
    Buffer(#[from] BufferError),
    /// Nothing can happen any more.
    #[error(
        "the simulated run stops at {at_s:.1} s in step {step}: {waits}; let samplers come back, or raise `max_running` or `kv_tokens`"
    )]
    Stopped {
        /// Virtual time, seconds.
        at_s: f64,
        /// The step that was not finished.
        step: u64,
        /// Which side waits for which.
        waits: String,
    },
    /// Too many events.
    #[error("the simulation made {events} events and reached step {step} of {steps}; simulate fewer steps")]
    TooLong {
        /// Events so far.
        events: u64,
        /// Steps done.
        step: u64,
        /// Steps wanted.
        steps: u64,
    },
}

impl LatencyModel {
    /// No time at all.
    pub const NONE: Self = Self { median_s: 0.0, sigma: 0.0, longest_s: 0.0 };

    fn is_usable(&self) -> bool {
        [self.median_s, self.sigma, self.longest_s].iter().all(|number| *number >= 0.0 && !number.is_nan())
            && self.median_s.is_finite()
            && self.sigma.is_finite()
    }
}

impl Scenario {
    /// `batch_groups` groups of `group_size` completions of `lengths` a step: one sampler with decode steps of 10 ms, a trainer that
    /// takes 20 microseconds for a token, no other times, a staleness of 1, 30 steps.
    #[must_use]
    pub fn new(batch_groups: usize, group_size: usize, lengths: LengthModel) -> Self {
        Self {
            steps: 30,
            warm_steps: 5,
            batch_groups,
            group_size,
            max_staleness: 1,
            on_stale: OnStale::Wait,
            slots: None,
            lead_adapts: false,
            lengths,
            prompt_tokens: 0.0,
            tools: None,
            rewards: RewardService { time: LatencyModel::NONE, concurrency: usize::MAX },
            samplers: SamplerFleet {
                count: 1,
                decode: DecodeCurve::linear([0.01, 0.0, 0.0]),
                prefill: PrefillCost { fixed_s: 0.0, per_token_s: 0.0 },
                max_running: usize::MAX,
                count_adapts: false,
                running_adapts: false,
                kv_tokens: f64::INFINITY,
                absences: Vec::new(),
            },
            trainer: TrainingCost::per_token(2e-5),
            weights: WeightDelivery { publish_s: 0.0, push_s: 0.0, stall_s: 0.0, apply: ApplyRule::Keep },
            sharing: ResourceSharing::Separate,
        }
    }

    /// The configuration of the buffer.
    #[must_use]
    pub fn buffer(&self) -> BufferConfig {
        BufferConfig { on_stale: self.on_stale, ..BufferConfig::new(self.batch_groups, self.max_staleness) }
    }

    /// Checks ranges and relations.
    ///
    /// # Errors
    /// The first input that no simulation can use.
    pub fn check(&self) -> Result<(), SimulationError> {
        let refuse = |what: String| Err(SimulationError::Input { what });
        if self.steps == 0 || self.warm_steps >= self.steps {
            return refuse(format!("{} steps of which {} are left out", self.steps, self.warm_steps));
        }
        if self.group_size == 0 || self.samplers.count == 0 || self.samplers.max_running == 0 {
            return refuse("a group, the samplers or their running sequences are none".to_owned());
        }
        let groups = self.max_staleness.saturating_add(1).saturating_mul(self.batch_groups as u64);
        let in_flight = groups.saturating_mul(self.group_size as u64);
        if in_flight > MAX_IN_FLIGHT {
            return refuse(format!(
                "{in_flight} completions can be in flight, (`max_staleness` + 1) x {} groups x {}, and at most {MAX_IN_FLIGHT} are simulated",
                self.batch_groups, self.group_size
            ));
        }
        if let Some(why) = self.lengths.unusable() {
            return refuse(format!("lengths of completions: {why}"));
        }
        if self.slots.is_some_and(|slots| slots < self.batch_groups) {
            return refuse(format!("`slots` is less than a batch of {} groups", self.batch_groups));
        }
        if self.trainer.leases == 0 || !self.batch_groups.is_multiple_of(self.trainer.leases) {
            return refuse(format!(
                "{} leases do not divide {} groups",
                self.trainer.leases, self.batch_groups
            ));
        }
        let WeightDelivery { publish_s, push_s, stall_s, .. } = self.weights;
        let PrefillCost { fixed_s, per_token_s } = self.samplers.prefill;
        let tool_tokens = self.tools.map_or(0.0, |tools| tools.answer_tokens);
        let times = [publish_s, push_s, stall_s, fixed_s, per_token_s, self.prompt_tokens, tool_tokens];
        let sharing = match self.sharing {
            ResourceSharing::Separate => true,
            ResourceSharing::Cores { sampler, trainer } => {
                [sampler, trainer].iter().all(|factor| factor.is_finite() && *factor >= 1.0)
            }
            ResourceSharing::Turns { switch_s } => switch_s.is_finite() && switch_s >= 0.0,
        };
        let usable = times.iter().all(|time| time.is_finite() && *time >= 0.0)
            && sharing
            && self.samplers.decode.is_usable()
            && self.trainer.is_usable()
            && self.rewards.time.is_usable()
            && self.rewards.concurrency > 0
            && self.tools.is_none_or(|tools| tools.turns > 0 && tools.time.is_usable());
        if !usable {
            return refuse("a time, a factor or a number of tokens is negative or no number".to_owned());
        }
        let longest = self.prompt_tokens + self.lengths.longest() + tool_tokens;
        if self.samplers.kv_tokens.is_nan() || self.samplers.kv_tokens < longest {
            return refuse(format!(
                "a sequence of {longest} tokens does not fit a KV cache of {} tokens",
                self.samplers.kv_tokens
            ));
        }
        for absence in &self.samplers.absences {
            let SamplerAbsence { sampler, at_s, for_s, noticed_after_s } = *absence;
            let times = [at_s, for_s, noticed_after_s];
            if sampler >= self.samplers.count || times.iter().any(|time| !time.is_finite() || *time < 0.0) {
                return refuse(format!("the absence {absence:?} has no such sampler, or no time"));
            }
        }
        Ok(())
    }
}
