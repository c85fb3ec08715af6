//! ZeRO (Rajbhandari et al. 2019, arXiv 1910.02054) over the crate `collective`: reduction of gradients to the shards of their
//! owners, and gathering of parameters from them.
//!
//! On hosts a rank has a communication thread, so that reduce-scatter overlaps the backward pass and all-gather prefetches the
//! next layer. On devices both run on the stream of the device.
//!
//! Invariant: the communication thread serves requests in the order in which they are made. That order is the same on all
//! ranks, because all ranks make the same passes; a rank without a micro-batch makes the requests of one. The computing thread
//! waits for the communication thread alone, so there is no cycle. At most [`WAITING`] + 2 units are in flight.
//!
//! # Layout
//! - `shards`: which rank owns which values
//! - `gradients`: gradients of one step, unit by unit; `tree`: their sum over leaves
//! - `parameters`: layers that are gathered one ahead of the pass
//! - `devices`: reduce-scatter and all-gather on devices

mod devices;
mod gradients;
mod parameters;
mod shards;
mod tree;

use std::sync::mpsc::{Receiver, SendError, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use collective::{CollectiveError, HostCollective};
use model::{Layout, ThreadPool, Unit};

use crate::TrainerError;
use crate::plan::Slot;
use crate::rank_spans::{RankClock, RankPhase};

pub(crate) use devices::{DeviceGathering, DeviceReduction, DeviceSharding};
pub(crate) use gradients::{GradientReduction, TrainedNetwork};
pub(crate) use parameters::ParameterGathering;
pub(crate) use shards::{Fragment, Shards};
pub(crate) use tree::{TreeSums, add};

/// Requests that wait while the communication thread serves one.
const WAITING: usize = 1;
/// Gathered units that the pass has not received yet: embedding and tail, or the next layer.
const AHEAD: usize = 2;

/// Buffers that are reused, by length.
#[derive(Debug, Default)]
pub(crate) struct BufferPool(Mutex<Vec<Vec<f32>>>);

/// State of the communication thread.
pub(crate) struct Communication<'a> {
    pub(crate) collective: &'a dyn HostCollective,
    /// The ranks that have the same experts, where ranks divide them; `None` if no other has.
    pub(crate) same_experts: Option<&'a dyn HostCollective>,
    /// Shards of the trained tensors.
    pub(crate) trained: &'a Shards,
    /// The weights that this rank owns; `None` if every rank has all weights.
    pub(crate) weights: Option<WeightShards<'a>>,
    pub(crate) buffers: &'a BufferPool,
    /// The clock of the rank, for waits of the computing thread.
    pub(crate) clock: &'a Arc<RankClock>,
}

/// The weights that a rank owns.
#[derive(Clone, Copy)]
pub(crate) struct WeightShards<'a> {
    /// Shards of all ranks.
    pub(crate) shards: &'a Shards,
    /// The shards of this rank, concatenated.
    pub(crate) own: &'a [f32],
}

/// A request to the communication thread.
enum Request {
    /// Sums the gradients of a unit over all ranks, and adds this rank's shard of them to the tree as `slot`.
    Reduce { unit: usize, values: Vec<f32>, slot: Slot },
    /// Gathers the weights of a unit.
    Gather { unit: usize },
}

/// The computing thread's end of the channels.
pub(crate) struct Requests {
    requests: RequestSender,
    gathered: Receiver<Vec<f32>>,
}

/// Where the computing thread sends its requests. It waits while the communication thread waits for other ranks.
#[derive(Clone)]
struct RequestSender {
    requests: SyncSender<Request>,
    clock: Arc<RankClock>,
}

impl RequestSender {
    /// Sends a request.
    ///
    /// # Errors
    /// If the communication thread has ended.
    fn send(&self, request: Request) -> Result<(), SendError<Request>> {
        match self.requests.try_send(request) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(request)) => {
                self.clock.during(RankPhase::Wait, || self.requests.send(request))
            }
            Err(TrySendError::Disconnected(request)) => Err(SendError(request)),
        }
    }

    /// The next gathered unit; `None` if the communication thread has ended.
    fn receive(&self, gathered: &Receiver<Vec<f32>>) -> Option<Vec<f32>> {
        match gathered.try_recv() {
            Ok(values) => Some(values),
            // The collective that the communication thread waits in has the deadline.
            Err(TryRecvError::Empty) => self.clock.during(RankPhase::Wait, || gathered.recv().ok()),
            Err(TryRecvError::Disconnected) => None,
        }
    }
}

/// Runs `body` with a communication thread. `own` receives the sums of the gradients that this rank owns.
///
/// # Errors
/// The error of the communication if it failed, because an error of `body` is a consequence of it; otherwise that of `body`.
pub(crate) fn with_communication<R>(
    communication: &Communication<'_>,
    own: &mut TreeSums,
    body: impl FnOnce(Requests) -> Result<R, TrainerError>,
) -> Result<R, TrainerError> {
    std::thread::scope(|scope| {
        let (requests, incoming) = sync_channel(WAITING);
        let (collected, gathered) = sync_channel(AHEAD);
        let name = format!("communication {}", communication.collective.rank());
        let serve = move || serve(communication, own, &incoming, &collected);
        let thread = std::thread::Builder::new().name(name).spawn_scoped(scope, serve);
        let thread = thread.map_err(|source| TrainerError::Thread { source })?;
        // The channel closes with the body, and the thread ends.
        let clock = communication.clock;
        let requests = RequestSender { requests, clock: Arc::clone(clock) };
        let result = body(Requests { requests, gathered });
        let joined = clock.during(RankPhase::Wait, || thread.join());
        joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        result
    })
}

