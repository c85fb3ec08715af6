//! Compares two answers: assignments, sequences, sets, relations and matrices down to scalars.
//!
//! The comparison is asymmetric, because the reference defines the required form. A value matches `x = 5` and `x = 5`
//! matches a value. A value never matches an equation that is not solved.
//!
//! Invariant: the number of scalar comparisons is bounded by [`BUDGET`].

use std::cell::Cell;

use super::identity;
use super::matrix;
use super::naming::{assignment, is_name, named_apart, record};
use super::node::{Calculus, Joint, MathFunction, Node, Relation};
use super::notation::{close, meridiem, plain_percentage, time_of_day};
use super::region::{flipped, region};
use super::units;

/// Most scalar comparisons for one verdict.
const BUDGET: u32 = 2500;

/// Compares answers with the random points of one seed.
#[derive(Debug)]
pub(super) struct AnswerComparison<'w> {
    seed: u64,
    left: Cell<u32>,
    visits: &'w Cell<u32>,
}

/// Whether two answers are equal; `None` if that is unknown. Names of variables count if `strict`. `visits` is the number
/// of node visits left.
pub(super) fn same(gold: &Node, pred: &Node, strict: bool, seed: u64, visits: &Cell<u32>) -> Option<bool> {
    let (gold, pred) = if strict {
        (gold.clone(), pred.clone())
    } else {
        let (gold, pred) = one_spelling(gold, pred);
        let pred = renamed_as(&gold, &pred);
        (gold, pred)
    };
    let comparison = AnswerComparison { seed, left: Cell::new(BUDGET), visits };
    comparison.answers(&settled(&gold), &settled(&pred))
}

