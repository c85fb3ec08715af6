//! Ranks that share the weights of a sampler give the bits of one rank.
//!
//! Invariant: models have weights far from any symmetry, and steps mix prefill with decode, and sequences that share pages.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use collective::{Collective, threads};
use model::{
    Architecture, Config, Decoder, KvCache, ModelError, ModelShard, Parameters, PassRanks, Reduction,
    SamplerRanks, SharedCores, SharedSampler, Sizes, StepSequence, TensorRanks, ThreadPool,
};

use crate::common::counting::CountingRank;

const SIZES: Sizes = Sizes {
    // Four ranks have shares of different sizes.
    vocab_size: 53,
    hidden_size: 24,
    intermediate_size: 72,
    num_layers: 3,
    num_heads: 8,
    num_kv_heads: 4,
    max_position_embeddings: 128,
};

/// Against hangs only.
const WAIT: Duration = Duration::from_secs(60);

/// Makes a step.
type Step<'a> = dyn FnMut(&mut KvCache, &[StepSequence<'_>]) -> Vec<f32> + 'a;

fn config(architecture: Architecture) -> Config {
    let config = Config::fresh(&SIZES).of_family(architecture).with_experts(4, 2);
    Config {
        reduction: Reduction::Tree,
        tie_word_embeddings: architecture != Architecture::Qwen3Moe,
        ..config
    }
}

fn serve(sampler: &mut SharedSampler, parameters: &Parameters, pool: &ThreadPool) {
    sampler.serve(|range| Cow::Borrowed(&parameters.values()[range]), pool);
}

/// The logits of all steps, and the experts of the prompt: a prompt in two chunks, three sequences that share its pages and copy
/// the last one, and another prompt beside them.
fn sampled(cache: &mut KvCache, step: &mut Step<'_>) -> (Vec<f32>, Vec<u16>) {
    let prompt: Vec<u32> = (0..37).map(|at| (at * 7 + 3) % 52).collect();
    let mut pages = Vec::new();
    let mut all = Vec::new();
    for (position, end) in [(0, 21), (21, 37)] {
        cache.make_writable(&mut pages, position, end);
        let tokens = &prompt[position..end];
        let wanted = usize::from(end == prompt.len());
        all.extend(step(cache, &[StepSequence { tokens, position, pages: &pages, wanted, adapter: None }]));
    }
    let mut tables = vec![pages.clone(); 3];
    cache.share(&pages);
    cache.share(&pages);
    let mut other = Vec::new();
    for at in 0..4 {
        let position = prompt.len() + at;
        tables.iter_mut().for_each(|pages| cache.make_writable(pages, position, position + 1));
        cache.make_writable(&mut other, 9 * at, 9 * at + 9);
        let tokens: Vec<[u32; 1]> = (0..3).map(|index| [(5 * index + 11 * at as u32) % 52]).collect();
        let mut sequences: Vec<_> = tables
            .iter()
            .zip(&tokens)
            .map(|(pages, tokens)| StepSequence { tokens, position, pages, wanted: 1, adapter: None })
            .collect();
        let chunk: Vec<u32> = (0..9).map(|token| (token * 13 + at as u32) % 52).collect();
        let (tokens, pages) = (&chunk[..], &other[..]);
        sequences.push(StepSequence { tokens, position: 9 * at, pages, wanted: 2, adapter: None });
        all.extend(step(cache, &sequences));
    }
    let routes = cache.routes(&tables[2], prompt.len() + 4).unwrap_or_default();
    (all, routes)
}

#[test]
fn every_degree_gives_the_bits_of_one_rank() {
    let families = [
        Architecture::Llama,
        Architecture::Qwen2,
        Architecture::Qwen3,
        Architecture::Qwen3Moe,
        Architecture::Gemma3,
    ];
    // Ranks that are threads share the cores of the process.
    let pool = ThreadPool::new(&SharedCores::new(3), 3);
    for architecture in families {
        let config = config(architecture);
        let versions = [5, 6].map(|seed| Parameters::random(&config, seed));
        let one = versions.each_ref().map(|version| Decoder::new(&config, version));
        let mut cache = KvCache::new(&config, 40 * KvCache::PAGE).with_routes(&config);
        let mut steps = 0;
        let (expected, routes) = sampled(&mut cache, &mut |cache, sequences| {
            steps += 1;
            one[steps / 4].step(cache, sequences, &pool).expect("steps")
        });
        // Of eight ranks two have each key-value head.
        for degree in [1, 2, 4, 8] {
            let ranks = SamplerRanks { degree, wait: WAIT };
            let mut sampler = SharedSampler::new(&config, ranks).expect("can be shared");
            serve(&mut sampler, &versions[0], &pool);
            let mut cache = sampler.cache(40 * KvCache::PAGE).with_routes(&config);
            let mut steps = 0;
            let (found, of_tokens) = sampled(&mut cache, &mut |cache, sequences| {
                steps += 1;
                if steps == 4 {
                    // Sequences go on with the keys and values that the version before has left.
                    serve(&mut sampler, &versions[1], &pool);
                }
                sampler.step(cache, sequences, &pool).expect("steps")
            });
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&found), bits(&expected), "{architecture:?} on {degree} ranks");
            assert_eq!(of_tokens, routes, "{architecture:?} on {degree} ranks");
        }
        assert_eq!(routes.is_empty(), architecture != Architecture::Qwen3Moe);
    }
}

