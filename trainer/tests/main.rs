//! The learner and the trainer on a tiny random model.

mod checkpoint;
mod context;
#[cfg(feature = "emulator")]
mod device_ranks;
mod elastic;
mod expert;
mod frozen_base;
mod goldens;
mod identities;
mod learner;
mod lora;
#[cfg(feature = "emulator")]
mod on_device;
mod pipeline;
mod recording;
mod router_correction;
mod sharded;
mod shared_buffer;
mod spread;
mod step;
mod tensor;
mod trained_values;

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use model::{Config, Decoder, ModelDirectory, Pack, Parameters, Recompute, Sizes, Target, ThreadPool};
use trainer::algorithm::Algorithm;
use trainer::batch::{Batch, BatchSplit};
use trainer::checkpoint::{CheckpointContents, NetworkState, Retention};
use trainer::loss::Correction;
use trainer::loss_inputs::{Scores, loss_inputs};
use trainer::objective::PolicyObjective;
use trainer::optimizer::{OptimizerConfig, OptimizerKind};
use trainer::report::TokenSums;
use trainer::{Learner, LearnerConfig, LearnerStep, ParallelConfig, TrainerError, TrainerState};
use trajectory::{
    Group, GroupId, PolicyVersion, Prompt, Sample, SampleStreams, Score, StopReason, Task, TaskId,
    Trajectory, Turn, VersionRun,
};

const SPLIT: BatchSplit = BatchSplit { minibatches: 1, max_completion_length: 16 };

const LEARNER: LearnerConfig = LearnerConfig {
    optimizer: OptimizerConfig {
        kind: OptimizerKind::Adamw,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.01,
        momentum: 0.95,
        dion_rank_fraction: 0.5,
    },
    max_grad_norm: 1.0,
    router_correction_rate: 0.0,
    recompute: Recompute::None,
    microbatch_tokens: 64,
    world: 1,
    parallel: ParallelConfig::DATA,
    leaves: 4,
    zero: 1,
    wait: Duration::from_secs(60),
    device: None,
};

/// [`LEARNER`] with 8-bit moments.
fn eight_bit() -> LearnerConfig {
    with_optimizer(OptimizerKind::Adamw8bit)
}

/// [`LEARNER`] with another optimizer kind.
fn with_optimizer(kind: OptimizerKind) -> LearnerConfig {
    LearnerConfig { optimizer: OptimizerConfig { kind, ..LEARNER.optimizer }, ..LEARNER }
}

/// Writes a checkpoint of `learner` and keeps the `keep_last` newest.
fn save(
    checkpoints: &Path,
    directory: &Arc<ModelDirectory>,
    learner: &Learner,
    state: &TrainerState,
    keep_last: usize,
) -> Result<PathBuf, TrainerError> {
    let contents = CheckpointContents {
        policy: NetworkState::of(directory, learner).unwrap(),
        critic: None,
        state,
        island: None,
    };
    trainer::checkpoint::save(checkpoints, &contents, Retention::last(keep_last))
}

/// Small, but embedding and MLP are just large enough for 8-bit moments.
fn config() -> Config {
    let mut config = Config::fresh(&Sizes {
        vocab_size: 128,
        hidden_size: 32,
        intermediate_size: 128,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
        max_position_embeddings: 128,
    });
    config.initializer_range = 0.2;
    config
}

fn learner(settings: LearnerConfig) -> Learner {
    let config = config();
    let parameters = Parameters::random(&config, 5);
    Learner::new(settings, config, parameters, None).unwrap()
}

