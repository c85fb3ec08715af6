//! What the engine generates, and that nothing but weights, prompt and random stream matters to it.

use model::{Draw, Pack, Sampling, Target, ThreadPool};
use proptest::prelude::*;
use rollout::engine::{random_stream, uniform};
use rollout::{Completion, EngineConfig, RolloutError};
use trajectory::{GroupId, PolicyVersion, StopReason};

use crate::{CONFIG, Model, complete, request};

const TRUNCATED: Sampling = Sampling { temperature: 0.8, top_p: 0.9, top_k: 12, min_p: 0.01 };

/// The same completion without cache, batching and engine.
fn plainly(model: &Model, group: u64, index: u32, sampling: Sampling) -> (Vec<u32>, Vec<f32>) {
    let decoder = model.decoder(&model.parameters());
    let mut token_ids = request(group, 1, sampling).prompt;
    let mut rng = random_stream(CONFIG.seed, GroupId(group), index);
    let mut logprobs = Vec::new();
    while logprobs.len() < 24 {
        let mut pack = Pack::new();
        pack.push(&token_ids).unwrap();
        let mut logits: Vec<f32> =
            decoder.logits(&pack).unwrap().get(token_ids.len() - 1).unwrap().to_vec1().unwrap();
        let draw = Draw::new(&mut logits, sampling, uniform(&mut rng));
        token_ids.push(draw.token);
        logprobs.push(draw.logprob);
        if model.directory.stop_token_ids().contains(&draw.token) {
            break;
        }
    }
    (token_ids, logprobs)
}

