//! The language of the repository: plain technical English, unique type names, shapes, units and sources of methods.
//!
//! Invariant: these tests read sources and documents and nothing else. They refuse words that a reader of this field
//! would have to translate; they do not judge grammar. `docs/glossary.md` has the words to use.

use std::collections::BTreeMap;

use crate::structure::{Source, documents, is_test, read, root, sources};

/// Words and phrases that are refused, with what to write instead. Lower case; whole words, across one line.
const REFUSED: [(&str, &str); 16] = [
    ("house", "the repository, the workspace, the layout"),
    ("room", "capacity, space, memory"),
    ("told", "notified, informed, or the active verb"),
    ("held", "reserved, kept, owned"),
    ("whoever", "the role: the caller, the owner, a client"),
    ("nobody", "no thread, no client, no role"),
    ("somebody", "a thread, a client, a caller"),
    ("as many as", "a number: `n`"),
    ("verbs", "methods, operations, commands"),
    ("who waits", "the idle role"),
    ("goes on from", "resumes from, restores"),
    ("go on from", "resume from, restore"),
    ("gives up its memory", "frees its memory"),
    ("a seat", "a registration"),
    ("the door", "the listener"),
    ("lets nobody", "closes"),
];

/// Where a refused word is part of a term of the field, or of a name on the wire.
const FIELD_TERMS: [&str; 3] = ["held-out", "held_out", "held_for_slow"];

/// Type names that several modules may define because they are the same idea.
const SHARED_NAMES: [&str; 1] = ["BoxFuture"];

/// What makes a parameter a tensor or a slice of numbers.
const NUMBERS: [&str; 12] = [
    "&[f32]",
    "&mut [f32]",
    "&[f64]",
    "&mut [f64]",
    "&[u32]",
    "&mut [u32]",
    "&[bf16]",
    "&[i8]",
    "Vec<f32>",
    "Vec<f64>",
    "Tensor",
    "View<",
];

/// Words in the name of a number that has a unit.
const QUANTITIES: [&str; 17] = [
    "age", "budget", "capacity", "deadline", "delay", "idle", "interval", "limit", "longest", "memory",
    "pause", "period", "size", "time", "timeout", "wait", "window",
];

/// Units, without the plural. A count is of the things that it counts.
const UNITS: [&str; 32] = [
    "block",
    "byte",
    "character",
    "column",
    "comparison",
    "completion",
    "connection",
    "entry",
    "gib",
    "group",
    "kib",
    "layer",
    "mb",
    "mib",
    "microsecond",
    "millisecond",
    "ms",
    "nanosecond",
    "page",
    "pixel",
    "position",
    "rate",
    "request",
    "row",
    "s",
    "second",
    "slot",
    "step",
    "task",
    "token",
    "version",
    "width",
];

/// Files that compute a published method, and name its paper.
const METHODS: [&str; 20] = [
    "device/kernels/adamw.cu",
    "device/kernels/attention.cu",
    "device/kernels/paged.cu",
    "device/src/ops/adamw.rs",
    "device/src/ops/attention.rs",
    "device/src/ops/head.rs",
    "device/src/ops/paged.rs",
    "device/src/ops/prefill.rs",
    "model/src/decoder/cache.rs",
    "model/src/decoder/decode.rs",
    "model/src/on_device/head.rs",
    "model/src/ops/attention.rs",
    "model/src/ops/delta_net.rs",
    "model/src/ops/delta_rule.rs",
    "model/src/ops/head.rs",
    "model/src/ops/int8.rs",
    "trainer/src/adamw.rs",
    "trainer/src/moments.rs",
    "trainer/src/optimizer/dion.rs",
    "trainer/src/optimizer/muon.rs",
];

#[test]
fn sources_and_documents_use_the_words_of_the_field() {
    let mut found = Vec::new();
    for source in texts() {
        for (line, text) in (1..).zip(source.text.lines()) {
            let mut text = text.to_lowercase();
            for term in FIELD_TERMS {
                text = text.replace(term, "");
            }
            for (word, instead) in REFUSED.iter().filter(|(word, _)| contains_word(&text, word)) {
                found.push(format!("{}:{line}: `{word}`; write {instead}", source.path.display()));
            }
        }
    }
    assert!(found.is_empty(), "{} lines need plain English:\n{}", found.len(), found.join("\n"));
}

