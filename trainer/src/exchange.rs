//! The communication thread of a rank: gradients leave while the next layer is being reversed, weights come before they
//! are needed.
//!
//! Invariant: requests are served one after the other in the order in which they are made, which is the same on all ranks
//! because all make the same passes; a rank without work makes them empty. A request is made by a thread that computes
//! and waits for nobody but this one, so there is no cycle. At most [`WAITING`] + 2 units are under way.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::bail;
use model::{GradientSink, LayerSource, Layout, ThreadPool, Unit};

use crate::TrainerError;
use crate::collective::{Collective, CollectiveError};
use crate::lora::Adapter;
use crate::shards::Shards;

/// Requests that wait while one is served.
const WAITING: usize = 1;
/// Units that were gathered and not yet taken: both ends of a model, or the next layer.
const AHEAD: usize = 2;

/// Buffers that are used again, whatever their length.
#[derive(Debug, Default)]
pub(crate) struct Pool(Mutex<Vec<Vec<f32>>>);

/// What the communication thread works on.
pub(crate) struct Line<'a> {
    pub(crate) collective: &'a dyn Collective,
    /// How what is trained is shared.
    pub(crate) trained: &'a Shards,
    /// How weights are shared, and those that this rank owns; `None` where every rank has all.
    pub(crate) weights: Option<(&'a Shards, &'a [f32])>,
    pub(crate) pool: &'a Pool,
}

/// What is asked of the communication thread.
enum Request {
    /// To sum up gradients of a unit over all ranks and keep the own shard, or add it unless it is the `first`.
    Reduce { unit: usize, values: Vec<f32>, first: bool },
    /// To collect the weights of a unit.
    Gather { unit: usize },
}

/// The side that computes.
pub(crate) struct Ends {
    requests: SyncSender<Request>,
    gathered: Receiver<Vec<f32>>,
}

/// Gradients that are reduced unit by unit as soon as they are complete.
pub(crate) struct Reducing<'a> {
    requests: SyncSender<Request>,
    layout: &'a Layout,
    pool: &'a Pool,
    /// What is trained in place of the weights, and who computes its gradients.
    adapter: Option<(&'a Adapter, &'a ThreadPool)>,
    units: Vec<Option<Vec<f32>>>,
    /// Whether units leave when they are done, or stay to be added to.
    pub(crate) leave: bool,
    /// Whether they are the first of their step to leave.
    pub(crate) first: bool,
}

/// Layers that are gathered one ahead of the pass.
pub(crate) struct Gathering<'a> {
    requests: SyncSender<Request>,
    gathered: Receiver<Vec<f32>>,
    layout: &'a Layout,
    pool: &'a Pool,
    /// The last one that was asked for.
    current: Option<(usize, Arc<Vec<f32>>)>,
    /// The one that was requested ahead.
    ahead: Option<usize>,
    /// Whether a backward follows, or goes on.
    pub(crate) backward: bool,
}

/// Runs `body` beside a communication thread. `own` becomes the sums of the gradients that this rank owns.
///
/// # Errors
/// That of the communication if it failed, which `body` only sees the consequences of; otherwise that of `body`.
pub(crate) fn exchange<R>(
    line: &Line<'_>,
    own: &mut [f32],
    body: impl FnOnce(Ends) -> Result<R, TrainerError>,
) -> Result<R, TrainerError> {
    std::thread::scope(|scope| {
        let (requests, incoming) = sync_channel(WAITING);
        let (collected, gathered) = sync_channel(AHEAD);
        let name = format!("exchange {}", line.collective.rank());
        let serve = move || serve(line, own, &incoming, &collected);
        let thread = std::thread::Builder::new().name(name).spawn_scoped(scope, serve);
        let thread = thread.map_err(|source| TrainerError::Thread { source })?;
        // The ends are dropped with the body, which lets the thread end.
        let result = body(Ends { requests, gathered });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        result
    })
}

/// The life of the communication thread: until nobody can ask any more.
fn serve(
    line: &Line<'_>,
    own: &mut [f32],
    requests: &Receiver<Request>,
    gathered: &SyncSender<Vec<f32>>,
) -> Result<(), CollectiveError> {
    let Line { collective, trained, weights, pool } = line;
    let rank = collective.rank();
    let mut sums = Vec::new();
    for request in requests {
        match request {
            Request::Reduce { unit, values, first } => {
                let own = &mut own[trained.packed(rank, unit)];
                if first {
                    collective.reduce_scatter(&values, trained.cuts(unit), own)?;
                } else {
                    sums.resize(own.len(), 0.0);
                    collective.reduce_scatter(&values, trained.cuts(unit), &mut sums)?;
                    own.iter_mut().zip(&sums).for_each(|(own, sum)| *own += sum);
                }
                pool.put(values);
            }
            Request::Gather { unit } => {
                let Some((shards, own)) = weights else {
                    unreachable!("weights that all have are not gathered")
                };
                let mut all = pool.take(shards.place(unit).len());
                collective.all_gather(&own[shards.packed(rank, unit)], shards.cuts(unit), &mut all)?;
                if gathered.send(all).is_err() {
                    break;
                }
            }
        }
    }
    Ok(())
}

