//! Answers for files that the tests write.

use std::fmt::Write;

use proptest::prelude::*;

use super::*;
use crate::lines::LineTail;

/// A trainer that waits for a quarter of each second, a sampler that waits a tenth for a slot, and trajectories.
fn file(steps: usize, padding: usize) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let mut text = String::new();
    let pad = "x".repeat(padding);
    for step in 0..steps {
        let at = step as f64;
        for (lane, kind, start, end, more) in [
            ("trainer", "wait_for_batch", 0.0, 0.25, ""),
            ("trainer", "forward_backward", 0.25, 0.9, ""),
            ("sampler 0", "sample", 0.0, 0.9, ",\"version\":3"),
            ("sampler 0", "wait", 0.9, 1.0, ",\"note\":\"a slot\""),
            ("weights", "push", 0.9, 0.95, ",\"bytes\":77"),
        ] {
            let (start, end) = (at + start, at + end);
            writeln!(
                text,
                r#"{{"lane":"{lane}","kind":"{kind}","start":{start},"end":{end},"step":{step}{more},"pad":"{pad}"}}"#
            )
            .unwrap();
        }
        for index in 0..4 {
            let (start, sampled) = (at - 1.0, at - 0.5);
            writeln!(
                text,
                r#"{{"lane":"trajectory","kind":"trajectory","group":{step},"index":{index},"step":{step},"lag":2,"versions":[5,6],"start":{start},"sampled":{sampled},"leased":{at},"end":{}}}"#,
                at + 0.9
            )
            .unwrap();
        }
    }
    text.push_str("{\"lane\":\"watchdog\",\"kind\":\"stall\",\"start\":1.5,\"end\":1.75,\"note\":\"no <b>group</b>\"}\n{\"lane");
    std::fs::write(directory.path().join("timeline.jsonl"), text).unwrap();
    directory
}

fn ask(directory: &tempfile::TempDir, query: TimelineQuery) -> Value {
    let mut tail = LineTail::new(directory.path(), "timeline.jsonl");
    let mut index = TimelineIndex::default();
    tail.poll(&mut index).unwrap();
    TimelineAnswer::plan(&index, query, 1.0, 0).read(directory.path()).unwrap()
}

fn between(from: f64, to: f64) -> TimelineQuery {
    TimelineQuery { from: Some(from), to: Some(to), pixels: Some(1000) }
}

#[test]
fn the_newest_steps_come_first_with_what_each_lane_waits_for() {
    let directory = file(50, 0);
    let answer = ask(&directory, TimelineQuery::default());
    assert_eq!(
        (&answer["from"], &answer["to"], &answer["exact"]),
        (&json!(30.0), &json!(50.0), &json!(true))
    );
    let names: Vec<_> = answer["lanes"].as_array().unwrap().iter().map(|lane| &lane["name"]).collect();
    assert_eq!(names, ["trainer", "sampler 0", "weights", "watchdog"]);
    assert_eq!(answer["sentence"], "trainer waits 25 % for batches; sampler 0 waits 10 % for a slot");
    assert_eq!(answer["steps"][0], json!({"step": 30, "at": 30.0}));
    assert_eq!(answer["stalls"], json!([]));
}

#[test]
fn a_window_has_its_spans_with_all_their_fields() {
    let directory = file(50, 0);
    let answer = ask(&directory, between(1.1, 1.95));
    let spans = |lane: usize| answer["lanes"][lane]["spans"].as_array().unwrap().clone();
    assert_eq!(spans(0).len(), 2);
    assert_eq!(spans(2), [json!({"kind": "push", "start": 1.9, "end": 1.95, "step": 1, "bytes": 77})]);
    assert_eq!(answer["stalls"], json!([{"start": 1.5, "end": 1.75, "note": "no <b>group</b>"}]));
    let of_steps: Vec<_> =
        answer["trajectories"].as_array().unwrap().iter().map(|one| one["step"].as_u64().unwrap()).collect();
    assert_eq!(of_steps, [1, 1, 1, 1, 2, 2, 2, 2]);
    assert_eq!(answer["trajectories"][0]["versions"], json!([5, 6]));
}

