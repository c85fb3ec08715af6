//! The names of recipe keys in other frameworks, for error messages and `rlrun explain`.
//!
//! Invariant: foreign names are never accepted, only explained.

use toml::de::DeValue;

use super::manual;
pub(crate) use names::{PEERS, WORDS};

mod names;

/// Most keys of a foreign section that are explained one by one.
const MOST_HINTS: usize = 6;

/// The counterpart of several names in other frameworks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    names: &'static str,
    /// Our key; empty if there is none.
    pub(crate) key: &'static str,
    /// What else is to be said, or what there is in place of a key.
    pub(crate) note: &'static str,
}

/// All of them.
pub(crate) fn peers() -> impl Iterator<Item = Peer> {
    PEERS.iter().map(|&(names, key, note)| Peer { names, key, note })
}

impl Peer {
    /// What peers write.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'static str> + use<> {
        self.names.split_whitespace()
    }

    /// What it is here, as a sentence without an end.
    pub(crate) fn hint(&self) -> String {
        match (self.key, self.note) {
            ("", note) => note.to_owned(),
            (key, "") => format!("rlrun calls it `{key}`"),
            (key, note) => format!("rlrun calls it `{key}`, {note}"),
        }
    }
}

/// What a foreign key is here; `path` is dotted, and the longest name that it ends with counts.
pub(crate) fn peer(path: &str) -> Option<Peer> {
    let path = path.to_ascii_lowercase().replace('-', "_");
    let ends =
        |name: &str| path.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'));
    let longest = |peer: &Peer| peer.names().filter(|name| ends(name)).map(str::len).max();
    peers().filter(|peer| longest(peer).is_some()).max_by_key(longest)
}

/// What the unknown key `path` is here. Of a section each of its keys is explained, as far as it is known.
pub(super) fn hint(path: &str, value: Option<&DeValue<'_>>) -> Option<String> {
    let mut leaves = Vec::new();
    if let Some(value) = value.filter(|value| value.is_table()) {
        collect(path, value, &mut leaves);
    }
    let known =
        leaves.iter().filter_map(|leaf| Some((leaf, peer(leaf).filter(|peer| !peer.key.is_empty())?)));
    let mut hints: Vec<String> = known.map(|(leaf, peer)| format!("`{leaf}` is `{}`", peer.key)).collect();
    hints.truncate(MOST_HINTS);
    hints.splice(0..0, peer(path).map(|peer| peer.hint()));
    (!hints.is_empty()).then(|| hints.join("; "))
}

fn collect(path: &str, value: &DeValue<'_>, leaves: &mut Vec<String>) {
    match value.as_table() {
        Some(table) => {
            for (key, value) in table {
                collect(&format!("{path}.{}", key.get_ref()), value.get_ref(), leaves);
            }
        }
        None => leaves.push(path.to_owned()),
    }
}

/// Our word for a value that peers call `word`.
pub(super) fn our_word(path: &str, word: &str) -> Option<&'static str> {
    let same = |theirs: &str| theirs.eq_ignore_ascii_case(word);
    WORDS.iter().find(|(key, theirs, _)| *key == path && same(theirs)).map(|(_, _, ours)| *ours)
}

/// What peers call our key.
pub(crate) fn names_of(key: &str) -> impl Iterator<Item = &'static str> {
    peers().filter(move |peer| peer.key == key).flat_map(|peer| peer.names())
}

/// The path of a key of this name in some other section: the one that recipes need most, which has a default.
pub(super) fn key_elsewhere(key: &str) -> Option<String> {
    let mut named: Vec<_> = manual::keys().iter().filter(|known| known.name() == key).collect();
    named.sort_by_key(|known| known.is_in_optional_section());
    named.first().map(|known| known.path.clone())
}
