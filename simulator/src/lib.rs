//! Discrete-event simulation of an asynchronous run in virtual time, around the ledger that a run has.
//!
//! A [`Scenario`] has what a run has: groups of completions with a distribution of lengths, samplers that decode with processor
//! sharing, rewards and tools that take time, a trainer, and weights that reach samplers after a while. [`simulate`] plays it for one
//! seed. Admission, order and staleness are decided by [`buffer::SimulatedLedger`], the state machine of the buffer; this crate
//! implements none of it again.
//!
//! # Layout
//! - [`scenario`]: the inputs; [`lengths`]: lengths of completions; [`decode`]: time of a decode step; [`cost`]: time of training
//! - `engine`: one sampler; `fleet`: all of them; `rewards`: queues of rewards; `events`: the queue of events
//! - `simulation`: the loop; [`outcome`]: its result, and percentiles over seeds
//! - [`theory`]: closed forms, of which a simulation is the general case
//! - [`published`]: rows that others have measured, with what is predicted for them
//!
//! # Invariants
//! - The same scenario and seed give the same outcome on every machine.
//! - An event is an admission, an end, or a change of a rate: their number does not depend on the number of tokens.
//! - No sample is trained beyond the bound on staleness; every lease is checked.
//!
//! ```
//! use simulator::{LengthModel, Scenario, simulate};
//! let mut scenario = Scenario::new(16, 8, LengthModel::constant(100.0));
//! scenario.max_staleness = 0;
//! let synchronous = simulate(&scenario, 0)?;
//! scenario.max_staleness = 2;
//! let asynchronous = simulate(&scenario, 0)?;
//! assert!(asynchronous.step_s < synchronous.step_s);
//! assert!(asynchronous.staleness.iter().enumerate().all(|(versions, groups)| versions <= 2 || *groups == 0));
//! # Ok::<(), simulator::SimulationError>(())
//! ```

pub mod cost;
pub mod decode;
mod draws;
mod engine;
mod events;
mod fleet;
pub mod lengths;
pub mod outcome;
pub mod published;
mod rewards;
pub mod scenario;
mod simulation;
pub mod theory;

pub use cost::TrainingCost;
pub use decode::DecodeCurve;
pub use lengths::LengthModel;
pub use outcome::{LimitingSide, OutcomeRange, RangeOverSeeds, SimulationOutcome, over_seeds};
pub use scenario::{
    ApplyRule, LatencyModel, PrefillCost, ResourceSharing, RewardService, SamplerAbsence, SamplerFleet,
    Scenario, SimulationError, ToolCalls, WeightDelivery,
};
pub use simulation::simulate;