#[test]
fn what_ranks_cannot_share_is_refused_with_the_nearest_degree() {
    let error = |config: &Config, degree| {
        let error = SamplerRanks { degree, wait: WAIT }.check(config).expect_err("cannot be shared");
        assert!(matches!(error, ModelError::Shard { .. }));
        error.to_string()
    };
    let tree = config(Architecture::Qwen3);
    let text = error(&tree, 16);
    assert!(text.contains("8 query heads are not divisible by 16; 8 divides everything"), "{text}");
    let chain = Config { reduction: Reduction::Chain, ..tree };
    assert!(error(&chain, 2).contains("model.reduction"));
}

/// Weights and keys and values of ranks are those of one, but for what every rank has.
#[test]
fn ranks_divide_the_memory() {
    let config = config(Architecture::Qwen3);
    let parameters = Parameters::random(&config, 5);
    let pool = ThreadPool::single();
    let whole = KvCache::new(&config, 64).bytes();
    let one = SamplerRanks { degree: 1, wait: WAIT }.weight_bytes(&config).expect("one rank");
    assert_eq!(one, 4 * parameters.values().len() as u64);
    for degree in [2, 4] {
        let ranks = SamplerRanks { degree, wait: WAIT };
        let mut sampler = SharedSampler::new(&config, ranks).expect("can be shared");
        serve(&mut sampler, &parameters, &pool);
        assert_eq!(sampler.taken(), ranks.weight_bytes(&config).expect("shared"));
        let mut cache = sampler.cache(64);
        assert_eq!(cache.bytes() * degree as u64, whole);
        let before = sampler.bytes();
        let page = [cache.take().expect("a page")];
        let token = StepSequence { tokens: &[1], position: 0, pages: &page, wanted: 1, adapter: None };
        assert_eq!(sampler.step(&mut cache, &[token], &pool).expect("steps").len(), SIZES.vocab_size);
        assert_eq!(sampler.bytes() - before, whole - cache.bytes(), "the other ranks have the rest");
        // Norms: two per layer and the last, and those of heads.
        let norms = 4 * (3 * (2 * 24 + 2 * 3) + 24) as u64;
        assert_eq!(ranks.weight_bytes(&config).expect("shared"), one + norms * (degree as u64 - 1));
    }
}

/// The volume that `rlrun plan` states: of every hidden state two sums per layer, one more per expert of a token in place of the second,
/// and one of the embedding.
#[test]
fn a_step_sends_two_sums_of_hidden_states_per_layer() {
    let pool = ThreadPool::single();
    for (family, sums) in [(Architecture::Qwen3, 2), (Architecture::Qwen3Moe, 1 + 2)] {
        let config = config(family);
        let parameters = Parameters::random(&config, 5);
        for degree in [2, 4] {
            let of_rank = |ranks: threads::Threads| {
                let shard = ModelShard::new(&config, ranks.position()).expect("can be shared");
                let own = shard.cut(parameters.values());
                let own = Parameters::from_values(Arc::clone(shard.layout()), own).expect("of the layout");
                let ranks = Arc::new(CountingRank::new(ranks));
                let (sent, exchanged) = (Arc::clone(&ranks.sent), Arc::clone(&ranks.exchanged));
                let tensor = Some(TensorRanks::new(ranks, SIZES.vocab_size));
                let decoder =
                    Decoder::new(shard.config(), &own).among(PassRanks { tensor, ..PassRanks::default() });
                let mut cache = KvCache::new(shard.config(), 32);
                let pages = [cache.take().expect("a page")];
                let prompt = StepSequence {
                    tokens: &[1, 2, 3, 4, 5],
                    position: 0,
                    pages: &pages,
                    wanted: 1,
                    adapter: None,
                };
                let logits = decoder.step(&mut cache, &[prompt], &pool).expect("steps");
                assert_eq!(logits.len(), shard.config().vocab_size, "of its tokens");
                assert_eq!(exchanged.load(Ordering::Relaxed), 0);
                sent.load(Ordering::Relaxed)
            };
            let ranks = threads::group(degree, WAIT).into_iter();
            let sent: usize = thread::scope(|scope| {
                let threads: Vec<_> = ranks.map(|rank| scope.spawn(|| of_rank(rank))).collect();
                threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
            });
            let states = 5 * SIZES.hidden_size;
            assert_eq!(
                sent,
                2 * (degree - 1) * states * (sums * SIZES.num_layers + 1),
                "{family:?} on {degree}"
            );
        }
    }
}
