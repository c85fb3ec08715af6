//! The recipe of a run that is resumed with other values.
//!
//! Invariant: a recipe to resume with differs from that of the run in keys that may change alone, and every value still
//! knows where it was first written, or which resume changed it. What follows from other keys (the learning rate of a critic
//! that has none of its own) follows from their new values.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value as Json, json};
use toml::{Table, Value};

use super::diagnostic::Diagnostic;
use super::layers::{self, Origins};
use super::schema::RawRecipe;
use super::source::Layer;
use super::{Recipe, checks, decode, manual, resolved};
use crate::program::Program;
pub(crate) use rules::{Rule, rule};

pub(super) mod rules;

/// Origin of a value that no layer gave.
const DEFAULT: &str = "default";

/// Values that a recipe takes from other keys if they are not written: the key or section they are under, and those that
/// they follow.
const FOLLOWERS: [(&str, &[&str]); 6] = [
    ("algorithm", &["algorithm"]),
    ("buffer", &["buffer"]),
    ("curation", &["curation"]),
    ("placement", &["placement"]),
    ("critic", &["critic", "trainer.learning_rate"]),
    ("rewards[].max_length", &["rollout.max_completion_length"]),
];

/// The recipe of a run with the changes of a resume.
#[derive(Debug)]
pub struct Resumption {
    /// The recipe to go on with.
    pub recipe: Recipe,
    /// Where its values come from.
    pub origins: Origins,
    /// The changed values, in the order of the recipe.
    pub changes: Vec<Change>,
}

/// A value that a resume changes.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// Dotted path, list elements as `rewards[0].timeout_s`.
    pub key: String,
    /// The value so far; `None` if there was none.
    pub from: Option<Value>,
    /// The value from now on.
    pub to: Option<Value>,
}

impl Change {
    /// The change as an event of the run holds it.
    #[must_use]
    pub fn to_json(&self) -> Json {
        json!({ "key": self.key, "from": self.from, "to": self.to })
    }
}

impl std::fmt::Display for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shown = |value: &Option<Value>| value.as_ref().map_or("none".to_owned(), Value::to_string);
        write!(f, "{} {} -> {}", self.key, shown(&self.from), shown(&self.to))
    }
}

impl Recipe {
    /// Values of `other` that differ from those of this recipe.
    #[must_use]
    pub fn changes_to(&self, other: &Self) -> Vec<Change> {
        changes(&resolved::table(self), &resolved::table(other))
    }

    /// Reads the resolved recipe of a run, changed by the variables of `program` and by `sets`, for the run's resume number
    /// `resume`, counted from 1.
    ///
    /// # Errors
    /// Those of [`Recipe::load`], and every changed key that may not change, with the reason.
    pub fn resume(
        resolved: &Path,
        sets: &[String],
        program: &Program,
        resume: usize,
    ) -> Result<Resumption, Vec<Diagnostic>> {
        let stem = resolved.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        let recorded = layers::read(resolved, &[], [])?;
        let (table, before_origins) = layers::merge(&recorded, &[])?;
        let raw_before = decode::decode(table, &recorded)?;
        let written_before = written(&raw_before);
        let before = checks::check(raw_before, stem, &before_origins, program)?;
        let origins_so_far = comments(&before_origins);

        let sources = layers::read(resolved, sets, program.environment().as_ref().clone())?;
        let following = following(&layers::merge(&sources, &[])?.1, &origins_so_far);
        let (table, mut origins) = layers::merge(&sources, &following)?;
        let raw = decode::decode(table, &sources)?;
        let run = resolved.parent().unwrap_or(Path::new("RUN"));
        let wanted = changes(&written_before, &written(&raw));
        // A refused change is not checked for mistakes.
        let recipe = checks::check(raw, stem, &origins, program).map_err(|mistakes| {
            let refused = refusals(&wanted, run, &origins);
            if refused.is_empty() { mistakes } else { refused }
        })?;
        let changes = changes(&resolved::table(&before), &resolved::table(&recipe));
        let refused = refusals(&changes, run, &origins);
        if !refused.is_empty() {
            return Err(refused);
        }
        if recipe.needs_reference() && !before.needs_reference() && recipe.algorithm.reference.is_none() {
            return Err(vec![without_reference(&origins)]);
        }
        let said = describe(&changes, &origins, origins_so_far, resume);
        origins.record(said);
        Ok(Resumption { recipe, origins, changes })
    }
}

/// The comment behind every value of a resolved recipe: where it was written first.
fn comments(origins: &Origins) -> BTreeMap<String, String> {
    let comment = |line: &str| line.rsplit_once("  # ").map(|(_, comment)| comment.to_owned());
    origins.iter().filter_map(|(path, origin)| Some((path.clone(), comment(&origin.key.text)?))).collect()
}