#[test]
fn completions_equal_plain_sampling_bit_for_bit() {
    let model = Model::new();
    for sampling in [Sampling::PLAIN, TRUNCATED, Sampling::GREEDY] {
        let mut engine = model.engine(CONFIG, &[]);
        for completion in complete(&mut engine, (0..5).map(|g| request(g, 3, sampling)).collect()) {
            let expected = plainly(&model, completion.group.0, completion.index, sampling);
            assert_eq!((completion.token_ids, completion.logprobs), expected);
        }
        let (free, all) = engine.pages();
        assert_eq!(free, all, "every page is given back");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn completions_do_not_depend_on_batching(
        max_running in 1..20usize, prefill_chunk in 1..50usize, samples in 1..6usize, groups in 1..8u64
    ) {
        let model = Model::new();
        let requests = || (0..groups).map(|g| request(g, samples, Sampling::PLAIN)).collect();
        let expected = complete(&mut model.engine(CONFIG, &[]), requests());
        prop_assert_eq!(expected.len(), samples * groups as usize);
        let mut engine = model.engine(EngineConfig { max_running, prefill_chunk, ..CONFIG }, &[]);
        prop_assert_eq!(complete(&mut engine, requests()), expected);
        prop_assert_eq!(engine.pages().0, engine.pages().1);
    }
}

/// A request is never refused after `has_capacity`, however prompts and pages align.
#[test]
fn a_request_within_the_capacity_is_accepted() {
    let model = Model::new();
    for max_prompt_length in [31, 32, 33] {
        for kv_cache_tokens in [None, Some(400), Some(1000)] {
            let config = EngineConfig { max_prompt_length, kv_cache_tokens, max_samples: 4, ..CONFIG };
            let mut engine = model.engine(config, &[]);
            let requests = (0..12).map(|group| {
                let mut request = request(group, 4, Sampling::PLAIN);
                request.prompt = vec![7; (group as usize * 5) % max_prompt_length + 1];
                request
            });
            assert_eq!(complete(&mut engine, requests.collect()).len(), 48);
        }
    }
}

#[test]
fn a_group_shares_the_pages_of_its_prompt() {
    let model = Model::new();
    let mut engine = model.engine(CONFIG, &[]);
    let request = request(5, 8, Sampling::PLAIN);
    assert!(request.prompt.len() > 33, "the prompt fills two pages and begins a third");
    engine.submit(request).unwrap();
    while engine.counts().sampled_tokens < 8 {
        engine.step().unwrap();
    }
    engine.step().unwrap();
    let (free, all) = engine.pages();
    // Two full pages shared, the third copied for each completion that goes on; unshared it would be three each.
    assert!(all - free <= 2 + 1 + 8, "{} pages", all - free);
    assert_eq!(engine.counts().prefilled_tokens, 36, "the prompt is prefilled once");
}

#[test]
fn log_probabilities_are_those_of_the_trainer() {
    let model = Model::new();
    let decoder = model.decoder(&model.parameters());
    for completion in
        complete(&mut model.engine(CONFIG, &[]), (0..4).map(|g| request(g, 2, TRUNCATED)).collect())
    {
        let sample = completion.sample().unwrap();
        let mut pack = Pack::new();
        pack.push(sample.token_ids()).unwrap();
        let rows: Vec<usize> = (completion.prompt_length - 1..sample.token_ids().len() - 1).collect();
        let kept = sample.kept().expect("truncation was on");
        let targets: Vec<_> = rows
            .iter()
            .enumerate()
            .map(|(n, row)| Target {
                token: sample.token_ids()[row + 1],
                temperature: sample.temperature(),
                kept: Some(kept.set(n)),
            })
            .collect();
        let scored: Vec<f32> = decoder
            .score(&pack, &rows, &targets, &ThreadPool::single())
            .unwrap()
            .iter()
            .map(|prediction| prediction.logprob)
            .collect();
        assert_eq!(scored, completion.logprobs);
    }
}

#[test]
fn a_stop_string_ends_the_text_before_it_and_keeps_the_tokens() {
    let model = Model::new();
    let requests = || (0..6).map(|g| request(g, 2, Sampling::PLAIN)).collect::<Vec<_>>();
    let free: Vec<Completion> = complete(&mut model.engine(CONFIG, &[]), requests());
    let text: Vec<char> = free[0].text.chars().collect();
    let stop: String = text[3..5].iter().collect();
    let stopped = complete(&mut model.engine(CONFIG, &[&stop]), requests());
    assert_eq!(stopped[0].stop, StopReason::StopString);
    for (stopped, free) in stopped.iter().zip(&free) {
        assert!(free.token_ids.starts_with(&stopped.token_ids));
        assert_eq!(stopped.text, free.text.split(&stop).next().unwrap());
        assert_eq!(stopped.stop == StopReason::StopString, free.text.contains(&stop));
    }
}

#[test]
fn requests_beyond_the_limits_are_refused_with_their_numbers() {
    let model = Model::new();
    let small = EngineConfig { kv_cache_tokens: Some(112), max_samples: 1, ..CONFIG };
    let mut engine = model.engine(small, &[]);
    let mut empty = request(0, 1, Sampling::PLAIN);
    empty.prompt.clear();
    assert!(matches!(engine.submit(empty), Err(RolloutError::EmptyPrompt { group: GroupId(0) })));
    let mut long = request(1, 1, Sampling::PLAIN);
    long.prompt = vec![5; 120];
    let error = engine.submit(long).unwrap_err();
    assert!(matches!(error, RolloutError::PromptTooLong { prompt: 120, completion: 24, .. }), "{error}");
    assert!(error.to_string().contains("more than the 128 tokens that the model can see"), "{error}");
    let error = engine.submit(request(5, 8, Sampling::PLAIN)).unwrap_err();
    assert!(matches!(error, RolloutError::CacheTooSmall { positions: 112, .. }), "{error}");
    assert!(engine.is_idle());
    let too_small = EngineConfig { max_samples: 2, ..small };
    let decoder = model.decoder(&model.parameters());
    let error = rollout::Engine::new(too_small, model.stop(&[]), decoder, PolicyVersion(0)).unwrap_err();
    assert!(matches!(error, RolloutError::CacheTooSmall { needed: 144, positions: 112 }), "{error}");
    assert!(rollout::engine::check_trainable(Sampling::GREEDY).unwrap_err().is_input());
}

/// Groups that are aborted during prefill and during decode.
#[test]
fn an_aborted_group_frees_its_pages_and_changes_no_other() {
    let model = Model::new();
    let requests = || (4..7).map(|group| request(group, 2, Sampling::PLAIN));
    let expected: Vec<_> = complete(&mut model.engine(CONFIG, &[]), requests().collect())
        .into_iter()
        .filter(|completion| completion.group == GroupId(5))
        .collect();
    for steps in 0..12 {
        let mut engine = model.engine(EngineConfig { max_running: 6, ..CONFIG }, &[]);
        requests().for_each(|request| engine.submit(request).unwrap());
        let mut completions = Vec::new();
        for _ in 0..steps {
            completions.extend(engine.step().unwrap());
        }
        let ended = completions.iter().filter(|completion| completion.group != GroupId(5)).count();
        assert_eq!(engine.abort(GroupId(4)) + engine.abort(GroupId(6)) + ended, 4);
        while !engine.is_idle() {
            completions.extend(engine.step().unwrap());
        }
        assert_eq!(engine.pages().0, engine.pages().1, "every page is given back");
        assert!(engine.has_capacity(6));
        completions.retain(|completion| completion.group == GroupId(5));
        completions.sort_by_key(|completion| completion.index);
        assert_eq!(completions, expected, "aborted after {steps} steps");
    }
}