impl AnswerComparison<'_> {
    fn answers(&self, gold: &Node, pred: &Node) -> Option<bool> {
        self.left.set(self.left.get().checked_sub(1)?);
        if let (Node::Words(a), Node::Words(b)) = (gold, pred) {
            return Some(a == b);
        }
        if let (Some(a), Some(b)) = (record(gold), record(pred))
            && a.len() > 1
            && a.len() == b.len()
            && let Some(pairs) = self.paired(&a, &b)
        {
            return all(pairs.iter().map(|(value, other)| self.answers(value, other)));
        }
        match (assignment(gold), assignment(pred)) {
            (Some((a, x)), Some((b, y))) => {
                let named = self.same_name(a, b, y);
                if let Some(y) = named {
                    return self.answers(x, &y);
                }
                return self.relations(gold, pred);
            }
            (Some((_, value)), None) if !is_equation(pred) && !is_inequality(pred) => {
                return self.answers(value, pred);
            }
            (None, Some((_, value))) if !is_equation(gold) && !is_inequality(gold) => {
                return if self.consistent(pred)? { self.answers(gold, value) } else { Some(false) };
            }
            _ => {}
        }
        match (gold, pred) {
            (gold, Node::Chain(_, rest)) if is_equation(pred) && !matches!(gold, Node::Chain(..)) => {
                let (_, value) = rest.last()?;
                if !is_zero(value) && self.consistent(pred)? {
                    self.answers(gold, value)
                } else {
                    Some(false)
                }
            }
            (Node::Chain(..), Node::Chain(..)) => self.relations(gold, pred),
            (Node::Chain(..), _) if is_equation(gold) => Some(false),
            _ => self.collections(gold, pred),
        }
    }

    /// Whether an equation states a value: it assigns it (`x = 5`), or computes it, and all sides without variables are
    /// equal.
    ///
    /// `2x + y = 2 + 3 = 5` computes a value; `2x = 5` is not solved and `3 + 4 = 5` is wrong.
    fn consistent(&self, pred: &Node) -> Option<bool> {
        let Node::Chain(first, rest) = pred else { return Some(true) };
        let (_, last) = rest.last()?;
        let solved = |node: &Node| {
            let mut names = vec![];
            node.variables(&mut names);
            names.is_empty()
        };
        if is_name(first) {
            return Some(true);
        }
        let sides = std::iter::once(&**first).chain(rest.iter().map(|(_, side)| side));
        let known: Vec<&Node> = sides.filter(|side| solved(side)).collect();
        if !solved(first) && (rest.len() < 2 || known.len() < 2) {
            return Some(false);
        }
        all(known.into_iter().map(|side| self.answers(side, last)))
    }

    /// Compares sets of numbers, sequences and matrices, then scalars.
    fn collections(&self, gold: &Node, pred: &Node) -> Option<bool> {
        if is_region(gold) || is_region(pred) || region_list(gold) || region_list(pred) {
            return self.regions(gold, pred);
        }
        if let Some(a) = matrix::cells(gold)
            && let Some(b) = matrix::cells(pred)
        {
            let shape = |rows: &[Vec<Node>]| (rows.len(), rows[0].len());
            if shape(&a) != shape(&b) {
                return Some(false);
            }
            let same = |(a, b)| if identity::rounded_part(a, b) { Some(true) } else { self.answers(a, b) };
            return all(a.iter().flatten().zip(b.iter().flatten()).map(same));
        }
        // A row or a column also matches the list of its cells.
        let vector = |rows: Vec<Vec<Node>>| (rows.len() == 1 || rows[0].len() == 1).then(|| rows.concat());
        let cells = |node: &Node| matrix::cells(node).and_then(vector).map(Node::Tuple);
        match (cells(gold), cells(pred)) {
            (Some(gold), None) if matches!(pred, Node::Tuple(_)) => return self.collections(&gold, pred),
            (None, Some(pred)) if matches!(gold, Node::Tuple(_)) => return self.collections(gold, &pred),
            _ => {}
        }
        match (elements(gold), elements(pred)) {
            (Some(a), Some(b)) => self.sequences(gold, a, pred, b),
            (Some([single]), None) if !matches!(gold, Node::Tuple(_)) => self.answers(single, pred),
            (None, Some([single])) if !matches!(pred, Node::Tuple(_)) => self.answers(gold, single),
            (None, None) => self.scalars(gold, pred),
            _ => Some(false),
        }
    }

    fn sequences(&self, gold: &Node, a: &[Node], pred: &Node, b: &[Node]) -> Option<bool> {
        if matches!((gold, pred), (Node::Set(_), Node::Tuple(_)) | (Node::Tuple(_), Node::Set(_))) {
            return Some(false);
        }
        let ordered = matches!(gold, Node::Tuple(_))
            || (matches!(pred, Node::Tuple(_)) && !matches!(gold, Node::Set(_)))
            || (named_apart(a) && !b.iter().any(|part| assignment(part).is_some()));
        if ordered {
            if a.len() != b.len() {
                return Some(false);
            }
            return all(a.iter().zip(b).map(|(a, b)| self.answers(a, b)));
        }
        let (a, b) = (self.distinct(a), self.distinct(b));
        if a.len() != b.len() {
            return Some(false);
        }
        // Equality is an equivalence relation, so the first equal partner can be taken.
        let mut free: Vec<&Node> = b;
        let mut unknown = false;
        for part in a {
            let mut partner = None;
            for (at, other) in free.iter().enumerate() {
                match self.answers(part, other) {
                    Some(true) => {
                        partner = Some(at);
                        break;
                    }
                    Some(false) => {}
                    None => unknown = true,
                }
            }
            let Some(at) = partner else { return if unknown { None } else { Some(false) } };
            free.swap_remove(at);
        }
        Some(true)
    }

    fn distinct<'n>(&self, parts: &'n [Node]) -> Vec<&'n Node> {
        let mut found: Vec<&Node> = vec![];
        for part in parts {
            if parts.len() > 12 || !found.iter().any(|known| self.answers(known, part) == Some(true)) {
                found.push(part);
            }
        }
        found
    }

    fn regions(&self, gold: &Node, pred: &Node) -> Option<bool> {
        if let (Node::Named(a), Node::Named(b)) = (gold, pred) {
            return Some(a == b);
        }
        if restates(gold, pred) {
            return Some(false);
        }
        if let (Some((a, name)), Some((b, other))) = (region(gold, true), region(pred, true)) {
            let named = name.is_none() || other.is_none() || name == other;
            return Some(named && a.equals(&b));
        }
        match (gold, pred) {
            (Node::Interval(a), Node::Interval(b)) => {
                let closed = a.low_closed == b.low_closed && a.high_closed == b.high_closed;
                if closed {
                    all([self.scalars(&a.low, &b.low), self.scalars(&a.high, &b.high)].into_iter())
                } else {
                    Some(false)
                }
            }
            (Node::Union(a, b), Node::Union(c, d)) => any([
                all([self.collections(a, c), self.collections(b, d)].into_iter()),
                all([self.collections(a, d), self.collections(b, c)].into_iter()),
            ]
            .into_iter()),
            (Node::Builder(a), Node::Builder(b)) => self.answers(a, b),
            (Node::Builder(a), b) => self.answers(a, b),
            (a, Node::Builder(b)) => self.answers(a, b),
            _ => Some(false),
        }
    }

    fn relations(&self, gold: &Node, pred: &Node) -> Option<bool> {
        let (Some(a), Some(b)) = (differences(gold), differences(pred)) else {
            return self.membership(gold, pred);
        };
        let equivalent = |(kind, difference): &(Relation, Node), (other, second): &(Relation, Node)| {
            kind == other
                && match identity::proportional(difference, second, self.seed, self.visits) {
                    Some(positive) => positive || matches!(kind, Relation::Equal | Relation::Unequal),
                    None => false,
                }
        };
        let matched = |a: &[(Relation, Node)], b: &[(Relation, Node)]| {
            a.iter().all(|x| b.iter().any(|y| equivalent(x, y)))
        };
        if a.len() == b.len() && matched(&a, &b) && matched(&b, &a) {
            return Some(true);
        }
        if is_inequality(gold)
            && is_inequality(pred)
            && !restates(gold, pred)
            && let (Some((a, name)), Some((b, other))) = (region(gold, true), region(pred, true))
        {
            return Some(name == other && a.equals(&b));
        }
        if let ([(Relation::Equal, a)], [(Relation::Equal, b)]) = (a.as_slice(), b.as_slice()) {
            return Some(super::curve::same(a, b, self.seed, self.visits));
        }
        Some(false)
    }

    /// Compares `x \in S` and other relations that are no equations.
    fn membership(&self, gold: &Node, pred: &Node) -> Option<bool> {
        if !restates(gold, pred)
            && let (Some((a, name)), Some((b, other))) = (region(gold, true), region(pred, true))
        {
            return Some((name.is_none() || other.is_none() || name == other) && a.equals(&b));
        }
        let (Node::Chain(a, left), Node::Chain(b, right)) = (gold, pred) else { return None };
        if left.len() != right.len() || left.iter().zip(right).any(|((a, _), (b, _))| a != b) {
            return Some(false);
        }
        let first = self.answers(a, b);
        all(std::iter::once(first).chain(left.iter().zip(right).map(|((_, a), (_, b))| self.answers(a, b))))
    }

    /// The value that the prediction assigns, in the variables of the reference, if both assign to the same name.
    fn same_name(&self, gold: &Node, pred: &Node, value: &Node) -> Option<Node> {
        if gold == pred || self.scalars(gold, pred) == Some(true) {
            return Some(value.clone());
        }
        let symbols = |nodes: &[Node]| {
            let name = |node: &Node| match node {
                Node::Symbol(name) => Some(name.clone()),
                _ => None,
            };
            nodes.iter().map(name).collect::<Option<Vec<String>>>()
        };
        match (gold, pred) {
            // W(n) = ... and W(x) = ... define one function.
            (Node::Apply(f, a), Node::Apply(g, b)) if f == g && a.len() == b.len() => {
                let (wanted, found) = (symbols(a)?, symbols(b)?);
                // g(s) = x is not g(x) = x.
                let taken =
                    |name: &str| value.any(&|node| matches!(node, Node::Symbol(other) if other == name));
                if wanted.iter().any(|name| !found.contains(name) && taken(name)) {
                    return None;
                }
                let at = |name: &str| found.iter().position(|known| known == name);
                Some(value.renamed(&|name| at(name).map_or(name, |at| &wanted[at]).to_owned()))
            }
            // So does W = ...
            (Node::Apply(f, arguments), Node::Symbol(g)) | (Node::Symbol(g), Node::Apply(f, arguments))
                if f == g && symbols(arguments).is_some() =>
            {
                Some(value.clone())
            }
            _ => None,
        }
    }

    /// The values of two records by name, with those of the second in the variables of the first. `None` if names differ.
    fn paired<'n>(
        &self,
        gold: &[(&'n Node, &'n Node)],
        pred: &[(&'n Node, &'n Node)],
    ) -> Option<Vec<(&'n Node, Node)>> {
        let partner = |name: &Node| pred.iter().find_map(|(known, other)| self.same_name(name, known, other));
        gold.iter().map(|(name, value)| Some((*value, partner(name)?))).collect()
    }

    fn scalars(&self, gold: &Node, pred: &Node) -> Option<bool> {
        self.left.set(self.left.get().checked_sub(1)?);
        if let (Node::Words(_), _) | (_, Node::Words(_)) = (gold, pred) {
            return Some(false);
        }
        let equal = |a: &Node, b: &Node| identity::equal(a, b, self.seed, self.visits);
        let (gold, unit) = without_unit(gold);
        let (pred, other) = without_unit(pred);
        if unit.is_some() && other.is_some() && unit != other {
            return Some(false);
        }
        // A plain number matches degrees or per cent without the sign, but not radians or a fraction.
        let radians = unit.as_deref() == Some("radian") || other.as_deref() == Some("radian");
        let turns = radians || gold.any(&|node| matches!(node, Node::Pi));
        match (gold, pred) {
            (Node::Percent(a), Node::Percent(b)) | (Node::Degree(a), Node::Degree(b)) => equal(a, b),
            (Node::Degree(_), b) if turns => equal(gold, b),
            (a, Node::Degree(_)) if turns => equal(a, pred),
            (a, Node::Percent(_)) if !plain_percentage(a) => equal(a, pred),
            (Node::Percent(a) | Node::Degree(a), b) => any([equal(a, b), equal(gold, b)].into_iter()),
            (a, Node::Percent(b) | Node::Degree(b)) => any([equal(a, b), equal(a, pred)].into_iter()),
            (Node::Based(a, base), Node::Based(b, other)) if base == other => Some(a == b),
            (Node::Based(digits, _), Node::Number(number)) if number.value.to_string() == *digits => {
                Some(true)
            }
            (Node::Ratio(a), Node::Ratio(b)) => self.ratios(a, b),
            (Node::Ratio(a), _) if time_of_day(a) => Some(false),
            (Node::Calculus(calculus), other) | (other, Node::Calculus(calculus)) => {
                antiderivative(calculus, other, self.seed, self.visits).unwrap_or_else(|| equal(gold, pred))
            }
            _ => equal(gold, pred),
        }
    }

    fn ratios(&self, a: &[Node], b: &[Node]) -> Option<bool> {
        if a.len() != b.len() {
            return Some(false);
        }
        let same = all(a.iter().zip(b).map(|(a, b)| identity::equal(a, b, self.seed, self.visits)));
        let halves = (a.last().and_then(meridiem), b.last().and_then(meridiem));
        if matches!(halves, (Some(a), Some(b)) if a != b) {
            return Some(false);
        }
        // With a zero it is a time of day, or no ratio at all.
        if same == Some(true) || time_of_day(a) || a.iter().chain(b).any(is_zero) {
            return same;
        }
        all((1..a.len()).map(|at| {
            let cross = |x: &Node, y: &Node| Node::Product(vec![x.clone(), y.clone()]);
            identity::equal(&cross(&a[0], &b[at]), &cross(&a[at], &b[0]), self.seed, self.visits)
        }))
    }
}

