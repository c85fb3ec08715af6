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
use crate::lora::Adapter;
use crate::plan::Slot;
use crate::shards::Shards;
use crate::tree::{Merge, TreeSums, add};
use collective::{CollectiveError, HostCollective};

/// Requests that wait while one is served.
const WAITING: usize = 1;
/// Units that were gathered and not yet taken: both ends of a model, or the next layer.
const AHEAD: usize = 2;

/// Buffers that are used again, whatever their length.
#[derive(Debug, Default)]
pub(crate) struct Pool(Mutex<Vec<Vec<f32>>>);

/// What the communication thread works on.
pub(crate) struct Line<'a> {
    pub(crate) collective: &'a dyn HostCollective,
    /// How what is trained is shared.
    pub(crate) trained: &'a Shards,
    /// How weights are shared, and those that this rank owns; `None` where every rank has all.
    pub(crate) weights: Option<(&'a Shards, &'a [f32])>,
    pub(crate) pool: &'a Pool,
}

/// What is asked of the communication thread.
enum Request {
    /// To sum the gradients of a unit over all ranks, and to add this rank's shard of them to the tree as `slot`.
    Reduce { unit: usize, values: Vec<f32>, slot: Slot },
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
    units: UnitGradients<'a>,
    to: To<'a>,
    /// Position in the sum of what is computed now.
    pub(crate) slot: Slot,
    /// Whether the slot is complete at the end of the backward.
    pub(crate) complete: bool,
}

/// Gradients of the slot that is being computed, unit by unit.
struct UnitGradients<'a> {
    layout: &'a Layout,
    pool: &'a Pool,
    /// Trained in place of the weights.
    adapter: Option<&'a Adapter>,
    threads: &'a ThreadPool,
    units: Vec<Option<Vec<f32>>>,
}

/// Where gradients of a complete slot go.
enum To<'a> {
    /// To the sum over all ranks. If `local` is some, the slots of this rank are summed first, and one sum leaves.
    Ranks { requests: SyncSender<Request>, local: Option<LocalSums> },
    /// To the sums of a rank without others.
    Own { sums: &'a mut TreeSums, written: Vec<bool> },
}

