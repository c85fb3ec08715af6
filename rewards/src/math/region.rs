//! Unions of finitely many real intervals: the meaning of inequalities, intervals and their unions.
//!
//! Invariant: spans are sorted, not empty and do not touch. Two regions are equal if their spans are equal.

use num_rational::BigRational;
use num_traits::{Signed, ToPrimitive, Zero};

use super::identity;
use super::node::{Interval, Joint, MathFunction, Node, Relation};
use super::numeric::constant;
use super::rational;

/// Most spans of a region.
const MAX_SPANS: usize = 64;
/// Most nested absolute values that are solved. Each level multiplies the work.
const MAX_ABSOLUTES: u32 = 2;
/// Most nodes of an inequality with absolute values.
const MAX_NODES: usize = 80;
/// The name of an absolute value during its solution. No variable has this name.
const ABSOLUTE: &str = "| |";

/// A union of intervals.
#[derive(Clone, Debug)]
pub(super) struct Region(Vec<Span>);

#[derive(Clone, Debug)]
struct Span {
    low: IntervalEnd,
    high: IntervalEnd,
}

/// One end of an interval. Infinite ends are open.
#[derive(Clone, Debug)]
struct IntervalEnd {
    value: f64,
    exact: Option<BigRational>,
    closed: bool,
    /// As written, or computed.
    node: Node,
}

impl Region {
    fn all() -> Self {
        Self(vec![Span { low: IntervalEnd::infinite(-1.0), high: IntervalEnd::infinite(1.0) }])
    }

    fn point(at: &IntervalEnd) -> Self {
        let closed = IntervalEnd { closed: true, ..at.clone() };
        Self(vec![Span { low: closed.clone(), high: closed }])
    }

    /// Whether both are the same set. A decimal end matches the value that was rounded to it.
    pub(super) fn equals(&self, other: &Self) -> bool {
        let same = |a: &IntervalEnd, b: &IntervalEnd| {
            a.closed == b.closed && (a.same_place(b) || identity::rounded_part(&a.node, &b.node))
        };
        self.0.len() == other.0.len()
            && self.0.iter().zip(&other.0).all(|(a, b)| same(&a.low, &b.low) && same(&a.high, &b.high))
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn union(mut self, other: Self) -> Option<Self> {
        self.0.extend(other.0);
        if self.0.len() > MAX_SPANS {
            return None;
        }
        self.0.sort_by(|a, b| a.low.value.total_cmp(&b.low.value).then(b.low.closed.cmp(&a.low.closed)));
        let mut spans: Vec<Span> = vec![];
        for span in self.0 {
            let Some(last) = spans.last_mut() else {
                spans.push(span);
                continue;
            };
            let gap = span.low.value > last.high.value && !span.low.same_place(&last.high);
            let hole = span.low.same_place(&last.high) && !span.low.closed && !last.high.closed;
            if gap || hole {
                spans.push(span);
            } else if span.high.same_place(&last.high) {
                last.high.closed |= span.high.closed;
            } else if span.high.value > last.high.value {
                last.high = span.high;
            }
        }
        Some(Self(spans))
    }

    fn complement(&self) -> Self {
        let mut spans = vec![];
        let mut low = IntervalEnd::infinite(-1.0);
        for span in &self.0 {
            let high =
                IntervalEnd { closed: !span.low.closed && span.low.value.is_finite(), ..span.low.clone() };
            spans.extend(Span::new(low, high));
            low =
                IntervalEnd { closed: !span.high.closed && span.high.value.is_finite(), ..span.high.clone() };
        }
        spans.extend(Span::new(low, IntervalEnd::infinite(1.0)));
        Self(spans)
    }

    fn intersection(self, other: &Self) -> Option<Self> {
        Some(self.complement().union(other.complement())?.complement())
    }
}

impl Span {
    fn new(low: IntervalEnd, high: IntervalEnd) -> Option<Self> {
        let point = low.same_place(&high) && low.closed && high.closed && low.value.is_finite();
        (point || (low.value < high.value && !low.same_place(&high))).then_some(Self { low, high })
    }
}

impl IntervalEnd {
    fn infinite(sign: f64) -> Self {
        let node = if sign < 0.0 { Node::Infinity.negated() } else { Node::Infinity };
        Self { value: sign * f64::INFINITY, exact: None, closed: false, node }
    }

