//! The experts of tokens: a sampler records what its router chose, and a trainer computes with what it is given.

use std::sync::Arc;

use model::{
    ANY_EXPERT, Config, Decoder, GradientSink, Gradients, KvCache, Pack, Parameters, PredictionGradient,
    Recompute, RoutedTokens, SharedCores, StepSequence, Target, ThreadPool, Unit,
};

use crate::common::{Golden, bits, logits_of, pack_of, train};

const FAMILIES: [&str; 2] = ["qwen3_moe", "olmoe"];

/// Gradients, and the tokens of each layer's experts.
struct Counting {
    gradients: Gradients,
    layers: Vec<(usize, RoutedTokens)>,
}

impl GradientSink for Counting {
    fn unit(&mut self, unit: Unit) -> &mut [f32] {
        self.gradients.unit(unit)
    }

    fn done(&mut self, unit: Unit) {
        self.gradients.done(unit);
    }

    fn routed(&mut self, index: usize, tokens: &RoutedTokens) {
        self.layers.push((index, tokens.clone()));
    }
}

/// `n` tokens of the golden vocabulary.
fn tokens(n: usize, seed: usize) -> Vec<u32> {
    (0..n).map(|i| (4 + (i * i * 31 + i * 17 + seed * 29) % 96) as u32).collect()
}

/// `[tokens, slots]` the experts that the sampler records for `sequence`, read in two steps.
fn sampled(decoder: &Decoder, cache: &mut KvCache, sequence: &[u32]) -> (Vec<u16>, Vec<u32>) {
    let mut pages = Vec::new();
    for (from, to) in [(0, sequence.len() / 3), (sequence.len() / 3, sequence.len())] {
        cache.make_writable(&mut pages, from, to);
        let step = StepSequence {
            tokens: &sequence[from..to],
            position: from,
            pages: &pages,
            wanted: 1,
            adapter: None,
        };
        decoder.step(cache, &[step], &ThreadPool::single()).unwrap();
    }
    (cache.routes(&pages, sequence.len()).unwrap(), pages)
}

/// Bits of the gradients of a training pass over `pack`, and the tokens by layer.
fn trained(
    config: &Config,
    parameters: &Arc<Parameters>,
    pack: &Pack,
    recompute: Recompute,
    threads: usize,
) -> (Vec<u32>, Vec<(usize, RoutedTokens)>) {
    let decoder = Decoder::trainable(config, parameters, recompute);
    let rows: Vec<usize> = (0..pack.token_ids().len()).collect();
    let target = |row: &usize| Target { token: (row % 50) as u32, temperature: 1.0, kept: None };
    let targets: Vec<_> = rows.iter().map(target).collect();
    let slope = |i| PredictionGradient { logprob: 0.1 * i as f32 - 0.3, entropy: 0.02, value: 0.0 };
    let slopes: Vec<_> = (0..rows.len()).map(slope).collect();
    let mut sink = Counting { gradients: Gradients::zeros(parameters.layout()), layers: Vec::new() };
    let pool = ThreadPool::new(&SharedCores::new(threads), threads);
    train(&decoder, pack, (&rows, &targets), &slopes, &mut sink, &pool);
    (bits(sink.gradients.values()), sink.layers)
}

