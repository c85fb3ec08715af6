//! Checkpoints that are damaged, older than the last, or written by an older rlrun; and their exports.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::support::{Home, Run, repository};

/// A run directory that rlrun 0.1.0 wrote: four steps of a tiny model, with the journal of the fifth.
fn run_of_0_1_0() -> PathBuf {
    repository().join("tests/runs/v0.1.0")
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &to);
        } else {
            fs::copy(&path, &to).unwrap();
        }
    }
}

/// Flips a bit of the last number in a file of weights.
fn damage(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let last = bytes.len() - 3;
    bytes[last] ^= 1;
    fs::write(path, bytes).unwrap();
}

/// The fields of the events of this name.
fn events(run: &Run, name: &str) -> Vec<Value> {
    let text = fs::read_to_string(run.path.join("events.jsonl")).unwrap();
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.filter(|event| event["event"] == name).map(|event| event["fields"].clone()).collect()
}

fn steps(run: &Run) -> Vec<u64> {
    run.metrics().iter().map(|line| line["step"].as_u64().unwrap()).collect()
}

#[test]
fn a_damaged_checkpoint_is_set_aside_and_an_older_one_resumes() {
    let home = Home::new();
    let run = home.small("run", &["trainer.steps=9", "checkpoint.keep_last=3", "buffer.max_staleness=1"]);
    damage(&run.checkpoint(9).join("model/model.safetensors"));
    home.rlrun(&["export", "run", "--out", "x"]).refused(&["model.safetensors is damaged", "digest"]);

    let resumed = home.rlrun(&["resume", "run", "--set", "trainer.steps=12"]).ok();
    let said = resumed.stdout + &resumed.stderr;
    for part in [
        "the checkpoint of step 9 cannot be used",
        "model.safetensors is damaged: its blake3 digest is",
        "step_000009.aside",
        "resumed after step 6",
        "24 groups that later steps were trained on are gone",
    ] {
        assert!(said.contains(part), "`{part}` is missing in:\n{said}");
    }
    assert_eq!(steps(&run), (0..=12).collect::<Vec<_>>());
    assert_eq!(events(&run, "checkpoint_damaged")[0]["version"], 9);
    assert_eq!(events(&run, "checkpoint_set_aside").len(), 1);
    let rewind = &events(&run, "rewind")[0];
    assert_eq!((&rewind["version"], &rewind["groups_gone"]), (&6.into(), &24.into()));
    assert!(run.path.join("checkpoints/step_000009.aside/model").is_dir());
    home.rlrun(&["export", "run", "--step", "9", "--out", "nine"]).ok();
    let groups: Vec<u64> =
        (1..=12).flat_map(|step| run.samples(step)).map(|group| group["group"].as_u64().unwrap()).collect();
    assert_eq!(groups.iter().collect::<BTreeSet<_>>().len(), 12 * 8, "{groups:?}");
    assert!(run.values("staleness/max").iter().all(|max| *max <= 1.0));

    home.rlrun(&["resume", "run", "--from", "7"]).refused(&["has no checkpoint of step 7", "steps 6, 9, 12"]);
    let back = home.rlrun(&["resume", "run", "--from", "6", "--set", "trainer.steps=8"]).ok();
    let said = back.stdout + &back.stderr;
    assert!(said.contains("resumed after step 6") && said.contains("groups that later steps"), "{said}");
    assert_eq!(steps(&run), (0..=8).collect::<Vec<_>>());
    assert!(run.path.join("checkpoints/step_000009.aside1").is_dir());
    assert!(run.path.join("checkpoints/step_000012.aside").is_dir());

    // A run without an intact checkpoint does not start over.
    for version in [6, 8] {
        damage(&run.checkpoint(version).join("optimizer.safetensors"));
    }
    home.rlrun(&["resume", "run"]).refused(&["no checkpoint in", "step 8: ", "step 6: "]);
    assert_eq!(steps(&run), (0..=8).collect::<Vec<_>>());
}

#[test]
fn a_run_directory_of_0_1_0_resumes() {
    let home = Home::new();
    let run = home.run("old");
    copy(&run_of_0_1_0(), &run.path);
    let resumed = home.rlrun(&["resume", "old", "--set", "trainer.steps=6"]).ok();
    let said = resumed.stdout + &resumed.stderr;
    assert!(said.contains("resumed after step 4"), "{said}");
    assert!(said.contains("carry no digests, as those of format 1"), "{said}");
    assert_eq!(steps(&run), (0..=6).collect::<Vec<_>>());
    assert!(fs::read_to_string(run.path.join("run.json")).unwrap().contains("\"format\": 2"));
    assert!(run.checkpoint(6).join("manifest.json").is_file());
    assert!(events(&run, "rewind").is_empty());
    fs::write(run.path.join("run.json"), "{\"format\": 9}").unwrap();
    home.rlrun(&["resume", "old"]).refused(&["has format 9, and this rlrun reads 1 to 2"]);
}

#[test]
fn an_export_declares_what_it_writes_and_an_adapter_names_the_model_of_the_user() {
    let home = Home::new();
    copy(&run_of_0_1_0().join("model"), &home.path("mine"));
    let sets = [
        "model.path=mine",
        "lora.rank=2",
        "trainer.steps=1",
        "warmup.steps=0",
        "data.max_prompt_length=12",
        "rollout.max_completion_length=8",
    ];
    home.small("run", &sets);
    for (dtype, declared) in [("f32", "float32"), ("bf16", "bfloat16"), ("f16", "float16")] {
        home.rlrun(&["export", "run", "--out", dtype, "--dtype", dtype]).ok();
        let config = fs::read(home.path(dtype).join("config.json")).unwrap();
        let config: Value = serde_json::from_slice(&config).unwrap();
        assert_eq!(config["torch_dtype"], declared);
    }
    let size = |dtype: &str| fs::metadata(home.path(dtype).join("model.safetensors")).unwrap().len();
    assert!(size("bf16") < size("f32") && size("f16") < size("f32"));
    home.rlrun(&["export", "run", "--adapter", "--out", "adapter"]).ok();
    let config = fs::read(home.path("adapter/adapter_config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    let base = config["base_model_name_or_path"].as_str().unwrap();
    assert_eq!(Path::new(base).canonicalize().unwrap(), home.path("mine").canonicalize().unwrap());
    home.rlrun(&["export", "run", "--adapter", "--dtype", "bf16", "--out", "y"]).refused(&["--adapter"]);
}
