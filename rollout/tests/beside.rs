//! What an engine does beside sampling: texts put into completions, and greedy baselines.

use std::ops::RangeInclusive;

use model::{Pack, Sampling, Target, ThreadPool};
use proptest::prelude::*;
use rollout::{Completion, EngineConfig, Interruption, RolloutError, SampleRequest};
use trajectory::StopReason;

use crate::{CONFIG, Model, complete, request};

const TRUNCATED: Sampling = Sampling { temperature: 0.8, top_p: 0.9, top_k: 12, min_p: 0.01 };
const TEXT: &str = "Time.";
const AFTER: RangeInclusive<usize> = 4..=12;

fn interruption(model: &Model) -> Interruption {
    Interruption::new(TEXT, AFTER, &model.stop(&[]), 24).unwrap()
}

/// All completions of some groups, interrupted or not, and how many the engine says were interrupted.
fn sampled(
    model: &Model,
    config: EngineConfig,
    sampling: Sampling,
    interrupted: bool,
) -> (Vec<Completion>, u64) {
    let interruption = interrupted.then(|| interruption(model));
    let mut engine = model.engine(config, &[]).interrupting(interruption);
    let completions = complete(&mut engine, (0..8).map(|g| request(g, 4, sampling)).collect());
    (completions, engine.counts().interrupted)
}

#[test]
fn a_text_is_put_in_at_its_place_and_not_trained_on() {
    let model = Model::new();
    for sampling in [Sampling::PLAIN, TRUNCATED] {
        let (free, none) = sampled(&model, CONFIG, sampling, false);
        let (completions, counted) = sampled(&model, CONFIG, sampling, true);
        assert_eq!((none, completions.len()), (0, free.len()));
        let mut places = Vec::new();
        for (completion, free) in completions.iter().zip(&free) {
            let Some(inserted) = completion.inserted.clone() else {
                assert_eq!(completion, free, "one that ended before is as it was");
                continue;
            };
            assert!(AFTER.contains(&inserted.start) && inserted.len() == TEXT.len());
            places.push(inserted.start);
            let prompt = completion.prompt_length;
            let before = prompt + inserted.start;
            assert_eq!(completion.token_ids[..before], free.token_ids[..before], "nothing else has changed");
            assert!(completion.text.contains(TEXT), "{}", completion.text);
            let sample = completion.sample().unwrap();
            for t in 0..sample.token_ids().len() {
                let trained = t >= prompt && !inserted.contains(&(t - prompt));
                assert_eq!(sample.loss_mask()[t], trained);
                assert!(trained || sample.behavior_logprobs()[t] == 0.0);
            }
            assert_eq!(sample.kept().is_some(), sampling.truncates());
        }
        assert_eq!(places.len() as u64, counted);
        places.sort_unstable();
        places.dedup();
        assert!(places.len() > 3, "places differ: {places:?}");
    }
}

/// What comes after the text is sampled from what the policy thinks after reading it.
#[test]
fn sampling_goes_on_after_the_text() {
    let model = Model::new();
    let decoder = model.decoder(&model.parameters());
    let (completions, counted) = sampled(&model, CONFIG, Sampling::PLAIN, true);
    assert!(counted > 0);
    let mut after = 0;
    for completion in completions {
        let sample = completion.sample().unwrap();
        let mut pack = Pack::new();
        pack.push(sample.token_ids()).unwrap();
        let rows: Vec<usize> =
            (0..sample.token_ids().len() - 1).filter(|row| sample.loss_mask()[row + 1]).collect();
        let target =
            |row: &usize| Target { token: sample.token_ids()[row + 1], temperature: 1.0, kept: None };
        let targets: Vec<_> = rows.iter().map(target).collect();
        let scored = decoder.score(&pack, &rows, &targets, &ThreadPool::single()).unwrap();
        let recorded = rows.iter().map(|row| sample.behavior_logprobs()[row + 1]);
        assert!(scored.iter().map(|prediction| prediction.logprob).eq(recorded));
        let end = completion.inserted.map_or(usize::MAX, |inserted| inserted.end + completion.prompt_length);
        after += rows.iter().filter(|row| **row + 1 >= end).count();
    }
    assert!(after > 20, "{after} tokens were sampled after the text");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]
    #[test]
    fn the_position_of_an_interruption_does_not_depend_on_batching(max_running in 1..20usize, prefill_chunk in 1..50usize) {
        let model = Model::new();
        let config = EngineConfig { max_running, prefill_chunk, ..CONFIG };
        let expected = sampled(&model, CONFIG, Sampling::PLAIN, true);
        prop_assert_eq!(sampled(&model, config, Sampling::PLAIN, true), expected);
    }
}

