//! `rlrun reward`: evaluates rewards without a run.
//!
//! Invariant: nothing is sampled or trained. A reward gives the same result as in a run, limits and errors included.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{BufRead, Write};
use std::path::Path;

use model::{ModelDirectory, SharedCores, SpecialTokens};
use rewards::{Judged, Latency, Reward, RewardInput, RewardSet, RewardSpec, Scope};
use serde_json::{Map, Value, json};
use trajectory::{Prompt, Task, TaskId};

use crate::args::{GradeArgs, RewardTestArgs};
use crate::failure::Failure;
use crate::huggingface::{FetchScope, HuggingFace};
use crate::prepare::{Prepared, RewardRuntime, prompt_text};
use crate::program::Program;
use crate::recipe::Recipe;

/// Cases that are graded at the same time.
const AT_ONCE: usize = 256;

/// Keys that a case may give for itself. No others: cases are data, and data must not say what is run or asked.
const OF_CASES: [&str; 5] = ["strict", "method", "strict_box", "compare", "format_score"];

/// Longest text shown of a prompt or an answer, characters.
const SHOWN: usize = 60;

/// Grades the cases of `input`; writes one JSON line for each to `out`, in order.
///
/// # Errors
/// A kind or key that there is not, a line that is no case, a stream that cannot be read or written.
pub fn grade(
    args: &GradeArgs,
    program: &Program,
    input: impl BufRead,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let system = |what: &str| {
        let what = what.to_owned();
        move |source| Failure::System { what, source }
    };
    let runtime = RewardRuntime::new(program, &SharedCores::all())?;
    let scratch = tempfile::tempdir().map_err(system("make a temporary directory"))?;
    let mut grader =
        Grader { args, program, runtime: &runtime, scratch: scratch.path(), built: HashMap::new() };
    let mut cases = Vec::new();
    let mut lines = (1_u64..).zip(input.lines()).peekable();
    while let Some((number, line)) = lines.next() {
        let line = line.map_err(system("read the cases"))?;
        if !line.trim().is_empty() {
            cases.push(grader.case(number, &line)?);
        }
        if cases.len() == AT_ONCE || lines.peek().is_none() {
            for verdict in grader.grade(&std::mem::take(&mut cases))? {
                writeln!(out, "{verdict}").map_err(system("write a verdict"))?;
            }
            out.flush().map_err(system("write a verdict"))?;
        }
    }
    Ok(())
}

/// One line of the input.
struct RewardCase {
    task: Task,
    text: String,
    /// Keys of the reward that the case gives, as JSON.
    keys: String,
}

/// The rewards that cases ask for, by the keys that they give.
struct Grader<'a> {
    args: &'a GradeArgs,
    program: &'a Program,
    runtime: &'a RewardRuntime,
    scratch: &'a Path,
    built: HashMap<String, Box<dyn Reward>>,
}

impl Grader<'_> {
    fn case(&mut self, number: u64, line: &str) -> Result<RewardCase, Failure> {
        let wrong = |reason: String| Failure::Argument(format!("case in line {number}: {reason}"));
        let row: Map<String, Value> =
            serde_json::from_str(line).map_err(|error| wrong(format!("not a JSON object: {error}")))?;
        let field = |name: &str| match row.get(name) {
            Some(Value::String(text)) => Ok(text.clone()),
            Some(Value::Null) | None => {
                let names: Vec<_> = row.keys().map(|key| format!("`{key}`")).collect();
                Err(wrong(format!("there is no field `{name}`; there are {}", names.join(", "))))
            }
            Some(other) => Ok(other.to_string()),
        };
        let text = field(&self.args.pred_field)?;
        // Kinds that compare with no answer need none; the others say so.
        let gold = row.get(&self.args.gold_field).map(|_| field(&self.args.gold_field)).transpose()?;
        let known =
            self.program.registry().kind(&self.args.kind).map_or(&[][..], rewards::RewardKind::parameters);
        let own = |key: &str| *key != self.args.gold_field && *key != self.args.pred_field;
        let given: Map<String, Value> = row
            .iter()
            .filter(|(key, _)| known.contains(&key.as_str()) && OF_CASES.contains(&key.as_str()) && own(key))
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        let keys = Value::Object(given).to_string();
        if !self.built.contains_key(&keys) {
            let reward = self.build(&keys)?;
            self.built.insert(keys.clone(), reward);
        }
        let prompt = match row.get("prompt") {
            Some(Value::String(prompt)) => prompt.clone(),
            _ => String::new(),
        };
        let task = Task { id: TaskId(number), prompt: Prompt::Text(prompt), answer: gold, columns: row };
        Ok(RewardCase { task, text, keys })
    }

    fn build(&self, keys: &str) -> Result<Box<dyn Reward>, Failure> {
        let wrong = |error: &dyn std::fmt::Display| {
            Failure::Argument(format!("reward `{}`: {error}", self.args.kind))
        };
        let mut table: Map<String, Value> = serde_json::from_str(keys).map_err(|error| wrong(&error))?;
        for set in &self.args.sets {
            let parsed: toml::Table = toml::from_str(set).map_err(|error| wrong(&error.message()))?;
            for (key, value) in parsed {
                table.insert(key, serde_json::to_value(value).map_err(|error| wrong(&error))?);
            }
        }
        table.insert("kind".to_owned(), self.args.kind.clone().into());
        let spec: RewardSpec = serde_json::from_value(Value::Object(table)).map_err(|error| wrong(&error))?;
        let context = self.runtime.context(self.scratch);
        Ok(self.program.registry().build(&spec, &context)?)
    }

    fn grade(&self, cases: &[RewardCase]) -> Result<Vec<Value>, Failure> {
        let mut verdicts: Vec<Value> = vec![Value::Null; cases.len()];
        for (keys, reward) in &self.built {
            let places: Vec<usize> = (0..cases.len()).filter(|place| cases[*place].keys == *keys).collect();
            let inputs: Vec<_> = places
                .iter()
                .map(|place| RewardInput::text(&cases[*place].task, &cases[*place].text))
                .collect();
            // Cases are no group: a reward that compares completions gets one case at a time.
            let at_once = if reward.scope() == Scope::Group { 1 } else { inputs.len().max(1) };
            let calls = inputs.chunks(at_once);
            let judged = calls.flat_map(|inputs| self.runtime.handle().block_on(reward.score(inputs)));
            for (place, judged) in places.into_iter().zip(judged) {
                verdicts[place] = verdict(judged);
            }
        }
        Ok(verdicts)
    }
}

