//! `rlrun simulate` and `rlrun plan --search` as a user runs them.

use serde_json::Value;

use crate::support::Home;

/// Results of `rlrun-bench --json` for a model of `parameters` weights on the processor.
fn bench(parameters: u64) -> String {
    let generate = |batch: u32, ms: f64| {
        format!(
            "{{\"measure\":\"generate\",\"model\":\"m\",\"parameters\":{parameters},\"threads\":2,\"batch\":{batch},\"prompt\":8,\
             \"new\":16,\"decode_ms\":{ms},\"prefill_tokens_per_s\":50000.0,\"peak_gflops\":230.0}}\n"
        )
    };
    let train = |length: u32, seconds: f64| {
        format!(
            "{{\"measure\":\"train\",\"model\":\"m\",\"parameters\":{parameters},\"threads\":2,\"sequences\":8,\"length\":{length},\
             \"seconds\":{seconds},\"peak_gflops\":230.0}}\n"
        )
    };
    generate(1, 0.2) + &generate(64, 1.5) + &train(64, 0.02) + &train(512, 0.2)
}

fn parameters(home: &Home) -> u64 {
    let checked = home.rlrun(&["check", "small.toml"]).ok().stdout;
    let before = checked.split(" parameters").next().unwrap();
    before.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn a_recipe_is_simulated_with_estimates_and_with_measurements() {
    let home = Home::new();
    let estimated = home.rlrun(&["simulate", "small.toml", "--steps", "12", "--seeds", "3"]).ok().stdout;
    for shown in [
        "12 steps in virtual time on cpu, 3 seeds",
        "step_s ",
        "trainer_idle",
        "limited by ",
        "not calibrated for decoding",
    ] {
        assert!(estimated.contains(shown), "{shown}:\n{estimated}");
    }
    assert!(estimated.is_ascii());
    home.write("bench.jsonl", bench(parameters(&home)));
    let args = ["simulate", "small.toml", "--steps", "12", "--calibration", "bench.jsonl", "--json"];
    let first = home.rlrun(&args).ok().stdout;
    assert_eq!(first, home.rlrun(&args).ok().stdout, "the same seeds give the same numbers");
    let json: Value = serde_json::from_str(&first).unwrap();
    let number = |pointer: &str| {
        json.pointer(pointer).and_then(Value::as_f64).unwrap_or_else(|| panic!("{pointer}: {json}"))
    };
    assert!(number("/step_s/p10") <= number("/step_s/p50") && number("/step_s/p50") <= number("/step_s/p90"));
    assert!((0.0..=1.0).contains(&number("/trainer_idle/p50")) && number("/tokens_per_s/p50") > 0.0);
    let notes = json["notes"].to_string();
    assert!(!notes.contains("not calibrated"), "{notes}");
    // Slower decode steps make slower steps.
    home.write("slow.jsonl", bench(parameters(&home)).replace("\"decode_ms\":", "\"decode_ms\":9"));
    let slow = home
        .rlrun(&["simulate", "small.toml", "--steps", "12", "--calibration", "slow.jsonl", "--json"])
        .ok();
    let slow: Value = serde_json::from_str(&slow.stdout).unwrap();
    assert!(slow["step_s"]["p50"].as_f64().unwrap() > number("/step_s/p50"));
}

#[test]
fn measurements_of_something_else_are_refused() {
    let home = Home::new();
    let refused = |args: &[&str]| {
        let done = home.rlrun(&[&["simulate", "small.toml"], args].concat());
        assert_eq!(done.status.code(), Some(2), "{}", done.stderr);
        done.stderr
    };
    home.write("other.jsonl", bench(7));
    let said = refused(&["--calibration", "other.jsonl"]);
    assert!(
        said.contains("not calibrated for")
            && said.contains("7 parameters")
            && said.contains("rlrun-bench generate"),
        "{said}"
    );
    home.write("gpu.jsonl", bench(parameters(&home)).replace("\"threads\":2", "\"device\":\"cuda:0\""));
    assert!(refused(&["--calibration", "gpu.jsonl"]).contains("cuda:0"));
    let in_f32 = "\"device\":\"cuda:0\",\"dtype\":\"f32\"";
    home.write("f32.jsonl", bench(parameters(&home)).replace("\"threads\":2", in_f32));
    let said = refused(&["--hardware", "h200", "--calibration", "f32.jsonl"]);
    assert!(said.contains("not in the number format of the recipe"), "{said}");
    let said = refused(&["--set", "rollout.group_size=1000000000000"]);
    assert!(said.contains("completions can be in flight"), "{said}");
    home.write("text.jsonl", "{\"measure\":\n");
    assert!(refused(&["--calibration", "text.jsonl"]).contains("line 1 of"));
    assert!(refused(&["--calibration", "."]).contains("resolved.toml"));
    assert!(refused(&["--hardware", "h2000"]).contains("known are a100"));
    // A file without an end is not read.
    assert!(refused(&["--hardware", "/dev/zero"]).contains("cannot be a hardware file"));
    assert!(refused(&["--calibration", "/dev/zero"]).contains("cannot be a calibration"));
    // A run of another model.
    home.write("run/resolved.toml", "[model.random]\nhidden_size = 8\n");
    home.write("run/metrics.jsonl", "{\"step\":1}\n");
    assert!(refused(&["--calibration", "run"]).contains("not calibrated for this recipe"));
}

#[test]
fn the_fastest_settings_are_found_written_and_can_be_checked() {
    let home = Home::new();
    home.write("bench.jsonl", bench(parameters(&home)));
    let args = [
        "plan",
        "small.toml",
        "--search",
        "--seeds",
        "2",
        "--calibration",
        "bench.jsonl",
        "--write",
        "fast.toml",
    ];
    let found = home.rlrun(&args).ok().stdout;
    for shown in
        ["settings simulated on cpu", "why the others lose", "limited by ", "staleness ", "wrote fast.toml"]
    {
        assert!(found.contains(shown), "{shown}:\n{found}");
    }
    let checked = home.rlrun(&["check", "fast.toml"]).ok().stdout;
    assert!(checked.contains("no mistakes found"), "{checked}");
    let again = home.rlrun(&args);
    assert_eq!(again.status.code(), Some(2));
    assert!(again.stderr.contains("fast.toml exists"), "{}", again.stderr);
    let refused = home.rlrun(&["plan", "small.toml", "--search", "--gpus", "4"]);
    assert!(refused.stderr.contains("`--gpus` is given for hardware without GPUs"), "{}", refused.stderr);
    let refused = home.rlrun(&["plan", "small.toml", "--hardware", "h200"]);
    assert!(refused.stderr.contains("no effect without `--search`"), "{}", refused.stderr);
    // GPUs are planned for by a program that has none.
    let gpus = home
        .rlrun(&["plan", "small.toml", "--search", "--gpus", "4", "--hardware", "H200", "--seeds", "1"])
        .ok()
        .stdout;
    assert!(gpus.contains("4 x h200") && gpus.contains("train"), "{gpus}");
}

#[test]
fn published_rows_are_shown_with_their_errors() {
    let home = Home::new();
    let shown = home.rlrun(&["simulate", "--published"]).ok().stdout;
    for row in ["AReaL, 1.5B on 128 GPUs, bound 4", "NeMo-RL, GB200, 8 + 8, staleness 1", "arXiv 2505.24298"]
    {
        assert!(shown.contains(row), "{row}:\n{shown}");
    }
    assert!(shown.is_ascii() && shown.lines().all(|line| line.len() <= 120), "{shown}");
}