#[test]
fn a_stop_string_after_the_text_ends_the_completion() {
    let model = Model::new();
    let (free, _) = sampled(&model, CONFIG, Sampling::PLAIN, true);
    let tail = |c: &&Completion| c.inserted.as_ref().is_some_and(|at| at.end + 4 < c.logprobs.len());
    let long = free.iter().find(tail).expect("some completion goes on for a while");
    let after = &long.text[long.text.find(TEXT).unwrap() + TEXT.len()..];
    let stop: String = after.chars().skip(1).take(2).collect();
    let before = &long.text[..long.text.find(&stop).unwrap()];
    let mut engine = model.engine(CONFIG, &[&stop]).interrupting(Some(interruption(&model)));
    let stopped = complete(&mut engine, (0..8).map(|g| request(g, 4, Sampling::PLAIN)).collect());
    let same = stopped.iter().find(|c| (c.group, c.index) == (long.group, long.index)).unwrap();
    assert_eq!((same.stop, &same.text[..]), (StopReason::StopString, before));
    assert!(long.token_ids.starts_with(&same.token_ids));
    same.sample().unwrap();
}

#[test]
fn a_text_that_cannot_be_put_in_is_refused() {
    let model = Model::new();
    let refused = |text: &str, after, strings: &[&str], evidence: &str| {
        let error = Interruption::new(text, after, &model.stop(strings), 24).unwrap_err();
        assert!(matches!(error, RolloutError::Interruption { .. }) && error.is_input());
        assert!(error.to_string().contains(evidence), "{error}");
    };
    refused("", AFTER, &[], "has no tokens");
    refused("so 4#", AFTER, &["4#"], "holds the stop string `4#`");
    refused(TEXT, 4..=19, &[], "leave none of rollout.max_completion_length = 24");
}

#[test]
fn a_baseline_is_greedy_and_changes_nothing_else() {
    let model = Model::new();
    let with = |baseline| move |g| SampleRequest { baseline, ..request(g, 3, TRUNCATED) };
    let mut engine = model.engine(CONFIG, &[]);
    let both = complete(&mut engine, (0..5).map(with(true)).collect());
    assert_eq!(engine.pages().0, engine.pages().1, "every page is given back");
    let prefilled = engine.counts().prefilled_tokens;
    let (baselines, others): (Vec<_>, Vec<_>) = both.into_iter().partition(|c| c.baseline);
    let mut alone = model.engine(CONFIG, &[]);
    assert_eq!(complete(&mut alone, (0..5).map(with(false)).collect()), others);
    assert_eq!(alone.counts().prefilled_tokens, prefilled, "the prompt is prefilled once");
    let greedy =
        complete(&mut model.engine(CONFIG, &[]), (0..5).map(|g| request(g, 1, Sampling::GREEDY)).collect());
    assert_eq!(baselines.len(), 5);
    for (baseline, greedy) in baselines.iter().zip(&greedy) {
        assert_eq!((baseline.group, baseline.index), (greedy.group, 3));
        assert_eq!(baseline.token_ids, greedy.token_ids);
        let sample = baseline.sample().unwrap();
        assert_eq!((sample.trained_tokens(), sample.kept()), (0, None));
        assert!(greedy.sample().is_err(), "what is sampled greedily cannot be trained on");
    }
}
