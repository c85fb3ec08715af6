//! Forward and backward pass on a device, the upload of weights and the download of gradients.
//!
//! Invariant: a pass makes its collective calls in the order of a pass on the processor, so that ranks without a
//! micro-batch make the same calls as the others.

use device::ops::vectors::cast;
use device::{Device, DeviceBuffer, DeviceError, Storage, View, ViewMut};
use model::on_device::{DeviceDecoder, DeviceTrace, UnitGradients, UnitWeights};
use model::{GradientSink, LayerSource, Layout, Prediction, PredictionGradient, Unit};

use crate::TrainerError;
use crate::packing::Packed;
use crate::zero::{DeviceGathering, DeviceReduction, ParameterGathering, number};

/// Values of one copy to a device that rounds them.
const STAGED: usize = 1 << 22;

/// A network on a device. The trait erases the storage type of the weights.
pub(crate) trait DevicePass {
    /// Predictions. The activations for the backward pass stay on the device.
    fn forward(&mut self, packed: &Packed<'_>) -> Result<Vec<Prediction>, TrainerError>;

    /// Adds the gradients of `slopes * predictions` of the last forward pass to `sink`. Without `sink` they stay on the
    /// device.
    fn backward(
        &mut self,
        packed: &Packed<'_>,
        slopes: &[PredictionGradient],
        sink: Option<&mut dyn GradientSink>,
    ) -> Result<(), TrainerError>;

    /// Predictions without activations.
    fn score(&mut self, packed: &Packed<'_>) -> Result<Vec<Prediction>, TrainerError>;

    /// Takes part in the all-gather of a layer that only other ranks need.
    fn skip_layer(&mut self, index: usize, backward: bool) -> Result<(), TrainerError>;

    /// In a device group, takes part in the reduce-scatter of a unit whose gradients only other ranks have.
    fn skip_unit(&mut self, unit: Unit) -> Result<(), TrainerError>;

    /// In a device group, whether the next backward pass reduces its gradients (`leave`), and is the `first` of the step
    /// that does.
    fn reduces(&mut self, leave: bool, first: bool);

    /// Number of layers of the network.
    fn layers(&self) -> usize;
}

/// A pass whose network is stored in `T`.
pub(crate) struct NetworkPass<'a, T: Storage> {
    device: &'a Device,
    decoder: &'a DeviceDecoder<T>,
    layout: &'a Layout,
    source: ParameterSource<'a, T>,
    /// Sums of all gradients in the layout of the weights. `None` if each unit has a buffer until its gradients are
    /// reduced.
    sums: Option<&'a mut DeviceBuffer<f32>>,
    /// The reduce-scatter of gradients in a device group.
    reducing: Option<DeviceReduction<'a>>,
    /// Activations of the last forward pass.
    trace: Option<DeviceTrace<T>>,
}

/// Source of the weights.
pub(crate) enum ParameterSource<'a, T: Storage> {
    /// All weights on the device.
    Whole(View<'a, T>, &'a Layout),
    /// Layers are gathered from all ranks through the host when they are needed.
    Gathered(Box<ParameterUpload<'a, T>>),
    /// Layers are gathered from device to device when they are needed.
    Collected(Box<DeviceGathering<'a, T>>),
}

/// Gathers layers from the other ranks through the host and copies them to the device.
pub(crate) struct ParameterUpload<'a, T: Storage> {
    device: &'a Device,
    gathering: ParameterGathering<'a>,
    /// Embedding and tail.
    ends: [DeviceBuffer<T>; 2],
    /// The last gathered layer.
    layer: DeviceBuffer<T>,
    index: Option<usize>,
}

/// Copies gradients to the host, or reduces them to the devices of their owners.
struct GradientTransfer<'a, 'b, 'c> {
    device: &'a Device,
    layout: &'a Layout,
    sums: Option<&'a mut DeviceBuffer<f32>>,
    /// Gradients of units that are not complete.
    units: Vec<Option<DeviceBuffer<f32>>>,
    sink: Option<&'a mut (dyn GradientSink + 'b)>,
    reducing: Option<&'a mut DeviceReduction<'c>>,
    /// A reused buffer on the host.
    values: Vec<f32>,
}

