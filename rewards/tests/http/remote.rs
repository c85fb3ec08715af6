//! The reward `http`: both dialects, and servers that are slow, broken or hostile.
//!
//! Invariant: only a well-formed answer is a score.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use rewards::{Outcome, RewardError};
use serde_json::{Value, json};

use crate::server::{FakeServer, Reply, ok};
use crate::{HttpFixture, TOKEN};

fn status(status: u16, header: &str, body: &str) -> Reply {
    let headers = if header.is_empty() { vec![] } else { vec![header.to_owned()] };
    Reply::Status(status, headers, body.as_bytes().to_vec())
}

#[test]
fn the_words_of_openrlhf() {
    let server = FakeServer::start(|_, _| {
        ok(&json!({"rewards": [0.5], "scores": [1], "extra_logs": {"length": [3]}}))
    });
    let bench = HttpFixture::open("http", &server.url(), &json!({"token_env": "RM_TOKEN"}));
    let judged = bench.judge(&["four"]).pop().unwrap().unwrap();
    assert_eq!(judged, Outcome::from(0.5).with("score", 1).with("length", 3));
    let asked = server.asked().pop().unwrap();
    assert_eq!(asked.line, "POST /get_reward HTTP/1.1");
    assert_eq!(asked.body, json!({"query": ["2+2=four"], "prompts": ["2+2="], "labels": ["4"]}));
    assert!(asked.headers.contains(&format!("authorization: bearer {TOKEN}")));
    assert!(!format!("{:?}", bench.reward).contains(TOKEN));
}

#[test]
fn logs_that_do_not_fit_cost_no_reward_and_true_is_one() {
    let server = FakeServer::start(|_, _| {
        ok(
            &json!({"rewards": [true], "scores": 0.5, "extra_logs": {"acc": 1.0, "length": [3], "all": [1, 2]}}),
        )
    });
    let judged =
        HttpFixture::open("http", &server.url(), &json!({})).judge(&["four"]).pop().unwrap().unwrap();
    assert_eq!(judged, Outcome::from(1.0).with("length", 3));
}

#[test]
fn the_words_of_slime() {
    let server = FakeServer::start(|count, _| {
        ok(&if count == 0 { json!(2) } else { json!({"score": 3, "why": "x"}) })
    });
    let bench = HttpFixture::open("http", &server.url(), &json!({"dialect": "slime"}));
    assert_eq!(bench.value("four"), Some(2.0));
    let judged = bench.judge(&["four"]).pop().unwrap().unwrap();
    assert_eq!(judged, Outcome::from(3.0).with("why", "x"));
    assert_eq!(server.asked()[0].body, json!({"prompt": "2+2=", "response": "four", "label": "4"}));
}

#[test]
fn waiting_requests_are_sent_together_and_each_gets_its_own_answer() {
    let length = |query: &Value| query.as_str().unwrap().len();
    let server = FakeServer::start(move |_, asked| {
        let queries = asked.body["query"].as_array().unwrap();
        ok(&json!({"rewards": queries.iter().map(length).collect::<Vec<_>>()}))
    });
    let bench = HttpFixture::open("http", &server.url(), &json!({"batch": 8, "concurrency": 1}));
    let texts: Vec<String> = (0..20).map(|count| "x".repeat(count)).collect();
    let judged = bench.judge(&texts.iter().map(String::as_str).collect::<Vec<_>>());
    for (count, judged) in judged.into_iter().enumerate() {
        assert_eq!(judged.unwrap().value, Some((4 + count) as f64));
    }
    let sizes: Vec<_> =
        server.asked().iter().map(|asked| asked.body["query"].as_array().unwrap().len()).collect();
    assert_eq!(sizes.iter().sum::<usize>(), 20);
    assert!(sizes.iter().all(|size| *size <= 8) && sizes.len() < 20, "{sizes:?}");
}

#[test]
fn a_cancelled_request_does_not_affect_the_others() {
    let server = FakeServer::start(|_, asked| {
        let rewards: Vec<_> = asked.body["query"].as_array().unwrap().iter().map(|_| 1).collect();
        std::thread::sleep(Duration::from_millis(100));
        ok(&json!({"rewards": rewards}))
    });
    let bench = HttpFixture::open("http", &server.url(), &json!({"batch": 4, "concurrency": 1}));
    let task = crate::task();
    let inputs = [rewards::RewardInput::text(&task, "given up")];
    bench.runtime.block_on(async {
        let (mut first, second) = (bench.reward.score(&inputs), bench.reward.score(&inputs));
        let begun = tokio::time::timeout(Duration::from_millis(20), &mut first).await;
        assert!(begun.is_err(), "it was not yet answered");
        drop(first);
        let judged = tokio::time::timeout(Duration::from_secs(20), second).await.unwrap();
        assert_eq!(judged[0].as_ref().unwrap().value, Some(1.0));
    });
    let counts = bench.reward.load().take();
    assert_eq!((counts.waiting, counts.running), (0, 0));
}

#[test]
fn at_most_so_many_requests_at_a_time() {
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let seen = Arc::clone(&most);
    // The first two requests are answered when both have arrived.
    let both = Barrier::new(2);
    let server = FakeServer::start(move |count, _| {
        let now = running.fetch_add(1, Ordering::SeqCst) + 1;
        seen.fetch_max(now, Ordering::SeqCst);
        if count < 2 {
            both.wait();
        }
        std::thread::sleep(Duration::from_millis(5));
        running.fetch_sub(1, Ordering::SeqCst);
        ok(&json!({"rewards": [1]}))
    });
    let bench = HttpFixture::open("http", &server.url(), &json!({"concurrency": 2}));
    assert!(bench.judge(&["x"; 12]).iter().all(Result::is_ok));
    assert_eq!(most.load(Ordering::SeqCst), 2);
}

