//! Which keys of a recipe the run may choose for a worker that joins, and which only the operator of the worker's machine.
//!
//! Invariant: every key of the schema declares this in the comment above it (tested); a key without a declaration is refused.
//! The run chooses data: numbers, texts, and words that select among parts of this program. A key that names a file, code, a
//! program, an address or an environment variable, or that removes a protection, is the operator's.

use crate::recipe::manual::{self, Key};

/// Whether the run or the operator chooses the value of a key on a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    /// The run.
    Run,
    /// The operator of this machine.
    Operator,
    /// Workers ignore the key; it is removed.
    Neither,
}

/// The key whose word decides whether it is data: one of its words runs Python.
pub(super) const ON_UNKNOWN: (&str, &str) = ("rewards[].on_unknown", "math_verify");

/// Who chooses the key `path`, such as `rewards[].weight`, or all keys of a table under it. A section is ignored as a whole if
/// all its keys are. `None` for a path that is not declared, and for any other section.
pub(super) fn by(path: &str) -> Option<By> {
    let under = |path: &str, above: &str| path.strip_prefix(above).is_some_and(|rest| rest.starts_with('.'));
    let keys = manual::keys();
    if let Some(key) = keys.iter().find(|key| path == key.path || under(path, &key.path)) {
        return declared(key);
    }
    let list = format!("{path}[]");
    let mut inner = keys.iter().filter(|key| under(&key.path, path) || under(&key.path, &list)).peekable();
    inner.peek()?;
    inner.all(|key| declared(key) == Some(By::Neither)).then_some(By::Neither)
}

/// What a key declares.
fn declared(key: &Key) -> Option<By> {
    match &key.worker[..] {
        "run" => Some(By::Run),
        "operator" => Some(By::Operator),
        "ignored" => Some(By::Neither),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_of_the_schema_declares_who_chooses_it() {
        let open: Vec<_> = manual::keys().iter().filter(|key| declared(key).is_none()).collect();
        assert!(
            open.is_empty(),
            "write `// resume = .., worker = run|operator|ignored` above {open:?}; operator if it names a file, code, a \
             program, an address or a variable, or removes a protection"
        );
    }

    #[test]
    fn sections_are_ignored_whole_or_looked_into() {
        for (path, expected) in [
            ("seed", Some(By::Run)),
            ("extends", Some(By::Operator)),
            ("data.train", Some(By::Operator)),
            ("rewards[].parameters.x.y", Some(By::Operator)),
            ("rewards[].python", Some(By::Operator)),
            ("rewards[].weight", Some(By::Run)),
            ("model.path", Some(By::Neither)),
            ("model.random", Some(By::Neither)),
            ("eval", Some(By::Neither)),
            ("warmup", Some(By::Neither)),
            ("buffer.listen", Some(By::Neither)),
            ("deadlines", None),
            ("rewards", None),
            ("trainer", None),
            ("no_such_key", None),
            ("deadlines.no_such_key", None),
        ] {
            assert_eq!(by(path), expected, "{path}");
        }
    }
}
