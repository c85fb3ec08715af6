//! Models and datasets by their names on the Hugging Face Hub, fetched from a local server.
//!
//! Invariant: no test needs the hub or any other machine. What is fetched once is used without a request, a run keeps the
//! commits that it began with, and no failure leaves a file that is used.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::hub_server::{Fault, HubServer, Repository};
use crate::support::{Done, Home, tiny_model};

const FIRST: &str = "1111111111111111111111111111111111111111";
const SECOND: &str = "2222222222222222222222222222222222222222";
const WEIGHTS: &str = "model.safetensors";

/// A run of one step on the model and the dataset of the server.
const RECIPE: &str = r#"
[model]
path = "hf:tiny/model"

[data]
train = "hf:tiny/sums:main"
eval = "hf:tiny/sums:main"
max_prompt_length = 16

[rollout]
group_size = 4
max_completion_length = 8

[[rewards]]
kind = "regex"
pattern = "[0-4]"

[eval]
correct.reward = "regex"

[buffer]
batch_groups = 2

[trainer]
steps = 1
microbatch_tokens = 256
"#;

/// A working directory with `named.toml`, and a server.
struct HubHome {
    home: Home,
    server: HubServer,
}

/// The files of a tiny model with random weights.
fn files_of_a_model(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    tiny_model(directory, 64);
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(path).unwrap()))
        .collect()
}

impl HubHome {
    fn new() -> Self {
        let (home, server) = (Home::new(), HubServer::start());
        home.write("named.toml", RECIPE);
        let files = files_of_a_model(&home.path("made"));
        server.put("models/tiny/model", Repository { commit: FIRST.into(), files, ..Repository::default() });
        let rows = |digits: &[u8]| -> Vec<u8> {
            digits
                .iter()
                .flat_map(|n| format!("{{\"prompt\":\"{n}+1=\",\"answer\":\"{}\"}}\n", n + 1).into_bytes())
                .collect()
        };
        let files = [
            ("main/train.jsonl", rows(&[1, 2, 3, 4])),
            ("main/test.jsonl", rows(&[5, 6])),
            ("README.md", vec![b'#']),
        ];
        let files = files.map(|(name, bytes)| (name.to_owned(), bytes)).into();
        let configs = json!([{"config_name": "main", "data_files": [
            {"split": "train", "path": "main/train*"}, {"split": "test", "path": "main/test*"}]}]);
        let sums = Repository { commit: FIRST.into(), files, configs, gated: false };
        server.put("datasets/tiny/sums", sums);
        Self { home, server }
    }

    fn hub(&self) -> PathBuf {
        self.home.path("hf/hub")
    }

    /// The program with the cache and the server of this test, and `more` variables.
    fn rlrun(&self, more: &[(&str, &str)], args: &[&str]) -> Done {
        let home = self.home.path("hf");
        let mut variables = vec![
            ("HF_HOME", home.to_str().unwrap()),
            ("HF_ENDPOINT", &self.server.url),
            ("HF_TOKEN", ""),
            ("HF_HUB_CACHE", ""),
            ("HF_HUB_OFFLINE", "0"),
            ("HF_HUB_DOWNLOAD_TIMEOUT", "5"),
        ];
        variables.extend(more);
        self.home.rlrun_with(&variables, args)
    }

    fn check(&self, more: &[(&str, &str)], sets: &[&str]) -> Done {
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let args: Vec<&str> = ["check", "named.toml"].into_iter().chain(sets).collect();
        self.rlrun(more, &args)
    }

    /// The weights of the cache, whole or in part.
    fn weights(&self) -> (PathBuf, Vec<PathBuf>) {
        let repository = self.hub().join("models--tiny--model");
        let partial =
            fs::read_dir(repository.join("blobs")).into_iter().flatten().map(|entry| entry.unwrap().path());
        let partial = partial.filter(|path| path.extension().is_some_and(|ending| ending == "incomplete"));
        (repository.join("snapshots").join(FIRST).join(WEIGHTS), partial.collect())
    }
}

/// Panics unless the command ended with status 1 and every part of `evidence` is in its message.
fn failed(done: &Done, evidence: &[&str]) {
    assert_eq!(done.status.code(), Some(1), "{}\n{}", done.stdout, done.stderr);
    for part in evidence {
        assert!(done.stderr.contains(part), "`{part}` is missing in:\n{}", done.stderr);
    }
}