/// Whether `other` is an antiderivative of an indefinite integral; `None` if there is no such integral.
#[expect(clippy::option_option, reason = "an unknown answer is not the same as no question")]
fn antiderivative(calculus: &Calculus, other: &Node, seed: u64, left: &Cell<u32>) -> Option<Option<bool>> {
    let Calculus::Integral(body, variable, None) = calculus else { return None };
    if let Node::Calculus(second) = other {
        let Calculus::Integral(second, name, None) = &**second else { return None };
        return Some(if name == variable { identity::equal(body, second, seed, left) } else { Some(false) });
    }
    Some(
        super::calculus::differentiate(other, variable, left)
            .and_then(|slope| identity::equal(body, &slope, seed, left)),
    )
}

/// Conjunction of verdicts: `false` before unknown before `true`.
fn all(verdicts: impl Iterator<Item = Option<bool>>) -> Option<bool> {
    let mut result = Some(true);
    for verdict in verdicts {
        match verdict {
            Some(false) => return Some(false),
            None => result = None,
            Some(true) => {}
        }
    }
    result
}

/// Disjunction of verdicts: `true` before unknown before `false`.
fn any(verdicts: impl Iterator<Item = Option<bool>>) -> Option<bool> {
    all(verdicts.map(|verdict| verdict.map(|verdict| !verdict))).map(|none| !none)
}

