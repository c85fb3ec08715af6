//! `rlrun serve training`: a model is trained over JSON, survives a kill by what was saved, and bad requests are refused.
//! `service/tests/` has the SDKs.

use std::process::Command;

use serde_json::{Value, json};

use crate::served::{Client, Place, Server};
use crate::support::Home;

const KEYS: &str = "ada tml-0123456789abcdef-ada\nbob tml-0123456789abcdef-bob\n";

fn serve(home: &Home, args: &[&str]) -> Result<Server, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rlrun"));
    command.args(["serve", "training", "--model", "org/tiny=model", "--dir", "state"]).args(args);
    Server::start(command.args(["--listen", "127.0.0.1:0"]).current_dir(home.path(".")))
}

/// A client of the service with the session that it began.
struct TrainingClient<'a> {
    client: Client<'a>,
    session: String,
}

impl<'a> TrainingClient<'a> {
    fn new(place: &'a Place, user: &str) -> Self {
        let mut client = Client::new(place).with_key(&format!("tml-0123456789abcdef-{user}"));
        let (status, session, _) = client.ask("POST", "/api/v1/create_session", &json!({"tags": []}));
        assert_eq!(status, 200, "{session}");
        Self { session: session["session_id"].as_str().unwrap().to_owned(), client }
    }

    fn post(&mut self, route: &str, body: &Value) -> (u16, Value) {
        let (status, answer, _) = self.client.ask("POST", &format!("/api/v1/{route}"), body);
        (status, answer)
    }

    /// The outcome of a request.
    fn outcome(&mut self, route: &str, body: &Value) -> Value {
        let (status, ticket) = self.post(route, body);
        assert_eq!(status, 200, "{route}: {ticket}");
        for _ in 0..4 {
            // Each waits for half a minute.
            let (status, outcome) =
                self.post("retrieve_future", &json!({"request_id": ticket["request_id"]}));
            assert_eq!(status, 200, "{route}: {outcome}");
            if outcome["type"] != "try_again" {
                return outcome;
            }
        }
        panic!("{route} has not ended");
    }

    fn model(&mut self, number: u64) -> String {
        let body = json!({"session_id": self.session, "model_seq_id": number, "base_model": "org/tiny",
            "lora_config": {"rank": 4, "seed": 3}, "type": "create_model"});
        let made = self.outcome("create_model", &body);
        made["model_id"].as_str().unwrap_or_else(|| panic!("{made}")).to_owned()
    }

    /// A pass over one demonstration, and an update: the loss of the pass.
    fn train(&mut self, model: &str, number: u64) -> f64 {
        let passed = self.outcome("forward_backward", &pass(model, number, &[1.0; 3]));
        let step = json!({"model_id": model, "seq_id": number + 1, "adam_params": {"learning_rate": 0.02}});
        let stepped = self.outcome("optim_step", &step);
        assert!(stepped["metrics"]["grad_norm:mean"].as_f64().unwrap() > 0.0, "{stepped}");
        passed["metrics"]["loss:sum"].as_f64().unwrap_or_else(|| panic!("{passed}"))
    }
}

fn pass(model: &str, number: u64, weights: &[f64]) -> Value {
    let tensor = |data: Value, dtype: &str| json!({"data": data, "dtype": dtype});
    json!({"model_id": model, "seq_id": number, "forward_backward_input": {"loss_fn": "cross_entropy", "data": [{
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "loss_fn_inputs": {
            "target_tokens": tensor(json!([6, 7, 8]), "int64"), "weights": tensor(json!(weights), "float32"),
        },
    }]}})
}

