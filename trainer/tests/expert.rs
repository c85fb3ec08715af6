//! Ranks that divide experts make the step of ranks with all of them, bit for bit, and go on with what others saved.

use std::sync::Arc;
use std::time::Instant;

use collective::{HostCollective, threads};
use model::{
    Architecture, Config, Parameters, Prediction, PredictionGradient, Recompute, Reduction, ThreadPool,
};
use trainer::learner::RowLoss;
use trainer::lora::{Adapter, LoraConfig, TargetModule};
use trainer::optimizer::{Optimizer, OptimizerKind};
use trainer::report::TokenSums;
use trainer::supervised::imitate;
use trainer::{ContextParallel, Leader, Learner, LearnerConfig, ParallelConfig, follow};

use crate::elastic::losing;
use crate::spread::{Processes, SOON};
use crate::{LEARNER, config, groups, policy_step, samples, with_optimizer};

/// What a learner did.
#[derive(Debug, PartialEq)]
struct Stepped {
    steps: Vec<(f32, TokenSums)>,
    weights: Vec<u32>,
    optimizer: Optimizer,
    scores: Vec<Vec<Prediction>>,
}

/// Settings of `data` times `context` ranks, which divide experts.
fn settings(data: usize, context: usize, sections: usize) -> LearnerConfig {
    let world = data * context;
    let context = ContextParallel { degree: context, sections, exchange: None };
    let parallel = ParallelConfig { context, expert: world, ..ParallelConfig::DATA };
    LearnerConfig { world, parallel, microbatch_tokens: 40, zero: 3, ..LEARNER }
}

/// The same with a division of experts among `expert` of them.
fn divided(expert: usize, settings: LearnerConfig) -> LearnerConfig {
    LearnerConfig { parallel: ParallelConfig { expert, ..settings.parallel }, ..settings }
}

/// The same without a division of experts.
fn whole(settings: LearnerConfig) -> LearnerConfig {
    divided(1, settings)
}

/// The same with an optimizer of this kind.
fn optimized(kind: OptimizerKind, settings: LearnerConfig) -> LearnerConfig {
    LearnerConfig { optimizer: with_optimizer(kind).optimizer, ..settings }
}

fn stepped(learner: &mut Learner, steps: usize) -> Stepped {
    let groups = groups();
    let steps = (0..steps).map(|_| policy_step(learner, &groups, 1e-2)).collect();
    let weights = learner.parameters().unwrap();
    Stepped {
        steps,
        weights: weights.values().iter().map(|value| value.to_bits()).collect(),
        optimizer: learner.optimizer().unwrap().into_owned(),
        scores: learner.score(&samples(&groups)).unwrap(),
    }
}

fn learner(settings: LearnerConfig, model: &Config) -> Learner {
    Learner::new(settings, model.clone(), Parameters::random(model, 5), None).unwrap()
}

fn with_experts(architecture: Architecture) -> Config {
    config().of_family(architecture)
}

#[test]
fn every_degree_has_the_bits_of_one_rank() {
    ranks_have_the_bits_of_one(|architecture, kind| {
        kind == OptimizerKind::Adamw || architecture == Architecture::GptOss
    });
}

#[test]
#[ignore = "takes a minute; each model with one optimizer or more is above"]
fn ranks_have_the_bits_of_one_in_all_combinations() {
    ranks_have_the_bits_of_one(|_, _| true);
}

