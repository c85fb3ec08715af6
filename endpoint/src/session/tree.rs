//! The messages of a session as a tree: a path from the root is a conversation that the agent sent, or got as an answer.
//!
//! Invariant: a message is in the tree once for each conversation before it, except responses: two equal responses to one
//! conversation are two nodes, since they are different tokens.

use serde_json::Value;

use super::SessionMessage;

/// Place of a message in its tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(usize);

/// The messages of a session.
#[derive(Debug, Default)]
pub struct MessageTree {
    nodes: Vec<MessageNode>,
    /// First messages, with the tools that were offered: other tools are another conversation.
    roots: Vec<(Value, NodeId)>,
    bytes: usize,
}

#[derive(Debug)]
struct MessageNode {
    parent: Option<NodeId>,
    message: SessionMessage,
    /// The interaction that it is the response of.
    interaction: Option<usize>,
    children: Vec<NodeId>,
}

/// How much of a conversation is in the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Located {
    /// The last message that is; `None` if the first is not.
    pub node: Option<NodeId>,
    /// Number of messages that are.
    pub matched: usize,
}

impl MessageTree {
    /// The longest beginning of a conversation that is in the tree. Of equal ones it is the newest.
    #[must_use]
    pub fn locate(&self, tools: &Value, messages: &[SessionMessage]) -> Located {
        let mut located = Located { node: None, matched: 0 };
        let mut candidates: Vec<NodeId> =
            self.roots.iter().filter(|(of, _)| of == tools).map(|(_, node)| *node).collect();
        for message in messages {
            candidates.retain(|node| self.nodes[node.0].message == *message);
            let Some(newest) = candidates.last() else { break };
            located = Located { node: Some(*newest), matched: located.matched + 1 };
            candidates = candidates.iter().flat_map(|node| &self.nodes[node.0].children).copied().collect();
            candidates.sort_unstable();
        }
        located
    }

    /// The last response on the path to `node`, and the number of messages up to it.
    #[must_use]
    pub fn last_response(&self, node: NodeId) -> Option<(usize, usize)> {
        let mut depth = self.depth(node);
        let mut at = Some(node);
        while let Some(node) = at {
            if let Some(interaction) = self.nodes[node.0].interaction {
                return Some((interaction, depth));
            }
            depth -= 1;
            at = self.nodes[node.0].parent;
        }
        None
    }

    /// Adds the messages of a conversation after those that are `located`; the node of the last.
    pub fn extend(&mut self, tools: &Value, located: Located, messages: &[SessionMessage]) -> Option<NodeId> {
        let mut at = located.node;
        for message in &messages[located.matched.min(messages.len())..] {
            at = Some(self.push(tools, at, message.clone(), None));
        }
        at
    }

    /// Adds the response of `interaction` after `asked`.
    pub fn respond(
        &mut self,
        tools: &Value,
        asked: Option<NodeId>,
        response: SessionMessage,
        interaction: usize,
    ) -> NodeId {
        self.push(tools, asked, response, Some(interaction))
    }

    fn push(
        &mut self,
        tools: &Value,
        parent: Option<NodeId>,
        message: SessionMessage,
        interaction: Option<usize>,
    ) -> NodeId {
        let node = NodeId(self.nodes.len());
        self.bytes += size_of::<MessageNode>() + message.bytes();
        self.nodes.push(MessageNode { parent, message, interaction, children: Vec::new() });
        match parent {
            Some(parent) => self.nodes[parent.0].children.push(node),
            None => self.roots.push((tools.clone(), node)),
        }
        node
    }

    /// Whether no message follows `node`.
    #[must_use]
    pub fn is_leaf(&self, node: NodeId) -> bool {
        self.nodes[node.0].children.is_empty()
    }

    /// Number of messages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether there is no message.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Approximate bytes in memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The messages from the first to that of `node`.
    #[must_use]
    pub fn path(&self, node: NodeId) -> Vec<&SessionMessage> {
        let mut path: Vec<&SessionMessage> =
            self.upwards(node).map(|node| &self.nodes[node.0].message).collect();
        path.reverse();
        path
    }

    fn depth(&self, node: NodeId) -> usize {
        self.upwards(node).count()
    }

    fn upwards(&self, node: NodeId) -> impl Iterator<Item = NodeId> {
        std::iter::successors(Some(node), |node| self.nodes[node.0].parent)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn user(text: &str) -> SessionMessage {
        SessionMessage::new("user", text)
    }

    fn assistant(text: &str) -> SessionMessage {
        SessionMessage::new("assistant", text)
    }

    /// Asks `messages` in `tree`, and answers.
    fn turn(tree: &mut MessageTree, messages: &[SessionMessage], answer: &str, n: usize) -> NodeId {
        let located = tree.locate(&Value::Null, messages);
        let asked = tree.extend(&Value::Null, located, messages);
        tree.respond(&Value::Null, asked, assistant(answer), n)
    }

    #[test]
    fn a_conversation_that_grows_is_one_path() {
        let mut tree = MessageTree::default();
        let mut messages = vec![SessionMessage::new("system", "s"), user("1")];
        for n in 0..3 {
            let response = turn(&mut tree, &messages, "a", n);
            assert_eq!(tree.last_response(response), Some((n, messages.len() + 1)));
            messages.extend([assistant("a"), user("next")]);
        }
        assert_eq!(tree.len(), 7);
        let located = tree.locate(&Value::Null, &messages);
        assert_eq!(located.matched, 7);
        assert_eq!(tree.last_response(located.node.unwrap()), Some((2, 7)));
        let other_tools = tree.locate(&Value::from(1), &messages);
        assert_eq!(other_tools, Located { node: None, matched: 0 });
    }

    #[test]
    fn of_two_equal_responses_the_one_that_was_continued_is_found() {
        let mut tree = MessageTree::default();
        let first = turn(&mut tree, &[user("1")], "a", 0);
        let _orphan = turn(&mut tree, &[user("1")], "a", 1);
        let asked = tree.extend(
            &Value::Null,
            Located { node: Some(first), matched: 2 },
            &[user("1"), assistant("a"), user("2")],
        );
        tree.respond(&Value::Null, asked, assistant("b"), 2);
        let found = tree.locate(&Value::Null, &[user("1"), assistant("a"), user("2"), assistant("b")]);
        assert_eq!((found.matched, tree.last_response(found.node.unwrap())), (4, Some((2, 4))));
        let newest = tree.locate(&Value::Null, &[user("1"), assistant("a")]);
        assert_eq!(tree.last_response(newest.node.unwrap()), Some((1, 2)));
    }

    proptest! {
        /// Whatever conversations are asked: a response is found again under its messages, and its path is as long as they
        /// are.
        #[test]
        fn every_response_is_found_again(conversations in proptest::collection::vec(
            proptest::collection::vec(0..3_u8, 1..5), 1..12,
        )) {
            let mut tree = MessageTree::default();
            for (n, conversation) in conversations.iter().enumerate() {
                let messages: Vec<_> = conversation.iter().map(|m| user(&m.to_string())).collect();
                turn(&mut tree, &messages, "same", n);
                let with_answer = [&messages[..], &[assistant("same")]].concat();
                let found = tree.locate(&Value::Null, &with_answer);
                prop_assert_eq!(found.matched, with_answer.len());
                prop_assert_eq!(tree.last_response(found.node.unwrap()), Some((n, with_answer.len())));
            }
            let most: usize = conversations.iter().map(|messages| messages.len() + 1).sum();
            prop_assert!(tree.len() <= most);
        }
    }
}
