//! `rlrun explain`: the meaning of a key, a section or a word of a recipe, or of a metric; `markdown`: chapters of the book.
//!
//! Invariant: all text comes from the manual in the binary ([`crate::recipe`]'s comments, types and defaults), from the
//! registry of rewards and from the table of metrics; this module adds no explanation.

mod markdown;

use crate::args::ExplainArgs;
use crate::failure::Failure;
use crate::metrics::{METRICS, meaning};
use crate::program::Program;
use crate::recipe::decode::nearest;
use crate::recipe::manual::{self, Key, Section};
use crate::recipe::peers;
use crate::recipe::resume::{Rule, rule};
use crate::recipe::schema::AlgorithmSection;
use crate::recipe::words::AlgorithmKind;
use crate::report::wrapped;

/// Characters of a line.
const WIDTH: usize = 80;

/// Explains each of the names; the sections if there is none.
///
/// # Errors
/// A name that means nothing, with the nearest that does.
pub(crate) fn run(args: &ExplainArgs, program: &Program) -> Result<String, Failure> {
    if let Some(chapter) = args.markdown {
        return Ok(markdown::chapter(chapter, program));
    }
    if args.names.is_empty() {
        return Ok(overview());
    }
    let texts: Result<Vec<_>, _> = args.names.iter().map(|name| explain(name, program)).collect();
    Ok(texts?.join("\n\n"))
}

/// All sections, a line or two for each.
fn overview() -> String {
    let mut text =
        "sections of a recipe; `rlrun explain SECTION` lists its keys, `rlrun explain KEY` says all of one\n"
            .to_owned();
    for section in manual::sections() {
        let about = match section.path.as_str() {
            "" => names(section).join(", "),
            _ => first_sentence(&section.about),
        };
        text += &format!("\n{}\n{}", heading(section), paragraph(&about, 4));
    }
    text
}

fn explain(asked: &str, program: &Program) -> Result<String, Failure> {
    let name = normal(asked);
    let bare = |path: &str| path.replace("[]", "");
    let mut texts: Vec<String> = Vec::new();
    let whole = manual::keys().iter().find(|key| bare(&key.path) == name || of_element(&key.path, &name));
    texts.extend(whole.map(|key| describe(key)));
    let section = manual::sections().iter().find(|section| !name.is_empty() && bare(&section.path) == name);
    texts.extend(section.map(contents));
    if texts.is_empty() {
        let named: Vec<&&Key> = manual::keys().iter().filter(|key| key.name() == name).collect();
        texts.extend(named.iter().map(|key| describe(key)));
        texts.extend(
            manual::sections()
                .iter()
                .filter(|of| bare(&of.path).ends_with(&format!(".{name}")))
                .map(contents),
        );
    }
    texts.extend(words(&name, program));
    texts.extend(metric(asked.trim()));
    if texts.is_empty() {
        texts.extend(foreign(&name));
    }
    if texts.is_empty() {
        return Err(Failure::Argument(unknown(asked, &name, program)));
    }
    Ok(texts.join("\n\n"))
}

/// `[trainer]`, `rewards[0].weight` and `trainer.steps=5` as `trainer`, `rewards.weight` and `trainer.steps`.
fn normal(asked: &str) -> String {
    let name = asked.trim().trim_start_matches("--").split('=').next().unwrap_or_default().trim();
    let name = if name.starts_with('[') { name.trim_matches(['[', ']']) } else { name };
    manual::without_indexes(name).replace("[]", "").to_ascii_lowercase().replace('-', "_")
}

/// Whether `name` is a key of an element that is called by its name, such as `rewards.math.weight`.
fn of_element(path: &str, name: &str) -> bool {
    let Some((list, key)) = path.split_once("[].") else { return false };
    let inner = name.strip_prefix(list).and_then(|rest| rest.strip_prefix('.'));
    inner.and_then(|rest| rest.split_once('.')).is_some_and(|(_, rest)| rest == key)
}

/// All of a key.
fn describe(key: &Key) -> String {
    let mut text = key.path.clone();
    let mut line = |name: &str, value: &str| {
        let value = wrapped(value, WIDTH - 13).join(&format!("\n{:13}", ""));
        text += &format!("\n  {name:9}  {value}");
    };
    line("type", &key.kind.to_string());
    key.unit().into_iter().for_each(|unit| line("unit", unit));
    line("default", &default(key));
    match rule(&key.path) {
        Some(Rule::MayChange) => line("resume", "may change"),
        Some(Rule::Stays(why)) => line("resume", &format!("stays: {why}")),
        None => {}
    }
    let elsewhere: Vec<&str> = peers::names_of(&key.path).collect();
    if !elsewhere.is_empty() {
        line("elsewhere", &elsewhere.join(", "));
    }
    text += &format!("\n\n{}", paragraph(&key.about, 2));
    for (word, about) in key.kind.words() {
        text += &format!("\n\n  \"{word}\"\n{}", paragraph(about, 6));
    }
    text
}

/// The default of a key as it would be written.
fn default(key: &Key) -> String {
    match &key.default {
        Some(value) => value.to_string(),
        None => "none".to_owned(),
    }
}

