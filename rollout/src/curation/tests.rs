//! Properties of the curator alone.

use proptest::prelude::*;
use trajectory::{
    Component, Group, GroupId, PolicyVersion, Prompt, Sample, SampleStreams, Score, StopReason, Task, TaskId,
    Trajectory, Turn, VersionRun,
};

use super::super::{DifficultyPool, Shrink, TaskOutcome, refill::Refill, size};
use super::*;

const OFF: CurationConfig = CurationConfig {
    seed: 7,
    group_size: 8,
    batch_groups: 4,
    max_staleness: 2,
    steps: 100,
    max_refill_ratio: None,
    max_pass_rate: None,
    filter_after: None,
    easy: None,
    hard: None,
    shrink: None,
    turn_margin: None,
    success_pool: false,
};

fn curator(config: CurationConfig) -> Curator {
    Curator::new(config, (0..10).map(TaskId))
}

/// A group of `task` sampled by `version`, with these rewards.
fn group(id: u64, task: u64, version: u64, rewards: &[f64]) -> Group {
    let trajectory = |(index, reward): (usize, &f64)| Trajectory {
        index: index as u32,
        sample: Sample::new(SampleStreams {
            token_ids: vec![1, id as u32, index as u32],
            loss_mask: vec![false, true, true],
            behavior_logprobs: vec![0.0, -0.5, -(index as f32)],
            versions: vec![VersionRun { version: PolicyVersion(version), len: 3 }],
            kept: None,
            experts: None,
            temperature: 1.0,
        })
        .unwrap(),
        turns: vec![Turn {
            completion: 1..3,
            stop: StopReason::StopToken,
            reward: None,
            prefill: Vec::new(),
        }],
        text: format!("{id}.{index}"),
        score: Score {
            total: Some(reward - 0.1),
            components: vec![Component {
                name: "math".to_owned(),
                value: Some(*reward),
                ..Component::default()
            }],
            correct: Some(*reward >= 1.0),
        },
        branches: Vec::new(),
        baseline: false,
        role: None,
    };
    let prompt = Prompt::Text(String::new());
    let task = Task { id: TaskId(task), prompt, answer: None, columns: serde_json::Map::new() };
    Group { id: GroupId(id), task, trajectories: rewards.iter().enumerate().map(trajectory).collect() }
}

fn outcome(task: u64, group: u64, passes: u64, trajectories: u64) -> TaskOutcome {
    let version = PolicyVersion(group / 4);
    let success_turns = (passes > 0).then_some(1 + group % 5);
    TaskOutcome { task: TaskId(task), group: GroupId(group), version, passes, trajectories, success_turns }
}

fn start(curator: &mut Curator, id: u64, task: u64) -> Option<usize> {
    match curator.decide(GroupId(id), TaskId(task)) {
        Decision::Start { group_size, .. } => Some(group_size),
        Decision::Skip(_) => None,
    }
}

const ALL_ON: CurationConfig = CurationConfig {
    max_pass_rate: Some(0.9),
    filter_after: Some(8),
    easy: Some(DifficultyPool { pass_rate: 0.75, share: 0.5 }),
    hard: Some(DifficultyPool { pass_rate: 0.25, share: 0.5 }),
    shrink: Some(Shrink { above: 0.5, min: 2 }),
    turn_margin: Some(1),
    ..OFF
};

