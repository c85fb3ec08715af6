//! The report of a search.
//!
//! Invariant: it says what limits the best settings, and for every kind of setting by how much the best other value loses.

use std::fmt::Write;

use super::candidate::SearchCandidate;
use super::{FoundSettings, Ranked};
use crate::recipe::Recipe;
use crate::simulate::hardware::Hardware;
use crate::simulate::{digits, limits_in_words};

/// A kind of setting, in words, with its value.
type Setting = (&'static str, fn(&SearchCandidate) -> String);

const SETTINGS: [Setting; 7] = [
    ("placement", SearchCandidate::placement),
    ("staleness", |candidate| candidate.max_staleness.to_string()),
    ("running sequences", |candidate| candidate.max_running.to_string()),
    ("groups of a step", |candidate| candidate.batch_groups.to_string()),
    ("number format", |candidate| format!("{:?}", candidate.dtype).to_lowercase()),
    ("parallel degrees", SearchCandidate::degrees),
    ("transport of weights", |candidate| candidate.transport.as_str().to_owned()),
];

pub(super) fn text(found: &FoundSettings, recipe: &Recipe, hardware: &Hardware, gpus: u64) -> String {
    let gib = |bytes: f64| format!("{:.1} GiB", bytes / f64::from(1 << 30));
    let count = if gpus > 0 { format!("{gpus} x ") } else { String::new() };
    let mut out = format!(
        "{}: {} settings simulated on {count}{}\n\n{:28} {:>9} {:>7} {:>10} {:>9} {:>5} {:>24} {:>9} {:>10}\n",
        recipe.name,
        found.ranked.len(),
        hardware.name,
        "placement",
        "staleness",
        "running",
        "micro-batch",
        "recompute",
        "zero",
        "tokens/s p10, 50, 90",
        "step, s",
        "memory"
    );
    for (Ranked { candidate, memory, .. }, range) in &found.best {
        let speeds =
            [range.tokens_per_s.p10, range.tokens_per_s.p50, range.tokens_per_s.p90].map(digits).join(" ");
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "{:28} {:>9} {:>7} {:>11} {:>9} {:>5} {speeds:>24} {:>9} {:>10}",
            candidate.placement(),
            candidate.max_staleness,
            candidate.max_running,
            candidate.passes.microbatch_tokens,
            format!("{:?}", candidate.passes.recompute).to_lowercase(),
            candidate.passes.zero,
            digits(range.step_s.p50),
            gib(*memory)
        );
        let (degrees, transport) = (candidate.degrees(), candidate.transport.as_str());
        let limits = limits_in_words(range.limits());
        let _ = writeln!(out, "  parallel degrees {degrees}; weights by {transport}; limited by {limits}");
    }
    out.push_str("\nwhy the others lose (best of each, against the first)\n");
    let best = &found.best[0].0;
    for (name, value) in SETTINGS {
        out.push_str(&losers(found, best, name, value));
    }
    let (too_large, least) = found.too_large;
    if too_large > 0 {
        let _ = writeln!(
            out,
            "  memory: {too_large} faster settings of micro-batch, recomputation, ZeRO stage, degrees and transport do not fit {}; the \
             smallest of them needs {}",
            gib(hardware.memory_bytes.value),
            gib(least)
        );
    }
    for (reason, times) in &found.refused {
        let _ = writeln!(out, "  rules: {times} refused: {reason}");
    }
    for note in &found.notes {
        let _ = writeln!(out, "note: {note}");
    }
    out.truncate(out.trim_end().len());
    out
}

/// The best of every other value of a setting.
fn losers(found: &FoundSettings, best: &Ranked, name: &str, value: fn(&SearchCandidate) -> String) -> String {
    let own = value(&best.candidate);
    let mut seen: Vec<(String, &Ranked)> = Vec::new();
    for ranked in &found.ranked {
        let other = value(&ranked.candidate);
        let faster = seen.iter_mut().find(|(known, _)| *known == other);
        match faster {
            Some((_, known)) if ranked.tokens_per_s > known.tokens_per_s => *known = ranked,
            Some(_) => {}
            None if other != own => seen.push((other, ranked)),
            None => {}
        }
    }
    let parts = seen.iter().map(|(other, ranked)| {
        let change = 100.0 * (ranked.tokens_per_s / best.tokens_per_s - 1.0);
        format!("{other}: {change:+.0} % ({})", ranked.limits)
    });
    let parts: Vec<String> = parts.collect();
    if parts.is_empty() { String::new() } else { format!("  {name} {own}; {}\n", parts.join(", ")) }
}
