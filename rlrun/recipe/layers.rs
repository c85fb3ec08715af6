//! From the layers (bases, recipe, environment, `--set`) to one table with the origin of every value.
//!
//! Invariant: later layers win key by key; lists are replaced whole, unless a layer names the elements that it changes
//! (`rlrun/recipe/elements.rs`); keys that exclude each other (`model.path` and
//! `model.random`) replace each other across layers, so that a layer can always change its base. Values are not
//! looked at.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::diagnostic::{Diagnostic, Place};
use super::elements::{self, Elements, merge_table};
use super::source::{Layer, Source, Sources};
use crate::program::OVERRIDE;

/// Most bytes of a recipe file.
const MAX_BYTES: u64 = 16 << 20;
/// Most files of a recipe, those that it extends included; a file counts as often as it is extended.
const MAX_FILES: usize = 256;
/// Most parts of a key that is set.
const MAX_PARTS: usize = 64;

/// Where every value of a recipe was written.
#[derive(Clone, Debug, Default)]
pub struct Origins {
    entries: BTreeMap<String, Origin>,
    /// The recorded origin of each value of a resumed run.
    recorded: BTreeMap<String, String>,
}

/// Where one value was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The layer that won.
    pub layer: Layer,
    /// Its key; the element itself in a list.
    pub key: Place,
    /// Its value.
    pub value: Place,
    /// Directory of the file it stands in; `None` outside files.
    pub directory: Option<PathBuf>,
}

impl Origins {
    /// The origin of a value by its dotted path, list elements as `rewards[0].weight`; `None` is a default.
    #[must_use]
    pub fn get(&self, path: &str) -> Option<&Origin> {
        self.entries.get(path)
    }

    /// The value `path`, or the first value under it, that a layer gave.
    pub(super) fn first_under(&self, path: &str) -> Option<String> {
        let under = |found: &&String| {
            found.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        self.entries.keys().find(under).cloned()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&String, &Origin)> {
        self.entries.iter()
    }

    /// Says from now on of these values what is written here.
    pub(super) fn record(&mut self, descriptions: BTreeMap<String, String>) {
        self.recorded = descriptions;
    }

    /// `file:line:column` of the key, `--set`, `environment`, or `default`; `resume 2 (--set)` of what a resume changed.
    #[must_use]
    pub fn describe(&self, path: &str) -> String {
        if let Some(description) = self.recorded.get(path) {
            return description.clone();
        }
        match self.get(path) {
            None => "default".to_owned(),
            Some(origin) => match origin.layer {
                Layer::Set | Layer::Environment => origin.key.source.clone(),
                Layer::Base | Layer::Recipe => {
                    format!("{}:{}:{}", origin.key.source, origin.key.line, origin.key.column)
                }
            },
        }
    }
}

/// Keys that exclude each other: setting one side in a layer takes the other side away from the layers below.
const ALTERNATIVES: [(&str, &[&str], &[&str]); 4] = [
    ("model", &["path"], &["random"]),
    ("data", &["train", "eval"], &["arithmetic"]),
    ("data", &["train", "eval"], &["seeds"]),
    ("data", &["arithmetic"], &["seeds"]),
];

/// Reads the recipe, the files it extends, the `RLRUN__` variables and the `--set` arguments.
pub(super) fn read(
    path: &Path,
    sets: &[String],
    env: impl IntoIterator<Item = (String, String)>,
) -> Result<Sources, Vec<Diagnostic>> {
    let mut sources = Sources::default();
    let mut errors = Vec::new();
    read_file(path, &mut Vec::new(), None, &mut sources, &mut errors);
    let mut variables: Vec<_> = env.into_iter().filter(|(name, _)| name.starts_with(OVERRIDE)).collect();
    variables.sort();
    for (name, value) in variables {
        sources.add(Layer::Environment, "environment".to_owned(), format!("{name}={value}"), None);
    }
    for set in sets {
        sources.add(Layer::Set, "--set".to_owned(), set.clone(), None);
    }
    if errors.is_empty() { Ok(sources) } else { Err(errors) }
}

/// Parses and merges all layers. Of files the values `without`, by their paths, are left out.
pub(super) fn merge<'s>(
    sources: &'s Sources,
    without: &[String],
) -> Result<(DeTable<'s>, Origins), Vec<Diagnostic>> {
    let mut merged = DeTable::new();
    let mut errors = Vec::new();
    for source in sources.iter() {
        match parse(source) {
            Ok(table) => {
                let mut table = shift_table(table, source.base);
                if matches!(source.layer, Layer::Base | Layer::Recipe) {
                    without.iter().for_each(|path| elements::remove(&mut table, path));
                }
                drop_alternatives(&mut merged, &table);
                let place = |span: &Range<usize>| sources.place(span);
                merge_table(
                    &mut merged,
                    table,
                    &mut Elements { path: "", place: &place, errors: &mut errors },
                );
            }
            Err(error) => errors.push(*error),
        }
    }
    let mut origins = Origins::default();
    collect_origins(&merged, "", sources, &mut origins);
    if errors.is_empty() { Ok((merged, origins)) } else { Err(errors) }
}

