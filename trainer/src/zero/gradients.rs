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
    /// Sections of the tokens of a pass of this rank, a power of two.
    pub(crate) sections: usize,
}

/// Reduction of the gradients of a step, unit by unit.
pub(crate) struct GradientReduction<'a> {
    units: SlotGradients<'a>,
    target: ReductionTarget<'a>,
    sections: PassSections,
    /// Position of the current gradients in the sum.
    pub(crate) slot: Slot,
    /// Whether the slot is complete at the end of the backward pass.
    pub(crate) complete: bool,
}

/// Gradients of the current slot, unit by unit, for each section of a pass.
struct SlotGradients<'a> {
    network: TrainedNetwork<'a>,
    units: Vec<Vec<Option<Vec<f32>>>>,
}

/// The sections of the tokens of a pass, whose gradients are added to one slot as a tree.
struct PassSections {
    count: usize,
    current: usize,
    sums: LocalSums,
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
        let of_section = || network.layout.units().map(|_| None).collect();
        Self { network, units: (0..network.sections).map(|_| of_section()).collect() }
    }

    /// The accumulator of the gradients of a unit of a section, which starts at zero.
    fn get(&mut self, section: usize, unit: Unit) -> &mut [f32] {
        let TrainedNetwork { layout, buffers, .. } = self.network;
        let len = self.range(unit).len();
        self.units[section][number(layout, unit)].get_or_insert_with(|| {
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
    fn new(layout: &Layout) -> Self {
        Self(layout.units().map(|_| Vec::new()).collect())
    }

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
        let written = network.layout.units().map(|_| false).collect();
        Self::new(network, ReductionTarget::Single { sums, written })
    }

    /// The gradients of one of several ranks. If it `accumulates`, it sums its own slots before reduce-scatter.
    pub(super) fn among_ranks(
        network: TrainedNetwork<'a>,
        requests: RequestSender,
        accumulates: bool,
    ) -> Self {
        let local = accumulates.then(|| LocalSums::new(network.layout));
        Self::new(network, ReductionTarget::Ranks { requests, local })
    }

    fn new(network: TrainedNetwork<'a>, target: ReductionTarget<'a>) -> Self {
        let sums = LocalSums::new(network.layout);
        let sections = PassSections { count: network.sections, current: 0, sums };
        Self { units: SlotGradients::new(network), target, sections, slot: Slot::ONLY, complete: true }
    }
}

impl GradientSink for GradientReduction<'_> {
    fn section(&mut self, index: usize) {
        self.sections.current = index;
    }

    fn unit(&mut self, unit: Unit) -> &mut [f32] {
        let Self { units, target, sections, slot, .. } = self;
        let section = sections.current;
        // Sections that are open at the same time cannot share a place.
        if let ReductionTarget::Single { sums, written } = target
            && sections.count == 1
        {
            let number = number(units.network.layout, unit);
            // Two calls, because the borrow of the first would last as long as this one.
            if sums.place(units.range(unit), *slot).is_some() {
                let first = !std::mem::replace(&mut written[number], true);
                let Some(values) = sums.place(units.range(unit), *slot) else {
                    return units.get(section, unit);
                };
                if first {
                    values.fill(0.0);
                }
                return values;
            }
        }
        units.get(section, unit)
    }

    fn done(&mut self, unit: Unit) {
        if !self.complete || self.units.range(unit).is_empty() {
            return;
        }
        // A unit without gradients is zero.
        self.unit(unit);
        let Self { units, target, sections, slot, .. } = self;
        if let ReductionTarget::Single { written, .. } = target
            && std::mem::take(&mut written[number(units.network.layout, unit)])
        {
            return;
        }
        let number = number(units.network.layout, unit);
        let Some(mut values) = units.units[sections.current][number].take() else { return };
        if sections.count > 1 {
            let slot = Slot { round: 0, index: sections.current, count: sections.count };
            let Some(sum) = sections.sums.add(number, values, slot, units.network) else { return };
            values = sum;
        }
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
