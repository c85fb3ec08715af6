//! The feed-forward half of a layer in a step.
//!
//! A step that is recorded finds out on the device which experts its tokens go to. It reads the weights of the experts in use: at most
//! those of `k` experts for each token.

use device::ops::experts::{ExpertInputs, add_gated, add_slots};
use device::ops::gated_unit::{UnitKind, gated_unit};
use device::ops::routes::{Padding, RouteMemory, Router};
use device::{Device, DeviceBuffer, Matrix, Result, Storage, View, ViewMut};

use super::linear::AdapterMemory;
use super::{RowBuffer, StepLayer, StepMemory};
use crate::Config;
use crate::layer::{ExpertSpec, FeedForward, Operand};
use crate::on_device::DeviceDecoder;
use crate::on_device::experts::{DeviceExperts, all_experts};

/// Memory of the networks of all layers, one at a time.
#[derive(Debug)]
pub(super) struct FeedForwardMemory<T: Storage> {
    /// `[T, 2 m]`
    gate_up: RowBuffer<T>,
    /// `[T, m]`
    activated: RowBuffer<T>,
    /// Absent if no layer has experts.
    experts: Option<ExpertMemory<T>>,
    /// Absent if no layer has a gate of a shared network.
    gated: Option<GatedMemory<T>>,
}

/// Memory of a gate of the network beside experts.
#[derive(Debug)]
struct GatedMemory<T: Storage> {
    /// `[T, d]` of the network.
    result: RowBuffer<T>,
    /// `[T, 1]` before the sigmoid.
    gate: RowBuffer<f32>,
}

/// Memory of experts.
#[derive(Debug)]
struct ExpertMemory<T: Storage> {
    routes: RouteMemory,
    /// Experts of the tokens of a step, layer by layer: `[T, k]` each.
    chosen: DeviceBuffer<u32>,
    /// `[T, k, 2 m]`
    gate_up: RowBuffer<T>,
    /// `[T, k, m]`
    activated: RowBuffer<T>,
    /// `[T, k, d]`
    results: RowBuffer<T>,
}

impl<T: Storage> FeedForwardMemory<T> {
    /// Memory for `tokens` tokens.
    pub(super) fn new(device: &Device, config: &Config, tokens: usize) -> Result<Self> {
        let width_of = |layer: &FeedForward| match layer {
            FeedForward::SwiGlu | FeedForward::GeGlu => config.intermediate_size,
            FeedForward::Experts(spec) => spec.shared_width,
        };
        let width = config.layers.iter().map(|layer| width_of(&layer.feed_forward)).max().unwrap_or(0);
        let has_experts = all_experts(config).next().is_some();
        let gated = match all_experts(config).any(|spec| spec.shared_gate) {
            true => {
                let result = RowBuffer::new(device, tokens, config.hidden_size)?;
                Some(GatedMemory { result, gate: RowBuffer::new(device, tokens, 1)? })
            }
            false => None,
        };
        Ok(Self {
            gated,
            gate_up: RowBuffer::new(device, tokens, 2 * width)?,
            activated: RowBuffer::new(device, tokens, width)?,
            experts: has_experts.then(|| ExpertMemory::new(device, config, tokens)).transpose()?,
        })
    }

    /// `[tokens, slots]` the experts of the first `tokens` of the `padded` tokens of a step. Synchronises.
    pub(super) fn routes(
        &self,
        decoder: &DeviceDecoder<T>,
        tokens: usize,
        padded: usize,
    ) -> Result<Vec<u16>> {
        let (config, slots) = (decoder.config(), decoder.config().expert_slots());
        let Some(experts) = &self.experts else { return Ok(Vec::new()) };
        let chosen = decoder.device().download(experts.chosen.view(0..padded * slots))?;
        let (mut routes, mut first) = (vec![0; tokens * slots], 0);
        for ExpertSpec { per_token, .. } in all_experts(config) {
            let of_layer = chosen[padded * first..].chunks_exact(per_token);
            for (row, chosen) in routes.chunks_exact_mut(slots).zip(of_layer) {
                let row = row[first..first + per_token].iter_mut();
                row.zip(chosen).for_each(|(kept, expert)| *kept = *expert as u16);
            }
            first += per_token;
        }
        Ok(routes)
    }
}

impl<T: Storage> ExpertMemory<T> {
    fn new(device: &Device, config: &Config, tokens: usize) -> Result<Self> {
        let routers: Vec<Router> = all_experts(config).map(|spec| spec.router()).collect();
        let most = |of: &dyn Fn(&ExpertSpec) -> usize| all_experts(config).map(|spec| of(&spec)).max();
        let rows = |of: &dyn Fn(&ExpertSpec) -> usize| RowBuffer::new(device, tokens, most(of).unwrap_or(0));
        let hidden = config.hidden_size;
        Ok(Self {
            routes: RouteMemory::new(device, &routers, tokens)?,
            chosen: device.uninit(tokens * config.expert_slots())?,
            gate_up: rows(&|spec| 2 * spec.width * spec.per_token)?,
            activated: rows(&|spec| spec.width * spec.per_token)?,
            results: rows(&|spec| hidden * spec.per_token)?,
        })
    }
}

/// A network that all tokens go through.
struct StepNetwork {
    unit: UnitKind,
    gate_up: Operand,
    down: Operand,
    width: usize,
}