/// Adds a file above the files that it extends. `from` is where it was named, `open` the files being read.
fn read_file(
    path: &Path,
    open: &mut Vec<PathBuf>,
    from: Option<Place>,
    sources: &mut Sources,
    errors: &mut Vec<Diagnostic>,
) {
    let shown = path.display().to_string();
    let read = path.canonicalize().and_then(|real| Ok((model::files::read_text(&real, MAX_BYTES)?, real)));
    let (real, text) = match read {
        Ok((text, real)) => (real, text),
        Err(error) => {
            errors.push(Diagnostic::new(format!("cannot read recipe `{shown}`: {error}"), from));
            return;
        }
    };
    if open.contains(&real) {
        let chain: Vec<_> = open.iter().chain([&real]).map(|file| file.display().to_string()).collect();
        let message = format!("`extends` runs in a circle: {}", chain.join(" -> "));
        errors.push(Diagnostic::new(message, from).help("remove one `extends` of the circle"));
        return;
    }
    if sources.iter().count() + open.len() >= MAX_FILES {
        let message = format!(
            "`extends` names more than {MAX_FILES} files, those that are named several times included"
        );
        // Once is enough: every open file may name more.
        if errors.is_empty() {
            errors.push(Diagnostic::new(message, from).help("extend fewer files, or each only once"));
        }
        return;
    }
    let directory = path.parent().unwrap_or(Path::new(""));
    let layer = if open.is_empty() { Layer::Recipe } else { Layer::Base };
    match DeTable::parse(&text) {
        Ok(table) => {
            open.push(real);
            for base in named_bases(table.get_ref()) {
                let mut here = Sources::default();
                here.add(layer, shown.clone(), text.clone(), None);
                let place = here.place(&base.span());
                read_file(&directory.join(base.get_ref()), open, Some(place), sources, errors);
            }
            open.pop();
        }
        Err(error) => {
            let mut here = Sources::default();
            here.add(layer, shown, text, None);
            errors.push(syntax_error(&error, |span| here.place(&span)));
            return;
        }
    }
    sources.add(layer, shown, text, Some(directory));
}

/// The strings under `extends`. Anything else there is reported when the recipe is decoded.
fn named_bases(table: &DeTable<'_>) -> Vec<Spanned<String>> {
    let Some(value) = table.get("extends") else { return Vec::new() };
    let string = |value: &Spanned<DeValue<'_>>| {
        value.get_ref().as_str().map(|text| Spanned::new(value.span(), text.to_owned()))
    };
    match value.get_ref() {
        DeValue::Array(list) => list.iter().filter_map(string).collect(),
        _ => string(value).into_iter().collect(),
    }
}

fn syntax_error(error: &toml::de::Error, place: impl Fn(Range<usize>) -> Place) -> Diagnostic {
    Diagnostic::new(format!("not TOML: {}", error.message()), error.span().map(place))
}

/// The table of one source; spans count from the start of its text.
fn parse(source: &Source) -> Result<DeTable<'_>, Box<Diagnostic>> {
    match source.layer {
        Layer::Base | Layer::Recipe => match DeTable::parse(&source.text) {
            Ok(table) => Ok(table.into_inner()),
            Err(error) => Err(Box::new(syntax_error(&error, |span| local_place(source, span)))),
        },
        Layer::Environment => parse_assignment(source, OVERRIDE.len(), "__"),
        Layer::Set => parse_assignment(source, 0, "."),
    }
}

fn local_place(source: &Source, span: Range<usize>) -> Place {
    let mut here = Sources::default();
    here.add(source.layer, source.name.clone(), source.text.clone(), None);
    here.place(&span)
}

