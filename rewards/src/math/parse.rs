//! Parses the tokens of an answer to a tree. It is a Pratt parser from lists down to factors; `operand` parses the
//! operands.
//!
//! Invariant: the whole answer is parsed or none of it. [`MAX_DEPTH`] bounds the depth, [`MAX_STEPS`] the work.

use num_traits::{One, Signed};

use super::clause;
use super::lex::{self, Lexeme, MathToken, Mode};
use super::node::{Joint, Node, Relation};
use super::system::{as_part, mapsto};
use super::words;

/// Most levels of nesting.
const MAX_DEPTH: usize = 40;
/// Most levels that are entered, one after another, in an answer. A parser that goes back reads tokens again, and within
/// them others; without a bound the work doubles with every level.
const MAX_STEPS: usize = 16 * lex::MAX_BYTES;
/// Most parts of a list, a set or a tuple.
const MAX_PARTS: usize = 64;

/// Choices where notation is ambiguous.
#[derive(Clone, Copy, Debug)]
pub(super) struct Options {
    /// Letters and commas.
    pub(super) mode: Mode,
    /// Whether `1/2x` is `(1/2)x` and not `1/(2x)`.
    pub(super) loose_division: bool,
}

/// The tree of an answer; `None` if it cannot be parsed to its end.
pub(super) fn answer(text: &str, options: Options) -> Option<Node> {
    let lexemes = lex::tokens(text, options.mode)?;
    let mut parser = MathParser { lexemes: &lexemes, at: 0, depth: 0, steps: 0, bars: 0, options };
    let node = parser.list()?;
    parser.closing_remarks();
    (parser.at == lexemes.len()).then_some(node)
}

pub(super) struct MathParser<'a> {
    pub(super) lexemes: &'a [Lexeme],
    pub(super) at: usize,
    pub(super) depth: usize,
    /// Number of levels entered so far.
    pub(super) steps: usize,
    /// Number of open absolute values. The next bar closes one.
    pub(super) bars: usize,
    pub(super) options: Options,
}

