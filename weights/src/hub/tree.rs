//! The tree that versions are sent down: which relay a subscriber fetches from.
//!
//! Relays come first, in the order in which they subscribed, and the other subscribers after them. The hub serves the first
//! `fanout`, the first relay the next `fanout`, and so on; what is left is spread over all relays.
//!
//! Invariant: a relay fetches from the hub or from a relay before it, so that no two relays wait for each other. This file
//! decides nothing about whether a relay answers: a subscriber whose relay fails takes the version from the hub.

use std::collections::BTreeMap;

/// Where a subscriber fetches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TreePlace {
    /// Name of the relay.
    pub(super) relay: String,
    /// Number of relays between the subscriber and the hub.
    pub(super) level: u32,
}

/// The places of all subscribers that do not fetch from the hub.
#[derive(Debug, Default)]
pub(super) struct RelayTree {
    places: BTreeMap<String, TreePlace>,
}

impl RelayTree {
    /// The tree over `relays`, the earliest first, and the subscribers that are no relays. A `fanout` of 0 is no tree.
    pub(super) fn new(relays: &[&str], leaves: &[&str], fanout: usize) -> Self {
        if fanout == 0 || relays.is_empty() {
            return Self::default();
        }
        let mut places: BTreeMap<String, TreePlace> = BTreeMap::new();
        for (index, name) in relays.iter().chain(leaves).enumerate().skip(fanout) {
            let relay = relays[(index / fanout - 1) % relays.len()];
            let level = 1 + places.get(relay).map_or(0, |place| place.level);
            places.insert((*name).to_owned(), TreePlace { relay: relay.to_owned(), level });
        }
        Self { places }
    }

    /// The place of a subscriber; `None` if it fetches from the hub.
    pub(super) fn place(&self, name: &str) -> Option<&TreePlace> {
        self.places.get(name)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn tree(relays: usize, leaves: usize, fanout: usize) -> (RelayTree, Vec<String>, Vec<String>) {
        let relays: Vec<String> = (0..relays).map(|n| format!("relay {n}")).collect();
        let leaves: Vec<String> = (0..leaves).map(|n| format!("leaf {n}")).collect();
        let relay_names: Vec<&str> = relays.iter().map(String::as_str).collect();
        let leaf_names: Vec<&str> = leaves.iter().map(String::as_str).collect();
        let tree = RelayTree::new(&relay_names, &leaf_names, fanout);
        (tree, relays, leaves)
    }

    #[test]
    fn every_way_ends_at_the_hub_and_the_hub_serves_no_more_than_the_fanout() {
        for relays in [1, 2, 3, 7, 64] {
            for leaves in [0, 1, 9, 200] {
                for fanout in [1, 2, 4, 100] {
                    let (tree, relay_names, leaf_names) = tree(relays, leaves, fanout);
                    let all = relay_names.iter().chain(&leaf_names);
                    let from_hub = all.clone().filter(|name| tree.place(name).is_none()).count();
                    assert_eq!(from_hub, fanout.min(relays + leaves));
                    for name in all {
                        let (mut at, mut seen) = (name.as_str(), BTreeSet::new());
                        while let Some(place) = tree.place(at) {
                            assert!(seen.insert(at.to_owned()), "{name} waits for itself");
                            assert_eq!(place.level as usize, 1 + depth(&tree, &place.relay));
                            at = &place.relay;
                        }
                    }
                }
            }
        }
    }

    fn depth(tree: &RelayTree, name: &str) -> usize {
        tree.place(name).map_or(0, |place| 1 + depth(tree, &place.relay))
    }

    #[test]
    fn without_relays_or_with_fanout_0_the_hub_serves_all() {
        let relays = ["a", "b", "c"];
        assert!(RelayTree::new(&relays, &["d"], 0).places.is_empty());
        assert!(RelayTree::new(&[], &relays, 1).places.is_empty());
        let chain = RelayTree::new(&relays, &["d"], 1);
        assert_eq!(chain.place("d"), Some(&TreePlace { relay: "c".to_owned(), level: 3 }));
    }
}
