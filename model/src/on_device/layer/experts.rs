//! A layer's experts in a pass over a pack.
//!
//! Invariant: unless ranks divide the experts, nothing waits for the router, and rows that experts share with tokens are read where the
//! tokens have them: there is no copy of the input for every expert of a token.

use device::ops::experts::{
    BiasedResults, ExpertInputs, add_gated, add_slots, bias_gradients, gated_backward, weigh_rows,
    weight_gradients,
};
use device::ops::gated_unit::{UnitKind, gated_unit, gated_unit_backward};
use device::ops::routes::{GivenSlots, RouteMemory, RoutedRows};
use device::ops::rows::column_sums;
use device::ops::vectors::cast;
use device::{Device, DeviceBuffer, Matrix, MatrixMut, Result, Storage, View, ViewMut};

use super::divided_experts::DividedRows;
use super::feed_forward::GatedNetwork;
use super::{DeviceLayer, linear};
use crate::RoutedTokens;
use crate::layer::{ExpertSpec, Operand};
use crate::on_device::experts::DeviceExperts;
use crate::on_device::factors::GradientPlace;

/// Activations of experts for `T` tokens.
#[derive(Debug)]
pub(super) struct ExpertActivations<T: Storage> {
    spec: ExpertSpec,
    tokens: usize,
    routes: RouteMemory,
    /// The rows of own experts, if ranks divide them.
    divided: Option<DividedRows<T>>,
    /// `[rows, 2 m]` gate and up of every row.
    gate_up: DeviceBuffer<T>,
    /// `[T, 2 s]` of the shared network, if there is one.
    shared: Option<DeviceBuffer<T>>,
    /// `[T, 1]` of its gate before the sigmoid, if it has one.
    shared_gate: Option<DeviceBuffer<f32>>,
}

impl<T: Storage> ExpertActivations<T> {
    /// The routes of the tokens.
    fn routes(&self) -> RoutedRows<'_> {
        self.routes.routes(self.spec.router(), self.tokens)
    }

    /// The routes of the rows that own experts compute: those of the tokens, unless ranks divide the experts.
    fn own_routes(&self) -> RoutedRows<'_> {
        self.divided.as_ref().map_or_else(|| self.routes(), DividedRows::routes)
    }
}

/// Tokens of the experts of all layers in a backward, on the device until they are asked for.
#[derive(Debug)]
pub struct RouteCounts {
    /// `[chunks, width]`
    counters: DeviceBuffer<u32>,
    width: usize,
    /// Layer, number of experts and tokens of each chunk.
    chunks: Vec<(usize, usize, usize)>,
}

impl RouteCounts {
    /// Memory for the counters of `chunks` chunks of layers with at most `experts` experts.
    pub(in crate::on_device) fn new(device: &Device, chunks: usize, experts: usize) -> Result<Self> {
        let width = experts + 2;
        Ok(Self { counters: device.uninit(chunks * width)?, width, chunks: Vec::new() })
    }

    /// Adds a chunk of layer `index`.
    pub(super) fn push<T: Storage>(
        &mut self,
        device: &Device,
        index: usize,
        of: &ExpertActivations<T>,
    ) -> Result<()> {
        let counters = of.routes().counters;
        let start = self.chunks.len() * self.width;
        self.chunks.push((index, of.spec.count, of.tokens));
        device.copy(counters, self.counters.view_mut(start..start + counters.len()))
    }

    /// Whether no layer has experts.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// The tokens of each layer, up to the last one with experts. Synchronises if there are any.
    ///
    /// # Errors
    /// If an earlier operation of the device failed.
    pub fn download(&self, device: &Device) -> Result<Vec<RoutedTokens>> {
        let counters = device.download(self.counters.view(0..self.chunks.len() * self.width))?;
        let mut layers = Vec::new();
        for ((index, experts, tokens), of) in self.chunks.iter().zip(counters.chunks_exact(self.width)) {
            layers.resize(layers.len().max(index + 1), RoutedTokens::default());
            let (of_expert, replayed) = of.split_at(*experts);
            layers[*index].merge(&RoutedTokens {
                of_expert: of_expert.iter().map(|tokens| u64::from(*tokens)).collect(),
                tokens: *tokens as u64,
                given: replayed[0].into(),
                changed: replayed[1].into(),
            });
        }
        Ok(layers)
    }
}