impl<'a> MathParser<'a> {
    pub(super) fn peek(&self) -> Option<&'a MathToken> {
        self.lexemes.get(self.at).map(|lexeme| &lexeme.token)
    }

    pub(super) fn peek_at(&self, ahead: usize) -> Option<&'a MathToken> {
        self.lexemes.get(self.at + ahead).map(|lexeme| &lexeme.token)
    }

    pub(super) fn spaced(&self) -> bool {
        self.lexemes.get(self.at).is_some_and(|lexeme| lexeme.spaced)
    }

    pub(super) fn sign(&self, sign: char) -> bool {
        self.peek() == Some(&MathToken::Sign(sign))
    }

    pub(super) fn eat(&mut self, sign: char) -> bool {
        let found = self.sign(sign);
        self.at += usize::from(found);
        found
    }

    pub(super) fn expect(&mut self, sign: char) -> Option<()> {
        self.eat(sign).then_some(())
    }

    /// One level deeper, or `None` at a limit.
    pub(super) fn nested<T>(&mut self, read: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        if self.depth >= MAX_DEPTH || self.steps >= MAX_STEPS {
            return None;
        }
        self.depth += 1;
        self.steps += 1;
        let read = read(self);
        self.depth -= 1;
        read
    }

    /// Parses inside parentheses, where a bar opens an absolute value again.
    pub(super) fn enclosed<T>(&mut self, read: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        let bars = std::mem::take(&mut self.bars);
        let read = self.nested(read);
        self.bars = bars;
        read
    }

    fn word(&self) -> Option<&'a str> {
        match self.peek() {
            Some(MathToken::Word(word)) => Some(word),
            _ => None,
        }
    }

    /// Trailing separators, and in plain text a remark in parentheses.
    fn closing_remarks(&mut self) {
        while self.sign(',') || self.sign(';') || self.sign(':') {
            self.at += 1;
        }
        if self.options.mode != Mode::Formula && self.sign('(') && self.spaced() {
            self.at = self.lexemes.len();
        }
    }

    /// Comma, semicolon, `and` or `or`, or several of them.
    fn separator(&mut self) -> Option<(Joint, bool)> {
        let mut found = None;
        let mut semicolon = false;
        loop {
            let joint = match self.peek() {
                Some(MathToken::Sign(',')) => Joint::Comma,
                Some(MathToken::Sign(';')) => {
                    semicolon = true;
                    Joint::Comma
                }
                Some(MathToken::Word(word)) if word == "and" => Joint::And,
                Some(MathToken::Word(word)) if word == "or" => Joint::Or,
                _ => break,
            };
            found = Some(if joint == Joint::Comma { found.unwrap_or(joint) } else { joint });
            self.at += 1;
        }
        found.map(|joint| (joint, semicolon))
    }

    /// One element, or several that are separated.
    pub(super) fn list(&mut self) -> Option<Node> {
        self.nested(|parser| {
            let (joint, mut parts) = parser.parts()?;
            if parts.len() == 1 { parts.pop() } else { Some(assigned_together(joint, parts)) }
        })
    }

    /// The elements of a list or of a bracket, at least one.
    pub(super) fn parts(&mut self) -> Option<(Joint, Vec<Node>)> {
        let mut groups: Vec<Vec<Node>> = vec![vec![self.element()?]];
        let mut joint = Joint::Comma;
        loop {
            let before = self.at;
            let Some((found, semicolon)) = self.separator() else { break };
            if self.at_end() {
                self.at = before;
                self.closing_remarks();
                break;
            }
            let element = self.element()?;
            joint = if found == Joint::Comma { joint } else { found };
            match groups.last_mut() {
                Some(group) if !semicolon => group.push(element),
                _ => groups.push(vec![element]),
            }
            if groups.iter().map(Vec::len).sum::<usize>() > MAX_PARTS {
                return None;
            }
        }
        // `1, 2; 3, 4` are pairs; `1; 2; 3` are elements.
        if groups.iter().map(Vec::len).sum::<usize>() > 1 {
            groups = groups.into_iter().map(|group| group.into_iter().map(as_part).collect()).collect();
        }
        let paired = groups.len() > 1 && groups.iter().any(|group| group.len() > 1);
        let parts = if paired {
            groups.into_iter().map(Node::Tuple).collect()
        } else {
            groups.into_iter().flatten().collect()
        };
        Some((joint, parts))
    }

    pub(super) fn at_end(&self) -> bool {
        match self.peek() {
            None | Some(MathToken::SetClose | MathToken::End(_) | MathToken::Break) => true,
            Some(MathToken::Sign(sign)) => ")]}".contains(*sign),
            _ => false,
        }
    }

    /// A chain of relations, or a set expression.
    pub(super) fn element(&mut self) -> Option<Node> {
        if let Some(function) = self.named_mapping() {
            return Some(function);
        }
        let label = self.leading_words()?;
        let first = match label {
            Some(words) if self.at_end() || self.separates() => return Some(Node::Words(words)),
            Some(words) if matches!(self.peek(), Some(MathToken::Relation(_))) => Node::Symbol(words),
            Some(words) if words.ends_with("negative") => self.set_expression()?.negated(),
            _ => self.set_expression()?,
        };
        if matches!(first, Node::Symbol(_)) && self.command_is(mapsto) {
            return self.set_expression();
        }
        let mut rest = vec![];
        while let Some((relation, length)) = self.relation() {
            self.at += length;
            let trailing = self.at_end() && relation == Relation::Equal;
            if trailing || rest.len() > MAX_PARTS {
                return None;
            }
            let negative = self.leading_words()?.is_some_and(|words| words.ends_with("negative"));
            let member = self.set_expression()?;
            let member = if negative { member.negated() } else { member };
            rest.push((relation, member));
        }
        Some(if rest.is_empty() { first } else { Node::Chain(Box::new(first), rest) })
    }

    /// The next relation with the alignment marks around it, and its tokens.
    pub(super) fn relation(&self) -> Option<(Relation, usize)> {
        let mark = |at: usize| usize::from(self.peek_at(at) == Some(&MathToken::Sign('&')));
        let before = mark(0);
        let Some(MathToken::Relation(relation)) = self.peek_at(before) else { return None };
        Some((*relation, before + 1 + mark(before + 1)))
    }

    pub(super) fn separates(&self) -> bool {
        matches!(self.peek(), Some(MathToken::Sign(',' | ';'))) || matches!(self.word(), Some("and" | "or"))
    }

    /// Skips words before a number or a formula; `None` if they may change the answer.
    #[expect(clippy::option_option, reason = "no words are not the same as words that cannot be passed over")]
    fn leading_words(&mut self) -> Option<Option<String>> {
        let mut found: Vec<&str> = vec![];
        while let Some(word) = self.word() {
            if matches!(word, "and" | "or") && found.is_empty() {
                self.at += 1;
                continue;
            }
            if self.separates() {
                break;
            }
            found.push(word);
            self.at += 1;
            // The label rule below keeps "June 20" and "Hall 5" together. Apostrophes and colons separate words.
            while found.len() < MAX_PARTS && (self.sign('\'') || (self.sign(':') && self.word_after())) {
                self.at += 1;
            }
            if found.len() >= MAX_PARTS {
                return None;
            }
        }
        if found.is_empty() {
            return Some(None);
        }
        self.eat(':');
        let whole = self.at_end() || self.separates();
        let named = matches!(self.peek(), Some(MathToken::Relation(_)));
        let value = if found.last() == Some(&"negative") { &found[..found.len() - 1] } else { &found };
        let introduced = named || clause::introduces(value.iter().copied());
        if !whole && (!introduced || found.iter().any(|word| words::changes_value(word))) {
            return None;
        }
        Some(Some(found.join(" ").to_ascii_lowercase()))
    }

    fn word_after(&self) -> bool {
        matches!(self.peek_at(1), Some(MathToken::Word(_)))
    }

    /// Unions, intersections and differences over sums.
    pub(super) fn set_expression(&mut self) -> Option<Node> {
        let mut node = self.sum()?;
        while let Some(MathToken::Sign(sign)) = self.peek() {
            let join = match sign {
                '\u{222a}' => Node::Union,
                '\u{2229}' => Node::Intersection,
                '\u{2216}' => Node::Difference,
                _ => break,
            };
            self.at += 1;
            node = join(Box::new(node), Box::new(self.sum()?));
        }
        Some(node)
    }

    pub(super) fn sum(&mut self) -> Option<Node> {
        self.nested(Self::terms)
    }

    fn terms(&mut self) -> Option<Node> {
        let mut terms = vec![];
        while let Some(sign) = self.additive_sign().or(terms.is_empty().then_some('+')) {
            let mut negative = sign == '-';
            // `+ -3` and `- -3`.
            while matches!(self.peek(), Some(MathToken::Sign('+' | '-'))) {
                negative ^= self.sign('-');
                self.at += 1;
            }
            let term = self.term()?;
            let term = if negative { term.negated() } else { term };
            terms.push(match sign {
                '\u{b1}' => Node::PlusMinus(true, Box::new(term)),
                '\u{2213}' => Node::PlusMinus(false, Box::new(term)),
                _ => term,
            });
        }
        Some(if terms.len() == 1 { terms.pop()? } else { Node::Sum(terms) })
    }

    fn additive_sign(&mut self) -> Option<char> {
        match self.peek() {
            Some(MathToken::Sign(sign @ ('+' | '-' | '\u{b1}' | '\u{2213}'))) => {
                self.at += 1;
                Some(*sign)
            }
            _ => None,
        }
    }

    /// Factors, quotients and ratios.
    pub(super) fn term(&mut self) -> Option<Node> {
        let mut node = self.factors()?;
        let mut ratio = vec![];
        loop {
            match self.peek() {
                Some(MathToken::Sign('*')) => {
                    self.at += 1;
                    node = product(node, self.signed_factors()?);
                }
                Some(MathToken::Sign('/')) => {
                    self.at += 1;
                    node = self.quotient(node)?;
                }
                Some(MathToken::Sign(':')) if !self.at_end_after(1) => {
                    self.at += 1;
                    ratio.push(std::mem::replace(&mut node, self.factors()?));
                }
                Some(MathToken::Command(name)) if name == "mod" || name == "bmod" => {
                    self.at += 1;
                    node = Node::Function(super::node::MathFunction::Mod, vec![node, self.factors()?]);
                }
                _ => break,
            }
        }
        if ratio.is_empty() {
            return Some(node);
        }
        ratio.push(node);
        Some(Node::Ratio(ratio))
    }

    fn at_end_after(&self, ahead: usize) -> bool {
        matches!(self.peek_at(ahead), None | Some(MathToken::Sign(')' | ']' | '}') | MathToken::SetClose))
    }

    /// Factors after an explicit sign, where `2 \cdot -3` is common.
    fn signed_factors(&mut self) -> Option<Node> {
        let negative = self.eat('-');
        let node = self.factors()?;
        Some(if negative { node.negated() } else { node })
    }

    fn quotient(&mut self, numerator: Node) -> Option<Node> {
        let negative = self.eat('-');
        let loose = self.options.loose_division && matches!(self.peek(), Some(MathToken::Number(..)));
        let denominator = if loose { self.operand()? } else { self.factors()? };
        let denominator = if negative { denominator.negated() } else { denominator };
        let mut node = Node::Quotient(Box::new(numerator), Box::new(denominator));
        if loose && self.starts_factor() {
            node = product(node, self.factors()?);
        }
        Some(node)
    }

    /// Operands side by side: a product, a mixed number, or a quantity with its unit.
    pub(super) fn factors(&mut self) -> Option<Node> {
        let mut node = self.operand()?;
        loop {
            if let Some(word) = self.word() {
                if matches!(word, "and" | "or") {
                    break;
                }
                node = self.quantity(node)?;
                continue;
            }
            let number = matches!(self.peek(), Some(MathToken::Number(..)));
            let remark = self.options.mode != Mode::Formula && self.sign('(') && self.spaced();
            if !self.starts_factor() || (remark && matches!(node, Node::Number(_) | Node::Quantity(..))) {
                break;
            }
            if number && matches!(node, Node::Number(_)) {
                node = self.mixed_number(node)?;
                continue;
            }
            let next = self.operand()?;
            node = match (&node, &next) {
                (Node::Number(whole), Node::Quotient(..)) => match proper_fraction(&next) {
                    Some(()) if whole.value.is_integer() && whole.places == 0 => Node::Sum(vec![node, next]),
                    _ => product(node, next),
                },
                _ => product(node, next),
            };
        }
        Some(node)
    }

    /// `2 1/2`.
    fn mixed_number(&mut self, whole: Node) -> Option<Node> {
        let spaced = self.spaced();
        let numerator = self.operand()?;
        self.expect('/')?;
        let denominator = self.operand()?;
        let fraction = Node::Quotient(Box::new(numerator), Box::new(denominator));
        proper_fraction(&fraction)?;
        spaced.then(|| Node::Sum(vec![whole, fraction]))
    }

    /// Words after a scalar: a scale, per cent, degrees, or a unit with its power.
    fn quantity(&mut self, node: Node) -> Option<Node> {
        let word = self.word()?;
        if let Some(scale) = words::scale(word) {
            self.at += 1;
            return Some(product(node, Node::integer(scale)));
        }
        match word {
            "percent" | "percentage" | "pct" => {
                self.at += 1;
                return Some(Node::Percent(Box::new(node)));
            }
            "degree" | "degrees" => {
                self.at += 1;
                return Some(Node::Degree(Box::new(node)));
            }
            _ => {}
        }
        let mut unit = String::new();
        loop {
            match self.peek() {
                // "cm2"
                Some(MathToken::Number(_, power))
                    if !self.spaced() && (power == "2" || power == "3") && words::unit(&unit).is_some() =>
                {
                    unit.push('^');
                    unit.push_str(power);
                }
                Some(MathToken::Word(word)) if !matches!(word.as_str(), "and" | "or") => {
                    if words::changes_value(word) || unit.len() > 200 {
                        return None;
                    }
                    unit.push_str(if unit.is_empty() { "" } else { " " });
                    unit.push_str(word);
                }
                // "a" in "18 bolts a day", "s" in "m/s".
                Some(MathToken::Symbol(letter)) if self.spaced() && letter == "a" => {}
                Some(MathToken::Sign('/')) if self.word_after() => unit.push('/'),
                Some(MathToken::Sign('^')) => {
                    self.at += 1;
                    unit.push('^');
                    let (power, sign) = match self.script()? {
                        Node::Negate(power) => (*power, "-"),
                        power => (power, ""),
                    };
                    let Node::Number(power) = power else { return None };
                    unit.push_str(sign);
                    unit.push_str(&power.value.to_string());
                    continue;
                }
                _ => break,
            }
            self.at += 1;
        }
        Some(Node::Quantity(Box::new(node), unit))
    }

    /// Whether the next token begins an operand that multiplies the previous one.
    pub(super) fn starts_factor(&self) -> bool {
        match self.peek() {
            Some(MathToken::Number(..) | MathToken::Symbol(_) | MathToken::SetOpen | MathToken::Begin(_)) => {
                true
            }
            Some(MathToken::Sign('|')) => self.bars == 0,
            Some(MathToken::Sign(sign)) => "([{".contains(*sign),
            Some(MathToken::Command(name)) => !matches!(
                name.as_str(),
                "mod"
                    | "bmod"
                    | "pmod"
                    | "to"
                    | "rightarrow"
                    | "mapsto"
                    | "longmapsto"
                    | "choose"
                    | "rfloor"
                    | "rceil"
                    | "circ"
            ),
            _ => false,
        }
    }
}

