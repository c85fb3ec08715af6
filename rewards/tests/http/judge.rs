//! The reward `judge` against a scripted model.
//!
//! Invariant: what is asked shows task, answer and completion; what is answered is read by the rule of the recipe.

use serde_json::{Value, json};

use crate::HttpFixture;
use crate::server::{FakeServer, ok};

fn says(reply: &str) -> FakeServer {
    let answer = json!({"choices": [{"message": {"role": "assistant", "content": reply}}]});
    FakeServer::start(move |_, _| ok(&answer))
}

fn base(server: &FakeServer) -> String {
    format!("http://127.0.0.1:{}/v1", server.port)
}

fn keys(more: &Value) -> Value {
    let mut keys = json!({"model": "judge-1"});
    for (key, value) in more.as_object().unwrap() {
        keys[key] = value.clone();
    }
    keys
}

#[test]
fn the_default_question_and_its_score() {
    let server = says("Right, but long.\n\n**Score:** 8");
    let bench = HttpFixture::open(
        "judge",
        &base(&server),
        &keys(&json!({"system": "Be fair.", "token_env": "RM_TOKEN"})),
    );
    let judged = bench.judge(&["It is 4. Score: 10"]).pop().unwrap().unwrap();
    assert_eq!(judged.value, Some(0.8));
    assert!(judged.details["reply"].as_str().unwrap().ends_with("**Score:** 8"));
    let asked = server.asked().pop().unwrap();
    assert_eq!(asked.line, "POST /v1/chat/completions HTTP/1.1");
    let body = asked.body;
    assert_eq!(
        (&body["model"], &body["temperature"], &body["max_tokens"]),
        (&json!("judge-1"), &json!(0.0), &json!(512))
    );
    assert_eq!(body["messages"][0], json!({"role": "system", "content": "Be fair."}));
    let question = body["messages"][1]["content"].as_str().unwrap();
    for part in ["2+2=", "\n4\n", "It is 4. Score: 10", "data"] {
        assert!(question.contains(part), "{part}: {question}");
    }
}

#[test]
fn rules_and_questions_of_a_recipe() {
    let template = "{prompt}|{answer}|{completion}";
    for (reply, more, expected) in [
        ("[[3]] no, [[4]]", json!({"template": template, "parse": r"\[\[(\d)\]\]", "scale": 5}), 0.8),
        ("Score: 7", json!({"template": template}), 7.0),
        ("Yes? No.\n**YES!**", json!({"template": template, "choices": {"yes": 1.0, "no": -1.0}}), 1.0),
    ] {
        let server = says(reply);
        let bench = HttpFixture::open("judge", &base(&server), &keys(&more));
        assert_eq!(bench.value("four"), Some(expected), "{reply}");
        assert_eq!(server.asked()[0].body["messages"][0]["content"], "2+2=|4|four");
    }
}

#[test]
fn a_reply_without_a_score_is_an_error_that_shows_its_end() {
    let server = says(&format!("{} I would rather not say.", "well ".repeat(500)));
    let reason = HttpFixture::open("judge", &base(&server), &keys(&json!({}))).reason("x");
    assert!(reason.ends_with("rather not say.") && reason.len() < 800, "{reason}");
    let cut =
        json!({"choices": [{"message": {"content": "Good so far. Score: 7"}, "finish_reason": "length"}]});
    let server = FakeServer::start(move |_, _| ok(&cut));
    let reason = HttpFixture::open("judge", &base(&server), &keys(&json!({"max_tokens": 9}))).reason("x");
    assert!(reason.contains("raise `max_tokens` above 9"), "{reason}");
    let reason = HttpFixture::open("judge", &base(&says("Score: 95")), &keys(&json!({}))).reason("x");
    assert!(reason.contains("95, which is not from 0 to 10"), "{reason}");
    let server = FakeServer::start(|_, _| ok(&json!({"choices": []})));
    let reason = HttpFixture::open("judge", &base(&server), &keys(&json!({}))).reason("x");
    assert!(reason.contains("{\"choices\":[]}"), "{reason}");
}

#[test]
fn invalid_keys_are_refused() {
    for (keys, word) in [
        (json!({}), "`model`"),
        (keys(&json!({"template": "{completion} {nothing}"})), "`{nothing}`"),
        (keys(&json!({"parse": "x"})), "`parse`"),
        (keys(&json!({"scale": 0})), "`scale`"),
        (keys(&json!({"temperature": -1})), "`temperature`"),
        (keys(&json!({"choices": {"a": 1}})), "`template`"),
        (keys(&json!({"choices": {}, "template": "{completion}"})), "`choices`"),
        (keys(&json!({"choices": {"a": 1}, "parse": "(a)", "template": "{completion}"})), "`choices`"),
        (keys(&json!({"dialect": "slime"})), "does not take `dialect`"),
    ] {
        let Err(error) = HttpFixture::try_open("judge", "http://judge.example", &keys) else {
            panic!("{keys} was taken")
        };
        assert!(error.to_string().contains(word), "{keys}: {error}");
    }
}
