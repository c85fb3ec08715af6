//! Names and the values that an answer assigns to them: `x = 5`, `f(x) = 2x`, `(x, y) = (1, 2)`.
//!
//! Invariant: nothing is evaluated. `compare` decides whether two names are the same.

use super::node::{MathFunction, Node, Relation};

/// The name and the value of `x = 5`, `f(x) = 2x`, `x = 2 + 3 = 5` or `(x, y) = (1, 2)`.
pub(super) fn assignment(node: &Node) -> Option<(&Node, &Node)> {
    let Node::Chain(first, rest) = node else { return None };
    let equal = rest.iter().all(|(relation, _)| *relation == Relation::Equal);
    let member = matches!(rest.as_slice(), [(Relation::In, _)]);
    let (_, value) = rest.last()?;
    ((equal && (is_name(first) || rest.len() > 1)) || (member && is_name(first))).then_some((first, value))
}

/// Whether a side consists of names alone, as `AB`, `\frac{NO}{BO}`, `f(x)`, `|AB|` or `V_1 : V_2` are.
pub(super) fn is_name(node: &Node) -> bool {
    match node {
        Node::Symbol(_) | Node::Apply(..) => true,
        Node::Product(parts) | Node::Sum(parts) | Node::Ratio(parts) | Node::Tuple(parts) => {
            parts.iter().all(is_name)
        }
        Node::Function(MathFunction::Exp | MathFunction::Ln, _) => false,
        Node::Function(_, parts) => parts.iter().all(is_name),
        Node::Quotient(a, b) => is_name(a) && is_name(b),
        Node::Quantity(part, _) => is_name(part),
        _ => false,
    }
}

/// Whether the parts are assignments to names that differ by more than an index.
pub(super) fn named_apart(parts: &[Node]) -> bool {
    let base = |node: &Node| match assignment(node) {
        Some((Node::Symbol(name), _)) => Some(name.split('_').next().unwrap_or(name).to_owned()),
        Some((name, _)) => Some(format!("{name:?}")),
        None => None,
    };
    let names: Option<Vec<String>> = parts.iter().map(base).collect();
    names.is_some_and(|names| names.iter().enumerate().all(|(at, name)| !names[..at].contains(name)))
}

/// Names and values of `x = 1, y = 2` and of `(x, y) = (1, 2)`.
pub(super) fn record(node: &Node) -> Option<Vec<(&Node, &Node)>> {
    if let Node::List(_, parts) = node {
        let parts = parts.iter().map(assignment).collect::<Option<Vec<_>>>()?;
        let apart = parts
            .iter()
            .enumerate()
            .all(|(at, (name, _))| !parts[..at].iter().any(|(known, _)| known == name));
        return apart.then_some(parts);
    }
    let (name, value) = assignment(node)?;
    let (Node::Tuple(names), Node::Tuple(values)) = (name, value) else { return None };
    (names.len() == values.len()).then(|| names.iter().zip(values).collect())
}