/// The keys of a section with their defaults.
fn contents(section: &Section) -> String {
    let mut text = format!("{}\n{}\n", heading(section), paragraph(&section.about, 2));
    for key in &section.keys {
        let (name, default) = (key.name(), default(key));
        let value = wrapped(&format!("{name} = {default}"), WIDTH - 6).join("\n      ");
        text += &format!("\n  {value}\n{}", paragraph(&first_sentence(&key.about), 6));
    }
    let prefix = format!("{}.", section.path);
    let inner = manual::sections().iter().filter(|inner| inner.path.starts_with(&prefix)).map(heading);
    let inner: Vec<String> = inner.collect();
    if !inner.is_empty() {
        text += &format!("\n\n{}", paragraph(&format!("sections inside: {}", inner.join(", ")), 2));
    }
    text
}

/// The meaning of `word` for every key that takes it.
fn words(word: &str, program: &Program) -> Vec<String> {
    let mut texts = Vec::new();
    for key in manual::keys() {
        let same = |known: &str| known.replace('-', "_") == word;
        for (known, about) in key.kind.words().iter().filter(|(known, _)| same(known)) {
            let mut text = format!("{} = \"{known}\"\n{}", key.path, paragraph(about, 2));
            let kind = AlgorithmKind::ALL.iter().find(|kind| kind.as_str() == known);
            if let Some(&kind) = kind.filter(|_| key.path == "algorithm.kind") {
                text += &format!("\n\n{}", of_algorithm(kind));
            }
            texts.push(text);
        }
    }
    texts.extend(program.registry().kind(word).map(|kind| {
        let mut text = format!("rewards[].kind = \"{word}\"\n\n  keys of its own:");
        for name in kind.parameters() {
            let about = manual::keys().iter().find(|key| key.path == format!("rewards[].{name}"));
            let about = about.map_or(String::new(), |key| first_sentence(&key.about));
            text += &format!("\n\n  {name}\n{}", paragraph(&about, 6));
        }
        if kind.parameters().is_empty() {
            text += " none";
        }
        text
    }));
    texts
}

/// The unit and meaning of a metric.
fn metric(name: &str) -> Option<String> {
    let found = meaning(name)?;
    Some(format!("{name}\n  unit       {}\n\n{}", found.unit, paragraph(found.about, 2)))
}

/// The keys of `[algorithm]` as an algorithm has them.
fn of_algorithm(kind: AlgorithmKind) -> String {
    let table = toml::Table::try_from(AlgorithmSection::usual(kind)).unwrap_or_default();
    let keys = table.iter().filter(|(key, _)| *key != "kind");
    let lines: Vec<String> = keys.map(|(key, value)| format!("    {key} = {value}")).collect();
    format!("  its keys of [algorithm], if they are not given:\n{}", lines.join("\n"))
}

/// The counterpart of another framework's name.
fn foreign(name: &str) -> Option<String> {
    let peer = peers::peer(name)?;
    let text = format!("{name}\n{}", paragraph(&peer.hint(), 2));
    let key = manual::keys().iter().find(|key| key.path == peer.key);
    Some(key.map_or_else(|| text.clone(), |key| format!("{text}\n\n{}", describe(key))))
}

fn unknown(asked: &str, name: &str, program: &Program) -> String {
    let keys = manual::keys().iter().flat_map(|key| [key.name(), key.path.as_str()]);
    let sections = manual::sections().iter().map(|section| section.path.as_str());
    let words = manual::keys().iter().flat_map(|key| key.kind.words()).map(|(word, _)| word.as_str());
    let all = keys.chain(sections).chain(words).chain(program.registry().names());
    let mut all: Vec<&str> = all.filter(|known| !known.is_empty()).collect();
    for metric in METRICS.iter().flat_map(|section| section.metrics) {
        metric.names().for_each(|name| all.push(name));
    }
    let near = nearest(name, &all).map(|near| format!("did you mean `{near}`? "));
    let near = near.unwrap_or_default();
    format!("there is no key, section, word or metric `{asked}`; {near}`rlrun explain` lists all sections")
}

/// `[trainer]`, and whether it has to be written.
fn heading(section: &Section) -> String {
    let path = section.path.as_str();
    match (path.strip_suffix("[]"), section.optional) {
        (Some(list), _) => format!("[[{list}]]"),
        (None, true) => format!("[{path}], optional"),
        (None, false) if path.is_empty() => "(outside of sections)".to_owned(),
        (None, false) => format!("[{path}]"),
    }
}

fn names(section: &Section) -> Vec<&str> {
    section.keys.iter().map(Key::name).collect()
}

/// Up to the first full stop; without the name of the section that it begins with.
fn first_sentence(about: &str) -> String {
    let about =
        if about.starts_with("`[") { about.split_once("`: ").map_or(about, |(_, rest)| rest) } else { about };
    let line = about.split("\n\n").next().unwrap_or_default();
    let end = line.find(". ").map_or(line.len(), |end| end + 1);
    line[..end].to_owned()
}

