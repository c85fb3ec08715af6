//! Forward and backward pass on a device, and the download of gradients.
//!
//! Invariant: a pass makes its collective calls in the order of a pass on the processor, so that ranks without a
//! micro-batch make the same calls as the others.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, MutexGuard};

use collective::{Collective, CollectiveError};
use device::{Device, DeviceBuffer, Storage, View, ViewMut};
use model::on_device::{
    DeviceDecoder, DeviceFactors, DeviceLayersTrace, DevicePassRanks, StoredWeights, UnitGradients,
    UnitWeights,
};
use model::{GradientSink, Layout, LowRank, Prediction, RoutedTokens, SampleSlopes, TrainedTargets, Unit};

use super::uploads::{OffloadedParameters, ParameterUpload, own_parts};
use crate::TrainerError;
use crate::lora::Adapter;
use crate::packing::Packed;
use crate::zero::{DeviceGathering, DeviceReduction, number};

/// A network on a device. The trait erases the storage type of the weights.
pub(crate) trait DevicePass {
    /// A forward pass, and a backward pass with the loss derivatives of its predictions. Adds the gradients to `sink`;
    /// without `sink` they stay on the device. Returns the tokens of the experts of each layer, up to the last one that has some.
    fn train(
        &mut self,
        packed: &Packed<'_>,
        slopes: &mut SampleSlopes<'_>,
        sink: Option<&mut dyn GradientSink>,
    ) -> Result<Vec<RoutedTokens>, TrainerError>;

