//! Rules of `[environment]`: its kind, the keys of the kind, and limits that fit those of the run.
//!
//! Invariant: which kind takes which keys is known to the registry alone; here is only added where each stands. Files are
//! read later, when tasks are read.

use environments::EnvironmentRegistry;

use super::checks::existing;
use super::decode::nearest;
use super::ranges::{Checker, POSITIVE};
use super::rewards::python_path;
use super::schema::RawRecipe;

/// Checks the section; makes its paths absolute.
pub(super) fn check(raw: &mut RawRecipe, registry: &EnvironmentRegistry, checker: &mut Checker<'_>) {
    let (wait_s, max_completion) = (raw.deadlines.wait_s, raw.rollout.max_completion_length);
    let Some(spec) = &mut raw.environment else { return };
    if let Err(error) = registry.check(spec) {
        let names: Vec<_> = registry.names().collect();
        let near = nearest(&spec.kind, &names).filter(|_| error.key() == "kind");
        let help = near.map_or(String::new(), |near| format!("did you mean \"{near}\"?"));
        checker.report(&format!("environment.{}", error.key()), error.to_string(), &help);
    }
    for (key, value) in [
        ("environment.tool_timeout_s", spec.tool_timeout_s),
        ("environment.turn_timeout_s", spec.turn_timeout_s),
        ("environment.episode_timeout_s", spec.episode_timeout_s),
    ] {
        checker.number(key, value, POSITIVE);
    }
    if spec.max_turns == 0 {
        checker.report("environment.max_turns", "`environment.max_turns` is 0; it must be 1 or more", "");
    }
    if let Some(most) = spec.max_tokens.filter(|most| *most <= max_completion) {
        let message = format!(
            "an episode of {most} tokens has no space for a prompt and a completion of {max_completion} tokens"
        );
        let paths = ["environment.max_tokens", "rollout.max_completion_length"];
        checker.report_latest(&paths, message, "raise `environment.max_tokens`");
    }
    let ordered = [
        (
            "environment.tool_timeout_s",
            spec.tool_timeout_s,
            "environment.turn_timeout_s",
            spec.turn_timeout_s,
        ),
        (
            "environment.turn_timeout_s",
            spec.turn_timeout_s,
            "environment.episode_timeout_s",
            spec.episode_timeout_s,
        ),
        ("environment.turn_timeout_s", spec.turn_timeout_s, "deadlines.wait_s", wait_s),
    ];
    for (key, value, longer, limit) in ordered {
        if value > limit {
            let message = format!("`{key}` is {value}, longer than `{longer}`, {limit}");
            checker.report_latest(&[key, longer], message, "lower the one or raise the other");
        }
    }
    if let Some(path) = spec.path.take() {
        let help = "name a Python file, FILE.py:NAME, or module:NAME";
        spec.path = python_path(path, "environment.path", help, checker);
    }
    for (n, tool) in spec.tools.iter_mut().enumerate() {
        if let Some(path) = tool.path.take() {
            let key = format!("environment.tools[{n}].path");
            tool.path = match &tool.kind[..] {
                "python" => {
                    python_path(path, &key, "name a Python file, FILE.py:NAME, or module:NAME", checker)
                }
                _ => existing(&path, &key, "name a directory of text files", checker),
            };
        }
    }
}
