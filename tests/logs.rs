//! What a run writes beside its metrics: timeline, samples token by token, status, and the live page that it serves.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::path::Path;

use serde_json::{Map, Value};

use crate::served::{Client, Place};
use crate::support::{Home, Moment, Run, finish, interrupt, lines};
use crate::workers::{PROCESSES, until};

type Line = Map<String, Value>;

fn timeline(run: &Run) -> Vec<Line> {
    lines(&run.path.join("timeline.jsonl"))
}

fn second(line: &Line, name: &str) -> f64 {
    line[name].as_f64().unwrap_or_else(|| panic!("{name} in {line:?}"))
}

fn of_kind(lines: &[Line], kind: &str) -> Vec<Line> {
    lines.iter().filter(|line| line["kind"] == kind).cloned().collect()
}

fn status(run: &Run) -> Value {
    serde_json::from_slice(&std::fs::read(run.path.join("status.json")).unwrap()).unwrap()
}

#[test]
fn the_timeline_has_every_step_and_the_way_of_its_first_trajectories() {
    let home = Home::new();
    let run =
        home.small("run", &["trainer.steps=6", "log.timeline=5", "eval.interval=3", "checkpoint.interval=2"]);
    let (lines, steps) = (timeline(&run), run.steps());
    let trained = of_kind(&lines, "forward_backward");
    assert_eq!(trained.len(), steps.len());
    let mut before = 0.0;
    for (span, step) in trained.iter().zip(&steps) {
        let (start, end) = (second(span, "start"), second(span, "end"));
        assert_eq!(span["step"], step["step"]);
        assert!((end - start - second(step, "time/forward_backward")).abs() < 1e-5, "{span:?} {step:?}");
        assert!(start >= before && end <= second(step, "time_s"), "{span:?} {step:?}");
        before = end;
    }
    assert_eq!(of_kind(&lines, "evaluate").len(), 2);
    let pushed: Vec<Value> = of_kind(&lines, "push").iter().map(|push| push["version"].clone()).collect();
    assert_eq!(pushed, steps.iter().map(|step| step["step"].clone()).collect::<Vec<_>>());
    for lane in ["trainer", "sampler 0", "reward regex", "weights"] {
        assert!(lines.iter().any(|line| line["lane"] == lane), "{lane}");
    }
    for line in &lines {
        assert!(second(line, "start") <= second(line, "end"), "{line:?}");
    }
    let trajectories = of_kind(&lines, "trajectory");
    for step in &steps {
        let of_step: Vec<&Line> = trajectories.iter().filter(|line| line["step"] == step["step"]).collect();
        // The first five, and the one that was stored last if it is not among them.
        assert!([5, 6].contains(&of_step.len()), "{of_step:?}");
        let last: Vec<&&Line> = of_step.iter().filter(|line| line.contains_key("last")).collect();
        let stored = of_step.iter().map(|line| second(line, "stored")).fold(0.0, f64::max);
        assert!(last.len() == 1 && second(last[0], "stored") == stored, "{of_step:?}");
    }
    for trajectory in &trajectories {
        assert_eq!(trajectory["sampler"], "sampler 0");
        // A group can be leased before its sampler hears that it is stored. The times of the trainer come from another clock of the
        // same machine.
        for stages in
            [&["start", "sampled", "scored", "settled", "stored"][..], &["settled", "leased", "end"]]
        {
            let times: Vec<f64> = stages.iter().map(|name| second(trajectory, name)).collect();
            assert!(times.windows(2).all(|pair| pair[0] <= pair[1] + 0.005), "{trajectory:?}");
        }
        let (lag, step) = (trajectory["lag"].as_u64().unwrap(), trajectory["step"].as_u64().unwrap());
        let oldest = trajectory["versions"][0].as_u64().unwrap();
        assert_eq!(lag, step - 1 - oldest, "{trajectory:?}");
    }
    let status = status(&run);
    assert_eq!((&status["step"], &status["weights"]["version"]), (&6.into(), &6.into()));
    assert_eq!(status["weights"]["receivers"][0]["name"], "sampler 0");
}