/// For combinations of a model and an optimizer.
fn ranks_have_the_bits_of_one(includes: impl Fn(Architecture, OptimizerKind) -> bool) {
    for architecture in [Architecture::Qwen3Moe, Architecture::Glm4Moe, Architecture::GptOss] {
        let model = with_experts(architecture);
        for kind in [OptimizerKind::Adamw, OptimizerKind::Muon] {
            if !includes(architecture, kind) {
                continue;
            }
            let of = |settings| optimized(kind, settings);
            let one = |sections| stepped(&mut learner(of(whole(settings(1, 1, sections))), &model), 2);
            let (expected, of_sections) = (one(1), one(4));
            assert!(expected.steps[1].0 > 0.0, "it learns");
            for (data, context, sections) in
                [(1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 1, 4), (1, 2, 4), (2, 2, 4)]
            {
                let recompute = [Recompute::None, Recompute::Block][usize::from(data > 1)];
                let settings = LearnerConfig { recompute, ..settings(data, context, sections) };
                let found = stepped(&mut learner(of(settings), &model), 2);
                let expected = if sections == 1 { &expected } else { &of_sections };
                assert!(found == *expected, "{architecture:?} {kind:?}: {data} x {context} in {sections}");
            }
        }
    }
}

/// Ranks with the same experts have shards of them, also where tensor ranks have parts of every expert, and stages its layers.
#[test]
fn ranks_share_the_experts_that_they_have_in_common() {
    for architecture in [Architecture::Qwen3Moe, Architecture::Glm4Moe] {
        let model = Config { reduction: Reduction::Tree, ..with_experts(architecture) };
        for kind in [OptimizerKind::Adamw, OptimizerKind::Muon] {
            let of = |settings| optimized(kind, settings);
            let one = |sections| stepped(&mut learner(of(whole(settings(1, 1, sections))), &model), 2);
            let (expected, of_sections) = (one(1), one(4));
            for (data, [tensor, context, pipeline], expert) in [
                (4, [1, 1, 1], 2),
                (2, [1, 2, 1], 2),
                (2, [2, 1, 1], 2),
                (4, [2, 1, 1], 2),
                (2, [1, 1, 2], 2),
                (4, [2, 1, 2], 2),
                (2, [2, 2, 1], 4),
            ] {
                if tensor > 1 && kind == OptimizerKind::Muon {
                    continue;
                }
                let sections = if context > 1 { 4 } else { 1 };
                let settings = settings(data, context, sections);
                let parallel = ParallelConfig { tensor, pipeline, expert, ..settings.parallel };
                let world = data * tensor * context * pipeline;
                let recompute = [Recompute::None, Recompute::Block][usize::from(world > 4)];
                let settings = of(LearnerConfig { world, parallel, recompute, ..settings });
                let found = stepped(&mut learner(settings, &model), 2);
                let expected = if sections == 1 { &expected } else { &of_sections };
                assert!(found == *expected, "{architecture:?} {kind:?}: {world} ranks, {parallel:?}");
            }
        }
    }
}

#[test]
fn a_run_goes_on_with_another_split() {
    let model = with_experts(Architecture::Qwen3Moe);
    let expected = stepped(&mut learner(whole(settings(1, 1, 1)), &model), 4);
    for (before, after) in [
        (settings(2, 1, 1), settings(4, 1, 1)),
        (settings(4, 1, 1), whole(settings(2, 1, 1))),
        (whole(settings(4, 1, 1)), settings(2, 1, 1)),
        (divided(2, settings(4, 1, 1)), settings(2, 1, 1)),
        (settings(4, 1, 1), divided(2, settings(4, 1, 1))),
    ] {
        let mut first = learner(before, &model);
        stepped(&mut first, 2);
        let (parameters, optimizer) = (first.parameters().unwrap(), first.optimizer().unwrap().into_owned());
        let parameters = Arc::unwrap_or_clone(parameters);
        let mut second = Learner::new(after, model.clone(), parameters, Some(optimizer)).unwrap();
        let found = stepped(&mut second, 2);
        assert_eq!(found.weights, expected.weights);
        assert!(found.optimizer == expected.optimizer && found.scores == expected.scores);
    }
}

