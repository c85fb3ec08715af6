//! The buffer over HTTP, byte by byte. The tests also compare every answer with the OpenAPI document.

mod auth;
mod bodies;
mod events;
mod groups;
mod life;
mod tls;

use serde_json::{Value, json};

use super::served::{HttpAnswer, TestServer};

/// A group that can be stored under a key.
fn keyed(key: &str) -> Value {
    json!({ "key": key, "trajectories": [trajectory()] })
}

fn trajectory() -> Value {
    json!({
        "token_ids": [1, 2, 3],
        "loss_mask": [false, true, true],
        "behavior_logprobs": [0.0, -0.5, -0.25],
        "policy_version": 0
    })
}

fn store(served: &TestServer, groups: &[Value]) -> HttpAnswer {
    served.post("/v1/groups", &json!({ "groups": groups }))
}

/// What became of each group.
fn statuses(answer: &HttpAnswer) -> Vec<String> {
    let answer = answer.json();
    let results = answer["results"].as_array().unwrap_or_else(|| panic!("{answer}"));
    results.iter().map(|result| result["status"].as_str().unwrap().to_owned()).collect()
}
