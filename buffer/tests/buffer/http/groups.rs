//! Groups and leases on the wire.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, OnceLock};

use buffer::http::{OnRefused, ServerConfig};
use buffer::{Buffer, BufferConfig, Consumer, GroupLimits, Producer};
use serde_json::{Value, json};
use trajectory::GroupId;

use super::super::served::{TestServer, loopback};
use super::super::{config, generate, group, v};
use super::{keyed, statuses, store, trajectory};

/// The group with fields of its trajectory replaced.
fn with(fields: &[(&str, Value)]) -> Value {
    let mut group = keyed("k");
    for (name, value) in fields {
        group["trajectories"][0][*name] = value.clone();
    }
    group
}

#[test]
fn a_group_round_trips() {
    let served = TestServer::memory(config(1, 1));
    let full = json!({
        "key": "a key",
        "task": {
            "id": 9, "prompt": [{"role": "user", "content": "2+2="}], "answer": "4",
            "columns": {"z": 1, "a": [null, 0.1, {"deep": "\u{e9}"}]}
        },
        "trajectories": [{
            "token_ids": [1, 2, 4_294_967_295_u32],
            "loss_mask": [false, true, true],
            "behavior_logprobs": [0.0, -0.1, -1e-30],
            "versions": [{"version": 0, "len": 1}, {"version": 0, "len": 2}],
            "temperature": 0.7,
            "kept": {"offsets": [0, 2, 3], "ids": [2, 5, 4_294_967_295_u32]},
            "experts": {"per_token": 2, "ids": [0, 1, 2, 300]},
            "index": 3,
            "turns": [{"start": 1, "end": 2, "stop": "length", "reward": -0.5}, {"start": 2, "end": 3, "stop": "stop_string", "reward": null}],
            "text": "4",
            "reward": 0.1,
            "rewards": [{"name": "math", "value": 0.1, "error": null}, {"name": "judge", "value": null, "error": "late"}],
            "correct": false,
            "baseline": false,
            "role": "critic"
        }, {
            "token_ids": [1, 2],
            "loss_mask": [false, false],
            "behavior_logprobs": [0.0, 0.0],
            "versions": [{"version": 0, "len": 2}],
            "temperature": 1.0,
            "kept": null,
            "index": 4,
            "turns": [],
            "text": "5",
            "reward": 0.0,
            "rewards": [],
            "correct": null,
            "baseline": true,
            "role": null
        }]
    });
    let answer = store(&served, std::slice::from_ref(&full)).json();
    assert_eq!(answer["policy_version"], 0);
    let id = answer["results"][0]["id"].clone();
    let shown = served.get(&format!("/v1/groups/{id}")).json();
    let mut expected = full;
    let fields = expected.as_object_mut().unwrap();
    fields.remove("key");
    fields.insert("id".to_owned(), id.clone());
    assert_eq!(shown["group"], expected);
    let entry = &shown["entry"];
    assert_eq!(
        (&entry["state"], &entry["tokens"], &entry["keyed"]),
        (&"finalized".into(), &5.into(), &true.into())
    );

    let lease = served.post("/v1/leases", &json!({ "consumer": "t" })).json();
    assert_eq!(lease["lease"]["groups"][0], expected);
    assert_eq!(served.get(&format!("/v1/groups/{id}")).json()["entry"]["state"], "leased");
    served.post(&format!("/v1/leases/{}/ack", lease["lease"]["id"]), &json!({}));
    served.get(&format!("/v1/groups/{id}")).is_problem(404, "unknown_group");
}

#[test]
fn omitted_fields_have_their_defaults() {
    let served = TestServer::memory(config(1, 1));
    let id = store(&served, &[keyed("k")]).json()["results"][0]["id"].clone();
    let shown = served.get(&format!("/v1/groups/{id}")).json();
    let shown = &shown["group"];
    assert_eq!(shown["task"], json!({ "id": 0, "prompt": "", "answer": null, "columns": {} }));
    let one = &shown["trajectories"][0];
    assert_eq!(one["versions"], json!([{ "version": 0, "len": 3 }]));
    assert_eq!((&one["temperature"], &one["index"], &one["reward"]), (&1.0.into(), &0.into(), &Value::Null));
}

