//! An engine whose network ranks share is an engine on one rank: the same completions, bit for bit, whatever happens in between.

use std::time::Duration;

use model::{Architecture, Config, LowRank, Reduction, SamplerRanks, Sampling};
use rollout::engine::Speculation;
use rollout::{
    Completion, Engine, EngineConfig, EngineCounts, Network, RolloutError, SampleRequest, ServeOn,
};
use trajectory::PolicyVersion;

use crate::{CONFIG, Model, request};

/// What happens in the middle of the completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Middle {
    Nothing,
    /// New weights; keys and values stay.
    Keep,
    /// New weights; keys and values are computed again.
    Recompute,
    /// The engine sleeps, and wakes up with new weights.
    Sleep,
}

fn on(ranks: usize) -> ServeOn {
    match ranks {
        1 => ServeOn::Host(model::Quantization::None),
        degree => ServeOn::Ranks(SamplerRanks { degree, wait: Duration::from_secs(60) }),
    }
}

/// An engine on `ranks`, and a new version for it.
fn engine(model: &Model, ranks: usize) -> Engine {
    let network = Network::new(&on(ranks), &config(model), &model.parameters()).unwrap();
    let limits = EngineConfig { prefill_chunk: 5, ..CONFIG };
    Engine::new(limits, model.stop(&[]), network, PolicyVersion(0)).unwrap().recording_experts()
}

fn config(model: &Model) -> Config {
    Config { reduction: Reduction::Tree, ..model.directory.config().clone() }
}

/// Requests of several samples, some of which continue what others have left.
fn requests() -> Vec<SampleRequest> {
    let request = |(index, group): (usize, u64)| {
        let mut request = request(group, 3, Sampling { temperature: 0.7, top_p: 0.95, ..Sampling::PLAIN });
        request.options.prefix_cache = (index > 1).then_some(7);
        request.options.alternatives = 2;
        request
    };
    [2, 5, 3, 5].into_iter().enumerate().map(request).collect()
}

fn completions(
    mut engine: Engine,
    model: &Model,
    on: &ServeOn,
    middle: Middle,
) -> (Vec<Completion>, EngineCounts) {
    let mut waiting = requests().into_iter().peekable();
    let (mut completions, mut steps) = (Vec::new(), 0);
    while waiting.peek().is_some() || !engine.is_idle() {
        while let Some(request) = waiting.next_if(|request| engine.has_capacity_for(request)) {
            engine.submit(request).unwrap();
        }
        completions.extend(engine.step().unwrap());
        steps += 1;
        if steps != 12 || middle == Middle::Nothing {
            continue;
        }
        let (new, _) = on.prepare(&config(model), model.other_parameters().values().into()).unwrap();
        if middle == Middle::Sleep {
            let before = engine.sleep();
            assert!(before > 10 * engine.bytes(), "all ranks free their memory");
            engine.wake_up(new, PolicyVersion(4)).unwrap();
            continue;
        }
        engine.apply(new, PolicyVersion(4)).unwrap();
        if middle == Middle::Recompute {
            engine.recompute().unwrap();
        }
    }
    completions.sort_by_key(|completion| (completion.group, completion.index));
    (completions, engine.counts())
}

#[test]
fn completions_are_those_of_one_rank() {
    for family in [Architecture::Qwen3, Architecture::Qwen3Moe] {
        let model = Model::of_family(family, 128);
        for speculation in [Speculation::None, Speculation::Ngram] {
            for middle in [Middle::Nothing, Middle::Keep, Middle::Recompute, Middle::Sleep] {
                // Of four ranks two have each key-value head.
                let [one, two, four] = [1, 2, 4].map(|ranks| {
                    let engine = engine(&model, ranks).speculating(speculation);
                    completions(engine, &model, &on(ranks), middle)
                });
                assert_eq!(two, one, "{family:?}, {speculation:?}, {middle:?}");
                assert_eq!(four, one, "{family:?}, {speculation:?}, {middle:?}");
                assert_eq!(one.0.len(), 12);
                assert_eq!(one.0[0].experts.is_some(), family == Architecture::Qwen3Moe);
            }
        }
    }
}

#[test]
fn what_is_served_otherwise_is_refused() {
    let model = Model::new();
    let version = |on: &ServeOn| on.prepare(&config(&model), model.parameters().values().into()).unwrap().0;
    for ranks in [1, 2] {
        let mut engine = engine(&model, ranks);
        let error = engine.apply(version(&on(3 - ranks)), PolicyVersion(1)).unwrap_err();
        assert!(matches!(error, RolloutError::Misplaced { .. }), "{error}");
    }
    let adapters = vec![std::sync::Arc::new(LowRank::zeros(2, 1.0, Vec::new()))];
    let error = engine(&model, 2).with_adapters(adapters).unwrap_err().to_string();
    assert!(error.contains("of adapters") && error.contains("on several ranks"), "{error}");
    let too_many = Network::new(&on(8), &config(&model), &model.parameters()).unwrap_err();
    assert!(too_many.is_input() && too_many.to_string().contains("4 divides everything"), "{too_many}");
}
