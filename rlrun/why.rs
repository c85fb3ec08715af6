//! `rlrun why`: where the time of a run went, what stalled it, and what would make it faster.
//!
//! - `advice`: changes of the recipe, with the gain that the simulator predicts
//! - `show`: the report as text
//!
//! The critical path is that of `dashboard::why`, which the live page shows too.
//!
//! Invariant: a run directory is only read, also while its run is in progress. Nothing else is written but descriptions of models in the
//! cache of the Hugging Face Hub.

mod advice;
mod show;

use std::path::Path;
use std::sync::Arc;

use dashboard::why::{Advisor, ExplanationError, RunExplanation, explain};
use serde_json::{Value, json};

use crate::args::WhyArgs;
use crate::failure::Failure;
use crate::program::Program;
use crate::run_dir;
use crate::runs::RunState;
use advice::Advice;

/// Explains the run that `args` name and returns the report.
///
/// # Errors
/// A directory that is no run, a run without a timeline, a step that is not in it, or hardware that is not known.
pub(crate) fn run(args: &WhyArgs, program: &Program) -> Result<String, Failure> {
    let root = &args.run;
    if !root.is_dir() {
        let what = format!("there is no directory `{}`; `rlrun runs` lists runs", root.display());
        return Err(Failure::NotThere(what));
    }
    if !dashboard::is_run(root) {
        let what = format!(
            "`{}` is no run directory: it has neither `resolved.toml` nor `timeline.jsonl`; `rlrun runs` lists runs",
            root.display()
        );
        return Err(Failure::NotThere(what));
    }
    let explanation = explain(root).map_err(|error| match error {
        ExplanationError::Read { source, .. } => {
            Failure::System { what: format!("read the timeline of {}", root.display()), source }
        }
        other => Failure::NotThere(other.to_string()),
    })?;
    let state = match run_dir::is_in_use(root) {
        true => RunState::Running,
        false => RunState::closed(dashboard::last_event(root)),
    };
    if let Some(number) = args.step {
        let Some(step) = explanation.step(number) else {
            let what = format!(
                "step {number} is not in the timeline of `{}`, which has {} steps; name another with `--step`",
                root.display(),
                explanation.steps
            );
            return Err(Failure::NotThere(what));
        };
        return Ok(if args.json { step.to_json().to_string() } else { show::step(&step) });
    }
    // A resolved recipe has every override already.
    let program = program.without_overrides();
    let advice = Advice::new(root, &explanation, args.hardware.as_deref(), &program)?;
    if args.json {
        let mut object = json!({"run": root, "state": state.as_str(), "recommendations": advice.to_json()});
        if let (Value::Object(object), Value::Object(fields)) = (&mut object, explanation.to_json()) {
            object.extend(fields);
        }
        return Ok(object.to_string());
    }
    Ok(show::text(root, state, &explanation, &advice))
}

/// Recommends what `rlrun why` recommends, for the page of `rlrun view`.
pub(crate) fn advisor(program: &Program) -> Advisor {
    let program = program.without_overrides();
    Arc::new(move |root: &Path, explanation: &RunExplanation| {
        match Advice::new(root, explanation, None, &program) {
            Ok(advice) => advice.to_json(),
            Err(error) => json!({"changes": [], "notes": [error.to_string()]}),
        }
    })
}
