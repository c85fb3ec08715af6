//! `rlrun serve policy`: a run's newest checkpoint as an endpoint. `endpoint/tests/main.rs` has its protocols.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::{Value, json};

use crate::served::{Client, Place, Server};
use crate::support::Home;

/// The files of a run, with their paths in its directory.
type RunFiles = Vec<(PathBuf, Vec<u8>)>;

/// Writes a run of three steps to the directory `name` of `home`. It is made once for all tests, which only read its model.
fn trained(home: &Home, name: &str) {
    static FILES: OnceLock<RunFiles> = OnceLock::new();
    copied(home, name, &FILES, &["trainer.steps=3"]);
}

/// The same for a run with LoRA.
fn tuned(home: &Home) {
    static FILES: OnceLock<RunFiles> = OnceLock::new();
    copied(home, "tuned", &FILES, &["lora.rank=4", "trainer.learning_rate=0.02", "trainer.steps=4"]);
}

/// Writes `files` to the directory `name` of `home`: those of a run with `sets`.
fn copied(home: &Home, name: &str, files: &OnceLock<RunFiles>, sets: &[&str]) {
    let files = files.get_or_init(|| {
        let made = Home::new();
        let directory = made.small("run", sets).path;
        let mut files = Vec::new();
        collect(&directory, &directory, &mut files);
        files
    });
    for (path, content) in files {
        home.write(&format!("{name}/{}", path.display()), content);
    }
}

/// Adds the files in `directory` with their paths in `root`.
fn collect(root: &Path, directory: &Path, files: &mut RunFiles) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(root, &path, files);
        } else {
            files.push((path.strip_prefix(root).unwrap().to_owned(), std::fs::read(&path).unwrap()));
        }
    }
}

fn serve(home: &Home, args: &[&str]) -> Result<Server, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rlrun"));
    command.args(["serve", "policy"]).args(args).args(["--listen", "127.0.0.1:0"]);
    Server::start(command.current_dir(home.path(".")))
}

#[test]
fn the_newest_checkpoint_of_a_run_is_served_until_a_signal() {
    let home = Home::new();
    trained(&home, "run");
    let server = serve(&home, &["run"]).unwrap();
    let place = Place::at(server.address);
    let mut client = Client::new(&place);
    let (status, models, _) = client.ask("GET", "/v1/models", &Value::Null);
    assert_eq!((status, &models["data"][0]["id"]), (200, &json!("run")));
    assert_eq!(models["data"][0]["policy_version"], 3);
    let asked =
        json!({"model": "run", "prompt": "2+3=", "max_tokens": 4, "return_token_ids": true, "logprobs": 0});
    let (status, answer, _) = client.ask("POST", "/v1/completions", &asked);
    let choice = &answer["choices"][0];
    let tokens = choice["token_ids"].as_array().unwrap().len();
    assert_eq!(
        (status, &choice["weight_versions"]),
        (200, &json!([{"version": "3", "start": 0, "end": tokens}]))
    );
    drop(client);
    assert_eq!(server.signalled("INT"), Some(0));
}

#[test]
fn a_token_file_protects_a_model_under_another_name() {
    let home = Home::new();
    trained(&home, "run");
    home.write("token", "secret\n");
    let server =
        serve(&home, &["run/model", "--name", "mine", "--token-file", "token", "--quantization", "int8"]);
    let server = server.unwrap();
    let place = Place::at(server.address);
    let (status, error, _) = Client::new(&place).ask("GET", "/v1/models", &Value::Null);
    assert_eq!((status, &error["error"]["type"]), (401, &json!("AuthenticationError")));
    assert_eq!(server.signalled("TERM"), Some(0));
}

#[test]
fn what_cannot_be_served_is_refused() {
    let home = Home::new();
    let far = ["serve", "policy", "model", "--listen", "0.0.0.0:0"];
    home.rlrun(&far).refused(&["can be reached from other machines", "token file"]);
    home.rlrun(&["serve", "policy", "missing"]).refused(&["missing", "neither a model directory"]);
    home.rlrun(&["serve", "policy", "model", "--quantization", "int4"])
        .refused(&["int4", "none, int8, bf16"]);
    trained(&home, "run");
    home.rlrun(&["serve", "policy", "run", "--max-context", "100000"])
        .refused(&["--max-context 100000", "lower it"]);
}

