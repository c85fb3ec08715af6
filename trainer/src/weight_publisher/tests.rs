//! Versions of trainers of every split, taken by samplers of every degree: each value goes from the rank that owns it to the ranks
//! that need it, once.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use collective::{HostCollective, threads};
use model::{
    Architecture, Config, Decoder, Draw, KvCache, Layout, Recompute, Reduction, SamplerRanks, Sampling,
    SharedSampler, Sizes, StepSequence, ThreadPool,
};
use weights::{Dtype, HubPublisher, Lag, PublishConfig, Receipt, Subscriber, WritableSlot};

use super::*;
use crate::optimizer::{OptimizerConfig, OptimizerKind};
use crate::{Followed, Leader, LearnerConfig, ParallelConfig, follow};

const VERSION: PolicyVersion = PolicyVersion(1);
const SOON: Duration = Duration::from_secs(60);

fn config(family: Architecture) -> Config {
    let sizes = Sizes {
        // Four ranks have shares of different sizes.
        vocab_size: 53,
        hidden_size: 32,
        intermediate_size: 72,
        num_layers: 2,
        num_heads: 8,
        num_kv_heads: 4,
        max_position_embeddings: 32,
    };
    let config = Config::fresh(&sizes).of_family(family).with_experts(4, 2);
    Config { reduction: Reduction::Tree, tie_word_embeddings: family == Architecture::Qwen3, ..config }
}

fn split(world: usize, [tensor, pipeline]: [usize; 2], zero: usize) -> LearnerConfig {
    LearnerConfig {
        optimizer: OptimizerConfig::standard(OptimizerKind::Adamw, 0.95),
        max_grad_norm: 1.0,
        router_correction_rate: 0.0,
        microbatch_tokens: 64,
        recompute: Recompute::None,
        world,
        parallel: ParallelConfig { tensor, pipeline, ..ParallelConfig::DATA },
        leaves: 4,
        zero,
        wait: SOON,
        device: None,
    }
}

fn learner(model: &Config, world: usize, shards: [usize; 2], zero: usize) -> Learner {
    let parameters = Parameters::random(model, 7);
    Learner::new(split(world, shards, zero), model.clone(), parameters, None).unwrap()
}

/// How many of `degree` ranks need each value of the model, from the names of its tensors alone (Megatron-LM).
fn needed(model: &Config, degree: usize) -> Vec<u64> {
    let (layout, copies) = (Layout::new(model), degree.div_ceil(model.num_kv_heads) as u64);
    let mut needed = vec![0; layout.len()];
    for spec in layout.specs() {
        let split = |name: &str| spec.name.contains(name);
        let divided = [
            "embed_tokens",
            "lm_head",
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ];
        let count = match divided.into_iter().any(split) {
            // Ranks that are more than key-value heads have copies of them.
            true if split("k_proj") || split("v_proj") => copies,
            true => 1,
            false => degree as u64,
        };
        needed[spec.range()].fill(count);
    }
    needed
}

/// The logits of the token after a prompt of three.
fn draw(logits: &[f32]) -> (u32, u32) {
    let drawn = Draw::new(&mut logits.to_vec(), Sampling::PLAIN, 0.4);
    (drawn.token, drawn.logprob.to_bits())
}

const PROMPT: [u32; 3] = [22, 16, 51];

fn prompt(pages: &[u32]) -> [StepSequence<'_>; 1] {
    [StepSequence { tokens: &PROMPT, position: 0, pages, wanted: 1, adapter: None }]
}

