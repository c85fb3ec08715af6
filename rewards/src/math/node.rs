//! The syntax tree of an answer: scalars, sequences, sets, relations, matrices.
//!
//! Invariant: the parser bounds the depth of a tree (see `parse`), so recursion over it is bounded. Nothing is simplified
//! here. Two different trees may be mathematically equal.

use num_bigint::BigInt;
use num_rational::BigRational;

/// One node of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Node {
    /// A literal without sign.
    Number(Literal),
    /// `\infty`; its sign is a node around it.
    Infinity,
    /// `\pi`.
    Pi,
    /// A variable, or `e` or `i` where they are not bound.
    Symbol(String),
    /// An unknown function: name and arguments.
    Apply(String, Vec<Node>),
    /// A sum of terms.
    Sum(Vec<Node>),
    /// A product of factors. The order counts for matrices.
    Product(Vec<Node>),
    /// `-x`.
    Negate(Box<Node>),
    /// Numerator and denominator.
    Quotient(Box<Node>, Box<Node>),
    /// Base and exponent.
    Power(Box<Node>, Box<Node>),
    /// Degree and radicand.
    Root(Box<Node>, Box<Node>),
    /// A known function with all of its arguments.
    Function(MathFunction, Vec<Node>),
    /// `\pm x` (true) or `\mp x` (false), as a term.
    PlusMinus(bool, Box<Node>),
    /// `x\%`.
    Percent(Box<Node>),
    /// `x^\circ`.
    Degree(Box<Node>),
    /// Digits and their base.
    Based(String, u32),
    /// `a:b:c`, or a time of day.
    Ratio(Vec<Node>),
    /// A scalar with the words after it.
    Quantity(Box<Node>, String),
    /// Rows of cells, all of one length.
    Matrix(Vec<Vec<Node>>),
    /// The transpose of a matrix.
    Transpose(Box<Node>),
    /// An integral, a derivative, a limit, a sum or a product over an index.
    Calculus(Box<Calculus>),
    /// `(a, b, ...)`: order counts. A pair may also be meant as an open interval.
    Tuple(Vec<Node>),
    /// `\{a, b, ...\}`.
    Set(Vec<Node>),
    /// `a, b and c`: several answers.
    List(Joint, Vec<Node>),
    /// An interval with at least one end closed.
    Interval(Box<Interval>),
    /// `a \cup b`.
    Union(Box<Node>, Box<Node>),
    /// `a \cap b`.
    Intersection(Box<Node>, Box<Node>),
    /// `a \setminus b`.
    Difference(Box<Node>, Box<Node>),
    /// `\mathbb{R}` and the like, by letter; `0` is the empty set.
    Named(char),
    /// `\{x \mid condition\}`.
    Builder(Box<Node>),
    /// `a < b \le c`: the first member, then each relation with its right member.
    Chain(Box<Node>, Vec<(Relation, Node)>),
    /// Words without mathematics.
    Words(String),
}

/// A number as written.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Literal {
    /// Its exact value.
    pub(super) value: BigRational,
    /// Digits after the decimal point.
    pub(super) places: u32,
    /// Digits from the first that is not zero.
    pub(super) significant: u32,
}

/// Functions that are evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MathFunction {
    Sin,
    Cos,
    Tan,
    Cot,
    Sec,
    Csc,
    Arcsin,
    Arccos,
    Arctan,
    Arccot,
    Sinh,
    Cosh,
    Tanh,
    Arsinh,
    Arcosh,
    Artanh,
    /// Natural exponential.
    Exp,
    /// Natural logarithm.
    Ln,
    /// Logarithm of the second argument to the base of the first.
    Log,
    Abs,
    Factorial,
    Binomial,
    Floor,
    Ceil,
    Max,
    Min,
    Gcd,
    Lcm,
    Mod,
    Det,
}

/// The relation between two members of a [`Node::Chain`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Relation {
    Equal,
    Unequal,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    Approximately,
    Congruent,
    In,
    NotIn,
}

/// The conjunction of a [`Node::List`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Joint {
    Comma,
    And,
    Or,
}

/// Ends of an interval and whether they belong to it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Interval {
    pub(super) low: Node,
    pub(super) high: Node,
    pub(super) low_closed: bool,
    pub(super) high_closed: bool,
}

/// Operators that bind a variable.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Calculus {
    /// Body, variable and how often.
    Derivative(Node, String, u32),
    /// Integrand, variable and bounds, if any.
    Integral(Node, String, Option<(Node, Node)>),
    /// Body, variable, point, side (-1, 0, 1).
    Limit(Node, String, Node, i8),
    /// Body, index, first and last value; true for a product.
    Series(Node, String, Node, Node, bool),
}

