//! Answers of a real policy.

use model::{Pack, Target, ThreadPool};
use serde_json::{Value, json};

use crate::Endpoint;

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
}

/// What the trainer computes for `completion` after `prompt`.
fn scored(endpoint: &Endpoint, prompt: &[u32], completion: &[u32], temperature: f32) -> Vec<f32> {
    let whole = [prompt, completion].concat();
    let mut pack = Pack::new();
    pack.push(&whole).unwrap();
    let rows: Vec<usize> = (prompt.len() - 1..whole.len() - 1).collect();
    let targets: Vec<Target<'_>> =
        rows.iter().map(|row| Target { token: whole[row + 1], temperature, kept: None }).collect();
    let predictions = endpoint.model.decoder().score(&pack, &rows, &targets, &ThreadPool::single()).unwrap();
    predictions.iter().map(|prediction| prediction.logprob).collect()
}

#[test]
fn log_probabilities_are_those_of_the_trainer_bit_for_bit() {
    let endpoint = Endpoint::new();
    for (temperature, n) in [(1.0, 4), (0.7, 2)] {
        let asked = json!({"model": "tiny", "prompt": [[30, 31, 32, 33], [40, 41]], "n": n, "max_tokens": 40,
            "temperature": temperature, "logprobs": 0, "return_token_ids": true, "seed": 5});
        let body = endpoint.post("/v1/completions", &asked).ok();
        for choice in body["choices"].as_array().unwrap() {
            let (prompt, completion) = (ids(&choice["prompt_token_ids"]), ids(&choice["token_ids"]));
            let sent = numbers(&choice["logprobs"]["token_logprobs"]);
            assert_eq!(sent, scored(&endpoint, &prompt, &completion, temperature as f32));
            let end = completion.len();
            assert_eq!(choice["weight_versions"], json!([{"version": "7", "start": 0, "end": end}]));
        }
        let streamed = endpoint.post_with("/v1/completions", &asked, &json!({"stream": true})).chunks();
        for index in 0..2 * n {
            let of =
                streamed.iter().map(|chunk| &chunk["choices"][0]).filter(|choice| choice["index"] == index);
            let sent: Vec<f32> =
                of.flat_map(|choice| numbers(&choice["logprobs"]["token_logprobs"])).collect();
            assert_eq!(sent, numbers(&body["choices"][index]["logprobs"]["token_logprobs"]));
        }
    }
    endpoint.wait_until_idle();
}

#[test]
fn a_seed_and_an_index_determine_a_choice() {
    let endpoint = Endpoint::new();
    let asked = |seed: i64, n: usize| {
        let body =
            json!({"token_ids": [30, 31], "sampling_params": {"max_tokens": 20, "seed": seed, "n": n}});
        let body = endpoint.post("/inference/v1/generate", &body).ok();
        body["choices"].as_array().unwrap().iter().map(|choice| ids(&choice["token_ids"])).collect::<Vec<_>>()
    };
    let three = asked(1, 3);
    assert_eq!((&three, &three[..1]), (&asked(1, 3), &asked(1, 1)[..]));
    assert_ne!(three[0], three[1]);
    assert_ne!(three[0], asked(2, 1)[0]);
}

#[test]
fn stop_rules_of_a_request_end_its_answer() {
    let endpoint = Endpoint::new();
    let asked = |more: Value| {
        let plain = json!({"model": "tiny", "prompt": [30, 31], "max_tokens": 40, "seed": 9, "ignore_eos": true,
            "return_token_ids": true});
        endpoint.post_with("/v1/completions", &plain, &more).ok()["choices"][0].clone()
    };
    let plain = asked(json!({}));
    assert_eq!((&plain["finish_reason"], ids(&plain["token_ids"]).len()), (&json!("length"), 40));
    let text = plain["text"].as_str().unwrap();
    let stop = &text[5..8];
    let stopped = asked(json!({"stop": [stop]}));
    assert_eq!((&stopped["finish_reason"], &stopped["stop_reason"]), (&json!("stop"), &json!(stop)));
    assert_eq!(stopped["text"].as_str().unwrap(), &text[..text.find(stop).unwrap()]);
    let token = ids(&plain["token_ids"])[4];
    let stopped = asked(json!({"stop_token_ids": [token]}));
    assert_eq!((&stopped["finish_reason"], &stopped["stop_reason"]), (&json!("stop"), &json!(token)));
    assert!(ids(&plain["token_ids"]).starts_with(&ids(&stopped["token_ids"])));
    assert_eq!(ids(&stopped["token_ids"]).last(), Some(&token));
    // A stream sends nothing of the stop string.
    let stream = json!({"model": "tiny", "prompt": [30, 31], "max_tokens": 40, "seed": 9, "ignore_eos": true,
        "stop": [stop], "stream": true});
    let chunks = endpoint.post("/v1/completions", &stream).chunks();
    let sent: String = chunks.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(sent, text[..text.find(stop).unwrap()]);
}

#[test]
fn the_most_likely_tokens_are_reported() {
    let endpoint = Endpoint::new();
    let asked = json!({"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 10,
        "logprobs": true, "top_logprobs": 5, "temperature": 0});
    let body = endpoint.post("/v1/chat/completions", &asked).ok();
    for entry in body["choices"][0]["logprobs"]["content"].as_array().unwrap() {
        let top = entry["top_logprobs"].as_array().unwrap();
        assert_eq!(
            (top.len(), &top[0]["logprob"]),
            (5, &entry["logprob"]),
            "a greedy choice is the likeliest"
        );
        assert!(entry["logprob"].as_f64().unwrap() < 0.0);
    }
    let again = endpoint.post("/v1/chat/completions", &asked).ok();
    assert_eq!(again["choices"][0]["message"], body["choices"][0]["message"]);
}

#[test]
fn the_next_turn_of_a_conversation_prefills_what_is_new() {
    let endpoint = Endpoint::new();
    let turn = |prompt: &[u32]| {
        let asked = json!({"token_ids": prompt, "sampling_params": {"max_tokens": 60, "ignore_eos": true}});
        ids(&endpoint.post("/inference/v1/generate", &asked).ok()["choices"][0]["token_ids"])
    };
    let mut prompt: Vec<u32> = (0..200).map(|n| 4 + n % 90).collect();
    for _ in 0..3 {
        let completion = turn(&prompt);
        prompt.extend(completion);
        prompt.extend([50, 51, 52]);
    }
    endpoint.wait_until_idle();
    let hits = endpoint.metric("vllm:prefix_cache_hits_total");
    // All but the newest token of the turn before.
    assert_eq!(hits, f64::from(200 + 59 + 200 + 60 + 3 + 59));
}