#[test]
fn a_run_records_its_commits_and_resumes_with_them() {
    let bench = HubHome::new();
    bench.rlrun(&[("HF_TOKEN", "secret")], &["named.toml", "--run-dir", "run"]).ok();
    let received = bench.server.received();
    let sent: Vec<_> = received.iter().filter(|request| request.elsewhere).collect();
    assert!(!sent.is_empty() && sent.iter().all(|request| request.authorization.is_none()), "{sent:?}");
    let own = received.iter().filter(|request| !request.elsewhere);
    assert!(own.clone().all(|request| request.authorization.as_deref() == Some("Bearer secret")));
    let resolved = fs::read_to_string(bench.home.path("run/resolved.toml")).unwrap();
    for name in [format!("\"hf:tiny/model@{FIRST}\""), format!("\"hf:tiny/sums:main@{FIRST}\"")] {
        assert!(resolved.contains(&name), "{resolved}");
    }
    assert!(!resolved.contains("secret"));
    let reference = fs::read_to_string(bench.hub().join("models--tiny--model/refs/main")).unwrap();
    assert_eq!(reference, FIRST);

    // The branch is somewhere else now.
    let files = files_of_a_model(&bench.home.path("other"));
    let moved = Repository { commit: SECOND.into(), files, ..Repository::default() };
    bench.server.put("models/tiny/model", moved.clone());
    bench.server.put("datasets/tiny/sums", moved);
    let resume = ["resume", "run", "--set", "trainer.steps=2"];
    bench.rlrun(&[("HF_HUB_OFFLINE", "1")], &resume).ok();
    // The simulator reads the description of the same commit.
    let why = bench.rlrun(&[], &["why", "run"]).ok().stdout;
    assert!(why.contains("recommendations") && !why.contains("tiny/model"), "{why}");
    assert!(bench.server.received().is_empty());
    assert_eq!(bench.home.run("run").steps().len(), 2);
    assert!(fs::read_to_string(bench.home.path("run/resolved.toml")).unwrap().contains(FIRST));
    let plan = bench
        .rlrun(
            &[],
            &[
                "plan",
                "named.toml",
                "--set",
                &format!("data.train=hf:tiny/sums:main@{FIRST}"),
                "--set",
                &format!("data.eval=hf:tiny/sums:main@{FIRST}"),
            ],
        )
        .ok()
        .stdout;
    assert!(plan.contains(&format!("hf:tiny/model@{SECOND}")), "{plan}");
}

#[test]
fn what_was_fetched_is_used_without_the_server() {
    let mut bench = HubHome::new();
    let plan = bench.rlrun(&[], &["plan", "named.toml"]).ok().stdout;
    assert!(
        plan.contains(&format!("model hf:tiny/model@{FIRST}: ")) && plan.contains(" MB are fetched"),
        "{plan}"
    );
    let simulated = bench.rlrun(&[], &["simulate", "named.toml", "--steps", "4", "--seeds", "1"]).ok().stdout;
    assert!(simulated.contains("4 steps in virtual time"), "{simulated}");
    assert!(!bench.weights().0.exists(), "a plan needs no weights");
    let first = bench.check(&[], &[]).ok();
    assert!(
        first.stdout.contains("4 training tasks") && first.stdout.contains("2 held-out tasks"),
        "{}",
        first.stdout
    );
    assert!(first.stderr.contains("fetching model.safetensors ("), "{}", first.stderr);
    bench.server.received();

    let again = bench.check(&[], &[]).ok();
    assert!(
        !again.stderr.contains("fetching") && again.stdout.contains("of which 0.0 MB are fetched"),
        "{}",
        again.stdout
    );
    // One request per branch, to see whether it has moved.
    assert!(bench.server.received().iter().all(|request| request.path.starts_with("/api/")));
    let generated = bench.rlrun(&[], &["generate", "hf:tiny/model", "1+1=", "--max-tokens", "2"]);
    generated.ok();
    let all = ["eval", "hf:tiny/model", "--recipe", "named.toml"];
    bench.rlrun(&[], &all).ok();

    // The same files where no process of this machine listens, and where no request may be sent.
    let url = bench.server.url.clone();
    drop(std::mem::replace(&mut bench.server, HubServer::start()));
    let unreachable = bench.check(&[("HF_ENDPOINT", &url)], &[]).ok();
    assert!(unreachable.stderr.contains("cannot be reached"), "{}", unreachable.stderr);
    assert!(
        unreachable.stderr.contains(&format!("using hf:tiny/model@{FIRST} of the cache")),
        "{}",
        unreachable.stderr
    );
    bench.check(&[("HF_HUB_OFFLINE", "1")], &[]).ok();
    let processes = ["named.toml", "--run-dir", "processes", "--set", "placement.processes=true"];
    bench.rlrun(&[("HF_HUB_OFFLINE", "1")], &processes).ok();
    assert!(bench.server.received().is_empty());
}

