//! New weights in the middle of a completion.

use model::{Pack, Sampling, Target, ThreadPool};
use rollout::{Completion, Engine};
use trajectory::PolicyVersion;

use crate::{CONFIG, Model, request};

/// Generates two groups and swaps the weights after a few steps; `recompute` says what happens to the cache.
fn with_update(model: &Model, recompute: bool) -> Vec<Completion> {
    let mut engine: Engine = model.engine(CONFIG, &[]);
    for group in [2, 5] {
        engine.submit(request(group, 3, Sampling::PLAIN)).unwrap();
    }
    let mut completions = Vec::new();
    for _ in 0..9 {
        completions.extend(engine.step().unwrap());
    }
    engine.apply(model.decoder(&model.other_parameters()), PolicyVersion(4)).unwrap();
    if recompute {
        engine.recompute().unwrap();
    }
    while !engine.is_idle() {
        completions.extend(engine.step().unwrap());
    }
    completions.sort_by_key(|c| (c.group, c.index));
    completions
}

/// Log-probabilities of the sampled tokens if the whole sequence is run under the new weights.
fn under_new_weights(model: &Model, completion: &Completion) -> Vec<f32> {
    let decoder = model.decoder(&model.other_parameters());
    let mut pack = Pack::new();
    pack.push(&completion.token_ids).unwrap();
    let rows: Vec<usize> = (completion.prompt_length - 1..completion.token_ids.len() - 1).collect();
    let target = |row: &usize| Target { token: completion.token_ids[row + 1], temperature: 1.0, kept: None };
    let targets: Vec<_> = rows.iter().map(target).collect();
    decoder.score(&pack, &rows, &targets, &ThreadPool::single()).unwrap().iter().map(|p| p.logprob).collect()
}

#[test]
fn every_token_remembers_the_version_that_sampled_it() {
    let model = Model::new();
    let completions = with_update(&model, false);
    assert_eq!(completions.len(), 6);
    assert!(completions.iter().any(|c| c.versions.len() == 2), "some completion saw both versions");
    for completion in &completions {
        let versions: Vec<u64> = completion.versions.iter().map(|run| run.version.0).collect();
        assert!([&[0][..], &[0, 4], &[4]].contains(&&versions[..]), "{versions:?}");
        let covered: usize = completion.versions.iter().map(|run| run.len as usize).sum();
        assert_eq!(covered, completion.logprobs.len());
        // A prompt that was begun under the old weights has keys and values of theirs.
        let oldest = completion.prompt_version.min(PolicyVersion(versions[0]));
        assert_eq!(completion.sample().unwrap().oldest_version(), oldest);
    }
}

/// A prompt that was half in the cache when the weights changed.
#[test]
fn a_prompt_remembers_the_version_that_began_to_prefill_it() {
    let model = Model::new();
    for (recompute, expected) in [(false, PolicyVersion(0)), (true, PolicyVersion(4))] {
        let mut engine = model.engine(CONFIG, &[]);
        let request = request(4, 2, Sampling::PLAIN);
        let length = request.prompt.len();
        assert!(length > CONFIG.prefill_chunk);
        engine.submit(request).unwrap();
        engine.step().unwrap();
        engine.apply(model.decoder(&model.other_parameters()), PolicyVersion(4)).unwrap();
        if recompute {
            engine.recompute().unwrap();
        }
        let mut completions = Vec::new();
        while !engine.is_idle() {
            completions.extend(engine.step().unwrap());
        }
        for completion in completions {
            let sample = completion.sample().unwrap();
            let first = sample.versions()[0];
            assert_eq!((completion.prompt_version, first.version), (expected, expected));
            assert_eq!(sample.versions().len(), if recompute { 1 } else { 2 });
            assert!(recompute || first.len as usize == length);
            assert_eq!(completion.logprobs == under_new_weights(&model, &completion), recompute);
        }
    }
}

#[test]
fn recomputed_keys_and_values_are_those_of_the_new_weights() {
    let model = Model::new();
    let (mut kept_differs, mut compared) = (false, 0);
    for (recompute, completions) in [true, false].map(|r| (r, with_update(&model, r))) {
        for completion in completions.iter().filter(|c| c.versions.len() == 2) {
            let old = completion.versions[0].len as usize;
            let (ours, full) = (&completion.logprobs[old..], &under_new_weights(&model, completion)[old..]);
            if recompute {
                assert_eq!(ours, full, "after a recompute nothing remembers the old weights");
                compared += ours.len();
            } else {
                kept_differs |= ours != full;
            }
        }
    }
    assert!(compared > 0 && kept_differs, "keeping the old cache is another distribution");
}

/// A sampler that stands still without weights in the middle of everything: completions that run, prompts half in the cache.
#[test]
fn an_engine_that_slept_frees_its_memory_and_continues_bit_for_bit() {
    let model = Model::new();
    for update in [false, true] {
        let new = |engine: &Engine| {
            let parameters = if update { model.other_parameters() } else { model.parameters() };
            let version = if update { PolicyVersion(4) } else { engine.version() };
            (model.decoder(&parameters), version)
        };
        for steps in 0..12 {
            let run = |sleeps: bool| {
                let mut engine = model.engine(CONFIG, &[]);
                (0..4).for_each(|group| engine.submit(request(group * 3, 2, Sampling::PLAIN)).unwrap());
                let mut completions = Vec::new();
                for _ in 0..steps {
                    completions.extend(engine.step().unwrap());
                }
                let (decoder, version) = new(&engine);
                let before = engine.bytes();
                if sleeps {
                    assert_eq!((engine.sleep(), engine.bytes(), engine.is_asleep()), (before, 0, true));
                    assert_eq!(engine.sleep(), 0, "there is nothing left to free");
                    engine.wake_up(decoder, version).unwrap();
                    assert_eq!((engine.bytes(), engine.is_asleep()), (before, false));
                } else if update {
                    engine.apply(decoder, version).unwrap();
                    engine.recompute().unwrap();
                }
                while !engine.is_idle() {
                    completions.extend(engine.step().unwrap());
                }
                assert_eq!(engine.pages().0, engine.pages().1, "every page is given back");
                completions.sort_by_key(|c| (c.group, c.index));
                completions
            };
            assert_eq!(run(true), run(false), "asleep after {steps} steps");
        }
    }
}
