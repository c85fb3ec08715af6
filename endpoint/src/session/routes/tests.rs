//! Tests of the control routes: who may do what, and what an export has.

use axum::body::{Body, to_bytes};
use axum::http::Method;
use model::{Config, ModelDirectory, Sizes};
use rollout::{RequestBounds, request_queue};
use trajectory::{PolicyVersion, StopReason, VersionRun};

use super::*;
use crate::session::{
    Continuation, NextPrompt, SessionLimits, SessionMessage, SessionRequest, SessionResponse,
};
use crate::{EndpointConfig, EndpointLimits, ServedPolicy};

const ADMIN: &str = "admin-key";

struct ControlRoutes {
    store: SessionStore,
    router: Router,
    _directory: tempfile::TempDir,
}

impl ControlRoutes {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let config = Config::fresh(&Sizes {
            vocab_size: model::CHARACTERS,
            hidden_size: 8,
            intermediate_size: 8,
            num_layers: 1,
            num_heads: 1,
            num_kv_heads: 1,
            max_position_embeddings: 64,
        });
        let model = ModelDirectory::fresh(&directory.path().join("model"), &config, 1).unwrap();
        let store = SessionStore::new(SessionLimits::default());
        let policy = ServedPolicy {
            name: "policy".to_owned(),
            root: String::new(),
            directory: Arc::new(model),
            max_context: 64,
            stop_strings: Vec::new(),
            adapters: Vec::new(),
        };
        let config = EndpointConfig {
            policy,
            limits: EndpointLimits::default(),
            token: Some(ADMIN.to_owned()),
            sessions: Some(Arc::new(store.clone())),
        };
        let (handle, _) = request_queue(RequestBounds { max_open: 4, max_running: 4 });
        let admin_key = Some(ADMIN.into());
        let control = SessionControl { store: store.clone(), waiting: None, admin_key };
        let router = session_routes(control, &Service::new(config, handle));
        Self { store, router, _directory: directory }
    }

    async fn send(&self, method: Method, path: &str, key: &str, body: Value) -> (u16, Value) {
        let request = axum::http::Request::builder()
            .method(method)
            .uri(path)
            .header("x-api-key", key)
            .body(Body::from(body.to_string()))
            .unwrap();
        let response = TowerToHyperService::new(self.router.clone()).call(request).await.unwrap();
        let status = response.status().as_u16();
        let bytes = to_bytes(response.into_body(), 1 << 20).await.unwrap();
        (status, serde_json::from_slice(&bytes).unwrap_or(Value::Null))
    }

    async fn post(&self, path: &str, key: &str, body: Value) -> (u16, Value) {
        self.send(Method::POST, path, key, body).await
    }

    /// Two turns of the session with `key`, as the protocols record them.
    fn two_turns(&self, key: &str) {
        for n in 0..2_u32 {
            let call = self.store.call(key, Instant::now()).unwrap();
            let messages = vec![SessionMessage::new("user", "a"); 1 + 2 * n as usize];
            let request =
                SessionRequest { tools: Value::Null, messages, requested: json!({"temperature": 0.3}) };
            let before: Vec<u32> = (0..3 + 4 * n).collect();
            let continuation = if n == 0 { Continuation::First } else { Continuation::Clean(0) };
            let prompt = NextPrompt { token_ids: before.clone(), continuation };
            let response = SessionResponse {
                id: format!("chatcmpl-{n}"),
                message: SessionMessage::new("assistant", format!("answer {n}")),
                sampled_ids: vec![3 + 4 * n, 4 + 4 * n],
                logprobs: vec![-0.5, -0.25],
                versions: vec![VersionRun { version: PolicyVersion(7), len: 2 }],
                prompt_version: PolicyVersion(7),
                experts: None,
                temperature: 1.0,
                stop: StopReason::StopToken,
                text: format!("answer {n}"),
            };
            assert!(call.record(&request, &prompt, vec![response], Instant::now()));
        }
    }
}

