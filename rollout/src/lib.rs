//! From tasks to scored groups.
//!
//! # Layout
//! - [`worker`]: the rollout worker, the loop that ties everything together; [`activity`]: when it did what;
//!   `admission_pace`: how often it asks for slots over a network
//! - [`sampler`]: [`Sampler`], the seam to a rollout engine; [`engine`]: the engine of this process, continuous batching
//!   over a paged KV cache; [`applier`]: newer weights, staged concurrently with decoding; [`remote`]: vLLM and SGLang
//! - [`episode`]: episodes of turns in an environment, played with a sampler
//! - [`tasks`]: datasets, the arithmetic generator, the endless shuffled stream of tasks
//! - [`prompts`]: tasks as tokens, checked before the run starts
//! - [`requests`]: requests of clients that share a sampler with the worker, or have one of their own
//! - [`curation`]: which tasks are drawn and which groups are kept
//! - [`scoring`]: rewards concurrently with generation; complete groups go to the buffer
//! - [`evaluate`]: a sampler on held-out tasks, without a buffer
//!
//! # Invariants
//! - A trajectory is a function of weights, prompt, seed, group and index.
//! - An admitted slot ends in a finalized group or goes back to the buffer.
//! - Every wait has a deadline, and its error names both roles.

pub mod activity;
mod admission_pace;
pub mod applier;
pub mod curation;
pub mod engine;
pub mod episode;
mod error;
pub mod evaluate;
pub mod prompts;
pub mod remote;
pub mod requests;
pub mod sampler;
pub mod scoring;
pub mod tasks;
pub mod worker;

pub use activity::{Activity, ActivityLog, LimitChange};
pub use engine::{
    AdapterSlots, DifferentValues, Engine, EngineConfig, Interruption, LocalSampler, Network, PendingReceipt,
    ReplayConfig, SampledDifference, ServeOn, ServedWeights, StopRules, TrajectoryReplay, UnpackedWeights,
    check_adapter,
};
pub use episode::{
    ChatEncoder, ENVIRONMENT_COLUMN, Episode, EpisodeConfig, EpisodeDriver, EpisodeEnd, EpisodeEnvironment,
    EpisodeFailure, EpisodePlace, ExternalPlayer, FailureKind, MessageEncoder, PlayedEpisode,
    ScriptedEpisode, named_by, play_script,
};
pub use error::RolloutError;
pub use prompts::{Overlong, PromptSet};
pub use requests::{
    ClientQueue, ClientRequestError, PendingRequest, RequestBounds, RequestEvent, RequestHandle,
    ServedSampler, request_queue,
};
pub use sampler::{
    AppliedWeights, Completion, EngineCounts, OnUpdate, PartialCompletion, RequestOptions, RequestStop,
    SampleRequest, Sampler,
};
pub use worker::{Progress, Worker, WorkerConfig, WorkerPhase};
