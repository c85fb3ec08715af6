//! Context ranks make the step of one rank with as many sections, bit for bit, with every ZeRO stage and exchange.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use collective::{HostCollective, threads};
use model::{Config, ContextExchange, Parameters, Prediction, PredictionGradient, Recompute, ThreadPool};
use trainer::learner::RowLoss;
use trainer::optimizer::{Optimizer, OptimizerKind};
use trainer::report::TokenSums;
use trainer::supervised::{DemonstrationLoss, imitate};
use trainer::{ContextParallel, Leader, Learner, LearnerConfig, ParallelConfig, follow};

use crate::router_correction::with_experts;
use crate::spread::Processes;
use crate::{LEARNER, config, groups, policy_step, samples, with_optimizer};

const SECTIONS: usize = 4;

/// What a learner did.
#[derive(Debug, PartialEq)]
struct Stepped {
    steps: Vec<(f32, TokenSums)>,
    weights: Vec<u32>,
    optimizer: Optimizer,
    scores: Vec<Vec<Prediction>>,
}

/// Settings of `data` times `degree` ranks.
fn settings(data: usize, degree: usize, exchange: Option<ContextExchange>) -> LearnerConfig {
    let context = ContextParallel { degree, sections: SECTIONS, exchange };
    let parallel = ParallelConfig { context, ..ParallelConfig::DATA };
    LearnerConfig { world: data * degree, parallel, microbatch_tokens: 40, ..LEARNER }
}

