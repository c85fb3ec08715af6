//! Parses operands: numbers, variables, brackets, functions, matrices.
//!
//! Invariant: every function here consumes at least one token or returns `None`.

use num_traits::ToPrimitive;

use super::commands::{function, inverse_of};
use super::lex::MathToken;
use super::node::{Interval, Joint, MathFunction, Node, Relation};
use super::parse::{MathParser, product};

/// Most cells of a matrix.
const MAX_CELLS: usize = 100;

impl MathParser<'_> {
    /// An operand with its powers, factorials, per cent and degree signs.
    pub(super) fn operand(&mut self) -> Option<Node> {
        self.nested(|parser| {
            let node = parser.primary()?;
            parser.postfix(node)
        })
    }

    fn postfix(&mut self, mut node: Node) -> Option<Node> {
        loop {
            match self.peek() {
                Some(MathToken::Sign('^')) => {
                    self.at += 1;
                    node = self.power(node)?;
                }
                Some(MathToken::Sign('!')) => {
                    self.at += 1;
                    node = Node::Function(MathFunction::Factorial, vec![node]);
                }
                Some(MathToken::Sign('%')) => {
                    self.at += 1;
                    node = Node::Percent(Box::new(node));
                }
                Some(MathToken::Command(name)) if name == "circ" => {
                    self.at += 1;
                    node = self.degree(node);
                }
                Some(MathToken::Command(name)) if name == "choose" => {
                    self.at += 1;
                    node = Node::Function(MathFunction::Binomial, vec![node, self.operand()?]);
                }
                _ => return Some(node),
            }
        }
    }

    /// An angle, or with a `C` or `F` after it a temperature.
    fn degree(&mut self, node: Node) -> Node {
        let scale = match self.peek() {
            Some(MathToken::Symbol(name)) if matches!(node, Node::Number(_)) => match name.as_str() {
                "C" => "celsius",
                "F" => "fahrenheit",
                _ => return Node::Degree(Box::new(node)),
            },
            _ => return Node::Degree(Box::new(node)),
        };
        self.at += 1;
        Node::Quantity(Box::new(node), scale.to_owned())
    }

    fn power(&mut self, base: Node) -> Option<Node> {
        let braced = self.sign('{');
        let inner = self.peek_at(usize::from(braced));
        if matches!(inner, Some(MathToken::Command(name)) if name == "circ") {
            self.at += 1 + 2 * usize::from(braced);
            return Some(self.degree(base));
        }
        let transposes = match inner {
            Some(MathToken::Symbol(name)) => name == "T",
            Some(MathToken::Command(name)) => name == "top" || name == "intercal",
            _ => false,
        };
        if transposes && matches!(base, Node::Matrix(_)) {
            self.at += 1 + 2 * usize::from(braced);
            return Some(Node::Transpose(Box::new(base)));
        }
        if matches!(inner, Some(MathToken::Sign('\''))) {
            self.at += 1 + 2 * usize::from(braced);
            return Some(base);
        }
        let exponent = self.script()?;
        // `2^3^4` binds to the right.
        let exponent = if self.eat('^') { self.power(exponent)? } else { exponent };
        Some(Node::Power(Box::new(base), Box::new(exponent)))
    }

    /// The operand of `^` or `_`: a group, or one operand.
    pub(super) fn script(&mut self) -> Option<Node> {
        if self.sign('{') {
            return self.group();
        }
        let negative = self.eat('-');
        let node = self.nested(Self::primary)?;
        Some(if negative { node.negated() } else { node })
    }

    /// `{...}` with one element, the argument of a command.
    pub(super) fn group(&mut self) -> Option<Node> {
        self.expect('{')?;
        let node = self.enclosed(Self::list)?;
        self.expect('}')?;
        Some(node)
    }

    /// The argument of a command: a group, or the next operand without its powers.
    fn argument(&mut self) -> Option<Node> {
        if self.sign('{') { self.group() } else { self.nested(Self::primary) }
    }

    pub(super) fn primary(&mut self) -> Option<Node> {
        let token = self.peek()?;
        self.at += 1;
        match token {
            MathToken::Number(literal, digits) => self.number(literal.clone(), digits),
            MathToken::Symbol(name) => self.symbol(name.clone()),
            MathToken::Command(name) => self.nested(|parser| parser.command(name)),
            MathToken::Sign('(') => self.enclosed(|parser| parser.parenthesis(false)),
            MathToken::Sign('[') => self.enclosed(|parser| parser.parenthesis(true)),
            MathToken::Sign('{') => self.enclosed(Self::braces),
            MathToken::SetOpen => self.enclosed(Self::set_or_system),
            MathToken::Sign('|') => self.absolute(),
            MathToken::Begin(environment) => {
                self.enclosed(|parser| match parser.begins_system(environment) {
                    true => parser.system(environment),
                    false => parser.matrix(environment),
                })
            }
            _ => None,
        }
    }

    fn number(&mut self, literal: super::node::Literal, digits: &str) -> Option<Node> {
        if self.sign('_') {
            self.at += 1;
            let base = match self.base_in_words() {
                Some(base) => base,
                None => match self.script()? {
                    Node::Number(base) => base.value.to_integer().to_u32()?,
                    _ => return None,
                },
            };
            let base = Some(base).filter(|base| (2..=36).contains(base))?;
            return (literal.places == 0).then(|| Node::Based(digits.to_owned(), base));
        }
        let repeats =
            matches!(self.peek(), Some(MathToken::Command(name)) if name == "overline" || name == "bar");
        if repeats && literal.places + u32::from(digits.is_empty()) < 20 && self.repeating() {
            let Some(MathToken::Number(block, text)) = self.peek_at(2) else { return None };
            self.at += 4;
            let length = u32::try_from(text.len()).ok()?;
            let scale = |power: u32| num_bigint::BigInt::from(10u8).pow(power);
            let denominator = (scale(length) - 1) * scale(literal.places);
            let tail = num_rational::BigRational::new(block.value.to_integer(), denominator);
            return Some(Node::rational(literal.value + tail));
        }
        Some(Node::Number(literal))
    }

    /// The base in `1011_{\text{two}}`, after the underscore.
    fn base_in_words(&mut self) -> Option<u32> {
        let braced = usize::from(self.sign('{'));
        let Some(MathToken::Word(word)) = self.peek_at(braced) else { return None };
        let base = u32::try_from(super::words::spelled(word)?).ok()?;
        if braced == 1 && self.peek_at(2) != Some(&MathToken::Sign('}')) {
            return None;
        }
        self.at += 1 + 2 * braced;
        Some(base)
    }

    /// Whether `\overline{digits}` is next.
    fn repeating(&self) -> bool {
        matches!(
            (self.peek_at(1), self.peek_at(2), self.peek_at(3)),
            (Some(MathToken::Sign('{')), Some(MathToken::Number(block, text)), Some(MathToken::Sign('}')))
                if block.places == 0 && text.len() < 20
        )
    }

    /// A variable with its subscript and primes, or an unknown function with its arguments.
    pub(super) fn symbol(&mut self, mut name: String) -> Option<Node> {
        if name == "\u{211d}" {
            return Some(Node::Named('R'));
        }
        loop {
            if self.eat('\'') {
                name.push('\'');
            } else if self.sign('_') && name.len() < 100 {
                self.at += 1;
                let from = self.at;
                self.script()?;
                name.push('_');
                for lexeme in &self.lexemes[from..self.at] {
                    match &lexeme.token {
                        MathToken::Number(_, text) | MathToken::Symbol(text) | MathToken::Word(text) => {
                            name.push_str(text)
                        }
                        MathToken::Sign('{' | '}') => {}
                        other => name.push_str(&format!("{other:?}")),
                    }
                }
            } else {
                break;
            }
        }
        let function =
            matches!(name.as_bytes()[0], b'f' | b'g' | b'h' | b'F' | b'G' | b'P' | b'Q' | b'W' | b'T' | b'S');
        if function && self.inverse_of_function() {
            self.at += 5;
            name.push_str("^{-1}");
        }
        let called = self.sign('(') && (!self.spaced() || name.starts_with('f'));
        if called && (function || self.defines()) {
            self.at += 1;
            let (_, arguments) = self.enclosed(Self::parts)?;
            self.expect(')')?;
            return Some(Node::Apply(name, arguments));
        }
        Some(Node::Symbol(name))
    }

    /// Whether `^{-1}(` is next.
    fn inverse_of_function(&self) -> bool {
        let sign = |ahead: usize, sign: char| self.peek_at(ahead) == Some(&MathToken::Sign(sign));
        let one = matches!(self.peek_at(3), Some(MathToken::Number(_, digits)) if digits == "1");
        sign(0, '^') && sign(1, '{') && sign(2, '-') && one && sign(4, '}') && sign(5, '(')
    }

    /// Whether `(x) =` or `(x, y)` is next, so that the letter before it is a function.
    fn defines(&self) -> bool {
        matches!(self.peek_at(1), Some(MathToken::Symbol(_)))
            && match self.peek_at(2) {
                Some(MathToken::Sign(')')) => {
                    matches!(self.peek_at(3), Some(MathToken::Relation(Relation::Equal)))
                }
                Some(MathToken::Sign(',')) => true,
                _ => false,
            }
    }

    /// After `(` or `[`: a group, a tuple or an interval.
    fn parenthesis(&mut self, square: bool) -> Option<Node> {
        let (_, mut parts) = self.parts()?;
        let closing_square = self.sign(']');
        if !closing_square && !self.sign(')') {
            return None;
        }
        self.at += 1;
        if parts.len() == 1 && square == closing_square {
            return parts.pop();
        }
        if !square && !closing_square || parts.len() != 2 {
            return (square == closing_square).then_some(Node::Tuple(parts));
        }
        let high = parts.pop()?;
        let low = parts.pop()?;
        Some(Node::Interval(Box::new(Interval {
            low,
            high,
            low_closed: square,
            high_closed: closing_square,
        })))
    }

    /// After `{` without a backslash: a group, or a list, which may be a set that lost its backslashes.
    fn braces(&mut self) -> Option<Node> {
        let (_, mut parts) = self.parts()?;
        self.expect('}')?;
        if parts.len() == 1 { parts.pop() } else { Some(Node::List(Joint::Comma, parts)) }
    }

    /// After `\{`: elements, or a condition.
    pub(super) fn set(&mut self) -> Option<Node> {
        if self.peek() == Some(&MathToken::SetClose) {
            self.at += 1;
            return Some(Node::Named('0'));
        }
        let bar = (1..8).find(|ahead| matches!(self.peek_at(*ahead), Some(MathToken::Sign('|' | ':'))));
        let builder = bar.filter(|bar| {
            let named = matches!(self.peek(), Some(MathToken::Symbol(_) | MathToken::Sign('(')));
            let mut after = (bar + 1..)
                .map_while(|ahead| self.peek_at(ahead))
                .take_while(|token| **token != MathToken::SetClose);
            named && after.any(|token| matches!(token, MathToken::Relation(_)))
        });
        if let Some(bar) = builder {
            self.at += bar + 1;
            let condition = self.list()?;
            if self.peek() != Some(&MathToken::SetClose) {
                return None;
            }
            self.at += 1;
            return Some(Node::Builder(Box::new(condition)));
        }
        let (_, parts) = self.parts()?;
        if self.peek() != Some(&MathToken::SetClose) {
            return None;
        }
        self.at += 1;
        Some(Node::Set(parts))
    }

    fn absolute(&mut self) -> Option<Node> {
        // `||v||` is a norm, `||x| - 2|` an absolute value within another.
        let bar = |lexeme: &super::lex::Lexeme| lexeme.token == MathToken::Sign('|');
        let closes = self.lexemes[self.at..].windows(3).any(|three| bar(&three[1]) && bar(&three[2]));
        let double = self.sign('|') && closes && self.eat('|');
        self.bars += 1;
        let inner = self.sum();
        self.bars -= 1;
        let inner = inner?;
        self.expect('|')?;
        if double {
            self.expect('|')?;
        }
        Some(match inner {
            Node::Matrix(rows) if !double => Node::Function(MathFunction::Det, vec![Node::Matrix(rows)]),
            inner => Node::Function(MathFunction::Abs, vec![inner]),
        })
    }

    fn command(&mut self, name: &str) -> Option<Node> {
        match name {
            "infty" => Some(Node::Infinity),
            "pi" => Some(Node::Pi),
            "emptyset" => Some(Node::Named('0')),
            "frac" | "dfrac" | "tfrac" | "cfrac" => self.fraction(),
            "binom" | "dbinom" | "tbinom" => {
                let n = self.argument()?;
                Some(Node::Function(MathFunction::Binomial, vec![n, self.argument()?]))
            }
            "sqrt" => self.root(),
            "lfloor" => self.rounded("rfloor", MathFunction::Floor),
            "lceil" => self.rounded("rceil", MathFunction::Ceil),
            "mathbb" | "mathbf" | "bm" | "boldsymbol" | "mathit" | "mathcal" | "vec" | "hat" | "bold"
            | "overrightarrow" => {
                let inner = self.argument()?;
                Some(match inner {
                    Node::Symbol(letter)
                        if name.starts_with("math") && named_set(&letter) && name != "mathit" =>
                    {
                        Node::Named(letter.chars().next()?)
                    }
                    inner => inner,
                })
            }
            "R" | "Z" | "N" | "Q" | "C" => Some(Node::Named(name.chars().next()?)),
            "overline" | "bar" | "tilde" | "widehat" | "overset" | "underline" | "dot" => self.accent(name),
            "angle" | "triangle" | "measuredangle" => {
                let mut letters = format!("{name} ");
                while let Some(MathToken::Symbol(letter)) = self.peek().filter(|_| letters.len() < 20) {
                    letters.push_str(letter);
                    self.at += 1;
                }
                Some(Node::Symbol(letters))
            }
            "int" => self.integral(),
            "lim" => self.limit(),
            "sum" | "prod" => self.series(name == "prod"),
            _ => match function(name) {
                Some(function) => self.call(name, function),
                None => self.symbol(name.to_owned()),
            },
        }
    }

    fn accent(&mut self, name: &str) -> Option<Node> {
        let from = self.at;
        self.argument()?;
        let inner: String = self.lexemes[from..self.at]
            .iter()
            .filter_map(|lexeme| match &lexeme.token {
                MathToken::Symbol(text) | MathToken::Word(text) | MathToken::Number(_, text) => {
                    Some(text.as_str())
                }
                _ => None,
            })
            .collect();
        self.symbol(format!("{name} {inner}"))
    }

    fn fraction(&mut self) -> Option<Node> {
        let derivative = self.derivative();
        if derivative.is_some() {
            return derivative;
        }
        let numerator = self.argument()?;
        let denominator = self.argument()?;
        Some(Node::Quotient(Box::new(numerator), Box::new(denominator)))
    }

    fn root(&mut self) -> Option<Node> {
        let degree = if self.sign('[') {
            self.at += 1;
            let degree = self.enclosed(Self::sum)?;
            self.expect(']')?;
            degree
        } else {
            Node::integer(2)
        };
        let radicand = self.argument()?;
        Some(Node::Root(Box::new(degree), Box::new(radicand)))
    }

    fn rounded(&mut self, closing: &str, function: MathFunction) -> Option<Node> {
        let inner = self.enclosed(Self::sum)?;
        match self.peek() {
            Some(MathToken::Command(name)) if name == closing => self.at += 1,
            _ => return None,
        }
        Some(Node::Function(function, vec![inner]))
    }

    /// A function with its base or power and its argument.
    fn call(&mut self, name: &str, function: MathFunction) -> Option<Node> {
        let mut base = None;
        let mut power = None;
        loop {
            if self.eat('_') {
                base = Some(self.script()?);
            } else if self.eat('^') {
                power = Some(self.script()?);
            } else {
                break;
            }
        }
        let inverse = matches!(&power, Some(Node::Negate(one)) if **one == Node::integer(1) || is_one(one));
        let (function, power) = match inverse_of(function).filter(|_| inverse) {
            Some(inverse) => (inverse, None),
            None => (function, power),
        };
        let arguments = self.arguments(function)?;
        let node = match (function, base) {
            (MathFunction::Ln, Some(base)) => Node::Function(MathFunction::Log, vec![base, one(arguments)?]),
            (MathFunction::Ln, None) if name != "ln" => {
                Node::Function(MathFunction::Log, vec![Node::integer(10), one(arguments)?])
            }
            (function, None) => Node::Function(function, arguments),
            (_, Some(_)) => return None,
        };
        Some(match power {
            Some(power) => Node::Power(Box::new(node), Box::new(power)),
            None => node,
        })
    }

    fn arguments(&mut self, function: MathFunction) -> Option<Vec<Node>> {
        let many =
            matches!(function, MathFunction::Max | MathFunction::Min | MathFunction::Gcd | MathFunction::Lcm);
        if self.sign('(') || (many && (self.sign('{') || self.peek() == Some(&MathToken::SetOpen))) {
            let node = self.nested(Self::primary)?;
            return Some(match node {
                Node::Tuple(parts) | Node::Set(parts) if many => parts,
                // `\sin(x)^2` is the square of the sine.
                node => vec![node],
            });
        }
        Some(vec![self.nested(Self::unbracketed)?])
    }

    /// `2x` in `\sin 2x \cos x`: operands until the next function or sign.
    fn unbracketed(&mut self) -> Option<Node> {
        let negative = self.eat('-');
        let mut node = self.operand()?;
        while self.starts_factor() {
            let ends = match self.peek() {
                Some(MathToken::Command(name)) => {
                    function(name).is_some() || matches!(name.as_str(), "int" | "sum" | "lim")
                }
                Some(MathToken::Sign(sign)) => "([|".contains(*sign),
                Some(MathToken::Number(..)) => true,
                _ => false,
            };
            if ends {
                break;
            }
            node = product(node, self.operand()?);
        }
        if self.sign('/')
            && matches!(node, Node::Pi | Node::Number(_) | Node::Product(_))
            && let Some(MathToken::Number(..)) = self.peek_at(1)
        {
            self.at += 1;
            let denominator = self.operand()?;
            node = Node::Quotient(Box::new(node), Box::new(denominator));
        }
        Some(if negative { node.negated() } else { node })
    }

    /// Rows and cells to the end of the environment.
    fn matrix(&mut self, environment: &str) -> Option<Node> {
        let determinant = environment == "vmatrix";
        let known =
            matches!(environment, "pmatrix" | "bmatrix" | "matrix" | "Bmatrix" | "smallmatrix" | "array");
        if !known && !determinant {
            return None;
        }
        if environment == "array" && self.sign('{') {
            while !self.eat('}') {
                self.peek()?;
                self.at += 1;
            }
        }
        let mut rows = vec![vec![]];
        let mut cells = 0;
        loop {
            match self.peek()? {
                MathToken::End(_) => break,
                MathToken::Break => {
                    rows.push(vec![]);
                    self.at += 1;
                }
                MathToken::Sign('&') => self.at += 1,
                _ => {
                    rows.last_mut()?.push(self.set_sum()?);
                    cells += 1;
                }
            }
            if cells > MAX_CELLS || rows.len() > MAX_CELLS {
                return None;
            }
        }
        self.at += 1;
        if rows.last().is_some_and(Vec::is_empty) {
            rows.pop();
        }
        let width = rows.first()?.len();
        if width == 0 || rows.iter().any(|row| row.len() != width) {
            return None;
        }
        let matrix = Node::Matrix(rows);
        Some(if determinant { Node::Function(MathFunction::Det, vec![matrix]) } else { matrix })
    }

    fn set_sum(&mut self) -> Option<Node> {
        self.sum()
    }
}

fn is_one(node: &Node) -> bool {
    matches!(node, Node::Number(literal) if literal.value == num_rational::BigRational::from_integer(1.into()))
}

fn one(mut arguments: Vec<Node>) -> Option<Node> {
    if arguments.len() == 1 { arguments.pop() } else { None }
}

fn named_set(letter: &str) -> bool {
    matches!(letter, "R" | "Z" | "N" | "Q" | "C")
}
