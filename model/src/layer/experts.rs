//! Experts as data: how a router chooses them, what they compute, and the tensors that they are made of.
//!
//! Invariant: as in `layer`: everything else reads these, and knows no family.

pub use device::ops::routes::RouterKind;

use super::{LayerTensor, Operand, Sharding};
use crate::Config;
use crate::file_tensors::{FilePlace, FusedTensor};

/// Experts, and how they are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertSpec {
    /// Number of experts.
    pub count: usize,
    /// Experts of a token.
    pub per_token: usize,
    /// Width of an expert.
    pub width: usize,
    /// How experts are chosen and weighed.
    pub router: RouterKind,
    /// Width of the SwiGLU network that every token goes through besides its experts (DeepSeekMoE, Dai et al. 2024, arXiv
    /// 2401.06066); 0 for none.
    pub shared_width: usize,
    /// Whether the result of that network is multiplied with a sigmoid of the token's own (Qwen2-MoE, Yang et al. 2024, arXiv
    /// 2407.10671).
    pub shared_gate: bool,
    /// Whether the router and the projections of experts have a bias.
    pub bias: bool,
    /// Whether files have each projection of all experts as one tensor `[experts, in, out]`, gate and up in turns.
    pub fused_files: bool,
    /// The activation of experts.
    pub activation: ExpertActivation,
}

/// The activation of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertActivation {
    /// `silu(gate) * up`
    SwiGlu,
    /// SwiGLU with bounded operands.
    Clamped(SwigluClamp),
}

/// The constants of SwiGLU with bounded operands; see `ops::clamped_swiglu`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SwigluClamp {
    /// Factor of the gate in the sigmoid.
    pub alpha: f32,
    /// Bound of every entry of the gate from above, and of `up` on both sides.
    pub limit: f32,
}

/// The Hugging Face name of a router within a layer.
fn module_of(router: RouterKind) -> &'static str {
    match router {
        RouterKind::Softmax { .. } | RouterKind::Sigmoid { .. } => "mlp.gate",
        RouterKind::SoftmaxOfChosen => "mlp.router",
    }
}

/// The end of the name of the tensor that balances the loads of experts: it has no gradient, and no optimizer updates it.
pub(crate) const ROUTER_CORRECTION: &str = "e_score_correction_bias";

/// Appends the tensors of a router and its experts.
pub(super) fn push_tensors(tensors: &mut Vec<LayerTensor>, spec: ExpertSpec, hidden: usize) {
    let ExpertSpec { count, width, router, shared_width, shared_gate, bias, .. } = spec;
    let mut push = |name: String, shape: &[usize], operand, sharding, fused| {
        tensors.push(LayerTensor { name: name.into(), shape: shape.to_vec(), operand, sharding, fused });
    };
    let module = module_of(router);
    push(format!("{module}.weight"), &[count, hidden], Operand::Router, Sharding::Replicated, None);
    if bias {
        push(format!("{module}.bias"), &[count], Operand::RouterBias, Sharding::Replicated, None);
    }
    if let RouterKind::Sigmoid { .. } = router {
        let name = format!("{module}.{ROUTER_CORRECTION}");
        push(name, &[count], Operand::RouterCorrection, Sharding::Replicated, None);
    }
    let gate_up = [("gate_proj", 0), ("up_proj", 1)];
    let each = move || (0..count).flat_map(move |expert| gate_up.map(|(part, turn)| (expert, part, turn)));
    for (expert, part, turn) in each() {
        let name = format!("mlp.experts.{expert}.{part}.weight");
        let start = expert * hidden * 2 * width + turn;
        let place = FilePlace::strided(start, 2, 2 * width);
        let fused = spec.fused("mlp.experts.gate_up_proj", &[count, hidden, 2 * width], place);
        push(name, &[width, hidden], Operand::GateUp, Sharding::Outputs, fused);
    }
    for (expert, part, turn) in each().filter(|_| bias) {
        let name = format!("mlp.experts.{expert}.{part}.bias");
        let place = FilePlace::strided(expert * 2 * width + turn, 2, 1);
        let fused = spec.fused("mlp.experts.gate_up_proj_bias", &[count, 2 * width], place);
        push(name, &[width], Operand::GateUpBias, Sharding::Outputs, fused);
    }
    for expert in 0..count {
        let name = format!("mlp.experts.{expert}.down_proj.weight");
        let place = FilePlace::strided(expert * width * hidden, 1, hidden);
        let fused = spec.fused("mlp.experts.down_proj", &[count, width, hidden], place);
        push(name, &[hidden, width], Operand::Down, Sharding::Inputs, fused);
    }
    for expert in (0..count).filter(|_| bias) {
        let name = format!("mlp.experts.{expert}.down_proj.bias");
        let place = FilePlace::strided(expert * hidden, 1, 1);
        let fused = spec.fused("mlp.experts.down_proj_bias", &[count, hidden], place);
        push(name, &[hidden], Operand::DownBias, Sharding::Replicated, fused);
    }
    if shared_width > 0 {
        let module = if shared_gate { "mlp.shared_expert" } else { "mlp.shared_experts" };
        for (part, _) in gate_up {
            let name = format!("{module}.{part}.weight");
            push(name, &[shared_width, hidden], Operand::SharedGateUp, Sharding::Outputs, None);
        }
        let name = format!("{module}.down_proj.weight");
        push(name, &[hidden, shared_width], Operand::SharedDown, Sharding::Inputs, None);
        if shared_gate {
            let name = "mlp.shared_expert_gate.weight".to_owned();
            push(name, &[1, hidden], Operand::SharedGate, Sharding::Replicated, None);
        }
    }
}

impl Config {
    /// Whether routers add a correction to the scores that choose experts.
    #[must_use]
    pub fn has_router_correction(&self) -> bool {
        self.experts().is_some_and(|experts| matches!(experts.router, RouterKind::Sigmoid { .. }))
    }
}

impl ExpertSpec {
    /// The tensor `name` of files that a projection of all experts is a part of, at `place`; `None` if it is a tensor itself.
    fn fused(&self, name: &'static str, shape: &[usize], place: FilePlace) -> Option<FusedTensor> {
        self.fused_files.then(|| FusedTensor { name, shape: shape.to_vec(), place })
    }
}