impl Pool {
    /// A buffer of this length with anything in it.
    fn take(&self, len: usize) -> Vec<f32> {
        let mut buffers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = buffers.iter().position(|buffer| buffer.len() == len);
        found.map_or_else(|| vec![0.0; len], |at| buffers.swap_remove(at))
    }

    fn put(&self, buffer: Vec<f32>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    }
}

impl Ends {
    /// The gradients of a pass over a model of this `layout`, trained by its `adapter` if it has one.
    pub(crate) fn reducing<'a>(
        &self,
        layout: &'a Layout,
        pool: &'a Pool,
        adapter: Option<(&'a Adapter, &'a ThreadPool)>,
    ) -> Reducing<'a> {
        let units = layout.units().map(|_| None).collect();
        let requests = self.requests.clone();
        Reducing { requests, layout, pool, adapter, units, leave: true, first: true }
    }

    /// The layers of passes over a model of this `layout`, of which each rank has only its shards.
    pub(crate) fn gathering<'a>(self, layout: &'a Layout, pool: &'a Pool) -> Gathering<'a> {
        let Self { requests, gathered } = self;
        Gathering { requests, gathered, layout, pool, current: None, ahead: None, backward: false }
    }
}

impl GradientSink for Reducing<'_> {
    fn unit(&mut self, unit: Unit) -> &mut [f32] {
        let (len, pool) = (self.layout.unit(unit).len(), self.pool);
        self.units[number(self.layout, unit)].get_or_insert_with(|| {
            let mut values = pool.take(len);
            values.fill(0.0);
            values
        })
    }

    fn done(&mut self, unit: Unit) {
        if !self.leave {
            return;
        }
        let Some(values) = self.units[number(self.layout, unit)].take() else { return };
        let (unit, values) = match (self.adapter, unit) {
            (None, unit) => (number(self.layout, unit), values),
            (Some((adapter, threads)), Unit::Layer(index)) => {
                let gradients = adapter.gradients_within(&self.layout.unit(unit), &values, threads);
                // In place of the buffer that the communication thread puts into the pool.
                let mut own = self.pool.take(gradients.len());
                own.copy_from_slice(&gradients);
                self.pool.put(values);
                (index, own)
            }
            (Some(_), Unit::Embedding | Unit::Tail) => return self.pool.put(values),
        };
        // If the thread has ended, its error is the one that counts.
        let _ = self.requests.send(Request::Reduce { unit, values, first: self.first });
    }
}

impl Gathering<'_> {
    /// Embedding and tail, for as long as somebody keeps them.
    ///
    /// # Errors
    /// If the communication failed.
    pub(crate) fn ends(&mut self) -> candle_core::Result<[Arc<Vec<f32>>; 2]> {
        let units = [Unit::Embedding, Unit::Tail].map(|unit| number(self.layout, unit));
        units.iter().try_for_each(|unit| self.request(*unit))?;
        Ok([Arc::new(self.receive()?), Arc::new(self.receive()?)])
    }

    fn request(&self, unit: usize) -> candle_core::Result<()> {
        match self.requests.send(Request::Gather { unit }) {
            Ok(()) => Ok(()),
            Err(_) => bail!("weights cannot be gathered any more"),
        }
    }

    fn receive(&self) -> candle_core::Result<Vec<f32>> {
        // Deadline and name: those of the collective that the communication thread waits in.
        match self.gathered.recv() {
            Ok(values) => Ok(values),
            Err(_) => bail!("weights do not come any more"),
        }
    }

    fn release(&mut self) {
        let values = self.current.take().and_then(|(_, values)| Arc::try_unwrap(values).ok());
        values.into_iter().for_each(|values| self.pool.put(values));
    }
}

impl LayerSource for Gathering<'_> {
    fn layer(&mut self, index: usize) -> candle_core::Result<Arc<Vec<f32>>> {
        if self.current.as_ref().is_none_or(|(current, _)| *current != index) {
            self.release();
            if let Some(other) = self.ahead.filter(|ahead| *ahead != index) {
                unreachable!("layer {other} was gathered, layer {index} is asked for");
            }
            if self.ahead.take().is_none() {
                self.request(number(self.layout, Unit::Layer(index)))?;
            }
            self.current = Some((index, Arc::new(self.receive()?)));
        }
        let layers = self.layout.layers().len();
        let next = if self.backward { index.checked_sub(1) } else { Some(index + 1) };
        if let Some(next) = next.filter(|next| *next < layers && self.ahead.is_none()) {
            self.request(number(self.layout, Unit::Layer(next)))?;
            self.ahead = Some(next);
        }
        match &self.current {
            Some((_, values)) => Ok(Arc::clone(values)),
            None => unreachable!("it was put there above"),
        }
    }
}

/// Place of a unit among all of its layout.
pub(crate) fn number(layout: &Layout, unit: Unit) -> usize {
    match unit {
        Unit::Embedding => 0,
        Unit::Layer(index) => index + 1,
        Unit::Tail => layout.layers().len() + 1,
    }
}