fn is_zero(node: &Node) -> bool {
    matches!(node, Node::Number(literal) if literal.value == num_rational::BigRational::from_integer(0.into()))
}

fn is_equation(node: &Node) -> bool {
    matches!(node, Node::Chain(_, rest) if rest.iter().all(|(relation, _)| *relation == Relation::Equal))
}

fn is_inequality(node: &Node) -> bool {
    use Relation::{Greater, GreaterEqual, Less, LessEqual, Unequal};
    let one = |relation: &Relation| matches!(relation, Less | LessEqual | Greater | GreaterEqual | Unequal);
    matches!(node, Node::Chain(_, rest) if rest.iter().any(|(relation, _)| one(relation)))
}

fn is_region(node: &Node) -> bool {
    use Node::{Builder, Difference, Intersection, Interval, Named, Union};
    matches!(node, Interval(_) | Union(..) | Intersection(..) | Difference(..) | Builder(_) | Named(_))
        || is_inequality(node)
}

/// Whether the answer has an unsolved absolute value where the reference is solved: `|2x + 1| < 5` for `(-3, 2)` repeats
/// the question. `|x - 1| < 2` counts as solved, like `(-1, 3)`.
fn restates(gold: &Node, pred: &Node) -> bool {
    let varies = |node: &Node| {
        let mut names = vec![];
        node.variables(&mut names);
        !names.is_empty()
    };
    let absolute = |node: &Node| matches!(node, Node::Function(MathFunction::Abs, _)) && varies(node);
    // `x`, `x + c` and `c - x`: a plain variable and terms without any.
    let shifted = |node: &Node| {
        let terms = if let Node::Sum(terms) = node { terms.as_slice() } else { std::slice::from_ref(node) };
        let plain = |term: &&Node| match term {
            Node::Negate(part) => matches!(&**part, Node::Symbol(_)),
            term => matches!(term, Node::Symbol(_)),
        };
        terms.iter().filter(|term| varies(term)).all(|term| plain(&term))
    };
    let solved = |side: &Node| match side {
        Node::Function(MathFunction::Abs, inner) => inner.iter().all(shifted),
        side => !varies(side),
    };
    let leaves = |node: &Node| match node {
        Node::Chain(first, rest) if node.any(&absolute) => {
            !(solved(first) && rest.iter().all(|(_, side)| solved(side)))
        }
        _ => false,
    };
    pred.any(&leaves) && !gold.any(&absolute)
}

