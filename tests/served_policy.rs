//! `rlrun serve policy`: a run's newest checkpoint as an endpoint. `endpoint/tests/main.rs` has its protocols.

use std::process::Command;

use serde_json::{Value, json};

use crate::served::{Client, Place, Server};
use crate::support::Home;

fn serve(home: &Home, args: &[&str]) -> Result<Server, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rlrun"));
    command.args(["serve", "policy"]).args(args).args(["--listen", "127.0.0.1:0"]);
    Server::start(command.current_dir(home.path(".")))
}

#[test]
fn the_newest_checkpoint_of_a_run_is_served_until_a_signal() {
    let home = Home::new();
    home.small("run", &["trainer.steps=3"]);
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
    home.small("run", &["trainer.steps=3"]);
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
    home.small("run", &["trainer.steps=3"]);
    home.rlrun(&["serve", "policy", "run", "--max-context", "100000"])
        .refused(&["--max-context 100000", "lower it"]);
}