/// Writes values from the host, rounded to the type of `to`.
///
/// # Errors
/// If there is no memory for the copy, or the driver fails.
pub(crate) fn upload<T: Storage>(
    device: &Device,
    values: &[f32],
    mut to: ViewMut<'_, T>,
) -> device::Result<()> {
    if !T::NARROW {
        return device.upload_to(bytemuck::cast_slice(values), to);
    }
    let mut staged = device.labelled("weights on the way").uninit::<f32>(values.len().min(STAGED))?;
    for (i, values) in values.chunks(STAGED).enumerate() {
        device.upload_to(values, staged.view_mut(0..values.len()))?;
        let start = i * STAGED;
        cast(device, staged.view(0..values.len()), to.slice_mut(start..start + values.len()))?;
    }
    Ok(())
}

impl<'a, T: Storage> NetworkPass<'a, T> {
    /// A pass of `decoder` with the weights of `source`.
    pub(crate) fn new(
        (device, layout): (&'a Device, &'a Layout),
        decoder: &'a DeviceDecoder<T>,
        source: ParameterSource<'a, T>,
        sums: Option<&'a mut DeviceBuffer<f32>>,
    ) -> Self {
        Self { device, decoder, layout, source, sums, reducing: None, trace: None }
    }

    /// The pass with a reduce-scatter of its gradients to their owners.
    pub(crate) fn reducing(self, reducing: DeviceReduction<'a>) -> Self {
        Self { reducing: Some(reducing), ..self }
    }
}

impl<T: Storage> DevicePass for NetworkPass<'_, T> {
    fn forward(&mut self, packed: &Packed<'_>) -> Result<Vec<Prediction>, TrainerError> {
        let Packed { pack, positions, targets, .. } = packed;
        if let Some(reducing) = &self.reducing {
            reducing.share.wait("add up gradients")?;
        }
        // Frees the activations of a backward pass that failed before the new ones are allocated.
        self.trace = None;
        self.source.turn(false);
        let (predictions, trace) = self.decoder.forward(&mut self.source, pack, positions, targets)?;
        self.trace = Some(trace);
        Ok(predictions)
    }

    fn backward(
        &mut self,
        packed: &Packed<'_>,
        slopes: &[PredictionGradient],
        sink: Option<&mut dyn GradientSink>,
    ) -> Result<(), TrainerError> {
        let Some(trace) = self.trace.take() else { unreachable!("a backward follows a forward") };
        self.source.turn(true);
        let mut handing = GradientTransfer {
            device: self.device,
            layout: self.layout,
            sums: self.sums.as_deref_mut(),
            units: self.layout.units().map(|_| None).collect(),
            sink,
            reducing: self.reducing.as_mut(),
            values: Vec::new(),
        };
        self.decoder.backward(&mut self.source, &packed.pack, trace, slopes, &mut handing)?;
        Ok(())
    }

    fn score(&mut self, packed: &Packed<'_>) -> Result<Vec<Prediction>, TrainerError> {
        let Packed { pack, positions, targets, .. } = packed;
        self.source.turn(false);
        Ok(self.decoder.score(&mut self.source, pack, positions, targets)?)
    }

    fn skip_layer(&mut self, index: usize, backward: bool) -> Result<(), TrainerError> {
        self.source.turn(backward);
        match &mut self.source {
            ParameterSource::Whole(..) => {}
            ParameterSource::Gathered(uploading) => drop(uploading.gathering.layer(index)?),
            ParameterSource::Collected(collecting) => collecting.skip(index)?,
        }
        Ok(())
    }

    fn skip_unit(&mut self, unit: Unit) -> Result<(), TrainerError> {
        let Some(reducing) = self.reducing.as_mut().filter(|reducing| reducing.leave) else { return Ok(()) };
        let sums = self.sums.as_ref().map(|sums| sums.view(self.layout.unit(unit)));
        Ok(reducing.unit(self.device, number(self.layout, unit), sums)?)
    }

    fn reduces(&mut self, leave: bool, first: bool) {
        if let Some(reducing) = &mut self.reducing {
            (reducing.leave, reducing.first) = (leave, first);
        }
    }

    fn layers(&self) -> usize {
        self.layout.layers().len()
    }
}

