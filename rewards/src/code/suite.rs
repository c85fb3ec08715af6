//! The tests of a task, in the forms of published data sets.
//!
//! Invariant: a suite has at least one test, and each can fail. A column that cannot be read is an error that shows it, never a
//! suite that every program passes.

use std::collections::HashSet;

use serde_json::{Map, Value};
use trajectory::Task;

/// The tests of one program.
#[derive(Clone, Debug, PartialEq)]
pub enum TestSuite {
    /// Input and expected output of a whole program.
    Streams(Vec<StreamTest>),
    /// Arguments and expected results of a function.
    Calls {
        /// Name of the function, or of a method of a class `Solution`.
        function: String,
        /// At least one.
        calls: Vec<FunctionCall>,
    },
    /// Code that fails if the program is wrong.
    Asserts {
        /// Code that runs before each test.
        setup: String,
        /// At least one.
        tests: Vec<String>,
        /// Name of the function that `check` of a test is called with, if the row has it.
        entry_point: Option<String>,
    },
}

/// One run of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamTest {
    /// Standard input.
    pub input: String,
    /// Expected standard output.
    pub output: String,
}

/// One call of a function.
#[derive(Clone, Debug, PartialEq)]
pub struct FunctionCall {
    /// Its arguments by position.
    pub arguments: Vec<Value>,
    /// The expected result.
    pub expected: Value,
    /// Whether `expected` is a list of one element that may stand for the element, as in APPS.
    pub wrapped: bool,
}

/// Longest part of unreadable input in an error, characters.
const SHOWN: usize = 120;

impl TestSuite {
    /// The tests of `task`: its column `column`, or if that is not given its column `tests`, or else its answer.
    ///
    /// # Errors
    /// There are no tests, or they have none of the forms; the text shows what was found.
    pub fn of(task: &Task, column: Option<&str>) -> Result<Self, String> {
        let columns = &task.columns;
        let found = match column {
            Some(name) => columns.get(name).cloned().ok_or_else(|| format!("there is no column `{name}`"))?,
            None => columns.get("tests").cloned().or_else(|| task.answer.clone().map(Value::String)).ok_or(
                "there is neither a column `tests` nor an answer; name the column in `tests_column`",
            )?,
        };
        let suite = Self::parse(&found, columns)?;
        if suite.is_empty() { Err(format!("there is no test in {}", shown(&found))) } else { Ok(suite) }
    }

    /// Number of tests.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Streams(tests) => tests.len(),
            Self::Calls { calls, .. } => calls.len(),
            Self::Asserts { tests, .. } => tests.len(),
        }
    }

    /// Whether `code` defines the tested function: the one that is called, or in tests that are code and name none, any function
    /// that they mention and do not define. Whole programs are always tested.
    #[must_use]
    pub fn is_defined_in(&self, code: &str) -> bool {
        match self {
            Self::Streams(_) => true,
            Self::Calls { function, .. } | Self::Asserts { entry_point: Some(function), .. } => {
                defined(code).any(|name| name == function)
            }
            Self::Asserts { tests, .. } => {
                let mentioned: HashSet<&str> = tests.iter().flat_map(|test| words(test)).collect();
                let own: HashSet<&str> = tests.iter().flat_map(|test| defined(test)).collect();
                // A test by `check` need not mention the function that it is called with.
                let any = own.contains("check") && definitions(code).any(|name| !own.contains(name));
                any || defined(code).any(|name| !own.contains(name) && mentioned.contains(name))
            }
        }
    }

    /// Whether there is no test.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn parse(found: &Value, columns: &Map<String, Value>) -> Result<Self, String> {
        match found {
            Value::String(text) => match serde_json::from_str::<Value>(text) {
                Ok(inner @ (Value::Array(_) | Value::Object(_))) => Self::parse(&inner, columns),
                _ => asserts(std::slice::from_ref(found), columns),
            },
            Value::Object(object) => pairs(object, columns),
            Value::Array(items) if items.iter().all(Value::is_string) => asserts(items, columns),
            Value::Array(items) => listed(items, columns),
            other => Err(unreadable(other)),
        }
    }
}

