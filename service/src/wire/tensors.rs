//! Tensors of requests: dense and in compressed rows, of four types, made dense in f32 or i64.
//!
//! Invariant: the numbers of a tensor are `shape`'s product. What a sparse tensor would take is counted before it is made dense.

use super::protobuf::{ElementType, TensorLayout, TensorMessage};
use super::{MAX_ELEMENTS, WireError, refuse};
use crate::data::{LossTensor, LossValues};

/// Numbers that tensors of a request may still have.
#[derive(Debug)]
pub(super) struct ElementBudget(usize);

impl ElementBudget {
    pub(super) fn new() -> Self {
        Self(MAX_ELEMENTS)
    }

    fn take(&mut self, name: &str, elements: usize) -> Result<(), WireError> {
        let Some(left) = self.0.checked_sub(elements) else {
            return refuse(format!(
                "`{name}`: the tensors of this request have more than {MAX_ELEMENTS} numbers; send fewer sequences at once"
            ));
        };
        self.0 = left;
        Ok(())
    }
}

/// A tensor as it was sent.
#[derive(Debug)]
pub(super) struct SentTensor {
    pub(super) values: LossValues,
    /// `None` for one dimension.
    pub(super) shape: Option<Vec<i64>>,
    /// `[rows + 1]` where rows begin and `[listed]` columns, if it is sparse.
    pub(super) csr: Option<(Vec<i64>, Vec<i64>)>,
}

impl SentTensor {
    pub(super) fn from_message(name: &str, message: TensorMessage) -> Result<Self, WireError> {
        let kind = ElementType::try_from(message.dtype).unwrap_or(ElementType::Unspecified);
        let (bytes, csr) = match message.layout {
            None => (Vec::new(), None),
            Some(TensorLayout::Dense(bytes)) => (bytes, None),
            Some(TensorLayout::SparseCsr(csr)) => {
                let rows = longs(&format!("{name}.crow_indices"), &csr.crow_indices)?;
                let columns = longs(&format!("{name}.col_indices"), &csr.col_indices)?;
                (csr.values, Some((rows, columns)))
            }
        };
        let values = match kind {
            ElementType::Float32 => LossValues::Float(numbers(name, &bytes, f32::from_le_bytes)?),
            ElementType::Bfloat16 => LossValues::Float(numbers(name, &bytes, |half| {
                f32::from_bits(u32::from(u16::from_le_bytes(half)) << 16)
            })?),
            ElementType::Int64 => LossValues::Int(longs(name, &bytes)?),
            ElementType::Int32 => {
                LossValues::Int(numbers(name, &bytes, |word| i64::from(i32::from_le_bytes(word)))?)
            }
            ElementType::Unspecified => {
                return refuse(format!("`{name}`: type {} of a tensor is not known", message.dtype));
            }
        };
        // The SDK sends one dimension without a shape; a shape of no dimensions looks the same.
        let shape = Some(message.shape).filter(|shape| !shape.is_empty());
        Ok(Self { values, shape, csr })
    }

    /// With every number; those that are not listed are 0, or `absent` among integers.
    pub(super) fn dense(
        self,
        name: &str,
        absent: i64,
        budget: &mut ElementBudget,
    ) -> Result<LossTensor, WireError> {
        let listed = match &self.values {
            LossValues::Float(values) => values.len(),
            LossValues::Int(values) => values.len(),
        };
        let Some(sent) = self.shape else {
            if self.csr.is_some() {
                return refuse(format!("`{name}`: a sparse tensor needs its shape"));
            }
            budget.take(name, listed)?;
            return Ok(LossTensor { values: self.values, shape: vec![listed] });
        };
        // Also beside a size of 0, which makes any product 0.
        let size = |size: &i64| usize::try_from(*size).ok().filter(|size| *size <= MAX_ELEMENTS);
        let shape: Option<Vec<usize>> = sent.iter().map(size).collect();
        let elements = shape.iter().flatten().try_fold(1_usize, |all, size| all.checked_mul(*size));
        let (Some(shape), Some(elements)) = (shape, elements) else {
            return refuse(format!("`{name}`: no tensor has the shape {sent:?}"));
        };
        budget.take(name, elements)?;
        let Some((rows, columns)) = self.csr else {
            if elements != listed {
                return refuse(format!(
                    "`{name}`: shape {shape:?} has {elements} numbers, {listed} were sent"
                ));
            }
            return Ok(LossTensor { values: self.values, shape });
        };
        let [height, width] = shape[..] else {
            return refuse(format!("`{name}`: a sparse tensor has two dimensions, not the shape {shape:?}"));
        };
        let layout = CsrLayout { rows: &rows, columns: &columns, height, width };
        let values = match self.values {
            LossValues::Float(values) => LossValues::Float(layout.dense(name, &values, 0.0)?),
            LossValues::Int(values) => LossValues::Int(layout.dense(name, &values, absent)?),
        };
        Ok(LossTensor { values, shape })
    }
}

/// Where the listed numbers of a sparse matrix are.
struct CsrLayout<'a> {
    rows: &'a [i64],
    columns: &'a [i64],
    height: usize,
    width: usize,
}

