//! Workers: the roles of a run as processes of their own, and the protocol between them and the run.
//!
//! ```text
//! rlrun worker rollout --join URL
//!    /v1/run/join                role and name          -> recipe, files of the model, name
//!    /v1/run/beat                heartbeat, each second -> whether to stop
//!    /v1/admissions, /v1/groups  the buffer
//!    /v1/weights                 the weights, or the relay that sends them
//! ```
//!
//! - [`registry`]: the run's registry of workers; [`api`]: its routes for them
//! - [`membership`]: the worker's side; [`permissions`]: what a run may choose on a worker's machine; `pauses`: times without a
//!   processor
//! - [`rollout`]: a worker that samples; [`reward`]: one that serves a reward model; [`trainer`]: a further rank
//!
//! Invariant: recipe and model come from the run, as data; a worker reads and executes only what its operator has allowed. A
//! worker ends with the run, and a run continues without a worker.

pub(crate) mod api;
pub(crate) mod membership;
mod pauses;
pub(crate) mod permissions;
pub(crate) mod registry;
pub(crate) mod reward;
pub(crate) mod rollout;
pub(crate) mod trainer;
