//! Timelines made by hand, with the seconds that each cause must have.

use std::fmt::Write as _;

use proptest::prelude::*;

use super::*;

fn explained(timeline: &str) -> RunExplanation {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("timeline.jsonl"), timeline).unwrap();
    explain(directory.path()).unwrap()
}

fn span(lane: &str, kind: &str, times: [f64; 2], rest: &str) -> String {
    let [start, end] = times;
    format!(r#"{{"lane":"{lane}","kind":"{kind}","start":{start},"end":{end}{rest}}}"#) + "\n"
}

/// The causes of a step with their seconds.
fn path(explanation: &RunExplanation, step: u64) -> Vec<(String, f64)> {
    let step = explanation.step(step).unwrap();
    step.path.iter().map(|(cause, seconds)| (cause.to_string(), (seconds * 1e9).round() / 1e9)).collect()
}

fn assert_path(explanation: &RunExplanation, step: u64, expected: &[(&str, f64)]) {
    let mut found = path(explanation, step);
    let mut expected: Vec<_> =
        expected.iter().map(|(cause, seconds)| ((*cause).to_owned(), *seconds)).collect();
    found.sort_by(|a, b| a.0.cmp(&b.0));
    expected.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(found, expected, "step {step}");
}

/// Step 2 of a synchronous run: weights arrive, the sampler samples, a reward judges, the journal commits, two ranks train.
const STEP: [(&str, &str, [f64; 2], &str); 22] = [
    ("trainer", "start", [0.0, 0.0], ""),
    ("trainer", "forward_backward", [1.0, 2.0], r#","step":1"#),
    ("trainer", "weight_sync", [2.0, 2.25], r#","step":1"#),
    // 0.25 s of records, of which the journal takes 0.125.
    ("journal", "commit", [2.25, 2.375], ""),
    ("trainer", "save_checkpoint", [2.5, 3.0], r#","step":2"#),
    ("trainer", "wait_for_batch", [3.0, 10.0], r#","step":2"#),
    ("sampler 0", "wait", [2.0, 3.5], r#","note":"a slot or newer weights: the trainer has to advance""#),
    ("sampler 0", "apply_weights", [3.5, 3.75], ""),
    ("sampler 0", "wait", [3.75, 4.0], r#","note":"the buffer, asked for slots""#),
    ("sampler 0", "sample", [4.0, 5.0], ""),
    ("sampler 0", "wait", [5.0, 5.5], r#","note":"environments""#),
    ("sampler 0", "sample", [5.5, 8.0], ""),
    // The process had no processor while it decoded.
    ("sampler 0", "paused", [6.0, 6.5], ""),
    ("reward slow", "score", [7.0, 9.0], ""),
    ("reward quick", "score", [7.5, 7.625], ""),
    ("journal", "commit", [9.25, 9.5], ""),
    (
        "trajectory",
        "trajectory",
        [4.0, 13.0],
        r#","step":2,"group":1,"index":0,"lag":0,"versions":[1],"sampled":7.5,"scored":9.0,"settled":9.25,"stored":9.75,"sampler":"sampler 0","leased":10.0,"last":true"#,
    ),
    ("trainer", "forward_backward", [10.0, 13.0], r#","step":2"#),
    ("trainer rank 0", "forward_backward", [10.5, 11.0], r#","step":2"#),
    ("trainer rank 0", "wait", [11.0, 12.5], r#","step":2,"note":"trainer rank 1""#),
    ("trainer rank 1", "forward_backward", [10.5, 12.0], r#","step":2"#),
    ("trainer rank 1", "wait", [12.0, 12.5], r#","step":2,"note":"the exchange with other ranks""#),
];

#[test]
fn every_second_of_a_step_has_the_cause_that_the_trainer_waited_for() {
    let timeline: String =
        STEP.iter().map(|(lane, kind, times, rest)| span(lane, kind, *times, rest)).collect();
    let explanation = explained(&timeline);
    assert_path(
        &explanation,
        2,
        &[
            ("records", 0.125),
            ("disk `journal`", 0.125 + 0.25),
            ("disk `checkpoint`", 0.5),
            // 3.0 to 3.5 on its way, 3.5 to 3.75 applied.
            ("weights `sampler 0`", 0.75),
            ("buffer `slots`", 0.25),
            // 4.0 to 5.0 and 5.5 to 7.5, without the pause.
            ("sampling `sampler 0`", 2.5),
            ("environment", 0.5),
            ("paused `sampler 0`", 0.5),
            ("reward `slow`", 1.75),
            ("buffer `hand-over`", 0.25),
            ("buffer `lease`", 0.25),
            // 10.0 to 11.0 and 12.5 to 13.0.
            ("training", 1.5),
            ("slow_rank `trainer rank 1`", 1.0),
            ("rank_exchange", 0.5),
        ],
    );
    assert_path(&explanation, 1, &[("training", 1.0), ("weights `publish`", 0.25)]);
    assert_eq!((explanation.steps, explanation.attempts), (2, 1));
    assert!((explanation.wall_s - 12.0).abs() < 1e-9, "{}", explanation.wall_s);
    let stragglers: Vec<String> =
        explanation.stragglers.iter().map(|share| share.cause.to_string()).collect();
    assert_eq!(
        stragglers,
        ["reward `slow`", "slow_rank `trainer rank 1`", "environment", "paused `sampler 0`"]
    );
}

#[test]
fn without_the_last_trajectory_the_roles_of_all_samplers_count() {
    let timeline: String = STEP
        .iter()
        .filter(|(lane, ..)| *lane != "trajectory")
        .map(|(lane, kind, times, rest)| span(lane, kind, *times, rest))
        .collect();
    let explanation = explained(&timeline);
    let path = path(&explanation, 2);
    let seconds =
        |name: &str| path.iter().find(|(cause, _)| cause == name).map_or(0.0, |(_, seconds)| *seconds);
    // 4 to 5 and 5.5 to 8 but for the pause, then the reward until 9.
    assert_eq!([seconds("sampling `sampler 0`"), seconds("reward `slow`")], [3.0, 1.0], "{path:?}");
    assert_eq!([seconds("paused `sampler 0`"), seconds("environment")], [0.5, 0.5], "{path:?}");
}

#[test]
fn reports_of_workers_may_come_later_than_their_step() {
    let late = |(lane, ..): &&(&str, &str, [f64; 2], &str)| !lane.starts_with("trainer");
    let lines = |wanted: bool| {
        let of = STEP.iter().filter(move |line| late(line) == wanted);
        of.map(|(lane, kind, times, rest)| span(lane, kind, *times, rest)).collect::<String>()
    };
    let in_order: String =
        STEP.iter().map(|(lane, kind, times, rest)| span(lane, kind, *times, rest)).collect();
    let step = |step: u64, start: f64| {
        span("trainer", "forward_backward", [start, start + 1.0], &format!(r#","step":{step}"#))
    };
    let more = step(3, 14.0) + &step(4, 15.0);
    let delayed = explained(&(lines(false) + &more + &lines(true)));
    assert_eq!(path(&delayed, 2), path(&explained(&(in_order + &more)), 2));
}

#[test]
fn regroupings_and_snapshots_interrupt_other_work() {
    let number = r#","step":1"#;
    let timeline = [
        ("trainer", "wait_for_batch", [0.0, 1.0]),
        ("sampler 0", "sample", [0.0, 1.0]),
        // Ranks join: a snapshot, and a new group.
        ("trainer", "snapshot", [1.0, 1.25]),
        ("trainer", "regroup", [1.25, 2.0]),
        ("trainer", "forward_backward", [2.0, 6.0]),
        // A rank is lost during the updates.
        ("trainer", "regroup", [2.5, 4.0]),
        ("trainer rank 0", "forward_backward", [4.0, 5.0]),
        ("trainer rank 0", "wait", [5.0, 6.0]),
        ("trainer rank 1", "forward_backward", [4.0, 6.0]),
        ("trainer", "weight_sync", [6.0, 6.5]),
        ("trainer", "snapshot", [6.5, 7.0]),
    ];
    let text = |more: &str| {
        let lines = timeline.iter().map(|(lane, kind, times)| span(lane, kind, *times, number));
        lines.collect::<String>() + more
    };
    let expected = [
        ("sampling `sampler 0`", 1.0),
        ("snapshot", 0.75),
        ("regroup", 2.25),
        // 2.0 to 2.5 and 4.0 to 5.0.
        ("training", 1.5),
        ("slow_rank `trainer rank 1`", 1.0),
        ("weights `publish`", 0.5),
    ];
    let explanation = explained(&text(""));
    assert_path(&explanation, 1, &expected);
    assert_eq!((explanation.steps, explanation.attempts, explanation.dropped), (1, 1, 0));
    // Of many, the first count.
    let explanation = explained(&text(&span("trainer", "regroup", [1.25, 2.0], number).repeat(100)));
    assert_path(&explanation, 1, &expected);
    assert_eq!((explanation.steps, explanation.dropped), (1, 86));
}

#[test]
fn ranks_and_parts_of_a_step_are_bounded() {
    let number = r#","step":1"#;
    let mut timeline = span("trainer", "forward_backward", [0.0, 2.0], number);
    for rank in 0..reader::MAX_RANKS + 100 {
        let (lane, kind) =
            (format!("trainer rank {rank}"), if rank == 0 { "forward_backward" } else { "wait" });
        timeline += &span(&lane, kind, [1.0, 2.0], number);
    }
    let explanation = explained(&timeline);
    assert_eq!(explanation.dropped, 100);
    assert_path(&explanation, 1, &[("training", 1.0), ("slow_rank `trainer rank 0`", 1.0)]);

    let spans = path::MAX_PARTS + 100;
    let mut timeline = span("trainer", "wait_for_batch", [0.0, spans as f64], number);
    for second in 0..spans {
        let start = second as f64;
        timeline += &span("sampler 0", "sample", [start + 0.25, start + 0.5], "");
    }
    let explanation = explained(&timeline);
    // Every span makes one part more than before.
    let (kept, dropped) = (path::MAX_PARTS as f64 - 1.0, 101);
    assert_eq!(explanation.dropped, dropped);
    assert_path(
        &explanation,
        1,
        &[("sampling `sampler 0`", kept / 4.0), ("unknown", spans as f64 - kept / 4.0)],
    );
}

/// Lines of `steps` steps of 2 s each: 1 s of waiting for a sampler, 1 s of training.
fn steady(steps: u64, more: impl Fn(u64, f64) -> String) -> String {
    (1..=steps).fold(String::new(), |mut text, step| {
        let start = 2.0 * step as f64;
        let number = format!(r#","step":{step}"#);
        text += &span("trainer", "wait_for_batch", [start, start + 1.0], &number);
        text += &span("sampler 0", "sample", [start, start + 1.0], "");
        text += &span("trainer", "forward_backward", [start + 1.0, start + 2.0], &number);
        text += &more(step, start);
        text
    })
}

#[test]
fn a_stall_is_named_with_its_step_and_a_steady_run_has_none() {
    assert_eq!(explained(&steady(20, |_, _| String::new())).stalls, []);
    // A reward that takes 0.2 s in every step is no stall, however large its share.
    let judged = |step: u64, start: f64, seconds: f64| {
        let [sampled, stored] = [start + 1.0 - seconds, start + 1.0];
        span("reward r", "score", [sampled, stored], "")
            + &span(
                "trajectory",
                "trajectory",
                [start, stored],
                &format!(
                    r#","step":{step},"sampled":{sampled},"scored":{stored},"settled":{stored},"stored":{stored},"sampler":"sampler 0","last":true"#
                ),
            )
    };
    assert_eq!(explained(&steady(20, |step, start| judged(step, start, 0.9))).stalls, []);
    let slow = |step: u64, start: f64| judged(step, start, if (9..14).contains(&step) { 1.0 } else { 0.05 });
    let stalls = explained(&steady(20, slow)).stalls;
    assert_eq!(stalls.len(), 1, "{stalls:?}");
    assert_eq!(
        (stalls[0].cause.to_string(), &stalls[0].steps[..]),
        ("reward `r`".to_owned(), &[9, 10, 11, 12, 13][..])
    );
    assert!(
        (stalls[0].excess_s - 4.75).abs() < 1e-6 && (stalls[0].median_s - 0.05).abs() < 1e-6,
        "{stalls:?}"
    );
    // Three such steps take less than two median steps.
    let short = |step: u64, start: f64| judged(step, start, if (9..12).contains(&step) { 1.0 } else { 0.05 });
    assert_eq!(explained(&steady(20, short)).stalls, []);
    // The first step of an attempt is no stall: samplers begin.
    let first = |step: u64, start: f64| judged(step, start, if step == 1 { 1.0 } else { 0.05 });
    assert_eq!(explained(&steady(20, first)).stalls, []);
}

/// A steady run whose ranks wait for `slow` from `busy` seconds of every step on.
fn ranks(slow: impl Fn(u64) -> (usize, f64)) -> String {
    steady(20, |step, start| {
        let (slow, busy) = slow(step);
        (0..2).fold(String::new(), |mut text, rank| {
            let number = format!(r#","step":{step}"#);
            let lane = format!("trainer rank {rank}");
            let until = start + if rank == slow { 2.0 } else { 1.0 + busy };
            text += &span(&lane, "forward_backward", [start + 1.0, until], &number);
            if rank != slow {
                text += &span(&lane, "wait", [until, start + 2.0], &number);
            }
            text
        })
    })
}

#[test]
fn a_rank_that_is_always_slow_is_named_and_ranks_that_take_turns_are_not() {
    let stalls = explained(&ranks(|_| (1, 0.5))).stalls;
    assert_eq!(stalls.len(), 1, "{stalls:?}");
    assert_eq!(stalls[0].cause.to_string(), "slow_rank `trainer rank 1`");
    assert!(stalls[0].is_lasting && (stalls[0].excess_s - 0.5 * 19.0).abs() < 1e-6, "{stalls:?}");
    assert_eq!(explained(&ranks(|step| (step as usize % 2, 0.5))).stalls, []);
    assert_eq!(explained(&ranks(|_| (1, 0.9))).stalls, [], "a twentieth of the time is an imbalance");
}

#[test]
fn a_checkpoint_is_compared_with_other_checkpoints_and_a_snapshot_with_others() {
    // One after every fifth step; that of step 31 takes longer than the others.
    let saves = |kind: &str, slow_s: f64| {
        let mut time = 0.0;
        (1..=40_u64).fold(String::new(), |mut text, step| {
            let number = format!(r#","step":{step}"#);
            let save_s = if step % 5 != 1 { 0.0 } else { if step == 31 { slow_s } else { 0.5 } };
            text += &span("trainer", kind, [time, time + save_s], &number);
            text += &span("trainer", "forward_backward", [time + save_s, time + save_s + 2.0], &number);
            time += save_s + 2.0;
            text
        })
    };
    for (kind, cause) in [("save_checkpoint", "disk `checkpoint`"), ("snapshot", "snapshot")] {
        assert_eq!(explained(&saves(kind, 0.5)).stalls, []);
        let stalls = explained(&saves(kind, 5.0)).stalls;
        assert_eq!(stalls.len(), 1, "{stalls:?}");
        assert_eq!((stalls[0].cause.to_string(), &stalls[0].steps[..]), (cause.to_owned(), &[31][..]));
        let (excess_s, median_s) = (stalls[0].excess_s, stalls[0].median_s);
        assert!((excess_s - 4.5).abs() < 1e-9 && (median_s - 0.5).abs() < 1e-9, "{stalls:?}");
    }
}

#[test]
fn a_resume_begins_again_and_repeated_steps_count_twice() {
    let mut timeline = steady(10, |_, _| String::new());
    timeline += &steady(4, |_, _| String::new());
    timeline += "{\"lane\":\"trainer\",\"kind\":\"forward_back";
    let explanation = explained(&timeline);
    assert_eq!((explanation.steps, explanation.attempts, explanation.unreadable), (14, 2, 1));
    assert!((explanation.wall_s - 28.0).abs() < 1e-9);
    assert!(explanation.step(11).is_none());
}

#[test]
fn memory_does_not_grow_with_the_file() {
    let mut reader = PathReader::default();
    for step in 1..80_000_u64 {
        let text = steady(1, |_, _| String::new()).replace(r#""step":1"#, &format!(r#""step":{step}"#));
        let shifted = |line: &str| {
            let mut line: serde_json::Value = serde_json::from_str(line).unwrap();
            for name in ["start", "end"] {
                line[name] = (line[name].as_f64().unwrap() + 2.0 * step as f64).into();
            }
            line.to_string()
        };
        text.lines().for_each(|line| reader.line(shifted(line).as_bytes()));
    }
    let rows = reader.rows();
    assert_eq!((rows.rows.len(), rows.steps), (reader::MAX_ROWS, 79_999));
    assert!((rows.wall_s - 2.0 * 79_999.0).abs() < 1e-3, "{}", rows.wall_s);
    let debug = format!("{reader:?}");
    assert!(debug.matches("TimeSpan").count() < 100, "spans of closed steps are forgotten");
}

proptest! {
    /// Whatever the timeline says, the causes of a step sum to its time, and those of all steps to the wall time.
    #[test]
    fn causes_sum_to_the_time_of_a_step(
        lines in prop::collection::vec((0..11_usize, 0..6_u64, 0.0..50.0_f64, 0.0..20.0_f64), 1..120),
    ) {
        let kinds = [
            ("trainer", "wait_for_batch", ""),
            ("trainer", "forward_backward", ""),
            ("trainer", "save_checkpoint", ""),
            ("trainer rank 0", "wait", ""),
            ("trainer rank 1", "forward_backward", ""),
            ("sampler 0", "sample", ""),
            ("sampler 0", "wait", r#","note":"the buffer, asked for slots""#),
            ("journal", "commit", ""),
            ("trajectory", "trajectory", ""),
            ("trainer", "regroup", ""),
            ("trainer", "snapshot", ""),
        ];
        let mut timeline = String::new();
        for (kind, step, start, seconds) in lines {
            let (lane, kind, note) = kinds[kind];
            let [a, b, c] = [start + seconds / 3.0, start + seconds / 2.0, start + seconds];
            let rest = format!(
                r#","step":{step},"sampled":{a},"scored":{b},"settled":{b},"stored":{c},"sampler":"sampler 0","last":true{note}"#
            );
            write!(timeline, "{}", span(lane, kind, [start, start + seconds], &rest)).unwrap();
        }
        let explanation = explained(&timeline);
        for step in 0..6 {
            if let Some(step) = explanation.step(step) {
                let sum: f64 = step.path.iter().map(|(_, seconds)| seconds).sum();
                prop_assert!((sum - step.seconds).abs() < 1e-9);
                prop_assert!(step.path.iter().all(|(_, seconds)| *seconds > 0.0));
            }
        }
        let sum: f64 = explanation.causes.iter().map(|share| share.seconds).sum();
        prop_assert!((sum - explanation.wall_s).abs() < 1e-6);
    }
}
