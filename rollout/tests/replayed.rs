//! Trajectories that several versions sampled are sampled again from what is recorded of them.

use std::sync::Arc;

use model::{Sampling, ThreadPool};
use proptest::prelude::*;
use rollout::{
    Completion, DifferentValues, EngineConfig, Episode, ReplayConfig, SampleRequest, TrajectoryReplay,
};
use trajectory::{GroupId, PolicyVersion, Sample, SampleStreams, Score, Trajectory, Turn};

use crate::{CONFIG, Model, request};

const TRUNCATED: Sampling = Sampling { temperature: 0.8, top_p: 0.9, top_k: 12, min_p: 0.01 };

/// Completions of `requests` in an engine that applies a newer version before each of these steps.
fn completed(
    model: &Model,
    config: EngineConfig,
    requests: Vec<SampleRequest>,
    applied: &[usize],
    recomputes: bool,
) -> Vec<Completion> {
    let mut engine = model.engine(config, &[]);
    requests.into_iter().for_each(|request| engine.submit(request).unwrap());
    let (mut step, mut version, mut ended) = (0, PolicyVersion(0), Vec::new());
    while !engine.is_idle() {
        while applied.iter().filter(|at| **at <= step).count() as u64 > version.0 {
            version = version.next();
            engine.apply(model.decoder(&weights(model, version)), version).unwrap();
            if recomputes {
                engine.recompute().unwrap();
            }
        }
        ended.extend(engine.step().unwrap());
        step += 1;
    }
    ended
}

/// The weights of a version.
fn weights(model: &Model, version: PolicyVersion) -> model::Parameters {
    match version.0 {
        0 => model.parameters(),
        version => model::Parameters::random(model.directory.config(), version),
    }
}

fn replay(model: &Model, sampling: Sampling, recomputes: bool) -> TrajectoryReplay {
    let config = ReplayConfig {
        seed: CONFIG.seed,
        sampling,
        stop: model.stop(&[]),
        interruption: None,
        recomputes,
        records_experts: false,
    };
    let mut replay = TrajectoryReplay::new(config, Arc::new(ThreadPool::single()));
    for version in (0..=3).map(PolicyVersion) {
        replay.hold(version, model.decoder(&weights(model, version)).into());
    }
    replay
}

fn trajectory(completion: Completion) -> Trajectory {
    let episode = Episode::from(completion);
    Trajectory {
        index: episode.index,
        sample: episode.sample().unwrap(),
        turns: episode.turns,
        branches: Vec::new(),
        text: episode.text,
        score: Score::default(),
        baseline: episode.baseline,
        role: None,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    /// Wherever newer weights come, also within the prefill of a prompt.
    #[test]
    fn what_several_versions_sampled_is_sampled_again(
        mut applied in prop::collection::vec(0..30usize, 0..=3), prefill_chunk in 1..40usize, recomputes: bool,
        truncated: bool,
    ) {
        applied.sort_unstable();
        let (model, sampling) = (Model::new(), if truncated { TRUNCATED } else { Sampling::PLAIN });
        let config = EngineConfig { prefill_chunk, ..CONFIG };
        let requests = (0..3).map(|group| request(group, 2, sampling)).collect();
        let completions = completed(&model, config, requests, &applied, recomputes);
        prop_assert_eq!(completions.len(), 6);
        let mut replay = replay(&model, sampling, recomputes);
        for completion in completions {
            let group = completion.group;
            let difference = replay.first_difference(group, &trajectory(completion)).unwrap();
            prop_assert_eq!(difference, None);
        }
    }
}

/// A trajectory of two versions, with the token at which the second begins.
fn of_two_versions(model: &Model) -> (Trajectory, usize) {
    let completions = completed(model, CONFIG, vec![request(7, 4, Sampling::PLAIN)], &[8], false);
    let two = |completion: &Completion| completion.versions.len() == 2 && completion.versions[1].len > 2;
    let completion = completions.into_iter().find(two).expect("one is sampled by two versions");
    let begins = completion.prompt_length + completion.versions[0].len as usize;
    (trajectory(completion), begins)
}

fn changed(trajectory: &Trajectory, change: impl FnOnce(&mut SampleStreams)) -> Trajectory {
    let mut streams = SampleStreams::from(trajectory.sample.clone());
    change(&mut streams);
    Trajectory { sample: Sample::new(streams).unwrap(), ..trajectory.clone() }
}

#[test]
fn a_changed_token_log_probability_or_version_is_found_where_it_is() {
    let model = Model::new();
    let (recorded, begins) = of_two_versions(&model);
    let mut replay = replay(&model, Sampling::PLAIN, false);
    let mut first = |trajectory: &Trajectory| replay.first_difference(GroupId(7), trajectory).unwrap();
    assert_eq!(first(&recorded), None);

    let other = changed(&recorded, |streams| streams.token_ids[begins] ^= 1);
    let found = first(&other).unwrap();
    assert_eq!((found.token, found.version), (begins, PolicyVersion(1)));
    assert!(matches!(found.values, DifferentValues::Token { .. }), "{found}");

    let near = |value: f32| f32::from_bits(value.to_bits() + 1);
    let other = changed(&recorded, |streams| {
        streams.behavior_logprobs[begins + 1] = near(streams.behavior_logprobs[begins + 1]);
    });
    let found = first(&other).unwrap();
    assert_eq!(found.token, begins + 1);
    assert!(matches!(found.values, DifferentValues::Logprob { .. }), "{found}");

    // As if the second version had begun a token earlier.
    let other = changed(&recorded, |streams| {
        let runs = streams.versions.len();
        streams.versions[runs - 2].len -= 1;
        streams.versions[runs - 1].len += 1;
    });
    assert_eq!(first(&other).unwrap().token, begins - 1);

    let turn =
        |end| Turn { completion: recorded.turns[0].completion.start..end, ..recorded.turns[0].clone() };
    let other = Trajectory { turns: vec![turn(recorded.sample.token_ids().len() + 5)], ..recorded.clone() };
    assert!(matches!(first(&other).unwrap().values, DifferentValues::Record(_)));
}

#[test]
fn a_trajectory_of_a_version_without_weights_cannot_be_sampled_again() {
    let model = Model::new();
    let (recorded, _) = of_two_versions(&model);
    let mut replay = replay(&model, Sampling::PLAIN, false);
    assert!(replay.can_sample(&recorded));
    replay.free_before(PolicyVersion(1));
    assert!(!replay.can_sample(&recorded));
}
