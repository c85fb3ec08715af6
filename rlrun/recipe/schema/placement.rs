//! The section `[placement]`.

use serde::{Deserialize, Serialize};

use super::super::words::{DeviceWord, ModelPlacement, PlaceWord, PolicyPlacement};

/// `[placement]`: devices, processes and cores of each role. In one process sampler and trainer share the cores of the
/// machine; either may use a core that the other leaves idle.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PlacementSection {
    /// Device of sampler and trainer: the processor (`cpu`), a GPU (`cuda` is `cuda:0`, the first visible GPU), or the
    /// emulator of GPUs for tests (`emulated`).
    // resume = changes, worker = run
    pub device: DeviceWord,
    /// Device of the trainer, the critic and the reference. Default: `device`. With several ranks it is the device of rank
    /// 0, and rank r uses the GPU with its number plus r.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub trainer_device: Option<DeviceWord>,
    /// Device of each of the `trainer.world` ranks, instead of `trainer_device`: such as `["cuda:0", "cuda:2"]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub trainer_devices: Option<Vec<DeviceWord>>,
    /// Device of the sampler; with `processes`, of every sampler. Default: `device`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub rollout_device: Option<DeviceWord>,
    /// Device of each of the `rollout_workers` sampler processes, instead of `rollout_device`: such as
    /// `["cuda:1", "cuda:2"]`. A sampler that joins from elsewhere has `rlrun worker rollout --device`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub rollout_devices: Option<Vec<DeviceWord>>,
    /// For a trainer on a device: memory of the master weights and the optimizer state, and place of the update. The host
    /// has more memory and supports every optimizer and LoRA; the device supports AdamW. verl `optimizer_offload`.
    // resume = changes, worker = run
    pub optimizer: PlaceWord,
    /// For a reference on devices: memory of its weights, all of which every rank of the trainer has. With `host` (offloading)
    /// a device has embedding, head and one layer, and only while it scores; every micro-batch that is scored copies all
    /// layers to the device in f32, so `trainer.microbatch_tokens` should be large. verl `ref.fsdp_config.param_offload`,
    /// OpenRLHF `ref_reward_offload`.
    // resume = changes, worker = run
    pub reference_weights: PlaceWord,
    /// Whether trainer and samplers are separate processes, which the controller restarts when they die. Each then has a
    /// fixed number of cores: see `rollout_threads` and `trainer_threads`.
    // resume = changes, worker = run
    pub processes: bool,
    /// For `processes`: number of samplers that the controller starts. Other samplers can join through `buffer.listen`;
    /// with 0 the run waits for them. Default: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub rollout_workers: Option<usize>,
    /// Whether only as many samplers in processes of their own get slots as the trainer needs; the others wait, keep receiving
    /// weights, and take the place of one that is lost. One fewer after steps that left two batches ready, one more when the
    /// trainer waits.
    // resume = changes, worker = ignored
    pub adapt_samplers: bool,
    /// For `processes`: number of restarts of a process within ten minutes before the run ends. Default: 5.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub restarts: Option<usize>,
    /// Whether sampler and trainer run at the same time (separated, the default) or alternate (colocated). A colocated
    /// sampler frees its weights and its KV cache when a batch is complete. When it resumes, it prefills the sequences in
    /// flight again, also with `rollout.on_update = "keep"`. A colocated trainer frees its gradients, and keeps weights and
    /// optimizer state within `memory_mib`. With `max_staleness = 0` both placements give the same bits. verl
    /// `hybrid_engine`, TRL `vllm_mode = "colocate"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub policy: Option<PolicyPlacement>,
    /// Largest number of cores that a sampler uses at a time. Default: all; with `processes`, an even share.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub rollout_threads: Option<usize>,
    /// Largest number of cores that the trainer uses at a time. Default: all; with `processes`, the cores that samplers
    /// leave.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub trainer_threads: Option<usize>,
    /// Whether the reference policy computes log-probabilities in turn with the policy, on the trainer's cores (colocated,
    /// the default), or at the same time (separated). The results are the same bits.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub reference: Option<ModelPlacement>,
    /// The same for a separate critic. A separated critic also trains at the same time as the policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub critic: Option<ModelPlacement>,
    /// Memory limit of idle colocated models together, MiB. Models get memory in this order: reward models, the reference,
    /// and with `policy = "colocated"` the optimizer state of the policy, its weights, and those of a separate critic. A
    /// model that does not fit is read from its files for every use. Trained state that does not fit is written to a file in
    /// the run directory and read back for every step. Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub memory_mib: Option<u64>,
}
