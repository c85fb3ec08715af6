//! The section `[trainer]`.

use model::ContextExchange;
use serde::{Deserialize, Serialize};
use trainer::{ContextParallel, ParallelConfig};

use super::super::words::*;

/// `[trainer]`: the update of the policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainerSection {
    /// Training steps of the run; required. TRL `max_steps`, verl `total_training_steps`.
    // resume = changes, worker = run
    pub steps: u64,
    /// Optimizer. `adamw8bit` stores the moments in a quarter of the memory. `muon` and `dion` update the matrices of the
    /// decoder's blocks, and AdamW updates the rest. TRL `optim`.
    // resume = state, worker = run
    pub optimizer: OptimizerKind,
    /// Peak learning rate of all weights. Updates of `muon` have the scale of AdamW updates. Updates of `dion` are
    /// orthonormal, times sqrt(rows / columns); its paper uses 0.01. verl `actor.optim.lr`.
    // resume = changes, worker = run
    pub learning_rate: f64,
    /// Learning rate after the warm-up. TRL `lr_scheduler_type`.
    // resume = changes, worker = run
    pub schedule: ScheduleShape,
    /// Steps in which the learning rate rises from 0.
    // resume = changes, worker = run
    pub warmup_steps: u64,
    /// For `schedule = "wsd"`, which requires it: steps at the end in which the learning rate falls to 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub decay_steps: Option<u64>,
    /// Decoupled weight decay. A minibatch without a gradient (all groups have equal rewards) is not an optimizer update:
    /// moments and weights stay as they are. The step still creates a policy version. `optim/updates` counts the updates of
    /// a step.
    // resume = changes, worker = run
    pub weight_decay: f64,
    /// Decay of the first moment.
    // resume = changes, worker = run
    pub adam_beta1: f64,
    /// Decay of the second moment.
    // resume = changes, worker = run
    pub adam_beta2: f64,
    /// Number added to the root of the second moment.
    // resume = changes, worker = run
    pub adam_eps: f64,
    /// For `muon` and `dion`: decay of the momentum.
    // resume = changes, worker = run
    pub momentum: f64,
    /// For `dion`: rank of the updates as a fraction of the full rank. A lower rank needs less time and memory.
    // resume = state, worker = run
    pub dion_rank_fraction: f64,
    /// Largest gradient norm; a larger gradient is scaled down to it. verl `grad_clip`.
    // resume = changes, worker = run
    pub max_grad_norm: f64,
    /// For models whose routers have a correction that balances the loads of experts (`glm4_moe`, `glm4_moe_lite`, `deepseek_v3`):
    /// after each update of the policy the correction of an expert rises by this if it had fewer tokens than the mean of its layer
    /// in the update, and falls by it if it had more. DeepSeek-V3 was trained with 0.001. 0 leaves it as it is. Megatron-LM
    /// `moe_router_bias_update_rate`.
    // resume = changes, worker = run
    pub router_correction_rate: f64,
    /// Number of minibatches in a batch, each with one optimizer update. verl `ppo_mini_batch_size` as a count, AReaL
    /// `ppo_n_minibatches`.
    // resume = changes, worker = run
    pub minibatches: usize,
    /// Passes over a batch. TRL `num_iterations`, verl `ppo_epochs`.
    // resume = changes, worker = run
    pub epochs: usize,
    /// Tokens packed into one forward and backward pass. verl `ppo_max_token_len_per_gpu`.
    // resume = changes, worker = run
    pub microbatch_tokens: usize,
    /// Whether steps try smaller micro-batches than `microbatch_tokens`, down to an eighth of it, and train with the fastest. The
    /// size changes the last bits of gradients, so two runs with the same seed differ. For the policy, and for ranks that are threads.
    // resume = changes, worker = run
    pub adapt_microbatch: bool,
    /// Activations that the backward pass recomputes instead of storing them. TRL `gradient_checkpointing`, verl
    /// `enable_gradient_checkpointing`.
    // resume = changes, worker = run
    pub recompute: Recompute,
    /// Number of ranks of the trainer. They divide the data of a step, apart from those that `[trainer.parallel]` has share a pass.
    // resume = changes, worker = run
    pub world: usize,
    /// How ranks share a pass.
    pub parallel: ParallelSection,
    /// Number of leaves of the balanced binary tree that sums the gradients of a step: a power of two. Ranks on the
    /// processor compute whole leaves, so the weights have the same bits for every `trainer.world` that is a power of two
    /// and at most `leaves`. A batch has at least this number of micro-batches. A single rank has log2(leaves) gradient
    /// buffers of 4 bytes per weight, and one more if a leaf has several micro-batches; each of two ranks has one buffer
    /// less. Ranks on devices have one leaf each.
    // resume = changes, worker = run
    pub leaves: usize,
    /// Form of the ranks: threads; processes (`rlrun worker trainer`, which the controller starts with
    /// `placement.processes`); or the processes of `mpirun`, in a binary built with the feature `mpi`.
    // resume = changes, worker = ignored
    pub ranks: Ranks,
    /// ZeRO stage, which says what ranks shard: 1 the optimizer state, 2 gradients too, 3 weights too. A higher stage needs
    /// less memory per rank and more communication, and computes the same step. With LoRA every rank has all weights at any
    /// stage. DeepSpeed
    /// `zero_optimization.stage`.
    // resume = changes, worker = run
    pub zero: usize,
    /// For ranks on devices: transport of gradients and weights between ranks. With `device` (NCCL) every rank updates its
    /// shard on its device, which needs one GPU per rank and AdamW; tensor, context and expert ranks exchange there in passes, and update
    /// weights on the host. With `host` ranks exchange through host memory. `auto` is `device` if its requirements are met, otherwise `host`.
    // resume = changes, worker = run
    pub collective: CollectiveWord,
    /// How training continues when ranks that are processes are lost.
    pub elastic: ElasticSection,
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
            router_correction_rate: 0.0,
            minibatches: 1,
            epochs: 1,
            microbatch_tokens: 4096,
            adapt_microbatch: false,
            recompute: Recompute::None,
            world: 1,
            parallel: ParallelSection::default(),
            leaves: 4,
            ranks: Ranks::Threads,
            zero: 1,
            collective: CollectiveWord::Auto,
            elastic: ElasticSection::default(),
        }
    }
}