#[test]
fn storing_is_idempotent_by_key_and_by_id() {
    let served = TestServer::memory(config(4, 1));
    let id = served.post("/v1/admissions", &json!({ "served_version": 0 })).json()["ids"][0].clone();
    let admitted = json!({ "id": id, "trajectories": [trajectory()] });
    let both = [keyed("k"), admitted];
    let first = store(&served, &both);
    assert_eq!(statuses(&first), ["accepted", "accepted"]);
    let again = store(&served, &both);
    assert_eq!(statuses(&again), ["duplicate", "duplicate"]);
    let ids = |answer: Value| [answer["results"][0]["id"].clone(), answer["results"][1]["id"].clone()];
    assert_eq!(ids(first.json()), ids(again.json()));
    assert_eq!(ids(again.json())[1], id);
}

#[test]
fn each_group_is_refused_by_itself_and_says_why() {
    let served = TestServer::start(
        buffer::Buffer::in_memory(config(8, 1)).unwrap(),
        buffer::http::ServerConfig {
            limits: buffer::http::ServerLimits {
                trajectories: 2,
                tokens: 4,
                vocabulary: Some(100),
                ..buffer::http::ServerLimits::default()
            },
            ..super::super::served::loopback()
        },
    );
    let long = json!([0, 0, 0, 0, 0]);
    let run = |version: u64, len: u32| json!({ "version": version, "len": len });
    let turn = |start: u64, end: u64| json!({ "start": start, "end": end, "stop": "length" });
    let without = |group: Value, field: &str| {
        let mut group = group;
        group["trajectories"][0].as_object_mut().unwrap().remove(field);
        group
    };
    let cases = [
        (json!({ "key": "k", "trajectories": [] }), "empty_group"),
        (with(&[("token_ids", json!([]))]), "empty_trajectory"),
        (with(&[("loss_mask", json!([false]))]), "unequal_lengths"),
        (with(&[("behavior_logprobs", json!([0.0, 0.5, 0.0]))]), "logprob_positive"),
        (with(&[("loss_mask", json!([true, true, true]))]), "first_token_trained"),
        (with(&[("token_ids", json!([1, 2, 100]))]), "token_out_of_vocabulary"),
        (with(&[("kept", json!({ "offsets": [0, 1, 2], "ids": [2, 100] }))]), "token_out_of_vocabulary"),
        (with(&[("policy_version", json!(1))]), "future_version"),
        (
            json!({ "key": "k", "trajectories": [trajectory(), trajectory(), trajectory()] }),
            "too_many_trajectories",
        ),
        (with(&[("token_ids", long)]), "too_many_tokens"),
        (json!({ "id": 7, "trajectories": [trajectory()] }), "unknown_id"),
        (json!({ "trajectories": [trajectory()] }), "no_identity"),
        (json!({ "id": 7, "key": "k", "trajectories": [trajectory()] }), "two_identities"),
        (json!({ "key": "", "trajectories": [trajectory()] }), "bad_key"),
        (json!({ "key": "k".repeat(129), "trajectories": [trajectory()] }), "bad_key"),
        (json!({ "key": "a\nb", "trajectories": [trajectory()] }), "bad_key"),
        (with(&[("kept", json!({ "offsets": [0, 1], "ids": [2] }))]), "bad_kept"),
        (with(&[("experts", json!({ "per_token": 2, "ids": [0, 1, 2] }))]), "bad_experts"),
        (with(&[("experts", json!({ "per_token": 1, "ids": [0, 1] }))]), "accepted"),
        (with(&[("temperature", json!(0.0))]), "bad_temperature"),
        (with(&[("turns", json!([turn(1, 4)]))]), "bad_turn"),
        (with(&[("turns", json!([turn(1, 3), turn(2, 3)]))]), "bad_turn"),
        (with(&[("baseline", json!(true))]), "bad_baseline"),
        (with(&[("index", json!(0))]), "accepted"),
        (
            json!({ "key": "k", "trajectories": [with(&[("index", json!(1))])["trajectories"][0], trajectory()] }),
            "accepted",
        ),
        (
            json!({ "key": "k", "trajectories": [with(&[("index", json!(2))])["trajectories"][0], trajectory()] }),
            "bad_index",
        ),
        (without(keyed("k"), "policy_version"), "bad_versions"),
        (with(&[("versions", json!([run(0, 3)]))]), "bad_versions"),
        (without(with(&[("versions", json!([run(0, 3), run(0, 0)]))]), "policy_version"), "bad_versions"),
        (without(with(&[("versions", json!([run(0, 2)]))]), "policy_version"), "unequal_lengths"),
    ];
    for (group, code) in cases.iter().filter(|(_, code)| *code != "accepted") {
        // The sound group beside it is stored.
        let answer = store(&served, &[group.clone(), keyed("sound")]);
        let results = &answer.json()["results"];
        assert_eq!(results[0]["status"], "invalid", "{code}: {results}");
        assert_eq!(results[0]["code"], *code, "{results}");
        assert!(!results[0]["detail"].as_str().unwrap().is_empty());
        assert!(["accepted", "duplicate"].contains(&results[1]["status"].as_str().unwrap()), "{results}");
    }
    assert_eq!(served.get("/v1/stats").json()["finalized"], 1);
}