impl CsrLayout<'_> {
    fn dense<T: Copy>(&self, name: &str, listed: &[T], absent: T) -> Result<Vec<T>, WireError> {
        let Self { rows, columns, height, width } = *self;
        let bad = |what: &str| WireError(format!("`{name}`: the indices of the sparse tensor have {what}"));
        if rows.len() != height + 1 {
            return Err(bad("not one beginning per row and an end"));
        }
        if columns.len() != listed.len() || rows[0] != 0 || rows[height] != listed.len() as i64 {
            return Err(bad("another number of values than its columns and rows say"));
        }
        let mut whole = vec![absent; height * width];
        for (row, bounds) in rows.windows(2).enumerate() {
            let bound = |at: i64| usize::try_from(at).ok().filter(|at| *at <= listed.len());
            let (Some(begin), Some(end)) = (bound(bounds[0]), bound(bounds[1])) else {
                return Err(bad("a row outside of its values"));
            };
            if begin > end {
                return Err(bad("a row that ends before it begins"));
            }
            for (column, value) in columns[begin..end].iter().zip(&listed[begin..end]) {
                let column = usize::try_from(*column).ok().filter(|column| *column < width);
                let column = column.ok_or_else(|| bad("a column outside of its shape"))?;
                whole[row * width + column] = *value;
            }
        }
        Ok(whole)
    }
}

/// The numbers of an array of `N` bytes each.
pub(super) fn numbers<const N: usize, T>(
    name: &str,
    bytes: &[u8],
    read: impl Fn([u8; N]) -> T,
) -> Result<Vec<T>, WireError> {
    let (whole, rest) = bytes.as_chunks::<N>();
    if !rest.is_empty() {
        return refuse(format!("`{name}`: {} bytes are no array of numbers of {N} bytes", bytes.len()));
    }
    Ok(whole.iter().map(|number| read(*number)).collect())
}

fn longs(name: &str, bytes: &[u8]) -> Result<Vec<i64>, WireError> {
    numbers(name, bytes, i64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sparse(shape: Vec<i64>, rows: Vec<i64>, columns: Vec<i64>, values: Vec<i64>) -> SentTensor {
        SentTensor { values: LossValues::Int(values), shape: Some(shape), csr: Some((rows, columns)) }
    }

    #[test]
    fn compressed_rows_are_made_dense() {
        let tensor = sparse(vec![3, 2], vec![0, 1, 1, 3], vec![1, 0, 1], vec![7, 8, 9]);
        let dense = tensor.dense("target_tokens", -1, &mut ElementBudget::new()).unwrap();
        assert_eq!(dense.values, LossValues::Int(vec![-1, 7, -1, -1, 8, 9]));
        assert_eq!(dense.shape, [3, 2]);
    }

    #[test]
    fn indices_that_lie_are_refused() {
        for (shape, rows, columns) in [
            (vec![3, 2], vec![0, 1, 3], vec![1, 0, 1]),
            (vec![3, 2], vec![0, 1, 1, 2], vec![1, 0, 1]),
            (vec![3, 2], vec![0, 5, 1, 3], vec![1, 0, 1]),
            (vec![3, 2], vec![0, -1, 1, 3], vec![1, 0, 1]),
            (vec![3, 2], vec![0, 2, 1, 3], vec![1, 0, 1]),
            (vec![3, 2], vec![0, 1, 1, 3], vec![1, 0, 2]),
            (vec![3, 2], vec![0, 1, 1, 3], vec![1, 0, -1]),
            (vec![3, 2], vec![0, 1, 1, 3], vec![1, 0]),
            (vec![6], vec![0, 1, 1, 3], vec![1, 0, 1]),
            (vec![3, -2], vec![0, 1, 1, 3], vec![1, 0, 1]),
        ] {
            let tensor = sparse(shape.clone(), rows.clone(), columns, vec![7, 8, 9]);
            let error = tensor.dense("weights", 0, &mut ElementBudget::new()).unwrap_err();
            assert!(error.0.contains("`weights`"), "{shape:?} {rows:?}: {error}");
        }
    }

    /// The second tensor is refused although each alone is within the limit; so is a shape whose product overflows.
    #[test]
    fn sparse_tensors_are_counted_before_they_are_made_dense() {
        let mut budget = ElementBudget::new();
        let half = MAX_ELEMENTS as i64 / 2 + 1;
        let tensor = || sparse(vec![1, half], vec![0, 0], Vec::new(), Vec::new());
        tensor().dense("weights", 0, &mut budget).unwrap();
        let error = tensor().dense("weights", 0, &mut budget).unwrap_err();
        assert!(error.0.contains("send fewer sequences"), "{error}");
        for shape in [vec![i64::MAX, i64::MAX], vec![i64::MAX, 0]] {
            let huge = sparse(shape, vec![0], Vec::new(), Vec::new());
            assert!(huge.dense("weights", 0, &mut budget).unwrap_err().0.contains("no tensor has the shape"));
        }
    }
}
