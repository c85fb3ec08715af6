//! Workers: the roles of a run as processes of their own, and what they and the run say to each other.
//!
//! ```text
//! rlrun worker rollout --join URL
//!    /v1/run/join                who I am             -> recipe, files of the model, my name
//!    /v1/run/beat                what I do, each second -> whether I should go on
//!    /v1/admissions, /v1/groups  the buffer
//!    /v1/weights                 the weights
//! ```
//!
//! - [`roster`]: who takes part, as the run sees it
//! - [`routes`]: what the run serves to them
//! - [`membership`]: the side of a worker; [`permissions`]: what a run may decide of it
//! - [`rollout`]: a worker that samples; [`reward`]: one that serves a reward model; [`trainer`]: a further rank
//!
//! Invariant: recipe and model come from the run, as data; what is read and run on the machine of a worker is what its operator
//! has allowed. It ends when the run does, and a run does not end when a worker does.

pub(crate) mod membership;
pub(crate) mod permissions;
pub(crate) mod reward;
pub(crate) mod rollout;
pub(crate) mod roster;
pub(crate) mod routes;
pub(crate) mod trainer;
