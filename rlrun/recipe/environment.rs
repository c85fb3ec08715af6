//! Rules of `[environment]`: its kind, the keys of the kind, and limits that fit those of the run.
//!
//! Invariant: which kind takes which keys is known to the registry alone; here is only added where each stands. Files are
//! read later, when tasks are read.

use environments::{EnvironmentRegistry, EnvironmentSpec};
use serde_json::Value;

use super::checks::existing;
use super::decode::nearest;
use super::ranges::{ANY, Checker, FRACTION, POSITIVE};
use super::rewards::python_path;
use super::schema::RawRecipe;

/// Checks the section; makes its paths absolute.
pub(super) fn check(raw: &mut RawRecipe, registry: &EnvironmentRegistry, checker: &mut Checker<'_>) {
    let rules = EnvironmentRules {
        registry,
        wait_s: raw.deadlines.wait_s,
        max_completion: raw.rollout.max_completion_length,
    };
    let Some(spec) = &mut raw.environment else { return };
    rules.check(spec, "environment", checker);
    for (name, keys) in std::mem::take(&mut spec.named) {
        let section = format!("environment.named.{name}");
        match spec.with_keys(&keys) {
            Ok(mut named) => {
                rules.check(&mut named, &section, checker);
                // With absolute paths, and whole: nothing is taken from the outer section again.
                if let Ok(Value::Object(whole)) = serde_json::to_value(&named) {
                    spec.named.insert(name, whole);
                }
            }
            Err(error) => checker.report(&section, format!("`{section}`: {error}"), ""),
        }
    }
}

/// What an environment has to fit.
struct EnvironmentRules<'a> {
    registry: &'a EnvironmentRegistry,
    wait_s: f64,
    max_completion: usize,
}

impl EnvironmentRules<'_> {
    /// Checks the environment of a section; makes its paths absolute.
    fn check(&self, spec: &mut EnvironmentSpec, section: &str, checker: &mut Checker<'_>) {
        let Self { registry, wait_s, max_completion } = *self;
        let at = |key: &str| format!("{section}.{key}");
        if let Err(error) = registry.check(spec) {
            let names: Vec<_> = registry.names().collect();
            let near = nearest(&spec.kind, &names).filter(|_| error.key() == "kind");
            let help = near.map_or(String::new(), |near| format!("did you mean \"{near}\"?"));
            checker.report(&at(error.key()), error.to_string(), &help);
        }
        for (key, value) in [
            ("tool_timeout_s", spec.tool_timeout_s),
            ("turn_timeout_s", spec.turn_timeout_s),
            ("episode_timeout_s", spec.episode_timeout_s),
        ] {
            checker.number(&at(key), value, POSITIVE);
        }
        checker.number(&at("discount"), spec.discount, FRACTION);
        checker.number(&at("call_reward"), spec.call_reward.unwrap_or(0.0), ANY);
        if spec.max_turns == 0 {
            let key = at("max_turns");
            checker.report(&key, format!("`{key}` is 0; it must be 1 or more"), "");
        }
        if let Some(most) = spec.max_tokens.filter(|most| *most <= max_completion) {
            let message = format!(
                "an episode of {most} tokens has no space for a prompt and a completion of {max_completion} tokens"
            );
            let paths = [&at("max_tokens")[..], "rollout.max_completion_length"];
            checker.report_latest(&paths, message, &format!("raise `{}`", at("max_tokens")));
        }
        for (key, value, longer, limit) in [
            (at("tool_timeout_s"), spec.tool_timeout_s, at("turn_timeout_s"), spec.turn_timeout_s),
            (at("turn_timeout_s"), spec.turn_timeout_s, at("episode_timeout_s"), spec.episode_timeout_s),
            (at("turn_timeout_s"), spec.turn_timeout_s, "deadlines.wait_s".to_owned(), wait_s),
        ] {
            if value > limit {
                let message = format!("`{key}` is {value}, longer than `{longer}`, {limit}");
                checker.report_latest(&[&key, &longer], message, "lower the one or raise the other");
            }
        }
        const CODE: &str = "name a Python file, FILE.py:NAME, or module:NAME";
        if let Some(path) = spec.path.take() {
            spec.path = python_path(path, &at("path"), CODE, checker);
        }
        for (n, tool) in spec.tools.iter_mut().enumerate() {
            if let Some(path) = tool.path.take() {
                let key = at(&format!("tools[{n}].path"));
                tool.path = match &tool.kind[..] {
                    "python" => python_path(path, &key, CODE, checker),
                    _ => existing(&path, &key, "name a directory of text files", checker),
                };
            }
        }
    }
}