    /// Predictions without activations.
    fn score(&mut self, packed: &Packed<'_>) -> Result<Vec<Prediction>, TrainerError>;

    /// Runs the layers of a stage on micro-batch number `at`, of the residual stream `input [T, d]` before them, or of the embedded tokens.
    /// If it `trains`, what the backward needs is kept. Returns the residual stream after them.
    fn advance(
        &mut self,
        at: usize,
        packed: &Packed<'_>,
        input: Option<&[f32]>,
        trains: bool,
    ) -> Result<Vec<f32>, TrainerError>;

    /// Predictions from the residual stream `x [T, d]` after the last layer of the model.
    fn predict(&mut self, packed: &Packed<'_>, x: &[f32]) -> Result<Vec<Prediction>, TrainerError>;

    /// Forward and backward of the head, with the loss derivatives of its predictions, for the residual stream `x [T, d]`. Returns its
    /// gradient. Gradients of weights go where those of [`Self::train`] go; those of a table that is embedding too, with the next backward
    /// of the layers.
    fn train_head(
        &mut self,
        packed: &Packed<'_>,
        x: &[f32],
        slopes: &mut SampleSlopes<'_>,
        sink: Option<&mut dyn GradientSink>,
    ) -> Result<Vec<f32>, TrainerError>;

    /// Backward of the layers of a stage for the gradient `d [T, d]` of what [`Self::advance`] returned for micro-batch number `at`.
    /// Returns the gradient of its input, and the tokens of experts as [`Self::train`] does.
    fn reverse(
        &mut self,
        at: usize,
        d: &[f32],
        sink: Option<&mut dyn GradientSink>,
    ) -> Result<(Vec<f32>, Vec<RoutedTokens>), TrainerError>;

    /// Values of the residual stream of a micro-batch, `T d`.
    fn stream_len(&self, packed: &Packed<'_>) -> usize;

    /// Takes part in the all-gather of a layer that only other ranks need.
    fn skip_layer(&mut self, index: usize, backward: bool) -> Result<(), TrainerError>;

    /// Number of layers of the network.
    fn layers(&self) -> usize;

    /// Whether ranks divide the experts of the network.
    fn divides_experts(&self) -> bool;
}

/// A pass whose network is stored in `T`.
pub(crate) struct NetworkPass<'a, T: Storage> {
    decoder: &'a DeviceDecoder<T>,
    source: ParameterSource<'a, T>,
    gradients: PassSums<'a>,
    /// What the layers of a stage keep of the micro-batches in flight, by their number.
    in_flight: BTreeMap<usize, DeviceLayersTrace<T>>,
    /// The reduce-scatter of gradients in a device group.
    reducing: Option<DeviceReduction<'a, T>>,
    /// The factors of the adapter that is trained in place of the weights.
    factors: Option<TrainedFactors<T>>,
    /// The ranks that compute it together.
    ranks: DevicePassRanks,
}

/// Gradients that are not reduced yet.
struct PassSums<'a> {
    /// Sums of all gradients, in the layout of the weights or in the order of the factors. `None` if each unit has a buffer until
    /// its gradients are reduced.
    all: Option<&'a mut DeviceBuffer<f32>>,
    /// Gradients of units that are not complete.
    units: Vec<Option<DeviceBuffer<f32>>>,
    /// A reused buffer on the host.
    values: Vec<f32>,
}

/// The factors of an adapter, whose gradients a pass forms.
struct TrainedFactors<T: Storage> {
    low_rank: Arc<LowRank>,
    on_device: DeviceFactors<T>,
}

/// Source of the weights.
pub(crate) enum ParameterSource<'a, T: Storage> {
    /// All weights on the device.
    Whole { weights: View<'a, T>, layout: &'a Layout },
    /// A base that stays quantised, with factors.
    Stored(MutexGuard<'a, StoredWeights<T>>),
    /// Layers are gathered from all ranks through the host when they are needed.
    Gathered(Box<ParameterUpload<'a, T>>),
    /// Layers are copied from memory of the host when they are needed.
    Offloaded(Box<OffloadedParameters<'a, T>>),
    /// Layers are gathered from device to device when they are needed.
    Collected(Box<DeviceGathering<'a, T>>),
}

/// Copies gradients to the host, or reduces them to the devices of their owners.
struct GradientTransfer<'a, 'b, 'c, T: Storage> {
    device: &'a Device,
    layout: &'a Layout,
    gradients: &'a mut PassSums<'c>,
    sink: Option<&'a mut (dyn GradientSink + 'b)>,
    reducing: Option<&'a mut DeviceReduction<'c, T>>,
    factors: Option<&'a LowRank>,
    /// The ranks of the pass.
    ranks: &'a DevicePassRanks,
}

/// What a backward pass works with.
struct BackwardParts<'a, 'b, 'c, T: Storage> {
    decoder: DeviceDecoder<T>,
    source: &'b mut ParameterSource<'a, T>,
    transfer: GradientTransfer<'b, 'c, 'a, T>,
    /// The factors of the adapter that is trained in place of the weights.
    factors: Option<&'b DeviceFactors<T>>,
}

/// Sums the gradients of the key-value heads of layer `index`, of which `ranks` have copies, in those of its unit, `gradients [unit]`.
fn sum_copies(
    ranks: &dyn Collective,
    layout: &Layout,
    index: usize,
    gradients: &mut [f32],
) -> device::Result<()> {
    let start = layout.unit(Unit::Layer(index)).start;
    let places: Vec<_> =
        layout.key_values(index).map(|place| place.start - start..place.end - start).collect();
    let mut sums: Vec<f32> = places.iter().flat_map(|place| &gradients[place.clone()]).copied().collect();
    ranks.all_reduce(&mut sums).map_err(CollectiveError::into_device_error)?;
    let mut rest = &sums[..];
    for place in places {
        let (own, others) = rest.split_at(place.len());
        gradients[place].copy_from_slice(own);
        rest = others;
    }
    Ok(())
}

impl<'a, T: Storage> NetworkPass<'a, T> {
    /// A pass of `decoder` with the weights of `source`.
    pub(crate) fn new(
        decoder: &'a DeviceDecoder<T>,
        source: ParameterSource<'a, T>,
        sums: Option<&'a mut DeviceBuffer<f32>>,
    ) -> Self {
        let units = decoder.layout().units().map(|_| None).collect();
        let gradients = PassSums { all: sums, units, values: Vec::new() };
        let in_flight = BTreeMap::new();
        Self {
            decoder,
            source,
            gradients,
            in_flight,
            reducing: None,
            factors: None,
            ranks: DevicePassRanks::default(),
        }
    }