/// Paragraphs of whole words, indented.
fn paragraph(text: &str, indent: usize) -> String {
    let indented = |line: &String| format!("{:indent$}{line}", "");
    let lines = |part: &str| {
        let lines: Vec<String> = wrapped(part, WIDTH - indent).iter().map(indented).collect();
        lines.join("\n")
    };
    text.split("\n\n").map(lines).collect::<Vec<_>>().join("\n\n")
}

#[cfg(test)]
mod tests {
    use rewards::Registry;

    use super::*;

    fn shown(names: &[&str]) -> Result<String, Failure> {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        run(&ExplainArgs { names, markdown: None }, &Program::new(Registry::builtin(), []))
    }

    #[test]
    fn a_key_has_its_type_unit_default_meaning_and_the_names_of_peers() {
        let expected = "\
trainer.steps
  type       whole number, 0 or more
  unit       steps
  default    0
  resume     may change
";
        let text = shown(&["trainer.steps"]).unwrap();
        assert!(text.starts_with(expected), "{text}");
        for part in
            ["  elsewhere  ", "max_steps", "total_training_steps", "\n  Training steps of the run; required."]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        let text = shown(&["model.path"]).unwrap();
        assert!(
            text.contains("type       path\n  default    none\n  resume     stays: the policy is"),
            "{text}"
        );
        let text = shown(&["algorithm.correction"]).unwrap();
        assert!(
            text.contains("type       one of none, token_truncate, ") && text.contains("\"k3_mask\"\n"),
            "{text}"
        );
        let text = shown(&["deadlines.wait_s"]).unwrap();
        assert!(text.contains("unit       seconds\n  default    600.0\n"), "{text}");
    }

    #[test]
    fn keys_are_found_however_they_are_written() {
        let expected = shown(&["rewards[].weight"]).unwrap();
        assert!(
            expected.starts_with("rewards[].weight\n") && expected.contains("default    1.0"),
            "{expected}"
        );
        for name in
            ["rewards.weight", "rewards[0].weight", "rewards.math.weight", "rewards[0].weight=0.5", "weight"]
        {
            assert_eq!(shown(&[name]).unwrap(), expected, "{name}");
        }
        let text = shown(&["learning_rate"]).unwrap();
        for path in ["trainer.learning_rate\n", "critic.learning_rate\n", "warmup.learning_rate\n"] {
            assert!(text.contains(path), "{text}");
        }
    }

    #[test]
    fn sections_words_and_foreign_names_are_explained_too() {
        let text = shown(&["[buffer]"]).unwrap();
        assert!(text.starts_with("[buffer]\n") && text.contains("\n  max_staleness = 4\n"), "{text}");
        assert!(shown(&["model"]).unwrap().contains("sections inside: [model.random], optional"));
        let text = shown(&["grpo"]).unwrap();
        assert!(
            text.starts_with("algorithm.kind = \"grpo\"\n  GRPO (DeepSeekMath, arXiv 2402.03300)"),
            "{text}"
        );
        assert!(text.contains("\n    clip_eps_low = 0.2\n"), "{text}");
        let text = shown(&["gsm8k"]).unwrap();
        assert!(text.contains("rewards[].kind = \"gsm8k\"") && text.contains("\n  method\n"), "{text}");
        let text = shown(&["num_generations"]).unwrap();
        assert!(text.contains("rlrun calls it `rollout.group_size`\n\nrollout.group_size\n"), "{text}");
        assert!(shown(&["report_to"]).unwrap().contains("metrics.jsonl"));
        let text = shown(&[]).unwrap();
        for section in manual::sections() {
            assert!(text.contains(&format!("\n{}\n", heading(section))), "{}: {text}", section.path);
        }
        assert_eq!(shown(&["seed", "lora"]).unwrap().matches("\n\n[lora], optional\n").count(), 1);
    }

    #[test]
    fn metrics_have_a_unit_and_a_meaning() {
        let expected = "kl/ref\n  unit       nats per token\n\n  Divergence of the policy from the reference";
        let text = shown(&["kl/ref"]).unwrap();
        assert!(text.starts_with(expected), "{text}");
        assert!(shown(&["eval/aime/pass@8"]).unwrap().contains("Chen et al. 2021"));
    }

    #[test]
    fn unknown_words_lead_to_the_nearest_known_one() {
        for (name, near) in [
            ("trainer.learning_rat", "`trainer.learning_rate`"),
            ("max_stalenes", "`max_staleness`"),
            ("gpro", "`grpo`"),
            ("reward/meen", "`reward/mean`"),
            ("", "lists all sections"),
            ("xyzzy", "`rlrun explain` lists all sections"),
        ] {
            let failure = shown(&[name]).unwrap_err();
            assert_eq!(failure.exit_code(), 2);
            assert!(failure.to_string().contains(near), "{failure}");
        }
    }

    #[test]
    fn no_line_is_wider_than_a_terminal() {
        let all = manual::keys().iter().map(|key| key.path.as_str()).chain([
            "grpo",
            "math",
            "judge",
            "[trainer]",
            "lora",
            "reward/x/latency_p95_s",
        ]);
        for name in all {
            for line in shown(&[name]).unwrap().lines() {
                assert!(line.chars().count() <= WIDTH, "{name}: {line}");
            }
        }
    }
}