/// Ranks that are processes exchange everything in messages; here threads follow the leader.
#[test]
fn processes_divide_experts() {
    let (groups, model) = (groups(), with_experts(Architecture::Glm4Moe));
    let rows = samples(&groups);
    let imitated = |learner: &mut Learner, steps: usize| {
        for _ in 0..steps {
            imitate(learner, &rows, 1e-2).unwrap();
        }
        let (weights, optimizer) = (learner.parameters().unwrap(), learner.optimizer().unwrap().into_owned());
        (Arc::unwrap_or_clone(weights), optimizer)
    };
    let (weights, optimizer) = imitated(&mut learner(whole(settings(1, 1, 4)), &model), 3);
    let run = |expert: usize, optimizer: Option<Optimizer>, parameters: Parameters, steps| {
        let mut ranks = threads::group(4, LEARNER.wait).into_iter();
        let leader = Leader::new(Arc::new(ranks.next().unwrap()));
        let start = |rank| std::thread::spawn(move || follow(Arc::new(rank), Arc::new(ThreadPool::single())));
        let followers: Vec<_> = ranks.map(start).collect();
        let mut learner = leader
            .learner(divided(expert, settings(2, 2, 4)), model.clone(), parameters, None, optimizer)
            .unwrap();
        let found = imitated(&mut learner, steps);
        drop((learner, leader));
        for follower in followers {
            follower.join().unwrap().unwrap();
        }
        found
    };
    let (first, states) = run(4, None, Parameters::random(&model, 5), 1);
    let (found, states) = run(2, Some(states), first, 2);
    assert!(found.values() == weights.values() && states == optimizer);
}

/// A loss that panics on the rank whose first row is row 0.
struct FirstPanics;

impl RowLoss for FirstPanics {
    type Report = ();

    fn row(&self, row: usize, predictions: &[Prediction], (): &mut ()) -> Vec<PredictionGradient> {
        assert!(row != 0, "the first row is bad");
        vec![PredictionGradient { logprob: 0.1, ..PredictionGradient::default() }; predictions.len()]
    }
}

/// The other ranks wait for its rows in the backward, and no rank waits for the deadline.
#[test]
fn a_rank_that_ends_in_a_pass_is_named_and_ends_the_others_at_once() {
    let groups = groups();
    let rows = samples(&groups);
    let mut learner = learner(settings(4, 1, 1), &with_experts(Architecture::Qwen3Moe));
    let begin = Instant::now();
    let error = learner.step(&rows, &FirstPanics, 1e-3).unwrap_err();
    assert!(begin.elapsed() < LEARNER.wait, "the others waited for the deadline");
    let message = error.to_string();
    assert!(message.contains("the first row is bad") && message.contains("of 4 failed"), "{message}");
    let error = imitate(&mut learner, &rows, 1e-3).unwrap_err();
    assert!(error.to_string().contains("ended after an earlier error"), "{error}");
}

/// Its peers wait for the numbers of its rows in the first layer.
#[test]
fn a_process_that_is_gone_is_named_by_all() {
    let (groups, model) = (groups(), with_experts(Architecture::Qwen3Moe));
    let rows = samples(&groups);
    let mut ranks: Vec<Arc<dyn HostCollective>> =
        threads::group(4, LEARNER.wait).into_iter().map(|rank| Arc::new(rank) as Arc<_>).collect();
    let dying = ranks.remove(2);
    let leader = Leader::new(ranks.remove(0));
    let start = |rank| std::thread::spawn(move || follow(rank, Arc::new(ThreadPool::single())));
    let lasting: Vec<_> = ranks.into_iter().map(start).collect();
    let units = model.num_layers() + 2;
    let dying = std::thread::spawn(move || {
        (0..=units).for_each(|_| drop(dying.broadcast_bytes(0, Vec::new()).unwrap()));
        let expert = dying.split(0).unwrap();
        drop((expert, dying));
    });
    let parameters = Parameters::random(&model, 5);
    let mut learner = leader.learner(settings(4, 1, 1), model, parameters, None, None).unwrap();
    dying.join().unwrap();
    let begin = Instant::now();
    let error = imitate(&mut learner, &rows, 1e-3).unwrap_err();
    assert!(error.to_string().contains("rank 2"), "{error}");
    drop((learner, leader));
    for rank in lasting {
        let error = rank.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("rank 2") || error.to_string().contains("rank 0"), "{error}");
    }
    assert!(begin.elapsed() < LEARNER.wait);
}