/// `a.b=value` (or `A__B=value`) as nested tables; `a[0].b=value` has the key `[0]` under `a`. A value that is no TOML is a string, unless it starts like a TOML
/// list, table or string.
fn parse_assignment<'a>(
    source: &'a Source,
    key_start: usize,
    separator: &str,
) -> Result<DeTable<'a>, Box<Diagnostic>> {
    let text = source.text.as_str();
    let fail = |message: String, span: Range<usize>| {
        let help = "write it as `section.key=value`, such as `trainer.learning_rate=1e-6`";
        Box::new(Diagnostic::new(message, Some(local_place(source, span))).help(help))
    };
    let Some(equals) = text.find('=') else {
        return Err(fail(format!("`{text}` has no `=`"), 0..text.len()));
    };
    let value_start = equals + 1 + (text[equals + 1..].len() - text[equals + 1..].trim_start().len());
    let raw = text[value_start..].trim_end();
    let value = match DeValue::parse(raw) {
        Ok(value) => shift(value, value_start),
        Err(error) if raw.starts_with(['[', '{', '"', '\'']) => {
            let span = error.span().unwrap_or(0..raw.len());
            let message = format!("the value is not TOML: {}", error.message());
            return Err(fail(message, value_start + span.start..value_start + span.end));
        }
        Err(_) => Spanned::new(value_start..text.len(), DeValue::String(Cow::Borrowed(raw))),
    };
    let mut keys = Vec::new();
    let mut at = key_start;
    for part in text[key_start..equals].split(separator) {
        let key = part.trim();
        let start = at + (part.len() - part.trim_start().len());
        let (name, indexes) = elements::split_indexes(key);
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-') {
            return Err(fail(format!("`{key}` is not a key"), start..start + key.len().max(1)));
        }
        for step in [name].into_iter().chain(indexes) {
            keys.push(Spanned::new(start..start + key.len(), Cow::Owned(step.to_ascii_lowercase())));
        }
        at += part.len() + separator.len();
    }
    if keys.len() > MAX_PARTS {
        return Err(fail(format!("the key has more than {MAX_PARTS} parts"), key_start..equals));
    }
    if keys.first().is_some_and(|key| key.get_ref() == "extends") {
        return Err(fail("`extends` can only stand in a file".to_owned(), keys[0].span()));
    }
    let whole = 0..text.len();
    let mut inner = value;
    let mut keys = keys.into_iter().rev().peekable();
    loop {
        let Some(key) = keys.next() else { return Err(fail("the key is missing".to_owned(), whole)) };
        let mut table = DeTable::new();
        table.insert(key, inner);
        if keys.peek().is_none() {
            return Ok(table);
        }
        inner = Spanned::new(whole.clone(), DeValue::Table(table));
    }
}

fn shift_table(table: DeTable<'_>, by: usize) -> DeTable<'_> {
    let moved = |span: Range<usize>| span.start + by..span.end + by;
    table
        .into_iter()
        .map(|(key, value)| (Spanned::new(moved(key.span()), key.into_inner()), shift(value, by)))
        .collect()
}

fn shift(value: Spanned<DeValue<'_>>, by: usize) -> Spanned<DeValue<'_>> {
    let span = value.span().start + by..value.span().end + by;
    let value = match value.into_inner() {
        DeValue::Table(table) => DeValue::Table(shift_table(table, by)),
        DeValue::Array(list) => DeValue::Array(list.into_iter().map(|element| shift(element, by)).collect()),
        scalar => scalar,
    };
    Spanned::new(span, value)
}

fn drop_alternatives(below: &mut DeTable<'_>, above: &DeTable<'_>) {
    for (section, one, other) in ALTERNATIVES {
        let Some(set) = above.get(section).and_then(|value| value.get_ref().as_table()) else { continue };
        let Some(DeValue::Table(below)) = below.get_mut(section).map(Spanned::get_mut) else { continue };
        for (set_side, lost_side) in [(one, other), (other, one)] {
            if set_side.iter().any(|key| set.contains_key(*key)) {
                for key in lost_side {
                    below.remove(*key);
                }
            }
        }
    }
}

fn collect_origins(table: &DeTable<'_>, prefix: &str, sources: &Sources, origins: &mut Origins) {
    for (key, value) in table {
        let path =
            if prefix.is_empty() { key.get_ref().to_string() } else { format!("{prefix}.{}", key.get_ref()) };
        collect_value(path, &key.span(), value, sources, origins);
    }
}

fn collect_value(
    path: String,
    key: &Range<usize>,
    value: &Spanned<DeValue<'_>>,
    sources: &Sources,
    origins: &mut Origins,
) {
    match value.get_ref() {
        DeValue::Table(table) => collect_origins(table, &path, sources, origins),
        DeValue::Array(list) => {
            for (index, element) in list.iter().enumerate() {
                collect_value(format!("{path}[{index}]"), &element.span(), element, sources, origins);
            }
        }
        _ => {}
    }
    let source = sources.source_of(key);
    let origin = Origin {
        layer: source.layer,
        key: sources.place(key),
        value: sources.place(&value.span()),
        directory: source.directory.clone(),
    };
    origins.entries.insert(path, origin);
}
