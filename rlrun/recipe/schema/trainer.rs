//! `[trainer]`.

use serde::{Deserialize, Serialize};

use super::super::words::*;

/// `[trainer]`: the update.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainerSection {
    /// Training steps of the run; required. TRL `max_steps`, verl `total_training_steps`.
    // resume = changes, worker = run
    pub steps: u64,
    /// What turns gradients into updates; `adamw8bit` keeps the moments in a quarter of the memory. `muon` and `dion`
    /// move the matrices of the decoder's blocks, and AdamW the rest. TRL `optim`.
    // resume = state, worker = run
    pub optimizer: OptimizerKind,
    /// Peak learning rate of all weights. Updates of `muon` are as large as those of AdamW; those of `dion` are
    /// orthonormal times sqrt(rows / columns), for which its paper has 0.01. verl `actor.optim.lr`.
    // resume = changes, worker = run
    pub learning_rate: f64,
    /// How the learning rate goes on after the warm-up. TRL `lr_scheduler_type`.
    // resume = changes, worker = run
    pub schedule: ScheduleShape,
    /// Steps over which the learning rate rises from 0.
    // resume = changes, worker = run
    pub warmup_steps: u64,
    /// Of `schedule = "wsd"`, which needs it: steps at the end over which the learning rate falls to 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub decay_steps: Option<u64>,
    /// Decoupled weight decay. A minibatch without a gradient (all groups have equal rewards) makes no update with any
    /// optimizer: no moments, no decay; the step still makes a version. `optim/updates` counts the updates of a step.
    // resume = changes, worker = run
    pub weight_decay: f64,
    /// Decay of the first moment.
    // resume = changes, worker = run
    pub adam_beta1: f64,
    /// Decay of the second moment.
    // resume = changes, worker = run
    pub adam_beta2: f64,
    /// Added to the root of the second moment.
    // resume = changes, worker = run
    pub adam_eps: f64,
    /// Of `muon` and `dion`: what stays of the momentum.
    // resume = changes, worker = run
    pub momentum: f64,
    /// Of `dion`: rank of the updates as a fraction of the full one. Less takes less time and memory.
    // resume = state, worker = run
    pub dion_rank_fraction: f64,
    /// Largest gradient norm. verl `grad_clip`.
    // resume = changes, worker = run
    pub max_grad_norm: f64,
    /// Optimizer updates that a batch is split into. verl `ppo_mini_batch_size` as a count, AReaL `ppo_n_minibatches`.
    // resume = changes, worker = run
    pub minibatches: usize,
    /// Passes over a batch. TRL `num_iterations`, verl `ppo_epochs`.
    // resume = changes, worker = run
    pub epochs: usize,
    /// Tokens packed into one forward and backward pass. verl `ppo_max_token_len_per_gpu`.
    // resume = changes, worker = run
    pub microbatch_tokens: usize,
    /// What the backward computes again instead of keeping it in memory. TRL `gradient_checkpointing`, verl
    /// `enable_gradient_checkpointing`.
    // resume = changes, worker = run
    pub recompute: Recompute,
    /// Trainer workers that share a step.
    // resume = changes, worker = run
    pub world: usize,
    /// Leaves that the gradients of a step are summed from as a balanced binary tree: a power of two. Trainer workers on the
    /// processor compute whole leaves, so the weights have the same bits for every `trainer.world` that is a power of two
    /// and at most this. A batch is cut into so many micro-batches at least, and one worker keeps log2(leaves) gradient
    /// buffers of 4 bytes per weight (one more if a leaf has several micro-batches), two workers one less each. Workers on
    /// devices have one leaf each.
    // resume = changes, worker = run
    pub leaves: usize,
    /// What these workers are: threads, processes (`rlrun worker trainer`; a run of processes starts them), or what `mpirun`
    /// has started, in a binary built with the feature `mpi`.
    // resume = changes, worker = ignored
    pub ranks: Ranks,
    /// What trainer workers share beside the work: 1 the state of the optimizer, 2 gradients too, 3 weights too. The same
    /// step with less memory for each, for more communication; with LoRA each has all weights in any case. DeepSpeed
    /// `zero_optimization.stage`.
    // resume = changes, worker = run
    pub zero: usize,
    /// Of trainer workers on devices: where they exchange gradients and weights. From device to device (NCCL) each updates what
    /// it owns there, which needs a GPU for each and AdamW; through the host they meet in its memory. `auto` is the first where
    /// that can be.
    // resume = changes, worker = run
    pub collective: CollectiveWord,
}

impl Default for TrainerSection {
    fn default() -> Self {
        Self {
            steps: 0,
            optimizer: OptimizerKind::Adamw,
            learning_rate: 1e-6,
            schedule: ScheduleShape::Constant,
            warmup_steps: 0,
            decay_steps: None,
            weight_decay: 0.0,
            adam_beta1: 0.9,
            adam_beta2: 0.999,
            adam_eps: 1e-8,
            momentum: 0.95,
            dion_rank_fraction: 1.0,
            max_grad_norm: 1.0,
            minibatches: 1,
            epochs: 1,
            microbatch_tokens: 4096,
            recompute: Recompute::None,
            world: 1,
            leaves: 4,
            ranks: Ranks::Threads,
            zero: 1,
            collective: CollectiveWord::Auto,
        }
    }
}