#[test]
fn every_mistake_names_what_to_do() {
    let bench = HubHome::new();
    let model = |name: &str| format!("model.path=hf:{name}");
    bench.check(&[], &[&model("tiny/none")]).refused(&[
        "hf:tiny/none",
        "has no such model",
        "check the name",
        "set HF_TOKEN",
    ]);
    let known = [("HF_TOKEN", "granted")];
    bench
        .check(&known, &[&model("tiny/none")])
        .refused(&["has no such model", "whether the token (HF_TOKEN) may read it"]);
    bench.check(&[], &[&model("tiny/model@v9")]).refused(&["no revision `v9`", "name a branch"]);
    bench.check(&[], &[&model("tiny/../x")]).refused(&["error: ", "`tiny/..` is no name", "hf:OWNER/NAME"]);
    bench.check(&[], &["data.train=hf:tiny/sums:main:dev"]).refused(&["no split `dev`", "`train`, `test`"]);
    bench
        .check(&[], &["data.train=hf:tiny/sums:mian"])
        .refused(&["no configuration `mian`", "hf:tiny/sums:main"]);
    bench.check(&[("HF_HUB_OFFLINE", "1")], &[&model("tiny/other")]).refused(&[
        "HF_HUB_OFFLINE is set",
        "is not in the cache",
        "fetch it once",
    ]);

    let files = [("model.Q4_0.gguf".to_owned(), vec![0])].into();
    bench.server.put("models/tiny/gguf", Repository { commit: FIRST.into(), files, ..Repository::default() });
    bench
        .check(&[], &[&model("tiny/gguf")])
        .refused(&["has no `model.safetensors`", "hf:tiny/gguf/model.Q4_0.gguf"]);
    let nothing = Repository { commit: "main".into(), ..Repository::default() };
    bench.server.put("models/tiny/strange", nothing);
    bench.check(&[], &[&model("tiny/strange")]).refused(&["does not answer as a hub", "HF_ENDPOINT"]);

    let files = files_of_a_model(&bench.home.path("gated"));
    let gated = Repository { commit: FIRST.into(), files, configs: Value::Null, gated: true };
    bench.server.put("models/tiny/gated", gated);
    let page = format!("accept the conditions at {}/tiny/gated", bench.server.url);
    bench.check(&[], &[&model("tiny/gated")]).refused(&[&page, "set HF_TOKEN to a token of that account"]);
    let other = [("HF_TOKEN", "other")];
    bench.check(&other, &[&model("tiny/gated")]).refused(&[&page, "check that the token (HF_TOKEN)"]);
    bench.check(&known, &[&model("tiny/gated")]).ok();
    // The token file of the hub's tools.
    bench.home.write("hf/token", "granted\n");
    fs::remove_dir_all(bench.hub().join("models--tiny--gated")).unwrap();
    bench.check(&[], &[&model("tiny/gated")]).ok();
}

#[test]
fn a_download_that_broke_off_is_resumed() {
    let bench = HubHome::new();
    bench.server.fail(WEIGHTS, Some(Fault::BreaksOff(1000)));
    let size = fs::metadata(bench.home.path("made").join(WEIGHTS)).unwrap().len();
    // Every request brings 1000 bytes, and the next one resumes.
    bench.check(&[], &[]).ok();
    let ranges: Vec<_> = bench.server.received().into_iter().filter_map(|request| request.range).collect();
    assert_eq!(
        (ranges.len() as u64, &ranges[0][..], &ranges[1][..]),
        (size.div_ceil(1000) - 1, "bytes=1000-", "bytes=2000-")
    );

    let bench = HubHome::new();
    bench.server.fail(WEIGHTS, Some(Fault::EndsAt(3000)));
    let stuck = bench.check(&[], &[]);
    failed(
        &stuck,
        &[
            "hf:tiny/model",
            "model.safetensors",
            "3 times in a row",
            &format!("of {size} bytes"),
            "what has arrived is kept",
        ],
    );
    let (weights, partial) = bench.weights();
    assert!(!weights.exists() && partial.len() == 1);
    assert_eq!(fs::metadata(&partial[0]).unwrap().len(), 3000);
    bench.server.received();
    bench.server.fail(WEIGHTS, None);
    bench.check(&[], &[]).ok();
    let ranges: Vec<_> = bench.server.received().into_iter().filter_map(|request| request.range).collect();
    assert_eq!(ranges, ["bytes=3000-"]);
    assert_eq!(fs::read(weights).unwrap(), fs::read(bench.home.path("made").join(WEIGHTS)).unwrap());
    assert!(bench.weights().1.is_empty());
}