#[test]
fn a_long_window_is_answered_with_sums() {
    let directory = file(4000, 1500);
    let answer = ask(&directory, between(0.0, 4000.0));
    assert_eq!((&answer["exact"], answer["trajectories"].as_array().unwrap().len()), (&json!(false), 0));
    assert_eq!(answer["sentence"], "trainer waits 25 % for batches; sampler 0 waits 10 % for a slot");
    let first = &answer["lanes"][0]["spans"][0];
    assert!(
        first["spans"].as_u64().unwrap() > 2 && first["seconds"]["wait_for_batch"].is_number(),
        "{first}"
    );
    let all: usize =
        answer["lanes"].as_array().unwrap().iter().map(|lane| lane["spans"].as_array().unwrap().len()).sum();
    assert!(all < 4 * 1000, "{all}");
    // A part of the same file is exact, wherever it is.
    let part = ask(&directory, between(3000.0, 3001.0));
    assert_eq!((&part["exact"], &part["lanes"][2]["spans"][0]["step"]), (&json!(true), &json!(3000)));
}

#[test]
fn trajectories_have_a_limit() {
    let directory = file(200, 0);
    let answer = ask(&directory, between(0.0, 200.0));
    assert_eq!(answer["trajectories"].as_array().unwrap().len(), MAX_TRAJECTORIES);
    assert_eq!(answer["trajectories_left_out"], 500);
    assert_eq!(answer["trajectories"][MAX_TRAJECTORIES - 1]["step"], 199);
}

#[test]
fn no_file_and_no_length_are_answers() {
    let directory = tempfile::tempdir().unwrap();
    let answer = ask(&directory, TimelineQuery::default());
    assert_eq!((&answer["lanes"], &answer["first"]), (&json!([]), &Value::Null));
    let directory = file(3, 0);
    for (from, to) in [(2.0, 1.0), (f64::NAN, 1.0), (0.0, f64::INFINITY)] {
        assert_eq!(ask(&directory, between(from, to))["from"], 0.0);
    }
}

#[test]
fn lanes_are_in_the_order_of_their_numbers() {
    let mut names = ["weights", "sampler 10", "sampler 2", "other", "trainer rank 1", "trainer", "reward b"];
    names.sort_by_key(|name| lane_order(name));
    assert_eq!(
        names,
        ["trainer", "trainer rank 1", "sampler 2", "sampler 10", "reward b", "weights", "other"]
    );
}

/// A line that may be one of a timeline, of another form, or torn.
fn any_line() -> impl Strategy<Value = String> {
    let time = prop_oneof![-2.0..12.0, -1e13..1e13, Just(0.0), Just(5.0)];
    let name = prop_oneof!["trainer", "[a-z]{1,3}", "trajectory", "watchdog", "sampler [0-9]{1,3}"];
    let kind = prop_oneof!["wait[a-z_]{0,9}", "trajectory", "stall", "[a-z]{1,3}"];
    (name, kind, time.clone(), time, any::<u64>(), 0..400_usize).prop_map(|(lane, kind, start, end, step, kept)| {
        let line = json!({"lane": lane, "kind": kind, "start": start, "end": end, "step": step, "note": "for x"});
        // Most are whole.
        line.to_string().chars().take(kept).collect()
    })
}

proptest! {
    #[test]
    fn any_file_and_any_window_have_a_bounded_answer(
        lines in prop::collection::vec(any_line(), 0..200),
        from in prop_oneof![-20.0..20.0, any::<f64>()],
        to in prop_oneof![-20.0..20.0, any::<f64>()],
        pixels in any::<usize>(),
    ) {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("timeline.jsonl"), lines.join("\n")).unwrap();
        let answer = ask(&directory, TimelineQuery { from: Some(from), to: Some(to), pixels: Some(pixels) });
        let lanes = answer["lanes"].as_array().unwrap();
        let spans = lanes.iter().flat_map(|lane| lane["spans"].as_array().unwrap());
        for span in spans.chain(answer["trajectories"].as_array().unwrap()) {
            prop_assert!(span["start"].as_f64().unwrap() <= span["end"].as_f64().unwrap());
        }
        for wait in lanes.iter().flat_map(|lane| lane["waits"].as_array().unwrap()) {
            prop_assert!((0.0..=1.0).contains(&wait["share"].as_f64().unwrap()));
        }
        prop_assert!(answer["to"].as_f64().unwrap() > answer["from"].as_f64().unwrap());
    }
}
