//! The engine with a model that has a recurrence: whatever is shared, cut, kept or computed again, its completions are those of the
//! trainer.

use model::{Architecture, KvCache, Pack, Parameters, Sampling, Target, ThreadPool};
use proptest::prelude::*;
use rollout::engine::Speculation;
use rollout::{Completion, Engine, EngineConfig, RequestOptions, SampleRequest};
use trajectory::{GroupId, PolicyVersion};

use crate::{CONFIG, Model, complete, request, sampled};

/// A tiny model whose first layer has a recurrence.
fn recurrent() -> Model {
    let model = Model::of_family(Architecture::Qwen35, 160);
    assert!(model.directory.config().state_len() > 0);
    model
}

/// Log-probabilities of the sampled tokens if the whole sequence is run under `parameters`.
fn scored(model: &Model, parameters: &Parameters, completion: &Completion) -> Vec<f32> {
    let decoder = model.decoder(parameters);
    let mut pack = Pack::new();
    pack.push(&completion.token_ids).unwrap();
    let rows: Vec<usize> = (completion.prompt_length - 1..completion.token_ids.len() - 1).collect();
    let target = |row: &usize| Target { token: completion.token_ids[row + 1], temperature: 1.0, kept: None };
    let targets: Vec<_> = rows.iter().map(target).collect();
    decoder.score(&pack, &rows, &targets, &ThreadPool::single()).unwrap().iter().map(|p| p.logprob).collect()
}

/// Asserts that all log-probabilities are those of the trainer, and that every page is given back.
fn assert_scored(model: &Model, engine: &Engine, completions: &[Completion]) {
    for completion in completions {
        assert_eq!(completion.logprobs, scored(model, &model.parameters(), completion));
    }
    assert_eq!(engine.pages().0, engine.pages().1, "every page is given back");
}

/// A prompt of `length` tokens.
fn of_length(group: u64, samples: usize, length: usize) -> SampleRequest {
    let prompt = (0..length).map(|i| 4 + ((i * 13 + group as usize * 5) % 90) as u32).collect();
    SampleRequest { prompt, ..request(group, samples, Sampling::PLAIN) }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn completions_of_a_group_are_those_of_the_trainer(
        max_running in 1..9usize, prefill_chunk in 1..50usize, samples in 1..6usize, length in 1..40usize
    ) {
        let model = recurrent();
        // The prompts of the last two end with a page.
        let requests = || {
            let lengths = [length, 1 + length / 2, KvCache::PAGE, 2 * KvCache::PAGE];
            (0..).zip(lengths).map(|(group, length)| of_length(group, samples, length)).collect()
        };
        let expected = complete(&mut model.engine(CONFIG, &[]), requests());
        let mut engine = model.engine(EngineConfig { max_running, prefill_chunk, ..CONFIG }, &[]);
        let completions = complete(&mut engine, requests());
        assert_scored(&model, &engine, &completions);
        prop_assert_eq!(completions, expected);
    }
}

/// Requests that begin as an earlier one did: at its end, where its prompt has its last whole page, and elsewhere.
#[test]
fn a_kept_prefix_is_continued_where_there_is_a_state() {
    let model = recurrent();
    let config = EngineConfig { max_prompt_length: 100, ..CONFIG };
    let options = RequestOptions { prefix_cache: Some(7), seed: Some(1), ..RequestOptions::default() };
    let first = SampleRequest { options: options.clone(), ..of_length(1, 2, 40) };
    let mut engine = model.engine(config, &[]);
    let kept = complete(&mut engine, vec![first.clone()]);
    // What the engine knows of the first completion, with more tokens behind it.
    let known = &kept[0].token_ids[..kept[0].token_ids.len() - 1];
    let longer = [known, &[9, 8, 7]].concat();
    let branched = [&first.prompt[..36], &[50, 51, 52, 53, 54]].concat();
    let early = [&first.prompt[..20], &[60, 61]].concat();
    for (prompt, reused) in [(longer, known.len()), (first.prompt.clone(), 32), (branched, 32), (early, 0)] {
        let request = SampleRequest { prompt, options: options.clone(), ..first.clone() };
        let before = engine.counts().reused_tokens;
        let completions = complete(&mut engine, vec![request.clone()]);
        assert_eq!(engine.counts().reused_tokens - before, reused as u64);
        for completion in &completions {
            assert_eq!(completion.logprobs, scored(&model, &model.parameters(), completion));
        }
        let plain = complete(&mut model.engine(config, &[]), vec![request]);
        assert_eq!(sampled(completions), sampled(plain));
    }
    engine.sleep();
    assert_eq!(engine.pages().0, engine.pages().1, "every page is given back");
    assert_eq!(engine.bytes(), 0, "and every state");
}

