//! What `[curation]` and the interruption of `[rollout]` may say.
//!
//! Invariant: as in `checks.rs`, all rules are tried and an error points at a line that the user wrote. Whether the text of
//! an interruption fits is known when there is a tokenizer, not here.

use super::ranges::{Checker, FRACTION, POSITIVE, SHARE};
use super::schema::{BufferSection, CurationSection, RawRecipe, Rollout};
use super::words::OnStale;

/// Checks both.
pub(super) fn check_curation(raw: &RawRecipe, checker: &mut Checker<'_>) {
    check_ranges(&raw.curation, checker);
    check_needs(&raw.curation, checker);
    check_groups(&raw.curation, &raw.rollout, checker);
    if raw.curation.turn_margin.is_some() && raw.environment.is_none() {
        let message = "`curation.turn_margin` has no effect without `[environment]`: an episode is one turn";
        checker.report("curation.turn_margin", message, "remove it");
    }
    check_success_pool(&raw.curation, &raw.buffer, checker);
    check_interruption(&raw.rollout, checker);
}

fn check_ranges(curation: &CurationSection, checker: &mut Checker<'_>) {
    for (path, value, bounds) in [
        ("curation.max_refill_ratio", curation.max_refill_ratio, POSITIVE),
        ("curation.max_pass_rate", curation.max_pass_rate.unwrap_or(1.0), FRACTION),
        ("curation.easy_pass_rate", curation.easy_pass_rate.unwrap_or(1.0), FRACTION),
        ("curation.easy_share", curation.easy_share, FRACTION),
        ("curation.hard_pass_rate", curation.hard_pass_rate.unwrap_or(0.0), SHARE),
        ("curation.hard_share", curation.hard_share, FRACTION),
        ("curation.shrink_above", curation.shrink_above.unwrap_or(0.0), SHARE),
    ] {
        checker.number(path, value, bounds);
    }
    if curation.filter_after == Some(0) {
        checker.report("curation.filter_after", "`curation.filter_after` is 0; it must be 1 or more", "");
    }
}

/// Keys that need others would be silently ignored without them.
fn check_needs(curation: &CurationSection, checker: &mut Checker<'_>) {
    for (key, needs) in curation.keys_without_effect() {
        let path = format!("curation.{key}");
        if checker.given(&path) {
            let help = format!("set `curation.{needs}` too, or remove it");
            checker.report(&path, format!("`{path}` has no effect without `curation.{needs}`"), &help);
        }
    }
    if let (Some(easy), Some(hard)) = (curation.easy_pass_rate, curation.hard_pass_rate)
        && hard >= easy
    {
        let message = format!("a task with a pass rate from {easy} to {hard} is both easy and hard");
        let paths = ["curation.hard_pass_rate", "curation.easy_pass_rate"];
        checker.report_latest(&paths, message, "make `hard_pass_rate` lower than `easy_pass_rate`");
    }
}

/// Groups need two trajectories to differ in.
fn check_groups(curation: &CurationSection, rollout: &Rollout, checker: &mut Checker<'_>) {
    let whole = rollout.group_size;
    if curation.dynamic_sampling && whole == 1 {
        let message =
            "`curation.dynamic_sampling` drops every group of one trajectory: its rewards are all equal";
        let paths = ["curation.dynamic_sampling", "rollout.group_size"];
        checker.report_latest(&paths, message, "raise `rollout.group_size`, or set it to false");
    }
    let least = curation.min_group_size;
    if curation.shrink_above.is_some() && !(2..=whole).contains(&least) {
        let message = format!(
            "`curation.min_group_size` is {least}; it must be from 2 to `rollout.group_size`, {whole}"
        );
        let paths = ["curation.min_group_size", "rollout.group_size", "curation.shrink_above"];
        checker.report_latest(&paths, message, "a trajectory that is compared with nothing teaches nothing");
    }
}

/// Waiting for slow groups counts on none being older than its admission.
fn check_success_pool(curation: &CurationSection, buffer: &BufferSection, checker: &mut Checker<'_>) {
    if !curation.success_pool {
        return;
    }
    if buffer.store.is_remote() {
        let message = "`curation.success_pool` needs a buffer that drops what is too old, and one that is served elsewhere \
                       does not say whether it does";
        let paths = ["curation.success_pool", "buffer.store"];
        checker.report_latest(&paths, message, "use `buffer.store` \"redb\" with `buffer.on_stale` \"drop\"");
    } else if buffer.on_stale == OnStale::Wait {
        let message = "`curation.success_pool` puts older trajectories into groups, and `buffer.on_stale` \"wait\" counts \
                       on no group being older than its admission";
        let paths = ["curation.success_pool", "buffer.on_stale"];
        checker.report_latest(&paths, message, "set `buffer.on_stale` to \"drop\"");
    }
}