impl<T: Storage> StepLayer<'_, T> {
    /// Adds the result of the network to the stream of `tokens` tokens. Those that write to the cache from `end` on are padding.
    pub(super) fn feed_forward(&self, memory: &mut StepMemory<T>, tokens: usize, end: usize) -> Result<()> {
        let (decoder, ranges) = (self.decoder, self.decoder.layout().ranges(self.index));
        self.normalise(memory, tokens, &ranges[Operand::FeedForwardNorm])?;
        let StepMemory { numbers, normed, feed_forward, x, result, adapters, .. } = memory;
        let normed = normed.of(tokens);
        let network = decoder.config().layers[self.index].feed_forward;
        let compute = |mut out: ViewMut<'_, T>, kept: bool| match (network, &mut feed_forward.experts) {
            (FeedForward::Experts(spec), Some(experts)) => {
                // Slots of the cache come after ids and positions.
                let padding = Padding { slots: numbers.view(2 * tokens..3 * tokens), end };
                let layer = DeviceExperts::new(decoder, self.index, self.weights, spec);
                self.route(&layer, experts, normed, padding)?;
                if !kept {
                    decoder.device().clear(out.reborrow())?;
                }
                self.add_experts(&layer, feed_forward, normed, out, adapters)
            }
            _ => {
                let (gate_up, down) = (Operand::GateUp, Operand::Down);
                let width = decoder.config().intermediate_size;
                let network = StepNetwork { unit: network.unit(), gate_up, down, width };
                self.gated(&network, feed_forward, normed, (out, kept), adapters)
            }
        };
        self.add_result((x, result), tokens, &ranges[Operand::FeedForwardAfterNorm], compute)
    }

    /// Sets `to [T, d]` to the result of a gated network for `normed [T, d]`, or adds it if `to` is kept.
    fn gated(
        &self,
        network: &StepNetwork,
        memory: &mut FeedForwardMemory<T>,
        normed: View<'_, T>,
        to: (ViewMut<'_, T>, bool),
        own: &mut AdapterMemory,
    ) -> Result<()> {
        let StepNetwork { unit, gate_up: first, down, width } = *network;
        let (device, hidden) = (self.decoder.device(), self.decoder.config().hidden_size);
        let tokens = normed.len() / hidden;
        let FeedForwardMemory { gate_up, activated, .. } = memory;
        let to_gates = (gate_up.narrow_mut(tokens, 2 * width), false);
        self.linear(first, Matrix::new(normed, hidden), to_gates, own)?;
        let of_gates = gate_up.narrow(tokens, 2 * width);
        gated_unit(device, unit, of_gates, width, activated.narrow_mut(tokens, width))?;
        self.linear(down, Matrix::new(activated.narrow(tokens, width), width), to, own)
    }

    /// Routes the tokens `normed [T, d]`, and keeps their experts for [`FeedForwardMemory::routes`].
    fn route(
        &self,
        layer: &DeviceExperts<'_, T>,
        memory: &mut ExpertMemory<T>,
        normed: View<'_, T>,
        padding: Padding<'_>,
    ) -> Result<()> {
        let (device, config) = (self.decoder.device(), self.decoder.config());
        let ExpertMemory { routes, chosen, .. } = memory;
        layer.route(device, normed, routes, None, Some(padding))?;
        let tokens = normed.len() / config.hidden_size;
        let experts = routes.routes(layer.spec.router(), tokens).experts;
        let start = tokens * config.slots_before(self.index);
        device.copy(experts, chosen.view_mut(start..start + experts.len()))
    }

    /// Adds the results of the experts of `normed [T, d]`, and of the network beside them, to `out [T, d]`.
    fn add_experts(
        &self,
        layer: &DeviceExperts<'_, T>,
        memory: &mut FeedForwardMemory<T>,
        normed: View<'_, T>,
        mut out: ViewMut<'_, T>,
        own: &mut AdapterMemory,
    ) -> Result<()> {
        let (device, hidden) = (self.decoder.device(), self.decoder.config().hidden_size);
        let (spec, tokens) = (layer.spec, normed.len() / hidden);
        let [inner, outer] = [spec.width * spec.per_token, hidden * spec.per_token];
        if let Some(ExpertMemory { routes, gate_up, activated, results, .. }) = &mut memory.experts {
            let routes = routes.routes(spec.router(), tokens);
            let x = ExpertInputs::OfTokens(normed);
            layer.gate_up().apply(device, &routes, x, gate_up.narrow_mut(tokens, 2 * inner))?;
            let to = gate_up.narrow_mut(tokens, 2 * inner);
            self.adapt(Operand::GateUp, (x, hidden), Some(routes), to, own)?;
            let (gates, units) = (gate_up.narrow(tokens, 2 * inner), activated.narrow_mut(tokens, inner));
            gated_unit(device, spec.activation.into(), gates, spec.width, units)?;
            let rows = ExpertInputs::OfRows(activated.narrow(tokens, inner));
            layer.down().apply(device, &routes, rows, results.narrow_mut(tokens, outer))?;
            let to = results.narrow_mut(tokens, outer);
            self.adapt(Operand::Down, (rows, spec.width), Some(routes), to, own)?;
            add_slots(device, &routes, results.narrow(tokens, outer), true, out.reborrow())?;
        }
        if spec.shared_width == 0 {
            return Ok(());
        }
        let (gate_up, down) = (Operand::SharedGateUp, Operand::SharedDown);
        let network = StepNetwork { unit: UnitKind::Silu, gate_up, down, width: spec.shared_width };
        if !spec.shared_gate {
            return self.gated(&network, memory, normed, (out, true), own);
        }
        // Lent for the call, so that the rest of the memory is free.
        let mut gated = std::mem::take(&mut memory.gated);
        if let Some(GatedMemory { result, gate }) = &mut gated {
            layer.logits(device, Operand::SharedGate, normed, gate.of_mut(tokens))?;
            self.gated(&network, memory, normed, (result.of_mut(tokens), false), own)?;
            add_gated(device, result.of(tokens), gate.of(tokens), out)?;
        }
        memory.gated = gated;
        Ok(())
    }
}