    fn same_place(&self, other: &Self) -> bool {
        match (&self.exact, &other.exact) {
            (Some(a), Some(b)) => a == b,
            _ => {
                let close = (self.value - other.value).abs() <= 1e-10 * self.value.abs().max(1e-3);
                self.value.total_cmp(&other.value).is_eq() || (close && self.value.is_finite())
            }
        }
    }

    /// A constant; `None` if it depends on variables.
    fn read(node: &Node, closed: bool) -> Option<Self> {
        if let Some(sign) = super::identity::infinity(node) {
            return Some(Self::infinite(f64::from(sign)));
        }
        let exact = rational::exact(node);
        let value = match &exact {
            Some(exact) => exact.to_f64()?,
            None => constant(node).filter(|value| value.real())?.re,
        };
        Some(Self { value, exact, closed, node: node.clone() })
    }
}

/// The set of real numbers that an answer describes, and its variable, if it names one.
///
/// `pairs`: whether `(1, 2)` is an open interval.
pub(super) fn region(node: &Node, pairs: bool) -> Option<(Region, Option<String>)> {
    let plain = |region| Some((region, None));
    match node {
        Node::Named('R') => plain(Region::all()),
        Node::Named('0') => plain(Region(vec![])),
        Node::Interval(interval) => plain(Region(vec![interval_span(interval)?])),
        Node::Tuple(parts) if pairs && parts.len() == 2 => {
            let span = Span::new(IntervalEnd::read(&parts[0], false)?, IntervalEnd::read(&parts[1], false)?)?;
            plain(Region(vec![span]))
        }
        Node::Set(parts) => {
            let mut all = Region(vec![]);
            for part in parts {
                all = all.union(Region::point(&IntervalEnd::read(part, true)?))?;
            }
            plain(all)
        }
        Node::Union(a, b) => plain(region(a, true)?.0.union(region(b, true)?.0)?),
        Node::Intersection(a, b) => plain(region(a, true)?.0.intersection(&region(b, true)?.0)?),
        Node::Difference(a, b) => plain(region(a, true)?.0.intersection(&region(b, true)?.0.complement())?),
        Node::Builder(condition) => region(condition, pairs),
        Node::Chain(first, rest) => chain(first, rest),
        Node::List(joint, parts) => list(*joint, parts),
        _ => None,
    }
}

fn interval_span(interval: &Interval) -> Option<Span> {
    let closed = |node: &Node, closed: bool| closed && super::identity::infinity(node).is_none();
    let low = IntervalEnd::read(&interval.low, closed(&interval.low, interval.low_closed))?;
    let high = IntervalEnd::read(&interval.high, closed(&interval.high, interval.high_closed))?;
    Span::new(low, high)
}

/// Several inequalities about one variable: all of them after `and`, any of them otherwise.
fn list(joint: Joint, parts: &[Node]) -> Option<(Region, Option<String>)> {
    let mut any: Option<Region> = None;
    let mut all: Option<Region> = None;
    let mut name = None;
    for part in parts {
        if !matches!(part, Node::Chain(..) | Node::Interval(_)) {
            return None;
        }
        let (next, about) = region(part, true)?;
        if name.is_some() && about != name {
            return None;
        }
        name = about;
        any = Some(match any {
            Some(any) => any.union(next.clone())?,
            None => next.clone(),
        });
        all = Some(match all {
            Some(all) => all.intersection(&next)?,
            None => next,
        });
    }
    let conditions = joint == Joint::And && parts.iter().all(|part| matches!(part, Node::Chain(..)));
    let all = all.filter(|all| conditions || (joint != Joint::Or && !all.is_empty()));
    Some((all.or(any)?, name))
}

/// `2 < x \le 7`, `x \in S`, `x \ne 3`, `2x + 1 > 0`, `|x - 1| > 2`, `0 < f(x) < 1`.
fn chain(first: &Node, rest: &[(Relation, Node)]) -> Option<(Region, Option<String>)> {
    if let Some((value, name)) = function_value(first, rest) {
        let as_variable = |node: &Node| if node == value { Node::Symbol(name.clone()) } else { node.clone() };
        let rest: Vec<_> = rest.iter().map(|(relation, node)| (*relation, as_variable(node))).collect();
        return chain(&as_variable(first), &rest);
    }
    if let (Node::Symbol(name), [(relation @ (Relation::In | Relation::NotIn), set)]) = (first, rest) {
        let (set, _) = region(set, true)?;
        let set = if *relation == Relation::In { set } else { set.complement() };
        return Some((set, Some(name.clone())));
    }
    let mut names = vec![];
    first.variables(&mut names);
    rest.iter().for_each(|(_, member)| member.variables(&mut names));
    let [name] = names.as_slice() else { return None };
    let absolute = |node: &Node| node.any(&|node| matches!(node, Node::Function(MathFunction::Abs, _)));
    let nodes = size(first) + rest.iter().map(|(_, member)| size(member)).sum::<usize>();
    if nodes > MAX_NODES && (absolute(first) || rest.iter().any(|(_, member)| absolute(member))) {
        return None;
    }
    let mut left = first;
    let mut all = Region::all();
    for (relation, right) in rest {
        all = all.intersection(&half_line(left, *relation, right, name, 0)?)?;
        left = right;
    }
    Some((all, Some((*name).to_owned())))
}

/// The value of the unknown function in a chain, and a name for it. The other members have no variables.
fn function_value<'a>(first: &'a Node, rest: &'a [(Relation, Node)]) -> Option<(&'a Node, String)> {
    let open = |node: &&Node| {
        node.any(&|node| match node {
            Node::Symbol(name) => name != "e" && name != "i",
            node => matches!(node, Node::Apply(..)),
        })
    };
    let mut members = std::iter::once(first).chain(rest.iter().map(|(_, node)| node)).filter(open);
    let value = members.next().filter(|value| matches!(value, Node::Apply(..)))?;
    members.all(|other| other == value).then(|| (value, format!("{value:?}")))
}