/// A run whose algorithm asks which answers are correct takes none that do not say so; what is not trained on need not.
#[test]
fn a_group_says_what_is_correct_where_that_is_asked() {
    let limits = buffer::http::ServerLimits { correct: true, ..buffer::http::ServerLimits::default() };
    let served = TestServer::start(
        buffer::Buffer::in_memory(config(8, 1)).unwrap(),
        buffer::http::ServerConfig { limits, ..super::super::served::loopback() },
    );
    let scored = with(&[("reward", json!(1.0))]);
    let mut judged = with(&[("reward", json!(0.5)), ("correct", json!(true))]);
    let mut unscored = keyed("k");
    (judged["key"], unscored["key"]) = (json!("judged"), json!("unscored"));
    let answer = store(&served, &[scored, judged, unscored]);
    assert_eq!(statuses(&answer), ["invalid", "accepted", "accepted"]);
    let refused = &answer.json()["results"][0];
    assert_eq!(refused["code"], "no_verdict", "{refused}");
    assert!(refused["detail"].as_str().unwrap().contains("`correct` is missing"), "{refused}");
}

#[test]
fn a_body_of_another_shape_is_refused_as_a_whole_with_its_path() {
    let served = TestServer::memory(config(1, 1));
    for (body, place) in [
        (
            json!({ "groups": [keyed("k"), with(&[("token_ids", json!([1, -2, 3]))])] }),
            "groups[1].trajectories[0].token_ids[1]",
        ),
        (json!({ "groups": [with(&[("rewrd", json!(1))])] }), "groups[0].trajectories[0].rewrd"),
        (
            json!({ "groups": [with(&[("turns", json!([{ "start": 0, "end": 1, "stop": "?" }]))])] }),
            "turns[0].stop",
        ),
        (
            json!({ "groups": [with(&[("behavior_logprobs", json!([0.0, -1e39, 0.0]))])] }),
            "behavior_logprobs[1]",
        ),
        (json!({ "groups": {} }), "groups"),
        (json!({}), "missing field `groups`"),
        (json!([]), "invalid"),
    ] {
        let problem = served.post("/v1/groups", &body).is_problem(422, "bad_body");
        assert!(problem["detail"].as_str().unwrap().contains(place), "{problem}");
    }
    let many = json!({ "groups": vec![keyed("k"); 1025] });
    let problem = served.post("/v1/groups", &many).is_problem(422, "bad_body");
    assert!(problem["detail"].as_str().unwrap().contains("at most 1024"), "{problem}");
    assert_eq!(served.get("/v1/stats").json()["finalized"], 0, "nothing of it was stored");
}

#[test]
fn a_full_buffer_answers_with_retry_after() {
    let served = TestServer::memory(config(1, 0));
    assert_eq!(statuses(&store(&served, &[keyed("a"), keyed("b")])), ["accepted", "full"]);
    let full = store(&served, &[keyed("b")]);
    full.is_problem(429, "full");
    assert_eq!(full.headers["retry-after"], "1");
    assert_eq!(statuses(&full), ["full"]);
    let none = served.post("/v1/admissions", &json!({ "served_version": 0 }));
    assert_eq!((none.status, &none.json()["ids"]), (200, &json!([])));
    assert_eq!(none.headers["retry-after"], "1");
}

