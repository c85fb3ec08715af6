//! Episodes of two turns, from the environment down to a training step: rollout worker, rewards, journal, batch, update.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use buffer::{Buffer, BufferConfig, Consumer, LeaseRequest, Producer};
use environments::Retry;
use model::{Config, ModelDirectory, Recompute, Sampling, Sizes};
use rewards::{Builtin, Criterion, OnError, RewardInput, RewardSet, WeightedReward};
use rollout::scoring::Scorer;
use rollout::tasks::TaskOrder;
use rollout::{
    ChatEncoder, Engine, EngineConfig, EpisodeConfig, EpisodeEnvironment, LocalSampler, OnUpdate, Overlong,
    PromptSet, StopRules, Worker, WorkerConfig,
};
use trainer::algorithm::AlgorithmKind;
use trainer::batch::{Batch, BatchSplit};
use trainer::loss_inputs::{Scores, loss_inputs};
use trainer::objective::PolicyObjective;
use trainer::optimizer::{OptimizerConfig, OptimizerKind};
use trainer::{Learner, LearnerConfig, ParallelConfig};
use trajectory::{Group, PolicyVersion, Prompt, Task, TaskId, Trajectory, Turn};

use crate::support::tiny_sizes;

const WAIT: Duration = Duration::from_secs(60);
const MAX_COMPLETION: usize = 12;
const MAX_TOKENS: usize = 64;
const GROUPS: usize = 6;

const LEARNER: LearnerConfig = LearnerConfig {
    optimizer: OptimizerConfig {
        kind: OptimizerKind::Adamw,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.0,
        momentum: 0.95,
        dion_rank_fraction: 0.5,
    },
    max_grad_norm: 1.0,
    router_correction_rate: 0.0,
    recompute: Recompute::None,
    microbatch_tokens: 256,
    world: 1,
    parallel: ParallelConfig::DATA,
    leaves: 1,
    zero: 1,
    wait: WAIT,
    device: None,
};

/// A fresh model that reads and writes characters.
fn model(root: &std::path::Path) -> Arc<ModelDirectory> {
    let mut config = Config::fresh(&Sizes {
        hidden_size: 32,
        intermediate_size: 48,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
        ..tiny_sizes(MAX_TOKENS)
    });
    config.initializer_range = 0.2;
    Arc::new(ModelDirectory::fresh(&root.join("model"), &config, 3).unwrap())
}

/// Tasks that a random policy sometimes solves: any of their answers is one character.
fn tasks() -> Vec<Task> {
    let task = |id: u64| Task {
        id: TaskId(id),
        prompt: Prompt::Text(format!("{id}=")),
        answer: Some(String::new()),
        columns: serde_json::Map::new(),
    };
    (0..GROUPS as u64).map(task).collect()
}

/// Inputs of the reward: index, turns and tokens after the prompt.
type Seen = Arc<Mutex<Vec<(u32, Vec<Turn>, usize)>>>;

/// A reward of one half for trajectories with an even index. It records its inputs.
fn rewards(seen: &Seen) -> Arc<RewardSet> {
    let seen = Arc::clone(seen);
    let even = move |input: &RewardInput<'_>| {
        seen.lock().unwrap().push((input.index, input.turns.to_vec(), input.completion_ids.len()));
        Ok(0.5 * f64::from((input.index + 1) % 2))
    };
    let even =
        WeightedReward { reward: Box::new(Builtin::new("even", even)), weight: 1.0, on_error: OnError::Fail };
    let criterion = Criterion { reward: "even".to_owned(), threshold: 0.5 };
    Arc::new(RewardSet::new(vec![even]).unwrap().judged_by(Some(criterion)).unwrap())
}

