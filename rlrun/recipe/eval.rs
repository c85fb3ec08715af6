//! The rules of `[eval]`, and the definition of correct answers.
//!
//! Invariant: a checked recipe has a full criterion or none; without one, a key that needs it is refused.

use std::collections::BTreeSet;

use rewards::Criterion;
use rewards::criterion::VERIFIABLE;

use super::Recipe;
use super::checks::all_existing;
use super::ranges::{ANY, Checker};
use super::schema::{Correct, EvalSet, RawRecipe, Warmup};

/// Name of the set of `data.eval` or `data.arithmetic`.
pub const DEFAULT_SET: &str = "default";

/// Checks the section; fills in the criterion and the paths of the sets. `warmup` is that of the recipe, taken out of it.
pub(super) fn check(raw: &mut RawRecipe, warmup: Option<&Warmup>, checker: &mut Checker<'_>) {
    checker.at_least_one("eval.samples", raw.eval.samples);
    check_criterion(raw, checker);
    check_who_asks(raw, warmup, checker);
    let mut names = BTreeSet::from([DEFAULT_SET.to_owned()]);
    let environments: Vec<String> =
        raw.environment.iter().flat_map(|environment| environment.named.keys().cloned()).collect();
    for (index, set) in raw.eval.sets.iter_mut().enumerate() {
        check_set(index, set, &mut names, &environments, checker);
    }
    let sampled = |set: &EvalSet| set.samples.unwrap_or(1) > 1;
    let several = match raw.eval.sets.iter().position(sampled) {
        _ if raw.eval.samples > 1 => "eval.samples".to_owned(),
        Some(index) => format!("eval.sets[{index}].samples"),
        None => return,
    };
    if raw.eval.temperature == 0.0 {
        let message =
            format!("`{several}` asks for several answers, which are all the same at temperature 0");
        let help = "set `eval.temperature` above 0, such as to `rollout.temperature`";
        checker.report_latest(&[&several, "eval.temperature"], message, help);
    }
}

fn check_criterion(raw: &mut RawRecipe, checker: &mut Checker<'_>) {
    let first = Criterion::first(&raw.rewards);
    let Some(given) = &mut raw.eval.correct else {
        let filled = |Criterion { reward, threshold }| Correct { reward: Some(reward), threshold };
        raw.eval.correct = first.map(filled);
        return;
    };
    checker.number("eval.correct.threshold", given.threshold, ANY);
    let Some(reward) = &given.reward else {
        given.reward = first.map(|first| first.reward);
        if given.reward.is_none() {
            let message = "`eval.correct` names no reward, and none of the recipe is verifiable";
            checker.report("eval.correct", message, "name one: `eval.correct.reward`");
        }
        return;
    };
    if !raw.rewards.iter().any(|spec| spec.name() == reward) {
        let names: Vec<String> = raw.rewards.iter().map(|spec| format!("\"{}\"", spec.name())).collect();
        let message = format!("`eval.correct.reward`: there is no reward named \"{reward}\"");
        checker.report("eval.correct.reward", message, &format!("there are {}", names.join(", ")));
    }
}

/// Refuses keys that need a definition of correct answers if there is none.
fn check_who_asks(raw: &RawRecipe, warmup: Option<&Warmup>, checker: &mut Checker<'_>) {
    if raw.eval.correct.is_some() {
        return;
    }
    let kind = raw.algorithm.kind.as_str();
    let stops = warmup.is_some_and(|warmup| warmup.stop_accuracy.is_some());
    let learns = raw.supervised.is_none() && raw.algorithm.algorithm().needs_correct();
    for (asks, path, who) in [
        (stops, "warmup.stop_accuracy", "`warmup.stop_accuracy`".to_owned()),
        (learns, "algorithm.kind", format!("`algorithm.kind = \"{kind}\"`")),
        (raw.curation.asks_what_passes(), "curation", "`[curation]`".to_owned()),
    ] {
        if asks {
            let path = checker.first_given(path).unwrap_or_else(|| path.to_owned());
            let message =
                format!("{who} needs a definition of correct answers, and no reward of the recipe has one");
            checker.report(&path, message, "name the reward that defines them: `eval.correct.reward`");
        }
    }
}