/// The values that no layer gave and that follow from what is changed: they are left out, to be made anew.
fn following(origins: &Origins, so_far: &BTreeMap<String, String>) -> Vec<String> {
    let under = |path: &str, section: &str| {
        path.strip_prefix(section).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let changed: Vec<&String> = origins
        .iter()
        .filter(|(_, origin)| matches!(origin.layer, Layer::Set | Layer::Environment))
        .map(|(path, _)| path)
        .collect();
    let is_changed = |section: &&str| changed.iter().any(|path| under(path, section));
    let follows = |path: &String| {
        let plain = manual::without_indexes(path);
        let of = |(follower, leaders): &(&str, &[&str])| {
            under(&plain, follower) && leaders.iter().any(&is_changed)
        };
        FOLLOWERS.iter().any(of)
    };
    let defaults = so_far.iter().filter(|(_, comment)| *comment == DEFAULT).map(|(path, _)| path);
    defaults.filter(|path| follows(path)).cloned().collect()
}

/// Every value by its path. A list of tables is taken apart, any other list is one value.
fn flat(value: &Value, path: &str, found: &mut Vec<(String, Value)>) {
    match value {
        Value::Table(table) => {
            for (key, value) in table {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                flat(value, &path, found);
            }
        }
        Value::Array(list) if list.first().is_some_and(Value::is_table) => {
            for (index, value) in list.iter().enumerate() {
                flat(value, &format!("{path}[{index}]"), found);
            }
        }
        value => found.push((path.to_owned(), value.clone())),
    }
}

fn changes(before: &Table, after: &Table) -> Vec<Change> {
    let flat = |table: &Table| {
        let mut found = Vec::new();
        flat(&Value::Table(table.clone()), "", &mut found);
        found
    };
    let (before, after) = (flat(before), flat(after));
    let value = |all: &[(String, Value)], path: &str| {
        all.iter().find(|(known, _)| known == path).map(|(_, value)| value.clone())
    };
    let gone = before.iter().filter(|(path, _)| value(&after, path).is_none());
    let paths = after.iter().chain(gone).map(|(path, _)| path.clone());
    let changes = paths.map(|key| Change { from: value(&before, &key), to: value(&after, &key), key });
    changes.filter(|change| change.from != change.to).collect()
}

/// A recipe as it is written, before anything is filled in.
fn written(raw: &RawRecipe) -> Table {
    Table::try_from(raw).unwrap_or_default()
}

/// Errors of changes that a resume may not make.
fn refusals(changes: &[Change], run: &Path, origins: &Origins) -> Vec<Diagnostic> {
    let mut refused: Vec<_> = changes.iter().filter_map(|change| refusal(change, run, origins)).collect();
    // A key that another key replaces (`model.random` by `model.path`) has no place.
    if refused.iter().any(|refusal| refusal.place.is_some()) {
        refused.retain(|refusal| refusal.place.is_some());
    }
    refused
}

/// The error of a change that a resume may not make.
fn refusal(change: &Change, run: &Path, origins: &Origins) -> Option<Diagnostic> {
    let key = &change.key;
    let place = origins.first_under(key).and_then(|path| Some(origins.get(&path)?.key.clone()));
    // A derived value has no line; the key that it is derived from has its own rule.
    let why = match rule(&key_of(key)) {
        Some(Rule::MayChange) => return None,
        Some(Rule::Stays(_)) if origins.get(key).is_none() && change.to.is_some() => return None,
        Some(Rule::Stays(why)) => why,
        None => "it is not known to be safe",
    };
    let message = format!("`{key}` cannot change when a run is resumed: {why}");
    let learnt = match key.starts_with("model.") {
        true => String::new(),
        false => format!(" --set model.path={}/checkpoints/STEP/model", run.display()),
    };
    let help = format!(
        "leave it out, or start a new run with it: rlrun RECIPE --name NAME --set {key}=VALUE{learnt}; `rlrun explain KEY` \
         says of every key whether it may change"
    );
    Some(Diagnostic::new(message, place).help(help))
}

/// The path of the key of a value: values under a table with keys of the user's own are values of that table's key.
fn key_of(path: &str) -> String {
    let plain = manual::without_indexes(path);
    let known = manual::keys().iter().map(|key| key.path.as_str());
    let of =
        |key: &&str| plain.strip_prefix(*key).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    known.filter(of).max_by_key(|key| key.len()).unwrap_or(&plain).to_owned()
}

/// A run that compared with nothing has kept nothing to compare with.
fn without_reference(origins: &Origins) -> Diagnostic {
    let key = ["algorithm.kl_coef", "supervised.kind"].into_iter().find_map(|key| origins.get(key));
    let message = "the run has not kept the policy that it started from, which it would have to be compared with from now on";
    let help = "name the reference in `algorithm.reference`, such as the model that the run started from";
    Diagnostic::new(message, key.map(|origin| origin.key.clone())).help(help)
}

/// Where every value comes from that a resume leaves or makes.
fn describe(
    changes: &[Change],
    origins: &Origins,
    mut so_far: BTreeMap<String, String>,
    resume: usize,
) -> BTreeMap<String, String> {
    for change in changes {
        let by = match origins.get(&change.key).map(|origin| origin.layer) {
            Some(Layer::Set) => "--set",
            Some(Layer::Environment) => "environment",
            _ => "follows",
        };
        so_far.insert(change.key.clone(), format!("resume {resume} ({by})"));
    }
    so_far
}