/// Publishes the weights of `learner` to a sampler of `degree` ranks. Returns how often each value was taken, and the bytes of the
/// receipt that the trainer has.
fn push(learner: &Learner, model: &Config, degree: usize) -> (Vec<u64>, u64) {
    let hub = Hub::new(weights::hub::HubConfig::default());
    let sampler_side = hub.subscribe("sampler").unwrap();
    let in_process = PublishConfig { in_process: true, ..PublishConfig::default() };
    let publisher = Arc::new(HubPublisher::new(hub, in_process).unwrap());
    WeightPublisher::Host(Arc::clone(&publisher) as Arc<dyn Publisher>).publish(VERSION, learner).unwrap();
    let snapshot = sampler_side.newest(None).unwrap().unwrap();
    let values = &snapshot.values;
    let pool = ThreadPool::single();
    let mut sampler = SharedSampler::new(model, SamplerRanks { degree, wait: SOON }).unwrap();
    let times = Mutex::new(vec![0; values.len()]);
    let of_whole = |range: Range<usize>| -> Cow<'_, [f32]> {
        times.lock().unwrap()[range.clone()].iter_mut().for_each(|times| *times += 1);
        values.range(range)
    };
    sampler.serve(of_whole, &pool);
    let mut cache = sampler.cache(32);
    let pages = [cache.take().unwrap()];
    let logits = sampler.step(&mut cache, &prompt(&pages), &pool).unwrap();
    let whole = learner.parameters().unwrap();
    let mut cache = KvCache::new(model, 32);
    let pages = [cache.take().unwrap()];
    let expected = Decoder::new(model, &whole).step(&mut cache, &prompt(&pages), &pool).unwrap();
    assert_eq!(draw(&logits), draw(&expected));
    let (digest, taken) = (Digest::of_values(values, 1), sampler.taken());
    assert_eq!(digest, Digest::of(whole.values()), "the digest is that of the whole model");
    let none = Duration::ZERO;
    let receipt = Receipt { version: VERSION, digest, took: none, stalled: none, bytes: 0, taken };
    sampler_side.applied(receipt).unwrap();
    let lags = publisher.lags().unwrap();
    (times.into_inner().unwrap(), lags[0].receipt.unwrap().taken)
}

#[test]
fn every_value_goes_once_to_each_rank_that_needs_it() {
    for family in [Architecture::Qwen3, Architecture::Qwen3Moe] {
        let model = config(family);
        let splits = [
            (1, [1, 1]),
            (2, [1, 1]),
            (2, [2, 1]),
            (2, [1, 2]),
            (4, [1, 1]),
            (4, [2, 1]),
            (4, [2, 2]),
            (4, [4, 1]),
        ];
        for (world, shards) in splits {
            for zero in [1, 3] {
                let learner = learner(&model, world, shards, zero);
                let owned: usize = learner.owned().unwrap().iter().map(|(range, _)| range.len()).sum();
                assert_eq!(owned, Layout::new(&model).len(), "ranks publish each value once");
                for degree in [1, 2, 4, 8] {
                    let (taken, bytes) = push(&learner, &model, degree);
                    let needed = needed(&model, degree);
                    let what = format!("{family:?}, {world} ranks, {shards:?}, zero {zero}, to {degree}");
                    assert_eq!(taken, needed, "{what}");
                    assert_eq!(bytes, 4 * needed.iter().sum::<u64>(), "{what}: the bytes of the lower bound");
                }
            }
        }
    }
}

/// A rank keeps its values where it published them; none has those of others.
#[test]
fn a_sharded_trainer_publishes_in_parts() {
    let model = config(Architecture::Qwen3);
    for (world, shards, zero) in [(2, [1, 1], 3), (4, [2, 1], 1), (4, [2, 1], 3), (4, [1, 2], 1)] {
        let values = learner(&model, world, shards, zero).snapshot_in_parts().unwrap().unwrap();
        assert!(format!("{values:?}").contains("the memory of their owners"));
        let head = Layout::new(&model).head();
        assert!(matches!(values.range(head), Cow::Owned(_)), "the embedding lies with several ranks");
    }
}

/// A publisher that counts how versions come to it.
struct CountingPublisher {
    publisher: HubPublisher,
    /// Whether it says that its memory is that of another host.
    elsewhere: bool,
    begun: AtomicU64,
    gathered: AtomicU64,
}

impl Publisher for CountingPublisher {
    fn publish(&self, snapshot: Snapshot) -> Result<(), WeightsError> {
        self.gathered.fetch_add(1, Ordering::Relaxed);
        self.publisher.publish(snapshot)
    }

