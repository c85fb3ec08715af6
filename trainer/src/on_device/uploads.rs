//! Weights on their way from memory of the host to a device.
//!
//! Invariant: of a network whose layers are copied when they are needed, the device has embedding, tail and one layer.

use std::iter;
use std::ops::Range;

use device::ops::vectors::cast;
use device::{Device, DeviceBuffer, DeviceError, Storage, View, ViewMut};
use model::on_device::DevicePassRanks;
use model::{LayerSource, Layout, Parameters, Unit};

use crate::TrainerError;
use crate::zero::ParameterGathering;

/// Values of one copy to a device that rounds them.
const STAGED: usize = 1 << 22;

/// Gathers layers from the other ranks through the host and copies them to the device.
pub(crate) struct ParameterUpload<'a, T: Storage> {
    device: &'a Device,
    layout: &'a Layout,
    gathering: ParameterGathering<'a>,
    units: UnitBuffers<T>,
    /// The ranks of the pass: an upload waits for the device, and with that for their calls.
    ranks: DevicePassRanks,
}

/// Copies layers of weights that stay on the host to the device.
pub(crate) struct OffloadedParameters<'a, T: Storage> {
    device: &'a Device,
    parameters: &'a Parameters,
    units: UnitBuffers<T>,
}

/// The units of a network that are on the device.
struct UnitBuffers<T: Storage> {
    /// Embedding and tail.
    ends: [DeviceBuffer<T>; 2],
    /// The last layer that was needed.
    layer: DeviceBuffer<T>,
    index: Option<usize>,
}

impl<'a, T: Storage> ParameterUpload<'a, T> {
    /// Uploads layers of `layout` from `gathering`. Embedding and tail stay on the device.
    ///
    /// # Errors
    /// If the all-gather fails, or the device has no memory for them.
    pub(crate) fn new(
        device: &'a Device,
        layout: &'a Layout,
        mut gathering: ParameterGathering<'a>,
    ) -> Result<Self, TrainerError> {
        let [embedding, tail] = gathering.ends()?;
        let units = UnitBuffers::new(&device.labelled("weights"), layout, [&embedding, &tail])?;
        Ok(Self { device, layout, gathering, units, ranks: DevicePassRanks::default() })
    }

    /// Uploads for a pass of `ranks`.
    pub(super) fn among(&mut self, ranks: &DevicePassRanks) {
        self.ranks.clone_from(ranks);
    }

    /// Begins a forward pass, or a `backward` pass.
    pub(super) fn turn(&mut self, backward: bool) {
        self.gathering.backward = backward;
    }

    /// Takes part in the all-gather of a layer that only other ranks need.
    ///
    /// # Errors
    /// If another rank does not make the call.
    pub(super) fn skip(&mut self, index: usize) -> Result<(), TrainerError> {
        Ok(self.gathering.layer(index).map(drop)?)
    }

    pub(super) fn unit(&mut self, unit: Unit) -> device::Result<View<'_, T>> {
        let Unit::Layer(index) = unit else { return Ok(self.units.end(unit)) };
        // Also for the current layer, because this call requests the next one.
        let values = self.gathering.layer(index).map_err(|error| DeviceError::Unavailable {
            device: self.device.name(),
            reason: format!("its rank has no weights of layer {index}: {error}"),
        })?;
        if self.units.index != Some(index) {
            self.ranks.wait()?;
            let parts = own_parts(self.layout, unit, values.len(), &self.ranks);
            self.units.replace(self.device, index, &values, parts)?;
        }
        Ok(self.units.layer.view(0..values.len()))
    }
}

impl<'a, T: Storage> OffloadedParameters<'a, T> {
    /// Copies layers of `parameters`. Embedding and tail stay on the device.
    ///
    /// # Errors
    /// If the device has no memory for them.
    pub(super) fn new(device: &'a Device, parameters: &'a Parameters) -> device::Result<Self> {
        let (layout, values) = (parameters.layout(), parameters.values());
        let ends = [Unit::Embedding, Unit::Tail].map(|unit| &values[layout.unit(unit)]);
        let units = UnitBuffers::new(&device.labelled("frozen weights"), layout, ends)?;
        Ok(Self { device, parameters, units })
    }

    pub(super) fn unit(&mut self, unit: Unit) -> device::Result<View<'_, T>> {
        let Unit::Layer(index) = unit else { return Ok(self.units.end(unit)) };
        let values = &self.parameters.values()[self.parameters.layout().unit(unit)];
        if self.units.index != Some(index) {
            self.units.replace(self.device, index, values, iter::once(0..values.len()))?;
        }
        Ok(self.units.layer.view(0..values.len()))
    }
}

impl<T: Storage> UnitBuffers<T> {
    /// Embedding and tail `ends`, and memory of `device` for the largest layer of `layout`.
    fn new(device: &Device, layout: &Layout, ends: [&[f32]; 2]) -> device::Result<Self> {
        let to_device = |values: &[f32]| -> device::Result<DeviceBuffer<T>> {
            let mut buffer = device.uninit(values.len())?;
            upload(device, values, buffer.all_mut())?;
            Ok(buffer)
        };
        let ends = [to_device(ends[0])?, to_device(ends[1])?];
        let largest = layout.layers().iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        Ok(Self { ends, layer: device.uninit(largest)?, index: None })
    }

    /// The embedding, or the tail.
    fn end(&self, unit: Unit) -> View<'_, T> {
        self.ends[usize::from(unit != Unit::Embedding)].all()
    }

    /// Copies the `parts` of layer `index` that are needed, of its `values`, in place of the layer before.
    fn replace(
        &mut self,
        device: &Device,
        index: usize,
        values: &[f32],
        parts: impl IntoIterator<Item = Range<usize>>,
    ) -> device::Result<()> {
        self.index = None;
        for part in parts {
            upload(device, &values[part.clone()], self.layer.view_mut(part))?;
        }
        self.index = Some(index);
        Ok(())
    }
}

/// The parts that a rank has of a unit of `layout`, among its `len` values or those of its factors: all but the experts of others, which
/// have no factors.
pub(super) fn own_parts(
    layout: &Layout,
    unit: Unit,
    len: usize,
    ranks: &DevicePassRanks,
) -> Vec<Range<usize>> {
    let place = layout.unit(unit);
    let operands = match unit {
        Unit::Layer(index) if ranks.expert.is_some() => layout.expert_operands(index),
        _ => Vec::new(),
    };
    let (mut parts, mut end) = (Vec::new(), 0);
    for operand in operands {
        let start = operand.start - place.start;
        parts.push(end..start);
        let own = ranks.own_experts(operand.len());
        parts.push(start + own.start..start + own.end);
        end = operand.end - place.start;
    }
    parts.push(end..len);
    parts.retain(|part| !part.is_empty());
    parts
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
