//! Rules of `[[rewards]]`: kinds, their keys, names and limits.
//!
//! Invariant: which kind takes which keys is known to the registry alone; here is only added where each stands.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rewards::{Registry, RewardError, RewardSpec};

use super::checks::{existing, model_or_dataset};
use super::ranges::Checker;
use super::schema::RawRecipe;
use crate::huggingface::RepositoryKind;

/// Checks all entries; fills in their names and what they take from other sections.
pub(super) fn check(raw: &mut RawRecipe, registry: &Registry, checker: &mut Checker<'_>) {
    let mut names = BTreeMap::new();
    let (max_length, wait_s) = (raw.rollout.max_completion_length, raw.deadlines.wait_s);
    let has_turns = raw.environment.as_ref().is_some_and(|environment| environment.max_turns > 1);
    for (index, reward) in raw.rewards.iter_mut().enumerate() {
        check_keys(index, reward, registry, checker);
        if reward.kind == "length" && reward.max_length.is_none() && has_turns {
            let path = format!("rewards[{index}].max_length");
            let message = format!(
                "`{path}` is not given, and `rollout.max_completion_length` limits one turn of an episode: the \
                 penalty counts the tokens of all turns and of the environment"
            );
            checker.report(&path, message, "set it to the tokens after the prompt that an episode may have");
        }
        if reward.kind == "length" {
            let max = *reward.max_length.get_or_insert(max_length);
            if reward.cache.is_some_and(|cache| cache > max) {
                let path = format!("rewards[{index}].cache");
                checker.report(&path, format!("`{path}` is more than the length limit of {max} tokens"), "");
            }
        }
        if let Some(path) = reward.path.take() {
            let key = format!("rewards[{index}].path");
            let help = "name a file, a model directory in Hugging Face format, or hf:OWNER/NAME";
            reward.path = match &reward.kind[..] {
                "python" => python_path(path, &key, help, checker),
                "model" => model_or_dataset(&path, RepositoryKind::Model, &key, help, checker),
                _ => existing(&path, &key, help, checker),
            };
        }
        if reward.timeout_s > wait_s {
            let path = format!("rewards[{index}].timeout_s");
            let message = format!(
                "`{path}` is longer than `deadlines.wait_s`, {wait_s}: a wait for it would end the run"
            );
            checker.report_latest(
                &[&path, "deadlines.wait_s"],
                message,
                "lower the timeout or raise the deadline",
            );
        }
        let name = reward.name.get_or_insert_with(|| reward.kind.clone()).clone();
        if let Some(first) = names.insert(name.clone(), index) {
            let message = format!("`rewards[{first}]` and `rewards[{index}]` are both named \"{name}\"");
            checker.report(&format!("rewards[{index}]"), message, "give one of them another `name`");
        }
    }
}

/// A Python file with what stands behind it, as an absolute path; a module as it is, since Python finds it.
pub(super) fn python_path(
    path: PathBuf,
    key: &str,
    help: &str,
    checker: &mut Checker<'_>,
) -> Option<PathBuf> {
    let Some((file, name)) = python_file(&path) else { return Some(path) };
    existing(Path::new(file), key, help, checker).map(|file| {
        let mut named = file.into_os_string();
        named.push(name);
        named.into()
    })
}

/// The file and `:function` of a path that is no module.
fn python_file(path: &Path) -> Option<(&str, &str)> {
    let path = path.to_str()?;
    let named = path.rsplit_once(':').filter(|(file, _)| file.ends_with(".py"));
    let (file, function) = named.map_or((path, ""), |(file, _)| path.split_at(file.len()));
    (file.ends_with(".py") || file.contains('/')).then_some((file, function))
}

/// Every kind takes its own keys and no others.
fn check_keys(index: usize, reward: &RewardSpec, registry: &Registry, checker: &mut Checker<'_>) {
    let at = |key: &str| format!("rewards[{index}].{key}");
    match registry.check(reward) {
        Ok(_) => {}
        Err(RewardError::UnknownKind { kind, known }) => {
            let names: Vec<_> = registry.names().collect();
            let help = match super::decode::nearest(&kind, &names) {
                _ if kind == "code" && cfg!(not(target_os = "linux")) => "its sandbox needs Linux".to_owned(),
                Some(near) => format!("did you mean \"{near}\"? there are {known}"),
                None => format!("there are {known}"),
            };
            checker.report(&at("kind"), format!("there is no reward of kind \"{kind}\""), &help);
        }
        Err(RewardError::ForeignField { kind, field, takes, .. }) => {
            let message = format!("the reward `{kind}` does not take `{field}`");
            checker.report(&at(&field), message, &format!("it takes {takes}"));
        }
        Err(RewardError::MissingField { kind, field, .. }) => {
            checker.report(&at("kind"), format!("the reward `{kind}` needs the key `{field}`"), "");
        }
        Err(RewardError::EmptyName { .. }) => {
            checker.report(
                &at("name"),
                format!("`{}` is empty", at("name")),
                "leave it out to name it by its kind",
            );
        }
        Err(error) => checker.report(&at("kind"), error.to_string(), ""),
    }
}