#[test]
fn every_type_has_a_name_of_its_own() {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for source in sources().iter().filter(|source| !is_test(&source.path) && !is_fuzz(source)) {
        for (line, text) in (1..).zip(source.text.lines()) {
            // Items of a module; an associated type of an implementation is indented.
            if let Some(name) = type_name(text) {
                places.entry(name.to_owned()).or_default().push(format!("{}:{line}", source.path.display()));
            }
        }
    }
    let twice = places.iter().filter(|(name, at)| at.len() > 1 && !SHARED_NAMES.contains(&&name[..]));
    let twice: Vec<String> = twice.map(|(name, at)| format!("{name}: {}", at.join(", "))).collect();
    assert!(twice.is_empty(), "qualify these by the noun of their module:\n{}", twice.join("\n"));
}

#[test]
fn public_functions_over_numbers_state_shapes() {
    let mut missing = Vec::new();
    for source in sources().iter().filter(|source| !is_test(&source.path) && !is_fuzz(source)) {
        let lines: Vec<&str> = source.text.lines().collect();
        for (index, line) in lines.iter().enumerate() {
            if !is_public_function(line.trim_start()) {
                continue;
            }
            let rest = lines[index..].join(" ");
            let signature = rest.split('{').next().unwrap_or(&rest);
            if NUMBERS.iter().any(|numbers| signature.contains(numbers)) && !has_shape(&lines[..index]) {
                missing.push(format!("{}:{}", source.path.display(), index + 1));
            }
        }
    }
    assert!(
        missing.is_empty(),
        "state the shapes, such as `[tokens, hidden]`, in the documentation of:\n{}",
        missing.join("\n")
    );
}

#[test]
fn numbers_with_a_unit_state_it() {
    let mut missing = Vec::new();
    for source in sources().iter().filter(|source| !is_test(&source.path) && !is_fuzz(source)) {
        let program = source.text.split("#[cfg(test)]").next().unwrap_or_default();
        let lines: Vec<&str> = program.lines().map(str::trim_start).collect();
        for (index, line) in lines.iter().enumerate() {
            let Some(name) = quantity(line) else { continue };
            let above = lines[..index]
                .iter()
                .rev()
                .take_while(|line| line.starts_with("//") || line.starts_with('#'));
            let beside = line.split_once("//").map_or("", |(_, comment)| comment);
            let mut words = above
                .copied()
                .chain([name, beside])
                .flat_map(|text| text.split(|c: char| !c.is_alphabetic()));
            if !words.any(is_unit) {
                missing.push(format!("{}:{}: `{name}`", source.path.display(), index + 1));
            }
        }
    }
    assert!(
        missing.is_empty(),
        "state the unit in the name or the documentation of:\n{}",
        missing.join("\n")
    );
}

#[test]
fn methods_cite_their_paper() {
    let silent: Vec<&str> =
        METHODS.into_iter().filter(|file| !read(&root().join(file)).contains("arXiv")).collect();
    assert!(silent.is_empty(), "name the paper in the header of:\n{}", silent.join("\n"));
}

#[test]
fn the_glossary_names_types_that_exist() {
    let text = read(&root().join("docs/glossary.md"));
    let rows = text.lines().filter(|line| line.starts_with("| ") && line.contains(".rs`"));
    let mut count = 0;
    for row in rows {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let [_, term, _, types, files, _] = cells[..] else {
            panic!("`{row}` needs four cells: term, meaning, types, files");
        };
        let files: Vec<String> = quoted(files).map(|file| read(&root().join(file))).collect();
        for name in quoted(types) {
            let item = name.rsplit("::").next().unwrap_or(name);
            assert!(
                files.iter().any(|file| defines(file, item)),
                "docs/glossary.md: `{name}` of \"{term}\" is not defined in the files of its row"
            );
            count += 1;
        }
    }
    assert!(count > 0, "the glossary names no type; did its table change?");
}