#[tokio::test]
async fn a_session_is_started_rewarded_ended_and_exported() {
    let routes = ControlRoutes::new();
    assert_eq!(routes.post("/rl/start_session", "wrong", json!({})).await.0, 401);
    let (status, started) =
        routes.post("/rl/start_session", ADMIN, json!({"task_id": 3, "api_key": "sk-mine-1"})).await;
    assert_eq!((status, &started["api_key"]), (200, &json!("sk-mine-1")));
    let again = routes.post("/rl/start_session", ADMIN, json!({"api_key": "sk-mine-1"})).await;
    assert_eq!(again.0, 409);
    routes.two_turns("sk-mine-1");
    let (_, other) = routes.post("/rl/start_session", ADMIN, json!({})).await;
    let of_other = json!({"session_id": other["session_id"], "reward": 1.0});
    let (status, refused) = routes.post("/rl/set_reward", "sk-mine-1", of_other).await;
    assert_eq!((status, &refused["error"]["type"]), (403, &json!("foreign_session")));
    assert_eq!(routes.post("/rl/set_reward", "sk-mine-1", json!({})).await.0, 400);
    assert_eq!(routes.post("/rl/set_reward", "sk-mine-1", json!({"reward": 1.0})).await.0, 200);
    let named = json!({"reward": 0.5, "interaction_id": "chatcmpl-0"});
    assert_eq!(routes.post("/rl/set_reward", "sk-mine-1", named).await.0, 200);
    let id = started["session_id"].clone();
    let export = json!({"session_id": id, "discount": 0.5});
    assert_eq!(routes.post("/export_trajectories", "sk-mine-1", export.clone()).await.0, 403);
    assert_eq!(routes.post("/export_trajectories", ADMIN, export.clone()).await.0, 400, "it has not ended");
    assert_eq!(routes.post("/rl/end_session", "sk-mine-1", json!({})).await.1["interactions"], 2);
    assert_eq!(routes.post("/rl/set_reward", "sk-mine-1", json!({"reward": 1.0})).await.0, 410);
    let (status, exported) = routes.post("/export_trajectories", ADMIN, export.clone()).await;
    assert_eq!((status, &exported["task_id"]), (200, &json!("3")));
    let all = exported["trajectories"].as_array().unwrap();
    assert_eq!(all.iter().map(|one| one["reward"].clone()).collect::<Vec<_>>(), [json!(1.0), json!(1.0)]);
    assert_eq!(all[0]["output_versions"], json!([-1, -1, -1, 7, 7]));
    assert_eq!(routes.post("/export_trajectories", ADMIN, export).await.0, 404, "it is taken once");
    assert_eq!(routes.post("/rl/end_session", "sk-mine-1", json!({})).await.0, 410);
    assert_eq!(routes.post("/grant_capacity", ADMIN, json!({})).await.1["open"], 1);
}

#[tokio::test]
async fn a_captured_session_is_shown_as_rows_and_calls() {
    let routes = ControlRoutes::new();
    let body = json!({"session_id": "sk-captured", "max_model_calls": 5, "metadata": {"a": 1}});
    let (status, started) = routes.post("/sessions", ADMIN, body).await;
    assert_eq!(
        (status, &started["session_id"], &started["capture_level"]),
        (201, &json!("sk-captured"), &json!("tokens"))
    );
    routes.two_turns("sk-captured");
    let get = async |path: &str| routes.send(Method::GET, path, ADMIN, Value::Null).await;
    let (_, shown) = get("/sessions/sk-captured").await;
    assert_eq!((&shown["model_calls"], &shown["max_model_calls"]), (&json!(2), &json!(5)));
    assert_eq!(shown["drift"], json!({"clean": 1, "realign": 0, "fork": 0}));
    let (_, rollout) = get("/sessions/sk-captured/rollout").await;
    let sequence = &rollout["sequences"][0];
    assert_eq!(sequence["input_ids"], json!((0..9).collect::<Vec<u32>>()));
    assert_eq!(sequence["loss_mask"], json!([0, 0, 0, 1, 1, 0, 0, 1, 1]));
    assert_eq!((&sequence["turn_lengths"], &sequence["trainable"]), (&json!([2, 2]), &json!(true)));
    let (_, trace) = get("/sessions/sk-captured/trace_entries").await;
    let entry = &trace["entries"][1];
    assert_eq!(entry["requested_sampling_params"]["temperature"], 0.3);
    assert_eq!(entry["sampling_params"]["temperature"], 1.0);
    let (_, samples) = routes.post("/sessions/sk-captured/samples", ADMIN, json!({})).await;
    assert_eq!(samples["samples"][0]["response_length"], 6);
    assert_eq!(samples["samples"][0]["weight_versions"], json!(vec![7; 6]));
    let (_, none) = routes.post("/sessions/sk-captured/samples", ADMIN, json!({"max_seq_len": 4})).await;
    assert_eq!((&none["samples"], &none["too_long"]), (&json!([]), &json!(1)));
    let keyed = routes.send(Method::GET, "/sessions/sk-captured/v1/models", "", Value::Null).await;
    assert_eq!((keyed.0, &keyed.1["data"][0]["id"]), (200, &json!("policy")));
    let unknown = routes.send(Method::GET, "/sessions/sk-unknown/v1/models", "", Value::Null).await;
    assert_eq!(unknown.0, 401);
    assert_eq!(routes.send(Method::DELETE, "/sessions/sk-captured", ADMIN, Value::Null).await.0, 200);
    assert_eq!(get("/sessions/sk-captured").await.0, 410);
}