#[test]
fn training_continues_from_what_was_saved_before_a_kill() {
    let home = Home::new();
    home.small("run", &["trainer.steps=1"]);
    home.rlrun(&["export", "run", "--out", "model"]).ok();
    home.write("keys", KEYS);
    let server = serve(&home, &["--token-file", "keys"]).unwrap();
    let place = Place::at(server.address);
    let mut ada = TrainingClient::new(&place, "ada");
    let model = ada.model(0);
    let mut losses = vec![ada.train(&model, 1), ada.train(&model, 3)];
    let saved = ada.outcome("save_weights", &json!({"model_id": model, "seq_id": 5, "path": "two"}));
    let path = saved["path"].as_str().unwrap().to_owned();
    losses.push(ada.train(&model, 6));
    assert!(losses[2] < losses[1] && losses[1] < losses[0], "{losses:?}");
    let sampler = json!({"model_id": model, "seq_id": 8, "sampling_session_seq_id": 0});
    let sampler = ada.outcome("save_weights_for_sampler", &sampler);
    let asked = json!({"sampling_session_id": sampler["sampling_session_id"], "seq_id": 0, "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": 3, "temperature": 1.0, "stop": []}});
    let sampled = ada.outcome("asample", &asked);
    assert_eq!(sampled["sequences"].as_array().unwrap().len(), 2, "{sampled}");
    assert_eq!(sampled["sequences"][0]["tokens"].as_array().unwrap().len(), 3);
    drop(ada);
    // With SIGKILL.
    drop(server);
    let server = serve(&home, &["--token-file", "keys"]).unwrap();
    let place = Place::at(server.address);
    let mut bob = TrainingClient::new(&place, "bob");
    let load = |session: &str| json!({"session_id": session, "model_seq_id": 0, "path": path, "optimizer": true, "type": "load_weights"});
    let of_bob = load(&bob.session);
    let (status, refused) = bob.post("load_weights", &of_bob);
    assert_eq!(status, 404, "another user's weights: {refused}");
    let mut ada = TrainingClient::new(&place, "ada");
    let of_ada = load(&ada.session);
    let loaded = ada.outcome("load_weights", &of_ada);
    let model = loaded["model_id"].as_str().unwrap_or_else(|| panic!("{loaded}")).to_owned();
    assert_eq!(ada.train(&model, 1), losses[2], "as without the kill, to the last bit");
    drop((ada, bob));
    assert_eq!(server.signalled("TERM"), Some(0));
    let run = path.trim_start_matches("tinker://").split('/').next().unwrap().replace(':', "_");
    home.rlrun(&["export", &format!("state/{run}"), "--adapter", "--out", "peft"]).ok();
}

#[test]
fn what_cannot_be_trained_is_refused_and_delays_no_other_request() {
    let home = Home::new();
    let far = ["serve", "training", "--model", "model", "--listen", "0.0.0.0:0"];
    home.rlrun(&["serve", "training", "--model", "missing"])
        .refused(&["missing", "neither a model directory"]);
    home.small("run", &["trainer.steps=1"]);
    home.rlrun(&["export", "run", "--out", "model"]).ok();
    home.rlrun(&far).refused(&["can be reached from other machines"]);
    home.rlrun(&["serve", "training", "--model", "a=model", "--model", "a=model"])
        .refused(&["the name is taken"]);
    home.write("keys", KEYS);
    let server = serve(&home, &["--token-file", "keys", "--max-models", "1"]).unwrap();
    let place = Place::at(server.address);
    let mut stranger = Client::new(&place).with_key("tml-other");
    let (status, error, _) = stranger.ask("POST", "/api/v1/client/config", &json!({}));
    assert_eq!(status, 401, "{error}");
    let mut ada = TrainingClient::new(&place, "ada");
    let unknown =
        json!({"session_id": &ada.session, "model_seq_id": 9, "base_model": "other", "type": "create_model"});
    let (status, error) = ada.post("create_model", &unknown);
    assert!(status == 404 && error["detail"].as_str().unwrap().contains("org/tiny"), "{status} {error}");
    let model = ada.model(0);
    let more = json!({"session_id": &ada.session, "model_seq_id": 1, "base_model": "org/tiny",
        "lora_config": {"rank": 4}, "type": "create_model"});
    let (status, error) = ada.post("create_model", &more);
    assert!(status == 429 && error["detail"].as_str().unwrap().contains("--max-models"), "{status} {error}");
    // A shape that does not fit, then a request that does.
    let failed = ada.outcome("forward_backward", &pass(&model, 1, &[1.0; 2]));
    assert_eq!(failed["category"], "user");
    assert!(failed["error"].as_str().unwrap().contains("`weights` has 2 numbers"), "{failed}");
    assert!(ada.train(&model, 2) > 0.0);
    let (status, error) = ada.post("forward_backward", &pass("s1:train:7", 1, &[1.0; 3]));
    assert_eq!(status, 404, "{error}");
    // A body that no pass can be read from: its number counts, and the requests behind it run.
    let (status, error) = ada.post("forward_backward", &json!({"seq_id": 4, "data": 7}));
    assert_eq!(status, 400, "{error}");
    let failed = ada.outcome("forward_backward", &json!({"model_id": model, "seq_id": 4, "data": 7}));
    assert!(failed["error"].as_str().unwrap().contains("`data`"), "{failed}");
    assert!(ada.train(&model, 5) > 0.0);
    let (status, error) = ada.post("retrieve_future", &json!({"request_id": "req-7"}));
    assert_eq!(status, 410, "{error}");
    let mut bob = TrainingClient::new(&place, "bob");
    let (status, error) = bob.post("get_info", &json!({"model_id": model}));
    assert_eq!(status, 404, "{error}");
    drop((ada, bob, stranger));
    assert_eq!(server.signalled("INT"), Some(0));
}