/// Names of the functions and classes of Python code, methods included.
fn definitions(code: &str) -> impl Iterator<Item = &str> {
    code.lines().filter_map(|line| {
        let line = line.trim_start();
        let rest = ["def ", "async def ", "class "].iter().find_map(|word| line.strip_prefix(word));
        words(rest?).next()
    })
}

/// These names, and those that the code assigns to at top level.
fn defined(code: &str) -> impl Iterator<Item = &str> {
    definitions(code).chain(code.lines().filter_map(|line| {
        let (name, value) = line.split_once('=')?;
        Some(name.trim_end()).filter(|name| !value.starts_with('=') && words(name).eq([*name]))
    }))
}

fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty())
}

/// `{"inputs": [..], "outputs": [..]}`, with `fn_name` for calls; one `{"input", "output"}`; `{"assert_case": [..]}`.
fn pairs(object: &Map<String, Value>, columns: &Map<String, Value>) -> Result<TestSuite, String> {
    if let Some(Value::Array(cases)) = object.get("assert_case") {
        return asserts(cases, columns);
    }
    if object.contains_key("input") {
        return listed(&[Value::Object(object.clone())], columns);
    }
    let list = |key: &str| match object.get(key) {
        Some(Value::Array(items)) => Ok(items),
        _ => Err(format!("there is no list `{key}` in {}", shown(&Value::Object(object.clone())))),
    };
    let (inputs, outputs) = (list("inputs")?, list("outputs")?);
    if inputs.len() != outputs.len() {
        return Err(format!("there are {} inputs and {} outputs", inputs.len(), outputs.len()));
    }
    let both = inputs.iter().zip(outputs);
    match object.get("fn_name").and_then(Value::as_str) {
        Some(function) => {
            let wrapped =
                outputs.iter().all(|output| output.as_array().is_some_and(|items| items.len() == 1));
            let calls = both.map(|(input, output)| Ok(FunctionCall { wrapped, ..call(input, output)? }));
            Ok(TestSuite::Calls {
                function: function.to_owned(),
                calls: calls.collect::<Result<_, String>>()?,
            })
        }
        None => both
            .map(|(input, output)| streams(input, output))
            .collect::<Result<_, _>>()
            .map(TestSuite::Streams),
    }
}

/// A list of `{"input", "output"}`; with `"testtype": "functional"` they are calls.
fn listed(items: &[Value], columns: &Map<String, Value>) -> Result<TestSuite, String> {
    let field = |item: &Value, key: &str| item.get(key).cloned().ok_or_else(|| unreadable(item));
    let both = items.iter().map(|item| Ok((field(item, "input")?, field(item, "output")?)));
    let both = both.collect::<Result<Vec<_>, String>>()?;
    let functional =
        items.iter().filter(|item| item.get("testtype").is_some_and(|kind| kind == "functional"));
    match functional.count() {
        0 => both
            .iter()
            .map(|(input, output)| streams(input, output))
            .collect::<Result<_, _>>()
            .map(TestSuite::Streams),
        count if count == items.len() => {
            let calls = both.iter().map(|(input, output)| {
                call(input, &output.as_str().map_or_else(|| output.clone(), json_or_text))
            });
            let calls = calls.collect::<Result<_, _>>()?;
            let function =
                function_name(columns).ok_or("the tests are calls, but there is no column `fn_name`")?;
            Ok(TestSuite::Calls { function, calls })
        }
        count => Err(format!("{count} of {} tests are calls, the others are not", items.len())),
    }
}

fn function_name(columns: &Map<String, Value>) -> Option<String> {
    let metadata = columns.get("metadata").map(|found| match found {
        Value::String(text) => serde_json::from_str(text).unwrap_or_default(),
        other => other.clone(),
    });
    let named = ["fn_name", "func_name", "entry_point", "function_name"].iter().find_map(|name| {
        let own = columns.get(*name).and_then(Value::as_str);
        own.or_else(|| metadata.as_ref()?.get(name)?.as_str())
    });
    named.map(str::to_owned)
}

fn streams(input: &Value, output: &Value) -> Result<StreamTest, String> {
    Ok(StreamTest { input: lines(input)?, output: lines(output)? })
}

