//! Requests with different adapters in one engine: each completion is that of an engine that serves its adapter alone.

use std::sync::Arc;

use model::{Config, FactorPair, LowRank, Sampling};
use rollout::{Completion, Engine, EngineConfig, RequestOptions, RolloutError, SampleRequest};
use trajectory::PolicyVersion;

use crate::{CONFIG, Model, complete, request};

/// An adapter of every matrix of the layers, large enough to change what is sampled.
pub(crate) fn adapter(config: &Config, seed: f32) -> Arc<LowRank> {
    let (rank, mut len, mut pairs) = (2, 0, Vec::new());
    let layout = model::Layout::new(config);
    for spec in layout.specs().iter().filter(|spec| spec.name.contains("_proj.weight")) {
        let (rows, columns) = (spec.shape[0], spec.shape[1]);
        let (a, b) = (len..len + rank * columns, len + rank * columns..len + rank * (rows + columns));
        len = b.end;
        pairs.push(FactorPair { weight: spec.range(), a, b, rows, columns, is_embedding: false });
    }
    let mut factors = LowRank::zeros(rank, 1.0, pairs);
    factors.values_mut().iter_mut().enumerate().for_each(|(i, value)| *value = 0.3 * (i as f32 * seed).sin());
    Arc::new(factors)
}

pub(crate) fn with(request: SampleRequest, adapter: Option<usize>, cached: bool) -> SampleRequest {
    let options = RequestOptions {
        adapter,
        seed: Some(5),
        prefix_cache: cached.then_some(7),
        ..RequestOptions::default()
    };
    SampleRequest { options, ..request }
}

fn sampled(completions: &[Completion]) -> Vec<(Vec<u32>, Vec<u32>)> {
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect();
    completions.iter().map(|one| (one.token_ids.clone(), bits(&one.logprobs))).collect()
}

#[test]
fn completions_are_those_of_their_adapter_alone() {
    let model = Model::new();
    let config = model.directory.config();
    let adapters = vec![adapter(config, 0.7), adapter(config, 1.3)];
    let engine = || model.engine(EngineConfig { prefill_chunk: 5, ..CONFIG }, &[]);
    let mut together = engine().with_adapters(adapters.clone()).unwrap();
    for cached in [false, true] {
        let of = |group: u64| [None, Some(1), Some(0)][group as usize % 3];
        let asked = |groups: &[u64]| -> Vec<_> {
            let of_group = |group: &u64| with(request(*group, 2, Sampling::PLAIN), of(*group), cached);
            groups.iter().map(of_group).collect()
        };
        let all: Vec<u64> = (0..12).collect();
        let found = complete(&mut together, asked(&all));
        for (first, adapter) in [(0, None), (1, Some(1)), (2, Some(0))] {
            let mut alone = engine();
            if let Some(index) = adapter {
                let only: Arc<LowRank> = Arc::clone(&adapters[index]);
                alone = alone.with_adapters(vec![only]).unwrap();
            }
            let groups: Vec<u64> = (first..12).step_by(3).collect();
            let mut requests = asked(&groups);
            requests.iter_mut().for_each(|request| request.options.adapter = adapter.map(|_| 0));
            let expected = complete(&mut alone, requests);
            let own: Vec<_> = found.iter().filter(|one| one.group.0 % 3 == first).cloned().collect();
            assert_eq!(sampled(&own), sampled(&expected), "adapter {adapter:?}, prefix cache {cached}");
        }
    }
}

/// The same prompt with another adapter has other keys and values: the prefix cache does not mix them up, and new weights keep the
/// adapters.
#[test]
fn a_prefix_is_continued_with_its_own_adapter_alone() {
    let model = Model::new();
    let config = model.directory.config();
    let adapters = vec![adapter(config, 0.7), adapter(config, 1.3)];
    let mut engine = model.engine(CONFIG, &[]).with_adapters(adapters).unwrap();
    let ask = |engine: &mut Engine, adapter| {
        let before = engine.counts().reused_tokens;
        let long = SampleRequest { prompt: (4..39).collect(), ..request(1, 1, Sampling::GREEDY) };
        let done = complete(engine, vec![with(long, adapter, true)]);
        (sampled(&done), engine.counts().reused_tokens - before)
    };
    let (first, none) = ask(&mut engine, Some(0));
    let (second, other) = ask(&mut engine, Some(1));
    assert_eq!((none, other), (0, 0));
    assert_ne!(first, second);
    let (again, reused) = ask(&mut engine, Some(0));
    assert_eq!(again, first);
    assert!(reused >= 16, "{reused} tokens");
    engine.apply(model.decoder(&model.other_parameters()), PolicyVersion(1)).unwrap();
    let (newer, reused) = ask(&mut engine, Some(0));
    assert_eq!(reused, 0);
    assert_ne!(newer, first);
    assert_ne!(newer, ask(&mut engine, None).0, "the adapter is served over the new weights");
}

#[test]
fn an_adapter_that_is_not_served_is_refused() {
    let model = Model::new();
    let mut engine = model.engine(CONFIG, &[]);
    let error = engine.submit(with(request(1, 1, Sampling::GREEDY), Some(0), false)).unwrap_err();
    assert!(matches!(error, RolloutError::UnknownAdapter { adapter: 0, served: 0 }), "{error}");
    assert!(engine.is_idle());
}
