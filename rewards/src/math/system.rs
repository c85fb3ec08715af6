//! Functions given by `f: x \mapsto 2x`, and systems in an environment: equations and inequalities row by row.
//!
//! Invariant: as in `operand`, a function that does not find its notation returns `None` and consumes no token.

use super::lex::MathToken;
use super::node::{Joint, Node, Relation};
use super::parse::MathParser;

/// Most levels of nesting with mappings. A text that is no mapping is parsed twice.
const MAX_DEPTH: usize = 8;
/// Most rows of a system.
const MAX_ROWS: usize = 16;

impl MathParser<'_> {
    /// `f: x \mapsto 2x` as `f(x) = 2x`, also with domain and codomain, or with `f(x) = 2x` after these.
    pub(super) fn named_mapping(&mut self) -> Option<Node> {
        let arrow = |token: Option<&MathToken>| matches!(token, Some(MathToken::Command(name)) if name == "to" || mapsto(name));
        let named = self.depth <= MAX_DEPTH
            && matches!(self.peek(), Some(MathToken::Symbol(_)))
            && (1..4).any(|ahead| self.peek_at(ahead) == Some(&MathToken::Sign(':')));
        if !named || !(2..40).any(|ahead| arrow(self.peek_at(ahead))) {
            return None;
        }
        self.tried(|parser| {
            let Node::Symbol(name) = parser.primary()? else { return None };
            parser.expect(':')?;
            let domain = parser.tried(|parser| {
                let from = parser.set_expression()?;
                parser.command_is(|name| name == "to" || name == "rightarrow").then_some(())?;
                Some((from, parser.set_expression()?))
            });
            // `f: x \to 2x` has the argument where others have the domain.
            if let Some((argument @ Node::Symbol(_), value)) = &domain
                && (parser.at_end() || parser.separates())
            {
                let function = Box::new(Node::Apply(name, vec![argument.clone()]));
                return Some(Node::Chain(function, vec![(Relation::Equal, value.clone())]));
            }
            if domain.is_some() {
                let _ = parser.eat(',') || parser.eat(';') || parser.eat(':');
            }
            let MathToken::Symbol(_) = parser.peek()? else { return None };
            match parser.set_expression()? {
                argument @ Node::Symbol(_) => {
                    parser.command_is(mapsto).then_some(())?;
                    let value = parser.set_expression()?;
                    let function = Box::new(Node::Apply(name, vec![argument]));
                    Some(Node::Chain(function, vec![(Relation::Equal, value)]))
                }
                value @ Node::Apply(..) if matches!(&value, Node::Apply(other, _) if *other == name) => {
                    let MathToken::Relation(Relation::Equal) = parser.peek()? else { return None };
                    parser.at += 1;
                    Some(Node::Chain(Box::new(value), vec![(Relation::Equal, parser.set_expression()?)]))
                }
                _ => None,
            }
        })
    }

    /// After `\{`: a set, or a system after a brace that may stay open (`\left\{ ... \right.`).
    pub(super) fn set_or_system(&mut self) -> Option<Node> {
        let Some(MathToken::Begin(environment)) = self.peek() else { return self.set() };
        self.at += 1;
        if !self.begins_system(environment) {
            self.at -= 1;
            return self.set();
        }
        let system = self.system(environment)?;
        self.at += usize::from(self.peek() == Some(&MathToken::SetClose));
        Some(system)
    }

    /// Whether an environment after its begin has a relation in its own rows. Cells of matrices have none.
    pub(super) fn begins_system(&self, environment: &str) -> bool {
        let mut open = 1usize;
        let own = self.lexemes[self.at..].iter().map_while(|lexeme| {
            match lexeme.token {
                MathToken::Begin(_) => open += 1,
                MathToken::End(_) => open -= 1,
                _ => {}
            }
            (open > 0).then_some((open, &lexeme.token))
        });
        holds_system(environment)
            && own.into_iter().any(|(open, token)| open == 1 && matches!(token, MathToken::Relation(_)))
    }

    /// Consumes a command whose name fulfils the condition.
    pub(super) fn command_is(&mut self, condition: impl Fn(&str) -> bool) -> bool {
        let found = matches!(self.peek(), Some(MathToken::Command(name)) if condition(name));
        self.at += usize::from(found);
        found
    }

    /// The parsed value, or `None` without a consumed token.
    fn tried<T>(&mut self, read: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        let from = self.at;
        let read = self.nested(read);
        if read.is_none() {
            self.at = from;
        }
        read
    }

    /// Rows to the end of an environment. Each row is one relation, and all of them hold.
    ///
    /// `\begin{cases} a & x > 0 \\ b & x \le 0 \end{cases}` is no system but one function, which is not read.
    pub(super) fn system(&mut self, environment: &str) -> Option<Node> {
        self.nested(|parser| {
            if environment == "array" && parser.eat('{') {
                while !parser.eat('}') {
                    parser.peek()?;
                    parser.at += 1;
                }
            }
            let mut rows = vec![];
            loop {
                match parser.peek()? {
                    MathToken::End(_) => break,
                    MathToken::Break | MathToken::Sign(',' | ';') => parser.at += 1,
                    _ => match (parser.relation(), rows.last_mut()) {
                        // A row that begins with a relation goes on with the one before.
                        (Some((relation, length)), Some(Node::Chain(_, rest))) if rest.len() < MAX_ROWS => {
                            parser.at += length;
                            rest.push((relation, parser.set_expression()?));
                        }
                        _ => rows.push(parser.element()?),
                    },
                }
                let relation = rows.iter().all(|row| matches!(row, Node::Chain(..)));
                if rows.len() > MAX_ROWS || !relation {
                    return None;
                }
            }
            parser.at += 1;
            if rows.len() > 1 { Some(Node::List(Joint::And, rows)) } else { rows.pop() }
        })
    }
}

/// A system as one part of a list of systems, with sorted rows. Rows of different systems stay separate.
pub(super) fn as_part(node: Node) -> Node {
    match node {
        Node::List(Joint::And, mut rows) => {
            rows.sort_by_cached_key(|row| match row {
                Node::Chain(first, _) => format!("{first:?}"),
                row => format!("{row:?}"),
            });
            Node::Tuple(rows)
        }
        node => node,
    }
}

/// Whether a command of this name maps an argument to its value.
pub(super) fn mapsto(name: &str) -> bool {
    name == "mapsto" || name == "longmapsto"
}

/// Whether an environment may hold a system.
fn holds_system(environment: &str) -> bool {
    matches!(
        environment.trim_end_matches('*'),
        "cases" | "dcases" | "rcases" | "aligned" | "align" | "gathered" | "gather" | "alignedat" | "array"
    )
}