fn stepped(mut learner: Learner) -> Stepped {
    let groups = groups();
    let steps = (0..2).map(|_| policy_step(&mut learner, &groups, 1e-2)).collect();
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

/// The tiny model, one with as many key-value heads as context ranks, and one with experts.
fn models() -> [Config; 3] {
    let even = Config { num_kv_heads: config().num_heads, ..config() };
    [config(), even, with_experts()]
}

#[test]
fn every_degree_stage_and_exchange_has_the_bits_of_one_rank() {
    ranks_have_the_bits_of_one(|model, kind, zero, exchange| {
        let even = model.num_kv_heads == model.num_heads;
        match kind {
            OptimizerKind::Adamw => !even || exchange == Some(ContextExchange::Heads),
            _ => !even && zero == 3 && exchange.is_none(),
        }
    });
}

#[test]
#[ignore = "takes minutes; each stage and exchange with one optimizer is above"]
fn ranks_have_the_bits_of_one_in_all_combinations() {
    ranks_have_the_bits_of_one(|_, _, _, _| true);
}

/// For combinations of a model, an optimizer, a stage and an exchange.
fn ranks_have_the_bits_of_one(
    includes: impl Fn(&Config, OptimizerKind, usize, Option<ContextExchange>) -> bool,
) {
    for model in models() {
        for kind in [OptimizerKind::Adamw, OptimizerKind::Muon] {
            let of = |settings: LearnerConfig| LearnerConfig {
                optimizer: with_optimizer(kind).optimizer,
                ..settings
            };
            let mut expected = None;
            for zero in [1, 2, 3] {
                for (data, degree) in [(1, 2), (1, 4), (2, 2), (2, 1)] {
                    for exchange in [Some(ContextExchange::Keys), Some(ContextExchange::Heads), None] {
                        let heads = exchange == Some(ContextExchange::Heads);
                        let uneven = heads && !model.num_kv_heads.is_multiple_of(degree);
                        if uneven || !includes(&model, kind, zero, exchange) {
                            continue;
                        }
                        let recompute = [Recompute::None, Recompute::Block, Recompute::Sequence][zero - 1];
                        let settings = LearnerConfig { zero, recompute, ..settings(data, degree, exchange) };
                        let found = stepped(learner(of(settings), &model));
                        let one = || stepped(learner(of(self::settings(1, 1, None)), &model));
                        let expected = expected.get_or_insert_with(one);
                        let what =
                            format!("{kind:?}, stage {zero}, data {data}, context {degree}, {exchange:?}");
                        assert!(found == *expected, "{what}, {} experts", model.expert_slots());
                    }
                }
            }
        }
    }
}

#[test]
fn sections_differ_from_none_by_rounding_alone() {
    let one = |sections| {
        let context = ContextParallel { sections, ..ContextParallel::NONE };
        let mut learner = learner(
            LearnerConfig {
                parallel: ParallelConfig { context, ..ParallelConfig::DATA },
                zero: 2,
                ..LEARNER
            },
            &config(),
        );
        policy_step(&mut learner, &groups(), 1e-2)
    };
    let ((whole, of_whole), (norm, of_sections)) = (one(1), one(SECTIONS));
    assert!((whole - norm).abs() < 1e-5 * whole, "{whole} {norm}");
    assert_eq!(of_whole, of_sections);
}

#[test]
fn processes_are_context_ranks_too() {
    let (groups, model) = (groups(), config());
    let rows = samples(&groups);
    let run = |make: &dyn Fn(LearnerConfig) -> Learner| {
        let mut learner = make(LearnerConfig { zero: 3, ..settings(1, 4, None) });
        let reports = [1e-3, 1e-3].map(|rate| imitate(&mut learner, &rows, rate).unwrap());
        (reports, learner.parameters().unwrap().values().to_vec())
    };
    let threads = run(&|settings| learner(settings, &model));
    let processes = Processes::new(4);
    let leader = &processes.leader;
    let spread = run(&|settings| {
        leader.learner(settings, model.clone(), Parameters::random(&model, 5), None, None).unwrap()
    });
    processes.end();
    assert!(threads == spread);
}

/// A loss that panics on the first rank that computes it.
#[derive(Default)]
struct FirstPanics(AtomicBool);

impl RowLoss for FirstPanics {
    type Report = ();

    fn row(&self, _: usize, predictions: &[Prediction], (): &mut ()) -> Vec<PredictionGradient> {
        assert!(self.0.swap(true, Ordering::Relaxed), "the first rank is bad");
        vec![PredictionGradient { logprob: 0.1, ..PredictionGradient::default() }; predictions.len()]
    }
}

/// The other ranks wait for it in the backward of attention, and no rank waits for the deadline.
#[test]
fn a_rank_that_ends_in_a_pass_is_named_and_ends_the_others_at_once() {
    let groups = groups();
    let rows = samples(&groups);
    for zero in [1, 2, 3] {
        let mut learner = learner(LearnerConfig { zero, ..settings(1, 4, None) }, &config());
        let begin = Instant::now();
        let error = learner.step(&rows, &FirstPanics::default(), 1e-3).unwrap_err();
        assert!(begin.elapsed() < LEARNER.wait, "the others waited for the deadline");
        let message = error.to_string();
        assert!(message.contains("the first rank is bad") && message.contains("of 4 failed"), "{message}");
        let error = learner.step(&rows, &DemonstrationLoss::over(&rows), 1e-3).unwrap_err();
        assert!(error.to_string().contains("ended after an earlier error"), "{error}");
    }
}

/// Its peers wait for it in the exchange of the first layer.
#[test]
fn a_process_that_is_gone_is_named_by_all() {
    let (groups, model) = (groups(), config());
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
        let context = [dying.split(0).unwrap(), dying.split(0).unwrap()];
        drop((context, dying));
    });
    let parameters = Parameters::random(&model, 5);
    let mut learner = leader.learner(settings(1, 4, None), model, parameters, None, None).unwrap();
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

#[test]
fn what_ranks_cannot_share_is_refused_by_name() {
    let refused = |settings: LearnerConfig, model: &Config| {
        Learner::new(settings, model.clone(), Parameters::random(model, 5), None).unwrap_err().to_string()
    };
    let three = LearnerConfig { world: 3, ..settings(1, 2, None) };
    assert!(refused(three, &config()).contains("3 ranks is not divisible"));
    let few = Config { num_kv_heads: 1, ..config() };
    let message = refused(settings(1, 2, Some(ContextExchange::Heads)), &few);
    assert!(
        message.contains("1 key-value heads") && message.contains("trainer.parallel.context"),
        "{message}"
    );
}
