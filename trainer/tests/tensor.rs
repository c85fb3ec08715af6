//! Ranks that share the weights of a pass make the step of one rank, bit for bit, and go on with what others saved.

use std::sync::Arc;

use model::{Architecture, Config, Parameters, Prediction, Recompute, Reduction};
use trainer::lora::{Adapter, LoraConfig, TargetModule};
use trainer::optimizer::{Optimizer, OptimizerKind};
use trainer::supervised::imitate;
use trainer::{ContextParallel, Learner, LearnerConfig, ParallelConfig};

use crate::spread::Processes;
use crate::{LEARNER, config, groups, policy_step, samples, with_optimizer};

/// Models, with their key-value heads: two or four ranks have copies of one.
const MODELS: [(Architecture, usize); 4] = [
    (Architecture::Qwen3, 4),
    (Architecture::Qwen3Moe, 4),
    (Architecture::Qwen3, 1),
    (Architecture::Qwen2, 2),
];

/// A model that four ranks can share.
fn shared(architecture: Architecture, num_kv_heads: usize) -> Config {
    // A vocabulary that no degree divides.
    let config =
        Config { vocab_size: 129, num_heads: 8, num_kv_heads, reduction: Reduction::Tree, ..config() };
    Config { head_dim: 4, ..config }.of_family(architecture)
}

fn settings(tensor: usize, data: usize, zero: usize) -> LearnerConfig {
    LearnerConfig {
        world: tensor * data,
        parallel: ParallelConfig { tensor, ..ParallelConfig::DATA },
        zero,
        ..LEARNER
    }
}

