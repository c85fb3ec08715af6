//! What every protocol reads and writes.

use endpoint::{ChatRenderer, Conversation, EndpointLimits};
use model::ChatMessage;
use serde_json::{Value, json};

use crate::client::hello;
use crate::{Endpoint, Model};

const CALL: &str = r#"<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>"#;

fn add() -> Value {
    json!({"name": "add", "description": "adds", "parameters": {"type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}})
}

fn text_of(chunks: &[Value]) -> String {
    let text = |chunk: &Value| chunk["choices"][0]["delta"]["content"].as_str().map(str::to_owned);
    chunks.iter().filter_map(text).collect()
}

#[test]
fn a_chat_completion_has_the_fields_of_vllm() {
    let (endpoint, _) = Endpoint::saying("It is 5.");
    let asked = json!({"logprobs": true, "top_logprobs": 0, "return_token_ids": true});
    let body = endpoint.post_with("/v1/chat/completions", &hello(), &asked).ok();
    let choice = &body["choices"][0];
    assert_eq!((&body["object"], &body["model"]), (&json!("chat.completion"), &json!("tiny")));
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(choice["message"]["content"], "It is 5.");
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &Value::Null));
    let (ids, content) = (choice["token_ids"].as_array().unwrap(), &choice["logprobs"]["content"]);
    assert_eq!(ids.len(), content.as_array().unwrap().len(), "the end of text included");
    assert_eq!((&content[0]["token"], &content[0]["logprob"]), (&json!("I"), &json!(-0.25)));
    assert_eq!(content[0]["bytes"], json!([73]));
    let spans =
        json!([{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": ids.len()}]);
    assert_eq!(choice["weight_versions"], spans);
    let prompt = body["prompt_token_ids"].as_array().unwrap().len();
    let usage = &body["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(prompt), &json!(ids.len())));
    let plain = endpoint.post("/chat/completions", &hello()).ok();
    assert_eq!(plain["choices"][0]["logprobs"], Value::Null);
    assert!(plain.get("prompt_token_ids").is_none() && plain["choices"][0].get("token_ids").is_none());
}

#[test]
fn a_stream_of_chat_has_the_same_tokens() {
    let (endpoint, _) = Endpoint::saying("It is 5.");
    let asked = json!({"logprobs": true, "return_token_ids": true});
    let whole = endpoint.post_with("/v1/chat/completions", &hello(), &asked).ok();
    let stream = json!({"logprobs": true, "return_token_ids": true, "stream": true,
        "stream_options": {"include_usage": true}});
    let chunks = endpoint.post_with("/v1/chat/completions", &hello(), &stream).chunks();
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert_eq!(chunks[0]["prompt_token_ids"], whole["prompt_token_ids"]);
    assert_eq!(text_of(&chunks), "It is 5.");
    let all = |key: &str| -> Vec<Value> {
        let list = |chunk: &Value| match key {
            "token_ids" => chunk["choices"][0]["token_ids"].as_array().cloned(),
            _ => chunk["choices"][0]["logprobs"]["content"].as_array().cloned(),
        };
        chunks.iter().filter_map(list).flatten().collect()
    };
    assert_eq!(json!(all("token_ids")), whole["choices"][0]["token_ids"]);
    assert_eq!(json!(all("logprobs")), whole["choices"][0]["logprobs"]["content"]);
    let last = &chunks[chunks.len() - 2]["choices"][0];
    assert_eq!(last["finish_reason"], "stop");
    assert_eq!(last["weight_versions"], whole["choices"][0]["weight_versions"]);
    let usage = chunks.last().unwrap();
    assert_eq!((&usage["choices"], &usage["usage"]), (&json!([]), &whole["usage"]));
}

#[test]
fn calls_of_tools_are_read_in_every_protocol() {
    let said = format!("I add.\n{CALL}");
    let (endpoint, _) = Endpoint::saying(&said);
    let chat = json!({"tools": [{"type": "function", "function": add()}]});
    let whole = endpoint.post_with("/v1/chat/completions", &hello(), &chat).ok();
    let choice = &whole["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["content"]),
        (&json!("tool_calls"), &json!("I add."))
    );
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(call["function"], json!({"name": "add", "arguments": "{\"a\":2,\"b\":3}"}));
    let streamed = json!({"tools": chat["tools"], "stream": true});
    let chunks = endpoint.post_with("/v1/chat/completions", &hello(), &streamed).chunks();
    assert_eq!(text_of(&chunks), "I add.");
    let last = &chunks.last().unwrap()["choices"][0];
    assert_eq!(last["finish_reason"], "tool_calls");
    assert_eq!(last["delta"]["tool_calls"][0]["function"], call["function"]);
    assert_eq!(last["delta"]["tool_calls"][0]["index"], 0);

    let mut flat = add();
    flat["type"] = "function".into();
    let response = json!({"model": "tiny", "input": "hello", "tools": [flat]});
    let body = endpoint.post("/v1/responses", &response).ok();
    assert_eq!(
        (&body["status"], &body["output"][0]["content"][0]["text"]),
        (&json!("completed"), &json!("I add."))
    );
    assert_eq!(
        (&body["output"][1]["type"], &body["output"][1]["name"]),
        (&json!("function_call"), &json!("add"))
    );
    assert_eq!(body["output"][1]["arguments"], "{\"a\":2,\"b\":3}");

    let schema = add()["parameters"].clone();
    let anthropic = json!({"model": "tiny", "max_tokens": 99, "messages": [{"role": "user", "content": "hello"}],
        "tools": [{"name": "add", "description": "adds", "input_schema": schema}]});
    let body = endpoint.post("/v1/messages", &anthropic).ok();
    assert_eq!((&body["stop_reason"], &body["content"][0]["text"]), (&json!("tool_use"), &json!("I add.")));
    assert_eq!(body["content"][1]["input"], json!({"a": 2, "b": 3}));
    let events = endpoint.post_with("/v1/messages", &anthropic, &json!({"stream": true})).events();
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!((names[0], *names.last().unwrap()), ("message_start", "message_stop"));
    let partial = events.iter().find(|(_, event)| event["delta"]["type"] == "input_json_delta").unwrap();
    assert_eq!(partial.1["delta"]["partial_json"], "{\"a\":2,\"b\":3}");
    let delta = events.iter().find(|(name, _)| name == "message_delta").unwrap();
    assert_eq!(delta.1["delta"]["stop_reason"], "tool_use");
    // Without tools the same text is text.
    let body = endpoint.post("/v1/chat/completions", &hello()).ok();
    assert_eq!(body["choices"][0]["message"]["content"], said);
}

#[test]
fn a_response_streams_to_the_response_that_it_would_be() {
    let (endpoint, _) = Endpoint::saying("Yes, it is.");
    let asked = json!({"model": "tiny", "input": [{"role": "user", "content": "is it?"}], "instructions": "be brief",
        "max_output_tokens": 50, "include": ["message.output_text.logprobs"], "store": false});
    let whole = endpoint.post("/v1/responses", &asked).ok();
    let events = endpoint.post_with("/v1/responses", &asked, &json!({"stream": true})).events();
    for (n, (name, event)) in events.iter().enumerate() {
        assert_eq!((&event["type"], &event["sequence_number"]), (&json!(name), &json!(n)));
    }
    let text: String = events
        .iter()
        .filter(|(name, _)| name == "response.output_text.delta")
        .map(|(_, event)| event["delta"].as_str().unwrap())
        .collect();
    assert_eq!(text, "Yes, it is.");
    let (name, last) = events.last().unwrap();
    assert_eq!(name, "response.completed");
    let response = &last["response"];
    assert_eq!(response["output"][0]["content"], whole["output"][0]["content"]);
    assert_eq!((&response["usage"], &response["status"]), (&whole["usage"], &whole["status"]));
    assert!(!whole["output"][0]["content"][0]["logprobs"].as_array().unwrap().is_empty());
    let mut done: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    done.dedup();
    assert_eq!(
        done,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed"
        ]
    );
}

#[test]
fn a_message_of_anthropic_counts_and_streams_as_it_says() {
    let (endpoint, submitted) = Endpoint::saying("Good morning.");
    let asked = json!({"model": "tiny", "max_tokens": 30, "system": [{"type": "text", "text": "be kind"}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]});
    let body = endpoint.post("/v1/messages", &asked).ok();
    assert_eq!((&body["type"], &body["stop_reason"]), (&json!("message"), &json!("end_turn")));
    assert_eq!(body["content"], json!([{"type": "text", "text": "Good morning."}]));
    let count = endpoint.post("/v1/messages/count_tokens", &asked).ok();
    assert_eq!(count["input_tokens"], body["usage"]["input_tokens"]);
    assert_eq!(submitted.load(std::sync::atomic::Ordering::Relaxed), 1, "counting samples nothing");
    let events = endpoint.post_with("/v1/messages", &asked, &json!({"stream": true})).events();
    let text = events.iter().filter_map(|(_, event)| event["delta"]["text"].as_str()).collect::<String>();
    assert_eq!(text, "Good morning.");
    assert_eq!(events[0].1["message"]["usage"]["input_tokens"], body["usage"]["input_tokens"]);
    let mut names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    names.dedup();
    let expected = [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
    ];
    assert_eq!((&names[..5], names[5]), (&expected[..], "message_stop"));
    // The same conversation in OpenAI's form has the same tokens.
    let chat = json!({"model": "tiny", "return_token_ids": true, "messages": [
        {"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]});
    let prompt =
        endpoint.post("/v1/chat/completions", &chat).ok()["prompt_token_ids"].as_array().unwrap().len();
    assert_eq!(count["input_tokens"], prompt);
}

#[test]
fn a_message_is_continued_where_it_ends() {
    let renderer = ChatRenderer::new(Model::new().directory);
    for content in ["s", "eos", "it is", "it is ", ""] {
        let message = |role: &str, content: &str| ChatMessage {
            role: role.to_owned(),
            content: content.to_owned(),
            ..ChatMessage::default()
        };
        let conversation = Conversation {
            messages: vec![message("user", "q"), message("assistant", content)],
            continue_final_message: true,
            ..Conversation::default()
        };
        let expected = format!("[user]q<eos>[assistant]{content}");
        assert_eq!(renderer.render(conversation).unwrap(), expected);
    }
}

#[test]
fn a_conversation_with_calls_is_the_same_in_every_protocol() {
    let (endpoint, _) = Endpoint::saying("x");
    let arguments = "{\"a\":2,\"b\":3}";
    let chat = json!({"messages": [{"role": "user", "content": "q"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "5"}]});
    let tokens = endpoint.post("/tokenize", &chat).ok();
    let text = endpoint.post("/detokenize", &json!({"tokens": tokens["tokens"]})).ok()["prompt"].clone();
    let expected = "[user]q<eos>[assistant]<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 2, \"b\": 3}}</tool_call><eos>\
                    [tool]5<eos>[assistant]";
    assert_eq!(text, expected);
    let anthropic = json!({"messages": [{"role": "user", "content": "q"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 2, "b": 3}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "5"}]}]});
    let count = endpoint.post("/v1/messages/count_tokens", &anthropic).ok();
    assert_eq!(count["input_tokens"], tokens["count"]);
    let response = json!({"model": "tiny", "input": [{"role": "user", "content": "q"},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c1", "output": "5"}]});
    let usage = endpoint.post("/v1/responses", &response).ok()["usage"].clone();
    assert_eq!(usage["input_tokens"], tokens["count"]);
}

#[test]
fn token_ids_and_texts_are_answered_in_the_form_of_sglang() {
    let (endpoint, _) = Endpoint::saying("It is 5.");
    let sampling = json!({"max_new_tokens": 32, "temperature": 1.0, "top_k": -1, "stop": null, "no_stop_trim": true,
        "skip_special_tokens": false, "spaces_between_special_tokens": false});
    let asked =
        json!({"input_ids": [5, 6, 7], "sampling_params": sampling, "return_logprob": true, "rid": "r"});
    let body = endpoint.post("/generate", &asked).ok();
    let (ids, meta) = (body["output_ids"].as_array().unwrap(), &body["meta_info"]);
    let entries = meta["output_token_logprobs"].as_array().unwrap();
    assert_eq!(entries.iter().map(|entry| &entry[1]).collect::<Vec<_>>(), ids.iter().collect::<Vec<_>>());
    assert_eq!(entries[0], json!([-0.25, ids[0], null]));
    assert_eq!(
        (&meta["id"], &meta["prompt_tokens"], &meta["weight_version"]),
        (&json!("r"), &json!(3), &json!("5"))
    );
    assert_eq!(meta["finish_reason"], json!({"type": "stop", "matched": ids.last()}));
    let text = body["text"].as_str().unwrap();
    assert!(text.starts_with("It is 5.") && text.len() > 8, "the stop token is part of it: {text:?}");
    // As a text, and with the defaults of SGLang: the stop token is left out.
    let plain = endpoint.post("/generate", &json!({"text": "a", "sampling_params": {"n": 2}})).ok();
    let texts: Vec<&Value> = plain.as_array().unwrap().iter().map(|answer| &answer["text"]).collect();
    assert_eq!(texts, ["It is 5."; 2]);
    assert!(plain[0]["meta_info"].get("output_token_logprobs").is_none());
    let listed = endpoint.post("/generate", &json!({"text": ["a"]})).ok();
    assert_eq!(listed.as_array().unwrap().len(), 1);
    for (wrong, name) in [
        (json!({"sampling_params": {}}), "text"),
        (json!({"text": "a", "stream": true}), "stream"),
        (json!({"text": "a", "sampling_params": {"max_new_tokens": 0}}), "sampling_params.max_new_tokens"),
        (json!({"text": "a", "sampling_params": {"typo": 1}}), "sampling_params.typo"),
    ] {
        let refused = endpoint.post("/generate", &wrong);
        assert_eq!(refused.status, 400, "{wrong}");
        assert!(refused.text.contains(name), "{}", refused.text);
    }
}

#[test]
fn ids_go_in_and_out_without_text() {
    let (endpoint, _) = Endpoint::saying("ab");
    let asked = json!({"model": "tiny", "token_ids": [20, 21, 22], "return_token_ids": true,
        "sampling_params": {"max_tokens": 9, "logprobs": 0, "n": 2}});
    let body = endpoint.post("/inference/v1/generate", &asked).ok();
    assert_eq!((&body["prompt_token_ids"], &body["output_mode"]), (&json!([20, 21, 22]), &json!("tokens")));
    let choices = body["choices"].as_array().unwrap();
    assert_eq!((choices.len(), choices[1]["index"].as_u64()), (2, Some(1)));
    assert_eq!(choices[0]["logprobs"]["content"][0]["token_id"], choices[0]["token_ids"][0]);
    assert_eq!(choices[0]["weight_versions"][0], json!({"version": "4", "start": 0, "end": 1}));
    assert!(choices[0].get("text").is_none());

    let given = json!({"input_ids": [20, 21, 22], "return_token_ids": true, "messages": null});
    let chat = endpoint.post_with("/v1/chat/completions", &hello(), &given).ok();
    assert_eq!(chat["prompt_token_ids"], json!([20, 21, 22]));

    let lists = json!({"model": "tiny", "prompt": [[20, 21], [22]], "n": 2, "max_tokens": 9, "logprobs": 0,
        "return_token_ids": true, "return_tokens_as_token_ids": true});
    let body = endpoint.post("/v1/completions", &lists).ok();
    let prompts: Vec<&Value> =
        body["choices"].as_array().unwrap().iter().map(|c| &c["prompt_token_ids"]).collect();
    assert_eq!(prompts, [&json!([20, 21]), &json!([20, 21]), &json!([22]), &json!([22])]);
    let logprobs = &body["choices"][0]["logprobs"];
    assert!(logprobs["tokens"][0].as_str().unwrap().starts_with("token_id:"));
    assert_eq!(logprobs["token_logprobs"][0], -0.25);
    assert_eq!(body["usage"]["prompt_tokens"], 3);
    let chunks = endpoint.post_with("/v1/completions", &lists, &json!({"stream": true})).chunks();
    for index in 0..4 {
        let of = chunks.iter().filter(|chunk| chunk["choices"][0]["index"] == index);
        let ids: Vec<Value> = of
            .clone()
            .flat_map(|chunk| chunk["choices"][0]["token_ids"].as_array().unwrap().clone())
            .collect();
        assert_eq!(json!(ids), body["choices"][index]["token_ids"]);
        let prompt = of.clone().find_map(|chunk| chunk["choices"][0].get("prompt_token_ids")).unwrap();
        assert_eq!(*prompt, body["choices"][index]["prompt_token_ids"]);
    }
    let text = endpoint.post("/v1/completions", &json!({"prompt": "hello", "return_token_ids": true})).ok();
    assert_eq!((&text["choices"][0]["text"], &text["object"]), (&json!("ab"), &json!("text_completion")));
}

#[test]
fn routes_without_sampling_describe_the_model() {
    let (endpoint, _) = Endpoint::saying("x");
    let models = endpoint.get("/v1/models").ok();
    let model = &models["data"][0];
    assert_eq!((&model["id"], &model["max_model_len"]), (&json!("tiny"), &json!(1024)));
    assert_eq!(endpoint.get("/v1/models/tiny").ok()["id"], "tiny");
    assert_eq!(endpoint.get("/v1/models/other").status, 404);
    let tokens = endpoint.post("/tokenize", &json!({"prompt": "ab", "return_token_strs": true})).ok();
    assert_eq!((&tokens["count"], &tokens["token_strs"]), (&json!(2), &json!(["a", "b"])));
    for path in ["/health", "/ping"] {
        assert_eq!((endpoint.get(path).status, endpoint.get(path).text), (200, String::new()));
    }
    assert_eq!(endpoint.get("/version").ok()["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(endpoint.get("/load").ok()["server_load"], 0);
    assert_eq!(endpoint.metric("vllm:num_requests_running"), 0.0);
    assert_eq!(endpoint.get("/nowhere").json()["error"]["type"], "NotFoundError");
}

#[test]
fn errors_name_their_field_and_status() {
    let (endpoint, submitted) = Endpoint::saying("x");
    let chat = "/v1/chat/completions";
    let long = "x".repeat(2000);
    let cases = [
        (chat, json!({"model": "other"}), 404, "NotFoundError", "model"),
        (chat, json!({"messages": null}), 400, "Bad Request", "body.messages"),
        (chat, json!({"messages": []}), 400, "BadRequestError", "messages"),
        (
            chat,
            json!({"messages": [{"role": "user", "content": long}]}),
            400,
            "BadRequestError",
            "max_tokens",
        ),
        (chat, json!({"max_tokens": 2000}), 400, "BadRequestError", "max_tokens"),
        (chat, json!({"max_completion_tokens": 2000}), 400, "BadRequestError", "max_completion_tokens"),
        (chat, json!({"input_ids": [1, 100]}), 400, "BadRequestError", "prompt"),
        (chat, json!({"stop_token_ids": [100]}), 400, "BadRequestError", "stop_token_ids"),
        (
            chat,
            json!({"response_format": {"type": "json_object"}}),
            400,
            "BadRequestError",
            "response_format",
        ),
        (chat, json!({"top_logprobs": 3}), 400, "BadRequestError", "top_logprobs"),
        (chat, json!({"logprobs": true, "top_logprobs": 21}), 400, "BadRequestError", "top_logprobs"),
        (chat, json!({"nonsense": 1}), 400, "BadRequestError", "nonsense"),
        (chat, json!({"n": 1000}), 400, "BadRequestError", "n"),
        (
            chat,
            json!({"chat_template_kwargs": {"messages": []}}),
            400,
            "BadRequestError",
            "chat_template_kwargs",
        ),
        (
            chat,
            json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
            400,
            "BadRequestError",
            "messages[0].content",
        ),
    ];
    for (path, change, status, kind, param) in cases {
        let reply = endpoint.post_with(path, &hello(), &change);
        let error = &reply.json()["error"];
        assert_eq!(
            (reply.status, error["code"].as_u64()),
            (status, Some(u64::from(status))),
            "{change}: {reply:?}"
        );
        assert_eq!((&error["type"], &error["param"]), (&json!(kind), &json!(param)), "{change}: {reply:?}");
    }
    assert_eq!(submitted.load(std::sync::atomic::Ordering::Relaxed), 0, "nothing of it was sampled");
}

#[test]
fn errors_have_the_form_of_their_protocol() {
    let (endpoint, submitted) = Endpoint::saying("x");
    let chat = "/v1/chat/completions";
    assert_eq!(endpoint.request("POST", chat, &[], "{").status, 400);
    assert_eq!(endpoint.request("POST", chat, &[], "[]").status, 400);
    assert_eq!(endpoint.get(chat).status, 405);
    errors_of_other_protocols(&endpoint);
    assert_eq!(submitted.load(std::sync::atomic::Ordering::Relaxed), 0, "nothing of it was sampled");
}

fn errors_of_other_protocols(endpoint: &Endpoint) {
    let anthropic = endpoint.post("/v1/messages", &json!({"model": "tiny", "messages": []}));
    assert_eq!(
        (anthropic.status, &anthropic.json()["error"]["type"]),
        (400, &json!("invalid_request_error"))
    );
    let anthropic =
        endpoint.post("/v1/messages", &json!({"model": "claude", "max_tokens": 1, "messages": []}));
    assert_eq!((anthropic.status, &anthropic.json()["error"]["type"]), (404, &json!("not_found_error")));
    assert_eq!(endpoint.post("/v1/completions", &json!({"prompt": [1, 100]})).status, 400);
    assert_eq!(endpoint.post("/inference/v1/generate", &json!({"token_ids": []})).status, 400);
    assert_eq!(endpoint.post("/detokenize", &json!({"tokens": [100]})).status, 400);
    let state = json!({"model": "tiny", "input": "x", "previous_response_id": "resp_1"});
    assert_eq!(endpoint.post("/v1/responses", &state).json()["error"]["param"], "previous_response_id");
}

#[test]
fn log_probabilities_that_are_none_are_not_sent() {
    for wrong in [f32::NAN, f32::INFINITY, 0.5] {
        let (endpoint, _) = Endpoint::saying_with("x", wrong);
        let reply = endpoint.post("/v1/chat/completions", &hello());
        assert_eq!(reply.status, 500, "{wrong}");
    }
}

#[test]
fn a_key_is_needed_where_there_is_one() {
    let endpoint = Endpoint::limited(EndpointLimits::default(), Some("secret"));
    let body = hello().to_string();
    let chat = "/v1/chat/completions";
    for headers in
        [[("authorization", "Bearer secret")], [("x-api-key", "secret")], [("x-goog-api-key", "secret")]]
    {
        assert_eq!(endpoint.request("POST", chat, &headers, &body).status, 200, "{headers:?}");
    }
    for headers in
        [&[][..], &[("authorization", "Bearer wrong")], &[("authorization", "secret")], &[("x-api-key", "")]]
    {
        let reply = endpoint.request("POST", chat, headers, &body);
        assert_eq!((reply.status, &reply.json()["error"]["type"]), (401, &json!("AuthenticationError")));
        assert_eq!(endpoint.request("GET", "/v1/models", headers, "").status, 401);
    }
    let anthropic = endpoint.request("POST", "/v1/messages", &[], "{}");
    assert_eq!(anthropic.json()["error"]["type"], "authentication_error");
    assert_eq!(endpoint.get("/health").status, 200);
}
