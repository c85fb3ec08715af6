//! What a body may be: formats, encodings, sizes, and bytes that are none of it.

use std::io::Write;

use buffer::Buffer;
use buffer::http::{ServerConfig, ServerLimits};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::config;
use super::super::served::{HttpAnswer, TestServer, loopback};
use super::{keyed, statuses};

const JSON: (&str, &str) = ("content-type", "application/json");
const PACK: (&str, &str) = ("content-type", "application/msgpack");

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::stream::encode_all(bytes, 3).unwrap()
}

fn append(served: &TestServer, headers: &[(&str, &str)], body: &[u8]) -> HttpAnswer {
    served.ask("POST", "/v1/groups", headers, body)
}

#[test]
fn message_pack_equals_json() {
    let served = TestServer::memory(config(8, 1));
    let body = json!({ "groups": [keyed("a"), keyed("b")] });
    let pack = rmp_serde::to_vec_named(&body).unwrap();
    for (n, name) in
        ["application/msgpack", "application/x-msgpack", "application/vnd.msgpack"].iter().enumerate()
    {
        let answer = append(&served, &[("content-type", name), ("accept", name)], &pack);
        assert_eq!(answer.headers["content-type"], "application/msgpack");
        let answer: Value = rmp_serde::from_slice(&answer.body).unwrap();
        assert_eq!(answer["results"][1]["status"], if n == 0 { "accepted" } else { "duplicate" });
    }
    let in_pack = served.ask("GET", "/v1/groups", &[("accept", "application/msgpack")], b"");
    let mut in_pack: Value = rmp_serde::from_slice(&in_pack.body).unwrap();
    let mut in_json = served.get("/v1/groups").json();
    for answer in [&mut in_pack, &mut in_json] {
        // Time passes between the two answers.
        for group in answer["groups"].as_array_mut().unwrap() {
            assert!(group["age_ms"].take().is_u64());
        }
    }
    assert_eq!(in_pack, in_json);
    let followed = [&pack[..], b"\xc0"].concat();
    append(&served, &[PACK], &followed).is_problem(422, "bad_body");
}

/// JSON has no such numbers.
#[test]
fn numbers_that_are_not_finite_are_refused() {
    let served = TestServer::memory(config(8, 1));
    let pack = rmp_serde::to_vec_named(&json!({ "groups": [keyed("k")] })).unwrap();
    let sound = [&[0xcb][..], &(-0.5f64).to_be_bytes()].concat();
    let at = pack.windows(sound.len()).position(|bytes| bytes == sound).unwrap();
    for wrong in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let mut pack = pack.clone();
        pack[at + 1..at + sound.len()].copy_from_slice(&wrong.to_be_bytes());
        let answer = append(&served, &[PACK], &pack).json();
        assert_eq!(answer["results"][0]["code"], "not_finite", "{wrong}: {answer}");
    }
}

#[test]
fn answers_follow_accept() {
    let served = TestServer::memory(config(1, 1));
    for (accept, media_type) in [
        ("*/*", "application/json"),
        ("application/msgpack;q=0.5, application/json;q=0.4", "application/msgpack"),
        ("text/html, application/json;q=0.9", "application/json"),
        ("text/html,application/xhtml+xml,*/*;q=0.8", "application/json"),
    ] {
        let answer = served.ask("GET", "/v1/stats", &[("accept", accept)], b"");
        assert_eq!((answer.status, &answer.headers["content-type"][..]), (200, media_type), "{accept}");
    }
    for accept in ["image/png", "application/json;q=0"] {
        served.ask("GET", "/v1/stats", &[("accept", accept)], b"").is_problem(406, "not_acceptable");
    }
}

#[test]
fn bodies_can_be_compressed() {
    let served = TestServer::memory(config(8, 1));
    let body = json!({ "groups": [keyed("k")] }).to_string();
    for (encoding, bytes) in
        [("gzip", gzip(body.as_bytes())), ("zstd", zstd(body.as_bytes())), ("identity", body.clone().into())]
    {
        let answer = append(&served, &[JSON, ("content-encoding", encoding)], &bytes);
        assert_eq!(answer.status, 200, "{encoding}: {}", answer.text());
    }
    for encoding in ["gzip", "zstd"] {
        append(&served, &[JSON, ("content-encoding", encoding)], body.as_bytes())
            .is_problem(400, "bad_encoding");
    }
    append(&served, &[JSON, ("content-encoding", "br")], b"").is_problem(415, "unsupported_encoding");
    append(&served, &[("content-type", "text/plain")], body.as_bytes())
        .is_problem(415, "unsupported_media_type");
    append(&served, &[("content-type", "application/x-www-form-urlencoded")], b"groups=")
        .is_problem(415, "unsupported_media_type");
}

