//! The report of `rlrun why` as text.
//!
//! Invariant: it has the numbers of the JSON, and is ASCII.

use std::fmt::Write;
use std::path::Path;

use dashboard::why::{CauseShare, ExplainedStep, RunExplanation, Stall};

use super::advice::Advice;
use crate::runs::RunState;
use crate::simulate::digits;

/// Causes with a smaller share are summed up.
const MIN_SHARE: f64 = 0.005;
/// Steps of a stall that are listed.
const MAX_STEPS: usize = 8;

pub(super) fn text(root: &Path, state: RunState, of: &RunExplanation, advice: &Advice) -> String {
    let mut out = format!("{}: ", root.display());
    // Writing to a string cannot fail.
    let _ = match state {
        RunState::Running => write!(out, "still running; "),
        state => write!(out, "{}; ", state.as_str()),
    };
    let _ = writeln!(
        out,
        "{} steps in {} s, {} s the median step\n\nwhat the trainer was doing or waiting for (critical path)",
        of.steps,
        digits(of.wall_s),
        digits(of.median_step_s)
    );
    let (large, small): (Vec<_>, Vec<_>) = of.causes.iter().partition(|cause| cause.share >= MIN_SHARE);
    large.iter().for_each(|cause| share(&mut out, cause));
    let rest: f64 = small.iter().map(|cause| cause.share).sum();
    if rest > 0.0 {
        let _ = writeln!(out, "{:>7.1} %  {} smaller ones", 100.0 * rest, small.len());
    }
    if !of.stragglers.is_empty() {
        out.push_str("\nlongest waits by name\n");
        of.stragglers.iter().for_each(|cause| share(&mut out, cause));
    }
    out.push_str("\nstalls, beyond what is usual in this run\n");
    of.stalls.iter().for_each(|of| stall(&mut out, of));
    if of.stalls.is_empty() {
        out.push_str("  none\n");
    }
    out.push_str("\nrecommendations\n");
    for line in advice.lines() {
        let _ = writeln!(out, "  {line}");
    }
    if of.unreadable > 0 {
        let _ =
            writeln!(out, "note: {} lines of the timeline are not whole and were left out", of.unreadable);
    }
    if of.dropped > 0 {
        let _ = writeln!(
            out,
            "note: {} spans were too many to be kept; shares are those of the others",
            of.dropped
        );
    }
    out.truncate(out.trim_end().len());
    out
}

fn share(out: &mut String, CauseShare { cause, seconds, share, steps }: &CauseShare) {
    let _ = writeln!(out, "{:>7.1} %  {:>9} s  {cause} (in {steps} steps)", 100.0 * share, digits(*seconds));
}

fn stall(out: &mut String, of: &Stall) {
    let Stall { cause, excess_s, median_s, longest_s, longest_step, steps, is_lasting } = of;
    let (excess, longest) = (digits(*excess_s), digits(*longest_s));
    if *is_lasting {
        let _ = writeln!(out, "  {cause}: the others waited {excess} s for it, in {} steps", steps.len());
        return;
    }
    let listed: Vec<String> = steps.iter().take(MAX_STEPS).map(u64::to_string).collect();
    let more = if steps.len() > MAX_STEPS { ", ..." } else { "" };
    let _ = writeln!(
        out,
        "  {cause}: {excess} s beyond its median of {} s, in step {}{more}; at most {longest} s, in step {longest_step}",
        digits(*median_s),
        listed.join(", ")
    );
}

pub(super) fn step(of: &ExplainedStep) -> String {
    let ExplainedStep { step, start_s, seconds, path } = of;
    let mut out = format!("step {step}: {} s, from second {} on", digits(*seconds), digits(*start_s));
    for (cause, part) in path {
        let _ = write!(
            out,
            "\n{:>7.1} %  {:>9} s  {cause}",
            100.0 * part / seconds.max(f64::MIN_POSITIVE),
            digits(*part)
        );
    }
    out
}