fn check_set(
    index: usize,
    set: &mut EvalSet,
    names: &mut BTreeSet<String>,
    environments: &[String],
    checker: &mut Checker<'_>,
) {
    let at = |key: &str| format!("eval.sets[{index}].{key}");
    let EvalSet { name, .. } = &set;
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || !name.chars().all(plain) {
        let message =
            format!("`{}` is \"{}\", which cannot stand in a metric", at("name"), name.escape_debug());
        checker.report(&at("name"), message, "use letters, digits, `-`, `_` and `.`");
    } else if !names.insert(name.clone()) {
        let message = format!("`{}`: there is another set named \"{name}\"", at("name"));
        checker.report(&at("name"), message, "`data.eval` is the one named \"default\"; choose another name");
    }
    if set.prompt_column.is_some() && set.prompt_template.is_some() {
        let message = format!("`{}` has no effect beside `{}`", at("prompt_column"), at("prompt_template"));
        checker.report(&at("prompt_column"), message, "remove one of them");
    }
    checker.at_least_one(&at("tasks"), set.tasks.unwrap_or(1));
    checker.at_least_one(&at("samples"), set.samples.unwrap_or(1));
    if let Some(name) = set.environment.as_ref().filter(|name| !environments.contains(name)) {
        let message = format!("`{}`: there is no environment named \"{name}\"", at("environment"));
        let help = format!("write a section `[environment.named.{name}]`");
        checker.report(&at("environment"), message, &help);
    }
    if set.path.is_empty() {
        if set.environment.is_none() {
            let message = format!("`{}` is empty, and the set is in no other environment", at("path"));
            checker.report(&at("path"), message, "name a file");
        }
        return;
    }
    if let Some(found) = all_existing(&set.path, &at("path"), checker) {
        set.path = found;
    }
}

/// Keys about evaluation without tasks for it would be silently ignored.
pub(super) fn check_effect(recipe: &Recipe, checker: &mut Checker<'_>) {
    if recipe.has_eval_tasks() {
        return;
    }
    for path in WITHOUT_TASKS.map(|key| format!("eval.{key}")) {
        if checker.given(&path) {
            let help = "name held-out tasks in `data.eval`, `data.arithmetic.eval_tasks` or `[[eval.sets]]`, or remove it";
            checker.report(&path, format!("`{path}` has no effect: there are no held-out tasks"), help);
        }
    }
}

/// Keys of `[eval]` that say nothing where there are no held-out tasks.
pub(super) const WITHOUT_TASKS: [&str; 4] = ["interval", "tasks", "samples", "temperature"];

impl Recipe {
    /// Which answers are correct; `None` if nothing says so.
    #[must_use]
    pub fn criterion(&self) -> Option<Criterion> {
        let Correct { reward, threshold } = self.eval.correct.as_ref()?;
        Some(Criterion { reward: reward.clone()?, threshold: *threshold })
    }