/// Joined inequalities about one variable.
fn region_list(node: &Node) -> bool {
    matches!(node, Node::List(_, parts) if parts.iter().all(is_inequality) && region(node, true).is_some())
}

fn elements(node: &Node) -> Option<&[Node]> {
    match node {
        Node::List(_, parts) | Node::Set(parts) | Node::Tuple(parts) => Some(parts),
        _ => None,
    }
}

/// Left minus right of every relation of a chain, turned to `=`, `\ne`, `<` or `\le`.
fn differences(node: &Node) -> Option<Vec<(Relation, Node)>> {
    let Node::Chain(first, rest) = node else { return None };
    let mut left = &**first;
    let mut found = vec![];
    for (relation, right) in rest {
        let (a, b, relation) = match relation {
            Relation::Greater | Relation::GreaterEqual => (right, left, flipped(*relation)),
            Relation::Equal | Relation::Unequal | Relation::Less | Relation::LessEqual => {
                (left, right, *relation)
            }
            _ => return None,
        };
        if elements(a).is_some() || elements(b).is_some() {
            return None;
        }
        found.push((relation, a.clone().minus(b.clone())));
        left = right;
    }
    Some(found)
}

/// The scalar without its unit, and the unit if it is physical.
fn without_unit(node: &Node) -> (&Node, Option<String>) {
    let Node::Quantity(part, unit) = node else { return (node, None) };
    (part, units::physical(unit))
}

