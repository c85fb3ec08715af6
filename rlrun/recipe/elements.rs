//! Merging a layer into those below it, elements of lists included.
//!
//! Invariant: a list is replaced by a list. A table over a list changes elements in place: the key `[1]` is the element
//! with that index, counted from 0, any other key the element with that `name`, or with that `kind` if it has no name. An
//! element that is not there is an error, never a new one.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use super::diagnostic::{Diagnostic, Place};

/// Where tables are merged, and what goes wrong.
pub(super) struct Elements<'m> {
    /// Dotted path of the table.
    pub(super) path: &'m str,
    /// The place of a span in the layers.
    pub(super) place: &'m dyn Fn(&Range<usize>) -> Place,
    pub(super) errors: &'m mut Vec<Diagnostic>,
}

impl Elements<'_> {
    fn under(&mut self, key: &str, merge: impl FnOnce(&mut Elements<'_>)) {
        let path = match self.path {
            "" => key.to_owned(),
            path if key.starts_with('[') => format!("{path}{key}"),
            path => format!("{path}.{key}"),
        };
        merge(&mut Elements { path: &path, place: self.place, errors: self.errors });
    }

    fn report(&mut self, span: &Range<usize>, message: String, help: String) {
        self.errors.push(Diagnostic::new(message, Some((self.place)(span))).help(help));
    }
}

/// `rewards[0]` as `rewards` and `[0]`. What is not a whole number in brackets stays part of the name.
pub(super) fn split_indexes(key: &str) -> (&str, Vec<&str>) {
    let (mut name, mut indexes) = (key, Vec::new());
    while let Some(open) = name.rfind('[')
        && index(&name[open..]).is_some()
    {
        indexes.insert(0, &name[open..]);
        name = &name[..open];
    }
    (name, indexes)
}

/// The number of `[3]`.
fn index(key: &str) -> Option<usize> {
    let digits = key.strip_prefix('[')?.strip_suffix(']')?;
    digits.chars().all(|c| c.is_ascii_digit()).then(|| digits.parse().ok())?
}

/// Removes the value at a path such as `rewards[0].weight`, if it exists.
pub(super) fn remove(table: &mut DeTable<'_>, path: &str) {
    let (parents, last) = path.rsplit_once('.').unwrap_or(("", path));
    if let Some(table) = table_at(table, parents) {
        table.remove(last);
    }
}

fn table_at<'t, 'v>(mut table: &'t mut DeTable<'v>, path: &str) -> Option<&'t mut DeTable<'v>> {
    for part in path.split('.').filter(|part| !part.is_empty()) {
        let (name, indexes) = split_indexes(part);
        let mut value = table.get_mut(name)?.get_mut();
        for at in indexes {
            let DeValue::Array(list) = value else { return None };
            value = list.get_mut(index(at)?)?.get_mut();
        }
        let DeValue::Table(inner) = value else { return None };
        table = inner;
    }
    Some(table)
}

/// Writes `above` over `below`.
pub(super) fn merge_table<'a>(below: &mut DeTable<'a>, above: DeTable<'a>, at: &mut Elements<'_>) {
    for (key, value) in above {
        let old = below.get_mut(key.get_ref().as_ref()).map(Spanned::get_mut);
        match (old, value) {
            (Some(DeValue::Table(old)), value) if value.get_ref().is_table() => {
                let DeValue::Table(new) = value.into_inner() else { continue };
                at.under(key.get_ref(), |at| merge_table(old, new, at));
            }
            // An empty one names no element: it is a wrong value, which is reported when the recipe is decoded.
            (Some(DeValue::Array(old)), value)
                if value.get_ref().as_table().is_some_and(|elements| !elements.is_empty()) =>
            {
                let DeValue::Table(new) = value.into_inner() else { continue };
                at.under(key.get_ref(), |at| merge_elements(old, new, at));
            }
            (_, value) => {
                if let Some((span, path)) = named_element(&value, key.get_ref()) {
                    let dot = if at.path.is_empty() { "" } else { "." };
                    let message =
                        format!("`{}{dot}{path}` is an element of a list, and there is no list", at.path);
                    at.report(&span, message, "write the list in the recipe first".to_owned());
                    continue;
                }
                // An insert alone would keep the old key, and with it the old span.
                below.remove(key.get_ref().as_ref());
                below.insert(key, value);
            }
        }
    }
}

/// The first key under `value` that is an index.
fn named_element(value: &Spanned<DeValue<'_>>, path: &str) -> Option<(Range<usize>, String)> {
    let table = value.get_ref().as_table()?;
    table.iter().find_map(|(key, value)| {
        let name = key.get_ref();
        if index(name).is_some() {
            return Some((key.span(), format!("{path}{name}")));
        }
        named_element(value, &format!("{path}.{name}"))
    })
}

/// Changes elements of `list`.
fn merge_elements<'a>(list: &mut DeArray<'a>, above: DeTable<'a>, at: &mut Elements<'_>) {
    for (key, value) in above {
        let name = key.get_ref().as_ref();
        let found = match index(name) {
            Some(index) if index < list.len() => vec![index],
            Some(_) => Vec::new(),
            None => (0..list.len())
                .filter(|n| called(&list[*n]).is_some_and(|own| own.eq_ignore_ascii_case(name)))
                .collect(),
        };
        let &[index] = &found[..] else {
            let path = at.path;
            let message = match found.len() {
                0 => format!("`{path}` has no element `{name}`"),
                several => format!("`{path}` has {several} elements `{name}`"),
            };
            let all = (0..list.len()).map(|n| match called(&list[n]) {
                Some(own) => format!("`{path}[{n}]` (`{path}.{own}`)"),
                None => format!("`{path}[{n}]`"),
            });
            let all: Vec<String> = all.collect();
            let help =
                if all.is_empty() { "it is empty".to_owned() } else { format!("it has {}", all.join(", ")) };
            at.report(&key.span(), message, help);
            continue;
        };
        let Some(element) = list.get_mut(index) else { continue };
        match (element.get_mut(), value) {
            (DeValue::Table(old), value) if value.get_ref().is_table() => {
                let DeValue::Table(new) = value.into_inner() else { continue };
                at.under(&format!("[{index}]"), |at| merge_table(old, new, at));
            }
            (_, value) => *element = value,
        }
    }
}

/// The name of an element, or its kind.
fn called<'v>(element: &'v Spanned<DeValue<'_>>) -> Option<&'v str> {
    let table = element.get_ref().as_table()?;
    ["name", "kind"].into_iter().find_map(|key| table.get(key)?.get_ref().as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indexes_are_taken_off_the_name() {
        assert_eq!(split_indexes("rewards[0]"), ("rewards", vec!["[0]"]));
        assert_eq!(split_indexes("a[1][22]"), ("a", vec!["[1]", "[22]"]));
        for whole in ["rewards", "rewards[]", "rewards[x]", "rewards[0", "rewards[-1]", "[0]x"] {
            assert_eq!(split_indexes(whole), (whole, vec![]));
        }
        assert_eq!(split_indexes("[0]"), ("", vec!["[0]"]));
        assert_eq!(index("[99999999999999999999999999]"), None);
    }
}