proptest! {
    #[test]
    fn the_order_in_which_results_arrive_does_not_matter(
        results in prop::collection::vec((0..10u64, 0..=8u64), 0..60), seed: u64
    ) {
        let outcomes: Vec<TaskOutcome> =
            results.iter().enumerate().map(|(id, (task, passes))| outcome(*task, id as u64, *passes, 8)).collect();
        let mut shuffled = outcomes.clone();
        // Any order at all: sorted by a hash of place and seed.
        shuffled.sort_by_key(|o| (o.group.0 + 1).wrapping_mul(seed | 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 7);
        let (mut one, mut other) = (curator(ALL_ON), curator(ALL_ON));
        outcomes.iter().for_each(|o| one.learn(o));
        shuffled.iter().for_each(|o| other.learn(o));
        for id in 100..200 {
            let task = TaskId(id % 10);
            prop_assert_eq!(one.decide(GroupId(id), task), other.decide(GroupId(id), task));
        }
        prop_assert_eq!(one.exhausted(), other.exhausted());
        prop_assert_eq!(one.counts(), other.counts());
    }

    #[test]
    fn refills_drop_at_most_their_bound_and_keep_groups_that_vary(
        varies in prop::collection::vec(prop::bool::weighted(0.2), 1..300), ratio in 0.1..5.0f64, window in 1..9usize
    ) {
        let mut refill = Refill::new(ratio, window);
        let most = (ratio * window as f64).ceil() as usize;
        let (mut kept, mut dropped) = (0, 0);
        for varies in varies {
            match refill.judge(!varies) {
                CurationVerdict::Keep => kept += 1,
                CurationVerdict::Drop => {
                    prop_assert!(!varies, "a group that varies was dropped");
                    dropped += 1;
                }
            }
            prop_assert!(dropped <= most * (kept / window + 1), "{} dropped, {} kept", dropped, kept);
        }
    }

    #[test]
    fn groups_shrink_with_success_and_within_bounds(
        whole in 2..64usize, min in 2..64usize, above in 0.0..0.99f64, rates in (0.0..=1.0f64, 0.0..=1.0f64)
    ) {
        let of = |rate| size::completions(whole, Shrink { above, min }, rate);
        let (low, high) = (rates.0.min(rates.1), rates.0.max(rates.1));
        prop_assert!(of(low) >= of(high) && of(high) >= min.min(whole) && of(low) <= whole);
        prop_assert_eq!((of(0.0), of(above), of(1.0)), (whole, whole, min.min(whole)));
    }

    #[test]
    fn counts_are_of_what_was_decided(
        results in prop::collection::vec((0..10u64, 0..=8u64), 0..40), draws in prop::collection::vec(0..10u64, 0..80)
    ) {
        let mut curator = curator(ALL_ON);
        for (id, (task, passes)) in results.iter().enumerate() {
            curator.learn(&outcome(*task, id as u64, *passes, 8));
        }
        let mut expected = CurationCounts::default();
        for (id, task) in draws.iter().enumerate() {
            match curator.decide(GroupId(1000 + id as u64), TaskId(*task)) {
                Decision::Start { group_size, max_turns } => {
                    expected.shrunk += u64::from(group_size < 8);
                    expected.turn_limited += u64::from(max_turns.is_some());
                }
                Decision::Skip(Skip::Retired) => expected.retired += 1,
                Decision::Skip(Skip::Unlearnable) => expected.unlearnable += 1,
                Decision::Skip(Skip::PooledOut) => expected.pooled_out += 1,
            }
        }
        prop_assert_eq!(curator.counts(), expected);
    }
}

#[test]
fn a_curator_that_is_off_changes_nothing() {
    let mut curator = curator(OFF);
    for id in 0..20 {
        assert_eq!(start(&mut curator, id, id % 10), Some(8));
        let mut scored = group(id, id % 10, 0, &[f64::from((id % 2) as u32); 8]);
        let before = scored.clone();
        assert_eq!(curator.settle(&mut scored).verdict, CurationVerdict::Keep);
        assert_eq!(scored, before);
    }
    assert_eq!((curator.counts(), curator.is_pending()), (CurationCounts::default(), false));
}

#[test]
fn equal_rewards_are_replaced_by_others_up_to_the_ratio() {
    let mut curator = curator(CurationConfig { max_refill_ratio: Some(2.0), ..OFF });
    let verdicts: Vec<CurationVerdict> =
        (0..20).map(|id| curator.settle(&mut group(id, 0, 0, &[1.0, 1.0])).verdict).collect();
    let dropped = |range: std::ops::Range<usize>| verdicts[range].iter().all(|v| *v == CurationVerdict::Drop);
    // A batch has four groups: eight are dropped, four let through, and again.
    assert!(dropped(0..8) && verdicts[8..12].iter().all(|v| *v == CurationVerdict::Keep) && dropped(12..20));
    assert_eq!((curator.counts().refilled, curator.counts().let_through), (16, 4));
    assert_eq!(curator.settle(&mut group(20, 0, 0, &[1.0, 0.0])).verdict, CurationVerdict::Keep);
}

#[test]
fn a_task_that_passes_is_retired_by_its_newest_group() {
    let mut curator = curator(CurationConfig { max_pass_rate: Some(0.75), ..OFF });
    assert_eq!(start(&mut curator, 0, 3), Some(8));
    curator.settle(&mut group(0, 3, 0, &[1.0, 1.0, 0.0, 0.0]));
    assert_eq!(start(&mut curator, 1, 3), Some(8));
    // Penalties do not make a failure of a correct answer: the totals are 0.9.
    curator.settle(&mut group(1, 3, 1, &[1.0, 1.0, 1.0, 0.0]));
    assert_eq!(curator.decide(GroupId(2), TaskId(3)), Decision::Skip(Skip::Retired));
    assert_eq!(start(&mut curator, 3, 4), Some(8), "others are drawn");
    assert_eq!(curator.counts().retired, 1);
}

#[test]
fn a_task_that_never_passes_is_dropped_after_so_many_trajectories() {
    let mut curator = curator(CurationConfig { filter_after: Some(6), ..OFF });
    curator.settle(&mut group(0, 3, 0, &[0.0; 4]));
    assert_eq!(start(&mut curator, 1, 3), Some(8), "four are too few to tell");
    // The same group again, as after a crash, is nothing new.
    curator.settle(&mut group(0, 3, 0, &[0.0; 4]));
    assert_eq!(start(&mut curator, 1, 3), Some(8));
    curator.settle(&mut group(1, 3, 1, &[0.0; 4]));
    assert_eq!(curator.decide(GroupId(2), TaskId(3)), Decision::Skip(Skip::Unlearnable));
    // One that was in flight has passed after all.
    curator.settle(&mut group(2, 3, 1, &[0.0, 1.0]));
    assert_eq!(start(&mut curator, 4, 3), Some(8));
}

/// A crash between the scorer and the journal, and a resume that samples the group again.
#[test]
fn a_group_that_is_lost_after_it_was_scored_starts_again_as_it_was() {
    let config = CurationConfig { max_pass_rate: Some(0.75), filter_after: Some(8), ..ALL_ON };
    let mut curator = curator(config);
    curator.serve(PolicyVersion(1));
    curator.learn(&outcome(3, 4, 5, 8));
    assert_eq!(start(&mut curator, 6, 3), Some(6));
    curator.learn(&outcome(3, 6, 8, 8));
    assert_eq!(start(&mut curator, 6, 3), Some(6), "its own outcome is of no account");
    assert_eq!(start(&mut curator, 7, 3), None, "but it is to those after it");
    curator.learn(&outcome(5, 7, 8, 8));
    assert_eq!(start(&mut curator, 7, 5), Some(8), "nothing was known before");
    // Ids start over with a buffer that forgets: what was sampled by older versions counts.
    curator.serve(PolicyVersion(2));
    assert_eq!(start(&mut curator, 6, 3), None);
}

#[test]
fn a_history_makes_the_same_decisions_in_another_process() {
    let mut first = curator(ALL_ON);
    let settled: Vec<TaskOutcome> = (0..30)
        .filter_map(|id| {
            let passes = (id * 5 % 9) as usize;
            let rewards: Vec<f64> = (0..8).map(|index| f64::from(u8::from(index < passes))).collect();
            first.settle(&mut group(id, id % 10, id / 10, &rewards)).outcome
        })
        .collect();
    assert_eq!(settled.len(), 30);
    let mut second = curator(ALL_ON);
    for outcome in &settled {
        let line = serde_json::to_string(outcome).unwrap();
        second.learn(&serde_json::from_str(&line).unwrap());
    }
    for id in 30..130 {
        let task = TaskId(id % 10);
        assert_eq!(first.decide(GroupId(id), task), second.decide(GroupId(id), task));
    }
}

/// 10^4 draws at a share of 0.25 have a standard deviation of 43: off by 200 is beyond 4 of them.
#[test]
fn pools_are_drawn_with_their_share() {
    let mut curator =
        curator(CurationConfig { easy: Some(DifficultyPool { pass_rate: 0.8, share: 0.25 }), ..OFF });
    curator.learn(&outcome(1, 0, 8, 8));
    curator.learn(&outcome(2, 1, 4, 8));
    let easy = (2..10_002).filter(|id| start(&mut curator, *id, 1).is_some()).count();
    assert!(easy.abs_diff(2_500) < 200, "{easy} of 10000");
    assert!((2..100).all(|id| start(&mut curator, id, 2).is_some() && start(&mut curator, id, 9).is_some()));
    assert_eq!(curator.counts().pooled_out, 10_000 - easy as u64);
}

#[test]
fn a_curator_without_tasks_to_draw_is_exhausted() {
    let config = CurationConfig { max_pass_rate: Some(1.0), filter_after: Some(2), ..OFF };
    let mut curator = Curator::new(config, [TaskId(4), TaskId(9)]);
    assert_eq!(start(&mut curator, 0, 4), Some(8));
    curator.settle(&mut group(0, 4, 0, &[1.0, 1.0]));
    assert_eq!(curator.exhausted(), None);
    // A task of another dataset says nothing.
    curator.learn(&outcome(5, 7, 0, 8));
    assert_eq!(start(&mut curator, 1, 9), Some(8));
    assert!(curator.is_pending());
    curator.settle(&mut group(1, 9, 0, &[0.0, 0.0]));
    assert!(!curator.is_pending());
    assert_eq!(curator.exhausted(), Some(Exhausted { tasks: 2, retired: 1, unlearnable: 1 }));
}

#[test]
fn a_group_that_failed_gets_the_newest_success_within_the_bound() {
    let config = CurationConfig { success_pool: true, max_refill_ratio: Some(10.0), ..OFF };
    let mut curator = curator(config);
    curator.serve(PolicyVersion(5));
    let mut passed = group(0, 3, 4, &[0.0, 1.0, 1.0, 0.0]);
    curator.settle(&mut passed);
    curator.settle(&mut group(1, 3, 5, &[1.0, 0.0]));
    let mut failed = group(2, 3, 5, &[0.0, 0.0, 0.0]);
    failed.trajectories[2].baseline = true;
    let before = failed.clone();
    assert_eq!(curator.settle(&mut failed).verdict, CurationVerdict::Keep, "it has variance now");
    let replayed = &failed.trajectories[1];
    assert_eq!((replayed.index, &replayed.text[..]), (1, "1.0"), "the newest success, at its new place");
    assert_eq!(replayed.sample.oldest_version(), PolicyVersion(5));
    assert_eq!(
        (&failed.trajectories[0], &failed.trajectories[2]),
        (&before.trajectories[0], &before.trajectories[2])
    );
    // Of another task there is none, and the one there is grows too old: the bound is two versions.
    assert_eq!(curator.settle(&mut group(3, 4, 5, &[0.0, 0.0])).verdict, CurationVerdict::Drop);
    curator.serve(PolicyVersion(7));
    assert_eq!(curator.settle(&mut group(4, 3, 7, &[0.0, 0.0])).verdict, CurationVerdict::Keep);
    curator.serve(PolicyVersion(8));
    assert_eq!(curator.settle(&mut group(5, 3, 8, &[0.0, 0.0])).verdict, CurationVerdict::Drop);
    assert_eq!((curator.counts().replayed_successes, curator.counts().refilled), (2, 2));
    assert_eq!(curator.successes(), 1);
    curator.settle(&mut group(6, 4, 8, &[1.0, 0.0]));
    assert_eq!(curator.successes(), 1, "what is over the bound is forgotten");
}

/// A trajectory is compared with those of its role: a success is never put among those of another.
#[test]
fn a_success_of_a_role_takes_the_place_of_that_role() {
    let roles = |id: u64, rewards: &[f64]| {
        let mut group = group(id, 3, 0, rewards);
        for (n, trajectory) in group.trajectories.iter_mut().enumerate() {
            trajectory.role = Some(if n < rewards.len() / 2 { "x" } else { "o" }.to_owned());
        }
        group
    };
    let mut curator = curator(CurationConfig { success_pool: true, ..OFF });
    curator.settle(&mut roles(0, &[1.0, 0.0, 0.0, 0.0]));
    let mut failed = roles(1, &[0.0; 4]);
    let before = failed.clone();
    curator.settle(&mut failed);
    let replayed = &failed.trajectories[1];
    assert_eq!((replayed.index, &replayed.text[..], replayed.role.as_deref()), (1, "0.0", Some("x")));
    assert_eq!(failed.trajectories[2..], before.trajectories[2..], "the other role stays as it was");
    // A group without that role gets nothing.
    let mut others = group(2, 3, 0, &[0.0, 0.0]);
    let before = others.clone();
    curator.settle(&mut others);
    assert_eq!(others, before);
    assert_eq!(curator.counts().replayed_successes, 1);
}

/// The limit on the turns of a task follows its longest success, in this process or one before it.
#[test]
fn an_episode_has_a_margin_over_the_success_turns_of_its_task() {
    let mut curator = curator(CurationConfig { turn_margin: Some(2), ..OFF });
    let most = |curator: &mut Curator, id: u64| match curator.decide(GroupId(id), TaskId(3)) {
        Decision::Start { max_turns, .. } => max_turns,
        Decision::Skip(_) => panic!("nothing is skipped"),
    };
    assert_eq!(most(&mut curator, 0), None, "nothing is known");
    curator.settle(&mut group(0, 3, 0, &[0.0, 0.0]));
    assert_eq!(most(&mut curator, 1), None, "it has never succeeded");
    let mut passed = group(1, 3, 0, &[1.0, 1.0, 0.0]);
    // The failure is longer; of several roles the turns of the episode count.
    let turn = passed.trajectories[0].turns[0].clone();
    passed.trajectories[2].turns = vec![turn; 9];
    passed.trajectories[1].score.components.push(Component {
        name: crate::scoring::ENVIRONMENT.to_owned(),
        details: serde_json::Map::from_iter([("turns".to_owned(), 4.into())]),
        ..Component::default()
    });
    let outcome = curator.settle(&mut passed).outcome.unwrap();
    assert_eq!((outcome.success_turns, most(&mut curator, 2)), (Some(4), Some(6)));
    curator.settle(&mut group(2, 3, 1, &[1.0]));
    assert_eq!(most(&mut curator, 3), Some(6), "a short success lowers nothing");
    assert_eq!(curator.counts().turn_limited, 2);
    // A line of the history without it is one of an earlier version.
    let line = r#"{"task":3,"group":9,"version":1,"passes":1,"trajectories":2}"#;
    assert_eq!(serde_json::from_str::<TaskOutcome>(line).unwrap().success_turns, None);
}
