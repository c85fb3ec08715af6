//! The reference chapters of the book: the manual in the binary as Markdown.
//!
//! Invariant: a chapter has all that `rlrun explain` knows of its subject and nothing else. `docs/book.py` writes them into the
//! book, so that a key, a metric or a name of another framework is documented as soon as it exists.

use std::collections::BTreeMap;

use super::{default, first_sentence, heading};
use crate::args::MarkdownChapter;
use crate::metrics::METRICS;
use crate::program::Program;
use crate::recipe::manual::{self, Key, Section};
use crate::recipe::peers;
use crate::recipe::resume::{Rule, rule};
use crate::recipe::schema::AlgorithmSection;
use crate::recipe::words::AlgorithmKind;

/// The text of a chapter.
pub(super) fn chapter(chapter: MarkdownChapter, program: &Program) -> String {
    match chapter {
        MarkdownChapter::Keys => keys(),
        MarkdownChapter::Metrics => metrics(),
        MarkdownChapter::Peers => peer_names(),
        MarkdownChapter::Algorithms => algorithms(),
        MarkdownChapter::Rewards => rewards(program),
    }
}

/// All sections with all keys.
fn keys() -> String {
    let mut text =
        "# Every key of a recipe\n\n`rlrun explain KEY` says the same in the terminal.\n".to_owned();
    for section in manual::sections() {
        text += &format!("\n## {}\n", heading(section));
        if !section.path.is_empty() {
            text += &format!("\n{}\n", prose(&section.about));
        }
        section.keys.iter().for_each(|key| text += &one_key(section, key));
    }
    text
}

fn one_key(section: &Section, key: &Key) -> String {
    let mut facts = vec![format!("**{}**", prose(&key.kind.to_string()))];
    facts.extend(key.unit().map(|unit| format!("unit {unit}")));
    facts.extend(key.default.as_ref().map(|value| format!("default {}", code(&value.to_string()))));
    facts.extend(rule(&key.path).map(|rule| match rule {
        Rule::MayChange => "a resume may change it".to_owned(),
        Rule::Stays(why) => format!("stays in a resume: {}", prose(why)),
    }));
    let mut text = format!("\n### `{}`\n\n{}\n\n{}\n", key.path, facts.join("; "), prose(&key.about));
    if !key.kind.words().is_empty() {
        text += "\n";
    }
    // The chapters of algorithms and rewards have the words of their keys.
    let elsewhere = section.path == "algorithm" && key.name() == "kind";
    for (word, about) in key.kind.words() {
        let about = if elsewhere { first_sentence(about) } else { about.clone() };
        text += &format!("- `\"{word}\"`: {}\n", prose(&about).replace("\n\n", " "));
    }
    let names: Vec<String> = peers::names_of(&key.path).map(|name| format!("`{name}`")).collect();
    if !names.is_empty() {
        text += &format!("\nElsewhere: {}\n", names.join(", "));
    }
    text
}

/// All metrics with unit and meaning.
fn metrics() -> String {
    let mut text = "# Every metric\n\n\
        What `metrics.jsonl`, TensorBoard and W&B have of a step. A `*` stands for a name: of a reward, a set of held-out tasks, \
        a role, or what an environment counts. `rlrun explain METRIC` says the same in the terminal.\n"
        .to_owned();
    for section in METRICS {
        text += &format!("\n## {}\n\n| metric | unit | meaning |\n|---|---|---|\n", section.title);
        for metric in section.metrics {
            let names: Vec<String> = metric.names().map(|name| format!("`{name}`")).collect();
            text += &format!("| {} | {} | {} |\n", names.join(", "), metric.unit, cell(metric.about));
        }
    }
    text
}

/// What keys and words of other frameworks are here.
fn peer_names() -> String {
    let mut text = "# Names of other frameworks\n\n\
        Keys of TRL, verl, prime-rl, OpenRLHF, AReaL, slime, SkyRL and NeMo-RL, and what they are in a recipe. A recipe that has \
        one of them is refused with the same hint, and `rlrun explain NAME` gives it.\n\n\
        ## Keys\n\n| elsewhere | here | |\n|---|---|---|\n"
        .to_owned();
    let mut rows = BTreeMap::new();
    for peer in peers::peers() {
        let key = if peer.key.is_empty() { String::new() } else { format!("`{}`", peer.key) };
        for name in peer.names() {
            rows.insert(name, format!("| `{name}` | {key} | {} |\n", cell(peer.note)));
        }
    }
    rows.values().for_each(|row| text += row);
    text += "\n## Values\n\n| key | elsewhere | here |\n|---|---|---|\n";
    for (key, theirs, ours) in peers::WORDS {
        text += &format!("| `{key}` | `{theirs}` | `{ours}` |\n");
    }
    text
}

