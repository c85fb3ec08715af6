//! N-gram speculation: the same completions in fewer passes.

use model::{Pack, Sampling, Target, ThreadPool};
use proptest::prelude::*;
use rollout::engine::Speculation;
use rollout::{Completion, Engine, EngineConfig, EngineCounts, Interruption, SampleRequest};
use trajectory::PolicyVersion;

use crate::{CONFIG, Model, complete, request};

/// Nearly greedy, so that a random model repeats itself.
const COLD: Sampling = Sampling { temperature: 0.1, ..Sampling::PLAIN };
const TRUNCATED: Sampling = Sampling { temperature: 0.3, top_p: 0.9, top_k: 12, min_p: 0.01 };
const LONG: EngineConfig = EngineConfig { max_completion_length: 80, ..CONFIG };

fn long(group: u64, samples: usize, sampling: Sampling) -> SampleRequest {
    SampleRequest { max_completion_length: 80, ..request(group, samples, sampling) }
}

/// Completions with and without speculation.
fn both(engine: impl Fn() -> Engine, requests: &[SampleRequest]) -> [(Vec<Completion>, EngineCounts); 2] {
    [Speculation::None, Speculation::Ngram].map(|speculation| {
        let mut engine = engine().speculating(speculation);
        let completions = complete(&mut engine, requests.to_vec());
        assert_eq!(engine.pages().0, engine.pages().1, "every page is given back");
        (completions, engine.counts())
    })
}

#[test]
fn completions_are_the_same_in_fewer_passes() {
    let model = Model::new();
    for sampling in [Sampling::PLAIN, COLD, TRUNCATED, Sampling::GREEDY] {
        let mut accepted = 0;
        for group in 0..6 {
            let requests = [long(group, 1 + group as usize % 3, sampling)];
            let [(expected, plain), (completions, counts)] = both(|| model.engine(LONG, &[]), &requests);
            assert_eq!(completions, expected, "{sampling:?}");
            assert_eq!(counts.sampled_tokens, plain.sampled_tokens);
            assert_eq!((plain.proposed_tokens, plain.accepted_tokens), (0, 0));
            assert!(counts.accepted_tokens <= counts.proposed_tokens);
            assert!(plain.steps <= counts.steps + counts.accepted_tokens);
            accepted += counts.accepted_tokens;
            // A pass yields one token more than it accepts, unless an accepted token ends the completion.
            let alone = requests[0].samples == 1;
            assert!(!alone || counts.steps + counts.accepted_tokens <= plain.steps + 1);
        }
        assert!(accepted > 20 || sampling == Sampling::PLAIN, "{sampling:?}: {accepted} accepted");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]
    #[test]
    fn completions_do_not_depend_on_batching(max_running in 1..9usize, prefill_chunk in 1..50usize, samples in 1..4usize) {
        let model = Model::new();
        let requests: Vec<_> = (0..4).map(|group| long(group, samples, COLD)).collect();
        let config = EngineConfig { max_running, prefill_chunk, ..LONG };
        let [(expected, _), (completions, _)] = both(|| model.engine(config, &[]), &requests);
        prop_assert_eq!(completions, expected);
    }
}

/// An accepted proposal may end a completion, and a text may be inserted where proposals would be.
#[test]
fn completions_end_and_are_interrupted_at_the_same_place() {
    let model = Model::new();
    let requests: Vec<_> = (0..4).map(|group| long(group, 2, COLD)).collect();
    let [(free, _), _] = both(|| model.engine(LONG, &[]), &requests);
    let stops: Vec<String> = free.iter().map(|c| c.text.chars().skip(20).take(3).collect()).collect();
    let stops: Vec<&str> = stops.iter().map(String::as_str).filter(|stop| !stop.is_empty()).collect();
    let mut ended = 0;
    for stop in &stops {
        let [(expected, _), (completions, counts)] = both(|| model.engine(LONG, &[stop]), &requests);
        assert_eq!(completions, expected, "{stop:?}");
        ended += counts.accepted_tokens;
    }
    assert!(ended > 0);
    for requests in requests.chunks(1) {
        let engine = || {
            let text = Interruption::new("Time.", 30..=50, &model.stop(&[]), 80).unwrap();
            model.engine(LONG, &[]).interrupting(Some(text))
        };
        let [(expected, plain), (completions, counts)] = both(engine, requests);
        assert_eq!(completions, expected);
        assert_eq!(counts.interrupted, plain.interrupted);
        assert!(counts.proposed_tokens > 0);
    }
}

/// New weights arrive while proposals are verified. Every token has the log-probability of the version that it carries.
#[test]
fn tokens_carry_the_version_that_verified_them() {
    let model = Model::new();
    let decoders = [model.decoder(&model.parameters()), model.decoder(&model.other_parameters())];
    let mut accepted = 0;
    for (group, passes) in (0..6).flat_map(|group| [3, 12, 25].map(|passes| (group, passes))) {
        let mut engine = model.engine(LONG, &[]).speculating(Speculation::Ngram);
        engine.submit(long(group, 1, COLD)).unwrap();
        let mut completions = Vec::new();
        for _ in 0..passes {
            completions.extend(engine.step().unwrap());
        }
        engine.apply(decoders[1].clone(), PolicyVersion(1)).unwrap();
        engine.recompute().unwrap();
        while !engine.is_idle() {
            completions.extend(engine.step().unwrap());
        }
        accepted += engine.counts().accepted_tokens;
        let completion = completions.remove(0);
        let mut pack = Pack::new();
        pack.push(&completion.token_ids).unwrap();
        let mut row = completion.prompt_length - 1;
        for run in &completion.versions {
            for _ in 0..run.len {
                let token = completion.token_ids[row + 1];
                let target = Target { token, temperature: COLD.temperature, kept: None };
                let decoder = &decoders[run.version.0 as usize];
                let scored = decoder.score(&pack, &[row], &[target], &ThreadPool::single()).unwrap();
                let recorded = completion.logprobs[row + 1 - completion.prompt_length];
                assert_eq!(scored[0].logprob, recorded, "token {row} of version {}", run.version);
                row += 1;
            }
        }
        assert_eq!(row + 1, completion.token_ids.len());
    }
    assert!(accepted > 20, "{accepted} accepted");
}