/// A group with `rewards`. Tokens are derived from its number; behavior log-probabilities are those of the initial
/// model plus `off_policy` nats.
fn group(id: u64, rewards: &[f64], off_policy: f32) -> Arc<Group> {
    let config = config();
    let decoder = Decoder::new(&config, &Parameters::random(&config, 5));
    let trajectory = |(index, reward): (usize, &f64)| {
        let tokens = 5 + (id as usize * 3 + index * 2) % 9;
        let token_ids: Vec<u32> =
            (0..tokens as u32).map(|t| 4 + (t * 17 + id as u32 * 7 + index as u32 * 29) % 90).collect();
        let mut pack = Pack::new();
        pack.push(&token_ids).unwrap();
        let rows: Vec<usize> = (1..tokens - 1).collect();
        let target = |row: &usize| Target { token: token_ids[row + 1], temperature: 1.0, kept: None };
        let targets: Vec<_> = rows.iter().map(target).collect();
        let scored = decoder.score(&pack, &rows, &targets, &ThreadPool::single()).unwrap();
        let behavior = scored.iter().map(|p| (p.logprob + off_policy).min(0.0));
        let sample = Sample::new(SampleStreams {
            loss_mask: (0..tokens).map(|t| t >= 2).collect(),
            behavior_logprobs: [0.0, 0.0].into_iter().chain(behavior).collect(),
            versions: vec![VersionRun { version: PolicyVersion(0), len: tokens as u32 }],
            kept: None,
            experts: None,
            temperature: 1.0,
            token_ids,
        });
        Trajectory {
            index: index as u32,
            sample: sample.unwrap(),
            turns: vec![Turn {
                completion: 2..tokens,
                stop: StopReason::StopToken,
                reward: None,
                prefill: Vec::new(),
            }],
            text: String::new(),
            score: Score { total: Some(*reward), correct: Some(*reward > 0.5), ..Score::default() },
            branches: Vec::new(),
            baseline: false,
            role: None,
        }
    };
    let task = Task {
        id: TaskId(id),
        prompt: Prompt::Text(String::new()),
        answer: None,
        columns: serde_json::Map::new(),
    };
    Arc::new(Group {
        id: GroupId(id),
        task,
        trajectories: rewards.iter().enumerate().map(trajectory).collect(),
    })
}

/// Six groups, two of them with equal rewards. Their scores are computed once.
fn groups() -> Vec<Arc<Group>> {
    static GROUPS: OnceLock<Vec<Arc<Group>>> = OnceLock::new();
    let rewards: [&[f64]; 6] = [
        &[1.0, 0.0, 0.0],
        &[1.0, 1.0, 1.0],
        &[0.0, 1.0, 0.5],
        &[0.0, 0.0, 0.0],
        &[0.2, 0.9, 0.1],
        &[1.0, 0.0, 1.0],
    ];
    let scored = || rewards.iter().enumerate().map(|(id, rewards)| group(id as u64, rewards, 0.0)).collect();
    GROUPS.get_or_init(scored).clone()
}

/// One policy step on `groups` with a loss whose gradient no off-policy distance clips; returns the gradient norm and
/// the statistics.
fn policy_step(learner: &mut Learner, groups: &[Arc<Group>], learning_rate: f32) -> (f32, TokenSums) {
    let correction = Correction::TokenTruncate { cap: 2.0 };
    let algorithm = Algorithm { correction, ..Algorithm::decoupled() };
    let batch = Batch::new(groups, &algorithm, SPLIT, &[]);
    let rows = batch.rows(|group| !batch.groups[group].zero_variance);
    let inputs = loss_inputs(&batch, &rows, Scores::default(), &algorithm, PolicyVersion(0));
    let objective = PolicyObjective {
        algorithm: &algorithm,
        rows: &rows,
        inputs: &inputs,
        log_z: Vec::new(),
        critic: None,
        compares_sampler: true,
        bitwise: None,
        token_log: None,
    };
    let samples: Vec<&Sample> = rows.iter().map(|row| row.sample).collect();
    let LearnerStep { grad_norm, reports } = learner.step(&samples, &objective, learning_rate).unwrap();
    let mut sums = TokenSums::default();
    reports.iter().for_each(|report| sums.merge(report));
    (grad_norm, sums)
}

/// All samples of `groups`, in order.
fn samples(groups: &[Arc<Group>]) -> Vec<&Sample> {
    groups.iter().flat_map(|group| group.trajectories.iter().map(|t| &t.sample)).collect()
}
