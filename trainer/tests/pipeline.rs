//! Stages that divide the layers make the step of one rank, bit for bit, and go on with what others saved.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use collective::threads;
use model::{
    Architecture, Config, Parameters, Prediction, PredictionGradient, Recompute, Reduction, ThreadPool,
};
use trainer::learner::RowLoss;
use trainer::lora::{Adapter, LoraConfig, TargetModule};
use trainer::optimizer::{Optimizer, OptimizerKind};
use trainer::plan::plan;
use trainer::report::TokenSums;
use trainer::supervised::imitate;
use trainer::{ContextParallel, Leader, Learner, LearnerConfig, ParallelConfig, follow};

use crate::recording::Recording;
use crate::spread::Processes;
use crate::{LEARNER, config, groups, policy_step, samples, with_optimizer};

/// Five layers, with heads that four ranks can share and a head of its own if it is not `tied`.
fn deep(architecture: Architecture, tied: bool) -> Config {
    let base = config();
    let layers = base.layers[..1].repeat(5);
    let config = Config { layers, num_heads: 8, num_kv_heads: 4, head_dim: 4, ..base };
    Config { tie_word_embeddings: tied, reduction: Reduction::Tree, ..config }.of_family(architecture)
}

/// Ranks by what they divide.
#[derive(Clone, Copy, Debug)]
struct Degrees {
    pipeline: usize,
    data: usize,
    context: usize,
    tensor: usize,
}

const ONE: Degrees = Degrees { pipeline: 1, data: 1, context: 1, tensor: 1 };

fn settings(degrees: Degrees, sections: usize, zero: usize) -> LearnerConfig {
    let Degrees { pipeline, data, context, tensor } = degrees;
    let world = pipeline * data * context * tensor;
    let context = ContextParallel { degree: context, sections, exchange: None };
    let parallel = ParallelConfig { tensor, context, pipeline, expert: 1 };
    // Several micro-batches of each leaf.
    LearnerConfig { world, parallel, zero, microbatch_tokens: 20, ..LEARNER }
}

/// What a learner did.
#[derive(Debug, PartialEq)]
struct Done {
    steps: Vec<(f32, TokenSums)>,
    weights: Vec<u32>,
    optimizer: Optimizer,
    scores: Vec<Vec<Prediction>>,
}

fn done(learner: &mut Learner, steps: usize) -> Done {
    let groups = groups();
    let steps = (0..steps).map(|_| policy_step(learner, &groups, 1e-2)).collect();
    Done {
        steps,
        weights: learner.parameters().unwrap().values().iter().map(|value| value.to_bits()).collect(),
        optimizer: learner.optimizer().unwrap().into_owned(),
        scores: learner.score(&samples(&groups)).unwrap(),
    }
}

fn learner(settings: LearnerConfig, model: &Config) -> Learner {
    Learner::new(settings, model.clone(), Parameters::random(model, 5), None).unwrap()
}

#[test]
fn every_degree_and_stage_makes_the_steps_of_one_rank() {
    stages_make_the_steps_of_one(|zero, pipeline, data| {
        zero == 3 || ![(3, 1), (2, 2)].contains(&(pipeline, data))
    });
}

#[test]
#[ignore = "takes a minute; each degree in one ZeRO stage or more is above"]
fn stages_make_the_steps_of_one_in_all_combinations() {
    stages_make_the_steps_of_one(|_, _, _| true);
}

/// For combinations of a ZeRO stage, a number of pipeline stages and the ranks of each.
fn stages_make_the_steps_of_one(includes: impl Fn(usize, usize, usize) -> bool) {
    for (architecture, tied) in [(Architecture::Qwen3, false), (Architecture::Qwen3Moe, true)] {
        let model = deep(architecture, tied);
        for zero in [1, 2, 3] {
            // Of a tied table several micro-batches of a leaf are added in another order in stage 1.
            let of = |degrees| {
                let tokens = if tied && zero == 1 { 10_000 } else { 20 };
                LearnerConfig { microbatch_tokens: tokens, ..settings(degrees, 1, zero) }
            };
            let expected = done(&mut learner(of(ONE), &model), 2);
            assert!(expected.steps[1].0 > 0.0, "it learns");
            for (pipeline, data) in [(2, 1), (3, 1), (5, 1), (2, 2), (4, 2)] {
                if !includes(zero, pipeline, data) {
                    continue;
                }
                let found = done(&mut learner(of(Degrees { pipeline, data, ..ONE }), &model), 2);
                assert!(found == expected, "{architecture:?}: {pipeline} x {data}, stage {zero}");
            }
        }
    }
}