/// Sampler and trainer compute the same bits, so the columns of both are equal.
#[test]
fn samples_token_by_token_are_those_that_were_trained_on() {
    let home = Home::new();
    let sets = ["rollout.bitwise=true", "buffer.max_staleness=0", "trainer.steps=3", "log.samples=4"];
    let run = home.small("run", &sets);
    let mut compared = 0;
    for step in 1..=3 {
        let groups = run.samples(step);
        let rows = lines(&run.path.join(format!("samples/step_{step:06}_tokens.jsonl")));
        let trajectories = || {
            groups.iter().flat_map(|group| {
                group["trajectories"].as_array().unwrap().iter().map(move |one| (&group["group"], one))
            })
        };
        assert_eq!(rows.len(), trajectories().count());
        for (row, (group, trajectory)) in rows.iter().zip(trajectories()) {
            assert_eq!((&row["group"], &row["index"]), (group, &trajectory["index"]));
            let column = |name: &str| row[name].as_array().unwrap();
            let mask: Vec<bool> = column("loss_mask").iter().map(|trained| trained == 1).collect();
            let texts: Vec<&str> = column("texts").iter().map(|text| text.as_str().unwrap()).collect();
            let sampled: String =
                texts.iter().zip(&mask).filter(|(_, own)| **own).map(|(text, _)| *text).collect();
            let special = ["<unk>", "<eos>", "<pad>"];
            let sampled = special.iter().fold(sampled, |text, token| text.replace(token, ""));
            assert_eq!(sampled, trajectory["completion"].as_str().unwrap(), "{trajectory}");
            assert_eq!(
                column("versions").iter().map(|run| run["len"].as_u64().unwrap()).sum::<u64>(),
                mask.len() as u64
            );
            let (mut sum, mut known) = (0.0, 0.0);
            for (token, trained) in mask.iter().enumerate() {
                let of = |name: &str| &column(name)[token];
                assert_eq!(*trained, of("behavior_logprobs").is_f64(), "{row:?}");
                if of("trainer_logprobs").is_f64() {
                    assert_eq!(of("trainer_logprobs"), of("behavior_logprobs"));
                    compared += 1;
                }
                if let Some(advantage) = of("advantages").as_f64() {
                    (sum, known) = (sum + advantage, known + 1.0);
                }
            }
            let mean = if known > 0.0 { sum / known } else { 0.0 };
            assert!((trajectory["advantage"].as_f64().unwrap() - mean).abs() < 1e-5, "{trajectory} {mean}");
        }
    }
    assert!(compared > 0, "no group had a gradient");
}

#[test]
fn logs_can_be_turned_off_and_a_resume_goes_on_with_them() {
    let home = Home::new();
    let run = home.small("run", &["trainer.steps=2", "log.timeline=0", "log.tokens=false"]);
    assert!(!run.path.join("timeline.jsonl").exists());
    assert!(run.path.join("samples/step_000002.jsonl").exists());
    assert!(!run.path.join("samples/step_000002_tokens.jsonl").exists());
    std::fs::write(run.path.join("timeline.jsonl"), "{\"lane\":\"torn").unwrap();
    let sets = ["trainer.steps=4", "log.timeline=1", "log.tokens=true"];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", *set]).collect();
    home.rlrun(&[&["resume", "run"], &sets[..]].concat()).ok();
    let text = std::fs::read_to_string(run.path.join("timeline.jsonl")).unwrap();
    let (torn, rest) = text.split_once('\n').unwrap();
    assert_eq!(torn, "{\"lane\":\"torn");
    let parsed: Vec<Line> = rest.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let mut steps: Vec<Value> =
        of_kind(&parsed, "trajectory").iter().map(|line| line["step"].clone()).collect();
    // The one that a step waited for last has a line of its own if it is another, or is known later.
    steps.dedup();
    assert_eq!(steps, [3, 4]);
    assert!(run.path.join("samples/step_000004_tokens.jsonl").exists());
}

/// Texts of prompts may be private or large: no log has them when no samples are wanted.
#[test]
fn event_files_of_tensorboard_have_texts_only_if_samples_are_wanted() {
    let home = Home::new();
    for (samples, wanted) in [("log.samples=0", false), ("log.samples=1", true)] {
        let run = home.small(samples, &["trainer.steps=1", samples]);
        let mut files = run.path.join("tensorboard").read_dir().unwrap();
        let events = std::fs::read(files.next().unwrap().unwrap().path()).unwrap();
        let has = |text: &str| events.windows(text.len()).any(|part| part == text.as_bytes());
        assert!(has("reward/mean"), "{samples}");
        assert_eq!(has("**prompt**"), wanted, "{samples}");
    }
}

/// Rollout workers report what they did with their heartbeats, which come once a second.
#[test]
fn workers_in_other_processes_have_lanes() {
    let home = Home::new();
    let mut child = home.start_endless("run", &PROCESSES);
    let run = home.run("run");
    assert!(run.wait_for(Moment::Step(1), &mut child));
    let shown = || format!("{:?}", whole_lines(&run.path.join("timeline.jsonl")).last());
    let seen = || {
        let lines = whole_lines(&run.path.join("timeline.jsonl"));
        let has = |test: &dyn Fn(&Line) -> bool| lines.iter().any(test);
        has(&|line| line["lane"] == "rollout 0" && line["kind"] == "sample")
            && has(&|line| line["lane"] == "rollout 1" && line["kind"] == "sample")
            && has(&|line| line["kind"] == "trajectory" && line.contains_key("sampler"))
    };
    until("lanes of both workers, and a trajectory with its sampler", &seen, &shown);
    let roles = status(&run)["roles"].to_string();
    assert!(roles.contains("rollout 0 (process "), "{roles}");
    interrupt(&child);
    finish(child);
}