/// The answer with both signs of `\pm` expanded, and without approximations and remarks on integers.
fn settled(node: &Node) -> Node {
    let node = match node {
        Node::Chain(first, rest) => settled_chain(first, rest),
        Node::List(joint, parts) => {
            let remark = |part: &Node| matches!(part, Node::Chain(_, rest) if matches!(rest.as_slice(), [(Relation::In, Node::Named('Z' | 'N'))]));
            let kept: Vec<Node> = parts.iter().filter(|part| !remark(part)).map(settled).collect();
            match kept.len() {
                0 => node.clone(),
                1 => kept[0].clone(),
                _ => Node::List(*joint, flattened(kept)),
            }
        }
        Node::Set(parts) => Node::Set(flattened(parts.iter().map(settled).collect())),
        node => node.clone(),
    };
    match node {
        Node::List(..) | Node::Set(_) | Node::Chain(..) => node,
        node if node.has_signs() => {
            Node::List(Joint::Comma, vec![node.with_signs(true), node.with_signs(false)])
        }
        node => node,
    }
}

fn settled_chain(first: &Node, rest: &[(Relation, Node)]) -> Node {
    let approximate = rest.iter().position(|(relation, _)| *relation == Relation::Approximately);
    let mut rest = rest.to_vec();
    match approximate {
        Some(0) if is_name(first) => rest[0].0 = Relation::Equal,
        Some(0) if close(first, &rest[0].1) => return settled(first),
        Some(0) => return Node::Words("a wrong approximation".to_owned()),
        _ => {}
    }
    if let Some(at) = rest.iter().position(|(relation, _)| *relation == Relation::Approximately) {
        rest.truncate(at);
    }
    if let Some((Relation::Equal, last)) = rest.last_mut() {
        *last = settled(last);
    }
    Node::Chain(Box::new(first.clone()), rest)
}

/// Flattens lists within a list.
fn flattened(parts: Vec<Node>) -> Vec<Node> {
    let mut flat = vec![];
    for part in parts {
        match part {
            Node::List(_, inner) => flat.extend(inner),
            part => flat.push(part),
        }
    }
    flat
}

/// Both answers with variables in lower case, unless one of them distinguishes variables by case.
fn one_spelling(gold: &Node, pred: &Node) -> (Node, Node) {
    let capital = |node: &Node| {
        node.any(&|node| match node {
            Node::Symbol(name) | Node::Apply(name, _) => name.bytes().any(|byte| byte.is_ascii_uppercase()),
            _ => false,
        })
    };
    let clashes = |node: &Node| {
        let mut names = vec![];
        node.variables(&mut names);
        let lower: Vec<String> = names.iter().map(|name| name.to_ascii_lowercase()).collect();
        lower.iter().enumerate().any(|(at, name)| lower[..at].contains(name))
    };
    if !(capital(gold) || capital(pred)) || clashes(gold) || clashes(pred) {
        return (gold.clone(), pred.clone());
    }
    let lower = |name: &str| match name {
        "E" | "I" => name.to_owned(),
        name => name.to_ascii_lowercase(),
    };
    (gold.renamed(&lower), pred.renamed(&lower))
}

/// The prediction with its variables named as in the reference, in order of appearance.
fn renamed_as(gold: &Node, pred: &Node) -> Node {
    let (mut wanted, mut found) = (vec![], vec![]);
    gold.variables(&mut wanted);
    pred.variables(&mut found);
    if wanted.len() != found.len() {
        return pred.clone();
    }
    pred.renamed(&|name| {
        let at = found.iter().position(|known| *known == name);
        at.map_or(name, |at| wanted[at]).to_owned()
    })
}