/// The text and its place: all three keys or none.
fn check_interruption(rollout: &Rollout, checker: &mut Checker<'_>) {
    const KEYS: [&str; 3] =
        ["rollout.interrupt_text", "rollout.interrupt_after_min", "rollout.interrupt_after_max"];
    let given = [
        rollout.interrupt_text.is_some(),
        rollout.interrupt_after_min.is_some(),
        rollout.interrupt_after_max.is_some(),
    ];
    let (Some(first), Some(missing)) = (given.iter().position(|g| *g), given.iter().position(|g| !g)) else {
        if let (Some(min), Some(max)) = (rollout.interrupt_after_min, rollout.interrupt_after_max) {
            check_places(min, max, rollout.max_completion_length, checker);
        }
        return;
    };
    let message = format!("`{}` says nothing without `{}`", KEYS[first], KEYS[missing]);
    checker.report(KEYS[first], message, "an interruption has a text, and a range of places where it comes");
}

fn check_places(min: usize, max: usize, longest: usize, checker: &mut Checker<'_>) {
    let message = if min == 0 {
        "`rollout.interrupt_after_min` is 0; it must be 1 or more".to_owned()
    } else if max < min {
        format!("`rollout.interrupt_after_max` is {max}, less than `rollout.interrupt_after_min`, {min}")
    } else if max >= longest {
        format!(
            "an interruption after {max} tokens never comes: `rollout.max_completion_length` is {longest}"
        )
    } else {
        return;
    };
    let paths =
        ["rollout.interrupt_after_max", "rollout.interrupt_after_min", "rollout.max_completion_length"];
    checker.report_latest(&paths, message, "places are counted in tokens of the completion");
}

#[cfg(test)]
mod tests {
    use std::fs;

    use crate::recipe::Recipe;

    const BASE: &str =
        "[model.random]\n[data.arithmetic]\n[[rewards]]\nkind = \"exact\"\n[trainer]\nsteps = 5\n";

    fn load(sets: &[&str]) -> Result<Recipe, String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run.toml");
        fs::write(&path, BASE).unwrap();
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let loaded = Recipe::load(&path, &sets, &crate::program::Program::default());
        let (recipe, origins) =
            loaded.map_err(|errors| errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))?;
        // The recipe in the run directory loads as the same recipe.
        let resolved = directory.path().join("resolved.toml");
        fs::write(&resolved, recipe.resolved_toml(&origins)).unwrap();
        assert_eq!(Recipe::load(&resolved, &[], &crate::program::Program::default()).unwrap().0, recipe);
        Ok(recipe)
    }

    #[test]
    fn everything_is_off_by_default_and_everything_can_be_on() {
        assert!(!load(&[]).unwrap().curation.is_on());
        let all = load(&[
            "curation.dynamic_sampling=true",
            "curation.max_refill_ratio=3.5",
            "curation.max_pass_rate=0.9",
            "curation.filter_after=16",
            "curation.easy_pass_rate=0.8",
            "curation.easy_share=0.5",
            "curation.hard_pass_rate=0.2",
            "curation.hard_share=0.25",
            "curation.shrink_above=0.6",
            "curation.min_group_size=4",
            "curation.turn_margin=2",
            "environment.kind=retry",
            "curation.success_pool=true",
            "buffer.on_stale=drop",
            "rollout.interrupt_text=Time is up.",
            "rollout.interrupt_after_min=10",
            "rollout.interrupt_after_max=12",
        ]);
        assert!(all.unwrap().curation.is_on());
    }

    #[test]
    fn keys_that_would_do_nothing_or_harm_are_refused() {
        for (sets, evidence) in [
            (&["curation.max_refill_ratio=3"][..], "has no effect without `curation.dynamic_sampling`"),
            (&["curation.easy_share=0.5"], "has no effect without `curation.easy_pass_rate`"),
            (&["curation.min_group_size=4"], "has no effect without `curation.shrink_above`"),
            (&["curation.max_pass_rate=1.5"], "must be above 0 and at most 1"),
            (&["curation.filter_after=0"], "must be 1 or more"),
            (&["curation.easy_pass_rate=0.3", "curation.hard_pass_rate=0.4"], "both easy and hard"),
            (&["curation.easy_pass_rate=0.8", "curation.easy_share=0"], "above 0 and at most 1"),
            (&["curation.shrink_above=1.0"], "at least 0 and below 1"),
            (
                &["curation.shrink_above=0.6", "curation.min_group_size=9"],
                "from 2 to `rollout.group_size`, 8",
            ),
            (&["curation.turn_margin=2"], "has no effect without `[environment]`"),
            (&["curation.success_pool=true"], "set `buffer.on_stale` to \"drop\""),
            (
                &["curation.success_pool=true", "buffer.store=http", "buffer.url=http://127.0.0.1:1"],
                "served elsewhere does not say",
            ),
            (&["rollout.interrupt_text=x"], "says nothing without `rollout.interrupt_after_min`"),
            (&["rollout.interrupt_after_max=9"], "says nothing without `rollout.interrupt_text`"),
            (
                &[
                    "rollout.interrupt_text=x",
                    "rollout.interrupt_after_min=9",
                    "rollout.interrupt_after_max=8",
                ],
                "less than `rollout.interrupt_after_min`, 9",
            ),
            (
                &[
                    "rollout.interrupt_text=x",
                    "rollout.interrupt_after_min=9",
                    "rollout.interrupt_after_max=512",
                ],
                "never comes",
            ),
        ] {
            let error = load(sets).unwrap_err();
            assert!(error.contains(evidence), "{sets:?}: {error}");
        }
    }
}