#[test]
fn stages_have_tensor_and_context_ranks() {
    for (architecture, tied) in [(Architecture::Qwen3, true), (Architecture::Qwen3Moe, false)] {
        let model = deep(architecture, tied);
        for (zero, recompute) in [(2, Recompute::None), (3, Recompute::Block), (3, Recompute::Sequence)] {
            let of = |degrees| LearnerConfig { recompute, ..settings(degrees, 2, zero) };
            let expected = done(&mut learner(of(ONE), &model), 2);
            for (context, tensor, data) in [(2, 1, 1), (1, 2, 2), (2, 2, 1)] {
                let degrees = Degrees { pipeline: 2, context, tensor, data };
                let found = done(&mut learner(of(degrees), &model), 2);
                assert!(found == expected, "{architecture:?}: {degrees:?}, stage {zero}, {recompute:?}");
            }
        }
    }
}

#[test]
fn the_ranks_of_a_stage_divide_its_experts() {
    let model = deep(Architecture::Glm4Moe, true);
    let of = |degrees: Degrees, expert| {
        let base = settings(degrees, 1, 3);
        let parallel = ParallelConfig { expert, ..base.parallel };
        LearnerConfig { parallel, router_correction_rate: 0.01, ..base }
    };
    let expected = done(&mut learner(of(ONE, 1), &model), 2);
    for (data, expert) in [(1, 1), (2, 1), (2, 2), (4, 4)] {
        let found = done(&mut learner(of(Degrees { pipeline: 2, data, ..ONE }, expert), &model), 2);
        assert!(found == expected, "{data} ranks of a stage, {expert} for its experts");
    }
}

#[test]
fn other_optimizers_update_the_layers_of_a_stage() {
    let model = deep(Architecture::Qwen3, false);
    for kind in [OptimizerKind::Muon, OptimizerKind::Dion, OptimizerKind::Adamw8bit] {
        let of =
            |degrees| LearnerConfig { optimizer: with_optimizer(kind).optimizer, ..settings(degrees, 1, 2) };
        let expected = done(&mut learner(of(ONE), &model), 2);
        for data in [1, 2] {
            let found = done(&mut learner(of(Degrees { pipeline: 2, data, ..ONE }), &model), 2);
            assert!(found == expected, "{kind:?} x {data}");
        }
    }
}

#[test]
fn a_run_goes_on_with_another_split() {
    goes_on_with_another_split(&[Architecture::Qwen3Moe]);
}

#[test]
#[ignore = "takes a minute; the model with experts is above"]
fn a_run_goes_on_with_another_split_in_all_combinations() {
    goes_on_with_another_split(&[Architecture::Qwen3, Architecture::Qwen3Moe]);
}

fn goes_on_with_another_split(architectures: &[Architecture]) {
    for &architecture in architectures {
        let model = deep(architecture, false);
        let of = |pipeline, data, tensor| settings(Degrees { pipeline, data, tensor, ..ONE }, 1, 2);
        let expected = done(&mut learner(of(1, 1, 1), &model), 4);
        for (before, after) in [((2, 1, 1), (4, 1, 1)), ((3, 1, 1), (1, 2, 1)), ((1, 1, 2), (2, 2, 1))] {
            let mut first = learner(of(before.0, before.1, before.2), &model);
            done(&mut first, 2);
            let (parameters, optimizer) =
                (first.parameters().unwrap(), first.optimizer().unwrap().into_owned());
            let parameters = Arc::unwrap_or_clone(parameters);
            let after = of(after.0, after.1, after.2);
            let mut second = Learner::new(after, model.clone(), parameters, Some(optimizer)).unwrap();
            let found = done(&mut second, 2);
            assert!(found.weights == expected.weights, "{architecture:?}: {before:?}");
            assert!(found.optimizer == expected.optimizer && found.scores == expected.scores, "{before:?}");
        }
    }
}

/// Ranks that are processes exchange everything in messages; here threads follow the leader.
#[test]
fn processes_are_stages() {
    let (model, groups) = (deep(Architecture::Qwen3Moe, false), groups());
    let rows = samples(&groups);
    let imitated = |learner: &mut Learner, steps: usize| {
        let reports: Vec<_> = (0..steps).map(|_| imitate(learner, &rows, 1e-2).unwrap()).collect();
        let weights = Arc::unwrap_or_clone(learner.parameters().unwrap());
        (reports, weights, learner.optimizer().unwrap().into_owned())
    };
    for zero in [1, 3] {
        let (of_alone, expected, optimizer) = imitated(&mut learner(settings(ONE, 1, zero), &model), 4);
        let run = |before: Option<Optimizer>, parameters: Parameters, steps| {
            let processes = Processes::new(4);
            let degrees = Degrees { pipeline: 2, data: 2, ..ONE };
            let leader = &processes.leader;
            let mut learner =
                leader.learner(settings(degrees, 1, zero), model.clone(), parameters, None, before).unwrap();
            let found = imitated(&mut learner, steps);
            drop(learner);
            processes.end();
            found
        };
        let (first, parameters, between) = run(None, Parameters::random(&model, 5), 1);
        let (rest, found, at_end) = run(Some(between), parameters, 3);
        assert!(found.values() == expected.values() && at_end == optimizer, "stage {zero}");
        assert!([first, rest].concat() == of_alone, "stage {zero}");
    }
}