/// Samples a batch of episodes with one retry into a journal, reopens the journal, and leases the batch.
fn batch_of_episodes(
    root: &std::path::Path,
    directory: &Arc<ModelDirectory>,
    seen: &Seen,
) -> Vec<Arc<Group>> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build().unwrap();
    let journal = root.join("buffer.redb");
    let open = || Arc::new(Buffer::open(&journal, BufferConfig::new(GROUPS, 0)).unwrap());
    let buffer = open();
    let config = EngineConfig {
        max_running: 8,
        prefill_chunk: 16,
        kv_cache_tokens: None,
        max_prompt_length: MAX_TOKENS,
        max_completion_length: MAX_COMPLETION,
        max_episode_length: MAX_TOKENS,
        max_samples: 4,
        seed: 5,
    };
    let stop = StopRules {
        token_ids: directory.stop_token_ids().to_vec(),
        strings: ["a", "e", "i", "o", "u", "n", "r", "s", "t", "0", "1", "2"].map(str::to_owned).to_vec(),
        tokenizer: directory.tokenizer().clone(),
    };
    let decoder = model::Decoder::new(directory.config(), &directory.load_parameters().unwrap());
    let engine = Engine::new(config, stop, decoder, PolicyVersion(0)).unwrap();
    let prompts = PromptSet::new(tasks(), directory, 16, Overlong::Error, TaskOrder::File).unwrap();
    let producer: Arc<dyn Producer> = Arc::clone(&buffer) as Arc<dyn Producer>;
    let scorer = Scorer::start(runtime.handle(), rewards(seen), producer, None, 16);
    let config = WorkerConfig {
        group_size: 4,
        greedy_baseline: false,
        sampling: Sampling::PLAIN,
        max_completion_length: MAX_COMPLETION,
        on_update: OnUpdate::Keep,
        wait: WAIT,
        holder: None,
    };
    let encoder = Arc::new(ChatEncoder::new(Arc::clone(directory)));
    let environment = EpisodeEnvironment::new(Arc::new(Retry::attempts(2, " again: ")), Some(encoder));
    let episodes = EpisodeConfig::of(environment, MAX_TOKENS);
    let sampler = Box::new(LocalSampler::fixed(engine));
    let worker = Worker::new(config, sampler, Arc::new(prompts), scorer).acting_in(episodes);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let working = scope.spawn(|| worker.run(&*buffer, &stop));
        let lease = buffer.lease(&LeaseRequest::step("trainer", PolicyVersion(0)), WAIT);
        stop.store(true, Ordering::Relaxed);
        working.join().unwrap().unwrap();
        lease.unwrap();
    });
    Arc::into_inner(buffer).expect("the rollout worker has ended");
    open().lease(&LeaseRequest::step("trainer", PolicyVersion(0)), WAIT).unwrap().groups
}

#[test]
fn rewards_of_turns_reach_the_gradient() {
    let root = tempfile::tempdir().unwrap();
    let directory = model(root.path());
    let seen = Seen::default();
    let groups = batch_of_episodes(root.path(), &directory, &seen);
    let all: Vec<&Trajectory> = groups.iter().flat_map(|group| &group.trajectories).collect();
    assert_eq!((groups.len(), all.len()), (GROUPS, 24));
    let two_turns = all.iter().filter(|trajectory| trajectory.turns.len() == 2).count();
    let right = |turn: &Turn| turn.reward == Some(1.0);
    let solved = all.iter().filter(|trajectory| trajectory.turns.iter().any(right)).count();
    assert!(two_turns > 4 && solved > 2, "{two_turns} of 24 have two turns, {solved} are solved");
    for trajectory in &all {
        let turns: f64 = trajectory.turns.iter().filter_map(|turn| turn.reward).sum();
        let total = 0.5 * f64::from((trajectory.index + 1) % 2);
        assert_eq!((trajectory.score.total, trajectory.reward()), (Some(total), Some(total + turns)));
        let as_seen = seen.lock().unwrap().iter().any(|(index, turns, completion)| {
            let last = trajectory.turns.last().map(|turn| turn.completion.end);
            *index == trajectory.index
                && *turns == trajectory.turns
                && last == Some(trajectory.sample.token_ids().len())
                && turns[0].completion.start + completion == trajectory.sample.token_ids().len()
        });
        assert!(as_seen, "the reward saw {:?}", trajectory.turns);
    }

    // Process supervision: the tokens of the first turn are credited with both turns, those of the second with its own.
    let algorithm = AlgorithmKind::Process.algorithm();
    let split = BatchSplit { minibatches: 1, max_completion_length: MAX_COMPLETION };
    let batch = Batch::new(&groups, &algorithm, split, &[]);
    let rows = batch.rows(|_| true);
    let inputs = loss_inputs(&batch, &rows, Scores::default(), &algorithm, PolicyVersion(0));
    let mut apart = 0;
    for (row, inputs) in rows.iter().zip(&inputs) {
        let trajectory = all.iter().find(|trajectory| std::ptr::eq(&trajectory.sample, row.sample)).unwrap();
        let [first, _] = &trajectory.turns[..] else { continue };
        let (first, second) = inputs.advantages.split_at(first.completion.len());
        assert!(first.windows(2).chain(second.windows(2)).all(|pair| pair[0] == pair[1]));
        apart += usize::from(first[0] != second[0]);
    }
    assert!(apart > 4, "{apart} episodes have turns of different advantage");

    let before = directory.load_parameters().unwrap();
    let mut learner =
        Learner::new(LEARNER, directory.config().clone(), directory.load_parameters().unwrap(), None)
            .unwrap();
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
    let samples: Vec<_> = rows.iter().map(|row| row.sample).collect();
    let norm = learner.step(&samples, &objective, 1e-3).unwrap().grad_norm;
    assert!(norm > 0.0);
    assert_ne!(learner.parameters().unwrap().values(), before.values());
}