    fn begin(&self, version: PolicyVersion, parameters: usize) -> Result<Option<WritableSlot>, WeightsError> {
        self.begun.fetch_add(1, Ordering::Relaxed);
        let mut place = serde_json::to_value(self.publisher.begin(version, parameters)?.unwrap()).unwrap();
        if self.elsewhere {
            place["boot"] = "another".into();
        }
        Ok(Some(serde_json::from_value(place).unwrap()))
    }

    fn commit(
        &self,
        version: PolicyVersion,
        adapter: Option<Arc<dyn WeightAdapter>>,
    ) -> Result<(), WeightsError> {
        self.publisher.commit(version, adapter)
    }

    fn wait_applied(&self, version: PolicyVersion, wait: Duration) -> Result<(), WeightsError> {
        self.publisher.wait_applied(version, wait)
    }

    fn lags(&self) -> Result<Vec<Lag>, WeightsError> {
        self.publisher.lags()
    }
}

/// Calls `work` with a learner whose ranks stand for processes: they share a collective alone.
fn with_processes(model: &Config, config: LearnerConfig, work: impl FnOnce(&Learner)) {
    let ranks = threads::group(config.world, SOON).into_iter();
    let mut ranks = ranks.map(|rank| Arc::new(rank) as Arc<dyn HostCollective>);
    let leader = Leader::new(ranks.next().unwrap());
    let start = |rank| std::thread::spawn(move || follow(rank, Arc::new(ThreadPool::single())));
    let followers: Vec<_> = ranks.map(start).collect();
    let learner = leader.learner(config, model.clone(), Parameters::random(model, 7), None, None).unwrap();
    work(&learner);
    drop((learner, leader));
    for follower in followers {
        assert_eq!(follower.join().unwrap().unwrap(), Followed::Stopped);
    }
}

/// Ranks that are processes of the publisher's host write their shards where samplers read them. If one is elsewhere, the first rank
/// gathers all weights, from the first version on.
#[test]
fn processes_write_their_shards_and_nothing_is_gathered() {
    let model = config(Architecture::Qwen3);
    for (world, shards, zero) in [(2, [1, 1], 3), (4, [2, 1], 1), (4, [2, 1], 3), (4, [1, 2], 3)] {
        for (dtype, elsewhere) in [(Dtype::F32, false), (Dtype::Bf16, false), (Dtype::F32, true)] {
            let directory = tempfile::tempdir().unwrap();
            let hub = Hub::new(weights::hub::HubConfig { dtype, ..Default::default() });
            let sampler = hub.subscribe("sampler").unwrap();
            let shm = Some(directory.path().to_owned());
            let publisher = Arc::new(CountingPublisher {
                publisher: HubPublisher::new(hub, PublishConfig { shm, ..PublishConfig::default() }).unwrap(),
                elsewhere,
                begun: AtomicU64::new(0),
                gathered: AtomicU64::new(0),
            });
            let host = WeightPublisher::Host(Arc::clone(&publisher) as Arc<dyn Publisher>);
            with_processes(&model, split(world, shards, zero), |learner| {
                for version in 1..=3 {
                    host.publish(PolicyVersion(version), learner).unwrap();
                    let newest = sampler.newest(None).unwrap().unwrap();
                    let expected = learner.parameters().unwrap();
                    assert_eq!(newest.version, PolicyVersion(version));
                    assert_eq!(
                        newest.digest(),
                        Snapshot::rounded(newest.version, expected.values(), dtype).digest()
                    );
                }
                let reason = learner.gather_reason();
                let named = reason.is_some_and(|reason| reason.contains("it is the memory of another host"));
                assert_eq!((reason.is_some(), named), (elsewhere, elsewhere), "{reason:?}");
            });
            let counts = [&publisher.begun, &publisher.gathered].map(|count| count.load(Ordering::Relaxed));
            let what = format!("{world} ranks, {shards:?}, zero {zero}, {dtype}");
            assert_eq!(counts, if elsewhere { [1, 3] } else { [3, 0] }, "{what}");
        }
    }
}