/// Each algorithm with the keys that it sets.
fn algorithms() -> String {
    let mut text = "# Every algorithm\n\n\
        `algorithm.kind` names one; it sets the keys below it unless the recipe gives them.\n"
        .to_owned();
    let kind = manual::keys().iter().find(|key| key.path == "algorithm.kind");
    for (word, about) in kind.map_or(&[][..], |key| key.kind.words()) {
        text += &format!("\n## `{word}`\n\n{}\n", prose(about));
        let Some(&kind) = AlgorithmKind::ALL.iter().find(|kind| kind.as_str() == word) else { continue };
        let table = toml::Table::try_from(AlgorithmSection::usual(kind)).unwrap_or_default();
        let keys = table.iter().filter(|(key, _)| *key != "kind");
        let lines: String = keys.map(|(key, value)| format!("{key} = {value}\n")).collect();
        text += &format!("\n```text\n{lines}```\n");
    }
    text
}

/// Each kind of reward with its keys.
fn rewards(program: &Program) -> String {
    let mut text = "# Every kind of reward\n\n\
        A `[[rewards]]` with this `kind` has these keys beside those of every reward, which [every key](keys.md) lists.\n"
        .to_owned();
    for name in program.registry().names() {
        let Some(kind) = program.registry().kind(name) else { continue };
        text += &format!("\n## `{name}`\n\n");
        if kind.parameters().is_empty() {
            text += "No keys of its own.\n";
            continue;
        }
        text += "| key | default | meaning |\n|---|---|---|\n";
        for parameter in kind.parameters() {
            let key = manual::keys().iter().find(|key| key.path == format!("rewards[].{parameter}"));
            let (value, about) =
                key.map_or((String::new(), String::new()), |key| (default(key), first_sentence(&key.about)));
            text += &format!("| `{parameter}` | {} | {} |\n", cell(&code(&value)), cell(&about));
        }
    }
    text
}

/// Text in backticks.
fn code(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("`{text}`") }
}

/// Text of a paragraph: what would be a tag outside of code is escaped.
fn prose(text: &str) -> String {
    let parts: Vec<String> = text
        .split('`')
        .enumerate()
        .map(|(place, part)| if place % 2 == 0 { part.replace('<', "&lt;") } else { part.to_owned() })
        .collect();
    parts.join("`")
}

/// Text in one cell of a table.
fn cell(text: &str) -> String {
    prose(text).replace('|', "\\|").replace("\n\n", " ").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;
    use rewards::Registry;

    use super::*;

    fn written(of: MarkdownChapter) -> String {
        chapter(of, &Program::new(Registry::builtin(), []))
    }

    #[test]
    fn every_key_metric_word_and_foreign_name_is_in_its_chapter() {
        let keys = written(MarkdownChapter::Keys);
        for key in manual::keys() {
            assert_eq!(keys.matches(&format!("\n### `{}`\n", key.path)).count(), 1, "{}", key.path);
        }
        let metrics = written(MarkdownChapter::Metrics);
        for metric in METRICS.iter().flat_map(|section| section.metrics) {
            assert!(metric.names().all(|name| metrics.contains(&format!("`{name}`"))), "{}", metric.names);
        }
        let names = written(MarkdownChapter::Peers);
        for name in peers::peers().flat_map(|peer| peer.names()) {
            assert_eq!(names.matches(&format!("\n| `{name}` | ")).count(), 1, "{name}");
        }
        let algorithms = written(MarkdownChapter::Algorithms);
        for kind in AlgorithmKind::ALL {
            assert!(algorithms.contains(&format!("\n## `{}`\n", kind.as_str())), "{}", kind.as_str());
        }
        assert!(algorithms.contains("\nclip_eps_low = 0.2\n"), "{algorithms}");
        let rewards = written(MarkdownChapter::Rewards);
        for name in Registry::builtin().names() {
            assert!(rewards.contains(&format!("\n## `{name}`\n")), "{name}");
        }
    }

    #[test]
    fn rows_have_the_cells_of_their_table_and_text_has_no_tags() {
        for of in MarkdownChapter::value_variants() {
            let text = written(*of);
            let mut cells = None;
            for line in text.lines() {
                let count = line.replace("\\|", "").matches('|').count();
                assert!(!line.starts_with('|') || cells.is_none_or(|cells| cells == count), "{line}");
                cells = line.starts_with('|').then_some(count);
                let outside: String = line.split('`').step_by(2).collect();
                assert!(!outside.contains('<'), "{line}");
            }
        }
    }
}