#[test]
fn recorded_experts_are_those_that_training_chooses() {
    for name in FAMILIES {
        let golden = Golden::open(name);
        let (config, parameters) = (&golden.config, Arc::new(golden.parameters.clone()));
        let sampler = Decoder::new(config, &parameters);
        let mut cache = KvCache::new(config, 256).with_routes(config);
        let sequences = [tokens(37, 1), tokens(20, 2)];
        let routes: Vec<u16> =
            sequences.iter().flat_map(|sequence| sampled(&sampler, &mut cache, sequence).0).collect();
        assert_eq!(routes.len(), 57 * config.expert_slots());
        let pack = pack_of(sequences.iter().map(Vec::as_slice));
        let (own, layers) = trained(config, &parameters, &pack, Recompute::None, 1);
        assert!(layers.iter().all(|(_, tokens)| (tokens.tokens, tokens.given) == (57, 0)), "{layers:?}");
        let per_token = config.experts().unwrap().per_token as u64;
        assert!(layers.iter().all(|(_, tokens)| tokens.of_expert.iter().sum::<u64>() == 57 * per_token));
        for (recompute, threads) in [(Recompute::None, 2), (Recompute::Block, 1), (Recompute::Sequence, 2)] {
            let replayed = pack.clone().routed(routes.clone());
            let (gradients, layers) = trained(config, &parameters, &replayed, recompute, threads);
            assert!(gradients == own, "{name}: {recompute:?}");
            assert_eq!(layers.len(), config.num_layers());
            assert!(layers.iter().all(|(_, tokens)| (tokens.given, tokens.changed) == (57, 0)), "{layers:?}");
        }
    }
}

#[test]
fn other_experts_that_are_given_are_computed_with_and_counted() {
    for name in FAMILIES {
        let golden = Golden::open(name);
        let (config, parameters) = (&golden.config, Arc::new(golden.parameters.clone()));
        let spec = config.experts().unwrap();
        let sequence = tokens(21, 5);
        let pack = pack_of([&sequence[..]]);
        // The last experts for the first half of the tokens; the rest is chosen.
        let last = (spec.count - spec.per_token..spec.count).map(|expert| expert as u16);
        let given: Vec<u16> = last.cycle().take(10 * config.expert_slots()).collect();
        let mut all = given.clone();
        all.resize(21 * config.expert_slots(), ANY_EXPERT);
        let decoder = Decoder::trainable(config, &parameters, Recompute::None);
        assert_ne!(
            bits(&logits_of(&decoder, &pack)),
            bits(&logits_of(&decoder, &pack.clone().routed(all.clone())))
        );
        let (plain, layers) =
            trained(config, &parameters, &pack.clone().routed(all.clone()), Recompute::None, 1);
        assert!(layers.iter().all(|(_, tokens)| tokens.given == 10), "{layers:?}");
        assert!(layers.iter().any(|(_, tokens)| tokens.changed > 0), "{layers:?}");
        for (recompute, threads) in [(Recompute::Block, 2), (Recompute::Sequence, 1)] {
            assert!(
                trained(config, &parameters, &pack.clone().routed(all.clone()), recompute, threads).0
                    == plain
            );
        }
        let beyond = vec![spec.count as u16; 21 * config.expert_slots()];
        assert_eq!(
            bits(&logits_of(&decoder, &pack.clone().routed(beyond))),
            bits(&logits_of(&decoder, &pack)),
            "an expert that is not there is not given"
        );
    }
}

#[test]
fn copied_pages_keep_the_experts_of_the_tokens_before() {
    let golden = Golden::open("olmoe");
    let config = &golden.config;
    let sampler = Decoder::new(config, &golden.parameters);
    let mut cache = KvCache::new(config, 256).with_routes(config);
    let prompt = tokens(KvCache::PAGE + 5, 3);
    let (routes, pages) = sampled(&sampler, &mut cache, &prompt);
    cache.share(&pages);
    let mut own = pages.clone();
    cache.make_writable(&mut own, prompt.len(), prompt.len() + 1);
    assert_ne!(own, pages);
    let step = StepSequence { tokens: &[9], position: prompt.len(), pages: &own, wanted: 1, adapter: None };
    sampler.step(&mut cache, &[step], &ThreadPool::single()).unwrap();
    let longer = cache.routes(&own, prompt.len() + 1).unwrap();
    assert_eq!(longer[..routes.len()], routes[..]);
    let (whole, _) = sampled(&sampler, &mut cache, &[&prompt[..], &[9]].concat());
    assert_eq!(longer, whole);
    assert!(KvCache::new(config, 16).routes(&[], 0).is_none());
}