/// Serves requests until the channel is closed.
fn serve(
    communication: &Communication<'_>,
    own: &mut TreeSums,
    requests: &Receiver<Request>,
    gathered: &SyncSender<Vec<f32>>,
) -> Result<(), CollectiveError> {
    let Communication { collective, trained, weights, buffers, .. } = communication;
    let rank = collective.rank();
    let (mut sums, threads) = (Vec::new(), ThreadPool::single());
    for request in requests {
        match request {
            Request::Reduce { unit, values, slot } => {
                let range = trained.packed_unit(rank, unit);
                if let Some(place) = own.place(range.clone(), slot) {
                    communication.reduce(unit, &values, place)?;
                } else {
                    sums.resize(range.len(), 0.0);
                    communication.reduce(unit, &values, &mut sums)?;
                    own.add(range, &sums, slot, &threads);
                }
                buffers.put(values);
            }
            Request::Gather { unit } => {
                let Some(WeightShards { shards, own }) = weights else {
                    let reason = "every rank has all weights".to_owned();
                    return Err(CollectiveError::Arguments { rank, operation: "all_gather", reason });
                };
                let len = shards.unit(unit).len();
                // The memory of experts of other ranks is never touched.
                let mut all = if shards.expert() > 1 { vec![0.0; len] } else { buffers.take(len) };
                communication.gather(shards, unit, own, &mut all)?;
                if gathered.send(all).is_err() {
                    break;
                }
            }
        }
    }
    Ok(())
}

impl Communication<'_> {
    /// The ranks that need the same part of a range as this one; `None` if no other does.
    fn sharing(&self, shards: &Shards, range: usize) -> Option<&dyn HostCollective> {
        if shards.is_divided(range) { self.same_experts } else { Some(self.collective) }
    }

    /// Sums the gradients `values` of a unit over all ranks to the shards of this rank, `own`, one after the other. Those of experts
    /// that ranks divide are sums over the ranks that sent them rows already.
    fn reduce(&self, unit: usize, values: &[f32], mut own: &mut [f32]) -> Result<(), CollectiveError> {
        let (rank, shards) = (self.collective.rank(), self.trained);
        let first = shards.unit(unit).start;
        for range in shards.of_unit(unit) {
            let (place, (part, cuts)) = (shards.place(range), shards.needed(rank, range));
            let values = &values[place.start - first..place.end - first][part];
            let (shard, rest) = std::mem::take(&mut own).split_at_mut(shards.owned(rank, range).len());
            own = rest;
            match self.sharing(shards, range) {
                Some(ranks) => ranks.reduce_scatter(values, &cuts, shard)?,
                None => shard.copy_from_slice(values),
            }
        }
        Ok(())
    }

    /// Gathers a unit to `all`, of which this rank has its shards, `own`. Of experts that ranks divide it needs its own.
    fn gather(
        &self,
        shards: &Shards,
        unit: usize,
        own: &[f32],
        all: &mut [f32],
    ) -> Result<(), CollectiveError> {
        let (rank, first) = (self.collective.rank(), shards.unit(unit).start);
        for range in shards.of_unit(unit) {
            let (place, (part, cuts)) = (shards.place(range), shards.needed(rank, range));
            let own = &own[shards.packed(rank, range)];
            let all = &mut all[place.start - first..place.end - first][part];
            match self.sharing(shards, range) {
                Some(ranks) => ranks.all_gather(own, &cuts, all)?,
                None => all.copy_from_slice(own),
            }
        }
        Ok(())
    }
}

impl BufferPool {
    /// Frees all buffers. Returns their bytes.
    pub(crate) fn clear(&self) -> u64 {
        let buffers = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        buffers.iter().map(|buffer| size_of_val(&buffer[..]) as u64).sum()
    }

    /// A buffer of `len` values with arbitrary contents.
    pub(crate) fn take(&self, len: usize) -> Vec<f32> {
        let mut buffers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = buffers.iter().position(|buffer| buffer.len() == len);
        found.map_or_else(|| vec![0.0; len], |at| buffers.swap_remove(at))
    }

    /// Returns a buffer to the pool.
    pub(crate) fn put(&self, buffer: Vec<f32>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    }
}

impl Requests {
    /// The gradients of passes over a model of this `layout`, or of its `adapter`. If the rank `accumulates`, it sums its
    /// own slots before reduce-scatter.
    pub(crate) fn reducing<'a>(
        &self,
        network: TrainedNetwork<'a>,
        accumulates: bool,
    ) -> GradientReduction<'a> {
        GradientReduction::among_ranks(network, self.requests.clone(), accumulates)
    }

    /// The layers of passes over a model of this `layout`, of which every rank has its shards. Their memory goes back to `buffers`, or is
    /// freed without them.
    pub(crate) fn gathering<'a>(
        self,
        layout: &'a Layout,
        buffers: Option<&'a BufferPool>,
    ) -> ParameterGathering<'a> {
        ParameterGathering::new(self, layout, buffers)
    }
}

/// Index of a unit among all units of the layout.
pub(crate) fn number(layout: &Layout, unit: Unit) -> usize {
    match unit {
        Unit::Embedding => 0,
        Unit::Layer(index) => index + 1,
        Unit::Tail => layout.layers().len() + 1,
    }
}
