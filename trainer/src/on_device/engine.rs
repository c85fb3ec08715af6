//! The weights of a rank on its device, and the optimizer state if it is there too.
//!
//! A single rank trains all weights. A rank of a device group trains its shards, which are concatenated in the order of its
//! fragments; it computes with all weights, or gathers them layer by layer.
//!
//! Invariant: the weights that are computed with are the rounded form of the master weights, and change with them. If a single
//! rank computes in f32 both are one buffer.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use device::ops::adamw::{AdamwStep, adamw};
use device::ops::vectors::{cast, sum_of_squares};
use device::{Device, DeviceBuffer, Storage, View, bf16};
use model::on_device::{DeviceDecoder, DeviceDtype};
use model::{Config, Layout, ParameterSpec, Parameters, Recompute};
use weights::direct::nccl::PushOwner;
use weights::direct::round::PushPlan;
use weights::{Digest, Hub, WeightsError};

use super::DevicePass;
use super::pass::{NetworkPass, ParameterSource, ParameterUpload, upload};
use crate::TrainerError;
use crate::adamw::AdamwUpdate;
use crate::moments::Moments;
use crate::optimizer::TensorState;
use crate::zero::{DeviceGathering, DeviceReduction, DeviceSharding, Fragment, ParameterGathering};

/// Reason why master weights always exist.
const ROUNDED: &str = "rounded weights that are trained have what they are rounded from beside them";

/// The weights and the optimizer state of a rank on its device. The trait erases the storage type of the weights, f32 or bf16.
pub(crate) trait DeviceRank: fmt::Debug + Send + Sync {
    fn device(&self) -> &Device;

    /// Joins the device group of the ranks. Is called before any weights are loaded.
    fn meet(&mut self, share: DeviceSharding);

    /// Closes the device group. The calls of the other ranks end with an error.
    fn leave(&self);

    /// Copies weights, `[weights]` or the shards of this rank, to the device. With `trained` they are updated there.
    fn load(&mut self, values: &[f32], trained: bool) -> device::Result<()>;

    /// Copies the master weights, `[trained values]`, to the host.
    fn read(&self, values: &mut [f32]) -> device::Result<()>;

    /// Frees the weights.
    fn unload(&mut self);

    fn has_weights(&self) -> bool;

    /// Copies the moments of all tensors, in f32, to the device.
    fn load_moments(&mut self, states: &[TensorState]) -> device::Result<()>;

    /// The moments of each tensor or fragment; `None` if they are on the host.
    fn read_moments(&self) -> device::Result<Option<Vec<TensorState>>>;

    /// Frees the moments.
    fn unload_moments(&mut self);

    /// The sum of the squares of `gradients` of the values that this rank trains.
    fn squares(&self, gradients: View<'_, f32>) -> device::Result<f64>;

    /// Updates the values that this rank trains.
    fn update(&mut self, adam: &AdamwUpdate, gradients: View<'_, f32>) -> device::Result<()>;

    /// Number of values that this rank trains.
    fn trained(&self) -> usize;

    /// A pass with the weights on this device, or gathered from the devices of all ranks. Gradients are accumulated in
    /// `sums`, or in one buffer per unit. The sums over all ranks of the gradients that this rank owns go to `own`.
    fn pass<'a>(
        &'a self,
        sums: Option<&'a mut DeviceBuffer<f32>>,
        own: Option<&'a mut DeviceBuffer<f32>>,
    ) -> device::Result<Box<dyn DevicePass + 'a>>;

    /// A pass with weights that are gathered from all ranks through the host.
    fn gathered<'a>(
        &'a self,
        gathering: ParameterGathering<'a>,
        sums: Option<&'a mut DeviceBuffer<f32>>,
    ) -> Result<Box<dyn DevicePass + 'a>, TrainerError>;

    /// A frozen network. With `keep` it stays on the device until the next frozen network or [`Self::forget`].
    fn frozen(
        &self,
        config: &Config,
        parameters: &Arc<Parameters>,
        keep: bool,
    ) -> device::Result<Arc<dyn FrozenNetwork>>;

    /// Frees the frozen network. Returns its bytes.
    fn forget(&self) -> u64;

    /// The weights of the computation, if all are on the device.
    fn weights(&self) -> Option<LearnerWeights<'_>>;

    /// Sends this rank's shard of the weights, as the owner number `index`, to all samplers of `plan`. Returns the digest of
    /// the shard. `hub` is the hub of the samplers, in the process that has it.
    fn send(&self, plan: &PushPlan, index: usize, hub: Option<&Hub>) -> Result<Digest, WeightsError>;