#[test]
fn a_server_that_stalls_or_sends_other_bytes_is_an_error() {
    for (fault, evidence) in [
        (Fault::Stalls(0), &["received no byte for up to 2 s", "start again later"][..]),
        (Fault::Short(0), &["ended before all bytes were there", "3 times in a row"]),
        (Fault::Damaged, &["arrived damaged: its digest is ", "start again"]),
    ] {
        let bench = HubHome::new();
        bench.server.fail(WEIGHTS, Some(fault));
        let start = Instant::now();
        failed(&bench.check(&[("HF_HUB_DOWNLOAD_TIMEOUT", "2")], &[]), evidence);
        assert!(start.elapsed() < Duration::from_secs(60), "{fault:?} took {:?}", start.elapsed());
        assert!(!bench.weights().0.exists(), "{fault:?}");
        bench.server.fail(WEIGHTS, None);
        bench.check(&[], &[]).ok();
    }
}

#[test]
fn a_disk_that_fills_during_a_download_is_named() {
    let bench = HubHome::new();
    let limited = Command::new("bash")
        .args(["-c", "trap '' XFSZ; ulimit -f 8; exec \"$0\" check named.toml", env!("CARGO_BIN_EXE_rlrun")])
        .current_dir(bench.home.path(""))
        .envs([("HF_HOME", bench.home.path("hf").to_str().unwrap()), ("HF_ENDPOINT", &bench.server.url)])
        .envs([("HF_HUB_CACHE", ""), ("HF_HUB_OFFLINE", "0"), ("HF_TOKEN", "")])
        .output()
        .unwrap();
    let message = String::from_utf8(limited.stderr).unwrap();
    assert_eq!(limited.status.code(), Some(1), "{message}");
    for part in ["cannot write ", ".incomplete: File too large", "make space there, or set HF_HOME"] {
        assert!(message.contains(part), "`{part}` is missing in:\n{message}");
    }
    let (weights, partial) = bench.weights();
    assert!(!weights.exists() && partial.len() == 1);
    bench.check(&[], &[]).ok();
    assert!(weights.exists() && bench.weights().1.is_empty());
}

#[test]
#[ignore = "needs the Python package `huggingface_hub`"]
fn caches_of_python_are_read_and_written() {
    let bench = HubHome::new();
    let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
    let fetch = |offline: &str, home: &str| {
        let script = "import sys\nfrom huggingface_hub import snapshot_download\n\
                      for name, kind in [('tiny/model', 'model'), ('tiny/sums', 'dataset')]:\n    \
                      print(snapshot_download(name, repo_type=kind))\n";
        let output = Command::new(&python)
            .args(["-c", script])
            .envs([("HF_HOME", bench.home.path(home).to_str().unwrap()), ("HF_ENDPOINT", &bench.server.url)])
            .envs([("HF_HUB_OFFLINE", offline), ("HF_HUB_DISABLE_XET", "1")])
            .env_remove("HF_HUB_CACHE")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    // What Python fetched is all that rlrun needs.
    fetch("0", "hf");
    bench.server.received();
    bench
        .check(&[("HF_HUB_OFFLINE", "1")], &["data.train=hf:tiny/sums:main", "data.eval=hf:tiny/sums:main"])
        .ok();
    assert!(bench.server.received().is_empty());
    // And the other way around.
    let other = bench.home.path("other");
    bench.rlrun(&[("HF_HOME", other.to_str().unwrap())], &["check", "named.toml"]).ok();
    let found = fetch("1", "other");
    assert!(found.contains(&format!("models--tiny--model/snapshots/{FIRST}")), "{found}");
}
