//! Calls in the texts of model families. The texts are those of the model cards, and of vLLM's parsers for the same names.

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn weather() -> ToolSchema {
    ToolSchema {
        name: "weather".to_owned(),
        description: "the weather of a city".to_owned(),
        parameters: json!({"type": "object", "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": ["string", "null"]},
        }, "required": ["city"]}),
    }
}

fn call(arguments: Value) -> ToolCall {
    let Value::Object(arguments) = arguments else { panic!("{arguments} is no object") };
    ToolCall { name: "weather".to_owned(), arguments, id: None }
}

fn parsed(format: ToolCallFormat, text: &str) -> Vec<Result<ToolCall, String>> {
    let calls = format.parse(text, &[weather()]).into_iter();
    calls.map(|call| call.map_err(|bad| bad.to_string())).collect()
}

#[test]
fn every_family_writes_the_same_calls() {
    let berlin = call(json!({"city": "Berlin", "days": 2}));
    let bonn = call(json!({"city": "Bonn"}));
    let texts = [
        (
            ToolCallFormat::Hermes,
            "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Berlin\", \"days\": 2}}\n</tool_call>\n\
             <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn\"}}\n</tool_call>",
        ),
        (
            ToolCallFormat::Qwen3Coder,
            "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nBerlin\n</parameter>\n<parameter=days>\n2\n\
             </parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n\
             </function>\n</tool_call>",
        ),
        (
            ToolCallFormat::Llama3,
            "<|python_tag|>{\"name\": \"weather\", \"parameters\": {\"city\": \"Berlin\", \"days\": 2}}; \
             {\"name\": \"weather\", \"parameters\": {\"city\": \"Bonn\"}}",
        ),
        (
            ToolCallFormat::Mistral,
            "[TOOL_CALLS][{\"name\": \"weather\", \"arguments\": {\"city\": \"Berlin\", \"days\": 2}}, \
             {\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn\"}}]",
        ),
        (
            ToolCallFormat::Mistral,
            "[TOOL_CALLS]weather[ARGS]{\"city\": \"Berlin\", \"days\": 2}[TOOL_CALLS]weather{\"city\": \"Bonn\"}",
        ),
    ];
    for (format, text) in texts {
        assert_eq!(parsed(format, text), [Ok(berlin.clone()), Ok(bonn.clone())], "{format:?}");
        assert_eq!(parsed(format, "The weather is {fine}; [really]."), [], "{format:?}");
    }
    let text = "I call {this}: ```json\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn\"}}\n```";
    assert_eq!(parsed(ToolCallFormat::Json, text), [Ok(bonn)]);
}

#[test]
fn markers_that_are_special_tokens_may_be_missing() {
    let text = "{\"name\": \"weather\", \"parameters\": {\"city\": \"Bonn\"}}";
    assert_eq!(parsed(ToolCallFormat::Llama3, text), [Ok(call(json!({"city": "Bonn"})))]);
    assert_eq!(parsed(ToolCallFormat::Llama3, "{\"temperature\": 3}"), [], "an answer in JSON");
    let text = "[{\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn\"}, \"id\": \"abc123def\"}]";
    let with_id = ToolCall { id: Some("abc123def".to_owned()), ..call(json!({"city": "Bonn"})) };
    assert_eq!(parsed(ToolCallFormat::Mistral, text), [Ok(with_id)]);
    let open = "<tool_call>{\"name\": \"weather\", \"arguments\": \"{\\\"city\\\": \\\"Bonn\\\"}\"}";
    let bonn = call(json!({"city": "Bonn"}));
    assert_eq!(
        parsed(ToolCallFormat::Hermes, open),
        [Ok(bonn)],
        "arguments as text, and a stop string at the end"
    );
}

#[test]
fn a_bad_call_says_what_is_wrong() {
    let reasons = [
        (ToolCallFormat::Hermes, "<tool_call>{\"name\": \"weather\",</tool_call>", "not valid JSON (EOF"),
        (ToolCallFormat::Hermes, "<tool_call>[1]</tool_call>", "a JSON object, not a list"),
        (ToolCallFormat::Hermes, "<tool_call>{\"arguments\": {}}</tool_call>", "needs the name"),
        (ToolCallFormat::Hermes, "<tool_call>{\"name\": \"w\", \"arguments\": 3}</tool_call>", "is a number"),
        (ToolCallFormat::Llama3, "{\"name\": \"weather\", \"parameters\": {", "not valid JSON"),
        (ToolCallFormat::Mistral, "[TOOL_CALLS][{\"name\": ", "list of tool calls is not valid JSON"),
        (
            ToolCallFormat::Mistral,
            "[TOOL_CALLS]weather[ARGS]{\"city\"",
            "arguments of weather are not valid JSON",
        ),
        (ToolCallFormat::Qwen3Coder, "<tool_call>weather</tool_call>", "names no function"),
        (ToolCallFormat::Json, "{\"name\": \"weather\", \"arguments\": {", "not valid JSON"),
    ];
    for (format, text, reason) in reasons {
        let found = parsed(format, text);
        let [Err(bad)] = &found[..] else { panic!("{text}: {found:?}") };
        assert!(bad.contains(reason), "{text}: {bad}");
    }
    let checked = |arguments| weather().check(&call(arguments)).map_err(|bad| bad.to_string());
    assert_eq!(checked(json!({"city": "Bonn", "days": 2.0, "units": null, "more": 1})), Ok(()));
    assert!(checked(json!({"days": 1})).unwrap_err().contains("lacks the argument \"city\""));
    assert!(checked(json!({"city": "x", "days": 1.5})).unwrap_err().contains("must be of type integer"));
    let lying = ToolSchema { parameters: json!({"required": 3, "properties": [1]}), ..weather() };
    assert_eq!(lying.check(&call(json!({"city": 1}))), Ok(()));
}

#[test]
fn the_form_follows_from_the_chat_template() {
    let templates = [
        ("{{- '<tool_call>\\n<function=' }}", Some(ToolCallFormat::Qwen3Coder)),
        ("return a json object within <tool_call></tool_call> XML tags", Some(ToolCallFormat::Hermes)),
        ("<tool_call>{{ name }}<arg_key>", None),
        ("{%- if builtin_tools %}<|python_tag|>", Some(ToolCallFormat::Llama3)),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", Some(ToolCallFormat::Mistral)),
        ("{{ message.content }}", None),
    ];
    for (template, format) in templates {
        assert_eq!(ToolCallFormat::of_template(template), format, "{template}");
    }
}

proptest! {
    /// No text of a model makes a parser panic, and a long one takes no longer than its length.
    #[test]
    fn every_text_is_read(pieces in prop::collection::vec(prop::sample::select(&[
        "<tool_call>", "</tool_call>", "<function=", "<parameter=", ">", "</parameter>", "{", "}", "[", "]", "\"name\"", ":", ",",
        "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", ";", "\"w\"", "\"arguments\"", "1", "\n", "\u{00e9}",
    ][..]), 0..60)) {
        let text = pieces.concat();
        for format in ToolCallFormat::ALL {
            let _ = format.parse(&text, &[weather()]);
            let _ = format.parse(&text.repeat(200), &[]);
        }
    }

    #[test]
    fn what_is_written_is_read(city in "[^<>]{0,20}", days in -9..9i64) {
        let call = call(json!({"city": city.trim_matches('\n'), "days": days}));
        for format in ToolCallFormat::ALL {
            prop_assert_eq!(parsed(format, &format.write(&call)), [Ok(call.clone())], "{:?}", format);
        }
    }
}