    /// Memory of the weights and of the moments, bytes.
    fn bytes(&self) -> [u64; 2];
}

/// A frozen network on a device.
pub(crate) trait FrozenNetwork: Send + Sync {
    fn pass(&self) -> Box<dyn DevicePass + '_>;
}

/// All weights of a model on a device, in the order of its layout.
#[derive(Clone, Copy, Debug)]
pub enum LearnerWeights<'a> {
    /// As they are trained.
    F32(View<'a, f32>),
    /// Rounded.
    Bf16(View<'a, bf16>),
}

/// The state of a rank whose weights have the storage type `T`.
struct TypedDeviceRank<T: Storage> {
    device: Device,
    layout: Arc<Layout>,
    recompute: Recompute,
    decoder: DeviceDecoder<T>,
    parameters: Option<DeviceParameters<T>>,
    /// First and second moments.
    moments: Option<[DeviceBuffer<f32>; 2]>,
    /// The trained pieces, in the order of their values.
    pieces: Vec<Piece>,
    share: Option<DeviceSharding>,
    /// The sender of broadcasts to samplers.
    owner: Mutex<Option<PushOwner<T>>>,
    frozen: Mutex<Option<Arc<FrozenOnDevice<T>>>>,
}

/// Weights on the device.
enum DeviceParameters<T: Storage> {
    /// All weights of a single rank. `masters` has the master weights if the weights are their rounded form.
    Alone { weights: DeviceBuffer<T>, masters: Option<DeviceBuffer<f32>> },
    /// All weights, gathered from the shards of all ranks.
    Gathered { weights: DeviceBuffer<T>, own: OwnedShards<T> },
    /// The shards of this rank. A pass gathers a layer when it needs it.
    Sharded(OwnedShards<T>),
}

/// The shards that a rank of a device group owns and trains.
struct OwnedShards<T: Storage> {
    masters: DeviceBuffer<f32>,
    rounded: DeviceBuffer<T>,
}

/// A tensor or a part of one.
#[derive(Clone, Copy, Debug)]
struct Piece {
    tensor: u32,
    /// Whether the tensor has more than one dimension.
    matrix: bool,
    len: usize,
}

/// A frozen network.
struct FrozenOnDevice<T: Storage> {
    device: Device,
    /// The parameters that it was made from, which identify it.
    parameters: Arc<Parameters>,
    decoder: DeviceDecoder<T>,
    weights: DeviceBuffer<T>,
}

/// Opens a device for a network, without weights.
///
/// # Errors
/// If the device is not available.
pub(crate) fn open(
    place: device::device::DeviceLocation,
    dtype: DeviceDtype,
    model: &Config,
    layout: &Arc<Layout>,
    recompute: Recompute,
) -> device::Result<Box<dyn DeviceRank>> {
    let device = Device::open(place)?;
    Ok(match dtype {
        DeviceDtype::F32 => Box::new(TypedDeviceRank::<f32>::new(device, model, layout, recompute)?),
        DeviceDtype::Bf16 => Box::new(TypedDeviceRank::<bf16>::new(device, model, layout, recompute)?),
    })
}

impl<T: Storage> TypedDeviceRank<T> {
    fn new(
        device: Device,
        model: &Config,
        layout: &Arc<Layout>,
        recompute: Recompute,
    ) -> device::Result<Self> {
        let decoder = DeviceDecoder::new(&device, model, layout, recompute)?;
        let whole = layout.specs().iter().enumerate();
        let pieces = whole.map(|(tensor, spec)| Piece::new(tensor, spec, spec.len())).collect();
        Ok(Self {
            device,
            layout: Arc::clone(layout),
            recompute,
            decoder,
            parameters: None,
            moments: None,
            pieces,
            share: None,
            owner: Mutex::default(),
            frozen: Mutex::default(),
        })
    }

    /// Copies the shards of this rank to the device, and gathers the weights of the computation from all ranks.
    fn load_own(&mut self, values: &[f32]) -> device::Result<()> {
        let device = self.device.labelled("weights");
        let masters = device.upload(values)?;
        let mut rounded = device.uninit(values.len())?;
        cast(&self.device, masters.all(), rounded.all_mut())?;
        let own = OwnedShards { masters, rounded };
        self.parameters = Some(if self.share.as_ref().is_some_and(|share| share.weights) {
            DeviceParameters::Sharded(own)
        } else {
            DeviceParameters::Gathered { weights: device.uninit(self.layout.len())?, own }
        });
        self.gather()
    }

    /// Gathers the weights after an update of all ranks.
    fn gather(&mut self) -> device::Result<()> {
        match (&self.share, &mut self.parameters) {
            (Some(share), Some(DeviceParameters::Gathered { weights, own })) => {
                share.gather(own.rounded.all(), weights)
            }
            _ => Ok(()),
        }
    }

    /// The weights; they must be loaded.
    fn parameters(&self) -> &DeviceParameters<T> {
        let Some(parameters) = &self.parameters else {
            unreachable!("weights are loaded before the first pass")
        };
        parameters
    }
}

impl<T: Storage> DeviceParameters<T> {
    /// All weights, if they are on this device.
    fn all(&self) -> Option<&DeviceBuffer<T>> {
        match self {
            Self::Alone { weights, .. } | Self::Gathered { weights, .. } => Some(weights),
            Self::Sharded(_) => None,
        }
    }

    /// The master weights.
    fn trained(&self) -> &DeviceBuffer<f32> {
        match self {
            Self::Alone { masters: Some(masters), .. } => masters,
            Self::Alone { weights, .. } => match (weights as &dyn Any).downcast_ref() {
                Some(weights) => weights,
                None => unreachable!("{ROUNDED}"),
            },
            Self::Gathered { own, .. } | Self::Sharded(own) => &own.masters,
        }
    }

    /// The master weights, and their rounded form, if that is another buffer.
    fn trained_mut(&mut self) -> (&mut DeviceBuffer<f32>, Option<&mut DeviceBuffer<T>>) {
        match self {
            Self::Alone { weights, masters: Some(masters) } => (masters, Some(weights)),
            Self::Alone { weights, masters: None } => match (weights as &mut dyn Any).downcast_mut() {
                Some(weights) => (weights, None),
                None => unreachable!("{ROUNDED}"),
            },
            Self::Gathered { own, .. } | Self::Sharded(own) => (&mut own.masters, Some(&mut own.rounded)),
        }
    }

    fn bytes(&self) -> u64 {
        let own = |own: &OwnedShards<T>| own.masters.bytes() + own.rounded.bytes();
        match self {
            Self::Alone { weights, masters } => {
                weights.bytes() + masters.as_ref().map_or(0, DeviceBuffer::bytes)
            }
            Self::Gathered { weights, own: shard } => weights.bytes() + own(shard),
            Self::Sharded(shard) => own(shard),
        }
    }
}

impl Piece {
    fn new(tensor: usize, spec: &ParameterSpec, len: usize) -> Self {
        Self { tensor: tensor as u32, matrix: spec.shape.len() > 1, len }
    }
}

impl<T: Storage> DeviceRank for TypedDeviceRank<T> {
    fn device(&self) -> &Device {
        &self.device
    }

    fn meet(&mut self, share: DeviceSharding) {
        let specs = self.layout.specs();
        let pieces = share.fragments().iter();
        let piece =
            |fragment: &Fragment| Piece::new(fragment.tensor, &specs[fragment.tensor], fragment.within.len());
        self.pieces = pieces.map(piece).collect();
        self.share = Some(share);
    }

    fn leave(&self) {
        if let Some(share) = &self.share {
            share.leave();
        }
    }

    fn load(&mut self, values: &[f32], trained: bool) -> device::Result<()> {
        if self.share.is_some() {
            return self.load_own(values);
        }
        let device = self.device.labelled("weights");
        let mut weights = match self.parameters.take() {
            Some(DeviceParameters::Alone { weights, .. }) => weights,
            _ => device.uninit(values.len())?,
        };
        upload(&self.device, values, weights.all_mut())?;
        let masters = if trained && T::NARROW { Some(device.upload(values)?) } else { None };
        self.parameters = Some(DeviceParameters::Alone { weights, masters });
        Ok(())
    }

    fn read(&self, values: &mut [f32]) -> device::Result<()> {
        self.device.download_to(self.parameters().trained().all(), values)
    }

    fn unload(&mut self) {
        self.parameters = None;
    }

    fn has_weights(&self) -> bool {
        self.parameters.is_some()
    }

    fn load_moments(&mut self, states: &[TensorState]) -> device::Result<()> {
        let device = self.device.labelled("optimizer");
        let len = self.trained();
        let mut buffers = [device.uninit(len)?, device.uninit(len)?];
        for ((_, place), state) in places(&self.pieces).zip(states) {
            let TensorState::Moments(Moments::Full { first, second }) = state else {
                unreachable!("other optimizers are on the host")
            };
            for (buffer, moments) in buffers.iter_mut().zip([first, second]) {
                device.upload_to(moments, buffer.view_mut(place.clone()))?;
            }
        }
        self.moments = Some(buffers);
        Ok(())
    }

    fn read_moments(&self) -> device::Result<Option<Vec<TensorState>>> {
        let Some([first, second]) = &self.moments else { return Ok(None) };
        let of = |buffer: &DeviceBuffer<f32>, place: Range<usize>| self.device.download(buffer.view(place));
        let state = |(_, place): (Piece, Range<usize>)| {
            let (first, second) = (of(first, place.clone())?, of(second, place)?);
            Ok(TensorState::Moments(Moments::Full { first, second }))
        };
        places(&self.pieces).map(state).collect::<device::Result<_>>().map(Some)
    }

    fn unload_moments(&mut self) {
        self.moments = None;
    }

    fn squares(&self, gradients: View<'_, f32>) -> device::Result<f64> {
        if let Some(share) = &self.share {
            share.wait("add up gradients")?;
        }
        sum_of_squares(&self.device, gradients)
    }

    fn update(&mut self, adam: &AdamwUpdate, gradients: View<'_, f32>) -> device::Result<()> {
        let Self { device, parameters: Some(parameters), moments: Some([first, second]), pieces, .. } = self
        else {
            unreachable!("weights that are trained on the device are there, with their moments")
        };
        let (values, mut rounded) = parameters.trained_mut();
        for (place, step) in steps(adam, pieces) {
            let rounded = rounded.as_mut().map(|rounded| rounded.view_mut(place.clone()));
            let (first, second) = (first.view_mut(place.clone()), second.view_mut(place.clone()));
            let (values, gradients) = (values.view_mut(place.clone()), gradients.slice(place));
            adamw::<T>(device, &step, values, first, second, gradients, rounded)?;
        }
        self.gather()
    }

    fn trained(&self) -> usize {
        self.pieces.iter().map(|piece| piece.len).sum()
    }

    fn pass<'a>(
        &'a self,
        sums: Option<&'a mut DeviceBuffer<f32>>,
        own: Option<&'a mut DeviceBuffer<f32>>,
    ) -> device::Result<Box<dyn DevicePass + 'a>> {
        let source = match (self.parameters(), &self.share) {
            (DeviceParameters::Sharded(own), Some(share)) => {
                let collecting = DeviceGathering::new(&self.device, &self.layout, share, own.rounded.all())?;
                ParameterSource::Collected(Box::new(collecting))
            }
            (DeviceParameters::Sharded(_), None) => unreachable!("a rank with shards is in a device group"),
            (DeviceParameters::Alone { weights, .. } | DeviceParameters::Gathered { weights, .. }, _) => {
                ParameterSource::Whole(weights.all(), &self.layout)
            }
        };
        let pass = NetworkPass::new((&self.device, &self.layout), &self.decoder, source, sums);
        Ok(match (&self.share, own) {
            (Some(share), Some(own)) => {
                Box::new(pass.reducing(DeviceReduction { share, own, leave: true, first: true }))
            }
            _ => Box::new(pass),
        })
    }

    fn gathered<'a>(
        &'a self,
        gathering: ParameterGathering<'a>,
        sums: Option<&'a mut DeviceBuffer<f32>>,
    ) -> Result<Box<dyn DevicePass + 'a>, TrainerError> {
        let source =
            ParameterSource::Gathered(Box::new(ParameterUpload::new(&self.device, &self.layout, gathering)?));
        Ok(Box::new(NetworkPass::new((&self.device, &self.layout), &self.decoder, source, sums)))
    }

    fn frozen(
        &self,
        config: &Config,
        parameters: &Arc<Parameters>,
        keep: bool,
    ) -> device::Result<Arc<dyn FrozenNetwork>> {
        let mut kept = self.frozen.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(frozen) = &*kept
            && Arc::ptr_eq(&frozen.parameters, parameters)
        {
            return Ok(Arc::clone(frozen) as _);
        }
        // Freed before the new weights are allocated.
        *kept = None;
        let mut weights = self.device.labelled("frozen weights").uninit(parameters.layout().len())?;
        upload(&self.device, parameters.values(), weights.all_mut())?;
        let frozen = Arc::new(FrozenOnDevice {
            device: self.device.clone(),
            parameters: Arc::clone(parameters),
            decoder: DeviceDecoder::new(&self.device, config, parameters.layout(), self.recompute)?,
            weights,
        });
        if keep {
            *kept = Some(Arc::clone(&frozen));
        }
        Ok(frozen)
    }

    fn forget(&self) -> u64 {
        let frozen = self.frozen.lock().unwrap_or_else(PoisonError::into_inner).take();
        frozen.map_or(0, |frozen| frozen.weights.bytes())
    }

    fn weights(&self) -> Option<LearnerWeights<'_>> {
        let weights = self.parameters.as_ref()?.all()? as &dyn Any;
        let f32s =
            weights.downcast_ref::<DeviceBuffer<f32>>().map(|weights| LearnerWeights::F32(weights.all()));
        f32s.or_else(|| Some(LearnerWeights::Bf16(weights.downcast_ref::<DeviceBuffer<bf16>>()?.all())))
    }

    fn send(&self, plan: &PushPlan, index: usize, hub: Option<&Hub>) -> Result<Digest, WeightsError> {
        let (cut, what) = (plan.cut(index), "send weights");
        let all = self.parameters.as_ref().and_then(DeviceParameters::all).filter(|all| cut.end <= all.len());
        let Some(weights) = all else {
            let reason =
                format!("{} does not have all weights, of which it is to send {cut:?}", self.device.name());
            return Err(WeightsError::Device { what, reason });
        };
        let mut owner = self.owner.lock().unwrap_or_else(PoisonError::into_inner);
        let owner = owner.get_or_insert_with(|| {
            let owner = PushOwner::new(&self.device, index);
            match hub {
                Some(hub) => owner.watching(hub.clone()),
                None => owner,
            }
        });
        owner.send(plan, weights.view(cut))
    }

    fn bytes(&self) -> [u64; 2] {
        let moments = self.moments.iter().flatten().map(DeviceBuffer::bytes).sum();
        [self.parameters.as_ref().map_or(0, DeviceParameters::bytes), moments]
    }
}

