//! Rules of the rollout engines of others in `[rollout]`.
//!
//! Invariant: a key that has no effect with an engine, or none without it, is refused by name.

use std::path::Path;

use model::Quantization;

use super::Recipe;
use super::ranges::{Checker, POSITIVE};
use super::schema::{RawRecipe, Rollout};
use super::words::{EngineWord, PolicyPlacement, Speculation, TargetModule};

/// Checks the keys; makes the directory of weights absolute.
pub(super) fn check(raw: &mut RawRecipe, checker: &mut Checker<'_>) {
    let rollout = &mut raw.rollout;
    checker.number("rollout.probe_bound", rollout.probe_bound, POSITIVE);
    if rollout.engine == EngineWord::Own {
        for (key, given) in [
            ("rollout.urls", !rollout.urls.is_empty()),
            ("rollout.command", !rollout.command.is_empty()),
            ("rollout.weights_dir", rollout.weights_dir.is_some()),
            ("rollout.push_adapter", rollout.push_adapter),
        ] {
            if given {
                let message = format!("`{key}` is for engines of others, and `rollout.engine` is \"own\"");
                checker.report(
                    key,
                    message,
                    "set `rollout.engine` to \"vllm\" or \"sglang\", or leave it out",
                );
            }
        }
        return;
    }
    rollout.weights_dir = rollout.weights_dir.take().map(|path| std::path::absolute(&path).unwrap_or(path));
    if rollout.urls.is_empty() {
        let help = "write the addresses of the engines, such as `urls = [\"http://127.0.0.1:8000\"]`";
        checker.report(
            "rollout.urls",
            "`rollout.engine` names engines of others, and there is no address",
            help,
        );
    }
    if let Some(url) =
        rollout.urls.iter().find(|url| !["http://", "https://"].iter().any(|s| url.starts_with(s)))
    {
        let message = format!("`rollout.urls` has {url:?}, which is no address");
        checker.report("rollout.urls", message, "write an address such as \"http://127.0.0.1:8000\"");
    }
    if !rollout.command.is_empty() && rollout.urls.len() > 1 {
        let help = "name one address, or start the engines yourself and leave `rollout.command` out";
        checker.report(
            "rollout.command",
            "`rollout.command` starts one engine, and there are several addresses",
            help,
        );
    }
    if rollout.push_adapter && rollout.engine == EngineWord::Sglang {
        let message = "`rollout.push_adapter` is for vLLM, and `rollout.engine` is \"sglang\"";
        checker.report("rollout.push_adapter", message, "leave it out: SGLang gets the merged weights");
    }
    let ends = [TargetModule::EmbedTokens, TargetModule::LmHead];
    let of_lora = raw.lora.iter().flat_map(|lora| &lora.target_modules);
    if let Some(end) = of_lora.filter(|_| rollout.push_adapter).find(|module| ends.contains(module)) {
        let message = format!(
            "vLLM reads adapters of linear layers alone, and `lora.target_modules` names \"{}\"",
            end.as_str()
        );
        checker.report("rollout.push_adapter", message, "leave it out: the engine gets the merged weights");
    }
    if rollout.push_adapter && raw.lora.is_none() {
        let message = "`rollout.push_adapter` pushes a LoRA adapter, and the run trains none";
        checker.report("rollout.push_adapter", message, "add `[lora]`, or leave it out");
    }
    without_effect(rollout, checker);
    check_placement(raw, checker);
}

/// Keys of rlrun's own engine, with the reason why they have no effect.
fn without_effect(rollout: &Rollout, checker: &mut Checker<'_>) {
    for (paths, reason) in given_of_own(rollout) {
        let message = format!("{} has no effect with `rollout.engine`: {reason}", named(paths));
        checker.report_latest(paths, message, "leave it at its default");
    }
}

fn named(paths: &[&str]) -> String {
    format!("`{}`", paths.join("`, `"))
}

/// The keys of rlrun's own engine that are not at their defaults, with the reason why they have no effect with another one.
fn given_of_own(rollout: &Rollout) -> Vec<(&'static [&'static str], &'static str)> {
    let truncated = rollout.top_p < 1.0 || rollout.top_k > 0 || rollout.min_p > 0.0;
    let all: [(&[&str], bool, &str); 8] = [
        (
            &["rollout.top_p", "rollout.top_k", "rollout.min_p"],
            truncated,
            "engines do not say which tokens truncation left",
        ),
        (&["rollout.stop"], !rollout.stop.is_empty(), "engines of others sample tokens and see no text"),
        (&["rollout.interrupt_text"], rollout.interrupt_text.is_some(), "engines of others insert no text"),
        (
            &["rollout.quantization"],
            rollout.quantization != Quantization::None,
            "an engine is started with its own quantization",
        ),
        (
            &["rollout.speculation"],
            rollout.speculation != Speculation::None,
            "an engine is started with its own speculation",
        ),
        (&["rollout.tensor"], rollout.tensor > 1, "an engine is started with its own tensor degree"),
        (&["rollout.adapt_running"], rollout.adapt_running, "an engine decides itself what it runs at once"),
        (&["rollout.bitwise"], rollout.bitwise, "engines of others compute other bits than the trainer"),
    ];
    all.into_iter().filter(|(_, given, _)| *given).map(|(paths, _, reason)| (paths, reason)).collect()
}

impl Recipe {
    /// The same recipe for a worker that samples with the engines at `urls`, which load weights from `weights_dir`.
    ///
    /// # Errors
    /// What in the recipe of the run these engines cannot do.
    pub(crate) fn with_engines(
        mut self,
        engine: EngineWord,
        urls: &[String],
        weights_dir: Option<&Path>,
    ) -> Result<Self, String> {
        if let Some((paths, reason)) = given_of_own(&self.rollout).first() {
            return Err(format!("the run sets {}, and {reason}: leave --engine out", named(paths)));
        }
        if self.weights.transport.is_between_devices() {
            return Err("the weights of the run go from device to device (`weights.transport`), and engines of others load \
                        them from a directory: leave --engine out"
                .to_owned());
        }
        self.rollout.engine = engine;
        self.rollout.urls = urls.to_vec();
        // Weights come to a worker merged.
        self.rollout.push_adapter = false;
        self.rollout.weights_dir =
            weights_dir.map(|path| std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf()));
        Ok(self)
    }
}

/// Where the engines are.
fn check_placement(raw: &RawRecipe, checker: &mut Checker<'_>) {
    let placement = &raw.placement;
    let elsewhere = placement.processes || placement.rollout_workers.is_some_and(|workers| workers > 0);
    if elsewhere {
        let message = "the process of the trainer asks the engines itself, so there are no rollout workers (`placement.processes`)";
        checker.report_latest(
            &["placement.processes", "rollout.engine"],
            message,
            "leave `placement.processes` out",
        );
    }
    if placement.policy == Some(PolicyPlacement::Colocated) {
        let message = "`placement.policy` is \"colocated\", and engines of others have memory of their own";
        checker.report_latest(
            &["placement.policy", "rollout.engine"],
            message,
            "leave `placement.policy` out",
        );
    }
    if raw.weights.transport.is_between_devices() {
        let message =
            "`weights.transport` is between devices, and engines of others load weights from a directory";
        checker.report_latest(
            &["weights.transport", "rollout.engine"],
            message,
            "leave `weights.transport` at its default",
        );
    }
}