    /// The pass of one of the `ranks` that compute it together.
    pub(crate) fn among(mut self, ranks: DevicePassRanks) -> Self {
        if let ParameterSource::Gathered(upload) = &mut self.source {
            upload.among(&ranks);
        }
        Self { ranks, ..self }
    }

    /// The pass with the gradients of the factors of `adapter`, if there is one, in place of those of the weights that it is merged
    /// into.
    ///
    /// # Errors
    /// If the device has no memory for the factors.
    pub(crate) fn adapting(self, adapter: Option<&Adapter>) -> device::Result<Self> {
        let factors = adapter.map(|adapter| -> device::Result<TrainedFactors<T>> {
            let low_rank = Arc::clone(adapter.factors());
            Ok(TrainedFactors { on_device: self.decoder.factors(&low_rank)?, low_rank })
        });
        Ok(Self { factors: factors.transpose()?, ..self })
    }

    /// The pass with a reduce-scatter of its gradients to their owners.
    pub(crate) fn reducing(self, reducing: DeviceReduction<'a, T>) -> Self {
        Self { reducing: Some(reducing), ..self }
    }

    /// In a device group, whether the next backward pass reduces its gradients (`complete`), and is the `first` of the step
    /// that does.
    pub(crate) fn reduces(&mut self, complete: bool, first: bool) {
        if let Some(reducing) = &mut self.reducing {
            (reducing.complete, reducing.first) = (complete, first);
        }
    }

    /// Takes part in a forward and a backward pass of other ranks of a device group, with gradients of zero.
    ///
    /// # Errors
    /// If another rank does not make the calls.
    pub(crate) fn skip(&mut self) -> Result<(), TrainerError> {
        let layers = self.layers();
        (0..layers).try_for_each(|index| self.skip_layer(index, false))?;
        self.skip_unit(Unit::Tail)?;
        for index in (0..layers).rev() {
            self.skip_layer(index, true)?;
            self.skip_unit(Unit::Layer(index))?;
        }
        Ok(self.skip_unit(Unit::Embedding)?)
    }

    /// What a backward pass works with, whose gradients go to `sink`, if there is one.
    fn backward_parts<'b, 'c>(
        &'b mut self,
        sink: Option<&'b mut (dyn GradientSink + 'c)>,
    ) -> BackwardParts<'a, 'b, 'c, T> {
        let Self { decoder, source, gradients, reducing, factors, ranks, .. } = self;
        let transfer = GradientTransfer {
            device: decoder.device(),
            layout: decoder.layout(),
            gradients,
            sink,
            reducing: reducing.as_mut(),
            factors: factors.as_ref().map(|factors| &*factors.low_rank),
            ranks,
        };
        let factors = factors.as_ref().map(|factors| &factors.on_device);
        BackwardParts { decoder: decoder.among(ranks.clone()), source, transfer, factors }
    }

    /// Takes part in the reduce-scatter of a unit whose gradients only other ranks have.
    fn skip_unit(&mut self, unit: Unit) -> device::Result<()> {
        let layout = self.decoder.layout();
        let Some(reducing) = self.reducing.as_mut().filter(|reducing| reducing.complete) else {
            return Ok(());
        };
        let sums = self.gradients.all.as_ref().map(|sums| sums.view(layout.unit(unit)));
        reducing.unit(self.decoder.device(), number(layout, unit), sums)
    }
}

