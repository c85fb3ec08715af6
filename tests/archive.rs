//! Runs with an archive in a directory: every checkpoint is stored, a lost machine is replaced, one lead at a time commits.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use rlrun::failpoints::VARIABLE;
use serde_json::Value;

use crate::served_run::serve_in;
use crate::support::{Home, Moment, Run, finish, small_args};

/// A run whose archive is the directory `archive` of `home`.
pub(crate) fn url(home: &Home) -> String {
    format!("file://{}", home.path("archive").display())
}

fn set(home: &Home) -> String {
    format!("checkpoint.url={}", url(home))
}

/// A JSON object of the archive.
fn object(home: &Home, name: &str) -> Value {
    let path = home.path("archive").join(name);
    serde_json::from_slice(&fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
        .unwrap()
}

fn lead(home: &Home) -> Value {
    object(home, "lead.json")
}

/// Steps of the checkpoints that the lead names.
fn steps_of(lead: &Value, list: &str) -> Vec<u64> {
    lead[list].as_array().unwrap().iter().map(|checkpoint| checkpoint["version"].as_u64().unwrap()).collect()
}

/// The index of the newest checkpoint.
fn newest_index(home: &Home) -> Value {
    object(home, lead(home)["checkpoints"].as_array().unwrap().last().unwrap()["index"].as_str().unwrap())
}

/// The path of the object that the newest checkpoint has for a file of the run directory.
fn object_of(home: &Home, file: &str) -> PathBuf {
    let index = newest_index(home);
    let name = index["files"][file]["object"].as_str().unwrap_or_else(|| panic!("no {file} in {index:#}"));
    home.path("archive").join(name)
}

/// Asserts that the archive has what its lead names and nothing else.
fn nothing_is_left_over(home: &Home) {
    let lead = lead(home);
    let mut named = BTreeSet::from(["lead.json".to_owned(), "lock".to_owned()]);
    for checkpoint in ["checkpoints", "aside"].iter().flat_map(|list| lead[list].as_array().unwrap()) {
        let index = checkpoint["index"].as_str().unwrap();
        named.insert(index.to_owned());
        let index = object(home, index);
        let files = index["files"].as_object().unwrap();
        named.extend(files.values().map(|file| file["object"].as_str().unwrap().to_owned()));
    }
    let mut found = BTreeSet::new();
    collect(&home.path("archive"), "", &mut found);
    assert_eq!(found, named);
}

fn collect(directory: &Path, prefix: &str, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = format!("{prefix}{}", path.file_name().unwrap().to_str().unwrap());
        if path.is_dir() {
            collect(&path, &format!("{name}/"), found);
        } else {
            found.insert(name);
        }
    }
}

fn steps(run: &Run) -> Vec<u64> {
    run.metrics().iter().map(|line| line["step"].as_u64().unwrap()).collect()
}

fn weights(run: &Run, step: u64) -> Vec<u8> {
    fs::read(run.checkpoint(step).join("model/model.safetensors")).unwrap()
}