/// The network beside the experts.
fn shared_network(spec: &ExpertSpec) -> GatedNetwork {
    let (gate_up, down) = (Operand::SharedGateUp, Operand::SharedDown);
    GatedNetwork { unit: UnitKind::Silu, gate_up, down, width: spec.shared_width }
}

impl<T: Storage> DeviceLayer<'_, T> {
    fn experts(&self, spec: ExpertSpec) -> DeviceExperts<'_, T> {
        DeviceExperts::new(self.decoder, self.index, self.weights, spec)
    }

    /// Forward up to the activations of the tokens `x [T, d]`, those of the pack from `first` on.
    pub(super) fn begin_experts(
        &self,
        spec: ExpertSpec,
        x: View<'_, T>,
        first: usize,
    ) -> Result<ExpertActivations<T>> {
        let (device, experts, tokens) = (self.on(), self.experts(spec), x.len() / self.hidden());
        let router = spec.router();
        let mut routes = RouteMemory::new(device, &[router], tokens)?;
        let given = self.given.map(|GivenSlots { all, slots, first: of_layer }| GivenSlots {
            all: all.slice(first * slots..(first + tokens) * slots),
            slots,
            first: of_layer,
        });
        experts.route(device, x, &mut routes, given, None)?;
        let of_tokens = routes.routes(router, tokens);
        let divided = self.dispatch(&experts, &of_tokens, x)?;
        let (of, inputs) = match &divided {
            Some(rows) => (rows.routes(), rows.inputs()),
            None => (of_tokens, x),
        };
        let mut gate_up = device.uninit(of.slots.len() * 2 * spec.width)?;
        experts.gate_up().apply(device, &of, ExpertInputs::OfTokens(inputs), gate_up.all_mut())?;
        let shared = match spec.shared_width {
            0 => None,
            _ => Some(self.gate_up(&shared_network(&spec), x)?),
        };
        let shared_gate = match spec.shared_gate {
            false => None,
            true => {
                let mut logits = device.uninit(tokens)?;
                experts.logits(device, Operand::SharedGate, x, logits.all_mut())?;
                Some(logits)
            }
        };
        Ok(ExpertActivations { spec, tokens, routes, divided, gate_up, shared, shared_gate })
    }

    /// `[rows, m]` activations of every row.
    fn activated_rows(&self, kept: &ExpertActivations<T>) -> Result<DeviceBuffer<T>> {
        let mut activated = self.on().uninit(kept.gate_up.len() / 2)?;
        let unit = kept.spec.activation.into();
        gated_unit(self.on(), unit, kept.gate_up.all(), kept.spec.width, activated.all_mut())?;
        Ok(activated)
    }

    /// Adds the results to `out [T, d]`.
    pub(super) fn finish_experts(&self, kept: &ExpertActivations<T>, mut out: ViewMut<'_, T>) -> Result<()> {
        let (device, routes, experts) = (self.on(), kept.own_routes(), self.experts(kept.spec));
        let activated = self.activated_rows(kept)?;
        let mut results = device.uninit(routes.slots.len() * self.hidden())?;
        let rows = ExpertInputs::OfRows(activated.all());
        experts.down().apply(device, &routes, rows, results.all_mut())?;
        drop(activated);
        if let Some(rows) = &kept.divided {
            results = self.combine(rows, results.all())?;
        }
        add_slots(device, &kept.routes(), results.all(), true, out.reborrow())?;
        drop(results);
        let Some(gate_up) = &kept.shared else { return Ok(()) };
        let network = shared_network(&kept.spec);
        let activated = self.activated(&network, gate_up.all())?;
        let down = self.matrix(network.down, network.width);
        match &kept.shared_gate {
            None => linear(device, activated.all(), down, out, true),
            Some(gate) => {
                let mut result = device.uninit(out.len())?;
                linear(device, activated.all(), down, result.all_mut(), false)?;
                add_gated(device, result.all(), gate.all(), out)
            }
        }
    }

    /// Backward for the gradient `g [T, d]` of the result: the gradient `[T, d]` of `x`.
    pub(super) fn experts_backward(
        &self,
        x: View<'_, T>,
        mut kept: ExpertActivations<T>,
        g: View<'_, T>,
        gradients: &mut GradientPlace<'_, T>,
    ) -> Result<DeviceBuffer<T>> {
        let device = self.on();
        let experts = &self.experts(kept.spec);
        let divided = kept.divided.take();
        let (mut d_weights, d_rows) = match divided {
            None => self.rows_backward(experts, (&kept.routes(), x), &kept, g, gradients)?,
            Some(mut rows) => {
                let of_tokens = kept.routes();
                let g = self.dispatch_gradient(&mut rows, &of_tokens, g)?;
                let of_rows = (&rows.routes(), rows.inputs());
                let (d_weights, d_rows) = self.rows_backward(experts, of_rows, &kept, g.all(), gradients)?;
                drop(g);
                let d_weights = self.combine_weights(&rows, &of_tokens, d_weights.all())?;
                (d_weights, self.combine(&rows, d_rows.all())?)
            }
        };
        let ExpertActivations { spec, tokens, mut routes, gate_up, shared, shared_gate, .. } = kept;
        drop(gate_up);
        let router = spec.router();
        let mut d_x = device.zeros(x.len())?;
        add_slots(device, &routes.routes(router, tokens), d_rows.all(), false, d_x.all_mut())?;
        drop(d_rows);
        let mut d_gate = None;
        if let Some(gate_up) = shared {
            let network = shared_network(&spec);
            let mut d_result = None;
            if let Some(gate) = shared_gate {
                let (d, of_gate) = self.shared_gate_backward(&network, gate_up.all(), gate.all(), g)?;
                (d_result, d_gate) = (Some(d), Some(of_gate));
            }
            let g = d_result.as_ref().map_or(g, DeviceBuffer::all);
            self.gated_backward(&network, x, gate_up, g, gradients, d_x.all_mut(), true)?;
        }
        // Of these ranks have parts; router and gate are whole on all of them.
        self.decoder.sum_over_ranks(d_x.all_mut())?;
        self.decoder.sum_over_ranks(d_weights.all_mut())?;
        let d_logits = routes.backward(device, router, tokens, d_weights.all())?;
        self.logits_backward(experts, Operand::Router, x, d_logits, d_x.all_mut(), gradients)?;
        if let Some(of_bias) = gradients.vector(&self.ranges()[Operand::RouterBias]) {
            column_sums(device, d_logits, of_bias)?;
        }
        if let Some(mut d_gate) = d_gate {
            self.decoder.sum_over_ranks(d_gate.all_mut())?;
            self.logits_backward(experts, Operand::SharedGate, x, d_gate.all(), d_x.all_mut(), gradients)?;
        }
        Ok(d_x)
    }

    /// Backward of the gate of the shared network for the gradient `g [T, d]` of the gated result: the gradients `[T, d]` of the network's
    /// result, and `[T]` of the gate before the sigmoid.
    fn shared_gate_backward(
        &self,
        network: &GatedNetwork,
        gate_up: View<'_, T>,
        gate: View<'_, f32>,
        g: View<'_, T>,
    ) -> Result<(DeviceBuffer<T>, DeviceBuffer<f32>)> {
        let device = self.on();
        let activated = self.activated(network, gate_up)?;
        let mut result = device.uninit(g.len())?;
        linear(device, activated.all(), self.matrix(network.down, network.width), result.all_mut(), false)?;
        drop(activated);
        let (mut d, mut d_gate) = (device.uninit(g.len())?, device.uninit(gate.len())?);
        gated_backward(device, result.all(), gate, g, d.all_mut(), d_gate.all_mut())?;
        Ok((d, d_gate))
    }

    /// Backward of the experts for the `routes` of their rows with the inputs `x`: the gradients of the weights of slots, and `[rows, d]` of
    /// the inputs of rows.
    fn rows_backward(
        &self,
        experts: &DeviceExperts<'_, T>,
        (routes, x): (&RoutedRows<'_>, View<'_, T>),
        kept: &ExpertActivations<T>,
        g: View<'_, T>,
        gradients: &mut GradientPlace<'_, T>,
    ) -> Result<(DeviceBuffer<f32>, DeviceBuffer<T>)> {
        let (device, hidden) = (self.on(), self.hidden());
        let (spec, rows) = (kept.spec, routes.slots.len());
        let (x, g_of_tokens) = (ExpertInputs::OfTokens(x), ExpertInputs::OfTokens(g));
        let mut activated = self.activated_rows(kept)?;
        let mut d_activated = device.uninit(activated.len())?;
        experts.down().input_gradient(device, routes, g_of_tokens, d_activated.all_mut())?;
        let mut d_weights = device.uninit(rows)?;
        let biased = experts.own_values(Operand::DownBias).map(|bias| BiasedResults { g, bias });
        let (d, a) = (d_activated.all_mut(), activated.all_mut());
        weigh_rows(device, routes, d, a, biased, d_weights.all_mut())?;
        // The weight of a slot is in the activation, so that the gradient of the result is that of the token.
        let weighed = ExpertInputs::OfRows(activated.all());
        gradients.add_formed(device, &experts.own_range(Operand::Down), |of_down| {
            weight_gradients(device, routes, g_of_tokens, weighed, spec.width, of_down)
        })?;
        drop(activated);
        let mut d_gate_up = device.uninit(kept.gate_up.len())?;
        let (gate_up, d) = (kept.gate_up.all(), d_activated.all());
        gated_unit_backward(device, spec.activation.into(), gate_up, spec.width, d, d_gate_up.all_mut())?;
        drop(d_activated);
        let d_rows = ExpertInputs::OfRows(d_gate_up.all());
        gradients.add_formed(device, &experts.own_range(Operand::GateUp), |of_gate_up| {
            weight_gradients(device, routes, d_rows, x, hidden, of_gate_up)
        })?;
        if let Some(of_down) = gradients.vector(&experts.own_range(Operand::DownBias)) {
            bias_gradients(device, routes, g_of_tokens, true, of_down)?;
        }
        if let Some(of_gate_up) = gradients.vector(&experts.own_range(Operand::GateUpBias)) {
            bias_gradients(device, routes, d_rows, false, of_gate_up)?;
        }
        let mut d_inputs = device.uninit(rows * hidden)?;
        experts.gate_up().input_gradient(device, routes, d_rows, d_inputs.all_mut())?;
        Ok((d_weights, d_inputs))
    }

    /// Backward of the product of `x [T, d]` with the matrix of `operand` for the gradient `d_logits [T, out]`. Adds the gradient of `x` to
    /// `d_x [T, d]`.
    fn logits_backward(
        &self,
        experts: &DeviceExperts<'_, T>,
        operand: Operand,
        x: View<'_, T>,
        d_logits: View<'_, f32>,
        d_x: ViewMut<'_, T>,
        gradients: &mut GradientPlace<'_, T>,
    ) -> Result<()> {
        let (device, hidden) = (self.on(), self.hidden());
        let (d_logits, weight) = (self.narrowed(d_logits)?, experts.matrix(operand, hidden));
        gradients.add(device, &self.ranges()[operand], Matrix::new(x, hidden), d_logits.all())?;
        let d_logits = Matrix::new(d_logits.all(), weight.rows());
        device.product(d_logits, weight, MatrixMut::new(d_x, hidden), 1.0, 1.0)
    }

    /// The nearest values of the type of activations.
    fn narrowed(&self, values: View<'_, f32>) -> Result<DeviceBuffer<T>> {
        let mut out = self.on().uninit(values.len())?;
        cast(self.on(), values, out.all_mut())?;
        Ok(out)
    }
}
