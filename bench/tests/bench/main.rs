//! `rlrun-bench` as a user calls it: what it prints, and what it refuses. No time is asserted.

mod support;

use std::path::Path;

use model::{Config, ModelDirectory, Sizes};
use serde_json::{Map, Value};

use support::{Done, Home, repository};

/// A fresh model of a few thousand weights.
fn tiny(home: &Home) -> ModelDirectory {
    let config = Config::fresh(&Sizes {
        vocab_size: model::CHARACTERS,
        hidden_size: 16,
        intermediate_size: 32,
        num_layers: 2,
        num_heads: 2,
        num_kv_heads: 1,
        max_position_embeddings: 64,
    });
    ModelDirectory::fresh(&home.path("tiny"), &config, 1).unwrap()
}

/// Writes the recipe `small.toml`, whose steps take milliseconds.
fn small_recipe(home: &Home) {
    let base = repository().join("recipes/grpo_math.toml");
    let changes = "[rollout]\ngroup_size = 8\nmax_running = 192\n[buffer]\nbatch_groups = 8\n";
    home.write("small.toml", &format!("extends = {base:?}\n{changes}"));
}

/// The objects that a command with `--json` prints.
fn objects(done: Done) -> Vec<Map<String, Value>> {
    done.ok().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Asserts that `object` has every field that is promised of all measures, with numbers that can be.
fn assert_measured(object: &Map<String, Value>) {
    for name in [
        "parameters",
        "threads",
        "repeats",
        "seconds",
        "tokens",
        "tokens_per_s",
        "gflops",
        "gbytes_per_s",
        "peak_gflops",
        "peak_gbytes_per_s",
        "share_of_fma",
        "share_of_bandwidth",
        "memory_mib",
        "memory_before_mib",
    ] {
        assert!(object[name].as_f64().is_some_and(|value| value > 0.0), "{name} in {object:?}");
    }
    assert!(object["memory_mib"].as_f64() >= object["memory_before_mib"].as_f64(), "{object:?}");
    assert_eq!(object["model"], "tiny");
}

#[cfg(feature = "emulator")]
#[test]
fn a_device_is_compared_with_its_own_limits() {
    let home = Home::new();
    tiny(&home);
    let common = ["--model", "tiny", "--repeats", "1", "--threads", "1", "--device", "emulated", "--json"];
    let generate = ["generate", "--batch", "2", "--group", "2", "--prompt", "3", "--new", "4"];
    let train = ["train", "--sequences", "2", "--length", "6", "--dtype", "bf16"];
    for (what, tokens, dtype) in [(&generate[..], 8.0, "f32"), (&train[..], 12.0, "bf16")] {
        let [found] = &objects(home.bench(&[what, &common[..]].concat()))[..] else { panic!("one result") };
        assert_measured(found);
        assert_eq!((&found["device"], &found["dtype"]), (&"emulated".into(), &dtype.into()));
        assert_eq!(found["tokens"], tokens);
        assert!(found["device_mib"].as_f64().is_some_and(|mib| mib > 0.0), "{found:?}");
    }
    let table = home.bench(&[&generate[..], &common[..8]].concat()).ok();
    assert!(
        table.starts_with("emulated: at most ") && table.contains("device emulated, dtype f32"),
        "{table}"
    );
    let quantized = home.bench(&[&generate[..], &common[..8], &["--quantization", "int8"]].concat());
    quantized.refused("--quantization has kernels for the processor alone");
    home.bench(&[&train[..], &common[..6]].concat()).refused("--dtype bf16 needs --device");
}

#[test]
fn sampling_and_training_are_measured() {
    let home = Home::new();
    tiny(&home);
    let generate = home.bench(&[
        "generate",
        "--model",
        "tiny",
        "--batch",
        "4",
        "--group",
        "2",
        "--prompt",
        "3",
        "--new",
        "5",
        "--repeats",
        "2",
        "--threads",
        "1",
        "--json",
    ]);
    let [generate] = &objects(generate)[..] else { panic!("one result") };
    assert_measured(generate);
    assert_eq!(
        (&generate["measure"], &generate["tokens"], &generate["repeats"]),
        (&"generate".into(), &20.0.into(), &2.into())
    );
    assert_eq!(
        (&generate["batch"], &generate["group"], &generate["threads"]),
        (&4.into(), &2.into(), &1.into())
    );

    let train = home.bench(&[
        "train",
        "--model",
        "tiny",
        "--sequences",
        "3",
        "--length",
        "7",
        "--microbatch-tokens",
        "8",
        "--repeats",
        "1",
        "--json",
    ]);
    let [train] = &objects(train)[..] else { panic!("one result") };
    assert_measured(train);
    assert_eq!(
        (&train["measure"], &train["tokens"], &train["sequences"]),
        (&"train".into(), &21.0.into(), &3.into())
    );
}

#[test]
fn operations_are_measured_for_every_number_of_rows() {
    let home = Home::new();
    tiny(&home);
    let done = home.bench(&["ops", "--model", "tiny", "--rows", "1,5", "--repeats", "1", "--json"]);
    let results = objects(done);
    let gate_up: Vec<_> = results.iter().filter(|result| result["op"] == "gate_up").collect();
    assert_eq!(gate_up.iter().map(|result| &result["rows"]).collect::<Vec<_>>(), [1, 5]);
    gate_up.into_iter().for_each(assert_measured);
    assert!(results.iter().any(|result| result["op"] == "attention_pack_dx"));
}

#[test]
fn a_sweep_is_a_table_and_a_picture() {
    let home = Home::new();
    tiny(&home);
    let done = home.bench(&[
        "generate",
        "--model",
        "tiny",
        "--sweep",
        "--prompt",
        "2",
        "--new",
        "2",
        "--repeats",
        "1",
        "--plot",
        "sweep.svg",
    ]);
    let table = done.ok();
    assert_eq!(table.lines().filter(|line| line.starts_with("generate ")).count(), 9, "{table}");
    assert!(table.contains("batch 256,") && table.contains("tokens/s"), "{table}");
    let picture = std::fs::read_to_string(home.path("sweep.svg")).unwrap();
    assert_eq!(picture.matches("<circle").count(), 9, "{picture}");
}

#[test]
fn the_loop_runs_on_given_tasks_at_a_forced_length() {
    let home = Home::new();
    tiny(&home);
    home.write(
        "tasks.jsonl",
        "{\"prompt\":\"1+1=\",\"answer\":\"2\"}\n{\"prompt\":\"20+3=\",\"answer\":\"23\"}\n",
    );
    let done = home.bench(&[
        "loop",
        "--model",
        "tiny",
        "--tasks",
        "tasks.jsonl",
        "--prompts",
        "2",
        "--group",
        "4",
        "--force-length",
        "6",
        "--steps",
        "4",
        "--staleness",
        "0,1",
        "--json",
    ]);
    let results = objects(done);
    assert_eq!(results.iter().map(|result| &result["staleness"]).collect::<Vec<_>>(), [0, 1]);
    for result in &results {
        assert_measured(result);
        assert_eq!((&result["measure"], &result["forced"]), (&"loop".into(), &true.into()));
        // Nothing ends early, and every completion is trained on.
        assert_eq!(
            (&result["mean_length"], &result["trained_share"]),
            (&6.0.into(), &1.0.into()),
            "{result:?}"
        );
        assert_eq!(result["tokens"], 48.0);
    }
    assert!(!Path::new(&home.path("outputs")).exists(), "a measurement leaves no run behind");
}

#[test]
fn a_recipe_is_measured_as_it_is() {
    let home = Home::new();
    small_recipe(&home);
    let done = home.bench(&[
        "loop",
        "--recipe",
        "small.toml",
        "--steps",
        "3",
        "--staleness",
        "0",
        "--set",
        "warmup.steps=1",
        "--set",
        "data.arithmetic.eval_tasks=2",
        "--json",
    ]);
    let [result] = &objects(done)[..] else { panic!("one result") };
    assert_eq!(
        (&result["prompts"], &result["group"], &result["forced"]),
        (&8.into(), &8.into(), &false.into())
    );
}

#[test]
fn mistakes_are_refused_with_the_nearest_name() {
    let home = Home::new();
    tiny(&home);
    small_recipe(&home);
    for (args, evidence) in [
        (&["generat", "--model", "tiny"][..], "'generate'"),
        (&[], "--model <DIR>"),
        (&["--model", "nowhere"], "nowhere"),
        (&["train", "--model", "tiny", "--sequence", "3"], "'--sequences'"),
        (&["train", "--model", "tiny", "--length", "100"], "the model's context of 64 tokens"),
        (&["generate", "--model", "tiny", "--batch", "6", "--group", "4"], "--group 4"),
        (&["generate", "--model", "tiny", "--new", "0"], "1 or more"),
        (&["train", "--model", "tiny", "--optimizer", "adamw8"], "adamw, adamw8bit"),
        (&["generate", "--model", "tiny", "--prompt", "60"], "64"),
        (&["generate", "--model", "tiny", "--plot", "x.svg"], "--sweep"),
        (&["loop"], "--recipe <FILE>"),
        (&["loop", "--model", "tiny", "--set", "trainer.step=3"], "trainer.steps"),
        (&["loop", "--recipe", "small.toml", "--tasks", "t.jsonl"], "--tasks"),
    ] {
        home.bench(args).refused(evidence);
    }
}

#[cfg(feature = "emulator")]
#[test]
fn pushes_that_stay_on_devices_are_measured_against_a_copy() {
    let home = Home::new();
    let locks = home.path("locks");
    std::fs::create_dir(&locks).unwrap();
    let locks = locks.to_str().unwrap();
    let results = objects(home.bench(&[
        "weights",
        "--device",
        "emulated",
        "--megabytes",
        "1",
        "--repeats",
        "2",
        "--shm",
        locks,
        "--json",
    ]));
    let of: Vec<_> = results.iter().map(|result| result["of"].as_str().unwrap()).collect();
    assert_eq!(of, ["device_copy", "device_memory", "device_ipc", "device_nccl"]);
    for result in &results {
        assert_eq!(
            (&result["device"], &result["bytes"]),
            (&"emulated".into(), &500_000.into()),
            "{result:?}"
        );
        let of_push: &[&str] =
            if result["of"] == "device_copy" { &[] } else { &["moved_s", "push_s", "of_device_copy"] };
        for name in ["ready_s", "gbytes_per_s"].iter().chain(of_push) {
            assert!(result[*name].as_f64().is_some_and(|value| value > 0.0), "{name} in {result:?}");
        }
    }
    assert_eq!(std::fs::read_dir(locks).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn environments_are_used_best_when_each_episode_begins_by_itself() {
    let sizes =
        ["--environments", "8", "--groups", "30", "--group", "4", "--tool-ms", "8", "--completion-ms", "4"];
    let done = Home::new().bench(&[&["episodes", "--json"], &sizes[..]].concat());
    let results = objects(done);
    let schedules: Vec<_> = results.iter().map(|result| result["schedule"].as_str().unwrap()).collect();
    assert_eq!(schedules, ["batch", "task", "rollout"]);
    let number = |n: usize, name: &str| results[n][name].as_f64().unwrap();
    for n in 0..3 {
        assert_eq!(results[n]["turns"], results[0]["turns"], "the same episodes");
        assert!(number(n, "seconds") >= number(n, "least_seconds") * 0.99, "{results:?}");
        assert!((0.0..=1.0).contains(&number(n, "utilisation")));
    }
    // Without a load beside it 93 %, and 1.6 times as fast as `batch`.
    assert!(number(2, "utilisation") > 0.7, "{results:?}");
    assert!(number(2, "faster_than_batch") > 1.2 && number(2, "faster_than_task") > 1.0, "{results:?}");
    assert!(number(2, "faster_than_batch") < number(2, "most_faster_than_batch"), "{results:?}");
}

/// A turn that continues the pages of its episode reads what is new; one whose pages were given up reads everything.
#[test]
fn a_turn_costs_what_is_new_and_all_of_it_without_its_pages() {
    let home = Home::new();
    tiny(&home);
    let sizes = ["--episodes", "3", "--turns", "4", "--read", "12", "--repeats", "1"];
    let done = home.bench(&[&["turns", "--model", "tiny", "--json"], &sizes[..]].concat());
    let results = objects(done);
    assert_eq!(results.len(), 4);
    for (n, result) in (0..).zip(&results) {
        // The token that was drawn last is read with the next turn.
        let known = if n == 0 { 0 } else { 1 };
        assert_eq!(result["kept_prefilled"], 3 * (12 + known), "{result:?}");
        assert_eq!(result["given_up_prefilled"], 3 * (12 + n * 13), "{result:?}");
        for name in ["kept_s", "given_up_s"] {
            assert!(result[name].as_f64().is_some_and(|seconds| seconds > 0.0), "{result:?}");
        }
    }
}

#[test]
fn a_served_buffer_is_measured_in_a_process_of_its_own() {
    let home = Home::new();
    let done =
        home.bench(&["buffer", "--clients", "2", "--seconds", "0.1", "--reopen-gib", "0.001", "--json"]);
    let results = objects(done);
    let of: Vec<_> = results.iter().map(|result| result["of"].as_str().unwrap()).collect();
    assert_eq!(of, ["append", "lease", "lease", "reopen", "in_process"]);
    for result in &results {
        // In so short a time there may be no whole batch to lease.
        let some = result["of"] == "lease" || result["groups"].as_u64().is_some_and(|groups| groups > 0);
        assert!(some, "{result:?}");
        assert!(result.get("errors").is_none_or(|errors| *errors == 0), "{result:?}");
    }
}