#[test]
fn a_busy_server_is_asked_again() {
    let server = FakeServer::start(|count, _| match count {
        0 => status(503, "retry-after: 0", "loading"),
        1 => Reply::Raw(b"HTTP/1.1 200 X\r\ncontent-length: 100\r\n\r\n{".to_vec()),
        2 => Reply::Raw(Vec::new()),
        3 => status(429, "", ""),
        _ => ok(&json!({"rewards": [1]})),
    });
    let bench = HttpFixture::open("http", &server.url(), &json!({}));
    assert_eq!(bench.value("x"), Some(1.0));
    assert_eq!(server.asked().len(), 5);
}

#[test]
fn a_server_that_stays_busy_is_an_error_with_its_message() {
    let server = FakeServer::start(|_, _| status(503, "", "out of memory"));
    let bench = HttpFixture::open("http", &server.url(), &json!({"retries": 1}));
    let reason = bench.reason("x");
    assert!(
        reason.contains("2 attempts") && reason.contains("503") && reason.contains("out of memory"),
        "{reason}"
    );
    // A pause longer than the remaining time is not started.
    let patient = FakeServer::start(|_, _| status(429, "retry-after: 3600", "later"));
    let begun = Instant::now();
    let reason = HttpFixture::open("http", &patient.url(), &json!({})).reason("x");
    assert!(reason.contains("429") && begun.elapsed() < Duration::from_secs(15), "{reason}");
    // No process listens there: the port was free a moment ago.
    let gone = { FakeServer::start(|_, _| Reply::Silence).url() };
    let reason = HttpFixture::open("http", &gone, &json!({"retries": 1, "timeout_s": 10})).reason("x");
    assert!(reason.contains(&gone), "{reason}");
}

#[test]
fn a_silent_server_is_a_timeout() {
    let server = FakeServer::start(|_, _| Reply::Silence);
    let bench = HttpFixture::open("http", &server.url(), &json!({"timeout_s": 0.3}));
    let judged = bench.judge(&["x", "y"]);
    assert!(judged.iter().all(|judged| matches!(judged, Err(RewardError::Timeout { .. }))), "{judged:?}");
}

#[test]
fn answers_that_cannot_be_used_are_shown() {
    for (reply, word) in [
        (status(200, "", "<html>oops</html>"), "<html>oops"),
        (status(200, "", "{\"rewards\": [NaN]}"), "NaN"),
        (status(200, "", "{\"rewards\": [1, 2]}"), "2 entries for 1"),
        (status(200, "", "{\"rewards\": [1e999]}"), "1e999"),
        (status(200, "", "{\"rewards\": [null]}"), "null"),
        (status(200, "", "{\"error\": \"no\"}"), "no `rewards`"),
        (status(200, "", ""), "not JSON"),
        (status(500, "", "Traceback: KeyError"), "Traceback: KeyError"),
        (status(404, "", "{\"detail\": \"Not Found\"}"), "404"),
        (status(302, "location: http://169.254.169.254/", ""), "not followed"),
        (Reply::Status(200, vec![], vec![b'1'; 3 << 20]), "`max_answer_kib`"),
        (Reply::Status(200, vec![], "\u{e9}".repeat(5000).into_bytes()), "..."),
    ] {
        let reply = std::sync::Mutex::new(Some(reply));
        let server = FakeServer::start(move |_, _| reply.lock().unwrap().take().unwrap_or(Reply::Silence));
        let bench = HttpFixture::open("http", &server.url(), &json!({"retries": 0}));
        let reason = bench.reason("x");
        assert!(reason.contains(word) && reason.len() < 800, "{word}: {reason}");
        assert_eq!(server.asked().len(), 1, "{word}");
    }
}

#[test]
fn addresses_that_are_not_allowed_are_not_connected_to() {
    let server = FakeServer::start(|_, _| ok(&json!({"rewards": [1]})));
    let named = format!("http://localhost:{}/", server.port);
    let elsewhere = HttpFixture::open("http", &named, &json!({"allow": ["10.0.0.0/8"], "retries": 0}));
    let reason = elsewhere.reason("x");
    assert!(reason.contains("not in `allow`"), "{reason}");
    assert!(server.asked().is_empty());
    let meant = HttpFixture::open("http", &named, &json!({"allow": ["127.0.0.0/8", "::1"]}));
    assert_eq!(meant.value("x"), Some(1.0));
    let Err(refused) = HttpFixture::try_open("http", "http://169.254.169.254/", &json!({})) else {
        panic!("it was taken")
    };
    assert!(refused.to_string().contains("`allow`"), "{refused}");
}

#[test]
fn invalid_keys_are_refused() {
    for (keys, word) in [
        (json!({"dialect": "trl"}), "`dialect`"),
        (json!({"batch": 0}), "`batch`"),
        (json!({"batch": 2, "dialect": "slime"}), "`batch`"),
        (json!({"token_env": "NOT_SET"}), "`NOT_SET`"),
        (json!({"allow": ["http://x"]}), "`allow`"),
        (json!({"model": "x"}), "does not take `model`"),
    ] {
        let Err(error) = HttpFixture::try_open("http", "http://rm.example/", &keys) else {
            panic!("{keys} was taken")
        };
        assert!(error.to_string().contains(word), "{keys}: {error}");
    }
}