#[test]
fn pages_show_every_group_once() {
    let served = TestServer::memory(config(8, 1));
    let client = served.client();
    generate(&client, v(0), 7);
    let mut seen = Vec::new();
    let mut path = "/v1/groups?limit=3".to_owned();
    loop {
        let page = served.get(&path).json();
        seen.extend(page["groups"].as_array().unwrap().iter().map(|group| group["id"].as_u64().unwrap()));
        let Some(cursor) = page["next_cursor"].as_str() else { break };
        path = format!("/v1/groups?limit=3&cursor={cursor}");
    }
    assert_eq!(seen, (0..7).collect::<Vec<_>>());
    let count =
        |filter: &str| served.get(&format!("/v1/groups?{filter}")).json()["groups"].as_array().unwrap().len();
    assert_eq!((count("state=finalized"), count("state=leased")), (7, 0));
    assert_eq!((count("policy_version=0"), count("policy_version=1")), (7, 0));
    // The fixture has -0.5 for its turn beside the weighted sum of its rewards.
    assert_eq!((count("min_reward=-0.3"), count("min_reward=0.4")), (7, 0));
    for (wrong, code) in [("limit=0", "out_of_range"), ("limit=1001", "out_of_range")] {
        served.get(&format!("/v1/groups?{wrong}")).is_problem(422, code);
    }
    for wrong in ["limit=x", "cursor=12", "state=gone", "limt=3"] {
        served.get(&format!("/v1/groups?{wrong}")).is_problem(400, "bad_query");
    }
    served.get("/v1/groups/x").is_problem(400, "bad_path");
}

#[test]
fn a_removal_is_permanent() {
    let served = TestServer::memory(config(8, 1));
    let client = served.client();
    let ids = generate(&client, v(0), 3);
    client.set_version(v(1), false).unwrap();
    let evict = |path: &str| served.ask("DELETE", path, &[], b"").json();
    assert_eq!(evict("/v1/groups/0"), json!({ "evicted": 1 }));
    assert_eq!(evict("/v1/groups/0"), json!({ "evicted": 0 }));
    assert_eq!(evict("/v1/groups?below_version=0"), json!({ "evicted": 0 }));
    assert_eq!(evict("/v1/groups?below_version=1"), json!({ "evicted": 2 }));
    assert_eq!(client.finalize(group(ids[1], v(0))).unwrap(), buffer::Finalized::Duplicate);
}

#[test]
fn a_lease_is_refused_with_what_is_wrong() {
    let served = TestServer::memory(config(1, 1));
    let lease = |body: Value| served.post("/v1/leases", &body);
    lease(json!({ "consumer": "" })).is_problem(422, "bad_consumer");
    for (field, value) in
        [("wait_ms", 30_001), ("hold_ms", 99), ("groups", 0), ("at_least", 0), ("tokens", 0)]
    {
        let problem = lease(json!({ "consumer": "t", field: value })).is_problem(422, "out_of_range");
        assert!(problem["detail"].as_str().unwrap().contains(field), "{problem}");
    }
    let future = lease(json!({ "consumer": "t", "step": 3 })).is_problem(422, "future_version");
    assert_eq!((&future["found"], &future["bound"]), (&3.into(), &0.into()));
    let none = lease(json!({ "consumer": "t" }));
    assert_eq!((none.status, &none.json()["lease"]), (200, &Value::Null));
    assert_eq!(none.json()["stats"]["finalized"], 0);
    for action in ["ack", "release"] {
        served.post(&format!("/v1/leases/9/{action}"), &json!({})).is_problem(404, "unknown_lease");
        served.post(&format!("/v1/leases/9/{action}"), &json!({ "x": 1 })).is_problem(422, "bad_body");
    }
    served.post("/v1/leases/9/extend", &json!({ "hold_ms": 1000 })).is_problem(404, "unknown_lease");
    served.post("/v1/admissions/5/claim", &json!({ "served_version": 0 })).is_problem(409, "wrong_state");
    let put = |version: u64| {
        let body = json!({ "version": version }).to_string();
        served.ask("PUT", "/v1/policy/version", &[], body.as_bytes())
    };
    assert_eq!(put(2).status, 200);
    put(1).is_problem(409, "version_behind");
    assert_eq!(served.get("/v1/policy/version").json(), json!({ "version": 2 }));
    lease(json!({ "consumer": "t", "step": 0 })).is_problem(409, "step_passed");
}