/// `[trainer.elastic]`: how a trainer whose ranks are processes continues when some of them are lost, without reading a checkpoint
/// and without a restart of the run. Ranks that join later take part from the next step on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ElasticSection {
    /// Steps between snapshots of the whole state (weights and optimizer, at least 12 bytes per weight) in the memory of the first
    /// rank, to which the others return when one is lost; the steps after the snapshot are repeated from their batches. 0: a loss of a
    /// rank ends the trainer, which its controller starts again from the last checkpoint.
    // resume = changes, worker = ignored
    pub snapshot_every: u64,
    /// Longest wait for ranks in place of those that are lost, seconds. After it training continues with fewer: with the largest power
    /// of two, which keeps the bits of the weights; ranks that are too many wait.
    // resume = changes, worker = ignored
    pub patience_s: f64,
    /// Fewest ranks to continue with. With fewer the run ends.
    // resume = changes, worker = ignored
    pub min_world: usize,
}

impl Default for ElasticSection {
    fn default() -> Self {
        Self { snapshot_every: 0, patience_s: 10.0, min_world: 1 }
    }
}

/// `[trainer.parallel]`: how ranks share the forward and backward passes of the trainer. `trainer.world` is a multiple of the
/// product of the degrees; the ranks beyond it divide the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ParallelSection {
    /// Ranks that share the weights of every matrix (tensor parallel, arXiv 1909.08053): by heads and by the width of the
    /// feed-forward network, the embedding and the head by tokens. A power of two that divides these; key-value heads have copies
    /// where ranks are a multiple of them. Needs `optimizer = "adamw"`, and on the processor `model.reduction = "tree"`, which gives
    /// every degree the same bits. On devices every rank has embedding and head whole. Megatron-LM `tensor_model_parallel_size`.
    // resume = changes, worker = run
    pub tensor: usize,
    /// Ranks that share the tokens of a micro-batch (context parallel): each computes neighbouring sections of the token stream, cut
    /// by cost. Sequences that lie over several ranks exchange what attention needs. A power of two; needs attention in every layer.
    /// prime-rl `cp`, Megatron-LM `context_parallel_size`.
    // resume = changes, worker = run
    pub context: usize,
    /// Sections of a micro-batch, whose gradients are summed as a balanced binary tree: a power of two. The weights have the same
    /// bits for every `context` up to it, with every `trainer.zero`; at least one for each context rank is used. With more than one,
    /// gradients are reduced after every micro-batch. More sections mean smaller products for the gradients of weights, and memory
    /// for the gradients of the largest layer for each section of a rank. On devices a rank has one.
    // resume = changes, worker = run
    pub sections: usize,
    /// What context ranks exchange: the `keys` and values that their queries attend to (Llama 3), or `heads`, so that a rank has some
    /// heads of all tokens (Ulysses), which needs a number of key-value heads that they divide. It changes no bit. Default: what sends
    /// fewer values; on devices `heads`, the only one there. prime-rl `cp_style`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub exchange: Option<ContextExchange>,
    /// Stages that divide the layers (pipeline parallel, 1F1B, arXiv 2006.09503), neighbouring layers of about the same cost each; the
    /// first also has the embedding and the head. Micro-batches pass through them one after the other: with fewer micro-batches than
    /// stages in a rank's part of an update most stages are idle. At most the number of layers; not with LoRA. It changes no bit on
    /// the processor; of a model whose head is its embedding only with `trainer.zero` 2 or 3. Megatron-LM
    /// `pipeline_model_parallel_size`.
    // resume = changes, worker = run
    pub pipeline: usize,
    /// Ranks that divide the experts of every layer (expert parallel), neighbours among those that divide the data and the tokens of a
    /// step, whose number is a multiple of it. Each has neighbouring experts, which compute the tokens of these ranks; rows go to the
    /// ranks of their experts and results come back. Needs `trainer.zero = 3`, no LoRA, and `recompute` none or block. A power of two
    /// changes no bit on the processor. prime-rl `ep`, Megatron-LM `expert_model_parallel_size`.
    // resume = changes, worker = run
    pub expert: usize,
}

impl Default for ParallelSection {
    fn default() -> Self {
        Self { tensor: 1, context: 1, sections: 1, exchange: None, pipeline: 1, expert: 1 }
    }
}

impl ParallelSection {
    /// How ranks divide the work.
    #[must_use]
    pub fn config(self) -> ParallelConfig {
        let context =
            ContextParallel { degree: self.context, sections: self.sections, exchange: self.exchange };
        ParallelConfig { tensor: self.tensor, context, pipeline: self.pipeline, expert: self.expert }
    }
}