impl<T: Storage> ParameterSource<'_, T> {
    fn turn(&mut self, backward: bool) {
        match self {
            Self::Whole(..) => {}
            Self::Gathered(uploading) => uploading.gathering.backward = backward,
            Self::Collected(collecting) => collecting.backward = backward,
        }
    }
}

impl<T: Storage> UnitWeights<T> for ParameterSource<'_, T> {
    fn unit(&mut self, unit: Unit) -> device::Result<View<'_, T>> {
        match self {
            Self::Whole(all, layout) => Ok(all.slice(layout.unit(unit))),
            Self::Gathered(uploading) => uploading.unit(unit),
            Self::Collected(collecting) => collecting.unit(unit),
        }
    }
}

impl<'a, T: Storage> ParameterUpload<'a, T> {
    /// Uploads layers of `layout` from `gathering`. Embedding and tail stay on the device.
    ///
    /// # Errors
    /// If the all-gather fails, or the device has no memory for them.
    pub(crate) fn new(
        device: &'a Device,
        layout: &Layout,
        mut gathering: ParameterGathering<'a>,
    ) -> Result<Self, TrainerError> {
        let weights = device.labelled("weights");
        let to_device = |values: &[f32]| -> device::Result<DeviceBuffer<T>> {
            let mut buffer = weights.uninit(values.len())?;
            upload(device, values, buffer.all_mut())?;
            Ok(buffer)
        };
        let [embedding, tail] = gathering.ends()?;
        let ends = [to_device(&embedding)?, to_device(&tail)?];
        let largest = layout.layers().iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        let layer = weights.uninit(largest)?;
        Ok(Self { device, gathering, ends, layer, index: None })
    }

    fn unit(&mut self, unit: Unit) -> device::Result<View<'_, T>> {
        let index = match unit {
            Unit::Embedding => return Ok(self.ends[0].all()),
            Unit::Tail => return Ok(self.ends[1].all()),
            Unit::Layer(index) => index,
        };
        // Also of a layer that is there, because the next one is requested with it.
        let values = self.gathering.layer(index).map_err(|error| DeviceError::Unavailable {
            device: self.device.name(),
            reason: format!("its rank has no weights of layer {index}: {error}"),
        })?;
        if self.index != Some(index) {
            upload(self.device, &values, self.layer.view_mut(0..values.len()))?;
            self.index = Some(index);
        }
        Ok(self.layer.view(0..values.len()))
    }
}

impl UnitGradients for GradientTransfer<'_, '_, '_> {
    fn unit(&mut self, unit: Unit) -> device::Result<ViewMut<'_, f32>> {
        let place = self.layout.unit(unit);
        if let Some(sums) = &mut self.sums {
            return Ok(sums.view_mut(place));
        }
        let own = &mut self.units[number(self.layout, unit)];
        let buffer = match own.take() {
            Some(buffer) => buffer,
            None => self.device.labelled("gradients").zeros(place.len())?,
        };
        Ok(own.insert(buffer).all_mut())
    }

    fn done(&mut self, unit: Unit) -> device::Result<()> {
        let leaves = self.reducing.as_ref().is_some_and(|reducing| reducing.leave);
        if self.sink.is_none() && !leaves {
            return Ok(());
        }
        let own = self.units[number(self.layout, unit)].take();
        let from = match (&self.sums, &own) {
            (Some(sums), _) => Some(sums.view(self.layout.unit(unit))),
            (None, own) => own.as_ref().map(DeviceBuffer::all),
        };
        if let Some(reducing) = &mut self.reducing {
            return reducing.unit(self.device, number(self.layout, unit), from);
        }
        let Some(sink) = &mut self.sink else { return Ok(()) };
        let to = sink.unit(unit);
        if let Some(from) = from {
            self.values.resize(from.len(), 0.0);
            self.device.download_to(from, &mut self.values)?;
            to.iter_mut().zip(&self.values).for_each(|(to, value)| *to += value);
        }
        sink.done(unit);
        Ok(())
    }
}
