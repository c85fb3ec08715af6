//! Islands: runs over slow links that take many local steps and then exchange outer gradients (DiLoCo, Douillard et al. 2023,
//! arXiv 2311.08105; Streaming DiLoCo, Douillard et al. 2025, arXiv 2501.18512; PCCL, Keiblinger et al. 2025, arXiv 2505.14065).
//!
//! ```text
//! island a: H local steps --outer gradient--> coordinator: mean, Nesterov --outer update--> island a: H local steps ...
//! island b: H local steps --outer gradient-->              one round      --outer update--> island b: H local steps ...
//! ```
//!
//! An island is a whole run with samplers, buffer and policy versions of its own. The outer gradient is the difference between the
//! outer weights and the weights of the island after its local steps.
//!
//! # Layout
//! - [`terms`]: what all islands must have in common; [`compression`]: the values of a message, and the residual of what it lost
//! - [`outer`]: the outer optimizer; [`coordinator`]: rounds, members and contributions; [`refusal`]: what it refuses; `store`: its
//!   files
//! - [`server`] and [`client`]: the coordinator over HTTP; [`frame`]: a body with its digest
//! - [`island`]: local steps and exchanges of one island; [`exchange`]: one exchange beside the local steps
//!
//! # Invariants
//! - A contribution that was acknowledged is on disk, and counts once.
//! - The mean of a round is a sum in the order of the names of its islands, so it does not depend on the order of arrival.
//! - Outer weights change by the values that were sent to the islands, so coordinator and islands have the same bits.

pub mod client;
pub mod compression;
pub mod coordinator;
mod error;
pub mod exchange;
pub mod frame;
pub mod island;
pub mod outer;
pub mod refusal;
pub mod server;
mod store;
pub mod terms;

pub use client::{CoordinatorAddress, CoordinatorClient};
pub use compression::GradientCompression;
pub use coordinator::{Coordinator, CoordinatorConfig};
pub use error::IslandError;
pub use island::{Island, IslandSchedule};
pub use outer::OuterOptimizer;
pub use terms::IslandTerms;