impl<T: Storage> DevicePass for NetworkPass<'_, T> {
    fn train(
        &mut self,
        packed: &Packed<'_>,
        slopes: &mut SampleSlopes<'_>,
        sink: Option<&mut dyn GradientSink>,
    ) -> Result<Vec<RoutedTokens>, TrainerError> {
        let Packed { pack, positions, targets, .. } = packed;
        if let Some(reducing) = &self.reducing {
            reducing.sharding.wait("add up gradients")?;
        }
        self.source.turn(false);
        let decoder = self.decoder.among(self.ranks.clone());
        let (predictions, trace) = decoder.forward(&mut self.source, pack, positions, targets)?;
        let slopes = slopes(0..packed.trained.len(), &predictions);
        self.source.turn(true);
        let BackwardParts { decoder, source, mut transfer, factors } = self.backward_parts(sink);
        let counts = decoder.backward(source, trace, &slopes, &mut transfer, factors)?;
        if let Some(reducing) = self.reducing.as_ref().filter(|_| !counts.is_empty()) {
            // A download has no deadline, and another rank may be lost.
            reducing.sharding.wait("add up gradients")?;
        }
        Ok(counts.download(self.decoder.device())?)
    }

    fn score(&mut self, packed: &Packed<'_>) -> Result<Vec<Prediction>, TrainerError> {
        let Packed { pack, positions, targets, .. } = packed;
        self.source.turn(false);
        let decoder = self.decoder.among(self.ranks.clone());
        Ok(decoder.score(&mut self.source, pack, positions, targets)?)
    }

    fn advance(
        &mut self,
        at: usize,
        packed: &Packed<'_>,
        input: Option<&[f32]>,
        trains: bool,
    ) -> Result<Vec<f32>, TrainerError> {
        self.source.turn(false);
        let decoder = self.decoder.among(self.ranks.clone());
        let (x, trace) = decoder.advance(&mut self.source, &packed.pack, input, trains)?;
        if trains {
            self.in_flight.insert(at, trace);
        }
        Ok(x)
    }

    fn predict(&mut self, packed: &Packed<'_>, x: &[f32]) -> Result<Vec<Prediction>, TrainerError> {
        let Packed { positions, targets, .. } = packed;
        let decoder = self.decoder.among(self.ranks.clone());
        Ok(decoder.predict(&mut self.source, &packed.pack, x, positions, targets)?)
    }

    fn train_head(
        &mut self,
        packed: &Packed<'_>,
        x: &[f32],
        slopes: &mut SampleSlopes<'_>,
        sink: Option<&mut dyn GradientSink>,
    ) -> Result<Vec<f32>, TrainerError> {
        let Packed { positions, targets, trained, .. } = packed;
        let trained = TrainedTargets { rows: positions, targets, samples: trained };
        let BackwardParts { decoder, source, mut transfer, .. } = self.backward_parts(sink);
        Ok(decoder.train_head(source, &packed.pack, x, trained, slopes, &mut transfer)?)
    }

    fn reverse(
        &mut self,
        at: usize,
        d: &[f32],
        sink: Option<&mut dyn GradientSink>,
    ) -> Result<(Vec<f32>, Vec<RoutedTokens>), TrainerError> {
        let trace = self.in_flight.remove(&at).ok_or_else(|| TrainerError::no_forward(at))?;
        self.source.turn(true);
        let BackwardParts { decoder, source, mut transfer, .. } = self.backward_parts(sink);
        let (d, counts) = decoder.reverse(source, trace, d, &mut transfer)?;
        Ok((d, counts.download(decoder.device())?))
    }

    fn stream_len(&self, packed: &Packed<'_>) -> usize {
        self.decoder.among(self.ranks.clone()).rows(&packed.pack) * self.decoder.config().hidden_size
    }

    fn skip_layer(&mut self, index: usize, backward: bool) -> Result<(), TrainerError> {
        self.source.turn(backward);
        match &mut self.source {
            ParameterSource::Whole { .. } | ParameterSource::Stored(_) | ParameterSource::Offloaded(_) => {}
            ParameterSource::Gathered(upload) => upload.skip(index)?,
            ParameterSource::Collected(gathering) => gathering.skip(index)?,
        }
        Ok(())
    }

    fn layers(&self) -> usize {
        self.decoder.layout().layers().len()
    }

    fn divides_experts(&self) -> bool {
        self.ranks.expert.is_some()
    }
}

