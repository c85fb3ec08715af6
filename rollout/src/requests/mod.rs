//! Requests that are not of the worker's tasks: a server's clients ask for completions of the policy.
//!
//! A [`RequestHandle`] is the side of the clients: any number of clones submit requests and await their completions. A
//! [`ClientQueue`] is the side of the sampler: between two decode steps it admits requests, and delivers what was sampled.
//! [`ServedSampler`] puts a queue in front of a [`Sampler`](crate::Sampler), so that one engine serves clients and trains at
//! the same time; a loop of its own serves clients alone.
//!
//! # Layout
//! - `handle`: [`RequestHandle`], [`PendingRequest`]; `queue`: [`ClientQueue`]; `served`: [`ServedSampler`]
//!
//! # Invariants
//! - The number of requests that have not ended is bounded; one more is refused at once.
//! - A request whose [`PendingRequest`] is dropped is aborted at the next decode step, and its pages are freed.
//! - The sampler never waits for a client: what a client has not taken yet is bounded by the length of its completions.
//! - Group ids of requests begin at [`FIRST_GROUP`], so that they never are those of a run.

mod handle;
mod queue;
mod served;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use trajectory::{GroupId, PolicyVersion};

use crate::sampler::{Completion, EngineCounts, PartialCompletion};

pub use handle::{PendingRequest, RequestHandle};
pub use queue::ClientQueue;
pub use served::ServedSampler;

/// The group id of the first request.
pub const FIRST_GROUP: GroupId = GroupId(1 << 63);

/// Bounds of a queue of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestBounds {
    /// Most requests that have not ended, those that wait included.
    pub max_open: usize,
    /// Most sequences of requests that the sampler decodes together; the rest of its capacity is the worker's.
    pub max_running: usize,
}

/// Why a request has no completion.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ClientRequestError {
    /// The queue is full.
    #[error("{open} requests are open, which is the limit; try again later")]
    Busy {
        /// Requests that have not ended.
        open: usize,
    },
    /// The engine can never serve it.
    #[error("{reason}")]
    Refused {
        /// Why.
        reason: String,
    },
    /// No sampler serves the queue any more.
    #[error("no sampler serves requests any more: {reason}")]
    Closed {
        /// Why.
        reason: String,
    },
}

/// What happens to a request.
#[derive(Clone, Debug, PartialEq)]
pub enum RequestEvent {
    /// New tokens of a completion that has not ended; only of requests that stream.
    Partial(PartialCompletion),
    /// One of its completions ended.
    Completed(Box<Completion>),
    /// It ended without the completions that are missing.
    Failed(ClientRequestError),
}

/// What a queue and its sampler do at the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct QueueStatus {
    /// The version that is served.
    pub version: PolicyVersion,
    /// Requests that the sampler has.
    pub running: usize,
    /// Requests that wait for capacity.
    pub waiting: usize,
    /// What the sampler has done, for the worker too.
    pub counts: EngineCounts,
    /// Part of the KV cache that is in use, from 0 to 1.
    pub cache_usage: f64,
    /// Updates of the weights.
    pub weight_updates: u64,
    /// Time for which decoding stood still for them, seconds.
    pub weight_updates_s: f64,
}

/// A queue for `bounds`, as its two sides.
#[must_use]
pub fn request_queue(bounds: RequestBounds) -> (RequestHandle, ClientQueue) {
    let (sender, receiver) = crossbeam::channel::bounded(bounds.max_open.max(1));
    let shared = Arc::new(QueueState {
        bounds,
        open: AtomicUsize::new(0),
        submitted: AtomicU64::new(0),
        closed: AtomicBool::new(false),
        cancelled: Mutex::default(),
        status: Mutex::default(),
    });
    (RequestHandle::new(sender, Arc::clone(&shared)), ClientQueue::new(receiver, shared))
}

/// What both sides of a queue share.
#[derive(Debug)]
struct QueueState {
    bounds: RequestBounds,
    /// Requests that have not ended.
    open: AtomicUsize,
    /// Requests submitted so far; numbers the next one.
    submitted: AtomicU64,
    /// Whether the side of the sampler is gone.
    closed: AtomicBool,
    /// Requests whose client is gone: at most one entry per open request.
    cancelled: Mutex<Vec<GroupId>>,
    status: Mutex<QueueStatus>,
}

/// What a client has not taken yet of its request.
#[derive(Debug)]
struct RequestMailbox {
    content: Mutex<MailboxContent>,
    arrived: tokio::sync::Notify,
}

#[derive(Debug)]
struct MailboxContent {
    /// At most one per completion: newer tokens are appended.
    partials: Vec<PartialCompletion>,
    completions: Vec<Completion>,
    failed: Option<ClientRequestError>,
    /// Completions that have not ended.
    left: usize,
    submitted: Instant,
    /// How long it waited for the sampler.
    queued: Option<Duration>,
}