impl Node {
    pub(super) fn integer(value: i64) -> Self {
        Self::rational(BigRational::from(BigInt::from(value)))
    }

    pub(super) fn rational(value: BigRational) -> Self {
        Self::Number(Literal { value, places: 0, significant: 1 })
    }

    pub(super) fn negated(self) -> Self {
        Self::Negate(Box::new(self))
    }

    pub(super) fn minus(self, other: Self) -> Self {
        Self::Sum(vec![self, other.negated()])
    }

    /// The direct parts, in order.
    pub(super) fn children(&self) -> Vec<&Self> {
        match self {
            Self::Number(_) | Self::Infinity | Self::Pi | Self::Symbol(_) => vec![],
            Self::Based(..) | Self::Named(_) | Self::Words(_) => vec![],
            Self::Apply(_, parts) | Self::Function(_, parts) | Self::List(_, parts) => parts.iter().collect(),
            Self::Sum(parts) | Self::Product(parts) | Self::Ratio(parts) => parts.iter().collect(),
            Self::Tuple(parts) | Self::Set(parts) => parts.iter().collect(),
            Self::Negate(part) | Self::PlusMinus(_, part) | Self::Percent(part) => vec![part],
            Self::Degree(part) | Self::Quantity(part, _) | Self::Transpose(part) => vec![part],
            Self::Builder(part) => vec![part],
            Self::Quotient(a, b) | Self::Power(a, b) | Self::Root(a, b) => vec![a, b],
            Self::Union(a, b) | Self::Intersection(a, b) | Self::Difference(a, b) => vec![a, b],
            Self::Matrix(rows) => rows.iter().flatten().collect(),
            Self::Interval(interval) => vec![&interval.low, &interval.high],
            Self::Chain(first, rest) => {
                std::iter::once(&**first).chain(rest.iter().map(|(_, member)| member)).collect()
            }
            Self::Calculus(calculus) => calculus.children(),
        }
    }

    /// The same node with every direct part replaced.
    pub(super) fn map(&self, change: &mut dyn FnMut(&Self) -> Self) -> Self {
        match self {
            Self::Apply(name, parts) => Self::Apply(name.clone(), mapped(parts, change)),
            Self::Function(function, parts) => Self::Function(*function, mapped(parts, change)),
            Self::List(joint, parts) => Self::List(*joint, mapped(parts, change)),
            Self::Sum(parts) => Self::Sum(mapped(parts, change)),
            Self::Product(parts) => Self::Product(mapped(parts, change)),
            Self::Ratio(parts) => Self::Ratio(mapped(parts, change)),
            Self::Tuple(parts) => Self::Tuple(mapped(parts, change)),
            Self::Set(parts) => Self::Set(mapped(parts, change)),
            Self::Negate(part) => Self::Negate(Box::new(change(part))),
            Self::PlusMinus(plus, part) => Self::PlusMinus(*plus, Box::new(change(part))),
            Self::Percent(part) => Self::Percent(Box::new(change(part))),
            Self::Degree(part) => Self::Degree(Box::new(change(part))),
            Self::Quantity(part, unit) => Self::Quantity(Box::new(change(part)), unit.clone()),
            Self::Transpose(part) => Self::Transpose(Box::new(change(part))),
            Self::Builder(part) => Self::Builder(Box::new(change(part))),
            Self::Quotient(a, b) => Self::Quotient(Box::new(change(a)), Box::new(change(b))),
            Self::Power(a, b) => Self::Power(Box::new(change(a)), Box::new(change(b))),
            Self::Root(a, b) => Self::Root(Box::new(change(a)), Box::new(change(b))),
            Self::Union(a, b) => Self::Union(Box::new(change(a)), Box::new(change(b))),
            Self::Intersection(a, b) => Self::Intersection(Box::new(change(a)), Box::new(change(b))),
            Self::Difference(a, b) => Self::Difference(Box::new(change(a)), Box::new(change(b))),
            Self::Matrix(rows) => Self::Matrix(rows.iter().map(|row| mapped(row, change)).collect()),
            Self::Interval(interval) => Self::Interval(Box::new(Interval {
                low: change(&interval.low),
                high: change(&interval.high),
                ..(**interval).clone()
            })),
            Self::Chain(first, rest) => {
                let first = Box::new(change(first));
                Self::Chain(first, rest.iter().map(|(relation, node)| (*relation, change(node))).collect())
            }
            Self::Calculus(calculus) => Self::Calculus(Box::new(calculus.map(change))),
            leaf => leaf.clone(),
        }
    }