/// Ranks with the same experts call each other, too: wherever one of them is lost, its peers name it, and no rank waits for the
/// deadline.
#[test]
fn a_rank_of_those_with_the_same_experts_can_be_lost_at_any_call() {
    a_rank_is_lost_every(6);
}

#[test]
#[ignore = "takes a minute; one of six calls is above"]
fn a_rank_of_those_with_the_same_experts_can_be_lost_at_every_call() {
    a_rank_is_lost_every(1);
}

/// At one call of so many.
fn a_rank_is_lost_every(calls_each: usize) {
    let (groups, model) = (groups(), with_experts(Architecture::Qwen3Moe));
    let rows = samples(&groups);
    let stepped = |processes: &Processes, calls: &dyn Fn() -> usize| {
        let (settings, parameters) = (divided(2, settings(4, 1, 1)), Parameters::random(&model, 5));
        let learner = processes.leader.learner(settings, model.clone(), parameters, None, None);
        let mut learner = learner.unwrap();
        // The ranks have their shards.
        learner.optimizer().unwrap();
        let before = calls();
        (before, imitate(&mut learner, &rows, 1e-2).map(drop))
    };
    let (undisturbed, calls) = losing(4, usize::MAX);
    let (before, made) = stepped(&undisturbed, &calls);
    made.unwrap();
    undisturbed.end();
    let after = calls() - 1;
    assert!(after - before > 20, "from {before} to {after}");
    for lost_after in (before..after).step_by(calls_each) {
        let (processes, calls) = losing(4, lost_after);
        let begin = Instant::now();
        let error = stepped(&processes, &calls).1.unwrap_err().to_string();
        assert!(error.contains("is gone"), "after {lost_after} calls of {before} to {after}: {error}");
        // A rank may hear of one that ended because of it, whose own error names it: among ranks [1, 3] and [2, 3] it is rank 1.
        let mut errors = processes.errors();
        errors.truncate(2);
        errors.push(error);
        let names = |error: &String| {
            let in_group = error.contains(", 3], which") && error.contains(": rank 1 is gone");
            in_group || error.contains(": rank 3 is gone")
        };
        assert!(errors.iter().any(names), "after {lost_after} calls: {errors:?}");
        assert!(begin.elapsed() < SOON, "after {lost_after} calls a rank waited for the deadline");
    }
}

#[test]
fn what_is_not_possible_is_named() {
    let model = with_experts(Architecture::Qwen3Moe);
    let parameters = Parameters::random(&model, 5);
    let refused = |settings: LearnerConfig, expected: &str| {
        let error = Learner::new(settings, model.clone(), parameters.clone(), None).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    refused(divided(4, settings(6, 1, 1)), "not divisible by trainer.parallel.expert = 4; 2 is possible");
    refused(divided(4, settings(2, 1, 1)), "2 ranks divide the rows and tokens of a step");
    refused(settings(3, 1, 1), "4 experts are not divisible by 3; 2 divides them");
    refused(LearnerConfig { zero: 2, ..settings(2, 1, 1) }, "set trainer.zero = 3");
    refused(LearnerConfig { recompute: Recompute::Sequence, ..settings(2, 1, 1) }, "trainer.recompute");
    let dense = config();
    let error = Learner::new(settings(2, 1, 1), dense.clone(), Parameters::random(&dense, 5), None);
    assert!(error.unwrap_err().to_string().contains("the model has no experts"));
    let lora = LoraConfig { rank: 2, alpha: 4.0, target_modules: TargetModule::BLOCK.to_vec() };
    let adapter = Adapter::new(lora, &parameters, 3);
    let error = Learner::adapting(settings(2, 1, 1), model.clone(), parameters.clone(), adapter, None);
    assert!(error.unwrap_err().to_string().contains("under an adapter"));
}