/// Partial sums of the slots of a rank, by unit; in each the highest first.
struct LocalSums(Vec<Vec<Vec<f32>>>);

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
    own: &mut TreeSums,
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
    own: &mut TreeSums,
    requests: &Receiver<Request>,
    gathered: &SyncSender<Vec<f32>>,
) -> Result<(), CollectiveError> {
    let Line { collective, trained, weights, pool } = line;
    let rank = collective.rank();
    let (mut sums, threads) = (Vec::new(), ThreadPool::single());
    for request in requests {
        match request {
            Request::Reduce { unit, values, slot } => {
                let range = trained.packed(rank, unit);
                if let Some(place) = own.place(range.clone(), slot) {
                    collective.reduce_scatter(&values, trained.cuts(unit), place)?;
                } else {
                    sums.resize(range.len(), 0.0);
                    collective.reduce_scatter(&values, trained.cuts(unit), &mut sums)?;
                    own.add(range, &sums, slot, &threads);
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

/// The network whose gradients are computed.
#[derive(Clone, Copy)]
pub(crate) struct Network<'a> {
    pub(crate) layout: &'a Layout,
    /// Trained in place of the weights.
    pub(crate) adapter: Option<&'a Adapter>,
    pub(crate) pool: &'a Pool,
    pub(crate) threads: &'a ThreadPool,
}

impl Pool {
    /// Gives up all buffers. Returns their bytes.
    pub(crate) fn clear(&self) -> u64 {
        let buffers = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        buffers.iter().map(|buffer| size_of_val(&buffer[..]) as u64).sum()
    }

    /// A buffer of this length with anything in it.
    pub(crate) fn take(&self, len: usize) -> Vec<f32> {
        let mut buffers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = buffers.iter().position(|buffer| buffer.len() == len);
        found.map_or_else(|| vec![0.0; len], |at| buffers.swap_remove(at))
    }

    pub(crate) fn put(&self, buffer: Vec<f32>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    }
}

impl Ends {
    /// The gradients of passes over a model of this `layout`, or of its `adapter`. If the rank `accumulates`, it sums its
    /// own slots before they leave.
    pub(crate) fn reducing<'a>(&self, network: Network<'a>, accumulates: bool) -> Reducing<'a> {
        let units = UnitGradients::new(network);
        let local = accumulates.then(|| LocalSums(vec![Vec::new(); units.units.len()]));
        let to = To::Ranks { requests: self.requests.clone(), local };
        Reducing { units, to, slot: Slot::ONLY, complete: true }
    }

    /// The layers of passes over a model of this `layout`, of which each rank has only its shards.
    pub(crate) fn gathering<'a>(self, layout: &'a Layout, pool: &'a Pool) -> Gathering<'a> {
        let Self { requests, gathered } = self;
        Gathering { requests, gathered, layout, pool, current: None, ahead: None, backward: false }
    }
}

impl<'a> UnitGradients<'a> {
    fn new(Network { layout, pool, adapter, threads }: Network<'a>) -> Self {
        Self { layout, pool, adapter, threads, units: layout.units().map(|_| None).collect() }
    }

    /// Gradients of a unit, to add to; zero at first.
    fn get(&mut self, unit: Unit) -> &mut [f32] {
        let (len, pool) = (self.layout.unit(unit).len(), self.pool);
        self.units[number(self.layout, unit)].get_or_insert_with(|| {
            let mut values = pool.take(len);
            values.fill(0.0);
            values
        })
    }

    /// The gradients of a unit of what is trained, with its number; `None` if nothing of the unit is.
    fn take(&mut self, unit: Unit) -> Option<(usize, Vec<f32>)> {
        self.get(unit);
        let values = self.units[number(self.layout, unit)].take()?;
        match (self.adapter, unit) {
            (None, unit) => Some((number(self.layout, unit), values)),
            (Some(adapter), Unit::Layer(index)) => {
                let gradients = adapter.gradients_within(&self.layout.unit(unit), &values, self.threads);
                self.pool.put(values);
                // Of the pool, because the buffer goes back there.
                let mut own = self.pool.take(gradients.len());
                own.copy_from_slice(&gradients);
                Some((index, own))
            }
            (Some(_), Unit::Embedding | Unit::Tail) => {
                self.pool.put(values);
                None
            }
        }
    }

    /// Where the gradients of a unit of what is trained lie among all.
    fn range(&self, unit: Unit) -> std::ops::Range<usize> {
        let range = self.layout.unit(unit);
        self.adapter.map_or(range.clone(), |adapter| adapter.within(&range))
    }
}

impl LocalSums {
    /// Adds the gradients of a unit of `slot`; the sum of all slots when they are complete.
    fn add(
        &mut self,
        unit: usize,
        mut values: Vec<f32>,
        slot: Slot,
        (pool, threads): (&Pool, &ThreadPool),
    ) -> Option<Vec<f32>> {
        let waiting = &mut self.0[unit];
        let Merge { height, below } = slot.merge();
        for mut sum in waiting.drain(below..below + height).rev() {
            add(&mut sum, &values, threads);
            pool.put(std::mem::replace(&mut values, sum));
        }
        if slot.is_last() {
            return Some(values);
        }
        waiting.push(values);
        None
    }
}

impl<'a> Reducing<'a> {
    /// The gradients of a rank without others, summed in `sums`.
    pub(crate) fn alone(network: Network<'a>, sums: &'a mut TreeSums) -> Self {
        let units = UnitGradients::new(network);
        let written = vec![false; units.units.len()];
        Self { units, to: To::Own { sums, written }, slot: Slot::ONLY, complete: true }
    }
}

impl GradientSink for Reducing<'_> {
    fn unit(&mut self, unit: Unit) -> &mut [f32] {
        let Self { units, to, slot, .. } = self;
        if let To::Own { sums, written } = to
            && units.adapter.is_none()
        {
            let number = number(units.layout, unit);
            // Two calls, because the borrow of the first would last as long as this one.
            if sums.place(units.range(unit), *slot).is_some() {
                let first = !std::mem::replace(&mut written[number], true);
                let Some(values) = sums.place(units.range(unit), *slot) else { return units.get(unit) };
                if first {
                    values.fill(0.0);
                }
                return values;
            }
        }
        units.get(unit)
    }

    fn done(&mut self, unit: Unit) {
        if !self.complete {
            return;
        }
        // Gradients that nothing was added to are zero.
        self.unit(unit);
        let Self { units, to, slot, .. } = self;
        if let To::Own { written, .. } = to
            && std::mem::take(&mut written[number(units.layout, unit)])
        {
            return;
        }
        let Some((number, mut values)) = units.take(unit) else { return };
        match to {
            To::Own { sums, .. } => {
                sums.add(units.range(unit), &values, *slot, units.threads);
                units.pool.put(values);
            }
            To::Ranks { requests, local } => {
                let mut sent = *slot;
                if let Some(local) = local {
                    let Some(sum) = local.add(number, values, *slot, (units.pool, units.threads)) else {
                        return;
                    };
                    (values, sent) = (sum, Slot::ONLY);
                }
                // If the thread has ended, its error is the one that counts.
                let _ = requests.send(Request::Reduce { unit: number, values, slot: sent });
            }
        }
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
