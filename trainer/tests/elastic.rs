//! A trainer whose ranks are lost and join makes the steps of one that loses none, bit for bit. Threads that share only a
//! collective stand for processes.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use collective::{HostCollective, threads};
use model::Parameters;
use trainer::algorithm::Algorithm;
use trainer::critic::CriticKind;
use trainer::trainer::elastic::{Elasticity, RankMeeting, Regrouping};
use trainer::{Leader, LearnerConfig, TrainerError};

use crate::recording::Recording;
use crate::spread::{Make, Processes, SOON, TrainedWith, trained};
use crate::{LEARNER, config};

/// Hands out groups of ranks, the next number of them at every meeting.
#[derive(Debug)]
struct Groups {
    worlds: Mutex<VecDeque<usize>>,
    /// Whether the next group can be had without a loss.
    grows: bool,
}

impl RankMeeting for Groups {
    fn possible(&self, world: usize) -> usize {
        let next = self.worlds.lock().unwrap().front().copied();
        next.filter(|next| self.grows && *next > world).unwrap_or(world)
    }

    fn meet(&self, most: usize) -> Result<Arc<Leader>, TrainerError> {
        let world = self.worlds.lock().unwrap().pop_front().ok_or(TrainerError::RanksEnded)?;
        assert!(world <= most);
        Ok(Processes::new(world).leader)
    }
}

/// A group of `world` ranks of which the last is lost after `calls` calls, and the number of calls that it has made.
pub(crate) fn losing(world: usize, calls: usize) -> (Processes, impl Fn() -> usize) {
    let log = Arc::default();
    let mut ranks = threads::group(world, SOON);
    let last = Recording::new(ranks.pop().unwrap(), &log).lost_after(calls);
    let made = last.calls();
    let mut all: Vec<Arc<dyn HostCollective>> =
        ranks.into_iter().map(|rank| Arc::new(rank) as Arc<_>).collect();
    all.push(Arc::new(last));
    (Processes::of(all), move || made.load(Ordering::Relaxed))
}

fn elasticity(worlds: &[usize], snapshot_every: u64, grows: bool) -> Option<Elasticity> {
    let meeting = Groups { worlds: Mutex::new(worlds.iter().copied().collect()), grows };
    Some(Elasticity { meeting: Box::new(meeting), snapshot_every })
}

/// Trains one process. Returns what trains other processes in the same way, and compares.
fn compared(
    settings: &LearnerConfig,
    critic: Option<CriticKind>,
) -> impl Fn(&Processes, Option<Elasticity>) -> (bool, Vec<Regrouping>) {
    let mut algorithm = if critic.is_some() { Algorithm::ppo() } else { Algorithm::grpo() };
    algorithm.kl.coef = 0.1;
    let model = config();
    let train = move |make: Make<'_>, elasticity: Option<Elasticity>| {
        let (model, algorithm, settings) = (&model, &algorithm, settings.clone());
        trained(make, TrainedWith { model, settings, algorithm, critic, elasticity })
    };
    let alone = |config, model, parameters, adapter: Option<_>, optimizer| {
        assert!(adapter.is_none());
        trainer::Learner::new(config, model, parameters, optimizer).unwrap()
    };
    let (expected, _) = train(&alone, None);
    move |processes: &Processes, elasticity: Option<Elasticity>| {
        let leader = &processes.leader;
        let spread = |config, model, parameters, adapter, optimizer| {
            leader.learner(config, model, parameters, adapter, optimizer).unwrap()
        };
        let (made, regroupings) = train(&spread, elasticity);
        (made == expected, regroupings)
    }
}

/// Calls until a rank of four has its shards, and the first of them its snapshot.
fn calls_of_a_start(settings: &LearnerConfig, critic: Option<CriticKind>) -> usize {
    let (processes, calls) = losing(4, usize::MAX);
    let parameters = Parameters::random(&config(), 5);
    let learner = processes.leader.learner(settings.clone(), config(), parameters, None, None).unwrap();
    // The first version is published before the snapshot.
    learner.snapshot().unwrap();
    learner.parameters().unwrap();
    learner.optimizer().unwrap();
    drop(learner);
    processes.end();
    // A separate critic has a tensor more; a shared one is a part of the policy.
    (calls() + 4) * if critic == Some(CriticKind::Separate) { 2 } else { 1 }
}

