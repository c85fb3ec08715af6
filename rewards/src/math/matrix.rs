//! Matrices: sums, products, multiples and powers of them, cell by cell.
//!
//! Invariant: cells are built and not evaluated. Their number and their size are bounded, so the work is small.

use num_traits::ToPrimitive;

use super::node::Node;
use super::rational;

/// Most rows or columns in a product.
const MAX_SIZE: usize = 10;
/// Most rows or columns in a product with cells that are not numbers. Such cells grow with every product.
const MAX_SYMBOLIC: usize = 4;
/// Most nodes in all cells of a product.
const MAX_NODES: usize = 10_000;
/// Greatest power that is multiplied out.
const MAX_POWER: u32 = 4;

/// The cells of a matrix; `None` if the tree is no matrix.
pub(super) fn cells(node: &Node) -> Option<Vec<Vec<Node>>> {
    match node {
        Node::Matrix(rows) => Some(rows.clone()),
        Node::Negate(part) => Some(scaled(&cells(part)?, &Node::integer(-1))),
        Node::Quantity(part, _) => cells(part),
        Node::Transpose(part) => {
            let rows = cells(part)?;
            Some(
                (0..rows[0].len())
                    .map(|column| rows.iter().map(|row| row[column].clone()).collect())
                    .collect(),
            )
        }
        Node::Quotient(part, by) => {
            let inverse = Node::Quotient(Box::new(Node::integer(1)), by.clone());
            Some(scaled(&cells(part)?, &inverse))
        }
        Node::Sum(terms) => {
            let mut terms = terms.iter().map(cells);
            let first = terms.next()??;
            terms.try_fold(first, |sum, term| added(&sum, &term?))
        }
        Node::Product(factors) => {
            let mut product: Option<Vec<Vec<Node>>> = None;
            let mut multiples = vec![];
            for factor in factors {
                match (cells(factor), product.take()) {
                    (Some(next), None) => product = Some(next),
                    (Some(next), Some(before)) => product = Some(multiplied(&before, &next)?),
                    (None, before) => {
                        multiples.push(factor.clone());
                        product = before;
                    }
                }
            }
            let product = product?;
            Some(if multiples.is_empty() { product } else { scaled(&product, &Node::Product(multiples)) })
        }
        Node::Power(base, exponent) => {
            let base = cells(base)?;
            let exponent =
                rational::exact(exponent).filter(|exponent| exponent.is_integer())?.numer().to_u32()?;
            if !(1..=MAX_POWER).contains(&exponent) || base.len() > 3 {
                return None;
            }
            (1..exponent).try_fold(base.clone(), |power, _| multiplied(&power, &base))
        }
        _ => None,
    }
}

fn scaled(rows: &[Vec<Node>], by: &Node) -> Vec<Vec<Node>> {
    let cell = |cell: &Node| Node::Product(vec![by.clone(), cell.clone()]);
    rows.iter().map(|row| row.iter().map(cell).collect()).collect()
}

fn added(a: &[Vec<Node>], b: &[Vec<Node>]) -> Option<Vec<Vec<Node>>> {
    if a.len() != b.len() || a[0].len() != b[0].len() {
        return None;
    }
    let sum = |(a, b): (&Node, &Node)| Node::Sum(vec![a.clone(), b.clone()]);
    Some(a.iter().zip(b).map(|(a, b)| a.iter().zip(b).map(sum).collect()).collect())
}

fn multiplied(a: &[Vec<Node>], b: &[Vec<Node>]) -> Option<Vec<Vec<Node>>> {
    let size = a.len().max(b.len()).max(b[0].len());
    let number = |cell: &Node| rational::exact(cell).is_some();
    let numbers = a.iter().chain(b).flatten().all(number);
    if a[0].len() != b.len() || size > if numbers { MAX_SIZE } else { MAX_SYMBOLIC } {
        return None;
    }
    let cell = |row: &[Node], column: usize| {
        let terms = row.iter().zip(b).map(|(x, row)| Node::Product(vec![x.clone(), row[column].clone()]));
        simplified(Node::Sum(terms.collect()))
    };
    let rows: Vec<Vec<Node>> =
        a.iter().map(|row| (0..b[0].len()).map(|column| cell(row, column)).collect()).collect();
    (rows.iter().flatten().map(Node::size).sum::<usize>() <= MAX_NODES).then_some(rows)
}

/// Folds a constant cell into a number, so that products of products stay small.
fn simplified(node: Node) -> Node {
    rational::exact(&node).map_or(node, Node::rational)
}