impl<'a, T: Storage> ParameterSource<'a, T> {
    /// All `weights`, in the order of `layout`.
    pub(crate) fn whole(weights: &'a DeviceBuffer<T>, layout: &'a Layout) -> Self {
        Self::Whole { weights: weights.all(), layout }
    }

    fn turn(&mut self, backward: bool) {
        match self {
            Self::Whole { .. } | Self::Stored(_) | Self::Offloaded(_) => {}
            Self::Gathered(upload) => upload.turn(backward),
            Self::Collected(gathering) => gathering.backward = backward,
        }
    }
}

impl<T: Storage> UnitWeights<T> for ParameterSource<'_, T> {
    fn unit(&mut self, unit: Unit) -> device::Result<View<'_, T>> {
        match self {
            Self::Whole { weights, layout } => Ok(weights.slice(layout.unit(unit))),
            Self::Stored(stored) => stored.unit(unit),
            Self::Gathered(upload) => upload.unit(unit),
            Self::Offloaded(upload) => upload.unit(unit),
            Self::Collected(gathering) => gathering.unit(unit),
        }
    }
}

impl<T: Storage> GradientTransfer<'_, '_, '_, T> {
    /// Range of the gradients of a unit among all gradients: empty if no tensor of the unit is trained.
    fn place(&self, unit: Unit) -> Range<usize> {
        let place = self.layout.unit(unit);
        self.factors.map_or(place.clone(), |factors| factors.within(&place))
    }
}

impl<T: Storage> UnitGradients for GradientTransfer<'_, '_, '_, T> {
    fn unit(&mut self, unit: Unit) -> device::Result<ViewMut<'_, f32>> {
        let place = self.place(unit);
        let PassSums { all, units, .. } = &mut *self.gradients;
        if let Some(sums) = all {
            return Ok(sums.view_mut(place));
        }
        let own = &mut units[number(self.layout, unit)];
        let buffer = match own.take() {
            Some(buffer) => buffer,
            None => self.device.labelled("gradients").zeros(place.len())?,
        };
        Ok(own.insert(buffer).all_mut())
    }

    fn done(&mut self, unit: Unit) -> device::Result<()> {
        let reduces = self.reducing.as_ref().is_some_and(|reducing| reducing.complete);
        if self.sink.is_none() && !reduces {
            return Ok(());
        }
        let place = self.place(unit);
        let PassSums { all, units, values } = &mut *self.gradients;
        let own = units[number(self.layout, unit)].take();
        let from = match (all, &own) {
            (Some(sums), _) => Some(sums.view(place)),
            (None, own) => own.as_ref().map(DeviceBuffer::all),
        };
        if let Some(reducing) = &mut self.reducing {
            return reducing.unit(self.device, number(self.layout, unit), from);
        }
        let Some(sink) = &mut self.sink else { return Ok(()) };
        let to = sink.unit(unit);
        // A unit may have no trained factors.
        if let Some(from) = from.filter(|_| !to.is_empty()) {
            values.resize(from.len(), 0.0);
            let parts = own_parts(self.layout, unit, from.len(), self.ranks);
            for part in &parts {
                self.device.download_to(from.slice(part.clone()), &mut values[part.clone()])?;
            }
            if let (Some(ranks), Unit::Layer(index)) = (&self.ranks.same_keys, unit) {
                sum_copies(&**ranks, self.layout, index, values)?;
            }
            for part in parts {
                let own = to[part.clone()].iter_mut().zip(&values[part]);
                own.for_each(|(to, value)| *to += *value);
            }
        }
        sink.done(unit);
        Ok(())
    }
}