#[test]
fn no_body_is_larger_than_the_limit_however_it_comes() {
    const LIMIT: usize = 1 << 20;
    let limits = ServerLimits { body_bytes: LIMIT, ..ServerLimits::default() };
    let served =
        TestServer::start(Buffer::in_memory(config(8, 1)).unwrap(), ServerConfig { limits, ..loopback() });
    let padded = |bytes: usize| {
        let mut body = json!({ "groups": [keyed("k")] }).to_string().into_bytes();
        body.resize(bytes, b' ');
        body
    };
    // Small bodies, large ones, and the largest take different ways.
    for size in [1000, 100 << 10, 300 << 10, LIMIT] {
        for (encoding, bytes) in
            [("identity", padded(size)), ("gzip", gzip(&padded(size))), ("zstd", zstd(&padded(size)))]
        {
            let answer = append(&served, &[JSON, ("content-encoding", encoding)], &bytes);
            assert_eq!(answer.status, 200, "{size} {encoding}: {}", answer.text());
        }
    }
    append(&served, &[JSON], &padded(LIMIT + 1)).is_problem(413, "body_too_large");
    // A thousand times as large as what is sent.
    let bomb = padded(256 << 20);
    for (encoding, bytes) in [("gzip", gzip(&bomb)), ("zstd", zstd(&bomb))] {
        assert!(bytes.len() < LIMIT, "{encoding}: {} bytes", bytes.len());
        append(&served, &[JSON, ("content-encoding", encoding)], &bytes).is_problem(413, "body_too_large");
    }
    // Chunks do not say how many come.
    let mut stream = served.connect();
    let head = super::super::served::head(
        "POST",
        "/v1/groups",
        served.address,
        &[JSON, ("transfer-encoding", "chunked")],
        None,
    );
    stream.write_all(&head).unwrap();
    let chunk = [format!("{:x}\r\n", 1 << 16).as_bytes(), &vec![b' '; 1 << 16], b"\r\n"].concat();
    for _ in 0..17 {
        // It stops reading when it has seen enough.
        let _ = stream.write_all(&chunk);
    }
    HttpAnswer::read(&mut std::io::BufReader::new(stream)).is_problem(413, "body_too_large");
}

#[test]
fn nesting_is_bounded() {
    let served = TestServer::memory(config(8, 1));
    let deep = |depth: usize| {
        format!(
            "{{\"groups\":[{{\"key\":\"k\",\"trajectories\":[],\"task\":{{\"prompt\":\"\",\"columns\":{{\"a\":{}{}}}}}}}]}}",
            "[".repeat(depth),
            "]".repeat(depth)
        )
    };
    assert_eq!(statuses(&append(&served, &[JSON], deep(50).as_bytes())), ["invalid"]);
    append(&served, &[JSON], deep(100_000).as_bytes()).is_problem(422, "bad_body");
    let start =
        rmp_serde::to_vec_named(&json!({ "groups": [{ "task": { "columns": { "a": 0 } } }] })).unwrap();
    let deep = [&start[..start.len() - 1], &vec![0x91; 100_000]].concat();
    append(&served, &[PACK], &deep).is_problem(422, "bad_body");
}

