//! Repeated requests.

use std::sync::atomic::Ordering;

use serde_json::json;

use crate::Endpoint;
use crate::client::hello;

const CHAT: &str = "/v1/chat/completions";
const RETRY: (&str, &str) = ("x-stainless-retry-count", "1");

#[test]
fn a_repeated_request_gets_the_first_answer() {
    let (endpoint, submitted) = Endpoint::saying("hi");
    let count = || submitted.load(Ordering::Relaxed);
    for (n, body) in [hello(), json!({"model": "tiny", "stream": true, "messages": hello()["messages"]})]
        .iter()
        .enumerate()
    {
        let body = body.to_string();
        let first = endpoint.request("POST", CHAT, &[("x-stainless-retry-count", "0")], &body);
        let again = endpoint.request("POST", CHAT, &[RETRY], &body);
        assert_eq!((again.status, &again.text), (200, &first.text));
        assert_eq!(again.header("content-type"), first.header("content-type"));
        assert_eq!(count(), 2 * n + 1, "it was sampled once");
        // An equal request that is no repetition wants a sample of its own.
        let other = endpoint.request("POST", CHAT, &[], &body);
        assert_ne!(other.text, first.text, "the id differs");
        assert_eq!(count(), 2 * n + 2);
    }
    assert_eq!(endpoint.metric("rlrun:requests_replayed_total"), 2.0);
    // The same route without /v1 is the same request; neither another body nor another key is.
    let different = hello().to_string().replace("hello", "other");
    endpoint.request("POST", CHAT, &[RETRY], &different);
    endpoint.request("POST", CHAT, &[RETRY, ("x-api-key", "other")], &hello().to_string());
    endpoint.request("POST", "/chat/completions", &[RETRY], &hello().to_string());
    assert_eq!(count(), 6);
}

#[test]
fn an_idempotency_key_names_a_request() {
    let (endpoint, submitted) = Endpoint::saying("hi");
    let key = [("idempotency-key", "one")];
    let first = endpoint.request("POST", CHAT, &key, &hello().to_string());
    let again = endpoint.request("POST", CHAT, &key, &hello().to_string());
    assert_eq!(first.text, again.text);
    assert_eq!(submitted.load(Ordering::Relaxed), 1);
    endpoint.request("POST", CHAT, &[("idempotency-key", "two")], &hello().to_string());
    assert_eq!(submitted.load(Ordering::Relaxed), 2);
}

#[test]
fn a_repetition_joins_the_answer_in_flight() {
    let endpoint = Endpoint::new();
    let body =
        json!({"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 900, "ignore_eos": true}).to_string();
    let first = endpoint.send("POST", "/v1/completions", &[], &body);
    while endpoint.service.queue().status().running == 0 {
        std::thread::yield_now();
    }
    let again = endpoint.request("POST", "/v1/completions", &[RETRY], &body);
    let first = crate::client::read(first);
    assert_eq!((again.status, &again.text), (200, &first.text));
    assert_eq!(endpoint.metric("vllm:request_success_total"), 1.0);
    endpoint.wait_until_idle();
}

#[test]
fn a_repetition_of_a_failed_request_is_a_request() {
    let endpoint = Endpoint::new();
    let body = json!({"model": "tiny", "prompt": [5], "max_tokens": 5000}).to_string();
    for headers in [&[][..], &[RETRY]] {
        assert_eq!(endpoint.request("POST", "/v1/completions", headers, &body).status, 400);
    }
    assert_eq!(endpoint.metric("rlrun:requests_replayed_total"), 0.0);
}
