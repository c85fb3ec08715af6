//! Gradients of one step. Reduce-scatter of a unit starts as soon as the backward pass has completed it.

use std::ops::Range;

use model::{GradientSink, Layout, ThreadPool, Unit};

use super::tree::{Merge, TreeSums, add};
use super::{BufferPool, Request, RequestSender, number};
use crate::lora::Adapter;
use crate::plan::Slot;

/// The network whose gradients are computed.
#[derive(Clone, Copy)]
pub(crate) struct TrainedNetwork<'a> {
    pub(crate) layout: &'a Layout,
    /// The adapter that is trained in place of the weights.
    pub(crate) adapter: Option<&'a Adapter>,
    pub(crate) buffers: &'a BufferPool,
    pub(crate) threads: &'a ThreadPool,
}

/// Reduction of the gradients of a step, unit by unit.
pub(crate) struct GradientReduction<'a> {
    units: SlotGradients<'a>,
    target: ReductionTarget<'a>,
    /// Position of the current gradients in the sum.
    pub(crate) slot: Slot,
    /// Whether the slot is complete at the end of the backward pass.
    pub(crate) complete: bool,
}

/// Gradients of the current slot, unit by unit.
struct SlotGradients<'a> {
    network: TrainedNetwork<'a>,
    units: Vec<Option<Vec<f32>>>,
}

/// The sum to which the gradients of a complete slot are added.
enum ReductionTarget<'a> {
    /// The sum over all ranks. With `local` the slots of this rank are summed first, and their sum is sent.
    Ranks { requests: RequestSender, local: Option<LocalSums> },
    /// The sums of a single rank.
    Single { sums: &'a mut TreeSums, written: Vec<bool> },
}

/// Partial sums of the slots of a rank by unit, the highest first.
struct LocalSums(Vec<Vec<Vec<f32>>>);

impl<'a> SlotGradients<'a> {
    fn new(network: TrainedNetwork<'a>) -> Self {
        Self { network, units: network.layout.units().map(|_| None).collect() }
    }

    /// The accumulator of the gradients of a unit, which starts at zero.
    fn get(&mut self, unit: Unit) -> &mut [f32] {
        let TrainedNetwork { layout, buffers, .. } = self.network;
        let len = self.range(unit).len();
        self.units[number(layout, unit)].get_or_insert_with(|| {
            let mut values = buffers.take(len);
            values.fill(0.0);
            values
        })
    }

    /// Range of the gradients of a unit among all gradients: empty if no tensor of the unit is trained.
    fn range(&self, unit: Unit) -> Range<usize> {
        let range = self.network.layout.unit(unit);
        self.network.adapter.map_or(range.clone(), |adapter| adapter.factors().within(&range))
    }
}

impl LocalSums {
    /// Adds the gradients of a unit of `slot`. Returns the sum of all slots when it is complete.
    fn add(
        &mut self,
        unit: usize,
        mut values: Vec<f32>,
        slot: Slot,
        network: TrainedNetwork<'_>,
    ) -> Option<Vec<f32>> {
        let waiting = &mut self.0[unit];
        let Merge { height, below } = slot.merge();
        for mut sum in waiting.drain(below..below + height).rev() {
            add(&mut sum, &values, network.threads);
            network.buffers.put(std::mem::replace(&mut values, sum));
        }
        if slot.is_last() {
            return Some(values);
        }
        waiting.push(values);
        None
    }
}

impl<'a> GradientReduction<'a> {
    /// The gradients of a single rank, summed in `sums`.
    pub(crate) fn single(network: TrainedNetwork<'a>, sums: &'a mut TreeSums) -> Self {
        let units = SlotGradients::new(network);
        let written = vec![false; units.units.len()];
        Self { units, target: ReductionTarget::Single { sums, written }, slot: Slot::ONLY, complete: true }
    }

    /// The gradients of one of several ranks. If it `accumulates`, it sums its own slots before reduce-scatter.
    pub(super) fn among_ranks(
        network: TrainedNetwork<'a>,
        requests: RequestSender,
        accumulates: bool,
    ) -> Self {
        let units = SlotGradients::new(network);
        let local = accumulates.then(|| LocalSums(vec![Vec::new(); units.units.len()]));
        let target = ReductionTarget::Ranks { requests, local };
        Self { units, target, slot: Slot::ONLY, complete: true }
    }
}

impl GradientSink for GradientReduction<'_> {
    fn unit(&mut self, unit: Unit) -> &mut [f32] {
        let Self { units, target, slot, .. } = self;
        if let ReductionTarget::Single { sums, written } = target {
            let number = number(units.network.layout, unit);
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
        if !self.complete || self.units.range(unit).is_empty() {
            return;
        }
        // A unit without gradients is zero.
        self.unit(unit);
        let Self { units, target, slot, .. } = self;
        if let ReductionTarget::Single { written, .. } = target
            && std::mem::take(&mut written[number(units.network.layout, unit)])
        {
            return;
        }
        let number = number(units.network.layout, unit);
        let Some(mut values) = units.units[number].take() else { return };
        match target {
            ReductionTarget::Single { sums, .. } => {
                sums.add(units.range(unit), &values, *slot, units.network.threads);
                units.network.buffers.put(values);
            }
            ReductionTarget::Ranks { requests, local } => {
                let mut sent = *slot;
                if let Some(local) = local {
                    let Some(sum) = local.add(number, values, *slot, units.network) else {
                        return;
                    };
                    (values, sent) = (sum, Slot::ONLY);
                }
                // If the thread has ended, its error is reported.
                let _ = requests.send(Request::Reduce { unit: number, values, slot: sent });
            }
        }
    }
}