/// All that a run leaves behind, as bits.
#[derive(Debug, PartialEq)]
struct Outcome {
    norms: Vec<u32>,
    weights: Vec<u32>,
    optimizer: Optimizer,
    scores: Vec<Vec<Prediction>>,
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Makes `steps` steps.
fn outcome(learner: &mut Learner, steps: usize) -> Outcome {
    let groups = groups();
    let norms: Vec<f32> = (0..steps).map(|_| policy_step(learner, &groups, 1e-2).0).collect();
    Outcome {
        norms: bits(&norms),
        weights: bits(learner.parameters().unwrap().values()),
        optimizer: learner.optimizer().unwrap().into_owned(),
        scores: learner.score(&samples(&groups)).unwrap(),
    }
}

fn fresh(architecture: Architecture, num_kv_heads: usize, settings: LearnerConfig) -> Learner {
    let config = shared(architecture, num_kv_heads);
    let parameters = Parameters::random(&config, 5);
    Learner::new(settings, config, parameters, None).unwrap()
}

#[test]
fn every_degree_and_stage_makes_the_steps_of_one_rank() {
    ranks_make_the_steps_of_one(|architecture, keys, zero| {
        zero != 2 || (architecture, keys) == (Architecture::Qwen3, 4)
    });
}

#[test]
#[ignore = "takes minutes; each model in two stages is above"]
fn ranks_make_the_steps_of_one_in_all_combinations() {
    ranks_make_the_steps_of_one(|_, _, _| true);
}

/// For combinations of a model, its key-value heads and a stage.
fn ranks_make_the_steps_of_one(includes: impl Fn(Architecture, usize, usize) -> bool) {
    for (architecture, keys) in MODELS {
        for zero in [1, 2, 3].into_iter().filter(|zero| includes(architecture, keys, *zero)) {
            let expected = outcome(&mut fresh(architecture, keys, settings(1, 1, zero)), 2);
            assert!(expected.norms[1] != 0, "it learns");
            for (tensor, data) in [(2, 1), (4, 1), (2, 2), (4, 2)] {
                let found = outcome(&mut fresh(architecture, keys, settings(tensor, data, zero)), 2);
                assert!(found == expected, "{architecture:?}, {keys} keys: {tensor} x {data}, stage {zero}");
            }
        }
    }
}

/// Ranks that share the tokens of a pass, others that share its weights, and others that divide the data.
#[test]
fn context_and_tensor_ranks_make_the_steps_of_one_rank() {
    for architecture in [Architecture::Qwen3, Architecture::Qwen3Moe] {
        for (zero, recompute) in [(2, Recompute::None), (3, Recompute::Block), (3, Recompute::Sequence)] {
            let of = |tensor, degree, data| {
                let context = ContextParallel { degree, sections: 2, exchange: None };
                let parallel = ParallelConfig { tensor, context, ..ParallelConfig::DATA };
                let world = tensor * degree * data;
                let settings = LearnerConfig { world, parallel, zero, recompute, ..LEARNER };
                outcome(&mut fresh(architecture, 4, settings), 2)
            };
            let expected = of(1, 1, 1);
            for (tensor, degree, data) in [(2, 1, 1), (2, 2, 1), (2, 2, 2), (4, 2, 1)] {
                let what =
                    format!("{architecture:?}: {tensor} x {degree} x {data}, stage {zero}, {recompute:?}");
                assert!(of(tensor, degree, data) == expected, "{what}");
            }
        }
    }
}

#[test]
fn a_run_goes_on_with_another_split() {
    goes_on_with_another_split(&[(Architecture::Qwen3Moe, 4), (Architecture::Qwen3, 1)]);
}

#[test]
#[ignore = "takes a minute; two models are above"]
fn a_run_goes_on_with_another_split_in_all_combinations() {
    goes_on_with_another_split(&MODELS);
}

fn goes_on_with_another_split(models: &[(Architecture, usize)]) {
    for &(architecture, keys) in models {
        let config = shared(architecture, keys);
        let whole = outcome(&mut fresh(architecture, keys, settings(1, 1, 2)), 4);
        for (before, after) in [((2, 1), (4, 1)), ((4, 1), (1, 2)), ((1, 1), (2, 2))] {
            let mut first = fresh(architecture, keys, settings(before.0, before.1, 2));
            outcome(&mut first, 2);
            let (parameters, optimizer) =
                (first.parameters().unwrap(), first.optimizer().unwrap().into_owned());
            let after = settings(after.0, after.1, 2);
            let parameters = Arc::unwrap_or_clone(parameters);
            let mut second = Learner::new(after, config.clone(), parameters, Some(optimizer)).unwrap();
            let found = outcome(&mut second, 2);
            assert_eq!(found.weights, whole.weights, "{architecture:?}: {before:?}");
            assert!(found.optimizer == whole.optimizer && found.scores == whole.scores, "{before:?}");
        }
    }
}

/// Ranks that are processes exchange everything in messages; here threads follow the leader.
#[test]
fn processes_share_weights() {
    let (config, groups) = (shared(Architecture::Qwen3Moe, 1), groups());
    let rows = samples(&groups);
    let imitated = |learner: &mut Learner, steps: usize| {
        let reports: Vec<_> = (0..steps).map(|_| imitate(learner, &rows, 1e-2).unwrap()).collect();
        let weights = learner.parameters().unwrap();
        (reports, Arc::unwrap_or_clone(weights), learner.optimizer().unwrap().into_owned())
    };
    for zero in [1, 3] {
        let mut alone = fresh(Architecture::Qwen3Moe, 1, settings(1, 1, zero));
        let (of_alone, expected, optimizer) = imitated(&mut alone, 4);
        let run = |before: Option<Optimizer>, parameters: Parameters, steps| {
            let processes = Processes::new(4);
            let leader = &processes.leader;
            let mut learner =
                leader.learner(settings(2, 2, zero), config.clone(), parameters, None, before).unwrap();
            let found = imitated(&mut learner, steps);
            drop(learner);
            processes.end();
            found
        };
        let (first, parameters, between) = run(None, Parameters::random(&config, 5), 1);
        let (rest, found, at_end) = run(Some(between), parameters, 3);
        assert_eq!(bits(found.values()), bits(expected.values()), "stage {zero}");
        assert!(at_end == optimizer && [first, rest].concat() == of_alone, "stage {zero}");
    }
}

/// Weights that come from elsewhere, as those of islands do, reach every rank.
#[test]
fn trained_values_are_replaced_on_all_ranks() {
    let before = outcome(&mut fresh(Architecture::Qwen3, 4, settings(1, 1, 1)), 2);
    let values: Vec<f32> = before.weights.iter().map(|bits| f32::from_bits(*bits)).collect();
    for zero in [1, 3] {
        let mut learner = fresh(Architecture::Qwen3, 4, settings(2, 2, zero));
        learner.set_trained_values(&values).unwrap();
        assert_eq!(bits(&learner.trained_values().unwrap()), before.weights, "stage {zero}");
        assert!(learner.score(&samples(&groups())).unwrap() == before.scores, "stage {zero}");
    }
}

#[test]
fn what_is_not_possible_is_named() {
    let config = shared(Architecture::Qwen3, 4);
    let parameters = Parameters::random(&config, 5);
    let refused = |settings: LearnerConfig, expected: &str| {
        let error = Learner::new(settings, config.clone(), parameters.clone(), None).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    let three = LearnerConfig { world: 3, ..settings(2, 1, 1) };
    refused(
        three,
        "a world of 3 ranks is not divisible by pipeline x context x tensor = 1 x 1 x 2; 2 ranks are possible",
    );
    refused(settings(16, 1, 1), "8 query heads are not divisible by 16; 8 divides everything");
    let sections = ContextParallel { sections: 2, ..ContextParallel::NONE };
    let copies = ParallelConfig { tensor: 8, context: sections, ..ParallelConfig::DATA };
    refused(
        LearnerConfig { parallel: copies, ..settings(8, 1, 1) },
        "one section only, and a micro-batch has 2; set trainer.parallel.tensor = 4, where there are no copies, or",
    );
    refused(LearnerConfig { world: 1, ..settings(2, 1, 1) }, "2 ranks are possible");
    for kind in [OptimizerKind::Muon, OptimizerKind::Dion, OptimizerKind::Adamw8bit] {
        refused(
            LearnerConfig { optimizer: with_optimizer(kind).optimizer, ..settings(2, 1, 1) },
            "only AdamW",
        );
    }
    let lora = LoraConfig { rank: 2, alpha: 4.0, target_modules: TargetModule::BLOCK.to_vec() };
    let adapter = Adapter::new(lora, &parameters, 3);
    let error = Learner::adapting(settings(2, 1, 1), config.clone(), parameters.clone(), adapter, None);
    assert!(error.unwrap_err().to_string().contains("under an adapter"));
}
