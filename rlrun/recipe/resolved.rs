//! A recipe as TOML with every value spelled out and its origin beside it.
//!
//! Invariant: what is written here loads as an equal recipe. It is for people, resuming and comparing runs; the
//! layers it came from are not kept.

use std::fmt::Write;

use toml::{Table, Value};

use super::layers::Origins;
use super::schema::{RawData, RawModel, RawRecipe};
use super::{Data, DataSource, Model, Recipe};

/// Writes the recipe.
pub(super) fn write(recipe: &Recipe, origins: &Origins) -> String {
    let mut out = String::from("# The recipe as resolved. Behind every value stands where it came from.\n");
    write_table(&mut out, &table(recipe), "", origins);
    out
}

/// Every value of the recipe that has an effect.
pub(super) fn table(recipe: &Recipe) -> Table {
    let table = Table::try_from(to_raw(recipe));
    let mut table = table.expect("a checked recipe is TOML: its paths are UTF-8 and its seed has 63 bits");
    drop_without_effect(&mut table, recipe);
    table
}

fn to_raw(recipe: &Recipe) -> RawRecipe {
    let Recipe {
        name,
        seed,
        model,
        dtype,
        reduction,
        data,
        warmup,
        rollout,
        rewards,
        buffer,
        algorithm,
        trainer,
        ..
    } = recipe.clone();
    let Recipe {
        supervised,
        critic,
        curation,
        environment,
        lora,
        island,
        placement,
        endpoint,
        eval,
        checkpoint,
        weights,
        log,
        dashboard,
        deadlines,
        ..
    } = recipe.clone();
    let model = match model {
        Model::Path(path) => RawModel { path: Some(path), dtype, reduction, random: None },
        Model::Random(random) => RawModel { path: None, dtype, reduction, random: Some(random) },
    };
    RawRecipe {
        extends: Vec::new(),
        name: Some(name),
        seed,
        model,
        data: to_raw_data(data),
        warmup,
        supervised,
        rollout,
        environment,
        rewards,
        curation,
        buffer,
        algorithm,
        critic,
        trainer,
        lora,
        island,
        endpoint,
        eval,
        checkpoint,
        weights,
        log,
        dashboard,
        placement,
        deadlines,
    }
}

fn to_raw_data(data: Data) -> RawData {
    let Data { source, system_prompt, chat, max_prompt_length, overlong_prompts, shuffle } = data;
    let common =
        RawData { system_prompt, chat, max_prompt_length, overlong_prompts, shuffle, ..RawData::default() };
    match source {
        DataSource::Arithmetic(arithmetic) => RawData { arithmetic: Some(arithmetic), ..common },
        DataSource::Seeds(seeds) => RawData { seeds: Some(seeds), ..common },
        DataSource::Files(files) => RawData {
            train: files.train,
            eval: files.eval,
            prompt_column: files.prompt_column,
            answer_column: files.answer_column,
            prompt_template: files.prompt_template,
            ..common
        },
    }
}

/// Takes out what has no effect in this recipe: written down it would be an error.
fn drop_without_effect(table: &mut Table, recipe: &Recipe) {
    if let Some(Value::Table(eval)) = table.get_mut("eval")
        && !recipe.has_eval_tasks()
    {
        super::eval::WITHOUT_TASKS.iter().for_each(|key| drop(eval.remove(*key)));
    }
    if recipe.data.source.is_additions()
        && let Some(Value::Table(data)) = table.get_mut("data")
    {
        data.remove("chat");
    }
    if !recipe.curation.is_on() {
        table.remove("curation");
    }
    if let Some(Value::Table(curation)) = table.get_mut("curation") {
        for (key, _) in recipe.curation.keys_without_effect() {
            curation.remove(key);
        }
    }
    if let Some(supervised) = &recipe.supervised {
        for section in super::supervised::WITHOUT_EFFECT {
            table.remove(section);
        }
        if let Some(Value::Table(of)) = table.get_mut("supervised") {
            let generated = recipe.data.source.is_generated();
            let columns = ["completion_column", "chosen_column", "rejected_column"];
            let columns = columns.iter().filter(|_| generated);
            for key in supervised.keys_without_effect().iter().chain(columns) {
                of.remove(*key);
            }
        }
        if let Some(Value::Table(trainer)) = table.get_mut("trainer") {
            trainer.remove("minibatches");
            trainer.remove("router_correction_rate");
            trainer.remove("epochs");
        }
    }
    if let Some(Value::Table(buffer)) = table.get_mut("buffer") {
        for key in recipe.buffer.keys_without_effect() {
            buffer.remove(*key);
        }
    }
    if let Some(Value::Table(placement)) = table.get_mut("placement") {
        let devices = recipe.devices();
        let there = [("optimizer", devices.trains()), ("reference_weights", devices.reference)];
        for (key, _) in there.iter().filter(|(_, there)| !there) {
            placement.remove(*key);
        }
    }
    if let Some(Value::Table(trainer)) = table.get_mut("trainer") {
        for (key, _) in recipe.trainer.keys_without_effect() {
            trainer.remove(key);
        }
    }
}

/// Writes the values of a table, then its subtables: TOML reads a value after a header as part of that section.
fn write_table(out: &mut String, table: &Table, path: &str, origins: &Origins) {
    let under = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    let is_section = |value: &Value| match value {
        Value::Table(_) => true,
        Value::Array(list) => list.first().is_some_and(Value::is_table),
        _ => false,
    };
    // `write!` into a string cannot fail.
    for (key, value) in table.iter().filter(|(_, value)| !is_section(value)) {
        let assignment = format!("{key} = {}", one_line(value));
        let _ = writeln!(out, "{assignment:<36}  # {}", comment(&origins.describe(&under(key))));
    }
    for (key, value) in table.iter().filter(|(_, value)| is_section(value)) {
        let path = under(key);
        match value {
            Value::Table(inner) => {
                // A header over nothing but sections says nothing.
                if inner.is_empty() || inner.values().any(|value| !is_section(value)) {
                    let _ = writeln!(out, "\n[{}]", header(&path));
                }
                write_table(out, inner, &path, origins);
            }
            Value::Array(list) => {
                for (index, inner) in list.iter().enumerate() {
                    let _ = writeln!(out, "\n[[{}]]", header(&path));
                    if let Value::Table(inner) = inner {
                        write_table(out, inner, &format!("{path}[{index}]"), origins);
                    }
                }
            }
            _ => {}
        }
    }
}

/// The value on one line, so that its origin stands behind it: texts of several lines have their line breaks escaped.
fn one_line(value: &Value) -> String {
    let shown = value.to_string();
    match value {
        Value::String(text) if shown.contains('\n') => {
            let escaped = text.chars().map(|c| match c {
                '"' | '\\' => format!("\\{c}"),
                '\n' => "\\n".to_owned(),
                c if c.is_control() => format!("\\U{:08X}", u32::from(c)),
                c => c.to_string(),
            });
            format!("\"{}\"", escaped.collect::<String>())
        }
        Value::Array(list) if shown.contains('\n') => {
            format!("[{}]", list.iter().map(one_line).collect::<Vec<_>>().join(", "))
        }
        _ => shown,
    }
}

/// A path as a section header, where lists have no index.
fn header(path: &str) -> &str {
    path.split('[').next().unwrap_or(path)
}

/// Comments end at the line break, and control characters are not allowed in them.
fn comment(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}
