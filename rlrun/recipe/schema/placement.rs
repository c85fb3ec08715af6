//! `[placement]`.

use serde::{Deserialize, Serialize};

use super::super::words::{DeviceWord, ModelPlacement, OptimizerHome, PolicyPlacement};

/// `[placement]`: who computes where. In one process sampler and trainer share the cores of the machine; a core that one
/// does not use is the other's.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PlacementSection {
    /// Where sampler and trainer compute: on the processor (`cpu`), on a GPU (`cuda` is `cuda:0`, the first visible one), or
    /// on the emulator of GPUs (`emulated`), which is for tests.
    // resume = changes, worker = run
    pub device: DeviceWord,
    /// Where the trainer computes, if elsewhere, and with it critic and reference: the first of its ranks; rank r takes the
    /// GPU r places further on.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub trainer_device: Option<DeviceWord>,
    /// Of `trainer.world` ranks, where each computes, instead: such as `["cuda:0", "cuda:2"]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub trainer_devices: Option<Vec<DeviceWord>>,
    /// Where the sampler computes, if elsewhere; with `processes` every sampler.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub rollout_device: Option<DeviceWord>,
    /// Of `rollout_workers` samplers that are processes, where each computes, instead: such as `["cuda:1", "cuda:2"]`. Who
    /// joins from elsewhere says it with `rlrun worker rollout --device`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub rollout_devices: Option<Vec<DeviceWord>>,
    /// Of a trainer on a device: where the f32 weights and the state of the optimizer are, and are moved. The host has more
    /// memory and every optimizer, and LoRA; the device has AdamW. verl `optimizer_offload`.
    // resume = changes, worker = run
    pub optimizer: OptimizerHome,
    /// Whether trainer and samplers are processes of their own, started again when they die. What a core is shared by is then
    /// fixed: see `rollout_threads` and `trainer_threads`.
    // resume = changes, worker = run
    pub processes: bool,
    /// Of `processes`: samplers that are started here. Others can join whenever `buffer.listen` lets them; with 0 the run waits
    /// for them; 1 if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub rollout_workers: Option<usize>,
    /// Of `processes`: how often a process may be started again within ten minutes before the run ends; 5 if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub restarts: Option<usize>,
    /// Whether sampler and trainer work at the same time (separated, the default) or take turns (colocated). Colocated, the
    /// sampler drops its weights and its cache when a batch is there, and computes again what is in flight when it goes on,
    /// whatever `rollout.on_update` keeps; the trainer drops its gradients and keeps what `memory_mib` has room for. With
    /// `max_staleness = 0` the results are the same bits. verl `hybrid_engine`, TRL `vllm_mode = "colocate"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub policy: Option<PolicyPlacement>,
    /// Most cores that a sampler uses at a time; all if not given. With `processes` the cores are shared evenly if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub rollout_threads: Option<usize>,
    /// Most cores that the trainer uses at a time; all if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub trainer_threads: Option<usize>,
    /// Where the reference policy scores: on the trainer's cores, taking turns (colocated, the default), or at the same
    /// time as the policy (separated). The results are the same bits.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub reference: Option<ModelPlacement>,
    /// The same for a critic with a network of its own, which also learns at the same time as the policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub critic: Option<ModelPlacement>,
    /// MiB that colocated models may keep in memory together while they wait: reward models, then the reference, and with
    /// `policy = "colocated"` the optimizer of the policy, its weights, and those of a critic of its own. A model that
    /// does not fit is read from its files for every use; what is trained goes to a file in the run directory and comes
    /// back for every step. Without it all stay.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub memory_mib: Option<u64>,
}