/// The solution of an inequality in one variable that is linear, or linear in an absolute value of a linear expression.
/// `name` is the variable, `depth` the number of open absolute values.
fn half_line(left: &Node, relation: Relation, right: &Node, name: &str, depth: u32) -> Option<Region> {
    for (side, other, relation) in [(left, right, relation), (right, left, flipped(relation))] {
        if matches!(side, Node::Symbol(symbol) if symbol == name) && end_of(other, name).is_some() {
            return ray(&end_of(other, name)?, relation);
        }
    }
    let difference = left.clone().minus(right.clone());
    let mut absolutes = vec![];
    kinks(&difference, name, &mut absolutes);
    match absolutes.as_slice() {
        [] => {
            let (end, falls) = root(&difference, name)?;
            ray(&end, if falls { flipped(relation) } else { relation })
        }
        [Node::Function(MathFunction::Abs, inner)] if depth < MAX_ABSOLUTES => {
            let absolute = absolutes[0];
            let outer = replaced(&difference, absolute, &Node::Symbol(ABSOLUTE.to_owned()));
            if holds(&outer, name) {
                return None;
            }
            let zero = Node::integer(0);
            let sizes = half_line(&outer, relation, &zero, ABSOLUTE, depth)?
                .intersection(&ray(&IntervalEnd::read(&zero, false)?, Relation::GreaterEqual)?)?;
            absolute_within(&sizes, inner.first()?, name, depth + 1)
        }
        _ => None,
    }
}

/// The set where the absolute value of `inner` is one of `sizes`. No size is negative.
fn absolute_within(sizes: &Region, inner: &Node, name: &str, depth: u32) -> Option<Region> {
    let mut all = Region(vec![]);
    for span in &sizes.0 {
        for inner in [inner.clone(), inner.clone().negated()] {
            let mut part = Region::all();
            let lower = if span.low.closed { Relation::GreaterEqual } else { Relation::Greater };
            let upper = if span.high.closed { Relation::LessEqual } else { Relation::Less };
            for (end, relation) in [(&span.low, lower), (&span.high, upper)] {
                if end.value.is_finite() {
                    part = part.intersection(&half_line(&inner, relation, &end.node, name, depth)?)?;
                }
            }
            all = all.union(part)?;
        }
    }
    Some(all)
}