#[test]
fn leases_are_listed_until_they_are_acknowledged() {
    let served = TestServer::memory(BufferConfig { ..config(1, 1) });
    let client = served.client();
    generate(&client, v(0), 2);
    let named =
        |consumer: &str| served.post("/v1/leases", &json!({ "consumer": consumer, "step": 0 })).json();
    let id = named("a")["lease"]["id"].clone();
    assert_eq!(named("a")["lease"]["id"], id, "a named step is leased once");
    let listed = served.get("/v1/leases?consumer=a").json();
    assert_eq!(listed["leases"][0]["id"], id);
    assert!(listed["leases"][0]["expires_in_ms"].as_u64().unwrap() <= 60_000);
    assert_eq!(served.get("/v1/leases?consumer=b").json()["leases"], json!([]));
    assert_eq!(served.post(&format!("/v1/leases/{id}/extend"), &json!({ "hold_ms": 100_000 })).status, 200);
    assert_eq!(served.post("/v1/leases/ack", &json!({ "consumer": "a", "through": 1 })).status, 200);
    assert_eq!(served.get("/v1/leases").json()["leases"], json!([]));
    let ids: BTreeSet<GroupId> = client
        .admit(buffer::AdmitRequest { served: v(1), limit: 9, hold: None, holder: None }, super::super::NOW)
        .unwrap()
        .into_iter()
        .collect();
    assert!(!ids.is_empty());
}

/// The run sets the limits of its groups while the server runs.
#[test]
fn a_run_accepts_only_trainable_groups_and_reports_the_others() {
    let (reports, limits) = (Arc::new(Mutex::new(Vec::new())), Arc::new(OnceLock::new()));
    let heard = Arc::clone(&reports);
    let refused: OnRefused = Arc::new(move |group| {
        heard.lock().unwrap().push((group.sender.unwrap().to_string(), group.code.to_owned()));
    });
    let config =
        ServerConfig { group_limits: Some(Arc::clone(&limits)), refused: Some(refused), ..loopback() };
    let served = TestServer::start(Buffer::in_memory(super::super::config(8, 1)).unwrap(), config);
    store(&served, &[keyed("early")]).is_problem(503, "preparing");
    limits.set(GroupLimits { vocabulary: 10, context: 4, trajectories: 2, experts: None }).unwrap();
    let with = |key: &str, field: &str, value: Value| {
        let mut group = keyed(key);
        group["trajectories"][0][field] = value;
        group
    };
    let mut three = keyed("three");
    three["trajectories"] = json!([trajectory(), trajectory(), trajectory()]);
    let mut long = keyed("long");
    long["trajectories"][0] = json!({
        "token_ids": [1, 2, 3, 4, 5], "loss_mask": [false, true, true, true, true],
        "behavior_logprobs": [0, -1, -1, -1, -1], "policy_version": 0
    });
    let groups = [
        keyed("sound"),
        with("ids", "token_ids", json!([1, 50_000, 3])),
        with("kept", "kept", json!({ "offsets": [0, 2, 3], "ids": [2, 50_000, 3] })),
        with("experts", "experts", json!({ "per_token": 1, "ids": [0, 1] })),
        with("low", "behavior_logprobs", json!([0.0, -1e30, -0.25])),
        with("cold", "temperature", json!(1e-20)),
        with("rich", "reward", json!(1e300)),
        with("future", "policy_version", json!(u64::MAX)),
        three,
        long,
    ];
    let answer = store(&served, &groups);
    let codes: Vec<String> = answer.json()["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|result| result["code"].as_str().unwrap_or("stored").to_owned())
        .collect();
    let expected = [
        "stored",
        "token_out_of_vocabulary",
        "token_out_of_vocabulary",
        "bad_experts",
        "logprob_too_low",
        "bad_temperature",
        "reward_out_of_range",
        "future_version",
        "too_many_trajectories",
        "too_many_tokens",
    ];
    assert_eq!(codes, expected);
    let mut refused: Vec<String> = reports.lock().unwrap().iter().map(|(_, code)| code.clone()).collect();
    refused.sort();
    let mut wanted: Vec<&str> = expected[1..].to_vec();
    wanted.sort_unstable();
    assert_eq!(refused, wanted);
    assert!(reports.lock().unwrap().iter().all(|(sender, _)| sender == "127.0.0.1"));
    assert!(served.get("/metrics").text().contains("rlrun_buffer_groups_refused_total 9"));
    let sound = format!("/v1/groups/{}/quarantine", answer.json()["results"][0]["id"]);
    let set_aside = served.post(&sound, &json!({})).json();
    assert_eq!(set_aside, json!({ "quarantined": true, "sender": "127.0.0.1 as \"sound\"" }));
    assert_eq!(served.get("/v1/stats").json()["quarantined"], 1);
    // By itself a buffer knows no model.
    let generic = TestServer::memory(super::super::config(8, 1));
    assert_eq!(statuses(&store(&generic, &groups[1..2])), ["accepted"]);
}