    /// Whether any node of the tree fulfils the condition.
    pub(super) fn any(&self, condition: &dyn Fn(&Self) -> bool) -> bool {
        condition(self) || self.children().iter().any(|child| child.any(condition))
    }

    /// Number of nodes of the tree.
    pub(super) fn size(&self) -> usize {
        1 + self.children().iter().map(|child| child.size()).sum::<usize>()
    }

    /// Adds the free variables in order of appearance, without `e` and `i`.
    pub(super) fn variables<'a>(&'a self, into: &mut Vec<&'a str>) {
        match self {
            Self::Symbol(name) if name != "e" && name != "i" && !into.contains(&name.as_str()) => {
                into.push(name);
            }
            Self::Calculus(calculus) => calculus.variables(into),
            node => node.children().into_iter().for_each(|child| child.variables(into)),
        }
    }

    /// Whether the imaginary unit may occur.
    pub(super) fn complex(&self) -> bool {
        self.any(&|node| matches!(node, Self::Symbol(name) if name == "i"))
    }

    /// A copy in which a variable is another tree.
    pub(super) fn substitute(&self, variable: &str, value: &Self) -> Self {
        match self {
            Self::Symbol(name) if name == variable => value.clone(),
            node => node.map(&mut |child| child.substitute(variable, value)),
        }
    }

    /// A copy in which every variable and function has another name.
    pub(super) fn renamed(&self, rename: &dyn Fn(&str) -> String) -> Self {
        match self {
            Self::Symbol(name) => Self::Symbol(rename(name)),
            Self::Calculus(calculus) => {
                let Self::Calculus(calculus) =
                    Self::Calculus(calculus.clone()).map(&mut |child| child.renamed(rename))
                else {
                    return self.clone();
                };
                Self::Calculus(Box::new(calculus.with_variable(rename)))
            }
            node => node.map(&mut |child| child.renamed(rename)),
        }
    }

    /// A copy with every `\pm` as plus (`true`) or minus, and every `\mp` as the opposite.
    pub(super) fn with_signs(&self, plus: bool) -> Self {
        match self {
            Self::PlusMinus(upper, part) => {
                let part = part.with_signs(plus);
                if *upper == plus { part } else { part.negated() }
            }
            node => node.map(&mut |child| child.with_signs(plus)),
        }
    }

    pub(super) fn has_signs(&self) -> bool {
        self.any(&|node| matches!(node, Self::PlusMinus(..)))
    }
}

impl Calculus {
    fn children(&self) -> Vec<&Node> {
        match self {
            Self::Derivative(body, ..) | Self::Integral(body, _, None) => vec![body],
            Self::Integral(body, _, Some((low, high))) => vec![body, low, high],
            Self::Limit(body, _, point, _) => vec![body, point],
            Self::Series(body, _, first, last, _) => vec![body, first, last],
        }
    }

    fn map(&self, change: &mut dyn FnMut(&Node) -> Node) -> Self {
        match self {
            Self::Derivative(body, variable, order) => {
                Self::Derivative(change(body), variable.clone(), *order)
            }
            Self::Integral(body, variable, bounds) => Self::Integral(
                change(body),
                variable.clone(),
                bounds.as_ref().map(|(low, high)| (change(low), change(high))),
            ),
            Self::Limit(body, variable, point, side) => {
                Self::Limit(change(body), variable.clone(), change(point), *side)
            }
            Self::Series(body, index, first, last, product) => {
                Self::Series(change(body), index.clone(), change(first), change(last), *product)
            }
        }
    }

    fn with_variable(mut self, rename: &dyn Fn(&str) -> String) -> Self {
        let (Self::Derivative(_, name, _)
        | Self::Integral(_, name, _)
        | Self::Limit(_, name, ..)
        | Self::Series(_, name, ..)) = &mut self;
        *name = rename(name);
        self
    }

    fn variables<'a>(&'a self, into: &mut Vec<&'a str>) {
        let bound = match self {
            Self::Integral(_, name, Some(_)) | Self::Limit(_, name, ..) | Self::Series(_, name, ..) => {
                Some(name.as_str())
            }
            Self::Derivative(..) | Self::Integral(..) => None,
        };
        let mut inner = vec![];
        self.children().into_iter().for_each(|child| child.variables(&mut inner));
        for name in inner {
            if Some(name) != bound && !into.contains(&name) {
                into.push(name);
            }
        }
    }
}

fn mapped(parts: &[Node], change: &mut dyn FnMut(&Node) -> Node) -> Vec<Node> {
    parts.iter().map(change).collect()
}