/// The zero of a linear expression, and whether it falls there: from its values at 0, 1, 2 and 17, exact if possible.
fn root(node: &Node, name: &str) -> Option<(IntervalEnd, bool)> {
    let at = |x: i64| node.substitute(name, &Node::integer(x));
    let exact = |x: i64| rational::exact(&at(x));
    if let (Some(zero), Some(one), Some(two), Some(far)) = (exact(0), exact(1), exact(2), exact(17)) {
        let slope = &one - &zero;
        let linear = two - &one == slope && far == &zero + &slope * BigRational::from_integer(17.into());
        if slope.is_zero() || !linear {
            return None;
        }
        let place = -zero / &slope;
        let whole = |value: &num_bigint::BigInt| Box::new(Node::rational(value.clone().into()));
        // A quotient: a number would be one as written.
        let node = match place.is_integer() {
            true => Node::rational(place.clone()),
            false => Node::Quotient(whole(place.numer()), whole(place.denom())),
        };
        return Some((
            IntervalEnd { value: place.to_f64()?, exact: Some(place), closed: false, node },
            slope.is_negative(),
        ));
    }
    let value = |x: i64| constant(&at(x)).filter(|value| value.real()).map(|value| value.re);
    let (zero, one, two, far) = (value(0)?, value(1)?, value(2)?, value(17)?);
    let (slope, scale) = (one - zero, 1e-11 * (zero.abs() + one.abs() + far.abs()));
    let linear = (two - one - slope).abs() <= scale && (far - zero - 17.0 * slope).abs() <= 17.0 * scale;
    if !linear || slope.abs() <= 1e3 * scale {
        return None;
    }
    let place = Node::Quotient(Box::new(at(0).negated()), Box::new(at(1).minus(at(0))));
    Some((IntervalEnd::read(&place, false)?, slope < 0.0))
}

/// Adds the outermost functions with kinks or steps that depend on the variable.
fn kinks<'a>(node: &'a Node, name: &str, into: &mut Vec<&'a Node>) {
    use MathFunction::{Abs, Ceil, Floor, Gcd, Lcm, Max, Min, Mod};
    match node {
        Node::Function(Abs | Ceil | Floor | Gcd | Lcm | Max | Min | Mod, _) if holds(node, name) => {
            if !into.contains(&node) {
                into.push(node);
            }
        }
        node => node.children().into_iter().for_each(|child| kinks(child, name, into)),
    }
}

fn size(node: &Node) -> usize {
    1 + node.children().into_iter().map(size).sum::<usize>()
}

fn replaced(node: &Node, part: &Node, by: &Node) -> Node {
    if node == part { by.clone() } else { node.map(&mut |child| replaced(child, part, by)) }
}

fn holds(node: &Node, name: &str) -> bool {
    node.any(&|node| matches!(node, Node::Symbol(symbol) if symbol == name))
}

fn end_of(node: &Node, name: &str) -> Option<IntervalEnd> {
    if holds(node, name) { None } else { IntervalEnd::read(node, false) }
}

fn ray(end: &IntervalEnd, relation: Relation) -> Option<Region> {
    let closed = matches!(relation, Relation::LessEqual | Relation::GreaterEqual) && end.value.is_finite();
    let end = IntervalEnd { closed, ..end.clone() };
    let spans = match relation {
        Relation::Less | Relation::LessEqual => Span::new(IntervalEnd::infinite(-1.0), end),
        Relation::Greater | Relation::GreaterEqual => Span::new(end, IntervalEnd::infinite(1.0)),
        Relation::Unequal => return Some(Region::point(&end).complement()),
        _ => return None,
    };
    Some(Region(spans.into_iter().collect()))
}

/// The relation as read from the right.
pub(super) fn flipped(relation: Relation) -> Relation {
    match relation {
        Relation::Less => Relation::Greater,
        Relation::LessEqual => Relation::GreaterEqual,
        Relation::Greater => Relation::Less,
        Relation::GreaterEqual => Relation::LessEqual,
        relation => relation,
    }
}