/// Small on the wire, and dozens of times the largest body once they are values.
#[test]
fn the_decoded_size_of_a_body_is_bounded_before_decoding() {
    const BODY: usize = 4 << 20;
    let limits = ServerLimits { body_bytes: BODY, decoded_bytes: 32 << 20, ..ServerLimits::default() };
    let served =
        TestServer::start(Buffer::in_memory(config(8, 1)).unwrap(), ServerConfig { limits, ..loopback() });
    let filled = |start: &str, item: &str, end: &str| {
        let mut body = start.to_owned();
        while body.len() + item.len() + end.len() < BODY {
            body.push_str(item);
        }
        body.truncate(body.len() - 1);
        body + end
    };
    let task = r#"{"groups":[{"key":"k","trajectories":[],"task":{"prompt":"","columns":{"a":["#;
    let unnamed = r#"{"groups":[[null,"k",[0,"",null,{"a":["#;
    let tiny = r#"{"token_ids":[],"loss_mask":[],"behavior_logprobs":[]},"#;
    for body in [
        filled(task, "0,", "]}}}]}"),
        filled(task, "{\"\":0},", "]}}}]}"),
        filled(r#"{"groups":[{"key":"k","trajectories":["#, tiny, "]}]}"),
        // Structs as lists of their fields.
        filled(unnamed, "{\"\":0},", "]}]]]}"),
    ] {
        let pack = rmp_serde::to_vec_named(&serde_json::from_str::<Value>(&body).unwrap()).unwrap();
        for (kind, body) in [(JSON, body.as_bytes()), (PACK, &pack[..])] {
            for (encoding, bytes) in [("identity", body.to_vec()), ("gzip", gzip(body)), ("zstd", zstd(body))]
            {
                append(&served, &[kind, ("content-encoding", encoding)], &bytes)
                    .is_problem(413, "decoded_too_large");
            }
        }
    }
    // As many numbers in a stream are no more than they look like.
    let ids = filled(r#"{"groups":[{"key":"k","trajectories":[{"token_ids":["#, "0,", "]}]}]}");
    append(&served, &[JSON], ids.as_bytes()).is_problem(422, "bad_body");
    let stats = served.get("/v1/stats").json();
    assert_eq!((&stats["finalized"], &stats["claimed"]), (&json!(0), &json!(0)));
}

#[test]
fn columns_and_details_are_bounded() {
    let served = TestServer::memory(config(8, 1));
    let with = |columns: &Value, reward: &Value| {
        let mut group = keyed("k");
        group["task"] = json!({ "prompt": "", "columns": columns });
        group["trajectories"][0]["rewards"] = json!([reward]);
        let answer = super::store(&served, &[group]).json();
        answer["results"][0]["code"].as_str().unwrap_or_default().to_owned()
    };
    let (long, plain) = ("x".repeat(300), json!({ "name": "r" }));
    let deep = (0..70).fold(json!(0), |inner, _| json!([inner]));
    assert_eq!(with(&json!({ &long: 0 }), &plain), "name_too_long");
    assert_eq!(with(&json!({ "a": { &long: 0 } }), &plain), "name_too_long");
    assert_eq!(with(&json!({}), &json!({ "name": long })), "name_too_long");
    assert_eq!(with(&json!({ "a": vec![0; 20_000] }), &plain), "too_many_values");
    assert_eq!(
        with(&json!({}), &json!({ "name": "r", "details": { "a": vec![0; 20_000] } })),
        "too_many_values"
    );
    assert_eq!(with(&json!({ "a": deep }), &plain), "too_deep");
    assert_eq!(with(&json!({ "a": vec![0; 16_000] }), &json!({ "name": "r", "details": { "b": 1 } })), "");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// A panic would close the connection without an answer.
    #[test]
    fn no_body_causes_a_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..600),
        cut in 0..400usize,
        flip in any::<(prop::sample::Index, u8)>(),
        encoding in 0..3usize,
    ) {
        static SERVED: std::sync::OnceLock<TestServer> = std::sync::OnceLock::new();
        let served = SERVED.get_or_init(|| TestServer::memory(config(64, 1)));
        let json = json!({ "groups": [keyed("k")] }).to_string().into_bytes();
        let pack = rmp_serde::to_vec_named(&json!({ "groups": [keyed("k")] })).unwrap();
        let damaged = |sound: &[u8]| {
            let mut bytes = sound[..sound.len().min(sound.len().saturating_sub(cut % 8))].to_vec();
            let at = flip.0.index(bytes.len());
            bytes[at] ^= flip.1;
            bytes
        };
        let compress = [|bytes: &[u8]| bytes.to_vec(), gzip, zstd][encoding];
        let encoding = ("content-encoding", ["identity", "gzip", "zstd"][encoding]);
        for (headers, body) in [
            ([JSON, encoding], compress(&damaged(&json))),
            ([PACK, encoding], compress(&damaged(&pack))),
            ([JSON, encoding], damaged(&compress(&json))),
            ([PACK, encoding], bytes.clone()),
            ([JSON, encoding], bytes),
        ] {
            for path in ["/v1/groups", "/v1/leases", "/v1/admissions", "/v1/leases/ack", "/v1/leases/0/ack"] {
                let answer = served.ask("POST", path, &headers, &body);
                prop_assert!((200..500).contains(&answer.status), "{path}: {}", answer.text());
            }
        }
    }
}