/// A later turn of an episode resumes from the state of the turn before.
#[test]
fn a_later_turn_resumes_from_the_turn_before() {
    let model = recurrent();
    let config = EngineConfig { max_episode_length: 120, ..CONFIG };
    // A completion that ends before its longest length may have a next turn.
    let digits: Vec<String> = (0..10).map(|digit| digit.to_string()).collect();
    let stop: Vec<&str> = digits.iter().map(String::as_str).collect();
    let mut engine = model.engine(config, &stop);
    let first: Vec<SampleRequest> = (0..3)
        .map(|group| SampleRequest { keep_cache: true, max_completion_length: 60, ..of_length(group, 1, 17) })
        .collect();
    let completions = complete(&mut engine, first);
    let mut turns = 0;
    for completion in completions {
        if completion.token_ids.len() > 70 {
            continue;
        }
        let prompt = [&completion.token_ids[..], &[9, 8, 7]].concat();
        let request = of_length(completion.group.0, 1, 1);
        let request = SampleRequest { prompt, turn: 1, max_completion_length: 20, ..request };
        let before = engine.counts().reused_tokens;
        let later = complete(&mut engine, vec![request]);
        turns += engine.counts().reused_tokens - before;
        assert_eq!(later[0].logprobs, scored(&model, &model.parameters(), &later[0]));
    }
    assert!(turns > 0, "no turn continued another");
    (0..3).for_each(|group| engine.end_episode(GroupId(group), 0));
    assert_eq!(engine.pages().0, engine.pages().1, "every page is given back");
}

/// New weights in the middle of completions, for which the cache is computed again: the rest of each is sampled from them.
#[test]
fn what_is_in_flight_is_computed_again() {
    let model = recurrent();
    for sleeps in [false, true] {
        for steps in [1, 2, 3, 6, 12] {
            let mut engine = model.engine(EngineConfig { max_running: 5, ..CONFIG }, &[]);
            for (group, length) in [(2, 16), (5, 33)] {
                engine.submit(of_length(group, 3, length)).unwrap();
            }
            let mut completions = Vec::new();
            for _ in 0..steps {
                completions.extend(engine.step().unwrap());
            }
            let other = model.other_parameters();
            if sleeps {
                engine.sleep();
                engine.wake_up(model.decoder(&other), PolicyVersion(4)).unwrap();
            } else {
                engine.apply(model.decoder(&other), PolicyVersion(4)).unwrap();
                engine.recompute().unwrap();
            }
            while !engine.is_idle() {
                completions.extend(engine.step().unwrap());
            }
            assert_eq!(completions.len(), 6);
            for completion in &completions {
                let old: usize = completion
                    .versions
                    .iter()
                    .filter(|run| run.version.0 == 0)
                    .map(|run| run.len as usize)
                    .sum();
                assert_eq!(completion.logprobs[old..], scored(&model, &other, completion)[old..]);
            }
            assert_eq!(engine.pages().0, engine.pages().1, "every page is given back");
        }
    }
}

#[test]
fn there_are_no_proposals_that_a_state_could_not_take_back() {
    let model = recurrent();
    let cold = Sampling { temperature: 0.1, ..Sampling::PLAIN };
    let requests = || vec![request(3, 1, cold), request(4, 2, cold)];
    let expected = complete(&mut model.engine(CONFIG, &[]), requests());
    let mut engine = model.engine(CONFIG, &[]).speculating(Speculation::Ngram);
    assert_eq!(complete(&mut engine, requests()), expected);
    assert_eq!(engine.counts().proposed_tokens, 0);
}