/// Every place in a run of three steps at which a rank can be lost after it has its shards.
#[test]
fn a_rank_can_be_lost_at_any_call() {
    let (mut tried, mut noticed) = (0, 0);
    for (zero, critic, snapshot_every) in
        [(1, None, 1), (3, None, 2), (2, Some(CriticKind::Separate), 3), (3, Some(CriticKind::Shared), 1)]
    {
        let settings = LearnerConfig { zero, microbatch_tokens: 40, ..LEARNER };
        let run = compared(&settings, critic);
        let (undisturbed, calls) = losing(4, usize::MAX);
        let (same, regroupings) = run(&undisturbed, elasticity(&[], snapshot_every, false));
        assert!(same && regroupings.is_empty());
        let all = calls();
        let start = calls_of_a_start(&settings, critic);
        // The last calls are those of the test, which reads the weights.
        for lost_after in (start..all - start).step_by(19) {
            let (processes, _) = losing(4, lost_after);
            let worlds = [[2, 1], [4, 2], [1, 1]][lost_after % 3];
            let what =
                format!("stage {zero}, {critic:?}, after {lost_after} of {all} calls, then {worlds:?}");
            let (same, regroupings) = run(&processes, elasticity(&worlds, snapshot_every, false));
            assert!(same, "{what}");
            tried += 1;
            // A loss in the calls of the last checkpoint is in no report of a step.
            if let Some(change) = regroupings.first() {
                noticed += 1;
                assert!(change.lost.as_deref().is_some_and(|lost| lost.contains("rank 3")), "{change:?}");
                assert_eq!((change.before, change.after), (4, worlds[0]), "{what}");
                // The step itself too, if the rank is lost while it is published.
                assert!(change.repeated_steps <= snapshot_every, "{change:?}");
            }
        }
    }
    assert!(tried >= 5 && noticed * 2 > tried, "{noticed} of {tried} losses were noticed in a step");
}

#[test]
fn ranks_that_wait_take_part_from_the_next_step_on() {
    for zero in [1, 3] {
        let settings = LearnerConfig { zero, microbatch_tokens: 40, ..LEARNER };
        let processes = Processes::new(2);
        let (same, regroupings) = compared(&settings, None)(&processes, elasticity(&[4], 100, true));
        assert!(same, "stage {zero}");
        let [change] = &regroupings[..] else { panic!("{regroupings:?}") };
        assert_eq!((change.lost.as_deref(), change.before, change.after), (None, 2, 4));
        assert_eq!(change.repeated_steps, 0);
    }
}

/// Groups whose second rank is lost once it has its shards.
#[derive(Debug)]
struct Doomed {
    meetings: Arc<AtomicUsize>,
}

impl RankMeeting for Doomed {
    fn possible(&self, world: usize) -> usize {
        world
    }

    fn meet(&self, _most: usize) -> Result<Arc<Leader>, TrainerError> {
        self.meetings.fetch_add(1, Ordering::Relaxed);
        Ok(losing(2, 6).0.leader)
    }
}

#[test]
fn a_step_that_ends_its_ranks_again_and_again_ends_the_run() {
    let settings = LEARNER;
    let run = compared(&settings, None);
    let meetings = Arc::new(AtomicUsize::new(0));
    let meeting = Box::new(Doomed { meetings: Arc::clone(&meetings) });
    let elasticity = Some(Elasticity { meeting, snapshot_every: 1 });
    let (processes, _) = losing(2, calls_of_a_start(&LEARNER, None));
    let ended = catch_unwind(AssertUnwindSafe(|| run(&processes, elasticity)));
    assert!(ended.is_err(), "the step was made");
    assert_eq!(meetings.load(Ordering::Relaxed), 3);
}