/// A text, or a list of lines.
fn lines(value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Number(number) => Ok(number.to_string()),
        Value::Array(items) => Ok(items.iter().map(lines).collect::<Result<Vec<_>, _>>()?.join("\n")),
        other => Err(unreadable(other)),
    }
}

/// Arguments are a list, or a text with one JSON value a line.
fn call(input: &Value, output: &Value) -> Result<FunctionCall, String> {
    let arguments = match input {
        Value::Array(items) => items.clone(),
        Value::String(text) => {
            text.lines().filter(|line| !line.trim().is_empty()).map(json_or_text).collect()
        }
        other => return Err(format!("the arguments of a call are a list, not {}", shown(other))),
    };
    Ok(FunctionCall { arguments, expected: output.clone(), wrapped: false })
}

fn json_or_text(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()))
}

fn asserts(items: &[Value], columns: &Map<String, Value>) -> Result<TestSuite, String> {
    // Code that can fail has one of these words. Whether a check is reached is known when it runs.
    const CHECKS: [&str; 5] = ["assert", "raise", "check(", "TestCase", "def test"];
    let mut tests = Vec::with_capacity(items.len());
    for item in items {
        let text = item.as_str().ok_or_else(|| unreadable(item))?;
        if !CHECKS.iter().any(|check| text.contains(check)) {
            return Err(format!("{} asserts nothing", shown(item)));
        }
        tests.push(text.to_owned());
    }
    let text = |name: &str| match columns.get(name) {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(items)) => items.iter().filter_map(Value::as_str).collect::<Vec<_>>().join("\n"),
        _ => String::new(),
    };
    let setup = format!("{}\n{}", text("test_imports"), text("test_setup_code"));
    Ok(TestSuite::Asserts { setup: setup.trim().to_owned(), tests, entry_point: function_name(columns) })
}

fn unreadable(found: &Value) -> String {
    format!(
        "{} is not a test; write a list of {{\"input\", \"output\"}}, {{\"inputs\": [..], \"outputs\": [..]}} with or without \
         \"fn_name\", or a list of asserts",
        shown(found)
    )
}

fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("`{}...`", &text[..end]),
        None => format!("`{text}`"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use trajectory::{Prompt, TaskId};

    use super::*;

    fn suite(columns: &Value) -> Result<TestSuite, String> {
        let columns = columns.as_object().unwrap().clone();
        let task = Task { id: TaskId(0), prompt: Prompt::Text(String::new()), answer: None, columns };
        TestSuite::of(&task, None)
    }

    fn one(input: &str, output: &str) -> TestSuite {
        TestSuite::Streams(vec![StreamTest { input: input.to_owned(), output: output.to_owned() }])
    }

    #[test]
    fn streams_in_all_forms() {
        for tests in [
            json!([{"input": "1\n2", "output": "3"}]),
            json!({"inputs": ["1\n2"], "outputs": ["3"]}),
            json!({"inputs": [["1", "2"]], "outputs": [["3"]]}),
            json!("{\"inputs\": [\"1\\n2\"], \"outputs\": [\"3\"]}"),
            json!([{"input": "1\n2", "output": "3", "testtype": "stdin"}]),
            json!({"input": "1\n2", "output": 3}),
        ] {
            assert_eq!(suite(&json!({"tests": tests})).unwrap(), one("1\n2", "3"), "{tests}");
        }
    }

    #[test]
    fn calls_in_all_forms() {
        let arguments = vec![json!([1, 2]), json!("x")];
        let calls = vec![FunctionCall { arguments, expected: json!(3), wrapped: false }];
        let expected = TestSuite::Calls { function: "f".to_owned(), calls };
        let listed = json!([{"input": "[1, 2]\n\"x\"", "output": "3", "testtype": "functional"}]);
        for columns in [
            json!({"tests": {"fn_name": "f", "inputs": [[[1, 2], "x"]], "outputs": [3]}}),
            json!({"tests": {"fn_name": "f", "inputs": ["[1, 2]\n\"x\""], "outputs": [3]}}),
            json!({"tests": listed, "fn_name": "f"}),
            json!({"tests": listed.to_string(), "metadata": "{\"func_name\": \"f\"}"}),
        ] {
            assert_eq!(suite(&columns).unwrap(), expected, "{columns}");
        }
    }

    #[test]
    fn asserts_in_all_forms() {
        for (columns, count) in [
            (json!({"tests": ["assert f(1) == 2", "assert f(2) == 3"]}), 2),
            (json!({"tests": "assert f(1) == 2\nassert f(2) == 3"}), 1),
            (json!({"tests": "[\"assert f(1) == 2\"]"}), 1),
            (json!({"tests": {"assert_case": ["assert f(1) == 2"]}}), 1),
        ] {
            let found = suite(&columns).unwrap();
            assert!(
                matches!(&found, TestSuite::Asserts { tests, .. } if tests.len() == count),
                "{columns}: {found:?}"
            );
        }
        let tests = vec!["def check(f):\n assert f(1)".to_owned()];
        let expected =
            TestSuite::Asserts { setup: "x = 1".to_owned(), tests, entry_point: Some("f".to_owned()) };
        for name in ["entry_point", "fn_name", "func_name", "function_name"] {
            let human =
                json!({"tests": "def check(f):\n assert f(1)", name: "f", "test_setup_code": "x = 1"});
            assert_eq!(suite(&human).unwrap(), expected, "{name}");
        }
    }

    #[test]
    fn the_tested_function_is_found_in_code() {
        let calls = json!({"tests": {"fn_name": "f", "inputs": [[1]], "outputs": [1]}});
        let named = json!({"tests": "def check(c): assert c(1)", "entry_point": "f"});
        let unnamed = json!({"tests": "def check(c): assert c(1)"});
        let asserts = json!({"tests": ["assert f(1) == 2"]});
        for columns in [&calls, &named, &unnamed, &asserts] {
            let suite = suite(columns).unwrap();
            for code in ["def f(x):\n  return x", "class S:\n  def f(self): pass"] {
                assert!(suite.is_defined_in(code), "{columns} {code}");
            }
            for code in ["f(1)", "print(f(1))", "print(x=f)", "f == 3", "", "class check: pass"] {
                assert!(!suite.is_defined_in(code), "{columns} {code}");
            }
        }
        assert!(suite(&calls).unwrap().is_defined_in("f = abs"));
        assert!(!suite(&asserts).unwrap().is_defined_in("def other(): pass"));
        assert!(suite(&json!({"tests": [{"input": "", "output": ""}]})).unwrap().is_defined_in("print()"));
    }

    #[test]
    fn only_lists_of_one_throughout_may_be_wrapped() {
        let wrapped = |tests: Value| match suite(&json!({"tests": tests, "fn_name": "f"})).unwrap() {
            TestSuite::Calls { calls, .. } => calls.iter().map(|call| call.wrapped).collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        };
        let pairs = |outputs: Value| json!({"fn_name": "f", "inputs": [[1], [2]], "outputs": outputs});
        assert_eq!(wrapped(pairs(json!([[3], [[4, 5]]]))), [true, true]);
        assert_eq!(wrapped(pairs(json!([[3], [4, 5]]))), [false, false]);
        assert_eq!(wrapped(pairs(json!([[3], 4]))), [false, false]);
        assert_eq!(wrapped(json!([{"input": "1", "output": "[3]", "testtype": "functional"}])), [false]);
    }

    #[test]
    fn tests_that_cannot_fail_are_refused() {
        for (columns, word) in [
            (json!({}), "`tests_column`"),
            (json!({"tests": []}), "no test"),
            (json!({"tests": "print(1)"}), "asserts nothing"),
            (json!({"tests": ""}), "asserts nothing"),
            (json!({"tests": {"inputs": ["1"], "outputs": []}}), "1 inputs and 0 outputs"),
            (json!({"tests": {"inputs": ["1"]}}), "`outputs`"),
            (json!({"tests": [{"input": "1"}]}), "is not a test"),
            (json!({"tests": 5}), "is not a test"),
            (json!({"tests": [{"input": "1", "output": "1", "testtype": "functional"}]}), "`fn_name`"),
        ] {
            let error = suite(&columns).unwrap_err();
            assert!(error.contains(word), "{columns}: {error}");
        }
    }
}