/// `{"score": ..}` with everything else that the reward said; `{"score": null, "error": ..}` if it failed.
fn verdict(judged: Judged) -> Value {
    match judged {
        Ok(outcome) => {
            let mut line = Map::from_iter([("score".to_owned(), json!(outcome.value))]);
            line.extend(outcome.details);
            Value::Object(line)
        }
        Err(error) => json!({ "score": null, "error": error.to_string() }),
    }
}

/// Tries the rewards of a recipe on the first rows of its data, and says what each said and how long it took.
///
/// # Errors
/// Whatever is wrong with the recipe, its model, its data or its rewards; a reward that failed on a row.
pub fn test(args: &RewardTestArgs, program: &Program) -> Result<String, Failure> {
    let (recipe, _) = Recipe::load(&args.recipe, &args.sets, program).map_err(Failure::Recipe)?;
    let recipe = HuggingFace::of(program).fetched(&recipe, FetchScope::WithoutWeights)?;
    let scratch = tempfile::tempdir()
        .map_err(|source| Failure::System { what: "make a temporary directory".to_owned(), source })?;
    let directory = recipe.open_model(scratch.path())?;
    let runtime = RewardRuntime::new(program, &SharedCores::all())?;
    let prepared = Prepared::new(&recipe, &directory, &runtime, scratch.path())?;
    let Some(rewards) = &prepared.rewards else {
        return Err(Failure::NotThere(format!("{} has no rewards", args.recipe.display())));
    };
    let tasks = prepared.train_tasks();
    let mut text = String::new();
    for weighted in rewards.rewards() {
        let about = weighted.reward.about().map_or(String::new(), |about| format!(": {about}"));
        let group = match weighted.reward.scope() {
            Scope::Group => "; here the reference and the wrong answer of a row are one group of 2",
            Scope::Trajectory => "",
        };
        let _ =
            writeln!(text, "reward `{}`, weight {}{about}{group}", weighted.reward.name(), weighted.weight);
    }
    let mut failures = 0;
    for (row, task) in tasks.iter().take(args.n).enumerate() {
        let reference = task.answer.clone().unwrap_or_default();
        let other = tasks.iter().rev().find_map(|t| t.answer.clone().filter(|answer| *answer != reference));
        let wrong = wrong_answer(&reference, other.as_deref());
        let _ = writeln!(text, "\nrow {row}: {}", short(&prompt_text(task)));
        let answers = [("reference", reference), ("wrong", wrong)];
        failures += say(&mut text, rewards, &runtime, task, &answers, &recipe, &directory)?;
    }
    if failures > 0 {
        return Err(Failure::Argument(format!(
            "{text}\n{failures} times a reward failed; what it said stands above"
        )));
    }
    Ok(text.trim_end().to_owned())
}

