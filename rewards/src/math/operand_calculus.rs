//! Parses derivatives, integrals, limits, sums and products.
//!
//! Invariant: as in `operand`, a function that does not consume its tokens returns `None`.

use num_traits::ToPrimitive;

use super::lex::MathToken;
use super::node::{Calculus, Node, Relation};
use super::parse::MathParser;

impl MathParser<'_> {
    /// `\frac{d}{dx} body` and `\frac{\partial^2}{\partial x^2} body`, after the command.
    pub(super) fn derivative(&mut self) -> Option<Node> {
        let from = self.at;
        let read = self.derivative_operator().and_then(|(variable, order)| {
            let body = self.term()?;
            Some(Node::Calculus(Box::new(Calculus::Derivative(body, variable, order))))
        });
        if read.is_none() {
            self.at = from;
        }
        read
    }

    fn derivative_operator(&mut self) -> Option<(String, u32)> {
        let differential = |token: Option<&MathToken>| match token {
            Some(MathToken::Symbol(d)) => d == "d",
            Some(MathToken::Command(d)) => d == "partial",
            _ => false,
        };
        self.expect('{')?;
        differential(self.peek()).then(|| self.at += 1)?;
        let order = self.order()?;
        self.expect('}')?;
        self.expect('{')?;
        differential(self.peek()).then(|| self.at += 1)?;
        let Some(MathToken::Symbol(variable)) = self.peek() else { return None };
        self.at += 1;
        let same = self.order()? == order;
        self.expect('}')?;
        (same && order <= 4).then(|| (variable.clone(), order))
    }

    fn order(&mut self) -> Option<u32> {
        if !self.eat('^') {
            return Some(1);
        }
        let Node::Number(order) = self.script()? else { return None };
        order.value.to_integer().to_u32()
    }

    pub(super) fn integral(&mut self) -> Option<Node> {
        let bounds = self.bounds(Self::script)?;
        let from = self.at;
        // The differential is the last `d` and variable before the term ends.
        let mut depth = 0i32;
        let mut found = None;
        for ahead in 0.. {
            match self.peek_at(ahead) {
                None | Some(MathToken::Relation(_)) => break,
                Some(MathToken::Sign('(' | '[' | '{')) => depth += 1,
                Some(MathToken::Sign(')' | ']' | '}')) => depth -= 1,
                Some(MathToken::Symbol(d)) if d == "d" => {
                    if let Some(MathToken::Symbol(variable)) = self.peek_at(ahead + 1) {
                        found = Some((from + ahead, variable.clone()));
                        break;
                    }
                }
                _ => {}
            }
            if depth < 0 {
                break;
            }
        }
        let (end, variable) = found?;
        let mut inner = MathParser {
            lexemes: &self.lexemes[..end],
            at: from,
            depth: self.depth,
            steps: self.steps,
            bars: 0,
            options: self.options,
        };
        let body = if from == end { Some(Node::integer(1)) } else { inner.sum() };
        self.steps = inner.steps;
        let body = body?;
        if from != end && inner.at != end {
            return None;
        }
        self.at = end + 2;
        Some(Node::Calculus(Box::new(Calculus::Integral(body, variable, bounds))))
    }

    /// `_low^high`, or neither.
    #[expect(clippy::option_option, reason = "an indefinite integral is not the same as a malformed one")]
    fn bounds(&mut self, read: fn(&mut Self) -> Option<Node>) -> Option<Option<(Node, Node)>> {
        if self.eat('^') {
            let high = self.script()?;
            self.expect('_')?;
            return Some(Some((read(self)?, high)));
        }
        if !self.eat('_') {
            return Some(None);
        }
        let low = read(self)?;
        self.expect('^')?;
        Some(Some((low, self.script()?)))
    }

    pub(super) fn limit(&mut self) -> Option<Node> {
        self.expect('_')?;
        self.expect('{')?;
        let Some(MathToken::Symbol(variable)) = self.peek() else { return None };
        self.at += 1;
        match self.peek() {
            Some(MathToken::Command(arrow))
                if matches!(arrow.as_str(), "to" | "rightarrow" | "longrightarrow") =>
            {
                self.at += 1
            }
            _ => return None,
        }
        let point = self.term_with_sign()?;
        let side = if self.eat('^') {
            let side = if self.eat('+') { 1 } else { -i8::from(self.eat('-')) };
            if side == 0 { return None } else { side }
        } else {
            0
        };
        self.expect('}')?;
        let body = self.term()?;
        Some(Node::Calculus(Box::new(Calculus::Limit(body, variable.clone(), point, side))))
    }

    fn term_with_sign(&mut self) -> Option<Node> {
        let negative = self.eat('-');
        self.eat('+');
        let one_sided = matches!(self.peek_at(1), Some(MathToken::Sign('^')))
            && matches!(self.peek_at(2), Some(MathToken::Sign('+' | '-')));
        let node = if one_sided { self.nested(Self::primary)? } else { self.sum()? };
        Some(if negative { node.negated() } else { node })
    }

    pub(super) fn series(&mut self, is_product: bool) -> Option<Node> {
        let (first, last) = self.bounds(Self::group)??;
        let Node::Chain(index, relations) = first else { return None };
        let (Node::Symbol(index), [(Relation::Equal, first)]) = (*index, relations.as_slice()) else {
            return None;
        };
        let body = self.term()?;
        let series = Calculus::Series(body, index, first.clone(), last, is_product);
        Some(Node::Calculus(Box::new(series)))
    }
}