/// Waits until the archive has a checkpoint of `step`.
fn wait_for_archived(home: &Home, step: u64) {
    let begun = std::time::Instant::now();
    let archived = || {
        let lead = fs::read(home.path("archive/lead.json")).ok()?;
        let lead: Value = serde_json::from_slice(&lead).ok()?;
        steps_of(&lead, "checkpoints").last().copied()
    };
    while archived().is_none_or(|newest| newest < step) {
        assert!(begun.elapsed().as_secs() < 600, "step {step} is not archived");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

#[test]
fn a_run_is_archived_with_its_logs_and_continues_in_another_directory() {
    let home = Home::new();
    let set = set(&home);
    let run = home.small("run", &["trainer.steps=9", "buffer.max_staleness=0", "log.schedule=true", &set]);
    let whole = home.small("whole", &["trainer.steps=12", "buffer.max_staleness=0"]);
    let first = lead(&home);
    assert_eq!((&first["epoch"], &first["name"]), (&1.into(), &"small".into()));
    assert_eq!(steps_of(&first, "checkpoints"), [6, 9]);
    nothing_is_left_over(&home);
    let files = newest_index(&home)["files"].as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
    for file in [
        "resolved.toml",
        "recipe.toml",
        "run.json",
        "metrics.jsonl",
        "events.jsonl",
        "logs/attempt_1.log",
        "samples/step_000009.jsonl",
        "schedule.bin",
        "model/model.safetensors",
        "checkpoints/step_000009/model/model.safetensors",
        "checkpoints/step_000009/manifest.json",
    ] {
        assert!(files.contains(file), "{file} is missing in {files:?}");
    }
    assert!(!files.iter().any(|file| file.contains("buffer.redb") || file.contains("step_000006/")));
    // The end of the run is archived too.
    let events = fs::read_to_string(object_of(&home, "events.jsonl")).unwrap();
    assert!(events.contains("\"event\":\"end\""), "{events}");

    // The machine is lost, and its journal with it.
    fs::rename(&run.path, home.path("lost")).unwrap();
    let url = url(&home);
    home.rlrun(&["resume", &url]).refused(&["name a directory for the run with --run-dir DIR"]);
    home.rlrun(&["resume", "lost", "--run-dir", "x"]).refused(&["fetched from its archive"]);
    home.rlrun(&["resume", &url, "--run-dir", "again"])
        .refused(&["buffer.redb is missing", "--without-journal"]);
    let epoch = &lead(&home)["epoch"];
    assert_eq!(epoch, 2, "a fetch takes the lead");
    home.rlrun(&["resume", &url, "--run-dir", "again", "--without-journal"])
        .refused(&["is not empty", "rlrun resume"]);
    let args = ["resume", "again", "--without-journal", "--set", "trainer.steps=12"];
    let resumed = home.rlrun(&args).ok();
    assert!(resumed.stdout.contains("resumed after step 9"), "{}", resumed.stdout);
    let again = home.run("again");
    assert_eq!(steps(&again), (0..=12).collect::<Vec<_>>());
    assert!(weights(&again, 9) == weights(&home.run("lost"), 9));
    let replay = home.rlrun(&["replay", "again", "-q"]).ok();
    assert!(replay.stdout.contains("12 steps"), "{}", replay.stdout);
    assert_eq!(again.samples(4), whole.samples(4), "samples of earlier steps come along");
    let second = lead(&home);
    assert_eq!((&second["epoch"], steps_of(&second, "checkpoints")), (&3.into(), vec![9, 12]));
    nothing_is_left_over(&home);

    // The lost machine comes back: it does not have the steps of the other one.
    home.rlrun(&["resume", "lost", "--set", "trainer.steps=20"]).refused(&[
        "another start of this run",
        "epoch 3, step 12",
        "--run-dir DIR",
    ]);
    home.rlrun(&["small.toml", "--run-dir", "new", "--set", &set, "--set", crate::support::CORRECT])
        .refused(&["has the run `small` at step 12", "rlrun resume file://"]);
    assert!(!home.path("new").exists(), "a run directory is left behind");
    assert_eq!(lead(&home), second);
}

/// With a buffer elsewhere nothing is lost with the machine: the run ends with the bits of one that was never interrupted.
#[test]
fn a_run_on_a_served_buffer_continues_exactly_in_another_directory() {
    let home = Home::new();
    let synchronous = ["buffer.max_staleness=0", "checkpoint.interval=2", "buffer.batch_groups=4"];
    let whole = home.small("whole", &[&synchronous[..], &["trainer.steps=6"]].concat());
    let server = serve_in(&home, "served");
    let (set, buffer) = (set(&home), format!("buffer.url=http://{}", server.address));
    let sets = [&synchronous[..], &["trainer.steps=6", "buffer.store=http", &buffer, &set]].concat();
    let args = [&small_args("run", &sets)[..], &["--resume-or-start"]].concat();
    // Killed with a checkpoint in the archive that is not committed.
    let killed = home.rlrun_with(&[(VARIABLE, "archive-commit=kill@3")], &args);
    assert_eq!(killed.status.code(), None, "{}\n{}", killed.stdout, killed.stderr);
    assert_eq!(steps_of(&lead(&home), "checkpoints"), [0, 2]);
    fs::rename(home.path("run"), home.path("lost")).unwrap();
    let done = home.rlrun(&args).ok();
    assert!(
        done.stderr.contains("was fetched from") || done.stdout.contains("was fetched from"),
        "{}",
        done.stdout
    );
    let run = home.run("run");
    assert!(weights(&run, 6) == weights(&whole, 6), "the weights differ");
    assert_eq!(steps(&run), (0..=6).collect::<Vec<_>>());
    assert_eq!(
        (4..=6).map(|s| run.samples(s)).collect::<Vec<_>>(),
        (4..=6).map(|s| whole.samples(s)).collect::<Vec<_>>()
    );
    nothing_is_left_over(&home);
}

#[test]
fn of_two_leads_only_the_newer_one_commits() {
    let home = Home::new();
    let (set, url) = (set(&home), url(&home));
    let run = home.run("run");
    let mut child = home.start_endless("run", &["checkpoint.interval=1", &set]);
    assert!(run.wait_for(Moment::Step(3), &mut child));
    wait_for_archived(&home, 2);
    let resume = ["resume", &url, "--run-dir", "taken", "--without-journal", "--set", "trainer.steps=5"];
    let mut taken = home.start(&resume);
    let old = finish(child);
    assert_eq!(old.status.code(), Some(1), "{}", old.stderr);
    for part in
        ["no longer the lead of the run", ", after epoch 1 of this process", "let the other one continue"]
    {
        assert!(old.stderr.contains(part), "`{part}` is missing in:\n{}", old.stderr);
    }
    let ended = taken.wait().unwrap();
    let said = finish(taken);
    assert!(ended.success(), "{}\n{}", said.stdout, said.stderr);
    assert_eq!(lead(&home)["epoch"], 3);
    home.rlrun(&["resume", "run"]).refused(&["another start of this run"]);
    // What the old lead was uploading when it ended is removed after the next start.
    let step = steps_of(&lead(&home), "checkpoints").last().copied().unwrap();
    home.rlrun(&["resume", "taken", "--set", &format!("trainer.steps={}", step + 1)]).ok();
    assert_eq!(lead(&home)["epoch"], 4);
    nothing_is_left_over(&home);
}

#[test]
fn damaged_objects_are_named_and_the_checkpoint_before_is_used() {
    let home = Home::new();
    let (set, url) = (set(&home), url(&home));
    home.small("run", &["trainer.steps=9", "checkpoint.keep_last=3", "buffer.max_staleness=1", &set]);
    let weights = object_of(&home, "checkpoints/step_000009/model/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let last = bytes.len() - 3;
    bytes[last] ^= 1;
    fs::write(&weights, bytes).unwrap();
    let args = ["resume", &url, "--run-dir", "lying", "--without-journal", "--set", "trainer.steps=10"];
    let done = home.rlrun(&args).ok();
    let said = done.stdout + &done.stderr;
    for part in [
        "the checkpoint of step 9 in the archive is damaged",
        "its blake3 digest is",
        "step_000009.aside",
        "resumed after step 6",
    ] {
        assert!(said.contains(part), "`{part}` is missing in:\n{said}");
    }
    assert_eq!(steps(&home.run("lying")), (0..=10).collect::<Vec<_>>());
    let now = lead(&home);
    assert_eq!(
        (steps_of(&now, "checkpoints"), steps_of(&now, "aside")),
        (vec![3, 6, 9, 10][1..].to_vec(), vec![9])
    );
    nothing_is_left_over(&home);

    // Truncated, gone, and no index: no checkpoint is left.
    let optimizer = object_of(&home, "checkpoints/step_000010/optimizer.safetensors");
    fs::write(&optimizer, "short").unwrap();
    let checkpoints = now["checkpoints"].as_array().unwrap();
    fs::write(home.path("archive").join(checkpoints[1]["index"].as_str().unwrap()), "{}").unwrap();
    let index = object(&home, checkpoints[0]["index"].as_str().unwrap());
    let model =
        index["files"]["checkpoints/step_000006/model/config.json"]["object"].as_str().unwrap().to_owned();
    fs::remove_file(home.path("archive").join(model)).unwrap();
    home.rlrun(&["resume", &url, "--run-dir", "none", "--without-journal"]).refused(&[
        "no checkpoint can be resumed from",
        "step 10: ",
        "it has 5 bytes, and",
        "step 9: ",
        "step 6: ",
    ]);
    assert!(!home.path("none/resolved.toml").exists(), "what is left does not look like a run");
}

/// A run killed at any moment of a commit resumes from what was committed, on the same machine or another, and leaves
/// nothing behind.
#[test]
fn a_run_killed_during_a_commit_continues() {
    let home = Home::new();
    let (set, url) = (set(&home), url(&home));
    let sets = ["trainer.steps=12", "buffer.max_staleness=1", &set];
    let killed = |args: &[&str], failpoint: &str| {
        let done = home.rlrun_with(&[(VARIABLE, failpoint)], args);
        assert_eq!(done.status.code(), None, "{failpoint}\n{}\n{}", done.stdout, done.stderr);
    };
    killed(&small_args("run", &sets), "archive-upload=kill@1");
    assert!(steps_of(&lead(&home), "checkpoints").is_empty());
    home.rlrun(&["resume", &url, "--run-dir", "x"]).refused(&["has no checkpoint yet"]);
    fs::remove_dir_all(home.path("x")).unwrap_or_default();
    killed(&["resume", "run"], "archive-commit=kill@2");
    assert_eq!(steps_of(&lead(&home), "checkpoints"), [0]);
    // Files of the commit that was interrupted are not stored again.
    let stored: Value = serde_json::from_slice(&fs::read(home.path("run/archive.json")).unwrap()).unwrap();
    assert!(stored["stored"].as_array().unwrap().len() > 5, "{stored}");
    let of_interrupted = "checkpoints/step_000003/optimizer.safetensors";
    killed(&["resume", "run"], "archive-upload=kill@2");
    assert!(object_of(&home, of_interrupted).starts_with(home.path("archive/e000002")));
    let resume = ["resume", &url, "--run-dir", "other", "--without-journal"];
    killed(&resume, "archive-upload=kill@1");
    home.rlrun(&["resume", "other"]).ok();
    assert_eq!(steps(&home.run("other")), (0..=12).collect::<Vec<_>>());
    let groups: Vec<u64> = (1..=12)
        .flat_map(|step| home.run("other").samples(step))
        .map(|group| group["group"].as_u64().unwrap())
        .collect();
    assert_eq!(groups.len(), 96);
    nothing_is_left_over(&home);
}

#[test]
fn a_lora_run_comes_back_with_its_base_and_its_adapter() {
    let home = Home::new();
    let (set, url) = (set(&home), url(&home));
    let run = home.small("run", &["trainer.steps=3", "lora.rank=2", &set]);
    let base = object_of(&home, "checkpoints/base/model.safetensors");
    assert!(
        base.starts_with(home.path("archive/e000001/000001")),
        "the base is stored once: {}",
        base.display()
    );
    let args = ["resume", &url, "--run-dir", "again", "--without-journal", "--set", "trainer.steps=4"];
    home.rlrun(&args).ok();
    let file = |run: &Run| fs::read(run.checkpoint(3).join("adapter/adapter_model.safetensors")).unwrap();
    assert!(file(&run) == file(&home.run("again")));
}

#[test]
fn the_doctor_tries_the_archive() {
    let home = Home::new();
    let set = set(&home);
    let said =
        home.rlrun(&["doctor", "small.toml", "--set", &set, "--set", crate::support::CORRECT]).ok().stdout;
    for line in ["put              works", "list             works", "delete           works", "round trip"] {
        assert!(said.contains(line), "`{line}` is missing in:\n{said}");
    }
    let mut left = BTreeSet::new();
    collect(&home.path("archive"), "", &mut left);
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn an_archive_whose_server_is_gone_is_named_without_credentials() {
    let home = Home::new();
    let variables = [
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9"),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_ACCESS_KEY_ID", "public-name"),
        ("AWS_SECRET_ACCESS_KEY", "very-secret"),
        ("AWS_SESSION_TOKEN", "secret-token"),
    ];
    let sets = ["checkpoint.url=s3://bucket/run"];
    let done = home.rlrun_with(&variables, &small_args("run", &sets));
    assert_eq!(done.status.code(), Some(1), "{}", done.stderr);
    let said = done.stdout + &done.stderr;
    assert!(said.contains("s3://bucket/run: cannot read lead.json"), "{said}");
    assert!(!said.contains("secret"), "{said}");
    let mut found = BTreeSet::new();
    collect(&home.path("run"), "", &mut found);
    for file in found {
        let bytes = fs::read(home.path("run").join(&file)).unwrap();
        assert!(!bytes.windows(6).any(|window| window == b"secret"), "{file}");
    }
    // Without the variable a request that is not encrypted is refused.
    let done = home.rlrun_with(&[variables[0], variables[2], variables[3]], &small_args("plain", &sets));
    assert!(done.stderr.contains("requests without TLS are not allowed"), "{}", done.stderr);
}