/// Writes the outcome of every reward for the answers to a task, which are one group; returns the number of failures.
fn say(
    text: &mut String,
    rewards: &RewardSet,
    runtime: &RewardRuntime,
    task: &Task,
    answers: &[(&str, String); 2],
    recipe: &Recipe,
    directory: &ModelDirectory,
) -> Result<usize, Failure> {
    let prompt_ids = directory.encode_prompt(&task.prompt)?;
    let mut inputs = Vec::new();
    let encoded: Vec<Vec<u32>> = answers
        .iter()
        .map(|(_, answer)| {
            let mut ids = directory.tokenizer().encode(answer, SpecialTokens::Omit)?;
            ids.extend(directory.stop_token_ids().first());
            Ok(ids)
        })
        .collect::<Result<_, model::ModelError>>()?;
    for (index, ((_, answer), completion_ids)) in (0..).zip(answers.iter().zip(&encoded)) {
        inputs.push(RewardInput {
            index,
            prompt_ids: &prompt_ids,
            completion_ids,
            max_completion_length: recipe.rollout.max_completion_length,
            ..RewardInput::text(task, answer)
        });
    }
    let scores = runtime.handle().block_on(rewards.score(&inputs))?;
    let loads = rewards.take_loads();
    let mut failures = 0;
    for ((label, answer), score) in answers.iter().zip(scores) {
        let _ = writeln!(text, "  {label}: {}", short(answer));
        for (component, (name, load)) in score.components.iter().zip(&loads) {
            let said = match (&component.error, component.value) {
                (Some(error), _) => {
                    failures += 1;
                    format!("failed: {error}")
                }
                (None, None) => "does not apply".to_owned(),
                (None, Some(value)) => format!("{value}"),
            };
            let details = if component.details.is_empty() {
                String::new()
            } else {
                format!(" {}", Value::Object(component.details.clone()))
            };
            let _ = writeln!(text, "    {name} {said}{details}, {}", duration(load.ran));
        }
        let total =
            score.total.map_or("none: it would not be trained on".to_owned(), |total| total.to_string());
        let _ = writeln!(text, "    total {total}");
    }
    Ok(failures)
}

fn duration(latency: Latency) -> String {
    let seconds = latency.max_s;
    if seconds < 1e-3 { format!("{:.0} us", seconds * 1e6) } else { format!("{:.1} ms", seconds * 1e3) }
}

/// An answer that is wrong: the last number of the reference is another one; without a number, another row's answer.
fn wrong_answer(reference: &str, other: Option<&str>) -> String {
    let end = reference.rfind(|c: char| c.is_ascii_digit()).map(|at| at + 1);
    let Some(end) = end else { return other.unwrap_or("wrong").to_owned() };
    let digit = &reference[end - 1..end];
    let next = if digit == "9" { "0" } else { &"123456789"[digit.parse().unwrap_or(0)..][..1] };
    format!("{}{next}{}", &reference[..end - 1], &reference[end..])
}

fn short(text: &str) -> String {
    let line = text.trim().replace('\n', " ");
    match line.char_indices().nth(SHOWN) {
        // The end of a solution says more than its beginning.
        Some(_) => {
            let from = line.char_indices().rev().nth(SHOWN - 1).map_or(0, |(at, _)| at);
            format!("...{}", &line[from..])
        }
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graded(kind: &str, sets: &[&str], lines: &str) -> Result<String, String> {
        let args = GradeArgs {
            kind: kind.to_owned(),
            gold_field: "gold".to_owned(),
            pred_field: "pred".to_owned(),
            sets: sets.iter().map(|set| (*set).to_owned()).collect(),
        };
        let mut out = Vec::new();
        let done = grade(&args, &Program::default(), lines.as_bytes(), &mut out);
        done.map(|()| String::from_utf8(out).unwrap()).map_err(|failure| failure.to_string())
    }

    #[test]
    fn every_case_gets_its_line_in_order() {
        let lines = (0..600).map(|n| format!("{{\"gold\": \"{n}\", \"pred\": \"{}\"}}\n", n - n % 3));
        let out = graded("exact", &[], &lines.collect::<String>()).unwrap();
        let scores: Vec<f64> = out
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap()["score"].as_f64().unwrap())
            .collect();
        assert_eq!(scores, (0..600).map(|n| if n % 3 == 0 { 1.0 } else { 0.0 }).collect::<Vec<_>>());
    }

    #[test]
    fn keys_come_from_the_command_line_and_from_the_case() {
        let case = r#"{"gold": "18", "pred": "it is 18"}"#;
        assert_eq!(graded("gsm8k", &[], case).unwrap(), "{\"score\":0.0}\n");
        assert_eq!(graded("gsm8k", &["method=\"flexible\""], case).unwrap(), "{\"score\":1.0}\n");
        let own = r#"{"gold": "18", "pred": "it is 18", "method": "flexible", "strict": true}"#;
        assert_eq!(graded("gsm8k", &[], own).unwrap(), "{\"score\":1.0}\n");
    }

    #[test]
    fn mistakes_name_the_line_the_field_or_the_kind() {
        for (kind, lines, evidence) in [
            ("exact", "{\"gold\": \"1\", \"pred\": \"1\"}\n{", "line 2: not a JSON object"),
            ("exact", "{\"gold\": \"1\", \"answer\": \"1\"}", "no field `pred`; there are `gold`, `answer`"),
            ("exakt", "{\"gold\": \"1\", \"pred\": \"1\"}", "no reward of kind `exakt`"),
        ] {
            let error = graded(kind, &[], lines).unwrap_err();
            assert!(error.contains(evidence), "{error}");
        }
    }

    #[test]
    fn a_wrong_answer_differs_in_its_last_number() {
        assert_eq!(wrong_answer("work 12\n#### 19", None), "work 12\n#### 10");
        assert_eq!(wrong_answer("3.5 m", None), "3.6 m");
        assert_eq!(wrong_answer("yes", Some("no")), "no");
    }
}