/// Threads and processes: each rank has its spans, and a wait names the rank that works meanwhile.
#[test]
fn ranks_of_the_trainer_have_lanes() {
    let home = Home::new();
    let two = ["trainer.steps=3", "trainer.world=2", "log.timeline=1"];
    let processes = ["placement.processes=true", "trainer.ranks=processes", "trainer.zero=3"];
    for (name, sets) in [("threads", two.to_vec()), ("processes", [&two[..], &processes].concat())] {
        let run = home.small(name, &sets);
        let (lines, steps) = (timeline(&run), run.steps());
        let trained = of_kind(&lines, "forward_backward");
        let of_step = |lane: &str, step: &Line| -> Vec<Line> {
            let is = |line: &&Line| line["lane"] == lane && line["step"] == step["step"];
            lines.iter().filter(is).cloned().collect()
        };
        let mut waits = 0;
        for step in &steps {
            let own = |line: &&Line| line["lane"] == "trainer" && line["step"] == step["step"];
            let whole = trained.iter().find(own).unwrap();
            for lane in ["trainer rank 0", "trainer rank 1"] {
                let spans = of_step(lane, step);
                let kinds = ["forward", "forward_backward", "wait", "optimizer"];
                assert!(spans.iter().all(|span| kinds.iter().any(|kind| span["kind"] == *kind)), "{spans:?}");
                if step["optim/updates"] != 0 {
                    let passes = spans.iter().any(|span| span["kind"] == "forward_backward");
                    assert!(passes, "{name}: {lane} {spans:?}");
                }
                for pair in spans.windows(2) {
                    assert!(second(&pair[0], "end") <= second(&pair[1], "start") + 2e-6, "{name}: {pair:?}");
                }
                for span in &spans {
                    // Another process gets the batch a little later than its clock says.
                    assert!(second(span, "start") >= second(whole, "start"), "{name}: {span:?} {whole:?}");
                    assert!(second(span, "end") <= second(whole, "end") + 0.05, "{name}: {span:?} {whole:?}");
                    if span["kind"] == "wait" {
                        let note = span["note"].as_str().unwrap();
                        assert!(
                            note.starts_with("trainer rank ") && note != lane
                                || note.starts_with("the exchange")
                        );
                        waits += 1;
                    }
                }
            }
            let share = step["trainer/rank_wait_ratio"].as_f64().unwrap();
            assert!((0.0..=1.0).contains(&share), "{name}: {share}");
        }
        assert!(waits > 0, "{name}: the ranks never wait for each other");
    }
    let one = home.small("one", &["trainer.steps=1"]);
    assert!(timeline(&one).iter().all(|line| !line["lane"].as_str().unwrap().contains("rank")));
    assert!(!one.steps()[0].contains_key("trainer/rank_wait_ratio"));
}

/// The lines of a file that is being written.
fn whole_lines(path: &Path) -> Vec<Line> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_inclusive('\n')
        .filter(|line| line.ends_with('\n'))
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn a_run_serves_its_own_page_until_it_ends() {
    let home = Home::new();
    let mut child = home.start_endless("run", &["dashboard.listen=127.0.0.1:0"]);
    let run = home.run("run");
    run.wait_to_show("the live page is at http://", &mut child);
    let log = std::fs::read_to_string(run.path.join("logs/attempt_1.log")).unwrap();
    let address = log.split("http://").nth(1).unwrap().lines().next().unwrap().to_owned();
    let place = Place::at(address.parse().unwrap());
    assert!(run.wait_for(Moment::Step(2), &mut child));
    let seen = || {
        let (_, answer, _) = Client::new(&place).ask("GET", "/api/runs", &Value::Null);
        answer[0]["state"] == "running" && answer[0]["step"].as_f64().is_some_and(|step| step >= 1.0)
    };
    until("a step on the page", &seen, &|| log.clone());
    interrupt(&child);
    finish(child);
    assert!(TcpStream::connect(&address).is_err(), "the page ends with the run");
}

#[test]
fn an_address_for_others_needs_a_token_and_a_collector_an_address() {
    let home = Home::new();
    let refused = |set: &str, evidence: &[&str]| {
        drop(home.rlrun(&["check", "small.toml", "--set", set]).refused(evidence));
    };
    refused(
        "dashboard.listen=0.0.0.0:0",
        &["other machines can reach without a token", "dashboard.token_file"],
    );
    refused("log.otlp=collector:4318", &["is no address", "http://127.0.0.1:4318"]);
}

#[test]
fn a_served_buffer_has_a_page() {
    let home = Home::new();
    let arguments =
        ["serve", "buffer", "--dir", "kept", "--listen", "127.0.0.1:0", "--dashboard", "127.0.0.1:0"];
    let mut child = home.start(&arguments);
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("the page is at http://") {
        line.clear();
        assert!(errors.read_line(&mut line).unwrap() > 0, "the server has ended");
    }
    let address = line.trim().rsplit("http://").next().unwrap();
    let place = Place::at(address.parse().unwrap());
    let (status, runs, _) = Client::new(&place).ask("GET", "/api/runs", &Value::Null);
    assert_eq!((status, &runs[0]["name"]), (200, &"kept".into()));
    let status: Value =
        serde_json::from_slice(&std::fs::read(home.path("kept/status.json")).unwrap()).unwrap();
    assert_eq!(
        (&status["buffer"]["batch_groups"], &status["buffer"]["groups"]),
        (&64.into(), &Value::Array(vec![]))
    );
    interrupt(&child);
    assert!(child.wait().unwrap().success());
}