    /// Which answers are correct, in words; `None` where nothing is rewarded.
    #[must_use]
    pub fn describe_correct(&self) -> Option<String> {
        if self.rewards.is_empty() {
            return None;
        }
        Some(match self.criterion() {
            Some(Criterion { reward, threshold }) => {
                format!("correct: answers for which reward `{reward}` is at least {threshold}")
            }
            None => format!(
                "correct: nothing says which answers are, so no accuracy is measured: no reward is verifiable ({}); \
                 `eval.correct.reward` names the one that judges",
                VERIFIABLE.join(", ")
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rewards::Criterion;

    use crate::program::Program;
    use crate::recipe::Recipe;

    const BASE: &str = "[model.random]\n[data.arithmetic]\n[trainer]\nsteps = 5\n";

    /// The recipe with these further lines, and with `test.jsonl` beside it.
    fn load(text: &str, sets: &[&str]) -> Result<Recipe, String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run.toml");
        fs::write(&path, format!("{BASE}{text}")).unwrap();
        fs::write(directory.path().join("test.jsonl"), "").unwrap();
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let (recipe, origins) = Recipe::load(&path, &sets, &Program::default())
            .map_err(|errors| errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))?;
        let resolved = directory.path().join("resolved.toml");
        fs::write(&resolved, recipe.resolved_toml(&origins)).unwrap();
        assert_eq!(Recipe::load(&resolved, &[], &Program::default()).unwrap().0, recipe);
        Ok(recipe)
    }

    const FORMAT: &str = "[[rewards]]\nkind = \"format\"\n";
    const BOTH: &str =
        "[[rewards]]\nkind = \"format\"\n[[rewards]]\nkind = \"exact\"\nname = \"sum\"\nweight = 0.5\n";

    #[test]
    fn the_first_verifiable_reward_says_what_is_correct_unless_another_is_named() {
        let criterion = |reward: &str, threshold| Some(Criterion { reward: reward.to_owned(), threshold });
        for (text, sets, expected) in [
            (BOTH, &[][..], criterion("sum", 1.0)),
            (BOTH, &["eval.correct.threshold=0.25"], criterion("sum", 0.25)),
            (BOTH, &["eval.correct.reward=format", "eval.correct.threshold=-1"], criterion("format", -1.0)),
            (FORMAT, &["eval.correct.reward=format"], criterion("format", 1.0)),
            (FORMAT, &[], None),
            // Also without held-out tasks: samples say what is correct, and algorithms ask.
            (BOTH, &["data.arithmetic.eval_tasks=0", "eval.correct.threshold=0.5"], criterion("sum", 0.5)),
        ] {
            let recipe = load(text, sets).unwrap();
            assert_eq!(recipe.criterion(), expected, "{sets:?}");
            let described = recipe.describe_correct().unwrap();
            assert_eq!(described.contains("no accuracy is measured"), expected.is_none(), "{described}");
        }
    }

    #[test]
    fn an_undefined_criterion_is_refused() {
        for (sets, evidence) in [
            (&["eval.correct.reward=maths"][..], "there is no reward named \"maths\""),
            (&["eval.correct.threshold=0.5"], "`eval.correct` names no reward"),
            (&["eval.correct.threshold=nan", "eval.correct.reward=format"], "it must be a finite number"),
            (
                &["algorithm.kind=pass_at_k"],
                "`algorithm.kind = \"pass_at_k\"` needs a definition of correct answers",
            ),
            (&["algorithm.kind=hpt"], "`algorithm.kind = \"hpt\"` needs a definition of correct answers"),
            (&["algorithm.kind=vapo"], "`algorithm.kind = \"vapo\"` needs a definition of correct answers"),
            (&["curation.max_pass_rate=0.9"], "`[curation]` needs a definition of correct answers"),
            (&["warmup.stop_accuracy=0.9"], "`warmup.stop_accuracy` needs a definition of correct answers"),
            (&["curation.max_pass_rate=0.9", "curation.pass_reward=1"], "calls it `eval.correct.threshold`"),
        ] {
            let error = load(FORMAT, sets).unwrap_err();
            assert!(error.contains(evidence), "{sets:?}: {error}");
        }
        for kind in ["pass_at_k", "hpt", "vapo"] {
            load(BOTH, &[&format!("algorithm.kind={kind}")]).unwrap();
        }
        load(FORMAT, &["algorithm.kind=vapo", "algorithm.nll_coef=0"]).unwrap();
    }

    #[test]
    fn several_answers_need_a_temperature_and_sets_need_names() {
        let set =
            |lines: &str| format!("{BOTH}[[eval.sets]]\nname = \"other\"\npath = \"test.jsonl\"\n{lines}");
        let recipe = load(&set("samples = 4\nanswer_column = \"a\"\n"), &["eval.temperature=0.7"]).unwrap();
        assert!(recipe.eval.sets[0].path[0].is_absolute() && recipe.eval.sets[0].samples == Some(4));
        let only = load(&set(""), &["data.arithmetic.eval_tasks=0", "eval.interval=3"]).unwrap();
        assert!(only.has_eval_tasks());
        for (text, sets, evidence) in [
            (BOTH.to_owned(), &["eval.samples=8"][..], "`eval.samples` asks for several answers"),
            (set("samples = 2\n"), &[], "`eval.sets[0].samples` asks for several answers"),
            (BOTH.to_owned(), &["eval.samples=0"], "it must be 1 or more"),
            (set("tasks = 0\n"), &[], "`eval.sets[0].tasks` is 0"),
            (set("prompt_column = \"a\"\nprompt_template = \"{b}\"\n"), &[], "has no effect beside"),
            (set("").replace("other", "default"), &[], "there is another set named \"default\""),
            (set("").replace("other", "a/b"), &[], "cannot stand in a metric"),
            (set("").replace("test.jsonl", "gone.jsonl"), &[], "there is no `gone.jsonl`"),
            (set("pth = 1\n"), &[], "unknown key `eval.sets[0].pth`"),
        ] {
            let error = load(&text, sets).unwrap_err();
            assert!(error.contains(evidence), "{sets:?}: {error}");
        }
    }
}