/// Sources, scripts and documents, without this file, which has to name what it refuses.
fn texts() -> Vec<Source> {
    let mut all = sources();
    all.retain(|source| !source.path.ends_with("words.rs"));
    all.extend(documents());
    all
}

/// Whether `text` contains `word`, also as a part of an identifier between underscores.
fn contains_word(text: &str, word: &str) -> bool {
    let part = char::is_alphanumeric;
    text.match_indices(word).any(|(at, _)| {
        !text[..at].chars().next_back().is_some_and(part)
            && !text[at + word.len()..].chars().next().is_some_and(part)
    })
}

/// The name of the type that this line of a module begins to define.
fn type_name(line: &str) -> Option<&str> {
    let item =
        ["pub(crate) ", "pub(super) ", "pub "].iter().find_map(|p| line.strip_prefix(p)).unwrap_or(line);
    let name =
        ["struct ", "enum ", "trait ", "type ", "union "].iter().find_map(|kind| item.strip_prefix(kind))?;
    let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
    Some(&name[..end]).filter(|name| !name.is_empty())
}

fn is_public_function(line: &str) -> bool {
    line.strip_prefix("pub ").is_some_and(|item| {
        let item = item.strip_prefix("const ").unwrap_or(item);
        item.strip_prefix("unsafe ").unwrap_or(item).starts_with("fn ")
    })
}

/// The name of the numeric field or constant that this line defines, if it measures something.
fn quantity(line: &str) -> Option<&str> {
    let item = ["pub(crate) ", "pub(super) ", "pub "].iter().find_map(|p| line.strip_prefix(p));
    let constant = item.unwrap_or(line).strip_prefix("const ");
    let (name, rest) = constant.or(item)?.split_once(": ")?;
    let rest = rest.strip_prefix("Option<").unwrap_or(rest);
    let is_number =
        ["f32", "f64", "u32", "u64", "usize", "i64"].iter().any(|number| rest.starts_with(number));
    let lower = name.to_lowercase();
    (is_number && lower.split('_').any(|part| QUANTITIES.contains(&part))).then_some(name)
}

/// Whether this word is a unit, in the singular or the plural.
fn is_unit(word: &str) -> bool {
    let word = word.to_lowercase();
    let singular = word.strip_suffix("ies").map(|stem| format!("{stem}y"));
    let singular = singular.as_deref().or(word.strip_suffix('s').filter(|stem| !stem.is_empty()));
    UNITS.contains(&&word[..]) || singular.is_some_and(|singular| UNITS.contains(&singular))
}

/// Whether the documentation that ends with these lines has a shape in brackets.
fn has_shape(lines: &[&str]) -> bool {
    let above = lines.iter().rev().map(|line| line.trim_start());
    let mut docs =
        above.take_while(|line| line.starts_with("///") || line.starts_with('#') || line.ends_with(']'));
    docs.any(|line| {
        line.split('[').skip(1).any(|rest| {
            let Some((inside, after)) = rest.split_once(']') else { return false };
            let letters = |c: char| c.is_ascii_alphanumeric() || " _,.+*/()-".contains(c);
            // `[`Self::x`]` and `[text](link)` are links.
            !inside.is_empty() && inside.chars().all(letters) && !after.starts_with('(')
        })
    })
}

/// Whether a source defines a type, function or constant of this name.
fn defines(text: &str, name: &str) -> bool {
    let kinds = ["struct", "enum", "trait", "type", "fn", "const", "mod"];
    let part = |c: char| c.is_alphanumeric() || c == '_';
    kinds.iter().any(|kind| {
        let item = format!("{kind} {name}");
        text.match_indices(&item).any(|(at, _)| !text[at + item.len()..].starts_with(part))
    })
}

/// What stands between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

fn is_fuzz(source: &Source) -> bool {
    source.path.components().any(|part| part.as_os_str() == "fuzz")
}