/// Every stage sends a residual stream and a gradient of one for each token, `s h b` bytes each (Megatron-LM, Narayanan et al. 2021, arXiv
/// 2104.04473).
#[test]
fn stages_send_two_hidden_states_for_a_token() {
    let (model, groups) = (deep(Architecture::Qwen3, false), groups());
    let rows = samples(&groups);
    let settings = settings(Degrees { pipeline: 2, ..ONE }, 1, 2);
    let log = Arc::new(Mutex::new(Vec::new()));
    let mut ranks = threads::group(2, settings.wait);
    let follower = ranks.pop().unwrap();
    let follower = std::thread::spawn(move || follow(Arc::new(follower), Arc::new(ThreadPool::single())));
    let leader = Leader::new(Arc::new(Recording::new(ranks.pop().unwrap(), &log)));
    let parameters = Parameters::random(&model, 5);
    let mut learner = leader.learner(settings.clone(), model.clone(), parameters, None, None).unwrap();
    log.lock().unwrap().clear();
    imitate(&mut learner, &rows, 1e-3).unwrap();
    let log = std::mem::take(&mut *log.lock().unwrap());
    drop((learner, leader));
    follower.join().unwrap().unwrap();
    // What the first stage receives is as long as what it sends.
    let moved: usize = log.iter().filter(|(call, ..)| *call == "broadcast").map(|(_, len, _)| len).sum();
    let leaves = plan(&rows, &model, settings.microbatch_tokens, settings.step_leaves());
    let tokens: usize = leaves.iter().flatten().map(|batch| batch.tokens).sum();
    assert_eq!(moved / 2, 2 * tokens * model.hidden_size);
    let waited =
        |name: &str| log.iter().filter(|(call, _, thread)| *call == "broadcast" && thread == name).count();
    let batches = leaves.iter().flatten().count();
    assert_eq!((waited("stage forward"), waited("stage backward")), (batches, batches));
}

/// A loss that panics on the third micro-batch.
struct RowPanics;

impl RowLoss for RowPanics {
    type Report = ();

    fn row(&self, row: usize, predictions: &[Prediction], (): &mut ()) -> Vec<PredictionGradient> {
        assert!(row != 3, "the row is bad");
        vec![PredictionGradient { logprob: 0.1, ..PredictionGradient::default() }; predictions.len()]
    }
}

/// Only the first stage has the loss; the others wait for gradients.
#[test]
fn a_stage_that_ends_is_named_and_ends_the_others_at_once() {
    let groups = groups();
    let rows = samples(&groups);
    for zero in [1, 3] {
        let mut learner =
            learner(settings(Degrees { pipeline: 4, ..ONE }, 1, zero), &deep(Architecture::Qwen3, false));
        let begin = Instant::now();
        let error = learner.step(&rows, &RowPanics, 1e-3).unwrap_err();
        assert!(begin.elapsed() < LEARNER.wait, "the others waited for the deadline");
        let message = error.to_string();
        assert!(message.contains("the row is bad") && message.contains("of 4 failed"), "{message}");
        let error = imitate(&mut learner, &rows, 1e-3).unwrap_err();
        assert!(error.to_string().contains("ended after an earlier error"), "{error}");
    }
}

#[test]
fn what_is_not_possible_is_named() {
    let model = deep(Architecture::Qwen3, false);
    let parameters = Parameters::random(&model, 5);
    let refused = |settings: LearnerConfig, expected: &str| {
        let error = Learner::new(settings, model.clone(), parameters.clone(), None).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    let of = |pipeline| settings(Degrees { pipeline, ..ONE }, 1, 1);
    refused(of(6), "a pipeline degree of 6 is not possible for this model: its 5 layers");
    refused(LearnerConfig { world: 3, ..of(2) }, "pipeline x context x tensor = 2 x 1 x 1; 2 ranks");
    let lora = LoraConfig { rank: 2, alpha: 4.0, target_modules: TargetModule::BLOCK.to_vec() };
    let adapter = Adapter::new(lora, &parameters, 3);
    let error = Learner::adapting(of(2), model.clone(), parameters.clone(), adapter, None).unwrap_err();
    assert!(error.to_string().contains("set trainer.parallel.pipeline = 1"), "{error}");
}