fn proper_fraction(node: &Node) -> Option<()> {
    let Node::Quotient(numerator, denominator) = node else { return None };
    let (Node::Number(numerator), Node::Number(denominator)) = (&**numerator, &**denominator) else {
        return None;
    };
    let proper = numerator.value.is_positive() && numerator.value < denominator.value;
    (proper && numerator.value.is_integer() && denominator.value.denom().is_one()).then_some(())
}

pub(super) fn product(a: Node, b: Node) -> Node {
    match a {
        Node::Product(mut factors) => {
            factors.push(b);
            Node::Product(factors)
        }
        a => Node::Product(vec![a, b]),
    }
}

/// `n = 1, 2, 3` assigns all of them to `n`.
fn assigned_together(joint: Joint, mut parts: Vec<Node>) -> Node {
    let assigns = |node: &Node| matches!(node, Node::Chain(_, rest) if rest.last().is_some_and(|(relation, _)| matches!(relation, Relation::Equal | Relation::In)));
    let plain = |node: &Node| !matches!(node, Node::Chain(..));
    if !assigns(&parts[0]) || !parts[1..].iter().all(plain) {
        return Node::List(joint, parts);
    }
    let Node::Chain(first, mut rest) = parts.remove(0) else { return Node::List(joint, parts) };
    if let Some((_, last)) = rest.last_mut() {
        parts.insert(0, last.clone());
        *last = Node::List(joint, parts);
    }
    Node::Chain(first, rest)
}