impl<T: Storage> fmt::Debug for TypedDeviceRank<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TypedDeviceRank").field("device", &self.device).finish_non_exhaustive()
    }
}

impl<T: Storage> FrozenNetwork for FrozenOnDevice<T> {
    fn pass(&self) -> Box<dyn DevicePass + '_> {
        let layout = self.parameters.layout();
        let source = ParameterSource::Whole(self.weights.all(), layout);
        Box::new(NetworkPass::new((&self.device, layout), &self.decoder, source, None))
    }
}

/// Pieces with their ranges in the concatenated values.
fn places(pieces: &[Piece]) -> impl Iterator<Item = (Piece, Range<usize>)> + '_ {
    let mut end = 0;
    pieces.iter().map(move |piece| {
        end += piece.len;
        (*piece, end - piece.len..end)
    })
}

/// The updates of neighbouring pieces, as few as there are changes of the numbers between them.
fn steps(adam: &AdamwUpdate, pieces: &[Piece]) -> Vec<(Range<usize>, AdamwStep)> {
    let mut steps: Vec<(Range<usize>, AdamwStep)> = Vec::new();
    for (piece, own) in places(pieces) {
        let factors = adam.of(piece.tensor, piece.matrix);
        let step = AdamwStep {
            gradient: factors.gradient,
            beta1: factors.beta1,
            beta2: factors.beta2,
            eps: factors.eps,
            step_size: factors.step_size,
            second_scale: factors.second_scale,
            keep: factors.keep,
        };
        match steps.last_mut() {
            Some((place, last)) if *last == step => place.end = own.end,
            _ => steps.push((own, step)),
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use model::Sizes;

    use super::*;
    use crate::optimizer::{OptimizerConfig, OptimizerKind};

    #[test]
    fn tensors_that_are_moved_alike_are_moved_together() {
        let layout = Layout::new(&Config::fresh(&Sizes {
            vocab_size: 4,
            hidden_size: 4,
            intermediate_size: 4,
            num_layers: 2,
            num_heads: 2,
            num_kv_heads: 1,
            max_position_embeddings: 8,
        }));
        for weight_decay in [0.0, 0.1] {
            let config =
                OptimizerConfig { weight_decay, ..OptimizerConfig::standard(OptimizerKind::Adamw, 0.95) };
            let adam = AdamwUpdate::new(&config, 3, 0.5, 0.7);
            let whole = layout.specs().iter().enumerate();
            let pieces: Vec<_> = whole.map(|(tensor, spec)| Piece::new(tensor, spec, spec.len())).collect();
            let steps = steps(&adam, &pieces);
            let mut end = 0;
            for (place, step) in &steps {
                assert_eq!(place.start, end);
                end = place.end;
                let inside = layout.specs().iter().filter(|spec| place.contains(&spec.offset));
                let keep =
                    inside.map(|spec| if spec.shape.len() > 1 { 1.0 - 0.5 * weight_decay } else { 1.0 });
                assert!(keep.into_iter().all(|keep| keep == step.keep));
            }
            assert_eq!(end, layout.len());
            assert_eq!(steps.len() == 1, weight_decay == 0.0);
        }
    }
}