/// Tokens that `model` answers, and their log-probabilities.
fn logprobs(client: &mut Client, model: &str, temperature: u8) -> (Value, Value) {
    let asked = json!({"model": model, "prompt": "2+3=", "max_tokens": 4, "temperature": temperature, "seed": 3,
        "logprobs": 0, "ignore_eos": true, "return_token_ids": true});
    let (status, answer, _) = client.ask("POST", "/v1/completions", &asked);
    assert_eq!((status, &answer["model"]), (200, &json!(model)), "{answer}");
    let choice = &answer["choices"][0];
    (choice["token_ids"].clone(), choice["logprobs"]["token_logprobs"].clone())
}

/// Log-probabilities are equal up to rounding.
fn assert_near(found: &Value, expected: &Value) {
    let numbers = |values: &Value| -> Vec<f64> {
        values.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
    };
    let off = numbers(found).iter().zip(numbers(expected)).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(off < 1e-4, "{found} and {expected}");
}

/// A run with LoRA, its exported adapter, and its base: requests choose by name what is sampled, in one batch.
#[test]
fn adapters_are_served_beside_their_base() {
    let home = Home::new();
    tuned(&home);
    let base = "tuned/checkpoints/base";
    home.rlrun(&["export", "tuned", "--adapter", "--out", "peft"]).ok();
    let adapters = ["--adapter", "run=tuned", "--adapter", "peft=peft"];
    let server = serve(&home, &[&[base, "--name", "base"], &adapters[..]].concat()).unwrap();
    let place = Place::at(server.address);
    let mut client = Client::new(&place);
    let (_, models, _) = client.ask("GET", "/v1/models", &Value::Null);
    let named: Vec<_> =
        models["data"].as_array().unwrap().iter().map(|of| (&of["id"], &of["parent"])).collect();
    assert_eq!(
        named,
        [(&json!("base"), &Value::Null), (&json!("run"), &json!("base")), (&json!("peft"), &json!("base"))]
    );
    let [plain, run, peft] = ["base", "run", "peft"].map(|model| logprobs(&mut client, model, 0));
    assert_eq!(run, peft, "a run and its adapter are the same");
    assert_ne!(run.1, plain.1);
    let (status, error, _) = client.ask("POST", "/v1/completions", &json!({"model": "other", "prompt": "2"}));
    let message = error["error"]["message"].as_str().unwrap();
    assert_eq!(status, 404);
    assert!(message.contains("`base`, `run`, `peft`"), "{message}");
    drop(client);
    // Merged into the weights they give the same up to rounding.
    let merged = serve(&home, &["tuned", "--name", "run"]).unwrap();
    let place = Place::at(merged.address);
    let mut client = Client::new(&place);
    let (tokens, values) = logprobs(&mut client, "run", 0);
    assert_eq!(tokens, run.0);
    assert_near(&values, &run.1);

    let refused = |adapter: &str, parts: &[&str]| {
        home.rlrun(&["serve", "policy", base, "--name", "base", "--adapter", adapter]).refused(parts);
    };
    refused("peft", &["NAME=DIR_OR_RUN"]);
    refused("base=peft", &["--adapter base", "name is taken"]);
    trained(&home, "plain");
    refused("x=plain", &["--adapter x", "run without [lora]"]);
    refused("x=missing", &["missing"]);
    let config = std::fs::read_to_string(home.path("peft/adapter_config.json")).unwrap();
    std::fs::create_dir(home.path("odd")).unwrap();
    home.write("odd/adapter_config.json", config.replace("\"use_dora\": false", "\"use_dora\": true"));
    refused("x=odd", &["use_dora", "plain LoRA"]);
}

/// On a device, too, requests choose by name, and get what they get on the processor.
#[cfg(feature = "emulator")]
#[test]
fn adapters_are_served_on_a_device() {
    let home = Home::new();
    tuned(&home);
    let served = ["tuned/checkpoints/base", "--name", "base", "--adapter", "run=tuned"];
    let answers = |more: &[&str]| {
        let server = serve(&home, &[&served[..], more].concat()).unwrap();
        let place = Place::at(server.address);
        let mut client = Client::new(&place);
        // A greedy choice has no log-probability on a device.
        ["base", "run"].map(|model| logprobs(&mut client, model, 1))
    };
    let (here, there) = (answers(&[]), answers(&["--device", "emulated", "--dtype", "f32"]));
    for ((tokens, found), (expected_tokens, expected)) in there.iter().zip(&here) {
        assert_eq!(tokens, expected_tokens);
        assert_near(found, expected);
    }
    assert_ne!(there[0].1, there[1].1, "the adapter changes what is drawn");
}
